//! Compressed streams in every shape that registries serve.

use crate::support::*;

/// Big enough for several chunks, small files and large ones.
fn archive() -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let mut random = Random(7);
    let mut tar = Tar::new();
    let mut files = Vec::new();
    for (at, size) in [0, 1, 511, 512, 513, 4096, 300_000, 1 << 20, (1 << 20) + 1, 3_000_000]
        .into_iter()
        .enumerate()
    {
        let content: Vec<u8> = (0..size).map(|_| random.next() as u8 & 0x1f).collect();
        let name = format!("f{at}");
        tar = tar.file(&name, &content);
        files.push((name, content));
    }
    for at in 0..2000 {
        let content = format!("small {at}").into_bytes();
        let name = format!("small/{at}");
        tar = tar.file(&name, &content);
        files.push((name, content));
    }
    (tar.end(), files)
}

fn check(name: &str, media_type: &str, bytes: Vec<u8>, diff_id: String) {
    let (_, files) = archive();
    let bench = Bench::new();
    let blob = Blob { bytes, media_type: media_type.into(), diff_id };
    let view = bench.layers(name, &[blob]).unwrap_or_else(|e| panic!("{name}: {e}"));
    for (path, content) in &files {
        assert!(view.is_file(&format!("/{path}"), content), "{name}: {path}");
    }
    assert_eq!(view.0.len(), files.len() + 2, "{name}");
}

/// zstd:chunked puts every file in a frame of its own and a table of contents in skippable frames;
/// readers that stop at the first frame see an empty image (bootc #2408).
#[test]
fn many_frames_skippable_frames_and_members() {
    let (tar, _) = archive();
    let diff_id = sha256(&tar);
    let skippable = |text: &[u8]| {
        let mut frame = vec![0x50, 0x2a, 0x4d, 0x18];
        frame.extend_from_slice(&u32::try_from(text.len()).unwrap().to_le_bytes());
        frame.extend_from_slice(text);
        frame
    };
    let mut frames = skippable(b"in front");
    let mut members = Vec::new();
    for (at, part) in tar.chunks(100_000).enumerate() {
        frames.extend(zstd(part));
        if at % 3 == 0 {
            frames.extend(skippable(&[at as u8; 5000]));
            frames.extend(zstd(b""));
        }
        members.extend(gzip(part));
        if at % 3 == 0 {
            members.extend(gzip(b""));
        }
    }
    frames.extend(skippable(b"table of contents"));
    check("zstd", ZSTD, zstd(&tar), diff_id.clone());
    check("frames", ZSTD, frames, diff_id.clone());
    check("gzip", GZIP, gzip(&tar), diff_id.clone());
    check("members", GZIP, members, diff_id.clone());
    check("plain", PLAIN, tar.clone(), diff_id.clone());
    // Wrong media types are common, and harmless with all digests checked.
    check("liar", PLAIN, zstd(&tar), diff_id);
}

/// What follows the end of the archive belongs to the diff-id, and nothing else.
#[test]
fn bytes_after_the_end_are_hashed_and_ignored() {
    let bench = Bench::new();
    let mut tar = Tar::new().file("a", b"a").end();
    tar.extend_from_slice(&[7; 100_000]);
    let view = bench.layers("trailing", &[Blob::gzip(&tar)]).unwrap();
    assert_eq!(view.paths(), ["/", "/a"]);
}

/// The digest of the metadata image depends on the content alone.
#[test]
fn the_image_does_not_depend_on_threads_or_compression() {
    use cofolio_image::import::{ImportOptions, import};
    use cofolio_store::task::Task;
    let (tar, _) = archive();
    let mut digests = Vec::new();
    for (threads, blob) in [
        (1, Blob::plain(tar.clone())),
        (2, Blob::gzip(&tar)),
        (8, Blob { bytes: zstd(&tar), media_type: ZSTD.into(), diff_id: sha256(&tar) }),
    ] {
        let bench = Bench::new();
        let layout = Layout::image(bench.path("image"), &[blob]);
        let options = ImportOptions { threads, ..ImportOptions::default() };
        digests.push(
            import(&bench.domain, &layout.source(), &options, &Task::default()).unwrap().image,
        );
    }
    assert!(digests.iter().all(|d| *d == digests[0]), "{digests:?}");
}
