//! Making mounts: the new mount API with the kernel's own words in its errors.
//!
//! All mounts here are *detached*: until the caller attaches one, it vanishes with its process.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use cofolio_sys::mount::{self as sys, MountAttr};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_fd, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use super::mountinfo::LazyMounts;

/// A step of the mount API that the kernel refused.
#[derive(Debug, Clone)]
pub struct KernelError {
    /// What was asked of it, such as `overlay: lowerdir+`.
    pub what: String,
    /// Its answer.
    pub errno: Errno,
    /// What it had to say about that, if anything.
    pub messages: Vec<String>,
}

impl KernelError {
    pub(crate) fn new(what: impl Into<String>, errno: Errno) -> Self {
        Self { what: what.into(), errno, messages: Vec::new() }
    }

    pub(crate) fn from_io(what: impl Into<String>, error: &io::Error) -> Self {
        let errno = error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
        let messages =
            if error.raw_os_error().is_none() { vec![error.to_string()] } else { Vec::new() };
        Self { what: what.into(), errno, messages }
    }

    pub(crate) fn says(&self, text: &str) -> bool {
        self.messages.iter().any(|message| message.contains(text))
    }
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, io::Error::from(self.errno))?;
        for message in &self.messages {
            // `e overlay: …`: the letter is the kind of message.
            let text = message.get(2..).unwrap_or(message);
            write!(f, " ({text})")?;
        }
        Ok(())
    }
}

impl std::error::Error for KernelError {}

/// A filesystem being configured (`fsopen`).
pub(crate) struct Context {
    fd: OwnedFd,
    filesystem: &'static str,
}

impl Context {
    pub(crate) fn open(filesystem: &'static str) -> Result<Self, KernelError> {
        match fsopen(filesystem, FsOpenFlags::FSOPEN_CLOEXEC) {
            Ok(fd) => Ok(Self { fd, filesystem }),
            Err(errno) => Err(KernelError::new(format!("{filesystem}: fsopen"), errno)),
        }
    }

    /// The error with everything that the kernel wrote about this context.
    fn explain(&self, step: &str, errno: Errno) -> KernelError {
        KernelError {
            what: format!("{}: {step}", self.filesystem),
            errno,
            messages: sys::context_messages(&self.fd),
        }
    }

    pub(crate) fn string(&self, key: &str, value: &str) -> Result<(), KernelError> {
        fsconfig_set_string(self.fd.as_fd(), key, value)
            .map_err(|errno| self.explain(&format!("{key}={value}"), errno))
    }

    /// As [`Context::string`], but an error does not show the value.
    fn secret(&self, key: &str, value: &str) -> Result<(), KernelError> {
        fsconfig_set_string(self.fd.as_fd(), key, value)
            .map_err(|errno| self.explain(&format!("{key}=…"), errno))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<(), KernelError> {
        fsconfig_set_flag(self.fd.as_fd(), key).map_err(|errno| self.explain(key, errno))
    }

    pub(crate) fn fd(&self, key: &str, value: BorrowedFd<'_>) -> Result<(), KernelError> {
        fsconfig_set_fd(self.fd.as_fd(), key, value)
            .map_err(|errno| self.explain(&format!("{key}=<descriptor>"), errno))
    }

    /// A directory by its descriptor, as kernels take it that know only paths.
    pub(crate) fn layer(&self, key: &str, layer: BorrowedFd<'_>) -> Result<(), KernelError> {
        self.string(key, &path_of(&layer))
    }

    pub(crate) fn create(&self) -> Result<(), KernelError> {
        fsconfig_create(self.fd.as_fd()).map_err(|errno| self.explain("create", errno))
    }

    /// Makes a detached mount of the superblock.
    pub(crate) fn mount(&self, attributes: MountAttrFlags) -> Result<OwnedFd, KernelError> {
        fsmount(self.fd.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map_err(|errno| self.explain("fsmount", errno))
    }
}

/// A detached copy of the mount at `path`, without submounts and outside the original's
/// peer group. A copy in a shared peer group would show a container's mounts in all its siblings.
pub(crate) fn clone_mount(
    dir: impl AsFd,
    path: &Path,
    set: MountAttrFlags,
    idmap: Option<BorrowedFd<'_>>,
) -> Result<OwnedFd, KernelError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_NO_AUTOMOUNT
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    let mount = open_tree(dir.as_fd(), path, flags)
        .map_err(|errno| KernelError::new(format!("open_tree {}", path.display()), errno))?;
    let attr = MountAttr {
        set,
        propagation: MountPropagationFlags::PRIVATE,
        idmap,
        ..MountAttr::default()
    };
    sys::mount_setattr(&mount, &attr).map_err(|error| {
        let what = if idmap.is_some() { "mount_setattr (id map)" } else { "mount_setattr" };
        KernelError::from_io(what, &error)
    })?;
    Ok(mount)
}

/// Attaches a detached mount at the directory that `target` is.
pub(crate) fn attach(mount: impl AsFd, target: impl AsFd) -> Result<(), KernelError> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount.as_fd(), "", target.as_fd(), "", flags)
        .map_err(|errno| KernelError::new("move_mount", errno))
}

