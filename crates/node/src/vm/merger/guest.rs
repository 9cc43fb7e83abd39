//! One guest: what is merged of it, and what of that is not worth it any more.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cofolio_shim::protocol::{Hello, Outcome, PAGE, RUN_PAGES_MAX, Run, ZEROS, kind};
use cofolio_sys::pagemap::{Query, Region, category, scan};
use serde::{Deserialize, Serialize};

use super::Target;
use super::image::Images;
use super::plan::{PlannedRun, Slot, Source};
use super::pool::{POOL_PAGES, Pools};
use super::refusal::opened;
use super::scan::{Pages, without};
use super::shim::Shim;
use crate::vm::socket;
use crate::{kernel_text, processes};

/// Mappings are left for the VMM itself: a process at its limit can map nothing.
const MAPPINGS_SHARE: f64 = 0.7;
/// A guest's merging takes so long in a pass at most, but for the last request: its shim may be slow on
/// purpose, and others wait for the end of the pass. What is left is planned again later.
const MERGE_MAX: Duration = Duration::from_secs(10);
/// Runs of one request.
const RUNS: usize = 256;
/// Runs that are converted at a time, at most: their pages are in memory twice until they are merged again.
const CONVERTED_MAX: usize = 256;
/// A pool is wasted if not more than one in so many of its pages is used.
const WASTED: usize = 2;

/// A guest whose pages are merged.
#[derive(Debug)]
pub(super) struct Guest {
    /// Process of the VMM.
    pub(super) pid: u32,
    pub(super) pages: Pages,
    pub(super) merging: Merging,
    /// Of the process, in `/proc`.
    dir: PathBuf,
    shim: Shim,
    /// Addresses of the guest's memory.
    memory: Range<u64>,
    /// Whether pages of it may be pinned.
    may_pin: bool,
}

/// What was merged of a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Merged pages that were written to, and were made the guest's own again.
    #[serde(default)]
    pub converted_pages: u64,
    /// Runs that the kernel refused.
    pub refused_runs: u64,
}

/// Which pages of pools guests read there, by number of the pool's inode.
pub(super) type Used = HashMap<u64, UsedPages>;

/// Of one pool.
#[derive(Debug, Clone, Copy)]
pub(super) struct UsedPages {
    /// A bit for each page.
    bits: [u64; POOL_PAGES / 64],
    /// Pages that it has.
    pages: u32,
}

