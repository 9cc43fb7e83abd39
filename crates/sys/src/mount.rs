//! What rustix lacks of the mount API: attributes of a mount, the kernel's own words about a
//! mount that failed, identity of a mount, loop devices, and the per-thread namespaces and working
//! directories that mounting needs.
//!
//! `fsopen`, `fsconfig`, `fsmount`, `move_mount`, `open_tree` and `unmount` are in
//! [`rustix::mount`].

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Getter, Opcode, opcode};
use rustix::mount::{MountAttrFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;

/// What [`mount_setattr`] changes. The default changes nothing.
#[derive(Debug, Clone, Copy)]
pub struct MountAttr<'fd> {
    /// Attributes to set.
    pub set: MountAttrFlags,
    /// Attributes to clear, before `set` is applied.
    pub clear: MountAttrFlags,
    /// `PRIVATE`, `SHARED`, `DOWNSTREAM` or `UNBINDABLE`; empty leaves the propagation alone.
    pub propagation: MountPropagationFlags,
    /// Maps ids by this user namespace's maps. The mount must be detached and never attached
    /// before, and its filesystem must allow it (EROFS since 5.19; overlayfs does not).
    pub idmap: Option<BorrowedFd<'fd>>,
}

impl Default for MountAttr<'_> {
    fn default() -> Self {
        Self {
            set: MountAttrFlags::empty(),
            clear: MountAttrFlags::empty(),
            propagation: MountPropagationFlags::empty(),
            idmap: None,
        }
    }
}

/// `struct mount_attr` of `include/uapi/linux/mount.h`, version 0.
#[repr(C)]
struct RawMountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

const _: () = assert!(size_of::<RawMountAttr>() == 32);

/// `mount_setattr(2)` on the mount that `fd` itself is, submounts not included (Linux 5.12).
/// Errors: the kernel's: `EINVAL` for a combination that it refuses (id-mapping a filesystem that does not
/// allow it, for one), `EPERM` without `CAP_SYS_ADMIN`, `ENOSYS` before 5.12.
pub fn mount_setattr(mount: impl AsFd, attr: &MountAttr<'_>) -> io::Result<()> {
    let mut set = attr.set;
    let mut userns_fd = 0;
    if let Some(namespace) = attr.idmap {
        set |= MountAttrFlags::MOUNT_ATTR_IDMAP;
        userns_fd = u64::from(namespace.as_raw_fd().cast_unsigned());
    }
    let raw = RawMountAttr {
        attr_set: u64::from(set.bits()),
        attr_clr: u64::from(attr.clear.bits()),
        propagation: u64::from(attr.propagation.bits()),
        userns_fd,
    };
    // SAFETY: the path is an empty C string, which with AT_EMPTY_PATH means `mount` itself; `raw`
    // is a `struct mount_attr` that lives through the call, and its size is the one given. The
    // kernel only reads both.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const raw,
            size_of::<RawMountAttr>(),
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel wrote about an `fsopen` context: the reason why `fsconfig` or `fsmount` failed,
/// as words (`overlay: No changes allowed in reconfigure`). Reading takes them away.
///
/// Each message starts with `e `, `w ` or `i ` for error, warning and information
/// (`fs/fs_context.c`, `logfc`); that prefix is kept, so that the caller can choose.
pub fn context_messages(context: impl AsFd) -> Vec<String> {
    // The kernel keeps 8 messages (`struct fc_log`), each shorter than a page.
    const MESSAGES_MAX: usize = 8;
    let mut messages = Vec::new();
    let mut buffer = [0u8; 4096];
    while messages.len() < MESSAGES_MAX {
        match rustix::io::read(context.as_fd(), &mut buffer[..]) {
            Ok(length) if length > 0 => {
                let text = String::from_utf8_lossy(&buffer[..length]);
                messages.push(text.trim_end().to_owned());
            }
            // ENODATA: no more of them.
            _ => break,
        }
    }
    messages
}

/// Which mount something lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MountId {
    /// The number of `/proc/self/mountinfo`. The kernel gives it to another mount once this one
    /// is gone.
    pub id: u64,
    /// The number that is never given twice while the machine is up (Linux 6.8).
    pub unique: Option<u64>,
    /// Whether the path is the root of that mount.
    pub is_root: bool,
}

