//! Project quotas: a limit on what lies below a directory.
//!
//! Every file carries a project number, which new ones inherit from their directory; the filesystem
//! counts blocks and inodes per number. Source: `include/uapi/linux/fs.h`, `include/uapi/linux/quota.h`,
//! `quotactl(2)`, `ioctl_xfs_fsgetxattr(2)`. The same calls work on ext4 and XFS.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Setter, Updater, opcode};

/// `struct fsxattr`.
#[repr(C)]
#[derive(Default)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

const _: () = assert!(size_of::<FsXattr>() == 28);

/// `FS_XFLAG_PROJINHERIT`.
const XFLAG_PROJINHERIT: u32 = 0x200;
/// `_IOR('X', 31, struct fsxattr)`.
const FS_IOC_FSGETXATTR: Opcode = opcode::read::<FsXattr>(b'X', 31);
/// `_IOW('X', 32, struct fsxattr)`.
const FS_IOC_FSSETXATTR: Opcode = opcode::write::<FsXattr>(b'X', 32);

/// `struct if_dqblk`, sizes in blocks of 1,024 bytes.
#[repr(C)]
#[derive(Default)]
struct Limits {
    block_hard: u64,
    block_soft: u64,
    /// In bytes, unlike the limits.
    space: u64,
    inode_hard: u64,
    inode_soft: u64,
    inodes: u64,
    block_time: u64,
    inode_time: u64,
    valid: u32,
    pad: u32,
}

const _: () = assert!(size_of::<Limits>() == 72);

/// `QIF_BLIMITS | QIF_ILIMITS`.
const LIMITS_VALID: u32 = 1 | 4;
const PRJQUOTA: u32 = 2;
const Q_GETQUOTA: u32 = 0x80_0007;
const Q_SETQUOTA: u32 = 0x80_0008;

/// `Q_XGETQSTATV`.
const Q_XGETQSTATV: u32 = 0x5808;
/// `FS_QUOTA_PDQ_ENFD`.
const PROJECTS_ENFORCED: u16 = 1 << 5;

/// `struct fs_quota_statv`, `include/uapi/linux/dqblk_xfs.h`.
#[repr(C)]
struct State {
    version: i8,
    pad: u8,
    flags: u16,
    rest: u32,
    files: [u64; 19],
}

const _: () = assert!(size_of::<State>() == 160);

/// What a project uses and may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quota {
    /// Bytes in use.
    pub bytes: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Bytes allowed; 0 for no limit.
    pub bytes_max: u64,
    /// Inodes allowed; 0 for no limit.
    pub inodes_max: u64,
}

/// Project number of a file or directory.
/// Errors: `ENOTTY` or `EOPNOTSUPP` where the filesystem has none.
pub fn project(file: impl AsFd) -> Result<u32, Errno> {
    Ok(attributes(file)?.projid)
}

/// Gives a directory a project number, which what is made in it from now on inherits.
/// Errors: as [`project`]; `EOPNOTSUPP` or `EINVAL` also where the filesystem was made without them.
pub fn set_project(dir: impl AsFd, project: u32) -> Result<(), Errno> {
    let mut value = attributes(dir.as_fd())?;
    value.projid = project;
    value.xflags |= XFLAG_PROJINHERIT;
    // SAFETY: the request takes a pointer to a `struct fsxattr`, which `value` is, and only reads it.
    unsafe { ioctl::ioctl(dir, Setter::<FS_IOC_FSSETXATTR, FsXattr>::new(value)) }
}

fn attributes(file: impl AsFd) -> Result<FsXattr, Errno> {
    let mut value = FsXattr::default();
    // SAFETY: the request fills in one `struct fsxattr`, which `value` is; any bytes are valid in it.
    unsafe { ioctl::ioctl(file, Updater::<FS_IOC_FSGETXATTR, FsXattr>::new(&mut value)) }?;
    Ok(value)
}

/// Whether the filesystem that `file` is on enforces limits of projects. ext4 made with quotas counts
/// whatever it is mounted with, and takes limits; it keeps them where it was mounted with `prjquota` only.
/// XFS has `pqnoenforce`.
/// Errors: `ENOSYS` where there are no quotas at all, and before Linux 5.14.
pub fn is_enforced(file: impl AsFd) -> Result<bool, Errno> {
    // FS_QSTATV_VERSION1.
    let mut state = State { version: 1, pad: 0, flags: 0, rest: 0, files: [0; 19] };
    // SAFETY: it writes a `struct fs_quota_statv`, of integers only.
    unsafe { call(file, Q_XGETQSTATV, 0, &mut state) }?;
    Ok(state.flags & PROJECTS_ENFORCED != 0)
}

/// What a project of the filesystem that `file` is on uses and may use.
/// Errors: `ESRCH` where the filesystem has no project quotas, `ENOSYS` before Linux 5.14.
pub fn quota(file: impl AsFd, project: u32) -> Result<Quota, Errno> {
    let mut limits = Limits::default();
    // SAFETY: it writes a `struct if_dqblk`, of integers only.
    unsafe { call(file, Q_GETQUOTA, project, &mut limits) }?;
    Ok(Quota {
        bytes: limits.space,
        inodes: limits.inodes,
        bytes_max: limits.block_hard.saturating_mul(1024),
        inodes_max: limits.inode_hard,
    })
}

/// Limits a project; zeroes take the limits away. Bytes are rounded up to 1,024.
/// Errors: as [`quota`]; `EPERM` without `CAP_SYS_ADMIN`.
pub fn limit(file: impl AsFd, project: u32, bytes: u64, inodes: u64) -> Result<(), Errno> {
    let mut limits = Limits {
        block_hard: bytes.div_ceil(1024),
        inode_hard: inodes,
        valid: LIMITS_VALID,
        ..Limits::default()
    };
    // SAFETY: it reads a `struct if_dqblk`.
    unsafe { call(file, Q_SETQUOTA, project, &mut limits) }
}

/// # Safety
/// `T` is the structure that the command reads or writes, and any bytes are valid in it.
unsafe fn call<T>(
    file: impl AsFd,
    command: u32,
    project: u32,
    argument: &mut T,
) -> Result<(), Errno> {
    // QCMD(command, type) of the kernel's header.
    let command = (command << 8) | PRJQUOTA;
    // SAFETY: the command takes a pointer to a `T`, as the caller promises; it lives through the call.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            file.as_fd().as_raw_fd(),
            command,
            project,
            std::ptr::from_mut(argument),
        )
    };
    if rc == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
