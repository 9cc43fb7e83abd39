//! What becomes of segments on each filesystem.

use cofolio_image::pack::segment::Segment;
use cofolio_store::{Digest, Domain, ImportOptions, verity};

use crate::common::{Scratch, content, import, is_clean, on_each, put};
use crate::real::{Segments, content_of, pack};

/// A segment is content, and protected as such; where the filesystem can, it takes no room beside the objects.
#[test]
fn segments_are_protected_and_share_blocks_with_objects() {
    on_each("segments_are_protected", |kind, parent| {
        let scratch = Scratch::below(parent, "segments");
        let domain = scratch.store().domain("default").unwrap();
        put(&domain, "a", &[20 << 20, 5000, 1 << 20, 4096, 4097]);
        let image = domain.get_ref("a").unwrap().unwrap().image;
        rustix::fs::sync();
        let free = || {
            rustix::fs::syncfs(std::fs::File::open(parent).unwrap()).unwrap();
            let stat = rustix::fs::statvfs(parent).unwrap();
            stat.f_bavail * stat.f_frsize
        };
        let before = free();
        let segments = pack(&domain, &image, 9, ImportOptions::default()).unwrap();
        if kind != "temporary directory" {
            let used = before.saturating_sub(free());
            let shares = domain.can_reflink();
            assert_eq!(used < 10 << 20, shares, "{kind}: {used} bytes");
        }
        is_clean(&domain, &Segments);
        for segment in segments {
            let file = domain.open_segment(&segment).unwrap();
            let measured = cofolio_sys::verity::measure(file.descriptor().unwrap());
            if domain.protection().verity {
                assert_eq!(measured.unwrap(), Some(segment.0), "{kind}");
            }
            check_segment(kind, &domain, &segment, |runs| assert_eq!(runs, 0, "nothing is twice"));
        }

        // Of a content that is somewhere else in part, the rest shares its blocks.
        let (first, own) = (content(8 << 20, 1), content(3 << 20, 2));
        let part =
            [&own[..2 << 20], &first[4096..4 << 20], &own[..], &[0; 200_000], b"end"].concat();
        let image = import(&domain, "b", &[first, part], None, ImportOptions::default()).unwrap();
        rustix::fs::sync();
        let before = free();
        let segments = pack(&domain, &image, 1, ImportOptions::default()).unwrap();
        if kind != "temporary directory" {
            let used = before.saturating_sub(free());
            let shares = domain.can_reflink();
            assert_eq!(used < 2 << 20, shares, "{kind}: {used} bytes");
        }
        is_clean(&domain, &Segments);
        let mut in_runs = 0;
        for segment in segments {
            check_segment(kind, &domain, &segment, |runs| in_runs += runs);
        }
        assert!(in_runs > 1, "{kind}");
    });
}

/// All contents of a segment are what they should be; `runs` is told in how many places each is that is not in one piece.
fn check_segment(kind: &str, domain: &Domain, digest: &Digest, mut runs: impl FnMut(usize)) {
    let segment = Segment::of(domain, digest).unwrap();
    for entry in &segment.entries {
        let content = content_of(domain, digest, &segment, entry);
        assert_eq!(verity::digest(&content), entry.object, "{kind}");
        runs(entry.runs.len());
    }
}
