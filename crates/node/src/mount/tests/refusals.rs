//! What cannot be mounted is refused in words, and nothing of it stays.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::symlink;

use super::fixture::{Fixture, needs_mounts};
use super::*;

/// Mounting fails in the way that `expected` accepts, and leaves nothing.
fn refused(fixture: &Fixture, request: &MountRequest, expected: impl Fn(&MountError) -> bool) {
    let error = fixture.mounter().mount(request).unwrap_err();
    assert!(expected(&error), "{error:?}");
    fixture.assert_clean(&error.to_string());
}

#[test]
fn damaged_content_is_not_mounted() {
    needs_mounts!();
    let fixture = Fixture::new();
    let request = read_only(&fixture, "one");
    if fixture.domain.protection().verity {
        eprintln!("SKIP damaged_content_is_not_mounted: fs-verity keeps this test from damaging");
        return;
    }
    let path = fixture.object_path(3);
    let whole = fs::read(&path).unwrap();
    let put = |content: &[u8]| {
        let _ = fs::remove_file(&path);
        fs::write(&path, content).unwrap();
    };
    // Under overlayfs this would read short, without an error.
    put(&whole[..whole.len() - 1]);
    refused(
        &fixture,
        &request,
        |e| matches!(e, MountError::Damaged { reason, .. } if reason.contains(" bytes instead of ")),
    );
    fs::remove_file(&path).unwrap();
    refused(
        &fixture,
        &request,
        |e| matches!(e, MountError::Damaged { reason, .. } if reason.ends_with(" is missing")),
    );
    // Of the right size: only hashing tells.
    let mut altered = whole.clone();
    altered[10] ^= 1;
    put(&altered);
    let verified = MountRequest { check: Check::Verify, ..request.clone() };
    refused(&fixture, &verified, |e| matches!(e, MountError::Damaged { .. }));
    put(&whole);
    let record = fixture.mounter().mount(&verified).unwrap();
    assert!(record.verified);
    umount(&fixture.mounter(), &request.target);

    let path = fixture.domain.image_path(&fixture.image).unwrap();
    let mut image = fs::read(&path).unwrap();
    image[1500] ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, image).unwrap();
    refused(
        &fixture,
        &request,
        |e| matches!(e, MountError::Damaged { reason, .. } if reason.contains("altered")),
    );
    assert_eq!(fixture.mounter().mount(&request).unwrap_err().code(), Code::Corrupt);
}

/// Somebody asks for an image by its digest while it is mounted: what the store holds under that name is
/// measured then too, and not only when the first mount was made.
#[test]
fn an_image_asked_for_by_digest_is_measured_although_it_is_mounted() {
    needs_mounts!();
    let fixture = Fixture::new();
    if fixture.domain.protection().verity {
        eprintln!("SKIP {}: fs-verity keeps this test from damaging", "measured_although_mounted");
        return;
    }
    let mounter = fixture.mounter();
    let (first, second) = (read_only(&fixture, "one"), read_only(&fixture, "two"));
    let measured = MountRequest { check: Check::Measure, ..second };
    mounter.mount(&first).unwrap();
    mounter.mount(&measured).unwrap();
    umount(&mounter, &measured.target);
    let path = fixture.domain.image_path(&fixture.image).unwrap();
    let mut image = fs::read(&path).unwrap();
    image[1500] ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, image).unwrap();
    let error = mounter.mount(&measured).unwrap_err();
    assert!(
        matches!(&error, MountError::Damaged { reason, .. } if reason.contains("altered")),
        "{error:?}"
    );
    umount(&mounter, &first.target);
    fixture.assert_clean("an altered image that was mounted");
}

#[test]
fn fs_verity_that_is_required_and_missing_is_the_machines_fault() {
    needs_mounts!();
    let fixture = Fixture::new();
    let required = MountRequest { check: Check::RequireVerity, ..read_only(&fixture, "one") };
    if fixture.domain.protection().verity {
        assert!(fixture.mounter().mount(&required).unwrap().verity);
        umount(&fixture.mounter(), &required.target);
        return;
    }
    refused(&fixture, &required, |e| {
        e.code() == Code::Unsupported && e.to_string().contains("no fs-verity")
    });
}

