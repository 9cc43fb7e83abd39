//! `cofolio-bench vm-image`: memory that images of virtual machines take, in guests and in the host.
//!
//! ```text
//! virtio-blk           each image a disk: guests cache it, and the host does
//! virtio-blk, direct   the same, but QEMU opens the disk with cache=none: only guests cache it
//! DAX per image        each version of the image in a trust domain of its own
//! DAX, shared          both in one: guests map the pages of the host's cache, which segments have
//!                      once; with a writable root, and with a read-only one
//! ```
//!
//! All guests have a balloon that reports free pages. The host's memory is counted some time after
//! all have read everything.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use cofolio_cli::interrupt::Cancellable;
use cofolio_image::compose::named_objects::open_image;
use cofolio_image::diff::{Diff, pages};
use cofolio_node::vm::account::mapped_image_files;
use cofolio_node::vm::ram::Ram;
use cofolio_node::vm::{Accel, Kernel, initramfs};
use cofolio_store::{
    Digest, Domain,
    task::{Cancel, Task},
};
use serde::Serialize;
use serde_json::Value;

use super::{Host, HostArgs, Machine, PATIENCE, accel, executed_by};
use crate::goals::Goals;
use crate::measure::cold_start;
use crate::median::highest;
use crate::place::{Place, PlaceArgs};
use crate::{Outcome, cleanup, report, residency};

/// Goals. A guest may spend these shares of the bytes read and of the bytes attached; it may have this
/// multiple of its image attached; and the host may cache this multiple of the unique pages.
const READ_SHARE: f64 = 0.02;
const ATTACHED_SHARE: f64 = 0.016;
const ATTACHED_MAX: f64 = 1.5;
const HOST_MAX: f64 = 1.03;
const PAGE: u64 = 4096;
/// Time between the last guest's reading and the look at the host's memory. The kernel reports free
/// pages within two seconds.
const SETTLE: Duration = Duration::from_secs(10);
/// Both versions of the image.
const VERSIONS: [&str; 2] = ["old", "new"];

/// Reads all files of the guest's image, and reports free memory.
const SCRIPT: &str = "
free() { sed -n 's/^MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo; }
before=$(dmesg | sed -n 's/.*cofolio-guest: \\([0-9]*\\) kB free before.*/\\1/p')
bytes=$(find / -xdev -type f -exec cat {} + | wc -c)
echo \"{\\\"event\\\":\\\"read\\\",\\\"before\\\":$((before * 1024)),\\\"bytes\\\":$bytes,\\\"free\\\":$(($(free) * 1024))}\"
exec sleep 1000000";

/// Memory that the images of virtual machines take, in guests and in the host
///
/// Starts guests of both versions of an image, which read all of their files: with the image on a
/// disk (virtio-blk), cached by the host or opened with cache=none; with an own trust domain for
/// each version (DAX); and with one for both, as Cofolio has it, with a writable root and with a
/// read-only one. Fails if a guest does not read as many bytes as the image's files have. The
/// images need sh, find, sed and dmesg.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench vm-image corpus/out/redis/old corpus/out/redis/new --kernel vmlinuz --canary cofolio-canary

Exit codes: 0 the goals are met, or the run is smaller than they are of; 1 one is missed; others as for every command.")]
pub(crate) struct Args {
    /// OCI layout directories, OCI archives or `docker save` archives
    old: String,
    new: String,
    /// Guests of each version
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    guests: u32,
    /// MiB of each
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(128..=1 << 20))]
    memory: u64,
    /// cofolio-canary, the first process of guests with a disk
    #[arg(long, value_name = "FILE")]
    canary: PathBuf,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum How {
    Disk,
    DiskDirect,
    DaxPerImage,
    DaxShared,
    DaxSharedReadOnly,
}

impl How {
    const ALL: [Self; 5] =
        [Self::Disk, Self::DiskDirect, Self::DaxPerImage, Self::DaxShared, Self::DaxSharedReadOnly];

    /// Whether the image is a disk.
    fn is_disk(self) -> bool {
        matches!(self, Self::Disk | Self::DiskDirect)
    }

    fn title(self) -> &'static str {
        match self {
            Self::Disk => "virtio-blk, EROFS, cached by the host",
            Self::DiskDirect => "virtio-blk, EROFS, cache=none",
            Self::DaxPerImage => "DAX per image, writable root",
            Self::DaxShared => "DAX, shared segments, writable root",
            Self::DaxSharedReadOnly => "DAX, shared segments, read-only root",
        }
    }
}

