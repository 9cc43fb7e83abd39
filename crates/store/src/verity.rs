//! fs-verity SHA-256 digests, computed while the bytes stream by.
//!
//! ```text
//! data     [ 4 KiB block ][ 4 KiB block ] … [ last block, padded with zeros ]
//! level 0  [ 128 digests of data blocks = 4 KiB ] …          last one padded with zeros
//! level 1  [ 128 digests of level 0 blocks     ] …
//! …        until one digest is left: the root hash (32 zero bytes for an empty file)
//! digest   SHA-256 of the 256-byte descriptor, which holds the size and the root hash
//! ```
//!
//! Memory is a few blocks of data and one partial block per level: 8 levels cover more than 2^64
//! bytes.
//!
//! A run of zeros costs a few blocks per level: all its blocks have one digest, and so on upwards.
//! Source: `Documentation/filesystems/fsverity.rst`, "Merkle tree" and "fs-verity descriptor".

use std::io;
use std::sync::OnceLock;

use cofolio_sys::sha256;
use sha2::{Digest as _, Sha256};

use crate::Digest;

/// Block size of the tree, in bytes.
const BLOCK: usize = sha256::BLOCK;
/// Blocks that are hashed together, in bytes.
const GROUP: usize = BLOCK * sha256::LANES;
/// Size of one SHA-256 digest, in bytes.
const HASH: usize = 32;

/// Digests in one block.
const FANOUT: u64 = (BLOCK / HASH) as u64;
/// Bytes below one digest of level [`UNIT_LEVEL`], 64 MiB: the unit of parallel hashing.
pub(crate) const UNIT: u64 = BLOCK as u64 * FANOUT * FANOUT;
const UNIT_LEVEL: usize = 2;
/// Levels above the data that 2^64 bytes can have, the root's digest included.
const LEVELS_MAX: usize = 9;

/// `struct fsverity_descriptor`: offsets of the fields that are not zero here.
const DESCRIPTOR_SIZE: usize = 256;
const DESCRIPTOR_VERSION: (usize, u8) = (0, 1);
const DESCRIPTOR_HASH_ALGORITHM_SHA256: (usize, u8) = (1, 1);
const DESCRIPTOR_LOG_BLOCK_SIZE: (usize, u8) = (2, 12);
const DESCRIPTOR_DATA_SIZE_AT: usize = 8;
const DESCRIPTOR_ROOT_HASH_AT: usize = 16;

/// Computes the fs-verity SHA-256 digest of a stream of bytes (4 KiB blocks, no salt).
#[derive(Clone, Debug, Default)]
pub struct Hasher {
    /// Bytes seen so far.
    size: u64,
    /// Data that is not a full group of blocks yet.
    partial: Vec<u8>,
    /// Per level the digests gathered since its last full block: fewer than `BLOCK` bytes each.
    levels: Vec<Vec<u8>>,
}

