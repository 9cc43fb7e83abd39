//! What a measured mount shows is what the image shows, whatever the store says of its base.

use cofolio_erofs::tree::{Content, Tree, delta};
use cofolio_erofs::write::{WriteOptions, write, write_layer};
use cofolio_store::{Base, ImportOptions, Publish};

use super::fixture::{Fixture, needs_mounts};
use super::*;
use cofolio_image::compose::named_objects::open_image;

/// An image's tree.
fn tree(fixture: &Fixture, image: &Digest) -> Tree {
    let file = fixture.domain.open_image(image).unwrap();
    open_image(&file).unwrap().to_tree().unwrap()
}

/// The same with another content in one file.
fn altered(fixture: &Fixture, image: &Digest, path: &[u8]) -> Tree {
    let mut tree = tree(fixture, image);
    let file = tree.resolve(path).unwrap();
    tree.set_content(file, Content::Inline(b"altered")).unwrap();
    tree
}

/// Puts an image over a base, in the store, so that it shows another tree. Every file has the digest that it is named by.
fn put_over(
    fixture: &Fixture,
    image: Digest,
    shown: &Tree,
    base: &Tree,
    options: &WriteOptions,
) -> Base {
    let staging = fixture.domain.begin_import(ImportOptions::default()).unwrap();
    let mut writer = staging.image_writer().unwrap();
    write(base, options, &mut writer).unwrap();
    let below = writer.finish().unwrap();
    let mut writer = staging.image_writer().unwrap();
    write_layer(&delta(base, shown).unwrap().unwrap().tree, &mut writer).unwrap();
    let delta = writer.finish().unwrap();
    let record = Base { base: below, delta, chain_id: "sha256:base".to_owned() };
    let publish = Publish { bases: vec![(image, record.clone())], ..Publish::default() };
    staging.commit(&publish, std::iter::empty()).unwrap();
    record
}

/// An image whose base is as it should be, and whose delta is that of another image.
fn with_altered_delta() -> Fixture {
    let fixture = Fixture::over_base();
    let shown = altered(&fixture, &fixture.image, b"small");
    let base = tree(&fixture, &fixture.base());
    put_over(&fixture, fixture.image, &shown, &base, &WriteOptions::default());
    fixture
}

fn measured(fixture: &Fixture, name: &str) -> MountRequest {
    MountRequest { check: Check::Measure, ..read_only(fixture, name) }
}

fn erofs(fixture: &Fixture) -> usize {
    fixture.mounts().iter().filter(|mount| mount.filesystem == "erofs").count()
}

fn shows_altered(target: &Path, file: &str) -> bool {
    fs::read(target.join(file)).unwrap() == b"altered"
}

/// Whoever could write to the store could give an image the delta of another one, with the digest that
/// its record named it by, and a mount that was asked for by digest showed that.
#[test]
fn a_measured_mount_shows_the_images_own_metadata() {
    needs_mounts!();
    let fixture = with_altered_delta();
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "one");
    mounter.mount(&plain).unwrap();
    assert!(shows_altered(&plain.target, "small"), "nobody asked");
    umount(&mounter, &plain.target);
    for check in [Check::Measure, Check::Verify, Check::RequireVerity] {
        if check == Check::RequireVerity && !fixture.domain.protection().verity {
            continue;
        }
        let request = MountRequest { check, ..plain.clone() };
        mounter.mount(&request).unwrap();
        fixture.check_content(&request.target);
        assert_eq!(erofs(&fixture), 1, "from its own metadata image");
        // A mount without a check shares it.
        let other = read_only(&fixture, "two");
        mounter.mount(&other).unwrap();
        fixture.check_content(&other.target);
        umount(&mounter, &other.target);
        assert!(umount(&mounter, &request.target).unpinned);
        fixture.assert_clean("without the base");
    }
}

/// The image is mounted over a base already, which nobody has proven to show the same.
#[test]
fn a_measured_mount_is_beside_one_over_a_base() {
    needs_mounts!();
    let fixture = with_altered_delta();
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "one");
    let idmap: IdMap = "0:100000:65536".parse().unwrap();
    let requests = [
        measured(&fixture, "two"),
        MountRequest { access: Access::Writable, ..measured(&fixture, "three") },
        MountRequest { options: with_ids(&idmap), ..measured(&fixture, "four") },
    ];
    for first in ["plain", "measured"] {
        mounter.mount(&plain).unwrap();
        for request in &requests {
            mounter.mount(request).unwrap();
            fixture.check_content(&request.target);
        }
        assert!(shows_altered(&plain.target, "small"));
        assert_eq!(erofs(&fixture), 3, "the base, what is over it, and the image");
        assert!(mounter.reconcile().unwrap().is_empty());
        let mut targets: Vec<_> = requests.iter().map(|request| &request.target).collect();
        targets.insert(if first == "plain" { 0 } else { targets.len() }, &plain.target);
        let unpinned: Vec<_> =
            targets.iter().map(|target| umount(&mounter, target).unpinned).collect();
        assert_eq!(unpinned, [false, false, false, true]);
        fixture.assert_clean(first);
    }
}

/// Where the note is gone nobody can tell what is mounted.
#[test]
fn a_measured_mount_of_what_nobody_knows_is_refused() {
    needs_mounts!();
    let fixture = Fixture::new();
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "one");
    mounter.mount(&plain).unwrap();
    let path = fixture.run_dir().image_dir("default", &fixture.image).join("pin.json");
    fs::remove_file(&path).unwrap();
    let error = mounter.mount(&measured(&fixture, "two")).unwrap_err();
    assert!(matches!(error, MountError::State { .. }), "{error:?}");
    umount(&mounter, &plain.target);
    fixture.assert_clean("at the end");
}

/// A repair replaced an altered object while the image was mounted. `mount --verify` hashed the new
/// object and called the mount verified, but the mount shared the overlay of the old one, and served
/// the altered bytes.
#[test]
fn a_verified_mount_serves_the_bytes_that_were_hashed() {
    const TEST: &str = "a_verified_mount_serves_the_bytes_that_were_hashed";
    needs_mounts!();
    let fixture = Fixture::new();
    if fixture.domain.protection().verity {
        eprintln!("SKIP {TEST}: the kernel protects objects here");
        return;
    }
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
    const TEST: &str = "a_measured_mount_shares_no_file_that_was_replaced";
    needs_mounts!();
    let fixture = Fixture::new();
    if fixture.domain.protection().verity {
        eprintln!("SKIP {TEST}: the kernel protects objects here");
        return;
    }
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
