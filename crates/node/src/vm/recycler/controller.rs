//! When to pulse a guest, and how much: decides from samples, and does nothing itself.

use std::collections::VecDeque;
use std::time::Duration;

/// Bounds of recycling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// From one sample of a guest to the next.
    pub period: Duration,
    /// Free memory that each guest keeps, in bytes.
    pub reserve: u64,
    /// A pulse takes at most so many bytes.
    pub pulse_max: u64,
    /// Share of one processor that the recycler itself takes at most.
    pub share: f64,
}

impl Default for Policy {
    fn default() -> Self {
        let period = Duration::from_secs(1);
        Self { period, reserve: 32 << 20, pulse_max: 1 << 30, share: 0.05 }
    }
}

/// A pulse has to return at least a 256th of a guest's memory, and so many bytes.
const WORTH_MIN: u64 = 4 << 20;
/// Waits for guests that take their memory back at once begin with this, and double.
const BACK_OFF: Duration = Duration::from_secs(2);
const BACK_OFF_MAX: Duration = Duration::from_secs(300);
/// Memory that is taken back within this time was taken back at once.
const AT_ONCE: Duration = Duration::from_secs(10);
/// Tasks of the host wait for a processor that many percent of the time: then others come first,
/// and freed memory is left with the guest for a while.
const CPU_PRESSURE_MAX: f64 = 60.0;
const BUSY_WAIT: Duration = Duration::from_secs(10);
/// Tasks of the host wait for memory that many percent of the time: then memory comes first.
const MEMORY_PRESSURE: f64 = 5.0;

/// What is known of a guest at a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sample {
    /// When, since some moment.
    pub at: Duration,
    /// When the guest said what it has.
    pub said: Duration,
    /// Bytes that the guest has free, of its memory.
    pub free: u64,
    /// Bytes of its memory that have a content: the host holds them, or they are merged.
    pub filled: u64,
    /// How often it had to wait for memory: swapped in, or read what it had dropped.
    pub stalls: u64,
}

/// What the host's tasks wait for, in percent of the time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Pressure {
    /// A processor.
    pub cpu: f64,
    /// Memory.
    pub memory: f64,
}

/// One guest.
#[derive(Debug)]
pub(super) struct Controller {
    policy: Policy,
    /// Bytes of its memory.
    memory: u64,
    last: Option<Sample>,
    /// No pulse before.
    wait_until: Duration,
    /// Since when a pulse would return something.
    worth_since: Option<Duration>,
    back_off: Duration,
    /// At the last sample the host's processors were busy.
    was_busy: bool,
    /// After a pulse: when, what the host held then, what it had returned.
    pulsed: Option<(Duration, u64, u64)>,
    waiting: Waiting,
}

impl Controller {
    /// For a guest with so many bytes of memory.
    pub(super) fn new(memory: u64, policy: Policy) -> Self {
        Self {
            policy,
            memory,
            last: None,
            wait_until: Duration::ZERO,
            worth_since: None,
            back_off: BACK_OFF,
            was_busy: false,
            pulsed: None,
            waiting: Waiting::default(),
        }
    }

    /// From one sample to the next.
    pub(super) fn period(&self) -> Duration {
        self.policy.period
    }

    /// Bytes that the guest has free and the host still holds, at least: some of what the guest
    /// uses may never have been touched.
    pub(super) fn unreturned(&self, sample: &Sample) -> u64 {
        sample.filled.saturating_sub(self.memory.saturating_sub(sample.free))
    }

    /// How much of that is more than the reserve.
    pub(super) fn excess(&self, sample: &Sample) -> u64 {
        self.unreturned(sample).saturating_sub(self.policy.reserve)
    }

