//! Contents that are the same page for page, as a whole or in part: segments have these pages once.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{Scratch, content, import, nothing_live};
use crate::real::{Segments, content_of, pack, pack_as};
use cofolio_image::pack::segment::{DEVICE_ALIGN, Form, IndexEntry, Run, Segment};
use cofolio_store::task::Task;
use cofolio_store::{
    Digest, Domain, Error, FileKind, FileName, FsckOptions, GcOptions, ImportOptions, verity,
};
use proptest::prelude::*;

const PAGE: usize = 4096;
const CHUNK: usize = 16 * PAGE;
const RUN: usize = 8 * CHUNK;

fn domain(scratch: &Scratch) -> Domain {
    scratch.store().domain("default").unwrap()
}

/// Packs contents, each as an image, so that each has a segment; gives the segments.
fn packed(domain: &Domain, contents: &[Vec<u8>]) -> Vec<(Digest, Segment)> {
    let put = |(number, content): (usize, &Vec<u8>)| {
        let name = format!("image{number}");
        let pieces = std::slice::from_ref(content);
        let image = import(domain, &name, pieces, None, ImportOptions::default()).unwrap();
        pack(domain, &image, 1, ImportOptions::default()).unwrap();
        let object = verity::digest(content);
        let segments = domain.segments().unwrap().into_iter();
        let mut segments = segments.map(|digest| (digest, Segment::of(domain, &digest).unwrap()));
        segments.find(|(_, it)| it.entries.iter().any(|entry| entry.object == object)).unwrap()
    };
    contents.iter().enumerate().map(put).collect()
}

/// All contents of a segment are what they should be.
fn check(domain: &Domain, digest: &Digest, segment: &Segment) {
    for entry in &segment.entries {
        let content = content_of(domain, digest, segment, entry);
        assert_eq!(verity::digest(&content), entry.object);
    }
}

fn runs(entry: &IndexEntry) -> Vec<(Option<u32>, u32)> {
    let run = |run: Run| (run.at.map(|place| place.segment), run.blocks);
    entry.runs().into_iter().map(run).collect()
}

#[test]
fn what_another_content_has_is_not_there_again() {
    let scratch = Scratch::new("pages");
    let domain = domain(&scratch);
    let first = content(400 * PAGE + 7, 1);
    let (more, less) = (content(CHUNK, 2), content(3 * PAGE, 3));
    let contents = [
        first.clone(),
        // Wherever in the other: one page on.
        [&more[..], &first[PAGE..PAGE + 10 * CHUNK], &less].concat(),
        // To the end of both.
        [&more[..], &content(CHUNK, 4), &first[350 * PAGE..]].concat(),
        // Nothing of its own.
        first[..9 * CHUNK].to_vec(),
        // Not from a multiple of 64 KiB on, and too little.
        [&less[..], &first[..10 * CHUNK]].concat(),
        [&content(CHUNK, 5)[..], &first[..RUN - CHUNK], &less].concat(),
        [&content(CHUNK, 6)[..], &first[..CHUNK - PAGE]].concat(),
        // Zeros are nowhere.
        [&content(CHUNK, 7)[..], &vec![0; 2 * CHUNK + 5]].concat(),
    ];
    let segments = packed(&domain, &contents);
    for (digest, segment) in &segments {
        check(&domain, digest, segment);
    }
    let found: Vec<_> = segments.iter().map(|(_, segment)| runs(&segment.entries[0])).collect();
    assert_eq!(found[0], [(Some(0), 401)]);
    assert_eq!(found[1], [(Some(0), 16), (Some(1), 160), (Some(0), 3)]);
    assert_eq!(found[2], [(Some(0), 32), (Some(1), 51)]);
    assert_eq!(found[3], [(Some(1), 144)]);
    assert_eq!(found[4], [(Some(0), 16), (Some(1), 147)]);
    assert_eq!(found[5], [(Some(0), 131)]);
    assert_eq!(found[6], [(Some(0), 31)]);
    assert_eq!(found[7], [(Some(0), 16), (None, 33)]);
    assert_eq!(segments[3].1.blocks, 1, "EROFS refuses an empty device");
    let report = domain.fsck(&Segments, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert_eq!(report.findings, []);
    // What is in other segments is kept by the pack that names them.
    domain.remove_ref("image0").unwrap();
    let report = domain.gc(&Segments, &nothing_live, &GcOptions::default()).unwrap();
    assert_eq!((report.packs, report.segments), (1, 0));
}

/// Contents made of few different parts: they are what they should be, and nothing is there twice that could have been found.
#[derive(Clone, Debug)]
enum Part {
    Long(u64),
    Pages(u64, usize),
    Zeros(usize),
    Bytes(usize),
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        6 => (0..4_u64).prop_map(Part::Long),
        2 => ((10..14_u64), 1..20_usize).prop_map(|(seed, pages)| Part::Pages(seed, pages)),
        2 => (1..3 * CHUNK).prop_map(Part::Zeros),
        1 => (1..9000_usize).prop_map(Part::Bytes),
    ]
}

