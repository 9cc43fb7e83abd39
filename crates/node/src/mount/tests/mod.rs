mod crash;
pub(crate) mod fixture;
mod in_use;
mod measured;
mod refusals;
mod sparse;
mod upper;
mod verified;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use cofolio_store::Store;
use rustix::fs::CWD;

use super::kernel::LayerStyle;
use super::mountinfo::source_of;
use super::*;
use fixture::{Fixture, needs_mounts};

fn read_only(fixture: &Fixture, name: &str) -> MountRequest {
    MountRequest::new(fixture.image, fixture.target(name))
}

fn writable(fixture: &Fixture, name: &str) -> MountRequest {
    MountRequest { access: Access::Writable, ..read_only(fixture, name) }
}

fn with_ids(idmap: &IdMap) -> MountOptions {
    MountOptions { idmap: Some(idmap.clone()), ..MountOptions::default() }
}

fn umount(mounter: &Mounter<'_>, target: &Path) -> Unmounted {
    mounter.umount(target, &UmountOptions::default()).unwrap()
}

/// Targets of mounts without a record, those of other users of this machine apart.
fn orphans(fixture: &Fixture) -> Vec<PathBuf> {
    let orphans = fixture.mounter().list().unwrap().orphans;
    let base = fixture.path("");
    orphans.into_iter().map(|m| m.target).filter(|target| target.starts_with(&base)).collect()
}

#[test]
fn read_only_mounts_are_clones_of_one_overlay_over_one_erofs() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let (one, two) = (read_only(&fixture, "one"), read_only(&fixture, "two"));
    let record = mounter.mount(&one).unwrap();
    assert_eq!(record.phase, MountPhase::Mounted);
    mounter.mount(&two).unwrap();
    fixture.check_content(&one.target);
    fixture.check_content(&two.target);
    let dev = |path: &Path| fs::metadata(path).unwrap().dev();
    assert_eq!(dev(&one.target), dev(&two.target), "one superblock");
    let error = fs::write(one.target.join("new"), "x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);

    let source = source_of(&fixture.image);
    let mounts = fixture.mounts();
    let count = |kind| mounts.iter().filter(|m| m.filesystem == kind && m.source == source).count();
    assert_eq!((count("erofs"), count("overlay")), (1, 3), "{mounts:?}");
    assert!(matches!(mounter.pins().unwrap()[..], [Pin { users: 2, .. }]));
    let listed = mounter.list().unwrap();
    assert!(listed.mounts.iter().all(|mount| mount.state == MountState::Live), "{listed:?}");
    assert_eq!(listed.mounts.len(), 2);
    assert!(orphans(&fixture).is_empty());

    // A reader of one is not disturbed by the other's going.
    let open = fs::File::open(two.target.join("sub/file3")).unwrap();
    assert!(!umount(&mounter, &one.target).unpinned);
    fixture.check_content(&two.target);
    drop(open);
    // By id as well as by target.
    let id = mounter.list().unwrap().mounts[0].record.id.clone();
    assert!(umount(&mounter, Path::new(&id)).unpinned);
    fixture.assert_clean("after the last unmount");
}

#[test]
fn changes_of_writable_mounts_are_their_own_and_go_with_them() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let (one, two) = (writable(&fixture, "one"), writable(&fixture, "two"));
    let upper = mounter.mount(&one).unwrap().upper.unwrap().dir;
    mounter.mount(&two).unwrap();
    let root = fs::metadata(&one.target).unwrap();
    assert_eq!((root.uid(), root.gid(), root.mode()), (7, 8, 0o040_751), "the image's root");
    assert_eq!((root.mtime(), root.mtime_nsec()), (1_700_000_000, 5));
    let mut value = [0u8; 64];
    let length = rustix::fs::getxattr(&one.target, "user.kind", &mut value[..]).unwrap();
    assert_eq!(&value[..length], b"image root");

    fixture.check_content(&one.target);
    fs::write(one.target.join("sub/file1"), "changed").unwrap();
    fs::remove_file(one.target.join("sub/file2")).unwrap();
    fs::rename(one.target.join("sub"), one.target.join("moved")).unwrap();
    assert_eq!(fs::read(one.target.join("moved/file1")).unwrap(), b"changed");
    assert_eq!(fs::read(one.target.join("moved/file3")).unwrap(), fixture.files[3].1);
    assert!(!one.target.join("moved/file2").exists());
    fixture.check_content(&two.target);
    let erofs = fixture.mounts().iter().filter(|m| m.filesystem == "erofs").count();
    assert_eq!(erofs, 1, "both build on one EROFS superblock");
    let mode = fs::metadata(upper.parent().unwrap()).unwrap().mode();
    assert_eq!(mode & 0o777, 0o700, "no host user can reach what a container wrote");

    assert_eq!(umount(&mounter, &one.target).upper, None);
    assert!(!upper.exists());
    umount(&mounter, &two.target);
    fixture.assert_clean("after both unmounts");
}

