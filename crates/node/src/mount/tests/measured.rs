//! What a measured mount shows is what the image shows, whatever the store says of its base.

use cofolio_erofs::tree::{Content, Tree, delta};
use cofolio_erofs::write::{WriteOptions, write, write_layer};
use cofolio_store::{Base, ImportOptions, Publish};

use super::fixture::{Fixture, needs_mounts};
use super::*;
use cofolio_image::compose::contents::open_image;

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

/// An image over its base as it should be, and that over one of its own, so that it shows `shown`.
fn over_two(shown: impl Fn(&Fixture, &Digest) -> Tree) -> Fixture {
    let fixture = Fixture::over_base();
    let base = fixture.base();
    let mut lowest = tree(&fixture, &base);
    let sub = lowest.resolve(b"sub").unwrap();
    assert!(lowest.unlink(sub, b"file3"));
    put_over(&fixture, base, &shown(&fixture, &base), &lowest, &WriteOptions::default());
    fixture
}

fn measured(fixture: &Fixture, name: &str) -> MountRequest {
    MountRequest { measure: true, ..read_only(fixture, name) }
}

fn erofs(fixture: &Fixture) -> usize {
    fixture.mounts().iter().filter(|mount| mount.filesystem == "erofs").count()
}

fn shows_altered(target: &Path, file: &str) -> bool {
    fs::read(target.join(file)).unwrap() == b"altered"
}

/// Mounting is refused because the image is mounted over this base, and nothing else is there afterwards.
fn refused(fixture: &Fixture, request: &MountRequest, over: Digest, why: &str) {
    let error = fixture.mounter().mount(request).unwrap_err();
    assert!(
        matches!(&error, MountError::BaseNotProven { image, base, .. }
            if *image == fixture.image && *base == over),
        "{error:?}"
    );
    assert!(error.to_string().contains(why), "{error}");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(fs::read_dir(&request.target).unwrap().count(), 0);
}

/// Proof costs no sharing: where all is as it should be, a measured mount is over its base, and over that one's.
#[test]
fn a_base_that_is_proven_is_mounted_over() {
    needs_mounts!();
    let (one, two) = (Fixture::over_base(), over_two(tree));
    for (fixture, layers) in [(&one, 2), (&two, 3)] {
        let mounter = fixture.mounter();
        let (first, second) = (measured(fixture, "one"), measured(fixture, "two"));
        mounter.mount(&first).unwrap();
        assert_eq!(erofs(fixture), layers);
        // Once it is there it is proven as it was made, and not as the store says it would be made now.
        let base = tree(fixture, &fixture.base());
        let shown = altered(fixture, &fixture.image, b"small");
        put_over(fixture, fixture.image, &shown, &base, &WriteOptions::default());
        mounter.mount(&second).unwrap();
        for target in [&first.target, &second.target] {
            fixture.check_content(target);
            umount(&mounter, target);
        }
        fixture.assert_clean("over its base");
    }
}

/// Whoever could write to the store could give an image another delta, with the digest that its record named it by, and
/// who asked for the image by its digest was shown that.
#[test]
fn a_delta_of_another_image_is_not_mounted_where_the_image_is_measured() {
    needs_mounts!();
    let fixture = with_altered_delta();
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "one");
    mounter.mount(&plain).unwrap();
    assert!(shows_altered(&plain.target, "small"), "nobody asked");
    umount(&mounter, &plain.target);
    let verified = MountRequest { verify: true, ..plain.clone() };
    let required = MountRequest { require_verity: true, ..plain.clone() };
    for request in [measured(&fixture, "one"), verified, required] {
        if request.require_verity && !fixture.domain.protection().verity {
            continue;
        }
        mounter.mount(&request).unwrap();
        fixture.check_content(&request.target);
        assert_eq!(erofs(&fixture), 1, "from its own metadata image");
        // Who does not ask gets what is there.
        let other = read_only(&fixture, "two");
        mounter.mount(&other).unwrap();
        fixture.check_content(&other.target);
        umount(&mounter, &other.target);
        assert!(umount(&mounter, &request.target).unpinned);
        fixture.assert_clean("without the base");
    }
}

/// The same, one base further down: what is over the altered one is not what it seems either.
#[test]
fn a_base_over_an_altered_base_is_not_mounted_over() {
    needs_mounts!();
    let fixture = over_two(|fixture, base| altered(fixture, base, b"sub/file1"));
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "one");
    mounter.mount(&plain).unwrap();
    assert_eq!(erofs(&fixture), 3);
    assert!(shows_altered(&plain.target, "sub/file1"), "nobody asked");
    let lowest = fixture.domain.base_of(&fixture.base()).unwrap().unwrap().base;
    refused(&fixture, &measured(&fixture, "two"), lowest, "should be");
    umount(&mounter, &plain.target);
    fixture.assert_clean("after the altered one");

    // The base itself is as it should be, and so it is mounted from its own metadata image.
    let request = measured(&fixture, "one");
    mounter.mount(&request).unwrap();
    fixture.check_content(&request.target);
    assert_eq!(erofs(&fixture), 2);
    umount(&mounter, &request.target);

    // While another uses the base as it is, the image does without.
    let below = MountRequest { image: fixture.base(), ..read_only(&fixture, "below") };
    mounter.mount(&below).unwrap();
    assert!(shows_altered(&below.target, "sub/file1"));
    mounter.mount(&request).unwrap();
    fixture.check_content(&request.target);
    assert_eq!(erofs(&fixture), 3, "base, its base, and the image");
    umount(&mounter, &below.target);
    assert_eq!(erofs(&fixture), 1);
    umount(&mounter, &request.target);
    fixture.assert_clean("after all");
}

