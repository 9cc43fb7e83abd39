//! Reading `/proc/PID/mountinfo` (proc(5)).

#[cfg(fuzzing)]
#[path = "../../../../fuzz/inside/mountinfo.rs"]
pub mod fuzz;

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use cofolio_store::Digest;
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use serde::Serialize;

use super::error::{At as _, MountError};
use crate::kernel_text::for_each_line;

/// What a task sees: the mounts of its namespace, and, since the kernel shows a chrooted task no
/// others, those below its root. Tasks with the same one see the same mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TaskRoot {
    namespace: u64,
    device: (u32, u32),
    inode: u64,
    mount: u64,
}

impl TaskRoot {
    /// Of the task with this directory in `/proc`. `None` for one that we may not trace, which is also
    /// what the kernel says of one that has just ended; mountinfo is open to all, and tells these
    /// apart.
    pub(crate) fn of(task: &Path) -> io::Result<Option<Self>> {
        let mask = StatxFlags::INO | StatxFlags::MNT_ID;
        // A FUSE server, which the task may have as its root, is not asked: it need not answer.
        let flags = AtFlags::STATX_DONT_SYNC;
        let top = match rustix::fs::statx(CWD, task.join("root"), flags, mask) {
            Err(Errno::ACCESS) => return Ok(None),
            found => found?,
        };
        let namespace = match fs::metadata(task.join("ns/mnt")) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
            found => found?.ino(),
        };
        Ok(Some(Self {
            namespace,
            device: (top.stx_dev_major, top.stx_dev_minor),
            inode: top.stx_ino,
            mount: top.stx_mnt_id,
        }))
    }
}

/// One mount of a mount namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelMount {
    /// Number of the mount; given to another one later.
    pub id: u64,
    /// Number of the mount that it is on.
    pub parent: u64,
    /// Major and minor number of its superblock.
    #[serde(skip)]
    pub device: (u32, u32),
    /// The directory of the filesystem that it shows.
    #[serde(skip)]
    pub root: PathBuf,
    /// Where it is.
    pub target: PathBuf,
    /// Peer groups that it belongs to or follows: it is unmounted where their mounts are.
    #[serde(skip)]
    pub groups: Vec<u64>,
    /// `erofs`, `overlay`, …
    pub filesystem: String,
    /// What it was mounted from; ours say `cofolio:<digest>`.
    pub source: String,
    /// Options of the filesystem, with their escapes.
    #[serde(skip)]
    pub options: Vec<u8>,
}

impl KernelMount {
    /// The image, for a mount made by Cofolio or a bind of one.
    pub fn image(&self) -> Option<Digest> {
        self.source.strip_prefix(SOURCE_PREFIX)?.parse().ok()
    }

    pub(crate) fn has_option(&self, name: &str) -> bool {
        self.options.split(|&byte| byte == b',').any(|option| option == name.as_bytes())
    }

    /// The values of an option, each of which is a path.
    pub(crate) fn paths(&self, name: &str) -> impl Iterator<Item = PathBuf> {
        let options = self.options.split(|&byte| byte == b',');
        options.filter_map(move |option| {
            let value = option.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
            Some(OsString::from_vec(unescape(value)).into())
        })
    }
}

/// Every mount of ours begins so in its source.
pub(crate) const SOURCE_PREFIX: &str = "cofolio:";

pub(crate) fn source_of(image: &Digest) -> String {
    format!("{SOURCE_PREFIX}{image}")
}

/// Reads all mounts of this thread, whose namespace may be its own; `/proc` is below `root`.
pub(crate) fn read(root: &Path) -> io::Result<Vec<KernelMount>> {
    Ok(parse(&fs::read(path(root))?))
}

pub(crate) fn path(root: &Path) -> PathBuf {
    root.join("proc/thread-self/mountinfo")
}

/// All mounts of this thread, read when they are first asked for: with thousands of mounts it takes
/// milliseconds.
pub(crate) struct LazyMounts<'r> {
    /// `/proc` is below it.
    root: &'r Path,
    mounts: OnceCell<Vec<KernelMount>>,
}

impl<'r> LazyMounts<'r> {
    pub(crate) fn new(root: &'r Path) -> Self {
        Self { root, mounts: OnceCell::new() }
    }

    pub(crate) fn get(&self) -> Result<&[KernelMount], MountError> {
        if self.mounts.get().is_none() {
            let _ = self.mounts.set(read(self.root).at("read", path(self.root))?);
        }
        Ok(self.mounts.get().map_or(&[], Vec::as_slice))
    }
}

/// Calls `each` for every mount that a process sees; its directory in `/proc` is `process`. A container
/// decides how many there are: says whether those were all.
pub(crate) fn for_each(process: &Path, mut each: impl FnMut(KernelMount)) -> io::Result<bool> {
    for_each_line(&process.join("mountinfo"), |line| {
        parse_line(line).into_iter().for_each(&mut each)
    })
}

/// Leaves out malformed lines: the format may grow, and one odd mount must not hide the others.
pub(crate) fn parse(text: &[u8]) -> Vec<KernelMount> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

