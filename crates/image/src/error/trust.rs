//! Why an image is not trusted, or why that cannot be said.

use std::path::PathBuf;

use cofolio_store::Digest;

/// Why an image was not let through. None of these holds anything secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum TrustError {
    /// A key file cannot be read, or holds no key that can be used.
    #[error("key {}: {what}", path.display())]
    Key { path: PathBuf, what: String },
    /// A policy that makes no sense. Nothing is let through.
    #[error("trust policy: {what}")]
    Policy { what: String },
    #[error("image {image} ({name}) is rejected by the trust policy ({rule})")]
    Rejected { image: Digest, name: String, rule: String },
    #[error("image {image} ({name}) is not signed by {keys} ({rule}): {found}")]
    Unsigned { image: Digest, name: Box<str>, keys: Box<str>, rule: Box<str>, found: Box<str> },
    /// A damaged record of a ref, which may name the image and would not let it through.
    #[error("image {image} is refused: it may be {name} as well, which cannot be read ({rule})")]
    UnknownName { image: Digest, name: Box<str>, rule: Box<str>, source: Box<cofolio_store::Error> },
    #[error("{name}: {digest} is not signed by {keys}")]
    NoClaim { name: String, digest: String, keys: String },
    #[error("not a signature of image {image}: {what}")]
    Signature { image: Digest, what: String },
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
}
