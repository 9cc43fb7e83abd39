//! Directories as sources: everything in them is kept, and nothing else.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::Path;

use cofolio_image::error::ImportError;
use cofolio_image::source::Source;
use cofolio_image::tree_scan::{DigestOnly, DigestStore, ScanOptions, scan};
use cofolio_store::task::Task;
use rustix::fs::{FileType, Mode, XattrFlags};

use crate::support::*;

/// A directory with a bit of everything. Needs root.
pub fn make_tree(root: &Path) {
    use std::os::unix::ffi::OsStrExt;
    fs::create_dir_all(root.join("etc/deep/er")).unwrap();
    fs::write(root.join("etc/hosts"), "localhost\n").unwrap();
    fs::write(root.join("etc/empty"), "").unwrap();
    fs::write(root.join("large"), vec![b'l'; 3 << 20]).unwrap();
    fs::hard_link(root.join("etc/hosts"), root.join("etc/deep/hosts")).unwrap();
    symlink("../etc/hosts", root.join("etc/deep/er/link")).unwrap();
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"bytes-\xff\xfe")), "raw").unwrap();
    fs::write(root.join("n".repeat(255)), "long").unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(5 << 20).unwrap();
    std::os::unix::fs::FileExt::write_at(&sparse, b"island", 2 << 20).unwrap();
    let dir = fs::File::open(root).unwrap();
    let mode = Mode::from_raw_mode(0o640);
    for (name, kind, device) in [
        ("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
        ("disk", FileType::BlockDevice, rustix::fs::makedev(259, 300)),
        ("pipe", FileType::Fifo, 0),
    ] {
        rustix::fs::mknodat(&dir, name, kind, mode, device).unwrap();
    }
    fs::write(root.join("suid"), "#!").unwrap();
    std::os::unix::fs::chown(root.join("suid"), Some(3_000_000_000), Some(7)).unwrap();
    rustix::fs::chmodat(&dir, "suid", Mode::from_raw_mode(0o6755), rustix::fs::AtFlags::empty())
        .unwrap();
    for (name, value) in [("user.note", &b"a\0b"[..]), ("trusted.secret", b"t")] {
        rustix::fs::setxattr(root.join("etc/hosts"), name, value, XattrFlags::empty()).unwrap();
    }
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let none = XattrFlags::empty();
    rustix::fs::setxattr(root.join("large"), "security.capability", capability, none).unwrap();
    rustix::fs::lsetxattr(root.join("etc/deep/er/link"), "trusted.on-link", b"l", none).unwrap();
    let acl = [
        &[2u8, 0, 0, 0][..],
        &[1, 0, 6, 0, 255, 255, 255, 255],
        &[2, 0, 7, 0, 0xe8, 3, 0, 0],
        &[4, 0, 4, 0, 255, 255, 255, 255],
        &[16, 0, 7, 0, 255, 255, 255, 255],
        &[32, 0, 4, 0, 255, 255, 255, 255],
    ]
    .concat();
    rustix::fs::setxattr(root.join("etc/empty"), "system.posix_acl_access", &acl, none).unwrap();
    for (path, seconds, nanos) in
        [("etc/hosts", 1_234_567_890, 123_456_789), ("etc/deep", -5, 250_000_000), (".", 86_400, 1)]
    {
        let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanos };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(&dir, path, &times, rustix::fs::AtFlags::empty()).unwrap();
    }
}

/// The same view of a directory as of an image, made with other means.
pub fn view_of_directory(root: &Path) -> View {
    let mut nodes = BTreeMap::new();
    let mut firsts = BTreeMap::new();
    let mut todo = vec![(root.to_path_buf(), "/".to_owned())];
    while let Some((path, name)) = todo.pop() {
        use std::os::unix::ffi::OsStrExt;
        let meta = fs::symlink_metadata(&path).unwrap();
        let kind = meta.file_type();
        let device = || {
            let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
            (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
        };
        let what = if kind.is_dir() {
            for entry in fs::read_dir(&path).unwrap() {
                let entry = entry.unwrap();
                let child = entry.file_name().as_bytes().escape_ascii().to_string();
                todo.push((entry.path(), format!("{}/{child}", name.trim_end_matches('/'))));
            }
            "dir".into()
        } else if kind.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            format!("symlink {}", target.as_os_str().as_bytes().escape_ascii())
        } else if kind.is_file() {
            format!("file {}", sha256(&fs::read(&path).unwrap()))
        } else if kind.is_char_device() {
            format!("char {:#x}", device())
        } else if kind.is_block_device() {
            format!("block {:#x}", device())
        } else if kind.is_fifo() {
            "fifo".into()
        } else {
            "socket".into()
        };
        let mut names = vec![0; 65536];
        let length = rustix::fs::llistxattr(&path, &mut names).unwrap();
        let mut xattrs = BTreeMap::new();
        for attr in names[..length].split(|&b| b == 0).filter(|n| !n.is_empty()) {
            let mut value = vec![0; 65536];
            let length = rustix::fs::lgetxattr(&path, attr, &mut value).unwrap();
            xattrs.insert(attr.escape_ascii().to_string(), value[..length].to_vec());
        }
        firsts.entry((meta.dev(), meta.ino())).or_insert_with(Vec::new).push(name.clone());
        let node = Node {
            mode: meta.mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
            mtime: (meta.mtime(), u32::try_from(meta.mtime_nsec()).unwrap()),
            what,
            nlink: if kind.is_dir() { 0 } else { u32::try_from(meta.nlink()).unwrap() },
            xattrs,
            first: String::new(),
        };
        nodes.insert(name, node);
    }
    View(nodes)
}