    /// Takes a sample. Returns how many bytes a pulse is to take now, if there is to be one.
    pub(super) fn sample(&mut self, sample: Sample, pressure: Pressure) -> Option<u64> {
        let unreturned = self.unreturned(&sample);
        let last = self.last.replace(sample);
        // Freed after the guest had spoken last, as far as anybody knows.
        let (since, held) = last.map_or((sample.at, 0), |last| (last.said, last.filled));
        let excess = self.excess(&sample);
        self.waiting.give(held.saturating_sub(sample.filled), sample.at);
        self.waiting.set(excess, since);
        self.judge_last_pulse(&sample);
        let worth = WORTH_MIN.max(self.memory >> 8);
        let grows = last.is_some_and(|last| sample.free + worth < last.free);
        let stalls = last.is_some_and(|last| sample.stalls > last.stalls);
        self.was_busy = is_busy(pressure);
        let spare = sample.free.saturating_sub(self.policy.reserve);
        // A little more: what was reported is not always what the balloon finds last.
        let bytes = (unreturned + unreturned / 8).min(spare).min(self.policy.pulse_max);
        if excess < worth || bytes < worth || grows || stalls {
            self.worth_since = None;
            return None;
        }
        let since = *self.worth_since.get_or_insert(sample.at);
        let wait = if self.was_busy { BUSY_WAIT } else { Duration::ZERO };
        (sample.at >= self.wait_until && sample.at >= since + wait).then_some(bytes)
    }

    /// Whether a pulse that goes on has to end because the guest needs its memory.
    pub(super) fn guest_needs(&self, free: u64, stalls: u64) -> bool {
        let before = self.last.map_or(0, |last| last.stalls);
        free < self.policy.reserve / 2 || stalls > before
    }

    /// Whether a pulse that goes on has to end because the host's processors became busy meanwhile.
    pub(super) fn host_needs(&self, pressure: Pressure) -> bool {
        is_busy(pressure) && !self.was_busy
    }

    /// A pulse has ended, and this is what the host holds now.
    pub(super) fn pulsed(&mut self, at: Duration, filled: u64) {
        let before = self.last.map_or(filled, |last| last.filled);
        let returned = before.saturating_sub(filled);
        self.waiting.give(returned, at);
        if let Some(last) = &mut self.last {
            last.filled = filled;
        }
        if returned < WORTH_MIN {
            // In vain: the guest's free pages are not what the host holds, or its balloon gets
            // none.
            self.pulsed = None;
            return self.back_off_longer(at);
        }
        self.pulsed = Some((at, filled, returned));
        self.wait_until = at + self.back_off;
    }

    /// Waits longer after a pulse that was for nothing.
    fn judge_last_pulse(&mut self, sample: &Sample) {
        let Some((at, filled, returned)) = self.pulsed else { return };
        if sample.filled.saturating_sub(filled) > returned / 2 {
            self.pulsed = None;
            self.back_off_longer(at);
        } else if sample.at.saturating_sub(at) > AT_ONCE {
            self.pulsed = None;
            (self.back_off, self.wait_until) = (BACK_OFF, sample.at);
        }
    }

    fn back_off_longer(&mut self, at: Duration) {
        self.back_off = (self.back_off * 2).min(BACK_OFF_MAX);
        self.wait_until = at + self.back_off;
    }

    /// How long freed memory waited for its return.
    pub(super) fn latencies(&self) -> &Latencies {
        &self.waiting.latencies
    }
}

/// Whether other tasks come first.
fn is_busy(pressure: Pressure) -> bool {
    pressure.cpu > CPU_PRESSURE_MAX && pressure.memory < MEMORY_PRESSURE
}

/// Moments that freed bytes are told apart by.
const FREED_MAX: usize = 256;

/// Freed bytes that are not returned yet, oldest first.
#[derive(Debug, Default)]
struct Waiting {
    /// When they were freed at the earliest, and how many.
    freed: VecDeque<(Duration, u64)>,
    bytes: u64,
    latencies: Latencies,
}

impl Waiting {
    /// So many bytes were returned, of which some may not have waited.
    fn give(&mut self, bytes: u64, now: Duration) {
        let mut left = bytes.min(self.bytes);
        self.bytes -= left;
        while left > 0
            && let Some((at, count)) = self.freed.front_mut()
        {
            let returned = left.min(*count);
            self.latencies.add(now.saturating_sub(*at), returned);
            *count -= returned;
            left -= returned;
            if *count == 0 {
                self.freed.pop_front();
            }
        }
    }

