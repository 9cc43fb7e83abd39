//! The program of guests in tests and benchmarks. It fills memory with recognisable content, frees some
//! of it, and checks the rest.
//!
//! ```text
//! cofolio-canary fill  [NAME=NUMBER…]   files in memory up to a peak, then nothing, for ever
//! cofolio-canary churn [NAME=NUMBER…]   memory and files that come and go under a kernel at work
//! /init                                 as a guest's first process: reads all of the EROFS filesystem
//!                                       on its disk
//! ```
//!
//! It mounts what it needs. Each event is a line of JSON on
//! standard output. It ends with 1 as soon as a byte is wrong.

mod churn;
mod content;
mod disk;
mod fill;

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::process::ExitCode;

use serde_json::Value;

/// Options: `NAME=NUMBER`.
pub(crate) struct Options(HashMap<String, u64>);

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Option<Self> {
        let parse = |arg: String| {
            let (name, number) = arg.split_once('=')?;
            Some((name.to_owned(), number.parse().ok()?))
        };
        args.map(parse).collect::<Option<_>>().map(Self)
    }

    pub(crate) fn number(&self, name: &str, default: u64) -> u64 {
        self.0.get(name).copied().unwrap_or(default)
    }
}

/// Says an event.
pub(crate) fn say(event: &Value) -> io::Result<()> {
    // One write: lines of threads do not mix.
    io::stdout().write_all(format!("{event}\n").as_bytes())
}

/// Bytes of a line of `/proc/meminfo`.
pub(crate) fn meminfo(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn main() -> ExitCode {
    if rustix::process::getpid().is_init() {
        disk::run();
    }
    let mut args = std::env::args().skip(1);
    let what = args.next();
    let done = match (what.as_deref(), Options::parse(args)) {
        (Some("fill"), Some(options)) => fill::run(&options),
        (Some("churn"), Some(options)) => churn::run(&options),
        _ => {
            eprintln!("usage: cofolio-canary fill|churn [NAME=NUMBER…]");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = say(&serde_json::json!({ "event": "failed", "why": error.to_string() }));
            ExitCode::FAILURE
        }
    }
}
