//! A layer's split: its tar archive without the content of files, which are objects.
//!
//! With it an export writes the archive again byte for byte: headers, padding, extended headers,
//! sparse maps, and what follows the end.
//!
//! ```text
//! magic            "cofolio split 1\n"
//! block …          kind, raw length, stored length (u32 each, little-endian), one zstd frame
//!   kind 1         a part of the script, cut anywhere
//!   kind 2         a part of the table, cut between rows
//!   kind 3         the end: lengths of the script, the table (in rows) and the archive (u64 each)
//!
//! script           what the archive is made of, in order; numbers are LEB128
//!   n << 2 | 0     n bytes of the archive follow
//!   0 << 2 | 1     the whole content of the next object of the table
//!   n << 2 | 2     n ranges of the next object: n pairs (bytes left out, bytes taken) follow
//!
//! table            40 bytes a row, in the order in which the script takes them
//!   digest         fs-verity digest: the object's name
//!   size           u64, little-endian
//! ```
//!
//! Script and table are apart because digests come late and out of order from the threads that
//! hash. Writer and reader handle each on its own, so neither holds more than a few blocks. Garbage
//! collection reads the table alone.
//!
//! What only the archive says stays in the script, also files that no tree shows (AUFS bookkeeping,
//! content of whiteouts). Files that the archive itself replaces later are objects like all others.

use std::collections::VecDeque;
use std::io::{self, BufRead, Read, Write};

use cofolio_erofs::read::ReadAt;
use cofolio_store::Digest;

use crate::layer::blob::read_buffered;
use crate::layer::tar::Input;

const MAGIC: &[u8; 16] = b"cofolio split 1\n";
const SCRIPT: u32 = 1;
const TABLE: u32 = 2;
const END: u32 = 3;
/// Kind and the two lengths of a block.
const HEAD: usize = 12;
/// Largest raw length of a block, in bytes.
const RAW_MAX: usize = 1 << 20;
/// The script is cut when it has this many bytes.
const SCRIPT_BYTES: usize = 512 << 10;
/// Bytes of a row of the table.
const ROW: usize = 40;
/// The table is cut when it has this many rows.
const TABLE_ROWS: usize = 4096;
/// Bytes of the archive are gathered up to this many.
const LITERAL_MAX: usize = 64 << 10;
/// zstd level: fast; headers are repetitive enough.
const LEVEL: i32 = 1;
/// The two low bits of an instruction of the script.
const LITERAL: u64 = 0;
const WHOLE: u64 = 1;
const RANGES: u64 = 2;

/// Writes a split while the archive is read.
pub(crate) struct SplitWriter<W> {
    blocks: BlockWriter<W>,
    script: Vec<u8>,
    /// Bytes of the archive that are not in the script yet.
    literal: Vec<u8>,
    table: Vec<u8>,
    /// Objects of the script without a row in the table: those that are being hashed.
    pending: VecDeque<Option<(Digest, u64)>>,
    /// Number of the first of them.
    first: u64,
    script_bytes: u64,
}

impl<W: Write> SplitWriter<W> {
    pub(crate) fn new(mut sink: W) -> io::Result<Self> {
        sink.write_all(MAGIC)?;
        let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
        compressor.include_checksum(true)?;
        Ok(Self {
            blocks: BlockWriter { sink, compressor },
            script: Vec::new(),
            literal: Vec::new(),
            table: Vec::new(),
            pending: VecDeque::new(),
            first: 0,
            script_bytes: 0,
        })
    }

