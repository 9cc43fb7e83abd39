//! Garbage collection: removes files that no ref, root or live mount keeps. Imports and mounts go
//! on meanwhile: see [`crate::collector`] for how, and why that is safe.
//!
//! 1. mark: refs, roots and live mounts keep images and layers; those keep objects and segments.
//!    Unreadable files keep what they might need and block nothing else: see [`Reachability`];
//! 2. leftovers of interrupted imports and writes go, leases of dead processes, mounts of an
//!    earlier boot;
//! 3. unmarked images, layers, splits and packs go, durably: no image in place ever lacks an
//!    object, after a crash either, and no pack a segment;
//! 4. unmarked objects and segments go, and kept ones get missing protection, images last.
//!
//! Time grows with files, records and names in images and layers; memory is 31 bytes per kept
//! object.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use crate::base;
use crate::collector::{Collector, Suspect, Swept};
use crate::contents::Contents;
use crate::disk::{Kind, LockMode};
use crate::domain::Covered;
use crate::error::{At, BoxError, Result};
use crate::kinds::{FileKind, FileName};
use crate::parallel::for_each;
use crate::profile;
use crate::records::{RECORDS, UNNAMED};
use crate::scrub;
use crate::signatures;
use crate::store::TEMPORARY;
use crate::task::Cancel;
use crate::used;
use crate::{Digest, Domain, Unreadable};

/// How a garbage collection is run.
#[derive(Clone, Debug, Default)]
pub struct GcOptions {
    /// Change nothing, only say what would be.
    pub dry_run: bool,
    /// Wait for imports that are being published and other collections, or [`crate::Error::Busy`].
    pub wait: bool,
    /// `/proc/sys/kernel/random/boot_id`: mounts that say another one are gone since the reboot.
    pub boot_id: Option<String>,
    /// Ends it early: [`crate::Error::Cancelled`]. What was removed so far was garbage.
    pub cancel: Cancel,
}

/// What a garbage collection removed (or would remove) and kept, in allocated bytes as in `du`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GcReport {
    /// Nothing was changed.
    pub dry_run: bool,
    /// Objects removed.
    pub objects: u64,
    /// Their bytes.
    pub object_bytes: u64,
    /// Images removed.
    pub images: u64,
    /// Their bytes.
    pub image_bytes: u64,
    /// Layers removed.
    pub layers: u64,
    /// Their bytes, splits included.
    pub layer_bytes: u64,
    /// Packs removed: of removed images, and unusable ones.
    pub packs: u64,
    /// Segments removed.
    pub segments: u64,
    /// Bytes of both.
    pub segment_bytes: u64,
    /// Roots removed: `lease/<id>` whose process is gone, `mount/<id>` of an earlier boot.
    pub roots: Vec<String>,
    /// Leftovers of interrupted imports and writes that were removed.
    pub leftovers: u64,
    /// Their bytes.
    pub leftover_bytes: u64,
    /// Objects kept.
    pub kept_objects: u64,
    /// Images kept.
    pub kept_images: u64,
    /// Those of `images` that only served others: bases and deltas.
    pub bases: u64,
    /// Those of `kept_images` that only serve others.
    pub kept_bases: u64,
    /// Layers kept.
    pub kept_layers: u64,
    /// Segments and packs kept.
    pub kept_segments: u64,
    /// What cannot be read, and what was kept because of it. `fsck --repair` mends it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<Unreadable>,
}

impl GcReport {
    /// All bytes that were freed, or would be.
    pub fn bytes(&self) -> u64 {
        self.object_bytes
            + self.image_bytes
            + self.layer_bytes
            + self.segment_bytes
            + self.leftover_bytes
    }
}

impl Domain {
    /// Collects garbage while imports and mounts, but no other collection or trim, go on. `live`
    /// gives the images that are in use beyond those of roots.
    ///
    /// # Errors
    /// [`crate::Error::Unreadable`] if `live` fails, or for lack of memory or the like: nothing was
    /// collected. [`crate::Error::Busy`], [`crate::Error::ReadOnly`], [`crate::Error::Io`]: only
    /// garbage was removed so far. Unreadable content is no error: see [`GcReport::unreadable`].
    pub fn gc(
        &self,
        contents: &dyn Contents,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        options: &GcOptions,
    ) -> Result<GcReport> {
        Collector::begin(self, contents, options)?.collect(live, &BTreeSet::new())
    }
}

