use std::collections::HashMap;
use std::io::{self, BufRead};

use crate::tree::{
    Content, EXTERNAL_MAX, EntryId, INLINE_MAX, InodeId, Meta, Payload, S_IFBLK, S_IFCHR, S_IFDIR,
    S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK, TARGET_MAX, Tree, TreeError,
};

/// Longest line in bytes, so that a file without line ends does not fill the memory. A path, a
/// payload, content and attributes of the largest sizes, all escaped, take 320 KB.
pub(super) const LINE_MAX: usize = 1 << 20;

/// How to read dump text.
#[derive(Clone, Copy, Debug, Default)]
pub struct ParseOptions {
    /// Refuse what mkcomposefs refuses with `CFS_PARSE_STRICT` set: a device number on what is no
    /// device, a symbolic link with content or a size that is not its target's length, a last
    /// line without a line end.
    pub strict: bool,
}

/// Why dump text could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// The input failed.
    #[error("cannot read the dump")]
    Read(#[source] io::Error),
    /// A line is wrong.
    #[error("line {line} (at byte {offset}) of the dump")]
    Line {
        /// The line, from 1.
        line: u64,
        /// Where the line begins, in bytes from the start of the dump.
        offset: u64,
        /// What is wrong with it.
        #[source]
        problem: Problem,
    },
    /// There is not a single line.
    #[error("no files in the dump")]
    Empty,
}

