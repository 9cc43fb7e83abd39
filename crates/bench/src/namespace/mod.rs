//! `cofolio-bench namespace IMAGE`: the experiment of the composefs series of 2023. What does it take to list an image,
//! and what does one more container of it cost? Each way in which containers get their files is mounted and listed from
//! a cold start, all in the same run.

pub(crate) mod shapes;
mod variants;

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use cofolio_image::source::Source;
use cofolio_image::{import, import::ImportOptions};
use cofolio_node::cgroup::{Cgroup, Hierarchy};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain};
use serde::Serialize;

use super::place::{Place, PlaceArgs};
use super::report;
use crate::Outcome;
use cofolio_cli::{exit::Exit, ui::human_size};
use shapes::{Shape, Spread, shapes};

/// Time and memory for listing an image, and for one more container of it
///
/// Lists every name of an image with `ls -lR`, from a cold start and in a fresh memory cgroup: over EROFS and overlayfs as
/// they were in 2023 (with the objects as an ordinary layer), with filesystems of its own for each container as engines
/// mount them today, by `mount.composefs`, and with each backend of Cofolio that this kernel has; read-only and writable.
/// Then lists it in several containers at once, and starts and ends many. Needs root and a memory cgroup, and drops the
/// caches of the whole machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench namespace corpus/out/mysql/old --json mysql.json

Exit codes: 0 measured; others as for every command.")]
pub(crate) struct Args {
    /// Whatever `import` takes, or a ref of the store
    image: String,
    /// Runs of each kind; the table has medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Containers that list the image one after the other and stay
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(2..=1000))]
    containers: u32,
    /// Images of small changes over the image, which are listed one after the other
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(2..=1000))]
    images: u32,
    /// Containers that are started and ended, for times
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    instances: u32,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Everything that was measured.
#[derive(Serialize)]
struct Report {
    tool: String,
    machine: report::Machine,
    image: Digest,
    /// Names that `ls -lR` lists.
    entries: u64,
    /// What a listing of an empty directory takes: the programs themselves.
    nothing: Listing,
    rows: Vec<Row>,
    /// Half of what the thriftiest took at its first listing; at least 4 MiB.
    tight_bytes: u64,
    /// Images of small changes over one.
    images: Vec<Images>,
    skipped: Vec<String>,
}

/// What several images cost that are small changes of one, each listed once, in bytes.
#[derive(Serialize)]
struct Images {
    shape: &'static str,
    count: u32,
    first: u64,
    /// Each further one.
    further: u64,
}

/// One way to mount, read-only or writable. Medians.
#[derive(Serialize)]
struct Row {
    shape: &'static str,
    writable: bool,
    listing: Listing,
    runs: Vec<Listing>,
    /// The same after all files of another image, with nearly the same content, were read.
    warm: Listing,
    /// The same as `listing` with `tight_bytes` of memory.
    tight: Listing,
    /// Bytes that the first container takes with its listing, and each further one.
    first_container: u64,
    further_container: u64,
    /// Milliseconds to mount and to unmount a container of an image that is mounted already; of Cofolio's backends.
    mount: Option<Spread>,
    unmount: Option<Spread>,
}

/// What one listing took.
#[derive(Clone, Copy, Serialize)]
struct Listing {
    seconds: f64,
    /// Highest charge of the cgroup, and what of its charge is kernel memory at the end.
    peak_bytes: u64,
    kernel_bytes: Option<u64>,
}

