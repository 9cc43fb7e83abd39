//! Where an image comes from: forms, autodetection, and finding its manifest, config and layers.

pub mod engine;
mod file;
pub(crate) mod manifest;
mod remote;

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::manifest::{
    Config, Descriptor, DockerImage, INDEX_DEPTH_MAX, Index, LAYERS_MAX, Leads, Manifest,
};
use crate::digest::{BlobDigest, ChainId, DiffId};
use crate::error::EngineError;
use crate::error::ImportError;
use crate::layer::blob::Blob;
use crate::layer::tar::{BLOCK, Entry, Input, Kind, MetaLimits, Reader, TarError};
use crate::layer::tar_split::UnpackedLayer;
use crate::reference::Reference;
use crate::registry::{RegistryOptions, Repository};
use crate::source::engine::containerd::{self, Containerd};
use crate::source::engine::containers_storage::{self, Storage};
pub use manifest::Platform;

use crate::layer::FoundLayer;
use crate::trust::{PublicKey, Record};

/// Members of an archive that are looked at. A layout has a handful per layer.
const MEMBERS_MAX: usize = 100_000;

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A plain directory tree: `dir:PATH`.
    Directory {
        /// Its root.
        path: PathBuf,
    },
    /// An OCI image layout in a directory: `oci:PATH[:TAG]`.
    Layout {
        /// The directory with `oci-layout` and `index.json`.
        path: PathBuf,
        /// Which image, if there are several.
        tag: Option<String>,
    },
    /// An OCI image layout in a tar archive: `oci-archive:PATH[:TAG]`.
    Archive {
        /// The archive.
        path: PathBuf,
        /// Which image, if there are several.
        tag: Option<String>,
    },
    /// An image in a registry: `docker://[HOST[:PORT]/]NAME[:TAG][@DIGEST]`.
    Registry(Reference),
    /// An image in podman's own store: `containers-storage:[[DRIVER@]ROOT]NAME`.
    ContainersStorage(containers_storage::Reference),
    /// An image in containerd's store: `containerd:[[ROOT][+NAMESPACE]]NAME`.
    Containerd(containerd::Reference),
    /// What `docker save` writes: `docker-archive:PATH[:TAG]`.
    DockerSave {
        /// The archive.
        path: PathBuf,
        /// Which image, if there are several: `name:tag`.
        tag: Option<String>,
    },
}

impl Source {
    /// Understands a form with its prefix, or finds out what lies at `PATH[:TAG]`.
    ///
    /// Both paths and tags may hold colons: of all ways to split, the one with the longest path that
    /// exists is taken.
    ///
    /// # Errors
    /// [`ImportError::Source`] if nothing is there or it is none of the forms; [`ImportError::Registry`] for
    /// a name that cannot be, [`ImportError::Engine`] as well; [`ImportError::Io`].
    pub fn parse(text: &str) -> Result<Self, ImportError> {
        if let Some(path) = text.strip_prefix("dir:") {
            return Ok(Self::Directory { path: path.into() });
        }
        if let Some(name) = text.strip_prefix("docker://") {
            return Ok(Self::Registry(Reference::parse(name)?));
        }
        if let Some(name) = text.strip_prefix("containers-storage:") {
            return Ok(Self::ContainersStorage(containers_storage::Reference::parse(name)?));
        }
        if let Some(name) = text.strip_prefix("containerd:") {
            return Ok(Self::Containerd(containerd::Reference::parse(name)?));
        }
        if let Some(rest) = text.strip_prefix("oci:") {
            let (path, tag) = split_tag(rest);
            return Ok(Self::Layout { path, tag });
        }
        if let Some(rest) = text.strip_prefix("oci-archive:") {
            let (path, tag) = split_tag(rest);
            return Ok(Self::Archive { path, tag });
        }
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            let (path, tag) = split_tag(rest);
            return Ok(Self::DockerSave { path, tag });
        }
        Self::detect(text)
    }

    fn detect(text: &str) -> Result<Self, ImportError> {
        let (path, tag) = split_tag(text);
        let meta = std::fs::metadata(&path).map_err(|e| {
            if e.kind() == io::ErrorKind::NotFound {
                ImportError::Source {
                    what: format!(
                        "{text:?}: no such file or directory (forms: PATH, dir:PATH, oci:PATH[:TAG], \
                         oci-archive:PATH[:TAG], docker-archive:PATH[:TAG], docker://NAME[:TAG], containers-storage:NAME, \
                         containerd:NAME)"
                    ),
                }
            } else {
                io_error(&path, e)
            }
        })?;
        if meta.is_dir() {
            if path.join("oci-layout").is_file() || path.join("index.json").is_file() {
                return Ok(Self::Layout { path, tag });
            }
            if tag.is_some() {
                return Err(ImportError::Source {
                    what: format!("{}: a plain directory has no tags", path.display()),
                });
            }
            return Ok(Self::Directory { path });
        }
        let archive = Members::open(&path)?;
        if archive.members.contains_key("index.json") {
            Ok(Self::Archive { path, tag })
        } else if archive.members.contains_key("manifest.json") {
            Ok(Self::DockerSave { path, tag })
        } else {
            Err(archive.lacks(
                "a tar archive, but neither an OCI layout (index.json) nor what `docker save` writes \
                 (manifest.json)",
            ))
        }
    }
}

