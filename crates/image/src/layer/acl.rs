//! POSIX ACLs: from the text of `SCHILY.acl.*` PAX records to the kernel's xattr value.
//!
//! Text: entries `tag:qualifier:perms[:id]`, apart by comma or newline (star(1), acl(5)).
//! Value: `u32 version = 2`, then `{u16 tag, u16 perm, u32 id}`, little-endian, sorted by tag and
//! id (linux/posix_acl_xattr.h).

use std::collections::BTreeMap;

#[derive(Debug, thiserror::Error)]
#[error("ACL entry {entry:?}: {what}")]
pub(crate) struct AclError {
    entry: String,
    what: &'static str,
}

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;
/// What fits into the largest xattr value, 64 KiB.
const ENTRIES_MAX: usize = (65_536 - 4) / 8;

/// The xattr value for the text; `None`, as in the kernel, for just the three entries of the mode.
pub(crate) fn from_text(text: &[u8]) -> Result<Option<Vec<u8>>, AclError> {
    let mut entries = BTreeMap::new();
    for line in text.split(|&b| b == b',' || b == b'\n') {
        let line = line.split(|&b| b == b'#').next().unwrap_or_default().trim_ascii();
        if line.is_empty() {
            continue;
        }
        let fail = |what| AclError { entry: String::from_utf8_lossy(line).into_owned(), what };
        let fields: Vec<&[u8]> = line.split(|&b| b == b':').map(<[u8]>::trim_ascii).collect();
        // `mask` and `other` may come without the empty qualifier (star: `mask:rwx`).
        let (tag, qualifier, perms, id) = match fields[..] {
            [tag, qualifier, perms] => (tag, qualifier, perms, None),
            [tag, qualifier, perms, id] => (tag, qualifier, perms, Some(id)),
            [tag, perms] => (tag, &b""[..], perms, None),
            _ => return Err(fail("not tag:qualifier:permissions")),
        };
        let named = !qualifier.is_empty();
        let tag = match (tag, named) {
            (b"user" | b"u", false) => USER_OBJ,
            (b"user" | b"u", true) => USER,
            (b"group" | b"g", false) => GROUP_OBJ,
            (b"group" | b"g", true) => GROUP,
            (b"mask" | b"m", false) => MASK,
            (b"other" | b"o", false) => OTHER,
            _ => return Err(fail("unknown tag")),
        };
        let id = if named {
            let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<u32>().ok();
            id.and_then(number)
                .or_else(|| number(qualifier))
                .or_else(|| (qualifier == b"root").then_some(0))
                .filter(|&id| id != NO_ID)
                .ok_or_else(|| fail("a name without a number cannot be resolved"))?
        } else {
            NO_ID
        };
        let mut bits = 0u16;
        for &byte in perms {
            bits |= match byte {
                b'r' => 4,
                b'w' => 2,
                b'x' => 1,
                b'-' => 0,
                _ => return Err(fail("unknown permission")),
            };
        }
        if entries.insert((tag, id), bits).is_some() {
            return Err(fail("given twice"));
        }
        if entries.len() > ENTRIES_MAX {
            return Err(fail("too many entries"));
        }
    }
    let has = |tag| entries.keys().any(|&(t, _)| t == tag);
    if entries.is_empty() {
        return Ok(None);
    }
    let whole = |what| AclError { entry: String::from_utf8_lossy(text).into_owned(), what };
    if !(has(USER_OBJ) && has(GROUP_OBJ) && has(OTHER)) {
        return Err(whole("owner, group or other is missing"));
    }
    if (has(USER) || has(GROUP)) && !has(MASK) {
        return Err(whole("the mask is missing"));
    }
    if entries.len() == 3 {
        return Ok(None);
    }
    let mut value = Vec::with_capacity(4 + 8 * entries.len());
    value.extend_from_slice(&2u32.to_le_bytes());
    for ((tag, id), bits) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&bits.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value that `setfacl -m u:1000:rwx,g:100:r` leaves in the xattr on a file of mode 0644.
    #[test]
    fn text_becomes_the_kernels_value() {
        let want: Vec<u8> = [
            &[2u8, 0, 0, 0][..],
            &[1, 0, 6, 0, 255, 255, 255, 255],
            &[2, 0, 7, 0, 0xe8, 3, 0, 0],
            &[4, 0, 4, 0, 255, 255, 255, 255],
            &[8, 0, 4, 0, 100, 0, 0, 0],
            &[16, 0, 7, 0, 255, 255, 255, 255],
            &[32, 0, 4, 0, 255, 255, 255, 255],
        ]
        .concat();
        for text in [
            &b"user::rw-,user:1000:rwx,group::r--,group:100:r--,mask::rwx,other::r--"[..],
            b"user::rw-\nuser:joe:rwx:1000\ngroup::r--\ngroup:users:r--:100\nmask::rwx\nother::r--\n",
            b"mask:rwx,other:r--,group:100:r--,group::r--,user:1000:rwx,user::rw-",
        ] {
            assert_eq!(from_text(text).expect("valid"), Some(want.clone()));
        }
    }

    /// Each entry was compared with all before it: 30 files with 8,180 entries each took 9 seconds
    /// of a processor in a debug build. The sorted value is what it was.
    #[test]
    fn as_many_entries_as_a_value_has_room_for() {
        let text = |count: usize| {
            let users: String = (0..count).rev().map(|id| format!(",u:{id}:r")).collect();
            format!("u::rw-,g::r--,o::r--,m::rwx{users}")
        };
        let value = from_text(text(ENTRIES_MAX - 4).as_bytes()).expect("valid").expect("a value");
        assert_eq!(value.len(), 4 + 8 * ENTRIES_MAX);
        assert_eq!(value[12..20], [2, 0, 4, 0, 0, 0, 0, 0]);
        assert_eq!(value[20..28], [2, 0, 4, 0, 1, 0, 0, 0]);
        let error = from_text(text(ENTRIES_MAX - 3).as_bytes()).expect_err("one more");
        assert_eq!(error.what, "too many entries");
    }

    #[test]
    fn base_entries_alone_are_the_mode() {
        assert_eq!(from_text(b"user::rw-,group::r--,other::r--").expect("valid"), None);
        assert_eq!(from_text(b"").expect("valid"), None);
    }

    #[test]
    fn what_cannot_be_kept_is_refused() {
        for (text, what) in [
            (
                "user::rw-,user:joe:rwx,group::r--,mask::rwx,other::r--",
                "a name without a number cannot be resolved",
            ),
            ("user::rw-,user:1:rwx,group::r--,other::r--", "the mask is missing"),
            ("user::rw-,group::r--", "owner, group or other is missing"),
            ("user::rw-,user::rw-,group::r--,other::r--", "given twice"),
            ("user::rwz,group::r--,other::r--", "unknown permission"),
            ("nobody::rw-,group::r--,other::r--", "unknown tag"),
            ("user", "not tag:qualifier:permissions"),
        ] {
            assert_eq!(from_text(text.as_bytes()).expect_err(text).what, what, "{text}");
        }
    }
}