fn made(parts: &[Part]) -> Vec<u8> {
    let part = |part: &Part| match part {
        Part::Long(seed) => content(RUN, *seed),
        Part::Pages(seed, pages) => content(PAGE * pages, *seed),
        Part::Zeros(len) => vec![0; *len],
        Part::Bytes(len) => content(*len, 99),
    };
    parts.iter().flat_map(part).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 16,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn contents_are_whole_and_their_pages_unique(
        contents in prop::collection::vec(prop::collection::vec(part(), 1..6), 1..6),
        at_once in 1..4_usize,
        form in prop_oneof![Just(Form::Plain), Just(Form::Dax)],
    ) {
        let scratch = Scratch::new("pages-random");
        let domain = domain(&scratch);
        let mut contents: Vec<_> = contents.iter().map(|parts| made(parts)).collect();
        contents.sort();
        contents.dedup();
        let options = ImportOptions::default();
        let image = import(&domain, "a", &contents, None, options).unwrap();
        let segments = pack_as(form, &domain, &image, at_once, options).unwrap();
        let mut objects = 0;
        for digest in &segments {
            let segment = Segment::of(&domain, digest).unwrap();
            check(&domain, digest, &segment);
            objects += segment.entries.len();
            // Nothing goes on where the one before it ends.
            for pair in segment.entries.iter().flat_map(|entry| entry.runs.windows(2)) {
                let end = pair[0].at.map(|place| (place.segment, place.block + pair[0].blocks));
                prop_assert_ne!(end, pair[1].at.map(|place| (place.segment, place.block)));
            }
        }
        prop_assert_eq!(objects, contents.len());
        match form {
            Form::Dax => prop_assert_eq!(pages_there_twice(&domain, &segments), 0),
            _ => prop_assert_eq!(there_twice(&domain, &segments), 0),
        }
    }
}

/// How many pages of segments for DAX are zeros, or there another time.
fn pages_there_twice(domain: &Domain, segments: &[Digest]) -> usize {
    let mut seen = HashSet::from([vec![0; PAGE]]);
    let mut twice = 0;
    for digest in segments {
        let blocks = Segment::of(domain, digest).unwrap().blocks as usize;
        let bytes = domain.open_segment(digest).unwrap().read_all(1 << 30).unwrap();
        assert_eq!(bytes.len() as u64 % DEVICE_ALIGN, 0);
        let pages = bytes[..blocks * PAGE].chunks(PAGE);
        twice += pages.filter(|page| !seen.insert(page.to_vec())).count();
        // A segment without pages of its own has one block.
        twice -= usize::from(blocks == 1 && bytes[..PAGE] == [0; PAGE]);
    }
    twice
}

