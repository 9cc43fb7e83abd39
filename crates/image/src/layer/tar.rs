//! Reading tar archives, streaming, without believing them.
//!
//! ```text
//! [x pax header][pax records…][header][data … padded to 512] … [0×512][0×512] anything
//! [L long name ][name\0      ]  ^ 512 bytes: ustar, GNU, V7 or star
//! ```
//!
//! The crates `tar` 0.4.46 and `tar-core` 0.1.0 lose what an image needs: fractions of seconds,
//! devices in base 256, attributes with a newline in their value, malformed PAX records, ACLs,
//! sparse files in PAX form. Formats: POSIX pax(1), GNU tar's manual ("Basic Tar Format", "Storing
//! Sparse Files"), libarchive's tar(5).
//!
//! Everything that is buffered is bounded: one extended header by [`MetaLimits::extended_bytes`],
//! one sparse map by [`MetaLimits::sparse_segments`]. File content is never buffered here: after
//! [`Reader::next_entry`] the caller takes it from the input and says so with [`Reader::taken`].

use std::collections::BTreeMap;
use std::io::{self, BufRead};

use super::{acl, pax::Pax};

/// The unit of a tar archive, in bytes.
pub(crate) const BLOCK: usize = 512;

/// What may be held in memory for one entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MetaLimits {
    /// Sum of the extended headers (PAX, GNU long name and link) before one entry, in bytes.
    pub(crate) extended_bytes: u64,
    /// Data segments of one sparse file.
    pub(crate) sparse_segments: usize,
}

impl Default for MetaLimits {
    fn default() -> Self {
        Self { extended_bytes: 1 << 20, sparse_segments: 1 << 18 }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TarError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The archive is not what it should be.
    #[error("tar header at offset {offset}: {what}")]
    Bad {
        /// Offset of the entry's header in the uncompressed archive, in bytes.
        offset: u64,
        what: String,
    },
    /// The archive ends inside of an entry.
    #[error("tar archive ends at offset {offset}, in the middle of {what}")]
    Truncated { offset: u64, what: &'static str },
}

/// Input of a [`Reader`]: buffered, and able to leave bytes out.
pub(crate) trait Input: BufRead {
    /// Drops `count` bytes.
    fn skip(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let have = self.fill_buf()?.len();
            if have == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let step = have.min(usize::try_from(count).unwrap_or(usize::MAX));
            self.consume(step);
            count -= step as u64;
        }
        Ok(())
    }
}

impl Input for &[u8] {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
}

/// The data of a sparse file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sparse {
    /// (offset, length) in the file, sorted, not overlapping; their data is contiguous in the
    /// archive.
    pub(crate) segments: Vec<(u64, u64)>,
    /// Size of the file, in bytes.
    pub(crate) size: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// The name as the archive has it, not yet judged.
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: Kind,
    /// Permission bits with SUID, SGID and sticky.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds since the epoch, rounded down.
    pub(crate) mtime: i64,
    pub(crate) mtime_nsec: u32,
    /// Major and minor number of a device.
    pub(crate) device: (u32, u32),
    /// Bytes of data that follow in the archive.
    pub(crate) data_size: u64,
    pub(crate) sparse: Option<Sparse>,
    /// Extended attributes; ACLs already in the kernel's form.
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Offset of the entry's own header in the archive.
    pub(crate) offset: u64,
}

impl Entry {
    /// Size of the file that the entry makes.
    pub(crate) fn file_size(&self) -> u64 {
        self.sparse.as_ref().map_or(self.data_size, |s| s.size)
    }
}

/// Position and length of a header's field.
type Field = (usize, usize);

