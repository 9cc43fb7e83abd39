//! `cofolio-bench runtime` on two tiny web servers, in real containers.

#![allow(clippy::unwrap_used, reason = "a test panics")]

#[path = "../../cofolio/tests/common/mod.rs"]
mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use common::{Ran, Tar, can_mount, program, skip, write_layout};

const MIB: usize = 1 << 20;
const PAGE: i64 = 4096;

/// Bytes that no other seed gives.
fn bytes(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) + 1;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(step).collect()
}

/// One measurement runs on a machine at a time; what a test leaves, the next would take down.
static ALONE: Mutex<()> = Mutex::new(());

/// Images of a web server, and where they are measured.
struct Servers {
    dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// Says why not.
fn servers(test: &str) -> Option<Servers> {
    if !can_mount(test) {
        return None;
    }
    let is_static = |path: &PathBuf| {
        fs::read(path).is_ok_and(|text| !text.windows(9).any(|part| part == b"/ld-linux"))
    };
    let Some(busybox) = program("busybox").filter(is_static) else {
        skip(test, "no static busybox (package busybox-static)");
        return None;
    };
    if program("crun").or(program("runc")).is_none() {
        skip(test, "neither crun nor runc is installed");
        return None;
    }
    if let Err(error) = cofolio_node::cgroup::Hierarchy::find(Path::new("/")) {
        skip(test, &error.to_string());
        return None;
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Not in /tmp, which may be in memory.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let busybox = fs::read(busybox).unwrap();
    for (name, page, own) in [("old", 1, 2), ("new", 1, 3), ("other", 4, 5)] {
        let mut tar = Tar::default();
        for path in ["bin/", "etc/", "proc/", "sys/", "dev/", "tmp/", "www/"] {
            tar.directory(path, 0o755);
        }
        tar.file("bin/busybox", 0o755, &busybox);
        tar.file("etc/own", 0o644, &bytes(own, 1000));
        tar.file("www/index.html", 0o644, &bytes(page, 16 * MIB));
        let config = json!({
            "Entrypoint": ["/bin/busybox"], "Cmd": ["httpd", "-f", "-p", "8080", "-h", "/www"],
            "ExposedPorts": {"8080/tcp": {}},
        });
        write_layout(&dir.path().join(name), &format!("web:{name}"), &[tar.finish()], config);
    }
    Some(Servers { dir, _alone: alone })
}

impl Servers {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, images: [&str; 2], more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cofolio-bench"));
        command.args(["runtime", "--runs", "1", "--quiet"]).args(more);
        command.arg("--work").arg(self.path("work")).arg("--json").arg(self.path("result"));
        command.args(images.map(|name| self.path(name)));
        command.env("COFOLIO_CONFIG", "/dev/null").env("COFOLIO_RUN", self.path("run"));
        command.env_remove("COFOLIO_STORE").stdin(Stdio::null());
        command
    }

    fn measure(&self, images: [&str; 2]) -> (Ran, Value) {
        let mut command = self.command(images, &["--load", "http", "--seconds", "1"]);
        let ran = Ran::of(command.output().unwrap());
        ran.ok();
        let result = serde_json::from_slice(&fs::read(self.path("result")).unwrap()).unwrap();
        (ran, result)
    }

    /// Starts a measurement that goes on until both containers run.
    fn start(&self) -> Child {
        let mut command = self.command(["old", "new"], &["--load", "http", "--seconds", "3000"]);
        let mut child = command.spawn().unwrap();
        let start = Instant::now();
        // Another benchmark may have to end first.
        while !fs::exists(self.path("work/runtime/new/pid")).unwrap() {
            assert!(child.try_wait().unwrap().is_none(), "it ended");
            assert!(start.elapsed() < Duration::from_secs(600), "no container was started");
            std::thread::sleep(Duration::from_millis(20));
        }
        child
    }

    /// While no other benchmark runs: its containers have the same names.
    #[track_caller]
    fn assert_nothing_is_left(&self) {
        let lock = fs::File::create("/run/cofolio-bench.lock").unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let here = self.dir.path().to_str().unwrap();
        let left: Vec<_> = mounts.lines().filter(|line| line.contains(here)).collect();
        assert!(left.is_empty(), "mounts are left: {left:#?}");
        let state = fs::read_dir("/run/cofolio-bench");
        assert_eq!(state.into_iter().flatten().count(), 0, "containers are left");
        for top in ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"] {
            for side in ["old", "new", "mount"] {
                let cgroup = format!("{top}/cofolio-bench-{side}");
                assert!(!fs::exists(&cgroup).unwrap(), "{cgroup} is left");
            }
        }
    }
}

fn figure(report: &Value, path: &str) -> i64 {
    report["summary"].pointer(path).and_then(Value::as_i64).unwrap()
}

fn percent(report: &Value, path: &str) -> f64 {
    report["summary"].pointer(path).and_then(Value::as_f64).unwrap()
}

