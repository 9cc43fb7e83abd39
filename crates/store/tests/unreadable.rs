//! What cannot be read, and what is short: damage is found and mended, and lack of something is no damage.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "what is skipped is said")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use cofolio_store::disk::Disk as _;
use cofolio_store::task::{Cancel, Task};
use cofolio_store::{
    BoxError, Contents, Digest, Domain, Error, ErrorKind, FileKind, FileName, FindingKind,
    FsckOptions, GcOptions, ImportOptions, InitOptions, Root, RootKind, ScrubOptions, Store,
    StoredFile, is_damage, verity,
};
use common::sim::SimDisk;
use common::volume::Volume;
use common::{Lines, Scratch, content, import, import_split, nothing_live};

fn pieces() -> Vec<Vec<u8>> {
    vec![content(100, 1), content(5000, 2), content(9000, 3)]
}

fn kinds(domain: &Domain) -> Vec<FindingKind> {
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    report.findings.iter().map(|finding| finding.kind).collect()
}

/// EIO, which fs-verity also gives for an altered file, ended fsck, verify and repair with an error: nothing
/// else was looked at, and what could not be read could not be replaced. Now it is a finding like others.
#[test]
fn what_the_disk_does_not_give_is_found_and_replaced() {
    let base = SimDisk::new(1);
    let store = Store::init_on(Arc::new(base.clone()), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let options = ImportOptions::default();
    let image = import_split(&domain, "a", &pieces(), Some("sha256:l"), options).unwrap();
    let object = verity::digest(&content(5000, 2));
    let path_of = |part: &str| {
        let path = base.files().into_keys().find(|path| path.contains(part));
        path.unwrap_or_else(|| panic!("no {part}"))
    };
    let object_path = path_of(&object.object_path());
    use rustix::io::Errno;
    for (path, why, expected) in [
        (object_path.clone(), Errno::IO, FindingKind::ObjectUnreadable),
        (object_path.clone(), Errno::UCLEAN, FindingKind::ObjectUnreadable),
        (path_of(&format!("{image}.erofs")), Errno::IO, FindingKind::ImageUnreadable),
        (path_of(&format!("{image}.erofs")), Errno::UCLEAN, FindingKind::ImageUnreadable),
        (path_of(".dump.zst"), Errno::IO, FindingKind::LayerUnreadable),
        (path_of(".split"), Errno::IO, FindingKind::LayerUnreadable),
    ] {
        let disk = base.fork(1);
        // Something else is wrong, too: it is found all the same.
        let other = path_of(&verity::digest(&content(9000, 3)).object_path());
        disk.damage(&other, |bytes| bytes[0] ^= 1);
        disk.make_unreadable(&path, why);
        let store = Store::open_on(Arc::new(disk.clone())).unwrap();
        let domain = store.domain("default").unwrap();
        domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
        let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
        let image_is_read = expected != FindingKind::ImageUnreadable;
        let found: Vec<_> = report.findings.iter().map(|it| (it.kind, it.path.as_str())).collect();
        assert!(found.contains(&(expected, path.as_str())), "{found:?}");
        assert!(found.contains(&(FindingKind::ObjectAltered, other.as_str())), "{found:?}");
        assert!(report.findings.iter().all(|it| it.refs == ["a"] || !image_is_read), "{report:?}");
        // An image that cannot be read is the only finding about itself.
        let verified = domain.verify_image(&image, &Lines, &Task::default()).unwrap();
        let is_layer = expected == FindingKind::LayerUnreadable;
        assert!(is_layer || verified.findings.iter().any(|it| it.kind == expected));
        let scrubbed = domain.scrub(&Lines, &ScrubOptions::default(), &Task::default()).unwrap();
        assert!(scrubbed.findings.iter().any(|it| it.kind == expected), "{scrubbed:?}");
        // A damaged inode is for the filesystem's own check to mend, and holds up nothing else.
        common::repair(&domain, &[(pieces(), "sha256:l")]).unwrap();
        let left = (why == Errno::UCLEAN).then_some(expected);
        assert_eq!(kinds(&domain), Vec::from_iter(left), "{path}");
        if why == Errno::UCLEAN {
            domain.remove_ref("a").unwrap();
            let gc = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
            assert_eq!(gc.unreadable.len(), 1, "{gc:?}");
            assert!(gc.unreadable[0].what.contains(&path), "{gc:?}");
            assert!(gc.unreadable[0].reason.contains("run its own check"), "{gc:?}");
            assert!(report.findings.iter().any(|it| it.detail.contains("run its own check")));
            assert_eq!(
                disk.files().keys().filter(|path| path.contains("/objects/")).count(),
                usize::from(path.contains("/objects/"))
            );
        }
    }
}

/// A damaged inode of a record that is no content, or of what a killed import left, ended every gc or
/// fsck with an error.
#[test]
fn a_damaged_record_holds_up_nothing() {
    use rustix::io::Errno;
    let base = SimDisk::new(1);
    let store = Store::init_on(Arc::new(base.clone()), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let image = import(&domain, "a", &pieces(), None, ImportOptions::default()).unwrap();
    domain.add_signature(&image, b"a signature").unwrap();
    domain.note_use(&image, 1).unwrap();
    domain.examine_sizes(&Lines, "boot", &Cancel::default()).unwrap();
    let leftover = domain.begin_import(ImportOptions::default()).unwrap();
    leftover.put_object(b"of a killed import").unwrap();
    for part in ["/signatures/", "/used/", "/sizes.json", "staging/"] {
        // Nobody holds locks of the copy.
        let disk = base.fork(1);
        let path = base.files().into_keys().find(|path| path.contains(part)).unwrap();
        let store = Store::open_on(Arc::new(disk.clone())).unwrap();
        let domain = store.domain("default").unwrap();
        import(&domain, "garbage", &[content(50, 4)], None, ImportOptions::default()).unwrap();
        domain.remove_ref("garbage").unwrap();
        disk.make_unreadable(&path, Errno::UCLEAN);
        let gc = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
        assert_eq!(gc.images, 1, "{path}: {gc:?}");
        let report = domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap();
        let found = report.findings.iter().any(|it| it.kind == FindingKind::SignatureAltered);
        assert_eq!(found, part == "/signatures/", "{path}: {report:?}");
        assert_eq!(domain.noted_use(&image).unwrap().is_none(), part == "/used/");
        assert_eq!(domain.sizes().unwrap().is_none(), part == "/sizes.json");
    }
}

/// Reads images as [`Lines`] does, until there is no descriptor to be had.
struct Short(rustix::io::Errno);

impl Contents for Short {
    fn names(
        &self,
        _: FileKind,
        _: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        visit(Digest([1; 32]), 1);
        Err(std::io::Error::other(std::io::Error::from(self.0)).into())
    }
}

/// Lack of memory or descriptors counted as damage in a scrub, so that a repair replaced what was all right.
/// It ends every run with an error.
#[test]
fn lack_of_something_is_no_damage() {
    use rustix::io::Errno;
    let disk = SimDisk::new(1);
    let store = Store::init_on(Arc::new(disk.clone()), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let options = ImportOptions::default();
    let image = import(&domain, "a", &pieces(), Some("sha256:l"), options).unwrap();
    for errno in [Errno::NOMEM, Errno::MFILE, Errno::NFILE, Errno::AGAIN] {
        let short = Short(errno);
        let fsck = domain.fsck(&short, FsckOptions { rehash: true }, &Task::default());
        let gc = domain.gc(&short, &nothing_live, &GcOptions::default());
        for error in [
            fsck.err(),
            domain.scrub(&short, &ScrubOptions::default(), &Task::default()).err(),
            domain.verify_image(&image, &short, &Task::default()).err(),
            domain.examine_sizes(&short, "boot", &Cancel::default()).err(),
            gc.err(),
        ] {
            assert!(!is_damage(&error.unwrap()), "{errno}");
        }
        assert_eq!(kinds(&domain), []);
    }
    // The directory counted as missing, which ended fsck, and the ref as one that nobody can read.
    for path in ["domains/default/images", "domains/default/refs/a.json"] {
        disk.make_unreadable(path, Errno::MFILE);
        let fsck = domain.fsck(&Lines, FsckOptions::default(), &Task::default());
        assert!(!is_damage(&fsck.unwrap_err()), "{path}");
    }
}

/// Names more objects than there are.
struct Many;

impl Contents for Many {
    fn names(
        &self,
        _: FileKind,
        _: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        let digests = (0..60_000_u32).map(|n| verity::digest(&n.to_le_bytes()));
        digests.for_each(|digest| visit(digest, 1));
        Ok(())
    }
}

/// The look at all sizes listed what it found without limit. The record was larger than 16 MiB then, so that it
/// was not written and every gc ended with an error.
#[test]
fn a_look_at_all_sizes_lists_some_findings_and_counts_the_rest() {
    let store = Store::init_on(Arc::new(SimDisk::new(1)), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    import(&domain, "a", &pieces(), None, ImportOptions::default()).unwrap();
    let report = domain.examine_sizes(&Many, "boot", &Cancel::default()).unwrap();
    assert_eq!((report.findings.len(), report.more), (10_000, 50_000));
    assert_eq!(domain.sizes().unwrap(), Some(report));
}

/// A link or a pipe in a file's place held up `fsck --repair`, which then told nothing of the rest.
#[test]
fn links_and_pipes_in_place_of_an_object_hold_up_nothing() {
    let link = |path: &std::path::Path| std::os::unix::fs::symlink("elsewhere", path).unwrap();
    let pipe = |path: &std::path::Path| {
        let mode = rustix::fs::Mode::from_raw_mode(0o644);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).unwrap();
    };
    for (name, put) in [("link", &link as &dyn Fn(&std::path::Path)), ("pipe", &pipe)] {
        let scratch = Scratch::new(name);
        let domain = scratch.store().domain("default").unwrap();
        let options = ImportOptions::default();
        import_split(&domain, "a", &pieces(), Some("sha256:l"), options).unwrap();
        let path = domain.object_path(&verity::digest(&content(5000, 2))).unwrap();
        common::make_mutable(&scratch.path);
        std::fs::remove_file(&path).unwrap();
        put(&path);
        domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
        domain.protect_all(&Task::default()).unwrap();
        common::repair(&domain, &[]).unwrap();
        let expected = [FindingKind::ObjectMissing, FindingKind::UnexpectedEntry];
        assert_eq!(kinds(&domain), expected, "{name}");
        common::repair(&domain, &[(pieces(), "sha256:l")]).unwrap();
        assert_eq!(kinds(&domain), [], "{name}");
        assert!(path.symlink_metadata().unwrap().is_file(), "{name}");
    }
}

/// A directory in place of an image was no damage for fsck, and got the immutable flag from gc, so that it could
/// not be removed. In place of anything it stopped the repair of everything else, and gc if nothing named it.
#[test]
fn a_directory_in_place_of_a_file_holds_up_nothing() {
    let scratch = Scratch::new("directory");
    let domain = scratch.store().domain("default").unwrap();
    let options = ImportOptions::default();
    let image = import_split(&domain, "a", &pieces(), Some("sha256:l"), options).unwrap();
    let chain = |kind| FileName::chain(kind, "sha256:l").unwrap();
    let object = |seed, len| domain.object_path(&verity::digest(&content(len, seed))).unwrap();
    let (sound, other) = (object(2, 5000), object(1, 100));
    for path in [
        domain.image_path(&image).unwrap(),
        domain.named_path(&chain(FileKind::Split)).unwrap(),
        domain.named_path(&chain(FileKind::Layer)).unwrap(),
        sound.clone(),
    ] {
        let replace = |path: &std::path::Path, by: &dyn Fn(&std::path::Path)| {
            common::make_mutable(&scratch.path);
            std::fs::remove_file(path).unwrap();
            by(path);
        };
        replace(&path, &|path| std::fs::create_dir(path).unwrap());
        replace(&other, &|_| ());
        domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
        let found = || {
            let report = domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap();
            let damaged = report.findings.into_iter().filter(|it| it.kind.is_damage());
            damaged.map(|it| it.path).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(found().len(), 2, "{path:?}");
        let sizes = domain.examine_sizes(&Lines, "boot", &Cancel::default()).unwrap();
        let is_found = |file: &std::path::Path| {
            sizes.findings.iter().any(|finding| file.ends_with(&finding.path))
        };
        let is_named = Some(&path) != domain.image_path(&image).as_ref();
        assert_eq!((is_found(&other), is_found(&sound)), (is_named, path == sound), "{sizes:?}");
        let report = domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap();
        let advice = report.findings.iter().any(|it| it.detail.contains("remove that directory"));
        assert!(advice, "{report:?}");
        common::repair(&domain, &[(pieces(), "sha256:l")]).unwrap();
        let left = found();
        assert!(left.len() == 1 && left.iter().all(|it| path.ends_with(it)), "{left:?}");
        let record = domain.get_ref("a").unwrap().unwrap();
        if Some(&path) == domain.image_path(&image).as_ref() {
            domain.put_ref("b", &record).unwrap_err();
        }
        std::fs::remove_dir(&path).unwrap();
        common::repair(&domain, &[(pieces(), "sha256:l")]).unwrap();
        assert_eq!(kinds(&domain), []);
    }
    let layer = domain.named_path(&chain(FileKind::Layer)).unwrap();
    // A link or a FIFO can be replaced.
    let link = |path: &std::path::Path| std::os::unix::fs::symlink("/nowhere", path).unwrap();
    let fifo = |path: &std::path::Path| {
        let made = Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success());
    };
    for (path, by) in
        [(&sound, &link as &dyn Fn(&std::path::Path)), (&other, &fifo), (&layer, &link)]
    {
        common::make_mutable(&scratch.path);
        std::fs::remove_file(path).unwrap();
        by(path);
        common::repair(&domain, &[(pieces(), "sha256:l")]).unwrap();
        assert_eq!(kinds(&domain), [], "{path:?}");
        assert!(std::fs::symlink_metadata(path).unwrap().is_file(), "{path:?}");
    }
    common::make_mutable(&scratch.path);
    std::fs::remove_file(&layer).unwrap();
    std::fs::create_dir(&layer).unwrap();
    domain.remove_ref("a").unwrap();
    let gc = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
    assert_eq!((gc.unreadable.len(), gc.images), (1, 1), "{gc:?}");
}

/// The store promised mode 0700, but only where it made the directory itself: on a volume that was mounted
/// for it every object could be read by every user.
#[test]
fn only_the_owner_looks_into_a_store() {
    let scratch = Scratch::new("mode");
    let mode = || std::fs::metadata(&scratch.path).unwrap().permissions().mode() & 0o777;
    std::fs::set_permissions(&scratch.path, PermissionsExt::from_mode(0o755)).unwrap();
    let store = scratch.store();
    assert_eq!(mode(), 0o700);
    let domain = store.domain("default").unwrap();
    assert_eq!(kinds(&domain), []);
    for wrong in [0o755, 0o750, 0o701] {
        std::fs::set_permissions(&scratch.path, PermissionsExt::from_mode(wrong)).unwrap();
        assert!(store.open_to_others().unwrap().is_some());
        assert_eq!(kinds(&domain), [FindingKind::Permissions]);
        domain.protect_all(&Task::default()).unwrap();
        assert_eq!((mode(), kinds(&domain)), (0o700, vec![]));
    }
    // What is no store stays as it is.
    let other = Scratch::new("mode-other");
    std::fs::write(other.path.join("mine"), "").unwrap();
    std::fs::set_permissions(&other.path, PermissionsExt::from_mode(0o755)).unwrap();
    assert!(Store::init(&other.path, &InitOptions::default()).is_err());
    assert_eq!(std::fs::metadata(&other.path).unwrap().permissions().mode() & 0o777, 0o755);
}

/// Root opened, mounted from and collected another user's store, who could have replaced a directory of it by a link.
#[test]
fn the_store_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP the_store_of_another_user_is_refused: needs root");
    }
    let scratch = Scratch::new("theirs");
    drop(scratch.store());
    std::os::unix::fs::chown(&scratch.path, Some(4711), None).unwrap();
    let refused = [
        Store::open(&scratch.path).map(drop),
        Store::open_damaged(&scratch.path).map(drop),
        Store::mend_meta(&scratch.path).map(drop),
        Store::init(&scratch.path, &InitOptions::default()).map(drop),
    ];
    for refused in refused.map(Result::unwrap_err) {
        assert!(refused.to_string().contains("belongs to user 4711"), "{refused}");
    }
    std::os::unix::fs::chown(&scratch.path, Some(0), None).unwrap();
    Store::open(&scratch.path).unwrap();
}

/// A damaged `meta.json` failed every command, and nothing mended it.
#[test]
fn a_damaged_meta_json_is_made_again() {
    let scratch = Scratch::new("meta");
    let store = scratch.store();
    let domain = store.domain("default").unwrap();
    let image = import(&domain, "a", &pieces(), None, ImportOptions::default()).unwrap();
    domain.note_use(&image, 5).unwrap();
    let path = scratch.path.join("meta.json");
    let whole = std::fs::read(&path).unwrap();
    assert!(!Store::mend_meta(&scratch.path).unwrap(), "nothing to mend");
    let cut = whole[..whole.len() - 2].to_vec();
    let flipped = whole.iter().map(|byte| if *byte == b'{' { b'[' } else { *byte }).collect();
    let copy = scratch.path.join("meta.copy.json");
    let (lost, empty) = (Vec::new(), Vec::new());
    for (damaged, copied, keeps_id) in
        [(cut, false, true), (flipped, false, true), (empty, true, true), (lost, false, false)]
    {
        std::fs::write(&path, &damaged).unwrap();
        std::fs::write(&copy, if copied { &whole[..] } else { b"{" }).unwrap();
        assert!(matches!(Store::open(&scratch.path), Err(Error::Corrupt { .. })));
        // fsck ended with that error, too, and looked at nothing else.
        let (opened, finding) = Store::open_damaged(&scratch.path).unwrap();
        assert_eq!(finding.unwrap().kind, FindingKind::MetaUnreadable);
        assert_eq!(kinds(&opened.domain("default").unwrap()), []);
        assert!(Store::mend_meta(&scratch.path).unwrap());
        let mended = Store::open(&scratch.path).unwrap();
        assert_eq!(mended.id() == store.id(), keeps_id);
        assert_eq!(mended.protection(), store.protection());
        let domain = mended.domain("default").unwrap();
        assert_eq!(kinds(&domain), []);
        assert_eq!(domain.noted_use(&image).unwrap(), Some(5));
        assert_eq!(std::fs::read(&copy).unwrap(), std::fs::read(&path).unwrap());
        std::fs::write(&path, &whole).unwrap();
    }
    // Of a flipped digit in the id nobody knew: a store without its mounts was seen.
    let id = store.id();
    let flipped = if id.starts_with('0') { "1" } else { "0" }.to_owned() + &id[1..];
    let altered = String::from_utf8(whole.clone()).unwrap().replace(id, &flipped);
    let _ = std::fs::remove_dir_all(store.run_dir());
    for (in_meta, in_copy, made) in [
        (altered.as_bytes(), &whole[..], false),
        (altered.as_bytes(), &whole[..], true),
        (&whole[..], altered.as_bytes(), true),
    ] {
        std::fs::write(&path, in_meta).unwrap();
        std::fs::write(&copy, in_copy).unwrap();
        let error = Store::open(&scratch.path).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { reason, .. } if reason.contains(&flipped)));
        // Mounts have left something of the true one.
        if made {
            std::fs::create_dir_all(store.run_dir()).unwrap();
        }
        assert!(Store::mend_meta(&scratch.path).unwrap());
        assert_eq!(Store::open(&scratch.path).unwrap().id(), id);
        assert_eq!(std::fs::read(&copy).unwrap(), whole);
    }
    std::fs::remove_dir_all(store.run_dir()).unwrap();
    // That of a newer program is not damaged.
    let newer = String::from_utf8(whole.clone()).unwrap().replace("\"format\": 1", "\"format\": 9");
    std::fs::write(&path, &newer).unwrap();
    assert!(matches!(Store::mend_meta(&scratch.path), Err(Error::UnknownFeature { .. })));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), newer);
    std::fs::write(&path, whole).unwrap();
}

