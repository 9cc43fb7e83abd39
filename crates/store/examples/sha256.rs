//! What SHA-256 alone reaches: hashes all files of a directory in memory, on all processors. For `bench/import`.
//!
//!     cargo run --release -p cofolio-store --example sha256 -- DIRECTORY ROUNDS
//!
//! Prints as JSON how many bytes there are and how many seconds each round took. The same implementation as the
//! product's, one SHA-256 for each MiB.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use sha2::{Digest as _, Sha256};

const PIECE: usize = 1 << 20;

fn files(directory: &Path, into: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            files(&entry.path(), into)?;
        } else if kind.is_file() {
            into.push(entry.path());
        }
    }
    Ok(())
}

#[allow(clippy::print_stdout, reason = "a program that prints")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(directory), Some(rounds)) = (args.next(), args.next()) else {
        return Err("usage: sha256 DIRECTORY ROUNDS".into());
    };
    let mut paths = Vec::new();
    files(Path::new(&directory), &mut paths)?;
    let mut content = Vec::new();
    for path in paths {
        content.extend_from_slice(&std::fs::read(path)?);
    }
    let pieces: Vec<&[u8]> = content.chunks(PIECE).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut seconds = Vec::new();
    for _ in 0..rounds.parse::<usize>()? {
        let next = AtomicUsize::new(0);
        let started = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(piece) = pieces.get(next.fetch_add(1, Relaxed)) {
                        std::hint::black_box(Sha256::digest(piece));
                    }
                });
            }
        });
        seconds.push(started.elapsed().as_secs_f64());
    }
    println!(
        "{}",
        serde_json::json!({"bytes": content.len(), "threads": threads, "seconds": seconds})
    );
    Ok(())
}
