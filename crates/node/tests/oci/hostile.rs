//! Images that want to do harm, or are merely broken. Each must be refused with an error that names what
//! is wrong and where, and leave the store exactly as it was.

use std::fs;

use cofolio_node::oci::{ImportError, ImportOptions, Limits, Silent, import};
use serde_json::json;

use crate::support::*;

/// Imports, expects an error with all of `words` in it, and an untouched store.
fn refused(bench: &Bench, layout: &Layout, limits: Limits, words: &[&str]) -> ImportError {
    let before = bench.listing();
    let options = ImportOptions { limits, ..ImportOptions::default() };
    let error = match import(&bench.domain, &layout.source(), &options, &Silent) {
        Ok(report) => panic!("accepted, expected {words:?}: {report:?}"),
        Err(error) => error,
    };
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    assert_eq!(bench.listing(), before, "{text}: the store changed");
    error
}

/// A good layer below, the bad one on top: there is something that must be taken back.
fn bad_blob(blob: &Blob, words: &[&str]) {
    let bench = Bench::fast();
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let good = Blob::gzip(&Tar::new().file("good", &content).dir("dir").file("f", b"x").end());
    let layout = Layout::image(bench.path("bad"), &[good, blob.clone()]);
    let digest = sha256(&blob.bytes);
    let words: Vec<&str> = words.iter().copied().chain([digest.as_str()]).collect();
    let error = refused(&bench, &layout, Limits::default(), &words);
    assert!(error.is_corrupt(), "{error:?}");
}

fn bad_tar(tar: Tar, words: &[&str]) {
    // Something before it, so that offsets are not 0 and objects are under way.
    let mut all = Tar::new().file("before", &[b'b'; 2000]).0;
    all.extend_from_slice(&tar.0);
    bad_blob(&Blob::gzip(&Tar(all).end()), words);
}

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
    bad_tar(head(&|h| h.size = i64::MAX as u64), &["size", "absurd"]);
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
    bad_tar(pax(b"0,10", b"18446744073709551615", &[1; 10]), &["absurd"]);
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

#[test]
fn content_that_is_not_what_its_digest_says() {
    let bench = Bench::new();
    let tar = Tar::new().file("a", &[1; 100_000]).end();
    let fresh = |name: &str| Layout::image(bench.path(name), &[Blob::gzip(&tar)]);
    let file = |layout: &Layout, digest: &str| layout.0.join("blobs/sha256").join(&digest[7..]);
    let layer = sha256(&gzip(&tar));

    // Altered, same size: the last byte is in gzip's own trailer.
    let layout = fresh("altered");
    let mut bytes = gzip(&tar);
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file(&layout, &layer), &bytes).unwrap();
    refused(&bench, &layout, Limits::default(), &["has the digest", &layer, &sha256(&bytes)]);

    let layout = fresh("short");
    fs::write(file(&layout, &layer), &bytes[..bytes.len() - 1]).unwrap();
    refused(&bench, &layout, Limits::default(), &[&layer, "descriptor says"]);

    let layout = fresh("gone");
    fs::remove_file(file(&layout, &layer)).unwrap();
    refused(&bench, &layout, Limits::default(), &[&layer, "missing"]);

    let wrong = Blob { diff_id: sha256(b"other"), ..Blob::gzip(&tar) };
    let layout = Layout::image(bench.path("diff-id"), &[wrong]);
    refused(&bench, &layout, Limits::default(), &[&layer, &sha256(&tar), &sha256(b"other")]);

    // Manifest and config, altered in place.
    let layout = fresh("documents");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.0.join("index.json")).unwrap()).unwrap();
    let manifest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    let path = file(&layout, &manifest);
    let good = fs::read(&path).unwrap();
    let document: serde_json::Value = serde_json::from_slice(&good).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() = b' ';
    fs::write(&path, &bad).unwrap();
    refused(&bench, &layout, Limits::default(), &[&manifest, "has the digest"]);
    fs::write(&path, &good).unwrap();
    let config = document["config"]["digest"].as_str().unwrap();
    let path = file(&layout, config);
    let mut bad = fs::read(&path).unwrap();
    *bad.last_mut().unwrap() = b' ';
    fs::write(&path, &bad).unwrap();
    refused(&bench, &layout, Limits::default(), &[config, "has the digest"]);
}

