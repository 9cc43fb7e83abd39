//! The small JSON records: refs and roots.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::Digest;

/// The time now in seconds since 1970, as records have it.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// A human name's record (`refs/<name>.json`): it keeps an image and its layers alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ref {
    /// Digest of the metadata image.
    pub image: Digest,
    /// Digest of the OCI manifest that the image came from, as the registry prints it (`sha256:…`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// The manifest itself, byte for byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<String>,
    /// The image in a registry that it came from, as `docker://host/name:tag`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The OCI image config, byte for byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// The OCI layers, lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<Layer>,
    /// Blobs that were made of its layers and given to a registry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packed: Vec<PackedLayer>,
    /// Free text by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// When the ref was made, in seconds since 1970.
    #[serde(default)]
    pub created: i64,
}

impl Ref {
    /// A ref to an image and nothing else.
    pub fn new(image: Digest) -> Self {
        Self {
            image,
            manifest: None,
            document: None,
            source: None,
            config: None,
            layers: Vec::new(),
            packed: Vec::new(),
            labels: BTreeMap::new(),
            created: 0,
        }
    }
}

/// One layer of an OCI image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Chain id (`sha256:…`): the name of the layer's tree under `layers/`.
    pub chain_id: String,
    /// Digest of the uncompressed tar (`sha256:…`).
    pub diff_id: String,
    /// Digest of the blob as it was distributed (`sha256:…`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<String>,
    /// Size of the blob in bytes.
    #[serde(default)]
    pub size: u64,
    /// Media type of the blob.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub media_type: String,
}

/// A blob that was made of a layer here, and is not the one that it came as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedLayer {
    /// Digest of the uncompressed tar (`sha256:…`).
    pub diff_id: String,
    /// Digest of the blob (`sha256:…`).
    pub blob: String,
    /// Size of the blob in bytes.
    pub size: u64,
    /// Media type of the blob.
    pub media_type: String,
    /// Repositories that it was pushed to, as `host/name`, the last one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<String>,
}

/// What kind of thing keeps something alive, beside refs, which are roots by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RootKind {
    /// Somebody needs it for a while. See [`crate::Lease`].
    Lease,
    /// It is mounted. Does not outlive the boot it was made in.
    Mount,
    /// A virtual machine has it. Does not outlive the boot it was made in.
    Vm,
}

impl RootKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Lease, Self::Mount, Self::Vm];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Mount => "mount",
            Self::Vm => "vm",
        }
    }

    pub(crate) const fn directory(self) -> &'static str {
        match self {
            Self::Lease => "roots/lease",
            Self::Mount => "roots/mount",
            Self::Vm => "roots/vm",
        }
    }

    /// Whether it ends with the boot, so that its roots need not be durable.
    pub(crate) fn ends_with_boot(self) -> bool {
        self != Self::Lease
    }
}

/// A record that keeps images and layers alive (`roots/<kind>/<id>.json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// What kind of thing it is.
    pub kind: RootKind,
    /// Its name, unique among its kind: a mount id, a container id, a path.
    pub id: String,
    /// Images that it keeps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<Digest>,
    /// Chain ids of layers that it keeps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
    /// Free text for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// When the root was made, in seconds since 1970.
    #[serde(default)]
    pub created: i64,
    /// `/proc/sys/kernel/random/boot_id` at the time. For mounts and virtual
    /// machines: they end with the boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
}

impl Root {
    /// A root that keeps nothing yet.
    pub fn new(kind: RootKind, id: impl Into<String>) -> Self {
        Self {
            kind,
            id: id.into(),
            images: Vec::new(),
            layers: Vec::new(),
            note: String::new(),
            created: 0,
            boot_id: None,
        }
    }
}
