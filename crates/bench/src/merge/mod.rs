//! `cofolio-bench merge`: how fast duplicate pages are merged, what that costs, and what writers
//! notice: the merger with its shim against KSM, on the same memory in the same run.
//!
//! ```text
//! for each engine: start processes ─▶ merging, until 95 % is saved ─▶ afterwards ─▶ pause
//!                                     └▶ times of writes             └▶ the same  └▶ clean passes,
//!                                                                                    new duplicates
//! ```

pub(crate) mod worker;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cofolio_cli::exit::{Exit, Fail};
use cofolio_node::vm::merger::{MergePolicy, MergeReport, Merger, Target};
use cofolio_sys::pagemap::{Query, category, scan};
use serde::Serialize;

use crate::Outcome;
use crate::goals::Goals;
use crate::ksm::{self, Ksm};
use crate::median::highest;
use crate::place::lock_machine;
use crate::report;
use crate::threads;
use crate::usage_lists::status_bytes;
use worker::{Said, Writes};

/// An engine is done when it has saved this share of all that can be saved.
pub(crate) const DONE: f64 = 0.95;
/// An engine that is not done after so long is not going to be.
const ENGINE_MAX: Duration = Duration::from_secs(60);
/// The same for an engine with the settings that it comes with.
const DEFAULTS_MAX: Duration = Duration::from_secs(30);
/// Merged pages are written to for so long, and the engine goes on.
const AFTERWARDS: Duration = Duration::from_secs(5);
/// The merger's period, once it has done its work; with its defaults from the beginning.
const PERIOD: Duration = Duration::from_secs(1);
/// From one look at what was merged to the next.
const LOOK: Duration = Duration::from_millis(20);
const PAGE: u64 = 4096;
/// Goals against KSM: pages per second, and per second of processor time.
pub(crate) const SPEED_MIN: f64 = 3.0;
pub(crate) const CPU_MIN: f64 = 2.0;
/// Passes over clean memory, and the goal for one, in milliseconds per GiB.
const CLEAN_PASSES: u32 = 50;
const CLEAN_MS_MAX: f64 = 1.0;
/// Goals for a guest's writes.
const P99_US_MAX: f64 = 100.0;
const STALL_US_MAX: f64 = 20_000.0;

/// Merging of duplicate pages: the merger against KSM
///
/// Starts processes with private memory of which 45 % is common to all and 10 % is zeros, with a
/// writer in each, and lets each engine merge it: KSM at full speed (pages_to_scan = 1000000,
/// sleep_millisecs = 0, use_zero_pages = 1), on all of the memory or guided, and with its defaults;
/// the merger at full speed (single pages too, no wait between passes) with one thread and with
/// several, and as it comes but with a period of 1 s. Guided means that each process names the
/// pages that can be merged, and no others; it knows them, so finding them takes no time here.
/// Writes are timed while pages are merged and for 5 s afterwards. Every word is checked while they
/// run and at the end. KSM must be off, and its settings are restored.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench merge --guests 4 --memory 512 --rounds 5 --json merge.json

Exit codes: 0 the goals are met, or the run is smaller than they are of; 1 one is missed; others as for every command.")]
pub(crate) struct Args {
    /// Processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=64))]
    guests: u64,
    /// Memory of each, in MiB
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(8..=65536))]
    memory: u64,
    /// How often each engine runs, in turn
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Pages per thousand that each process writes to in a second
    #[arg(long, default_value_t = 10)]
    writes: u64,
    /// Keep huge pages out of the memory
    #[arg(long)]
    small: bool,
    /// The library of the merger [default: ../lib/cofolio/libcofolio_shim.so from this program's directory]
    #[arg(long, value_name = "FILE")]
    shim: Option<PathBuf>,
    /// Write every figure to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Engine {
    /// Nothing is merged.
    None,
    KsmDefaults,
    Ksm,
    KsmGuided,
    MergerDefaults,
    MergerOne,
    Merger,
}

impl Engine {
    const ALL: [Self; 7] = [
        Self::None,
        Self::KsmDefaults,
        Self::Ksm,
        Self::KsmGuided,
        Self::MergerDefaults,
        Self::MergerOne,
        Self::Merger,
    ];

