//! `cofolio vm`: real guests with a distribution's kernel, whose processor is emulated.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "vm/attach.rs"]
mod attach;
mod common;
#[path = "vm/console.rs"]
mod console;
#[path = "vm/disk.rs"]
mod disk;
#[path = "vm/exec.rs"]
mod exec;
#[path = "vm/image.rs"]
mod image;
#[path = "vm/kernels.rs"]
mod kernels;
#[path = "vm/merge.rs"]
mod merge;
#[path = "vm/others.rs"]
mod others;
#[path = "vm/soak.rs"]
mod soak;

use std::fs;
use std::ops::Deref;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use cofolio_node::vm::qmp::Qmp;
use common::machine::{import_box, import_box_as, until_within};
use common::{Killed, Ran, Sandbox, cofolio, program, skip};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// A sandbox whose virtual machines end with it, however the test ends.
struct Host {
    sandbox: Sandbox,
    kernel: String,
}

impl Deref for Host {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.sandbox
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for guest in self.guests() {
            let name = guest["name"].as_str().unwrap_or_default();
            let _ = match guest["origin"].as_str() {
                Some("attached") => self.run(&["vm", "detach", name]),
                _ => self.run(&["vm", "stop", "--time", "0", name]),
            };
        }
    }
}

impl Host {
    fn guests(&self) -> Vec<Value> {
        let listed = self.run(&["vm", "ps", "--json"]);
        let listed: Value = serde_json::from_str(&listed.stdout).unwrap_or_default();
        listed.as_array().cloned().unwrap_or_default()
    }

    /// `cofolio vm run [options] box:1 -- sh -c script`
    fn args<'a>(&'a self, options: &[&'a str], script: &'a str) -> Vec<&'a str> {
        let mut args = vec!["vm", "run", "--accel", "tcg", "--kernel", &self.kernel];
        if !options.contains(&"--memory") {
            args.extend(["--memory", "192M"]);
        }
        args.extend(options);
        args.extend(["box:1", "--", "sh", "-c", script]);
        args
    }

    fn sh(&self, options: &[&str], script: &str) -> Ran {
        self.run(&self.args(options, script))
    }

    /// Nothing of a virtual machine is left, but what the next one of the same kernel can use: an
    /// initramfs and an ELF file.
    #[track_caller]
    fn assert_clean(&self) {
        let list = |dir: PathBuf| -> Vec<PathBuf> {
            fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        };
        assert_eq!(list(self.path("store/domains/default/roots/vm")), Vec::<PathBuf>::new());
        for run in list(self.path("run")) {
            let mut left = list(run.join("vms"));
            for kind in ["initramfs", "vmlinux"] {
                let at = left.iter().position(|path| path.extension() == Some(kind.as_ref()));
                at.map(|at| left.remove(at));
            }
            assert_eq!(left, Vec::<PathBuf>::new());
        }
    }
}

/// Anonymous memory of a process, in bytes.
fn rss_anon(pid: &Value) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Waits for something that a guest does: its processor is emulated, and the machine may be busy.
#[track_caller]
fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    until_within(Duration::from_secs(180), what, look)
}

/// Where guests can be started; says why not.
fn host(test: &str) -> Option<Host> {
    if !rustix::process::geteuid().is_root() {
        skip(test, "needs root");
        return None;
    }
    if program("qemu-system-x86_64").is_none() || std::env::consts::ARCH != "x86_64" {
        skip(test, "no QEMU with virtio-pmem here");
        return None;
    }
    if !cofolio().parent()?.join("../lib/cofolio/cofolio-guest").exists() {
        skip(test, "tools/guest was not run");
        return None;
    }
    let kernel = kernel(test, "cloud-amd64")?;
    let sandbox = Sandbox::new();
    let kernel = kernel.to_str()?.to_owned();
    import_box(&sandbox, test).then_some(Host { sandbox, kernel })
}

