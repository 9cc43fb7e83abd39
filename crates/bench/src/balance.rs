//! `cofolio-bench balance IMAGE…`: does the ledger know where the page cache went? Containers read and
//! write; meanwhile the growth of the machine's page cache is compared with what the ledger and the
//! files say, item by item.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Read as _,
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use anyhow::{Context as _, Result, ensure};
use cofolio_cli::interrupt::Cancellable;
use cofolio_image::pack::ImageContents;
use cofolio_node::{
    cgroup::Hierarchy,
    ledger::Ledger,
    mount::{Access, MountRecord, MountRequest, Mounter, UmountOptions},
    run_dir::RunDir,
};
use cofolio_store::{Contents as _, Digest, Domain, Error, FileKind, task::Cancel};
use cofolio_sys::cache::{self, FileMap, page_size};
use serde::Serialize;

use crate::Outcome;
use crate::cleanup::{self, for_all};
use crate::density::variants;
use crate::goals::Goals;
use crate::measure::{OwnFiles, SETTLE_MAX, cold_start, delta, read_memory, wait_for_quiet};
use crate::memory::Memory;
use crate::place::{Place, PlaceArgs};
use crate::report;
use crate::residency::{self, Residency, pages_of};
use crate::share;

/// Of the cgroup's name.
const CGROUP_PREFIX: &str = "cofolio-balance-";

/// The machine's page cache, item by item
///
/// Mounts each image read-only and writable. From a cold start, readers go through all files of each
/// mount, by read(2) and by mmap(2), some of them to their half, and writers change and add files of the
/// writable ones. Then they do the same again and again, with the same files and the same bytes.
/// Meanwhile the growth of the machine's page cache is compared with the sum of its items. Needs root,
/// and drops the page cache of the whole machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench balance corpus/out/redis/old corpus/out/redis/new

Exit codes: 0 the goals are met, or the page cache grew by less than 64 MiB; 1 one is missed; others as
for every command.")]
pub(crate) struct Args {
    /// OCI layout directories, OCI archives, `docker save` archives, or refs of the store
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    #[command(flatten)]
    place: PlaceArgs,
}

/// By how many percent the sum may differ from the growth, and objects from mincore.
const REST_PERCENT_MAX: f64 = 2.0;
const OBJECTS_PERCENT_MAX: f64 = 1.0;
/// Growth from which on the goals hold: 2 % of less is what any other program may bring in.
const GROWTH_MIN: i64 = 64 << 20;
/// What each writer adds, in bytes, and how many files of the image it changes.
const ADDED: usize = 4 << 20;
const CHANGED_FILES: usize = 50;
/// Shared memory of the workload, in bytes.
const SHARED: usize = 16 << 20;

/// Bytes.
#[derive(Debug, Serialize)]
struct Balance {
    /// Growth of the machine's page cache (`Cached`).
    growth: i64,
    /// Objects, by the ledger.
    objects: i64,
    /// The same objects, by mincore(2).
    objects_mincore: i64,
    /// The same objects, if they were resident as a whole.
    objects_whole: i64,
    /// Metadata images, by the ledger.
    metadata: i64,
    /// Directories of the EROFS mounts, by cachestat(2).
    directories: i64,
    /// Files in the upper directories, by cachestat(2).
    uppers: i64,
    /// Shared memory (`Shmem`).
    shared_memory: i64,
    /// What other programs brought in meanwhile, by the charge of other cgroups.
    others: i64,
    /// Growth that no item explains.
    rest: i64,
}

impl Balance {
    /// Growth that is none of the items of the daemon's report: directories, upper directories and
    /// what others brought in are items of the benchmark alone.
    fn not_reported(&self) -> i64 {
        self.growth - self.objects - self.metadata - self.shared_memory
    }

    fn goals(&self) -> Goals {
        let objects_off = percent(self.objects - self.objects_mincore, self.objects_mincore);
        let size = "a growth of the page cache by 64 MiB or more";
        Goals::new(size, self.growth >= GROWTH_MIN)
            .at_most("unexplained growth", percent(self.rest, self.growth), REST_PERCENT_MAX, " %")
            .at_most("objects, ledger against mincore", objects_off, OBJECTS_PERCENT_MAX, " %")
            .figure("not in the daemon's report", percent(self.not_reported(), self.growth), " %")
    }
}

#[allow(clippy::cast_precision_loss, reason = "a ratio of bytes")]
fn percent(difference: i64, of: i64) -> f64 {
    100.0 * difference.abs() as f64 / of.max(1) as f64
}

pub(super) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let Place { work, domain, _alone } = Place::prepare(&args.place, None, &say)?;
    let dir = work.join("balance");
    fs::create_dir_all(&dir)?;
    let hierarchy = Hierarchy::find(Path::new("/"))?;
    cleanup::remove_cgroups(&hierarchy, CGROUP_PREFIX)?;
    variants::clean(std::slice::from_ref(&dir), &domain)?;
    let mut images = Vec::new();
    for text in &args.images {
        images.push(share::prepare_one(text, &work, &domain, &say)?.1);
    }
    let signals = Cancellable::begin()?;
    let balance = measure(&dir, &domain, &hierarchy, &images, &signals.cancel)?;
    let json = args.place.json.as_deref();
    report::finish(json, &work, &balance, &table(&balance), &balance.goals())
}

