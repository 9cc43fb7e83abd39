//! [`Staging::commit`]: from staging into the domain, in an order that a crash cannot break.
//!
//! 1. everything staged is made durable (one sync for all of it);
//! 2. the domain's lock is taken, shared: from here on nothing is collected;
//! 3. every object, image and layer that is to be published is checked to be there, with its size;
//!    objects that were in place get the immutable flag if they lack it;
//! 4. the records are written to temporary files, a running collection gets notes, the objects move
//!    into place;
//! 5. that is made durable: from here on the objects cannot be lost;
//! 6. layers and images move into place, and their directories are synced: whoever sees an image,
//!    also after a crash, sees all its objects; then segments, and then packs, likewise. An image's
//!    immutable flag comes after those of its objects and vouches for them;
//! 7. the records are renamed into place and their directories synced.
//!
//! Before step 7 the import is invisible; a crash leaves garbage for the next collection.

use std::io;
use std::sync::{Mutex, PoisonError};

use crate::Digest;
use crate::base::Base;
use crate::collector::Added;
use crate::disk::{Disk, Kind, LockMode, StoredFile};
use crate::error::{At, Error, Result, is_damage, is_full};
use crate::examine::hash_file;
use crate::kinds::{FileKind, FileName};
use crate::parallel::for_each;
use crate::record::Ref;
use crate::staging::{Staging, StagingStats};
use crate::store::{parent, remove_entry};
use crate::task::Cancel;

/// What a directory or a record needs at least, in bytes.
const BLOCK: u64 = 4096;

/// Objects that are listed in memory for all processors to check, and how many one takes at a time.
const CHECKED_AT_ONCE: usize = 1 << 14;
const CHECKED_AT_A_TIME: usize = 1 << 7;
/// How often to replace a file that others keep making immutable in between.
const REPLACE_ATTEMPTS: u32 = 100;

/// What becomes visible with a commit, all of it complete.
#[derive(Clone, Debug, Default)]
pub struct Publish {
    /// Refs to make or to point elsewhere.
    pub refs: Vec<(String, Ref)>,
    /// Images, and what they are to be mounted over. All three are staged or in place.
    pub bases: Vec<(Digest, Base)>,
    /// Segments that staged packs need. A pack takes the place of those that its image had before.
    pub segments: Vec<Digest>,
}

impl Publish {
    /// One ref.
    pub fn named(name: impl Into<String>, record: Ref) -> Self {
        Self { refs: vec![(name.into(), record)], ..Self::default() }
    }
}

