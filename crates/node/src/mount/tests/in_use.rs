//! Mounts with users that this mount namespace does not show.
//!
//! Each of them was lost: `umount`, removing the ref and `gc` all succeeded, and then the user read
//! ENOENT, because `gc` had deleted the objects or `umount` the changes under it.

use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::sync::mpsc;

use super::fixture::{Fixture, needs_inode_share, needs_mounts};
use super::*;
use crate::run_dir::list;

/// A user of a mount: where it reads, and what ends it.
pub(super) struct User {
    pub(super) path: PathBuf,
    pub(super) end: Box<dyn FnOnce()>,
}

/// What a user is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Namespace,
    Bind,
    Overlay,
    Descriptor,
}

const KINDS: [Kind; 4] = [Kind::Namespace, Kind::Bind, Kind::Overlay, Kind::Descriptor];

pub(super) fn user(kind: Kind, fixture: &Fixture, target: &Path) -> User {
    match kind {
        Kind::Namespace => {
            let (enter, entered) = mpsc::channel();
            let (end, ended) = mpsc::channel::<()>();
            let thread = std::thread::spawn(move || {
                cofolio_sys::mount::unshare_mount_namespace().unwrap();
                enter.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
                ended.recv().unwrap();
            });
            let root = PathBuf::from(format!("/proc/self/task/{}/root", entered.recv().unwrap()));
            let path = root.join(target.strip_prefix("/").unwrap());
            let end = move || {
                end.send(()).unwrap();
                thread.join().unwrap();
            };
            User { path, end: Box::new(end) }
        }
        Kind::Bind => {
            let path = fixture.target("bound");
            rustix::mount::mount_bind(target, &path).unwrap();
            User {
                path: path.clone(),
                end: Box::new(move || kernel::unmount(&path, false).unwrap()),
            }
        }
        Kind::Overlay => {
            let path = foreign_overlay(fixture, "over", target);
            User {
                path: path.clone(),
                end: Box::new(move || kernel::unmount(&path, false).unwrap()),
            }
        }
        Kind::Descriptor => {
            let mount = clone_mount(CWD, target, MountAttrFlags::empty(), None).unwrap();
            let path = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
            User { path, end: Box::new(move || drop(mount)) }
        }
    }
}

/// Mounts an overlay, as another engine does: its layers are this directory and an empty one.
fn foreign_overlay(fixture: &Fixture, name: &str, lower: &Path) -> PathBuf {
    let path = fixture.target(name);
    let layers = [lower, &fixture.target("empty")].map(|layer| layer.to_str().unwrap().to_owned());
    let context = kernel::Context::open("overlay").unwrap();
    context.string("lowerdir", &layers.join(":")).unwrap();
    context.create().unwrap();
    attach(context.mount(MountAttrFlags::empty()).unwrap(), open_dir(&path).unwrap()).unwrap();
    path
}

/// Of two `gc` at once one failed: the other had removed a directory of changes, or the probe in it, at that moment.
#[test]
fn two_that_remove_the_same_changes_both_succeed() {
    needs_mounts!();
    let fixture = Fixture::new();
    fixture.mounter().mount(&read_only(&fixture, "one")).unwrap();
    let writable = fixture.path("store/domains/default/writable");
    for round in 0..20 {
        for number in 0..30 {
            for dir in ["upper", "work"] {
                fs::create_dir_all(writable.join(format!("gone-x-{round}-{number}/{dir}")))
                    .unwrap();
            }
        }
        std::thread::scope(|scope| {
            let reconcile = || fixture.mounter().reconcile().unwrap().failed;
            let threads = [scope.spawn(reconcile), scope.spawn(reconcile)];
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), [""; 0]));
        });
        assert_eq!(fs::read_dir(&writable).unwrap().count(), 0);
    }
}

