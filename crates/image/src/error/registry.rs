//! Errors of registries. They hold no secrets: URLs lose their query, which may be signed.

use std::fmt::Display;

/// Why a registry did not give or take what it should.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum RegistryError {
    /// The caller's mistake: not a name of an image.
    #[error("{text:?} is not the name of an image in a registry: {what}")]
    Reference { text: String, what: String },
    /// The caller's mistake: invalid options.
    #[error("{what}")]
    Options { what: String },
    #[error("{url}: not there{}", because(what))]
    NotFound { url: String, what: String },
    #[error("{url}: access denied ({used}){}", because(what))]
    Denied { url: String, used: String, what: String },
    #[error("{place}: {what}")]
    Credentials { place: String, what: String },
    #[error("{path}: {what}")]
    Certificate { path: String, what: String },
    #[error("{url}: plain HTTP to a host that is not this machine is only used when asked for")]
    PlainHttp { url: String },
    #[error("{url}: {what}{}", after(tries))]
    Unreachable { url: String, what: String, tries: u32 },
    #[error("{url}: status {status}{}{}", because(what), after(tries))]
    Status { url: String, status: u16, what: String, tries: u32 },
    /// The registry refuses; a retry would not help.
    #[error("{url}: refused (status {status}){}", because(what))]
    Refused { url: String, status: u16, what: String },
    #[error("{url}: {what}")]
    Answer { url: String, what: String },
    /// The import that wanted this has failed for another reason.
    #[error("given up, because something else failed")]
    GivenUp,
}

impl From<cofolio_store::task::Cancelled> for RegistryError {
    fn from(_: cofolio_store::task::Cancelled) -> Self {
        Self::GivenUp
    }
}

impl RegistryError {
    /// An answer that makes no sense.
    pub(crate) fn answer(url: &impl Display, what: impl Into<String>) -> Self {
        Self::Answer { url: url.to_string(), what: what.into() }
    }

    pub(crate) fn unreachable(url: &impl Display, what: impl Into<String>) -> Self {
        Self::Unreachable { url: url.to_string(), what: what.into(), tries: 0 }
    }

    /// Sets the number of tries where the message shows it.
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

/// Foreign text for an error: no control characters, at most 300 characters.
pub(crate) fn quoted(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = clean.clone().take(300).collect();
    if clean.count() > 300 {
        short.push('…');
    }
    short.trim().to_owned()
}
