//! The records of mounts and of pinned images in the run directory (see [`RunDir`]).

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::run_dir::{ASIDE, ATTACHED, ImageLock, RunDir, list, read_json, remove_file, to_json};
use crate::settings::Backend;
use cofolio_store::{Digest, Purpose, replace_file};
use rustix::fs::CWD;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::{At as _, MountError};
use super::kernel::Backing;
use super::mountinfo;
use super::request::MountOptions;

/// How far a mount has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountPhase {
    /// Being made. If nobody holds the image's lock, its maker is dead.
    Intent,
    /// In place. Earlier programs said of a mount that they took away that it was leaving.
    #[serde(alias = "leaving")]
    Mounted,
}

/// Where the changes of a writable mount go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upper {
    /// Directory that holds `upper/` and `work/`.
    pub dir: PathBuf,
    /// Left in place at unmount.
    pub keep: bool,
    /// Given by the caller, and not a directory of the store's.
    pub given: bool,
    /// Bytes that changes may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The only directories of the image that show changes; without any, its root does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dirs: Vec<PathBuf>,
    /// Major and minor number of the overlay that these directories are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<(u32, u32)>,
}

/// The kernel's numbers of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountNumbers {
    /// As in mountinfo; given to another mount later.
    pub id: u64,
    /// Never given twice while the machine is up (Linux 6.8).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unique: Option<u64>,
}

impl MountNumbers {
    /// Whether these numbers mean the same mount.
    pub(super) fn is(&self, id: u64, unique: Option<u64>) -> bool {
        match (self.unique, unique) {
            (Some(one), Some(other)) => one == other,
            _ => self.id == id,
        }
    }
}

/// A mount namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespace {
    /// Inode number of its file under `/proc`, which the kernel reuses once this one is gone.
    #[serde(rename = "namespace")]
    pub inode: u64,
    /// Never reused while the machine is up (Linux 6.11). Older records have none.
    #[serde(default, rename = "namespace_id", skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
}

impl Namespace {
    /// What a `/proc/PID/ns/mnt` stands for.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        let file = fs::File::open(path)?;
        let id = cofolio_sys::mount::namespace_id(&file);
        Ok(Self { inode: file.metadata()?.ino(), id })
    }

    /// Whether the two are one, as far as can be known.
    pub(crate) fn is(&self, other: &Self) -> bool {
        let ids = self.id.zip(other.id);
        self.inode == other.inode && ids.is_none_or(|(one, other)| one == other)
    }
}

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// Its id: follows from the run directory and the target.
    pub id: String,
    /// Trust domain.
    pub domain: String,
    /// Digest of the metadata image.
    pub image: Digest,
    /// Where it is mounted; absolute, without symbolic links.
    pub target: PathBuf,
    /// The target was made for the mount, and goes with it.
    #[serde(default)]
    pub created_target: bool,
    /// Where changes go; `None` for a read-only mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper: Option<Upper>,
    /// Directory of the store's for whoever uses the mount; goes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<PathBuf>,
    /// How it appears.
    #[serde(flatten)]
    pub options: MountOptions,
    /// How it is mounted.
    #[serde(default)]
    pub backend: Backend,
    /// It is of the image's own metadata image, beside a mount over a base.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
    /// The kernel checks every read (fs-verity).
    #[serde(default)]
    pub verity: bool,
    /// Every object was hashed again before it was mounted.
    #[serde(default)]
    pub verified: bool,
    /// How far it has come.
    pub phase: MountPhase,
    /// The kernel's numbers, known before it is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<MountNumbers>,
    /// The mount namespace that it was made in.
    #[serde(flatten)]
    pub namespace: Namespace,
    /// The boot that it was made in.
    pub boot_id: String,
    /// Process that made it.
    pub pid: u32,
    /// When, in seconds since 1970.
    pub created: i64,
}

/// What `pin.json` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinRecord {
    /// How it is mounted.
    #[serde(default)]
    pub backend: Backend,
    /// The image that it is mounted over, if it is only what it has besides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
    /// That part: the store may make the image another base and delta while this one is mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<Digest>,
    /// How its bytes reach the kernel.
    pub backing: Backing,
    /// The kernel checks every read of an object.
    pub verity: bool,
    /// Files whose objects' sizes were compared with the image; 0 if they were protected.
    pub objects_checked: u64,
    /// Size of the metadata image in bytes.
    pub image_bytes: u64,
    /// Device and inode number of each file that is mounted: the metadata image, or the pack and
    /// its segments. While it is mounted, no other file gets these numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<(u64, u64)>,
    /// When it was pinned, in seconds since 1970.
    pub created: i64,
}

impl RunDir {
    pub(crate) fn id_of(&self, target: &Path) -> String {
        format!(
            "{}-{}",
            self.tag(),
            const_hex::encode(&Sha256::digest(target.as_os_str().as_bytes())[..8])
        )
    }

    fn record_path(&self, id: &str) -> PathBuf {
        self.path().join("mounts").join(format!("{id}.json"))
    }

    /// A record and its image's lock, without which nobody may change it. While we wait for the lock
    /// the record may be replaced by another image's.
    pub(crate) fn lock_record(
        &self,
        id: &str,
    ) -> Result<Option<(MountRecord, ImageLock)>, MountError> {
        loop {
            let Some(found) = self.record(id)? else { return Ok(None) };
            let lock = self.lock_image(&found.image)?;
            match self.record(id)? {
                Some(record) if record.image != found.image => {}
                record => return Ok(record.map(|record| (record, lock))),
            }
        }
    }

