//! How fast KSM scans: decides from samples, and does nothing itself.
//!
//! The share of a processor that KSM may take is doubled while merging is worth it, up to the budget,
//! and halved whenever two passes over all memory were not: a page is merged in the second pass that
//! finds it unchanged. How many pages are scanned for that share is found by measuring.

use std::time::Duration;

/// Bounds of KSM.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KsmPolicy {
    /// Share of one processor that ksmd takes at most.
    pub share: f64,
}

/// From one sample to the next, at least. A page that is merged costs many times what others cost, and
/// for so long ksmd may take more than its budget then.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// ksmd sleeps if it has taken no time for so long.
const IDLE: Duration = Duration::from_secs(10);

/// Merging is worth it from so many pages a second of processor time on: 1 MiB. KSM merges up to
/// 58,000 (measured).
const WORTH: f64 = 256.0;
/// Where merging is not worth it KSM takes this part of the budget, so that it finds new pages.
const FLOOR: f64 = 1.0 / 16.0;
/// Passes in which a page that can be merged is merged.
const PASSES: u64 = 2;
/// New pages that are worth a try at full speed, besides an eighth of the known ones.
const NEW: u64 = 1024;

/// The kernel's default: 100 pages every 20 ms.
const PACE: f64 = 100.0;
const SLEEP_MS: f64 = 20.0;
/// With fewer pages the sleep gets longer instead, since pages that KSM skips are not counted: it may
/// go through all memory to find one that it does not skip (smart_scan).
const PAGES_MIN: f64 = 64.0;
const PACE_MIN: f64 = PAGES_MIN * SLEEP_MS / 10_000.0;
/// A cycle of some tenths of a second. What ksmd lacks then it lacks because others have the processor.
const PACE_MAX: f64 = 1e5;

/// Figures of KSM at a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sample {
    /// When, since some moment.
    pub at: Duration,
    /// Processor time that ksmd has taken.
    pub cpu: Duration,
    /// Passes over all memory that it has ended.
    pub passes: u64,
    /// Pages that it knows.
    pub known: u64,
    /// Pages that are not in memory because another one is the same.
    pub saved: u64,
}

/// What the kernel is to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pace {
    pub pages_to_scan: u64,
    pub sleep_millisecs: u64,
}

#[derive(Debug)]
pub(super) struct Controller {
    budget: f64,
    /// Share of a processor that is aimed at.
    share: f64,
    /// Pages every [`SLEEP_MS`].
    pace: f64,
    /// Seconds of processor time that were taken beyond the budget, to be paid back.
    debt: f64,
    last: Option<Sample>,
    /// Passes when the share was last changed.
    judged: u64,
    /// Fewest pages that were known since merging is not worth it.
    known: u64,
}

impl Controller {
    pub(super) fn new(policy: KsmPolicy) -> Self {
        let budget = policy.share;
        Self { budget, share: budget, pace: PACE, debt: 0.0, last: None, judged: 0, known: 0 }
    }

    pub(super) fn pace(&self) -> Pace {
        let pages = self.pace.max(PAGES_MIN);
        let sleep = SLEEP_MS * pages / self.pace;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        Pace { pages_to_scan: pages as u64, sleep_millisecs: sleep as u64 }
    }

    /// Takes a sample. Returns the pace from now on.
    pub(super) fn sample(&mut self, sample: Sample) -> Pace {
        let last = *self.last.get_or_insert(sample);
        let wait = TICK.max(2 * Duration::from_millis(self.pace().sleep_millisecs));
        let since = sample.at.saturating_sub(last.at);
        if since < wait {
            return self.pace();
        }
        let taken = sample.cpu.saturating_sub(last.cpu);
        // On a busy machine ksmd may wait for a processor.
        if taken.is_zero() && since < IDLE {
            return self.pace();
        }
        self.last = Some(sample);
        let (seconds, cpu) = (since.as_secs_f64(), taken.as_secs_f64());
        self.debt = (self.debt + cpu - self.budget * seconds).max(0.0);
        // Nobody allows merging, and ksmd sleeps: what comes next is new.
        if taken.is_zero() {
            (self.share, self.pace, self.known) = (self.budget, PACE, 0);
            return self.pace();
        }
        let gained = sample.saved.saturating_sub(last.saved) as f64;
        self.judge(&sample, gained >= WORTH * cpu.max(0.01));
        let aim = self.share.min(self.budget - self.debt / TICK.as_secs_f64()).max(0.0);
        let factor = (aim * seconds / cpu).clamp(1.0 / 8.0, 2.0);
        // A change is a few writes, and debts show what is off on average.
        if !(0.9..=1.1).contains(&factor) {
            self.pace = (self.pace * factor).clamp(PACE_MIN, PACE_MAX);
        }
        self.pace()
    }

