//! How garbage collection runs beside imports and mounts that go on.
//!
//! Whoever publishes or names content (a commit, a new ref, a new root) holds the domain's lock
//! *shared*; a collection removes content with that lock *exclusive*. Holding it from the first
//! look to the last removal would stop mounts for seconds, so a collection holds it for one small
//! batch of removals at a time and marks without it. Even a single removal can last half a second
//! (it waits for the filesystem's journal), so there are two locks: mounts and names take the one
//! of what names something, commits both, and most removals, those of objects, need only the one
//! of contents ([`Covered`]). This is safe because of:
//!
//! 1. **Begin.** Under the exclusive lock the collection makes the directory `added/`. Earlier
//!    writers have finished, and all that they published and named is visible. Later writers see
//!    the directory.
//! 2. **Notes.** A writer that sees the directory puts an empty file there for each image, layer,
//!    segment and pack before publishing or naming it, under its lock. If it dies in between, the
//!    note only keeps too much.
//! 3. **Mark**, without the lock. Reads every ref and root, then the live mounts. Records that
//!    change meanwhile have a note.
//! 4. **Sweep.** A batch is removed under the exclusive lock, and only after `added/` was found
//!    empty under it. If there are notes, the lock is released, the noted files and what they name
//!    are kept, and the batch is retried. So in each batch *every* file in place is kept with all
//!    that it names, or is garbage: it was there at the mark or has a note.
//! 5. **Order.** Garbage images, layers, splits and packs go first, durably. All remaining ones are
//!    kept or noted, so no file names an object or segment that nothing kept names. Whoever names
//!    one of these files from then on changes nothing: only a commit brings files that name more.
//!    A file that cannot be removed, because its inode is damaged, cannot be read or named either;
//!    if the filesystem's check brings it back, fsck finds what it lacks.
//!
//! A writer that found content before it had the lock looks again under it
//! ([`crate::Staging::commit`]). If a batch took it, that fails with [`Error::Vanished`], and a
//! second attempt holds the lock from its start, which stops every batch.
//!
//! Only one collection runs at a time: it holds the lock of `roots/` throughout. By that lock a
//! writer recognises and removes the `added/` of a killed collection. Notes need not be durable, as
//! no collection survives a power loss. Without room for `added/`, the collection holds the
//! domain's lock throughout: it is what makes room.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::contents::Contents;
use crate::disk::{Kind, Lock, LockMode, Purpose};
use crate::domain::{Covered, DomainLock};
use crate::error::{At, Error, Result, by_hand, is_absent, is_full};
use crate::examine::with_advice;
use crate::kinds::{FileKind, FileName};
use crate::reach::{ITSELF, Reachability, Unreadable};
use crate::records::ROOTS;
use crate::store::{remove_entry, sweep_entry};
use crate::{Digest, Domain, GcOptions};

/// Directory of the notes, in the domain, while a collection runs.
const ADDED: &str = "added";
/// Notes that are taken at once, with the lock held.
const NOTES: usize = 64;
/// How long a batch holds the lock; checked after each removal, which takes some disks
/// milliseconds.
const HELD_MAX: Duration = Duration::from_millis(3);
/// Least pause after a batch; at least half its time. Waiters poll more often (`Cancel::wait_for`).
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// Tries for the next batch's lock by a collection that is not to wait, and the time between them.
const PATIENCE: u32 = 500;
const RETRY: Duration = Duration::from_millis(2);

/// Why a note was written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    /// A record names a file that is in place.
    Named,
    /// A file is published, perhaps in place of a damaged one.
    New,
}

impl Added {
    fn as_str(self) -> &'static str {
        match self {
            Self::Named => "named",
            Self::New => "new",
        }
    }
}

