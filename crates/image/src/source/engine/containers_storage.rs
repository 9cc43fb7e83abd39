//! The store of podman, buildah, CRI-O and skopeo (the library containers/storage).
//!
//! ```text
//! <root>/<driver>-images/images.json                 images: id, names, digest, top layer
//! <root>/<driver>-images/<id>/manifest               their documents ("big data"), keys that are no
//! <root>/<driver>-images/<id>/=<base64 of the key>   plain names in base64
//! <root>/<driver>-layers/layers.json                 layers: id, parent, diff-size
//! <root>/<driver>-layers/<id>.tar-split.gz           what a layer's archive was besides its files
//! <root>/<driver>-containers/containers.json         containers: id, names, image, their own layer
//! <root>/overlay/<id>/diff, <root>/vfs/dir/<id>      a layer's files
//! ```
//!
//! The engine replaces its JSON files as a whole, so that they can be read without its locks; what
//! a removal takes away meanwhile is missing afterwards, which is an error and no wrong result.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

use super::names::{self, Named};
use super::{
    Container as Found, EngineError, Inventory, LiveMounts, inventory, is_id, is_root, read_json,
    read_toml, user_config, user_data,
};

/// An image in a store: `[[DRIVER@]ROOT[+RUNROOT][:OPTIONS]]NAME`, as skopeo and podman write it,
/// the outer brackets being part of it.
pub type Reference = names::Reference<Location>;

/// Where a store is. Defaults come from the machine's `storage.conf`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Location {
    /// `overlay` or `vfs`.
    pub driver: Option<String>,
    /// The graph root.
    pub root: Option<PathBuf>,
}

impl Reference {
    /// Parses what follows `containers-storage:`; [`EngineError::NotFound`] if it cannot be a name.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let (store, name) = names::split_store("containers-storage", text)?;
        let location = match store {
            None => Location::default(),
            Some(inner) => {
                let (driver, rest) = match inner.split_once('@') {
                    Some((driver, rest)) => (Some(driver.to_owned()), rest),
                    None => (None, inner),
                };
                // The run root and the driver's options matter to writers only.
                let root = rest.split(['+', ':']).next().unwrap_or_default();
                if !root.starts_with('/') {
                    let what = "the store's root is no absolute path";
                    return Err(names::wrong("containers-storage", text, what));
                }
                Location { driver, root: Some(root.into()) }
            }
        };
        Ok(Self { location, name: name.to_owned() })
    }
}

/// The part of `storage.conf` that says where the store is.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Configuration {
    #[serde(default)]
    storage: StorageSection,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StorageSection {
    driver: String,
    graphroot: String,
}

/// An image's record.
#[derive(Debug, Clone, Deserialize)]
pub struct Image {
    /// Its id, normally the hex digest of its config.
    pub id: String,
    /// Digest of its manifest.
    #[serde(default)]
    pub digest: String,
    /// Whole names, with tags.
    #[serde(default)]
    pub names: Vec<String>,
    /// The top layer's id; empty for a list of images.
    #[serde(default)]
    pub layer: String,
}

impl Named for Image {
    fn names(&self) -> &[String] {
        &self.names
    }

    fn digest(&self) -> &str {
        &self.digest
    }

    fn id(&self) -> &str {
        &self.id
    }
}

/// A layer's record.
#[derive(Debug, Clone, Deserialize)]
pub struct Layer {
    /// Its id.
    pub id: String,
    /// The layer below.
    #[serde(default)]
    pub parent: String,
    /// Size of the archive it was unpacked from, uncompressed, in bytes.
    #[serde(default, rename = "diff-size")]
    pub diff_size: i64,
}

/// A container's record.
#[derive(Debug, Clone, Deserialize)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Id of its image.
    #[serde(default)]
    pub image: String,
    /// Id of its own, writable layer.
    #[serde(default)]
    pub layer: String,
}

/// An opened store.
#[derive(Debug)]
pub struct Storage {
    root: PathBuf,
    driver: &'static str,
    images: Vec<Image>,
    layers: HashMap<String, Layer>,
}

impl Storage {
    /// Whether there is a store at a location, of a driver that can be read.
    pub fn is_at(location: &Location) -> bool {
        let found = Self::open(location);
        !matches!(found, Err(EngineError::NotFound { .. } | EngineError::Unsupported { .. }))
    }