/// Splits `PATH[:TAG]` at the colon that leaves the longest existing path.
fn split_tag(text: &str) -> (PathBuf, Option<String>) {
    let mut end = text.len();
    loop {
        if Path::new(&text[..end]).symlink_metadata().is_ok() {
            let tag = text.get(end + 1..).filter(|t| !t.is_empty()).map(str::to_owned);
            return (text[..end].into(), tag);
        }
        match text[..end].rfind(':') {
            Some(colon) if colon > 0 => end = colon,
            // Nothing exists: what the error message should name.
            _ => return (text.into(), None),
        }
    }
}

/// An image found in its source: everything that is known without reading layers.
pub(crate) struct FoundImage {
    /// Digest of the manifest; of the config for a `docker save` archive, which has no manifest.
    pub(crate) manifest: BlobDigest,
    /// The manifest, byte for byte, if there is one and it is text.
    pub(crate) document: Option<String>,
    /// The config, byte for byte.
    pub(crate) config: String,
    pub(crate) layers: Vec<FoundLayer>,
}

/// An opened registry, layout or archive.
pub(crate) struct Opened {
    /// Of a registry: the image's name.
    path: PathBuf,
    tag: Option<String>,
    blobs: Blobs,
    docker: bool,
}

/// Where the blobs are.
enum Blobs {
    Directory(PathBuf),
    Archive(Members),
    Registry(Arc<Repository>),
    Storage(Storage, containers_storage::Image),
    /// Where its blobs are, and what the image's name stands for.
    Containerd(PathBuf, containerd::Image),
}

/// The chosen manifest, before config and layers are looked at.
pub(crate) enum Chosen {
    Manifest {
        digest: BlobDigest,
        /// Not read yet.
        descriptor: Descriptor,
        /// What `index.json` calls the image.
        name: Option<String>,
        /// Digest of what was asked for: the manifest's own, or that of the index which led to it.
        asked: BlobDigest,
    },
    Docker {
        image: DockerImage,
        config: Vec<u8>,
        digest: BlobDigest,
    },
}

impl Opened {
    /// Opens a layout or archive, or gets ready to ask a registry.
    pub(crate) fn open(source: &Source, registry: &RegistryOptions) -> Result<Self, ImportError> {
        let (path, tag, docker) = match source {
            Source::Directory { path } => {
                return Err(ImportError::Source {
                    what: format!("{}: a plain directory has no blobs", path.display()),
                });
            }
            Source::Layout { path, tag } => {
                return Ok(Self {
                    path: path.clone(),
                    tag: tag.clone(),
                    blobs: Blobs::Directory(path.clone()),
                    docker: false,
                });
            }
            Source::Registry(reference) => {
                return Ok(Self {
                    path: reference.to_string().into(),
                    tag: None,
                    blobs: Blobs::Registry(Repository::open(reference, registry)?),
                    docker: false,
                });
            }
            Source::ContainersStorage(reference) => {
                let storage = Storage::open(&reference.place)?;
                let image = storage.find(&reference.name)?.clone();
                return Ok(Self {
                    path: storage.root().to_owned(),
                    tag: Some(reference.name.clone()),
                    blobs: Blobs::Storage(storage, image),
                    docker: false,
                });
            }
            Source::Containerd(reference) => {
                let store = Containerd::open(&reference.place)?;
                let image = store.find(&reference.name)?.clone();
                return Ok(Self {
                    path: store.root().to_owned(),
                    tag: Some(reference.name.clone()),
                    blobs: Blobs::Containerd(store.content(), image),
                    docker: false,
                });
            }
            Source::Archive { path, tag } => (path, tag, false),
            Source::DockerSave { path, tag } => (path, tag, true),
        };
        let blobs = Blobs::Archive(Members::open(path)?);
        Ok(Self { path: path.clone(), tag: tag.clone(), blobs, docker })
    }