impl Collector<'_> {
    /// The collection itself, as if the refs `without` were gone.
    pub(crate) fn collect(
        mut self,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        without: &BTreeSet<String>,
    ) -> Result<GcReport> {
        let domain = self.domain;
        let mut keepers = domain.keepers(live, self.options)?;
        keepers.refs.retain(|(name, _)| !without.contains(name));
        self.reach.mark(&keepers)?;
        let mut report = GcReport { dry_run: self.options.dry_run, ..GcReport::default() };
        // Before protecting anything: a crash during a rename can leave a second name in staging,
        // and removing that takes the flag from the file.
        self.sweep_leftovers(&mut report)?;
        let stale: Vec<_> = std::mem::take(&mut keepers.stale)
            .into_iter()
            .map(|root| Suspect { path: root.path.clone(), kind: Kind::File, what: root })
            .collect();
        self.sweep(Covered::Names, &stale, |this, root| {
            this.domain.is_still_stale(root, this.options)
        })?;
        report.roots.extend(stale.into_iter().map(|root| root.what.shown));
        let derived = domain.derived_images()?;
        self.sweep_bases()?;
        let has_names = |kind: &FileKind| kind.names().is_some();
        for kind in FileKind::NAMED.into_iter().filter(has_names) {
            self.sweep_kind(kind, &derived, &mut report)?;
        }
        if !self.options.dry_run {
            domain.disk().sync_all().at("sync", domain.directory())?;
        }
        for kind in FileKind::NAMED.into_iter().filter(|kind| !has_names(kind)) {
            self.sweep_kind(kind, &derived, &mut report)?;
        }
        self.sweep_objects(&mut report)?;
        if self.protected.load(Relaxed) {
            domain.disk().sync_all().at("sync", domain.directory())?;
        }
        for path in std::mem::take(&mut self.protect_last) {
            self.protect(&path)?;
        }
        self.sweep_hints()?;
        if !self.options.dry_run {
            // There may be room for it now. Under the lock that keeps other temporary files there.
            if let Ok(Some(_lock)) = domain.disk().lock("", LockMode::Shared, false) {
                let _ = domain.store().keep_reserve();
            }
        }
        report.unreadable = std::mem::take(&mut self.reach.unreadable);
        Ok(report)
    }

    /// Removes the files of a kind that are not kept.
    fn sweep_kind(
        &mut self,
        kind: FileKind,
        derived: &HashSet<Digest>,
        report: &mut GcReport,
    ) -> Result<()> {
        let is_base = |name: &FileName| {
            kind == FileKind::Image && name.image().is_some_and(|image| derived.contains(&image))
        };
        let mut suspects = Vec::new();
        let mut kept = 0;
        for name in self.domain.named(kind)? {
            self.options.cancel.check()?;
            let path = self.domain.named_file(&name);
            if self.reach.keeps(&name) {
                match kind.names() {
                    // The flag of an image stands for those of its objects: it comes after them.
                    Some(_) => self.protect_last.push(path),
                    None => self.protect(&path)?,
                }
                kept += 1;
                report.kept_bases += u64::from(is_base(&name));
            } else {
                suspects.push(Suspect { what: name, path, kind: Kind::File });
            }
        }
        let what = kind.names().map_or(Covered::Contents, |_| Covered::Names);
        let swept = self.sweep(what, &suspects, |this, name| Ok(!this.reach.keeps(name)))?;
        kept += suspects.len() as u64 - swept.count;
        for name in suspects.iter().map(|suspect| &suspect.what).filter(|name| is_base(name)) {
            let count =
                if self.reach.keeps(name) { &mut report.kept_bases } else { &mut report.bases };
            *count += 1;
        }
        report.add(kind, kept, swept);
        Ok(())
    }

    /// The same for objects, a directory at a time.
    fn sweep_objects(&mut self, report: &mut GcReport) -> Result<()> {
        let domain = self.domain;
        let objects = format!("{}/{}", domain.directory(), FileKind::Object.directory());
        for (shard, kind) in domain.disk().list(&objects).at("list", &objects)? {
            if kind != Kind::Directory {
                continue;
            }
            self.options.cancel.check()?;
            let directory = format!("{objects}/{shard}");
            let (mut suspects, mut kept) = (Vec::new(), Vec::new());
            for (entry, kind) in domain.disk().list(&directory).at("list", &directory)? {
                // What is not ours fsck reports.
                let Some(digest) = Digest::from_object_path(&shard, &entry) else { continue };
                let path = format!("{directory}/{entry}");
                if kind != Kind::File || self.reach.keeps_content(FileKind::Object, &digest) {
                    kept.push((path, kind));
                } else {
                    suspects.push(Suspect { what: digest, path, kind });
                }
            }
            let this = &*self;
            for_each(domain.disk().parallelism(), &kept, |(path, kind)| {
                if *kind == Kind::File { this.protect(path) } else { Ok(()) }
            })?;
            let swept = self.sweep(Covered::Contents, &suspects, |this, digest| {
                Ok(!this.reach.keeps_content(FileKind::Object, digest))
            })?;
            let kept = (kept.len() + suspects.len()) as u64 - swept.count;
            report.add(FileKind::Object, kept, swept);
        }
        Ok(())
    }

    /// Removes records of bases that name a garbage image, durably and before those images go.
    fn sweep_bases(&mut self) -> Result<()> {
        let mut suspects = Vec::new();
        for (image, path) in self.domain.base_records()? {
            if !self.keeps_base(&image)? {
                suspects.push(Suspect { what: image, path, kind: Kind::File });
            }
        }
        if self.options.dry_run || suspects.is_empty() {
            return Ok(());
        }
        self.sweep(Covered::Names, &suspects, |this, image| Ok(!this.keeps_base(image)?))?;
        self.domain.sync_directory(base::DIRECTORY)
    }

    fn keeps_base(&self, image: &Digest) -> Result<bool> {
        let Some(base) = self.domain.base_of(image)? else { return Ok(false) };
        let mut images = [image, &base.base, &base.delta].into_iter();
        Ok(images.all(|image| self.reach.keeps(&FileName::content(FileKind::Image, image))))
    }

    /// Temporary files and dead staging. A temporary file's writer holds the domain's lock, so
    /// under our exclusive lock it belongs to nobody.
    fn sweep_leftovers(&mut self, report: &mut GcReport) -> Result<()> {
        let domain = self.domain;
        let mut directories = RECORDS.map(str::to_owned).to_vec();
        let others =
            ["", used::DIRECTORY, base::DIRECTORY, scrub::DIRECTORY, profile::DIRECTORY, UNNAMED];
        directories.extend(others.map(str::to_owned));
        for (image, kind) in domain.entries(signatures::DIRECTORY)? {
            if kind == Kind::Directory {
                directories.push(format!("{}/{image}", signatures::DIRECTORY));
            }
        }
        let mut suspects = Vec::new();
        for directory in directories {
            for (entry, kind) in domain.entries(&directory)? {
                if entry.starts_with(TEMPORARY) {
                    let below = if directory.is_empty() { "" } else { "/" };
                    let path = format!("{}/{directory}{below}{entry}", domain.directory());
                    suspects.push(Suspect { what: (), path, kind });
                }
            }
        }
        let mut swept = self.sweep(Covered::Names, &suspects, |_, ()| Ok(true))?;
        let (count, bytes) = domain.store().collect_staging(self.options.dry_run)?;
        swept += Swept { count, bytes };
        report.leftovers += swept.count;
        report.leftover_bytes += swept.bytes;
        Ok(())
    }

    /// Removes what is known of images that are gone: their last use, signatures, last record.
    fn sweep_hints(&mut self) -> Result<()> {
        if self.options.dry_run {
            return Ok(());
        }
        let mut suspects = Vec::new();
        for directory in [used::DIRECTORY, signatures::DIRECTORY, profile::DIRECTORY, UNNAMED] {
            for (entry, kind) in self.domain.entries(directory)? {
                let Some(image) = Digest::from_lower_hex(entry.as_bytes()) else { continue };
                if !self.domain.has_image(&image)? {
                    let path = format!("{}/{directory}/{entry}", self.domain.directory());
                    suspects.push(Suspect { what: image, path, kind });
                }
            }
        }
        self.sweep(Covered::Names, &suspects, |this, image| Ok(!this.domain.has_image(image)?))
            .map(drop)
    }
}

impl GcReport {
    fn add(&mut self, kind: FileKind, kept: u64, swept: Swept) {
        let (removed, bytes, stays) = match kind {
            FileKind::Object => (&mut self.objects, &mut self.object_bytes, &mut self.kept_objects),
            FileKind::Image => (&mut self.images, &mut self.image_bytes, &mut self.kept_images),
            FileKind::Layer => (&mut self.layers, &mut self.layer_bytes, &mut self.kept_layers),
            // Counted with the layer's tree.
            FileKind::Split => {
                self.layer_bytes += swept.bytes;
                return;
            }
            FileKind::Segment => {
                (&mut self.segments, &mut self.segment_bytes, &mut self.kept_segments)
            }
            FileKind::Pack | FileKind::DaxPack => {
                (&mut self.packs, &mut self.segment_bytes, &mut self.kept_segments)
            }
        };
        *removed += swept.count;
        *bytes += swept.bytes;
        *stays += kept;
    }
}
