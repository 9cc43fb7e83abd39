//! One measurement: from a cold start, both containers at once under their load; what is in memory for them then?

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, ensure};
use cofolio_node::{cgroup::Charge, container::bundle::ImageConfig};
use serde::Serialize;

use super::{
    super::{
        measure::{self, OwnFiles, delta},
        memory::Memory,
        setup::Setup,
    },
    container::{Container, Host, MOUNTING},
    content::{Holders, Pages},
    load::Load,
};

/// What one measurement found, in bytes unless a name says pages.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Run {
    pub(super) setup: &'static str,
    /// What the cgroups of the old and of the new image's container are charged.
    pub(super) charges: [Charge; 2],
    /// What another cgroup was charged for mounting both images before, from a cold start.
    pub(super) mounting: Charge,
    /// Pages of the images' files, by mincore.
    pub(super) content: Pages,
    /// What `MemFree` and `MemAvailable` of the machine fell by, load clients and everybody else included.
    pub(super) machine_used: i64,
    pub(super) machine_unavailable: i64,
    /// How much page cache the rest of the machine gained meanwhile, by its cgroups' charges.
    pub(super) elsewhere: i64,
    /// Attempts thrown away before, because somebody dropped caches meanwhile.
    pub(super) discarded: usize,
}

/// Page cache, processes and kernel. Not `total`: version 1 keeps that in batches of 64 pages per CPU.
pub(super) fn whole(charge: &Charge) -> u64 {
    charge.cache + charge.anon + charge.kernel.unwrap_or(0)
}

impl Run {
    /// Page cache, memory of processes and of the kernel.
    pub(super) fn memory(&self) -> u64 {
        self.sum(whole)
    }

    /// A figure of all charges: of both containers, and of mounting both images.
    pub(super) fn sum(&self, figure: impl Fn(&Charge) -> u64) -> u64 {
        self.charges.iter().chain([&self.mounting]).map(figure).sum()
    }
}

/// What does not change from run to run.
pub(super) struct Bench<'a> {
    pub(super) host: Host,
    pub(super) load: &'static Load,
    pub(super) configs: &'a [ImageConfig; 2],
    pub(super) own: OwnFiles,
    /// How long the load is on before memory is looked at.
    pub(super) time: Duration,
}

impl Bench<'_> {
    /// Measures once, and again where somebody dropped caches meanwhile.
    pub(super) fn measure(&self, setup: &mut dyn Setup, holders: &Holders) -> Result<Run> {
        for discarded in 0..measure::ATTEMPTS {
            let attempt = self.attempt(setup, holders);
            let unmounted = setup.unmount();
            let (run, drops) = attempt?;
            unmounted?;
            setup.forget()?;
            if drops == 0 {
                return Ok(Run { discarded, ..run });
            }
        }
        anyhow::bail!("this machine cannot be measured on: somebody drops caches all the time")
    }

    fn start(&self, roots: &[PathBuf; 2]) -> Result<[Container<'_>; 2]> {
        let start = |side: usize| {
            Container::start(&self.host, self.load, &self.configs[side], &roots[side], side)
        };
        Ok([start(0)?, start(1)?])
    }

    /// Both databases made and filled by containers of their own: a server finds its data, usually.
    fn prepare(&self, roots: &[PathBuf; 2]) -> Result<()> {
        let containers = self.start(roots)?;
        for container in &containers {
            container.wait_until_ready()?;
            container.prepare()?;
        }
        for (container, config) in containers.into_iter().zip(self.configs) {
            container.end(config)?;
        }
        Ok(())
    }

    /// Also gives how often caches were dropped meanwhile.
    fn attempt(&self, setup: &mut dyn Setup, holders: &Holders) -> Result<(Run, u64)> {
        let host = &self.host;
        host.clean()?;
        setup.unmount()?;
        measure::cold_start()?;
        self.own.warm()?;
        // Engines mount outside of the container's cgroup. What mounting brings in counts too, and the containers find it.
        let mounter = host.hierarchy.create(MOUNTING)?;
        let inside = mounter.enter()?;
        let roots = [setup.mount(0)?, setup.mount(1)?];
        drop(inside);
        let mounting = mounter.charge()?;
        if !self.load.prepare.is_empty() {
            self.prepare(&roots)?;
            measure::cold_start()?;
            self.own.warm()?;
        }
        self.load.warm();
        host.runtime.ask(Path::new("/"), &["--version"])?;
        measure::wait_for_quiet(measure::SETTLE_MAX);
        host.go_on()?;
        measure::fold_counters();
        let before = Memory::read(Path::new("/"))?;

        let mut containers = self.start(&roots)?;
        let elsewhere = |containers: &[Container<'_>; 2]| -> Result<i64> {
            let [old, new] = containers;
            let all = host.hierarchy.cache_elsewhere(old.cgroup())?;
            Ok(delta(new.charge()?.cache, all))
        };
        let elsewhere_before = elsewhere(&containers)?;
        for container in &containers {
            container.wait_until_ready()?;
        }
        for container in &mut containers {
            container.drive()?;
        }
        host.wait(self.time)?;
        for container in &mut containers {
            container.check()?;
        }

        measure::fold_counters();
        let charges = [containers[0].charge()?, containers[1].charge()?];
        let after = Memory::read(Path::new("/"))?;
        let elsewhere = elsewhere(&containers)? - elsewhere_before;
        // While they run: what they map cannot go.
        let content = holders.count()?;
        let run = Run {
            setup: setup.name(),
            charges,
            mounting,
            content,
            machine_used: delta(after.free, before.free),
            machine_unavailable: delta(after.available, before.available),
            elsewhere,
            discarded: 0,
        };
        ensure!(
            run.charges.iter().all(|charge| whole(charge) > 0),
            "the memory cgroups are charged nothing"
        );
        Ok((run, after.cache_drops - before.cache_drops))
    }
}
