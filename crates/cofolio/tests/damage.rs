//! Damage to the store: every command that meets it says so with exit code 4 and names the command that
//! mends it, and that command does.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use cofolio_node::cgroup::COMMONS;
use cofolio_node::commons::Commons;
use common::{Ran, Sandbox, Tar, overwrite, remove, skip, write_layout};
use serde_json::json;

const IMAGE: &str = "box:1";
const REPAIR: &str = "`cofolio fsck --repair --from SOURCE`";

/// An imported image of one layer with many small files, and the source that it came from.
struct Imported {
    sandbox: Sandbox,
    source: String,
    domain: PathBuf,
}

impl Imported {
    /// `None`, with a word about it, where files of the store cannot be altered.
    fn new(test: &str) -> Option<Self> {
        let mut tar = Tar::default();
        for number in 0..600_u32 {
            let name = format!("file-{}", number.wrapping_mul(0x9e37_79b9));
            tar.file(&name, 0o644, &number.to_le_bytes());
        }
        let sandbox = Sandbox::new();
        let layout = sandbox.dir("layout");
        write_layout(&layout, IMAGE, &[tar.finish()], json!({}));
        let (source, domain) =
            (format!("oci:{}", layout.display()), sandbox.path("store/domains/default"));
        let imported = Self { sandbox, source, domain };
        imported.run(&["import", &imported.source]).ok();
        let image = imported.image();
        let content = fs::read(&image).unwrap();
        if let Err(reason) = overwrite(&image, &content) {
            skip(test, &reason);
            return None;
        }
        Some(imported)
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.sandbox.run(args)
    }

    fn only(&self, directory: &str, suffix: &str) -> PathBuf {
        let files = fs::read_dir(self.domain.join(directory)).unwrap();
        let mut files = files.map(|entry| entry.unwrap().path());
        files.find(|file| file.to_string_lossy().ends_with(suffix)).unwrap()
    }

    fn image(&self) -> PathBuf {
        self.only("images", ".erofs")
    }

    fn split(&self) -> PathBuf {
        self.only("layers", ".split")
    }

    fn export(&self) -> Ran {
        self.run(&["export", IMAGE, &format!("oci:{}", self.sandbox.text("exported"))])
    }

    /// Everything that damage hits works again.
    #[track_caller]
    fn is_whole(&self) {
        assert!(self.run(&["fsck"]).ok().contains("no damage"));
        self.export().ok();
        fs::remove_dir_all(self.sandbox.path("exported")).unwrap();
    }

    /// Does harm, twice: `fsck --repair --from` mends it, and so does an import.
    #[track_caller]
    fn is_mended_by_both(&self, harm: impl Fn(), finding: &str) {
        for mend in [&["fsck", "--repair", "--from", &self.source][..], &["import", &self.source]] {
            harm();
            let found = self.run(&["fsck"]);
            assert!(found.fails_with(4).stdout.contains(finding), "{}", found.stdout);
            self.run(mend).ok();
            self.is_whole();
        }
    }
}

fn alter(path: &Path, offset: usize) {
    let mut content = fs::read(path).unwrap();
    content[offset..offset + 4].iter_mut().for_each(|byte| *byte ^= 0xa5);
    overwrite(path, &content).unwrap();
}

/// fsck and imports read a split's table of objects only. With its script altered they found no
/// damage, although the layer could not be exported any more.
#[test]
fn altered_split_is_found_and_brought_back() {
    let Some(it) = Imported::new("altered_split_is_found") else { return };
    let split = it.split();
    let good = fs::read(&split).unwrap();
    for offset in (40..good.len() - 4).step_by(good.len() / 6) {
        it.is_mended_by_both(|| alter(&split, offset), "layer-unreadable");
        assert_eq!(fs::read(&split).unwrap(), good, "{offset}");
    }
}

/// An import of an image that lacked an object said "here already" and exited with 0.
#[test]
fn import_brings_back_what_is_missing_or_cut() {
    let Some(it) = Imported::new("import_brings_back") else { return };
    let object = it.sandbox.object(IMAGE, "/file-0");
    it.is_mended_by_both(|| remove(&object).unwrap(), "object-missing");
    it.is_mended_by_both(|| overwrite(&object, b"cut").unwrap(), "object-truncated");
    it.is_mended_by_both(|| remove(&it.image()).unwrap(), "ref-dangling");
    it.is_mended_by_both(|| alter(&it.image(), 1025), "image-altered");
    it.is_mended_by_both(|| remove(&it.split()).unwrap(), "ref-dangling");
    let layer = || it.only("layers", ".dump.zst");
    it.is_mended_by_both(|| remove(&layer()).unwrap(), "ref-dangling");
    it.is_mended_by_both(|| alter(&layer(), 60), "layer-unreadable");
}

