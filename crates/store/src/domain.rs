//! [`Domain`]: one trust domain. Nothing in it shares an inode with another domain.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::disk::{Disk, Kind, Lock, LockMode, Protection, Purpose, StoredFile};
use crate::error::{At, Error, ErrorKind, Result};
use crate::kinds::{FileKind, FileName};
use crate::record::{Ref, Root, RootKind};
use crate::store::{DOMAINS, Store, TEMPORARY, remove_entry};
use crate::task::Cancel;
use crate::{Digest, name};

/// How long a lock that is waited for is not asked for again.
const LOCK_POLL: std::time::Duration = std::time::Duration::from_millis(2);

/// Largest ref or root record that is read, in bytes. An OCI config is at most 4 MiB in practice.
const RECORD_SIZE_MAX: u64 = 16 << 20;
/// Suffix of refs and roots.
pub(crate) const RECORD_SUFFIX: &str = ".json";
/// Directory of the refs.
const REFS: &str = "refs";
/// Directory of the roots.
pub(crate) const ROOTS: &str = "roots";
/// Directories of the records that keep images and layers.
pub(crate) const RECORDS: [&str; 3] =
    [REFS, RootKind::Lease.directory(), RootKind::Mount.directory()];

/// The directories that every domain has, parents first.
pub(crate) fn directories() -> impl Iterator<Item = &'static str> {
    ["objects", "images", "layers", ROOTS, "segments"].into_iter().chain(RECORDS)
}

/// One trust domain of a store.
#[derive(Clone, Debug)]
pub struct Domain {
    store: Store,
    name: String,
    base: String,
}

/// The file of a record.
pub(crate) struct RecordFile {
    /// Path below the store.
    pub(crate) path: String,
    /// The ref's name or the root's id; `None` for a long one, which only the record tells.
    pub(crate) name: Option<String>,
}

/// What a record keeps.
#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) images: Vec<Digest>,
    /// Chain ids.
    pub(crate) layers: Vec<String>,
}

/// The refs of a domain. See [`Domain::all_refs`].
#[derive(Debug, Default)]
pub struct Refs {
    /// Those whose records can be read, sorted by name.
    pub readable: Vec<(String, Ref)>,
    /// Those that are there, and nobody knows what they stand for.
    pub unreadable: Vec<UnreadableRef>,
}

/// A ref whose record cannot be read.
#[derive(Debug)]
pub struct UnreadableRef {
    /// Its name; `None` for a long one, which only the record tells.
    pub name: Option<String>,
    /// Why: it names the file.
    pub error: Error,
}

/// The domain's lock, held until dropped. Shared: nothing is collected meanwhile.
#[derive(Debug)]
pub struct DomainLock {
    _lock: Box<dyn Lock>,
}

impl Domain {
    pub(crate) fn new(store: Store, name: &str) -> Self {
        Self { store, name: name.to_owned(), base: format!("{DOMAINS}/{name}") }
    }

    /// The domain's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The store it belongs to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What protects content that is in place here.
    pub fn protection(&self) -> Protection {
        self.store.protection()
    }

