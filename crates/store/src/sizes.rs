//! A check of every object's size, once per boot: a mount does not check protected objects
//! (fs-verity, or the immutable flag), so only a reader would find one that was truncated.
//!
//! It reads metadata only, without a lock, and records the boot's id.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::contents::Contents;
use crate::error::{Result, is_damage};
use crate::examine::{Examiner, Reading, Seen};
use crate::fsck::{Finding, list};
use crate::kinds::{FileKind, FileName};
use crate::task::Cancel;
use crate::{Digest, Domain};

/// The record, in the domain.
const RECORD: &str = "sizes.json";

/// What a look at all sizes found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SizesReport {
    /// `/proc/sys/kernel/random/boot_id` of the boot in which it was done.
    pub boot_id: String,
    /// Objects looked at.
    pub objects: u64,
    /// Objects that are missing or have the wrong size, and unreadable images; at most 10,000.
    pub findings: Vec<Finding>,
    /// Findings that are not listed because there are too many.
    #[serde(default)]
    pub more: u64,
}

impl Domain {
    /// The last check's report; `None` if there was none, or its record cannot be read.
    pub fn sizes(&self) -> Result<Option<SizesReport>> {
        match self.read_record(&self.sizes_file()) {
            Err(error) if is_damage(&error) => Ok(None),
            other => other,
        }
    }

    /// Checks the size of every object that an image of the domain names, and records the boot
    /// `boot_id`.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Cancelled`], [`crate::Error::Io`]; nothing is recorded
    /// then. Damage is no error: it is in the report, also where that cannot be recorded.
    pub fn examine_sizes(
        &self,
        contents: &dyn Contents,
        boot_id: &str,
        cancel: &Cancel,
    ) -> Result<SizesReport> {
        self.store().check_writable()?;
        let mut report = SizesReport { boot_id: boot_id.to_owned(), ..SizesReport::default() };
        let examiner = Examiner::new(self, contents, Reading::No, cancel);
        let mut sizes: BTreeMap<Digest, (u64, Digest)> = BTreeMap::new();
        for image in self.images()? {
            cancel.check()?;
            let name = FileName::content(FileKind::Image, &image);
            let seen = examiner.read(&name, &mut |digest, size| {
                sizes.entry(digest).or_insert((size, image));
            })?;
            if let Some(finding) = seen.finding() {
                list(&mut report.findings, &mut report.more, finding);
            }
        }
        for (digest, (size, image)) in &sizes {
            report.objects += 1;
            let name = FileName::content(FileKind::Object, digest);
            let finding = match examiner.look(&name, Some(*size))?.0 {
                Seen::Sound => continue,
                Seen::Damaged(finding) => finding,
                // Without a lock: it may have been collected with its image.
                Seen::Missing if !self.has_image(image)? => continue,
                Seen::Missing => examiner.missing_object(digest),
            };
            let user = FileName::content(FileKind::Image, image).to_string();
            let finding = Finding { user: Some(user), ..finding };
            list(&mut report.findings, &mut report.more, finding);
        }
        let path = self.sizes_file();
        let _lock = self.lock_shared()?;
        let json = crate::records::to_json(&path, &report)?;
        let saved = self.store().replace_file(&path, &json, false);
        // Otherwise the next upkeep finds it again.
        if report.findings.is_empty() {
            saved?;
        }
        Ok(report)
    }

    fn sizes_file(&self) -> String {
        format!("{}/{RECORD}", self.directory())
    }
}
