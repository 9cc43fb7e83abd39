//! `cofolio reclaim`, with a daemon and without. What it drops is tested in `crates/node`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on stops")]

#[path = "../../node/tests/common/cache.rs"]
mod cache;
mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cofolio_node::cgroup::{Cgroup, Hierarchy, Version};
use cofolio_store::verity;
use common::daemon::Daemon;
use common::machine::{machine, until};
use common::{Killed, Sandbox, can_mount, cgroup, cofolio, run_with_input};

/// Against hanging only.
const WATCHDOG: Duration = Duration::from_secs(60);

/// The ledger's usual share of a processor would take minutes in an emulated guest.
const AT_ONCE: &str = "[daemon]\ncpu_percent = 100.0\n";

/// The path of a cgroup below the root of the hierarchy.
fn path_of(group: &Cgroup) -> String {
    let procs = group.procs();
    format!("/{}", procs.parent().unwrap().file_name().unwrap().to_str().unwrap())
}

/// A mounted image, and the object of its file of 25 pages: who reads that is no user.
fn mounted(sandbox: &Sandbox) -> (String, PathBuf) {
    let image = sandbox.import_tree("tree");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "tree", &target]).ok();
    let big = sandbox.object(&image, "/big");
    (target, big)
}

/// The same in a sandbox of its own, with a cgroup; says why not.
fn mounted_beside_a_cgroup(test: &str) -> Option<(Cgroup, Sandbox, String, PathBuf)> {
    let group = can_mount(test).then(|| cgroup(test))??;
    let sandbox = Sandbox::new();
    let (target, big) = mounted(&sandbox);
    Some((group, sandbox, target, big))
}

/// A daemon that has taken up the mounts. The file was brought into memory after that: pages that were there
/// before may have users that nobody has seen.
fn started(sandbox: &Sandbox, args: &[&str], big: &Path) -> Daemon {
    cache::forget(big);
    let daemon = Daemon::start(sandbox, args);
    daemon.sample();
    bring_in(big);
    daemon
}

/// Brings a file into memory, and waits until a use of it counts: from the next tick of the ledger's
/// clock after it was last seen without pages. A round of the daemon's own may see that at any time
/// before the read, so the wait comes after it: before it, one of twenty runs failed.
fn bring_in(big: &Path) {
    std::fs::read(big).unwrap();
    std::thread::sleep(Duration::from_millis(100));
}

/// A process of a cgroup that has a file open and has read it, without mapping it.
fn opener(file: &str, group: &Cgroup) -> Killed {
    let run = "echo 0 > \"$0\" && exec 3<\"$1\" && cat <&3 >/dev/null && echo opened; read x";
    let mut open = Command::new("sh");
    open.args(["-c", run]).arg(group.procs()).arg(file).stdin(Stdio::piped());
    Killed::ready(&mut open, "opened")
}

/// A container has a file open that it does not map: without a daemon nobody knows.
#[test]
fn by_command_and_by_daemon() {
    let test = "by_command_and_by_daemon";
    let Some((group, sandbox, target, big)) = mounted_beside_a_cgroup(test) else { return };
    let read = || assert_eq!(std::fs::read(&big).unwrap(), vec![b'x'; 100_000]);
    let container = path_of(&group);

    for args in [&["reclaim"][..], &["reclaim", "--image", "tree", "--container", "x"]] {
        sandbox.run(args).fails_with(2);
    }
    let unknown = sandbox.run(&["reclaim", "--container", "nobody"]);
    unknown.fails_with(3).refused("no container nobody").refused("`cofolio ps` lists containers");
    sandbox.run(&["reclaim", "--image", "nothing"]).fails_with(3);
    read();
    let ran = sandbox.run(&["reclaim", "--image", "tree", "--dry-run"]);
    assert!(ran.ok().contains("would be dropped") && ran.stderr.contains("no daemon"));
    assert!(cache::resident(&big) > 0);
    let ran = sandbox.run(&["reclaim", "--image", "tree", "--json"]);
    assert!(ran.json()["freed_bytes"].as_u64() >= Some(102_400), "{}", ran.stdout);
    assert_eq!(cache::resident(&big), 0);

    // After a start of the daemon it dropped what others had open since before that.
    read();
    let daemon = Daemon::start(&sandbox, &[]);
    daemon.sample();
    let _before = opener(&format!("{target}/big"), &group);
    let ran = sandbox.run(&["reclaim", "--container", &container, "--json"]).json();
    assert_eq!((&ran["freed_bytes"], &ran["unsure_objects"]), (&0.into(), &1.into()), "{ran}");
    drop(daemon);

    let _daemon = started(&sandbox, &[], &big);
    sandbox.run(&["reclaim", "--container", "nobody"]).fails_with(3).refused("nobody");
    let _opener = opener(&format!("{target}/big"), &group);
    let ran = sandbox.run(&["reclaim", "--container", &container, "--bytes", "1 GiB"]);
    assert!(ran.ok().starts_with("100.0 KiB of 1 object freed"), "{}", ran.stdout);
    assert!(!ran.stderr.contains("no daemon"), "{}", ran.stderr);
    assert_eq!(cache::resident(&big), 0);
    read();
}

