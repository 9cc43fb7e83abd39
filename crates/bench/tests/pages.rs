//! A kernel with larger pages than blocks (64-bit ARM with 16 or 64 KiB, four or sixteen times the blocks of images, of
//! ext4 and of fs-verity), and an old kernel: what is mounted reads as what came in, verified by the kernel or not, through
//! a loop device or not, and what is resident is counted in pages of that size. Runs everywhere; in guests with such
//! kernels it is `tests/vm/run pages-16k pages-64k kernel-stable`.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "../../cofolio/tests/common/mod.rs"]
mod common;
mod report;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use cofolio_sys::cache::page_size;
use common::volume::run;
use common::{Sandbox, can_mount, skip};
use report::counted;

/// Runs a test where images can be mounted, and alone: a benchmark measures nothing while others drop what is cached.
fn alone(test: &str, body: impl FnOnce()) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if can_mount(test) {
        body();
    }
}

/// So many bytes of the numbers from one on, a line each.
fn numbers(first: u32, bytes: usize) -> Vec<u8> {
    let mut text = String::new();
    for number in first.. {
        if text.len() >= bytes {
            break;
        }
        text += &format!("{number}\n");
    }
    text.truncate(bytes);
    text.into_bytes()
}

/// Two trees: sizes around those of blocks and pages, a Merkle tree of two levels, a directory of several blocks.
fn trees(dir: &Path) -> [PathBuf; 2] {
    ["old", "new"].map(|name| {
        let tree = dir.join(name);
        fs::create_dir_all(tree.join("many")).unwrap();
        fs::create_dir(tree.join("etc")).unwrap();
        let sizes = [0, 1, 4095, 4096, 4097, 16_383, 16_384, 16_385, 65_535, 65_536, 65_537];
        for size in sizes.into_iter().chain([300_000, 1_000_000]) {
            fs::write(tree.join(size.to_string()), numbers(1, size)).unwrap();
        }
        for number in 1..=400 {
            let name = format!("many/a-name-that-takes-some-room-{number}");
            fs::hard_link(tree.join("1"), tree.join(name)).unwrap();
        }
        std::os::unix::fs::symlink("../4095", tree.join("etc/link")).unwrap();
        if name == "new" {
            fs::write(tree.join("16384"), numbers(2, 108_892)).unwrap();
            fs::write(tree.join("added"), numbers(3, 108_890)).unwrap();
        }
        tree
    })
}

/// Mounts both images, read-only and writable, and compares.
fn read_all(sandbox: &Sandbox, trees: &[PathBuf; 2]) {
    for (tree, name) in trees.iter().zip(["box:old", "box:new"]) {
        sandbox.run(&["import", "--quiet", "--name", name, tree.to_str().unwrap()]).ok();
    }
    sandbox.run(&["fsck", "--quiet"]).ok();
    // The next read comes from the disk.
    rustix::fs::syncfs(File::open(sandbox.path("store")).unwrap()).unwrap();
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    for (tree, name) in trees.iter().zip(["old", "new"]) {
        for mode in ["ro", "rw"] {
            let target = sandbox.text(&format!("{mode}-{name}"));
            let mut args = vec!["mount", "--quiet", "--create"];
            args.extend((mode == "rw").then_some("--rw"));
            let image = format!("box:{name}");
            args.extend([&*image, &target]);
            sandbox.run(&args).ok();
            run(Command::new("diff").arg("-r").arg(tree).arg(&target)).unwrap();
        }
    }
    assert_eq!(fs::read_dir(sandbox.path("ro-old/many")).unwrap().count(), 400);
    let written = sandbox.path("rw-old/300000");
    File::options().append(true).open(&written).unwrap().write_all(b"more\n").unwrap();
    let expected = numbers(1, 300_000);
    assert!(fs::read(&written).unwrap() == [&expected[..], b"more\n"].concat());
    assert!(fs::read(sandbox.path("ro-old/300000")).unwrap() == expected);
}

/// Files of the store that are behind loop devices.
fn loops(sandbox: &Sandbox) -> usize {
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    let files =
        devices.filter_map(|it| fs::read_to_string(it.path().join("loop/backing_file")).ok());
    files.filter(|file| file.contains(&sandbox.text("store"))).count()
}