/// 16 MiB of each server's some 18 MiB are the same page, and most of the rest the same program.
#[test]
fn what_two_servers_have_in_common_is_there_once() {
    let Some(servers) = servers("what_two_servers_have_in_common_is_there_once") else { return };
    let page = 16 * i64::try_from(MIB).unwrap();
    let (ran, report) = servers.measure(["old", "new"]);
    assert!(ran.stdout.contains("reduction"), "{}", ran.stdout);
    assert_eq!(report["load"], "http");
    assert!(figure(&report, "/unshared/content") >= 2 * page, "{report:#}");
    assert!(figure(&report, "/unshared/content_again") >= page, "{report:#}");
    let shared = figure(&report, "/shared/content");
    assert!((page..page * 3 / 2).contains(&shared), "{report:#}");
    assert_eq!(figure(&report, "/shared/content_again"), 0);
    // Of both cgroups, where page cache is by whoever touched it first.
    for (setup, pages) in [("unshared", 2 * page / PAGE), ("shared", page / PAGE)] {
        assert!(figure(&report, &format!("/{setup}/cache")) >= pages * PAGE, "{report:#}");
    }
    assert!(percent(&report, "/cache/reduction_percent") > 40.0, "{report:#}");
    assert!(percent(&report, "/memory/reduction_percent") > 30.0, "{report:#}");
    assert!(percent(&report, "/cache/bound_percent") > 40.0, "{report:#}");

    // The comparison must be able to say that nothing is saved: these have only the program in common.
    let (_, report) = servers.measure(["old", "other"]);
    assert!(figure(&report, "/unshared/content_again") < page / 4, "{report:#}");
    assert!(figure(&report, "/shared/content") >= 2 * page, "{report:#}");
    assert!(percent(&report, "/cache/reduction_percent") < 20.0, "{report:#}");
    assert!(percent(&report, "/cache/bound_percent") < 20.0, "{report:#}");
}

#[test]
fn a_signal_ends_it_with_nothing_left() {
    let Some(servers) = servers("a_signal_ends_it_with_nothing_left") else { return };
    let mut child = servers.start();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    servers.assert_nothing_is_left();
}

/// Killed, it leaves two containers and their mounts; the next run takes them down.
#[test]
fn what_a_killed_one_left_goes_with_the_next() {
    let Some(servers) = servers("what_a_killed_one_left_goes_with_the_next") else { return };
    let mut child = servers.start();
    let server = fs::read_to_string(servers.path("work/runtime/old/pid")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(fs::exists(format!("/proc/{server}/ns/net")).unwrap(), "its containers go on");
    servers.measure(["old", "new"]);
    servers.assert_nothing_is_left();
}

/// A server that does not come up fails the command, with its own words.
#[test]
fn a_container_that_ends_is_named_with_what_it_said() {
    let Some(servers) = servers("a_container_that_ends_is_named_with_what_it_said") else { return };
    let mut tar = Tar::default();
    for path in ["bin/", "proc/", "sys/", "dev/"] {
        tar.directory(path, 0o755);
    }
    tar.file("bin/busybox", 0o755, &fs::read(program("busybox").unwrap()).unwrap());
    let config = json!({
        "Entrypoint": ["/bin/busybox"], "Cmd": ["sh", "-c", "echo no room >&2; exit 3"],
        "ExposedPorts": {"8080/tcp": {}},
    });
    write_layout(&servers.path("broken"), "web:broken", &[tar.finish()], config);
    let mut command = servers.command(["old", "broken"], &["--load", "http"]);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    let ran = Ran::of(child.wait_with_output().unwrap());
    ran.fails_with(1);
    for words in ["the new image's container", "no room"] {
        assert!(ran.stderr.contains(words), "{}", ran.stderr);
    }
    servers.assert_nothing_is_left();
}

#[test]
fn unknown_loads_and_missing_clients_are_named() {
    let Some(servers) = servers("unknown_loads_and_missing_clients_are_named") else { return };
    let run = |more: &[&str]| {
        let mut command = servers.command(["old", "new"], more);
        // tar is here; redis-benchmark is not.
        let tools = servers.path("tools");
        fs::create_dir_all(&tools).unwrap();
        let _ = std::os::unix::fs::symlink(program("tar").unwrap(), tools.join("tar"));
        Ran::of(command.env("PATH", tools).output().unwrap())
    };
    let ran = run(&[]);
    ran.fails_with(2);
    for words in ["web:old", "redis", "postgres", "nginx-no-sendfile", "http"] {
        assert!(ran.stderr.contains(words), "{words}: {}", ran.stderr);
    }
    let ran = run(&["--load", "redis"]);
    ran.fails_with(5);
    assert!(
        ran.stderr.contains("redis-benchmark") && ran.stderr.contains("redis-tools"),
        "{}",
        ran.stderr
    );
}