#[test]
fn changes_can_be_kept_and_mounted_again() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let mut request = MountRequest { access: Access::WritableKept, ..read_only(&fixture, "one") };
    mounter.mount(&request).unwrap();
    fs::write(request.target.join("new"), "kept").unwrap();
    let dir = umount(&mounter, &request.target).upper.unwrap();
    assert!(mounter.reconcile().unwrap().is_empty(), "what is kept is no leftover");
    request.access = Access::WritableAt(dir.clone());
    mounter.mount(&request).unwrap();
    assert_eq!(fs::read(request.target.join("new")).unwrap(), b"kept");
    // One directory under two mounts would be torn: the kernel only warns.
    let other = MountRequest { access: request.access.clone(), ..read_only(&fixture, "two") };
    let error = mounter.mount(&other).unwrap_err();
    assert!(matches!(error, MountError::UpperInUse { .. }), "{error}");
    assert_eq!(error.code(), Code::Busy);
    assert_eq!(umount(&mounter, &request.target).upper.as_ref(), Some(&dir));
    fs::remove_dir_all(dir).unwrap();

    // Decided at the end only.
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    fs::write(request.target.join("new"), "late").unwrap();
    let options = UmountOptions { keep_upper: true, ..UmountOptions::default() };
    let dir = mounter.umount(&request.target, &options).unwrap().upper.unwrap();
    assert!(mounter.reconcile().unwrap().is_empty());
    let request = MountRequest { access: Access::WritableAt(dir.clone()), ..request };
    mounter.mount(&request).unwrap();
    assert_eq!(fs::read(request.target.join("new")).unwrap(), b"late");
    umount(&mounter, &request.target);
    fs::remove_dir_all(dir).unwrap();
    fixture.assert_clean("at the end");
}

/// What an image has in common with its base is one superblock for both, and nothing of the base shows that the image has not.
#[test]
fn an_image_is_mounted_over_its_base() {
    needs_mounts!();
    let fixture = Fixture::over_base();
    let mounter = fixture.mounter();
    let (one, two) = (read_only(&fixture, "one"), writable(&fixture, "two"));
    let below = MountRequest { image: fixture.base(), ..read_only(&fixture, "below") };
    for request in [&one, &two] {
        mounter.mount(request).unwrap();
        fixture.check_content(&request.target);
        assert!(!request.target.join("sub/gone").exists());
    }
    mounter.mount(&below).unwrap();
    assert_eq!(fs::read(below.target.join("sub/gone")).unwrap(), b"not in the image");
    let erofs = || fixture.mounts().iter().filter(|m| m.filesystem == "erofs").count();
    assert_eq!(erofs(), 2, "one of the base and one of the delta");
    let pins = mounter.pins().unwrap();
    let pin = |image| pins.iter().find(|pin| pin.image == image).unwrap();
    assert_eq!(pin(fixture.image).record.as_ref().unwrap().base, Some(fixture.base()));
    assert_eq!((pin(fixture.image).users, pin(fixture.base()).users), (2, 2));

    // What is written over it goes to the upper, wherever the file was.
    fs::write(two.target.join("sub/file3"), "changed").unwrap();
    fs::write(two.target.join("sub/file11"), "changed").unwrap();
    fs::remove_file(two.target.join("sub/file4")).unwrap();
    fs::write(two.target.join("sub/gone"), "new").unwrap();
    assert_eq!(fs::read(two.target.join("sub/file3")).unwrap(), b"changed");
    assert!(!two.target.join("sub/file4").exists());
    fixture.check_content(&one.target);

    // The base stays as long as the image does, and goes with it.
    assert!(!umount(&mounter, &below.target).unpinned);
    umount(&mounter, &two.target);
    assert_eq!(erofs(), 2);
    fixture.check_content(&one.target);
    assert!(mounter.reconcile().unwrap().is_empty(), "everything is as it should be");
    assert!(umount(&mounter, &one.target).unpinned);
    fixture.assert_clean("after the last unmount");
}