    /// Finds the manifest that was asked for, through indexes and platforms.
    pub(crate) fn choose(
        &self,
        platform: &Platform,
        document_max: u64,
    ) -> Result<Chosen, ImportError> {
        match &self.blobs {
            Blobs::Registry(repository) => {
                let found = remote::resolve(repository, document_max)?;
                self.descend(found, None, platform, document_max)
            }
            Blobs::Storage(_, image) => self.choose_stored(image, document_max),
            Blobs::Containerd(_, image) => {
                let (media_type, digest) = (image.media_type.clone(), image.digest.clone());
                let target = Descriptor::new(media_type, digest, image.size);
                self.descend(target, image.names.first().cloned(), platform, document_max)
            }
            _ if self.docker => self.choose_docker(document_max),
            _ => self.choose_oci(platform, document_max),
        }
    }

    /// What cosign has signed of the chosen image with one of these keys: the index that the name stands for,
    /// which names the manifest by its digest, or the manifest itself. Only a registry has such signatures.
    pub(crate) fn cosigned(
        &self,
        chosen: &Chosen,
        keys: &[PublicKey],
    ) -> Result<Vec<Record>, ImportError> {
        let (Blobs::Registry(repository), Chosen::Manifest { digest, asked, .. }) =
            (&self.blobs, chosen)
        else {
            return Ok(Vec::new());
        };
        let mut signed = vec![asked];
        signed.extend((digest != asked).then_some(digest));
        let mut found = Vec::new();
        for digest in signed {
            let name = digest.to_string();
            let claims = remote::claims(repository, digest)?.into_iter();
            let ours = claims.filter(|claim| claim.signer(&name, keys).is_some());
            found.extend(ours.map(|claim| Record::of_claim(name.clone(), claim)));
        }
        Ok(found)
    }

    /// Layers to unpack at a time, if the source knows better than the machine.
    pub(crate) fn jobs(&self) -> Option<usize> {
        match &self.blobs {
            Blobs::Registry(repository) => Some(repository.jobs()),
            _ => None,
        }
    }

    fn choose_oci(&self, platform: &Platform, max: u64) -> Result<Chosen, ImportError> {
        let lacks = || self.lacks("not an OCI layout, it has no index.json");
        let bytes = self.blobs.document("index.json", max)?.ok_or_else(lacks)?;
        let index: Index = manifest::parse("index", "index.json", &bytes)?;
        check_schema("index", "index.json", index.schema_version)?;
        let named: Vec<&Descriptor> = match &self.tag {
            None => index.manifests.iter().collect(),
            Some(tag) => index.manifests.iter().filter(|d| d.names().any(|n| n == tag)).collect(),
        };
        let descriptor = match named[..] {
            [] => return Err(self.no_such_tag(&index)),
            [one] => one.clone(),
            // Several platforms of one image, or several images?
            _ if named.iter().all(|d| d.names().eq(named[0].names())) => {
                manifest::for_platform(&named, platform)?.clone()
            }
            _ => return Err(self.no_such_tag(&index)),
        };
        let name = descriptor.name().map(str::to_owned);
        self.descend(descriptor, name, platform, max)
    }

    /// Follows indexes to the manifest for a platform. The manifest itself is not read.
    fn descend(
        &self,
        mut descriptor: Descriptor,
        name: Option<String>,
        platform: &Platform,
        max: u64,
    ) -> Result<Chosen, ImportError> {
        let asked = descriptor.blob_digest()?;
        for _ in 0..=INDEX_DEPTH_MAX {
            let kind = manifest::leads(&descriptor)?;
            let digest = descriptor.blob_digest()?;
            if kind == Leads::ToManifest {
                return Ok(Chosen::Manifest { digest, descriptor, name, asked });
            }
            let bytes = self.document(&descriptor, max)?;
            let index: Index = manifest::parse("index", &descriptor.digest, &bytes)?;
            check_schema("index", &descriptor.digest, index.schema_version)?;
            let entries: Vec<&Descriptor> = index.manifests.iter().collect();
            descriptor = manifest::for_platform(&entries, platform)?.clone();
        }
        Err(ImportError::Document {
            what_blob: "index",
            digest: descriptor.digest,
            what: format!("more than {INDEX_DEPTH_MAX} indexes in indexes"),
        })
    }

