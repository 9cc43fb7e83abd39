//! The store on a real directory, used as its callers use it.

mod common;

use std::io::{Read, Write};

use cofolio_store::{
    Digest, Error, FileKind, FileName, ImportOptions, InitOptions, Layer, Publish, Ref, Root,
    RootKind, Store, verity,
};
use common::{Scratch, content, image_of};

#[test]
fn an_import_becomes_visible_as_a_whole() {
    let scratch = Scratch::new("visible");
    let store = scratch.store();
    let domain = store.domain("default").unwrap();
    let staging = domain.begin_import(ImportOptions::default()).unwrap();

    let small = staging.put_object(b"small").unwrap();
    assert!(small.new);
    assert!(!staging.put_object(b"small").unwrap().new);
    let big_content = content(3 << 20, 7);
    let mut writer = staging.object_writer();
    for piece in big_content.chunks(70_000) {
        writer.write_all(piece).unwrap();
    }
    let big = writer.finish().unwrap();
    assert_eq!(big.digest, verity::digest(&big_content));
    assert_eq!(domain.object_size(&big.digest).unwrap(), None, "nothing shows before the commit");

    let objects = [(small.digest, small.size), (big.digest, big.size)];
    let image = image_of(&staging, &objects);
    let name = FileName::chain(FileKind::Layer, "sha256:00ff").unwrap();
    let mut layer = staging.file_writer().unwrap();
    layer.write_all(b"tree").unwrap();
    layer.finish(&name).unwrap();
    let mut record = Ref::new(image);
    record.manifest = Some("sha256:abc".into());
    record.layers.push(Layer { chain_id: "sha256:00ff".into(), ..Layer::default() });
    staging.commit(&Publish::named("host:5000/ns/redis:7", record.clone()), objects).unwrap();

    let store = Store::open(&scratch.path).unwrap();
    let domain = store.domain("default").unwrap();
    assert_eq!(domain.refs().unwrap(), [("host:5000/ns/redis:7".to_owned(), record.clone())]);
    assert_eq!(domain.find_by_manifest("sha256:abc").unwrap().unwrap().1, record);
    assert_eq!(domain.images().unwrap(), [image]);
    assert_eq!(common::layers(&domain), ["sha256:00ff"]);
    let mut back = Vec::new();
    domain.open_object(&big.digest).unwrap().reader().read_to_end(&mut back).unwrap();
    assert!(back == big_content);
    assert_eq!(domain.open_named(&name).unwrap().read_all(100).unwrap(), b"tree");
    assert_eq!(std::fs::read_dir(scratch.path.join("staging")).unwrap().count(), 0);
}

#[test]
fn an_aborted_import_leaves_nothing() {
    let scratch = Scratch::new("aborted");
    let domain = scratch.store().domain("default").unwrap();
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let object = staging.put_object(b"x").unwrap();
    drop(staging);
    assert_eq!(domain.object_size(&object.digest).unwrap(), None);
    assert_eq!(std::fs::read_dir(scratch.path.join("staging")).unwrap().count(), 0);
}

#[test]
fn what_is_not_there_cannot_be_published() {
    let scratch = Scratch::new("vanished");
    let domain = scratch.store().domain("default").unwrap();
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let object = staging.put_object(b"x").unwrap();
    let image = image_of(&staging, &[(object.digest, object.size)]);
    let absent = Digest([9; 32]);
    let result = staging.commit(&Publish::named("a:1", Ref::new(image)), [(absent, 1)]);
    match result {
        Err(Error::Vanished { count: 1, first }) => assert_eq!(first, format!("object {absent}")),
        other => panic!("{other:?}"),
    }
    assert_eq!(domain.refs().unwrap(), []);
    assert!(matches!(domain.put_ref("a:1", &Ref::new(absent)), Err(Error::NoSuch(_))));
    let mut root = Root::new(RootKind::Lease, "l");
    root.images.push(absent);
    assert!(matches!(domain.put_root(&root), Err(Error::NoSuch(_))));
}

/// Of two first imports at once, one ended with "meta.copy.json is in the way", whenever the directory listed that
/// file before `meta.json`, which would have told it that somebody had made the store.
#[test]
fn a_store_is_taken_for_one_whatever_is_listed_first() {
    let disk = std::sync::Arc::new(common::sim::SimDisk::new(1));
    Store::init_on(disk.clone(), &InitOptions::default()).unwrap();
    let again = Store::init_on(disk, &InitOptions::default());
    assert!(matches!(again, Err(Error::InTheWay { entry, .. }) if entry == "meta.json"));
}