    /// The next bytes of the archive are these.
    pub(crate) fn literal(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(LITERAL_MAX - self.literal.len()));
            self.literal.extend_from_slice(now);
            bytes = rest;
            if self.literal.len() == LITERAL_MAX {
                self.end_literal()?;
            }
        }
        Ok(())
    }

    /// The next bytes of the archive are the content of an object, or ranges of it (offset, length;
    /// in order and apart). Returns its number, for [`SplitWriter::stored`].
    pub(crate) fn object(&mut self, ranges: Option<&[(u64, u64)]>) -> io::Result<u64> {
        self.end_literal()?;
        match ranges {
            None => self.number(WHOLE),
            Some(ranges) => {
                self.number((ranges.len() as u64) << 2 | RANGES);
                let mut at = 0;
                for &(offset, length) in ranges {
                    self.number(offset - at);
                    self.number(length);
                    at = offset + length;
                }
            }
        }
        self.cut_script(SCRIPT_BYTES)?;
        self.pending.push_back(None);
        Ok(self.first + self.pending.len() as u64 - 1)
    }

    /// What an object turned out to be.
    pub(crate) fn stored(&mut self, number: u64, digest: Digest, size: u64) -> io::Result<()> {
        let slot = usize::try_from(number - self.first).unwrap_or(usize::MAX);
        if let Some(pending) = self.pending.get_mut(slot) {
            *pending = Some((digest, size));
        }
        while let Some(&Some((digest, size))) = self.pending.front() {
            self.pending.pop_front();
            self.first += 1;
            self.table.extend_from_slice(&digest.0);
            self.table.extend_from_slice(&size.to_le_bytes());
            if self.table.len() == TABLE_ROWS * ROW {
                self.cut_table()?;
            }
        }
        Ok(())
    }

    /// Ends the split of an archive of `size` bytes; fails if an object lacks its digest.
    pub(crate) fn finish(mut self, size: u64) -> io::Result<W> {
        if !self.pending.is_empty() {
            return Err(io::Error::other("a split with objects that were not stored"));
        }
        self.end_literal()?;
        self.cut_script(0)?;
        self.cut_table()?;
        let totals = [self.script_bytes, self.first, size].map(u64::to_le_bytes).concat();
        self.blocks.write(END, &totals)?;
        Ok(self.blocks.sink)
    }

    fn end_literal(&mut self) -> io::Result<()> {
        if self.literal.is_empty() {
            return Ok(());
        }
        self.number((self.literal.len() as u64) << 2 | LITERAL);
        self.script.append(&mut self.literal);
        self.cut_script(SCRIPT_BYTES)
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.script.push(number.to_le_bytes()[0] | 0x80);
            number >>= 7;
        }
        self.script.push(number.to_le_bytes()[0]);
    }

    /// Writes the script at hand, if it has at least so many bytes.
    fn cut_script(&mut self, bytes_min: usize) -> io::Result<()> {
        if self.script.len() < bytes_min {
            return Ok(());
        }
        for part in self.script.chunks(RAW_MAX) {
            self.blocks.write(SCRIPT, part)?;
        }
        self.script_bytes += self.script.len() as u64;
        self.script.clear();
        // Not more than usual: one map of a sparse file can be megabytes.
        self.script.shrink_to(SCRIPT_BYTES + LITERAL_MAX);
        Ok(())
    }

    fn cut_table(&mut self) -> io::Result<()> {
        if !self.table.is_empty() {
            self.blocks.write(TABLE, &self.table)?;
            self.table.clear();
        }
        Ok(())
    }
}

/// Writes blocks.
struct BlockWriter<W> {
    sink: W,
    compressor: zstd::bulk::Compressor<'static>,
}

impl<W: Write> BlockWriter<W> {
    fn write(&mut self, kind: u32, raw: &[u8]) -> io::Result<()> {
        let frame = self.compressor.compress(raw)?;
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let head = [kind, length(raw), length(&frame)].map(u32::to_le_bytes).concat();
        self.sink.write_all(&head)?;
        self.sink.write_all(&frame)
    }
}

/// A split of any script and table, with right sums, for the fuzz targets.
#[cfg(fuzzing)]
pub(crate) fn fuzz(script: &[u8], table: &[u8], size: u64) -> io::Result<Vec<u8>> {
    let mut writer = SplitWriter::new(Vec::new())?;
    writer.script.extend_from_slice(script);
    writer.table.extend_from_slice(table);
    writer.first = (table.len() / ROW) as u64;
    writer.finish(size)
}

