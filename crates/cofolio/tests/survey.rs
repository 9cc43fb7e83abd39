//! `cofolio survey` on a store that the real podman and skopeo have filled.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Sandbox, program, skip};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// podman mounts its root on itself, so that it must be unmounted to be removed.
struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["--lazy", "--quiet"]).arg(&self.0).status();
    }
}

fn regular(dir: &Path, each: &mut dyn FnMut(&Path, &fs::Metadata)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = path.symlink_metadata().unwrap();
        if meta.is_dir() {
            regular(&path, each);
        } else if meta.is_file() {
            each(&path, &meta);
        }
    }
}

type Times = BTreeMap<PathBuf, [i64; 6]>;

fn times(dir: &Path, into: &mut Times) {
    let meta = dir.symlink_metadata().unwrap();
    let (atime, mtime) = ((meta.atime(), meta.atime_nsec()), (meta.mtime(), meta.mtime_nsec()));
    let ctime = (meta.ctime(), meta.ctime_nsec());
    into.insert(dir.to_owned(), [atime.0, atime.1, mtime.0, mtime.1, ctime.0, ctime.1]);
    if meta.is_dir() {
        let paths: BTreeSet<PathBuf> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        paths.iter().for_each(|path| times(path, into));
    }
}

/// The figures are those that somebody else would count, and nothing in the store is different afterwards.
#[test]
fn two_versions_in_podmans_store() {
    let test = "two_versions_in_podmans_store";
    if !rustix::process::geteuid().is_root() {
        return skip(test, "needs root");
    }
    if program("skopeo").is_none() || program("podman").is_none() {
        return skip(test, "no skopeo or no podman (tools/setup test)");
    }
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../corpus/out");
    let corpus = std::env::var_os("COFOLIO_CORPUS").map_or(corpus, PathBuf::from).join("redis");
    if !corpus.is_dir() {
        return skip(test, "no real images (run corpus/build)");
    }
    let sandbox = Sandbox::new();
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path().join("storage");
    let _unmounted = Unmounted(root.join("overlay"));
    for version in ["old", "new"] {
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["--insecure-policy", "copy", "--quiet"]);
        skopeo.arg(format!("oci:{}", corpus.join(version).display()));
        let run = temporary.path().join("run");
        let to = format!("[overlay@{}+{}]localhost/redis:{version}", root.display(), run.display());
        let output = skopeo.arg(format!("containers-storage:{to}")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() && said.contains("supported") {
            return skip(test, &format!("podman's overlay driver: {said}"));
        }
        assert!(output.status.success(), "{said}");
    }

    // Counted here in the plainest way. It reads everything, and so makes all of it resident.
    let (mut disk, mut all, mut files) = (0, 0, 0);
    let mut contents: HashMap<Vec<u8>, u64> = HashMap::new();
    let mut pages = HashSet::new();
    let (mut by_file, mut links) = (0, HashSet::new());
    rustix::fs::sync();
    let page = 4096;
    if rustix::param::page_size() != page {
        return skip(test, "pages of another size than 4 KiB");
    }
    for layer in fs::read_dir(root.join("overlay")).unwrap() {
        let diff = layer.unwrap().path().join("diff");
        if !diff.is_dir() {
            continue;
        }
        regular(&diff, &mut |path, meta| {
            if meta.len() == 0 || !links.insert(meta.ino()) {
                return;
            }
            let content = fs::read(path).unwrap();
            let size = (content.len().div_ceil(page) * page) as u64;
            files += 1;
            disk += meta.blocks() * 512;
            all += size;
            for chunk in content.chunks(page) {
                let mut whole = chunk.to_vec();
                whole.resize(page, 0);
                pages.insert(Sha256::digest(&whole).to_vec());
            }
            let least = contents.entry(Sha256::digest(&content).to_vec()).or_insert_with(|| {
                by_file += size;
                u64::MAX
            });
            *least = (*least).min(meta.blocks() * 512);
        });
    }
    // The first look itself changes when directories were last read; the second finds it done (relatime).
    times(&root, &mut Times::new());
    let mut before = Times::new();
    times(&root, &mut before);

    let ran = sandbox.run(&["survey", "--podman-root", root.to_str().unwrap(), "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    let mut after = Times::new();
    times(&root, &mut after);
    assert_eq!(before.len(), after.len());
    for (path, times) in &before {
        assert_eq!(times, &after[path], "{}", path.display());
    }
    assert_eq!(report["files"], files);
    assert_eq!(report["contents"], contents.len());
    assert_eq!(report["disk"]["bytes"], disk);
    assert_eq!(report["disk"]["by_file_bytes"], contents.values().sum::<u64>());
    let cache = &report["page_cache"];
    assert_eq!(cache["pages_sampled"], 1);
    assert_eq!(cache["all"]["bytes"], all);
    assert_eq!(cache["all"]["by_file_bytes"], by_file);
    assert_eq!(cache["all"]["by_page_bytes"], (pages.len() * page) as u64);
    // Two versions of one image: most of it is there twice.
    assert!(disk > contents.values().sum::<u64>() * 5 / 4);
    let of = |kind: &str| cache["now"][kind].as_u64().unwrap();
    assert!(of("bytes") >= of("by_file_bytes") && of("by_file_bytes") >= of("by_page_bytes"));
    assert_eq!(report["stores"][0]["images"], 2);
    assert_eq!(report["stores"][0]["containers"], 0);
    assert_eq!(report["unseen_files"], 0);

    let text = sandbox.run(&["survey", "--podman-root", root.to_str().unwrap()]);
    assert!(text.stdout.contains("page cache, all read"), "{}", text.stdout);
    let gone = sandbox.run(&["survey", "--podman-root", "/nonexistent"]);
    assert_eq!(gone.code, 3, "{}", gone.stderr);
}
