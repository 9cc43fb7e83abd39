//! One guest: merges its pages, and undoes merging where that no longer saves memory.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cofolio_shim::protocol::{Hello, Outcome, PAGE, RUN_PAGES_MAX, Run, ZEROS, kind};
use serde::{Deserialize, Serialize};

use super::Target;
use super::image::Images;
use super::plan::{PlannedRun, Slot, Source};
use super::pool::{IMAGES, POOL_PAGES, Pool, Pools};
use super::refusal::opened;
use super::scan::Pages;
use super::shim::Shim;
use crate::address_space::probe_and_access;
use crate::kernel_text;
use crate::vm::ram::{Content, Mapping, Ram, mapping, maps};
use crate::vm::socket;

/// The merger uses this share of the mappings that a process may have. At the limit every mmap(2)
/// of the VMM itself fails.
const MAPPINGS_SHARE: f64 = 0.7;
/// Time limit of one guest's merging in a pass; the last request may exceed it. A shim can be slow
/// on purpose, and the other guests wait for the end of the pass. A later pass plans the rest
/// again.
const MERGE_MAX: Duration = Duration::from_secs(10);
/// Runs of one request.
const RUNS: usize = 256;
/// Most runs that one survey converts. Their pages are in memory twice until they are merged again.
const CONVERTED_MAX: usize = 256;
/// A pool is wasted if guests use at most 1 / `WASTED` of its pages.
const WASTED: usize = 2;

/// A guest whose pages are merged.
#[derive(Debug)]
pub(super) struct Guest {
    /// Process of the VMM.
    pub(super) pid: u32,
    pub(super) pages: Pages,
    pub(super) merging: Merging,
    /// The process's directory in `/proc`.
    dir: PathBuf,
    shim: Shim,
    ram: Ram,
    /// Address of the guest's memory.
    start: u64,
    /// Whether the kernel may have pinned pages of it.
    may_pin: bool,
}

/// Pages of a guest that were merged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merging {
    /// Pages that were mapped from a pool.
    pub pool_pages: u64,
    /// Pages that were mapped from a file of the image.
    #[serde(default)]
    pub image_pages: u64,
    /// Pages that were replaced with the kernel's page of zeros.
    pub zero_pages: u64,
    /// Pages that had changed meanwhile.
    pub changed_pages: u64,
    /// Pages that could not be moved.
    pub busy_pages: u64,
    /// Merged pages that the guest wrote to, and that became its own again.
    #[serde(default)]
    pub converted_pages: u64,
    /// Runs that the kernel refused.
    pub refused_runs: u64,
    /// Why its pages are not merged now, if so.
    #[serde(default)]
    pub refusal: Option<String>,
}

/// Pages of pools that guests use, by the inode of the pool's file.
pub(super) type Used = HashMap<u64, UsedPages>;

/// Pages of one pool that guests use.
#[derive(Debug, Clone, Copy)]
pub(super) struct UsedPages {
    /// A bit for each page.
    bits: [u64; POOL_PAGES / 64],
    /// Pages of the pool.
    pages: usize,
}