pub(super) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let Place { work, domain, _alone } = Place::prepare(&args.place, None, &say)?;
    let (name, image) = find(&args.image, &domain)?;
    let hierarchy = Hierarchy::find(Path::new("/"))?;

    let dir = work.join("namespace");
    fs::create_dir_all(dir.join("empty"))?;
    let mut skipped = Vec::new();
    let mut shapes = shapes(&dir, &domain, (&name, image), args.images, &mut skipped)?;
    skipped.iter().for_each(|reason| say(&format!("SKIP {reason}")));
    let bench = Bench { hierarchy, dir };
    let empty = bench.dir.join("empty");
    let nothing = median((0..3).map(|_| bench.list(&empty, None)).collect::<Result<_>>()?);
    let entries = {
        let target = shapes[0].mount(0, 0, false)?;
        let count = count(&target);
        shapes[0].unmount()?;
        count?
    };
    let mut rows = Vec::new();
    let mut tight_bytes = 0;
    for writable in [false, true] {
        let tell = |round, shape: &str, start: &str, listing: &Listing| {
            let (time, peak) = (listing.seconds, human_size(listing.peak_bytes));
            let mode = mode(writable);
            say(&format!("run {round}, {shape}, {mode}, {start}: {time:.3} s, {peak}"));
        };
        let mut measure = |start: Start| -> Result<Vec<Vec<Listing>>> {
            let mut runs = vec![Vec::new(); shapes.len()];
            for round in 1..=args.runs {
                for (shape, runs) in shapes.iter_mut().zip(&mut runs) {
                    let listing = bench.listing(&mut **shape, writable, start)?;
                    tell(round, shape.name(), start.name(), &listing);
                    runs.push(listing);
                }
            }
            Ok(runs)
        };
        let cold = measure(Start::Cold)?;
        let warm = measure(Start::Warm)?;
        if tight_bytes == 0 {
            let peaks = cold.iter().map(|runs| median(runs.clone()).peak_bytes);
            tight_bytes = (peaks.min().unwrap_or_default() / 2).max(TIGHT_BYTES_MIN);
        }
        let tight = measure(Start::Tight(tight_bytes))?;
        let runs = cold.into_iter().zip(warm).zip(tight);
        for (shape, ((cold, warm), tight)) in shapes.iter_mut().zip(runs) {
            let (first, further) = bench.containers(&mut **shape, writable, args.containers)?;
            let times = shape.instances(writable, args.instances)?;
            let (mount, unmount) = times.map_or((None, None), |(a, b)| (Some(a), Some(b)));
            rows.push(Row {
                shape: shape.name(),
                writable,
                listing: median(cold.clone()),
                runs: cold,
                warm: median(warm),
                tight: median(tight),
                first_container: first,
                further_container: further,
                mount,
                unmount,
            });
        }
    }
    let mut images = Vec::new();
    for shape in &mut shapes {
        let (first, further) = bench.images(&mut **shape, args.images)?;
        let (shape, count) = (shape.name(), args.images);
        say(&format!("{count} images, {shape}: {} each", human_size(further)));
        images.push(Images { shape, count, first, further });
    }
    let version = format!("{:?}", bench.hierarchy.version()).to_lowercase();
    let report = Report {
        tool: format!("cofolio {}", env!("CARGO_PKG_VERSION")),
        machine: report::machine(&work, version),
        image,
        entries,
        nothing,
        rows,
        tight_bytes,
        images,
        skipped,
    };
    if let Some(path) = &args.place.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    io::stdout().write_all(table(&report).as_bytes())?;
    Ok(Exit::Ok)
}

fn mode(writable: bool) -> &'static str {
    if writable { "writable" } else { "read-only" }
}

/// The image, imported if it is not a ref.
pub(super) fn find(text: &str, domain: &Domain) -> Result<(String, Digest)> {
    if let Ok(Some(record)) = domain.get_ref(text) {
        return Ok((text.to_owned(), record.image));
    }
    let source = Source::parse(text)?;
    let report = import::import(domain, &source, &ImportOptions::default(), &Task::default())?;
    let image = report.image;
    Ok((report.name, image))
}

/// Where it is measured.
struct Bench {
    hierarchy: Hierarchy,
    dir: PathBuf,
}

/// With less, the programs themselves do not run.
const TIGHT_BYTES_MIN: u64 = 4 << 20;

/// In what state a listing begins. Nothing of the image itself is cached.
#[derive(Clone, Copy)]
enum Start {
    Cold,
    /// Another image with nearly the same content was read.
    Warm,
    /// There is only so much memory, in bytes.
    Tight(u64),
}

impl Start {
    fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::Tight(_) => "tight",
        }
    }
}

impl Bench {
    /// Lists a container.
    fn listing(&self, shape: &mut dyn Shape, writable: bool, start: Start) -> Result<Listing> {
        let listed = (|| {
            let other = shape.mount(1, 1, false)?;
            let target = shape.mount(0, 0, writable)?;
            drop_caches()?;
            let limit = match start {
                Start::Cold => None,
                Start::Warm => {
                    let cgroup = self.cgroup()?;
                    run_in(&cgroup, "find \"$2\" -type f -exec cat {} +", &other)?;
                    None
                }
                Start::Tight(bytes) => Some(bytes),
            };
            self.list(&target, limit)
        })();
        shape.unmount()?;
        listed
    }

    /// Lists a directory in a fresh cgroup.
    fn list(&self, target: &Path, limit: Option<u64>) -> Result<Listing> {
        // The programs themselves are not what is measured.
        let cgroup = self.cgroup()?;
        list(&cgroup, &self.dir.join("empty"))?;
        drop(cgroup);
        let cgroup = self.cgroup()?;
        limit.map(|bytes| cgroup.limit(bytes)).transpose()?;
        let started = Instant::now();
        list(&cgroup, target)?;
        let seconds = started.elapsed().as_secs_f64();
        let charge = cgroup.charge()?;
        let peak =
            charge.peak.context("this kernel does not keep the highest charge of a cgroup")?;
        Ok(Listing { seconds, peak_bytes: peak, kernel_bytes: charge.kernel })
    }

