//! `cofolio-bench daemon-memory`: what does the whole daemon hold, and what time does it take, when
//! many cgroups use many mounts?
//!
//! Nothing is made up: the mounts, the cgroups and the processes that read files are real, and the
//! daemon finds them as always.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cofolio_cli::exit::{Exit, Fail};
use cofolio_cli::interrupt::Cancellable;
use cofolio_erofs::tree::{Content, Meta, Tree};
use cofolio_erofs::write::{WriteOptions, write};
use cofolio_image::pack::ImageContents;
use cofolio_node::{
    cgroup::Hierarchy,
    ledger::{Budget, Ledger, thread_time},
    run_dir::RunDir,
};
use cofolio_store::{
    Contents as _, Digest, Domain, FileKind, ImportOptions, Publish, Ref, task::Cancel,
};
use cofolio_sys::{cache::FileMap, fanotify::Opens};
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::Outcome;
use crate::cleanup;
use crate::daemon::Daemon;
use crate::density::worker::Workers;
use crate::goals::Goals;
use crate::measure::{cold_start, delta};
use crate::memory::slab_caches;
use crate::namespace::shapes::{Ours, Shape as _};
use crate::place::{Place, PlaceArgs};
use crate::report::{self, signed};
use crate::usage_lists::{PAIR_BYTES_MAX, Random};

/// Memory of the daemon when many cgroups use many mounts
///
/// Makes so many images of seven tiny files, each with a mount of its own, and as many memory
/// cgroups, each with a process that reads files of 20 random images, maps one of them and stays
/// until the end. Prints the kernel memory of a mark for each superblock, by which the ledger sees
/// opened files, and the memory of a `cofolio serve` that has seen all of it and has answered for
/// it. Then it asks that daemon five times to look at everything at once. After that the daemon
/// takes its default settings, and 50 more processes open two files a second each. Once the daemon
/// has looked at everything anew and knows all files that these processes opened, the command
/// measures its processor time, for a minute at least and until the daemon has looked at everything
/// once more. If it does not come to that, the command fails. The peak of the daemon's memory is
/// read then. At the end another daemon starts with default settings, and the command measures its
/// processor time for a minute. Before any of this, while nothing is mounted and no cache is warm, it
/// measures the kernel memory that a daemon's looks at all objects bring in, and what they bring in
/// again after the caches were dropped.
///
/// Needs root and a memory cgroup. Run it in a mount namespace of its own, because so many mounts
/// slow down whoever reads the list of mounts.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    unshare --mount cofolio-bench daemon-memory 10000 --json daemon-memory.json

