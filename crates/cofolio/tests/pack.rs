//! `cofolio pack`: the kernel and fsck.erofs find the whole image over its segments.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{
    Sandbox, Tar, can_mount, fsck_erofs, listing, real_redis, skip, unlock, write_layout,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::Value;

fn pack(sandbox: &Sandbox, args: &[&str]) -> Value {
    sandbox.run(&[&["pack", "--json"], args].concat()).json()[0].take()
}

fn file_of(sandbox: &Sandbox, name: String) -> PathBuf {
    sandbox.path("store/domains/default/segments").join(name)
}

/// The files of a pack: itself, and its segments.
fn files(sandbox: &Sandbox, report: &Value) -> (PathBuf, Vec<PathBuf>) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let (image, digest) = (text(&report["image"]), text(&report["pack"]));
    let segments = report["segments"].as_array().unwrap();
    let segments = segments.iter().map(|it| file_of(sandbox, format!("{}.segment", text(it))));
    let suffix = if report["form"] == "dax" { "dax" } else { "pack" };
    (file_of(sandbox, format!("{image}.{digest}.{suffix}")), segments.collect())
}

/// How many blocks a segment says that it has.
fn blocks_of(segment: &[u8]) -> usize {
    let blocks = &segment[segment.len() - 64 + 16..][..4];
    u32::from_le_bytes(blocks.try_into().unwrap()) as usize
}

/// What fsck.erofs is to be given for a pack. Compressed content on devices it does not find, so it gets one file of them
/// and the pack, which says nothing of devices any more: each lies where the pack has it in the address space of all.
fn for_fsck(sandbox: &Sandbox, report: &Value) -> Vec<String> {
    let (pack, segments) = files(sandbox, report);
    if report["form"] != "lz4" {
        let devices = segments.iter().map(|path| format!("--device={}", path.display()));
        return devices.chain([pack.display().to_string()]).collect();
    }
    let mut flat = fs::read(&pack).unwrap();
    for segment in segments {
        let bytes = fs::read(&segment).unwrap();
        flat.extend_from_slice(&bytes[..blocks_of(&bytes) * 4096]);
    }
    let incompat = 1024 + 80;
    flat[incompat] &= !0x08;
    flat[1024 + 86..1024 + 88].fill(0);
    let file = sandbox.path("flat");
    fs::write(&file, flat).unwrap();
    vec![file.display().to_string()]
}

/// What the kernel and fsck.erofs see of a pack is what a mount of the image shows.
fn check(test: &str, sandbox: &Sandbox, image: &str, report: &Value) {
    let mounted = sandbox.text("mounted");
    sandbox.run(&["mount", "--create", image, &mounted]).ok();
    let expected = listing(Path::new(&mounted));
    let contents_expected = contents(Path::new(&mounted));
    sandbox.run(&["umount", &mounted]).ok();
    let (pack, segments) = files(sandbox, report);
    match fsck_erofs() {
        None => skip(test, "no fsck.erofs that knows digests"),
        Some(fsck) => {
            let top = sandbox.path("extracted");
            let extract = format!("--extract={}", top.display());
            let digests = (report["form"] != "dax").then_some("--xattr-inode-digest");
            for what in digests.into_iter().chain([&*extract]) {
                let said = Command::new(&fsck).arg(what).args(for_fsck(sandbox, report)).output();
                let said = said.unwrap();
                assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
            }
            let found = std::panic::catch_unwind(|| contents(&top));
            fs::remove_dir_all(&top).unwrap();
            assert!(found.unwrap() == contents_expected);
        }
    }
    let top = sandbox.dir("top");
    let devices: Vec<_> =
        segments.iter().map(|path| format!("device={}", path.display())).collect();
    let options = CString::new(devices.join(",")).unwrap();
    match mount(&pack, &top, "erofs", MountFlags::RDONLY, &*options) {
        Err(rustix::io::Errno::NOTBLK) => {
            return skip(test, "this kernel mounts no EROFS without a block device");
        }
        other => other.unwrap(),
    }
    let found = std::panic::catch_unwind(|| listing(&top));
    unmount(&top, UnmountFlags::DETACH).unwrap();
    assert_eq!(found.unwrap(), expected);
}

