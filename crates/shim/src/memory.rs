//! The guest's memory: merges its pages with pools, and undoes it.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::file::is_immutable;
use crate::protocol::{Outcome, PAGE, RUN_PAGES_MAX, Run, ZEROS};
use crate::uffd::{MISSING, Uffd, WRITE_PROTECT};

/// Tries of a move that the kernel asks to repeat (`EAGAIN`).
const TRIES_MAX: u32 = 1000;

/// A guest's memory that is prepared for merging.
#[derive(Debug)]
pub(crate) struct Memory {
    start: usize,
    pages: usize,
    uffd: Uffd,
    /// Address at which pages are compared. Nobody else knows it.
    stash: usize,
    /// A bit for each page: whether a pool is mapped there.
    pooled: Vec<u64>,
    pools: HashMap<u32, Pool>,
    /// Advice that the VMM gave for all of the memory (`MADV_HUGEPAGE`, …). New mappings get it as
    /// well.
    advice: Vec<i32>,
}

#[derive(Debug)]
struct Pool {
    file: OwnedFd,
    /// Mapped for reading.
    start: usize,
    pages: usize,
}

/// Says something on the VMM's standard error, if anybody still reads it: `eprintln` would panic.
pub(crate) fn complain(what: &str) {
    let _ = writeln!(io::stderr(), "cofolio-shim: {what}");
}

/// Makes a mapping.
///
/// # Safety
/// With `MAP_FIXED` in `flags` it replaces every mapping at its addresses; no reference to them may
/// exist.
unsafe fn map(
    address: usize,
    len: usize,
    write: bool,
    flags: i32,
    file: Option<(&OwnedFd, usize)>,
) -> io::Result<usize> {
    let protection = if write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
    let (fd, offset) = file.map_or((-1, 0), |(file, offset)| (file.as_raw_fd(), offset));
    let offset =
        libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the caller's promise.
    let at = unsafe { libc::mmap(address as *mut _, len, protection, flags, fd, offset) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at as usize) }
}

/// The system call. The symbol `madvise` is that of this library.
///
/// # Safety
/// As madvise(2): with `MADV_DONTNEED` nobody may need the content.
pub(crate) unsafe fn advise(address: usize, len: usize, advice: i32) -> i32 {
    // SAFETY: the caller's promise.
    let done = unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) };
    i32::try_from(done).unwrap_or(-1)
}

const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_NORESERVE;

impl Memory {
    /// Prepares the memory of a guest. Nothing changes for the guest until the merger scans.
    pub(crate) fn new(start: usize, len: usize, advice: Vec<i32>) -> io::Result<Self> {
        let uffd = Uffd::moving()?;
        let size = RUN_PAGES_MAX * PAGE;
        // SAFETY: the kernel chooses the address.
        let stash = unsafe { map(0, size, true, PRIVATE | libc::MAP_ANONYMOUS, None)? };
        // SAFETY: advice about memory that has no content yet.
        unsafe { advise(stash, size, libc::MADV_NOHUGEPAGE) };
        let registered = uffd.register(stash, size, MISSING);
        if let Err(error) = registered.and_then(|()| uffd.register(start, len, WRITE_PROTECT)) {
            // SAFETY: nobody knows the stash yet.
            unsafe { libc::munmap(stash as *mut _, size) };
            return Err(error);
        }
        let pages = len / PAGE;
        let pooled = vec![0; pages.div_ceil(64)];
        Ok(Self { start, pages, uffd, stash, pooled, pools: HashMap::new(), advice })
    }

