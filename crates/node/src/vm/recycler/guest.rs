//! One guest: its samples, its pulses, and what came of them.

use std::io;
use std::time::Duration;

use super::Recycling;
use super::balloon::Balloon;
use super::controller::{Controller, Latencies, Policy, Pressure, Sample};
use super::host::{Filled, Host};

/// From one look at a balloon that changes to the next.
pub(super) const STEP: Duration = Duration::from_millis(50);
/// A balloon that has not grown for so long will not grow any more.
const STALLED: Duration = Duration::from_millis(500);
/// A pulse inflates for at most so long.
const INFLATE_MAX: Duration = Duration::from_secs(5);
/// A balloon that is not let go for so long is asked again, and looked at once a second.
const DEFLATE_MAX: Duration = Duration::from_secs(10);
const DEFLATE_LOOK: Duration = Duration::from_secs(1);
/// After a pulse the guest's figures are still those from within it: they are waited for so long.
const FIGURES_LOOK: Duration = Duration::from_millis(250);
const FIGURES_MAX: Duration = Duration::from_secs(3);

/// A guest, its balloon, and what the host holds of it.
pub(super) struct Guest {
    memory: u64,
    balloon: Box<dyn Balloon>,
    host: Box<dyn Host>,
    controller: Controller,
    phase: Phase,
    due: Duration,
    recycling: Recycling,
    /// What the host held for it alone when the pulse began.
    before: u64,
    /// When the last pulse ended.
    pulsed: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    /// Down to `target` bytes outside of the balloon.
    Inflating {
        target: u64,
        began: Duration,
        lowest: u64,
        lowered: Duration,
    },
    Deflating {
        began: Duration,
        asked: Duration,
    },
}

impl Guest {
    /// With `memory` bytes. A balloon that is inflated is let go: an earlier recycler was killed
    /// within a pulse.
    ///
    /// # Errors
    /// Those of the balloon and of looking at the VMM's process.
    pub(super) fn new(
        memory: u64,
        mut balloon: Box<dyn Balloon>,
        mut host: Box<dyn Host>,
        policy: Policy,
        now: Duration,
    ) -> io::Result<Self> {
        let mut phase = Phase::Idle;
        // Also where it is not inflated yet: the guest may follow an earlier request late.
        balloon.set(memory)?;
        if balloon.actual()? < memory {
            phase = Phase::Deflating { began: now, asked: now };
        }
        let before = host.count()?.private;
        let mut guest = Self {
            memory,
            balloon,
            host,
            controller: Controller::new(memory, policy),
            phase,
            due: now,
            recycling: Recycling::default(),
            before,
            pulsed: None,
        };
        guest.recycling.refusal = guest.refusal()?;
        Ok(guest)
    }

    /// When [`Guest::step`] is to be called next.
    pub(super) fn due(&self) -> Duration {
        self.due
    }

    /// What was done with it.
    pub(super) fn recycling(&self) -> &Recycling {
        &self.recycling
    }

    /// How long freed memory waited for its return.
    pub(super) fn latencies(&self) -> &Latencies {
        self.controller.latencies()
    }

    /// Lets its balloon go, if a pulse goes on.
    ///
    /// # Errors
    /// Those of the balloon.
    pub(super) fn end(&mut self) -> io::Result<()> {
        match self.phase {
            Phase::Idle => Ok(()),
            _ => self.balloon.set(self.memory),
        }
    }

    /// Does what is due.
    ///
    /// # Errors
    /// Those of the balloon and of looking at the VMM's process.
    pub(super) fn step(&mut self, now: Duration, pressure: Pressure) -> io::Result<()> {
        match self.phase {
            Phase::Idle => self.sample(now, pressure),
            Phase::Inflating { target, began, lowest, lowered } => {
                self.due = now + STEP;
                let actual = self.balloon.actual()?;
                let (lowest, lowered) =
                    if actual < lowest { (actual, now) } else { (lowest, lowered) };
                self.phase = Phase::Inflating { target, began, lowest, lowered };
                let said = self.balloon.guest()?;
                let needs = said.is_some_and(|it| self.controller.guest_needs(it.free, it.stalls));
                let abort = needs || self.controller.host_needs(pressure);
                let is_over = actual <= target
                    || now >= lowered + STALLED
                    || now >= began + INFLATE_MAX
                    || abort;
                if is_over {
                    self.recycling.aborted += u64::from(abort);
                    self.balloon.set(self.memory)?;
                    self.phase = Phase::Deflating { began: now, asked: now };
                }
                Ok(())
            }
            Phase::Deflating { began, asked } => {
                if self.balloon.actual()? >= self.memory {
                    let filled = self.host.count()?;
                    self.recycling.returned_bytes += self.before.saturating_sub(filled.private);
                    self.controller.pulsed(now, filled.bytes());
                    self.phase = Phase::Idle;
                    self.pulsed = Some(now);
                    self.due = now + FIGURES_LOOK;
                    return Ok(());
                }
                let is_late = now >= began + DEFLATE_MAX;
                self.due = now + if is_late { DEFLATE_LOOK } else { STEP };
                if now >= asked + DEFLATE_MAX {
                    self.balloon.set(self.memory)?;
                    self.phase = Phase::Deflating { began, asked: now };
                }
                Ok(())
            }
        }
    }

    fn sample(&mut self, now: Duration, pressure: Pressure) -> io::Result<()> {
        self.due = now + self.controller.period();
        let Some(guest) = self.balloon.guest()? else { return Ok(()) };
        let said = now.saturating_sub(guest.age);
        if let Some(pulsed) = self.pulsed.filter(|pulsed| said <= *pulsed) {
            if now < pulsed + FIGURES_MAX {
                self.due = now + FIGURES_LOOK;
            }
            return Ok(());
        }
        // It may say anything.
        let (free, stalls) = (guest.free.min(self.memory), guest.stalls);
        let sample = |filled: Filled| {
            let filled = filled.bytes();
            Sample { at: now, said, free, filled, stalls }
        };
        let estimate = self.host.estimate()?;
        // Counted only where a pulse may follow: the emulator's own memory changes as well.
        let excess = self.controller.excess(&sample(estimate));
        let filled = if excess > 0 { self.host.count()? } else { estimate };
        let bytes = self.controller.sample(sample(filled), pressure);
        self.recycling.free_bytes = free;
        self.recycling.cache_bytes = guest.caches.min(self.memory);
        self.recycling.unreturned_bytes = self.controller.unreturned(&sample(filled));
        let Some(bytes) = bytes else { return Ok(()) };
        // Asked before each pulse: devices come and go, and a guest's driver begins late.
        self.recycling.refusal = self.refusal()?;
        if self.recycling.refusal.is_some() {
            return Ok(());
        }
        // Whole MiB, since Firecracker has no other sizes.
        let target = self.memory.saturating_sub(bytes).next_multiple_of(1 << 20).min(self.memory);
        self.before = filled.private;
        self.balloon.set(target)?;
        self.recycling.pulses += 1;
        self.phase = Phase::Inflating { target, began: now, lowest: self.memory, lowered: now };
        self.due = now + STEP;
        Ok(())
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        match self.host.refusal()? {
            None => self.balloon.refusal(),
            refusal => Ok(refusal),
        }
    }
}
