//! `cofolio-bench usage-lists [IDS]`: memory of a sparse (mount × cgroup) matrix of LRU lists, the
//! ledger's usage lists, against three plain layouts. They are the steps of the kernel's list_lru.

use std::{
    fs,
    hint::black_box,
    io::{self, Write as _},
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::Command,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cofolio_cli::exit::Exit;
use cofolio_node::ledger::usage::{CgroupId, ObjectId, SHARDS, SuperblockId, UsageLists};
use serde::Serialize;

use crate::Outcome;
use crate::goals::Goals;
use crate::report;

/// Megabytes of the whole system with 10,000 mounts and 10,000 cgroups, where each mount has two
/// LRUs and the machine two NUMA nodes, at each step of "Optimize list lru memory consumption"
/// (2021).
const LIST_LRU_2021: [(&str, u32); 4] = [
    ("before the series", 24_464),
    ("one array of pointers for all nodes", 21_957),
    ("lists allocated on first use", 6_895),
    ("an xarray in place of the array", 4_367),
];

/// Memory and speed of the ledger's usage lists
///
/// Fills a sparse (mount x cgroup) matrix of LRU lists in which each cgroup uses 20 random mounts,
/// and three plain layouts of the same matrix, each in a process of its own. Prints their resident
/// memory beside that of the kernel's list_lru of 2021, what the lists take with 1 to 8 objects per
/// used pair, and how fast they are. The goal does not say how many objects a pair has: four and
/// five are judged.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench usage-lists 10000 --json usage-lists.json

Exit codes: 0 the goal is met, or is of more mounts; 1 it is missed; others as for every command.")]
pub(crate) struct Args {
    /// Mounts, and cgroups
    #[arg(default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    ids: u32,
    /// Write every figure to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only print the bytes of one layout
    #[arg(long, value_enum, hide = true)]
    layout: Option<Layout>,
    /// Objects per used pair of that layout
    #[arg(long, default_value_t = OBJECTS_PER_PAIR, hide = true)]
    objects: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Layout {
    Flat,
    Pointers,
    FirstUse,
    Sparse,
}

impl Layout {
    /// In the order of the steps of 2021.
    const ALL: [Self; 4] = [Self::Flat, Self::Pointers, Self::FirstUse, Self::Sparse];

    fn name(self) -> &'static str {
        match self {
            Self::Flat => "flat",
            Self::Pointers => "pointers",
            Self::FirstUse => "first-use",
            Self::Sparse => "sparse",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Flat => "an array of lists per mount",
            Self::Pointers => "an array of pointers per mount, all lists allocated",
            Self::FirstUse => "an array of pointers per mount, lists allocated on first use",
            Self::Sparse => "usage lists, with their entries",
        }
    }

    /// The divisor by which the layout is allocated smaller than it would be.
    fn scale(self, ids: u32) -> u32 {
        let list_bytes = match self {
            Self::Flat => 24,
            Self::Pointers => 8 + 32,
            Self::FirstUse => 8,
            Self::Sparse => 0,
        };
        let bytes = list_bytes * u64::from(ids) * u64::from(ids);
        if bytes < MEMORY_BYTES_MAX || ids < 10 { 1 } else { 10 }
    }
}

/// Goal: the lists take at most so many bytes for each used pair, with so many mounts and cgroups.
pub(crate) const PAIR_BYTES_MAX: f64 = 256.0;
const GOAL_IDS: u32 = 10_000;

const PAIRS_PER_CGROUP: u32 = 20;
/// In the comparison with the other layouts, and of the speeds.
const OBJECTS_PER_PAIR: u32 = 4;
/// Of the table of the lists alone, and which of these numbers the goal is judged with.
const OBJECTS: [u32; 5] = [1, 2, 4, 5, 8];
const JUDGED_OBJECTS: [u32; 2] = [4, 5];
const TOUCHES_PER_ID: u32 = 400;

/// Layouts that would need more than this are allocated for a tenth of the mounts.
const MEMORY_BYTES_MAX: u64 = 16 << 30;

/// As `struct list_lru_one`: 24 bytes, which both kmalloc and malloc make 32.
struct ListHead {
    _links: [usize; 2],
    _items: usize,
}

impl ListHead {
    /// Not all zero, so that the page it is on becomes resident.
    fn new(at: usize) -> ListHead {
        ListHead { _links: [at + 1; 2], _items: 0 }
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    if let Some(layout) = args.layout {
        writeln!(io::stdout(), "{}", measure_layout(layout, args.ids, args.objects)?)?;
        return Ok(Exit::Ok);
    }
    let matrix = Matrix::measure(args.ids)?;
    let speed = measure_speed(args.ids);
    let speed: String = speed.lines().map(|line| format!("- {line}\n")).collect();
    let table = format!("{}\n{speed}", matrix.table());
    report::finish(args.json.as_deref(), Path::new("/"), &matrix, &table, &matrix.goals())
}

/// A layout of the matrix, beside the step of 2021 that had it.
#[derive(Debug, Serialize)]
struct Row {
    layout: &'static str,
    resident_bytes: u64,
    /// Whether a tenth of the mounts was measured.
    of_a_tenth: bool,
    list_lru_2021: &'static str,
    /// Of the whole system, not only of the lists.
    list_lru_2021_megabytes: u32,
}

/// The usage lists, with this number of objects per used pair.
#[derive(Debug, Serialize)]
struct Filled {
    objects: u32,
    resident_bytes: u64,
}

/// The matrix in each layout.
#[derive(Debug, Serialize)]
struct Matrix {
    mounts: u32,
    cgroups: u32,
    used_pairs: u64,
    objects_per_pair: u32,
    rows: Vec<Row>,
    by_objects: Vec<Filled>,
}

impl Matrix {
    fn measure(ids: u32) -> Result<Self> {
        let steps = Layout::ALL.into_iter().zip(LIST_LRU_2021);
        let rows = steps.map(|(layout, (list_lru_2021, list_lru_2021_megabytes))| {
            let (resident_bytes, of_a_tenth) =
                (resident_alone(layout, ids, OBJECTS_PER_PAIR)?, layout.scale(ids) > 1);
            let layout = layout.title();
            Ok(Row { layout, resident_bytes, of_a_tenth, list_lru_2021, list_lru_2021_megabytes })
        });
        let by_objects = OBJECTS.into_iter().map(|objects| {
            let resident_bytes = resident_alone(Layout::Sparse, ids, objects)?;
            Ok(Filled { objects, resident_bytes })
        });
        Ok(Self {
            mounts: ids,
            cgroups: ids,
            used_pairs: u64::from(ids) * u64::from(PAIRS_PER_CGROUP.min(ids)),
            objects_per_pair: OBJECTS_PER_PAIR,
            rows: rows.collect::<Result<_>>()?,
            by_objects: by_objects.collect::<Result<_>>()?,
        })
    }

    fn table(&self) -> String {
        let Self { mounts, cgroups, used_pairs, objects_per_pair, .. } = self;
        let mut text = format!(
            "{mounts} mounts x {cgroups} cgroups, {used_pairs} used pairs, {objects_per_pair} objects per \
             pair.\nMB of 2021 are of the whole system with 10,000 of each. Ours are resident memory, of the \
             plain\nlayouts without any entries.\n\n\
             | list_lru in 2021 | MB | a layout of that kind here | MB | bytes per used pair |\n\
             |---|--:|---|--:|--:|\n"
        );
        for row in &self.rows {
            let Row { layout, resident_bytes: bytes, list_lru_2021: step, .. } = row;
            let note = if row.of_a_tenth { " (a tenth measured)" } else { "" };
            text += &format!(
                "| {step} | {} | {layout}{note} | {:.0} | {} |\n",
                row.list_lru_2021_megabytes,
                *bytes as f64 / 1e6,
                bytes / used_pairs,
            );
        }
        text += "\n| objects per used pair | usage lists, bytes per used pair |\n|--:|--:|\n";
        for Filled { objects, resident_bytes } in &self.by_objects {
            text += &format!("| {objects} | {} |\n", resident_bytes / used_pairs);
        }
        text
    }

    fn goals(&self) -> Goals {
        let size = format!("{GOAL_IDS} mounts and cgroups");
        let judged = self.by_objects.iter().filter(|it| JUDGED_OBJECTS.contains(&it.objects));
        judged.fold(Goals::new(size, self.mounts >= GOAL_IDS), |goals, it| {
            let what =
                format!("usage lists, resident, of each used pair of {} objects", it.objects);
            let bytes = it.resident_bytes as f64 / self.used_pairs as f64;
            goals.at_most(what, bytes, PAIR_BYTES_MAX, " bytes")
        })
    }
}

/// Resident bytes of a layout, in a process of its own: allocators keep memory that was freed.
fn resident_alone(layout: Layout, ids: u32, objects: u32) -> Result<u64> {
    let output = Command::new("/proc/self/exe")
        .args(["usage-lists", &ids.to_string(), "--layout", layout.name()])
        .args(["--objects", &objects.to_string()])
        .output()
        .context("cannot start a process for a layout")?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "layout {} failed: {}", layout.name(), message.trim());
    let said = String::from_utf8_lossy(&output.stdout);
    said.trim().parse().context("a layout's figure is not a number")
}

fn measure_layout(layout: Layout, ids: u32, objects: u32) -> Result<u64> {
    let scale = layout.scale(ids);
    let mounts = (ids / scale) as usize;
    let cgroups = 0..ids as usize;
    let pairs = used_pairs(ids);
    let before = resident_bytes()?;
    let resident = match layout {
        Layout::Flat => {
            let lists = || cgroups.clone().map(ListHead::new).collect::<Vec<_>>();
            resident_with(|| (0..mounts).map(|_| lists()).collect::<Vec<_>>())
        }
        Layout::Pointers => {
            let lists =
                || cgroups.clone().map(|at| Box::new(ListHead::new(at))).collect::<Vec<_>>();
            resident_with(|| (0..mounts).map(|_| lists()).collect::<Vec<_>>())
        }
        Layout::FirstUse => resident_with(|| {
            let lists = || cgroups.clone().map(|_| None).collect::<Vec<_>>();
            let mut mounts: Vec<_> = (0..mounts).map(|_| lists()).collect();
            for &(mount, cgroup) in &pairs {
                if let Some(lists) = mounts.get_mut(mount as usize) {
                    lists[cgroup as usize] = Some(Box::new(ListHead::new(cgroup as usize)));
                }
            }
            mounts
        }),
        Layout::Sparse => resident_with(|| fill(&pairs, objects)),
    };
    Ok(resident?.saturating_sub(before) * u64::from(scale))
}

fn resident_with<T>(make: impl FnOnce() -> T) -> Result<u64> {
    let made = black_box(make());
    let resident = resident_bytes();
    drop(made);
    resident
}

/// The resident memory of this process.
fn resident_bytes() -> Result<u64> {
    status_bytes("self", "VmRSS")
}

/// Bytes of a line of `/proc/PROCESS/status`, which has units of 1,024 of them.
pub(crate) fn status_bytes(process: &str, name: &str) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path)?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{path} has no {name}"))? * 1024)
}