    /// The record of a mount.
    ///
    /// # Errors
    /// [`MountError::State`] if it is damaged; [`MountError::Io`].
    pub fn record(&self, id: &str) -> Result<Option<MountRecord>, MountError> {
        // Ids come from callers, too.
        if !is_id(id) {
            return Ok(None);
        }
        let path = self.record_path(id);
        let record: Option<MountRecord> = read_json(&path)?;
        if let Some(record) = &record
            && record.id != id
        {
            return Err(MountError::State { path, reason: "it is another mount's".to_owned() });
        }
        Ok(record)
    }

    /// The record of the mount at a target, or with an id.
    ///
    /// # Errors
    /// As [`RunDir::record`]; [`MountError::NotMounted`], [`MountError::NoRecord`].
    pub fn find(&self, target_or_id: &Path) -> Result<MountRecord, MountError> {
        if let Some(id) = target_or_id.to_str()
            && let Some(record) = self.record(id)?
        {
            return Ok(record);
        }
        // The target may be gone, so that it cannot be resolved: try it as given then.
        let target = fs::canonicalize(target_or_id).unwrap_or_else(|_| target_or_id.to_owned());
        if let Some(record) = self.record(&self.id_of(&target))?
            && record.target == target
        {
            return Ok(record);
        }
        // Somebody may have moved it, or a directory above it.
        if let Ok(found) = cofolio_sys::mount::mount_id(CWD, &target)
            && found.is_root
        {
            let is = |record: &MountRecord| {
                record.mount.is_some_and(|mount| mount.is(found.id, found.unique))
            };
            if let Some(record) = self.records()?.0.into_iter().find(is) {
                return Ok(record);
            }
            let mounts =
                mountinfo::read(Path::new("/")).at("read", "/proc/thread-self/mountinfo")?;
            if mounts.iter().any(|mount| mount.id == found.id && mount.image().is_some()) {
                return Err(MountError::NoRecord(target));
            }
        }
        Err(MountError::NotMounted(target_or_id.display().to_string()))
    }

    /// All records, by target. Damaged ones are errors of their own, beside the others.
    ///
    /// # Errors
    /// [`MountError::Io`] if the directory cannot be listed.
    pub fn records(&self) -> Result<(Vec<MountRecord>, Vec<MountError>), MountError> {
        let (mut records, mut damaged) = (Vec::new(), Vec::new());
        for id in self.record_ids()? {
            match self.record(&id) {
                Ok(record) => records.extend(record),
                Err(error) => damaged.push(error),
            }
        }
        records.sort_by(|a, b| a.target.cmp(&b.target));
        Ok((records, damaged))
    }

    pub(crate) fn record_ids(&self) -> Result<Vec<String>, MountError> {
        let names = list(&self.path().join("mounts"))?;
        Ok(names.iter().filter_map(|name| name.strip_suffix(".json")).map(str::to_owned).collect())
    }

    /// Makes the record of a mount that is about to be made; false if its id is taken.
    pub(crate) fn claim(&self, record: &MountRecord, lock: &ImageLock) -> Result<bool, MountError> {
        let path = self.record_path(&record.id);
        let temporary = self.temporary(record, lock);
        fs::write(&temporary, to_json(&path, record)?).at("write", &temporary)?;
        let linked = fs::hard_link(&temporary, &path);
        let _ = fs::remove_file(&temporary);
        match linked {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error).at("write", &path),
        }
    }

    pub(crate) fn write(&self, record: &MountRecord, lock: &ImageLock) -> Result<(), MountError> {
        let path = self.record_path(&record.id);
        let (aside, json) = (self.temporary(record, lock), to_json(&path, record)?);
        replace_file(CWD, &aside, &path, &json, Purpose::Record, false).at("write", &path)
    }

    pub(crate) fn remove_record(&self, id: &str) -> Result<(), MountError> {
        Ok(remove_file(&self.record_path(id))?)
    }

    /// The temporary file is named after the writer's stripe: two writers never hold the same, and
    /// a leftover is told from a file in progress.
    fn temporary(&self, record: &MountRecord, lock: &ImageLock) -> PathBuf {
        let directory = match record.phase {
            MountPhase::Mounted => ATTACHED,
            _ => ASIDE,
        };
        self.path().join(format!("{directory}/{}.{:02x}", record.id, lock.stripe()))
    }

    /// Removes what writers that died left under [`RunDir::temporary`].
    pub(crate) fn remove_temporaries(&self) -> Result<u32, MountError> {
        let mut removed = 0;
        for path in [ASIDE, ATTACHED].map(|name| self.path().join(name)) {
            removed += self.remove_temporaries_of(&path)?;
        }
        Ok(removed)
    }

    fn remove_temporaries_of(&self, dir: &Path) -> Result<u32, MountError> {
        let mut removed = 0;
        for name in list(dir)? {
            let Some((_, stripe)) = name.rsplit_once('.') else { continue };
            let _lock = match u8::from_str_radix(stripe, 16) {
                Ok(stripe) => self.lock_stripe(stripe)?,
                Err(_) => continue,
            };
            let path = dir.join(&name);
            if path.exists() {
                remove_file(&path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

/// 8 hex digits, a dash, 16 hex digits: never a path.
fn is_id(text: &str) -> bool {
    let hex = |part: &str, length| {
        part.len() == length && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    text.split_once('-').is_some_and(|(tag, name)| hex(tag, 8) && hex(name, 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_never_paths() {
        let run = RunDir::open("/run/cofolio/x").unwrap();
        assert!(is_id(&run.id_of(Path::new("/mnt"))));
        assert_ne!(run.id_of(Path::new("/mnt")), run.id_of(Path::new("/mnt2")));
        assert_ne!(
            run.id_of(Path::new("/mnt")),
            RunDir::open("/r").unwrap().id_of(Path::new("/mnt"))
        );
        for text in ["", "..", "../../etc/passwd", "01234567-0123456789abcde/", "a-b"] {
            assert!(!is_id(text), "{text}");
        }
    }
}
