//! Processes that die, machines that restart, and many processes at once.
//!
//! The tests start this test binary again, as [`child`], in their own mount namespace: what a
//! process that is killed leaves behind stays to be looked at.

use std::collections::HashSet;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::sync::Mutex;

use cofolio_store::Store;

use super::fixture::{Fixture, Known, needs_inode_share, needs_mounts};
use super::*;

const ENV: &str = "COFOLIO_TEST_MOUNT_CHILD";

/// What a child does, as text in its environment.
pub(super) fn task(
    fixture: &Fixture,
    target: &str,
    mode: &str,
    step: Option<Step>,
    rounds: u32,
) -> String {
    let step = step.map_or("none".to_owned(), |step| format!("{step:?}"));
    let base = fixture.path("").to_string_lossy().trim_end_matches('/').to_owned();
    format!("{base}|{}|{target}|{mode}|{step}|{rounds}", fixture.image)
}

pub(super) fn start(task: &str) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "mount::tests::crash::child", "--ignored", "--quiet", "--nocapture"])
        .env(ENV, task)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

fn request(mode: &str, image: Digest, target: PathBuf) -> MountRequest {
    let mut request = MountRequest::new(image, target);
    match mode {
        "read" => {}
        "write" => request.access = Access::Writable,
        "kept" => request.access = Access::WritableKept,
        "sized" => {
            request.access = Access::Writable;
            request.size_bytes = Some(8 << 20);
        }
        "sparse" | "sparse-late" => {
            request.access = Access::Writable;
            request.writable_dirs = vec!["/sub".into()];
        }
        "made" => request.create_target = true,
        "mapped" => {
            request.access = Access::Writable;
            request.options.idmap = Some("0:100000:65536".parse().unwrap());
        }
        other => panic!("no mode {other}"),
    }
    request
}

/// Not a test by itself: mounts and unmounts as the environment says, and kills itself at a step.
#[test]
#[ignore = "worker: started by the tests of this file"]
fn child() {
    let task = std::env::var(ENV).unwrap();
    let [base, image, target, mode, step, rounds] =
        task.split('|').collect::<Vec<_>>().try_into().unwrap();
    let base = Path::new(base);
    let store = Store::open(&base.join("store")).unwrap();
    let domain = store.domain("default").unwrap();
    let known = Known::load(&base.join("objects.txt"));
    let die = |reached: Step| {
        if format!("{reached:?}") == step {
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
        }
    };
    let mounter =
        Mounter::new(&domain, RunDir::open(base.join("run")).unwrap(), &known).with_steps(&die);
    let mounter = if mode == "sparse-late" { mounter.with_late_assembly() } else { mounter };
    let target = base.join(target);
    if mode == "leave" || mode == "keep" {
        let options = UmountOptions { keep_upper: mode == "keep", ..UmountOptions::default() };
        mounter.umount(&target, &options).unwrap();
    }
    for _ in 0..rounds.parse::<u32>().unwrap() {
        mounter.mount(&request(mode, image.parse().unwrap(), target.clone())).unwrap();
        assert_eq!(fs::read(target.join("small")).unwrap(), b"inline");
        mounter.umount(&target, &UmountOptions::default()).unwrap();
    }
}

pub(super) fn was_killed(status: ExitStatus) -> bool {
    match status.signal() {
        Some(signal) => {
            assert_eq!(signal, rustix::process::Signal::KILL.as_raw());
            true
        }
        None => {
            assert!(status.success(), "{status}");
            false
        }
    }
}