#[test]
fn an_image_that_is_not_there_is_the_callers_mistake() {
    needs_mounts!();
    let fixture = Fixture::new();
    let request =
        MountRequest { image: Digest([9; 32]), create_target: true, ..read_only(&fixture, "one") };
    refused(&fixture, &request, |e| {
        matches!(e, MountError::Store(Error::NoSuchRef(_))) && e.code() == Code::NotFound
    });
}

#[test]
fn targets_that_cannot_be_are_refused() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let at = |target: PathBuf, create_target| MountRequest {
        create_target,
        ..MountRequest::new(fixture.image, target)
    };
    fs::write(fixture.path("file"), "").unwrap();
    let is_target = |e: &MountError| matches!(e, MountError::Target { .. });
    refused(&fixture, &at(fixture.path("file"), true), is_target);
    let is_missing = |e: &MountError| {
        matches!(e, MountError::TargetMissing { .. }) && e.code() == Code::NotFound
    };
    refused(&fixture, &at(fixture.path("missing"), false), is_missing);
    refused(&fixture, &at(fixture.path("missing/below"), true), is_target);
    refused(&fixture, &at("/".into(), false), is_target);
    use std::os::unix::ffi::OsStringExt as _;
    let name = std::ffi::OsString::from_vec(fixture.path("\u{e9}").into_os_string().into_vec());
    let mut name = name.into_vec();
    name.pop();
    refused(&fixture, &at(std::ffi::OsString::from_vec(name).into(), true), is_target);

    // Made for the mount, it goes with it; a link to it leads to the same mount.
    let request = at(fixture.path("made"), true);
    mounter.mount(&request).unwrap();
    symlink(&request.target, fixture.path("link")).unwrap();
    for target in [request.target.clone(), fixture.path("link")] {
        let error = mounter.mount(&at(target, false)).unwrap_err();
        assert!(matches!(error, MountError::AlreadyMounted { .. }), "{error}");
    }
    umount(&mounter, &fixture.path("link"));
    assert!(!request.target.exists());
    let error = mounter.umount(&request.target, &UmountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::NotMounted(_)), "{error}");
    fixture.assert_clean("at the end");
}

#[test]
fn a_mount_that_is_covered_or_busy_stays() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    let record = mounter.mount(&request).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &request.target, "tmpfs", flags, None).unwrap();
    let error = mounter.umount(&request.target, &UmountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::Covered { .. }), "{error}");
    assert_eq!(mounter.list().unwrap().mounts[0].state, MountState::Covered);
    assert!(mounter.reconcile().unwrap().is_empty());
    kernel::unmount_patiently(&request.target, false).unwrap();

    let open = fs::File::create(request.target.join("new")).unwrap();
    let error = mounter.umount(&request.target, &UmountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::Busy { .. }), "{error}");
    assert_eq!(mounter.list().unwrap().mounts[0].record, record, "as it was");
    drop(open);
    umount(&mounter, &request.target);
    fixture.assert_clean("at the end");
}

#[test]
fn a_label_needs_selinux() {
    needs_mounts!();
    if Path::new("/sys/fs/selinux/enforce").exists() {
        eprintln!("SKIP a_label_needs_selinux: this kernel has SELinux on");
        return;
    }
    let fixture = Fixture::new();
    let label = Some("system_u:object_r:container_file_t:s0".to_owned());
    // What failed with changes that were to be kept was listed as kept changes.
    for access in [Access::ReadOnly, Access::WritableKept] {
        let request = MountRequest {
            access,
            options: MountOptions { label: label.clone(), ..MountOptions::default() },
            ..read_only(&fixture, "one")
        };
        refused(&fixture, &request, |e| {
            let no_labels = matches!(e, MountError::NoFeature { feature: "security labels", .. });
            no_labels && e.code() == Code::Unsupported
                || matches!(e, MountError::Upper { problem, .. } if problem.contains("context"))
        });
    }
}

#[test]
fn a_directory_that_cannot_keep_changes_is_named() {
    needs_mounts!();
    let fixture = Fixture::new();
    let dir = fixture.target("memory");
    let flags = rustix::mount::MountFlags::empty();
    // /proc can hold no directory at all.
    rustix::mount::mount("proc", &dir, "proc", flags, None).unwrap();
    let access = Access::WritableAt(dir.join("self"));
    let request = MountRequest { access, ..read_only(&fixture, "one") };
    let error = fixture.mounter().mount(&request).unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    // Lazily: a process that another test starts at this moment has our descriptors for an instant.
    kernel::unmount(&dir, true).unwrap();
    fixture.assert_clean("at the end");
}

