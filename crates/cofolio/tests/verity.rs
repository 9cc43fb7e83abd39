//! A store with fs-verity, mounted: the kernel enforces the digests that the image names, reads give the right bytes, and
//! nothing that was altered is ever read, however it was altered. On ext4 and btrfs, in a guest where this machine's kernel
//! has no fs-verity (`tests/vm/run verity-mount`); `backend.rs` does the same for segments and packs.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::volume::{Volume, run};
use common::{Sandbox, can_mount, has_inode_share, program, skip};

/// Numbers from this one to 150,000, a line each.
fn numbers(first: u32) -> Vec<u8> {
    (first..=150_000).map(|number| format!("{number}\n")).collect::<String>().into_bytes()
}

/// A store on a filesystem with fs-verity, and an image in it.
struct Verified {
    sandbox: Sandbox,
    tree: PathBuf,
    volume: Volume,
    _dir: tempfile::TempDir,
}

/// What is put in a file's place: its bytes, and whether they have fs-verity of their own.
type Damage = (&'static str, fn(Vec<u8>) -> Vec<u8>, bool);

fn other(mut bytes: Vec<u8>) -> Vec<u8> {
    let middle = bytes.len() / 2;
    bytes[0] ^= 1;
    bytes[middle] ^= 1;
    bytes
}

fn cut(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() / 2);
    bytes
}

const DAMAGES: [Damage; 5] = [
    ("other bytes, with fs-verity", other, true),
    ("other bytes", other, false),
    // Nothing would check them tomorrow.
    ("the same bytes without fs-verity", |bytes| bytes, false),
    ("half of the bytes, with fs-verity", cut, true),
    ("half of the bytes", cut, false),
];

impl Verified {
    fn new(kind: &str) -> Result<Verified, String> {
        let dir = tempfile::tempdir().unwrap();
        let mkfs: &[&str] = if kind == "ext4" { &["-b", "4096", "-O", "verity"] } else { &[] };
        let volume = Volume::new(dir.path(), kind, 400, mkfs)?;
        let sandbox = Sandbox::below(&volume.directory);
        // Two files above a Merkle tree's first level, one of a page, one of no blocks at all, one with two names.
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("etc")).unwrap();
        for (name, first) in [("one", 1), ("two", 2), ("three", 3)] {
            fs::write(tree.join(name), numbers(first)).unwrap();
        }
        // Its own: garbage collection keeps an image that is mounted, in whichever store another test mounts the same.
        let name = format!("{}\n", dir.path().display());
        fs::write(tree.join("etc/hostname"), name).unwrap();
        fs::hard_link(tree.join("etc/hostname"), tree.join("etc/name")).unwrap();
        fs::write(tree.join("empty"), "").unwrap();
        fs::set_permissions(tree.join("two"), fs::Permissions::from_mode(0o4755)).unwrap();
        let source = tree.to_str().unwrap();
        sandbox.run(&["import", "--quiet", "--name", "box:1", source]).ok();
        if !sandbox.run(&["doctor"]).ok().contains("by the kernel, every read (fs-verity)") {
            return Err("no fs-verity here".to_owned());
        }
        Ok(Verified { sandbox, tree, volume, _dir: dir })
    }

    fn digest(&self) -> String {
        let report = self.sandbox.run(&["inspect", "--json", "box:1"]).json();
        report["image"].as_str().unwrap().to_owned()
    }

    fn image(&self) -> PathBuf {
        let images = self.sandbox.path("store/domains/default/images");
        images.join(format!("{}.erofs", self.digest()))
    }

    /// Mounts the image; gives where.
    fn mount(&self, options: &[&str]) -> PathBuf {
        let target = self.sandbox.path("box");
        let at = target.to_str().unwrap();
        self.sandbox
            .run(&[&["mount", "--quiet", "--create"], options, &["box:1", at]].concat())
            .ok();
        target
    }

    fn unmount(&self) {
        self.sandbox.run(&["umount", "--quiet", &self.sandbox.text("box")]).ok();
    }

    /// What is mounted there is what came in.
    #[track_caller]
    fn is_whole(&self, target: &Path) {
        run(Command::new("diff").arg("-r").args([&self.tree, target])).unwrap();
    }

    /// Files below objects and images, with the digest that each is named by.
    fn stored(&self) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        for top in ["objects", "images"] {
            let top = self.sandbox.path("store/domains/default").join(top);
            let mut open = vec![top.clone()];
            while let Some(path) = open.pop() {
                if path.is_dir() {
                    open.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
                } else {
                    let name = path.strip_prefix(&top).unwrap().to_str().unwrap();
                    let name = name.replace('/', "").replace(".erofs", "");
                    found.push((path, name));
                }
            }
        }
        found
    }

    /// Changes a byte of a block of 4 KiB of this file on the disk itself, below the filesystem.
    fn rot(&self, file: &Path, block: u64) {
        let said = Command::new("filefrag").args(["-v", "-b4096"]).arg(file).output().unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        // "   0:        0..     239:      34304..     34543:    240: …"
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let at = said.lines().find_map(|line| {
            let mut parts = line.split(':');
            number(parts.next()?)?;
            let (first, last) = parts.next()?.split_once("..")?;
            let (first, last) = (number(first)?, number(last)?);
            let physical = number(parts.next()?.split_once("..")?.0)?;
            (first..=last).contains(&block).then(|| physical + block - first)
        });
        let at = at.unwrap_or_else(|| panic!("no block {block} in: {said}")) * 4096 + 5;
        let disk = File::options().write(true).open(self.volume.device()).unwrap();
        disk.write_all_at(b"!", at).unwrap();
        drop(disk);
        forget_caches();
    }

    /// Nothing keeps what is damaged from going.
    fn goes(&self) {
        self.sandbox.run(&["rm", "--quiet", "box:1"]).ok();
        self.sandbox.run(&["gc", "--quiet"]).ok();
        assert_eq!(self.stored(), []);
    }
}

