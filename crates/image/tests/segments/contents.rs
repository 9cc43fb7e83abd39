//! Segments and packs: what they hold, how long they stay, and how damage to them is told.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{Scratch, content, import, nothing_live};
use crate::real::{self, Segments, content_of};
use cofolio_erofs::write::lz4::Pcluster;
use cofolio_image::pack::PackError;
use cofolio_image::pack::segment::{Form, Pages, Segment, SegmentWriter, Written};
use cofolio_store::task::{Cancel, Task};
use cofolio_store::{
    Digest, Domain, Error, FileKind, FindingKind, FsckOptions, GcOptions, GcReport, ImportOptions,
    Publish, ScrubOptions, TrimOptions, verity,
};
use sha2::Digest as _;

const OPTIONS: ImportOptions =
    ImportOptions { hold_lock: false, buffer_bytes_max: 4096, early_sync_bytes: 1 << 20 };

fn domain(scratch: &Scratch) -> Domain {
    scratch.store().domain("default").unwrap()
}

fn put(domain: &Domain, name: &str, pieces: &[Vec<u8>]) -> Digest {
    import(domain, name, pieces, None, OPTIONS).unwrap()
}

fn gc(domain: &Domain) -> GcReport {
    domain.gc(&Segments, &nothing_live, &GcOptions::default()).unwrap()
}

fn findings(domain: &Domain) -> Vec<(FindingKind, String)> {
    let report = domain.fsck(&Segments, FsckOptions { rehash: true }, &Task::default()).unwrap();
    report.findings.into_iter().map(|finding| (finding.kind, finding.path)).collect()
}

/// Every content of a segment is where it says, filled up with zeros, and hashed.
fn check(domain: &Domain, digest: &Digest) -> Segment {
    let file = domain.open_segment(digest).unwrap();
    let bytes = file.read_all(1 << 30).unwrap();
    assert_eq!(verity::digest(&bytes), *digest);
    let segment = Segment::of(domain, digest).unwrap();
    for entry in &segment.entries {
        let object = domain.open_object(&entry.object).unwrap().read_all(1 << 30).unwrap();
        assert_eq!(entry.size, object.len() as u64);
        assert_eq!(entry.sha256, *sha2::Sha256::digest(&object));
        assert!(content_of(domain, digest, &segment, entry) == object);
    }
    segment
}

/// Sizes around a block and around what is written at once, and holes at every place.
fn pieces() -> Vec<Vec<u8>> {
    let mut pieces: Vec<_> = [1, 4095, 4096, 4097, 70_000, (1 << 20) + 5, 3 << 20]
        .iter()
        .enumerate()
        .map(|(seed, size)| content(*size, seed as u64))
        .collect();
    pieces.push([vec![0; 20_000], content(5000, 20), vec![0; 300_000]].concat());
    pieces.push([content(100, 21), vec![0; 2 << 20], content(3, 22)].concat());
    pieces.push(vec![0; 100_000]);
    pieces
}

#[test]
fn a_segment_holds_what_was_put_in() {
    let scratch = Scratch::new("segment");
    let domain = domain(&scratch);
    let image = put(&domain, "a", &pieces());
    let segments = real::pack(&domain, &image, 4, OPTIONS).unwrap();
    assert_eq!(segments.len(), 3);
    let entries: usize = segments.iter().map(|segment| check(&domain, segment).entries.len()).sum();
    assert_eq!(entries, pieces().len());
    let pack = domain.packs_of(FileKind::Pack, &image).unwrap().remove(0);
    let bytes = domain.open_named(&pack).unwrap().read_all(1 << 20).unwrap();
    assert_eq!(Some(verity::digest(&bytes)), pack.digest());
    assert_eq!(findings(&domain), []);

    // The same again is the same; and what another image has of it is not stored twice.
    assert_eq!(real::pack(&domain, &image, 4, OPTIONS).unwrap().len(), 3);
    let mut more = pieces();
    more.push(content(9999, 30));
    let other = put(&domain, "b", &more);
    assert_eq!(real::pack(&domain, &other, 4, OPTIONS).unwrap().len(), 4);
    assert_eq!(domain.segments().unwrap().len(), 4);
    let du = domain.du(&Segments, &Task::default()).unwrap();
    assert_eq!((du.packs, du.segments), (2, 4));
    assert!(du.segment_bytes > 4 << 20, "{du:?}");
    assert_eq!(du.bytes(), domain.bytes().unwrap());
}