/// Regular files below a directory with their contents, without zeros at the end, which fsck.erofs leaves out.
fn contents(top: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![top.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                let mut bytes = fs::read(entry.path()).unwrap();
                bytes.truncate(bytes.iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1));
                found.insert(entry.path().strip_prefix(top).unwrap().to_owned(), bytes);
            }
        }
    }
    found
}

#[test]
fn packs_hold_what_their_images_hold_and_share_what_is_the_same() {
    let test = "packs_hold_what_their_images_hold_and_share_what_is_the_same";
    if !can_mount(test) {
        return;
    }
    hold_and_share(test, &[]);
    hold_and_share(test, &["--lz4"]);
    hold_and_share(test, &["--vm"]);
}

fn hold_and_share(test: &str, form: &[&str]) {
    let pack = |sandbox: &Sandbox, args: &[&str]| pack(sandbox, &[form, args].concat());
    let sandbox = Sandbox::new();
    let tree = sandbox.tree("tree");
    fs::write(tree.join("empty"), b"").unwrap();
    fs::write(tree.join("again"), vec![b'x'; 100_000]).unwrap();
    fs::hard_link(tree.join("big"), tree.join("etc/hard")).unwrap();
    let sparse = fs::File::create(tree.join("sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    sparse.write_all_at(b"data", 1_000_000).unwrap();
    Command::new("mkfifo").arg(tree.join("pipe")).status().unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:1", tree.to_str().unwrap()]).ok();
    fs::write(tree.join("etc/hostname"), "another\n").unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:2", tree.to_str().unwrap()]).ok();

    let one = pack(&sandbox, &["box:1"]);
    check(test, &sandbox, "box:1", &one);
    let two = pack(&sandbox, &["box:2"]);
    check(test, &sandbox, "box:2", &two);
    assert_eq!((&one["new_segments"], &two["new_segments"]), (&1.into(), &1.into()));
    assert_eq!(two["new_bytes"], "another\n".len());
    assert!(two["segments"].as_array().unwrap().contains(&one["segments"][0]));
    let again = pack(&sandbox, &["box:1"]);
    assert_eq!((&again["was_there"], &again["pack"]), (&true.into(), &one["pack"]));
    assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));

    // What is left of an image that is gone can be got rid of, though another needs a part of it.
    fs::remove_file(tree.join("big")).unwrap();
    fs::remove_file(tree.join("etc/hard")).unwrap();
    fs::remove_file(tree.join("again")).unwrap();
    fs::remove_file(tree.join("sparse")).unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:3", tree.to_str().unwrap()]).ok();
    pack(&sandbox, &["box:3"]);
    sandbox.run(&["rm", "box:1", "box:2"]).ok();
    let first = file_of(&sandbox, format!("{}.segment", one["segments"][0].as_str().unwrap()));
    assert!(first.exists());
    let three = pack(&sandbox, &["--again", "box:3"]);
    check(test, &sandbox, "box:3", &three);
    let gone = sandbox.run(&["gc", "--json"]).json();
    assert!(gone["segments"].as_u64().unwrap() >= 1, "{gone}");
    assert!(!first.exists());
    check(test, &sandbox, "box:3", &three);

    let kind = form.iter().filter(|option| **option == "--vm");
    let remove: Vec<_> = ["pack", "--remove", "box:3"].iter().chain(kind).copied().collect();
    sandbox.run(&remove).ok();
    sandbox.run(&remove).fails_with(3);
    sandbox.run(&["gc"]).ok();
    let left = fs::read_dir(sandbox.path("store/domains/default/segments")).unwrap();
    assert_eq!(left.count(), 0);
    sandbox.run(&["pack", "nowhere"]).fails_with(3);
}

/// Bytes that cannot be compressed, and that no other seed gives.
fn noise(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) + 1;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..len).map(step).collect()
}