/// The kernel forgets what it read: the next read comes from the disk.
fn forget_caches() {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// The kernel refuses it, and does not only give less.
#[track_caller]
fn is_refused<T>(what: &str, result: std::io::Result<T>) {
    let error = result.map(|_| ()).expect_err(what);
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{what}: {error}");
}

/// Runs a test on every filesystem that has fs-verity here.
fn on_each(test: &str, kinds: &[&str], body: impl Fn(&Verified, &str)) {
    if !can_mount(test) {
        return;
    }
    if program("fsverity").is_none() {
        return skip(test, "no fsverity");
    }
    for kind in kinds {
        match Verified::new(kind) {
            Ok(verified) => body(&verified, kind),
            Err(reason) => skip(test, &format!("{kind}: {reason}")),
        }
    }
}

#[test]
fn the_kernel_has_our_digests_and_checks_what_is_read() {
    let test = "the_kernel_has_our_digests_and_checks_what_is_read";
    on_each(test, &["ext4", "btrfs"], |at, _| {
        let sandbox = &at.sandbox;
        let stored = at.stored();
        assert_eq!(stored.len(), 5, "{stored:?}");
        for (path, name) in stored {
            let said = Command::new("fsverity").arg("measure").arg(&path).output().unwrap();
            let said = String::from_utf8(said.stdout).unwrap();
            assert_eq!(said, format!("sha256:{name} {}\n", path.display()));
        }

        // Read-only and writable: the right bytes, with verity in force.
        forget_caches();
        let options = |target: &Path| {
            let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let name = format!(" {} ", fs::canonicalize(target).unwrap().display());
            table.lines().find(|line| line.contains(&name)).unwrap().to_owned()
        };
        let mount = |args: &[&str], name: &str| {
            let target = sandbox.text(name);
            sandbox.run(&[&["mount", "--quiet", "--create"], args, &[&target]].concat()).ok();
            at.is_whole(Path::new(&target));
            assert!(options(Path::new(&target)).contains("verity=require"), "{name}");
            PathBuf::from(target)
        };
        mount(&["box:1"], "ro");
        let written = mount(&["--rw", "box:1"], "rw");
        assert!(sandbox.run(&["mounts"]).ok().contains("kernel"));

        // Required, and there: by name, by digest, and by digest alone.
        let digest = at.digest();
        let required = ["--require-verity", "--digest", &digest, "box:1"];
        for (args, name) in [(&required[..], "required"), (&required[..3], "exact")] {
            let target = mount(args, name);
            sandbox.run(&["umount", "--quiet", target.to_str().unwrap()]).ok();
        }
        // A mount of the image that is as it was made before the store had fs-verity is not built upon.
        let run = fs::read_dir(sandbox.path("run")).unwrap().next().unwrap().unwrap().path();
        let pin = run.join("images/default").join(&digest).join("pin.json");
        let record = fs::read_to_string(&pin).unwrap();
        let without = record.replace("\"verity\": true", "\"verity\": false");
        let without = without.replace("\"verity\":true", "\"verity\":false");
        assert_ne!(record, without);
        fs::write(&pin, without).unwrap();
        let target = sandbox.text("required");
        sandbox
            .run(&["mount", "--require-verity", "box:1", "--create", &target])
            .refused("mounted without fs-verity");
        fs::write(&pin, record).unwrap();

        File::options()
            .append(true)
            .open(written.join("one"))
            .unwrap()
            .write_all(b"more\n")
            .unwrap();
        fs::set_permissions(written.join("two"), fs::Permissions::from_mode(0o700)).unwrap();
        forget_caches();
        assert!(fs::read(written.join("one")).unwrap() == [&numbers(1)[..], b"more\n"].concat());
        assert!(fs::read(written.join("two")).unwrap() == numbers(2));
        sandbox.run(&["umount", "--quiet", "--all"]).ok();
        at.goes();
    });
}

#[test]
fn an_object_that_was_replaced_is_refused_when_it_is_opened() {
    let test = "an_object_that_was_replaced_is_refused_when_it_is_opened";
    on_each(test, &["ext4", "btrfs"], |at, kind| {
        let two = at.sandbox.object("box:1", "/two");
        for (how, change, verity) in DAMAGES {
            let replaced = at.sandbox.replace(&two, &change(numbers(2)), verity);
            for options in [&[] as &[&str], &["--rw"]] {
                let target = at.mount(options);
                let what = format!("{kind}: {how} {options:?}");
                is_refused(&what, File::open(target.join("two")));
                assert!(fs::read(target.join("one")).unwrap() == numbers(1), "{what}");
                at.unmount();
            }
            replaced.restore();
        }
        let target = at.mount(&[]);
        at.is_whole(&target);

        // Replaced while it is mounted and known to be good: the right bytes or none.
        let replaced = at.sandbox.replace(&two, &other(numbers(2)), true);
        forget_caches();
        if let Ok(bytes) = fs::read(target.join("two")) {
            assert!(bytes == numbers(2));
        }
        at.unmount();
        replaced.restore();
        at.goes();
    });
}

/// Without fs-verity it is refused even with the right bytes, since nothing would check them tomorrow.
#[test]
fn an_image_that_was_replaced_is_refused_at_the_mount() {
    let test = "an_image_that_was_replaced_is_refused_at_the_mount";
    on_each(test, &["ext4", "btrfs"], |at, _| {
        let (image, digest, target) = (at.image(), at.digest(), at.sandbox.text("box"));
        let bytes = fs::read(&image).unwrap();
        for (how, change, verity) in DAMAGES {
            let replaced = at.sandbox.replace(&image, &change(bytes.clone()), verity);
            let ran = at.sandbox.run(&["mount", "--create", "box:1", &target]);
            let error = ran.refused(&digest).stderr.lines().next();
            eprintln!("   {how}: {}", error.unwrap_or_default());
            assert_eq!(at.sandbox.mounted(), Vec::<PathBuf>::new(), "{how}");
            replaced.restore();
        }
        at.is_whole(&at.mount(&[]));
        at.unmount();
        at.goes();
    });
}

/// btrfs has checksums of its own, and says nowhere where a file's blocks are.
#[test]
fn what_rots_on_the_disk_is_not_read() {
    let test = "what_rots_on_the_disk_is_not_read";
    if program("filefrag").is_none() {
        return skip(test, "no filefrag");
    }
    on_each(test, &["ext4"], |at, _| {
        let two = at.sandbox.object("box:1", "/two");
        forget_caches();
        at.rot(&two, 100);
        let target = at.mount(&[]);
        let file = File::open(target.join("two")).unwrap();
        let mut block = vec![0; 4096];
        is_refused("block 100", file.read_at(&mut block, 100 * 4096));
        assert!(block == [0; 4096], "the kernel gave bytes with its error");
        file.read_exact_at(&mut block, 0).unwrap();
        assert!(block == numbers(2)[..4096]);
        drop(file);
        at.unmount();
        let name = two.file_name().unwrap().to_str().unwrap();
        // It once ended here with an error that named the file, and found nothing else.
        let fsck = at.sandbox.run(&["fsck"]).fails_with(4).stdout.clone();
        let line = fsck.lines().find(|line| line.contains(name)).unwrap_or_default();
        assert!(line.contains("object-unreadable") && line.contains("/two"), "{fsck}");
        assert!(fsck.contains("damaged; looked at "), "it went on to the end: {fsck}");
        at.rot(&at.image(), 0);
        let target = at.sandbox.text("box");
        at.sandbox.run(&["mount", "--create", "box:1", &target]).refused("Input/output error");
        at.goes();
    });
}

/// Segments and packs are read by the kernel alone, and long after the mount has looked at them.
#[test]
fn what_rots_in_a_segment_is_not_read() {
    let test = "what_rots_in_a_segment_is_not_read";
    if program("filefrag").is_none() {
        return skip(test, "no filefrag");
    }
    if !has_inode_share(test) {
        return;
    }
    on_each(test, &["ext4"], |at, _| {
        at.sandbox.run(&["backend", "inode-share"]).ok();
        let packed = at.sandbox.run(&["pack", "--json", "box:1"]).json()[0].take();
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let segments = at.sandbox.path("store/domains/default/segments");
        let segment = segments.join(format!("{}.segment", text(&packed["segments"][0])));
        let pack = format!("{}.{}.pack", text(&packed["image"]), text(&packed["pack"]));
        at.is_whole(&at.mount(&[]));
        at.unmount();
        forget_caches();
        let blocks = fs::metadata(&segment).unwrap().len() / 4096;
        at.rot(&segment, blocks / 2);
        for options in [&[] as &[&str], &["--rw"]] {
            let target = at.mount(options);
            let mut refused = 0;
            for (name, first) in [("one", 1), ("two", 2), ("three", 3)] {
                let (expected, file) = (numbers(first), File::open(target.join(name)).unwrap());
                for (page, expected) in (0_u64..).zip(expected.chunks(4096)) {
                    let mut bytes = vec![0; expected.len()];
                    match file.read_exact_at(&mut bytes, page * 4096) {
                        Ok(()) => assert!(bytes == expected, "page {page} of {name}"),
                        Err(error) => {
                            is_refused::<()>(name, Err(error));
                            refused += 1;
                        }
                    }
                }
            }
            // The page of the block, and at most those that the kernel reads together with it.
            assert!((1..=32).contains(&refused), "{refused} pages were refused");
            at.unmount();
        }
        at.rot(&segments.join(pack), 0);
        let target = at.sandbox.text("box");
        let ran = at.sandbox.run(&["mount", "--create", "box:1", &target]);
        assert_ne!(ran.refused("").code, 0);
        eprintln!("   {}", ran.stderr.lines().next().unwrap_or_default());
        assert_eq!(at.sandbox.mounted(), Vec::<PathBuf>::new());
        at.goes();
    });
}

/// A mount from protected storage looks at no object and hashes the image. A damaged object is found by
/// `mount --verify`, `verify` and `fsck`, and doctor says that the kernel does not check what is read.
#[test]
fn without_it_damage_is_found_and_doctor_says_what_is_not_checked() {
    let test = "without_it_damage_is_found_and_doctor_says_what_is_not_checked";
    if !can_mount(test) {
        return;
    }
    let outer = Sandbox::new();
    let volume = match Volume::new(&outer.path(""), "ext4", 100, &["-O", "^verity"]) {
        Ok(volume) => volume,
        Err(reason) => return skip(test, &reason),
    };
    let sandbox = Sandbox::below(&volume.directory);
    let digest = sandbox.import_tree("box:1");
    let doctor = sandbox.run(&["doctor"]);
    assert!(doctor.ok().contains("the kernel does not check what is read"), "{}", doctor.stdout);
    let image = sandbox.path("store/domains/default/images").join(format!("{digest}.erofs"));
    let object = sandbox.object("box:1", "/big");
    let target = sandbox.text("target");
    for (path, change, refused) in [
        (&object, cut as fn(Vec<u8>) -> Vec<u8>, false),
        (&object, other, false),
        (&image, cut, true),
        (&image, other, true),
    ] {
        let replaced = sandbox.replace(path, &change(fs::read(path).unwrap()), false);
        for options in [&[] as &[&str], &["--rw"]] {
            let args = [&["mount", "--create"], options, &["box:1", &target]].concat();
            let ran = sandbox.run(&args);
            if refused {
                ran.refused(&digest).fails_with(4);
            } else {
                ran.ok();
                sandbox.run(&["umount", &target]).ok();
            }
        }
        sandbox.run(&["mount", "--create", "--verify", "box:1", &target]).fails_with(4);
        sandbox.run(&["verify", "box:1"]).fails_with(4);
        sandbox.run(&["fsck"]).fails_with(4);
        assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
        replaced.restore();
    }
    sandbox.run(&["verify", "box:1"]).ok();
    sandbox.run(&["fsck"]).ok();
}

/// In memory, and on a filesystem that could have it and has not.
#[test]
fn where_there_is_none_it_is_refused_by_name() {
    let test = "where_there_is_none_it_is_refused_by_name";
    if !can_mount(test) {
        return;
    }
    let outer = Sandbox::new();
    let memory = outer.dir("memory");
    run(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&memory)).unwrap();
    let volume = Volume::new(&outer.dir("other"), "ext4", 100, &["-O", "^verity"]);
    let without = volume.as_ref().map(|volume| volume.directory.clone());
    for place in [Ok(memory), without] {
        let place = match place {
            Ok(place) => place,
            Err(reason) => {
                skip(test, reason);
                continue;
            }
        };
        let sandbox = Sandbox::below(&place);
        sandbox.import_tree("box:1");
        let target = sandbox.text("target");
        let ran = sandbox.run(&["mount", "--create", "--require-verity", "box:1", &target]);
        ran.refused("no fs-verity").refused(&sandbox.text("store"));
        sandbox.run(&["mount", "--quiet", "--create", "box:1", &target]).ok();
        sandbox.run(&["umount", "--quiet", &target]).ok();
    }
}