    /// Holds off garbage collection (and waits for one that runs) until the lock is dropped.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn lock_shared(&self) -> Result<DomainLock> {
        match self.lock(LockMode::Shared, true)? {
            Some(lock) => Ok(lock),
            None => Err(Error::Busy { domain: self.name.clone() }),
        }
    }

    pub(crate) fn lock(&self, mode: LockMode, wait: bool) -> Result<Option<DomainLock>> {
        let lock = self.disk().lock(&self.base, mode, wait).at("lock", &self.base)?;
        Ok(lock.map(|lock| DomainLock { _lock: lock }))
    }

    /// The lock of a directory. Where the caller waits for it, `cancel` ends the waiting.
    pub(crate) fn lock_at(
        &self,
        path: &str,
        mode: LockMode,
        wait: bool,
        cancel: &Cancel,
    ) -> Result<Option<Box<dyn Lock>>> {
        loop {
            let lock = self.disk().lock(path, mode, false).at("lock", path)?;
            if lock.is_some() || !wait {
                return Ok(lock);
            }
            cancel.check()?;
            std::thread::sleep(LOCK_POLL);
        }
    }

    /// The domain's lock, exclusive.
    pub(crate) fn lock_alone(&self, wait: bool, cancel: &Cancel) -> Result<Option<DomainLock>> {
        let lock = self.lock_at(&self.base, LockMode::Exclusive, wait, cancel)?;
        Ok(lock.map(|lock| DomainLock { _lock: lock }))
    }

    /// Waits until nobody has the domain's lock alone. What publishes waits here first, where it can be
    /// cancelled.
    ///
    /// # Errors
    /// [`Error::Cancelled`], [`Error::Io`].
    pub fn wait_for_lock(&self, cancel: &Cancel) -> Result<()> {
        self.lock_at(&self.base, LockMode::Shared, true, cancel).map(drop)
    }

    // Where things are.

    /// The objects directory: a composefs digest store. `None` on a simulated disk.
    pub fn objects_dir(&self) -> Option<PathBuf> {
        self.real("objects")
    }

    /// The file of an object, whether it exists or not. `None` on a simulated disk.
    pub fn object_path(&self, digest: &Digest) -> Option<PathBuf> {
        self.real(&format!("objects/{}", digest.object_path()))
    }

    /// The file of an image, whether it exists or not. `None` on a simulated disk.
    pub fn image_path(&self, digest: &Digest) -> Option<PathBuf> {
        self.real(&FileName::content(FileKind::Image, digest).path())
    }

    fn real(&self, below: &str) -> Option<PathBuf> {
        Some(self.store.path()?.join(&self.base).join(below))
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn object_file(&self, digest: &Digest) -> String {
        format!("{}/objects/{}", self.base, digest.object_path())
    }

    /// Path of a file below the store.
    pub(crate) fn named_file(&self, name: &FileName) -> String {
        format!("{}/{}", self.base, name.path())
    }

    pub(crate) fn ref_file(&self, ref_name: &str) -> Result<String> {
        let encoded = name::encode("ref name", ref_name)?;
        Ok(format!("{}/refs/{encoded}{RECORD_SUFFIX}", self.base))
    }

    fn root_file(&self, kind: RootKind, id: &str) -> Result<String> {
        let encoded = name::encode("root id", id)?;
        Ok(format!("{}/{}/{encoded}{RECORD_SUFFIX}", self.base, kind.directory()))
    }

    // Objects, images, layers.

    /// Size of an object in bytes; `None` if it is not here.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if something else than a file is in its place; [`Error::Io`].
    pub fn object_size(&self, digest: &Digest) -> Result<Option<u64>> {
        self.file_size(&self.object_file(digest))
    }

    /// Size of a file of the store; `None` if it is not there.
    pub(crate) fn file_size(&self, path: &str) -> Result<Option<u64>> {
        match self.disk().stat(path) {
            Ok(stat) if stat.kind == Kind::File => Ok(Some(stat.size)),
            Ok(_) => Err(Error::corrupt(path, "it is not a regular file")),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(error).at("look at", path),
        }
    }

    /// Opens an object for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Io`].
    pub fn open_object(&self, digest: &Digest) -> Result<StoredFile> {
        self.open_named(&FileName::content(FileKind::Object, digest))
    }

    /// Whether an image is here.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn has_image(&self, digest: &Digest) -> Result<bool> {
        Ok(self.named_size(&FileName::content(FileKind::Image, digest))?.is_some())
    }

    /// Opens a metadata image for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Io`].
    pub fn open_image(&self, digest: &Digest) -> Result<StoredFile> {
        self.open_named(&FileName::content(FileKind::Image, digest))
    }

    /// Digests of all images, sorted. What is here for others only ([`Domain::derived_images`]) is left out.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn images(&self) -> Result<Vec<Digest>> {
        let derived = self.derived_images()?;
        Ok(self.all_images()?.into_iter().filter(|image| !derived.contains(image)).collect())
    }

    /// The same with nothing left out.
    pub(crate) fn all_images(&self) -> Result<Vec<Digest>> {
        Ok(self.named(FileKind::Image)?.iter().filter_map(FileName::image).collect())
    }

    /// Whether the tree of a layer chain is here.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::Io`].
    pub fn has_layer(&self, chain_id: &str) -> Result<bool> {
        Ok(self.named_size(&FileName::chain(FileKind::Layer, chain_id)?)?.is_some())
    }

    /// Opens a layer's tree (composefs dump text, zstd) for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::BadName`], [`Error::Io`].
    pub fn open_layer(&self, chain_id: &str) -> Result<StoredFile> {
        self.open_named(&FileName::chain(FileKind::Layer, chain_id)?)
    }

    /// Whether the split of a layer is here. A layer that was unpacked from no archive has none.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::Io`].
    pub fn has_split(&self, chain_id: &str) -> Result<bool> {
        Ok(self.named_size(&FileName::chain(FileKind::Split, chain_id)?)?.is_some())
    }

    /// Opens a layer's split (its archive without the content of its files) for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::BadName`], [`Error::Io`].
    pub fn open_split(&self, chain_id: &str) -> Result<StoredFile> {
        self.open_named(&FileName::chain(FileKind::Split, chain_id)?)
    }

    /// Chain ids of all layers, sorted; without those that are too long to be read back from a file name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn layers(&self) -> Result<Vec<String>> {
        let mut layers: Vec<_> =
            self.named(FileKind::Layer)?.iter().filter_map(FileName::chain_id).collect();
        layers.sort_unstable();
        Ok(layers)
    }

    // Files by kind.

    /// All files of a kind, sorted; of objects none: see `each_object`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn named(&self, kind: FileKind) -> Result<Vec<FileName>> {
        if kind == FileKind::Object {
            return Ok(Vec::new());
        }
        let stems = self.files(kind.directory(), kind.suffix())?;
        let mut names: Vec<_> =
            stems.iter().filter_map(|stem| FileName::of_stem(kind, stem)).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Io`].
    pub fn open_named(&self, name: &FileName) -> Result<StoredFile> {
        self.open_file(self.named_file(name))?.ok_or_else(|| Error::NoSuch(name.clone()))
    }

    /// Removes files that can be made again. Who has one open keeps it. Durable on return.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`].
    pub fn remove_named(&self, names: &[FileName]) -> Result<()> {
        self.store.check_writable()?;
        let _lock = self.lock_shared()?;
        let mut directories = BTreeSet::new();
        for name in names.iter().filter(|name| name.kind().is_derived()) {
            remove_entry(self.disk(), &self.named_file(name), Kind::File)?;
            directories.insert(format!("{}/{}", self.base, name.kind().directory()));
        }
        directories.iter().try_for_each(|path| self.disk().sync_dir(path).at("sync", path))
    }

    /// The file of this machine. `None` on a simulated disk.
    pub fn named_path(&self, name: &FileName) -> Option<PathBuf> {
        self.real(&name.path())
    }

    /// Size in bytes; `None` if it is not here.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if something else than a file is in its place; [`Error::Io`].
    pub fn named_size(&self, name: &FileName) -> Result<Option<u64>> {
        self.file_size(&self.named_file(name))
    }

    pub(crate) fn open_file(&self, path: String) -> Result<Option<StoredFile>> {
        match self.disk().open(&path) {
            Ok(file) => Ok(Some(StoredFile::new(file, path))),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(error).at("open", &path),
        }
    }

    /// Entries of a directory of the domain; none if it does not exist.
    pub(crate) fn entries(&self, directory: &str) -> Result<Vec<(String, Kind)>> {
        let path = match directory {
            "" => self.base.clone(),
            directory => format!("{}/{directory}", self.base),
        };
        match self.disk().list(&path) {
            Err(error) if is_absent(&error) => Ok(Vec::new()),
            other => other.at("list", &path),
        }
    }

    /// File names of a directory without the suffix; others and temporary files are left out.
    pub(crate) fn files(&self, directory: &str, suffix: &str) -> Result<Vec<String>> {
        let path = format!("{}/{directory}", self.base);
        let entries = self.disk().list(&path).at("list", &path)?;
        Ok(entries
            .into_iter()
            .filter(|(entry, _)| !entry.starts_with(TEMPORARY))
            .filter_map(|(entry, _)| entry.strip_suffix(suffix).map(str::to_owned))
            .collect())
    }

    // Refs.

    /// The record of a ref; `None` if there is no such ref.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::BadName`], [`Error::Io`].
    pub fn get_ref(&self, ref_name: &str) -> Result<Option<Ref>> {
        Ok(self.read_ref(&self.ref_file(ref_name)?)?.map(|(_, record)| record))
    }

    /// All refs, sorted by name.
    ///
    /// # Errors
    /// [`Error::Corrupt`] naming the first record that cannot be read; [`Error::Io`].
    pub fn refs(&self) -> Result<Vec<(String, Ref)>> {
        let Refs { readable, unreadable } = self.all_refs()?;
        unreadable.into_iter().next().map_or(Ok(readable), |first| Err(first.error))
    }

    /// The refs that can be read, sorted by name: for whoever looks for one of them, and is not to fail because
    /// another one is damaged. What has to know all refs, as garbage collection, takes [`Domain::refs`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn readable_refs(&self) -> Result<Vec<(String, Ref)>> {
        Ok(self.all_refs()?.readable)
    }

    /// All refs, those that cannot be read apart: for whoever shows them, or must not take one that is damaged
    /// for one that is not there.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn all_refs(&self) -> Result<Refs> {
        let mut refs = Refs::default();
        for record in self.records(REFS)? {
            // One that was removed since it was listed is simply not there.
            match self.read_ref(&record.path) {
                Ok(found) => refs.readable.extend(found),
                Err(error) => refs.unreadable.push(UnreadableRef { name: record.name, error }),
            }
        }
        refs.readable.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(refs)
    }

    /// The ref that came from this OCI manifest (`sha256:…`), if there is one: the image need not be
    /// imported again.
    ///
    /// # Errors
    /// Those of [`Domain::readable_refs`].
    pub fn find_by_manifest(&self, manifest: &str) -> Result<Option<(String, Ref)>> {
        let refs = self.readable_refs()?;
        Ok(refs.into_iter().find(|(_, record)| record.manifest.as_deref() == Some(manifest)))
    }

    /// Makes a ref or points it elsewhere; the image and the layers must be here. Durable on return.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::BadName`], [`Error::Io`].
    pub fn put_ref(&self, ref_name: &str, record: &Ref) -> Result<()> {
        self.store.check_writable()?;
        let path = self.ref_file(ref_name)?;
        let json = ref_json(ref_name, record)?;
        let _lock = self.lock_shared()?;
        let layers = || record.layers.iter().map(|layer| layer.chain_id.as_str());
        self.check_present(&[record.image], layers())?;
        self.note_named(&[record.image], layers())?;
        self.sync_parts()?;
        self.store.replace_file(&format!("{}/refs", self.base), &path, &json, true)
    }

    /// Removes a ref. Durable on return; what only it kept goes with the next [`Domain::gc`].
    ///
    /// # Errors
    /// [`Error::NoSuchRef`], [`Error::BadName`], [`Error::Io`].
    pub fn remove_ref(&self, ref_name: &str) -> Result<()> {
        let path = self.ref_file(ref_name)?;
        match self.remove_record("refs", &path)? {
            true => Ok(()),
            false => Err(Error::NoSuchRef(ref_name.to_owned())),
        }
    }

    pub(crate) fn read_ref(&self, path: &str) -> Result<Option<(String, Ref)>> {
        let Some((ref_name, record)) =
            self.read_record::<Named<Ref>>(path)?.map(|n| (n.name, n.record))
        else {
            return Ok(None);
        };
        check_own_name(path, &ref_name)?;
        check_chain_ids(path, record.layers.iter().map(|layer| layer.chain_id.as_str()))?;
        Ok(Some((ref_name, record)))
    }

    // Roots.

    /// All roots of one kind, sorted by id. Refs are roots too but are not listed here: see
    /// [`Domain::refs`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] naming the first record that cannot be read; [`Error::Io`].
    pub fn roots(&self, kind: RootKind) -> Result<Vec<Root>> {
        let mut roots = Vec::new();
        for record in self.records(kind.directory())? {
            roots.extend(self.read_root(&record.path)?);
        }
        roots.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(roots)
    }

    /// Makes or replaces a root; what it keeps must be here. Durable on return, except for mounts: they
    /// do not outlive a crash anyway, and must be quick.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::BadName`], [`Error::Io`].
    pub fn put_root(&self, root: &Root) -> Result<()> {
        self.check_root_writable(root.kind)?;
        let path = self.root_file(root.kind, &root.id)?;
        let json = to_json(&path, root)?;
        let _lock = self.lock_shared()?;
        self.check_present(&root.images, root.layers.iter().map(String::as_str))?;
        self.note_named(&root.images, root.layers.iter().map(String::as_str))?;
        let directory = format!("{}/{}", self.base, root.kind.directory());
        let durable = root.kind != RootKind::Mount;
        if durable {
            self.sync_parts()?;
        }
        match self.store.replace_file(&directory, &path, &json, durable) {
            // A read-only mount of an image that is here must not need room.
            Err(error)
                if !durable && error.kind() == ErrorKind::Space && self.store.use_reserve() =>
            {
                self.store.replace_file(&directory, &path, &json, durable)
            }
            other => other,
        }
    }

    /// Removes a root; says whether it was there.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::Io`].
    pub fn remove_root(&self, kind: RootKind, id: &str) -> Result<bool> {
        let path = self.root_file(kind, id)?;
        self.check_root_writable(kind)?;
        if kind == RootKind::Mount {
            return self.unlink_if_there(&path);
        }
        self.remove_record(kind.directory(), &path)
    }

    /// Mounts are state of this boot and not part of what the store keeps: a store of which this program
    /// may change nothing can be mounted, and whoever may collect it must see that.
    fn check_root_writable(&self, kind: RootKind) -> Result<()> {
        if kind == RootKind::Mount { Ok(()) } else { self.store.check_writable() }
    }

    pub(crate) fn read_root(&self, path: &str) -> Result<Option<Root>> {
        let Some(root) = self.read_record::<Root>(path)? else { return Ok(None) };
        check_own_name(path, &root.id)?;
        check_chain_ids(path, root.layers.iter().map(String::as_str))?;
        if !path.contains(&format!("/{}/", root.kind.directory())) {
            return Err(Error::corrupt(
                path,
                format!("it says that it is a {}", root.kind.as_str()),
            ));
        }
        Ok(Some(root))
    }

    // Records in general.

    /// The records in one of the directories of [`RECORDS`].
    pub(crate) fn records(&self, directory: &str) -> Result<Vec<RecordFile>> {
        let record = |stem: String| RecordFile {
            path: format!("{}/{directory}/{stem}{RECORD_SUFFIX}", self.base),
            name: name::decode(&stem),
        };
        Ok(self.files(directory, RECORD_SUFFIX)?.into_iter().map(record).collect())
    }

    /// The images and layers that a ref or a root keeps; `None` if it was removed since it was listed.
    pub(crate) fn read_kept(&self, record: &RecordFile) -> Result<Option<Kept>> {
        if record.path.starts_with(&format!("{}/{REFS}/", self.base)) {
            let found = self.read_ref(&record.path)?;
            return Ok(found.map(|(_, it)| Kept {
                images: vec![it.image],
                layers: it.layers.into_iter().map(|layer| layer.chain_id).collect(),
            }));
        }
        let found = self.read_root(&record.path)?;
        Ok(found.map(|root| Kept { images: root.images, layers: root.layers }))
    }

    pub(crate) fn read_record<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>> {
        let Some(file) = self.open_file(path.to_owned())? else { return Ok(None) };
        let json = match file.read_all(RECORD_SIZE_MAX) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                return Err(Error::corrupt(path, "it is larger than 16 MiB"));
            }
            other => other.at("read", path)?,
        };
        serde_json::from_slice(&json).map(Some).map_err(|error| Error::corrupt(path, error))
    }

    fn remove_record(&self, directory: &str, path: &str) -> Result<bool> {
        self.store.check_writable()?;
        let removed = self.unlink_if_there(path)?;
        if removed {
            let directory = format!("{}/{directory}", self.base);
            self.disk().sync_dir(&directory).at("sync", &directory)?;
        }
        Ok(removed)
    }

    fn unlink_if_there(&self, path: &str) -> Result<bool> {
        match self.disk().unlink(path) {
            Ok(()) => Ok(true),
            Err(error) if is_absent(&error) => Ok(false),
            Err(error) => Err(error).at("remove", path),
        }
    }

    /// With the lock held, what is here now stays here until it is given back.
    fn check_present<'a>(
        &self,
        images: &[Digest],
        layers: impl Iterator<Item = &'a str>,
    ) -> Result<()> {
        match self.missing_files(images, layers)?.pop() {
            Some(missing) => Err(Error::NoSuch(missing)),
            None => Ok(()),
        }
    }

    /// Makes the names of images and layers durable. A record must not outlive what it names: an image
    /// that is in place may have come there a moment ago, by another import that has not synced yet.
    pub(crate) fn sync_parts(&self) -> Result<()> {
        for part in ["layers", "images"] {
            let path = format!("{}/{part}", self.base);
            self.disk().sync_dir(&path).at("sync", &path)?;
        }
        Ok(())
    }

    /// Writes a ref's record to a temporary file; gives it and its later place.
    pub(crate) fn prepare_ref(&self, ref_name: &str, record: &Ref) -> Result<(String, String)> {
        let path = self.ref_file(ref_name)?;
        let json = ref_json(ref_name, record)?;
        let directory = format!("{}/refs", self.base);
        Ok((self.store.write_temporary(&directory, &json, Purpose::Record, false)?, path))
    }

    /// Writes a root's record to a temporary file; gives it and its later place.
    pub(crate) fn prepare_root(&self, root: &Root) -> Result<(String, String)> {
        let path = self.root_file(root.kind, &root.id)?;
        let json = to_json(&path, root)?;
        let directory = format!("{}/{}", self.base, root.kind.directory());
        Ok((self.store.write_temporary(&directory, &json, Purpose::Record, false)?, path))
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        self.store.disk()
    }
}

