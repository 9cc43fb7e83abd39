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
