//! The commons: a cgroup that shared pages are charged to.
//!
//! The kernel charges a page of a file to the cgroup whose process brings it in, and to no other as
//! long as it stays. So the first container of an image would pay for what all of them read, and its
//! cgroup would live on, removed, as long as such a page does. Pages that are read ahead from inside
//! the commons are charged there. The kernel takes them back as it takes any page that can be read
//! again.

use std::path::Path;

use cofolio_store::task::{Cancelled, Task};
use cofolio_store::{Digest, Domain, Error};
use serde::Serialize;

use crate::cgroup::{Cgroup, CgroupError, Hierarchy};
use crate::ledger::LedgerError;
use crate::mount::RunDir;
use crate::page_files::{PageFiles, read_ahead};
use crate::profile::{self, Profile, ProfileFile};

pub use crate::ledger::COMMONS as NAME;

/// What reading ahead has done. Sizes are bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Warmed {
    /// Objects of the image, or of its profile.
    pub objects: u64,
    /// Bytes of them that were to be read ahead.
    pub bytes: u64,
    /// What of them was resident before. It stays charged to whoever brought it in.
    pub resident_before_bytes: u64,
    /// What of them is resident now.
    pub resident_bytes: u64,
    /// What the commons are charged for, of all images.
    pub commons_bytes: u64,
}

/// Why an image could not be warmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommonsError {
    /// There is no memory cgroup, or it cannot be entered.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// An object cannot be opened.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The image cannot be read.
    #[error(transparent)]
    Store(#[from] Error),
    /// The caller cancelled it.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
}

/// The commons of this machine.
#[derive(Debug)]
pub struct Commons {
    cgroup: Cgroup,
}

impl Commons {
    /// Makes the cgroup of that name, [`NAME`] for all but tests, if it is missing, and gives it a
    /// limit if one is named.
    ///
    /// # Errors
    /// [`CgroupError::NoMemoryController`], [`CgroupError::Io`].
    pub fn open(name: &str, limit_bytes: Option<u64>) -> Result<Self, CgroupError> {
        let cgroup = Hierarchy::find(Path::new("/"))?.standing(name)?;
        if let Some(bytes) = limit_bytes {
            cgroup.limit(bytes)?;
        }
        Ok(Self { cgroup })
    }

    /// Reads an image's metadata and its objects ahead, or the parts of them that a profile of it
    /// names, charged to the commons: also the directories, if it is mounted. Meanwhile this whole
    /// process is in that cgroup. `run` is the run directory of the domain's store. The figures are
    /// those of the objects.
    ///
    /// # Errors
    /// [`CommonsError`]; what was read until then stays. With the backend `inode-share` the image has
    /// to be mounted: [`LedgerError::NotMounted`].
    pub fn warm(
        &self,
        domain: &Domain,
        run: &RunDir,
        image: &Digest,
        profile: Option<&Profile>,
        task: &Task,
    ) -> Result<Warmed, CommonsError> {
        let opened = PageFiles::of(domain, run, image)?;
        let inside = self.cgroup.enter()?;
        // Each container looks up other names: what it reads of the metadata first, it would be charged for.
        for file in opened.metadata()? {
            let Some(descriptor) = file.descriptor() else { continue };
            read_ahead(descriptor, 0, file.size().unwrap_or_default());
        }
        opened.read_directories(run, &task.cancel)?;
        let whole;
        let files = match profile {
            Some(profile) => &profile.files,
            None => {
                let objects = profile::objects(domain, image)?.into_iter();
                let all = |(object, size)| ProfileFile { object, ranges: vec![(0, size)] };
                whole = objects.map(all).collect();
                &whole
            }
        };
        let mut warmed = Warmed { objects: files.len() as u64, ..Warmed::default() };
        for ProfileFile { object, ranges } in files {
            task.check()?;
            warmed.resident_before_bytes += opened.resident_bytes(object, ranges)?;
            let file = opened.open(object)?;
            for (start, length) in ranges {
                warmed.bytes += length;
                read_ahead(&file, *start, *length);
            }
        }
        drop(inside);
        for ProfileFile { object, ranges } in files {
            warmed.resident_bytes += opened.resident_bytes(object, ranges)?;
        }
        warmed.commons_bytes = self.cgroup.charge()?.cache;
        Ok(warmed)
    }
}
