//! Clients for the registries of tests, and images for these.

use std::net::SocketAddr;
use std::time::Duration;

use cofolio_image::error::ImportError;
use cofolio_image::import::{ImportOptions, ImportReport, import};
use cofolio_image::reference::Reference;
use cofolio_image::registry::RegistryOptions;
use cofolio_image::source::Source;
use cofolio_store::task::Task;

use crate::support::{Bench, Blob, Random, Tar};

/// Options for tests: no files of this machine, and little patience.
pub fn options() -> RegistryOptions {
    RegistryOptions {
        pause: Duration::from_millis(1),
        pause_max: Duration::from_millis(20),
        stall_timeout: Duration::from_secs(5),
        auth_files: Vec::new(),
        certs_dirs: Vec::new(),
        ..RegistryOptions::default()
    }
}

pub fn source(name: &str) -> Source {
    Source::Registry(Reference::parse(name).unwrap())
}

pub fn pull(
    bench: &Bench,
    name: &str,
    registry: RegistryOptions,
) -> Result<ImportReport, ImportError> {
    let options = ImportOptions { registry, ..ImportOptions::default() };
    import(&bench.domain, &source(name), &options, &Task::default())
}

/// `app:1` of a server.
pub fn app(address: SocketAddr) -> String {
    format!("{address}/app:1")
}

/// Content that does not compress.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..bytes / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// A layer with one file of noise and a small one.
pub fn layer(number: u64, bytes: usize) -> Blob {
    let tar = Tar::new()
        .dir("dir")
        .file(&format!("dir/noise{number}"), &noise(number, bytes))
        .file(&format!("dir/small{number}"), b"small");
    Blob::gzip(&tar.end())
}
