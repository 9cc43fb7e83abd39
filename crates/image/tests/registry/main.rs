//! Pulling from registries and pushing to them: honest ones, and real ones with networks that fail.
//! Hostile ones are in `tests/hostile`.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    missing_docs,
    reason = "tests may panic and skip"
)]
#![allow(unreachable_pub, dead_code, reason = "the support is shared with the tests of imports")]

mod access;
mod common;
mod cosign;
mod network;
mod pull;
mod push;
mod real;
mod server;
#[path = "../oci/support.rs"]
mod support;

use cofolio_image::export::{self, ExportError, Exported, PushOptions, PushReport};
use cofolio_image::reference::Reference;
use cofolio_image::registry::RegistryOptions;
use cofolio_store::task::Task;

use common::{app, layer, noise, options, pull, source};
use support::Bench;

/// Pushes what a ref leads to.
fn push(
    bench: &Bench,
    name: &str,
    to: &str,
    registry: RegistryOptions,
) -> Result<PushReport, ExportError> {
    let options = PushOptions { registry, threads: 2, ..PushOptions::default() };
    push_with(bench, name, to, &options, &Task::default())
}

fn push_with(
    bench: &Bench,
    name: &str,
    to: &str,
    options: &PushOptions,
    task: &Task,
) -> Result<PushReport, ExportError> {
    let record = bench.domain.get_ref(name).unwrap().unwrap();
    let exported = Exported { image: &record.image, record: Some(&record), name: Some(name) };
    export::push(&bench.domain, exported, &Reference::parse(to).unwrap(), options, task)
}