/// Unmounts the topmost mount at `path`; `lazy` detaches it even if it is in use.
pub(crate) fn unmount(path: &Path, lazy: bool) -> Result<(), KernelError> {
    let mut flags = UnmountFlags::NOFOLLOW;
    flags.set(UnmountFlags::DETACH, lazy);
    rustix::mount::unmount(path, flags)
        .map_err(|errno| KernelError::new(format!("umount {}", path.display()), errno))
}

/// Detaches a mount with all that is on it, even if it is in use. What covers its root is detached in
/// its place.
pub(crate) fn detach(mount: &OwnedFd) -> Result<(), KernelError> {
    // The path is a link, which the kernel has to follow.
    rustix::mount::unmount(path_of(mount), UnmountFlags::DETACH)
        .map_err(|errno| KernelError::new("umount", errno))
}

/// Whether anything uses the mount at `path`, on which nothing is mounted: a process, a bound socket, a
/// loop device. Works only on a mount without child mounts: these count as users.
pub(crate) fn is_held(path: &Path) -> Result<bool, KernelError> {
    let failed = |errno| KernelError::new(format!("umount {}", path.display()), errno);
    // MNT_EXPIRE unmounts what has not been used since it was given the last time. So we use it.
    drop(open_dir(path).map_err(failed)?);
    match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::EXPIRE) {
        Err(Errno::BUSY) => Ok(true),
        // EINVAL: it is not there any more.
        Ok(()) | Err(Errno::AGAIN | Errno::INVAL) => Ok(false),
        Err(errno) => Err(failed(errno)),
    }
}

/// [`unmount`], but waits half a second for passing users: a process that was just forked holds copies
/// of its parent's descriptors until exec, and an opened file waits for the daemon in fanotify's queue.
pub(crate) fn unmount_patiently(path: &Path, lazy: bool) -> Result<(), KernelError> {
    const TRIES: u32 = 100;
    for _ in 1..TRIES {
        match unmount(path, lazy) {
            Err(error) if error.errno == Errno::BUSY => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            other => return other,
        }
    }
    unmount(path, lazy)
}

/// How the bytes of a metadata image reach the EROFS superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// The kernel reads the file (Linux 6.12).
    File,
    /// Through a loop device with direct I/O, where the kernel cannot do without.
    Loop,
}

/// Mounts a metadata image, detached. mountinfo shows `name` as its source.
///
/// EROFS opens its source by path and keeps the text. So a thread works in `scratch`, a directory
/// of the caller's own, where `name` is a symbolic link to the image's descriptor: whatever happens
/// to its path, the kernel mounts the very file that the caller checked.
pub(crate) fn mount_erofs(
    image: BorrowedFd<'_>,
    name: &str,
    scratch: BorrowedFd<'_>,
    force_loop: bool,
) -> Result<(OwnedFd, Backing), KernelError> {
    if !force_loop {
        match erofs_from(&path_of(&image), name, scratch, |_| Ok(())) {
            Ok(mount) => return Ok((mount, Backing::File)),
            // ENOTBLK: this kernel, or this file's filesystem, wants a block device.
            Err(error) if error.errno == Errno::NOTBLK => {}
            Err(error) => return Err(error),
        }
    }
    let device = sys::attach_loop(image, std::ffi::OsStr::new(name), false)
        .map_err(|error| KernelError::from_io("loop device", &error))?;
    let path = device.path.to_string_lossy().into_owned();
    Ok((erofs_from(&path, name, scratch, |_| Ok(()))?, Backing::Loop))
}

/// What a pack is mounted with.
pub(crate) struct PackOptions<'a> {
    /// Its devices, in their order.
    pub(crate) segments: &'a [BorrowedFd<'a>],
    /// Read past the page cache.
    pub(crate) direct: bool,
    /// Which packs it shares with.
    pub(crate) secret: &'a str,
}

