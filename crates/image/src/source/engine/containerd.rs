//! containerd's stores: content, records, and layers unpacked by its snapshotter `overlayfs`.
//!
//! ```text
//! <root>/io.containerd.content.v1.content/blobs/sha256/<hex>     blobs, as in an OCI layout
//! <root>/io.containerd.metadata.v1.bolt/meta.db                  bolt:
//!   v1/<namespace>/images/<name>/target/{digest,mediatype,size}    what an image's name stands for
//!   v1/<namespace>/snapshots/<snapshotter>/<key>/{name,parent}
//! <root>/io.containerd.snapshotter.v1.overlayfs/metadata.db      bolt:
//!   v1/snapshots/<namespace>/<number>/<key>/{id,kind,parent}       (one key) its own records, by unique names
//! <root>/io.containerd.snapshotter.v1.overlayfs/snapshots/<id>/fs
//! ```
//!
//! Docker keeps images there too, where it is told to or from version 29 on: in the namespace
//! `moby`, in the containerd of the machine or one of its own.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::bolt::{Bucket, Database};
use super::names::{self, Named};
use super::{
    Container, EngineError, Inventory, LiveMounts, inventory, is_root, read_toml, user_data,
};
use crate::source::listed;

const RECORDS: &str = "io.containerd.metadata.v1.bolt/meta.db";
const CONTENT: &str = "io.containerd.content.v1.content";
const SNAPSHOTTER: &str = "io.containerd.snapshotter.v1.overlayfs";
/// The snapshotter whose snapshots are directories with a layer's files each.
const OVERLAYFS: &str = "overlayfs";

/// An image in a store: `[[ROOT][+NAMESPACE]]NAME`, the outer brackets being part of it.
pub type Reference = names::Reference<Location>;

/// Where a store is, and in which part of it to look. What is not said is as the machine's
/// configuration of containerd says, and every namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Location {
    /// containerd's root.
    pub root: Option<PathBuf>,
    /// One namespace: `default`, `k8s.io`, `moby`, …
    pub namespace: Option<String>,
}

impl Reference {
    /// Parses what follows `containerd:`; [`EngineError::NotFound`] if it cannot be a name.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let wrong = |what: &str| names::wrong("containerd", text, what);
        let (store, name) = names::split_store("containerd", text)?;
        let location = match store {
            None => Location::default(),
            Some(inner) => {
                // A namespace has no `+` in its name, a path may.
                let (root, namespace) = match inner.rsplit_once('+') {
                    Some((root, namespace)) => (root, Some(namespace.to_owned())),
                    None => (inner, None),
                };
                if !(root.starts_with('/') || root.is_empty() && namespace.is_some()) {
                    return Err(wrong("containerd's root is no absolute path"));
                }
                let root = Some(PathBuf::from(root)).filter(|root| !root.as_os_str().is_empty());
                Location { root, namespace }
            }
        };
        Ok(Self { location, name: name.to_owned() })
    }
}

/// What the names of an image in one namespace stand for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Its namespace.
    pub namespace: String,
    /// Its names; `name:tag` before `name@digest` and mere digests.
    pub names: Vec<String>,
    /// Digest of its manifest, or of an index of manifests.
    pub digest: String,
    /// Media type of that.
    pub media_type: String,
    /// Size of that, in bytes.
    pub size: u64,
}

impl Named for Image {
    fn names(&self) -> &[String] {
        &self.names
    }

    fn digest(&self) -> &str {
        &self.digest
    }

    fn id(&self) -> &str {
        self.digest.strip_prefix("sha256:").unwrap_or_default()
    }
}

/// An opened store.
#[derive(Debug)]
pub struct Containerd {
    root: PathBuf,
    images: Vec<Image>,
    /// Snapshotters with layers, `overlayfs` apart.
    others: BTreeSet<String>,
    namespace: Option<String>,
}

impl Containerd {
    /// Whether there is a store at a location.
    pub fn is_at(location: &Location) -> bool {
        root_of(location).is_ok_and(|root| root.join(RECORDS).exists())
    }

