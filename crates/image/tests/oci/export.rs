//! What goes in as an image comes out as the same image. Archives of every kind are taken out again
//! byte for byte by [`Bench::layers`], so by all tests that import any; here is the rest.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cofolio_image::export::{
    Compression, Destination, ExportError, ExportOptions, Exported, export,
};
use cofolio_image::import::ImportOptions;
use cofolio_image::pack::ImageContents;
use cofolio_image::source::Source;
use cofolio_store::task::{Cancel, Cancelled, Task};
use cofolio_store::{Digest, FsckOptions, GcOptions, RootKind};
use serde_json::Value;

use crate::support::*;

/// An image of two layers with something of everything.
fn two_layers() -> Vec<Blob> {
    let mut random = Random(11);
    let noise: Vec<u8> = (0..3_000_000).map(|_| random.next() as u8).collect();
    let lower =
        Tar::new().dir("d").file("d/noise", &noise).file("d/text", b"text").file("gone", b"x");
    let upper =
        Tar::new().file("d/text", b"other").file(".wh.gone", b"").link("d/again", "d/noise");
    vec![Blob::gzip(&lower.end()), Blob { ..Blob::plain(upper.end()) }]
}

fn import(bench: &Bench, name: &str, layers: &[Blob]) -> (Layout, Digest) {
    let layout = Layout::image(bench.path(name), layers);
    let report = bench.import(&layout.source()).unwrap();
    (layout, report.image)
}