/// Another container's processes had ended before the daemon could ask for their cgroup. The file
/// that they had opened had no other user then, and was dropped.
#[test]
fn what_unknown_processes_opened_stays() {
    let test = "what_unknown_processes_opened_stays";
    let Some((group, sandbox, target, big)) = mounted_beside_a_cgroup(test) else { return };
    let daemon = started(&sandbox, &["--period", "3600"], &big);
    let file = format!("{target}/big");
    let _opener = opener(&file, &group);
    let container = path_of(&group);
    let reclaim = ["reclaim", "--container", &container, "--dry-run", "--json"];
    assert_eq!(sandbox.run(&reclaim).json()["objects"], 1);
    let unknown = || daemon.sample()["unknown"]["openers"].as_u64();
    let before = unknown();
    // It has ended when the daemon goes on.
    daemon.pause();
    let opened = Command::new("cat").arg(&file).output();
    daemon.go_on();
    assert!(opened.unwrap().status.success());
    assert_eq!(sandbox.run(&reclaim).json()["objects"], 0);
    assert!(unknown() > before);
}

/// The mount tells in which container a process was that has ended.
#[test]
fn what_short_processes_open_is_their_containers() {
    let test = "what_short_processes_open_is_their_containers";
    let Some((machine, runtimes)) = machine(test) else { return };
    let image = machine.run(&["inspect", "box:1", "--json"]).json();
    let group = machine.object(image["image"].as_str().unwrap(), "/etc/group");
    std::fs::read(&group).unwrap();
    let daemon = Daemon::start(&machine, &["--period", "3600"]);
    daemon.sample();
    let cats = "for i in 1 2 3 4 5 6 7 8 9; do cat /etc/group >/dev/null; done";
    let script = format!("echo up; read x; {cats}; read x");
    let options = ["--interactive", "--name", "it"];
    let mut run = machine.command(&machine.sh_args(runtimes[0], &options, &script));
    let mut running = Killed::ready(run.stdin(Stdio::piped()), "up");
    // Its shell is known from now on.
    daemon.sample();
    let unknown = || daemon.sample()["unknown"]["openers"].as_u64().unwrap();
    let before = unknown();
    std::io::Write::write_all(running.0.stdin.as_mut().unwrap(), b"\n").unwrap();
    let object = verity::digest(&std::fs::read(&group).unwrap());
    let users = format!("/v1/objects/default/{object}/users");
    until("a user", || {
        daemon.sample();
        let users = daemon.json(&users)["users"].clone();
        users.as_array().filter(|users| !users.is_empty()).map(|_| ())
    });
    assert_eq!(unknown(), before);
}

