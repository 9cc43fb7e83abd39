//! `cofolio-bench density` and `churn --short-lived` with a few containers, `cofolio-bench balance` with a
//! few files, and `cofolio-bench usage-lists` with a few mounts.

#![allow(clippy::unwrap_used, reason = "a test panics")]

#[path = "../../cofolio/tests/common/mod.rs"]
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cofolio_node::cgroup::Hierarchy;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use common::{Ran, Tar, can_mount, skip, write_layout};

/// One benchmark runs on a machine at a time; what a test leaves, the next would take down.
static ALONE: Mutex<()> = Mutex::new(());

/// Two images with a common layer, and where they are measured.
struct Images {
    dir: tempfile::TempDir,
    hierarchy: Hierarchy,
    _alone: MutexGuard<'static, ()>,
}

/// Waits for a container of a benchmark. Another benchmark may have to end first.
#[track_caller]
fn wait_for(child: &mut Child, is_made: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_made() {
        assert!(child.try_wait().unwrap().is_none(), "it ended");
        assert!(start.elapsed() < Duration::from_secs(600), "no container was made");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Says why not.
fn images(test: &str) -> Option<Images> {
    if !can_mount(test) {
        return None;
    }
    let hierarchy = match Hierarchy::find(Path::new("/")) {
        Ok(hierarchy) => hierarchy,
        Err(error) => {
            skip(test, &error.to_string());
            return None;
        }
    };
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Not in /tmp, which may be in memory.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut common = Tar::default();
    common.directory("etc/", 0o755);
    for number in 0..20 {
        common.file(&format!("etc/{number}"), 0o644, format!("file {number}\n").as_bytes());
    }
    for name in ["old", "new"] {
        let mut own = Tar::default();
        own.file("own", 0o644, name.as_bytes());
        let layers = [common.finish(), own.finish()];
        write_layout(&dir.path().join(name), &format!("tiny:{name}"), &layers, json!({}));
    }
    Some(Images { dir, hierarchy, _alone: alone })
}

impl Images {
    fn command(&self, more: &[&str]) -> Command {
        let more = [&["--rounds", "1", "--profile-files", "10"], more].concat();
        self.benchmark("density", &more)
    }

    fn benchmark(&self, name: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cofolio-bench"));
        command.args([name, "--quiet"]).args(more);
        command.arg("--work").arg(self.dir.path().join("work"));
        command.arg("--json").arg(self.dir.path().join("result"));
        command.args(["old", "new"].map(|name| self.dir.path().join(name)));
        command.env("COFOLIO_CONFIG", "/dev/null").env("COFOLIO_RUN", self.dir.path().join("run"));
        command.env_remove("COFOLIO_STORE").stdin(Stdio::null());
        command
    }

    fn measure(&self, more: &[&str]) -> (Ran, Value) {
        let ran = Ran::of(self.command(more).output().unwrap());
        ran.ok();
        let result = fs::read(self.dir.path().join("result")).unwrap();
        (ran, serde_json::from_slice(&result).unwrap())
    }

    /// Starts more containers than there is time for, and returns when some exist.
    fn start(&self, variant: &str) -> Child {
        let mut command = self.command(&["--containers", "2000", "--variants", variant]);
        let mut child = command.spawn().unwrap();
        let container = self.dir.path().join("work/density").join(variant).join("20");
        wait_for(&mut child, || container.exists());
        child
    }

    /// Cgroups have the same names in each run, so a benchmark that another program started has to end
    /// first: it has the lock.
    #[track_caller]
    fn assert_nothing_is_left(&self) {
        let lock = fs::File::create("/run/cofolio-bench.lock").unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let here = self.dir.path().to_str().unwrap();
        let left: Vec<_> = mounts.lines().filter(|line| line.contains(here)).collect();
        assert!(left.is_empty(), "mounts are left: {left:#?}");
        let top = fs::read_dir(self.hierarchy.directory("").unwrap()).unwrap();
        let names = top.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<_> = names
            .filter(|name| {
                name.starts_with("cofolio-density-") || name.starts_with("cofolio-churn-")
            })
            .collect();
        assert!(left.is_empty(), "cgroups are left: {left:?}");
    }
}

#[test]
fn each_variant_is_measured_and_compared() {
    let Some(images) = images("each_variant_is_measured_and_compared") else { return };
    let (ran, report) = images.measure(&["--containers", "3"]);
    let names = [
        "none",
        "cofolio-ro",
        "cofolio-rw",
        "sparse",
        "sparse-looking",
        "overlayfs",
        "overlayfs-looking",
        "superblock-ro",
        "superblock-rw",
    ];
    let rows = report["rows"].as_array().unwrap();
    let found: Vec<&str> = rows.iter().map(|row| row["variant"].as_str().unwrap()).collect();
    assert_eq!(found, names);
    for row in rows {
        assert!(row["create_seconds"].as_f64().unwrap() > 0.0, "{report:#}");
        assert!(ran.stdout.contains(row["variant"].as_str().unwrap()), "{}", ran.stdout);
    }
    let rounds = report["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), names.len());
    for round in rounds {
        // The growth of the machine is also that of other programs. The charge is not, where the
        // kernel counts it.
        assert!(round["charged"].as_i64().is_none_or(|bytes| bytes > 0), "{report:#}");
    }
    images.assert_nothing_is_left();

    let (_, report) =
        images.measure(&["--containers", "3", "--variants", "overlayfs", "--images", "1"]);
    assert_eq!(report["rows"].as_array().unwrap().len(), 2);
    assert_eq!(report["images"].as_array().unwrap().len(), 1);
    Ran::of(images.command(&["--images", "3"]).output().unwrap()).fails_with(2);
}

#[test]
fn a_signal_ends_it_with_nothing_left() {
    let Some(images) = images("a_signal_ends_it_with_nothing_left") else { return };
    for variant in ["cofolio-ro", "overlayfs", "superblock-rw"] {
        let mut child = images.start(variant);
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        images.assert_nothing_is_left();
    }
}

/// Killed, it leaves mounts and cgroups; its processes end by themselves, and the next run removes the
/// rest.
#[test]
fn what_a_killed_one_left_goes_with_the_next() {
    let Some(images) = images("what_a_killed_one_left_goes_with_the_next") else { return };
    for variant in ["cofolio-rw", "overlayfs", "superblock-ro"] {
        let mut child = images.start(variant);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(images.hierarchy.directory("cofolio-density-0").unwrap().exists());
        images.measure(&["--containers", "3", "--variants", "cofolio-ro"]);
        images.assert_nothing_is_left();
    }
}

/// How many cgroups stay behind depends on what else the machine does, so that is not tested.
#[test]
fn short_lived_containers_come_and_go_over_warmed_images_and_others() {
    let test = "short_lived_containers_come_and_go_over_warmed_images_and_others";
    let Some(images) = images(test) else { return };
    let ran = images.benchmark("churn", &["--short-lived", "--containers", "3"]).output();
    assert!(Ran::of(ran.unwrap()).ok().contains("| warmed once, half of them write | 3 | "));
    let result = fs::read(images.dir.path().join("result")).unwrap();
    let result: Value = serde_json::from_slice(&result).unwrap();
    let left = result["left"].as_array().unwrap();
    let how = |it: &Value| json!([it["warmed"], it["wrote"], it["containers"]]);
    let runs = [
        json!(["at-each-mount", false, 3]),
        json!(["at-each-mount", true, 3]),
        json!(["once", false, 3]),
        json!(["once", true, 3]),
        json!(["never", false, 3]),
    ];
    assert_eq!(left.iter().map(how).collect::<Vec<_>>(), runs);
    let counts = ["dying_before", "dying_after", "dying_left"];
    assert!(left.iter().all(|it| counts.iter().all(|count| it[count].is_u64())), "{result}");
    images.assert_nothing_is_left();
}

/// Interrupted, it left the cgroup of the images that were read ahead.
#[test]
fn interrupted_short_lived_containers_leave_nothing() {
    let Some(images) = images("interrupted_short_lived_containers_leave_nothing") else { return };
    let mut child =
        images.benchmark("churn", &["--short-lived", "--containers", "10000"]).spawn().unwrap();
    // The commons are made before the first container.
    let dir = images.dir.path().join("work/churn");
    let is_container = |entry: fs::DirEntry| {
        entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok())
    };
    wait_for(&mut child, || fs::read_dir(&dir).into_iter().flatten().flatten().any(is_container));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    images.assert_nothing_is_left();
}

/// The daemon that is measured had the configuration of the machine, so the figures depended on it.
#[test]
fn the_measured_daemon_has_a_configuration_of_its_own() {
    let Some(images) = images("the_measured_daemon_has_a_configuration_of_its_own") else { return };
    let daemon = images.dir.path().join("daemon");
    let given = images.dir.path().join("given");
    fs::write(&daemon, format!("#!/bin/sh\ncp \"$5\" '{}'\nexit 1\n", given.display())).unwrap();
    fs::set_permissions(&daemon, fs::Permissions::from_mode(0o700)).unwrap();
    let mut command = images.benchmark("churn", &["--containers", "2", "--rounds", "1"]);
    Ran::of(command.arg("--cofolio").arg(&daemon).output().unwrap()).fails_with(1);
    assert!(fs::read_to_string(given).unwrap().contains("gc_hours = 0"));
    images.assert_nothing_is_left();
}

/// The containers that can write in one directory never used it, so it cost next to nothing.
#[test]
fn a_container_stats_and_writes_what_it_is_asked_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir_all(path("root/var")).unwrap();
    fs::write(path("root/var/seen"), "").unwrap();
    fs::write(path("profile"), "var/seen\0").unwrap();
    let run = |list: &str| {
        fs::write(path("stat"), list).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cofolio-bench"));
        command.arg("density-worker").args([path("procs"), path("root"), path("profile")]);
        command.arg("--stat").arg(path("stat")).args(["--write", "var/log"]);
        Ran::of(command.stdin(Stdio::null()).output().unwrap())
    };
    run("var/seen\0var/missing\0").fails_with(3);
    assert!(!path("root/var/log").exists());
    assert_eq!(run("var/seen\0").ok(), "ready\n");
    assert_eq!(fs::metadata(path("root/var/log")).unwrap().len(), 4096);
}

#[test]
fn usage_lists_are_compared_with_each_layout() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cofolio-bench"));
    let ran = Ran::of(command.args(["usage-lists", "100"]).output().unwrap());
    let text = ran.ok();
    assert!(text.contains("100 mounts x 100 cgroups, 2000 used pairs"), "{text}");
    for layout in ["array of lists", "array of pointers", "first use", "usage lists"] {
        assert!(text.contains(layout), "{text}");
    }
    // Only four objects per pair were judged, and five took more than the goal allows.
    for objects in [4, 5] {
        assert!(text.contains(&format!("of each used pair of {objects} objects")), "{text}");
    }
}

