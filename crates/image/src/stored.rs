//! Reading files of the store in blocks, for the readers of formats.

use std::io::{self, BufReader};
use std::sync::{Mutex, PoisonError};

use cofolio_erofs::read::ReadAt;
use cofolio_store::verity::Hasher;
use cofolio_store::{Digest, StoredFile};

/// The fs-verity digest of a file's content, which is read for it.
pub(crate) fn digest_of(file: &StoredFile) -> io::Result<Digest> {
    let mut hasher = Hasher::new();
    io::copy(&mut BufReader::with_capacity(4 * BLOCK, file.reader()), &mut hasher)?;
    Ok(hasher.finish())
}

/// The bytes of an image or a split of the store. Readers ask for a few bytes at a time, tens of
/// thousands of times, so blocks are read and the last few are kept.
#[derive(Debug)]
pub struct StoredImage<'a> {
    file: &'a StoredFile,
    size: u64,
    /// Block `n` is in slot `n % BLOCKS`, with its number; an empty one holds nothing.
    blocks: Mutex<Vec<(u64, Vec<u8>)>>,
}

/// Bytes of a block: what a small image's directories, inodes or attributes take, or a read-ahead.
const BLOCK: usize = 64 << 10;
/// How many blocks are kept; 4 MiB, which is all of an image of 40,000 files.
const BLOCKS: usize = 64;

impl<'a> StoredImage<'a> {
    /// The whole file; fails if its size cannot be read.
    pub fn new(file: &'a StoredFile) -> io::Result<Self> {
        Ok(Self { file, size: file.size()?, blocks: Mutex::default() })
    }

    /// Copies bytes from `offset` to the end of its block or of `buf`; says how many.
    fn copy(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let number = offset / BLOCK as u64;
        let start = number * BLOCK as u64;
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.resize_with(BLOCKS, Default::default);
        // Less than BLOCKS.
        let slot = &mut blocks[usize::try_from(number % BLOCKS as u64).unwrap_or(0)];
        if slot.0 != number || slot.1.is_empty() {
            slot.1.clear();
            let mut block =
                vec![0; usize::try_from(self.size - start).map_or(BLOCK, |n| n.min(BLOCK))];
            self.file.read_exact_at(&mut block, start)?;
            *slot = (number, block);
        }
        let from = usize::try_from(offset - start).unwrap_or(BLOCK);
        let bytes = slot.1.get(from..).unwrap_or_default();
        let length = bytes.len().min(buf.len());
        buf[..length].copy_from_slice(&bytes[..length]);
        Ok(length)
    }
}

impl ReadAt for StoredImage<'_> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if buf.len() >= BLOCK {
            return self.file.read_exact_at(buf, offset);
        }
        let mut done = 0;
        while done < buf.len() {
            done += self.copy(&mut buf[done..], offset + done as u64)?;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.size
    }
}