impl Staging {
    /// Publishes the import. `objects` are all objects that its images and layers name, with their
    /// sizes, in any order and with repetitions. `Ok` means that all of it survives a crash.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the filesystem filled up meanwhile, [`Error::Poisoned`] after an
    /// earlier failure, [`Error::Cancelled`], [`Error::Vanished`] if content that the import relied
    /// on was collected (begin again with [`crate::ImportOptions::hold_lock`]),
    /// [`Error::SizeMismatch`], [`Error::Io`]. In all cases no ref has changed, except that
    /// [`Error::Io`] in the very last step may leave some changed.
    pub fn commit(
        mut self,
        publish: &Publish,
        objects: impl IntoIterator<Item = (Digest, u64)>,
    ) -> Result<StagingStats> {
        self.check_for_commit()?;
        let domain = self.domain.clone();
        let no_space = |error| no_space(domain.disk(), error);
        self.sync().at("sync", &self.directory).map_err(no_space)?;
        let _lock = match self.held.take() {
            Some(lock) => lock,
            None => self.domain.lock(LockMode::Shared, &self.cancel)?,
        };
        let mut staged = self.staged()?;
        // Another layer of the source would be without its objects.
        staged.retain(|file| self.wanted.as_ref().is_none_or(|wanted| wanted.wants(file)));
        let needed = publish.files(&staged)?;
        let mut missing = self.check_objects(objects.into_iter())?;
        for file in &needed {
            if !staged.contains(file) && !self.domain.is_usable(file)? {
                missing.add(|| file.to_string());
            }
        }
        missing.result()?;

        let mut records = Records { staging: &self, pending: Vec::new() };
        for (name, record) in &publish.refs {
            records.pending.push(self.domain.prepare_ref(name, record).map_err(no_space)?);
        }
        for (image, base) in &publish.bases {
            records.pending.push(self.domain.prepare_base(image, base).map_err(no_space)?);
        }
        // Of what is in place, only what records name; of what is staged, everything.
        self.domain.note(Added::New, &staged).map_err(no_space)?;
        let in_place: Vec<_> =
            needed.iter().filter(|file| !staged.contains(file)).cloned().collect();
        self.domain.note(Added::Named, &in_place).map_err(no_space)?;
        self.publish_objects().map_err(no_space)?;
        // Whoever sees an image or a layer in place may rely on its objects, after a crash too.
        self.sync().at("sync", self.domain.directory()).map_err(no_space)?;
        self.publish_files(&staged, |kind| kind.names() == Some(FileKind::Object))
            .map_err(no_space)?;
        self.domain.sync_parts()?;
        self.publish_files(&staged, |kind| kind == FileKind::Segment).map_err(no_space)?;
        self.publish_files(&staged, FileKind::is_pack).map_err(no_space)?;
        self.protect(&needed)?;
        records.publish()?;
        Ok(self.stats())
    }

    /// The staged files other than objects.
    fn staged(&self) -> Result<Vec<FileName>> {
        let mut staged = Vec::new();
        for directory in ["images", "layers", "segments"] {
            let path = format!("{}/{directory}", self.directory);
            for (file, _) in self.disk().list(&path).at("list", &path)? {
                let name = FileName::of_file(directory, &file);
                let path = format!("{path}/{file}");
                staged.push(name.ok_or_else(|| Error::corrupt(path, "it has no name of ours"))?);
            }
        }
        Ok(staged)
    }

    /// Looks at each object; what is not there is no error here.
    fn check_objects(&self, mut objects: impl Iterator<Item = (Digest, u64)>) -> Result<Missing> {
        let missing = Mutex::default();
        loop {
            let some: Vec<_> = objects.by_ref().take(CHECKED_AT_ONCE).collect();
            if some.is_empty() {
                return Ok(missing.into_inner().unwrap_or_else(PoisonError::into_inner));
            }
            let chunks: Vec<_> = some.chunks(CHECKED_AT_A_TIME).collect();
            for_each(self.disk().parallelism(), &chunks, |chunk| {
                chunk
                    .iter()
                    .try_for_each(|(digest, size)| self.check_object(*digest, *size, &missing))
            })?;
        }
    }

    fn check_object(&self, digest: Digest, size: u64, missing: &Mutex<Missing>) -> Result<()> {
        // First where most objects of a first import are; the order hardly costs a repeated one.
        if self.domain.file_size(&self.object_file(&digest))? == Some(size) {
            return Ok(());
        }
        let path = self.domain.object_file(&digest);
        let Some(stat) = self.disk().stat(&path).if_there("look at", &path)? else {
            let mut missing = missing.lock().unwrap_or_else(PoisonError::into_inner);
            missing.add(|| format!("object {digest}"));
            return Ok(());
        };
        match stat.kind {
            Kind::File if stat.size == size => {}
            Kind::File => {
                return Err(Error::SizeMismatch { digest, expected: size, found: stat.size });
            }
            _ => return Err(Error::corrupt(path, "it is not a regular file; remove it first")),
        }
        // An interrupted import may lack it, and mounts take an image's flag for all its objects'.
        if !self.domain.protection().immutable || stat.immutable {
            return Ok(());
        }
        if !is_sound(digest_of(self.disk(), &path, &self.cancel), Some(digest))? {
            return Err(Error::corrupt(path, "its content has another digest than its name"));
        }
        protect_file(self.disk(), &path)
    }