\
Exit codes: 0 the goals are met, or are of more mounts; 1 one is missed; others as for every command.")]
pub(crate) struct Args {
    /// Mounts, and cgroups
    #[arg(default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    ids: u32,
    /// The program to run as the daemon [default: `cofolio` beside this one]
    #[arg(long, value_name = "FILE")]
    cofolio: Option<PathBuf>,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Goal: the daemon's peak, with so many mounts and cgroups.
const PEAK_MB_MAX: f64 = 300.0;
const GOAL_IDS: u32 = 10_000;
/// Goal: the daemon's share of a processor, while it keeps its figures up to date.
const CPU_PERCENT_MAX: f64 = 1.0;
/// Goal: the processor time of a look at 50,000 objects, unless it is spread. That of the daemon's
/// start is not.
const OBJECTS_LOOK_MS_MAX: f64 = 150.0;
/// Goal: of the kernel memory that looks at objects bring in, what comes again once it was dropped, while
/// nobody uses the objects.
const BROUGHT_AGAIN_PERCENT_MAX: f64 = 10.0;
/// How long the processor time of a daemon is measured from its start on.
const FIRST_MINUTE: Duration = Duration::from_secs(60);
/// How often it is asked to look.
const LOOKS: usize = 5;
/// How long its share of a processor is measured at least, and how long processes open files at
/// most.
const WATCHED_MIN: Duration = Duration::from_secs(60);
const WATCHED_MAX: Duration = Duration::from_secs(1800);
/// Processes that open files meanwhile, and how often each of them opens one.
const OPENERS: u32 = 50;
const OPEN_INTERVAL: Duration = Duration::from_millis(500);
/// Images that each cgroup uses.
const IMAGES_PER_CGROUP: u32 = 20;
/// Of the cgroups' names.
const CGROUP_PREFIX: &str = "cofolio-daemon-memory-";
/// Files of an image that no other image has, and files that ten others have, too: what a cgroup
/// reads. And files of its own that nobody reads.
const OWN_FILES: u32 = 2;
const SHARED_FILES: u32 = 2;
const UNREAD_FILES: u32 = 3;
/// Processes that are started between two looks.
const BATCH: u32 = 500;
/// Default settings without upkeep, which has no part in this.
const DEFAULTS: &str = "[daemon]\ngc_hours = 0\nscrub_days = 0\n";

#[derive(Debug, Serialize)]
struct Measured {
    mounts: u32,
    cgroups: u32,
    /// Processes that stayed in their cgroups until the end, one in each.
    live_processes: usize,
    /// Pairs of a mount and a cgroup that are used.
    used_pairs: u64,
    objects: u64,
    /// As the ledger counts them itself.
    usage_lists_bytes: u64,
    /// Of `/v1/report`.
    report_bytes: u64,
    /// The line VmHWM of `/proc/PID/status`, at the end.
    peak_bytes: u64,
    /// The lines VmRSS and RssAnon, when all uses are known and before it is asked to look.
    resident_bytes: u64,
    anonymous_bytes: u64,
    /// RssAnon before the first process used a file.
    idle_anonymous_bytes: u64,
    /// Growth of the kernel's slab by a mark on the superblock of each mount, as the ledger makes it.
    marks_slab_bytes: i64,
    /// Of looks at all objects and processes, in order.
    looks_ms: Vec<f64>,
    /// Processor time of such a look, its report included.
    look_cpu_ms: f64,
    /// Processor time of a look at all processes, and at all objects and metadata images, of a
    /// ledger of the benchmark.
    processes_cpu_ms: f64,
    objects_cpu_ms: f64,
    /// Share of one processor of a daemon with default settings in its first minute.
    first_minute_cpu_percent: f64,
    watched: Watched,
    kernel: KernelMemory,
}

/// Kernel memory charged to the cgroup of a daemon while nothing is mounted.
#[derive(Debug, Default, Serialize)]
struct KernelMemory {
    /// After a look at all objects.
    bytes: u64,
    /// After the caches were dropped.
    bytes_dropped: u64,
    /// After one more round of its own.
    bytes_again: u64,
}

/// What the daemon did with its default settings while processes opened files.
#[derive(Debug, Serialize)]
struct Watched {
    seconds: f64,
    openers: u32,
    opens_per_second: f64,
    /// Files that were opened, counted once for each opener. The daemon knows all of them.
    opened_files: u64,
    /// Share of one processor: the daemon's, and of it that of the ledger's thread.
    cpu_percent: f64,
    ledger_cpu_percent: f64,
    /// The largest ones. At the end they are less than `seconds`, so it looked at everything meanwhile.
    residency_age_seconds: u64,
    processes_age_seconds: u64,
    /// Cgroups that it knows then.
    containers: u64,
}

pub(super) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let Place { work, domain, _alone } = Place::prepare(&args.place, None, &say)?;
    let dir = work.join("daemon-memory");
    fs::create_dir_all(&dir)?;
    let config = dir.join("config.toml");
    // The ledger gets the time that it needs: it must not miss a file.
    fs::write(&config, format!("{DEFAULTS}cpu_percent = 100\n"))?;
    let hierarchy = Hierarchy::find(Path::new("/"))?;
    cleanup::remove_cgroups(&hierarchy, CGROUP_PREFIX)?;
    let signals = Cancellable::begin()?;
    let images = images(&domain, args.ids)?;
    say(&format!("{} images are in the store", images.len()));
    let mounts = dir.join("mounts");
    fs::create_dir_all(&mounts)?;
    let mut ours = Ours::new("daemon-memory", mounts.clone(), domain.clone(), images.clone());
    let start = || Daemon::start(args.cofolio.as_deref(), &domain, &config);
    let measured = (|| {
        let kernel = kernel_memory(&start, &hierarchy)?;
        say("the kernel memory of looks at objects that nobody uses is measured");
        for (number, image) in (0..args.ids).zip(0..) {
            signals.cancel.check()?;
            ours.mount(image, number, false)?;
        }
        say("all are mounted");
        let marks_slab_bytes = marks_slab_bytes(&mounts, args.ids)?;
        let _held = hold(&domain, &images)?;
        let at = (&hierarchy, &*dir);
        let measured = observe(args.ids, &start, &domain, at, &signals.cancel, &say)?;
        Ok(Measured { marks_slab_bytes, kernel, ..measured })
    })();
    say("removing all of it");
    let unmounted = ours.unmount();
    let left = cleanup::ensure_nothing_is_left(&hierarchy, CGROUP_PREFIX, &dir);
    let measured = cleanup::result(&signals.cancel, measured, unmounted.and(left))?;
    fs::remove_dir_all(&dir)?;
    let (json, table) = (args.place.json.as_deref(), table(&measured)?);
    report::finish(json, &work, &measured, &table, &goals(&measured))
}