    /// Opens the store at a location, by default the one of this user's podman.
    ///
    /// # Errors
    /// [`EngineError::NotFound`] if there is none, [`EngineError::Unsupported`] for another driver
    /// than overlay and vfs, [`EngineError::Io`] and [`EngineError::Document`].
    pub fn open(location: &Location) -> Result<Self, EngineError> {
        let configured = match &location.root {
            Some(_) => StorageSection::default(),
            None => configuration()?,
        };
        let root = match &location.root {
            Some(root) => root.clone(),
            None if !configured.graphroot.is_empty() => configured.graphroot.into(),
            None if is_root() => "/var/lib/containers/storage".into(),
            None => user_data().join("containers/storage"),
        };
        let wanted = location.driver.clone().unwrap_or(configured.driver);
        let there = |driver: &str| root.join(format!("{driver}-images/images.json"));
        let driver = match wanted.as_str() {
            "overlay" | "overlay2" => "overlay",
            "vfs" => "vfs",
            "" => {
                let known = ["overlay", "vfs"].into_iter().find(|driver| there(driver).exists());
                known.ok_or_else(|| no_store(&root))?
            }
            other => {
                let (root, can) = (root.display(), "overlay and vfs can be read");
                let what = format!("{root}: the storage driver {other:?}; {can}");
                return Err(EngineError::Unsupported { what });
            }
        };
        let images = read_json(&there(driver))?.ok_or_else(|| no_store(&root))?;
        let path = root.join(format!("{driver}-layers/layers.json"));
        let layers = read_json(&path)?.unwrap_or_default();
        Self::of(root, driver, images, layers)
    }

    /// A store with these records.
    pub(super) fn of(
        root: PathBuf,
        driver: &'static str,
        images: Vec<Image>,
        layers: Vec<Layer>,
    ) -> Result<Self, EngineError> {
        // Ids become parts of paths.
        if let Some(bad) = layers.iter().map(|l| &l.id).find(|id| !is_id(id)) {
            return Err(EngineError::Document {
                path: root.join(format!("{driver}-layers/layers.json")),
                what: format!("{bad:?} is no id of a layer"),
            });
        }
        let layers = layers.into_iter().map(|layer| (layer.id.clone(), layer)).collect();
        Ok(Self { root, driver, images, layers })
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All images.
    pub fn images(&self) -> &[Image] {
        &self.images
    }

    /// All containers, whether they run or not.
    pub fn containers(&self) -> Result<Vec<Container>, EngineError> {
        let path = self.root.join(format!("{}-containers/containers.json", self.driver));
        Ok(read_json(&path)?.unwrap_or_default())
    }

    /// Finds an image as podman does: by whole name, by the end of one (`redis` is
    /// `docker.io/library/redis:latest`), by name and digest, by the beginning of its id.
    /// [`EngineError::NotFound`] if there is none, or several.
    pub fn find(&self, name: &str) -> Result<&Image, EngineError> {
        let root = self.root.display();
        match names::matching(&self.images, name)[..] {
            [one] => Ok(one),
            [] => Err(names::none(&self.images, name, &root.to_string())),
            ref found => {
                let ids: Vec<_> = found.iter().map(|image| image.id.as_str()).collect();
                let what = format!("{root}: {name:?} could be each of {}", ids.join(", "));
                Err(EngineError::NotFound { what })
            }
        }
    }

    /// The layers of an image or container, lowest first. [`EngineError::Document`] if one is
    /// missing or they form a cycle.
    pub fn chain<'a>(&'a self, top: &'a str) -> Result<Vec<&'a Layer>, EngineError> {
        let wrong = |what| EngineError::Document {
            path: self.root.join(format!("{}-layers/layers.json", self.driver)),
            what,
        };
        let get = |id: &str| self.layers.get(id).map(|layer| (layer, layer.parent.as_str()));
        inventory::chain(top, get)
            .map_err(|what| wrong(format!("{what} (additional image stores are not looked at)")))
    }

    /// Where a document of an image is, by its key: `manifest`, or the digest of the config.
    /// [`EngineError::Document`] if the image's id cannot be part of a path.
    pub fn document(&self, image: &Image, key: &str) -> Result<PathBuf, EngineError> {
        let dir = self.root.join(format!("{}-images", self.driver));
        if !is_id(&image.id) {
            let what = format!("{:?} is no id of an image", image.id);
            return Err(EngineError::Document { path: dir.join("images.json"), what });
        }
        let plain = key.bytes().all(|b| b == b'.' || b.is_ascii_digit() || b.is_ascii_lowercase());
        let name = if plain { key.to_owned() } else { format!("={}", BASE64_STANDARD.encode(key)) };
        Ok(dir.join(&image.id).join(name))
    }

    /// The directory with a layer's files. Of vfs, those of the layers below are there as well.
    pub fn files(&self, layer: &Layer) -> PathBuf {
        match self.driver {
            "vfs" => self.root.join("vfs/dir").join(&layer.id),
            _ => self.root.join("overlay").join(&layer.id).join("diff"),
        }
    }

    /// The layers unpacked here, and the containers with their mounts.
    pub fn inventory(&self, mounts: &LiveMounts) -> Result<Inventory, EngineError> {
        Ok(self.inventory_with(self.containers()?, mounts))
    }

    /// The same with these containers.
    pub(super) fn inventory_with<'a>(
        &'a self,
        containers: Vec<Container>,
        mounts: &LiveMounts,
    ) -> Inventory {
        let mut found = Inventory::new("podman", &self.root, self.driver);
        found.images = self.images.len() as u64;
        let mut layers: HashMap<&str, usize> = HashMap::new();
        let mut images = HashMap::new();
        for image in &self.images {
            match self.chain(&image.layer) {
                Ok(chain) => {
                    let index = |layer: &'a Layer| {
                        *layers.entry(&layer.id).or_insert_with(|| {
                            found.layers.push(self.files(layer));
                            found.layers.len() - 1
                        })
                    };
                    images.insert(&image.id, chain.into_iter().map(index).collect::<Vec<_>>());
                }
                Err(error) => found.unseen.push(format!("image {}: {error}", image.id)),
            }
        }
        for container in containers {
            // With vfs nothing is mounted.
            let at = self.root.join(self.driver).join(&container.layer).join("merged");
            let mounted = mounts.has_target(&at);
            let layers = images.get(&container.image).cloned().unwrap_or_default();
            found.containers.push(Found { id: container.id, layers, mounted });
        }
        if self.driver != "overlay" && !found.containers.is_empty() {
            let what = format!("which containers run: the driver {} mounts nothing", self.driver);
            found.unseen.push(what);
        }
        found
    }

    /// The file with a layer's tar-split. [`EngineError::Unsupported`] if it was not kept, or the
    /// layer's files are composefs objects.
    pub fn tar_split(&self, layer: &Layer) -> Result<PathBuf, EngineError> {
        let dir = self.root.join(format!("{}-layers", self.driver));
        let path = dir.join(format!("{}.tar-split.gz", layer.id));
        let composefs = self.root.join("overlay").join(&layer.id).join("composefs-data");
        let what = if self.driver == "overlay" && composefs.exists() {
            "its files are kept as composefs objects"
        } else if !path.exists() {
            "there is no tar-split of it (a partial pull of a zstd:chunked layer leaves none)"
        } else {
            return Ok(path);
        };
        let (root, id) = (self.root.display(), &layer.id);
        let what = format!("{root}: layer {id} cannot be read back as an archive: {what}");
        Err(EngineError::Unsupported { what })
    }
}

