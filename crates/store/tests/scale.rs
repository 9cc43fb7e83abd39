//! An import's memory does not grow with its number of objects: the store keeps no list of them. And how
//! long garbage collection takes, and keeps others waiting, in a large domain.
//!
//! `COFOLIO_SOAK_OBJECTS=1000000` measures an import of that many, and prints the time too.
//! `cargo test --release -p cofolio-store --test scale -- --ignored --nocapture gc_` measures a collection.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "the figures are what one runs it for")]

mod common;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cofolio_store::{
    Digest, FileKind, FileName, GcOptions, ImportOptions, InitOptions, Layer, Publish, Ref, Root,
    RootKind, Store,
};
use common::{Lines, Scratch, nothing_live};

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

/// Fills a domain with so many objects and layers, half of which are garbage, and collects; meanwhile somebody
/// makes and removes a root every few milliseconds, which is what a mount does in the store. Says how long that took.
fn measure_gc(objects: u64, layers: u64) {
    let scratch = Scratch::new("gc-scale");
    let store = Store::init(&scratch.path, &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let mut seen = BTreeMap::new();
    for half in ["kept", "garbage"] {
        let staging = domain.begin_import(ImportOptions::default()).unwrap();
        let mut record = Ref::new(Digest([0; 32]));
        let per_layer = objects / layers;
        let mut image = staging.image_writer().unwrap();
        for number in 0..layers / 2 {
            let chain_id = format!("sha256:{half}-{number:060}");
            let mut layer = staging.file_writer().unwrap();
            for object in 0..per_layer {
                let stored = staging.put_object(format!("{half} {number} {object}").as_bytes());
                let stored = stored.unwrap();
                let line = format!("{} {}\n", stored.digest, stored.size);
                layer.write_all(line.as_bytes()).unwrap();
                image.write_all(line.as_bytes()).unwrap();
                seen.insert(stored.digest, stored.size);
            }
            layer.write_all(b"end\n").unwrap();
            layer.finish(&FileName::chain(FileKind::Layer, &chain_id).unwrap()).unwrap();
            record.layers.push(Layer { chain_id, ..Layer::default() });
        }
        image.write_all(b"end\n").unwrap();
        record.image = image.finish().unwrap();
        let objects = std::mem::take(&mut seen);
        staging.commit(&Publish::named(half, record), objects).unwrap();
    }
    domain.remove_ref("garbage").unwrap();
    let mut mount = Root::new(RootKind::Mount, "comes and goes");
    mount.images.push(domain.get_ref("kept").unwrap().unwrap().image);
    let done = AtomicBool::new(false);
    let (took, report, mut waits) = std::thread::scope(|scope| {
        let mounter = scope.spawn(|| {
            let (mut waits, mut due) = (Vec::new(), Instant::now());
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                domain.put_root(&mount).unwrap();
                domain.remove_root(mount.kind, &mount.id).unwrap();
                // Who comes while another waits, waits for the rest of that time.
                waits.push(due.elapsed());
                due += Duration::from_millis(3);
            }
            waits
        });
        let start = Instant::now();
        let options = GcOptions { wait: true, ..GcOptions::default() };
        let report = domain.gc(&Lines, &nothing_live, &options);
        let took = start.elapsed();
        done.store(true, Ordering::Relaxed);
        (took, report.unwrap(), mounter.join().unwrap())
    });
    assert_eq!((report.objects, report.layers), (objects / 2, layers / 2));
    waits.sort();
    let at = |part: usize| waits[(waits.len() - 1) * part / 100].as_secs_f64() * 1e3;
    println!(
        "{objects} objects, {layers} layers: collected half in {:.2} s; {} mounts meanwhile \
         waited: p50 {:.2} ms, p99 {:.2} ms, longest {:.2} ms",
        took.as_secs_f64(),
        waits.len(),
        at(50),
        at(99),
        at(100)
    );
}

/// `COFOLIO_GC_OBJECTS=50000` measures one size.
fn sizes() -> Vec<(u64, u64)> {
    let one = std::env::var("COFOLIO_GC_OBJECTS").ok().and_then(|n| n.parse().ok());
    one.map_or(vec![50_000, 200_000], |one| vec![one]).into_iter().map(|n| (n, n / 40)).collect()
}

/// Not part of the usual run: minutes of writing. It asserts what was collected; the times are to be read.
#[test]
#[ignore = "a measurement; see the top of the file"]
fn gc_of_a_large_domain() {
    for (objects, layers) in sizes() {
        measure_gc(objects, layers);
    }
}
