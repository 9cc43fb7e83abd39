//! The process of a guest of `merge`: memory with a known content, and a thread that writes to it.

use std::cmp::Reverse;
use std::io::{self, BufRead as _, Write as _};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cofolio_sys::memory::GuestMemory;
use serde::{Deserialize, Serialize};

/// Words of a page.
const WORDS: usize = 512;
/// Lengths of runs of pages: those that all guests have, and zeros.
const COMMON_RUN: usize = 64;
const ZERO_RUN: usize = 8;
/// Number of runs at the end of each guest's memory that are its own at first. At the command
/// [`FILL`] a guest fills the next run with contents that all guests have, and prints its address.
pub(super) const FRESH_RUNS: usize = 8;
pub(super) const FRESH_RUN: usize = 64;
pub(super) const FILL: &str = "fill";
/// Commands that begin a phase. A guest repeats the command when it has. Writes count for the phase
/// in which they begin; those before the first phase and in `PAUSE` do not count.
pub(super) const MERGING: &str = "merging";
pub(super) const AFTERWARDS: &str = "afterwards";
pub(super) const PAUSE: &str = "pause";
const PHASES: [&str; 3] = [MERGING, AFTERWARDS, PAUSE];
const FRESH: u64 = 1 << 50;
/// Of a page the word that is written to.
const WRITTEN: usize = 77;
/// Between two writes the writer sleeps for this long, and then catches up.
const TICK: Duration = Duration::from_millis(10);

/// A guest of `merge`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of the guest
    guest: u64,
    /// Pages of its memory
    pages: usize,
    /// Pages per thousand that are written to in a second
    writes: u64,
    /// Let the kernel merge it
    #[arg(long)]
    ksm: bool,
    /// Let the kernel merge only pages that other guests have, too, and zeros
    #[arg(long)]
    guided: bool,
    /// Without huge pages
    #[arg(long)]
    small: bool,
}

/// What a guest says at its end.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Said {
    /// Words that were not what they should be, while it ran and at the end.
    pub(super) wrong: u64,
    /// Writes while pages were merged, and afterwards; none if there were none.
    pub(super) merging: Option<Writes>,
    pub(super) afterwards: Option<Writes>,
}

/// Writes of a phase, and the microseconds that they took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Writes {
    pub(super) count: u64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) slowest_us: f64,
}

impl Writes {
    fn of(mut took: Vec<Duration>) -> Option<Self> {
        took.sort_unstable();
        // The smallest time that so many per cent of all are not above.
        let at = |percent: usize| -> Option<f64> {
            let number = (took.len() * percent).div_ceil(100);
            Some(took.get(number.checked_sub(1)?)?.as_secs_f64() * 1e6)
        };
        let count = took.len() as u64;
        Some(Self { count, p50_us: at(50)?, p99_us: at(99)?, slowest_us: at(100)? })
    }

    /// The higher figures of both, and all writes.
    pub(super) fn worse(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            p50_us: self.p50_us.max(other.p50_us),
            p99_us: self.p99_us.max(other.p99_us),
            slowest_us: self.slowest_us.max(other.slowest_us),
        }
    }
}

/// What a page holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Zeros,
    /// The same in all guests.
    Common(u64),
    /// This guest's alone.
    Own(u64),
}

fn mix(mut state: u64) -> u64 {
    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ state >> 31
}

fn word(guest: u64, kind: Kind, number: usize) -> u64 {
    let of = |seed: u64| mix(mix(seed).wrapping_add(number as u64)) | 1;
    match kind {
        Kind::Zeros => 0,
        Kind::Common(number) => of(number),
        Kind::Own(page) => of(guest << 40 | 1 << 63 | page),
    }
}