/// Records an input in a split as it is consumed, except the content of files.
pub(crate) struct Recorder<I, W> {
    input: I,
    split: SplitWriter<W>,
    /// Why recording failed: `consume` cannot say so itself.
    failed: Option<io::Error>,
}

impl<I: Input, W: Write> Recorder<I, W> {
    pub(crate) fn new(input: I, sink: W) -> io::Result<Self> {
        Ok(Self { input, split: SplitWriter::new(sink)?, failed: None })
    }

    /// The input itself. Bytes taken from it are not recorded: they must be the content of a file,
    /// announced by [`SplitWriter::object`].
    pub(crate) fn content(&mut self) -> &mut I {
        &mut self.input
    }

    pub(crate) fn split(&mut self) -> &mut SplitWriter<W> {
        &mut self.split
    }

    /// Takes the rest of the input; returns its length in bytes.
    pub(crate) fn drain(&mut self) -> io::Result<u64> {
        io::copy(self, &mut io::sink())
    }

    pub(crate) fn finish(self, size: u64) -> io::Result<W> {
        match self.failed {
            Some(error) => Err(error),
            None => self.split.finish(size),
        }
    }
}

impl<I: Input, W: Write> Read for Recorder<I, W> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        read_buffered(self, buf)
    }
}

impl<I: Input, W: Write> BufRead for Recorder<I, W> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.input.fill_buf(),
        }
    }

    fn consume(&mut self, count: usize) {
        let bytes = self.input.fill_buf().unwrap_or_default();
        let recorded = self.split.literal(&bytes[..count.min(bytes.len())]);
        if let Err(error) = recorded {
            self.failed.get_or_insert(error);
        }
        self.input.consume(count);
    }
}

impl<I: Input, W: Write> Input for Recorder<I, W> {}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SplitError {
    /// With its source, which says whether it is damage.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is not one, or it is damaged.
    #[error("offset {offset}: {what}")]
    Bad { offset: u64, what: &'static str },
}

/// What comes next in an archive.
pub(crate) enum Instruction {
    /// Bytes that are to be taken from [`Split::read`].
    Literal,
    /// An object of that size: all of it, or as many ranges, to be taken from [`Split::range`].
    Object {
        digest: Digest,
        size: u64,
        ranges: Option<u64>,
    },
    End,
}

/// Reads a split. Any bytes give instructions or an error; memory is two blocks.
pub(crate) struct Split<'a, S> {
    script: Blocks<'a, S>,
    table: Blocks<'a, S>,
    /// Bytes of the literal at hand that nobody took yet.
    literal_left: u64,
    ranges_left: u64,
    /// Bytes of the archive that the script has given so far.
    size: u64,
}

impl<'a, S: ReadAt> Split<'a, S> {
    pub(crate) fn open(source: &'a S) -> Result<Self, SplitError> {
        let mut magic = [0; MAGIC.len()];
        read_exact(source, &mut magic, 0)?;
        if magic != *MAGIC {
            return Err(SplitError::Bad { offset: 0, what: "not a split, or of a later version" });
        }
        Ok(Self {
            script: Blocks::new(source, SCRIPT),
            table: Blocks::new(source, TABLE),
            literal_left: 0,
            ranges_left: 0,
            size: 0,
        })
    }

