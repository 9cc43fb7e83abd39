//! The limit of the commons, which belong to the whole machine: one test at a time.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cofolio_node::cgroup::{COMMONS, Cgroup, Hierarchy};
use common::Sandbox;

/// The commons, and what their limit was.
struct Limited {
    commons: Cgroup,
    before: Option<u64>,
    /// Sets that limit when its input ends, also if this process is killed.
    restorer: Child,
    _alone: MutexGuard<'static, ()>,
}

impl Limited {
    /// `None`, with a word about it, where there are no commons.
    fn new(test: &str) -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = Hierarchy::find(Path::new("/")).and_then(|it| it.standing(COMMONS));
        let commons = found.inspect_err(|reason| common::skip(test, &reason.to_string())).ok()?;
        let before = commons.limit_bytes().unwrap();
        let limits = [("memory.max", "max"), ("memory.limit_in_bytes", "-1")];
        let mut files =
            limits.map(|(name, none)| (commons.procs().with_file_name(name), none)).into_iter();
        let (file, none) = files.find(|(file, _)| file.exists()).unwrap();
        let mut restorer = Command::new("sh");
        restorer.args(["-c", "read -r x; echo \"$1\" >\"$0\""]).arg(file);
        restorer.arg(before.map_or(none.to_owned(), |bytes| bytes.to_string()));
        // A signal to the group of this process does not end it.
        let restorer =
            restorer.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        Some(Self { commons, before, restorer: restorer.unwrap(), _alone })
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        drop(self.restorer.stdin.take());
        let _ = self.restorer.wait();
    }
}

/// `warm --limit 64K` was kept, and then every `warm` was killed.
#[test]
fn too_small_a_limit_is_not_set() {
    let Some(it) = Limited::new("too_small_a_limit_is_not_set") else { return };
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let config = sandbox.path("limit.toml");
    fs::write(&config, "[commons]\nlimit = '64 KiB'\n").unwrap();
    for size in ["0", "512K"] {
        let ran = sandbox.run(&["warm", "--limit", size, "box:1"]);
        ran.fails_with(2).refused("at least 16 MiB");
    }
    let ran = sandbox.run(&["--config", config.to_str().unwrap(), "warm", "box:1"]);
    ran.fails_with(2).refused("at least 16 MiB");
    assert_eq!(it.commons.limit_bytes().unwrap(), it.before);
}

/// The kernel killed the process that read ahead, and nobody said why.
#[test]
fn a_killed_process_is_explained() {
    let Some(it) = Limited::new("a_killed_process_is_explained") else { return };
    let sandbox = Sandbox::new();
    // So many that the process needs memory for them. With four files it sometimes needed none.
    let tree = sandbox.dir("many");
    for number in 0..5000 {
        fs::write(tree.join(number.to_string()), number.to_string()).unwrap();
    }
    sandbox.run(&["import", "--name", "box:1", tree.to_str().unwrap()]).ok();
    it.commons.limit(64 << 20).unwrap();
    // Pages that the kernel cannot drop: those of a file in memory, without swap.
    const PAGES: u64 = 20 << 20;
    let shared = tempfile::tempfile_in("/dev/shm").unwrap();
    let fill = "echo 0 > \"$0\" && head -c 20M /dev/zero";
    let mut filled = Command::new("sh");
    filled.args(["-c", fill]).arg(it.commons.procs()).stdout(shared.try_clone().unwrap());
    assert!(filled.status().unwrap().success());
    // No more than these has room. Version 1 takes no limit below what is in use, and finds what it
    // can drop only after several tries.
    let mut limit = it.commons.charge().unwrap().total;
    for _ in 0..20 {
        let _ = fs::write(it.commons.procs().with_file_name("memory.force_empty"), "0");
        while limit > PAGES && it.commons.limit(limit).is_ok() {
            limit -= 4096;
        }
    }
    let ran = sandbox.run(&["warm", "box:1"]);
    let has_swap = fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1);
    assert!(ran.code != 0 || has_swap);
    assert!(
        ran.code == 0 || ran.stderr.contains("MiB is too small for the process"),
        "{}",
        ran.stderr
    );
}