/// A base is derived: whatever is wrong with it costs memory and nothing else.
#[test]
fn an_image_whose_base_is_damaged_is_mounted_without() {
    needs_mounts!();
    for damaged in ["base", "delta", "both gone", "record"] {
        let fixture = Fixture::over_base();
        let mounter = fixture.mounter();
        let found = fixture.domain.base_of(&fixture.image).unwrap().unwrap();
        let file = |image: &Digest| fixture.domain.image_path(image).unwrap();
        let alter = |path: PathBuf| {
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
            fs::write(&path, bytes).unwrap();
        };
        match damaged {
            "base" => alter(file(&found.base)),
            "delta" => alter(file(&found.delta)),
            "record" => {
                let records = file(&found.base).parent().unwrap().with_file_name("bases");
                fs::write(records.join(fixture.image.to_string()), "{\"base\": 7").unwrap();
            }
            _ => {
                fs::remove_file(file(&found.base)).unwrap();
                fs::remove_file(file(&found.delta)).unwrap();
            }
        }
        let request = read_only(&fixture, "one");
        mounter.mount(&request).unwrap_or_else(|error| panic!("{damaged}: {error}"));
        fixture.check_content(&request.target);
        assert!(!request.target.join("sub/gone").exists());
        let erofs = fixture.mounts().iter().filter(|m| m.filesystem == "erofs").count();
        assert_eq!(erofs, 1, "{damaged}");
        assert!(umount(&mounter, &request.target).unpinned);
        let measured = MountRequest { check: Check::Measure, ..request };
        mounter.mount(&measured).unwrap_or_else(|error| panic!("{damaged}: {error}"));
        fixture.check_content(&measured.target);
        assert!(umount(&mounter, &measured.target).unpinned);
        fixture.assert_clean(damaged);
    }
}

#[test]
fn owners_are_mapped() {
    needs_mounts!();
    owners_of(&Fixture::new());
    owners_of(&Fixture::over_base());
}

fn owners_of(fixture: &Fixture) {
    let mounter = fixture.mounter();
    let idmap: IdMap = "u:0:100000:65536,g:0:200000:65536".parse().unwrap();
    let plain = read_only(fixture, "plain");
    let mapped = MountRequest { options: with_ids(&idmap), ..read_only(fixture, "mapped") };
    let changed = MountRequest { options: with_ids(&idmap), ..writable(fixture, "changed") };
    for request in [&plain, &mapped, &changed] {
        mounter.mount(request).unwrap();
        fixture.check_content(&request.target);
    }
    let owner = |path: &Path| {
        let metadata = fs::symlink_metadata(path).unwrap();
        (metadata.uid(), metadata.gid())
    };
    for below in ["", "sub", "sub/file1"] {
        assert_eq!(owner(&plain.target.join(below)), (7, 8));
        assert_eq!(owner(&mapped.target.join(below)), (100_007, 200_008));
        assert_eq!(owner(&changed.target.join(below)), (100_007, 200_008));
    }
    // Copied up, the owner stays what it was, and new files get what they are given.
    let file = changed.target.join("sub/file1");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(owner(&file), (100_007, 200_008));
    fs::write(changed.target.join("new"), "x").unwrap();
    chown(changed.target.join("new"), Some(100_001), Some(200_001)).unwrap();
    assert_eq!(owner(&changed.target.join("new")), (100_001, 200_001));
    // Two views and one EROFS superblock, and that of the base; the id-mapped copies of them are attached nowhere.
    let erofs = fixture.mounts().iter().filter(|m| m.filesystem == "erofs").count();
    let base = fixture.domain.base_of(&fixture.image).unwrap();
    assert_eq!(erofs, 1 + usize::from(base.is_some()));
    for request in [&plain, &mapped, &changed] {
        umount(&mounter, &request.target);
    }
    fixture.assert_clean("at the end");
}

