//! `cofolio-bench vm-density`: how many virtual machines fit in a host, if most are idle most of the time.
//!
//! ```text
//! for each engine: start guests ─▶ idle ─▶ cycles: fill ▁▂▅█ hold, remove ▁ … idle
//!                                  │       └▶ host memory of each guest, twice a second
//!                                  └▶ processor time of the idle daemon
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cofolio_cli::interrupt::Cancellable;
use cofolio_node::vm::account::VmReport;
use cofolio_node::vm::ram::Ram;
use cofolio_node::vm::recycler::Policy;
use rustix::process::Signal;
use serde::Serialize;

use super::{Host, HostArgs, Machine, cycles_per_second};
use crate::cleanup;
use crate::daemon::Daemon;
use crate::goals::Goals;
use crate::ksm::{self, Ksm};
use crate::median::median;
use crate::place::{Place, PlaceArgs};
use crate::threads;
use crate::{Outcome, report};

/// The program in the guests' image.
const CANARY: &str = "cofolio-canary";
/// From one sample to the next.
const SAMPLE: Duration = Duration::from_millis(500);
/// How often the daemon is asked.
const ASK: Duration = Duration::from_secs(2);
/// How long a guest's removed files may take to come back to the host.
const RETURN_MAX: Duration = Duration::from_secs(60);
/// Bytes of a file that guests fill.
const FILE_MIB: u64 = 20;
/// Memory of the host of 2017.
const HOST_BYTES: f64 = 230e9;
/// Guests are independent, so all together take their mean and this many standard deviations, at most.
const DEVIATIONS: f64 = 3.0;
/// Reclaim and merge periods of 2017, in seconds.
const RECYCLE_SECONDS: [u32; 2] = [5, 10];
const MERGE_SECONDS: [u32; 2] = [200, 600];
/// How many virtual machines fitted in 2017: raw, with KSM, with both.
const FITTED_2017: [u32; 3] = [67, 73, 516];
const PAGE: f64 = 4096.0;

/// Virtual machines that fit in a host: the experiment of 2017
///
/// Starts guests that fill files in memory up to three quarters of it, remove them, and are idle for the rest of a cycle, each
/// from a moment of its own on: raw; with KSM at full speed; with free page reporting alone; and with the daemon, for each
/// pair of the periods of 2017. The host memory of the guests is counted twice a second, from the second cycle on; the
/// emulator's own memory does not count. KSM must be off, and its settings are restored.
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
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u64).range(20..=86_400))]
    cycle: u64,
    /// Cycles of each guest; the first is not counted
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(2..=100))]
    cycles: u64,
    /// Seconds that a guest keeps its files
    #[arg(long, default_value_t = 2)]
    hold: u64,
    /// Divide the periods of 2017 (5 and 10 s, 200 and 600 s) by this
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=5))]
    scale: u32,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Engine {
    Raw,
    Ksm,
    Reporting,
    Cofolio { recycle_seconds: u32, merge_seconds: u32 },
}

impl Engine {
    /// All of them, with the periods of 2017 divided by `scale`.
    fn all(scale: u32) -> Vec<Self> {
        let scaled = |seconds: u32| (seconds / scale).max(1);
        let pairs = MERGE_SECONDS.iter().flat_map(|merge| RECYCLE_SECONDS.map(|it| (it, *merge)));
        let ours = pairs.map(|(recycle, merge)| Self::Cofolio {
            recycle_seconds: scaled(recycle),
            merge_seconds: scaled(merge),
        });
        [Self::Raw, Self::Ksm, Self::Reporting].into_iter().chain(ours).collect()
    }