impl Domain {
    /// Notes files for a running collection, with the domain's lock held and before naming or
    /// publishing them.
    pub(crate) fn note(&self, added: Added, files: &[FileName]) -> Result<()> {
        let directory = format!("{}/{ADDED}", self.directory());
        if self.disk().stat(&directory).if_there("look at", &directory)?.is_none() {
            return Ok(());
        }
        let roots = format!("{}/{ROOTS}", self.directory());
        if let Some(_none_runs) =
            self.disk().lock(&roots, LockMode::Shared, false).at("lock", &roots)?
        {
            return remove_entry(self.disk(), &directory, Kind::Directory).map(drop);
        }
        for file in files {
            let note = format!("{}-{}-{}", added.as_str(), file.kind().noun(), file.stem());
            let path = format!("{directory}/{note}");
            match self.disk().create(&path, Purpose::Record) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                // The collection has just ended.
                Err(error) if is_absent(&error) => return Ok(()),
                other => drop(other.at("create", &path)?),
            }
        }
        Ok(())
    }
}

fn parse_note(note: &str) -> Option<(Added, FileName)> {
    let (added, rest) = note.split_once('-')?;
    let added = [Added::Named, Added::New].into_iter().find(|known| known.as_str() == added)?;
    let (noun, stem) = rest.split_once('-')?;
    let kind = FileKind::NAMED.into_iter().find(|kind| kind.noun() == noun)?;
    Some((added, FileName::of_stem(kind, stem)?))
}

/// Something that may be garbage.
#[derive(Debug)]
pub(crate) struct Suspect<T> {
    pub(crate) what: T,
    pub(crate) path: String,
    /// A file, or a directory with everything in it.
    pub(crate) kind: Kind,
}

/// What went: how many, and how many bytes they had allocated.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Swept {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

impl std::ops::AddAssign for Swept {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.bytes += other.bytes;
    }
}

pub(crate) struct Collector<'a> {
    pub(crate) domain: &'a Domain,
    pub(crate) options: &'a GcOptions,
    pub(crate) reach: Reachability<'a>,
    /// Images that were published or named since the beginning.
    pub(crate) noted: BTreeSet<Digest>,
    /// Whether a file got its flag that had none.
    pub(crate) protected: AtomicBool,
    /// Files that are kept and get the immutable flag after all objects.
    pub(crate) protect_last: Vec<String>,
    /// If there are no notes: nobody else has changed anything since the beginning.
    held: Option<DomainLock>,
    /// Its holder owns the notes. Last, so that they are gone before another collection can begin.
    alone: Option<Box<dyn Lock>>,
}

impl<'a> Collector<'a> {
    /// Begins a collection. A dry run only keeps other collections off.
    ///
    /// # Errors
    /// [`Error::Busy`] if another one runs, or an import is being published and the options say not
    /// to wait; [`Error::ReadOnly`], [`Error::Io`].
    pub(crate) fn begin(
        domain: &'a Domain,
        contents: &'a dyn Contents,
        options: &'a GcOptions,
    ) -> Result<Self> {
        let mut collector = Self {
            domain,
            options,
            reach: Reachability::new(domain, contents, options.cancel.clone()),
            noted: BTreeSet::new(),
            protected: AtomicBool::new(false),
            protect_last: Vec::new(),
            held: None,
            alone: None,
        };
        options.cancel.check()?;
        if options.dry_run {
            collector.held = Some(domain.lock_shared()?);
            return Ok(collector);
        }
        domain.store().check_writable()?;
        let busy = || Error::Busy { domain: domain.name().to_owned() };
        let (disk, roots) = (domain.disk(), format!("{}/{ROOTS}", domain.directory()));
        let (wait, cancel) = (options.wait, &options.cancel);
        let alone = || domain.try_lock_at(&roots, LockMode::Exclusive);
        let alone = if wait { Some(cancel.wait_for(alone)?) } else { alone()? };
        collector.alone = Some(alone.ok_or_else(busy)?);
        let added = collector.added();
        // Of a collection that was killed, most of it while others may add notes.
        let _ = remove_entry(disk, &added, Kind::Directory);
        // Nobody publishes or names without it.
        let lock = || domain.try_lock(Covered::Names, LockMode::Exclusive);
        let lock = if wait { Some(cancel.wait_for(lock)?) } else { lock()? };
        let lock = lock.ok_or_else(busy)?;
        remove_entry(disk, &added, Kind::Directory)?;
        match disk.mkdir(&added) {
            Err(error) if is_full(&error) => collector.held = Some(lock),
            other => other.at("create", &added)?,
        }
        Ok(collector)
    }

