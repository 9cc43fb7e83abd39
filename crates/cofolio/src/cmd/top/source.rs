//! Where the figures come from: a daemon, or a ledger in this process.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use cofolio_daemon::{Client, ClientError, Files, Users, Version};
use cofolio_image::reference::DIGEST_DIGITS_MIN;
use cofolio_node::ledger::{
    Budget, Ledger, LedgerError, ReclaimRequest, Reclaimed, Report, UsedImage,
};
use cofolio_store::{Store, with_causes};

use super::rows::{Detail, FILES_MAX, View};
use crate::context::Context;
use crate::exit::Fail;

/// How long a daemon may take to say which store it serves.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// How long `--once` waits for the first figures of a daemon that has just started.
const FIRST_FIGURES: Duration = Duration::from_secs(10);
/// How long a daemon may take to drop pages. Once it has begun, only its answer says what went.
const RECLAIM: Duration = Duration::from_secs(3600);
/// How often opened files are taken from the kernel's queue. The container of a process that has
/// ended by then is unknown.
const TAKE_OPENS: Duration = Duration::from_millis(100);

/// Where the figures come from.
#[derive(Debug)]
pub(in crate::cmd) enum Source {
    Daemon(Client),
    Here { ledger: Box<Ledger>, sees_opens: bool },
}

impl Source {
    /// The daemon, if one answers that serves this store; otherwise a ledger of this process.
    /// `watch`: that ledger notes from now on who opens files.
    ///
    /// Members of the daemon's group may not be able to read the store. They get the figures of the
    /// daemon without this check.
    pub(in crate::cmd) fn open(context: &Context<'_>, watch: bool) -> anyhow::Result<Self> {
        let client = Client::at(context.socket());
        let served = client
            .clone()
            .with_patience(FIRST_ANSWER)
            .get("/v1/version")
            .map(|it: Version| it.store);
        let store = Store::open(&context.global.store);
        match (&served, &store) {
            (Ok(served), Ok(store)) if served == store.id() => return Ok(Self::Daemon(client)),
            (Ok(_), Err(_)) if context.needs_root().is_err() => return Ok(Self::Daemon(client)),
            (Ok(_), Err(_)) => {}
            (Ok(_), Ok(_)) => {
                let socket = client.socket().display();
                context.ui.note(format!("the daemon at {socket} serves another store"));
            }
            (Err(error), _) if is_there(error) => {
                let why = with_causes(error);
                context.ui.note(format!("the daemon does not answer, so it is not asked: {why}"));
            }
            (Err(_), _) => {}
        }
        context.needs_root()?;
        let store = store?;
        let run = context.run_dir_of(&store);
        let mut ledger = Box::new(Ledger::new(store, run));
        let sees_opens = watch && ledger.watch_opens().is_ok();
        Ok(Self::Here { ledger, sees_opens })
    }