/// A ref with its name, as it lies in the file.
#[derive(Serialize, serde::Deserialize)]
struct Named<T> {
    name: String,
    #[serde(flatten)]
    record: T,
}

fn ref_json(ref_name: &str, record: &Ref) -> Result<Vec<u8>> {
    to_json(ref_name, &Named { name: ref_name.to_owned(), record })
}

pub(crate) fn to_json<T: Serialize>(path: &str, record: &T) -> Result<Vec<u8>> {
    let json = serde_json::to_vec_pretty(record).map_err(|error| Error::corrupt(path, error))?;
    if json.len() as u64 > RECORD_SIZE_MAX {
        return Err(Error::corrupt(path, "the record would be larger than 16 MiB"));
    }
    Ok(json)
}

/// A record that says another name than its file was copied or renamed by hand.
fn check_own_name(path: &str, own_name: &str) -> Result<()> {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = file.strip_suffix(RECORD_SUFFIX).unwrap_or(file);
    if name::matches(stem, own_name) {
        return Ok(());
    }
    Err(Error::corrupt(path, format!("it holds the record of {own_name:?}")))
}

/// A record that names what cannot be a layer is damaged.
fn check_chain_ids<'a>(path: &str, mut chain_ids: impl Iterator<Item = &'a str>) -> Result<()> {
    chain_ids.try_for_each(|chain_id| match FileName::chain(FileKind::Layer, chain_id) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::corrupt(path, error)),
    })
}

/// The file is not there, or a directory on the way to it is not.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound)
}