/// Compressing is others' business: here 10,000 bytes of content are one block of their sum, and the rest is as it is.
fn shrink(
    content: &mut dyn Read,
    blocks: &mut dyn Write,
    wrong: impl Fn(&mut Vec<Pcluster>),
) -> io::Result<Vec<Pcluster>> {
    let (mut bytes, mut parts) = (Vec::new(), Vec::new());
    content.read_to_end(&mut bytes)?;
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let compressed = rest.len() >= 10_000;
        let (part, after) = rest.split_at(if compressed { 10_000 } else { rest.len().min(4096) });
        let mut block = vec![0; 4096];
        match compressed {
            true => block[4095] = part.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte)),
            false => block[..part.len()].copy_from_slice(part),
        }
        blocks.write_all(&block)?;
        parts.push(Pcluster { len: u32::try_from(part.len()).unwrap(), compressed });
        rest = after;
    }
    wrong(&mut parts);
    Ok(parts)
}

#[test]
fn a_compressed_segment_says_what_is_in_each_block() {
    let scratch = Scratch::new("segment-lz4");
    let domain = domain(&scratch);
    put(&domain, "a", &pieces());
    let staging = domain.begin_import(OPTIONS).unwrap();
    let pages = Pages::default();
    let cancel = Cancel::default();
    let mut writer = SegmentWriter::new(&staging, Form::Lz4, &pages, &cancel).unwrap();
    let mut expected = Vec::new();
    for piece in pieces() {
        let object = verity::digest(&piece);
        writer
            .add_compressed(&object, piece.len() as u64, |content, blocks| {
                let parts = shrink(content, blocks, |_| ())?;
                expected.push(parts.clone());
                Ok(parts)
            })
            .unwrap();
    }
    let Written { digest, segment: written, .. } = writer.finish().unwrap();
    let segments = vec![digest];
    staging.commit(&Publish { segments, ..Publish::default() }, []).unwrap();
    let segment = Segment::of(&domain, &digest).unwrap();
    assert_eq!(segment, written);
    assert_eq!(segment.form, Form::Lz4);
    assert!(segment.blocks < 700, "{}", segment.blocks);
    for ((entry, parts), piece) in segment.entries.iter().zip(&expected).zip(pieces()) {
        assert_eq!(segment.pclusters_of(entry), parts);
        assert_eq!((entry.object, entry.size), (verity::digest(&piece), piece.len() as u64));
        assert_eq!(entry.sha256, *sha2::Sha256::digest(&piece));
    }
    let bytes = domain.open_segment(&digest).unwrap().read_all(1 << 30).unwrap();
    assert_eq!(verity::digest(&bytes), digest);
    assert!(bytes[segment.entries[1].block as usize * 4096..].starts_with(&pieces()[1]));
    assert_eq!(findings(&domain), []);
    assert_eq!(Segment::blocks_of(&domain, &digest).unwrap(), segment.blocks);

    // What is said of blocks is a part of what is checked.
    change(&segment_path(&scratch, &digest), bytes.len() as u64 - 64 - 3);
    assert!(matches!(Segment::of(&domain, &digest), Err(Error::Corrupt { .. })));
    assert_eq!(findings(&domain)[0].0, FindingKind::SegmentUnreadable);
}

