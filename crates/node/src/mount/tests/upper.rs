//! Where changes go, and what becomes of them.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::Command;

use rustix::io::Errno;

use super::crash::{start, task, was_killed};
use super::fixture::{Fixture, needs_mounts};
use super::*;
use crate::mount::upper::mark_kept;

const KEEP: UmountOptions = UmountOptions { force: false, keep_upper: true };

/// The changes of a mount with a size limit and no quotas were in a filesystem that ended with the
/// mount: `umount --keep` said where they were, and the directory was empty.
#[test]
fn changes_that_cannot_be_kept_stay_mounted() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = MountRequest { size_bytes: Some(8 << 20), ..writable(&fixture, "one") };
    match mounter.mount(&request) {
        Ok(_) => {}
        Err(error @ MountError::NoSizeLimit { .. }) => {
            return eprintln!("SKIP changes_that_cannot_be_kept_stay_mounted: {error}");
        }
        Err(error) => panic!("{error}"),
    }
    fs::write(request.target.join("new"), "new").unwrap();
    match mounter.umount(&request.target, &KEEP) {
        Err(error) => {
            assert!(matches!(error, MountError::CannotKeep { .. }), "{error}");
            assert_eq!(error.code(), Code::FailedPrecondition);
            assert_eq!(fs::read(request.target.join("new")).unwrap(), b"new");
            // Without changes, `umount --keep` said that it was done after umount(8).
            kernel::unmount_patiently(&request.target, false).unwrap();
            let error = mounter.umount(&request.target, &KEEP).unwrap_err();
            assert!(matches!(error, MountError::CannotKeep { .. }), "{error}");
            umount(&mounter, &request.target);
        }
        // With project quotas they are in a directory.
        Ok(unmounted) => {
            let dir = unmounted.upper.unwrap();
            assert_eq!(fs::read(dir.join("upper/new")).unwrap(), b"new");
            mounter.discard_kept(&dir).unwrap();
        }
    }
    fixture.assert_clean("at the end");
}

/// Of a file whose mode alone was changed, kept changes have no content. Garbage collection removed the
/// image that has it, and the file was zeros.
#[test]
fn kept_changes_keep_their_image() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    let (large, _) = fixture.files.iter().max_by_key(|(_, content)| content.len()).unwrap();
    fs::set_permissions(request.target.join(large), fs::Permissions::from_mode(0o640)).unwrap();
    let kept = mounter.umount(&request.target, &KEEP).unwrap().upper.unwrap();
    for (name, _) in fixture.domain.refs().unwrap() {
        fixture.domain.remove_ref(&name).unwrap();
    }
    assert_eq!(fixture.gc().images, 0);
    let access = Access::WritableAt(kept.clone());
    mounter.mount(&MountRequest { access, ..request.clone() }).unwrap();
    fixture.check_content(&request.target);
    umount(&mounter, &request.target);
    mounter.discard_kept(&kept).unwrap();
    assert_eq!(fixture.gc().images, 1);
}

/// A process that was killed between taking the mount away and writing its changes to the disk left a
/// mark of overlayfs, `volatile`, that no later mount got past.
#[test]
fn changes_kept_by_a_killed_process_are_mounted_again() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    for step in [Step::Detached, Step::UpperGone, Step::Unmarked, Step::Unrooted] {
        let request = writable(&fixture, "one");
        mounter.mount(&request).unwrap();
        fs::write(request.target.join("new"), "new").unwrap();
        let mut child = start(&task(&fixture, "one", "keep", Some(step), 0));
        assert!(was_killed(child.wait().unwrap()), "{step:?}");
        if step == Step::Detached {
            // And the next one while it removed the work directory: it said for ever after that
            // `work` is missing.
            let upper = mounter.list().unwrap().mounts.remove(0).record.upper.unwrap();
            fs::remove_dir_all(upper.dir.join("work/work")).unwrap();
            mounter.umount(&request.target, &KEEP).unwrap();
        }
        assert_eq!(mounter.reconcile().unwrap().failed, [""; 0], "{step:?}");
        let kept = mounter.list().unwrap().kept;
        let [kept] = &kept[..] else { panic!("{step:?}: {kept:?}") };
        assert_eq!((kept.image, &kept.target), (Some(fixture.image), &request.target));
        let access = Access::WritableAt(kept.dir.clone());
        mounter.mount(&MountRequest { access, ..request.clone() }).unwrap();
        assert_eq!(fs::read(request.target.join("new")).unwrap(), b"new", "{step:?}");
        assert!(mounter.list().unwrap().kept.is_empty(), "in use");
        let error = mounter.discard_kept(&kept.dir).unwrap_err();
        assert!(matches!(error, MountError::UpperInUse { .. }), "{error}");
        umount(&mounter, &request.target);
        mounter.discard_kept(&kept.dir).unwrap();
        fixture.assert_clean(&format!("{step:?}"));
    }
}