/// Starts a daemon, and the processes, which use the mounts below `dir` and stay, and asks the daemon
/// what it has seen. At the end it starts another daemon.
fn observe(
    ids: u32,
    start: &dyn Fn() -> Result<Daemon>,
    domain: &Domain,
    (hierarchy, dir): (&Hierarchy, &Path),
    cancel: &Cancel,
    say: &dyn Fn(&str),
) -> Result<Measured> {
    let (mounts, profile) = (dir.join("mounts"), dir.join("profile"));
    let daemon = start()?;
    let mut report = daemon.sample()?;
    ensure!(report.images.len() >= ids as usize, "the daemon does not know all images");
    let idle_anonymous_bytes = daemon.status("RssAnon")?;
    let mut random = Random(1);
    // Dropped after the workers: a cgroup can go when its process has gone.
    let mut cgroups = Vec::new();
    let mut workers = Workers::new()?;
    for begin in (0..ids).step_by(BATCH as usize) {
        for number in begin..ids.min(begin + BATCH) {
            cancel.check()?;
            let cgroup = hierarchy.create(&format!("{CGROUP_PREFIX}{number}"))?;
            fs::write(&profile, profile_of(&mut random, ids))?;
            let started = workers.start(&cgroup, &mounts, &profile, None);
            cgroups.push(cgroup);
            started?;
        }
        report = daemon.sample()?;
        say(&format!("{} of {ids} cgroups are known", report.containers.len()));
    }
    let used_pairs = report.containers.iter().map(|it| it.images.len() as u64).sum();
    let wanted = u64::from(ids) * u64::from(IMAGES_PER_CGROUP.min(ids));
    // Others on this machine may use images, too.
    if used_pairs < wanted || report.unknown.overflows > 0 {
        let what = format!("the daemon knows {used_pairs} used pairs of {wanted}");
        return Err(Fail::new(Exit::Failure, what).into());
    }
    let report_bytes = daemon.client.get_text("/v1/report")?.len() as u64;
    daemon.client.get_text("/v1/sharing?domain=default")?;
    let usage_lists_bytes = daemon.metrics()?.figure("cofolio_usage_lists_bytes")?;
    let [resident, anonymous] = ["VmRSS", "RssAnon"].map(|line| daemon.status(line));
    let mut looks_ms = Vec::new();
    let cpu_seconds = daemon.cpu_seconds()?;
    for _ in 0..LOOKS {
        let asked = Instant::now();
        daemon.sample()?;
        looks_ms.push(asked.elapsed().as_secs_f64() * 1e3);
    }
    let look_cpu_ms = (daemon.cpu_seconds()? - cpu_seconds) / LOOKS as f64 * 1e3;
    looks_ms.sort_by(f64::total_cmp);
    let [processes_cpu_ms, objects_cpu_ms] = look(domain)?;
    say("the daemon takes its default settings, and processes open files");
    fs::write(dir.join("config.toml"), DEFAULTS)?;
    daemon.reload()?;
    let watched = watch(ids, &daemon, (hierarchy, dir), cancel)?;
    let peak_bytes = daemon.status("VmHWM")?;
    drop(daemon);
    say("another daemon starts");
    let first_minute_cpu_percent = first_minute(ids, start, cancel)?;
    let live_processes = workers.alive()?;
    ensure!(live_processes == ids as usize, "only {live_processes} of {ids} processes are left");
    Ok(Measured {
        mounts: ids,
        cgroups: ids,
        live_processes,
        used_pairs,
        objects: report.domains.iter().map(|it| it.objects).sum(),
        usage_lists_bytes,
        report_bytes,
        peak_bytes,
        resident_bytes: resident?,
        anonymous_bytes: anonymous?,
        idle_anonymous_bytes,
        marks_slab_bytes: 0,
        looks_ms,
        look_cpu_ms,
        processes_cpu_ms,
        objects_cpu_ms,
        first_minute_cpu_percent,
        watched,
        kernel: KernelMemory::default(),
    })
}