/// Whoever compresses says what is in the blocks, and packs are made of that without a look at them.
#[test]
fn blocks_that_are_not_what_is_said_of_them_are_refused() {
    let scratch = Scratch::new("segment-lz4-wrong");
    let domain = domain(&scratch);
    let piece = content(24_000, 1);
    put(&domain, "a", std::slice::from_ref(&piece));
    let object = verity::digest(&piece);
    let staging = domain.begin_import(OPTIONS).unwrap();
    let add = |wrong: &dyn Fn(&mut Vec<Pcluster>)| {
        let pages = Pages::default();
        let cancel = Cancel::default();
        let mut writer = SegmentWriter::new(&staging, Form::Lz4, &pages, &cancel).unwrap();
        writer.add_compressed(&object, 24_000, |content, blocks| shrink(content, blocks, wrong))
    };
    add(&|_| ()).unwrap();
    let refused = |wrong: &dyn Fn(&mut Vec<Pcluster>)| {
        assert!(matches!(add(wrong), Err(PackError::Store(Error::Io { .. }))));
    };
    refused(&|parts| parts.truncate(1));
    refused(&|parts| parts[0].len -= 1);
    refused(&|parts| parts[0].compressed = false);
    refused(&|parts| parts.push(Pcluster { len: 0, compressed: false }));
    refused(&|parts| *parts = vec![Pcluster { len: 24_000, compressed: true }]);
    let path = domain.object_path(&object).unwrap();
    change(&path, 100);
    assert!(matches!(add(&|_| ()), Err(PackError::Store(Error::Corrupt { .. }))));
}

#[test]
fn a_pack_goes_with_its_image_and_a_segment_with_its_last_pack() {
    let scratch = Scratch::new("segment-gc");
    let domain = domain(&scratch);
    let shared = content(50_000, 1);
    let a = put(&domain, "a", &[shared.clone(), content(20_000, 2)]);
    let b = put(&domain, "b", &[shared, content(30_000, 3)]);
    real::pack(&domain, &a, 9, OPTIONS).unwrap();
    real::pack(&domain, &b, 9, OPTIONS).unwrap();
    assert_eq!(domain.segments().unwrap().len(), 2);
    assert_eq!(gc(&domain).segments, 0);
    domain.remove_ref("a").unwrap();
    let report = gc(&domain);
    assert_eq!((report.packs, report.segments), (1, 0), "b needs both segments");
    assert_eq!(findings(&domain), []);
    let trim = TrimOptions { unused_since: Some(i64::MAX), ..TrimOptions::default() };
    let (plan, report) = domain.trim(&Segments, &nothing_live, &trim, &|_| ()).unwrap();
    assert_eq!((report.packs, report.segments), (1, 2));
    assert_eq!(plan.bytes_after, 0, "{plan:?}");
    assert_eq!(domain.bytes().unwrap(), 0);
}

#[test]
fn a_pack_is_not_published_without_what_it_needs() {
    let scratch = Scratch::new("segment-vanished");
    let domain = domain(&scratch);
    let image = put(&domain, "a", &[content(9000, 1)]);
    let (nowhere, object) = (verity::digest(b"nowhere"), verity::digest(&content(9000, 1)));
    let staging = domain.begin_import(OPTIONS).unwrap();
    staging.pack_writer(FileKind::Pack, &image).unwrap().finish().unwrap();
    let error = staging.commit(&Publish { segments: vec![nowhere], ..Publish::default() }, []);
    assert!(matches!(error, Err(Error::Vanished { first, .. }) if first.contains("segment")));
    let staging = domain.begin_import(OPTIONS).unwrap();
    staging.pack_writer(FileKind::Pack, &nowhere).unwrap().finish().unwrap();
    let error = staging.commit(&Publish::default(), []);
    assert!(matches!(error, Err(Error::Vanished { first, .. }) if first.contains("image")));
    assert_eq!(domain.named(FileKind::Pack).unwrap(), []);

    let staging = domain.begin_import(OPTIONS).unwrap();
    let pages = Pages::default();
    let cancel = Cancel::default();
    let mut writer = SegmentWriter::new(&staging, Form::Plain, &pages, &cancel).unwrap();
    assert!(matches!(writer.add(&nowhere, 5), Err(PackError::Store(Error::NoSuch(_)))));
    assert!(matches!(writer.add(&object, 5), Err(PackError::Store(Error::SizeMismatch { .. }))));
    let path = domain.object_path(&object).unwrap();
    change(&path, 100);
    assert!(matches!(writer.add(&object, 9000), Err(PackError::Store(Error::Corrupt { .. }))));
}

fn segment_path(scratch: &Scratch, digest: &Digest) -> PathBuf {
    scratch.path.join(format!("domains/default/segments/{digest}.segment"))
}

/// Changes a byte of a file that is protected from that.
fn change(path: &PathBuf, offset: u64) {
    unprotect(path);
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    drop(file);
    protect(path);
}

fn unprotect(path: &PathBuf) {
    let _ = Command::new("chattr").arg("-i").arg(path).output();
}

