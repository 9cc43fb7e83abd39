//! Processor time of an engine, and the part of it that each recycled page costs.

use anyhow::Result;
use serde::Serialize;

use super::super::Machine;
use super::Engine;
use crate::daemon::Daemon;
use crate::threads;

const PAGE: f64 = 4096.0;

/// Processor seconds: so far, or of a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Cpu {
    /// Of the daemon, or of KSM.
    pub(super) engine: f64,
    /// Of the daemon's threads "recycler".
    pub(super) recycler: f64,
    /// Of its thread "address-space", which looks at VMMs for the others, also for the merger; and
    /// of its threads that have ended, whose names nobody knows.
    pub(super) accesses: f64,
    /// Of the VMMs' threads that are no virtual processors.
    pub(super) vmm: f64,
    /// Of these, the shim's, which merges.
    pub(super) shim: f64,
}

impl Cpu {
    pub(super) fn take(
        engine: Engine,
        daemon: Option<&Daemon>,
        machines: &[Machine],
    ) -> Result<Self> {
        let mut cpu = Self::default();
        for machine in machines {
            let threads = threads::of(&machine.tasks());
            cpu.vmm += threads.seconds_of(|name| !name.starts_with("CPU "));
            cpu.shim += threads.seconds("cofolio-shim");
        }
        if let Some(daemon) = daemon {
            cpu.engine = daemon.cpu_seconds()?;
            let threads = daemon.threads();
            let ended = cpu.engine - threads.seconds_of(|_| true);
            cpu.recycler = threads.seconds("recycler");
            cpu.accesses = threads.seconds("address-space") + ended.max(0.0);
        } else if engine.has_ksm() {
            cpu.engine = threads::of("/proc").seconds("ksmd");
        }
        Ok(cpu)
    }

    /// From a moment to a later one.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            engine: self.engine - before.engine,
            recycler: self.recycler - before.recycler,
            accesses: self.accesses - before.accesses,
            vmm: self.vmm - before.vmm,
            shim: self.shim - before.shim,
        }
    }
}

/// Processor cycles for each page that pulses returned.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Cycles {
    pub(super) recycler: f64,
    pub(super) accesses: f64,
    /// Of the VMMs' threads, less their cycles with free page reporting alone.
    pub(super) vmm: f64,
    /// The shim's part of `vmm`.
    pub(super) shim: f64,
}

impl Cycles {
    /// `reporting` is the processor time of the VMMs' threads in a run of the same length with free
    /// page reporting alone.
    /// Not a number, and no goal is met, if nothing was pulsed or the two cannot be compared.
    pub(super) fn per_page(
        cpu: &Cpu,
        reporting: Option<f64>,
        pulsed: u64,
        per_second: Option<f64>,
    ) -> Self {
        let pages = if pulsed > 0 { pulsed as f64 / PAGE } else { f64::NAN };
        let cycles = |seconds: f64| seconds * per_second.unwrap_or(f64::NAN) / pages;
        // No machine takes less for more work: that would be chance.
        let more =
            reporting.map_or(
                f64::NAN,
                |reporting| {
                    if cpu.vmm > reporting { cpu.vmm - reporting } else { 0.0 }
                },
            );
        Self {
            recycler: cycles(cpu.recycler),
            accesses: cycles(cpu.accesses),
            vmm: cycles(more),
            shim: cycles(cpu.shim),
        }
    }

    pub(super) fn sum(&self) -> f64 {
        self.recycler + self.accesses + self.vmm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: Cpu = Cpu { engine: 9.0, recycler: 1.0, accesses: 2.0, vmm: 7.0, shim: 0.5 };

    /// Accesses and the VMMs' threads were left out, and pages that reporting had returned divided.
    #[test]
    fn a_page_costs_all_that_works_for_it() {
        let of = |reporting, pulsed| Cycles::per_page(&CPU, reporting, pulsed, Some(1e6));
        let cycles = of(Some(4.0), 1000 * 4096);
        assert_eq!((cycles.recycler, cycles.accesses, cycles.vmm), (1e3, 2e3, 3e3));
        assert_eq!(cycles.sum(), 6e3);
        assert_eq!(of(Some(8.0), 1000 * 4096).vmm, 0.0);
        assert!(of(Some(4.0), 0).sum().is_nan());
        assert!(of(None, 4096).sum().is_nan());
    }

    #[test]
    fn times_are_differences() {
        let half = Cpu { engine: 4.5, recycler: 0.5, accesses: 1.0, vmm: 3.5, shim: 0.25 };
        assert_eq!(CPU.since(half), half);
    }
}