    fn lacks(&self, what: &str) -> ImportError {
        match &self.blobs {
            Blobs::Archive(members) => members.lacks(what),
            _ => ImportError::Source { what: format!("{}: {what}", self.path.display()) },
        }
    }

    fn no_such_tag(&self, index: &Index) -> ImportError {
        let names: BTreeSet<&str> =
            index.manifests.iter().flat_map(Descriptor::names).take(64).collect();
        let names: Vec<&str> = names.into_iter().collect();
        self.unknown_tag(&names)
    }

    fn unknown_tag(&self, names: &[&str]) -> ImportError {
        let path = self.path.display();
        let there = if names.is_empty() {
            "it names none".to_owned()
        } else {
            format!("it has: {}", names.join(", "))
        };
        ImportError::Source {
            what: match &self.tag {
                Some(tag) => format!("{path} has no image {tag:?}; {there}"),
                None if names.is_empty() => {
                    format!("{path} holds no image, or several without names")
                }
                None => format!("{path} holds several images, say which; {there}"),
            },
        }
    }

    /// Of several platforms, podman keeps the one that it has pulled: there is nothing to choose.
    fn choose_stored(
        &self,
        image: &containers_storage::Image,
        max: u64,
    ) -> Result<Chosen, ImportError> {
        let missing =
            || ImportError::Missing { digest: "manifest".into(), path: self.path.clone() };
        let bytes = self.blobs.document("manifest", max)?.ok_or_else(missing)?;
        let digest = BlobDigest::sha256(&bytes);
        if !image.digest.is_empty() && image.digest != digest.to_string() {
            let (digest, actual) = (image.digest.clone(), digest.to_string());
            return Err(ImportError::Digest { digest, actual });
        }
        let media_type = manifest::media_type(&digest.to_string(), &bytes)?;
        let descriptor = Descriptor::new(media_type, digest.to_string(), bytes.len() as u64);
        if manifest::leads(&descriptor)? != Leads::ToManifest {
            let name = self.tag.as_deref().unwrap_or_default();
            let what = format!("{}: {name:?} is a list of images, not one", self.path.display());
            return Err(ImportError::Source { what });
        }
        let (name, asked) = (image.names.first().cloned(), digest.clone());
        Ok(Chosen::Manifest { digest, descriptor, name, asked })
    }

    fn choose_docker(&self, max: u64) -> Result<Chosen, ImportError> {
        let lacks = || self.lacks("not from `docker save`, no manifest.json");
        let bytes = self.blobs.document("manifest.json", max)?.ok_or_else(lacks)?;
        let images: Vec<DockerImage> = manifest::parse("manifest", "manifest.json", &bytes)?;
        let tags = |image: &DockerImage| image.repo_tags.clone().unwrap_or_default();
        let mut found: Vec<DockerImage> = Vec::new();
        let mut names = Vec::new();
        for image in images {
            names.extend(tags(&image));
            if self.tag.as_ref().is_none_or(|tag| tags(&image).contains(tag)) {
                found.push(image);
            }
        }
        let image = match found.pop() {
            Some(image) if found.is_empty() => image,
            _ => {
                let names: Vec<&str> = names.iter().take(64).map(String::as_str).collect();
                return Err(self.unknown_tag(&names));
            }
        };
        let config = self.blobs.document(&image.config, max)?.ok_or_else(|| {
            ImportError::Missing { digest: image.config.clone(), path: self.path.clone() }
        })?;
        let digest = BlobDigest::sha256(&config);
        // The name is the digest: `<hex>.json`, or `blobs/sha256/<hex>` from Docker 25 on.
        let promised =
            image.config.trim_end_matches(".json").rsplit('/').next().unwrap_or_default();
        match BlobDigest::parse(&format!("sha256:{promised}")) {
            Some(promised) if promised == digest => Ok(Chosen::Docker { image, config, digest }),
            Some(promised) => Err(ImportError::Digest {
                digest: promised.to_string(),
                actual: digest.to_string(),
            }),
            None => Err(ImportError::Document {
                what_blob: "manifest",
                digest: "manifest.json".into(),
                what: format!("the config's name {:?} is not its digest", image.config),
            }),
        }
    }

