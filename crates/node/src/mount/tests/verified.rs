//! Verified mounts, where the store has no fs-verity.

use super::fixture::{Fixture, needs_mounts};
use super::*;

fn without_verity(test: &str) -> Option<Fixture> {
    let fixture = Fixture::new();
    if fixture.domain.protection().verity {
        eprintln!("SKIP {test}: the kernel protects objects here");
        return None;
    }
    Some(fixture)
}

/// A repair replaced an altered object while the image was mounted. `mount --verify` hashed the new
/// object and called the mount verified, but the mount shared the overlay of the old one, and served
/// the altered bytes.
#[test]
fn a_verified_mount_serves_the_bytes_that_were_hashed() {
    needs_mounts!();
    let Some(fixture) = without_verity("a_verified_mount_serves_the_bytes_that_were_hashed") else {
        return;
    };
    let mounter = fixture.mounter();
    let path = fixture.object_path(0);
    let sound = fs::read(&path).unwrap();
    let mut altered = sound.clone();
    altered[10] ^= 1;
    // A repair renames a new file into the place.
    let put = |content: &[u8]| {
        let _ = fs::remove_file(&path);
        fs::write(&path, content).unwrap();
    };
    put(&altered);
    let old = read_only(&fixture, "old");
    mounter.mount(&old).unwrap();
    assert_eq!(fs::read(old.target.join("sub/file0")).unwrap(), altered);
    put(&sound);
    let new = MountRequest { check: Check::Verify, ..read_only(&fixture, "new") };
    let sparse = MountRequest {
        access: Access::Writable,
        writable_dirs: vec!["/empty".into()],
        ..MountRequest { check: Check::Verify, ..read_only(&fixture, "sparse") }
    };
    for request in [&new, &sparse] {
        assert!(mounter.mount(request).unwrap().verified);
        fixture.check_content(&request.target);
        umount(&mounter, &request.target);
    }
    // The same place again, where a verified mount has looked up a file that was altered later.
    mounter.mount(&new).unwrap();
    put(&altered);
    fs::File::open(new.target.join("sub/file0")).unwrap();
    umount(&mounter, &new.target);
    let refused = mounter.mount(&new).unwrap_err();
    assert!(matches!(refused, MountError::Damaged { .. }), "{refused}");
    put(&sound);
    mounter.mount(&new).unwrap();
    fixture.check_content(&new.target);
    umount(&mounter, &new.target);
    assert_eq!(fs::read(old.target.join("sub/file0")).unwrap(), altered, "as it was");
    umount(&mounter, &old.target);
    fixture.assert_clean("at the end");
}

/// A repair replaced the metadata image while the image was mounted. Measured and verified mounts
/// shared the old file, which nobody had looked at again.
#[test]
fn a_measured_mount_shares_no_file_that_was_replaced() {
    needs_mounts!();
    let Some(fixture) = without_verity("a_measured_mount_shares_no_file_that_was_replaced") else {
        return;
    };
    let mounter = fixture.mounter();
    let old = read_only(&fixture, "old");
    mounter.mount(&old).unwrap();
    let path = fixture.domain.image_path(&fixture.image).unwrap();
    let content = fs::read(&path).unwrap();
    let aside = path.with_extension("aside");
    fs::write(&aside, content).unwrap();
    fs::rename(&aside, &path).unwrap();
    for check in [Check::Measure, Check::Verify] {
        let new = MountRequest { check, ..read_only(&fixture, "new") };
        let refused = mounter.mount(&new).unwrap_err();
        assert!(matches!(refused, MountError::Replaced { users: 1, .. }), "{refused}");
        assert!(refused.to_string().contains(&fixture.image.to_string()), "{refused}");
    }
    umount(&mounter, &old.target);
    let new = MountRequest { check: Check::Verify, ..read_only(&fixture, "new") };
    mounter.mount(&new).unwrap();
    umount(&mounter, &new.target);
    fixture.assert_clean("at the end");
}
