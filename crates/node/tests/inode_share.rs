//! Images with their data on devices, on a kernel that lets files with the same fingerprint share their page cache
//! (`inode_share`, Linux 7.0): what it shares, and what it does not. Where it comes to share more, these tests say so.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cofolio_erofs::tree::{Content, Meta, Tree};
use cofolio_erofs::write::lz4;
use cofolio_erofs::write::{Blob, BlobData, Blobs, BlockAddr, Data, Device, Extent, write_data};
use cofolio_sys::cache::FileMap;
use rustix::fs::Advice;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use sha2::Digest as _;
use tempfile::TempDir;

const PAGE: usize = 4096;
/// Pages of the content that both images have.
const COMMON: usize = 300;

/// A segment with contents one after the other.
#[derive(Default)]
struct Segment {
    bytes: Vec<u8>,
    blobs: Blobs,
}

impl Segment {
    fn add(&mut self, content: &[u8]) -> [u8; 32] {
        let block = u32::try_from(self.bytes.len() / PAGE).unwrap();
        self.bytes.extend_from_slice(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(PAGE), 0);
        let blocks = u32::try_from(content.len().div_ceil(PAGE)).unwrap();
        let fingerprint: [u8; 32] = sha2::Sha256::digest(content).into();
        let data =
            BlobData::Extents(vec![Extent { at: Some(BlockAddr { device: 1, block }), blocks }]);
        // Any name will do for a content whose object nobody asks for.
        self.blobs.insert(fingerprint, Blob { sha256: Some(fingerprint), data });
        fingerprint
    }
}

fn pages(count: usize, salt: usize) -> Vec<u8> {
    (0..count * PAGE).map(|i| u8::try_from((i / PAGE * 7 + i + salt) % 251).unwrap()).collect()
}

/// Two images on one segment: `/one` of `left` has the content of `/dir/other` of `right`, with another owner and mode.
/// And two that have `/one` compressed in themselves: `small` and `smaller`.
struct Images {
    dir: TempDir,
}

impl Images {
    fn new() -> Images {
        let dir = TempDir::new().unwrap();
        let mut segment = Segment::default();
        let common = segment.add(&pages(COMMON, 1));
        let alone = segment.add(&pages(10, 2));
        let meta = |mode, uid| Meta { mode, uid, gid: uid, mtime: 1, mtime_nsec: 0 };
        let size = |count: usize| (count * PAGE) as u64;
        let mut left = Tree::new(meta(0o755, 0));
        let root = left.root();
        left.insert(root, b"one", meta(0o644, 0), Content::object(size(COMMON), &common)).unwrap();
        left.insert(root, b"alone", meta(0o644, 0), Content::object(size(10), &alone)).unwrap();
        let mut right = Tree::new(meta(0o755, 0));
        let sub = right.insert(right.root(), b"dir", meta(0o755, 0), Content::Directory).unwrap();
        right
            .insert(sub, b"other", meta(0o755, 7), Content::object(size(COMMON), &common))
            .unwrap();
        let devices = [Device {
            tag: [b'a'; 64],
            blocks: u32::try_from(segment.bytes.len() / PAGE).unwrap(),
        }];
        for (name, tree) in [("left", &left), ("right", &right)] {
            let mut image = Vec::new();
            let data = Data {
                devices: &devices,
                own_blocks: 0,
                blobs: &segment.blobs,
                fingerprints: true,
            };
            write_data(tree, &data, &mut image).unwrap();
            fs::write(dir.path().join(name), image).unwrap();
        }
        fs::write(dir.path().join("segment"), segment.bytes).unwrap();
        let content = pages(COMMON, 1);
        let mut blocks = Vec::new();
        let pclusters = lz4::compress(&content[..], &mut blocks).unwrap();
        assert!(pclusters.len() < COMMON / 2);
        let own_blocks = u32::try_from(pclusters.len()).unwrap();
        let data = BlobData::Lz4 { start: BlockAddr { device: 0, block: 0 }, pclusters };
        let blobs = Blobs::from([(common, Blob { sha256: Some(common), data })]);
        for (name, mode) in [("small", 0o600), ("smaller", 0o644)] {
            let mut tree = Tree::new(meta(0o755, 0));
            let file = Content::object(size(COMMON), &common);
            tree.insert(tree.root(), b"one", meta(mode, 0), file).unwrap();
            let mut image = Vec::new();
            let data = Data { devices: &[], own_blocks, blobs: &blobs, fingerprints: true };
            write_data(&tree, &data, &mut image).unwrap();
            image.extend_from_slice(&blocks);
            fs::write(dir.path().join(name), image).unwrap();
        }
        // The first read of an image comes from the disk, and past the cache.
        rustix::fs::sync();
        Images { dir }
    }