    /// What comes next; the rest of the one before must have been taken.
    pub(crate) fn instruction(&mut self) -> Result<Instruction, SplitError> {
        debug_assert!(self.literal_left == 0 && self.ranges_left == 0);
        if self.script.available()? == 0 {
            let rows_left = self.table.available()?;
            let totals = [self.script.given, self.table.given / ROW as u64, self.size];
            return match self.script.totals {
                Some(expected) if rows_left == 0 && expected == totals => Ok(Instruction::End),
                _ => Err(self.script.bad("its totals are wrong")),
            };
        }
        let number = self.script.number()?;
        let count = number >> 2;
        match number & 3 {
            LITERAL if count > 0 => {
                self.literal_left = count;
                self.grow(count)?;
                Ok(Instruction::Literal)
            }
            WHOLE if count == 0 => {
                let (digest, size) = self.row()?;
                self.grow(size)?;
                Ok(Instruction::Object { digest, size, ranges: None })
            }
            RANGES => {
                let (digest, size) = self.row()?;
                self.ranges_left = count;
                Ok(Instruction::Object { digest, size, ranges: Some(count) })
            }
            _ => Err(self.script.bad("an unknown instruction")),
        }
    }

    /// Up to `buf.len()` bytes of the literal at hand; 0 when there are none left.
    pub(crate) fn read(&mut self, buf: &mut [u8]) -> Result<usize, SplitError> {
        let want = buf.len().min(usize::try_from(self.literal_left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let count = self.script.available()?.min(want);
        if count == 0 {
            return Err(self.script.bad("the script ends in the middle of an instruction"));
        }
        buf[..count].copy_from_slice(self.script.take(count));
        self.literal_left -= count as u64;
        Ok(count)
    }

    /// Bytes of the object to leave out, then bytes to take. `None` after the last range.
    pub(crate) fn range(&mut self) -> Result<Option<(u64, u64)>, SplitError> {
        if self.ranges_left == 0 {
            return Ok(None);
        }
        self.ranges_left -= 1;
        let range = (self.script.number()?, self.script.number()?);
        self.grow(range.1)?;
        Ok(Some(range))
    }

    fn row(&mut self) -> Result<(Digest, u64), SplitError> {
        // Blocks of the table are whole rows.
        if self.table.available()? < ROW {
            return Err(self.table.bad("the table is shorter than the script says"));
        }
        let (mut digest, mut size) = ([0; 32], [0; 8]);
        digest.copy_from_slice(self.table.take(32));
        size.copy_from_slice(self.table.take(8));
        Ok((Digest(digest), u64::from_le_bytes(size)))
    }

    fn grow(&mut self, bytes: u64) -> Result<(), SplitError> {
        let size = self.size.checked_add(bytes);
        self.size = size.ok_or_else(|| self.script.bad("an archive of absurd size"))?;
        Ok(())
    }
}

/// Visits the objects of a split, with their sizes, without reading its script.
pub(crate) fn objects<S: ReadAt>(
    source: &S,
    visit: &mut dyn FnMut(Digest, u64),
) -> Result<(), SplitError> {
    let mut split = Split::open(source)?;
    while split.table.available()? > 0 {
        let (digest, size) = split.row()?;
        visit(digest, size);
    }
    match split.table.totals {
        Some([_, rows, _]) if rows == split.table.given / ROW as u64 => Ok(()),
        _ => Err(split.table.bad("its totals are wrong")),
    }
}

/// [`objects`] of a split whose every block, the script's too, has been read and makes sense.
pub(crate) fn check<S: ReadAt>(
    source: &S,
    visit: &mut dyn FnMut(Digest, u64),
) -> Result<(), SplitError> {
    let mut split = Split::open(source)?;
    let mut buffer = vec![0; LITERAL_MAX];
    loop {
        match split.instruction()? {
            Instruction::End => return Ok(()),
            Instruction::Literal => while split.read(&mut buffer)? > 0 {},
            Instruction::Object { digest, size, .. } => {
                visit(digest, size);
                while split.range()?.is_some() {}
            }
        }
    }
}

/// The blocks of one kind, one after the other.
struct Blocks<'a, S> {
    source: &'a S,
    kind: u32,
    /// Where the next block begins, and where the last one did.
    next: u64,
    last: u64,
    raw: Vec<u8>,
    at: usize,
    /// Bytes taken so far.
    given: u64,
    /// What the last block says, once it was reached.
    totals: Option<[u64; 3]>,
}

impl<'a, S: ReadAt> Blocks<'a, S> {
    fn new(source: &'a S, kind: u32) -> Self {
        let next = MAGIC.len() as u64;
        Self { source, kind, next, last: 0, raw: Vec::new(), at: 0, given: 0, totals: None }
    }

