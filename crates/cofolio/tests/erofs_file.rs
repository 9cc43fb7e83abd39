//! `cofolio export IMAGE erofs:FILE`: a file that the kernel and fsck.erofs find the whole image in.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::Command;

use common::{Sandbox, can_mount, fsck_erofs, listing, real_redis, skip};

/// Exports an image and compares what the kernel and fsck.erofs see with what a mount of the store shows.
fn check(test: &str, sandbox: &Sandbox, image: &str) {
    let mounted = sandbox.text("mounted");
    sandbox.run(&["mount", "--create", image, &mounted]).ok();
    let expected = listing(Path::new(&mounted));
    sandbox.run(&["umount", &mounted]).ok();
    let fsck = fsck_erofs();
    let mut sizes = Vec::new();
    for how in [&[] as &[&str], &["--lz4"]] {
        let file = sandbox.path("image.erofs");
        let to = format!("erofs:{}", file.display());
        let exported =
            sandbox.run(&[&["export", "--json", "--replace", image, &to], how].concat()).json();
        let bytes = fs::read(&file).unwrap();
        assert_eq!(exported["digest"], cofolio_store::verity::digest(&bytes).to_string());
        assert_eq!(exported["size"], bytes.len());
        // The same every time, also over one that is there.
        let again = sandbox.run(&[&["export", "--quiet", "--replace", image, &to], how].concat());
        assert_eq!(again.ok().trim(), exported["digest"]);
        assert!(fs::read(&file).unwrap() == bytes);
        sizes.push(bytes.len());

        match &fsck {
            None => skip(test, "no fsck.erofs that knows digests"),
            Some(fsck) => {
                let said =
                    Command::new(fsck).arg("--xattr-inode-digest").arg(&file).output().unwrap();
                assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
            }
        }
        let top = sandbox.dir("top");
        let options = ["-t", "erofs", "-o", "ro,loop"];
        let mount = Command::new("mount").args(options).args([&file, &top]).output().unwrap();
        assert!(mount.status.success(), "{}", String::from_utf8_lossy(&mount.stderr));
        let found = std::panic::catch_unwind(|| listing(&top));
        assert!(
            Command::new("umount")
                .args(["--lazy".as_ref(), top.as_os_str()])
                .status()
                .unwrap()
                .success()
        );
        let found = found.unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, expected, "{how:?}");
        }
        assert_eq!(found.len(), expected.len());
    }
    assert!(sizes[1] < sizes[0], "{sizes:?}");
    // Nothing is left beside it.
    let names: Vec<_> =
        fs::read_dir(sandbox.path(".")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().starts_with('.')), "{names:?}");
}