/// Compares all but the order in which linked names come. Without `exact`, times count in whole
/// seconds and attributes not at all, which is what GNU's own format keeps.
pub fn compare(expected: &View, found: &View, exact: bool) {
    assert_eq!(found.paths(), expected.paths());
    for (path, expected) in &expected.0 {
        let mut expected = expected.clone();
        let mut found = found.get(path).clone();
        expected.first.clear();
        found.first.clear();
        if !exact {
            expected.mtime.1 = 0;
            expected.xattrs.clear();
            found.xattrs.clear();
        }
        assert_eq!(found, expected, "{path}");
    }
}

#[test]
fn a_directory_comes_as_it_is() {
    if !is_root("a_directory_comes_as_it_is") {
        return;
    }
    let bench = Bench::new();
    let root = bench.path("tree");
    make_tree(&root);
    let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let report = bench.import(&Source::parse(root.to_str().unwrap()).unwrap()).unwrap();
    assert_eq!(report.name, "tree");
    let view = bench.view(&report);
    compare(&view_of_directory(&root), &view, true);
    assert_eq!(view.get("/socket").what, "socket");
    // Again: nothing new, the same image.
    let again = bench.import(&Source::Directory { path: root }).unwrap();
    assert_eq!((again.image, again.objects_new), (report.image, 0));
}

/// Holes of a directory's files stay holes in the store, in a digest store too; small files and
/// large ones, holes at the start, in the middle, at the end.
#[test]
fn holes_of_a_directory_stay_holes() {
    use std::os::unix::fs::FileExt;
    let bench = Bench::new();
    let root = bench.path("tree");
    fs::create_dir(&root).unwrap();
    let mut contents = Vec::new();
    for (number, (size, islands)) in [
        (100_000, &[40_000][..]),
        (5 << 20, &[0, 2 << 20]),
        (3 << 20, &[(3 << 20) - 6]),
        (20 << 20, &[]),
        (700_000, &[0, 200_000, 400_000]),
    ]
    .iter()
    .enumerate()
    {
        let file = fs::File::create(root.join(format!("f{number}"))).unwrap();
        let mut content = vec![0; *size];
        file.set_len(*size as u64).unwrap();
        for at in *islands {
            file.write_all_at(b"island", *at as u64).unwrap();
            content[*at..*at + 6].copy_from_slice(b"island");
        }
        contents.push((content, 8192 * islands.len() as u64));
    }
    let report = bench.import(&Source::Directory { path: root.clone() }).unwrap();
    let view = bench.view(&report);
    for (number, (content, bytes)) in contents.iter().enumerate() {
        assert!(view.is_file(&format!("/f{number}"), content), "f{number}");
        bench.is_sparse(content, *bytes);
    }
    let path = bench.path("digest-store");
    let store = DigestStore::open(&path).unwrap();
    let tree = scan(&root, &ScanOptions::like_mkcomposefs(), &store, &Task::default()).unwrap();
    assert_eq!((tree.objects, tree.object_bytes), (5, 100_000 + (28 << 20) + 700_000));
    for (content, bytes) in &contents {
        let digest = cofolio_store::verity::digest(content);
        let object = path.join(digest.object_path());
        assert!(fs::read(&object).unwrap() == *content);
        let allocated = fs::metadata(&object).unwrap().blocks() * 512;
        assert!(allocated <= bytes + (256 << 10), "{allocated} bytes of {}", content.len());
    }
}