    /// So many bytes wait now: the guest has freed more since `since`, or has taken some back. It
    /// takes what it has freed last, and these were not returned.
    fn set(&mut self, bytes: u64, since: Duration) {
        if bytes > self.bytes {
            let more = bytes - self.bytes;
            match self.freed.back_mut().filter(|(at, _)| *at == since) {
                Some((_, count)) => *count += more,
                None => self.freed.push_back((since, more)),
            }
        }
        // A guest may free a page a second for months, and the host return none.
        if self.freed.len() > FREED_MAX
            && let Some((_, count)) = self.freed.pop_back()
            && let Some((_, last)) = self.freed.back_mut()
        {
            *last += count;
        }
        let mut left = self.bytes.saturating_sub(bytes);
        while left > 0
            && let Some((_, count)) = self.freed.back_mut()
        {
            let taken = left.min(*count);
            *count -= taken;
            left -= taken;
            if *count == 0 {
                self.freed.pop_back();
            }
        }
        self.bytes = bytes;
    }
}

/// Upper bounds of the classes of [`Latencies`], in milliseconds.
pub const LATENCY_MS: [u64; 12] =
    [500, 1000, 1500, 2000, 3000, 4000, 5000, 7000, 10_000, 20_000, 30_000, 60_000];

/// Bytes by how long they waited for their return.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Those of each class of [`LATENCY_MS`], and last those that waited longer.
    pub bytes: [u64; LATENCY_MS.len() + 1],
    /// How many milliseconds all bytes together have waited.
    pub byte_ms: u64,
}

impl Latencies {
    fn add(&mut self, waited: Duration, bytes: u64) {
        let millis = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        self.bytes[LATENCY_MS.partition_point(|bound| *bound < millis)] += bytes;
        self.byte_ms = self.byte_ms.saturating_add(bytes.saturating_mul(millis));
    }

    /// Adds those of another guest.
    pub(super) fn join(&mut self, other: &Self) {
        self.bytes.iter_mut().zip(other.bytes).for_each(|(ours, theirs)| *ours += theirs);
        self.byte_ms = self.byte_ms.saturating_add(other.byte_ms);
    }

