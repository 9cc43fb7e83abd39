//! Writing segments.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::mem::take;
use std::ops::Range;

use sha2::{Digest as _, Sha256};

use super::super::PackError;
use super::index::{Footer, PAGE_HASH_SIZE, PAGES_MAX};
use super::{
    BLOCK, BlockRef, DEVICE_ALIGN, Form, HOLES_MAX, IndexEntry, Run, SHA256_SIZE_MAX, Segment,
    granule,
};
use cofolio_erofs::write::lz4::Pcluster;
use cofolio_store::task::Cancel;
use cofolio_store::verity::{Hasher, block_digests, zero_digest};
use cofolio_store::{
    At as _, Buffer, Digest, Domain, Error, FileKind, FileName, Piece, Result, StagedFile, Staging,
    StoredFile,
};

const PAGE: usize = 4096;
/// How much is gathered before it is written, in bytes.
const WRITE_SIZE: usize = 1 << 20;
/// Bytes of content, at multiples of them, that are looked up together ([`SegmentWriter::unit`]).
/// Fewer would find a little more but enlarge the table in packs, which is in memory while the file
/// is read.
const CHUNK: usize = 16 * PAGE;
/// Least bytes of a run in another segment, since each run is a seek; the content's end may be
/// shorter.
const RUN_MIN: usize = 128 * PAGE;
static ZEROS: [u8; CHUNK] = [0; CHUNK];

/// The pages that segments hold, so that new contents can refer to them.
#[derive(Debug, Default)]
pub struct Pages {
    /// By hash: the number of the segment, and the block there.
    places: HashMap<u64, (u32, u32)>,
    segments: Vec<Known>,
}

#[derive(Debug)]
struct Known {
    digest: Digest,
    file: StoredFile,
    blocks: u32,
}

impl Pages {
    /// Adds the pages of a segment of the domain, if it lists them.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Corrupt`], [`Error::Io`].
    pub fn add(&mut self, domain: &Domain, digest: &Digest) -> Result<()> {
        let file = domain.open_segment(digest)?;
        let footer = Footer::read(&file)?;
        let blocks = footer.blocks.get();
        let mut table = vec![0; usize::try_from(footer.pages_size()).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut table, footer.pages_at()).at("read", file.path())?;
        let hashes = table.as_chunks::<PAGE_HASH_SIZE>().0.iter().map(|it| u64::from_le_bytes(*it));
        self.add_known(Known { digest: *digest, file, blocks }, hashes.zip(0..));
        Ok(())
    }

    /// Adds those of a segment that was just written; gives its name and what it holds.
    pub fn add_written(&mut self, written: Written) -> (Digest, Segment) {
        let Written { digest, segment, pages, file } = written;
        if let Some(file) = file {
            self.add_known(Known { digest, file, blocks: segment.blocks }, pages.into_iter());
        }
        (digest, segment)
    }

    fn add_known(&mut self, segment: Known, pages: impl Iterator<Item = (u64, u32)>) {
        let number = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segments.push(segment);
        let zeros = hash_of(zero_digest());
        for (hash, block) in pages.filter(|(hash, _)| *hash != zeros) {
            self.places.entry(hash).or_insert((number, block));
        }
    }
}

/// A segment that is written, and staged.
#[derive(Debug)]
pub struct Written {
    /// Its name.
    pub digest: Digest,
    /// What it holds.
    pub segment: Segment,
    pages: HashMap<u64, u32>,
    /// None if the disk is full.
    file: Option<StoredFile>,
}

/// Writes one segment.
pub struct SegmentWriter<'a> {
    file: StagedFile<'a>,
    hasher: Hasher,
    buffer: Buffer,
    segment: Segment,
    /// What other segments have.
    known: &'a Pages,
    cancel: &'a Cancel,
    /// Of these, the numbers of those that it refers to.
    others: Vec<u32>,
    /// By hash: the block here.
    pages: HashMap<u64, u32>,
    /// The hashes, in the order of the blocks.
    hashes: Vec<u64>,
    /// The file, for comparing contents with those that are written already.
    copy: Option<StoredFile>,
}

