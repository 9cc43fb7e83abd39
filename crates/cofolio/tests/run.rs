//! `cofolio run` with the runtimes of this machine. Needs root, and crun or runc.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::machine::{Machine, contains, machine, until};
use common::registry::Registry;
use common::{Ran, Sandbox, program, real_redis, skip};
use rustix::process::{Pid, Signal, kill_process};

fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[test]
fn run_ends_as_its_container_does() {
    let Some((machine, runtimes)) = machine("run_ends_as_its_container_does") else { return };
    for runtime in runtimes {
        assert_eq!(machine.run(&["run", "--runtime", runtime, "box:1"]).ok(), "from image\n");
        machine.sh(runtime, &[], "exit 7").fails_with(7);
        // A container's own 1 is not the runtime's.
        machine.sh(runtime, &[], "exit 1").fails_with(1);
        let killed = machine.sh(runtime, &[], "sh -c 'kill -9 $$'; exit $?");
        killed.fails_with(137);
        let start = |options: &[&str]| {
            let mut args = vec!["run", "--runtime", runtime];
            args.extend(options);
            args.push("box:1");
            machine.run(&args)
        };
        let missing = start(&["--entrypoint", "nosuch"]);
        missing.fails_with(127);
        assert!(missing.stderr.contains("nosuch"), "{}", missing.stderr);
        start(&["--entrypoint", "/bin/text"]).fails_with(126);
        start(&["--user", "nobody"]).fails_with(125);
        for wrong in [
            ["--name", "../x"],
            ["--volume", "/etc:relative"],
            ["--userns", "0:x"],
            ["--userns", "1:100000:65536"],
            ["--env", "=x"],
        ] {
            start(&wrong).fails_with(2);
        }
        start(&["--tty"]).fails_with(2);
        // What is read is what was given, and only if it was asked for.
        let args = machine.sh_args(runtime, &["-i"], "cat");
        assert_eq!(machine.run_with_input(&args, b"given\n").ok(), "given\n");
        let args = machine.sh_args(runtime, &[], "cat");
        assert_eq!(machine.run_with_input(&args, b"given\n").ok(), "");
        machine.assert_clean();
    }
    machine.run(&["run", "nosuch"]).fails_with(125);
    let none = machine.run(&["run", "--runtime", "nosuch", "box:1"]);
    none.fails_with(125);
    assert!(none.stderr.contains("nosuch is not installed"), "{}", none.stderr);
    // An empty entry of PATH made it a program of the working directory, whoever had put it there.
    fs::write(machine.path("nosuch"), "").unwrap();
    let mut run = machine.command(&["run", "--runtime", "nosuch", "box:1"]);
    let none = Ran::of(run.current_dir(machine.path("")).env("PATH", ":").output().unwrap());
    assert!(none.stderr.contains("nosuch is not installed"), "{}", none.stderr);
    machine.run(&["run", "--size", "1G", "box:1"]).fails_with(2);
}

/// `run docker://…` pulls what is not here; what is here it starts, also when the registry is gone. What the
/// container says stays alone on standard output.
#[test]
fn run_pulls_what_is_not_here() {
    const TEST: &str = "run_pulls_what_is_not_here";
    let Some(binary) = program("docker-registry") else {
        return skip(TEST, "docker-registry is not installed");
    };
    let Some((machine, _)) = machine(TEST) else { return };
    let registry = Registry::start(&binary, &machine);
    let name = format!("docker://{}/team/box:1", registry.host);
    machine.run(&["push", "box:1", &name]).ok();
    let other = Machine(Sandbox::new());
    assert_eq!(other.run(&["run", &name]).ok(), "from image\n");
    let missing = other.run(&["run", &name.replace("box", "none")]);
    missing.fails_with(125);
    assert!(missing.stderr.contains("team/none"), "{}", missing.stderr);
    drop(registry);
    assert_eq!(other.run(&["run", &name, "--", "echo", "again"]).ok(), "again\n");
    other.assert_clean();
}

#[test]
fn what_a_container_sees() {
    let Some((machine, runtimes)) = machine("what_a_container_sees") else { return };
    let shown = machine.dir("shown");
    fs::write(shown.join("file"), "of the host\n").unwrap();
    let (writable, readonly) =
        (format!("{}:/mnt", shown.display()), format!("{}:/mnt:ro", shown.display()));
    for runtime in runtimes {
        let script =
            "touch /new && echo root; touch /tmp/new && echo tmp; touch /data/new && echo data
                      touch /mnt/new && echo mnt; cat /mnt/file; pwd; echo $COLOR; hostname
                      id -u; id -g; grep -c : /proc/net/dev";
        let options = [
            "-e",
            "COLOR=red",
            "-e",
            "HOME",
            "-w",
            "/etc",
            "-u",
            "worker",
            "--name",
            "here",
            "-v",
            &readonly,
        ];
        let ran = machine.sh(runtime, &options, script);
        assert_eq!(
            ran.ok(),
            "tmp\ndata\nof the host\n/etc\nred\nhere\n1001\n1002\n1\n",
            "{runtime}: {}",
            ran.stderr
        );
        let ran = machine.sh(runtime, &["--rw", "-v", &writable], script);
        let seen: Vec<&str> = ran.ok().lines().collect();
        assert_eq!(seen[..5], ["root", "tmp", "data", "mnt", "of the host"], "{runtime}");
        assert!(shown.join("new").exists());
        fs::remove_file(shown.join("new")).unwrap();
        // Neither is there for the next one.
        let ran = machine.sh(runtime, &["--rw"], "ls /data; test -e /new || echo fresh");
        assert_eq!(ran.ok(), "fresh\n");
        // With the host's network come the files that say how to use it, also where the image lacks them.
        for mode in ["--env=MODE=ro", "--rw"] {
            let script = "cat /etc/resolv.conf; tail -n 1 /etc/passwd; head -c 0 /etc/hosts";
            let ran = machine.sh(runtime, &["--network", "host", mode], script);
            let resolver = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
            let account = "worker:x:1001:1002::/srv:\n";
            assert_eq!(ran.stdout, resolver + account, "{runtime} {mode}: {}", ran.stderr);
        }
        let host = machine.sh(runtime, &["--network", "host"], "readlink /proc/self/ns/net");
        let ours = fs::read_link("/proc/self/ns/net").unwrap();
        assert_eq!(host.ok().trim(), ours.to_str().unwrap());
        machine.assert_clean();
    }
}