    /// Within how many milliseconds this share of the bytes was returned, at the most; none if
    /// nothing was, or later than the last class says.
    pub fn quantile_ms(&self, share: f64) -> Option<u64> {
        let all: u64 = self.bytes.iter().sum();
        let mut left = (all as f64 * share).ceil();
        let reached = self.bytes.iter().position(|bytes| {
            left -= *bytes as f64;
            left <= 0.0
        })?;
        LATENCY_MS.get(reached).copied().filter(|_| all > 0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    const MIB: u64 = 1 << 20;

    fn controller() -> Controller {
        Controller::new(512 * MIB, Policy::default())
    }

    fn sample(seconds: u64, free: u64, filled: u64) -> Sample {
        let at = Duration::from_secs(seconds);
        Sample { at, said: at, free: free * MIB, filled: filled * MIB, stalls: 0 }
    }

    const CALM: Pressure = Pressure { cpu: 0.0, memory: 0.0 };

    #[test]
    fn freed_memory_is_taken_less_the_reserve() {
        let mut it = controller();
        // In use, and never touched.
        assert_eq!(it.sample(sample(1, 100, 412), CALM), None);
        assert_eq!(it.sample(sample(2, 400, 112), CALM), None);
        // 300 MiB were freed.
        let bytes = it.sample(sample(3, 400, 412), CALM).unwrap();
        assert_eq!(bytes, (300 * MIB + 300 * MIB / 8).min(368 * MIB));
        it.pulsed(Duration::from_secs(4), 140 * MIB);
        assert_eq!(it.sample(sample(5, 400, 140), CALM), None);
        // What is left is within the reserve.
        assert_eq!(it.sample(sample(60, 400, 140), CALM), None);
        assert_eq!(it.latencies().quantile_ms(0.99), Some(2000));
    }

    #[test]
    fn a_guest_that_allocates_is_left_alone() {
        let mut it = controller();
        it.sample(sample(1, 400, 512), Pressure { cpu: 90.0, memory: 0.0 });
        assert_eq!(it.sample(sample(2, 300, 512), CALM), None);
        assert!(it.sample(sample(3, 300, 512), CALM).is_some());
        let stalled = Sample { stalls: 7, ..sample(4, 300, 512) };
        assert_eq!(it.sample(stalled, CALM), None);
        assert!(it.guest_needs(300 * MIB, 8) && it.guest_needs(MIB, 7));
        assert!(!it.guest_needs(100 * MIB, 7));
    }

    #[test]
    fn a_busy_host_recycles_later_but_for_want_of_memory() {
        let mut it = controller();
        let busy = Pressure { cpu: 90.0, memory: 1.0 };
        assert_eq!(it.sample(sample(1, 400, 512), busy), None);
        assert_eq!(it.sample(sample(10, 400, 512), busy), None);
        assert!(it.sample(sample(11, 400, 512), busy).is_some());
        let mut it = controller();
        assert!(it.sample(sample(1, 400, 512), Pressure { cpu: 90.0, memory: 20.0 }).is_some());
    }

    #[test]
    fn a_guest_that_takes_it_back_at_once_is_asked_less_and_less_often() {
        let mut it = controller();
        let mut pulses = Vec::new();
        for second in 1..1000 {
            // It fills and frees 300 MiB every second.
            if it.sample(sample(second, 400, 512), CALM).is_some() {
                it.pulsed(Duration::from_secs(second), 200 * MIB);
                pulses.push(second);
            }
        }
        assert!(pulses.len() < 12, "{pulses:?}");
        assert!(pulses.last().unwrap() - pulses[pulses.len() - 2] > 100, "{pulses:?}");
        // Once it is quiet, it is as any other.
        for second in 2000..2020 {
            it.sample(sample(second, 400, 200), CALM);
        }
        assert!(it.sample(sample(3000, 400, 512), CALM).is_some());
        it.pulsed(Duration::from_secs(3001), 200 * MIB);
        (3002..3020).for_each(|second| _ = it.sample(sample(second, 400, 200), CALM));
        assert!(it.sample(sample(3020, 400, 512), CALM).is_some());
    }

    #[test]
    fn latencies_are_those_of_the_oldest_bytes() {
        let mut waiting = Waiting::default();
        let at = Duration::from_secs;
        waiting.set(100, at(0));
        waiting.set(150, at(1));
        waiting.give(90, at(3));
        // What the guest takes back is what it has freed last, and was not returned.
        waiting.set(40, at(2));
        waiting.give(1000, at(9));
        waiting.set(5, at(9));
        let latencies = &waiting.latencies;
        // 90 of the first 100 after 3 s, 10 after 9 s, 30 of the others after 8 s.
        assert_eq!((latencies.bytes[4], latencies.bytes[8]), (90, 40));
        assert_eq!(latencies.bytes.iter().sum::<u64>(), 130);
        assert_eq!(latencies.byte_ms, 90 * 3000 + 10 * 9000 + 30 * 8000);
        assert_eq!(latencies.quantile_ms(0.5), Some(3000));
        assert_eq!(latencies.quantile_ms(0.99), Some(10_000));
        assert_eq!(Latencies::default().quantile_ms(0.5), None);
    }

    /// A guest that frees a page now and then, of which the host takes none, took ever more memory.
    #[test]
    fn moments_are_bounded() {
        let mut waiting = Waiting::default();
        for second in 0..10_000 {
            waiting.set(4096 * (second + 1), Duration::from_secs(second));
        }
        assert_eq!(waiting.freed.len(), FREED_MAX);
        assert_eq!(waiting.freed.iter().map(|(_, bytes)| bytes).sum::<u64>(), 40_960_000);
        assert_eq!(waiting.bytes, 40_960_000);
    }
}
