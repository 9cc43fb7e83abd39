//! Who opened a file, when the process has ended before anybody could ask for its cgroup.
//!
//! The file is open through a mount. Where processes that still run have that mount as their root,
//! it is a container's, and the one that has ended was most likely in it, too.

use std::collections::HashMap;

use crate::cgroup::is_at_or_below;

/// Mounts that are kept of a round: a container can make any number of them. With more, all are
/// forgotten.
const MOUNTS_MAX: usize = 1 << 14;

/// Bytes of a path that are kept. Of a longer one the cgroup above it is.
const PATH_MAX: usize = 512;

#[derive(Debug, Default)]
pub(super) struct Openers {
    /// Of mounts that are the root of a process, the lowest cgroup at or above all these processes,
    /// as far as they were met since the last round over all processes ended.
    this_round: HashMap<u64, Box<str>>,
    /// The same of the round before.
    last_round: HashMap<u64, Box<str>>,
}

impl Openers {
    /// A process in this cgroup has the mount as its root.
    pub(super) fn learn(&mut self, mount: u64, cgroup: &str) {
        if self.this_round.len() >= MOUNTS_MAX {
            self.this_round.clear();
        }
        let mut cgroup = cgroup;
        while cgroup.len() > PATH_MAX {
            cgroup = above(cgroup);
        }
        let known = self.this_round.entry(mount).or_insert_with(|| cgroup.into());
        while !is_at_or_below(cgroup, known) {
            *known = above(known).into();
        }
    }

    /// The cgroup in or below which all known processes are that have this mount as their root.
    pub(super) fn of_mount(&self, mount: u64) -> Option<&str> {
        let known = self.this_round.get(&mount).or_else(|| self.last_round.get(&mount))?;
        // Processes everywhere have it: it is the root of the machine, for one.
        Some(&**known).filter(|path| !path.is_empty() && *path != "/")
    }

    pub(super) fn round_is_complete(&mut self) {
        self.last_round = std::mem::take(&mut self.this_round);
    }
}

/// The path of the cgroup above this one; empty at the top.
fn above(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(above, _)| above)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One process in another cgroup, as in each container with systemd, and nobody was credited
    /// any more with what was opened there.
    #[test]
    fn a_mount_is_of_the_lowest_cgroup_above_its_processes() {
        let mut openers = Openers::default();
        openers.learn(1, "/pods/one/init.scope");
        assert_eq!(openers.of_mount(1), Some("/pods/one/init.scope"));
        openers.learn(1, "/pods/one/system.slice/web");
        openers.learn(1, "/pods/one/system.slice");
        assert_eq!(openers.of_mount(1), Some("/pods/one"));
        openers.learn(2, "/pods/one-more");
        openers.learn(2, "/pods/one");
        assert_eq!(openers.of_mount(2), Some("/pods"));
        openers.learn(2, "/session");
        openers.learn(3, "/");
        openers.learn(3, "/session");
        assert_eq!((openers.of_mount(2), openers.of_mount(3)), (None, None));
        // Long ago somebody was there for a moment.
        openers.round_is_complete();
        openers.learn(1, "/pods/one/init.scope");
        assert_eq!(openers.of_mount(1), Some("/pods/one/init.scope"));
        assert_eq!(openers.of_mount(2), None);
        openers.round_is_complete();
        openers.learn(2, "/pods/one");
        assert_eq!(openers.of_mount(1), Some("/pods/one/init.scope"));
        assert_eq!(openers.of_mount(2), Some("/pods/one"));
        openers.round_is_complete();
        assert_eq!(openers.of_mount(1), None);
        let long = ["/pods".to_owned(), format!("/{}", "x".repeat(300)).repeat(10)].concat();
        openers.learn(4, &long);
        assert!(openers.of_mount(4).is_some_and(|path| long.starts_with(path)));
        assert!(openers.of_mount(4).is_some_and(|path| path.len() <= PATH_MAX));
    }
}
