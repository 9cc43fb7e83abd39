//! Segments and packs, by name: how many there are, and where. What is in them is not known here.

use std::path::PathBuf;

use crate::{Digest, Domain, FileKind, FileName, Result, StoredFile};

/// A pack of the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pack {
    /// The image that it is of.
    pub image: Digest,
    /// Its own fs-verity digest.
    pub digest: Digest,
}

impl Pack {
    fn name(self) -> FileName {
        FileName::of_image(FileKind::Pack, &self.image, &self.digest)
    }
}

fn segment_name(digest: &Digest) -> FileName {
    FileName::content(FileKind::Segment, digest)
}

impl Domain {
    /// Digests of all segments, sorted.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn segments(&self) -> Result<Vec<Digest>> {
        Ok(self.named(FileKind::Segment)?.iter().filter_map(FileName::digest).collect())
    }

    /// Opens a segment for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`](crate::Error::NoSuch), [`Error::Io`](crate::Error::Io).
    pub fn open_segment(&self, digest: &Digest) -> Result<StoredFile> {
        self.open_named(&segment_name(digest))
    }

    /// All packs, sorted by image.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn packs(&self) -> Result<Vec<Pack>> {
        let names = self.named(FileKind::Pack)?;
        let pack = |name: &FileName| Some(Pack { image: name.image()?, digest: name.digest()? });
        Ok(names.iter().filter_map(pack).collect())
    }

    /// The packs of an image: at most one, or two good ones after an interrupted replacement.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn packs_of(&self, image: &Digest) -> Result<Vec<Pack>> {
        Ok(self.packs()?.into_iter().filter(|pack| pack.image == *image).collect())
    }

    /// Opens a pack for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`](crate::Error::NoSuch), [`Error::Io`](crate::Error::Io).
    pub fn open_pack(&self, pack: &Pack) -> Result<StoredFile> {
        self.open_named(&pack.name())
    }

    /// Removes the packs of an image; says whether there was one. The next [`Domain::gc`] takes
    /// what only they needed. Mounts stay: the kernel has the files open.
    ///
    /// # Errors
    /// [`Error::ReadOnly`](crate::Error::ReadOnly), [`Error::Io`](crate::Error::Io).
    pub fn remove_pack(&self, image: &Digest) -> Result<bool> {
        let packs: Vec<_> = self.packs_of(image)?.into_iter().map(Pack::name).collect();
        self.remove_named(&packs)?;
        Ok(!packs.is_empty())
    }

    /// The file of a pack. `None` on a simulated disk.
    pub fn pack_path(&self, pack: &Pack) -> Option<PathBuf> {
        self.named_path(&pack.name())
    }

    /// The file of a segment. `None` on a simulated disk.
    pub fn segment_path(&self, digest: &Digest) -> Option<PathBuf> {
        self.named_path(&segment_name(digest))
    }
}