/// `top` showed for a whole period what had just been dropped.
#[test]
fn the_next_report_is_without_what_went() {
    let test = "the_next_report_is_without_what_went";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let (_, big) = mounted(&sandbox);
    std::fs::read(&big).unwrap();
    let daemon = Daemon::start(&sandbox, &["--period", "3600"]);
    let resident = |report: &serde_json::Value| report["domains"][0]["resident_bytes"].as_u64();
    assert!(resident(&daemon.sample()) >= Some(102_400));
    sandbox.run(&["reclaim", "--image", "tree"]).ok();
    assert_eq!(resident(&daemon.json("/v1/report")), Some(0));
}

/// The daemon lets members of its group reclaim, and the command refused them.
#[test]
fn a_member_of_the_group_reclaims() {
    let test = "a_member_of_the_group_reclaims";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let (target, big) = mounted(&sandbox);
    std::fs::set_permissions(sandbox.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let as_member = |args: &[&str]| {
        let mut command = sandbox.command(args);
        command.uid(65534).gid(65533);
        run_with_input(command, b"")
    };
    as_member(&["reclaim", "--image", "tree"]).fails_with(5);
    // Whoever was not in the group was told to become root.
    for (args, part) in [(&[][..], "--group"), (&["--group", "65532"], "usermod -aG 65532")] {
        let _daemon = Daemon::start(&sandbox, args);
        as_member(&["reclaim", "--image", "tree"]).fails_with(5).refused(part);
        as_member(&["top", "--once"]).fails_with(5).refused("only root");
    }
    let daemon = Daemon::start(&sandbox, &["--group", "65533"]);
    daemon.sample();
    std::fs::read(&big).unwrap();
    as_member(&["reclaim", "--image", "nothing"]).fails_with(3);
    let dry = as_member(&["reclaim", "--image", "tree", "--dry-run"]);
    assert!(dry.ok().contains("would be dropped"), "{}", dry.stdout);
    let ran = as_member(&["reclaim", "--image", "tree", "--json"]);
    assert!(ran.json()["freed_bytes"].as_u64() >= Some(102_400), "{}", ran.stdout);
    assert_eq!(cache::resident(&big), 0);
    drop(daemon);
    sandbox.run(&["umount", &target]).ok();
}

/// Reclaiming from an image whose metadata was damaged failed with "no image".
#[test]
fn a_damaged_image_is_named() {
    let test = "a_damaged_image_is_named";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let image = sandbox.import_tree("tree");
    let path = sandbox.path("store/domains/default/images").join(format!("{image}.erofs"));
    let _replaced = sandbox.replace(&path, b"torn", false);
    let refused = || {
        let ran = sandbox.run(&["reclaim", "--image", "tree"]);
        ran.fails_with(4).refused(&image).refused("cofolio fsck");
    };
    refused();
    let _daemon = Daemon::start(&sandbox, &[]);
    refused();
}

/// A daemon with `size` drops what a container at its limit has open: memory.high with cgroups of version
/// 2, the only limit of version 1.
#[test]
fn a_daemon_relieves_a_container_at_its_limit() {
    let test = "a_daemon_relieves_a_container_at_its_limit";
    let Some((group, sandbox, target, big)) = mounted_beside_a_cgroup(test) else { return };
    let config = sandbox.text("config.toml");
    let policy = "[daemon.reclaim]\nsize = \"1 GiB\"\npressure_percent = 100.0\n";
    std::fs::write(&config, [AT_ONCE, policy].concat()).unwrap();
    // The file is charged to this process: the kernel's own reclaim in the container does not touch it.
    let _daemon = started(&sandbox, &["--config", &config], &big);
    let container = path_of(&group);
    let _opener = opener(&format!("{target}/big"), &group);
    let known = sandbox.run(&["reclaim", "--container", &container, "--dry-run", "--json"]).json();
    assert_eq!(known["objects"], 1);
    let limit = 8 << 20;
    match Hierarchy::find(Path::new("/")).unwrap().version() {
        Version::V1 => group.limit(limit).unwrap(),
        Version::V2 => {
            std::fs::write(group.procs().with_file_name("memory.high"), limit.to_string()).unwrap();
        }
    }
    let filler = sandbox.text("filler");
    let began = Instant::now();
    // Again and again: what came before the daemon's first look at the container does not count.
    while cache::resident(&big) > 0 {
        assert!(began.elapsed() < WATCHDOG, "it is still resident");
        let fill = "echo 0 > \"$0\" && exec head -c 33554432 /dev/zero > \"$1\"";
        let mut fill =
            Command::new("sh").args(["-c", fill]).arg(group.procs()).arg(&filler).spawn();
        assert!(fill.as_mut().unwrap().wait().unwrap().success());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A daemon with `drop_left_behind` drops what only a removed container used.
#[test]
fn a_daemon_drops_what_is_left_behind() {
    let test = "a_daemon_drops_what_is_left_behind";
    let Some((group, sandbox, target, big)) = mounted_beside_a_cgroup(test) else { return };
    let config = sandbox.text("config.toml");
    let policy = "[daemon.reclaim]\ndrop_left_behind = true\n";
    std::fs::write(&config, [AT_ONCE, policy].concat()).unwrap();
    let _daemon = started(&sandbox, &["--config", &config], &big);
    let container = path_of(&group);
    let opener = opener(&format!("{target}/big"), &group);
    // That takes all figures: the daemon knows the user now.
    let known = sandbox.run(&["reclaim", "--container", &container, "--dry-run", "--json"]).json();
    assert_eq!(known["objects"], 1);
    drop(opener);
    drop(group);
    let began = Instant::now();
    while cache::resident(&big) > 0 {
        assert!(began.elapsed() < WATCHDOG, "it is still resident");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// In a cgroup namespace the kernel shows a container outside of it at `/../NAME`, where no
/// directory is. Each refresh took such a container for removed, without a word, and a daemon with
/// `drop_left_behind` dropped what it had open.
#[test]
fn a_daemon_in_a_cgroup_namespace_drops_nothing_of_others() {
    let test = "a_daemon_in_a_cgroup_namespace_drops_nothing_of_others";
    let Some((group, sandbox, target, big)) = mounted_beside_a_cgroup(test) else { return };
    let Some(own) = cgroup(&format!("{test}-own")) else { return };
    let config = sandbox.text("config.toml");
    let policy = "[daemon.reclaim]\ndrop_left_behind = true\n";
    std::fs::write(&config, [AT_ONCE, policy].concat()).unwrap();
    let hierarchy = Hierarchy::find(Path::new("/")).unwrap();
    let kind = match hierarchy.version() {
        Version::V1 => "cgroup -o memory",
        Version::V2 => "cgroup2",
    };
    let top = hierarchy.directory("/").unwrap();
    let top = top.display();
    let mount = format!("umount {top} && mount -t {kind} none {top} && exec \"$@\"");
    for way in [
        // It sees the mount of the machine, the root of which is `/..` there.
        "exec unshare --cgroup \"$@\"".to_owned(),
        // A container has a mount of its own.
        format!("exec unshare --cgroup --mount sh -c '{mount}' sh \"$@\""),
    ] {
        cache::forget(&big);
        let script = format!("echo 0 > \"$0\" && {way}");
        // In guests `sh` is busybox, which has an `unshare` of its own without cgroups.
        let mut command = sandbox.command_of(Path::new("bash"), &["-c", &script]);
        command.arg(own.procs()).arg(cofolio());
        command.args(["serve", "--config", &config, "--period", "1"]);
        let daemon = Daemon::of(&sandbox, &mut command, 1);
        let warnings = daemon.sample()["warnings"].to_string();
        assert!(warnings.contains("cgroup namespace"), "{warnings}");
        bring_in(&big);
        let _opener = opener(&format!("{target}/big"), &group);
        // More than two rounds of the policy.
        for _ in 0..3 {
            daemon.sample();
            std::thread::sleep(Duration::from_secs(1));
        }
        let ran = sandbox.run(&["reclaim", "--container", "/", "--json"]).json();
        assert_eq!(ran["freed_bytes"], 0, "{ran}");
        assert!(cache::resident(&big) > 0);
    }
}
