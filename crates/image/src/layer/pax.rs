//! Records of PAX extended headers: `<length> <key>=<value>\n`, one after the other.
//!
//! Keys: POSIX pax(1); `GNU.sparse.*` from GNU tar's manual; `SCHILY.xattr.*`, `SCHILY.acl.*`,
//! `SCHILY.dev*` from star(1); `LIBARCHIVE.xattr.*` from libarchive's tar(5);
//! `RHT.security.selinux` from GNU tar. Others (`atime`, `uname`, `comment`, …) make no difference
//! to the tree and are passed over.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// What the records of one entry say. A record with an empty value takes back what was said before.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Pax {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(crate) uid: Option<u64>,
    pub(crate) gid: Option<u64>,
    pub(crate) mtime: Option<(i64, u32)>,
    pub(crate) major: Option<u64>,
    pub(crate) minor: Option<u64>,
    /// Names and values; a later record of the same name has replaced an earlier one.
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) acl_access: Option<Vec<u8>>,
    pub(crate) acl_default: Option<Vec<u8>>,
    pub(crate) sparse: PaxSparse,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PaxSparse {
    pub(crate) major: Option<u64>,
    pub(crate) minor: Option<u64>,
    pub(crate) size: Option<u64>,
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) segments: Vec<(u64, u64)>,
    /// A map was given, if only an empty one.
    pub(crate) has_map: bool,
    /// Format 0.0: an offset that waits for its length.
    pub(crate) pending_offset: Option<u64>,
}

impl Pax {
    /// Takes in the records of one extended header.
    pub(crate) fn parse(&mut self, mut records: &[u8]) -> Result<(), String> {
        while !records.is_empty() {
            // Some writers pad the header with NULs that its size counts.
            if records.iter().all(|&b| b == 0) {
                break;
            }
            let space = records
                .iter()
                .take(20)
                .position(|&b| b == b' ')
                .ok_or("PAX record without a length")?;
            let length = decimal(&records[..space])
                .and_then(|n| usize::try_from(n).ok())
                .filter(|&n| n > space + 1 && n <= records.len())
                .ok_or("PAX record with a wrong length")?;
            let (record, rest) = records.split_at(length);
            let body = record[space + 1..]
                .strip_suffix(b"\n")
                .ok_or("PAX record that does not end in a newline")?;
            let equals = body.iter().position(|&b| b == b'=').ok_or("PAX record without '='")?;
            self.record(&body[..equals], &body[equals + 1..])?;
            records = rest;
        }
        Ok(())
    }

    fn record(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let wrong = || {
            format!(
                "PAX {}={:?} is not valid",
                String::from_utf8_lossy(key),
                String::from_utf8_lossy(&value[..value.len().min(64)])
            )
        };
        let number = || -> Result<Option<u64>, String> {
            if value.is_empty() { Ok(None) } else { decimal(value).map(Some).ok_or_else(wrong) }
        };
        let text = || (!value.is_empty()).then(|| value.to_vec());
        match key {
            b"path" => self.path = text(),
            b"linkpath" => self.link = text(),
            b"size" => self.size = number()?,
            b"uid" => self.uid = number()?,
            b"gid" => self.gid = number()?,
            b"mtime" => {
                self.mtime =
                    if value.is_empty() { None } else { Some(time(value).ok_or_else(wrong)?) };
            }
            b"SCHILY.devmajor" => self.major = number()?,
            b"SCHILY.devminor" => self.minor = number()?,
            b"SCHILY.acl.access" => self.acl_access = text(),
            b"SCHILY.acl.default" => self.acl_default = text(),
            b"GNU.sparse.major" => self.sparse.major = number()?,
            b"GNU.sparse.minor" => self.sparse.minor = number()?,
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = number()?,
            b"GNU.sparse.name" => self.sparse.name = text(),
            b"GNU.sparse.numblocks" => self.sparse.has_map = true,
            b"GNU.sparse.offset" => {
                self.sparse.has_map = true;
                let offset = number()?.ok_or_else(wrong)?;
                if self.sparse.pending_offset.replace(offset).is_some() {
                    return Err(wrong());
                }
            }
            b"GNU.sparse.numbytes" => {
                let offset = self.sparse.pending_offset.take().ok_or_else(wrong)?;
                self.sparse.segments.push((offset, number()?.ok_or_else(wrong)?));
            }
            b"GNU.sparse.map" => {
                self.sparse.has_map = true;
                self.sparse.segments.clear();
                let mut numbers = value.split(|&b| b == b',').filter(|n| !n.is_empty());
                while let Some(offset) = numbers.next() {
                    let length = numbers.next().and_then(decimal).ok_or_else(wrong)?;
                    self.sparse.segments.push((decimal(offset).ok_or_else(wrong)?, length));
                }
            }
            b"RHT.security.selinux" => self.xattr(b"security.selinux", value),
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattr(name, value);
                } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                    let name = percent_decode(name).ok_or_else(wrong)?;
                    let value = base64_decode(value).ok_or_else(wrong)?;
                    // libarchive writes both forms, this one first: either may win, they are equal.
                    self.xattr(&name, &value);
                }
            }
        }
        Ok(())
    }

    fn xattr(&mut self, name: &[u8], value: &[u8]) {
        self.xattrs.insert(name.to_vec(), value.to_vec());
    }
}

