//! fsck: what is wrong with a domain. It changes nothing.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::contents::Contents;
use crate::disk::Kind;
use crate::domain;
use crate::error::{At, Error, Result, is_absent, is_damage};
use crate::examine::{Examiner, Reading, Seen, Wrong, reason};
use crate::kinds::{FileKind, FileName};
use crate::parallel::for_each;
use crate::records::{RECORD_SUFFIX, RECORDS, REFS, ROOTS, UNNAMED};
use crate::store::{STAGING, TEMPORARY};
use crate::task::{Event, Task};
use crate::{Digest, Domain};

/// Findings listed in a report; beyond that they are only counted.
const FINDINGS_MAX: usize = 10_000;

/// Lists a finding in a report, or counts it. Says whether it is listed.
pub(crate) fn list(findings: &mut Vec<Finding>, more: &mut u64, finding: Finding) -> bool {
    let is_listed = findings.len() < FINDINGS_MAX;
    if is_listed {
        findings.push(finding)
    } else {
        *more += 1
    }
    is_listed
}

/// By kind and path.
pub(crate) fn sort(findings: &mut [Finding]) {
    findings.sort_by(|a, b| (a.kind, &a.path).cmp(&(b.kind, &b.path)));
}

/// What kind of thing is wrong. The texts are stable: scripts may rely on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FindingKind {
    /// An image or layer names an object that is not there.
    ObjectMissing,
    /// An object has another size than its image says.
    ObjectTruncated,
    /// An object's content has another digest than its name.
    ObjectAltered,
    /// An object cannot be read: the disk, or fs-verity, refuses to give its content.
    ObjectUnreadable,
    /// An image's content has another digest than its name.
    ImageAltered,
    /// An image cannot be read as one.
    ImageUnreadable,
    /// An unneeded base or delta has another digest than its name, or cannot be read.
    BaseAltered,
    /// What an image is mounted over is not there, or nobody knows what it is.
    BaseIncomplete,
    /// A layer, or the split of one, cannot be read as such.
    LayerUnreadable,
    /// A segment's content has another digest than its name.
    SegmentAltered,
    /// A segment cannot be read as one, or is cut short.
    SegmentUnreadable,
    /// A pack's content has another digest than its name.
    PackAltered,
    /// A pack cannot be read as one.
    PackUnreadable,
    /// A pack needs a segment that is not there or is damaged.
    PackIncomplete,
    /// A ref's record cannot be read.
    RefUnreadable,
    /// A ref names an image or layer that is not there, or a layer without its split.
    RefDangling,
    /// A root's record cannot be read.
    RootUnreadable,
    /// A root names an image or layer that is not there, or a layer without its split.
    RootDangling,
    /// `meta.json` cannot be read.
    MetaUnreadable,
    /// The settings of the domain cannot be read.
    SettingsUnreadable,
    /// A signature's content has another digest than its name.
    SignatureAltered,
    /// A profile cannot be read, or is not one of its image.
    ProfileUnreadable,
    /// A directory of the domain is missing.
    DirectoryMissing,
    /// A file can be written, belongs to somebody else, or has more than one name.
    Permissions,
    /// Content lacks the protection that this store gives (fs-verity or the immutable flag).
    Unprotected,
    /// Something that the store did not put there.
    UnexpectedEntry,
    /// The directory of the store where imports work is missing. Nothing that was stored was there.
    StagingMissing,
    /// An import was interrupted; gc removes its leftovers.
    StagingOrphaned,
    /// Signatures of an image that is gone; gc removes them.
    SignatureOrphaned,
}

impl FindingKind {
    /// Whether it is about a derived file: a base, a delta, a segment or a pack.
    pub fn is_derived(self) -> bool {
        matches!(
            self,
            Self::BaseAltered
                | Self::BaseIncomplete
                | Self::SegmentAltered
                | Self::SegmentUnreadable
                | Self::PackAltered
                | Self::PackUnreadable
                | Self::PackIncomplete
        )
    }

