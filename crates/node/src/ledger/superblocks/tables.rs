//! Which object each inode of a metadata image shows.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Weak};

use cofolio_image::compose::named_objects::{object_of, open_image};
use cofolio_store::{BoxError, Digest, Domain, Error, FileKind, StoredFile};

use super::super::LedgerError;
use super::super::index::{Index, ShortDigest};
use super::super::usage::ObjectId;
use crate::cache::leave_cache;
use crate::settings::Backend;

/// The objects of a metadata image by inode number.
///
/// It has no numbers of objects: a base names objects that no image of the index names, or names
/// only later, and these have no number or get another one while the table is shared.
#[derive(Debug)]
pub(super) struct Inodes {
    /// Number of the trust domain.
    domain: u16,
    /// Sorted by inode number.
    objects: Box<[(u32, ShortDigest)]>,
    /// Paths of files with objects, relative to the root, the shortest first. They are in different
    /// top-level directories, since a layer above may have replaced one.
    pub(super) samples: Box<[PathBuf]>,
    /// Of a pack, sorted, with a path of each relative to the root. Empty for a metadata image.
    paths: Box<[(ShortDigest, Box<Path>)]>,
}

impl Inodes {
    /// A table of one file.
    #[cfg(test)]
    pub(super) fn of_one(inode: u32, object: &Digest) -> Self {
        let objects = Box::new([(inode, ShortDigest::of(object))]);
        Self { domain: 0, objects, samples: Box::new([PathBuf::new()]), paths: Box::default() }
    }

    /// The object of an inode, if an image of the index names it.
    pub(super) fn get(&self, index: &Index, inode: u64) -> Option<ObjectId> {
        // Number times 32 is where the inode lies: 2^32 of them are 128 GiB of metadata. Higher bits
        // are the layer's, where overlayfs composes numbers (xino), as in mounts of earlier versions.
        let low = u32::try_from(inode & u64::from(u32::MAX)).ok()?;
        let found = self.objects.binary_search_by_key(&low, |(inode, _)| *inode).ok()?;
        index.find_short(self.domain, self.objects[found].1)
    }

    /// Whether the pages of its objects are in files of a pack.
    pub(super) fn has_paths(&self) -> bool {
        !self.paths.is_empty()
    }

    /// The path of a pack's file with an object, relative to the root.
    pub(super) fn path(&self, object: &Digest) -> Option<&Path> {
        let short = ShortDigest::of(object);
        let found = self.paths.binary_search_by_key(&short, |(object, _)| *object).ok()?;
        Some(&self.paths[found].1)
    }

    /// Reads the table of a metadata image, or of an image's pack.
    pub(super) fn read(
        index: &Index,
        number: u16,
        image: &Digest,
        backend: Backend,
    ) -> Result<Self, BoxError> {
        let domain = &index.domains().get(number as usize).ok_or("no such domain")?.domain;
        let (mut objects, mut samples) = (Vec::new(), Samples::default());
        let mut add = |nid: u64, path: &[u8], object: &Digest| -> Result<(), BoxError> {
            objects.push((u32::try_from(nid)?, ShortDigest::of(object)));
            // A base's object that no image names is nowhere to be seen.
            samples.add(relative(path), || index.find(number, object).is_some());
            Ok(())
        };
        let mut by_path = HashMap::new();
        read_files(&domain.open_image(image)?, &mut |path, nid, object| {
            let Some(object) = object()? else { return Ok(()) };
            match backend {
                Backend::Overlay => add(nid, path, &object)?,
                Backend::InodeShare => _ = by_path.insert(path.to_vec(), object),
            }
            Ok(())
        })?;
        if backend == Backend::InodeShare {
            let packs = domain.packs_of(FileKind::Pack, image)?;
            let pack = packs.first().ok_or("it has no pack")?;
            read_files(&domain.open_named(pack)?, &mut |path, nid, _| {
                by_path.get(path).map_or(Ok(()), |object| add(nid, path, object))
            })?;
        }
        let mut paths: Vec<(ShortDigest, Box<Path>)> = Vec::new();
        for (path, object) in &by_path {
            paths.push((ShortDigest::of(object), relative(path).into()));
        }
        paths.sort_unstable();
        paths.dedup_by_key(|(object, _)| *object);
        objects.sort_unstable();
        objects.dedup();
        let (objects, paths) = (objects.into(), paths.into());
        Ok(Self { domain: number, objects, samples: samples.sorted(), paths })
    }
}

fn relative(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(path)))
}

/// The top-level directory that a path leads into; none for a file in the root itself.
fn top_of(path: &Path) -> Option<Component<'_>> {
    path.parent()?.components().next()
}

/// For each of the first few top-level directories the path with the fewest components: the fewer, the fewer
/// inodes does a look at it cost.
#[derive(Debug, Default)]
struct Samples(Vec<PathBuf>);

impl Samples {
    const MAX: usize = 8;

    /// Takes a path, if it is wanted and `is_fit` allows it.
    fn add(&mut self, path: &Path, is_fit: impl FnOnce() -> bool) {
        let length = |path: &Path| path.components().count();
        let known = self.0.iter().position(|known| top_of(known) == top_of(path));
        let is_wanted = match known {
            Some(at) => length(path) < length(&self.0[at]),
            None => self.0.len() < Self::MAX,
        };
        if is_wanted && is_fit() {
            match known {
                Some(at) => path.clone_into(&mut self.0[at]),
                None => self.0.push(path.to_owned()),
            }
        }
    }

