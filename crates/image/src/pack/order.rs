//! Puts contents of one layer into one segment, so that images on one base share only the base's
//! segments, which stay whole when an image is removed.

use std::collections::HashMap;

use cofolio_store::{Contents as _, Digest, Domain, Error, FileKind, FileName};

use super::PackError;
use super::segment::Form;
use crate::pack::ImageContents;

/// A layer with less has no segment of its own: it goes with the next ones. In bytes. Guests should
/// have few devices, and images with a layer in common need not share all of a segment.
pub(super) fn layer_bytes_min(form: Form) -> u64 {
    if form == Form::Dax { 32 << 20 } else { 4 << 20 }
}

/// By object: the lowest layer that brought it; none for images from directories or without a name.
/// fsck reports unreadable records and layers: packs are right in any order.
pub(super) fn layers(domain: &Domain, image: &Digest) -> Result<HashMap<Digest, usize>, PackError> {
    let refs = domain.readable_refs()?;
    let record = refs.into_iter().map(|(_, record)| record).find(|record| record.image == *image);
    let mut brought = HashMap::new();
    for (number, layer) in record.into_iter().flat_map(|record| record.layers).enumerate() {
        let file = match domain.open_named(&FileName::chain(FileKind::Layer, &layer.chain_id)?) {
            Err(Error::NoSuch(_)) => continue,
            other => other?,
        };
        // Objects read before an error are right.
        let _ = ImageContents.names(FileKind::Layer, &file, &mut |object, _| {
            brought.entry(object).or_insert(number);
        });
    }
    Ok(brought)
}