/// fsck did not look at the settings of a domain, and a layer without its split was no damage to it: an
/// export of the image failed later.
#[test]
fn damaged_settings_and_a_missing_split_are_found() {
    let base = SimDisk::new(1);
    let store = Store::init_on(Arc::new(base.clone()), &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let options = ImportOptions::default();
    import_split(&domain, "a", &pieces(), Some("sha256:l"), options).unwrap();
    common::set(&domain, 2).unwrap();
    assert_eq!(kinds(&domain), []);
    base.damage("domains/default/domain.json", |bytes| bytes.truncate(3));
    assert_eq!(kinds(&domain), [FindingKind::SettingsUnreadable]);
    common::set(&domain, 2).unwrap();
    let split = base.files().into_keys().find(|path| path.ends_with(".split")).unwrap();
    base.set_immutable(&split, false).unwrap();
    base.unlink(&split).unwrap();
    assert_eq!(kinds(&domain), [FindingKind::RefDangling]);
    common::repair(&domain, &[(pieces(), "sha256:l")]).unwrap();
    assert_eq!(kinds(&domain), []);
}

/// Not a test by itself: the process of the test below runs this.
#[test]
#[ignore = "worker: started by without_threads_the_work_is_done_all_the_same"]
fn worker_without_threads() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::As);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    // A thread has a stack of 2 MiB.
    let low = Some((size << 10) + (3 << 19));
    setrlimit(Resource::As, Rlimit { current: low, ..before }).unwrap();
    let refused = std::thread::Builder::new().spawn(|| ()).is_err();
    let store = Store::open(std::env::var_os("COFOLIO_STORE_LOW").unwrap().as_ref()).unwrap();
    let domain = store.domain("default").unwrap();
    let image = domain.images().unwrap()[0];
    let verified = domain.verify_image(&image, &Lines, &Task::default());
    setrlimit(Resource::As, before).unwrap();
    assert!(refused);
    assert_eq!(verified.unwrap().findings, []);
}

