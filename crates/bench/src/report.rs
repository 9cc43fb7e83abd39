//! What `bench share` makes of its runs: do the figures agree, what did sharing save, and the whole as
//! a table for people and as JSON for the archive.

use std::{
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::Path,
};

use anyhow::Context as _;
use cofolio_node::cgroup::Hierarchy;
use cofolio_sys::cache::page_size;
use serde::Serialize;

use super::{
    Outcome,
    goals::Goals,
    measure::Run,
    reader::Mode,
    source::{About, Expected},
};

/// By how much two ways of measuring the same memory may differ.
///
/// Three parts in a hundred of what had to be read, for what the kernel brings in that no file of
/// ours holds (docs/BENCH-SHARE.md names it); and one MiB, for what it counts in batches: up to 64
/// pages per CPU in a memory cgroup. The second matters for tiny images only.
fn tolerance(expected_bytes: u64) -> i64 {
    i64::try_from(expected_bytes / 100 * 3 + (1 << 20)).unwrap_or(i64::MAX)
}

/// The whole result, as `--json` writes it.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Version of this form.
    pub(super) format: u32,
    pub(super) tool: String,
    pub(super) command_line: Vec<String>,
    pub(super) machine: Machine,
    pub(super) old: About,
    pub(super) new: About,
    pub(super) expected: Expected,
    pub(super) page_size: u64,
    pub(super) summary: Vec<Summary>,
    pub(super) checks: Vec<Check>,
    pub(super) seconds: f64,
    pub(super) runs: Vec<Run>,
}

/// What a reader of the figures wants to know of the machine they come from.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) kernel: String,
    pub(super) architecture: &'static str,
    pub(super) cpu: String,
    pub(super) cpus: usize,
    pub(super) memory: u64,
    /// Filesystem that the unpacked images and the store are on.
    pub(super) filesystem: String,
    /// Version of the memory controller, or why there is none to measure in.
    pub(super) memory_cgroup: String,
}

/// Medians of one way of reading. Memory is growth of the page cache in bytes.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) mode: Mode,
    pub(super) unshared: Medians,
    pub(super) shared: Medians,
    /// What sharing saves, in percent of the unshared memory.
    pub(super) reduction_percent: f64,
    /// What sharing by file could save at most, the same way.
    pub(super) bound_percent: f64,
    /// How far the shared memory, metadata included, is above the sum of unique contents.
    pub(super) over_unique_percent: f64,
}

/// Medians of the runs of one setup and mode, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Medians {
    pub(super) memory: i64,
    pub(super) buffers: i64,
    pub(super) slab: i64,
    pub(super) content: i64,
    pub(super) metadata: i64,
    pub(super) directories: i64,
    pub(super) merkle_trees: i64,
    pub(super) charge_cache: Option<i64>,
    pub(super) charge_kernel: Option<i64>,
    pub(super) read_seconds: f64,
}

/// One thing that had to hold.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub(super) what: &'static str,
    pub(super) ok: bool,
    /// The figures, and where it failed.
    pub(super) detail: String,
}