/// The story of every daemon that was ever killed in the middle: mounts nobody knows, images that
/// are never collected, directories that cannot be removed. Here a process dies at every step of a
/// mount and of an unmount, and each of the three ways to put things right does so: `reconcile`,
/// `umount`, and simply mounting again.
///
/// Some modes beside others, each with a store and a mount namespace of its own. With `inode-share` one
/// after the other: there an overlay of another namespace may keep superblocks.
fn dies_at_any_step(fixture: impl Fn() -> Fixture + Sync, expected: &[Step], backend: Backend) {
    let reached = Mutex::new(HashSet::new());
    std::thread::scope(|scope| {
        for modes in
            [["read", "write", "kept", "sparse"], ["made", "mapped", "sized", "sparse-late"]]
        {
            let (fixture, reached) = (&fixture, &reached);
            let thread = scope.spawn(move || {
                cofolio_sys::mount::unshare_mount_namespace().unwrap();
                let fixture = fixture();
                modes.into_iter().for_each(|mode| dies_in_mode(&fixture, mode, reached));
            });
            if backend == Backend::InodeShare {
                thread.join().unwrap();
            }
        }
    });
    let reached = reached.into_inner().unwrap();
    let missed: Vec<_> =
        expected.iter().filter(|step| !reached.contains(&format!("{step:?}"))).collect();
    assert!(missed.is_empty(), "no process got to {missed:?}");
    assert_eq!(reached.len(), expected.len(), "{reached:?}");
}

fn dies_in_mode(fixture: &Fixture, mode: &str, reached: &Mutex<HashSet<String>>) {
    let mounter = fixture.mounter();
    let target = fixture.path(mode);
    if mode != "made" {
        fixture.target(mode);
    }
    for &step in Step::ALL {
        for remedy in ["reconcile", "umount", "mount"] {
            let story = format!("{mode}, killed at {step:?}, then {remedy}");
            let killed =
                was_killed(start(&task(fixture, mode, mode, Some(step), 1)).wait().unwrap());
            if killed {
                reached.lock().unwrap().insert(format!("{step:?}"));
            }
            let case = Case { fixture, mode, step, killed, story: &story };
            case.put_right(remedy);
            // Traces without a record (a directory of changes on its way out, a pin without
            // users) are left to reconcile whatever was done before.
            let done = mounter.reconcile().unwrap();
            assert!(done.failed.is_empty(), "{story}: {done:?}");
            if mode == "kept" {
                for kept in mounter.list().unwrap().kept {
                    assert_eq!(kept.image, Some(fixture.image));
                    mounter.discard_kept(&kept.dir).unwrap();
                }
            }
            fixture.assert_clean(&story);
            assert!(mode != "made" || !target.exists(), "{story}: the target is left");
            assert!(mounter.reconcile().unwrap().is_empty(), "{story}: twice the same");
        }
    }
}

#[test]
fn a_process_may_die_at_any_step() {
    needs_mounts!();
    dies_at_any_step(Fixture::new, Step::ALL, Backend::Overlay);
}

/// Whoever dies over a base leaves two images pinned, or one that says it needs the other.
#[test]
fn a_process_may_die_at_any_step_over_a_base() {
    needs_mounts!();
    dies_at_any_step(Fixture::over_base, Step::ALL, Backend::Overlay);
}

/// There is an EROFS superblock and no overlay over it; to take it down in a wrong order crashes Linux 7.2, so after this a
/// guest looks at what the kernel has said.
#[test]
fn a_process_may_die_at_any_step_with_inode_share() {
    needs_mounts!();
    needs_inode_share!();
    let expected: Vec<_> = Step::ALL
        .iter()
        .copied()
        .filter(|step| !matches!(step, Step::ViewMade | Step::Viewed))
        .collect();
    dies_at_any_step(Fixture::shared, &expected, Backend::InodeShare);
}