    /// Whether stored content is lost or wrong; otherwise it is untidy or less safe than possible.
    pub fn is_damage(self) -> bool {
        !matches!(
            self,
            Self::Permissions
                | Self::Unprotected
                | Self::UnexpectedEntry
                | Self::StagingMissing
                | Self::StagingOrphaned
                | Self::SignatureOrphaned
        )
    }
}

/// The stable text, which is also that of JSON.
impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What kind.
    pub kind: FindingKind,
    /// The file, relative to the store.
    pub path: String,
    /// The object or image that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The image or layer that is hit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Names of images that are hit, as far as that is known; at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refs: Vec<String>,
    /// Files of images that are hit: name or digest of the image, and the path in it; at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
    /// What was found, for people.
    pub detail: String,
}

impl Finding {
    pub(crate) fn new(
        kind: FindingKind,
        path: impl Into<String>,
        detail: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            path: path.into(),
            digest: None,
            user: None,
            refs: Vec::new(),
            files: Vec::new(),
            detail: detail.into(),
        }
    }

    pub(crate) fn about(mut self, digest: &Digest) -> Self {
        self.digest = Some(*digest);
        self
    }
}

/// How deep fsck looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct FsckOptions {
    /// Read and hash every object and image. Otherwise only names, sizes and records are checked.
    pub rehash: bool,
}

/// What fsck found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FsckReport {
    /// What is wrong, sorted by kind and path; at most 10,000.
    pub findings: Vec<Finding>,
    /// Findings that are not listed because there are too many.
    pub more: u64,
    /// Whether there is damage among those.
    pub more_damage: bool,
    /// Objects looked at.
    pub objects: u64,
    /// Bytes hashed.
    pub hashed_bytes: u64,
    /// Images looked at.
    pub images: u64,
    /// Layers looked at.
    pub layers: u64,
    /// Segments looked at.
    pub segments: u64,
    /// Packs looked at.
    pub packs: u64,
    /// Refs looked at.
    pub refs: u64,
    /// Roots looked at.
    pub roots: u64,
    /// Signatures looked at.
    pub signatures: u64,
}

impl FsckReport {
    /// Whether something that was stored is lost or wrong.
    pub fn is_damaged(&self) -> bool {
        self.more_damage || self.findings.iter().any(|finding| finding.kind.is_damage())
    }

    pub(crate) fn add(&mut self, finding: Finding) {
        let is_damage = finding.kind.is_damage();
        self.more_damage |= !list(&mut self.findings, &mut self.more, finding) && is_damage;
    }
}

/// An object that an image or a layer names.
struct NamedObject {
    size: u64,
    /// Index into the list of images and layers.
    user: usize,
    seen: bool,
}

impl Domain {
    /// Looks for damage while imports, but no garbage collection, go on.
    ///
    /// # Errors
    /// [`crate::Error::Io`] if the disk cannot be read. Damage is no error: it is in the report.
    pub fn fsck(
        &self,
        contents: &dyn Contents,
        options: FsckOptions,
        task: &Task,
    ) -> Result<FsckReport> {
        let reading = |threads| if options.rehash { Reading::Cached(threads) } else { Reading::No };
        self.fsck_reading(contents, &reading, task)
    }

