//! Files in memory up to a peak, then idle: the load of a guest that works now and then.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::mount::{MountFlags, mount};
use serde_json::json;
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;

use crate::content::{PAGE, Random, check, fill};
use crate::{Options, meminfo, say};

const BUFFER: usize = 256 << 10;
/// Free memory is reported this long after files are removed.
const AFTER: Duration = Duration::from_secs(10);

/// Waits for SIGUSR1 if `wait` is 1, and then for a part of `cycle` seconds; then fills `files`
/// files of `mib` MiB each, keeps them for `hold` seconds, checks and removes them; and again after
/// each `cycle`, `rounds` times in all, or for ever if that is 0. Then each SIGUSR1 makes it free
/// single pages: every second page of `pages` MiB. With `balloon=0` the guest has none any more,
/// and reports nothing.
pub(crate) fn run(options: &Options) -> io::Result<()> {
    // Before anybody is told that it is ready.
    let mut signals = Signals::new([SIGUSR1])?;
    let seed = options.number("seed", 0);
    let (files, mib) = (options.number("files", 10), options.number("mib", 20));
    let (rounds, pages) = (options.number("rounds", 0), options.number("pages", 0));
    let cycle = Duration::from_secs(options.number("cycle", 60));
    let hold = Duration::from_secs(options.number("hold", 1));
    if options.number("balloon", 1) == 0 {
        unbind_balloon()?;
    }
    let dir = Path::new("/fill");
    fs::create_dir_all(dir)?;
    mount("fill", dir, "tmpfs", MountFlags::empty(), c"size=100%")?;
    tell("ready", "files", 0)?;
    if options.number("wait", 0) == 1 {
        signals.forever().next();
    }
    let mut random = Random::new(seed);
    let first = cycle.mul_f64(random.below(1000) as f64 / 1000.0);
    thread::sleep(first);
    let mut buffer = vec![0; BUFFER];
    for round in (0..).take_while(|round| rounds == 0 || *round < rounds) {
        let began = Instant::now();
        let paths: Vec<PathBuf> = (0..files).map(|file| dir.join(file.to_string())).collect();
        let number = |file: u64| (seed << 48) + (round << 32) + file * (mib << 20) / PAGE as u64;
        tell("begun", "files", 0)?;
        for (path, file) in paths.iter().zip(0..) {
            write(path, mib << 20, number(file), &mut buffer)?;
        }
        let bytes = files * (mib << 20);
        tell("filled", "files", bytes)?;
        thread::sleep(hold);
        for (path, file) in paths.iter().zip(0..) {
            let mut open = File::open(path)?;
            for offset in (0..mib << 20).step_by(BUFFER) {
                open.read_exact(&mut buffer)?;
                let first = number(file) + offset / PAGE as u64;
                check(&buffer, first, &path.display().to_string())?;
            }
        }
        tell("removing", "files", bytes)?;
        paths.iter().try_for_each(fs::remove_file)?;
        tell("removed", "files", bytes)?;
        thread::sleep(AFTER);
        tell("after", "files", 0)?;
        thread::sleep(cycle.saturating_sub(began.elapsed()));
    }
    loop {
        signals.forever().next();
        free_pages(&dir.join("pages"), pages << 20, seed << 48, hold, &mut buffer)?;
    }
}

/// Frees every second page of so many bytes, so that no two free pages are neighbours.
fn free_pages(
    path: &Path,
    bytes: u64,
    number: u64,
    hold: Duration,
    buffer: &mut [u8],
) -> io::Result<()> {
    tell("begun", "pages", 0)?;
    write(path, bytes, number, buffer)?;
    tell("filled", "pages", bytes)?;
    thread::sleep(hold);
    tell("removing", "pages", bytes)?;
    let file = File::options().read(true).write(true).open(path)?;
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for offset in (0..bytes).step_by(2 * PAGE) {
        fallocate(&file, hole, offset, PAGE as u64)?;
    }
    tell("removed", "pages", bytes / 2)?;
    thread::sleep(AFTER);
    tell("after", "pages", 0)?;
    let mut page = [0; PAGE];
    for offset in (PAGE as u64..bytes).step_by(2 * PAGE) {
        file.read_exact_at(&mut page, offset)?;
        check(&page, number + offset / PAGE as u64, &path.display().to_string())?;
    }
    tell("checked", "pages", bytes / 2)
}

/// Says an event about `bytes` bytes of `what`, with the memory that is free, and how much of that
/// is single pages without a free neighbour.
fn tell(event: &str, what: &str, bytes: u64) -> io::Result<()> {
    let buddies = fs::read_to_string("/proc/buddyinfo").unwrap_or_default();
    let (free, single) = (meminfo("MemFree"), single_pages(&buddies) * PAGE as u64);
    say(&json!({
        "event": event, "what": what, "bytes": bytes, "free": free, "single": single
    }))
}

/// Free blocks of one page in all zones: `Node 0, zone Normal COUNT …`, with one count for each
/// order.
fn single_pages(buddies: &str) -> u64 {
    let count = |line: &str| line.split_whitespace().nth(4)?.parse::<u64>().ok();
    buddies.lines().filter_map(count).sum()
}

fn write(path: &Path, bytes: u64, number: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    for offset in (0..bytes).step_by(buffer.len()) {
        fill(buffer, number + offset / PAGE as u64);
        file.write_all(buffer)?;
    }
    Ok(())
}

/// Unbinds the balloon's driver: the guest then behaves like one without a balloon.
fn unbind_balloon() -> io::Result<()> {
    let driver = Path::new("/sys/bus/virtio/drivers/virtio_balloon");
    for entry in fs::read_dir(driver)? {
        let name = entry?.file_name();
        if name.to_string_lossy().starts_with("virtio") {
            fs::write(driver.join("unbind"), name.as_encoded_bytes())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn single_free_pages_of_all_zones_are_counted() {
        let buddies = "Node 0, zone      DMA      3      0      0      1\n\
                       Node 0, zone   Normal    216     55    189    101\n";
        assert_eq!(super::single_pages(buddies), 219);
    }
}