/// A kernel of a flavour of `tests/vm/kernel`; says if it is not there.
fn kernel(test: &str, flavour: &str) -> Option<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/vm");
    let kernel = top.join(flavour).join("vmlinuz");
    if !kernel.exists() {
        skip(test, &format!("tests/vm/kernel {flavour} was not run"));
        return None;
    }
    Some(kernel)
}

#[test]
fn an_image_boots_and_its_program_decides() {
    let Some(host) = host("an_image_boots_and_its_program_decides") else { return };
    let script = "echo out; echo err >&2; id -u; pwd; echo $COLOR $HOME; hostname
        echo changed >/etc/passwd; cat /etc/passwd; cat /sys/class/net/lo/flags
        ls -d /dev/pts /proc/self /sys/class /run /tmp; stat -c %U:%G /data; exit 7";
    let options = ["--user", "worker", "--workdir", "/srv", "--env", "COLOR=red"];
    let ran = host.sh(&options, script);
    ran.fails_with(7);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    // The root filesystem belongs to root, so worker changes nothing.
    assert_eq!(&lines[..5], ["out", "err", "1001", "/srv", "red /srv"], "{}", ran.stdout);
    host.assert_clean();

    let ran = host.sh(&["--name", "one"], script);
    ran.fails_with(7);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    let expected = ["out", "err", "0", "/", "blue /", "one", "changed", "0x9"];
    assert_eq!(&lines[..8], expected, "{}", ran.stdout);
    host.assert_clean();
    // What a guest changes is in its memory.
    assert!(host.run(&["cat", "box:1", "/etc/passwd"]).ok().contains("worker"));
    assert_eq!(host.run(&["fsck"]).code, 0);

    // What is not in the image cannot be run, and what is no program neither.
    let run = |args: &[&str]| {
        let all = ["vm", "run", "--accel", "tcg", "--kernel", &host.kernel, "--entrypoint"];
        host.run(&[&all, args].concat())
    };
    run(&["/bin/nothing", "box:1"]).fails_with(127);
    run(&["/bin/text", "box:1"]).fails_with(126);
    host.assert_clean();
}

#[test]
fn a_detached_machine_is_listed_and_stopped() {
    let Some(host) = host("a_detached_machine_is_listed_and_stopped") else { return };
    // busybox' shell reads the signal while it waits.
    let script = "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 1 & wait $!; done";
    host.sh(&["--detach", "--name", "one"], script).ok();
    host.sh(&["--detach", "--name", "one"], script).fails_with(125).refused("exists already");
    let output = || fs::read_to_string(host.guests()[0]["output"].as_str().unwrap());
    until("the guest is ready", || output().ok().filter(|said| said.contains("ready")));
    let guest = &host.guests()[0];
    assert_eq!((&guest["name"], &guest["state"]), (&"one".into(), &"running".into()));
    let pid = guest["pid"].as_u64().unwrap();
    let vmm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    assert!(vmm.starts_with("qemu-system"), "{vmm}");

    // Nothing of its image goes while it runs, though nobody else needs it.
    host.run(&["rm", "box:1"]).ok();
    let gone = host.run(&["gc", "--json"]).json();
    assert_eq!((&gone["images"], &gone["packs"]), (&0.into(), &0.into()), "{gone}");

    host.run(&["vm", "stop", "one"]).ok();
    host.assert_clean();
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    let gone = host.run(&["gc", "--json"]).json();
    assert_eq!((&gone["images"], &gone["packs"]), (&1.into(), &1.into()), "{gone}");
    host.run(&["vm", "stop", "one"]).fails_with(3);
}