impl UsedPages {
    /// How many.
    pub(super) fn count(&self) -> u32 {
        self.bits.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether its pages are better the guests' own, and merged anew: hardly any is used, or it is a small
    /// one of `many`.
    pub(super) fn is_wasted(&self, many: bool) -> bool {
        let size = if many { POOL_PAGES } else { self.pages as usize };
        self.count() as usize * WASTED <= size
    }
}

/// Pages of a guest that are mapped of a pool.
#[derive(Debug)]
struct Mapped {
    pages: Range<usize>,
    inode: u64,
    /// First page in the pool.
    first: usize,
    /// Of the guest's, those that it has written to.
    broken: Vec<Range<usize>>,
}

impl Guest {
    /// Connects to the shim, unless the process must not be merged, and takes over what an earlier merger
    /// has left there.
    pub(super) fn begin(
        proc: &Path,
        target: &Target,
        pools: &mut Pools,
        images: &mut Images,
    ) -> io::Result<Self> {
        let dir = proc.join(target.pid.to_string());
        let opened = opened(proc, target.pid)?;
        if let Some(refusal) = opened.refusal {
            return Err(io::Error::new(io::ErrorKind::Unsupported, refusal));
        }
        let socket = socket::connect(&target.dir, "merge")?;
        // Its pages are read, and it gets pools with what it has in common with others: so both must be
        // of one process. The VMM itself has written which it is, and could name one of another domain.
        let peer = rustix::net::sockopt::socket_peercred(&socket)?.pid.as_raw_nonzero().get();
        if u32::try_from(peer) != Ok(target.pid) {
            let what = format!("process {peer} answers for its VMM, process {}", target.pid);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        let (mut shim, Hello { start, len, .. }) = Shim::new(socket)?;
        let end = start.checked_add(len).filter(|_| start.is_multiple_of(PAGE as u64));
        let Some(end) = end.filter(|_| len == target.memory_bytes) else {
            let what = format!("its shim names {len} bytes at {start:#x} as its memory");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        };
        let memory = start..end;
        let pages = Pages::new(proc, target.pid, start, len)?;
        let most = usize::try_from(len).unwrap_or(0) / PAGE / POOL_PAGES * WASTED + 1024;
        for (number, file) in shim.kept(most)? {
            if !pools.adopt(number, file, target.pid)? {
                shim.forget(number)?;
            }
        }
        for file in image_files(&dir, &memory, &target.image)? {
            images.add(file, target.pid)?;
        }
        let (pid, merging) = (target.pid, Merging::default());
        Ok(Self { pid, pages, merging, dir, shim, memory, may_pin: opened.may_pin })
    }

    /// How many runs of pools it may have more. A run takes a mapping, and one for what is behind it.
    pub(super) fn runs_left(&self) -> usize {
        let limit = kernel_text::read("/proc/sys/vm/max_map_count".as_ref()).ok();
        let limit = limit.and_then(|text| text.trim().parse::<usize>().ok()).unwrap_or(65_530);
        let maps = kernel_text::read(&self.dir.join("maps"));
        let used = maps.map_or(limit, |maps| maps.lines().count());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of it"
        )]
        let most = (limit as f64 * MAPPINGS_SHARE) as usize;
        most.saturating_sub(used) / 2
    }

    /// Gives the shim what runs are of.
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

