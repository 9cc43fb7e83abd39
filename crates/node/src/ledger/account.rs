//! What the ledger says: accounts of trust domains, images and containers, added up from the usage
//! lists and from what is resident.
//!
//! A container *uses* an object if it mapped or opened it since the object was last seen without a
//! resident page. Once its cgroup is removed it uses nothing, whatever stays resident of what it
//! used. A cgroup below that of a container is a user of its own: the kernel does not say whether a
//! cgroup is a container, a pod or a part of one. From the users of each object follow, in bytes of
//! resident pages `r`:
//!
//! | figure | of an object that is used by `c` containers, through `i` images |
//! |---|---|
//! | shared | `r` if `c > 1`, of an image: if another image names the object |
//! | private | `r` if `c = 1`, of an image: if no other image names it |
//! | proportional | `r / c` |
//! | commons | what of `r` is charged to the commons cgroup |
//! | saved | `r (i - 1)`: what the page cache would hold more if each image had its own copy |
//!
//! Containers of one image share its files with other engines too. So what counts as saved is what
//! different images share, and not what their containers do.

use std::collections::{BTreeMap, HashSet};

use cofolio_store::Digest;
use serde::{Deserialize, Serialize};

use super::charges::CommonsAccount;

/// The accounts at one moment. Sizes are bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// When they were added up, in seconds since 1970.
    pub time: i64,
    /// Seconds since the last complete round over all objects began. No figure is older, but for the
    /// zero of an object that only idle images have: up to an hour.
    pub residency_age_seconds: u32,
    /// The same of the last complete round over all processes.
    pub processes_age_seconds: u32,
    /// The whole machine.
    pub machine: Machine,
    /// The commons cgroup, if it exists.
    #[serde(default)]
    pub commons: Option<CommonsAccount>,
    /// Trust domains, by name.
    pub domains: Vec<DomainAccount>,
    /// Images that are named or mounted, by trust domain and digest.
    pub images: Vec<ImageAccount>,
    /// Cgroups whose processes used an image, by path.
    pub containers: Vec<ContainerAccount>,
    /// What could not be attributed.
    pub unknown: Unknown,
    /// Why objects and processes are among [`unknown`](Self::unknown): the first 16 reasons of
    /// each. And why new mounts are not seen at once.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The machine's page cache, from `/proc/meminfo`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Memory (`MemTotal`).
    pub memory_bytes: u64,
    /// What programs could still get (`MemAvailable`).
    pub available_bytes: u64,
    /// Page cache of files, shared memory included (`Cached`).
    pub page_cache_bytes: u64,
    /// Shared memory and tmpfs (`Shmem`).
    pub shared_memory_bytes: u64,
}

/// Uses that no account has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unknown {
    /// Files that were opened by a process that had ended when its event was read, or whose cgroup
    /// could not be told.
    pub openers: u64,
    /// Times that the queue of events was full, or that the ledger had no time for it. Each may stand
    /// for any number of opened files.
    pub overflows: u64,
    /// Processes that could not be read, or not in whole, or whose uses could not all be noted, of
    /// the last complete round.
    pub processes: u64,
    /// Images that cannot be read, and directories of images, refs or trust domains that cannot be
    /// listed.
    pub images: u64,
    /// Objects that could not be looked at in the last round, files of metadata images and packs
    /// ([`metadata_bytes`](DomainAccount::metadata_bytes)), and trust domains whose images could not be
    /// listed. Their figures are older; a missing object has no resident bytes.
    pub objects: u64,
    /// Opened files that could not be looked at, or be noted.
    pub files: u64,
    /// Mounts that the last refresh could not look at, or whose opened files are not seen.
    pub mounts: u64,
}

/// One trust domain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainAccount {
    /// Its name.
    pub domain: String,
    /// Objects that images name.
    pub objects: u64,
    /// Their size.
    pub bytes: u64,
    /// What of it is resident.
    pub resident_bytes: u64,
    /// What of that is charged to the commons; `None` where the kernel does not say.
    #[serde(default)]
    pub commons_bytes: Option<u64>,
    /// What of `resident_bytes` is used.
    pub used_bytes: u64,
    /// What of that more than one container uses.
    pub shared_bytes: u64,
    /// What the page cache would hold more if each image had its own copy.
    pub saved_bytes: u64,
    /// Resident pages of the files that images are mounted from: metadata images, with those of
    /// deltas and bases, and packs.
    pub metadata_bytes: u64,
}

