//! `cofolio-bench merge`: how fast duplicate pages are merged, what that costs, and what writers notice:
//! the merger with its shim against KSM, on the same memory in the same run.

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
use cofolio_node::vm::merger::{MergePolicy, Merger, Target};
use cofolio_sys::pagemap::{Query, category, scan};
use serde::Serialize;

use crate::Outcome;
use crate::goals::Goals;
use crate::ksm::{self, Ksm};
use crate::report;
use crate::threads;
use crate::usage_lists::status_bytes;
use worker::Said;

/// An engine is done when it has saved this share of all that can be saved.
pub(crate) const DONE: f64 = 0.95;
/// An engine that is not done after so long is not going to be.
const ENGINE_MAX: Duration = Duration::from_secs(60);
/// An engine goes on at least for so long, so that enough is written to what it has merged.
const ENGINE_MIN: Duration = Duration::from_secs(5);
/// The merger's period, once it has done its work.
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
/// Starts processes with private memory of which 45 % is common to all and 10 % is zeros, with a writer in
/// each, and lets each engine merge it: KSM at full speed (pages_to_scan = 1000000, sleep_millisecs = 0),
/// KSM with its defaults, and the merger with one thread and with several. Every word is checked while
/// they run and at the end. KSM must be off, and is set back as it was.
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
    MergerOne,
    Merger,
}

impl Engine {
    const ALL: [Self; 5] =
        [Self::None, Self::KsmDefaults, Self::Ksm, Self::MergerOne, Self::Merger];

    fn title(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::KsmDefaults => "KSM, 100 pages every 20 ms (defaults)",
            Self::Ksm => "KSM, pages_to_scan=1000000, sleep 0",
            Self::MergerOne => "merger, 1 thread",
            Self::Merger => "merger, as many threads as processors",
        }
    }

    fn is_ksm(self) -> bool {
        matches!(self, Self::Ksm | Self::KsmDefaults)
    }
}