/// A thread that was not to be had (`pids.max`, `ulimit -u`) was a panic. Without room in the address space
/// for its stack there is none either.
#[test]
fn without_threads_the_work_is_done_all_the_same() {
    let scratch = Scratch::new("threads");
    let domain = scratch.store().domain("default").unwrap();
    import(&domain, "a", &pieces(), Some("sha256:l"), ImportOptions::default()).unwrap();
    run_worker("worker_without_threads", &scratch);
}

fn run_worker(name: &str, scratch: &Scratch) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env("COFOLIO_STORE_LOW", &scratch.path)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    // Without a test of that name libtest succeeds, too.
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// Cancels as soon as it reads an image; counts these.
struct Stopping<'a>(&'a Cancel, &'a AtomicUsize);

impl Contents for Stopping<'_> {
    fn names(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        self.0.cancel();
        self.1.fetch_add(1, Relaxed);
        Lines.names(kind, file, visit)
    }
}

/// Once per boot the sizes of all objects are looked at, because mounts of protected content do not.
#[test]
fn a_look_at_all_sizes_finds_what_was_cut_short() {
    let scratch = Scratch::new("sizes");
    let store = Store::init(&scratch.path, &InitOptions { immutable: false }).unwrap();
    let domain = store.domain("default").unwrap();
    let image = import(&domain, "a", &pieces(), None, ImportOptions::default()).unwrap();
    assert_eq!(domain.sizes().unwrap(), None);
    let look = |boot: &str| domain.examine_sizes(&Lines, boot, &Cancel::default()).unwrap();
    let report = look("one");
    assert_eq!((report.objects, report.findings.len()), (3, 0));
    assert_eq!(domain.sizes().unwrap(), Some(report));
    // One that is stopped does not count as done. The images were read to their end first.
    let (cancel, read) = (Cancel::default(), AtomicUsize::new(0));
    import(&domain, "b", &pieces()[1..], None, ImportOptions::default()).unwrap();
    let stopped = domain.examine_sizes(&Stopping(&cancel, &read), "two", &cancel);
    assert!(matches!(stopped, Err(Error::Cancelled(_))), "{stopped:?}");
    assert_eq!(read.into_inner(), 1);
    domain.remove_ref("b").unwrap();
    assert_eq!(domain.sizes().unwrap().unwrap().boot_id, "one");

    let path = |seed, len| domain.object_path(&verity::digest(&content(len, seed))).unwrap();
    let cut = path(3, 9000);
    std::fs::set_permissions(&cut, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::OpenOptions::new().write(true).open(&cut).unwrap().set_len(4096).unwrap();
    std::fs::remove_file(path(1, 100)).unwrap();
    let mut found: Vec<_> = look("two").findings.iter().map(|it| it.kind).collect();
    found.sort();
    assert_eq!(found, [FindingKind::ObjectMissing, FindingKind::ObjectTruncated]);
    assert_eq!(domain.sizes().unwrap().unwrap().boot_id, "two");
    domain.remove_ref("a").unwrap();
    domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
    assert!(!domain.has_image(&image).unwrap());
    assert_eq!(look("three").findings, []);
}

/// Not a test by itself: the process of the test below runs this.
#[test]
#[ignore = "run by a_low_descriptor_limit_leaves_no_staging_directory"]
fn worker() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let path = std::env::var_os("COFOLIO_STORE_LOW").unwrap();
    let store = Store::open(path.as_ref()).unwrap();
    let domain = store.domain("default").unwrap();
    let before = getrlimit(Resource::Nofile);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let mut refused = 0;
    for more in 0..6 {
        let low = Rlimit { current: Some(open - 1 + more), ..before };
        setrlimit(Resource::Nofile, low).unwrap();
        // So far it comes, and then something has no descriptor.
        let staging = domain.begin_import(ImportOptions::default());
        let done = staging.and_then(|staging| {
            let mut writers: Vec<_> = (0..3).map(|_| staging.object_writer()).collect();
            for writer in &mut writers {
                writer.push(&content(2 << 20, more))?;
            }
            Ok(())
        });
        setrlimit(Resource::Nofile, before).unwrap();
        refused += u32::from(done.is_err());
        let left = std::fs::read_dir(store.path().unwrap().join("staging")).unwrap().count();
        assert_eq!(left, 0, "with {more} descriptors: {done:?}");
    }
    assert!(refused >= 2);
}

