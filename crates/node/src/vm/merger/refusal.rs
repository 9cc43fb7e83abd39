//! Processes that must not be merged, by the files and devices that they have open.
//!
//! `UFFDIO_MOVE` sees references that pin a page (`FOLL_PIN`), and leaves such pages alone. Some
//! parts of the kernel take plain references (`FOLL_GET`) while a device or a server writes to a
//! page: vhost-scsi, direct I/O on NFS and FUSE, and vhost-net when it sends without copying. The
//! kernel would move such a page, and the data would be lost.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags, fstatfs, open};

use crate::kernel_text;
use crate::processes::open_files;

/// Filesystems whose direct I/O takes plain references, and their names (`linux/magic.h`).
const DIRECT: [(u32, &str); 2] = [(0x6969, "NFS"), (0x6573_5546, "FUSE")];
const ZERO_COPY: &str = "/sys/module/vhost_net/parameters/experimental_zcopytx";

/// Open files of a process, as far as they matter for merging.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Opened {
    /// Why none of its pages may be moved, if so.
    pub(super) refusal: Option<String>,
    /// Whether the kernel may have pinned pages of it: a pinned page must not be copied to another
    /// place.
    pub(super) may_pin: bool,
}

/// Looks at all open files of a process.
///
/// # Errors
/// Those of reading `/proc/PID/fd`.
pub(super) fn opened(proc: &Path, pid: u32) -> io::Result<Opened> {
    let process = proc.join(pid.to_string());
    let mut opened = Opened::default();
    for (link, target) in open_files(&process)? {
        let name = target.to_string_lossy();
        let device = name.strip_prefix("/dev/").unwrap_or_default();
        opened.may_pin |= ["vhost", "vfio", "iommu"].iter().any(|it| device.starts_with(it));
        if device == "vhost-scsi" {
            opened.refusal = Some("it has a vhost-scsi device".to_owned());
        }
        let copies_nothing = || fs::read_to_string(ZERO_COPY).is_ok_and(|text| text.trim() != "0");
        if device == "vhost-net" && copies_nothing() {
            let why = "it has a vhost-net device that sends without copying (experimental_zcopytx)";
            opened.refusal = Some(why.to_owned());
        }
        let number = link.file_name().unwrap_or_default();
        if !name.starts_with('/') || !is_direct(&process.join("fdinfo").join(number)) {
            continue;
        }
        opened.may_pin = true;
        // Opening a path sends no request to a server, and reads nothing.
        let found = open(&link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        if let Some(kind) = found.ok().and_then(|file| plain_references(file.as_fd())) {
            opened.refusal = Some(format!("it has direct I/O on {kind}: {name}"));
        }
    }
    Ok(opened)
}

/// Whether a descriptor is open for direct I/O. `fdinfo` shows its flags in octal.
fn is_direct(info: &Path) -> bool {
    let text = kernel_text::read(info).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & OFlags::DIRECT.bits() != 0)
}

/// The name of the file's filesystem, if its direct I/O takes plain references.
fn plain_references(file: impl AsFd) -> Option<&'static str> {
    let found = fstatfs(file).ok()?.f_type;
    DIRECT.iter().find(|(magic, _)| i128::from(*magic) == i128::from(found)).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs::File;
    use std::os::unix::fs::{OpenOptionsExt as _, symlink};

    use super::*;

    /// A process as `/proc` shows it.
    fn process(open: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("7");
        fs::create_dir_all(dir.join("fd")).unwrap();
        fs::create_dir_all(dir.join("fdinfo")).unwrap();
        for (number, (target, flags)) in open.iter().enumerate() {
            symlink(target, dir.join(format!("fd/{number}"))).unwrap();
            let info = format!("pos:\t0\nflags:\t{flags}\n");
            fs::write(dir.join(format!("fdinfo/{number}")), info).unwrap();
        }
        root
    }

    #[test]
    fn devices_with_plain_references_are_refused() {
        let usual = process(&[("/dev/null", "0100002"), ("socket:[1]", "02")]);
        assert_eq!(opened(usual.path(), 7).unwrap(), Opened::default());
        let scsi = process(&[("/dev/null", "02"), ("/dev/vhost-scsi", "02")]);
        let found = opened(scsi.path(), 7).unwrap();
        assert!(found.refusal.unwrap().contains("vhost-scsi"));
        let found = opened(process(&[("/dev/vhost-net", "02")]).path(), 7).unwrap();
        assert!(found.may_pin);
        assert!(opened(Path::new("/nowhere"), 7).is_err());
    }

    #[test]
    fn direct_io_is_seen() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, [0; 4096]).unwrap();
        let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap();
        let Ok(_held) = File::options().read(true).custom_flags(direct).open(&path) else {
            println!("SKIP direct_io_is_seen: no direct I/O there");
            return;
        };
        // A local filesystem pins pages.
        let found = opened(Path::new("/proc"), std::process::id()).unwrap();
        assert_eq!(found, Opened { refusal: None, may_pin: true });
        assert!(plain_references(File::open("/proc/self/fd").unwrap()).is_none());
    }
}
