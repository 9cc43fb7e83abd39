//! Pages of two images, with so little memory that it takes many passes.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cofolio_image::diff::{Diff, pages};
use cofolio_image::import::{ImportOptions, import};
use cofolio_image::source::Source;
use cofolio_store::task::{Cancel, Event, Task};
use cofolio_store::{Digest, Domain, InitOptions, Store};

fn image(domain: &Domain, tree: &Path) -> Digest {
    let source = Source::parse(tree.to_str().unwrap()).unwrap();
    import(domain, &source, &ImportOptions::default(), &Task::default()).unwrap().image
}

/// 12,000 pages that repeat: with 1,024 hashes at a time the figures are those of one pass.
#[test]
fn many_passes_find_what_one_finds() {
    let dir = tempfile::tempdir().unwrap();
    let options = InitOptions { immutable: false };
    let store = Store::open_or_init(&dir.path().join("store"), &options).unwrap();
    let domain = store.domain_or_create("default").unwrap();
    let images = ["a", "b"].map(|name| {
        let tree = dir.path().join(name);
        fs::create_dir(&tree).unwrap();
        // Every page of `a` has a number below 5000, every page of `b` one from 3000 to 7999: as
        // many distinct ones, in 60 files of 100 pages.
        let first = if name == "a" { 0 } else { 3000 };
        for file in 0..60_u32 {
            let content: Vec<u8> = (0..100)
                .flat_map(|i| (first + (file * 100 + i) % 5000).to_le_bytes().repeat(1024))
                .collect();
            fs::write(tree.join(file.to_string()), content).unwrap();
        }
        image(&domain, &tree)
    });
    let diff = Diff::of(&domain, [&images[0], &images[1]], &mut |_| {}).unwrap();
    // The last ten files repeat the first ten, and 20 of `a` are files of `b`.
    assert_eq!((diff.a.files, diff.a.content.objects, diff.shared.objects), (60, 50, 20));
    let one = pages::compare(&domain, &diff, pages::MEMORY_DEFAULT, &Task::default()).unwrap();
    assert_eq!((one.passes, one.distinct_pages), (1, 8000));
    assert_eq!((one.a_in_b_pages, one.b_in_a_pages), (0, 0));

    let seen = Arc::new(AtomicU64::new(0));
    let sees = seen.clone();
    let task = Task::new(Cancel::default(), move |event| {
        let Event::Done { bytes, bytes_total, .. } = event else { panic!("{event:?}") };
        assert!(Some(bytes) <= bytes_total);
        sees.fetch_max(bytes, Relaxed);
    });
    let many = pages::compare(&domain, &diff, 8192, &task).unwrap();
    assert!(many.passes >= 8000 / 1024, "{many:?}");
    assert!(many.memory_bytes <= 2 * 8192, "{many:?}");
    assert_eq!(many.read_bytes, many.passes * one.read_bytes);
    assert_eq!(seen.load(Relaxed), many.read_bytes);
    let figures = |report: &pages::PageReport| {
        (report.distinct_pages, report.a_in_b_pages, report.b_in_a_pages)
    };
    assert_eq!(figures(&many), figures(&one));
}