/// Whoever reads a file first is charged for its inode and its name, so the caches are cold.
fn kernel_memory(
    start: &dyn Fn() -> Result<Daemon>,
    hierarchy: &Hierarchy,
) -> Result<KernelMemory> {
    cold_start()?;
    let cgroup = hierarchy.create(&format!("{CGROUP_PREFIX}serve"))?;
    let inside = cgroup.enter()?;
    let daemon = start();
    drop(inside);
    let daemon = daemon?;
    let charged = || -> Result<u64> {
        let charge = cgroup.charge()?;
        Ok(charge.total.saturating_sub(charge.cache + daemon.status("RssAnon")?))
    };
    daemon.sample()?;
    let bytes = charged()?;
    cold_start()?;
    let bytes_dropped = charged()?;
    // By itself: asked, it looks at everything.
    let began = Instant::now();
    let has_looked = |age: u64| age < began.elapsed().as_secs();
    while !has_looked(daemon.metrics()?.figure("cofolio_residency_age_seconds")?) {
        ensure!(began.elapsed() < FIRST_MINUTE, "the daemon does not look at the objects");
        thread::sleep(Duration::from_secs(1));
    }
    Ok(KernelMemory { bytes, bytes_dropped, bytes_again: charged()? })
}

/// Milliseconds of processor time of a look at all processes and of one at all objects. The daemon does
/// not say them apart, so a ledger of this process takes them.
fn look(domain: &Domain) -> Result<[f64; 2]> {
    let mut ledger = Ledger::new(domain.store().clone(), RunDir::of(domain.store())?);
    ledger.sample_all()?;
    let begin = thread_time();
    while !ledger.sample_processes(&Budget::UNLIMITED)? {}
    let between = thread_time();
    while !ledger.sample_residency(&Budget::UNLIMITED) {}
    Ok([between - begin, thread_time() - between].map(|time| time.as_secs_f64() * 1e3))
}

/// The share of one processor of a daemon in its first minute, in percent. It has to know all cgroups
/// then: an idle daemon must not pass.
fn first_minute(ids: u32, start: &dyn Fn() -> Result<Daemon>, cancel: &Cancel) -> Result<f64> {
    let began = Instant::now();
    let daemon = start()?;
    while began.elapsed() < FIRST_MINUTE {
        cancel.check()?;
        thread::sleep(Duration::from_millis(100));
    }
    let percent = daemon.cpu_seconds()? / began.elapsed().as_secs_f64() * 1e2;
    let known: u32 = daemon.metrics()?.figure("cofolio_containers")?;
    ensure!(
        known >= ids,
        "the first minute shows nothing: the daemon knows {known} of {ids} cgroups"
    );
    Ok(percent)
}

