//! The name of content: an fs-verity SHA-256 digest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An fs-verity SHA-256 digest (4 KiB blocks, no salt), printed as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

/// A text that is not a digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a digest (64 hex digits, `sha256:` may stand before them): {0:?}")]
pub struct ParseDigestError(String);

impl Digest {
    /// Path below the objects directory: `ab/cdef…`, as in a composefs digest store.
    pub fn object_path(&self) -> String {
        let mut path = self.to_string();
        path.insert(2, '/');
        path
    }

    /// The digest of the object at `shard/name`; `None` unless both are such lower-case hex.
    pub fn from_object_path(shard: &str, name: &str) -> Option<Self> {
        if shard.len() != 2 || name.len() != 62 {
            return None;
        }
        let mut hex = [0; 64];
        hex[..2].copy_from_slice(shard.as_bytes());
        hex[2..].copy_from_slice(name.as_bytes());
        Self::from_lower_hex(&hex)
    }

    /// 64 lower-case hex digits exactly, as file names have them.
    pub fn from_lower_hex(hex: &[u8]) -> Option<Self> {
        let mut bytes = [0; 32];
        const_hex::decode_to_slice(hex, &mut bytes).ok()?;
        // The decoder also takes a prefix `0x` and upper case.
        let exact = hex.len() == 64 && !hex.iter().any(u8::is_ascii_uppercase);
        exact.then_some(Self(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hex = [0; 64];
        const_hex::encode_to_slice(self.0, &mut hex).map_err(|_| fmt::Error)?;
        f.pad(std::str::from_utf8(&hex).unwrap_or_default())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = ParseDigestError;

    /// Takes upper case too, and a `sha256:` before the digits.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hex = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
        Self::from_lower_hex(hex.as_bytes()).ok_or_else(|| {
            // The text comes from outside; an error message must not carry a megabyte of it.
            ParseDigestError(text.chars().take(80).collect())
        })
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_strangers_are_refused() {
        let digest = Digest(std::array::from_fn(|i| u8::try_from(i * 7 % 256).unwrap()));
        let hex = digest.to_string();
        assert_eq!(hex.len(), 64);
        assert_eq!(hex.parse(), Ok(digest));
        assert_eq!(format!("sha256:{}", hex.to_uppercase()).parse(), Ok(digest));
        let path = digest.object_path();
        let (shard, name) = path.split_once('/').unwrap();
        assert_eq!(Digest::from_object_path(shard, name), Some(digest));
        for bad in ["", "sha256:", &hex[1..], &hex.replace('0', "g"), "sha512:00", "é"] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
        assert_eq!(Digest::from_object_path(&hex[..2].to_uppercase(), "00"), None);
    }
}
