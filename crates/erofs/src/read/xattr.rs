use super::{Image, Inode, ReadAt, ReadError};
use crate::format::{XATTR_LONG_PREFIX, XATTR_PREFIXES, XattrEntry, XattrHeader};

/// An extended attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xattr {
    /// Complete name.
    pub name: Vec<u8>,
    /// Value.
    pub value: Vec<u8>,
}

impl<S: ReadAt> Image<S> {
    /// The extended attributes of an inode as they are stored: its own, then the shared ones.
    /// Takes at most 256 KiB and 255 times 64 KiB of memory.
    pub fn xattrs(&self, inode: &Inode) -> Result<Vec<Xattr>, ReadError> {
        let mut xattrs = Vec::new();
        self.each_xattr(inode, |xattr| {
            xattrs.push(xattr);
            Ok(())
        })?;
        Ok(xattrs)
    }

    pub(super) fn each_xattr(
        &self,
        inode: &Inode,
        mut f: impl FnMut(Xattr) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        if inode.xattr_size == 0 {
            return Ok(());
        }
        let header: XattrHeader = self.get(inode.xattrs)?;
        let ids = inode.xattrs + size_of::<XattrHeader>() as u64;
        let shared = u64::from(header.shared_count);
        let mut at = ids + shared * 4;
        let end = inode.tail();
        if at > end {
            let what = "the ids of shared attributes take more than the inode's attributes";
            return Err(ReadError::corrupt(inode.xattrs, what));
        }
        while end - at >= size_of::<XattrEntry>() as u64 {
            let (xattr, len) = self.xattr(at, end)?;
            at += len;
            if let Some(xattr) = xattr {
                f(xattr)?;
            }
        }
        for i in 0..shared {
            let mut id = [0; 4];
            self.fill(ids + i * 4, &mut id)?;
            let at = self.superblock().xattrs_start + u64::from(u32::from_le_bytes(id)) * 4;
            if let (Some(xattr), _) = self.xattr(at, self.size())? {
                f(xattr)?;
            }
        }
        Ok(())
    }

    /// The attribute at a byte, and the bytes it takes; `None` for a filler of zeros.
    fn xattr(&self, at: u64, end: u64) -> Result<(Option<Xattr>, u64), ReadError> {
        let entry: XattrEntry = self.get(at)?;
        let (name_len, value_len) = (usize::from(entry.name_len), entry.value_size.get());
        let len = size_of::<XattrEntry>() as u64 + name_len as u64 + u64::from(value_len);
        if at.checked_add(len).is_none_or(|e| e > end) {
            return Err(ReadError::corrupt(
                at,
                "an extended attribute is longer than the space for it",
            ));
        }
        let taken = len.next_multiple_of(4).min(end - at);
        if entry.name_index == 0 && name_len == 0 {
            return Ok((None, taken));
        }
        let prefix = if entry.name_index & XATTR_LONG_PREFIX != 0 {
            let number = usize::from(entry.name_index & !XATTR_LONG_PREFIX);
            self.xattr_prefixes.get(number).map(Vec::as_slice)
        } else {
            XATTR_PREFIXES.get(usize::from(entry.name_index)).copied()
        };
        let Some(prefix) = prefix else {
            return Err(ReadError::corrupt(at, "an extended attribute has a nonexistent prefix"));
        };
        let mut name = vec![0; prefix.len() + name_len];
        name[..prefix.len()].copy_from_slice(prefix);
        let start = at + size_of::<XattrEntry>() as u64;
        self.fill(start, &mut name[prefix.len()..])?;
        let mut value = vec![0; usize::from(value_len)];
        self.fill(start + name_len as u64, &mut value)?;
        Ok((Some(Xattr { name, value }), taken))
    }

    /// The long prefixes: each a 16-bit length, the number of a short prefix, and more of the
    /// name, at multiples of 4 bytes.
    pub(super) fn read_xattr_prefixes(&self) -> Result<Vec<Vec<u8>>, ReadError> {
        let sb = self.superblock();
        let packed = match sb.xattr_prefix_nid {
            Some(nid) if sb.xattr_prefix_count > 0 => Some(self.inode(nid)?),
            _ => None,
        };
        let mut at = sb.xattr_prefix_start;
        let mut prefixes = Vec::new();
        for _ in 0..sb.xattr_prefix_count {
            at = at.next_multiple_of(4);
            let bad = ReadError::corrupt(at, "a long attribute prefix is wrong");
            let mut len = [0; 2];
            self.fill_from(packed.as_ref(), at, &mut len)?;
            let len = u16::from_le_bytes(len);
            if len == 0 || len > 256 {
                return Err(bad);
            }
            let mut bytes = vec![0; usize::from(len)];
            self.fill_from(packed.as_ref(), at + 2, &mut bytes)?;
            let Some(base) = XATTR_PREFIXES.get(usize::from(bytes[0])) else { return Err(bad) };
            prefixes.push([base, &bytes[1..]].concat());
            at += 2 + u64::from(len);
        }
        Ok(prefixes)
    }

    /// Fills `buf` from an inode's data, or from the image itself.
    fn fill_from(
        &self,
        inode: Option<&Inode>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), ReadError> {
        match inode {
            None => self.fill(offset, buf),
            Some(inode) if self.read(inode, offset, buf)? == buf.len() => Ok(()),
            Some(inode) => Err(ReadError::corrupt(inode.offset, "the packed inode is too short")),
        }
    }
}
