//! `cofolio-bench vm-merge`: how fast duplicate pages of real guests are merged: the merger against
//! KSM.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cofolio_cli::interrupt::Cancellable;
use cofolio_node::vm::merger::{MergePolicy, Merger};
use cofolio_node::vm::ram::Ram;
use serde::Serialize;

use super::{Host, HostArgs, Machine};
use crate::goals::Goals;
use crate::ksm::{self, Ksm};
use crate::median::median;
use crate::merge::{CPU_MIN, DONE, SPEED_MIN};
use crate::place::{Place, PlaceArgs};
use crate::{Outcome, cleanup, report, threads};

/// Time that an engine works on guests.
const ENGINE: Duration = Duration::from_secs(40);
/// Time between two samples of KSM; the merger is sampled after each pass.
const LOOK: Duration = Duration::from_millis(20);
/// Time between two passes of the merger once it is done.
const PERIOD: Duration = Duration::from_secs(1);
/// Time between the start of the last guest and the first sample.
const SETTLE: Duration = Duration::from_secs(10);
const PAGE: u64 = 4096;
/// A Redis with 200 MB of data, the same in all guests.
const SCRIPT: &str = "
redis-server --save '' --enable-debug-command yes >/dev/null &
until redis-cli debug populate 150000 key 1024 >/dev/null 2>&1; do sleep 1; done
echo '{\"event\":\"ready\"}'
wait";

/// Merging of duplicate pages of real guests: the merger against KSM
///
/// Starts guests of an image, and lets one engine merge their pages: KSM at full speed
/// (pages_to_scan = 1000000, sleep_millisecs = 0), or the merger. Both also merge single pages. An
/// engine is done when it has saved 95 % of the pages that it saves in the end. KSM must be off,
/// and its settings are restored.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench vm-merge corpus/out/redis/new --kernel vmlinuz --json vm-merge.json

Exit codes: 0 the goals are met, or the run is smaller than they are of; 1 one is missed; others as for every command.")]
pub(crate) struct Args {
    /// OCI layout directory, OCI archive or `docker save` archive
    image: String,
    /// Script of the guests; prints {"event":"ready"} when it is ready [default: Redis with 150000
    /// keys]
    #[arg(long, value_name = "SCRIPT", hide_default_value = true, default_value = SCRIPT)]
    script: String,
    /// Guests
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=1000))]
    guests: u32,
    /// MiB of each
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(128..=1 << 20))]
    memory: u64,
    /// How often each engine works on new guests, in turn
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Engine {
    Ksm,
    Merger,
}

impl Engine {
    fn title(self) -> &'static str {
        match self {
            Self::Ksm => "KSM, pages_to_scan=1000000, sleep 0",
            Self::Merger => "merger",
        }
    }
}

/// Progress of an engine at a moment.
#[derive(Debug, Clone, Copy, Serialize)]
struct Moment {
    seconds: f64,
    /// Saved pages.
    saved: u64,
    /// Processor seconds of the engine.
    cpu: f64,
}

/// Result of an engine in a round.
#[derive(Debug, Serialize)]
struct Ran {
    engine: Engine,
    /// Private pages of the guests before.
    held: u64,
    moments: Vec<Moment>,
}

impl Ran {
    fn saved(&self) -> u64 {
        self.moments.iter().map(|it| it.saved).max().unwrap_or(0)
    }

    /// The moment at which it was done.
    fn done(&self) -> Option<Moment> {
        let enough = self.saved() as f64 * DONE;
        self.moments.iter().find(|it| it.saved as f64 >= enough).copied()
    }

    fn per_second(&self) -> f64 {
        self.done().map_or(f64::NAN, |it| it.saved as f64 / it.seconds)
    }

    fn per_cpu_second(&self) -> f64 {
        self.done().map_or(f64::NAN, |it| it.saved as f64 / it.cpu)
    }
}

#[derive(Debug, Serialize)]
struct Figures {
    guests: u32,
    memory_mib: u64,
    script: String,
    runs: Vec<Ran>,
}