/// A filesystem that is mounted below a read-only volume could be written to, and so could the host's cgroups with
/// `--network host`: `ro` is for the topmost mount alone.
#[test]
fn what_is_read_only_is_so_to_the_bottom() {
    let Some((machine, runtimes)) = machine("what_is_read_only_is_so_to_the_bottom") else {
        return;
    };
    let below = machine.dir("shown/below");
    let none = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &below, "tmpfs", none, None).unwrap();
    let volume = format!("{}:/mnt:ro", machine.path("shown").display());
    // The runtime may put the hierarchies of version 1 into a tmpfs of the container's own.
    let script = "for dir in /mnt /mnt/below /sys /sys/fs/cgroup/*/; do mkdir $dir/new 2>/dev/null && echo $dir; done
                  awk '$5 ~ \"^/sys\" && $6 !~ /^ro/ && !/ - tmpfs /' /proc/self/mountinfo";
    for runtime in runtimes {
        for network in ["none", "host"] {
            for users in
                [&["--network", network][..], &["--network", network, "--userns", "0:100000:65536"]]
            {
                let ran = machine.sh(runtime, &[&["-v", &volume][..], users].concat(), script);
                assert_eq!(
                    (ran.stdout.as_str(), ran.stderr.as_str()),
                    ("", ""),
                    "{runtime} {users:?}"
                );
            }
        }
    }
    rustix::mount::unmount(&below, rustix::mount::UnmountFlags::empty()).unwrap();
    machine.assert_clean();
}

