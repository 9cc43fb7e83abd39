//! What a start reads is recorded, and read ahead for the next one.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use cofolio_node::cgroup::COMMONS;
use cofolio_node::commons::Commons;
use cofolio_store::verity;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};

use crate::common::machine::{Machine, machine, until};
use crate::common::{Killed, program, unlock};
use crate::{cache, send, started};

/// Digests of the files that the profile names.
fn recorded(machine: &Machine) -> Vec<String> {
    let profile: Value =
        serde_json::from_str(machine.run(&["profile", "show", "box:1", "--json"]).ok()).unwrap();
    let files = profile["files"].as_array().unwrap();
    files.iter().map(|file| file["object"].as_str().unwrap().to_owned()).collect()
}

/// A container that waits to be recorded had the lock of its image: with the recorder stopped
/// (Ctrl-Z), no mount of the image came or went.
#[test]
fn a_container_that_waits_to_be_recorded_locks_nothing() {
    let test = "a_container_that_waits_to_be_recorded_locks_nothing";
    let Some((machine, _)) = machine(test) else { return };
    let mut command = machine.command(&["run", "--hold", "--name", "it", "box:1", "--", "true"]);
    let mut held = Killed::start(command.stdin(Stdio::piped()));
    until("it waits", || {
        let mounts = machine.run(&["mounts", "--json"]).json();
        (mounts["mounts"].as_array()?.len() == 1).then_some(())
    });
    let target = machine.path("other");
    fs::create_dir(&target).unwrap();
    let target = target.to_str().unwrap();
    for args in [&["mount", "box:1", target][..], &["umount", target]] {
        let mut other = Killed::start(&mut machine.command(args));
        let ended = until("another mount of the image", || other.0.try_wait().unwrap());
        assert!(ended.success(), "{args:?}");
    }
    // Its recorder ends.
    drop(held.0.stdin.take());
    held.0.wait().unwrap();
    machine.assert_clean();
}

