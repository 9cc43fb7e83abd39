use std::io::{self, BufRead};

use super::{DumpError, Problem};
use crate::tree::{
    Content, EXTERNAL_MAX, INLINE_MAX, Meta, Payload, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK,
    S_IFMT, S_IFREG, S_IFSOCK, TARGET_MAX, TreeError,
};
use crate::write::low32;

/// Longest line in bytes, so that a file without line ends does not fill the memory. A path, a
/// payload, content and attributes of the largest sizes, all escaped, take 320 KB.
pub(super) const LINE_MAX: usize = 1 << 20;

/// One line of a dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<'a> {
    /// The path, from the root, which is `/`.
    pub path: &'a [u8],
    /// What is there.
    pub what: What<'a>,
}

/// What a line of a dump describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What<'a> {
    /// A hard link to the path, which may come later.
    Link(&'a [u8]),
    /// A file, directory or other inode.
    Inode {
        /// Owner, mode and time.
        meta: Meta,
        /// What it is and holds; paths of objects are given as [`Payload::Path`].
        content: Content<'a>,
        /// The link count that the line gives, checked against nothing.
        nlink: u32,
        /// The size that the line gives, also where the content has none.
        size: u64,
        /// Extended attributes as (name, value), in the order of the line.
        xattrs: Vec<(&'a [u8], &'a [u8])>,
    },
}

/// Reads a dump line by line without a [`Tree`](crate::tree::Tree), in 1 MiB of memory.
///
/// Each line is checked by itself. The caller checks that paths have directories, that links have
/// targets, and what a tree bounds: names, paths and attributes.
pub struct Records<R> {
    input: R,
    pub(super) strict: bool,
    at: Position,
    next: u64,
    line: Vec<u8>,
    scratch: Scratch,
}

impl<R: BufRead> Records<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Records<R> {
        let at = Position { line: 0, offset: 0 };
        let (line, scratch) = Default::default();
        Records { input, strict: false, at, next: 0, line, scratch }
    }

    /// The next line; `None` at the end.
    #[allow(clippy::should_implement_trait, reason = "what it returns borrows from the reader")]
    pub fn next(&mut self) -> Result<Option<Record<'_>>, DumpError> {
        Ok(self.next_at()?.map(|(record, _)| record))
    }

    pub(super) fn next_at(&mut self) -> Result<Option<(Record<'_>, Position)>, DumpError> {
        let at = Position { line: self.at.line + 1, offset: self.next };
        self.at = at;
        let ended = match read_line(&mut self.input, &mut self.line).map_err(DumpError::Read)? {
            Line::None => return Ok(None),
            Line::TooLong => return Err(at.error(Problem::LineTooLong)),
            Line::Full => true,
            Line::Unended => false,
        };
        self.next += self.line.len() as u64 + 1;
        if !ended && self.strict {
            return Err(at.error(Problem::Strict("the last line does not end")));
        }
        let record = record(&self.line, self.strict, &mut self.scratch);
        record.map(|record| Some((record, at))).map_err(|problem| at.error(problem))
    }
}

#[derive(Clone, Copy)]
pub(super) struct Position {
    line: u64,
    offset: u64,
}

impl Position {
    pub(super) fn error(self, problem: Problem) -> DumpError {
        DumpError::Line { line: self.line, offset: self.offset, problem }
    }
}

enum Line {
    None,
    Full,
    Unended,
    TooLong,
}

