//! Scrubbing: rereads everything, slowly and quietly, to find a failing disk while repair is
//! possible.
//!
//! A scrub may take days, so it holds no lock, remembers its progress, and leaves the page cache as
//! it was: it reads past the cache where the filesystem can, which shows the disk's content and not
//! memory's, and elsewhere drops again what it brought in.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::contents::Contents;
use crate::error::{Error, Result};
use crate::examine::{Examiner, Quiet, Reader, Reading, Seen};
use crate::fsck::{Finding, list, sort};
use crate::kinds::{FileKind, FileName};
use crate::record::now;
use crate::store::{mkdir_if_missing, parent};
use crate::task::{Event, Task};
use crate::{Digest, Domain, verity};

/// Directory of what scrubs remember, one file per selection of images.
pub(crate) const DIRECTORY: &str = "scrub";
/// The file there of the last scrub of everything that ended.
const COMPLETE: &str = "complete";
/// How often is noted how far it has come. What was read since is read again after a kill.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);
/// Largest record that is read, in bytes.
const RECORD_SIZE_MAX: u64 = 16 << 20;

/// What to scrub, and how fast.
#[derive(Clone, Debug, Default)]
pub struct ScrubOptions {
    /// These images and their objects; `None` for everything in the domain.
    pub images: Option<Vec<Digest>>,
    /// Bytes per second, at most.
    pub rate: Option<u64>,
}

/// How far a scrub has come, or what it found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Objects and segments read, by runs before this one too.
    pub objects: u64,
    /// Objects and segments in all.
    pub objects_total: u64,
    /// Bytes of them read, by runs before this one too.
    pub bytes: u64,
    /// Of these, read by earlier runs that did not get to the end.
    pub bytes_before: u64,
    /// Objects that were collected meanwhile.
    pub gone: u64,
    /// What is wrong, at most 10,000.
    pub findings: Vec<Finding>,
    /// Findings that are not listed because there are too many.
    #[serde(default)]
    pub more: u64,
}

/// What is remembered of a scrub that has not ended.
#[derive(Serialize, Deserialize)]
struct Saved {
    /// The last object that was read; they are read in order.
    after: Digest,
    report: ScrubReport,
}

/// The last scrub of a whole trust domain that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompleteScrub {
    /// When it ended, in seconds since 1970.
    pub time: i64,
    /// Damaged files that it found.
    pub damaged: u64,
}

impl Domain {
    /// Reads and hashes objects, segments, images, packs and layers; resumes an interrupted scrub.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Unreadable`], [`Error::Io`]. Damage is no error: it is in the
    /// report.
    pub fn scrub(
        &self,
        contents: &dyn Contents,
        options: &ScrubOptions,
        task: &Task,
    ) -> Result<ScrubReport> {
        let scope = scope(options.images.as_deref());
        let saved: Option<Saved> = self.saved_scrub(&scope);
        let mut after = saved.as_ref().map(|saved| saved.after);
        let mut report = saved.map(|saved| saved.report).unwrap_or_default();
        report.bytes_before = report.bytes;

        let images = match &options.images {
            Some(images) => images.clone(),
            None => self.all_images()?,
        };
        let reader = Mutex::new(Reader::new(options.rate));
        let mut examiner = Examiner::new(self, contents, Reading::Direct(reader), &task.cancel);
        examiner.derived = self.derived_images()?;
        let mut objects = BTreeMap::new();
        // Metadata is little, and read every time: it says which objects there have to be.
        let mut metadata = examiner.scrub_metadata(options, &images, &mut objects)?;
        let mut segments = examiner.scrub_packs(&images, &mut metadata)?;
        if options.images.is_none() {
            self.each_object(&mut |digest, _| {
                objects.entry(digest).or_insert(None);
            })?;
            segments.extend(self.named(FileKind::Segment)?.iter().filter_map(FileName::digest));
        }
        objects.extend(segments.iter().map(|segment| (*segment, None)));
        report.objects_total = objects.len() as u64;
        let mut last_saved = Instant::now();
        for (digest, size) in objects {
            if after.is_some_and(|after| digest <= after) {
                continue;
            }
            let kind =
                if segments.contains(&digest) { FileKind::Segment } else { FileKind::Object };
            let (seen, bytes) = examiner.look(&FileName::content(kind, &digest), size)?;
            match seen {
                Seen::Sound => {}
                Seen::Damaged(finding) => {
                    list(&mut report.findings, &mut report.more, finding);
                }
                // A missing segment is a finding of its pack.
                Seen::Missing if kind == FileKind::Segment => {}
                Seen::Missing => report.gone += 1,
            }
            report.objects += 1;
            report.bytes += bytes;
            after = Some(digest);
            task.tell(Event::Done {
                bytes: report.bytes,
                bytes_total: None,
                items: report.objects,
                items_total: Some(report.objects_total),
            });
            if last_saved.elapsed() >= SAVE_INTERVAL {
                last_saved = Instant::now();
                // A hint: without it the next run reads more than it must.
                let _ = self.save_scrub(&scope, &Saved { after: digest, report: report.clone() });
            }
        }
        // Without a lock, objects may have been collected together with their images. An object is
        // lost only if it is still missing when an image that names it is still here.
        let (mut present, mut lost) = (HashSet::new(), BTreeSet::new());
        let is_missing = |digest: &Digest| matches!(self.object_size(digest), Ok(None));
        for image in &images {
            task.check()?;
            let (name, mut missing) = (FileName::content(FileKind::Image, image), Vec::new());
            examiner.read_quietly(&name, &mut |digest, _| {
                if !present.contains(&digest) && is_missing(&digest) {
                    missing.push(digest);
                } else {
                    present.insert(digest);
                }
            })?;
            // The image may have been imported again since.
            if !missing.is_empty() && self.has_image(image)? {
                lost.extend(missing.into_iter().filter(is_missing));
            }
        }
        report.gone = report.gone.saturating_sub(lost.len() as u64);
        metadata.extend(lost.iter().map(|digest| examiner.missing_object(digest)));
        for finding in metadata {
            list(&mut report.findings, &mut report.more, finding);
        }
        sort(&mut report.findings);
        report.findings.dedup();
        if options.images.is_none() {
            let damaged = report.findings.len() as u64 + report.more;
            // A hint: without it the next one may come early.
            let _ = self.save_scrub(COMPLETE, &CompleteScrub { time: now(), damaged });
        }
        let _ = self.disk().unlink(&self.scrub_file(&scope));
        Ok(report)
    }