// Common to all formats up to `PREFIX`.
const NAME: Field = (0, 100);
const MODE: Field = (100, 8);
const UID: Field = (108, 8);
const GID: Field = (116, 8);
const SIZE: Field = (124, 12);
const MTIME: Field = (136, 12);
const CHECKSUM: Field = (148, 8);
const TYPE: usize = 156;
const LINK: Field = (157, 100);
const MAGIC: Field = (257, 8);
const MAJOR: Field = (329, 8);
const MINOR: Field = (337, 8);
const PREFIX: Field = (345, 155);
// star leaves the end of the prefix to atime and ctime, and says so with a magic at the very end.
const STAR_PREFIX: Field = (345, 131);
const STAR_MAGIC: Field = (508, 4);
// Old GNU sparse files: four segments in the header, 21 in each block after it.
const GNU_SPARSE: usize = 386;
const GNU_EXTENDED: usize = 482;
const GNU_REAL_SIZE: Field = (483, 12);
const GNU_EXT_EXTENDED: usize = 504;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    V7,
    Ustar,
    Star,
    Gnu,
}

struct Header<'a>(&'a [u8; BLOCK]);

impl<'a> Header<'a> {
    fn bytes(&self, (at, len): Field) -> &'a [u8] {
        &self.0[at..at + len]
    }

    /// A field up to its first NUL.
    fn text(&self, field: Field) -> &'a [u8] {
        let bytes = self.bytes(field);
        &bytes[..bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len())]
    }

    fn format(&self) -> Format {
        match self.bytes(MAGIC) {
            b"ustar  \0" => Format::Gnu,
            magic if !magic.starts_with(b"ustar\0") => Format::V7,
            _ if self.bytes(STAR_MAGIC) == b"tar\0" => Format::Star,
            _ => Format::Ustar,
        }
    }

    fn signed(&self, name: &str, field: Field) -> Result<i64, String> {
        number(self.bytes(field)).map_err(|e| format!("{name}: {e}"))
    }

    /// What a PAX record says, or else a field.
    fn unsigned(&self, name: &str, pax: Option<u64>, field: Field) -> Result<u64, String> {
        let Some(value) = pax else {
            let value = self.signed(name, field)?;
            return u64::try_from(value).map_err(|_| format!("{name} is negative: {value}"));
        };
        Ok(value)
    }

    fn in_32_bits(&self, name: &str, pax: Option<u64>, field: Field) -> Result<u32, String> {
        let value = self.unsigned(name, pax, field)?;
        u32::try_from(value).map_err(|_| format!("{name} {value} is out of range"))
    }

    fn owner(&self, name: &str, pax: Option<u64>, field: Field) -> Result<u32, String> {
        match self.in_32_bits(name, pax, field)? {
            // (uid_t)-1 is no owner.
            u32::MAX => Err(format!("{name} {} is out of range", u32::MAX)),
            id => Ok(id),
        }
    }

    /// The sum over the header with its checksum field blank; ancient tars summed signed bytes.
    fn checksum_fits(&self) -> bool {
        let Ok(stored) = number(self.bytes(CHECKSUM)) else { return false };
        let blank = CHECKSUM.0..CHECKSUM.0 + CHECKSUM.1;
        let (mut unsigned, mut signed) = (0i64, 0i64);
        for (at, &byte) in self.0.iter().enumerate() {
            let byte = if blank.contains(&at) { b' ' } else { byte };
            unsigned += i64::from(byte);
            signed += i64::from(byte.cast_signed());
        }
        stored == unsigned || stored == signed
    }
}