/// What a base brings lies in segments of its own, though its files and the application's are mixed by name: an image on it
/// can go and leaves them whole, whichever was packed first.
#[test]
fn layers_have_segments_of_their_own() {
    let layer = |files: &[(&str, u32, usize)]| {
        let mut tar = Tar::default();
        files.iter().for_each(|(path, seed, len)| {
            tar.file(path, 0o644, &noise(*seed, *len));
        });
        tar.finish()
    };
    // What is too little for a segment goes with the next layer.
    let base = [layer(&[("b", 1, 3 << 20), ("d", 2, 3 << 20)]), layer(&[("tiny", 3, 5000)])];
    let app = layer(&[("a", 4, 3 << 20), ("c", 5, 2 << 20), ("again", 1, 3 << 20)]);
    for form in [&[] as &[&str], &["--lz4"]] {
        let sandbox = Sandbox::new();
        let import = |name: &str, layers: &[Vec<u8>]| {
            let layout = sandbox.dir(name);
            write_layout(&layout, name, layers, serde_json::json!({}));
            sandbox.run(&["import", "--quiet", "--name", name, layout.to_str().unwrap()]).ok();
            pack(&sandbox, &[form, &[name]].concat())
        };
        let of_app = import("app", &[&base[..], std::slice::from_ref(&app)].concat());
        assert_eq!(of_app["new_segments"], 2);
        let of_base = import("base", &base[..1]);
        assert_eq!((&of_base["new_segments"], &of_base["new_bytes"]), (&0.into(), &0.into()));
        assert_eq!(of_base["segments"].as_array().unwrap().len(), 1);
        assert!(of_app["segments"].as_array().unwrap().contains(&of_base["segments"][0]));
        sandbox.run(&["rm", "app"]).ok();
        let gone = sandbox.run(&["gc", "--json"]).json();
        assert_eq!((&gone["segments"], &gone["packs"]), (&1.into(), &1.into()), "{gone}");
        assert_eq!(gone["rewritten"]["segments"], serde_json::json!([]));
        assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));
        assert!(files(&sandbox, &of_base).1[0].exists());
    }
}

/// A segment of which the images that are left need a little: its room comes back, and nothing that is mounted or cannot
/// be packed loses anything.
#[test]
fn gc_writes_segments_anew_of_which_little_is_used() {
    let test = "gc_writes_segments_anew_of_which_little_is_used";
    if !can_mount(test) {
        return;
    }
    for form in [&[] as &[&str], &["--lz4"]] {
        let sandbox = Sandbox::new();
        let import = |name: &str, files: &[(&str, u32, usize)]| {
            let tree = sandbox.dir(name);
            for (path, seed, len) in files {
                fs::write(tree.join(path), noise(*seed, *len)).unwrap();
            }
            sandbox.run(&["import", "--quiet", "--name", name, tree.to_str().unwrap()]).ok();
            pack(&sandbox, &[form, &[name]].concat())
        };
        let small = 100_000;
        let one = import("one", &[("alone", 1, 1 << 20), ("shared", 2, small)]);
        let two = import("two", &[("shared", 2, small), ("own", 3, 50_000)]);
        let three = import("three", &[("shared", 2, small), ("more", 4, 60_000)]);
        let first = files(&sandbox, &one).1.remove(0);
        let gc = |args: &[&str]| sandbox.run(&[&["gc", "--json"], args].concat()).json();
        assert_eq!(gc(&[])["rewritten"]["segments"], serde_json::json!([]), "all of it is used");
        sandbox.run(&["rm", "one"]).ok();
        // What is mounted has it open: its room would not come back.
        let mounted = sandbox.text("mounted");
        sandbox.run(&["mount", "--create", "two", &mounted]).ok();
        assert_eq!(gc(&[])["rewritten"]["segments"], serde_json::json!([]));
        sandbox.run(&["umount", &mounted]).ok();
        assert!(first.exists());
        let would = gc(&["--dry-run"]);
        assert_eq!(would["rewritten"]["segments"][0], one["segments"][0]);
        assert_eq!((&would["segments"], first.exists()), (&0.into(), true));

        // An object that is lost: its content is still in the segment, which stays for both.
        let object = cofolio_store::verity::digest(&noise(2, small)).object_path();
        let object = sandbox.path("store/domains/default/objects").join(object);
        unlock(&object).unwrap();
        fs::rename(&object, sandbox.path("lost")).unwrap();
        let ran = sandbox.run(&["gc", "--json"]);
        let failed = ran.json()["rewritten"]["failed"].take();
        assert_eq!(failed.as_array().unwrap().len(), 2, "{failed}");
        assert!(ran.stderr.contains("could not be packed anew"), "{}", ran.stderr);
        assert!(first.exists());
        fs::rename(sandbox.path("lost"), &object).unwrap();

        let gone = gc(&[]);
        assert_eq!(gone["rewritten"]["segments"], serde_json::json!([one["segments"][0]]));
        assert_eq!(gone["rewritten"]["images"].as_array().unwrap().len(), 2);
        assert_eq!(gone["rewritten"]["new_bytes"], small, "once for both");
        assert_eq!(gone["segments"], 1);
        assert!(!first.exists());
        for (name, before) in [("two", two), ("three", three)] {
            let report = pack(&sandbox, &[form, &[name]].concat());
            assert_eq!(report["was_there"], true);
            assert_ne!(report["pack"], before["pack"]);
            check(test, &sandbox, name, &report);
        }
        assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));
        assert_eq!(gc(&[])["rewritten"]["segments"], serde_json::json!([]));
    }
}

