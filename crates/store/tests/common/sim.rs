//! [`SimDisk`]: a disk in memory that forgets what was not synced, at the worst moment.
//!
//! It keeps two filesystems: what programs see, and what is on the medium. Every change goes to the
//! first and is noted; syncing carries notes over to the second. A crash carries over *any* subset of
//! the notes that are left, in order but with gaps, and throws the rest away:
//!
//! - data: whole, not at all, as length without content, or some 512-byte sectors of it;
//! - a hole: whole, not at all, or a part of its length;
//! - new and removed names: each by itself, so that later changes may survive earlier ones;
//! - a rename of a file: not at all, whole, or with the old name still there beside the new one; never
//!   with neither. Of a directory: not at all or whole (a directory with two names is a broken
//!   filesystem, not a crash);
//! - the immutable flag: by itself.
//!
//! That is weaker than what ext4, xfs or btrfs promise, so what survives here survives there. Faults can
//! be planted at the n-th changing call: a crash, an I/O error, or a filesystem that is full from there
//! on. A sync that fails loses some of what it should have written, as Linux does (the pages are marked
//! clean). Blocks of zeros take no room, written or not, as on a filesystem that compresses. With one thread everything is a function of the seed.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cofolio_store::disk::{
    Disk, DiskFile, Kind, Lock, LockMode, Protection, Purpose, Stat, StoredFile, Stretch,
};

/// Granularity of torn writes, in bytes.
const SECTOR: usize = 512;
/// Allocation unit that `stat` reports, in bytes.
const BLOCK: usize = 4096;
/// How long a lock is waited for before the simulation takes it for a deadlock.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// Size of a file that makes room on a full disk, in bytes.
const MUCH: usize = 256 << 10;
/// Inode of the root directory.
const ROOT: u64 = 1;

/// What happens at a planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Power is lost before the call does anything. Every later call fails until [`SimDisk::reboot`].
    Crash,
    /// The call fails with `EIO`, once.
    Io,
    /// From this call on, everything that needs room fails with `ENOSPC`, until
    /// [`SimDisk::clear_fault`], or until a file of [`MUCH`] bytes is removed.
    Full,
}

/// A simulated disk. Cloning gives another handle on the same.
#[derive(Clone, Debug)]
pub struct SimDisk {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    unlocked: Condvar,
}

#[derive(Clone, Debug)]
struct State {
    /// What programs see.
    seen: Files,
    /// What is on the medium.
    medium: Files,
    /// What is seen and not yet on the medium, in order.
    pending: Vec<Change>,
    next_inode: u64,
    rng: u64,
    /// Changing calls so far.
    calls: u64,
    fault: Option<(u64, Fault)>,
    dead: bool,
    /// Counts reboots: handles and locks of an earlier life are void.
    life: u64,
    locks: HashMap<u64, (u32, bool)>,
    /// A file or directory that cannot be read, and why.
    bad: Option<(u64, rustix::io::Errno)>,
    /// Writes that failed after they were said to be done, and of how many the disk itself was told.
    lost: u64,
    told: u64,
}

type Files = BTreeMap<u64, Node>;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    File { data: Vec<u8>, mode: u32, immutable: bool },
    Directory(BTreeMap<String, u64>),
}

#[derive(Clone, Debug)]
enum Change {
    Write { inode: u64, offset: usize, data: Vec<u8> },
    Hole { inode: u64, offset: usize, len: usize },
    Flag { inode: u64, immutable: bool },
    Link { directory: u64, name: String, inode: u64 },
    Unlink { directory: u64, name: String, inode: u64 },
    Rename { from: (u64, String), to: (u64, String), inode: u64, is_directory: bool },
}

impl Change {
    /// Whether syncing this file or directory makes the change durable.
    fn belongs_to(&self, synced: u64) -> bool {
        match self {
            Self::Write { inode, .. } | Self::Hole { inode, .. } | Self::Flag { inode, .. } => {
                *inode == synced
            }
            Self::Link { directory, .. } | Self::Unlink { directory, .. } => *directory == synced,
            Self::Rename { from, to, .. } => from.0 == synced || to.0 == synced,
        }
    }

