//! Garbage collection: what no ref, root or live mount keeps goes.
//!
//! Under the domain's exclusive lock, so that nothing is published meanwhile:
//!
//! 1. mark: refs, roots and what the caller says is mounted give the images and layers to keep; those
//!    give the objects to keep. Whatever cannot be read ends the run before anything is changed;
//! 2. leases that have run out and mounts of an earlier boot go;
//! 3. images, layers and packs that are not marked go, and that is made durable: no image that is in place ever
//!    lacks an object, after a crash either, and no pack a segment;
//! 4. objects and segments that are not marked go, and what is kept gets its protection if it lacks it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::base::with_bases;
use crate::contents::{Contents, DigestSet, Part};
use crate::disk::{Kind, LockMode};
use crate::domain::{IMAGE_SUFFIX, LAYER_SUFFIX, RECORD_SUFFIX, SPLIT_SUFFIX};
use crate::error::{At, BoxError, Error, Result};
use crate::parallel::for_each;
use crate::record::{Root, RootKind};
use crate::segment::Pack;
use crate::store::{TEMPORARY, remove_entry};
use crate::{Digest, Domain, name};

/// How a garbage collection is run.
#[derive(Clone, Debug, Default)]
pub struct GcOptions {
    /// Change nothing, only say what would be.
    pub dry_run: bool,
    /// Wait for imports that are being published; otherwise [`Error::Busy`].
    pub wait: bool,
    /// Seconds since 1970: leases that expire before are dropped. 0 drops none.
    pub now: i64,
    /// `/proc/sys/kernel/random/boot_id`: mounts that say another one are gone since the reboot.
    pub boot_id: Option<String>,
}

/// What a garbage collection removed (or would remove) and kept. Bytes are allocated bytes, as `du`
/// counts them.
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
    /// Packs removed: of images that are, and those that cannot be used.
    pub packs: u64,
    /// Segments removed.
    pub segments: u64,
    /// Bytes of both.
    pub segment_bytes: u64,
    /// Roots removed: `lease/<id>` that had run out, `mount/<id>` of an earlier boot.
    pub roots: Vec<String>,
    /// Leftovers of interrupted imports and writes that were removed.
    pub leftovers: u64,
    /// Their bytes.
    pub leftover_bytes: u64,
    /// Objects kept.
    pub kept_objects: u64,
    /// Images kept.
    pub kept_images: u64,
    /// Layers kept.
    pub kept_layers: u64,
    /// Segments and packs kept.
    pub kept_segments: u64,
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

/// What is kept, and which roots are not roots any more.
struct Marks {
    /// Images and layers with one of those that keep them, for messages.
    parts: BTreeMap<Part, String>,
    /// What a pack is made from is all there: one that cannot be used is not worth keeping, and must not stand in the
    /// way of anything.
    packs: Vec<Pack>,
    /// Objects and segments.
    objects: DigestSet,
    stale_roots: StaleRoots,
}

/// Roots by what they are called in messages.
type LiveRoots = Vec<(String, Root)>;
/// Roots that are none any more: what they are called, and the file.
type StaleRoots = Vec<(String, String)>;

impl Domain {
    /// Collects what nothing keeps. `live` is asked, with the lock held, which images are mounted or
    /// otherwise in use beyond what the roots say; it must not take the domain's lock itself.
    ///
    /// # Errors
    /// [`Error::Unreadable`] or [`Error::Corrupt`] naming a record, image or layer that cannot be read:
    /// nothing was collected. [`Error::Busy`], [`Error::ReadOnly`], [`Error::Io`].
    pub fn gc(
        &self,
        contents: &dyn Contents,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        options: &GcOptions,
    ) -> Result<GcReport> {
        if !options.dry_run {
            self.store().check_writable()?;
        }
        let Some(_lock) = self.lock(LockMode::Exclusive, options.wait)? else {
            return Err(Error::Busy { domain: self.name().to_owned() });
        };
        self.gc_locked(contents, live, options, &BTreeSet::new())
    }

    /// The garbage collection itself, with the exclusive lock held, as if the refs `without` were gone.
    pub(crate) fn gc_locked(
        &self,
        contents: &dyn Contents,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        options: &GcOptions,
        without: &BTreeSet<String>,
    ) -> Result<GcReport> {
        let marks = self.mark(contents, live, options, without)?;
        let mut report = GcReport { dry_run: options.dry_run, ..GcReport::default() };
        // Before anything is protected again: a crash in the middle of a rename can leave a file with its
        // old name in staging too, and removing that name takes the flag from the file.
        self.sweep_leftovers(&mut report)?;
        for (root, path) in &marks.stale_roots {
            self.sweep(path, options.dry_run)?;
            report.roots.push(root.clone());
        }
        if !options.dry_run {
            self.sweep_bases(|image| marks.parts.contains_key(&Part::Image(*image)))?;
        }
        self.sweep_parts(&marks, &mut report)?;
        self.sweep_packs(&marks.packs, &mut report)?;
        if !options.dry_run {
            self.disk().sync_all().at("sync", self.base())?;
        }
        self.sweep_segments(&marks.objects, &mut report)?;
        self.sweep_objects(&marks.objects, &mut report)?;
        if !options.dry_run {
            self.sweep_used()?;
            self.sweep_signatures()?;
        }
        Ok(report)
    }

