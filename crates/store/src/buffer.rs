//! [`Buffer`]: memory that direct I/O takes.

/// Alignment in bytes of memory, lengths and offsets for direct I/O: enough for every common disk
/// and filesystem. Elsewhere the kernel refuses it, and I/O goes through the page cache.
pub(crate) const ALIGN: usize = 4096;

/// Memory of a fixed size that begins at a multiple of 4096, filled from the front.
#[derive(Debug, Default)]
pub struct Buffer {
    /// A little larger than the capacity; never grows, or it would move.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
    capacity: usize,
}

impl Buffer {
    /// An empty buffer for so many bytes.
    pub fn new(capacity: usize) -> Self {
        let bytes = vec![0; capacity + ALIGN];
        // Where the address cannot be told it stays unaligned, which is slower and nothing else.
        let start = bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        Self { bytes, start, len: 0, capacity }
    }

    /// What it is filled with.
    pub fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The room that is left, with whatever was there before in it.
    pub fn spare(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start + self.len..self.start + self.capacity]
    }

    /// Counts the first `count` bytes of [`Buffer::spare`] (at most all) as filled.
    pub fn advance(&mut self, count: usize) {
        self.len = (self.len + count).min(self.capacity);
    }

    /// Makes it empty.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_aligned_and_keeps_its_size() {
        let mut buffer = Buffer::new(10);
        assert_eq!(buffer.spare().as_ptr().align_offset(ALIGN), 0);
        assert_eq!(buffer.spare().len(), 10);
        buffer.spare()[..3].copy_from_slice(b"abc");
        buffer.advance(3);
        assert_eq!(buffer.filled(), b"abc");
        assert_eq!(buffer.spare().len(), 7);
        buffer.advance(100);
        assert_eq!(buffer.filled().len(), 10);
        assert!(buffer.spare().is_empty());
        buffer.clear();
        assert!(buffer.filled().is_empty());
        assert!(Buffer::default().spare().is_empty());
    }
}