#[test]
fn options_leave_out_what_they_say() {
    if !is_root("options_leave_out_what_they_say") {
        return;
    }
    let bench = Bench::new();
    let root = bench.path("tree");
    make_tree(&root);
    let scanned =
        |options: &ScanOptions| scan(&root, options, &DigestOnly, &Task::default()).unwrap();
    let like = ScanOptions::like_mkcomposefs();
    let tree = scanned(&ScanOptions { skip_devices: true, use_epoch: true, ..like.clone() });
    assert_eq!(tree.skipped, 2);
    assert!(tree.tree.resolve(b"null").is_none() && tree.tree.resolve(b"pipe").is_some());
    for visit in tree.tree.walk() {
        assert_eq!(tree.tree.meta(visit.inode).mtime, 0);
    }
    let hosts = |options: ScanOptions| {
        let tree = scanned(&options).tree;
        let inode = tree.resolve(b"etc/hosts").unwrap();
        tree.xattrs(inode).map(|(n, _)| String::from_utf8(n.to_vec()).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(hosts(ScanOptions { skip_xattrs: true, ..like.clone() }), Vec::<String>::new());
    assert_eq!(hosts(ScanOptions { user_xattrs: true, ..like.clone() }), ["user.note"]);
    assert!(hosts(like).contains(&"trusted.secret".to_owned()));
}

/// The image of a directory (without hard links, which mkcomposefs loses) is mkcomposefs' own, and
/// so is the digest store.
#[test]
fn byte_identical_with_mkcomposefs() {
    let test = "byte_identical_with_mkcomposefs";
    if !is_root(test) || !have(test, "mkcomposefs") {
        return;
    }
    let bench = Bench::new();
    let root = bench.path("tree");
    make_tree(&root);
    fs::remove_file(root.join("etc/deep/hosts")).unwrap();
    for flags in
        [&[][..], &["--use-epoch"], &["--skip-devices"], &["--user-xattrs"], &["--skip-xattrs"]]
    {
        let theirs = bench.path("theirs");
        let (their_store, our_store) = (bench.path("their-store"), bench.path("our-store"));
        let mut command = std::process::Command::new("mkcomposefs");
        command.args(flags).arg(format!("--digest-store={}", their_store.display()));
        run(command.arg(&root).arg(&theirs));
        let options = ScanOptions {
            use_epoch: flags.contains(&"--use-epoch"),
            skip_devices: flags.contains(&"--skip-devices"),
            user_xattrs: flags.contains(&"--user-xattrs"),
            skip_xattrs: flags.contains(&"--skip-xattrs"),
            ..ScanOptions::like_mkcomposefs()
        };
        let store = DigestStore::open(&our_store).unwrap();
        let tree = scan(&root, &options, &store, &Task::default()).unwrap().tree;
        let mut ours = Vec::new();
        let write_options = cofolio_erofs::write::WriteOptions::default();
        cofolio_erofs::write::write(&tree, &write_options, &mut ours).unwrap();
        assert!(ours == fs::read(&theirs).unwrap(), "{flags:?}: the images differ");
        assert_eq!(
            view_of_directory(&our_store).0.values().map(|n| &n.what).collect::<Vec<_>>(),
            view_of_directory(&their_store).0.values().map(|n| &n.what).collect::<Vec<_>>(),
        );
    }
}

/// A file that grows while it is read is neither the old nor the new one.
#[test]
fn files_that_change_are_an_error() {
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, Ordering};
    let bench = Bench::new();
    let root = bench.path("tree");
    fs::create_dir(&root).unwrap();
    let mut file = fs::File::create(root.join("growing")).unwrap();
    file.write_all(&vec![1; 64 << 20]).unwrap();
    let before = bench.listing();
    let done = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                file.write_all(b"more").unwrap();
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let result = bench.import(&Source::Directory { path: root.clone() });
        done.store(true, Ordering::Relaxed);
        result
    });
    assert!(
        matches!(&result, Err(ImportError::Changed { path }) if path.ends_with("growing")),
        "{result:?}"
    );
    assert_eq!(bench.listing(), before);
}

#[test]
fn not_a_directory_is_said_so() {
    let bench = Bench::new();
    let file = bench.path("file");
    fs::write(&file, "x").unwrap();
    let error = bench.import(&Source::Directory { path: file }).unwrap_err();
    assert!(matches!(error, ImportError::Source { .. }), "{error}");
    let error = bench.import(&Source::Directory { path: bench.path("gone") }).unwrap_err();
    assert!(matches!(error, ImportError::Io { .. }), "{error}");
}
