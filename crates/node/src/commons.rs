//! The commons: a cgroup that shared pages are charged to.
//!
//! The kernel charges a page of a file to the cgroup whose process brings it in, and to no other as
//! long as it stays. So the first container of an image would pay for what all of them read, and its
//! cgroup would live on, removed, as long as such a page does. Pages that are read ahead from inside
//! the commons are charged there. The kernel takes them back as it takes any page that can be read
//! again.

use std::fs::File;
use std::path::Path;

use cofolio_store::task::{Cancelled, Task};
use cofolio_store::{Digest, Domain, Error};
use cofolio_sys::cache::page_size;
use serde::Serialize;

use crate::cache::named_objects;
use crate::cgroup::{Cgroup, CgroupError, ChargedPages, Hierarchy};
use crate::config::{COMMONS_LIMIT_MIN, Size};
use crate::ledger::LedgerError;
use crate::mount::RunDir;
use crate::page_files::{PageFiles, read_ahead};
use crate::profile::{Profile, ProfileFile};

/// What reading ahead has done. Sizes are bytes of whole pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Warmed {
    /// Objects of the image, or of its profile.
    pub objects: u64,
    /// Those of them that were read ahead to the end. Others may have been resident before.
    pub objects_read: u64,
    /// The limit of the commons in bytes, if there was no room under it for the rest.
    pub stopped_at_limit_bytes: Option<u64>,
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
    /// The commons have a limit below [`COMMONS_LIMIT_MIN`].
    #[error(
        "the commons' limit of {} is too small for the process that reads ahead: it takes at least {}",
        Size(*.limit_bytes),
        COMMONS_LIMIT_MIN
    )]
    Limit {
        /// The limit in bytes.
        limit_bytes: u64,
    },
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

/// Room for the inode of an opened file and its name in the kernel, which has 1.3 KiB for those of ext4.
const INODE_BYTES: u64 = 2048;

/// What stays free under a limit, as a share of it: the page cache's tree takes a 455th of what it holds,
/// and the kernel charges up to 64 pages for each processor in advance. At its limit it would drop pages
/// of the first files, which are those that matter most.
const SPARE_SHARE: u64 = 64;

/// The commons of this machine.
#[derive(Debug)]
pub struct Commons {
    cgroup: Cgroup,
}

impl Commons {
    /// Makes the cgroup of that name, [`COMMONS`](crate::cgroup::COMMONS) for all but tests, if it is
    /// missing, and gives it a limit if one is named, of at least [`COMMONS_LIMIT_MIN`].
    ///
    /// # Errors
    /// Those of [`Hierarchy::find`] and of [`Hierarchy::standing`]; [`CgroupError::InUse`].
    pub fn open(name: &str, limit_bytes: Option<u64>) -> Result<Self, CgroupError> {
        let cgroup = Hierarchy::find(Path::new("/"))?.standing(name)?;
        if let Some(bytes) = limit_bytes {
            cgroup.limit(bytes)?;
        }
        Ok(Self { cgroup })
    }

    /// The limit of all that they hold in bytes, if they have one.
    ///
    /// # Errors
    /// [`CgroupError::Io`].
    pub fn limit_bytes(&self) -> Result<Option<u64>, CgroupError> {
        self.cgroup.limit_bytes()
    }

    /// How many processes in them the kernel has killed because of the limit.
    ///
    /// # Errors
    /// [`CgroupError::Io`], [`CgroupError::Format`].
    pub fn oom_kills(&self) -> Result<u64, CgroupError> {
        self.cgroup.oom_kills()
    }

    /// Reads an image's metadata and its objects ahead, or the parts of them that a profile of it
    /// names, charged to the commons: also the directories, if it is mounted. Meanwhile this whole
    /// process is in that cgroup. `run` is the run directory of the domain's store. The figures are
    /// those of the objects. Under a limit it stops where more would push out what the commons have of
    /// the image; what others are charged for takes no room.
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
        let limit = self.limit_bytes()?;
        if let Some(limit_bytes) = limit.filter(|bytes| *bytes < COMMONS_LIMIT_MIN.0) {
            return Err(CommonsError::Limit { limit_bytes });
        }
        let opened = PageFiles::of(domain, run, image)?;
        // The list of a large image takes memory that is not to be charged to the commons.
        let whole;
        let files = match profile {
            Some(profile) => &profile.files,
            None => {
                let objects = named_objects(domain, image)?.into_iter();
                let all = |(object, size)| ProfileFile { object, ranges: vec![(0, size)] };
                whole = objects.map(all).collect();
                &whole
            }
        };
        let inside = self.cgroup.enter()?;
        // Each container looks up other names: what it reads of the metadata first, it would be charged for.
        let mut metadata_bytes = 0;
        for file in opened.metadata()? {
            let Some(descriptor) = file.descriptor() else { continue };
            let size = file.size().unwrap_or_default();
            read_ahead(descriptor, 0, size);
            metadata_bytes += size;
        }
        opened.read_directories(run, &task.cancel)?;
        let room = limit.map(|limit_bytes| self.room(limit_bytes, metadata_bytes)).transpose()?;
        let read = read_files(&opened, files, room, task)?;
        drop(inside);
        let mut warmed = Warmed {
            objects: files.len() as u64,
            objects_read: read.objects,
            stopped_at_limit_bytes: limit.filter(|_| read.is_stopped),
            resident_before_bytes: read.resident_before_bytes,
            ..Warmed::default()
        };
        for (number, ProfileFile { object, ranges }) in files.iter().enumerate() {
            task.check()?;
            let ranges = whole_pages(ranges);
            let file = opened.open(object)?;
            let resident_bytes = opened.resident_bytes(&file, object, &ranges)?;
            warmed.resident_bytes += resident_bytes;
            warmed.bytes += total(&ranges);
            if number >= read.looked_at {
                warmed.resident_before_bytes += resident_bytes;
            }
        }
        warmed.commons_bytes = self.cgroup.charge()?.cache;
        Ok(warmed)
    }

    /// The room under a limit. Pages of other images are in nobody's way: the kernel drops them first.
    fn room(&self, limit_bytes: u64, metadata_bytes: u64) -> Result<Room, CgroupError> {
        let charge = self.cgroup.charge()?;
        let fixed_bytes = charge.total.saturating_sub(charge.cache) + metadata_bytes;
        let pages = self.cgroup.charged_pages().ok();
        let usable_bytes = limit_bytes - limit_bytes / SPARE_SHARE;
        Ok(Room { left_bytes: usable_bytes.saturating_sub(fixed_bytes), pages })
    }
}

