//! Images that mkfs.erofs makes of a real directory, read back and compared with it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use cofolio_erofs::read::{Image, Location, ReadAt, ReadError};
use common::random::Rng;
use common::{TempDir, Tool, skip};

/// A file as callers outside of this crate read it.
struct File(fs::File);

impl ReadAt for File {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buf, offset)
    }

    fn size(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }
}

fn open(path: &Path) -> File {
    File(fs::File::open(path).unwrap())
}

/// A directory with what tends to go wrong: sizes around blocks, holes, a big directory, links,
/// names that are no UTF-8, pipes, and attributes where the filesystem has them.
fn make_source(dir: &Path) {
    let mut rng = Rng::new(1);
    for len in [0, 1, 100, 511, 512, 513, 4000, 4095, 4096, 4097, 8192, 10_000, 65_537, 300_000] {
        fs::write(dir.join(format!("size-{len}")), rng.bytes(len)).unwrap();
    }
    fs::create_dir_all(dir.join("deep/er/est")).unwrap();
    fs::hard_link(dir.join("size-4097"), dir.join("deep/er/hard")).unwrap();
    symlink("../size-100", dir.join("deep/link")).unwrap();
    symlink("x".repeat(4000), dir.join("deep/long-link")).unwrap();
    fs::write(dir.join(OsStr::from_bytes(b"not-utf8-\xff\xfe")), b"bytes").unwrap();
    fs::create_dir(dir.join("wide")).unwrap();
    for i in 0..2000 {
        fs::write(dir.join(format!("wide/{}{i}", "n".repeat(i % 90))), []).unwrap();
    }
    let sparse = fs::File::create(dir.join("sparse")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    sparse.write_all_at(b"data", 500_000).unwrap();
    fs::set_permissions(dir.join("size-1"), fs::Permissions::from_mode(0o4711)).unwrap();
    std::process::Command::new("mkfifo").arg(dir.join("pipe")).status().unwrap();
    for (name, value) in
        [("user.one", "1"), ("user.long.prefix.a", "2"), ("user.long.prefix.b", "3")]
    {
        for file in ["size-1", "size-100", "wide"] {
            let _ = std::process::Command::new("setfattr")
                .args(["-n", name, "-v", value])
                .arg(dir.join(file))
                .output();
        }
    }
}

fn source_names(dir: &Path) -> BTreeMap<Vec<u8>, PathBuf> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            let relative = path.strip_prefix(dir).unwrap();
            found.insert([b"/", relative.as_os_str().as_bytes()].concat(), path.clone());
            if path.symlink_metadata().unwrap().is_dir() {
                open.push(path);
            }
        }
    }
    found
}

fn compare(image: &Image<File>, source: &Path, flavour: &str) {
    let mut expected = source_names(source);
    let mut nids: BTreeMap<u64, u64> = BTreeMap::new();
    let mut walk = image.walk().unwrap();
    while let Some(found) = walk.advance().unwrap_or_else(|e| panic!("{flavour}: {e}")) {
        let shown = format!("{flavour}: {}", found.path.escape_ascii());
        let path = expected.remove(found.path).unwrap_or_else(|| panic!("{shown} is new"));
        let meta = path.symlink_metadata().unwrap();
        let inode = found.inode;
        assert_eq!(inode.mode, meta.mode(), "{shown}");
        assert_eq!((inode.uid, inode.gid), (meta.uid(), meta.gid()), "{shown}");
        // Compact inodes have the time of the image.
        if !flavour.contains("compact") {
            assert_eq!(inode.mtime, meta.mtime(), "{shown}");
        }
        if !meta.is_dir() {
            assert_eq!(u64::from(inode.nlink), meta.nlink(), "{shown}");
            assert_eq!(*nids.entry(meta.ino()).or_insert(inode.nid), inode.nid, "{shown}");
        }
        if meta.is_file() {
            assert_eq!(inode.size, meta.len(), "{shown}");
            let content = fs::read(&path).unwrap();
            let mut got = vec![0xaa; content.len() + 10];
            let len = image.read(&inode, 0, &mut got).unwrap_or_else(|e| panic!("{shown}: {e}"));
            assert!(got[..len] == content, "{shown}");
            let mut part = [0; 100];
            let from = inode.size / 2;
            let len = image.read(&inode, from, &mut part).unwrap();
            let from = usize::try_from(from).unwrap();
            assert!(content[from..].starts_with(&part[..len]), "{shown}");
        } else if meta.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            assert_eq!(image.readlink(&inode).unwrap(), target.as_os_str().as_bytes(), "{shown}");
        } else {
            assert!(meta.is_dir() || meta.file_type().is_fifo(), "{shown}");
        }
        assert_eq!(image.resolve(found.path).unwrap().unwrap(), inode, "{shown}");
    }
    assert!(expected.is_empty(), "{flavour}: missing {:?}", expected.keys().next());
    let one = image.resolve(b"/size-1").unwrap().unwrap();
    let mut xattrs = image.xattrs(&one).unwrap();
    xattrs.sort_by(|a, b| a.name.cmp(&b.name));
    let listed = std::process::Command::new("getfattr")
        .args(["-d", "--absolute-names"])
        .arg(source.join("size-1"))
        .output();
    let text = listed.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    for xattr in xattrs.iter().filter(|x| x.name.starts_with(b"user.")) {
        let name = String::from_utf8_lossy(&xattr.name);
        let value = String::from_utf8_lossy(&xattr.value);
        assert!(text.is_empty() || text.contains(&format!("{name}=\"{value}\"")), "{flavour}");
    }
    let count = text.lines().filter(|l| l.starts_with("user.")).count();
    assert!(text.is_empty() || xattrs.len() >= count, "{flavour}: {xattrs:?}");
}