    /// Looks up config and layers of the chosen image and checks that they fit each other.
    pub(crate) fn resolve(&self, chosen: Chosen, max: u64) -> Result<FoundImage, ImportError> {
        match chosen {
            Chosen::Manifest { digest, descriptor, .. } => {
                let bytes = self.document(&descriptor, max)?;
                self.resolve_oci(digest, &bytes, max)
            }
            Chosen::Docker { image, config, digest } => self.resolve_docker(&image, config, digest),
        }
    }

    fn resolve_oci(
        &self,
        digest: BlobDigest,
        bytes: &[u8],
        max: u64,
    ) -> Result<FoundImage, ImportError> {
        let name = digest.to_string();
        let image: Manifest = manifest::parse("manifest", &name, bytes)?;
        check_schema("manifest", &name, image.schema_version)?;
        if !image.media_type.is_empty() {
            manifest::leads(&Descriptor {
                media_type: image.media_type.clone(),
                digest: name.clone(),
                ..image.config.clone()
            })?;
        }
        manifest::check_config(&image.config)?;
        image.layers.iter().try_for_each(manifest::check_layer)?;
        let config = self.blob(&image.config)?.read_all(max)?;
        let (config, diff_ids) = check_config(&image.config.digest, config, image.layers.len())?;
        let blobs = match &self.blobs {
            Blobs::Storage(storage, image) => stored_layers(storage, image, &diff_ids)?,
            _ => image
                .layers
                .iter()
                .map(|layer| Ok((self.blob(layer)?, layer.media_type.clone())))
                .collect::<Result<Vec<_>, ImportError>>()?,
        };
        let document = std::str::from_utf8(bytes).ok().map(str::to_owned);
        Ok(FoundImage { manifest: digest, document, config, layers: chain(blobs, diff_ids) })
    }

    fn resolve_docker(
        &self,
        image: &DockerImage,
        config: Vec<u8>,
        digest: BlobDigest,
    ) -> Result<FoundImage, ImportError> {
        let (config, diff_ids) = check_config(&image.config, config, image.layers.len())?;
        let Blobs::Archive(members) = &self.blobs else {
            return Err(ImportError::Source { what: "`docker save` makes archives".into() });
        };
        let mut blobs = Vec::with_capacity(image.layers.len());
        for (name, diff_id) in image.layers.iter().zip(&diff_ids) {
            let (offset, size) = members.find(name).ok_or_else(|| ImportError::Missing {
                digest: name.clone(),
                path: self.path.clone(),
            })?;
            // There is no digest of the blob but its name in the new form; the diff-id is checked in
            // either, and is the same thing as long as the archive's layers are not compressed.
            let promised = name.strip_prefix("blobs/sha256/").map(|hex| format!("sha256:{hex}"));
            let digest = match promised {
                Some(promised) => {
                    BlobDigest::parse(&promised).ok_or_else(|| ImportError::Document {
                        what_blob: "manifest",
                        digest: "manifest.json".into(),
                        what: format!("the layer's name {name:?} is not its digest"),
                    })?
                }
                None => members.digest(offset, size, diff_id)?,
            };
            let blob = file::in_file(digest, members.file.clone(), offset, size);
            blobs.push((blob, String::new()));
        }
        let layers = chain(blobs, diff_ids);
        Ok(FoundImage { manifest: digest, document: None, config, layers })
    }

    /// A manifest or index by its descriptor, checked.
    fn document(&self, descriptor: &Descriptor, max: u64) -> Result<Vec<u8>, ImportError> {
        match &self.blobs {
            Blobs::Registry(repository) => remote::document(repository, descriptor, max),
            _ => self.blob(descriptor)?.read_all(max),
        }
    }