fn document(layout: &Path, digest: &str) -> Vec<u8> {
    fs::read(layout.join("blobs/sha256").join(&digest[7..])).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn gc(bench: &Bench) {
    bench.domain.gc(&ImageContents, &|| Ok(Vec::new()), &GcOptions::default()).unwrap();
}

/// Changes a file of the store behind its back.
fn damage(file: &Path, change: impl FnOnce(&Path)) {
    let _ = Command::new("chattr").arg("-i").arg(file).output();
    let writable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(file, writable).unwrap();
    change(file);
    let read_only = std::os::unix::fs::PermissionsExt::from_mode(0o444);
    fs::set_permissions(file, read_only).unwrap();
}

/// However it is compressed: the config is the same to the byte, and so the image has the same id;
/// another store makes the same metadata image of it; and threads make no difference.
#[test]
fn an_image_comes_out_as_itself() {
    let bench = Bench::new();
    let (source, image) = import(&bench, "image", &two_layers());
    let index: Value =
        serde_json::from_slice(&fs::read(source.0.join("index.json")).unwrap()).unwrap();
    let manifest = document(&source.0, index["manifests"][0]["digest"].as_str().unwrap());
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let config = manifest["config"]["digest"].as_str().unwrap();
    for compression in [Compression::Gzip, Compression::Zstd, Compression::None] {
        let to = bench.path("out");
        let report = bench.export("image", &to, compression).unwrap();
        assert_eq!(report.config.to_string(), config);
        assert_eq!(document(&to, config), document(&source.0, config));
        for (layer, blob) in report.layers.iter().zip(two_layers()) {
            assert_eq!(layer.diff_id.to_string(), blob.diff_id);
            let size = document(&to, &layer.digest.to_string()).len() as u64;
            assert_eq!(size, layer.size);
        }
        let other = Bench::new();
        let source = Source::Layout { path: to.clone(), tag: Some("exported:1".into()) };
        assert_eq!(other.import(&source).unwrap().image, image);

        let record = bench.domain.get_ref("image").unwrap().unwrap();
        let exported = Exported { image: &record.image, record: Some(&record), name: None };
        for threads in [1, 7] {
            let path = bench.path(&format!("out-{threads}"));
            let destination = Destination::Layout { path: path.clone(), tag: None };
            let options = ExportOptions { compression, threads, ..Default::default() };
            let again = export(&bench.domain, exported, &destination, &options, &Task::default());
            assert_eq!(again.unwrap().manifest, report.manifest);
            fs::remove_dir_all(path).unwrap();
        }
        fs::remove_dir_all(to).unwrap();
    }
}

/// One archive replaces its own file. The image shows the second content only, garbage collection
/// runs, and the archive still has both.
#[test]
fn files_that_an_archive_replaces_itself_are_kept_for_it() {
    let bench = Bench::new();
    let first = vec![1u8; 5000];
    let tar = Tar::new()
        .file("a", &first)
        .file("a", b"second")
        .dir("d")
        .file("d/deep", &[2; 9000])
        .symlink("d", "a")
        .file(".wh..wh.plnk/7.9", b"bookkeeping")
        .file(".wh.b", b"a whiteout with content")
        .end();
    let blob = Blob::gzip(&tar);
    import(&bench, "image", std::slice::from_ref(&blob));
    gc(&bench);
    let report = bench.export("image", &bench.path("out"), Compression::None).unwrap();
    assert_eq!(document(&bench.path("out"), &report.layers[0].digest.to_string()), tar);
    let fsck = || {
        let options = FsckOptions { rehash: true };
        bench.domain.fsck(&ImageContents, options, &Task::default()).unwrap().findings
    };
    assert_eq!(fsck(), []);
    // Without the object it is damage, and said so.
    let lost = cofolio_store::verity::digest(&first);
    let path = bench.domain.object_path(&lost).unwrap();
    let _ = Command::new("chattr").arg("-i").arg(&path).output();
    fs::remove_file(path).unwrap();
    let findings = fsck();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(findings[0].user.as_ref().unwrap().starts_with("split of layer"), "{findings:?}");
    match bench.export("image", &bench.path("again"), Compression::None) {
        Err(ExportError::Object { digest, .. }) => assert_eq!(digest, lost),
        other => panic!("{other:?}"),
    }
}

/// An object was altered behind our back: the error names it, and the destination has nothing of
/// the image.
#[test]
fn altered_content_is_not_given_out() {
    let bench = Bench::new();
    import(&bench, "image", &two_layers());
    let text = cofolio_store::verity::digest(b"text");
    let path = bench.domain.object_path(&text).unwrap();
    damage(&path, |path| fs::write(path, "tExt").unwrap());
    let out = bench.path("out");
    fs::create_dir(&out).unwrap();
    let record = bench.domain.get_ref("image").unwrap().unwrap();
    let exported = Exported { image: &record.image, record: Some(&record), name: None };
    for destination in [
        Destination::Layout { path: out.join("layout"), tag: None },
        Destination::Archive { path: out.join("archive"), tag: None },
        Destination::DockerArchive { path: out.join("docker"), tag: None },
    ] {
        let options = ExportOptions::default();
        let result = export(&bench.domain, exported, &destination, &options, &Task::default());
        match result {
            Err(ExportError::Object { digest, user, .. }) => {
                assert_eq!(digest, text);
                assert_eq!(user, format!("layer {}", record.layers[0].chain_id));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(names(&out), [""; 0]);
    }
    // The same when the caller wants it to end.
    damage(&path, |path| fs::write(path, "text").unwrap());
    let destination = Destination::Layout { path: out.join("layout"), tag: None };
    let (cancel, calls) = (Cancel::default(), AtomicU64::new(0));
    let cancels = cancel.clone();
    let task = Task::new(cancel, move |_| {
        if calls.fetch_add(1, Ordering::Relaxed) == 3 {
            cancels.cancel();
        }
    });
    let result = export(&bench.domain, exported, &destination, &Default::default(), &task);
    assert!(matches!(result, Err(ExportError::Cancelled(Cancelled))), "{result:?}");
    assert_eq!(names(&out), [""; 0]);
}

/// Whoever owns an image layout could put a link in place of its `blobs/sha256` after that was looked at, and root
/// wrote where the link led.
#[test]
fn a_layout_that_changes_meanwhile_leads_nowhere() {
    let bench = Bench::new();
    import(&bench, "image", &two_layers());
    let (out, elsewhere) = (bench.path("out"), bench.path("elsewhere"));
    fs::create_dir(&elsewhere).unwrap();
    bench.export("image", &out, Compression::None).unwrap();
    let blobs = out.join("blobs/sha256");
    let blob = blobs.join(&names(&blobs)[0]);
    fs::remove_file(&blob).unwrap();
    fs::create_dir(&blob).unwrap();
    match bench.export("image", &out, Compression::None) {
        Err(ExportError::Io { path, .. }) => assert_eq!(path, out),
        other => panic!("{other:?}"),
    }
    fs::remove_dir(&blob).unwrap();
    let record = bench.domain.get_ref("image").unwrap().unwrap();
    let exported = Exported { image: &record.image, record: Some(&record), name: None };
    let destination = Destination::Layout { path: out.clone(), tag: None };
    let moved = out.join("moved");
    let (from, to, link) = (blobs.clone(), moved.clone(), elsewhere.clone());
    let task = Task::new(Cancel::default(), move |_| {
        if !to.exists() {
            fs::rename(&from, &to).unwrap();
            std::os::unix::fs::symlink(&link, &from).unwrap();
        }
    });
    export(&bench.domain, exported, &destination, &Default::default(), &task).unwrap();
    assert!(blobs.is_symlink());
    assert_eq!(names(&elsewhere), [""; 0]);
    assert!(moved.join(blob.file_name().unwrap()).is_file());

    // The index was read through a link.
    fs::remove_file(&blobs).unwrap();
    fs::rename(&moved, &blobs).unwrap();
    let index = out.join("index.json");
    let (from, to) = (index.clone(), elsewhere.join("index.json"));
    let task = Task::new(Cancel::default(), move |_| {
        if !to.exists() {
            fs::rename(&from, &to).unwrap();
            std::os::unix::fs::symlink(&to, &from).unwrap();
        }
    });
    let refused = export(&bench.domain, exported, &destination, &Default::default(), &task);
    let said = refused.unwrap_err().to_string();
    assert!(said.ends_with("index.json is a link"), "{said}");

    // A failed export removed a file of somebody else's, where its own directory had been.
    let (parent, aside, theirs) =
        (bench.path("parent"), bench.path("aside"), elsewhere.join("new"));
    fs::create_dir(&parent).unwrap();
    fs::write(&theirs, "theirs").unwrap();
    let destination = Destination::Layout { path: parent.join("new"), tag: None };
    let (from, link) = (parent.clone(), elsewhere.clone());
    let task = Task::new(Cancel::default(), move |_| {
        if !aside.exists() {
            fs::rename(&from, &aside).unwrap();
            std::os::unix::fs::symlink(&link, &from).unwrap();
            std::os::unix::fs::symlink(&link, aside.join("new/index.json")).unwrap();
        }
    });
    let refused = export(&bench.domain, exported, &destination, &Default::default(), &task);
    let said = refused.unwrap_err().to_string();
    assert!(said.ends_with("index.json is a link"), "{said}");
    assert_eq!(fs::read(&theirs).unwrap(), b"theirs");
}

/// A failed export removes the layout that it began. If a blob cannot be removed, `oci-layout` has to stay
/// too: a directory without it was refused by every later export.
#[test]
fn a_new_layout_that_cannot_be_removed_is_completed_by_the_next_export() {
    let bench = Bench::new();
    import(&bench, "image", &two_layers());
    let out = bench.path("out");
    let record = bench.domain.get_ref("image").unwrap().unwrap();
    let exported = Exported { image: &record.image, record: Some(&record), name: None };
    let destination = Destination::Layout { path: out.clone(), tag: None };
    let (cancel, foreign) = (Cancel::default(), out.join("blobs/sha256/foreign"));
    let (cancels, file) = (cancel.clone(), foreign.clone());
    let task = Task::new(cancel, move |_| {
        fs::write(&file, "").unwrap();
        cancels.cancel();
    });
    let result = export(&bench.domain, exported, &destination, &Default::default(), &task);
    assert!(matches!(result, Err(ExportError::Cancelled(Cancelled))), "{result:?}");
    assert_eq!(
        (names(&out), names(&out.join("blobs/sha256"))),
        (vec!["blobs".to_owned(), "oci-layout".to_owned()], vec!["foreign".to_owned()],)
    );
    fs::remove_file(foreign).unwrap();
    bench.export("image", &out, Compression::None).unwrap();
}

/// A slow export must hold up neither garbage collection nor the imports that wait behind it; and
/// what it writes stays until it is done, even if its name goes meanwhile.
#[test]
fn garbage_is_collected_while_an_export_runs() {
    let bench = Bench::new();
    import(&bench, "image", &two_layers());
    let record = bench.domain.get_ref("image").unwrap().unwrap();
    let exported = Exported { image: &record.image, record: Some(&record), name: None };
    let destination = Destination::Layout { path: bench.path("out"), tag: None };
    let leases = Arc::new(AtomicU64::new(0));
    let (domain, seen) = (bench.domain.clone(), leases.clone());
    let task = Task::new(Cancel::default(), move |_| {
        if seen.load(Ordering::Relaxed) == 0 {
            seen.store(domain.roots(RootKind::Lease).unwrap().len() as u64, Ordering::Relaxed);
            domain.remove_ref("image").unwrap();
            let options = GcOptions::default();
            domain.gc(&ImageContents, &|| Ok(Vec::new()), &options).unwrap();
        }
    });
    export(&bench.domain, exported, &destination, &Default::default(), &task).unwrap();
    let leases = leases.load(Ordering::Relaxed);
    assert_eq!((leases, bench.domain.roots(RootKind::Lease).unwrap().len()), (1, 0));
    gc(&bench);
    assert_eq!(bench.domain.images().unwrap(), []);
}

/// A store from before there were splits: the export says which layer lacks its own, and importing
/// the image again, which otherwise would not read a byte, makes it.
#[test]
fn layers_without_a_split_get_one_with_the_next_import() {
    let bench = Bench::new();
    let (layout, image) = import(&bench, "image", &two_layers());
    let store = bench.path("store");
    let layers = store.join("domains/default/layers");
    let splits = || names(&layers).into_iter().filter(|name| name.ends_with(".split"));
    let without = |which: usize| {
        let chain = bench.domain.get_ref("image").unwrap().unwrap().layers[which].chain_id.clone();
        let file = layers.join(splits().find(|name| name.contains(&chain[7..])).unwrap());
        let _ = Command::new("chattr").arg("-i").arg(&file).output();
        (chain, file)
    };
    let (chain, file) = without(1);
    fs::remove_file(file).unwrap();
    match bench.export("image", &bench.path("out"), Compression::None) {
        Err(ExportError::NoSplit { layers }) => assert_eq!(layers, [chain]),
        other => panic!("{other:?}"),
    }
    let report = bench.import(&layout.source()).unwrap();
    assert!(!report.known && report.layers[0].known && !report.layers[1].known);
    assert_eq!(report.image, image);
    bench.export("image", &bench.path("out"), Compression::None).unwrap();
    assert!(bench.import(&layout.source()).unwrap().known);

    // A damaged one stops the export, garbage collection and nothing else, and fsck names it. A
    // layer whose split cannot be read is not believed when another image brings it.
    let (chain, file) = without(0);
    damage_split(&file);
    match bench.export("image", &bench.path("again"), Compression::None) {
        Err(ExportError::Split { layer, .. }) => assert_eq!(layer, chain),
        other => panic!("{other:?}"),
    }
    let fsck =
        || bench.domain.fsck(&ImageContents, FsckOptions::default(), &Task::default()).unwrap();
    let damage = bench.domain.damage(&fsck(), &ImageContents, &Task::default()).unwrap();
    assert_eq!(damage.layers.iter().collect::<Vec<_>>(), [&chain]);
    let (_, other) = import(&bench, "other", &two_layers()[..1]);
    assert_ne!(other, image);
    bench.export("image", &bench.path("again"), Compression::None).unwrap();
    gc(&bench);

    // A repair brings back one layer's split, and its object that no tree names.
    let (_, file) = without(1);
    damage_split(&file);
    let damage = bench.domain.damage(&fsck(), &ImageContents, &Task::default()).unwrap();
    let options = ImportOptions { repair: Some(damage), ..ImportOptions::default() };
    let report =
        cofolio_image::import::import(&bench.domain, &layout.source(), &options, &Task::default());
    assert!(report.unwrap().layers[0].known);
    assert_eq!(fsck().findings, []);
    bench.export("image", &bench.path("repaired"), Compression::None).unwrap();
}

/// Cuts a split in the middle.
fn damage_split(file: &Path) {
    damage(file, |file| {
        let bytes = fs::read(file).unwrap();
        fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
    });
}

/// A directory has no layers: its image becomes one, in which everything is that the directory had.
#[test]
fn a_directory_becomes_a_layer() {
    let test = "a_directory_becomes_a_layer";
    if !is_root(test) {
        return;
    }
    let bench = Bench::new();
    let root = bench.path("tree");
    crate::scan::make_tree(&root);
    // What PAX records are for.
    let deep = format!("{0}/{0}", "d".repeat(120));
    fs::create_dir_all(root.join(&deep)).unwrap();
    std::os::unix::fs::symlink("t".repeat(300), root.join(&deep).join("long")).unwrap();
    fs::write(root.join("new\nline"), "n").unwrap();
    sparse(&root.join("sparse"), 8 << 20, &[0, 3 << 20, (8 << 20) - 3]);
    sparse(&root.join("hole at the end"), 9 << 20, &[1 << 20]);
    let report = bench.import(&Source::Directory { path: root.clone() }).unwrap();
    for compression in [Compression::Gzip, Compression::None] {
        let to = bench.path("out");
        bench.export(&report.name, &to, compression).unwrap();
        let other = Bench::new();
        let again = other.import(&Source::Layout { path: to.clone(), tag: None }).unwrap();
        assert_eq!(again.image, report.image);
        crate::scan::compare(&crate::scan::view_of_directory(&root), &other.view(&again), true);
        fs::remove_dir_all(to).unwrap();
    }
    if have(test, "tar") {
        let to = bench.path("out");
        let exported = bench.export(&report.name, &to, Compression::None).unwrap();
        let (extracted, blob) = (bench.path("extracted"), exported.layers[0].digest.hex());
        fs::create_dir(&extracted).unwrap();
        let mut command = Command::new("tar");
        command.args(["--numeric-owner", "--same-owner", "-p", "--xattrs", "--xattrs-include=*"]);
        run(command.arg("-C").arg(&extracted).arg("-xf").arg(to.join("blobs/sha256").join(blob)));
        let expected = crate::scan::view_of_directory(&root);
        crate::scan::compare(&expected, &crate::scan::view_of_directory(&extracted), true);
    }
    fs::create_dir(root.join(".wh.not-a-whiteout")).unwrap();
    let report = bench.import(&Source::Directory { path: root }).unwrap();
    match bench.export(&report.name, &bench.path("refused"), Compression::None) {
        Err(ExportError::Entry { path, .. }) => assert_eq!(path, "/.wh.not-a-whiteout"),
        other => panic!("{other:?}"),
    }
}

/// A file of this size with a few bytes at each offset.
fn sparse(path: &Path, size: u64, offsets: &[u64]) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::create(path).unwrap();
    file.set_len(size).unwrap();
    offsets.iter().for_each(|&offset| file.write_all_at(b"abc", offset).unwrap());
}

/// The archive of a directory had all zeros of its sparse files: a file of 64 GiB in a hole took
/// minutes and 64 GiB.
#[test]
fn holes_of_a_directory_are_not_in_its_archive() {
    let bench = Bench::new();
    let root = bench.path("tree");
    fs::create_dir(&root).unwrap();
    sparse(&root.join("file"), 64 << 30, &[5, 32 << 30]);
    let report = bench.import(&Source::Directory { path: root }).unwrap();
    let to = bench.path("out");
    let exported = bench.export(&report.name, &to, Compression::None).unwrap();
    assert!(exported.layers[0].uncompressed < 1 << 20, "{}", exported.layers[0].uncompressed);
    let other = Bench::new();
    assert_eq!(other.import(&Source::Layout { path: to, tag: None }).unwrap().image, report.image);
}

/// Images come together in one layout; one of the same name goes, others stay, and so does
/// everything when the export fails.
#[test]
fn a_layout_that_is_there_gets_the_image_in_addition() {
    let bench = Bench::new();
    import(&bench, "one", &two_layers());
    import(&bench, "two", &two_layers()[..1]);
    let to = bench.path("out");
    let put = |name: &str, tag: &str| {
        let record = bench.domain.get_ref(name).unwrap().unwrap();
        let exported = Exported { image: &record.image, record: Some(&record), name: None };
        let destination = Destination::Layout { path: to.clone(), tag: Some(tag.into()) };
        export(&bench.domain, exported, &destination, &Default::default(), &Task::default())
    };
    let tags = || {
        let index: Value =
            serde_json::from_slice(&fs::read(to.join("index.json")).unwrap()).unwrap();
        let entries = index["manifests"].as_array().unwrap().iter();
        let tag = "org.opencontainers.image.ref.name";
        entries.map(|e| e["annotations"][tag].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    put("one", "a").unwrap();
    put("two", "b").unwrap();
    assert_eq!(tags(), ["a", "b"]);
    put("two", "a").unwrap();
    assert_eq!(tags(), ["b", "a"]);
    let image = |tag: &str| {
        let source = Source::Layout { path: to.clone(), tag: Some(tag.into()) };
        Bench::new().import(&source).unwrap().image
    };
    let two = bench.domain.get_ref("two").unwrap().unwrap().image;
    assert_eq!((image("a"), image("b")), (two, two));

    // Images without a name stay beside each other, but none is there twice.
    let unnamed = |name: &str| {
        let record = bench.domain.get_ref(name).unwrap().unwrap();
        let exported = Exported { image: &record.image, record: Some(&record), name: None };
        let destination = Destination::Layout { path: bench.path("unnamed"), tag: None };

        let options = ExportOptions::default();
        export(&bench.domain, exported, &destination, &options, &Task::default()).unwrap().manifest
    };
    let digests = [unnamed("one"), unnamed("two"), unnamed("two")];
    let index = fs::read(bench.path("unnamed").join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let entries = index["manifests"].as_array().unwrap().iter();
    assert_eq!(
        entries.map(|entry| entry["digest"].as_str().unwrap().to_owned()).collect::<Vec<_>>(),
        digests[..2].iter().map(ToString::to_string).collect::<Vec<_>>()
    );

    // Two at once: the slower one wrote the index without the other's image.
    let other = fs::File::open(&to).unwrap();
    other.lock().unwrap();
    let refused = put("one", "c").unwrap_err();
    assert!(refused.to_string().contains("another export writes to it"), "{refused}");
    drop(other);

    let before = (names(&to), names(&to.join("blobs/sha256")));
    let text = cofolio_store::verity::digest(b"other");
    let path = bench.domain.object_path(&text).unwrap();
    damage(&path, |path| fs::write(path, "oTher").unwrap());
    assert!(matches!(put("one", "c"), Err(ExportError::Object { .. })));
    assert_eq!((names(&to), names(&to.join("blobs/sha256"))), before);

    fs::write(bench.path("file"), "").unwrap();
    for (path, what) in [("file", "is a file"), ("store", "neither empty nor an image layout")] {
        let refused = bench.export("one", &bench.path(path), Compression::None).unwrap_err();
        assert!(refused.to_string().contains(what), "{refused}");
    }
}

/// A layout came from somewhere, with a link where its blobs lie: the export wrote to where that
/// leads. Now it says so, and neither the layout nor what the link leads to is different. A blob
/// that is a link is replaced, not written through.
#[test]
fn links_in_a_layout_lead_an_export_nowhere() {
    let bench = Bench::new();
    import(&bench, "one", &two_layers());
    let elsewhere = bench.path("elsewhere");
    fs::create_dir_all(elsewhere.join("sha256")).unwrap();
    // What a killed export would have left, and an export removes.
    fs::write(elsewhere.join("sha256/.blob.cofolio-Left01Left01"), "").unwrap();
    let link = |to: &Path, own: &Path| std::os::unix::fs::symlink(to, own).unwrap();
    for part in ["blobs", "blobs/sha256", "index.json"] {
        let to = bench.path(&part.replace('/', "-"));
        bench.export("one", &to, Compression::None).unwrap();
        let own = to.join(part);
        let aside = bench.path("aside");
        fs::rename(&own, &aside).unwrap();
        let leads = match part {
            "blobs" => elsewhere.clone(),
            "blobs/sha256" => elsewhere.join("sha256"),
            _ => aside.clone(),
        };
        link(&leads, &own);
        let before = names(&to);
        let refused = bench.export("one", &to, Compression::Gzip).unwrap_err();
        let said = refused.to_string();
        assert!(matches!(refused, ExportError::Destination { .. }), "{said}");
        assert!(said.contains(to.to_str().unwrap()), "{said}");
        assert_eq!((names(&to), names(&elsewhere)), (before, vec!["sha256".to_owned()]));
        assert_eq!(names(&elsewhere.join("sha256")), [".blob.cofolio-Left01Left01"]);
        assert!(own.is_symlink());
        fs::remove_file(&own).unwrap();
        fs::rename(&aside, &own).unwrap();
        bench.export("one", &to, Compression::Gzip).unwrap();
    }

    let to = bench.path("blobs");
    let report = bench.export("one", &to, Compression::None).unwrap();
    let blob = to.join("blobs/sha256").join(report.layers[0].digest.hex());
    let (content, victim) = (fs::read(&blob).unwrap(), bench.path("victim"));
    fs::write(&victim, "mine").unwrap();
    fs::remove_file(&blob).unwrap();
    link(&victim, &blob);
    bench.export("one", &to, Compression::None).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"mine");
    assert!(!blob.is_symlink() && fs::read(&blob).unwrap() == content);
}

/// Exports were killed and left what they had, hidden beside where it was to go. The next export to
/// that place removes it; not what another process is still making, which has a lock on it. The number of a process
/// does not tell: in a container every run of the program has the same one.
#[test]
fn what_a_killed_export_left_goes_with_the_next() {
    let bench = Bench::new();
    import(&bench, "image", &two_layers());
    let out = bench.path("out");
    fs::create_dir(&out).unwrap();
    let held = out.join(".a.tar.cofolio-Held00Held00");
    let lock = fs::File::create_new(&held).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    // A layout that is not complete has no index.
    fs::create_dir_all(out.join("layout/blobs/sha256")).unwrap();
    fs::write(out.join("layout/oci-layout"), "").unwrap();
    for name in [".a.tar.cofolio-Left01Left01", ".a.tar.cofolio-x", ".a.tar"] {
        fs::write(out.join(name), "half an archive").unwrap();
    }
    std::os::unix::fs::symlink("/", out.join(".a.tar.cofolio-LinkedLinked")).unwrap();
    bench.export("image", &out.join("layout"), Compression::None).unwrap();
    let record = bench.domain.get_ref("image").unwrap().unwrap();
    let exported = Exported { image: &record.image, record: Some(&record), name: None };
    let to = |path| Destination::Archive { path, tag: None };
    let options = ExportOptions::default();
    export(&bench.domain, exported, &to(out.join("a.tar")), &options, &Task::default()).unwrap();
    let expected = [
        ".a.tar",
        ".a.tar.cofolio-Held00Held00",
        ".a.tar.cofolio-LinkedLinked",
        ".a.tar.cofolio-x",
        "a.tar",
        "layout",
    ];
    assert_eq!(names(&out), expected);

    let version = fs::read_to_string(out.join("layout/oci-layout")).unwrap();
    assert_eq!(version, r#"{"imageLayoutVersion":"1.0.0"}"#);

    // Into a layout that is there: blobs and the index, too.
    let blobs = out.join("layout/blobs/sha256");
    fs::write(blobs.join(".blob.cofolio-Left01Left01"), "half a blob").unwrap();
    fs::write(out.join("layout/.index.json.cofolio-Left01Left01"), "{").unwrap();
    bench.export("image", &out.join("layout"), Compression::None).unwrap();
    assert!(names(&blobs).iter().all(|name| name.len() == 64), "{:?}", names(&blobs));
    assert_eq!(names(&out.join("layout")), ["blobs", "index.json", "oci-layout"]);
}

/// Archives of both kinds are read by our own import, and the docker one has the same config as the
/// layout.
#[test]
fn archives_are_read_again() {
    let bench = Bench::new();
    // The same layer twice is one member.
    let twice = [two_layers(), two_layers()].concat();
    let (_, image) = import(&bench, "image", &twice);
    let record = bench.domain.get_ref("image").unwrap().unwrap();
    let exported = Exported { image: &image, record: Some(&record), name: Some("name:1") };
    let (oci, docker) = (bench.path("oci.tar"), bench.path("docker.tar"));
    for (destination, source) in [
        (
            Destination::Archive { path: oci.clone(), tag: None },
            Source::Archive { path: oci.clone(), tag: Some("name:1".into()) },
        ),
        (
            Destination::DockerArchive { path: docker.clone(), tag: None },
            Source::DockerSave { path: docker.clone(), tag: Some("name:1".into()) },
        ),
    ] {
        for _ in 0..2 {
            // The second time over the first.
            let options = ExportOptions { replace: true, ..Default::default() };
            export(&bench.domain, exported, &destination, &options, &Task::default()).unwrap();
        }
        let other = Bench::new();
        assert_eq!(other.import(&source).unwrap().image, image, "{source:?}");
        let again = other.domain.refs().unwrap().remove(0).1;
        assert_eq!(again.config, record.config);
    }
}

/// An outside judge: skopeo reads what is exported, checks every blob's digest on the way, and
/// unpacks the layers to what their diff-ids say.
#[test]
fn skopeo_takes_what_is_exported() {
    let test = "skopeo_takes_what_is_exported";
    if !have(test, "skopeo") {
        return;
    }
    let bench = Bench::new();
    import(&bench, "image", &two_layers());
    let policy = bench.path("policy.json");
    fs::write(&policy, r#"{"default":[{"type":"insecureAcceptAnything"}]}"#).unwrap();
    for (compression, name) in
        [(Compression::Gzip, "gzip"), (Compression::Zstd, "zstd"), (Compression::None, "none")]
    {
        let to = bench.path(name);
        let report = bench.export("image", &to, compression).unwrap();
        let from = format!("oci:{}:exported:1", to.display());
        let inspected = run(Command::new("skopeo").args(["inspect", "--config", &from]));
        let inspected: Value = serde_json::from_slice(&inspected).unwrap();
        let diff_ids: Vec<_> = report.layers.iter().map(|l| l.diff_id.to_string()).collect();
        assert_eq!(inspected["rootfs"]["diff_ids"], serde_json::json!(diff_ids));
        let copy = bench.path(&format!("{name}-copy"));
        let mut command = Command::new("skopeo");
        command.arg("--policy").arg(&policy).args(["copy", "-q", "--dest-decompress", &from]);
        run(command.arg(format!("dir:{}", copy.display())));
        for diff_id in diff_ids {
            assert_eq!(sha256(&fs::read(copy.join(&diff_id[7..])).unwrap()), diff_id, "{name}");
        }
    }
}

/// Real images: every archive, and the whole image in another store.
#[test]
fn real_images_come_out_as_they_went_in() {
    let test = "real_images_come_out_as_they_went_in";
    let layouts = crate::corpus::layouts();
    if layouts.is_empty() {
        println!("SKIP {test}: no images (run corpus/build, or set COFOLIO_CORPUS)");
    }
    for layout in layouts {
        let bench = Bench::new();
        let source = Source::Layout { path: layout.clone(), tag: None };
        let report = bench.import(&source).unwrap();
        let to = bench.path("out");
        let exported = bench.export(&report.name, &to, Compression::None).unwrap();
        for (out, there) in exported.layers.iter().zip(&report.layers) {
            assert_eq!(out.diff_id, there.diff_id, "{layout:?}");
        }
        let again = Bench::new().import(&Source::Layout { path: to, tag: None });
        assert_eq!(again.unwrap().image, report.image, "{layout:?}");
    }
}
