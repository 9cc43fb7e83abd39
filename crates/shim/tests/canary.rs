//! The shim in this process, which stands for a VMM: its memory is a guest's, threads of the test are
//! vCPUs, and the test is the merger.
//!
//! Every word of the memory is known. So a page that is lost, mixed up or taken from another moment is
//! found, while it is merged under writers, direct I/O and discards.

#![cfg(feature = "preload")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, reason = "a test of raw memory")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, IntoRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cofolio_shim::file::is_immutable;
use cofolio_shim::message::{receive, send};
use cofolio_shim::protocol::{self, Head, Hello, Outcome, PAGE, Plain, Run, ZEROS, kind};

const PAGES: usize = 4096;
const WORDS: usize = PAGE / 8;

/// The guest's memory of this process. There is one: tests take turns.
struct Guest {
    start: usize,
    path: std::path::PathBuf,
    /// Private memory of the process in bytes, before and after a hundred failing HELLOs.
    failing: (usize, usize),
}

fn guest() -> MutexGuard<'static, Guest> {
    static GUEST: OnceLock<Mutex<Guest>> = OnceLock::new();
    let make = || {
        let dir = std::env::temp_dir().join(format!("cofolio-shim-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("merge");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let len = PAGES * PAGE;
        // As QEMU: first a device with an image, here one as large as the memory, and advice.
        let image = dir.join("image");
        File::create(&image).unwrap().set_len(len as u64).unwrap();
        let image = File::open(image).unwrap();
        let show = |at: usize, len: usize, flags: i32| unsafe {
            let (fd, flags) = (image.as_raw_fd(), flags | libc::MAP_SHARED);
            let at = libc::mmap(at as *mut _, len, libc::PROT_READ, flags, fd, 0);
            assert_ne!(at, libc::MAP_FAILED);
            at
        };
        unsafe {
            std::env::set_var(protocol::SOCKET, listener.into_raw_fd().to_string());
            std::env::set_var(protocol::MEMORY, len.to_string());
            assert_eq!(libc::madvise(show(0, len, 0), len, libc::MADV_DONTFORK), 0);
        }
        // Then a reservation, the memory in it at a multiple of 2 MiB, and advice.
        let start = unsafe {
            let none = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let room =
                libc::mmap(std::ptr::null_mut(), len + (2 << 20), libc::PROT_NONE, none, -1, 0);
            let start = (room as usize).next_multiple_of(2 << 20);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let fixed = none | libc::MAP_FIXED | libc::MAP_NORESERVE;
            assert_ne!(libc::mmap(start as *mut _, len, access, fixed, -1, 0), libc::MAP_FAILED);
            assert_eq!(libc::madvise(start as *mut _, len, libc::MADV_HUGEPAGE), 0);
            assert_eq!(libc::madvise(start as *mut _, len, libc::MADV_DONTFORK), 0);
            start
        };
        // The kernel refuses to watch a mapping that can never be written to.
        let last = start + len - PAGE;
        show(last, PAGE, libc::MAP_FIXED);
        let before = private_memory();
        for _ in 0..100 {
            assert_eq!(hello(&path).1.errno, libc::EPERM.unsigned_abs());
        }
        let failing = (before, private_memory());
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(last as *mut _, PAGE, access, flags | libc::MAP_NORESERVE, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::madvise(at, PAGE, libc::MADV_HUGEPAGE), 0);
            assert_eq!(libc::madvise(at, PAGE, libc::MADV_DONTFORK), 0);
        }
        Mutex::new(Guest { start, path, failing })
    };
    GUEST.get_or_init(make).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the shim where the memory is.
fn hello(path: &std::path::Path) -> (UnixStream, Hello) {
    let mut socket = UnixStream::connect(path).unwrap();
    // Otherwise the tests would hang if the shim had not found the memory.
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket.write_all(Plain::bytes(&[Head { kind: kind::HELLO, ..Head::default() }])).unwrap();
    let mut hello = [Hello::default()];
    socket.read_exact(Plain::bytes_mut(&mut hello)).unwrap();
    (socket, hello[0])
}

/// Bytes of the process's private mappings.
fn private_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

impl Guest {
    fn word(&self, page: usize, word: usize) -> &AtomicU64 {
        unsafe { &*((self.start + page * PAGE + word * 8) as *const AtomicU64) }
    }

    /// Fills all pages: the first half in tens that are the same, the last quarter with zeros.
    fn fill(&self) {
        unsafe {
            libc::madvise(self.start as *mut _, PAGES * PAGE, libc::MADV_DONTNEED);
        }
        self.fill_pages(0..PAGES);
    }

    fn fill_pages(&self, pages: Range<usize>) {
        for page in pages {
            (0..WORDS).for_each(|word| self.word(page, word).store(content(page, word), SeqCst));
        }
    }

    fn check(&self, but: impl Fn(usize) -> bool) {
        for page in (0..PAGES).filter(|page| !but(*page)) {
            for word in 0..WORDS {
                assert_eq!(
                    self.word(page, word).load(Relaxed),
                    content(page, word),
                    "{page} {word}"
                );
            }
        }
    }

    fn connect(&self) -> Merger {
        let (socket, hello) = hello(&self.path);
        assert_eq!(
            (hello.errno, hello.start, hello.len),
            (0, self.start as u64, (PAGES * PAGE) as u64)
        );
        Merger { socket }
    }

    /// Discards pages, as a balloon does.
    fn discard(&self, pages: Range<usize>) {
        let at = (self.start + pages.start * PAGE) as *mut libc::c_void;
        assert_eq!(unsafe { libc::madvise(at, pages.len() * PAGE, libc::MADV_DONTNEED) }, 0);
    }

    /// Whether every word of these pages is zero.
    fn is_zero(&self, pages: Range<usize>) -> bool {
        pages
            .flat_map(|page| (0..WORDS).map(move |word| (page, word)))
            .all(|(page, word)| self.word(page, word).load(Relaxed) == 0)
    }

    /// How many of these pages are in mappings of pools, written to since or not.
    fn mapped_from_pools(&self, pages: Range<usize>) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let pools = maps.lines().filter(|line| line.contains("/memfd:cofolio-pool"));
        let page = |address: &str| {
            usize::from_str_radix(address, 16).unwrap().saturating_sub(self.start) / PAGE
        };
        let count = |line: &str| {
            let (first, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            page(end).min(pages.end).saturating_sub(page(first).max(pages.start))
        };
        pools.map(count).sum()
    }

    /// How many pages are a file's.
    fn pooled(&self) -> usize {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0; PAGES * 8];
        pagemap.read_exact_at(&mut entries, (self.start / PAGE * 8) as u64).unwrap();
        let entry = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
        entries.chunks(8).filter(|it| entry(it) >> 61 & 5 == 5).count()
    }
}

