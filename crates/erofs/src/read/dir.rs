use std::collections::HashSet;

use zerocopy::FromBytes;

use super::{Image, Inode, ReadAt, ReadError};
use crate::format::{Dirent, NAME_LEN};
use crate::tree::{PATH_MAX, TreeError};

const DIRENT: usize = size_of::<Dirent>();

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The name: 1 to 255 bytes without `/` and NUL.
    pub name: Vec<u8>,
    /// Number of the inode that it leads to.
    pub nid: u64,
    /// Its type as the directory claims (see [`crate::format::FileType`]).
    pub file_type: u8,
}

/// Iterator of [`Image::readdir`].
pub struct ReadDir<'i, S> {
    image: &'i Image<S>,
    dir: Inode,
    block: Block,
    next_block: u64,
    next: usize,
    /// The name before `next`; empty at the start.
    last: Vec<u8>,
    failed: bool,
}

#[derive(Default)]
struct Block {
    bytes: Vec<u8>,
    /// Where it is, in bytes from the start of the directory.
    start: u64,
    count: usize,
}

impl<S: ReadAt> Image<S> {
    /// The names of a directory, sorted by their bytes, without `.` and `..`.
    ///
    /// # Errors
    /// [`ReadError::Kind`] if the inode is not a directory. The iterator ends with the first
    /// [`ReadError::Order`], [`ReadError::Corrupt`] or [`ReadError::Source`].
    pub fn readdir(&self, dir: &Inode) -> Result<ReadDir<'_, S>, ReadError> {
        self.check_dir(dir)?;
        let block = Block::default();
        let last = Vec::new();
        Ok(ReadDir { image: self, dir: *dir, block, next_block: 0, next: 0, last, failed: false })
    }

    /// Finds a name in a directory by binary search, as the kernel does. In a directory whose names
    /// are out of order it can miss a name; only [`Image::readdir`] reports such a directory.
    pub fn lookup(&self, dir: &Inode, name: &[u8]) -> Result<Option<DirEntry>, ReadError> {
        self.check_dir(dir)?;
        let mut block = Block::default();
        let (mut low, mut high) = (0, dir.size.div_ceil(self.superblock().block_size));
        while low < high {
            let middle = low + (high - low) / 2;
            self.load(dir, middle, &mut block)?;
            if block.name(0, dir)?.0 <= name {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        // `low` is the first block that begins behind the name.
        if low == 0 {
            return Ok(None);
        }
        self.load(dir, low - 1, &mut block)?;
        let (mut first, mut end) = (0, block.count);
        while first < end {
            let middle = first + (end - first) / 2;
            let (found, entry) = block.name(middle, dir)?;
            match found.cmp(name) {
                std::cmp::Ordering::Less => first = middle + 1,
                std::cmp::Ordering::Greater => end = middle,
                std::cmp::Ordering::Equal => return Ok(Some(named(&entry, found))),
            }
        }
        Ok(None)
    }

    /// All names below the root, depth first, a directory before what it holds.
    pub fn walk(&self) -> Result<Walk<'_, S>, ReadError> {
        Ok(self.walk_from(self.root()?))
    }

    /// All names below a directory, as [`Image::walk`]; paths begin at the directory.
    pub fn walk_from(&self, dir: Inode) -> Walk<'_, S> {
        let (guard, enter) = (Guard::new(self.size()), Some(dir));
        Walk { image: self, guard, open: Vec::new(), path: Vec::new(), ends: vec![0], enter }
    }

    fn check_dir(&self, dir: &Inode) -> Result<(), ReadError> {
        if !dir.is_dir() {
            return Err(ReadError::Kind { nid: dir.nid, kind: "directory" });
        }
        if dir.is_chunk_based() {
            return Err(ReadError::unsupported("a chunk-based directory", dir.offset));
        }
        if dir.size > self.size() {
            return Err(ReadError::corrupt(dir.offset, "a directory larger than the image"));
        }
        Ok(())
    }

    fn load(&self, dir: &Inode, number: u64, block: &mut Block) -> Result<(), ReadError> {
        let block_size = self.superblock().block_size;
        block.start = number * block_size;
        let len = (dir.size - block.start).min(block_size);
        // At most 64 KiB.
        block.bytes.resize(usize::try_from(len).unwrap_or(0), 0);
        let got = self.read(dir, block.start, &mut block.bytes)?;
        block.bytes.truncate(got);
        let bad = |what| Err(ReadError::corrupt(dir.offset, what));
        let Ok((head, _)) = Dirent::read_from_prefix(&block.bytes) else {
            return bad("a directory block has no room for a name");
        };
        let names = usize::from(head.name_offset.get());
        if names < DIRENT || !names.is_multiple_of(DIRENT) || names >= block.bytes.len() {
            return bad("a directory block's first name offset is wrong");
        }
        block.count = names / DIRENT;
        Ok(())
    }
}

fn named(entry: &Dirent, name: &[u8]) -> DirEntry {
    DirEntry { name: name.to_vec(), nid: entry.nid.get(), file_type: entry.file_type }
}

