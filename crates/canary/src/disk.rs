//! A guest whose disk is the image, as microVMs usually have it.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cofolio_guest::kernel::{During, Result, kernel_filesystems, load_modules};
use rustix::mount::{MountFlags, mount};
use serde_json::json;

use crate::{meminfo, say};

const DISK: &str = "/dev/vda";
const DISK_SECONDS_MAX: u32 = 60;

/// Reports free memory before modules are loaded and after all files are read, and then waits for ever.
pub(crate) fn run() -> ! {
    if let Err(why) = read_all() {
        let _ = say(&json!({ "event": "failed", "why": why }));
    }
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

fn read_all() -> Result<()> {
    kernel_filesystems(Path::new("/"))?;
    let before = meminfo("MemFree");
    load_modules()?;
    for _ in 0..DISK_SECONDS_MAX * 10 {
        if Path::new(DISK).exists() {
            break;
        }
        thread::sleep(Duration::from_millis(100));
    }
    let image = Path::new("/image");
    fs::create_dir_all(image).during("/image")?;
    mount(DISK, image, "erofs", MountFlags::RDONLY, None).during(DISK)?;
    let bytes = read_below(image).during("the image")?;
    let event =
        json!({ "event": "read", "before": before, "bytes": bytes, "free": meminfo("MemFree") });
    say(&event).during("console")
}

/// Reads all files below a directory; how many bytes.
fn read_below(dir: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            bytes += read_below(&entry.path())?;
        } else if kind.is_file() {
            bytes += io::copy(&mut File::open(entry.path())?, &mut io::sink())?;
        }
    }
    Ok(bytes)
}