/// Decimal digits and nothing else.
fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// `[-]seconds[.fraction]` as seconds, rounded down, and nanoseconds, cut off.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = match text.iter().position(|&b| b == b'.') {
        Some(dot) => (&text[..dot], &text[dot + 1..]),
        None => (text, &b""[..]),
    };
    let seconds = i64::try_from(decimal(whole)?).ok()?;
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let mut nanos: u32 = 0;
    for at in 0..9 {
        nanos = nanos * 10 + fraction.get(at).map_or(0, |&b| u32::from(b - b'0'));
    }
    // Rounding down goes away from zero when negative, also for the digits that are cut off.
    let cut = fraction.iter().skip(9).any(|&b| b != b'0');
    if !negative {
        return Some((seconds, nanos));
    }
    let nanos = nanos + u32::from(cut);
    if nanos == 0 { Some((-seconds, 0)) } else { Some((-seconds - 1, 1_000_000_000 - nanos)) }
}

fn percent_decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        if text[at] == b'%' {
            let hex = std::str::from_utf8(text.get(at + 1..at + 3)?).ok()?;
            out.push(u8::from_str_radix(hex, 16).ok()?);
            at += 3;
        } else {
            out.push(text[at]);
            at += 1;
        }
    }
    Some(out)
}

/// Base 64 as libarchive writes it: the standard alphabet, with or without padding, in lines.
fn base64_decode(text: &[u8]) -> Option<Vec<u8>> {
    const LIBARCHIVE: GeneralPurpose = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_allow_trailing_bits(true)
            .with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let text: Vec<u8> = text.iter().copied().filter(|&byte| byte != b'\n').collect();
    LIBARCHIVE.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_round_down() {
        assert_eq!(time(b"12"), Some((12, 0)));
        assert_eq!(time(b"12.5"), Some((12, 500_000_000)));
        assert_eq!(time(b"12.1234567899"), Some((12, 123_456_789)));
        assert_eq!(time(b"-1"), Some((-1, 0)));
        assert_eq!(time(b"-0.25"), Some((-1, 750_000_000)));
        assert_eq!(time(b"-1.0000000001"), Some((-2, 999_999_999)));
        assert_eq!(time(b"-0.9999999999"), Some((-1, 0)));
        for wrong in [&b""[..], b"-", b".5", b"1.x", b"99999999999999999999", b"+1"] {
            assert_eq!(time(wrong), None, "{}", String::from_utf8_lossy(wrong));
        }
    }

    #[test]
    fn base64_and_percent() {
        assert_eq!(base64_decode(b"aGVsbG8="), Some(b"hello".to_vec()));
        assert_eq!(base64_decode(b"aGVsbG8"), Some(b"hello".to_vec()));
        assert_eq!(base64_decode(b"aGVs\nbG9=\n"), Some(b"hello".to_vec()));
        assert_eq!(base64_decode(b"a*"), None);
        assert_eq!(percent_decode(b"user.a%3Db"), Some(b"user.a=b".to_vec()));
        assert_eq!(percent_decode(b"user.%3"), None);
    }

    #[test]
    fn malformed_records_are_refused_and_never_passed_over() {
        for wrong in [
            &b"nonsense"[..],
            b"99 path=a\n",
            b"10 path=a\n1",
            b"9 path=ab",
            b"2 \n",
            b"11 size=-1\n\0\0x",
            b"0 path=a\n",
            b"8 patha\n",
            b"10 size=x\n",
        ] {
            assert!(Pax::default().parse(wrong).is_err(), "{}", String::from_utf8_lossy(wrong));
        }
        let mut pax = Pax::default();
        pax.parse(b"9 path=a\n11 path=bc\n8 path=\n").expect("fine");
        assert_eq!(pax.path, None);
    }

    /// The names were in a list that every record was looked up in. A header of 1 MiB holds 47,000
    /// names: an archive of three such entries, 27 KB with zstd, took 45 seconds of a processor in
    /// a debug build, and nothing bounds the number of entries.
    #[test]
    fn many_attributes_are_no_work() {
        linear::assert_linear(47_000, |count| {
            let mut records = Vec::new();
            for number in 0..count {
                let body = format!("SCHILY.xattr.{number:x}=\n");
                records.extend(format!("{} {body}", body.len() + 3).into_bytes());
            }
            let mut pax = Pax::default();
            pax.parse(&records).expect("fine");
            assert_eq!(pax.xattrs.len(), count);
        });
    }

    mod linear {
        include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/linear.rs"));
    }
}
