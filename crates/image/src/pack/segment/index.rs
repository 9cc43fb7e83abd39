//! The index of a segment, at its end: what the segment holds.

use std::io;

use cofolio_erofs::write::lz4::Pcluster;
use cofolio_store::{At as _, Digest, Error, Result, StoredFile};
use sha2::{Digest as _, Sha256};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{BLOCK, BlockRef, DEVICE_ALIGN, Form, IndexEntry, Run, Segment};

/// Bytes of a page's hash, before the index.
pub(super) const PAGE_HASH_SIZE: usize = 8;
/// Only the first 2^18 blocks (1 GiB) have page hashes: a writer keeps them in memory.
pub(super) const PAGES_MAX: u32 = 1 << 18;
const MAGIC: &[u8; 8] = b"cofolseg";
const VERSION: u32 = 1;
/// The forms, by their number in a footer.
const FORMS: [Form; 3] = [Form::Plain, Form::Lz4, Form::Dax];
/// Bit of a pcluster's length: it is compressed.
const COMPRESSED: u32 = 1 << 31;
/// Most content in one block, in bytes; more would be too much to decompress for a page.
const PCLUSTER_LEN_MAX: u32 = 1 << 20;
/// [`RawRun::segment`] of zeros, which have no blocks.
const NOWHERE: u32 = u32::MAX;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    object: [u8; 32],
    sha256: [u8; 32],
    size: U64,
    block: U32,
    blocks: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRun {
    segment: U32,
    block: U32,
    blocks: U32,
}

/// The last bytes of a segment, which determine its size.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Footer {
    magic: [u8; 8],
    version: U32,
    contents: U32,
    pub(super) blocks: U32,
    others: U32,
    /// Of the index.
    sha256: [u8; 32],
    runs: U32,
    form: U32,
}

const _: () = {
    assert!(size_of::<RawEntry>() == 80);
    assert!(size_of::<RawRun>() == 12);
    assert!(size_of::<Footer>() == 64);
};

impl Segment {
    /// The index and the footer.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for IndexEntry { object, sha256, size, block, blocks, .. } in &self.entries {
            let (size, block, blocks) = ((*size).into(), (*block).into(), (*blocks).into());
            let entry = RawEntry { object: object.0, sha256: *sha256, size, block, blocks };
            bytes.extend_from_slice(entry.as_bytes());
        }
        for pcluster in &self.pclusters {
            let flag = if pcluster.compressed { COMPRESSED } else { 0 };
            bytes.extend_from_slice(&(pcluster.len | flag).to_le_bytes());
        }
        for other in &self.others {
            bytes.extend_from_slice(&other.0);
        }
        let mut runs = 0;
        for run in self.entries.iter().flat_map(|entry| &entry.runs) {
            let (segment, block) = run.at.map_or((NOWHERE, 0), |at| (at.segment, at.block));
            let (segment, block, blocks) = (segment.into(), block.into(), run.blocks.into());
            bytes.extend_from_slice(RawRun { segment, block, blocks }.as_bytes());
            runs += 1;
        }
        let count = |count: usize| U32::new(u32::try_from(count).unwrap_or(u32::MAX));
        let footer = Footer {
            magic: *MAGIC,
            version: U32::new(VERSION),
            contents: count(self.entries.len()),
            blocks: U32::new(self.blocks),
            others: count(self.others.len()),
            sha256: Sha256::digest(&bytes).into(),
            runs: count(runs),
            form: count(FORMS.iter().take_while(|form| **form != self.form).count()),
        };
        bytes.extend_from_slice(footer.as_bytes());
        bytes
    }

    /// Reads and checks the index of a file.
    pub(super) fn read(file: &StoredFile) -> Result<Self> {
        let damaged = |reason: &str| Error::corrupt(file.path(), reason.to_owned());
        let footer = Footer::read(file)?;
        let (blocks, form) = (footer.blocks.get(), footer.form());
        // No larger than the file is.
        let mut index = vec![0; usize::try_from(footer.index_size()).unwrap_or(usize::MAX)];
        match file.read_exact_at(&mut index, footer.index_at()) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(damaged("it ends within its index"));
            }
            other => other.at("read", file.path())?,
        }
        if Sha256::digest(&index)[..] != footer.sha256 {
            return Err(damaged("the checksum of its index is wrong"));
        }
        let mut rest = &index[..];
        let entries: &[RawEntry] = table(&mut rest, footer.contents.get());
        let pclusters: &[U32] = table(&mut rest, footer.pclusters());
        let others: &[[u8; 32]] = table(&mut rest, footer.others.get());
        let mut runs = table(&mut rest, footer.runs.get()).iter().map(|run: &RawRun| {
            let (segment, block) = (run.segment.get(), run.block.get());
            let at = (segment != NOWHERE).then_some(BlockRef { segment, block });
            Run { at, blocks: run.blocks.get() }
        });
        let pcluster = |number: &U32| Pcluster {
            len: number.get() & !COMPRESSED,
            compressed: number.get() & COMPRESSED != 0,
        };
        let mut segment = Self {
            form,
            blocks,
            entries: Vec::with_capacity(entries.len()),
            pclusters: pclusters.iter().map(pcluster).collect(),
            others: others.iter().map(|digest| Digest(*digest)).collect(),
        };
        let mut end = 0;
        for raw in entries {
            let mut entry = IndexEntry {
                object: Digest(raw.object),
                sha256: raw.sha256,
                size: raw.size.get(),
                block: raw.block.get(),
                blocks: raw.blocks.get(),
                runs: Vec::new(),
            };
            let whole = entry.size.div_ceil(BLOCK);
            if u64::from(entry.block) < end || entry.size == 0 {
                return Err(damaged("contents overlap, or one is empty"));
            }
            end = u64::from(entry.block) + u64::from(entry.blocks);
            if form != Form::Lz4 && u64::from(entry.blocks) != whole {
                entry.runs = segment
                    .take_runs(&mut runs, whole, end)
                    .ok_or_else(|| damaged("a run points past the end of its segment"))?;
            }
            segment.entries.push(entry);
        }
        if end > u64::from(blocks) || runs.next().is_some() {
            return Err(damaged(
                "a content reaches past the end of the segment, or a run is left over",
            ));
        }
        match form != Form::Lz4 || segment.entries.iter().all(|entry| segment.fits(entry)) {
            true => Ok(segment),
            false => Err(damaged("the compressed blocks do not fit the contents")),
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
            let there = run.at.is_none_or(|at| match at.segment {
                0 => u64::from(at.block) + u64::from(run.blocks) <= end,
                other => other as usize <= self.others.len(),
            });
            left = left.checked_sub(u64::from(run.blocks)).filter(|_| there && run.blocks > 0)?;
            taken.push(run);
        }
        Some(taken)
    }

    /// Whether the blocks of a compressed content add up to its size.
    pub(super) fn fits(&self, entry: &IndexEntry) -> bool {
        let pclusters = self.pclusters_of(entry);
        let sound = |pcluster: &Pcluster| {
            (1..=PCLUSTER_LEN_MAX).contains(&pcluster.len)
                && (pcluster.compressed || u64::from(pcluster.len) <= BLOCK)
        };
        let len: u64 = pclusters.iter().map(|pcluster| u64::from(pcluster.len)).sum();
        pclusters.iter().all(sound) && len == entry.size
    }
}

