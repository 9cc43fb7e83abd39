//! What looks like an attack and is none, if it is taken for what it says: it arrives in the image
//! as it is in the archive, and nothing of it touches this machine.

use crate::support::*;

/// A layer brings a link to /etc and then writes through it. An unpacker that follows links of its
/// own machine writes into /etc of the host; here the link leads to the image's own /etc, as it
/// would in the container.
#[test]
fn a_link_out_of_the_image_leads_into_it() {
    let bench = Bench::new();
    let evil = format!("cofolio-escape-{}", std::process::id());
    let view = bench
        .tar(
            Tar::new()
                .symlink("abs", "/etc")
                .file(&format!("abs/{evil}"), b"x")
                .symlink("up", "../../../../../../tmp")
                .file(&format!("up/{evil}"), b"y")
                .symlink("self", ".")
                .file("self/self/self/here", b"z"),
        )
        .unwrap();
    assert!(view.is_file(&format!("/etc/{evil}"), b"x"), "{:?}", view.paths());
    assert!(view.is_file(&format!("/tmp/{evil}"), b"y"));
    assert!(view.is_file("/here", b"z"));
    for outside in ["/etc", "/tmp", "/"] {
        assert!(!std::path::Path::new(outside).join(&evil).exists(), "{outside} of this machine");
    }
}

/// The same with two layers: the lower one has the link, the upper one writes through it or hides
/// behind it.
#[test]
fn a_link_of_a_lower_layer_leads_into_the_image() {
    let bench = Bench::new();
    let lower = Tar::new().dir("etc").file("etc/kept", b"k").file("etc/gone", b"g");
    let lower = lower.symlink("out", "/../../etc");
    let upper = Tar::new().file("out/new", b"n").file("out/.wh.gone", b"");
    let blobs = [Blob::plain(lower.end()), Blob::plain(upper.end())];
    let view = bench.layers("image", &blobs).unwrap();
    assert_eq!(view.get("/out").what, "symlink /../../etc");
    assert!(view.is_file("/etc/new", b"n") && view.is_file("/etc/kept", b"k"));
    assert!(!view.has("/etc/gone"));
}

/// Absolute names are those of the image. Everybody takes them so.
#[test]
fn absolute_names_begin_at_the_root_of_the_image() {
    let view = Bench::new().tar(Tar::new().file("/etc/shadow", b"x").file("///a//./b", b"y"));
    assert_eq!(view.unwrap().paths(), ["/", "/a", "/a/b", "/etc", "/etc/shadow"]);
}

/// A whiteout of a directory that the same layer fills, of the layer's own file, of the parent of a
/// file, and of what is nowhere. Whiteouts hide what is below, and only that.
#[test]
fn whiteouts_of_parents_hide_lower_layers_only() {
    let bench = Bench::new();
    let lower = Tar::new().file("a/b/c", b"lower").file("a/x", b"x").file("keep", b"k");
    let upper = Tar::new()
        .file("a/b/new", b"upper")
        .file(".wh.a", b"")
        .file("a/.wh.b", b"")
        .file("a/b/.wh.new", b"")
        .file(".wh.nowhere", b"")
        .file(".wh.keep", b"");
    let blobs = [Blob::plain(lower.end()), Blob::plain(upper.end())];
    let view = bench.layers("image", &blobs).unwrap();
    assert_eq!(view.paths(), ["/", "/a", "/a/b", "/a/b/new"]);
}

/// AUFS kept its own books in layers, `.wh..wh.plnk` and the like. Nothing of them is a file of the
/// image.
#[test]
fn bookkeeping_of_aufs_is_left_out() {
    let tar =
        Tar::new().dir(".wh..wh.plnk").file(".wh..wh.plnk/1.2", b"x").file(".wh..wh.aufs", b"");
    assert_eq!(Bench::new().tar(tar.file("f", b"f")).unwrap().paths(), ["/", "/f"]);
}

/// Device nodes of the machine's disk and memory, and the device 0:0 that overlayfs takes for a
/// whiteout. They are what images may have; whether they can be opened is for the mount (`nodev`)
/// and the runtime.
#[test]
fn devices_and_setuid_are_what_they_say() {
    let head = |flag, path: &'static str, device| Head {
        flag,
        device,
        ..Head::new(flag, path.as_bytes())
    };
    let tar = Tar::new()
        .head(&head(b'4', "sda", (8, 0)))
        .head(&head(b'3', "mem", (1, 1)))
        .head(&head(b'3', "whiteout", (0, 0)))
        .head(&head(b'6', "fifo", (0, 0)))
        .head(&Head { mode: 0o6755, ..Head::new(b'0', b"su") })
        .head(&Head { mode: 0o1777, ..Head::new(b'5', b"tmp") });
    let view = Bench::new().tar(tar).unwrap();
    assert_eq!(view.get("/sda").what, "block 0x800");
    assert_eq!(view.get("/mem").what, "char 0x101");
    assert_eq!(view.get("/whiteout").what, "char 0x0");
    assert_eq!(view.get("/fifo").what, "fifo");
    assert_eq!((view.get("/su").mode, view.get("/tmp").mode), (0o6755, 0o1777));
}

