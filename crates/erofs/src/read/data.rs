use super::inode::Layout;
use super::{Image, Inode, ReadAt, ReadError, fill};
use crate::format::{ChunkIndex, NULL_ADDR};
use crate::tree::TARGET_MAX;

/// Contiguous bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins in the file, in bytes.
    pub offset: u64,
    /// Its length in bytes, at least 1.
    pub len: u64,
    /// The location of its bytes.
    pub location: Location,
}

/// The location of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// A hole. A composefs stub file is one hole.
    Hole,
    /// In the image, from this byte on.
    Image(u64),
    /// On an extra device.
    Device {
        /// The device, from 0.
        index: usize,
        /// First byte on the device.
        offset: u64,
    },
}

impl<S: ReadAt> Image<S> {
    /// The extent that holds the byte `offset` of a file, a directory or a symbolic link, from
    /// there on; `None` from the end on. Going from one to the next lists them all, and ends:
    /// their number is bounded by the size of the image.
    ///
    /// # Errors
    /// [`ReadError::Unsupported`] for compressed files, [`ReadError::Corrupt`] for data beyond
    /// the image, [`ReadError::Source`].
    pub fn extent(&self, inode: &Inode, offset: u64) -> Result<Option<Extent>, ReadError> {
        if offset >= inode.size {
            return Ok(None);
        }
        let rest = inode.size - offset;
        let extent = match inode.layout {
            Layout::Nothing => return Ok(None),
            Layout::Compressed => {
                return Err(ReadError::unsupported("a compressed file", inode.offset));
            }
            Layout::Plain { block: None } => Extent { offset, len: rest, location: Location::Hole },
            Layout::Plain { block: Some(block) } => {
                Extent { offset, len: rest, location: self.locate(inode, 0, block, offset)? }
            }
            Layout::Inline { block } => {
                let bits = self.superblock().block_bits;
                let tail_start = (inode.size - 1) >> bits << bits;
                if offset < tail_start {
                    let location = self.locate(inode, 0, block, offset)?;
                    Extent { offset, len: tail_start - offset, location }
                } else {
                    Extent { offset, len: rest, location: self.tail(inode, tail_start, offset)? }
                }
            }
            Layout::Chunks { bits, .. } => {
                let chunk = offset >> bits;
                let within = offset - (chunk << bits);
                let len = rest.min((1 << bits) - within);
                Extent { offset, len, location: self.chunk(inode, chunk, within)? }
            }
        };
        self.check_extent(inode, &extent)?;
        Ok(Some(extent))
    }