#[test]
fn a_profile_has_what_a_start_opens() {
    let Some((machine, _)) = machine("a_profile_has_what_a_start_opens") else { return };
    let digest = |content: &[u8]| verity::digest(content).to_string();
    let busybox = digest(&fs::read(program("busybox").unwrap()).unwrap());
    let [group, text] = [&b"worker:x:1002:\n"[..], b"no program\n"].map(digest);
    machine.run(&["profile", "show", "box:1"]).fails_with(3);
    let script = ["profile", "record", "box:1", "--", "sh", "-c"];
    machine.run(&[&script[..], &["cat /etc/group"]].concat()).ok();
    let found = recorded(&machine);
    let place = |object: &String| found.iter().position(|it| it == object);
    assert!(place(&busybox) < place(&group) && place(&busybox).is_some(), "{found:?}");
    assert_eq!(place(&text), None, "{found:?}");
    // A container that does not end is ended, and its profile takes the place of the one before.
    let script = ["profile", "record", "--seconds", "8", "box:1", "--", "sh", "-c"];
    let waits = "trap exit TERM; cat /bin/text; sleep 1000 & wait";
    machine.run(&[&script[..], &[waits]].concat()).ok();
    let found = recorded(&machine);
    assert!(found.contains(&text) && !found.contains(&group), "{found:?}");
    // One that fails changes nothing. No second was taken for none at all, and 10 s went by.
    let failing = ["profile", "record", "box:1", "--", "sh", "-c", "cat /etc/group; exit 7"];
    machine.run(&failing).fails_with(1);
    machine.run(&["profile", "record", "--seconds", "0", "box:1"]).fails_with(2);
    // Its usage offered an image beside `--container`.
    let both = machine.run(&["profile", "record", "--container", "it", "--rw"]);
    both.fails_with(2);
    assert!(both.stderr.contains("record [OPTIONS] --container <NAME>\n"), "{}", both.stderr);
    assert_eq!(recorded(&machine), found);
    machine.assert_clean();
    machine.run(&["profile", "record", "box:1", "--", "cat", "/bin/text"]).ok();
    // It named digests only.
    let shown = machine.run(&["profile", "show", "box:1"]);
    assert!(shown.ok().contains("/bin/busybox  ") && shown.ok().contains("/bin/text  11 B\n"));
    let shown = machine.run(&["profile", "show", "--json", "box:1"]).json();
    let files = shown["files"].as_array().unwrap();
    let file = files.iter().find(|file| file["path"] == "/bin/text").unwrap();
    assert_eq!(file["object"], json!(text));

    // The container hears of Ctrl-C as well. It was told to end, and has not failed.
    let waits = "trap 'echo interrupted; exit 130' INT; cat /bin/text; sleep 1000 & wait";
    let record = ["profile", "record", "box:1", "--", "sh", "-c", waits];
    let mut command = machine.command(&record);
    let mut child = Killed::start(command.process_group(0).stderr(Stdio::piped()));
    let lines = BufReader::new(child.0.stderr.take().unwrap()).lines();
    let mut said = lines.map_while(Result::ok);
    assert!(said.any(|line| line.contains("no program")));
    kill_process_group(Pid::from_child(&child.0), Signal::INT).unwrap();
    let said: Vec<String> = said.collect();
    assert!(child.0.wait().unwrap().success(), "{said:?}");
    assert!(said.iter().any(|line| line.contains("interrupted")), "{said:?}");
    assert!(recorded(&machine).contains(&text));
    machine.assert_clean();

    // Of one that runs, what it opens from now on.
    let script = "echo up; while sleep 0.1; do cat /etc/group >/dev/null; done";
    let mut child = started(&machine, &["run", "--name", "it", "box:1", "--", "sh", "-c", script]);
    // Its processes end at once, and the files that they opened went into the profiles of others.
    machine.run(&["profile", "record", "box:1", "--", "sh", "-c", "sleep 1; cat /bin/text"]).ok();
    let found = recorded(&machine);
    assert!(found.contains(&text) && !found.contains(&group), "{found:?}");
    machine.run(&["profile", "record", "--container", "it", "--seconds", "4"]).ok();
    let found = recorded(&machine);
    assert!(found.contains(&group) && !found.contains(&text), "{found:?}");
    machine.run(&["profile", "record", "--container", "other"]).fails_with(3);
    // One of which the container had ended went on until Ctrl-C.
    let mut command = machine.command(&["profile", "record", "--container", "it"]);
    let mut recorder = Killed::start(command.stderr(Stdio::piped()));
    until("it records", || {
        let fds = fs::read_dir(format!("/proc/{}/fd", recorder.0.id())).ok()?.flatten();
        let links = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
        links.into_iter().any(|link| link.ends_with("anon_inode:[fanotify]")).then_some(())
    });
    // The container reads ten times a second.
    std::thread::sleep(Duration::from_secs(2));
    machine.run(&["stop", "--time", "0", "it"]).ok();
    let mut said = String::new();
    recorder.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(recorder.0.wait().unwrap().success(), "{said}");
    assert!(said.contains("the container has ended"), "{said}");
    assert!(recorded(&machine).contains(&group));
    child.wait().unwrap();
    machine.assert_clean();

    // One that was altered is refused.
    let image = machine.run(&["inspect", "box:1", "--json"]);
    let image: Value = serde_json::from_str(image.ok()).unwrap();
    let image = image["image"].as_str().unwrap();
    let file = machine.path("store/domains/default/profiles").join(image);
    let content = fs::read_to_string(&file).unwrap();
    // `fsck --repair`, which it named, mends none that is a link.
    fs::rename(&file, machine.path("profile")).unwrap();
    std::os::unix::fs::symlink(machine.path("profile"), &file).unwrap();
    let ran = machine.run(&["profile", "show", "box:1"]);
    ran.refused("`cofolio profile record IMAGE` makes another one");
    ran.refused("`cofolio profile rm IMAGE` removes it");
    machine.run(&["profile", "record", "box:1", "--", "cat", "/etc/group"]).ok();
    assert!(recorded(&machine).contains(&group));
    fs::write(&file, content.replace(&group, &digest(b"foreign"))).unwrap();
    let ran = machine.run(&["profile", "show", "box:1"]);
    assert!(ran.stderr.contains("is damaged"), "{}", ran.stderr);
    ran.fails_with(4);
    // A container that is to have it read ahead starts without.
    let ran = machine.run(&["run", "--warm", "profile", "box:1", "--", "echo", "up"]);
    assert!(
        ran.stderr.contains("not read ahead") && ran.stderr.contains("is damaged"),
        "{}",
        ran.stderr
    );
    assert_eq!(ran.ok(), "up\n");
}