    fn sorted(mut self) -> Box<[PathBuf]> {
        self.0.sort_by_key(|path| path.components().count());
        self.0.into()
    }
}

/// A trust domain, an image in it and how it is mounted.
pub(super) type Key = (u16, Digest, Backend);

/// The tables of images.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// By domain and metadata image, for as long as a superblock has them.
    read: HashMap<Key, Weak<Inodes>>,
    /// Of images that mounts of containers name, until the next refresh; `None` where that failed.
    claimed: HashMap<Key, Option<Vec<Arc<Inodes>>>>,
}

/// Images that [`Tables::claimed`] holds at most.
const CLAIMED_MAX: usize = 64;

impl Tables {
    /// The tables of metadata images, or of an image's pack.
    pub(super) fn layers(
        &mut self,
        index: &Index,
        domain: u16,
        images: &[Digest],
        backend: Backend,
    ) -> Option<Vec<Arc<Inodes>>> {
        images.iter().map(|image| self.inodes(index, domain, image, backend)).collect()
    }

    fn inodes(
        &mut self,
        index: &Index,
        number: u16,
        image: &Digest,
        backend: Backend,
    ) -> Option<Arc<Inodes>> {
        let known = self.read.get(&(number, *image, backend)).and_then(Weak::upgrade);
        if known.is_some() {
            return known;
        }
        let inodes = Arc::new(Inodes::read(index, number, image, backend).ok()?);
        self.read.insert((number, *image, backend), Arc::downgrade(&inodes));
        Some(inodes)
    }

    /// Whether [`Tables::claimed`] takes no time.
    pub(super) fn is_read(&self, key: &Key) -> bool {
        self.claimed.contains_key(key) || self.read.get(key).is_some_and(|it| it.strong_count() > 0)
    }

    /// The tables of an image that a container's mount names.
    pub(super) fn claimed(&mut self, index: &Index, key: Key) -> Option<Vec<Arc<Inodes>>> {
        if let Some(known) = self.claimed.get(&key) {
            return known.clone();
        }
        if self.claimed.len() >= CLAIMED_MAX {
            self.claimed.clear();
        }
        let (domain, image, backend) = key;
        // It may be older than the image's base, or be made beside a mount over that. What it shows is
        // proven, so it may be any of these.
        let mut images = metadata_images(index, domain, &image, backend);
        if !images.contains(&image) {
            images.push(image);
        }
        let layers = self.layers(index, domain, &images, backend);
        self.claimed.insert(key, layers.clone());
        layers
    }

    /// To be called with each refresh.
    pub(super) fn forget_unused(&mut self) {
        self.claimed.clear();
        self.read.retain(|_, inodes| inodes.strong_count() > 0);
    }
}

/// The metadata images that an image would be mounted from now, the topmost first.
pub(super) fn metadata_images(
    index: &Index,
    domain: u16,
    image: &Digest,
    backend: Backend,
) -> Vec<Digest> {
    let domain = &index.domains()[domain as usize].domain;
    let images = match backend {
        Backend::Overlay => domain.metadata_images(image).ok(),
        Backend::InodeShare => None,
    };
    images.unwrap_or_else(|| vec![*image])
}

/// A path of each object of an image, relative to its root.
///
/// # Errors
/// [`LedgerError::Store`].
pub(crate) fn paths_of_objects(
    domain: &Domain,
    image: &Digest,
) -> Result<HashMap<Digest, PathBuf>, LedgerError> {
    let mut paths = HashMap::new();
    let read = read_files(&domain.open_image(image)?, &mut |path, _, object| {
        if let Some(object) = object()? {
            let path = path.strip_prefix(b"/").unwrap_or(path);
            paths.insert(object, PathBuf::from(OsStr::from_bytes(path)));
        }
        Ok(())
    });
    let what = format!("image {image}");
    read.map_err(|source| Error::Unreadable { what, source })?;
    Ok(paths)
}

/// Gives the object that an inode of a metadata image names.
type ObjectOf<'o> = &'o dyn Fn() -> Result<Option<Digest>, BoxError>;

/// Hears of a file: its path and its inode number.
type Each<'e> = dyn FnMut(&[u8], u64, ObjectOf<'_>) -> Result<(), BoxError> + 'e;

/// Calls `each` for every regular file of an image.
fn read_files(file: &StoredFile, each: &mut Each<'_>) -> Result<(), BoxError> {
    leave_cache(file, || {
        let image = open_image(file)?;
        let mut walk = image.walk()?;
        while let Some(found) = walk.advance()? {
            if found.inode.is_file() {
                each(found.path, found.inode.nid, &|| object_of(&image, &found.inode))?;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_the_shortest_of_the_first_top_level_directories() {
        let mut samples = Samples::default();
        for path in ["usr/lib/a", "usr/b", "usr/c", "etc/d/e", "file", "other"] {
            samples.add(Path::new(path), || path != "file");
        }
        (0..10).for_each(|number| samples.add(Path::new(&format!("{number}/x/y/z")), || true));
        let found = samples.sorted();
        let found: Vec<_> = found.iter().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(found[..3], ["other", "usr/b", "etc/d/e"]);
        assert_eq!((found.len(), found[7]), (Samples::MAX, "4/x/y/z"));
    }
}