/// With inode-share the last mount that goes takes along the superblocks of all images of the domain. Who dies between two
/// of them leaves one that nobody uses and no record of a mount leads to.
#[test]
fn a_process_may_die_while_superblocks_go_together() {
    needs_mounts!();
    needs_inode_share!();
    let fixture = Fixture::shared();
    let other = fixture.another();
    let mounter = fixture.mounter();
    let (here, there) = (read_only(&fixture, "here"), fixture.target("there"));
    let there = MountRequest::new(other, there);
    let leaving = [Step::Detached, Step::Unrooted, Step::Unmarked, Step::Forgotten, Step::Unpinned];
    for step in leaving {
        for remedy in ["reconcile", "umount", "mount", "mount the other"] {
            let story = format!("killed at {step:?}, then {remedy}");
            mounter.mount(&there).unwrap();
            mounter.mount(&here).unwrap();
            assert!(!umount(&mounter, &there.target).unpinned, "{story}");
            assert_eq!(mounter.pins().unwrap().len(), 2, "{story}");
            let mut child = start(&task(&fixture, "here", "leave", Some(step), 0));
            assert!(was_killed(child.wait().unwrap()), "{story}");
            let mount_again = |request: &MountRequest| {
                mounter.mount(request).unwrap_or_else(|error| panic!("{story}: {error:?}"));
                fixture.check_files(&request.target);
                umount(&mounter, &request.target);
            };
            match remedy {
                "umount" => match mounter.umount(&here.target, &UmountOptions::default()) {
                    Ok(_) | Err(MountError::NotMounted(_)) => {}
                    Err(error) => panic!("{story}: {error}"),
                },
                "mount" => mount_again(&here),
                "mount the other" => mount_again(&there),
                _ => {}
            }
            let done = mounter.reconcile().unwrap();
            assert!(done.failed.is_empty(), "{story}: {done:?}");
            fixture.assert_clean(&story);
            assert!(mounter.reconcile().unwrap().is_empty(), "{story}: twice the same");
        }
    }
}

/// A process that was killed while it looked whether a mount was in use had written that it was leaving; whoever came by
/// next detached it, forced, took away its changes, and with inode-share the superblocks below a reader, which is a bug of
/// the kernel's. Nobody writes such a record any more. What an earlier program left is mounted as before.
#[test]
fn killed_umount_keeps_busy_mount() {
    needs_mounts!();
    for (fixture, mode) in [(Fixture::new(), "read"), (Fixture::new(), "write")] {
        stays_while_it_is_busy(&fixture, mode);
    }
}

#[test]
fn killed_umount_keeps_busy_mount_with_inode_share() {
    needs_mounts!();
    needs_inode_share!();
    stays_while_it_is_busy(&Fixture::shared(), "read");
}

fn stays_while_it_is_busy(fixture: &Fixture, mode: &str) {
    let mounter = fixture.mounter();
    let request = request(mode, fixture.image, fixture.target(mode));
    let record = mounter.mount(&request).unwrap();
    let in_use = std::fs::File::open(&request.target).unwrap();
    if mode == "write" {
        std::fs::write(request.target.join("written"), "by its user").unwrap();
    }
    let path = fixture.path(&format!("run/mounts/{}.json", record.id));
    let text = std::fs::read_to_string(&path).unwrap();
    let leaving = text.replace("\"mounted\"", "\"leaving\"");
    assert_ne!(leaving, text);
    std::fs::write(&path, leaving).unwrap();
    assert!(mounter.reconcile().unwrap().is_empty());
    fixture.check_files(&request.target);
    if mode == "write" {
        let written = std::fs::read_to_string(request.target.join("written")).unwrap();
        assert_eq!(written, "by its user");
    }
    let error = mounter.mount(&request).unwrap_err();
    assert!(matches!(error, MountError::AlreadyMounted { .. }), "{error}");
    drop(in_use);
    umount(&mounter, &request.target);
    fixture.assert_clean(mode);
}

/// Who was killed after it had put away the changes of a mount, and before it asked whether others used them, left them to be
/// taken for unused: the next `umount` asked for the name that they had before. With inode-share that took superblocks
/// from below a reader.
#[test]
fn killed_umount_forgets_no_user_of_changes() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    let bound = fixture.target("bound");
    rustix::mount::mount_bind(&request.target, &bound).unwrap();
    let mut child = start(&task(&fixture, "one", "leave", Some(Step::UpperGone), 0));
    assert!(was_killed(child.wait().unwrap()));
    let unmounted = umount(&mounter, &request.target);
    assert!(unmounted.in_use, "{unmounted:?}");
    fixture.check_files(&bound);
    kernel::unmount(&bound, false).unwrap();
    assert_eq!(mounter.reconcile().unwrap().failed, [""; 0]);
    fixture.assert_clean("at the end");
}

