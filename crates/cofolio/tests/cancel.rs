//! Signals cancel work: the command ends with code 130, leaves nothing half done, and nothing in the way of
//! the next one.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test program panics where it fails"
)]

mod common;

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::machine::until;
use common::{Sandbox, can_mount};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

/// Against hanging only: what is cancelled ends after a few more pieces of work.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A file whose content is nowhere else and cannot be compressed, in so many MiB.
fn noise(path: &std::path::Path, mib: u64) {
    let file = fs::File::create(path).unwrap();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut piece = Vec::with_capacity(1 << 20);
    for at in 0..mib {
        piece.clear();
        while piece.len() < 1 << 20 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            piece.extend_from_slice(&state.to_le_bytes());
        }
        file.write_all_at(&piece, at << 20).unwrap();
    }
}

fn start(sandbox: &Sandbox, args: &[&str]) -> Child {
    let mut command = sandbox.command(args);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The bytes that a process has read and written so far, page cache included.
fn moved(child: &Child) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap_or_default();
    let chars = io.lines().filter_map(|line| line.split_once("char: "));
    chars.filter_map(|(_, count)| count.parse::<u64>().ok()).sum()
}

/// Sends SIGTERM once the process has moved `from` bytes; gives its exit code, and the bytes that it moved
/// afterwards.
fn cancelled(sandbox: &Sandbox, args: &[&str], from: u64) -> (Option<i32>, u64) {
    let mut child = start(sandbox, args);
    let began = Instant::now();
    let (mut sent_at, mut last) = (None, 0);
    loop {
        let now = moved(&child).max(last);
        last = now;
        if sent_at.is_none() && now >= from {
            kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
            sent_at = Some(now);
        }
        if let Some(status) = child.try_wait().unwrap() {
            return (status.code(), last - sent_at.unwrap_or(last));
        }
        if began.elapsed() > WATCHDOG {
            child.kill().unwrap();
            panic!("{args:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A signal during an import re-executed the process, a pack looked for one between files only, and a
/// verification or gc did not look at all. Each ends while one large file is read, and nothing is left.
#[test]
fn a_signal_ends_work_on_one_large_file() {
    const MIB: u64 = 512;
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    noise(&tree.join("large"), MIB);
    let tree = tree.to_str().unwrap().to_owned();
    let staging = sandbox.path("store/staging");
    let from = 48 << 20;
    let ends = |args: &[&str]| {
        let (code, after) = cancelled(&sandbox, args, from);
        assert_eq!(code, Some(130), "{args:?}");
        assert!(after < (MIB << 20) / 2, "{args:?} went on for {after} bytes");
        if staging.exists() {
            assert_eq!(fs::read_dir(&staging).unwrap().count(), 0, "{args:?}");
        }
    };
    ends(&["import", "--name", "large", &tree]);
    sandbox.run(&["ls", "large"]).fails_with(3);
    sandbox.run(&["import", "--name", "large", &tree]).ok();
    let (archive, filesystem) = (sandbox.path("out.tar"), sandbox.path("out.erofs"));
    ends(&["export", "large", &format!("oci-archive:{}", archive.display())]);
    ends(&["export", "large", &format!("erofs:{}", filesystem.display())]);
    assert!(!archive.exists() && !filesystem.exists());
    ends(&["pack", "--lz4", "large"]);
    ends(&["verify", "large"]);
    ends(&["verify", "--scrub", "--all"]);
    ends(&["fsck"]);
    sandbox.import_tree("box:1");
    ends(&["diff", "large", "box:1"]);
    if can_mount("a_signal_ends_work_on_one_large_file") {
        ends(&["mount", "--create", "--verify", "large", &sandbox.text("mnt")]);
        assert_eq!(sandbox.mounted(), Vec::<std::path::PathBuf>::new());
    }
    assert_eq!(sandbox.run(&["fsck", "--json"]).json()["damaged"], false);
}

/// gc waits for an import that is being published. A signal ends the waiting, and what it would have
/// removed stays for the next one.
#[test]
fn a_signal_ends_a_gc_that_waits() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    sandbox.run(&["rm", "box:1"]).ok();
    let domain = fs::File::open(sandbox.path("store/domains/default")).unwrap();
    flock(&domain, FlockOperation::LockShared).unwrap();
    let mut child = start(&sandbox, &["gc"]);
    // Collections exclude each other by this lock, the first that one takes.
    let roots = fs::File::open(sandbox.path("store/domains/default/roots")).unwrap();
    let has_begun = || {
        let taken = flock(&roots, FlockOperation::NonBlockingLockShared);
        let _ = flock(&roots, FlockOperation::Unlock);
        taken.is_err()
    };
    let began = Instant::now();
    while !has_begun() {
        assert!(began.elapsed() < WATCHDOG, "gc does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(domain);
    assert!(sandbox.run(&["gc", "--json"]).json()["objects"].as_u64().unwrap() > 0);
}

/// The first signal was only noted by a command that waited for a lock, of a collection that was stopped with
/// SIGSTOP for example: it waited on.
#[test]
fn a_signal_ends_waiting_for_a_lock() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let ends = |lock: &std::path::Path, commands: &[&[&str]]| {
        let held = fs::File::open(lock).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        for args in commands {
            let mut child = start(&sandbox, args);
            let began = Instant::now();
            while !waits(&child) {
                assert!(began.elapsed() < WATCHDOG, "{args:?} does not begin");
                std::thread::sleep(Duration::from_millis(1));
            }
            kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
            while child.try_wait().unwrap().is_none() && began.elapsed() < WATCHDOG {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = child.kill();
            assert_eq!(child.wait().unwrap().code(), Some(130), "{args:?}");
        }
    };
    let archive = format!("oci-archive:{}", sandbox.path("out.tar").display());
    let target = sandbox.dir("mnt");
    let mount = ["mount", "box:1", target.to_str().unwrap()];
    let domain = sandbox.path("store/domains/default");
    ends(&domain, &[&["export", "box:1", &archive], &["verify", "box:1"], &["fsck"], &["du"]]);
    if !can_mount("a_signal_ends_waiting_for_a_lock") {
        return;
    }
    ends(&domain, &[&mount]);
    sandbox.run(&mount).ok();
    sandbox.run(&["umount", mount[2]]).ok();
    let locks = sandbox.path("run").read_dir().unwrap().next().unwrap().unwrap().path();
    let image = sandbox.run(&["inspect", "--json", "box:1"]).json();
    let image = image["image"].as_str().unwrap().to_owned();
    let lock = locks.join("locks").join(&image[..2]);
    ends(&lock, &[&mount]);
    // A container that waited for it ended with no signal but SIGKILL.
    if can_run("a_signal_ends_waiting_for_a_lock") {
        ends(&lock, &[&["run", "box:1", "--", "true"]]);
        assert_eq!(sandbox.run(&["ps", "--json"]).json(), serde_json::json!([]));
    }
}

/// `mount`, `bundle` and `run` read an image ahead when it is mounted already. Ctrl-C ended `mount`
/// and `bundle` there, and the mount stayed without a word; `run` ended the process that reads and
/// started the container.
#[test]
fn a_signal_while_an_image_is_read_ahead_undoes_the_mount() {
    let test = "a_signal_while_an_image_is_read_ahead_undoes_the_mount";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    for number in 0..2000 {
        fs::write(tree.join(number.to_string()), number.to_string()).unwrap();
    }
    sandbox.run(&["import", "--name", "box:1", tree.to_str().unwrap()]).ok();
    let (target, bundle) = (sandbox.text("mnt"), sandbox.text("bundle"));
    let mut commands = vec![
        vec!["mount", "--warm", "all", "--create", "box:1", &target],
        vec!["bundle", "--warm", "all", "box:1", &bundle, "--", "true"],
    ];
    if can_run(test) {
        commands.push(vec!["run", "--rw", "--warm", "all", "box:1", "--", "true"]);
    }
    let image = sandbox.run(&["inspect", "--json", "box:1"]).json();
    let stripe = image["image"].as_str().unwrap()[..2].to_owned();
    for args in commands {
        let (mut child, helper) = until("it is caught while it reads ahead", || {
            let mut child = start(&sandbox, &args);
            while child.try_wait().unwrap().is_none() {
                // It reads many files, so there is time.
                if let Some(helper) = helper_of(&child)
                    && kill_process(helper, Signal::STOP).is_ok()
                {
                    return Some((child, helper));
                }
            }
            // It was too fast.
            let _ = sandbox.run(&["umount", &target]);
            let _ = sandbox.run(&["umount", &format!("{bundle}/rootfs")]);
            let _ = fs::remove_dir_all(&bundle);
            None
        });
        // The mount is undone under a lock, which somebody else has meanwhile.
        let run = sandbox.path("run").read_dir().unwrap().next().unwrap().unwrap().path();
        let lock = fs::File::open(run.join("locks").join(&stripe)).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        until("the other process ends", || kill_process(helper, Signal::CONT).err());
        // By then it has asked for the lock.
        std::thread::sleep(Duration::from_millis(100));
        drop(lock);
        let ended = until("it ends", || child.try_wait().unwrap());
        assert_eq!(ended.code(), Some(130), "{args:?}");
        assert_eq!(sandbox.mounted(), Vec::<std::path::PathBuf>::new(), "{args:?}");
        assert!(!sandbox.path("mnt").exists() && !sandbox.path("bundle").exists(), "{args:?}");
    }
}

/// The process that a command has started to read ahead. Until it executes its program, the command
/// waits for that, and sees no signal.
fn helper_of(child: &Child) -> Option<Pid> {
    let read = |pid: u32, name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
    let parent = |pid| read(pid, "stat")?.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok();
    let executes = |pid| read(pid, "cmdline").is_some_and(|line| line.contains("\0warm\0"));
    let names = fs::read_dir("/proc").unwrap().flatten();
    let mut pids = names.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok());
    let found = pids.find(|pid| parent(*pid) == Some(child.id()) && executes(*pid))?;
    Pid::from_raw(found.cast_signed())
}

/// Whether there is a runtime; says if not.
fn can_run(test: &str) -> bool {
    let can = ["crun", "runc"].into_iter().any(|name| common::program(name).is_some());
    if !can {
        common::skip(test, "neither crun nor runc is installed");
    }
    can
}

/// It has handlers for all signals, and sleeps. Before that a signal does what it did before.
fn waits(child: &Child) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let caught = field("SigCgt:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    let catches = caught.is_some_and(|mask| mask & (1 << (Signal::HUP.as_raw() - 1)) != 0);
    catches && field("State:").is_some_and(|state| state.starts_with('S'))
}