/// Measures the daemon's share of a processor while processes in cgroups of their own open files
/// through the mounts. An idle daemon must not pass: it has to look at everything anew, and to know
/// all files that were opened.
fn watch(
    ids: u32,
    daemon: &Daemon,
    (hierarchy, dir): (&Hierarchy, &Path),
    cancel: &Cancel,
) -> Result<Watched> {
    let (mounts, profile) = (dir.join("mounts"), dir.join("profile"));
    let openers = OPENERS.min(ids);
    let mut random = Random(2);
    let before = daemon.metrics()?;
    // Dropped after the workers: a cgroup can go when its process has gone.
    let mut cgroups = Vec::new();
    let mut workers = Workers::opening(OPEN_INTERVAL)?;
    let mut opened_files = 0;
    let mut ages = [0; 2];
    let began = Instant::now();
    // The end of a look takes more than the daemon's share, which it makes up for later: so from
    // the end of one to the end of another.
    let mut measured: Option<(Instant, [f64; 2])> = None;
    for number in 0..openers {
        let cgroup = hierarchy.create(&format!("{CGROUP_PREFIX}opener-{number}"))?;
        let files = profile_of(&mut random, ids);
        opened_files += files.matches('\0').count() as u64;
        fs::write(&profile, files)?;
        workers.start(&cgroup, &mounts, &profile, None)?;
        cgroups.push(cgroup);
    }
    loop {
        cancel.check()?;
        // Seldom, because each answer takes processor time, too.
        thread::sleep(Duration::from_secs(10));
        let now = daemon.metrics()?;
        let cpu = [daemon.cpu_seconds()?, now.figure("cofolio_ledger_cpu_seconds_total")?];
        let seconds = began.elapsed().as_secs_f64();
        let residency_age_seconds: u64 = now.figure("cofolio_residency_age_seconds")?;
        let processes_age_seconds: u64 = now.figure("cofolio_processes_age_seconds")?;
        let growth = |name| Ok::<_, anyhow::Error>(delta(before.figure(name)?, now.figure(name)?));
        let lost = growth("cofolio_unknown_overflows_total")?;
        ensure!(lost == 0, "the daemon lost opened files {lost} times in {seconds:.0} s");
        let known = growth("cofolio_used_objects")?;
        ages = [ages[0].max(residency_age_seconds), ages[1].max(processes_age_seconds)];
        let oldest = residency_age_seconds.max(processes_age_seconds);
        let has_looked_since = |then: Instant| oldest < then.elapsed().as_secs();
        match measured {
            None if has_looked_since(began) && known >= signed(opened_files) => {
                measured = Some((Instant::now(), cpu));
            }
            Some((from, cpu_before)) if from.elapsed() >= WATCHED_MIN && has_looked_since(from) => {
                let seconds = from.elapsed().as_secs_f64();
                let percent = |kind: usize| (cpu[kind] - cpu_before[kind]) / seconds * 1e2;
                return Ok(Watched {
                    seconds,
                    openers,
                    opens_per_second: f64::from(openers) / OPEN_INTERVAL.as_secs_f64(),
                    opened_files,
                    cpu_percent: percent(0),
                    ledger_cpu_percent: percent(1),
                    residency_age_seconds: ages[0],
                    processes_age_seconds: ages[1],
                    containers: now.figure("cofolio_containers")?,
                });
            }
            _ => {}
        }
        ensure!(
            began.elapsed() < WATCHED_MAX,
            "the share of a processor shows nothing: after {seconds:.0} s the daemon knows {known} of \
             {opened_files} opened files, and its figures are {residency_age_seconds} s (residency) \
             and {processes_age_seconds} s (processes) old"
        );
    }
}

