//! What is done with a container that runs: signals, `stop`, `exec`, `ps`.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::common::machine::{import_box_as, machine, until};
use crate::{send, started, wrapped};

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

/// runc knows no real-time signal by its name, so the program of an image that names one got
/// SIGTERM.
#[test]
fn a_real_time_stop_signal_reaches_the_program() {
    let test = "a_real_time_stop_signal_reaches_the_program";
    let Some((machine, runtimes)) = machine(test) else { return };
    let stop_signal = json!({"StopSignal": "SIGRTMIN+3"});
    assert!(import_box_as(&machine, test, "stop:1", stop_signal));
    for runtime in runtimes {
        let script = "trap 'exit 5' 37; trap 'exit 6' TERM; echo up; while :; do sleep 0.05; done";
        let mut args = machine.sh_args(runtime, &["--name", "it"], script);
        args.iter_mut().filter(|arg| **arg == "box:1").for_each(|arg| *arg = "stop:1");
        let mut child = started(&machine, &args);
        machine.run(&["stop", "it"]).ok();
        assert_eq!(child.wait().unwrap().code(), Some(5), "{runtime}");
        machine.assert_clean();
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

/// The runtime's program was removed, and no container of it could be stopped, nor collected once it had ended. A
/// runc that was killed while it had itself mounted in its state directory blocked the name of its container.
#[test]
fn a_container_is_stopped_without_its_runtime() {
    const TEST: &str = "a_container_is_stopped_without_its_runtime";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let program = wrapped(&machine, runtime, ":", ":");
        for name in ["stopped", "ends"] {
            machine.sh(&program, &["-d", "--rm", "--name", name], "sleep 100").ok();
        }
        let run = fs::read_dir(machine.path("run")).unwrap().next().unwrap().unwrap().path();
        let left = run.join(runtime).join("stopped/left");
        fs::write(&left, "").unwrap();
        let mut mount = Command::new("mount");
        assert!(mount.arg("--bind").args([Path::new(&program), &left]).status().unwrap().success());
        fs::remove_file(&program).unwrap();
        machine.run(&["stop", "--time", "0", "stopped"]).ok();
        let pid = machine.containers()[0]["pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
        until("it is removed", || machine.containers().is_empty().then_some(()));
        machine.run(&["gc"]).ok();
        machine.assert_clean();
    }
}

/// `stop` of a container that was just being started sent it nothing, waited for ten seconds and failed.
#[test]
fn a_container_that_is_being_started_is_stopped() {
    const TEST: &str = "a_container_that_is_being_started_is_stopped";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let wait = "case $* in *' run '*) : >starting; wait go ;; esac";
        let slow = wrapped(&machine, runtime, wait, ":");
        let args = machine.sh_args(&slow, &["--name", "new"], "sleep 100");
        let mut run = machine.command(&args).spawn().unwrap();
        until("it is started", || machine.path("starting").exists().then_some(()));
        let exec = machine.run(&["exec", "new", "--", "true"]);
        assert!(exec.fails_with(3).stderr.contains("is not running"), "{}", exec.stderr);
        let mut stop = machine.command(&["stop", "--time", "0", "new"]).spawn().unwrap();
        let sleeps = format!("/proc/{}/wchan", stop.id());
        until("it has looked and found no process", || {
            fs::read_to_string(&sleeps).unwrap().contains("nanosleep").then_some(())
        });
        fs::write(machine.path("go"), "").unwrap();
        assert!(stop.wait().unwrap().success());
        run.wait().unwrap();
        machine.assert_clean();
        for file in ["starting", "go"] {
            fs::remove_file(machine.path(file)).unwrap();
        }
    }
}

/// The first process was killed before its runtime started it, which then waited for it without end: `run -d` did not return, and
/// the name stayed taken.
#[test]
fn a_container_killed_before_it_starts_holds_up_nothing() {
    const TEST: &str = "a_container_killed_before_it_starts_holds_up_nothing";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let kill = "case $* in *' start '*) kill -9 $(cat run/*/containers/new/pid); exec sleep 100 ;; esac";
        let slow = wrapped(&machine, runtime, kill, ":");
        machine.sh(&slow, &["-d", "--name", "new"], "sleep 100").fails_with(125);
        machine.assert_clean();
    }
}

