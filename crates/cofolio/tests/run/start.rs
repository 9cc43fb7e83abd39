//! What is started, from where, and what is said where it is not.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::machine::{Machine, contains, machine, until};
use crate::common::registry::Registry;
use crate::common::{Ran, Sandbox, program, real_redis, run_with_input, skip};

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
            // That was 125.
            ["--writable", "relative"],
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

#[test]
fn volumes_are_paths_of_the_host() {
    const TEST: &str = "volumes_are_paths_of_the_host";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let run = |volume: &str, script| machine.sh(runtimes[0], &["--volume", volume], script);
    run("/usr/../etc:/mnt/:ro", "test -e /mnt/passwd && ! touch /mnt/new").ok();
    run("/dev/null:/bin/text", "test -c /bin/text").ok();
    // With crun this failed for every file: "Not a directory".
    for runtime in &runtimes {
        let volume = ["--volume", "/etc/passwd:/bin/text:ro"];
        machine.sh(runtime, &volume, "test -s /bin/text && ! echo >>/bin/text").ok();
    }
    for volume in ["/etc", "/etc:srv", "/does/not/exist:/x", "named:/x", "/etc:/x:ro:rw"] {
        run(volume, "true").refused("--volume");
    }
    // `-v X:/` blamed the image config, and a directory of the host at `/proc` was accepted.
    for target in ["/", "//", "/proc", "/sys/", "//dev/./"] {
        run(&format!("/etc:{target}"), "true").refused("a mount of its own").fails_with(2);
    }
    // It passed the check, and the error that came later blamed the image config.
    run("/etc:/x/../proc", "true").refused("/etc:/x/../proc: the target has `..` in it");
    // What other engines take as an option was taken for a part of the target: `/data:Z`.
    for volume in ["/etc:/x:Z", "/etc:/x:z", "/etc:/x:ro,Z", "/etc:/x:"] {
        run(volume, "true").refused(&format!("{volume}: the options are `ro` and `rw`"));
    }
    machine.assert_clean();
}

