//! What cannot be looked at.

use super::*;

/// A directory in the place of which a link to itself gives ELOOP, as long as this lives.
struct Blind(PathBuf);

impl Blind {
    fn new(directory: PathBuf) -> Self {
        fs::rename(&directory, directory.with_extension("away")).unwrap();
        std::os::unix::fs::symlink(&directory, &directory).unwrap();
        Self(directory)
    }
}

impl Drop for Blind {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
        fs::rename(self.0.with_extension("away"), &self.0).unwrap();
    }
}

/// For want of a descriptor the ledger could not open the directory of a domain's objects. It
/// counted them as looked at, and a reclaim took them for removed.
#[test]
fn objects_that_cannot_be_looked_at_are_counted() {
    let test = "objects_that_cannot_be_looked_at_are_counted";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    for salt in 0..3 {
        fs::read(pair.domain.object_path(&pair.object(salt)).unwrap()).unwrap();
    }
    let mut ledger = pair.ledger();
    let figures = |ledger: &mut Ledger| {
        ledger.sample_all().unwrap();
        let report = ledger.report().unwrap();
        (report.domains[0].resident_bytes, report.unknown.objects)
    };
    let bytes = 3 * SIZE as u64;
    assert_eq!(figures(&mut ledger), (bytes, 0));
    let blind = Blind::new(pair.domain.objects_dir().unwrap());
    assert_eq!(figures(&mut ledger), (bytes, 3));
    let of_all = all_of(ReclaimTarget::Domain("default".to_owned()));
    let found = ledger.reclaim(&of_all).unwrap();
    assert_eq!((found.objects, found.freed_bytes, found.kept_bytes), (3, 0, bytes));
    drop(blind);
    assert_eq!(ledger.reclaim(&of_all).unwrap().freed_bytes, bytes);
}

/// The directory of a store was moved away under a running ledger, which then took all objects for
/// removed: nothing was resident any more, and nothing unknown. It took one missing object for removed,
/// too, although images name it.
#[test]
fn missing_objects_are_counted_and_named() {
    let test = "missing_objects_are_counted_and_named";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let object = pair.domain.object_path(&pair.object(0)).unwrap();
    fs::read(&object).unwrap();
    let mut ledger = pair.ledger();
    let mut figures = || {
        ledger.sample_all().unwrap();
        let mut report = ledger.report().unwrap();
        // The machine may have processes that even root cannot read.
        report.warnings.retain(|warning| !warning.starts_with("process "));
        (report.images[0].resident_bytes, report.unknown.objects, report.warnings)
    };
    let before = figures();
    assert!(before.0 >= SIZE as u64 && before.1 == 0 && before.2.is_empty(), "{before:?}");
    let store = pair.dir.path().join("store");
    fs::rename(&store, store.with_extension("away")).unwrap();
    let (resident, unknown, warnings) = figures();
    assert_eq!((resident, unknown), (before.0, 3));
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("domains/default/objects: No such file"), "{warning}");
    fs::rename(store.with_extension("away"), &store).unwrap();
    assert_eq!(figures(), before);

    let aside = pair.dir.path().join("aside");
    fs::rename(&object, &aside).unwrap();
    let (resident, unknown, warnings) = figures();
    assert_eq!((resident, unknown), (before.0 - SIZE as u64, 1));
    let digest = pair.object(0).to_string();
    assert!(warnings.len() == 1 && warnings[0].contains(&digest), "{warnings:?}");
    fs::rename(&aside, &object).unwrap();
    assert_eq!(figures(), before);
}

/// A reclaim from an image that could not be read said that there was no such image.
#[test]
fn an_image_that_cannot_be_read_is_no_missing_one() {
    let test = "an_image_that_cannot_be_read_is_no_missing_one";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let image = pair.domain.image_path(&pair.images[0]).unwrap();
    fs::remove_file(&image).unwrap();
    fs::write(&image, "torn").unwrap();
    let mut ledger = pair.ledger();
    ledger.sample_all().unwrap();
    let used = UsedImage { domain: "default".to_owned(), image: pair.images[0] };
    let error = ledger.reclaim(&all_of(ReclaimTarget::Image(used))).unwrap_err();
    assert!(cofolio_store::is_damage(&error), "{error}");
    assert!(error.to_string().contains(&pair.images[0].to_string()), "{error}");
    assert!(ledger.files("default", &pair.images[0], FileOrder::Path, 1).is_err());
}

/// Two images that could not be read were left over by each small refresh, so it was never
/// complete, and the daemon took no figures any more.
#[test]
fn images_that_cannot_be_read_are_not_left_over() {
    let test = "images_that_cannot_be_read_are_not_left_over";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    for image in &pair.images {
        let path = pair.domain.image_path(image).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "torn").unwrap();
    }
    let mut ledger = pair.ledger();
    let nothing = Budget::of(Duration::ZERO);
    assert!(!ledger.refresh(&nothing).unwrap());
    for _ in 0..3 {
        assert!(ledger.refresh(&nothing).unwrap());
    }
    assert_eq!(ledger.report().unwrap().unknown.images, 2);
}

