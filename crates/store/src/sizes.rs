//! A check of every object's size, once per boot: a mount does not check protected objects
//! (fs-verity, or the immutable flag), so only a reader would find one that was truncated.
//!
//! It reads metadata only, at a limited rate, without a lock, and records the boot's id.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::contents::Contents;
use crate::error::{Error, Result};
use crate::examine::{Examiner, Reading, Seen};
use crate::fsck::Finding;
use crate::kinds::{FileKind, FileName};
use crate::task::Cancel;
use crate::{Digest, Domain};

/// The record, in the domain.
const RECORD: &str = "sizes.json";
/// Objects between two looks at the clock.
const BATCH: usize = 64;

/// What a look at all sizes found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SizesReport {
    /// `/proc/sys/kernel/random/boot_id` of the boot in which it was done.
    pub boot_id: String,
    /// Objects looked at.
    pub objects: u64,
    /// Objects that are missing or have the wrong size, and unreadable images.
    pub findings: Vec<Finding>,
}

impl Domain {
    /// The last check's report; `None` if there was none, or its record cannot be read.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sizes(&self) -> Result<Option<SizesReport>> {
        match self.read_record(&self.sizes_file()) {
            Err(Error::Corrupt { .. }) => Ok(None),
            other => other,
        }
    }

    /// Checks the size of every object that an image of the domain names, at most `per_second` each
    /// second, and records the boot `boot_id`. If `go_on` says no, returns `None` and records
    /// nothing.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`]. Damage is no error: it is in the report.
    pub fn examine_sizes(
        &self,
        contents: &dyn Contents,
        boot_id: &str,
        per_second: Option<u32>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<SizesReport>> {
        self.store().check_writable()?;
        let mut report = SizesReport { boot_id: boot_id.to_owned(), ..SizesReport::default() };
        let examiner = Examiner::new(self, contents, Reading::No, &Cancel::default());
        let mut sizes: BTreeMap<Digest, (u64, Digest)> = BTreeMap::new();
        for image in self.images()? {
            let name = FileName::content(FileKind::Image, &image);
            let seen = examiner.read(&name, &mut |digest, size| {
                sizes.entry(digest).or_insert((size, image));
            })?;
            report.findings.extend(seen.finding());
        }
        let (start, sizes) = (Instant::now(), sizes.into_iter().collect::<Vec<_>>());
        for batch in sizes.chunks(BATCH) {
            for (digest, (size, image)) in batch {
                let name = FileName::content(FileKind::Object, digest);
                let finding = match examiner.look(&name, Some(*size))?.0 {
                    Seen::Sound => continue,
                    Seen::Damaged(finding) => finding,
                    // Without a lock: it may have been collected with its image.
                    Seen::Missing if !self.has_image(image)? => continue,
                    Seen::Missing => examiner.missing_object(digest),
                };
                let user = FileName::content(FileKind::Image, image).to_string();
                report.findings.push(Finding { user: Some(user), ..finding });
            }
            report.objects += batch.len() as u64;
            if !go_on() {
                return Ok(None);
            }
            if let Some(rate) = per_second {
                let due = Duration::from_secs(report.objects) / rate.max(1);
                std::thread::sleep(due.saturating_sub(start.elapsed()));
            }
        }
        let path = self.sizes_file();
        let json = crate::records::to_json(&path, &report)?;
        self.store().replace_file(self.base(), &path, &json, false)?;
        Ok(Some(report))
    }

    fn sizes_file(&self) -> String {
        format!("{}/{RECORD}", self.base())
    }
}
