//! Small images that are large, or would be.

use cofolio_image::import::{ImportOptions, import};
use cofolio_image::limits::Limits;
use cofolio_store::task::Task;

use crate::support::*;
use crate::{bad_blob, refused};

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
    let error = refused(&bench, &holes, Limits::default(), &["uncompressed_bytes", "holes"]);
    // An image over a limit ended with exit code 1, other hostile archives with 4.
    assert!(error.is_corrupt(), "{error:?}");

    // Within the limit a terabyte is made as fast as a kilobyte, and read as fast for a check. More
    // than any file can have is refused whatever the limit is.
    let hole = |size: &[u8]| {
        let tar = Tar::new()
            .pax(&[("GNU.sparse.size", size), ("GNU.sparse.map", b"1000000,3")])
            .file("x", b"abc")
            .end();
        Layout::image(
            bench.path(&format!("hole-{}", String::from_utf8_lossy(size))),
            &[Blob::plain(tar)],
        )
    };
    let limits = Limits { uncompressed_bytes: u64::MAX, ..Limits::default() };
    refused(&bench, &hole(b"9223372036854775807"), limits, &["exceed"]);
    if !bench.domain.protection().verity {
        let report = bench.import(&hole(b"1000000000000").source()).unwrap();
        let image = report.image;
        let contents = cofolio_image::pack::ImageContents;
        let verified = bench.domain.verify_image(&image, &contents, &Task::default()).unwrap();
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
    import(&bench.domain, &many.source(), &options, &Task::default()).unwrap();
}

/// Compressed a thousandfold, by each of the formats: the ratio stops it while it is unpacked,
/// whatever the size is.
#[test]
fn every_format_is_held_to_the_ratio() {
    let bench = Bench::new();
    let zeros = Tar::new().file("zeros", &vec![0; 40 << 20]).end();
    let limits = Limits { ratio_from_bytes: 8 << 20, ratio: 50, ..Limits::default() };
    for (name, media_type, bytes) in [("gzip", GZIP, gzip(&zeros)), ("zstd", ZSTD, zstd(&zeros))] {
        let blob = Blob { bytes, media_type: media_type.into(), diff_id: sha256(&zeros) };
        let layout = Layout::image(bench.path(name), &[blob]);
        refused(&bench, &layout, limits.clone(), &["ratio"]);
    }
    // In many small members or frames, which a reader that looks at one of them only would let
    // pass.
    let many =
        |pack: fn(&[u8]) -> Vec<u8>| -> Vec<u8> { zeros.chunks(1 << 20).flat_map(pack).collect() };
    for (name, media_type, bytes) in [("members", GZIP, many(gzip)), ("frames", ZSTD, many(zstd))] {
        let blob = Blob { bytes, media_type: media_type.into(), diff_id: sha256(&zeros) };
        let layout = Layout::image(bench.path(name), &[blob]);
        refused(&bench, &layout, limits.clone(), &["ratio"]);
    }
}

/// A bomb in a bomb. One layer of compression is undone, the one that the media type says; what
/// comes out is no archive, however small its next shell unpacks.
#[test]
fn nested_compression_is_undone_once() {
    let zeros = Tar::new().file("zeros", &vec![0; 8 << 20]).end();
    for inner in [gzip(&zeros), zstd(&zeros), gzip(&gzip(&zeros))] {
        let padded = {
            let mut inner = inner.clone();
            inner.resize(inner.len().max(512), 0);
            inner
        };
        let blob = Blob { bytes: gzip(&padded), media_type: GZIP.into(), diff_id: sha256(&padded) };
        bad_blob(&blob, &["checksum"]);
    }
    // An archive in an archive is a file.
    let view = Bench::new().tar(Tar::new().file("inner.tar.gz", &gzip(&zeros))).unwrap();
    assert!(view.is_file("/inner.tar.gz", &gzip(&zeros)));
}

/// Each entry goes through a link that leads to where the last one ended: forty of them lie forty
/// times deeper than a path can say. As text, which layers are kept as, all their paths would be
/// gigabytes; and collecting garbage, which reads that, would have failed for the whole store.
#[test]
fn directories_deeper_than_any_path() {
    for (name, step) in
        [("d", "d/".repeat(1000)), ("long", format!("{}/", "n".repeat(250)).repeat(8))]
    {
        let mut tar = Tar::new().pax(&[("path", step.as_bytes())]).dir("x");
        let mut end = step.clone();
        for hop in 0..3 {
            let link = format!("link{hop}");
            tar = tar.pax(&[("linkpath", end.as_bytes())]).symlink(&link, "x");
            end = format!("{link}/{step}");
            tar = tar.pax(&[("path", end.as_bytes())]).dir("x");
        }
        bad_blob(&Blob::gzip(&tar.clone().end()), &["longer than 4095"]);
        // A layer that only goes there, through links of the layers below it.
        let bench = Bench::new();
        let lower = Tar::new().pax(&[("path", step.as_bytes())]).dir("x");
        let lower = lower.pax(&[("linkpath", step.as_bytes())]).symlink("link", "x");
        let upper = |path: String| Tar::new().pax(&[("path", path.as_bytes())]).file("x", b"x");
        let blobs = [Blob::plain(lower.end()), Blob::plain(upper(format!("link/{step}f")).end())];
        bench.layers(&format!("{name}-fits"), &blobs).unwrap();
        let layout = Layout::image(
            bench.path(name),
            &[blobs[0].clone(), Blob::plain(upper(format!("link/{step}{step}f")).end())],
        );
        refused(&bench, &layout, Limits::default(), &["longer than 4095"]);
    }
}