/// Mounts a pack, detached, from files.
pub(crate) fn mount_pack(
    pack: BorrowedFd<'_>,
    name: &str,
    scratch: BorrowedFd<'_>,
    options: &PackOptions<'_>,
) -> Result<OwnedFd, KernelError> {
    erofs_from(&path_of(&pack), name, scratch, |context| {
        context.flag("inode_share")?;
        context.secret("domain_id", options.secret)?;
        for segment in options.segments {
            context.string("device", &path_of(segment))?;
        }
        if options.direct {
            context.flag("directio")?;
        }
        // Otherwise it keeps compressed blocks beside their content: 14 MiB after all files of two
        // redis images of 108 MiB. Of uncompressed blocks it keeps nothing.
        context.string("cache_strategy", "disabled")
    })
}

fn erofs_from(
    source: &str,
    name: &str,
    scratch: BorrowedFd<'_>,
    configure: impl FnOnce(&Context) -> Result<(), KernelError> + Send,
) -> Result<OwnedFd, KernelError> {
    let link = |errno| KernelError::new(format!("erofs: link to {source}"), errno);
    match rustix::fs::unlinkat(scratch, name, rustix::fs::AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(link(errno)),
    }
    rustix::fs::symlinkat(source, scratch, name).map_err(link)?;
    let result = sys::in_directory(scratch, || {
        let context = Context::open("erofs")?;
        context.string("source", name)?;
        context.flag("ro")?;
        configure(&context)?;
        context.create()?;
        context.mount(MountAttrFlags::MOUNT_ATTR_RDONLY)
    });
    // The name has done its work; a leftover is overwritten next time.
    let _ = rustix::fs::unlinkat(scratch, name, rustix::fs::AtFlags::empty());
    result.map_err(|error| KernelError::from_io("erofs: thread", &error))?
}

/// How overlayfs is told its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerStyle {
    /// `lowerdir+` and `datadir+` by descriptor (Linux 6.13).
    Descriptor,
    /// `lowerdir=metadata::objects` (Linux 6.5).
    List,
}

impl LayerStyle {
    /// The better one first.
    pub(crate) const ALL: [Self; 2] = [Self::Descriptor, Self::List];
}

pub(crate) struct Overlay<'a> {
    /// What mountinfo shows as its source.
    pub(crate) source: &'a str,
    /// Roots of the EROFS mounts, or of id-mapped copies of them, the topmost first.
    pub(crate) metadata: &'a [BorrowedFd<'a>],
    pub(crate) objects: BorrowedFd<'a>,
    /// The upper and the work directory; none for a read-only overlay.
    pub(crate) upper: Option<(BorrowedFd<'a>, BorrowedFd<'a>)>,
    /// Do not write the upper back when it is unmounted or synced: it is thrown away anyway.
    pub(crate) volatile: bool,
    /// Security label of everything in it.
    pub(crate) label: Option<&'a str>,
    /// Every object must carry fs-verity with the digest that the image names.
    pub(crate) verity: bool,
}