    /// Looks for damage; `reading` says what is read on so many threads. Fails as [`Domain::fsck`].
    pub(crate) fn fsck_reading(
        &self,
        contents: &dyn Contents,
        reading: &dyn Fn(usize) -> Reading,
        task: &Task,
    ) -> Result<FsckReport> {
        let _lock = self.lock_shared()?;
        let mut report = FsckReport::default();
        if let Some(detail) = self.store().open_to_others()? {
            report.add(Finding::new(FindingKind::Permissions, ".", detail));
        }
        if !self.fsck_is_there(STAGING, &mut report)? {
            let detail = "`cofolio fsck --repair` makes it again";
            report.add(Finding::new(FindingKind::StagingMissing, STAGING, detail));
        }
        for directory in domain::directories() {
            let path = format!("{}/{directory}", self.directory());
            if !self.fsck_is_there(&path, &mut report)? {
                let is_lost = RECORDS.contains(&directory) && directory != REFS;
                let lost = "gc will remove what only its records named";
                let detail = if is_lost { lost } else { "" };
                report.add(Finding::new(FindingKind::DirectoryMissing, path, detail));
            }
        }
        if report.is_damaged() {
            return Ok(report);
        }
        match self.settings::<serde_json::Map<String, serde_json::Value>>() {
            Err(error) if is_damage(&error) => {
                let detail = format!("{error}; `cofolio backend` sets it again");
                let path = self.settings_file();
                report.add(Finding::new(FindingKind::SettingsUnreadable, path, detail));
            }
            other => drop(other?),
        }
        let threads = self.disk().parallelism();
        let mut one = Examiner::new(self, contents, reading(1), &task.cancel);
        one.derived = self.derived_images()?;
        let (users, mut named) = one.fsck_images_and_layers(&mut report)?;
        self.fsck_bases(&mut report)?;
        Examiner::new(self, contents, reading(threads), &task.cancel).fsck_packs(&mut report)?;
        self.fsck_records(&mut report)?;
        self.fsck_signatures(&mut report)?;
        one.fsck_objects(&users, &mut named, task, &mut report)?;
        for id in self.store().orphaned_staging()? {
            let path = format!("{}/{id}", STAGING);
            report.add(Finding::new(FindingKind::StagingOrphaned, path, "no process holds it"));
        }
        // An import that is being published protects its content last: look again.
        report.findings.retain(|finding| {
            let mut again = FsckReport::default();
            let kind = self.name_of(&finding.path).map_or(FileKind::Object, |name| name.kind());
            finding.kind != FindingKind::Unprotected
                || self.fsck_attributes(&finding.path, kind, &mut again).is_err()
                || again.findings.iter().any(|now| now.kind == FindingKind::Unprotected)
        });
        self.add_hit(contents, &mut report)?;
        sort(&mut report.findings);
        Ok(report)
    }

    /// Whether a directory exists. Reports one that others can write to.
    fn fsck_is_there(&self, path: &str, report: &mut FsckReport) -> Result<bool> {
        let Some(stat) = self.disk().stat(path).if_there("look at", path)? else {
            return Ok(false);
        };
        if stat.mode & 0o022 != 0 {
            let detail = format!("mode {:o}: others can change what it holds", stat.mode);
            report.add(Finding::new(FindingKind::Permissions, path, detail));
        }
        Ok(true)
    }

