//! [`Staging::commit`]: from staging into the domain, in an order that a crash cannot break.
//!
//! 1. everything staged is made durable (one sync for all of it);
//! 2. the domain's lock is taken, shared: from here on nothing is collected;
//! 3. every object, image and layer that is to be published is checked to be there, with its size;
//! 4. the records are written to temporary files, the objects move into place;
//! 5. that is made durable: from here on the objects cannot be lost;
//! 6. layers and images move into place, and their directories are synced: whoever sees an image, also
//!    after a crash, sees all its objects; then segments, and then packs, likewise;
//! 7. the records are renamed into place, roots first, then refs, and their directories synced.
//!
//! Before step 7 nobody can see anything of the import; a crash leaves content that nothing keeps, which
//! the next garbage collection takes away.

use std::io;
use std::sync::{Mutex, PoisonError};

use crate::base::Base;
use crate::disk::{Disk, Kind, StoredFile};
use crate::domain::SPLIT_SUFFIX;
use crate::error::{At, Error, Result};
use crate::meta::{SEGMENT_FEATURE, SPLIT_FEATURE};
use crate::parallel::for_each;
use crate::record::{Ref, Root};
use crate::segment::{Pack, SEGMENT_SUFFIX};
use crate::staging::{Staging, StagingStats};
use crate::store::remove_entry;
use crate::verify::hash_file;
use crate::{Digest, name};

/// What a directory or a record needs at least, in bytes.
const BLOCK: u64 = 4096;

/// Objects that are listed in memory to be looked at by all processors, and how many one takes at a time.
const CHECKED_AT_ONCE: usize = 1 << 14;
const CHECKED_AT_A_TIME: usize = 1 << 7;

/// What becomes visible with a commit, all of it complete.
#[derive(Clone, Debug, Default)]
pub struct Publish {
    /// Refs to make or to point elsewhere.
    pub refs: Vec<(String, Ref)>,
    /// Roots to make or to replace.
    pub roots: Vec<Root>,
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
    /// sizes, in any order and with repetitions; they are checked to be there. When this returns `Ok`,
    /// all of it survives a crash.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the filesystem filled up meanwhile, [`Error::Poisoned`] after an earlier
    /// failure, [`Error::Vanished`] if something that the import relied on was collected (begin again
    /// with [`crate::ImportOptions::hold_lock`]), [`Error::SizeMismatch`], [`Error::Io`]. In all cases
    /// no ref and no root has changed, except that [`Error::Io`] in the very last step may leave either.
    pub fn commit(
        mut self,
        publish: &Publish,
        objects: impl IntoIterator<Item = (Digest, u64)>,
    ) -> Result<StagingStats> {
        self.check_for_commit()?;
        self.enable_features().map_err(no_space)?;
        let disk = self.disk();
        disk.sync_all().at("sync", &self.directory).map_err(no_space)?;
        let _lock = match self.held.take() {
            Some(lock) => lock,
            None => self.domain.lock_shared()?,
        };
        let mut missing = self.check_objects(objects.into_iter())?;
        self.check_parts(publish, &mut missing)?;
        missing.result()?;

        let mut records = Records { staging: &self, pending: Vec::new() };
        for root in &publish.roots {
            records.pending.push(self.domain.prepare_root(root).map_err(no_space)?);
        }
        for (name, record) in &publish.refs {
            records.pending.push(self.domain.prepare_ref(name, record).map_err(no_space)?);
        }
        for (image, base) in &publish.bases {
            records.pending.push(self.domain.prepare_base(image, base).map_err(no_space)?);
        }
        self.publish_objects().map_err(no_space)?;
        // Whoever sees an image or a layer in place may rely on its objects, after a crash too.
        self.disk().sync_all().at("sync", self.domain.base()).map_err(no_space)?;
        let mut published = self.publish_parts().map_err(no_space)?;
        self.domain.sync_parts()?;
        published.extend(self.publish_packs().map_err(no_space)?);
        self.protect(publish, &published)?;
        records.publish()?;
        Ok(self.stats())
    }

    /// Has the store say what it holds, before it gets the first of it.
    fn enable_features(&self) -> Result<()> {
        for (part, suffix, feature) in
            [("layers", SPLIT_SUFFIX, SPLIT_FEATURE), ("segments", "", SEGMENT_FEATURE)]
        {
            if self.staged(part)?.iter().any(|file| file.ends_with(suffix)) {
                self.domain.store().enable_compatible(feature)?;
            }
        }
        Ok(())
    }