impl Overlay<'_> {
    /// Makes the overlay, detached.
    pub(crate) fn mount(&self, styles: &[LayerStyle]) -> Result<OwnedFd, KernelError> {
        let mut refused = KernelError::new("overlay: layers", Errno::INVAL);
        for &style in styles {
            // A context that has refused an option keeps what it took before: start anew.
            let context = Context::open("overlay")?;
            context.string("source", self.source)?;
            match self.layers(&context, style) {
                Ok(()) => {}
                // This kernel lacks the style; it answers EBADF for O_PATH descriptors, which
                // layers could not be before the style existed.
                Err(error) if matches!(error.errno, Errno::INVAL | Errno::BADF) => {
                    refused = error;
                    continue;
                }
                Err(error) => return Err(error),
            }
            // Metacopy says that an object's data is elsewhere, redirect says where.
            context.string("metacopy", "on")?;
            context.string("redirect_dir", "on")?;
            // Some kernels compose inode numbers by default. Then no `st_dev` tells which layer a file is
            // in, and the ledger needs it.
            context.string("xino", "off")?;
            if self.verity {
                context.string("verity", "require")?;
            }
            if let Some(label) = self.label {
                context.string("context", label)?;
            }
            let mut attributes = MountAttrFlags::empty();
            if self.upper.is_none() {
                context.flag("ro")?;
                attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
            } else if self.volatile {
                context.flag("volatile")?;
            }
            context.create()?;
            let mount = context.mount(attributes)?;
            self.check_writable(&mount)?;
            return Ok(mount);
        }
        Err(refused)
    }

    fn layers(&self, context: &Context, style: LayerStyle) -> Result<(), KernelError> {
        if style == LayerStyle::Descriptor {
            self.metadata.iter().try_for_each(|layer| context.fd("lowerdir+", *layer))?;
            context.fd("datadir+", self.objects)?;
            if let Some((upper, work)) = self.upper {
                context.fd("upperdir", upper)?;
                context.fd("workdir", work)?;
            }
            return Ok(());
        }
        let metadata: Vec<_> = self.metadata.iter().map(path_of).collect();
        let layers = format!("{}::{}", metadata.join(":"), path_of(&self.objects));
        context.string("lowerdir", &layers)?;
        if let Some((upper, work)) = self.upper {
            context.layer("upperdir", upper)?;
            context.layer("workdir", work)?;
        }
        Ok(())
    }

    /// If overlayfs cannot use its work directory, it mounts read-only and tells the kernel log.
    fn check_writable(&self, mount: &OwnedFd) -> Result<(), KernelError> {
        if self.upper.is_none() {
            return Ok(());
        }
        let stat = reopen(mount).and_then(rustix::fs::fstatvfs);
        let stat = stat.map_err(|errno| KernelError::new("overlay: statvfs", errno))?;
        if stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
            let mut error = KernelError::new("overlay: create", Errno::ROFS);
            error.messages.push(
                "e overlay: the work directory is unusable (the kernel log says why)".to_owned(),
            );
            return Err(error);
        }
        Ok(())
    }
}

/// `O_PATH` descriptor of a directory.
pub(crate) fn open_dir(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// `O_PATH` descriptor of a mount, or of what else is at a path, without asking a filesystem on the
/// way, whose server need not answer. The kernel's cache of names has every mount and the path to
/// it.
///
/// # Errors
/// EAGAIN where a filesystem would have to be asked: a name is not in the cache, or the filesystem
/// checks each name.
pub(crate) fn open_cached(path: &Path) -> rustix::io::Result<OwnedFd> {
    // Whatever is mounted or unmounted at the same moment makes the kernel answer so as well.
    const TRIES: u32 = 16;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED);
    for _ in 1..TRIES {
        match open() {
            Err(Errno::AGAIN) => {}
            opened => return opened,
        }
    }
    open()
}

/// [`open_cached`], which also reads names that are not in the cache from a block device: no server
/// has to answer for it.
pub(crate) fn open_local(path: &Path, mounts: &LazyMounts<'_>) -> rustix::io::Result<OwnedFd> {
    match open_cached(path) {
        Err(Errno::AGAIN) => open_on_device(path, mounts).unwrap_or(Err(Errno::AGAIN)),
        opened => opened,
    }
}

/// `None` for a path that may not be on a block device.
fn open_on_device(path: &Path, mounts: &LazyMounts<'_>) -> Option<rustix::io::Result<OwnedFd>> {
    let above = mounts.get().ok()?.iter().filter(|it| path.starts_with(&it.target));
    let mount = above.max_by_key(|it| it.target.components().count())?;
    // FUSE has a server for a block device, too.
    if mount.device.0 == 0 || mount.filesystem == "fuseblk" {
        return None;
    }
    let root = open_cached(&mount.target).ok()?;
    if sys::mount_id(&root, "").ok()?.id != mount.id {
        return None;
    }
    let inside = path.strip_prefix(&mount.target).ok()?;
    Some(open_below(&root, inside, OFlags::PATH))
}

/// The same directory, to be read: what is asked of a directory itself needs more than `O_PATH`.
pub(crate) fn reopen(dir: impl AsFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(dir, ".", flags, Mode::empty())
}

/// A path that leads to what this descriptor is of, wherever that is moved. It needs no escapes.
pub(crate) fn path_of(fd: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Opens what is below a directory on the same mount, through no symbolic link: whoever may write
/// there may have made it.
pub(crate) fn open_below(
    directory: impl AsFd,
    path: impl rustix::path::Arg,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(directory, path, flags, Mode::empty(), resolve)
}

/// `O_PATH` descriptor of a directory in `base`, on whatever mount. A symbolic link is refused: it
/// could lead anywhere.
pub(crate) fn open_directory_below(base: impl AsFd, name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(base, name, flags, Mode::empty(), resolve)
}
