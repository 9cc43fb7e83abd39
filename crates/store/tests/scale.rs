//! An import's memory does not grow with its number of objects: the store keeps no list of them.
//!
//! `COFOLIO_SOAK_OBJECTS=1000000` measures that many, and prints the time too.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "the figures are what one runs it for")]

mod common;

use std::process::Command;
use std::time::Instant;

use cofolio_store::{Digest, ImportOptions, Publish, Ref, Store};
use common::Scratch;

const COUNT: &str = "COFOLIO_STORE_SCALE_COUNT";
const PLACE: &str = "COFOLIO_STORE_SCALE_STORE";

/// Not a test by itself: the processes of the test below run this.
#[test]
#[ignore = "worker: started by memory_does_not_grow_with_the_number_of_objects"]
fn worker() {
    let count: u64 = std::env::var(COUNT).unwrap().parse().unwrap();
    let start = Instant::now();
    let store = Store::open(std::env::var_os(PLACE).unwrap().as_ref()).unwrap();
    let domain = store.domain("default").unwrap();
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let digest_of = |number: u64| -> (Digest, u64) {
        let content = number.to_le_bytes();
        (cofolio_store::verity::digest(&content), 8)
    };
    std::thread::scope(|scope| {
        for half in 0..2 {
            let staging = &staging;
            scope.spawn(move || {
                for number in (half..count).step_by(2) {
                    staging.put_object(&number.to_le_bytes()).unwrap();
                }
            });
        }
    });
    let written = start.elapsed();
    let image = staging.image_writer().unwrap().finish().unwrap();
    let publish = Publish::named("many", Ref::new(image));
    let stats = staging.commit(&publish, (0..count).map(digest_of)).unwrap();
    assert_eq!(stats.new_objects, count);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    println!(
        "{count} objects: written {:.1} s, published {:.1} s, VmHWM {peak} kB",
        written.as_secs_f64(),
        start.elapsed().as_secs_f64()
    );
    println!("peak={peak}");
}

fn peak_kb(count: u64) -> u64 {
    let scratch = Scratch::new("scale");
    drop(scratch.store());
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["worker", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(COUNT, count.to_string())
        .env(PLACE, &scratch.path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().filter(|line| line.contains("VmHWM")).for_each(|line| println!("{line}"));
    text.lines().find_map(|line| line.strip_prefix("peak=")).unwrap().parse().unwrap()
}

#[test]
fn memory_does_not_grow_with_the_number_of_objects() {
    let many = std::env::var("COFOLIO_SOAK_OBJECTS").ok().and_then(|n| n.parse().ok());
    let many = many.unwrap_or(40_000);
    let (few, lots) = (peak_kb(100), peak_kb(many));
    // What remains: 16,384 objects of 40 bytes are looked at at once, however many there are; each processor lists a
    // shard (a 256th) at a time, some 200 bytes per entry; and 1 MiB for the allocator, which varies by hundreds of kB
    // from run to run. With a digest and a size for every object (1.6 MB) it would be too much.
    let processors = std::thread::available_parallelism().unwrap().get() as u64;
    let allowed = few + 1024 + 640 + processors * many / 256 * 200 / 1024;
    assert!(lots < allowed, "{lots} kB for {many} objects, {few} kB for 100");
}