    /// Names of the staged files of one kind.
    fn staged(&self, part: &str) -> Result<Vec<String>> {
        let path = format!("{}/{part}", self.directory);
        let staged = self.disk().list(&path).at("list", &path)?;
        Ok(staged.into_iter().map(|(file, _)| file).collect())
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
        // First where most objects of a first import are; for a repeated one the other order would
        // save a call, which costs less than a microsecond.
        if self.domain.file_size(&self.object_file(&digest))? == Some(size) {
            return Ok(());
        }
        match self.domain.object_size(&digest)? {
            Some(found) if found == size => {}
            Some(found) => return Err(Error::SizeMismatch { digest, expected: size, found }),
            None => missing
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .add(|| format!("object {digest}")),
        }
        Ok(())
    }

    /// Images and layers of the records must be staged or in place.
    fn check_parts(&self, publish: &Publish, missing: &mut Missing) -> Result<()> {
        let refs = publish.refs.iter().map(|(_, record)| record);
        let images = refs.clone().map(|record| &record.image);
        let bases = publish.bases.iter();
        let bases = bases.flat_map(|(image, base)| [image, &base.base, &base.delta]);
        let rooted = publish.roots.iter().flat_map(|root| &root.images);
        for image in images.chain(rooted).chain(bases) {
            if self.domain.file_size(&self.image_file(image))?.is_none()
                && !self.domain.has_image(image)?
            {
                missing.add(|| format!("image {image}"));
            }
        }
        let layers = refs.flat_map(|record| record.layers.iter().map(|layer| &layer.chain_id));
        for chain_id in layers.chain(publish.roots.iter().flat_map(|root| &root.layers)) {
            let file = name::encode("chain id", chain_id)? + crate::domain::LAYER_SUFFIX;
            if self.domain.file_size(&format!("{}/layers/{file}", self.directory))?.is_none()
                && !self.domain.has_layer(chain_id)?
            {
                missing.add(|| format!("layer {chain_id}"));
            }
        }
        for segment in &publish.segments {
            let file = format!("{}/segments/{segment}{SEGMENT_SUFFIX}", self.directory);
            if self.domain.file_size(&file)?.is_none()
                && self.domain.file_size(&self.domain.segment_file(segment))?.is_none()
            {
                missing.add(|| format!("segment {segment}"));
            }
        }
        for pack in self.staged("segments")?.iter().filter_map(|file| Pack::of_file(file)) {
            if !self.domain.has_image(&pack.image)? {
                missing.add(|| format!("image {}", pack.image));
            }
        }
        Ok(())
    }

