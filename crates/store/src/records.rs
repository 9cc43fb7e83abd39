//! The records of a domain that keep images and layers: refs and roots.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::collector::Added;
use crate::disk::{LockMode, Purpose};
use crate::domain::Covered;
use crate::error::{At, Error, ErrorKind, Result, is_absent, is_damage};
use crate::kinds::{FileKind, FileName};
use crate::record::{Ref, Root, RootKind};
use crate::store::mkdir_if_missing;
use crate::{Digest, Domain, name};

/// Largest ref or root record that is read, in bytes. An OCI config is at most 4 MiB in practice.
const RECORD_SIZE_MAX: u64 = 16 << 20;
pub(crate) const RECORD_SUFFIX: &str = ".json";
pub(crate) const REFS: &str = "refs";
/// Directory of the records that the last refs of images had, named by image.
pub(crate) const UNNAMED: &str = "unnamed";
pub(crate) const ROOTS: &str = "roots";
/// Directories of the records that keep images and layers.
pub(crate) const RECORDS: [&str; 4] =
    [REFS, RootKind::Lease.directory(), RootKind::Mount.directory(), RootKind::Vm.directory()];

pub(crate) struct RecordFile {
    /// Path below the store.
    pub(crate) path: String,
    /// The ref's name or the root's id; `None` for a long one, which only the record tells.
    pub(crate) name: Option<String>,
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

impl Domain {
    pub(crate) fn ref_file(&self, ref_name: &str) -> Result<String> {
        let encoded = name::encode("ref name", ref_name)?;
        Ok(format!("{}/refs/{encoded}{RECORD_SUFFIX}", self.directory()))
    }

    fn root_file(&self, kind: RootKind, id: &str) -> Result<String> {
        let encoded = name::encode("root id", id)?;
        Ok(format!("{}/{}/{encoded}{RECORD_SUFFIX}", self.directory(), kind.directory()))
    }

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

    /// The readable refs, sorted by name, for lookups that a damaged record must not stop. Whoever
    /// needs all refs, as garbage collection does, takes [`Domain::refs`].
    pub fn readable_refs(&self) -> Result<Vec<(String, Ref)>> {
        Ok(self.all_refs()?.readable)
    }

    /// All refs, with unreadable ones apart, to tell a damaged ref from a missing one.
    pub fn all_refs(&self) -> Result<Refs> {
        let mut refs = Refs::default();
        for record in self.records(REFS)? {
            // One that was removed since it was listed is simply not there.
            match self.read_ref(&record.path) {
                Ok(found) => refs.readable.extend(found),
                Err(error) if is_damage(&error) => {
                    refs.unreadable.push(UnreadableRef { name: record.name, error });
                }
                Err(error) => return Err(error),
            }
        }
        refs.readable.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(refs)
    }

    /// The ref of this OCI manifest (`sha256:…`), which need not be imported again.
    ///
    /// # Errors
    /// Those of [`Domain::readable_refs`].
    pub fn find_by_manifest(&self, manifest: &str) -> Result<Option<(String, Ref)>> {
        let refs = self.readable_refs()?;
        Ok(refs.into_iter().find(|(_, record)| record.manifest.as_deref() == Some(manifest)))
    }

    /// Makes or replaces a ref; the image and the layers must be here. Durable on return.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::BadName`], [`Error::Io`].
    pub fn put_ref(&self, ref_name: &str, record: &Ref) -> Result<()> {
        self.store().check_writable()?;
        let path = self.ref_file(ref_name)?;
        let json = ref_json(ref_name, record)?;
        let _lock = self.lock_names()?;
        self.check_and_note(&record.files()?)?;
        self.sync_parts()?;
        self.keep_replaced(&path, record)?;
        self.store().replace_file(&path, &json, true)
    }

    /// Lets `change` change a ref that is there, while nobody else replaces or removes it. Durable on
    /// return. Returns false, and does nothing, while anybody else is naming or checking something.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::Corrupt`], [`Error::Io`].
    pub fn try_change_ref(&self, ref_name: &str, change: impl FnOnce(&mut Ref)) -> Result<bool> {
        self.store().check_writable()?;
        let path = self.ref_file(ref_name)?;
        let Some(_lock) = self.try_lock(Covered::Names, LockMode::Exclusive)? else {
            return Ok(false);
        };
        let Some((_, mut record)) = self.read_ref(&path)? else { return Ok(true) };
        let before = record.clone();
        change(&mut record);
        if record != before {
            self.store().replace_file(&path, &ref_json(ref_name, &record)?, true)?;
        }
        Ok(true)
    }