#[allow(clippy::cast_precision_loss, reason = "bytes as MB and per pair, and seconds")]
fn goals(it: &Measured) -> Goals {
    let size = format!("{GOAL_IDS} mounts and cgroups");
    let of_pair = |bytes: u64| bytes as f64 / it.used_pairs as f64;
    let grown = it.anonymous_bytes.saturating_sub(it.idle_anonymous_bytes);
    let Watched { cpu_percent, residency_age_seconds, processes_age_seconds, .. } = it.watched;
    let files = (it.objects + u64::from(it.mounts)) as f64;
    Goals::new(size, it.mounts >= GOAL_IDS)
        .at_most(
            "peak of the daemon's resident memory",
            it.peak_bytes as f64 / 1e6,
            PEAK_MB_MAX,
            " MB",
        )
        .at_most(
            "usage lists, as they count themselves, of each used pair",
            of_pair(it.usage_lists_bytes),
            PAIR_BYTES_MAX,
            " bytes",
        )
        .figure(
            "growth of anonymous memory by the uses, of each used pair",
            of_pair(grown),
            " bytes",
        )
        .at_most("the daemon's share of a processor", cpu_percent, CPU_PERCENT_MAX, " %")
        .figure("of it the ledger's thread", it.watched.ledger_cpu_percent, " %")
        // It begins with a look at everything, which is not spread: whoever asks first wants an answer.
        .figure("the same in its first minute", it.first_minute_cpu_percent, " %")
        .at_most(
            "processor time of a look at 50,000 objects",
            it.objects_cpu_ms * 5e4 / it.objects as f64,
            OBJECTS_LOOK_MS_MAX,
            " ms",
        )
        // Such a look counts the pages of metadata images, too, of which each mount here has its
        // own.
        .figure(
            "the same, of 50,000 files: objects and metadata images",
            it.objects_cpu_ms * 5e4 / files,
            " ms",
        )
        .figure("processor time of a look at all processes", it.processes_cpu_ms, " ms")
        .figure(
            "kernel memory that a look at a file brings in, an object or a metadata image",
            it.kernel.brought_bytes() / files,
            " bytes",
        )
        // Metadata images are looked at in each round, and each mount here has its own.
        .at_most(
            "of it, what comes again by itself while nobody uses the objects",
            it.kernel.brought_again_percent(),
            BROUGHT_AGAIN_PERCENT_MAX,
            " %",
        )
        .figure("largest age of the figures of residency", residency_age_seconds as f64, " s")
        .figure("largest age of those of processes", processes_age_seconds as f64, " s")
}

#[allow(clippy::cast_precision_loss, reason = "bytes per object, and percent")]
impl KernelMemory {
    fn brought_bytes(&self) -> f64 {
        self.bytes.saturating_sub(self.bytes_dropped) as f64
    }

    fn brought_again_percent(&self) -> f64 {
        self.bytes_again.saturating_sub(self.bytes_dropped) as f64 / self.brought_bytes() * 1e2
    }
}

