//! Digests of blobs, archives and chains: `sha256:<64 hex>` or `sha512:<128 hex>`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256, Sha512};

/// Digest of a blob: algorithm and hex digits, checked.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlobDigest {
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

    pub(crate) fn hasher(&self) -> BlobHasher {
        match self.algorithm {
            Algorithm::Sha256 => BlobHasher::Sha256(Sha256::new()),
            Algorithm::Sha512 => BlobHasher::Sha512(Sha512::new()),
        }
    }

    /// Digest of `bytes`, with the algorithm of this one.
    pub(crate) fn of(&self, bytes: &[u8]) -> Self {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish()
    }

    pub(crate) fn sha256(bytes: &[u8]) -> Self {
        BlobHasher::Sha256(Sha256::new_with_prefix(bytes)).finish()
    }

    /// The hex digits alone.
    pub fn hex(&self) -> &str {
        &self.hex
    }
}

/// Not a digest that Cofolio knows.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0:?} is not sha256:<64 hex digits> or sha512:<128 hex digits>")]
pub struct NoDigest(String);

impl FromStr for BlobDigest {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Self, NoDigest> {
        Self::parse(text).ok_or_else(|| NoDigest(text.chars().take(160).collect()))
    }
}

impl fmt::Debug for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for BlobDigest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BlobDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Digest of a layer's uncompressed archive: always SHA-256.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DiffId(BlobDigest);

/// Identity of a layer over those below it (OCI image config, "Layer ChainID").
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChainId(BlobDigest);

impl DiffId {
    /// `None` for a digest that is not SHA-256.
    pub(crate) fn new(digest: BlobDigest) -> Option<Self> {
        digest.is_sha256().then_some(Self(digest))
    }

    /// Of the archive that was hashed.
    pub(crate) fn of(hasher: Sha256) -> Self {
        Self(BlobHasher::Sha256(hasher).finish())
    }

    /// The digest as that of the archive, which is a blob when it is not compressed.
    pub fn as_blob(&self) -> &BlobDigest {
        &self.0
    }
}

impl ChainId {
    /// The chain of a layer over `below`, or of the lowest layer.
    pub fn over(below: Option<&Self>, layer: &DiffId) -> Self {
        match below {
            None => Self(layer.0.clone()),
            Some(below) => Self(BlobDigest::sha256(format!("{below} {layer}").as_bytes())),
        }
    }
}

impl fmt::Display for DiffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ChainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for DiffId {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Self, NoDigest> {
        let digest = BlobDigest::parse(text).and_then(Self::new);
        digest.ok_or_else(|| NoDigest(text.chars().take(160).collect()))
    }
}

impl FromStr for ChainId {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Self, NoDigest> {
        text.parse().map(Self)
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