/// Whether the target of one of these mounts leads to it: nothing is mounted on its root, or on the
/// way there.
pub(crate) fn is_reachable(mounts: &[KernelMount], mount: &KernelMount) -> bool {
    let has_child = |parent: u64, covers: &dyn Fn(&KernelMount) -> bool| {
        mounts.iter().any(|it| it.parent == parent && it.id != parent && covers(it))
    };
    if has_child(mount.id, &|it| it.target == mount.target) {
        return false;
    }
    // A list that changed while it was read might have a circle in it.
    let mut above = mount;
    for _ in mounts {
        if has_child(above.parent, &|it| it.id != above.id && above.target.starts_with(&it.target))
        {
            return false;
        }
        let parent = mounts.iter().find(|it| it.id == above.parent && it.id != above.id);
        let Some(parent) = parent else { return true };
        above = parent;
    }
    false
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse_line(line: &[u8]) -> Option<KernelMount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let (root, target) = (fields.next()?, fields.next()?);
    // Options of the mount, then any number of optional fields up to a lone dash.
    let groups = fields.by_ref().take_while(|field| *field != b"-").filter_map(|field| {
        let number = field.strip_prefix(b"shared:").or_else(|| field.strip_prefix(b"master:"))?;
        std::str::from_utf8(number).ok()?.parse().ok()
    });
    let groups = groups.collect();
    let filesystem = fields.next()?;
    let source = fields.next()?;
    Some(KernelMount {
        id,
        parent,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: OsString::from_vec(unescape(root)).into(),
        target: OsString::from_vec(unescape(target)).into(),
        groups,
        filesystem: String::from_utf8_lossy(&unescape(filesystem)).into_owned(),
        source: String::from_utf8_lossy(&unescape(source)).into_owned(),
        options: fields.next().unwrap_or_default().to_vec(),
    })
}

/// Space, tab, newline, backslash and `#` are written as three octal digits after a backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = |digit: u8| matches!(digit, b'0'..=b'7').then(|| u32::from(digit - b'0'));
        let code = match tail {
            [a, b, c, ..] if byte == b'\\' => octal(*a)
                .zip(octal(*b))
                .zip(octal(*c))
                .and_then(|((a, b), c)| u8::try_from(a * 64 + b * 8 + c).ok()),
            _ => None,
        };
        plain.push(code.unwrap_or(byte));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "2492664271cd9a238b4cf0dfb7eee50a5b508206ffb2f994a5a9f3d588849784";

    #[test]
    fn reads_every_kind_of_line() {
        let text = format!(
            "36 35 98:0 / /mnt\\040x\\134y rw,noatime master:1 shared:2 - overlay cofolio:{DIGEST} ro,lowerdir+=/\n\
             nonsense\n\
             37 36 0:5 / /proc rw - proc proc rw\n\
             38 36 0:5 / /a\\9b rw - ext4 /dev/x rw\n\
             39 36 0:6 / /b rw - overlay overlay rw,lowerdir=/l:/m,upperdir=/a\\040b\\054c,workdir=/w\n\
             40 36 0:7 / /c ro - erofs cofolio:x ro,user_xattr,acl,inode_share"
        );
        let mounts = parse(text.as_bytes());
        assert_eq!(mounts.len(), 5);
        assert!(mounts[4].has_option("inode_share") && !mounts[3].has_option("inode_share"));
        assert_eq!(mounts[3].paths("upperdir").collect::<Vec<_>>(), [Path::new("/a b,c")]);
        assert_eq!(mounts[0].paths("upperdir").next(), None);
        assert_eq!((mounts[0].device, mounts[1].device), ((98, 0), (0, 5)));
        assert_eq!((&mounts[0].groups, &mounts[1].groups), (&vec![1, 2], &vec![]));
        assert_eq!(mounts[0].target, Path::new("/mnt x\\y"));
        assert_eq!(mounts[0].filesystem, "overlay");
        assert_eq!(mounts[0].image().unwrap().to_string(), DIGEST);
        assert_eq!((mounts[1].id, mounts[1].parent), (37, 36));
        assert_eq!(mounts[1].image(), None);
        assert_eq!(mounts[2].target, Path::new("/a\\9b"));
    }

    #[test]
    fn a_mount_is_reached_unless_something_covers_it_or_the_way_there() {
        let mounts = |more: &str| {
            let text = format!(
                "1 1 0:1 / / rw - rootfs rootfs rw\n\
                 2 1 0:2 / /a rw - ext4 a rw\n\
                 3 2 0:3 / /a/b/m rw - overlay ours rw\n\
                 4 3 0:4 / /a/b/m/sub rw - overlay part rw\n\
                 5 2 0:5 / /a/b/m2 rw - tmpfs beside rw\n\
                 {more}"
            );
            let mounts = parse(text.as_bytes());
            let ours = mounts.iter().position(|it| it.id == 3).unwrap();
            is_reachable(&mounts, &mounts[ours])
        };
        assert!(mounts(""));
        for covering in ["3 0:6 / /a/b/m", "2 0:6 / /a/b", "2 0:6 / /a", "1 0:6 / /a"] {
            assert!(!mounts(&format!("6 {covering} rw - fuse x rw")), "{covering}");
        }
        assert!(mounts("6 4 0:6 / /a/b/m/sub rw - fuse x rw"), "what is in it covers only that");
    }

    /// Whatever stands there, reading it ends.
    #[test]
    fn survives_any_text() {
        let line = b"36 35 98:0 / /mnt\\040x rw master:1 - overlay cofolio:x ro";
        for cut in 0..line.len() {
            let _ = parse(&line[..cut]);
            let mut broken = line.to_vec();
            broken[cut] = 0xff;
            let _ = parse(&broken);
        }
    }
}
