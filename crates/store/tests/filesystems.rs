//! What depends on the filesystem: permissions, the immutable flag, fs-verity, reflinks, and that two
//! trust domains never share an inode. On the filesystem of the temporary directory, and on xfs and
//! btrfs in loop-mounted images where this machine can make them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "a test that is skipped says why")]

mod common;

use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use cofolio_store::task::Task;
use cofolio_store::{
    Domain, FindingKind, FsckOptions, GcOptions, ImportOptions, InitOptions, Protection, Publish,
    Ref, ScrubOptions, Store, verity,
};
use cofolio_sys::cache::{FileMap, cachestat, page_size};
use common::volume::{Volume, run};
use common::{Lines, LoopMount, Scratch, content, import, is_clean, nothing_live, on_each, put};

/// `TMPFS_MAGIC` of `linux/magic.h`.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// `BTRFS_SUPER_MAGIC` of `linux/magic.h`.
const BTRFS_SUPER_MAGIC: rustix::fs::FsWord = 0x9123_683e;

/// `XFS_SUPER_MAGIC` of `linux/magic.h`.
const XFS_SUPER_MAGIC: rustix::fs::FsWord = 0x5846_5342;

/// A store was made when its filesystem had no fs-verity, and images were mounted from it for a year; then somebody ran
/// `tune2fs -O verity`. New objects have it, the old ones are told by fsck, and a repair gives it to them: to those
/// that are what their names say. Nothing else about them changes.
#[test]
fn content_gets_fs_verity_when_its_filesystem_does() {
    let test = "content_gets_fs_verity_when_its_filesystem_does";
    let scratch = Scratch::new("later");
    let volume = Volume::new(&scratch.path, "ext4", 100, &["-b", "4096", "-O", "^verity"]);
    let volume = match volume {
        Ok(volume) => volume,
        Err(reason) => return println!("SKIP {test}: {reason}"),
    };
    let directory = &volume.directory;
    let open = || Store::open(&directory.join("store")).unwrap().domain("default").unwrap();
    let unprotected = |domain: &Domain| -> Vec<String> {
        let report = domain.fsck(&Lines, FsckOptions { rehash: false }, &Task::default()).unwrap();
        assert!(!report.is_damaged());
        let of_kind = |finding: &cofolio_store::Finding| finding.kind == FindingKind::Unprotected;
        report.findings.into_iter().filter(of_kind).map(|finding| finding.path).collect()
    };
    Store::init(&directory.join("store"), &InitOptions::default()).unwrap();
    let pieces = put(&open(), "a", &[0, 100, 70_000, 5000]);
    assert_eq!(unprotected(&open()), Vec::<String>::new());
    volume.unmount().unwrap();
    let tuned = run(Command::new("tune2fs").args(["-O", "verity"]).arg(&volume.image));
    if let Err(reason) = tuned.and_then(|()| volume.mount("loop")) {
        return println!("SKIP {test}: {reason}");
    }
    let domain = open();
    if !domain.protection().verity {
        return println!("SKIP {test}: this kernel has no fs-verity");
    }
    assert_eq!(unprotected(&domain).len(), pieces.len() + 1, "objects and the image");
    // One of them was altered when nobody looked: it must not get a digest that makes it look right.
    let altered = domain.object_path(&verity::digest(&pieces[3])).unwrap();
    let _ = run(Command::new("chattr").arg("-i").arg(&altered));
    std::fs::set_permissions(&altered, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::write(&altered, vec![0; 5000]).unwrap();
    std::fs::set_permissions(&altered, PermissionsExt::from_mode(0o444)).unwrap();
    assert_eq!(domain.protect_all(&Task::default()).unwrap(), pieces.len() as u64 - 1);
    assert_eq!(unprotected(&domain).len(), 2, "nor is its image protected");
    // Its flag vouched for objects that had lost theirs, after a kill in between, too.
    let image = domain.image_path(&domain.images().unwrap()[0]).unwrap();
    assert!(std::fs::OpenOptions::new().write(true).open(&image).is_ok());
    for piece in &pieces[..3] {
        let path = domain.object_path(&verity::digest(piece)).unwrap();
        let measured = cofolio_sys::verity::measure(std::fs::File::open(&path).unwrap()).unwrap();
        assert_eq!(measured, Some(verity::digest(piece).0));
        assert!(std::fs::read(&path).unwrap() == *piece);
        assert!(std::fs::remove_file(&path).is_err(), "immutable again");
    }
    assert_eq!(domain.protect_all(&Task::default()).unwrap(), 0);
    common::make_mutable(directory);
}

#[test]
fn content_in_place_is_protected_as_far_as_the_filesystem_goes() {
    on_each("content_in_place_is_protected", |kind, parent| {
        let scratch = Scratch::below(parent, "protect");
        let store = scratch.store();
        let domain = store.domain("default").unwrap();
        let Protection { verity, immutable } = domain.protection();
        let reflink = domain.can_reflink();
        println!("{kind}: fs-verity {verity}, immutable {immutable}, reflink {reflink}");
        assert_eq!(reflink, matches!(kind, "xfs" | "btrfs") || reflink && kind.contains(' '));
        let pieces = put(&domain, "a", &[0, 100, 70_000]);
        is_clean(&domain, &Lines);
        for piece in &pieces {
            let path = domain.object_path(&verity::digest(piece)).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o444);
            assert!(std::fs::read(&path).unwrap() == *piece);
            let written = std::fs::OpenOptions::new().write(true).open(&path);
            if immutable {
                assert!(std::fs::remove_file(&path).is_err(), "{kind}: root removes {path:?}");
            }
            assert_eq!(written.is_err(), immutable || verity, "{kind}: root writes {path:?}");
            if verity {
                let file = std::fs::File::open(&path).unwrap();
                let measured = cofolio_sys::verity::measure(file).unwrap();
                assert_eq!(measured, Some(verity::digest(piece).0), "{kind}: the kernel's digest");
            }
        }
        domain.remove_ref("a").unwrap();
        let report = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
        assert_eq!((report.objects, report.images, report.layers), (3, 1, 1));
        is_clean(&domain, &Lines);
    });
}

