//! Measures object writing: stores every file of a directory tree with a few threads and commits.
//!
//! `cargo run --release -p cofolio-store --example write_tree -- STORE TREE [THREADS]`

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use cofolio_store::{BoxError, ImportOptions, InitOptions, Publish, Ref, Store};

fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, store, tree, rest @ ..] = &arguments[..] else {
        return Err("usage: write_tree STORE TREE [THREADS]".into());
    };
    let threads: usize = rest.first().map_or(Ok(2), |text| text.parse())?;
    let mut files = Vec::new();
    walk(Path::new(tree), &mut files)?;

    let start = Instant::now();
    let store = Store::open_or_init(Path::new(store), &InitOptions::default())?;
    let staging = store.domain("default")?.begin_import(ImportOptions::default())?;
    let (next, objects) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || -> Result<(), BoxError> {
        let mut buffer = vec![0; 256 << 10];
        while let Some(path) = files.get(next.fetch_add(1, Relaxed)) {
            let mut file = std::fs::File::open(path)?;
            let mut writer = staging.object_writer();
            loop {
                let n = file.read(&mut buffer)?;
                if n == 0 {
                    break;
                }
                writer.push(&buffer[..n])?;
            }
            let stored = writer.finish()?;
            if let Ok(mut objects) = objects.lock() {
                objects.push((stored.digest, stored.size));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| -> Result<(), BoxError> {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(_) => Err("a thread panicked".into()),
        })
    })?;
    let written = start.elapsed();
    let image = staging.image_writer()?.finish()?;
    let objects = objects.into_inner()?;
    let stats = staging.commit(&Publish::named("tree", Ref::new(image)), objects)?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
    println!(
        "{} files: written {:.2} s, committed {:.2} s; new {} objects, {} MB; known {}; {peak}",
        files.len(),
        written.as_secs_f64(),
        start.elapsed().as_secs_f64(),
        stats.new_objects,
        stats.new_bytes >> 20,
        stats.known_objects,
    );
    Ok(())
}

fn walk(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), BoxError> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            walk(&entry.path(), files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}