#[allow(clippy::cast_precision_loss, reason = "a percentage for people; sizes are below 2^53")]
pub(super) fn percent(part: i64, whole: i64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

pub(super) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

pub(super) fn median(mut values: Vec<i64>) -> i64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

fn medians(runs: &[&Run]) -> Medians {
    let of = |figure: &dyn Fn(&Run) -> i64| median(runs.iter().map(|run| figure(run)).collect());
    let some = |figure: &dyn Fn(&Run) -> Option<i64>| -> Option<i64> {
        runs.iter().map(|run| figure(run)).collect::<Option<Vec<_>>>().map(median)
    };
    let mut seconds: Vec<_> = runs.iter().map(|run| run.read_seconds).collect();
    seconds.sort_by(f64::total_cmp);
    Medians {
        memory: of(&|run| run.growth.page_cache),
        buffers: of(&|run| run.growth.buffers),
        slab: of(&|run| run.growth.slab),
        content: of(&|run| signed(run.content.resident * page_size())),
        metadata: of(&|run| signed(run.metadata.resident * page_size())),
        directories: of(&|run| signed(run.directory_pages * page_size())),
        merkle_trees: of(&|run| signed(run.merkle_pages * page_size())),
        charge_cache: some(&|run| Some(signed(run.charge?.cache))),
        charge_kernel: some(&|run| Some(signed(run.charge?.kernel?))),
        read_seconds: seconds.get(seconds.len() / 2).copied().unwrap_or(0.0),
    }
}

/// The medians of each way of reading, where both setups were measured.
pub(super) fn summarize(runs: &[Run], expected: &Expected, setups: [&str; 2]) -> Vec<Summary> {
    let page = signed(page_size());
    let (unique, all) =
        (signed(expected.unique_pages) * page, signed(expected.unshared_pages) * page);
    let mut summary = Vec::new();
    for mode in Mode::ALL {
        let [unshared, shared] = setups.map(|setup| {
            runs.iter().filter(|run| run.setup == setup && run.mode == mode).collect::<Vec<_>>()
        });
        if unshared.is_empty() || shared.is_empty() {
            continue;
        }
        let (unshared, shared) = (medians(&unshared), medians(&shared));
        summary.push(Summary {
            mode,
            unshared,
            shared,
            reduction_percent: percent(unshared.memory - shared.memory, unshared.memory),
            bound_percent: percent(all - unique, all),
            over_unique_percent: percent(shared.memory - unique, unique),
        });
    }
    summary
}

/// Whether the ways of measuring agree, in every single run.
pub(super) fn check(runs: &[Run]) -> Vec<Check> {
    let page = page_size();
    let all = |what, judge: &dyn Fn(&Run) -> Option<(bool, String)>| {
        let judged: Vec<_> = runs
            .iter()
            .filter_map(|run| judge(run).map(|(ok, detail)| (ok, run, detail)))
            .collect();
        let failed: Vec<_> = judged.iter().filter(|(ok, ..)| !ok).collect();
        let shown = failed.first().copied().or(judged.first());
        let detail = shown.map_or_else(
            || "not in any run: no memory cgroup, or the machine was never quiet".to_owned(),
            |(_, run, detail)| {
                let count = if failed.is_empty() {
                    format!("{} of {} runs; the first", judged.len(), runs.len())
                } else {
                    format!("{} of {} runs; the first", failed.len(), judged.len())
                };
                format!("{count}: {} by {}: {detail}", run.setup, run.mode.name())
            },
        );
        Check { what, ok: failed.is_empty(), detail }
    };
    vec![
        all("every byte read is the source's", &|run| {
            // A difference ends the run with an error that names the path.
            Some((true, format!("{} files, {} bytes", run.files_compared, run.bytes_compared)))
        }),
        all("resident pages of content are exactly the expected ones", &|run| {
            let (have, want) = (run.content.resident, run.expected_pages);
            let gone = run.reclaimed_pages;
            let reclaimed =
                if gone > 0 { format!(" + {gone} just reclaimed") } else { String::new() };
            Some((have + gone == want, format!("{have} resident{reclaimed}, {want} expected")))
        }),
        all("growth of the machine is what the files and directories hold", &|run| {
            let metadata = run.metadata.resident + run.directory_pages + run.merkle_pages;
            let found = signed((run.content.resident + metadata) * page);
            let grown = run.growth.page_cache;
            let limit = tolerance(run.expected_pages * page);
            // Where others were taken off, our part of Buffers is still in it, and what they did between
            // the reading of the one counter and of the other.
            let more = run
                .growth
                .taken_off
                .map_or(0, |others| run.growth.buffers.max(0) + others.abs() / 20 + (1 << 20));
            let text =
                format!("grew by {grown}, mincore {found}, may differ by {limit} + {more} bytes");
            Some(((grown - found).abs() <= limit + more, text))
        }),
        all("the reading cgroup is charged what the machine grew by", &|run| {
            // What others were charged has been taken off the growth: no second opinion any more.
            if run.growth.taken_off.is_some() {
                return None;
            }
            let charged = signed(run.charge?.cache);
            let grown = run.growth.page_cache + run.growth.buffers;
            let limit = tolerance(run.expected_pages * page);
            let text = format!("charged {charged}, grew by {grown}, may differ by {limit} bytes");
            Some(((grown - charged).abs() <= limit, text))
        }),
    ]
}

#[allow(clippy::cast_precision_loss, reason = "a size for people")]
pub(super) fn mib(bytes: i64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// The table, in the reference's form: image, sharing, memory, reduction.
pub(super) fn table(report: &Report) -> String {
    let mut text = String::new();
    let expected = &report.expected;
    let page = signed(report.page_size);
    let bytes = |pages: u64| signed(pages) * page;
    let names = [format!("{} &", report.old.name), report.new.name.clone()];
    let width = names.iter().map(String::len).max().unwrap_or(0).max(5);
    for summary in &report.summary {
        let (unshared, shared) = (&summary.unshared, &summary.shared);
        let _ = writeln!(
            text,
            "\n{:width$}  {:22}  {:>12}  {:>9}  {:>12}  {:>12}",
            format!("by {}", summary.mode.name()),
            "page cache shared",
            "memory (MiB)",
            "reduction",
            "charge (MiB)",
            "kernel (MiB)",
        );
        let mut row = |name: &str,
                       sharing: &str,
                       memory: i64,
                       reduction: &str,
                       of: Option<&Medians>| {
            let charge = of.and_then(|m| m.charge_cache).map_or_else(|| "n/a".into(), mib);
            let kernel = of.map_or_else(|| "n/a".into(), |m| mib(m.slab));
            let (charge, kernel) = if of.is_some() { (charge, kernel) } else { Default::default() };
            let _ = writeln!(
                text,
                "{name:width$}  {sharing:22}  {:>12}  {reduction:>9}  {charge:>12}  {kernel:>12}",
                mib(memory)
            );
        };
        // Memory may also grow: a negative reduction is shown as what it is.
        let less =
            |percent: f64| format!("{:+.1} %", if percent.abs() < 0.05 { 0.0 } else { -percent });
        row(&names[0], "no", unshared.memory, "-", Some(unshared));
        row(&names[1], "yes", shared.memory, &less(summary.reduction_percent), Some(shared));
        let by_layer = bytes(expected.unshared_pages) - bytes(expected.layer_shared_pages);
        let by_layer = percent(by_layer, bytes(expected.unshared_pages));
        row(
            "",
            "(equal layers at most)",
            bytes(expected.layer_shared_pages),
            &less(by_layer),
            None,
        );
        row(
            "",
            "(equal files at most)",
            bytes(expected.unique_pages),
            &less(summary.bound_percent),
            None,
        );
    }
    text.push('\n');
    for summary in &report.summary {
        let shared = &summary.shared;
        let mut metadata = format!(
            "{} MiB images, {} MiB directories",
            mib(shared.metadata),
            mib(shared.directories)
        );
        if shared.merkle_trees > 0 {
            let _ = write!(metadata, ", {} MiB Merkle trees", mib(shared.merkle_trees));
        }
        let _ = writeln!(
            text,
            "by {}: {} MiB for {} MiB of unique contents, metadata ({metadata}) included: {:+.2} %",
            summary.mode.name(),
            mib(shared.memory),
            mib(bytes(expected.unique_pages)),
            summary.over_unique_percent,
        );
    }
    for check in &report.checks {
        let mark = if check.ok { "ok    " } else { "FAILED" };
        let _ = writeln!(text, "{mark}  {} ({})", check.what, check.detail);
    }
    text
}

/// What `--json` writes of a benchmark that has goals.
#[derive(Serialize)]
struct Document<'a, T> {
    format: u32,
    tool: String,
    command_line: Vec<String>,
    machine: Machine,
    #[serde(flatten)]
    figures: &'a T,
    goals: &'a Goals,
}

/// Writes the figures to the file of `--json`, prints the table and the goals, and fails if a goal is
/// missed. `work` is where the images are unpacked.
pub(super) fn finish<T: Serialize>(
    json: Option<&Path>,
    work: &Path,
    figures: &T,
    table: &str,
    goals: &Goals,
) -> Outcome {
    if let Some(path) = json {
        let document = Document {
            format: 1,
            tool: format!("cofolio {}", env!("CARGO_PKG_VERSION")),
            command_line: command_line(),
            machine: machine(work, memory_cgroup()),
            figures,
            goals,
        };
        let text = serde_json::to_string_pretty(&document)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    writeln!(io::stdout(), "{table}\n{}", goals.table().trim_end())?;
    Ok(goals.exit())
}

/// The command, without where the binary happens to lie: that says nothing to whoever reads the archive.
pub(super) fn command_line() -> Vec<String> {
    let arguments = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once("cofolio".to_owned()).chain(arguments).collect()
}

/// The version of the memory controller, or why there is none.
pub(super) fn memory_cgroup() -> String {
    match Hierarchy::find(Path::new("/")) {
        Ok(hierarchy) => format!("{:?}", hierarchy.version()).to_lowercase(),
        Err(error) => error.to_string(),
    }
}

/// Describes this machine; `work` is where the images are unpacked.
pub(super) fn machine(work: &Path, memory_cgroup: String) -> Machine {
    let uname = rustix::system::uname();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown", |(_, name)| name.trim());
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok());
    let filesystem = rustix::fs::statfs(work).map_or_else(
        |error| format!("unknown ({error})"),
        |stat| match stat.f_type {
            // include/uapi/linux/magic.h
            0xef53 => "ext4".to_owned(),
            0x5846_5342 => "xfs".to_owned(),
            0x9123_683e => "btrfs".to_owned(),
            0x0102_1994 => "tmpfs".to_owned(),
            0xf2f5_2010 => "f2fs".to_owned(),
            0x2fc1_2fc1 => "zfs".to_owned(),
            other => format!("{other:#x}"),
        },
    );
    Machine {
        kernel: uname.release().to_string_lossy().into_owned(),
        architecture: std::env::consts::ARCH,
        cpu: cpu.to_owned(),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        memory: total.map_or(0, |kib: u64| kib.saturating_mul(1024)),
        filesystem,
        memory_cgroup,
    }
}
