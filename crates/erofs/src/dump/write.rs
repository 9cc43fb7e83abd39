use std::io::{self, Write};

use crate::tree::{Content, EntryId, InodeId, Payload, Tree, object_path};
use crate::write::dir_size;

/// Text is handed to the sink in pieces of about this many bytes.
const PIECE: usize = 64 * 1024;

/// Writes a tree as dump text, depth first, names sorted: the lines that `composefs-info dump`
/// prints for the image of this tree, attributes sorted by name.
///
/// mkcomposefs makes of this text the image that [`crate::write::write`] makes of the tree.
pub fn write(tree: &Tree, mut sink: impl Write) -> io::Result<()> {
    let primary = tree.primary_names();
    let mut out = Vec::with_capacity(2 * PIECE);
    line(&mut out, tree, tree.root(), b"/", None);
    let mut path = Vec::new();
    // Where the path of the directory at each depth ends.
    let mut ends = vec![0];
    for visit in tree.walk() {
        path.truncate(ends[visit.depth - 1]);
        path.push(b'/');
        path.extend_from_slice(visit.name);
        ends.truncate(visit.depth);
        ends.push(path.len());
        let target: Option<EntryId> =
            primary.get(&visit.inode).copied().filter(|&entry| entry != visit.entry);
        line(&mut out, tree, visit.inode, &path, target.map(|entry| tree.path(entry)));
        if out.len() >= PIECE {
            sink.write_all(&out)?;
            out.clear();
        }
    }
    sink.write_all(&out)?;
    sink.flush()
}

/// Appends the line of one name; `link` is the path that a hard link leads to.
fn line(out: &mut Vec<u8>, tree: &Tree, inode: InodeId, path: &[u8], link: Option<Vec<u8>>) {
    let meta = tree.meta(inode);
    let content = tree.content(inode);
    // A special file has no size, except for what chooses its form (see `parse`).
    let odd = u64::from(tree.has_odd_size(inode)) << 32;
    let (size, rdev) = match content {
        Content::Directory => (dir_size(tree, inode), 0),
        Content::Symlink(bytes) | Content::Inline(bytes) => (bytes.len() as u64, 0),
        Content::External { size, .. } => (size, 0),
        Content::CharDevice(rdev) | Content::BlockDevice(rdev) => (odd, rdev),
        Content::Fifo | Content::Socket => (odd, 0),
    };
    escape(out, path, b"");
    let at = if link.is_some() { "@" } else { "" };
    // Writing into a Vec does not fail.
    let _ = write!(
        out,
        " {size} {at}{:o} {} {} {} {rdev} {}.{} ",
        meta.mode,
        tree.nlink(inode),
        meta.uid,
        meta.gid,
        meta.mtime,
        meta.mtime_nsec
    );
    let object;
    let payload = match (&link, content) {
        (Some(path), _) => Some(path.as_slice()),
        (None, Content::Symlink(target)) => Some(target),
        (None, Content::External { payload: Payload::Path(path), .. }) => Some(path),
        (None, Content::External { payload: Payload::Object(digest), .. }) => {
            object = object_path(digest);
            Some(&object[..])
        }
        _ => None,
    };
    optional(out, payload);
    out.push(b' ');
    optional(out, if let Content::Inline(bytes @ [_, ..]) = content { Some(bytes) } else { None });
    out.push(b' ');
    match content {
        Content::External { digest: Some(digest), .. } => {
            let path = object_path(digest);
            out.extend_from_slice(&path[..2]);
            out.extend_from_slice(&path[3..]);
        }
        _ => out.push(b'-'),
    }
    for (name, value) in tree.xattrs(inode) {
        out.push(b' ');
        escape(out, name, b"=");
        out.push(b'=');
        escape(out, value, b"=");
    }
    out.push(b'\n');
}

fn optional(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    match bytes {
        None => out.push(b'-'),
        Some(b"-") => out.extend_from_slice(b"\\x2d"),
        Some(bytes) => escape(out, bytes, b""),
    }
}

/// Appends bytes with everything escaped that is not a visible ASCII character, and `also`.
fn escape(out: &mut Vec<u8>, bytes: &[u8], also: &[u8]) {
    for &byte in bytes {
        match byte {
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            0x21..=0x7e if !also.contains(&byte) => out.push(byte),
            _ => {
                let mut escape = *b"\\x00";
                // Does not fail: the byte has two digits.
                let _ = const_hex::encode_to_slice([byte], &mut escape[2..]);
                out.extend_from_slice(&escape);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::parse;

    #[test]
    fn what_is_written_reads_back_as_it_was() {
        let text = concat!(
            "/ 27 40755 3 0 0 0 -5.7 - - - user.a\\x3db=1\\x00\\x3d\n",
            "/- 1 100644 1 0 0 0 0.0 - \\x2d -\n",
            "/d\\x20\\\\\\n\\xff 57 41777 2 1 4294967295 0 1.2 - - -\n",
            "/d\\x20\\\\\\n\\xff/early 2 @100644 9 0 0 0 0.0 /d\\x20\\\\\\n\\xff/f ab - \n",
            "/d\\x20\\\\\\n\\xff/f 2 100644 9 0 0 0 0.0 - ab -\n",
            "/dev 0 20600 1 0 0 259 0.0 - - -\n",
            "/l 1 120777 1 0 0 0 0.0 \\x2d - -\n",
            "/p 9 100644 1 0 0 0 0.0 p/q - -\n",
        );
        let tree = parse(text.as_bytes()).unwrap();
        let mut first = Vec::new();
        write(&tree, &mut first).unwrap();
        let first_text = String::from_utf8(first.clone()).unwrap();
        let expected_link =
            "/d\\x20\\\\\\n\\xff/early 2 @100644 9 0 0 0 0.0 /d\\x20\\\\\\n\\xff/f ab -\n";
        assert!(first_text.contains(expected_link), "{first_text}");
        for (got, want) in first_text.lines().zip(text.lines()).skip(1) {
            assert_eq!(got, want.trim_end().replace("/f ab - ", "/f ab -"));
        }
        let mut second = Vec::new();
        write(&parse(&first[..]).unwrap(), &mut second).unwrap();
        assert_eq!(first, second);
    }
}
