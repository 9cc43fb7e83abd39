//! `cofolio run` killed, and a run directory that is gone.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::machine::{machine, until};
use crate::common::{Ran, program, skip};
use crate::{build_static, send, started};

/// Killed, `cofolio run` cannot clean up; the container goes on and is not lost.
#[test]
fn a_killed_run_leaves_nothing_that_is_not_put_right() {
    let Some((machine, runtimes)) = machine("a_killed_run_leaves_nothing_that_is_not_put_right")
    else {
        return;
    };
    for runtime in runtimes {
        let script = "echo up; while :; do sleep 0.05; done";
        let mut child =
            started(&machine, &machine.sh_args(runtime, &["--rw", "--name", "orphan"], script));
        send(&child, Signal::KILL);
        child.wait().unwrap();
        let orphan = &machine.containers()[0];
        assert!(orphan["pid"].as_u64().is_some(), "{runtime}: {orphan}");
        // Nobody takes a running container for a leftover.
        machine.run(&["gc"]).ok();
        assert_eq!(machine.containers()[0]["pid"], orphan["pid"]);
        // Another mount namespace cannot unmount it. `stop` killed it there, and said so afterwards.
        let stop = machine.command(&["stop", "--time", "0", "orphan"]);
        let mut elsewhere = Command::new("unshare");
        elsewhere.arg("--mount").arg(stop.get_program()).args(stop.get_args());
        elsewhere.envs(stop.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Ran::of(elsewhere.output().unwrap()).fails_with(5);
        assert_eq!(machine.containers()[0]["pid"], orphan["pid"]);
        machine.run(&["stop", "--time", "0", "orphan"]).ok();
        machine.assert_clean();

        // The same when its runtime is killed as well.
        let mut child = started(&machine, &machine.sh_args(runtime, &["--name", "orphan"], script));
        let runtimes = children(child.id());
        send(&child, Signal::KILL);
        child.wait().unwrap();
        for pid in runtimes {
            let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
        }
        let orphan = until("it is unattended", || {
            machine.containers().into_iter().find(|orphan| orphan["state"] == "unattended")
        });
        machine.run(&["gc"]).ok();
        assert_eq!(machine.containers()[0]["pid"], orphan["pid"]);
        // It ends like this, too, and gc is enough.
        let pid = i32::try_from(orphan["pid"].as_u64().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        until("it has ended", || (machine.containers()[0]["state"] == "ended").then_some(()));
        machine.run(&["gc"]).ok();
        machine.assert_clean();
    }
}

/// The main thread of a program may end before the others. cgroup v1 shows such a process in `/`, so its
/// container counted as ended: gc killed it and deleted its changes, and `stop` could not end it. What
/// it mapped was nobody's, since `/proc/PID/maps` is empty, and `umount` took a mount from it.
#[test]
fn a_container_goes_on_without_its_main_thread() {
    const TEST: &str = "a_container_goes_on_without_its_main_thread";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let dir = machine.dir("shown");
    let source = r#"
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
static pthread_t first;
static void *go_on(void *unused) {
    pthread_join(first, 0);
    write(1, "up\n", 3);
    for (;;) pause();
}
int main(int count, char **arguments) {
    pthread_t second;
    const char *file = count > 1 ? arguments[1] : "/bin/busybox";
    mmap(0, 4096, PROT_READ, MAP_SHARED | MAP_POPULATE, open(file, O_RDONLY), 0);
    first = pthread_self();
    pthread_create(&second, 0, go_on, 0);
    pthread_exit(0);
}
"#;
    if !build_static(source, &dir.join("go_on")) {
        return skip(TEST, "no C compiler that links statically");
    }
    let target = machine.path("target");
    let text = target.to_str().unwrap();
    machine.run(&["mount", "--create", "--writable", "/tmp", "box:1", text]).ok();
    let mut user = Command::new(dir.join("go_on"))
        .arg(target.join("bin/busybox"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    user.stdout.as_mut().unwrap().read_exact(&mut [0; 3]).unwrap();
    let unmounted = machine.run(&["umount", text]);
    user.kill().unwrap();
    user.wait().unwrap();
    unmounted.fails_with(7).refused(&format!("process {}", user.id()));
    machine.run(&["umount", text]).ok();
    let volume = format!("{}:/mnt:ro", dir.display());
    for runtime in runtimes {
        let options = ["--rw", "-v", &volume, "--name", "it"];
        let args = machine.sh_args(runtime, &options, "exec /mnt/go_on");
        let mut child = started(&machine, &args);
        let pid = machine.containers()[0]["pid"].clone();
        assert!(pid.as_u64().is_some(), "{runtime}: {:?}", machine.containers());
        let report = machine.run(&["top", "--once", "--json"]).json();
        let of_it = |it: &&Value| it["cgroup"].as_str().unwrap().contains("/it-");
        let used = report["containers"].as_array().unwrap().iter().find(of_it);
        assert!(used.is_some_and(|it| it["used_bytes"].as_u64() > Some(0)), "{report}");
        let runtimes = children(child.id());
        send(&child, Signal::KILL);
        child.wait().unwrap();
        for pid in runtimes {
            let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
        }
        until("it is unattended", || {
            (machine.containers()[0]["state"] == "unattended").then_some(())
        });
        machine.run(&["gc"]).ok();
        assert_eq!(machine.containers()[0]["pid"], pid, "{runtime}");
        machine.run(&["stop", "--time", "0", "it"]).ok();
        machine.assert_clean();
    }
}

/// The files of the run directory were deleted under a detached container. gc removed its volume while it
/// ran, and nobody said that it did. After its end its mount, loop device, pin and cgroups stayed for ever:
/// "Device or resource busy".
#[test]
fn a_lost_run_directory_loses_no_container_that_runs() {
    const TEST: &str = "a_lost_run_directory_loses_no_container_that_runs";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let name = format!("lost-{}", std::process::id());
    let sized: &[&str] = match program("mkfs.ext4") {
        Some(_) => &["--rw", "--size", "8M"],
        None => &["--rw"],
    };
    let cgroups = || -> Vec<PathBuf> {
        let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|it| it.path());
        let tops = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]);
        let cgroups = tops.flat_map(|top| fs::read_dir(top.join("cofolio")).into_iter().flatten());
        let ours = |path: &PathBuf| path.to_string_lossy().contains(&name);
        cgroups.flatten().map(|cgroup| cgroup.path()).filter(ours).collect()
    };
    for (options, wipe) in [(&[][..], "-type f"), (sized, "-type f"), (&[], "-depth")] {
        for runtime in &runtimes {
            let mut args = vec!["-d", "--name", &*name];
            args.extend(options);
            let script = "echo here > /data/file; while :; do sleep 0.05; done";
            machine.sh(runtime, &args, script).ok();
            let pid = machine.containers()[0]["pid"].as_u64().unwrap();
            let file = format!("/proc/{pid}/root/data/file");
            let is_there = || fs::read(&file).is_ok_and(|text| text == b"here\n");
            until("it runs", || is_there().then_some(()));
            let run = fs::read_dir(machine.path("run")).unwrap().next().unwrap().unwrap().path();
            wipe_files(&run, wipe);

            for command in ["gc", "ps"] {
                let said = machine.run(&[command]).stderr;
                assert!(said.contains(&format!("`kill -KILL {pid}`")), "{command}: {said}");
                // `gc` said the name twice.
                assert_eq!(said.matches("container").count(), 1, "{command}: {said}");
                // `ps` added that.
                assert!(!said.contains("no containers"), "{said}");
                assert!(is_there(), "{runtime} {options:?} {wipe}");
            }
            // It unmounted nothing, and ended with 0.
            machine.run(&["umount", "--all"]).fails_with(1).refused("has no record");
            machine.sh(runtime, &["--name", &name], "true").fails_with(125);
            kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
            until("gc removes the rest", || {
                let done = machine.run(&["gc"]);
                (done.stderr.is_empty() && cgroups().is_empty()).then_some(())
            });
            machine.assert_clean();
            // Meanwhile the runtime of another test's container can hold a copy of its mount.
            until("its loop device is free", || machine.loops().is_empty().then_some(()));
        }
    }
}

/// Deletes what the words for find(1) choose. A directory in which something is mounted stays. The shell of busybox has a
/// `find` of its own, which deletes nothing.
fn wipe_files(dir: &Path, words: &str) {
    let mut find = Command::new("find");
    find.arg(dir).args(["-mindepth", "1", "-xdev"]).args(words.split(' ')).arg("-delete");
    find.output().unwrap();
    let left = fs::read_dir(dir.join("containers")).into_iter().flatten().flatten();
    assert!(!left.into_iter().any(|it| it.path().join("container.json").exists()));
}

/// The process that waited for a lost container took down the next one of its name, which then found no
/// `/bin/busybox` in its root.
#[test]
fn who_waits_for_a_lost_container_leaves_the_next_one_alone() {
    const TEST: &str = "who_waits_for_a_lost_container_leaves_the_next_one_alone";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let name = format!("next-{}", std::process::id());
    for runtime in runtimes {
        let script = "echo up; while :; do sleep 0.05; done";
        let mut waits = started(&machine, &machine.sh_args(runtime, &["--name", &name], script));
        let pid = machine.containers()[0]["pid"].as_u64().unwrap();
        send(&waits, Signal::STOP);
        let run = fs::read_dir(machine.path("run")).unwrap().next().unwrap().unwrap().path();
        wipe_files(&run, "-type f");
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
        until("gc removes the rest", || machine.run(&["gc"]).stderr.is_empty().then_some(()));
        machine.sh(runtime, &["-d", "--name", &name], script).ok();
        send(&waits, Signal::CONT);
        waits.wait().unwrap();
        assert_eq!(machine.containers()[0]["state"], "running", "{runtime}");
        machine.run(&["exec", &name, "/bin/busybox", "true"]).ok();
        machine.run(&["stop", "--time", "0", &name]).ok();
        machine.assert_clean();
    }
}

/// Killed at any moment: a trivial container takes some tens of milliseconds.
#[test]
fn run_is_killed_at_any_moment() {
    let Some((machine, runtimes)) = machine("run_is_killed_at_any_moment") else { return };
    for round in 0..24 {
        let runtime = runtimes[round % runtimes.len()];
        let mut args = vec!["run", "--runtime", runtime, "box:1", "true"];
        if round % 3 == 0 {
            args.splice(1..1, ["--rw", "--size", "8M"]);
        }
        let mut command = machine.command(&args);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(round as u64 * 7 % 160));
        send(&child, Signal::KILL);
        child.wait().unwrap();
    }
    // The runtimes of the last ones may still be at work.
    until("containers end", || {
        let all = machine.containers();
        all.iter().all(|container| container["state"] == "ended").then_some(())
    });
    machine.run(&["gc"]).ok();
    machine.assert_clean();
    assert_eq!(machine.run(&["run", "box:1"]).ok(), "from image\n");
}

fn children(pid: u32) -> Vec<i32> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let text = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(text.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
    }
    found
}
