//! Garbage collection, fsck, disk usage, verification and feature sets, on a real directory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cofolio_store::task::{Cancel, Event, Task};
use cofolio_store::{
    Contents, Digest, Domain, Error, ErrorKind, FileKind, FileName, FindingKind, FsckOptions,
    GcOptions, GcReport, ImportOptions, InitOptions, Publish, Ref, Root, RootKind, ScrubOptions,
    Store, TrimOptions, verity,
};
use common::{Lines, Scratch, content, fill, import, nothing_live};

/// Without the immutable flag, so that the tests can do harm.
fn domain(scratch: &Scratch) -> Domain {
    let store = Store::open_or_init(&scratch.path, &InitOptions { immutable: false }).unwrap();
    store.domain("default").unwrap()
}

fn put(domain: &Domain, name: &str, seeds: &[u64]) -> Digest {
    let pieces: Vec<_> = seeds.iter().map(|seed| content(5000, *seed)).collect();
    let layer = format!("sha256:{name}");
    import(domain, name, &pieces, Some(&layer), ImportOptions::default()).unwrap()
}

fn object(seed: u64) -> Digest {
    verity::digest(&content(5000, seed))
}

fn gc(domain: &Domain) -> Result<GcReport, Error> {
    domain.gc(&Lines, &nothing_live, &GcOptions::default())
}

#[test]
fn gc_takes_what_nothing_keeps_and_says_so() {
    let scratch = Scratch::new("gc");
    let domain = domain(&scratch);
    put(&domain, "a", &[1, 2]);
    let b = put(&domain, "b", &[2, 3]);
    assert_eq!(gc(&domain).unwrap().bytes(), 0);
    domain.remove_ref("b").unwrap();

    let dry = GcOptions { dry_run: true, ..GcOptions::default() };
    let plan = domain.gc(&Lines, &nothing_live, &dry).unwrap();
    assert_eq!((plan.objects, plan.images, plan.layers), (1, 1, 1));
    assert!(domain.has_image(&b).unwrap() && domain.object_size(&object(3)).unwrap().is_some());

    let done = gc(&domain).unwrap();
    assert_eq!(GcReport { dry_run: true, ..done.clone() }, plan);
    assert_eq!((done.kept_objects, done.kept_images, done.kept_layers), (2, 1, 1));
    assert_eq!(done.object_bytes, 8192);
    let layer = FileName::chain(FileKind::Layer, "sha256:b").unwrap();
    assert!(!domain.has_image(&b).unwrap() && !domain.has_named(&layer).unwrap());
    assert_eq!(domain.object_size(&object(3)).unwrap(), None);
    assert_eq!(domain.object_size(&object(2)).unwrap(), Some(5000), "`a` shares it");
}

#[test]
fn every_kind_of_root_keeps_an_image_as_long_as_it_says() {
    let scratch = Scratch::new("roots");
    let domain = domain(&scratch);
    let image = put(&domain, "a", &[1]);
    let mut root = Root::new(RootKind::Mount, "one/of:them");
    root.images.push(image);
    domain.put_root(&root).unwrap();
    domain.remove_ref("a").unwrap();
    assert_eq!(gc(&domain).unwrap().kept_images, 1);
    assert_eq!(domain.roots(RootKind::Mount).unwrap(), [root]);
    domain.put_ref("a", &Ref::new(image)).unwrap();
    assert!(domain.remove_root(RootKind::Mount, "one/of:them").unwrap());
    let lease = domain.lease(&image, Vec::new(), "held").unwrap();
    let mut mount = Root::new(RootKind::Mount, "before the reboot");
    mount.images.push(image);
    mount.boot_id = Some("old".into());
    domain.put_root(&mount).unwrap();
    domain.remove_ref("a").unwrap();

    let at = |boot: &str| GcOptions { boot_id: Some(boot.into()), ..GcOptions::default() };
    assert_eq!(domain.gc(&Lines, &nothing_live, &at("new")).unwrap().kept_images, 1);
    drop(lease);
    assert_eq!(domain.roots(RootKind::Lease).unwrap(), []);
    domain.put_root(&mount).unwrap();
    // Its process was killed, and the record torn: gc once kept everything because of it.
    std::fs::create_dir(scratch.path.join("staging").join("d".repeat(32))).unwrap();
    let path = scratch.path.join("domains/default/roots/lease");
    std::fs::write(path.join(format!("{}.json", "d".repeat(32))), "{").unwrap();
    let report = domain.gc(&Lines, &nothing_live, &at("old")).unwrap();
    assert_eq!(
        (report.roots, report.unreadable),
        (vec![format!("lease/{}", "d".repeat(32))], vec![])
    );
    // Neither ref nor root, but mounted all the same: the kernel knows.
    let live = || Ok(vec![image]);
    let report = domain.gc(&Lines, &live, &at("new")).unwrap();
    assert_eq!((report.roots.len(), report.kept_images), (1, 1));
    assert_eq!(gc(&domain).unwrap().images, 1);
}

