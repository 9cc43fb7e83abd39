//! Which pages of guests to merge, and where their content goes in pools: decides from hashes alone.
//!
//! ```text
//! hashes of guest a   1 2 3 4 5 0 0 9     0: zeros, not to be merged: none
//! hashes of guest b   7 2 3 4 5 8 0 0
//! pool                2 3 4 5
//! runs                a: 1..5 ─▶ pool 0..4, 5..7 ─▶ zeros;  b: 1..5 ─▶ pool 0..4, 6..8 ─▶ zeros
//! ```
//!
//! A run is a mapping, and mappings are few: so only runs of some length count, but for zeros, which
//! take none. Content lies in a pool in the order of the first guest that has it. Equal pages one
//! behind the other lie there so as well, up to [`COPIES`]: otherwise each would be a run.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::Range;

use cofolio_shim::protocol::RUN_PAGES_MAX;

/// Of the same content one behind the other a pool has up to so many copies.
pub(super) const COPIES: u8 = 64;

/// The hash of a page's content: none if it must not be merged now. There is one for each page of each
/// guest, in eight bytes.
pub(super) type Hash = Option<NonZeroU64>;

/// A content, and which of several equal ones in a row it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Content {
    pub(super) hash: NonZeroU64,
    pub(super) copy: u8,
}

/// Where a run's content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// In a pool, from this slot on.
    Slot(u64),
    /// Nowhere.
    Zeros,
}

/// Pages of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedRun {
    pub(super) pages: Range<usize>,
    pub(super) source: Source,
}

/// What to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// New contents of pools, in the order of their slots: a guest, and a page of it.
    pub(super) new: Vec<(usize, usize, Content)>,
    /// By guest, the longest first.
    pub(super) runs: Vec<Vec<PlannedRun>>,
}

/// Bounds of a plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Least pages of a run in a pool.
    pub(super) run_min: usize,
    /// The hash of a page of zeros.
    pub(super) zeros: NonZeroU64,
    /// Pages of a pool; no run goes beyond one.
    pub(super) pool_pages: u64,
}

/// Plans for the guests of one trust domain. `known` are the slots of contents that are in pools; new
/// ones get slots from `next` on.
pub(super) fn plan(
    guests: &[&[Hash]],
    known: &HashMap<Content, u64>,
    next: u64,
    bounds: &Bounds,
) -> Plan {
    let duplicates = duplicates(guests, known, bounds);
    // What is in runs that are long enough in the first plan has users; the rest is left out.
    let first = lay_out(guests, |content| duplicates.contains_key(content), known, next, bounds);
    let mut users: HashMap<Content, u32> = HashMap::new();
    for (guest, runs) in guests.iter().zip(&first.runs) {
        let contents = contents(guest);
        for run in runs.iter().filter(|run| run.source != Source::Zeros) {
            for content in contents[run.pages.clone()].iter().flatten() {
                *users.entry(*content).or_default() += 1;
            }
        }
    }
    let is_worth = |content: &Content| {
        known.contains_key(content) || users.get(content).is_some_and(|count| *count > 1)
    };
    let mut plan = lay_out(guests, is_worth, known, next, bounds);
    for runs in &mut plan.runs {
        // Zeros first: they take no mapping.
        runs.sort_by_key(|run| (run.source != Source::Zeros, std::cmp::Reverse(run.pages.len())));
    }
    plan
}

/// Contents that several pages have, or a page and a pool, and how many pages.
fn duplicates(
    guests: &[&[Hash]],
    known: &HashMap<Content, u64>,
    bounds: &Bounds,
) -> HashMap<Content, u32> {
    let mut counts: HashMap<Content, u32> = HashMap::new();
    for content in guests.iter().flat_map(|guest| contents(guest)).flatten() {
        if content.hash != bounds.zeros {
            *counts.entry(content).or_default() += 1;
        }
    }
    counts.retain(|content, count| *count > 1 || known.contains_key(content));
    counts
}

/// The contents of a guest's pages.
fn contents(hashes: &[Hash]) -> Vec<Option<Content>> {
    let (mut last, mut copy) = (None, 0);
    let content = |hash: &Hash| {
        copy = if hash.is_some() && *hash == last { (copy + 1) % COPIES } else { 0 };
        last = *hash;
        hash.map(|hash| Content { hash, copy })
    };
    hashes.iter().map(content).collect()
}

