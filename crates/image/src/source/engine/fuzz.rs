//! What the targets of `fuzz/` call: built with `--cfg fuzzing` only, and no part of the library otherwise.
//!
//! Each function takes any bytes and panics if something does not hold that must; `fuzz/fuzz_targets/` says
//! what.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use std::path::{Component, Path};

use super::bolt::{self, Bucket};
use super::containerd::{self, Containerd, Place};
use super::containers_storage::{self, Container, Image, Layer, Storage};
use super::{Inventory, LiveMounts, docker};

const ROOT: &str = "/store";

/// A database of containerd's, and what its records say.
pub fn database(data: &[u8]) {
    bolt::fuzz(data, containerd);
}

fn containerd(records: &Bucket<'_>) {
    for namespace in [None, Some("default".to_owned())] {
        let place = Place { root: None, namespace };
        let Ok(store) = Containerd::of(ROOT.into(), &place, records) else { continue };
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
        assert!(!found.name.is_empty() && found.place.root.is_none_or(|root| root.is_absolute()));
    }
    if let Ok(found) = containerd::Reference::parse(text) {
        assert!(!found.name.is_empty() && found.place.root.is_none_or(|root| root.is_absolute()));
    }
}