/// One image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageAccount {
    /// Its trust domain.
    pub domain: String,
    /// Digest of its metadata image.
    pub image: Digest,
    /// What it is called, sorted.
    pub names: Vec<String>,
    /// Objects that it names.
    pub objects: u64,
    /// Their size.
    pub bytes: u64,
    /// What of it is resident.
    pub resident_bytes: u64,
    /// What of that another image names as well.
    pub shared_bytes: u64,
    /// What of it no other image names.
    pub private_bytes: u64,
    /// What of it was used through this image.
    pub used_bytes: u64,
    /// What of `resident_bytes` is charged to the commons; `None` where the kernel does not say.
    #[serde(default)]
    pub commons_bytes: Option<u64>,
    /// Its part of what is saved: `1 / i` of each object that it was used through.
    pub saved_bytes: u64,
    /// Resident pages of its metadata image, its delta and its pack. Those of its base are an
    /// image's of their own, or if that has no name, only the domain's.
    pub metadata_bytes: u64,
    /// Containers that used it.
    pub containers: u64,
}

/// One container: a memory cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerAccount {
    /// Path of its memory cgroup from the root of the hierarchy.
    pub cgroup: String,
    /// Name of the container of `cofolio run` whose cgroup it is, or is below.
    pub name: Option<String>,
    /// The images that it used objects of, with their trust domains.
    pub images: Vec<UsedImage>,
    /// Objects that it used.
    pub objects: u64,
    /// What of them is resident.
    pub used_bytes: u64,
    /// What of that other containers use as well.
    pub shared_bytes: u64,
    /// What of it no other container uses.
    pub private_bytes: u64,
    /// What of `used_bytes` is charged to the commons; `None` where the kernel does not say.
    #[serde(default)]
    pub commons_bytes: Option<u64>,
    /// Each object divided by the number of its users.
    pub proportional_bytes: u64,
    /// Its part of what is saved.
    pub saved_bytes: u64,
}

/// An image that a container used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UsedImage {
    /// Its trust domain.
    pub domain: String,
    /// Digest of its metadata image.
    pub image: Digest,
}

/// One use, as the usage lists have it. The fields are numbers of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Use {
    pub(super) object: u32,
    pub(super) cgroup: u32,
    pub(super) image: u32,
}

/// What a container, or a trust domain, adds up to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    pub(super) objects: u64,
    pub(super) used: u64,
    pub(super) shared: u64,
    pub(super) private: u64,
    pub(super) commons: u64,
    pub(super) proportional: f64,
    pub(super) saved: f64,
}

/// What is used through an image.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ImageSums {
    pub(super) used: u64,
    pub(super) saved: f64,
}

/// What is resident of an object.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Resident {
    pub(super) bytes: u64,
    /// What of that is charged to the commons.
    pub(super) commons: u64,
    /// Number of the object's trust domain.
    pub(super) domain: u16,
}

/// What all uses add up to.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) cgroups: BTreeMap<u32, Sums>,
    /// By number of the image.
    pub(super) images: BTreeMap<u32, ImageSums>,
    /// By number of the trust domain.
    pub(super) domains: BTreeMap<u16, Sums>,
    /// Pairs of cgroup and image.
    pub(super) pairs: Vec<(u32, u32)>,
}

