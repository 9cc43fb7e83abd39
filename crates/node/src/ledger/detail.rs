//! What lies behind an account: the files of an image, the users of an object, what images share.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use cofolio_image::pack::ImageContents;
use cofolio_store::{Contents as _, Digest};
use serde::{Deserialize, Serialize};

use super::state::{State, TICKS_PER_SECOND};
use super::usage::ObjectId;
use super::{LedgerError, Result};
use crate::cache::leave_cache;

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Its path in the image. Bytes that are not UTF-8 are replaced.
    pub path: String,
    /// The object with its content.
    pub object: Digest,
    /// Its size.
    pub bytes: u64,
    /// What of it is resident.
    pub resident_bytes: u64,
    /// Cgroups that use the object, through any image.
    pub users: u64,
}

/// An order of the files of an image: by path, or the largest first and equal ones by path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileOrder {
    /// By path.
    Path,
    /// By size.
    Size,
    /// By what is resident.
    Resident,
}

/// The first files of an image in some order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFiles {
    /// Files of the image.
    pub total: u64,
    /// The first of them: as many as were asked for, or as have paths of 16 MiB together.
    pub files: Vec<ImageFile>,
}

/// Who uses an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectUser {
    /// Path of its memory cgroup.
    pub cgroup: String,
    /// Its name, if `cofolio run` started it.
    pub name: Option<String>,
    /// The image through which it uses the object.
    pub image: Digest,
    /// How long ago it was seen to map or open it.
    pub seconds_ago: u32,
}

/// What images have in common of what is resident.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentSharing {
    /// The images, those with most resident first.
    pub images: Vec<SharingImage>,
    /// Row and column by image: resident bytes of the objects that both name. The diagonal is all
    /// that is resident of the image.
    pub bytes: Vec<Vec<u64>>,
}

/// An image in [`ResidentSharing`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingImage {
    /// Digest of its metadata image.
    pub image: Digest,
    /// What it is called, sorted.
    pub names: Vec<String>,
}

/// What a file is sorted by: the largest figure first, then its path.
type Entry = (Reverse<u64>, Box<[u8]>, ObjectId);

/// Bytes of the paths of a list of files, as JSON has them: an image can have any number of paths,
/// of 4 KiB each.
const PATHS_MAX: usize = 16 << 20;

/// The first entries of those that are added.
struct First {
    max: usize,
    total: u64,
    /// Bytes of their paths.
    bytes: usize,
    entries: BinaryHeap<Entry>,
    /// The first one for which there was no room: none behind it is among the first.
    end: Option<Entry>,
}

impl First {
    fn new(max: usize) -> Self {
        Self { max, total: 0, bytes: 0, entries: BinaryHeap::new(), end: None }
    }

    fn add(&mut self, entry: Entry) {
        self.total += 1;
        if self.end.as_ref().is_some_and(|end| entry >= *end) {
            return;
        }
        self.bytes += json_bytes(&entry.1);
        self.entries.push(entry);
        while self.entries.len() > self.max || self.bytes > PATHS_MAX {
            let Some(last) = self.entries.pop() else { break };
            self.bytes -= json_bytes(&last.1);
            self.end = Some(last);
        }
    }
}

/// At most so many bytes JSON has for a path: it has six for a control character, and three for a
/// byte that is not UTF-8.
fn json_bytes(path: &[u8]) -> usize {
    path.iter()
        .map(|byte| if byte.is_ascii_control() { 6 } else { 3 - 2 * usize::from(byte.is_ascii()) })
        .sum()
}

impl State {
    /// See [`Ledger::files`](super::Ledger::files).
    pub(super) fn files(
        &self,
        domain: &str,
        image: &Digest,
        order: FileOrder,
        max: usize,
    ) -> Result<Option<ImageFiles>> {
        let Some(number) = self.index.find_domain(domain)? else { return Ok(None) };
        let known = &self.index.domains()[number as usize];
        if !self.index.has_image(number, image)? {
            return Ok(None);
        }
        let file = known.domain.open_image(image)?;
        let mut first = First::new(max);
        let read = leave_cache(&file, || {
            ImageContents.image_paths(&file, &|_| true, &mut |object, path| {
                let Some(id) = self.index.find(number, &object) else { return };
                let Some(known) = self.index.object(id) else { return };
                let bytes = match order {
                    FileOrder::Path => 0,
                    FileOrder::Size => known.size,
                    FileOrder::Resident => known.resident_bytes(),
                };
                first.add((Reverse(bytes), path.into(), id));
            })
        });
        read.map_err(|source| {
            LedgerError::Store(cofolio_store::Error::Unreadable {
                what: format!("image {image}"),
                source,
            })
        })?;
        let users = self.users_by_object();
        let of_entry = |(_, path, id): Entry| {
            let known = self.index.object(id)?;
            Some(ImageFile {
                path: String::from_utf8_lossy(&path).into_owned(),
                object: known.digest,
                bytes: known.size,
                resident_bytes: known.resident_bytes(),
                users: users.get(&id).copied().unwrap_or(0),
            })
        };
        let files = first.entries.into_sorted_vec().into_iter().filter_map(of_entry).collect();
        Ok(Some(ImageFiles { total: first.total, files }))
    }