/// `rm` of kept changes looked whether a mount used them and then removed them, while a mount over them that
/// had their lock went on. Later it waited for the lock without limit, and so did a mount: any user who can
/// open the directory can lock it.
#[test]
fn kept_changes_are_not_discarded_while_a_mount_claims_them() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    let dir = mounter.umount(&request.target, &KEEP).unwrap().upper.unwrap();
    let claim = fs::File::open(&dir).unwrap();
    claim.lock_shared().unwrap();
    // The store's own waits are cancelled, so the test ends if one of them is used.
    let cancel = cofolio_store::task::Cancel::default();
    cancel.cancel();
    let store = Store::open(&fixture.path("store")).unwrap().waits_until(cancel);
    let domain = store.domain("default").unwrap();
    let other = Mounter::new(&domain, fixture.run_dir(), &fixture.known);
    let busy = |error| matches!(error, MountError::UpperInUse { dir: at, .. } if at == dir);
    assert!(busy(other.discard_kept(&dir).unwrap_err()));
    let access = Access::WritableAt(dir.clone());
    assert!(busy(other.mount(&MountRequest { access, ..request }).unwrap_err()));
    assert!(dir.exists());
    claim.unlock().unwrap();
    mounter.discard_kept(&dir).unwrap();
    fixture.assert_clean("at the end");
}

/// What looks whether changes are in use left its directory there: it removed it by the number of a descriptor
/// that was closed already, and by then could be another directory's. A FIFO in the place of `keep` was waited for.
#[test]
fn given_changes_are_left_as_they_should_be() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let access = Access::WritableAt(fixture.path("changes"));
    let request = MountRequest { access, ..read_only(&fixture, "one") };
    mounter.mount(&request).unwrap();
    umount(&mounter, &request.target);
    let mut left: Vec<_> = fs::read_dir(fixture.path("changes"))
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["keep", "upper", "work"]);
    let keep = fixture.path("changes/keep");
    fs::remove_file(&keep).unwrap();
    rustix::fs::mkfifoat(CWD, &keep, rustix::fs::Mode::RUSR).unwrap();
    let error = mounter.mount(&request).unwrap_err();
    assert!(matches!(error, MountError::State { .. }), "{error}");
}

/// A directory that was made for a mount is removed with it, unless a server would have to be asked
/// for it. A name that has left the kernel's cache counted as a server's: the directory stayed for
/// ever, and changes that the caller keeps elsewhere counted as in use.
#[test]
fn names_that_left_the_cache_are_read_from_a_block_device() {
    needs_mounts!();
    let test = "names_that_left_the_cache_are_read_from_a_block_device";
    let fixture = Fixture::new();
    let (disk, at) = (fixture.path("disk"), fixture.target("ext4"));
    fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    let ends_well = |command: &mut Command| {
        let done = command.output();
        done.map_err(|error| error.to_string()).and_then(|done| match done.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
        })
    };
    if let Err(error) = ends_well(Command::new("mkfs.ext4").arg("-q").arg(&disk)) {
        return eprintln!("SKIP {test}: mkfs.ext4 {error}");
    }
    let mount_disk = || ends_well(Command::new("mount").args(["-o", "loop"]).arg(&disk).arg(&at));
    if let Err(error) = mount_disk() {
        return eprintln!("SKIP {test}: {error}");
    }
    let mounter = fixture.mounter();
    let request = MountRequest {
        access: Access::WritableAt(at.join("changes")),
        create_target: true,
        ..MountRequest::new(fixture.image, at.join("made"))
    };
    let record = mounter.mount(&request).unwrap();
    kernel::unmount_patiently(&record.target, false).unwrap();
    // The cache of names goes with the superblock.
    kernel::unmount_patiently(&at, false).unwrap();
    mount_disk().unwrap();
    assert_eq!(open_cached(&record.target).unwrap_err(), Errno::AGAIN);
    let done = mounter.reconcile().unwrap();
    assert_eq!((done.mounts, done.failed), (vec![record.id], vec![]));
    assert!(!record.target.exists());
    assert!(at.join("changes/keep").exists());
    kernel::unmount_patiently(&at, false).unwrap();
    fixture.assert_clean("at the end");
}