/// A process that was to die at a step, and what it left.
struct Case<'a> {
    fixture: &'a Fixture,
    mode: &'a str,
    step: Step,
    /// Whether it got there.
    killed: bool,
    story: &'a str,
}

impl Case<'_> {
    /// Puts it right in one of three ways.
    fn put_right(&self, remedy: &str) {
        let Self { fixture, mode, step, killed, story } = *self;
        let (mounter, target) = (fixture.mounter(), fixture.path(mode));
        match remedy {
            "umount" => match mounter.umount(&target, &UmountOptions::default()) {
                Ok(_) | Err(MountError::NotMounted(_)) => {}
                Err(error) => panic!("{story}: {error}"),
            },
            "mount" => {
                let request = request(mode, fixture.image, target.clone());
                let result = mounter.mount(&request);
                // Killed at the very end of a mount, it is simply mounted.
                if step == Step::Recorded && killed {
                    let error = result.unwrap_err();
                    assert!(matches!(error, MountError::AlreadyMounted { .. }), "{error}");
                } else {
                    result.unwrap_or_else(|error| panic!("{story}: {error:?}"));
                }
                fixture.check_content(&target);
                umount(&mounter, &target);
            }
            _ => {
                // A mount that is complete is none of reconcile's business.
                let done = mounter.reconcile().unwrap();
                assert!(done.failed.is_empty(), "{story}: {done:?}");
                if step == Step::Recorded && killed {
                    assert!(done.is_empty(), "{story}: {done:?}");
                    umount(&mounter, &target);
                }
            }
        }
    }
}

/// Many processes mount and unmount one image at once. Whenever one of them looks, the image has one
/// EROFS superblock and no more; at the end nothing is left.
#[test]
fn many_processes_share_one_pin() {
    needs_mounts!();
    let fixture = Fixture::new();
    let names = ["a", "b", "c", "d"];
    let mut children: Vec<_> = names
        .iter()
        .map(|name| {
            fixture.target(name);
            let mode = if *name < "c" { "read" } else { "write" };
            start(&task(&fixture, name, mode, None, 25))
        })
        .collect();
    let mut most = 0;
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        let pins = fixture.mounts().iter().filter(|m| m.filesystem == "erofs").count();
        most = most.max(pins);
        fixture.mounter().reconcile().unwrap();
        fixture.mounter().list().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    for mut child in children {
        assert!(!was_killed(child.wait().unwrap()));
    }
    assert_eq!(most, 1, "EROFS mounts of one image at one moment");
    fixture.assert_clean("after all processes");
}

/// The same with processes that mount an image and others that mount its base: two superblocks at any moment, never more.
#[test]
fn many_processes_share_a_base() {
    needs_mounts!();
    let fixture = Fixture::over_base();
    let base = fixture.base();
    let names = ["a", "b", "c", "d"];
    let mut children: Vec<_> = names
        .iter()
        .map(|name| {
            fixture.target(name);
            let mode = if matches!(*name, "a" | "c") { "read" } else { "write" };
            let task = task(&fixture, name, mode, None, 25);
            let task = task.replace(&fixture.image.to_string(), &base.to_string());
            start(&if *name < "c" { task } else { self::task(&fixture, name, mode, None, 25) })
        })
        .collect();
    let mut most = 0;
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        let mounts = fixture.mounts();
        let pins = mounts.iter().filter(|m| m.filesystem == "erofs").count();
        most = most.max(pins);
        fixture.mounter().reconcile().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    for mut child in children {
        assert!(!was_killed(child.wait().unwrap()));
    }
    assert!(most <= 2, "{most} EROFS mounts of two images at one moment");
    fixture.mounter().reconcile().unwrap();
    fixture.assert_clean("after all processes");
}