fn protect(path: &PathBuf) {
    let _ = Command::new("chattr").arg("+i").arg(path).output();
}

#[test]
fn damage_is_told_and_taken_away() {
    let scratch = Scratch::new("segment-damage");
    let domain = domain(&scratch);
    let image = put(&domain, "a", &[content(50_000, 1), content(20_000, 2)]);
    let path = |name: String| scratch.path.join("domains/default/segments").join(name);
    let segment = real::pack(&domain, &image, 1, OPTIONS).unwrap()[0];
    let pack_path = |domain: &Domain| {
        domain.named_path(&domain.packs_of(FileKind::Pack, &image).unwrap()[0]).unwrap()
    };
    let segment_path = path(format!("{segment}.segment"));
    let size = fs::metadata(&segment_path).unwrap().len();
    use FindingKind::{PackAltered, PackIncomplete, PackUnreadable};
    use FindingKind::{SegmentAltered, SegmentUnreadable, UnexpectedEntry};
    type Hurt<'a> = (&'a str, Box<dyn Fn() + 'a>, Vec<FindingKind>);
    let cut = |len: u64| {
        unprotect(&segment_path);
        fs::File::options().write(true).open(&segment_path).unwrap().set_len(len).unwrap();
        protect(&segment_path);
    };
    let cases: Vec<Hurt<'_>> = vec![
        ("a block", Box::new(|| change(&segment_path, 5000)), vec![SegmentAltered, PackIncomplete]),
        (
            "the index",
            Box::new(|| change(&segment_path, size - 100)),
            vec![SegmentUnreadable, PackIncomplete],
        ),
        (
            "the footer",
            Box::new(|| change(&segment_path, size - 60)),
            vec![SegmentUnreadable, PackIncomplete],
        ),
        ("the end", Box::new(|| cut(size - 1)), vec![SegmentUnreadable, PackIncomplete]),
        ("nearly all", Box::new(|| cut(10)), vec![SegmentUnreadable, PackIncomplete]),
        (
            "a segment that is gone",
            Box::new(|| {
                unprotect(&segment_path);
                fs::remove_file(&segment_path).unwrap();
            }),
            vec![PackIncomplete],
        ),
        ("a pack", Box::new(|| change(&pack_path(&domain), 3)), vec![PackAltered]),
    ];
    for (what, hurt, expected) in cases {
        real::pack(&domain, &image, 1, OPTIONS).unwrap();
        assert_eq!(findings(&domain), [], "before {what}");
        hurt();
        let kinds: Vec<_> = findings(&domain).into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds, expected, "{what}");
        let report = domain.verify_image(&image, &Segments, &Task::default()).unwrap();
        let verified: Vec<_> = report.findings.iter().map(|finding| finding.kind).collect();
        assert!(expected.iter().all(|kind| verified.contains(kind)), "{what}: {verified:?}");
        let report = domain.scrub(&Segments, &ScrubOptions::default(), &Task::default()).unwrap();
        assert!(!report.findings.is_empty(), "{what}");
        let report =
            domain.fsck(&Segments, FsckOptions { rehash: true }, &Task::default()).unwrap();
        assert!(report.is_damaged());
        assert_eq!(
            domain
                .remove_derived(&report, &Segments, &Task::default())
                .unwrap()
                .into_iter()
                .collect::<Vec<_>>(),
            [image]
        );
        assert_eq!(findings(&domain), [], "after {what}");
    }
    // What cannot be used is collected, and does not keep the rest from being.
    real::pack(&domain, &image, 1, OPTIONS).unwrap();
    let broken = pack_path(&domain);
    unprotect(&broken);
    fs::File::options().write(true).open(&broken).unwrap().set_len(3).unwrap();
    let report = domain.fsck(&Segments, FsckOptions::default(), &Task::default()).unwrap();
    assert!(report.findings.iter().any(|finding| finding.kind == PackUnreadable));
    let report = gc(&domain);
    assert_eq!((report.packs, report.segments), (1, 2));
    fs::write(path("stray".into()), "").unwrap();
    assert_eq!(findings(&domain).into_iter().map(|f| f.0).collect::<Vec<_>>(), [UnexpectedEntry]);
}