/// A file that was replaced by hand keeps its name and loses its flag: fsck says both.
#[test]
fn fsck_sees_content_that_lost_its_protection() {
    let scratch = Scratch::new("unprotected");
    let domain = scratch.store().domain("default").unwrap();
    if !domain.protection().immutable {
        println!("SKIP fsck_sees_content_that_lost_its_protection: no immutable flag here");
        return;
    }
    let pieces = put(&domain, "a", &[100]);
    let path = domain.object_path(&verity::digest(&pieces[0])).unwrap();
    run(Command::new("chattr").arg("-i").arg(&path)).unwrap();
    let report = domain.fsck(&Lines, FsckOptions::default(), &Task::default()).unwrap();
    assert_eq!(report.findings.len(), 1);
    assert_eq!(report.findings[0].kind, FindingKind::Unprotected);
    assert!(!report.is_damaged());
    domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
    is_clean(&domain, &Lines);

    // An import of the same file called it there already, and protected what somebody had altered.
    run(Command::new("chattr").arg("-i").arg(&path)).unwrap();
    // What has fs-verity cannot be written to, only replaced.
    std::fs::remove_file(&path).unwrap();
    let mut altered = pieces[0].clone();
    altered[7] ^= 1;
    std::fs::write(&path, altered).unwrap();
    let error = import(&domain, "b", &pieces, None, ImportOptions::default()).unwrap_err();
    assert!(matches!(&error, cofolio_store::Error::Corrupt { .. }), "{error}");
    assert!(domain.get_ref("b").unwrap().is_none());
}

/// Two imports that bring the same content protect it at once. With fs-verity ext4 told the one that came second that the
/// operation is not permitted, and the import failed with its content in place.
#[test]
fn many_may_protect_the_same_at_once() {
    on_each("many_may_protect_the_same_at_once", |kind, parent| {
        let scratch = Scratch::below(parent, "at-once");
        let domain = scratch.store().domain("default").unwrap();
        if !domain.protection().immutable {
            return println!("SKIP many_may_protect_the_same_at_once on {kind}: no immutable flag");
        }
        let pieces = put(&domain, "a", &[100, 200, 300, 400]);
        let paths: Vec<_> = pieces
            .iter()
            .map(|piece| domain.object_path(&verity::digest(piece)).unwrap())
            .collect();
        for _ in 0..5 {
            // On btrfs with fs-verity it cannot be cleared by hand.
            if run(Command::new("chattr").arg("-i").args(&paths)).is_err() {
                return println!("SKIP many_may_protect_the_same_at_once on {kind}: no chattr");
            }
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| domain.protect_all(&Task::default()).unwrap());
                }
            });
        }
        is_clean(&domain, &Lines);
    });
}