    /// Moves the staged objects into place, shard by shard. A shard that the domain does not have yet
    /// moves as a whole: a first import of a million objects is 256 renames.
    fn publish_objects(&self) -> Result<()> {
        let disk = self.disk();
        let from = format!("{}/objects", self.directory);
        let to = format!("{}/objects", self.domain.base());
        let shards = disk.list(&from).at("list", &from)?;
        let immutable = self.domain.protection().immutable;
        for_each(disk.parallelism(), &shards, |(shard, _)| {
            let (from, to) = (format!("{from}/{shard}"), format!("{to}/{shard}"));
            let staged = if immutable { disk.list(&from).at("list", &from)? } else { Vec::new() };
            match disk.rename(&from, &to, true) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    move_files(disk, &from, &to, |placed, staged| {
                        let placed_size = self.domain.file_size(placed)?;
                        let same_size = placed_size == self.domain.file_size(staged)?;
                        Ok(same_size && (!self.repair || self.is_as_named(placed, shard)?))
                    })?;
                }
                other => other.at("publish", &to)?,
            }
            for (object, _) in staged {
                protect_file(disk, &format!("{to}/{object}"))?;
            }
            Ok(())
        })
    }

    /// Moves layers and images into place; gives their paths.
    fn publish_parts(&self) -> Result<Vec<String>> {
        let mut published = Vec::new();
        for part in ["layers", "images"] {
            let from = format!("{}/{part}", self.directory);
            let to = format!("{}/{part}", self.domain.base());
            published.extend(self.staged(part)?.iter().map(|name| format!("{to}/{name}")));
            // A layer that is there is only written again by an importer that could not use it.
            move_files(self.disk(), &from, &to, |placed, _| match part {
                "layers" => Ok(false),
                _ => self.is_as_named(placed, ""),
            })?;
        }
        Ok(published)
    }

    /// Moves segments into place, then the packs over them, in place of what was there; gives their paths.
    fn publish_packs(&self) -> Result<Vec<String>> {
        let staged = self.staged("segments")?;
        if staged.is_empty() {
            return Ok(Vec::new());
        }
        let (disk, to) = (self.disk(), format!("{}/segments", self.domain.base()));
        let (packs, segments): (Vec<_>, Vec<_>) =
            staged.into_iter().partition(|file| Pack::of_file(file).is_some());
        let mut published = Vec::new();
        for files in [segments, packs] {
            for file in files {
                let (from, to) =
                    (format!("{}/segments/{file}", self.directory), format!("{to}/{file}"));
                move_file(disk, &from, &to, |placed, _| self.is_as_named(placed, ""))?;
                if let Some(new) = Pack::of_file(&file) {
                    for old in self.domain.packs_of(&new.image)?.iter().filter(|old| **old != new) {
                        remove_entry(disk, &self.domain.pack_file(old), Kind::File)?;
                    }
                }
                published.push(to);
            }
            disk.sync_dir(&to).at("sync", &to)?;
        }
        Ok(published)
    }

    /// Whether a file has the digest that its name says; `shard` goes before the name.
    fn is_as_named(&self, path: &str, shard: &str) -> Result<bool> {
        let file = StoredFile::new(self.disk().open(path).at("open", path)?, path.to_owned());
        let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
        let found = hash_file(&file)?;
        if let Some(pack) = Pack::of_file(name) {
            return Ok(pack.digest == found);
        }
        let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
        Ok(format!("{shard}{stem}") == found.to_string())
    }

    /// Objects are protected as they are published; this is the rest.
    fn protect(&self, publish: &Publish, published: &[String]) -> Result<()> {
        if !self.domain.protection().immutable {
            return Ok(());
        }
        published.iter().try_for_each(|path| protect_file(self.disk(), path))?;
        // What was in place before may lack it, after an import that was interrupted here.
        for (_, record) in &publish.refs {
            protect_file(self.disk(), &self.domain.image_file(&record.image))?;
            for layer in &record.layers {
                protect_file(self.disk(), &self.domain.layer_file(&layer.chain_id)?)?;
                if self.domain.has_split(&layer.chain_id)? {
                    protect_file(self.disk(), &self.domain.split_file(&layer.chain_id)?)?;
                }
            }
        }
        Ok(())
    }
}

/// Sets the immutable flag. Only after the rename: a file that has it can be neither renamed nor linked
/// nor removed.
fn protect_file(disk: &dyn Disk, path: &str) -> Result<()> {
    disk.set_immutable(path, true).at("make immutable", path)
}

/// Moves all files of a directory. Where there is one already, `is_good` (asked with its path and that of
/// the staged one) says whether it stays and keeps its inode, which somebody may have mapped.
fn move_files(
    disk: &dyn Disk,
    from: &str,
    to: &str,
    is_good: impl Fn(&str, &str) -> Result<bool>,
) -> Result<()> {
    for (name, kind) in disk.list(from).at("list", from)? {
        let (from, to) = (format!("{from}/{name}"), format!("{to}/{name}"));
        if kind != Kind::File {
            return Err(Error::corrupt(from, "it is not a regular file"));
        }
        move_file(disk, &from, &to, &is_good)?;
    }
    Ok(())
}

/// Moves one file likewise.
fn move_file(
    disk: &dyn Disk,
    from: &str,
    to: &str,
    is_good: impl Fn(&str, &str) -> Result<bool>,
) -> Result<()> {
    match disk.rename(from, to, true) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => return other.at("publish", to),
    }
    if !is_good(to, from)? {
        if disk.stat(to).at("look at", to)?.immutable {
            disk.set_immutable(to, false).at("clear the immutable flag of", to)?;
        }
        disk.rename(from, to, false).at("replace", to)?;
    }
    Ok(())
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
        for (temporary, path) in self.pending.drain(..) {
            disk.rename(&temporary, &path, false).at("publish", &path)?;
            let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
            if !directories.iter().any(|known| known == directory) {
                directories.push(directory.to_owned());
            }
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
fn no_space(error: Error) -> Error {
    match error {
        Error::Io { ref source, .. } if crate::error::is_full(source) => {
            Error::NoSpace { missing: BLOCK }
        }
        other => other,
    }
}
