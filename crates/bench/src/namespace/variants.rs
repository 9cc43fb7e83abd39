//! Images of small changes over one base.

use anyhow::{Context, Result};
use cofolio_erofs::dump;
use cofolio_erofs::tree::{Content, InodeId, Meta, Tree};
use cofolio_erofs::write::{WriteOptions, write};
use cofolio_image::compose::named_objects::open_image;
use cofolio_store::{Digest, Domain, FileKind, FileName, ImportOptions, Layer, Publish, Ref};

/// What a variant has that its base has not: so many directories with so many files each.
const DIRECTORIES: u32 = 10;
const FILES: u32 = 10;
/// Of so many files of the base one is replaced, and one removed.
const CHANGED_OF: usize = 500;

/// Makes an image of the domain the base of `count` others, unless that was done before: each is the base with one layer
/// more. Gives their digests.
pub(super) fn variants(domain: &Domain, image: Digest, count: u32) -> Result<Vec<Digest>> {
    let base = Ref { layers: vec![layer(&format!("bench base {image}"))], ..Ref::new(image) };
    let base_name = format!("bench-base:{image}");
    if domain.get_ref(&base_name)?.is_none() {
        let staging = domain.begin_import(ImportOptions::default())?;
        put_layer(&staging, &base.layers[0], &read(domain, &image)?)?;
        staging.commit(&Publish::named(&base_name, base.clone()), [])?;
    }
    (0..count).map(|number| variant(domain, &base, number)).collect()
}

fn variant(domain: &Domain, base: &Ref, number: u32) -> Result<Digest> {
    let name = format!("bench-variant:{}-{number}", base.image);
    if let Some(record) = domain.get_ref(&name)? {
        return Ok(record.image);
    }
    let staging = domain.begin_import(ImportOptions::default())?;
    let mut objects = Vec::new();
    let mut tree = read(domain, &base.image)?;
    let meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 1_700_000_000, mtime_nsec: 0 };
    let mut own = Tree::new(tree.meta(tree.root()));
    let directory = Meta { mode: 0o755, ..meta };
    let mut content = |what: String| -> Result<(Digest, u64)> {
        let bytes = what.repeat(40).into_bytes();
        let stored = staging.put_object(&bytes)?;
        objects.push((stored.digest, bytes.len() as u64));
        Ok((stored.digest, bytes.len() as u64))
    };
    for dir in 0..DIRECTORIES {
        let name = format!("variant-{number}-{dir}");
        for tree in [&mut tree, &mut own] {
            tree.insert(tree.root(), name.as_bytes(), directory, Content::Directory)?;
        }
        for file in 0..FILES {
            let (digest, size) =
                content(format!("variant {number}, directory {dir}, file {file}\n"))?;
            for tree in [&mut tree, &mut own] {
                let dir = tree.resolve(name.as_bytes()).context("a directory is missing")?;
                let file = format!("file-{file}");
                tree.insert(dir, file.as_bytes(), meta, Content::object(size, &digest.0))?;
            }
        }
    }
    let files: Vec<(InodeId, InodeId, Vec<u8>)> = tree
        .walk()
        .filter(|visit| matches!(tree.content(visit.inode), Content::External { .. }))
        .map(|visit| (visit.parent, visit.inode, visit.name.to_vec()))
        .collect();
    let start = number as usize % CHANGED_OF;
    for (parent, _, name) in files.iter().skip(start).step_by(CHANGED_OF) {
        tree.unlink(*parent, name);
    }
    let replaced = files.iter().skip((start + CHANGED_OF / 2) % CHANGED_OF).step_by(CHANGED_OF);
    for (place, (_, inode, _)) in replaced.enumerate() {
        let (digest, size) = content(format!("variant {number}, change {place}\n"))?;
        tree.set_content(*inode, Content::object(size, &digest.0))?;
    }
    let mut writer = staging.image_writer()?;
    write(&tree, &WriteOptions::default(), &mut writer)?;
    let image = writer.finish()?;
    let top = layer(&format!("bench variant {image}"));
    put_layer(&staging, &top, &own)?;
    let record = Ref { layers: vec![base.layers[0].clone(), top], ..Ref::new(image) };
    staging.commit(&Publish::named(name, record), objects)?;
    Ok(image)
}

fn read(domain: &Domain, image: &Digest) -> Result<Tree> {
    let file = domain.open_image(image)?;
    open_image(&file)
        .and_then(|image| image.to_tree())
        .with_context(|| format!("cannot read image {image}"))
}

fn layer(what: &str) -> Layer {
    Layer { chain_id: what.replace(' ', "-"), ..Layer::default() }
}

fn put_layer(staging: &cofolio_store::Staging, layer: &Layer, tree: &Tree) -> Result<()> {
    let mut writer = staging.file_writer()?;
    let mut encoder = zstd::stream::write::Encoder::new(&mut writer, 1)?;
    dump::write(tree, &mut encoder)?;
    encoder.finish()?;
    writer.finish(&FileName::chain(FileKind::Layer, &layer.chain_id)?)?;
    Ok(())
}
