//! Plans which pages of guests to merge, and the layout of new pools. Works on hashes alone.
//!
//! ```text
//! hashes of guest a   1 2 3 4 5 0 0 9     0: zeros, not to be merged: none
//! hashes of guest b   7 2 3 4 5 8 0 0
//! pool                2 3 4 5
//! runs                a: 1..5 ─▶ pool 0..4, 5..7 ─▶ zeros;  b: 1..5 ─▶ pool 0..4, 6..8 ─▶ zeros
//! ```
//!
//! Each run takes a mapping, and a process has few. So short runs are left out, except runs of
//! zeros, which take no mapping. A pool has contents in the order of the first guest with them. Up
//! to [`COPIES`] consecutive equal pages lie in the pool as often as in the guest: otherwise each
//! would be a run.
//!
//! Tables take some eight bytes for each page with a hash, and more only for repeated contents.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU64;
use std::ops::Range;

use cofolio_shim::protocol::RUN_PAGES_MAX;

use super::pool::IMAGES;

/// Most consecutive copies of one content in a pool.
const COPIES: u64 = 64;
/// Tells copies apart.
const COPY: u64 = 0x9e37_79b9_7f4a_7c15;
/// Pages of a huge page.
const BLOCK_PAGES: usize = 512;

/// Hash of a page's content; none if the page must not be merged now. Takes eight bytes for each
/// page of each guest.
pub(super) type Hash = Option<NonZeroU64>;

/// Identifies a content and its position among consecutive equal pages, both hashed into one
/// number. If two differ and the numbers are equal, the shim's comparison fails.
pub(super) type Content = NonZeroU64;

/// The contents of consecutive pages.
pub(super) fn contents(hashes: &[Hash]) -> impl Iterator<Item = Option<Content>> {
    let (mut last, mut copy) = (None, 0_u64);
    hashes.iter().map(move |hash| {
        copy = if hash.is_some() && *hash == last { (copy + 1) % COPIES } else { 0 };
        last = *hash;
        let content = hash.map(|hash| hash.get().wrapping_add(copy.wrapping_mul(COPY)));
        content.map(|content| NonZeroU64::new(content).unwrap_or(NonZeroU64::MIN))
    })
}

/// Hasher for keys that are hashes already.
#[derive(Debug, Default)]
pub(super) struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

type Contents = HashSet<Content, BuildHasherDefault<Identity>>;
/// Slots of contents.
pub(super) type Slots = HashMap<Content, Slot, BuildHasherDefault<Identity>>;

/// A page of a pool or an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) pool: u32,
    pub(super) page: u32,
}

/// Source of a run's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Consecutive pages of a pool or an image, beginning with this one.
    Slot(Slot),
    /// The kernel's page of zeros.
    Zeros,
}

/// Pages of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedRun {
    pub(super) pages: Range<usize>,
    pub(super) source: Source,
}

/// A guest to plan for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Input<'g> {
    pub(super) hashes: &'g [Hash],
    /// Most runs of pools and images that it may get.
    pub(super) runs_max: usize,
}

/// A plan.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Sources of new pools in the order of their slots: number of the guest, and its page.
    pub(super) new: Vec<(usize, usize)>,
    /// By guest: runs of zeros, then the others by length, the longest first.
    pub(super) runs: Vec<Vec<PlannedRun>>,
}

/// Bounds of a plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Shortest run in a pool.
    pub(super) run_min: usize,
    /// Merge blocks of 2 MiB as a whole, or not at all.
    pub(super) blocks: bool,
    /// The hash of a page of zeros.
    pub(super) zeros: NonZeroU64,
    /// Pages of a new pool.
    pub(super) pool_pages: usize,
}