impl<'a> SegmentWriter<'a> {
    /// A writer for a segment of a form, without plain content in `known`. Fails like
    /// [`Staging::put_object`].
    pub fn new(
        staging: &'a Staging,
        form: Form,
        known: &'a Pages,
        cancel: &'a Cancel,
    ) -> Result<Self> {
        Ok(Self {
            file: staging.file_writer()?,
            hasher: Hasher::new(),
            buffer: Buffer::new(WRITE_SIZE),
            segment: Segment { form, ..Segment::default() },
            known,
            cancel,
            others: Vec::new(),
            pages: HashMap::new(),
            hashes: Vec::new(),
            copy: None,
        })
    }
}

/// A plain content that is being added.
struct Adding<'c> {
    source: &'c StoredFile,
    size: u64,
    hashers: Hashers,
    /// How much of it was seen, in bytes.
    seen: u64,
    /// How many bytes of zeros, in whole blocks, were seen last and have no run yet.
    zeros: u64,
    /// Where a hole of the content begins and ends: at multiples of this.
    granule: u64,
    /// What was read and is not a whole chunk yet.
    rest: Vec<u8>,
    /// What is to be appended by sharing its blocks with the source.
    pending: Range<u64>,
    runs: Vec<Run>,
}

impl Adding<'_> {
    fn push(&mut self, place: Option<BlockRef>, blocks: u32) {
        let goes_on = |last: &&mut Run| match (last.at, place) {
            (Some(last_place), Some(place)) => {
                last_place.segment == place.segment
                    && last_place.block.checked_add(last.blocks) == Some(place.block)
            }
            (None, None) => true,
            _ => false,
        };
        match self.runs.last_mut().filter(goes_on) {
            Some(last) => last.blocks += blocks,
            None => self.runs.push(Run { at: place, blocks }),
        }
    }
}