/// On a machine that does other things the sum may be off, so the items are what is tested.
#[test]
fn the_items_of_the_page_cache_are_what_the_workload_made() {
    let Some(images) = images("the_items_of_the_page_cache_are_what_the_workload_made") else {
        return;
    };
    // So few files decide nothing, so it ends with 0 whatever else the machine does.
    let ran = Ran::of(images.benchmark("balance", &[]).output().unwrap());
    assert!(ran.ok().contains("unexplained"), "{}", ran.stdout);
    // The directories of EROFS were an item, and the daemon's report does not have them.
    let not_reported = "| not in the daemon's report |";
    assert_eq!(ran.stdout.matches(not_reported).count(), 2, "{}", ran.stdout);
    let result = fs::read(images.dir.path().join("result")).unwrap();
    let result: Value = serde_json::from_slice(&result).unwrap();
    let bytes = |item: &str| result[item].as_i64().unwrap();
    assert_eq!(bytes("objects"), bytes("objects_mincore"), "{result}");
    // 20 common files and an own one of each image, a page each.
    assert_eq!(bytes("objects"), 22 * i64::try_from(cofolio_sys::cache::page_size()).unwrap());
    for item in ["metadata", "directories"] {
        assert!(bytes(item) > 0, "{item}: {result}");
    }
    assert!(bytes("uppers") >= 2 * (4 << 20), "{result}");
    assert!(bytes("shared_memory") >= 16 << 20, "{result}");
}