/// The policy is that of the configuration unless an option says otherwise. Nothing in the container
/// reads /bin/text.
#[test]
fn what_a_container_starts_from_is_read_ahead_by_policy() {
    let test = "what_a_container_starts_from_is_read_ahead_by_policy";
    let Some((machine, _)) = machine(test) else { return };
    let commons = Commons::open(COMMONS, None);
    if let Err(reason) = commons {
        return crate::common::skip(test, &reason.to_string());
    }
    let text = machine.object("box:1", "/bin/text");
    let config = machine.path("policy.toml");
    let resident_after = |policy: &str, args: &[&str]| {
        fs::write(&config, policy).unwrap();
        cache::forget(&text);
        let config = ["--config", config.to_str().unwrap()];
        let ran = machine.run(&[&config, args].concat());
        ran.ok();
        assert!(!ran.stderr.contains("ahead"), "{}", ran.stderr);
        // What is asked for is in the cache before it is read.
        let file = fs::File::open(&text).unwrap();
        cofolio_sys::cache::cachestat(&file, 0, 0).unwrap().cached > 0
    };
    let (all, profile) = ("[commons]\nwarm = 'all'\n", "[commons]\nwarm = 'profile'\n");
    let run = ["run", "box:1", "--", "true"];
    assert!(!resident_after("", &run));
    assert!(resident_after(all, &run));
    assert!(!resident_after(all, &["run", "--warm", "never", "box:1", "--", "true"]));
    assert!(resident_after("", &["run", "--warm", "all", "box:1", "--", "true"]));
    // There is none.
    assert!(!resident_after(profile, &run));
    machine.run(&["profile", "record", "box:1", "--", "cat", "/bin/text"]).ok();
    assert!(resident_after(profile, &run));

    // The other commands that mount; and the limit is set.
    let limited = "[commons]\nwarm = 'all'\nlimit = '1 GiB'\n";
    let target = machine.path("mnt").to_str().unwrap().to_owned();
    assert!(resident_after(limited, &["mount", "--create", "box:1", &target]));
    machine.run(&["umount", &target]).ok();
    let bundle = machine.path("bundle").to_str().unwrap().to_owned();
    assert!(resident_after(limited, &["bundle", "box:1", &bundle]));
    machine.run(&["umount", &format!("{bundle}/rootfs")]).ok();
    // A recorder would see what was read ahead.
    assert!(!resident_after(all, &["profile", "record", "box:1", "--", "true"]));
    machine.assert_clean();
}