    /// Mounts one of them; `None` where the kernel cannot, with the reason said.
    fn mount(&self, test: &str, image: &str, domain: &str) -> Option<Mounted> {
        let sharing = format!(",inode_share,domain_id={domain}");
        let mounted = match self.mount_at(&format!("{image}-{domain}"), image, &sharing) {
            Ok(mounted) => mounted,
            Err(error) => {
                eprintln!("SKIP {test}: this kernel does not mount with inode_share: {error}");
                return None;
            }
        };
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line =
            mounts.lines().find(|line| line.contains(&*mounted.0.to_string_lossy())).unwrap();
        // An image whose fingerprints it does not find is mounted without a word.
        assert!(line.contains("inode_share"), "{line}");
        Some(mounted)
    }

    fn mount_at(&self, name: &str, image: &str, sharing: &str) -> rustix::io::Result<Mounted> {
        let top = self.dir.path().join(name);
        fs::create_dir_all(&top).unwrap();
        let path = |name: &str| self.dir.path().join(name);
        let device = match image.starts_with("small") {
            true => String::new(),
            false => format!(",device={}", path("segment").display()),
        };
        let options = std::ffi::CString::new(format!("directio{device}{sharing}")).unwrap();
        mount(path(image), &top, "erofs", MountFlags::RDONLY, &*options)?;
        Ok(Mounted(top))
    }
}

struct Mounted(PathBuf);

