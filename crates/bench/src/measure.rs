//! One measurement: from a cold start, both images mounted, one fresh process reads every file; what
//! has the machine more in memory then?

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cofolio_node::cgroup::{Cgroup, Charge, Hierarchy};
use cofolio_sys::cache::{self, page_size};
use serde::Serialize;

use super::{
    memory::Memory,
    reader::{self, Mode},
    residency::{self, Residency},
    setup::Setup,
    source::Content,
};

/// What one measurement found. Bytes, unless a name says pages.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Run {
    pub(super) setup: &'static str,
    pub(super) mode: Mode,
    /// Time of the reading process, hashing included.
    pub(super) read_seconds: f64,
    /// Files read and compared with the source.
    pub(super) files_compared: u64,
    /// Bytes of them.
    pub(super) bytes_compared: u64,
    /// Pages of content that had to become resident.
    pub(super) expected_pages: u64,
    /// Pages of content, by mincore.
    pub(super) content: Residency,
    /// Pages of metadata images, by mincore.
    pub(super) metadata: Residency,
    /// Pages of directories that the mounts keep in page cache of their own, which nothing can be asked
    /// about: counted from the directories' sizes.
    pub(super) directory_pages: u64,
    /// Pages of the Merkle trees of the files above, by cachestat: fs-verity keeps what it has read of them past
    /// the files' ends.
    pub(super) merkle_pages: u64,
    /// Growth of the machine.
    pub(super) growth: Growth,
    /// Page cache of the measuring program's own files that came in meanwhile, and is not part of
    /// `growth.page_cache`.
    pub(super) own_files: i64,
    /// What the reading cgroup is charged; `None` where the machine has no memory cgroup.
    pub(super) charge: Option<Charge>,
    /// How much page cache the rest of the machine gained meanwhile, by its cgroups' charges.
    pub(super) elsewhere: Option<i64>,
    /// Growth of the page cache of the block device that the images are on, by cachestat; `None` unless
    /// they are on a filesystem of their own.
    pub(super) device_cache: Option<i64>,
    /// How often somebody else dropped caches meanwhile: never, or the attempt is thrown away.
    #[serde(skip)]
    cache_drops: u64,
    /// Pages of content that came in and that the kernel reclaimed before they could be counted. 0, unless
    /// it did so in every attempt.
    pub(super) reclaimed_pages: u64,
    /// Attempts thrown away before, with the reason for each.
    pub(super) discarded: Vec<String>,
    /// The machine before and after.
    pub(super) before: Memory,
    pub(super) after: Memory,
}

/// The machine afterwards less the machine before, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Growth {
    /// Page cache of files, tmpfs and the program's own files apart: meminfo's `Cached` less `Shmem`.
    pub(super) page_cache: i64,
    /// Page cache of block devices: the directories and inode tables of ext4.
    pub(super) buffers: i64,
    /// Kernel objects: inodes, dentries.
    pub(super) slab: i64,
    /// What `MemFree` fell by: everything, and everybody's.
    pub(super) used: i64,
    /// Bytes already taken off `page_cache`, because other cgroups were charged them meanwhile and the
    /// machine did not fall quiet.
    pub(super) taken_off: Option<i64>,
}

impl Growth {
    /// Takes off what others were charged. That covers block devices too, so our own part of `buffers`
    /// has to come from elsewhere: from the device that the images are on, if nobody else is. Else it
    /// stays in `page_cache`.
    fn take_off(&mut self, others: i64, device_cache: Option<i64>) {
        self.page_cache += self.buffers - others;
        if let Some(ours) = device_cache {
            self.page_cache -= ours;
            self.buffers = ours;
        }
        self.taken_off = Some(others);
    }
}

pub(super) fn delta(before: u64, after: u64) -> i64 {
    let magnitude = i64::try_from(after.abs_diff(before)).unwrap_or(i64::MAX);
    if after >= before { magnitude } else { -magnitude }
}

/// How often a measurement that somebody spoilt is tried again.
pub(super) const ATTEMPTS: usize = 4;

/// How long others may take to read again what was dropped, before a measurement starts.
pub(super) const SETTLE_MAX: Duration = Duration::from_secs(5);