/// What is in a word of a page. Pages of the first half are the same in tens.
fn content(page: usize, word: usize) -> u64 {
    match page {
        page if page >= PAGES / 4 * 3 => 0,
        page if page < PAGES / 2 => {
            ((page % 10 * WORDS + word) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        }
        page => ((page * WORDS + word) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// A page of a file, from a number on: the ten pages that are the same, again and again.
fn repeats(pages: usize) -> Vec<u8> {
    let word = |at: usize| content(at / WORDS, at % WORDS).to_ne_bytes();
    (0..pages * WORDS).flat_map(word).collect()
}

struct Merger {
    socket: UnixStream,
}

impl Merger {
    /// Gives the shim a pool of the ten pages that are the same, many times.
    fn pool(&mut self, number: u32, sealed: bool) -> u32 {
        let fd = unsafe { libc::memfd_create(c"cofolio-pool".as_ptr(), libc::MFD_ALLOW_SEALING) };
        let file = unsafe { File::from_raw_fd(fd) };
        file.write_all_at(&repeats(1000), 0).unwrap();
        if sealed {
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
            assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) }, 0);
        }
        let read = File::open(format!("/proc/self/fd/{fd}")).unwrap();
        self.send_file(Head { kind: kind::POOL, count: 1000, argument: number, reserved: 0 }, &read)
    }

    fn send_file(&mut self, head: Head, file: &File) -> u32 {
        send(&self.socket, head, Some(file.as_fd())).unwrap();
        let mut errno = [0_u32];
        self.socket.read_exact(Plain::bytes_mut(&mut errno)).unwrap();
        errno[0]
    }

    /// The numbers of the pools that the shim has.
    fn pools(&mut self) -> Vec<u32> {
        let head = Head { kind: kind::POOLS, ..Head::default() };
        self.socket.write_all(Plain::bytes(&[head])).unwrap();
        let mut count = [0_u32];
        self.socket.read_exact(Plain::bytes_mut(&mut count)).unwrap();
        let one = |_| receive(&self.socket).unwrap().0.argument;
        (0..count[0]).map(one).collect()
    }

    fn forget(&mut self, number: u32) {
        let head = Head { kind: kind::FORGET, argument: number, ..Head::default() };
        self.socket.write_all(Plain::bytes(&[head])).unwrap();
        let mut errno = [0_u32];
        self.socket.read_exact(Plain::bytes_mut(&mut errno)).unwrap();
    }

    fn ask(&mut self, kind: u32, runs: &[Run]) -> Vec<Outcome> {
        let count = u32::try_from(runs.len()).unwrap();
        self.socket.write_all(Plain::bytes(&[Head { kind, count, ..Head::default() }])).unwrap();
        self.socket.write_all(Plain::bytes(runs)).unwrap();
        let mut outcomes = vec![Outcome::default(); runs.len()];
        self.socket.read_exact(Plain::bytes_mut(&mut outcomes)).unwrap();
        outcomes
    }
}

fn run(page: usize, pool: u32, pool_page: u32, pages: u32) -> Run {
    Run { page: page as u64, pool, pool_page, pages, reserved: 0 }
}

/// Runs over all pages that are the same, and all zeros.
fn all_runs(pool: u32) -> Vec<Run> {
    let same = (0..PAGES / 2 - 256).step_by(250).map(|page| run(page, pool, page as u32 % 10, 250));
    let zeros = (PAGES / 4 * 3..PAGES).step_by(256).map(|page| run(page, ZEROS, 0, 256));
    same.chain(zeros).collect()
}

fn merged(outcomes: &[Outcome]) -> u32 {
    outcomes.iter().map(Outcome::count).sum()
}

/// The shim took the first range of the right length for the guest's memory. QEMU gives advice
/// about images before, and a machine with an image as large as its memory was never merged.
#[test]
fn an_image_as_large_as_the_memory_is_not_taken_for_it() {
    let guest = guest();
    guest.fill();
    drop(guest.connect());
}

/// Each HELLO that failed left a mapping of 1 MiB behind. The merger tries again every now and
/// then.
#[test]
fn a_failing_hello_leaves_nothing_behind() {
    let guest = guest();
    let (before, after) = guest.failing;
    assert!(after < before + (50 << 20), "{before} {after}");
    drop(guest.connect());
}

#[test]
fn pages_are_merged_and_broken_by_writes() {
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(1, true), 0);
    let outcomes = merger.ask(kind::MERGE, &all_runs(1));
    assert!(outcomes.iter().all(|outcome| outcome.errno == 0), "{outcomes:?}");
    let count = merged(&outcomes) as usize;
    assert!(count >= PAGES / 2 - 256 - 250 + PAGES / 4, "{count} {outcomes:?}");
    guest.check(|_| false);
    assert!(guest.pooled() >= 1500, "{}", guest.pooled());
    // Writes are this guest's alone.
    for page in (0..1000).step_by(7) {
        guest.word(page, 3).store(99, Relaxed);
    }
    guest.check(|page| page < 1000 && page % 7 == 0);
    for page in (0..1000).step_by(7) {
        assert_eq!(guest.word(page, 3).load(Relaxed), 99);
        guest.word(page, 3).store(content(page, 3), Relaxed);
    }
    guest.check(|_| false);
}