impl Mounted {
    fn open(&self, name: &str) -> File {
        File::open(self.0.join(name)).unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

/// Pages of it in the cache that a mapping sees.
fn resident(file: &File) -> u64 {
    FileMap::new(file, file.metadata().unwrap().len()).unwrap().resident_pages().unwrap()
}

fn read(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Pages of it in the cache that are part of larger folios.
fn pages_of_folios(path: &Path) -> usize {
    /// `KPF_COMPOUND_HEAD` and `KPF_COMPOUND_TAIL` of `linux/kernel-page-flags.h`.
    const COMPOUND: u64 = 3 << 15;
    /// What an entry of /proc/PID/pagemap says of the page frame.
    const FRAME: u64 = (1 << 55) - 1;
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    let map = FileMap::new(&file, len).unwrap();
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    assert_eq!(map.read_at(0, &mut bytes), bytes.len());
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.ends_with(&*path.to_string_lossy())).unwrap();
    let start = u64::from_str_radix(line.split_once('-').unwrap().0, 16).unwrap();
    let (frames, flags) = ("/proc/self/pagemap", "/proc/kpageflags");
    let (frames, flags) = (File::open(frames).unwrap(), File::open(flags).unwrap());
    let entry = |file: &File, index: u64| {
        let mut entry = [0; 8];
        file.read_exact_at(&mut entry, index * 8).unwrap();
        u64::from_ne_bytes(entry)
    };
    let first = start / PAGE as u64;
    let pages = first..first + len / PAGE as u64;
    pages.filter(|page| entry(&flags, entry(&frames, *page) & FRAME) & COMPOUND != 0).count()
}

/// What this thread has had read from disks.
fn read_bytes() -> String {
    let counts = fs::read_to_string("/proc/thread-self/io").unwrap();
    counts.lines().find(|line| line.starts_with("read_bytes")).unwrap().to_owned()
}

const ALL: u64 = COMMON as u64;

#[test]
fn what_one_image_read_is_there_for_the_other() {
    let test = "what_one_image_read_is_there_for_the_other";
    let images = Images::new();
    let Some(left) = images.mount(test, "left", "secret") else { return };
    let right = images.mount(test, "right", "secret").unwrap();
    let other = right.open("dir/other");
    assert_eq!(resident(&other), 0);
    assert!(read(&left.open("one")) == pages(COMMON, 1));
    assert_eq!(resident(&other), ALL, "by read");
    assert!(read(&other) == pages(COMMON, 1));
    // Each has its own owner and mode, and what only one has is its own.
    let meta = other.metadata().unwrap();
    assert_eq!((meta.mode() & 0o777, meta.uid()), (0o755, 7));
    assert_eq!(left.open("one").metadata().unwrap().uid(), 0);
    assert!(read(&left.open("alone")) == pages(10, 2));

    // Given back through one, it is gone for the other; mapped and touched through one, it is there again.
    rustix::fs::fadvise(left.open("one"), 0, None, Advice::DontNeed).unwrap();
    assert_eq!(resident(&other), 0, "after fadvise");
    let one = left.open("one");
    let map = FileMap::new(&one, ALL * PAGE as u64).unwrap();
    let mut bytes = vec![0; COMMON * PAGE];
    assert_eq!(map.read_at(0, &mut bytes), bytes.len());
    assert!(bytes == pages(COMMON, 1));
    assert_eq!(resident(&other), ALL, "by mmap");

    // Whoever goes takes nothing from the other.
    drop((map, one));
    drop(left);
    assert_eq!(resident(&other), ALL, "after the unmount");
    let before = read_bytes();
    assert!(read(&other) == pages(COMMON, 1));
    assert_eq!(read_bytes(), before);
}

#[test]
fn domains_share_nothing() {
    let test = "domains_share_nothing";
    let images = Images::new();
    let Some(left) = images.mount(test, "left", "mine") else { return };
    let right = images.mount(test, "right", "yours").unwrap();
    assert!(read(&left.open("one")) == pages(COMMON, 1));
    let other = right.open("dir/other");
    assert_eq!(resident(&other), 0);
    assert!(read(&other) == pages(COMMON, 1));
    rustix::fs::fadvise(left.open("one"), 0, None, Advice::DontNeed).unwrap();
    assert_eq!(resident(&other), ALL);
}

#[test]
fn what_is_compressed_is_shared_with_its_like() {
    let test = "what_is_compressed_is_shared_with_its_like";
    let images = Images::new();
    let Some(small) = images.mount(test, "small", "lz4") else { return };
    let smaller = images.mount(test, "smaller", "lz4").unwrap();
    let one = smaller.open("one");
    assert_eq!(resident(&one), 0);
    assert!(read(&small.open("one")) == pages(COMMON, 1));
    assert_eq!(resident(&one), ALL);
    drop(small);
    assert!(read(&one) == pages(COMMON, 1));
}

/// The kernel's limits. Where one has gone, docs and `doctor` are to be changed.
#[test]
fn what_is_not_shared() {
    let test = "what_is_not_shared";
    let images = Images::new();
    let Some(left) = images.mount(test, "left", "limits") else { return };
    let one = left.open("one");
    // sendfile fills a cache of the image's own inode, which no mapping sees.
    let sink = File::create(images.dir.path().join("sink")).unwrap();
    let mut sent = 0;
    while let count @ 1.. = rustix::fs::sendfile(&sink, &one, None, COMMON * PAGE).unwrap() {
        sent += count;
    }
    assert_eq!(sent, COMMON * PAGE);
    assert!(fs::read(images.dir.path().join("sink")).unwrap() == pages(COMMON, 1));
    assert_eq!(resident(&one), 0, "sendfile shares on this kernel");

    // The same content compressed and not: each for itself, and right.
    let small = images.mount(test, "small", "limits").unwrap();
    assert!(read(&small.open("one")) == pages(COMMON, 1));
    assert_eq!(resident(&one), 0, "compressed and plain content share on this kernel");
    assert!(read(&one) == pages(COMMON, 1));
    assert_eq!(resident(&one), ALL);

    let direct = fs::OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
        .open(left.0.join("one"));
    let error = direct.map(|file| file.read_at(&mut [0; 1], 0)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::INVAL.raw_os_error()), "O_DIRECT");
}

/// Why files are read more slowly where they are shared (SPECIFICATION.md, "Reading from packs").
#[test]
fn what_is_shared_is_cached_in_single_pages() {
    let test = "what_is_shared_is_cached_in_single_pages";
    let images = Images::new();
    let Some(shared) = images.mount(test, "left", "folios") else { return };
    let alone = images.mount_at("left-alone", "left", "").unwrap();
    let [shared, alone] = [shared, alone].map(|mounted| {
        assert!(read(&mounted.open("one")) == pages(COMMON, 1));
        pages_of_folios(&mounted.0.join("one"))
    });
    assert!(alone > COMMON / 2, "this kernel has no large folios for EROFS: {alone}");
    assert_eq!(shared, 0, "what is shared is cached in large folios on this kernel");
}
