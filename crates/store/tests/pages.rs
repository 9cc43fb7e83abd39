//! Contents that are the same page for page, as a whole or in part: segments have these pages once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashMap;
use std::os::unix::fs::FileExt as _;
use std::process::Command;

use cofolio_store::{
    Digest, Domain, Error, Extent, FsckOptions, GcOptions, ImportOptions, Pages, Publish, Run,
    Segment, verity,
};
use common::{Lines, Scratch, content, content_of, import, nothing_live, pack};
use proptest::prelude::*;

const PAGE: usize = 4096;
const CHUNK: usize = 16 * PAGE;

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
        let mut segments = segments.map(|digest| (digest, domain.read_segment(&digest).unwrap()));
        segments.find(|(_, it)| it.extents.iter().any(|extent| extent.object == object)).unwrap()
    };
    contents.iter().enumerate().map(put).collect()
}

/// All contents of a segment are what they should be.
fn check(domain: &Domain, digest: &Digest, segment: &Segment) {
    for extent in &segment.extents {
        let content = content_of(domain, digest, segment, extent);
        assert_eq!(verity::digest(&content), extent.object);
    }
}

fn runs(extent: &Extent) -> Vec<(Option<u32>, u32)> {
    let run = |run: Run| (run.place.map(|place| place.segment), run.blocks);
    extent.runs().into_iter().map(run).collect()
}

#[test]
fn what_another_content_has_is_not_there_again() {
    let scratch = Scratch::new("pages");
    let domain = domain(&scratch);
    let first = content(100 * PAGE + 7, 1);
    let (more, less) = (content(CHUNK, 2), content(3 * PAGE, 3));
    let contents = [
        first.clone(),
        // Wherever in the other: one page on, and from the start.
        [&more[..], &first[PAGE..PAGE + 2 * CHUNK], &less].concat(),
        // To the end of both.
        [&more[..], &content(CHUNK, 4), &first[20 * PAGE..]].concat(),
        // Nothing of its own.
        first[..3 * CHUNK].to_vec(),
        // Not from a multiple of 64 KiB on, and less than 64 KiB.
        [&less[..], &first[..CHUNK]].concat(),
        [&content(CHUNK, 5)[..], &first[..CHUNK - PAGE]].concat(),
        // Zeros are nowhere.
        [&content(CHUNK, 6)[..], &vec![0; 2 * CHUNK + 5]].concat(),
    ];
    let segments = packed(&domain, &contents);
    for (digest, segment) in &segments {
        check(&domain, digest, segment);
    }
    let found: Vec<_> = segments.iter().map(|(_, segment)| runs(&segment.extents[0])).collect();
    assert_eq!(found[0], [(Some(0), 101)]);
    assert_eq!(found[1], [(Some(0), 16), (Some(1), 32), (Some(0), 3)]);
    assert_eq!(found[2], [(Some(1), 16), (Some(0), 16), (Some(2), 81)]);
    assert_eq!(found[3], [(Some(1), 48)]);
    assert_eq!(found[4], [(Some(0), 19)]);
    assert_eq!(found[5], [(Some(0), 31)]);
    assert_eq!(found[6], [(Some(0), 16), (None, 33)]);
    assert_eq!(segments[3].1.blocks, 1, "a device of nothing is none");
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &|_, _| ()).unwrap();
    assert_eq!(report.findings, []);
    // What is in other segments is kept by the pack that names them.
    domain.remove_ref("image0").unwrap();
    let report = domain.gc(&Lines, &nothing_live, &GcOptions::default()).unwrap();
    assert_eq!((report.packs, report.segments), (1, 0));
}