/// A hash that is the same by chance, or a merger that was broken into.
#[test]
fn a_merger_that_lies_changes_nothing() {
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(2, false), libc::EINVAL.unsigned_abs(), "it is not sealed");
    assert_eq!(merger.pool(2, true), 0);
    let outcomes = merger.ask(
        kind::MERGE,
        &[
            run(1, 2, 0, 200),
            run(PAGES / 2, 2, 0, 100),
            run(PAGES / 2, ZEROS, 0, 100),
            run(PAGES - 10, ZEROS, 0, 11),
            run(0, 2, 990, 11),
            run(0, 77, 0, 1),
            run(0, 2, 0, 0),
            run(0, 2, 0, 257),
            run(usize::MAX / 2, 2, 0, 1),
        ],
    );
    assert_eq!(merged(&outcomes), 0);
    assert!(outcomes[..3].iter().all(|it| it.errno == 0 && it.changed > 0), "{outcomes:?}");
    assert!(outcomes[3..].iter().all(|it| it.errno == libc::EINVAL.unsigned_abs()), "{outcomes:?}");
    guest.check(|_| false);
    // One page of a run is another one: the others are merged.
    guest.word(55, 0).store(1, Relaxed);
    let outcomes = merger.ask(kind::MERGE, &[run(0, 2, 0, 100)]);
    assert_eq!((merged(&outcomes), outcomes[0].changed), (99, 1));
    assert!(!outcomes[0].is_merged(55) && outcomes[0].is_merged(54));
    guest.check(|page| page == 55);
    assert_eq!(guest.word(55, 0).load(Relaxed), 1);
}

