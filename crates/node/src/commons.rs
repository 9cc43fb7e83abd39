//! The commons: a cgroup that shared pages are charged to.
//!
//! The kernel charges a page of a file to the cgroup whose process brings it in, and to no other as
//! long as it stays. So the first container of an image would pay for what all of them read, and its
//! cgroup would live on, removed, as long as such a page does. Pages that are read ahead from inside
//! the commons are charged there. The kernel takes them back as it takes any page that can be read
//! again.

mod room;

use std::path::Path;

use cofolio_store::task::{Cancelled, Task};
use cofolio_store::{Digest, Domain, Error};
use cofolio_sys::cache::page_size;
use serde::Serialize;

use self::room::Room;
use crate::cache::named_objects;
use crate::cgroup::{Cgroup, CgroupError, Hierarchy};
use crate::ledger::LedgerError;
use crate::page_files::{PageFiles, end, read_ahead};
use crate::profile::{Profile, ProfileFile};
use crate::run_dir::RunDir;
use crate::size::Size;

/// The least limit of the commons. The process that reads ahead is in them itself, and is charged for
/// the kernel's inodes of what it opens. With 24,000 files the kernel killed it at 4 MiB.
pub const COMMONS_LIMIT_MIN: Size = Size(16 << 20);

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

/// Pages of each step that stand for all of them when the image's resident pages are counted at the
/// limit. With all of its files, an image of 50,000 files would take 3.2 million opens.
const SAMPLES_PER_STEP: u64 = 32;

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
    /// those of the objects. Under a limit it stops where more would push out what the commons have
    /// of the image, which the kernel does when they are full and other images are in more use;
    /// what others are charged for takes no room.
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
        let room = limit.map(|it| Room::of(&self.cgroup, it, metadata_bytes)).transpose()?;
        let read = read_files(&opened, files, room, task)?;
        drop(inside);
        let mut warmed = Warmed {
            objects: files.len() as u64,
            objects_read: read.objects,
            resident_before_bytes: read.resident_before_bytes,
            ..Warmed::default()
        };
        for (number, ProfileFile { object, ranges }) in files.iter().enumerate() {
            task.check()?;
            let file = opened.open(object)?;
            // A truncated object would pass for a whole one.
            if let (None, Ok(found)) = (profile, file.metadata().map(|it| it.len()))
                && found != total(ranges)
            {
                let (digest, expected) = (*object, total(ranges));
                return Err(Error::SizeMismatch { digest, expected, found }.into());
            }
            let ranges = whole_pages(ranges);
            let resident_bytes = opened.resident_bytes(&file, object, &ranges)?;
            warmed.resident_bytes += resident_bytes;
            warmed.bytes += total(&ranges);
            if number >= read.looked_at {
                warmed.resident_before_bytes += resident_bytes;
            }
        }
        let lacks_room = read.is_stopped && warmed.resident_bytes < warmed.bytes;
        warmed.stopped_at_limit_bytes = limit.filter(|_| lacks_room);
        warmed.commons_bytes = self.cgroup.charge()?.cache;
        Ok(warmed)
    }
}

/// What [`read_files`] has done.
#[derive(Default)]
struct Read {
    objects: u64,
    /// Files that were looked at, and what of them was resident.
    looked_at: usize,
    resident_before_bytes: u64,
    /// The room has ended, before the last file or with it.
    is_stopped: bool,
}

