//! LZ4 pclusters of one block each, as EROFS stores them (`z_erofs`): a block of 4 KiB holds one
//! LZ4 block of as much content as fits, with zeros in front, or 4 KiB of content uncompressed.
//!
//! ```text
//! content   |----------- 0 -----------|--- 1 ---|-------- 2 --------|- 3 -|
//! blocks    |00 LZ4 |00000 LZ4 | plain     |...        4 KiB each, one for each pcluster
//! ```
//!
//! Source: `lz4_Block_format.md` of LZ4, `fs/erofs/zmap.c` and `decompressor.c` of Linux.

use std::io::{self, Read, Write};

const BLOCK: usize = 4096;
/// Most content of a pcluster in bytes: a reader of any of it must decompress it all.
const CONTENT_MAX: usize = 128 << 10;

const MATCH_MIN: usize = 4;
/// The last match begins at least this far before the end of a block.
const MATCH_LIMIT: usize = 12;
/// The last bytes of a block that must be literals.
const LAST_LITERALS: usize = 5;
const DISTANCE_MAX: usize = 65_535;
const HASH_BITS: u32 = 12;

/// A physical cluster: the content in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pcluster {
    /// Length of the content in bytes; more than a block if it is compressed.
    pub len: u32,
    /// Whether it is compressed.
    pub compressed: bool,
}