/// A directory of the host was mounted over one that was named before it and belongs below it: what the container wrote
/// there went to the wrong one. On a read-only root the one below was refused, in whichever order.
#[test]
fn volumes_lie_in_each_other() {
    let Some((machine, runtimes)) = machine("volumes_lie_in_each_other") else { return };
    let (above, below) = (machine.dir("above"), machine.dir("below"));
    let volumes = [format!("{}:/mnt/logs", below.display()), format!("{}:/mnt", above.display())];
    for runtime in runtimes {
        for mode in [&[][..], &["--rw"]] {
            for [one, other] in [[0, 1], [1, 0]] {
                let options = [&["-v", &*volumes[one], "-v", &volumes[other]], mode].concat();
                machine.sh(runtime, &options, "echo row >/mnt/logs/table").ok();
                fs::remove_file(below.join("table")).unwrap();
            }
        }
    }
    machine.assert_clean();
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

/// Without root the first refused system call was reported, with its path, and not what to do.
#[test]
fn run_without_root_says_so() {
    use std::os::unix::process::CommandExt as _;
    let sandbox = Sandbox::new();
    for args in [&["run", "box:1"][..], &["bundle", "box:1", "/tmp/x"], &["stop", "box"]] {
        let mut command = sandbox.command(args);
        command.uid(65534).gid(65534);
        let ran = run_with_input(command, b"");
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
    let script = format!(
        r#"
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
    let runtime = machine.script("crun", &script);
    let ran = machine.run(&["run", "--runtime", &runtime, "box:1"]);
    ran.fails_with(125);
    assert!(ran.stderr.contains("Invalid argument"), "{}", ran.stderr);
    let made = fs::read_to_string(made).unwrap();
    assert!(!made.is_empty());
    for cgroup in made.lines() {
        assert!(!Path::new(cgroup).exists(), "{cgroup}");
    }
}

/// The kernel can kill a runtime for want of memory. One that had made the container's process, and had
/// not written its state yet, left it: `run` removed the record, and only SIGKILL by hand ended it.
#[test]
fn a_killed_runtime_leaves_no_process() {
    let Some((machine, _)) = machine("a_killed_runtime_leaves_no_process") else { return };
    let made = machine.path("made");
    let runtime = machine.script(
        "crun",
        &format!(
            r#"
while [ $# -gt 1 ]; do [ "$1" != --bundle ] || bundle=$2; shift; done
cgroup=$(sed 's/.*"cgroupsPath":"\([^"]*\)".*/\1/' "$bundle/config.json")
for top in /sys/fs/cgroup /sys/fs/cgroup/pids; do
    [ -e "$top/cgroup.procs" ] && mkdir -p "$top$cgroup" && break
done
sleep 1000 <&- >&- 2>&- &
echo $! >{}
echo $! >"$top$cgroup/cgroup.procs"
kill -KILL $$
"#,
            made.display()
        ),
    );
    machine.run(&["run", "--detach", "--runtime", &runtime, "box:1"]).fails_with(125);
    let pid = fs::read_to_string(made).unwrap();
    let state = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z "), "{state}");
    machine.assert_clean();
}

/// Ctrl-C killed `run --detach` between the runtime's `create` and its `start`. The container never
/// started, and ran for good.
#[test]
fn a_signal_while_a_detached_container_starts_leaves_nothing() {
    let test = "a_signal_while_a_detached_container_starts_leaves_nothing";
    let Some((machine, runtimes)) = machine(test) else { return };
    for (number, runtime) in runtimes.into_iter().enumerate() {
        let [created, go] = ["created", "go"].map(|name| machine.path(&format!("{name}{number}")));
        let wrapper = machine.script(
            runtime,
            &format!(
                r#"
{runtime} "$@"
status=$?
case "$*" in *" create "*) touch {}; for _ in $(seq 3000); do [ -e {} ] || sleep 0.01; done ;; esac
exit $status
"#,
                created.display(),
                go.display()
            ),
        );
        let mut command = machine.command(&["run", "-d", "--runtime", &wrapper, "box:1"]);
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        until("it is created", || created.exists().then_some(()));
        // The process that the user waits for, and the one that stays.
        let is_ours = |pid: &u32| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.contains("\0run\0") && line.contains(&wrapper)
        };
        let names = fs::read_dir("/proc").unwrap().flatten();
        let pids = names.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok());
        let ours: Vec<u32> = pids.filter(is_ours).collect();
        assert_eq!(ours.len(), 2, "{ours:?}");
        for pid in ours {
            let pid = Pid::from_raw(pid.cast_signed()).unwrap();
            kill_process(pid, Signal::INT).unwrap();
        }
        fs::write(go, "").unwrap();
        child.wait().unwrap();
        until("nothing is left", || machine.containers().is_empty().then_some(()));
        machine.assert_clean();
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

/// An image with a volume failed on a read-only store with a bare "Read-only file system", even where
/// `--volume` gave it a directory. `profile record` recommended that option, which it lacks.
#[test]
fn a_read_only_store_runs_what_needs_no_room() {
    let Some((machine, runtimes)) = machine("a_read_only_store_runs_what_needs_no_room") else {
        return;
    };
    let store = machine.text("store");
    let volume = format!("{}:/data", machine.dir("given").display());
    let run = |args: &[&str]| {
        let command = machine.command(args);
        let mut private = Command::new("unshare");
        private.args(["--mount", "--propagation", "private", "sh", "-c"]);
        private.arg("mount --bind $0 $0 && mount -o remount,bind,ro $0 && exec \"$@\"");
        private.arg(&store).arg(command.get_program()).args(command.get_args());
        private.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Ran::of(private.output().unwrap())
    };
    let sh = |options| run(&machine.sh_args(runtimes[0], options, "echo 1 > /data/new"));
    let recorded = run(&["profile", "record", "box:1"]);
    recorded.fails_with(1).refused("profiles are kept in the store");
    assert!(!recorded.stderr.contains("--volume"), "{}", recorded.stderr);
    let refused = sh(&[]);
    assert!(refused.fails_with(125).stderr.contains("--volume DIR:PATH"), "{}", refused.stderr);
    sh(&["-v", &volume]).ok();
    assert!(machine.path("given/new").exists());
    machine.assert_clean();
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
