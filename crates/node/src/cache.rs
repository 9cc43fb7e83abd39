//! Reading files without a change to the page cache.

use std::collections::BTreeMap;

use cofolio_image::pack::ImageContents;
use cofolio_store::{Contents as _, Digest, Domain, Error, FileKind, StoredFile};
use cofolio_sys::cache;
use rustix::fs::{Advice, fadvise};

/// Reads a file of which nothing is resident and leaves it so.
pub(crate) fn leave_cache<T>(file: &StoredFile, read: impl FnOnce() -> T) -> T {
    let descriptor = file.descriptor();
    let cached = descriptor.and_then(|file| cache::cachestat(file, 0, 0).ok());
    let done = read();
    if let (Some(file), Some(cached)) = (descriptor, cached)
        && cached.cached == 0
    {
        // Whoever reads it meanwhile reads it again.
        let _ = fadvise(file, 0, None, Advice::DontNeed);
    }
    done
}

/// The objects that an image names, with their sizes.
///
/// # Errors
/// Those of [`Domain::open_image`]; [`Error::Unreadable`].
pub(crate) fn named_objects(
    domain: &Domain,
    image: &Digest,
) -> Result<BTreeMap<Digest, u64>, Error> {
    let (file, mut objects) = (domain.open_image(image)?, BTreeMap::new());
    let visit = &mut |object, size| _ = objects.insert(object, size);
    leave_cache(&file, || ImageContents.names(FileKind::Image, &file, visit))
        .map_err(|source| Error::Unreadable { what: format!("image {image}"), source })?;
    Ok(objects)
}