/// What is wrong with a line of a dump.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// Longer than 1 MiB.
    #[error("the line is longer than {LINE_MAX} bytes")]
    LineTooLong,
    /// A NUL, raw or escaped, where text belongs.
    #[error("a NUL byte in {0}")]
    Nul(&'static str),
    /// A backslash that starts none of the known escapes.
    #[error("an invalid escape in {0}")]
    Escape(&'static str),
    /// A field that is no number.
    #[error("{0} is no number")]
    Number(&'static str),
    /// The mode has no known file type.
    #[error("mode {0:o} has no file type")]
    Mode(u32),
    /// The path is empty or ends in a slash.
    #[error("the path has no name")]
    NoName,
    /// The first line is not the root, or the root is no directory.
    #[error("the first line must be the directory /")]
    NoRoot,
    /// The root comes again.
    #[error("a second root")]
    SecondRoot,
    /// The directory of the path is not there (yet).
    #[error("the directory that should hold it is missing")]
    NoParent,
    /// A hard link without a target path, or whose target does not exist.
    #[error("the target of the hard link does not exist")]
    NoTarget,
    /// A hard link that leads back to itself.
    #[error("the hard link leads to itself")]
    LinkLoop,
    /// A hard link to or of a directory.
    #[error("a directory cannot be hard-linked")]
    DirectoryLink,
    /// Content that is not as long as the size says.
    #[error("content of {len} bytes, but the size is {size}")]
    ContentSize {
        /// Length of the content in bytes.
        len: usize,
        /// The size field.
        size: u64,
    },
    /// A digest that is not 64 hexadecimal digits.
    #[error("the digest is not 64 hexadecimal digits")]
    Digest,
    /// An attribute without `=`.
    #[error("an extended attribute without =")]
    XattrWithoutValue,
    /// Refused in strict mode only.
    #[error("strict: {0}")]
    Strict(&'static str),
    /// A name, target, size or attribute that no tree can hold.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// Reads a dump. Takes what mkcomposefs takes, numbers out of range included (they wrap as they
/// do there), and refuses what it refuses; besides, what mkcomposefs would only misread: escaped
/// NULs in text, unreadable digests, hard links to directories.
///
/// Memory is bounded by the tree that results, and 1 MiB for the line at hand.
///
/// # Errors
/// [`DumpError`], with the line.
pub fn parse(input: impl BufRead) -> Result<Tree, DumpError> {
    parse_with(input, ParseOptions::default())
}

/// [`parse`] with options.
///
/// # Errors
/// As [`parse`].
pub fn parse_with(input: impl BufRead, options: ParseOptions) -> Result<Tree, DumpError> {
    let mut parser = Parser::default();
    let mut records = Records { options, ..Records::new(input) };
    while let Some((record, at)) = records.next_at()? {
        parser.take(record, at).map_err(|problem| at.error(problem))?;
    }
    parser.finish()
}

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

/// Reads a dump line by line, for those who need no [`Tree`] of it: memory is bounded by the line at
/// hand (1 MiB).
///
/// Each line is checked by itself. The caller checks that paths have directories, that links have
/// targets, and what a [`Tree`] bounds: names, paths and attributes.
pub struct Records<R> {
    input: R,
    options: ParseOptions,
    at: Position,
    next: u64,
    line: Vec<u8>,
    scratch: Scratch,
}

impl<R: BufRead> Records<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Records<R> {
        let at = Position { line: 0, offset: 0 };
        let (options, line, scratch) = Default::default();
        Records { input, options, at, next: 0, line, scratch }
    }

    /// The next line; `None` at the end.
    ///
    /// # Errors
    /// [`DumpError`], with the line.
    #[allow(clippy::should_implement_trait, reason = "what it returns borrows from the reader")]
    pub fn next(&mut self) -> Result<Option<Record<'_>>, DumpError> {
        Ok(self.next_at()?.map(|(record, _)| record))
    }

    fn next_at(&mut self) -> Result<Option<(Record<'_>, Position)>, DumpError> {
        let at = Position { line: self.at.line + 1, offset: self.next };
        self.at = at;
        let ended = match read_line(&mut self.input, &mut self.line).map_err(DumpError::Read)? {
            Line::None => return Ok(None),
            Line::TooLong => return Err(at.error(Problem::LineTooLong)),
            Line::Full => true,
            Line::Unended => false,
        };
        self.next += self.line.len() as u64 + 1;
        if !ended && self.options.strict {
            return Err(at.error(Problem::Strict("the last line does not end")));
        }
        let record = record(&self.line, self.options, &mut self.scratch);
        record.map(|record| Some((record, at))).map_err(|problem| at.error(problem))
    }
}

#[derive(Clone, Copy)]
struct Position {
    line: u64,
    offset: u64,
}

impl Position {
    fn error(self, problem: Problem) -> DumpError {
        DumpError::Line { line: self.line, offset: self.offset, problem }
    }
}

enum Line {
    None,
    Full,
    Unended,
    TooLong,
}

/// Reads one line without its end into `line`.
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
struct Parser {
    tree: Option<Tree>,
    /// The directory of the previous line: nearly always that of the next one too.
    last_dir: Option<(Vec<u8>, InodeId)>,
    hard_links: Vec<HardLink>,
    targets: Vec<u8>,
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

struct HardLink {
    entry: EntryId,
    /// Its target path in `Parser::targets`.
    target: std::ops::Range<usize>,
    at: Position,
}

/// Splits and unescapes one line.
fn record<'a>(
    line: &'a [u8],
    options: ParseOptions,
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
    let bytes = optional_bytes(content, "the content", &mut scratch.content)?;
    if let Some(bytes) = bytes.filter(|b| b.len() as u64 != size) {
        return Err(Problem::ContentSize { len: bytes.len(), size });
    }
    let digest = optional(digest, "the digest", &mut scratch.digest)?;
    if options.strict {
        check_strict(kind, rdev, size, payload, bytes)?;
    }
    let content = content_of(kind, size, rdev, payload, bytes, digest, &mut scratch.raw_digest)?;
    let xattrs = xattrs(rest, &mut scratch.xattrs)?;
    Ok(Record { path, what: What::Inode { meta, content, nlink, size, xattrs } })
}

impl Parser {
    fn take(&mut self, record: Record<'_>, at: Position) -> Result<(), Problem> {
        let (meta, content, nlink, size, xattrs) = match record.what {
            What::Link(target) => return self.hard_link(record.path, target, at),
            What::Inode { meta, content, nlink, size, xattrs } => {
                (meta, content, nlink, size, xattrs)
            }
        };
        let special =
            !matches!(meta.mode & S_IFMT, S_IFREG | S_IFDIR | S_IFLNK) && !content.is_whiteout();
        let inode = self.insert(record.path, meta, content)?;
        let Some(tree) = &mut self.tree else { return Err(Problem::NoRoot) };
        tree.give_links(inode, nlink);
        if special && size > u64::from(u32::MAX) {
            tree.mark_odd_size(inode);
        }
        if !xattrs.is_empty() {
            tree.set_xattrs(inode, xattrs)?;
        }
        Ok(())
    }

    /// Adds what a line describes at its path.
    fn insert(
        &mut self,
        path: &[u8],
        meta: Meta,
        content: Content<'_>,
    ) -> Result<InodeId, Problem> {
        if path == b"/" {
            if content != Content::Directory {
                return Err(Problem::NoRoot);
            }
            if self.tree.is_some() {
                return Err(Problem::SecondRoot);
            }
            let tree = self.tree.insert(Tree::new(meta));
            return Ok(tree.root());
        }
        let (dir, name) = self.parent(path)?;
        let tree = self.tree.as_mut().ok_or(Problem::NoRoot)?;
        Ok(tree.insert(dir, name, meta, content)?)
    }

    fn hard_link(&mut self, path: &[u8], target: &[u8], at: Position) -> Result<(), Problem> {
        let (dir, name) = self.parent(path)?;
        let tree = self.tree.as_mut().ok_or(Problem::NoRoot)?;
        let entry = tree.reserve(dir, name)?;
        let start = self.targets.len();
        self.targets.extend_from_slice(target);
        self.hard_links.push(HardLink { entry, target: start..self.targets.len(), at });
        Ok(())
    }

    /// The directory that is to hold `path`, and the name in it.
    fn parent<'p>(&mut self, path: &'p [u8]) -> Result<(InodeId, &'p [u8]), Problem> {
        let tree = self.tree.as_ref().ok_or(Problem::NoRoot)?;
        let slash = path.iter().rposition(|&b| b == b'/');
        let (above, name) = match slash {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&[][..], path),
        };
        if name.is_empty() {
            return Err(Problem::NoName);
        }
        if let Some((_, dir)) = self.last_dir.as_ref().filter(|(last, _)| last == above) {
            return Ok((*dir, name));
        }
        let dir = tree.resolve(above).filter(|&d| tree.is_dir(d)).ok_or(Problem::NoParent)?;
        self.last_dir = Some((above.to_vec(), dir));
        Ok((dir, name))
    }

    /// Gives the hard links their inodes, now that all paths are known.
    fn finish(self) -> Result<Tree, DumpError> {
        let Parser { tree, hard_links, targets, .. } = self;
        let mut tree = tree.ok_or(DumpError::Empty)?;
        let by_entry: HashMap<EntryId, usize> =
            hard_links.iter().enumerate().map(|(i, l)| (l.entry, i)).collect();
        // A hard link may lead to another one: follow the chain to its end, then settle all of
        // it, so that every link is followed once.
        let mut chain_of = vec![usize::MAX; hard_links.len()];
        for first in 0..hard_links.len() {
            let mut chain = Vec::new();
            let mut at = first;
            let end = loop {
                let link = &hard_links[at];
                if let Some(inode) = tree.entry_inode(link.entry) {
                    break inode;
                }
                if chain_of[at] == first {
                    return Err(link.at.error(Problem::LinkLoop));
                }
                chain_of[at] = first;
                chain.push(at);
                let target = find(&tree, &targets[link.target.clone()])
                    .ok_or_else(|| link.at.error(Problem::NoTarget))?;
                match target {
                    Found::Inode(inode) => break inode,
                    Found::Entry(entry) => match by_entry.get(&entry) {
                        Some(&next) => at = next,
                        None => return Err(link.at.error(Problem::NoTarget)),
                    },
                }
            };
            for &i in chain.iter().rev() {
                let link = &hard_links[i];
                tree.settle(link.entry, end).map_err(|_| link.at.error(Problem::DirectoryLink))?;
            }
        }
        Ok(tree)
    }
}