    /// For the title, the most important part first.
    pub(super) fn title(&self) -> &'static [&'static str] {
        match self {
            Self::Daemon(_) => &["figures of the daemon"],
            Self::Here { sees_opens: true, .. } => &["no daemon", "opened files from now on"],
            Self::Here { sees_opens: false, .. } => &["no daemon", "mapped files only"],
        }
    }

    /// The accounts now, or as the daemon has added them up last; of one trust domain if it is
    /// named.
    fn report(&mut self, domain: Option<&str>) -> anyhow::Result<Report> {
        let mut report: Report = match self {
            Self::Daemon(client) => client.get("/v1/report")?,
            Self::Here { ledger, .. } => {
                ledger.sample_all()?;
                ledger.report()?
            }
        };
        if let Some(domain) = domain {
            report.domains.retain(|it| it.domain == domain);
            report.images.retain(|it| it.domain == domain);
            report.containers.retain(|it| it.images.iter().any(|used| used.domain == domain));
            if report.domains.is_empty() && report.time != 0 {
                return Err(Fail::not_found(format!("no trust domain {domain}")).into());
            }
        }
        Ok(report)
    }

    /// The same, but waits for the first round of a daemon that has just started.
    pub(super) fn first_report(&mut self, domain: Option<&str>) -> anyhow::Result<Report> {
        let until = Instant::now() + FIRST_FIGURES;
        loop {
            let report = self.report(domain)?;
            if report.time != 0 || Instant::now() >= until {
                return Ok(report);
            }
            std::thread::sleep(TAKE_OPENS);
        }
    }

    /// What a view shows besides the report.
    fn detail(&mut self, view: &View) -> anyhow::Result<Detail> {
        let gone = || Fail::not_found("it no longer exists");
        Ok(match (self, view) {
            (Self::Daemon(client), View::Files { domain, image, .. }) => {
                let path =
                    format!("/v1/images/{domain}/{image}/files?sort=resident&limit={FILES_MAX}");
                let Files { total, files, .. } = client.get(&path)?;
                Detail::Files { files, total }
            }
            (Self::Daemon(client), View::Users { domain, object, .. }) => {
                let found: Users = client.get(&format!("/v1/objects/{domain}/{object}/users"))?;
                Detail::Users(found.users)
            }
            (Self::Here { ledger, .. }, View::Files { domain, image, .. }) => {
                let mut files = ledger.files(domain, image)?.ok_or_else(gone)?;
                let total = files.len() as u64;
                files.sort_by_key(|file| std::cmp::Reverse(file.resident_bytes));
                files.truncate(FILES_MAX);
                Detail::Files { files, total }
            }
            (Self::Here { ledger, .. }, View::Users { domain, object, .. }) => {
                Detail::Users(ledger.users(domain, object).ok_or_else(gone)?)
            }
            _ => Detail::None,
        })
    }

    /// Whether it has seen which files were opened before now.
    pub(in crate::cmd) fn is_daemon(&self) -> bool {
        matches!(self, Self::Daemon(_))
    }

    /// Drops pages.
    pub(in crate::cmd) fn reclaim(
        &mut self,
        request: &ReclaimRequest,
    ) -> anyhow::Result<Reclaimed> {
        match self {
            Self::Daemon(client) => {
                match client.clone().with_patience(RECLAIM).post("/v1/reclaim", request) {
                    Err(ClientError::Refused { status: 404, why, .. }) => {
                        Err(Fail::not_found(why).into())
                    }
                    answered => Ok(answered?),
                }
            }
            Self::Here { ledger, .. } => {
                ledger.sample_all()?;
                ledger.reclaim(request).map_err(|error| match error {
                    LedgerError::NotFound { .. } => Fail::not_found(error.to_string()).into(),
                    error => error.into(),
                })
            }
        }
    }

    /// The image of the trust domain in use that a ref or the first digits of a digest name.
    /// Whoever may not read the store has the daemon's report for that.
    pub(in crate::cmd) fn image(
        &mut self,
        context: &Context<'_>,
        text: &str,
    ) -> anyhow::Result<UsedImage> {
        let domain = context.global.domain.clone();
        if !self.is_daemon() || context.needs_root().is_ok() {
            let image = context.image(&context.domain()?, text)?.digest;
            return Ok(UsedImage { domain, image });
        }
        let mut images = self.report(Some(&domain))?.images;
        if images.iter().any(|it| it.names.iter().any(|name| name == text)) {
            images.retain(|it| it.names.iter().any(|name| name == text));
        } else {
            let digits = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
            let is_it = |digest: String| digest.starts_with(&digits);
            images.retain(|it| digits.len() >= DIGEST_DIGITS_MIN && is_it(it.image.to_string()));
        }
        match &images[..] {
            [one] => Ok(UsedImage { domain, image: one.image }),
            [] => Err(Fail::not_found(format!("no image `{text}` in domain `{domain}`")).into()),
            [..] => {
                let what = format!("`{text}` is the beginning of {} digests", images.len());
                Err(Fail::usage(what).into())
            }
        }
    }

    fn take_opens(&mut self) {
        if let Self::Here { ledger, .. } = self {
            // The next report fails as well, and says so.
            let _ = ledger.take_opens(&Budget::of(TAKE_OPENS));
        }
    }
}

/// Whether something listens at the socket.
fn is_there(error: &ClientError) -> bool {
    let ClientError::Io { source, .. } = error else { return true };
    !matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// A question, and what its answer is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Report,
    Detail(View),
}

/// An answer.
#[derive(Debug)]
pub(super) enum Answer {
    Report(Box<Report>),
    Detail(View, Detail),
    /// Why there is none.
    Failed(String),
}

/// A thread that asks, so that the screen reacts to keys meanwhile. It ends with the process. A
/// look at a large store cannot be interrupted, and has nothing to undo.
#[derive(Debug)]
pub(super) struct Worker {
    asks: Sender<Ask>,
    answers: Receiver<Answer>,
    pending: usize,
}

impl Worker {
    pub(super) fn start(mut source: Source, domain: Option<String>) -> io::Result<Self> {
        let (asks, asked) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let work = move || {
            loop {
                let ask = match asked.recv_timeout(TAKE_OPENS) {
                    Ok(ask) => ask,
                    Err(RecvTimeoutError::Timeout) => {
                        source.take_opens();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                let answered = match ask {
                    Ask::Report => {
                        let report = source.report(domain.as_deref());
                        report.map(|it| Answer::Report(Box::new(it)))
                    }
                    Ask::Detail(view) => source.detail(&view).map(|it| Answer::Detail(view, it)),
                };
                let failed = |error: anyhow::Error| Answer::Failed(with_causes(error.as_ref()));
                if answer.send(answered.unwrap_or_else(failed)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("figures".to_owned()).spawn(work)?;
        Ok(Self { asks, answers, pending: 0 })
    }

    /// Whether an answer is still to come.
    pub(super) fn is_busy(&self) -> bool {
        self.pending > 0
    }

    pub(super) fn ask(&mut self, ask: Ask) {
        // If the thread has ended, the next look for an answer finds out.
        self.pending += usize::from(self.asks.send(ask).is_ok());
    }

    /// The next answer, if it is there.
    pub(super) fn answer(&mut self) -> anyhow::Result<Option<Answer>> {
        match self.answers.try_recv() {
            Ok(answer) => {
                self.pending = self.pending.saturating_sub(1);
                Ok(Some(answer))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => anyhow::bail!("the ledger's thread has ended"),
        }
    }
}