    /// Refs and roots: whether they can be read, and what they name is here.
    fn fsck_records(&self, report: &mut FsckReport) -> Result<()> {
        for directory in RECORDS {
            let path = format!("{}/{directory}", self.directory());
            for (entry, kind) in self.disk().list(&path).at("list", &path)? {
                // Temporary files are being written by somebody, or gc takes them.
                let is_ours = entry.ends_with(RECORD_SUFFIX) && kind == Kind::File;
                if !is_ours && !entry.starts_with(TEMPORARY) {
                    let path = format!("{path}/{entry}");
                    report.add(Finding::new(FindingKind::UnexpectedEntry, path, ""));
                }
            }
            let (count, unreadable, dangling) = match directory.starts_with(ROOTS) {
                true => (&mut report.roots, FindingKind::RootUnreadable, FindingKind::RootDangling),
                false => (&mut report.refs, FindingKind::RefUnreadable, FindingKind::RefDangling),
            };
            let records = self.records(directory)?;
            *count += records.len() as u64;
            for record in records {
                let files = match self.files_of(&record) {
                    Ok(files) => files,
                    Err(error) if is_damage(&error) => {
                        report.add(Finding::new(unreadable, record.path, error.to_string()));
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                for file in self.missing_of(&files)? {
                    let detail = format!("{file} is missing");
                    report.add(Finding::new(dangling, &record.path, detail));
                }
            }
        }
        for (entry, _) in self.entries(UNNAMED)? {
            let Some(image) = Digest::from_lower_hex(entry.as_bytes()) else { continue };
            match self.unnamed_record(&image) {
                // Where it has a name again its ref counts.
                Err(error) if is_damage(&error) && self.is_named(&image)? => {}
                Err(error) if is_damage(&error) => {
                    let (path, why) = (self.unnamed_file(&image), reason(&error));
                    report.add(Finding::new(FindingKind::RefUnreadable, path, why).about(&image));
                }
                other => drop(other?),
            }
        }
        Ok(())
    }

    /// What a ref or root keeps and is not here: images, and layers or their splits.
    pub(crate) fn missing_of(&self, files: &[FileName]) -> Result<Vec<FileName>> {
        let mut missing = self.missing_files(files)?;
        for layer in files.iter().filter(|file| file.kind() == FileKind::Layer) {
            let split = layer.with_kind(FileKind::Split);
            if !missing.contains(layer) && !self.has_named(&split)? {
                missing.push(split);
            }
        }
        Ok(missing)
    }

    pub(crate) fn missing_files(&self, files: &[FileName]) -> Result<Vec<FileName>> {
        let mut missing = Vec::new();
        for file in files {
            if !self.has_named(file)? {
                missing.push(file.clone());
            }
        }
        Ok(missing)
    }

    /// Permissions and protection of a file that must never change.
    fn fsck_file(&self, path: &str, kind: FileKind, report: &mut FsckReport) -> Result<()> {
        match self.fsck_attributes(path, kind, report) {
            // Whoever looks at the content says more, and names the file.
            Err(error) if is_damage(&error) => Ok(()),
            // Replaced or removed since it was listed.
            Err(Error::Io { source, .. }) if is_absent(&source) => Ok(()),
            other => other,
        }
    }

    fn fsck_attributes(&self, path: &str, kind: FileKind, report: &mut FsckReport) -> Result<()> {
        let stat = self.disk().stat(path).at("look at", path)?;
        if stat.kind != Kind::File {
            return Ok(());
        }
        let own = self.disk().stat(self.directory()).at("look at", self.directory())?;
        let mut wrong = Vec::new();
        if stat.mode != 0o444 {
            wrong.push(format!("mode {:o} and not 444", stat.mode));
        }
        if stat.uid != own.uid {
            wrong.push(format!("owner {} and not {}", stat.uid, own.uid));
        }
        // A second name is a second way to it, and may lie in another domain.
        if stat.nlink != 1 {
            wrong.push(format!("{} names", stat.nlink));
        }
        if !wrong.is_empty() {
            report.add(Finding::new(FindingKind::Permissions, path, wrong.join(", ")));
        }
        let protection = self.protection();
        let mut lacks = Vec::new();
        if protection.immutable && !stat.immutable {
            lacks.push("no immutable flag");
        }
        if kind.is_named_by_content() && self.lacks_verity(path)? {
            lacks.push("no fs-verity");
        }
        if !lacks.is_empty() {
            report.add(Finding::new(FindingKind::Unprotected, path, lacks.join(", ")));
        }
        Ok(())
    }
}

impl Examiner<'_> {
    /// The files in a directory, with permissions and protection checked; what is none is reported.
    fn fsck_directory(&self, directory: &str, report: &mut FsckReport) -> Result<Vec<FileName>> {
        let mut names = Vec::new();
        let path = format!("{}/{directory}", self.domain.directory());
        for (entry, _) in self.domain.disk().list(&path).at("list", &path)? {
            let path = format!("{path}/{entry}");
            match FileName::of_file(directory, &entry) {
                Some(name) => {
                    self.domain.fsck_file(&path, name.kind(), report)?;
                    names.push(name);
                }
                None => report.add(Finding::new(FindingKind::UnexpectedEntry, &path, "")),
            }
        }
        Ok(names)
    }

    /// Images and layers: their own content, and what they name.
    fn fsck_images_and_layers(
        &self,
        report: &mut FsckReport,
    ) -> Result<(Vec<FileName>, HashMap<Digest, NamedObject>)> {
        let mut users = Vec::new();
        for directory in ["images", "layers"] {
            users.extend(self.fsck_directory(directory, report)?);
        }
        let mut named: HashMap<Digest, NamedObject> = HashMap::new();
        for (user, name) in users.iter().enumerate() {
            match name.kind() {
                FileKind::Image => report.images += 1,
                FileKind::Layer => report.layers += 1,
                _ => {}
            }
            let mut disagree = Vec::new();
            // What an altered image names means nothing.
            let (seen, hashed) = self.whole(name, &mut |digest, size| {
                let entry = named.entry(digest).or_insert(NamedObject { size, user, seen: false });
                if entry.size != size {
                    disagree.push((digest, size, entry.size));
                }
            })?;
            report.hashed_bytes += hashed;
            if let Some(finding) = seen.finding() {
                report.add(finding);
            } else if let Some((digest, size, other)) = disagree.first() {
                let detail = format!("says that {digest} has {size} bytes, another says {other}");
                report.add(self.finding(name, Wrong::Unreadable, detail));
            }
        }
        Ok((users, named))
    }

    /// Segments, and the packs over them.
    fn fsck_packs(&self, report: &mut FsckReport) -> Result<()> {
        let names = self.fsck_directory(FileKind::Segment.directory(), report)?;
        let (packs, segments): (Vec<_>, Vec<_>) =
            names.into_iter().partition(|name| name.kind().is_pack());
        report.segments += segments.len() as u64;
        report.packs += packs.len() as u64;
        let mut sound = HashSet::new();
        for segment in segments {
            let (seen, hashed) = self.segment(&segment)?;
            report.hashed_bytes += hashed;
            match seen {
                Seen::Sound => sound.extend(segment.digest()),
                seen => seen.finding().into_iter().for_each(|finding| report.add(finding)),
            }
        }
        for pack in packs {
            self.pack(&pack, &sound)?.into_iter().for_each(|finding| report.add(finding));
        }
        Ok(())
    }

    /// Every object that is there, and every one that should be.
    fn fsck_objects(
        &self,
        users: &[FileName],
        named: &mut HashMap<Digest, NamedObject>,
        task: &Task,
        report: &mut FsckReport,
    ) -> Result<()> {
        let domain = self.domain;
        let objects = format!("{}/{}", domain.directory(), FileKind::Object.directory());
        let mut present = Vec::new();
        for (shard, kind) in domain.disk().list(&objects).at("list", &objects)? {
            let directory = format!("{objects}/{shard}");
            if kind != Kind::Directory {
                report.add(Finding::new(FindingKind::UnexpectedEntry, directory, ""));
                continue;
            }
            for (entry, kind) in domain.disk().list(&directory).at("list", &directory)? {
                match Digest::from_object_path(&shard, &entry).filter(|_| kind == Kind::File) {
                    Some(digest) => present.push(digest),
                    None => {
                        let detail =
                            if kind == Kind::Directory { "remove that directory" } else { "" };
                        let path = format!("{directory}/{entry}");
                        report.add(Finding::new(FindingKind::UnexpectedEntry, path, detail));
                    }
                }
            }
        }
        for digest in &present {
            if let Some(named) = named.get_mut(digest) {
                named.seen = true;
            }
        }
        let user_of = |named: &NamedObject| Some(users.get(named.user)?.to_string());
        for (digest, entry) in named.iter().filter(|(_, entry)| !entry.seen) {
            let mut finding = self.missing_object(digest);
            finding.user = user_of(entry);
            report.add(finding);
        }
        let (count, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let collected = Mutex::new(&mut *report);
        for_each(domain.disk().parallelism(), &present, |digest| -> Result<()> {
            let entry = named.get(digest);
            let mut own = FsckReport::default();
            let name = FileName::content(FileKind::Object, digest);
            domain.fsck_file(&domain.named_file(&name), FileKind::Object, &mut own)?;
            let (seen, hashed) = self.look(&name, entry.map(|entry| entry.size))?;
            if let Some(mut finding) = seen.finding() {
                finding.user = entry.and_then(user_of);
                own.add(finding);
            }
            let bytes = bytes.fetch_add(hashed, Relaxed) + hashed;
            let items = count.fetch_add(1, Relaxed) + 1;
            task.tell(Event::Done { bytes, bytes_total: None, items, items_total: None });
            let mut report = collected.lock().unwrap_or_else(PoisonError::into_inner);
            own.findings.into_iter().for_each(|finding| report.add(finding));
            Ok(())
        })?;
        report.objects = count.into_inner();
        report.hashed_bytes += bytes.into_inner();
        Ok(())
    }
}