/// A truncated image that nothing brought back was "repaired": looked at again it was damaged in another way.
#[test]
fn what_is_damaged_in_another_way_is_not_repaired() {
    let Some(it) = Imported::new("what_is_damaged_in_another_way") else { return };
    let whole = fs::read(it.image()).unwrap();
    for length in [0, 100, 1200, whole.len() / 2, whole.len() - 1] {
        overwrite(&it.image(), &whole[..length]).unwrap();
        let ran = it.run(&["fsck", "--repair"]);
        assert!(!ran.fails_with(4).stdout.contains("repaired"), "{length}: {}", ran.stdout);
    }
}

/// Only `export` said what restores a missing object. Other commands called it "not found", or said
/// nothing about what to do, and fsck ended without a word about it.
#[test]
fn every_command_names_the_repair() {
    let Some(it) = Imported::new("every_command_names_the_repair") else { return };
    let object = it.sandbox.object(IMAGE, "/file-0");
    let (image, layer) = (it.image(), it.only("layers", ".dump.zst"));
    let other = it.sandbox.dir("other");
    fs::write(other.join("file-0"), "others").unwrap();
    it.run(&["import", "--name", "other", other.to_str().unwrap()]).ok();
    let cut = |path: &Path| overwrite(path, &fs::read(path).unwrap()[..2]).unwrap();
    let mnt = it.sandbox.dir("mnt");
    let mount = ["mount", IMAGE, mnt.to_str().unwrap()];
    let export = ["export", IMAGE, &format!("oci:{}", it.sandbox.text("exported"))];
    let (cat, ls, inspect) = (["cat", IMAGE, "/file-0"], ["ls", "-lR", IMAGE], ["inspect", IMAGE]);
    let (pack, diff, warm) = (["pack", IMAGE], ["diff", IMAGE, "other"], ["warm", IMAGE]);
    let can_warm = Commons::open(COMMONS, None).is_ok();
    type Case<'a> = (&'a dyn Fn(), Vec<&'a [&'a str]>);
    let cases: [Case<'_>; 6] = [
        (&|| remove(&object).unwrap(), vec![&cat, &pack, &diff, &warm, &export]),
        (&|| cut(&object), vec![&cat, &pack, &export]),
        (&|| remove(&image).unwrap(), vec![&ls, &cat, &mount, &export, &["verify", IMAGE]]),
        (&|| cut(&image), vec![&ls, &inspect, &cat]),
        (&|| remove(&layer).unwrap(), vec![&export]),
        (&|| remove(&it.split()).unwrap(), vec![&export]),
    ];
    for (number, (harm, commands)) in cases.into_iter().enumerate() {
        harm();
        for command in commands {
            if command[0] == "mount" && !common::can_mount("every_command_names_the_repair") {
                continue;
            }
            if command[0] == "warm" && !can_warm {
                continue;
            }
            let ran = it.run(command);
            ran.fails_with(4);
            assert!(ran.stderr.contains(REPAIR), "{number} {command:?}: {}", ran.stderr);
        }
        let found = it.run(&["fsck"]);
        assert!(found.fails_with(4).stderr.contains(REPAIR), "{number}: {}", found.stderr);
        it.run(&["fsck", "--repair", "--from", &it.source]).ok();
        it.is_whole();
    }
}

/// One flipped bit in a metadata image made it name another object, which does not exist. `gc` deleted the
/// one that it had named before, and said nothing.
#[test]
fn what_an_altered_image_named_is_not_deleted() {
    let test = "what_an_altered_image_named_is_not_deleted";
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    let contents = ["one", "two", "three"].map(|name| name.repeat(10_000));
    for (number, content) in contents.iter().enumerate() {
        fs::write(tree.join(number.to_string()), content).unwrap();
    }
    // Without layers, which would keep the objects, too.
    let source = format!("dir:{}", tree.display());
    sandbox.run(&["import", "--name", IMAGE, &source]).ok();
    let images = fs::read_dir(sandbox.path("store/domains/default/images")).unwrap();
    let image = images.map(|entry| entry.unwrap().path()).next().unwrap();
    let objects = contents.map(|content| {
        let path = cofolio_store::verity::digest(content.as_bytes()).object_path().to_string();
        (path.clone(), sandbox.path("store/domains/default/objects").join(path))
    });
    let sound = fs::read(&image).unwrap();
    for (path, object) in &objects {
        let mut altered = sound.clone();
        let found = altered.windows(path.len()).position(|it| it == path.as_bytes()).unwrap();
        altered[found + path.len() - 1] ^= 1;
        if let Err(reason) = overwrite(&image, &altered) {
            return skip(test, &reason);
        }
        for args in [&["gc", "--dry-run"][..], &["gc"]] {
            let ran = sandbox.run(args);
            let said = &ran.fails_with(4).stderr;
            assert!(said.contains("it was altered; kept: all objects"), "{said}");
            assert!(object.exists(), "{args:?}");
        }
    }
    sandbox.run(&["fsck", "--repair", "--from", &source]).ok();
    sandbox.run(&["fsck"]).ok();
}

