//! What can go wrong between us and a registry. Nothing in here ever holds a secret: URLs are shown
//! without their query, which may be signed.

/// Why a registry did not give or take what it should.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The caller's mistake: not a name of an image.
    #[error("{text:?} is not the name of an image in a registry: {what}")]
    Reference {
        /// What was given.
        text: String,
        /// Which part is wrong.
        what: String,
    },
    /// The caller's mistake: options that cannot be.
    #[error("{what}")]
    Options {
        /// Which, and why.
        what: String,
    },
    /// There is no such image or blob.
    #[error("{url}: not there{}", because(what))]
    NotFound {
        /// What was asked for.
        url: String,
        /// What the registry said.
        what: String,
    },
    /// The registry does not let us.
    #[error("{url}: access denied ({used}){}", because(what))]
    Denied {
        /// What was asked for.
        url: String,
        /// As whom: with which credentials, from where.
        used: String,
        /// What the registry said.
        what: String,
    },
    /// Credentials cannot be read, or a credential helper failed.
    #[error("{place}: {what}")]
    Credentials {
        /// The file or program.
        place: String,
        /// What is wrong.
        what: String,
    },
    /// A certificate or key of this machine cannot be used.
    #[error("{path}: {what}")]
    Certificate {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// Plain HTTP, which nobody has allowed.
    #[error("{url}: plain HTTP to a host that is not this machine is only used when asked for")]
    PlainHttp {
        /// Where.
        url: String,
    },
    /// No connection, or it broke off, or stood still for too long.
    #[error("{url}: {what}{}", after(tries))]
    Unreachable {
        /// Where.
        url: String,
        /// What happened last.
        what: String,
        /// How often it was tried without getting on.
        tries: u32,
    },
    /// An answer with a status that is not success.
    #[error("{url}: status {status}{}{}", because(what), after(tries))]
    Status {
        /// Where.
        url: String,
        /// The HTTP status.
        status: u16,
        /// What the registry said.
        what: String,
        /// How often it was tried without getting on.
        tries: u32,
    },
    /// The registry does not do what was asked of it, and will not next time.
    #[error("{url}: refused (status {status}){}", because(what))]
    Refused {
        /// Where.
        url: String,
        /// The HTTP status.
        status: u16,
        /// What the registry said.
        what: String,
    },
    /// An answer that makes no sense, or too much of it.
    #[error("{url}: {what}")]
    Answer {
        /// Where.
        url: String,
        /// What is wrong.
        what: String,
    },
    /// The import that wanted this has failed for another reason.
    #[error("given up, because something else failed")]
    GivenUp,
}

impl RegistryError {
    /// How often it was tried, for those for which it is.
    pub(crate) fn tried(mut self, count: u32) -> Self {
        if let Self::Unreachable { tries, .. } | Self::Status { tries, .. } = &mut self {
            *tries = count;
        }
        self
    }
}

fn because(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!(": {what}") }
}

fn after(tries: &u32) -> String {
    if *tries > 1 { format!(" (tried {tries} times)") } else { String::new() }
}

/// Text of somebody else for our own error: no control characters, not without end.
pub(crate) fn quoted(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = clean.clone().take(300).collect();
    if clean.count() > 300 {
        short.push('…');
    }
    short.trim().to_owned()
}