impl Measured {
    fn median_look_ms(&self) -> f64 {
        self.looks_ms.get(self.looks_ms.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

fn table(it: &Measured) -> Result<String> {
    let mut text = format!(
        "{} mounts x {} cgroups, {} used pairs, {} objects. {} processes stay in the cgroups, each with \
         a file mapped.\n\n| memory of the daemon | MB |\n|---|--:|\n",
        it.mounts, it.cgroups, it.used_pairs, it.objects, it.live_processes,
    );
    for (what, bytes) in [
        ("peak of resident memory, at the end", it.peak_bytes),
        ("resident memory when all uses are known", it.resident_bytes),
        ("of it anonymous", it.anonymous_bytes),
        ("anonymous before the first use", it.idle_anonymous_bytes),
        ("usage lists, as they count themselves", it.usage_lists_bytes),
        ("one report as JSON", it.report_bytes),
        (
            "kernel memory charged to it after a look at all objects, nothing mounted",
            it.kernel.bytes,
        ),
        ("the same after the caches were dropped", it.kernel.bytes_dropped),
        ("after it has looked again by itself", it.kernel.bytes_again),
    ] {
        writeln!(text, "| {what} | {}.{} |", bytes / 1_000_000, bytes / 100_000 % 10)?;
    }
    writeln!(
        text,
        "\nKernel memory of the ledger's marks: {} bytes each, of {} marks.",
        it.marks_slab_bytes / i64::from(it.mounts),
        it.mounts
    )?;
    writeln!(
        text,
        "\nA look at everything, when the daemon is asked: {:.0} ms (median of {LOOKS}), {:.0} ms of processor\n\
         time. A ledger of the benchmark took {:.0} ms of processor time for a look at all processes, and\n\
         {:.0} ms for one at all objects and metadata images. In its first minute with default settings a daemon took {:.2} %\n\
         of one processor.",
        it.median_look_ms(),
        it.look_cpu_ms,
        it.processes_cpu_ms,
        it.objects_cpu_ms,
        it.first_minute_cpu_percent,
    )?;
    let Watched { seconds, openers, opened_files, cpu_percent, .. } = &it.watched;
    writeln!(
        text,
        "\nWith default settings, for {seconds:.0} s, while {openers} processes opened {:.0} files a second in\n\
         all: {cpu_percent:.2} % of one processor. At the end the daemon knew {} cgroups and all\n\
         {opened_files} opened files. Its figures of residency were at most {} s old, those of processes {} s.",
        it.watched.opens_per_second,
        it.watched.containers,
        it.watched.residency_age_seconds,
        it.watched.processes_age_seconds,
    )?;
    Ok(text)
}

/// Marks the superblock of each mount as the ledger does, and says by how much the slab grew. The
/// daemon's own pages, which the other figures count, do not include this memory.
fn marks_slab_bytes(mounts: &Path, ids: u32) -> Result<i64> {
    let slab = || Ok::<i64, anyhow::Error>(slab_caches(Path::new("/"))?.values().sum());
    let opens = Opens::new()?;
    let before = slab()?;
    for number in 0..ids {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = rustix::fs::open(mounts.join(number.to_string()), flags, Mode::empty())?;
        opens.mark_filesystem(root)?;
    }
    Ok(slab()? - before)
}

/// Those that a cgroup reads.
fn names() -> impl Iterator<Item = String> {
    (0..OWN_FILES + SHARED_FILES).map(|file| format!("file-{file}"))
}

/// Images of a few files, made unless the store has them.
fn images(domain: &Domain, count: u32) -> Result<Vec<Digest>> {
    let name = |number: u32| format!("bench-daemon-memory:{number}");
    let known: Vec<_> = (0..count).map(|it| domain.get_ref(&name(it))).collect::<Result<_, _>>()?;
    if known.iter().all(Option::is_some) {
        return Ok(known.into_iter().flatten().map(|it| it.image).collect());
    }
    let meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 1_700_000_000, mtime_nsec: 0 };
    let staging = domain.begin_import(ImportOptions::default())?;
    let (mut images, mut publish, mut objects) = (Vec::new(), Publish::default(), Vec::new());
    for number in 0..count {
        let mut tree = Tree::new(Meta { mode: 0o755, ..meta });
        let unread = (0..UNREAD_FILES).map(|file| format!("unread-{file}"));
        for (file, path) in (0..).zip(names().chain(unread)) {
            let is_own = !(OWN_FILES..OWN_FILES + SHARED_FILES).contains(&file);
            let content = match is_own {
                true => format!("file {file} of image {number}\n"),
                false => format!("file {file} of images {} to {}9\n", number / 10, number / 10),
            };
            let size = content.len() as u64;
            let stored = staging.put_object(content.as_bytes())?;
            objects.push((stored.digest, size));
            let content = Content::object(size, &stored.digest.0);
            tree.insert(tree.root(), path.as_bytes(), meta, content)?;
        }
        let mut writer = staging.image_writer()?;
        write(&tree, &WriteOptions::default(), &mut writer)?;
        let image = writer.finish()?;
        publish.refs.push((name(number), Ref::new(image)));
        images.push(image);
    }
    staging.commit(&publish, objects)?;
    Ok(images)
}

/// Maps all objects of the images. Their pages are charged to no cgroup then, which they would keep,
/// and stay resident when others drop the page cache: a use before that would not count.
fn hold(domain: &Domain, images: &[Digest]) -> Result<Vec<FileMap>> {
    let mut sizes = BTreeMap::new();
    for image in images {
        let file = domain.open_image(image)?;
        let visit = &mut |object, size| _ = sizes.insert(object, size);
        ImageContents.names(FileKind::Image, &file, visit).map_err(anyhow::Error::from_boxed)?;
    }
    let map = |(object, size): (Digest, u64)| {
        let file = domain.open_object(&object)?;
        let map = FileMap::new(file.descriptor().context("an object is no file")?, size)?;
        map.read_at(0, &mut [0]);
        Ok(map)
    };
    sizes.into_iter().map(map).collect()
}

/// The files of some random images, below the directory of mounts.
fn profile_of(random: &mut Random, ids: u32) -> String {
    let mut images: Vec<u32> = Vec::new();
    while images.len() < IMAGES_PER_CGROUP.min(ids) as usize {
        let image = random.below(ids);
        if !images.contains(&image) {
            images.push(image);
        }
    }
    let files =
        images.iter().flat_map(|image| names().map(move |name| format!("{image}/{name}\0")));
    files.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cofolio_cli::exit::Exit;

    fn measured(ids: u32, peak_bytes: u64, bytes_of_a_pair: u64) -> Measured {
        let used_pairs = u64::from(ids) * u64::from(IMAGES_PER_CGROUP);
        Measured {
            mounts: ids,
            cgroups: ids,
            live_processes: ids as usize,
            used_pairs,
            objects: 50_000,
            usage_lists_bytes: used_pairs * bytes_of_a_pair,
            report_bytes: 0,
            peak_bytes,
            resident_bytes: 0,
            anonymous_bytes: 0,
            idle_anonymous_bytes: 0,
            marks_slab_bytes: 0,
            looks_ms: vec![100.0],
            look_cpu_ms: 100.0,
            processes_cpu_ms: 50.0,
            objects_cpu_ms: 50.0,
            first_minute_cpu_percent: 0.9,
            watched: Watched {
                seconds: 60.0,
                openers: OPENERS,
                opens_per_second: 100.0,
                opened_files: 4000,
                cpu_percent: 0.9,
                ledger_cpu_percent: 0.8,
                residency_age_seconds: 20,
                processes_age_seconds: 20,
                containers: 0,
            },
            kernel: KernelMemory {
                bytes: 82_000_000,
                bytes_dropped: 2_000_000,
                bytes_again: 9_000_000,
            },
        }
    }

    /// 25 mounts met the goal of 10,000 in 41 MB.
    #[test]
    fn only_10_000_mounts_meet_or_miss_the_goals() {
        let small = measured(25, 41_000_000, 186);
        assert!(!goals(&small).table().contains("| met |"), "{}", goals(&small).table());
        assert_eq!(goals(&measured(25, 400_000_000, 300)).exit(), Exit::Ok);
        assert_eq!(goals(&measured(10_000, 299_000_000, 256)).exit(), Exit::Ok);
        assert_eq!(goals(&measured(10_000, 301_000_000, 256)).exit(), Exit::Failure);
        assert_eq!(goals(&measured(10_000, 299_000_000, 257)).exit(), Exit::Failure);
    }

    /// An archived run missed it, and then it was judged no more. And what has no bound was in no table:
    /// the first minute, and the age of the figures, which grows where the share of a processor is
    /// bounded.
    #[test]
    fn the_look_at_objects_is_judged_and_what_has_no_bound_is_printed() {
        let with = |change: fn(&mut Measured)| {
            let mut measured = measured(10_000, 299_000_000, 256);
            change(&mut measured);
            goals(&measured)
        };
        let slow = with(|it| (it.objects, it.objects_cpu_ms) = (25_000, 76.0));
        assert_eq!(slow.exit(), Exit::Failure);
        let busy = with(|it| it.first_minute_cpu_percent = 4.88);
        assert!(busy.table().contains("| 4.88 % | none |"), "{}", busy.table());
        let old = with(|it| it.watched.processes_age_seconds = 412);
        assert!(old.table().contains("| 412 s | none |"), "{}", old.table());
        assert_eq!(old.exit(), Exit::Ok);
        // The daemon loaded the inodes of all objects of the store again and again.
        let again = with(|it| it.kernel.bytes_again = 82_000_000);
        assert_eq!(again.exit(), Exit::Failure);
        assert!(again.table().contains("| 1333.333 bytes | none |"), "{}", again.table());
    }
}
