//! What an engine has unpacked on this machine.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// An engine's images as directories, and its containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The engine.
    pub engine: &'static str,
    /// Where its store is.
    pub root: PathBuf,
    /// What it stores layers with.
    pub driver: &'static str,
    /// Images, names of the same being one.
    pub images: u64,
    /// The directory with the files of each layer of an image.
    pub layers: Vec<PathBuf>,
    /// Its containers, running or not.
    pub containers: Vec<Container>,
    /// What could not be examined, in words.
    pub unseen: Vec<String>,
}

/// A container of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// The layers of its image, lowest first, as indices into [`Inventory::layers`].
    pub layers: Vec<usize>,
    /// Whether its root is mounted.
    pub mounted: bool,
}

impl Inventory {
    pub(super) fn new(engine: &'static str, root: &Path, driver: &'static str) -> Self {
        let (layers, containers, unseen) = Default::default();
        Self { engine, root: root.to_owned(), driver, images: 0, layers, containers, unseen }
    }
}

/// Layers below one another. Engines stop at 127, overlayfs at 500.
const DEPTH_MAX: usize = 1024;

/// A layer and those below it, lowest first. `get` gives one and the name of the next, which is
/// empty below the lowest. The error says where they end.
pub(super) fn chain<'a, T>(
    top: &'a str,
    get: impl Fn(&str) -> Option<(T, &'a str)>,
) -> Result<Vec<T>, String> {
    let (mut chain, mut name) = (Vec::new(), top);
    while !name.is_empty() {
        let found = get(name).filter(|_| chain.len() < DEPTH_MAX);
        let (layer, below) =
            found.ok_or_else(|| format!("no layer {name:?}, or no end of layers"))?;
        chain.push(layer);
        name = below;
    }
    chain.reverse();
    Ok(chain)
}

/// Where something is mounted, and the directories of changes of overlays, in this mount namespace.
#[derive(Debug, Default)]
pub struct LiveMounts {
    targets: HashSet<PathBuf>,
    uppers: HashSet<PathBuf>,
}

impl LiveMounts {
    /// From what is mounted: each mount's target and the upper directories of overlays.
    pub fn new(
        targets: impl IntoIterator<Item = PathBuf>,
        uppers: impl IntoIterator<Item = PathBuf>,
    ) -> Self {
        Self { targets: targets.into_iter().collect(), uppers: uppers.into_iter().collect() }
    }

    pub(super) fn has_target(&self, path: &Path) -> bool {
        has(&self.targets, path)
    }

    pub(super) fn has_upper(&self, path: &Path) -> bool {
        has(&self.uppers, path)
    }
}

/// A store's root can be a symbolic link, which the kernel resolves in targets.
fn has(paths: &HashSet<PathBuf>, path: &Path) -> bool {
    paths.contains(path) || path.canonicalize().is_ok_and(|path| paths.contains(&path))
}