/// The story of composefs-rs #346 turned round: what an unreadable image, layer or record might need is
/// never collected. Once it stopped the whole collection, so that one image could fill the disk; now
/// everything else goes all the same.
#[test]
fn gc_keeps_what_it_cannot_read_and_collects_the_rest() {
    let scratch = Scratch::new("unreadable");
    let domain = domain(&scratch);
    let a = put(&domain, "a", &[1, 2]);
    let path = domain.image_path(&a).unwrap();
    let whole = std::fs::read(&path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let layer = scratch.path.join("domains/default/layers/sha256%3Aa.dump.zst");
    let layer_whole = std::fs::read(&layer).unwrap();
    std::fs::set_permissions(&layer, PermissionsExt::from_mode(0o644)).unwrap();

    // An image, and then a layer: any object may be one of theirs.
    for (path, whole, what) in
        [(&path, &whole, format!("image {a}")), (&layer, &layer_whole, "layer sha256:a".into())]
    {
        let b = put(&domain, "b", &[3]);
        domain.remove_ref("b").unwrap();
        std::fs::write(path, &whole[..whole.len() / 2]).unwrap();
        let dry = GcOptions { dry_run: true, ..GcOptions::default() };
        let plan = domain.gc(&Lines, &nothing_live, &dry).unwrap();
        let done = gc(&domain).unwrap();
        assert_eq!(GcReport { dry_run: true, ..done.clone() }, plan);
        let [unreadable] = &done.unreadable[..] else { panic!("{done:?}") };
        assert_eq!(unreadable.what, format!("{what} (kept by ref `a`)"));
        assert_eq!((done.images, done.layers, done.objects), (1, 1, 0));
        assert!(!domain.has_image(&b).unwrap());
        assert!(domain.object_size(&object(3)).unwrap().is_some());
        std::fs::write(path, whole).unwrap();
        assert_eq!(gc(&domain).unwrap().objects, 1, "and now it is known");
    }

    // A record: any image may be its own. Only what interrupted imports left goes.
    let b = put(&domain, "b", &[3]);
    domain.remove_ref("b").unwrap();
    let _lease = domain.lease(&a, Vec::new(), "torn").unwrap();
    let lease = domain.roots(RootKind::Lease).unwrap().remove(0).id;
    let lease = format!("roots/lease/{lease}.json");
    let records = ["refs/b.json", "refs/directory.json", &lease];
    for (number, record) in records.into_iter().enumerate() {
        let path = scratch.path.join("domains/default").join(record);
        match number {
            1 => std::fs::create_dir(&path).unwrap(),
            _ => std::fs::write(&path, "{").unwrap(),
        }
        std::fs::create_dir(scratch.path.join("staging/dead")).unwrap();
        let done = gc(&domain).unwrap();
        assert_eq!((done.images, done.layers, done.objects, done.leftovers), (0, 0, 0, 1));
        assert_eq!(done.unreadable.len(), 1, "{done:?}");
        assert!(domain.has_image(&b).unwrap());
        // What goes with a name is not known, so no name goes.
        let all = TrimOptions { unused_since: Some(i64::MAX), ..TrimOptions::default() };
        assert!(domain.trim(&Lines, &nothing_live, &all, &|_| ()).is_err());
        assert!(domain.get_ref("a").unwrap().is_some());
        std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir(&path)).unwrap();
    }

    // Without the list of mounts nothing is known, and that is no foreign content.
    let error = domain.gc(&Lines, &|| Err("cannot read mountinfo".into()), &GcOptions::default());
    assert!(matches!(error, Err(Error::Unreadable { .. })));
    assert!(domain.has_image(&b).unwrap(), "nothing was collected");

    // A torn mount went with the crash that tore it: mounts are not synced.
    std::fs::write(scratch.path.join("domains/default/roots/mount/torn.json"), "{").unwrap();
    let done = gc(&domain).unwrap();
    assert_eq!((&done.roots[..], done.objects), (&["mount/torn".to_owned()][..], 1));
    assert_eq!(done.unreadable, []);
}

