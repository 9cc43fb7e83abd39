//! Looks at objects and at metadata, which bring the [`State`] up to date: how much of them is
//! resident, and what of that is charged to the commons.
//!
//! A look at an object opens its file, and that brings its inode and its name into memory: some
//! 1.7 kB of the kernel's (ext4). So one that had no page at the last look is left alone while all
//! images with it are idle: not mounted, and without metadata in the page cache, which `warm` and
//! whoever mounts an image read first. Once an hour, and when somebody asks, nothing is left alone.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use cofolio_store::{BoxError, Digest, Domain, Error, FileKind, FileName, with_causes};
use cofolio_sys::cache::{self, FileMap};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::Budget;
use super::charges::Charges;
use super::index::{Index, MetadataBytes, Object};
use super::rounds::Rounds;
use super::state::{State, TICKS_PER_SECOND};
use super::usage::ObjectId;
use crate::cgroup::COMMONS;
use crate::mount::open_dir;

/// Directories of objects that are open at one time: there can be more trust domains than
/// descriptors.
const DIRECTORIES_MAX: usize = 16;

/// How often nothing is left alone, in ticks.
const WHOLE_INTERVAL: u32 = 3600 * TICKS_PER_SECOND;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct ResidencyLooks {
    /// Whether a round has begun.
    is_begun: bool,
    /// The domain and then the object at which the next look goes on.
    next_domain: usize,
    next: usize,
    /// The count of that domain's metadata, if it has begun.
    counting: Option<MetadataCount>,
    /// Whether the next round, and this one, leave nothing alone.
    is_asked: bool,
    is_whole: bool,
    /// When the last one began that did so.
    last_whole: Option<u32>,
    /// By number, whether an object is looked at in this round although it had no page. So are those
    /// beyond the end, which are new; in a whole round it is empty.
    wanted: Vec<bool>,
    rounds: Rounds,
    /// Name of the commons cgroup.
    commons: String,
    charges: Charges,
}

impl ResidencyLooks {
    pub(super) fn new() -> Self {
        Self {
            is_begun: false,
            next_domain: 0,
            next: 0,
            counting: None,
            is_asked: false,
            is_whole: false,
            last_whole: None,
            wanted: Vec::new(),
            rounds: Rounds::default(),
            commons: COMMONS.to_owned(),
            charges: Charges::new(),
        }
    }

    pub(super) fn with_commons(self, name: &str) -> Self {
        Self { commons: name.to_owned(), ..self }
    }

    pub(super) fn rounds(&self) -> &Rounds {
        &self.rounds
    }

    pub(super) fn commons(&self) -> &str {
        &self.commons
    }

    pub(super) fn charges(&self) -> &Charges {
        &self.charges
    }

    /// The next look begins a round that leaves nothing alone, whatever is left of this one.
    pub(super) fn start_over(&mut self) {
        self.end_round();
        self.is_asked = true;
    }

    fn end_round(&mut self) {
        (self.is_begun, self.next_domain, self.next, self.counting) = (false, 0, 0, None);
    }

    /// Goes on where the last call ended, until all was looked at once or the budget is spent: at
    /// one file at least. Says whether it came to the end of a round.
    pub(super) fn sample(&mut self, state: &mut State, budget: &Budget) -> bool {
        let now = state.now();
        if !self.is_begun {
            self.is_begun = true;
            self.rounds.begin(now);
            self.charges.begin(state.hierarchy.as_ref().ok(), &self.commons);
            state.page_files = used_page_files(state);
            let is_due = |last: u32| now >= last.saturating_add(WHOLE_INTERVAL);
            self.is_whole =
                std::mem::take(&mut self.is_asked) || self.last_whole.is_none_or(is_due);
            if self.is_whole {
                self.last_whole = Some(now);
            }
        }
        let is_complete =
            self.sample_metadata(state, budget) && self.sample_objects(state, now, budget);
        if is_complete {
            self.end_round();
            self.rounds.complete();
            state.forget_past_uses();
        }
        is_complete
    }