#[allow(clippy::cast_precision_loss, reason = "bytes as MiB")]
fn table(it: &Balance) -> String {
    let mut text = "| item | MiB | |\n|---|--:|---|\n".to_owned();
    for (name, bytes, source) in [
        ("growth of the page cache", it.growth, "`Cached` of /proc/meminfo"),
        ("objects", it.objects, "the ledger"),
        ("metadata images", it.metadata, "the ledger"),
        ("directories of EROFS", it.directories, "cachestat"),
        ("upper directories", it.uppers, "cachestat"),
        ("shared memory", it.shared_memory, "`Shmem` of /proc/meminfo"),
        ("other programs", it.others, "the charge of other cgroups"),
        ("unexplained", it.rest, "the growth less all items"),
        ("not in the daemon's report", it.not_reported(), "less the items that its report has"),
        ("objects by mincore", it.objects_mincore, "mincore"),
        ("objects as a whole", it.objects_whole, "their sizes, in pages"),
    ] {
        text += &format!("| {name} | {:.2} | {source} |\n", bytes as f64 / f64::from(1 << 20));
    }
    text
}

/// Mounts, lets the workload run, and takes the balance meanwhile.
fn measure(
    dir: &Path,
    domain: &Domain,
    hierarchy: &Hierarchy,
    images: &[Digest],
    cancel: &Cancel,
) -> Result<Balance> {
    let mounter = Mounter::new(domain, RunDir::of(domain.store())?, &ImageContents);
    let mut mounted = Vec::new();
    let measured = (|| {
        for (number, image) in images.iter().enumerate() {
            for access in [Access::ReadOnly, Access::Writable] {
                let target = dir.join(format!("{number}-{access:?}"));
                fs::create_dir_all(&target)?;
                let request = MountRequest { access, ..MountRequest::new(*image, target) };
                mounted.push(mounter.mount(&request)?);
            }
        }
        under_load(domain, hierarchy, &mounter, &mounted, images)
    })();
    let unmounted = for_all(&mounted, |record| {
        mounter.umount(&record.target, &UmountOptions { force: true, ..Default::default() })?;
        Ok(fs::remove_dir(&record.target)?)
    });
    cleanup::result(cancel, measured, unmounted)
}