impl Hasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many bytes have been hashed so far.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Takes the next bytes of the content.
    pub fn update(&mut self, mut data: &[u8]) {
        self.size += data.len() as u64;
        if !self.partial.is_empty() {
            let take = data.len().min(GROUP - self.partial.len());
            self.partial.extend_from_slice(&data[..take]);
            data = &data[take..];
            if self.partial.len() < GROUP {
                return;
            }
            self.flush();
        }
        let (groups, rest) = data.as_chunks::<GROUP>();
        for group in groups {
            self.blocks(group.as_chunks().0);
        }
        self.partial.extend_from_slice(rest);
    }

    /// Hashes what is gathered; a last block that is not full is filled up with zeros.
    fn flush(&mut self) {
        let mut gathered = std::mem::take(&mut self.partial);
        gathered.resize(gathered.len().next_multiple_of(BLOCK), 0);
        self.blocks(gathered.as_chunks().0);
        gathered.clear();
        self.partial = gathered;
    }

    /// Hashes up to [`sha256::LANES`] blocks.
    fn blocks(&mut self, blocks: &[[u8; BLOCK]]) {
        hash_blocks(blocks, |hash| self.push(0, hash));
    }

    /// Takes the next `len` bytes by their [`block_digests`], after whole blocks only.
    pub fn digests(&mut self, len: u64, digests: &[[u8; HASH]]) {
        debug_assert!(digests.len() as u64 == len.div_ceil(BLOCK as u64));
        self.flush();
        self.size += len;
        digests.iter().for_each(|hash| self.push(0, hash));
    }

    /// Takes zeros as the next `len` bytes, without looking at each of them.
    pub fn zeros(&mut self, mut len: u64) {
        if !self.partial.is_empty() {
            let room = self.partial.len().next_multiple_of(BLOCK) - self.partial.len();
            let take = usize::try_from(len).unwrap_or(room).min(room);
            self.update(&ZEROS[..take]);
            len -= take as u64;
            if len == 0 {
                return;
            }
            self.flush();
        }
        self.size += len;
        let rest = usize::try_from(len % BLOCK as u64).unwrap_or(0);
        self.push_zero_blocks(0, len / BLOCK as u64);
        self.partial.extend_from_slice(&ZEROS[..rest]);
    }

    /// Adds to a level `count` digests of what is all zeros below it.
    fn push_zero_blocks(&mut self, level: usize, mut count: u64) {
        let hash = &zero_hashes()[level];
        while count > 0 && self.levels.get(level).is_some_and(|block| !block.is_empty()) {
            self.push(level, hash);
            count -= 1;
        }
        // The level is between two blocks now: those that are filled altogether go up at once.
        if count >= FANOUT {
            self.push_zero_blocks(level + 1, count / FANOUT);
        }
        for _ in 0..count % FANOUT {
            self.push(level, hash);
        }
    }

    /// Takes the next [`UNIT`] bytes, hashed apart by a fresh `unit`, after whole units only.
    pub(crate) fn unit(&mut self, mut unit: Self) {
        unit.flush();
        debug_assert!(unit.size == UNIT && self.size.is_multiple_of(UNIT));
        self.size += unit.size;
        // All below is handed up.
        let hash = unit.levels.get(UNIT_LEVEL).and_then(|level| level.first_chunk());
        self.push(UNIT_LEVEL, hash.unwrap_or(&[0; HASH]));
    }

    /// The digest of everything seen.
    pub fn finish(mut self) -> Digest {
        self.flush();
        let root = self.root();
        let mut descriptor = [0; DESCRIPTOR_SIZE];
        for (at, value) in
            [DESCRIPTOR_VERSION, DESCRIPTOR_HASH_ALGORITHM_SHA256, DESCRIPTOR_LOG_BLOCK_SIZE]
        {
            descriptor[at] = value;
        }
        descriptor[DESCRIPTOR_DATA_SIZE_AT..DESCRIPTOR_DATA_SIZE_AT + 8]
            .copy_from_slice(&self.size.to_le_bytes());
        descriptor[DESCRIPTOR_ROOT_HASH_AT..DESCRIPTOR_ROOT_HASH_AT + HASH].copy_from_slice(&root);
        Digest(Sha256::digest(descriptor).into())
    }

    /// Adds one digest to a level; a level that fills a block hands its digest up.
    fn push(&mut self, mut level: usize, hash: &[u8; HASH]) {
        let mut hash = *hash;
        loop {
            while self.levels.len() <= level {
                self.levels.push(Vec::with_capacity(BLOCK));
            }
            let block = &mut self.levels[level];
            block.extend_from_slice(&hash);
            if block.len() < BLOCK {
                return;
            }
            hash = Sha256::digest(&*block).into();
            block.clear();
            level += 1;
        }
    }

    /// Closes the levels from below; the digest that stands alone on the top level is the root.
    fn root(&mut self) -> [u8; HASH] {
        let mut level = 0;
        while level < self.levels.len() {
            let is_top = level + 1 == self.levels.len();
            let block = std::mem::take(&mut self.levels[level]);
            if is_top && block.len() == HASH {
                return block.try_into().unwrap_or([0; HASH]);
            }
            if !block.is_empty() {
                self.push(level + 1, &hash_padded(&block));
            }
            level += 1;
        }
        [0; HASH]
    }
}