    /// The last scrub of everything that ended, if that is known.
    pub fn complete_scrub(&self) -> Option<CompleteScrub> {
        self.saved_scrub(COMPLETE)
    }

    fn scrub_file(&self, scope: &str) -> String {
        format!("{}/{DIRECTORY}/{scope}.json", self.directory())
    }

    /// A record that cannot be read means that there was none.
    fn saved_scrub<T: DeserializeOwned>(&self, scope: &str) -> Option<T> {
        let file = self.open_file(self.scrub_file(scope)).ok()??;
        serde_json::from_slice(&file.read_all(RECORD_SIZE_MAX).ok()?).ok()
    }

    fn save_scrub(&self, scope: &str, saved: &impl Serialize) -> Result<()> {
        self.store().check_writable()?;
        let _lock = self.lock_shared()?;
        let path = self.scrub_file(scope);
        mkdir_if_missing(self.disk(), parent(&path))?;
        let json = serde_json::to_vec(saved).map_err(|error| Error::corrupt(&path, error))?;
        self.store().replace_file(&path, &json, false)
    }
}

impl Examiner<'_> {
    /// Examines images and, if everything is scrubbed, layers and splits; returns what is wrong
    /// with them and adds the objects that images name.
    fn scrub_metadata(
        &self,
        options: &ScrubOptions,
        images: &[Digest],
        objects: &mut BTreeMap<Digest, Option<u64>>,
    ) -> Result<Vec<Finding>> {
        let mut files: Vec<_> =
            images.iter().map(|image| FileName::content(FileKind::Image, image)).collect();
        if options.images.is_none() {
            files.extend(self.domain.named(FileKind::Layer)?);
            files.extend(self.domain.named(FileKind::Split)?);
        }
        let mut findings = Vec::new();
        for name in files {
            let seen = match self.look(&name, None)?.0 {
                Seen::Sound => self.read_quietly(&name, &mut |digest, size| {
                    if name.kind() == FileKind::Image {
                        objects.insert(digest, Some(size));
                    }
                })?,
                seen => seen,
            };
            match seen {
                Seen::Missing if options.images.is_some() => {
                    return Err(Error::NoSuch(name));
                }
                // Collected since it was listed, if it is missing.
                seen => findings.extend(seen.finding()),
            }
        }
        Ok(findings)
    }

    /// [`Examiner::read`], with the page cache as before.
    fn read_quietly(&self, name: &FileName, found: &mut dyn FnMut(Digest, u64)) -> Result<Seen> {
        let Ok(file) = self.domain.open_named(name) else { return Ok(Seen::Missing) };
        let _quiet = Quiet::begin(&file, 0, 0);
        self.read(name, found)
    }

    /// Adds what is wrong with the images' packs; returns the segments that they need.
    fn scrub_packs(
        &self,
        images: &[Digest],
        findings: &mut Vec<Finding>,
    ) -> Result<BTreeSet<Digest>> {
        let present = self.domain.named(FileKind::Segment)?;
        let present = present.iter().filter_map(FileName::digest).collect();
        let images: HashSet<_> = images.iter().copied().collect();
        let mut needed = BTreeSet::new();
        for pack in self.domain.packs()? {
            if pack.image().is_some_and(|image| images.contains(&image)) {
                findings.extend(self.pack(&pack, &present)?);
                self.read(&pack, &mut |segment, _| {
                    needed.insert(segment);
                })?;
            }
        }
        Ok(needed)
    }
}

/// The name of a selection: the same images in another order are the same.
fn scope(images: Option<&[Digest]>) -> String {
    let Some(images) = images else { return "all".to_owned() };
    let mut names: Vec<_> = images.iter().map(Digest::to_string).collect();
    names.sort_unstable();
    names.dedup();
    verity::digest(names.join("\n").as_bytes()).to_string()
}
