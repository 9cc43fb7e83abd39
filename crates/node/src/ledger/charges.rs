//! Which resident pages are charged to the commons.
//!
//! To ask that takes ten times as long as cachestat ([`ChargedPages`]). So an object is counted
//! when the number of its resident pages has changed. All are counted again when the commons have
//! grown, because then something was read ahead, perhaps in place of pages that went. When the
//! commons have shrunk, a container may have read again what went. Then the objects that have pages
//! there are counted again; the others cannot lose any. So looks take longer while the kernel takes
//! pages from the commons: some 15 µs more for each object in them.
//!
//! A count stays wrong if an object lost as many pages as it got between two looks, and:
//!
//! | the count | the charge of the commons | for example |
//! |---|---|---|
//! | any | stayed the same | the object lost a page of the commons and got one of a container, and another object the other way round |
//! | 0 | fell | the object lost a page of a container and got one of the commons, and another object lost two of the commons |

use std::io;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use crate::cgroup::{ChargedPages, Hierarchy};

/// The commons cgroup. Sizes are bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonsAccount {
    /// Page cache that it is charged for: of all stores, with what was removed meanwhile.
    pub charged_bytes: u64,
    /// Its limit.
    pub limit_bytes: Option<u64>,
}

/// What one round over all objects knows of the commons.
#[derive(Debug)]
pub(super) struct Charges {
    /// `None` where there are no commons: then no page is charged to them.
    commons: Option<Commons>,
    charged_bytes: u64,
    /// Counts how often the commons have grown or shrunk, from 1: 0 is before any count.
    pub(super) epoch: u32,
    /// The epoch that began when they had last grown, or another cgroup had taken their place.
    grown: u32,
}

#[derive(Debug)]
struct Commons {
    /// Inode number of the cgroup's directory.
    inode: u64,
    /// `None` where the kernel does not tell.
    pages: Option<ChargedPages>,
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
    pub(super) fn new() -> Self {
        Self { commons: None, charged_bytes: 0, epoch: 1, grown: 1 }
    }

    /// Begins a round.
    pub(super) fn begin(&mut self, hierarchy: Option<&Hierarchy>, name: &str) {
        let before = self.commons.as_ref().map(|commons| commons.inode);
        let charged_bytes =
            CommonsAccount::read(hierarchy, name).map_or(0, |account| account.charged_bytes);
        let found = hierarchy.and_then(|it| it.existing(name)).filter(|_| charged_bytes > 0);
        self.commons = found.and_then(|cgroup| {
            Some(Commons { inode: cgroup.inode().ok()?, pages: cgroup.charged_pages().ok() })
        });
        let inode = self.commons.as_ref().map(|commons| commons.inode);
        let has_grown = charged_bytes > self.charged_bytes || inode != before;
        if has_grown || charged_bytes < self.charged_bytes {
            self.epoch = self.epoch.saturating_add(1);
        }
        if has_grown {
            self.grown = self.epoch;
        }
        self.charged_bytes = charged_bytes;
    }

    /// Whether it can be said what is charged to the commons.
    pub(super) fn are_known(&self) -> bool {
        self.commons.as_ref().is_none_or(|commons| commons.pages.is_some())
    }

    /// Whether the count of an object's pages in the commons, made in the epoch `counted`, still
    /// holds if it has as many resident pages as then.
    pub(super) fn still_hold(&self, commons_pages: u32, counted: u32) -> bool {
        counted >= if commons_pages > 0 { self.epoch } else { self.grown }
    }

    /// Pages of the first `size` bytes of a file that are charged to the commons.
    ///
    /// # Errors
    /// Those of [`ChargedPages::count`].
    pub(super) fn commons_pages(&self, file: impl AsFd, size: u64) -> io::Result<u64> {
        match &self.commons {
            Some(Commons { pages: Some(pages), .. }) => Ok(pages.count(file, size)?.0),
            _ => Ok(0),
        }
    }
}