impl UsedPages {
    /// Number of used pages.
    pub(super) fn count(&self) -> usize {
        self.bits.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the guests should get these pages back, to merge them into another pool: only a
    /// small part of the pool is used. If there are `many` pools, a small pool is wasted as well.
    pub(super) fn is_wasted(&self, many: bool) -> bool {
        let size = if many { POOL_PAGES } else { self.pages };
        self.count() * WASTED <= size
    }

    /// Marks a range of the file in bytes.
    fn mark(&mut self, bytes: &Range<u64>) {
        let page = |byte: u64| usize::try_from(byte / PAGE as u64).unwrap_or(usize::MAX);
        for page in page(bytes.start)..page(bytes.end).min(self.pages) {
            self.bits[page / 64] |= 1 << (page % 64);
        }
    }
}

impl Guest {
    /// Connects to the shim, and adopts the pools that an earlier merger left there. Refuses a
    /// process that must not be merged.
    pub(super) fn begin(
        proc: &Path,
        target: &Target,
        pools: &mut Pools,
        images: &mut Images,
    ) -> io::Result<Self> {
        let pid = target.pid;
        let dir = proc.join(pid.to_string());
        let may_pin = check(proc, pid)?;
        let socket = socket::connect(&target.dir, "merge")?;
        // The merger reads this process's pages, and gives pools with common pages to the shim:
        // both must be the same process. The VMM wrote the process id, and could name a process of
        // another domain.
        let peer = socket::peer(&socket);
        if peer != Some(pid) {
            let peer = peer.unwrap_or(0);
            let what = format!("process {peer} answers for its VMM, process {pid}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        let (mut shim, Hello { start, len, .. }) = Shim::new(socket)?;
        let end = start.checked_add(len).filter(|_| start.is_multiple_of(PAGE as u64));
        let Some(end) = end.filter(|_| len == target.memory_bytes) else {
            let what = format!("its shim names {len} bytes at {start:#x} as its memory");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        };
        let (pages, ram) = (Pages::new(proc, pid, start, len)?, Ram::at(proc, pid, start..end)?);
        let most = usize::try_from(len).unwrap_or(0) / PAGE / POOL_PAGES * WASTED + 1024;
        for (number, file) in shim.kept(most)? {
            pools.adopt(file, pid)?;
            // It gets the pool again by this merger's number when a run needs it.
            shim.forget(number)?;
        }
        for file in image_files(&dir)? {
            images.add(file, pid)?;
        }
        let merging = Merging::default();
        Ok(Self { pid, pages, merging, dir, shim, ram, start, may_pin })
    }

    /// Looks for devices and files that were added to it. Refuses it if it must not be merged any
    /// more.
    pub(super) fn refresh(&mut self, proc: &Path) -> io::Result<()> {
        self.may_pin = check(proc, self.pid)?;
        Ok(())
    }

    /// Runs of pools that it may still get. A run takes two mappings: its own, and the rest of the
    /// mapping that it splits.
    pub(super) fn runs_left(&self) -> usize {
        let limit = kernel_text::read("/proc/sys/vm/max_map_count".as_ref()).ok();
        let limit = limit.and_then(|text| text.trim().parse::<usize>().ok()).unwrap_or(65_530);
        let maps = maps(&self.dir);
        let used = maps.map_or(limit, |maps| maps.lines().count());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of it"
        )]
        let most = (limit as f64 * MAPPINGS_SHARE) as usize;
        most.saturating_sub(used) / 2
    }

    /// Gives the shim the pools and files that runs map.
    pub(super) fn give(
        &mut self,
        planned: &[PlannedRun],
        pools: &mut Pools,
        images: &Images,
    ) -> io::Result<()> {
        for run in planned {
            let Source::Slot(Slot { pool: number, .. }) = run.source else { continue };
            if let Some(pool) = pools.pools.get_mut(&number) {
                self.shim.give(number, pool.pages, &pool.file)?;
                pool.users.insert(self.pid);
            } else if let Some(image) = images.images.get(&number) {
                self.shim.give(number, image.pages, &image.file)?;
            }
        }
        Ok(())
    }

    /// Merges runs. The shim must have their pools and files.
    pub(super) fn merge(&mut self, planned: &[PlannedRun]) -> io::Result<()> {
        let run = |run: &PlannedRun| match run.source {
            Source::Zeros => self::run(&run.pages, ZEROS, 0),
            Source::Slot(Slot { pool, page }) => self::run(&run.pages, pool, page),
        };
        let runs: Vec<Run> = planned.iter().map(run).collect();
        let began = Instant::now();
        for runs in runs.chunks(RUNS).take_while(|_| began.elapsed() < MERGE_MAX) {
            for (run, outcome) in runs.iter().zip(self.shim.ask(kind::MERGE, runs)?) {
                self.note(run, &outcome);
            }
        }
        Ok(())
    }

    fn note(&mut self, run: &Run, outcome: &Outcome) {
        let first = usize::try_from(run.page).unwrap_or(0);
        for number in 0..run.pages as usize {
            match outcome.is_merged(number) {
                true => self.pages.set_merged(first + number),
                false => self.pages.set_volatile(first + number),
            }
        }
        let (merging, merged) = (&mut self.merging, u64::from(outcome.count()));
        match run.pool {
            ZEROS => merging.zero_pages += merged,
            number if number >= IMAGES => merging.image_pages += merged,
            _ => merging.pool_pages += merged,
        }
        merging.changed_pages += u64::from(outcome.changed);
        merging.busy_pages += u64::from(outcome.busy);
        merging.refused_runs += u64::from(outcome.errno != 0);
    }