    /// How many cgroups use each object that is resident.
    fn users_by_object(&self) -> HashMap<ObjectId, u64> {
        let mut pairs = Vec::new();
        self.for_each_use(|usage| pairs.push((usage.object, usage.cgroup)));
        pairs.sort_unstable();
        pairs.dedup();
        let mut users = HashMap::new();
        pairs.into_iter().for_each(|(object, _)| *users.entry(object).or_default() += 1);
        users
    }

    /// See [`Ledger::sizes`](super::Ledger::sizes).
    pub(super) fn sizes(&self, domain: &str, object: &Digest) -> Option<(u64, u64)> {
        let id = self.index.find(self.index.domain_number(domain)?, object)?;
        self.index.object(id).map(|object| (object.size, object.resident_bytes()))
    }

    /// See [`Ledger::users`](super::Ledger::users).
    pub(super) fn users(&self, domain: &str, object: &Digest) -> Option<Vec<ObjectUser>> {
        let id = self.index.find(self.index.domain_number(domain)?, object)?;
        let now = self.now();
        let mut users: BTreeMap<(String, Digest), u32> = BTreeMap::new();
        self.for_each_use(|usage| {
            if usage.object != id {
                return;
            }
            let image = self.superblocks.get(usage.mount).map(|it| it.image);
            let cgroup = self.cgroups.path(usage.cgroup);
            if let (Some(image), Some(cgroup)) = (image, cgroup) {
                let last = users.entry((cgroup.to_owned(), image)).or_default();
                *last = usage.time.max(*last);
            }
        });
        let user = |((cgroup, image), last): ((String, Digest), u32)| ObjectUser {
            name: self.name_of(&cgroup),
            cgroup,
            image,
            seconds_ago: now.saturating_sub(last) / TICKS_PER_SECOND,
        };
        Some(users.into_iter().map(user).collect())
    }

    /// See [`Ledger::sharing`](super::Ledger::sharing).
    pub(super) fn sharing(&self, domain: &str, max: usize) -> Option<ResidentSharing> {
        let domain = &self.index.domains()[self.index.domain_number(domain)? as usize];
        let resident = |id: &ObjectId| self.index.object(*id).map_or(0, |it| it.resident_bytes());
        let mut images: Vec<_> = domain
            .images
            .iter()
            .map(|(digest, image)| (image.objects.iter().map(resident).sum::<u64>(), digest, image))
            .collect();
        images.sort_by_key(|(bytes, digest, _)| (Reverse(*bytes), *digest));
        images.truncate(max);
        let mut named: HashMap<ObjectId, Vec<usize>> = HashMap::new();
        for (number, (_, _, image)) in images.iter().enumerate() {
            for id in image.objects.iter().filter(|id| resident(id) > 0) {
                named.entry(*id).or_default().push(number);
            }
        }
        let mut bytes = vec![vec![0; images.len()]; images.len()];
        for (id, images) in &named {
            for a in images {
                images.iter().for_each(|b| bytes[*a][*b] += resident(id));
            }
        }
        let images = images.into_iter().map(|(_, image, _)| SharingImage {
            image: *image,
            names: domain.names(image).to_vec(),
        });
        Some(ResidentSharing { images: images.collect(), bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All paths of an image were collected before the first ones were taken: 200,000 hard links in
    /// a directory with a name of 4,000 bytes were 800 MB.
    #[test]
    fn a_list_of_files_has_a_bound() {
        let paths = |first: First| -> Vec<_> {
            let sorted = first.entries.into_sorted_vec().into_iter();
            sorted.map(|(_, path, _)| String::from_utf8(path.into()).unwrap()).collect()
        };
        let mut first = First::new(3);
        for (bytes, path) in [(1, "d"), (7, "c"), (1, "b"), (9, "x"), (7, "a")] {
            first.add((Reverse(bytes), path.as_bytes().into(), ObjectId(0)));
        }
        assert_eq!(first.total, 5);
        assert_eq!(paths(first), ["x", "a", "c"]);

        let mut first = First::new(usize::MAX);
        let long = "a".repeat(4000);
        for number in 0..6000 {
            let path = format!("{long}{:04}", (number * 7) % 6000);
            first.add((Reverse(0), path.as_bytes().into(), ObjectId(number)));
            assert!(first.bytes <= PATHS_MAX);
        }
        assert_eq!(first.total, 6000);
        // A short one behind those that have no room is not among the first.
        first.add((Reverse(0), b"b".as_slice().into(), ObjectId(6000)));
        let paths = paths(first);
        assert_eq!(paths.len(), PATHS_MAX / 4004);
        assert!(paths.iter().enumerate().all(|(at, path)| path.ends_with(&format!("a{at:04}"))));

        let mut first = First::new(usize::MAX);
        (0..6000).for_each(|_| first.add((Reverse(0), vec![1; 1000].into(), ObjectId(0))));
        assert_eq!(first.entries.len(), PATHS_MAX / 6000);
    }
}
