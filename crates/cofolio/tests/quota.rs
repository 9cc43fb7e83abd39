//! `run --size` by project quota, on ext4 and XFS: what a container's changes may take is what the limit says, for each
//! container by itself, and a limit goes with its container, however that ends. Where quotas are only counted, and not
//! enforced, the limit holds all the same. In a guest where this machine's kernel has no quotas (`tests/vm/run size-quota`).

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::machine::{Machine, machine_in, until};
use common::volume::Volume;
use common::{Sandbox, can_mount, program, skip};
use rustix::process::{Pid, Signal, kill_process};

/// A project of ours that the filesystem knows: what it takes and may take, in KiB and in files.
#[derive(Debug, PartialEq, Eq)]
struct Project {
    kilobytes: u64,
    kilobytes_max: u64,
    files_max: u64,
}

/// A store with an image on a filesystem with quotas.
struct Limited {
    machine: Machine,
    volume: Volume,
    _dir: tempfile::TempDir,
}

impl Limited {
    fn new(test: &str, kind: &str, option: &str) -> Option<Limited> {
        let dir = tempfile::tempdir().unwrap();
        let mkfs: &[&str] = match kind {
            "ext4" => &["-O", "quota,project", "-E", "quotatype=usrquota:prjquota"],
            _ => &[],
        };
        let options = format!("loop,{option}");
        let volume = Volume::with_options(dir.path(), kind, 400, mkfs, &options)
            .map_err(|reason| skip(test, &format!("{kind}, {option}: {reason}")))
            .ok()?;
        let (machine, _) = machine_in(Sandbox::below(&volume.directory), test)?;
        Some(Limited { machine, volume, _dir: dir })
    }

    /// Projects that are in use.
    fn projects(&self) -> Vec<Project> {
        // Ours begin here.
        const NUMBERS: std::ops::Range<u64> = 0x4C0F_0000..0x4C10_0000;
        let report = "report -p -n -N -b -i";
        let mut command = Command::new(program("xfs_quota").unwrap());
        let said = command.args(["-f", "-x", "-c", report]).arg(&self.volume.directory).output();
        let said = String::from_utf8(said.unwrap().stdout).unwrap();
        let project = |line: &str| {
            let words: Vec<_> = line.trim_start_matches('#').split_whitespace().collect();
            let number = |at: usize| words.get(at)?.parse::<u64>().ok();
            // Number, KiB, their soft and hard limit, a count, a time; files, their soft and hard limit.
            let [kilobytes, kilobytes_max, files, files_max] =
                [number(1)?, number(3)?, number(6)?, number(8)?];
            let used = kilobytes + kilobytes_max + files + files_max > 0;
            (NUMBERS.contains(&number(0)?) && used).then_some(Project {
                kilobytes,
                kilobytes_max,
                files_max,
            })
        };
        said.lines().filter_map(project).collect()
    }

    fn none_is_left(&self) -> bool {
        let writable = self.machine.path("store/domains/default/writable");
        self.projects().is_empty() && fs::read_dir(writable).unwrap().count() == 0
    }

    /// So many projects are there, and the fullest takes as much.
    fn are_used(&self, count: usize, kilobytes: u64) -> bool {
        let projects = self.projects();
        let most = projects.iter().map(|project| project.kilobytes).max();
        projects.len() == count && most >= Some(kilobytes)
    }

    #[track_caller]
    fn until(&self, what: &str, look: impl Fn(&Self) -> bool) {
        until(what, || look(self).then_some(()));
    }

    /// `cofolio run` with a limit of 16 MiB.
    fn boxed<'a>(&self, options: &[&'a str], script: &'a str) -> Vec<&'a str> {
        let run = ["run", "--quiet", "--rw", "--size", "16M"];
        [&run[..], options, &["box:1", "--", "sh", "-c", script]].concat()
    }

    fn has_ended(&self) -> bool {
        let containers = self.machine.containers();
        !containers.iter().any(|it| it["state"] == "running" || it["state"] == "unattended")
    }
}

/// How a filesystem with quotas is mounted; enforced or not.
fn on(test: &str, kind: &str, option: &str, enforced: bool) {
    if !can_mount(test) {
        return;
    }
    if program("xfs_quota").is_none() {
        return skip(test, "no xfs_quota");
    }
    let Some(limited) = Limited::new(test, kind, option) else { return };
    full_is_full(&limited, enforced);
    if enforced {
        each_has_its_own(&limited);
        whatever_is_killed_is_put_right(&limited);
    }
    limited.machine.run(&["rm", "--quiet", "box:1"]).ok();
    limited.machine.run(&["gc", "--quiet"]).ok();
    limited.machine.assert_clean();
    drop(limited.machine);
    limited.volume.unmount().unwrap();
}