/// Contents made of few different chunks and pages, in one segment: they are what they should be, no chunk of them is there
/// twice that could have been found, and however they are read they are the same.
#[derive(Clone, Debug)]
enum Part {
    Chunk(u64),
    Pages(u64, usize),
    Zeros(usize),
    Bytes(usize),
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        6 => (0..4_u64).prop_map(Part::Chunk),
        2 => ((10..14_u64), 1..20_usize).prop_map(|(seed, pages)| Part::Pages(seed, pages)),
        2 => (1..3 * CHUNK).prop_map(Part::Zeros),
        1 => (1..9000_usize).prop_map(Part::Bytes),
    ]
}

fn made(parts: &[Part]) -> Vec<u8> {
    let part = |part: &Part| match part {
        Part::Chunk(seed) => content(CHUNK, *seed),
        Part::Pages(seed, pages) => content(PAGE * pages, *seed),
        Part::Zeros(len) => vec![0; *len],
        Part::Bytes(len) => content(*len, 99),
    };
    parts.iter().flat_map(part).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn contents_are_whole_and_their_pages_unique(
        contents in prop::collection::vec(prop::collection::vec(part(), 1..6), 1..6),
        at_once in 1..4_usize,
    ) {
        let scratch = Scratch::new("pages-random");
        let domain = domain(&scratch);
        let mut contents: Vec<_> = contents.iter().map(|parts| made(parts)).collect();
        contents.sort();
        contents.dedup();
        let options = ImportOptions::default();
        let image = import(&domain, "a", &contents, None, options).unwrap();
        let segments = pack(&domain, &image, at_once, options).unwrap();
        let mut objects = 0;
        for digest in &segments {
            let segment = domain.read_segment(digest).unwrap();
            check(&domain, digest, &segment);
            objects += segment.extents.len();
            // Nothing goes on where the one before it ends.
            for pair in segment.extents.iter().flat_map(|extent| extent.runs.windows(2)) {
                let end = pair[0].place.map(|place| (place.segment, place.block + pair[0].blocks));
                prop_assert_ne!(end, pair[1].place.map(|place| (place.segment, place.block)));
            }
        }
        prop_assert_eq!(objects, contents.len());
        prop_assert_eq!(chunks_there_twice(&domain, &segments), 0);
    }
}

/// How many chunks were written that are elsewhere before, where their first page is for the first time.
fn chunks_there_twice(domain: &Domain, segments: &[Digest]) -> usize {
    let (mut chunks, mut pages) = (HashMap::new(), HashMap::new());
    let mut twice = 0;
    for digest in segments {
        let segment = domain.read_segment(digest).unwrap();
        for extent in &segment.extents {
            let mut block = 0_u32;
            for run in extent.runs() {
                let Some(place) = run.place else { continue };
                let file = domain.open_segment(&segment.holder(digest, place)).unwrap();
                let mut bytes = vec![0; run.blocks as usize * PAGE];
                file.read_exact_at(&mut bytes, u64::from(place.block) * PAGE as u64).unwrap();
                let at = |page: usize| (segment.holder(digest, place), place.block as usize + page);
                for (number, page) in bytes.chunks(PAGE).enumerate() {
                    pages.entry(page.to_vec()).or_insert(at(number));
                }
                // Runs begin at a multiple of a chunk.
                for (number, chunk) in bytes.chunks_exact(CHUNK).enumerate() {
                    let here = at(number * 16);
                    let first = *chunks.entry(chunk.to_vec()).or_insert(here);
                    let findable = pages[&chunk[..PAGE]] == first;
                    let is_new = place.segment == 0 && place.block >= extent.block;
                    twice += usize::from(is_new && first != here && findable);
                }
                block += run.blocks;
            }
            assert!(u64::from(block) <= extent.size.div_ceil(PAGE as u64));
        }
    }
    twice
}