/// Reads content to its end and writes a block for each pcluster that it returns.
///
/// # Errors
/// Errors of `content` and `blocks`.
pub fn compress(mut content: impl Read, mut blocks: impl Write) -> io::Result<Vec<Pcluster>> {
    let mut pclusters = Vec::new();
    let mut table = Table::new();
    let mut buffer = vec![0; CONTENT_MAX];
    let mut filled = 0;
    loop {
        while filled < buffer.len() {
            match content.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if filled == 0 {
            return Ok(pclusters);
        }
        let mut block = [0; BLOCK];
        let (len, compressed) = match table.fill(&buffer[..filled], &mut block) {
            // Less than a block gains nothing, and two pclusters must not end in one page.
            Some(len) if len > BLOCK => (len, true),
            _ => {
                let len = filled.min(BLOCK);
                block = [0; BLOCK];
                block[..len].copy_from_slice(&buffer[..len]);
                (len, false)
            }
        };
        blocks.write_all(&block)?;
        // At most `CONTENT_MAX`.
        pclusters.push(Pcluster { len: u32::try_from(len).unwrap_or(u32::MAX), compressed });
        buffer.copy_within(len..filled, 0);
        filled -= len;
    }
}

/// The last position of four bytes, by their hash.
struct Table(Vec<u32>);

impl Table {
    fn new() -> Table {
        Table(vec![0; 1 << HASH_BITS])
    }

    /// Compresses as much of the content as fits, to the end of the block, and returns its length.
    /// `None` if the content is not longer than a block.
    fn fill(&mut self, content: &[u8], block: &mut [u8; BLOCK]) -> Option<usize> {
        if content.len() <= BLOCK {
            return None;
        }
        self.0.fill(u32::MAX);
        let mut out = Vec::with_capacity(BLOCK);
        // The content before `anchor` is compressed.
        let (mut anchor, mut at) = (0, 0);
        let search_end = content.len() - MATCH_LIMIT;
        let match_end = content.len() - LAST_LITERALS;
        while at < search_end {
            let Some((from, len)) = self.find(content, at, match_end) else {
                // Steps grow while no match is found.
                at += 1 + ((at - anchor) >> 6);
                continue;
            };
            // Leave room for a last sequence at the distance that the format demands.
            let last = 1 + MATCH_LIMIT - MATCH_MIN;
            if out.len() + sequence_size(at - anchor, len) + last > BLOCK {
                break;
            }
            push_sequence(&mut out, &content[anchor..at], Some((at - from, len)));
            at += len;
            anchor = at;
        }
        // Fill the rest with literals.
        let mut rest = (BLOCK - out.len() - 1).min(content.len() - anchor);
        while out.len() + sequence_size(rest, 0) > BLOCK {
            rest -= 1;
        }
        push_sequence(&mut out, &content[anchor..anchor + rest], None);
        block[..BLOCK - out.len()].fill(0);
        block[BLOCK - out.len()..].copy_from_slice(&out);
        Some(anchor + rest)
    }

    /// An earlier position with the same bytes as at `at`, and how many are the same.
    fn find(&mut self, content: &[u8], at: usize, end: usize) -> Option<(usize, usize)> {
        let four: [u8; 4] = content[at..at + 4].try_into().ok()?;
        let hash = u32::from_le_bytes(four).wrapping_mul(2_654_435_761) >> (32 - HASH_BITS);
        // At most `CONTENT_MAX`.
        let known = std::mem::replace(&mut self.0[hash as usize], u32::try_from(at).ok()?);
        let from = usize::try_from(known).ok().filter(|_| known != u32::MAX)?;
        if at - from > DISTANCE_MAX || content[from..from + 4] != four {
            return None;
        }
        let same =
            content[from..].iter().zip(&content[at..end]).take_while(|(a, b)| a == b).count();
        (same >= MATCH_MIN).then_some((from, same))
    }
}

/// Bytes of a sequence of literals and a match (of length 0: none).
fn sequence_size(literals: usize, matched: usize) -> usize {
    let extra = |len: usize| if len < 15 { 0 } else { (len - 15) / 255 + 1 };
    let of_match = if matched == 0 { 0 } else { 2 + extra(matched - MATCH_MIN) };
    1 + extra(literals) + literals + of_match
}

fn push_sequence(out: &mut Vec<u8>, literals: &[u8], matched: Option<(usize, usize)>) {
    let code = |len: usize| u8::try_from(len.min(15)).unwrap_or(15);
    let match_code = matched.map_or(0, |(_, len)| len - MATCH_MIN);
    out.push(code(literals.len()) << 4 | code(match_code));
    push_extra(out, literals.len());
    out.extend_from_slice(literals);
    if let Some((distance, _)) = matched {
        out.extend_from_slice(&u16::try_from(distance).unwrap_or(u16::MAX).to_le_bytes());
        push_extra(out, match_code);
    }
}

fn push_extra(out: &mut Vec<u8>, len: usize) {
    if let Some(mut rest) = len.checked_sub(15) {
        while rest >= 255 {
            out.push(255);
            rest -= 255;
        }
        out.push(u8::try_from(rest).unwrap_or(u8::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The block format, read as its description says.
    fn decompress(mut input: &[u8]) -> Vec<u8> {
        fn extra(input: &mut &[u8], code: u8) -> usize {
            let mut len = usize::from(code);
            let mut last = if code == 15 { 255 } else { 0 };
            while last == 255 {
                last = input[0];
                *input = &input[1..];
                len += usize::from(last);
            }
            len
        }
        let mut out = Vec::new();
        loop {
            let token = input[0];
            input = &input[1..];
            let literals = extra(&mut input, token >> 4);
            out.extend_from_slice(&input[..literals]);
            input = &input[literals..];
            if input.is_empty() {
                assert!(literals >= LAST_LITERALS, "the last literals");
                return out;
            }
            let distance = usize::from(u16::from_le_bytes([input[0], input[1]]));
            input = &input[2..];
            let len = extra(&mut input, token & 15) + MATCH_MIN;
            assert!(distance > 0 && distance <= out.len());
            for _ in 0..len {
                out.push(out[out.len() - distance]);
            }
        }
    }

    #[test]
    fn what_is_compressed_comes_back() {
        let mut state = 1_u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 24
        };
        let mut contents: Vec<Vec<u8>> = [0, 1, 4095, 4096, 4097, 4108, 4109, 10_000, 1 << 20]
            .iter()
            .flat_map(|&len| {
                let noise = (0..len).map(|_| random().to_le_bytes()[0]).collect();
                let text = (0..len).map(|i| b"the quick brown fox "[(i + i / 77) % 20]).collect();
                [vec![0; len], noise, text]
            })
            .collect();
        // Extents of noise and of repetition, of all lengths.
        let mut mixed = Vec::new();
        while mixed.len() < 3_000_000 {
            let (len, what) = (random() as usize * 20, random());
            mixed.extend((0..len).map(|i| {
                if what < 128 { (i % 7).to_le_bytes()[0] } else { random().to_le_bytes()[0] }
            }));
        }
        contents.push(mixed);
        for content in contents {
            let mut blocks = Vec::new();
            let pclusters = compress(&content[..], &mut blocks).expect("in memory");
            assert_eq!(blocks.len(), pclusters.len() * BLOCK);
            let mut back = Vec::new();
            for (pcluster, block) in pclusters.iter().zip(blocks.chunks(BLOCK)) {
                let len = pcluster.len as usize;
                if pcluster.compressed {
                    assert!(len > BLOCK && len <= CONTENT_MAX);
                    let start = block.iter().position(|&b| b != 0).expect("not only zeros");
                    back.extend(decompress(&block[start..]));
                } else {
                    back.extend_from_slice(&block[..len]);
                }
            }
            assert!(back == content, "{} bytes", content.len());
        }
    }
}
