//! Random trees, byte for byte against the real mkcomposefs, and through the reader and back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use cofolio_erofs::read::Image;
use cofolio_erofs::write::WriteOptions;
use common::{TempDir, Tool, exactly, golden, image, parse, random, rounds, skip, text};

fn options(seed: u64) -> (WriteOptions, &'static [&'static str]) {
    match seed % 3 {
        0 => (WriteOptions::default(), &[]),
        1 => (exactly(0), &["--min-version=0", "--max-version=0"]),
        _ => (exactly(1), &["--min-version=1"]),
    }
}

/// The seeds of a run: `COFOLIO_SEED` says where they begin.
fn seeds() -> std::ops::Range<u64> {
    let first = rounds("COFOLIO_SEED", 0);
    first..first + rounds("COFOLIO_TREES", 300)
}

#[test]
fn random_trees_are_what_mkcomposefs_makes_of_them() {
    let test = "random_trees_are_what_mkcomposefs_makes_of_them";
    let tool = match Tool::find("COFOLIO_MKCOMPOSEFS", "mkcomposefs") {
        Ok(tool) => tool,
        Err(reason) => return skip(test, &reason),
    };
    let (mut bytes, mut refused) = (0, 0);
    for seed in seeds() {
        let dump = random::dump(seed);
        let (options, args) = options(seed);
        let args = [args, &["--from-file", "-", "-"]].concat();
        let theirs = tool.run(&args, dump.as_bytes());
        let said = String::from_utf8_lossy(&theirs.stderr);
        if said.contains("Numerical result out of range") {
            // When mkcomposefs marks a whiteout or its directory with an attribute that the input
            // has already, with a longer value, its count of the space underflows.
            assert!(dump.contains("overlay."), "seed {seed}: {said}");
            refused += 1;
            continue;
        }
        assert!(theirs.status.success(), "seed {seed}: mkcomposefs: {said}");
        let ours = image(&parse(dump.as_bytes()), &options);
        bytes += ours.len();
        let at = ours.iter().zip(&theirs.stdout).position(|(a, b)| a != b);
        assert!(
            at.is_none() && ours.len() == theirs.stdout.len(),
            "seed {seed}: first difference at byte {at:?}, {} and {} bytes",
            ours.len(),
            theirs.stdout.len()
        );
    }
    let trees = seeds().count();
    println!("{trees} trees, {refused} refused by mkcomposefs, {bytes} bytes of images");
    assert!(refused * 5 < trees, "{refused} of {trees} refused");
}

/// What is read from an image and written again is the image; what is read from its dump is too.
#[test]
fn random_trees_survive_image_and_text() {
    for seed in seeds() {
        let (options, _) = options(seed);
        // A regular file with this attribute is stored exactly as a whiteout is: no reader of
        // composefs images can tell the two apart.
        let dump = random::dump(seed).replace("trusted.overlay.whiteout=", "trusted.overlay.w=");
        let tree = parse(dump.as_bytes());
        let first = image(&tree, &options);
        let opened = Image::open(&first).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let version = opened.superblock().composefs_version.unwrap();
        let read = opened.to_tree().unwrap_or_else(|e| panic!("seed {seed}: {e:?}"));
        let again = image(&read, &exactly(version));
        assert!(first == again, "seed {seed}: the image changed");
        let from_text = image(&parse(&text(&read)), &exactly(version));
        assert!(first == from_text, "seed {seed}: the image changed through its dump");
    }
}

#[test]
fn fsck_erofs_finds_nothing_wrong() {
    let test = "fsck_erofs_finds_nothing_wrong";
    let tool = match Tool::find("COFOLIO_FSCK_EROFS", "fsck.erofs") {
        Ok(tool) => tool,
        Err(reason) => return skip(test, &reason),
    };
    let dir = TempDir::new("fsck");
    let file = dir.path().join("image.erofs");
    let check = |name: &str, dump: &[u8], options: &WriteOptions| {
        std::fs::write(&file, image(&parse(dump), options)).unwrap();
        let said = tool.run(&[file.to_str().unwrap()], b"");
        let text = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
        assert!(said.status.success(), "{name}: {text}");
    };
    for name in ["kinds", "xattrs", "many-shared-xattrs", "whiteouts", "hardlinks", "inline"] {
        let dump = std::fs::read(golden().join(format!("{name}.dump"))).unwrap();
        check(name, &dump, &WriteOptions::default());
    }
    for seed in 0..rounds("COFOLIO_FSCK_TREES", 60) {
        let dump = random::dump(seed);
        check(&format!("seed {seed}"), dump.as_bytes(), &options(seed).0);
    }
}