/// Reads files ahead, in their order, until there is no room for what is missing of one.
fn read_files(
    opened: &PageFiles<'_>,
    files: &[ProfileFile],
    mut room: Option<Room<'_>>,
    task: &Task,
) -> Result<Read, CommonsError> {
    let mut read = Read::default();
    let step_bytes = room.as_ref().map_or(u64::MAX, |it| it.step_bytes);
    let stride_bytes = (step_bytes / SAMPLES_PER_STEP).next_multiple_of(page_size());
    let resident_of_image = || {
        sampled_pages(files, stride_bytes).try_fold(0, |sum, (object, pages)| {
            task.check()?;
            let file = opened.open(object)?;
            let resident = opened.resident_bytes(&file, object, &pages)? / page_size();
            Ok(sum + resident * stride_bytes)
        })
    };
    let mut last = None;
    for ProfileFile { object, ranges } in files {
        task.check()?;
        let ranges = whole_pages(ranges);
        let file = opened.open(object)?;
        let resident_bytes = opened.resident_bytes(&file, object, &ranges)?;
        read.looked_at += 1;
        read.resident_before_bytes += resident_bytes;
        let missing_bytes = total(&ranges).saturating_sub(resident_bytes);
        let fitting_bytes =
            room.as_mut().map_or(missing_bytes, |it| it.take(&file, &ranges, resident_bytes));
        // As most files are when an image is mounted again.
        if missing_bytes == 0 {
            continue;
        }
        // Pages that go meanwhile take the room that they had.
        let mut left_bytes = if fitting_bytes < missing_bytes { fitting_bytes } else { u64::MAX };
        let (mut at, mut has_room) = (0, left_bytes > 0);
        let mut parts = steps(&ranges, step_bytes);
        while has_room && let Some((start, mut length)) = parts.next() {
            if let Some(room) = &mut room {
                let resident_bytes = opened.resident_bytes(&file, object, &[(start, length)])?;
                let mut missing_bytes = length.saturating_sub(resident_bytes);
                if missing_bytes > left_bytes {
                    (length, missing_bytes) = (left_bytes, left_bytes);
                }
                left_bytes -= missing_bytes;
                let part = (start, length);
                has_room = room.read(&file, part, missing_bytes, &resident_of_image)?;
                has_room &= left_bytes > 0;
            } else {
                read_ahead(&file, start, length);
            }
            at = start + length;
        }
        read.objects += u64::from(at == end(&ranges));
        if !has_room {
            read.is_stopped = true;
            return Ok(read);
        }
        last = Some((file, at));
    }
    if let (Some(mut room), Some((file, at))) = (room, last) {
        read.is_stopped = !room.end_step(&file, at, &resident_of_image)?;
    }
    Ok(read)
}

/// Ranges in parts of at most so many bytes.
fn steps(ranges: &[(u64, u64)], step_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = usize::try_from(step_bytes).unwrap_or(usize::MAX);
    ranges.iter().flat_map(move |(start, length)| {
        let end = start + length;
        (*start..end).step_by(step).map(move |at| (at, step_bytes.min(end - at)))
    })
}

/// A page of each `stride_bytes` of files one after the other, by file.
fn sampled_pages(
    files: &[ProfileFile],
    stride_bytes: u64,
) -> impl Iterator<Item = (&Digest, Vec<(u64, u64)>)> {
    let page = page_size();
    let mut before_next = stride_bytes / 2 / page * page;
    files.iter().filter_map(move |ProfileFile { object, ranges }| {
        let mut pages = Vec::new();
        for (start, length) in whole_pages(ranges) {
            while before_next < length {
                pages.push((start + before_next, page));
                before_next += stride_bytes;
            }
            before_next -= length;
        }
        (!pages.is_empty()).then_some((object, pages))
    })
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

    /// At each 64th of the limit all files of the image were opened: 3.2 million times for 50,000
    /// files.
    #[test]
    fn a_count_looks_at_few_pages_that_stand_for_all() {
        let page = page_size();
        let file = |number: u64| ProfileFile {
            object: cofolio_store::verity::digest(&number.to_le_bytes()),
            ranges: vec![(0, 1 + number % 3 * page)],
        };
        let files: Vec<_> = (0..9000).map(file).collect();
        let bytes_of = |files: &[ProfileFile]| -> u64 {
            files.iter().map(|it| total(&whole_pages(&it.ranges))).sum()
        };
        let stride_bytes = bytes_of(&files) / 64 / SAMPLES_PER_STEP / page * page;
        let sampled: Vec<_> = sampled_pages(&files, stride_bytes).collect();
        assert!(sampled.len() < 2300, "{}", sampled.len());
        // Files that follow each other, as they are read and as the kernel drops them.
        for (first, count) in [(0, 9000), (0, 100), (4000, 140), (8859, 141)] {
            let files = &files[first..][..count];
            let is_in = |object: &Digest| files.iter().any(|it| it.object == *object);
            let found = sampled.iter().filter(|(object, _)| is_in(object));
            let found = found.map(|(_, pages)| pages.len() as u64).sum::<u64>() * stride_bytes;
            assert!(found.abs_diff(bytes_of(files)) <= stride_bytes, "{first} {count} {found}");
        }
        let all: Vec<_> = sampled_pages(&files[..3], page).map(|(_, pages)| pages).collect();
        let each = |count: u64| (0..count).map(|it| (it * page, page)).collect::<Vec<_>>();
        assert_eq!(all, [each(1), each(2), each(3)]);
    }
}
