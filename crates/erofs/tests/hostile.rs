//! Bytes that somebody changed: always an answer or an error, in little memory.
//!
//! The story behind: a reader that trusts one length in an image panics, loops or asks for all of
//! the memory, and the image came from the network. A reader that loops hangs these tests. The fuzz
//! targets also bound the time of each input.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use cofolio_erofs::dump;
use cofolio_erofs::read::{Image, ReadError};
use cofolio_erofs::write::WriteOptions;
use common::random::{self, Rng};
use common::{image, parse, rounds};

mod linear {
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/linear.rs"));
}

/// Does with an image all that can be done; returns whether it could be read to the end.
fn exercise(bytes: &[u8]) -> bool {
    let Ok(image) = Image::open(bytes) else { return false };
    let tree = image.to_tree();
    if let Ok(tree) = &tree {
        let mut text = Vec::new();
        dump::write(tree, &mut text).unwrap();
        common::image(tree, &WriteOptions::default());
    }
    let Ok(mut walk) = image.walk() else { return false };
    let mut buffer = vec![0; 10_000];
    let mut inodes = Vec::new();
    let finished = loop {
        match walk.advance() {
            Ok(Some(found)) => {
                assert!(found.path.starts_with(b"/"));
                inodes.push(found.inode);
            }
            Ok(None) => break true,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                break false;
            }
        }
    };
    for inode in inodes.iter().take(2000) {
        let _ = image.xattrs(inode);
        let _ = image.readlink(inode);
        let _ = image.read(inode, 0, &mut buffer);
        let _ = image.read(inode, inode.size.saturating_sub(100), &mut buffer);
        let listed = image.readdir(inode).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        for entry in listed.unwrap_or_default().iter().take(20) {
            assert_eq!(image.lookup(inode, &entry.name).unwrap().as_ref(), Some(entry));
        }
        let (mut offset, mut extents) = (0, 0);
        while let Ok(Some(extent)) = image.extent(inode, offset) {
            assert!(extent.len > 0);
            offset += extent.len;
            extents += 1;
            if extents > 100 {
                break;
            }
        }
    }
    finished && tree.is_ok()
}

fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..1 + rng.below(4) {
        // Most of the meaning is in the first part: the superblock and the first inodes.
        let within = if rng.once_in(2) { bytes.len() } else { bytes.len().min(3000) };
        let start = if rng.once_in(2) { 0 } else { 1024.min(within - 1) };
        let at = start + rng.index(within - start);
        match rng.below(6) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.byte(),
            2 => bytes[at] = 0xff,
            3 => bytes[at] = 0,
            4 => {
                let len = 8.min(bytes.len() - at);
                let value = rng.pick(&[0, u64::MAX, 1 << 31, 1 << 43, 36, 27, 12]).to_le_bytes();
                bytes[at..at + len].copy_from_slice(&value[..len]);
            }
            _ => {
                let from = rng.index(bytes.len());
                let len = (1 + rng.index(64)).min(bytes.len() - at.max(from));
                bytes.copy_within(from..from + len, at);
            }
        }
    }
    if rng.once_in(10) {
        let len = 1 + rng.index(bytes.len());
        bytes.truncate(len);
    }
}

#[test]
fn changed_images_give_an_answer_or_an_error() {
    let images: Vec<Vec<u8>> = (0..40)
        .map(|seed| image(&parse(random::dump(seed).as_bytes()), &WriteOptions::default()))
        .collect();
    assert!(images.iter().all(|bytes| exercise(bytes)));
    let (mut read, mut refused) = (0, 0);
    for seed in 0..rounds("COFOLIO_MUTATIONS", 4000) {
        let mut rng = Rng::new(seed);
        let mut bytes = images[rng.index(images.len())].clone();
        mutate(&mut bytes, &mut rng);
        if exercise(&bytes) {
            read += 1;
        } else {
            refused += 1;
        }
    }
    println!("{read} read, {refused} refused");
    assert!(read > 0 && refused > 0);
}

#[test]
fn changed_dumps_give_a_tree_or_an_error() {
    let (mut read, mut refused) = (0, 0);
    for seed in 0..rounds("COFOLIO_MUTATIONS", 4000) {
        let mut rng = Rng::new(seed);
        let mut text = random::dump(rng.below(40)).into_bytes();
        for _ in 0..1 + rng.below(3) {
            let at = rng.index(text.len());
            match rng.below(4) {
                0 => text[at] = rng.byte(),
                1 => text[at] = rng.pick(b" \\\n/-@=.09x"),
                2 => {
                    text.remove(at);
                }
                _ => {
                    let from = rng.index(text.len());
                    let part = text[from..text.len().min(from + 100)].to_vec();
                    text.splice(at..at, part);
                }
            }
        }
        match dump::parse(&text[..]) {
            Ok(tree) => {
                let bytes = image(&tree, &WriteOptions::default());
                assert!(Image::open(&bytes).unwrap().to_tree().is_ok(), "seed {seed}");
                read += 1;
            }
            Err(_) => refused += 1,
        }
    }
    println!("{read} read, {refused} refused");
    assert!(read > 0 && refused > 0);
}

