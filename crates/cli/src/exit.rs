//! Exit codes, and error messages. `classify` maps errors to exit codes.

use std::fmt;
use std::process::ExitCode;

use cofolio_store::with_causes;

use crate::classify::{Classified, classify};
pub use crate::classify::{DAMAGED, MISSING_DIRECTORY, mending};
use crate::ui::Ui;

/// Makes [`Exit`] and [`TABLE`].
macro_rules! exits {
    ($($exit:ident = $code:literal: $meaning:literal,)*) => {
        /// How the command ended. The numbers are a promise (docs/CLI.md).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Exit { $(#[doc = $meaning] $exit = $code),* }

        /// Code, and what it means, for `cofolio help`, the man page and docs/CLI.md.
        const TABLE: &[(Exit, &str)] = &[$((Exit::$exit, $meaning)),*];
    };
}

exits! {
    Ok = 0: "done",
    Failure = 1: "it failed, and none of the codes below says it better",
    Usage = 2: "wrong arguments or configuration; nothing was done",
    NotFound = 3: "no such image, ref, mount, file or store",
    Corrupt = 4: "content is not what its digest says, or an image, archive or store is damaged",
    Missing = 5: "a privilege, a login or a kernel feature is missing",
    NoSpace = 6: "no space left; the store is as it was before",
    Busy = 7: "in use, or changed by somebody else meanwhile; trying again can succeed",
    Network = 8: "a registry could not be reached, or gave up on us, after several tries",
    Refused = 9: "not trusted: another image than was asked for, or not signed as the policy demands",
    Interrupted = 130: "interrupted (Ctrl-C, SIGTERM); the store is as it was before",
    BrokenPipe = 141: "the reader of the output went away",
}

/// What the process ends with: a code of ours, or that of a container (`run`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// One of our codes.
    Ours(Exit),
    /// The status of the container.
    Container(u8),
}

impl From<Exit> for Ended {
    fn from(exit: Exit) -> Self {
        Self::Ours(exit)
    }
}

impl From<Ended> for ExitCode {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Ours(exit) => exit.into(),
            Ended::Container(status) => status.into(),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The table of exit codes as text, for `--help`.
pub fn table() -> String {
    let lines = TABLE.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}\n", *exit as u8));
    format!("Exit codes:\n{}", lines.collect::<String>().trim_end())
}

/// An error of the command itself, with its exit code and a hint.
#[derive(Debug)]
pub struct Fail {
    exit: Exit,
    what: String,
    hint: Option<String>,
}

impl Fail {
    /// An error with this exit code.
    pub fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), hint: None }
    }

    /// A mistake in the arguments.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    /// Something that does not exist.
    pub fn not_found(what: impl Into<String>) -> Self {
        Self::new(Exit::NotFound, what)
    }

    /// Damage to the store.
    pub fn damaged(what: impl Into<String>) -> Self {
        Self::new(Exit::Corrupt, what).hint(DAMAGED)
    }

    pub(crate) fn classified(&self) -> Classified {
        (Some(self.exit), self.hint.clone().map(Into::into))
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Fail {}

/// Print an error as `cofolio: <what>: <why>`, with a hint where there is one.
pub fn report(error: &anyhow::Error, ui: &Ui) -> Exit {
    let (exit, hint) = classify(error);
    // The user who closed the pipe knows.
    if exit == Exit::BrokenPipe {
        return exit;
    }
    ui.error(&with_causes(error.as_ref()), hint.as_deref());
    exit
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn causes_are_told_once_and_decide_the_code() {
        let cause = io::Error::from(io::ErrorKind::StorageFull);
        let error = anyhow::Error::new(cause).context("writing `x`");
        assert_eq!(classify(&error).0, Exit::NoSpace);
        assert!(with_causes(error.as_ref()).starts_with("writing `x`: "));

        let error = anyhow::Error::new(Fail::not_found("no image `a`").hint("see images"))
            .context("no image `a`");
        assert_eq!(with_causes(error.as_ref()), "no image `a`");
        assert_eq!(classify(&error), (Exit::NotFound, Some("see images".into())));
        assert_eq!(classify(&anyhow::anyhow!("odd")).0, Exit::Failure);
    }
}