    fn sample_objects(&mut self, state: &mut State, now: u32, budget: &Budget) -> bool {
        let mut directories = HashMap::new();
        let first = self.next;
        if first == 0 {
            self.wanted = if self.is_whole { Vec::new() } else { wanted_objects(state) };
        }
        while self.next < state.index.numbers_end() {
            if self.next > first && budget.is_spent() {
                return false;
            }
            let id = ObjectId(u32::try_from(self.next).unwrap_or(u32::MAX));
            self.next += 1;
            let Some(object) = state.index.object(id).filter(|it| !self.is_left_alone(id, it))
            else {
                continue;
            };
            let number = object.domain;
            if directories.len() == DIRECTORIES_MAX && !directories.contains_key(&number) {
                directories.clear();
            }
            let open = || open_objects(&state.index, number);
            let directory = directories.entry(number).or_insert_with(open);
            self.look_at(id, directory, state, now);
        }
        true
    }

    /// Whether an object had no pages at the last look, and can be left alone.
    fn is_left_alone(&self, id: ObjectId, object: &Object) -> bool {
        let is_wanted = self.wanted.get(id.0 as usize).copied().unwrap_or(true);
        !is_wanted && object.resident_pages == 0 && object.counted > 0
    }

    /// Looks how much of an object is resident. `directory` is that of its domain's objects.
    fn look_at(
        &mut self,
        id: ObjectId,
        directory: &rustix::io::Result<OwnedFd>,
        state: &mut State,
        now: u32,
    ) {
        let page_file = state.page_files.get(&id);
        let Some(object) = state.index.object(id) else { return };
        let file = match (page_file, directory) {
            (Some(path), _) => cache::open(path),
            (None, Err(error)) => Err((*error).into()),
            (None, Ok(directory)) => {
                // As `cache::open`, but relative to the directory: that takes half the time.
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let opened = openat(directory, object.digest.object_path(), flags, Mode::empty());
                opened.map(File::from).map_err(Into::into)
            }
        };
        let size = object.size;
        let looked = file.and_then(|file| {
            let pages = match page_file {
                Some(_) => FileMap::new(&file, size)?.resident_pages()?,
                None => cache::resident_pages(&file, size)?,
            };
            Ok((Some(file), pages))
        });
        let (file, pages) = match looked {
            Ok(found) => found,
            Err(error) => {
                let domain = &state.index.domains()[object.domain as usize].domain;
                self.rounds.add_unseen(|| match (directory, domain.objects_dir()) {
                    (Err(_), Some(path)) => format!("{}: {error}", path.display()),
                    _ => format!("object {}: {error}", object.digest),
                });
                // A missing object has no pages. A missing directory says nothing of what was in
                // it, and of a mount that went another one may show the same pages.
                let is_missing = error.kind() == io::ErrorKind::NotFound;
                if !is_missing || directory.is_err() || page_file.is_some() {
                    return;
                }
                (None, 0)
            }
        };
        let is_counted = pages == u64::from(object.resident_pages)
            && self.charges.still_hold(object.commons_pages, object.counted);
        state.index.set_resident(id, pages, now);
        if let (false, Some(file)) = (is_counted, file)
            && let Ok(pages) = self.charges.commons_pages(file, size)
        {
            state.index.set_commons(id, pages, self.charges.epoch);
        }
    }

