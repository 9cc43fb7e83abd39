//! Merging of guests' memory by the daemon.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use cofolio_guest::Message;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use serde_json::Value;

use crate::common::{Killed, cofolio, skip};
use crate::{Host, host, rss_anon, until};

/// Puts 30 MiB of numbers, the same in each guest, into the guest's own memory. Writes others over
/// them at a first signal, and reads those again at a second one.
const SCRIPT: &str = "mkdir /tmp/f; mount -t tmpfs -o size=60m f /tmp/f
    trap 'touch /tmp/f/usr1' USR1; trap 'touch /tmp/f/term' TERM
    seq 1 4500000 >/tmp/f/a; echo filled
    until [ -e /tmp/f/usr1 ]; do sleep 1; done
    seq 2 4500001 | dd of=/tmp/f/a conv=notrunc bs=64k 2>/dev/null; md5sum </tmp/f/a
    until [ -e /tmp/f/term ]; do sleep 1; done; md5sum </tmp/f/a; exit 0";
const USR1: i32 = 10;
const TERM: i32 = 15;

/// Starts guests, and waits until their memory is full.
fn fill(host: &Host, names: &[&str]) {
    for name in names {
        host.sh(&["--detach", "--name", name], SCRIPT).ok();
    }
    say(host, "filled");
}

/// Waits until all guests have said something.
fn say(host: &Host, what: &str) {
    until(&format!("the guests say {what}"), || {
        host.guests().iter().all(|guest| output(guest).contains(what)).then_some(())
    });
}

fn signal(host: &Host, number: i32) {
    for guest in host.guests() {
        let output = PathBuf::from(guest["output"].as_str().unwrap());
        let dir = fs::File::open(output.parent().unwrap()).unwrap();
        let short = format!("/proc/self/fd/{}/control", dir.as_raw_fd());
        let mut control = UnixStream::connect(short).unwrap();
        Message::Signal(number).write(&mut control).unwrap();
    }
}

fn output(guest: &Value) -> String {
    fs::read_to_string(guest["output"].as_str().unwrap()).unwrap()
}

/// MiB of a guest's memory that are mapped of pools.
fn pooled(guest: &Value) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest["pid"])).unwrap();
    let mut is_pool = false;
    let mut kib = 0;
    for line in smaps.lines() {
        if line.split_whitespace().nth(1).is_some_and(|word| word.starts_with("rw-p")) {
            is_pool = line.contains("cofolio-pool");
        } else if is_pool && line.starts_with("Size:") {
            kib += line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        }
    }
    kib >> 10
}

fn daemon(host: &Host) -> Killed {
    let config = host.path("config.toml");
    let socket = host.text("daemon.sock");
    let text = format!("[daemon]\nsocket = '{socket}'\n[vm]\nmerge_seconds = 1\n");
    fs::write(&config, text).unwrap();
    let args = ["--config", config.to_str().unwrap(), "serve"];
    let mut serve = host.command(&args);
    let daemon = Killed::start(serve.stdout(Stdio::null()).stderr(Stdio::null()));
    until("the daemon answers", || {
        let asked = host.run(&["--config", config.to_str().unwrap(), "vm", "top", "--json"]);
        (asked.code == 0).then_some(())
    });
    daemon
}

fn report(host: &Host) -> Value {
    host.run(&["--config", &host.text("config.toml"), "vm", "top", "--json"]).json()
}

/// Waits until all guests have their pages in pools, and the daemon says so: how many bytes of
/// pools.
fn merged(host: &Host, count: usize) -> u64 {
    until("all have their pages in pools", || {
        host.guests().iter().all(|guest| pooled(guest) >= 25).then_some(())
    });
    until("the daemon has taken account of it", || {
        let report = report(host);
        let machines = report["machines"].as_array().unwrap();
        let is_merged = |it: &Value| it["merged_bytes"].as_u64().unwrap() >= 25 << 20;
        let pools = report["pool_bytes"].as_u64().filter(|bytes| *bytes >= 25 << 20)?;
        (machines.len() == count && machines.iter().all(is_merged)).then_some(pools)
    })
}

/// A copy that a guest makes of a file of its image takes no memory besides: the file of the store
/// is there.
#[test]
fn copies_of_the_images_files_are_merged_with_the_image() {
    let test = "copies_of_the_images_files_are_merged_with_the_image";
    let Some(host) = host(test) else { return };
    let script = "mkdir /tmp/f; mount -t tmpfs f /tmp/f; cp /bin/busybox /tmp/f/a; echo copied
        until [ -e /tmp/f/term ]; do sleep 1; done; cmp /bin/busybox /tmp/f/a && echo same";
    let script = format!("trap 'touch /tmp/f/term' TERM; {script}");
    host.sh(&["--detach", "--name", "one"], &script).ok();
    say(&host, "copied");
    let segments = host.path("store/domains/default/segments");
    let is_immutable = |path: PathBuf| {
        let found = statx(CWD, &path, AtFlags::empty(), StatxFlags::empty()).unwrap();
        found.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::VERITY)
    };
    if !fs::read_dir(segments).unwrap().all(|entry| is_immutable(entry.unwrap().path())) {
        return skip(test, "the store's files are neither immutable nor have fs-verity here");
    }
    let _daemon = daemon(&host);
    until("its pages are the image's", || {
        let report = report(&host);
        let merging = &report["machines"][0]["merging"];
        merging["image_pages"].as_u64().filter(|pages| *pages >= 100)
    });
    let output = host.guests()[0]["output"].clone();
    signal(&host, TERM);
    until("the guest has compared it", || {
        let said = fs::read_to_string(output.as_str().unwrap()).ok()?;
        said.contains("same\n").then_some(())
    });
}

