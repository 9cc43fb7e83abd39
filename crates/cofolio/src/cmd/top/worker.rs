//! The thread that asks for figures, so that the screen reacts to keys meanwhile.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};

use cofolio_node::ledger::Report;
use cofolio_store::with_causes;

use super::rows::{Detail, FILES_MAX, View};
use crate::cmd::source::{Source, TAKE_OPENS};

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

/// The thread ends with the process. A look at a large store cannot be interrupted, and has nothing
/// to undo.
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
                        source.drain_opens();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                let answered = match ask {
                    Ask::Report => {
                        let report = source.report(domain.as_deref());
                        report.map(|it| Answer::Report(Box::new(it)))
                    }
                    Ask::Detail(view) => {
                        detail(&mut source, &view).map(|it| Answer::Detail(view, it))
                    }
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

/// What a view shows besides the report.
fn detail(source: &mut Source, view: &View) -> anyhow::Result<Detail> {
    Ok(match view {
        View::Files { domain, image, .. } => {
            let (files, total) = source.files(domain, image, FILES_MAX)?;
            Detail::Files { files, total }
        }
        View::Users { domain, object, .. } => Detail::Users(source.users(domain, object)?),
        _ => Detail::None,
    })
}