    fn mark(
        &self,
        contents: &dyn Contents,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        options: &GcOptions,
        without: &BTreeSet<String>,
    ) -> Result<Marks> {
        let mut parts = BTreeMap::new();
        for (name, record) in self.refs()? {
            if without.contains(&name) {
                continue;
            }
            let by = format!("ref `{name}`");
            parts.entry(Part::Image(record.image)).or_insert_with(|| by.clone());
            for layer in record.layers {
                parts.entry(Part::Layer(layer.chain_id)).or_insert_with(|| by.clone());
            }
        }
        let (roots, stale_roots) = self.live_roots(options)?;
        for (shown, root) in roots {
            for image in root.images {
                parts.entry(Part::Image(image)).or_insert_with(|| shown.clone());
            }
            for layer in root.layers {
                parts.entry(Part::Layer(layer)).or_insert_with(|| shown.clone());
            }
        }
        let live = live().map_err(|source| Error::Unreadable {
            what: "this machine's live mounts".to_owned(),
            source,
        })?;
        for image in live {
            parts.entry(Part::Image(image)).or_insert_with(|| "a live mount".to_owned());
        }
        let mut objects = DigestSet::new();
        for (part, kept_by) in &parts {
            part.visit_whole(self, contents, &mut |digest, _| objects.insert(digest))
                .map_err(|source| part.unreadable(kept_by, source))?;
        }
        let images: Vec<_> = parts.keys().filter_map(Part::image).collect();
        for image in with_bases(images, &self.bases()?) {
            let (part, mut named) = (Part::Image(image), Vec::new());
            // What only others are mounted over is derived: if it cannot be read, it is not worth keeping.
            if !parts.contains_key(&part)
                && part.visit(self, contents, &mut |digest, _| named.push(digest)).is_ok()
            {
                named.into_iter().for_each(|digest| objects.insert(digest));
                parts.insert(part, "an image over it".to_owned());
            }
        }
        let mut packs = Vec::new();
        for (pack, segments) in self.packs_with_segments(contents)? {
            let segments = segments.filter(|_| parts.contains_key(&Part::Image(pack.image)));
            let Some(segments) = segments.filter(|segments| self.are_there(segments)) else {
                continue;
            };
            segments.into_iter().for_each(|segment| objects.insert(segment));
            packs.push(pack);
        }
        objects.seal();
        Ok(Marks { parts, packs, objects, stale_roots })
    }

