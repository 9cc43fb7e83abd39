//! What can go wrong between us and a registry. Nothing in here ever holds a secret: URLs are shown
//! without their query, which may be signed.

/// Why a registry did not give or take what it should.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum RegistryError {
    /// The caller's mistake: not a name of an image.
    #[error("{text:?} is not the name of an image in a registry: {what}")]
    Reference { text: String, what: String },
    /// The caller's mistake: options that cannot be.
    #[error("{what}")]
    Options { what: String },
    /// There is no such image or blob.
    #[error("{url}: not there{}", because(what))]
    NotFound { url: String, what: String },
    /// The registry does not let us.
    #[error("{url}: access denied ({used}){}", because(what))]
    Denied { url: String, used: String, what: String },
    /// Credentials cannot be read, or a credential helper failed.
    #[error("{place}: {what}")]
    Credentials { place: String, what: String },
    /// A certificate or key of this machine cannot be used.
    #[error("{path}: {what}")]
    Certificate { path: String, what: String },
    /// Plain HTTP, which nobody has allowed.
    #[error("{url}: plain HTTP to a host that is not this machine is only used when asked for")]
    PlainHttp { url: String },
    /// No connection, or it broke off, or stood still for too long.
    #[error("{url}: {what}{}", after(tries))]
    Unreachable { url: String, what: String, tries: u32 },
    /// An answer with a status that is not success.
    #[error("{url}: status {status}{}{}", because(what), after(tries))]
    Status { url: String, status: u16, what: String, tries: u32 },
    /// The registry does not do what was asked of it, and will not next time.
    #[error("{url}: refused (status {status}){}", because(what))]
    Refused { url: String, status: u16, what: String },
    /// An answer that makes no sense, or too much of it.
    #[error("{url}: {what}")]
    Answer { url: String, what: String },
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