/// 40 % of the pages are in runs that all guests have, 5 % single pages that all have, 10 % zeros in short
/// runs; each guest has them in an order of its own.
fn layout(guest: u64, pages: usize) -> Vec<Kind> {
    let mut units: Vec<Vec<Kind>> = Vec::new();
    let common = pages * 40 / 100 / COMMON_RUN;
    for run in 0..common {
        let first = (run * COMMON_RUN) as u64;
        units.push((first..first + COMMON_RUN as u64).map(Kind::Common).collect());
    }
    let single = 1 << 40;
    units.extend((0..pages as u64 * 5 / 100).map(|page| vec![Kind::Common(single + page)]));
    units.extend((0..pages / 10 / ZERO_RUN).map(|_| vec![Kind::Zeros; ZERO_RUN]));
    let used: usize = units.iter().map(Vec::len).sum();
    // One page of its own lies between any two of them, and the rest anywhere.
    let mut own = (0..(pages - used) as u64).map(|page| vec![Kind::Own(page)]);
    let mut state = mix(guest + 1);
    for last in (1..units.len()).rev() {
        state = mix(state);
        let other = usize::try_from(state % (last as u64 + 1)).unwrap_or(0);
        units.swap(last, other);
    }
    let mut kinds: Vec<Kind> = Vec::with_capacity(pages);
    for unit in units {
        kinds.extend(own.next().into_iter().flatten());
        kinds.extend(unit);
    }
    kinds.extend(own.flatten());
    kinds
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let memory = GuestMemory::new(args.pages * WORDS * 8).context("mapping memory")?;
    if args.small {
        memory.without_huge_pages().context("keeping huge pages out")?;
    }
    let kinds = layout(args.guest, args.pages - FRESH_RUN * FRESH_RUNS);
    let words = memory.words();
    let fill = |words: &[AtomicU64], kind: &dyn Fn(usize) -> Kind| {
        for (page, words) in words.chunks(WORDS).enumerate() {
            for (number, it) in words.iter().enumerate() {
                it.store(word(args.guest, kind(page), number), Relaxed);
            }
        }
    };
    let (laid_out, fresh) = words.split_at(kinds.len() * WORDS);
    fill(laid_out, &|page| kinds[page]);
    fill(fresh, &|page| Kind::Own((kinds.len() + page) as u64));
    if args.ksm {
        memory.let_merge(0..words.len() * 8).context("asking for KSM")?;
    }
    if args.guided {
        guide(&memory, &kinds).context("asking for KSM")?;
    }
    let mut written = vec![None; args.pages];
    let (stop, said) = (AtomicBool::new(false), std::sync::Mutex::new(Said::default()));
    let phase = AtomicUsize::new(PHASES.len());
    thread::scope(|scope| {
        let (stop, said, kinds, phase) = (&stop, &said, &kinds, &phase);
        let written = &mut written;
        scope.spawn(move || write(args, words, kinds, written, phase, stop, said));
        let _ = writeln!(io::stdout(), "ready");
        let mut runs = (0..).zip(fresh.chunks(FRESH_RUN * WORDS));
        // Until the benchmark is done with it, or has gone.
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            let begun = PHASES.iter().position(|it| *it == line);
            if let Some(number) = begun {
                phase.store(number, SeqCst);
                let _ = writeln!(io::stdout(), "{line}");
                continue;
            }
            let Some((number, run)) = runs.next().filter(|_| line == FILL) else { break };
            fill(run, &|page| Kind::Common(FRESH + (number * FRESH_RUN + page) as u64));
            let _ = writeln!(io::stdout(), "{}", run.as_ptr() as usize);
        }
        stop.store(true, SeqCst);
    });
    let mut said = said.into_inner().unwrap_or_default();
    for (page, kind) in kinds.iter().enumerate() {
        for number in 0..WORDS {
            let expected = match written[page] {
                Some(value) if number == WRITTEN => value,
                _ => word(args.guest, *kind, number),
            };
            said.wrong += u64::from(words[page * WORDS + number].load(Relaxed) != expected);
        }
    }
    writeln!(io::stdout(), "{}", serde_json::to_string(&said)?)?;
    Ok(())
}

