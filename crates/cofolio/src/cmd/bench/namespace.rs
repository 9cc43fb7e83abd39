//! `cofolio bench namespace IMAGE`: the experiment of the composefs series of 2023. What does it take to list an image,
//! and what does one more container of it cost? Each way in which containers get their files is mounted and listed from
//! a cold start, all in the same run.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cofolio_node::{
    contents::ImageContents,
    ledger::cgroup::{Cgroup, Hierarchy},
    mount::{Access, MountRequest, Mounter, RunDir, UmountOptions},
    oci::{self, ImportOptions},
    pack::{PackOptions, pack},
    probe::{self, Presence},
};
use cofolio_store::{Backend, Digest, Domain, Form};
use rustix::mount::{MountFlags, UnmountFlags};
use serde::Serialize;

use super::report;
use super::share::{Place, Wanted, with_backend};
use crate::{
    cmd::Outcome,
    exit::{Exit, Fail},
    ui::human_size,
};

/// Time and memory for listing an image, and for one more container of it
///
/// Lists every name of an image with `ls -lR`, from a cold start and in a fresh memory cgroup: over EROFS and overlayfs as
/// they were in 2023 (with the objects as an ordinary layer), with filesystems of its own for each container as engines
/// mount them today, by `mount.composefs`, and with each backend of Cofolio that this kernel has; read-only and writable.
/// Then lists it in several containers at once, and starts and ends many. Needs root and a memory cgroup, and drops the
/// caches of the whole machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio bench namespace corpus/out/mysql/old --json mysql.json

Exit codes: 0 measured; others as for every command.")]
pub(crate) struct Args {
    /// Whatever `import` takes, or a ref of the store
    image: String,
    /// Write every figure of every run to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Runs of each kind; the table has medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Containers that list the image one after the other and stay
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(2..=1000))]
    containers: u32,
    /// Containers that are started and ended, for times
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    instances: u32,
    /// Store to import the image into [default: one of its own, in the working directory]
    #[arg(long, value_name = "DIR", env = "COFOLIO_STORE", hide_env_values = true)]
    store: Option<PathBuf>,
    /// Where to mount, and to keep that store
    #[arg(long, value_name = "DIR", default_value = "/var/tmp/cofolio-bench")]
    work: PathBuf,
    /// Say nothing but the table
    #[arg(long, short)]
    quiet: bool,
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
    skipped: Vec<String>,
}

