//! Dumps whose images are known: our own (`tests/golden`), and those of composefs where they are.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use std::fs;
use std::io::Read;

use cofolio_erofs::dump;
use cofolio_erofs::read::Image;
use cofolio_erofs::write::WriteOptions;
use common::{exactly, golden, image, oracles, parse, sha256, skip, text};

#[test]
fn own_dumps_give_the_images_that_mkcomposefs_gave() {
    let digests = fs::read_to_string(golden().join("digests")).unwrap();
    let mut checked = 0;
    for line in digests.lines() {
        let [digest, version, name] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let options = match version {
            "auto" => WriteOptions::default(),
            version => exactly(version.parse().unwrap()),
        };
        let tree = parse(&fs::read(golden().join(name)).unwrap());
        assert_eq!(sha256(&image(&tree, &options)), digest, "{name}, version {version}");
        checked += 1;
    }
    assert!(checked >= 30, "only {checked} digests");
}

#[test]
fn own_dumps_survive_image_and_text() {
    for file in fs::read_dir(golden()).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|e| e != "dump") {
            continue;
        }
        let tree = parse(&fs::read(&path).unwrap());
        let first = image(&tree, &WriteOptions::default());
        let read = Image::open(&first).unwrap().to_tree().unwrap();
        assert!(image(&read, &WriteOptions::default()) == first, "{}", path.display());
        let again = parse(&text(&read));
        assert!(image(&again, &WriteOptions::default()) == first, "{}", path.display());
        assert_eq!(text(&again), text(&read), "{}", path.display());
    }
}

/// All oracles of composefs: every dump with a checksum, every one that must be refused.
#[test]
fn composefs_test_dumps() {
    let dir = match oracles() {
        Ok(dir) => dir,
        Err(reason) => return skip("composefs_test_dumps", &reason),
    };
    let (mut good, mut bad) = (0, 0);
    for file in fs::read_dir(&dir).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.ends_with(".dump") && !name.ends_with(".dump.gz") {
            continue;
        }
        let mut dump = fs::read(&path).unwrap();
        if name.ends_with(".gz") {
            let mut plain = Vec::new();
            flate2::read::GzDecoder::new(&dump[..]).read_to_end(&mut plain).unwrap();
            dump = plain;
        }
        if name.starts_with("should-fail") {
            assert!(dump::parse(&dump[..]).is_err(), "{name} was accepted");
            bad += 1;
            continue;
        }
        let expected = fs::read_to_string(dir.join(format!("{name}.sha256"))).unwrap();
        let version = fs::read_to_string(dir.join(format!("{name}.version")));
        let options = match version {
            Ok(version) => exactly(version.trim().parse().unwrap()),
            Err(_) => WriteOptions::default(),
        };
        let bytes = image(&parse(&dump), &options);
        assert_eq!(sha256(&bytes), expected.split_whitespace().next().unwrap(), "{name}");
        let opened = Image::open(&bytes).unwrap();
        let version = opened.superblock().composefs_version.unwrap();
        assert!(image(&opened.to_tree().unwrap(), &exactly(version)) == bytes, "{name}");
        good += 1;
    }
    println!("{good} dumps, {bad} that must be refused");
    assert!(good >= 11 && bad >= 14, "{good} dumps, {bad} that must be refused");
}
