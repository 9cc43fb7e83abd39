//! Images with their data on devices: read back here, by fsck.erofs and by the kernel.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cofolio_erofs::read::Image;
use cofolio_erofs::tree::{Content, Meta, Tree};
use cofolio_erofs::write::lz4::{self, Pcluster};
use cofolio_erofs::write::{
    Blob, BlobData, Blobs, BlockAddr, Data, Device, Extent, WriteError, WriteReport, write_data,
};
use common::random::Rng;
use common::{TempDir, Tool, can_mount, rounds, skip};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use sha2::Digest as _;

const BLOCK: usize = 4096;

/// Which files of a tree are compressed, and where those are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lz4 {
    /// A third, behind the image.
    Behind,
    /// A third, behind the image or on a device.
    Anywhere,
    /// All, behind the image or on a device.
    All,
}

/// Contents on devices in memory, of which the first is what is behind the image.
#[derive(Default)]
struct Devices {
    bytes: Vec<Vec<u8>>,
    blobs: Blobs,
}

impl Devices {
    /// With so many besides the image.
    fn new(count: usize) -> Devices {
        Devices { bytes: vec![vec![0xee; BLOCK]; 1 + count], ..Devices::default() }
    }

    fn list(&self) -> Vec<Device> {
        let device = |(i, bytes): (usize, &Vec<u8>)| {
            let mut tag = [0; 64];
            tag[..8].copy_from_slice(format!("device {i}").as_bytes());
            Device { tag, blocks: u32::try_from(bytes.len() / BLOCK).unwrap() }
        };
        self.bytes.iter().enumerate().skip(1).map(device).collect()
    }

    /// Stores a content compressed, on a device or (0) behind the image.
    fn add_lz4(&mut self, content: &[u8], device: u16) -> [u8; 32] {
        let fingerprint: [u8; 32] = sha2::Sha256::digest(content).into();
        let digest: [u8; 32] = sha2::Sha256::digest(fingerprint).into();
        let bytes = &mut self.bytes[usize::from(device)];
        let block = u32::try_from(bytes.len() / BLOCK).unwrap();
        let parts = lz4::compress(content, bytes).unwrap();
        let start = BlockAddr { device, block };
        let data = BlobData::Lz4 { start, pclusters: parts };
        self.blobs.insert(digest, Blob { sha256: Some(fingerprint), data });
        digest
    }

    /// Stores a content: its zero blocks nowhere, and the others in up to `pieces` pieces on
    /// devices at random. Returns the digest that the tree is to name it by: any will do here.
    fn add(&mut self, content: &[u8], pieces: u64, rng: &mut Rng) -> [u8; 32] {
        let fingerprint: [u8; 32] = sha2::Sha256::digest(content).into();
        let digest: [u8; 32] = sha2::Sha256::digest(fingerprint).into();
        let blocks: Vec<&[u8]> = content.chunks(BLOCK).collect();
        let mut runs: Vec<Extent> = Vec::new();
        let mut device = rng.index(self.bytes.len());
        for block in &blocks {
            if block.iter().all(|&b| b == 0) {
                match runs.last_mut() {
                    Some(run) if run.at.is_none() => run.blocks += 1,
                    _ => runs.push(Extent { at: None, blocks: 1 }),
                }
                continue;
            }
            if rng.below(blocks.len() as u64) < pieces - 1 {
                device = rng.index(self.bytes.len());
                // Or it would go on where it was.
                self.bytes[device].extend([0xee; BLOCK]);
            }
            let bytes = &mut self.bytes[device];
            let at = u32::try_from(bytes.len() / BLOCK).unwrap();
            bytes.extend_from_slice(block);
            bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
            let place = BlockAddr { device: u16::try_from(device).unwrap(), block: at };
            match runs.last_mut() {
                Some(Extent { at: Some(p), blocks })
                    if p.device == place.device && p.block + *blocks == at =>
                {
                    *blocks += 1;
                }
                _ => runs.push(Extent { at: Some(place), blocks: 1 }),
            }
        }
        let data = BlobData::Extents(runs);
        self.blobs.insert(digest, Blob { sha256: Some(fingerprint), data });
        digest
    }