/// A balloon discards a pool's page that was written to: the kernel alone would bring back the pool's
/// content where the guest expects zeros.
#[test]
fn discarded_pages_are_zeros() {
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(3, true), 0);
    merger.ask(kind::MERGE, &all_runs(3));
    guest.word(20, 5).store(7, Relaxed);
    guest.discard(10..110);
    guest.discard(PAGES / 2 - 5..PAGES / 2 + 5);
    let is_gone =
        |page: usize| (10..110).contains(&page) || (PAGES / 2 - 5..PAGES / 2 + 5).contains(&page);
    for page in (0..PAGES).filter(|page| is_gone(*page)) {
        assert!((0..WORDS).all(|word| guest.word(page, word).load(Relaxed) == 0), "{page}");
    }
    guest.check(is_gone);
    // They can be merged again, once they have a content.
    for page in 10..110 {
        (0..WORDS).for_each(|word| guest.word(page, word).store(content(page, word), Relaxed));
    }
    assert_eq!(merged(&merger.ask(kind::MERGE, &[run(10, 3, 0, 100)])), 100);
    guest.check(|page| (PAGES / 2 - 5..PAGES / 2 + 5).contains(&page));
}

/// Without it a page that was written to once could never be merged again.
#[test]
fn broken_pages_are_converted_and_merged_again() {
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(4, true), 0);
    merger.ask(kind::MERGE, &all_runs(4));
    for page in 100..120 {
        guest.word(page, 1).store(5, Relaxed);
        guest.word(page, 1).store(content(page, 1), Relaxed);
    }
    let refused = merger.ask(kind::MERGE, &[run(100, 4, 0, 20)]);
    assert_eq!((merged(&refused), refused[0].errno), (0, libc::EINVAL.unsigned_abs()));
    assert_eq!(merged(&merger.ask(kind::CONVERT, &[run(100, 0, 0, 20)])), 20);
    guest.check(|_| false);
    assert_eq!(merged(&merger.ask(kind::MERGE, &[run(100, 4, 0, 20)])), 20);
    guest.check(|_| false);
    assert_eq!(merged(&merger.ask(kind::CONVERT, &[run(PAGES / 2, 0, 0, 20)])), 0);
}