/// Lets the kernel merge pages that others have, too, and zeros, and no others. Each run takes two
/// mappings: the longest ones first, as many as a process may have.
fn guide(memory: &GuestMemory, kinds: &[Kind]) -> Result<()> {
    let mut runs = candidates(kinds);
    runs.sort_by_key(|run| Reverse(run.len()));
    ensure!(!runs.is_empty(), "it has no such pages");
    for Range { start, end } in runs {
        let bytes = start * WORDS * 8..end * WORDS * 8;
        match memory.let_merge(bytes).map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => {}
            Err((Some(code), _)) if code == rustix::io::Errno::NOMEM.raw_os_error() => break,
            Err((_, error)) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Runs of pages that can be merged.
fn candidates(kinds: &[Kind]) -> Vec<Range<usize>> {
    let is_own = |kind: &Kind| matches!(kind, Kind::Own(_));
    let mut at = 0;
    let mut runs = Vec::new();
    for run in kinds.chunk_by(|a, b| is_own(a) == is_own(b)) {
        if !is_own(&run[0]) {
            runs.push(at..at + run.len());
        }
        at += run.len();
    }
    runs
}

/// Writes to random pages until it is stopped, and notes how long each write takes.
fn write(
    args: &Args,
    words: &[AtomicU64],
    kinds: &[Kind],
    written: &mut [Option<u64>],
    phase: &AtomicUsize,
    stop: &AtomicBool,
    said: &std::sync::Mutex<Said>,
) {
    let per_second = args.pages as f64 * args.writes as f64 / 1000.0;
    let (mut state, mut wrong) = (mix(args.guest + 99), 0);
    let mut took = [Vec::new(), Vec::new()];
    let began = Instant::now();
    let mut done = 0.0;
    while !stop.load(Relaxed) {
        while done < began.elapsed().as_secs_f64() * per_second && !stop.load(Relaxed) {
            done += 1.0;
            state = mix(state);
            let page = usize::try_from(state % kinds.len() as u64).unwrap_or(0);
            let expected = written[page].unwrap_or_else(|| word(args.guest, kinds[page], WRITTEN));
            let place = &words[page * WORDS + WRITTEN];
            let value = state | 1;
            let counts_for = took.get_mut(phase.load(SeqCst));
            let start = Instant::now();
            let found = place.swap(value, SeqCst);
            let elapsed = start.elapsed();
            if let Some(took) = counts_for {
                took.push(elapsed);
            }
            wrong += u64::from(found != expected || place.load(SeqCst) != value);
            written[page] = Some(value);
        }
        thread::sleep(TICK);
    }
    let [merging, afterwards] = took.map(Writes::of);
    let mut said = said.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *said = Said { wrong, merging, afterwards };
}

/// Pages that merging can save in `guests` of so many pages, if nobody writes to them.
pub(super) fn mergeable(guests: u64, pages: usize) -> u64 {
    let kinds = layout(0, pages - FRESH_RUN * FRESH_RUNS);
    let count = |is_it: fn(&Kind) -> bool| kinds.iter().filter(|kind| is_it(kind)).count() as u64;
    let zeros = count(|kind| *kind == Kind::Zeros) * guests;
    zeros + count(|kind| matches!(kind, Kind::Common(_))) * (guests - 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    #[test]
    fn guests_have_the_same_pages_in_another_order() {
        let (a, b) = (layout(0, 10_000), layout(1, 10_000));
        assert_ne!(a, b);
        assert_eq!((a.len(), b.len()), (10_000, 10_000));
        let count =
            |kinds: &[Kind], is_it: fn(&Kind) -> bool| kinds.iter().filter(|it| is_it(it)).count();
        for kinds in [&a, &b] {
            assert_eq!(count(kinds, |it| *it == Kind::Zeros), 1000);
            assert_eq!(count(kinds, |it| matches!(it, Kind::Common(_))), 62 * 64 + 500);
        }
        assert_eq!(mergeable(4, 10_512), 4000 + 3 * (62 * 64 + 500));
        assert_eq!(word(0, Kind::Common(5), 3), word(1, Kind::Common(5), 3));
        assert_ne!(word(0, Kind::Own(5), 3), word(1, Kind::Own(5), 3));
    }

    /// The 99th percentile of few writes was the second slowest, and that of none was 0.
    #[test]
    fn percentiles_of_writes() {
        let of = |count: u64| Writes::of((1..=count).rev().map(Duration::from_micros).collect());
        assert_eq!(of(0), None);
        let figures = |count| of(count).map(|it| (it.p50_us, it.p99_us, it.slowest_us));
        assert_eq!(figures(1), Some((1.0, 1.0, 1.0)));
        assert_eq!(figures(50), Some((25.0, 50.0, 50.0)));
        assert_eq!(figures(1000), Some((500.0, 990.0, 1000.0)));
        let (a, b) = (of(10).unwrap(), of(20).unwrap());
        let worse = Writes { count: 30, ..b };
        assert_eq!((a.worse(b), b.worse(a)), (worse, worse));
    }

    #[test]
    fn candidates_are_all_pages_that_can_be_merged() {
        let own = Kind::Own;
        let kinds = [Kind::Zeros, own(0), Kind::Common(1), Kind::Zeros, own(1), own(2)];
        assert_eq!(candidates(&kinds), [0..1, 2..4]);
        assert_eq!(candidates(&[]), []);
        let all: usize = candidates(&layout(0, 10_000)).iter().map(Range::len).sum();
        assert_eq!(all, 1000 + 62 * 64 + 500);
    }
}
