//! How fast and how often: the limit on bytes per second, and the pauses between tries.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cofolio_store::task::{Cancel, Event, Task};

use super::RegistryOptions;
use crate::error::RegistryError;

/// How often code that waits looks for a cancel.
pub(super) const NAP: Duration = Duration::from_millis(50);

/// A token bucket that all connections draw from. It holds a quarter of a second's worth.
pub(crate) struct Limiter {
    /// 0: no limit.
    rate: u64,
    /// When the rate allows more.
    due: Mutex<Instant>,
}

impl Limiter {
    pub(crate) fn new(rate: u64) -> Self {
        Self { rate, due: Mutex::new(Instant::now()) }
    }

    /// How much to read at a time for short pauses: at most a quarter of a second's worth.
    pub(crate) fn portion(&self) -> usize {
        match self.rate {
            0 => usize::MAX,
            rate => usize::try_from(rate / 4).unwrap_or(usize::MAX).clamp(1, 64 << 10),
        }
    }

    /// Counts bytes that were read; returns when the rate allows more.
    pub(crate) fn take(&self, bytes: usize, stop: &Cancel) -> Result<(), RegistryError> {
        if self.rate == 0 {
            return Ok(());
        }
        let now = Instant::now();
        sleep(self.due(bytes, now).saturating_duration_since(now), stop)
    }

    /// When the rate allows more, after `bytes` that are read now.
    fn due(&self, bytes: usize, now: Instant) -> Instant {
        let cost = Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        let floor = now.checked_sub(Duration::from_millis(250));
        *due = floor.map_or(*due, |floor| floor.max(*due)) + cost;
        *due
    }
}

/// Whether a connection is too slow. Only time spent waiting for bytes counts.
pub(crate) struct Speed {
    rate_min: u64,
    window: Duration,
    bytes: u64,
    waited: Duration,
}

impl Speed {
    pub(crate) fn new(options: &RegistryOptions) -> Self {
        let RegistryOptions { rate_min, stall_timeout: window, .. } = *options;
        Self { rate_min, window, bytes: 0, waited: Duration::ZERO }
    }

    /// Adds what one read brought; fails if a whole window of waiting stayed below the minimum.
    pub(crate) fn add(&mut self, bytes: usize, waited: Duration) -> Result<(), String> {
        self.bytes += bytes as u64;
        self.waited += waited;
        if self.waited < self.window {
            return Ok(());
        }
        let enough = self.bytes as f64 >= self.rate_min as f64 * self.waited.as_secs_f64();
        let (bytes, seconds) = (self.bytes, self.waited.as_secs_f32());
        (self.bytes, self.waited) = (0, Duration::ZERO);
        match enough {
            true => Ok(()),
            false => Err(format!(
                "too slow: {bytes} bytes in {seconds:.1} s, less than {} a second",
                self.rate_min
            )),
        }
    }
}

/// A failure, and whether trying again could help.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: RegistryError,
    pub(crate) again: bool,
    /// What the registry asked for.
    pub(crate) pause: Option<Duration>,
    /// Most tries that it is worth.
    pub(crate) tries_max: u32,
}

impl Failure {
    pub(crate) fn again(error: RegistryError) -> Self {
        Self { error, again: true, pause: None, tries_max: u32::MAX }
    }
}

impl From<RegistryError> for Failure {
    fn from(error: RegistryError) -> Self {
        Self { error, again: false, pause: None, tries_max: 1 }
    }
}

/// Counts the tries of one thing.
pub(crate) struct Tries {
    count: u32,
    max: u32,
    pause: Duration,
    pause_max: Duration,
    /// What hears why it is tried again, and ends the waiting.
    task: Task,
}

impl Tries {
    pub(crate) fn new(options: &RegistryOptions, task: Task) -> Self {
        let RegistryOptions { tries_max, pause, pause_max, .. } = *options;
        Self { count: 0, max: tries_max.max(1), pause, pause_max, task }
    }

    /// Forgets failures after progress.
    pub(crate) fn got_on(&mut self) {
        self.count = 0;
    }

