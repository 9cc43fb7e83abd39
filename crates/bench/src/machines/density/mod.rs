//! `cofolio-bench vm-density`: how many virtual machines fit in a host, if most are idle most of
//! the time.
//!
//! ```text
//! for each engine: start guests ─▶ cycles: fill ▁▂▅█ hold, remove ▁ … ─▶ all idle ─▶ every second
//!                                  host memory, twice a second           │           page of one is
//!                                  processor time                        │           freed
//!                                                                        └▶ daemon's processor time
//! ```

mod beside;
mod cycles;
mod summary;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use cofolio_cli::interrupt::Cancellable;
use cofolio_node::vm::account::VmReport;
use rustix::process::Signal;
use serde::Serialize;

use self::beside::Look;
use self::cycles::Cpu;
use self::summary::{Figures, Measured, Ran, goals, table};
use self::watch::Watch;
use super::{Host, HostArgs, Machine, accel, cycles_per_second};
use crate::cleanup;
use crate::daemon::Daemon;
use crate::ksm::{self, Ksm};
use crate::place::{Place, PlaceArgs};
use crate::{Outcome, report};

/// The program in the guests' image.
const CANARY: &str = "cofolio-canary";
/// Bytes of a file that guests fill.
const FILE_MIB: u64 = 20;
/// Reclaim and merge periods of 2017, in seconds.
const RECYCLE_SECONDS: [u32; 2] = [5, 10];
const MERGE_SECONDS: [u32; 2] = [200, 600];
/// The load of the goals, and its default: seconds of a cycle, cycles, seconds that files are kept,
/// and the divisor of the periods of 2017.
const CYCLE: u64 = 130;
const CYCLES: u64 = 3;
const HOLD: u64 = 4;
const SCALE: u32 = 5;
/// Before the cycles, and between these and the idle time.
const SETTLE: Duration = Duration::from_secs(10);
/// A guest that has freed single pages is watched for so long after it reported its free memory.
const WATCH: Duration = Duration::from_secs(20);

/// Virtual machines that fit in a host: the experiment of 2017
///
/// Starts guests that fill files in memory up to three quarters of it, remove them, and are idle
/// for the rest of a cycle, each from a moment of its own on: raw; with KSM at full speed; with
/// free page reporting alone; with both; and with the daemon, for each pair of the periods of 2017.
/// The host memory of the guests is counted twice a second, from the second cycle on. The goals are
/// of the guests' own memory; further costs are in a table of their own. After the cycles
/// all guests are idle for two merge periods, and then one frees every second page of half of its
/// memory. KSM must be off, and its settings are restored.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench vm-density --kernel vmlinuz cofolio-canary --guests 8 --memory 1024 --json density.json

Exit codes: 0 the goals are met, or the run is smaller than they are of; 1 one is missed; others as for every command.")]
pub(crate) struct Args {
    /// cofolio-canary, the program of the guests
    #[arg(value_name = "FILE")]
    canary: PathBuf,
    /// Guests
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    guests: u32,
    /// MiB of each
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(384..=1 << 20))]
    memory: u64,
    /// Seconds from one filling of a guest to the next
    #[arg(long, default_value_t = CYCLE, value_parser = clap::value_parser!(u64).range(20..=86_400))]
    cycle: u64,
    /// Cycles of each guest; the first is not counted
    #[arg(long, default_value_t = CYCLES, value_parser = clap::value_parser!(u64).range(2..=100))]
    cycles: u64,
    /// Seconds that a guest keeps its files
    #[arg(long, default_value_t = HOLD)]
    hold: u64,
    /// Divide the periods of 2017 (5 and 10 s, 200 and 600 s) by this; none gets shorter than a
    /// second
    #[arg(long, default_value_t = SCALE, value_parser = clap::value_parser!(u32).range(1..=600))]
    scale: u32,
    /// Only these engines [default: all]
    #[arg(long, value_enum, value_name = "ENGINE", value_delimiter = ',')]
    engine: Vec<Kind>,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    Raw,
    Ksm,
    Reporting,
    KsmReporting,
    Cofolio,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Engine {
    Raw,
    Ksm,
    Reporting,
    KsmReporting,
    Cofolio { recycle_seconds: u32, merge_seconds: u32 },
}