/// Asks statx(2) for [`MountId::unique`] (`STATX_MNT_ID_UNIQUE` of `include/uapi/linux/stat.h`).
pub const UNIQUE_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// [`MountId::unique`] of an answer to [`UNIQUE_ID`].
pub fn unique_id(found: &Statx) -> Option<u64> {
    (found.stx_mask & UNIQUE_ID.bits() != 0).then_some(found.stx_mnt_id)
}

/// The mount that `path`, relative to `dir`, lies on; an empty path means `dir` itself.
/// Neither follows a symbolic link at the end nor triggers an automount.
/// Errors: those of `statx(2)`; `Unsupported` where the kernel does not say (before Linux 5.8).
pub fn mount_id(dir: impl AsFd, path: impl AsRef<Path>) -> io::Result<MountId> {
    // The kernel knows the mount without asking a server of the filesystem.
    let flags = AtFlags::EMPTY_PATH
        | AtFlags::SYMLINK_NOFOLLOW
        | AtFlags::NO_AUTOMOUNT
        | AtFlags::STATX_DONT_SYNC;
    let path = path.as_ref();
    let plain = rustix::fs::statx(dir.as_fd(), path, flags, StatxFlags::MNT_ID)?;
    if plain.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "statx gives no mount id"));
    }
    // The kernel answers with one of the two in the same field, so it takes two calls.
    let unique = unique_id(&rustix::fs::statx(dir.as_fd(), path, flags, UNIQUE_ID)?);
    let is_root = plain.stx_attributes.contains(rustix::fs::StatxAttributes::MOUNT_ROOT);
    Ok(MountId { id: plain.stx_mnt_id, unique, is_root })
}

/// Runs `work` in a thread of its own whose working directory is `dir`. The working directory of
/// the rest of the process stays as it is.
///
/// Filesystems that take a *path* as their source resolve it against the caller's working
/// directory and keep the text: this is how a short name ends up in mountinfo.
/// Errors: when the thread cannot be started, or cannot enter `dir`. A panic in `work` goes on in the
/// caller.
pub fn in_directory<T: Send>(
    dir: BorrowedFd<'_>,
    work: impl FnOnce() -> T + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, move || {
            // SAFETY: only CLONE_FILES is a danger to other threads (a descriptor of one would be
            // unknown in the other); CLONE_FS gives this thread its own working directory, root
            // and umask, which no Rust value depends on.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS)? };
            rustix::process::fchdir(dir)?;
            Ok(work())
        })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Gives the calling thread, and what it starts from now on, a mount namespace of its own in which
/// nothing propagates to or from other namespaces.
/// Errors: `EPERM` without `CAP_SYS_ADMIN`.
pub fn unshare_mount_namespace() -> io::Result<()> {
    unshare_mounts(MountPropagationFlags::PRIVATE)
}

/// As [`unshare_mount_namespace`], but what is mounted and unmounted outside is so inside as well:
/// a process that lives long in there keeps nothing mounted that others have unmounted.
/// Errors: `EPERM` without `CAP_SYS_ADMIN`.
pub fn unshare_mount_namespace_as_follower() -> io::Result<()> {
    unshare_mounts(MountPropagationFlags::DOWNSTREAM)
}

fn unshare_mounts(propagation: MountPropagationFlags) -> io::Result<()> {
    // SAFETY: as in `in_directory`: CLONE_NEWNS (which implies CLONE_FS) changes how paths
    // resolve in this thread, and leaves descriptors and memory alone.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    rustix::mount::mount_change("/", propagation | MountPropagationFlags::REC)?;
    Ok(())
}