    fn title(self) -> String {
        match self {
            Self::None => "none".to_owned(),
            Self::KsmDefaults => {
                "KSM, its defaults: pages_to_scan=100, sleep 20 ms, use_zero_pages=0".to_owned()
            }
            Self::Ksm => "KSM, pages_to_scan=1000000, sleep 0, use_zero_pages=1".to_owned(),
            Self::KsmGuided => "the same, guided by the processes".to_owned(),
            Self::MergerDefaults => defaults_title(),
            Self::MergerOne => "merger at full speed, run_min 1, 1 thread".to_owned(),
            Self::Merger => {
                let threads = MergePolicy::default().threads;
                format!("merger at full speed, run_min 1, {threads} threads")
            }
        }
    }

    fn is_ksm(self) -> bool {
        matches!(self, Self::Ksm | Self::KsmGuided | Self::KsmDefaults)
    }

    fn is_merger(self) -> bool {
        matches!(self, Self::MergerDefaults | Self::MergerOne | Self::Merger)
    }

    /// Time after which it is given up.
    fn max(self) -> Duration {
        match self {
            Self::KsmDefaults | Self::MergerDefaults => DEFAULTS_MAX,
            _ => ENGINE_MAX,
        }
    }

    /// The policy of a merger. At full speed it merges single pages too, as KSM does, and takes all
    /// the time that its threads can get.
    fn policy(self) -> MergePolicy {
        let default = defaults();
        let threads = if self == Self::MergerOne { 1 } else { default.threads };
        match self {
            Self::MergerDefaults => default,
            _ => MergePolicy { run_min: 1, threads, share: threads as f64, ..default },
        }
    }
}

/// The merger's defaults, but for the period: with 10 s it would be done no sooner than after two
/// of these.
pub(crate) fn defaults() -> MergePolicy {
    MergePolicy { period: PERIOD, ..MergePolicy::default() }
}

/// What a row of [`defaults`] is called.
pub(crate) fn defaults_title() -> String {
    let MergePolicy { run_min, threads, share, period, .. } = defaults();
    let seconds = period.as_secs();
    format!(
        "merger, its defaults (run_min {run_min}, {threads} threads, {share} of a processor), but \
        with a period of {seconds} s"
    )
}

/// What came of an engine in a round.
#[derive(Debug, Clone, Default, Serialize)]
struct Ran {
    /// Seconds until 95 % of what can be saved was saved; none if it never was.
    done_seconds: Option<f64>,
    /// The most pages that were saved until then.
    saved_pages: u64,
    /// Pages saved at the end of [`AFTERWARDS`]. Writes undo merging meanwhile.
    left_pages: u64,
    /// Seconds until then, or until it was given up.
    seconds: f64,
    /// Processor seconds of the engine until then.
    cpu_seconds: f64,
    /// Median milliseconds of a pass right behind another one, when next to nothing was written.
    clean_ms_per_gib: Option<f64>,
    /// Seconds until new duplicates, in runs of [`worker::FRESH_RUN`] pages, were merged, with the
    /// merger's period.
    fresh_seconds: Vec<f64>,
    /// Words that were not what they should be.
    wrong: u64,
    /// Writes while pages were merged, and in [`AFTERWARDS`]: the higher figures of the processes.
    /// None if a process had none.
    merging: Option<Writes>,
    afterwards: Option<Writes>,
}

/// Writes of a phase.
type WritesOf = fn(&Ran) -> Option<Writes>;