/// One way to mount, read-only or writable. Medians.
#[derive(Serialize)]
struct Row {
    shape: &'static str,
    writable: bool,
    listing: Listing,
    runs: Vec<Listing>,
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

#[derive(Serialize)]
struct Spread {
    p50_ms: f64,
    p99_ms: f64,
}

pub(super) fn run(args: &Args, context: &crate::context::Context<'_>) -> Outcome {
    let global = &context.global;
    let quiet = args.quiet || global.quiet;
    let say = |text: &str| {
        if !quiet {
            let _ = writeln!(io::stderr(), "{text}");
        }
    };
    let wanted = Wanted { work: &args.work, store: args.store.as_ref(), domain: None };
    let Place { work, domain, _alone } = Place::prepare(&wanted, context, &say)?;
    let (name, image) = find(&args.image, &domain)?;
    let hierarchy = Hierarchy::find(Path::new("/"))?;

    let dir = work.join("namespace");
    fs::create_dir_all(dir.join("empty"))?;
    let mut skipped = Vec::new();
    let mut shapes = shapes(&dir, &domain, &name, image, &mut skipped)?;
    skipped.iter().for_each(|reason| say(&format!("SKIP {reason}")));
    let bench = Bench { hierarchy, dir };
    let nothing =
        median((0..3).map(|_| bench.list(&bench.dir.join("empty"))).collect::<Result<_>>()?);
    let entries = {
        let target = shapes[0].mount(0, false)?;
        let count = count(&target);
        shapes[0].unmount()?;
        count?
    };
    let mut rows = Vec::new();
    for writable in [false, true] {
        let mut runs = vec![Vec::new(); shapes.len()];
        for round in 1..=args.runs {
            for (shape, runs) in shapes.iter_mut().zip(&mut runs) {
                let listing = bench.cold(&mut **shape, writable)?;
                say(&format!(
                    "run {round} of {}, {}, {}: {:.3} s, {}",
                    args.runs,
                    shape.name(),
                    mode(writable),
                    listing.seconds,
                    human_size(listing.peak_bytes)
                ));
                runs.push(listing);
            }
        }
        for (shape, runs) in shapes.iter_mut().zip(runs) {
            let (first, further) = bench.containers(&mut **shape, writable, args.containers)?;
            let times = shape.instances(writable, args.instances)?;
            let (mount, unmount) = times.map_or((None, None), |(a, b)| (Some(a), Some(b)));
            rows.push(Row {
                shape: shape.name(),
                writable,
                listing: median(runs.clone()),
                runs,
                first_container: first,
                further_container: further,
                mount,
                unmount,
            });
        }
    }
    let version = format!("{:?}", bench.hierarchy.version()).to_lowercase();
    let report = Report {
        tool: format!("cofolio {}", env!("CARGO_PKG_VERSION")),
        machine: report::machine(&work, version),
        image,
        entries,
        nothing,
        rows,
        skipped,
    };
    if let Some(path) = &args.json {
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
    let source = oci::Source::parse(text)?;
    let report = oci::import(domain, &source, &ImportOptions::default(), &oci::Silent)?;
    let image = report.image.parse()?;
    Ok((report.name, image))
}

/// A way in which containers get their files.
trait Shape {
    fn name(&self) -> &'static str;
    /// Mounts container `number`; gives its root.
    fn mount(&mut self, number: u32, writable: bool) -> Result<PathBuf>;
    /// Takes all of them down.
    fn unmount(&mut self) -> Result<()>;
    /// Times of starting and ending so many.
    fn instances(&mut self, writable: bool, count: u32) -> Result<Option<(Spread, Spread)>>;
}

/// All that can be had here; why others cannot is added to `skipped`.
fn shapes<'a>(
    dir: &Path,
    domain: &'a Domain,
    name: &str,
    image: Digest,
    skipped: &mut Vec<String>,
) -> Result<Vec<Box<dyn Shape + 'a>>> {
    let no_path = || Fail::new(Exit::Failure, "the store is not on a disk");
    let by_hand = |kind| -> Result<_> {
        Ok(ByHand {
            kind,
            dir: dir.join(kind.name().replace(' ', "-")),
            metadata: domain.image_path(&image).ok_or_else(no_path)?,
            objects: domain.objects_dir().ok_or_else(no_path)?,
            mounted: Vec::new(),
        })
    };
    let mut shapes: Vec<Box<dyn Shape>> =
        vec![Box::new(by_hand(Kind::Ordinary)?), Box::new(by_hand(Kind::Engine)?)];
    match Command::new("mount.composefs").arg("--help").output() {
        Ok(_) => shapes.push(Box::new(by_hand(Kind::Composefs)?)),
        Err(error) => skipped.push(format!("composefs: mount.composefs: {error}")),
    }
    let report = probe::probe(&probe::Options::default());
    for backend in Backend::ALL {
        if backend == Backend::InodeShare {
            let feature = report.get("inode-share");
            if let Some(lacks) = feature.filter(|feature| feature.presence != Presence::Present) {
                skipped.push(format!("cofolio inode-share: {}", lacks.detail));
                continue;
            }
        }
        // A domain of its own, since a domain has one backend.
        let own = with_backend(domain.clone(), Some(backend.into()), Form::Plain)?;
        if !own.has_image(&image)? {
            own.copy_ref_from(domain, name, &ImageContents)?;
        }
        if backend == Backend::InodeShare {
            let go_on = &mut |_, _| std::ops::ControlFlow::Continue(());
            pack(&own, &image, &PackOptions::default(), go_on)?;
        }
        let name = match backend {
            Backend::Overlay => "cofolio overlay",
            Backend::InodeShare => "cofolio inode-share",
        };
        let dir = dir.join(backend.as_str());
        fs::create_dir_all(&dir)?;
        shapes.push(Box::new(Ours { name, dir, domain: own, image, mounted: Vec::new() }));
    }
    Ok(shapes)
}

/// Mounts that others make.
struct ByHand {
    kind: Kind,
    dir: PathBuf,
    metadata: PathBuf,
    objects: PathBuf,
    /// In their order.
    mounted: Vec<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The objects as an ordinary layer of overlayfs, as it had to be before Linux 6.5.
    Ordinary,
    /// EROFS and overlayfs with a data-only layer, each container its own.
    Engine,
    /// By `mount.composefs`; what is written goes to a second overlay.
    Composefs,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Ordinary => "erofs+overlay 2023",
            Self::Engine => "a superblock each",
            Self::Composefs => "composefs",
        }
    }
}

