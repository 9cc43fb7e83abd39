//! Profiles: which parts of an image a start reads, in the order in which it opens the files.
//!
//! A [`Recorder`] drops the image's files from the page cache, as far as nobody maps them, and notes
//! which are opened (fanotify). At the end the pages of these files that are resident are the
//! profile. So it also has what the kernel read ahead, and what others had mapped before.
//!
//! Of a container that could write, the profile also has the directories that it wrote to.

#[cfg(fuzzing)]
#[path = "../../../../fuzz/inside/profile.rs"]
pub mod fuzz;
mod record;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::ExitStatus;

use cofolio_store::task::Cancelled;
use cofolio_store::{Digest, Domain, Error};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Advice, Dir, FileType, OFlags, fadvise};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub use self::record::{Recorded, Subject, record, written_by};
use crate::cache::named_objects;
use crate::container::RunError;
use crate::ledger::{Budget, Ledger, LedgerError, paths_of_objects};
use crate::mount::{WRITABLE_DIRS_MAX, open_below, open_dir};
use crate::page_files::{self, PageFiles};
use crate::run_dir::{Lock, RunDir};

/// The version that is written and read.
const VERSION: u32 = 1;

/// Parts of an image's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    version: u32,
    /// Digest of the metadata image.
    pub image: Digest,
    /// In the order of their first opens.
    pub files: Vec<ProfileFile>,
    /// Directories of the image that were written to, with absolute paths; none of them is in
    /// another one. Absent if the start could not write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<Vec<PathBuf>>,
}

/// Parts of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileFile {
    /// Its content.
    pub object: Digest,
    /// Offsets and lengths in bytes, ascending.
    pub ranges: Vec<(u64, u64)>,
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// None was recorded.
    #[error("image {0} has no profile")]
    Missing(Digest),
    /// What is kept is not a profile of this image.
    #[error("the profile of image {image} is damaged: {problem}")]
    Damaged {
        /// Digest of the metadata image.
        image: Digest,
        /// What is wrong with it.
        problem: String,
    },
    /// A recording drops what is resident of its image, and other images share files with it.
    #[error(
        "another profile is being recorded in this trust domain: it drops pages that this one needs"
    )]
    Busy,
    /// The recorded container failed.
    #[error("{}, so there is no new profile", failed(.0))]
    Failed(ExitStatus),
    /// The recorded container opened nothing.
    #[error("no file of the image was opened: no profile written; an existing one is unchanged")]
    Empty,
    /// The process that runs the container could not be started or waited for.
    #[error("starting the container, or waiting for it")]
    Process(#[source] io::Error),
    /// The directory with the container's changes could not be read.
    #[error("reading what the container has changed")]
    Changes(#[source] io::Error),
    /// The container is not running, or does not end.
    #[error(transparent)]
    Container(#[from] RunError),
    /// It was cancelled before the container started.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    /// Opens cannot be noted.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The store.
    #[error(transparent)]
    Store(#[from] Error),
}

/// `cofolio run` has said why if it could not start a container.
fn failed(status: &ExitStatus) -> String {
    match status.code() {
        Some(125) => "the container was not started".to_owned(),
        Some(_) => format!("the container failed ({status})"),
        None => format!("`cofolio run`, which attends the container, was killed ({status})"),
    }
}

impl Profile {
    /// The profile of an image, checked against it.
    ///
    /// # Errors
    /// [`ProfileError::Missing`], [`ProfileError::Damaged`], [`ProfileError::Store`].
    pub fn read(domain: &Domain, image: &Digest) -> Result<Self, ProfileError> {
        let bytes = domain.profile(image)?.ok_or(ProfileError::Missing(*image))?;
        let damaged = |problem: String| ProfileError::Damaged { image: *image, problem };
        let profile: Self =
            serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        profile.check(image, &named_objects(domain, image)?).map_err(damaged)?;
        Ok(profile)
    }

    fn check(&self, image: &Digest, sizes: &BTreeMap<Digest, u64>) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("version {} is not known", self.version));
        }
        if self.image != *image {
            return Err(format!("it is that of image {}", self.image));
        }
        let mut named = HashSet::new();
        for ProfileFile { object, ranges } in &self.files {
            if !named.insert(object) {
                return Err(format!("object {object} is named twice"));
            }
            let size = sizes.get(object).ok_or(format!("the image has no object {object}"))?;
            let mut end = 0;
            for (offset, length) in ranges {
                let next = offset.checked_add(*length).filter(|next| *next <= *size);
                match next.filter(|_| *offset >= end && *length > 0) {
                    Some(next) => end = next,
                    None => return Err(format!("object {object} has no bytes at {offset}")),
                }
            }
        }
        check_dirs(self.written.as_deref().unwrap_or_default())
    }

    /// Keeps it as the profile of its image.
    ///
    /// # Errors
    /// [`ProfileError::Store`].
    pub fn write(&self, domain: &Domain) -> Result<(), ProfileError> {
        let damaged = |error: serde_json::Error| ProfileError::Damaged {
            image: self.image,
            problem: error.to_string(),
        };
        Ok(domain.put_profile(&self.image, &serde_json::to_vec(self).map_err(damaged)?)?)
    }

    /// Where its files are in the image, as absolute paths. Of files with the same content, one.
    ///
    /// # Errors
    /// [`ProfileError::Ledger`] if the image cannot be read.
    pub fn paths(&self, domain: &Domain) -> Result<HashMap<Digest, PathBuf>, ProfileError> {
        let paths = paths_of_objects(domain, &self.image)?.into_iter();
        Ok(paths.map(|(object, path)| (object, Path::new("/").join(path))).collect())
    }

    /// Bytes of all ranges.
    pub fn bytes(&self) -> u64 {
        self.files.iter().flat_map(|file| &file.ranges).map(|(_, length)| length).sum()
    }
}