/// What is said of pages is believed of none: hashes are short, and a disk can fail.
#[test]
fn pages_that_are_not_what_is_said_of_them_are_not_used() {
    let scratch = Scratch::new("pages-altered");
    let domain = domain(&scratch);
    let first = content(50 * PAGE, 1);
    let segments = packed(&domain, std::slice::from_ref(&first));
    let path = domain.segment_path(&segments[0].0).unwrap();
    let _ = Command::new("chattr").arg("-i").arg(&path).output();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[first[20 * PAGE] ^ 1], 20 * PAGE as u64).unwrap();
    let next = [&first[..], &[1]].concat();
    let segments = packed(&domain, &[first.clone(), next.clone()]);
    let (digest, segment) = &segments[1];
    assert_eq!(
        runs(&segment.extents[0]),
        [(Some(1), 16), (Some(0), 16), (Some(1), 16), (Some(0), 3)]
    );
    assert_eq!(content_of(&domain, digest, segment, &segment.extents[0]), next);
}

/// A segment that says that it refers to what is not there is damaged, whatever its checksum says.
#[test]
fn runs_that_cannot_be_are_refused() {
    let scratch = Scratch::new("pages-runs");
    let domain = domain(&scratch);
    let first = content(20 * PAGE, 1);
    let second = [&first[..CHUNK], &content(PAGE, 2)].concat();
    let segments = packed(&domain, &[first, second]);
    let (digest, segment) = &segments[1];
    assert_eq!(runs(&segment.extents[0]), [(Some(1), 16), (Some(0), 1)]);
    let bytes = domain.open_segment(digest).unwrap().read_all(1 << 20).unwrap();
    let path = domain.segment_path(digest).unwrap();
    // Behind one block and its hash: one content, one other segment, two runs, the footer.
    let runs = PAGE + 8 + 80 + 32;
    assert_eq!(bytes.len(), runs + 24 + 64);
    let cases: [(usize, u32); 6] =
        [(runs, 2), (runs + 8, 15), (runs + 8, 0), (runs + 8, 17), (runs + 16, 1), (runs + 20, 2)];
    for (at, value) in cases {
        let mut altered = bytes.clone();
        altered[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let index = <sha2::Sha256 as sha2::Digest>::digest(&altered[PAGE + 8..runs + 24]);
        let footer = altered.len() - 64;
        altered[footer + 24..footer + 56].copy_from_slice(&index);
        let _ = Command::new("chattr").arg("-i").arg(&path).output();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &altered).unwrap();
        let read = domain.read_segment(digest);
        assert!(matches!(read, Err(Error::Corrupt { .. })), "{at}: {value}: {read:?}");
    }
}

/// Segments that were written before they said what their pages are.
#[test]
fn segments_of_the_first_version_are_read_and_nothing_in_them_is_looked_for() {
    let scratch = Scratch::new("pages-first");
    let domain = domain(&scratch);
    let first = content(20 * PAGE + 9, 1);
    let segments = packed(&domain, std::slice::from_ref(&first));
    let bytes = domain.open_segment(&segments[0].0).unwrap().read_all(1 << 20).unwrap();
    let mut old = bytes[..21 * PAGE].to_vec();
    let mut index = bytes[21 * PAGE + 21 * 8..][..80].to_vec();
    index[76..80].fill(0);
    old.extend(&index);
    old.extend(b"cofolseg");
    [1_u32, 1, 21, 0].iter().for_each(|number| old.extend(number.to_le_bytes()));
    old.extend(<sha2::Sha256 as sha2::Digest>::digest(&index));
    old.extend([0; 8]);
    let digest = verity::digest(&old);
    std::fs::write(domain.segment_path(&digest).unwrap(), &old).unwrap();
    let segment = domain.read_segment(&digest).unwrap();
    assert_eq!(segment.extents, segments[0].1.extents);
    check(&domain, &digest, &segment);
    let mut pages = Pages::default();
    pages.add(&domain, &digest).unwrap();
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let mut writer = staging.segment_writer(&pages).unwrap();
    writer.add(&verity::digest(&first), first.len() as u64).unwrap();
    let written = writer.finish().unwrap();
    assert_eq!(runs(&written.segment.extents[0]), [(Some(0), 21)]);
    staging.commit(&Publish::default(), []).unwrap();
}
