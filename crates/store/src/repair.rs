//! Repair: turns fsck's findings into an import that restores only those files.
//!
//! fsck's lock is gone by then, so removal examines each finding again under the lock.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::contents::Contents;
use crate::disk::{Kind, LockMode};
use crate::error::{At, Error, Result, by_hand, is_damage};
use crate::examine::{Examiner, Reading, Seen, hash_file};
use crate::fsck::{FindingKind, FsckReport};
use crate::kinds::{FileKind, FileName};
use crate::parallel::for_each;
use crate::records::RECORDS;
use crate::staging::Staging;
use crate::store::remove_entry;
use crate::task::Task;
use crate::{Digest, Domain, ImportOptions};

/// What is missing from a domain or is not what its name says.
#[derive(Clone, Debug, Default)]
pub struct Damage {
    /// Objects that are missing, truncated or altered.
    pub objects: HashSet<Digest>,
    /// Images likewise.
    pub images: HashSet<Digest>,
    /// Chain ids of layers to unpack: their tree or split is missing, unreadable or names damage.
    pub layers: HashSet<String>,
}

impl Damage {
    /// Whether there is nothing that a source could bring back.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.images.is_empty() && self.layers.is_empty()
    }

    /// Whether this file is to be brought back.
    pub(crate) fn wants(&self, file: &FileName) -> bool {
        let has_layer = |chain_id| self.layers.contains(&chain_id);
        file.image().is_some_and(|image| self.images.contains(&image))
            || file.chain_id().is_some_and(has_layer)
    }
}

/// What came of protecting a file.
enum Protected {
    /// It is protected now.
    Now,
    /// It was.
    Before,
    /// It is not what its name says.
    Not,
}

