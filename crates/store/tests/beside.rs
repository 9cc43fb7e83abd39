//! Garbage collection beside imports, mounts and repairs, at the moments that matter.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use cofolio_store::task::{Cancel, Task};
use cofolio_store::{
    BoxError, Contents, Digest, Domain, Error, FileKind, FindingKind, FsckOptions, GcOptions,
    GcReport, ImportOptions, InitOptions, Publish, Ref, Root, RootKind, Spared, Staging, Store,
    StoredFile, TrimOptions, verity,
};
use common::sim::{Fault, SimDisk};
use common::{Lines, Scratch, content, import, import_split, nothing_live};

fn pieces(seeds: &[u64]) -> Vec<Vec<u8>> {
    seeds.iter().map(|seed| content(3000, *seed)).collect()
}

fn put(domain: &Domain, name: &str, seeds: &[u64]) -> Digest {
    let layer = format!("sha256:{name}");
    import(domain, name, &pieces(seeds), Some(&layer), ImportOptions::default()).unwrap()
}

/// Collects, and does something after all records were read and before anything is removed.
fn gc_beside(domain: &Domain, work: impl Fn()) -> GcReport {
    let live = || {
        work();
        Ok(Vec::new())
    };
    domain.gc(&Lines, &live, &GcOptions::default()).unwrap()
}

fn is_whole(domain: &Domain) {
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert_eq!(report.findings, []);
}

/// A repair with nothing to mend but the copy of `meta.json` wrote a temporary file without the lock
/// that keeps collections from sweeping it, and then found it gone.
#[test]
fn a_collection_takes_no_file_of_a_repair() {
    let scratch = Scratch::new("copy");
    let store = scratch.store();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                store.collect_staging(false).unwrap();
            }
        });
        let mended = (0..2000).try_for_each(|_| {
            std::fs::remove_file(scratch.path.join("meta.copy.json")).unwrap();
            Store::mend_meta(&scratch.path).map(drop)
        });
        done.store(true, Ordering::Relaxed);
        mended.unwrap();
    });
}

/// A collection used to hold the domain's lock from its first look to its last removal, and every mount
/// waited. Now all that comes meanwhile goes on, and whatever it names or publishes is kept: an image by a
/// mount or a new name, and one that is new but made of objects that were garbage when the collection began.
#[test]
fn what_is_named_or_published_during_a_collection_stays() {
    let scratch = Scratch::new("beside");
    let domain = scratch.store().domain("default").unwrap();
    put(&domain, "kept", &[1]);
    let mounted = put(&domain, "mounted", &[2]);
    let tagged = put(&domain, "tagged", &[3]);
    let record = domain.get_ref("tagged").unwrap().unwrap();
    for name in ["mounted", "tagged"] {
        domain.remove_ref(name).unwrap();
    }
    put(&domain, "old", &[4, 5]);
    domain.remove_ref("old").unwrap();
    put(&domain, "gone", &[6]);
    domain.remove_ref("gone").unwrap();
    let report = gc_beside(&domain, || {
        let mut root = Root::new(RootKind::Mount, "m");
        root.images.push(mounted);
        domain.put_root(&root).unwrap();
        domain.put_ref("tagged again", &record).unwrap();
        put(&domain, "new", &[4, 7]);
        // A moment later the mount is gone again: nobody may take the image from the next one.
        domain.remove_root(RootKind::Mount, "m").unwrap();
    });
    // `old` and `gone` with their layers, the layer of `mounted`, and the contents 5 and 6.
    assert_eq!((report.images, report.layers, report.objects), (2, 3, 2), "{report:?}");
    assert!(domain.has_image(&mounted).unwrap() && domain.has_image(&tagged).unwrap());
    assert!(domain.object_size(&verity::digest(&content(3000, 4))).unwrap().is_some());
    is_whole(&domain);
    let report = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
    assert_eq!((report.images, report.objects), (1, 1), "the mount is gone");
    is_whole(&domain);
}

