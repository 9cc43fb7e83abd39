//! Every kind of entry, and every field of it, arrives as it was.

use std::process::Command;

use cofolio_image::pack::ImageContents;
use cofolio_store::GcOptions;

use crate::support::*;

fn pax_time(view: &View, path: &str) -> (i64, u32) {
    view.get(path).mtime
}

#[test]
fn plain_ustar_entries() {
    let bench = Bench::new();
    let tar = Tar::new()
        .head(&Head { mode: 0o1750, uid: 3, gid: 4, mtime: 77, ..Head::new(b'5', b"./") })
        .dir("etc/")
        .file("etc/hosts", b"localhost\n")
        .file("empty", b"")
        .symlink("link", "../../etc/hosts")
        .link("again", "etc/hosts")
        .head(&Head { mode: 0o4755, ..Head::new(b'0', b"/suid") })
        .head(&Head { device: (1, 3), ..Head::new(b'3', b"null") })
        .head(&Head { device: (259, 65537), ..Head::new(b'4', b"disk") })
        .head(&Head::new(b'6', b"fifo"))
        .head(&Head { prefix: b"a/deep/prefix", ..Head::new(b'0', b"name") });
    let view = bench.tar(tar).unwrap();
    let root = view.get("/");
    assert_eq!((root.mode, root.uid, root.gid, root.mtime), (0o1750, 3, 4, (77, 0)));
    assert!(view.is_file("/etc/hosts", b"localhost\n") && view.is_file("/empty", b""));
    assert_eq!(view.get("/link").what, "symlink ../../etc/hosts");
    assert_eq!(view.get("/again").first, "/again");
    assert_eq!(view.get("/etc/hosts").first, "/again");
    assert_eq!(view.get("/etc/hosts").nlink, 2);
    assert_eq!(view.get("/suid").mode, 0o4755);
    assert_eq!(view.get("/null").what, "char 0x103");
    // new_encode_dev: 259 << 8 | 65537 & 0xff | (65537 & ~0xff) << 12
    assert_eq!(view.get("/disk").what, format!("block {:#x}", (259 << 8) | 1 | (0x10000 << 12)));
    assert_eq!(view.get("/fifo").what, "fifo");
    assert!(view.has("/a/deep/prefix/name"));
    let made = view.get("/a/deep");
    assert_eq!((made.mode, made.uid, made.mtime), (0o755, 0, (0, 0)));
}

#[test]
fn times_owners_and_names_of_pax_and_gnu() {
    let bench = Bench::new();
    let long = "n".repeat(255);
    let deep = format!("{}/{long}", "d".repeat(200));
    let tar = Tar::new()
        .pax(&[("mtime", b"1234567890.123456789"), ("uid", b"4294967294"), ("gid", b"2147483648")])
        .file("ns", b"1")
        .pax(&[("mtime", b"-1.25")])
        .file("before", b"2")
        .head(&Head {
            uid: 3_000_000_000,
            gid: 4_000_000_000,
            mtime: -86_400,
            gnu: true,
            ..Head::new(b'0', b"base256")
        })
        .head(&Head { mtime: 1 << 40, gnu: true, ..Head::new(b'0', b"far") })
        .pax(&[("path", deep.as_bytes()), ("linkpath", b"x")])
        .symlink("short", "y")
        .extended(b'L', format!("gnu/{long}\0").as_bytes())
        .extended(b'K', format!("{}\0", "t".repeat(300)).as_bytes())
        .symlink("short", "y")
        .pax(&[("path", b"latin-\xe9\xff")])
        .file("x", b"3");
    let view = bench.tar(tar).unwrap();
    assert_eq!(pax_time(&view, "/ns"), (1_234_567_890, 123_456_789));
    assert_eq!((view.get("/ns").uid, view.get("/ns").gid), (u32::MAX - 1, 1 << 31));
    assert_eq!(pax_time(&view, "/before"), (-2, 750_000_000));
    assert_eq!(pax_time(&view, "/base256"), (-86_400, 0));
    let base = view.get("/base256");
    assert_eq!((base.uid, base.gid), (3_000_000_000, 4_000_000_000));
    assert_eq!(pax_time(&view, "/far"), (1 << 40, 0));
    assert_eq!(view.get(&format!("/{deep}")).what, "symlink x");
    assert_eq!(view.get(&format!("/gnu/{long}")).what, format!("symlink {}", "t".repeat(300)));
    assert!(view.is_file(r"/latin-\xe9\xff", b"3"));
}