fn under_load(
    domain: &Domain,
    hierarchy: &Hierarchy,
    mounter: &Mounter<'_>,
    mounted: &[MountRecord],
    images: &[Digest],
) -> Result<Balance> {
    // What the ledger reads for its index is in the page cache before it begins.
    let mut ledger = Ledger::new(domain.store().clone(), RunDir::of(domain.store())?);
    ledger.sample_all()?;
    let own = OwnFiles::find()?;
    cold_start()?;
    own.warm()?;
    wait_for_quiet(SETTLE_MAX);
    // To be told from what others bring in.
    let cgroup = hierarchy.create(&format!("{CGROUP_PREFIX}{}", std::process::id()))?;
    let others_before = hierarchy.cache_elsewhere(&cgroup)?;
    let before = read_memory()?;

    let inside = cgroup.enter()?;
    let stop = AtomicBool::new(false);
    let begun = Barrier::new(mounted.len() + 2);
    let balance = thread::scope(|scope| {
        let mut workers: Vec<_> = mounted
            .iter()
            .map(|record| {
                let (stop, begun) = (&stop, &begun);
                scope.spawn(move || {
                    let first = go_through(record);
                    begun.wait();
                    first?;
                    while !stop.load(Relaxed) {
                        go_through(record)?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers.push(scope.spawn(|| {
            let memory = shared_memory();
            begun.wait();
            let memory = memory?;
            while !stop.load(Relaxed) {
                memory.write_all_at(b"still here", 0)?;
                thread::sleep(std::time::Duration::from_millis(10));
            }
            Ok::<_, anyhow::Error>(())
        }));
        begun.wait();
        let balance = take(domain, mounter, mounted, images, &mut ledger, &before);
        let others = hierarchy.cache_elsewhere(&cgroup);
        stop.store(true, Relaxed);
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        }
        let mut balance = balance?;
        balance.others = delta(others_before, others?);
        balance.rest -= balance.others;
        Ok::<_, anyhow::Error>(balance)
    });
    drop(inside);
    balance
}

/// Reads each file of a mount. Files with an even number of pages are read through a mapping, and of
/// the other ones the first half, so that not all that is resident is as large as its file. Of a
/// writable mount it changes files and adds one. A second pass reads and writes the same again: nothing
/// new becomes resident, because the items are looked at one after the other and could not be compared.
fn go_through(record: &MountRecord) -> Result<()> {
    let mut files = Vec::new();
    each_file(&record.target, &mut |path, is_dir| {
        if !is_dir {
            files.push(path.to_owned());
        }
        Ok(())
    })?;
    let mut buffer = vec![0; 64 << 10];
    for path in &files {
        let at = || format!("cannot read {}", path.display());
        let file = File::options()
            .read(true)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(path)
            .with_context(at)?;
        let size = file.metadata()?.len();
        let pages = pages_of(size);
        if !pages.is_multiple_of(2) {
            // Without read-ahead.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).with_context(at)?;
            let mut half = file.take(pages.div_ceil(2) * page_size());
            while half.read(&mut buffer).with_context(at)? > 0 {}
        } else {
            let map = FileMap::new(&file, size).with_context(at)?;
            for offset in (0..size).step_by(usize::try_from(page_size())?) {
                map.read_at(offset, &mut [0]);
            }
        }
    }
    if record.upper.is_some() {
        for path in files.iter().take(CHANGED_FILES) {
            let file = File::options().read(true).write(true).open(path)?;
            let mut byte = [0];
            if file.read_at(&mut byte, 0)? == 1 {
                file.write_all_at(&byte, 0)?;
            }
        }
        // Not truncated by the second pass: it goes on while the balance is taken.
        let added = record.target.join("cofolio-balance");
        let added = File::options().write(true).create(true).truncate(false).open(added)?;
        added.write_all_at(&vec![7; ADDED], 0)?;
    }
    Ok(())
}

fn shared_memory() -> Result<File> {
    let memory = rustix::fs::memfd_create("balance", rustix::fs::MemfdFlags::CLOEXEC)?;
    let memory = File::from(memory);
    memory.write_all_at(&vec![7; SHARED], 0)?;
    Ok(memory)
}

fn take(
    domain: &Domain,
    mounter: &Mounter<'_>,
    mounted: &[MountRecord],
    images: &[Digest],
    ledger: &mut Ledger,
    before: &Memory,
) -> Result<Balance> {
    ledger.sample_all()?;
    let report = ledger.report()?;
    let account = report.domains.iter().find(|it| it.domain == domain.name());
    let account = account.context("the ledger does not know the trust domain")?;
    let mut directories = 0;
    for pin in mounter.list()?.pins {
        each_file(&pin.path, &mut |path, is_dir| {
            directories += if is_dir { cached(path)? } else { 0 };
            Ok(())
        })?;
    }
    let mut uppers = 0;
    for upper in mounted.iter().filter_map(|record| record.upper.as_ref()) {
        each_file(&upper.dir, &mut |path, is_dir| {
            uppers += if is_dir { 0 } else { cached(path)? };
            Ok(())
        })?;
    }
    let Residency { pages, resident } = resident_objects(domain, images)?;
    let [objects_mincore, objects_whole] = [resident, pages].map(|it| delta(0, it * page_size()));
    let after = read_memory()?;
    // What one item had when it was looked at, another one has not any more.
    ensure!(after.cache_drops == before.cache_drops, "another program dropped caches meanwhile");
    let shared_memory = delta(before.shmem, after.shmem);
    let growth = delta(before.cached, after.cached);
    let [objects, metadata] =
        [account.resident_bytes, account.metadata_bytes].map(|bytes| delta(0, bytes));
    ensure!(growth > 0, "the page cache has not grown");
    // A ledger that took sizes for what is resident would be right otherwise.
    let shows_residency = growth < GROWTH_MIN || resident * 10 <= pages * 9;
    ensure!(shows_residency, "{resident} of {pages} pages of the objects are resident");
    Ok(Balance {
        growth,
        objects,
        objects_mincore,
        objects_whole,
        metadata,
        directories,
        uppers,
        shared_memory,
        others: 0,
        rest: growth - objects - metadata - directories - uppers - shared_memory,
    })
}

/// Pages of all objects of the images, by mincore.
fn resident_objects(domain: &Domain, images: &[Digest]) -> Result<Residency> {
    let mut objects = BTreeSet::new();
    for image in images {
        let file = domain.open_image(image)?;
        let visit = &mut |object, _| _ = objects.insert(object);
        ImageContents
            .names(FileKind::Image, &file, visit)
            .map_err(|source| Error::Unreadable { what: format!("image {image}"), source })?;
    }
    let mut all = Residency::default();
    for object in objects {
        let path = domain.object_path(&object).context("the store has no directory")?;
        let Residency { pages, resident } = residency::mincore(&path)?;
        all.pages += pages;
        all.resident += resident;
    }
    Ok(all)
}

/// Bytes of a file or directory in the page cache.
fn cached(path: &Path) -> Result<i64> {
    let at = || path.display().to_string();
    let file = File::open(path).with_context(at)?;
    Ok(delta(0, cache::cachestat(&file, 0, 0).with_context(at)?.cached * page_size()))
}

/// Visits the directories and regular files of one filesystem below a directory, itself included.
fn each_file(dir: &Path, visit: &mut dyn FnMut(&Path, bool) -> Result<()>) -> Result<()> {
    let device = fs::metadata(dir)?.dev();
    let mut dirs = vec![PathBuf::from(dir)];
    while let Some(dir) = dirs.pop() {
        visit(&dir, true)?;
        for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let found = entry.metadata()?;
            if found.is_dir() && found.dev() == device {
                dirs.push(entry.path());
            } else if found.is_file() {
                visit(&entry.path(), false)?;
            }
        }
    }
    Ok(())
}