/// Private memory of all machines and shared memory, counted once, add up to the total.
#[track_caller]
fn assert_parts_add_up(host: &Host) {
    let report = report(host);
    let figure = |it: &Value, name: &str| it[name].as_u64().unwrap();
    let machines = report["machines"].as_array().unwrap();
    let sum = |name: &str| machines.iter().map(|it| figure(it, name)).sum::<u64>();
    let parts = ["used_bytes", "cache_bytes", "unreturned_bytes", "emulator_bytes"];
    let private: u64 = parts.map(sum).iter().sum();
    let counted: u64 = host.guests().iter().map(|guest| rss_anon(&guest["pid"])).sum();
    assert!(private.abs_diff(counted) < 40 << 20, "{private} {counted}");
    let (images, image) = (sum("image_bytes"), figure(&report, "image_bytes"));
    assert!(image < images && machines.iter().all(|it| image >= figure(it, "image_bytes")));
    let shared = sum("proportional_bytes") - private;
    let pools = figure(&report, "pool_bytes");
    // Some pages of pools are nobody's any more.
    assert!((image..=image + pools + 2).contains(&shared), "{shared} of {image} and {pools}");
    assert!(shared + 2 >= image + pools / 2, "{shared} of {image} and {pools}");
}

/// Each VMM is a user of its own without privileges: a guest that breaks out of it could read the
/// memory of all others otherwise.
#[track_caller]
fn assert_unprivileged(host: &Host) {
    let status = |guest: &Value| {
        let status = fs::read_to_string(format!("/proc/{}/status", guest["pid"])).unwrap();
        let line = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(line("CapEff:"), ["0000000000000000"]);
        assert_eq!((line("NoNewPrivs:"), line("Seccomp:")), (vec!["1".into()], vec!["2".into()]));
        let ids = line("Uid:");
        assert!(ids[0] != "0" && ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_eq!(ids, line("Gid:"));
        ids[0].clone()
    };
    let users: Vec<String> = host.guests().iter().map(status).collect();
    assert_ne!(users[0], users[1]);
}

/// Common pages of guests are in memory once, and each guest reads its own data. A new daemon
/// continues with the pools of a killed one.
#[test]
fn the_daemon_merges_what_guests_have_in_common() {
    let Some(host) = host("the_daemon_merges_what_guests_have_in_common") else { return };
    if !cofolio().parent().unwrap().join("../lib/cofolio/libcofolio_shim.so").exists() {
        return skip("the_daemon_merges_what_guests_have_in_common", "tools/guest was not run");
    }
    fill(&host, &["one", "two"]);
    assert_unprivileged(&host);
    let first = daemon(&host);
    let pools = merged(&host, 2);
    assert!(pools < 60 << 20, "{pools}");
    let shown = host.run(&["--config", &host.text("config.toml"), "vm", "top"]);
    assert!(shown.ok().contains("were merged into"), "{}", shown.stdout);
    assert_parts_add_up(&host);
    drop(first);

    // It has pages in common with the pools only: the other guests' pages are merged.
    fill(&host, &["three"]);
    let _second = daemon(&host);
    let pools = merged(&host, 3);
    assert!(pools < 60 << 20, "{pools}");

    // Pages that were written to are merged again, and the pools of before are given up.
    signal(&host, USR1);
    say(&host, " -\n");
    until("written pages were made the guests' own", || {
        let machines = report(&host)["machines"].as_array().unwrap().clone();
        let pages = |it: &Value| it["merging"]["converted_pages"].as_u64().unwrap();
        machines.iter().all(|it| pages(it) >= 25 << 8).then_some(())
    });
    merged(&host, 3);
    until("the pools of before are given up", || {
        report(&host)["pool_bytes"].as_u64().filter(|bytes| *bytes < 60 << 20)
    });
    // And that ends. Pages of pools that were hardly used once came back to these, again and again.
    let converted = || -> u64 {
        let machines = report(&host)["machines"].as_array().unwrap().clone();
        machines.iter().map(|it| it["merging"]["converted_pages"].as_u64().unwrap()).sum()
    };
    until("nothing is converted any more", || {
        let before = converted();
        std::thread::sleep(Duration::from_secs(15));
        (converted() < before + 256).then_some(())
    });
    let outputs: Vec<_> = host.guests().iter().map(|it| it["output"].clone()).collect();
    signal(&host, TERM);
    for path in outputs.iter().map(|output| Path::new(output.as_str().unwrap())) {
        until("the guest has read it again", || {
            let said = fs::read_to_string(path).ok()?;
            let sums: Vec<&str> = said.lines().filter(|line| line.ends_with(" -")).collect();
            (sums.len() == 2).then(|| assert_eq!(sums[0], sums[1]))
        });
    }
}