/// A removal waited half a second for the filesystem's journal with the domain's lock held, and mounts waited with it. Who
/// only names what is in place holds off images and layers now, and no objects; who publishes holds off both.
#[test]
fn objects_go_while_others_mount() {
    let scratch = Scratch::new("objects");
    let domain = scratch.store().domain("default").unwrap();
    put(&domain, "kept", &[1]);
    let stray = domain.begin_import(ImportOptions::default()).unwrap();
    let stray = stray.put_object(&content(3000, 2)).unwrap().digest;
    let place = domain.object_path(&stray).unwrap();
    std::fs::create_dir_all(place.parent().unwrap()).unwrap();
    std::fs::write(&place, content(3000, 2)).unwrap();
    let held = Mutex::new(None);
    let live = || {
        *held.lock().unwrap() = Some(domain.lock_names()?);
        Ok(Vec::new())
    };
    let report = domain.gc(&Lines, &live, &GcOptions::default()).unwrap();
    assert_eq!(report.objects, 1, "{report:?}");
    assert!(!place.exists());
    // And what a commit holds keeps them.
    std::fs::write(&place, content(3000, 2)).unwrap();
    let live = || {
        *held.lock().unwrap() = Some(domain.lock_shared()?);
        Ok(Vec::new())
    };
    let refused = domain.gc(&Lines, &live, &GcOptions::default()).unwrap_err();
    assert!(matches!(refused, Error::Busy { .. }), "{refused}");
    assert!(place.exists());
}

/// Likewise while objects are being removed: each look at what is used precedes the batch that it is for.
#[test]
fn an_import_between_two_batches_keeps_its_objects() {
    /// Does something when a certain image is read, which is after the mark for one that came later.
    struct Later<'a>(&'a Domain, Digest, Cell<u32>);
    struct Shared<'a>(Mutex<Later<'a>>);
    impl Contents for Shared<'_> {
        fn names(
            &self,
            kind: FileKind,
            file: &StoredFile,
            visit: &mut dyn FnMut(Digest, u64),
        ) -> Result<(), BoxError> {
            let later = self.0.lock().unwrap();
            let is_it = kind == FileKind::Image && file.path().contains(&later.1.to_string());
            if is_it && later.2.replace(1) == 0 {
                put(later.0, "third", &[20, 21, 22]);
            }
            drop(later);
            Lines.names(kind, file, visit)
        }
    }
    let scratch = Scratch::new("batches");
    let domain = scratch.store().domain("default").unwrap();
    let garbage: Vec<u64> = (0..300).collect();
    put(&domain, "garbage", &garbage);
    domain.remove_ref("garbage").unwrap();
    // What `second` will be, to recognise it when the collection reads it.
    let lines: String = pieces(&[10, 11])
        .iter()
        .map(|piece| format!("{} {}\n", verity::digest(piece), piece.len()))
        .collect();
    let second = verity::digest(format!("{lines}end\n").as_bytes());
    let contents = Shared(Mutex::new(Later(&domain, second, Cell::new(0))));
    let live = || {
        put(&domain, "second", &[10, 11]);
        Ok(Vec::new())
    };
    let report = domain.gc(&contents, &live, &GcOptions::default()).unwrap();
    assert_eq!(
        contents.0.lock().unwrap().2.get(),
        1,
        "the second import came while the first was read"
    );
    assert_eq!((report.images, report.objects), (1, 295), "{report:?}");
    is_whole(&domain);
}

