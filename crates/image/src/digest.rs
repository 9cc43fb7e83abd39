//! Digests of blobs, as OCI writes them: `sha256:<64 hex>` or `sha512:<128 hex>`.

use std::fmt;

use sha2::{Digest as _, Sha256, Sha512};

/// Digest of a blob: algorithm and hex digits, checked.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlobDigest {
    algorithm: Algorithm,
    hex: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Algorithm {
    Sha256,
    Sha512,
}

impl BlobDigest {
    /// Parses `algorithm:hex`. The hex digits are checked, so that they can be part of a path.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (algorithm, hex) = text.split_once(':')?;
        let (algorithm, length) = match algorithm {
            "sha256" => (Algorithm::Sha256, 64),
            "sha512" => (Algorithm::Sha512, 128),
            _ => return None,
        };
        let valid = hex.len() == length
            && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        valid.then(|| Self { algorithm, hex: hex.to_owned() })
    }

    pub(crate) fn is_sha256(&self) -> bool {
        self.algorithm == Algorithm::Sha256
    }

    /// Where an image layout keeps the blob.
    pub(crate) fn layout_path(&self) -> String {
        format!("blobs/{}/{}", self.algorithm.name(), self.hex)
    }

    /// Something that computes digests of the same kind.
    pub(crate) fn hasher(&self) -> BlobHasher {
        match self.algorithm {
            Algorithm::Sha256 => BlobHasher::Sha256(Sha256::new()),
            Algorithm::Sha512 => BlobHasher::Sha512(Sha512::new()),
        }
    }

    /// Digest of bytes at hand, of the same kind as this one.
    pub(crate) fn of(&self, bytes: &[u8]) -> Self {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish()
    }

    /// Digest of bytes at hand.
    pub(crate) fn sha256(bytes: &[u8]) -> Self {
        let mut hasher = BlobHasher::new();
        hasher.update(bytes);
        hasher.finish()
    }

    /// Identity of a chain of layers (OCI image config, "Layer ChainID").
    pub(crate) fn chain(&self, diff_id: &Self) -> Self {
        Self::sha256(format!("{self} {diff_id}").as_bytes())
    }
}

impl Algorithm {
    fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex)
    }
}

/// Computes a [`BlobDigest`].
pub(crate) enum BlobHasher {
    Sha256(Sha256),
    Sha512(Sha512),
}

impl BlobHasher {
    pub(crate) fn new() -> Self {
        Self::Sha256(Sha256::new())
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(h) => h.update(bytes),
            Self::Sha512(h) => h.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> BlobDigest {
        let (algorithm, bytes) = match self {
            Self::Sha256(h) => (Algorithm::Sha256, h.finalize().to_vec()),
            Self::Sha512(h) => (Algorithm::Sha512, h.finalize().to_vec()),
        };
        BlobDigest { algorithm, hex: const_hex::encode(bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_that_could_be_paths_are_refused() {
        let good = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest = BlobDigest::parse(good).expect("valid");
        assert_eq!(digest.to_string(), good);
        assert_eq!(BlobDigest::sha256(b""), digest);
        for bad in
            ["", "sha256:", "sha256:../../etc/passwd", &good.to_uppercase(), &good[..70], "md5:00"]
        {
            assert_eq!(BlobDigest::parse(bad), None, "{bad}");
        }
    }
}