/// The kernel maps its page of zeros in one mapping at a time, and pages that were converted are a
/// mapping of their own. Runs of zeros across its ends were refused again and again.
#[test]
fn zeros_in_several_mappings_are_merged() {
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(8, true), 0);
    assert_eq!(merged(&merger.ask(kind::MERGE, &[run(100, 8, 0, 20)])), 20);
    assert_eq!(merged(&merger.ask(kind::CONVERT, &[run(100, 0, 0, 20)])), 20);
    for page in 90..130 {
        (0..WORDS).for_each(|word| guest.word(page, word).store(0, Relaxed));
    }
    let outcomes = merger.ask(kind::MERGE, &[run(90, ZEROS, 0, 40)]);
    assert_eq!((merged(&outcomes), outcomes[0].errno), (40, 0));
    assert!((90..130).all(|page| guest.word(page, 9).load(Relaxed) == 0));
    guest.check(|page| (90..130).contains(&page));
}

/// A new merger must know the pools of an earlier one: otherwise it could not merge pages with
/// them.
#[test]
fn a_merger_finds_the_pools_of_an_earlier_one() {
    let guest = guest();
    let mut merger = guest.connect();
    for number in merger.pools() {
        merger.forget(number);
    }
    assert_eq!(merger.pools(), []);
    assert_eq!((merger.pool(11, true), merger.pool(12, true)), (0, 0));
    drop(merger);
    let mut merger = guest.connect();
    let mut found = merger.pools();
    found.sort_unstable();
    assert_eq!(found, [11, 12]);
    merger.forget(11);
    assert_eq!(merger.pools(), [12]);
}

/// A daemon can be killed at any moment: in the middle of a request, or while it waits for the
/// answer.
#[test]
fn a_merger_can_be_killed_between_any_two_steps() {
    let guest = guest();
    guest.fill();
    assert_eq!(guest.connect().pool(13, true), 0);
    let runs = [run(0, 13, 0, 200), run(300, 13, 0, 100), run(PAGES - 256, ZEROS, 0, 256)];
    let head = Head { kind: kind::MERGE, count: 3, ..Head::default() };
    let request = [Plain::bytes(&[head]), Plain::bytes(&runs)].concat();
    for length in 1..=request.len() {
        let mut merger = guest.connect();
        merger.socket.write_all(&request[..length]).unwrap();
        drop(merger);
    }
    // The next one is answered when all of these are done. The request that was whole is carried
    // out, whether anybody waits for the answer or not.
    drop(guest.connect());
    guest.check(|_| false);
    assert!(guest.pooled() >= 300, "{}", guest.pooled());
    // In the middle of converting and of giving a pool, as well.
    for kind in [kind::CONVERT, kind::POOL, kind::FORGET, kind::POOLS, 99] {
        let mut merger = guest.connect();
        let head = Head { kind, count: 1, argument: 14, reserved: 0 };
        merger.socket.write_all(Plain::bytes(&[head])).unwrap();
    }
    assert_eq!(merged(&guest.connect().ask(kind::CONVERT, &[run(0, 0, 0, 200)])), 200);
    guest.check(|_| false);
}

/// A page is only replaced by a file that nobody can change. Files of an image are immutable.
#[test]
fn pages_of_an_immutable_file_are_merged() {
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("a.segment");
    std::fs::write(&path, repeats(1000)).unwrap();
    let file = File::open(&path).unwrap();
    let head = |number| Head { kind: kind::POOL, count: 1000, argument: number, reserved: 0 };
    assert_eq!(merger.send_file(head(15), &file), libc::EINVAL.unsigned_abs());
    let make_immutable = |is_immutable: bool| unsafe {
        let (fd, mut flags) = (file.as_raw_fd(), 0 as libc::c_long);
        libc::ioctl(fd, libc::FS_IOC_GETFLAGS as _, &raw mut flags);
        let flags = if is_immutable { flags | 0x10 } else { flags & !0x10 };
        libc::ioctl(fd, libc::FS_IOC_SETFLAGS as _, &raw const flags) == 0
    };
    if !(make_immutable(true) && is_immutable(&file)) {
        make_immutable(false);
        println!("SKIP pages_of_an_immutable_file_are_merged: nothing can be made immutable here");
        return;
    }
    let given = merger.send_file(head(15), &file);
    let outcomes = merger.ask(kind::MERGE, &[run(0, 15, 0, 250), run(500, 15, 0, 250)]);
    guest.check(|_| false);
    // userfaultfd takes pages of pools, but not of files on disk.
    let back = merger.ask(kind::CONVERT, &[run(0, 0, 0, 250)]);
    let discarded =
        unsafe { libc::madvise(guest.start as *mut libc::c_void, 250 * PAGE, libc::MADV_DONTNEED) };
    guest.check(|page| page < 250);
    let is_gone = (0..250).all(|page| guest.word(page, 9).load(Relaxed) == 0);
    merger.forget(15);
    assert!(make_immutable(false));
    assert_eq!((given, merged(&outcomes)), (0, 500), "{outcomes:?}");
    assert_eq!(back[0].errno, libc::EINVAL.unsigned_abs());
    assert_eq!((discarded, is_gone), (0, true));
}