/// Checks that paths are as [`written_dirs`] makes them.
fn check_dirs(dirs: &[PathBuf]) -> Result<(), String> {
    for dir in dirs {
        let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        let plain: PathBuf = dir.components().filter(|part| is_plain(*part)).collect();
        let bytes = dir.as_os_str().as_bytes();
        if !dir.is_absolute() || plain.as_os_str() != dir.as_os_str() || bytes.contains(&0) {
            return Err(format!("{} is not the plain path of a directory", dir.display()));
        }
    }
    for pair in dirs.windows(2) {
        if pair[0] >= pair[1] || pair[1].starts_with(&pair[0]) {
            let [one, other] = [&pair[0], &pair[1]].map(|dir| dir.display());
            return Err(format!("directories {one} and {other} are nested or out of order"));
        }
    }
    Ok(())
}

/// The directories of an image that were written to, by the upper directory of an overlay over it:
/// sorted absolute paths, none of which is in another one. A directory counts if it was changed
/// itself, or if something in it was made, changed or removed. Where there are more of them than a
/// mount can have, the deepest ones give way to their parents.
///
/// # Errors
/// Those of reading the directory.
pub fn written_dirs(upper: &Path) -> io::Result<Vec<PathBuf>> {
    let upper = open_dir(upper)?;
    let mut written = Vec::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(dir) = todo.pop() {
        let (mut is_written, mut is_empty) = (false, true);
        // The container may still run, and have moved it.
        let Some(directory) = changed_directory(&upper, &dir)? else { continue };
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let inside = dir.join(name);
            is_empty = false;
            // What cannot be asked for is not gone into.
            let is_candidate =
                inside.to_str().is_some() && entry.file_type() == FileType::Directory;
            let found = if is_candidate { changed_directory(&upper, &inside)? } else { None };
            match found.map(|it| shows_the_image(&it)).transpose()? {
                Some(true) => todo.push(inside),
                _ => is_written = true,
            }
        }
        // The root is always there, a directory below it only with a change.
        if is_written || (is_empty && dir != Path::new("")) {
            written.push(Path::new("/").join(dir));
        }
    }
    Ok(merged(written, WRITABLE_DIRS_MAX))
}

