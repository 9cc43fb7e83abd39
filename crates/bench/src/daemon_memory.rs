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
use cofolio_node::ledger::{Report, cgroup::Hierarchy};
use cofolio_store::{
    Contents as _, Digest, Domain, FileKind, ImportOptions, Publish, Ref, task::Cancel,
};
use cofolio_sys::cache::FileMap;
use serde::Serialize;

use crate::Outcome;
use crate::cleanup;
use crate::daemon::{Daemon, metric};
use crate::density::worker::Workers;
use crate::goals::Goals;
use crate::namespace::shapes::{Ours, Shape as _};
use crate::place::{Place, PlaceArgs};
use crate::report;
use crate::usage_lists::{PAIR_BYTES_MAX, Random};

/// Memory of the daemon when many cgroups use many mounts
///
/// Makes so many images of a few small files, each with a mount of its own, and as many memory
/// cgroups, each with a process that reads files of 20 random images. Prints the memory of a
/// `cofolio serve` that has seen all of it and has answered for it. The processes end when the
/// daemon has seen them, 500 at a time; mounts and cgroups stay. Then it asks that daemon five times
/// to look at everything at once. At the end another one, with the settings that it comes with,
/// looks at everything twice in its own time. Then it has its processor time taken for a minute, in
/// which 100 such cgroups and processes are there and another one comes each second. It has to know
/// all of these.
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
/// Goal: the daemon's share of a processor, which it spreads a look at everything over.
const CPU_PERCENT_MAX: f64 = 1.0;
/// How often it is asked to look.
const LOOKS: usize = 5;
/// For how long its share is taken, how many cgroups are used then, and how many more are each second.
/// Without the goals' mounts and cgroups a few seconds do.
const WATCHED: Duration = Duration::from_secs(60);
const WATCHED_OF_FEW: Duration = Duration::from_secs(5);
const WATCHED_CGROUPS: u32 = 100;
const WATCHED_PER_SECOND: u32 = 1;
/// Images that each cgroup uses.
const IMAGES_PER_CGROUP: u32 = 20;
/// Of the cgroups' names.
const CGROUP_PREFIX: &str = "cofolio-daemon-memory-";
/// Files of an image that no other image has, and files that ten others have, too: what a cgroup
/// reads. And files of its own that nobody reads.
const OWN_FILES: u32 = 2;
const SHARED_FILES: u32 = 2;
const UNREAD_FILES: u32 = 3;
/// Processes at one time.
const BATCH: u32 = 500;

#[derive(Debug, Serialize)]
struct Measured {
    mounts: u32,
    cgroups: u32,
    /// Pairs of a mount and a cgroup that are used.
    used_pairs: u64,
    objects: u64,
    /// As the ledger counts them itself.
    usage_lists_bytes: u64,
    /// Of `/v1/report`.
    report_bytes: u64,
    /// The lines VmHWM, VmRSS and RssAnon of `/proc/PID/status`.
    peak_bytes: u64,
    resident_bytes: u64,
    anonymous_bytes: u64,
    /// RssAnon before the first process used a file.
    idle_anonymous_bytes: u64,
    /// Of looks at all objects and processes, in order.
    looks_ms: Vec<f64>,
    as_it_comes: AsItComes,
}

/// Of a daemon with the settings that it comes with.
#[derive(Debug, Default, Serialize)]
struct AsItComes {
    /// How long its first two looks take, and their processor time.
    first_looks_seconds: f64,
    first_looks_cpu_seconds: f64,
    /// For how long cgroups came after them, and the share of one processor meanwhile.
    watched_seconds: u64,
    cpu_percent: f64,
    /// How old its figures are at the end of that time.
    residency_age_seconds: f64,
    processes_age_seconds: f64,
}

pub(super) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let Place { work, domain, _alone } = Place::prepare(&args.place, None, &say)?;
    let dir = work.join("daemon-memory");
    fs::create_dir_all(&dir)?;
    // Upkeep has no part in this.
    let (config, as_it_comes) = (dir.join("config.toml"), dir.join("as-it-comes.toml"));
    let settings = "[daemon]\ngc_hours = 0\nscrub_days = 0\n";
    fs::write(&as_it_comes, settings)?;
    // And the ledger gets what time it needs: it must not miss a file.
    fs::write(&config, format!("{settings}cpu_percent = 100\n"))?;
    let hierarchy = Hierarchy::find(Path::new("/"))?;
    cleanup::remove_cgroups(&hierarchy, CGROUP_PREFIX)?;
    let signals = Cancellable::begin()?;
    let images = images(&domain, args.ids)?;
    say(&format!("{} images are in the store", images.len()));
    let mounts = dir.join("mounts");
    fs::create_dir_all(&mounts)?;
    let mut ours = Ours::new("daemon-memory", mounts.clone(), domain.clone(), images.clone());
    let measured = (|| {
        for (number, image) in (0..args.ids).zip(0..) {
            signals.cancel.check()?;
            ours.mount(image, number, false)?;
        }
        say("all are mounted");
        let _held = hold(&domain, &images)?;
        let daemon = Daemon::start(args.cofolio.as_deref(), &domain, &config)?;
        let at = (&hierarchy, &*dir);
        let mut measured = observe(args.ids, &daemon, images.len(), at, &signals.cancel, &say)?;
        drop(daemon);
        say("a daemon as it comes watches it");
        let daemon = Daemon::start(args.cofolio.as_deref(), &domain, &as_it_comes)?;
        measured.as_it_comes = watch(args.ids, &daemon, at, &signals.cancel)?;
        Ok(measured)
    })();
    say("removing all of it");
    let unmounted = ours.unmount();
    let left = cleanup::ensure_nothing_is_left(&hierarchy, CGROUP_PREFIX, &dir);
    let measured = cleanup::result(&signals.cancel, measured, unmounted.and(left))?;
    fs::remove_dir_all(&dir)?;
    let (json, table) = (args.place.json.as_deref(), table(&measured)?);
    report::finish(json, &work, &measured, &table, &goals(&measured))
}

