//! The files that hold the pages of an image.
//!
//! With the backend `overlay` containers read the store's objects, and the pages are theirs. With
//! `inode-share` the kernel keeps one inode for files with equal content of all mounted packs. The
//! pages are in that inode, which can be reached only through a mount.
//!
//! Metadata has pages of two kinds. What EROFS reads of inodes and xattrs is in the page cache of the
//! image's file. Directories have pages of their own for each superblock, copied from there: these,
//! too, can be reached only through a mount.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use cofolio_erofs::read::{ReadError, Walked};
use cofolio_image::compose::named_objects::open_image;
use cofolio_image::pack::ImageContents;
use cofolio_store::task::Cancel;
use cofolio_store::{Digest, Domain, Error, FileKind, FileName, StoredFile};
use cofolio_sys::cache::{self, FileMap, cachestat, page_size};
use rustix::fs::{Advice, Dir, OFlags, fadvise};

use crate::cache::leave_cache;
use crate::ledger::LedgerError;
use crate::mount::{Mounter, open_below};
use crate::run_dir::RunDir;
use crate::settings::{Backend, DomainSettings as _};

/// Opens the files that hold the pages of one image.
#[derive(Debug)]
pub(crate) struct PageFiles<'d> {
    domain: &'d Domain,
    image: Digest,
    /// With `inode-share`, a path of each object in the mounted pack.
    paths: Option<HashMap<Digest, PathBuf>>,
}

impl<'d> PageFiles<'d> {
    /// # Errors
    /// [`LedgerError::NotMounted`] with `inode-share`; [`LedgerError::Store`].
    pub(crate) fn of(
        domain: &'d Domain,
        run: &RunDir,
        image: &Digest,
    ) -> Result<Self, LedgerError> {
        if domain.backend()? == Backend::Overlay {
            return Ok(Self { domain, image: *image, paths: None });
        }
        let of_image = run.shared_superblocks().found.into_iter().find(|it| {
            it.domain == domain.name() && it.image == *image && it.backend == Backend::InodeShare
        });
        let top = of_image.ok_or(LedgerError::NotMounted { image: *image })?.path;
        let paths = crate::ledger::paths_of_objects(domain, image)?;
        let paths = paths.into_iter().map(|(object, path)| (object, top.join(path)));
        Ok(Self { domain, image: *image, paths: Some(paths.collect()) })
    }

    /// Opens the files that the image is mounted from: its metadata images, or its pack.
    ///
    /// # Errors
    /// Those of [`Domain::open_named`].
    pub(crate) fn metadata(&self) -> Result<Vec<StoredFile>, Error> {
        let domain = self.domain;
        if self.paths.is_some() {
            return domain
                .packs_of(FileKind::Pack, &self.image)?
                .iter()
                .map(|it| domain.open_named(it))
                .collect();
        }
        domain.metadata_images(&self.image)?.iter().map(|it| domain.open_image(it)).collect()
    }

    /// Reads all directories of the image through its mount. Does nothing if it is not mounted, and ends
    /// early when cancelled.
    ///
    /// # Errors
    /// [`LedgerError::Store`] if the image cannot be read. What cannot be read through the mount is left
    /// to containers.
    pub(crate) fn read_directories(
        &self,
        run: &RunDir,
        cancel: &Cancel,
    ) -> Result<(), LedgerError> {
        let backend = if self.paths.is_some() { Backend::InodeShare } else { Backend::Overlay };
        let mounter = Mounter::new(self.domain, run.clone(), &ImageContents);
        let Ok(layers) = mounter.mounted_layers(&self.image, backend) else { return Ok(()) };
        let read = |path: &[u8]| {
            // Not every layer has every directory.
            layers.iter().for_each(|layer| drop(read_directory(layer, path)));
        };
        let file = self.domain.open_image(&self.image)?;
        let walked = leave_cache(&file, || {
            read(b".");
            let image = open_image(&file)?;
            let mut walk = image.walk()?;
            while let Some(Walked { path, inode }) = walk.advance()?
                && !cancel.is_cancelled()
            {
                if inode.is_dir() {
                    read(path.strip_prefix(b"/").unwrap_or(path));
                }
            }
            Ok(())
        });
        walked.map_err(|source: ReadError| {
            let what = format!("image {}", self.image);
            Error::Unreadable { what, source: source.into() }.into()
        })
    }

