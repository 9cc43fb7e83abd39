//! cachestat and mincore against files of which we know what is cached.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    os::fd::AsFd,
};

use cofolio_sys::cache::{FileMap, PrivateMap, cachestat, page_size};
use rustix::fs::Advice;

/// A synced file of `pages` pages and `tail` bytes, none of it cached. `None` if the filesystem
/// below cannot drop pages (tmpfs holds its files nowhere else).
fn cold_file(pages: u64, tail: u64) -> Option<File> {
    let dir = std::env::var_os("CARGO_TARGET_TMPDIR")
        .unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let mut file = tempfile::tempfile_in(dir).unwrap();
    let len = usize::try_from(pages * page_size() + tail).unwrap();
    let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    if cachestat(&file, 0, 0).unwrap().cached > 0 {
        println!("SKIP cache: the filesystem of the target directory does not drop pages");
        return None;
    }
    // Without this, one read brings in its neighbours, and the ranges below would not be exact.
    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
    Some(file)
}

fn read_page(file: &File, page: u64) {
    let mut byte = [0];
    rustix::io::pread(file.as_fd(), &mut byte, page * page_size()).unwrap();
}

#[test]
fn counts_exactly_what_was_read() {
    let Some(file) = cold_file(64, 100) else { return };
    let len = file.metadata().unwrap().len();
    let map = FileMap::new(&file, len).unwrap();
    assert_eq!(map.resident_pages().unwrap(), 0, "mapping a file must not fault it in");

    for page in [3, 4, 5, 40, 64] {
        read_page(&file, page);
    }
    assert_eq!(map.resident_pages().unwrap(), 5);
    let of_part =
        |page, pages| map.resident_pages_of(page * page_size(), pages * page_size()).unwrap();
    assert_eq!(
        [(4, 0), (4, 1), (4, 36), (4, 37), (6, 99), (99, 1)].map(|(a, b)| of_part(a, b)),
        [0, 1, 2, 3, 2, 0]
    );
    assert_eq!(cachestat(&file, 0, 0).unwrap().cached, 5);
    assert_eq!(cachestat(&file, 0, 5 * page_size()).unwrap().cached, 2, "pages 3 and 4");

    let mut resident = Vec::new();
    let mut at = 0;
    map.residency(|run| {
        for page in run {
            if page.is_resident() {
                resident.push(at);
            }
            at += 1;
        }
    })
    .unwrap();
    assert_eq!(at, 65, "64 pages and a tail");
    assert_eq!(resident, [3, 4, 5, 40, 64]);
}

#[test]
fn a_touch_through_the_mapping_caches_the_page() {
    let Some(file) = cold_file(16, 0) else { return };
    let map = FileMap::new(&file, 16 * page_size()).unwrap();
    let mut buf = [0; 3];
    assert_eq!(map.read_at(7 * page_size(), &mut buf), 3);
    let first = 7 * page_size();
    assert_eq!(buf, [first, first + 1, first + 2].map(|i| (i % 251) as u8));
    let mut hit = false;
    let mut at = 0;
    map.residency(|run| {
        for page in run {
            hit |= at == 7 && page.is_resident();
            at += 1;
        }
    })
    .unwrap();
    assert!(hit, "the touched page is resident");
}

#[test]
fn reads_stop_at_the_end_of_the_mapping() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"folio").unwrap();
    let map = FileMap::new(&file, 5).unwrap();
    let mut buf = [0; 8];
    assert_eq!(map.read_at(2, &mut buf), 3);
    assert_eq!(&buf[..3], b"lio");
    assert_eq!(map.read_at(5, &mut buf), 0);
    assert_eq!(map.read_at(u64::MAX, &mut buf), 0);
}

#[test]
fn an_empty_file_has_no_pages() {
    let file = tempfile::tempfile().unwrap();
    let map = FileMap::new(&file, 0).unwrap();
    assert!(map.is_empty());
    assert_eq!(map.resident_pages().unwrap(), 0);
    assert_eq!(map.read_at(0, &mut [0; 8]), 0);
}

#[test]
fn absurd_lengths_are_refused() {
    let file = tempfile::tempfile().unwrap();
    assert!(FileMap::new(&file, u64::MAX).is_err());
}

#[test]
fn what_is_written_to_a_private_mapping_stays_there() {
    let Some(file) = cold_file(16, 100) else { return };
    let len = file.metadata().unwrap().len();
    let mut map = PrivateMap::new(&file, len).unwrap();
    let at = 3 * page_size() + 5;
    assert_eq!(map.write_at(at, b"folio"), 5);
    let mut buf = [0; 7];
    assert_eq!(map.read_at(at - 1, &mut buf), 7);
    let byte = |at: u64| (at % 251) as u8;
    assert_eq!(buf, [byte(at - 1), b'f', b'o', b'l', b'i', b'o', byte(at + 5)]);
    let other = FileMap::new(&file, len).unwrap();
    assert_eq!(other.read_at(at, &mut buf), 7);
    assert_eq!(buf, std::array::from_fn(|i| byte(at + i as u64)));
    assert_eq!(map.write_at(len - 2, b"folio"), 2);
    assert_eq!(map.write_at(len, b"folio"), 0);
    assert_eq!(PrivateMap::new(&file, 0).unwrap().write_at(0, b"folio"), 0);
}

/// Only pages that are resident have frames, and looking for them brings no others in.
#[test]
fn frames_are_those_of_resident_pages() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP frames_are_those_of_resident_pages: needs root");
        return;
    }
    let Some(file) = cold_file(100, 7) else { return };
    let map = FileMap::new(&file, file.metadata().unwrap().len()).unwrap();
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let frames = || {
        let mut frames = Vec::new();
        map.resident_frames(&pagemap, |start, count| frames.extend(start..start + count)).unwrap();
        frames
    };
    assert_eq!(frames(), []);
    for page in [0, 3, 15, 16, 40, 100] {
        read_page(&file, page);
    }
    let found = frames();
    assert_eq!(found.len(), 6, "{found:?}");
    assert_eq!(map.resident_pages().unwrap(), 6);
    assert_eq!(frames(), found);
}