    /// A blob by its descriptor; its size is checked here, its content whenever it is read.
    fn blob(&self, descriptor: &Descriptor) -> Result<Blob, ImportError> {
        let digest = descriptor.blob_digest()?;
        let missing =
            || ImportError::Missing { digest: digest.to_string(), path: self.path.clone() };
        let (file, offset, size) = match &self.blobs {
            Blobs::Registry(repository) => return remote::blob(repository, descriptor),
            Blobs::Directory(root) => {
                open_whole(&root.join(digest.layout_path()))?.ok_or_else(missing)?
            }
            // The manifest is there under its digest, too, but only since podman 1.5.
            Blobs::Storage(storage, image) => {
                let text = digest.to_string();
                let key = if image.digest == text { "manifest" } else { &text };
                open_whole(&storage.document(image, key)?)?.ok_or_else(missing)?
            }
            // An image for several platforms is there as far as it was asked for.
            Blobs::Containerd(content, image) => {
                let found = open_whole(&content.join(digest.layout_path()))?;
                found.ok_or_else(|| EngineError::NotFound {
                    what: format!(
                        "{}: containerd has not (or no longer) blob {digest} of {}: a platform that was not \
                         fetched, or a layer that was dropped when it was unpacked (discard_unpacked_layers)",
                        self.path.display(),
                        image.names.first().unwrap_or(&image.digest)
                    ),
                })?
            }
            Blobs::Archive(members) => {
                let (offset, size) = members.find(&digest.layout_path()).ok_or_else(missing)?;
                (members.file.clone(), offset, size)
            }
        };
        if size != descriptor.size {
            return Err(ImportError::Size {
                digest: digest.to_string(),
                expected: descriptor.size,
                actual: size,
            });
        }
        Ok(file::in_file(digest, file, offset, size))
    }
}

/// Opens a file that is a blob, from its first byte on; `None` if there is no such file.
fn open_whole(path: &Path) -> Result<Option<(Arc<File>, u64, u64)>, ImportError> {
    let file = match file::open_regular(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|e| io_error(path, e))?,
    };
    let size = file.metadata().map_err(|e| io_error(path, e))?.len();
    Ok(Some((Arc::new(file), 0, size)))
}

/// The layers of an image in podman's store, as the archives they were: blobs by their diff-ids.
fn stored_layers(
    storage: &Storage,
    image: &containers_storage::Image,
    diff_ids: &[DiffId],
) -> Result<Vec<(Blob, String)>, ImportError> {
    let wrong = |what: String| ImportError::Document {
        what_blob: "image",
        digest: image.id.clone(),
        what: format!("{what} in {}", storage.root().display()),
    };
    let chain = storage.chain(&image.layer)?;
    if chain.len() != diff_ids.len() {
        return Err(wrong(format!("{} layers for {} diff_ids", chain.len(), diff_ids.len())));
    }
    let mut blobs = Vec::with_capacity(chain.len());
    for (layer, diff_id) in chain.into_iter().zip(diff_ids) {
        let tar_split = storage.tar_split(layer)?;
        let size = u64::try_from(layer.diff_size).ok().filter(|&size| size > 0);
        let size = size.ok_or_else(|| wrong(format!("layer {} has no size", layer.id)))?;
        let content = UnpackedLayer { tar_split, files: storage.files(layer) };
        let blob = Blob::new(diff_id.as_blob().clone(), size, Arc::new(content));
        blobs.push((blob, manifest::OCI_LAYER.to_owned()));
    }
    Ok(blobs)
}

/// Joins blobs and diff-ids, and computes the chain.
fn chain(blobs: Vec<(Blob, String)>, diff_ids: Vec<DiffId>) -> Vec<FoundLayer> {
    let mut layers: Vec<FoundLayer> = Vec::with_capacity(blobs.len());
    for ((blob, media_type), diff_id) in blobs.into_iter().zip(diff_ids) {
        let chain_id = ChainId::over(layers.last().map(|below| &below.chain_id), &diff_id);
        layers.push(FoundLayer { blob, media_type, diff_id, chain_id });
    }
    layers
}

/// What the import needs of a config, and that it fits the manifest.
fn check_config(
    digest: &str,
    bytes: Vec<u8>,
    layers: usize,
) -> Result<(String, Vec<DiffId>), ImportError> {
    let fail = |what: String| ImportError::Document {
        what_blob: "config",
        digest: digest.to_owned(),
        what,
    };
    let config: Config = manifest::parse("config", digest, &bytes)?;
    if config.rootfs.kind != "layers" {
        return Err(fail(format!("rootfs.type is {:?}, not \"layers\"", config.rootfs.kind)));
    }
    if !(config.os.is_empty() || config.os == "linux") {
        return Err(fail(format!(
            "an image for {:?} ({}), not linux",
            config.os, config.architecture
        )));
    }
    if layers > LAYERS_MAX {
        return Err(fail(format!("{layers} layers, more than {LAYERS_MAX}")));
    }
    let count = config.rootfs.diff_ids.len();
    if count != layers {
        return Err(fail(format!("{count} diff_ids for {layers} layers")));
    }
    let diff_ids = config
        .rootfs
        .diff_ids
        .iter()
        .map(|id| {
            let diff_id = id.parse::<DiffId>();
            diff_id.map_err(|_| fail(format!("diff_id {id:?} is not a sha256 digest")))
        })
        .collect::<Result<_, _>>()?;
    let text = String::from_utf8(bytes).map_err(|_| fail("not UTF-8".into()))?;
    Ok((text, diff_ids))
}