impl Domain {
    /// The findings that an import could repair.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn damage(
        &self,
        report: &FsckReport,
        contents: &dyn Contents,
        task: &Task,
    ) -> Result<Damage> {
        let mut damage = Damage::default();
        for finding in &report.findings {
            match finding.kind {
                _ if !self.can_replace(&finding.path)? => {}
                FindingKind::ObjectMissing
                | FindingKind::ObjectTruncated
                | FindingKind::ObjectAltered
                | FindingKind::ObjectUnreadable => damage.objects.extend(finding.digest),
                FindingKind::ImageAltered | FindingKind::ImageUnreadable => {
                    damage.images.extend(self.name_of(&finding.path).and_then(|name| name.image()));
                }
                FindingKind::LayerUnreadable => {
                    let name = self.name_of(&finding.path);
                    damage.layers.extend(name.and_then(|name| name.chain_id()));
                }
                _ => {}
            }
        }
        self.missing_files_of_records(&mut damage)?;
        for layer in self.named(FileKind::Layer)? {
            task.check()?;
            let mut hit = false;
            let read = layer.visit_whole(self, contents, &mut |digest, _| {
                hit |= damage.objects.contains(&digest);
            });
            match read {
                Err(source) if !is_damage(&*source) => {
                    return Err(Error::Unreadable { what: layer.to_string(), source });
                }
                Ok(()) if !hit => {}
                _ => {
                    let split = layer.with_kind(FileKind::Split);
                    if self.can_replace(&self.named_file(&layer))?
                        && self.can_replace(&self.named_file(&split))?
                    {
                        damage.layers.extend(layer.chain_id());
                    }
                }
            }
        }
        Ok(damage)
    }

    /// Whether a file can be put there. A damaged inode is for the filesystem's own check to mend, and a
    /// directory for a person to remove.
    fn can_replace(&self, path: &str) -> Result<bool> {
        match self.disk().stat(path).if_there("look at", path) {
            Err(error) if by_hand(&error).is_some() => Ok(false),
            stat => Ok(stat?.is_none_or(|stat| stat.kind != Kind::Directory)),
        }
    }

    /// What a file is by its path below the store.
    pub(crate) fn name_of(&self, path: &str) -> Option<FileName> {
        let below = path.strip_prefix(self.directory())?.strip_prefix('/')?;
        let (directory, file) = below.rsplit_once('/')?;
        FileName::of_file(directory, file)
    }

    /// Begins an import that keeps only damaged content and counts everything else as known. It
    /// holds garbage collection off. Staged files replace those in place by a rename: whoever has
    /// the old file open, a mount included, keeps it. Fails as [`Domain::begin_import`] does.
    pub fn begin_repair(&self, damage: &Damage) -> Result<Staging> {
        let options = ImportOptions { hold_lock: true, ..ImportOptions::default() };
        let mut staging = self.begin_import(options)?;
        staging.wanted = Some(damage.clone());
        Ok(staging)
    }

    /// Removes damaged derived files among the findings, which can be made again. Files that are
    /// sound or named by a ref or root by now stay. Returns the images that lost their last pack.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`].
    pub fn remove_derived(
        &self,
        report: &FsckReport,
        contents: &dyn Contents,
        task: &Task,
    ) -> Result<BTreeSet<Digest>> {
        self.store().check_writable()?;
        let derived = report.findings.iter().filter(|finding| finding.kind.is_derived());
        let mut names: Vec<_> = derived.filter_map(|finding| self.name_of(&finding.path)).collect();
        // Packs before the segments that they need.
        names.sort_by_key(|name| (name.kind().names().is_none(), name.clone()));
        let damaged: HashSet<_> = names
            .iter()
            .filter(|name| name.kind() == FileKind::Segment)
            .filter_map(FileName::digest)
            .collect();
        let segments = self.named(FileKind::Segment)?;
        let sound = segments.iter().filter_map(FileName::digest);
        let sound = sound.filter(|segment| !damaged.contains(segment)).collect();
        let mut examiner =
            Examiner::new(self, contents, Reading::Cached(self.disk().parallelism()), &task.cancel);
        examiner.derived = self.derived_images()?;
        let mut images = BTreeSet::new();
        for name in &names {
            if self.remove_if_damaged(name, &examiner, &sound)? && name.kind().is_pack() {
                images.extend(name.image());
            }
        }
        let _lock = self.lock(LockMode::Exclusive, &task.cancel)?;
        self.drop_broken_bases()?;
        self.sync_directory("segments")?;
        self.sync_directory("images")?;
        Ok(images)
    }

    /// Removes a derived file if it is still damaged, and says so. It is examined under the shared
    /// lock; under the exclusive lock it must still be the same file that no ref or root names.
    fn remove_if_damaged(
        &self,
        name: &FileName,
        examiner: &Examiner<'_>,
        sound: &HashSet<Digest>,
    ) -> Result<bool> {
        let path = self.named_file(name);
        let inode = || self.disk().stat(&path).map(|stat| stat.inode).if_there("look at", &path);
        let shared = self.lock_shared()?;
        // While it is open no other file gets its inode number.
        let _held = self.disk().open(&path);
        let Some(before) = inode()? else { return Ok(false) };
        let is_damaged = match name.kind() {
            FileKind::Pack | FileKind::DaxPack => examiner.pack(name, sound)?.is_some(),
            FileKind::Segment => matches!(examiner.segment(name)?.0, Seen::Damaged(_)),
            _ => matches!(examiner.whole(name, &mut |_, _| ())?.0, Seen::Damaged(_)),
        };
        drop(shared);
        let _lock = self.lock(LockMode::Exclusive, self.store().waiting())?;
        let is_named = match name.kind() {
            FileKind::Image => name.image().map_or(Ok(true), |image| self.is_named(&image))?,
            _ => false,
        };
        if !is_damaged || is_named || inode()? != Some(before) {
            return Ok(false);
        }
        match remove_entry(self.disk(), &path, Kind::File) {
            Err(error) if by_hand(&error).is_some() => Ok(false),
            removed => removed.map(|_| true),
        }
    }

    /// Whether a ref or root names an image, or a record that cannot be read might.
    pub(crate) fn is_named(&self, image: &Digest) -> Result<bool> {
        for directory in RECORDS {
            for record in self.records(directory)? {
                let is_named = match self.files_of(&record) {
                    Ok(files) => files.contains(&FileName::content(FileKind::Image, image)),
                    Err(error) if is_damage(&error) => true,
                    Err(error) => return Err(error),
                };
                if is_named {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Adds missing protection to content in place: fs-verity, if the filesystem has gained it
    /// since (`tune2fs -O verity`), and the immutable flag. Damaged files are left for fsck, and
    /// then images too. Returns how many files were newly protected.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Corrupt`] if the kernel computes another digest
    /// than this program, [`crate::Error::Cancelled`], [`crate::Error::Io`].
    pub fn protect_all(&self, task: &Task) -> Result<u64> {
        self.store().check_writable()?;
        let _lock = self.lock_shared()?;
        if self.store().open_to_others()?.is_some() {
            self.store().restrict()?;
        }
        let (mut content, mut named) = (Vec::new(), Vec::new());
        self.each_object(&mut |digest, _| {
            content.push(FileName::content(FileKind::Object, &digest))
        })?;
        for kind in FileKind::NAMED {
            match kind.names() {
                Some(_) => named.extend(self.named(kind)?),
                None => content.extend(self.named(kind)?),
            }
        }
        let (count, all) = (AtomicU64::new(0), AtomicBool::new(true));
        let protect = |name: &FileName| -> Result<()> {
            task.check()?;
            let path = self.named_file(name);
            let protected = match self.protect_file(&path, name.digest().as_ref(), task) {
                Err(error) if by_hand(&error).is_some() => Protected::Not,
                other => other?,
            };
            match protected {
                Protected::Now => drop(count.fetch_add(1, Relaxed)),
                Protected::Before => {}
                Protected::Not => all.store(false, Relaxed),
            }
            Ok(())
        };
        let bare = AtomicBool::new(false);
        for_each(self.disk().parallelism(), &content, |name| -> Result<()> {
            task.check()?;
            let path = self.named_file(name);
            bare.fetch_or(self.is_file(&path)? && self.lacks_verity(&path)?, Relaxed);
            Ok(())
        })?;
        // fs-verity takes the flag from an object for a moment, and that of an image stands for it. After a kill or
        // a crash then none may be left.
        if bare.into_inner() && self.protection().immutable {
            for path in self.named(FileKind::Image)?.iter().map(|image| self.named_file(image)) {
                if !self.is_file(&path)? {
                    continue;
                }
                let cleared = self.disk().set_immutable(&path, false);
                let cleared = cleared.at("clear the immutable flag of", &path);
                cleared.or_else(|it| if by_hand(&it).is_some() { Ok(()) } else { Err(it) })?;
            }
            self.disk().sync_all().at("sync", self.directory())?;
        }
        for_each(self.disk().parallelism(), &content, protect)?;
        // The flag of an image stands for those of its objects, after a crash too.
        if all.load(Relaxed) {
            if count.load(Relaxed) > 0 {
                self.disk().sync_all().at("sync", self.directory())?;
            }
            for_each(self.disk().parallelism(), &named, protect)?;
        }
        if count.load(Relaxed) > 0 {
            self.disk().sync_all().at("sync", self.directory())?;
        }
        Ok(count.into_inner())
    }

    /// Whether a file is in its place, and not a link, a pipe or nothing that can be looked at.
    fn is_file(&self, path: &str) -> Result<bool> {
        match self.disk().stat(path).at("look at", path) {
            Err(error) if by_hand(&error).is_some() => Ok(false),
            stat => Ok(stat?.kind == Kind::File),
        }
    }

    /// Whether the kernel could check a file and does not.
    pub(crate) fn lacks_verity(&self, path: &str) -> Result<bool> {
        match self.has_verity().then(|| self.disk().measure_verity(path).at("measure", path)) {
            Some(Err(error)) if by_hand(&error).is_none() => Err(error),
            measured => Ok(matches!(measured, Some(Ok(None)))),
        }
    }

    /// Protects one file, whose content has that digest if it has one.
    fn protect_file(&self, path: &str, digest: Option<&Digest>, task: &Task) -> Result<Protected> {
        let disk = self.disk();
        let (protection, stat) = (self.protection(), disk.stat(path).at("look at", path)?);
        if stat.kind != Kind::File {
            return Ok(Protected::Not);
        }
        let wants_flag = protection.immutable && !stat.immutable;
        let wants_verity = digest.is_some() && self.lacks_verity(path)?;
        if !(wants_flag || wants_verity) {
            return Ok(Protected::Before);
        }
        if let Some(digest) = digest {
            let Some(file) = self.open_file(path.to_owned())? else { return Ok(Protected::Not) };
            match hash_file(&file, &task.cancel) {
                Ok(found) if found == *digest => {}
                Err(error) if !is_damage(&error) => return Err(error),
                _ => return Ok(Protected::Not),
            }
        }
        let mut measured = Ok(digest.map(|digest| digest.0));
        if wants_verity {
            if stat.immutable {
                disk.set_immutable(path, false).at("clear the immutable flag of", path)?;
            }
            measured = disk.enable_verity(path).at("enable fs-verity on", path);
        }
        // Whatever came of that.
        if protection.immutable {
            disk.set_immutable(path, true).at("make immutable", path)?;
        }
        if measured? != digest.map(|digest| digest.0) {
            return Err(Error::corrupt(path, "the kernel computes another fs-verity digest"));
        }
        Ok(Protected::Now)
    }

    /// What is still wrong after a repair; reads only damaged content. Fails like [`Domain::fsck`].
    pub fn recheck(
        &self,
        damage: &Damage,
        contents: &dyn Contents,
        task: &Task,
    ) -> Result<FsckReport> {
        let content = |kind| move |digest| FileName::content(kind, digest);
        let objects = damage.objects.iter().map(content(FileKind::Object));
        let images = damage.images.iter().map(content(FileKind::Image));
        let damaged: HashSet<_> = objects.chain(images).collect();
        self.fsck_reading(contents, &|_| Reading::Only(damaged.clone()), task)
    }

    /// Missing images and layers that a ref or root names. Unreadable records are own findings.
    fn missing_files_of_records(&self, damage: &mut Damage) -> Result<()> {
        for directory in RECORDS {
            for record in self.records(directory)? {
                let files = match self.files_of(&record) {
                    Err(error) if is_damage(&error) => continue,
                    files => files?,
                };
                for file in self.missing_of(&files)? {
                    damage.images.extend(file.image());
                    damage.layers.extend(file.chain_id());
                }
            }
        }
        Ok(())
    }
}