/// The file `keep` was truncated and then written: a crash or a full disk between the two left an empty one.
/// Nobody could mount, list or remove these changes, or any image was accepted over them.
#[test]
fn the_mark_of_kept_changes_is_replaced_as_a_whole() {
    use std::io::Read as _;
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let access = Access::WritableAt(fixture.path("changes"));
    let request = |name| MountRequest { access: access.clone(), ..read_only(&fixture, name) };
    let keep = fixture.path("changes/keep");
    let mount = |name| {
        mounter.mount(&request(name)).unwrap();
        umount(&mounter, &request(name).target);
        fs::metadata(&keep).unwrap().ino()
    };
    let inode = mount("one");
    assert_eq!(mount("one"), inode, "it says this already");
    let (text, mut open) = (fs::read(&keep).unwrap(), fs::File::open(&keep).unwrap());
    mount("two");
    let mut old = Vec::new();
    open.read_to_end(&mut old).unwrap();
    assert_eq!(old, text, "written in place");
    assert_ne!(fs::read(&keep).unwrap(), text);
    assert!(!fixture.path("changes/keep.new").exists());
}

/// An empty `keep`, which earlier versions left: the changes were listed nowhere, `--discard` refused them,
/// and gc left them alone.
#[test]
fn changes_with_an_unreadable_mark_are_listed_and_discarded() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    for text in ["", "{\"target\":\"/x\",\"boot_id\":\"\"}"] {
        mounter.mount(&writable(&fixture, "one")).unwrap();
        let dir = mounter.umount(&fixture.path("one"), &KEEP).unwrap().upper.unwrap();
        fs::write(dir.join("keep"), text).unwrap();
        let kept = mounter.list().unwrap().kept;
        assert!(matches!(&kept[..], [KeptChanges { image: None, .. }]), "{kept:?}");
        let access = Access::WritableAt(dir.clone());
        mounter.mount(&MountRequest { access, ..writable(&fixture, "one") }).unwrap_err();
        mounter.discard_kept(&dir).unwrap();
        fixture.assert_clean("discarded");
    }
}

/// After a crash of the machine the changes may be torn: then the mark is right.
#[test]
fn changes_of_before_a_crash_are_not_mounted() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    let mut child = start(&task(&fixture, "one", "keep", Some(Step::Detached), 0));
    assert!(was_killed(child.wait().unwrap()));
    mounter.reconcile().unwrap();
    let kept = mounter.list().unwrap().kept.remove(0);
    let path = kept.dir.join("keep");
    let boot = Kernel::new(Path::new("/")).unwrap().boot_id;
    fs::write(&path, fs::read_to_string(&path).unwrap().replace(&boot, "another")).unwrap();
    let access = Access::WritableAt(kept.dir.clone());
    let error = mounter.mount(&MountRequest { access, ..request }).unwrap_err();
    assert!(error.to_string().contains("may be damaged"), "{error}");
    mounter.discard_kept(&kept.dir).unwrap();
    fixture.assert_clean("at the end");
}

/// Changes of one image were mounted over another, whose files they hid or mixed with.
#[test]
fn changes_of_another_image_are_refused() {
    needs_mounts!();
    let (fixture, dir) = (Fixture::over_base(), tempfile::tempdir().unwrap());
    let mounter = fixture.mounter();
    let access = Access::WritableAt(dir.path().join("changes"));
    let request = MountRequest { access, ..read_only(&fixture, "one") };
    mounter.mount(&request).unwrap();
    umount(&mounter, &request.target);
    let other = MountRequest { image: fixture.base(), ..request.clone() };
    let error = mounter.mount(&other).unwrap_err();
    assert!(error.to_string().contains("changes of another image"), "{error}");
    fixture.assert_clean("refused");
    mounter.mount(&request).unwrap();
    umount(&mounter, &request.target);
}

