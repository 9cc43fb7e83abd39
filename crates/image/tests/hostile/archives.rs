//! Archives that want out of the image, or are merely broken.

use crate::support::*;
use crate::{bad_blob, bad_tar};

#[test]
fn names_that_are_no_names() {
    bad_tar(Tar::new().file("../escape", b"x"), &["`..`", "../escape", "offset 2560"]);
    bad_tar(Tar::new().file("a/../../escape", b"x"), &["`..`"]);
    bad_tar(Tar::new().file("/..", b"x"), &["`..`"]);
    bad_tar(Tar::new().pax(&[("path", b"nul\0name")]).file("x", b"x"), &["NUL"]);
    bad_tar(Tar::new().extended(b'L', b"nul\0name\0").file("x", b"x"), &["NUL"]);
    let long = "n".repeat(256);
    bad_tar(Tar::new().pax(&[("path", long.as_bytes())]).file("x", b"x"), &["256 bytes"]);
    let deep = "d/".repeat(3000);
    bad_tar(Tar::new().pax(&[("path", deep.as_bytes())]).file("x", b"x"), &["6000 bytes"]);
    bad_tar(Tar::new().file("", b"x"), &["root must be a directory"]);
    bad_tar(Tar::new().file(".wh.", b""), &["whiteout of no name"]);
    bad_tar(Tar::new().file(".wh...", b""), &["whiteout of no name"]);
    bad_tar(Tar::new().file(".wh.x/y", b""), &["whiteout"]);
}

/// Only the path of an entry was looked at: through a symbolic link a directory got the name of a
/// whiteout, what lay in it was lost without a word, and the layer counted as damaged ever after.
/// Through a link in a lower layer an entry reached what a merge keeps for itself.
#[test]
fn no_link_leads_to_a_whiteout() {
    bad_tar(Tar::new().symlink("a", ".wh.b").file("a/f", b"x"), &["a/f", ".wh.b", "whiteout"]);
    bad_tar(Tar::new().symlink("a", "/d/.wh..wh.x/y").file("a/f", b"x"), &["whiteout"]);
    bad_tar(Tar::new().file(".wh.b", b"").link("l", ".wh.b"), &["l", "the whiteout"]);
    let lower = Tar::new().file("t", b"t").symlink("s", ".wh..wh..held");
    let upper = Tar::new().link("l", "t").file("s/0", b"x");
    let layers = [Blob::gzip(&lower.end()), Blob::gzip(&upper.end())];
    let error = Bench::new().layers("held", &layers).err().unwrap().to_string();
    assert!(error.contains("whiteout"), "{error}");
}

#[test]
fn links_to_nowhere() {
    bad_tar(Tar::new().link("l", "missing"), &["hard link", "missing", "does not exist"]);
    bad_tar(Tar::new().link("l", "../before"), &["hard link", "`..`"]);
    bad_tar(Tar::new().dir("d").link("l", "d"), &["hard link to the directory"]);
    bad_tar(Tar::new().link("l", "dir"), &["hard link to the directory"]);
    bad_tar(Tar::new().link("l", "./"), &["hard link to the root"]);
    bad_tar(Tar::new().link("l", "before/x"), &["not a directory"]);
    bad_tar(Tar::new().file("d/t", b"x").link("d", "d/t"), &["hard link"]);
    bad_tar(Tar::new().symlink("s", ""), &["target of 0 bytes"]);
    bad_tar(Tar::new().pax(&[("linkpath", b"a\0b")]).symlink("s", "x"), &["NUL"]);
    let long = "t".repeat(4096);
    bad_tar(Tar::new().pax(&[("linkpath", long.as_bytes())]).symlink("s", "x"), &["4096 bytes"]);
    bad_tar(
        Tar::new().symlink("a", "b").symlink("b", "a").file("a/x", b"x"),
        &["too many symbolic links"],
    );
    bad_tar(Tar::new().file("before/x", b"x"), &["not a directory", "before/x"]);
    // The file is in the layer below.
    bad_tar(Tar::new().file("f/x", b"x"), &["not a directory", "/f"]);
}