    /// Address and bytes.
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.start, self.pages * PAGE)
    }

    /// Keeps a pool, or a file of an image. Refuses files that somebody could write to after the
    /// comparison: it must be sealed, or immutable.
    pub(crate) fn keep_pool(&mut self, number: u32, pages: usize, file: OwnedFd) -> io::Result<()> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let len = pages.checked_mul(PAGE).ok_or_else(invalid)?;
        let is_whole = fstat(&file)?.st_size == i64::try_from(len).map_err(|_| invalid())?;
        if !is_whole || !never_changes(&file) {
            return Err(invalid());
        }
        // SAFETY: the kernel chooses the address.
        let start = unsafe { map(0, len, false, libc::MAP_SHARED, Some((&file, 0)))? };
        if let Some(old) = self.pools.insert(number, Pool { file, start, pages }) {
            old.unmap();
        }
        Ok(())
    }

    /// The pools: number, pages, descriptor.
    pub(crate) fn pools(&self) -> impl ExactSizeIterator<Item = (u32, usize, &OwnedFd)> {
        self.pools.iter().map(|(number, pool)| (*number, pool.pages, &pool.file))
    }

    /// Gives a pool up. What is mapped of it in the guest's memory stays.
    pub(crate) fn forget_pool(&mut self, number: u32) {
        if let Some(pool) = self.pools.remove(&number) {
            pool.unmap();
        }
    }

    /// Merges a run.
    pub(crate) fn merge(&mut self, run: &Run) -> Outcome {
        let mut outcome = Outcome::default();
        let Some((first, count)) = self.range(run).filter(|range| self.is_free(*range)) else {
            outcome.errno = libc::EINVAL.unsigned_abs();
            return outcome;
        };
        let pool = match self.pools.get(&run.pool) {
            Some(pool) if run.pool_page as usize + count <= pool.pages => {
                Some(pool.start + run.pool_page as usize * PAGE)
            }
            _ if run.pool == ZEROS => None,
            _ => {
                outcome.errno = libc::EINVAL.unsigned_abs();
                return outcome;
            }
        };
        let (start, len) = (self.start + first * PAGE, count * PAGE);
        // From here on a thread that touches an absent page waits.
        if let Err(error) = self.uffd.register(start, len, MISSING | WRITE_PROTECT) {
            // The first of several mappings may be registered, and threads would wait there for
            // ever. The kernel unregisters them in the same order, and splits none of them again.
            let _ = self.uffd.unregister(start, len);
            self.watch(start, len);
            outcome.errno = error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs();
            return outcome;
        }
        let moved = self.move_aside(start, count);
        outcome.busy = moved.iter().take(count).filter(|moved| !**moved).count() as u16;
        let mut equal = [false; RUN_PAGES_MAX];
        for page in (0..count).filter(|page| moved[*page]) {
            equal[page] = self.is_equal(page, pool.map(|pool| pool + page * PAGE));
            outcome.changed += u16::from(!equal[page]);
        }
        let mut page = 0;
        while page < count {
            let mut end = page + 1;
            while end < count && (moved[end], equal[end]) == (moved[page], equal[page]) {
                end += 1;
            }
            if moved[page] {
                let mut back = page..end;
                if equal[page] {
                    let (done, error) = self.put(run, first, page..end, pool.is_some());
                    (page..page + done).for_each(|it| outcome.merged[it / 64] |= 1 << (it % 64));
                    outcome.errno = error.map_or(outcome.errno, i32::unsigned_abs);
                    back.start += done;
                }
                self.move_back(start, back);
            }
            page = end;
        }
        // Wakes threads that wait, and ends the waiting. Mappings of a pool are not registered:
        // threads that waited there are woken by their address.
        let _ = self.uffd.wake(start, len);
        self.watch_again(first, count);
        // SAFETY: the pages that are left there are mapped from the pool now.
        unsafe { advise(self.stash, len, libc::MADV_DONTNEED) };
        outcome
    }

    fn range(&self, run: &Run) -> Option<(usize, usize)> {
        let (first, count) = (usize::try_from(run.page).ok()?, run.pages as usize);
        let fits = first.checked_add(count).is_some_and(|end| end <= self.pages);
        (fits && (1..=RUN_PAGES_MAX).contains(&count)).then_some((first, count))
    }

    /// Whether no page of a range is mapped from a pool. Such pages are not anonymous memory, and
    /// cannot be moved.
    fn is_free(&self, (first, count): (usize, usize)) -> bool {
        !(first..first + count).any(|page| self.is_pooled(page))
    }

    fn is_pooled(&self, page: usize) -> bool {
        self.pooled[page / 64] >> (page % 64) & 1 != 0
    }

    fn set_pooled(&mut self, page: usize, is_pooled: bool) {
        let bit = 1 << (page % 64);
        if is_pooled {
            self.pooled[page / 64] |= bit;
        } else {
            self.pooled[page / 64] &= !bit;
        }
    }

    /// Moves pages to another address, at which no page is. Returns the number of pages before the
    /// first one that it cannot move, and the reason.
    fn move_pages(&self, to: usize, from: usize, count: usize) -> (usize, Option<i32>) {
        in_steps(count, libc::EINVAL, |at, len| {
            // SAFETY: nobody has a reference to the guest's memory or to the stash. This crate uses
            // addresses only, and accesses of QEMU wait like those of the guest.
            unsafe { self.uffd.move_pages(to + at, from + at, len) }
        })
    }

    /// Moves pages of a run to the stash. Returns which were moved: not those that are pinned,
    /// shared with a child, or absent.
    fn move_aside(&self, start: usize, count: usize) -> [bool; RUN_PAGES_MAX] {
        let mut moved = [false; RUN_PAGES_MAX];
        let mut page = 0;
        while page < count {
            let at = page * PAGE;
            let (done, stopped) = self.move_pages(self.stash + at, start + at, count - page);
            moved[page..page + done].fill(true);
            page += done + usize::from(stopped.is_some());
        }
        moved
    }

    /// Whether a page in the stash equals this page of a pool, or is all zeros.
    fn is_equal(&self, page: usize, pool: Option<usize>) -> bool {
        // SAFETY: the page was moved there, so it is mapped, and nobody else can write to it. The
        // pool's page is mapped for reading, and sealed.
        unsafe {
            let stash = std::slice::from_raw_parts((self.stash + page * PAGE) as *const u8, PAGE);
            match pool {
                Some(pool) => stash == std::slice::from_raw_parts(pool as *const u8, PAGE),
                None => stash.iter().fold(0, |bits, byte| bits | byte) == 0,
            }
        }
    }

    /// Maps the pool or zeros in place of moved pages. Returns the number of pages, and the reason
    /// if these are not all.
    fn put(
        &mut self,
        run: &Run,
        first: usize,
        pages: std::ops::Range<usize>,
        of_pool: bool,
    ) -> (usize, Option<i32>) {
        let (start, len) = (self.start + (first + pages.start) * PAGE, pages.len() * PAGE);
        if !of_pool {
            return in_steps(pages.len(), libc::ENOENT, |at, len| self.uffd.zero(start + at, len));
        }
        let Some(pool) = self.pools.get(&run.pool) else { return (0, Some(libc::EINVAL)) };
        let offset = (run.pool_page as usize + pages.start) * PAGE;
        let flags = PRIVATE | libc::MAP_FIXED;
        // SAFETY: the addresses are the guest's memory, and empty: the pages are in the stash.
        if let Err(error) = unsafe { map(start, len, true, flags, Some((&pool.file, offset))) } {
            return (0, Some(error.raw_os_error().unwrap_or(libc::EIO)));
        }
        // SAFETY: advice that changes no content.
        unsafe { advise(start, len, libc::MADV_DONTFORK) };
        let count = pages.len();
        pages.for_each(|page| self.set_pooled(first + page, true));
        (count, None)
    }

    /// Moves pages of a run back from the stash. The guest's memory is incomplete before that, so
    /// it repeats until all are moved. The addresses are empty, so the kernel only ever asks to
    /// repeat.
    fn move_back(&self, start: usize, pages: std::ops::Range<usize>) {
        let mut page = pages.start;
        while page < pages.end {
            let at = page * PAGE;
            let (done, stopped) = self.move_pages(start + at, self.stash + at, pages.end - page);
            page += done;
            match stopped {
                None | Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {}
                // The guest must not go on with zeros in place of its data.
                Some(errno) => {
                    complain(&format!("cannot move a page back: errno {errno}"));
                    std::process::abort();
                }
            }
        }
    }

    /// Ends the waiting for pages of a range that are not mapped from a pool, and registers them
    /// again so that the merger sees writes to them.
    fn watch_again(&self, first: usize, count: usize) {
        let mut page = first;
        while page < first + count {
            let mut end = page + 1;
            let is_pooled = self.is_pooled(page);
            while end < first + count && self.is_pooled(end) == is_pooled {
                end += 1;
            }
            if !is_pooled {
                let (start, len) = (self.start + page * PAGE, (end - page) * PAGE);
                // The mappings have these ends already, so the kernel refuses it only for want of
                // memory. If the shim gave up, the guest would wait for ever.
                while self.uffd.unregister(start, len).is_err() {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                self.watch(start, len);
            }
            page = end;
        }
    }

    /// Lets the merger see writes to anonymous memory.
    ///
    /// The kernel may refuse it for want of memory. That is safe: PAGEMAP_SCAN leaves these
    /// addresses out, so the merger has no hashes of their pages, or hashes that are out of date. A
    /// merge compares the pages nevertheless, and registers them again. So an error is not
    /// reported.
    fn watch(&self, start: usize, len: usize) {
        let _ = self.uffd.register(start, len, WRITE_PROTECT);
    }

    /// Makes pages that are mapped from a pool anonymous memory again, with their content. Writers
    /// wait meanwhile.
    ///
    /// A device would write to the old place of a page that it has pinned, so the merger asks for
    /// this only where the VMM pins nothing.
    pub(crate) fn convert(&mut self, run: &Run) -> Outcome {
        let mut outcome = Outcome::default();
        let range = self.range(run);
        let pooled = |(first, count): &(usize, usize)| {
            (*first..first + count).all(|page| self.is_pooled(page))
        };
        let Some((first, count)) = range.filter(pooled) else {
            outcome.errno = libc::EINVAL.unsigned_abs();
            return outcome;
        };
        match self.make_anonymous(first, count) {
            Ok(()) => {
                (0..count).for_each(|page| outcome.merged[page / 64] |= 1 << (page % 64));
            }
            Err(error) => outcome.errno = error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs(),
        }
        outcome
    }

    fn make_anonymous(&mut self, first: usize, count: usize) -> io::Result<()> {
        let (start, len) = (self.start + first * PAGE, count * PAGE);
        let blocking = Uffd::blocking()?;
        blocking.register(start, len, WRITE_PROTECT)?;
        blocking.write_protect(start, len)?;
        // SAFETY: the kernel chooses the address.
        let copy = unsafe { map(0, len, true, PRIVATE | libc::MAP_ANONYMOUS, None)? };
        // SAFETY: both are mapped and do not overlap; no writer gets to the guest's pages.
        unsafe { std::ptr::copy_nonoverlapping(start as *const u8, copy as *mut u8, len) };
        self.advise_as_before(copy, len);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the copy replaces the guest's pages in one step, with the same content. Nobody
        // has a reference to either.
        let moved =
            unsafe { libc::mremap(copy as *mut _, len, len, flags, start as *mut libc::c_void) };
        if moved == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: nobody knows the copy.
            unsafe { libc::munmap(copy as *mut _, len) };
            let _ = blocking.unregister(start, len);
            return Err(error);
        }
        let _ = blocking.wake(start, len);
        (first..first + count).for_each(|page| self.set_pooled(page, false));
        self.watch(start, len);
        Ok(())
    }

    fn advise_as_before(&self, start: usize, len: usize) {
        for advice in self.advice.iter().chain(&[libc::MADV_DONTFORK]) {
            // SAFETY: advice that changes no content: see `preload`.
            unsafe { advise(start, len, *advice) };
        }
    }

    /// Discards the content at these addresses. Mappings of pools become anonymous memory, so that
    /// the guest reads zeros. The kernel discards the other pages.
    ///
    /// # Safety
    /// As `MADV_DONTNEED`.
    pub(crate) unsafe fn discard(&mut self, address: usize, len: usize) -> i32 {
        let end = address.saturating_add(len);
        let first = address.saturating_sub(self.start) / PAGE;
        let last = end.saturating_sub(self.start).div_ceil(PAGE).min(self.pages);
        let mut page = first;
        let mut is_refused = false;
        while page < last {
            if !self.is_pooled(page) {
                page += 1;
                continue;
            }
            let from = page;
            while page < last && self.is_pooled(page) {
                page += 1;
            }
            let (start, len) = (self.start + from * PAGE, (page - from) * PAGE);
            let flags = PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the caller does not need the content, and nobody has a reference to it.
            if unsafe { map(start, len, true, flags, None) }.is_err() {
                // At the limit of mappings even this fails. The pool stays mapped; writing makes
                // the pages private. SAFETY: the guest's memory is mapped for writing, and its
                // content is not needed.
                unsafe { std::ptr::write_bytes(start as *mut u8, 0, len) };
                is_refused = true;
                continue;
            }
            (from..page).for_each(|page| self.set_pooled(page, false));
            self.advise_as_before(start, len);
            self.watch(start, len);
        }
        if !is_refused {
            // SAFETY: the caller's promise.
            return unsafe { advise(address, len, libc::MADV_DONTNEED) };
        }
        // Where a pool is still mapped, a discard would bring its content back.
        let mut failed = 0;
        for page in (first..last).filter(|page| !self.is_pooled(*page)) {
            // SAFETY: the caller's promise.
            failed |= unsafe { advise(self.start + page * PAGE, PAGE, libc::MADV_DONTNEED) };
        }
        failed
    }
}