    fn apply(&self, files: &mut Files) {
        match self {
            Self::Write { inode, offset, data } => write_at(files, *inode, *offset, data),
            Self::Hole { inode, offset, len } => write_at(files, *inode, *offset + *len, &[]),
            Self::Flag { inode, immutable: on } => {
                if let Some(Node::File { immutable, .. }) = files.get_mut(inode) {
                    *immutable = *on;
                }
            }
            Self::Link { directory, name, inode } => set(files, *directory, name, *inode),
            Self::Unlink { directory, name, inode } => unset(files, *directory, name, *inode),
            Self::Rename { from, to, inode, .. } => {
                set(files, to.0, &to.1, *inode);
                unset(files, from.0, &from.1, *inode);
            }
        }
    }
}

fn write_at(files: &mut Files, inode: u64, offset: usize, bytes: &[u8]) {
    if let Some(Node::File { data, .. }) = files.get_mut(&inode) {
        if data.len() < offset + bytes.len() {
            data.resize(offset + bytes.len(), 0);
        }
        data[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

fn set(files: &mut Files, directory: u64, name: &str, inode: u64) {
    if let Some(Node::Directory(entries)) = files.get_mut(&directory) {
        entries.insert(name.to_owned(), inode);
    }
}

fn unset(files: &mut Files, directory: u64, name: &str, inode: u64) {
    if let Some(Node::Directory(entries)) = files.get_mut(&directory)
        && entries.get(name) == Some(&inode)
    {
        entries.remove(name);
    }
}

fn errno(errno: rustix::io::Errno) -> io::Error {
    errno.into()
}

impl SimDisk {
    /// An empty disk.
    pub fn new(seed: u64) -> Self {
        let root = Files::from([(ROOT, Node::Directory(BTreeMap::new()))]);
        Self::with(State {
            seen: root.clone(),
            medium: root,
            pending: Vec::new(),
            next_inode: ROOT + 1,
            rng: seed,
            calls: 0,
            fault: None,
            dead: false,
            life: 0,
            locks: HashMap::new(),
            bad: None,
            lost: 0,
            told: 0,
        })
    }

    fn with(state: State) -> Self {
        Self { shared: Arc::new(Shared { state: Mutex::new(state), unlocked: Condvar::new() }) }
    }

    /// An independent disk with the same content, other luck, and no faults or locks.
    pub fn fork(&self, seed: u64) -> Self {
        let mut state = self.state().clone();
        state.rng = seed;
        state.calls = 0;
        state.fault = None;
        state.locks.clear();
        Self::with(state)
    }

    /// Changing calls since the disk was made or forked.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Plants a fault at the changing call with this number, counted as [`SimDisk::calls`] does.
    pub fn plant(&self, at: u64, fault: Fault) {
        self.state().fault = Some((at, fault));
    }

    /// A write fails in the background. Each handle is told of it by its next sync, and of it once.
    pub fn lose_a_write(&self) {
        self.state().lost += 1;
    }

    /// Removes a planted fault; a full disk has room again.
    pub fn clear_fault(&self) {
        self.state().fault = None;
    }

    /// Power loss (if there was none yet) and a new start: what was not synced survives in part.
    pub fn reboot(&self) {
        let mut state = self.state();
        let pending = std::mem::take(&mut state.pending);
        // From "nothing made it" to "all of it did".
        let quarters = state.below(5);
        for change in &pending {
            if state.below(4) < quarters {
                state.survive(change);
            }
        }
        state.seen = state.medium.clone();
        state.dead = false;
        state.fault = None;
        state.life += 1;
        state.locks.clear();
        self.shared.unlocked.notify_all();
    }

    /// All files that programs see, by path, with their content: to compare two states.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        fn walk(state: &State, inode: u64, path: &str, out: &mut BTreeMap<String, Vec<u8>>) {
            match state.seen.get(&inode) {
                Some(Node::Directory(entries)) => {
                    for (name, inode) in entries {
                        walk(state, *inode, &format!("{path}/{name}"), out);
                    }
                }
                Some(Node::File { data, .. }) => {
                    out.insert(path.trim_start_matches('/').to_owned(), data.clone());
                }
                None => {}
            }
        }
        let mut files = BTreeMap::new();
        walk(&self.state(), ROOT, "", &mut files);
        files
    }

    /// Flips bits of a file behind the store's back, or cuts it: what a failing medium does.
    pub fn damage(&self, path: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let state = &mut *state;
        if let Ok(inode) = state.find(path)
            && let Some(Node::File { data, .. }) = state.seen.get_mut(&inode)
        {
            change(data);
            let changed = data.clone();
            if let Some(Node::File { data, .. }) = state.medium.get_mut(&inode) {
                *data = changed;
            }
        }
    }

    /// Reads of this file, and lookups in this directory, fail with `why`; with EUCLEAN, a damaged inode, so does
    /// `stat`.
    pub fn make_unreadable(&self, path: &str, why: rustix::io::Errno) {
        let mut state = self.state();
        state.bad = state.find(path).ok().map(|inode| (inode, why));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.rng;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Carries one change over to the medium, perhaps not all of it.
    fn survive(&mut self, change: &Change) {
        match change {
            Change::Write { inode, offset, data } => match self.below(4) {
                0 => write_at(&mut self.medium, *inode, *offset, &vec![0; data.len()]),
                1 => {
                    for (number, sector) in data.chunks(SECTOR).enumerate() {
                        if self.below(2) == 0 {
                            let at = offset + number * SECTOR;
                            write_at(&mut self.medium, *inode, at, sector);
                        }
                    }
                }
                _ => change.apply(&mut self.medium),
            },
            Change::Hole { inode, offset, len } => match self.below(3) {
                0 => {
                    let part = usize::try_from(self.below(*len as u64 + 1)).unwrap_or(0);
                    write_at(&mut self.medium, *inode, offset + part, &[]);
                }
                _ => change.apply(&mut self.medium),
            },
            Change::Rename { to, inode, is_directory: false, .. } if self.below(3) == 0 => {
                set(&mut self.medium, to.0, &to.1, *inode);
            }
            _ => change.apply(&mut self.medium),
        }
    }

    /// Every changing call begins here.
    fn call(&mut self, needs_room: bool, is_sync: bool) -> io::Result<()> {
        if self.dead {
            return Err(io::Error::other("the power is off"));
        }
        let number = self.calls;
        self.calls += 1;
        let Some((at, fault)) = self.fault else { return Ok(()) };
        match fault {
            Fault::Crash if number >= at => {
                self.dead = true;
                Err(io::Error::other("power lost"))
            }
            Fault::Io if number == at => {
                if is_sync {
                    let pending = std::mem::take(&mut self.pending);
                    for change in pending {
                        let is_data = matches!(change, Change::Write { .. } | Change::Hole { .. });
                        if !is_data || self.below(2) == 0 {
                            self.pending.push(change);
                        }
                    }
                }
                Err(errno(rustix::io::Errno::IO))
            }
            Fault::Full if number >= at && needs_room => Err(errno(rustix::io::Errno::NOSPC)),
            _ => Ok(()),
        }
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.seen);
        self.pending.push(change);
    }

    /// Makes durable what belongs to one file or directory.
    fn sync(&mut self, inode: u64) {
        for change in std::mem::take(&mut self.pending) {
            match change {
                // Syncing the directory that got the file promises the new name. That the old one is
                // gone is the other directory's business.
                Change::Rename { from, to, inode: file, is_directory: false }
                    if to.0 == inode && from.0 != inode =>
                {
                    set(&mut self.medium, to.0, &to.1, file);
                    let (directory, name) = from;
                    self.pending.push(Change::Unlink { directory, name, inode: file });
                }
                change if change.belongs_to(inode) => change.apply(&mut self.medium),
                change => self.pending.push(change),
            }
        }
    }

    fn find(&self, path: &str) -> io::Result<u64> {
        let mut inode = ROOT;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            match self.seen.get(&inode) {
                Some(Node::Directory(entries)) => {
                    inode = *entries.get(part).ok_or(io::ErrorKind::NotFound)?;
                }
                _ => return Err(io::ErrorKind::NotADirectory.into()),
            }
        }
        Ok(inode)
    }

    /// The directory that holds (or would hold) the entry, and the entry's name.
    fn parent<'p>(&self, path: &'p str) -> io::Result<(u64, &'p str)> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let inode = self.find(parent)?;
        self.entries(inode)?;
        Ok((inode, name))
    }

    fn entries(&self, inode: u64) -> io::Result<&BTreeMap<String, u64>> {
        match self.seen.get(&inode) {
            Some(Node::Directory(entries)) => Ok(entries),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn check(&self, inode: u64) -> io::Result<()> {
        match self.bad {
            Some((bad, why)) if bad == inode => Err(errno(why)),
            _ => Ok(()),
        }
    }

    fn is_immutable(&self, inode: u64) -> bool {
        matches!(self.seen.get(&inode), Some(Node::File { immutable: true, .. }))
    }

    fn is_directory(&self, inode: u64) -> bool {
        matches!(self.seen.get(&inode), Some(Node::Directory(_)))
    }

    /// How often a file is named below a directory. Directories that lost their own name in a crash do
    /// not count: no filesystem would show them again.
    fn names_of(&self, inode: u64, directory: u64) -> u64 {
        let Some(Node::Directory(entries)) = self.seen.get(&directory) else { return 0 };
        let below = |entry: &u64| u64::from(*entry == inode) + self.names_of(inode, *entry);
        entries.values().map(below).sum()
    }

    fn make(&mut self, path: &str, node: Node) -> io::Result<u64> {
        let (directory, name) = self.parent(path)?;
        if self.entries(directory)?.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = self.next_inode;
        self.next_inode += 1;
        // An inode without a name is nothing, so it may be on the medium at once.
        self.medium.insert(inode, node.clone());
        self.seen.insert(inode, node);
        self.change(Change::Link { directory, name: name.to_owned(), inode });
        Ok(inode)
    }
}

impl Disk for SimDisk {
    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        let state = self.state();
        if state.dead {
            return Err(io::Error::other("the power is off"));
        }
        let inode = state.find(path)?;
        if state.is_directory(inode) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        Ok(Box::new(SimFile { disk: self.clone(), inode, life: state.life }))
    }

    fn create(&self, path: &str, purpose: Purpose) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        state.call(true, false)?;
        let mode = purpose.mode();
        let inode = state.make(path, Node::File { data: Vec::new(), mode, immutable: false })?;
        Ok(Box::new(SimFile { disk: self.clone(), inode, life: state.life }))
    }

    fn stat(&self, path: &str) -> io::Result<Stat> {
        let state = self.state();
        let inode = state.find(path)?;
        if state.bad == Some((inode, rustix::io::Errno::UCLEAN)) {
            state.check(inode)?;
        }
        let (kind, size, allocated, mode, immutable, nlink) = match state.seen.get(&inode) {
            Some(Node::File { data, mode, immutable }) => {
                let blocks = data.chunks(BLOCK).filter(|block| block.iter().any(|byte| *byte != 0));
                let allocated = (blocks.count() * BLOCK) as u64;
                let names = state.names_of(inode, ROOT);
                (Kind::File, data.len() as u64, allocated, *mode, *immutable, names)
            }
            _ => {
                state.check(inode)?;
                let mode = if inode == ROOT { 0o700 } else { 0o755 };
                (Kind::Directory, BLOCK as u64, BLOCK as u64, mode, false, 2)
            }
        };
        let mtime = (cofolio_store::now(), 0);
        Ok(Stat { kind, size, allocated, mode, uid: 0, inode, nlink, immutable, mtime })
    }

    fn list(&self, path: &str) -> io::Result<Vec<(String, Kind)>> {
        let state = self.state();
        let entries = state.entries(state.find(path)?)?;
        let kind = |inode: u64| match state.is_directory(inode) {
            true => Kind::Directory,
            false => Kind::File,
        };
        Ok(entries.iter().map(|(name, inode)| (name.clone(), kind(*inode))).collect())
    }

    fn mkdir(&self, path: &str) -> io::Result<()> {
        let mut state = self.state();
        state.call(true, false)?;
        state.make(path, Node::Directory(BTreeMap::new())).map(|_| ())
    }

    fn rename(&self, from: &str, to: &str, keep: bool) -> io::Result<()> {
        let mut state = self.state();
        state.call(false, false)?;
        let inode = state.find(from)?;
        let (from_directory, from_name) = state.parent(from)?;
        let (to_directory, to_name) = state.parent(to)?;
        let target = state.entries(to_directory)?.get(to_name).copied();
        if target.is_some() && keep {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if state.is_immutable(inode) || target.is_some_and(|target| state.is_immutable(target)) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let is_directory = state.is_directory(inode);
        state.change(Change::Rename {
            from: (from_directory, from_name.to_owned()),
            to: (to_directory, to_name.to_owned()),
            inode,
            is_directory,
        });
        Ok(())
    }

    fn unlink(&self, path: &str) -> io::Result<()> {
        let mut state = self.state();
        state.call(false, false)?;
        let inode = state.find(path)?;
        let (directory, name) = state.parent(path)?;
        if state.is_directory(inode) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if state.is_immutable(inode) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let is_much = matches!(&state.seen[&inode], Node::File { data, .. } if data.len() >= MUCH);
        state.fault = state.fault.filter(|(_, fault)| *fault != Fault::Full || !is_much);
        state.change(Change::Unlink { directory, name: name.to_owned(), inode });
        Ok(())
    }

    fn rmdir(&self, path: &str) -> io::Result<()> {
        let mut state = self.state();
        state.call(false, false)?;
        let inode = state.find(path)?;
        let (directory, name) = state.parent(path)?;
        if !state.entries(inode)?.is_empty() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        state.change(Change::Unlink { directory, name: name.to_owned(), inode });
        Ok(())
    }

    fn sync_dir(&self, path: &str) -> io::Result<()> {
        let mut state = self.state();
        state.call(false, true)?;
        let inode = state.find(path)?;
        state.sync(inode);
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        let mut state = self.state();
        state.call(false, true)?;
        let lost = state.lost;
        if std::mem::replace(&mut state.told, lost) < lost {
            return Err(errno(rustix::io::Errno::IO));
        }
        for change in std::mem::take(&mut state.pending) {
            change.apply(&mut state.medium);
        }
        Ok(())
    }

    fn lock(&self, path: &str, mode: LockMode, wait: bool) -> io::Result<Option<Box<dyn Lock>>> {
        let mut state = self.state();
        loop {
            if state.dead {
                return Err(io::Error::other("the power is off"));
            }
            let inode = state.find(path)?;
            let life = state.life;
            let (shared, exclusive) = state.locks.entry(inode).or_default();
            let free = match mode {
                LockMode::Shared => !*exclusive,
                LockMode::Exclusive => !*exclusive && *shared == 0,
            };
            if free {
                match mode {
                    LockMode::Shared => *shared += 1,
                    LockMode::Exclusive => *exclusive = true,
                }
                return Ok(Some(Box::new(SimLock {
                    disk: self.clone(),
                    inode,
                    mode,
                    life,
                    lost: state.lost.into(),
                })));
            }
            if !wait {
                return Ok(None);
            }
            let (again, timeout) = self
                .shared
                .unlocked
                .wait_timeout(state, LOCK_PATIENCE)
                .unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return Err(io::Error::new(io::ErrorKind::Deadlock, "nobody gives the lock back"));
            }
            state = again;
        }
    }

    fn set_immutable(&self, path: &str, on: bool) -> io::Result<()> {
        let mut state = self.state();
        state.call(false, false)?;
        let inode = state.find(path)?;
        state.change(Change::Flag { inode, immutable: on });
        Ok(())
    }

    fn enable_verity(&self, _path: &str) -> io::Result<Option<[u8; 32]>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn measure_verity(&self, _path: &str) -> io::Result<Option<[u8; 32]>> {
        Ok(None)
    }

    fn protection(&self) -> Protection {
        Protection { verity: false, immutable: true }
    }

    fn has_verity(&self) -> bool {
        false
    }

    fn can_reflink(&self) -> bool {
        false
    }

    fn restrict(&self) -> io::Result<()> {
        Ok(())
    }

    fn free_files(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    fn room_bytes(&self) -> io::Result<u64> {
        Ok(1 << 40)
    }

    fn random(&self) -> io::Result<[u8; 16]> {
        let mut state = self.state();
        let (a, b) = (state.next(), state.next());
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&a.to_le_bytes());
        bytes[8..].copy_from_slice(&b.to_le_bytes());
        Ok(bytes)
    }

    fn parallelism(&self) -> usize {
        1
    }

    fn path(&self) -> Option<&Path> {
        None
    }
}