impl Figures {
    fn median(&self, engine: Engine, figure: impl Fn(&Ran) -> f64) -> f64 {
        median(self.runs.iter().filter(|it| it.engine == engine).map(figure))
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    ksm::ensure_unused()?;
    let signals = Cancellable::begin()?;
    let place = Place::prepare(&args.place, None, &say)?;
    let host = Host::new(&args.host, &place.domain, &signals.cancel)?;
    host.import(&args.image, "merge:1")?;
    let mut runs = Vec::new();
    for round in 1..=args.rounds {
        for engine in [Engine::Ksm, Engine::Merger] {
            say(&format!("round {round}, {}", engine.title()));
            let ran = run_engine(args, &host, engine);
            let stopped = host.stop_all();
            let ran = cleanup::result(&signals.cancel, ran, stopped)?;
            say(&format!("{} of {} pages, {:?}", ran.saved(), ran.held, ran.done()));
            runs.push(ran);
        }
    }
    let (guests, memory_mib, script) = (args.guests, args.memory, args.script.clone());
    let figures = Figures { guests, memory_mib, script, runs };
    let (root, goals) = (Path::new("/"), goals(args, &figures));
    report::finish(args.place.json.as_deref(), root, &figures, &table(&figures), &goals)
}

fn run_engine(args: &Args, host: &Host<'_>, engine: Engine) -> Result<Ran> {
    let own = host.program.to_str().context("the program's path")?;
    let by: &[&str] = if engine == Engine::Ksm { &[own, "ksm-exec", "--"] } else { &[] };
    let memory = format!("{}M", args.memory);
    let options = ["--memory", &memory, "--user", "0", "--entrypoint", "sh"];
    let start = |number| {
        host.start(by, &format!("merge{number}"), &options, "merge:1", &["-c", &args.script])
    };
    let mut machines = (0..args.guests).map(start).collect::<Result<Vec<_>>>()?;
    machines.iter_mut().try_for_each(|machine| machine.wait_for("ready").map(drop))?;
    host.wait(SETTLE)?;
    let rams = machines
        .iter()
        .map(|machine| Ok(Ram::find(Path::new("/proc"), machine.pid, args.memory << 20)?));
    let rams = rams.collect::<Result<Vec<_>>>()?;
    let private = || -> Result<u64> {
        let all = rams.iter().map(|ram| Ok(ram.resident()?.private() / PAGE));
        all.sum()
    };
    let held = private()?;
    let moments = match engine {
        Engine::Ksm => with_ksm(host)?,
        Engine::Merger => with_merger(host, &machines, held, &private)?,
    };
    Ok(Ran { engine, held, moments })
}

fn with_ksm(host: &Host<'_>) -> Result<Vec<Moment>> {
    let cpu = || threads::of("/proc").seconds("ksmd");
    let (before, began) = (cpu(), Instant::now());
    let _ksm = Ksm::start(true)?;
    let mut moments = Vec::new();
    while began.elapsed() < ENGINE {
        host.wait(LOOK)?;
        let saved = ksm::saved_pages()?;
        moments.push(Moment { seconds: began.elapsed().as_secs_f64(), saved, cpu: cpu() - before });
    }
    Ok(moments)
}

fn with_merger(
    host: &Host<'_>,
    machines: &[Machine],
    held: u64,
    private: &dyn Fn() -> Result<u64>,
) -> Result<Vec<Moment>> {
    let cpu = || {
        let shims = machines.iter().map(|it| threads::of(&it.tasks()).seconds("cofolio-shim"));
        threads::own_seconds() + shims.sum::<f64>()
    };
    let default = MergePolicy::default();
    // As fast as it can.
    let policy = MergePolicy { run_min: 1, share: default.threads as f64, ..default };
    let mut merger = Merger::new(policy);
    let (before, began) = (cpu(), Instant::now());
    let mut moments: Vec<Moment> = Vec::new();
    while began.elapsed() < ENGINE {
        let report = merger.pass(host.targets(), &|line| eprintln!("{line}"));
        let saved = held.saturating_sub(private()? + report.pool_bytes / PAGE);
        moments.push(Moment { seconds: began.elapsed().as_secs_f64(), saved, cpu: cpu() - before });
        // Two looks right behind each other: KSM does not wait either.
        if moments.len() > 2 {
            host.wait(PERIOD)?;
        }
    }
    Ok(moments)
}

fn goals(args: &Args, figures: &Figures) -> Goals {
    let size = "4 guests or more with 512 MiB or more each, 3 rounds or more";
    let is_of_this_size = args.guests >= 4 && args.memory >= 512 && args.rounds >= 3;
    let of = |figure: &dyn Fn(&Ran) -> f64| {
        figures.median(Engine::Ksm, figure) / figures.median(Engine::Merger, figure)
    };
    // The bounds are of "at least": the inverse is at most.
    Goals::new(size, is_of_this_size)
        .at_most(
            "KSM's pages per second, of the merger's",
            of(&Ran::per_second),
            1.0 / SPEED_MIN,
            "",
        )
        .at_most(
            "KSM's pages per processor second, of the merger's",
            of(&Ran::per_cpu_second),
            1.0 / CPU_MIN,
            "",
        )
        .figure("pages that KSM saved, of the merger's", of(&|it| it.saved() as f64), "")
}

fn table(figures: &Figures) -> String {
    let mut text = format!(
        "{} guests with {} MiB each; medians of {} rounds\n\n\
        | engine | pages before | saved | 95 % of these after | pages/s | CPU | pages per CPU second |\n\
        |---|--:|--:|--:|--:|--:|--:|\n",
        figures.guests,
        figures.memory_mib,
        figures.runs.len() / 2,
    );
    for engine in [Engine::Ksm, Engine::Merger] {
        let median = |figure: &dyn Fn(&Ran) -> f64| figures.median(engine, figure);
        let done =
            |ran: &Ran, figure: fn(&Moment) -> f64| ran.done().map_or(f64::NAN, |it| figure(&it));
        text += &format!(
            "| {} | {:.0} | {:.0} | {:.2} s | {:.0} | {:.2} s | {:.0} |\n",
            engine.title(),
            median(&|it| it.held as f64),
            median(&|it| it.saved() as f64),
            median(&|it| done(it, |moment| moment.seconds)),
            median(&Ran::per_second),
            median(&|it| done(it, |moment| moment.cpu)),
            median(&Ran::per_cpu_second),
        );
    }
    text
}
