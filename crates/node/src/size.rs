//! Sizes as a person writes them.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A size in bytes, written as `50 GiB` (units of 1024: B, KiB, MiB, GiB, TiB, also K, M, G, T).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(
    /// Bytes.
    pub u64,
);

const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size such as `50 GiB` or `1.5T`");
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = (text[..digits].trim(), text[digits..].trim());
        let same = |unit: &str, name: &str| {
            unit.eq_ignore_ascii_case(name) || unit.eq_ignore_ascii_case(&name[..1])
        };
        let power = match unit {
            "" => 0,
            unit => UNITS.iter().position(|name| same(unit, name)).ok_or_else(wrong)?,
        };
        let scale = 1_u64 << (10 * power);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let whole: u64 = whole.parse().map_err(|_| wrong())?;
        if fraction.is_empty() || fraction.len() > 9 {
            return Err(wrong());
        }
        let parts: u64 = fraction.parse().map_err(|_| wrong())?;
        // At most 9 digits of at most 2^40: far below 2^128.
        let of = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(9));
        let below = u64::try_from(u128::from(parts) * u128::from(scale) / of).unwrap_or(0);
        let bytes = whole.checked_mul(scale).and_then(|bytes| bytes.checked_add(below));
        bytes.map(Self).ok_or_else(wrong)
    }
}

/// Exact, in the largest unit that divides it: what is shown can be written into the file.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let power = match self.0 {
            0 => 0,
            bytes => (bytes.trailing_zeros() as usize / 10).min(UNITS.len() - 1),
        };
        write!(f, "{} {}", self.0 >> (10 * power), UNITS[power])
    }
}

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown_exactly() {
        for (text, bytes) in [
            ("0", 0),
            ("1000", 1000),
            ("50 GiB", 50 << 30),
            ("50GiB", 50 << 30),
            ("50g", 50 << 30),
            ("1.5 TiB", 3 << 39),
            ("0.5k", 512),
            ("16777215 TiB", 16_777_215 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
            assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)), "{text}");
        }
        for text in
            ["", "GiB", "-1", "1 GB", "1e3", "1.2.3", "1.", ".5", "16777216 TiB", "é", "1 é"]
        {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert_eq!(Size(50 << 30).to_string(), "50 GiB");
        assert_eq!(Size((50 << 30) + 1).to_string(), "53687091201 B");
    }
}