/// A scrub holds no lock. An object that an image names and that is not there is lost; one that was collected meanwhile
/// with its image is not.
#[test]
fn a_scrub_tells_what_is_lost_from_what_was_collected() {
    let scratch = Scratch::new("scrub-gone");
    let domain = domain(&scratch);
    put(&domain, "a", &[1, 2]);
    std::fs::remove_file(domain.object_path(&object(2)).unwrap()).unwrap();
    let lost = |report: &cofolio_store::ScrubReport| -> Vec<_> {
        report.findings.iter().map(|finding| (finding.kind, finding.digest)).collect()
    };
    let all = ScrubOptions::default();
    let report = domain.scrub(&Lines, &all, &Task::default()).unwrap();
    assert_eq!(lost(&report), [(FindingKind::ObjectMissing, Some(object(2)))]);
    assert_eq!(report.gone, 0);

    domain.remove_ref("a").unwrap();
    gc(&domain).unwrap();
    let many: Vec<u64> = (10..30).collect();
    put(&domain, "b", &many);
    let (collected, inside) = (Mutex::new(false), domain.clone());
    let task = Task::new(Cancel::default(), move |_| {
        let mut collected = collected.lock().unwrap();
        if !std::mem::replace(&mut *collected, true) {
            inside.remove_ref("b").unwrap();
            assert_eq!(gc(&inside).unwrap().objects, 20);
        }
    });
    let report = domain.scrub(&Lines, &all, &task).unwrap();
    assert_eq!(lost(&report), []);
    assert_eq!((report.objects, report.gone), (20, 19));

    // As soon as any image had gone, nothing was lost any more.
    put(&domain, "living", &[40, 41]);
    put(&domain, "goes", &[50]);
    std::fs::remove_file(domain.object_path(&object(41)).unwrap()).unwrap();
    let (collected, inside) = (Mutex::new(false), domain.clone());
    let task = Task::new(Cancel::default(), move |_| {
        if !std::mem::replace(&mut *collected.lock().unwrap(), true) {
            inside.remove_ref("goes").unwrap();
            gc(&inside).unwrap();
        }
    });
    let report = domain.scrub(&Lines, &all, &task).unwrap();
    assert_eq!(lost(&report), [(FindingKind::ObjectMissing, Some(object(41)))]);
}

#[test]
fn gc_says_busy_or_waits_while_something_is_published() {
    let scratch = Scratch::new("busy");
    let domain = domain(&scratch);
    let lock = domain.lock_shared().unwrap();
    assert!(matches!(gc(&domain), Err(Error::Busy { .. })));
    let waiting = domain.clone();
    let thread = std::thread::spawn(move || {
        let options = GcOptions { wait: true, ..GcOptions::default() };
        waiting.gc(&Lines, &nothing_live, &options)
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!thread.is_finished());
    drop(lock);
    thread.join().unwrap().unwrap();
}

/// An import that found an object in place, and gc takes it before the import is published.
#[test]
fn an_import_notices_what_was_collected_under_it() {
    let scratch = Scratch::new("raced");
    let domain = domain(&scratch);
    put(&domain, "old", &[1]);
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let known = staging.put_object(&content(5000, 1)).unwrap();
    assert!(!known.new);
    let image = common::image_of(&staging, &[(known.digest, known.size)]);
    domain.remove_ref("old").unwrap();
    gc(&domain).unwrap();
    let publish = Publish::named("new", Ref::new(image));
    match staging.commit(&publish, [(known.digest, known.size)]) {
        Err(error @ Error::Vanished { .. }) => assert_eq!(error.kind(), ErrorKind::Conflict),
        other => panic!("{other:?}"),
    }
    let options = ImportOptions { hold_lock: true, ..ImportOptions::default() };
    let staging = domain.begin_import(options).unwrap();
    assert!(matches!(gc(&domain), Err(Error::Busy { .. })), "the second try keeps gc off");
    assert!(staging.put_object(&content(5000, 1)).unwrap().new);
}

/// One of each, done by hand to a store that is all right.
#[test]
fn fsck_tells_every_kind_of_damage() {
    let scratch = Scratch::new("fsck");
    let domain = domain(&scratch);
    let a = put(&domain, "a", &[1, 2, 3, 4]);
    let b = put(&domain, "b", &[5]);
    let c = put(&domain, "c", &[6]);
    let look = || {
        let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
        let found = report.findings.iter().map(|f| (f.kind, f.digest)).collect::<Vec<_>>();
        (found, report)
    };
    let (found, report) = look();
    assert_eq!((found, report.is_damaged()), (vec![], false));
    assert_eq!((report.objects, report.images, report.layers, report.refs), (6, 3, 3, 3));

    let file = |digest: &Digest| domain.object_path(digest).unwrap();
    let base = scratch.path.join("domains/default");
    let overwrite = |path: PathBuf, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(&path).unwrap();
        change(&mut bytes);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o444)).unwrap();
    };
    std::fs::remove_file(file(&object(1))).unwrap();
    overwrite(file(&object(2)), &|bytes| bytes.truncate(4096));
    overwrite(file(&object(3)), &|bytes| bytes[4999] ^= 1);
    std::fs::set_permissions(file(&object(4)), PermissionsExt::from_mode(0o666)).unwrap();
    overwrite(domain.image_path(&b).unwrap(), &|bytes| bytes[0] ^= 1);
    std::fs::remove_file(domain.image_path(&c).unwrap()).unwrap();
    overwrite(base.join("layers/sha256%3Ac.dump.zst"), &|bytes| bytes.truncate(10));
    std::fs::write(base.join("refs/broken.json"), b"{}").unwrap();
    std::fs::write(base.join("roots/lease/broken.json"), b"").unwrap();
    std::fs::write(base.join("objects/README"), b"hello").unwrap();
    std::fs::create_dir(scratch.path.join("staging/dead")).unwrap();

    let (found, report) = look();
    use FindingKind::*;
    let expected = [
        (ObjectMissing, Some(object(1))),
        (ObjectTruncated, Some(object(2))),
        (ObjectAltered, Some(object(3))),
        (ImageAltered, Some(b)),
        (LayerUnreadable, None),
        (RefUnreadable, None),
        (RefDangling, None),
        (RootUnreadable, None),
        (Permissions, None),
        (UnexpectedEntry, None),
        (StagingOrphaned, None),
    ];
    assert_eq!(found, expected);
    assert!(report.is_damaged());
    assert_eq!(report.findings[1].user.as_deref(), Some(format!("image {a}").as_str()));
    let json = serde_json::to_string(&report).unwrap();
    for (kind, _) in expected {
        assert!(json.contains(&format!("\"{kind}\"")), "{json}");
    }

    // What can be mended by importing again is mended: the missing and the truncated object.
    put(&domain, "a", &[1, 2, 3, 4]);
    let (found, _) = look();
    assert!(!found.iter().any(|(kind, _)| matches!(kind, ObjectMissing | ObjectTruncated)));
    assert!(found.contains(&(ObjectAltered, Some(object(3)))), "it has the right size");
    // And by a repair what cannot be seen without reading it.
    for (name, seeds) in [("a", &[1, 2, 3, 4][..]), ("b", &[5]), ("c", &[6])] {
        let pieces: Vec<_> = seeds.iter().map(|seed| content(5000, *seed)).collect();
        let damage = domain.damage(&report, &Lines, &Task::default()).unwrap();
        let staging = domain.begin_repair(&damage).unwrap();
        let layer = format!("sha256:{name}");
        fill(&staging, &pieces, Some(&layer), false).unwrap();
        staging.commit(&Publish::default(), []).unwrap();
    }
    let (found, report) = look();
    assert!(!found.iter().any(|(kind, _)| {
        matches!(kind, ObjectAltered | ImageAltered | LayerUnreadable | RefDangling)
    }));
    assert_eq!(report.hashed_bytes / 5000, 6);
}