#[derive(Debug)]
struct SimLock {
    disk: SimDisk,
    inode: u64,
    mode: LockMode,
    life: u64,
    /// How many lost writes it knows of.
    lost: AtomicU64,
}

impl Lock for SimLock {
    fn sync(&self) -> io::Result<()> {
        let lost = self.disk.state().lost;
        if self.lost.swap(lost, Ordering::Relaxed) < lost {
            return Err(errno(rustix::io::Errno::IO));
        }
        self.disk.state().told = lost;
        self.disk.sync_all()
    }
}

impl Drop for SimLock {
    fn drop(&mut self) {
        let mut state = self.disk.state();
        if state.life == self.life
            && let Some((shared, exclusive)) = state.locks.get_mut(&self.inode)
        {
            match self.mode {
                LockMode::Shared => *shared = shared.saturating_sub(1),
                LockMode::Exclusive => *exclusive = false,
            }
        }
        self.disk.shared.unlocked.notify_all();
    }
}

#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
    inode: u64,
    life: u64,
}

impl SimFile {
    /// The state, if the disk still lives the life that this file was opened in.
    fn state(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.disk.state();
        if state.dead || state.life != self.life {
            return Err(io::Error::other("the power went off since the file was opened"));
        }
        Ok(state)
    }
}

impl DiskFile for SimFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let state = self.state()?;
        state.check(self.inode)?;
        let Some(Node::File { data, .. }) = state.seen.get(&self.inode) else { return Ok(0) };
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(data.len());
        let n = buffer.len().min(data.len() - start);
        buffer[..n].copy_from_slice(&data[start..start + n]);
        Ok(n)
    }

    fn write_all(&mut self, data: &[u8]) -> io::Result<()> {
        let mut state = self.state()?;
        let Some(Node::File { data: old, .. }) = state.seen.get(&self.inode) else {
            return Err(errno(rustix::io::Errno::BADF));
        };
        let (inode, offset) = (self.inode, old.len());
        match state.call(true, false) {
            Ok(()) => state.change(Change::Write { inode, offset, data: data.to_vec() }),
            Err(error) => {
                // A write that fails has often got half way.
                if !state.dead {
                    let data = data[..data.len() / 2].to_vec();
                    state.change(Change::Write { inode, offset, data });
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn append_hole(&mut self, len: u64) -> io::Result<()> {
        let mut state = self.state()?;
        state.call(true, false)?;
        let Some(Node::File { data, .. }) = state.seen.get(&self.inode) else {
            return Err(errno(rustix::io::Errno::BADF));
        };
        let (inode, offset) = (self.inode, data.len());
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::FileTooLarge)?;
        state.change(Change::Hole { inode, offset, len });
        Ok(())
    }

    fn append_shared(&mut self, _from: &StoredFile, _part: Range<u64>) -> io::Result<bool> {
        Ok(false)
    }

    fn stretch_at(&self, offset: u64) -> io::Result<Stretch> {
        let state = self.state()?;
        let Some(Node::File { data, .. }) = state.seen.get(&self.inode) else {
            return Ok(Stretch::Data(u64::MAX - offset));
        };
        let rest = usize::try_from(offset).ok().and_then(|start| data.get(start..));
        let Some(rest) = rest.filter(|rest| !rest.is_empty()) else {
            return Ok(Stretch::Data(u64::MAX - offset));
        };
        let block_end = BLOCK - (data.len() - rest.len()) % BLOCK;
        let len = block_end.min(rest.len());
        Ok(match rest[..len].iter().all(|byte| *byte == 0) {
            true => Stretch::Hole(len as u64),
            false => Stretch::Data(len as u64),
        })
    }

    fn size(&self) -> io::Result<u64> {
        match self.state()?.seen.get(&self.inode) {
            Some(Node::File { data, .. }) => Ok(data.len() as u64),
            _ => Ok(0),
        }
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state()?;
        state.call(false, true)?;
        state.sync(self.inode);
        Ok(())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