fn outlives_umount_and_gc(fixture: &Fixture, kind: Kind, access: Access) {
    let story = format!("{kind:?} of {access:?}");
    let mounter = fixture.mounter();
    let is_writable = access != Access::ReadOnly;
    let is_given = matches!(access, Access::WritableAt(_));
    let is_kept = is_given || access == Access::WritableKept;
    // A target that a mount made was removed after it, and what other namespaces had there went, too.
    let request = MountRequest { access, create_target: true, ..read_only(fixture, "one") };
    fs::remove_dir(&request.target).unwrap();
    mounter.mount(&request).unwrap();
    if is_writable {
        fs::write(request.target.join("new"), "new").unwrap();
    }
    let user = user(kind, fixture, &request.target);
    let check = |when: &str| {
        fixture.check_content(&user.path);
        if is_writable {
            let new = fs::read(user.path.join("new"));
            assert_eq!(new.unwrap_or_else(|error| panic!("{story} {when}: {error}")), b"new");
        }
    };
    let unmounted = umount(&mounter, &request.target);
    assert!(unmounted.in_use && !unmounted.unpinned, "{story}: {unmounted:?}");
    check("after umount");
    fixture.domain.remove_ref("test:1").unwrap();
    assert_eq!(mounter.reconcile().unwrap().failed, [""; 0], "{story}");
    assert_eq!(fixture.gc().images, 0, "{story}");
    check("after gc");
    // A mount of another run directory on the same store, to which only the store speaks.
    let run = RunDir::open(fixture.path("another-run")).unwrap();
    let another = Mounter::new(&fixture.domain, run, &fixture.known);
    assert_eq!(another.reconcile().unwrap().failed, [""; 0], "{story}");
    let live = || Ok(Vec::new());
    let options = cofolio_store::GcOptions { wait: true, ..Default::default() };
    let report = fixture.domain.gc(&fixture.known, &live, &options).unwrap();
    assert_eq!(report.images, 0, "{story}: a root names it");
    // Mounted again meanwhile, it has a superblock of its own, and the other one is not forgotten.
    let mounted = mounter.mount(&request);
    if is_given {
        let error = mounted.unwrap_err();
        assert!(matches!(error, MountError::UpperInUse { .. }), "{story}: {error}");
    } else {
        mounted.unwrap();
        fixture.check_content(&request.target);
        assert!(umount(&mounter, &request.target).in_use, "{story}");
    }
    check("after another mount");
    (user.end)();
    assert_eq!(mounter.reconcile().unwrap().failed, [""; 0], "{story}");
    if is_given {
        mounter.mount(&request).unwrap();
        assert_eq!(fs::read(request.target.join("new")).unwrap(), b"new", "{story}");
        assert!(!umount(&mounter, &request.target).in_use, "{story}");
    }
    if is_kept {
        mounter
            .kept()
            .unwrap()
            .iter()
            .for_each(|(_, kept)| mounter.discard_kept(&kept.dir).unwrap());
    }
    fixture.assert_clean(&story);
    assert_eq!(fixture.gc().images, 1, "{story}");
}

#[test]
fn a_read_only_mount_in_use_elsewhere_outlives_umount_and_gc() {
    needs_mounts!();
    for kind in KINDS {
        outlives_umount_and_gc(&Fixture::new(), kind, Access::ReadOnly);
    }
}

#[test]
fn a_writable_mount_in_use_elsewhere_outlives_umount_and_gc() {
    needs_mounts!();
    for kind in KINDS {
        outlives_umount_and_gc(&Fixture::new(), kind, Access::Writable);
        outlives_umount_and_gc(&Fixture::new(), kind, Access::WritableKept);
    }
}

/// Only an upper directory with overlayfs' `volatile` mark was looked at, and one that the caller gave has
/// none: while it was in use elsewhere it was mounted again, and two overlays wrote to it.
#[test]
fn a_given_upper_in_use_elsewhere_is_not_mounted_again() {
    needs_mounts!();
    for kind in KINDS {
        let fixture = Fixture::new();
        outlives_umount_and_gc(&fixture, kind, Access::WritableAt(fixture.path("changes")));
    }
}

/// The image over a base has two superblocks, and each is in use.
#[test]
fn a_base_in_use_elsewhere_outlives_umount_and_gc() {
    needs_mounts!();
    let fixture = Fixture::over_base();
    let mounter = fixture.mounter();
    let request = read_only(&fixture, "one");
    mounter.mount(&request).unwrap();
    let user = user(Kind::Namespace, &fixture, &request.target);
    assert!(umount(&mounter, &request.target).in_use);
    fixture.domain.remove_ref("test:1").unwrap();
    assert_eq!(mounter.reconcile().unwrap().failed, [""; 0]);
    let live = mounter.live_images().unwrap();
    assert!(live.contains(&fixture.image) && live.contains(&fixture.base()), "{live:?}");
    assert_eq!(fixture.gc().images, 0);
    fixture.check_content(&user.path);
    (user.end)();
    mounter.reconcile().unwrap();
    fixture.assert_clean("at the end");
}

