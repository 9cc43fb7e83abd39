//! Which objects images and layers name.

use std::io::BufReader;

use cofolio_erofs::dump::{Records, What};
use cofolio_erofs::read::{Image, Inode, ReadAt, ReadError};
use cofolio_erofs::tree::{Content, Payload};
use cofolio_store::{BoxError, Digest, StoredFile};

use crate::stored::StoredImage;

/// Where a metadata image says at which path below the objects directory a file's content lies.
const REDIRECT: &[u8] = b"trusted.overlay.redirect";

/// Calls `visit` for each file of a metadata image that names an object: that, its size in bytes,
/// and the file's path.
pub(crate) fn image_objects(
    image: &StoredFile,
    visit: &mut dyn FnMut(Digest, u64, &[u8]),
) -> Result<(), BoxError> {
    let image = open_image(image)?;
    let mut walk = image.walk()?;
    while let Some(found) = walk.advance()? {
        if let Some(digest) = object_of(&image, &found.inode)? {
            visit(digest, found.inode.size, found.path);
        }
    }
    Ok(())
}

/// The same of a layer's tree (dump text, zstd).
pub(crate) fn layer_objects(
    layer: &StoredFile,
    visit: &mut dyn FnMut(Digest, u64),
) -> Result<(), BoxError> {
    let decoder = zstd::stream::read::Decoder::new(layer.reader())?;
    // Line by line, without the limits that a tree of mkcomposefs has: what an import accepted must
    // be readable here, or garbage collection could not tell what the layer needs.
    let mut records = Records::new(BufReader::with_capacity(256 << 10, decoder));
    while let Some(record) = records.next()? {
        let What::Inode { content: Content::External { size, payload, .. }, .. } = record.what
        else {
            continue;
        };
        let digest = match payload {
            Payload::Object(digest) => Some(Digest(*digest)),
            Payload::Path(path) => object_at(path),
            Payload::None => None,
        };
        visit(digest.ok_or_else(|| NoObject(record.path.to_vec()))?, size);
    }
    Ok(())
}

/// A file whose content is neither in the image nor an object. gc must not guess.
#[derive(Debug, thiserror::Error)]
#[error("file `{}` names no object", String::from_utf8_lossy(.0))]
struct NoObject(Vec<u8>);

/// A metadata image of the store, opened for reading.
pub fn open_image(file: &StoredFile) -> Result<Image<StoredImage<'_>>, ReadError> {
    let image = StoredImage::new(file);
    Image::open(image.map_err(|source| ReadError::Source { offset: 0, source })?)
}

/// The object with the content of an inode; `None` if it has none, or has it inline. Fails if the
/// image cannot be read, or the content is in neither place.
pub fn object_of<S: ReadAt>(image: &Image<S>, inode: &Inode) -> Result<Option<Digest>, BoxError> {
    if !inode.is_file() || !inode.is_chunk_based() || inode.size == 0 {
        return Ok(None);
    }
    let redirect = image.xattrs(inode)?.into_iter().find(|xattr| xattr.name == REDIRECT);
    let path = redirect.map(|xattr| xattr.value).unwrap_or_default();
    match object_at(&path) {
        Some(digest) => Ok(Some(digest)),
        None => Err(Box::new(NoObject(path))),
    }
}

/// Whether an inode is one of the whiteouts that composefs adds to the root of an image so that
/// overlayfs hides the shards of the objects directory. They are no part of what was imported.
pub fn is_added<S: ReadAt>(image: &Image<S>, inode: &Inode) -> bool {
    let whiteout = inode.mode & 0o170_000 == 0o020_000 && inode.rdev == 0;
    whiteout && image.superblock().composefs_version.is_some()
}

/// The object at a path below the objects directory.
fn object_at(path: &[u8]) -> Option<Digest> {
    let path = std::str::from_utf8(path.strip_prefix(b"/").unwrap_or(path)).ok()?;
    path.split_once('/').and_then(|(shard, name)| Digest::from_object_path(shard, name))
}