#[test]
fn attributes_capabilities_and_acls() {
    let bench = Bench::new();
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let tar = Tar::new()
        .pax(&[
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.user.a=b", b"first"),
            ("SCHILY.xattr.user.zero", b"a\0b\n"),
            ("LIBARCHIVE.xattr.user.lib%2Farchive", b"aGVsbG8"),
            ("RHT.security.selinux", b"system_u:object_r:bin_t:s0\0"),
            ("SCHILY.xattr.com.apple.provenance", b"from a Mac"),
            ("SCHILY.xattr.cofolio.lower-link", b"etc/shadow"),
        ])
        .file("ping", b"elf")
        .pax(&[
            ("SCHILY.acl.access", b"user::rw-,user:1000:rwx,group::r--,mask::rwx,other::r--"),
            (
                "SCHILY.acl.default",
                b"user::rwx\ngroup::r-x\nother::---\ngroup:g:rwx:7\nmask::rwx\n",
            ),
        ])
        .dir("shared");
    let layout = Layout::image(bench.path("l"), &[Blob::plain(tar.end())]);
    let report = bench.import(&layout.source()).unwrap();
    assert_eq!(report.foreign_xattrs, 2);
    let view = bench.view(&report);
    let ping = &view.get("/ping").xattrs;
    assert_eq!(ping["security.capability"], capability);
    // The key ends at the first `=`: star(1) has the same ambiguity, and so has every reader.
    assert_eq!(ping["user.a"], b"b=first");
    assert_eq!(ping["user.zero"], b"a\0b\n");
    assert_eq!(ping["user.lib/archive"], b"hello");
    assert_eq!(ping["security.selinux"], b"system_u:object_r:bin_t:s0\0");
    assert_eq!(ping.len(), 5);
    let shared = &view.get("/shared").xattrs;
    let access = &shared["system.posix_acl_access"];
    assert_eq!(access.len(), 4 + 5 * 8);
    assert_eq!(access[..12], [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255]);
    assert_eq!(access[12..20], [2, 0, 7, 0, 0xe8, 3, 0, 0]);
    assert_eq!(shared["system.posix_acl_default"].len(), 4 + 5 * 8);
}

/// An inode may carry 65,535 bytes of attributes, but garbage collection read layers with a parser
/// that refused more than 32,767, as mkcomposefs does: after one file with a large attribute had
/// been imported, every collection of the domain failed with "nothing was collected".
#[test]
fn a_file_with_large_attributes_does_not_stop_garbage_collection() {
    for size in [32_000, 40_000, 65_000] {
        let bench = Bench::new();
        let value = vec![b'x'; size];
        let tar = Tar::new().pax(&[("SCHILY.xattr.user.large", &value)]).file("a", &[7; 100]);
        let layout = Layout::image(bench.path("large"), &[Blob::plain(tar.end())]);
        let report = bench.import(&layout.source()).unwrap();
        assert_eq!(bench.view(&report).get("/a").xattrs["user.large"].len(), size);
        let gone = Layout::image(
            bench.path("gone"),
            &[Blob::plain(Tar::new().file("b", &[8; 100]).end())],
        );
        let name = bench.import(&gone.source()).unwrap().name;
        bench.domain.remove_ref(&name).unwrap();
        let report =
            bench.domain.gc(&ImageContents, &|| Ok(Vec::new()), &GcOptions::default()).unwrap();
        assert_eq!((report.kept_images, report.images, report.objects), (1, 1, 1), "{size}");
    }
}

