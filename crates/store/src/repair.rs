//! Repair: from what fsck found to an import that brings back only that.

use std::collections::HashSet;

use crate::contents::{Contents, Part};
use crate::domain::{IMAGE_SUFFIX, LAYER_SUFFIX, RECORD_SUFFIX, SPLIT_SUFFIX};
use crate::error::Result;
use crate::fsck::{Finding, FindingKind, FsckOptions, FsckReport};
use crate::staging::Staging;
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