impl Engine {
    /// All of them, with the periods of 2017 divided by `scale`. Equal ones only once.
    fn all(scale: u32) -> Vec<Self> {
        let scaled = |seconds: u32| (seconds / scale).max(1);
        let pairs = MERGE_SECONDS.iter().flat_map(|merge| RECYCLE_SECONDS.map(|it| (it, *merge)));
        let ours = pairs.map(|(recycle, merge)| Self::Cofolio {
            recycle_seconds: scaled(recycle),
            merge_seconds: scaled(merge),
        });
        let stock = [Self::Raw, Self::Ksm, Self::Reporting, Self::KsmReporting];
        let mut all: Vec<Self> = stock.into_iter().chain(ours).collect();
        all.dedup();
        all
    }

    fn kind(self) -> Kind {
        match self {
            Self::Raw => Kind::Raw,
            Self::Ksm => Kind::Ksm,
            Self::Reporting => Kind::Reporting,
            Self::KsmReporting => Kind::KsmReporting,
            Self::Cofolio { .. } => Kind::Cofolio,
        }
    }

    fn title(self) -> String {
        const KSM: &str = "KSM, pages_to_scan=1000000, sleep 0";
        match self {
            Self::Raw => "raw".to_owned(),
            Self::Ksm => KSM.to_owned(),
            Self::Reporting => "free page reporting".to_owned(),
            Self::KsmReporting => format!("{KSM}, and free page reporting"),
            Self::Cofolio { recycle_seconds, merge_seconds } => {
                format!(
                    "Cofolio, recycles every {recycle_seconds} s, merges every {merge_seconds} s"
                )
            }
        }
    }

    fn is_ours(self) -> bool {
        matches!(self, Self::Cofolio { .. })
    }

    fn has_ksm(self) -> bool {
        matches!(self, Self::Ksm | Self::KsmReporting)
    }

    fn has_reporting(self) -> bool {
        !matches!(self, Self::Raw | Self::Ksm)
    }

