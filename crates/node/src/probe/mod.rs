//! What this kernel, the store's filesystem and this machine offer, found out by trying.
//!
//! Version numbers say little: distributions backport, and builds leave things out. Mount features
//! are tried on a detached mount of a 4 KiB image, filesystem features on a scratch file beside the
//! store; the rest is read from `/proc` and `/sys` below a root path. Nothing is left behind.

mod tries;

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use tries::Tried;

/// Whether a feature is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Presence {
    /// It works here.
    Present,
    /// It does not.
    Absent,
    /// It could not be tried; the detail says why.
    Unknown,
}

/// How much Cofolio needs a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Need {
    /// Nothing can be mounted without it.
    Required,
    /// Something works less well without it.
    Recommended,
    /// Only a special use needs it.
    Optional,
}

/// One thing that was looked for.
#[derive(Debug, Clone, Serialize)]
pub struct Feature {
    /// Short name, stable, for scripts.
    pub name: &'static str,
    /// Whether it is there.
    pub presence: Presence,
    /// What was found, in a few words.
    pub detail: String,
    /// How much it is needed.
    pub need: Need,
    /// What it is used for.
    pub used_for: &'static str,
    /// What is worse where it is absent, and what can be done.
    pub without: &'static str,
}

/// Everything that was looked for.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// `/proc/sys/kernel/osrelease`, empty if unreadable.
    pub kernel: String,
    /// In the order in which they matter.
    pub features: Vec<Feature>,
}

impl Report {
    /// The feature with this name.
    pub fn get(&self, name: &str) -> Option<&Feature> {
        self.features.iter().find(|feature| feature.name == name)
    }

    /// Whether nothing is absent that a mount needs.
    pub fn can_mount(&self) -> bool {
        !self.features.iter().any(|f| f.need == Need::Required && f.presence == Presence::Absent)
    }
}

/// Where to look.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where `/proc`, `/sys` and `/dev` are. Only for `/` is anything tried on the running kernel.
    pub root: PathBuf,
    /// A directory on the store's filesystem in which a scratch directory may be made.
    pub store: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { root: PathBuf::from("/"), store: None }
    }
}

/// A result before its description is added.
type Found = (Presence, String);

fn present(detail: impl Into<String>) -> Found {
    (Presence::Present, detail.into())
}

fn absent(detail: impl Into<String>) -> Found {
    (Presence::Absent, detail.into())
}

fn unknown(detail: impl Into<String>) -> Found {
    (Presence::Unknown, detail.into())
}

/// Name, need, use and lack of each [`Feature`], in the order in which they matter.
const FEATURES: [(&str, Need, &str, &str); 20] = {
    use Need::{Optional, Recommended, Required};
    [
        (
            "privilege",
            Required,
            "mounting",
            "run as root (CAP_SYS_ADMIN in the first user namespace)",
        ),
        ("erofs", Required, "metadata images", "load or build the erofs module (CONFIG_EROFS_FS)"),
        (
            "erofs-xattr",
            Required,
            "metadata images name their objects in extended attributes",
            "needs a kernel with CONFIG_EROFS_FS_XATTR",
        ),
        (
            "overlay",
            Required,
            "joining metadata images with objects, and writable layers",
            "load or build the overlay module (CONFIG_OVERLAY_FS)",
        ),
        (
            "overlay-data-only",
            Required,
            "the objects directory as a data-only lower layer",
            "needs Linux 6.5",
        ),
        (
            "erofs-file-backed",
            Recommended,
            "mounting a metadata image without a loop device",
            "a loop device with direct I/O is used per image (Linux 6.12 or \
             CONFIG_EROFS_FS_BACKED_BY_FILE does without; a store on tmpfs or overlayfs never can)",
        ),
        (
            "loop",
            Optional,
            "metadata images where file-backed mounts do not work",
            "nothing, as long as file-backed mounts work",
        ),
        (
            "overlay-layers-by-descriptor",
            Recommended,
            "layers that no renamed path can swap",
            "layers are given through /proc/self/fd instead; mountinfo is less telling (Linux 6.13)",
        ),
        (
            "id-mapped-mounts",
            Recommended,
            "`mount --idmap`: one image for many user namespaces",
            "containers in user namespaces need images with shifted owners (Linux 6.15, user namespaces)",
        ),
        (
            "fs-verity",
            Recommended,
            "the kernel checks every byte read from the store",
            "altered objects are noticed by `verify` and `mount --verify` only; on ext4 and btrfs: \
             `tune2fs -O verity` (ext4), CONFIG_FS_VERITY",
        ),
        (
            "overlay-verity",
            Recommended,
            "`verity=require` on mounts of a store with fs-verity",
            "the kernel does not check that an object is the one that the image names (Linux 6.6)",
        ),
        (
            "immutable",
            Recommended,
            "objects that nobody changes by accident",
            "objects are protected by their mode alone",
        ),
        (
            "reflink",
            Optional,
            "sharing blocks between trust domains and with containers' copies",
            "copies take their own blocks",
        ),
        (
            "direct-io",
            Optional,
            "loop devices and packs that are not cached twice",
            "what goes through a loop device is cached twice",
        ),
        (
            "inode-share",
            Optional,
            "backend `inode-share`: less memory for directories and files (`cofolio backend`)",
            "backend `overlay` shares as much, and more kinds of read (Linux 7.0)",
        ),
        ("selinux", Optional, "`mount --context LABEL`", "security labels cannot be given"),
        ("cgroup", Recommended, "accounting per container", "no figures per container"),
        (
            "memory-controller",
            Recommended,
            "the commons, and figures per container",
            "memory is reported for the whole machine only",
        ),
        (
            "cachestat",
            Recommended,
            "residency of objects, cheaply",
            "residency is read through mappings (mincore), which is slower (Linux 6.5)",
        ),
        (
            "page-size",
            Recommended,
            "sharing in units of 4 KiB",
            "small files share in larger units; images keep their blocks of 4 KiB, which the kernel mounts on larger \
             pages from Linux 6.4 on (fs-verity: 6.3)",
        ),
    ]
};