/// An import used to push everything else out of memory, for content that nobody was going to read soon. Sizes around
/// those where direct I/O begins, ends and is aligned: what is stored is what was given, wherever it went.
#[test]
fn large_content_goes_past_the_page_cache() {
    let test = "large_content_goes_past_the_page_cache";
    on_each(test, |kind, parent| {
        let scratch = Scratch::below(parent, "direct");
        let store = scratch.store();
        let domain = store.domain("default").unwrap();
        let page = usize::try_from(page_size()).unwrap();
        let sizes =
            [page - 1, 256 << 10, (256 << 10) + 1, 1 << 20, (1 << 20) + page, (5 << 20) + 17];
        let pieces: Vec<_> = sizes.iter().zip(1..).map(|(len, seed)| content(*len, seed)).collect();
        import(&domain, "a", &pieces, None, ImportOptions::default()).unwrap();
        let large = domain.object_path(&verity::digest(&pieces[5])).unwrap();
        let file = std::fs::File::open(&large).unwrap();
        let cached = cachestat(&file, 0, 0);
        for piece in &pieces {
            let path = domain.object_path(&verity::digest(piece)).unwrap();
            assert!(std::fs::read(&path).unwrap() == *piece, "{kind}: {} bytes", piece.len());
        }
        is_clean(&domain, &Lines);

        let probe = scratch.path.join("probe");
        let direct = rustix::fs::OFlags::DIRECT;
        let refused = std::fs::File::create(&probe)
            .and_then(|file| Ok(rustix::fs::fcntl_setfl(&file, direct)?))
            .is_err();
        std::fs::remove_file(&probe).unwrap();
        let is = |magic| rustix::fs::statfs(&scratch.path).unwrap().f_type == magic;
        match cached {
            _ if refused || is(TMPFS_MAGIC) => println!("SKIP {test} on {kind}: no direct I/O"),
            _ if domain.protection().verity => println!("SKIP {test} on {kind}: it has fs-verity"),
            // It takes what is summed for direct I/O and writes it through the cache.
            _ if is(BTRFS_SUPER_MAGIC) => println!("SKIP {test} on {kind}: it decides itself"),
            Err(error) => println!("SKIP {test} on {kind}: cachestat: {error}"),
            Ok(cached) => assert!(cached.cached <= 1, "{kind}: {} pages", cached.cached),
        }
    });
}