#[derive(Debug, Serialize)]
struct Figures {
    guests: u64,
    memory_mib: u64,
    /// Pages that can be saved if nobody writes to them.
    mergeable_pages: u64,
    rounds: BTreeMap<Engine, Vec<Ran>>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let own = std::env::current_exe().context("finding this program")?;
    let beside = own.parent().unwrap_or(Path::new("/")).join("../lib/cofolio/libcofolio_shim.so");
    let shim = args.shim.clone().unwrap_or(beside);
    if !shim.is_file() {
        let what = format!("{} is missing", shim.display());
        return Err(Fail::new(Exit::Missing, what).hint("`tools/guest` builds it").into());
    }
    // KSM is one of the whole machine.
    let _alone = lock_machine(&|text| eprintln!("{text}"))?;
    ksm::ensure_unused()?;
    let pages = usize::try_from(args.memory << 20 >> 12)?;
    let mergeable = worker::mergeable(args.guests, pages);
    let mut rounds: BTreeMap<Engine, Vec<Ran>> = BTreeMap::new();
    for round in 0..args.rounds {
        for engine in Engine::ALL {
            let ran = run_engine(args, engine, &shim, pages, mergeable);
            let ran = ran.with_context(|| engine.title())?;
            eprintln!("round {}, {}: {ran:?}", round + 1, engine.title());
            rounds.entry(engine).or_default().push(ran);
        }
    }
    let goals = goals(args, &rounds);
    let (guests, memory_mib) = (args.guests, args.memory);
    let figures = Figures { guests, memory_mib, mergeable_pages: mergeable, rounds };
    report::finish(args.json.as_deref(), Path::new("/"), &figures, &table(&figures), &goals)
}

fn median(runs: &[Ran], figure: impl Fn(&Ran) -> f64) -> f64 {
    crate::median::median(runs.iter().map(figure))
}

fn worst(runs: &[Ran], figure: impl Fn(&Ran) -> Option<f64>) -> f64 {
    highest(runs.iter().map(|ran| figure(ran).unwrap_or(f64::NAN)))
}

/// Not a number if it was not done.
fn per_second(ran: &Ran) -> f64 {
    ran.done_seconds.map_or(f64::NAN, |seconds| ran.saved_pages as f64 / seconds)
}

fn per_cpu_second(ran: &Ran) -> f64 {
    ran.done_seconds.map_or(f64::NAN, |_| ran.saved_pages as f64 / ran.cpu_seconds)
}

/// The highest of all rounds of a figure of the first engine, divided by that of the second one.
/// Not a number if one of them was not done in a round.
fn worst_ratio(runs: [&[Ran]; 2], figure: fn(&Ran) -> f64) -> f64 {
    let [a, b] = runs;
    highest(a.iter().zip(b).map(|(a, b)| figure(a) / figure(b)))
}

fn goals(args: &Args, rounds: &BTreeMap<Engine, Vec<Ran>>) -> Goals {
    let of = |engine| rounds.get(&engine).map(Vec::as_slice).unwrap_or_default();
    let ours = of(Engine::Merger);
    let runs = [of(Engine::Ksm), ours];
    let size = "4 processes or more with 512 MiB or more each, 5 rounds or more; figures are of \
        the merger at full speed with all threads, against KSM at full speed on all of the \
        memory, and each is the worst of all rounds and processes";
    let is_of_this_size = args.guests >= 4 && args.memory >= 512 && args.rounds >= 5;
    let fresh = highest(ours.iter().flat_map(|ran| &ran.fresh_seconds).copied());
    let period = PERIOD.as_secs_f64();
    let wrong: u64 = rounds.values().flatten().map(|ran| ran.wrong).sum();
    // The bounds are of "at least": the inverse is at most.
    let goals = Goals::new(size, is_of_this_size)
        .at_most(
            "KSM's pages per second, of the merger's",
            worst_ratio(runs, per_second),
            1.0 / SPEED_MIN,
            "",
        )
        .at_most(
            "KSM's pages per processor second, of the merger's",
            worst_ratio(runs, per_cpu_second),
            1.0 / CPU_MIN,
            "",
        );
    let phases: [(&str, WritesOf); 2] =
        [("while pages are merged", |ran| ran.merging), ("afterwards", |ran| ran.afterwards)];
    let goals = phases.into_iter().fold(goals, |goals, (phase, writes)| {
        let p99 = worst(ours, |ran| Some(writes(ran)?.p99_us));
        let slowest = worst(ours, |ran| Some(writes(ran)?.slowest_us));
        goals.at_most(format!("p99 of a write {phase}"), p99, P99_US_MAX, " us").at_most(
            format!("slowest write {phase}"),
            slowest,
            STALL_US_MAX,
            " us",
        )
    });
    let run = worker::FRESH_RUN;
    goals
        .at_most(
            format!("new duplicates in runs of {run} pages were merged within"),
            fresh,
            2.0 * period + 1.0,
            " s",
        )
        .at_most(
            format!("pass over clean memory, per GiB, median of {CLEAN_PASSES} passes"),
            worst(ours, |ran| ran.clean_ms_per_gib),
            CLEAN_MS_MAX,
            " ms",
        )
        .at_most("wrong words, of all engines", wrong as f64, 0.0, "")
}

