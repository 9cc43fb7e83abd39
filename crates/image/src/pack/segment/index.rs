//! What a segment says of itself, at its end.

use std::io;

use sha2::{Digest as _, Sha256};

use super::{BLOCK, Extent, Form, Part, Place, Run, Segment};
use cofolio_store::{At as _, Digest, Error, Result, StoredFile};

const EXTENT_SIZE: usize = 80;
const PART_SIZE: usize = 4;
const OTHER_SIZE: usize = 32;
const RUN_SIZE: usize = 12;
/// Bytes of what is said of each page, before the index.
pub(super) const PAGE_HASH_SIZE: usize = 8;
/// Of this many blocks (1 GiB) a segment says it. The hashes are in memory while it is written.
pub(super) const PAGES_MAX: u32 = 1 << 18;
const FOOTER_SIZE: usize = 64;
const MAGIC: &[u8; 8] = b"cofolseg";
const VERSION: u32 = 1;
/// How the contents are kept.
const PLAIN: u32 = 0;
const LZ4: u32 = 1;
/// Of a block: what is in it is compressed.
const COMPRESSED: u32 = 1 << 31;
/// Most content in one block, in bytes; more would be too much to decompress for a page.
const PART_MAX: u32 = 1 << 20;
/// As the segment of a run: zeros, which are nowhere.
const NOWHERE: u32 = u32::MAX;

impl Segment {
    /// The index and the footer.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.extents.len() * EXTENT_SIZE + FOOTER_SIZE);
        for extent in &self.extents {
            bytes.extend_from_slice(&extent.object.0);
            bytes.extend_from_slice(&extent.sha256);
            bytes.extend_from_slice(&extent.size.to_le_bytes());
            bytes.extend_from_slice(&extent.block.to_le_bytes());
            bytes.extend_from_slice(&extent.blocks.to_le_bytes());
        }
        for part in &self.parts {
            let flag = if part.compressed { COMPRESSED } else { 0 };
            bytes.extend_from_slice(&(part.len | flag).to_le_bytes());
        }
        for other in &self.others {
            bytes.extend_from_slice(&other.0);
        }
        let mut runs = 0;
        for run in self.extents.iter().flat_map(|extent| &extent.runs) {
            let (segment, block) = run.place.map_or((NOWHERE, 0), |at| (at.segment, at.block));
            for number in [segment, block, run.blocks] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            runs += 1;
        }
        let sha256: [u8; 32] = Sha256::digest(&bytes).into();
        bytes.extend_from_slice(MAGIC);
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let (contents, others) = (number(self.extents.len()), number(self.others.len()));
        let form = if self.form() == Form::Plain { PLAIN } else { LZ4 };
        for number in [VERSION, contents, self.blocks, others] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&sha256);
        for number in [runs, form] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Reads what a file says of itself, and checks that this can be.
    pub(super) fn read(file: &StoredFile) -> Result<Self> {
        let damaged = |reason: &str| Error::corrupt(file.path(), reason.to_owned());
        let footer = Footer::read(file)?;
        let blocks = footer.blocks;
        // No larger than the file is.
        let mut index = vec![0; usize::try_from(footer.index_size()).unwrap_or(usize::MAX)];
        match file.read_exact_at(&mut index, u64::from(blocks) * BLOCK + footer.pages_size()) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(damaged("it ends within its index"));
            }
            other => other.at("read", file.path())?,
        }
        if Sha256::digest(&index)[..] != footer.sha256 {
            return Err(damaged("the checksum of its index is wrong"));
        }
        // The size of the index is made of the four.
        let (entries, rest) = index.split_at(footer.contents as usize * EXTENT_SIZE);
        let (parts, rest) = rest.split_at(footer.parts() as usize * PART_SIZE);
        let (others, runs) = rest.split_at(footer.others as usize * OTHER_SIZE);
        let part = |part: &[u8; PART_SIZE]| {
            let number = u32::from_le_bytes(*part);
            Part { len: number & !COMPRESSED, compressed: number & COMPRESSED != 0 }
        };
        let mut segment = Self {
            blocks,
            extents: Vec::with_capacity(footer.contents as usize),
            parts: parts.as_chunks().0.iter().map(part).collect(),
            others: others.as_chunks().0.iter().map(|digest| Digest(*digest)).collect(),
        };
        let mut runs = runs.as_chunks().0.iter().map(read_run);
        let mut end = 0;
        for entry in entries.as_chunks().0 {
            let mut extent = read_extent(entry);
            let whole = extent.size.div_ceil(BLOCK);
            if u64::from(extent.block) < end || extent.size == 0 {
                return Err(damaged("extents overlap, or one is empty"));
            }
            end = u64::from(extent.block) + u64::from(extent.blocks);
            if footer.form == PLAIN && u64::from(extent.blocks) != whole {
                extent.runs = segment
                    .take_runs(&mut runs, whole, end)
                    .ok_or_else(|| damaged("a run points past the end of its segment"))?;
            }
            segment.extents.push(extent);
        }
        if end > u64::from(blocks) || runs.next().is_some() {
            return Err(damaged(
                "an extent reaches past the end of the segment, or a run is left over",
            ));
        }
        let lz4 = footer.form == LZ4;
        match !lz4 || segment.extents.iter().all(|extent| segment.fits(extent)) {
            true => Ok(segment),
            false => Err(damaged("the compressed blocks do not fit the extents")),
        }
    }

    /// The runs of the next content, of `blocks` blocks; its blocks in this segment end at `end`.
    fn take_runs(
        &self,
        runs: &mut impl Iterator<Item = Run>,
        blocks: u64,
        end: u64,
    ) -> Option<Vec<Run>> {
        let (mut taken, mut left) = (Vec::new(), blocks);
        while left > 0 {
            let run = runs.next()?;
            let there = run.place.is_none_or(|place| match place.segment {
                0 => u64::from(place.block) + u64::from(run.blocks) <= end,
                other => other as usize <= self.others.len(),
            });
            left = left.checked_sub(u64::from(run.blocks)).filter(|_| there && run.blocks > 0)?;
            taken.push(run);
        }
        Some(taken)
    }

    /// Whether the blocks of a compressed content hold as much as it is long.
    pub(super) fn fits(&self, extent: &Extent) -> bool {
        let parts = self.parts_of(extent);
        let sound = |part: &Part| {
            (1..=PART_MAX).contains(&part.len) && (part.compressed || u64::from(part.len) <= BLOCK)
        };
        let len: u64 = parts.iter().map(|part| u64::from(part.len)).sum();
        parts.iter().all(sound) && len == extent.size
    }
}