    fn judge(&mut self, sample: &Sample, is_worth: bool) {
        let floor = self.budget * FLOOR;
        let is_slow = self.share <= floor;
        let has_new = is_slow && sample.known > self.known + self.known / 8 + NEW;
        if is_worth || has_new {
            self.share = if has_new { self.budget } else { (self.share * 2.0).min(self.budget) };
            self.judged = sample.passes;
        } else if sample.passes >= self.judged + PASSES {
            self.share = (self.share / 2.0).max(floor);
            self.judged = sample.passes;
        }
        self.known = if is_slow && !has_new { self.known.min(sample.known) } else { sample.known };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, PartialEq)]
    enum Page {
        /// With others that are the same; seen so often.
        Twin(u8),
        Merged,
        Unique,
    }

    /// KSM, as far as it matters here.
    struct Ksm {
        pages: Vec<Page>,
        next: usize,
        /// Pages that it has come to.
        known: usize,
        /// Seconds that a page takes.
        cost: f64,
        at: f64,
        cpu: f64,
        passes: u64,
        controller: Controller,
    }

    const BUDGET: f64 = 0.1;

    impl Ksm {
        fn new(pages: Vec<Page>) -> Self {
            let controller = Controller::new(KsmPolicy { share: BUDGET });
            let mut it = Self {
                pages,
                next: 0,
                known: 0,
                cost: 2e-6,
                at: 0.0,
                cpu: 0.0,
                passes: 0,
                controller,
            };
            it.sample();
            it
        }

        fn saved(&self) -> usize {
            self.pages.iter().filter(|page| **page == Page::Merged).count()
        }

        fn sample(&mut self) -> Pace {
            self.controller.sample(Sample {
                at: Duration::from_secs_f64(self.at),
                cpu: Duration::from_secs_f64(self.cpu),
                passes: self.passes,
                known: self.known as u64,
                saved: self.saved() as u64,
            })
        }

        /// Runs for so many seconds, with a sample every tick. Returns the share of a processor that it
        /// took.
        fn run(&mut self, seconds: f64) -> f64 {
            let (began, before) = (self.at, self.cpu);
            while self.at < began + seconds {
                let pace = self.controller.pace();
                let tick = self.at + TICK.as_secs_f64();
                while self.at < tick {
                    let took = self.scan(pace.pages_to_scan);
                    self.cpu += took;
                    self.at += took + pace.sleep_millisecs as f64 / 1e3;
                }
                self.sample();
            }
            (self.cpu - before) / (self.at - began)
        }

        fn scan(&mut self, pages: u64) -> f64 {
            let mut took = 0.0;
            for _ in 0..pages {
                let Some(page) = self.pages.get_mut(self.next) else {
                    (self.next, self.passes) = (0, self.passes + u64::from(!self.pages.is_empty()));
                    break;
                };
                self.next += 1;
                self.known = self.known.max(self.next);
                took += self.cost;
                *page = match *page {
                    Page::Twin(1) => Page::Merged,
                    Page::Twin(seen) => Page::Twin(seen + 1),
                    other => other,
                };
            }
            took
        }

        fn share(&self) -> f64 {
            self.controller.share
        }
    }

    fn mixed() -> Vec<Page> {
        let page = |number| if number % 2 == 0 { Page::Twin(0) } else { Page::Unique };
        (0..200_000).map(page).collect()
    }

    #[test]
    fn it_merges_within_the_budget_and_slows_down_when_all_is_merged() {
        let mut ksm = Ksm::new(mixed());
        // 400,000 looks take 0.8 s of processor time: 8 s with the budget, and some to get there.
        let mut seconds = 0;
        while ksm.saved() < 100_000 {
            assert!(ksm.run(10.0) <= BUDGET * 1.01);
            seconds += 10;
        }
        assert!(seconds <= 20, "{seconds}");
        // Two passes at each speed: they take 8, 16, 32 and 64 seconds.
        ksm.run(150.0);
        assert_eq!(ksm.share(), BUDGET * FLOOR);
        let share = ksm.run(600.0);
        assert!(share > BUDGET * FLOOR / 2.0 && share < BUDGET * FLOOR * 1.5, "{share}");
    }

    #[test]
    fn new_pages_are_merged_at_full_speed() {
        let mut ksm = Ksm::new(mixed());
        ksm.run(300.0);
        assert_eq!(ksm.share(), BUDGET * FLOOR);
        ksm.pages.extend(mixed());
        // At the slow pace two passes take four minutes.
        ksm.run(100.0);
        assert_eq!(ksm.saved(), 200_000);
    }

    #[test]
    fn nothing_to_merge_is_no_reason_to_scan() {
        let mut ksm = Ksm::new(vec![Page::Unique; 200_000]);
        ksm.run(200.0);
        let mut most: f64 = 0.0;
        for round in 0..100 {
            // Programs begin and end, and none has anything in common with another.
            ksm.pages.truncate(190_000);
            ksm.known = 190_000;
            ksm.pages.resize(if round % 2 == 0 { 200_000 } else { 195_000 }, Page::Unique);
            most = most.max(ksm.run(20.0));
        }
        assert!(most < BUDGET / 8.0, "{most}");
    }

    #[test]
    fn the_budget_holds_whatever_a_page_costs() {
        let mut ksm = Ksm::new(mixed());
        ksm.run(4.0);
        // Even the fewest pages at a time are a tenth of a second.
        ksm.cost = 2e-3;
        let share = ksm.run(200.0);
        assert!(share < BUDGET * 1.05, "{share}");
        ksm.cost = 1e-7;
        let share = ksm.run(60.0);
        assert!(share < BUDGET * 1.05, "{share}");
    }

    /// On a machine where others have the processor for a second, KSM was taken to sleep, and began anew
    /// at the first pace.
    #[test]
    fn a_ksmd_that_waits_for_a_processor_keeps_its_pace() {
        let mut ksm = Ksm::new(mixed());
        ksm.run(20.0);
        let pace = ksm.controller.pace();
        for _ in 0..10 {
            ksm.at += TICK.as_secs_f64();
            assert_eq!(ksm.sample(), pace);
        }
    }

    #[test]
    fn while_nobody_allows_merging_it_waits_ready() {
        let mut ksm = Ksm::new(mixed());
        ksm.run(300.0);
        let slow = ksm.controller.pace();
        ksm.pages.clear();
        ksm.known = 0;
        ksm.run(60.0);
        let ready = Pace { pages_to_scan: 100, sleep_millisecs: 20 };
        assert!(ksm.controller.pace() == ready && slow != ready, "{slow:?}");
        assert_eq!(ksm.share(), BUDGET);
    }
}