/// A cell of a table: a dash for an unknown figure.
fn cell(figure: f64, digits: usize, unit: &str) -> String {
    if figure.is_nan() { "–".to_owned() } else { format!("{figure:.digits$}{unit}") }
}

/// The saved share, and the time and processor time for it.
fn costs(engine: Engine, runs: &[Ran], mergeable: u64) -> String {
    if engine == Engine::None {
        return "– | – | – | – | – | –".to_owned();
    }
    let is_done = runs.iter().all(|ran| ran.done_seconds.is_some());
    let done = match is_done {
        true => cell(median(runs, |ran| ran.done_seconds.unwrap_or(f64::NAN)), 2, " s"),
        false => format!("not within {} s", engine.max().as_secs()),
    };
    // A median of those rounds alone in which it was done would be too good.
    let share = |pages: u64| pages as f64 / mergeable as f64 * 100.0;
    let rate = |figure: fn(&Ran) -> f64| if is_done { median(runs, figure) } else { f64::NAN };
    format!(
        "{} | {} | {done} | {} | {} | {}",
        cell(median(runs, |ran| share(ran.saved_pages)), 0, " %"),
        cell(median(runs, |ran| share(ran.left_pages)), 0, " %"),
        cell(rate(per_second), 0, ""),
        cell(median(runs, |ran| ran.cpu_seconds), 2, " s"),
        cell(rate(per_cpu_second), 0, ""),
    )
}

fn table(figures: &Figures) -> String {
    let mut text = format!(
        "{} processes with {} MiB each, {} pages can be saved. Medians of {} rounds; p99, slowest \
        and new duplicates: the highest of all rounds and processes. Pages saved and CPU: until \
        95 % is saved, or else until the engine is given up.\n\n\
        | engine | saved at most | left after {} s more | 95 % after | pages/s | CPU | pages per CPU second \
        | writes while merging: p50 | p99 | slowest | in the {} s afterwards: p50 | p99 | slowest \
        | new duplicates in runs of {} pages within | wrong words |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        figures.guests,
        figures.memory_mib,
        figures.mergeable_pages,
        figures.rounds.values().next().map_or(0, Vec::len),
        AFTERWARDS.as_secs(),
        AFTERWARDS.as_secs(),
        worker::FRESH_RUN,
    );
    for (engine, runs) in &figures.rounds {
        let writes = |of: WritesOf| {
            let p50 = median(runs, |ran| of(ran).map_or(f64::NAN, |it| it.p50_us));
            let p99 = worst(runs, |ran| Some(of(ran)?.p99_us));
            let slowest = worst(runs, |ran| Some(of(ran)?.slowest_us));
            format!(
                "{} | {} | {}",
                cell(p50, 1, " us"),
                cell(p99, 1, " us"),
                cell(slowest, 0, " us")
            )
        };
        text += &format!(
            "| {} | {} | {} | {} | {} | {} |\n",
            engine.title(),
            costs(*engine, runs, figures.mergeable_pages),
            writes(|ran| ran.merging),
            writes(|ran| ran.afterwards),
            cell(highest(runs.iter().flat_map(|ran| &ran.fresh_seconds).copied()), 2, " s"),
            runs.iter().map(|ran| ran.wrong).sum::<u64>(),
        );
    }
    text
}