/// Two versions of a program are the same for the most part. What they have in common, from a multiple of 64 KiB on, is
/// in the segment of the one that was packed first, which stays as long as anything of it is needed, and for no longer.
#[test]
fn pages_that_two_versions_have_are_in_one_place() {
    let test = "pages_that_two_versions_have_are_in_one_place";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let chunk = 64 << 10;
    let import = |name: &str, program: &[u8]| {
        let tree = sandbox.dir(name);
        fs::write(tree.join("library"), noise(2, 100_000)).unwrap();
        fs::write(tree.join("program"), program).unwrap();
        sandbox.run(&["import", "--quiet", "--name", name, tree.to_str().unwrap()]).ok();
        let report = pack(&sandbox, &[name]);
        check(test, &sandbox, name, &report);
        report
    };
    let mut program = noise(1, 48 * chunk + 5);
    let one = import("one", &program);
    program[12 * chunk] ^= 1;
    program.splice(24 * chunk..25 * chunk, vec![0; chunk]);
    let two = import("two", &program);
    let three = import("three", &[&program[..10 * chunk], b"!"].concat());
    for (report, blocks) in [(&one, 769 + 25), (&two, 16), (&three, 1)] {
        let last = files(&sandbox, report).1.pop().unwrap();
        assert_eq!(blocks_of(&fs::read(last).unwrap()), blocks);
    }
    let again = pack(&sandbox, &["--again", "two"]);
    let sorted = |report: &Value| {
        let mut segments = files(&sandbox, report).1;
        segments.sort();
        segments
    };
    assert_eq!((&again["new_segments"], sorted(&again)), (&0.into(), sorted(&two)));
    check(test, &sandbox, "two", &again);
    assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));

    let first = files(&sandbox, &one).1.remove(0);
    let gc = || sandbox.run(&["gc", "--json"]).json();
    sandbox.run(&["rm", "one"]).ok();
    assert_eq!(gc()["rewritten"]["segments"], serde_json::json!([]), "most of it is used");
    sandbox.run(&["rm", "two"]).ok();
    let gone = gc();
    assert_eq!(gone["rewritten"]["images"], serde_json::json!([three["image"]]), "{gone}");
    assert!(!first.exists());
    let last = pack(&sandbox, &["three"]);
    assert_eq!(last["was_there"], true);
    check(test, &sandbox, "three", &last);
    assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));
}

#[test]
fn a_real_image_is_packed() {
    let test = "a_real_image_is_packed";
    let Some(layout) = real_redis(test).filter(|_| can_mount(test)) else { return };
    let sandbox = Sandbox::new();
    let source = format!("oci:{}", layout.display());
    sandbox.run(&["import", "--quiet", "--name", "redis:old", &source]).ok();
    let plain = pack(&sandbox, &["redis:old"]);
    check(test, &sandbox, "redis:old", &plain);
    let size = |report: &Value| -> u64 {
        files(&sandbox, report).1.iter().map(|path| fs::metadata(path).unwrap().len()).sum()
    };
    let plain_size = size(&plain);
    // Another form takes the place of the one that is there, from the objects.
    let small = pack(&sandbox, &["--lz4", "redis:old"]);
    assert_eq!((&small["was_there"], &small["form"]), (&false.into(), &"lz4".into()));
    check(test, &sandbox, "redis:old", &small);
    assert!(size(&small) < plain_size * 2 / 3, "{} of {plain_size}", size(&small));
    assert_eq!(pack(&sandbox, &["--lz4", "redis:old"])["was_there"], true);
    let gone = sandbox.run(&["gc", "--json"]).json();
    assert_eq!(gone["segments"], plain["segments"].as_array().unwrap().len());
    assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));
    sandbox.run(&["verify", "redis:old"]).ok();
    // One for virtual machines takes no other's place.
    let guests = pack(&sandbox, &["--vm", "redis:old"]);
    check(test, &sandbox, "redis:old", &guests);
    let (dax, segments) = files(&sandbox, &guests);
    for file in segments.iter().chain([&dax]) {
        assert_eq!(fs::metadata(file).unwrap().len() % (2 << 20), 0, "{}", file.display());
    }
    // Its kernel can be one before Linux 6.4, which refuses what it does not know of a superblock:
    // chunks (bit 2) and devices (bit 3) it knows.
    let superblock = &fs::read(&dax).unwrap()[1024..];
    assert_eq!(superblock[80..84], [0b1100, 0, 0, 0]);
    assert_eq!(pack(&sandbox, &["--lz4", "redis:old"])["was_there"], true);
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["segments"], 0);
    assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));
    sandbox.run(&["verify", "redis:old"]).ok();
}

