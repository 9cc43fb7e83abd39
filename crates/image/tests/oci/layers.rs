//! Layers over layers, one rule at a time: whiteouts, opaque directories, links into lower layers,
//! replacements. `model.rs` has them all at once.

use crate::support::*;

fn image(layers: Vec<Tar>) -> View {
    let bench = Bench::new();
    let blobs: Vec<Blob> = layers.into_iter().map(|t| Blob::gzip(&t.end())).collect();
    bench.layers("image", &blobs).unwrap()
}

fn base() -> Tar {
    Tar::new()
        .dir("etc")
        .file("etc/passwd", b"root")
        .file("etc/group", b"wheel")
        .dir("usr")
        .dir("usr/lib")
        .file("usr/lib/libc", b"libc")
        .symlink("lib", "usr/lib")
        .dir("var")
        .file("var/log", b"log")
}

#[test]
fn whiteouts_hide_names_and_trees() {
    let view = image(vec![
        base(),
        Tar::new()
            .file("etc/.wh.passwd", b"")
            .file(".wh.var", b"")
            .file("usr/.wh.nothing", b"")
            .file("nowhere/.wh.nothing", b""),
    ]);
    assert!(!view.has("/etc/passwd") && view.has("/etc/group"));
    assert!(!view.has("/var") && !view.has("/var/log"));
    assert!(view.paths().iter().all(|p| !p.contains(".wh.")), "{:?}", view.paths());
}

/// Whiteouts hide what is below, never what comes with them, wherever they stand in the archive.
#[test]
fn opaque_directories_keep_their_own_layer() {
    for opaque_first in [true, false] {
        let own = |t: Tar| t.dir("etc").file("etc/new", b"new").file("etc/group", b"mine");
        let opaque = |t: Tar| t.file("etc/.wh..wh..opq", b"").file("var/.wh.log", b"");
        let upper = if opaque_first { own(opaque(Tar::new())) } else { opaque(own(Tar::new())) };
        let upper = upper.file("var/log", b"new log");
        let view = image(vec![base(), upper]);
        assert!(!view.has("/etc/passwd"));
        assert!(view.is_file("/etc/new", b"new") && view.is_file("/etc/group", b"mine"));
        assert!(view.is_file("/var/log", b"new log"));
    }
    let view = image(vec![base(), Tar::new().file(".wh..wh..opq", b"").file("only", b"1")]);
    assert_eq!(view.paths(), ["/", "/only"]);
}

#[test]
fn links_reach_into_lower_layers() {
    let view = image(vec![
        base(),
        Tar::new()
            .link("etc/same", "etc/passwd")
            .link("through", "lib/libc")
            .link("again", "etc/same")
            // Held before it is hidden, whatever the order.
            .file("etc/.wh.group", b"")
            .link("kept", "./etc/group")
            .file("etc/passwd", b"replaced"),
        Tar::new().link("third", "again"),
    ]);
    assert!(view.is_file("/etc/passwd", b"replaced"));
    for path in ["/etc/same", "/again", "/third"] {
        assert!(view.is_file(path, b"root"), "{path}");
        assert_eq!(view.get(path).nlink, 3);
    }
    assert!(view.is_file("/through", b"libc") && view.get("/through").nlink == 2);
    assert!(!view.has("/etc/group") && view.is_file("/kept", b"wheel"));
}

#[test]
fn links_survive_an_opaque_root() {
    let view = image(vec![base(), Tar::new().file(".wh..wh..opq", b"").link("kept", "etc/passwd")]);
    assert_eq!(view.paths(), ["/", "/kept"]);
    assert!(view.is_file("/kept", b"root"));
}

/// Debian's merged /usr: a layer that brings lib/x over a lower lib -> usr/lib adds to usr/lib, as
/// it does when containerd unpacks into a mount of the lower layers. A directory entry of its own
/// replaces the link.
#[test]
fn implicit_directories_follow_lower_symlinks() {
    let view = image(vec![base(), Tar::new().file("lib/extra", b"x").file("lib/.wh.libc", b"")]);
    assert_eq!(view.get("/lib").what, "symlink usr/lib");
    assert!(view.is_file("/usr/lib/extra", b"x") && !view.has("/usr/lib/libc"));
    let view = image(vec![base(), Tar::new().dir("lib").file("lib/extra", b"x")]);
    assert_eq!(view.get("/lib").what, "dir");
    assert!(view.is_file("/lib/extra", b"x") && view.is_file("/usr/lib/libc", b"libc"));
}

/// A directory that no entry describes keeps the lower one's metadata; one that an entry describes
/// gets the entry's.
#[test]
fn directory_metadata_comes_from_entries_only() {
    let lower = Tar::new().head(&Head { mode: 0o1777, uid: 5, ..Head::new(b'5', b"tmp") });
    let view = image(vec![lower.clone(), Tar::new().file("tmp/a", b"a")]);
    assert_eq!((view.get("/tmp").mode, view.get("/tmp").uid), (0o1777, 5));
    let upper = Tar::new()
        .pax(&[("SCHILY.xattr.user.x", b"y")])
        .head(&Head { mode: 0o700, ..Head::new(b'5', b"tmp") });
    let view = image(vec![lower, upper.clone(), upper.dir("tmp")]);
    assert_eq!((view.get("/tmp").mode, view.get("/tmp").uid), (0o755, 0));
    assert!(view.get("/tmp").xattrs.is_empty());
}