/// Adds up uses. `object` says what is resident of one.
pub(super) fn add_up(mut uses: Vec<Use>, object: impl Fn(u32) -> Resident) -> Totals {
    uses.sort_unstable();
    uses.dedup();
    let mut totals = Totals::default();
    let mut pairs = HashSet::new();
    for of_object in uses.chunk_by(|a, b| a.object == b.object) {
        let Resident { bytes, commons, domain } = object(of_object[0].object);
        let mut cgroups: Vec<u32> = of_object.iter().map(|it| it.cgroup).collect();
        cgroups.dedup();
        let mut images: Vec<u32> = of_object.iter().map(|it| it.image).collect();
        images.sort_unstable();
        images.dedup();
        pairs.extend(of_object.iter().map(|it| (it.cgroup, it.image)));
        let saved = bytes * (images.len() as u64 - 1);
        let whole = Sums {
            objects: 1,
            used: bytes,
            shared: if cgroups.len() > 1 { bytes } else { 0 },
            private: if cgroups.len() > 1 { 0 } else { bytes },
            commons,
            proportional: portion(bytes, cgroups.len()),
            saved: 0.0,
        };
        for cgroup in &cgroups {
            let saved = portion(saved, cgroups.len());
            totals.cgroups.entry(*cgroup).or_default().add(&Sums { saved, ..whole });
        }
        for image in &images {
            let sums = totals.images.entry(*image).or_default();
            sums.used += bytes;
            sums.saved += portion(saved, images.len());
        }
        let saved = portion(saved, 1);
        totals.domains.entry(domain).or_default().add(&Sums { saved, ..whole });
    }
    totals.pairs = pairs.into_iter().collect();
    totals.pairs.sort_unstable();
    totals
}

/// Exact below 2^53 bytes.
#[allow(clippy::cast_precision_loss, reason = "8 PiB of page cache")]
fn portion(bytes: u64, of: usize) -> f64 {
    bytes as f64 / of as f64
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.objects += other.objects;
        self.used += other.used;
        self.shared += other.shared;
        self.private += other.private;
        self.commons += other.commons;
        self.proportional += other.proportional;
        self.saved += other.saved;
    }
}

/// Whole bytes.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sums of sizes")]
pub(super) fn whole(bytes: f64) -> u64 {
    bytes.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(of: &[(u32, u32, u32)]) -> Vec<Use> {
        of.iter().map(|&(object, cgroup, image)| Use { object, cgroup, image }).collect()
    }

    /// Two images of one container share an object of 100 bytes, and each has one alone.
    #[test]
    fn saved_is_what_images_share_and_not_containers() {
        let size = |object| match object {
            1 => Resident { bytes: 100, commons: 60, domain: 0 },
            _ => Resident { bytes: 7, commons: 0, domain: 0 },
        };
        let two_images = uses(&[(1, 1, 1), (1, 2, 2), (2, 1, 1), (3, 2, 2)]);
        let totals = add_up(two_images, size);
        assert!((totals.domains[&0].saved - 100.0).abs() < 1e-9);
        assert_eq!((totals.domains[&0].used, totals.domains[&0].shared), (114, 100));
        let one = totals.cgroups[&1];
        assert_eq!((one.used, one.shared, one.private, one.commons), (107, 100, 7, 60));
        assert!((one.proportional - 57.0).abs() < 1e-9 && (one.saved - 50.0).abs() < 1e-9);
        assert_eq!(totals.pairs, [(1, 1), (2, 2)]);

        let one_image = uses(&[(1, 1, 1), (1, 2, 1), (1, 2, 1)]);
        let totals = add_up(one_image, size);
        assert_eq!((totals.domains[&0].shared, totals.domains[&0].used), (100, 100));
        assert!(totals.domains[&0].saved.abs() < 1e-9);
    }

    /// The parts of containers, and those of images, add up to the whole.
    #[test]
    fn parts_add_up() {
        let mut of = Vec::new();
        for object in 0..200_u32 {
            for user in 0..object % 7 {
                of.push((object, user * 3 % 5, user % 4));
            }
        }
        let size =
            |object: u32| Resident { bytes: u64::from(object) * 4096, ..Resident::default() };
        let totals = add_up(uses(&of), size);
        let whole = totals.domains[&0];
        let of_cgroups = |of: fn(&Sums) -> f64| totals.cgroups.values().map(of).sum::<f64>();
        let of_images = totals.images.values().map(|it| it.saved).sum::<f64>();
        assert!((of_cgroups(|it| it.saved) - whole.saved).abs() < 1.0);
        assert!((of_images - whole.saved).abs() < 1.0);
        let proportional = of_cgroups(|it| it.proportional);
        assert!((proportional - portion(whole.used, 1)).abs() < 1.0);
    }
}