/// The owner of DIR put links to other directories in the places of its `upper` and `work`, and root
/// wrote and mounted there.
#[test]
fn planted_links_are_not_followed() {
    needs_mounts!();
    for name in ["upper", "work"] {
        let fixture = Fixture::new();
        let (dir, aim) = (fixture.target("dir"), fixture.target("aim"));
        symlink(&aim, dir.join(name)).unwrap();
        let request =
            MountRequest { access: Access::WritableAt(dir.clone()), ..read_only(&fixture, "one") };
        let error = fixture.mounter().mount(&request).unwrap_err();
        assert!(matches!(error, MountError::Upper { .. }), "{error:?}");
        assert_eq!(fs::read_dir(&aim).unwrap().count(), 0);
        assert_eq!(fs::metadata(&aim).unwrap().mode() & 0o7777, 0o755);
        fixture.assert_clean(name);

        // Whoever may change the directory could do so a moment later.
        fs::remove_file(dir.join(name)).unwrap();
        chown(&dir, Some(1000), None).unwrap();
        let error = fixture.mounter().mount(&request).unwrap_err();
        assert!(error.to_string().contains("another user"), "{error}");
        fixture.assert_clean("of another user");

        // Only the bit for all others was looked at.
        chown(&dir, Some(0), None).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o775)).unwrap();
        let error = fixture.mounter().mount(&request).unwrap_err();
        assert!(error.to_string().contains("other users can write to it"), "{error}");
    }
}

/// Each id map and label has an overlay of its own, and all stayed until the image was idle: a
/// thousand containers with an id map each left a thousand superblocks.
#[test]
fn overlays_of_id_maps_that_nobody_uses_are_few() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let first = read_only(&fixture, "first");
    mounter.mount(&first).unwrap();
    for number in 1..12 {
        let idmap = format!("0:{}:65536", number * 65536).parse().unwrap();
        let request = MountRequest { options: with_ids(&idmap), ..read_only(&fixture, "mapped") };
        mounter.mount(&request).unwrap();
        umount(&mounter, &request.target);
    }
    let below = fixture.path("run/images");
    let mut views = fixture.mounts();
    views.retain(|mount| mount.filesystem == "overlay" && mount.target.starts_with(&below));
    assert_eq!(views.len(), 8, "{views:?}");
    fixture.check_content(&first.target);
    assert!(mounter.reconcile().unwrap().is_empty());
    umount(&mounter, &first.target);
    fixture.assert_clean("at the end");
}

/// `umount --keep` of a mount that was in use refused, and had already marked the changes to be kept: the next plain
/// `umount` left them in the store without a word.
#[test]
fn a_refused_keep_keeps_nothing() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    let used = fs::File::create(request.target.join("used")).unwrap();
    assert!(matches!(mounter.umount(&request.target, &KEEP), Err(MountError::Busy { .. })));
    drop(used);
    let unmounted = mounter.umount(&request.target, &UmountOptions::default()).unwrap();
    assert_eq!(unmounted.upper, None);
    fixture.assert_clean("at the end");
}

/// An `umount --keep` that was killed left its mark and the mount. The next plain `umount` kept the
/// changes because of the mark, and did not say where.
#[test]
fn changes_that_a_killed_unmount_should_keep_are_named() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let record = mounter.mount(&writable(&fixture, "one")).unwrap();
    let dir = record.upper.clone().unwrap().dir;
    mark_kept(&open_dir(&dir).unwrap(), &record).unwrap();
    let unmounted = mounter.umount(&record.target, &UmountOptions::default()).unwrap();
    assert_eq!(unmounted.upper.as_ref(), Some(&dir));
    mounter.discard_kept(&dir).unwrap();
    fixture.assert_clean("at the end");
}

/// A store on a filesystem that is mounted read-only has nowhere for a root, and could not be mounted.
#[test]
fn a_read_only_store_can_be_mounted_from() {
    needs_mounts!();
    let fixture = Fixture::new();
    let store = fixture.path("store");
    rustix::mount::mount_bind(&store, &store).unwrap();
    let flags = rustix::mount::MountFlags::BIND | rustix::mount::MountFlags::RDONLY;
    rustix::mount::mount_remount(&store, flags, "").unwrap();
    let opened = Store::open(&store).unwrap();
    let domain = opened.domain("default").unwrap();
    let mounter = Mounter::new(&domain, fixture.run_dir(), &fixture.known);
    let request = read_only(&fixture, "one");
    mounter.mount(&request).unwrap();
    fixture.check_content(&request.target);
    // It was found out by trying, which a read-only filesystem refuses: each object was looked at.
    let is_protected = fixture.domain.protection().immutable;
    let pinned = mounter.pins().unwrap().remove(0).record.unwrap();
    assert!(!is_protected || pinned.objects_checked == 0, "{pinned:?}");
    assert!(mounter.umount(&request.target, &UmountOptions::default()).unwrap().unpinned);
    let written = MountRequest { access: Access::Writable, ..request };
    let refused = mounter.mount(&written).unwrap_err();
    assert!(matches!(refused, MountError::ReadOnlyStore(_)), "{refused}");
    assert_eq!(mounter.pins().unwrap().len(), 0);
    drop((domain, opened));
    kernel::unmount_patiently(&store, false).unwrap();
    fixture.assert_clean("at the end");
}

