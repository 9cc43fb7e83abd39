//! A share of a processor, for threads that work apart from each other.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// After using processor time, all threads pause: `used` takes `used / share` of wall time.
#[derive(Debug)]
pub(super) struct Share {
    share: f64,
    paid: Mutex<Duration>,
}

impl Share {
    /// Of one processor.
    pub(super) fn new(share: f64) -> Self {
        Self { share: share.max(0.001), paid: Mutex::default() }
    }

    /// Time until a thread may work again.
    pub(super) fn wait(&self, now: Duration) -> Duration {
        self.paid.lock().unwrap_or_else(PoisonError::into_inner).saturating_sub(now)
    }

    /// Adds processor time that a thread has used.
    pub(super) fn charge(&self, now: Duration, used: Duration) {
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        *paid = now.max(*paid) + used.div_f64(self.share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight guests that always have something to do.
    #[test]
    fn guests_together_take_no_more_than_their_share() {
        let share = Share::new(0.05);
        let (mut now, mut used) = (Duration::ZERO, Duration::ZERO);
        let step = Duration::from_millis(2);
        while now < Duration::from_secs(100) {
            if share.wait(now).is_zero() {
                // All have seen that they may work before the first one pays.
                (0..8).for_each(|_| share.charge(now, step));
                used += 8 * step;
            }
            now += Duration::from_millis(10);
        }
        let part = used.as_secs_f64() / now.as_secs_f64();
        assert!((0.045..=0.0502).contains(&part), "{part}");
    }

    /// Unused time does not accumulate: after a quiet hour no thread gets a whole processor.
    #[test]
    fn a_step_is_paid_off_whenever_it_comes() {
        let share = Share::new(0.1);
        let now = Duration::from_secs(3600);
        assert_eq!(share.wait(now), Duration::ZERO);
        share.charge(now, Duration::from_millis(10));
        assert_eq!(share.wait(now), Duration::from_millis(100));
    }
}