/// At most so many directories that contain all of these, in order, none of them in another one.
fn merged(mut dirs: Vec<PathBuf>, max: usize) -> Vec<PathBuf> {
    loop {
        dirs.sort();
        dirs.dedup_by(|dir, before| dir.starts_with(before));
        let depth = |dir: &PathBuf| dir.components().count();
        let deepest = dirs.iter().map(depth).max().unwrap_or_default();
        // The root and a directory in it are two components.
        if dirs.len() <= max {
            return dirs;
        }
        if deepest <= 2 {
            return vec![PathBuf::from("/")];
        }
        dirs.iter_mut().filter(|dir| depth(dir) == deepest).for_each(|dir| {
            dir.pop();
        });
    }
}

/// A directory of the changes; `None` if it is gone by now, or was made something else.
fn changed_directory(upper: &OwnedFd, dir: &Path) -> io::Result<Option<OwnedFd>> {
    let path = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    match open_below(upper, path, OFlags::RDONLY | OFlags::DIRECTORY) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether a directory of changes is that of the image at the same path, and not a new or renamed
/// one, which overlayfs marks in a merged directory (`Documentation/filesystems/overlayfs.rst`).
fn shows_the_image(dir: &OwnedFd) -> io::Result<bool> {
    let mut value = [0; 1];
    for name in ["trusted.overlay.opaque", "trusted.overlay.redirect"] {
        match rustix::fs::fgetxattr(dir, name, &mut value[..]) {
            Err(Errno::NODATA) => {}
            // A redirect is longer than the buffer.
            Ok(_) | Err(Errno::RANGE) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(true)
}

/// Full queues of opened files that are taken at the end.
const TAKES_AT_END: u32 = 64;

/// What a profile may be without.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Missed {
    /// How often opened files were not noted.
    pub opens: u64,
    /// Opened files of which nothing is resident: nobody has read them, or their pages have been
    /// dropped meanwhile.
    pub files: u64,
}

/// Notes what a container opens.
#[derive(Debug)]
pub struct Recorder<'d> {
    image: Digest,
    objects: BTreeMap<Digest, u64>,
    files: PageFiles<'d>,
    ledger: Ledger,
    _lock: Lock,
}

impl<'d> Recorder<'d> {
    /// Begins to note what a container of `cofolio run` opens. Its image is mounted; the container
    /// need not exist yet.
    ///
    /// # Errors
    /// [`ProfileError::Busy`], [`ProfileError::Ledger`], [`ProfileError::Store`].
    pub fn begin(
        domain: &'d Domain,
        run: RunDir,
        image: Digest,
        container: &str,
    ) -> Result<Self, ProfileError> {
        let lock = run.try_lock_recording(domain.name()).map_err(RunError::from)?;
        let lock = lock.ok_or(ProfileError::Busy)?;
        let objects = named_objects(domain, &image)?;
        let files = PageFiles::of(domain, &run, &image)?;
        let mut ledger = Ledger::new(domain.store().clone(), run);
        // Another trust domain that cannot be listed does not matter here.
        let _ = ledger.refresh(&Budget::UNLIMITED);
        ledger.record_opens(domain.name(), container)?;
        ledger.watch_opens()?;
        for object in objects.keys() {
            let _ = fadvise(files.open(object)?, 0, None, Advice::DontNeed);
        }
        Ok(Self { image, objects, files, ledger, _lock: lock })
    }

    /// Becomes readable when [`Recorder::take`] has something to do.
    pub fn opens(&self) -> Option<BorrowedFd<'_>> {
        self.ledger.opens()
    }

    /// Takes note of what was opened.
    ///
    /// # Errors
    /// [`ProfileError::Ledger`].
    pub fn take(&mut self) -> Result<(), ProfileError> {
        Ok(self.ledger.drain_opens(&Budget::UNLIMITED)?)
    }

    /// The profile, and what may be missing from it.
    ///
    /// # Errors
    /// [`ProfileError::Ledger`], [`ProfileError::Store`].
    pub fn end(mut self) -> Result<(Profile, Missed), ProfileError> {
        // Of a container that goes on, there may always be more.
        for _ in 0..TAKES_AT_END {
            self.take()?;
            let opens = self.opens().map(|opens| PollFd::from_borrowed_fd(opens, PollFlags::IN));
            let now = Timespec::default();
            if !opens.is_some_and(|opens| poll(&mut [opens], Some(&now)).is_ok_and(|n| n > 0)) {
                break;
            }
        }
        let mut files = Vec::new();
        let mut missed = Missed { opens: self.ledger.lost_opens(), files: 0 };
        for object in self.ledger.recorded() {
            let Some(size) = self.objects.get(&object) else { continue };
            let file = self.files.open(&object)?;
            let ranges = page_files::resident_ranges(&file, *size);
            let ranges = ranges.map_err(LedgerError::io(object.to_string()))?;
            match ranges.is_empty() {
                true => missed.files += u64::from(*size > 0),
                false => files.push(ProfileFile { object, ranges }),
            }
        }
        let profile = Profile { version: VERSION, image: self.image, files, written: None };
        Ok((profile, missed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_profile_of_the_image_is_refused() {
        let [image, other, object] =
            [b"image", b"other", b"a obj"].map(|it| cofolio_store::verity::digest(it));
        let sizes = BTreeMap::from([(object, 10_000)]);
        let with = |ranges: &[(u64, u64)]| Profile {
            version: VERSION,
            image,
            files: vec![ProfileFile { object, ranges: ranges.to_vec() }],
            written: None,
        };
        let right = with(&[(0, 4096), (8192, 1808)]);
        assert_eq!((right.check(&image, &sizes), right.bytes()), (Ok(()), 5904));
        for ranges in [
            &[(8192, 1809)][..],
            &[(0, 0)],
            &[(4096, 4096), (0, 4096)],
            &[(0, 4096), (0, 4096)],
            &[(u64::MAX, 2)],
        ] {
            assert!(with(ranges).check(&image, &sizes).is_err(), "{ranges:?}");
        }
        // With enough of them the sum of their bytes overflowed.
        let twice = Profile { files: [&right.files[..]; 2].concat(), ..right.clone() };
        assert!(twice.check(&image, &sizes).is_err());
        assert!(right.check(&other, &sizes).is_err());
        assert!(right.check(&image, &BTreeMap::new()).is_err());
        assert!(Profile { version: 2, ..right }.check(&image, &sizes).is_err());
    }

    /// The mount was refused with exit code 2 or 1, as if its caller had given these directories.
    #[test]
    fn what_are_no_written_directories_is_refused() {
        let check = |dirs: &[&str]| check_dirs(&dirs.iter().map(PathBuf::from).collect::<Vec<_>>());
        for right in [&[][..], &["/"], &["/etc", "/etc-a", "/var/a", "/var/b"]] {
            assert_eq!(check(right), Ok(()));
        }
        for wrong in [
            &["etc"][..],
            &[""],
            &["/etc/"],
            &["//etc"],
            &["/etc/./a"],
            &["/var/../etc"],
            &["/a\0b"],
            &["/etc", "/etc"],
            &["/", "/etc"],
            &["/var", "/var/a"],
            &["/var", "/etc"],
        ] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
    }

    /// The profile of a start that wrote to 70 directories was recorded, and no mount could use it.
    #[test]
    fn a_profile_has_no_more_directories_than_a_mount_can_have() {
        let dirs = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let many = dirs(&["/var/log/a/1", "/var/log/a/2", "/var/log/b", "/var/cache", "/etc/x/y"]);
        assert_eq!(merged(many.clone(), 5).len(), 5);
        let some = dirs(&["/etc/x/y", "/var/cache", "/var/log/a", "/var/log/b"]);
        assert_eq!(merged(many.clone(), 4), some);
        assert_eq!(merged(many.clone(), 3), dirs(&["/etc/x", "/var/cache", "/var/log"]));
        assert_eq!(merged(many.clone(), 2), dirs(&["/etc", "/var"]));
        assert_eq!(merged(many, 1), dirs(&["/"]));
    }
}