/// The numbers of a generator, each half as long as its state.
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

/// vCPUs write to pages while these are merged, converted and discarded, and see what they wrote.
///
/// The test could not fail before: pages that had changed left runs partly merged. Such a run can
/// neither be merged nor converted as a whole, so after some rounds only zeros were merged, to
/// which nobody wrote. Nothing was discarded.
#[test]
fn no_write_is_lost() {
    const GROUP: usize = 16;
    // Few pages, so that there is often a writer where one is merged.
    const SAME: usize = 128;
    const ZERO: usize = 64;
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(5, true), 0);
    let counter = || AtomicUsize::new(0);
    let (stop, wrong, writes, discarded) =
        (AtomicBool::new(false), counter(), counter(), counter());
    // vCPUs share a group of pages. The balloon has it alone: a guest does not use free pages.
    let groups: Vec<RwLock<()>> = (0..PAGES / GROUP).map(|_| RwLock::new(())).collect();
    // Pages that are the same, and zeros.
    let any = |number: usize| match number % (SAME + ZERO) {
        page if page < SAME => page,
        page => page - SAME + PAGES - ZERO,
    };
    let (mut same, mut changed, mut zeros, mut converted) = (0, 0, 0, 0);
    let is_enough = |same, changed, zeros, converted, discarded| {
        same >= 40_000 && changed >= 200 && zeros >= 2000 && converted >= 40_000 && discarded >= 500
    };
    std::thread::scope(|scope| {
        let (stop, wrong, writes, discarded) = (&stop, &wrong, &writes, &discarded);
        let (guest, groups, any) = (&*guest, &groups, &any);
        for thread in 0..3_usize {
            scope.spawn(move || {
                let mut state = thread as u64;
                while !stop.load(Relaxed) {
                    let first = any(next(&mut state)) / GROUP * GROUP;
                    let _shared = groups[first / GROUP].read().unwrap();
                    // A word of its own in every page: the others are somebody else's.
                    let swap = |page, value| guest.word(page, 10 + thread).swap(value, SeqCst);
                    let before = |page| content(page, 10 + thread);
                    let pages = first..first + 1 + next(&mut state) % GROUP;
                    let value = state;
                    let found = pages.clone().filter(|page| swap(*page, value) != before(*page));
                    wrong.fetch_add(found.count(), Relaxed);
                    // Here pages are found changed.
                    if next(&mut state).is_multiple_of(8) {
                        std::thread::yield_now();
                    }
                    let kept = pages.clone().filter(|page| swap(*page, before(*page)) != value);
                    wrong.fetch_add(kept.count(), Relaxed);
                    writes.fetch_add(pages.len(), Relaxed);
                }
            });
        }
        scope.spawn(move || {
            let mut state = 7;
            while !stop.load(Relaxed) {
                let first = any(next(&mut state));
                let end = first + 1 + next(&mut state) % (GROUP - first % GROUP);
                let _alone = groups[first / GROUP].write().unwrap();
                discarded.fetch_add(guest.mapped_from_pools(first..end), Relaxed);
                guest.discard(first..end);
                wrong.fetch_add(usize::from(!guest.is_zero(first..end)), Relaxed);
                guest.fill_pages(first..end);
            }
        });
        let began = Instant::now();
        let runs = |pages: Range<usize>, pool| {
            let run = move |page| run(page, pool, page as u32 % 10, GROUP as u32);
            pages.step_by(GROUP).map(run).collect::<Vec<_>>()
        };
        let (all, last) = (runs(0..SAME, 5), runs(PAGES - ZERO..PAGES, ZEROS));
        while !is_enough(same, changed, zeros, converted, discarded.load(Relaxed))
            && began.elapsed() < Duration::from_secs(120)
        {
            let outcomes = merger.ask(kind::MERGE, &all);
            same += merged(&outcomes);
            changed += outcomes.iter().map(|it| u32::from(it.changed)).sum::<u32>();
            zeros += merged(&merger.ask(kind::MERGE, &last));
            let outcomes = merger.ask(kind::CONVERT, &all);
            converted += merged(&outcomes);
            // Of a run that is partly merged, each page by itself. So all are free in the next
            // round.
            let refused = all.iter().zip(&outcomes).filter(|(_, outcome)| outcome.errno != 0);
            let page = |(it, _): (&Run, _)| {
                (it.page as usize..).take(GROUP).map(|page| run(page, 0, 0, 1))
            };
            let pages: Vec<Run> = refused.flat_map(page).collect();
            converted += merged(&merger.ask(kind::CONVERT, &pages));
        }
        stop.store(true, SeqCst);
    });
    let (writes, discarded) = (writes.into_inner(), discarded.into_inner());
    let done = format!(
        "{writes} writes, {same} merged pages, {changed} changed ones, {zeros} of zeros, \
         {converted} converted, {discarded} discarded from pools"
    );
    println!("   {done}");
    assert_eq!(wrong.into_inner(), 0, "{done}");
    assert!(is_enough(same, changed, zeros, converted, discarded), "{done}");
    guest.check(|_| false);
}