/// Before 6.13 fsconfig takes no descriptor that was opened with `O_PATH` and answers EBADF, which was once taken for the
/// last word: no image could be mounted. Before 6.15 a layer of an overlay has to be attached somewhere, and doctor, which
/// tried one that was not, said that images cannot be mounted.
#[test]
fn what_is_mounted_is_what_came_in() {
    let test = "what_is_mounted_is_what_came_in";
    alone(test, || {
        let sandbox = Sandbox::new();
        let doctor = sandbox.run(&["doctor"]);
        for part in
            [&format!("{} KiB", page_size() / 1024), "Images can be mounted on this machine."]
        {
            assert!(doctor.ok().contains(part), "{}", doctor.stdout);
        }
        let trees = trees(&sandbox.dir("trees"));
        read_all(&sandbox, &trees);
        let verity = sandbox.run(&["doctor"]).ok().contains("by the kernel, every read");
        if verity {
            let table = fs::read_to_string("/proc/mounts").unwrap();
            let target =
                format!(" {} ", fs::canonicalize(sandbox.path("ro-old")).unwrap().display());
            let line = table.lines().find(|line| line.contains(&target)).unwrap();
            assert!(line.contains("verity=require"), "{line}");
            assert_eq!(loops(&sandbox), 0);
        } else {
            skip(test, "with fs-verity: the directory of temporary files has none");
        }
        sandbox.run(&["umount", "--quiet", "--all"]).ok();

        // A file that was put in an object's place is refused.
        if verity {
            let object = sandbox.object("box:old", "/300000");
            let bytes = fs::read(&object).unwrap();
            let replaced = sandbox.replace(&object, &bytes, false);
            let target = sandbox.path("ro-old");
            let text = target.to_str().unwrap();
            sandbox.run(&["mount", "--quiet", "--create", "box:old", text]).ok();
            let refused = File::open(target.join("300000")).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
            assert!(fs::read(target.join("1000000")).unwrap() == numbers(1, 1_000_000));
            sandbox.run(&["umount", "--quiet", text]).ok();
            replaced.restore();
        }

        if release() < (6, 15) {
            let target = sandbox.text("mapped");
            let args = ["mount", "--create", "--idmap", "0:100000:65536", "box:old", &target];
            sandbox.run(&args).refused("Linux 6.15");
        }
    });
}

/// The kernel's version.
fn release() -> (u32, u32) {
    let name = rustix::system::uname();
    let release = name.release().to_str().unwrap();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// No fs-verity there, and a loop device with blocks of 4 KiB.
#[test]
fn a_store_in_memory_is_read_through_a_loop_device() {
    let test = "a_store_in_memory_is_read_through_a_loop_device";
    alone(test, || {
        let outer = Sandbox::new();
        let memory = outer.dir("memory");
        run(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&memory)).unwrap();
        let sandbox = Sandbox::below(&memory);
        let trees = trees(&outer.dir("trees"));
        read_all(&sandbox, &trees);
        assert!(loops(&sandbox) > 0, "no loop device for a store in memory");
        sandbox.run(&["umount", "--quiet", "--all"]).ok();
        let work = outer.text("bench");
        let refused = sandbox.bench(&["share", "--quiet", "--work", &work, "box:old", "box:new"]);
        refused.refused(&format!("{} is in memory", sandbox.text("store")));
    });
}

/// What `bench share` expects of two trees whose sizes it knows is what the kernel says is resident, Merkle trees of
/// fs-verity included: with pages of 64 KiB each takes one at least.
#[test]
fn what_is_resident_is_counted_in_pages() {
    let test = "what_is_resident_is_counted_in_pages";
    alone(test, || {
        let sandbox = Sandbox::new();
        let trees = trees(&sandbox.dir("trees"));
        for (tree, name) in trees.iter().zip(["box:old", "box:new"]) {
            sandbox.run(&["import", "--quiet", "--name", name, tree.to_str().unwrap()]).ok();
        }
        let (work, json) = (sandbox.text("bench"), sandbox.text("report"));
        let args = ["share", "--quiet", "--runs", "1", "--patience", "2"];
        let args = [&args[..], &["--work", &work, "--json", &json]].concat();
        let ran = sandbox.bench(&[&args[..], &["box:old", "box:new"]].concat());
        if ran.stderr.contains("is in memory") {
            return skip(test, "the directory of temporary files is in memory");
        }
        let report = counted(Path::new(&json));
        assert_eq!(report["page_size"], page_size());
        if sandbox.run(&["doctor"]).ok().contains("by the kernel, every read") {
            let runs = report["runs"].as_array().unwrap();
            assert!(runs.iter().any(|run| run["merkle_pages"].as_u64().unwrap() > 0), "{report:#}");
        } else {
            skip(test, "Merkle trees: the directory of temporary files has no fs-verity");
        }
    });
}