    /// Looks at its mappings of pools. Marks in `used` the pages that it reads there.
    pub(super) fn survey(&self, pools: &Pools, used: &mut Used) -> io::Result<Content> {
        let content = self.ram.content()?;
        let sizes: HashMap<u64, u32> =
            pools.pools.values().map(|pool| (pool.inode, pool.pages)).collect();
        for ((_, inode), bytes) in &content.pools {
            let Some(pages) = sizes.get(inode) else { continue };
            let unused = || UsedPages { bits: [0; POOL_PAGES / 64], pages: *pages as usize };
            used.entry(*inode).or_insert_with(unused).mark(bytes);
        }
        Ok(content)
    }

    /// Whether merged pages can become the guest's own again.
    pub(super) fn can_convert(&self) -> bool {
        !self.may_pin
    }

    /// Makes pages the guest's own again: pages that it wrote to, since they cannot be merged a
    /// second time otherwise, and all pages of wasted pools.
    pub(super) fn convert(
        &mut self,
        proc: &Path,
        content: &Content,
        is_wasted: &dyn Fn(u64) -> bool,
        run_min: usize,
    ) -> io::Result<()> {
        self.refresh(proc)?;
        if !self.can_convert() {
            return Ok(());
        }
        let mut runs = Vec::new();
        for piece in &content.pool_pieces {
            let is_wasted = is_wasted(piece.file.1);
            let whole = self.page_numbers(&piece.addresses);
            let written = content.written_of(piece).map(|addresses| self.page_numbers(&addresses));
            let parts: Vec<_> = match is_wasted {
                true => vec![whole],
                // Converting a part splits the mapping: a short part is not worth that.
                false => written.filter(|pages| pages.len() >= run_min).collect(),
            };
            for pages in parts {
                for start in pages.clone().step_by(RUN_PAGES_MAX) {
                    let part = start..pages.end.min(start + RUN_PAGES_MAX);
                    runs.push((run(&part, 0, 0), !is_wasted));
                }
            }
        }
        runs.truncate(CONVERTED_MAX);
        let asked: Vec<Run> = runs.iter().map(|(run, _)| *run).collect();
        let outcomes = self.shim.ask(kind::CONVERT, &asked)?;
        for ((run, was_written), outcome) in runs.iter().zip(outcomes) {
            let first = usize::try_from(run.page).unwrap_or(0);
            for page in (0..run.pages as usize).filter(|page| outcome.is_merged(*page)) {
                self.merging.converted_pages += 1;
                if *was_written {
                    self.pages.set_volatile(first + page);
                }
            }
        }
        Ok(())
    }

    /// Numbers of the pages at these addresses of its memory.
    fn page_numbers(&self, addresses: &Range<u64>) -> Range<usize> {
        let number = |address: u64| {
            usize::try_from(address.saturating_sub(self.start) / PAGE as u64).unwrap_or(0)
        };
        number(addresses.start)..number(addresses.end)
    }

    /// Has the shim give up pools.
    pub(super) fn forget(&mut self, pools: &BTreeMap<u32, Pool>) -> io::Result<()> {
        pools.keys().try_for_each(|number| self.shim.forget(*number))
    }
}

/// Refuses a process that must not be merged. Otherwise, whether the kernel may have pinned pages
/// of it.
fn check(proc: &Path, pid: u32) -> io::Result<bool> {
    let opened = opened(proc, pid)?;
    match opened.refusal {
        Some(refusal) => Err(io::Error::new(io::ErrorKind::Unsupported, refusal)),
        None => Ok(opened.may_pin),
    }
}

fn run(pages: &Range<usize>, pool: u32, pool_page: u32) -> Run {
    let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
    Run { page: pages.start as u64, pool, pool_page, pages: count, reserved: 0 }
}

/// The files of the image that a VMM shows its guest. Opens the mapped file itself: its path may
/// lead to another file by now.
fn image_files(dir: &Path) -> io::Result<Vec<File>> {
    let maps = maps(dir)?;
    let devices = maps.lines().filter_map(mapping).filter(Mapping::is_device);
    let links: BTreeMap<_, _> =
        devices.map(|it| it.piece()).map(|piece| (piece.file, piece.link(dir))).collect();
    probe_and_access(dir, move || links.into_values().map(File::open).collect())
}