/// What is written is hashed, and nothing fails.
impl io::Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Hashes up to [`sha256::LANES`] blocks.
fn hash_blocks(blocks: &[[u8; BLOCK]], mut each: impl FnMut(&[u8; HASH])) {
    // Three together are faster than one by one, even with a fourth that nobody needs.
    if blocks.len() + 1 >= sha256::LANES
        && let Some(digests) =
            sha256::digests(std::array::from_fn(|lane| blocks.get(lane).unwrap_or(&ZEROS)))
    {
        return digests.iter().take(blocks.len()).for_each(each);
    }
    for block in blocks {
        each(&Sha256::digest(block).into());
    }
}

/// The digests of the blocks of a tree's data, the last one filled up with zeros.
pub fn block_digests(data: &[u8]) -> Vec<[u8; HASH]> {
    let mut digests = Vec::with_capacity(data.len().div_ceil(BLOCK));
    let (blocks, rest) = data.as_chunks();
    for group in blocks.chunks(sha256::LANES) {
        hash_blocks(group, |hash| digests.push(*hash));
    }
    if !rest.is_empty() {
        digests.push(hash_padded(rest));
    }
    digests
}

/// The digest of a block of zeros.
pub fn zero_digest() -> &'static [u8; HASH] {
    &zero_hashes()[0]
}

const ZEROS: [u8; BLOCK] = [0; BLOCK];

/// The digest of a data block of zeros, of a block of such digests, and so on.
fn zero_hashes() -> &'static [[u8; HASH]; LEVELS_MAX] {
    static HASHES: OnceLock<[[u8; HASH]; LEVELS_MAX]> = OnceLock::new();
    HASHES.get_or_init(|| {
        let mut hashes = [[0; HASH]; LEVELS_MAX];
        let mut block = ZEROS.to_vec();
        for hash in &mut hashes {
            *hash = Sha256::digest(&block).into();
            block = hash.repeat(BLOCK / HASH);
        }
        hashes
    })
}

/// SHA-256 of a block that is filled up with zeros.
fn hash_padded(data: &[u8]) -> [u8; HASH] {
    let mut sha = Sha256::new();
    sha.update(data);
    sha.update(&ZEROS[..BLOCK - data.len()]);
    sha.finalize().into()
}

