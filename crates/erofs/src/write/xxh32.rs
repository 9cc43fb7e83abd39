//! xxHash, 32 bits: the hash behind EROFS's xattr name filter (public specification by Y. Collet).

const P1: u32 = 2_654_435_761;
const P2: u32 = 2_246_822_519;
const P3: u32 = 3_266_489_917;
const P4: u32 = 668_265_263;
const P5: u32 = 374_761_393;

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn round(lane: u32, word: u32) -> u32 {
    lane.wrapping_add(word.wrapping_mul(P2)).rotate_left(13).wrapping_mul(P1)
}

pub(super) fn xxh32(input: &[u8], seed: u32) -> u32 {
    let mut stripes = input.chunks_exact(16);
    let mut hash = if input.len() < 16 {
        seed.wrapping_add(P5)
    } else {
        let mut lanes = [
            seed.wrapping_add(P1).wrapping_add(P2),
            seed.wrapping_add(P2),
            seed,
            seed.wrapping_sub(P1),
        ];
        for stripe in stripes.by_ref() {
            for (lane, bytes) in lanes.iter_mut().zip(stripe.chunks_exact(4)) {
                *lane = round(*lane, word(bytes));
            }
        }
        [1, 7, 12, 18]
            .iter()
            .zip(lanes)
            .fold(0_u32, |sum, (&bits, lane)| sum.wrapping_add(lane.rotate_left(bits)))
    };
    // The length counts modulo 2^32.
    hash = hash.wrapping_add(u32::try_from(input.len() & 0xffff_ffff).unwrap_or(0));
    let mut words = stripes.remainder().chunks_exact(4);
    for bytes in words.by_ref() {
        hash = hash.wrapping_add(word(bytes).wrapping_mul(P3)).rotate_left(17).wrapping_mul(P4);
    }
    for &byte in words.remainder() {
        hash = hash.wrapping_add(u32::from(byte).wrapping_mul(P5)).rotate_left(11).wrapping_mul(P1);
    }
    hash = (hash ^ (hash >> 15)).wrapping_mul(P2);
    hash = (hash ^ (hash >> 13)).wrapping_mul(P3);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::xxh32;

    #[test]
    fn known_values() {
        assert_eq!(xxh32(b"", 0), 0x02cc_5d05);
        assert_eq!(xxh32(b"a", 0), 0x550d_7456);
        assert_eq!(xxh32(b"Nobody inspects the spammish repetition", 0), 0xe229_3b2f);
    }
}