fn check_schema(what_blob: &'static str, digest: &str, version: u32) -> Result<(), ImportError> {
    if version == 2 {
        return Ok(());
    }
    Err(ImportError::Document {
        what_blob,
        digest: digest.to_owned(),
        what: format!("schemaVersion is {version}, not 2"),
    })
}

impl Blobs {
    /// A document by its name; `None` if it is not there.
    fn document(&self, name: &str, max: u64) -> Result<Option<Vec<u8>>, ImportError> {
        let too_big = |size: u64| ImportError::Limit {
            what: format!("{name} of {size} bytes"),
            limit: max,
            option: "document_bytes",
        };
        match self {
            // There documents have digests, not names.
            Self::Registry(_) | Self::Containerd(..) => Ok(None),
            Self::Directory(_) | Self::Storage(..) => {
                let path = match self {
                    Self::Storage(storage, image) => storage.document(image, name)?,
                    Self::Directory(root) => root.join(name),
                    _ => return Ok(None),
                };
                let file = match file::open_regular(&path) {
                    Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                    other => other.map_err(|e| io_error(&path, e))?,
                };
                let mut bytes = Vec::new();
                file.take(max + 1).read_to_end(&mut bytes).map_err(|e| io_error(&path, e))?;
                if bytes.len() as u64 > max {
                    return Err(too_big(bytes.len() as u64));
                }
                Ok(Some(bytes))
            }
            Self::Archive(members) => {
                let Some((offset, size)) = members.find(name) else { return Ok(None) };
                if size > max {
                    return Err(too_big(size));
                }
                let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
                members
                    .file
                    .read_exact_at(&mut bytes, offset)
                    .map_err(|e| io_error(&members.path, e))?;
                Ok(Some(bytes))
            }
        }
    }
}

/// The members of a seekable tar archive, by name.
struct Members {
    path: PathBuf,
    file: Arc<File>,
    members: HashMap<String, Member>,
}

enum Member {
    File {
        offset: u64,
        size: u64,
    },
    /// Old `docker save` links a layer that two images share.
    Link(String),
}

impl Members {
    /// Reads the headers of an archive, not its data.
    fn open(path: &Path) -> Result<Self, ImportError> {
        let file = file::open_regular(path).map_err(|e| io_error(path, e))?;
        let meta = file.metadata().map_err(|e| io_error(path, e))?;
        let mut head = [0u8; 6];
        let got = file.read_at(&mut head, 0).map_err(|e| io_error(path, e))?;
        let packed = match &head[..got] {
            [0x1f, 0x8b, ..] => Some("gzip"),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("zstd"),
            [0xfd, b'7', b'z', b'X', b'Z', ..] => Some("xz"),
            [b'B', b'Z', b'h', ..] => Some("bzip2"),
            _ => None,
        };
        if let Some(packed) = packed {
            return Err(ImportError::Source {
                what: format!(
                    "{}: the archive is compressed as a whole ({packed}), unpack it first",
                    path.display()
                ),
            });
        }
        let file = Arc::new(file);
        let input =
            SeekInput { end: meta.len(), inner: BufReader::new(SharedFile::new(file.clone())) };
        let mut reader = Reader::new(input, MetaLimits::default());
        let mut members = HashMap::new();
        let archive = |what: String| ImportError::Archive { path: path.to_owned(), what };
        loop {
            let entry = match reader.next_entry() {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(TarError::Io(error)) => return Err(io_error(path, error)),
                // Not even its first header: some other file.
                Err(error @ TarError::Bad { offset: 0, .. }) => {
                    let what = format!("{}: not a tar archive: {error}", path.display());
                    return Err(ImportError::Source { what });
                }
                Err(error) => return Err(archive(error.to_string())),
            };
            if members.len() == MEMBERS_MAX {
                return Err(ImportError::Source {
                    what: format!("{}: more than {MEMBERS_MAX} members", path.display()),
                });
            }
            let end = reader.offset().saturating_add(reader.data_left());
            if end > meta.len() {
                let cut = TarError::Truncated { offset: meta.len(), what: "a member's data" };
                return Err(archive(cut.to_string()));
            }
            if let Some((name, member)) = member_of(&entry, reader.offset()) {
                members.insert(name, member);
            }
        }
        Ok(Self { path: path.to_owned(), file, members })
    }

