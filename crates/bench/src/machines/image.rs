//! `cofolio-bench vm-image`: memory that images of virtual machines take, in guests and in the host.
//!
//! ```text
//! virtio-blk           each image a disk: guests cache it, and the host does
//! DAX per image        each version of the image in a trust domain of its own
//! DAX, shared          both in one: guests map the pages of the host's cache, which segments have once
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use cofolio_cli::interrupt::Cancellable;
use cofolio_image::diff::{Diff, pages};
use cofolio_node::vm::account::mapped_image_files;
use cofolio_node::vm::ram::Ram;
use cofolio_node::vm::{Accel, Kernel, initramfs};
use cofolio_store::{
    Domain,
    task::{Cancel, Task},
};
use serde::Serialize;
use serde_json::Value;

use super::{Host, HostArgs, Machine, PATIENCE};
use crate::goals::Goals;
use crate::measure::cold_start;
use crate::place::{Place, PlaceArgs};
use crate::{Outcome, cleanup, report, residency};

/// Goals. A guest may spend these shares of the bytes read and of the bytes attached; it may have this
/// multiple of its image attached; and the host may cache this multiple of the unique pages.
const READ_SHARE: f64 = 0.02;
const ATTACHED_SHARE: f64 = 0.016;
const ATTACHED_MAX: f64 = 1.5;
const HOST_MAX: f64 = 1.03;
const PAGE: u64 = 4096;

/// Reads all files of the guest's image, and reports free memory.
const SCRIPT: &str = "
free() { sed -n 's/^MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo; }
before=$(dmesg | sed -n 's/.*cofolio-guest: \\([0-9]*\\) kB free before.*/\\1/p')
bytes=$(find / -xdev -type f -exec cat {} + | wc -c)
echo \"{\\\"event\\\":\\\"read\\\",\\\"before\\\":$((before * 1024)),\\\"bytes\\\":$bytes,\\\"free\\\":$(($(free) * 1024))}\"
exec sleep 1000000";

/// Memory that the images of virtual machines take, in guests and in the host
///
/// Starts guests of both versions of an image, which read all of their files: with the image on a disk (virtio-blk), with an
/// own trust domain for each version (DAX), and with one for both, as Cofolio has it. The images need sh, find, sed and dmesg.
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
    DaxPerImage,
    DaxShared,
}

impl How {
    fn title(self) -> &'static str {
        match self {
            Self::Disk => "virtio-blk, EROFS",
            Self::DaxPerImage => "DAX per image",
            Self::DaxShared => "DAX, shared segments",
        }
    }
}

/// Figures of a guest.
#[derive(Debug, Clone, Copy, Serialize)]
struct Guest {
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
    guests: u32,
    memory_mib: u64,
    /// Bytes of pages: unique ones of both images, of unique files, and of each image unpacked on its own.
    unique_pages: u64,
    unique_files: u64,
    unpacked: u64,
    runs: Vec<Ran>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let signals = Cancellable::begin()?;
    let place = Place::prepare(&args.place, Some("vm-image"), &say)?;
    let host = Host::new(&args.host, &place.domain, &signals.cancel)?;
    let images = [(&args.old, "old"), (&args.new, "new")];
    for (image, name) in images {
        host.import(image, name)?;
    }
    let (unique_pages, unique_files, unpacked) = unique(&place.domain)?;
    let mut runs = Vec::new();
    for how in [How::Disk, How::DaxPerImage, How::DaxShared] {
        say(how.title());
        let ran = run_as(args, &place, &host, &signals.cancel, how);
        let stopped = host.stop_all();
        runs.push(cleanup::result(&signals.cancel, ran, stopped)?);
    }
    let (guests, memory_mib) = (args.guests, args.memory);
    let figures = Figures { guests, memory_mib, unique_pages, unique_files, unpacked, runs };
    let goals = goals(&figures);
    let root = Path::new("/");
    report::finish(args.place.json.as_deref(), root, &figures, &table(&figures), &goals)
}

