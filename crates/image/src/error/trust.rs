//! Why an image is not trusted, or why that cannot be said.

use std::path::PathBuf;

use cofolio_store::Digest;

/// Why an image was not let through. None of these holds anything secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// A key file cannot be read, or holds no key that can be used.
    #[error("key {}: {what}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A policy that makes no sense. Nothing is let through.
    #[error("trust policy: {what}")]
    Policy {
        /// Which rule, and why.
        what: String,
    },
    /// The policy lets no image of that name through.
    #[error("image {image} ({name}) is rejected by the trust policy ({rule})")]
    Rejected {
        /// The image.
        image: Digest,
        /// What it was called.
        name: String,
        /// The rule.
        rule: String,
    },
    /// No signature by one of the keys that are asked for.
    #[error("image {image} ({name}) is not signed by {keys} ({rule}): {found}")]
    Unsigned {
        /// The image.
        image: Digest,
        /// What it was called.
        name: Box<str>,
        /// The keys, one of which would do.
        keys: Box<str>,
        /// Who asks for them.
        rule: Box<str>,
        /// What there is instead.
        found: Box<str>,
    },
    /// The record of a ref is damaged. It may be a name of the image, and its rule would not let the image through.
    #[error("image {image} is refused: it may be {name} as well, which cannot be read ({rule})")]
    UnknownName {
        /// The image.
        image: Digest,
        /// The ref, as far as its name is known.
        name: Box<str>,
        /// The rule that it would have.
        rule: Box<str>,
        /// Why it cannot be read.
        source: Box<cofolio_store::Error>,
    },
    /// No signature by cosign of what a registry has.
    #[error("{name}: {digest} is not signed by {keys}")]
    NoClaim {
        /// The image's name.
        name: String,
        /// What the name stands for: a manifest or an index.
        digest: String,
        /// The keys, one of which would do.
        keys: String,
    },
    /// Bytes that are no signature of this image.
    #[error("not a signature of image {image}: {what}")]
    Signature {
        /// The image.
        image: Digest,
        /// Why not.
        what: String,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
}
