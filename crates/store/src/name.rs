//! Names that people give (`registry.example/ns/redis:7.0.15`) as file names, and back.
//!
//! Letters, digits, `-`, `_`, `+` and `.` stand for themselves (`.` not in first place), every
//! other byte becomes `%` and two upper-case hex digits. So a file name has no `/`, is not `.` or
//! `..`, is no temporary file (these begin with `.`), and is read back exactly.
//!
//! A name whose encoding is longer than [`ENCODED_MAX`] becomes `~` and the name's SHA-256 in hex.
//! Every record holds its name too, to read it back in that case and to check it in the other.

use sha2::{Digest as _, Sha256};

use crate::Digest;
use crate::error::{Error, Result};

/// Longest encoding in a file name, in bytes: of 255, the rest is for suffixes (`.dump.zst`).
const ENCODED_MAX: usize = 240;
/// Longest name, in bytes. An OCI reference has a repository of up to 255, a tag of 128, a digest.
const NAME_MAX: usize = 1024;

/// The file name (without suffix) for a name: 1 to 1024 bytes without control characters.
pub(crate) fn encode(what: &'static str, name: &str) -> Result<String> {
    let bad = |reason| Err(Error::BadName { what, name: name.chars().take(80).collect(), reason });
    if name.is_empty() {
        return bad("it is empty");
    }
    if name.len() > NAME_MAX {
        return bad("it is longer than 1024 bytes");
    }
    if name.chars().any(char::is_control) {
        return bad("it has control characters");
    }
    let mut encoded = String::with_capacity(name.len() + 8);
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'+' => {
                encoded.push(char::from(byte));
            }
            b'.' if at > 0 => encoded.push('.'),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    if encoded.len() > ENCODED_MAX {
        encoded = format!("~{}", Digest(Sha256::digest(name).into()));
    }
    Ok(encoded)
}

/// The name of an encoded file name; `None` if it is hashed (`~…`) or not made by [`encode`].
pub(crate) fn decode(encoded: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let hex = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        rest = &rest[2..];
    }
    let name = String::from_utf8(bytes).ok()?;
    // Only the one spelling that `encode` makes is accepted: two files never mean one name.
    (encode("name", &name).ok()? == encoded).then_some(name)
}

/// Whether [`encode`] can have made this file name.
pub(crate) fn is_encoded(file: &str) -> bool {
    let hashed = file.strip_prefix('~').and_then(|hash| Digest::from_lower_hex(hash.as_bytes()));
    hashed.is_some() || decode(file).is_some()
}

/// Whether a file with this name may hold the record of `name`.
pub(crate) fn matches(file: &str, name: &str) -> bool {
    encode("name", name).is_ok_and(|encoded| encoded == file)
}

/// A trust domain's name is its directory: 1 to 64 of `a-z 0-9 - _ .`, first a letter or digit.
pub(crate) fn check_domain(name: &str) -> Result<()> {
    let good = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    if name.len() > 64
        || !name.bytes().all(good)
        || !name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
    {
        return Err(Error::BadName {
            what: "domain name",
            name: name.chars().take(80).collect(),
            reason: "it must be 1 to 64 of a-z 0-9 - _ . and begin with a letter or digit",
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_as_they_were() {
        for (name, file) in [
            ("redis:7.0.15", "redis%3A7.0.15"),
            ("host:5000/ns/name:tag", "host%3A5000%2Fns%2Fname%3Atag"),
            ("a@sha256:00", "a%40sha256%3A00"),
            (".", "%2E"),
            ("..", "%2E."),
            ("../../etc/passwd", "%2E.%2F..%2Fetc%2Fpasswd"),
            ("100%", "100%25"),
            ("~", "%7E"),
            ("ünï", "%C3%BCn%C3%AF"),
        ] {
            assert_eq!(encode("ref name", name).unwrap(), file);
            assert_eq!(decode(file).as_deref(), Some(name));
        }
    }

    #[test]
    fn long_names_are_hashed_and_still_checked() {
        let name = format!("{}:{}", "r".repeat(255), "t".repeat(128));
        let file = encode("ref name", &name).unwrap();
        assert_eq!((file.len(), &file[..1]), (65, "~"));
        assert!(matches(&file, &name) && !matches(&file, "other"));
        assert_eq!(decode(&file), None);
    }

    #[test]
    fn other_spellings_and_bad_names_are_refused() {
        for file in ["redis:7", "%72edis", "%2e", ".x", "%", "%4", "%ZZ", "%FF", "a/b", ""] {
            assert_eq!(decode(file), None, "{file}");
        }
        for name in ["", "a\nb", "a\0", &"x".repeat(1025)] {
            assert!(encode("ref name", name).is_err());
        }
        for domain in ["", ".", "..", "a/b", "A", "-a", &"x".repeat(65)] {
            assert!(check_domain(domain).is_err(), "{domain}");
        }
        check_domain("tenant-1.prod_x").unwrap();
    }
}
