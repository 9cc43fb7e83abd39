//! Imports into a store of its own and prints what it cost: for measuring, not for use.
//!
//!     cargo run --release -p cofolio-image --example import -- STORE SOURCE [NAME]
//!
//! Prints the report as JSON, then time and peak memory (`VmHWM`) of this process.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use cofolio_image::import::{ImportOptions, import};
use cofolio_image::source::Source;
use cofolio_store::task::Task;
use cofolio_store::{DEFAULT_DOMAIN, InitOptions, Store};

#[allow(clippy::print_stdout, reason = "a program that prints")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(store), Some(source)) = (args.next(), args.next()) else {
        return Err("usage: import STORE SOURCE [NAME]".into());
    };
    let store = Store::open_or_init(Path::new(&store), &InitOptions::default())?;
    let domain = store.domain_or_create(DEFAULT_DOMAIN)?;
    let options = ImportOptions { name: args.next(), ..ImportOptions::default() };
    let started = Instant::now();
    let report = import(&domain, &Source::parse(&source)?, &options, &Task::default())?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", serde_json::to_string_pretty(&report)?);
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("VmHWM unknown");
    println!("{seconds:.3} s, {peak}");
    Ok(())
}