/// `rm -rf` of the run directory took the only trace of a mount that another namespace held, or had
/// made: the next gc deleted its objects.
#[test]
fn a_lost_run_directory_loses_no_object_in_use() {
    needs_mounts!();
    for (is_over_base, is_unmounted) in [(false, true), (false, false), (true, true)] {
        let fixture = if is_over_base { Fixture::over_base() } else { Fixture::new() };
        let mounter = fixture.mounter();
        let request = read_only(&fixture, "one");
        mounter.mount(&request).unwrap();
        // Pins are private there: what this namespace unmounts stays.
        let user = user(Kind::Namespace, &fixture, &request.target);
        if is_unmounted {
            assert!(umount(&mounter, &request.target).in_use);
        } else {
            // As if the mount had been made there: this namespace shows nothing of it.
            for mount in fixture.mounts().iter().rev() {
                kernel::unmount(&mount.target, true).unwrap();
            }
        }
        fs::remove_dir_all(fixture.path("run")).unwrap();
        fixture.domain.remove_ref("test:1").unwrap();
        assert_eq!(mounter.reconcile().unwrap().failed, [""; 0]);
        assert_eq!(fixture.gc().images, 0);
        fixture.check_content(&user.path);
        // A mount meanwhile has a superblock of its own.
        mounter.mount(&request).unwrap();
        umount(&mounter, &request.target);
        assert_eq!(mounter.reconcile().unwrap().failed, [""; 0]);
        assert_eq!(fixture.gc().images, 0);
        fixture.check_content(&user.path);
        (user.end)();
        // A namespace ends a moment after its last thread.
        for _ in 0..100 {
            mounter.reconcile().unwrap();
            if fixture.domain.roots(RootKind::Mount).unwrap().is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        fixture.assert_clean("at the end");
        assert!(fixture.gc().images >= 1);
    }
}

/// The mount itself was taken away behind our back while somebody used it elsewhere.
#[test]
fn a_mount_that_others_unmounted_is_kept_for_its_users() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    fs::write(request.target.join("new"), "new").unwrap();
    let user = user(Kind::Bind, &fixture, &request.target);
    kernel::unmount(&request.target, false).unwrap();
    assert_eq!(mounter.reconcile().unwrap().failed, [""; 0]);
    fixture.check_content(&user.path);
    assert_eq!(fs::read(user.path.join("new")).unwrap(), b"new");
    (user.end)();
    mounter.reconcile().unwrap();
    fixture.assert_clean("at the end");
}

/// With `inode-share` no superblock of the domain may end while another one is read: Linux 7.2
/// answers that with a BUG.
#[test]
fn inode_share_keeps_superblocks_in_use_elsewhere() {
    needs_mounts!();
    needs_inode_share!();
    for kind in [Kind::Namespace, Kind::Bind, Kind::Overlay] {
        let fixture = Fixture::shared();
        let mounter = fixture.mounter();
        let request = read_only(&fixture, "one");
        mounter.mount(&request).unwrap();
        let user = user(kind, &fixture, &request.target);
        assert!(umount(&mounter, &request.target).in_use, "{kind:?}");
        assert_eq!(mounter.pins().unwrap().len(), 1, "{kind:?}");
        fixture.check_content(&user.path);
        (user.end)();
        mounter.reconcile().unwrap();
        fixture.assert_clean(&format!("{kind:?}"));
    }
}