    /// Removes a ref. Durable on return; what only it kept goes with the next [`Domain::gc`], and
    /// until then [`Domain::unnamed_record`] knows what it said of the image.
    ///
    /// # Errors
    /// [`Error::NoSuchRef`], [`Error::BadName`], [`Error::Io`].
    pub fn remove_ref(&self, ref_name: &str) -> Result<()> {
        let path = self.ref_file(ref_name)?;
        self.store().check_writable()?;
        let _lock = self.lock_names()?;
        let found = match self.read_ref(&path) {
            Err(error) if is_damage(&error) => None,
            other => other?,
        };
        if let Some((_, record)) = found {
            let to = self.unnamed_file(&record.image);
            let moved = self
                .make_directory(UNNAMED)
                .and_then(|()| self.disk().rename(&path, &to, false).at("remove", &path));
            match moved {
                Ok(()) => {
                    self.sync_directory(UNNAMED)?;
                    return self.sync_directory(REFS);
                }
                // Removing a name is how to get room. Or another process has removed it.
                Err(error) if error.kind() == ErrorKind::Space => {}
                Err(Error::Io { source, .. }) if is_absent(&source) => {}
                Err(error) => return Err(error),
            }
        }
        match self.unlink_if_there(&path)? {
            true => self.sync_directory(REFS),
            false => Err(Error::NoSuchRef(ref_name.to_owned())),
        }
    }

    /// What the last ref of an image said of it, for an image that has none any more.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Io`].
    pub fn unnamed_record(&self, image: &Digest) -> Result<Option<Ref>> {
        let path = self.unnamed_file(image);
        let Some(WithName { record, .. }) = self.read_record::<WithName<Ref>>(&path)? else {
            return Ok(None);
        };
        record.files().map_err(|error| Error::corrupt(&path, error))?;
        // A ref that was replaced while it was removed left the record of another image.
        Ok(Some(record).filter(|record| record.image == *image))
    }

    pub(crate) fn unnamed_file(&self, image: &Digest) -> String {
        format!("{}/{UNNAMED}/{image}", self.directory())
    }

    /// Makes a directory of the domain that comes with the first file in it.
    pub(crate) fn make_directory(&self, name: &str) -> Result<()> {
        mkdir_if_missing(self.disk(), &format!("{}/{name}", self.directory()))?;
        self.disk().sync_dir(self.directory()).at("sync", self.directory())
    }

    /// Keeps what a ref that is about to name another image says of its present one.
    fn keep_replaced(&self, path: &str, new: &Ref) -> Result<()> {
        let (name, old) = match self.read_ref(path) {
            Ok(Some((name, old))) if old.image != new.image => (name, old),
            Err(error) if !is_damage(&error) => return Err(error),
            _ => return Ok(()),
        };
        self.make_directory(UNNAMED)?;
        let json = ref_json(&name, &old)?;
        self.store().replace_file(&self.unnamed_file(&old.image), &json, true)
    }

    pub(crate) fn read_ref(&self, path: &str) -> Result<Option<(String, Ref)>> {
        let Some(WithName { name, record }) = self.read_record::<WithName<Ref>>(path)? else {
            return Ok(None);
        };
        check_own_name(path, &name)?;
        record.files().map_err(|error| Error::corrupt(path, error))?;
        Ok(Some((name, record)))
    }

    /// All roots of one kind, sorted by id, without refs ([`Domain::refs`]).
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

    /// Makes or replaces a root; what it keeps must be here. Durable on return, except for mounts
    /// and virtual machines, which do not outlive a crash and must be quick. Written even to a store that this program
    /// may not change: roots are state of this boot, for the sake of whoever may collect it.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::BadName`], [`Error::Io`].
    pub fn put_root(&self, root: &Root) -> Result<()> {
        let path = self.root_file(root.kind, &root.id)?;
        let json = to_json(&path, root)?;
        let _lock = self.lock_names()?;
        let durable = !root.kind.ends_with_boot();
        if durable {
            self.sync_parts()?;
        }
        let write = || {
            self.check_and_note(&root.files()?)?;
            self.store().replace_file(&path, &json, durable)
        };
        match write() {
            // A read-only mount of an image that is here must not need room.
            Err(error) if error.kind() == ErrorKind::Space && self.store().use_reserve() => write(),
            other => other,
        }
    }