/// A trim announces which names go. Meanwhile one of them was given to another image, and another image
/// came into use: neither name goes, and neither does what it stands for.
#[test]
fn a_trim_takes_no_name_that_changed_since_it_was_announced() {
    let scratch = Scratch::new("announced");
    let domain = scratch.store().domain("default").unwrap();
    let (a, b) = (put(&domain, "a", &[1]), put(&domain, "b", &[2]));
    let c = put(&domain, "c", &[3]);
    let options = TrimOptions { unused_since: Some(i64::MAX), ..TrimOptions::default() };
    let (plan, _) = domain
        .trim(&Lines, &nothing_live, &options, &|plan| {
            assert_eq!(plan.victims.len(), 3);
            put(&domain, "a", &[4]);
            let mut root = Root::new(RootKind::Mount, "m");
            root.images.push(b);
            domain.put_root(&root).unwrap();
        })
        .unwrap();
    assert_eq!(plan.spared, [(b, Spared::InUse)]);
    let names: Vec<_> = domain.refs().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a", "b"]);
    assert!(!domain.has_image(&a).unwrap() && !domain.has_image(&c).unwrap());
    is_whole(&domain);
}

/// A collection that was killed leaves its directory of notes behind. The next writer sees that nobody
/// reads it, and takes it away; a collection that follows works as any other.
#[test]
fn a_killed_collection_leaves_nothing() {
    let scratch = Scratch::new("killed");
    let domain = scratch.store().domain("default").unwrap();
    let image = put(&domain, "a", &[1]);
    let added = scratch.path.join("domains/default/added");
    for _ in 0..2 {
        std::fs::create_dir(&added).unwrap();
        std::fs::write(added.join(format!("named-image-{image}")), "").unwrap();
        std::fs::write(added.join("what is this"), "").unwrap();
        put(&domain, "b", &[2]);
        assert!(!added.exists());
        std::fs::create_dir(&added).unwrap();
        std::fs::write(added.join(format!("new-layer-{}", "%41".repeat(3))), "").unwrap();
        domain.remove_ref("b").unwrap();
        assert_eq!(domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap().images, 1);
        assert!(!added.exists());
        is_whole(&domain);
    }
}

/// Only one collection runs in a domain, and another one does not wait unless asked to. A collection that gave up
/// took the notes of the running one with it, which then failed or removed what had just been named.
#[test]
fn two_collections_do_not_meet() {
    let scratch = Scratch::new("two");
    let domain = scratch.store().domain("default").unwrap();
    put(&domain, "garbage", &[1]);
    let mounted = put(&domain, "mounted", &[2]);
    for name in ["garbage", "mounted"] {
        domain.remove_ref(name).unwrap();
    }
    let report = gc_beside(&domain, || {
        let mut root = Root::new(RootKind::Mount, "m");
        root.images.push(mounted);
        domain.put_root(&root).unwrap();
        let other = domain.gc(&Lines, &nothing_live, &GcOptions::default());
        assert!(matches!(other, Err(Error::Busy { .. })), "{other:?}");
        domain.remove_root(RootKind::Mount, "m").unwrap();
    });
    assert_eq!(report.images, 1, "{report:?}");
    assert!(domain.has_image(&mounted).unwrap());
}

/// A push wrote what it had read of a ref before: it moved the name back to the image that an import
/// had just replaced, or brought back a name that had been removed. Others wait for a change.
#[test]
fn nobody_replaces_or_removes_a_ref_while_it_is_changed() {
    let scratch = Scratch::new("change");
    let domain = scratch.store().domain("default").unwrap();
    put(&domain, "moves", &[1]);
    let newer = put(&domain, "newer", &[2]);
    put(&domain, "goes", &[1]);
    std::thread::scope(|scope| {
        let domain = &domain;
        let beside = |name: &str, act: Box<dyn FnOnce() + Send>| {
            let (done, is_done) = mpsc::channel();
            let change = |record: &mut Ref| {
                scope.spawn(move || {
                    act();
                    done.send(()).unwrap();
                });
                assert!(is_done.recv_timeout(Duration::from_millis(300)).is_err(), "{name}");
                record.labels.insert("pushed".into(), "yes".into());
            };
            domain.try_change_ref(name, change).unwrap();
            is_done.recv().unwrap();
        };
        beside("moves", Box::new(|| domain.put_ref("moves", &Ref::new(newer)).unwrap()));
        beside("goes", Box::new(|| domain.remove_ref("goes").unwrap()));
    });
    assert_eq!(domain.get_ref("moves").unwrap().unwrap(), Ref::new(newer));
    assert!(domain.get_ref("goes").unwrap().is_none());
    domain.try_change_ref("goes", |_| panic!("it is not there")).unwrap();
}

