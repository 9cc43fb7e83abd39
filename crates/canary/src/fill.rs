//! Files in memory up to a peak, then idle: the load of a guest that works now and then.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount};
use serde_json::json;
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;

use crate::content::{PAGE, Random, check, fill};
use crate::{Options, meminfo, say};

const BUFFER: usize = 256 << 10;
/// Free memory is reported this long after files are removed.
const AFTER: Duration = Duration::from_secs(10);

/// Waits for SIGUSR1 if `wait` is 1, and then for a part of `cycle` seconds; then fills `files` files
/// of `mib` MiB each, keeps them for `hold` seconds, checks and removes them; and again after each
/// `cycle`. With `balloon=0` the guest has none any more, and reports nothing.
pub(crate) fn run(options: &Options) -> io::Result<()> {
    // Before anybody is told that it is ready.
    let mut signals = Signals::new([SIGUSR1])?;
    let seed = options.number("seed", 0);
    let (files, mib) = (options.number("files", 10), options.number("mib", 20));
    let cycle = Duration::from_secs(options.number("cycle", 60));
    let hold = Duration::from_secs(options.number("hold", 1));
    if options.number("balloon", 1) == 0 {
        unbind_balloon()?;
    }
    let dir = Path::new("/fill");
    fs::create_dir_all(dir)?;
    mount("fill", dir, "tmpfs", MountFlags::empty(), c"size=100%")?;
    say(&json!({ "event": "ready", "free": meminfo("MemFree") }))?;
    if options.number("wait", 0) == 1 {
        signals.wait();
    }
    let mut random = Random::new(seed);
    let first = cycle.mul_f64(random.below(1000) as f64 / 1000.0);
    thread::sleep(first);
    let mut buffer = vec![0; BUFFER];
    for round in 0.. {
        let began = Instant::now();
        let paths: Vec<PathBuf> = (0..files).map(|file| dir.join(file.to_string())).collect();
        let number = |file: u64| (seed << 48) + (round << 32) + file * (mib << 20) / PAGE as u64;
        say(&json!({ "event": "begun", "free": meminfo("MemFree") }))?;
        for (path, file) in paths.iter().zip(0..) {
            write(path, mib << 20, number(file), &mut buffer)?;
        }
        let bytes = files * (mib << 20);
        say(&json!({ "event": "filled", "bytes": bytes, "free": meminfo("MemFree") }))?;
        thread::sleep(hold);
        for (path, file) in paths.iter().zip(0..) {
            let mut open = File::open(path)?;
            for offset in (0..mib << 20).step_by(BUFFER) {
                open.read_exact(&mut buffer)?;
                let first = number(file) + offset / PAGE as u64;
                check(&buffer, first, &path.display().to_string())?;
            }
        }
        paths.iter().try_for_each(fs::remove_file)?;
        say(&json!({ "event": "removed", "bytes": bytes, "free": meminfo("MemFree") }))?;
        thread::sleep(AFTER);
        say(&json!({ "event": "after", "free": meminfo("MemFree") }))?;
        thread::sleep(cycle.saturating_sub(began.elapsed()));
    }
    Ok(())
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