/// Plans for the guests of one trust domain with these pools and images. New contents go to pools
/// whose numbers begin with `next`.
pub(super) fn plan(
    guests: &[Input<'_>],
    pools: &Slots,
    images: &Slots,
    next: u32,
    bounds: &Bounds,
) -> Plan {
    let stretches = guests.iter().map(|guest| stretches(guest.hashes, bounds.zeros));
    let stretches: Vec<Vec<Stretch>> = stretches.collect();
    let layout = Layout { guests, stretches: &stretches, pools, images, next, bounds };
    let all = stretches.iter().flatten().flat_map(|stretch| &stretch.contents);
    let twice = twice(all.filter(|content| **content != bounds.zeros));
    // The second plan leaves out contents that fewer than two long enough runs of the first one
    // have.
    let first = layout.lay_out(&twice);
    let used = first.runs.iter().zip(&stretches).flat_map(|(runs, stretches)| {
        let of_pools = runs.iter().filter(|run| run.source != Source::Zeros);
        of_pools.flat_map(|run| contents_of(stretches, &run.pages))
    });
    layout.lay_out(&self::twice(used))
}

/// Consecutive pages with a hash.
#[derive(Debug)]
struct Stretch {
    first: usize,
    contents: Vec<Content>,
}

/// The stretches of a guest's pages. All pages of zeros have the same content.
fn stretches(hashes: &[Hash], zeros: NonZeroU64) -> Vec<Stretch> {
    let mut all = Vec::new();
    let mut page = 0;
    while let Some(skip) = hashes[page..].iter().position(Option::is_some) {
        let first = page + skip;
        let count = hashes[first..].iter().take_while(|hash| hash.is_some()).count();
        page = first + count;
        let hashes = &hashes[first..page];
        let content = |(hash, content): (&Hash, Option<Content>)| {
            if *hash == Some(zeros) { *hash } else { content }
        };
        let contents = hashes.iter().zip(contents(hashes)).filter_map(content).collect();
        all.push(Stretch { first, contents });
    }
    all
}

/// The contents of pages that lie in one stretch.
fn contents_of<'s>(stretches: &'s [Stretch], pages: &Range<usize>) -> &'s [Content] {
    let behind = stretches.partition_point(|stretch| stretch.first <= pages.start);
    let stretch = behind.checked_sub(1).and_then(|number| stretches.get(number));
    stretch.map_or(&[], |it| &it.contents[pages.start - it.first..pages.end - it.first])
}

/// Contents that are repeated.
fn twice<'c>(contents: impl Iterator<Item = &'c Content>) -> Contents {
    let mut all: Vec<Content> = contents.copied().collect();
    all.sort_unstable();
    all.chunk_by(|a, b| a == b).filter(|equal| equal.len() > 1).map(|equal| equal[0]).collect()
}

/// Input of a plan.
struct Layout<'l> {
    guests: &'l [Input<'l>],
    stretches: &'l [Vec<Stretch>],
    pools: &'l Slots,
    images: &'l Slots,
    next: u32,
    bounds: &'l Bounds,
}

/// New contents and their slots.
struct New<'n> {
    /// Contents that may be new.
    twice: &'n Contents,
    slots: Slots,
    pages: Vec<(usize, usize)>,
}