/// Figures of a guest.
#[derive(Debug, Clone, Copy, Serialize)]
struct Guest {
    /// Number of the version of its image.
    version: usize,
    /// Bytes of files that it read.
    read: u64,
    /// Decrease of free memory, from before the image's devices appear to after reading everything.
    cost: u64,
    /// Private bytes of its memory.
    private: u64,
    /// Bytes of the files that are attached to it.
    attached: u64,
}

#[derive(Debug, Serialize)]
struct Ran {
    how: How,
    guests: Vec<Guest>,
    /// Bytes of the images' files in the host's page cache.
    cached: u64,
}

#[derive(Debug, Serialize)]
struct Figures {
    accel: Accel,
    guests: u32,
    memory_mib: u64,
    #[serde(flatten)]
    images: Images,
    runs: Vec<Ran>,
}

/// Sizes of the images.
#[derive(Debug, Clone, Copy, Serialize)]
struct Images {
    /// Bytes of pages: unique ones of both images, of unique files, and of each version unpacked on
    /// its own.
    unique_pages: u64,
    unique_files: u64,
    unpacked: [u64; 2],
    /// Bytes of all files of each version, each as often as it has names.
    bytes: [u64; 2],
}

pub(crate) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let signals = Cancellable::begin()?;
    let place = Place::prepare(&args.place, Some("vm-image"), &say)?;
    let host = Host::new(&args.host, &place.domain, &signals.cancel)?;
    for (image, name) in [&args.old, &args.new].into_iter().zip(VERSIONS) {
        host.import(image, name)?;
    }
    let images = Images::of(&place.domain)?;
    let mut runs = Vec::new();
    for how in How::ALL {
        say(how.title());
        let ran = run_as(args, &place, &host, &signals.cancel, how);
        let ran = ran.and_then(|ran| images.ensure_read(&ran).map(|()| ran));
        let stopped = host.stop_all();
        runs.push(cleanup::result(&signals.cancel, ran, stopped)?);
    }
    let (guests, memory_mib) = (args.guests, args.memory);
    let figures = Figures { accel: accel(), guests, memory_mib, images, runs };
    let goals = goals(&figures);
    let root = Path::new("/");
    report::finish(args.place.json.as_deref(), root, &figures, &table(&figures), &goals)
}

impl Images {
    fn of(domain: &Domain) -> Result<Self> {
        let digest =
            |name| Ok::<_, anyhow::Error>(domain.get_ref(name)?.context("no image")?.image);
        let (old, new) = (digest(VERSIONS[0])?, digest(VERSIONS[1])?);
        let diff = Diff::of(domain, [&old, &new], &mut |_| {})?;
        let report = pages::compare(domain, &diff, pages::MEMORY_DEFAULT, &Task::default())?;
        Ok(Self {
            unique_pages: report.distinct_pages * PAGE,
            unique_files: diff.pages_by_file() * PAGE,
            unpacked: [diff.a.unpacked_pages * PAGE, diff.b.unpacked_pages * PAGE],
            bytes: [bytes_of_files(domain, &old)?, bytes_of_files(domain, &new)?],
        })
    }

    /// Fails if a guest has read more or less than its image has: figures of guests that read
    /// different bytes cannot be compared.
    fn ensure_read(&self, ran: &Ran) -> Result<()> {
        for guest in &ran.guests {
            let (bytes, version) = (self.bytes[guest.version], VERSIONS[guest.version]);
            ensure!(
                guest.read == bytes,
                "{}: a guest of the {version} version read {} bytes, but the image's files have \
                 {bytes}",
                ran.how.title(),
                guest.read,
            );
        }
        Ok(())
    }
}

/// Bytes of all regular files of an image, each as often as it has names.
fn bytes_of_files(domain: &Domain, image: &Digest) -> Result<u64> {
    let file = domain.open_image(image)?;
    let image = open_image(&file)?;
    let mut walk = image.walk()?;
    let mut bytes = 0;
    while let Some(found) = walk.advance()? {
        if found.inode.is_file() {
            bytes += found.inode.size;
        }
    }
    Ok(bytes)
}

