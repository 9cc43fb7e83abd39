//! Images on a base: `bases/<image>` names the image that it is mounted over, and the delta on top.
//!
//! ```text
//! image ──▶ base    an image that others are mounted over, too
//!      └──▶ delta   the rest of the image: an image file that only makes sense over its base
//! ```
//!
//! Both are in `images/` and kept as long as the image. They are derived: without them the image is
//! mounted from its own metadata image and takes more memory. So errors here stop nothing.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde::{Deserialize, Serialize};

use crate::disk::Kind;
use crate::error::{Result, by_hand, is_damage};
use crate::fsck::{Finding, FindingKind, FsckReport};
use crate::kinds::{FileKind, FileName};
use crate::records::to_json;
use crate::store::{TEMPORARY, remove_entry};
use crate::{Digest, Domain};

pub(crate) const DIRECTORY: &str = "bases";

/// More metadata images than this are not mounted over each other.
pub const LAYERS_MAX: usize = 16;

/// What an image is mounted from instead of its own metadata image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// The image below. It may have a base itself.
    pub base: Digest,
    /// The metadata image of what goes over it.
    pub delta: Digest,
    /// Chain id of the base's topmost layer.
    pub chain_id: String,
}

/// Images with their bases, the bases' bases, and so on.
pub(crate) fn with_bases(
    images: impl IntoIterator<Item = Digest>,
    bases: &BTreeMap<Digest, Base>,
) -> BTreeSet<Digest> {
    let mut found = BTreeSet::new();
    let mut open: Vec<Digest> = images.into_iter().collect();
    while let Some(image) = open.pop() {
        if found.insert(image) {
            open.extend(bases.get(&image).into_iter().flat_map(|base| [base.base, base.delta]));
        }
    }
    found
}

impl Domain {
    /// The base of an image; `None` if it has none that is complete.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn base_of(&self, image: &Digest) -> Result<Option<Base>> {
        let base = match self.read_record::<Base>(&self.base_file(image)) {
            // fsck reports it.
            Err(error) if is_damage(&error) => return Ok(None),
            record => record?,
        };
        let Some(base) = base else { return Ok(None) };
        let whole = self.has_image(&base.base)? && self.has_image(&base.delta)?;
        Ok(whole.then_some(base))
    }

    /// The metadata images that a mount of an image shows together, the topmost first: its delta and
    /// those of its base, or only its own.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn metadata_images(&self, image: &Digest) -> Result<Vec<Digest>> {
        let (mut found, mut bottom) = (Vec::new(), *image);
        // Damaged records could lead round in a circle.
        while found.len() + 1 < LAYERS_MAX
            && let Some(Base { base, delta, .. }) = self.base_of(&bottom)?
        {
            found.push(delta);
            bottom = base;
        }
        found.push(bottom);
        Ok(found)
    }

    /// All images that have a base, with it.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn bases(&self) -> Result<BTreeMap<Digest, Base>> {
        let mut bases = BTreeMap::new();
        for (image, _) in self.base_records()? {
            bases.extend(self.base_of(&image)?.map(|base| (image, base)));
        }
        Ok(bases)
    }

    /// Images that only serve others: deltas, and bases without a name.
    ///
    /// # Errors
    /// Those of [`Domain::readable_refs`].
    pub fn derived_images(&self) -> Result<HashSet<Digest>> {
        let bases = self.bases()?;
        let mut derived: HashSet<_> =
            bases.values().flat_map(|base| [base.base, base.delta]).collect();
        if !derived.is_empty() {
            for (_, record) in self.readable_refs()? {
                derived.remove(&record.image);
            }
        }
        Ok(derived)
    }

    /// Writes a record to a temporary file; gives it and its later place.
    pub(crate) fn prepare_base(&self, image: &Digest, base: &Base) -> Result<(String, String)> {
        self.make_directory(DIRECTORY)?;
        let path = self.base_file(image);
        let json = to_json(&path, base)?;
        self.prepare(path, &json)
    }

    /// Removes the records of what is not all there any more.
    pub(crate) fn drop_broken_bases(&self) -> Result<()> {
        let mut dropped = false;
        for (image, path) in self.base_records()? {
            if self.base_of(&image)?.is_none() {
                match remove_entry(self.disk(), &path, Kind::File) {
                    // A damaged inode, or a directory: fsck reports it.
                    Err(error) if by_hand(&error).is_some() => continue,
                    removed => drop(removed?),
                }
                dropped = true;
            }
        }
        if dropped { self.sync_directory(DIRECTORY) } else { Ok(()) }
    }

    /// Records that cannot be read, or name what is not there.
    pub(crate) fn fsck_bases(&self, report: &mut FsckReport) -> Result<()> {
        for (name, kind) in self.entries(DIRECTORY)? {
            let path = format!("{}/{DIRECTORY}/{name}", self.directory());
            let image = Digest::from_lower_hex(name.as_bytes()).filter(|_| kind == Kind::File);
            let Some(image) = image else {
                if !name.starts_with(TEMPORARY) {
                    report.add(Finding::new(FindingKind::UnexpectedEntry, path, ""));
                }
                continue;
            };
            let detail = match self.read_record::<Base>(&path) {
                Ok(Some(base)) => {
                    let images = [image, base.base, base.delta];
                    let files = images.map(|image| FileName::content(FileKind::Image, &image));
                    match self.missing_files(&files)?.first() {
                        None => continue,
                        Some(missing) => format!("{missing} is missing"),
                    }
                }
                Ok(None) => continue,
                Err(error) if is_damage(&error) => error.to_string(),
                Err(error) => return Err(error),
            };
            report.add(Finding::new(FindingKind::BaseIncomplete, path, detail).about(&image));
        }
        Ok(())
    }

    fn base_file(&self, image: &Digest) -> String {
        format!("{}/{DIRECTORY}/{image}", self.directory())
    }

    /// Images with a record, and its file.
    pub(crate) fn base_records(&self) -> Result<Vec<(Digest, String)>> {
        let entries = self.entries(DIRECTORY)?.into_iter();
        let images = entries.filter_map(|(name, _)| Digest::from_lower_hex(name.as_bytes()));
        Ok(images.map(|image| (image, self.base_file(&image))).collect())
    }
}