    fn title(self) -> String {
        match self {
            Self::Raw => "raw".to_owned(),
            Self::Ksm => "KSM, pages_to_scan=1000000, sleep 0".to_owned(),
            Self::Reporting => "free page reporting".to_owned(),
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
}

/// Host memory at a moment.
#[derive(Debug, Clone, Serialize)]
struct Held {
    seconds: f64,
    /// Private bytes of each guest's memory.
    guests: Vec<u64>,
    /// Bytes of pools that guests share.
    pools: u64,
    /// Bytes that KSM saves of these.
    saved: u64,
}

impl Held {
    fn bytes(&self) -> f64 {
        (self.guests.iter().sum::<u64>() + self.pools) as f64 - self.saved as f64
    }
}

/// Files that a guest has removed.
#[derive(Debug, Clone, Serialize)]
struct Removal {
    bytes: u64,
    /// Bytes that came back to the host.
    returned: u64,
    /// Seconds until half and 99 % of them had.
    p50: f64,
    p99: f64,
    /// Host memory 10 s later, divided by the guest's used memory and the reserve.
    held_of_used: f64,
}

/// Result of an engine.
#[derive(Debug, Serialize)]
struct Ran {
    engine: Engine,
    /// Host memory from the beginning on.
    held: Vec<Held>,
    removals: Vec<Removal>,
    /// Mean and standard deviation of the host memory of one guest; guests share pools equally.
    mean: f64,
    deviation: f64,
    lowest: f64,
    highest: f64,
    /// Guests that fit in [`HOST_BYTES`].
    fit: f64,
    /// Processor seconds per second: of the daemon, when there was nothing to do, and later; and of its
    /// threads; or of KSM.
    idle_cpu: f64,
    cpu: f64,
    recycler_cpu: f64,
    /// Of the VMMs' threads that are no processors.
    vmm_cpu: f64,
    /// Bytes that pulses have returned.
    pulsed: u64,
    /// Processor cycles of the recycler, and of it and the VMMs' threads, per page that came back.
    cycles_per_page: f64,
    all_cycles_per_page: f64,
    seconds: f64,
}

impl Ran {
    /// The highest figure of its removals.
    fn worst(&self, figure: fn(&Removal) -> f64) -> f64 {
        highest(self.removals.iter().map(figure))
    }
}

#[derive(Debug, Serialize)]
struct Figures {
    guests: u32,
    memory_mib: u64,
    cycle: u64,
    cycles_per_second: Option<f64>,
    runs: Vec<Ran>,
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
    for engine in Engine::all(args.scale) {
        say(&engine.title());
        let ran = run_engine(args, &place, &host, engine);
        let stopped = host.stop_all();
        let ran = cleanup::result(&signals.cancel, ran, stopped)?;
        say(&format!("{:.1} MB for each guest, {:.0} fit", ran.mean / 1e6, ran.fit));
        runs.push(ran);
    }
    let figures = Figures {
        guests: args.guests,
        memory_mib: args.memory,
        cycle: args.cycle,
        cycles_per_second: cycles_per_second(),
        runs,
    };
    let goals = goals(args, &figures);
    let root = Path::new("/");
    report::finish(args.place.json.as_deref(), root, &figures, &table(&figures), &goals)
}

fn run_engine(args: &Args, place: &Place, host: &Host<'_>, engine: Engine) -> Result<Ran> {
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
    let ksm = if engine == Engine::Ksm { Some(Ksm::start(true)?) } else { None };
    let mut machines = start(args, host, engine)?;
    let cpu = |machines: &[Machine]| Cpu::take(engine, daemon.as_ref(), machines);
    // The pages of the guests' boot are merged by then.
    let settling = match engine {
        Engine::Cofolio { merge_seconds, .. } => 2 * merge_seconds + 10,
        _ => 10,
    };
    host.wait(Duration::from_secs(settling.into()))?;
    let idle = Duration::from_secs(20);
    let before = cpu(&machines)?;
    host.wait(idle)?;
    let idle_cpu = (cpu(&machines)?.daemon - before.daemon) / idle.as_secs_f64();
    let before = cpu(&machines)?;
    let pulsed_before = pulsed(daemon.as_ref())?;
    machines.iter().try_for_each(|machine| machine.signal(Signal::USR1.as_raw()))?;
    let watched = watch(args, host, engine, daemon.as_ref(), &mut machines)?;
    let after = cpu(&machines)?;
    let pulsed = pulsed(daemon.as_ref())? - pulsed_before;
    drop(ksm);
    Ok(summary(args, engine, watched, idle_cpu, &before, &after, pulsed))
}

fn start(args: &Args, host: &Host<'_>, engine: Engine) -> Result<Vec<Machine>> {
    let Args { guests, memory, cycle, hold, .. } = args;
    let files = memory * 3 / 4 / FILE_MIB;
    let own = host.program.to_str().context("the program's path")?;
    let by: &[&str] = if engine == Engine::Ksm { &[own, "ksm-exec", "--"] } else { &[] };
    // Without a balloon a guest reports nothing either.
    let balloon = u32::from(matches!(engine, Engine::Reporting | Engine::Cofolio { .. }));
    let start = |number: u32| -> Result<Machine> {
        let options = [
            "fill".to_owned(),
            format!("seed={number}"),
            format!("files={files}"),
            format!("mib={FILE_MIB}"),
            format!("cycle={cycle}"),
            format!("hold={hold}"),
            format!("balloon={balloon}"),
            "wait=1".to_owned(),
        ];
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let (name, memory) = (format!("density{number}"), format!("{memory}M"));
        let program = format!("/{CANARY}");
        let options_of_run = ["--memory", &memory, "--entrypoint", &program];
        let mut machine = host.start(by, &name, &options_of_run, "canary:1", &options)?;
        machine.wait_for("ready")?;
        Ok(machine)
    };
    (1..=*guests).map(start).collect()
}

/// Records host memory and the guests' events until all cycles are over.
fn watch(
    args: &Args,
    host: &Host<'_>,
    engine: Engine,
    daemon: Option<&Daemon>,
    machines: &mut [Machine],
) -> Result<Watched> {
    let memory = args.memory << 20;
    let proc = Path::new("/proc");
    let rams = machines.iter().map(|machine| Ok(Ram::find(proc, machine.pid, memory)?));
    let rams = rams.collect::<Result<Vec<_>>>()?;
    let mut watched = Watched { held: Vec::new(), said: Vec::new() };
    let (began, mut asked, mut pools) = (Instant::now(), Duration::ZERO, 0);
    let end = Duration::from_secs(args.cycle * args.cycles);
    while began.elapsed() < end {
        host.wait(SAMPLE)?;
        let at = began.elapsed();
        if let Some(daemon) = daemon.filter(|_| at >= asked + ASK) {
            pools = daemon.client.get::<VmReport>("/v1/machines")?.pool_bytes;
            asked = at;
        }
        let saved = if engine == Engine::Ksm { ksm::sharing_bytes()? } else { 0 };
        let resident = rams.iter().zip(&*machines).map(|(ram, machine)| {
            ram.resident().with_context(|| format!("looking at {}", machine.name))
        });
        let resident = resident.collect::<Result<Vec<_>>>()?;
        let guests: Vec<u64> = resident.iter().map(|it| it.private()).collect();
        let seconds = at.as_secs_f64();
        for (number, machine) in machines.iter_mut().enumerate() {
            for event in machine.events()? {
                let what = event["event"].as_str().unwrap_or_default().to_owned();
                let figure = |name: &str| event[name].as_u64().unwrap_or(0);
                let (bytes, free) = (figure("bytes"), figure("free"));
                let all = resident[number].bytes;
                watched.said.push(Event { number, seconds, what, bytes, free, all });
            }
        }
        watched.held.push(Held { seconds, guests, pools, saved });
    }
    Ok(watched)
}

fn summary(
    args: &Args,
    engine: Engine,
    watched: Watched,
    idle_cpu: f64,
    before: &Cpu,
    after: &Cpu,
    pulsed: u64,
) -> Ran {
    let seconds = (args.cycle * args.cycles) as f64;
    let from = args.cycle as f64;
    let counted = || watched.held.iter().filter(move |held| held.seconds >= from);
    let totals: Vec<f64> = counted().map(Held::bytes).collect();
    let guests = f64::from(args.guests);
    let shared = |held: &Held| (held.pools as f64 - held.saved as f64) / guests;
    let of_guests: Vec<f64> = counted()
        .flat_map(|held| held.guests.iter().map(|bytes| *bytes as f64 + shared(held)))
        .collect();
    let (mean, deviation) = mean_and_deviation(&of_guests);
    let removals = watched.removals(args.memory << 20);
    let returned: u64 = removals.iter().map(|removal| removal.returned).sum();
    let cycles =
        |seconds: f64| seconds * cycles_per_second().unwrap_or(f64::NAN) / (returned as f64 / PAGE);
    let recycler = after.recycler - before.recycler;
    let vmm = after.vmm - before.vmm;
    Ran {
        engine,
        removals,
        mean,
        deviation,
        lowest: totals.iter().copied().fold(f64::INFINITY, f64::min),
        highest: totals.iter().copied().fold(0.0, f64::max),
        fit: fit(mean, deviation),
        idle_cpu,
        cpu: (after.daemon - before.daemon) / seconds,
        recycler_cpu: recycler / seconds,
        vmm_cpu: vmm / seconds,
        pulsed,
        cycles_per_page: cycles(recycler),
        all_cycles_per_page: cycles(recycler + vmm),
        seconds,
        held: watched.held,
    }
}

struct Event {
    number: usize,
    seconds: f64,
    what: String,
    bytes: u64,
    free: u64,
    /// Host memory of the guest then, including merged pages.
    all: u64,
}

struct Watched {
    held: Vec<Held>,
    said: Vec<Event>,
}

impl Watched {
    /// Removals of files, if the guest was watched long enough afterwards.
    fn removals(&self, memory: u64) -> Vec<Removal> {
        let last = self.held.last().map_or(0.0, |held| held.seconds);
        let of = |event: &Event| {
            let later = |what: &'static str| {
                let mut said = self.said.iter().filter(move |it| it.what == what);
                said.find(|it| it.number == event.number && it.seconds > event.seconds)
            };
            let until = later("begun").map_or(last, |begun| begun.seconds);
            let until = until.min(event.seconds + RETURN_MAX.as_secs_f64());
            let after = later("after").filter(|after| after.seconds <= until)?;
            let series = self.held.iter().filter(|it| (event.seconds..until).contains(&it.seconds));
            let series = series.map(|it| (it.seconds, it.guests[event.number]));
            // The guest removed its files after the sample before.
            let filled = self.held.iter().rev().find(|it| it.seconds < event.seconds)?;
            let before = filled.guests[event.number];
            let least = series.clone().map(|(_, bytes)| bytes).min()?;
            // Later merges free pages that the files never had.
            let returned = before.saturating_sub(least).min(event.bytes);
            let when = |share: f64| {
                let bound = before as f64 - returned as f64 * share;
                let mut reached = series.clone().filter(|(_, bytes)| *bytes as f64 <= bound);
                reached.next().map_or(f64::NAN, |(seconds, _)| seconds - filled.seconds)
            };
            let used = memory - after.free + Policy::default().reserve;
            Some(Removal {
                bytes: event.bytes,
                returned,
                p50: when(0.5),
                p99: when(0.99),
                held_of_used: after.all as f64 / used as f64,
            })
        };
        self.said.iter().filter(|event| event.what == "removed").filter_map(of).collect()
    }
}

/// Processor seconds so far.
struct Cpu {
    /// Of the daemon, or of KSM.
    daemon: f64,
    recycler: f64,
    vmm: f64,
}

impl Cpu {
    fn take(engine: Engine, daemon: Option<&Daemon>, machines: &[Machine]) -> Result<Self> {
        let threads = |machine: &Machine| threads::of(&machine.tasks());
        let is_no_processor = |name: &str| !name.starts_with("CPU ");
        let vmm = machines.iter().map(|it| threads(it).seconds_of(is_no_processor)).sum();
        let (own, recycler) = match daemon {
            Some(daemon) => (daemon.cpu_seconds()?, daemon.threads().seconds("recycler")),
            None if engine == Engine::Ksm => (threads::of("/proc").seconds("ksmd"), 0.0),
            None => (0.0, 0.0),
        };
        Ok(Self { daemon: own, recycler, vmm })
    }
}

/// Bytes that pulses have returned.
fn pulsed(daemon: Option<&Daemon>) -> Result<u64> {
    let report = daemon.map(|daemon| daemon.client.get::<VmReport>("/v1/machines")).transpose()?;
    Ok(report.map_or(0, |report| report.returned_bytes))
}

fn mean_and_deviation(figures: &[f64]) -> (f64, f64) {
    let count = figures.len().max(1) as f64;
    let mean = figures.iter().sum::<f64>() / count;
    let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
    (mean, (squares / count).sqrt())
}

/// How many independent guests fit: n means and [`DEVIATIONS`] deviations of their sum, which grows with
/// the root of n, are [`HOST_BYTES`].
fn fit(mean: f64, deviation: f64) -> f64 {
    let spread = DEVIATIONS * deviation;
    let root = ((spread * spread + 4.0 * mean * HOST_BYTES).sqrt() - spread) / (2.0 * mean);
    (root * root).floor()
}

/// The highest figure. Not a number, and no goal is met, if one is missing or there are none.
fn highest(figures: impl Iterator<Item = f64>) -> f64 {
    figures
        .reduce(|most, it| if most.is_nan() || most > it { most } else { it })
        .unwrap_or(f64::NAN)
}

fn goals(args: &Args, figures: &Figures) -> Goals {
    let size = "4 guests or more with 1 GiB or more each, 3 cycles or more";
    let is_of_this_size = args.guests >= 4 && args.memory >= 1024 && args.cycles >= 3;
    let fit =
        |engine| figures.runs.iter().find(|it| it.engine == engine).map_or(f64::NAN, |it| it.fit);
    let ours: Vec<&Ran> = figures.runs.iter().filter(|it| it.engine.is_ours()).collect();
    // The worst of the grid.
    let least = -highest(ours.iter().map(|it| -it.fit));
    let most = |figure: fn(&Ran) -> f64| highest(ours.iter().map(|it| figure(it)));
    Goals::new(size, is_of_this_size)
        .at_most("virtual machines that fit raw, of ours", fit(Engine::Raw) / least, 1.0 / 8.0, "")
        .at_most("with KSM, of ours", fit(Engine::Ksm) / least, 1.0 / 7.0, "")
        .figure("with free page reporting, of ours", fit(Engine::Reporting) / least, "")
        .at_most("daemon with nothing to do, of a processor", most(|it| it.idle_cpu), 0.05, "")
        .at_most("cycles per page that came back", most(|it| it.cycles_per_page), 6500.0, "")
        .figure("with the VMMs' threads", most(|it| it.all_cycles_per_page), "")
        .at_most(
            "99 % of what came back was back within, at worst",
            most(|it| it.worst(|removal| removal.p99)),
            5.0,
            " s",
        )
        .at_most(
            "held of used and reserve, at worst",
            most(|it| it.worst(|removal| removal.held_of_used)),
            1.1,
            "",
        )
}

fn table(figures: &Figures) -> String {
    let mut text = format!(
        "{} guests with {} MiB, {} s from one filling to the next; memory of the guests alone; of the first cycle nothing is \
        counted\n\n\
        | engine | host: min | mean | max | per guest | deviation | fit in 230 GB | of raw | daemon or ksmd | idle | recycler | \
        VMMs' other threads | GB/h | cycles per page | with VMMs | p50 | p99, median and worst | held of used |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        figures.guests, figures.memory_mib, figures.cycle,
    );
    let raw = figures.runs.iter().find(|it| it.engine == Engine::Raw).map_or(f64::NAN, |it| it.fit);
    let guests = f64::from(figures.guests);
    for ran in &figures.runs {
        let of = |figure: fn(&Removal) -> f64| ran.removals.iter().map(figure);
        let returned: u64 = ran.removals.iter().map(|it| it.returned).sum();
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let latency = match ran.engine {
            Engine::Raw | Engine::Ksm => "– | –".to_owned(),
            _ => format!(
                "{:.1} s | {:.1} s, {:.1} s",
                median(of(|it| it.p50)),
                median(of(|it| it.p99)),
                ran.worst(|it| it.p99)
            ),
        };
        let cycles = match ran.engine.is_ours() {
            true => format!("{:.0} | {:.0}", ran.cycles_per_page, ran.all_cycles_per_page),
            false => "– | –".to_owned(),
        };
        text += &format!(
            "| {} | {:.2} GB | {:.2} GB | {:.2} GB | {:.1} MB | {:.1} MB | {:.0} | {:.2} | {} | {} | {} | {} | {:.1} | {cycles} | \
            {latency} | {:.2} |\n",
            ran.engine.title(),
            ran.lowest / 1e9,
            ran.mean * guests / 1e9,
            ran.highest / 1e9,
            ran.mean / 1e6,
            ran.deviation / 1e6,
            ran.fit,
            ran.fit / raw,
            percent(ran.cpu),
            percent(ran.idle_cpu),
            percent(ran.recycler_cpu),
            percent(ran.vmm_cpu),
            returned as f64 / 1e9 / ran.seconds * 3600.0,
            ran.worst(|it| it.held_of_used),
        );
    }
    let [raw, ksm, both] = FITTED_2017;
    text += &format!(
        "| 2017, of 230 GB |  | 164–182 GB |  |  |  | {raw}, KSM {ksm}, both {both} | 1, {:.2}, {:.2} | 22–35 % |  | 6.1–6.8 % |  \
        |  | 6500 |  |  |  |  |\n",
        f64::from(ksm) / f64::from(raw),
        f64::from(both) / f64::from(raw),
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_fit_as_their_sum_allows() {
        assert_eq!(fit(1e9, 0.0), 230.0);
        let many = fit(1e8, 1e8);
        let sum = |count: f64| count * 1e8 + DEVIATIONS * 1e8 * count.sqrt();
        assert!(sum(many) <= HOST_BYTES && sum(many + 1.0) > HOST_BYTES, "{many}");
    }

    /// A run without a single removal met all goals of removals.
    #[test]
    fn a_figure_that_is_missing_is_not_left_out() {
        let of = |figures: &[f64]| highest(figures.iter().copied());
        assert_eq!(of(&[1.0, 3.0, 2.0]), 3.0);
        assert!(of(&[]).is_nan());
        assert!([[f64::NAN, 1.0], [1.0, f64::NAN]].iter().all(|figures| of(figures).is_nan()));
    }

    #[test]
    fn removed_files_come_back_when_the_host_has_them() {
        let held =
            |seconds: f64, bytes: u64| Held { seconds, guests: vec![bytes], pools: 0, saved: 0 };
        let event = |seconds: f64, what: &str| Event {
            number: 0,
            seconds,
            what: what.to_owned(),
            bytes: 900,
            free: (1 << 30) - 100,
            all: 100,
        };
        let mut watched = Watched {
            held: vec![
                held(1.0, 1000),
                held(1.5, 1000),
                held(2.0, 500),
                held(3.0, 100),
                held(20.0, 100),
            ],
            said: vec![event(1.5, "removed"), event(11.5, "after")],
        };
        let found = watched.removals(1 << 30);
        assert_eq!((found[0].returned, found[0].p50, found[0].p99), (900, 1.0, 2.0));
        // Filled again before anything could be seen.
        watched.said.push(event(5.0, "begun"));
        assert!(watched.removals(1 << 30).is_empty());
    }
}