/// A container whose recording was killed went on, and nobody knew what for; the changes that it
/// had made were kept for good. Later this was so only where the whole process group was killed,
/// as `timeout -s KILL` does.
#[test]
fn a_killed_recording_takes_its_container_along() {
    let test = "a_killed_recording_takes_its_container_along";
    let Some((machine, _)) = machine(test) else { return };
    let script = "trap exit TERM; echo >/etc/x; echo up; sleep 1000 & wait";
    let record = ["profile", "record", "--rw", "box:1", "--", "sh", "-c", script];
    for kill in [kill_process, kill_process_group] {
        let mut command = machine.command(&record);
        let mut child = Killed::start(command.process_group(0).stderr(Stdio::piped()));
        let mut said = BufReader::new(child.0.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(said.any(|line| line == "up"));
        kill(Pid::from_child(&child.0), Signal::KILL).unwrap();
        child.0.wait().unwrap();
        let is_gone = || machine.containers().is_empty() && machine.mounted().len() <= 1;
        until("the container is gone", || is_gone().then_some(()));
    }
    machine.assert_clean();
}

/// A recording had its container's changes kept until it had read them. When both processes were
/// killed they stayed in the store until somebody discarded them.
#[test]
fn a_recording_keeps_no_changes() {
    let test = "a_recording_keeps_no_changes";
    let Some((machine, _)) = machine(test) else { return };
    let script = "trap exit TERM; echo >/etc/x; echo up; sleep 1000 & wait";
    let record = ["profile", "record", "--rw", "box:1", "--", "sh", "-c", script];
    let mut recorder = Killed::start(machine.command(&record).stderr(Stdio::piped()));
    let said = BufReader::new(recorder.0.stderr.take().unwrap()).lines();
    assert!(said.map_while(Result::ok).any(|line| line == "up"));
    let pid = recorder.0.id();
    let run = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let run = Pid::from_raw(run.trim().parse().unwrap()).unwrap();
    // It must not see the other one die.
    send(&recorder.0, Signal::STOP);
    kill_process(run, Signal::KILL).unwrap();
    drop(recorder);
    let [found] = &machine.containers()[..] else { panic!("{:?}", machine.containers()) };
    machine.run(&["stop", "--time", "0", found["name"].as_str().unwrap()]).ok();
    assert!(machine.run(&["mounts", "--json"]).json()["kept"].as_array().unwrap().is_empty());
    machine.assert_clean();
}

/// When the process that attends the container was killed, the container went on under a name that its
/// user had not given, and was said to have failed.
#[test]
fn a_recording_whose_run_is_killed_ends_the_container() {
    let test = "a_recording_whose_run_is_killed_ends_the_container";
    let Some((machine, _)) = machine(test) else { return };
    let record = [
        "profile",
        "record",
        "--rw",
        "box:1",
        "--",
        "sh",
        "-c",
        "trap exit TERM; sleep 1000 & wait",
    ];
    let recorder = machine.command(&record).stderr(Stdio::piped()).spawn().unwrap();
    until("the container", || (!machine.containers().is_empty()).then_some(()));
    until("its process", || machine.containers()[0]["pid"].as_i64());
    let pid = recorder.id();
    let run = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    kill_process(Pid::from_raw(run.trim().parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    let ran = recorder.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{said}");
    assert!(said.contains("which attends the container, was killed (signal: 9"), "{said}");
    machine.assert_clean();
}

/// Without this a user had to find out in which directories an image has to be writable.
#[test]
fn a_container_can_write_where_its_recorded_start_did() {
    let Some((machine, _)) = machine("a_container_can_write_where_its_recorded_start_did") else {
        return;
    };
    let written = || {
        let profile = machine.run(&["profile", "show", "box:1", "--json"]).json();
        profile["written"].as_array().map(|dirs| dirs.to_vec())
    };
    let target = machine.path("recorded").to_str().unwrap().to_owned();
    let mount = ["mount", "--json", "--create", "--writable-recorded", "box:1", &target];
    // It named a command whose profile would have been refused next.
    machine.run(&mount).fails_with(3).refused("`cofolio profile record --rw IMAGE`");

    // Made, changed and removed: in a directory, below a new one, in scratch, in a volume.
    let script =
        "echo >/etc/new; mkdir /mnt/a; echo >/mnt/a/b; echo >/tmp/t; echo >/data/d; rm /bin/text";
    let ran = machine.run(&["profile", "record", "--rw", "box:1", "--", "sh", "-c", script]);
    ran.ok();
    machine.assert_clean();
    assert_eq!(written().unwrap(), ["/bin", "/data", "/etc", "/mnt", "/tmp"]);
    // It did not say what it had found.
    assert!(ran.stderr.contains("writes to /bin, /data, /etc, /mnt, /tmp\n"), "{}", ran.stderr);
    assert!(machine.run(&["profile", "show", "box:1"]).ok().contains("writes to /etc\n"));
    let record = machine.run(&mount).json();
    assert_eq!(record["upper"]["dirs"], json!(["/bin", "/data", "/etc", "/mnt", "/tmp"]));
    let listed = machine.run(&["mounts"]);
    assert!(listed.ok().contains("rw in part"), "{}", listed.stdout);
    machine.run(&["umount", &target]).ok();
    // A directory that the image does not have was blamed on the caller.
    let image = machine.run(&["inspect", "box:1", "--json"]).json();
    let image = image["image"].as_str().unwrap();
    let file = machine.path("store/domains/default/profiles").join(image);
    let content = fs::read_to_string(&file).unwrap();
    fs::write(&file, content.replace("/mnt", "/nosuch")).unwrap();
    let mounted = machine.run(&mount);
    mounted.fails_with(4).refused("is damaged: /nosuch: the image has no such directory");
    mounted.refused("`cofolio profile rm IMAGE` removes it");
    let ran = machine.run(&["run", "--writable-recorded", "box:1", "--", "true"]);
    ran.fails_with(125).refused("is damaged: /nosuch");
    fs::write(&file, content.replace("/mnt", "/etc/../mnt")).unwrap();
    machine.run(&mount).fails_with(4).refused("is damaged: /etc/../mnt");
    fs::write(&file, content).unwrap();
    // `run` has a mount of its own for `/tmp`.
    let script = "set -e; rm /bin/text; for dir in etc mnt tmp data; do echo >/$dir/x; done; \
                  ! mkdir /new; sleep 1000 & wait";
    let run = ["run", "--detach", "--name", "it", "--writable-recorded", "box:1", "--"];
    machine.run(&[&run[..], &["sh", "-c", script]].concat()).ok();
    let [found] = &machine.containers()[..] else { panic!("{:?}", machine.containers()) };
    assert_eq!(found["writable"], json!(false));
    assert_eq!(found["writable_dirs"], json!(["/bin", "/data", "/etc", "/mnt"]));
    let rootfs = Path::new(found["rootfs"].as_str().unwrap()).to_owned();
    until("it writes", || rootfs.join("mnt/x").exists().then_some(()));
    // Of one that runs: where it has written so far, of what it can write to. Once its shell has
    // started the last program, it opens nothing.
    let record = ["profile", "record", "--container", "it", "--seconds", "1"];
    let ran = until("it opens nothing", || Some(machine.run(&record)).filter(|ran| ran.code == 1));
    // It said that there was no profile.
    assert!(ran.stderr.contains("an existing one is unchanged"), "{}", ran.stderr);
    assert!(written().is_some());
    machine.run(&["stop", "--time", "0", "it"]);

    let script = "cat /etc/group; echo >/etc/x; while sleep 0.1; do cat /bin/text >/dev/null; done";
    machine.run(&["run", "-d", "--rw", "--name", "it", "box:1", "--", "sh", "-c", script]).ok();
    machine.run(&["profile", "record", "--container", "it", "--seconds", "4"]).ok();
    assert_eq!(written().unwrap(), ["/etc"]);
    machine.run(&["stop", "--time", "0", "it"]);

    // It could not write; it wrote nothing; it changed the root.
    machine.run(&["profile", "record", "box:1", "--", "cat", "/etc/group"]).ok();
    assert_eq!(written(), None);
    let ran = machine.run(&mount);
    assert!(ran.stderr.contains("profile record --rw"), "{}", ran.stderr);
    ran.fails_with(3);
    let ran = machine.run(&["profile", "record", "--rw", "box:1", "--", "cat", "/etc/group"]);
    assert!(ran.stderr.contains("writes to no directory of the image\n"), "{}", ran.stderr);
    assert_eq!(written().unwrap(), [""; 0]);
    // It was said that only changes that go with the mount can have a limit.
    let ran = machine.run(&["run", "--writable-recorded", "--size", "16M", "box:1"]);
    ran.fails_with(125).refused("--size needs a writable directory");
    // There was nothing to keep, and the options were ignored.
    for keep in [&["--keep"][..], &["--upper", &target]] {
        let kept = machine.run(&[&mount[..], keep].concat());
        kept.fails_with(1).refused("needs a writable directory");
    }
    assert_eq!(machine.run(&mount).json().get("upper"), None);
    machine.run(&["umount", &target]).ok();
    let record = ["profile", "record", "--json", "--rw", "box:1", "--", "mkdir", "/new"];
    assert_eq!(machine.run(&record).json()["written"], json!(["/"]));
    let ran = machine.run(&mount);
    assert!(ran.stderr.contains("--rw"), "{}", ran.stderr);
    assert_ne!(ran.code, 0);
    machine.assert_clean();
}

/// The recorder ended its own container and reported that as the container's failure, most of the
/// time, and the container's mount stayed until the next command.
#[test]
fn a_recording_that_fails_says_why_and_leaves_nothing() {
    let test = "a_recording_that_fails_says_why_and_leaves_nothing";
    let Some((machine, _)) = machine(test) else { return };
    let text = machine.object("box:1", "/bin/text");
    unlock(&text).unwrap();
    fs::remove_file(&text).unwrap();
    for _ in 0..5 {
        let ran = machine.run(&["profile", "record", "--rw", "box:1", "--", "true"]);
        ran.fails_with(4).refused("no object");
        assert!(!ran.stderr.contains("the container failed"), "{}", ran.stderr);
        let mounted = machine.mounted();
        assert!(!mounted.iter().any(|at| at.ends_with("rootfs")), "{mounted:?}");
    }
    machine.assert_clean();
}