/// With too few descriptors an import could not be begun, and left its directory behind.
#[test]
fn a_low_descriptor_limit_leaves_no_staging_directory() {
    let scratch = Scratch::new("low");
    drop(scratch.store());
    run_worker("worker", &scratch);
}

/// A small filesystem, or the reason why there is none.
fn small(scratch: &Scratch, test: &str, mkfs: &[&str]) -> Option<Volume> {
    match Volume::new(&scratch.path, "ext4", 24, mkfs) {
        Ok(volume) => Some(volume),
        Err(reason) => {
            println!("SKIP {test}: {reason}");
            None
        }
    }
}

/// Without inodes an import said how many bytes were missing, on a filesystem that was nearly empty.
#[test]
fn out_of_inodes_is_not_out_of_bytes() {
    let test = "out_of_inodes_is_not_out_of_bytes";
    let scratch = Scratch::new("inodes");
    let Some(volume) = small(&scratch, test, &["-N", "200", "-m", "0"]) else { return };
    let store = Store::init(&volume.directory, &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let many: Vec<_> = (0..400).map(|seed| content(50, seed)).collect();
    let error = import(&domain, "a", &many, None, ImportOptions::default()).unwrap_err();
    assert!(matches!(error, Error::NoInodes { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::Space);
    assert_eq!(std::fs::read_dir(volume.directory.join("staging")).unwrap().count(), 0);
    assert_eq!(kinds(&domain), []);
    drop((domain, store));
}

/// On a full disk no read-only mount could be made, because its record needs a block.
#[test]
fn a_full_disk_has_room_for_the_record_of_a_mount() {
    let test = "a_full_disk_has_room_for_the_record_of_a_mount";
    let scratch = Scratch::new("reserve");
    let Some(volume) = small(&scratch, test, &["-m", "0"]) else { return };
    let store = Store::init(&volume.directory, &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    let image = import(&domain, "a", &pieces(), None, ImportOptions::default()).unwrap();
    let filler = volume.directory.join("filler");
    let fill = || {
        use std::io::Write as _;
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&filler).unwrap();
        let mut size = 1 << 20;
        while size > 0 {
            if file.write_all(&vec![7; size]).and_then(|()| file.sync_all()).is_err() {
                size /= 2;
            }
        }
    };
    fill();
    let long = "x".repeat(5000);
    let put = |id: &str| {
        let mut root = Root::new(RootKind::Mount, id);
        root.images.push(image);
        root.note.clone_from(&long);
        domain.put_root(&root)
    };
    for number in 0..20 {
        put(&format!("m{number}")).unwrap();
    }
    assert_eq!(domain.roots(RootKind::Mount).unwrap().len(), 20);
    assert!(!volume.directory.join("reserve").exists());
    std::fs::remove_file(&filler).unwrap();
    domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
    assert!(volume.directory.join("reserve").exists(), "there is room again");
    drop((domain, store));
}