    fn write(&self, tree: &Tree) -> Result<(Vec<u8>, WriteReport), WriteError> {
        let mut bytes = Vec::new();
        let devices = self.list();
        let own_blocks = u32::try_from(self.bytes[0].len() / BLOCK).unwrap();
        let data = Data { devices: &devices, own_blocks, blobs: &self.blobs, fingerprints: true };
        let report = write_data(tree, &data, &mut bytes)?;
        assert_eq!(report.bytes, bytes.len() as u64);
        bytes.extend_from_slice(&self.bytes[0]);
        Ok((bytes, report))
    }
}

fn meta(mode: u32, rng: &mut Rng) -> Meta {
    let seconds = i64::try_from(1_700_000_000 + rng.below(3)).unwrap();
    let owner = |rng: &mut Rng| rng.pick(&[0, 1, 1000, 65_535, 65_536, 3_000_000_000]);
    Meta { mode, uid: owner(rng), gid: owner(rng), mtime: seconds, mtime_nsec: 0 }
}

/// A tree with files of many sizes, some in pieces, some with holes, some twice, and what else a
/// tree has. Also every file's content by path.
fn tree_of(seed: u64, lz4: Lz4) -> (Tree, Devices, HashMap<Vec<u8>, Vec<u8>>) {
    let mut rng = Rng::new(seed);
    let mut tree = Tree::new(Meta { mode: 0o755, ..meta(0, &mut rng) });
    let count = 1 + rng.index(4);
    let mut devices = Devices::new(count);
    let mut files = HashMap::new();
    let mut dirs = vec![(tree.root(), Vec::new())];
    for i in 0..3 + rng.index(5) {
        let (parent, mut path) = dirs[rng.index(dirs.len())].clone();
        let name = format!("dir{i}");
        let made = tree
            .insert(parent, name.as_bytes(), meta(0o755, &mut rng), Content::Directory)
            .unwrap();
        path.extend_from_slice(format!("/{name}").as_bytes());
        dirs.push((made, path));
    }
    let sizes =
        [1, 5, 100, 4095, 4096, 4097, 8192, 20_000, 65_536, 100_001, 1 << 20, (3 << 20) + 17];
    let mut known: Vec<([u8; 32], Vec<u8>)> = Vec::new();
    for i in 0..20 + rng.index(40) {
        let (parent, path) = dirs[rng.index(dirs.len())].clone();
        let name = format!("{}{i}", "f".repeat(1 + rng.index(100)));
        let (digest, content) = if !known.is_empty() && rng.below(4) == 0 {
            known[rng.index(known.len())].clone()
        } else {
            let size = rng.pick(&sizes);
            let mut content = rng.bytes(size);
            if rng.below(3) == 0 {
                for _ in 0..1 + rng.index(4) {
                    let at = rng.index(content.len() / BLOCK + 1) * BLOCK;
                    let end = content.len().min(at + BLOCK * (1 + rng.index(8)));
                    content[at.min(end)..end].fill(0);
                }
            }
            let compressed = lz4 == Lz4::All || rng.below(3) == 0;
            if compressed {
                // Noise in turn with what can be compressed.
                let (mut at, mut repeat) = (0, 1 + rng.index(50));
                while at < content.len() {
                    let end = content.len().min(at + 1 + rng.index(30_000));
                    let pattern = rng.bytes(repeat);
                    content[at..end]
                        .iter_mut()
                        .zip(pattern.iter().cycle())
                        .for_each(|(b, p)| *b = *p);
                    at = end + rng.index(20_000);
                    repeat = 1 + rng.index(50);
                }
            }
            let pieces = rng.pick(&[1, 1, 1, 2, 3, 20]);
            let digest = match compressed {
                true => {
                    let device = if lz4 == Lz4::Behind { 0 } else { rng.index(1 + count) };
                    devices.add_lz4(&content, u16::try_from(device).unwrap())
                }
                false => devices.add(&content, pieces, &mut rng),
            };
            let new = (digest, content);
            known.push(new.clone());
            new
        };
        let mode = rng.pick(&[0o644, 0o4755, 0o600]);
        let file = tree
            .insert(
                parent,
                name.as_bytes(),
                meta(mode, &mut rng),
                Content::object(content.len() as u64, &digest),
            )
            .unwrap();
        if rng.below(3) == 0 {
            let size = rng.pick(&[0, 1, 5, 300]);
            let value = rng.bytes(size);
            let attrs: [(&[u8], &[u8]); 3] = [
                (b"user.some", &value),
                // Believed by the kernel, were it kept.
                (b"trusted.erofs.fingerprint", b"sha256:00000000000000000000000000000000"),
                (b"trusted.overlay.opaque", b"y"),
            ];
            tree.set_xattrs(file, attrs).unwrap();
        }
        let path = [&path[..], b"/", name.as_bytes()].concat();
        if rng.below(5) == 0 {
            let (parent, other) = dirs[rng.index(dirs.len())].clone();
            let name = format!("link{i}");
            tree.link(parent, name.as_bytes(), file).unwrap();
            files.insert([&other[..], b"/", name.as_bytes()].concat(), content.clone());
        }
        files.insert(path, content);
    }
    let root = tree.root();
    let specials: [(&str, Content<'_>); 6] = [
        ("empty", Content::Inline(b"")),
        ("inline", Content::Inline(b"in the image itself")),
        ("symlink", Content::Symlink(b"dir0/x")),
        ("pipe", Content::Fifo),
        ("null", Content::CharDevice(0x103)),
        ("whiteout", Content::CharDevice(0)),
    ];
    for (name, content) in specials {
        tree.insert(root, name.as_bytes(), meta(0o644, &mut rng), content).unwrap();
    }
    files.insert(b"/empty".to_vec(), Vec::new());
    files.insert(b"/inline".to_vec(), b"in the image itself".to_vec());
    (tree, devices, files)
}

#[test]
fn what_is_written_reads_back() {
    let (mut flat, mut tables, mut compressed) = (0, 0, 0);
    for seed in 0..rounds("COFOLIO_DATA_TREES", 60) {
        let (tree, devices, files) = tree_of(seed, Lz4::Anywhere);
        let (bytes, _) = devices.write(&tree).unwrap();
        assert!(bytes == devices.write(&tree).unwrap().0, "seed {seed}: not the same again");
        let mut image = Image::open(&bytes[..]).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_eq!(image.superblock().devices.len(), devices.bytes.len() - 1);
        assert_eq!(image.superblock().blocks, (bytes.len() / BLOCK) as u64);
        devices.bytes.iter().skip(1).for_each(|bytes| image.add_device(&bytes[..]));
        let mut names = 0;
        let mut walk = image.walk().unwrap();
        while let Some(found) = walk.advance().unwrap_or_else(|e| panic!("seed {seed}: {e}")) {
            names += 1;
            let shown = format!("seed {seed}: {}", found.path.escape_ascii());
            let inode = tree.resolve(found.path).unwrap_or_else(|| panic!("{shown} is new"));
            assert_eq!(found.inode.mode, tree.meta(inode).mode, "{shown}");
            assert_eq!(found.inode.uid, tree.meta(inode).uid, "{shown}");
            assert_eq!(found.inode.mtime, tree.meta(inode).mtime, "{shown}");
            let Some(content) = files.get(found.path) else { continue };
            let is_lz4 = matches!(tree.content(inode), Content::External { digest: Some(digest), .. }
                if matches!(devices.blobs[digest].data, BlobData::Lz4 { .. }));
            let mut got = vec![0; content.len() + 1];
            match image.read(&found.inode, 0, &mut got) {
                Ok(len) => assert!(!is_lz4 && got[..len] == *content, "{shown}"),
                // Only the kernel and fsck.erofs read these.
                Err(error) => assert!(is_lz4, "{shown}: {error}"),
            }
            let attrs = image.xattrs(&found.inode).unwrap();
            let prints: Vec<_> =
                attrs.iter().filter(|attr| attr.name == b"trusted.erofs.fingerprint").collect();
            if matches!(tree.content(inode), Content::External { .. }) {
                let sha: [u8; 32] = sha2::Sha256::digest(content).into();
                assert_eq!(prints.len(), 1, "{shown}");
                assert_eq!(prints[0].value, [b"sha256:", &sha[..]].concat(), "{shown}");
                *match image.extent(&found.inode, 0) {
                    Ok(extent) if extent.unwrap().len == found.inode.size => &mut flat,
                    Ok(_) => &mut tables,
                    Err(_) => &mut compressed,
                } += 1;
            } else {
                assert!(prints.is_empty(), "{shown}");
            }
            assert!(!attrs.iter().any(|attr| attr.name == b"trusted.overlay.opaque"), "{shown}");
        }
        assert_eq!(names, tree.walk().count(), "seed {seed}");
    }
    assert!(flat > 0 && tables > 0 && compressed > 0);
    println!("{flat} files in one piece, {tables} in several, {compressed} compressed");
}

/// A content that is nowhere, shorter than the file, or beyond the device's end: no image, and the
/// file is named.
#[test]
fn files_without_content_are_named() {
    let mut rng = Rng::new(1);
    let mut devices = Devices::new(1);
    let digest = devices.add(&[7; 10_000], 1, &mut rng);
    let sha256 = devices.blobs[&digest].sha256;
    let mut tree = Tree::new(meta(0o755, &mut rng));
    tree.insert(tree.root(), b"file", meta(0o644, &mut rng), Content::object(10_000, &digest))
        .unwrap();
    devices.write(&tree).unwrap();
    devices.bytes[0] = vec![0; 3 * BLOCK];
    let mut refused = |data: Option<BlobData>| {
        match data {
            Some(data) => devices.blobs.insert(digest, Blob { sha256, data }),
            None => devices.blobs.remove(&digest),
        };
        let error = devices.write(&tree).unwrap_err();
        assert_eq!(error.to_string(), "/file: its content is missing or invalid on the devices");
    };
    let run = |device, block, blocks| Extent { at: Some(BlockAddr { device, block }), blocks };
    let hole = |blocks| Extent { at: None, blocks };
    refused(None);
    for runs in [
        vec![],
        vec![run(1, 1, 2)],
        vec![run(1, 1, 4)],
        vec![run(1, 2, 3)],
        vec![run(0, 1, 3)],
        vec![run(2, 0, 3)],
        vec![run(1, u32::MAX, 3)],
        vec![hole(3), hole(0)],
    ] {
        refused(Some(BlobData::Extents(runs)));
    }
    let part = |len, compressed| Pcluster { len, compressed };
    let own = |block| BlockAddr { device: 0, block };
    for (place, parts) in [
        (BlockAddr { device: 1, block: 4 }, vec![part(10_000, true)]),
        (BlockAddr { device: 2, block: 0 }, vec![part(10_000, true)]),
        (own(0), vec![]),
        (own(0), vec![part(9_999, true)]),
        (own(3), vec![part(10_000, true)]),
        (own(u32::MAX), vec![part(10_000, true)]),
        (own(0), vec![part(10_000, false)]),
        (own(0), vec![part(4096, true), part(5904, true)]),
        (own(0), vec![part(4000, false), part(6000, true)]),
        (own(0), vec![part(6000, true), part(4000, true)]),
        (own(0), vec![part(10_000, true), part(0, false)]),
    ] {
        refused(Some(BlobData::Lz4 { start: place, pclusters: parts }));
    }
}

/// An image and its devices as files.
fn files_of(dir: &Path, image: &[u8], devices: &Devices) -> (PathBuf, Vec<PathBuf>) {
    let file = dir.join("image.erofs");
    fs::write(&file, image).unwrap();
    let paths = devices.bytes.iter().enumerate().skip(1).map(|(i, bytes)| {
        let path = dir.join(format!("device{i}"));
        fs::write(&path, bytes).unwrap();
        path
    });
    (file, paths.collect())
}

/// Makes one file of an image and its devices, for fsck.erofs, which finds no compressed content on
/// devices: they come behind the image, where they are in the address space that spans all, and the
/// image says nothing of them any more.
fn flatten(image: &Path, devices: &[Vec<u8>]) {
    let mut bytes = fs::read(image).unwrap();
    devices.iter().for_each(|device| bytes.extend_from_slice(device));
    let incompat = 1024 + 80;
    assert_ne!(bytes[incompat] & 0x08, 0, "the image has devices");
    bytes[incompat] &= !0x08;
    bytes[1024 + 86..1024 + 88].fill(0);
    fs::write(image, bytes).unwrap();
}

/// Every file below a directory has its content, or all of it but zeros at its end that are
/// `short`.
fn compare(top: &Path, files: &HashMap<Vec<u8>, Vec<u8>>, short: bool, shown: &str) {
    for (path, content) in files {
        let file = top.join(OsStr::from_bytes(&path[1..]));
        let shown = format!("{shown}: {}", path.escape_ascii());
        let mut found = fs::read(&file).unwrap_or_else(|e| panic!("{shown}: {e}"));
        if short && found.len() < content.len() {
            found.resize(content.len(), 0);
        }
        let same = found.iter().zip(content).take_while(|(a, b)| a == b).count();
        let (found_len, len) = (found.len(), content.len());
        assert!(found == *content, "{shown}: {found_len} bytes for {len}, the first {same} right");
    }
}

#[test]
fn fsck_erofs_checks_and_extracts_them() {
    let test = "fsck_erofs_checks_and_extracts_them";
    let tool = match Tool::find("COFOLIO_FSCK_EROFS", "fsck.erofs") {
        Ok(tool) => tool,
        Err(reason) => return skip(test, &reason),
    };
    if !String::from_utf8_lossy(&tool.run(&["--help"], b"").stdout).contains("--xattr-inode-digest")
    {
        return skip(test, "this fsck.erofs knows no digests");
    }
    let dir = TempDir::new("data-fsck");
    for seed in 0..rounds("COFOLIO_FSCK_TREES", 20) {
        let lz4 = if seed % 2 == 0 { Lz4::Behind } else { Lz4::All };
        let (tree, devices, files) = tree_of(seed, lz4);
        let (image, paths) = files_of(dir.path(), &devices.write(&tree).unwrap().0, &devices);
        let args: Vec<String> = match lz4 {
            Lz4::All => Vec::new(),
            _ => paths.iter().map(|path| format!("--device={}", path.display())).collect(),
        };
        if lz4 == Lz4::All {
            flatten(&image, &devices.bytes[1..]);
        }
        let check = |also: &[String]| {
            let all = [&args[..], also, &[image.display().to_string()]].concat();
            let all: Vec<&str> = all.iter().map(String::as_str).collect();
            let said = tool.run(&all, b"");
            (
                said.status.success(),
                String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned(),
            )
        };
        let digests = ["--xattr-inode-digest".to_owned()];
        let (good, said) = check(&digests);
        assert!(good, "seed {seed}: {said}");
        let out = dir.path().join("out");
        let _ = fs::remove_dir_all(&out);
        let (good, said) = check(&[format!("--extract={}", out.display())]);
        assert!(good, "seed {seed}: {said}");
        // It leaves out a hole at the end of a file.
        compare(&out, &files, true, &format!("seed {seed}"));
        // A digest that is not right is told, so the first check means something: one byte in each
        // block of the devices.
        if lz4 == Lz4::All {
            continue;
        }
        for (path, bytes) in paths.iter().zip(&devices.bytes[1..]) {
            let altered = bytes.chunks(BLOCK).flat_map(|block| {
                let mut block = block.to_vec();
                block[0] ^= 1;
                block
            });
            fs::write(path, altered.collect::<Vec<u8>>()).unwrap();
        }
        let (good, said) = check(&digests);
        assert!(!good, "seed {seed}: altered content was not noticed: {said}");
    }
}

#[test]
fn the_kernel_reads_them() {
    let test = "the_kernel_reads_them";
    if !can_mount(test) {
        return;
    }
    let dir = TempDir::new("data-kernel");
    let top = dir.path().join("mounted");
    fs::create_dir(&top).unwrap();
    for seed in 0..rounds("COFOLIO_MOUNTS", 20) {
        let (tree, devices, files) =
            tree_of(seed, if seed % 2 == 0 { Lz4::Anywhere } else { Lz4::All });
        let (image, paths) = files_of(dir.path(), &devices.write(&tree).unwrap().0, &devices);
        let options: Vec<String> =
            paths.iter().map(|path| format!("device={}", path.display())).collect();
        let options = CString::new(options.join(",")).unwrap();
        if let Err(error) = mount(&image, &top, "erofs", MountFlags::RDONLY, &*options) {
            return skip(
                test,
                &format!("this kernel mounts no image in a file with devices: {error}"),
            );
        }
        let compared = std::panic::catch_unwind(|| {
            compare(&top, &files, false, &format!("seed {seed}"));
            for visit in tree.walk() {
                let path = tree.path(visit.entry);
                let found = top.join(OsStr::from_bytes(&path[1..])).symlink_metadata().unwrap();
                assert_eq!(found.mode(), tree.meta(visit.inode).mode, "{}", path.escape_ascii());
                assert_eq!(found.uid(), tree.meta(visit.inode).uid, "{}", path.escape_ascii());
            }
        });
        unmount(&top, UnmountFlags::DETACH).unwrap();
        compared.unwrap();
    }
}
