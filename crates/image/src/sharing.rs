//! How much images of a domain share with each other, from their object lists.

use std::collections::HashMap;

use cofolio_store::{BoxError, Contents, Digest, Domain, FileKind};
use serde::Serialize;

use crate::pack::ImageContents;

/// Images of a domain and what each pair of them has in common. Bytes are bytes of content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sharing {
    /// The images, in the order they were given.
    pub images: Vec<ImageSharing>,
    /// Row and column by image: bytes of the objects that both name; the diagonal counts them all.
    pub bytes: Vec<Vec<u64>>,
}

/// One image of [`Sharing`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageSharing {
    /// The image.
    pub image: Digest,
    /// Objects that it names, each counted once.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The part that none of the other images names.
    pub exclusive_bytes: u64,
}

struct Object {
    size: u64,
    images: Vec<u32>,
}

impl Sharing {
    /// Compares images of a domain by their metadata; memory grows with their distinct objects.
    ///
    /// # Errors
    /// [`cofolio_store::Error::NoSuch`], [`cofolio_store::Error::Unreadable`] naming the image that
    /// cannot be read, [`cofolio_store::Error::Io`].
    pub fn of(domain: &Domain, images: &[Digest]) -> cofolio_store::Result<Self> {
        let _lock = domain.lock_shared()?;
        let mut objects: HashMap<Digest, Object> = HashMap::new();
        for (number, image) in (0_u32..).zip(images) {
            let mut visit = |digest: Digest, size: u64| {
                let object =
                    objects.entry(digest).or_insert_with(|| Object { size, images: Vec::new() });
                // An image that names an object twice has it once.
                if object.images.last() != Some(&number) {
                    object.images.push(number);
                }
            };
            ImageContents.names(FileKind::Image, &domain.open_image(image)?, &mut visit).map_err(
                |source: BoxError| cofolio_store::Error::Unreadable {
                    what: format!("image {image}"),
                    source,
                },
            )?;
        }
        let alone = |&image| ImageSharing { image, objects: 0, bytes: 0, exclusive_bytes: 0 };
        let mut rows: Vec<ImageSharing> = images.iter().map(alone).collect();
        let mut bytes = vec![vec![0_u64; images.len()]; images.len()];
        for Object { size, images } in objects.values() {
            for &a in images {
                let row = &mut rows[a as usize];
                row.objects += 1;
                // Sizes are what the images claim; they were checked when they were imported.
                row.bytes = row.bytes.saturating_add(*size);
                if images.len() == 1 {
                    row.exclusive_bytes = row.exclusive_bytes.saturating_add(*size);
                }
                let shared = &mut bytes[a as usize];
                for &b in images {
                    shared[b as usize] = shared[b as usize].saturating_add(*size);
                }
            }
        }
        Ok(Self { images: rows, bytes })
    }
}