/// Random bytes behind a valid superblock.
#[test]
fn noise_gives_an_error() {
    let base = image(&parse(b"/ 0 40755 2 0 0 0 0.0 - - -\n"), &WriteOptions::default());
    for seed in 0..rounds("COFOLIO_MUTATIONS", 4000) {
        let mut rng = Rng::new(seed);
        let mut bytes = base.clone();
        let len = 1152 + rng.index(8192);
        bytes.resize(len.max(1152), 0);
        for byte in &mut bytes[1152..] {
            *byte = if rng.once_in(3) { 0 } else { rng.byte() };
        }
        exercise(&bytes);
    }
}

/// Thirty directories, each with two names for the next: a billion paths in four kilobytes.
#[test]
fn a_tree_that_doubles_at_every_level_is_refused() {
    let mut text = String::from("/ 0 40755 2 0 0 0 0.0 - - -\n");
    let mut path = String::new();
    for _ in 0..30 {
        path += "/a";
        text += &format!("{path} 0 40755 2 0 0 0 0.0 - - -\n");
        text +=
            &format!("{} 0 100644 1 0 0 0 0.0 - - -\n", path[..path.len() - 1].to_owned() + "b");
    }
    let mut bytes = image(&parse(text.as_bytes()), &WriteOptions::default());
    let mut pairs = Vec::new();
    {
        let image = Image::open(&bytes).unwrap();
        let mut dir = image.root().unwrap();
        while let Some(a) = image.lookup(&dir, b"a").unwrap() {
            let b = image.lookup(&dir, b"b").unwrap().unwrap();
            pairs.push((b.nid, a.nid));
            dir = image.inode(a.nid).unwrap();
        }
    }
    assert_eq!(pairs.len(), 30);
    // Let every `b` lead to where `a` leads.
    for (b, a) in pairs {
        let needle = b.to_le_bytes();
        let found: Vec<usize> =
            (1152..bytes.len() - 8).filter(|&i| bytes[i..i + 8] == needle).collect();
        for at in found {
            bytes[at..at + 8].copy_from_slice(&a.to_le_bytes());
        }
    }
    // A reader that walked all of it would not come back.
    assert!(!exercise(&bytes));
}

#[test]
fn images_that_lie_are_refused_with_the_offset() {
    let content = "c".repeat(5000);
    let text = format!(
        "/ 0 40755 2 0 0 0 0.0 - - -\n/file 5000 100644 1 0 0 0 0.0 - {content} - user.name=value\n"
    );
    let good = image(&parse(text.as_bytes()), &WriteOptions::default());
    let opened = Image::open(&good).unwrap();
    let file = opened.resolve(b"/file").unwrap().unwrap();
    let (inode, dirent) = (usize::try_from(file.offset).unwrap(), file.nid.to_le_bytes());
    let find =
        |needle: &[u8]| good.windows(needle.len()).position(|window| window == needle).unwrap();
    let value = find(b"namevalue");
    // Where the lie is, what it is, and what is said of it.
    let lies: [(usize, &[u8], &str); 7] = [
        (1024 + 12, &[20], "at byte 1036: the block size"),
        (1024 + 14, &[0xff, 0xff], "an inode number leads beyond the image"),
        (find(&dirent), &[0xff; 8], "an inode number leads beyond the image"),
        (inode, &[0x0b], "the data layout 5"),
        (inode + 16, &[0xff; 4], "data lies beyond the image"),
        (find(b"file"), b"f/le", "bytes that no name has"),
        (value - 2, &[0xff; 2], "an extended attribute is longer than the space for it"),
    ];
    for (at, lie, expected) in lies {
        let mut bytes = good.clone();
        bytes[at..at + lie.len()].copy_from_slice(lie);
        let read = Image::open(&bytes[..]).and_then(|image| image.to_tree());
        let error = read.err().unwrap_or_else(|| panic!("{expected}")).to_string();
        assert!(error.contains(expected) && error.contains("at byte "), "{error}");
    }
}