    /// Moves staged objects into place by shard. A shard that the domain lacks moves as a whole: a
    /// first import of a million objects is 256 renames.
    fn publish_objects(&self) -> Result<()> {
        let disk = self.disk();
        let from = format!("{}/objects", self.directory);
        let to = format!("{}/objects", self.domain.directory());
        let shards = disk.list(&from).at("list", &from)?;
        let immutable = self.domain.protection().immutable;
        for_each(disk.parallelism(), &shards, |(shard, _)| {
            let (from, to) = (format!("{from}/{shard}"), format!("{to}/{shard}"));
            let staged = if immutable { disk.list(&from).at("list", &from)? } else { Vec::new() };
            match disk.rename(&from, &to, true) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    for (name, kind) in disk.list(&from).at("list", &from)? {
                        let (from, to) = (format!("{from}/{name}"), format!("{to}/{name}"));
                        if kind != Kind::File {
                            return Err(Error::corrupt(from, "it is not a regular file"));
                        }
                        let size = |path| match self.domain.file_size(path) {
                            Err(error) if is_damage(&error) => Ok(None),
                            size => size,
                        };
                        let digest = Digest::from_object_path(shard, &name);
                        let is_good = || is_sound(digest_of(disk, &to, &self.cancel), digest);
                        move_file(disk, &from, &to, || {
                            Ok(size(&to)? == self.domain.file_size(&from)?
                                && (self.wanted.is_none() || is_good()?))
                        })?;
                    }
                }
                other => other.at("publish", &to)?,
            }
            for (object, _) in staged {
                protect_file(disk, &format!("{to}/{object}"))?;
            }
            Ok(())
        })
    }

    /// Moves the staged files of some kinds into place. Names of segments and packs are durable on
    /// return; a pack replaces earlier ones of
    /// its kind and image.
    fn publish_files(&self, staged: &[FileName], which: impl Fn(FileKind) -> bool) -> Result<()> {
        let disk = self.disk();
        let mut published = false;
        for name in staged.iter().filter(|name| which(name.kind())) {
            let (from, to) = (self.named_file(name), self.domain.named_file(name));
            move_file(disk, &from, &to, || {
                // A concurrent import has written the same. Otherwise an importer only writes it
                // again if it could not use the file in place.
                let digest = |path| digest_of(disk, path, &self.cancel);
                let wanted = name.digest().map_or_else(|| digest(&from), Ok)?;
                is_sound(digest(&to), Some(wanted))
            })?;
            published = true;
            if name.kind().is_pack() {
                for old in self.domain.named(name.kind())? {
                    if old.image() == name.image() && old != *name {
                        remove_entry(disk, &self.domain.named_file(&old), Kind::File)?;
                    }
                }
            }
            if self.domain.protection().immutable {
                protect_file(disk, &to)?;
            }
        }
        if published && which(FileKind::Segment) || which(FileKind::Pack) {
            self.domain.sync_directory(FileKind::Segment.directory())?;
        }
        Ok(())
    }

    /// Sets missing immutable flags, which an interrupted import may have left.
    fn protect(&self, files: &[FileName]) -> Result<()> {
        if !self.domain.protection().immutable {
            return Ok(());
        }
        for name in files {
            protect_file(self.disk(), &self.domain.named_file(name))?;
            let split = name.with_kind(FileKind::Split);
            if name.kind() == FileKind::Layer && self.domain.has_named(&split)? {
                protect_file(self.disk(), &self.domain.named_file(&split))?;
            }
        }
        Ok(())
    }
}