enum Found {
    Inode(InodeId),
    /// A hard link that is not settled.
    Entry(EntryId),
}

fn find(tree: &Tree, path: &[u8]) -> Option<Found> {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |at| at + 1);
    let path = &path[..end];
    if path.is_empty() {
        return Some(Found::Inode(tree.root()));
    }
    let (above, name) = match path.iter().rposition(|&b| b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[][..], path),
    };
    let entry = tree.lookup_entry(tree.resolve(above)?, name)?;
    Some(tree.entry_inode(entry).map_or(Found::Entry(entry), Found::Inode))
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

/// Splits and unescapes the attributes of a line.
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

fn optional_bytes<'a>(
    field: &'a [u8],
    what: &'static str,
    scratch: &'a mut Vec<u8>,
) -> Result<Option<&'a [u8]>, Problem> {
    if field == b"-" { Ok(None) } else { bytes(field, what, scratch).map(Some) }
}

/// Appends `field` to `out` with its escapes undone.
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
fn number(field: &[u8], base: u8, what: &'static str) -> Result<u64, Problem> {
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
        if digit >= base {
            return Err(Problem::Number(what));
        }
        value = value
            .and_then(|v| v.checked_mul(u64::from(base)))
            .and_then(|v| v.checked_add(u64::from(digit)));
    }
    Ok(match value {
        Some(value) if negative => value.wrapping_neg(),
        Some(value) => value,
        None => u64::MAX,
    })
}