/// An unmount that died after the target had gone left the image mounted, without a record by which
/// `umount` could have found it.
#[test]
fn an_unmount_that_died_late_can_be_repeated() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    for step in [Step::Detached, Step::UpperGone, Step::Unmarked, Step::Unpinned, Step::Unrooted] {
        let request = read_only(&fixture, "one");
        mounter.mount(&request).unwrap();
        let mut child = start(&task(&fixture, "one", "leave", Some(step), 0));
        assert!(was_killed(child.wait().unwrap()), "{step:?}");
        assert!(umount(&mounter, &request.target).was_gone, "{step:?}");
        fixture.assert_clean(&format!("{step:?}"));
    }
}

/// `mounts` showed the old place of a mount that was moved, and `umount` knew only that one.
#[test]
fn a_mount_that_was_moved_is_found_where_it_is() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let parent = fixture.target("parent");
    let request = MountRequest {
        options: MountOptions { name: Some("test:1".to_owned()), ..MountOptions::default() },
        ..MountRequest::new(fixture.image, fixture.target("parent/one"))
    };
    mounter.mount(&request).unwrap();
    fs::rename(&parent, fixture.path("renamed")).unwrap();
    let moved = fixture.path("renamed/one");
    let listed = mounter.list().unwrap();
    assert_eq!(listed.mounts[0].moved_to.as_ref(), Some(&moved));
    assert_eq!(listed.mounts[0].record.options.name.as_deref(), Some("test:1"));
    umount(&mounter, &moved);
    fixture.assert_clean("at the end");
}

/// A bind mount showed the store at another path: changes of a live mount were listed as kept, and `gc` removed
/// the directory of a container's volumes.
#[test]
fn a_bind_mount_of_the_store_shows_what_is_used() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let access = Access::WritableKept;
    let request = MountRequest { access, scratch: true, ..read_only(&fixture, "one") };
    let record = mounter.mount(&request).unwrap();
    let (dir, scratch) = (record.upper.unwrap().dir, record.scratch.unwrap());
    let bound = fixture.target("bound");
    rustix::mount::mount_bind(fixture.path("store"), &bound).unwrap();
    let store = Store::open(&bound).unwrap();
    let domain = store.domain("default").unwrap();
    let other = Mounter::new(&domain, fixture.run_dir(), &fixture.known);
    assert_eq!(other.list().unwrap().kept, []);
    let there = bound.join("domains/default/writable").join(dir.file_name().unwrap());
    assert!(there.exists());
    other.discard_kept(&there).unwrap_err();
    assert!(other.reconcile().unwrap().is_empty());
    assert!(scratch.exists());
    umount(&mounter, &request.target);
    assert_eq!(other.list().unwrap().kept.len(), 1);
    other.discard_kept(&there).unwrap();
    drop((domain, store));
    kernel::unmount_patiently(&bound, false).unwrap();
    fixture.assert_clean("at the end");
}

/// Something was mounted in a directory of changes. The unmount deleted the files in it, which were others'.
#[test]
fn what_is_mounted_among_changes_stays() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let record = mounter.mount(&writable(&fixture, "one")).unwrap();
    let (precious, sub) = (fixture.target("precious"), "upper/sub/deep");
    fs::write(precious.join("file"), "important").unwrap();
    let dir = record.upper.unwrap().dir;
    fs::create_dir_all(dir.join(sub)).unwrap();
    rustix::mount::mount_bind(&precious, dir.join(sub)).unwrap();
    umount(&mounter, &record.target);
    assert!(precious.join("file").exists());
    // Out of sight, and each cleaning up says why it stays.
    let gone = fixture.mounts().pop().unwrap().target;
    assert!(gone.ends_with(sub), "{}", gone.display());
    let failed = mounter.reconcile().unwrap().failed;
    assert!(failed.len() == 1 && failed[0].contains("gone-"), "{failed:?}");
    assert!(precious.join("file").exists());
    kernel::unmount_patiently(&gone, false).unwrap();
    mounter.reconcile().unwrap();
    fixture.assert_clean("at the end");
}