    /// Reads the records of a store, without the lock that a running containerd has on them.
    ///
    /// # Errors
    /// [`EngineError::NotFound`] if there is none or no such namespace, [`EngineError::Io`] and
    /// [`EngineError::Document`].
    pub fn open(location: &Location) -> Result<Self, EngineError> {
        let root = root_of(location)?;
        let path = root.join(RECORDS);
        if !path.exists() {
            let what = format!("{}: no images of containerd's here ({RECORDS})", root.display());
            return Err(EngineError::NotFound { what });
        }
        let database = Database::copy(&path)?;
        let wrong = |what| EngineError::Document { path: path.clone(), what };
        Self::of(root, location, &database.root().map_err(wrong)?)
    }

    /// A store with these records.
    pub(super) fn of(
        root: PathBuf,
        location: &Location,
        records: &Bucket<'_>,
    ) -> Result<Self, EngineError> {
        let nothing = Bucket::default();
        let version = records.bucket("v1").unwrap_or(&nothing);
        let mut found = Self {
            root,
            images: Vec::new(),
            others: BTreeSet::new(),
            namespace: location.namespace.clone(),
        };
        let mut known = Vec::new();
        for (namespace, records) in version.buckets() {
            if location.namespace.as_ref().is_none_or(|wanted| *wanted == namespace) {
                found.images.extend(images(&namespace, records.bucket("images"))?);
                let snapshotters =
                    records.bucket("snapshots").into_iter().flat_map(Bucket::buckets);
                let used = snapshotters
                    .filter(|(name, all)| name != OVERLAYFS && all.buckets().next().is_some());
                found.others.extend(used.map(|(name, _)| name));
            }
            known.push(namespace);
        }
        match &location.namespace {
            Some(wanted) if !known.contains(wanted) => {
                let (root, known) = (found.root.display(), listed(&known));
                let what = format!("{root} has no namespace {wanted:?}; it has: {known}");
                Err(EngineError::NotFound { what })
            }
            _ => Ok(found),
        }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory with the blobs, which has them where an OCI layout has them.
    pub fn content(&self) -> PathBuf {
        self.root.join(CONTENT)
    }

    /// All images: of each namespace one for each target.
    pub fn images(&self) -> &[Image] {
        &self.images
    }

    /// Finds an image by whole name, by the end of one, by name and digest, or by the beginning of
    /// its digest. [`EngineError::NotFound`] unless it is one, or the same in several namespaces.
    pub fn find(&self, name: &str) -> Result<&Image, EngineError> {
        let mut location = self.root.display().to_string();
        if let Some(namespace) = &self.namespace {
            location += &format!(" (namespace {namespace})");
        }
        let found = names::matching(&self.images, name);
        match found[..] {
            [] => Err(names::none(&self.images, name, &location)),
            [one, ref more @ ..] if more.iter().all(|other| other.digest == one.digest) => Ok(one),
            _ => {
                let each = |image: &&Image| {
                    let name = image.names.first().unwrap_or(&image.digest);
                    format!("[+{}]{name} ({})", image.namespace, image.digest)
                };
                let all: Vec<_> = found.iter().map(each).collect();
                let what = format!("{location}: {name:?} could be each of {}", all.join(", "));
                Err(EngineError::NotFound { what })
            }
        }
    }

    /// The layers unpacked here, and the containers (active snapshots) with their mounts.
    pub fn inventory(&self, mounts: &LiveMounts) -> Result<Inventory, EngineError> {
        let path = self.root.join(SNAPSHOTTER).join("metadata.db");
        if !path.exists() {
            return self.inventory_with(&Bucket::default(), mounts);
        }
        let database = Database::copy(&path)?;
        let wrong = |what| EngineError::Document { path: path.clone(), what };
        self.inventory_with(&database.root().map_err(wrong)?, mounts)
    }

    /// The same with these records of the snapshotter.
    pub(super) fn inventory_with(
        &self,
        records: &Bucket<'_>,
        mounts: &LiveMounts,
    ) -> Result<Inventory, EngineError> {
        let mut found = Inventory::new("containerd", &self.root, OVERLAYFS);
        found.images = self.images.len() as u64;
        found.unseen.extend(self.others.iter().map(|name| {
            format!("layers of containerd's snapshotter {name:?}: only those of {OVERLAYFS} are looked at")
        }));
        let dir = self.root.join(SNAPSHOTTER);
        let wrong = |what| EngineError::Document { path: dir.join("metadata.db"), what };
        let snapshots = records.bucket("v1").and_then(|version| version.bucket("snapshots"));
        let prefix = self.namespace.as_ref().map(|namespace| format!("{namespace}/"));
        let mut all = HashMap::new();
        for (key, record) in snapshots.into_iter().flat_map(Bucket::buckets) {
            if prefix.as_ref().is_none_or(|prefix| key.starts_with(prefix)) {
                let none = || wrong(format!("snapshot {key:?} has no id or kind"));
                let snapshot = Snapshot::read(record).ok_or_else(none)?;
                all.insert(key, snapshot);
            }
        }
        let files =
            |snapshot: &Snapshot| dir.join("snapshots").join(snapshot.id.to_string()).join("fs");
        let mut layers: Vec<_> =
            all.iter().filter(|(_, snapshot)| snapshot.kind == Kind::Committed).collect();
        layers.sort_unstable_by_key(|(_, snapshot)| snapshot.id);
        let index: HashMap<&str, usize> =
            layers.iter().enumerate().map(|(index, (key, _))| (key.as_str(), index)).collect();
        found.layers = layers.iter().map(|(_, snapshot)| files(snapshot)).collect();
        let mut active: Vec<_> =
            all.iter().filter(|(_, snapshot)| snapshot.kind == Kind::Active).collect();
        active.sort_unstable_by_key(|(_, snapshot)| snapshot.id);
        for (key, snapshot) in active {
            let id = key.splitn(3, '/').nth(2).unwrap_or(key);
            // A layer that is being unpacked.
            if id.starts_with("extract-") {
                continue;
            }
            let get = |name: &str| Some((*index.get(name)?, all.get(name)?.parent.as_str()));
            let layers = inventory::chain(&snapshot.parent, get)
                .map_err(|what| wrong(format!("snapshot {key:?}: {what}")))?;
            let mounted = mounts.has_upper(&files(snapshot));
            found.containers.push(Container { id: id.to_owned(), layers, mounted });
        }
        Ok(found)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Committed,
    Active,
    View,
}

#[derive(Debug)]
struct Snapshot {
    id: u64,
    kind: Kind,
    parent: String,
}

impl Snapshot {
    fn read(record: &Bucket<'_>) -> Option<Self> {
        let kind = match record.bytes("kind")? {
            [1] => Kind::View,
            [2] => Kind::Active,
            [3] => Kind::Committed,
            _ => return None,
        };
        Some(Self { id: uvarint(record.bytes("id")?)?, kind, parent: record.text("parent") })
    }
}

/// The images of one namespace, their names put together.
fn images(namespace: &str, records: Option<&Bucket<'_>>) -> Result<Vec<Image>, EngineError> {
    let mut images: Vec<Image> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (name, record) in records.into_iter().flat_map(Bucket::buckets) {
        let target = record.bucket("target").map(|target| {
            let size = target.bytes("size").and_then(uvarint).map(|zigzag| zigzag >> 1);
            (target.text("digest"), target.text("mediatype"), size)
        });
        let Some((digest, media_type, Some(size))) = target else {
            let what =
                format!("containerd's image {name:?} in {namespace}: its target has no size");
            return Err(EngineError::Unsupported { what });
        };
        let index = *known.entry(digest.clone()).or_insert_with(|| {
            let (namespace, names) = (namespace.to_owned(), Vec::new());
            images.push(Image { namespace, names, digest, media_type, size });
            images.len() - 1
        });
        images[index].names.push(name);
    }
    let rank = |name: &String| (name.starts_with("sha256:"), name.contains('@'));
    images.iter_mut().for_each(|image| image.names.sort_by_key(rank));
    Ok(images)
}

/// A number as Go's `binary.PutUvarint` writes it; `PutVarint` doubles it, if not negative.
fn uvarint(bytes: &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for (index, byte) in bytes.iter().enumerate() {
        let bits = u64::from(byte & 0x7f);
        let shift = u32::try_from(index * 7).ok().filter(|&shift| shift < 64)?;
        number |= bits.checked_shl(shift).filter(|shifted| shifted >> shift == bits)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// The part of containerd's configuration that says where it is.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Configuration {
    #[serde(default)]
    root: String,
}

fn root_of(location: &Location) -> Result<PathBuf, EngineError> {
    if let Some(root) = &location.root {
        return Ok(root.clone());
    }
    if !is_root() {
        return Ok(user_data().join("containerd"));
    }
    let configured: Configuration =
        read_toml(Path::new("/etc/containerd/config.toml"))?.unwrap_or_default();
    let root = Some(configured.root).filter(|root| !root.is_empty());
    Ok(root.map_or_else(|| "/var/lib/containerd".into(), PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references() {
        let parse = |text: &str| Reference::parse(text).unwrap();
        assert_eq!(parse("redis:7").location, Location::default());
        let location = |text: &str| {
            let Location { root, namespace } = parse(text).location;
            (root.map(|root| root.display().to_string()), namespace)
        };
        let both = (Some("/srv/a+b".into()), Some("k8s.io".into()));
        assert_eq!(location("[/srv/a+b+k8s.io]docker.io/library/redis:7"), both);
        assert_eq!(location("[/srv/a]redis"), (Some("/srv/a".into()), None));
        assert_eq!(location("[+moby]redis"), (None, Some("moby".into())));
        for bad in ["", "[/srv", "[/srv]", "[srv]a", "[]a", "[srv+moby]a"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_as_go_writes_them() {
        for (bytes, number) in [
            (&[5][..], 5),
            (&[0xac, 2], 300),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], u64::MAX),
        ] {
            assert_eq!(uvarint(bytes), Some(number));
        }
        for bad in [
            &[][..],
            &[0x80],
            &[0xff; 12],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
        ] {
            assert_eq!(uvarint(bad), None, "{bad:?}");
        }
    }

    fn image(namespace: &str, digest: &str, names: &[&str]) -> Image {
        Image {
            namespace: namespace.into(),
            names: names.iter().map(|&name| name.into()).collect(),
            digest: format!("sha256:{digest}"),
            media_type: String::new(),
            size: 1,
        }
    }

    #[test]
    fn one_name_in_several_namespaces() {
        let store = Containerd {
            root: "/store".into(),
            images: vec![
                image("default", "aaa1", &["docker.io/library/redis:7", "bare"]),
                image("default", "bbb2", &["docker.io/library/nginx:1"]),
                image("k8s.io", "aaa1", &["docker.io/library/redis:7", "sha256:ccc3"]),
                image("k8s.io", "ddd4", &["docker.io/library/nginx:1"]),
            ],
            others: BTreeSet::new(),
            namespace: None,
        };
        let digest = |name: &str| store.find(name).map(|i| i.digest.clone()).unwrap_or_default();
        for name in ["redis:7", "bare", "aaa", "sha256:ccc3", "docker.io/library/redis@sha256:aaa1"]
        {
            assert_eq!(digest(name), "sha256:aaa1", "{name}");
        }
        let both = store.find("nginx:1").unwrap_err().to_string();
        assert!(both.contains("[+k8s.io]docker.io/library/nginx:1 (sha256:ddd4)"), "{both}");
        assert!(store.find("redis").unwrap_err().to_string().contains("it has: bare, docker.io"));
    }
}
