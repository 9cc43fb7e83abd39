//! Docker's own store of images, with the driver `overlay2`. Images that it keeps in containerd's
//! stores are [`containerd`](super::containerd)'s, in the namespace `moby`.
//!
//! ```text
//! <root>/image/overlay2/imagedb/content/sha256/<hex>              image configs
//! <root>/image/overlay2/layerdb/sha256/<chain-id>/cache-id        layers: the directory with the files
//!                                                /parent          chain-id of the layer below, if there is one
//! <root>/image/overlay2/layerdb/mounts/<container>/mount-id       containers: the directory with the changes,
//!                                                 /parent         chain-id of their image
//! <root>/overlay2/<cache-id or mount-id>/diff
//! ```

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{
    Container, EngineError, Inventory, LiveMounts, is_id, is_root, read_json, read_text,
    user_config, user_data,
};

/// The part of `daemon.json` that says where Docker is.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Configuration {
    #[serde(default, rename = "data-root")]
    data_root: PathBuf,
}

/// Docker's root: as its configuration says, if none is given. Fails if that cannot be read.
pub fn root(given: Option<&Path>) -> Result<PathBuf, EngineError> {
    if let Some(root) = given {
        return Ok(root.to_owned());
    }
    let (settings, default) = match is_root() {
        true => ("/etc/docker/daemon.json".into(), "/var/lib/docker".into()),
        false => (user_config().join("docker/daemon.json"), user_data().join("docker")),
    };
    let configured: Configuration = read_json(&settings)?.unwrap_or_default();
    let root = Some(configured.data_root).filter(|root| !root.as_os_str().is_empty());
    Ok(root.unwrap_or(default))
}

/// The root of the containerd that a Docker without the machine's one runs for itself.
pub fn own_containerd(root: &Path) -> PathBuf {
    root.join("containerd/daemon")
}

/// The layers in Docker's own store, and its containers with their mounts; `None` if it has none.
pub fn inventory(root: &Path, mounts: &LiveMounts) -> Result<Option<Inventory>, EngineError> {
    let mut found = Inventory::new("Docker", root, "overlay2");
    let image = root.join("image");
    let drivers = names(&image)?;
    for driver in drivers.iter().filter(|driver| *driver != "overlay2") {
        if !names(&image.join(driver).join("layerdb/sha256"))?.is_empty() {
            let what = format!("layers of Docker's driver {driver:?} in {}", root.display());
            found.unseen.push(format!("{what}: only those of overlay2 are looked at"));
        }
    }
    let image = image.join("overlay2");
    let layerdb = image.join("layerdb");
    if !layerdb.is_dir() {
        return Ok((!found.unseen.is_empty()).then_some(found));
    }
    found.images = names(&image.join("imagedb/content/sha256"))?.len() as u64;
    let files = |id: &str| root.join("overlay2").join(id).join("diff");

    let mut layers: HashMap<String, (usize, String)> = HashMap::new();
    for chain in names(&layerdb.join("sha256"))? {
        let dir = layerdb.join("sha256").join(&chain);
        // Removed since the directory was listed.
        let Some(cache) = id(&dir.join("cache-id"))? else { continue };
        layers.insert(
            format!("sha256:{chain}"),
            (found.layers.len(), text(&dir.join("parent"))?.unwrap_or_default()),
        );
        found.layers.push(files(&cache));
    }
    for container in names(&layerdb.join("mounts"))? {
        let dir = layerdb.join("mounts").join(&container);
        let Some(mount) = id(&dir.join("mount-id"))? else { continue };
        let top = text(&dir.join("parent"))?.unwrap_or_default();
        let get = |name: &str| layers.get(name).map(|(index, next)| (*index, next.as_str()));
        let below = match super::inventory::chain(&top, get) {
            Ok(below) => below,
            // Its image has come since the layers were listed.
            Err(what) => {
                found.unseen.push(format!("container {container}: {what}"));
                continue;
            }
        };
        let mounted = mounts.has_upper(&files(&mount));
        found.containers.push(Container { id: container, layers: below, mounted });
    }
    Ok(Some(found))
}

/// The names in a directory, sorted; none if it is not there.
fn names(dir: &Path) -> Result<Vec<String>, EngineError> {
    let failed = |source| EngineError::Io { path: dir.to_owned(), source };
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

/// A file with one line, without its end; `None` if it is not there.
fn text(path: &Path) -> Result<Option<String>, EngineError> {
    Ok(read_text(path)?.map(|text| text.trim_end().to_owned()))
}

/// A line that becomes part of a path.
fn id(path: &Path) -> Result<Option<String>, EngineError> {
    match text(path)? {
        Some(id) if !is_id(&id) => {
            let what = format!("{id:?} is no name of a directory of overlay2");
            Err(EngineError::Document { path: path.to_owned(), what })
        }
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Two images on one layer, a container of the second one, as dockerd lays them out.
    #[test]
    fn layers_and_containers() {
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let mounts = LiveMounts::default();
        assert_eq!(inventory(root, &mounts).unwrap(), None);
        let db = "image/overlay2";
        for image in ["1", "2"] {
            write(&format!("{db}/imagedb/content/sha256/{image}"), "{}");
        }
        write(&format!("{db}/layerdb/sha256/aa/cache-id"), "base");
        for (chain, cache) in [("bb", "one"), ("cc", "two")] {
            write(&format!("{db}/layerdb/sha256/{chain}/cache-id"), cache);
            write(&format!("{db}/layerdb/sha256/{chain}/parent"), "sha256:aa");
        }
        write(&format!("{db}/layerdb/mounts/c0/mount-id"), "changes");
        write(&format!("{db}/layerdb/mounts/c0/init-id"), "changes-init");
        write(&format!("{db}/layerdb/mounts/c0/parent"), "sha256:cc");
        write("image/vfs/layerdb/sha256/dd/cache-id", "other");
        let found = inventory(root, &mounts).unwrap().unwrap();
        assert_eq!((found.images, found.unseen.len()), (2, 1));
        let dirs = ["base", "one", "two"].map(|id| root.join(format!("overlay2/{id}/diff")));
        assert_eq!(found.layers, dirs);
        let container = Container { id: "c0".into(), layers: vec![0, 2], mounted: false };
        assert_eq!(found.containers, [container]);

        write(&format!("{db}/layerdb/sha256/aa/parent"), "sha256:cc");
        let found = inventory(root, &mounts).unwrap().unwrap();
        assert!(found.containers.is_empty() && found.unseen[1].contains("no end of layers"));
        write(&format!("{db}/layerdb/sha256/aa/cache-id"), "../../etc");
        assert!(
            inventory(root, &mounts).unwrap_err().to_string().contains("no name of a directory")
        );
    }
}