#[test]
fn an_ended_machine_keeps_its_status_until_its_name_is_taken() {
    let test = "an_ended_machine_keeps_its_status_until_its_name_is_taken";
    let Some(host) = host(test) else { return };
    host.sh(&["--detach", "--name", "one"], "echo was here; exit 9").ok();
    let ended = until("it has ended", || {
        let guest = host.guests().remove(0);
        (guest["state"] == "ended").then_some(guest)
    });
    assert_eq!(ended["exit_status"], 9);
    let output = fs::read_to_string(ended["output"].as_str().unwrap()).unwrap();
    assert_eq!(output, "was here\n");
    host.run(&["gc"]).ok();
    assert_eq!(host.guests().len(), 1);
    host.sh(&["--name", "one"], "exit 0").ok();
    host.assert_clean();
}

/// Whoever waits can be killed, and the VMM can: what is left of the machine is found.
#[test]
fn killed_processes_leave_a_machine_that_can_be_removed() {
    let test = "killed_processes_leave_a_machine_that_can_be_removed";
    let Some(host) = host(test) else { return };
    let args = host.args(&["--name", "one"], "echo ready; sleep 1000");
    let mut command = host.command(&args);
    let mut waits = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut said = [0; 5];
    std::io::Read::read_exact(waits.stdout.as_mut().unwrap(), &mut said).unwrap();
    assert_eq!(&said, b"ready");
    waits.kill().unwrap();
    waits.wait().unwrap();
    let guest = &host.guests()[0];
    assert_eq!(guest["state"], "unattended");
    host.run(&["vm", "console", "one"])
        .fails_with(7)
        .refused("the `cofolio vm run` that started it");
    assert_eq!(host.run(&["vm", "exec", "one", "busybox", "echo", "here"]).ok(), "here\n");
    let vmm = guest["pid"].as_u64().unwrap();
    // It lives, so it is left alone.
    host.run(&["gc"]).ok();
    assert_eq!(host.guests().len(), 1);
    host.run(&["vm", "stop", "one"]).ok();
    // Where nobody reaps it, a process that has ended is there still, without a command line.
    let command = fs::read(format!("/proc/{vmm}/cmdline")).unwrap_or_default();
    assert_eq!(command, b"");
    host.assert_clean();

    host.sh(&["--detach", "--name", "two"], "sleep 1000").ok();
    let pid = i32::try_from(host.guests()[0]["pid"].as_u64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let ended = until("it has ended", || {
        let guest = host.guests().remove(0);
        (guest["state"] == "ended").then_some(guest)
    });
    assert_eq!(ended["exit_status"], 125);
    host.run(&["vm", "stop", "two"]).ok();
    host.assert_clean();
}

/// Images of systemd ask for a real-time signal. It became SIGTERM on the host, and the guest would
/// have dropped it.
#[test]
fn the_stop_signal_of_an_image_reaches_its_program() {
    let test = "the_stop_signal_of_an_image_reaches_its_program";
    let Some(host) = host(test) else { return };
    assert!(import_box_as(&host, test, "stop:1", json!({"StopSignal": "SIGRTMIN+3"})));
    let script = "trap 'exit 5' 37; trap 'exit 6' TERM; echo ready
        while :; do sleep 1 & wait $!; done";
    let mut args = host.args(&["--name", "one"], script);
    args.iter_mut().filter(|arg| **arg == "box:1").for_each(|arg| *arg = "stop:1");
    let mut running = Killed::ready(host.command(&args).stderr(Stdio::null()), "ready");
    host.run(&["vm", "stop", "--time", "100", "one"]).ok();
    assert_eq!(running.0.wait().unwrap().code(), Some(5));
    host.assert_clean();
}

/// The guest's first process wrote the program's status to a port that nobody had any more, and the
/// kernel had it wait for ever: the VMM, its memory, its lock and its root in the store stayed.
#[test]
fn an_unattended_machine_ends_with_its_program() {
    let test = "an_unattended_machine_ends_with_its_program";
    let Some(host) = host(test) else { return };
    let script = "echo ready; while ! [ -e /tmp/end ]; do sleep 1; done";
    let mut command = host.command(&host.args(&["--name", "one"], script));
    drop(Killed::ready(command.stderr(Stdio::null()), "ready"));
    let guest = &host.guests()[0];
    assert_eq!(guest["state"], "unattended");
    let vmm = format!("/proc/{}/cmdline", guest["pid"]);
    host.run(&["vm", "exec", "one", "busybox", "touch", "/tmp/end"]).ok();
    until("the VMM has ended", || (host.guests()[0]["state"] == "ended").then_some(()));
    assert_eq!(fs::read(vmm).unwrap_or_default(), b"");
    // Whatever comes next finds what is left.
    host.run(&["gc"]).ok();
    host.assert_clean();
}

/// A pulse that a killed daemon has left would keep the guest's memory for good.
#[test]
fn the_daemon_returns_freed_memory_and_lets_balloons_go() {
    let test = "the_daemon_returns_freed_memory_and_lets_balloons_go";
    let Some(host) = host(test) else { return };
    let script = "mkdir /tmp/f; mount -t tmpfs -o size=180m f /tmp/f
        dd if=/dev/zero of=/tmp/f/x bs=1M count=170 2>/dev/null; echo filled
        read wait </tmp/fifo; rm /tmp/f/x; echo freed; sleep 1000";
    let script = format!("mkfifo /tmp/fifo; (sleep 8; echo >/tmp/fifo) & {script}");
    host.sh(&["--detach", "--name", "one", "--memory", "320M"], &script).ok();
    let guest = host.guests().remove(0);
    let output = || fs::read_to_string(guest["output"].as_str().unwrap()).unwrap();
    let held = || rss_anon(&guest["pid"]) >> 20;
    until("the guest has filled its memory", || output().contains("filled").then_some(()));
    let filled = held();
    // What another program took: nobody else knows of it.
    let socket = Path::new(guest["qmp"].as_str().unwrap());
    let dir = fs::File::open(socket.parent().unwrap()).unwrap();
    let short = format!("/proc/self/fd/{}/qmp", dir.as_raw_fd());
    let mut qmp = Qmp::new(UnixStream::connect(short).unwrap()).unwrap();
    qmp.call("balloon", json!({"value": 300 << 20})).unwrap();
    let mut actual = || qmp.call("query-balloon", json!({})).unwrap()["actual"].as_u64().unwrap();
    until("the balloon is inflated", || (actual() <= 301 << 20).then_some(()));

    let socket = host.text("daemon.sock");
    let mut serve = host.command(&["serve", "--socket", &socket]);
    let _daemon = Killed::start(serve.stdout(Stdio::null()).stderr(Stdio::null()));
    until("the balloon is let go", || (actual() == 320 << 20).then_some(()));
    until("the guest has freed its memory", || output().contains("freed").then_some(()));
    until("it is returned", || (held() + 90 < filled).then_some(()));
    until("the balloon is let go again", || (actual() == 320 << 20).then_some(()));
    host.run(&["vm", "stop", "--time", "0", "one"]).ok();
    host.assert_clean();
}

/// Each of these is found before anything is started.
#[test]
fn what_cannot_be_started_is_named() {
    let Some(host) = host("what_cannot_be_started_is_named") else { return };
    let run = |args: &[&str]| host.run(&[&["vm", "run"], args].concat());
    run(&["--kernel", "/nowhere", "box:1"]).fails_with(125).refused("/nowhere");
    let text = host.path("text");
    fs::write(&text, "no kernel").unwrap();
    run(&["--kernel", text.to_str().unwrap(), "box:1"]).fails_with(125).refused("version");
    run(&["--kernel", &host.kernel, "nothing:1"]).fails_with(125).refused("nothing:1");
    run(&["--kernel", &host.kernel, "--memory", "1M", "box:1"]).fails_with(2);
    let entrypoint = ["--kernel", &host.kernel, "--entrypoint", "", "box:1"];
    run(&entrypoint).fails_with(2);
    let name = ["--kernel", &host.kernel, "--name", "../x", "box:1"];
    run(&name).fails_with(2);
    host.assert_clean();
}