/// What the commons can still hold beside what they have of the image.
struct Room {
    left_bytes: u64,
    /// Where the kernel does not tell, all that is resident counts as charged to them.
    pages: Option<ChargedPages>,
}

impl Room {
    /// Takes room for what is missing of a file, beside what the commons have of it already. Or says
    /// how many bytes of it there is room for.
    fn take(&mut self, file: &File, ranges: &[(u64, u64)], resident_bytes: u64) -> Result<(), u64> {
        let end = ranges.last().map_or(0, |(start, length)| start + length);
        let charged = || self.pages.as_ref()?.count(file, end).ok();
        let has_bytes = match resident_bytes {
            0 => INODE_BYTES,
            _ => charged().map_or(resident_bytes, |(own, elsewhere)| {
                // What is still being read is not in `own`, and what others are charged for between
                // the ranges is in `elsewhere`: so the larger one.
                let rest = resident_bytes.saturating_sub(elsewhere * page_size());
                rest.max(own * page_size())
            }),
        };
        self.left_bytes = self.left_bytes.saturating_sub(has_bytes);
        let missing_bytes = total(ranges).saturating_sub(resident_bytes);
        self.left_bytes = self.left_bytes.checked_sub(missing_bytes).ok_or(self.left_bytes)?;
        Ok(())
    }
}

/// What [`read_files`] has done.
#[derive(Default)]
struct Read {
    objects: u64,
    /// Files that were looked at, and what of them was resident.
    looked_at: usize,
    resident_before_bytes: u64,
    is_stopped: bool,
}

/// Reads files ahead, in their order, until there is no room for what is missing of one.
fn read_files(
    opened: &PageFiles<'_>,
    files: &[ProfileFile],
    mut room: Option<Room>,
    task: &Task,
) -> Result<Read, CommonsError> {
    let mut read = Read::default();
    for ProfileFile { object, ranges } in files {
        task.check()?;
        let ranges = whole_pages(ranges);
        let file = opened.open(object)?;
        let resident_bytes = opened.resident_bytes(&file, object, &ranges)?;
        read.looked_at += 1;
        read.resident_before_bytes += resident_bytes;
        let room = room.as_mut().map_or(Ok(()), |it| it.take(&file, &ranges, resident_bytes));
        // As most files are when an image is mounted again.
        if resident_bytes >= total(&ranges) {
            continue;
        }
        let mut left_bytes = room.err().unwrap_or(u64::MAX);
        for (start, length) in ranges {
            read_ahead(&file, start, length.min(left_bytes));
            left_bytes = left_bytes.saturating_sub(length);
        }
        if room.is_err() {
            read.is_stopped = true;
            break;
        }
        read.objects += 1;
    }
    Ok(read)
}

fn total(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().map(|(_, length)| length).sum()
}

/// Ascending ranges of a file, rounded to the pages that they are in, each page once: what is resident is
/// whole pages.
fn whole_pages(ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let page = page_size();
    let mut rounded: Vec<(u64, u64)> = Vec::new();
    for (start, length) in ranges {
        let first = start - start % page;
        let end = (start + length).checked_next_multiple_of(page).unwrap_or(u64::MAX);
        match rounded.last_mut() {
            Some((at, length)) if first <= *at + *length => *length = end - *at,
            _ => rounded.push((first, end - first)),
        }
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page counted once for each range in it: of a file of 1.9 MiB in ranges of a byte, 7.2 GiB
    /// were resident.
    #[test]
    fn ranges_in_one_page_are_one() {
        let page = page_size();
        let ranges = [(1, 1), (2, 1), (page - 1, 2), (3 * page, page), (5 * page + 7, 1)];
        let whole = [(0, 2 * page), (3 * page, page), (5 * page, page)];
        assert_eq!(whole_pages(&ranges), whole);
        assert_eq!(whole_pages(&[(u64::MAX - 1, 1)]).len(), 1);
    }
}