/// The next `count` rows. The index is as large as the footer says, so they are there.
fn table<'b, T: FromBytes + Immutable + KnownLayout + Unaligned>(
    rest: &mut &'b [u8],
    count: u32,
) -> &'b [T] {
    let found = <[T]>::ref_from_prefix_with_elems(rest, count as usize);
    let (rows, after) = found.unwrap_or_default();
    *rest = after;
    rows
}

impl Footer {
    pub(super) fn read(file: &StoredFile) -> Result<Self> {
        let damaged = |reason: &str| Error::corrupt(file.path(), reason.to_owned());
        let size = file.size().at("look at", file.path())?;
        let mut footer = Self::new_zeroed();
        let footer_at = size
            .checked_sub(footer.as_bytes().len() as u64)
            .ok_or_else(|| damaged("too short for a segment's footer"))?;
        file.read_exact_at(footer.as_mut_bytes(), footer_at).at("read", file.path())?;
        if footer.magic != *MAGIC {
            return Err(damaged("bad magic in the segment's footer"));
        }
        if footer.version.get() != VERSION || footer.form.get() as usize >= FORMS.len() {
            return Err(damaged("unknown version or form of segments"));
        }
        match footer.file_size() == size {
            true => Ok(footer),
            false => Err(damaged("its size is not what its footer says")),
        }
    }

    /// Of a footer whose form is known.
    fn form(&self) -> Form {
        FORMS.get(self.form.get() as usize).copied().unwrap_or_default()
    }

    /// The size of the whole segment.
    fn file_size(&self) -> u64 {
        let tables = self.pages_size() + self.index_size() + size_of::<Self>() as u64;
        let size = u64::from(self.blocks.get()) * BLOCK + tables;
        if self.form() == Form::Dax { size.next_multiple_of(DEVICE_ALIGN) } else { size }
    }

    /// Where the page hashes begin, behind the padding.
    pub(super) fn pages_at(&self) -> u64 {
        self.index_at() - self.pages_size()
    }

    fn index_at(&self) -> u64 {
        self.file_size() - size_of::<Self>() as u64 - self.index_size()
    }

    fn pclusters(&self) -> u32 {
        if self.form() == Form::Lz4 { self.blocks.get() } else { 0 }
    }

    /// Bytes of the page hashes.
    pub(super) fn pages_size(&self) -> u64 {
        let pages = if self.form() == Form::Lz4 { 0 } else { self.blocks.get().min(PAGES_MAX) };
        u64::from(pages) * PAGE_HASH_SIZE as u64
    }

    fn index_size(&self) -> u64 {
        let sizes = [
            (self.contents.get(), size_of::<RawEntry>()),
            (self.pclusters(), size_of::<U32>()),
            (self.others.get(), size_of::<Digest>()),
            (self.runs.get(), size_of::<RawRun>()),
        ];
        sizes.iter().map(|(count, size)| u64::from(*count) * *size as u64).sum()
    }
}