/// One process must not see from the page cache what another trust domain reads.
#[test]
fn two_domains_with_the_same_content_never_share_a_page() {
    let test = "two_domains_with_the_same_content_never_share_a_page";
    on_each(test, |kind, parent| {
        if rustix::fs::statfs(parent).unwrap().f_type == TMPFS_MAGIC {
            println!("SKIP {test} in the {kind}: tmpfs pages never leave memory");
            return;
        }
        let scratch = Scratch::below(parent, "domains");
        let store = scratch.store();
        let first = store.domain("default").unwrap();
        let second = store.domain_or_create("tenant-b").unwrap();
        let third = store.domain_or_create("tenant-c").unwrap();
        let sizes = [1 << 20, 3 << 20];
        let pieces = put(&first, "a", &sizes);
        put(&second, "a", &sizes);
        put(&third, "a", &sizes);
        assert_eq!(first.refs().unwrap()[0].1.image, second.refs().unwrap()[0].1.image);
        for piece in &pieces {
            let digest = verity::digest(piece);
            let files = [&first, &second, &third].map(|domain| {
                is_clean(domain, &Lines);
                let path = domain.object_path(&digest).unwrap();
                std::fs::File::open(path).unwrap()
            });
            let inodes = files.each_ref().map(|file| file.metadata().unwrap().ino());
            assert!(inodes[0] != inodes[1] && inodes[1] != inodes[2] && inodes[0] != inodes[2]);
            for file in &files {
                assert_eq!(file.metadata().unwrap().nlink(), 1);
                file.sync_all().unwrap();
                rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
            let len = piece.len() as u64;
            let maps = files.each_ref().map(|file| FileMap::new(file, len).unwrap());
            for map in &maps {
                assert_eq!(map.resident_pages().unwrap(), 0, "{kind}: a cold start");
            }
            let mut copy = vec![0; piece.len()];
            assert_eq!(maps[0].read_at(0, &mut copy), piece.len());
            assert!(copy == *piece);
            // With what the kernel has taken back since (DAMON does, with plenty of free memory).
            let evicted = cachestat(&files[0], 0, 0).map_or(0, |stat| stat.evicted);
            let read = maps[0].resident_pages().unwrap() + evicted;
            assert_eq!(read, len.div_ceil(page_size()));
            assert_eq!(
                maps[1].resident_pages().unwrap(),
                0,
                "{kind}: reading `default` warmed a copy"
            );
            assert_eq!(
                maps[2].resident_pages().unwrap(),
                0,
                "{kind}: reading `default` warmed another"
            );
        }
    });
}

/// An image brought a disk image of 20 GB with 300 MB in it; the store wrote 20 GB.
#[test]
fn holes_stay_holes() {
    on_each("holes_stay_holes", |kind, parent| {
        let scratch = Scratch::below(parent, "holes");
        let store = scratch.store();
        let domain = store.domain("default").unwrap();
        let staging = domain.begin_import(ImportOptions::default()).unwrap();
        let (head, tail) = (content(5000, 1), content(70_000, 2));
        let mut objects = Vec::new();
        // Holes in front, in the middle, at the end, nothing else; less than is kept in memory, and more.
        for (front, middle, end) in
            [(0, 100_000, 0), (1 << 20, 3 << 20, 50_001), (0, 10, 64 << 20), (200_000, 0, 0)]
        {
            let mut writer = staging.object_writer();
            writer.push_hole(front).unwrap();
            writer.push(&head).unwrap();
            writer.push_hole(middle).unwrap();
            writer.push(&tail).unwrap();
            writer.push_hole(end).unwrap();
            let zeros = [front, middle, end].map(|len| vec![0; usize::try_from(len).unwrap()]);
            let whole = [&zeros[0][..], &head, &zeros[1], &tail, &zeros[2]].concat();
            let stored = writer.finish().unwrap();
            assert_eq!((stored.digest, stored.new), (verity::digest(&whole), true), "{kind}");
            objects.push((stored.digest, stored.size, 100_000, Some(whole)));
        }
        let mut writer = staging.object_writer();
        writer.push_hole(20 << 20).unwrap();
        let stored = writer.finish().unwrap();
        objects.push((stored.digest, stored.size, 8192, Some(vec![0; 20 << 20])));
        // With fs-verity the kernel reads it all, and keeps 8 GiB of digests.
        if !domain.protection().verity {
            let mut writer = staging.object_writer();
            writer.push_hole(1 << 40).unwrap();
            writer.push(b"the end").unwrap();
            let stored = writer.finish().unwrap();
            objects.push((stored.digest, (1 << 40) + 7, 8192, None));
        }
        let named: Vec<_> = objects.iter().map(|object| (object.0, object.1)).collect();
        let image = common::image_of(&staging, &named);
        let publish = Publish::named("a", Ref::new(image));
        staging.commit(&publish, named).unwrap();

        // xfs allocates ahead of a writer, and keeps that if the file grows over it.
        let is_xfs = rustix::fs::statfs(parent).unwrap().f_type == XFS_SUPER_MAGIC;
        let slack = if is_xfs { 256 << 10 } else { 0 };
        {
            let domain = &domain;
            let mut most = 0;
            for (digest, size, allocated_max, content) in &objects {
                let path = domain.object_path(digest).unwrap();
                let meta = std::fs::metadata(&path).unwrap();
                assert_eq!(meta.len(), *size, "{kind}");
                let allocated = meta.blocks() * 512;
                // fs-verity keeps its digests behind the content.
                let allocated_max = allocated_max + slack + size.min(&(64 << 20)) / 100;
                assert!(allocated <= allocated_max, "{kind}: {allocated} bytes of {size}");
                most += allocated_max;
                if let Some(content) = content {
                    assert!(std::fs::read(&path).unwrap() == *content, "{kind}");
                }
            }
            is_clean(domain, &Lines);
            // Hours at this rate, if holes were read.
            let quick = ScrubOptions { images: None, rate: Some(100 << 20) };
            let scrubbed = domain.scrub(&Lines, &quick, &Task::default()).unwrap();
            assert_eq!((scrubbed.objects, scrubbed.findings), (objects.len() as u64, vec![]));
            let report = domain.verify_image(&image, &Lines, &Task::default()).unwrap();
            assert_eq!((report.objects, report.findings), (objects.len() as u64, vec![]));
            let usage = domain.du(&Lines, &Task::default()).unwrap();
            assert!(usage.images[0].bytes <= most, "{kind}: {usage:?}");
        }
        domain.remove_ref("a").unwrap();
        let report = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
        assert_eq!(report.objects, objects.len() as u64);
        assert!(report.object_bytes < 2 << 20, "{kind}: {report:?}");
    });
}

/// Zeros for which the filesystem keeps nothing are part of the content like all others.
#[test]
fn fsck_sees_what_became_of_a_hole() {
    let scratch = Scratch::new("hole-altered");
    let domain = scratch.store().domain("default").unwrap();
    let piece = [content(5000, 1), vec![0; 3 << 20], content(5000, 2)].concat();
    let options = ImportOptions::default();
    import(&domain, "a", std::slice::from_ref(&piece), None, options).unwrap();
    let path = domain.object_path(&verity::digest(&piece)).unwrap();
    let altered = |change: &dyn Fn(&std::fs::File)| {
        if domain.protection().immutable {
            run(Command::new("chattr").arg("-i").arg(&path)).unwrap();
        }
        change(&std::fs::OpenOptions::new().write(true).open(&path).unwrap());
        let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
        report.findings.iter().filter(|f| f.kind.is_damage()).map(|f| f.kind).collect::<Vec<_>>()
    };
    use std::os::unix::fs::FileExt;
    if domain.protection().verity {
        println!("SKIP fsck_sees_what_became_of_a_hole: fs-verity lets nobody alter it");
        return;
    }
    // Zeros instead of the hole are no damage, one byte in it is, and so is data that became a hole.
    assert_eq!(altered(&|file| file.write_all_at(&[0; 9000], 1 << 20).unwrap()), []);
    let found = altered(&|file| file.write_all_at(b"x", 2 << 20).unwrap());
    assert_eq!(found, [FindingKind::ObjectAltered]);
    let found = altered(&|file| {
        file.write_all_at(&[0], 2 << 20).unwrap();
        file.set_len(5000).unwrap();
        file.set_len(piece.len() as u64).unwrap();
    });
    assert_eq!(found, [FindingKind::ObjectAltered]);
}

/// A real filesystem that is really full.
#[test]
fn a_full_filesystem_says_how_much_was_missing() {
    let mount = match LoopMount::new("ext4") {
        Ok(mount) => mount,
        Err(reason) => {
            println!("SKIP a_full_filesystem_says_how_much_was_missing: {reason}");
            return;
        }
    };
    let scratch = Scratch::below(mount.directory(), "full");
    let store = Store::init(&scratch.path, &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    put(&domain, "before", &[5000]);
    let stat = rustix::fs::statvfs(mount.directory()).unwrap();
    let kept = stat.f_blocks * stat.f_frsize / 100;
    let before = stat.f_bfree * stat.f_frsize;
    let room = stat.f_bavail * stat.f_frsize - kept;
    let piece = 10 << 20;
    let number = room / piece + 4;
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let mut objects = Vec::new();
    for seed in 0..number {
        let mut writer = staging.object_writer();
        writer.write_all(&content(usize::try_from(piece).unwrap(), 100 + seed)).unwrap();
        let stored = writer.finish().unwrap();
        objects.push((stored.digest, stored.size));
    }
    assert!(staging.is_full());
    // Whoever else writes to this filesystem still can.
    let full = rustix::fs::statvfs(mount.directory()).unwrap();
    let left = full.f_bavail * full.f_frsize;
    assert!(left >= kept - (2 << 20), "{left} bytes are left, {kept} were to be kept");
    let image = common::image_of(&staging, &objects);
    let publish = Publish::named("big", Ref::new(image));
    match staging.commit(&publish, objects) {
        Err(cofolio_store::Error::NoSpace { missing }) => {
            println!("{missing} bytes missing of {}", number * piece);
            let short = number * piece - room;
            assert!(missing >= short && missing <= short + 2 * piece, "{missing} and not {short}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(domain.refs().unwrap().len(), 1);
    is_clean(&domain, &Lines);
    // ext4 counts room as free when its journal has been written.
    rustix::fs::syncfs(std::fs::File::open(mount.directory()).unwrap()).unwrap();
    let after = rustix::fs::statvfs(mount.directory()).unwrap();
    assert!(after.f_bfree * after.f_frsize + (1 << 20) > before, "the room is back");
    put(&domain, "after", &[6000]);
}

/// Where a directory does not say what its entries are, those of the store's own directory were looked for at the
/// root of the machine.
#[test]
fn a_filesystem_without_file_types_can_hold_a_store() {
    let scratch = Scratch::new("types");
    let volume = match Volume::new(&scratch.path, "ext4", 20, &["-O", "^filetype"]) {
        Ok(volume) => volume,
        Err(reason) => {
            return println!("SKIP a_filesystem_without_file_types_can_hold_a_store: {reason}");
        }
    };
    let store = Store::init(&volume.directory, &InitOptions::default()).unwrap();
    let domain = store.domain("default").unwrap();
    put(&domain, "a", &[100]);
    is_clean(&domain, &Lines);
}