/// Measures once. While others drop caches or the kernel reclaims, tries again; while others only use
/// memory too, waits for a quiet moment as long as `patience` lasts, and after that takes what they
/// were charged off.
pub(super) fn measure(
    setup: &mut dyn Setup,
    mode: Mode,
    source: &Source<'_>,
    own: &OwnFiles,
    patience: &mut Duration,
) -> Result<Run> {
    let mut discarded = Vec::new();
    loop {
        let waited = Instant::now();
        wait_for_quiet(*patience);
        let attempt = attempt(setup, mode, source, own, *patience);
        let unmounted = setup.unmount();
        let mut run = attempt?;
        unmounted?;
        if run.cache_drops > 0 {
            discarded.push("somebody dropped caches meanwhile".to_owned());
            ensure!(
                discarded.len() < ATTEMPTS,
                "this machine cannot be measured on: {discarded:?}"
            );
            continue;
        }
        if run.reclaimed_pages > 0 && discarded.len() < ATTEMPTS {
            let pages = run.reclaimed_pages;
            discarded.push(format!("the kernel reclaimed {pages} pages meanwhile"));
            continue;
        }
        let busy = run.elsewhere.filter(|others| {
            let limit = run.expected_pages * page_size() / 200;
            others.unsigned_abs() > limit.max(256 << 10)
        });
        match busy {
            Some(others) if !patience.is_zero() => {
                *patience = patience.saturating_sub(waited.elapsed());
                discarded
                    .push(format!("other cgroups' page cache changed by {} KiB", others / 1024));
                continue;
            }
            Some(others) => run.growth.take_off(others, run.device_cache),
            None => {}
        }
        run.discarded = discarded;
        return Ok(run);
    }
}

/// Waits until nobody else fills or drops page cache for half a second, at most for `patience`.
pub(super) fn wait_for_quiet(patience: Duration) {
    let started = Instant::now();
    let cached = || Memory::read(Path::new("/")).map_or(0, |memory| memory.page_cache());
    let mut last = cached();
    let mut quiet = 0;
    while quiet < 5 && started.elapsed() < patience {
        thread::sleep(Duration::from_millis(100));
        let now = cached();
        quiet = if now.abs_diff(last) < 256 << 10 { quiet + 1 } else { 0 };
        last = now;
    }
}

/// What every path of each image must read as.
pub(super) struct Source<'a> {
    pub(super) images: [&'a HashMap<Vec<u8>, Content>; 2],
}

