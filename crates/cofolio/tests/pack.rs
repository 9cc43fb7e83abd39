//! `cofolio pack`: the kernel and fsck.erofs find the whole image over its segments.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Sandbox, can_mount, fsck_erofs, listing, real_redis, skip, unlock};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::Value;

fn pack(sandbox: &Sandbox, args: &[&str]) -> Value {
    sandbox.run(&[&["pack", "--json"], args].concat()).json()[0].take()
}

fn file_of(sandbox: &Sandbox, name: String) -> PathBuf {
    sandbox.path("store/domains/default/segments").join(name)
}

/// The files of a pack: itself, and its segments.
fn files(sandbox: &Sandbox, report: &Value) -> (PathBuf, Vec<PathBuf>) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let (image, digest) = (text(&report["image"]), text(&report["pack"]));
    let segments = report["segments"].as_array().unwrap();
    let segments = segments.iter().map(|it| file_of(sandbox, format!("{}.segment", text(it))));
    (file_of(sandbox, format!("{image}.{digest}.pack")), segments.collect())
}

/// What the kernel and fsck.erofs see of a pack is what a mount of the image shows.
fn check(test: &str, sandbox: &Sandbox, image: &str, report: &Value) {
    let mounted = sandbox.text("mounted");
    sandbox.run(&["mount", "--create", image, &mounted]).ok();
    let expected = listing(Path::new(&mounted));
    sandbox.run(&["umount", &mounted]).ok();
    let (pack, segments) = files(sandbox, report);
    match fsck_erofs() {
        None => skip(test, "no fsck.erofs that knows digests"),
        Some(fsck) => {
            let devices = segments.iter().map(|path| format!("--device={}", path.display()));
            let mut command = Command::new(fsck);
            let said = command.arg("--xattr-inode-digest").args(devices).arg(&pack).output();
            let said = said.unwrap();
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        }
    }
    let top = sandbox.dir("top");
    let devices: Vec<_> =
        segments.iter().map(|path| format!("device={}", path.display())).collect();
    let options = CString::new(devices.join(",")).unwrap();
    match mount(&pack, &top, "erofs", MountFlags::RDONLY, &*options) {
        Err(rustix::io::Errno::NOTBLK) => {
            return skip(test, "this kernel mounts no EROFS without a block device");
        }
        other => other.unwrap(),
    }
    let found = std::panic::catch_unwind(|| listing(&top));
    unmount(&top, UnmountFlags::DETACH).unwrap();
    assert_eq!(found.unwrap(), expected);
}

#[test]
fn packs_hold_what_their_images_hold_and_share_what_is_the_same() {
    let test = "packs_hold_what_their_images_hold_and_share_what_is_the_same";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let tree = sandbox.tree("tree");
    fs::write(tree.join("empty"), b"").unwrap();
    fs::write(tree.join("again"), vec![b'x'; 100_000]).unwrap();
    fs::hard_link(tree.join("big"), tree.join("etc/hard")).unwrap();
    let sparse = fs::File::create(tree.join("sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    sparse.write_all_at(b"data", 1_000_000).unwrap();
    Command::new("mkfifo").arg(tree.join("pipe")).status().unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:1", tree.to_str().unwrap()]).ok();
    fs::write(tree.join("etc/hostname"), "another\n").unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:2", tree.to_str().unwrap()]).ok();

    let one = pack(&sandbox, &["box:1"]);
    check(test, &sandbox, "box:1", &one);
    let two = pack(&sandbox, &["box:2"]);
    check(test, &sandbox, "box:2", &two);
    assert_eq!((&one["new_segments"], &two["new_segments"]), (&1.into(), &1.into()));
    assert_eq!(two["new_bytes"], "another\n".len());
    assert!(two["segments"].as_array().unwrap().contains(&one["segments"][0]));
    let again = pack(&sandbox, &["box:1"]);
    assert_eq!((&again["was_there"], &again["pack"]), (&true.into(), &one["pack"]));
    assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));

    // What is left of an image that is gone can be got rid of, though another needs a part of it.
    fs::remove_file(tree.join("big")).unwrap();
    fs::remove_file(tree.join("etc/hard")).unwrap();
    fs::remove_file(tree.join("again")).unwrap();
    fs::remove_file(tree.join("sparse")).unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:3", tree.to_str().unwrap()]).ok();
    pack(&sandbox, &["box:3"]);
    sandbox.run(&["rm", "box:1", "box:2"]).ok();
    let first = file_of(&sandbox, format!("{}.segment", one["segments"][0].as_str().unwrap()));
    sandbox.run(&["gc"]).ok();
    assert!(first.exists());
    let three = pack(&sandbox, &["--again", "box:3"]);
    check(test, &sandbox, "box:3", &three);
    let gone = sandbox.run(&["gc", "--json"]).json();
    assert!(gone["segments"].as_u64().unwrap() >= 1, "{gone}");
    assert!(!first.exists());
    check(test, &sandbox, "box:3", &three);

    sandbox.run(&["pack", "--remove", "box:3"]).ok();
    sandbox.run(&["pack", "--remove", "box:3"]).fails_with(3);
    sandbox.run(&["gc"]).ok();
    let left = fs::read_dir(sandbox.path("store/domains/default/segments")).unwrap();
    assert_eq!(left.count(), 0);
    sandbox.run(&["pack", "nowhere"]).fails_with(3);
}

#[test]
fn a_real_image_is_packed() {
    let test = "a_real_image_is_packed";
    let Some(layout) = real_redis(test).filter(|_| can_mount(test)) else { return };
    let sandbox = Sandbox::new();
    let source = format!("oci:{}", layout.display());
    sandbox.run(&["import", "--quiet", "--name", "redis:old", &source]).ok();
    check(test, &sandbox, "redis:old", &pack(&sandbox, &["redis:old"]));
}

/// An object that was altered must not get into a segment under its old name; a segment that was altered is removed
/// and made again.
#[test]
fn what_is_altered_is_not_packed_and_a_damaged_pack_is_made_again() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let alter = |path: &Path| {
        unlock(path).unwrap();
        let mut bytes = fs::read(path).unwrap();
        bytes[0] ^= 1;
        let temporary = path.with_extension("new");
        fs::write(&temporary, &bytes).unwrap();
        fs::set_permissions(&temporary, std::os::unix::fs::PermissionsExt::from_mode(0o444))
            .unwrap();
        fs::rename(temporary, path).unwrap();
    };
    let objects = sandbox.path("store/domains/default/objects");
    let big = cofolio_store::verity::digest(&[b'x'; 100_000]).object_path();
    alter(&objects.join(&big));
    let refused = sandbox.run(&["pack", "box:1"]);
    let error = refused.fails_with(4);
    assert!(error.stderr.contains(&big), "{}", error.stderr);
    let segments = sandbox.path("store/domains/default/segments");
    assert_eq!(fs::read_dir(&segments).unwrap().count(), 0);
    alter(&objects.join(&big));

    let report = pack(&sandbox, &["box:1"]);
    let (_, files) = files(&sandbox, &report);
    alter(&files[0]);
    assert!(sandbox.run(&["fsck"]).fails_with(4).stdout.contains("segment-altered"));
    sandbox.run(&["verify", "box:1"]).fails_with(4);
    let repaired = sandbox.run(&["fsck", "--repair", "--json"]).json();
    assert_eq!(repaired["unpacked"][0], report["image"]);
    assert_eq!(pack(&sandbox, &["box:1"])["pack"], report["pack"]);
    sandbox.run(&["verify", "box:1"]).ok();
}