/// A numeric field: octal text, or base 256 when the first bit is set (GNU; negative too).
fn number(field: &[u8]) -> Result<i64, String> {
    let first = field.first().copied().unwrap_or(0);
    if first & 0x80 != 0 {
        // The first bit is the mark, the second the sign.
        let negative = first & 0x40 != 0;
        let mut value: i128 = if negative { -1 } else { 0 };
        for (at, &byte) in field.iter().enumerate() {
            let byte = match (at, negative) {
                (0, false) => byte & 0x7f,
                _ => byte,
            };
            value = (value << 8) | i128::from(byte);
        }
        return i64::try_from(value).map_err(|_| format!("the number {value} is out of range"));
    }
    let digits: &[u8] = {
        let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
        // Some writers pad with leading NULs.
        if end == 0 { field } else { &field[..end] }
    };
    let mut value: i64 = 0;
    let mut ended = false;
    for &byte in digits {
        match byte {
            b'0'..=b'7' if !ended => {
                value = value
                    .checked_mul(8)
                    .and_then(|v| v.checked_add(i64::from(byte - b'0')))
                    .ok_or("a number is out of range")?;
            }
            b' ' | b'\t' | 0 => ended = value != 0 || ended,
            _ => return Err(format!("{:?} is not a number", String::from_utf8_lossy(field))),
        }
    }
    Ok(value)
}

/// Streams the entries of one archive.
pub(crate) struct Reader<R> {
    input: R,
    limits: MetaLimits,
    /// Bytes of the archive consumed so far.
    offset: u64,
    /// Data of the current entry not taken yet, and the padding after it.
    data_left: u64,
    padding: u64,
    ended: bool,
}

impl<R: Input> Reader<R> {
    pub(crate) fn new(input: R, limits: MetaLimits) -> Self {
        Self { input, limits, offset: 0, data_left: 0, padding: 0, ended: false }
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn data_left(&self) -> u64 {
        self.data_left
    }

    /// The input, to take [`Reader::data_left`] bytes from at most; tell with [`Reader::taken`].
    pub(crate) fn input(&mut self) -> &mut R {
        &mut self.input
    }

    pub(crate) fn into_input(self) -> R {
        self.input
    }

    /// Notes that `count` bytes of the current entry's data were consumed from the input.
    pub(crate) fn taken(&mut self, count: u64) {
        debug_assert!(count <= self.data_left);
        self.data_left = self.data_left.saturating_sub(count);
        self.offset += count;
    }

    /// The next entry; the rest of the current one is skipped. `None` at the end: two zero blocks,
    /// or the end of the input between two entries. After an error the reader is of no use.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        if self.ended {
            return Ok(None);
        }
        let rest = self.data_left + self.padding;
        self.input.skip(rest).map_err(|e| self.eof(e, "the data of a file"))?;
        self.offset += rest;
        (self.data_left, self.padding) = (0, 0);