/// How many runs were written, from a chunk of a content on, that were there already where their first page was first.
fn there_twice(domain: &Domain, segments: &[Digest]) -> usize {
    let mut first_places = HashMap::new();
    let mut files: Vec<Vec<u8>> = Vec::new();
    let mut twice = 0;
    for (number, digest) in segments.iter().enumerate() {
        let segment = Segment::of(domain, digest).unwrap();
        let mut bytes = domain.open_segment(digest).unwrap().read_all(1 << 30).unwrap();
        bytes.truncate(segment.blocks as usize * PAGE);
        files.push(bytes);
        let bytes = &files[number];
        for entry in &segment.entries {
            let own = entry.block as usize..(entry.block + entry.blocks) as usize;
            for run in entry.runs() {
                let Some(place) = run.at else { continue };
                let (start, blocks) = (place.block as usize, run.blocks as usize);
                if place.segment > 0 || !own.contains(&start) {
                    continue;
                }
                // Runs begin at a multiple of a chunk.
                for block in (start..start + blocks).step_by(16).filter(|at| at + 128 <= own.end) {
                    let here = &bytes[block * PAGE..][..RUN];
                    let there: Option<&(usize, usize)> = first_places.get(&here[..PAGE]);
                    let there = there.filter(|(other, at)| *other < number || at + 128 <= block);
                    let there = there.map(|(other, at)| &files[*other][at * PAGE..]);
                    twice += usize::from(there.is_some_and(|there| there.starts_with(here)));
                }
            }
            for block in own {
                let page = bytes[block * PAGE..][..PAGE].to_vec();
                first_places.entry(page).or_insert((number, block));
            }
        }
    }
    twice
}

/// What is said of pages is believed of none: hashes are short, and a disk can fail.
fn segment_path(domain: &Domain, digest: &Digest) -> PathBuf {
    domain.named_path(&FileName::content(FileKind::Segment, digest)).unwrap()
}

#[test]
fn pages_that_are_not_what_is_said_of_them_are_not_used() {
    let scratch = Scratch::new("pages-altered");
    let domain = domain(&scratch);
    let first = content(400 * PAGE, 1);
    let segments = packed(&domain, std::slice::from_ref(&first));
    let path = segment_path(&domain, &segments[0].0);
    let _ = Command::new("chattr").arg("-i").arg(&path).output();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[first[200 * PAGE] ^ 1], 200 * PAGE as u64).unwrap();
    let next = [&first[..], &[1]].concat();
    let segments = packed(&domain, &[first.clone(), next.clone()]);
    let (digest, segment) = &segments[1];
    assert_eq!(
        runs(&segment.entries[0]),
        [(Some(1), 192), (Some(0), 16), (Some(1), 192), (Some(0), 1)]
    );
    assert_eq!(content_of(&domain, digest, segment, &segment.entries[0]), next);
}

/// A segment that says that it refers to what is not there is damaged, whatever its checksum says.
#[test]
fn runs_that_cannot_be_are_refused() {
    let scratch = Scratch::new("pages-runs");
    let domain = domain(&scratch);
    let first = content(130 * PAGE, 1);
    let second = [&first[..RUN], &content(PAGE, 2)].concat();
    let segments = packed(&domain, &[first, second]);
    let (digest, segment) = &segments[1];
    assert_eq!(runs(&segment.entries[0]), [(Some(1), 128), (Some(0), 1)]);
    let bytes = domain.open_segment(digest).unwrap().read_all(1 << 20).unwrap();
    let path = segment_path(&domain, digest);
    // Behind one block and its hash: one content, one other segment, two runs, the footer.
    let runs = PAGE + 8 + 80 + 32;
    assert_eq!(bytes.len(), runs + 24 + 64);
    let cases: [(usize, u32); 6] = [
        (runs, 2),
        (runs + 8, 127),
        (runs + 8, 0),
        (runs + 8, 129),
        (runs + 16, 1),
        (runs + 20, 2),
    ];
    for (at, value) in cases {
        let mut altered = bytes.clone();
        altered[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let index = <sha2::Sha256 as sha2::Digest>::digest(&altered[PAGE + 8..runs + 24]);
        let footer = altered.len() - 64;
        altered[footer + 24..footer + 56].copy_from_slice(&index);
        let _ = Command::new("chattr").arg("-i").arg(&path).output();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &altered).unwrap();
        let read = Segment::of(&domain, digest);
        assert!(matches!(read, Err(Error::Corrupt { .. })), "{at}: {value}: {read:?}");
    }
}