/// The document of hostile images promised that names out of order are refused, and the reader took
/// them: it listed names that the kernel, which searches a directory by halving, does not find.
#[test]
fn names_out_of_order_are_refused() {
    let text = "/ 0 40755 2 0 0 0 0.0 - - -\n/d 0 40755 2 0 0 0 0.0 - - -\n\
                /d/aaa1 0 100644 1 0 0 0 0.0 - - -\n/d/aaa2 0 100644 1 0 0 0 0.0 - - -\n";
    let bytes = image(&parse(text.as_bytes()), &WriteOptions::default());
    for (second, at_fault) in
        [("aaa0", "\"aaa0\" after \"aaa1\""), ("aaa1", "\"aaa1\" after \"aaa1\"")]
    {
        let mut bytes = bytes.clone();
        let at = bytes.windows(4).position(|window| window == b"aaa2").unwrap();
        bytes[at..at + 4].copy_from_slice(second.as_bytes());
        let image = Image::open(&bytes).unwrap();
        let dir = image.resolve(b"/d").unwrap().unwrap();
        let error = image.to_tree().err().unwrap().to_string();
        let expected = format!("directory at byte {} has the name {at_fault}", dir.offset);
        assert!(error.contains(&expected), "{error}");
        let names = image.readdir(&dir).unwrap();
        assert!(matches!(names.last(), Some(Err(ReadError::Order { .. }))));
    }
}

/// Lines of a dump: directories below one another, all of one name.
fn chain(name: &str, depth: usize) -> String {
    let path = |levels| format!("/{name}").repeat(levels);
    (1..=depth).map(|levels| format!("{} 0 40755 2 0 0 0 0.0 - - -\n", path(levels))).collect()
}

const ROOT: &str = "/ 0 40755 2 0 0 0 0.0 - - -\n";

/// Nothing bounded the depth of directories: an image of a few megabytes could have so many levels
/// that the paths in its dump took gigabytes, in lines that no dump may have.
#[test]
fn paths_longer_than_the_kernel_takes_are_refused() {
    // In a dump and a tree, with the path. The longest is taken, and can be read again.
    let name = "n".repeat(254);
    let fits = format!("{ROOT}{}", chain(&name, 16)) + &format!("/{name}").repeat(16);
    let file = |len: usize| format!("{fits}/{} 0 100644 1 0 0 0 0.0 - - -\n", "f".repeat(len));
    let bytes = image(&parse(file(15).as_bytes()), &WriteOptions::default());
    assert!(exercise(&bytes));
    let shown = |error: &dyn std::error::Error| {
        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        format!("{error}: {cause}")
    };
    let error = shown(&dump::parse(file(16).as_bytes()).err().unwrap());
    assert!(error.contains("a path of 4096 bytes is longer than 4095: \"/nnn"), "{error}");

    // In an image: two chains that fit, of which one is put below the other.
    let a = "/a".repeat(1500);
    let text = format!("{ROOT}{}{a}/xy 0 100644 1 0 0 0 0.0 - - -\n", chain("a", 1500));
    let text = text + &chain("b", 1500);
    let mut bytes = image(&parse(text.as_bytes()), &WriteOptions::default());
    let nid =
        |path: &str| Image::open(&bytes).unwrap().resolve(path.as_bytes()).unwrap().unwrap().nid;
    let (x, b) = (nid(&format!("{a}/xy")).to_le_bytes(), nid("/b").to_le_bytes());
    let mut at = 1152;
    while at + 8 <= bytes.len() {
        let swapped = if bytes[at..at + 8] == x { b } else { x };
        if bytes[at..at + 8] == x || bytes[at..at + 8] == b {
            bytes[at..at + 8].copy_from_slice(&swapped);
            at += 7;
        }
        at += 1;
    }
    let image = Image::open(&bytes).unwrap();
    let long = "a path of 4096 bytes is longer than 4095: \"/a/a/";
    let error = shown(&image.to_tree().err().unwrap());
    assert!(error.contains(long), "{error}");
    let mut walk = image.walk().unwrap();
    let error = loop {
        match walk.advance() {
            Ok(found) => assert!(found.unwrap().path.len() <= 4096),
            Err(error) => break shown(&error),
        }
    };
    assert!(error.contains(long), "{error}");
}

/// A hundred thousand attributes that two files share each: a table that is searched from its
/// start for every file would take minutes.
#[test]
fn many_shared_attributes_take_linear_time() {
    linear::assert_linear(50_000, |count| {
        let mut text = String::from("/ 0 40755 2 0 0 0 0.0 - - -\n");
        for i in 0..count {
            let (a, b, c) = (i, (i + 1) % count, i / 2);
            text +=
                &format!("/{i} 0 100644 1 0 0 0 0.0 - - - user.n{a}=v user.n{b}=v user.v={c}\n");
        }
        let bytes = image(&parse(text.as_bytes()), &WriteOptions::default());
        let tree = Image::open(&bytes).unwrap().to_tree().unwrap();
        assert!(image(&tree, &WriteOptions::default()) == bytes);
    });
}
