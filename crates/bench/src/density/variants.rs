//! The ways in which containers get their files, here as whole sets of containers.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use cofolio_image::pack::ImageContents;
use cofolio_node::mount::Mounter;
use cofolio_node::run_dir::RunDir;
use cofolio_store::{Digest, Domain};
use rustix::mount::UnmountFlags;
use serde::Serialize;

use crate::cleanup::for_all;
use crate::namespace::shapes::{ByHand, Kind, Ours, Shape};
use crate::source::{self, Unpacked};

use super::worker::Log;

/// A way in which containers get their files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Variant {
    /// The baseline: no mounts. A process maps a copy of the file that it maps in the others.
    #[value(skip)]
    None,
    /// Cofolio, read-only: a clone of the image's one overlay per container.
    CofolioRo,
    /// Cofolio, writable: an overlay per container over the image's one EROFS mount.
    CofolioRw,
    /// Cofolio, writable in a directory: a clone of the image's one overlay, and an overlay that shows only
    /// this directory.
    Sparse,
    /// The same, and the container stats files that lie in this directory.
    SparseLooking,
    /// An overlay per container over unpacked layers, as podman and containerd mount.
    Overlayfs,
    /// The same, and the container stats the files that it stats with `sparse-looking`.
    OverlayfsLooking,
    /// An EROFS mount and an overlay per container, read-only.
    SuperblockRo,
    /// An EROFS mount and an overlay per container, writable.
    SuperblockRw,
}

impl Variant {
    pub(super) const ALL: [Self; 8] = [
        Self::CofolioRo,
        Self::CofolioRw,
        Self::Sparse,
        Self::SparseLooking,
        Self::Overlayfs,
        Self::OverlayfsLooking,
        Self::SuperblockRo,
        Self::SuperblockRw,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::CofolioRo => "cofolio-ro",
            Self::CofolioRw => "cofolio-rw",
            Self::Sparse => "sparse",
            Self::SparseLooking => "sparse-looking",
            Self::Overlayfs => "overlayfs",
            Self::OverlayfsLooking => "overlayfs-looking",
            Self::SuperblockRo => "superblock-ro",
            Self::SuperblockRw => "superblock-rw",
        }
    }

    pub(super) fn is_writable(self) -> bool {
        !matches!(self, Self::None | Self::CofolioRo | Self::SuperblockRo)
    }

    /// How many superblocks each container has of its own.
    pub(super) fn superblocks(self) -> u32 {
        match self {
            Self::None | Self::CofolioRo => 0,
            Self::SuperblockRo | Self::SuperblockRw => 2,
            _ => 1,
        }
    }

    /// Whether the container stats files that lie in the writable directory of the sparse variants.
    pub(super) fn looks(self) -> bool {
        matches!(self, Self::SparseLooking | Self::OverlayfsLooking)
    }

    fn is_sparse(self) -> bool {
        matches!(self, Self::Sparse | Self::SparseLooking)
    }

    /// How its mounts are made.
    pub(super) fn made_by(self) -> &'static str {
        match self {
            Self::None => "no mounts",
            Self::CofolioRo | Self::CofolioRw | Self::Sparse | Self::SparseLooking => {
                "cofolio-node"
            }
            Self::SuperblockRo if has_mount_composefs() => "mount.composefs",
            _ => "mount(2)",
        }
    }

    /// Its mounts of these images, below a directory of its own.
    pub(super) fn shape(self, dir: &Path, images: &Images) -> Result<Box<dyn Shape>> {
        let dir = dir.join(self.name());
        let Images { domain, digests, layers, .. } = images;
        Ok(match self {
            Self::None => Box::new(Empty { dir, copies: images.copies.clone() }),
            Self::CofolioRo | Self::CofolioRw | Self::Sparse | Self::SparseLooking => {
                fs::create_dir_all(&dir)?;
                let ours = Ours::new(self.name(), dir, domain.clone(), digests.clone());
                let writable = || images.writable.clone();
                Box::new(if self.is_sparse() { ours.writable_in(writable()) } else { ours })
            }
            Self::Overlayfs | Self::OverlayfsLooking => {
                let (name, layers) = (self.name(), layers.clone());
                Box::new(Layers { name, dir, layers, mounted: Vec::new() })
            }
            Self::SuperblockRo if has_mount_composefs() => {
                Box::new(ByHand::new(Kind::Composefs, dir, domain, digests)?)
            }
            // mount.composefs would be given a second overlay for changes, which costs more.
            Self::SuperblockRo | Self::SuperblockRw => {
                Box::new(ByHand::new(Kind::Engine, dir, domain, digests)?)
            }
        })
    }
}

fn has_mount_composefs() -> bool {
    Command::new("mount.composefs").arg("--help").output().is_ok()
}

/// Files below the writable directory that a container of the variants `*-looking` stats, at most.
const STAT_FILES: usize = 10;

/// The images, in the store and unpacked.
pub(crate) struct Images {
    pub(super) domain: Domain,
    pub(crate) digests: Vec<Digest>,
    /// Directories of the layers of each image, the lowest first.
    layers: Vec<Vec<PathBuf>>,
    /// The directory of each image that containers of the sparse variants can write to: `/var`, or
    /// that of the first file.
    writable: Vec<Vec<PathBuf>>,
    /// The list of the files that a container of each image touches.
    pub(crate) profiles: Vec<PathBuf>,
    /// What a container of each image does below that directory.
    pub(crate) logs: Vec<Log>,
    /// A directory for each image with a copy of the file that a container maps, named `mapped`.
    copies: Vec<PathBuf>,
    /// The list of that one file.
    pub(super) copied: PathBuf,
}