/// Two processes want one target: one gets it, the other is told.
#[test]
fn one_target_has_one_mount() {
    needs_mounts!();
    let fixture = Fixture::new();
    let target = fixture.target("one");
    let won = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| match fixture.mounter().mount(&read_only(&fixture, "one")) {
                Ok(_) => _ = won.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
                Err(MountError::AlreadyMounted { .. }) => {}
                Err(error) => panic!("{error}"),
            });
        }
    });
    assert_eq!(won.into_inner(), 1);
    assert_eq!(fixture.mounts().iter().filter(|m| m.target == target).count(), 1);
    umount(&fixture.mounter(), &target);
    fixture.assert_clean("at the end");
}

/// While a mount waited for the lock of a stale record's image, another process put a record of its own image
/// there. That one's pin, root and upper directory were cleaned up under it.
#[test]
fn a_record_that_was_replaced_meanwhile_is_not_cleaned_up() {
    needs_mounts!();
    let fixture = Fixture::new();
    let (run, request) = (fixture.run_dir(), read_only(&fixture, "one"));
    fixture.mounter().mount(&request).unwrap();
    let stale = run.record(&run.id_of(&request.target)).unwrap().unwrap();
    kernel::unmount(&request.target, true).unwrap();
    let lock = run.lock_image(&stale.image).unwrap();
    let mut image = stale.image;
    image.0[0] ^= 1;
    let theirs = MountRecord { image, phase: MountPhase::Intent, mount: None, ..stale.clone() };
    let their_lock = run.lock_image(&theirs.image).unwrap();
    std::thread::scope(|scope| {
        let mount = scope.spawn(|| fixture.mounter().mount(&request));
        // Time to wait for the one lock, and for the other.
        std::thread::sleep(std::time::Duration::from_millis(200));
        run.write(&theirs, &their_lock).unwrap();
        drop(lock);
        std::thread::sleep(std::time::Duration::from_millis(200));
        let found = run.record(&stale.id).unwrap();
        assert_eq!(found.map(|record| record.image), Some(theirs.image));
        run.remove_record(&stale.id).unwrap();
        drop(their_lock);
        mount.join().unwrap().unwrap();
    });
    umount(&fixture.mounter(), &request.target);
    fixture.assert_clean("after both");
}

/// After a reboot the kernel has no mounts, but a run directory on disk and the store do.
#[test]
fn a_reboot_leaves_nothing_but_what_is_to_be_kept() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let (read, write) = (read_only(&fixture, "read"), writable(&fixture, "write"));
    let torn = writable(&fixture, "torn");
    let kept = MountRequest { access: Access::WritableKept, ..read_only(&fixture, "kept") };
    for request in [&read, &write, &torn] {
        mounter.mount(request).unwrap();
    }
    let kept_dir = mounter.mount(&kept).unwrap().upper.unwrap().dir;
    for mount in fixture.mounts().iter().rev() {
        kernel::unmount(&mount.target, true).unwrap();
    }
    let old_boot = |json: PathBuf| {
        let text = fs::read_to_string(&json).unwrap();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        assert!(text.contains(boot.trim()));
        fs::write(&json, text.replace(boot.trim(), "01234567-dead-beef")).unwrap();
    };
    for dir in ["run/mounts", "store/domains/default/roots/mount"] {
        fs::read_dir(fixture.path(dir)).unwrap().for_each(|e| old_boot(e.unwrap().path()));
    }
    assert!(mounter.live_images().unwrap().contains(&fixture.image), "its directory is there");
    // `umount --keep` took overlayfs' mark from changes that the power loss may have torn.
    let options = UmountOptions { keep_upper: true, ..UmountOptions::default() };
    let torn_dir = mounter.umount(&torn.target, &options).unwrap().upper.unwrap();
    let access = Access::WritableAt(torn_dir.clone());
    let error = mounter.mount(&MountRequest { access, ..torn }).unwrap_err();
    assert!(error.to_string().contains("may be damaged"), "{error}");
    mounter.discard_kept(&torn_dir).unwrap();
    let done = mounter.reconcile().unwrap();
    assert_eq!((done.mounts.len(), &done.failed), (3, &Vec::new()), "{done:?}");
    assert_eq!(mounter.live_images().unwrap(), [fixture.image], "the changes need it");
    fs::remove_dir_all(kept_dir).expect("it was to be kept");
    assert!(mounter.live_images().unwrap().is_empty());
    fixture.assert_clean("after the reboot");

    // The run directory is on a tmpfs as a rule, and gone.
    mounter.mount(&write).unwrap();
    for mount in fixture.mounts().iter().rev() {
        kernel::unmount(&mount.target, true).unwrap();
    }
    fs::remove_dir_all(fixture.path("run")).unwrap();
    fs::read_dir(fixture.path("store/domains/default/roots/mount"))
        .unwrap()
        .for_each(|e| old_boot(e.unwrap().path()));
    let done = mounter.reconcile().unwrap();
    assert_eq!((done.roots.len(), done.uppers), (1, 1), "of the superblock: {done:?}");
    fixture.assert_clean("after the reboot with a tmpfs");
}