impl ByHand {
    fn attach(&mut self, source: &Path, at: PathBuf, kind: &str, options: &str) -> Result<PathBuf> {
        let options = std::ffi::CString::new(options)?;
        let flags = if kind == "erofs" { MountFlags::RDONLY } else { MountFlags::empty() };
        rustix::mount::mount(source, &at, kind, flags, &*options)
            .with_context(|| format!("cannot mount {} ({kind})", at.display()))?;
        self.mounted.push(at.clone());
        Ok(at)
    }
}

impl Shape for ByHand {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn mount(&mut self, number: u32, writable: bool) -> Result<PathBuf> {
        let own = self.dir.join(number.to_string());
        let below = |name: &str| -> Result<PathBuf> {
            let path = own.join(name);
            fs::create_dir_all(&path)?;
            Ok(path)
        };
        let (metadata, objects) = (self.metadata.clone(), self.objects.clone());
        let mut options = match self.kind {
            Kind::Composefs => {
                let at = below("composefs")?;
                let basedir = format!("basedir={}", objects.display());
                let ran = Command::new("mount.composefs")
                    .args(["-o", &basedir])
                    .args([&metadata, &at])
                    .output()?;
                ensure!(
                    ran.status.success(),
                    "mount.composefs: {}",
                    String::from_utf8_lossy(&ran.stderr)
                );
                self.mounted.push(at.clone());
                if !writable {
                    return Ok(at);
                }
                format!("lowerdir={}", at.display())
            }
            Kind::Ordinary | Kind::Engine => {
                let erofs = self.attach(&metadata, below("erofs")?, "erofs", "")?;
                let between = if self.kind == Kind::Ordinary { ":" } else { "::" };
                format!(
                    "metacopy=on,redirect_dir=on,lowerdir={}{between}{}",
                    erofs.display(),
                    objects.display()
                )
            }
        };
        if writable {
            let (upper, work) = (below("upper")?, below("work")?);
            options += &format!(",upperdir={},workdir={}", upper.display(), work.display());
        }
        self.attach(Path::new("overlay"), below("root")?, "overlay", &options)
    }