/// Bytes of unique pages, of unique files in pages, and of the files of both images, each on its own.
fn unique(domain: &Domain) -> Result<(u64, u64, u64)> {
    let digest = |name| Ok::<_, anyhow::Error>(domain.get_ref(name)?.context("no image")?.image);
    let (old, new) = (digest("old")?, digest("new")?);
    let diff = Diff::of(domain, [&old, &new], &mut |_| {})?;
    let report = pages::compare(domain, &diff, pages::MEMORY_DEFAULT, &Task::default())?;
    let bytes = |pages: u64| pages * PAGE;
    Ok((bytes(report.distinct_pages), bytes(diff.pages_by_file()), bytes(diff.pages_unshared())))
}

fn run_as(args: &Args, place: &Place, host: &Host<'_>, cancel: &Cancel, how: How) -> Result<Ran> {
    let versions = ["old", "new"];
    match how {
        How::Disk => with_disks(args, place, host),
        How::DaxShared => {
            cold_start()?;
            let machines = start(args, host, &versions)?;
            measured(args, how, machines)
        }
        How::DaxPerImage => {
            // A trust domain for each.
            let store = place.domain.store();
            let domains = versions.map(|version| format!("vm-image-{version}"));
            let domains = domains.map(|name| store.domain_or_create(&name));
            let mut hosts = Vec::new();
            for (domain, image) in domains.iter().zip([&args.old, &args.new]) {
                let domain = domain.as_ref().map_err(|it| anyhow::anyhow!("{it}"))?;
                let host = Host::new(&args.host, domain, cancel)?;
                hosts.push((host, image));
            }
            for ((host, image), version) in hosts.iter().zip(versions) {
                host.import(image, version)?;
            }
            cold_start()?;
            let mut machines = Vec::new();
            for ((host, _), version) in hosts.iter().zip(versions) {
                machines.extend(start(args, host, &[version])?);
            }
            measured(args, how, machines)
        }
    }
}

fn start(args: &Args, host: &Host<'_>, versions: &[&str]) -> Result<Vec<Machine>> {
    let mut machines = Vec::new();
    let memory = format!("{}M", args.memory);
    for number in 0..args.guests {
        for version in versions {
            let name = format!("image-{version}{number}");
            let options = ["--memory", &memory, "--user", "0", "--entrypoint", "sh"];
            machines.push(host.start(&[], &name, &options, version, &["-c", SCRIPT])?);
        }
    }
    Ok(machines)
}

/// Waits until all machines have read everything, and returns the figures.
fn measured(args: &Args, how: How, mut machines: Vec<Machine>) -> Result<Ran> {
    let said = machines.iter_mut().map(|machine| machine.wait_for("read"));
    let said = said.collect::<Result<Vec<_>>>()?;
    let mut files: Vec<PathBuf> = Vec::new();
    let mut guests = Vec::new();
    for (machine, said) in machines.iter().zip(&said) {
        let attached = mapped_image_files(Path::new("/proc"), machine.pid)?;
        guests.push(account(args, machine.pid, said, &attached)?);
        files.extend(attached);
    }
    Ok(Ran { how, guests, cached: cached(files)? })
}

fn account(args: &Args, pid: u32, said: &Value, attached: &[PathBuf]) -> Result<Guest> {
    let figure = |name: &str| said[name].as_u64().with_context(|| format!("no {name} in {said}"));
    let before = figure("before")?;
    ensure!(before > 0, "a guest did not say what it had free before its image");
    let ram = Ram::find(Path::new("/proc"), pid, args.memory << 20)?;
    let sizes = attached.iter().map(|path| Ok(fs::metadata(path)?.len()));
    Ok(Guest {
        read: figure("bytes")?,
        cost: before.saturating_sub(figure("free")?),
        private: ram.resident()?.private(),
        attached: sizes.sum::<Result<u64>>()?,
    })
}