    /// Mounts containers of an image and lists each; gives what the first and each further one is charged.
    fn containers(&self, shape: &mut dyn Shape, writable: bool, count: u32) -> Result<(u64, u64)> {
        self.charged(shape, (0..count).map(|number| (0, number)), writable)
    }

    /// The same with an image each.
    fn images(&self, shape: &mut dyn Shape, count: u32) -> Result<(u64, u64)> {
        self.charged(shape, (0..count).map(|number| (number as usize, number)), false)
    }

    fn charged(
        &self,
        shape: &mut dyn Shape,
        containers: impl ExactSizeIterator<Item = (usize, u32)>,
        writable: bool,
    ) -> Result<(u64, u64)> {
        drop_caches()?;
        let cgroup = self.cgroup()?;
        list(&cgroup, &self.dir.join("empty"))?;
        let before = cgroup.charge()?.total;
        let further = containers.len() as u64 - 1;
        let mut first = None;
        let measured = containers.into_iter().try_for_each(|(image, number)| -> Result<()> {
            let inside = cgroup.enter()?;
            let target = shape.mount(image, number, writable);
            drop(inside);
            list(&cgroup, &target?)?;
            first.get_or_insert(cgroup.charge()?.total.saturating_sub(before));
            Ok(())
        });
        let all = cgroup.charge()?.total.saturating_sub(before);
        shape.unmount()?;
        measured?;
        let first = first.unwrap_or_default();
        Ok((first, all.saturating_sub(first) / further.max(1)))
    }

    fn cgroup(&self) -> Result<Cgroup> {
        Ok(self.hierarchy.create(&format!("cofolio-bench-{}", std::process::id()))?)
    }
}

fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop caches")
}

/// Lists a directory by a process in the cgroup.
fn list(cgroup: &Cgroup, target: &Path) -> Result<()> {
    run_in(cgroup, "exec ls -lR \"$2\"", target)
}

/// Has a shell in the cgroup do something with a directory, which is its `$2`.
fn run_in(cgroup: &Cgroup, what: &str, target: &Path) -> Result<()> {
    let script = format!("echo 0 >\"$1\" && {what} >/dev/null");
    let ran = Command::new("sh")
        .args(["-c", &script, "sh"])
        .args([&cgroup.procs(), target])
        .env("LC_ALL", "C")
        .output()
        .context("cannot run sh")?;
    if !ran.status.success() {
        bail!("{what}, {}: {}", target.display(), String::from_utf8_lossy(&ran.stderr).trim());
    }
    Ok(())
}

fn count(dir: &Path) -> Result<u64> {
    let mut count = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        count += 1;
        if entry.file_type()?.is_dir() {
            count += self::count(&entry.path())?;
        }
    }
    Ok(count)
}

/// By time and by peak apart: the two have nothing to do with each other.
fn median(mut runs: Vec<Listing>) -> Listing {
    let middle = runs.len() / 2;
    runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let seconds = runs[middle].seconds;
    runs.sort_by_key(|run| run.peak_bytes);
    Listing { seconds, ..runs[middle] }
}

fn table(report: &Report) -> String {
    let mb = |bytes: u64| format!("{:.2} MB", bytes as f64 / 1e6);
    let mut text = format!(
        "{} entries, Linux {}, cgroup {}. An empty directory: {:.3} s, {}\n\n",
        report.entries,
        report.machine.kernel,
        report.machine.memory_cgroup,
        report.nothing.seconds,
        mb(report.nothing.peak_bytes)
    );
    text += &format!(
        "`ls -lR`: cold; warm, after another image with nearly the same content was read; tight, cold with {}.\n\n",
        mb(report.tight_bytes)
    );
    text += "| | | cold | peak | warm | peak | tight | first container | each further | mount p50/p99 | unmount p50/p99 |\n";
    text += "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n";
    for row in &report.rows {
        let times = |spread: &Option<Spread>| match spread {
            Some(Spread { p50_ms, p99_ms }) => format!("{p50_ms:.2}/{p99_ms:.2} ms"),
            None => String::new(),
        };
        text += &format!(
            "| {} | {} | {:.3} s | {} | {:.3} s | {} | {:.3} s | {} | {} | {} | {} |\n",
            row.shape,
            mode(row.writable),
            row.listing.seconds,
            mb(row.listing.peak_bytes),
            row.warm.seconds,
            mb(row.warm.peak_bytes),
            row.tight.seconds,
            mb(row.first_container),
            mb(row.further_container),
            times(&row.mount),
            times(&row.unmount),
        );
    }
    text += "\n| images that are small changes of one | first | each further |\n|---|--:|--:|\n";
    for Images { shape, count, first, further } in &report.images {
        text += &format!("| {count}, {shape} | {} | {} |\n", mb(*first), mb(*further));
    }
    for reason in &report.skipped {
        text += &format!("\nnot measured: {reason}\n");
    }
    text
}
