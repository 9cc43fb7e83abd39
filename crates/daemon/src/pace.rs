//! A share of a processor.

use std::time::{Duration, Instant};

/// Bounds processor time to a share of the time that passes. Time that was not used adds up to a
/// limit; an overdraft delays what comes next.
#[derive(Debug)]
pub(crate) struct Pace {
    pub(crate) share: f64,
    /// Seconds of processor time that may be used now; negative after an overdraft.
    credit: f64,
    wall: Instant,
}

/// Seconds of processor time that opened files may overdraw.
const DEBT_MAX_SECONDS: f64 = 1.0;
/// Seconds of passing time whose share adds up while nothing is done.
const SAVED_SECONDS: f64 = 5.0;

impl Pace {
    pub(crate) fn new(share: f64) -> Self {
        Self { share, credit: 0.0, wall: Instant::now() }
    }

    /// What may be used now, if anything.
    pub(crate) fn allowance(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.earn(now - self.wall);
        self.wall = now;
        (self.credit > 0.0).then(|| Duration::from_secs_f64(self.credit))
    }

    /// Whether not even opened files may take more now.
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.credit < -DEBT_MAX_SECONDS
    }

    /// Processor time that was used.
    pub(crate) fn charge(&mut self, used: Duration) {
        self.credit -= used.as_secs_f64();
    }

    fn earn(&mut self, passed: Duration) {
        let earned = self.share * passed.as_secs_f64();
        self.credit = (self.credit + earned).min(self.share * SAVED_SECONDS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overdraft_is_waited_for_and_savings_are_bounded() {
        let mut pace = Pace::new(0.01);
        pace.earn(Duration::from_secs(1000));
        assert!((pace.credit - 0.05).abs() < 1e-9);
        pace.charge(Duration::from_millis(150));
        assert!((pace.credit + 0.1).abs() < 1e-9);
        pace.earn(Duration::from_secs(9));
        assert!(pace.credit < 0.0);
        pace.earn(Duration::from_secs(2));
        assert!(pace.credit > 0.0);
        pace.charge(Duration::from_millis(1200));
        assert!(pace.is_overdrawn());
        pace.earn(Duration::from_secs(30));
        assert!(!pace.is_overdrawn() && pace.credit < 0.0);
    }
}
