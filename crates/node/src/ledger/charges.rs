//! Which resident pages are charged to the commons.
//!
//! The kernel says for each page of memory which cgroup it is charged to (`/proc/kpagecgroup`, by the
//! inode number of the cgroup's directory). To come from a file to its pages, the file is mapped. That
//! takes 0.2 µs a page and some 15 µs a file, ten times what cachestat takes. So an object is counted
//! when the number of its resident pages has changed. All are counted again when the commons have
//! grown, because then something was read ahead, perhaps in place of pages that went.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use cofolio_sys::cache::FileMap;
use serde::{Deserialize, Serialize};

use crate::cgroup::Hierarchy;

/// Name of the commons cgroup, at the top of the hierarchy.
pub const COMMONS: &str = "cofolio-commons";

/// The commons cgroup. Sizes are bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonsAccount {
    /// Page cache that it is charged for: of all stores, with what was removed meanwhile.
    pub charged_bytes: u64,
    /// Its limit.
    pub limit_bytes: Option<u64>,
}

/// What one round over all objects knows of the commons.
#[derive(Debug, Default)]
pub(super) struct Charges {
    /// `None` where there are no commons: then no page is charged to them.
    commons: Option<Commons>,
    charged_bytes: u64,
    /// The number of the round that objects have to be counted in anew.
    pub(super) epoch: u32,
}

#[derive(Debug)]
struct Commons {
    /// Inode number of the cgroup's directory.
    inode: u64,
    /// `/proc/self/pagemap` and `/proc/kpagecgroup`; `None` where the kernel does not have them, or
    /// this process may not read them.
    files: Option<(File, File)>,
}

impl CommonsAccount {
    /// `None` if there is no cgroup of that name.
    pub(super) fn read(hierarchy: Option<&Hierarchy>, name: &str) -> Option<Self> {
        let cgroup = hierarchy?.existing(name)?;
        let charged_bytes = cgroup.charge().ok()?.cache;
        Some(Self { charged_bytes, limit_bytes: cgroup.limit_bytes().ok()? })
    }
}

impl Charges {
    /// Begins a round.
    pub(super) fn begin(&mut self, hierarchy: Option<&Hierarchy>, name: &str) {
        let charged_bytes =
            CommonsAccount::read(hierarchy, name).map_or(0, |account| account.charged_bytes);
        let found = hierarchy.map(|it| it.directory(name)).and_then(|it| fs::metadata(it).ok());
        let inode = found.map(|it| it.ino()).filter(|_| charged_bytes > 0);
        if charged_bytes > self.charged_bytes
            || inode != self.commons.as_ref().map(|commons| commons.inode)
        {
            self.epoch = self.epoch.wrapping_add(1);
        }
        self.charged_bytes = charged_bytes;
        let open = || {
            Ok::<_, io::Error>((
                File::open("/proc/self/pagemap")?,
                File::open("/proc/kpagecgroup")?,
            ))
        };
        self.commons = inode.map(|inode| Commons { inode, files: open().ok() });
    }

    /// Whether it can be said what is charged to the commons.
    pub(super) fn are_known(&self) -> bool {
        self.commons.as_ref().is_none_or(|commons| commons.files.is_some())
    }

    /// Pages of the first `size` bytes of a file that are charged to the commons.
    ///
    /// # Errors
    /// Those of [`FileMap::resident_frames`], and of reading `/proc/kpagecgroup`.
    pub(super) fn commons_pages(&self, file: impl AsFd, size: u64) -> io::Result<u64> {
        let Some(Commons { inode, files: Some((pagemap, cgroups)) }) = &self.commons else {
            return Ok(0);
        };
        let mut pages = 0;
        let mut failed = None;
        let mut entries = Vec::new();
        FileMap::new(file, size)?.resident_frames(pagemap, |first, count| {
            entries.resize(usize::try_from(count).unwrap_or(0) * 8, 0);
            match cgroups.read_exact_at(&mut entries, first * 8) {
                Ok(()) => {
                    let found = entries.chunks_exact(8).filter(|it| **it == inode.to_ne_bytes());
                    pages += found.count() as u64;
                }
                Err(error) => failed = Some(error),
            }
        })?;
        failed.map_or(Ok(pages), Err)
    }
}