impl Publish {
    /// The files that must be there: those that records name, and segments and images of packs.
    fn files(&self, staged: &[FileName]) -> Result<Vec<FileName>> {
        let image = |image: &Digest| FileName::content(FileKind::Image, image);
        let packed = staged.iter().filter(|name| name.kind().is_pack());
        let mut files: Vec<_> =
            packed.filter_map(FileName::image).map(|packed| image(&packed)).collect();
        for (_, record) in &self.refs {
            files.extend(record.files()?);
        }
        for (over, base) in &self.bases {
            files.extend([over, &base.base, &base.delta].map(image));
        }
        let segments = self.segments.iter();
        files.extend(segments.map(|segment| FileName::content(FileKind::Segment, segment)));
        files.sort_unstable();
        files.dedup();
        Ok(files)
    }
}

/// Whether a digest was found, and is the right one.
fn is_sound(found: Result<Digest>, digest: Option<Digest>) -> Result<bool> {
    match found {
        Err(error) if is_damage(&error) => Ok(false),
        found => Ok(Some(found?) == digest),
    }
}

fn digest_of(disk: &dyn Disk, path: &str, cancel: &Cancel) -> Result<Digest> {
    let file = disk.open(path).at("open", path)?;
    hash_file(&StoredFile::new(file, path.to_owned()), cancel)
}

/// Sets the immutable flag, after the rename: immutable files cannot be renamed, linked or removed.
fn protect_file(disk: &dyn Disk, path: &str) -> Result<()> {
    disk.set_immutable(path, true).at("make immutable", path)
}

/// Moves a file. `is_good` says of an existing one whether it stays, with an inode that may be
/// mapped.
fn move_file(
    disk: &dyn Disk,
    from: &str,
    to: &str,
    is_good: impl FnOnce() -> Result<bool>,
) -> Result<()> {
    match disk.rename(from, to, true) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => return other.at("publish", to),
    }
    if is_good()? {
        return Ok(());
    }
    // Another import, or a collection, may make it immutable between the two calls.
    for _ in 1..REPLACE_ATTEMPTS {
        if disk.stat(to).at("look at", to)?.immutable {
            disk.set_immutable(to, false).at("clear the immutable flag of", to)?;
        }
        match disk.rename(from, to, false) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            other => return other.at("replace", to),
        }
    }
    disk.rename(from, to, false).at("replace", to)
}

/// Records in temporary files, which are removed again unless they are published.
struct Records<'a> {
    staging: &'a Staging,
    /// Temporary path and final path.
    pending: Vec<(String, String)>,
}

impl Records<'_> {
    fn publish(&mut self) -> Result<()> {
        let disk = self.staging.disk();
        let mut directories: Vec<String> = Vec::new();
        // What is left after an error is removed when this is dropped.
        while let Some((temporary, path)) = self.pending.first() {
            disk.rename(temporary, path, false).at("publish", path)?;
            if !directories.iter().any(|known| known == parent(path)) {
                directories.push(parent(path).to_owned());
            }
            self.pending.remove(0);
        }
        directories.iter().try_for_each(|path| disk.sync_dir(path).at("sync", path))
    }
}

impl Drop for Records<'_> {
    fn drop(&mut self) {
        for (temporary, _) in &self.pending {
            let _ = self.staging.disk().unlink(temporary);
        }
    }
}

#[derive(Default)]
struct Missing {
    count: u64,
    first: Option<String>,
}

impl Missing {
    fn add(&mut self, what: impl FnOnce() -> String) {
        self.count += 1;
        self.first.get_or_insert_with(what);
    }

    fn result(self) -> Result<()> {
        match self.first {
            None => Ok(()),
            Some(first) => Err(Error::Vanished { count: self.count, first }),
        }
    }
}

/// A filesystem that fills up while the import is published: directories and records need room too.
fn no_space(disk: &dyn Disk, error: Error) -> Error {
    match error {
        Error::Io { ref source, .. } if is_full(source) => match disk.free_files() {
            Ok(0) => Error::NoInodes { files: 1 },
            _ => Error::NoSpace { missing: BLOCK },
        },
        other => other,
    }
}