/// `users_elsewhere`, which `inode-share` needs, tried where no kernel with it is at hand.
///
/// Paths of an overlay's layers were looked up. Once the lower mount was unmounted, its path led to an
/// empty directory, and the superblock that the overlay used counted as unused.
#[test]
fn mounts_are_found_in_every_namespace() {
    use super::super::in_use::{Elsewhere, users_elsewhere};
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = read_only(&fixture, "one");
    let run = fixture.path("run");
    let device_of = |path: &Path| {
        let device = fs::metadata(path).unwrap().dev();
        (rustix::fs::major(device), rustix::fs::minor(device))
    };
    for kind in [Kind::Namespace, Kind::Bind, Kind::Overlay] {
        mounter.mount(&request).unwrap();
        let devices = [device_of(&request.target)].into();
        let find = || users_elsewhere(Path::new("/"), &run, &devices, None).unwrap();
        assert_eq!(find(), Elsewhere::Mounted, "at its target");
        let user = user(kind, &fixture, &request.target);
        let (major, minor) = device_of(&user.path);
        // Other tests have overlays as well.
        let is_found = || match find() {
            Elsewhere::Mounted => kind != Kind::Overlay,
            Elsewhere::Overlays(names) => {
                let name = format!("{major}:{minor}-");
                kind == Kind::Overlay && names.iter().any(|it| it.starts_with(&name))
            }
        };
        kernel::unmount(&request.target, true).unwrap();
        assert!(is_found(), "{kind:?}");
        (user.end)();
        // A namespace ends a moment after its last thread.
        let gone = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            !is_found()
        });
        assert!(gone, "{kind:?}");
        mounter.reconcile().unwrap();
        fixture.assert_clean(&format!("{kind:?}"));
    }
}

/// Containers of another engine may have a layer of ours only if they started while a mount of ours
/// was there to be seen. Tried where no kernel with `inode-share` is at hand: the pin says it is one.
#[test]
fn overlays_keep_superblocks_if_they_may_have_a_layer() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = read_only(&fixture, "one");
    let pin = fixture.path(&format!("run/images/default/{}/pin.json", fixture.image));
    let set_backend = |from: &str, to: &str| {
        let text = fs::read_to_string(&pin).unwrap();
        let changed = text.replace(&format!("\"{from}\""), &format!("\"{to}\""));
        assert_ne!(text, changed);
        fs::write(&pin, changed).unwrap();
    };
    let lower = fixture.target("lower");
    let foreign = |name: &str| foreign_overlay(&fixture, name, &lower);
    let end = |overlay: &Path| kernel::unmount(overlay, false).unwrap();
    let older = foreign("older");
    mounter.mount(&request).unwrap();
    let first = foreign("first");
    set_backend("overlay", "inode-share");
    assert!(umount(&mounter, &request.target).in_use);
    // What came after the last unmount has none of ours, but now there is a mount again.
    let later = foreign("later");
    set_backend("inode-share", "overlay");
    mounter.mount(&request).unwrap();
    let second = foreign("second");
    set_backend("overlay", "inode-share");
    assert!(umount(&mounter, &request.target).in_use);
    for overlay in [first, later] {
        end(&overlay);
        mounter.reconcile().unwrap();
        assert_eq!(mounter.pins().unwrap().len(), 1);
    }
    let newer = foreign("newer");
    end(&second);
    // Overlays of other tests have to end as well.
    let gone = (0..1000).any(|_| {
        mounter.reconcile().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(10));
        mounter.pins().unwrap().is_empty()
    });
    assert!(gone);
    [older, newer].iter().for_each(|overlay| end(overlay));
    fixture.assert_clean("at the end");
}

/// Each writable mount that was held elsewhere took 0.9 s of every gc and `umount --all`, one after the other.
#[test]
fn what_stays_in_use_is_waited_for_once() {
    let patience = Patience::default();
    let mut asked = 0;
    let mut wait = || {
        let ask = || {
            asked += 1;
            Ok::<_, ()>(false)
        };
        assert!(!patience.wait(ask).unwrap());
        std::mem::take(&mut asked)
    };
    assert!(wait() > 5);
    assert_eq!([wait(), wait()], [1, 1], "the time is up");
    patience.renew();
    assert!(wait() > 5);
}

/// Others unmounted the read-only root of a container that ran, or its record was lost: its volumes were
/// removed under it, by `gc`, `umount` or the next mount there.
#[test]
fn volumes_stay_while_they_are_bound_elsewhere() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    for story in ["reconcile", "lost", "umount", "mount"] {
        let request = MountRequest { scratch: true, ..read_only(&fixture, "one") };
        let volume = mounter.mount(&request).unwrap().scratch.unwrap().join("data");
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("new"), "new").unwrap();
        let bound = fixture.target("bound");
        rustix::mount::mount_bind(&volume, &bound).unwrap();
        kernel::unmount(&request.target, false).unwrap();
        if story == "lost" {
            let names = list(&fixture.path("run/mounts")).unwrap();
            names.iter().for_each(|name| {
                fs::remove_file(fixture.path("run/mounts").join(name)).unwrap();
            });
        }
        if story == "mount" {
            mounter.mount(&request).unwrap();
        }
        if ["mount", "umount"].contains(&story) {
            umount(&mounter, &request.target);
        }
        for _ in 0..2 {
            let new = fs::read(bound.join("new"));
            assert_eq!(new.unwrap_or_else(|error| panic!("{story}: {error}")), b"new");
            assert_eq!(mounter.reconcile().unwrap().failed, [""; 0]);
        }
        kernel::unmount(&bound, false).unwrap();
        mounter.reconcile().unwrap();
        fixture.assert_clean("at the end");
    }
}

