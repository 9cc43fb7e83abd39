//! Finds the devices of the image.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use cofolio_guest::Device;

/// The paths of all devices, if all are there.
pub(crate) fn find(wanted: &[Device]) -> Option<Vec<PathBuf>> {
    let present: Vec<PathBuf> = fs::read_dir("/sys/block")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("pmem"))
        .map(|name| Path::new("/dev").join(name))
        .collect();
    wanted.iter().map(|device| present.iter().find(|path| is_it(path, device)).cloned()).collect()
}

fn is_it(path: &Path, device: &Device) -> bool {
    let name = path.file_name().unwrap_or_default();
    let size = fs::read_to_string(Path::new("/sys/block").join(name).join("size"));
    let sectors = size.ok().and_then(|size| size.trim().parse::<u64>().ok());
    if sectors != Some(device.size / 512) {
        return false;
    }
    let mut found = vec![0; device.bytes.len()];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut found, device.offset));
    read.is_ok() && found == device.bytes
}
