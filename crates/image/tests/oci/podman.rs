//! Images out of podman's own store, which the real podman and skopeo have written.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cofolio_image::error::ImportError;
use cofolio_image::source::Source;
use serde_json::json;

use crate::support::*;

/// A store of podman's that is taken away in the end, with what podman mounts on it.
struct Podman {
    root: PathBuf,
    run: PathBuf,
    driver: &'static str,
}

impl Podman {
    fn new(bench: &Bench, driver: &'static str) -> Self {
        Self { root: bench.path(driver), run: bench.path(&format!("{driver}-run")), driver }
    }

    fn reference(&self, name: &str) -> String {
        let (driver, root) = (self.driver, self.root.display());
        format!("containers-storage:[{driver}@{root}+{}]{name}", self.run.display())
    }

    fn source(&self, name: &str) -> Source {
        Source::parse(&self.reference(name)).unwrap()
    }

    fn command(&self) -> Command {
        let mut podman = Command::new("podman");
        podman.arg("--root").arg(&self.root).arg("--runroot").arg(&self.run);
        podman.args(["--storage-driver", self.driver]);
        podman
    }

    /// Copies a layout into the store. Says SKIP if the kernel or filesystem cannot do what the
    /// driver needs.
    fn copy(&self, test: &str, layout: &Path, name: &str) -> bool {
        let mut skopeo = Command::new("skopeo");
        skopeo
            .args(["--insecure-policy", "copy", "--quiet"])
            .arg(format!("oci:{}", layout.display()));
        let output = skopeo.arg(self.reference(name)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() && said.contains("supported") {
            println!("SKIP {test}: the driver {}: {said}", self.driver);
            return false;
        }
        assert!(output.status.success(), "{said}");
        true
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        if self.driver != "overlay" {
            return;
        }
        let _ = Command::new("umount")
            .args(["--lazy", "--quiet"])
            .arg(self.root.join("overlay"))
            .status();
    }
}

fn ready(test: &str) -> bool {
    is_root(test) && have(test, "skopeo") && have(test, "podman")
}

/// Two layers with what is hard to put together again: links, whiteouts, padding, names that are no
/// UTF-8, a file that the layer above replaces and one that it removes.
pub fn layers() -> Vec<Blob> {
    let long = "x".repeat(150);
    let mut below = Tar::new()
        .dir("etc")
        .file("etc/a", b"a")
        .file("etc/empty", b"")
        .link("etc/hard", "etc/a")
        .symlink("etc/soft", "/etc/a")
        .head(&Head { size: 3, ..Head::new(b'0', b"etc/\xff") })
        .data(b"raw")
        .file("etc/replaced", b"before")
        .file("etc/removed", b"removed")
        .pax(&[("path", format!("etc/{long}").as_bytes())])
        .file("etc/short", &vec![7; 300_000])
        .end();
    // As GNU tar pads.
    below.resize(below.len().next_multiple_of(10_240), 0);
    let above = Tar::new()
        .dir("etc")
        .file("etc/replaced", b"after")
        .file("etc/.wh.removed", b"")
        .dir("etc/opaque")
        .file("etc/opaque/.wh..wh..opq", b"")
        .end();
    vec![Blob::gzip(&below), Blob::gzip(&above)]
}

pub fn layout(bench: &Bench) -> Layout {
    let layout = Layout::new(bench.path("layout"));
    let mut manifest = layout.manifest(&layers());
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "1"});
    layout.index(&[manifest]);
    layout
}

