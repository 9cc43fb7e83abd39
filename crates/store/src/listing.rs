//! Whether the images of a domain may have changed since their directories were listed.

use crate::Domain;
use crate::base;
use crate::disk::Stat;
use crate::error::{At, Result};
use crate::kinds::FileKind;
use crate::record::now;
use crate::records::REFS;

/// Seconds after a change during which its time is not believed: the clock of a filesystem may
/// advance in steps of a second, and a change within one step leaves the time as it was.
const SETTLED_SECONDS: i64 = 2;

/// A directory as it was when it was listed: its inode and its mtime. No file in place is ever
/// written again, and adding, replacing or removing one changes the mtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Listed {
    inode: u64,
    mtime: (i64, u32),
}

impl Listed {
    /// `None` if the next change may leave the mtime as it is.
    fn new(stat: &Stat, now: i64) -> Option<Self> {
        (stat.mtime.0 + SETTLED_SECONDS < now)
            .then_some(Self { inode: stat.inode, mtime: stat.mtime })
    }
}

/// The directories of a domain's images, refs and bases as they were when they were listed. See
/// [`Domain::listing`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing([Option<Listed>; 3]);

impl Domain {
    /// State of the directories of images, refs and bases. Taken before they are listed, an equal
    /// one later says that none of them has changed. `None` if one of them has just changed: then a
    /// further change might not show.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn listing(&self) -> Result<Option<Listing>> {
        let now = now();
        let mut listing = Listing([None; 3]);
        for (directory, listed) in
            [FileKind::Image.directory(), REFS, base::DIRECTORY].into_iter().zip(&mut listing.0)
        {
            let path = format!("{}/{directory}", self.directory());
            // Bases may not have one yet.
            if let Some(stat) = self.disk().stat(&path).if_there("look at", &path)? {
                *listed = Listed::new(&stat, now);
                if listed.is_none() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(listing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Kind;

    /// A name that came in the same tick of the filesystem's clock as the listing would never be
    /// seen.
    #[test]
    fn a_directory_that_has_just_changed_is_listed_again() {
        let stat = |mtime| Stat {
            kind: Kind::Directory,
            size: 0,
            allocated: 0,
            mode: 0o755,
            uid: 0,
            inode: 7,
            nlink: 2,
            immutable: false,
            mtime,
        };
        // One from the future, too.
        for seconds in [98, 99, 100, 101, 500] {
            assert_eq!(Listed::new(&stat((seconds, 0)), 100), None, "{seconds}");
        }
        let settled = Listed::new(&stat((97, 1)), 100);
        assert!(settled.is_some());
        assert_eq!(settled, Listed::new(&stat((97, 1)), 200));
        assert_ne!(settled, Listed::new(&stat((97, 2)), 200));
    }
}