/// `--upper STORE/domains/default/objects` was taken, and the container's files lay among the objects.
#[test]
fn nothing_is_changed_in_the_store() {
    needs_mounts!();
    let fixture = Fixture::new();
    for place in ["store", "store/domains/default/objects", "store/new"] {
        let access = Access::WritableAt(fixture.path(place));
        let request = MountRequest { access, ..writable(&fixture, "one") };
        refused(&fixture, &request, |error| matches!(error, MountError::Upper { .. }));
    }
    assert!(!fixture.path("store/new").exists());
}

/// A directory of a server that had ended was called a wrong argument.
#[test]
fn a_target_that_a_server_fails_to_show_is_no_wrong_argument() {
    needs_mounts!();
    let fixture = Fixture::new();
    let at = fixture.target("above");
    let Ok(server) = fs::File::options().read(true).write(true).open("/dev/fuse") else {
        let test = "a_target_that_a_server_fails_to_show_is_no_wrong_argument";
        return eprintln!("SKIP {test}: there is no /dev/fuse");
    };
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount("ended", &at, "fuse", rustix::mount::MountFlags::empty(), &*options)
        .unwrap();
    drop(server);
    for target in ["above/below", "above/below/new"] {
        let request = MountRequest::new(fixture.image, fixture.path(target));
        let request = MountRequest { create_target: true, ..request };
        let error = fixture.mounter().mount(&request).unwrap_err();
        let MountError::Io { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.kind(), std::io::ErrorKind::NotConnected);
    }
    kernel::unmount(&at, true).unwrap();
    fixture.assert_clean("at the end");
}

/// A mount at `/proc` was made, and then neither Cofolio nor umount(8) worked; one at the store's `refs` made gc
/// remove all images.
#[test]
fn a_mount_hides_nothing_that_is_needed() {
    needs_mounts!();
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("run")).unwrap();
    let own = ["run", "store", "store/domains/default/refs", ""].map(|name| fixture.path(name));
    for place in
        ["/", "/proc", "/proc/sys", "/sys", "/dev"].map(PathBuf::from).into_iter().chain(own)
    {
        let request = MountRequest::new(fixture.image, &place);
        refused(&fixture, &request, |error| matches!(error, MountError::Target { .. }));
    }
}

/// A writable mount from a read-only store failed and left its record, which stopped the next mount at this
/// place, too.
#[test]
fn a_read_only_store_refuses_changes_of_its_own_only() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let request = writable(&fixture, "one");
    mounter.mount(&request).unwrap();
    umount(&mounter, &request.target);
    let store = fixture.path("store");
    rustix::mount::mount_bind(&store, &store).unwrap();
    let flags = rustix::mount::MountFlags::BIND | rustix::mount::MountFlags::RDONLY;
    rustix::mount::mount_remount(&store, flags, "").unwrap();
    let error = mounter.mount(&request).unwrap_err();
    assert!(matches!(error, MountError::ReadOnlyStore(_)), "{error:?}");
    let access = Access::WritableAt(fixture.path("changes"));
    mounter.mount(&MountRequest { access, ..request.clone() }).unwrap();
    umount(&mounter, &request.target);
    kernel::unmount(&store, false).unwrap();
    fixture.assert_clean("at the end");
}

/// Without its `pin.json`, an image over a base was mounted again without the base's files.
#[test]
fn a_lost_pin_record_hides_no_file() {
    needs_mounts!();
    let fixture = Fixture::over_base();
    let mounter = fixture.mounter();
    let (one, two) = (read_only(&fixture, "one"), writable(&fixture, "two"));
    mounter.mount(&one).unwrap();
    fs::remove_file(fixture.run_dir().image_dir("default", &fixture.image).join("pin.json"))
        .unwrap();
    match mounter.mount(&two) {
        Ok(_) => fixture.check_content(&two.target),
        Err(error) => assert!(matches!(error, MountError::State { .. }), "{error}"),
    }
    let _ = mounter.umount(&two.target, &UmountOptions::default());
    umount(&mounter, &one.target);
    mounter.mount(&two).unwrap();
    fixture.check_content(&two.target);
    umount(&mounter, &two.target);
    mounter.reconcile().unwrap();
    fixture.assert_clean("at the end");
}