/// Starts the processes, which use the mounts below `dir`, and asks the daemon what it has seen.
fn observe(
    ids: u32,
    daemon: &Daemon,
    images: usize,
    (hierarchy, dir): (&Hierarchy, &Path),
    cancel: &Cancel,
    say: &dyn Fn(&str),
) -> Result<Measured> {
    let (mounts, profile) = (dir.join("mounts"), dir.join("profile"));
    let idle: Report = serde_json::from_slice(&daemon.ask("POST /v1/sample")?)?;
    ensure!(idle.images.len() >= images, "the daemon does not know all images");
    let idle_anonymous_bytes = daemon.status("RssAnon")?;
    let mut random = Random(1);
    let mut cgroups = Vec::new();
    let mut report = idle;
    for start in (0..ids).step_by(BATCH as usize) {
        let mut workers = Workers::new()?;
        for number in start..ids.min(start + BATCH) {
            cancel.check()?;
            let cgroup = hierarchy.create(&format!("{CGROUP_PREFIX}{number}"))?;
            fs::write(&profile, profile_of(&mut random, ids))?;
            workers.start(&cgroup, &mounts, &profile, None)?;
            cgroups.push(cgroup);
        }
        report = serde_json::from_slice(&daemon.ask("POST /v1/sample")?)?;
        workers.end()?;
        say(&format!("{} of {ids} cgroups are known", report.containers.len()));
    }
    let used_pairs = report.containers.iter().map(|it| it.images.len() as u64).sum();
    let wanted = u64::from(ids) * u64::from(IMAGES_PER_CGROUP.min(ids));
    // Others on this machine may use images, too.
    if used_pairs < wanted || report.unknown.overflows > 0 {
        let what = format!("the daemon knows {used_pairs} used pairs of {wanted}");
        return Err(Fail::new(Exit::Failure, what).into());
    }
    let report_bytes = daemon.ask("GET /v1/report")?.len() as u64;
    daemon.ask("GET /v1/sharing?domain=default")?;
    let metrics = String::from_utf8(daemon.ask("GET /metrics")?)?;
    let memory = ["VmHWM", "VmRSS", "RssAnon"].map(|line| daemon.status(line));
    let mut looks_ms = Vec::new();
    for _ in 0..LOOKS {
        let start = Instant::now();
        daemon.ask("POST /v1/sample")?;
        looks_ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    looks_ms.sort_by(f64::total_cmp);
    let [peak, resident, anonymous] = memory;
    Ok(Measured {
        mounts: ids,
        cgroups: ids,
        used_pairs,
        objects: report.domains.iter().map(|it| it.objects).sum(),
        usage_lists_bytes: metric(&metrics, "cofolio_usage_lists_bytes")?,
        report_bytes,
        peak_bytes: peak?,
        resident_bytes: resident?,
        anonymous_bytes: anonymous?,
        idle_anonymous_bytes,
        looks_ms,
        as_it_comes: AsItComes::default(),
    })
}

/// Waits for the daemon's first looks, and takes its share of a processor while cgroups use mounts.
fn watch(
    ids: u32,
    daemon: &Daemon,
    (hierarchy, dir): (&Hierarchy, &Path),
    cancel: &Cancel,
) -> Result<AsItComes> {
    const NAME: &str = "watched-";
    let (mounts, profile) = (dir.join("mounts"), dir.join("profile"));
    let first_looks_seconds = daemon.first_looks(cancel)?.as_secs_f64();
    let first_looks_cpu_seconds = daemon.cpu_seconds()?;
    let mut random = Random(2);
    let (mut workers, mut cgroups) = (Workers::new()?, Vec::new());
    let mut use_some = |count: u32| -> Result<()> {
        for _ in 0..count {
            cancel.check()?;
            let cgroup = hierarchy.create(&format!("{CGROUP_PREFIX}{NAME}{}", cgroups.len()))?;
            fs::write(&profile, profile_of(&mut random, ids))?;
            workers.start(&cgroup, &mounts, &profile, None)?;
            cgroups.push(cgroup);
        }
        Ok(())
    };
    use_some(WATCHED_CGROUPS)?;
    let (began, before) = (Instant::now(), daemon.cpu_seconds()?);
    let watched_seconds = if ids >= GOAL_IDS { WATCHED } else { WATCHED_OF_FEW }.as_secs();
    for second in 0..watched_seconds {
        use_some(WATCHED_PER_SECOND)?;
        thread::sleep(Duration::from_secs(second + 1).saturating_sub(began.elapsed()));
    }
    let cpu_percent = (daemon.cpu_seconds()? - before) / began.elapsed().as_secs_f64() * 1e2;
    let metrics = String::from_utf8(daemon.ask("GET /metrics")?)?;
    let residency_age_seconds = metric(&metrics, "cofolio_residency_age_seconds")?;
    let processes_age_seconds = metric(&metrics, "cofolio_processes_age_seconds")?;
    // Of what has no process any more it can know only what it saw when that was opened or mapped.
    workers.end()?;
    let report: Report = serde_json::from_slice(&daemon.ask("POST /v1/sample")?)?;
    let known = report.containers.iter();
    let known = known.filter(|it| it.cgroup.contains(&format!("{CGROUP_PREFIX}{NAME}"))).count();
    ensure!(known == cgroups.len(), "the daemon knows {known} of {} cgroups", cgroups.len());
    ensure!(report.unknown.overflows == 0, "the daemon has lost opened files");
    Ok(AsItComes {
        first_looks_seconds,
        first_looks_cpu_seconds,
        watched_seconds,
        cpu_percent,
        residency_age_seconds,
        processes_age_seconds,
    })
}

#[allow(clippy::cast_precision_loss, reason = "bytes as MB and per pair")]
fn goals(it: &Measured) -> Goals {
    let size = format!("{GOAL_IDS} mounts and cgroups");
    let pair_bytes = it.usage_lists_bytes as f64 / it.used_pairs as f64;
    Goals::new(size, it.mounts >= GOAL_IDS)
        .at_most(
            "peak of the daemon's resident memory",
            it.peak_bytes as f64 / 1e6,
            PEAK_MB_MAX,
            " MB",
        )
        .at_most("usage lists, of each used pair", pair_bytes, PAIR_BYTES_MAX, " bytes")
        .at_most(
            "the daemon's share of a processor",
            it.as_it_comes.cpu_percent,
            CPU_PERCENT_MAX,
            " %",
        )
}

impl Measured {
    fn median_look_ms(&self) -> f64 {
        self.looks_ms.get(self.looks_ms.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

fn table(it: &Measured) -> Result<String> {
    let mut text = format!(
        "{} mounts x {} cgroups, {} used pairs, {} objects\n\n| memory | MB |\n|---|--:|\n",
        it.mounts, it.cgroups, it.used_pairs, it.objects,
    );
    for (what, bytes) in [
        ("peak of resident memory", it.peak_bytes),
        ("resident memory", it.resident_bytes),
        ("of it anonymous", it.anonymous_bytes),
        ("anonymous before the first use", it.idle_anonymous_bytes),
        ("usage lists, as they count themselves", it.usage_lists_bytes),
        ("one report as JSON", it.report_bytes),
    ] {
        writeln!(text, "| {what} | {}.{} |", bytes / 1_000_000, bytes / 100_000 % 10)?;
    }
    let look = it.median_look_ms();
    writeln!(text, "\nA look at everything: {look:.0} ms (median of {LOOKS}).\n")?;
    let AsItComes {
        first_looks_seconds,
        first_looks_cpu_seconds,
        watched_seconds,
        cpu_percent,
        residency_age_seconds,
        processes_age_seconds,
    } = &it.as_it_comes;
    writeln!(
        text,
        "A daemon as it comes had looked at everything twice after {first_looks_seconds:.0} s, \
         with {first_looks_cpu_seconds:.1} s of processor time. In the {watched_seconds} s after that, with \
         {WATCHED_CGROUPS} cgroups in use and {WATCHED_PER_SECOND} more each second, it took \
         {cpu_percent:.2} % of one processor. At their end its figures of objects were \
         {residency_age_seconds:.0} s old, those of processes {processes_age_seconds:.0} s.",
    )?;
    Ok(text)
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
            used_pairs,
            objects: 0,
            usage_lists_bytes: used_pairs * bytes_of_a_pair,
            report_bytes: 0,
            peak_bytes,
            resident_bytes: 0,
            anonymous_bytes: 0,
            idle_anonymous_bytes: 0,
            looks_ms: vec![100.0],
            as_it_comes: AsItComes { cpu_percent: 0.9, ..AsItComes::default() },
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
}