#[test]
fn attributes_of_a_mount_are_its_own() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "plain");
    let strict = |name| MountRequest {
        options: MountOptions {
            nosuid: true,
            nodev: true,
            noexec: true,
            ..MountOptions::default()
        },
        ..read_only(&fixture, name)
    };
    let (read, write) =
        (strict("strict"), MountRequest { access: Access::Writable, ..strict("write") });
    for request in [&plain, &read, &write] {
        mounter.mount(request).unwrap();
    }
    use rustix::fs::StatVfsMountFlags as Flags;
    let all = Flags::NOSUID | Flags::NODEV | Flags::NOEXEC;
    let flags = |path: &Path| rustix::fs::statvfs(path).unwrap().f_flag;
    assert!(flags(&plain.target).contains(Flags::RDONLY));
    assert!(!flags(&plain.target).intersects(all));
    assert!(flags(&read.target).contains(all | Flags::RDONLY));
    assert!(flags(&write.target).contains(all) && !flags(&write.target).contains(Flags::RDONLY));
}

/// What older kernels need also works on newer ones, so that it is tested here.
#[test]
fn every_way_to_name_layers_works() {
    needs_mounts!();
    let fixture = Fixture::new();
    for style in LayerStyle::ALL {
        let mut mounter = fixture.mounter();
        mounter.styles = vec![style];
        for request in [read_only(&fixture, "read"), writable(&fixture, "write")] {
            mounter.mount(&request).unwrap();
            fixture.check_content(&request.target);
        }
        fs::write(fixture.path("write/sub/file1"), "changed").unwrap();
        umount(&mounter, &fixture.path("read"));
        umount(&mounter, &fixture.path("write"));
        fixture.assert_clean(&format!("{style:?}"));
    }
}

#[test]
fn a_loop_device_serves_where_files_cannot() {
    needs_mounts!();
    if !Path::new("/dev/loop-control").exists() {
        eprintln!("SKIP a_loop_device_serves_where_files_cannot: no /dev/loop-control");
        return;
    }
    let fixture = Fixture::new();
    let mounter = fixture.mounter().with_loop_devices();
    let request = read_only(&fixture, "one");
    mounter.mount(&request).unwrap();
    fixture.check_content(&request.target);
    let pin = mounter.pins().unwrap().remove(0);
    assert_eq!(pin.record.unwrap().backing, Backing::Loop);
    let mount = fixture.mounts().into_iter().find(|m| m.filesystem == "erofs").unwrap();
    assert_eq!(mount.source, source_of(&fixture.image), "telling, although it is a device");
    umount(&mounter, &request.target);
    fixture.assert_clean("at the end");
    // The device went with its mount. Freeing is asynchronous.
    let is_attached = || {
        let name = fixture.image.to_string();
        list_loop_files().iter().any(|file| file.contains(&name[..40]))
    };
    let gone = (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        !is_attached()
    });
    assert!(gone, "the loop device is still there");
}

/// The backing files of all loop devices, as sysfs shows them.
fn list_loop_files() -> Vec<String> {
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    devices.filter_map(|d| fs::read_to_string(d.path().join("loop/backing_file")).ok()).collect()
}

/// Where the run directory is shared, so is the overlay in it. If a container's mount joined that peer
/// group, what one container mounts in its root would appear in all others.
#[test]
fn what_is_mounted_inside_one_container_is_not_seen_in_another() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let run = fixture.target("run");
    rustix::mount::mount_bind(&run, &run).unwrap();
    let flags = rustix::mount::MountPropagationFlags::SHARED;
    rustix::mount::mount_change(&run, flags).unwrap();
    let (one, two) = (read_only(&fixture, "one"), read_only(&fixture, "two"));
    mounter.mount(&one).unwrap();
    mounter.mount(&two).unwrap();
    let inside = one.target.join("sub");
    rustix::mount::mount("tmpfs", &inside, "tmpfs", rustix::mount::MountFlags::empty(), None)
        .unwrap();
    assert_eq!(fs::read_dir(&inside).unwrap().count(), 0);
    fixture.check_content(&two.target);
    let view = fixture.run_dir().image_dir("default", &fixture.image).join("views/plain");
    fixture.check_content(&view);
    // Busy because of that mount, and says so.
    let error = mounter.umount(&one.target, &UmountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::Busy { .. }), "{error}");
    fs::metadata(&one.target).unwrap();
    let force = UmountOptions { force: true, ..UmountOptions::default() };
    mounter.umount(&one.target, &force).unwrap();
    umount(&mounter, &two.target);
    kernel::unmount(&run, false).unwrap();
    fixture.assert_clean("at the end");
}