    /// Merges runs of what the shim was given.
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
        let mut merged = 0;
        for number in 0..run.pages as usize {
            match outcome.is_merged(number) {
                true => self.pages.set_merged(first + number),
                false => self.pages.set_volatile(first + number),
            }
            merged += u64::from(outcome.is_merged(number));
        }
        let merging = &mut self.merging;
        match run.pool {
            ZEROS => merging.zero_pages += merged,
            number if number >= super::pool::IMAGES => merging.image_pages += merged,
            _ => merging.pool_pages += merged,
        }
        merging.changed_pages += u64::from(outcome.changed);
        merging.busy_pages += u64::from(outcome.busy);
        merging.refused_runs += u64::from(outcome.errno != 0);
    }

    /// What it maps of pools; notes in `used` which pages of these it reads there.
    pub(super) fn survey(&self, pools: &Pools, used: &mut Used) -> io::Result<Survey> {
        let inodes: HashMap<u64, u32> =
            pools.pools.values().map(|pool| (pool.inode, pool.pages)).collect();
        let pagemap = File::open(self.dir.join("pagemap"))?;
        let page = |address: u64| usize::try_from((address - self.memory.start) / PAGE as u64);
        let mut mapped = Vec::new();
        processes::mappings(&self.dir, |mapping| {
            let addresses = mapping.addresses(u64::MAX).unwrap_or_default();
            let is_ours = self.memory.start <= addresses.start && addresses.end <= self.memory.end;
            let Some(size) = inodes.get(&mapping.inode).filter(|_| is_ours) else { return };
            let (Ok(start), Ok(end)) = (page(addresses.start), page(addresses.end)) else { return };
            let first = usize::try_from(mapping.offset / PAGE as u64).unwrap_or(usize::MAX);
            if first.saturating_add(end - start) <= *size as usize {
                let inode = mapping.inode;
                mapped.push(Mapped { pages: start..end, inode, first, broken: Vec::new() });
            }
        })?;
        // A page that was written to is the process's own.
        let query = Query { mask: category::PRESENT, inverted: category::FILE, ..Query::default() };
        for mapped in &mut mapped {
            let address = |page: usize| self.memory.start + (page * PAGE) as u64;
            let addresses = address(mapped.pages.start)..address(mapped.pages.end);
            scan(&pagemap, addresses, query, |Region { start, end, .. }| {
                let (start, end) = (page(start).unwrap_or(0), page(end).unwrap_or(0));
                mapped.broken.push(start..end);
            })?;
            let pages = inodes.get(&mapped.inode).copied().unwrap_or(0);
            let used = used.entry(mapped.inode);
            let used = used.or_insert(UsedPages { bits: [0; POOL_PAGES / 64], pages });
            for pages in without(std::slice::from_ref(&mapped.pages), &mapped.broken) {
                for slot in pages.map(|page| mapped.first + page - mapped.pages.start) {
                    used.bits[slot / 64] |= 1 << (slot % 64);
                }
            }
        }
        Ok(Survey(mapped))
    }

    /// Whether pages can be made the guest's own again.
    pub(super) fn can_convert(&self) -> bool {
        !self.may_pin
    }

    /// Makes pages the guest's own again: those that it has written to, which could not be merged a second
    /// time otherwise, and those of pools that are wasted. Only where nothing pins pages.
    pub(super) fn convert(
        &mut self,
        Survey(mapped): &Survey,
        is_wasted: &dyn Fn(u64) -> bool,
        run_min: usize,
    ) -> io::Result<()> {
        if !self.can_convert() {
            return Ok(());
        }
        let mut runs = Vec::new();
        for it in mapped {
            let whole = [it.pages.clone()];
            let wasted = is_wasted(it.inode);
            let broken = it.broken.iter().filter(|pages| pages.len() >= run_min);
            // Of a run that is left, both halves would be mappings.
            let pages: Vec<_> = if wasted { whole.iter().collect() } else { broken.collect() };
            for pages in pages {
                for start in pages.clone().step_by(RUN_PAGES_MAX) {
                    let part = start..pages.end.min(start + RUN_PAGES_MAX);
                    runs.push((run(&part, 0, 0), !wasted));
                }
            }
        }
        runs.truncate(CONVERTED_MAX);
        let asked: Vec<Run> = runs.iter().map(|(run, _)| *run).collect();
        let outcomes = self.shim.ask(kind::CONVERT, &asked)?;
        for ((run, was_broken), outcome) in runs.iter().zip(outcomes) {
            let first = usize::try_from(run.page).unwrap_or(0);
            for page in (0..run.pages as usize).filter(|page| outcome.is_merged(*page)) {
                self.merging.converted_pages += 1;
                if *was_broken {
                    self.pages.set_volatile(first + page);
                }
            }
        }
        Ok(())
    }

    /// Gives up pools.
    pub(super) fn forget(&mut self, pools: &BTreeMap<u32, super::pool::Pool>) -> io::Result<()> {
        pools.keys().try_for_each(|number| self.shim.forget(*number))
    }
}

/// What a guest maps of pools.
#[derive(Debug)]
pub(super) struct Survey(Vec<Mapped>);

fn run(pages: &Range<usize>, pool: u32, pool_page: u32) -> Run {
    let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
    Run { page: pages.start as u64, pool, pool_page, pages: count, reserved: 0 }
}

/// The files of the image that a process has mapped, besides its guest's memory. `names` are the digests
/// of these files.
fn image_files(dir: &Path, memory: &Range<u64>, names: &[String]) -> io::Result<Vec<File>> {
    let mut links = BTreeMap::new();
    processes::mappings(dir, |mapping| {
        let file = mapping.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let file = String::from_utf8_lossy(file);
        let is_image = names.iter().any(|name| file.contains(&**name));
        let is_memory = mapping.addresses(u64::MAX).is_some_and(|it| memory.contains(&it.start));
        if is_image && !is_memory {
            links.extend(mapping.link().map(|link| (mapping.inode, link)));
        }
    })?;
    links.into_values().map(|link| File::open(dir.join(link))).collect()
}