/// Somebody uses umount(8), or moves a mount.
#[test]
fn mounts_that_others_took_away_or_moved_are_found() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let (one, two) = (read_only(&fixture, "one"), writable(&fixture, "two"));
    mounter.mount(&one).unwrap();
    mounter.mount(&two).unwrap();
    kernel::unmount_patiently(&one.target, false).unwrap();
    let moved = fixture.target("moved");
    rustix::mount::mount_move(&two.target, &moved).unwrap();
    let states: Vec<_> = mounter.list().unwrap().mounts.iter().map(|m| m.state).collect();
    assert_eq!(states, [MountState::Gone, MountState::Live]);
    assert_eq!(mounter.reconcile().unwrap().mounts.len(), 1);
    fixture.check_content(&moved);
    umount(&mounter, &two.target);
    fixture.assert_clean("at the end");
    // And mounted again where somebody unmounted it.
    mounter.mount(&one).unwrap();
    kernel::unmount_patiently(&one.target, false).unwrap();
    mounter.mount(&one).unwrap();
    fixture.check_content(&one.target);
    kernel::unmount_patiently(&one.target, false).unwrap();
    assert!(umount(&mounter, &one.target).was_gone);
    fixture.assert_clean("at the end");
}

/// A process in another mount namespace sees the records but not the mounts. It must not take them
/// for dead: their changes would be gone under a running container.
#[test]
fn mounts_of_another_namespace_are_left_alone_while_it_lives() {
    needs_mounts!();
    let fixture = Fixture::new();
    let request = writable(&fixture, "one");
    let (mounted, wait) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cofolio_sys::mount::unshare_mount_namespace().unwrap();
            fixture.mounter().mount(&request).unwrap();
            mounted.wait();
            wait.wait();
            fixture.check_content(&request.target);
        });
        mounted.wait();
        let mounter = fixture.mounter();
        assert_eq!(mounter.list().unwrap().mounts[0].state, MountState::OtherNamespace);
        assert!(mounter.reconcile().unwrap().is_empty());
        let error = mounter.umount(&request.target, &UmountOptions::default()).unwrap_err();
        assert!(matches!(error, MountError::OtherNamespace { .. }), "{error}");
        assert_eq!(mounter.live_images().unwrap(), [fixture.image]);
        wait.wait();
    });
    // The thread is gone, and its namespace with it, but for what the kernel still has to do.
    let done = reconcile_in_time(&fixture);
    assert_eq!(done.mounts.len(), 1, "{done:?}");
    fixture.assert_clean("after the namespace");
}