/// Calls the kernel for `count` pages, until all are done. It takes pages of one mapping at a time,
/// and `several` is its error for others. `call` gets the offset of the first page and a length, in
/// bytes, and returns the bytes that it has done and its error. Returns the number of pages before
/// the first one that is refused, and the error.
fn in_steps(
    count: usize,
    several: i32,
    call: impl Fn(usize, usize) -> (usize, Option<i32>),
) -> (usize, Option<i32>) {
    let (mut done, mut step, mut tries) = (0, count, 0);
    while done < count {
        let len = step.min(count - done) * PAGE;
        let (bytes, error) = call(done * PAGE, len);
        done += bytes / PAGE;
        match error {
            None => step = count,
            Some(libc::EAGAIN) if tries < TRIES_MAX => tries += 1,
            Some(errno) if errno == several && len > PAGE => step = (len / PAGE).div_ceil(2),
            Some(errno) => return (done, Some(errno)),
        }
    }
    (done, None)
}

/// Whether nobody can write to a file, or shorten it: it is sealed or immutable.
fn never_changes(file: &OwnedFd) -> bool {
    match fcntl_get_seals(file) {
        Ok(seals) => seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE),
        Err(_) => is_immutable(file),
    }
}

impl Pool {
    fn unmap(self) {
        // SAFETY: the mapping is this pool's own, and no reference to it outlives a comparison.
        unsafe { libc::munmap(self.start as *mut _, self.pages * PAGE) };
    }
}
