//! `cofolio-bench share` on two tiny images whose pages can be counted by hand.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test panics, and says what it skips"
)]

mod report;

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use report::counted;
use serde_json::json;
use sha2::{Digest, Sha256};

const PAGE: usize = 4096;

/// Why this machine cannot run the benchmark, if so.
fn skip(test: &str) -> bool {
    let reason = if !rustix::process::geteuid().is_root() {
        "not root"
    } else if !fs::read_to_string("/proc/filesystems").unwrap().contains("overlay") {
        "no overlayfs"
    } else if rustix::param::page_size() != PAGE {
        "the counts below are for pages of 4 KiB"
    } else {
        return false;
    };
    println!("SKIP {test}: {reason}");
    true
}

/// Bytes that no other seed gives.
fn bytes(seed: u8, len: usize) -> Vec<u8> {
    let mut state = u32::from(seed).wrapping_mul(2_654_435_761) + 1;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(step).collect()
}

/// An OCI layout with one image; layers are what `fill` puts into a directory each.
fn layout(dir: &Path, layers: &[&dyn Fn(&Path)]) {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |content: &[u8]| -> (String, usize) {
        let hex: String = Sha256::digest(content).iter().map(|b| format!("{b:02x}")).collect();
        fs::write(blobs.join(&hex), content).unwrap();
        (format!("sha256:{hex}"), content.len())
    };
    let mut descriptors = Vec::new();
    let mut diff_ids = Vec::new();
    for fill in layers {
        let tree = tempfile::tempdir().unwrap();
        fill(tree.path());
        let tar = Command::new("tar")
            .args(["--create", "--format=pax", "--sort=name", "--file=-", "--directory"])
            .arg(tree.path())
            .arg(".")
            .output()
            .unwrap();
        assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
        let (digest, size) = put(&tar.stdout);
        diff_ids.push(digest.clone());
        descriptors.push(json!({
            "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest, "size": size,
        }));
    }
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let (config, config_size) = put(config.to_string().as_bytes());
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config, "size": config_size,
        },
        "layers": descriptors,
    });
    let (manifest, manifest_size) = put(manifest.to_string().as_bytes());
    let index = json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest, "size": manifest_size,
        }],
    });
    fs::write(dir.join("index.json"), index.to_string()).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn write(dir: &Path, name: impl AsRef<OsStr>, content: &[u8]) {
    let path = dir.join(name.as_ref());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

const KIB: usize = 1024;

/// Two images. Pages of distinct contents, and which image has them:
///
/// ```text
/// A  bin/app      old        75     B  bin/app      new        75
/// S  lib/same     both       50     a hard link lib/hard of it; a copy in lib/copy of new
/// C  etc/conf     both        1     in upper layers
/// N  a non-UTF-8 name, both   2
/// O  opaque/own   old         1     opaque/lower is hidden by the opaque directory
/// ```
/// `gone` is whited out in old and never read. `etc/empty` has no page.
fn pair(dir: &Path) -> [PathBuf; 2] {
    let odd_name = OsStr::from_bytes(b"odd-\xff-name");
    let base = move |app: u8| {
        move |tree: &Path| {
            write(tree, "bin/app", &bytes(app, 300 * KIB));
            write(tree, "lib/same", &bytes(b'S', 200 * KIB));
            fs::hard_link(tree.join("lib/same"), tree.join("lib/hard")).unwrap();
            symlink("same", tree.join("lib/link")).unwrap();
            write(tree, "etc/empty", b"");
            write(tree, odd_name, &bytes(b'N', PAGE + 1));
        }
    };
    let old_base = move |tree: &Path| {
        base(b'A')(tree);
        write(tree, "gone/file", &bytes(b'G', 50 * KIB));
        write(tree, "opaque/lower", &bytes(b'L', 50 * KIB));
    };
    let old_top = |tree: &Path| {
        write(tree, "etc/conf", b"conf");
        write(tree, ".wh.gone", b"");
        write(tree, "opaque/.wh..wh..opq", b"");
        write(tree, "opaque/own", b"own");
    };
    let new_base = move |tree: &Path| {
        base(b'B')(tree);
        write(tree, "lib/copy", &bytes(b'S', 200 * KIB));
    };
    let new_top = |tree: &Path| write(tree, "etc/conf", b"conf");
    let [old, new] = ["old", "new"].map(|name| dir.join(name));
    layout(&old, &[&old_base, &old_top]);
    layout(&new, &[&new_base, &new_top]);
    [old, new]
}

const UNIQUE_PAGES: u64 = 75 + 75 + 50 + 1 + 2 + 1;
const UNSHARED_PAGES: u64 = (75 + 50 + 1 + 2 + 1) + (75 + 50 + 50 + 1 + 2);
/// Of old: bin/app, lib/same, lib/hard, etc/empty, the odd name, etc/conf, opaque/own.
const FILES: u64 = 7 + 7;

fn share(dir: &Path, images: &[PathBuf; 2]) -> (Output, PathBuf) {
    let json = dir.join("result.json");
    let output = Command::new(env!("CARGO_BIN_EXE_cofolio-bench"))
        .args(["share", "--runs", "1", "--patience", "2", "--work"])
        .arg(dir.join("work"))
        .arg("--json")
        .arg(&json)
        .args(images)
        .output()
        .unwrap();
    (output, json)
}

#[test]
fn counts_the_pages_that_we_count_by_hand() {
    if skip("counts_the_pages_that_we_count_by_hand") {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let images = pair(dir.path());
    let (output, json) = share(dir.path(), &images);
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    eprintln!("{said}\n{complained}");

    let report = counted(&json);
    assert_eq!(report["expected"]["unique_pages"], UNIQUE_PAGES);
    assert_eq!(report["expected"]["unshared_pages"], UNSHARED_PAGES);
    assert_eq!(report["expected"]["files"], FILES);
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4, "two setups, by read and by mmap");
    for run in runs {
        let expected = match run["setup"].as_str().unwrap() {
            "unshared" => UNSHARED_PAGES,
            "cofolio" => UNIQUE_PAGES,
            other => panic!("what is {other}?"),
        };
        assert_eq!(run["content"]["resident"], expected, "{run}");
        assert_eq!(run["files_compared"], FILES);
    }
    assert!(said.contains("reduction"), "{said}");
    let left = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!left.contains(dir.path().to_str().unwrap()), "mounts are left behind");
}

/// The comparison with the source is what makes the rest worth anything: it must be able to fail.
#[test]
fn altered_content_is_found_and_named() {
    if skip("altered_content_is_found_and_named") {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let images = pair(dir.path());
    let (output, json) = share(dir.path(), &images);
    eprintln!("{}", String::from_utf8_lossy(&output.stderr));
    counted(&json);

    // Behind the benchmark's back, in what it has unpacked of the new image.
    let unpacked = fs::read_dir(dir.path().join("work/unpacked")).unwrap();
    let copy = unpacked
        .map(|image| image.unwrap().path().join("layers/0/lib/copy"))
        .find(|path| path.exists())
        .unwrap();
    let mut content = fs::read(&copy).unwrap();
    content[100 * KIB] ^= 1;
    fs::write(&copy, content).unwrap();

    let (output, _) = share(dir.path(), &images);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(complained.contains("lib/copy"), "{complained}");
}

#[test]
fn what_is_no_image_is_refused() {
    if skip("what_is_no_image_is_refused") {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let (output, _) = share(dir.path(), &[empty.clone(), empty]);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(complained.contains("index.json"), "{complained}");
}