/// Whichever driver has unpacked it, the image is the one that the layout holds.
#[test]
fn the_image_is_the_one_that_podman_was_given() {
    let test = "the_image_is_the_one_that_podman_was_given";
    if !ready(test) {
        return;
    }
    let made = Bench::new();
    let mut layouts = vec![layout(&made).0];
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../corpus/out");
    let corpus = std::env::var_os("COFOLIO_CORPUS").map_or(corpus, PathBuf::from);
    let real = corpus.join("redis/old");
    match real.is_dir() {
        true => layouts.push(real),
        false => println!("SKIP {test}: a real image (run corpus/build)"),
    }
    for layout in layouts {
        let expected = Bench::new();
        let expected =
            expected.import(&Source::Layout { path: layout.clone(), tag: None }).unwrap();
        for driver in ["overlay", "vfs"] {
            let bench = Bench::new();
            let podman = Podman::new(&bench, driver);
            if !podman.copy(test, &layout, "localhost/app:1") {
                continue;
            }
            let report = bench.import(&podman.source("localhost/app:1")).unwrap();
            assert_eq!(report.image, expected.image, "{driver}");
            assert_eq!(report.manifest, expected.manifest, "{driver}");
            assert_eq!(report.name, "localhost/app:1");
            let ids = |report: &cofolio_image::import::ImportReport| -> Vec<_> {
                report.layers.iter().map(|l| (l.diff_id.clone(), l.chain_id.clone())).collect()
            };
            assert_eq!(ids(&report), ids(&expected));
            // By part of the name, and by what podman calls its id.
            let again = bench.import(&podman.source("app:1")).unwrap();
            assert!(again.known && again.image == expected.image);
            let id = run(podman.command().args(["images", "--quiet", "--no-trunc"]));
            let id = String::from_utf8(id).unwrap();
            let again = bench.import(&podman.source(&id.trim()["sha256:".len()..][..12])).unwrap();
            assert!(again.known && again.name == "localhost/app:1", "{again:?}");
        }
    }
}

/// What `podman load` makes of an archive has another manifest, but the same layers.
#[test]
fn loaded_by_podman_itself() {
    let test = "loaded_by_podman_itself";
    if !ready(test) {
        return;
    }
    let bench = Bench::new();
    let layout = layout(&bench);
    let archive = bench.path("saved.tar");
    let mut skopeo = Command::new("skopeo");
    skopeo
        .args(["--insecure-policy", "copy", "--quiet"])
        .arg(format!("oci:{}", layout.0.display()));
    run(skopeo.arg(format!("docker-archive:{}:localhost/app:2", archive.display())));
    let podman = Podman::new(&bench, "vfs");
    run(podman.command().args(["load", "--quiet", "--input"]).arg(&archive));
    let report = bench.import(&podman.source("localhost/app:2")).unwrap();
    let expected = Bench::new();
    assert_eq!(report.image, expected.import(&layout.source()).unwrap().image);
}

/// Files in podman's store are files like others: whoever is root can change them. Then the layer
/// is not what its diff-id says, and no image comes of it.
#[test]
fn what_was_changed_in_the_store_is_noticed() {
    let test = "what_was_changed_in_the_store_is_noticed";
    if !ready(test) {
        return;
    }
    let bench = Bench::new();
    let podman = Podman::new(&bench, "vfs");
    podman.copy(test, &layout(&bench).0, "localhost/app:1");
    let source = podman.source("app:1");
    let before = bench.listing();
    let fails = |what: &str| {
        let error = bench.import(&source).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(bench.listing(), before, "{what}");
        error
    };
    let layers = fs::read_dir(podman.root.join("vfs/dir")).unwrap();
    let layers: Vec<PathBuf> = layers.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(layers.len(), 2);
    let each = |name: &str, act: &dyn Fn(&Path)| layers.iter().for_each(|l| act(&l.join(name)));

    each("etc/a", &|path| fs::write(path, b"b").unwrap());
    assert!(matches!(fails("its content has the digest"), ImportError::Digest { .. }));
    each("etc/a", &|path| fs::write(path, b"longer").unwrap());
    assert!(fails("etc/a\" has 6 bytes, in the archive it had 1").is_corrupt());
    each("etc/a", &|path| fs::remove_file(path).unwrap());
    assert!(fails("\"etc/a\": No such file").is_corrupt());
    each("etc/a", &|path| fs::write(path, b"a").unwrap());
    bench.import(&source).unwrap();

    // A layer of which podman kept no tar-split cannot be proven to be what it was.
    let bench = Bench::new();
    for entry in fs::read_dir(podman.root.join("vfs-layers")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "gz") {
            fs::remove_file(path).unwrap();
        }
    }
    let error = bench.import(&source).unwrap_err().to_string();
    assert!(error.contains("no tar-split"), "{error}");
    let error = bench.import(&podman.source("other:1")).unwrap_err().to_string();
    assert!(error.contains("it has: localhost/app:1"), "{error}");
}