/// The digest of content that is in memory.
pub fn digest(data: &[u8]) -> Digest {
    let mut hasher = Hasher::new();
    hasher.update(data);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made once with `fsverity digest --compact` (fsverity-utils 1.5) on files with this content:
    /// byte `i` is `i * 31 + i / 4096` modulo 256.
    const GOLDEN: &[(usize, &str)] = &[
        (0, "3d248ca542a24fc62d1c43b916eae5016878e2533c88238480b26128a1f1af95"),
        (1, "b803429503d95915829b29fdbc8bbad142f3abfd11b1cadf5526582e685c0551"),
        (4095, "89855f1145f7cf2179294511d82e027e9fa4c110a48badfa2b9df312a2b815a1"),
        (4096, "fd2da0056dd5efbed78468c371717b57e71c7189bf2698a96bdefc4b14c875f3"),
        (4097, "55948f6041d8f87d9bb200776300310673bc5afd841adcea72e7904fb34125ae"),
        (8192, "2d697f0c2b0431f50b4c0028839c07f65b606f5624f6af4f1328a30f0c57c9f7"),
        (524288, "214dcedc40d3fe72765733ac123544f5fdd644ca1e1e692a942089d2ab50ace3"),
        (524289, "5fdcfe47a593c188131dd7281facf89d98d9633b36a06f1e2761b6ff5ca85701"),
        (528384, "7c2c4559e8bbd5984f25c007003377fa22055a3c123d7c772b6979199135b26a"),
        (67108864, "d1390d0832eb4c206c608fbfdf5e6da2342c9071fbedfc5a8309aa7634ea329b"),
        (67108869, "39655ea5965b78fdf8e064c34907102d92c677a72180ed547aa8c209f5882b27"),
    ];

    /// `truncate -s 1073741825 F; fsverity digest --compact F` (fsverity-utils 1.5).
    const GIB_AND_ONE: &str = "51e181760e4ab01a52b24ba0e01316cfd84608a87191db449ada61291c264565";

    fn content(len: usize) -> Vec<u8> {
        (0..len).map(|i| u8::try_from((i * 31 + i / 4096) % 256).unwrap()).collect()
    }

    #[test]
    fn golden_digests_for_every_shape_of_the_tree() {
        for (len, expected) in GOLDEN {
            assert_eq!(digest(&content(*len)).to_string(), *expected, "{len} bytes");
        }
    }

    #[test]
    fn how_the_bytes_are_cut_makes_no_difference() {
        let data = content(BLOCK * 130 + 17);
        let expected = digest(&data);
        for step in [1, 7, 4095, 4096, 4097, 100_000] {
            let mut hasher = Hasher::new();
            for piece in data.chunks(step) {
                hasher.update(piece);
            }
            assert_eq!(hasher.size(), data.len() as u64);
            assert_eq!(hasher.finish(), expected, "pieces of {step}");
        }
    }

    #[test]
    fn digests_of_blocks_stand_for_the_blocks() {
        for (len, expected) in GOLDEN {
            let mut hasher = Hasher::new();
            for piece in content(*len).chunks(BLOCK * 7) {
                hasher.digests(piece.len() as u64, &block_digests(piece));
            }
            assert_eq!(hasher.finish().to_string(), *expected, "{len} bytes");
        }
        assert_eq!(block_digests(&ZEROS), [*zero_digest()]);
    }

    #[test]
    fn units_hashed_apart_are_the_whole() {
        for (len, expected) in GOLDEN.iter().filter(|(len, _)| *len as u64 >= UNIT) {
            let data = content(*len);
            let (units, rest) = data.split_at(usize::try_from(UNIT).unwrap());
            let (mut whole, mut unit) = (Hasher::new(), Hasher::new());
            unit.update(units);
            whole.unit(unit);
            whole.update(rest);
            assert_eq!(whole.finish().to_string(), *expected, "{len} bytes");
        }
    }

    #[test]
    fn zeros_that_are_only_counted_are_zeros() {
        let block = BLOCK as u64;
        let level = FANOUT * block;
        for before in [0, 1, block - 1, block, 3 * block + 5, level - block, level + 1] {
            for zeros in [0, 1, 100, block, block + 1, level - 1, level, 2 * level, 3 * level + 9] {
                for after in [0, 1, block] {
                    let before = content(usize::try_from(before).unwrap());
                    let after = content(usize::try_from(after).unwrap());
                    let mut hasher = Hasher::new();
                    hasher.update(&before);
                    hasher.zeros(zeros);
                    hasher.update(&after);
                    let all = [before, vec![0; usize::try_from(zeros).unwrap()], after].concat();
                    assert_eq!(hasher.size(), all.len() as u64);
                    let shape = format!("{zeros} zeros in {} bytes", all.len());
                    assert_eq!(hasher.finish(), digest(&all), "{shape}");
                }
            }
        }
    }

    /// A layer may claim a file of a terabyte that is one hole.
    #[test]
    fn zeros_without_end_are_hashed_at_once() {
        let mut hasher = Hasher::new();
        hasher.zeros((1 << 30) + 1);
        assert_eq!(hasher.finish().to_string(), GIB_AND_ONE);
        for exponent in 31..63 {
            let (mut whole, mut cut) = (Hasher::new(), Hasher::new());
            whole.zeros((1 << exponent) + 3);
            cut.zeros((1 << (exponent - 1)) - 70_000);
            cut.update(&[0; 3]);
            cut.zeros((1 << (exponent - 1)) + 70_000);
            assert_eq!(whole.finish(), cut.finish(), "2^{exponent}");
        }
    }
}