#[test]
fn media_types_are_refused_by_name() {
    let bench = Bench::new();
    let tar = Tar::new().file("a", b"a").end();
    for (at, (media_type, word)) in [
        ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "encrypted"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "foreign"),
        ("application/vnd.oci.image.layer.v1.tar+xz", "unknown kind of layer"),
        ("application/vnd.cncf.helm.chart.content.v1.tar+gzip", "unknown kind of layer"),
        ("", "unknown kind of layer"),
    ]
    .into_iter()
    .enumerate()
    {
        let blob = Blob { media_type: media_type.into(), ..Blob::gzip(&tar) };
        let layout = Layout::image(bench.path(&format!("layer-{at}")), &[blob]);
        refused(&bench, &layout, Limits::default(), &[word, media_type, &sha256(&gzip(&tar))]);
    }
    let blob = [Blob::gzip(&tar)];
    let layout = Layout::new(bench.path("urls"));
    let mut layer = layout.blob(GZIP, &blob[0].bytes);
    layer["urls"] = json!(["https://example.com/layer"]);
    let manifest = layout.manifest_of(layout.config(&blob), vec![layer]);
    layout.index(&[manifest]);
    refused(&bench, &layout, Limits::default(), &["foreign"]);

    let layout = Layout::new(bench.path("artifact"));
    let mut config = layout.config(&blob);
    config["mediaType"] = json!("application/vnd.cncf.helm.config.v1+json");
    let manifest = layout.manifest_of(config, vec![layout.blob(GZIP, &blob[0].bytes)]);
    layout.index(&[manifest]);
    refused(&bench, &layout, Limits::default(), &["not the config of a container image", "helm"]);

    for (media_type, word) in [
        ("application/vnd.docker.distribution.manifest.v1+prettyjws", "schema 1"),
        ("text/plain", "neither an image manifest nor an index"),
    ] {
        let layout = Layout::image(bench.path(word), &blob);
        let mut manifest = layout.manifest(&blob);
        manifest["mediaType"] = json!(media_type);
        layout.index(&[manifest]);
        refused(&bench, &layout, Limits::default(), &[word, media_type]);
    }
}

#[test]
fn documents_that_contradict_themselves() {
    let bench = Bench::new();
    let tar = Tar::new().file("a", b"a").end();
    let blob = Blob::gzip(&tar);
    let with_config = |name: &str, config: serde_json::Value, words: &[&str]| {
        let layout = Layout::new(bench.path(name));
        let config = layout.blob(CONFIG, config.to_string().as_bytes());
        let manifest = layout.manifest_of(config, vec![layout.blob(GZIP, &blob.bytes)]);
        layout.index(&[manifest]);
        refused(&bench, &layout, Limits::default(), words);
    };
    let rootfs = |kind: &str, ids: serde_json::Value| json!({"os": "linux", "rootfs": {"type": kind, "diff_ids": ids}});
    let id = blob.diff_id.as_str();
    with_config("count", rootfs("layers", json!([id, id])), &["2 diff_ids for 1 layers"]);
    with_config("kind", rootfs("blocks", json!([id])), &["rootfs.type"]);
    with_config("id", rootfs("layers", json!(["sha256:x"])), &["diff_id"]);
    with_config("none", json!({"os": "linux"}), &["config", "rootfs"]);
    let mut windows = rootfs("layers", json!([id]));
    windows["os"] = json!("windows");
    with_config("windows", windows, &["windows"]);

    let layout = Layout::new(bench.path("traversal"));
    layout.index(&[
        json!({"mediaType": MANIFEST, "digest": "sha256:../../../../etc/passwd", "size": 3}),
    ]);
    refused(&bench, &layout, Limits::default(), &["../../../../etc/passwd", "digest"]);

    // An index that holds itself cannot be made with digests; a tower of them can.
    let layout = Layout::new(bench.path("tower"));
    let mut top = layout.manifest(std::slice::from_ref(&blob));
    for _ in 0..12 {
        let index = json!({"schemaVersion": 2, "manifests": [top]});
        top = layout.blob(INDEX, index.to_string().as_bytes());
    }
    layout.index(&[top]);
    refused(&bench, &layout, Limits::default(), &["indexes in indexes"]);

    let layout = Layout::new(bench.path("big"));
    let big = layout.blob(MANIFEST, &vec![b' '; (4 << 20) + 1]);
    layout.index(&[big]);
    refused(&bench, &layout, Limits::default(), &["document_bytes"]);
    fs::write(layout.0.join("index.json"), vec![b' '; (4 << 20) + 1]).unwrap();
    refused(&bench, &layout, Limits::default(), &["document_bytes"]);
    fs::write(layout.0.join("index.json"), "[".repeat(100_000)).unwrap();
    refused(&bench, &layout, Limits::default(), &["index.json"]);
}