#[test]
fn what_mkfs_erofs_makes_reads_back() {
    let test = "what_mkfs_erofs_makes_reads_back";
    let tool = match Tool::find("COFOLIO_MKFS_EROFS", "mkfs.erofs") {
        Ok(tool) => tool,
        Err(reason) => return skip(test, &reason),
    };
    let dir = TempDir::new("mkfs");
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    make_source(&source);
    let file = dir.path().join("image.erofs");
    let blob = dir.path().join("blob");
    let blob_option = format!("--blobdev={}", blob.display());
    let flavours: [&[&str]; 15] = [
        &[],
        &["-b512"],
        &["-b1024"],
        &["-Enoinline_data"],
        &["-Eforce-inode-extended"],
        &["-Eforce-inode-compact"],
        &["-Eforce-inode-blockmap"],
        &["-Eforce-chunk-indexes"],
        &["--chunksize=4096"],
        &["--chunksize=65536", "-Eforce-chunk-indexes"],
        &["-E48bit"],
        &["-E48bit", "--chunksize=4096"],
        &["--xattr-prefix=user.long.prefix."],
        &["-x1", "--xattr-prefix=user.long.prefix.", "-Exattr-name-filter"],
        &["--chunksize=4096", &blob_option],
    ];
    let mut read = 0;
    for flavour in flavours {
        let name = flavour.join(" ");
        let _ = fs::remove_file(&file);
        let _ = fs::remove_file(&blob);
        let paths = [file.to_str().unwrap(), source.to_str().unwrap()];
        let made = tool.run(&[flavour, &paths].concat(), b"");
        let said = String::from_utf8_lossy(&made.stderr);
        if !made.status.success() {
            // Older versions lack some flavours, and 48-bit compact inodes do not fit every tree.
            println!("{test}: mkfs.erofs {name}: {}", said.trim());
            continue;
        }
        let mut image =
            Image::open(open(&file)).unwrap_or_else(|e| panic!("mkfs.erofs {name}: {e}"));
        if blob.exists() {
            assert_eq!(image.superblock().devices.len(), 1);
            let stored = image.resolve(b"/size-300000").unwrap().unwrap();
            let location = image.extent(&stored, 0).unwrap().unwrap().location;
            assert!(matches!(location, Location::Device { index: 0, .. }), "{location:?}");
            let missing = image.read(&stored, 0, &mut [0; 10]);
            assert!(matches!(missing, Err(ReadError::NoDevice { index: 0 })));
            image.add_device(open(&blob));
        }
        compare(&image, &source, &name);
        assert!(matches!(image.to_tree(), Err(ReadError::NotComposefs)), "{name}");
        read += 1;
    }
    println!("{read} flavours of mkfs.erofs read back");
    assert!(read >= 8, "mkfs.erofs made only {read} flavours");
}

#[test]
fn compressed_files_are_refused_by_name() {
    let test = "compressed_files_are_refused_by_name";
    let tool = match Tool::find("COFOLIO_MKFS_EROFS", "mkfs.erofs") {
        Ok(tool) => tool,
        Err(reason) => return skip(test, &reason),
    };
    let dir = TempDir::new("compressed");
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("zeros"), vec![b'z'; 200_000]).unwrap();
    let file = dir.path().join("image.erofs");
    let made = tool.run(&["-zlz4", file.to_str().unwrap(), source.to_str().unwrap()], b"");
    if !made.status.success() {
        return skip(test, "this mkfs.erofs cannot compress");
    }
    let image = Image::open(open(&file)).unwrap();
    let zeros = image.resolve(b"/zeros").unwrap().unwrap();
    let error = image.read(&zeros, 0, &mut [0; 10]).unwrap_err().to_string();
    assert!(error.contains("compressed"), "{error}");
}

/// A superblock with a checksum that was changed afterwards.
#[test]
fn the_checksum_of_the_superblock_counts() {
    let test = "the_checksum_of_the_superblock_counts";
    let tool = match Tool::find("COFOLIO_MKFS_EROFS", "mkfs.erofs") {
        Ok(tool) => tool,
        Err(reason) => return skip(test, &reason),
    };
    let dir = TempDir::new("checksum");
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    let path = dir.path().join("image.erofs");
    let made = tool.run(&[path.to_str().unwrap(), source.to_str().unwrap()], b"");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut bytes = Vec::new();
    let mut file = fs::File::open(&path).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert!(Image::open(&bytes).is_ok());
    bytes[1024 + 48] ^= 1;
    let error = Image::open(&bytes).unwrap_err().to_string();
    assert!(error.contains("checksum"), "{error}");
}
