//! Power loss, I/O errors and full disks at every moment.
//!
//! The story: a node imports an image while another one is collected and a third is tagged; the power
//! goes. After the reboot every ref that was reported as published must be there with every byte of its
//! image, a ref whose change was in flight must be the old one or the new one, no object may be wrong,
//! and one garbage collection must leave nothing but what the refs need.
//!
//! `COFOLIO_SOAK=n` multiplies the number of seeds.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::sync::Arc;

use cofolio_store::disk::Disk;
use cofolio_store::task::Task;
use cofolio_store::{
    Contents, Digest, Domain, Error, ErrorKind, FileKind, FileName, FsckOptions, GcOptions,
    ImportOptions, InitOptions, Publish, Ref, Root, RootKind, Store, TrimOptions, verity,
};
use common::sim::{Fault, SimDisk};
use common::{Lines, content, import_split as import, nothing_live, replaced};

/// Small enough that large objects, which take the way over `tmp/`, stay cheap to simulate.
const OPTIONS: ImportOptions =
    ImportOptions { hold_lock: false, buffer_bytes_max: 1024, early_sync_bytes: 10 };

fn soak() -> u64 {
    std::env::var("COFOLIO_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

fn pieces(sizes_and_seeds: &[(usize, u64)]) -> Vec<Vec<u8>> {
    sizes_and_seeds.iter().map(|(size, seed)| content(*size, *seed)).collect()
}

/// 600 bytes, a hole, 300 bytes, a hole.
fn sparse_piece() -> Vec<u8> {
    [content(600, 9), vec![0; 9900], content(300, 10), vec![0; 8300]].concat()
}

/// Three images; `a` and `b` share content, `c` shares with both and has a sparse file.
fn image_pieces(name: &str) -> Vec<Vec<u8>> {
    match name {
        "a" => pieces(&[(10, 1), (600, 2), (3000, 3)]),
        "b" => pieces(&[(10, 1), (700, 4), (0, 5)]),
        _ => {
            let mut pieces = pieces(&[(600, 2), (700, 4), (20, 6), (5000, 7), (1500, 8)]);
            pieces.push(sparse_piece());
            pieces
        }
    }
}

fn open(disk: &SimDisk) -> Domain {
    Store::open_on(Arc::new(disk.clone())).unwrap().domain("default").unwrap()
}

fn gc(domain: &Domain) -> Result<cofolio_store::GcReport, Error> {
    let options = GcOptions { boot_id: Some("new".into()), ..GcOptions::default() };
    domain.gc(&Lines, &nothing_live, &options)
}

/// A disk with `a` and `b` imported and everything synced.
fn base() -> SimDisk {
    let disk = SimDisk::new(1);
    let store = Store::init_on(Arc::new(disk.clone()), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    import(&domain, "a", &image_pieces("a"), Some("sha256:la"), OPTIONS).unwrap();
    import(&domain, "b", &image_pieces("b"), Some("sha256:lb"), OPTIONS).unwrap();
    disk
}

/// The image that a name stands for, from its content alone.
fn expected_image(name: &str) -> Digest {
    let mut text = String::new();
    for piece in image_pieces(name) {
        text.push_str(&format!("{} {}\n", verity::digest(&piece), piece.len()));
    }
    verity::digest(format!("{text}end\n").as_bytes())
}

/// Refs with the image each points to.
type Refs = BTreeMap<String, Digest>;

fn refs(domain: &Domain) -> Refs {
    domain.refs().unwrap().into_iter().map(|(name, record)| (name, record.image)).collect()
}

/// Everything that must hold after whatever happened.
fn check(disk: &SimDisk, context: &str) {
    let domain = open(disk);
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    let damage: Vec<_> = report.findings.iter().filter(|f| f.kind.is_damage()).collect();
    // A mount's record is not synced; gc knows that a torn one means nothing.
    let damage: Vec<_> = damage.iter().filter(|f| !f.path.contains("/roots/mount/")).collect();
    assert!(damage.is_empty(), "{context}: {damage:#?}");
    // A mount takes the immutable flag of an image as that of all its objects.
    let is_immutable = |name: &FileName| {
        let file = domain.open_named(name).unwrap();
        disk.stat(file.path()).unwrap().immutable
    };
    for image in domain.named(FileKind::Image).unwrap().iter().filter(|it| is_immutable(it)) {
        let visit = &mut |object, _| {
            let object = FileName::content(FileKind::Object, &object);
            assert!(is_immutable(&object), "{context}: {image} is protected, and {object} is not");
        };
        Lines.names(FileKind::Image, &domain.open_named(image).unwrap(), visit).unwrap();
    }
}

/// After one garbage collection nothing is left but what refs and roots need.
fn check_clean(disk: &SimDisk, context: &str) {
    let domain = open(disk);
    gc(&domain).unwrap_or_else(|error| panic!("{context}: gc: {error}"));
    check(disk, context);
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert_eq!(report.findings, [], "{context}");
    let bases = domain.bases().unwrap();
    let (mut needed, mut objects) = (BTreeSet::new(), BTreeSet::new());
    let mut layers = BTreeSet::new();
    for (_, record) in domain.refs().unwrap() {
        needed.insert(record.image);
        layers.extend(record.layers.into_iter().map(|layer| layer.chain_id));
    }
    assert_eq!(common::layers(&domain), layers.iter().cloned().collect::<Vec<_>>(), "{context}");
    for layer in &layers {
        let split = FileName::chain(FileKind::Split, layer).unwrap();
        assert!(domain.has_named(&split).unwrap(), "{context}: {layer}");
        objects.insert(verity::digest(&replaced(layer)));
    }
    let splits = disk.files().into_keys().filter(|path| path.ends_with(".split")).count();
    assert_eq!(splits, layers.len(), "{context}");
    for kind in RootKind::ALL {
        for root in domain.roots(kind).unwrap() {
            needed.extend(root.images);
        }
    }
    assert!(bases.keys().all(|image| needed.contains(image)), "{context}");
    let derived: Vec<_> = bases.values().flat_map(|base| [base.base, base.delta]).collect();
    let all: BTreeSet<_> = needed.iter().chain(&derived).copied().collect();
    let images = domain.images().unwrap().into_iter();
    let found: BTreeSet<_> = images.chain(domain.derived_images().unwrap()).collect();
    assert_eq!(found, all, "{context}");
    let files = disk.files().into_keys().filter(|path| path.ends_with(".erofs")).count();
    assert_eq!(files, all.len(), "{context}");
    for base in bases.values() {
        Lines
            .names(FileKind::Image, &domain.open_image(&base.base).unwrap(), &mut |object, _| {
                objects.insert(object);
            })
            .unwrap();
    }
    for name in ["a", "b", "c"] {
        if needed.contains(&expected_image(name)) {
            objects.extend(image_pieces(name).iter().map(|piece| verity::digest(piece)));
        }
    }
    assert_eq!(report.objects, objects.len() as u64, "{context}");
    domain.settings::<BTreeMap<String, u32>>().unwrap();
    let packs = domain.named(FileKind::Pack).unwrap();
    assert!(packs.iter().all(|pack| needed.contains(&pack.image().unwrap())), "{context}");
    let mut segments = BTreeSet::new();
    for pack in &packs {
        let visit = &mut |segment, _| {
            segments.insert(segment);
        };
        Lines.names(FileKind::Pack, &domain.open_named(pack).unwrap(), visit).unwrap();
    }
    assert_eq!(domain.segments().unwrap(), segments.into_iter().collect::<Vec<_>>(), "{context}");
    let stray = disk.files().into_keys().find(|p| p.starts_with("staging/") || p.contains(".tmp."));
    assert_eq!(stray, None, "{context}");
}

/// One thing that changes the store.
struct Operation {
    name: &'static str,
    run: fn(&Domain) -> Result<(), Error>,
    /// What the refs are after it, from what they were.
    after: fn(&mut Refs),
}

/// The store's own error, of a failure inside a callback.
fn inner(error: Error) -> Error {
    match error {
        Error::Unreadable { source, what } => match source.downcast() {
            Ok(error) => *error,
            Err(source) => Error::Unreadable { what, source },
        },
        other => other,
    }
}

const OPERATIONS: &[Operation] = &[
    Operation {
        name: "import",
        run: |domain| import(domain, "c", &image_pieces("c"), Some("sha256:lc"), OPTIONS).map(drop),
        after: |refs| {
            refs.insert("c".into(), expected_image("c"));
        },
    },
    Operation {
        name: "settings of a domain",
        run: |domain| {
            common::set(domain, 1)?;
            common::set(domain, 2)
        },
        after: |_| (),
    },
    Operation {
        name: "two images over one base",
        run: |domain| {
            let shared = pieces(&[(10, 1)]);
            common::put_base(domain, &expected_image("a"), &shared, OPTIONS)?;
            common::put_base(domain, &expected_image("b"), &shared, OPTIONS).map(drop)
        },
        after: |_| (),
    },
    Operation {
        name: "a base goes with the last image over it",
        run: |domain| {
            common::put_base(domain, &expected_image("a"), &pieces(&[(600, 2)]), OPTIONS)?;
            domain.remove_ref("a")?;
            gc(domain).map(drop)
        },
        after: |refs| {
            refs.remove("a");
        },
    },
    Operation {
        name: "two packs on one base, and one made again",
        run: |domain| {
            common::pack(domain, &expected_image("a"), 2, OPTIONS)?;
            common::pack(domain, &expected_image("b"), 1, OPTIONS)?;
            domain.remove_named(&domain.packs_of(FileKind::Pack, &expected_image("a"))?)?;
            common::pack(domain, &expected_image("a"), 2, OPTIONS).map(drop)
        },
        after: |_| (),
    },
    Operation {
        name: "a pack goes with its image",
        run: |domain| {
            common::pack(domain, &expected_image("a"), 1, OPTIONS)?;
            common::pack(domain, &expected_image("b"), 9, OPTIONS)?;
            domain.remove_ref("a")?;
            gc(domain).map(drop)
        },
        after: |refs| {
            refs.remove("a");
        },
    },
    Operation {
        name: "import over a ref",
        run: |domain| import(domain, "a", &image_pieces("c"), None, OPTIONS).map(drop),
        after: |refs| {
            refs.insert("a".into(), expected_image("c"));
        },
    },
    Operation {
        name: "import of what is there",
        run: |domain| import(domain, "again", &image_pieces("b"), None, OPTIONS).map(drop),
        after: |refs| {
            refs.insert("again".into(), expected_image("b"));
        },
    },
    Operation {
        name: "ref change",
        run: |domain| domain.put_ref("a", &Ref::new(expected_image("b"))),
        after: |refs| {
            refs.insert("a".into(), expected_image("b"));
        },
    },
    Operation {
        name: "new ref",
        run: |domain| domain.put_ref("x/y:1", &Ref::new(expected_image("a"))),
        after: |refs| {
            refs.insert("x/y:1".into(), expected_image("a"));
        },
    },
    Operation {
        name: "ref removal and gc",
        run: |domain| {
            domain.remove_ref("b")?;
            gc(domain).map(drop)
        },
        after: |refs| {
            refs.remove("b");
        },
    },
    Operation {
        name: "an import while what it needs is collected as garbage",
        run: |domain| {
            // All of it, without a name.
            let staging = domain.begin_import(OPTIONS)?;
            let mut objects = Vec::new();
            for piece in image_pieces("c") {
                let stored = staging.put_object(&piece)?;
                objects.push((stored.digest, stored.size));
            }
            let mut image = staging.image_writer()?;
            for (digest, size) in &objects {
                let line = format!("{digest} {size}\n");
                image
                    .write_all(line.as_bytes())
                    .map_err(|error| error.downcast::<Error>().unwrap())?;
            }
            image.write_all(b"end\n").map_err(|error| error.downcast::<Error>().unwrap())?;
            image.finish()?;
            staging.commit(&Publish::default(), objects)?;
            let live = || {
                import(domain, "c", &image_pieces("c"), Some("sha256:lc"), OPTIONS)?;
                Ok(Vec::new())
            };
            domain.gc(&Lines, &live, &GcOptions::default()).map(drop).map_err(inner)
        },
        after: |refs| {
            refs.insert("c".into(), expected_image("c"));
        },
    },
    Operation {
        name: "trim, with a time of last use noted before",
        run: |domain| {
            domain.note_use(&expected_image("b"), 5)?;
            let options = TrimOptions { unused_since: Some(5), ..TrimOptions::default() };
            domain.trim(&Lines, &nothing_live, &options, &|_| ()).map(drop)
        },
        after: |refs| {
            refs.remove("a");
        },
    },
    Operation {
        name: "roots of every kind",
        run: |domain| {
            let mut root = Root::new(RootKind::Mount, "r/1");
            root.images.push(expected_image("a"));
            root.boot_id = Some("old".into());
            domain.put_root(&root)?;
            drop(domain.lease(&expected_image("a"), Vec::new(), "")?);
            domain.remove_root(RootKind::Mount, "r/1").map(drop)
        },
        after: |_| (),
    },
    Operation {
        name: "a lease keeps an image whose ref goes",
        run: |domain| {
            let _lease = domain.lease(&expected_image("b"), Vec::new(), "")?;
            domain.remove_ref("b")?;
            gc(domain).map(drop)
        },
        after: |refs| {
            refs.remove("b");
        },
    },
];

/// Every call of every operation is the last one before the power goes, several times with other luck.
#[test]
fn a_crash_at_any_point_leaves_before_or_after() {
    let base = base();
    let before = refs(&open(&base));
    let seeds = 30 * soak();
    let mut runs = 0;
    for operation in OPERATIONS {
        let rehearsal = base.fork(7);
        (operation.run)(&open(&rehearsal)).unwrap();
        let calls = rehearsal.calls();
        assert!(calls > 3, "{} changes the store", operation.name);
        let mut after = before.clone();
        (operation.after)(&mut after);
        let mut outcomes = BTreeSet::new();
        for at in 0..=calls {
            for seed in 0..seeds {
                let context =
                    format!("{}, crash at call {at} of {calls}, seed {seed}", operation.name);
                let disk = base.fork(seed << 32 | at);
                disk.plant(at, Fault::Crash);
                let done = (operation.run)(&open(&disk));
                assert!(done.is_ok() || at < calls, "{context}: {done:?}");
                disk.reboot();
                check(&disk, &context);
                let now = refs(&open(&disk));
                assert!(now == after || (now == before && done.is_err()), "{context}: {now:?}");
                outcomes.insert(now == after);
                check_clean(&disk, &context);
                assert_eq!(refs(&open(&disk)), now, "{context}");
                runs += 1;
            }
        }
        // Otherwise the crash points would not be where it matters.
        assert!(outcomes.contains(&true) && (before == after || outcomes.contains(&false)));
    }
    println!("{runs} crashes");
    assert!(runs >= 5000, "only {runs} runs");
}

/// A signature that was reported as kept is there after the power goes; one that was not is there as a whole or
/// not at all, and nothing is left of it.
#[test]
fn a_crash_keeps_a_signature_or_leaves_none() {
    let base = base();
    let image = expected_image("a");
    let sign = |disk: &SimDisk| open(disk).add_signature(&image, b"signature");
    let rehearsal = base.fork(7);
    sign(&rehearsal).unwrap();
    let calls = rehearsal.calls();
    let mut outcomes = BTreeSet::new();
    for at in 0..=calls {
        for seed in 0..20 * soak() {
            let disk = base.fork(seed << 32 | at);
            disk.plant(at, Fault::Crash);
            let done = sign(&disk);
            disk.reboot();
            let kept = open(&disk).signatures(&image).unwrap();
            let context = format!("crash at call {at} of {calls}, seed {seed}: {done:?}, {kept:?}");
            assert!(kept == [b"signature"] || (kept.is_empty() && done.is_err()), "{context}");
            outcomes.insert(kept.is_empty());
            check_clean(&disk, &context);
            let torn = disk.files().into_keys().any(|path| path.contains("/.tmp."));
            assert!(!torn && open(&disk).signatures(&image).unwrap() == kept, "{context}");
        }
    }
    assert_eq!(outcomes.len(), 2, "both occur");
}

/// A call that fails with EIO ends the operation; then it can be done again, or the power can go.
#[test]
fn an_io_error_at_any_point_leaves_before_or_after() {
    let base = base();
    let before = refs(&open(&base));
    let mut runs = 0;
    for operation in OPERATIONS {
        let rehearsal = base.fork(7);
        (operation.run)(&open(&rehearsal)).unwrap();
        let mut after = before.clone();
        (operation.after)(&mut after);
        for at in 0..rehearsal.calls() {
            for seed in 0..4 * soak() {
                let context = format!("{}, EIO at call {at}, seed {seed}", operation.name);
                let disk = base.fork(seed << 32 | at);
                disk.plant(at, Fault::Io);
                let domain = open(&disk);
                let done = (operation.run)(&domain);
                disk.clear_fault();
                if seed % 2 == 0 {
                    disk.reboot();
                }
                check(&disk, &context);
                let domain = open(&disk);
                let now = refs(&domain);
                assert!(now == after || (now == before && done.is_err()), "{context}: {now:?}");
                check_clean(&disk, &context);
                runs += 1;
            }
        }
    }
    println!("{runs} I/O errors");
}

/// A disk that fills up during an import: the error says how much was missing, and the domain is file
/// for file what it was.
#[test]
fn a_full_disk_leaves_the_store_as_it_was() {
    let base = base();
    let domain_files = |disk: &SimDisk| {
        let mut files = disk.files();
        files.retain(|path, _| path.starts_with("domains/"));
        files
    };
    let before = domain_files(&base);
    let rehearsal = base.fork(7);
    import(&open(&rehearsal), "c", &image_pieces("c"), Some("sha256:lc"), OPTIONS).unwrap();
    let mut most = 0;
    for at in 0..rehearsal.calls() {
        let disk = base.fork(at);
        disk.plant(at, Fault::Full);
        let domain = open(&disk);
        match import(&domain, "c", &image_pieces("c"), Some("sha256:lc"), OPTIONS) {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Space, "call {at}: {error}");
                if let Error::NoSpace { missing } = error {
                    assert!(missing > 0, "call {at}");
                    most = most.max(missing);
                }
                assert_eq!(domain_files(&disk), before, "call {at}");
            }
            // Nothing more was to be allocated.
            Ok(_) => assert_ne!(domain_files(&disk), before),
        }
        disk.clear_fault();
        import(&domain, "c", &image_pieces("c"), Some("sha256:lc"), OPTIONS).unwrap();
        check_clean(&disk, &format!("full at call {at}"));
    }
    // Nothing of the import fitted: its new objects, the image and the layer are all missing.
    // A hole needs no room, but for what of it shares its last bytes with data.
    let new_objects = 20 + 5000 + 1500 + 600 + 300 + 700;
    assert!(most >= new_objects && most < new_objects + 2000, "{most}");
}

/// Where a lease could not be written, an export of hours held the lock of the whole domain, and a full disk could
/// not be collected.
#[test]
fn a_lease_on_a_full_disk_keeps_no_collection_waiting() {
    let (mut leased, mut refused) = (0, 0);
    for later in 0.. {
        let disk = base();
        let domain = open(&disk);
        let calls = disk.calls();
        disk.plant(calls + later, Fault::Full);
        let image = expected_image("a");
        let lease = domain.lease(&image, Vec::new(), "export");
        let is_over = disk.calls() <= calls + later;
        match &lease {
            Ok(_) => leased += 1,
            Err(_) => refused += 1,
        }
        let options = GcOptions { wait: false, ..GcOptions::default() };
        let collected = open(&disk).gc(&Lines, &nothing_live, &options);
        assert!(!matches!(collected, Err(Error::Busy { .. })), "call {later}: {collected:?}");
        drop(lease);
        if is_over {
            break;
        }
    }
    assert!(leased > 1, "the reserve is used: {leased}, {refused}");
}

/// A bad sector below a segment or a pack, or with fs-verity an altered byte: fsck ended there, told nothing of the rest,
/// and so nothing could be repaired.
#[test]
fn what_cannot_be_read_of_segments_and_packs_is_told() {
    use cofolio_store::FindingKind::{PackIncomplete, PackUnreadable, SegmentUnreadable};
    for (suffix, expected) in
        [(".segment", vec![SegmentUnreadable, PackIncomplete]), (".pack", vec![PackUnreadable])]
    {
        let disk = base().fork(4);
        let domain = open(&disk);
        common::pack(&domain, &expected_image("a"), 1, OPTIONS).unwrap();
        let path = disk.files().into_keys().find(|path| path.ends_with(suffix)).unwrap();
        disk.make_unreadable(&path, rustix::io::Errno::IO);
        let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
        let kinds: Vec<_> = report.findings.iter().map(|finding| finding.kind).collect();
        assert_eq!(kinds, expected, "{suffix}: {:#?}", report.findings);
        assert_eq!(
            domain.remove_derived(&report, &Lines, &Task::default()).unwrap(),
            [expected_image("a")].into()
        );
        check_clean(&disk, suffix);
    }
}

/// A write that failed is never followed by others on the same import.
#[test]
fn a_failed_write_poisons_the_import() {
    let disk = base();
    let disk = disk.fork(3);
    let domain = open(&disk);
    let staging = domain.begin_import(OPTIONS).unwrap();
    disk.plant(disk.calls(), Fault::Io);
    assert_eq!(staging.put_object(b"one").unwrap_err().kind(), ErrorKind::Io);
    disk.clear_fault();
    assert!(matches!(staging.put_object(b"two"), Err(Error::Poisoned { .. })));
    assert!(matches!(staging.image_writer(), Err(Error::Poisoned { .. })));
    let result = staging.commit(&Publish::default(), []);
    assert!(matches!(result, Err(Error::Poisoned { .. })));
    check_clean(&disk, "poisoned");
}

/// The kernel tells each open file once that a write failed. All imports of a process synced by the same one, so
/// one was told and failed, and another, whose object it was perhaps, was published.
#[test]
fn every_import_hears_of_a_lost_write() {
    let disk = base().fork(3);
    let domain = open(&disk);
    let imports = [0, 1].map(|_| {
        domain.begin_import(ImportOptions { early_sync_bytes: 1 << 20, ..OPTIONS }).unwrap()
    });
    for import in &imports {
        import.put_object(b"content").unwrap();
    }
    disk.lose_a_write();
    for import in imports {
        let error = import.commit(&Publish::default(), []).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    }
    // Who comes later has nothing to do with it.
    let import = domain.begin_import(OPTIONS).unwrap();
    import.put_object(b"content").unwrap();
    import.commit(&Publish::default(), []).unwrap();
    check_clean(&disk, "a lost write");
}

/// A disk that has lost an object, cut another, altered a third, an image and a layer, is repaired when the power
/// goes, or a call fails. Whatever came before that: no ref changes, nothing that was sound is damaged, and the
/// same repair, done again, leaves no damage, and nothing that garbage collection would take.
#[test]
fn a_repair_that_is_cut_short_damages_nothing_and_can_be_repeated() {
    let sources = [(image_pieces("a"), "sha256:la"), (image_pieces("b"), "sha256:lb")];
    let base = base();
    let before = refs(&open(&base));
    let object = |size, seed| {
        format!("domains/default/objects/{}", verity::digest(&content(size, seed)).object_path())
    };
    let file = |suffix: &str, name: &str| {
        let named = |path: &String| path.ends_with(suffix) && path.contains(name);
        base.files().into_keys().find(named).unwrap()
    };
    base.damage(&object(600, 2), |bytes| bytes.truncate(100));
    base.damage(&object(3000, 3), |bytes| bytes[7] ^= 1);
    base.damage(&file(".erofs", &expected_image("b").to_string()), |bytes| bytes[0] ^= 1);
    base.damage(&file(".dump.zst", "la"), |bytes| bytes.truncate(9));
    let lost = object(700, 4);
    base.set_immutable(&lost, false).unwrap();
    base.unlink(&lost).unwrap();
    // Of this one only the protection is lost.
    base.set_immutable(&object(10, 1), false).unwrap();
    base.sync_all().unwrap();
    let findings = |disk: &SimDisk| {
        let report =
            open(disk).fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
        let of_parts = |path: &str| !path.starts_with("staging/");
        let found = report.findings.into_iter().filter(|f| of_parts(&f.path));
        found.map(|finding| (finding.kind.is_damage(), finding.path)).collect::<BTreeSet<_>>()
    };
    let damaged = findings(&base);
    assert!(damaged.len() >= 6, "{damaged:?}");
    let damaged_paths: BTreeSet<_> = damaged.iter().map(|(_, path)| path.clone()).collect();

    let rehearsal = base.fork(7);
    common::repair(&open(&rehearsal), &sources).unwrap();
    assert_eq!(findings(&rehearsal), BTreeSet::new());
    let calls = rehearsal.calls();
    let mut halves = 0;
    for at in 0..=calls {
        for seed in 0..12 * soak() {
            let fault = if seed % 3 == 2 { Fault::Io } else { Fault::Crash };
            let context = format!("{fault:?} at call {at} of {calls} of a repair, seed {seed}");
            let disk = base.fork(seed << 32 | at);
            disk.plant(at, fault);
            let _ = common::repair(&open(&disk), &sources);
            disk.clear_fault();
            if fault == Fault::Crash {
                disk.reboot();
            }
            assert_eq!(refs(&open(&disk)), before, "{context}");
            // An image that is readable again shows what it misses: that is no new damage.
            let now = findings(&disk);
            let new: Vec<_> = now
                .iter()
                .filter(|(is_damage, path)| *is_damage && !damaged_paths.contains(path))
                .collect();
            assert!(new.is_empty(), "{context}: {new:?}");
            halves += u64::from(!now.is_empty() && now.len() < damaged.len());
            common::repair(&open(&disk), &sources)
                .unwrap_or_else(|error| panic!("{context}: again: {error}"));
            check_clean(&disk, &context);
            assert_eq!(refs(&open(&disk)), before, "{context}");
        }
    }
    // Otherwise the crashes would not be where it matters.
    assert!(halves > 10, "{halves} repairs were cut in the middle");
}

/// A store that was being made when the power went can be made again, or is there.
#[test]
fn a_crash_during_init_can_be_repeated() {
    let rehearsal = SimDisk::new(1);
    Store::init_on(Arc::new(rehearsal.clone()), &InitOptions::default()).unwrap();
    for at in 0..=rehearsal.calls() {
        for seed in 0..20 * soak() {
            let disk = SimDisk::new(seed << 32 | at);
            disk.plant(at, Fault::Crash);
            let made = Store::init_on(Arc::new(disk.clone()), &InitOptions::default());
            disk.reboot();
            match Store::open_on(Arc::new(disk.clone())) {
                Ok(_) => {}
                Err(Error::NotAStore { .. }) => {
                    assert!(made.is_err(), "call {at} seed {seed}: a store that was made is gone");
                    Store::init_on(Arc::new(disk.clone()), &InitOptions::default()).unwrap();
                }
                Err(error) => panic!("call {at} seed {seed}: {error}"),
            }
            let domain = open(&disk);
            import(&domain, "a", &image_pieces("a"), None, OPTIONS).unwrap();
            check_clean(&disk, &format!("init, call {at}, seed {seed}"));
        }
    }
}

/// Long histories: operations in random order, crashes and errors anywhere, one model of what must be.
#[test]
fn random_histories_end_well() {
    let base = base();
    let start = refs(&open(&base));
    for seed in 0..1000 * soak() {
        let disk = base.fork(seed);
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |limit: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % limit
        };
        let mut model = start.clone();
        for step in 0..8 {
            let context = format!("seed {seed} step {step}");
            let domain = open(&disk);
            let fault = [None, Some(Fault::Crash), Some(Fault::Io), Some(Fault::Full)]
                [usize::try_from(next(4)).unwrap()];
            if let Some(fault) = fault {
                disk.plant(disk.calls() + next(60), fault);
            }
            let name = ["a", "b", "c"][usize::try_from(next(3)).unwrap()];
            let image = ["a", "b", "c"][usize::try_from(next(3)).unwrap()];
            let mut after = model.clone();
            let done = match next(4) {
                0 => {
                    after.insert(name.into(), expected_image(image));
                    let layer = format!("sha256:{image}");
                    import(&domain, name, &image_pieces(image), Some(&layer), OPTIONS).map(drop)
                }
                1 if model.values().any(|known| *known == expected_image(image)) => {
                    after.insert(name.into(), expected_image(image));
                    domain.put_ref(name, &Ref::new(expected_image(image)))
                }
                2 if model.len() > 1 && model.contains_key(name) => {
                    after.remove(name);
                    domain.remove_ref(name)
                }
                _ => gc(&domain).map(drop),
            };
            if fault == Some(Fault::Crash) {
                disk.reboot();
            }
            disk.clear_fault();
            if done.is_err() {
                // What an operation that failed has changed may be visible and still be lost later.
                // That is allowed; make it certain, so that the model can go on.
                disk.sync_all().unwrap();
            }
            check(&disk, &context);
            let now = refs(&open(&disk));
            assert!(now == after || (now == model && done.is_err()), "{context}: {done:?} {now:?}");
            model = now;
        }
        disk.reboot();
        assert_eq!(refs(&open(&disk)), model, "seed {seed}: something published was lost");
        check_clean(&disk, &format!("seed {seed}"));
    }
}
