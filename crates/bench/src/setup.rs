//! The ways in which both images are made visible: unpacked, apart or with common layers once, and by Cofolio.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use cofolio_image::pack::ImageContents;
use cofolio_node::mount::{Access, MountRequest, Mounter, UmountOptions};
use cofolio_node::run_dir::RunDir;
use cofolio_node::settings::{Backend, DomainSettings as _};
use cofolio_store::{Digest, Domain, FileKind};
use rustix::mount::UnmountFlags;

use super::{
    measure, residency,
    source::{self, About, Expected, Unpacked},
};

/// How often what a killed run left is looked at again, 50 ms apart.
const RECONCILE_TRIES: u32 = 40;

/// A way to make both images visible.
pub(super) trait Setup {
    /// As it is called in reports.
    fn name(&self) -> &'static str;
    /// Mounts one image, the old one (0) or the new one (1), and gives its directory.
    fn mount(&mut self, side: usize) -> Result<PathBuf>;
    /// Takes all of it down again, whatever state it is in.
    fn unmount(&mut self) -> Result<()>;
    /// The files that hold the content, each once however many names it has.
    fn content(&self) -> &[PathBuf];
    /// The files that hold the metadata, where files do.
    fn metadata(&self) -> &[PathBuf];
    /// Pages that reading everything must make resident.
    fn expected_pages(&self) -> u64;
    /// Drops what is left in memory of both when nothing is mounted any more.
    fn forget(&self) -> Result<()> {
        measure::forget(self.content())?;
        measure::forget(self.metadata())
    }
    /// Pages of the mounted directories that are cached inode by inode, as files are. ext4 has its own in
    /// the page cache of the block device instead.
    fn directory_pages(&self, _mounted: &[PathBuf; 2]) -> Result<u64> {
        Ok(0)
    }
}

/// Layers unpacked into directories, mounted by overlayfs with an upper directory, as engines do.
pub(super) struct Unshared {
    name: &'static str,
    layers: [Vec<PathBuf>; 2],
    targets: [PathBuf; 2],
    uppers: [PathBuf; 2],
    content: Vec<PathBuf>,
    expected_pages: u64,
}

impl Unshared {
    pub(super) const NAME: &'static str = "unshared";
    pub(super) const LAYERS_ONCE: &'static str = "layers-once";

    /// Each image on its own.
    pub(super) fn new(work: &Path, images: [&Unpacked; 2], expected: &Expected) -> Result<Self> {
        let layers = images.map(|image| image.layers.clone());
        Self::of(Self::NAME, work, layers, expected.unshared_pages)
    }

    /// Common layers once, as engines have them; nothing if the images have none.
    pub(super) fn layers_once(
        work: &Path,
        images: [&Unpacked; 2],
        expected: &Expected,
    ) -> Result<Option<Self>> {
        let common = source::common_layers(images);
        if common == 0 {
            return Ok(None);
        }
        let old = images[0].layers.clone();
        let new = [&old[..common], &images[1].layers[common..]].concat();
        Self::of(Self::LAYERS_ONCE, work, [old, new], expected.layer_shared_pages).map(Some)
    }

    fn of(
        name: &'static str,
        work: &Path,
        layers: [Vec<PathBuf>; 2],
        expected_pages: u64,
    ) -> Result<Self> {
        let [targets, uppers] = ["mnt", "upper"]
            .map(|kind| ["old", "new"].map(|side| work.join(kind).join(format!("{name}-{side}"))));
        // Every unpacked inode once, the ones that upper layers hide too: they must stay cold.
        let mut content = Vec::new();
        let mut inodes = BTreeSet::new();
        for layer in layers.iter().flatten() {
            source::walk(layer, &mut |path, meta| {
                if meta.is_file() && inodes.insert((meta.dev(), meta.ino())) {
                    content.push(path.to_owned());
                }
                Ok(())
            })?;
        }
        Ok(Self { name, layers, targets, uppers, content, expected_pages })
    }
}

impl Setup for Unshared {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mount(&mut self, side: usize) -> Result<PathBuf> {
        let target = &self.targets[side];
        make_dir(target)?;
        source::mount_overlay(&self.layers[side], &self.uppers[side], target)?;
        Ok(target.clone())
    }

    fn unmount(&mut self) -> Result<()> {
        unmount_all(&self.targets)?;
        self.uppers.iter().try_for_each(|upper| source::remove_tree(upper))
    }

    fn content(&self) -> &[PathBuf] {
        &self.content
    }

    fn metadata(&self) -> &[PathBuf] {
        &[]
    }

    fn expected_pages(&self) -> u64 {
        self.expected_pages
    }
}

impl Drop for Unshared {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

/// Both images in one trust domain, mounted by Cofolio: read-only, or writable for containers.
pub(super) struct Shared<'a> {
    domain: &'a Domain,
    images: [Digest; 2],
    access: Access,
    targets: [PathBuf; 2],
    /// Files of the store, or with inode-share of the mounts: of each content one.
    content: Vec<PathBuf>,
    metadata: Vec<PathBuf>,
    backend: Backend,
    expected_pages: u64,
}

impl<'a> Shared<'a> {
    pub(super) const NAME: &'static str = "cofolio";

