//! Imports that must not go through, and what they say: bad names, damage, limits of the process.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Sandbox, Tar, can_mount, cofolio, program, remove, skip, write_layout};
use serde_json::json;

/// A layout with one image of one layer, with a file of its own.
fn layout(sandbox: &Sandbox, name: &str, tag: &str) -> String {
    let path = sandbox.path(name);
    let mut layer = Tar::default();
    layer.directory("etc/", 0o755).file("etc/name", 0o644, name.as_bytes());
    layer.file("big", 0o644, &[7; 9000]);
    write_layout(&path, tag, &[layer.finish()], json!({}));
    path.display().to_string()
}

/// `--platform` was passed over without a word where there was nothing to choose: an image for
/// another processor came in under a name that said otherwise.
#[test]
fn an_image_for_another_platform_is_told() {
    let sandbox = Sandbox::new();
    let path = sandbox.path("arm");
    let mut layer = Tar::default();
    layer.file("f", 0o644, b"f");
    write_layout(&path, "arm:1", &[layer.finish()], json!({}));
    let source = path.display().to_string();
    let ours = sandbox.run(&["import", &source]);
    ours.ok();
    assert!(!ours.stderr.contains("arm:1"), "{}", ours.stderr);
    // It is here already: that is told again.
    let other = sandbox.run(&["import", "--platform", "plan9/mips", &source]);
    other.ok();
    assert!(other.stderr.contains("arm:1 is for linux/"), "{}", other.stderr);
    assert!(other.stderr.contains(", not for plan9/mips\n"), "{}", other.stderr);
    sandbox.run(&["import", "--platform", "plan9", &source]).fails_with(2);
}

/// A name was looked at when the image was published, after gigabytes had been read and written. Blank
/// names, and names that other commands take for paths, went through.
#[test]
fn names_are_checked_before_anything_is_read() {
    let sandbox = Sandbox::new();
    let long = "x".repeat(1025);
    let like_digests = ["deadbeef", "CAFE", "sha256:0123"];
    let paths = ["/etc/x", "./x", "../x", ".", "..", "a/../../b"];
    let unfit = ["", " ", " x", "x ", "a\nb", "a\u{1b}[2J", &long];
    for name in [&unfit[..], &paths, &like_digests].concat() {
        // The source does not even exist.
        for args in [["import", "/nonexistent"], ["pull", "localhost:1/x"]] {
            let refused = sandbox.run(&[&args[..], &["--name", name]].concat());
            refused.fails_with(2);
            assert!(refused.stderr.contains("cannot be the name"), "{}", refused.stderr);
            assert!(!refused.stderr.contains('\u{1b}'), "{:?}", refused.stderr);
        }
    }
    assert!(!sandbox.path("store").exists());

    sandbox.import_tree("box:1");
    for name in ["/x", "deadbeef", "-x"] {
        let refused = sandbox.run(&["tag", "box:1", "--", name]);
        refused.fails_with(2);
        assert!(!refused.stderr.contains("--name"), "tag has no such option: {}", refused.stderr);
    }
    sandbox.run(&["tag", "box:1", "deadbeef:1"]).ok();
    let refused = sandbox.run(&["rm", "nosuch", "box:1"]);
    refused.fails_with(3);
    assert!(refused.stderr.contains("no name was removed"), "{}", refused.stderr);
    sandbox.run(&["tag", "box:1", "x y:1"]).ok();
}

/// A layer whose bytes were altered on the way was "not a tar header", which says nothing of who is to
/// blame, and whoever read it searched the store for damage.
#[test]
fn an_altered_layer_is_named_by_its_digest() {
    let sandbox = Sandbox::new();
    let source = layout(&sandbox, "layout", "box:1");
    let blobs = fs::read_dir(sandbox.path("layout/blobs/sha256")).unwrap();
    let is_layer = |path: &PathBuf| !fs::read(path).unwrap().starts_with(b"{");
    let layer = blobs.map(|entry| entry.unwrap().path()).find(is_layer).unwrap();
    let mut bytes = fs::read(&layer).unwrap();
    bytes[150] ^= 1;
    fs::write(&layer, bytes).unwrap();
    let refused = sandbox.run(&["import", &source, "--name", "box:1"]);
    refused.fails_with(4);
    let digest = layer.file_name().unwrap().to_str().unwrap();
    for part in [digest, "its content has the digest", "not the store"] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
}