/// Random mounts for every cgroup.
fn used_pairs(ids: u32) -> Vec<(u32, u32)> {
    let mut random = Random(1);
    let mut pairs = Vec::new();
    for cgroup in 0..ids {
        let mut mounts: Vec<u32> = Vec::new();
        while mounts.len() < PAIRS_PER_CGROUP.min(ids) as usize {
            let mount = random.below(ids);
            if !mounts.contains(&mount) {
                mounts.push(mount);
            }
        }
        pairs.extend(mounts.into_iter().map(|mount| (mount, cgroup)));
    }
    pairs
}

fn fill(pairs: &[(u32, u32)], objects: u32) -> UsageLists {
    let lists = UsageLists::new(SHARDS);
    // Object by object, so that the entries of a list are not neighbours in memory.
    for object in 0..objects {
        for &(mount, cgroup) in pairs {
            lists.touch(SuperblockId(mount), CgroupId(cgroup), ObjectId(object), 0);
        }
    }
    lists
}

fn measure_speed(ids: u32) -> String {
    let pairs = used_pairs(ids);
    let (filling, lists) = timed(|| fill(&pairs, OBJECTS_PER_PAIR));
    let count = lists.count();
    let per_second = count.entries as f64 / filling.as_secs_f64();
    let mut text = format!(
        "allocated, as it counts itself: {} bytes, {} per pair\n\
         first touches per second: {per_second:.0}\n",
        lists.memory_bytes(),
        lists.memory_bytes() / count.lists,
    );
    for threads in [1, 2] {
        let mut rates =
            [(); 3].map(|()| touches_per_second(&lists, &pairs, threads, ids * TOUCHES_PER_ID));
        rates.sort_by(f64::total_cmp);
        let [_, median, _] = rates;
        text += &format!(
            "random touches per second, {threads} threads: {median:.0} (median of {})\n",
            rates.len()
        );
    }
    let (walk, ()) = timed(|| {
        let mut sum = 0;
        let _ = lists.for_each(|usage| {
            sum += u64::from(usage.time);
            ControlFlow::<()>::Continue(())
        });
        black_box(sum);
    });
    let (look, _) = timed(|| lists.retain(|_| true));
    let cgroups = |offset: u32| (0..ids).map(move |id| CgroupId(offset + id));
    let (moves, ()) = timed(|| {
        cgroups(0).zip(cgroups(ids)).for_each(|(from, to)| _ = lists.reparent(from, to));
    });
    let (merges, ()) =
        timed(|| cgroups(ids).for_each(|from| _ = lists.reparent(from, CgroupId(0))));
    let per_cgroup = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(ids);
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let (removal, removed) = timed(|| lists.retain(|_| false));
    text + &format!(
        "walk of everything: {:.1} ms\n\
         removal of nothing: {:.1} ms\n\
         reparent of {} lists: moved in {:.1} us, merged in {:.1} us\n\
         removal of {} entries: {:.1} ms\n\
         allocated when empty: {} bytes\n",
        milliseconds(walk),
        milliseconds(look),
        PAIRS_PER_CGROUP.min(ids),
        per_cgroup(moves),
        per_cgroup(merges),
        removed,
        milliseconds(removal),
        lists.memory_bytes(),
    )
}

fn touches_per_second(lists: &UsageLists, pairs: &[(u32, u32)], threads: u32, touches: u32) -> f64 {
    let below = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
    let start = Barrier::new(threads as usize + 1);
    let (elapsed, ()) = thread::scope(|scope| {
        for seed in 0..threads {
            let start = &start;
            scope.spawn(move || {
                let mut random = Random(u64::from(seed) + 2);
                start.wait();
                for now in 0..touches {
                    let (mount, cgroup) = pairs[random.below(below) as usize];
                    let object = ObjectId(random.below(OBJECTS_PER_PAIR));
                    lists.touch(SuperblockId(mount), CgroupId(cgroup), object, now);
                }
                start.wait();
            });
        }
        start.wait();
        timed(|| _ = start.wait())
    });
    f64::from(threads) * f64::from(touches) / elapsed.as_secs_f64()
}

fn timed<T>(run: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = run();
    (start.elapsed(), result)
}

/// A linear congruential generator, of which the high half is random enough.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let below = ((self.0 >> 32) * u64::from(limit)) >> 32;
        u32::try_from(below).unwrap_or(0) // It is less than `limit`.
    }
}