    /// Roots that keep something, and those that do not any more; by what they are called in messages,
    /// the latter with their files.
    pub(crate) fn live_roots(&self, options: &GcOptions) -> Result<(LiveRoots, StaleRoots)> {
        let (mut roots, mut stale) = (Vec::new(), Vec::new());
        for kind in RootKind::ALL {
            for stem in self.files(&format!("roots/{}", kind.as_str()), RECORD_SUFFIX)? {
                let path = format!("{}/roots/{}/{stem}{RECORD_SUFFIX}", self.base(), kind.as_str());
                let shown = format!("{}/{}", kind.as_str(), name::decode(&stem).unwrap_or(stem));
                match self.read_root(&path) {
                    Ok(None) => {}
                    Ok(Some(root)) if is_stale(&root, options) => stale.push((shown, path)),
                    Ok(Some(root)) => roots.push((shown, root)),
                    // Mount records are not synced. A torn one was written shortly before a crash, and
                    // its mount went with that crash.
                    Err(Error::Corrupt { .. }) if kind == RootKind::Mount => {
                        stale.push((shown, path));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((roots, stale))
    }

    fn sweep_parts(&self, marks: &Marks, report: &mut GcReport) -> Result<()> {
        let immutable = self.protection().immutable && !report.dry_run;
        for stem in self.files("images", IMAGE_SUFFIX)? {
            let path = format!("{}/images/{stem}{IMAGE_SUFFIX}", self.base());
            let digest = Digest::from_lower_hex(stem.as_bytes());
            if digest.is_some_and(|digest| marks.parts.contains_key(&Part::Image(digest))) {
                report.kept_images += 1;
                if immutable {
                    self.protect_again(&path)?;
                }
                continue;
            }
            report.image_bytes += self.sweep(&path, report.dry_run)?;
            report.images += 1;
        }
        // A long chain id is hashed into its file name, so compare encoded.
        let is_kept = |stem: &str| {
            marks.parts.keys().any(|part| match part {
                Part::Layer(chain_id) => name::matches(stem, chain_id),
                Part::Image(_) | Part::Split(_) => false,
            })
        };
        for stem in self.files("layers", LAYER_SUFFIX)? {
            let path = format!("{}/layers/{stem}{LAYER_SUFFIX}", self.base());
            if is_kept(&stem) {
                report.kept_layers += 1;
                if immutable {
                    self.protect_again(&path)?;
                }
                continue;
            }
            report.layer_bytes += self.sweep(&path, report.dry_run)?;
            report.layers += 1;
        }
        for stem in self.files("layers", SPLIT_SUFFIX)? {
            let path = format!("{}/layers/{stem}{SPLIT_SUFFIX}", self.base());
            if !is_kept(&stem) {
                report.layer_bytes += self.sweep(&path, report.dry_run)?;
            } else if immutable {
                self.protect_again(&path)?;
            }
        }
        Ok(())
    }

    fn sweep_packs(&self, keep: &[Pack], report: &mut GcReport) -> Result<()> {
        for pack in self.packs()? {
            let path = self.pack_file(&pack);
            if keep.contains(&pack) {
                report.kept_segments += 1;
                self.keep_protected(&path, report)?;
            } else {
                report.segment_bytes += self.sweep(&path, report.dry_run)?;
                report.packs += 1;
            }
        }
        Ok(())
    }

    fn sweep_segments(&self, keep: &DigestSet, report: &mut GcReport) -> Result<()> {
        for segment in self.segments()? {
            let path = self.segment_file(&segment);
            if keep.contains(&segment) {
                report.kept_segments += 1;
                self.keep_protected(&path, report)?;
            } else {
                report.segment_bytes += self.sweep(&path, report.dry_run)?;
                report.segments += 1;
            }
        }
        Ok(())
    }

    fn are_there(&self, segments: &[Digest]) -> bool {
        let size = |segment| self.file_size(&self.segment_file(segment));
        segments.iter().all(|segment| size(segment).is_ok_and(|size| size.is_some()))
    }

    fn keep_protected(&self, path: &str, report: &GcReport) -> Result<()> {
        match self.protection().immutable && !report.dry_run {
            true => self.protect_again(path),
            false => Ok(()),
        }
    }

    fn sweep_objects(&self, keep: &DigestSet, report: &mut GcReport) -> Result<()> {
        let objects = format!("{}/objects", self.base());
        let shards = self.disk().list(&objects).at("list", &objects)?;
        let dry_run = report.dry_run;
        let immutable = self.protection().immutable && !dry_run;
        let total = Mutex::new(&mut *report);
        for_each(self.disk().parallelism(), &shards, |(shard, kind)| {
            if *kind != Kind::Directory {
                return Ok(());
            }
            let directory = format!("{objects}/{shard}");
            let (mut removed, mut bytes, mut kept) = (0, 0, 0);
            for (entry, kind) in self.disk().list(&directory).at("list", &directory)? {
                match Digest::from_object_path(shard, &entry) {
                    Some(digest) if kind == Kind::File && !keep.contains(&digest) => {
                        bytes += self.sweep(&format!("{directory}/{entry}"), dry_run)?;
                        removed += 1;
                    }
                    Some(_) => {
                        kept += 1;
                        if immutable && kind == Kind::File {
                            self.protect_again(&format!("{directory}/{entry}"))?;
                        }
                    }
                    // Not ours: fsck reports it.
                    None => {}
                }
            }
            let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
            total.objects += removed;
            total.object_bytes += bytes;
            total.kept_objects += kept;
            Ok(())
        })
    }

    /// An import that was interrupted after publishing its content may not have got to protecting it.
    fn protect_again(&self, path: &str) -> Result<()> {
        if self.disk().stat(path).at("look at", path)?.immutable {
            return Ok(());
        }
        self.disk().set_immutable(path, true).at("make immutable", path)
    }

    /// Temporary files (with the exclusive lock held nobody is writing one) and dead staging.
    fn sweep_leftovers(&self, report: &mut GcReport) -> Result<()> {
        let kinds = RootKind::ALL.map(|kind| format!("roots/{}", kind.as_str()));
        let below = kinds.iter().map(String::as_str).chain(["refs"]);
        let below = below.map(|directory| format!("{}/{directory}", self.base()));
        for directory in below.chain([self.base().to_owned()]) {
            for (entry, _) in self.disk().list(&directory).at("list", &directory)? {
                if entry.starts_with(TEMPORARY) {
                    report.leftover_bytes +=
                        self.sweep(&format!("{directory}/{entry}"), report.dry_run)?;
                    report.leftovers += 1;
                }
            }
        }
        if report.dry_run {
            report.leftovers += self.store().orphaned_staging()?.len() as u64;
        } else {
            let (count, bytes) = self.store().collect_staging()?;
            report.leftovers += count;
            report.leftover_bytes += bytes;
        }
        Ok(())
    }

    /// Removes a file (unless it is a dry run) and says how many bytes it had allocated.
    fn sweep(&self, path: &str, dry_run: bool) -> Result<u64> {
        if dry_run {
            return Ok(self.disk().stat(path).at("look at", path)?.allocated);
        }
        remove_entry(self.disk(), path, Kind::File)
    }
}

fn is_stale(root: &Root, options: &GcOptions) -> bool {
    match root.kind {
        RootKind::Lease => root.expires.is_some_and(|expires| expires < options.now),
        RootKind::Mount => match (&root.boot_id, &options.boot_id) {
            (Some(theirs), Some(ours)) => theirs != ours,
            _ => false,
        },
        RootKind::Ref | RootKind::Snapshot | RootKind::Vm => false,
    }
}
