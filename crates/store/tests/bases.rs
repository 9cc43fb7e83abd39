//! Bases and deltas: how long they stay, and what damage to them means.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use cofolio_store::task::Task;
use cofolio_store::{
    Base, Digest, Domain, Error, FindingKind, FsckOptions, GcOptions, GcReport, ImportOptions,
    InitOptions, LAYERS_MAX, Publish, Store, TrimOptions,
};
use common::sim::SimDisk;
use common::{Lines, Scratch, content, import, nothing_live, put_base};
use rustix::io::Errno;

const OPTIONS: ImportOptions =
    ImportOptions { hold_lock: false, buffer_bytes_max: 4096, early_sync_bytes: 1 << 20 };

fn domain(scratch: &Scratch) -> Domain {
    // Without the immutable flag, so that the tests can do harm.
    let store = Store::open_or_init(&scratch.path, &InitOptions { immutable: false }).unwrap();
    store.domain("default").unwrap()
}

fn gc(domain: &Domain) -> GcReport {
    domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap()
}

fn findings(domain: &Domain) -> Vec<(FindingKind, String)> {
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    report.findings.into_iter().map(|finding| (finding.kind, finding.path)).collect()
}

/// Puts other bytes in the place of a file.
fn alter(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(path, b"not what it was").unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o444)).unwrap();
}

/// An image under a name, over a base that has an object more and no name.
fn over_base(domain: &Domain, name: &str, own: u64) -> (Digest, Base) {
    let pieces = [content(5000, 1), content(5000, own)];
    let image = import(domain, name, &pieces, None, OPTIONS).unwrap();
    let record = put_base(domain, &image, &pieces[..1], OPTIONS).unwrap();
    (image, record)
}

#[test]
fn a_base_stays_as_long_as_an_image_is_over_it() {
    let scratch = Scratch::new("base");
    let domain = domain(&scratch);
    let (a, over) = over_base(&domain, "a", 10);
    let (b, other) = over_base(&domain, "b", 11);
    assert_eq!(over.base, other.base);
    assert_eq!(domain.base_of(&a).unwrap(), Some(over.clone()));
    assert_eq!(domain.base_of(&over.base).unwrap(), None);
    assert_eq!(domain.bases().unwrap().len(), 2);
    let report = gc(&domain);
    assert_eq!((report.images, report.kept_images, report.kept_bases), (0, 4, 2), "all is needed");
    assert_eq!(findings(&domain), []);
    let du = domain.du(&Lines, &Task::default()).unwrap();
    assert_eq!(du.images.len(), 2, "what is derived is no image of its own: {du:?}");
    assert_eq!(du.bytes(), domain.bytes().unwrap());

    domain.remove_ref("a").unwrap();
    let report = gc(&domain);
    assert_eq!((report.images, report.objects), (1, 1), "the other has the same delta");
    assert_eq!(domain.bases().unwrap().into_keys().collect::<Vec<_>>(), [b]);
    assert!(domain.has_image(&over.base).unwrap());
    domain.remove_ref("b").unwrap();
    let report = gc(&domain);
    assert_eq!((report.images, report.kept_images, report.kept_objects), (3, 0, 0));
    assert_eq!((report.bases, report.kept_bases), (2, 0), "nobody calls them images");
    let records = scratch.path.join("domains/default/bases");
    assert_eq!(fs::read_dir(records).unwrap().count(), 0);
}

/// What a trim says it frees is what is freed: the base goes with the last image over it, and not before.
#[test]
fn a_trim_counts_bases() {
    let scratch = Scratch::new("base-trim");
    let domain = domain(&scratch);
    over_base(&domain, "a", 10);
    over_base(&domain, "b", 11);
    let options = TrimOptions { size: Some(0), ..TrimOptions::default() };
    let (plan, _) = domain.trim(&Lines, &nothing_live, &options, &|_| ()).unwrap();
    assert_eq!(plan.victims.len(), 2);
    assert_eq!((plan.bytes_after, domain.bytes().unwrap()), (0, 0), "{plan:?}");
}

/// A bad sector in a delta or base, which costs memory and nothing else, stopped every trim: the
/// store grew over its limit.
#[test]
fn a_trim_goes_on_with_a_damaged_base() {
    for damaged in ["base", "delta"] {
        let scratch = Scratch::new(&format!("base-trim-{damaged}"));
        let domain = domain(&scratch);
        let (_, over) = over_base(&domain, "a", 10);
        let of = if damaged == "base" { over.base } else { over.delta };
        alter(&domain.image_path(&of).unwrap());
        let options = TrimOptions { size: Some(0), ..TrimOptions::default() };
        let (plan, _) = domain.trim(&Lines, &nothing_live, &options, &|_| ()).unwrap();
        assert_eq!((plan.victims.len(), domain.bytes().unwrap()), (1, 0), "{damaged}: {plan:?}");
    }
}

