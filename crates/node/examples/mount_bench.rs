//! Measures mounts: time of a mount and an unmount, and kernel memory per container.
//!
//! ```text
//! cargo run --release -p cofolio-node --example mount_bench [-- [STORE-DIR] [CONTAINERS] [IMAGE]]
//! ```
//!
//! Run as root on a machine that does little else. It makes a store with an image of 10,000 entries
//! in STORE-DIR (default: a temporary directory; it must be on a filesystem that overlayfs takes as
//! an upper layer), or imports IMAGE (`oci:LAYOUT` and the like) there, mounts it CONTAINERS times
//! (default 1,000), and removes everything again, in a mount namespace of its own. One JSON object goes to standard output.
#![allow(clippy::print_stdout, reason = "its result is what it prints")]

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cofolio_erofs::tree::{Content, Meta, Payload, Tree};
use cofolio_erofs::write::{WriteOptions, write};
use cofolio_image::import::{self};
use cofolio_image::pack::ImageContents;
use cofolio_image::source::Source;
use cofolio_node::cgroup::Hierarchy;
use cofolio_node::mount::{Access, MountRequest, Mounter, UmountOptions};
use cofolio_node::run_dir::RunDir;
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, ImportOptions, InitOptions, Publish, Ref, Store};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const DIRECTORIES: usize = 400;
const FILES_PER_DIRECTORY: usize = 24;
const MEMORY_CONTAINERS: usize = 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let base = match arguments.first() {
        Some(dir) => PathBuf::from(dir),
        None => std::env::temp_dir(),
    };
    let containers: usize = arguments.get(1).map_or(Ok(1000), |text| text.parse())?;
    cofolio_sys::mount::unshare_mount_namespace()?;
    let dir = base.join(format!("cofolio-mount-bench-{}", std::process::id()));
    fs::create_dir(&dir)?;
    // As /run is. On ext4, replacing a file by a rename starts writing it to the disk.
    let run = dir.join("run");
    fs::create_dir(&run)?;
    let none = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &run, "tmpfs", none, Some(c"mode=700"))?;
    let result = measure(&dir, containers, arguments.get(2).map(String::as_str));
    // The run directory is a mount of its own on top of that.
    for _ in 0..2 {
        let _ = rustix::mount::unmount(&run, rustix::mount::UnmountFlags::DETACH);
    }
    fs::remove_dir_all(&dir)?;
    println!("{}", serde_json::to_string_pretty(&result?)?);
    Ok(())
}

fn measure(dir: &Path, containers: usize, image: Option<&str>) -> Result<serde_json::Value> {
    let store = Store::init(&dir.join("store"), &InitOptions { immutable: false })?;
    let domain = store.domain("default")?;
    let (image, entries) = match image {
        Some(image) => {
            let source = Source::parse(image)?;
            let report = import::import(
                &domain,
                &source,
                &import::ImportOptions::default(),
                &Task::default(),
            )?;
            (report.image, usize::try_from(report.entries)?)
        }
        None => build(&domain)?,
    };
    let mounter = Mounter::new(&domain, RunDir::open(dir.join("run"))?, &ImageContents);
    let targets: Vec<PathBuf> = (0..containers).map(|n| dir.join(format!("c{n}"))).collect();
    targets.iter().try_for_each(fs::create_dir)?;
    let request = |target: &Path, writable: bool| MountRequest {
        access: if writable { Access::Writable } else { Access::ReadOnly },
        ..MountRequest::new(image, target)
    };

    let start = Instant::now();
    mounter.mount(&request(&targets[0], false))?;
    let first = start.elapsed();
    let start = Instant::now();
    mounter.umount(&targets[0], &UmountOptions::default())?;
    let last = start.elapsed();

    let mut result = serde_json::json!({
        "kernel": fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
        "entries": entries,
        "containers": containers,
        "first_mount_ms": ms(first),
        "last_umount_ms": ms(last),
    });
    let modes = [("read_only", false), ("writable", true)];
    let mut bytes = Vec::new();
    for (_, writable) in modes {
        bytes.push(memory(&mounter, &targets, &|target| request(target, writable))?);
    }
    // It keeps the superblocks that all others share.
    let held = dir.join("held");
    fs::create_dir(&held)?;
    mounter.mount(&request(&held, false))?;
    for ((name, writable), bytes) in modes.into_iter().zip(bytes) {
        let (mut mounts, mut umounts) = (Vec::new(), Vec::new());
        for target in &targets {
            let request = request(target, writable);
            let start = Instant::now();
            mounter.mount(&request)?;
            mounts.push(start.elapsed());
        }
        for target in &targets {
            let start = Instant::now();
            mounter.umount(target, &UmountOptions::default())?;
            umounts.push(start.elapsed());
        }
        result[name] = serde_json::json!({
            "mount": spread(mounts),
            "umount": spread(umounts),
            "kernel_bytes_per_container_after_ls": bytes,
        });
    }
    mounter.umount(&held, &UmountOptions::default())?;
    Ok(result)
}