impl SegmentWriter<'_> {
    /// Adds the content of a nonempty object of the domain, uncompressed. Refers to existing pages,
    /// and shares the other blocks with the object where the filesystem can.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::SizeMismatch`], [`Error::Corrupt`] if the content has another
    /// digest than its name, [`PackError::TooLarge`] if a segment cannot address it, and those of
    /// [`Staging::put_object`].
    pub fn add(&mut self, object: &Digest, size: u64) -> Result<(), PackError> {
        debug_assert_ne!(self.segment.form, Form::Lz4, "all contents are kept in one way");
        let source = self.open(object, size)?;
        let block = self.segment.blocks;
        self.room(object, size, size.div_ceil(BLOCK))?;
        let mut adding = Adding {
            source: &source,
            size,
            hashers: Hashers::new(size),
            seen: 0,
            zeros: 0,
            granule: self.granule(size),
            rest: Vec::new(),
            pending: 0..0,
            runs: Vec::new(),
        };
        source.for_pieces(|piece| {
            self.cancel.check()?;
            match piece {
                Piece::Data(data) => self.data(&mut adding, data),
                Piece::Hole(len) => self.zeros(&mut adding, len),
            }
        })?;
        let rest = take(&mut adding.rest);
        self.chunk(&mut adding, &rest)?;
        let end = size.next_multiple_of(BLOCK);
        self.place_zeros(&mut adding, end, end)?;
        self.flush_pending(&mut adding)?;
        let Adding { hashers, mut runs, .. } = adding;
        let sha256 = hashers.finish(&source, object)?;
        let blocks = self.segment.blocks - block;
        if u64::from(blocks) == size.div_ceil(BLOCK) {
            runs.clear();
        }
        self.segment.entries.push(IndexEntry {
            object: *object,
            sha256,
            size,
            block,
            blocks,
            runs,
        });
        Ok(())
    }

    /// Adds the content of a nonempty object of the domain, compressed: `compress` reads it to its
    /// end, writes blocks of 4 KiB and returns what is in each.
    ///
    /// # Errors
    /// Those of [`SegmentWriter::add`] and `compress`, and `InvalidData` if the returned
    /// pclusters are not what it read and wrote.
    pub fn add_compressed(
        &mut self,
        object: &Digest,
        size: u64,
        compress: impl FnOnce(&mut dyn Read, &mut dyn Write) -> io::Result<Vec<Pcluster>>,
    ) -> Result<(), PackError> {
        debug_assert_eq!(self.segment.form, Form::Lz4, "all contents are kept in one way");
        let source = self.open(object, size)?;
        let stat = source.descriptor().and_then(|file| rustix::fs::fstat(file).ok());
        if stat.is_some_and(|it| size.saturating_sub(it.st_blocks as u64 * 512) > HOLES_MAX) {
            return Err(PackError::TooLarge { object: *object, size });
        }
        let mut hashers = Hashers::new(size);
        let cancel = self.cancel;
        let mut reader = Hashing { reader: source.reader(), hashers: &mut hashers, cancel };
        let mut writer = Blocks { segment: self, written: 0 };
        let pclusters = compress(&mut reader, &mut writer);
        let written = writer.written;
        let pclusters = pclusters.or_else(|error| match error.downcast::<Error>() {
            Ok(error) => Err(error),
            Err(error) => Err(error).at("read", source.path()),
        })?;
        let sha256 = hashers.finish(&source, object)?;
        let block = self.segment.blocks;
        let blocks = self.room(object, size, pclusters.len() as u64)?;
        self.segment.pclusters.extend(pclusters);
        let runs = Vec::new();
        let entry = IndexEntry { object: *object, sha256, size, block, blocks, runs };
        if !self.segment.fits(&entry) || written != u64::from(blocks) * BLOCK {
            Err(io::Error::from(io::ErrorKind::InvalidData)).at("compress", source.path())?;
        }
        self.segment.blocks += blocks;
        self.segment.entries.push(entry);
        Ok(())
    }

    fn open(&self, object: &Digest, size: u64) -> Result<StoredFile> {
        let source = self.file.staging().domain().open_object(object)?;
        let found = source.size().at("look at", source.path())?;
        match found == size {
            true => Ok(source),
            false => Err(Error::SizeMismatch { digest: *object, expected: size, found }),
        }
    }

    /// The number of blocks, if the segment can address that many more.
    fn room(&self, object: &Digest, size: u64, blocks: u64) -> Result<u32, PackError> {
        let blocks = u32::try_from(blocks).ok();
        blocks
            .filter(|blocks| self.segment.blocks.checked_add(*blocks).is_some())
            .ok_or(PackError::TooLarge { object: *object, size })
    }

    /// Takes the next bytes of a content.
    fn data(&mut self, adding: &mut Adding<'_>, mut data: &[u8]) -> Result<()> {
        if !adding.rest.is_empty() {
            let count = data.len().min(CHUNK - adding.rest.len());
            adding.rest.extend_from_slice(&data[..count]);
            data = &data[count..];
            if adding.rest.len() < CHUNK {
                return Ok(());
            }
            let mut chunk = take(&mut adding.rest);
            self.chunk(adding, &chunk)?;
            chunk.clear();
            adding.rest = chunk;
        }
        let (chunks, rest) = data.as_chunks::<CHUNK>();
        for chunk in chunks {
            self.chunk(adding, chunk)?;
        }
        adding.rest.extend_from_slice(rest);
        Ok(())
    }

    /// Takes `len` zeros of a content, from a hole.
    fn zeros(&mut self, adding: &mut Adding<'_>, len: u64) -> Result<()> {
        let to_chunk = |bytes: u64| usize::try_from(bytes).unwrap_or(CHUNK).min(CHUNK);
        let before = match adding.rest.len() {
            0 => 0,
            gathered => to_chunk(len).min(CHUNK - gathered),
        };
        self.data(adding, &ZEROS[..before])?;
        let whole = (len - before as u64) / CHUNK as u64;
        let rest = to_chunk((len - before as u64) % CHUNK as u64);
        if whole > 0 {
            self.flush_pending(adding)?;
            adding.hashers.zeros(whole * CHUNK as u64);
            adding.seen += whole * CHUNK as u64;
            adding.zeros += whole * CHUNK as u64;
        }
        self.data(adding, &ZEROS[..rest])
    }

    /// Bytes of content, at multiples of them, that are looked up together.
    fn unit(&self) -> usize {
        if self.segment.form == Form::Dax { PAGE } else { CHUNK }
    }

    /// At which multiples holes of a content begin and end.
    fn granule(&self, size: u64) -> u64 {
        match self.segment.form {
            // A guest reads the table of a file once: up to 4 GiB it has an entry for each page.
            Form::Dax => (size >> 20).next_power_of_two().max(BLOCK),
            _ => granule(size),
        }
    }

    /// Takes the next chunk of a content; the last one may be shorter.
    fn chunk(&mut self, adding: &mut Adding<'_>, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let digests = block_digests(data);
        adding.hashers.verity.digests(data.len() as u64, &digests);
        adding.hashers.sha256.iter_mut().for_each(|sha256| sha256.update(data));
        let unit = self.unit();
        let units = data.chunks(unit).zip(digests.chunks(unit / PAGE));
        units.into_iter().try_for_each(|(data, digests)| self.place(adding, data, digests))
    }

    /// Places a unit of a content; the last one may be shorter.
    fn place(&mut self, adding: &mut Adding<'_>, data: &[u8], digests: &[[u8; 32]]) -> Result<()> {
        // At most those of a chunk.
        let blocks = u32::try_from(digests.len()).unwrap_or(u32::MAX);
        let start = adding.seen;
        adding.seen += data.len() as u64;
        if digests.iter().all(|digest| digest == zero_digest()) {
            self.flush_pending(adding)?;
            adding.zeros += u64::from(blocks) * BLOCK;
            return Ok(());
        }
        self.place_zeros(adding, start, start - start % adding.granule)?;
        let is_looked_up = adding.granule == self.unit() as u64;
        let found = if is_looked_up { self.find(adding, data, digests)? } else { None };
        if let Some(place) = found {
            self.flush_pending(adding)?;
            adding.push(Some(place), blocks);
            return Ok(());
        }
        adding.push(Some(BlockRef { segment: 0, block: self.segment.blocks }), blocks);
        for (digest, block) in digests.iter().zip(self.segment.blocks..) {
            let hash = hash_of(digest);
            if block < PAGES_MAX {
                self.hashes.push(hash);
                if digest != zero_digest() {
                    self.pages.entry(hash).or_insert(block);
                }
            }
        }
        self.segment.blocks += blocks;
        self.hasher.digests(u64::from(blocks) * BLOCK, digests);
        if self.file.staging().domain().can_reflink() {
            if adding.pending.is_empty() {
                adding.pending.start = start;
            }
            adding.pending.end = adding.seen;
            return Ok(());
        }
        self.write(data)?;
        self.pad(adding.seen)
    }

    /// Gives the zeros before `end` their runs. Zeros in a granule with data become a hole of the
    /// segment, other zeros take no blocks. The granule of the following data begins at `granule`.
    fn place_zeros(&mut self, adding: &mut Adding<'_>, end: u64, granule: u64) -> Result<()> {
        let start = end - take(&mut adding.zeros);
        let after_data = adding.runs.last().is_some_and(|run| run.at.is_some());
        let first =
            if after_data { start.next_multiple_of(adding.granule).min(end) } else { start };
        let last = granule.max(first);
        self.hole(adding, first - start)?;
        if last > first {
            adding.push(None, blocks_of(last - first));
        }
        self.hole(adding, end - last)
    }

    /// Appends zeros of a content, which are whole blocks.
    fn hole(&mut self, adding: &mut Adding<'_>, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.flush_pending(adding)?;
        self.flush()?;
        self.file.append_hole(len)?;
        self.hasher.zeros(len);
        let (block, blocks) = (self.segment.blocks, blocks_of(len));
        adding.push(Some(BlockRef { segment: 0, block }), blocks);
        self.segment.blocks += blocks;
        let pages = self.segment.blocks.min(PAGES_MAX) as usize;
        self.hashes.resize(pages, hash_of(zero_digest()));
        Ok(())
    }

    /// The block at which a unit is stored already: behind the previous one, or by one of its pages.
    fn find(
        &mut self,
        adding: &mut Adding<'_>,
        data: &[u8],
        digests: &[[u8; 32]],
    ) -> Result<Option<BlockRef>> {
        if let Some(Run { at: Some(place), blocks }) = adding.runs.last().copied()
            && let Some(block) = place.block.checked_add(blocks)
        {
            let known = place.segment.checked_sub(1).map(|number| self.others[number as usize]);
            if self.is_at(adding, data, known, block)? {
                return Ok(Some(BlockRef { block, ..place }));
            }
        }
        let mut places: Vec<(Option<u32>, u32)> = Vec::new();
        let is_whole = data.len().next_multiple_of(PAGE) >= self.unit();
        let pages = if is_whole { digests } else { &[] };
        for (digest, before) in pages.iter().zip(0..) {
            let hash = hash_of(digest);
            let (known, block) = match (self.pages.get(&hash), self.known.places.get(&hash)) {
                (Some(block), _) => (None, *block),
                (None, Some((number, block))) => (Some(*number), *block),
                (None, None) => continue,
            };
            let place = block.checked_sub(before).map(|block| (known, block));
            places.extend(place.filter(|place| !places.contains(place)));
        }
        let mut ahead = Vec::new();
        for (known, block) in places {
            if self.is_at(adding, data, known, block)?
                && self.goes_on(adding, &mut ahead, known, block)?
            {
                let segment = known.map_or(0, |number| self.refer_to(number));
                return Ok(Some(BlockRef { segment, block }));
            }
        }
        Ok(None)
    }

    /// Whether content is in a known segment, or this one, from a block on; false if unreadable.
    fn is_at(
        &mut self,
        adding: &mut Adding<'_>,
        data: &[u8],
        known: Option<u32>,
        block: u32,
    ) -> Result<bool> {
        let known = known.and_then(|number| self.known.segments.get(number as usize));
        let blocks = known.map_or(self.segment.blocks, |known| known.blocks);
        let mut found = vec![0; data.len().next_multiple_of(PAGE)];
        let start = u64::from(block) * BLOCK;
        if start + found.len() as u64 > u64::from(blocks) * BLOCK {
            return Ok(false);
        }
        let read = match known {
            Some(known) => known.file.read_exact_at(&mut found, start),
            None => {
                self.flush_pending(adding)?;
                self.flush()?;
                self.read_back(&mut found, start)
            }
        };
        let (content, padding) = found.split_at(data.len());
        Ok(read.is_ok() && content == data && padding.iter().all(|byte| *byte == 0))
    }

    /// Whether enough blocks after a unit match as well for a run; `ahead` caches what was read.
    /// With DAX a page is enough.
    fn goes_on(
        &mut self,
        adding: &mut Adding<'_>,
        ahead: &mut Vec<u8>,
        known: Option<u32>,
        block: u32,
    ) -> Result<bool> {
        if self.segment.form == Form::Dax {
            return Ok(true);
        }
        let rest = usize::try_from(adding.size - adding.seen).unwrap_or(usize::MAX);
        if ahead.is_empty() {
            ahead.resize(rest.min(RUN_MIN - CHUNK), 0);
            if adding.source.read_exact_at(ahead, adding.seen).is_err() {
                return Ok(false);
            }
        }
        let chunk = u32::try_from(CHUNK / PAGE).unwrap_or(0);
        let next = block.checked_add(chunk);
        next.map_or(Ok(false), |next| self.is_at(adding, ahead, known, next))
    }

    fn read_back(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if self.copy.is_none() {
            self.copy = Some(self.file.open()?);
        }
        self.copy.as_ref().map_or(Ok(()), |copy| copy.read_exact_at(buffer, offset))
    }

    /// The number by which runs refer to a known segment.
    fn refer_to(&mut self, known: u32) -> u32 {
        let index = self.others.iter().position(|other| *other == known);
        let index = index.unwrap_or_else(|| {
            self.others.push(known);
            self.others.len() - 1
        });
        u32::try_from(index + 1).unwrap_or(u32::MAX)
    }

    /// Appends the pending range of a content: by sharing blocks, or by copying where that fails.
    fn flush_pending(&mut self, adding: &mut Adding<'_>) -> Result<()> {
        let pending = take(&mut adding.pending);
        if pending.is_empty() {
            return Ok(());
        }
        self.flush()?;
        let end = pending.end;
        if !self.file.append_shared(adding.source, pending.clone())? {
            adding.source.for_pieces_in(pending, |piece| match piece {
                Piece::Data(data) => self.write(data),
                Piece::Hole(len) => {
                    self.flush()?;
                    self.file.append_hole(len)
                }
            })?;
        }
        self.pad(end)
    }

    /// Pads a content of `size` bytes to a whole block.
    fn pad(&mut self, size: u64) -> Result<()> {
        let padding = usize::try_from(size.next_multiple_of(BLOCK) - size).unwrap_or(0);
        self.write(&ZEROS[..padding])
    }

    /// Ends the segment; fails as [`Staging::put_object`] does.
    pub fn finish(mut self) -> Result<Written> {
        if self.segment.blocks == 0 {
            // An empty device is invalid: write one zero block.
            self.segment.blocks = 1;
            self.hashes.push(hash_of(zero_digest()));
            self.hasher.zeros(BLOCK);
            self.file.append_hole(BLOCK)?;
        }
        let others = self.others.iter().map(|other| self.known.segments[*other as usize].digest);
        self.segment.others = others.collect();
        let mut end: Vec<u8> = self.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        end.extend(self.segment.encode());
        if self.segment.form == Form::Dax {
            let size = u64::from(self.segment.blocks) * BLOCK + end.len() as u64;
            let padding = size.next_multiple_of(DEVICE_ALIGN) - size;
            self.flush()?;
            self.file.append_hole(padding)?;
            self.hasher.zeros(padding);
        }
        self.hasher.update(&end);
        self.write(&end)?;
        self.flush()?;
        let Self { file, hasher, segment, pages, .. } = self;
        let (staging, digest) = (file.staging(), hasher.finish());
        let name = FileName::content(FileKind::Segment, &digest);
        file.finish(&name)?;
        let file = staging.open_named(&name)?;
        Ok(Written { digest, segment, pages, file })
    }

    fn write(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let spare = self.buffer.spare();
            let count = spare.len().min(data.len());
            spare[..count].copy_from_slice(&data[..count]);
            self.buffer.advance(count);
            data = &data[count..];
            if self.buffer.spare().is_empty() {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if !self.buffer.filled().is_empty() {
            self.file.append(self.buffer.filled())?;
            self.buffer.clear();
        }
        Ok(())
    }
}

