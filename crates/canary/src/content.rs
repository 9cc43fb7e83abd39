//! Content of pages that is known from numbers.

use std::io;

pub(crate) const PAGE: usize = 4096;

/// A number from another one, as different as can be.
pub(crate) fn mix(mut state: u64) -> u64 {
    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ state >> 31
}

/// Random numbers from a seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// One below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % bound.max(1)
    }
}

/// Fills pages: each is the only one of its number.
pub(crate) fn fill(bytes: &mut [u8], first: u64) {
    for (page, number) in bytes.chunks_mut(PAGE).zip(first..) {
        let mut state = mix(number);
        for word in page.chunks_exact_mut(8) {
            // Cheap: guests that are emulated do it, too.
            state = state.rotate_left(7).wrapping_add(0x9e37_79b9_7f4a_7c15);
            word.copy_from_slice(&state.to_le_bytes());
        }
    }
}

/// Whether pages are as [`fill`] has filled them.
pub(crate) fn check(bytes: &[u8], first: u64, where_: &str) -> io::Result<()> {
    let mut expected = [0; PAGE];
    for (page, number) in bytes.chunks(PAGE).zip(first..) {
        fill(&mut expected, number);
        if page == &expected[..page.len()] {
            continue;
        }
        let at = page.iter().zip(&expected).position(|(found, expected)| found != expected);
        let at = at.unwrap_or(0);
        let words = |page: &[u8]| format!("{:02x?}", &page[at..(at + 16).min(page.len())]);
        let what = format!(
            "wrong bytes in {where_}, page {number:#x}, at {at}: {} instead of {}",
            words(page),
            words(&expected)
        );
        return Err(io::Error::other(what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    #[test]
    fn a_wrong_bit_is_found() {
        let mut pages = vec![0; 3 * PAGE];
        fill(&mut pages, 7);
        check(&pages, 7, "memory").unwrap();
        assert!(pages.chunks(PAGE).is_sorted_by(|a, b| a != b));
        for at in [0, PAGE - 1, 3 * PAGE - 1] {
            pages[at] ^= 0x10;
            let said = check(&pages, 7, "memory").unwrap_err().to_string();
            let number = 7 + at / PAGE;
            assert!(said.contains(&format!("page {number:#x}, at {}:", at % PAGE)), "{said}");
            pages[at] ^= 0x10;
        }
    }
}