/// One name many times: the last one wins, whatever it is, and what was below a replaced directory
/// is gone.
#[test]
fn the_last_of_several_entries_wins() {
    let mut tar = Tar::new();
    for round in 0..50u8 {
        tar = tar.file("f", &[round; 9]).dir("f").file("f/x", b"x").symlink("f", "nowhere");
        tar = tar.file("f2", &[round; 5]).link("l", "f2");
    }
    let view = Bench::new().tar(tar).unwrap();
    assert_eq!(view.paths(), ["/", "/f", "/f2", "/l"]);
    assert_eq!(view.get("/f").what, "symlink nowhere");
    assert!(view.is_file("/f2", &[49; 5]) && view.get("/l").nlink == 2);
}

/// Hard links that go round in a circle, to themselves, and through symbolic links.
#[test]
fn hard_links_in_circles_end() {
    let view = Bench::new()
        .tar(
            Tar::new()
                .file("a", b"a")
                .link("b", "a")
                .link("a", "b")
                .link("b", "a")
                .link("a", "a")
                .dir("d")
                .symlink("d/back", "..")
                .link("c", "d/back/d/back/a"),
        )
        .unwrap();
    for path in ["/a", "/b", "/c"] {
        assert!(view.is_file(path, b"a") && view.get(path).nlink == 3, "{path}");
    }
    // Over two layers: each links to what the other one had, under a name that it takes away.
    let blobs = [
        Blob::plain(Tar::new().file("x", b"x").link("y", "x").end()),
        Blob::plain(Tar::new().link("z", "x").file(".wh.x", b"").link("x", "y").end()),
    ];
    let view = Bench::new().layers("circle", &blobs).unwrap();
    assert_eq!((view.get("/x").nlink, view.get("/y").nlink, view.get("/z").nlink), (3, 3, 3));
}

/// Marks that the store keeps in layers for itself, sent by an archive: attributes without a
/// namespace are no attributes that Linux has, and do not come in.
#[test]
fn marks_of_our_own_cannot_be_sent() {
    let tar = Tar::new()
        .pax(&[
            ("SCHILY.xattr.cofolio.lower-link", b"etc/shadow"),
            ("SCHILY.xattr.cofolio.implicit", b""),
        ])
        .file("f", b"f");
    let blobs = [Blob::plain(Tar::new().file("etc/shadow", b"s").end()), Blob::plain(tar.end())];
    let view = Bench::new().layers("marks", &blobs).unwrap();
    assert!(view.is_file("/f", b"f") && view.get("/f").nlink == 1);
    assert!(view.get("/f").xattrs.is_empty());
}

/// Capabilities come in as the kernel's bytes, valid or not: it looks at them when the file is
/// executed, and a mount can be `nosuid`.
#[test]
fn capabilities_are_bytes() {
    let valid: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    for value in [valid, b"", b"nonsense", &[0xff; 4000]] {
        let tar = Tar::new().pax(&[("SCHILY.xattr.security.capability", value)]).file("f", b"f");
        let view = Bench::new().tar(tar).unwrap();
        assert_eq!(view.get("/f").xattrs["security.capability"], value);
    }
}

/// Names of bytes that are no text, or drive terminals. What the command line prints of them is in
/// `crates/cofolio/tests/hostile.rs`.
#[test]
fn names_are_bytes() {
    let names: [&[u8]; 6] = [
        b"new\nline",
        b"\x1b]0;title\x07",
        b"\xff\xfe not text",
        b"\x1b[2J\x1b[1;1H",
        b"tab\tback\\slash \"quote\"",
        " \u{202e}txt.exe".as_bytes(),
    ];
    let mut tar = Tar::new();
    for (at, name) in names.into_iter().enumerate() {
        tar = tar.head(&Head::new(b'5', name));
        tar = tar.pax(&[("linkpath", name)]).symlink(&format!("s{at}"), "x");
    }
    let view = Bench::new().tar(tar).unwrap();
    for (at, name) in names.into_iter().enumerate() {
        assert_eq!(view.get(&format!("/{}", name.escape_ascii())).what, "dir");
        let link = format!("/s{at}");
        assert_eq!(view.get(&link).what, format!("symlink {}", name.escape_ascii()));
    }
}

/// As deep as names can say, and with more names than any directory block holds.
#[test]
fn deep_and_wide_trees() {
    let deep = "d/".repeat(2047);
    let mut tar = Tar::new().pax(&[("path", deep.as_bytes())]).dir("x");
    for at in 0..5000 {
        tar = tar.file(&format!("wide/{at:080}"), b"");
    }
    let view = Bench::new().tar(tar).unwrap();
    assert_eq!(view.paths().len(), 1 + 2047 + 1 + 5000);
    assert!(view.has(&format!("/{}", deep.trim_end_matches('/'))));
}