fn attempt(
    setup: &mut dyn Setup,
    mode: Mode,
    source: &Source<'_>,
    own: &OwnFiles,
    patience: Duration,
) -> Result<Run> {
    setup.unmount()?;
    cold_start()?;
    own.warm()?;
    // What others had in memory they read again now; that is not to fall into the measurement.
    wait_for_quiet(patience.min(SETTLE_MAX));
    // Without a usable memory cgroup the other two figures are still worth having.
    let hierarchy = Hierarchy::find(Path::new("/"));
    let name = format!("cofolio-bench-{}", std::process::id());
    let cgroup = hierarchy.as_ref().ok().and_then(|hierarchy| hierarchy.create(&name).ok());
    let elsewhere =
        || -> Option<u64> { hierarchy.as_ref().ok()?.cache_elsewhere(cgroup.as_ref()?).ok() };

    let device = setup.content().first().and_then(|file| own_device(file));
    let device_before = device.as_ref().map(device_pages).transpose()?;
    fold_counters();
    let own_before = own.resident()?;
    let elsewhere_before = elsewhere();
    let before = Memory::read(Path::new("/"))?;

    // Mounting is done in the cgroup too: it reads metadata that reading the files needs.
    let inside = cgroup.as_ref().map(Cgroup::enter).transpose()?;
    let dirs = [setup.mount(0)?, setup.mount(1)?];
    let started = Instant::now();
    let seen = reader::spawn(mode, &dirs)?;
    let read_seconds = started.elapsed().as_secs_f64();
    drop(inside);

    fold_counters();
    let after = Memory::read(Path::new("/"))?;
    let elsewhere_after = elsewhere();
    let charge = cgroup.as_ref().map(|cgroup| cgroup.charge()).transpose()?;
    let own_after = own.resident()?;
    let device_after = device.as_ref().map(device_pages).transpose()?;
    let device_cache = device_before
        .zip(device_after)
        .map(|(before, after)| delta(before, after).saturating_mul(delta(0, page_size())));

    // From here on everything may grow: opening the backing files brings their inodes in.
    let directory_pages = setup.directory_pages(&dirs)?;
    let content = resident(setup.content())?;
    let metadata = resident(setup.metadata())?;
    let merkle_pages = sum(setup.content().iter().chain(setup.metadata()), past_end)?;
    let cache_drops = Memory::read(Path::new("/"))?.cache_drops - before.cache_drops;
    // Kernels do not count all that reclaims (DAMON, for one), but each file knows.
    let reclaimed_pages =
        if content.resident < setup.expected_pages() { sum(setup.content(), evicted)? } else { 0 };
    let (files_compared, bytes_compared) = compare(&seen, source, &dirs)?;
    // Or the removed cgroup would stay, dying, for as long as its pages do.
    setup.unmount()?;
    setup.forget()?;
    let shmem = delta(before.shmem, after.shmem);
    let own_files = (delta(own_before, own_after)) * i64::try_from(page_size())?;
    Ok(Run {
        setup: setup.name(),
        mode,
        read_seconds,
        files_compared,
        bytes_compared,
        expected_pages: setup.expected_pages(),
        content,
        metadata,
        directory_pages,
        merkle_pages,
        growth: Growth {
            page_cache: delta(before.cached, after.cached) - shmem - own_files,
            buffers: delta(before.buffers, after.buffers),
            slab: delta(before.slab(), after.slab()),
            used: delta(after.free, before.free),
            taken_off: None,
        },
        own_files,
        charge,
        elsewhere: elsewhere_before
            .zip(elsewhere_after)
            .map(|(before, after)| delta(before, after) - shmem),
        device_cache,
        cache_drops,
        reclaimed_pages,
        discarded: Vec::new(),
        before,
        after,
    })
}

/// The block device that `file` is on, unless it is that of the root filesystem, which everybody uses,
/// or the filesystem has no block device.
fn own_device(file: &Path) -> Option<File> {
    let device = fs::metadata(file).ok()?.dev();
    if fs::metadata("/").ok()?.dev() == device {
        return None;
    }
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let name = fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    File::open(Path::new("/dev").join(name.file_name()?)).ok()
}

/// Sums a number of pages over `files`.
fn sum<'a>(
    files: impl IntoIterator<Item = &'a PathBuf>,
    pages: fn(&Path) -> Result<u64>,
) -> Result<u64> {
    let mut sum = 0;
    for file in files {
        sum += pages(file)?;
    }
    Ok(sum)
}

/// Pages of an open block device in the page cache.
fn device_pages(file: &File) -> Result<u64> {
    Ok(cache::cachestat(file, 0, 0)?.cached)
}

/// Pages past the end of the file in the page cache: the fs-verity Merkle trees of ext4, btrfs and
/// f2fs (`Documentation/filesystems/fsverity.rst`).
fn past_end(path: &Path) -> Result<u64> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let end = residency::pages_of(file.metadata()?.len()).saturating_mul(page_size());
    Ok(cache::cachestat(&file, end, 0).with_context(|| path.display().to_string())?.cached)
}

/// Pages of the file that memory pressure, a cgroup's limit or DAMON reclaimed, not those dropped on
/// request (fadvise, drop_caches, truncation).
fn evicted(path: &Path) -> Result<u64> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    Ok(cache::cachestat(&file, 0, 0).with_context(|| path.display().to_string())?.evicted)
}

/// Drops what is resident of `files`. Unlike reclaim it leaves no trace that [`evicted`] would count.
pub(super) fn forget(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let drop = || {
            let advice = rustix::fs::Advice::DontNeed;
            rustix::fs::fadvise(&File::open(path)?, 0, None, advice)?;
            io::Result::Ok(())
        };
        drop().with_context(|| format!("cannot drop the pages of {}", path.display()))?;
    }
    Ok(())
}