/// A container that ends at once, and a runtime that takes seconds to say that it has started it: the runtime was killed, and the run
/// counted as failed although it had been made.
#[test]
fn a_slow_start_of_a_short_container_is_no_hang() {
    const TEST: &str = "a_slow_start_of_a_short_container_is_no_hang";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let slow = wrapped(&machine, runtime, ":", "case $* in *' start '*) sleep 2 ;; esac");
        machine.sh(&slow, &["-d", "--name", "short"], "exit 3").ok();
        let ended = || machine.containers()[0]["exit_status"].as_u64();
        until("it has ended", || ended().map(|status| assert_eq!(status, 3)));
        machine.run(&["stop", "short"]).ok();
        machine.assert_clean();
    }
}

/// While `stop` waited for a container's end, another one took the name. `stop` killed that one too, and every later one.
#[test]
fn stop_spares_the_next_container_of_the_name() {
    const TEST: &str = "stop_spares_the_next_container_of_the_name";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let wait = "case $* in *' KILL') : >killed; wait go ;; esac";
        let slow = wrapped(&machine, runtime, ":", wait);
        machine.sh(&slow, &["-d", "--rm", "--name", "cache"], "sleep 100").ok();
        let mut stop = machine.command(&["stop", "--time", "0", "cache"]).spawn().unwrap();
        until("it is killed", || machine.path("killed").exists().then_some(()));
        until("it is gone", || machine.containers().is_empty().then_some(()));
        machine.sh(runtime, &["-d", "--name", "cache"], "sleep 100").ok();
        fs::write(machine.path("go"), "").unwrap();
        assert!(stop.wait().unwrap().success());
        assert_eq!(machine.containers()[0]["state"], "running");
        machine.run(&["stop", "--time", "0", "cache"]).ok();
        machine.assert_clean();
        for file in ["killed", "go"] {
            fs::remove_file(machine.path(file)).unwrap();
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

/// Of several mounts that could not be unmounted one was named, by its id.
#[test]
fn umount_names_every_container_that_runs() {
    let test = "umount_names_every_container_that_runs";
    let Some((machine, runtimes)) = machine(test) else { return };
    for name in ["one", "two"] {
        machine.sh(runtimes[0], &["-d", "--name", name], "sleep 100").ok();
    }
    let refused = machine.run(&["umount", "--all"]);
    for container in machine.containers() {
        let (name, rootfs) = (&container["name"], container["rootfs"].as_str().unwrap());
        let name = name.as_str().unwrap();
        refused.fails_with(7).refused(&format!("container `{name}` runs in {rootfs}\n"));
        machine.run(&["stop", "--time", "0", name]).ok();
    }
    machine.assert_clean();
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
        // `run` takes arguments without `--`, and `exec` refused them.
        let exec = ["exec", "cache", "busybox", "sh", "-c", "exit 7"];
        machine.run(&exec).fails_with(7);
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
            // Nothing of the runtime's is open in it: the last one is that of `ls`.
            assert_eq!(exec("ls /proc/self/fd").ok(), "0\n1\n2\n3\n", "{runtime}");
            // Of more than a mebibyte it was "damaged".
            assert_eq!(exec("echo ${#BIG1}").ok(), "100000\n", "{runtime}");
            // Its process was in a file of the run directory, where a killed one left its environment.
            let script = "echo > /tmp/in; sleep 100";
            let args = ["exec", "cache", "--", "busybox", "sh", "-c", script];
            let mut running = machine.command(&args).spawn().unwrap();
            until("it runs", || (exec("test -e /tmp/in").code == 0).then_some(()));
            let files = fs::read_dir(config.parent().unwrap()).unwrap().flatten();
            let names = files.filter_map(|it| it.file_name().into_string().ok());
            let exec_files: Vec<_> = names.filter(|name| name.starts_with("exec-")).collect();
            assert!(exec_files.iter().all(|name| name.ends_with(".log")), "{exec_files:?}");
            running.kill().unwrap();
            running.wait().unwrap();
            let text = fs::read(&config).unwrap();
            fs::write(&config, "[]").unwrap();
            machine.run(&["exec", "cache", "--", "true"]).refused("config.json");
            fs::write(&config, text).unwrap();
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