/// Two imports of one new layer: the second replaced what the first had published, which the first made
/// immutable between the two calls, and failed with EPERM. Both must succeed, whoever is first.
#[test]
fn imports_of_one_layer_at_the_same_time_all_succeed() {
    let scratch = Scratch::new("one-layer");
    let store = Store::init(&scratch.path, &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    for round in 0..40 {
        let layer = format!("sha256:{round}");
        std::thread::scope(|scope| {
            for importer in 0..4 {
                let (domain, layer) = (&domain, &layer);
                scope.spawn(move || {
                    // The same layer in another form, as another program would write it.
                    let seeds: &[u64] = if importer % 2 == 0 { &[1, 2] } else { &[2, 1] };
                    let name = format!("{round}-{importer}");
                    let options = ImportOptions::default();
                    import_split(domain, &name, &pieces(seeds), Some(layer), options).unwrap();
                });
            }
        });
    }
    is_whole(&domain);
}

/// `fsck --repair` removed the bases that its report called damaged, without a look: by then an import had
/// put the right file there and given it a name, and lost it.
#[test]
fn a_repair_looks_again_before_it_removes_a_base() {
    let scratch = Scratch::new("repair-again");
    let store = Store::init(&scratch.path, &InitOptions { immutable: false }).unwrap();
    let domain = store.domain("default").unwrap();
    let image = put(&domain, "a", &[1, 2]);
    let base = common::put_base(&domain, &image, &pieces(&[1]), ImportOptions::default()).unwrap();
    let path = domain.image_path(&base.base).unwrap();
    let damage = || {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[3] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    };
    damage();
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert!(report.findings.iter().any(|it| it.kind == FindingKind::BaseAltered), "{report:?}");
    // An import that finds it damaged puts the right one in its place, and names it.
    let seeds = [pieces(&[1]), vec![content(5000, 999)]].concat();
    let named = import(&domain, "b", &seeds, None, ImportOptions::default()).unwrap();
    assert_eq!(named, base.base);
    domain.remove_derived(&report, &Lines, &Task::default()).unwrap();
    assert!(domain.has_image(&named).unwrap(), "it has a name, and is right");
    is_whole(&domain);
    // Damaged again, it is the image of a name: for a source to bring back, not to be removed.
    damage();
    domain.remove_derived(&report, &Lines, &Task::default()).unwrap();
    assert!(domain.has_image(&named).unwrap());
    domain.remove_ref("b").unwrap();
    domain.remove_derived(&report, &Lines, &Task::default()).unwrap();
    assert!(!domain.has_image(&named).unwrap(), "a base and nothing else");
}

/// What failed in the middle of publishing its records left the others behind, as `.tmp.` files.
#[test]
fn a_commit_that_fails_leaves_no_temporary_files() {
    let scratch = Scratch::new("temporary");
    let domain = scratch.store().domain("default").unwrap();
    let image = put(&domain, "a", &[1]);
    // A directory where a record is to go.
    let refs = scratch.path.join("domains/default/refs");
    std::fs::create_dir_all(refs.join("c.json/x")).unwrap();
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let named = |name: &str| (name.to_owned(), Ref::new(image));
    let refs_to_make = vec![named("b"), named("c"), named("d"), named("e")];
    let publish = Publish { refs: refs_to_make, ..Publish::default() };
    assert!(staging.commit(&publish, []).is_err());
    let left = std::fs::read_dir(&refs).unwrap().map(|entry| entry.unwrap().file_name());
    let mut left: Vec<_> = left.map(|name| name.into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["a.json", "b.json", "c.json"]);
}

/// `gc --dry-run` counted leftovers of killed imports, but not their bytes, and other temporary files
/// differently from the real run.
#[test]
fn a_dry_run_says_what_the_real_run_does() {
    let scratch = Scratch::new("dry");
    let domain = scratch.store().domain("default").unwrap();
    let image = put(&domain, "a", &[1]);
    domain.note_use(&image, 5).unwrap();
    domain.add_signature(&image, b"signature").unwrap();
    common::put_base(&domain, &image, &pieces(&[1]), ImportOptions::default()).unwrap();
    let base = scratch.path.join("domains/default");
    let signed = format!("signatures/{image}");
    // gc swept all of them but that of a scrub.
    std::fs::create_dir(base.join("scrub")).unwrap();
    for directory in ["", "refs", "roots/lease", "roots/mount", "bases", "used", "scrub", &signed] {
        std::fs::write(base.join(directory).join(".tmp.0"), [1; 100]).unwrap();
    }
    std::fs::write(scratch.path.join(".tmp.0"), [1; 100]).unwrap();
    let dead = scratch.path.join("staging/dead/objects/ab");
    std::fs::create_dir_all(&dead).unwrap();
    std::fs::write(dead.join("cd"), [1; 10_000]).unwrap();
    std::fs::write(scratch.path.join("staging/stray"), [1; 5000]).unwrap();
    let living = domain.begin_import(ImportOptions::default()).unwrap();
    living.put_object(&content(50_000, 3)).unwrap();
    put(&domain, "b", &[2]);
    domain.remove_ref("b").unwrap();

    let dry = GcOptions { dry_run: true, ..GcOptions::default() };
    let plan = domain.gc(&Lines, &nothing_live, &dry).unwrap();
    assert_eq!((plan.leftovers, plan.leftover_bytes), (11, 9 * 4096 + 12288 + 8192));
    let done = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
    assert_eq!(GcReport { dry_run: true, ..done }, plan);
    drop(living);
    is_whole(&domain);
}

/// A collection removed the notes of the one before while writers added others, and failed with "Directory not
/// empty" (seen once in many runs of the next test).
#[test]
fn notes_that_come_while_a_collection_begins_do_not_stop_it() {
    let scratch = Scratch::new("notes");
    let domain = scratch.store().domain("default").unwrap();
    let added = scratch.path.join("domains/default/added");
    let plant = |note: &str| {
        std::fs::create_dir_all(&added).unwrap();
        std::fs::write(added.join(note), "").unwrap();
    };
    plant("first");
    let options = GcOptions { wait: true, ..GcOptions::default() };
    std::thread::scope(|scope| {
        let writer = domain.lock_shared().unwrap();
        let collection = scope.spawn(|| domain.gc(&Lines, &nothing_live, &options));
        while added.exists() {
            std::thread::yield_now();
        }
        plant("second");
        drop(writer);
        collection.join().unwrap().unwrap();
    });
    assert!(!added.exists());
}

/// Writers and a collection that runs all the time, on threads: every image that was reported as published
/// is whole as long as it has a name.
#[test]
fn imports_and_collections_on_threads() {
    let scratch = Scratch::new("threads");
    let domain = scratch.store().domain("default").unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let options = GcOptions { wait: true, ..GcOptions::default() };
            while !done.load(Ordering::Relaxed) {
                domain.gc(&Lines, &nothing_live, &options).unwrap();
            }
        });
        let writers: Vec<_> = (0..3_u64)
            .map(|writer| {
                let domain = &domain;
                scope.spawn(move || {
                    for round in 0..30 {
                        let name = format!("{writer}");
                        let seeds = [1, 2, writer * 100 + round % 3, 1000 + round % 5];
                        let options = ImportOptions::default();
                        let again = ImportOptions { hold_lock: true, ..options };
                        let layer = format!("sha256:{}", round % 4);
                        let work =
                            |options| import(domain, &name, &pieces(&seeds), Some(&layer), options);
                        let image = match work(options) {
                            Err(error) if error.is_race() => work(again).unwrap(),
                            other => other.unwrap(),
                        };
                        let report = domain.verify_image(&image, &Lines, &Task::default()).unwrap();
                        assert_eq!(report.findings, []);
                        if round % 4 == 3 {
                            domain.remove_ref(&name).unwrap();
                        }
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Relaxed);
    });
    is_whole(&domain);
}

/// On a full disk a read-only mount failed while gc ran: the reserve was there for the mount's record, but not
/// for the note to gc that comes before it.
#[test]
fn a_mount_on_a_full_disk_beside_gc_uses_the_reserve() {
    let disk = SimDisk::new(1);
    let store = Store::init_on(Arc::new(disk.clone()), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let mut root = Root::new(RootKind::Mount, "m");
    root.images.push(put(&domain, "a", &[1]));
    gc_beside(&domain, || {
        disk.plant(disk.calls(), Fault::Full);
        domain.put_root(&root).unwrap();
    });
    assert_eq!(domain.roots(RootKind::Mount).unwrap().len(), 1);
}

/// A commit that hashed what was in place, perhaps a segment of gigabytes, could not be cancelled.
#[test]
fn a_commit_that_hashes_what_is_in_place_can_be_cancelled() {
    let scratch = Scratch::new("cancelled");
    let domain = scratch.store().domain("default").unwrap();
    let image = put(&domain, "a", &[1]);
    let cancel = Cancel::default();
    let staging = domain.begin_import(ImportOptions::default()).unwrap().cancelled_by(&cancel);
    let objects: Vec<_> = pieces(&[1]).iter().map(|it| (verity::digest(it), 3000)).collect();
    assert_eq!(common::image_of(&staging, &objects), image);
    cancel.cancel();
    assert!(matches!(staging.commit(&Publish::default(), objects), Err(Error::Cancelled(_))));
    is_whole(&domain);
}

/// Calls every image damaged, and lets nobody have the domain alone from then on.
struct Held<'a>(&'a Domain, Mutex<Option<Staging>>);

impl Contents for Held<'_> {
    fn names(
        &self,
        _: FileKind,
        _: &StoredFile,
        _: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        let hold = ImportOptions { hold_lock: true, ..ImportOptions::default() };
        *self.1.lock().unwrap() = Some(self.0.begin_import(hold).unwrap());
        Err("damaged".into())
    }
}

