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
    /// The policy lets no image of that name through.
    #[error("image {image} ({name}) is rejected by the trust policy ({rule})")]
    Rejected { image: Digest, name: String, rule: String },
    /// No signature by one of the keys that are asked for.
    #[error("image {image} ({name}) is not signed by {keys} ({rule}): {found}")]
    Unsigned { image: Digest, name: Box<str>, keys: Box<str>, rule: Box<str>, found: Box<str> },
    /// The record of a ref is damaged. It may be a name of the image, and its rule would not let the image through.
    #[error("image {image} is refused: it may be {name} as well, which cannot be read ({rule})")]
    UnknownName { image: Digest, name: Box<str>, rule: Box<str>, source: Box<cofolio_store::Error> },
    /// No signature by cosign of what a registry has.
    #[error("{name}: {digest} is not signed by {keys}")]
    NoClaim { name: String, digest: String, keys: String },
    /// Bytes that are no signature of this image.
    #[error("not a signature of image {image}: {what}")]
    Signature { image: Digest, what: String },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
}
