//! `meta.json`: which format a store has, and who may touch it.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub(crate) const META_PATH: &str = "meta.json";
/// The same again, from which a damaged or missing one is made: the id names the run directory.
pub(crate) const META_COPY: &str = "meta.copy.json";
/// Format version that this program writes. A higher one is refused.
pub(crate) const FORMAT: u32 = 1;
/// Largest `meta.json` that is read, in bytes.
pub(crate) const META_SIZE_MAX: u64 = 64 << 10;

/// Incompatible: objects and images are named by fs-verity SHA-256 digests of 4 KiB blocks.
const DIGEST_FEATURE: &str = "digest-fsverity-sha256-4k";
/// Read-only compatible: files may carry the immutable flag, which must be cleared to remove them.
pub(crate) const IMMUTABLE_FEATURE: &str = "immutable-objects";

/// Compatible: what a store may also contain. Programs that do not know one leave it alone.
const COMPATIBLE: [&str; 7] =
    ["layer-splits", "segments", "bases", "domain-settings", "last-used", "signatures", "profiles"];

/// What a program must know in order to use a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Features {
    /// Who does not know one of these may ignore it.
    pub compatible: Vec<String>,
    /// Who does not know one of these may read and mount, but change nothing.
    pub read_only_compatible: Vec<String>,
    /// Who does not know one of these must not open the store.
    pub incompatible: Vec<String>,
}

/// The content of `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Format version.
    pub format: u32,
    /// The store's own id, 32 hex digits, made at random: `/run/cofolio/<id>` is its runtime state.
    pub id: String,
    /// Feature sets.
    pub features: Features,
}

impl Meta {
    pub(crate) fn new(id: [u8; 16], immutable: bool) -> Self {
        let immutable = immutable.then(|| IMMUTABLE_FEATURE.to_owned());
        Self {
            format: FORMAT,
            id: const_hex::encode(id),
            features: Features {
                compatible: COMPATIBLE.map(str::to_owned).into(),
                read_only_compatible: immutable.into_iter().collect(),
                incompatible: vec![DIGEST_FEATURE.to_owned()],
            },
        }
    }

    /// A replacement for a damaged `meta.json`, with its id if found in there, else `fresh`.
    pub(crate) fn mended(damaged: &[u8], fresh: [u8; 16], immutable: bool) -> Self {
        let mut meta = Self::new(fresh, immutable);
        let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let mut runs = damaged.split(|byte| !is_hex(byte)).filter(|run| run.len() == 32);
        if let Some(id) = runs.next().and_then(|run| std::str::from_utf8(run).ok()) {
            id.clone_into(&mut meta.id);
        }
        meta
    }

    /// Reads `meta.json`, its version first: a later format may have other fields.
    pub(crate) fn parse(json: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let damaged = |error: serde_json::Error| Error::corrupt(META_PATH, error);
        let version: Version = serde_json::from_slice(json).map_err(damaged)?;
        if version.format > FORMAT {
            return Err(Error::UnknownFeature { feature: format!("format {}", version.format) });
        }
        let meta: Self = serde_json::from_slice(json).map_err(damaged)?;
        if meta.format == 0 {
            return Err(Error::corrupt(META_PATH, "format 0 was never used"));
        }
        if meta.id.len() != 32 || !meta.id.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(Error::corrupt(META_PATH, "the id is not 32 hex digits"));
        }
        if let Some(feature) = unknown(&meta.features.incompatible, &[DIGEST_FEATURE]) {
            return Err(Error::UnknownFeature { feature });
        }
        Ok(meta)
    }

    /// The feature because of which this program must not write, if there is one.
    pub(crate) fn read_only_because(&self) -> Option<String> {
        unknown(&self.features.read_only_compatible, &[IMMUTABLE_FEATURE])
    }

    /// Whether the immutable flag is to be set where it can be.
    pub(crate) fn uses_immutable(&self) -> bool {
        self.features.read_only_compatible.iter().any(|f| f == IMMUTABLE_FEATURE)
    }
}

/// The first feature of `set` that is not among the `known` ones.
fn unknown(set: &[String], known: &[&str]) -> Option<String> {
    set.iter().find(|feature| !known.contains(&feature.as_str())).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(change: impl FnOnce(&mut Meta)) -> Result<Meta> {
        let mut meta = Meta::new([7; 16], true);
        change(&mut meta);
        Meta::parse(&serde_json::to_vec(&meta).unwrap())
    }

    #[test]
    fn features_decide_who_may_do_what() {
        assert_eq!(with(|_| ()).unwrap().read_only_because(), None);
        let known = with(|m| m.features.compatible.push("later".into())).unwrap();
        assert_eq!(known.read_only_because(), None);
        let read_only = with(|m| m.features.read_only_compatible.push("later".into())).unwrap();
        assert_eq!(read_only.read_only_because().as_deref(), Some("later"));
        match with(|m| m.features.incompatible.push("later".into())) {
            Err(Error::UnknownFeature { feature }) => assert_eq!(feature, "later"),
            other => panic!("{other:?}"),
        }
        assert!(matches!(with(|m| m.format = 2), Err(Error::UnknownFeature { .. })));
        assert!(matches!(with(|m| m.id = "../../etc".into()), Err(Error::Corrupt { .. })));
        assert!(matches!(Meta::parse(b"{"), Err(Error::Corrupt { .. })));
    }
}