    /// Reads bytes of a file from `offset` on; returns how many there were, less than `buf` has
    /// room for only at the end of the file.
    ///
    /// # Errors
    /// As [`Image::extent`]; [`ReadError::NoDevice`] for data on a device that was not added.
    pub fn read(&self, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<usize, ReadError> {
        let mut done = 0;
        while done < buf.len() {
            let Some(extent) = self.extent(inode, offset.saturating_add(done as u64))? else {
                break;
            };
            let room = buf.len() - done;
            let len = usize::try_from(extent.len).unwrap_or(room).min(room);
            let part = &mut buf[done..done + len];
            match extent.location {
                Location::Hole => part.fill(0),
                Location::Image(at) => self.fill(at, part)?,
                Location::Device { index, offset } => {
                    let device = self.devices.get(index).ok_or(ReadError::NoDevice { index })?;
                    fill(device, offset, part)?;
                }
            }
            done += len;
        }
        Ok(done)
    }

    /// All bytes of a small file: `None` where it has more than `max`.
    pub fn read_small(&self, inode: &Inode, max: usize) -> Result<Option<Vec<u8>>, ReadError> {
        match usize::try_from(inode.size) {
            Ok(len) if len <= max => {
                let mut bytes = vec![0; len];
                let got = self.read(inode, 0, &mut bytes)?;
                bytes.truncate(got);
                Ok(Some(bytes))
            }
            _ => Ok(None),
        }
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`ReadError::Kind`] for anything else, [`ReadError::Corrupt`] for a target that is empty or
    /// longer than 4,095 bytes, and as [`Image::read`].
    pub fn readlink(&self, inode: &Inode) -> Result<Vec<u8>, ReadError> {
        if !inode.is_symlink() {
            return Err(ReadError::Kind { nid: inode.nid, kind: "symbolic link" });
        }
        self.read_small(inode, TARGET_MAX)?.filter(|target| !target.is_empty()).ok_or(
            ReadError::corrupt(
                inode.offset,
                "the target of the symbolic link is empty or too long",
            ),
        )
    }

    /// The location of byte `offset` in the blocks from `block` of a device on (0: the image).
    fn locate(
        &self,
        inode: &Inode,
        device: u16,
        block: u64,
        offset: u64,
    ) -> Result<Location, ReadError> {
        let bits = self.superblock().block_bits;
        let too_far = ReadError::corrupt(inode.offset, "a block address is out of range");
        let start = block.checked_mul(1 << bits);
        let Some(at) = start.and_then(|start| start.checked_add(offset)) else {
            return Err(too_far);
        };
        let devices = &self.superblock().devices;
        if device > 0 {
            let index = usize::from(device) - 1;
            if index >= devices.len() {
                return Err(ReadError::corrupt(
                    inode.offset,
                    "a chunk refers to a nonexistent device",
                ));
            }
            return Ok(Location::Device { index, offset: at });
        }
        // Without a device the address may be one of the space that spans all of them.
        for (index, device) in devices.iter().enumerate().filter(|(_, d)| d.first_block != 0) {
            let relative = block.checked_sub(device.first_block).filter(|&b| b < device.blocks);
            if let Some(block) = relative {
                let Some(start) = block.checked_mul(1 << bits) else { return Err(too_far) };
                return Ok(Location::Device { index, offset: start.saturating_add(offset) });
            }
        }
        Ok(Location::Image(at))
    }

    fn tail(&self, inode: &Inode, tail_start: u64, offset: u64) -> Result<Location, ReadError> {
        let start = inode.tail();
        let block_size = self.superblock().block_size;
        if start % block_size + (inode.size - tail_start) > block_size {
            return Err(ReadError::corrupt(inode.offset, "inline data crosses a block's end"));
        }
        Ok(Location::Image(start + (offset - tail_start)))
    }

    fn chunk(&self, inode: &Inode, chunk: u64, within: u64) -> Result<Location, ReadError> {
        let Layout::Chunks { indexes, wide, .. } = inode.layout else { return Ok(Location::Hole) };
        let unit = if indexes { 8 } else { 4 };
        let beyond =
            || ReadError::corrupt(inode.offset, "the table of chunks lies beyond the image");
        let entry = chunk
            .checked_mul(unit)
            .and_then(|at| at.checked_add(inode.tail().next_multiple_of(unit)))
            .ok_or_else(beyond)?;
        if indexes {
            let index: ChunkIndex = self.get(entry)?;
            let high = if wide { u64::from(index.startblk_hi.get()) } else { 0 };
            let block = high << 32 | u64::from(index.startblk.get());
            let hole = if wide { (1 << 48) - 1 } else { u64::from(NULL_ADDR) };
            if block == hole {
                return Ok(Location::Hole);
            }
            // Ids count modulo the next power of two: the other bits are reserved.
            let devices = self.superblock().devices.len();
            let mask = u16::try_from((devices + 1).next_power_of_two() - 1).unwrap_or(u16::MAX);
            self.locate(inode, index.device_id.get() & mask, block, within)
        } else {
            let mut block = [0; 4];
            self.fill(entry, &mut block)?;
            match u32::from_le_bytes(block) {
                NULL_ADDR => Ok(Location::Hole),
                block => self.locate(inode, 0, u64::from(block), within),
            }
        }
    }

    fn check_extent(&self, inode: &Inode, extent: &Extent) -> Result<(), ReadError> {
        match extent.location {
            Location::Image(at)
                if at.checked_add(extent.len).is_none_or(|end| end > self.size()) =>
            {
                Err(ReadError::corrupt(inode.offset, "the inode's data lies beyond the image"))
            }
            _ => Ok(()),
        }
    }
}
