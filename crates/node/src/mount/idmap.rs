//! Id maps: which owner in the image appears as which on the host.

use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use cofolio_sys::userns::{ID_RANGES_MAX, IdRange, with_maps};
use serde::{Deserialize, Serialize};

use super::error::MountError;
use super::kernel::KernelError;

/// Maps ids of the image to ids in the mount, for users and for groups.
///
/// As text, ranges `INSIDE:OUTSIDE:COUNT` joined by commas: `0:100000:65536`. The prefix `u:` or
/// `g:` limits a range to users or groups, as in mount(8)'s `X-mount.idmap`. Ids outside of all
/// ranges appear as the overflow id (65534) and cannot be given to new files.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IdMap {
    uids: Vec<IdRange>,
    gids: Vec<IdRange>,
}

impl IdMap {
    /// A map from ranges; both lists need at least one, and none may overlap.
    ///
    /// # Errors
    /// [`MountError::IdMap`].
    pub fn new(uids: Vec<IdRange>, gids: Vec<IdRange>) -> Result<Self, MountError> {
        let map = Self { uids, gids };
        for (ranges, what) in [(&map.uids, "users"), (&map.gids, "groups")] {
            if let Some(problem) = problem_of(ranges, what) {
                return Err(MountError::IdMap { text: map.to_string(), problem });
            }
        }
        Ok(map)
    }

    /// Ranges of users.
    pub fn uids(&self) -> &[IdRange] {
        &self.uids
    }

    /// Ranges of groups.
    pub fn gids(&self) -> &[IdRange] {
        &self.gids
    }

    /// The id on the host of user 0 of the image, and of group 0; `None` where it has none.
    pub fn root(&self) -> Option<(u32, u32)> {
        let zero = |ranges: &[IdRange]| ranges.iter().find(|r| r.inside == 0).map(|r| r.outside);
        Some((zero(&self.uids)?, zero(&self.gids)?))
    }

    /// The map as the kernel takes it: a user namespace.
    pub(crate) fn namespace(&self) -> Result<OwnedFd, KernelError> {
        with_maps(&self.uids, &self.gids)
            .map_err(|error| KernelError::from_io("user namespace for the id map", &error))
    }
}

fn problem_of(ranges: &[IdRange], what: &str) -> Option<String> {
    if ranges.is_empty() {
        return Some(format!("no range for {what}"));
    }
    if ranges.len() > ID_RANGES_MAX {
        return Some(format!("more than {ID_RANGES_MAX} ranges for {what}"));
    }
    for (index, range) in ranges.iter().enumerate() {
        // The last id of all, 2^32 - 1, means "none" to the kernel.
        let end = |first: u32| u64::from(first) + u64::from(range.count);
        if range.count == 0 || end(range.inside).max(end(range.outside)) > u64::from(u32::MAX) {
            return Some(format!("{range:?} has no ids, or ids past 2^32 - 2"));
        }
        let overlap = |a: u32, a_count: u32, b: u32, b_count: u32| {
            u64::from(a) < u64::from(b) + u64::from(b_count)
                && u64::from(b) < u64::from(a) + u64::from(a_count)
        };
        for other in &ranges[..index] {
            if overlap(range.inside, range.count, other.inside, other.count)
                || overlap(range.outside, range.count, other.outside, other.count)
            {
                return Some(format!("ranges for {what} overlap"));
            }
        }
    }
    None
}

impl FromStr for IdMap {
    type Err = MountError;

    fn from_str(text: &str) -> Result<Self, MountError> {
        // Longer text cannot be valid and is refused before allocating.
        const TEXT_MAX: usize = 2 * ID_RANGES_MAX * "u:4294967295:4294967295:4294967295,".len();
        let bad = |problem: &str| MountError::IdMap {
            text: text.chars().take(120).collect(),
            problem: problem.to_owned(),
        };
        if text.len() > TEXT_MAX {
            return Err(bad("too long"));
        }
        let (mut uids, mut gids) = (Vec::new(), Vec::new());
        for part in text.split(',') {
            let (users, groups, range) = match part.split_once(':') {
                Some(("u", range)) => (true, false, range),
                Some(("g", range)) => (false, true, range),
                Some(("b", range)) => (true, true, range),
                _ => (true, true, part),
            };
            let numbers: Result<Vec<u32>, _> = range.split(':').map(str::parse).collect();
            let Ok(&[inside, outside, count]) = numbers.as_deref() else {
                return Err(bad("expected INSIDE:OUTSIDE:COUNT, three numbers"));
            };
            let range = IdRange { inside, outside, count };
            if users {
                uids.push(range);
            }
            if groups {
                gids.push(range);
            }
        }
        Self::new(uids, gids)
    }
}

impl fmt::Display for IdMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut write = |prefix: &str, range: &IdRange| {
            write!(f, "{separator}{prefix}{}:{}:{}", range.inside, range.outside, range.count)?;
            separator = ",";
            Ok(())
        };
        if self.uids == self.gids {
            return self.uids.iter().try_for_each(|range| write("", range));
        }
        self.uids.iter().try_for_each(|range| write("u:", range))?;
        self.gids.iter().try_for_each(|range| write("g:", range))
    }
}

impl From<IdMap> for String {
    fn from(map: IdMap) -> Self {
        map.to_string()
    }
}

impl TryFrom<String> for IdMap {
    type Error = MountError;

    fn try_from(text: String) -> Result<Self, MountError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        for text in ["0:100000:65536", "0:1:1,5:7:2", "u:0:1000:1,g:0:2000:1,g:1:5000:9"] {
            assert_eq!(text.parse::<IdMap>().unwrap().to_string(), text);
        }
        let both = "b:0:1:1".parse::<IdMap>().unwrap();
        assert_eq!(both, "u:0:1:1,g:0:1:1".parse().unwrap());
    }

    #[test]
    fn refuses_what_the_kernel_would() {
        for text in [
            "",
            "0",
            "0:1",
            "0:1:2:3",
            "x:0:1:2",
            "0:1:0",
            "-1:0:1",
            "0:0:4294967296",
            "0:4294967295:1",
            "0:0:10,5:100:1",
            "0:0:10,100:5:1",
            "u:0:0:1",
            "g:0:0:1",
            ",",
        ] {
            let error = text.parse::<IdMap>().expect_err(text);
            assert!(matches!(error, MountError::IdMap { .. }), "{text}: {error}");
        }
        let many = vec!["0:0:1"; ID_RANGES_MAX * 4].join(",");
        assert!(many.parse::<IdMap>().is_err());
    }
}