    /// Opens the file of an object of the image.
    ///
    /// # Errors
    /// [`LedgerError::Store`] if there is no such object; [`LedgerError::Io`].
    pub(crate) fn open(&self, object: &Digest) -> Result<File, LedgerError> {
        let path = match &self.paths {
            Some(paths) => paths.get(object).cloned(),
            None => self.domain.object_path(object),
        };
        let missing = || Error::NoSuch(FileName::content(FileKind::Object, object)).into();
        let path = path.ok_or_else(missing)?;
        cache::open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound if self.paths.is_none() => missing(),
            _ => LedgerError::io(path)(error),
        })
    }

    /// Resident bytes of parts of an object's file, in whole pages: ascending offsets and lengths.
    /// For an object of the store, pages that are still being read count; the mapping of another
    /// file shows only what has been read.
    ///
    /// # Errors
    /// [`LedgerError::Io`] where the kernel does not say.
    pub(crate) fn resident_bytes(
        &self,
        file: &File,
        object: &Digest,
        ranges: &[(u64, u64)],
    ) -> Result<u64, LedgerError> {
        let of_mapping = || {
            let map = FileMap::new(file, end(ranges))?;
            ranges.iter().map(|(start, length)| map.resident_pages_of(*start, *length)).sum()
        };
        let of_file = || {
            // cachestat would take a length of 0 for the whole file.
            let parts = ranges.iter().filter(|(_, length)| *length > 0);
            let pages = parts.map(|(start, length)| Ok(cachestat(file, *start, *length)?.cached));
            pages.sum::<io::Result<u64>>()
        };
        let pages = match self.paths {
            Some(_) => of_mapping(),
            None => match of_file() {
                // Before Linux 6.5.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => of_mapping(),
                pages => pages,
            },
        };
        Ok(pages.map_err(LedgerError::io(object.to_string()))? * page_size())
    }
}

/// Has the kernel read a part of a file.
pub(crate) fn read_ahead(file: impl AsFd, start: u64, length: u64) {
    /// Bytes that are asked for at once. The kernel cuts a request at what the disk takes at once, or
    /// at its read-ahead, if that is more: 128 KiB unless somebody has changed it.
    const STEP: usize = 128 << 10;
    for offset in (start..start.saturating_add(length)).step_by(STEP) {
        let step = NonZeroU64::new((start + length - offset).min(STEP as u64));
        // The kernel makes and charges the pages before it returns, and reads them meanwhile.
        let _ = fadvise(&file, offset, step, Advice::WillNeed);
    }
}

/// Reads a directory of a mounted metadata image.
fn read_directory(root: &OwnedFd, path: &[u8]) -> io::Result<()> {
    let directory = open_below(root, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    Dir::new(directory)?.for_each(drop);
    Ok(())
}

/// Where the last of ascending ranges ends.
pub(crate) fn end(ranges: &[(u64, u64)]) -> u64 {
    ranges.last().map_or(0, |(start, length)| start + length)
}

/// Resident parts of the first `size` bytes of a file: offsets and lengths in bytes, ascending. They
/// are those that a mapping sees: with `inode-share`, cachestat would ask about another inode.
///
/// # Errors
/// Those of mmap(2) and mincore(2).
pub(crate) fn resident_ranges(file: impl AsFd, size: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let page = page_size();
    let mut offset = 0;
    FileMap::new(file, size)?.residency(|pages| {
        for is_resident in pages.iter().map(|page| page.is_resident()) {
            let length = page.min(size.saturating_sub(offset));
            match ranges.last_mut() {
                Some((start, before)) if is_resident && *start + *before == offset => {
                    *before += length;
                }
                _ if is_resident && length > 0 => ranges.push((offset, length)),
                _ => {}
            }
            offset += page;
        }
    })?;
    Ok(ranges)
}