/// `rm -r d; mkdir d` in one layer, written without a whiteout but with an entry in between.
#[test]
fn a_directory_that_was_replaced_on_the_way_is_new() {
    let upper = Tar::new().file("etc", b"file").dir("etc").file("etc/new", b"n");
    let view = image(vec![base(), upper]);
    assert!(view.is_file("/etc/new", b"n") && !view.has("/etc/passwd"));
}

/// The layers that an image shares with another are not read again, and give the same tree.
#[test]
fn known_layers_are_not_unpacked_again() {
    let bench = Bench::new();
    let marks = Tar::new()
        .file("etc/.wh.passwd", b"")
        .link("kept", "etc/group")
        .file("lib/implicit", b"i")
        .file("var/.wh..wh..opq", b"");
    let mut blobs = vec![Blob::gzip(&base().end()), Blob::gzip(&marks.end())];
    let first = Layout::image(bench.path("first"), &blobs);
    let report = bench.import(&first.source()).unwrap();
    assert!(report.layers.iter().all(|l| !l.known));

    blobs.push(Blob::gzip(&Tar::new().file("top", b"top").end()));
    let second = Layout::image(bench.path("second"), &blobs);
    // What is known is not even opened.
    for layer in &report.layers {
        std::fs::write(
            second.0.join("blobs/sha256").join(layer.digest.hex()),
            vec![0; usize::try_from(layer.size).unwrap()],
        )
        .unwrap();
    }
    let report = bench.import(&second.source()).unwrap();
    let known: Vec<bool> = report.layers.iter().map(|l| l.known).collect();
    assert_eq!(known, [true, true, false]);
    let view = bench.view(&report);
    let fresh = Bench::new().layers("fresh", &blobs).unwrap();
    assert_eq!(view.0, fresh.0);
    assert!(view.is_file("/usr/lib/implicit", b"i") && view.is_file("/kept", b"wheel"));
    assert_eq!(report.objects_new, 1, "{report:?}");
}

/// Layers are merged from their dumps, which describe an inode at the name nearest to the root, and
/// that name can come after others; meanwhile what was there can be replaced through a lower
/// symbolic link.
#[test]
fn names_come_before_what_they_lead_to() {
    let view = image(vec![
        base(),
        Tar::new().file("z", b"zed").link("a/x", "z").link("a/y", "z").link("zz", "a/x"),
    ]);
    for path in ["/z", "/a/x", "/a/y", "/zz"] {
        assert!(view.is_file(path, b"zed"), "{path}");
        assert_eq!(view.get(path).nlink, 4, "{path}");
    }
    // lib is a link to usr/lib: the second file replaces the first, whose other name stays.
    let view = image(vec![
        base(),
        Tar::new().file("lib/x", b"one").link("zz", "lib/x").file("usr/lib/x", b"two"),
    ]);
    assert!(view.is_file("/usr/lib/x", b"two") && view.is_file("/zz", b"one"));
    assert_eq!((view.get("/zz").nlink, view.get("/usr/lib/x").nlink), (1, 1));
    assert!(view.paths().iter().all(|p| !p.contains(".wh.")), "{:?}", view.paths());
}

/// mkcomposefs refuses a line with so much; a layer's own dump has to take what archives may bring.
#[test]
fn long_attributes_in_upper_layers() {
    let value = [0xff; 20_000];
    let upper = Tar::new().pax(&[("SCHILY.xattr.user.long", &value)]).file("f", b"f");
    let view = image(vec![base(), upper, Tar::new().link("g", "f")]);
    let xattrs = format!("{:?}", view.get("/g").xattrs);
    assert!(xattrs.contains("user.long") && xattrs.len() > value.len());
}

/// The same image, whichever layers were known: which name of a file its inode is stored under is
/// for the whole image to decide.
#[test]
fn known_layers_give_the_same_image() {
    let lower = Blob::gzip(&Tar::new().file("d/f", b"f").link("d/g", "d/f").end());
    let upper = Blob::gzip(&Tar::new().link("a", "d/g").file("d/.wh.f", b"").end());
    let (bench, fresh) = (Bench::new(), Bench::new());
    let known = Layout::image(bench.path("lower"), std::slice::from_ref(&lower));
    bench.import(&known.source()).unwrap();
    let layout = Layout::image(fresh.path("both"), &[lower, upper]);
    let report = bench.import(&layout.source()).unwrap();
    assert!(report.layers[0].known && !report.layers[1].known);
    assert_eq!(report.image, fresh.import(&layout.source()).unwrap().image);
}
