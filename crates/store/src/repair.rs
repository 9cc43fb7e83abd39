//! Repair: from what fsck found to an import that brings back only that.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::contents::{Contents, Part};
use crate::disk::Kind;
use crate::domain::{IMAGE_SUFFIX, LAYER_SUFFIX, RECORD_SUFFIX, SPLIT_SUFFIX};
use crate::error::{At, Error, Result};
use crate::fsck::{Finding, FindingKind, FsckOptions, FsckReport};
use crate::parallel::for_each;
use crate::segment::Pack;
use crate::staging::Staging;
use crate::store::remove_entry;
use crate::verify::hash_file;
use crate::{Digest, Domain, ImportOptions, RootKind, name};

/// What is missing from a domain or is not what its name says.
#[derive(Clone, Debug, Default)]
pub struct Damage {
    /// Objects that are missing, truncated or altered.
    pub objects: HashSet<Digest>,
    /// Images likewise.
    pub images: HashSet<Digest>,
    /// Chain ids of layers that have to be unpacked again: their tree is missing, it or their split is
    /// unreadable, or names an object that is damaged.
    pub layers: HashSet<String>,
}

impl Damage {
    /// Whether there is nothing that a source could bring back.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.images.is_empty() && self.layers.is_empty()
    }
}

impl Domain {
    /// What of the findings an import could bring back.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn damage(&self, report: &FsckReport, contents: &dyn Contents) -> Result<Damage> {
        let mut damage = Damage::default();
        for finding in &report.findings {
            match finding.kind {
                FindingKind::ObjectMissing
                | FindingKind::ObjectTruncated
                | FindingKind::ObjectAltered => damage.objects.extend(finding.digest),
                FindingKind::ImageAltered | FindingKind::ImageUnreadable => {
                    let stem = stem(&finding.path, IMAGE_SUFFIX);
                    damage.images.extend(stem.and_then(|s| Digest::from_lower_hex(s.as_bytes())));
                }
                FindingKind::LayerUnreadable => {
                    let layer = stem(&finding.path, LAYER_SUFFIX)
                        .or_else(|| stem(&finding.path, SPLIT_SUFFIX));
                    damage.layers.extend(layer.and_then(name::decode));
                }
                _ => {}
            }
        }
        self.missing_parts_of_records(&mut damage)?;
        for chain_id in self.layers()? {
            let mut hit = false;
            let part = Part::Layer(chain_id.clone());
            let read = part.visit_whole(self, contents, &mut |digest, _| {
                hit |= damage.objects.contains(&digest);
            });
            if hit || read.is_err() {
                damage.layers.insert(chain_id);
            }
        }
        Ok(damage)
    }

    /// Begins an import of which only what is damaged is kept; everything else counts as known. It holds
    /// garbage collection off. What is staged replaces what is in place by a rename: who holds the old
    /// file open, a mount included, keeps the old one.
    ///
    /// # Errors
    /// As [`Domain::begin_import`].
    pub fn begin_repair(&self, damage: &Damage) -> Result<Staging> {
        let options = ImportOptions { hold_lock: true, repair: true, ..ImportOptions::default() };
        let mut staging = self.begin_import(options)?;
        staging.wanted = Some(damage.clone());
        Ok(staging)
    }

    /// Removes what is derived among the findings: it can be made again from images and objects, and is worth nothing as it
    /// is. Gives the images that had a pack and have none now.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`].
    pub fn remove_derived(&self, report: &FsckReport) -> Result<BTreeSet<Digest>> {
        self.store().check_writable()?;
        let _lock = self.lock_shared()?;
        let mut images = BTreeSet::new();
        let derived = report.findings.iter().filter(|finding| finding.kind.is_derived());
        for path in derived.map(|finding| &finding.path) {
            remove_entry(self.disk(), path, Kind::File)?;
            let pack = path.rsplit('/').next().and_then(Pack::of_file);
            images.extend(pack.map(|pack| pack.image));
        }
        self.drop_broken_bases()?;
        for directory in ["segments", "images"] {
            let directory = format!("{}/{directory}", self.base());
            self.disk().sync_dir(&directory).at("sync", &directory)?;
        }
        Ok(images)
    }

    /// Gives content in place the protection that this store gives and that it lacks: fs-verity, if the filesystem
    /// has gained it since (`tune2fs -O verity`), and the immutable flag. What is not what its name says is left
    /// as it is, for fsck to tell. Returns how many files are protected now that were not.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Corrupt`] if the kernel computes another digest than this
    /// program, [`crate::Error::Io`].
    pub fn protect_all(&self) -> Result<u64> {
        self.store().check_writable()?;
        let _lock = self.lock_shared()?;
        let mut files = Vec::new();
        for digest in self.all_images()? {
            files.push((self.image_file(&digest), Some(digest)));
        }
        for suffix in [LAYER_SUFFIX, SPLIT_SUFFIX] {
            let stems = self.files("layers", suffix)?;
            files.extend(
                stems.iter().map(|stem| (format!("{}/layers/{stem}{suffix}", self.base()), None)),
            );
        }
        for segment in self.segments()? {
            files.push((self.segment_file(&segment), Some(segment)));
        }
        for pack in self.packs()? {
            files.push((self.pack_file(&pack), Some(pack.digest)));
        }
        let objects = format!("{}/objects", self.base());
        for (shard, kind) in self.disk().list(&objects).at("list", &objects)? {
            let directory = format!("{objects}/{shard}");
            let entries = match kind {
                Kind::Directory => self.disk().list(&directory).at("list", &directory)?,
                _ => continue,
            };
            let digests =
                entries.iter().filter_map(|(name, _)| Digest::from_object_path(&shard, name));
            files.extend(digests.map(|digest| (self.object_file(&digest), Some(digest))));
        }
        let count = AtomicU64::new(0);
        for_each(self.disk().parallelism(), &files, |(path, digest)| {
            count.fetch_add(self.protect_file(path, digest.as_ref())?.into(), Relaxed);
            Ok(())
        })?;
        if count.load(Relaxed) > 0 {
            self.disk().sync_all().at("sync", self.base())?;
        }
        Ok(count.into_inner())
    }

    /// Protects one file, whose content has that digest if it has one; says whether there was something to do.
    fn protect_file(&self, path: &str, digest: Option<&Digest>) -> Result<bool> {
        let disk = self.disk();
        let (protection, stat) = (self.protection(), disk.stat(path).at("look at", path)?);
        let wants_flag = protection.immutable && !stat.immutable;
        let wants_verity = protection.verity
            && digest.is_some()
            && disk.measure_verity(path).at("measure", path)?.is_none();
        if stat.kind != Kind::File || !(wants_flag || wants_verity) {
            return Ok(false);
        }
        if let Some(digest) = digest {
            let Some(file) = self.open_file(path.to_owned())? else { return Ok(false) };
            if hash_file(&file)? != *digest {
                return Ok(false);
            }
        }
        let mut measured = Ok(digest.map(|digest| digest.0));
        if wants_verity {
            if stat.immutable {
                disk.set_immutable(path, false).at("clear the immutable flag of", path)?;
            }
            measured = disk.enable_verity(path).at("enable fs-verity on", path);
        }
        // Whatever came of that.
        if protection.immutable {
            disk.set_immutable(path, true).at("make immutable", path)?;
        }
        if measured? != digest.map(|digest| digest.0) {
            return Err(Error::corrupt(path, "the kernel computes another fs-verity digest"));
        }
        Ok(true)
    }

    /// What is still wrong after a repair. Of content, only what was damaged before is read.
    ///
    /// # Errors
    /// As [`Domain::fsck`].
    pub fn recheck(&self, damage: &Damage, contents: &dyn Contents) -> Result<FsckReport> {
        let mut report = self.fsck(contents, FsckOptions { rehash: false }, &|_, _| ())?;
        for digest in &damage.objects {
            // Missing and truncated ones are known already.
            match self.check_object(digest, None, Some(1))? {
                Some(finding) if finding.kind == FindingKind::ObjectAltered => {
                    report.findings.push(finding);
                }
                _ => {}
            }
        }
        for digest in &damage.images {
            if !self.has_image(digest)? {
                continue;
            }
            let file = self.open_image(digest)?;
            let actual = hash_file(&file)?;
            if actual != *digest {
                let detail = format!("its content has digest {actual}");
                let finding = Finding::new(FindingKind::ImageAltered, file.path(), detail);
                report.findings.push(finding.about(digest));
            }
        }
        report.findings.sort_by(|a, b| (a.kind, &a.path).cmp(&(b.kind, &b.path)));
        Ok(report)
    }

    /// Images and layers that a ref or root names and that are not there. A record that cannot be read is
    /// a finding of its own.
    fn missing_parts_of_records(&self, damage: &mut Damage) -> Result<()> {
        let mut named = Vec::new();
        for stem in self.files("refs", RECORD_SUFFIX)? {
            let path = format!("{}/refs/{stem}{RECORD_SUFFIX}", self.base());
            if let Ok(Some((_, record))) = self.read_ref(&path) {
                let layers = record.layers.into_iter().map(|layer| layer.chain_id);
                named.push((vec![record.image], layers.collect()));
            }
        }
        for kind in RootKind::ALL.map(RootKind::as_str) {
            for stem in self.files(&format!("roots/{kind}"), RECORD_SUFFIX)? {
                let path = format!("{}/roots/{kind}/{stem}{RECORD_SUFFIX}", self.base());
                if let Ok(Some(root)) = self.read_root(&path) {
                    named.push((root.images, root.layers));
                }
            }
        }
        for (images, layers) in named {
            for part in self.missing_parts(&images, layers.iter().map(String::as_str))? {
                match part {
                    Part::Image(image) => damage.images.insert(image),
                    Part::Layer(chain_id) | Part::Split(chain_id) => damage.layers.insert(chain_id),
                };
            }
        }
        Ok(())
    }
}

/// The file's name without its directory and suffix.
fn stem<'a>(path: &'a str, suffix: &str) -> Option<&'a str> {
    path.rsplit('/').next()?.strip_suffix(suffix)
}