/// Derived, and so never in the way: of garbage collection, of a repair, of the image itself.
#[test]
fn damage_to_a_base_is_told_and_removed() {
    for damaged in ["base", "delta", "record"] {
        let scratch = Scratch::new(&format!("base-damage-{damaged}"));
        let domain = domain(&scratch);
        let (image, over) = over_base(&domain, "a", 10);
        let path = match damaged {
            "base" => domain.image_path(&over.base).unwrap(),
            "delta" => domain.image_path(&over.delta).unwrap(),
            _ => scratch.path.join(format!("domains/default/bases/{image}")),
        };
        alter(&path);
        let kind = if damaged == "record" {
            FindingKind::BaseIncomplete
        } else {
            FindingKind::BaseAltered
        };
        let found = findings(&domain);
        let about: Vec<_> = found.iter().filter(|(kind, _)| kind.is_damage()).collect();
        assert_eq!(about.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [kind], "{damaged}");
        assert!(path.to_str().unwrap().ends_with(&about[0].1), "{about:?}");

        let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
        assert!(domain.damage(&report, &Lines, &Task::default()).unwrap().is_empty(), "{damaged}");
        domain.remove_derived(&report, &Lines, &Task::default()).unwrap();
        assert_eq!(domain.base_of(&image).unwrap(), None);
        assert_eq!(gc(&domain).kept_images, 1, "{damaged}");
        assert_eq!(findings(&domain), [], "{damaged}");
        assert_eq!(domain.images().unwrap(), [image]);
    }
}

#[test]
fn garbage_collection_goes_on_with_a_damaged_base() {
    let scratch = Scratch::new("base-gc");
    let domain = domain(&scratch);
    let (image, over) = over_base(&domain, "a", 10);
    let path = domain.image_path(&over.base).unwrap();
    alter(&path);
    gc(&domain);
    assert!(!domain.has_image(&over.base).unwrap(), "what cannot be read is not worth keeping");
    assert_eq!(domain.base_of(&image).unwrap(), None);
    assert_eq!(gc(&domain).kept_images, 1);
    assert_eq!((domain.images().unwrap(), findings(&domain)), (vec![image], vec![]));
}

/// Two walks down the bases had a limit each, and neither noticed a circle.
#[test]
fn the_layers_of_an_image_end() {
    let scratch = Scratch::new("base-layers");
    let domain = domain(&scratch);
    let (image, over) = over_base(&domain, "a", 10);
    assert_eq!(domain.metadata_images(&image).unwrap(), [over.delta, over.base]);
    assert_eq!(domain.metadata_images(&over.base).unwrap(), [over.base]);
    let records = scratch.path.join("domains/default/bases");
    let record = fs::read(records.join(image.to_string())).unwrap();
    fs::write(records.join(over.base.to_string()), record).unwrap();
    assert_eq!(domain.metadata_images(&image).unwrap().len(), LAYERS_MAX);
}

#[test]
fn a_base_that_is_not_there_is_not_published() {
    let scratch = Scratch::new("base-absent");
    let domain = domain(&scratch);
    let image = import(&domain, "a", &[content(10, 1)], None, OPTIONS).unwrap();
    let absent = Digest([7; 32]);
    let staging = domain.begin_import(OPTIONS).unwrap();
    let record = Base { base: absent, delta: image, chain_id: "sha256:base".to_owned() };
    let publish = Publish { bases: vec![(image, record)], ..Publish::default() };
    match staging.commit(&publish, []) {
        Err(Error::Vanished { first, .. }) => assert!(first.contains(&absent.to_string())),
        other => panic!("{other:?}"),
    }
    assert_eq!(domain.base_of(&image).unwrap(), None);
}

/// Lack of descriptors counted as damage to the record of a base: gc removed it, the base and the delta.
#[test]
fn lack_of_descriptors_removes_no_base() {
    let disk = SimDisk::new(1);
    let store = Store::init_on(Arc::new(disk.clone()), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let (image, _) = over_base(&domain, "a", 10);
    let record = format!("domains/default/bases/{image}");
    for (errno, stays) in [(Errno::MFILE, true), (Errno::IO, false)] {
        let before = disk.files();
        disk.make_unreadable(&record, errno);
        let collected = domain.gc(&Lines, &nothing_live, &GcOptions::default());
        assert_eq!((collected.is_err(), disk.files() == before), (stays, stays), "{errno}");
    }
}