/// Containers had no seccomp profile: a process could keep keys, make user namespaces and so reach kernel code that
/// engines keep from it.
#[test]
fn system_calls_are_filtered() {
    const TEST: &str = "system_calls_are_filtered";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let dir = machine.dir("shown");
    let source = dir.join("probe.c");
    fs::write(
        &source,
        r#"
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
static void say(const char *name, long result) {
    printf("%s %d\n", name, result < 0 ? errno : 0);
}
int main(void) {
    say("keyctl", syscall(SYS_keyctl, 0, -3, 1));
    say("bpf", syscall(SYS_bpf, 0, 0, 0));
    say("mount", mount("none", "/tmp", "tmpfs", 0, ""));
    say("unshare", unshare(CLONE_NEWUSER));
    say("clone3", syscall(SYS_clone3, 0, 0));
    say("vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    say("unix", socket(AF_UNIX, SOCK_STREAM, 0));
    return 0;
}
"#,
    )
    .unwrap();
    let probe = dir.join("probe");
    let built = Command::new("cc").arg("-static").arg(&source).arg("-o").arg(&probe).output();
    if !built.is_ok_and(|built| built.status.success()) {
        return skip(TEST, "no C compiler that links statically");
    }
    let volume = format!("{}:/mnt:ro", dir.display());
    let script = "grep ^Seccomp: /proc/self/status; /mnt/probe";
    for runtime in runtimes {
        let ran = machine.sh(runtime, &["-v", &volume], script);
        let (eperm, enosys) = (1, 38);
        let expected = format!(
            "Seccomp:\t2\nkeyctl {eperm}\nbpf {eperm}\nmount {eperm}\nunshare {eperm}\n\
             clone3 {enosys}\nvsock {eperm}\nunix 0\n"
        );
        assert_eq!(ran.ok(), expected, "{runtime}");
    }
}

/// Without root the first refused system call was reported, with its path, and not what to do.
#[test]
fn run_without_root_says_so() {
    use std::os::unix::process::CommandExt as _;
    let sandbox = Sandbox::new();
    for args in [&["run", "box:1"][..], &["bundle", "box:1", "/tmp/x"], &["stop", "box"]] {
        let mut command = sandbox.command(args);
        command.uid(65534).gid(65534);
        let ran = common::run_with_input(command, b"");
        ran.fails_with(5);
        assert!(ran.stderr.contains("run as root"), "{args:?}: {}", ran.stderr);
    }
}

/// Found under a real-time scheduler, which no new cgroup has time for: crun made the container's cgroups, could not
/// enter one, said so and left them all.
#[test]
fn a_runtime_that_fails_half_way_leaves_no_cgroup() {
    let Some((machine, _)) = machine("a_runtime_that_fails_half_way_leaves_no_cgroup") else {
        return;
    };
    let made = machine.path("made");
    let runtime = machine.path("crun");
    let script = format!(
        r#"#!/bin/sh
while [ $# -gt 1 ]; do
    case $1 in --bundle) bundle=$2 ;; --log) log=$2 ;; esac
    shift
done
cgroup=$(sed 's/.*"cgroupsPath":"\([^"]*\)".*/\1/' "$bundle/config.json")
for top in /sys/fs/cgroup /sys/fs/cgroup/*; do
    [ -e "$top/cgroup.procs" ] && mkdir -p "$top$cgroup" && echo "$top$cgroup" >>{}
done
echo '{{"msg": "cgroup.procs: Invalid argument", "level": "error", "time": "now"}}' | tee "$log" >&2
exit 1
"#,
        made.display()
    );
    fs::write(&runtime, script).unwrap();
    fs::set_permissions(&runtime, fs::Permissions::from_mode(0o755)).unwrap();
    let ran = machine.run(&["run", "--runtime", runtime.to_str().unwrap(), "box:1"]);
    ran.fails_with(125);
    assert!(ran.stderr.contains("Invalid argument"), "{}", ran.stderr);
    let made = fs::read_to_string(made).unwrap();
    assert!(!made.is_empty());
    for cgroup in made.lines() {
        assert!(!Path::new(cgroup).exists(), "{cgroup}");
    }
}

/// `run --runtime /bin/false` ended with 1 and said nothing, and with /bin/true it seemed that a container had run.
#[test]
fn a_runtime_that_makes_no_container_is_named() {
    let Some((machine, _)) = machine("a_runtime_that_makes_no_container_is_named") else { return };
    for runtime in ["/bin/false", "/bin/true"] {
        for options in [&[][..], &["-d"]] {
            let ran = machine.sh(runtime, options, "true");
            assert!(ran.fails_with(125).stderr.contains(runtime), "{runtime}: {}", ran.stderr);
        }
    }
    machine.assert_clean();
}

/// `run --detach --output FIFO` waited until somebody read from it.
#[test]
fn a_fifo_for_output_is_not_waited_for() {
    let Some((machine, runtimes)) = machine("a_fifo_for_output_is_not_waited_for") else { return };
    let fifo = machine.text("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let ran = machine.sh(runtimes[0], &["-d", "--output", &fifo], "true");
    assert!(ran.fails_with(125).stderr.contains(&fifo), "{}", ran.stderr);
    machine.assert_clean();
}

#[test]
fn changes_are_kept_when_asked() {
    let Some((machine, runtimes)) = machine("changes_are_kept_when_asked") else { return };
    let ran = machine.sh(runtimes[0], &["--rw", "--keep"], "echo changed > /new");
    ran.ok();
    let (_, kept) = ran.stderr.trim().split_once("changes are in ").expect(&ran.stderr);
    assert_eq!(fs::read(Path::new(kept).join("upper/new")).unwrap(), b"changed\n");
}

#[test]
fn memory_and_cpus_are_limited() {
    let Some((machine, runtimes)) = machine("memory_and_cpus_are_limited") else { return };
    for runtime in runtimes {
        // The files of cgroup v1 and of v2.
        let script = "cd /sys/fs/cgroup
                      cat memory/memory.limit_in_bytes 2>/dev/null || cat memory.max
                      cat cpu/cpu.cfs_quota_us 2>/dev/null || cat cpu.max";
        let ran = machine.sh(runtime, &["--memory", "64M", "--cpus", "0.5"], script);
        let seen = ran.stdout.split_whitespace().take(2).collect::<Vec<_>>();
        if seen.is_empty() {
            skip("memory_and_cpus_are_limited", ran.stderr.trim());
            continue;
        }
        assert_eq!(seen, ["67108864", "50000"], "{runtime}: {}", ran.stderr);
        // And it is enforced: /tmp is memory.
        let ran = machine.sh(runtime, &["--memory", "32M"], "head -c 200000000 /dev/zero > /tmp/x");
        assert_ne!(ran.code, 0, "{runtime}: {}", ran.stderr);
        machine.assert_clean();
    }
}

#[test]
fn the_writable_layer_has_a_size() {
    let Some((machine, runtimes)) = machine("the_writable_layer_has_a_size") else { return };
    if program("mkfs.ext4").is_none() {
        return skip("the_writable_layer_has_a_size", "mkfs.ext4 is not installed");
    }
    for runtime in runtimes {
        // What does not fit fails for want of space, and what fits afterwards works.
        let script = "dd if=/dev/zero of=/big bs=1M count=30; echo $?; rm /big; head -c 9000000 /dev/zero > /fits; echo $?";
        let ran = machine.sh(runtime, &["--rw", "--size", "16M"], script);
        assert_eq!(ran.ok(), "1\n0\n", "{runtime}: {}", ran.stderr);
        let why = ["No space left on device", "Disk quota exceeded"];
        assert!(why.iter().any(|why| ran.stderr.contains(why)), "{runtime}: {}", ran.stderr);
        let without = machine.sh(runtime, &["--rw"], "head -c 30000000 /dev/zero > /big");
        without.ok();
        machine.assert_clean();
        until("the loop device goes with the container", || {
            machine.loops().is_empty().then_some(())
        });
    }
    machine.sh("runc", &["--rw", "--size", "1M"], "true").fails_with(125);
}

#[test]
fn root_of_a_user_namespace_is_nobody_outside() {
    const TEST: &str = "root_of_a_user_namespace_is_nobody_outside";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    if !Path::new("/proc/self/ns/user").exists() {
        return skip(TEST, "no user namespaces");
    }
    // Its root has to get through here.
    fs::set_permissions(machine.path("."), fs::Permissions::from_mode(0o711)).unwrap();
    for runtime in runtimes {
        let script = "id -u; cat /proc/self/uid_map; stat -c %u /bin/busybox /data; touch /tmp/x && stat -c %u /tmp/x";
        for mode in ["--env=MODE=ro", "--rw"] {
            let ran = machine.sh(runtime, &["--userns", "0:100000:65536", mode], script);
            let seen: Vec<&str> = ran.stdout.split_whitespace().collect();
            assert_eq!(
                seen,
                ["0", "0", "100000", "65536", "0", "1001", "0"],
                "{runtime}: {}",
                ran.stderr
            );
        }
        machine.assert_clean();
    }
}

#[test]
fn a_terminal_is_one() {
    const TEST: &str = "a_terminal_is_one";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let Some(script) = program("script") else { return skip(TEST, "script(1) is not installed") };
    for runtime in runtimes {
        let inside = "test -t 0 && test -t 1 && tty && read word && echo \"<$word>\"; exit 3";
        let command = machine.sh_args(runtime, &["-it"], inside);
        let quoted: Vec<String> =
            command.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
        let line = format!("{} {}", env!("CARGO_BIN_EXE_cofolio"), quoted.join(" "));
        let mut outer = Command::new(&script);
        outer.args(["-qec", &line, "/dev/null"]);
        outer.env("COFOLIO_STORE", machine.path("store")).env("COFOLIO_RUN", machine.path("run"));
        let ran = common::run_with_input(outer, b"typed\n");
        ran.fails_with(3);
        assert!(ran.stdout.contains("/dev/pts/0"), "{runtime}: {}", ran.stdout);
        assert!(ran.stdout.contains("<typed>"), "{runtime}: {}", ran.stdout);
        machine.assert_clean();
    }
}

/// Starts `cofolio run` in the background and waits until the container has said that it is up.
fn started(machine: &Machine, args: &[&str]) -> Child {
    let log = machine.path("said");
    let mut command = machine.command(args);
    let out = fs::File::create(&log).unwrap();
    let child = command.stdout(out.try_clone().unwrap()).stderr(out).spawn().unwrap();
    until("the container starts", || {
        fs::read_to_string(&log).unwrap().contains("up").then_some(())
    });
    child
}

#[test]
fn signals_reach_the_container() {
    let Some((machine, runtimes)) = machine("signals_reach_the_container") else { return };
    for runtime in runtimes {
        let script =
            "trap 'exit 5' TERM; trap 'echo one' USR1; echo up; while :; do sleep 0.05; done";
        let mut child = started(&machine, &machine.sh_args(runtime, &[], script));
        send(&child, Signal::USR1);
        let log = machine.path("said");
        until("the first signal", || {
            fs::read_to_string(&log).unwrap().contains("one").then_some(())
        });
        send(&child, Signal::TERM);
        assert_eq!(child.wait().unwrap().code(), Some(5), "{runtime}");
        machine.assert_clean();
    }
}

#[test]
fn detached_containers_are_listed_and_stopped() {
    let Some((machine, runtimes)) = machine("detached_containers_are_listed_and_stopped") else {
        return;
    };
    for runtime in runtimes {
        let output = machine.text("output");
        let script = "trap 'echo asked; exit' TERM; echo up; while :; do sleep 0.05; done";
        // The runtime was blamed for it.
        let nowhere = machine.sh(runtime, &["-d", "--output", "/"], script);
        assert!(nowhere.stderr.contains("opening /: Is a directory"), "{}", nowhere.stderr);
        let options = ["-d", "--name", "cache", "--output", &output];
        assert_eq!(machine.sh(runtime, &options, script).ok(), "cache\n");
        until("its output", || fs::read_to_string(&output).unwrap().contains("up").then_some(()));
        let listed = machine.containers();
        assert_eq!(listed[0]["state"], "running", "{runtime}");
        assert_eq!(listed[0]["image_name"], "box:1");
        let words = machine.run(&["ps"]);
        assert_eq!(words.words()[1][..3], ["cache", "box:1", "running"]);
        // `mounts` showed whatever name of the image comes first.
        machine.run(&["tag", "box:1", "another"]).ok();
        assert!(!machine.run(&["mounts"]).stdout.contains("another"), "{runtime}");
        machine.run(&["rm", "another"]).ok();
        // Nothing takes its name or its mount.
        machine.sh(runtime, &["--name", "cache"], "true").fails_with(125);
        machine.run(&["gc"]).ok();
        assert_eq!(machine.containers().len(), 1);
        machine.run(&["umount", "--all", "--force"]).fails_with(7);
        machine.run(&["stop", "cache"]).ok();
        assert!(fs::read_to_string(&output).unwrap().contains("asked"), "{runtime}");
        machine.run(&["stop", "cache"]).fails_with(3);
        machine.assert_clean();
        let refused =
            machine.run(&["run", "--runtime", runtime, "-d", "--entrypoint", "nosuch", "box:1"]);
        refused.fails_with(127);
        assert!(refused.stderr.contains("nosuch"), "{}", refused.stderr);
        machine.assert_clean();
        fs::remove_file(output).unwrap();
    }
}

/// A frozen container hears no signal, not even SIGKILL with the cgroups of version 1: `stop` waited for half a minute
/// and gave up.
#[test]
fn a_frozen_container_is_stopped() {
    let Some((machine, runtimes)) = machine("a_frozen_container_is_stopped") else { return };
    for runtime in runtimes {
        machine.sh(runtime, &["-d", "--rm", "--name", "cold"], "sleep 100").ok();
        let cgroup = machine.containers()[0]["cgroup"].as_str().unwrap().to_owned();
        let frozen = [("freezer", "freezer.state", "FROZEN"), ("", "cgroup.freeze", "1")];
        let froze = frozen.iter().any(|(hierarchy, file, word)| {
            let dir = Path::new("/sys/fs/cgroup").join(hierarchy).join(&cgroup[1..]);
            let opened = fs::OpenOptions::new().write(true).open(dir.join(file));
            opened.and_then(|mut file| file.write_all(word.as_bytes())).is_ok()
        });
        assert!(froze, "{cgroup}");
        machine.run(&["stop", "--time", "0", "cold"]).ok();
        machine.assert_clean();
    }
}

/// `stop` of a container that was just being started sent it nothing, waited for ten seconds and failed.
#[test]
fn a_container_that_is_being_started_is_stopped() {
    const TEST: &str = "a_container_that_is_being_started_is_stopped";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        for _ in 0..3 {
            let args = machine.sh_args(runtime, &["--name", "new"], "sleep 100");
            let mut run = machine.command(&args).spawn().unwrap();
            until("it is listed", || (!machine.containers().is_empty()).then_some(()));
            machine.run(&["stop", "--time", "0", "new"]).ok();
            run.wait().unwrap();
            machine.assert_clean();
        }
    }
}

/// An image may name a stop signal that the runtime does not know. `stop` killed the container at once then.
#[test]
fn a_stop_signal_that_the_runtime_refuses_is_sigterm() {
    const TEST: &str = "a_stop_signal_that_the_runtime_refuses_is_sigterm";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    // crun takes it for signal 0 and is content, so the container is killed after the time.
    for runtime in runtimes.into_iter().filter(|runtime| *runtime != "crun") {
        let output = machine.text("output");
        let script = "trap 'echo asked; exit' TERM; echo up; while :; do sleep 0.05; done";
        let options = ["-d", "--name", "cache", "--output", &output];
        machine.sh(runtime, &options, script).ok();
        until("its output", || fs::read_to_string(&output).unwrap().contains("up").then_some(()));
        let rootfs = machine.containers()[0]["rootfs"].as_str().unwrap().to_owned();
        let record = Path::new(&rootfs).with_file_name("container.json");
        let text = fs::read_to_string(&record).unwrap();
        assert!(text.contains("SIGTERM"), "{text}");
        fs::write(&record, text.replace("SIGTERM", "SIGNONE")).unwrap();
        machine.run(&["stop", "cache"]).ok();
        assert!(fs::read_to_string(&output).unwrap().contains("asked"), "{runtime}");
        machine.assert_clean();
        fs::remove_file(output).unwrap();
    }
}

#[test]
fn exec_ends_as_its_process_does() {
    let Some((machine, runtimes)) = machine("exec_ends_as_its_process_does") else { return };
    for runtime in runtimes {
        machine.sh(runtime, &["-d", "--name", "cache"], "echo up > /tmp/up; sleep 100").ok();
        let exec =
            |script: &str| machine.run(&["exec", "cache", "--", "busybox", "sh", "-c", script]);
        until("it is up", || (exec("test -e /tmp/up").code == 0).then_some(()));
        assert_eq!(exec("cat /tmp/up; hostname; readlink /proc/self/fd/0 >&2").ok(), "up\ncache\n");
        exec("exit 7").fails_with(7);
        // As with `run`; it was 255.
        machine.run(&["exec", "cache", "--", "nosuch"]).fails_with(127);
        machine.run(&["exec", "cache", "--", "/etc/passwd"]).fails_with(126);
        let args = ["exec", "-i", "cache", "--", "busybox", "cat"];
        assert_eq!(machine.run_with_input(&args, b"given\n").ok(), "given\n");
        machine.run(&["exec", "other", "--", "true"]).fails_with(3);
        machine.run(&["stop", "--time", "0", "cache"]).ok();
        machine.assert_clean();
    }
}

/// With crun, `exec` started its process as root, in `/`, without no_new_privs and with other capabilities than those
/// of the container's process.
#[test]
fn exec_has_what_the_container_has() {
    let Some((machine, runtimes)) = machine("exec_has_what_the_container_has") else { return };
    for runtime in runtimes {
        for user in ["worker", "0"] {
            let big: Vec<_> =
                (0..11).map(|at| format!("BIG{at}={}", "x".repeat(100_000))).collect();
            let mut options = vec![
                "-d",
                "--name",
                "cache",
                "--user",
                user,
                "--workdir",
                "/tmp",
                "-e",
                "SET=here",
            ];
            options.extend(big.iter().flat_map(|big| ["-e", big]));
            machine.sh(runtime, &options, "echo up > /tmp/up; sleep 100").ok();
            let rootfs = machine.containers()[0]["rootfs"].as_str().unwrap().to_owned();
            let config = Path::new(&rootfs).with_file_name("config.json");
            assert!(fs::metadata(&config).unwrap().len() > 1 << 20);
            let exec =
                |script: &str| machine.run(&["exec", "cache", "--", "busybox", "sh", "-c", script]);
            until("it is up", || (exec("test -e /tmp/up").code == 0).then_some(()));
            assert_eq!(exec("pwd; echo $SET").ok(), "/tmp\nhere\n", "{runtime}");
            let status = |process: &str| {
                let what = "^(Uid|Gid|Groups|Cap.*|NoNewPrivs|Seccomp):";
                exec(&format!("grep -E '{what}' /proc/{process}/status")).ok().to_owned()
            };
            let own = status("1");
            assert!(own.contains("NoNewPrivs:\t1"), "{own}");
            assert_eq!(status("self"), own, "{runtime} {user}");
            // Of more than a mebibyte it was "damaged".
            assert_eq!(exec("echo ${#BIG1}").ok(), "100000\n", "{runtime}");
            // The environment was left in the run directory by one that was killed.
            let left = fs::read_dir(config.parent().unwrap()).unwrap().flatten();
            let left = left.filter(|it| it.file_name().to_string_lossy().starts_with("exec-"));
            assert_eq!(left.count(), 0, "{runtime}");
            machine.run(&["stop", "--time", "0", "cache"]).ok();
            machine.assert_clean();
        }
    }
}

/// The output of a detached container was discarded, and its exit status was known to nobody: a service that
/// ended at once, for a missing file for example, was just gone.
#[test]
fn a_detached_container_leaves_output_and_status() {
    const TEST: &str = "a_detached_container_leaves_output_and_status";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let ended = || {
        until("it ends", || {
            let listed = machine.containers().into_iter().next()?;
            (listed["state"] == "ended").then_some(listed)
        })
    };
    for runtime in runtimes {
        let script = "echo first; echo second >&2; read line || echo no input; exit 7";
        let ran = machine.sh(runtime, &["-d", "--rw", "--name", "short"], script);
        assert_eq!((ran.ok(), ran.stderr.as_str()), ("short\n", ""), "{runtime}");
        let listed = ended();
        assert_eq!(listed["exit_status"], 7, "{runtime}");
        let output = listed["output"].as_str().unwrap();
        assert_eq!(fs::read_to_string(output).unwrap(), "first\nsecond\nno input\n", "{runtime}");
        let words = machine.run(&["ps"]);
        assert_eq!(words.words()[1][2..4], ["ended", "(7)"]);
        // Neither gc nor another container takes them away; nothing of it is mounted any more.
        machine.run(&["gc"]).ok();
        machine.run(&["run", "box:1"]).ok();
        assert_eq!(ended()["exit_status"], 7);
        until("it is unmounted", || {
            machine.mounted().iter().all(|at| at.ends_with("store")).then_some(())
        });
        // A new one of the same name does.
        assert_eq!(machine.sh(runtime, &["--name", "short"], "echo again").ok(), "again\n");
        machine.assert_clean();
        machine.sh(runtime, &["-d", "--name", "killed"], "kill -9 $$; sleep 1; exit 1").ok();
        machine.run(&["run", "-d", "--name", "killed2", "box:1", "--", "sleep", "100"]).ok();
        machine.run(&["stop", "killed2"]).ok();
        machine.run(&["stop", "killed"]).ok();
        machine.assert_clean();
        // One that ends before its runtime does.
        for _ in 0..5 {
            machine.sh(runtime, &["-d", "--name", "short"], "exit 7").ok();
            assert_eq!(ended()["exit_status"], 7, "{runtime}");
        }
        machine.run(&["stop", "short"]).ok();
        machine.sh(runtime, &["-d", "--rm", "--name", "short"], "exit 7").ok();
        until("it is removed", || machine.containers().is_empty().then_some(()));
        machine.assert_clean();
    }
}

/// crun changes the owner of its standard input, output and error to the container's user. These were the host's own
/// files: `run --userns 0:100000:65536 IMG` left the host's /dev/null to user 100000, `run -i --user worker IMG
/// </etc/passwd` would have left that to the worker, and inside root could change their modes.
#[test]
fn a_container_gets_no_file_of_the_host() {
    let Some((machine, runtimes)) = machine("a_container_gets_no_file_of_the_host") else { return };
    // Its root has to get through here.
    fs::set_permissions(machine.path("."), fs::Permissions::from_mode(0o711)).unwrap();
    let path = machine.path("file");
    fs::write(&path, "given\n").unwrap();
    // A node as /dev/null, so that the host's stays out of this; where it may be made.
    let node = machine.path("null");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let device = rustix::fs::makedev(1, 3);
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, device).unwrap();
    let open = |path: &Path| fs::File::options().read(true).append(true).open(path);
    let state = |path: &Path| {
        let meta = fs::metadata(path).unwrap();
        (meta.uid(), meta.gid(), meta.mode())
    };
    let before = [state(&path), state(&node), state(Path::new("/dev/null"))];
    let script = "chmod 777 /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2; cat; ls -l /proc/self/fd >&2; :";
    for runtime in runtimes {
        for options in [
            &["--user", "worker"][..],
            &["--userns", "0:100000:65536"],
            &["--userns", "0:100000:65536", "-i"],
            &["--user", "worker", "-i"],
            &["-i"],
        ] {
            for at in [&path, &node] {
                let mut command = machine.command(&machine.sh_args(runtime, options, script));
                let Ok(file) = open(at) else {
                    // Its filesystem has no devices.
                    continue;
                };
                let give = || Stdio::from(file.try_clone().unwrap());
                let status = command.stdin(give()).stdout(give()).stderr(give()).status().unwrap();
                assert!(status.success(), "{runtime} {options:?}");
                let after = [state(&path), state(&node), state(Path::new("/dev/null"))];
                assert_eq!(after, before, "{runtime} {options:?} {}", at.display());
            }
            // What was written has come through, and only pipes were there.
            let written = fs::read_to_string(&path).unwrap();
            let listed: Vec<&str> = written.lines().filter(|line| line.contains(" -> ")).collect();
            assert!(listed.len() >= 3, "{written}");
            assert!(listed[..3].iter().all(|line| line.contains(" -> pipe:[")), "{written}");
            fs::write(&path, "given\n").unwrap();
        }
        machine.assert_clean();
    }
}

/// The container got the caller's own pipes and sockets: through /proc/self/fd it read what other programs had
/// written to them, and crun gave them to its user.
#[test]
fn a_container_gets_no_pipe_or_socket_of_the_host() {
    const TEST: &str = "a_container_gets_no_pipe_or_socket_of_the_host";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let inode = |fd: &std::os::fd::OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    for runtime in runtimes {
        let (stdin, mut given) = std::io::pipe().unwrap();
        let (mut said, stdout) = std::io::pipe().unwrap();
        let (_others, stderr) = std::os::unix::net::UnixStream::pair().unwrap();
        given.write_all(b"given\n").unwrap();
        drop(given);
        let own: [std::os::fd::OwnedFd; 3] = [stdin.into(), stdout.into(), stderr.into()];
        let give = |fd: &std::os::fd::OwnedFd| Stdio::from(fd.try_clone().unwrap());
        let args =
            machine.sh_args(runtime, &["-i", "--user", "worker"], "cat; ls -l /proc/self/fd");
        let mut command = machine.command(&args);
        command.stdin(give(&own[0])).stdout(give(&own[1])).stderr(give(&own[2]));
        assert!(command.status().unwrap().success(), "{runtime}");
        assert!(own.iter().all(|fd| rustix::fs::fstat(fd).unwrap().st_uid == 0), "{runtime}");
        let inodes = own.each_ref().map(|fd| format!("[{}]", inode(fd)));
        drop((command, own));
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("given\n") && text.matches(" -> pipe:[").count() >= 3, "{text}");
        assert!(inodes.iter().all(|inode| !text.contains(inode)), "{inodes:?} {text}");
        machine.assert_clean();
    }
}

/// `cofolio run … | head -1`: when nobody reads any more, the container's next write fails, which is no
/// error of `cofolio run`.
#[test]
fn output_that_nobody_reads_ends_a_container() {
    const TEST: &str = "output_that_nobody_reads_ends_a_container";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let script = "while echo line 2>/dev/null; do :; done; exit 0";
        let mut command = machine.command(&machine.sh_args(runtime, &[], script));
        let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        run.stdout.take().unwrap().read_exact(&mut [0; 5]).unwrap();
        let ran = Ran::of(run.wait_with_output().unwrap());
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{runtime}");
        machine.assert_clean();
    }
}

/// What a container said was lost where the disk was full, and the exit code was 0.
#[test]
fn output_that_cannot_be_written_is_an_error() {
    const TEST: &str = "output_that_cannot_be_written_is_an_error";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let mut command = machine.command(&machine.sh_args(runtime, &[], "echo said"));
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let ran = command.stdout(full).output().unwrap();
        assert_eq!(ran.status.code(), Some(125));
        let said = String::from_utf8(ran.stderr).unwrap();
        assert!(said.contains("output") && said.contains("No space left"), "{said}");
        machine.assert_clean();
    }
}

/// A descriptor that this process has inherited is not the container's.
#[test]
fn inherited_descriptors_end_here() {
    let Some((machine, runtimes)) = machine("inherited_descriptors_end_here") else { return };
    let secret = machine.path("secret");
    fs::write(&secret, "of the host\n").unwrap();
    for runtime in runtimes {
        for options in [&[][..], &["--detach", "--output", "OUT"]] {
            let output = machine.text("output");
            let options: Vec<&str> =
                options.iter().map(|word| if *word == "OUT" { &output } else { *word }).collect();
            let args = machine.sh_args(runtime, &options, "ls /proc/self/fd; echo end");
            let mut shell = Command::new("sh");
            shell.args(["-c", "exec 7<\"$0\"; exec \"$@\""]).arg(&secret);
            let inner = machine.command(&args);
            shell.arg(inner.get_program()).args(inner.get_args());
            for (name, value) in inner.get_envs() {
                value.map(|value| shell.env(name, value));
            }
            let ran = common::run_with_input(shell, b"");
            let said = match options.is_empty() {
                true => ran.ok().to_owned(),
                false => until("its output", || {
                    fs::read_to_string(&output).ok().filter(|said| said.contains("end"))
                }),
            };
            assert_eq!(said, "0\n1\n2\n3\nend\n", "{runtime}");
            let _ = fs::remove_file(&output);
            for container in machine.containers() {
                machine.run(&["stop", container["name"].as_str().unwrap()]).ok();
            }
        }
        machine.assert_clean();
    }
}

/// Nothing starts before the image is checked, and the error is the check's.
#[test]
fn nothing_runs_on_an_image_that_is_refused() {
    let Some((machine, runtimes)) = machine("nothing_runs_on_an_image_that_is_refused") else {
        return;
    };
    let no_program = b"no program\n".len() as u64;
    let cut =
        objects(&machine).into_iter().find(|path| path.metadata().unwrap().len() == no_program);
    let cut = cut.unwrap();
    // As a copy of a store is: sizes are compared where nothing is protected.
    let images = machine.path("store/domains/default/images");
    let _ = Command::new("chattr").args(["-R", "-i"]).arg(&cut).arg(images).output();
    fs::File::options().write(true).open(&cut).unwrap().set_len(3).unwrap();
    for runtime in runtimes {
        for options in [&[][..], &["--rw"], &["--detach", "--output", "/dev/null"]] {
            let ran = machine.sh(runtime, options, "echo it runs");
            assert_eq!((ran.code, ran.stdout.as_str()), (125, ""), "{runtime}: {}", ran.stderr);
            assert!(ran.stderr.contains("3 bytes instead of 11"), "{runtime}: {}", ran.stderr);
            for own in ["config.json", "EOF"] {
                assert!(!ran.stderr.contains(own), "{runtime}: {}", ran.stderr);
            }
            machine.assert_clean();
        }
    }
}

fn objects(machine: &Machine) -> Vec<PathBuf> {
    let entries = |dir: PathBuf| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries(machine.path("store/domains/default/objects")).flat_map(&entries).collect()
}

/// Once a container has ended, signals went to nobody: `cofolio run` waited for a reader that had stopped, and
/// only SIGKILL, after which nothing is cleaned up, ended it.
#[test]
fn a_reader_that_stops_reading_does_not_hold_run_for_ever() {
    let Some((machine, runtimes)) = machine("a_reader_that_stops_reading_does_not_hold") else {
        return;
    };
    for runtime in runtimes {
        // More than the pipe to the reader holds; the rest is in our own.
        let args = machine.sh_args(runtime, &[], "head -c 100000 /dev/zero; echo end >&2");
        let mut command = machine.command(&args);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut run = command.spawn().unwrap();
        let id = Pid::from_child(&run);
        // It runs: from now on signals are its own. `sh` takes none.
        run.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        until("its end", || {
            kill_process(id, Signal::TERM).unwrap();
            run.try_wait().unwrap()
        });
        assert!(machine.containers().is_empty(), "{runtime}");
    }
}

/// crun reads its config twice. Earlier the first read emptied a pipe and the second found nothing, so that
/// `crun exec` and `crun kill` refused the container for its empty config.
#[test]
fn crun_keeps_the_whole_config() {
    let Some((machine, runtimes)) = machine("crun_keeps_the_whole_config") else { return };
    if !runtimes.contains(&"crun") {
        return skip("crun_keeps_the_whole_config", "no crun");
    }
    // Longer than the default capacity of a pipe.
    let long = format!("LONG={}", "x".repeat(100_000));
    let options = ["--detach", "--name", "kept", "--env", &long];
    machine.sh("crun", &options, "sleep 100").ok();
    let kept = &machine.containers()[0];
    let path = |name: &str| PathBuf::from(kept[name].as_str().unwrap());
    let given = fs::read(path("rootfs").with_file_name("config.json")).unwrap();
    assert!(contains(&given, long.as_bytes()));
    assert_eq!(fs::read(path("runtime_root").join("kept/config.json")).unwrap(), given);
    machine.run(&["stop", "--time", "0", "kept"]).ok();
    machine.assert_clean();
}

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

/// An image with a volume failed on a read-only store with a bare "Read-only file system", even where
/// `--volume` gave it a directory.
#[test]
fn a_read_only_store_runs_what_needs_no_room() {
    let Some((machine, runtimes)) = machine("a_read_only_store_runs_what_needs_no_room") else {
        return;
    };
    let store = machine.text("store");
    let volume = format!("{}:/data", machine.dir("given").display());
    let sh = |options: &[&str]| {
        let command = machine.command(&machine.sh_args(runtimes[0], options, "echo 1 > /data/new"));
        let mut private = Command::new("unshare");
        private.args(["--mount", "--propagation", "private", "sh", "-c"]);
        private.arg("mount --bind $0 $0 && mount -o remount,bind,ro $0 && exec \"$@\"");
        private.arg(&store).arg(command.get_program()).args(command.get_args());
        private.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Ran::of(private.output().unwrap())
    };
    let refused = sh(&[]);
    assert!(refused.fails_with(125).stderr.contains("--volume DIR:PATH"), "{}", refused.stderr);
    sh(&["-v", &volume]).ok();
    assert!(machine.path("given/new").exists());
    machine.assert_clean();
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
            let find = format!("find {} -mindepth 1 -xdev {wipe} -delete", run.display());
            let _ = Command::new("sh").args(["-c", &find]).output().unwrap();

            for command in ["gc", "ps"] {
                let said = machine.run(&[command]).stderr;
                assert!(said.contains(&format!("`kill -KILL {pid}`")), "{command}: {said}");
                assert!(is_there(), "{runtime} {options:?} {wipe}");
            }
            machine.sh(runtime, &["--name", &name], "true").fails_with(125);
            kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
            until("gc removes the rest", || {
                let done = machine.run(&["gc"]);
                (done.stderr.is_empty() && cgroups().is_empty()).then_some(())
            });
            machine.assert_clean();
            assert!(machine.loops().is_empty());
        }
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

/// A real image, where the corpus has been built.
#[test]
fn a_real_redis_serves() {
    const TEST: &str = "a_real_redis_serves";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let Some(layout) = real_redis(TEST) else { return };
    machine.run(&["import", "--name", "redis", layout.to_str().unwrap()]).ok();
    for runtime in runtimes {
        let script = "redis-server --save '' --daemonize yes >/dev/null; for i in $(seq 100); do \
                      redis-cli ping >/dev/null 2>&1 && break; sleep 0.1; done; \
                      redis-cli set folio one && redis-cli get folio && id -un";
        let ran = machine.run(&[
            "run",
            "--runtime",
            runtime,
            "--memory",
            "256M",
            "redis",
            "--",
            "sh",
            "-c",
            script,
        ]);
        assert_eq!(ran.ok(), "OK\none\nredis\n", "{runtime}: {}", ran.stderr);
        machine.assert_clean();
    }
}