fn run_as(args: &Args, place: &Place, host: &Host<'_>, cancel: &Cancel, how: How) -> Result<Ran> {
    match how {
        How::Disk | How::DiskDirect => with_disks(args, place, host, how),
        How::DaxShared | How::DaxSharedReadOnly => {
            cold_start()?;
            let machines = start(args, host, how, &[0, 1])?;
            measured(args, host, how, machines)
        }
        How::DaxPerImage => {
            // A trust domain for each.
            let store = place.domain.store();
            let domains = VERSIONS.map(|version| format!("vm-image-{version}"));
            let domains = domains.map(|name| store.domain_or_create(&name));
            let mut hosts = Vec::new();
            for (domain, image) in domains.iter().zip([&args.old, &args.new]) {
                let domain = domain.as_ref().map_err(|it| anyhow::anyhow!("{it}"))?;
                let host = Host::new(&args.host, domain, cancel)?;
                hosts.push((host, image));
            }
            for ((host, image), version) in hosts.iter().zip(VERSIONS) {
                host.import(image, version)?;
            }
            cold_start()?;
            let mut machines = Vec::new();
            for (version, (host, _)) in hosts.iter().enumerate() {
                machines.extend(start(args, host, how, &[version])?);
            }
            measured(args, host, how, machines)
        }
    }
}

/// Starts guests of versions, and returns them with the version's number.
fn start(
    args: &Args,
    host: &Host<'_>,
    how: How,
    versions: &[usize],
) -> Result<Vec<(Machine, usize)>> {
    let mut machines = Vec::new();
    let memory = format!("{}M", args.memory);
    for number in 0..args.guests {
        for version in versions {
            let image = VERSIONS[*version];
            let name = format!("image-{image}{number}");
            let mut options = vec!["--memory", &memory, "--user", "0", "--entrypoint", "sh"];
            options.extend((how == How::DaxSharedReadOnly).then_some("--read-only"));
            let machine = host.start(&[], &name, &options, image, &["-c", SCRIPT])?;
            machines.push((machine, *version));
        }
    }
    Ok(machines)
}

/// Waits until all machines have read everything, and returns the figures.
fn measured(
    args: &Args,
    host: &Host<'_>,
    how: How,
    mut machines: Vec<(Machine, usize)>,
) -> Result<Ran> {
    let said = machines.iter_mut().map(|(machine, _)| machine.wait_for("read"));
    let said = said.collect::<Result<Vec<_>>>()?;
    host.wait(SETTLE)?;
    let mut files: Vec<PathBuf> = Vec::new();
    let mut guests = Vec::new();
    for ((machine, version), said) in machines.iter().zip(&said) {
        let attached = mapped_image_files(Path::new("/proc"), machine.pid)?;
        guests.push(account(args, machine.pid, *version, said, &attached)?);
        files.extend(attached);
    }
    Ok(Ran { how, guests, cached: cached(files)? })
}

fn account(
    args: &Args,
    pid: u32,
    version: usize,
    said: &Value,
    attached: &[PathBuf],
) -> Result<Guest> {
    let figure = |name: &str| said[name].as_u64().with_context(|| format!("no {name} in {said}"));
    let ram = Ram::find(Path::new("/proc"), pid, args.memory << 20)?;
    let sizes = attached.iter().map(|path| Ok(fs::metadata(path)?.len()));
    Ok(Guest {
        version,
        read: figure("bytes")?,
        cost: cost(figure("before")?, figure("free")?)?,
        private: ram.resident()?.private(),
        attached: sizes.sum::<Result<u64>>()?,
    })
}

/// Decrease of free memory. Fails if there is none: then something else gave memory back, and how
/// much of it the image took is not known.
fn cost(before: u64, after: u64) -> Result<u64> {
    ensure!(before > 0, "a guest did not say what it had free before its image");
    ensure!(after < before, "a guest had {before} bytes free before its image and {after} after");
    Ok(before - after)
}

/// Guests whose disk is an EROFS filesystem of the image.
fn with_disks(args: &Args, place: &Place, host: &Host<'_>, how: How) -> Result<Ran> {
    let kernel = Kernel::open(&host.kernel)?;
    let boot = initramfs(&place.work, &kernel, &args.canary, &["virtio_blk"])?;
    let mut disks = Vec::new();
    for version in VERSIONS {
        let disk = place.work.join(format!("{version}.erofs"));
        let target = format!("erofs:{}", disk.display());
        host.run(&["export", "--replace", version, &target])?;
        disks.push(disk);
    }
    cold_start()?;
    let mut guests = Vec::new();
    for _ in 0..args.guests {
        for (version, disk) in disks.iter().enumerate() {
            host.check()?;
            guests.push((qemu(args, &kernel, &boot.path, disk, how)?, version));
        }
    }
    let said = guests.iter().map(|(guest, _)| guest.wait()).collect::<Result<Vec<_>>>()?;
    host.wait(SETTLE)?;
    let mut measured = Vec::new();
    for ((guest, version), said) in guests.iter().zip(&said) {
        let attached = std::slice::from_ref(&disks[*version]);
        measured.push(account(args, guest.child.id(), *version, said, attached)?);
    }
    Ok(Ran { how, guests: measured, cached: cached(disks)? })
}