    fn bad(&self, what: &'static str) -> SplitError {
        SplitError::Bad { offset: self.last, what }
    }

    /// Bytes that can be taken at once; 0 at the end only.
    fn available(&mut self) -> Result<usize, SplitError> {
        while self.at == self.raw.len() && self.totals.is_none() {
            self.last = self.next;
            let mut head = [[0; 4]; 3];
            read_exact(self.source, head.as_flattened_mut(), self.next)?;
            let [kind, raw, stored] = head.map(u32::from_le_bytes);
            let (raw, stored) = (raw as usize, stored as usize);
            let in_bounds =
                raw > 0 && raw <= RAW_MAX && stored <= zstd::zstd_safe::compress_bound(raw);
            if !in_bounds || !(SCRIPT..=END).contains(&kind) {
                return Err(self.bad("not a block"));
            }
            let from = self.next + HEAD as u64;
            self.next = from + stored as u64;
            if kind != self.kind && kind != END {
                continue;
            }
            let mut frame = vec![0; stored];
            read_exact(self.source, &mut frame, from)?;
            let content = zstd::bulk::decompress(&frame, raw);
            let content = content.map_err(|_| self.bad("a block that cannot be unpacked"))?;
            if content.len() != raw || (kind == TABLE && raw % ROW != 0) {
                return Err(self.bad("a block of the wrong size"));
            }
            if kind == END {
                self.totals = Some(self.end(&content)?);
                continue;
            }
            (self.raw, self.at) = (content, 0);
        }
        Ok(self.raw.len() - self.at)
    }

    fn end(&self, content: &[u8]) -> Result<[u64; 3], SplitError> {
        match content.as_chunks() {
            (&[script, rows, size], []) if self.next == self.source.size() => {
                Ok([script, rows, size].map(u64::from_le_bytes))
            }
            _ => Err(self.bad("its trailer is wrong")),
        }
    }

    /// Takes bytes that are available.
    fn take(&mut self, count: usize) -> &[u8] {
        let from = self.at;
        self.at += count;
        self.given += count as u64;
        &self.raw[from..self.at]
    }

    fn number(&mut self) -> Result<u64, SplitError> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            if self.available()? == 0 {
                return Err(self.bad("the script ends in the middle of an instruction"));
            }
            let byte = self.take(1)[0];
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(self.bad("a number that is too large"))
    }
}