/// One trust domain that could not be listed refused samples and reclaims of all others.
#[test]
fn a_domain_that_cannot_be_listed_stops_no_other() {
    let test = "a_domain_that_cannot_be_listed_stops_no_other";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let other = pair.domain.store().domain_or_create("other").unwrap();
    pair.forget_all();
    fs::read(pair.domain.object_path(&pair.object(0)).unwrap()).unwrap();
    for image in pair.images {
        fs::read(pair.domain.image_path(&image).unwrap()).unwrap();
    }
    let images = |domain: &Domain| domain.objects_dir().unwrap().with_file_name("images");
    let mut ledger = pair.ledger();
    let reclaim = |ledger: &mut Ledger, domain: &str| {
        ledger.sample_all().unwrap();
        ledger.reclaim(&all_of(ReclaimTarget::Domain(domain.to_owned())))
    };
    let blind = Blind::new(images(&other));
    assert_eq!(reclaim(&mut ledger, "default").unwrap().freed_bytes, SIZE as u64);
    let error = reclaim(&mut ledger, "other").unwrap_err();
    assert!(matches!(error, LedgerError::Store(_)), "{error}");
    assert_eq!(ledger.report().unwrap().unknown.images, 1);
    drop(blind);
    assert_eq!(reclaim(&mut ledger, "other").unwrap().freed_bytes, 0);

    // What was known stays.
    let known = ledger.report().unwrap();
    assert!(known.domains[0].metadata_bytes > 0 && known.images.len() == 2, "{known:#?}");
    for directory in [images(&pair.domain), pair.dir.path().join("store/domains")] {
        let blind = Blind::new(directory);
        ledger.sample_all().unwrap();
        let report = ledger.report().unwrap();
        assert_eq!((&report.domains, &report.images), (&known.domains, &known.images));
        assert!(report.unknown.images > 0 && report.unknown.objects > 0, "{:?}", report.unknown);
        drop(blind);
    }
    ledger.sample_all().unwrap();
    let unknown = ledger.report().unwrap().unknown;
    assert_eq!((unknown.images, unknown.objects), (0, 0));
}

/// A metadata image that could not be looked at had no resident bytes, so the image counted as idle.
#[test]
fn metadata_that_cannot_be_looked_at_keeps_its_figure() {
    let test = "metadata_that_cannot_be_looked_at_keeps_its_figure";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let paths = pair.images.map(|image| pair.domain.image_path(&image).unwrap());
    paths.iter().for_each(|path| drop(fs::read(path).unwrap()));
    let mut ledger = pair.ledger();
    let mut figures = || {
        ledger.sample_all().unwrap();
        let report = ledger.report().unwrap();
        let images: Vec<_> = report.images.iter().map(|it| it.metadata_bytes).collect();
        (images, report.domains[0].metadata_bytes, report.unknown.objects)
    };
    let before = figures();
    assert!(before.0.iter().all(|bytes| *bytes > 0) && before.2 == 0, "{before:?}");
    let blind = Blind::new(paths[0].clone());
    assert_eq!(figures(), (before.0.clone(), before.1, 1));
    drop(blind);
    assert_eq!(figures(), before);
    // With one that could not be looked at, a ledger that begins counted no image of the domain.
    let _blind = Blind::new(paths[0].clone());
    let mut ledger = pair.ledger();
    ledger.sample_all().unwrap();
    let report = ledger.report().unwrap();
    let of_others: u64 = report.images.iter().map(|it| it.metadata_bytes).sum();
    assert!(of_others > 0 && report.domains[0].metadata_bytes == of_others, "{report:#?}");
}

/// No profile could be recorded while any trust domain could not be listed.
#[test]
fn a_profile_is_recorded_whatever_other_domains_are_like() {
    let test = "a_profile_is_recorded_whatever_other_domains_are_like";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let target = pair.mount(0, "m1", Access::ReadOnly);
    let other = pair.domain.store().domain_or_create("other").unwrap();
    let blind = Blind::new(other.objects_dir().unwrap().with_file_name("images"));
    let mut recorder = Recorder::begin(&pair.domain, pair.run(), pair.images[0], "some").unwrap();
    // A process that has ended counts as the container's.
    let read = Command::new("cat").arg(target.join("shared")).stdout(Stdio::null()).status();
    assert!(read.unwrap().success());
    recorder.take().unwrap();
    let (profile, _) = recorder.end().unwrap();
    let objects: Vec<_> = profile.files.iter().map(|file| file.object).collect();
    assert_eq!(objects, [pair.object(0)]);
    drop(blind);
    pair.umount(&target);
}

/// For want of a descriptor the ledger could not list a directory. It took that for unmounted
/// whatever was there, and forgot who used it.
#[test]
fn what_cannot_be_listed_is_not_taken_for_unmounted() {
    let test = "what_cannot_be_listed_is_not_taken_for_unmounted";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let mounts = [pair.mount(0, "m1", Access::ReadOnly), pair.mount(1, "m2", Access::Writable)];
    pair.forget_all();
    let mut ledger = pair.ledger();
    let holders = [
        Holder::new(&mounts[0].join("deep/own"), None),
        Holder::new(&mounts[1].join("deep/own"), None),
    ];
    assert_eq!(users(&mut ledger, &pair), [0, 1, 1]);
    drop(holders);
    let run = pair.dir.path().join("run");
    let unknown = |ledger: &Ledger| ledger.report().unwrap().unknown.mounts;
    for name in ["images", "mounts"] {
        let (path, away) = (run.join(name), run.join("away"));
        fs::rename(&path, &away).unwrap();
        // A link to itself: ELOOP.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        assert_eq!(users(&mut ledger, &pair), [0, 1, 1], "{name}");
        assert_eq!(unknown(&ledger), 1);
        fs::remove_file(&path).unwrap();
        fs::rename(&away, &path).unwrap();
    }
    assert_eq!(users(&mut ledger, &pair), [0, 1, 1]);
    assert_eq!(unknown(&ledger), 0);
    mounts.iter().for_each(|target| pair.umount(target));
    assert_eq!(users(&mut ledger, &pair), [0, 0, 0]);
}