/// A container sees how much there is, and what it removes can be had again.
fn full_is_full(limited: &Limited, enforced: bool) {
    let script =
        "df -k / | tail -n 1; dd if=/dev/zero of=/big bs=1M count=30 2>&1 | grep -v records
        rm /big; dd if=/dev/zero of=/fits bs=1M count=10 2>/dev/null && echo fits";
    let ran = limited.machine.run(&limited.boxed(&[], script));
    let said = ran.ok();
    eprintln!("   {}", said.replace('\n', "\n   "));
    let why = ["No space left on device", "Disk quota exceeded"];
    assert!(why.iter().any(|why| said.contains(why)), "{said}");
    assert!(said.contains("fits"), "{said}");
    let total: u64 = said.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(total <= 16 << 10, "df says {total} KiB");
    limited.until("the first one's end", Limited::none_is_left);
    // So many files as well. mke2fs gives a filesystem as small as this four times the inodes.
    let script = "i=0; while :; do i=$((i + 1)); true >/f$i || break; done 2>&1; echo $i";
    let ran = limited.machine.run(&limited.boxed(&[], script));
    let files: u64 = ran.ok().split_whitespace().last().unwrap().parse().unwrap();
    assert!(files <= if enforced { 1025 } else { 4097 }, "{files} files");
}

/// Two at once have a project each, with the limits; one that is full is not in the other's way.
fn each_has_its_own(limited: &Limited) {
    let start = |name: &str, script: &str| {
        limited.machine.run(&limited.boxed(&["-d", "--name", name], script)).ok();
    };
    start("one", "dd if=/dev/zero of=/big bs=1M count=30; sleep 1000");
    limited.until("a full one", |it| it.are_used(1, 15_000));
    start("two", "dd if=/dev/zero of=/ten bs=1M count=10; sleep 1000");
    limited.until("two projects", |it| it.are_used(2, 15_000));
    limited.until("ten MiB", |it| {
        it.projects().iter().any(|project| (10_240..15_000).contains(&project.kilobytes))
    });
    for project in limited.projects() {
        assert_eq!((project.kilobytes_max, project.files_max), (16_384, 1024));
    }
    assert_eq!(limited.machine.loops(), Vec::<String>::new());
    limited.machine.run(&["stop", "--quiet", "--time", "0", "one"]).ok();
    limited.until("one project", |it| it.are_used(1, 10_240));
}

/// A container with all that watched over it, and a `cofolio run` at any moment: garbage collection puts it right.
fn whatever_is_killed_is_put_right(limited: &Limited) {
    let machine = &limited.machine;
    let kill = |pid: i32| {
        // It may be gone already.
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    };
    let [container] = &machine.containers()[..] else { panic!("not one container") };
    // The watchers first: one that sees the end keeps the container's exit status, and gc keeps that.
    watchers(machine).into_iter().for_each(kill);
    kill(i32::try_from(container["pid"].as_u64().unwrap()).unwrap());
    limited.until("the end", Limited::has_ended);
    machine.run(&["gc", "--quiet"]).ok();
    limited.until("what was killed is put right", Limited::none_is_left);

    for milliseconds in [100, 200, 300, 500, 800] {
        let mut command = machine.command(&limited.boxed(&[], "sleep 1"));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    limited.until("the end", Limited::has_ended);
    machine.run(&["gc", "--quiet"]).ok();
    limited.until("what was killed is put right", Limited::none_is_left);
}

/// Processes of `cofolio` and of runtimes that it started in this sandbox.
fn watchers(machine: &Machine) -> Vec<i32> {
    let ours = format!("COFOLIO_RUN={}\0", machine.text("run"));
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|environ| common::machine::contains(&environ, ours.as_bytes()))
    })
    .collect()
}

#[test]
fn ext4_with_project_quotas() {
    on("ext4_with_project_quotas", "ext4", "prjquota", true);
}

#[test]
fn xfs_with_project_quotas() {
    on("xfs_with_project_quotas", "xfs", "prjquota", true);
}

#[test]
fn ext4_with_quotas_of_users_only() {
    on("ext4_with_quotas_of_users_only", "ext4", "usrquota", false);
}

#[test]
fn xfs_that_only_counts() {
    on("xfs_that_only_counts", "xfs", "pqnoenforce", false);
}
