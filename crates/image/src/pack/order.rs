//! Which contents go into one segment: those of one layer, so that images on one base share the base's segments and
//! nothing else, and the base's stay whole when an image on it goes.

use std::collections::HashMap;

use cofolio_store::{Contents as _, Digest, Domain, Error, FileKind};

use super::PackError;
use crate::compose::named_objects::ImageContents;

/// A layer with less has no segment of its own: it goes with the next ones. In bytes.
pub(super) const LAYER_BYTES_MIN: u64 = 4 << 20;

/// By object: the number of the lowest layer that brought it. What no layer is known to have brought is not there: an
/// image from a directory has no layers, and one without a name says of none.
///
/// # Errors
/// [`PackError::Store`] if the records of names cannot be listed. One record or layer that cannot be read is for fsck to
/// tell: packs are right in any order.
pub(super) fn layers(domain: &Domain, image: &Digest) -> Result<HashMap<Digest, usize>, PackError> {
    let refs = domain.readable_refs()?;
    let record = refs.into_iter().map(|(_, record)| record).find(|record| record.image == *image);
    let mut brought = HashMap::new();
    for (number, layer) in record.into_iter().flat_map(|record| record.layers).enumerate() {
        let file = match domain.open_layer(&layer.chain_id) {
            Err(Error::NoSuch(_)) => continue,
            other => other?,
        };
        // What was read before it went wrong is right as far as it goes.
        let _ = ImageContents.names(FileKind::Layer, &file, &mut |object, _| {
            brought.entry(object).or_insert(number);
        });
    }
    Ok(brought)
}
