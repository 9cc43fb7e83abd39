//! From one trust domain to another: the same content, never the same inode.
//!
//! The page cache follows the inode, so an inode in two domains would let one see what the other reads.
//! Where the filesystem can, the copy shares its blocks on disk (`FICLONE`), which the page cache does
//! not know about.

use std::io::Write;

use crate::contents::Contents;
use crate::disk::Piece;
use crate::error::{At, BoxError, Error, Result};
use crate::examine::hash_file;
use crate::staging::{Staging, Stored};
use crate::task::Cancel;
use crate::{Digest, Domain, ImportOptions, Publish, Ref, StoredFile};

/// How much is copied at once, in bytes.
const COPY_SIZE: usize = 256 << 10;

impl Domain {
    /// Makes a ref of another domain (of the same store) a ref of this one, with its image, its layers
    /// and all their objects. Everything is hashed on the way.
    ///
    /// # Errors
    /// [`Error::NoSuchRef`], [`Error::Unreadable`], [`Error::Corrupt`] if an object or the image is not
    /// what its name says, and those of an import.
    pub fn copy_ref_from(
        &self,
        from: &Self,
        ref_name: &str,
        contents: &dyn Contents,
    ) -> Result<Ref> {
        // What is copied must not be collected meanwhile.
        let _lock = from.lock_shared()?;
        let record =
            from.get_ref(ref_name)?.ok_or_else(|| Error::NoSuchRef(ref_name.to_owned()))?;
        let staging = self.begin_import(ImportOptions::default())?;
        let mut objects = std::collections::BTreeMap::new();
        let unreadable = |what: String| move |source: BoxError| Error::Unreadable { what, source };
        let image = from.open_image(&record.image)?;
        contents
            .image_objects(&image, &mut |digest, size| {
                objects.insert(digest, size);
            })
            .map_err(unreadable(format!("image {}", record.image)))?;
        let mut writer = staging.image_writer()?;
        copy(&image, &mut writer)?;
        check(image.path(), record.image, writer.finish()?)?;
        for layer in &record.layers {
            let file = from.open_layer(&layer.chain_id)?;
            contents
                .layer_objects(&file, &mut |digest, size| {
                    objects.insert(digest, size);
                })
                .map_err(unreadable(format!("layer {}", layer.chain_id)))?;
            let mut writer = staging.layer_writer(&layer.chain_id)?;
            copy(&file, &mut writer)?;
            writer.finish()?;
            if !from.has_split(&layer.chain_id)? {
                continue;
            }
            let file = from.open_split(&layer.chain_id)?;
            contents
                .split_objects(&file, &mut |digest, size| {
                    objects.insert(digest, size);
                })
                .map_err(unreadable(format!("split of layer {}", layer.chain_id)))?;
            let mut writer = staging.split_writer(&layer.chain_id)?;
            copy(&file, &mut writer)?;
            writer.finish()?;
        }
        let list: Vec<_> = objects.iter().map(|(digest, size)| (*digest, *size)).collect();
        crate::parallel::for_each(self.disk().parallelism(), &list, |(digest, size)| {
            staging.copy_object(from, digest, *size).map(drop)
        })?;
        staging.commit(&Publish::named(ref_name, record.clone()), objects)?;
        Ok(record)
    }
}

impl Staging {
    /// Stores an object of another domain of the same store: as a file of its own, sharing blocks where
    /// the filesystem can.
    ///
    /// # Errors
    /// [`Error::NoSuchObject`], [`Error::SizeMismatch`], [`Error::Corrupt`] if its content is not what
    /// its name says, and those of [`Staging::put_object`].
    pub fn copy_object(&self, from: &Domain, digest: &Digest, size: u64) -> Result<Stored> {
        let file = from.open_object(digest)?;
        let found = file.size().at("look at", file.path())?;
        if found != size {
            return Err(Error::SizeMismatch { digest: *digest, expected: size, found });
        }
        if self.domain().protection().reflink
            && let Some(stored) = self.put_reflink(file.path(), digest, size)?
        {
            return Ok(stored);
        }
        let mut writer = self.object_writer();
        file.for_pieces(|piece| match piece {
            Piece::Data(data) => writer.push(data),
            Piece::Hole(len) => writer.push_hole(len),
        })?;
        let stored = writer.finish()?;
        check(file.path(), *digest, stored.digest)?;
        Ok(stored)
    }
}

/// Copies an image or a layer.
fn copy(from: &StoredFile, to: &mut dyn Write) -> Result<()> {
    let mut buffer = vec![0; COPY_SIZE];
    let mut offset = 0;
    loop {
        let n = from.read_at(&mut buffer, offset).at("read", from.path())?;
        if n == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..n]).map_err(|error| match error.downcast::<Error>() {
            Ok(error) => error,
            Err(source) => Error::Io { action: "copy", path: from.path().to_owned(), source },
        })?;
        offset += n as u64;
    }
}

fn check(path: &str, expected: Digest, actual: Digest) -> Result<()> {
    if expected == actual {
        return Ok(());
    }
    Err(Error::corrupt(path, format!("its content has digest {actual}")))
}

/// [`check`] for a file that is not open yet.
pub(crate) fn check_file(file: &StoredFile, expected: Digest) -> Result<()> {
    check(file.path(), expected, hash_file(file, &Cancel::default())?)
}