/// The last of two entries counts; a directory over a directory only changes its metadata.
#[test]
fn duplicates_and_replacements() {
    let bench = Bench::new();
    let tar = Tar::new()
        .file("a", b"first")
        .file("a", b"second")
        .file("d/inside", b"x")
        .head(&Head { mode: 0o700, uid: 9, ..Head::new(b'5', b"d") })
        .file("file-then-dir", b"x")
        .dir("file-then-dir")
        .file("file-then-dir/in", b"y")
        .dir("dir-then-file")
        .file("dir-then-file/in", b"y")
        .file("dir-then-file", b"z")
        .symlink("s", "a")
        .file("s", b"not a symlink")
        .file("one", b"1")
        .link("two", "one")
        .link("two", "one")
        .file("one", b"other");
    let view = bench.tar(tar).unwrap();
    assert!(view.is_file("/a", b"second") && view.is_file("/d/inside", b"x"));
    assert_eq!((view.get("/d").mode, view.get("/d").uid), (0o700, 9));
    assert!(view.is_file("/file-then-dir/in", b"y") && view.is_file("/dir-then-file", b"z"));
    assert!(view.is_file("/s", b"not a symlink"));
    assert!(view.is_file("/two", b"1") && view.get("/two").nlink == 1);
    assert!(view.is_file("/one", b"other"));
    assert_eq!(view.0.len(), 10);
}

#[test]
fn parents_that_are_symlinks_are_followed_within_the_root() {
    let bench = Bench::new();
    let tar = Tar::new()
        .dir("usr")
        .dir("usr/lib")
        .symlink("lib", "usr/lib")
        .file("lib/a", b"a")
        .symlink("out", "../../../usr")
        .file("out/b", b"b")
        .symlink("abs", "/usr/lib")
        .file("abs/c", b"c")
        .symlink("usr/up", "..")
        .file("usr/up/d", b"d")
        .symlink("nowhere", "new/place")
        .file("nowhere/e", b"e")
        .link("f", "lib/a");
    let view = bench.tar(tar).unwrap();
    for (path, content) in [
        ("/usr/lib/a", b"a"),
        ("/usr/b", b"b"),
        ("/usr/lib/c", b"c"),
        ("/d", b"d"),
        ("/new/place/e", b"e"),
        ("/f", b"a"),
    ] {
        assert!(view.is_file(path, content), "{path}");
    }
    assert_eq!(view.get("/lib").what, "symlink usr/lib");
}

/// The same sparse file in all four forms that GNU tar has.
#[test]
fn sparse_files_in_every_form() {
    let bench = Bench::new();
    let mut content = vec![0u8; 100_000];
    content[4096..4096 + 700].fill(b'x');
    content[90_000..90_010].fill(b'y');
    let data = [&content[4096..4796], &content[90_000..90_010]].concat();

    let mut old = Head { size: 710, gnu: true, ..Head::new(b'S', b"old") }.block();
    let pairs = [(4096u64, 700u64), (90_000, 10), (100_000, 0)];
    for (at, (offset, length)) in pairs.iter().enumerate() {
        let at = 386 + at * 24;
        old[at..at + 12].copy_from_slice(format!("{offset:011o}\0").as_bytes());
        old[at + 12..at + 24].copy_from_slice(format!("{length:011o}\0").as_bytes());
    }
    old[483..495].copy_from_slice(format!("{:011o}\0", 100_000).as_bytes());
    seal(&mut old);

    // More segments than the header holds: one byte in each of 40 blocks.
    let mut many = vec![0u8; 40 * 512];
    let mut ext = Head { size: 40, gnu: true, ..Head::new(b'S', b"ext") }.block();
    ext[483..495].copy_from_slice(format!("{:011o}\0", many.len()).as_bytes());
    ext[482] = 1;
    let mut blocks = [[0u8; 512]; 2];
    blocks[0][504] = 1;
    for at in 0..40 {
        many[at * 512] = b'z';
        let (block, slot) = match at {
            0..4 => (&mut ext, 386 + at * 24),
            4..25 => (&mut blocks[0], (at - 4) * 24),
            _ => (&mut blocks[1], (at - 25) * 24),
        };
        block[slot..slot + 12].copy_from_slice(format!("{:011o}\0", at * 512).as_bytes());
        block[slot + 12..slot + 24].copy_from_slice(format!("{:011o}\0", 1).as_bytes());
    }
    seal(&mut ext);

    let map = [&b"2\n4096\n700\n90000\n10\n"[..], &[0; 492]].concat();
    let tar = Tar::new()
        .raw(&old)
        .data(&data)
        .raw(&ext)
        .raw(&blocks.concat())
        .data(&[b'z'; 40])
        .pax(&[
            ("GNU.sparse.size", b"100000"),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.offset", b"4096"),
            ("GNU.sparse.numbytes", b"700"),
            ("GNU.sparse.offset", b"90000"),
            ("GNU.sparse.numbytes", b"10"),
        ])
        .file("pax00", &data)
        .pax(&[
            ("GNU.sparse.name", b"pax01"),
            ("GNU.sparse.size", b"100000"),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.map", b"4096,700,90000,10"),
        ])
        .file("GNUSparseFile.1/pax01", &data)
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"pax10"),
            ("GNU.sparse.realsize", b"100000"),
        ])
        .file("GNUSparseFile.1/pax10", &[map, data].concat())
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"hole"),
            ("GNU.sparse.realsize", b"5000000"),
        ])
        .file("GNUSparseFile.1/hole", &[&b"0\n"[..], &[0; 510]].concat())
        .file("after", b"in step");
    let view = bench.tar(tar).unwrap();
    for path in ["/old", "/pax00", "/pax01", "/pax10"] {
        assert!(view.is_file(path, &content), "{path}");
    }
    assert!(view.is_file("/ext", &many));
    assert!(view.is_file("/hole", &vec![0; 5_000_000]));
    assert!(view.is_file("/after", b"in step"));
    assert_eq!(view.0.len(), 8);
    // One object for four names, and nothing kept for the holes.
    bench.is_sparse(&content, 3 * 4096);
    bench.is_sparse(&vec![0; 5_000_000], 0);
}