    /// Sets the immutable flag of a kept file, which an interrupted import may not have set.
    pub(crate) fn protect(&self, path: &str) -> Result<()> {
        let disk = self.domain.disk();
        if self.options.dry_run || !self.domain.protection().immutable {
            return Ok(());
        }
        // A repair may replace it at this moment.
        let set = match disk.stat(path).if_there("look at", path) {
            Ok(Some(stat)) if stat.kind == Kind::File && !stat.immutable => {
                self.protected.store(true, Relaxed);
                disk.set_immutable(path, true).if_there("make immutable", path)
            }
            other => other.map(|_| None),
        };
        // What is damaged is found by fsck, and holds up nothing here.
        set.map(drop).or_else(|error| if by_hand(&error).is_some() { Ok(()) } else { Err(error) })
    }

    /// Removes the garbage among the suspects, which it decides with a lock held: until they are
    /// gone nothing can be published, nor named if `what` is names.
    pub(crate) fn sweep<T>(
        &mut self,
        what: Covered,
        suspects: &[Suspect<T>],
        is_garbage: impl Fn(&Self, &T) -> Result<bool>,
    ) -> Result<Swept> {
        let mut swept = Swept::default();
        let (disk, dry_run) = (self.domain.disk(), self.options.dry_run);
        let cancel = &self.options.cancel;
        let mut suspects = suspects.iter().peekable();
        while suspects.peek().is_some() {
            self.options.cancel.check()?;
            let lock = self.section(what)?;
            let start = Instant::now();
            for suspect in suspects.by_ref() {
                if is_garbage(self, &suspect.what)? {
                    let (path, kind) = (&suspect.path, suspect.kind);
                    match sweep_entry(disk, path, kind, dry_run, cancel) {
                        Err(error) if by_hand(&error).is_some() => {
                            let (what, reason) = (format!("`{path}`"), with_advice(&error));
                            let kept = ITSELF.to_owned();
                            self.reach.unreadable.push(Unreadable { what, reason, kept });
                        }
                        bytes => swept += Swept { count: 1, bytes: bytes? },
                    }
                }
                if lock.is_some() && start.elapsed() >= HELD_MAX {
                    break;
                }
            }
            drop(lock);
            if suspects.peek().is_some() && self.held.is_none() {
                std::thread::sleep((start.elapsed() / 2).max(PAUSE_MIN));
            }
        }
        Ok(swept)
    }

    /// A lock, exclusive, at a moment when there are no notes.
    fn section(&mut self, what: Covered) -> Result<Option<DomainLock>> {
        while self.held.is_none() {
            let lock = self.lock(what)?;
            let Some(notes) = self.take_notes()? else { return Ok(Some(lock)) };
            drop(lock);
            for (added, file) in &notes {
                self.noted.extend(file.image());
                self.reach.add(file, *added == Added::New)?;
            }
            self.reach.seal();
        }
        Ok(None)
    }

    fn lock(&self, what: Covered) -> Result<DomainLock> {
        let lock = || self.domain.try_lock(what, LockMode::Exclusive);
        if self.options.wait {
            return self.options.cancel.wait_for(lock);
        }
        for _ in 0..PATIENCE {
            if let Some(lock) = lock()? {
                return Ok(lock);
            }
            std::thread::sleep(RETRY);
        }
        Err(Error::Busy { domain: self.domain.name().to_owned() })
    }

    /// Some of the notes, which are removed; `None` if there are none.
    fn take_notes(&self) -> Result<Option<Vec<(Added, FileName)>>> {
        let (disk, added) = (self.domain.disk(), self.added());
        let entries = disk.list(&added).at("list", &added)?;
        let mut notes = Vec::new();
        for (note, kind) in entries.iter().take(NOTES) {
            remove_entry(disk, &format!("{added}/{note}"), *kind)?;
            notes.extend(parse_note(note));
        }
        Ok((!entries.is_empty()).then_some(notes))
    }

    fn added(&self) -> String {
        format!("{}/{ADDED}", self.domain.directory())
    }
}

impl Drop for Collector<'_> {
    fn drop(&mut self) {
        if self.alone.is_some() {
            // What is left is removed by whoever next writes a note.
            let _ = remove_entry(self.domain.disk(), &self.added(), Kind::Directory);
        }
    }
}
