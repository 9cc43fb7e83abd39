//! The ledger against a live kernel: who maps and opens which objects of mounted images.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test says why it is skipped, or stops"
)]

#[path = "../common/cache.rs"]
mod cache;
#[path = "../common/live.rs"]
mod live;

mod accounts;
mod namespaces;
mod opens;
mod policy;
mod reclaim;
mod unreadable;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cache::{SIZE, content, forget};
use cofolio_image::import;
use cofolio_image::pack::ImageContents;
use cofolio_image::source::Source;
use cofolio_node::cgroup::{Cgroup, Hierarchy, Version};
use cofolio_node::ledger::{
    Budget, ContainerAccount, FileOrder, ImageFile, Ledger, LedgerError, ReclaimPolicy,
    ReclaimRequest, ReclaimTarget, Reclaimed, Report, UsedImage,
};
use cofolio_node::mount::{Access, MountRequest, Mounter, UmountOptions};
use cofolio_node::profile::Recorder;
use cofolio_node::run_dir::RunDir;
use cofolio_store::task::{Cancel, Task};
use cofolio_store::{Digest, Domain, InitOptions, Ref, Store};
use live::{Holder, alone, cgroup, next_tick};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Two images: `shared` is in both, `own` differs.
struct Pair {
    dir: tempfile::TempDir,
    domain: Domain,
    images: [Digest; 2],
}

/// Does it anew if it fails, up to four times, where DAMON runs: it takes pages that nobody maps at any
/// moment (one of 600, between a look that found all of them and a reclaim). Elsewhere it must not fail.
fn undisturbed(it: impl Fn()) {
    let states =
        fs::read_dir("/sys/kernel/mm/damon/admin/kdamonds").into_iter().flatten().flatten();
    let mut states = states.filter_map(|one| fs::read_to_string(one.path().join("state")).ok());
    let takes_pages = states.any(|state| state.trim() == "on");
    let tries = if takes_pages { 4 } else { 0 };
    let is_done = |_| std::panic::catch_unwind(std::panic::AssertUnwindSafe(&it)).is_ok();
    if !(0..tries).any(is_done) {
        it();
    }
}

impl Drop for Pair {
    /// A test that fails leaves no mounts behind.
    fn drop(&mut self) {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        let ours: Vec<_> =
            targets.filter(|it| Path::new(it).starts_with(self.dir.path())).collect();
        for target in ours.into_iter().rev() {
            let _ = rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

impl Pair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (salt, name) in [(1, "one"), (2, "two")] {
            let top = dir.path().join(name);
            fs::create_dir_all(top.join("deep")).unwrap();
            fs::write(top.join("shared"), content(0)).unwrap();
            fs::write(top.join("deep/own"), content(salt)).unwrap();
        }
        let store = Store::init(&dir.path().join("store"), &InitOptions { immutable: false });
        let domain = store.unwrap().domain("default").unwrap();
        let images = ["one", "two"].map(|name| {
            let source = Source::parse(dir.path().join(name).to_str().unwrap()).unwrap();
            let options =
                import::ImportOptions { name: Some(name.to_owned()), ..Default::default() };
            import::import(&domain, &source, &options, &Task::default()).unwrap().image
        });
        Self { dir, domain, images }
    }

    fn run(&self) -> RunDir {
        RunDir::open(self.dir.path().join("run")).unwrap()
    }

    fn mounter(&self) -> Mounter<'_> {
        Mounter::new(&self.domain, self.run(), &ImageContents)
    }

    fn mount(&self, image: usize, name: &str, access: Access) -> PathBuf {
        self.mount_image(self.images[image], name, access)
    }

    /// One more image, of files with these contents.
    fn import(&self, name: &str, files: &[(&str, usize)]) -> Digest {
        let top = self.dir.path().join(name);
        fs::create_dir_all(&top).unwrap();
        files.iter().for_each(|(file, salt)| fs::write(top.join(file), content(*salt)).unwrap());
        let source = Source::parse(top.to_str().unwrap()).unwrap();
        let options = import::ImportOptions { name: Some(name.to_owned()), ..Default::default() };
        import::import(&self.domain, &source, &options, &Task::default()).unwrap().image
    }

    /// Pages of a content's object that are resident.
    fn resident(&self, salt: usize) -> u64 {
        cache::resident(&self.domain.object_path(&self.object(salt)).unwrap())
    }

    fn mount_image(&self, image: Digest, name: &str, access: Access) -> PathBuf {
        let target = self.dir.path().join(name);
        let request = MountRequest::new(image, target);
        let request = MountRequest { create_target: true, access, ..request };
        self.mounter().mount(&request).unwrap().target
    }

    fn umount(&self, target: &Path) {
        self.mounter().umount(target, &UmountOptions::default()).unwrap();
    }

    fn ledger(&self) -> Ledger {
        Ledger::new(self.domain.store().clone(), self.run())
    }

    fn object(&self, salt: usize) -> Digest {
        cofolio_store::verity::digest(&content(salt))
    }

    fn forget_all(&self) {
        for salt in 0..3 {
            forget(&self.domain.object_path(&self.object(salt)).unwrap());
        }
    }
}

fn path_of(cgroup: &Cgroup) -> String {
    let procs = cgroup.procs();
    format!("/{}", procs.parent().unwrap().file_name().unwrap().to_str().unwrap())
}

fn account<'r>(report: &'r Report, cgroup: &Cgroup) -> &'r ContainerAccount {
    let name = path_of(cgroup);
    let found = report.containers.iter().find(|it| it.cgroup == name);
    found.unwrap_or_else(|| panic!("{name} is not in {report:#?}"))
}

/// Two cgroups map one file through two images, and one of them another file as well.
struct TwoUsers {
    a: Cgroup,
    b: Cgroup,
    pair: Pair,
    one: PathBuf,
    two: PathBuf,
    holders: [Holder; 3],
    ledger: Ledger,
}

impl TwoUsers {
    fn new(test: &str) -> Option<Self> {
        let (a, b) = (cgroup(test, "a")?, cgroup(test, "b")?);
        let pair = Pair::new();
        let one = pair.mount(0, "m1", Access::ReadOnly);
        let two = pair.mount(1, "m2", Access::Writable);
        pair.forget_all();
        let holders = [
            Holder::new(&one.join("shared"), Some(&a)),
            Holder::new(&two.join("shared"), Some(&b)),
            Holder::new(&two.join("deep/own"), Some(&b)),
        ];
        let mut ledger = pair.ledger();
        ledger.sample_all().unwrap();
        Some(Self { a, b, pair, one, two, holders, ledger })
    }

    fn end(self) {
        drop(self.holders);
        self.pair.umount(&self.one);
        self.pair.umount(&self.two);
    }
}

fn all_of(target: ReclaimTarget) -> ReclaimRequest {
    ReclaimRequest { target, bytes: None, shared: false, dry_run: false }
}

fn watched(test: &str, pair: &Pair) -> Option<Ledger> {
    let mut ledger = pair.ledger();
    ledger.refresh(&Budget::UNLIMITED).unwrap();
    ledger.watch_opens().inspect_err(|reason| println!("SKIP {test}: {reason}")).ok()?;
    pair.forget_all();
    ledger.sample_all().unwrap();
    next_tick();
    Some(ledger)
}

/// How many use each of the three contents.
fn users(ledger: &mut Ledger, pair: &Pair) -> [usize; 3] {
    ledger.sample_all().unwrap();
    let users = [0, 1, 2].map(|salt| ledger.users("default", &pair.object(salt)).unwrap().len());
    // What is used next counts.
    next_tick();
    users
}