/// Two stores with one image, as two services on a machine have them. Each listed the other's mounts as
/// mounts without a record, and said how to unmount them: later only where the run directories did not lie
/// side by side.
#[test]
fn mounts_of_another_store_are_not_ours_without_a_record() {
    needs_mounts!();
    let (fixture, other) = (Fixture::new(), Fixture::new());
    assert_eq!(fixture.image, other.image);
    let (mounter, others) = (fixture.mounter(), other.mounter());
    let request = read_only(&other, "theirs");
    others.mount(&request).unwrap();
    let orphans = |mounter: &Mounter<'_>| {
        let mut orphans = mounter.list().unwrap().orphans;
        orphans.retain(|m| {
            m.target.starts_with(other.path("")) || m.target.starts_with(fixture.path(""))
        });
        orphans.into_iter().map(|m| m.target).collect::<Vec<_>>()
    };
    assert_eq!(orphans(&mounter), Vec::<PathBuf>::new());
    let written = writable(&other, "written");
    others.mount(&written).unwrap();
    assert_eq!(orphans(&mounter), Vec::<PathBuf>::new());
    let bound = other.target("bound");
    rustix::mount::mount_bind(&request.target, &bound).unwrap();
    assert_eq!(orphans(&mounter), Vec::<PathBuf>::new());
    assert_eq!(orphans(&others), std::slice::from_ref(&bound));
    kernel::unmount_patiently(&bound, false).unwrap();
    umount(&others, &request.target);
    // Their records were lost. An id-mapped one, whose layer has no path, was listed by nobody then.
    let idmap: IdMap = "0:100000:65536".parse().unwrap();
    let mapped = MountRequest { options: with_ids(&idmap), ..writable(&other, "mapped") };
    others.mount(&mapped).unwrap();
    for target in [&written.target, &mapped.target] {
        let record = format!("run/mounts/{}.json", others.run.id_of(target));
        let aside = other.path("aside");
        fs::rename(other.path(&record), &aside).unwrap();
        assert_eq!(orphans(&others), std::slice::from_ref(target));
        assert_eq!(orphans(&mounter), Vec::<PathBuf>::new());
        fs::rename(&aside, other.path(&record)).unwrap();
        umount(&others, target);
    }
}

/// Where `/` is shared, as systemd has it, every service's mount namespace gets what is mounted in the
/// run directory. Here a bind stands for such a namespace.
#[test]
fn peers_of_the_run_directory_lose_what_is_unmounted() {
    needs_mounts!();
    let fixture = Fixture::new();
    let (shared, peer) = (fixture.target("shared"), fixture.target("peer"));
    rustix::mount::mount_bind(&shared, &shared).unwrap();
    let flags = rustix::mount::MountPropagationFlags::SHARED;
    rustix::mount::mount_change(&shared, flags).unwrap();
    rustix::mount::mount_bind(&shared, &peer).unwrap();
    let mounter =
        Mounter::new(&fixture.domain, RunDir::open(shared.join("run")).unwrap(), &fixture.known);
    let before = fixture.mounts();
    let request = read_only(&fixture, "shared/one");
    mounter.mount(&request).unwrap();
    fixture.check_content(&request.target);
    fixture.check_content(&peer.join("one"));
    assert!(umount(&mounter, &request.target).unpinned);
    assert_eq!(fixture.mounts(), before);
    kernel::unmount(&peer, false).unwrap();
    kernel::unmount(&shared, false).unwrap();
    fixture.assert_clean("at the end");
}

