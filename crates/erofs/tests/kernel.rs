//! The kernel mounts what we write, and shows the tree.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cofolio_erofs::read::Image;
use cofolio_erofs::tree::{Content, S_IFMT, S_IFREG, Tree};
use cofolio_erofs::write::WriteOptions;
use common::{TempDir, can_mount, golden, image, parse, random, rounds, skip};
use rustix::fs::{lgetxattr, llistxattr};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// An image mounted at a directory, until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    /// Mounts a file without a loop device where the kernel can (6.12 and later), else with one.
    fn new(file: &Path, target: &Path) -> Result<Mounted, String> {
        let mounted = mount(file, target, "erofs", MountFlags::RDONLY, None);
        if let Err(error) = mounted {
            let loop_mount = Command::new("mount")
                .args(["-t", "erofs", "-o", "ro,loop"])
                .args([file, target])
                .output()
                .map_err(|e| format!("{error}; mount: {e}"))?;
            if !loop_mount.status.success() {
                let said = String::from_utf8_lossy(&loop_mount.stderr).into_owned();
                return Err(format!("{error}; {}", said.trim()));
            }
        }
        Ok(Mounted(target.to_path_buf()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = unmount(&self.0, UnmountFlags::DETACH) {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}

fn check(name: &str, tree: &Tree, bytes: &[u8], top: &Path) {
    let image = Image::open(bytes).unwrap();
    check_inode(name, tree, &image, top, tree.root(), b"/");
    let mut expected: BTreeSet<Vec<u8>> = BTreeSet::new();
    for visit in tree.walk() {
        let path = tree.path(visit.entry);
        check_inode(name, tree, &image, top, visit.inode, &path);
        expected.insert(path);
    }
    for i in 0..256 {
        expected.insert(format!("/{i:02x}").into_bytes());
    }
    let mut open = vec![top.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.symlink_metadata().unwrap().is_dir() {
                open.push(path.clone());
            }
            let relative = path.strip_prefix(top).unwrap().as_os_str().as_bytes();
            let relative = [b"/", relative].concat();
            assert!(expected.remove(&relative), "{name}: {} is new", path.display());
        }
    }
    assert!(expected.is_empty(), "{name}: missing {:?}", expected.first());
}

fn check_inode(
    name: &str,
    tree: &Tree,
    image: &Image<&[u8]>,
    top: &Path,
    inode: cofolio_erofs::tree::InodeId,
    path: &[u8],
) {
    let shown = format!("{name}: {}", path.escape_ascii());
    let file = top.join(OsStr::from_bytes(&path[1..]));
    let meta = file.symlink_metadata().unwrap_or_else(|e| panic!("{shown}: {e}"));
    let expected = tree.meta(inode);
    let content = tree.content(inode);
    let whiteout = content.is_whiteout();
    let mode = if whiteout { expected.mode & !S_IFMT | S_IFREG } else { expected.mode };
    assert_eq!(meta.mode(), mode, "{shown}");
    // An id of all ones is no id to the kernel.
    for (got, id) in [(meta.uid(), expected.uid), (meta.gid(), expected.gid)] {
        assert!(got == id || id == u32::MAX, "{shown}: {got} for {id}");
    }
    assert_eq!(meta.nlink(), u64::from(tree.nlink(inode)), "{shown}");
    assert_eq!(meta.mtime(), expected.mtime, "{shown}");
    assert_eq!(meta.mtime_nsec(), i64::from(expected.mtime_nsec), "{shown}");
    match content {
        Content::Symlink(target) => {
            let got = fs::read_link(&file).unwrap_or_else(|e| panic!("{shown}: {e}"));
            assert_eq!(got.as_os_str().as_bytes(), target, "{shown}");
        }
        Content::Inline(bytes) => {
            assert!(fs::read(&file).unwrap_or_else(|e| panic!("{shown}: {e}")) == bytes, "{shown}");
        }
        Content::External { size, .. } => assert_eq!(meta.len(), size, "{shown}"),
        Content::CharDevice(rdev) | Content::BlockDevice(rdev) if !whiteout => {
            let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
            let encoded = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
            assert_eq!(encoded, rdev, "{shown}");
        }
        _ => {}
    }
    // Names without one of the prefixes that the kernel hands out cannot be asked for.
    let stored = image.resolve(path).unwrap().unwrap();
    let mut list = vec![0; 1 << 20];
    let len = llistxattr(&file, &mut list[..]).unwrap_or_else(|e| panic!("{shown}: {e}"));
    let listed: BTreeSet<&[u8]> =
        list[..len].split(|&b| b == 0).filter(|n| !n.is_empty()).collect();
    for xattr in image.xattrs(&stored).unwrap() {
        let prefixes: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
        let Some(prefix) = prefixes.iter().find(|p| xattr.name.starts_with(p)) else { continue };
        // The kernel keeps user attributes to files and directories, and has no names without
        // something behind the prefix, or longer than 255 bytes.
        let special = !meta.is_file() && !meta.is_dir() && *prefix == b"user.";
        if special || xattr.name.len() == prefix.len() || xattr.name.len() > 255 {
            continue;
        }
        let what = format!("{shown}: {}", xattr.name.escape_ascii());
        let mut value = vec![0; 1 << 16];
        let got = lgetxattr(&file, OsStr::from_bytes(&xattr.name), &mut value[..]);
        // The kernel converts capabilities, and refuses what it cannot understand of them.
        if xattr.name == b"security.capability" {
            continue;
        }
        let len = got.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(value[..len] == xattr.value, "{what}");
        assert!(listed.contains(&xattr.name[..]), "{what}");
    }
}

#[test]
fn the_kernel_shows_the_tree() {
    let test = "the_kernel_shows_the_tree";
    if !can_mount(test) {
        return;
    }
    let dir = TempDir::new("kernel");
    let (file, top) = (dir.path().join("image.erofs"), dir.path().join("mounted"));
    fs::create_dir(&top).unwrap();
    let mut cases: Vec<(String, Vec<u8>)> = Vec::new();
    for entry in fs::read_dir(golden()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "dump") {
            cases.push((path.display().to_string(), fs::read(&path).unwrap()));
        }
    }
    for seed in 0..rounds("COFOLIO_MOUNTS", 40) {
        // Not even root may enter a directory whose owner is no valid id, or whose ACL is none.
        let dump = random::dump(seed)
            .replace("4294967295 ", "4294967294 ")
            .replace(" system.posix_acl_", " user.posix_acl_");
        cases.push((format!("seed {seed}"), dump.into_bytes()));
    }
    for (name, dump) in &cases {
        let tree = parse(dump);
        let bytes = image(&tree, &WriteOptions::default());
        fs::write(&file, &bytes).unwrap();
        let _mounted = match Mounted::new(&file, &top) {
            Ok(mounted) => mounted,
            Err(reason) => return skip(test, &reason),
        };
        check(name, &tree, &bytes, &top);
    }
    println!("{} images mounted and compared", cases.len());
}