/// Somebody tidied up: a directory of the domain is gone. Without it nothing else can be said, and gc must
/// not take "no refs" for "nothing is needed".
#[test]
fn fsck_and_gc_notice_a_missing_directory() {
    for directory in ["objects", "images", "layers", "refs", "roots/mount"] {
        let scratch = Scratch::new("directory");
        let domain = domain(&scratch);
        let pieces = [content(5000, 1)];
        let options = ImportOptions::default();
        let image = common::import_split(&domain, "a", &pieces, Some("sha256:a"), options).unwrap();
        let path = scratch.path.join("domains/default").join(directory);
        let aside = scratch.path.with_extension("aside");
        std::fs::rename(&path, &aside).unwrap();
        let report = domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap();
        let found: Vec<_> = report.findings.iter().map(|f| (f.kind, f.path.as_str())).collect();
        let expected = format!("domains/default/{directory}");
        assert_eq!(found, [(FindingKind::DirectoryMissing, expected.as_str())]);
        assert!(report.is_damaged());
        assert!(gc(&domain).is_err(), "{directory}");
        // A repair failed because of it, and nothing made it again.
        common::repair(&domain, &[(pieces.to_vec(), "sha256:a")]).unwrap();
        let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
        assert_eq!(report.findings, [], "{directory}");
        assert!(domain.has_image(&image).unwrap());
        assert!(gc(&domain).is_ok(), "{directory}");
        // Repaired refs were empty, and the next collection removed all images.
        assert!(domain.has_image(&image).unwrap(), "{directory}");
        assert_eq!(domain.refs().unwrap().len(), 1, "{directory}");
        std::fs::rename(&aside, scratch.path.join("aside")).unwrap();
    }
}

