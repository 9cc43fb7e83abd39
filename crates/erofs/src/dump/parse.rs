use std::collections::HashMap;
use std::io::BufRead;

use super::records::{Position, Record, Records, What};
use super::{DumpError, Problem};
use crate::tree::{Content, EntryId, InodeId, Meta, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, Tree};

/// Reads a dump. Takes what mkcomposefs takes, numbers out of range included (they wrap as they
/// do there), and refuses what it refuses; besides, what mkcomposefs would only misread: escaped
/// NULs in text, unreadable digests, hard links to directories.
///
/// Memory is bounded by the tree that results, and 1 MiB for the line at hand.
pub fn parse(input: impl BufRead) -> Result<Tree, DumpError> {
    parse_with(input, false)
}

/// As [`parse`]; `strict` refuses what mkcomposefs refuses with `CFS_PARSE_STRICT` set: a device
/// number on what is no device, a symbolic link with content or a wrong size, a last line without a
/// line end.
pub fn parse_with(input: impl BufRead, strict: bool) -> Result<Tree, DumpError> {
    let mut parser = Parser::default();
    let mut records = Records::new(input);
    records.strict = strict;
    while let Some((record, at)) = records.next_at()? {
        parser.take(record, at).map_err(|problem| at.error(problem))?;
    }
    parser.finish()
}

/// Most bytes of one inode's attributes that mkcomposefs takes from a dump. An image may have twice
/// as many, and [`Records`] takes them all.
pub(super) const XATTRS_MAX: usize = 0x7fff;

#[derive(Default)]
struct Parser {
    tree: Option<Tree>,
    /// The directory of the previous line: nearly always that of the next one too.
    last_dir: Option<(Vec<u8>, InodeId)>,
    hard_links: Vec<HardLink>,
    targets: Vec<u8>,
}

struct HardLink {
    entry: EntryId,
    /// Its target path in `Parser::targets`.
    target: std::ops::Range<usize>,
    at: Position,
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
            let size = 12 + xattrs.iter().map(|(n, v)| 7 + n.len() + v.len()).sum::<usize>();
            if size > XATTRS_MAX {
                return Err(Problem::XattrsTooLong(size));
            }
            tree.set_xattrs(inode, xattrs)?;
        }
        Ok(())
    }

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
        // A hard link may lead to another one: follow the chain to its end, then resolve all
        // of it, so that every link is followed once.
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
                tree.resolve_link(link.entry, end)
                    .map_err(|_| link.at.error(Problem::DirectoryLink))?;
            }
        }
        Ok(tree)
    }
}

enum Found {
    Inode(InodeId),
    /// A hard link that is not resolved yet.
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

#[cfg(test)]
mod tests {
    use super::super::records::LINE_MAX;
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
