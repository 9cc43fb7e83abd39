//! What an image of hostile attributes is once the kernel has mounted it: overlayfs, which finds file content by
//! attributes of the image, must take none of those that came in an archive.

use std::fs;
use std::path::Path;

use cofolio_image::pack::ImageContents;
use cofolio_node::mount::{Access, MountRequest, Mounter, UmountOptions};
use cofolio_node::run_dir::RunDir;

use crate::support::*;

/// Moves this thread into a mount namespace of its own, where the machine can mount images; says why not.
fn can_mount(test: &str) -> bool {
    use cofolio_node::probe::{Need, Options, Presence, probe};
    if !is_root(test) {
        return false;
    }
    let report = probe(&Options::default());
    let missing = report
        .features
        .iter()
        .find(|f| f.need == Need::Required && f.presence != Presence::Present);
    if let Some(missing) = missing {
        println!("SKIP {test}: needs {}: {}", missing.name, missing.detail);
        return false;
    }
    cofolio_sys::mount::unshare_mount_namespace().unwrap();
    true
}

/// Imports, mounts, looks, unmounts.
fn mounted(layers: &[Blob], access: Access, look: impl Fn(&Path)) {
    let bench = Bench::new();
    bench.layers("evil:1", layers).unwrap();
    let image = bench.domain.get_ref("evil:1").unwrap().unwrap().image;
    let dir = bench.dir.path().canonicalize().unwrap();
    let target = dir.join("target");
    fs::create_dir(&target).unwrap();
    let mounter =
        Mounter::new(&bench.domain, RunDir::open(dir.join("run")).unwrap(), &ImageContents);
    mounter.mount(&MountRequest { access, ..MountRequest::new(image, &target) }).unwrap();
    let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| look(&target)));
    let options = UmountOptions::default();
    mounter.umount(&target, &options).unwrap();
    if let Err(panic) = looked {
        std::panic::resume_unwind(panic);
    }
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 70_000];
    let length = rustix::fs::lgetxattr(path, name, &mut value).ok()?;
    value.truncate(length);
    Some(value)
}

/// A file says that its content is that of another object, that of /secret, or nothing; a directory says that it
/// is opaque or lies elsewhere; a file of no bytes and a device 0:0 say that they are whiteouts. Through the mount
/// each of them has the content that it had in the archive, and the attributes read as they were written.
#[test]
fn attributes_of_overlayfs_are_only_attributes() {
    if !can_mount("attributes_of_overlayfs_are_only_attributes") {
        return;
    }
    let secret = cofolio_store::verity::digest(b"secret");
    // What composefs writes: a header of 4 bytes (version, length, flags, algorithm SHA-256), and the digest.
    let metacopy = [&[0, 36, 0, 1][..], &secret.0].concat();
    let redirect = format!("/{}", secret.object_path());
    let claims = [
        ("metacopy", metacopy),
        ("redirect", redirect.into_bytes()),
        ("opaque", b"y".to_vec()),
        ("opaque", b"x".to_vec()),
        ("whiteout", b"y".to_vec()),
        ("whiteouts", b"y".to_vec()),
        ("origin", vec![0xfb; 30]),
        ("overlay.redirect", b"/secret".to_vec()),
    ];
    let named = |space: &str| claims.clone().map(|(name, value)| (format!("{space}{name}"), value));
    let attacks = [named("trusted.overlay."), named("user.overlay.")].concat();
    let mut tar = Tar::new().file("secret", b"secret").file("dir/inside", b"inside");
    for (at, (name, value)) in attacks.iter().enumerate() {
        let key = format!("SCHILY.xattr.{name}");
        let record: &[(&str, &[u8])] = &[(&key, value)];
        tar = tar.pax(record).file(&format!("file{at}"), format!("own {at}").as_bytes());
        tar = tar.pax(record).file(&format!("empty{at}"), b"");
        tar = tar.pax(record).dir(&format!("dir{at}")).file(&format!("dir{at}/in"), b"in");
    }
    tar = tar.head(&Head::new(b'3', b"device"));
    let upper = Tar::new().file("dir0/more", b"more").file("secret2", b"s2");
    let layers = [Blob::plain(tar.end()), Blob::plain(upper.end())];
    for access in [Access::ReadOnly, Access::Writable] {
        mounted(&layers, access, |root| {
            for (at, (name, value)) in attacks.iter().enumerate() {
                let file = root.join(format!("file{at}"));
                assert_eq!(fs::read_to_string(&file).unwrap(), format!("own {at}"), "{name}");
                let empty = root.join(format!("empty{at}"));
                assert_eq!(fs::metadata(&empty).unwrap().len(), 0, "{name}");
                assert_eq!(fs::read(&empty).unwrap(), b"", "{name}");
                let dir = root.join(format!("dir{at}"));
                assert_eq!(fs::read(dir.join("in")).unwrap(), b"in", "{name}");
                for path in [&file, &empty, &dir] {
                    let found = attribute(path, name);
                    assert_eq!(found.as_deref(), Some(value.as_slice()), "{name} of {path:?}");
                }
            }
            assert_eq!(fs::read(root.join("dir0/more")).unwrap(), b"more");
            assert_eq!(fs::read(root.join("secret")).unwrap(), b"secret");
            // The format has no other way for a device 0:0 than the one for whiteouts: an empty file, which only an
            // overlay above this one would take for a whiteout. Its name is there, and hides nothing.
            let device = fs::symlink_metadata(root.join("device")).unwrap();
            assert!(device.is_file() && device.len() == 0);
            assert!(attribute(&root.join("device"), "trusted.overlay.whiteout").is_some());
            let names = fs::read_dir(root).unwrap().count();
            assert_eq!(names, 3 * attacks.len() + 4, "secret, secret2, dir, device");
        });
    }
}

/// Names that are no text, and the deepest directory that a path can say, are there for whoever asks.
#[test]
fn names_that_are_bytes_can_be_opened() {
    if !can_mount("names_that_are_bytes_can_be_opened") {
        return;
    }
    use std::os::unix::ffi::OsStrExt;
    let names: [&[u8]; 3] = [b"new\nline", b"\x1b[2J", b"\xff\xfe"];
    let mut tar = Tar::new();
    for name in names {
        tar = tar.head(&Head { size: 3, ..Head::new(b'0', name) }).data(b"abc");
    }
    let deep = "d/".repeat(1500);
    tar = tar.pax(&[("path", deep.as_bytes())]).dir("x");
    mounted(&[Blob::plain(tar.end())], Access::ReadOnly, |root| {
        for name in names {
            let path = root.join(std::ffi::OsStr::from_bytes(name));
            assert_eq!(fs::read(path).unwrap(), b"abc");
        }
        assert!(root.join(&deep).is_dir());
    });
}
