//! Memory and files that come and go, while the guest's kernel moves pages about.
//!
//! Other guests have half of the pages too, and a tenth are zeros. So the merger finds many duplicates,
//! and the guest writes to merged pages and frees them.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use serde_json::json;
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::content::{PAGE, Random, check, fill};
use crate::{Options, say};

/// Pages of a block of memory.
const BLOCK_PAGES: u64 = 512;
/// Numbers of pages that all guests have.
const COMMON: u64 = 4096;
/// The number of a page of zeros.
const ZEROS: u64 = u64::MAX;
/// Bytes of a file.
const FILE_BYTES: u64 = 4 << 20;
/// Where memory must begin that a device reads and writes.
const ALIGN: usize = 4096;

/// For `seconds` or until SIGTERM, with `mib` MiB of memory in `threads` threads. From SIGUSR1 to
/// SIGUSR2 it rests, with most of that memory free: the host takes no pages from a guest that
/// allocates.
pub(crate) fn run(options: &Options) -> io::Result<()> {
    let pace = Pace::new(options)?;
    // Freed memory goes back to the kernel.
    cofolio_sys::memory::return_large_blocks();
    let seed = options.number("seed", 0);
    let threads = options.number("threads", 2);
    let blocks = (options.number("mib", 64) << 20) / PAGE as u64 / BLOCK_PAGES / threads.max(1);
    say(&json!({ "event": "ready" }))?;
    let done = thread::scope(|scope| {
        let pace = &*pace;
        let mut works: Vec<_> = (0..threads)
            .map(|number| {
                let random = Random::new(seed << 8 | number);
                scope.spawn(move || memory(random, blocks.max(2), pace))
            })
            .collect();
        for (number, direct) in [(100, false), (101, true)] {
            let random = Random::new(seed << 8 | number);
            works.push(scope.spawn(move || files(random, number, direct, pace)));
        }
        works.push(scope.spawn(move || kernel(pace)));
        let mut done = Ok(());
        for work in works {
            let ended = work.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
            if ended.is_err() {
                pace.ends.store(true, Relaxed);
                done = done.and(ended);
            }
        }
        done
    });
    done?;
    say(&json!({ "event": "done", "pages": pace.checked.load(Relaxed) }))
}

/// What the threads do together.
struct Pace {
    began: Instant,
    seconds: u64,
    /// Set by a signal, and when a thread has failed.
    ends: AtomicBool,
    rests: AtomicBool,
    /// Pages that were checked.
    checked: AtomicU64,
}

impl Pace {
    fn new(options: &Options) -> io::Result<Arc<Self>> {
        let pace = Arc::new(Self {
            began: Instant::now(),
            seconds: options.number("seconds", 60),
            ends: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            checked: AtomicU64::new(0),
        });
        let mut signals = Signals::new([SIGTERM, SIGUSR1, SIGUSR2])?;
        let told = Arc::clone(&pace);
        thread::spawn(move || {
            for signal in &mut signals {
                match signal {
                    SIGTERM => told.ends.store(true, Relaxed),
                    _ => told.rests.store(signal == SIGUSR1, Relaxed),
                }
            }
        });
        Ok(pace)
    }

    fn goes_on(&self) -> bool {
        self.began.elapsed().as_secs() < self.seconds && !self.ends.load(Relaxed)
    }

    fn rests(&self) -> bool {
        self.goes_on() && self.rests.load(Relaxed)
    }

