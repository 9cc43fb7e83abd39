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
    mount::{Access, MountRequest, Mounter, RunDir, UmountOptions},
    probe::{self, Presence},
    upkeep::bases,
};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain};
use rustix::mount::{MountFlags, UnmountFlags};
use serde::Serialize;

use super::variants::variants;
use crate::place::{copy_image, with_backend};
use cofolio_cli::exit::{Exit, Fail};

/// A way in which containers get their files.
pub(super) trait Shape {
    fn name(&self) -> &'static str;
    /// Mounts container `number`, of the image with this place among the images; gives its root.
    fn mount(&mut self, image: usize, number: u32, writable: bool) -> Result<PathBuf>;
    /// Takes all of them down.
    fn unmount(&mut self) -> Result<()>;
    /// Times of starting and ending so many of the first image.
    fn instances(&mut self, writable: bool, count: u32) -> Result<Option<(Spread, Spread)>>;
}

/// How long each of many took.
#[derive(Serialize)]
pub(super) struct Spread {
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}

/// All that can be had here, each with the image and `variants` over it; why others cannot is added to `skipped`.
pub(super) fn shapes<'a>(
    dir: &Path,
    domain: &'a Domain,
    (name, image): (&str, Digest),
    count: u32,
    skipped: &mut Vec<String>,
) -> Result<Vec<Box<dyn Shape + 'a>>> {
    let no_path = || Fail::new(Exit::Failure, "the store is not on a disk");
    let over = |domain: &Domain| -> Result<Vec<Digest>> {
        Ok([vec![image], variants(domain, image, count)?].concat())
    };
    let images = over(domain)?;
    let by_hand = |kind: Kind| -> Result<_> {
        let metadata = images.iter().map(|image| domain.image_path(image).ok_or_else(no_path));
        Ok(ByHand {
            kind,
            dir: dir.join(kind.name().replace(' ', "-")),
            metadata: metadata.collect::<Result<_, _>>()?,
            objects: domain.objects_dir().ok_or_else(no_path)?,
            mounted: Vec::new(),
        })
    };
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
            shapes.push(Box::new(Ours { name, dir, domain: own, images, mounted: Vec::new() }));
        }
    }
    Ok(shapes)
}

/// Mounts that others make.
struct ByHand {
    kind: Kind,
    dir: PathBuf,
    /// Metadata images.
    metadata: Vec<PathBuf>,
    objects: PathBuf,
    /// In their order.
    mounted: Vec<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
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
        while let Some(at) = self.mounted.pop() {
            rustix::mount::unmount(&at, UnmountFlags::DETACH)
                .with_context(|| format!("cannot unmount {}", at.display()))?;
        }
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn instances(&mut self, _: bool, _: u32) -> Result<Option<(Spread, Spread)>> {
        Ok(None)
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

/// A backend of Cofolio.
struct Ours {
    name: &'static str,
    dir: PathBuf,
    domain: Domain,
    images: Vec<Digest>,
    mounted: Vec<PathBuf>,
}

impl Ours {
    fn mounter(&self) -> Mounter<'_> {
        Mounter::new(&self.domain, RunDir::of(self.domain.store()), &ImageContents)
    }

    fn request(&self, image: usize, number: u32, writable: bool) -> MountRequest {
        MountRequest {
            create_target: true,
            access: if writable { Access::Writable } else { Access::ReadOnly },
            ..MountRequest::new(self.images[image], self.dir.join(number.to_string()))
        }
    }
}

impl Shape for Ours {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mount(&mut self, image: usize, number: u32, writable: bool) -> Result<PathBuf> {
        let record = self.mounter().mount(&self.request(image, number, writable))?;
        self.mounted.push(record.target.clone());
        Ok(record.target)
    }

    fn unmount(&mut self) -> Result<()> {
        while let Some(target) = self.mounted.pop() {
            self.mounter().umount(&target, &UmountOptions { force: true, ..Default::default() })?;
        }
        Ok(())
    }

    fn instances(&mut self, writable: bool, count: u32) -> Result<Option<(Spread, Spread)>> {
        let mounter = self.mounter();
        // It keeps the superblocks that all others share.
        let held = mounter.mount(&self.request(0, count, false))?;
        let timed = || -> Result<_> {
            let (mut mounts, mut unmounts) = (Vec::new(), Vec::new());
            for number in 0..count {
                let started = Instant::now();
                mounter.mount(&self.request(0, number, writable))?;
                mounts.push(started.elapsed());
            }
            for number in 0..count {
                let target = self.dir.join(number.to_string());
                let started = Instant::now();
                mounter.umount(&target, &UmountOptions::default())?;
                unmounts.push(started.elapsed());
            }
            Ok((spread(mounts), spread(unmounts)))
        };
        let timed = timed();
        mounter.umount(&held.target, &UmountOptions::default())?;
        timed.map(Some)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

fn spread(mut times: Vec<Duration>) -> Spread {
    times.sort_unstable();
    let at = |share: usize| {
        times[(times.len() * share / 100).min(times.len() - 1)].as_secs_f64() * 1000.0
    };
    Spread { p50_ms: at(50), p99_ms: at(99) }
}
