//! A share of a processor.

use std::time::{Duration, Instant};

/// Bounds processor time to a share of the time that passes. Each of `N` kinds of work has a part
/// of it, and what the others leave: none can use up another one's part. Time that was not
/// used adds up to a limit; an overdraft delays what comes next of that kind.
#[derive(Debug)]
pub(crate) struct Pace<const N: usize> {
    pub(crate) share: f64,
    /// Each kind's part of the share; 1 together.
    parts: [f64; N],
    /// Seconds of processor time that each kind may use now; negative after an overdraft.
    credits: [f64; N],
    wall: Instant,
}

/// Seconds of processor time that may be overdrawn before it is too much.
const DEBT_MAX_SECONDS: f64 = 0.25;
/// The share of this much passing time adds up while nothing is done. With more, a busy minute
/// after an idle one takes visibly more than its share.
const SAVED_SECONDS: f64 = 1.0;

impl<const N: usize> Pace<N> {
    pub(crate) fn new(share: f64, parts: [f64; N]) -> Self {
        Self { share, parts, credits: [0.0; N], wall: Instant::now() }
    }

    /// Takes up the time that has passed since it was last called.
    pub(crate) fn pass(&mut self) {
        let now = Instant::now();
        self.earn(now - self.wall);
        self.wall = now;
    }

    /// What this kind of work may use now, if anything.
    pub(crate) fn allowance(&self, kind: usize) -> Option<Duration> {
        (self.credits[kind] > 0.0).then(|| Duration::from_secs_f64(self.credits[kind]))
    }

    /// The allowance, once it reaches `enough`, or half of the most that adds up if that is less.
    pub(crate) fn allowance_of(&self, kind: usize, enough: Duration) -> Option<Duration> {
        let most = Duration::from_secs_f64(self.share * self.parts[kind] * SAVED_SECONDS);
        self.allowance(kind).filter(|it| *it >= enough.min(most / 2))
    }

    /// Whether this kind of work has used far too much.
    pub(crate) fn is_overdrawn(&self, kind: usize) -> bool {
        self.credits[kind] < -DEBT_MAX_SECONDS
    }

    /// Processor time that was used.
    pub(crate) fn charge(&mut self, kind: usize, used: Duration) {
        self.credits[kind] -= used.as_secs_f64();
    }

    /// Takes up time that has passed.
    pub(crate) fn earn(&mut self, passed: Duration) {
        let most = self.parts.map(|part| self.share * part * SAVED_SECONDS);
        let mut left = 0.0;
        for ((credit, part), most) in self.credits.iter_mut().zip(self.parts).zip(most) {
            let sum = *credit + self.share * part * passed.as_secs_f64();
            *credit = sum.min(most);
            left += sum - *credit;
        }
        for (credit, most) in self.credits.iter_mut().zip(most) {
            let more = left.min(most - *credit);
            *credit += more;
            left -= more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overdraft_is_waited_for_and_savings_are_bounded() {
        let mut pace = Pace::new(0.01, [1.0]);
        pace.earn(Duration::from_secs(1000));
        assert!((pace.credits[0] - 0.01).abs() < 1e-9);
        pace.charge(0, Duration::from_millis(110));
        assert!((pace.credits[0] + 0.1).abs() < 1e-9);
        pace.earn(Duration::from_secs(9));
        assert!(pace.allowance(0).is_none());
        pace.earn(Duration::from_secs(2));
        assert!(pace.allowance(0).is_some());
        pace.charge(0, Duration::from_millis(300));
        assert!(pace.is_overdrawn(0));
        pace.earn(Duration::from_secs(10));
        assert!(!pace.is_overdrawn(0) && pace.allowance(0).is_none());
    }

    /// While a container opened files all the time, a look at all processes and objects was taken
    /// in slices of 0.15 ms, and cost nearly twice as much.
    #[test]
    fn a_chore_waits_for_enough_time() {
        let enough = Duration::from_millis(1);
        let mut pace = Pace::new(0.01, [0.5, 0.5]);
        pace.earn(Duration::from_millis(150));
        assert!(pace.allowance(1).is_some() && pace.allowance_of(1, enough).is_none());
        pace.earn(Duration::from_millis(100));
        assert!(pace.allowance_of(1, enough).is_some());
        // That much never adds up.
        let mut pace = Pace::new(0.0001, [0.5, 0.5]);
        pace.earn(Duration::from_millis(400));
        assert!(pace.allowance_of(1, enough).is_none());
        pace.earn(Duration::from_millis(200));
        assert!(pace.allowance_of(1, enough).is_some());
    }

    /// A container that opened 3,000 files a second used up all of the ledger's time, and no figure of
    /// any container was taken any more.
    #[test]
    fn one_kind_of_work_leaves_the_other_its_part() {
        let (mut pace, mut used) = (Pace::new(0.01, [0.75, 0.25]), 0.0);
        for _ in 0..1000 {
            pace.earn(Duration::from_millis(100));
            pace.charge(0, Duration::from_millis(10));
            if let Some(allowed) = pace.allowance(1) {
                pace.charge(1, allowed);
                used += allowed.as_secs_f64();
            }
        }
        assert!(pace.is_overdrawn(0));
        assert!((used - 0.25).abs() < 1e-3, "{used}");
        // What one leaves, the other has, and both together have no more than there is.
        let (mut pace, mut used) = (Pace::new(0.01, [0.75, 0.25]), 0.0);
        for _ in 0..1000 {
            pace.earn(Duration::from_millis(100));
            if let Some(allowed) = pace.allowance(1) {
                pace.charge(1, allowed);
                used += allowed.as_secs_f64();
            }
        }
        assert!((0.95..=1.0).contains(&used), "{used}");
    }
}