fn qemu(args: &Args, kernel: &Kernel, boot: &Path, disk: &Path, how: How) -> Result<WithDisk> {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    match accel() {
        Accel::Kvm => command.args(["-accel", "kvm", "-machine", "pc", "-cpu", "host"]),
        Accel::Tcg => command
            .args(["-accel", "tcg,tb-size=64", "-machine", "pc,hpet=off"])
            .args(["-cpu", "max,cx16=off"]),
    };
    command.args(["-m", &format!("{}M", args.memory), "-serial", "stdio"]);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(boot);
    // Words and balloon are those of `cofolio vm run`.
    let words = "quiet panic=-1 init_on_alloc=0 swiotlb=noforce no_timer_check \
                 page_reporting.page_reporting_order=0";
    command.args(["-append", &format!("console=ttyS0 {words}")]);
    let cache = if how == How::DiskDirect { "none" } else { "writeback" };
    let drive = format!("if=none,id=disk,format=raw,readonly=on,cache={cache}");
    command.args(["-drive", &format!("{drive},file={}", disk.display())]);
    command.args(["-device", "virtio-blk-pci,drive=disk"]);
    command.args([
        "-device",
        "virtio-balloon-pci,id=balloon,free-page-reporting=on,deflate-on-oom=on",
    ]);
    let output = tempfile::NamedTempFile::new()?;
    command.stdin(Stdio::null()).stdout(output.reopen()?).stderr(File::create("/dev/null")?);
    let child = command.spawn().context("starting qemu-system-x86_64")?;
    Ok(WithDisk { child, output })
}

/// A guest with a disk. It ends with this.
struct WithDisk {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl WithDisk {
    fn wait(&self) -> Result<Value> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let said = fs::read_to_string(self.output.path())?;
            let events = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            for event in events {
                ensure!(event["event"] != "failed", "a guest with a disk: {}", event["why"]);
                if event["event"] == "read" {
                    return Ok(event);
                }
            }
            thread::sleep(Duration::from_millis(200));
        }
        bail!("a guest with a disk says nothing")
    }
}

impl Drop for WithDisk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes of files that are in the page cache, each file counted once.
fn cached(mut files: Vec<PathBuf>) -> Result<u64> {
    files.sort();
    files.dedup();
    let resident = |path: &PathBuf| Ok(residency::mincore(path)?.resident * PAGE);
    files.iter().map(resident).sum()
}

impl Ran {
    /// Memory of guests and host together.
    fn total(&self) -> u64 {
        self.cached + self.guests.iter().map(|it| it.private).sum::<u64>()
    }

    fn worst(&self, figure: impl Fn(&Guest) -> f64) -> f64 {
        highest(self.guests.iter().map(figure))
    }
}

/// Cost of an image in a guest, divided by its allowance.
fn of_allowed(guest: &Guest) -> f64 {
    let allowed = guest.read as f64 * READ_SHARE + guest.attached as f64 * ATTACHED_SHARE;
    guest.cost as f64 / allowed
}

fn goals(figures: &Figures) -> Goals {
    let size = "an image pair of 100 MB or more, 2 guests of each version or more; with shared \
        segments and a writable root";
    let images = &figures.images;
    let is_of_this_size = images.unique_pages >= 100_000_000 && figures.guests >= 2;
    let goals = Goals::new(size, is_of_this_size);
    let ran = |how| figures.runs.iter().find(|it| it.how == how);
    let Some(shared) = ran(How::DaxShared) else { return goals };
    let disks = figures.runs.iter().filter(|it| it.how.is_disk()).map(Ran::total).min();
    let of_disk = |bytes: u64| bytes as f64 / disks.map_or(f64::NAN, |disk| disk as f64);
    let goals = goals
        .at_most(
            "cost in a guest, of 2 % of what it read and 1.6 % of what is attached",
            shared.worst(of_allowed),
            1.0,
            "",
        )
        .at_most(
            "attached, of the guest's image unpacked",
            shared.worst(|it| it.attached as f64 / images.unpacked[it.version] as f64),
            ATTACHED_MAX,
            "",
        )
        .at_most(
            "the host's cache, of unique pages",
            shared.cached as f64 / images.unique_pages as f64,
            HOST_MAX,
            "",
        )
        .at_most(
            "the host's cache, of unique files",
            shared.cached as f64 / images.unique_files as f64,
            1.0,
            "",
        )
        .at_most(
            "host's cache and guests' memory together, of the better disk's",
            of_disk(shared.total()),
            1.0,
            "",
        );
    let Some(read_only) = ran(How::DaxSharedReadOnly) else { return goals };
    goals
        .figure(
            "read-only root: cost in a guest, of 2 % of what it read and 1.6 % of what is attached",
            read_only.worst(of_allowed),
            "",
        )
        .figure("read-only root: together, of the better disk's", of_disk(read_only.total()), "")
}