/// A process with memory.
struct Guest {
    child: Child,
    output: BufReader<ChildStdout>,
    dir: tempfile::TempDir,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Guest {
    fn start(args: &Args, number: u64, engine: Engine, shim: &Path, pages: usize) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["merge-worker", &number.to_string(), &pages.to_string()]);
        command.arg(args.writes.to_string());
        command.args(match engine {
            Engine::Ksm | Engine::KsmDefaults => Some("--ksm"),
            Engine::KsmGuided => Some("--guided"),
            _ => None,
        });
        command.args(args.small.then_some("--small"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if engine.is_merger() {
            cofolio_node::vm::merger::preload(&mut command, shim, dir.path(), pages as u64 * PAGE)?;
        }
        let mut child = command.spawn().context("starting a process")?;
        let output = child.stdout.take().context("no output")?;
        Ok(Self { child, output: BufReader::new(output), dir })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a process has ended");
        Ok(line)
    }

    /// Begins a phase of its writes.
    fn phase(&mut self, phase: &str) -> Result<()> {
        writeln!(self.child.stdin.as_mut().context("no input")?, "{phase}")?;
        let line = self.line()?;
        ensure!(line.trim() == phase, "a process said {line:?} to {phase}");
        Ok(())
    }

    fn end(mut self) -> Result<Said> {
        if let Some(mut input) = self.child.stdin.take() {
            input.write_all(b"stop\n")?;
        }
        Ok(serde_json::from_str(&self.line()?)?)
    }
}

fn run_engine(
    args: &Args,
    engine: Engine,
    shim: &Path,
    pages: usize,
    mergeable: u64,
) -> Result<Ran> {
    let start = |number| Guest::start(args, number, engine, shim, pages);
    let mut guests = (0..args.guests).map(start).collect::<Result<Vec<_>>>()?;
    for guest in &mut guests {
        guest.line()?;
    }
    let enough = (mergeable as f64 * DONE).floor();
    let mut ran = match engine {
        Engine::None => {
            phase(&mut guests, worker::MERGING)?;
            thread::sleep(AFTERWARDS);
            phase(&mut guests, worker::AFTERWARDS)?;
            thread::sleep(AFTERWARDS);
            Ran::default()
        }
        _ if engine.is_ksm() => with_ksm(engine, &mut guests, enough)?,
        _ => with_merger(engine, &mut guests, pages, enough)?,
    };
    let said = guests.into_iter().map(Guest::end).collect::<Result<Vec<_>>>()?;
    ran.wrong = said.iter().map(|said| said.wrong).sum();
    ran.merging = worst_of(said.iter().map(|said| said.merging));
    ran.afterwards = worst_of(said.iter().map(|said| said.afterwards));
    Ok(ran)
}

/// The higher figures of all processes; none if one has none.
fn worst_of(writes: impl Iterator<Item = Option<Writes>>) -> Option<Writes> {
    writes.reduce(|a, b| Some(a?.worse(b?))).flatten()
}

fn phase(guests: &mut [Guest], phase: &str) -> Result<()> {
    guests.iter_mut().try_for_each(|guest| guest.phase(phase))
}

fn with_ksm(engine: Engine, guests: &mut [Guest], enough: f64) -> Result<Ran> {
    phase(guests, worker::MERGING)?;
    let cpu_before = threads::of("/proc").seconds("ksmd");
    let began = Instant::now();
    let _ksm = Ksm::start(engine != Engine::KsmDefaults)?;
    let mut ran = Ran::default();
    while began.elapsed() < engine.max() {
        thread::sleep(LOOK);
        ran.saved_pages = ran.saved_pages.max(ksm::saved_pages()?);
        if ran.saved_pages as f64 >= enough {
            ran.done_seconds = Some(began.elapsed().as_secs_f64());
            break;
        }
    }
    ran.seconds = began.elapsed().as_secs_f64();
    ran.cpu_seconds = threads::of("/proc").seconds("ksmd") - cpu_before;
    phase(guests, worker::AFTERWARDS)?;
    thread::sleep(AFTERWARDS);
    ran.left_pages = ksm::saved_pages()?;
    // The kernel unmerges all pages now.
    phase(guests, worker::PAUSE)?;
    Ok(ran)
}

fn with_merger(engine: Engine, guests: &mut [Guest], pages: usize, enough: f64) -> Result<Ran> {
    let targets: Vec<Target> = guests
        .iter()
        .enumerate()
        .map(|(number, guest)| Target {
            name: format!("guest{number}"),
            domain: "bench".to_owned(),
            pid: guest.child.id(),
            dir: guest.dir.path().to_owned(),
            memory_bytes: pages as u64 * PAGE,
        })
        .collect();
    let mut merger = Merger::new(engine.policy());
    let log = |line: &str| eprintln!("{line}");
    phase(guests, worker::MERGING)?;
    let held = anonymous(guests)?;
    let saved = |guests: &[Guest], report: &MergeReport| -> Result<u64> {
        Ok(held.saturating_sub(anonymous(guests)? + report.pool_bytes) / PAGE)
    };
    let (cpu_before, began) = (cpu_seconds(guests), Instant::now());
    let mut ran = Ran::default();
    while began.elapsed() < engine.max() {
        let report = merger.pass(targets.clone(), &log);
        ran.saved_pages = ran.saved_pages.max(saved(guests, &report)?);
        if ran.saved_pages as f64 >= enough {
            ran.done_seconds = Some(began.elapsed().as_secs_f64());
            break;
        }
        // At full speed two looks are right behind each other: KSM does not wait either.
        if engine == Engine::MergerDefaults {
            thread::sleep(report.wait);
        }
    }
    ran.seconds = began.elapsed().as_secs_f64();
    ran.cpu_seconds = cpu_seconds(guests) - cpu_before;
    phase(guests, worker::AFTERWARDS)?;
    let end = Instant::now() + AFTERWARDS;
    while Instant::now() < end {
        let report = merger.pass(targets.clone(), &log);
        ran.left_pages = saved(guests, &report)?;
        thread::sleep(report.wait.min(end.saturating_duration_since(Instant::now())));
    }
    phase(guests, worker::PAUSE)?;
    // With its defaults it rests after each pass.
    if engine != Engine::MergerDefaults {
        let gib = (guests.len() * pages) as f64 * PAGE as f64 / f64::from(1 << 30);
        ran.clean_ms_per_gib = Some(crate::median::median((0..CLEAN_PASSES).map(|_| {
            let began = Instant::now();
            merger.pass(targets.clone(), &log);
            began.elapsed().as_secs_f64() * 1000.0 / gib
        })));
    }
    ran.fresh_seconds = fresh(merger, &targets, guests)?;
    Ok(ran)
}

/// Processor seconds of the merger and the shims.
fn cpu_seconds(guests: &[Guest]) -> f64 {
    let tasks = guests.iter().map(|guest| format!("/proc/{}/task", guest.child.id()));
    let shims = tasks.map(|tasks| threads::of(&tasks).seconds("cofolio-shim"));
    threads::own_seconds() + shims.sum::<f64>()
}

/// Private bytes of the processes. The merger also counts merged pages that were written to since,
/// so what it saves is how much less these are, less the pools.
fn anonymous(guests: &[Guest]) -> Result<u64> {
    let of = |guest: &Guest| status_bytes(&guest.child.id().to_string(), "RssAnon");
    guests.iter().map(of).sum()
}

/// Has guests put the same into new pages, again and again, while the merger keeps to its period:
/// how long each time took until none of them had such a page of its own.
fn fresh(mut merger: Merger, targets: &[Target], guests: &mut [Guest]) -> Result<Vec<f64>> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let report = merger.pass(targets.to_vec(), &|line| eprintln!("{line}"));
                thread::sleep(report.wait);
            }
        });
        let all = (0..worker::FRESH_RUNS).map(|_| fill(guests)).collect();
        stop.store(true, Relaxed);
        all
    })
}