/// Bytes that have the digest of their name and still are no image, and images that contradict each
/// other: hashing says that all is well, reading does not.
#[test]
fn fsck_reads_images_as_images() {
    let scratch = Scratch::new("image-unreadable");
    let domain = domain(&scratch);
    let publish = |name: &str, text: &str, object: Option<(Digest, u64)>| {
        let staging = domain.begin_import(ImportOptions::default()).unwrap();
        let mut image = staging.image_writer().unwrap();
        image.write_all(text.as_bytes()).unwrap();
        let image = image.finish().unwrap();
        staging.commit(&Publish::named(name, Ref::new(image)), object).unwrap();
        image
    };
    let look = |rehash| {
        let report = domain.fsck(&Lines, FsckOptions { rehash }, &Task::default()).unwrap();
        let found = report.findings.iter().map(|f| (f.kind, f.path.clone())).collect::<Vec<_>>();
        (found, report)
    };
    let path_of = |image: &Digest| format!("domains/default/images/{image}.erofs");

    let bad = publish("bad", "no image at all", None);
    for rehash in [false, true] {
        let (found, report) = look(rehash);
        assert_eq!(found, [(FindingKind::ImageUnreadable, path_of(&bad))]);
        assert!(report.is_damaged());
        assert!(report.findings[0].detail.contains("it has no end"), "{:?}", report.findings[0]);
    }
    domain.remove_ref("bad").unwrap();
    gc(&domain).unwrap();

    // Cut short: seen without hashing, too, and then by what it no longer says.
    let good = put(&domain, "good", &[1]);
    let path = domain.image_path(&good).unwrap();
    let whole = std::fs::read(&path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o444)).unwrap();
    assert_eq!(look(false).0, [(FindingKind::ImageUnreadable, path_of(&good))]);
    assert_eq!(look(true).0, [(FindingKind::ImageAltered, path_of(&good))]);
    put(&domain, "good", &[1]);
    assert_eq!(look(true).0, []);

    let line = format!("{} 4999\nend\n", object(1));
    let other = publish("other", &line, None);
    let (found, report) = look(true);
    let unreadable: Vec<_> =
        report.findings.iter().filter(|f| f.kind == FindingKind::ImageUnreadable).collect();
    assert_eq!(unreadable.len(), 1, "{found:?}");
    assert!([path_of(&good), path_of(&other)].contains(&unreadable[0].path));
    assert!(unreadable[0].detail.contains("4999") && unreadable[0].detail.contains("5000"));
}

#[test]
fn verification_reads_every_byte_and_reports_progress() {
    let scratch = Scratch::new("verify");
    let domain = domain(&scratch);
    let image = put(&domain, "a", &[1, 2, 3]);
    let seen = Arc::new(Mutex::new((0, 0)));
    let sees = seen.clone();
    let task = Task::new(Cancel::default(), move |event| {
        let Event::Done { bytes, bytes_total, items, items_total } = event else { return };
        assert_eq!((items_total, bytes_total), (Some(3), Some(15_000)));
        let mut seen = sees.lock().unwrap();
        *seen = (seen.0.max(items), seen.1.max(bytes));
    });
    let report = domain.verify_image(&image, &Lines, &task).unwrap();
    assert_eq!((report.objects, report.bytes, report.findings.len()), (3, 15_000, 0));
    assert_eq!(*seen.lock().unwrap(), (3, 15_000));

    let path = domain.object_path(&object(2)).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::write(&path, content(5000, 9)).unwrap();
    let report = domain.verify_image(&image, &Lines, &Task::default()).unwrap();
    assert_eq!(report.findings.len(), 1);
    assert_eq!(report.findings[0].kind, FindingKind::ObjectAltered);
    assert_eq!(report.findings[0].digest, Some(object(2)));
    let absent = domain.verify_image(&Digest([1; 32]), &Lines, &Task::default());
    assert!(matches!(absent, Err(Error::NoSuch(_))));
}

#[test]
fn disk_usage_tells_alone_from_shared() {
    let scratch = Scratch::new("du");
    let domain = domain(&scratch);
    let a = put(&domain, "a", &[1, 2, 2]);
    let b = put(&domain, "b", &[2, 3, 4]);
    domain.put_ref("b-too", &Ref::new(b)).unwrap();
    let report = domain.du(&Lines, &Task::default()).unwrap();
    assert_eq!((report.objects, report.object_bytes, report.unnamed_objects), (4, 4 * 8192, 0));
    let row = |image| report.images.iter().find(|row| row.image == image).unwrap();
    assert_eq!((row(a).objects, row(a).exclusive_objects, row(a).shared_bytes()), (2, 1, 8192));
    assert_eq!((row(b).objects, row(b).exclusive_bytes), (3, 2 * 8192));
    assert_eq!(row(b).refs, ["b", "b-too"]);
    assert_eq!(report.unshared_bytes() - report.metadata_bytes, 5 * 8192);
    assert_eq!(report.layers, 2);
}