/// Probes everything in some milliseconds; never fails, the unclear is [`Presence::Unknown`].
pub fn probe(options: &Options) -> Report {
    let root = options.root.as_path();
    let kernel = read(root, "proc/sys/kernel/osrelease").unwrap_or_default();
    let (mut tried, why) = match root == Path::new("/") {
        true => tries::all(options.store.as_deref()),
        false => (Tried::new(), "the machine's files are read from elsewhere".to_owned()),
    };
    let features = FEATURES.map(|(name, need, used_for, without)| {
        let mut tried = || tried.remove(name).unwrap_or_else(|| unknown(&*why));
        let (presence, detail) = match name {
            "privilege" => privilege(root),
            "erofs" | "overlay" => filesystem(root, name, tried()),
            "loop" if root.join("dev/loop-control").exists() => present("/dev/loop-control"),
            "loop" => absent("no /dev/loop-control"),
            "selinux" => selinux(root),
            "cgroup" => cgroup_version(root),
            "memory-controller" => memory_controller(root),
            "page-size" => page_size(root),
            _ => tried(),
        };
        Feature { name, presence, detail, need, used_for, without }
    });
    debug_assert!(tried.is_empty(), "no feature is called so: {tried:?}");
    Report { kernel, features: features.into() }
}

/// A line of text, without the newline. Bounded: these files are small.
fn read(root: &Path, path: &str) -> Option<String> {
    use std::io::Read as _;
    let mut text = String::new();
    fs::File::open(root.join(path)).ok()?.take(1 << 20).read_to_string(&mut text).ok()?;
    Some(text.trim_end().to_owned())
}

fn privilege(root: &Path) -> Found {
    const CAP_SYS_ADMIN: u64 = 21;
    let status = read(root, "proc/thread-self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    match effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()) {
        Some(mask) if mask >> CAP_SYS_ADMIN & 1 == 1 => present("CAP_SYS_ADMIN"),
        Some(_) => absent("no CAP_SYS_ADMIN"),
        None => unknown("no CapEff in /proc/thread-self/status"),
    }
}

/// Listed in `/proc/filesystems`, or loaded by trying.
fn filesystem(root: &Path, name: &str, tried: Found) -> Found {
    let list = read(root, "proc/filesystems").unwrap_or_default();
    if list.lines().any(|line| line.split_whitespace().next_back() == Some(name)) {
        present("in /proc/filesystems")
    } else if tried.0 == Presence::Unknown {
        absent("not in /proc/filesystems")
    } else {
        tried
    }
}

fn selinux(root: &Path) -> Found {
    match read(root, "sys/fs/selinux/enforce").as_deref() {
        Some("1") => present("enforcing"),
        Some(_) => present("permissive"),
        None => absent("no /sys/fs/selinux"),
    }
}

fn cgroup_version(root: &Path) -> Found {
    if root.join("sys/fs/cgroup/cgroup.controllers").exists() {
        present("version 2")
    } else if root.join("sys/fs/cgroup/memory").exists() {
        present("version 1")
    } else {
        absent("nothing at /sys/fs/cgroup")
    }
}

fn memory_controller(root: &Path) -> Found {
    if let Some(list) = read(root, "sys/fs/cgroup/cgroup.controllers") {
        return if list.split_whitespace().any(|name| name == "memory") {
            present("version 2")
        } else {
            absent("not among the controllers of /sys/fs/cgroup")
        };
    }
    if root.join("sys/fs/cgroup/memory/memory.usage_in_bytes").exists() {
        present("version 1")
    } else {
        absent("no memory controller under /sys/fs/cgroup")
    }
}

fn page_size(root: &Path) -> Found {
    if root != Path::new("/") {
        return unknown("of the running kernel only");
    }
    match cofolio_sys::cache::page_size() {
        4096 => present("4 KiB"),
        size => absent(format!("{} KiB", size / 1024)),
    }
}

#[cfg(test)]
mod tests;