#[test]
fn fields_out_of_range() {
    let head = |f: &dyn Fn(&mut Head<'_>)| {
        let mut head = Head { gnu: true, ..Head::new(b'0', b"x") };
        f(&mut head);
        Tar::new().head(&head)
    };
    bad_tar(head(&|h| h.uid = 1 << 32), &["uid 4294967296"]);
    bad_tar(head(&|h| h.gid = u64::from(u32::MAX)), &["gid 4294967295"]);
    bad_tar(head(&|h| h.uid = 1 << 62), &["uid"]);
    bad_tar(head(&|h| h.size = i64::MAX as u64), &["size", "exceeds the limit"]);
    bad_tar(head(&|h| h.size = 1 << 50), &["ends in the middle"]);
    bad_tar(head(&|h| (h.flag, h.device) = (b'3', (1 << 12, 0))), &["device 4096:0"]);
    bad_tar(head(&|h| h.flag = b'V'), &["entry type", "'V'"]);
    bad_tar(head(&|h| h.flag = b'M'), &["entry type"]);
    bad_tar(Tar::new().pax(&[("size", b"-1")]).file("x", b""), &["PAX size"]);
    bad_tar(Tar::new().pax(&[("size", b"99999999999999999999")]).file("x", b""), &["PAX size"]);
    bad_tar(Tar::new().pax(&[("mtime", b"yesterday")]).file("x", b""), &["PAX mtime"]);
    bad_tar(Tar::new().pax(&[("SCHILY.acl.access", b"user:joe:rwx")]).file("x", b""), &["ACL"]);
    bad_tar(
        Tar::new().pax(&[(&format!("SCHILY.xattr.user.{}", "n".repeat(300)), b"v")]).file("x", b""),
        &["attribute name"],
    );
    bad_tar(
        Tar::new().pax(&[("SCHILY.xattr.user.big", &[b'v'; 70_000])]).file("x", b""),
        &["attributes"],
    );
    bad_tar(Tar::new().extended(b'x', b"12 path=abcd\n"), &["PAX record"]);
    bad_tar(Tar::new().extended(b'g', b"11 uid=123\n").file("x", b""), &["global header"]);
    let mut broken = Head::new(b'0', b"x").block();
    broken[0] ^= 1;
    bad_tar(Tar::new().raw(&broken), &["checksum"]);
    let mut letters = Head::new(b'0', b"x").block();
    letters[124..130].copy_from_slice(b"12x456");
    seal(&mut letters);
    bad_tar(Tar::new().raw(&letters), &["not a number"]);
}

/// What an archive claims must not be believed before it is there.
#[test]
fn headers_without_end() {
    let huge = Head { size: 1 << 33, ..Head::new(b'L', b"././@LongLink") };
    bad_tar(Tar::new().head(&huge), &["extended headers"]);
    let huge = Head { size: 1 << 40, gnu: true, ..Head::new(b'x', b"pax") };
    bad_tar(Tar::new().head(&huge), &["extended headers"]);
    let mut many = Tar::new();
    for _ in 0..3000 {
        many = many.pax(&[("comment", &[b'c'; 300])]);
    }
    bad_tar(many.file("x", b""), &["extended headers"]);
    bad_tar(Tar::new().pax(&[("path", b"x")]), &["extended header"]);
    // 3,000 small attributes fit the header, but no inode.
    let records: Vec<(String, Vec<u8>)> =
        (0..3000).map(|at| (format!("SCHILY.xattr.user.{at:0100}"), vec![b'v'; 20])).collect();
    let records: Vec<(&str, &[u8])> =
        records.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
    bad_tar(Tar::new().pax(&records).file("x", b""), &["attributes"]);
}

#[test]
fn sparse_maps_that_lie() {
    let pax = |map: &[u8], size: &[u8], data: &[u8]| {
        Tar::new()
            .pax(&[("GNU.sparse.size", size), ("GNU.sparse.map", map)])
            .file("GNUSparseFile/x", data)
    };
    bad_tar(pax(b"0,5,3,5", b"100", &[1; 10]), &["sparse map", "overlaps"]);
    bad_tar(pax(b"0,5,200,5", b"100", &[1; 10]), &["sparse map", "outside"]);
    bad_tar(pax(b"0,5", b"100", &[1; 10]), &["sparse map", "10 bytes of data"]);
    bad_tar(pax(b"0,18446744073709551615", b"100", &[1; 10]), &["sparse map"]);
    bad_tar(pax(b"18446744073709551615,2", b"100", &[1; 2]), &["sparse map"]);
    bad_tar(pax(b"0,5,x,5", b"100", &[1; 10]), &["GNU.sparse.map"]);
    bad_tar(pax(b"0,10", b"18446744073709551615", &[1; 10]), &["exceed"]);
    let v1 = |data: &[u8]| {
        Tar::new()
            .pax(&[
                ("GNU.sparse.major", b"1"),
                ("GNU.sparse.minor", b"0"),
                ("GNU.sparse.realsize", b"1000"),
            ])
            .file("x", data)
    };
    bad_tar(v1(&[&b"999999999\n"[..], &[0; 502]].concat()), &["segments"]);
    bad_tar(v1(&[b'1'; 600]), &["sparse map"]);
    bad_tar(v1(&[&b"1\n0\n"[..], &[b'\n'; 508]].concat()), &["sparse map"]);
    bad_tar(v1(b""), &["sparse map"]);
    bad_tar(
        Tar::new().pax(&[("GNU.sparse.major", b"2"), ("GNU.sparse.minor", b"0")]).file("x", b""),
        &["sparse format"],
    );
}