#[test]
fn newer_stores_are_refused_or_only_read() {
    let scratch = Scratch::new("features");
    let first = domain(&scratch);
    put(&first, "a", &[1]);
    let path = scratch.path.join("meta.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let with = |set: &str| {
        let mut meta: serde_json::Value = serde_json::from_str(&good).unwrap();
        meta["features"][set].as_array_mut().unwrap().push("from-the-future".into());
        std::fs::write(&path, meta.to_string()).unwrap();
        Store::open(&scratch.path)
    };
    with("compatible").unwrap().domain("default").unwrap().remove_ref("a").unwrap();
    put(&first, "a", &[1]);
    match with("incompatible") {
        Err(Error::UnknownFeature { feature }) => assert_eq!(feature, "from-the-future"),
        other => panic!("{other:?}"),
    }
    let store = with("read_only_compatible").unwrap();
    let domain = store.domain("default").unwrap();
    assert_eq!(domain.refs().unwrap().len(), 1);
    assert!(!domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap().is_damaged());
    // Mounts are state of this boot: they can be made, and collectors see them.
    let mut mount = Root::new(RootKind::Mount, "m");
    mount.images = domain.images().unwrap();
    domain.put_root(&mount).unwrap();
    assert!(domain.remove_root(RootKind::Mount, "m").unwrap());
    let trim = |dry_run| {
        let gc = GcOptions { dry_run, ..GcOptions::default() };
        let options = TrimOptions { size: Some(0), gc, ..TrimOptions::default() };
        domain.trim(&Lines, &nothing_live, &options, &|_| ())
    };
    assert_eq!(trim(true).unwrap().0.victims.len(), 1);
    // A lease holds the lock instead.
    let lease = domain.lease(&mount.images[0], Vec::new(), "").unwrap();
    assert_eq!(domain.roots(RootKind::Lease).unwrap(), []);
    drop(lease);
    for refused in [
        trim(false).err(),
        domain.note_use(&domain.images().unwrap()[0], 1).err(),
        domain.remove_ref("a").err(),
        domain.put_ref("b", &Ref::new(domain.images().unwrap()[0])).err(),
        domain.begin_import(ImportOptions::default()).err(),
        gc(&domain).err(),
        store.domain_or_create("other").err(),
        store.collect_staging(false).err(),
    ] {
        assert_eq!(refused.unwrap().kind(), ErrorKind::Unsupported);
    }
    std::fs::write(&path, good).unwrap();
}