/// What came of an engine in a round.
#[derive(Debug, Clone, Default, Serialize)]
struct Ran {
    /// Seconds until 95 % of what can be saved was saved; none if it never was.
    done_seconds: Option<f64>,
    /// Pages saved until then, or at the end.
    saved_pages: u64,
    seconds: f64,
    /// Processor seconds of the engine until then.
    cpu_seconds: f64,
    /// Median milliseconds of a pass right behind another one, when next to nothing was written.
    clean_ms_per_gib: f64,
    /// Seconds until new duplicates were merged, with the merger's period.
    fresh_seconds: Vec<f64>,
    writes: u64,
    wrong: u64,
    p50_us: f64,
    p99_us: f64,
    slowest_us: f64,
}

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
    ksm::ensure_unused()?;
    let pages = usize::try_from(args.memory << 20 >> 12)?;
    let mergeable = worker::mergeable(args.guests, pages);
    let mut rounds: BTreeMap<Engine, Vec<Ran>> = BTreeMap::new();
    for round in 0..args.rounds {
        for engine in Engine::ALL {
            let ran = run_engine(args, engine, &shim, pages, mergeable)
                .with_context(|| engine.title())?;
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

fn per_second(ran: &Ran) -> f64 {
    ran.saved_pages as f64 / ran.seconds
}

fn per_cpu_second(ran: &Ran) -> f64 {
    ran.saved_pages as f64 / ran.cpu_seconds
}

fn goals(args: &Args, rounds: &BTreeMap<Engine, Vec<Ran>>) -> Goals {
    let of = |engine| rounds.get(&engine).map(Vec::as_slice).unwrap_or_default();
    let (ours, ksm) = (of(Engine::Merger), of(Engine::Ksm));
    let size = "4 processes or more with 512 MiB or more each, 5 rounds or more";
    let is_of_this_size = args.guests >= 4 && args.memory >= 512 && args.rounds >= 5;
    // The bounds are of "at least": the inverse is at most.
    let speed = median(ksm, per_second) / median(ours, per_second);
    let cpu = median(ksm, per_cpu_second) / median(ours, per_cpu_second);
    let fresh = ours.iter().flat_map(|ran| &ran.fresh_seconds).copied().fold(0.0, f64::max);
    let period = PERIOD.as_secs_f64();
    let clean = median(ours, |ran| ran.clean_ms_per_gib);
    let wrong: u64 = rounds.values().flatten().map(|ran| ran.wrong).sum();
    Goals::new(size, is_of_this_size)
        .at_most("KSM's pages per second, of the merger's", speed, 1.0 / SPEED_MIN, "")
        .at_most("KSM's pages per processor second, of the merger's", cpu, 1.0 / CPU_MIN, "")
        .at_most("p99 of a write", median(ours, |ran| ran.p99_us), P99_US_MAX, " us")
        .at_most("slowest write", median(ours, |ran| ran.slowest_us), STALL_US_MAX, " us")
        .at_most("new duplicates were merged within, at worst", fresh, 2.0 * period + 1.0, " s")
        .at_most("pass over clean memory, per GiB", clean, CLEAN_MS_MAX, " ms")
        .at_most("wrong words, of all engines", wrong as f64, 0.0, "")
}

fn costs(runs: &[Ran]) -> String {
    format!(
        "{:.0} | {:.2} s | {:.0}",
        median(runs, per_second),
        median(runs, |ran| ran.cpu_seconds),
        median(runs, per_cpu_second),
    )
}

fn table(figures: &Figures) -> String {
    let mut text = format!(
        "{} processes with {} MiB each, {} pages can be saved; medians of {} rounds\n\n\
        | engine | 95 % after | pages/s | CPU | pages per CPU second | writes: p50 | p99 | slowest | wrong |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        figures.guests,
        figures.memory_mib,
        figures.mergeable_pages,
        figures.rounds.values().next().map_or(0, Vec::len),
    );
    for (engine, runs) in &figures.rounds {
        let all_done = runs.iter().all(|ran| ran.done_seconds.is_some());
        let done = match all_done {
            true => format!("{:.2} s", median(runs, |ran| ran.done_seconds.unwrap_or(f64::NAN))),
            false => "never".to_owned(),
        };
        text += &format!(
            "| {} | {done} | {} | {:.1} us | {:.1} us | {:.0} us | {} |\n",
            engine.title(),
            if *engine == Engine::None { "– | – | –".to_owned() } else { costs(runs) },
            median(runs, |ran| ran.p50_us),
            median(runs, |ran| ran.p99_us),
            median(runs, |ran| ran.slowest_us),
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
        command.args(engine.is_ksm().then_some("--ksm"));
        command.args(args.small.then_some("--small"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if matches!(engine, Engine::Merger | Engine::MergerOne) {
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
    let ran = match engine {
        Engine::None => {
            thread::sleep(ENGINE_MIN);
            Ran { seconds: ENGINE_MIN.as_secs_f64(), ..Ran::default() }
        }
        Engine::Ksm | Engine::KsmDefaults => with_ksm(engine, enough)?,
        Engine::Merger | Engine::MergerOne => with_merger(engine, &mut guests, pages, enough)?,
    };
    let mut all = ran;
    for guest in guests {
        let said = guest.end()?;
        all.writes += said.writes;
        all.wrong += said.wrong;
        all.p50_us = all.p50_us.max(said.p50_us);
        all.p99_us = all.p99_us.max(said.p99_us);
        all.slowest_us = all.slowest_us.max(said.slowest_us);
    }
    Ok(all)
}

fn with_ksm(engine: Engine, enough: f64) -> Result<Ran> {
    let cpu_before = threads::of("/proc").seconds("ksmd");
    let began = Instant::now();
    let _ksm = Ksm::start(engine == Engine::Ksm)?;
    let limit = if engine == Engine::Ksm { ENGINE_MAX } else { ENGINE_MAX / 4 };
    let mut ran = Ran::default();
    while began.elapsed() < limit {
        thread::sleep(LOOK);
        ran.saved_pages = ksm::saved_pages()?;
        if ran.saved_pages as f64 >= enough {
            ran.done_seconds = Some(began.elapsed().as_secs_f64());
            break;
        }
    }
    ran.seconds = began.elapsed().as_secs_f64();
    ran.cpu_seconds = threads::of("/proc").seconds("ksmd") - cpu_before;
    thread::sleep(ENGINE_MIN.saturating_sub(began.elapsed()));
    Ok(ran)
}

fn with_merger(engine: Engine, guests: &mut [Guest], pages: usize, enough: f64) -> Result<Ran> {
    let threads = match engine {
        Engine::MergerOne => 1,
        _ => MergePolicy::default().threads,
    };
    // Single pages too, as KSM does. Two looks right behind each other: KSM does not wait either.
    // As fast as it can.
    let share = threads as f64;
    let policy =
        MergePolicy { run_min: 1, threads, share, period: PERIOD, ..MergePolicy::default() };
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
    let shims = || -> f64 {
        let tasks = guests.iter().map(|guest| format!("/proc/{}/task", guest.child.id()));
        tasks.map(|tasks| threads::of(&tasks).seconds("cofolio-shim")).sum()
    };
    // The merger also counts merged pages that were written to since. So this counts the processes'
    // memory, less the pools.
    let anonymous = || -> Result<u64> {
        let of = |guest: &Guest| status_bytes(&guest.child.id().to_string(), "RssAnon");
        guests.iter().map(of).sum()
    };
    let mut merger = Merger::new(policy);
    let held = anonymous()?;
    let (cpu_before, began) = (threads::own_seconds() + shims(), Instant::now());
    let mut ran = Ran::default();
    while began.elapsed() < ENGINE_MAX {
        let report = merger.pass(targets.clone(), &|line| eprintln!("{line}"));
        ran.saved_pages = held.saturating_sub(anonymous()? + report.pool_bytes) / PAGE;
        if ran.saved_pages as f64 >= enough {
            ran.done_seconds = Some(began.elapsed().as_secs_f64());
            break;
        }
    }
    ran.seconds = began.elapsed().as_secs_f64();
    ran.cpu_seconds = threads::own_seconds() + shims() - cpu_before;
    let gib = (guests.len() * pages) as f64 * PAGE as f64 / f64::from(1 << 30);
    ran.clean_ms_per_gib = crate::median::median((0..CLEAN_PASSES).map(|_| {
        let began = Instant::now();
        merger.pass(targets.clone(), &|line| eprintln!("{line}"));
        began.elapsed().as_secs_f64() * 1000.0 / gib
    }));
    ran.fresh_seconds = fresh(merger, &targets, guests)?;
    thread::sleep(ENGINE_MIN.saturating_sub(began.elapsed()));
    Ok(ran)
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
