//! The ways in which containers get their files.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cofolio_image::pack::{ImageContents, PackOptions, pack, segment::Form};
use cofolio_node::settings::Backend;
use cofolio_node::{
    mount::{Access, MountRequest, Mounter, UmountOptions},
    probe::{self, Presence},
    run_dir::RunDir,
    upkeep::bases,
};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain};
use rustix::mount::{MountFlags, UnmountFlags};
use serde::Serialize;

use super::variants::variants;
use crate::cleanup::for_all;
use crate::place::{copy_image, with_backend};
use cofolio_cli::exit::{Exit, Fail};

/// A way in which containers get their files.
pub(crate) trait Shape {
    fn name(&self) -> &'static str;
    /// Mounts container `number`, of the image with this place among the images; gives its root.
    fn mount(&mut self, image: usize, number: u32, writable: bool) -> Result<PathBuf>;
    /// Takes all of them down, one after the other.
    fn unmount(&mut self) -> Result<()>;
    /// Times of starting and ending so many of the first image.
    fn instances(&mut self, _writable: bool, _count: u32) -> Result<Option<(Spread, Spread)>> {
        Ok(None)
    }
}

/// How long each of many took.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Spread {
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
}

/// All that can be had here, each with the image and `variants` over it; why others cannot is added to `skipped`.
pub(super) fn shapes<'a>(
    dir: &Path,
    domain: &'a Domain,
    (name, image): (&str, Digest),
    count: u32,
    skipped: &mut Vec<String>,
) -> Result<Vec<Box<dyn Shape + 'a>>> {
    let over = |domain: &Domain| -> Result<Vec<Digest>> {
        Ok([vec![image], variants(domain, image, count)?].concat())
    };
    let images = over(domain)?;
    let by_hand =
        |kind: Kind| ByHand::new(kind, dir.join(kind.name().replace(' ', "-")), domain, &images);
    let mut shapes: Vec<Box<dyn Shape>> =
        vec![Box::new(by_hand(Kind::Ordinary)?), Box::new(by_hand(Kind::Engine)?)];
    match Command::new("mount.composefs").arg("--help").output() {
        Ok(_) => shapes.push(Box::new(by_hand(Kind::Composefs)?)),
        Err(error) => skipped.push(format!("composefs: mount.composefs: {error}")),
    }
    let report = probe::probe(&probe::Options::default());
    for backend in Backend::ALL {
        if backend == Backend::InodeShare {
            let feature = report.get("inode-share");
            if let Some(lacks) = feature.filter(|feature| feature.presence != Presence::Present) {
                skipped.push(format!("cofolio inode-share: {}", lacks.detail));
                continue;
            }
        }
        // Domains of their own, since a domain has one backend, and bases are for all its images.
        for on_base in [false, true] {
            if on_base && backend != Backend::Overlay {
                continue;
            }
            let own = if on_base {
                domain.store().domain_or_create("bench-base")?
            } else {
                with_backend(domain.clone(), Some(backend.into()), Form::Plain)?
            };
            if !own.has_image(&image)? {
                copy_image(domain, &own, name)?;
            }
            let mut images = over(&own)?;
            // Of those over a base one is the first.
            images.rotate_left(usize::from(on_base));
            for image in &images {
                if backend == Backend::InodeShare {
                    let task = Task::default();
                    pack(&own, image, &PackOptions::default(), &task)?;
                }
            }
            if on_base {
                bases::find(&own, &Task::default())?;
            }
            let name = match (backend, on_base) {
                (Backend::Overlay, false) => "cofolio overlay",
                (Backend::Overlay, true) => "cofolio overlay, one base",
                (Backend::InodeShare, _) => "cofolio inode-share",
            };
            let dir = dir.join(name.replace(' ', "-"));
            fs::create_dir_all(&dir)?;
            shapes.push(Box::new(Ours::new(name, dir, own, images)));
        }
    }
    Ok(shapes)
}

/// Mounts that others make.
pub(crate) struct ByHand {
    kind: Kind,
    dir: PathBuf,
    /// Metadata images.
    metadata: Vec<PathBuf>,
    objects: PathBuf,
    /// In their order.
    mounted: Vec<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The objects as an ordinary layer of overlayfs, as it had to be before Linux 6.5.
    Ordinary,
    /// EROFS and overlayfs with a data-only layer, each container its own.
    Engine,
    /// By `mount.composefs`; what is written goes to a second overlay.
    Composefs,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Ordinary => "erofs+overlay 2023",
            Self::Engine => "a superblock each",
            Self::Composefs => "composefs",
        }
    }
}

impl ByHand {
    /// Mounts of these images of the domain below `dir`; fails if the store is not on a disk.
    pub(crate) fn new(
        kind: Kind,
        dir: PathBuf,
        domain: &Domain,
        images: &[Digest],
    ) -> Result<Self> {
        let no_path = || Fail::new(Exit::Failure, "the store is not on a disk");
        let metadata = images.iter().map(|image| domain.image_path(image).ok_or_else(no_path));
        Ok(Self {
            kind,
            dir,
            metadata: metadata.collect::<Result<_, _>>()?,
            objects: domain.objects_dir().ok_or_else(no_path)?,
            mounted: Vec::new(),
        })
    }

    fn attach(&mut self, source: &Path, at: PathBuf, kind: &str, options: &str) -> Result<PathBuf> {
        let options = std::ffi::CString::new(options)?;
        let flags = if kind == "erofs" { MountFlags::RDONLY } else { MountFlags::empty() };
        rustix::mount::mount(source, &at, kind, flags, &*options)
            .with_context(|| format!("cannot mount {} ({kind})", at.display()))?;
        self.mounted.push(at.clone());
        Ok(at)
    }
}