fn table(figures: &Figures) -> String {
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let images = &figures.images;
    let mut text = format!(
        "{} guests of each version with {} MiB, which report free pages; {}: no figure here is of \
        time. Both images have {} of unique pages, {} in unique files; unpacked they have {} and \
        {}. Figures of a guest are those of the worst one.\n\n\
        | image | read | cost in a guest | of what it read | attached | host's cache \
        | private memory of all guests | together |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|\n",
        figures.guests,
        figures.memory_mib,
        executed_by(figures.accel),
        mb(images.unique_pages),
        mb(images.unique_files),
        mb(images.unpacked[0]),
        mb(images.unpacked[1]),
    );
    for ran in &figures.runs {
        let most = |figure: fn(&Guest) -> u64| ran.guests.iter().map(figure).max().unwrap_or(0);
        let share = ran.worst(|it| it.cost as f64 / it.read as f64);
        text += &format!(
            "| {} | {} | {} | {:.1} % | {} | {} | {} | {} |\n",
            ran.how.title(),
            mb(most(|it| it.read)),
            mb(most(|it| it.cost)),
            share * 100.0,
            mb(most(|it| it.attached)),
            mb(ran.cached),
            mb(ran.guests.iter().map(|it| it.private).sum()),
            mb(ran.total()),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    const MB: u64 = 1_000_000;

    fn ran(how: How, cached: u64, attached: [u64; 2], private: u64) -> Ran {
        let guest = |version: usize| {
            let attached = attached[version] * MB;
            Guest { version, read: 100 * MB, cost: MB, private: private * MB, attached }
        };
        Ran { how, guests: vec![guest(0), guest(1)], cached: cached * MB }
    }

    fn figures(attached: [u64; 2]) -> Figures {
        let images = Images {
            unique_pages: 150 * MB,
            unique_files: 160 * MB,
            unpacked: [100 * MB, 300 * MB],
            bytes: [100 * MB, 100 * MB],
        };
        let runs = vec![
            ran(How::Disk, 200, [100, 100], 100),
            ran(How::DiskDirect, 0, [100, 100], 130),
            ran(How::DaxShared, 150, attached, 60),
            ran(How::DaxSharedReadOnly, 150, attached, 50),
        ];
        Figures { accel: Accel::Tcg, guests: 2, memory_mib: 512, images, runs }
    }

    /// Both versions were divided by their mean, so the smaller one could have twice its size.
    #[test]
    fn a_version_is_compared_with_its_own_size() {
        let table = |attached| goals(&figures(attached)).table();
        let good = table([140, 450]);
        assert!(good.contains("unpacked | 1.5 | 1.5 | met |"), "{good}");
        let bad = table([200, 300]);
        assert!(bad.contains("unpacked | 2 | 1.5 | MISSED |"), "{bad}");
    }

    #[test]
    fn the_better_disk_counts() {
        let table = goals(&figures([100, 300])).table();
        // 150 + 120 of 260.
        let line = "together, of the better disk's | 1.038 | 1 | MISSED |";
        assert!(table.contains(line), "{table}");
        assert!(
            table.contains("read-only root: together, of the better disk's | 0.962"),
            "{table}"
        );
    }

    /// More free memory afterwards was a cost of 0, and met the goal.
    #[test]
    fn memory_that_something_else_gave_back_is_an_error() {
        assert_eq!(cost(1000, 300).unwrap(), 700);
        assert!(cost(1000, 1001).is_err() && cost(1000, 1000).is_err() && cost(0, 0).is_err());
    }

    #[test]
    fn a_guest_that_reads_other_bytes_than_the_image_has_fails() {
        let Figures { images, mut runs, .. } = figures([100, 300]);
        images.ensure_read(&runs[0]).unwrap();
        runs[0].guests[1].read -= 1;
        let error = images.ensure_read(&runs[0]).unwrap_err().to_string();
        assert!(error.contains("new version read 99999999 bytes"), "{error}");
    }
}