    pub(super) fn new(
        work: &Path,
        domain: &'a Domain,
        images: [Digest; 2],
        access: Access,
        unpacked: [&Unpacked; 2],
        expected: &Expected,
    ) -> Result<Shared<'a>> {
        let targets = ["cofolio-old", "cofolio-new"].map(|name| work.join("mnt").join(name));
        let no_path = "the store is not on a disk";
        // Which objects must hold the content follows from the source alone, not from the importer.
        let entries = unpacked.iter().zip(&targets).flat_map(|(image, target)| {
            image.listing.iter().map(move |(path, entry)| (target, path, entry))
        });
        let objects: BTreeMap<Digest, PathBuf> = entries
            .filter(|(_, _, entry)| entry.content.size > 0)
            .map(|(target, path, entry)| (entry.object, target.join(OsStr::from_bytes(path))))
            .collect();
        let images_once: BTreeSet<_> = images.into_iter().collect();
        let backend = domain.backend()?;
        let (content, metadata) = match backend {
            Backend::Overlay => {
                let content: Option<_> =
                    objects.keys().map(|object| domain.object_path(object)).collect();
                let metadata: Option<_> =
                    images_once.iter().map(|image| domain.image_path(image)).collect();
                (content.context(no_path)?, metadata.context(no_path)?)
            }
            // What is shared belongs to no file of the store.
            Backend::InodeShare => {
                let packs = images_once.iter().map(|image| domain.packs_of(FileKind::Pack, image));
                let packs = packs.collect::<Result<Vec<_>, _>>()?.concat();
                let metadata: Option<_> =
                    packs.iter().map(|pack| domain.named_path(pack)).collect();
                (objects.into_values().collect(), metadata.context(no_path)?)
            }
        };
        Ok(Shared {
            domain,
            images,
            access,
            targets,
            content,
            metadata,
            backend,
            expected_pages: expected.unique_pages,
        })
    }

    fn mounter(&self) -> Result<Mounter<'a>> {
        Ok(Mounter::new(self.domain, RunDir::of(self.domain.store())?, &ImageContents))
    }
}

impl Setup for Shared<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn mount(&mut self, side: usize) -> Result<PathBuf> {
        let target = &self.targets[side];
        make_dir(target)?;
        let request = MountRequest::new(self.images[side], target);
        self.mounter()?.mount(&MountRequest { access: self.access.clone(), ..request })?;
        Ok(target.clone())
    }

    fn unmount(&mut self) -> Result<()> {
        let mounter = self.mounter()?;
        for target in &self.targets {
            // Not mounted, normally; what a killed run left behind is taken down as well.
            if let Err(error) = mounter.umount(target, &UmountOptions::default())
                && is_mounted(target)
            {
                return Err(error).with_context(|| format!("cannot unmount {}", target.display()));
            }
        }
        // The kernel takes down the mount namespace of a killed container a moment after its last
        // process, and until then the images are in use.
        for _ in 0..RECONCILE_TRIES {
            mounter.reconcile()?;
            let pins = mounter.list()?.pins;
            if !pins.iter().any(|pin| self.images.contains(&pin.image)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn content(&self) -> &[PathBuf] {
        &self.content
    }

    fn metadata(&self) -> &[PathBuf] {
        &self.metadata
    }

    fn expected_pages(&self) -> u64 {
        self.expected_pages
    }

    fn forget(&self) -> Result<()> {
        // What inodes share has gone with the last of them.
        if self.backend == Backend::Overlay {
            measure::forget(&self.content)?;
        }
        measure::forget(&self.metadata)
    }

    /// EROFS reads a directory through the directory's own mapping, so each takes a page at least, once
    /// per image.
    fn directory_pages(&self, mounted: &[PathBuf; 2]) -> Result<u64> {
        let mut pages = 0;
        for dir in mounted {
            pages += residency::pages_of(fs::metadata(dir)?.len());
            source::walk(dir, &mut |_, meta| {
                if meta.is_dir() {
                    pages += residency::pages_of(meta.len());
                }
                Ok(())
            })?;
        }
        Ok(pages)
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

/// Copies an image of the store out, as the unpacked form of a ref. What was shipped is not at hand then:
/// the source that everything is compared with is Cofolio's own mount.
pub(super) fn copy_out(
    name: &str,
    image: Digest,
    domain: &Domain,
    work: &Path,
    cache: &Path,
    say: &dyn Fn(&str),
) -> Result<Unpacked> {
    let about = About {
        name: name.to_owned(),
        manifest: format!("image:{image}"),
        layers: vec![format!("image:{image}")],
    };
    let target = work.join("mnt/source");
    let fill = |layer: &Path| {
        say(&format!("copying {name} out of the store"));
        make_dir(&target)?;
        let mounter = Mounter::new(domain, RunDir::of(domain.store())?, &ImageContents);
        let _ = mounter.umount(&target, &UmountOptions::default());
        mounter.mount(&MountRequest::new(image, &target))?;
        let copied = Command::new("cp")
            .args(["--archive", "--no-target-directory"])
            .args([&target, layer])
            .output();
        mounter.umount(&target, &UmountOptions::default())?;
        let copied = copied.context("cannot run cp")?;
        let message = String::from_utf8_lossy(&copied.stderr);
        ensure!(copied.status.success(), "cp failed: {}", message.trim());
        Ok(())
    };
    source::unpack_once(cache, &image.to_string(), about, &[&fill])
}

pub(super) fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))
}

/// Whether something is mounted at `dir` itself.
fn is_mounted(dir: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev());
    let parent = dir.parent().unwrap_or(dir);
    matches!((device(dir), device(parent)), (Ok(here), Ok(above)) if here != above)
}

fn unmount_all(targets: &[PathBuf]) -> Result<()> {
    for target in targets.iter().filter(|target| is_mounted(target)) {
        rustix::mount::unmount(target, UnmountFlags::empty())
            .with_context(|| format!("cannot unmount {}", target.display()))?;
    }
    Ok(())
}