/// A record has the path that the store had. In a store that had been moved, the mark to keep changes was
/// looked for at that path, and the changes were removed where they were now.
#[test]
fn a_store_that_was_moved_keeps_what_is_to_stay() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let [marked, late] = ["one", "two"].map(|name| {
        let record = mounter.mount(&writable(&fixture, name)).unwrap();
        fs::write(record.target.join("new"), "new").unwrap();
        kernel::unmount_patiently(&record.target, false).unwrap();
        record
    });
    // An `umount --keep` that was killed leaves this.
    mark_kept(&open_dir(&marked.upper.as_ref().unwrap().dir).unwrap(), &marked).unwrap();
    let moved = fixture.path("moved");
    fs::rename(fixture.path("store"), &moved).unwrap();
    let store = Store::open(&moved).unwrap();
    let domain = store.domain("default").unwrap();
    let other = Mounter::new(&domain, fixture.run_dir(), &fixture.known);
    let dir = other.umount(&late.target, &KEEP).unwrap().upper.unwrap();
    assert!(dir.starts_with(&moved), "{}", dir.display());
    assert_eq!(other.reconcile().unwrap().failed, [""; 0]);
    let kept = other.kept().unwrap();
    assert_eq!(kept.len(), 2);
    for (_, kept) in kept {
        assert_eq!(fs::read(kept.dir.join("upper/new")).unwrap(), b"new");
        other.discard_kept(&kept.dir).unwrap();
    }
    drop((domain, store));
    fs::rename(&moved, fixture.path("store")).unwrap();
    fixture.assert_clean("at the end");
}

/// A record in a run directory that others could write to named a directory of root's as its changes, and
/// `gc` removed it.
#[test]
fn a_record_removes_no_directory_of_others() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = MountRequest { scratch: true, ..writable(&fixture, "one") };
    let record = mounter.mount(&request).unwrap();
    let path = fixture.path(&format!("run/mounts/{}.json", record.id));
    let (dir, scratch) = (record.upper.clone().unwrap().dir, record.scratch.clone().unwrap());
    let victims = ["upper", "scratch"].map(|name| fixture.path("victim").join(name));
    for (victim, own) in victims.iter().zip([&dir, &scratch]) {
        fs::create_dir_all(victim.join("upper")).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace(own.to_str().unwrap(), victim.to_str().unwrap())).unwrap();
    }
    umount(&mounter, &request.target);
    assert!(victims.iter().all(|victim| victim.join("upper").exists()));
    // The mount's own directories have no record now, and go like all others without one.
    mounter.reconcile().unwrap();
    assert!(!dir.exists() && !scratch.exists());
    fixture.assert_clean("at the end");
}

/// What a profile says of a container's writes.
#[test]
fn written_directories_are_those_that_changed() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    type Case = (&'static [&'static str], fn(&Path));
    let cases: [Case; 6] = [
        (&[], |_| {}),
        (&["/sub"], |root| fs::write(root.join("sub/new"), "").unwrap()),
        (&["/sub"], |root| fs::remove_file(root.join("sub/file0")).unwrap()),
        (&["/sub"], |root| {
            fs::set_permissions(root.join("sub"), fs::Permissions::from_mode(0o700)).unwrap();
        }),
        (&["/"], |root| {
            fs::write(root.join("sub/new"), "").unwrap();
            fs::write(root.join("new"), "").unwrap();
        }),
        (&["/"], |root| fs::rename(root.join("sub"), root.join("other")).unwrap()),
    ];
    for (number, (expected, change)) in cases.into_iter().enumerate() {
        let request = writable(&fixture, "one");
        let record = mounter.mount(&request).unwrap();
        change(&request.target);
        let found = crate::profile::written_dirs(&record.upper.unwrap().dir.join("upper"));
        let expected: Vec<_> = expected.iter().map(PathBuf::from).collect();
        assert_eq!(found.unwrap(), expected, "case {number}");
        umount(&mounter, &request.target);
    }
}