    /// Counts metadata from where the last call ended. Says whether that is complete.
    fn sample_metadata(&mut self, state: &mut State, budget: &Budget) -> bool {
        while let Some(known) = state.index.domains().get(self.next_domain) {
            let name = known.domain.name();
            let rounds = &mut self.rounds;
            let mut unseen = |error: BoxError| {
                rounds.add_unseen(|| {
                    format!("images of trust domain {name}: {}", with_causes(&*error))
                });
            };
            let begun = match (known.is_removed, self.counting.take()) {
                (true, _) => Ok(MetadataCount::default()),
                (false, Some(begun)) => Ok(begun),
                (false, None) => MetadataCount::begin(&known.domain),
            };
            match begun {
                Ok(mut count) => {
                    if !count.go_on(&known.domain, budget, &mut unseen) {
                        self.counting = Some(count);
                        return false;
                    }
                    state.index.set_metadata_bytes(self.next_domain, &count.bytes);
                }
                Err(error) => unseen(error.into()),
            }
            self.next_domain += 1;
        }
        true
    }
}

/// Says of each object whether an image with it is not idle.
fn wanted_objects(state: &State) -> Vec<bool> {
    let mounted: HashSet<_> =
        state.superblocks.iter().map(|(_, it)| (usize::from(it.domain), it.image)).collect();
    let mut wanted = vec![false; state.index.numbers_end()];
    for (number, domain) in state.index.domains().iter().enumerate() {
        for (digest, image) in &domain.images {
            if image.metadata_bytes > 0 || mounted.contains(&(number, *digest)) {
                image.objects.iter().for_each(|id| wanted[id.0 as usize] = true);
            }
        }
    }
    wanted
}

/// With `inode-share`, files of mounted packs through which something was used. To look at all
/// others would load their inodes.
fn used_page_files(state: &State) -> HashMap<ObjectId, PathBuf> {
    let mut files = HashMap::new();
    for (mount, superblock) in state.superblocks.iter().filter(|(_, it)| it.has_page_files()) {
        state.uses.for_each_of_mount(mount, |usage| {
            let object = state.index.object(usage.object);
            if let Some(path) = object.and_then(|it| superblock.page_file(&it.digest)) {
                files.insert(usage.object, path);
            }
        });
    }
    files
}

/// The directory of a trust domain's objects.
fn open_objects(index: &Index, domain: u16) -> rustix::io::Result<OwnedFd> {
    let path = index.domains().get(domain as usize).and_then(|it| it.domain.objects_dir());
    // A simulated disk has none.
    path.map_or(Err(Errno::NOTSUP), |path| open_dir(&path))
}

/// A count of the resident pages of the files that images are mounted from.
#[derive(Debug, Default)]
struct MetadataCount {
    /// Files that are still to be counted.
    left: Vec<FileName>,
    /// What is resident of the others, by image.
    bytes: HashMap<Digest, MetadataBytes>,
}

impl MetadataCount {
    fn begin(domain: &Domain) -> Result<Self, Error> {
        let mut left = domain.named(FileKind::Image)?;
        left.extend(domain.named(FileKind::Pack)?);
        Ok(Self { left, bytes: HashMap::new() })
    }

    /// Goes on until all files were counted or the budget is spent. Says whether all were.
    fn go_on(
        &mut self,
        domain: &Domain,
        budget: &Budget,
        mut unseen: impl FnMut(BoxError),
    ) -> bool {
        while let Some(name) = self.left.pop() {
            if let Some(image) = name.image() {
                let whole = MetadataBytes { bytes: 0, is_whole: true };
                let sum = self.bytes.entry(image).or_insert(whole);
                match resident_bytes(domain, &name) {
                    Ok(bytes) => sum.bytes += bytes,
                    Err(error) => {
                        sum.is_whole = false;
                        unseen(error);
                    }
                }
            }
            if budget.is_spent() {
                break;
            }
        }
        self.left.is_empty()
    }
}

/// Resident bytes of a file of a domain; 0 if it does not exist any more.
fn resident_bytes(domain: &Domain, name: &FileName) -> Result<u64, BoxError> {
    let file = match domain.open_named(name) {
        Err(Error::NoSuch(_)) => return Ok(0),
        opened => opened?,
    };
    let Some(descriptor) = file.descriptor() else { return Ok(0) };
    Ok(cache::resident_pages(descriptor, file.size()?)? * cache::page_size())
}