impl Layout<'_> {
    /// Runs of contents that are in `twice`, in pools or in images. Contents without a slot get
    /// one.
    ///
    /// Repeated contents go to a pool even if an image has them: a pool has the guest's order.
    /// Pages of an image lie in other orders in a guest, since kernels allocate a file's pages from
    /// the top down.
    fn lay_out(&self, twice: &Contents) -> Plan {
        let is_wanted = |content: &Content| {
            let is_known = self.pools.contains_key(content) || self.images.contains_key(content);
            is_known || twice.contains(content)
        };
        let mut new = New { twice, slots: Slots::default(), pages: Vec::new() };
        let mut all = Vec::new();
        for (guest, input) in self.guests.iter().enumerate() {
            let mut runs = Vec::new();
            for stretch in &self.stretches[guest] {
                let end = stretch.first + stretch.contents.len();
                if !self.bounds.blocks {
                    self.add(guest, stretch, stretch.first..end, &is_wanted, &mut new, &mut runs);
                    continue;
                }
                let first = stretch.first.next_multiple_of(BLOCK_PAGES);
                for block in (first..end).step_by(BLOCK_PAGES) {
                    let (pages, before) = (block..(block + BLOCK_PAGES).min(end), runs.len());
                    self.add(guest, stretch, pages, &is_wanted, &mut new, &mut runs);
                    let covered = runs[before..].iter().map(|run| run.pages.len()).sum::<usize>();
                    if covered < BLOCK_PAGES {
                        runs.truncate(before);
                    }
                }
            }
            // Zeros come first: they take no mapping.
            runs.sort_by_key(|run| (run.source != Source::Zeros, Reverse(run.pages.len())));
            let zeros = runs.partition_point(|run| run.source == Source::Zeros);
            runs.truncate(zeros.saturating_add(input.runs_max));
            all.push(runs);
        }
        Plan { new: new.pages, runs: all }
    }

    /// Adds the runs of some pages of a stretch.
    fn add(
        &self,
        guest: usize,
        stretch: &Stretch,
        pages: Range<usize>,
        is_wanted: &dyn Fn(&Content) -> bool,
        new: &mut New<'_>,
        runs: &mut Vec<PlannedRun>,
    ) {
        let zeros = self.bounds.zeros;
        let mut page = pages.start;
        while page < pages.end {
            let rest = &stretch.contents[page - stretch.first..pages.end - stretch.first];
            if rest[0] == zeros {
                let most = rest.len().min(RUN_PAGES_MAX);
                let count = rest[..most].iter().take_while(|it| **it == zeros).count();
                runs.push(PlannedRun { pages: page..page + count, source: Source::Zeros });
                page += count;
                continue;
            }
            let count = rest.iter().take_while(|it| **it != zeros && is_wanted(it)).count();
            // Contents of short parts get no slot.
            if count >= self.bounds.run_min {
                let slots = rest[..count].iter().zip(page..);
                let slots = slots.map(|(content, page)| self.slot(content, (guest, page), new));
                let slots: Vec<_> = slots.collect();
                self.cut(page, &slots, runs);
            }
            page += count.max(1);
        }
    }

    /// The slot of a content, a new one if necessary. `from` is a guest's page with this content.
    fn slot(&self, content: &Content, from: (usize, usize), new: &mut New<'_>) -> Slot {
        let of_image = || self.images.get(content).filter(|_| !new.twice.contains(content));
        if let Some(known) = self.pools.get(content).or_else(of_image) {
            return *known;
        }
        *new.slots.entry(*content).or_insert_with(|| {
            let (number, size) = (new.pages.len(), self.bounds.pool_pages);
            new.pages.push(from);
            let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            Slot {
                pool: self.next.saturating_add(small(number / size)),
                page: small(number % size),
            }
        })
    }

    /// Divides pages into runs with consecutive slots. Drops short runs, but keeps all pages of
    /// images: enough of them are consecutive in the guest, though not in the file.
    fn cut(&self, first: usize, slots: &[Slot], runs: &mut Vec<PlannedRun>) {
        let goes_on =
            |a: &Slot, b: &Slot| a.pool == b.pool && a.page.checked_add(1) == Some(b.page);
        let mut page = first;
        let parts = slots.chunk_by(goes_on).flat_map(|part| part.chunks(RUN_PAGES_MAX));
        for part in parts {
            let pages = page..page + part.len();
            if part.len() >= self.bounds.run_min || part[0].pool >= IMAGES {
                runs.push(PlannedRun { pages: pages.clone(), source: Source::Slot(part[0]) });
            }
            page = pages.end;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    const ZEROS: NonZeroU64 = NonZeroU64::new(1 << 60).unwrap();
    const BOUNDS: Bounds = Bounds { run_min: 4, blocks: false, zeros: ZEROS, pool_pages: 1024 };

    fn hashes(numbers: impl IntoIterator<Item = i64>) -> Vec<Hash> {
        let hash = |number: i64| match number {
            0 => Some(ZEROS),
            number => u64::try_from(number).ok().and_then(NonZeroU64::new),
        };
        numbers.into_iter().map(hash).collect()
    }

    fn run(pages: Range<usize>, source: Source) -> PlannedRun {
        PlannedRun { pages, source }
    }

    fn slot(pool: u32, page: u32) -> Source {
        Source::Slot(Slot { pool, page })
    }

    fn plan_for(guests: &[&[Hash]], bounds: &Bounds) -> Plan {
        let guests: Vec<_> =
            guests.iter().map(|hashes| Input { hashes, runs_max: usize::MAX }).collect();
        plan(&guests, &Slots::default(), &Slots::default(), 0, bounds)
    }

    #[test]
    fn guests_with_the_same_pages_share_runs() {
        let a = hashes([1, 2, 3, 4, 5, 0, 0, 9]);
        let b = hashes([7, 2, 3, 4, 5, 8, 0, 0, -1]);
        let plan = plan_for(&[&a, &b], &BOUNDS);
        assert_eq!(plan.new, [(0, 1), (0, 2), (0, 3), (0, 4)]);
        assert_eq!(plan.runs[0], [run(5..7, Source::Zeros), run(1..5, slot(0, 0))]);
        assert_eq!(plan.runs[1], [run(6..8, Source::Zeros), run(1..5, slot(0, 0))]);
    }

    #[test]
    fn short_runs_are_not_worth_a_mapping() {
        let a = hashes([1, 2, 3, 10, 11, 12]);
        let b = hashes([1, 2, 3, 20, 21, 22]);
        assert_eq!(plan_for(&[&a, &b], &BOUNDS).new, []);
        // In one guest it lies alone: then the other one's has no second user.
        let a = hashes([1, 2, 3, 4, 5]);
        let b = hashes([1, 2, 9, 3, 4, 9, 5]);
        let plan = plan_for(&[&a, &b], &BOUNDS);
        assert_eq!((plan.new, plan.runs), (Vec::new(), vec![vec![], vec![]]));
    }

    #[test]
    fn equal_pages_in_a_row_are_one_run() {
        let a = hashes(std::iter::repeat_n(5, 100));
        let b = hashes([&[1, 2][..], &[5; 70]].concat());
        let plan = plan_for(&[&a, &b], &BOUNDS);
        assert_eq!(plan.new.len(), 64);
        assert_eq!(plan.runs[0], [run(0..64, slot(0, 0)), run(64..100, slot(0, 0))]);
        assert_eq!(plan.runs[1], [run(2..66, slot(0, 0)), run(66..72, slot(0, 0))]);
    }

    #[test]
    fn known_contents_are_used_and_no_run_crosses_a_pool() {
        let a = hashes(1000..1010);
        let slot_of = |number: u32| if number < 5 { (3, 1019 + number) } else { (4, number - 5) };
        let slots = (0..10).map(slot_of).map(|(pool, page)| Slot { pool, page });
        let pools: Slots = a.iter().copied().flatten().zip(slots).collect();
        let guest = Input { hashes: &a, runs_max: 9 };
        let plan = plan(&[guest], &pools, &Slots::default(), 5, &BOUNDS);
        assert_eq!(plan.new, []);
        assert_eq!(plan.runs[0], [run(0..5, slot(3, 1019)), run(5..10, slot(4, 0))]);
        // Nor is it longer than what waits at once.
        let a = hashes(1..=1200);
        let plan = plan_for(&[&a, &a], &BOUNDS);
        let lengths: Vec<_> = plan.runs[1].iter().map(|run| run.pages.len()).collect();
        assert_eq!(lengths, [256, 256, 256, 256, 176]);
    }

    #[test]
    fn a_guest_gets_no_more_mappings_than_it_may_have() {
        let a = hashes([1, 2, 3, 4, 0, 11, 12, 13, 14, 15]);
        let guests = [Input { hashes: &a, runs_max: 1 }, Input { hashes: &a, runs_max: 9 }];
        let plan = plan(&guests, &Slots::default(), &Slots::default(), 0, &BOUNDS);
        // Then no second guest uses the contents that the first one leaves out.
        assert_eq!(plan.new.len(), 5);
        assert_eq!(plan.runs[0], [run(4..5, Source::Zeros), run(5..10, slot(0, 0))]);
        assert_eq!(plan.runs[1], [run(4..5, Source::Zeros), run(5..10, slot(0, 0))]);
    }

    #[test]
    fn pages_of_an_image_are_merged_in_whatever_order_they_lie() {
        let a = hashes((1..=8).rev().chain([77, 8, 77]).chain(21..30));
        let b = hashes(21..30);
        let image = (1..30).map(|page| Slot { pool: IMAGES, page });
        let image: Slots = hashes(1..30).into_iter().flatten().zip(image).collect();
        let guests = [&a, &b].map(|hashes| Input { hashes, runs_max: usize::MAX });
        let plan = plan(&guests, &Slots::default(), &image, 0, &BOUNDS);
        // Contents of both guests become one run of a pool.
        assert_eq!(plan.new.len(), 9);
        assert_eq!(plan.runs[1], [run(0..9, slot(0, 0))]);
        assert_eq!(plan.runs[0][0], run(11..20, slot(0, 0)));
        let single =
            (0..8).map(|page| run(page as usize..page as usize + 1, slot(IMAGES, 8 - page)));
        assert_eq!(plan.runs[0][1..], single.collect::<Vec<_>>());
    }

    #[test]
    fn of_blocks_only_whole_ones_are_merged() {
        let bounds = Bounds { blocks: true, ..BOUNDS };
        let a = hashes((1..=512).chain(600..1000).chain([0; 112]).chain(2000..2300));
        let b = hashes((1..=512).chain(600..1000).chain([0; 112]).chain([77]).chain(2001..2600));
        let plan = plan_for(&[&a, &b], &bounds);
        assert_eq!(plan.new.len(), 912);
        for runs in plan.runs {
            assert_eq!(runs.iter().map(|run| run.pages.len()).sum::<usize>(), 1024);
            assert!(runs.iter().all(|run| run.pages.end <= 1024));
        }
    }
}