/// Kernel memory of [`MEMORY_CONTAINERS`] containers after `ls -lR` in each, per container in bytes:
/// what they share divided among them, and what one more takes. By the charge of a memory cgroup
/// that this process is alone in.
fn memory(
    mounter: &Mounter<'_>,
    targets: &[PathBuf],
    request: &dyn Fn(&Path) -> MountRequest,
) -> Result<serde_json::Value> {
    let targets = &targets[..targets.len().min(MEMORY_CONTAINERS)];
    let cgroup = Hierarchy::find(Path::new("/"))?
        .create(&format!("cofolio-mount-bench-{}", std::process::id()))?;
    fs::write(cgroup.procs(), "0")?;
    let kernel = || -> Result<u64> {
        Ok(cgroup.charge()?.kernel.ok_or("this kernel does not charge kernel memory")?)
    };
    let before = kernel()?;
    let mut after_first = before;
    for (number, target) in targets.iter().enumerate() {
        mounter.mount(&request(target))?;
        list(target)?;
        if number == 0 {
            after_first = kernel()?;
        }
    }
    let after = kernel()?;
    for target in targets {
        mounter.umount(target, &UmountOptions::default())?;
    }
    // Back to where we came from: a cgroup with a process cannot be removed.
    let parent = cgroup.procs();
    let parent = parent.parent().and_then(Path::parent).ok_or("the cgroup has no parent")?;
    fs::write(parent.join("cgroup.procs"), "0")?;
    let count = targets.len() as u64;
    Ok(serde_json::json!({
        "containers": count,
        "all_divided": after.saturating_sub(before) / count,
        "one_more": after.saturating_sub(after_first) / (count - 1).max(1),
    }))
}

/// What `ls -lR` asks for: every name, its metadata, and its extended attributes.
fn list(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let mut buffer = [0u8; 256];
        let _ = rustix::fs::lgetxattr(entry.path(), "security.selinux", &mut buffer[..]);
        if metadata.is_dir() {
            list(&entry.path())?;
        }
    }
    Ok(())
}

/// An image of some 10,000 entries, of which 24 in 25 are files.
fn build(domain: &Domain) -> Result<(Digest, usize)> {
    let staging = domain.begin_import(ImportOptions::default())?;
    let meta = |mode| Meta { mode, uid: 0, gid: 0, mtime: 1_700_000_000, mtime_nsec: 0 };
    let mut tree = Tree::new(meta(0o040_755));
    let mut known = Vec::new();
    for directory in 0..DIRECTORIES {
        let name = format!("directory{directory}");
        let parent =
            tree.insert(tree.root(), name.as_bytes(), meta(0o040_755), Content::Directory)?;
        for file in 0..FILES_PER_DIRECTORY {
            let object =
                staging.put_object(format!("{directory}/{file}\n").repeat(40).as_bytes())?;
            let digest = object.digest.0;
            let content = Content::External {
                size: object.size,
                digest: Some(&digest),
                payload: Payload::Object(&digest),
            };
            tree.insert(parent, format!("file{file}.so").as_bytes(), meta(0o100_644), content)?;
            known.push((object.digest, object.size));
        }
    }
    let mut image = staging.image_writer()?;
    write(&tree, &WriteOptions::default(), &mut image)?;
    let image = image.finish()?;
    staging.commit(&Publish::named("bench:1", Ref::new(image)), known.iter().copied())?;
    Ok((image, tree.entry_count()))
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn spread(mut times: Vec<Duration>) -> serde_json::Value {
    times.sort_unstable();
    let at = |share: usize| ms(times[(times.len() * share / 100).min(times.len() - 1)]);
    serde_json::json!({
        "p50_ms": at(50),
        "p99_ms": at(99),
        "max_ms": ms(times[times.len() - 1]),
    })
}