    /// The error for an archive without an expected member: it was cut off if it lacks the zeros at the
    /// end as well, and is of another kind otherwise.
    fn lacks(&self, what: &str) -> ImportError {
        let path = self.path.clone();
        let mut last = [1; BLOCK];
        let size = self.file.metadata().map_or(0, |meta| meta.len());
        let read = self.file.read_exact_at(&mut last, size.saturating_sub(BLOCK as u64));
        match read.is_ok() && last == [0; BLOCK] {
            true => ImportError::Source { what: format!("{}: {what}", path.display()) },
            false => ImportError::Archive {
                path,
                what: format!("{what}; it has no end-of-archive mark, so it was probably cut off"),
            },
        }
    }

    /// Offset and size of a file, links followed.
    fn find(&self, name: &str) -> Option<(u64, u64)> {
        let mut name = normal(name);
        for _ in 0..8 {
            match self.members.get(&name)? {
                Member::File { offset, size } => return Some((*offset, *size)),
                Member::Link(target) => name = target.clone(),
            }
        }
        None
    }

    /// The digest of a layer that has no digest in its name: the diff-id if it is not compressed.
    /// Otherwise it is computed, so that errors can name the blob.
    fn digest(
        &self,
        offset: u64,
        size: u64,
        diff_id: &DiffId,
    ) -> Result<BlobDigest, ImportError> {
        let mut magic = [0u8; 265];
        let got = self.file.read_at(&mut magic, offset).map_err(|e| io_error(&self.path, e))?;
        if got as u64 >= BLOCK as u64 / 2 && &magic[257..262] == b"ustar" {
            return Ok(diff_id.as_blob().clone());
        }
        let blob = file::in_file(diff_id.as_blob().clone(), self.file.clone(), offset, size);
        let mut hasher = crate::digest::BlobHasher::new();
        let mut section = blob.open(Arc::default());
        let mut buffer = vec![0; 1 << 17];
        loop {
            match section.read(&mut buffer).map_err(|e| io_error(&self.path, e))? {
                0 => return Ok(hasher.finish()),
                count => hasher.update(&buffer[..count]),
            }
        }
    }
}

fn member_of(entry: &Entry, offset: u64) -> Option<(String, Member)> {
    let name = normal(std::str::from_utf8(&entry.path).ok()?);
    let member = match entry.kind {
        Kind::File if entry.sparse.is_none() => Member::File { offset, size: entry.data_size },
        Kind::HardLink => Member::Link(normal(std::str::from_utf8(&entry.link).ok()?)),
        Kind::Symlink => {
            let target = std::str::from_utf8(&entry.link).ok()?;
            let dir = name.rsplit_once('/').map_or("", |(dir, _)| dir);
            Member::Link(normal(&format!("{dir}/{target}")))
        }
        _ => return None,
    };
    Some((name, member))
}

/// A member's name without `.`, `..` and empty parts; names never leave the archive.
fn normal(name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// A file that others read, too: has a position of its own.
struct SharedFile {
    file: Arc<File>,
    at: u64,
}

impl SharedFile {
    fn new(file: Arc<File>) -> Self {
        Self { file, at: 0 }
    }
}

impl Read for SharedFile {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buf, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for SharedFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(_) => None,
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// Leaves data out by seeking.
struct SeekInput {
    inner: BufReader<SharedFile>,
    end: u64,
}

impl Read for SeekInput {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read(buf)
    }
}

impl io::BufRead for SeekInput {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.inner.consume(count);
    }
}

impl Input for SeekInput {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let at = self.inner.get_ref().at - self.inner.buffer().len() as u64;
        match i64::try_from(count) {
            // The end may lack its padding, but not its data (checked with the header).
            Ok(by) if at.saturating_add(count) <= self.end.saturating_add(BLOCK as u64) => {
                self.inner.seek_relative(by)
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

pub(crate) fn io_error(path: &Path, source: io::Error) -> ImportError {
    ImportError::Io { path: path.to_owned(), source }
}
