//! The look at one process: how much work it may make, and what a page of it proves.
//!
//! A process may map any number of files, and its mount namespace may call any of them ours. Work
//! that grows with that has one limit for each look. What is left out is counted as unknown.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cofolio_sys::cache::{self, FileMap};
use cofolio_sys::pagemap;
use rustix::fs::{AtFlags, CWD};

use super::super::index::Index;
use super::super::pagemap::{entries, steps};
use super::super::usage::ObjectId;
use super::namespaces::{Namespaces, Seeing, Shown};
use super::tables::Inodes;
use super::{Found, Superblock};
use crate::address_space::{is_unanswered, probe_and_access};
use crate::processes::{self, Mapping};
use crate::settings::Backend;

/// Steps of a look: some hundred milliseconds at most. A step is a file that is looked at with
/// system calls, or [`pagemap::STEP`] pages of a process.
pub(super) const STEPS_OF_A_LOOK: u32 = 4096;

/// Steps for reading the table of an image that nobody has mounted so far as we know.
pub(super) const STEPS_OF_A_TABLE: u32 = STEPS_OF_A_LOOK / 8;

/// A look at one process.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) root: PathBuf,
    pub(super) pid: u32,
    steps_left: u32,
    /// Why something had to be left out, if so.
    pub(super) left_out: Option<&'static str>,
    seeing: Option<Seeing>,
    /// Whether the mounts that it sees could not be read: they are not tried again.
    has_failed: bool,
}

impl Look {
    pub(super) fn new(root: &Path, pid: u32) -> Self {
        Self {
            root: root.to_owned(),
            pid,
            steps_left: STEPS_OF_A_LOOK,
            left_out: None,
            seeing: None,
            has_failed: false,
        }
    }

    /// Takes steps, or gives `None` if there are not so many left.
    pub(super) fn spend(&mut self, steps: u32) -> Option<()> {
        let left = self.steps_left.checked_sub(steps);
        if left.is_none() {
            self.leave_out("there is too much to look at");
        }
        self.steps_left = left?;
        Some(())
    }

    /// Something has to be left out. The first reason is kept.
    pub(super) fn leave_out(&mut self, why: &'static str) {
        self.left_out.get_or_insert(why);
    }

    /// What the process sees. `None` if that cannot be said: then it has ended, or the look is not
    /// whole.
    pub(super) fn shown<'n>(&mut self, namespaces: &'n mut Namespaces) -> Option<&'n mut Shown> {
        if self.has_failed {
            return None;
        }
        let shown = namespaces.of(&self.root, self.pid, &mut self.seeing);
        self.has_failed = shown.is_err();
        let why = match &shown {
            Ok(shown) => (!shown.is_whole).then_some("it sees too many mounts"),
            Err(error) => (!processes::has_ended(error)).then_some("its mounts cannot be read"),
        };
        self.left_out = self.left_out.or(why);
        shown.ok()
    }

    /// A mapped file.
    pub(super) fn found(&mut self, mapping: &Mapping<'_>) -> Option<Found> {
        let file = self.file(mapping);
        let find = move || Ok(Found::at(CWD, &file, AtFlags::empty())?);
        let found = probe_and_access(&processes::directory(&self.root, self.pid), find);
        self.note(found).ok()
    }

    /// Notes whether the process has answered.
    fn note<T>(&mut self, asked: io::Result<T>) -> io::Result<T> {
        if asked.as_ref().is_err_and(is_unanswered) {
            self.leave_out("it does not answer in time");
        }
        asked
    }

    /// A link to a mapped file.
    pub(super) fn file(&self, mapping: &Mapping<'_>) -> PathBuf {
        let link = mapping.link().unwrap_or_default();
        processes::directory(&self.root, self.pid).join(link)
    }
}

impl Superblock {
    /// The layer and the object of a file that a process maps; see [`proven`].
    pub(super) fn proven(
        &self,
        mapping: &Mapping<'_>,
        index: &Index,
        look: &mut Look,
    ) -> Option<(usize, ObjectId)> {
        proven(&self.layers, self.backend, mapping, index, look)
    }
}

/// The layer and the object of a mapped file; none unless the process has a page of that. With
/// `inode-share` the caller knows that the filesystem is the image's, and the inode number says
/// all: pages are not in the object there.
pub(super) fn proven(
    layers: &[Arc<Inodes>],
    backend: Backend,
    mapping: &Mapping<'_>,
    index: &Index,
    look: &mut Look,
) -> Option<(usize, ObjectId)> {
    let candidates = layers.iter().enumerate();
    let candidates =
        candidates.filter_map(|(layer, it)| Some((layer, it.get(index, mapping.inode)?)));
    let mut candidates = candidates.collect::<Vec<_>>().into_iter();
    if backend == Backend::InodeShare {
        return candidates.next();
    }
    let sizes = candidates.as_slice().iter().filter_map(|(_, id)| Some(index.object(*id)?.size));
    let pages = mapped_frames(mapping, sizes.max()?, look).unwrap_or_default();
    candidates.find(|(_, object)| has_frames(index, *object, &pages).unwrap_or(false))
}

/// Pages of a mapping that are compared: the kernel may be moving one, or writing it to disk.
const COMPARED_MAX: usize = 4;

/// The first pages that a process has of a file of this size, as offset in the file and page
/// frame.
pub(super) fn mapped_frames(
    mapping: &Mapping<'_>,
    size: u64,
    look: &mut Look,
) -> io::Result<Vec<(u64, u64)>> {
    let mut pages = Vec::new();
    let Some(addresses) = mapping.addresses(size) else { return Ok(pages) };
    let process = processes::directory(&look.root, look.pid);
    for step in steps(addresses.clone()) {
        if pages.len() >= COMPARED_MAX || look.spend(1).is_none() {
            break;
        }
        for (address, entry) in look.note(entries(&process, step))? {
            if let Some(frame) = entry.frame().filter(|_| entry.is_of_file()) {
                pages.push((mapping.offset + (address - addresses.start), frame));
            }
        }
    }
    pages.truncate(COMPARED_MAX);
    Ok(pages)
}

/// Whether one of these pages, given as offset in the file and page frame, is the object's.
fn has_frames(index: &Index, object: ObjectId, pages: &[(u64, u64)]) -> io::Result<bool> {
    let Some(object) = index.object(object).filter(|_| !pages.is_empty()) else { return Ok(false) };
    let Some(domain) = index.domains().get(object.domain as usize) else { return Ok(false) };
    let file = domain.domain.open_object(&object.digest).map_err(io::Error::other)?;
    let Some(file) = file.descriptor() else { return Ok(false) };
    let size = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let map = FileMap::new(file.as_fd(), size)?;
    let own = File::open("/proc/self/pagemap")?;
    let page = cache::page_size();
    for (offset, frame) in pages.iter().filter(|(offset, _)| *offset < size) {
        // A page that the process has is in the cache. Others are not to be read for this.
        if cache::cachestat(file, *offset, page).is_ok_and(|found| found.cached == 0) {
            continue;
        }
        map.touch(*offset)?;
        let address = map.address() + offset;
        let mut is_same = false;
        pagemap::entries(&own, address..address + page, |_, entry| {
            is_same = entry.is_of_file() && entry.frame() == Some(*frame);
        })?;
        if is_same {
            return Ok(true);
        }
    }
    Ok(false)
}