#[test]
fn init_refuses_what_is_not_empty() {
    let scratch = Scratch::new("init");
    std::fs::write(scratch.path.join("notes.txt"), b"mine").unwrap();
    match Store::init(&scratch.path, &InitOptions::default()) {
        Err(Error::InTheWay { entry, .. }) => assert_eq!(entry, "notes.txt"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(Store::open(&scratch.path), Err(Error::NotAStore { .. })));
    std::fs::remove_file(scratch.path.join("notes.txt")).unwrap();
    let made = scratch.store();
    let again = scratch.store();
    assert_eq!(made.id(), again.id());
    assert_eq!(made.run_dir().file_name().unwrap().to_str(), Some(made.id()));
}

/// The `fsverity` tool computes what we compute.
#[test]
fn digests_are_those_of_the_fsverity_tool() {
    if std::process::Command::new("fsverity").arg("--version").output().is_err() {
        println!("SKIP digests_are_those_of_the_fsverity_tool: no `fsverity` (package fsverity)");
        return;
    }
    let scratch = Scratch::new("fsverity");
    for (seed, len) in [0, 1, 4096, 524_288, 524_289, 1_000_003, 5_000_000].into_iter().enumerate()
    {
        let bytes = content(len, seed as u64);
        let path = scratch.path.join("file");
        std::fs::write(&path, &bytes).unwrap();
        let output = std::process::Command::new("fsverity")
            .args(["digest", "--compact"])
            .arg(&path)
            .output()
            .unwrap();
        let theirs = String::from_utf8(output.stdout).unwrap();
        assert_eq!(verity::digest(&bytes).to_string(), theirs.trim(), "{len} bytes");
    }
}

/// The stand-in images of these tests must be refused when they are cut, or gc would be tested with
/// images that silently name less.
#[test]
fn a_cut_stand_in_is_unreadable() {
    let scratch = Scratch::new("cut");
    let domain = domain(&scratch);
    let image = put(&domain, "a", &[1]);
    let path = domain.image_path(&image).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let file = domain.open_image(&image).unwrap();
    assert!(Lines.names(FileKind::Image, &file, &mut |_, _| ()).is_err());
}

/// What a start of an image reads is kept as long as the image, and no longer.
#[test]
fn profiles_go_with_their_image() {
    let scratch = Scratch::new("profiles");
    let domain = domain(&scratch);
    let (a, b) = (put(&domain, "a", &[1]), put(&domain, "b", &[2]));
    assert_eq!(domain.profile(&a).unwrap(), None);
    for image in [&a, &b] {
        domain.put_profile(image, b"before").unwrap();
        domain.put_profile(image, b"now").unwrap();
    }
    gc(&domain).unwrap();
    assert_eq!(domain.profile(&b).unwrap().unwrap(), b"now");
    domain.remove_ref("b").unwrap();
    gc(&domain).unwrap();
    assert_eq!(domain.profile(&b).unwrap(), None);
    assert_eq!(domain.profile(&a).unwrap().unwrap(), b"now");
    // One that is too long to be read took the place of the one before.
    let long = domain.put_profile(&a, &vec![0; (64 << 20) + 1]);
    assert!(matches!(&long, Err(Error::TooMany { .. })), "{long:?}");
    assert_eq!(domain.profile(&a).unwrap().unwrap(), b"now");
    assert!(domain.remove_profile(&a).unwrap() && !domain.remove_profile(&a).unwrap());
}

/// What others say of an image is kept as long as the image, and no longer.
#[test]
fn signatures_go_with_their_image() {
    let scratch = Scratch::new("signatures");
    let domain = domain(&scratch);
    let (a, b) = (put(&domain, "a", &[1]), put(&domain, "b", &[2]));
    assert!(domain.signatures(&a).unwrap().is_empty());
    for signature in [&b"one"[..], b"two", b"one"] {
        domain.add_signature(&a, signature).unwrap();
    }
    domain.add_signature(&b, b"one").unwrap();
    let of = |image| {
        let mut signatures = domain.signatures(image).unwrap();
        signatures.sort();
        signatures
    };
    assert_eq!(of(&a), [b"one", b"two"], "twice is once");

    domain.remove_ref("b").unwrap();
    let directory = scratch.path.join("domains/default/signatures");
    std::fs::write(directory.join(a.to_string()).join(".tmp.0"), "torn").unwrap();
    let dry = GcOptions { dry_run: true, ..GcOptions::default() };
    domain.gc(&Lines, &nothing_live, &dry).unwrap();
    assert_eq!(of(&b).len(), 1);
    gc(&domain).unwrap();
    assert!(of(&b).is_empty() && !directory.join(b.to_string()).exists());
    assert_eq!(of(&a).len(), 2);
    assert_eq!(std::fs::read_dir(directory.join(a.to_string())).unwrap().count(), 2);
    assert_eq!(domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap().findings, []);

    assert!(matches!(domain.add_signature(&b, b"one"), Err(Error::NoSuch(_))));
    let large = vec![0; cofolio_store::SIGNATURE_SIZE_MAX + 1];
    assert!(matches!(domain.add_signature(&a, &large), Err(Error::TooMany { .. })));
    for number in 2..cofolio_store::SIGNATURES_MAX {
        domain.add_signature(&a, &number.to_le_bytes()).unwrap();
    }
    let more = domain.add_signature(&a, b"one more").unwrap_err();
    assert!(matches!(more, Error::TooMany { .. }) && more.kind() == ErrorKind::Caller);
    domain.add_signature(&a, b"two").unwrap();
    // One that is not what its name says is no signature that anybody has put there.
    let path = directory.join(a.to_string()).join("0".repeat(64));
    std::fs::write(&path, "x").unwrap();
    assert!(matches!(domain.signatures(&a), Err(Error::Corrupt { .. })));
    std::fs::remove_file(&path).unwrap();

    // fsck finds what is damaged; signing again mends it.
    let found = || domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap();
    let two = std::fs::read_dir(directory.join(a.to_string())).unwrap();
    let mut two = two.map(|entry| entry.unwrap().path());
    let two = two.find(|path| std::fs::read(path).unwrap() == b"two").unwrap();
    for content in [vec![], b"twO".to_vec(), large] {
        std::fs::write(&two, content).unwrap();
        assert!(matches!(domain.signatures(&a), Err(Error::Corrupt { .. })));
        let report = found();
        assert!(report.is_damaged() && report.signatures == 256, "{report:?}");
        let [finding] = &report.findings[..] else { panic!("{report:?}") };
        assert_eq!((finding.kind, finding.digest), (FindingKind::SignatureAltered, Some(a)));
        assert!(two.ends_with(finding.path.rsplit('/').next().unwrap()), "{finding:?}");
    }
    domain.add_signature(&a, b"two").unwrap();
    assert_eq!(found().findings, []);

    // What nobody has put there, and what belongs to nothing, which gc removes.
    std::fs::create_dir(directory.join(b.to_string())).unwrap();
    std::fs::write(directory.join(b.to_string()).join("0".repeat(64)), "x").unwrap();
    std::fs::write(directory.join("notes"), "").unwrap();
    std::fs::write(directory.join(a.to_string()).join("notes"), "").unwrap();
    let report = found();
    let kinds: Vec<_> = report.findings.iter().map(|finding| finding.kind).collect();
    let (unexpected, orphaned) = (FindingKind::UnexpectedEntry, FindingKind::SignatureOrphaned);
    assert_eq!(kinds, [unexpected, unexpected, orphaned]);
    assert!(!report.is_damaged() && report.findings[2].path.ends_with(&b.to_string()));
    gc(&domain).unwrap();
    assert_eq!(found().findings.len(), 2);
}

/// A gc, fsck, verification or scrub that was cancelled went on to its end: Ctrl-C had to kill the process.
/// Cancelled before it begins, none of them reads or removes anything.
#[test]
fn cancelled_work_ends_at_once() {
    let scratch = Scratch::new("cancelled");
    let domain = domain(&scratch);
    let image = put(&domain, "a", &[1, 2]);
    put(&domain, "b", &[3]);
    domain.remove_ref("b").unwrap();
    let task = Task::new(Cancel::default(), |event| panic!("{event:?}"));
    task.cancel.cancel();
    let options = GcOptions { cancel: task.cancel.clone(), ..GcOptions::default() };
    let trim = TrimOptions { size: Some(0), gc: options.clone(), ..TrimOptions::default() };
    let rehash = FsckOptions { rehash: true };
    let ended = [
        domain.gc(&Lines, &nothing_live, &options).err(),
        domain.trim(&Lines, &nothing_live, &trim, &|_| ()).err(),
        domain.fsck(&Lines, rehash, &task).err(),
        domain.verify_image(&image, &Lines, &task).err(),
        domain.scrub(&Lines, &ScrubOptions::default(), &task).err(),
    ];
    for error in ended {
        assert!(matches!(error, Some(Error::Cancelled(_))), "{error:?}");
    }
    assert_eq!(domain.refs().unwrap().len(), 1, "a trim removes no name then");
    assert_eq!(domain.object_size(&object(3)).unwrap(), Some(5000));
}

/// A gc that waited for an import to publish could not be cancelled.
#[test]
fn waiting_for_a_lock_is_cancelled() {
    let scratch = Scratch::new("cancelled-lock");
    let domain = domain(&scratch);
    let _held = domain.lock_shared().unwrap();
    let cancel = Cancel::default();
    let options = GcOptions { wait: true, cancel: cancel.clone(), ..GcOptions::default() };
    let waiting = domain.clone();
    let thread = std::thread::spawn(move || waiting.gc(&Lines, &nothing_live, &options));
    cancel.cancel();
    assert!(matches!(thread.join().unwrap(), Err(Error::Cancelled(_))));
}

/// A source that was another image had the damaged object too, and left its own layer without the layer's other objects:
/// damage that was not there before, and that the right source did not mend.
#[test]
fn a_repair_brings_nothing_but_what_is_damaged() {
    let scratch = Scratch::new("wrong-source");
    let domain = domain(&scratch);
    let (shared, other) = (content(5000, 1), content(5000, 2));
    let (options, layer) = (ImportOptions::default(), Some("sha256:a"));
    common::import_split(&domain, "a", std::slice::from_ref(&shared), layer, options).unwrap();
    let entries = |dir| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut objects = entries(domain.objects_dir().unwrap()).flat_map(entries);
    let object = objects.find(|object| std::fs::read(object).unwrap() == shared).unwrap();
    std::fs::remove_file(object).unwrap();
    common::repair(&domain, &[(vec![shared, other], "sha256:b")]).unwrap();
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert_eq!(report.findings, []);
    assert_eq!(domain.images().unwrap().len(), 1);
}

/// A repair that was killed while it gave lost names left `refs` with some of them, and the next collection removed the
/// other images.
#[test]
fn lost_names_come_back_together() {
    let scratch = Scratch::new("lost-names");
    let domain = domain(&scratch);
    let options = || ImportOptions::default();
    for name in ["a", "b"] {
        let pieces = [content(5000, name.as_bytes()[0].into())];
        common::import_split(&domain, name, &pieces, None, options()).unwrap();
    }
    let base = scratch.path.join("domains/default");
    std::fs::rename(base.join("refs"), scratch.path.with_extension("refs")).unwrap();
    // What a killed one leaves.
    std::fs::create_dir(base.join("refs.new")).unwrap();
    std::fs::write(base.join("refs.new/recovered-gone.json"), "{").unwrap();
    assert!(gc(&domain).is_err());
    domain.make_directories().unwrap();
    let names: Vec<_> = domain.refs().unwrap().into_iter().map(|(name, _)| name).collect();
    let images = domain.images().unwrap();
    let mut expected: Vec<_> = images.iter().map(|image| format!("recovered-{image}")).collect();
    expected.sort();
    assert_eq!((names, images.len()), (expected, 2));
    // Not the oldest of all, which a limit would take first.
    assert!(domain.refs().unwrap().iter().all(|(_, record)| record.created > 0));
    gc(&domain).unwrap();
    assert_eq!(domain.images().unwrap().len(), 2);
    std::fs::remove_dir_all(scratch.path.with_extension("refs")).unwrap();
}