/// A device, or the kernel for it, writes to pages that it has pinned. A merge that took such a page away
/// would lose what it writes.
///
/// The test could not fail before: pages were merged in its first round only. It asked for the
/// conversion of each run's first page, so that later rounds found all runs partly merged, which
/// the shim refuses as a whole. Here each thread discards its pages before it reads into them, as a
/// balloon does. The merger converts no page of a machine whose VMM can pin pages.
#[test]
fn direct_io_into_pages_is_never_lost() {
    const GROUP: usize = 64;
    const BLOCKS: usize = 256;
    const THREADS: usize = 2;
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(6, true), 0);
    // A file with another content for each page, read past the page cache into the guest's memory.
    let path = guest.path.with_file_name("disk");
    let mut file = File::create(&path).unwrap();
    for block in 0..BLOCKS {
        file.write_all(&(block as u64 + 1).to_ne_bytes().repeat(WORDS)).unwrap();
    }
    drop(file);
    use std::os::unix::fs::OpenOptionsExt as _;
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
    let Ok(direct) = direct else {
        println!(
            "SKIP direct_io_into_pages_is_never_lost: no direct I/O where temporary files are"
        );
        return;
    };
    let (stop, lost) = (AtomicBool::new(false), AtomicUsize::new(0));
    // Held while pages are discarded and filled: those that are absent would count as busy.
    let groups: Vec<Mutex<()>> = (0..2 * THREADS).map(|_| Mutex::new(())).collect();
    let (mut same, mut busy) = (0, 0);
    let is_enough = |same, busy| same >= 40_000 && busy >= 10_000;
    std::thread::scope(|scope| {
        let (stop, lost, guest, direct, groups) = (&stop, &lost, &*guest, &direct, &groups);
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut state = thread as u64;
                while !stop.load(Relaxed) {
                    let group = 2 * thread + next(&mut state) % 2;
                    let pages = group * GROUP..(group + 1) * GROUP;
                    let whole = groups[group].lock().unwrap();
                    guest.discard(pages.clone());
                    guest.fill_pages(pages.clone());
                    drop(whole);
                    let block = next(&mut state) % (BLOCKS - GROUP);
                    let at = (guest.start + pages.start * PAGE) as *mut libc::c_void;
                    let (fd, offset) = (direct.as_raw_fd(), (block * PAGE) as libc::off_t);
                    let read = unsafe { libc::pread(fd, at, GROUP * PAGE, offset) };
                    assert_eq!(read, (GROUP * PAGE) as isize);
                    for (page, block) in pages.clone().zip(block as u64 + 1..) {
                        let is_lost = |word| guest.word(page, word).load(SeqCst) != block;
                        lost.fetch_add(usize::from((0..WORDS).any(is_lost)), Relaxed);
                    }
                    // Equal to the pool's again, so that it is merged.
                    guest.fill_pages(pages);
                }
            });
        }
        let began = Instant::now();
        while !is_enough(same, busy) && began.elapsed() < Duration::from_secs(120) {
            for (group, whole) in groups.iter().enumerate() {
                let first = group * GROUP;
                let run = run(first, 6, first as u32 % 10, GROUP as u32);
                let _whole = whole.lock().unwrap();
                let [outcome] = merger.ask(kind::MERGE, &[run])[..] else { unreachable!() };
                same += outcome.count();
                busy += u32::from(outcome.busy);
            }
        }
        stop.store(true, SeqCst);
    });
    println!("   {same} merged pages, {busy} pinned ones");
    assert_eq!(lost.into_inner(), 0, "{same} merged pages, {busy} pinned ones");
    assert!(is_enough(same, busy), "{same} merged pages, {busy} pinned ones");
    guest.check(|_| false);
}

