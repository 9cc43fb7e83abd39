//! Pulling from registries and pushing to them: honest ones, hostile ones, and real ones with networks that fail.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    missing_docs,
    reason = "tests may panic and skip"
)]
#![allow(unreachable_pub, dead_code, reason = "the support is shared with the tests of imports")]

mod access;
mod cosign;
mod hostile;
mod network;
mod pull;
mod push;
mod real;
mod server;
#[path = "../oci/support.rs"]
mod support;

use std::net::SocketAddr;
use std::time::Duration;

use cofolio_node::export::{self, ExportError, Exported, PushOptions, PushReport};
use cofolio_node::oci::{ImportError, ImportOptions, ImportReport, Silent, Source, import};
use cofolio_node::registry::{Reference, RegistryOptions};

use support::{Bench, Blob, Random, Tar};

/// Options for tests: no files of this machine, and little patience.
fn options() -> RegistryOptions {
    RegistryOptions {
        pause: Duration::from_millis(1),
        pause_max: Duration::from_millis(20),
        stall_timeout: Duration::from_secs(5),
        auth_files: Vec::new(),
        certs_dirs: Vec::new(),
        ..RegistryOptions::default()
    }
}

fn source(name: &str) -> Source {
    Source::Registry(Reference::parse(name).unwrap())
}

fn pull(bench: &Bench, name: &str, registry: RegistryOptions) -> Result<ImportReport, ImportError> {
    let options = ImportOptions { registry, ..ImportOptions::default() };
    import(&bench.domain, &source(name), &options, &Silent)
}

/// Pushes what a ref leads to.
fn push(
    bench: &Bench,
    name: &str,
    to: &str,
    registry: RegistryOptions,
) -> Result<PushReport, ExportError> {
    let options = PushOptions { registry, threads: 2, ..PushOptions::default() };
    push_with(bench, name, to, &options)
}

fn push_with(
    bench: &Bench,
    name: &str,
    to: &str,
    options: &PushOptions,
) -> Result<PushReport, ExportError> {
    let record = bench.domain.get_ref(name).unwrap().unwrap();
    let exported = Exported { image: &record.image, record: Some(&record), name: Some(name) };
    export::push(&bench.domain, exported, &Reference::parse(to).unwrap(), options, &())
}

/// `app:1` of a server.
fn app(address: SocketAddr) -> String {
    format!("{address}/app:1")
}

/// Content that does not compress.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..bytes / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// A layer with one file of noise and a small one.
fn layer(number: u64, bytes: usize) -> Blob {
    let tar = Tar::new()
        .dir("dir")
        .file(&format!("dir/noise{number}"), &noise(number, bytes))
        .file(&format!("dir/small{number}"), b"small");
    Blob::gzip(&tar.end())
}