impl Block {
    /// The name with the number `i`, which is below `count`.
    fn name(&self, i: usize, dir: &Inode) -> Result<(&[u8], Dirent), ReadError> {
        let bad = |what| Err(ReadError::corrupt(dir.offset, what));
        let entry = |i: usize| {
            let bytes = self.bytes.get(i * DIRENT..).unwrap_or_default();
            Dirent::read_from_prefix(bytes).ok().map(|(entry, _)| entry)
        };
        let Some(this) = entry(i) else { return bad("a directory entry is cut off") };
        let start = usize::from(this.name_offset.get());
        let end = match entry(i + 1) {
            Some(next) if i + 1 < self.count => usize::from(next.name_offset.get()),
            _ => self.bytes.len(),
        };
        if start < self.count * DIRENT || end > self.bytes.len() || start >= end {
            return bad("a name offset of a directory is wrong");
        }
        let mut name = &self.bytes[start..end];
        if i + 1 == self.count {
            // The last name ends with the block, or with the zeros that fill it.
            let len = name.iter().position(|&b| b == 0).unwrap_or(name.len());
            name = &name[..len];
        }
        if name.is_empty() || name.len() > NAME_LEN || name.iter().any(|&b| b == 0 || b == b'/') {
            return bad("a name of a directory is empty, too long, or has bytes that no name has");
        }
        Ok((name, this))
    }
}

impl<S: ReadAt> ReadDir<'_, S> {
    fn advance(&mut self) -> Result<Option<DirEntry>, ReadError> {
        loop {
            while self.next >= self.block.count {
                let blocks = self.dir.size.div_ceil(self.image.superblock().block_size);
                if self.next_block >= blocks {
                    return Ok(None);
                }
                self.image.load(&self.dir, self.next_block, &mut self.block)?;
                self.next_block += 1;
                self.next = 0;
            }
            let (name, entry) = self.block.name(self.next, &self.dir)?;
            self.next += 1;
            if *name <= *self.last {
                let (name, before) = (name.into(), self.last.as_slice().into());
                return Err(ReadError::Order { offset: self.dir.offset, name, before });
            }
            self.last.clear();
            self.last.extend_from_slice(name);
            if name != b"." && name != b".." {
                return Ok(Some(named(&entry, name)));
            }
        }
    }
}

impl<S: ReadAt> Iterator for ReadDir<'_, S> {
    type Item = Result<DirEntry, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.advance().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

/// Makes sure that a walk ends: it enters each directory once, and all of them together are no
/// larger than the image. (Otherwise a loop would never end, `n` nested directories could lead to
/// `2^n` paths, and many inodes could show one big directory.)
pub(super) struct Guard {
    entered: HashSet<u64>,
    bytes_left: u64,
}

impl Guard {
    pub(super) fn new(image_size: u64) -> Guard {
        Guard { entered: HashSet::new(), bytes_left: image_size }
    }

    pub(super) fn enter(&mut self, dir: &Inode) -> Result<(), ReadError> {
        if !self.entered.insert(dir.nid) {
            return Err(ReadError::corrupt(dir.offset, "a directory with two names, or a loop"));
        }
        self.bytes_left = self.bytes_left.checked_sub(dir.size).ok_or(ReadError::corrupt(
            dir.offset,
            "directories are together larger than the image",
        ))?;
        Ok(())
    }
}

/// A walk over an image: [`Image::walk`].
pub struct Walk<'i, S> {
    image: &'i Image<S>,
    guard: Guard,
    /// Per open directory the names that are still to come, last first.
    open: Vec<Vec<DirEntry>>,
    path: Vec<u8>,
    /// Where the path of each open directory ends.
    ends: Vec<usize>,
    /// A directory that was just shown and is to be entered.
    enter: Option<Inode>,
}

/// A name met by a [`Walk`].
#[derive(Debug)]
pub struct Walked<'w> {
    /// Path from where the walk began, with a slash in front; at most [`PATH_MAX`] bytes behind it.
    pub path: &'w [u8],
    /// The inode; a hard-linked one is met once per name.
    pub inode: Inode,
}

impl<S: ReadAt> Walk<'_, S> {
    /// The next name, or `None` at the end.
    ///
    /// # Errors
    /// [`ReadError`]; the walk cannot go on after one.
    pub fn advance(&mut self) -> Result<Option<Walked<'_>>, ReadError> {
        if let Some(dir) = self.enter.take() {
            self.guard.enter(&dir)?;
            let mut names = self.image.readdir(&dir)?.collect::<Result<Vec<_>, _>>()?;
            names.reverse();
            self.open.push(names);
        }
        let entry = loop {
            let Some(names) = self.open.last_mut() else { return Ok(None) };
            if let Some(entry) = names.pop() {
                break entry;
            }
            self.open.pop();
            self.ends.pop();
        };
        self.path.truncate(self.ends.last().copied().unwrap_or(0));
        self.path.push(b'/');
        self.path.extend_from_slice(&entry.name);
        let inode = self.image.inode(entry.nid)?;
        if self.path.len() > PATH_MAX + 1 {
            let source = TreeError::path_too_long(&self.path);
            return Err(ReadError::Tree { offset: inode.offset, source });
        }
        if inode.is_dir() {
            self.enter = Some(inode);
            self.ends.push(self.path.len());
        }
        Ok(Some(Walked { path: &self.path, inode }))
    }
}
