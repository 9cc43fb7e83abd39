//! Layouts and archives of images that lead elsewhere.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::mpsc;
use std::time::Duration;

use cofolio_image::import::{ImportOptions, import};
use cofolio_image::limits::Limits;
use cofolio_image::source::Source;
use cofolio_store::task::Task;
use serde_json::json;

use crate::refused;
use crate::support::*;

fn good(bench: &Bench, name: &str) -> Layout {
    Layout::image(bench.path(name), &[Blob::gzip(&Tar::new().file("a", b"a").end())])
}

/// The blob of the layer, wherever it lies.
fn layer_file(layout: &Layout) -> std::path::PathBuf {
    let digest = sha256(&gzip(&Tar::new().file("a", b"a").end()));
    layout.0.join("blobs/sha256").join(&digest[7..])
}

/// The directory of blobs is a link to a directory of the machine. Nothing is read there but names
/// that are digests, and nothing that is not what its digest says comes in.
#[test]
fn a_directory_of_blobs_that_is_a_link() {
    let bench = Bench::new();
    let layout = good(&bench, "to-etc");
    fs::remove_dir_all(layout.0.join("blobs")).unwrap();
    symlink("/etc", layout.0.join("blobs")).unwrap();
    refused(&bench, &layout, Limits::default(), &["missing"]);

    // A layer that is a link to a file of the machine: the digest does not fit.
    let layout = good(&bench, "to-passwd");
    let file = layer_file(&layout);
    let size = fs::metadata(&file).unwrap().len();
    let secret = bench.path("secret");
    fs::write(&secret, vec![b's'; usize::try_from(size).unwrap()]).unwrap();
    fs::remove_file(&file).unwrap();
    symlink(&secret, &file).unwrap();
    let error = refused(&bench, &layout, Limits::default(), &["blob sha256:"]);
    assert!(!error.to_string().contains("ssss"), "{error} shows what it has read");

    // And so of the documents.
    let layout = good(&bench, "index");
    fs::remove_file(layout.0.join("index.json")).unwrap();
    symlink("/etc/passwd", layout.0.join("index.json")).unwrap();
    let error = refused(&bench, &layout, Limits::default(), &["index.json"]);
    assert!(!error.to_string().contains("root:"), "{error} shows what it has read");
}

/// Files without end, and such as block whoever opens them: a layout from a tar archive can hold
/// FIFOs, and a link can lead to a device. An import must not hang on them, nor open a device that
/// does something then.
#[test]
fn blobs_that_are_no_files() {
    let bench = Bench::new();
    let fifo = bench.path("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for (at, target) in [fifo.to_str().unwrap(), "/dev/zero", "/dev/tty", "/"].iter().enumerate() {
        for document in [true, false] {
            let layout = good(&bench, &format!("{at}-{document}"));
            let file = if document { layout.0.join("index.json") } else { layer_file(&layout) };
            fs::remove_file(&file).unwrap();
            symlink(target, &file).unwrap();
            let before = bench.listing();
            let (domain, source) = (bench.domain.clone(), layout.source());
            let (done, wait) = mpsc::channel();
            std::thread::spawn(move || {
                let options = ImportOptions::default();
                let _ = done.send(import(&domain, &source, &options, &Task::default()).map(|_| ()));
            });
            let error = wait.recv_timeout(Duration::from_secs(20)).expect("it hangs").unwrap_err();
            assert_eq!(bench.listing(), before, "{target}: {error}");
        }
    }
    for form in ["oci-archive:", "docker-archive:", ""] {
        let text = format!("{form}{}", fifo.display());
        let error = Source::parse(&text)
            .and_then(|source| {
                import(&bench.domain, &source, &ImportOptions::default(), &Task::default())
            })
            .unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("not a regular file"), "{error}: {cause}");
    }
}

/// Members of an archive that are links to files of the machine, or to each other in a circle.
#[test]
fn members_that_are_links() {
    let bench = Bench::new();
    let index = |tar: Tar| {
        let path = bench.path("archive.tar");
        fs::write(&path, tar.end()).unwrap();
        let before = bench.listing();
        let source = Source::Archive { path, tag: None };
        let error = bench.import(&source).unwrap_err().to_string();
        assert_eq!(bench.listing(), before);
        assert!(error.contains("no index.json"), "{error}");
    };
    index(Tar::new().symlink("index.json", "/etc/passwd"));
    index(Tar::new().symlink("index.json", "../../../../../../etc/passwd"));
    index(Tar::new().link("index.json", "/etc/passwd"));
    index(Tar::new().symlink("index.json", "b").symlink("b", "index.json"));
    index(Tar::new().symlink("index.json", "index.json"));
}

/// `docker save` names files: names that lead out of the archive lead nowhere.
#[test]
fn names_of_docker_archives_stay_inside() {
    let bench = Bench::new();
    for config in ["/etc/passwd", "../../../../etc/passwd", "", "\0"] {
        let manifest = json!([{"Config": config, "RepoTags": ["a:1"], "Layers": []}]);
        let path = bench.path("save.tar");
        let tar = Tar::new().file("manifest.json", manifest.to_string().as_bytes());
        fs::write(&path, tar.end()).unwrap();
        let error = bench.import(&Source::DockerSave { path, tag: None }).unwrap_err();
        assert!(error.to_string().contains("missing"), "{config:?}: {error}");
    }
}

/// An image that calls itself a path, or has control characters in its name, needs another name.
/// Any other name is one, and the record's file name has no slash.
#[test]
fn names_that_are_paths() {
    let bench = Bench::new();
    let named = |name: &str| {
        let layout = good(&bench, "named");
        let path = layout.0.join("index.json");
        let mut index: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        index["manifests"][0]["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        fs::write(&path, index.to_string()).unwrap();
        let result = bench.import(&layout.source());
        fs::remove_dir_all(&layout.0).unwrap();
        result
    };
    for name in ["..:1", ".tmp.x:1", "a/..b"] {
        let report = named(name).unwrap();
        assert_eq!(report.name, name);
        assert!(bench.domain.get_ref(name).unwrap().is_some());
    }
    let refs = bench.path("store/domains/default/refs");
    assert_eq!(fs::read_dir(&refs).unwrap().count(), 3, "all of them are records in refs/");
    let long = format!("{}:1", "n".repeat(2000));
    let paths = ["../../../../../../tmp/evil:1", "/etc/cron.d/evil:1", "a/../b"];
    for name in paths.into_iter().chain(["a\nb:1", "\u{1b}[2J:1", "a\0:1", &long]) {
        let before = bench.listing();
        let error = named(name).unwrap_err();
        assert!(matches!(error, cofolio_image::error::ImportError::Name { .. }), "{error}");
        assert_eq!(bench.listing(), before);
    }
    assert!(!std::path::Path::new("/tmp/evil:1").exists());
}
