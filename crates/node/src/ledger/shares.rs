//! Fair shares of what the ledger may keep about cgroups.
//!
//! A container may be allowed to make any number of cgroups. If these could take all memory that
//! the ledger has for its lists, no use by other containers would be noted. So once a limit is half
//! used, a cgroup and all below it may hold three quarters of what the cgroup above it may hold:
//!
//! ```text
//! /                       the limit
//! /kubepods               3/4
//! /kubepods/pod1          9/16     leaves 3/16 for other pods
//! /kubepods/pod1/main     27/64
//! ```

use std::collections::HashMap;

/// Levels that [`from_the_top`] gives: a path can have thousands.
const DEPTH_MAX: usize = 8;

/// Bytes that each cgroup holds with all below it.
#[derive(Debug, Default)]
pub(super) struct Shares {
    held: HashMap<Box<str>, u64>,
}

impl Shares {
    /// Adds what a cgroup itself holds.
    pub(super) fn add(&mut self, path: &str, bytes: u64) {
        for top in from_the_top(path) {
            match self.held.get_mut(top) {
                Some(held) => *held += bytes,
                None => _ = self.held.insert(top.into(), bytes),
            }
        }
    }

    /// Whether a cgroup may hold more of a limit.
    pub(super) fn have_room(&self, path: &str, bytes_max: u64) -> bool {
        let mut share = bytes_max;
        from_the_top(path).all(|top| {
            share -= share / 4;
            self.held.get(top).is_none_or(|held| *held < share)
        })
    }
}

impl<'p> FromIterator<(&'p str, u64)> for Shares {
    fn from_iter<I: IntoIterator<Item = (&'p str, u64)>>(holders: I) -> Self {
        let mut shares = Self::default();
        holders.into_iter().for_each(|(path, bytes)| shares.add(path, bytes));
        shares
    }
}

/// `/a` and `/a/b`, without the root of the hierarchy: the eight topmost cgroups on the way to one.
/// Those further below have no share of their own.
pub(super) fn from_the_top(path: &str) -> impl Iterator<Item = &str> {
    let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
    ends.map(|end| &path[..end]).filter(|it| it.len() > 1).take(DEPTH_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_from_the_top() {
        assert_eq!(from_the_top("/a/b").collect::<Vec<_>>(), ["/a", "/a/b"]);
        assert_eq!(from_the_top("/").count(), 0);
    }

    #[test]
    fn a_cgroup_holds_a_part_of_what_the_one_above_it_may() {
        let shares: Shares = [("/a/x/1", 500), ("/a/x/2", 62), ("/a", 37)].into_iter().collect();
        let have_room = |path| shares.have_room(path, 1000);
        assert!(have_room("/a/x") && have_room("/a/x/3") && have_room("/a/y"));
        let full = |path, bytes| {
            let mut shares = Shares::default();
            shares.add(path, bytes);
            ["/", "/b", "/a", "/a/y", "/a/x", "/a/x/3"].map(|it| !shares.have_room(it, 1000))
        };
        assert_eq!(full("/a/x/1", 562), [false, false, false, false, false, false]);
        // The shares are 750, 563 and 423.
        assert_eq!(full("/a/x/1", 563), [false, false, false, false, true, true]);
        assert_eq!(full("/a/x/1", 750), [false, false, true, true, true, true]);
        // A path can have thousands of levels.
        let deep = "/x".repeat(2000);
        let shares: Shares = [(deep.as_str(), 1)].into_iter().collect();
        assert_eq!(shares.held.len(), DEPTH_MAX);
    }
}