/// Old writers, odd but valid: V7 headers, directories by their slash, no end mark, one zero block,
/// numbers padded with spaces, a size on a link.
#[test]
fn odd_but_valid_archives() {
    let bench = Bench::new();
    let mut v7 = Head::new(0, b"v7").block();
    v7[257..265].fill(0);
    v7[100..108].copy_from_slice(b"   644 \0");
    seal(&mut v7);
    let mut slash = Head { mode: 0o700, ..Head::new(0, b"v7dir/") }.block();
    slash[257..265].fill(0);
    seal(&mut slash);
    let tar = Tar::new()
        .raw(&v7)
        .raw(&slash)
        .raw(&[0; 512])
        .head(&Head { size: 1 << 20, link: b"v7", ..Head::new(b'1', b"link") })
        .extended(b'g', b"19 comment=abcdefg\n")
        .head(&Head { size: 3, ..Head::new(b'7', b"contiguous") })
        .data(b"abc")
        .0;
    let view = bench.layers("odd", &[Blob::plain(tar)]).unwrap();
    assert_eq!(view.get("/v7").mode, 0o644);
    assert_eq!(view.get("/v7dir").what, "dir");
    assert_eq!(view.get("/link").nlink, 2);
    assert!(view.is_file("/contiguous", b"abc"));
}

#[test]
fn aufs_bookkeeping_is_left_out() {
    let bench = Bench::new();
    let tar = Tar::new()
        .dir(".wh..wh.plnk")
        .file(".wh..wh.plnk/123.456", b"x")
        .file(".wh..wh.aufs", b"")
        .file("kept", b"y");
    let view = bench.tar(tar).unwrap();
    assert_eq!(view.paths(), ["/", "/kept"]);
}

/// What GNU tar writes with all its options on, from a real directory, against what is there.
#[test]
fn gnu_tar_writes_what_we_read() {
    let test = "gnu_tar_writes_what_we_read";
    if !is_root(test) || !have(test, "tar") {
        return;
    }
    let bench = Bench::new();
    let root = bench.path("tree");
    crate::scan::make_tree(&root);
    let expected = crate::scan::view_of_directory(&root);
    for format in ["posix", "gnu"] {
        let archive = bench.path(&format!("{format}.tar"));
        let mut command = Command::new("tar");
        command.arg(format!("--format={format}")).args(["--numeric-owner", "--sparse", "-C"]);
        command.arg(&root);
        if format == "posix" {
            command.args(["--xattrs", "--xattrs-include=*"]);
        }
        run(command.arg("-cf").arg(&archive).arg("."));
        let tar = std::fs::read(&archive).unwrap();
        let view = bench.layers(format, &[Blob::gzip(&tar)]).unwrap();
        crate::scan::compare(&expected, &view, format == "posix");
    }
}
