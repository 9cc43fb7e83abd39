//! Reading ahead under a limit of the commons.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use cofolio_sys::cache::page_size;

use super::{CommonsError, total};
use crate::cgroup::{Cgroup, CgroupError, ChargedPages};
use crate::page_files::{end, read_ahead};

/// Room for the inode of an opened file and its name in the kernel, which has 1.3 KiB for those of ext4.
const INODE_BYTES: u64 = 2048;

/// What stays free under a limit, as a share of it: the page cache's tree takes a 455th of what it holds,
/// and the kernel charges up to 64 pages for each processor in advance. At its limit it would drop pages
/// of the first files, which are those that matter most.
const SPARE_SHARE: u64 = 64;

/// What the commons can still hold of the image.
///
/// Once they are full, the kernel drops pages for those that are read ahead: some that nobody uses,
/// or those of images in use, or the first ones of this image. Nothing tells which before. So
/// reading goes on in steps, as long as a step brings in more than it takes away.
pub(super) struct Room<'c> {
    /// Room left for this image if every other image gave way.
    left_bytes: u64,
    /// Where the kernel does not tell, all that is resident counts as charged to them.
    pages: Option<ChargedPages>,
    cgroup: &'c Cgroup,
    /// What they can take without losing anything.
    free_bytes: u64,
    pub(super) step_bytes: u64,
    /// What this step has read.
    read_bytes: u64,
    /// [`Self::kept_bytes`] before it. `None` until the commons are full.
    kept_bytes_before: Option<u64>,
}

/// Estimates what is resident of the image.
pub(super) type Resident<'r> = &'r dyn Fn() -> Result<u64, CommonsError>;

impl<'c> Room<'c> {
    /// The room under a limit.
    pub(super) fn of(
        cgroup: &'c Cgroup,
        limit_bytes: u64,
        metadata_bytes: u64,
    ) -> Result<Self, CgroupError> {
        let charge = cgroup.charge()?;
        let fixed_bytes = charge.total.saturating_sub(charge.cache) + metadata_bytes;
        let pages = cgroup.charged_pages().ok();
        let step_bytes = (limit_bytes / SPARE_SHARE).next_multiple_of(page_size());
        let usable_bytes = limit_bytes - step_bytes;
        Ok(Self {
            left_bytes: usable_bytes.saturating_sub(fixed_bytes),
            pages,
            cgroup,
            free_bytes: usable_bytes.saturating_sub(charge.total),
            step_bytes,
            read_bytes: 0,
            kept_bytes_before: None,
        })
    }

    /// Takes room for what is missing of a file, beside what the commons have of it already. Returns
    /// how many bytes of what is missing fit.
    pub(super) fn take(&mut self, file: &File, ranges: &[(u64, u64)], resident_bytes: u64) -> u64 {
        let charged = || self.pages.as_ref()?.count(file, end(ranges)).ok();
        let has_bytes = match resident_bytes {
            0 => INODE_BYTES,
            _ => charged().map_or(resident_bytes, |(own, elsewhere)| {
                // Either count can be too low: what is still being read is not in `own`, and
                // `elsewhere` has what others are charged for between the ranges.
                let rest = resident_bytes.saturating_sub(elsewhere * page_size());
                rest.max(own * page_size())
            }),
        };
        self.left_bytes = self.left_bytes.saturating_sub(has_bytes);
        let missing_bytes = total(ranges).saturating_sub(resident_bytes);
        let fitting_bytes = missing_bytes.min(self.left_bytes);
        self.left_bytes -= fitting_bytes;
        fitting_bytes
    }

    /// Reads a part of a file ahead, of which so much is missing. Says whether there is room for
    /// more.
    pub(super) fn read(
        &mut self,
        file: &File,
        (start, length): (u64, u64),
        missing_bytes: u64,
        resident: Resident<'_>,
    ) -> Result<bool, CommonsError> {
        if let Some(free_bytes) = self.free_bytes.checked_sub(missing_bytes) {
            self.free_bytes = free_bytes;
            read_ahead(file, start, length);
            return Ok(true);
        }
        if self.kept_bytes_before.is_none() {
            self.kept_bytes_before = Some(self.kept_bytes(resident)?);
        }
        read_ahead(file, start, length);
        self.read_bytes += missing_bytes;
        if self.read_bytes < self.step_bytes {
            return Ok(true);
        }
        self.end_step(file, start + length, resident)
    }

    /// Says whether half of what the step has read came in on balance. `end` is where reading
    /// ended.
    pub(super) fn end_step(
        &mut self,
        file: &File,
        end: u64,
        resident: Resident<'_>,
    ) -> Result<bool, CommonsError> {
        let read_bytes = std::mem::take(&mut self.read_bytes);
        let Some(before) = self.kept_bytes_before.filter(|_| read_bytes > 0) else {
            return Ok(true);
        };
        wait_for(file, end);
        let kept_bytes = self.kept_bytes(resident)?;
        self.kept_bytes_before = Some(kept_bytes);
        Ok(kept_bytes >= before + read_bytes / 2)
    }

    /// Bytes in the commons that are not to be lost: of this image, and mapped ones of any image. At
    /// the limit the kernel does not look at whether processes of other cgroups use a mapped page.
    fn kept_bytes(&self, resident: Resident<'_>) -> Result<u64, CommonsError> {
        Ok(resident()? + self.cgroup.mapped_bytes()?)
    }
}

/// Waits until a file is read up to there: pages that are still being read do not count everywhere.
/// `end` may be rounded up to a page, but a read past the end of the file waits for nothing.
fn wait_for(file: &File, end: u64) {
    let end = file.metadata().map_or(end, |it| end.min(it.len()));
    let _ = file.read_at(&mut [0], end.saturating_sub(1));
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::commons::whole_pages;

    /// The end of what was read ahead was rounded up past the end of the file. A read there waited
    /// for nothing, and what was still being read counted as lost.
    #[test]
    fn the_end_of_a_file_is_waited_for() {
        let page = page_size();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; usize::try_from(2 * page + 1).unwrap()]).unwrap();
        file.sync_all().unwrap();
        let last_page = || {
            let resident = crate::page_files::resident_ranges(&file, 3 * page).unwrap();
            resident.last().is_some_and(|(start, length)| start + length == 3 * page)
        };
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        wait_for(&file, end(&whole_pages(&[(0, 2 * page + 1)])));
        assert!(last_page());
    }
}