fn read_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Line> {
    line.clear();
    loop {
        let chunk = match input.fill_buf() {
            Ok(chunk) => chunk,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        if chunk.is_empty() {
            return Ok(if line.is_empty() { Line::None } else { Line::Unended });
        }
        let end = chunk.iter().position(|&b| b == b'\n');
        let part = &chunk[..end.unwrap_or(chunk.len())];
        if line.len() + part.len() > LINE_MAX {
            return Ok(Line::TooLong);
        }
        line.extend_from_slice(part);
        let used = part.len() + usize::from(end.is_some());
        input.consume(used);
        if end.is_some() {
            return Ok(Line::Full);
        }
    }
}

#[derive(Default)]
struct Scratch {
    path: Vec<u8>,
    payload: Vec<u8>,
    content: Vec<u8>,
    digest: Vec<u8>,
    raw_digest: [u8; 32],
    xattrs: Vec<u8>,
}

fn record<'a>(
    line: &'a [u8],
    strict: bool,
    scratch: &'a mut Scratch,
) -> Result<Record<'a>, Problem> {
    if line.contains(&0) {
        return Err(Problem::Nul("the line"));
    }
    let mut rest = line;
    let mut field = || {
        let (field, after) = split_once(rest, b' ');
        rest = after.unwrap_or_default();
        field
    };
    let [path, size, mode, nlink, uid, gid, rdev, mtime, payload, content, digest] =
        std::array::from_fn(|_| field());

    let path = text(path, "the path", &mut scratch.path)?;
    let link = mode.first() == Some(&b'@');
    let mode = low32(number(&mode[usize::from(link)..], 8, "the mode")?);
    let kind = mode & S_IFMT;
    let known = [S_IFREG, S_IFDIR, S_IFLNK, S_IFCHR, S_IFBLK, S_IFIFO, S_IFSOCK];
    if !known.contains(&kind) {
        return Err(Problem::Mode(mode));
    }
    if link {
        if kind == S_IFDIR || path == b"/" {
            return Err(Problem::DirectoryLink);
        }
        let target = optional(payload, "the target", &mut scratch.payload)?;
        return Ok(Record { path, what: What::Link(target.ok_or(Problem::NoTarget)?) });
    }

    let size = number(size, 10, "the size")?;
    let nlink = low32(number(nlink, 10, "the link count")?);
    let (mtime, mtime_nsec) = match split_once(mtime, b'.') {
        (seconds, Some(nanos)) => {
            (number(seconds, 10, "the time")?.cast_signed(), low32(number(nanos, 10, "the time")?))
        }
        _ => return Err(Problem::Number("the time")),
    };
    let meta = Meta {
        mode: mode & 0o177_777,
        uid: low32(number(uid, 10, "the owner")?),
        gid: low32(number(gid, 10, "the group")?),
        mtime,
        mtime_nsec,
    };
    let rdev = low32(number(rdev, 10, "the device number")?);
    let payload = optional(payload, "the payload", &mut scratch.payload)?;
    let bytes = match content {
        b"-" => None,
        field => Some(bytes(field, "the content", &mut scratch.content)?),
    };
    if let Some(bytes) = bytes.filter(|b| b.len() as u64 != size) {
        return Err(Problem::ContentSize { len: bytes.len(), size });
    }
    let digest = optional(digest, "the digest", &mut scratch.digest)?;
    if strict {
        check_strict(kind, rdev, size, payload, bytes)?;
    }
    let content = content_of(kind, size, rdev, payload, bytes, digest, &mut scratch.raw_digest)?;
    let xattrs = xattrs(rest, &mut scratch.xattrs)?;
    Ok(Record { path, what: What::Inode { meta, content, nlink, size, xattrs } })
}

fn check_strict(
    kind: u32,
    rdev: u32,
    size: u64,
    payload: Option<&[u8]>,
    content: Option<&[u8]>,
) -> Result<(), Problem> {
    if rdev != 0 && kind != S_IFCHR && kind != S_IFBLK {
        return Err(Problem::Strict("a device number on what is no device"));
    }
    if kind == S_IFLNK {
        if payload.is_some_and(|p| p.len() as u64 != size) {
            return Err(Problem::Strict("the size of a symbolic link is not its target's length"));
        }
        if content.is_some_and(|c| !c.is_empty()) {
            return Err(Problem::Strict("a symbolic link with content"));
        }
    }
    Ok(())
}

/// What the fields make of the file. Fields that do not belong to its type are checked as
/// mkcomposefs checks them, and then left out as it does.
fn content_of<'a>(
    kind: u32,
    size: u64,
    rdev: u32,
    payload: Option<&'a [u8]>,
    content: Option<&'a [u8]>,
    digest: Option<&[u8]>,
    raw_digest: &'a mut [u8; 32],
) -> Result<Content<'a>, Problem> {
    if kind == S_IFLNK {
        return Ok(Content::Symlink(payload.unwrap_or_default()));
    }
    if let Some(path) = payload.filter(|p| p.len() > TARGET_MAX) {
        return Err(TreeError::Target { len: path.len() }.into());
    }
    if let Some(bytes) = content.filter(|c| c.len() > INLINE_MAX) {
        return Err(TreeError::InlineTooBig { len: bytes.len() }.into());
    }
    Ok(match kind {
        S_IFDIR => Content::Directory,
        S_IFCHR => Content::CharDevice(rdev),
        S_IFBLK => Content::BlockDevice(rdev),
        S_IFIFO => Content::Fifo,
        S_IFSOCK => Content::Socket,
        _ => match content {
            Some(bytes) if size > 0 => Content::Inline(bytes),
            _ if size == 0 => Content::Inline(b""),
            _ if size > EXTERNAL_MAX => return Err(TreeError::FileTooBig { size }.into()),
            _ => {
                let digest = digest.map(|hex| digest_of(hex, raw_digest)).transpose()?;
                let payload =
                    payload.filter(|p| !p.is_empty()).map_or(Payload::None, Payload::Path);
                Content::External { size, digest, payload }
            }
        },
    })
}

fn digest_of<'a>(hex: &[u8], raw: &'a mut [u8; 32]) -> Result<&'a [u8; 32], Problem> {
    // A prefix `0x`, which the decoder takes, makes it longer.
    match const_hex::decode_to_slice(hex, raw) {
        Ok(()) if hex.len() == 64 => Ok(raw),
        _ => Err(Problem::Digest),
    }
}

type XattrList<'a> = Vec<(&'a [u8], &'a [u8])>;