/// The number of blocks of whole blocks of a content: `room` has checked that they can be counted.
fn blocks_of(bytes: u64) -> u32 {
    u32::try_from(bytes / BLOCK).unwrap_or(u32::MAX)
}

/// Hashes a content for the object's name and, if it is not too large, for the kernel.
struct Hashers {
    verity: Hasher,
    sha256: Option<Sha256>,
}

impl Hashers {
    fn new(size: u64) -> Self {
        let sha256 = (size <= SHA256_SIZE_MAX).then(Sha256::new);
        Self { verity: Hasher::new(), sha256 }
    }

    fn zeros(&mut self, len: u64) {
        self.verity.zeros(len);
        if let Some(sha256) = &mut self.sha256 {
            (0..len / CHUNK as u64).for_each(|_| sha256.update(ZEROS));
        }
    }

    /// The SHA-256, if the content is that of the object.
    fn finish(self, source: &StoredFile, object: &Digest) -> Result<[u8; 32]> {
        let digest = self.verity.finish();
        match digest == *object {
            true => Ok(self.sha256.map_or([0; 32], |sha256| sha256.finalize().into())),
            false => Err(Error::corrupt(source.path(), format!("its content has digest {digest}"))),
        }
    }
}

/// Reads content, and hashes it.
struct Hashing<'h, R> {
    reader: R,
    hashers: &'h mut Hashers,
    cancel: &'h Cancel,
}

impl<R: Read> Read for Hashing<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.cancel.check().map_err(io::Error::other)?;
        let count = self.reader.read(buffer)?;
        self.hashers.verity.update(&buffer[..count]);
        self.hashers.sha256.iter_mut().for_each(|sha256| sha256.update(&buffer[..count]));
        Ok(count)
    }
}

/// Writes blocks to a segment, and hashes them with it. Errors hold an [`Error`].
struct Blocks<'s, 'a> {
    segment: &'s mut SegmentWriter<'a>,
    written: u64,
}

impl Write for Blocks<'_, '_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.segment.hasher.update(data);
        self.segment.write(data).map_err(io::Error::other)?;
        self.written += data.len() as u64;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The key of a page: the first 8 bytes of its SHA-256.
fn hash_of(digest: &[u8; 32]) -> u64 {
    digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