/// composefs-rs removes objects of images that are mounted (its issue 346).
#[test]
fn garbage_collection_keeps_what_is_mounted() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = read_only(&fixture, "one");
    mounter.mount(&request).unwrap();
    fixture.domain.remove_ref("test:1").unwrap();
    let gc = || fixture.gc();
    assert_eq!(gc().images, 0);
    fixture.check_content(&request.target);
    // The root lost: the record and the kernel still say so.
    let id = fixture.domain.roots(RootKind::Mount).unwrap()[0].id.clone();
    fixture.domain.remove_root(RootKind::Mount, &id).unwrap();
    assert_eq!(gc().images, 0);
    // All our state lost: the kernel alone.
    fs::remove_dir_all(fixture.path("run/mounts")).unwrap();
    fs::create_dir(fixture.path("run/mounts")).unwrap();
    assert_eq!(mounter.live_images().unwrap(), [fixture.image]);
    assert_eq!(orphans(&fixture), std::slice::from_ref(&request.target));
    kernel::unmount_patiently(&request.target, false).unwrap();
    mounter.reconcile().unwrap();
    assert_eq!(gc().images, 1);
}

/// An image that was pinned before its store had fs-verity was shown as checked by the kernel.
#[test]
fn a_mount_is_recorded_with_the_protection_of_its_image() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let (one, two) = (read_only(&fixture, "one"), read_only(&fixture, "two"));
    let verity = mounter.mount(&one).unwrap().verity;
    let pin = fixture.path("run/images/default").join(fixture.image.to_string()).join("pin.json");
    let text = fs::read_to_string(&pin).unwrap();
    let (from, to) = (format!("\"verity\": {verity}"), format!("\"verity\": {}", !verity));
    fs::write(&pin, text.replace(&from, &to)).unwrap();
    assert_eq!(mounter.mount(&two).unwrap().verity, !verity);
    umount(&mounter, &one.target);
    umount(&mounter, &two.target);
}

/// One damaged record or one directory that overlayfs refused ended the clean-up of all others.
#[test]
fn reconcile_reports_failures_and_goes_on() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    mounter.run.prepare().unwrap();
    let boot = Kernel::new(Path::new("/")).unwrap().boot_id;
    for number in 0..16 {
        let is_damaged = number % 2 == 0;
        let dir = fixture.target(&format!("store/domains/default/writable/gone-{number}"));
        fs::create_dir(dir.join("work")).unwrap();
        let upper = dir.join("upper");
        if is_damaged { fs::write(upper, "") } else { fs::create_dir(upper) }.unwrap();
        let id = mounter.run.id_of(&fixture.path(&number.to_string()));
        let mut root = Root::new(RootKind::Mount, id.clone());
        root.boot_id = Some(boot.clone());
        fixture.domain.put_root(&root).unwrap();
        if is_damaged {
            fs::write(fixture.path(&format!("run/mounts/{id}.json")), "").unwrap();
        }
    }
    let done = mounter.reconcile().unwrap();
    // Eight directories and eight records: each record had failed twice.
    assert_eq!((done.uppers, done.roots.len(), done.failed.len()), (8, 8, 16), "{done:?}");
}

/// An unmount wrote into the run directory first that it was about to happen. Where that was full, nothing could be
/// unmounted, which would have made room.
#[test]
fn a_full_run_directory_stops_no_unmount() {
    needs_mounts!();
    let fixture = Fixture::new();
    let (run, none) = (fixture.target("run"), rustix::mount::MountFlags::empty());
    rustix::mount::mount("tmpfs", &run, "tmpfs", none, Some(c"size=256k,mode=711")).unwrap();
    let mounter = fixture.mounter();
    let requests = [
        read_only(&fixture, "one"),
        writable(&fixture, "two"),
        MountRequest { access: Access::WritableKept, ..read_only(&fixture, "three") },
    ];
    requests.iter().for_each(|request| drop(mounter.mount(request).unwrap()));
    let full = fs::write(run.join("fill"), vec![1; 1 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    requests.iter().for_each(|request| drop(umount(&mounter, &request.target)));
    let kept = mounter.list().unwrap().kept;
    kept.iter().for_each(|kept| mounter.discard_kept(&kept.dir).unwrap());
    assert_eq!(kept.len(), 1);
    kernel::unmount(&run, true).unwrap();
    fixture.assert_clean("at the end");
}