/// A base that our reader and the kernel could read differently is no ground to build a proof on.
#[test]
fn a_base_that_is_written_in_another_way_is_not_mounted_over() {
    needs_mounts!();
    let fixture = Fixture::over_base();
    let mounter = fixture.mounter();
    let base = tree(&fixture, &fixture.base());
    let options = WriteOptions { min_version: 1, max_version: 1 };
    put_over(&fixture, fixture.image, &tree(&fixture, &fixture.image), &base, &options);
    for (request, layers) in [(read_only(&fixture, "one"), 2), (measured(&fixture, "one"), 1)] {
        mounter.mount(&request).unwrap();
        fixture.check_content(&request.target);
        assert_eq!(erofs(&fixture), layers);
        umount(&mounter, &request.target);
    }
    fixture.assert_clean("at the end");
}

/// An image that is mounted already is so for all its mounts: then who asks for proof is refused, and those who did not ask
/// go on. The store may have been put right since.
#[test]
fn an_image_that_is_mounted_over_an_altered_delta_is_refused() {
    needs_mounts!();
    let fixture = with_altered_delta();
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "one");
    mounter.mount(&plain).unwrap();
    let request = measured(&fixture, "two");
    refused(&fixture, &request, fixture.base(), "should be");
    let base = tree(&fixture, &fixture.base());
    let shown = tree(&fixture, &fixture.image);
    put_over(&fixture, fixture.image, &shown, &base, &WriteOptions::default());
    refused(&fixture, &request, fixture.base(), "should be");
    assert!(shows_altered(&plain.target, "small"));
    assert!(umount(&mounter, &plain.target).unpinned);
    mounter.mount(&request).unwrap();
    fixture.check_content(&request.target);
    assert_eq!(erofs(&fixture), 2);
    umount(&mounter, &request.target);
    fixture.assert_clean("at the end");
}

/// A process that asks for no proof has the base held, and one that asks pins the image first: over what it has proven.
#[test]
fn a_base_that_another_process_holds_is_proven_too() {
    needs_mounts!();
    let fixture = with_altered_delta();
    let mounter = fixture.mounter();
    mounter.run.prepare().unwrap();
    mounter.hold_base(&fixture.domain, &fixture.image, None).unwrap();
    assert_eq!(erofs(&fixture), 1);
    let request = measured(&fixture, "one");
    mounter.mount(&request).unwrap();
    fixture.check_content(&request.target);
    assert_eq!(erofs(&fixture), 1, "the base is gone, the image is there");
    umount(&mounter, &request.target);
    fixture.assert_clean("at the end");
}

/// Of two processes that are about to pin an image one asks for proof, and finds the base over another that is none. It
/// gives back only what it took: else the base would go from below the image that the other one pins meanwhile.
#[test]
fn a_base_that_another_process_holds_stays_held() {
    needs_mounts!();
    let fixture = over_two(|fixture, base| altered(fixture, base, b"sub/file1"));
    let (mounter, image) = (fixture.mounter(), fixture.image);
    mounter.run.prepare().unwrap();
    mounter.hold_base(&fixture.domain, &image, None).unwrap();
    mounter.hold_base(&fixture.domain, &image, Some(&Proofs::of(image))).unwrap();
    let lock = mounter.run.prepare_and_lock(&image).unwrap();
    let pinned = mounter.pinned(&fixture.domain, &image, &lock, None).unwrap();
    assert_eq!(pinned.layers.len(), 3);
    drop((pinned, lock));
    // Bases become idle from the top down.
    for _ in 0..3 {
        mounter.reconcile().unwrap();
    }
    fixture.assert_clean("at the end");
}

/// Until deltas were noted nobody can tell what was mounted; nor where the note is gone.
#[test]
fn a_mount_that_does_not_say_of_which_delta_it_is_is_not_proven() {
    needs_mounts!();
    let fixture = Fixture::over_base();
    let mounter = fixture.mounter();
    let plain = read_only(&fixture, "one");
    mounter.mount(&plain).unwrap();
    let path = fixture.run_dir().image_dir("default", &fixture.image).join("pin.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(record.as_object_mut().unwrap().remove("delta").is_some());
    fs::write(&path, record.to_string()).unwrap();
    let request = measured(&fixture, "two");
    refused(&fixture, &request, fixture.base(), "no delta on record");
    mounter.mount(&MountRequest { measure: false, ..request.clone() }).unwrap();
    fixture.check_content(&request.target);
    umount(&mounter, &request.target);
    fs::remove_file(&path).unwrap();
    let error = mounter.mount(&request).unwrap_err();
    assert!(matches!(error, MountError::State { .. }), "{error:?}");
    fs::write(&path, text).unwrap();
    umount(&mounter, &plain.target);
    mounter.mount(&request).unwrap();
    umount(&mounter, &request.target);
    fixture.assert_clean("at the end");
}