/// gc and fsck said of every damaged record that `fsck --repair --from` mends it.
#[test]
fn damaged_records_name_what_mends_them() {
    let Some(it) = Imported::new("damaged_records_name") else { return };
    let id = "d".repeat(32);
    let import: &[&str] = &["import", &it.source];
    let cases: [(&str, &str, &[&str]); 4] = [
        ("refs/box%3A1.json", "importing the image again under its name", import),
        ("refs/box%3A1.json", "`cofolio rm --force`", &["rm", "--force", IMAGE]),
        (&format!("roots/lease/{id}.json"), "`cofolio gc` removes it", &["gc"]),
        ("domain.json", "`cofolio backend overlay`", &["backend", "overlay"]),
    ];
    for (record, mends, command) in cases {
        fs::write(it.domain.join(record), "{").unwrap();
        let found = it.run(&["fsck"]);
        assert!(found.fails_with(4).stderr.contains(mends), "{record}: {}", found.stderr);
        if record.starts_with("refs") {
            let gc = it.run(&["gc"]);
            assert!(gc.fails_with(4).stderr.contains(mends), "{record}: {}", gc.stderr);
        }
        it.run(command).ok();
        it.run(&["fsck"]).ok();
        it.run(import).ok();
    }
}

/// With both copies of `meta.json` damaged, a repair gave the store a new id, and mounts were not seen any more. With both
/// removed there was "no store", and an import made one in its place.
#[test]
fn mounts_tell_the_id_of_a_store_that_has_lost_it() {
    const TEST: &str = "mounts_tell_the_id_of_a_store_that_has_lost_it";
    let Some(it) = Imported::new(TEST).filter(|_| common::can_mount(TEST)) else { return };
    let mnt = it.sandbox.dir("mnt");
    let mnt = mnt.to_str().unwrap();
    let files = ["meta.json", "meta.copy.json"].map(|name| it.sandbox.path("store").join(name));
    let good = fs::read(&files[0]).unwrap();
    // Of another store, without anything mounted.
    it.sandbox.dir(&format!("run/{}", "0".repeat(32)));
    let harms: [&dyn Fn(&Path); 2] =
        [&|file| fs::write(file, "{").unwrap(), &|file| fs::remove_file(file).unwrap()];
    for harm in harms {
        it.run(&["mount", IMAGE, mnt]).ok();
        files.iter().for_each(|file| harm(file));
        for command in [&["images"][..], &["import", &it.source], &["fsck"]] {
            let ran = it.run(command);
            ran.fails_with(4);
            assert!(ran.stderr.contains("`cofolio fsck --repair` makes it"), "{}", ran.stderr);
        }
        it.run(&["fsck", "--repair"]).ok();
        files.iter().for_each(|file| assert_eq!(fs::read(file).unwrap(), good));
        assert!(it.run(&["mounts"]).ok().contains(mnt));
        it.run(&["umount", mnt]).ok();
    }
}

/// A repair of `meta.json` gave the store a new id where the old one could not be read, and with it
/// another run directory: mounts and containers were not seen any more and could not be ended.
#[test]
fn mended_store_keeps_its_id() {
    let Some(it) = Imported::new("mended_store_keeps_its_id") else { return };
    let is_mounting = common::can_mount("mended_store_keeps_its_id");
    let mnt = it.sandbox.dir("mnt");
    let mnt = mnt.to_str().unwrap();
    let meta = it.sandbox.path("store/meta.json");
    let good = fs::read(&meta).unwrap();
    let harms: [&dyn Fn(); 3] = [
        &|| fs::write(&meta, "{").unwrap(),
        &|| fs::write(&meta, vec![0; good.len()]).unwrap(),
        &|| fs::remove_file(&meta).unwrap(),
    ];
    for harm in harms {
        if is_mounting {
            it.run(&["mount", IMAGE, mnt]).ok();
        }
        harm();
        for command in [&["images"][..], &["import", &it.source], &["fsck"]] {
            let ran = it.run(command);
            ran.fails_with(4);
            assert!(ran.stderr.contains("`cofolio fsck --repair` makes it"), "{}", ran.stderr);
        }
        it.run(&["fsck", "--repair"]).ok();
        assert_eq!(fs::read(&meta).unwrap(), good);
        if is_mounting {
            it.run(&["umount", mnt]).ok();
        }
    }
    // A copy that is lost comes back.
    let copy = it.sandbox.path("store/meta.copy.json");
    fs::remove_file(&copy).unwrap();
    it.run(&["fsck", "--repair"]).ok();
    assert_eq!(fs::read(&copy).unwrap(), good);
}