    fn sleep_at_rest(&self) {
        while self.rests() {
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A block of memory, and the number of each page's content.
struct Block {
    bytes: Vec<u8>,
    numbers: Vec<u64>,
}

fn set(page: &mut [u8], number: u64) {
    if number == ZEROS { page.fill(0) } else { fill(page, number) }
}

/// The number of a page's new content.
fn number(random: &mut Random) -> u64 {
    match random.below(10) {
        0 => ZEROS,
        1..6 => random.below(COMMON),
        // Nobody else has it.
        _ => random.below(u64::MAX - COMMON) + COMMON,
    }
}

impl Block {
    fn new(random: &mut Random) -> Self {
        let mut numbers = Vec::new();
        while (numbers.len() as u64) < BLOCK_PAGES {
            // Runs of pages, as programs have them.
            let (first, run) = (number(random), 1 + random.below(64));
            let one = |next| if first == ZEROS { ZEROS } else { first.wrapping_add(next) };
            numbers.extend((0..run).map(one));
        }
        numbers.truncate(usize::try_from(BLOCK_PAGES).unwrap_or(0));
        let mut bytes = vec![0; numbers.len() * PAGE];
        bytes.chunks_mut(PAGE).zip(&numbers).for_each(|(page, number)| set(page, *number));
        Self { bytes, numbers }
    }

    fn check(&self) -> io::Result<u64> {
        for (page, number) in self.bytes.chunks(PAGE).zip(&self.numbers) {
            if *number != ZEROS {
                check(page, *number, "memory")?;
            } else if let Some(byte) = page.iter().find(|byte| **byte != 0) {
                let what = format!("wrong byte in memory: {byte:#x} in a page of zeros");
                return Err(io::Error::other(what));
            }
        }
        Ok(self.numbers.len() as u64)
    }
}

fn memory(mut random: Random, blocks: u64, pace: &Pace) -> io::Result<()> {
    let checked = &pace.checked;
    let mut all: Vec<Block> = (0..blocks).map(|_| Block::new(&mut random)).collect();
    while pace.goes_on() {
        if pace.rests() {
            let freed = all.split_off(all.len() / 8);
            freed.iter().try_for_each(|block| block.check().map(drop))?;
            drop(freed);
            pace.sleep_at_rest();
            all.resize_with(usize::try_from(blocks).unwrap_or(0), || Block::new(&mut random));
        }
        let picked = usize::try_from(random.below(blocks)).unwrap_or(0);
        let block = &mut all[picked];
        checked.fetch_add(block.check()?, Relaxed);
        match random.below(8) {
            0 => {
                // Freed first, so that the balloon can have it.
                *block = Block { bytes: Vec::new(), numbers: Vec::new() };
                thread::sleep(Duration::from_millis(random.below(300)));
                *block = Block::new(&mut random);
            }
            1..4 => {
                for _ in 0..random.below(64) {
                    let page = usize::try_from(random.below(BLOCK_PAGES)).unwrap_or(0);
                    block.numbers[page] = number(&mut random);
                    let bytes = &mut block.bytes[page * PAGE..(page + 1) * PAGE];
                    set(bytes, block.numbers[page]);
                }
            }
            // Most stay as they are, so that they are merged.
            _ => thread::sleep(Duration::from_millis(random.below(100))),
        }
    }
    all.iter().try_for_each(|block| {
        checked.fetch_add(block.check()?, Relaxed);
        Ok(())
    })
}

/// Files that are written, read and removed; `direct` past the guest's page cache where its filesystem
/// has that.
fn files(mut random: Random, number: u64, direct: bool, pace: &Pace) -> io::Result<()> {
    let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let dir = format!("/canary-{number}");
    fs::create_dir_all(&dir)?;
    let bytes = usize::try_from(FILE_BYTES).unwrap_or(0);
    // From an address that devices take.
    let mut memory = vec![0; bytes + ALIGN];
    let start = memory.as_ptr().align_offset(ALIGN);
    let buffer = &mut memory[start..start + bytes];
    let mut kept: Vec<(u64, u64)> = Vec::new();
    while pace.goes_on() {
        pace.sleep_at_rest();
        let (file, first) = (random.below(8), random.below(1 << 40));
        let path = |file: u64| Path::new(&dir).join(file.to_string());
        fill(buffer, first);
        let mut open = File::options();
        let open = open.write(true).create(true).truncate(true).custom_flags(flags);
        open.open(path(file))?.write_all(buffer)?;
        kept.retain(|(other, _)| *other != file);
        kept.push((file, first));
        thread::sleep(Duration::from_millis(random.below(200)));
        let (file, first) = kept[usize::try_from(random.below(kept.len() as u64)).unwrap_or(0)];
        let mut open = File::options().read(true).custom_flags(flags).open(path(file))?;
        buffer.fill(0);
        open.read_exact(buffer)?;
        check(buffer, first, &path(file).display().to_string())?;
        pace.checked.fetch_add(FILE_BYTES / PAGE as u64, Relaxed);
        if random.below(4) == 0 {
            kept.retain(|(other, _)| *other != file);
            fs::remove_file(path(file))?;
        }
    }
    fs::remove_dir_all(&dir)
}

/// Has the kernel compact memory and drop clean pages of files, and reports progress.
fn kernel(pace: &Pace) -> io::Result<()> {
    for second in 0.. {
        if !pace.goes_on() {
            break;
        }
        // Kernels can be without compaction.
        let _ = fs::write("/proc/sys/vm/compact_memory", "1");
        if second % 3 == 0 {
            fs::write("/proc/sys/vm/drop_caches", "1")?;
        }
        say(&json!({ "event": "checked", "pages": pace.checked.load(Relaxed) }))?;
        thread::sleep(Duration::from_secs(1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    #[test]
    fn a_wrong_byte_in_a_block_is_found() {
        let mut block = Block::new(&mut Random::new(1));
        assert_eq!(block.check().unwrap(), BLOCK_PAGES);
        assert!(block.numbers.contains(&ZEROS));
        for page in [block.numbers.iter().position(|it| *it == ZEROS).unwrap(), 511] {
            block.bytes[page * PAGE + 4000] ^= 1;
            block.check().unwrap_err();
            block.bytes[page * PAGE + 4000] ^= 1;
        }
    }
}
