//! KSM, the kernel's merging: `cofolio ksm-exec`, and the daemon that steers it.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::daemon::Daemon;
use common::machine::until;
use common::{Killed, MERGEABLE, Ran, Sandbox, can_mount, cofolio, has_ksm};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn ksm_exec_reaches_what_a_program_starts() {
    if !has_ksm("ksm_exec_reaches_what_a_program_starts") {
        return;
    }
    let count = format!("grep -c '{MERGEABLE}' /proc/self/smaps; :");
    let counted = |ran: &Ran| ran.ok().trim().parse::<u32>().unwrap();
    let plain = Ran::of(Command::new("sh").args(["-c", &count]).output().unwrap());
    assert_eq!(counted(&plain), 0);
    let sandbox = Sandbox::new();
    for options in [&["ksm-exec", "--"][..], &["ksm-exec"]] {
        assert!(counted(&sandbox.run(&[options, &["sh", "-c", &count]].concat())) > 0);
    }
}

#[test]
fn ksm_exec_ends_as_its_program_does() {
    if !has_ksm("ksm_exec_ends_as_its_program_does") {
        return;
    }
    let sandbox = Sandbox::new();
    let run = |args: &[&str]| sandbox.run(&[&["ksm-exec"], args].concat());
    assert_eq!(run(&["sh", "-c", "echo $*", "0", "--json", "-x", "--"]).ok(), "--json -x --\n");
    run(&["--", "sh", "-c", "exit 7"]).fails_with(7);
    let missing = run(&["nosuch"]);
    missing.fails_with(127).refused("nosuch: No such file");
    fs::write(sandbox.path("text"), "").unwrap();
    run(&[&sandbox.text("text")]).fails_with(126).refused("text: Permission denied");
    run(&[]).fails_with(2);
}

const KSM: &str = "/sys/kernel/mm/ksm";

/// Settings of the machine's KSM; as they were, when this is dropped.
struct Settings([(&'static str, String); 3]);

impl Settings {
    fn read() -> Self {
        // As they have to be written.
        Self(["pages_to_scan", "sleep_millisecs", "run"].map(|name| {
            (name, fs::read_to_string(Path::new(KSM).join(name)).unwrap().trim().to_owned())
        }))
    }

    fn are_in_force(&self) -> bool {
        Self::read().0 == self.0
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        for (name, value) in &self.0 {
            let _ = fs::write(Path::new(KSM).join(name), value);
        }
    }
}

/// It merges what two programs have in common while it is on, and everything is as before afterwards.
#[test]
fn the_daemon_steers_ksm_only_if_asked() {
    const TEST: &str = "the_daemon_steers_ksm_only_if_asked";
    if !can_mount(TEST) || !has_ksm(TEST) {
        return;
    }
    let is_off = || fs::read_to_string(Path::new(KSM).join("run")).unwrap().trim() == "0";
    until("nobody else uses KSM", || is_off().then_some(()));
    let before = Settings::read();
    let sandbox = Sandbox::new();
    let config = sandbox.path("config.toml");
    fs::write(&config, "").unwrap();
    let mut daemon = Daemon::start(&sandbox, &["--config", config.to_str().unwrap()]);
    let hear = |daemon: &mut Daemon, words: &str| while !daemon.next_line().contains(words) {};
    let metric = |daemon: &Daemon, name: &str| {
        let text = daemon.get("/metrics").1;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap().parse::<f64>().unwrap()
    };
    assert_eq!(metric(&daemon, "cofolio_ksm_steered"), 0.0);
    assert!(before.are_in_force());

    fs::write(&config, "[ksm]\nsteer = true\ncpu_percent = 50.0\n").unwrap();
    daemon.reload();
    hear(&mut daemon, "KSM is on");
    let hold = "x=$(head -c 16777216 /dev/zero | tr '\\0' x); echo ready; read y";
    let holders = [(); 2].map(|()| {
        let mut command = Command::new(cofolio());
        command.args(["ksm-exec", "--", "sh", "-c", hold]).stdin(Stdio::piped());
        Killed::ready(&mut command, "ready")
    });
    // It goes through all memory of the machine that may be merged: that of other virtual machines, too.
    let began = Instant::now();
    let merged = |holder: &Killed| {
        let path = format!("/proc/{}/ksm_merging_pages", holder.0.id());
        fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap() * 4096
    };
    while !holders.iter().all(|holder| merged(holder) >= 16 << 20) {
        assert!(began.elapsed() < Duration::from_secs(300), "their pages are merged");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(metric(&daemon, "cofolio_ksm_steered"), 1.0);
    assert!(metric(&daemon, "cofolio_ksm_cpu_seconds_total") > 0.0);
    assert_ne!(metric(&daemon, "cofolio_ksm_saved_bytes"), 0.0);
    fs::write(&config, "").unwrap();
    daemon.reload();
    until("the settings are those of before", || before.are_in_force().then_some(()));
    drop(holders);

    fs::write(&config, "[ksm]\nsteer = true\n").unwrap();
    daemon.reload();
    hear(&mut daemon, "KSM is on");
    let pages = Path::new(KSM).join("pages_to_scan");
    fs::write(&pages, "4321").unwrap();
    hear(&mut daemon, "KSM is left alone: somebody else has changed its settings");
    assert_eq!(fs::read_to_string(&pages).unwrap(), "4321\n");
    kill_process(Pid::from_child(&daemon.child.0), Signal::TERM).unwrap();
    assert!(daemon.child.0.wait().unwrap().success());
    assert_eq!(fs::read_to_string(&pages).unwrap(), "4321\n");

    let mut daemon = Daemon::start(&sandbox, &["--config", config.to_str().unwrap()]);
    hear(&mut daemon, "KSM is left alone: somebody else uses it");
    drop(daemon);
    fs::write(Path::new(KSM).join("run"), "0").unwrap();
    let found = Settings::read();
    let mut daemon = Daemon::start(&sandbox, &["--config", config.to_str().unwrap()]);
    hear(&mut daemon, "KSM is on");
    assert!(!found.are_in_force());
    kill_process(Pid::from_child(&daemon.child.0), Signal::TERM).unwrap();
    assert!(daemon.child.0.wait().unwrap().success());
    assert!(found.are_in_force());
}
