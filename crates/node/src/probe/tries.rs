//! Features that are found by using them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use cofolio_sys::mount::{MountAttr, mount_setattr, unshare_mount_namespace};
use cofolio_sys::userns::{IdRange, with_maps};
use rustix::fs::{IFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{Found, absent, present, unknown};
use crate::mount::kernel::{
    Backing, Context, KernelError, LayerStyle, Overlay, attach, mount_erofs, open_dir, reopen,
};

/// What trying gave, by the name of the feature; nothing where it was not tried.
pub(super) type Tried = BTreeMap<&'static str, Found>;

/// A directory that goes when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(parent: &Path) -> std::io::Result<Self> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!(".cofolio-probe-{}-{number}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    fn file(&self, name: &str, content: &[u8]) -> std::io::Result<File> {
        let path = self.0.join(name);
        let mut file = File::options().read(true).write(true).create_new(true).open(path)?;
        file.write_all(content)?;
        Ok(file)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Tries everything, with files under `store` or the temporary directory; also says why not, if so.
pub(super) fn all(store: Option<&Path>) -> (Tried, String) {
    let temporary = std::env::temp_dir();
    let scratch = match Scratch::new(store.unwrap_or(&temporary)) {
        Ok(scratch) => scratch,
        Err(error) => return (Tried::new(), format!("no scratch directory: {error}")),
    };
    let mut tried = Tried::from([
        ("erofs", accepts("erofs", "loads", |_| Ok(()))),
        ("overlay", accepts("overlay", "loads", |_| Ok(()))),
        ("inode-share", accepts("erofs", "option accepted", |it| it.flag("inode_share"))),
        (
            "overlay-verity",
            accepts("overlay", "verity=require", |it| it.string("verity", "require")),
        ),
    ]);
    try_files(&scratch, &mut tried);
    // What is mounted goes with the thread.
    let mounts = std::thread::scope(|scope| {
        let mounts = std::thread::Builder::new().spawn_scoped(scope, || {
            unshare_mount_namespace()
                .map_err(|error| KernelError::from_io("mount namespace", &error))?;
            try_mounts(&scratch, &mut tried)
        });
        let mounts = mounts.map_err(|error| KernelError::from_io("a thread", &error))?;
        mounts.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    if let Err(error) = mounts {
        tried.insert("erofs-file-backed", answer(Err(error)));
    }
    (tried, "it could not be tried".to_owned())
}

fn answer(result: Result<String, KernelError>) -> Found {
    match result {
        Ok(detail) => present(detail),
        Err(error) if matches!(error.errno, Errno::PERM | Errno::ACCESS) => {
            unknown(error.to_string())
        }
        Err(error) => absent(error.to_string()),
    }
}

fn accepts(
    filesystem: &'static str,
    detail: &str,
    set: impl FnOnce(&Context) -> Result<(), KernelError>,
) -> Found {
    let tried = Context::open(filesystem).and_then(|context| set(&context));
    answer(tried.map(|()| detail.to_owned()))
}

fn try_mounts(scratch: &Scratch, tried: &mut Tried) -> Result<(), KernelError> {
    let io = |error: &std::io::Error| KernelError::from_io("scratch", error);
    let image = scratch.file("image", &tiny_image()).map_err(|e| io(&e))?;
    let objects = scratch.0.join("objects");
    fs::create_dir(&objects).map_err(|e| io(&e))?;
    let objects = open_dir(&objects).map_err(|errno| KernelError::new("scratch", errno))?;
    let dir = open_dir(&scratch.0).map_err(|errno| KernelError::new("scratch", errno))?;
    let image = image.as_fd();

    let (mount, backing) = mount_erofs(image, "cofolio:probe", dir.as_fd(), false)?;
    // Layers of an overlay are attached somewhere: Linux before 6.15 takes no others.
    let at = scratch.0.join("mount");
    fs::create_dir(&at).map_err(|e| io(&e))?;
    let open_at = || open_dir(&at).map_err(|errno| KernelError::new("scratch", errno));
    attach(mount, open_at()?)?;
    let mount = open_at()?;
    tried.insert(
        "erofs-file-backed",
        match backing {
            Backing::File => present("a 4 KiB image mounts"),
            Backing::Loop => absent("the kernel wants a block device"),
        },
    );
    tried.insert("erofs-xattr", erofs_xattr(&mount));
    let style = |style| {
        let metadata = [mount.as_fd()];
        let overlay = overlay(&metadata, objects.as_fd());
        answer(overlay.mount(&[style]).map(|_| "an overlay mounts".to_owned()))
    };
    tried.insert("overlay-data-only", style(LayerStyle::List));
    tried.insert("overlay-layers-by-descriptor", style(LayerStyle::Descriptor));

    let (mount, _) = mount_erofs(image, "cofolio:probe", dir.as_fd(), false)?;
    tried.insert("id-mapped-mounts", idmap(&mount, objects.as_fd()));
    Ok(())
}

fn overlay<'a>(metadata: &'a [BorrowedFd<'a>], objects: BorrowedFd<'a>) -> Overlay<'a> {
    Overlay {
        source: "cofolio:probe",
        metadata,
        objects,
        upper: None,
        volatile: false,
        label: None,
        verity: false,
    }
}

/// Without extended attributes the filesystem answers EOPNOTSUPP to everything about them.
fn erofs_xattr(mount: &OwnedFd) -> Found {
    let mut value = [0u8; 16];
    let name = "trusted.overlay.opaque";
    match reopen(mount).and_then(|root| rustix::fs::fgetxattr(root, name, &mut value[..])) {
        Ok(_) | Err(Errno::NODATA) => present("answers"),
        Err(Errno::OPNOTSUPP) => absent("the filesystem has no extended attributes"),
        Err(errno) => unknown(errno.to_string()),
    }
}

fn idmap(mount: &OwnedFd, objects: BorrowedFd<'_>) -> Found {
    let range = [IdRange { inside: 0, outside: 100_000, count: 65_536 }];
    let namespace = match with_maps(&range, &range) {
        Ok(namespace) => namespace,
        Err(error) => return absent(format!("user namespace: {error}")),
    };
    let attr = MountAttr { idmap: Some(namespace.as_fd()), ..MountAttr::default() };
    if let Err(error) = mount_setattr(mount, &attr) {
        return absent(format!("mount_setattr: {error}"));
    }
    let metadata = [mount.as_fd()];
    let overlay = overlay(&metadata, objects);
    answer(overlay.mount(&LayerStyle::ALL).map(|_| "an overlay over it mounts".to_owned()))
}

fn try_files(scratch: &Scratch, tried: &mut Tried) {
    let file = match scratch.file("file", &[1u8; 8192]) {
        Ok(file) => file,
        Err(error) => {
            tried.insert("immutable", unknown(error.to_string()));
            return;
        }
    };
    tried.insert("cachestat", works("answers", cofolio_sys::cache::cachestat(&file, 0, 0)));
    tried.insert(
        "reflink",
        match scratch.file("copy", b"") {
            Err(error) => unknown(error.to_string()),
            Ok(copy) => works("FICLONE", rustix::fs::ioctl_ficlone(&copy, &file)),
        },
    );
    let direct = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    let opened = rustix::fs::open(scratch.0.join("file"), direct, Mode::empty());
    tried.insert("direct-io", works("O_DIRECT opens", opened));
    tried.insert("immutable", immutable(&file));
    drop(file);
    tried.insert("fs-verity", verity(&scratch.0.join("file")));
}

/// Present if the call went well; `detail` says so.
fn works<T, E: Display>(detail: &str, called: Result<T, E>) -> Found {
    called.map_or_else(|error| absent(error.to_string()), |_| present(detail))
}

/// Nobody may have the file open for writing.
fn verity(path: &Path) -> Found {
    let enabled = File::open(path)
        .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
    match enabled.and_then(|file| cofolio_sys::verity::enable(&file)) {
        Ok(()) => present("the kernel checks every read"),
        Err(errno) if cofolio_sys::verity::is_unsupported(errno) => absent(errno.to_string()),
        Err(errno) => unknown(errno.to_string()),
    }
}

fn immutable(file: &File) -> Found {
    let set = rustix::fs::ioctl_getflags(file).and_then(|flags| {
        rustix::fs::ioctl_setflags(file, flags | IFlags::IMMUTABLE)?;
        rustix::fs::ioctl_setflags(file, flags - IFlags::IMMUTABLE)
    });
    match set {
        Ok(()) => present("FS_IMMUTABLE_FL"),
        Err(Errno::PERM) => unknown("needs CAP_LINUX_IMMUTABLE"),
        Err(errno) => absent(errno.to_string()),
    }
}

/// The smallest mountable image: one block with a superblock and an empty root directory.
///
/// Written by hand to test the kernel and not our writer. Layout as in `fs/erofs/erofs_fs.h`:
/// superblock at 1,024, compact inodes of 32 bytes, directory entries inline behind their inode.
fn tiny_image() -> Vec<u8> {
    const SUPERBLOCK: usize = 1024;
    const ROOT: usize = SUPERBLOCK + 128;
    let mut image = vec![0u8; 4096];
    let mut put = |offset: usize, bytes: &[u8]| {
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    let nid = (ROOT / 32).to_le_bytes();
    put(SUPERBLOCK, &0xE0F5_E1E2u32.to_le_bytes());
    put(SUPERBLOCK + 12, &[12]); // blkszbits
    put(SUPERBLOCK + 14, &nid[..2]); // root_nid
    put(SUPERBLOCK + 16, &1u64.to_le_bytes()); // inos
    put(SUPERBLOCK + 36, &1u32.to_le_bytes()); // blocks
    let names = b"...";
    let entries = 2 * 12;
    put(ROOT, &(2u16 << 1).to_le_bytes()); // compact, data inline
    put(ROOT + 4, &0o040_755u16.to_le_bytes());
    put(ROOT + 6, &2u16.to_le_bytes()); // links
    put(ROOT + 8, &27u32.to_le_bytes()); // size
    put(ROOT + 20, &1u32.to_le_bytes()); // inode number
    for (index, name_offset) in [(0, 24u16), (1, 25u16)] {
        let entry = ROOT + 32 + index * 12;
        put(entry, &nid);
        put(entry + 8, &name_offset.to_le_bytes());
        put(entry + 10, &[2]); // a directory
    }
    put(ROOT + 32 + entries, names);
    image
}