/// At the limit of mappings every mmap of a process fails. Nothing may be lost then.
///
/// It was never shown that a discard was refused there. And the test took the mappings away from
/// all tests of this process, of which some failed to start; so it has a process of its own.
#[test]
fn nothing_is_lost_at_the_limit_of_mappings() {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--ignored", "--test-threads", "1", "at_the_limit_of_mappings"]);
    let output = command.output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

#[test]
#[ignore = "worker: started by nothing_is_lost_at_the_limit_of_mappings"]
fn at_the_limit_of_mappings() {
    let guest = guest();
    guest.fill();
    let mut merger = guest.connect();
    assert_eq!(merger.pool(7, true), 0);
    // Mappings that the kernel cannot join.
    let mut taken = Vec::new();
    let take = |taken: &mut Vec<_>| loop {
        let access = if taken.len() % 2 == 0 { libc::PROT_READ } else { libc::PROT_NONE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            break;
        }
        taken.push(at);
    };
    take(&mut taken);
    let outcomes = merger.ask(
        kind::MERGE,
        &(0..2000).step_by(20).map(|page| run(page, 7, 0, 10)).collect::<Vec<_>>(),
    );
    assert!(outcomes.iter().any(|it| it.errno == libc::ENOMEM.unsigned_abs()), "{:?}", outcomes[0]);
    // With a few left, some succeed.
    for at in taken.drain(..20) {
        unsafe { libc::munmap(at, PAGE) };
    }
    let outcomes = merger.ask(
        kind::MERGE,
        &(0..2000).step_by(20).map(|page| run(page, 7, 0, 10)).collect::<Vec<_>>(),
    );
    assert_eq!(outcomes[0].count(), 10, "{:?}", outcomes[0]);
    take(&mut taken);
    // The shim cannot map anonymous memory there, so it writes zeros: to pages of the pool that are
    // still mapped.
    guest.discard(0..15);
    let kept = guest.mapped_from_pools(0..15);
    let is_zero = guest.is_zero(0..15);
    // Later it can.
    taken.drain(..).for_each(|at| _ = unsafe { libc::munmap(at, PAGE) });
    guest.word(3, 3).store(3, Relaxed);
    guest.discard(0..15);
    assert_eq!((kept, is_zero), (10, true));
    assert_eq!((guest.mapped_from_pools(0..15), guest.is_zero(0..15)), (0, true));
    guest.check(|page| page < 15);
}