/// The kernel shows a chrooted process only the mounts below its root. One process of each mount namespace
/// was looked at: where that was chrooted, `gc` removed a volume that another process read.
#[test]
fn a_chrooted_process_hides_no_volume() {
    needs_mounts!();
    for is_first in [true, false] {
        let fixture = Fixture::new();
        let mounter = fixture.mounter();
        let request = MountRequest { scratch: true, ..read_only(&fixture, "one") };
        let volume = mounter.mount(&request).unwrap().scratch.unwrap().join("data");
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("new"), "new").unwrap();
        let (bound, jail) = (fixture.target("bound"), fixture.target("jail"));
        let at = bound.clone();
        let start = move || {
            cofolio_sys::mount::unshare_mount_namespace().unwrap();
            rustix::mount::mount_bind(&volume, &at).unwrap();
            rustix::mount::mount_bind("/", &jail).unwrap();
            let roots = if is_first { [&*jail, Path::new("/")] } else { [Path::new("/"), &*jail] };
            roots.map(|root| {
                let mut command = Command::new("chroot");
                command.arg(root).args(["sleep", "1000"]).spawn().unwrap()
            })
        };
        let mut children = std::thread::spawn(start).join().unwrap();
        let proc = |child: &std::process::Child| PathBuf::from(format!("/proc/{}", child.id()));
        while children.iter().any(|it| fs::read(proc(it).join("comm")).unwrap() != b"sleep\n") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        kernel::unmount(&request.target, false).unwrap();
        let root = proc(&children[usize::from(is_first)]).join("root");
        let new = root.join(bound.strip_prefix("/").unwrap()).join("new");
        for _ in 0..2 {
            assert_eq!(mounter.reconcile().unwrap().failed, [""; 0]);
            let new = fs::read(&new);
            children.iter_mut().filter(|_| new.is_err()).for_each(|it| it.kill().unwrap());
            assert_eq!(new.unwrap(), b"new", "{is_first}");
        }
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        // A namespace ends a moment after its last process.
        for _ in 0..100 {
            mounter.reconcile().unwrap();
            if list(&fixture.path("store/domains/default/writable")).unwrap().is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        fixture.assert_clean("at the end");
    }
}

/// A thread that ended between listing and reading hid its mount namespace, although its child lived on;
/// a read that failed in another way did so, too.
#[test]
fn threads_are_listed_again_if_one_has_ended() {
    use super::super::in_use::any_task;
    let (process, thread) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero());
    let own = PathBuf::from(format!("/proc/{process}/task/{thread}"));
    let fail = |errno: rustix::io::Errno| std::io::Error::from(errno);
    let mut asked = 0;
    let found = any_task(Path::new("/"), |task| {
        asked += u32::from(*task == own);
        if asked == 1 { Err(fail(rustix::io::Errno::NOENT)) } else { Ok(asked == 2) }
    });
    assert!(found && asked == 2, "asked {asked} times");
    assert!(any_task(Path::new("/"), |_| Err(fail(rustix::io::Errno::MFILE))));
}