#[test]
fn archives_that_break_off() {
    let tar = Tar::new().file("one", &[1; 5000]).file("two", &[2; 3_000_000]).end();
    for length in [600, 5000, 6000, 1_000_000] {
        bad_blob(&Blob::gzip(&tar[..length]), &["the archive ends in the middle"]);
    }
    bad_blob(
        &Blob::gzip(b"this is no tar archive, but long enough for a header".repeat(20).as_slice()),
        &["checksum"],
    );
}

#[test]
fn compressed_streams_that_break_off_or_lie() {
    let mut random = Random(3);
    let content: Vec<u8> = (0..2_000_000).map(|_| random.next() as u8).collect();
    let tar = Tar::new().file("random", &content).end();
    let diff_id = sha256(&tar);
    for (media_type, good) in [(GZIP, gzip(&tar)), (ZSTD, zstd(&tar))] {
        let blob = |bytes: Vec<u8>| Blob {
            bytes,
            media_type: media_type.into(),
            diff_id: diff_id.clone(),
        };
        bad_blob(&blob(good[..good.len() / 2].to_vec()), &["offset", "cut off"]);
        bad_blob(&blob(good[..good.len() - 3].to_vec()), &["offset"]);
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 0x10;
        // Whichever notices first: the format, its checksum, or the diff-id.
        bad_blob(&blob(flipped), &[]);
        bad_blob(&blob([&good[..], b"garbage"].concat()), &["offset"]);
    }
    // A window of 2 GiB: one frame must not take that much memory.
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x01, 0x00, 0x00];
    let blob = Blob { bytes: frame.to_vec(), media_type: ZSTD.into(), diff_id };
    bad_blob(&blob, &["cannot be unpacked"]);
}

/// Random damage to a real archive: an error or an image, never a panic, a hang, or a changed store
/// after an error.
#[test]
fn random_damage() {
    let mut random = Random(11);
    let good = Tar::new()
        .dir("d")
        .file("d/one", &[1; 3000])
        .pax(&[("mtime", b"1.5"), ("SCHILY.xattr.user.a", b"b")])
        .file("two", b"2")
        .extended(b'L', b"a/long/name\0")
        .file("x", b"3")
        .link("l", "two")
        .symlink("s", "d")
        .file("s/y", b"y")
        .pax(&[("GNU.sparse.size", b"100"), ("GNU.sparse.map", b"5,3")])
        .file("sparse", b"abc")
        .file("d/.wh.gone", b"")
        .end();
    let bench = Bench::fast();
    let mut failed = 0;
    for round in 0..400u64 {
        let mut tar = good.clone();
        for _ in 0..1 + random.below(3) {
            let at = usize::try_from(random.below(tar.len() as u64)).unwrap();
            tar[at] = random.next() as u8;
            // Most damage would stop at the checksum: give the header a right one.
            let block = at / 512 * 512;
            if random.below(2) == 0 && tar[block + 257..block + 262] == *b"ustar" {
                let header: &mut [u8; 512] = (&mut tar[block..block + 512]).try_into().unwrap();
                seal(header);
            }
        }
        let before = bench.listing();
        if let Err(error) = bench.layers(&format!("r{round}"), &[Blob::plain(tar)]) {
            failed += 1;
            assert!(!error.to_string().is_empty());
            assert_eq!(bench.listing(), before, "round {round}: {error}");
        }
    }
    assert!((50..400).contains(&failed), "{failed} of 400 failed");
}