/// A file of 1 TiB with hardly any data was imported in a second, but to pack or export it took minutes: its
/// zeros were read, written and hashed, and a table in the image had an entry for each few of them.
#[test]
fn holes_cost_nothing() {
    let test = "holes_cost_nothing";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let (size, middle) = (1_u64 << 40, (1_u64 << 39) + 4096);
    let data = b"data".repeat(5000);
    let tree = sandbox.dir("tree");
    let sparse = fs::File::create(tree.join("sparse")).unwrap();
    for at in [0, middle, size - 4096] {
        sparse.write_all_at(&data[..4096], at).unwrap();
    }
    sparse.write_all_at(&data, middle).unwrap();
    let source = format!("dir:{}", tree.display());
    sandbox.run(&["import", "--max-size", "4096", "--name", "sparse", &source]).ok();
    let file = sandbox.path("image.erofs");
    // The holes beside data that the image has: three granules of 16 MiB.
    for how in [&[] as &[&str], &["--lz4"]] {
        let to = format!("erofs:{}", file.display());
        let exported =
            sandbox.run(&[&["export", "--json", "--replace", "sparse", &to], how].concat()).json();
        assert!(exported["size"].as_u64().unwrap() < 49 << 20, "{exported}");
    }
    let packed = sandbox.run(&["pack", "--json", "sparse"]).json();
    let segments = sandbox.path("store/domains/default/segments");
    for found in fs::read_dir(segments).unwrap() {
        assert!(found.unwrap().metadata().unwrap().len() < 49 << 20, "{packed}");
    }
    // Compressed, holes are read and have blocks: it ran for an hour and wrote 32 GiB.
    let ran = sandbox.run(&["pack", "--lz4", "sparse"]);
    assert!(ran.code != 0 && ran.stderr.contains("64 GiB of holes"), "{}", ran.stderr);

    let top = sandbox.dir("top");
    let options = ["-t", "erofs", "-o", "ro,loop"];
    let mount = Command::new("mount").args(options).args([&file, &top]).output().unwrap();
    assert!(mount.status.success(), "{}", String::from_utf8_lossy(&mount.stderr));
    let found = fs::File::open(top.join("sparse")).unwrap();
    let read = |at: u64, len: usize| {
        let mut bytes = vec![1; len];
        found.read_exact_at(&mut bytes, at).map(|()| bytes)
    };
    let (length, holes) = (found.metadata().unwrap().len(), [4096, middle - 4096, size - 8192]);
    let (pieces, holes) = (
        [read(0, 4096), read(middle, data.len()), read(size - 4096, 4096)],
        holes.map(|at| read(at, 4096)),
    );
    drop(found);
    let umounted = Command::new("umount").arg("--lazy").arg(&top).status().unwrap();
    assert!(umounted.success());
    assert_eq!(length, size);
    for (piece, expected) in pieces.into_iter().zip([&data[..4096], &data, &data[..4096]]) {
        assert!(piece.unwrap() == expected);
    }
    assert!(holes.into_iter().all(|hole| hole.unwrap() == [0; 4096]));
}

#[test]
fn a_tree_goes_to_a_file_and_is_all_there() {
    let test = "a_tree_goes_to_a_file_and_is_all_there";
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
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"data", 1_000_000).unwrap();
    Command::new("mkfifo").arg(tree.join("pipe")).status().unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:1", tree.to_str().unwrap()]).ok();
    check(test, &sandbox, "box:1");
    // Zeros take no room.
    let meta = sandbox.path("image.erofs").metadata().unwrap();
    assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
}

/// A real image, where the corpus has been built.
#[test]
fn a_real_redis_goes_to_a_file() {
    let test = "a_real_redis_goes_to_a_file";
    if !can_mount(test) {
        return;
    }
    let Some(layout) = real_redis(test) else { return };
    let sandbox = Sandbox::new();
    sandbox.run(&["import", "--quiet", "--name", "redis", layout.to_str().unwrap()]).ok();
    check(test, &sandbox, "redis");
}

/// Damage is found, and what was at the destination stays; so it does where the request makes no sense.
#[test]
fn a_file_is_complete_or_as_it_was() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let file = sandbox.path("file");
    fs::write(&file, b"before").unwrap();
    let to = format!("erofs:{}", file.display());
    sandbox.run(&["export", "box:1", &to, "--compress", "zstd"]).fails_with(2);
    sandbox.run(&["export", "box:1", &format!("oci:{}", file.display()), "--lz4"]).fails_with(2);
    sandbox.run(&["export", "none:1", &to]).fails_with(3);
    sandbox.run(&["export", "box:1", "erofs:"]).fails_with(2);
    let dir = sandbox.dir("dir");
    sandbox.run(&["export", "box:1", &format!("erofs:{}", dir.display())]).fails_with(2);
    let object = cofolio_store::verity::digest(b"node\n").to_string();
    let object = format!("store/domains/default/objects/{}/{}", &object[..2], &object[2..]);
    common::overwrite(&sandbox.path(&object), b"nodE\n").unwrap();
    for how in [&[] as &[&str], &["--lz4"]] {
        let failed = sandbox.run(&[&["export", "--replace", "box:1", &to], how].concat());
        failed.fails_with(4);
        assert!(failed.stderr.contains("its content has digest"), "{}", failed.stderr);
    }
    assert_eq!(fs::read(&file).unwrap(), b"before");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}