/// A process with a mapped file whose path was too long to be read counted as a user of every mount, so
/// any user could keep all of them from being unmounted. And it was named instead of the true one.
#[test]
fn a_process_that_cannot_be_asked_is_no_user() {
    use super::super::in_use::process_on;
    let root = tempfile::tempdir().unwrap();
    let of = |process: &str| root.path().join("proc").join(process);
    let here = root.path().join("file");
    fs::write(&here, "").unwrap();
    let (flags, mask) = (rustix::fs::AtFlags::empty(), rustix::fs::StatxFlags::MNT_ID);
    let id = rustix::fs::statx(CWD, &here, flags, mask).unwrap().stx_mnt_id;
    let found = || process_on(root.path(), &HashSet::from([id]), &[]).unwrap();
    fs::create_dir(root.path().join("proc")).unwrap();
    assert_eq!(found(), None);
    fs::create_dir_all(of("8")).unwrap();
    // As good as unreadable, for root too.
    fs::write(of("8/fd"), "").unwrap();
    let line = format!("7f6ac63a8000-7f6ac63ce000 r--p 0 00:29 7 {}\n", "x".repeat(100_000));
    fs::write(of("8/maps"), line).unwrap();
    assert_eq!(found(), None);
    fs::create_dir_all(of("9/fd")).unwrap();
    std::os::unix::fs::symlink(&here, of("9/fd/3")).unwrap();
    assert_eq!(found().as_deref(), Some("process 9"));
}

/// A container made its mountinfo as long as it liked, and `umount` and `gc` read all of it into
/// memory. The part that is not read may show the mount.
#[test]
fn a_mountinfo_that_is_too_long_to_be_read_leaves_doubt() {
    use super::super::in_use::is_bound;
    let root = tempfile::tempdir().unwrap();
    let of = |path: &str| root.path().join("proc").join(path);
    for directory in ["thread-self/ns", "7/ns"] {
        fs::create_dir_all(of(directory)).unwrap();
    }
    std::os::unix::fs::symlink("pid:[4026531836]", of("thread-self/ns/pid")).unwrap();
    std::os::unix::fs::symlink("/", of("7/root")).unwrap();
    fs::write(of("7/ns/mnt"), "").unwrap();
    let line = "36 35 98:0 /volume /mnt rw - ext4 /dev/vda rw\n";
    fs::write(of("7/mountinfo"), line).unwrap();
    let is_shown = |name: &str| is_bound(root.path(), Path::new(name));
    if is_shown("/other") {
        return println!("SKIP: not in the first pid namespace, so all is in doubt");
    }
    assert!(is_shown("/volume"));
    fs::write(of("7/mountinfo"), line.repeat((33 << 20) / line.len())).unwrap();
    assert!(is_shown("/other"));
}