    /// Removes a root; says whether it was there.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::Io`].
    pub fn remove_root(&self, kind: RootKind, id: &str) -> Result<bool> {
        let removed = self.unlink_if_there(&self.root_file(kind, id)?)?;
        if removed && !kind.ends_with_boot() {
            self.sync_directory(kind.directory())?;
        }
        Ok(removed)
    }

    pub(crate) fn read_root(&self, path: &str) -> Result<Option<Root>> {
        let Some(root) = self.read_record::<Root>(path)? else { return Ok(None) };
        check_own_name(path, &root.id)?;
        root.files().map_err(|error| Error::corrupt(path, error))?;
        if !path.contains(&format!("/{}/", root.kind.directory())) {
            return Err(Error::corrupt(
                path,
                format!("it says that it is a {}", root.kind.as_str()),
            ));
        }
        Ok(Some(root))
    }

    /// The records in one of the directories of [`RECORDS`].
    pub(crate) fn records(&self, directory: &str) -> Result<Vec<RecordFile>> {
        let record = |stem: String| RecordFile {
            path: format!("{}/{directory}/{stem}{RECORD_SUFFIX}", self.directory()),
            name: name::decode(&stem),
        };
        Ok(self.files(directory, RECORD_SUFFIX)?.into_iter().map(record).collect())
    }

    /// The images and layers that a ref or root keeps: none if it is gone since the listing.
    pub(crate) fn files_of(&self, record: &RecordFile) -> Result<Vec<FileName>> {
        if record.path.starts_with(&format!("{}/{REFS}/", self.directory())) {
            return self.read_ref(&record.path)?.map_or(Ok(Vec::new()), |(_, it)| it.files());
        }
        self.read_root(&record.path)?.map_or(Ok(Vec::new()), |root| root.files())
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

    pub(crate) fn unlink_if_there(&self, path: &str) -> Result<bool> {
        Ok(self.disk().unlink(path).if_there("remove", path)?.is_some())
    }

    /// With the lock held, what is here now stays here until it is given back.
    fn check_and_note(&self, files: &[FileName]) -> Result<()> {
        for file in files {
            if !self.is_usable(file)? {
                return Err(Error::NoSuch(file.clone()));
            }
        }
        self.note(Added::Named, files)
    }

    /// Makes the names of images and layers durable. A record must not outlive what it names:
    /// another import may have put an image in place a moment ago without syncing.
    pub(crate) fn sync_parts(&self) -> Result<()> {
        self.sync_directory("layers")?;
        self.sync_directory("images")
    }

    pub(crate) fn sync_directory(&self, directory: &str) -> Result<()> {
        let path = format!("{}/{directory}", self.directory());
        self.disk().sync_dir(&path).at("sync", &path)
    }

    /// Writes a ref's record to a temporary file; returns it and its later place.
    pub(crate) fn prepare_ref(&self, ref_name: &str, record: &Ref) -> Result<(String, String)> {
        let path = self.ref_file(ref_name)?;
        self.keep_replaced(&path, record)?;
        self.prepare(path, &ref_json(ref_name, record)?)
    }

    /// The same for any record.
    pub(crate) fn prepare(&self, path: String, json: &[u8]) -> Result<(String, String)> {
        Ok((self.store().write_temporary(&path, json, Purpose::Record, false)?, path))
    }
}

/// A ref with its name, as it lies in the file.
#[derive(Serialize, serde::Deserialize)]
struct WithName<T> {
    name: String,
    #[serde(flatten)]
    record: T,
}

impl Ref {
    /// The images and layers that it keeps.
    pub(crate) fn files(&self) -> Result<Vec<FileName>> {
        files(&[self.image], self.layers.iter().map(|layer| &layer.chain_id))
    }
}

impl Root {
    /// The images and layers that it keeps.
    pub(crate) fn files(&self) -> Result<Vec<FileName>> {
        files(&self.images, self.layers.iter())
    }
}

fn files<'a>(images: &[Digest], layers: impl Iterator<Item = &'a String>) -> Result<Vec<FileName>> {
    let images = images.iter().map(|image| Ok(FileName::content(FileKind::Image, image)));
    images.chain(layers.map(|chain_id| FileName::chain(FileKind::Layer, chain_id))).collect()
}

pub(crate) fn ref_json(ref_name: &str, record: &Ref) -> Result<Vec<u8>> {
    to_json(ref_name, &WithName { name: ref_name.to_owned(), record })
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