fn read_extent(entry: &[u8; EXTENT_SIZE]) -> Extent {
    let mut extent = Extent {
        object: Digest([0; 32]),
        sha256: [0; 32],
        size: u64::from(le_u32(&entry[64..])) | u64::from(le_u32(&entry[68..])) << 32,
        block: le_u32(&entry[72..]),
        blocks: le_u32(&entry[76..]),
        runs: Vec::new(),
    };
    extent.object.0.copy_from_slice(&entry[..32]);
    extent.sha256.copy_from_slice(&entry[32..64]);
    extent
}

fn read_run(run: &[u8; RUN_SIZE]) -> Run {
    let (segment, block) = (le_u32(run), le_u32(&run[4..]));
    let place = (segment != NOWHERE).then_some(Place { segment, block });
    Run { place, blocks: le_u32(&run[8..]) }
}

/// The last bytes of a segment, which say how large it must be.
pub(super) struct Footer {
    form: u32,
    contents: u32,
    pub(super) blocks: u32,
    others: u32,
    runs: u32,
    sha256: [u8; 32],
}

impl Footer {
    pub(super) fn read(file: &StoredFile) -> Result<Self> {
        let damaged = |reason: &str| Error::corrupt(file.path(), reason.to_owned());
        let size = file.size().at("look at", file.path())?;
        let footer_at = size
            .checked_sub(FOOTER_SIZE as u64)
            .ok_or_else(|| damaged("too short for a segment's footer"))?;
        let mut bytes = [0; FOOTER_SIZE];
        file.read_exact_at(&mut bytes, footer_at).at("read", file.path())?;
        let number = |at: usize| le_u32(&bytes[at..]);
        if bytes[..8] != MAGIC[..] {
            return Err(damaged("bad magic in the segment's footer"));
        }
        let mut footer = Self {
            form: number(60),
            contents: number(12),
            blocks: number(16),
            others: number(20),
            runs: number(56),
            sha256: [0; 32],
        };
        footer.sha256.copy_from_slice(&bytes[24..56]);
        if number(8) != VERSION || footer.form > LZ4 {
            return Err(damaged("unknown version or form of segments"));
        }
        let size = u64::from(footer.blocks) * BLOCK + footer.pages_size() + footer.index_size();
        match size == footer_at {
            true => Ok(footer),
            false => Err(damaged("its size is not what its footer says")),
        }
    }

    fn parts(&self) -> u32 {
        if self.form == LZ4 { self.blocks } else { 0 }
    }

    /// Bytes of what is said of the pages.
    pub(super) fn pages_size(&self) -> u64 {
        let pages = if self.form == PLAIN { self.blocks.min(PAGES_MAX) } else { 0 };
        u64::from(pages) * PAGE_HASH_SIZE as u64
    }

    fn index_size(&self) -> u64 {
        let sizes = [
            (self.contents, EXTENT_SIZE),
            (self.parts(), PART_SIZE),
            (self.others, OTHER_SIZE),
            (self.runs, RUN_SIZE),
        ];
        sizes.iter().map(|(count, size)| u64::from(*count) * *size as u64).sum()
    }
}

fn le_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}
