//! EROFS images, read: any image that this crate or `mkfs.erofs` writes without compression.
//!
//! An [`Image`] decodes structures on demand and keeps none of them in memory. It checks every
//! number before use; errors name the byte offset. A walk and [`Image::to_tree`] always end: each
//! directory is entered once, paths are bounded, and all directories together cannot be larger than
//! the image.
//!
//! Features that a reader must know and this one does not are refused by name, and so are
//! compressed files, when their content is asked for.

mod data;
mod dir;
mod error;
mod inode;
mod superblock;
mod to_tree;
mod xattr;

use std::io;

pub use data::{Extent, Location};
pub use dir::{DirEntry, ReadDir, Walk, Walked};
pub use error::ReadError;
pub use inode::Inode;
pub use superblock::{Device, Super};
pub use xattr::Xattr;

/// Where an image's bytes come from.
pub trait ReadAt {
    /// Fills `buf` with the bytes from `offset` on. The caller keeps within [`ReadAt::size`].
    ///
    /// # Errors
    /// What the source says. Bytes that are missing are an error.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Size in bytes.
    fn size(&self) -> u64;
}

impl<T: AsRef<[u8]> + ?Sized> ReadAt for T {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let bytes = self.as_ref().get(start..start.saturating_add(buf.len()));
        buf.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn size(&self) -> u64 {
        self.as_ref().len() as u64
    }
}

/// An EROFS image.
///
/// ```
/// use cofolio_erofs::{dump, read::Image, write};
/// let text = "/ 0 40755 2 0 0 0 0.0 - - -\n/f 3 100644 1 0 0 0 0.0 - abc -\n";
/// let tree = dump::parse(text.as_bytes())?;
/// let mut bytes = Vec::new();
/// write::write(&tree, &write::WriteOptions::default(), &mut bytes)?;
///
/// let image = Image::open(&bytes)?;
/// let file = image.resolve(b"/f")?.expect("it is there");
/// let mut content = [0; 3];
/// assert_eq!(image.read(&file, 0, &mut content)?, 3);
/// assert_eq!(&content, b"abc");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Image<S> {
    source: S,
    size: u64,
    sb: Super,
    /// Long xattr prefixes, complete.
    xattr_prefixes: Vec<Vec<u8>>,
    /// Sources of the extra devices, as far as they were added.
    devices: Vec<S>,
}

impl<S: ReadAt> Image<S> {
    /// Reads the superblock and what hangs on it.
    ///
    /// # Errors
    /// [`ReadError::NotErofs`], [`ReadError::Unsupported`] for a feature that this reader does
    /// not know, [`ReadError::Corrupt`] for a superblock that cannot be or whose checksum is
    /// wrong.
    pub fn open(source: S) -> Result<Image<S>, ReadError> {
        let size = source.size();
        let sb = superblock::read(&source)?;
        let mut image = Image { source, size, sb, xattr_prefixes: Vec::new(), devices: Vec::new() };
        image.xattr_prefixes = image.read_xattr_prefixes()?;
        Ok(image)
    }

    /// What the superblock says.
    pub fn superblock(&self) -> &Super {
        &self.sb
    }

    /// Adds the source of the next extra device, in the order of [`Super::devices`]. Without it
    /// files on that device can be listed but not read.
    pub fn add_device(&mut self, source: S) {
        self.devices.push(source);
    }

    /// Size of the image in bytes, extra devices apart.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The root directory.
    ///
    /// # Errors
    /// As [`Image::inode`]; [`ReadError::Corrupt`] where it is no directory.
    pub fn root(&self) -> Result<Inode, ReadError> {
        let root = self.inode(self.sb.root_nid)?;
        if root.is_dir() {
            Ok(root)
        } else {
            Err(ReadError::corrupt(root.offset, "the root is no directory"))
        }
    }

    /// The inode at `path` from the root; `None` where there is nothing. Symbolic links are not
    /// followed, empty components are skipped.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<Inode>, ReadError> {
        let mut inode = self.root()?;
        for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            if !inode.is_dir() {
                return Ok(None);
            }
            let Some(entry) = self.lookup(&inode, name)? else { return Ok(None) };
            inode = self.inode(entry.nid)?;
        }
        Ok(Some(inode))
    }

    fn fill(&self, offset: u64, buf: &mut [u8]) -> Result<(), ReadError> {
        fill(&self.source, offset, buf)
    }

    fn get<T: zerocopy::FromBytes + zerocopy::IntoBytes>(
        &self,
        offset: u64,
    ) -> Result<T, ReadError> {
        let mut value = T::new_zeroed();
        self.fill(offset, value.as_mut_bytes())?;
        Ok(value)
    }
}

fn fill(source: &impl ReadAt, offset: u64, buf: &mut [u8]) -> Result<(), ReadError> {
    let end = offset.checked_add(buf.len() as u64);
    if end.is_none_or(|end| end > source.size()) {
        return Err(ReadError::corrupt(offset, "the offset is beyond the end of the image"));
    }
    source.read_exact_at(buf, offset).map_err(|source| ReadError::Source { offset, source })
}

#[cfg(test)]
mod tests;
