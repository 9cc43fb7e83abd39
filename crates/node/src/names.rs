//! Which image of a trust domain a person means: a ref, or the first digits of a digest.

use cofolio_image::export::Exported;
use cofolio_image::reference::DIGEST_DIGITS_MIN;
use cofolio_store::{Digest, Domain, Error, Ref};

/// An image of a trust domain, as it was named.
#[derive(Clone, Debug)]
pub struct Named {
    /// Its digest.
    pub digest: Digest,
    /// A ref of it: the one given, or the first in order that leads there.
    pub ref_name: Option<String>,
    /// The record of that ref, or what the last ref of an image without one said.
    pub record: Option<Ref>,
}

impl Named {
    /// The image, for an export.
    pub fn exported(&self) -> Exported<'_> {
        let (record, name) = (self.record.as_ref(), self.ref_name.as_deref());
        Exported { image: &self.digest, record, name }
    }

    /// What to call it in messages.
    pub fn shown(&self) -> String {
        self.ref_name.clone().unwrap_or_else(|| short(&self.digest))
    }
}

/// The beginning of a digest, for people; long enough to be accepted as an argument.
pub fn short(digest: &Digest) -> String {
    digest.to_string().chars().take(12).collect()
}

/// Why a text names no image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// Neither a ref nor a digest.
    #[error("no image `{text}` in domain `{domain}`")]
    NoImage {
        /// As given.
        text: String,
        /// The domain.
        domain: String,
        /// Its refs; none if they cannot be listed.
        refs: Option<Vec<String>>,
    },
    /// Too few digits.
    #[error("no ref `{0}`, and a digest needs at least {DIGEST_DIGITS_MIN} digits")]
    Short(String),
    /// The beginning of several digests.
    #[error("`{text}` is the beginning of {count} digests")]
    Ambiguous {
        /// As given.
        text: String,
        /// How many.
        count: usize,
        /// Two of them.
        two: [Digest; 2],
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] Error),
}

/// The image that a ref or the first digits of a digest name.
pub fn resolve(domain: &Domain, text: &str) -> Result<Named, NameError> {
    // A name that cannot be a ref may still be a digest; a ref goes first.
    match domain.get_ref(text) {
        Ok(Some(record)) => {
            let (digest, ref_name) = (record.image, Some(text.to_owned()));
            return Ok(Named { digest, ref_name, record: Some(record) });
        }
        Ok(None) | Err(Error::BadName { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let digest = digest(domain, text)?;
    let found = domain.readable_refs()?.into_iter().find(|(_, record)| record.image == digest);
    let (ref_name, record) = match found {
        Some((name, record)) => (Some(name), Some(record)),
        None => (None, domain.unnamed_record(&digest)?),
    };
    Ok(Named { digest, ref_name, record })
}

fn digest(domain: &Domain, text: &str) -> Result<Digest, NameError> {
    let prefix = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
    let is_hex = prefix.len() <= 64 && prefix.bytes().all(|b| b.is_ascii_hexdigit());
    let mut matching = Vec::new();
    if is_hex && !prefix.is_empty() {
        if prefix.len() < DIGEST_DIGITS_MIN {
            return Err(NameError::Short(text.to_owned()));
        }
        matching = domain.images()?;
        matching.retain(|image| image.to_string().starts_with(&prefix));
    }
    let text = text.to_owned();
    match matching[..] {
        [] => {
            let refs = domain.readable_refs().ok();
            let refs = refs.map(|refs| refs.into_iter().map(|(name, _)| name).collect());
            Err(NameError::NoImage { text, domain: domain.name().to_owned(), refs })
        }
        [one] => Ok(one),
        [first, second, ..] => {
            Err(NameError::Ambiguous { text, count: matching.len(), two: [first, second] })
        }
    }
}