/// `NS_GET_MNTNS_ID` of `include/uapi/linux/nsfs.h`: `_IOR(0xb7, 5, __u64)`.
const NS_GET_MNTNS_ID: Opcode = opcode::read::<u64>(0xb7, 5);

/// The number of a mount namespace, given as its file (`/proc/PID/ns/mnt`): never given twice while the
/// machine is up, unlike the inode number of that file, which the next namespace may get at once.
/// `None` where the kernel does not tell (before Linux 6.11), and for a file that is something else.
pub fn namespace_id(namespace: impl AsFd) -> Option<u64> {
    // SAFETY: the request number belongs to nsfs, which writes one `u64`, and that is what `Getter` makes
    // room for. Files of other filesystems refuse the number or, should theirs have the same, take its
    // size from it as well.
    unsafe { ioctl::ioctl(namespace, Getter::<NS_GET_MNTNS_ID, u64>::new()) }.ok()
}

/// `NS_GET_USERNS` of the same header: `_IO(0xb7, 1)`.
const NS_GET_USERNS: libc::c_ulong = 0xb701;

/// The user namespace that a mount namespace, or one of another kind, belongs to: whoever is root
/// there decides what is mounted in it. Takes and returns a file of `/proc/PID/ns` (ioctl_ns(2)).
/// Errors: `EPERM` for one that is neither the caller's nor below it; `ENOTTY` for another file.
pub fn namespace_owner(namespace: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: NS_GET_USERNS takes no argument and touches no memory of ours.
    let owner = unsafe { libc::ioctl(namespace.as_fd().as_raw_fd(), NS_GET_USERNS as _) };
    if owner < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(owner) })
}

/// `struct fs_sysfs_path` of `include/uapi/linux/fs.h`.
#[repr(C)]
struct SysfsPath {
    len: u8,
    name: [u8; 128],
}

/// `FS_IOC_GETFSSYSFSPATH` of the same header: `_IOR(0x15, 1, struct fs_sysfs_path)`.
const FS_IOC_GETFSSYSFSPATH: Opcode = opcode::read::<SysfsPath>(0x15, 1);

/// Where a superblock is below `/sys/fs`, such as `erofs/erofs-7`. `file` lies on it and is open
/// for reading. The entry exists exactly as long as the superblock.
/// Errors: `ENOTTY` before Linux 6.10 and for filesystems without an entry.
pub fn sysfs_path(file: impl AsFd) -> io::Result<PathBuf> {
    // SAFETY: the kernel writes one `struct fs_sysfs_path`, and that is what `Getter` makes room
    // for; every byte of it is valid as any value.
    let path: SysfsPath =
        unsafe { ioctl::ioctl(file, Getter::<FS_IOC_GETFSSYSFSPATH, SysfsPath>::new())? };
    let length = usize::from(path.len).min(path.name.len());
    Ok(PathBuf::from(OsStr::from_bytes(&path.name[..length])))
}

/// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE` of `include/uapi/linux/loop.h`.
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo64 {
    lo_device: u64,
    lo_inode: u64,
    lo_rdevice: u64,
    lo_offset: u64,
    lo_sizelimit: u64,
    lo_number: u32,
    lo_encrypt_type: u32,
    lo_encrypt_key_size: u32,
    lo_flags: u32,
    lo_file_name: [u8; 64],
    lo_crypt_name: [u8; 64],
    lo_encrypt_key: [u8; 32],
    lo_init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo64>() == 232);
const _: () = assert!(size_of::<LoopConfig>() == 304);

/// A loop device that is gone as soon as nobody has it open or mounted.
#[derive(Debug)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
    /// Keeps the device; a mount keeps it too.
    pub fd: OwnedFd,
}