/// Guests whose disk is an EROFS filesystem of the image.
fn with_disks(args: &Args, place: &Place, host: &Host<'_>) -> Result<Ran> {
    let kernel = Kernel::open(&host.kernel)?;
    let boot = initramfs(&place.work, &kernel, &args.canary, &["virtio_blk"])?;
    let mut disks = Vec::new();
    for version in ["old", "new"] {
        let disk = place.work.join(format!("{version}.erofs"));
        let target = format!("erofs:{}", disk.display());
        host.run(&["export", "--replace", version, &target])?;
        disks.push(disk);
    }
    cold_start()?;
    let mut guests = Vec::new();
    for _ in 0..args.guests {
        for disk in &disks {
            host.check()?;
            guests.push((qemu(args, &kernel, &boot.path, disk)?, disk));
        }
    }
    let mut measured = Vec::new();
    for (guest, disk) in &guests {
        let said = guest.wait()?;
        measured.push(account(args, guest.child.id(), &said, std::slice::from_ref(*disk))?);
    }
    Ok(Ran { how: How::Disk, guests: measured, cached: cached(disks)? })
}

fn qemu(args: &Args, kernel: &Kernel, boot: &Path, disk: &Path) -> Result<WithDisk> {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    match Accel::of_this_machine(Path::new("/")) {
        Accel::Kvm => command.args(["-accel", "kvm", "-machine", "pc", "-cpu", "host"]),
        Accel::Tcg => command
            .args(["-accel", "tcg,tb-size=64", "-machine", "pc,hpet=off"])
            .args(["-cpu", "max,cx16=off"]),
    };
    command.args(["-m", &format!("{}M", args.memory), "-serial", "stdio"]);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(boot);
    command.args(["-append", "console=ttyS0 quiet panic=-1 init_on_alloc=0 swiotlb=noforce"]);
    let drive = format!("if=none,id=disk,format=raw,readonly=on,file={}", disk.display());
    command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
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
        self.guests.iter().map(figure).fold(0.0, f64::max)
    }
}

/// Cost of an image in a guest, divided by its allowance.
fn of_allowed(guest: &Guest) -> f64 {
    let allowed = guest.read as f64 * READ_SHARE + guest.attached as f64 * ATTACHED_SHARE;
    guest.cost as f64 / allowed
}

fn goals(figures: &Figures) -> Goals {
    let size = "an image pair of 100 MB or more, 2 guests of each version or more";
    let is_of_this_size = figures.unique_pages >= 100_000_000 && figures.guests >= 2;
    let goals = Goals::new(size, is_of_this_size);
    let shared = figures.runs.iter().find(|it| it.how == How::DaxShared);
    let Some(shared) = shared else { return goals };
    let half = figures.unpacked as f64 / 2.0;
    let of_unique = |bytes: u64| bytes as f64 / figures.unique_pages as f64;
    goals
        .at_most(
            "cost in a guest, of 2 % of what it read and 1.6 % of what is attached",
            shared.worst(of_allowed),
            1.0,
            "",
        )
        .at_most(
            "attached, of an image",
            shared.worst(|it| it.attached as f64 / half),
            ATTACHED_MAX,
            "",
        )
        .at_most("the host's cache, of unique pages", of_unique(shared.cached), HOST_MAX, "")
        .at_most(
            "the host's cache, of unique files",
            shared.cached as f64 / figures.unique_files as f64,
            1.0,
            "",
        )
}

fn table(figures: &Figures) -> String {
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let mut text = format!(
        "{} guests of each version with {} MiB; both images have {} of unique pages, {} in unique files, {} unpacked\n\n\
        | image | read | cost in a guest | of what it read | attached | host's cache | private memory of all guests | together |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|\n",
        figures.guests,
        figures.memory_mib,
        mb(figures.unique_pages),
        mb(figures.unique_files),
        mb(figures.unpacked),
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