    /// From one merge to the next.
    fn merge_period(self) -> Duration {
        match self {
            Self::Cofolio { merge_seconds, .. } => Duration::from_secs(merge_seconds.into()),
            _ => Duration::ZERO,
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    ksm::ensure_unused()?;
    let signals = Cancellable::begin()?;
    let place = Place::prepare(&args.place, None, &say)?;
    let host = Host::new(&args.host, &place.domain, &signals.cancel)?;
    let image = tempfile::tempdir()?;
    fs::copy(&args.canary, image.path().join(CANARY))
        .with_context(|| args.canary.display().to_string())?;
    host.import(&format!("dir:{}", image.path().display()), "canary:1")?;
    let mut runs = Vec::new();
    let is_asked_for = |it: &Engine| args.engine.is_empty() || args.engine.contains(&it.kind());
    for engine in Engine::all(args.scale).into_iter().filter(is_asked_for) {
        say(&engine.title());
        let ran = run_engine(args, &place, &host, engine);
        let stopped = host.stop_all();
        let ran = cleanup::result(&signals.cancel, ran, stopped)?;
        say(&format!("{:.1} MB for each guest, {:.0} would fit", ran.mean / 1e6, ran.fit));
        runs.push(ran);
    }
    let mut figures = Figures {
        guests: args.guests,
        memory_mib: args.memory,
        cycle: args.cycle,
        accel: accel(),
        cycles_per_second: cycles_per_second(),
        runs,
    };
    figures.set_cycles();
    let goals = goals(args, &figures);
    let root = Path::new("/");
    report::finish(args.place.json.as_deref(), root, &figures, &table(&figures), &goals)
}

fn run_engine(args: &Args, place: &Place, host: &Host<'_>, engine: Engine) -> Result<Ran> {
    let look = Look::before(host)?;
    let daemon = match engine {
        Engine::Cofolio { recycle_seconds, merge_seconds } => {
            let config = place.work.join("vm-density.toml");
            let text = format!(
                "[vm]\nrecycle_seconds = {recycle_seconds}\nmerge_seconds = {merge_seconds}\n"
            );
            fs::write(&config, text)?;
            Some(Daemon::start(Some(&host.program), &place.domain, &config)?)
        }
        _ => None,
    };
    let ksm = if engine.has_ksm() { Some(Ksm::start(true)?) } else { None };
    let machines = start(args, host, engine)?;
    let daemon = daemon.as_ref();
    // When memory begins to count, the pages of the guests' boot are merged: after two periods.
    let cycle = Duration::from_secs(args.cycle);
    host.wait((2 * engine.merge_period() + SETTLE).saturating_sub(cycle).max(SETTLE))?;
    let mut watch = Watch::begin(host, daemon, machines, args.memory << 20, look)?;
    let cpu = |watch: &Watch<'_>| Cpu::take(engine, daemon, watch.machines());
    let (before, pulsed_before) = (cpu(&watch)?, pulsed(daemon)?);
    watch.machines().iter().try_for_each(|it| it.signal(Signal::USR1.as_raw()))?;
    watch.look_until(Duration::from_secs(args.cycle * args.cycles))?;
    let in_cycles = cpu(&watch)?.since(before);
    let pulsed = pulsed(daemon)? - pulsed_before;
    let all = watch.machines().len() * usize::try_from(args.cycles)?;
    watch.look_for_event("after", "files", all)?;
    watch.look_for(SETTLE)?;
    let before = cpu(&watch)?;
    let idle_time = (2 * engine.merge_period()).max(SETTLE);
    watch.look_for(idle_time)?;
    let idle = cpu(&watch)?.since(before);
    if engine.has_reporting() {
        watch.machines()[0].signal(Signal::USR1.as_raw())?;
        watch.look_for_event("after", "pages", 1)?;
        watch.look_for(WATCH)?;
        watch.look_for_event("checked", "pages", 1)?;
    }
    drop(ksm);
    let (watched, idle_seconds) = (watch.watched, idle_time.as_secs_f64());
    let measured = Measured { engine, watched, cpu: in_cycles, idle, idle_seconds, pulsed };
    Ok(Ran::new(args, measured))
}

fn start(args: &Args, host: &Host<'_>, engine: Engine) -> Result<Vec<Machine>> {
    let Args { guests, memory, cycle, cycles, hold, .. } = args;
    let files = memory * 3 / 4 / FILE_MIB;
    let own = host.program.to_str().context("the program's path")?;
    let by: &[&str] = if engine.has_ksm() { &[own, "ksm-exec", "--"] } else { &[] };
    // Without a balloon a guest reports nothing either.
    let balloon = u32::from(engine.has_reporting());
    let start = |number: u32| -> Result<Machine> {
        let options = [
            "fill".to_owned(),
            format!("seed={number}"),
            format!("files={files}"),
            format!("mib={FILE_MIB}"),
            format!("cycle={cycle}"),
            format!("rounds={cycles}"),
            format!("hold={hold}"),
            format!("pages={}", memory / 2),
            format!("balloon={balloon}"),
            "wait=1".to_owned(),
        ];
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let (name, memory) = (format!("density{number}"), format!("{memory}M"));
        let program = format!("/{CANARY}");
        let options_of_run = ["--memory", &memory, "--entrypoint", &program];
        host.start(by, &name, &options_of_run, "canary:1", &options)
    };
    let mut machines = (1..=*guests).map(start).collect::<Result<Vec<_>>>()?;
    machines.iter_mut().try_for_each(|machine| machine.wait_for("ready").map(drop))?;
    Ok(machines)
}

/// Bytes that pulses have returned.
fn pulsed(daemon: Option<&Daemon>) -> Result<u64> {
    let report = daemon.map(|daemon| daemon.client.get::<VmReport>("/v1/machines")).transpose()?;
    Ok(report.map_or(0, |report| report.returned_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_those_of_2017_divided() {
        let ours = |scale| -> Vec<(u32, u32)> {
            let periods = |it| match it {
                Engine::Cofolio { recycle_seconds, merge_seconds } => {
                    Some((recycle_seconds, merge_seconds))
                }
                _ => None,
            };
            Engine::all(scale).into_iter().filter_map(periods).collect()
        };
        assert_eq!(ours(5), [(1, 40), (2, 40), (1, 120), (2, 120)]);
        assert_eq!(ours(600), [(1, 1)]);
    }
}