/// Runs of the contents that `is_wanted`, with new slots for those that have none.
fn lay_out(
    guests: &[&[Hash]],
    is_wanted: impl Fn(&Content) -> bool,
    known: &HashMap<Content, u64>,
    next: u64,
    bounds: &Bounds,
) -> Plan {
    let mut plan = Plan::default();
    let mut slots: HashMap<Content, u64> = HashMap::new();
    for (number, guest) in guests.iter().enumerate() {
        let contents = contents(guest);
        let mut runs = Vec::new();
        let mut page = 0;
        while page < contents.len() {
            if contents[page].is_some_and(|content| content.hash == bounds.zeros) {
                let is_zero = |content: &Option<Content>| {
                    content.is_some_and(|content| content.hash == bounds.zeros)
                };
                let end = contents[page..].iter().take(RUN_PAGES_MAX);
                let end = page + end.take_while(|it| is_zero(it)).count();
                runs.push(PlannedRun { pages: page..end, source: Source::Zeros });
                page = end;
                continue;
            }
            let wanted = contents[page..].iter().take_while(|content| {
                content.is_some_and(|it| it.hash != bounds.zeros && is_wanted(&it))
            });
            let end = page + wanted.count();
            if end - page < bounds.run_min {
                page = end.max(page + 1);
                continue;
            }
            // Only what is in a stretch that is long enough gets a slot.
            for (page, content) in (page..end).zip(contents[page..end].iter().flatten()) {
                if !known.contains_key(content) && !slots.contains_key(content) {
                    slots.insert(*content, next + plan.new.len() as u64);
                    plan.new.push((number, page, *content));
                }
            }
            let slot = |page: usize| {
                let content = contents[page]?;
                known.get(&content).or_else(|| slots.get(&content)).copied()
            };
            cut(page..end, slot, bounds, &mut runs);
            page = end;
        }
        plan.runs.push(runs);
    }
    plan
}

/// Cuts a stretch where its slots do not go on, or a pool ends; keeps what is long enough.
fn cut(
    stretch: Range<usize>,
    slot: impl Fn(usize) -> Option<u64>,
    bounds: &Bounds,
    runs: &mut Vec<PlannedRun>,
) {
    let mut page = stretch.start;
    while page < stretch.end {
        let Some(first) = slot(page) else { return };
        let room = bounds.pool_pages - first % bounds.pool_pages;
        let most = usize::try_from(room).unwrap_or(usize::MAX).min(RUN_PAGES_MAX);
        let goes_on = (page..stretch.end).zip(first..).take(most);
        let count = goes_on.take_while(|(page, expected)| slot(*page) == Some(*expected)).count();
        let end = page + count.max(1);
        if end - page >= bounds.run_min {
            runs.push(PlannedRun { pages: page..end, source: Source::Slot(first) });
        }
        page = end;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    const ZEROS: NonZeroU64 = NonZeroU64::new(1 << 60).unwrap();
    const BOUNDS: Bounds = Bounds { run_min: 4, zeros: ZEROS, pool_pages: 1024 };

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

    #[test]
    fn guests_with_the_same_pages_share_runs() {
        let a = hashes([1, 2, 3, 4, 5, 0, 0, 9]);
        let b = hashes([7, 2, 3, 4, 5, 8, 0, 0, -1]);
        let plan = plan(&[&a, &b], &HashMap::new(), 0, &BOUNDS);
        let new: Vec<_> = plan.new.iter().map(|(guest, page, _)| (*guest, *page)).collect();
        assert_eq!(new, [(0, 1), (0, 2), (0, 3), (0, 4)]);
        assert_eq!(plan.runs[0], [run(5..7, Source::Zeros), run(1..5, Source::Slot(0))]);
        assert_eq!(plan.runs[1], [run(6..8, Source::Zeros), run(1..5, Source::Slot(0))]);
    }

    #[test]
    fn short_runs_are_not_worth_a_mapping() {
        let a = hashes([1, 2, 3, 10, 11, 12]);
        let b = hashes([1, 2, 3, 20, 21, 22]);
        assert_eq!(plan(&[&a, &b], &HashMap::new(), 0, &BOUNDS).new, []);
        // In one guest it lies alone: then the other one's has no second user.
        let a = hashes([1, 2, 3, 4, 5]);
        let b = hashes([1, 2, 9, 3, 4, 9, 5]);
        let plan = plan(&[&a, &b], &HashMap::new(), 0, &BOUNDS);
        assert_eq!((plan.new, plan.runs), (Vec::new(), vec![vec![], vec![]]));
    }

    #[test]
    fn equal_pages_in_a_row_are_one_run() {
        let a = hashes(std::iter::repeat_n(5, 100));
        let b = hashes([&[1, 2][..], &[5; 70]].concat());
        let plan = plan(&[&a, &b], &HashMap::new(), 0, &BOUNDS);
        assert_eq!(plan.new.len(), 64);
        assert_eq!(plan.runs[0], [run(0..64, Source::Slot(0)), run(64..100, Source::Slot(0))]);
        assert_eq!(plan.runs[1], [run(2..66, Source::Slot(0)), run(66..72, Source::Slot(0))]);
    }

    #[test]
    fn known_contents_are_used_and_no_run_crosses_a_pool() {
        let a = hashes((1000..1010).collect::<Vec<_>>());
        let known = (0..10)
            .map(|n| (Content { hash: NonZeroU64::new(1000 + n).unwrap(), copy: 0 }, 1019 + n))
            .collect();
        let plan = plan(&[&a], &known, 2048, &BOUNDS);
        assert_eq!(plan.new, []);
        assert_eq!(plan.runs[0], [run(0..5, Source::Slot(1019)), run(5..10, Source::Slot(1024))]);
        // Nor is it longer than what waits at once.
        let a = hashes((1..=600).collect::<Vec<_>>());
        let plan = super::plan(&[&a, &a], &HashMap::new(), 0, &BOUNDS);
        let lengths: Vec<_> = plan.runs[1].iter().map(|run| run.pages.len()).collect();
        assert_eq!(lengths, [256, 256, 88]);
    }
}