impl Shape for ByHand {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn mount(&mut self, image: usize, number: u32, writable: bool) -> Result<PathBuf> {
        let own = self.dir.join(number.to_string());
        let below = |name: &str| -> Result<PathBuf> {
            let path = own.join(name);
            fs::create_dir_all(&path)?;
            Ok(path)
        };
        let (metadata, objects) = (self.metadata[image].clone(), self.objects.clone());
        let mut options = match self.kind {
            Kind::Composefs => {
                let at = below("composefs")?;
                let basedir = format!("basedir={}", objects.display());
                let ran = Command::new("mount.composefs")
                    .args(["-o", &basedir])
                    .args([&metadata, &at])
                    .output()?;
                ensure!(
                    ran.status.success(),
                    "mount.composefs: {}",
                    String::from_utf8_lossy(&ran.stderr)
                );
                self.mounted.push(at.clone());
                if !writable {
                    return Ok(at);
                }
                format!("lowerdir={}", at.display())
            }
            Kind::Ordinary | Kind::Engine => {
                let erofs = self.attach(&metadata, below("erofs")?, "erofs", "")?;
                let between = if self.kind == Kind::Ordinary { ":" } else { "::" };
                format!(
                    "metacopy=on,redirect_dir=on,lowerdir={}{between}{}",
                    erofs.display(),
                    objects.display()
                )
            }
        };
        if writable {
            let (upper, work) = (below("upper")?, below("work")?);
            options += &format!(",upperdir={},workdir={}", upper.display(), work.display());
        }
        self.attach(Path::new("overlay"), below("root")?, "overlay", &options)
    }

    fn unmount(&mut self) -> Result<()> {
        for_all(std::mem::take(&mut self.mounted).iter().rev(), |at| {
            rustix::mount::unmount(at, UnmountFlags::DETACH)
                .with_context(|| format!("cannot unmount {}", at.display()))
        })?;
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

/// A backend of Cofolio.
pub(crate) struct Ours {
    name: &'static str,
    dir: PathBuf,
    domain: Domain,
    images: Vec<Digest>,
    /// The only directories that can be written to, of each image.
    dirs: Vec<Vec<PathBuf>>,
    mounted: Vec<PathBuf>,
}

impl Ours {
    /// Mounts of these images of the domain below `dir`, which exists.
    pub(crate) fn new(
        name: &'static str,
        dir: PathBuf,
        domain: Domain,
        images: Vec<Digest>,
    ) -> Self {
        Self { name, dir, domain, images, dirs: Vec::new(), mounted: Vec::new() }
    }

    /// Only these directories can be written to, of each image.
    pub(crate) fn writable_in(mut self, dirs: Vec<Vec<PathBuf>>) -> Self {
        self.dirs = dirs;
        self
    }

    fn mounter(&self) -> Result<Mounter<'_>> {
        Ok(Mounter::new(&self.domain, RunDir::of(self.domain.store())?, &ImageContents))
    }

    /// The directory is made here, as engines do. One that the mounter makes would be removed only after
    /// a look at all processes of the machine.
    fn mount_one(&self, image: usize, number: u32, writable: bool) -> Result<PathBuf> {
        let target = self.dir.join(number.to_string());
        fs::create_dir_all(&target)?;
        let request = MountRequest {
            access: if writable { Access::Writable } else { Access::ReadOnly },
            writable_dirs: self.dirs.get(image).filter(|_| writable).cloned().unwrap_or_default(),
            ..MountRequest::new(self.images[image], target)
        };
        Ok(self.mounter()?.mount(&request)?.target)
    }

    fn umount_one(&self, target: &Path) -> Result<()> {
        let options = UmountOptions { force: true, ..Default::default() };
        self.mounter()?.umount(target, &options)?;
        Ok(fs::remove_dir(target)?)
    }
}

impl Shape for Ours {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mount(&mut self, image: usize, number: u32, writable: bool) -> Result<PathBuf> {
        let target = self.mount_one(image, number, writable)?;
        self.mounted.push(target.clone());
        Ok(target)
    }

    fn unmount(&mut self) -> Result<()> {
        let mounted = std::mem::take(&mut self.mounted);
        for_all(mounted.iter().rev(), |target| self.umount_one(target))
    }

    fn instances(&mut self, writable: bool, count: u32) -> Result<Option<(Spread, Spread)>> {
        // It keeps the superblocks that all others share.
        let held = self.mount_one(0, count, false)?;
        let timed = || -> Result<_> {
            let (mut mounts, mut unmounts) = (Vec::new(), Vec::new());
            for number in 0..count {
                let started = Instant::now();
                self.mount_one(0, number, writable)?;
                mounts.push(started.elapsed());
            }
            for number in 0..count {
                let target = self.dir.join(number.to_string());
                let started = Instant::now();
                self.umount_one(&target)?;
                unmounts.push(started.elapsed());
            }
            Ok((spread(mounts), spread(unmounts)))
        };
        let timed = timed();
        self.umount_one(&held)?;
        timed.map(Some)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

pub(crate) fn spread(mut times: Vec<Duration>) -> Spread {
    times.sort_unstable();
    let at = |share: usize| {
        times[(times.len() * share / 100).min(times.len() - 1)].as_secs_f64() * 1000.0
    };
    Spread { p50_ms: at(50), p99_ms: at(99) }
}