/// Reads, keeping damage and I/O apart: a file that ends early is damaged.
fn read_exact<S: ReadAt>(source: &S, buf: &mut [u8], offset: u64) -> Result<(), SplitError> {
    source.read_exact_at(buf, offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => SplitError::Bad { offset, what: "it ends early" },
        _ => SplitError::Io(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(seed: u64) -> Digest {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        Digest(bytes)
    }

    /// What the instructions say, with literals together.
    #[derive(Debug, PartialEq)]
    enum Seen {
        Literal(Vec<u8>),
        Object(Digest, u64, Option<Vec<(u64, u64)>>),
    }

    fn read(bytes: &Vec<u8>) -> Result<Vec<Seen>, SplitError> {
        let mut split = Split::open(bytes)?;
        let mut seen: Vec<Seen> = Vec::new();
        // Takes what a split says; one that is damaged must not say more than it can hold.
        for _ in 0..1 << 20 {
            match split.instruction()? {
                Instruction::End => return Ok(seen),
                Instruction::Literal => {
                    let mut buffer = vec![0; 1000];
                    loop {
                        let count = split.read(&mut buffer)?;
                        match seen.last_mut() {
                            _ if count == 0 => break,
                            Some(Seen::Literal(all)) => all.extend_from_slice(&buffer[..count]),
                            _ => seen.push(Seen::Literal(buffer[..count].to_vec())),
                        }
                    }
                }
                Instruction::Object { digest, size, ranges } => {
                    let mut list = Vec::new();
                    while let Some(range) = split.range()? {
                        list.push(range);
                    }
                    seen.push(Seen::Object(digest, size, ranges.map(|_| list)));
                }
            }
        }
        panic!("a split without an end");
    }

    /// Objects whose digests come out of order, literals of every length, a map beyond a block.
    fn made() -> (Vec<u8>, Vec<Seen>) {
        let mut writer = SplitWriter::new(Vec::new()).unwrap();
        let mut expected = Vec::new();
        let (mut size, mut waiting) = (0, Vec::new());
        for number in 0..10_000u64 {
            let literal = vec![b'h'; 1 + usize::try_from(number % 7 * 131).unwrap()];
            writer.literal(&literal).unwrap();
            size += literal.len() as u64;
            expected.push(Seen::Literal(literal));
            let pairs = || (0..100_000u64).map(|n| (n * 5_000_000_000 + 3, 7)).collect::<Vec<_>>();
            let parts = (number == 77).then(pairs);
            waiting.push(writer.object(parts.as_deref()).unwrap());
            size += parts.as_ref().map_or(number, |parts| parts.len() as u64 * 7);
            let relative = parts.map(|parts| {
                let mut at = 0;
                let step = |(offset, length)| {
                    let hole = offset - std::mem::replace(&mut at, offset + length);
                    (hole, length)
                };
                parts.into_iter().map(step).collect()
            });
            expected.push(Seen::Object(digest(number), number, relative));
            if number % 50 == 49 {
                for number in waiting.drain(..).rev() {
                    writer.stored(number, digest(number), number).unwrap();
                }
            }
        }
        writer.literal(&[0; 300_000]).unwrap();
        expected.push(Seen::Literal(vec![0; 300_000]));
        (writer.finish(size + 300_000).unwrap(), expected)
    }

    #[test]
    fn what_is_written_is_read() {
        let (bytes, expected) = made();
        assert_eq!(read(&bytes).unwrap(), expected);
        let mut named = Vec::new();
        objects(&bytes, &mut |digest, size| named.push((digest, size))).unwrap();
        assert_eq!(named, (0..10_000).map(|n| (digest(n), n)).collect::<Vec<_>>());
    }

    /// A disk that lies, at every place: an error, or by rare luck the same. What is cut short is
    /// never taken for less: garbage collection would take away what is still needed.
    #[test]
    fn damage_is_an_error() {
        let (bytes, expected) = made();
        for length in (0..bytes.len()).step_by(9973).chain(bytes.len() - 60..bytes.len()) {
            let cut = bytes[..length].to_vec();
            assert!(read(&cut).is_err(), "cut at {length}");
            assert!(objects(&cut, &mut |_, _| {}).is_err(), "cut at {length}");
        }
        let mut state = 1u64;
        for _ in 0..400 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let mut changed = bytes.clone();
            let at = usize::try_from((state >> 33) % bytes.len() as u64).unwrap();
            changed[at] ^= 1 << (state >> 61);
            if let Ok(seen) = read(&changed) {
                assert_eq!(seen, expected, "byte {at}");
            }
        }
        // A script that means nothing, in blocks that are in order.
        for script in [&b"\x03"[..], b"\x00", b"\x05", b"\x01", b"\x08a", b"\x0a\x01", &[0xff; 12]]
        {
            let mut writer = SplitWriter::new(Vec::new()).unwrap();
            writer.script.extend_from_slice(script);
            let bytes = writer.finish(0).unwrap();
            assert!(matches!(read(&bytes), Err(SplitError::Bad { .. })), "{script:?}");
        }
    }
}
