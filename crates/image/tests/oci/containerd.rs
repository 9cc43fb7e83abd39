//! Images out of containerd's store, which the real containerd has written and has open.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use cofolio_image::error::ImportError;
use cofolio_image::source::Source;
use cofolio_image::source::engine::containerd;

use crate::engines::{Containerd, done};
use crate::podman::layout;
use crate::support::*;

fn ready(test: &str) -> bool {
    is_root(test) && have(test, "containerd") && have(test, "ctr") && have(test, "tar")
}

fn source(containerd: &Containerd, namespace: &str, name: &str) -> Source {
    let root = containerd.root();
    Source::parse(&format!("containerd:[{}{namespace}]{name}", root.display())).unwrap()
}

/// Whichever way it came in and whatever it is called, the image is the one that the layout holds.
#[test]
fn the_image_is_the_one_that_containerd_was_given() {
    let test = "the_image_is_the_one_that_containerd_was_given";
    if !ready(test) {
        return;
    }
    let made = Bench::new();
    let mut layouts = vec![(layout(&made).0, "localhost/app:1")];
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../corpus/out");
    let corpus = std::env::var_os("COFOLIO_CORPUS").map_or(corpus, PathBuf::from);
    let real = corpus.join("redis/old");
    match real.is_dir() {
        true => layouts.push((real, "localhost/redis:7")),
        false => println!("SKIP {test}: a real image (run corpus/build)"),
    }
    let mut containerd = Containerd::start(&made.path("containerd"));
    // Unpacked or not; one in a namespace of its own, and without a tag.
    for (layout, name) in &layouts {
        containerd.import("default", layout, name, *name == "localhost/app:1");
    }
    containerd.import("k8s.io", &layouts[0].0, "bare", false);

    for (layout, name) in &layouts {
        let expected = Bench::new();
        let expected =
            expected.import(&Source::Layout { path: layout.clone(), tag: None }).unwrap();
        let bench = Bench::new();
        let report = bench.import(&source(&containerd, "", name)).unwrap();
        assert_eq!(report.image, expected.image);
        assert_eq!(report.manifest, expected.manifest);
        assert_eq!(report.name, *name);
        let ids = |report: &cofolio_image::import::ImportReport| -> Vec<_> {
            report.layers.iter().map(|l| (l.diff_id.clone(), l.chain_id.clone())).collect()
        };
        assert_eq!(ids(&report), ids(&expected));
        // By the end of the name, in its namespace; and by the digest of what it stands for.
        let short = name.strip_prefix("localhost/").unwrap();
        let again = bench.import(&source(&containerd, "+default", short)).unwrap();
        assert!(again.known && again.image == expected.image, "{again:?}");
        let listed = done(&mut containerd.ctr(&["images", "ls"]));
        let line = listed.lines().find(|line| line.starts_with(name)).unwrap();
        let digest = line.split_whitespace().nth(2).unwrap().strip_prefix("sha256:").unwrap();
        let again = bench.import(&source(&containerd, "", &digest[..12])).unwrap();
        assert!(again.known && again.name == *name, "{again:?}");
    }
    let bench = Bench::new();
    let bare = bench.import(&source(&containerd, "+k8s.io", "bare")).unwrap();
    assert_eq!(bare.name, "bare");
    // The daemon need not run.
    containerd.stop();
    assert!(bench.import(&source(&containerd, "", "localhost/app:1")).unwrap().known);
}

#[test]
fn what_is_not_there_is_named() {
    let test = "what_is_not_there_is_named";
    if !ready(test) {
        return;
    }
    let bench = Bench::new();
    let layout = layout(&bench);
    let other = Layout::image(bench.path("other"), &[Blob::plain(Tar::new().dir("a").end())]);
    let containerd = Containerd::start(&bench.path("containerd"));
    containerd.import("default", &layout.0, "localhost/app:1", true);
    containerd.import("moby", &other.0, "localhost/app:1", true);
    containerd.import("moby", &layout.0, "localhost/app:2", true);
    let before = bench.listing();
    let fails = |source: Source, what: &[&str]| {
        let error = bench.import(&source).unwrap_err();
        assert!(matches!(error, ImportError::Engine(_)), "{error:?}");
        for what in what {
            assert!(error.to_string().contains(what), "{error}: {what}");
        }
        assert_eq!(bench.listing(), before);
    };
    fails(
        source(&containerd, "", "app:1"),
        &["[+default]localhost/app:1 (sha256:", "[+moby]localhost/app:1"],
    );
    fails(
        source(&containerd, "+moby", "app:7"),
        &["(namespace moby)", "it has: ", "localhost/app:2"],
    );
    fails(
        source(&containerd, "+k8s.io", "app:1"),
        &["no namespace \"k8s.io\"; it has: default, moby"],
    );
    let nowhere = Source::parse("containerd:[/nonexistent]app:1").unwrap();
    fails(nowhere, &["/nonexistent: no images of containerd's here"]);

    // containerd itself removes a blob that still has a name, if it is told to.
    let manifest = layout.manifest(&crate::podman::layers());
    let manifest: serde_json::Value = serde_json::from_slice(
        &std::fs::read(layout.0.join(path_of(manifest["digest"].as_str().unwrap()))).unwrap(),
    )
    .unwrap();
    let layer = manifest["layers"][1]["digest"].as_str().unwrap().to_owned();
    for namespace in ["default", "moby"] {
        done(&mut containerd.ctr(&["-n", namespace, "content", "rm", &layer]));
    }
    // Only a collection takes the file away; that it has been done is seen from the file.
    let file = containerd.root().join("io.containerd.content.v1.content").join(path_of(&layer));
    if file.exists() {
        std::fs::remove_file(file).unwrap();
    }
    fails(source(&containerd, "+moby", "app:2"), &[&layer, "localhost/app:2", "(or no longer)"]);
}

fn path_of(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

/// containerd writes all the time and holds its lock all the time. What is read without it must be
/// of one moment: pages of a transaction that came later look like anything.
#[test]
fn read_while_containerd_writes() {
    let test = "read_while_containerd_writes";
    if !ready(test) {
        return;
    }
    let bench = Bench::new();
    let layout = layout(&bench);
    let containerd = Containerd::start(&bench.path("containerd"));
    containerd.import("default", &layout.0, "localhost/app:1", true);
    // Enough records for pages that are split and joined.
    for index in 0..40 {
        let name = format!("localhost/app:copy-{index}");
        done(&mut containerd.ctr(&["images", "tag", "localhost/app:1", &name]));
    }
    let place = containerd::Location { root: Some(containerd.root()), namespace: None };
    let names = || -> Vec<String> {
        let store = containerd::Containerd::open(&place).unwrap();
        let mut names: Vec<_> = store.images().iter().flat_map(|i| i.names.clone()).collect();
        names.retain(|name| name.contains("copy-"));
        names
    };
    let ended = AtomicBool::new(false);
    let reads = std::thread::scope(|scope| {
        for writer in 0..2 {
            let (containerd, ended) = (&containerd, &ended);
            scope.spawn(move || {
                for index in 0..60 {
                    let name = format!("localhost/app:copy-{}", (index * 7 + writer) % 40);
                    let label = format!("round={index}-{}", "x".repeat(index * 11));
                    done(&mut containerd.ctr(&["images", "label", &name, &label]));
                }
                ended.store(true, Ordering::Relaxed);
            });
        }
        let mut reads = 0;
        while !ended.load(Ordering::Relaxed) {
            assert_eq!(names().len(), 40);
            reads += 1;
        }
        reads
    });
    assert!(reads > 10, "{reads}");
}