/// The low 32 bits, which is what mkcomposefs keeps.
fn low32(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "/ 4096 40755 2 0 0 0 0.0 - - -\n";

    fn problem(lines: &str) -> Problem {
        match parse(format!("{ROOT}{lines}").as_bytes()) {
            Err(DumpError::Line { problem, .. }) => problem,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("accepted: {lines}"),
        }
    }

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

    #[test]
    fn a_dump_becomes_a_tree() {
        let text = concat!(
            "/ 4096 40755 3 0 0 0 -5.000000007 - - - user.a=1\\x00\\= user.b=\n",
            "/d 4096 41777 2 1 4294967295 0 1.2 - - -\n",
            "/d/early 0 @100644 9 0 0 0 0.0 /d/f\\x20\\xff - -\n",
            "/d/f\\x20\\xff 3 100644 9 0 0 0 0.0 - a\\nb -\n",
            "/d/s 0 120777 1 0 0 0 0.0 \\x2d - -\n",
            "/d/x 70000 100644 1 0 0 0 0.0 ",
            "00/01020304050607080910111213141516171819202122232425262728293031 - ",
            "0001020304050607080910111213141516171819202122232425262728293031",
        );
        let text = text.replace("\\=", "=");
        let tree = parse(text.as_bytes()).unwrap();
        let root = tree.root();
        assert_eq!(tree.meta(root).mtime, -5);
        assert_eq!(tree.xattr(root, b"user.a"), Some(&b"1\0="[..]));
        let file = tree.resolve(b"/d/f \xff").unwrap();
        assert_eq!(tree.resolve(b"/d/early"), Some(file));
        assert_eq!((tree.nlink(file), tree.links(file).count()), (9, 2));
        assert_eq!(tree.content(file), Content::Inline(b"a\nb"));
        assert_eq!(tree.content(tree.resolve(b"d/s").unwrap()), Content::Symlink(b"-"));
        let object = tree.content(tree.resolve(b"/d/x").unwrap());
        let Content::External { size: 70000, digest: Some(d), .. } = object else { panic!() };
        assert_eq!(object, Content::object(70000, d));
        assert_eq!(
            tree.primary_names()[&file],
            tree.lookup_entry(tree.parent(file).unwrap(), b"f \xff").unwrap()
        );
    }

    #[test]
    fn what_is_wrong_is_refused_by_name() {
        assert_eq!(problem("\n"), Problem::Number("the mode"));
        assert_eq!(problem("/a/b 0 100644 1 0 0 0 0.0 - - -"), Problem::NoParent);
        assert_eq!(problem("/a/ 0 100644 1 0 0 0 0.0 - - -"), Problem::NoName);
        assert_eq!(problem("/ 0 40755 1 0 0 0 0.0 - - -"), Problem::SecondRoot);
        assert_eq!(problem("/a\\x00b 0 100644 1 0 0 0 0.0 - - -"), Problem::Nul("the path"));
        assert_eq!(problem("/a\\q 0 100644 1 0 0 0 0.0 - - -"), Problem::Escape("the path"));
        assert_eq!(problem("/a 0 644 1 0 0 0 0.0 - - -"), Problem::Mode(0o644));
        for digest in ["abc", &"g".repeat(64), &format!("0x{}", "0".repeat(64))] {
            let line = format!("/a 1 100644 1 0 0 0 0.0 - - {digest}");
            assert_eq!(problem(&line), Problem::Digest);
        }
        assert_eq!(problem("/a\\x0x 0 100644 1 0 0 0 0.0 - - -"), Problem::Escape("the path"));
        assert_eq!(problem("/a 1 100644 1 0 0 0 0 - - -"), Problem::Number("the time"));
        assert_eq!(problem("/a 0 100644 1 0 0 0 0.0 - - - x"), Problem::XattrWithoutValue);
        assert_eq!(problem("/a 0 @100644 1 0 0 0 0.0 / - -"), Problem::DirectoryLink);
        assert_eq!(problem("/a 0 @100644 1 0 0 0 0.0 /b - -"), Problem::NoTarget);
        let two = "/a 0 @100644 1 0 0 0 0.0 /b - -\n/b 0 @100644 1 0 0 0 0.0 /a - -\n";
        assert_eq!(problem(two), Problem::LinkLoop);
        let size = Problem::ContentSize { len: 1, size: 2 };
        assert_eq!(problem("/a 2 100644 1 0 0 0 0.0 - x -"), size);
        assert!(matches!(parse(&b""[..]), Err(DumpError::Empty)));
        let endless = vec![b'x'; LINE_MAX + 1];
        assert!(matches!(
            parse(&endless[..]),
            Err(DumpError::Line { problem: Problem::LineTooLong, .. })
        ));
    }

    #[test]
    fn a_long_chain_of_hard_links_is_followed_once() {
        let mut text = String::from(ROOT);
        for i in 0..50_000 {
            text += &format!("/{i} 0 @100644 1 0 0 0 0.0 /{} - -\n", i + 1);
        }
        text += "/50000 0 100644 1 0 0 0 0.0 - - -\n";
        let tree = parse(text.as_bytes()).unwrap();
        assert_eq!(tree.inode_count(), 2);
        assert_eq!(tree.resolve(b"/0"), tree.resolve(b"/50000"));
    }
}