    /// Waits until it is time for another try; fails if a retry cannot help or too many were made.
    pub(crate) fn wait(&mut self, failure: Failure) -> Result<(), RegistryError> {
        self.count += 1;
        if !failure.again || self.count >= self.max.min(failure.tries_max) {
            return Err(failure.error.tried(self.count));
        }
        let full = self.pause.saturating_mul(1 << (self.count - 1).min(16)).min(self.pause_max);
        // Jitter, so that clients do not retry all at once.
        let own = full.mul_f64(0.5 + fastrand::f64() / 2.0);
        let pause = failure.pause.map_or(own, |asked| asked.max(own).min(self.pause_max));
        let (next, of) = (self.count + 1, self.max.min(failure.tries_max));
        let seconds = pause.as_secs_f32();
        let remark = format!("{}; try {next} of {of} in {seconds:.1} s", failure.error);
        self.task.tell(Event::Remark(&remark));
        sleep(pause, &self.task.cancel)
    }
}

/// Sleeps, until it is cancelled.
fn sleep(how_long: Duration, stop: &Cancel) -> Result<(), RegistryError> {
    let end = Instant::now() + how_long;
    loop {
        if stop.is_cancelled() {
            return Err(RegistryError::GivenUp);
        }
        match end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => return Ok(()),
            left => std::thread::sleep(left.min(NAP)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> Failure {
        Failure::again(RegistryError::Unreachable { url: "u".into(), what: "w".into(), tries: 0 })
    }

    #[test]
    fn tries_end_unless_they_get_on() {
        let options = RegistryOptions {
            tries_max: 3,
            pause: Duration::from_millis(1),
            pause_max: Duration::from_millis(4),
            ..RegistryOptions::default()
        };
        let task = Task::default();
        let mut tries = Tries::new(&options, task.clone());
        for _ in 0..10 {
            tries.wait(failure()).expect("first");
            tries.wait(failure()).expect("second");
            tries.got_on();
        }
        let for_long = Failure { pause: Some(Duration::from_secs(3600)), ..failure() };
        tries.wait(for_long).expect("no longer than the longest pause");
        tries.wait(failure()).expect("second");
        let error = tries.wait(failure()).expect_err("third");
        assert_eq!(error.to_string(), "u: w (tried 3 times)");
        let mut tries = Tries::new(&RegistryOptions::default(), task.clone());
        let refused = Failure { again: false, ..failure() };
        assert_eq!(tries.wait(refused).expect_err("at once").to_string(), "u: w");
        task.cancel.cancel();
        assert!(matches!(tries.wait(failure()), Err(RegistryError::GivenUp)));
    }

    #[test]
    fn slow_connections_are_noticed() {
        let window = Duration::from_secs(10);
        let options =
            RegistryOptions { rate_min: 100, stall_timeout: window, ..RegistryOptions::default() };
        let mut speed = Speed::new(&options);
        let second = Duration::from_secs(1);
        for _ in 0..100 {
            speed.add(100, second).expect("just enough");
        }
        for _ in 0..9 {
            speed.add(99, second).expect("not known yet");
        }
        assert!(speed.add(99, second).expect_err("too slow").contains("990 bytes in 10.0 s"));
        // A burst makes up for a pause within one window, and only there.
        speed.add(1000, Duration::ZERO).expect("a burst");
        speed.add(0, window).expect("a pause");
        speed.add(0, window).expect_err("another pause");
    }

    #[test]
    fn a_rate_is_kept_by_all_together() {
        let limiter = Limiter::new(1_000_000);
        // It has not been used for long: a quarter of a second's worth is there.
        let now = Instant::now() + Duration::from_secs(5);
        let millis = Duration::from_millis;
        assert_eq!(limiter.due(200_000, now), now - millis(50));
        // Whoever takes more waits, also for what others took.
        assert_eq!(limiter.due(100_000, now), now + millis(50));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..25 {
                        limiter.due(5_000, now);
                    }
                });
            }
        });
        assert_eq!(limiter.due(0, now), now + millis(550));
        // And no more than a quarter is saved up.
        assert_eq!(limiter.due(0, now + millis(5000)), now + millis(4750));
    }
}