#[test]
fn limits_stop_bombs() {
    let bench = Bench::new();
    let zeros = Tar::new().file("zeros", &vec![0; 64 << 20]).end();
    let bomb = Layout::image(bench.path("bomb"), &[Blob::gzip(&zeros)]);
    let limits = Limits { ratio_from_bytes: 16 << 20, ratio: 50, ..Limits::default() };
    refused(&bench, &bomb, limits, &["ratio", &sha256(&gzip(&zeros))]);
    let limits = Limits { uncompressed_bytes: 32 << 20, ..Limits::default() };
    refused(&bench, &bomb, limits, &["uncompressed_bytes"]);

    // A terabyte and more in one header.
    let sparse = Tar::new()
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.realsize", b"4000000000000"),
        ])
        .file("x", &[&b"0\n"[..], &[0; 510]].concat())
        .end();
    let holes = Layout::image(bench.path("holes"), &[Blob::plain(sparse)]);
    refused(&bench, &holes, Limits::default(), &["uncompressed_bytes", "holes"]);

    // Within the limit a terabyte is made as fast as a kilobyte, and read as fast for a check. More than
    // any file can have is refused whatever the limit is.
    let hole = |size: &[u8]| {
        let tar = Tar::new()
            .pax(&[("GNU.sparse.size", size), ("GNU.sparse.map", b"1000000,3")])
            .file("x", b"abc")
            .end();
        Layout::image(bench.path(std::str::from_utf8(size).unwrap()), &[Blob::plain(tar)])
    };
    let limits = Limits { uncompressed_bytes: u64::MAX, ..Limits::default() };
    refused(&bench, &hole(b"9223372036854775807"), limits, &["absurd"]);
    if !bench.domain.protection().verity {
        let report = bench.import(&hole(b"1000000000000").source()).unwrap();
        let image = report.image.parse().unwrap();
        let contents = cofolio_node::contents::ImageContents;
        let verified = bench.domain.verify_image(&image, &contents, &|_| ()).unwrap();
        assert_eq!((verified.bytes, verified.findings.len()), (1_000_000_000_000, 0));
    }

    let mut many = Tar::new();
    for at in 0..2000 {
        many = many.file(&format!("f{at}"), b"content");
    }
    let many = Layout::image(bench.path("many"), &[Blob::gzip(&many.end())]);
    let limits = Limits { entries: 1999, ..Limits::default() };
    refused(&bench, &many, limits, &["entries", "1999"]);
    let limits = Limits { entries: 2000, ..Limits::default() };
    let options = ImportOptions { limits, ..ImportOptions::default() };
    import(&bench.domain, &many.source(), &options, &Silent).unwrap();
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