/// `fsck --repair` knew a damaged file by its inode number alone, which ext4 gives to the next file: one that had
/// been put in its place meanwhile was removed as damaged.
#[test]
fn a_repair_removes_no_file_with_the_inode_number_of_the_damaged_one() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new("repair-inode");
    let store = Store::init(&scratch.path, &InitOptions { immutable: false }).unwrap();
    let domain = store.domain("default").unwrap();
    let image = put(&domain, "a", &[1, 2]);
    let base = common::put_base(&domain, &image, &pieces(&[1]), ImportOptions::default()).unwrap();
    let path = domain.image_path(&base.base).unwrap();
    let right = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"wrong").unwrap();
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    std::fs::write(&path, &right).unwrap();
    let number = || std::fs::metadata(&path).unwrap().ino();
    let (before, held) = (number(), Held(&domain, Mutex::new(None)));
    std::thread::scope(|scope| {
        let repair = scope.spawn(|| domain.remove_derived(&report, &held, &Task::default()));
        let staging = loop {
            if let Some(staging) = held.1.lock().unwrap().take() {
                break staging;
            }
        };
        for _ in 0..2000 {
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, &right).unwrap();
            if number() == before {
                break;
            }
            std::thread::yield_now();
        }
        drop(staging);
        repair.join().unwrap().unwrap();
    });
    assert!(path.exists());
}