impl Images {
    /// A profile is the first `files` regular files of an image, in the order of their paths.
    pub(crate) fn new(
        domain: &Domain,
        dir: &Path,
        prepared: Vec<(Unpacked, Digest)>,
        files: usize,
    ) -> Result<Self> {
        let mut images = Self {
            domain: domain.clone(),
            digests: Vec::new(),
            layers: Vec::new(),
            writable: Vec::new(),
            profiles: Vec::new(),
            logs: Vec::new(),
            copies: Vec::new(),
            copied: dir.join("profile-none"),
        };
        fs::write(&images.copied, "mapped\0")?;
        // Engines keep a layer once for all images that have the same layers up to it.
        let mut once = HashMap::new();
        for (unpacked, digest) in prepared {
            let stacks =
                (1..=unpacked.layers.len()).map(|end| unpacked.about.layers[..end].to_vec());
            let layers = stacks.zip(unpacked.layers.clone());
            images.layers.push(
                layers.map(|(stack, dir)| once.entry(stack).or_insert(dir).clone()).collect(),
            );
            let paths = || unpacked.listing.keys().map(|path| Path::new(OsStr::from_bytes(path)));
            let in_var = paths().find(|path| path.starts_with("var"));
            let first = paths().find_map(|path| path.parent().filter(|it| it.parent().is_some()));
            let dir_of = in_var.map(|_| Path::new("var")).or(first);
            let below = dir_of.unwrap_or(Path::new(""));
            let stat = dir.join(format!("stat-{}", images.logs.len()));
            let seen = paths().filter(|path| path.starts_with(below)).take(STAT_FILES);
            fs::write(&stat, list_of(seen))?;
            let is_dir = |path: &PathBuf| unpacked.layers.iter().any(|it| it.join(path).is_dir());
            let log_dir = Some(below.join("log")).filter(is_dir).unwrap_or(below.to_owned());
            images.logs.push(Log { stat, write: log_dir.join("cofolio-bench.log") });
            images.writable.push(dir_of.map(|it| Path::new("/").join(it)).into_iter().collect());
            let profile = dir.join(format!("profile-{}", images.profiles.len()));
            fs::write(&profile, list_of(paths().take(files)))?;
            // A process maps the first file that is not empty.
            let mapped = paths().take(files).find_map(|path| {
                let mut found = unpacked.layers.iter().rev().map(|layer| layer.join(path));
                found.find(|file| fs::symlink_metadata(file).is_ok_and(|it| it.len() > 0))
            });
            let copies = dir.join(format!("none-{}", images.profiles.len()));
            fs::create_dir_all(&copies)?;
            match mapped {
                Some(mapped) => drop(fs::copy(mapped, copies.join("mapped"))?),
                None => fs::write(copies.join("mapped"), "")?,
            }
            images.copies.push(copies);
            images.profiles.push(profile);
            images.digests.push(digest);
        }
        Ok(images)
    }
}

/// Paths, each ended by a NUL.
fn list_of<'a>(paths: impl Iterator<Item = &'a Path>) -> Vec<u8> {
    paths.flat_map(|path| [path.as_os_str().as_bytes(), b"\0"].concat()).collect()
}

/// Unmounts the containers that a killed run left below these directories.
pub(crate) fn clean(dirs: &[PathBuf], domain: &Domain) -> Result<()> {
    for dir in dirs {
        let Ok(containers) = fs::read_dir(dir) else { continue };
        for container in containers {
            let container = container?.path();
            // Usually nothing is mounted there.
            for mount in ["root", "composefs", "erofs", "."] {
                let _ = rustix::mount::unmount(container.join(mount), UnmountFlags::DETACH);
            }
        }
    }
    Mounter::new(domain, RunDir::of(domain.store())?, &ImageContents).reconcile()?;
    Ok(())
}

/// A directory per container, as the other variants have it for their mounts.
struct Empty {
    dir: PathBuf,
    copies: Vec<PathBuf>,
}

impl Shape for Empty {
    fn name(&self) -> &'static str {
        Variant::None.name()
    }

    fn mount(&mut self, image: usize, number: u32, _: bool) -> Result<PathBuf> {
        fs::create_dir_all(self.dir.join(number.to_string()))?;
        Ok(self.copies[image].clone())
    }

    fn unmount(&mut self) -> Result<()> {
        source::remove_tree(&self.dir)
    }
}

/// Unpacked layers, and one overlay over them per container.
struct Layers {
    name: &'static str,
    dir: PathBuf,
    layers: Vec<Vec<PathBuf>>,
    mounted: Vec<PathBuf>,
}

impl Shape for Layers {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mount(&mut self, image: usize, number: u32, _: bool) -> Result<PathBuf> {
        let own = self.dir.join(number.to_string());
        let root = own.join("root");
        fs::create_dir_all(&root)?;
        source::mount_overlay(&self.layers[image], &own, &root)?;
        self.mounted.push(root.clone());
        Ok(root)
    }

    fn unmount(&mut self) -> Result<()> {
        for_all(std::mem::take(&mut self.mounted).iter().rev(), |at| {
            rustix::mount::unmount(at, UnmountFlags::DETACH)
                .with_context(|| format!("cannot unmount {}", at.display()))
        })?;
        source::remove_tree(&self.dir)
    }
}

impl Drop for Layers {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}