fn fill(guests: &mut [Guest]) -> Result<f64> {
    let mut places = Vec::new();
    for guest in guests {
        let input = guest.child.stdin.as_mut().context("no input")?;
        writeln!(input, "{}", worker::FILL)?;
        let start: u64 = guest.line()?.trim().parse()?;
        let addresses = start..start + worker::FRESH_RUN as u64 * PAGE;
        places.push((File::open(format!("/proc/{}/pagemap", guest.child.id()))?, addresses));
    }
    let began = Instant::now();
    let private = Query { mask: category::PRESENT, inverted: category::FILE, ..Query::default() };
    loop {
        let mut left = 0;
        for (pagemap, addresses) in &places {
            scan(pagemap, addresses.clone(), private, |it| left += it.end - it.start)?;
        }
        let seconds = began.elapsed().as_secs_f64();
        ensure!(began.elapsed() < ENGINE_MAX, "new pages are not merged in {seconds} s");
        if left == 0 {
            return Ok(seconds);
        }
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(done: Option<f64>, p99: f64) -> Ran {
        let writes = Writes { count: 1000, p50_us: 1.0, p99_us: p99, slowest_us: 10.0 * p99 };
        Ran {
            done_seconds: done,
            saved_pages: 1000,
            left_pages: 500,
            cpu_seconds: 1.0,
            merging: Some(writes),
            afterwards: Some(writes),
            clean_ms_per_gib: Some(0.5),
            fresh_seconds: vec![2.0],
            ..Ran::default()
        }
    }

    fn goals_of(ours: [Ran; 5]) -> String {
        let ksm = [3.0, 4.0, 5.0, 3.0, 3.0]
            .map(|seconds| Ran { cpu_seconds: 3.0, ..ran(Some(seconds), 10.0) });
        let rounds = [(Engine::Ksm, ksm.to_vec()), (Engine::Merger, ours.to_vec())];
        let args = Args {
            guests: 4,
            memory: 512,
            rounds: 5,
            writes: 10,
            small: false,
            shim: None,
            json: None,
        };
        goals(&args, &rounds.into_iter().collect()).table()
    }

    /// The stall goal was of a median of the rounds' maxima: two of five rounds could stall.
    #[test]
    fn one_bad_round_misses_a_goal() {
        let good = || ran(Some(1.0), 50.0);
        let all_good = goals_of([good(), good(), good(), good(), good()]);
        assert_eq!(all_good.matches("| met |").count(), 9, "{all_good}");
        for (bad, missed) in [
            (ran(Some(1.0), 101.0), "p99 of a write while pages are merged | 101 us"),
            (ran(Some(1.0), 2500.0), "slowest write afterwards | 25000 us"),
            (ran(Some(2.0), 50.0), "KSM's pages per second, of the merger's | 0.667"),
            (ran(None, 50.0), "KSM's pages per second, of the merger's | NaN"),
            (Ran { merging: None, ..good() }, "p99 of a write while pages are merged | NaN us"),
            (Ran { clean_ms_per_gib: Some(1.5), ..good() }, "50 passes | 1.5 ms"),
            (Ran { fresh_seconds: vec![2.0, 3.1], ..good() }, "merged within | 3.1 s"),
        ] {
            let table = goals_of([good(), good(), good(), bad, good()]);
            let line = table.lines().find(|line| line.contains(missed));
            assert!(line.is_some_and(|line| line.ends_with("| MISSED |")), "{missed}: {table}");
        }
    }

    #[test]
    fn an_engine_that_was_given_up_has_no_rate() {
        let runs = [ran(Some(1.0), 1.0), ran(None, 1.0)];
        let text = costs(Engine::KsmDefaults, &runs, 2000);
        assert_eq!(text, "50 % | 25 % | not within 30 s | – | 1.00 s | –");
        assert_eq!(
            costs(Engine::Ksm, &runs[..1], 1000),
            "100 % | 50 % | 1.00 s | 1000 | 1.00 s | 1000"
        );
    }

    #[test]
    fn writes_of_processes_are_those_of_the_worst() {
        let writes = |p99| ran(None, p99).merging;
        let all = worst_of([writes(1.0), writes(3.0), writes(2.0)].into_iter());
        let count = all.map(|it| (it.count, it.p99_us, it.slowest_us));
        assert_eq!(count, Some((3000, 3.0, 30.0)));
        assert_eq!(worst_of([writes(1.0), None].into_iter()), None);
    }
}
