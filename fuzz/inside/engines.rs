//! The module `source::engine::fuzz` of crate image, which only `--cfg fuzzing` builds: it sees
//! what is private there.
//!
//! Each function takes any bytes and panics where an invariant of its target in `fuzz_targets/`
//! does not hold.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use std::path::{Component, Path};

use super::bolt::tests::{self as sample, bucket, leaf};
use super::bolt::{Bucket, Database};
use super::containerd::{self, Containerd, Location};
use super::containers_storage::{self, Container, Image, Layer, Storage};
use super::{Inventory, LiveMounts, docker};

const ROOT: &str = "/store";

/// A database of containerd's, and what its records say: any bytes behind good metas, any bytes, or
/// a sample with some bytes changed.
pub fn database(data: &[u8]) {
    let mut bytes = match data.split_first() {
        Some((0, pages)) => sample::file(2, &[pages.to_vec()]),
        Some((1, raw)) => raw.to_vec(),
        Some((2, _)) => sample::database(),
        _ => records(),
    };
    if let Some((2.., changes)) = data.split_first() {
        let end = bytes.len() - 2 * sample::PAGE;
        for change in changes.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % end;
            bytes[2 * sample::PAGE + at] = change[2];
        }
    }
    let length = bytes.len();
    let Ok(database) = Database::new(bytes) else { return };
    if let Ok(root) = database.root() {
        assert!(sample::held(&root) <= length, "it holds more than the file");
        containerd(&root);
    }
}

/// Records as containerd has them: two images, and a container's snapshot on two layers.
fn records() -> Vec<u8> {
    let all = |entries: &[(&str, bool, &[u8])]| bucket(0, &leaf(0, entries));
    let target = |digest: &[u8]| {
        let fields: [(&str, bool, &[u8]); 3] =
            [("digest", false, digest), ("mediatype", false, b"m"), ("size", false, &[0xac, 2])];
        all(&[("target", true, &all(&fields))])
    };
    let snapshot = |id: u8, kind: u8, parent: &str| {
        all(&[("id", false, &[id]), ("kind", false, &[kind]), ("parent", false, parent.as_bytes())])
    };
    let images = all(&[
        ("docker.io/library/a:1", true, &target(b"sha256:aaa1")),
        ("docker.io/library/b@sha256:aaa1", true, &target(b"sha256:aaa1")),
        ("registry/c:2", true, &target(b"sha256:bbb2")),
    ]);
    let used = all(&[("k", true, &all(&[("name", false, b"n")]))]);
    let namespace = all(&[
        ("images", true, &images),
        ("snapshots", true, &all(&[("other", true, &used), ("overlayfs", true, &used)])),
    ]);
    let snapshots = all(&[
        ("default/1/x", true, &snapshot(1, 3, "")),
        ("default/2/y", true, &snapshot(2, 3, "default/1/x")),
        ("default/3/c", true, &snapshot(3, 2, "default/2/y")),
        ("default/4/extract-d", true, &snapshot(4, 2, "default/1/x")),
        ("default/5/e", true, &snapshot(5, 1, "default/2/y")),
    ]);
    let version = leaf(3, &[("default", true, &namespace), ("snapshots", true, &snapshots)]);
    sample::file(2, &[leaf(2, &[("v1", true, &bucket(3, &[]))]), version])
}

fn containerd(records: &Bucket<'_>) {
    for namespace in [None, Some("default".to_owned())] {
        let location = Location { root: None, namespace };
        let Ok(store) = Containerd::of(ROOT.into(), &location, records) else { continue };
        for image in store.images() {
            assert!(!image.names.is_empty());
            for name in &image.names {
                let found = store.find(name);
                // One that several targets have is refused, naming all of them.
                assert!(found.is_ok() || found.unwrap_err().to_string().contains("could be each"));
            }
        }
        if let Ok(inventory) = store.inventory_with(records, &LiveMounts::default()) {
            consistent(&inventory);
        }
    }
}

fn consistent(inventory: &Inventory) {
    inventory.layers.iter().for_each(|path| below_root(path));
    for container in &inventory.containers {
        assert!(container.layers.iter().all(|&layer| layer < inventory.layers.len()));
        assert!(!container.mounted);
    }
}

fn below_root(path: &Path) {
    let rest = path.strip_prefix(ROOT).unwrap();
    assert!(rest.components().all(|part| matches!(part, Component::Normal(_))), "{path:?}");
}

/// The records and settings of podman and Docker, and names of images. Parts end with a zero byte.
pub fn documents(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind {
        0 => podman(rest),
        _ => settings(rest),
    }
}

/// `images.json`, `layers.json`, `containers.json`, and an image's name.
fn podman(data: &[u8]) {
    let mut parts = data.splitn(4, |&byte| byte == 0);
    let mut next = || parts.next().unwrap_or_default();
    let Ok(images) = serde_json::from_slice::<Vec<Image>>(next()) else { return };
    let layers = serde_json::from_slice::<Vec<Layer>>(next()).unwrap_or_default();
    let containers = serde_json::from_slice::<Vec<Container>>(next()).unwrap_or_default();
    let asked = String::from_utf8_lossy(next());
    for driver in ["overlay", "vfs"] {
        let of = Storage::of(ROOT.into(), driver, images.clone(), layers.clone());
        let Ok(store) = of else { return };
        let _ = store.find(&asked);
        for image in store.images() {
            for name in &image.names {
                let found = store.find(name);
                assert!(found.is_ok() || found.unwrap_err().to_string().contains("could be each"));
            }
            if let Ok(path) = store.document(image, "manifest") {
                below_root(&path);
            }
            if let Ok(chain) = store.chain(&image.layer) {
                assert!(chain.first().is_none_or(|lowest| lowest.parent.is_empty()));
                assert!(chain.windows(2).all(|two| two[1].parent == two[0].id));
                assert!(chain.last().map_or("", |top| &top.id) == image.layer);
                chain.into_iter().for_each(|layer| below_root(&store.files(layer)));
            }
        }
        consistent(&store.inventory_with(containers.clone(), &LiveMounts::default()));
    }
}

/// Settings that say where stores are, and names of images in them.
fn settings(data: &[u8]) {
    let _ = serde_json::from_slice::<docker::Configuration>(data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = toml::from_str::<containers_storage::Configuration>(text);
    let _ = toml::from_str::<containerd::Configuration>(text);
    if let Ok(found) = containers_storage::Reference::parse(text) {
        assert!(
            !found.name.is_empty() && found.location.root.is_none_or(|root| root.is_absolute())
        );
    }
    if let Ok(found) = containerd::Reference::parse(text) {
        assert!(
            !found.name.is_empty() && found.location.root.is_none_or(|root| root.is_absolute())
        );
    }
}