/// Attaches `file` to a free loop device: read-only unless `writable`, with blocks of 4,096 bytes, with direct I/O
/// where the filesystem below allows it (so that nothing is cached twice), freed with its last
/// user. `name` is what `losetup` shows; what is longer than 63 bytes is cut off.
/// Errors: the kernel's; `ENOENT` or `ENODEV` where it has no loop devices, `ENOSYS`/`EINVAL` before
/// Linux 5.8, `EBUSY` when other processes took every free device that we were offered.
pub fn attach_loop(file: impl AsFd, name: &OsStr, writable: bool) -> io::Result<LoopDevice> {
    // Between "this one is free" and "I take it" somebody else may take it.
    const TRIES_MAX: u32 = 64;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let control = rustix::fs::open("/dev/loop-control", flags, Mode::empty())?;
    let read_only = if writable { 0 } else { LO_FLAGS_READ_ONLY };
    let mut file_name = [0u8; 64];
    let length = name.len().min(file_name.len() - 1);
    file_name[..length].copy_from_slice(&name.as_bytes()[..length]);
    for _ in 0..TRIES_MAX {
        // SAFETY: LOOP_CTL_GET_FREE takes no argument and touches no memory of ours.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let fd = match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(fd) => fd,
            // Taken and freed again meanwhile.
            Err(Errno::NXIO | Errno::BUSY) => continue,
            Err(error) => return Err(error.into()),
        };
        let config = LoopConfig {
            fd: file.as_fd().as_raw_fd().cast_unsigned(),
            block_size: 4096,
            info: LoopInfo64 {
                lo_device: 0,
                lo_inode: 0,
                lo_rdevice: 0,
                lo_offset: 0,
                lo_sizelimit: 0,
                lo_number: 0,
                lo_encrypt_type: 0,
                lo_encrypt_key_size: 0,
                lo_flags: read_only | LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO,
                lo_file_name: file_name,
                lo_crypt_name: [0; 64],
                lo_encrypt_key: [0; 32],
                lo_init: [0; 2],
            },
            reserved: [0; 8],
        };
        // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`, which `config` is (its size is
        // asserted above) and which lives through the call.
        let rc = unsafe { libc::ioctl(fd.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) };
        if rc == 0 {
            return Ok(LoopDevice { path, fd });
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn the_request_number_is_that_of_the_header() {
        assert_eq!(NS_GET_MNTNS_ID, 0x8008_b705);
        assert_eq!(FS_IOC_GETFSSYSFSPATH, 0x8081_1501);
    }

    #[test]
    fn our_mount_namespace_belongs_to_our_user_namespace() {
        use std::os::unix::fs::MetadataExt as _;
        let owner = match namespace_owner(File::open("/proc/self/ns/mnt").unwrap()) {
            // An emulator of programs that does not know the request: no kernel says this.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                return eprintln!(
                    "SKIP our_mount_namespace_belongs_to_our_user_namespace: {error}"
                );
            }
            owner => owner.unwrap(),
        };
        let of_file = |file: File| file.metadata().unwrap().ino();
        let ours = of_file(File::open("/proc/self/ns/user").unwrap());
        assert_eq!(of_file(File::from(owner)), ours);
        assert!(namespace_owner(File::open("/proc/self/stat").unwrap()).is_err());
    }

    #[test]
    fn a_mount_namespace_has_one_number() {
        let of = |path: &str| namespace_id(File::open(path).unwrap());
        assert_eq!(of("/proc/self/ns/uts"), None, "another kind of namespace");
        assert_eq!(of("/proc/self/stat"), None, "no namespace");
        let Some(ours) = of("/proc/thread-self/ns/mnt") else {
            eprintln!("SKIP a_mount_namespace_has_one_number: needs Linux 6.11");
            return;
        };
        assert_eq!(of("/proc/thread-self/ns/mnt"), Some(ours));
        std::thread::spawn(move || match unshare_mount_namespace() {
            Ok(()) => {
                assert!(namespace_id(File::open("/proc/thread-self/ns/mnt").unwrap()) > Some(ours))
            }
            Err(error) => eprintln!("SKIP a_mount_namespace_has_one_number (another): {error}"),
        })
        .join()
        .unwrap();
    }
}