/// Sums what is resident of `files`.
fn resident(files: &[PathBuf]) -> Result<Residency> {
    let mut sum = Residency::default();
    for file in files {
        let found = residency::mincore(file)?;
        sum.pages += found.pages;
        sum.resident += found.resident;
    }
    Ok(sum)
}

/// Every path was read, nothing else was, and each read as the source says.
fn compare(seen: &reader::Seen, source: &Source<'_>, dirs: &[PathBuf; 2]) -> Result<(u64, u64)> {
    let (mut files, mut bytes) = ([0; 2], 0);
    for (index, path, content) in seen {
        let (image, dir) = source.images.get(*index).zip(dirs.get(*index)).context("no image")?;
        let at = || dir.join(reader::show(path));
        let Some(expected) = image.get(path) else {
            bail!("{} is there, but the image has no such file", at().display());
        };
        ensure!(
            content == expected,
            "{} reads {} bytes that differ from the image's {} bytes",
            at().display(),
            content.size,
            expected.size
        );
        files[*index] += 1;
        bytes += content.size;
    }
    for (index, image) in source.images.iter().enumerate() {
        if files[index] != image.len() {
            let read: BTreeSet<_> =
                seen.iter().filter(|(i, ..)| *i == index).map(|(_, path, _)| path).collect();
            let missing = image.keys().find(|path| !read.contains(path));
            bail!(
                "{} of {} files were read below {}; missing, for one: {}",
                files[index],
                image.len(),
                dirs[index].display(),
                missing.map_or_else(|| "none".to_owned(), |path| reader::show(path))
            );
        }
    }
    Ok((seen.len() as u64, bytes))
}

/// Nothing of the images in memory: everything written back, clean cache and unused inodes dropped.
pub(crate) fn cold_start() -> Result<()> {
    const DROP: &str = "/proc/sys/vm/drop_caches";
    rustix::fs::sync();
    // Twice, with a pause: inodes freed by the first round, and mounts that were going away while
    // it ran, release their pages only later.
    for _ in 0..2 {
        fs::write(DROP, "3").with_context(|| format!("cannot write {DROP} (root is needed)"))?;
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Folds the per-CPU parts of the kernel's page counters, which may hold back 125 pages per CPU, into
/// what meminfo shows (`Documentation/admin-guide/sysctl/vm.rst`, stat_refresh).
pub(super) fn fold_counters() {
    // Only root may, and only to be more exact.
    let _ = fs::read("/proc/sys/vm/stat_refresh");
}

/// Lets this process open so many files besides some hundred of its own.
pub(super) fn allow_descriptors(count: u64) -> Result<()> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let needed = count + 256;
    if limit.current.is_some_and(|current| current < needed) {
        limit.current = Some(needed);
        limit.maximum = limit.maximum.map(|maximum| maximum.max(needed));
        setrlimit(Resource::Nofile, limit).with_context(|| {
            format!("cannot raise the limit of open files (`ulimit -n`) to the needed {needed}")
        })?;
    }
    Ok(())
}

/// The machine's memory now, exactly.
pub(super) fn read_memory() -> Result<Memory> {
    fold_counters();
    Memory::read(Path::new("/"))
}

/// The program's own files: its binary and libraries, which it and the reading process map.
pub(super) struct OwnFiles(Vec<PathBuf>);

impl OwnFiles {
    pub(super) fn find() -> Result<OwnFiles> {
        let maps = fs::read_to_string("/proc/self/maps").context("cannot read /proc/self/maps")?;
        let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| line[at..].to_owned()));
        let mut files: BTreeSet<PathBuf> = mapped.map(PathBuf::from).collect();
        // The dynamic linker of the reading process looks here first.
        files.insert(PathBuf::from("/etc/ld.so.cache"));
        files.retain(|path| path.is_file());
        Ok(OwnFiles(files.into_iter().collect()))
    }

    /// Reads them in, so that the measurement does not.
    pub(super) fn warm(&self) -> Result<()> {
        for path in &self.0 {
            let mut file =
                File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
            io::copy(&mut file, &mut io::sink())
                .with_context(|| format!("cannot read {}", path.display()))?;
        }
        Ok(())
    }

    fn resident(&self) -> Result<u64> {
        Ok(resident(&self.0)?.resident)
    }
}