/// A name that comes from the source can be as bad, and then the user has to be told what to do.
#[test]
fn a_bad_name_in_the_source_asks_for_a_name() {
    let sandbox = Sandbox::new();
    let annotated = layout(&sandbox, "layout", "/absolute:1");
    let directory = sandbox.path("a\nb").display().to_string();
    fs::create_dir(&directory).unwrap();
    for source in [&annotated, &directory] {
        let refused = sandbox.run(&["import", source]);
        refused.fails_with(2);
        assert!(refused.stderr.contains("--name"), "{}", refused.stderr);
        sandbox.run(&["import", source, "--name", "good:1"]).ok();
    }
}

/// A wrong path replaced `meta.json`, and no command could open the store any more.
#[test]
fn nothing_is_exported_into_the_store() {
    let sandbox = Sandbox::new();
    let source = layout(&sandbox, "layout", "box:1");
    sandbox.run(&["import", &source]).ok();
    let [file, new] = ["store/meta.json", "store/new/layout"].map(|path| sandbox.text(path));
    for to in ["docker-archive", "oci-archive", "erofs"].map(|form| format!("{form}:{file}")) {
        sandbox.run(&["export", "box:1", &to, "--replace"]).fails_with(1).refused("in the store");
    }
    let refused = sandbox.run(&["export", "box:1", &format!("oci:{new}")]);
    refused.fails_with(1).refused("in the store");
    sandbox.run(&["fsck"]).ok();
}

/// A truncated archive ended with code 3, as if it did not exist.
#[test]
fn a_truncated_archive_is_damaged() {
    let sandbox = Sandbox::new();
    let source = layout(&sandbox, "layout", "box:1");
    sandbox.run(&["import", &source]).ok();
    for form in ["oci-archive", "docker-archive"] {
        let whole = sandbox.text("whole.tar");
        sandbox.run(&["export", "box:1", &format!("{form}:{whole}"), "--replace"]).ok();
        let bytes = fs::read(&whole).unwrap();
        let cut = sandbox.text("cut.tar");
        // In data, in a header, and between two members.
        for length in [bytes.len() / 2, 700, 512 * 3] {
            fs::write(&cut, &bytes[..length]).unwrap();
            for source in [cut.clone(), format!("{form}:{cut}")] {
                let failed = sandbox.run(&["import", &source, "--name", "cut:1"]);
                failed.fails_with(4);
                assert!(failed.stderr.contains("cut.tar"), "{}", failed.stderr);
            }
        }
    }
    // Another file is not a damaged archive.
    fs::write(sandbox.path("text"), "x".repeat(5000)).unwrap();
    sandbox.run(&["import", &sandbox.text("text")]).fails_with(3);
}

fn files_in(directory: &Path, suffix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.to_string_lossy().ends_with(suffix)).collect()
}

/// Altered image metadata said "import it again", and the import said "here already". A missing layer
/// file made it fail without a hint.
#[test]
fn an_import_mends_the_files_of_a_known_image() {
    let sandbox = Sandbox::new();
    let source = layout(&sandbox, "layout", "box:1");
    let before = sandbox.run(&["import", "--json", &source]).json();
    let domain = sandbox.path("store/domains/default");
    let (images, layers) = (domain.join("images"), domain.join("layers"));
    for (directory, suffix) in [(&images, ".erofs"), (&layers, ".dump.zst"), (&layers, ".split")] {
        let file = files_in(directory, suffix).remove(0);
        let content = fs::read(&file).unwrap();
        let mut altered = content.clone();
        let middle = altered.len() / 2;
        altered[middle..].fill(b'!');
        for damage in [None, Some(&altered[..]), Some(&content[..middle])] {
            // The kernel may protect the file from this test; then it is replaced.
            remove(&file).unwrap();
            if let Some(damage) = damage {
                fs::write(&file, damage).unwrap();
            }
            // A layer without a split is only one that cannot be exported.
            if damage.is_some() || suffix != ".split" {
                sandbox.run(&["fsck"]).fails_with(4);
            }
            let mended = sandbox.run(&["import", "--json", &source, "--name", "again:1"]).json();
            assert_eq!(mended["image"], before["image"], "{suffix}");
            assert_eq!(mended["known"], false, "{suffix}");
            assert!(fs::read(&file).unwrap() == content, "{suffix}");
            sandbox.run(&["fsck"]).ok();
            let known = sandbox.run(&["import", "--json", &source, "--name", "again:1"]).json();
            assert_eq!(known["known"], true);
        }
    }
}