        let mut extended = Extended::default();
        let mut zero_blocks = 0;
        loop {
            let offset = self.offset;
            if self.input.fill_buf()?.is_empty() {
                self.ended = true;
                let what = "an entry that has only an extended header";
                return match extended.seen {
                    true => Err(TarError::Truncated { offset, what }),
                    false => Ok(None),
                };
            }
            let mut block = [0u8; BLOCK];
            self.exact(&mut block, "a header")?;
            if block == [0u8; BLOCK] {
                if extended.seen {
                    return Err(bad(offset, "extended headers without an entry"));
                }
                zero_blocks += 1;
                if zero_blocks == 2 {
                    self.ended = true;
                    return Ok(None);
                }
                continue;
            }
            zero_blocks = 0;
            let header = Header(&block);
            // A fuzzer would spend its time on sums.
            if !header.checksum_fits() && !cfg!(fuzzing) {
                return Err(bad(offset, "the checksum is wrong: not a tar header"));
            }
            match block[TYPE] {
                b'x' | b'X' => {
                    let records = self.extended(&header, offset, &mut extended)?;
                    extended.pax.parse(&records).map_err(|what| bad(offset, &what))?;
                }
                b'g' => {
                    // Container runtimes ignore global headers, tar(1) applies them: one archive,
                    // two trees. Those that only hold git's `comment=` are harmless.
                    let records = self.extended(&header, offset, &mut extended)?;
                    let mut pax = Pax::default();
                    pax.parse(&records).map_err(|what| bad(offset, &what))?;
                    if pax != Pax::default() {
                        let what = "a global header that changes entries is ambiguous";
                        return Err(bad(offset, what));
                    }
                    extended.seen = false;
                }
                b'L' => {
                    extended.name = Some(chop(self.extended(&header, offset, &mut extended)?))
                }
                b'K' => {
                    extended.link = Some(chop(self.extended(&header, offset, &mut extended)?))
                }
                _ => return self.entry(&header, offset, extended).map(Some),
            }
        }
    }

    fn extended(
        &mut self,
        header: &Header<'_>,
        offset: u64,
        extended: &mut Extended,
    ) -> Result<Vec<u8>, TarError> {
        let size = number(header.bytes(SIZE))
            .and_then(|n| u64::try_from(n).map_err(|_| "a negative size".into()))
            .map_err(|what| bad(offset, &what))?;
        extended.bytes = extended.bytes.saturating_add(size).saturating_add(BLOCK as u64);
        if extended.bytes > self.limits.extended_bytes {
            return Err(bad(
                offset,
                &format!("more than {} bytes of extended headers", self.limits.extended_bytes),
            ));
        }
        extended.seen = true;
        // Bounded by the check above.
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let mut content = vec![0u8; size];
        let mut padding = [0u8; BLOCK];
        self.exact(&mut content, "an extended header")?;
        self.exact(&mut padding[..pad(size as u64)], "an extended header")?;
        Ok(content)
    }

    fn entry(
        &mut self,
        header: &Header<'_>,
        offset: u64,
        extended: Extended,
    ) -> Result<Entry, TarError> {
        let bad_here = |what: String| TarError::Bad { offset, what };
        let (mut entry, pax) = described(header, offset, extended).map_err(bad_here)?;
        // The room up to the end of the archive's address space: offsets are added up below.
        let limit = i64::MAX as u64 - offset.min(i64::MAX as u64) - (1 << 20);
        if entry.data_size > limit {
            let size = entry.data_size;
            return Err(bad_here(format!("size {size} exceeds the limit of {limit}")));
        }
        self.data_left = entry.data_size;
        self.padding = pad(entry.data_size) as u64;
        if entry.kind == Kind::File {
            entry.sparse = match header.0[TYPE] {
                b'S' => Some(self.gnu_sparse(header, offset)?),
                _ => self.pax_sparse(&pax, offset)?,
            };
        }
        if let Some(sparse) = &entry.sparse {
            check_sparse(sparse, self.data_left).map_err(bad_here)?;
        }
        // Without the map of a sparse file.
        entry.data_size = self.data_left;
        Ok(entry)
    }

    /// The map of an old GNU sparse file: in the header and in the blocks between it and the data.
    fn gnu_sparse(&mut self, header: &Header<'_>, offset: u64) -> Result<Sparse, TarError> {
        let value = |field: &[u8]| {
            number(field)
                .and_then(|n| u64::try_from(n).map_err(|_| "a negative number".into()))
                .map_err(|what| bad(offset, &format!("sparse map: {what}")))
        };
        let size = value(header.bytes(GNU_REAL_SIZE))?;
        let mut segments = Vec::new();
        let add = |segments: &mut Vec<(u64, u64)>, bytes: &[u8]| -> Result<(), TarError> {
            for pair in bytes.chunks_exact(24) {
                if pair[0] == 0 {
                    break;
                }
                segments.push((value(&pair[..12])?, value(&pair[12..])?));
            }
            Ok(())
        };
        add(&mut segments, header.bytes((GNU_SPARSE, 4 * 24)))?;
        let mut more = header.0[GNU_EXTENDED] != 0;
        while more {
            let mut block = [0u8; BLOCK];
            self.exact(&mut block, "a sparse map")?;
            add(&mut segments, &block[..21 * 24])?;
            if segments.len() > self.limits.sparse_segments {
                return Err(self.too_sparse(offset));
            }
            more = block[GNU_EXT_EXTENDED] != 0;
            // Blocks that say nothing but that another one follows.
            if more && block[0] == 0 {
                return Err(bad(offset, "sparse map: an empty block that is not the last"));
            }
        }
        Ok(Sparse { segments, size })
    }

    /// The three forms in which GNU tar writes sparse files into PAX archives.
    fn pax_sparse(&mut self, pax: &Pax, offset: u64) -> Result<Option<Sparse>, TarError> {
        let map = &pax.sparse;
        match (map.major, map.minor) {
            (Some(1), Some(0)) => {
                let size =
                    map.size.ok_or_else(|| bad(offset, "sparse file 1.0 without its size"))?;
                self.sparse_1_0(offset, size).map(Some)
            }
            (None | Some(0), _) if map.has_map => {
                let size =
                    map.size.ok_or_else(|| bad(offset, "sparse file 0.x without its size"))?;
                if map.segments.len() > self.limits.sparse_segments {
                    return Err(self.too_sparse(offset));
                }
                if map.pending_offset.is_some() {
                    return Err(bad(offset, "sparse map: an offset without a length"));
                }
                Ok(Some(Sparse { segments: map.segments.clone(), size }))
            }
            (None, None) => Ok(None),
            (major, minor) => {
                Err(bad(offset, &format!("sparse format {major:?}.{minor:?} is unknown")))
            }
        }
    }

    /// Format 1.0 has the map at the head of the data: decimal lines, padded to a block.
    fn sparse_1_0(&mut self, offset: u64, size: u64) -> Result<Sparse, TarError> {
        let mut lines = Lines { block: [0; BLOCK], at: BLOCK };
        let count = lines.number(self, offset)?;
        if count > self.limits.sparse_segments as u64 {
            return Err(self.too_sparse(offset));
        }
        let mut segments = Vec::new();
        for _ in 0..count {
            segments.push((lines.number(self, offset)?, lines.number(self, offset)?));
        }
        Ok(Sparse { segments, size })
    }

    fn too_sparse(&self, offset: u64) -> TarError {
        bad(offset, &format!("more than {} segments in a sparse file", self.limits.sparse_segments))
    }

    fn exact(&mut self, buf: &mut [u8], what: &'static str) -> Result<(), TarError> {
        self.input.read_exact(buf).map_err(|e| self.eof(e, what))?;
        self.offset += buf.len() as u64;
        Ok(())
    }

    fn eof(&self, error: io::Error, what: &'static str) -> TarError {
        if error.kind() == io::ErrorKind::UnexpectedEof && error.get_ref().is_none() {
            TarError::Truncated { offset: self.offset, what }
        } else {
            TarError::Io(error)
        }
    }
}