fn xattrs<'a>(list: &[u8], scratch: &'a mut Vec<u8>) -> Result<XattrList<'a>, Problem> {
    scratch.clear();
    let mut bounds = Vec::new();
    let mut rest = Some(list).filter(|l| !l.is_empty());
    while let Some(list) = rest {
        let (xattr, after) = split_once(list, b' ');
        rest = after.filter(|l| !l.is_empty());
        let (name, Some(value)) = split_once(xattr, b'=') else {
            return Err(Problem::XattrWithoutValue);
        };
        let start = scratch.len();
        unescape(name, "an attribute's name", scratch)?;
        let middle = scratch.len();
        if scratch[start..].contains(&0) {
            return Err(Problem::Nul("an attribute's name"));
        }
        unescape(value, "an attribute's value", scratch)?;
        bounds.push((start, middle, scratch.len()));
    }
    Ok(bounds.into_iter().map(|(a, b, c)| (&scratch[a..b], &scratch[b..c])).collect())
}

/// Splits at the first `separator`; the second part is `None` where there is none.
fn split_once(bytes: &[u8], separator: u8) -> (&[u8], Option<&[u8]>) {
    match bytes.iter().position(|&b| b == separator) {
        Some(at) => (&bytes[..at], Some(&bytes[at + 1..])),
        None => (bytes, None),
    }
}

/// A field of text, unescaped. Only what has an escape is copied.
fn text<'a>(
    field: &'a [u8],
    what: &'static str,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8], Problem> {
    let bytes = bytes(field, what, scratch)?;
    if bytes.contains(&0) { Err(Problem::Nul(what)) } else { Ok(bytes) }
}

fn bytes<'a>(
    field: &'a [u8],
    what: &'static str,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8], Problem> {
    if !field.contains(&b'\\') {
        return Ok(field);
    }
    scratch.clear();
    unescape(field, what, scratch)?;
    Ok(scratch)
}

fn optional<'a>(
    field: &'a [u8],
    what: &'static str,
    scratch: &'a mut Vec<u8>,
) -> Result<Option<&'a [u8]>, Problem> {
    if field == b"-" { Ok(None) } else { text(field, what, scratch).map(Some) }
}

fn unescape(field: &[u8], what: &'static str, out: &mut Vec<u8>) -> Result<(), Problem> {
    let mut bytes = field.iter().copied();
    while let Some(byte) = bytes.next() {
        let byte = if byte == b'\\' {
            match bytes.next() {
                Some(b'\\') => b'\\',
                Some(b'n') => b'\n',
                Some(b'r') => b'\r',
                Some(b't') => b'\t',
                Some(b'x') => match (bytes.next(), bytes.next()) {
                    (Some(high), Some(low)) => {
                        let mut byte = [0];
                        const_hex::decode_to_slice([high, low], &mut byte)
                            .map_err(|_| Problem::Escape(what))?;
                        byte[0]
                    }
                    _ => return Err(Problem::Escape(what)),
                },
                _ => return Err(Problem::Escape(what)),
            }
        } else {
            byte
        };
        out.push(byte);
    }
    Ok(())
}

/// A number as strtoull(3) reads it, since dumps out there were checked by nothing else: white
/// space and a sign may precede it, a minus wraps, too large is the largest.
fn number(field: &[u8], radix: u8, what: &'static str) -> Result<u64, Problem> {
    let start = field.iter().position(|b| !matches!(b, b'\t' | 0x0b | 0x0c | b'\r'));
    let digits = &field[start.unwrap_or(field.len())..];
    let (negative, digits) = match digits.first() {
        Some(b'-') => (true, &digits[1..]),
        Some(b'+') => (false, &digits[1..]),
        _ => (false, digits),
    };
    if digits.is_empty() {
        return Err(Problem::Number(what));
    }
    let mut value = Some(0_u64);
    for &digit in digits {
        let digit = digit.wrapping_sub(b'0');
        if digit >= radix {
            return Err(Problem::Number(what));
        }
        value = value
            .and_then(|v| v.checked_mul(u64::from(radix)))
            .and_then(|v| v.checked_add(u64::from(digit)));
    }
    Ok(match value {
        Some(value) if negative => value.wrapping_neg(),
        Some(value) => value,
        None => u64::MAX,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_strtoull_reads_them() {
        let n = |s: &str| number(s.as_bytes(), 10, "x");
        assert_eq!(n("-1"), Ok(u64::MAX));
        assert_eq!(n("+7"), Ok(7));
        assert_eq!(n("\t7"), Ok(7));
        assert_eq!(n("99999999999999999999"), Ok(u64::MAX));
        assert_eq!(n("-99999999999999999999"), Ok(u64::MAX));
        for bad in ["", "-", "7x", "0x7", "7 ", "--1"] {
            assert_eq!(n(bad), Err(Problem::Number("x")), "{bad:?}");
        }
        assert_eq!(number(b"8", 8, "x"), Err(Problem::Number("x")));
    }
}