fn no_store(root: &Path) -> EngineError {
    let what = format!("{}: no images of podman's here (containers/storage)", root.display());
    EngineError::NotFound { what }
}

/// The first of the files that podman would read.
fn configuration() -> Result<StorageSection, EngineError> {
    let machines = ["/etc/containers/storage.conf", "/usr/share/containers/storage.conf"];
    let files = match std::env::var_os("CONTAINERS_STORAGE_CONF") {
        Some(path) => vec![PathBuf::from(path)],
        None if is_root() => machines.map(PathBuf::from).to_vec(),
        // The machine's file is about root's store.
        None => vec![user_config().join("containers/storage.conf")],
    };
    for path in files {
        if let Some(found) = read_toml::<Configuration>(&path)? {
            return Ok(found.storage);
        }
    }
    Ok(StorageSection::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage() -> Storage {
        let image = |id: &str, digest: &str, names: &[&str]| Image {
            id: id.into(),
            digest: digest.into(),
            names: names.iter().map(|&n| n.into()).collect(),
            layer: String::new(),
        };
        Storage {
            root: "/store".into(),
            driver: "overlay",
            images: vec![
                image(
                    "abc111",
                    "sha256:1",
                    &["localhost:5000/redis:7", "docker.io/library/redis:latest"],
                ),
                image("abc222", "sha256:2", &["quay.example/other/redis:7"]),
                image("def333", "sha256:3", &["quay.example/redis/redis@sha256:3"]),
            ],
            layers: HashMap::new(),
        }
    }

    #[test]
    fn images_by_the_names_that_podman_takes() {
        let storage = storage();
        let id = |name: &str| storage.find(name).map(|image| image.id.as_str()).unwrap_or("none");
        assert_eq!(id("redis"), "abc111");
        assert_eq!(id("library/redis"), "abc111");
        assert_eq!(id("localhost:5000/redis:7"), "abc111");
        assert_eq!(id("other/redis:7"), "abc222");
        assert_eq!(id("redis@sha256:3"), "def333");
        assert_eq!(id("redis@sha256:4"), "none");
        assert_eq!(id("def"), "def333");
        assert_eq!(id("sha256:abc2"), "abc222");
        let both = storage.find("redis:7").unwrap_err().to_string();
        assert!(both.contains("abc111, abc222"), "{both}");
        let both = storage.find("abc").unwrap_err().to_string();
        assert!(both.contains("abc111, abc222"), "{both}");
        let none = storage.find("dis").unwrap_err().to_string();
        assert!(none.contains("docker.io/library/redis:latest"), "{none}");
    }

    #[test]
    fn references_as_skopeo_writes_them() {
        let parse = |text: &str| Reference::parse(text).unwrap();
        assert_eq!(parse("redis:7").location, Location::default());
        let whole =
            parse("[overlay@/var/store+/run/store:overlay.mount_program=x]localhost/redis:7");
        assert_eq!(whole.name, "localhost/redis:7");
        assert_eq!(whole.location.driver.as_deref(), Some("overlay"));
        assert_eq!(whole.location.root.as_deref(), Some(Path::new("/var/store")));
        assert_eq!(parse("[/var/store]a").location.root.as_deref(), Some(Path::new("/var/store")));
        for bad in ["", "[/var/store", "[/var/store]", "[store]a"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
    }
}