/// The entry that a header and its extended headers describe, but for the map of a sparse file. A
/// PAX record goes before the header's field.
fn described(header: &Header<'_>, offset: u64, extended: Extended) -> Result<(Entry, Pax), String> {
    let Extended { mut pax, name, link, .. } = extended;
    let mut path = header.text(NAME).to_vec();
    let prefix = match header.format() {
        Format::Ustar => header.text(PREFIX),
        Format::Star => header.text(STAR_PREFIX),
        Format::V7 | Format::Gnu => b"",
    };
    if !prefix.is_empty() {
        path = [prefix, b"/", &path].concat();
    }
    if let Some(name) = pax.sparse.name.take().or(pax.path.take()).or(name) {
        path = name;
    }
    let link = pax.link.take().or(link).unwrap_or_else(|| header.text(LINK).to_vec());
    let kind = match header.0[TYPE] {
        // V7 had no directories: the slash says so.
        0 | b'0' if path.ends_with(b"/") => Kind::Directory,
        0 | b'0' | b'7' | b'S' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' => Kind::CharDevice,
        b'4' => Kind::BlockDevice,
        b'5' => Kind::Directory,
        b'6' => Kind::Fifo,
        other => {
            let (kind, name) = (char::from(other), String::from_utf8_lossy(&path));
            return Err(format!("entry type {kind:?} of {name:?} is unknown"));
        }
    };
    let (mtime, mtime_nsec) = match pax.mtime {
        Some(time) => time,
        None => (header.signed("mtime", MTIME)?, 0),
    };
    let size = header.unsigned("size", pax.size, SIZE)?;
    let device = match kind {
        Kind::CharDevice | Kind::BlockDevice => (
            header.in_32_bits("devmajor", pax.major, MAJOR)?,
            header.in_32_bits("devminor", pax.minor, MINOR)?,
        ),
        _ => (0, 0),
    };
    let mut xattrs = std::mem::take(&mut pax.xattrs);
    for (name, text) in [
        ("system.posix_acl_access", &pax.acl_access),
        ("system.posix_acl_default", &pax.acl_default),
    ] {
        if let Some(text) = text
            && let Some(value) = acl::from_text(text).map_err(|e| e.to_string())?
        {
            xattrs.insert(name.as_bytes().to_vec(), value);
        }
    }
    let entry = Entry {
        path,
        link,
        kind,
        mode: (header.signed("mode", MODE)? & 0o7777) as u16,
        uid: header.owner("uid", pax.uid, UID)?,
        gid: header.owner("gid", pax.gid, GID)?,
        mtime,
        mtime_nsec,
        device,
        // Only files have data, whatever the size field of a link or directory says (as in Go's
        // reader, which the container world uses, and in GNU tar's).
        data_size: if kind == Kind::File { size } else { 0 },
        sparse: None,
        xattrs,
        offset,
    };
    Ok((entry, pax))
}

