//! What the files of the store name, whatever their kind.

use cofolio_store::{BoxError, Contents, Digest, FileKind, StoredFile};

use super::segment::Segment;
use crate::compose::named_objects::{image_objects, layer_objects, open_image};
use crate::layer::split;
use crate::stored::StoredImage;

/// Reads metadata images (EROFS in composefs form), layer trees (dump text, zstd) and splits.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageContents;

impl Contents for ImageContents {
    fn names(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        match kind {
            FileKind::Object => Ok(()),
            FileKind::Image => image_objects(file, &mut |digest, size, _| visit(digest, size)),
            FileKind::Layer => layer_objects(file, visit),
            FileKind::Split => Ok(split::objects(&StoredImage::new(file)?, visit)?),
            FileKind::Pack | FileKind::DaxPack => {
                pack_segments(file)?.into_iter().for_each(|segment| visit(segment, 0));
                Ok(())
            }
            FileKind::Segment => Ok(Segment::check(file)?),
        }
    }

    fn check(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        match kind {
            FileKind::Split => Ok(split::check(&StoredImage::new(file)?, visit)?),
            _ => self.names(kind, file, visit),
        }
    }

    fn image_paths(
        &self,
        image: &StoredFile,
        wanted: &dyn Fn(&Digest) -> bool,
        found: &mut dyn FnMut(Digest, &[u8]),
    ) -> Result<(), BoxError> {
        image_objects(image, &mut |digest, _, path| {
            if wanted(&digest) {
                found(digest, path);
            }
        })
    }
}

/// The segments that a pack needs, in its own order. The tag of a device is a segment's digest.
pub fn pack_segments(pack: &StoredFile) -> Result<Vec<Digest>, BoxError> {
    let image = open_image(pack)?;
    let segments = image.superblock().devices.iter().map(|device| {
        let named = Digest::from_lower_hex(&device.tag);
        named.ok_or_else(|| format!("device `{}` is no segment", device.tag.escape_ascii()).into())
    });
    segments.collect()
}