/// The hint of an error about damage is a command, and the command mends it.
#[test]
fn a_mount_of_a_damaged_image_names_the_command_that_mends_it() {
    let test = "a_mount_of_a_damaged_image_names_the_command_that_mends_it";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let source = layout(&sandbox, "layout", "box:1");
    sandbox.run(&["import", &source]).ok();
    let mounted = sandbox.text("mounted");
    let image = files_in(&sandbox.path("store/domains/default/images"), ".erofs").remove(0);
    let mut bytes = fs::read(&image).unwrap();
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    let object = sandbox.object("box:1", "/big");
    for file in [&image, &object] {
        remove(file).unwrap();
        if file == &image {
            fs::write(file, &bytes).unwrap();
        }
        let failed = sandbox.run(&["mount", "--create", "--verify", "box:1", &mounted]);
        failed.fails_with(4);
        assert!(failed.stderr.contains("fsck --repair --from SOURCE"), "{}", failed.stderr);
        sandbox.run(&["fsck", "--repair", "--from", &source]).ok();
        sandbox.run(&["mount", "--create", "--verify", "box:1", &mounted]).ok();
        sandbox.run(&["umount", &mounted]).ok();
    }
}

/// Where a user may have no more threads, or a process no more open files, an import panicked or left its
/// staging directory. It has to end with an error that names the limit, or to do with what it gets.
#[test]
fn an_import_ends_cleanly_at_the_limits_of_the_process() {
    let test = "an_import_ends_cleanly_at_the_limits_of_the_process";
    let programs = ["setpriv", "prlimit"].map(program);
    let [Some(setpriv), Some(prlimit)] = programs else {
        return skip(test, "needs setpriv and prlimit");
    };
    if !rustix::process::geteuid().is_root() {
        return skip(test, "needs root, to become a user without processes");
    }
    let sandbox = Sandbox::new();
    let source = layout(&sandbox, "layout", "box:1");
    let tree = sandbox.tree("tree").display().to_string();
    // Nobody else runs as this user, so the limit of its threads counts this process alone.
    let user = (3_000_000 + std::process::id()).to_string();
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(sandbox.path("."), open).unwrap();
    let run = |limit: &str, store: &str, source: &str| {
        let mut command = Command::new(&prlimit);
        command.arg(limit).arg(&setpriv).args(["--reuid", &user, "--clear-groups"]);
        command.arg(cofolio()).args(["--store", store, "import", source, "--name", "box:1"]);
        common::Ran::of(command.output().unwrap())
    };
    let tried = run("--nofile=1024", &sandbox.text("store-tried"), &source);
    if tried.code != 0 {
        return skip(test, &format!("another user cannot run the program: {}", tried.stderr));
    }
    let mut outcomes = Vec::new();
    for (what, limits) in [("nproc", 1..=12), ("nofile", 5..=40)] {
        for limit in limits {
            for source in [&source, &tree] {
                let store = sandbox.path(&format!("store-{what}-{limit}"));
                let ran = run(&format!("--{what}={limit}"), store.to_str().unwrap(), source);
                assert!(!ran.stderr.contains("panicked"), "{what} {limit}: {}", ran.stderr);
                outcomes.push((what, ran.code));
                let named = match what {
                    "nproc" => ["pids.max", "Resource temporarily unavailable"],
                    // Some limits are too low even to load the program.
                    _ => ["ulimit -n", "shared libraries"],
                };
                assert!(
                    ran.code == 0 || named.iter().any(|name| ran.stderr.contains(name)),
                    "{what} {limit}: {} {}",
                    ran.code,
                    ran.stderr
                );
            }
        }
    }
    for what in ["nproc", "nofile"] {
        assert!(outcomes.contains(&(what, 0)), "{what}: no limit was enough");
        assert!(
            outcomes.iter().any(|&(w, code)| w == what && code != 0),
            "{what}: none was too low"
        );
    }
}