/// Extended headers seen before an entry.
#[derive(Default)]
struct Extended {
    seen: bool,
    bytes: u64,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    pax: Pax,
}

/// Decimal lines at the head of a sparse file's data.
struct Lines {
    block: [u8; BLOCK],
    at: usize,
}

impl Lines {
    fn number<R: Input>(&mut self, reader: &mut Reader<R>, offset: u64) -> Result<u64, TarError> {
        let mut value: u64 = 0;
        let mut digits = 0;
        loop {
            if self.at == BLOCK {
                if reader.data_left < BLOCK as u64 {
                    return Err(bad(offset, "sparse map: longer than the file's data"));
                }
                reader.exact(&mut self.block, "a sparse map")?;
                reader.data_left -= BLOCK as u64;
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            match byte {
                b'0'..=b'9' => {
                    digits += 1;
                    value = value
                        .checked_mul(10)
                        .and_then(|v| v.checked_add(u64::from(byte - b'0')))
                        .ok_or_else(|| bad(offset, "sparse map: a number is out of range"))?;
                }
                b'\n' if digits > 0 => return Ok(value),
                _ => return Err(bad(offset, "sparse map: not a number")),
            }
        }
    }
}

/// In order, apart, within the file, and exactly the data that is there.
fn check_sparse(sparse: &Sparse, data: u64) -> Result<(), String> {
    let (mut at, mut sum) = (0u64, 0u64);
    for &(offset, length) in &sparse.segments {
        let end = offset.checked_add(length).ok_or("sparse map: a segment is out of range")?;
        if offset < at || end > sparse.size {
            return Err(format!(
                "sparse map: segment {offset}+{length} overlaps or lies outside of {} bytes",
                sparse.size
            ));
        }
        at = end;
        sum += length;
    }
    if sum != data {
        return Err(format!("sparse map: {sum} bytes of segments, {data} bytes of data"));
    }
    Ok(())
}

/// Padding after `size` bytes.
pub(crate) fn pad(size: u64) -> usize {
    // Less than a block.
    usize::try_from(size.wrapping_neg() % BLOCK as u64).unwrap_or(0)
}

/// A GNU long name without the NULs at its end.
fn chop(mut name: Vec<u8>) -> Vec<u8> {
    while name.last() == Some(&0) {
        name.pop();
    }
    name
}

fn bad(offset: u64, what: &str) -> TarError {
    TarError::Bad { offset, what: what.to_owned() }
}
