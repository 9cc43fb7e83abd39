//! Where the figures come from: a daemon, or a ledger in this process.

use std::io;
use std::time::{Duration, Instant};

use cofolio_daemon::{Client, ClientError, Files, Users, Version};
use cofolio_image::reference::DIGEST_DIGITS_MIN;
use cofolio_node::ledger::{
    Budget, FileOrder, ImageFile, ImageFiles, Ledger, LedgerError, ObjectUser, ReclaimRequest,
    ReclaimTarget, Reclaimed, Report, UsedImage,
};
use cofolio_store::{Digest, Store, with_causes};
use rustix::process::geteuid;

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
pub(super) const TAKE_OPENS: Duration = Duration::from_millis(100);

/// Where the figures come from.
#[derive(Debug)]
pub(super) enum Source {
    Daemon(Client),
    Here { ledger: Box<Ledger>, sees_opens: bool },
}

impl Source {
    /// The daemon, if one answers that serves this store; otherwise a ledger of this process.
    /// `watch`: that ledger notes from now on who opens files.
    ///
    /// Members of the daemon's group may not be able to read the store. They get the figures of the
    /// daemon without this check.
    pub(super) fn open(context: &Context<'_>, watch: bool) -> anyhow::Result<Self> {
        let client = Client::at(context.socket());
        let served = client
            .clone()
            .with_patience(FIRST_ANSWER)
            .get("/v1/version")
            .map(|it: Version| it.store);
        let served = match served {
            Err(error @ ClientError::Denied { .. }) if !geteuid().is_root() => {
                return Err(error.into());
            }
            // It knows more than this process would: it is only busy.
            Err(error @ (ClientError::Refused { .. } | ClientError::Closed { .. })) => {
                return Err(error.into());
            }
            served => served,
        };
        let store = Store::open(&context.global.store);
        match (&served, &store) {
            (Ok(served), Ok(store)) if served == store.id() => return Ok(Self::Daemon(client)),
            (Ok(_), Err(_)) if !geteuid().is_root() => return Ok(Self::Daemon(client)),
            (Ok(_), Err(_)) => {}
            (Ok(_), Ok(_)) => {
                let socket = client.socket().display();
                context.ui.note(format!("the daemon at {socket} serves another store"));
            }
            (Err(error), _) if is_there(error) => {
                let why = with_causes(error);
                context.ui.note(format!(
                    "the daemon does not answer ({why}): these figures are this command's own"
                ));
            }
            (Err(_), _) => {}
        }
        context.needs_root("looking without a daemon")?;
        let store = store?;
        let run = context.run_dir_of(&store)?;
        let mut ledger = Box::new(Ledger::new(store, run));
        if let Some(error) = ledger.cgroup_error() {
            let what = "cannot distinguish containers or notice their end";
            context.ui.note(format!("{what}: {error}"));
        }
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
    pub(super) fn report(&mut self, domain: Option<&str>) -> anyhow::Result<Report> {
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

    /// The files of an image with most resident, at most `max`, and how many files it has.
    pub(super) fn files(
        &mut self,
        domain: &str,
        image: &Digest,
        max: usize,
    ) -> anyhow::Result<(Vec<ImageFile>, u64)> {
        match self {
            Self::Daemon(client) => {
                let path = format!("/v1/images/{domain}/{image}/files?sort=resident&limit={max}");
                let Files { total, files, .. } = client.get(&path)?;
                Ok((files, total))
            }
            Self::Here { ledger, .. } => {
                let found = ledger.files(domain, image, FileOrder::Resident, max)?;
                let ImageFiles { total, files } = found.ok_or_else(gone)?;
                Ok((files, total))
            }
        }
    }

    /// Who uses an object.
    pub(super) fn users(
        &mut self,
        domain: &str,
        object: &Digest,
    ) -> anyhow::Result<Vec<ObjectUser>> {
        match self {
            Self::Daemon(client) => {
                let found: Users = client.get(&format!("/v1/objects/{domain}/{object}/users"))?;
                Ok(found.users)
            }
            Self::Here { ledger, .. } => Ok(ledger.users(domain, object).ok_or_else(gone)?),
        }
    }

    /// Whether it has seen which files were opened before now.
    pub(super) fn is_daemon(&self) -> bool {
        matches!(self, Self::Daemon(_))
    }

    /// Drops pages.
    pub(super) fn reclaim(&mut self, request: &ReclaimRequest) -> anyhow::Result<Reclaimed> {
        let not_found = |why: String| match &request.target {
            ReclaimTarget::Container(name) if !name.starts_with('/') => {
                Fail::not_found(why).hint("`cofolio ps` lists containers")
            }
            _ => Fail::not_found(why),
        };
        match self {
            Self::Daemon(client) => {
                match client.clone().with_patience(RECLAIM).post("/v1/reclaim", request) {
                    Err(ClientError::Refused { status: 404, why, .. }) => {
                        Err(not_found(why).into())
                    }
                    Err(ClientError::Refused { status: 409, why, .. }) => {
                        Err(Fail::damaged(why).into())
                    }
                    answered => Ok(answered?),
                }
            }
            Self::Here { ledger, .. } => {
                ledger.sample_all()?;
                ledger.reclaim(request).map_err(|error| match error {
                    LedgerError::NotFound { .. } => not_found(error.to_string()).into(),
                    error => error.into(),
                })
            }
        }
    }

    /// The image of the trust domain in use that a ref or the first digits of a digest name.
    /// Whoever may not read the store has the daemon's report for that.
    pub(super) fn image(&mut self, context: &Context<'_>, text: &str) -> anyhow::Result<UsedImage> {
        let domain = context.global.domain.clone();
        if !self.is_daemon() || geteuid().is_root() {
            let image = context.image(&context.domain()?, text)?.digest;
            return Ok(UsedImage { domain, image });
        }
        let Report { mut images, unknown, .. } = self.report(Some(&domain))?;
        if images.iter().any(|it| it.names.iter().any(|name| name == text)) {
            images.retain(|it| it.names.iter().any(|name| name == text));
        } else {
            let digits = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
            let is_it = |digest: String| digest.starts_with(&digits);
            images.retain(|it| digits.len() >= DIGEST_DIGITS_MIN && is_it(it.image.to_string()));
        }
        match &images[..] {
            [one] => Ok(UsedImage { domain, image: one.image }),
            [] => {
                let fail = Fail::not_found(format!("no image `{text}` in domain `{domain}`"));
                let hint = "some images cannot be read: as root, `cofolio fsck` names them";
                Err(if unknown.images > 0 { fail.hint(hint) } else { fail }.into())
            }
            [..] => {
                let what = format!("`{text}` is the beginning of {} digests", images.len());
                Err(Fail::usage(what).into())
            }
        }
    }

    /// Takes opened files from the kernel's queue, in a ledger of this process.
    pub(super) fn drain_opens(&mut self) {
        if let Self::Here { ledger, .. } = self {
            // The next report fails as well, and says so.
            let _ = ledger.drain_opens(&Budget::of(TAKE_OPENS));
        }
    }
}

fn gone() -> Fail {
    Fail::not_found("it no longer exists")
}

/// Whether something listens at the socket.
fn is_there(error: &ClientError) -> bool {
    let ClientError::Io { source, .. } = error else { return true };
    !matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}
