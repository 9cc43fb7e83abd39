//! An opened source: from the image that was asked for to its manifest, config and layers.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::manifest::{
    self, Descriptor, DockerImage, INDEX_DEPTH_MAX, Index, Leads, Manifest, Platform, check_schema,
    read_config,
};
use super::members::Members;
use super::{Source, file, io_error, remote};
use cofolio_store::task::Task;

use super::listed;
use crate::digest::{BlobDigest, ChainId, DiffId};
use crate::error::{EngineError, ImportError};
use crate::files::open_regular;
use crate::layer::FoundLayer;
use crate::layer::blob::Blob;
use crate::layer::tar_split::UnpackedLayer;
use crate::registry::{RegistryOptions, Repository};
use crate::source::engine::containerd::{self, Containerd};
use crate::source::engine::containers_storage::{self, Storage};
use crate::trust::{PublicKey, Record};

/// An image found in its source: everything that is known without reading layers.
pub(crate) struct FoundImage {
    /// Digest of the manifest; of the config for a `docker save` archive, which has no manifest.
    pub(crate) manifest: BlobDigest,
    /// The manifest, byte for byte, if there is one and it is text.
    pub(crate) document: Option<String>,
    pub(crate) config: String,
    pub(crate) layers: Vec<FoundLayer>,
}

/// An opened registry, layout or archive.
pub(crate) struct Opened {
    /// Of a registry: the image's name.
    pub(super) path: PathBuf,
    pub(super) tag: Option<String>,
    pub(super) blobs: Blobs,
    docker: bool,
}

pub(super) enum Blobs {
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
    pub(crate) fn open(
        source: &Source,
        registry: &RegistryOptions,
        task: &Task,
    ) -> Result<Self, ImportError> {
        let (path, tag, blobs) = match source {
            Source::Directory { path } => {
                let what = format!("{}: a plain directory has no blobs", path.display());
                return Err(ImportError::Source { what });
            }
            Source::Layout { path, tag } => {
                (path.clone(), tag.clone(), Blobs::Directory(path.clone()))
            }
            Source::Archive { path, tag } | Source::DockerSave { path, tag } => {
                (path.clone(), tag.clone(), Blobs::Archive(Members::open(path)?))
            }
            Source::Registry(reference) => {
                let repository = Repository::open(reference, registry, task)?;
                (reference.to_string().into(), None, Blobs::Registry(repository))
            }
            Source::ContainersStorage(reference) => {
                let storage = Storage::open(&reference.location)?;
                let image = storage.find(&reference.name)?.clone();
                let root = storage.root().to_owned();
                (root, Some(reference.name.clone()), Blobs::Storage(storage, image))
            }
            Source::Containerd(reference) => {
                let store = Containerd::open(&reference.location)?;
                let image = store.find(&reference.name)?.clone();
                let blobs = Blobs::Containerd(store.content(), image);
                (store.root().to_owned(), Some(reference.name.clone()), blobs)
            }
        };
        let docker = matches!(source, Source::DockerSave { .. });
        Ok(Self { path, tag, blobs, docker })
    }

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

    /// What cosign has signed of the chosen image with one of these keys: its index, which names
    /// the manifest by digest, or the manifest. Only registries have such signatures.
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
        let what = format!("more than {INDEX_DEPTH_MAX} indexes in indexes");
        Err(ImportError::document("index", &descriptor.digest, what))
    }

    pub(super) fn lacks(&self, what: &str) -> ImportError {
        match &self.blobs {
            Blobs::Archive(members) => members.lacks(what),
            _ => ImportError::Source { what: format!("{}: {what}", self.path.display()) },
        }
    }

    fn no_such_tag(&self, index: &Index) -> ImportError {
        let names: BTreeSet<&str> =
            index.manifests.iter().flat_map(Descriptor::names).take(64).collect();
        self.unknown_tag(&names.into_iter().collect::<Vec<_>>())
    }

    pub(super) fn unknown_tag(&self, names: &[&str]) -> ImportError {
        let path = self.path.display();
        let there = match names {
            [] => "it names none".to_owned(),
            _ => format!("it has: {}", listed(names)),
        };
        let what = match &self.tag {
            Some(tag) => format!("{path} has no image {tag:?}; {there}"),
            None if names.is_empty() => format!("{path} holds no image, or several without names"),
            None => format!("{path} holds several images, say which; {there}"),
        };
        ImportError::Source { what }
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
            return Err(ImportError::digest(&image.digest, &digest));
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
        let (config, diff_ids) = read_config(&image.config.digest, config, image.layers.len())?;
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
    let file = match open_regular(path) {
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
    let wrong = |what: String| {
        let what = format!("{what} in {}", storage.root().display());
        ImportError::document("image", &image.id, what)
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
pub(super) fn chain(blobs: Vec<(Blob, String)>, diff_ids: Vec<DiffId>) -> Vec<FoundLayer> {
    let mut layers: Vec<FoundLayer> = Vec::with_capacity(blobs.len());
    for ((blob, media_type), diff_id) in blobs.into_iter().zip(diff_ids) {
        let chain_id = ChainId::over(layers.last().map(|below| &below.chain_id), &diff_id);
        layers.push(FoundLayer { blob, media_type, diff_id, chain_id });
    }
    layers
}

impl Blobs {
    /// A document by its name; `None` if it is not there.
    pub(super) fn document(&self, name: &str, max: u64) -> Result<Option<Vec<u8>>, ImportError> {
        let too_big = |size: u64| {
            ImportError::limit(format!("{name} of {size} bytes"), max, "document_bytes")
        };
        match self {
            // There documents have digests, not names.
            Self::Registry(_) | Self::Containerd(..) => Ok(None),
            Self::Directory(root) => document(&root.join(name), max, too_big),
            Self::Storage(storage, image) => {
                document(&storage.document(image, name)?, max, too_big)
            }
            Self::Archive(members) => {
                let Some((offset, size)) = members.find(name) else { return Ok(None) };
                if size > max {
                    return Err(too_big(size));
                }
                let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
                let read = members.file.read_exact_at(&mut bytes, offset);
                read.map_err(|e| io_error(&members.path, e))?;
                Ok(Some(bytes))
            }
        }
    }
}

/// A file of at most `max` bytes; `None` if it does not exist.
fn document(
    path: &Path,
    max: u64,
    too_big: impl Fn(u64) -> ImportError,
) -> Result<Option<Vec<u8>>, ImportError> {
    let Some((file, _, _)) = open_whole(path)? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes).map_err(|e| io_error(path, e))?;
    let size = bytes.len() as u64;
    if size > max { Err(too_big(size)) } else { Ok(Some(bytes)) }
}