/// `umount` waited for a process that never answered, and held the image's lock: no command for
/// that image ended any more. A FIFO without a writer holds up whoever opens it.
#[test]
fn a_process_that_does_not_answer_may_be_a_user() {
    use super::super::in_use::process_on;
    let root = tempfile::tempdir().unwrap();
    let of = |process: &str| root.path().join("proc").join(process);
    let fifo = |process: &str| {
        fs::create_dir_all(of(process)).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let maps = of(process).join("maps");
        rustix::fs::mknodat(CWD, &maps, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        maps
    };
    let here = root.path().join("file");
    fs::write(&here, "").unwrap();
    let (flags, mask) = (rustix::fs::AtFlags::empty(), rustix::fs::StatxFlags::MNT_ID);
    let id = rustix::fs::statx(CWD, &here, flags, mask).unwrap().stx_mnt_id;
    let found = || process_on(root.path(), &HashSet::from([id]), &[]).unwrap();
    let fifos = ["8", "9"].map(fifo);
    let reason = found().unwrap();
    let said =
        ["8", "9"].map(|id| format!("it may be used by process {id}, which does not answer"));
    assert!(said.contains(&reason), "{reason}");
    // One that is a user for sure is named.
    fs::create_dir_all(of("7/fd")).unwrap();
    std::os::unix::fs::symlink(&here, of("7/fd/3")).unwrap();
    assert_eq!(found().as_deref(), Some("process 7"));
    // The threads that wait end.
    for maps in fifos {
        let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
        let _ = rustix::fs::open(maps, flags, rustix::fs::Mode::empty());
    }
}

/// A `/proc` or `/sys` that could not be listed, for want of descriptors for one, counted as one
/// without users: a mount was detached although it was in use.
#[test]
fn users_that_cannot_be_listed_are_not_none() {
    use super::super::in_use::{loop_device_on, process_on};
    let root = tempfile::tempdir().unwrap();
    let process = || process_on(root.path(), &HashSet::new(), &[]);
    let device = || loop_device_on(root.path(), Path::new("/mnt"));
    process().unwrap_err();
    assert_eq!(device().unwrap(), None, "there is no /sys");
    fs::create_dir(root.path().join("sys")).unwrap();
    fs::write(root.path().join("sys/block"), "").unwrap();
    device().unwrap_err();
}

/// A process that forked and then unmounted, after processes had been listed, answered no, and its child, which
/// had a copy of the mount, was not asked.
#[test]
fn children_made_meanwhile_are_asked() {
    use super::super::in_use::any_task;
    let mut child = None;
    let found = any_task(Path::new("/"), |task| {
        let child = child.get_or_insert_with(|| Command::new("sleep").arg("100").spawn().unwrap());
        Ok(task.starts_with(format!("/proc/{}", child.id())))
    });
    let mut child = child.unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(found);
}

/// Each pass over all processes found that one of them had ended: a zombie is listed as long as nobody waits for it.
#[test]
fn a_zombie_leaves_no_doubt() {
    use super::super::in_use::any_task;
    let mut zombie = Command::new("true").spawn().unwrap();
    let own = format!("/proc/{}/", zombie.id());
    while fs::read(format!("{own}mountinfo")).is_ok() {
        std::thread::yield_now();
    }
    let mut asked = 0;
    let found = any_task(Path::new("/"), |task| {
        if !task.starts_with(&own) {
            return Ok(false);
        }
        asked += 1;
        fs::read(task.join("mountinfo")).map(|_| false)
    });
    zombie.wait().unwrap();
    assert!(!found && asked == 2, "asked {asked} times");
}

/// Where a superblock could not be named, a user was recorded that lived until the machine restarted: gc kept
/// the image and did not say why.
#[test]
fn a_superblock_is_asked_for_again_when_sysfs_is_back() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mut blind = fixture.mounter();
    blind.root = fixture.target("bare");
    std::os::unix::fs::symlink("/proc", blind.root.join("proc")).unwrap();
    let (mounter, request) = (fixture.mounter(), read_only(&fixture, "one"));
    for maker in [&mounter, &blind] {
        maker.mount(&request).unwrap();
        assert!(umount(&blind, &request.target).in_use);
        blind.reconcile().unwrap();
        assert_eq!(mounter.live_images().unwrap(), [fixture.image], "in doubt it is in use");
        mounter.reconcile().unwrap();
        fixture.assert_clean("sysfs is back");
    }
    // Too many open files, for example.
    let file = fs::File::open("/proc/self/stat").unwrap();
    super::super::in_use::Superblock::of(&file, Path::new("/")).unwrap_err();
}

/// Asking the kernel whether changes are in use made it sync their whole filesystem. Where much was
/// dirty, an unmount took tens of milliseconds.
#[test]
fn umount_writes_nothing_back() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    // Others may sync it meanwhile, and the kernel writes back what is old. In memory nothing is dirty.
    const TRIES: u32 = 10;
    let mut was_dirty = false;
    for number in 0..TRIES {
        let request = writable(&fixture, "one");
        mounter.mount(&request).unwrap();
        let path = fixture.dir.path().join(format!("dirty-{number}"));
        fs::write(&path, vec![1; 1 << 20]).unwrap();
        let file = fs::File::open(path).unwrap();
        let dirty = || cofolio_sys::cache::cachestat(&file, 0, 0).unwrap().dirty;
        let before = dirty();
        umount(&mounter, &request.target);
        fixture.assert_clean("after umount");
        if before > 0 && dirty() == before {
            return;
        }
        was_dirty |= before > 0;
    }
    assert!(!was_dirty, "each unmount wrote the filesystem back");
}

/// The kernel says EACCES of a thread that has just ended. That counted as a thread that nobody may
/// look at, and so as one that uses everything: on a busy machine an unmount left the target that
/// its mount had made.
#[test]
fn a_thread_that_ends_is_no_doubt() {
    for _ in 0..10_000 {
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || tell.send(rustix::thread::gettid()).unwrap());
        let number = told.recv().unwrap().as_raw_nonzero();
        let task = PathBuf::from(format!("/proc/self/task/{number}"));
        let error = loop {
            if let Err(error) = mountinfo::TaskRoot::of(&task) {
                break error;
            }
            if !task.exists() {
                break std::io::ErrorKind::NotFound.into();
            }
        };
        let errno = rustix::io::Errno::from_io_error(&error);
        assert_ne!(errno, Some(rustix::io::Errno::ACCESS));
        thread.join().unwrap();
    }
}