/// A guest pays for every device and all of its size, whether it reads it or not. What versions have in common lies in the
/// segments of earlier ones, so each would need a part of all before it.
#[test]
fn a_pack_for_guests_needs_few_segments_and_little_beside_its_image() {
    let test = "a_pack_for_guests_needs_few_segments_and_little_beside_its_image";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    // Of 64 files of 256 KiB, each version has two new ones.
    let mut versions = [0_u32; 64];
    for version in 1..30_u32 {
        let name = format!("v{version}");
        let tree = sandbox.dir(&name);
        for (number, changed) in (0..).zip(&mut versions) {
            if number / 2 == version % 32 {
                *changed = version;
            }
            let seed = number * 100 + *changed;
            fs::write(tree.join(number.to_string()), noise(seed, 256 << 10)).unwrap();
        }
        sandbox.run(&["import", "--quiet", "--name", &name, tree.to_str().unwrap()]).ok();
        let report = pack(&sandbox, &["--vm", &name]);
        let segments = files(&sandbox, &report).1;
        let sizes = segments.iter().map(|segment| blocks_of(&fs::read(segment).unwrap()) * 4096);
        let attached: usize = sizes.sum();
        assert!(attached <= 24 << 20, "{attached} bytes for 16 MiB of version {version}");
        assert!(segments.len() <= 17, "{} segments", segments.len());
        if version == 29 {
            check(test, &sandbox, &name, &report);
        }
    }
}

/// An object that was altered must not get into a segment under its old name; a segment that was altered is removed
/// and made again.
#[test]
fn what_is_altered_is_not_packed_and_a_damaged_pack_is_made_again() {
    altered_and_made_again(&[]);
    altered_and_made_again(&["--lz4"]);
}

fn altered_and_made_again(form: &[&str]) {
    let args = [form, &["box:1"]].concat();
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let alter = |path: &Path| {
        unlock(path).unwrap();
        let mut bytes = fs::read(path).unwrap();
        bytes[0] ^= 1;
        let temporary = path.with_extension("new");
        fs::write(&temporary, &bytes).unwrap();
        fs::set_permissions(&temporary, std::os::unix::fs::PermissionsExt::from_mode(0o444))
            .unwrap();
        fs::rename(temporary, path).unwrap();
    };
    let objects = sandbox.path("store/domains/default/objects");
    let big = cofolio_store::verity::digest(&[b'x'; 100_000]).object_path();
    alter(&objects.join(&big));
    let refused = sandbox.run(&[&["pack"], &args[..]].concat());
    let error = refused.fails_with(4);
    assert!(error.stderr.contains(&big), "{}", error.stderr);
    let segments = sandbox.path("store/domains/default/segments");
    assert_eq!(fs::read_dir(&segments).unwrap().count(), 0);
    alter(&objects.join(&big));

    let report = pack(&sandbox, &args);
    let (_, files) = files(&sandbox, &report);
    alter(&files[0]);
    assert!(sandbox.run(&["fsck"]).fails_with(4).stdout.contains("segment-altered"));
    sandbox.run(&["verify", "box:1"]).fails_with(4);
    sandbox.run(&["verify", "--scrub", "--all"]).fails_with(4);
    let repaired = sandbox.run(&["fsck", "--repair", "--json"]).json();
    assert_eq!(repaired["unpacked"][0], report["image"]);
    assert_eq!(pack(&sandbox, &args)["pack"], report["pack"]);
    sandbox.run(&["verify", "box:1"]).ok();
}