    fn unmount(&mut self) -> Result<()> {
        while let Some(at) = self.mounted.pop() {
            rustix::mount::unmount(&at, UnmountFlags::DETACH)
                .with_context(|| format!("cannot unmount {}", at.display()))?;
        }
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn instances(&mut self, _: bool, _: u32) -> Result<Option<(Spread, Spread)>> {
        Ok(None)
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

/// A backend of Cofolio.
struct Ours {
    name: &'static str,
    dir: PathBuf,
    domain: Domain,
    image: Digest,
    mounted: Vec<PathBuf>,
}

impl Ours {
    fn mounter(&self) -> Mounter<'_> {
        Mounter::new(&self.domain, RunDir::of(self.domain.store()), &ImageContents)
    }

    fn request(&self, number: u32, writable: bool) -> MountRequest {
        MountRequest {
            create_target: true,
            access: if writable { Access::Writable } else { Access::ReadOnly },
            ..MountRequest::new(self.image, self.dir.join(number.to_string()))
        }
    }
}

impl Shape for Ours {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mount(&mut self, number: u32, writable: bool) -> Result<PathBuf> {
        let record = self.mounter().mount(&self.request(number, writable))?;
        self.mounted.push(record.target.clone());
        Ok(record.target)
    }

    fn unmount(&mut self) -> Result<()> {
        while let Some(target) = self.mounted.pop() {
            self.mounter().umount(&target, &UmountOptions { force: true, ..Default::default() })?;
        }
        Ok(())
    }

    fn instances(&mut self, writable: bool, count: u32) -> Result<Option<(Spread, Spread)>> {
        let mounter = self.mounter();
        mounter.pin(&self.image)?;
        let timed = || -> Result<_> {
            let (mut mounts, mut unmounts) = (Vec::new(), Vec::new());
            for number in 0..count {
                let started = Instant::now();
                mounter.mount(&self.request(number, writable))?;
                mounts.push(started.elapsed());
            }
            for number in 0..count {
                let target = self.dir.join(number.to_string());
                let started = Instant::now();
                mounter.umount(&target, &UmountOptions::default())?;
                unmounts.push(started.elapsed());
            }
            Ok((spread(mounts), spread(unmounts)))
        };
        let timed = timed();
        mounter.unpin(&self.image)?;
        timed.map(Some)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

/// Where it is measured.
struct Bench {
    hierarchy: Hierarchy,
    dir: PathBuf,
}

impl Bench {
    /// Lists a container from a cold start.
    fn cold(&self, shape: &mut dyn Shape, writable: bool) -> Result<Listing> {
        let target = shape.mount(0, writable)?;
        let listing = self.list(&target);
        shape.unmount()?;
        listing
    }

    /// Lists a directory from a cold start, in a fresh cgroup.
    fn list(&self, target: &Path) -> Result<Listing> {
        rustix::fs::sync();
        fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop caches")?;
        // The programs themselves are not what is measured.
        let cgroup = self.cgroup()?;
        list(&cgroup, &self.dir.join("empty"))?;
        drop(cgroup);
        let cgroup = self.cgroup()?;
        let started = Instant::now();
        list(&cgroup, target)?;
        let seconds = started.elapsed().as_secs_f64();
        let charge = cgroup.charge()?;
        let peak =
            charge.peak.context("this kernel does not keep the highest charge of a cgroup")?;
        Ok(Listing { seconds, peak_bytes: peak, kernel_bytes: charge.kernel })
    }

    /// Mounts containers and lists each; gives what the first and each further one is charged.
    fn containers(&self, shape: &mut dyn Shape, writable: bool, count: u32) -> Result<(u64, u64)> {
        rustix::fs::sync();
        fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop caches")?;
        let cgroup = self.cgroup()?;
        list(&cgroup, &self.dir.join("empty"))?;
        let before = cgroup.charge()?.total;
        let mut first = 0;
        let measured = (0..count).try_for_each(|number| -> Result<()> {
            let inside = cgroup.enter()?;
            let target = shape.mount(number, writable);
            drop(inside);
            list(&cgroup, &target?)?;
            if number == 0 {
                first = cgroup.charge()?.total.saturating_sub(before);
            }
            Ok(())
        });
        let all = cgroup.charge()?.total.saturating_sub(before);
        shape.unmount()?;
        measured?;
        Ok((first, all.saturating_sub(first) / u64::from(count - 1)))
    }

    fn cgroup(&self) -> Result<Cgroup> {
        Ok(self.hierarchy.create(&format!("cofolio-bench-{}", std::process::id()))?)
    }
}

/// Lists a directory by a process in the cgroup.
fn list(cgroup: &Cgroup, target: &Path) -> Result<()> {
    let script = "echo 0 >\"$1\" && exec ls -lR \"$2\" >/dev/null";
    let ran = Command::new("sh")
        .args(["-c", script, "sh"])
        .args([&cgroup.procs(), target])
        .env("LC_ALL", "C")
        .output()
        .context("cannot run sh")?;
    if !ran.status.success() {
        bail!("ls -lR {}: {}", target.display(), String::from_utf8_lossy(&ran.stderr).trim());
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

fn spread(mut times: Vec<Duration>) -> Spread {
    times.sort_unstable();
    let at = |share: usize| {
        times[(times.len() * share / 100).min(times.len() - 1)].as_secs_f64() * 1000.0
    };
    Spread { p50_ms: at(50), p99_ms: at(99) }
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
    text += "| | | ls -lR, cold | peak | first container | each further | mount p50/p99 | unmount p50/p99 |\n";
    text += "|---|---|--:|--:|--:|--:|--:|--:|\n";
    for row in &report.rows {
        let times = |spread: &Option<Spread>| match spread {
            Some(Spread { p50_ms, p99_ms }) => format!("{p50_ms:.2}/{p99_ms:.2} ms"),
            None => String::new(),
        };
        text += &format!(
            "| {} | {} | {:.3} s | {} | {} | {} | {} | {} |\n",
            row.shape,
            mode(row.writable),
            row.listing.seconds,
            mb(row.listing.peak_bytes),
            mb(row.first_container),
            mb(row.further_container),
            times(&row.mount),
            times(&row.unmount),
        );
    }
    for reason in &report.skipped {
        text += &format!("\nnot measured: {reason}\n");
    }
    text
}