/// What there is to clean up after a thread that was joined: it takes a moment until it is gone from
/// `/proc`. Where the kernel does not number namespaces (before Linux 6.11), the inode number may pass to
/// one of another test, and it takes until that is gone.
fn reconcile_in_time(fixture: &Fixture) -> Reconciled {
    let mounter = fixture.mounter();
    let numbered = Kernel::new(Path::new("/")).unwrap().namespace.id.is_some();
    let patience = std::time::Duration::from_secs(if numbered { 5 } else { 60 });
    let started = std::time::Instant::now();
    loop {
        let done = mounter.reconcile().unwrap();
        if !done.is_empty() || started.elapsed() > patience {
            return done;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// The kernel gives the inode number of a namespace that is gone to the next one, at once. So the mounts
/// of a container that died passed for alive as long as the next container lived. Here the number is as
/// good as reused: the record says that its namespace was another with the same inode number.
#[test]
fn a_namespace_that_got_the_number_of_a_dead_one_is_told_apart() {
    needs_mounts!();
    if Kernel::new(Path::new("/")).unwrap().namespace.id.is_none() {
        let test = "a_namespace_that_got_the_number_of_a_dead_one_is_told_apart";
        return eprintln!("SKIP {test}: needs Linux 6.11");
    }
    let fixture = Fixture::new();
    let request = writable(&fixture, "one");
    let id = fixture.run_dir().id_of(&request.target);
    let path = fixture.path("run/mounts").join(format!("{id}.json"));
    let edit = |id: Option<u64>| {
        let mut record: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let fields = record.as_object_mut().unwrap();
        let old = fields.remove("namespace_id").and_then(|id| id.as_u64());
        fields.extend(id.map(|id| ("namespace_id".to_owned(), id.into())));
        fs::write(&path, record.to_string()).unwrap();
        old
    };
    let (mounted, wait) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cofolio_sys::mount::unshare_mount_namespace().unwrap();
            fixture.mounter().mount(&request).unwrap();
            mounted.wait();
            wait.wait();
        });
        mounted.wait();
        let mounter = fixture.mounter();
        let state = || mounter.list().unwrap().mounts[0].state;
        // A record of an earlier version names the inode only: alive as long as that is.
        let id = edit(None).unwrap();
        assert_eq!(state(), MountState::OtherNamespace);
        assert!(mounter.reconcile().unwrap().is_empty());
        edit(Some(id));
        assert_eq!(state(), MountState::OtherNamespace);
        assert!(mounter.reconcile().unwrap().is_empty());
        edit(Some(id - 1));
        assert_eq!(state(), MountState::Gone);
        assert_eq!(mounter.reconcile().unwrap().mounts.len(), 1);
        wait.wait();
    });
    // What the other one used stayed until it ended, which is a moment after its last thread.
    let writable = fixture.path("store/domains/default/writable");
    for _ in 0..100 {
        fixture.mounter().reconcile().unwrap();
        if fs::read_dir(&writable).unwrap().count() == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    fixture.assert_clean("after the namespace that has the number");
    // And our own, if it is we who got the number of a dead one.
    let mounter = fixture.mounter();
    mounter.mount(&request).unwrap();
    let id = edit(None).unwrap();
    assert_eq!(mounter.list().unwrap().mounts[0].state, MountState::Live);
    edit(Some(id - 1));
    assert_eq!(mounter.list().unwrap().mounts[0].state, MountState::Gone);
    edit(Some(id));
    umount(&mounter, &request.target);
    fixture.assert_clean("at the end");
}

#[test]
fn temporary_files_and_damaged_records_harm_nobody() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = read_only(&fixture, "one");
    mounter.mount(&request).unwrap();
    let dir = fixture.path("run/mounts");
    for aside in ["aside", "attached"] {
        fs::write(fixture.path(&format!("run/{aside}/0123abcd-0123456789abcdef.7f")), "{").unwrap();
    }
    fs::write(dir.join("0123abcd-0123456789abcdef.json"), "{").unwrap();
    let listed = mounter.list().unwrap();
    assert_eq!((listed.mounts.len(), listed.damaged.len()), (1, 1));
    let error = mounter.live_images().unwrap_err();
    assert_eq!(error.code(), Code::Corrupt, "it might name any image");
    let done = mounter.reconcile().unwrap();
    assert_eq!((done.leftovers, done.failed.len()), (2, 1), "{done:?}");
    fixture.check_content(&request.target);
    fs::remove_file(dir.join("0123abcd-0123456789abcdef.json")).unwrap();
    umount(&mounter, &request.target);
    fixture.assert_clean("at the end");
}
