//! Keeping a store small and sound: trimming, repair, scrubbing.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Ran, Sandbox, Tar, can_mount, overwrite, remove, skip, write_layout};
use serde_json::{Value, json};

/// A tree whose one large file is its own, as an image.
fn import(sandbox: &Sandbox, name: &str, args: &[&str]) -> Ran {
    let tree = sandbox.path(&format!("tree-{name}"));
    if !tree.exists() {
        sandbox.tree(&format!("tree-{name}"));
    }
    fs::write(tree.join("own"), name.repeat(100_000)).unwrap();
    let tree = tree.to_str().unwrap();
    let ran = sandbox.run(&[&["import", "--name", name, tree], args].concat());
    ran.ok();
    ran
}

fn names(sandbox: &Sandbox) -> Vec<String> {
    let list = sandbox.run(&["images", "--json"]).json();
    let names = list.as_array().unwrap().iter().map(|image| image["name"].as_str().unwrap());
    names.map(str::to_owned).collect()
}

/// Pretends that an image was imported long ago.
fn age(sandbox: &Sandbox, name: &str, created: u64) {
    let path = sandbox.path(&format!("store/domains/default/refs/{name}.json"));
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record["created"] = created.into();
    fs::write(path, record.to_string()).unwrap();
}

#[test]
fn gc_to_a_size_says_what_goes_and_removes_the_oldest() {
    let sandbox = Sandbox::new();
    for (n, name) in ["one", "two", "three", "four"].into_iter().enumerate() {
        import(&sandbox, name, &[]);
        age(&sandbox, name, 1000 + n as u64);
    }
    sandbox.run(&["tag", "--keep", "one", "one"]).ok();
    age(&sandbox, "one", 1);
    let bytes =
        sandbox.run(&["gc", "--json", "-n", "--to", "1T"]).json()["trim"]["bytes_before"].clone();
    let to = (bytes.as_u64().unwrap() - 1).to_string();

    let dry = sandbox.run(&["gc", "--dry-run", "--to", &to]);
    assert!(dry.ok().contains("would be freed"));
    assert!(dry.stderr.contains("would remove two ("), "{}", dry.stderr);
    assert!(!dry.stderr.contains("three") && !dry.stderr.contains("one ("), "{}", dry.stderr);
    assert_eq!(names(&sandbox).len(), 4);

    let report = sandbox.run(&["gc", "--to", &to, "--json"]).json();
    assert_eq!(report["trim"]["victims"][0]["refs"], serde_json::json!(["two"]));
    assert_eq!(report["trim"]["spared"][0][1], "pinned");
    assert_eq!(
        (&report["bytes"], report["images"].as_u64()),
        (&report["trim"]["victims"][0]["bytes"], Some(1))
    );
    assert_eq!(names(&sandbox), ["four", "one", "three"]);

    // By age; unpinned, the oldest goes too.
    sandbox.run(&["tag", "one", "one"]).ok();
    age(&sandbox, "one", 1);
    import(&sandbox, "five", &[]);
    let ran = sandbox.run(&["gc", "--older-than", "30"]);
    ran.ok();
    assert!(ran.stderr.contains("removing one ("), "{}", ran.stderr);
    assert_eq!(names(&sandbox), ["five"]);
    sandbox.run(&["gc", "--to", "big"]).fails_with(2);
    sandbox.run(&["fsck"]).ok();
}

#[test]
fn an_import_over_the_configured_limit_makes_room_and_says_so() {
    let sandbox = Sandbox::new();
    import(&sandbox, "old", &[]);
    age(&sandbox, "old", 1000);
    let config = sandbox.path("c.toml");
    fs::write(&config, "[store.limit]\nsize = '1 MiB'\n").unwrap();
    let config = ["--config", config.to_str().unwrap()];
    // 100,000 bytes that both share, and 300,000 and 700,000 of their own.
    let ran = import(&sandbox, "younger", &config);
    assert!(ran.stderr.contains("removing old ("), "{}", ran.stderr);
    assert_eq!(names(&sandbox), ["younger"]);
    let ran = import(&sandbox, "youngest", &[&config[..], &["--json"]].concat());
    assert_eq!(ran.json()["trim"]["victims"][0]["refs"][0], "younger");

    // What was just imported stays even if it alone is too large, and the import has not failed.
    let tiny = sandbox.path("tiny.toml");
    fs::write(&tiny, "[store.limit]\nsize = '1 KiB'\n").unwrap();
    let ran = import(&sandbox, "last", &["--config", tiny.to_str().unwrap()]);
    assert!(ran.stderr.contains("1 used lately"), "{}", ran.stderr);
    assert_eq!(names(&sandbox), ["last"]);
    // Without a limit nothing is looked at.
    let ran = import(&sandbox, "last", &["--json"]);
    assert!(ran.json().get("trim").is_none());
    fs::write(sandbox.path("days.toml"), "[store.limit]\nsize = '1 KiB'\nkeep_days = 1\n").unwrap();
    import(&sandbox, "next", &["--config", &sandbox.text("days.toml")]);
    assert_eq!(names(&sandbox), ["last", "next"]);
    // A trim that fails was told to nobody who asked for less or for JSON, and the store grew.
    let torn = sandbox.path("store/domains/default/refs/torn.json");
    fs::write(&torn, "{").unwrap();
    for args in [&["--json"][..], &["--quiet"], &[]] {
        let options = [&["--config", tiny.to_str().unwrap()], args].concat();
        let ran = import(&sandbox, "last", &options);
        ran.ok();
        assert!(ran.stderr.contains("was not trimmed"), "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains("torn.json") && ran.stderr.contains("hint:"), "{}", ran.stderr);
    }
    fs::remove_file(&torn).unwrap();
    // A pin stays when the name gets another image.
    sandbox.run(&["tag", "--keep", "last", "last"]).ok();
    import(&sandbox, "last", &[]);
    let plan = sandbox.run(&["gc", "-n", "--json", "--to", "0"]).json()["trim"].clone();
    assert_eq!(
        (plan["victims"].as_array().unwrap().len(), &plan["spared"][0][1]),
        (1, &"pinned".into())
    );
}

/// An image that was in use a moment ago is no stranger, however long ago it was imported; one that is
/// mounted does not go at all.
#[test]
fn mounts_count_as_use() {
    if !can_mount("mounts_count_as_use") {
        return;
    }
    let sandbox = Sandbox::new();
    for name in ["mounted", "was-mounted", "never"] {
        import(&sandbox, name, &[]);
        age(&sandbox, name, 1000);
    }
    let (mnt, was) = (sandbox.dir("mnt"), sandbox.dir("was"));
    sandbox.run(&["mount", "mounted", mnt.to_str().unwrap()]).ok();
    sandbox.run(&["mount", "was-mounted", was.to_str().unwrap()]).ok();
    sandbox.run(&["umount", was.to_str().unwrap()]).ok();
    sandbox.run(&["gc", "--older-than", "1"]).ok();
    assert_eq!(names(&sandbox), ["mounted", "was-mounted"]);
    sandbox.run(&["gc", "--to", "0"]).ok();
    assert_eq!(names(&sandbox), ["mounted"]);
    sandbox.run(&["umount", mnt.to_str().unwrap()]).ok();
}

/// Two layers; each has a file of its own.
fn two_layers(sandbox: &Sandbox) -> PathBuf {
    let base = Tar::default().file("base", 0o644, &[b'b'; 9000]).finish();
    let top = Tar::default()
        .file("one", 0o644, &[b'1'; 9000])
        .file("two", 0o644, &[b'2'; 9000])
        .file("three", 0o644, &[b'3'; 9000])
        .finish();
    let layout = sandbox.dir("layout");
    write_layout(&layout, "box:1", &[base, top], json!({}));
    layout
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn kinds(findings: &Value) -> Vec<&str> {
    findings.as_array().unwrap().iter().map(|finding| finding["kind"].as_str().unwrap()).collect()
}

/// A disk has lost some files and damaged others: of every kind one. The source gives them back, and only
/// them; a layer that nothing is wrong with is not even read.
#[test]
fn repair_brings_back_what_is_damaged_and_reads_nothing_else() {
    let sandbox = Sandbox::new();
    let layout = two_layers(&sandbox);
    let source = format!("oci:{}", layout.display());
    sandbox.run(&["import", &source, "--name", "box:1"]).ok();
    let domain = sandbox.path("store/domains/default");
    let objects = ["/one", "/two", "/three", "/base"].map(|path| sandbox.object("box:1", path));
    let layers = files(&domain.join("layers"));
    let images = files(&domain.join("images"));
    let contents = |paths: &[PathBuf]| -> Vec<_> {
        paths.iter().map(|path| fs::read(path).unwrap()).collect()
    };
    let all = [&objects[..], &layers, &images].concat();
    let good = contents(&all);
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    let untouched = inode(&objects[3]);

    // Nothing is wrong: nothing is read or done.
    let from = ["fsck", "--repair", "--from", &source];
    assert!(sandbox.run(&from).ok().contains("no damage"));

    // The layer that stays sound: a source that has lost it serves as well.
    let broken = sandbox.dir("broken");
    assert!(
        Command::new("cp").arg("-a").arg(layout.join(".")).arg(&broken).status().unwrap().success()
    );
    let blob = files(&broken.join("blobs/sha256")).into_iter().find(|blob| {
        let content = fs::read(blob).unwrap();
        content.starts_with(b"base")
    });
    let mut tar = fs::read(blob.as_ref().unwrap()).unwrap();
    tar[600] ^= 1;
    fs::write(blob.unwrap(), tar).unwrap();
    let broken = format!("oci:{}", broken.display());
    sandbox.run(&["import", &broken, "--store", &sandbox.text("other-store")]).fails_with(4);

    if let Err(reason) = remove(&objects[0]) {
        return skip("repair_brings_back", &reason);
    }
    overwrite(&objects[1], b"short").unwrap();
    let mut altered_object = good[2].clone();
    altered_object[5000] ^= 1;
    overwrite(&objects[2], &altered_object).unwrap();
    let found = sandbox.run(&["fsck", "--json"]);
    assert_eq!(
        kinds(&found.fails_with(4).json()["findings"])
            .into_iter()
            .filter(|kind| kind.starts_with("object"))
            .collect::<Vec<_>>(),
        ["object-missing", "object-truncated", "object-altered"]
    );
    let mended = sandbox.run(&["fsck", "--repair", "--from", &broken, "--json"]);
    mended.ok();
    assert_eq!(mended.json()["damaged"], false);
    assert_eq!(kinds(&mended.json()["findings"]), [""; 0], "protected again too");
    assert!(kinds(&mended.json()["repaired"]).contains(&"object-altered"));
    assert_eq!(contents(&all), good);
    assert_eq!(inode(&objects[3]), untouched);

    // Metadata: an image altered, then lost; of one layer the tree cut and how it is split lost, of another the
    // other way round. Those need their own layers.
    let mut altered = fs::read(&images[0]).unwrap();
    altered[1100] ^= 1;
    overwrite(&images[0], &altered).unwrap();
    overwrite(&layers[0], &fs::read(&layers[0]).unwrap()[..20]).unwrap();
    remove(&layers[1]).unwrap();
    remove(&layers[2]).unwrap();
    overwrite(&layers[3], &fs::read(&layers[3]).unwrap()[..20]).unwrap();
    let found = sandbox.run(&["fsck", "--json"]);
    let found = found.fails_with(4).json();
    for kind in ["image-altered", "layer-unreadable", "ref-dangling"] {
        assert!(kinds(&found["findings"]).contains(&kind), "{kind}: {found}");
    }
    sandbox.run(&["fsck", "--repair", "--from", &broken]).fails_with(4);
    let text = sandbox.run(&from);
    assert!(text.ok().contains("repaired domains/default/images/"), "{}", text.stdout);
    remove(&images[0]).unwrap();
    sandbox.run(&from).ok();
    assert_eq!(contents(&all), good);

    // A directory that somebody removed was a dead end: nothing made it again.
    let aside = sandbox.path("aside");
    fs::rename(domain.join("layers"), &aside).unwrap();
    let text = sandbox.run(&from);
    assert!(text.ok().contains("repaired domains/default/layers (directory-missing)"));
    assert_eq!(contents(&all), good);
    files(&aside).iter().for_each(|file| remove(file).unwrap());
    assert!(sandbox.run(&["fsck"]).ok().contains("no damage; "));
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["bytes"], 0, "nothing came in beside it");

    // And nothing said how to go on: other commands found "no such file", a repair that all names are lost.
    // Without `staging` fsck looked at nothing: it said nothing of an altered object, and called it a loss.
    fs::remove_dir(sandbox.path("store/staging")).unwrap();
    let found = sandbox.run(&["fsck", "--json"]);
    found.ok();
    assert_eq!(kinds(&found.json()["findings"]), ["staging-missing"]);
    overwrite(&objects[2], &altered_object).unwrap();
    let found = sandbox.run(&["fsck", "--json"]);
    let found = found.fails_with(4).json();
    for kind in ["staging-missing", "object-altered"] {
        assert!(kinds(&found["findings"]).contains(&kind), "{kind}: {found}");
    }
    let repaired = sandbox.run(&from);
    assert!(repaired.ok().contains("repaired staging (staging-missing)"), "{}", repaired.stdout);
    assert_eq!(contents(&all), good);
    fs::remove_dir(sandbox.path("store/staging")).unwrap();
    sandbox.run(&["fsck", "--repair"]).ok();
    assert!(sandbox.run(&["fsck"]).ok().contains("no damage; "));
    fs::remove_dir(sandbox.path("store/staging")).unwrap();
    let image = sandbox.run(&["images", "--json"]).json()[0]["name"].as_str().unwrap().to_owned();
    sandbox.run(&["export", &image, &format!("oci:{}", sandbox.text("out"))]).ok();
    fs::remove_dir(domain.join("segments")).unwrap();
    let missing = sandbox.run(&["gc"]);
    assert!(missing.fails_with(4).stderr.contains("`cofolio fsck --repair`"), "{}", missing.stderr);
    fs::rename(domain.join("refs"), sandbox.path("refs")).unwrap();
    // One said that it needs no source, the other that it needs one, which brings no name back.
    for command in [&["images"][..], &["fsck", "--quick"]] {
        let said = sandbox.run(command).fails_with(4).stderr.clone();
        assert!(said.contains("`cofolio fsck --repair` makes the directory again"), "{said}");
    }
    let repaired = sandbox.run(&["fsck", "--repair"]);
    assert!(repaired.stderr.contains("`cofolio tag`"), "{}", repaired.stderr);
    // Nobody heard that the configuration was lost too, and such an image ran as root.
    assert!(repaired.stderr.contains("import or pull each image again"), "{}", repaired.stderr);
    let images = sandbox.run(&["images", "--json"]).json();
    sandbox.run(&["gc"]).ok();
    assert_eq!(sandbox.run(&["images", "--json"]).json(), images);
    assert!(images[0]["name"].as_str().unwrap().starts_with("recovered-"), "{images}");
}

/// A directory as the source, changed since it was imported: what it still has is brought back, what it has
/// got meanwhile stays out, and what is left is told.
#[test]
fn repair_takes_what_a_directory_still_has() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (big, passwd) = (sandbox.object("box:1", "/big"), sandbox.object("box:1", "/etc/passwd"));
    let tree = sandbox.path("tree");
    fs::write(tree.join("etc/passwd"), "changed").unwrap();
    fs::write(tree.join("new"), "new").unwrap();
    if let Err(reason) = remove(&big).and_then(|()| remove(&passwd)) {
        return skip("repair_takes", &reason);
    }
    let source = format!("dir:{}", tree.display());
    let ran = sandbox.run(&["fsck", "--repair", "--from", &source, "--json"]);
    ran.fails_with(4);
    let report = ran.json();
    assert_eq!(
        (kinds(&report["findings"]), kinds(&report["repaired"])),
        (vec!["object-missing"], vec!["object-missing"])
    );
    assert_eq!(fs::read(&big).unwrap(), vec![b'x'; 100_000]);
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["objects"], 0, "nothing else came in");

    // A second source has the rest.
    fs::write(tree.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\napp:x:7:8::/:\n").unwrap();
    let nothing = format!("dir:{}", sandbox.dir("nothing").display());
    // The first source that failed ended the repair.
    let sources = ["--from", "dir:/nowhere", "--from", &nothing, "--from", &source];
    let ran = sandbox.run(&[&["fsck", "--repair"], &sources[..]].concat());
    ran.ok();
    assert!(ran.stderr.contains("--from dir:/nowhere: "), "{}", ran.stderr);
    sandbox.run(&["verify", "box:1"]).ok();
    sandbox.run(&["fsck", "--from", &source]).fails_with(2);
    sandbox.run(&["fsck", "--repair"]).ok();
    sandbox.run(&["fsck", "--repair", "--from", "dir:/nowhere"]).ok();
}

/// A mount holds the inode of what it has looked up: it goes on showing the altered content after the
/// repair. Whoever repairs is told which mounts these are.
#[test]
fn repair_names_the_mounts_that_may_show_the_old() {
    if !can_mount("repair_names_the_mounts") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let other = sandbox.dir("other-tree");
    fs::write(other.join("file"), "other").unwrap();
    sandbox.run(&["import", other.to_str().unwrap(), "--name", "other"]).ok();
    let (mnt, also) = (sandbox.dir("mnt"), sandbox.dir("also"));
    sandbox.run(&["mount", "box:1", mnt.to_str().unwrap()]).ok();
    sandbox.run(&["mount", "other", also.to_str().unwrap()]).ok();
    let big = sandbox.object("box:1", "/big");
    if let Err(reason) = overwrite(&big, &[b'y'; 100_000]) {
        return skip("repair_names_the_mounts", &reason);
    }
    assert_eq!(fs::read(mnt.join("big")).unwrap()[0], b'y');

    let source = format!("dir:{}", sandbox.path("tree").display());
    let report = sandbox.run(&["fsck", "--repair", "--from", &source, "--json"]).json();
    assert_eq!(report["mounted_before"], json!([fs::canonicalize(&mnt).unwrap()]));
    assert_eq!(fs::read(&big).unwrap()[0], b'x');
    // A mount that was called verified served the old bytes, since it was a clone of the other.
    let verified = sandbox.dir("verified");
    sandbox.run(&["mount", "--verify", "box:1", verified.to_str().unwrap()]).ok();
    assert_eq!(fs::read(verified.join("big")).unwrap()[0], b'x');
    assert_eq!(fs::read(mnt.join("big")).unwrap()[0], b'y');
    sandbox.run(&["umount", verified.to_str().unwrap()]).ok();
    sandbox.run(&["umount", mnt.to_str().unwrap()]).ok();
    sandbox.run(&["mount", "box:1", mnt.to_str().unwrap()]).ok();
    assert_eq!(fs::read(mnt.join("big")).unwrap()[0], b'x');
    sandbox.run(&["umount", mnt.to_str().unwrap(), also.to_str().unwrap()]).ok();
}

/// A scrub of a large store is killed by a reboot. The next one goes on where it was, and tells what the
/// first had found.
#[test]
fn a_killed_scrub_goes_on_and_forgets_nothing() {
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    for n in 0..60_u8 {
        fs::write(tree.join(n.to_string()), vec![n; 20_000]).unwrap();
    }
    sandbox.run(&["import", tree.to_str().unwrap(), "--name", "box"]).ok();
    let text = sandbox.run(&["verify", "--scrub", "--all"]);
    assert!(text.ok().contains("sound: 60 objects"), "{}", text.stdout);
    assert!(!sandbox.path("store/domains/default/scrub/all.json").exists());

    // The first in the order of digests, so that the scrub that is killed has seen it.
    let mut objects: Vec<_> = (0..60).map(|n| sandbox.object("box", &format!("/{n}"))).collect();
    objects.sort();
    if let Err(reason) = overwrite(&objects[0], &[b'?'; 20_000]) {
        return skip("a_killed_scrub", &reason);
    }
    // 1.2 MB at 200 kB/s: six seconds.
    let args = ["verify", "--scrub", "box", "--rate", "200000", "--json"];
    let mut child = sandbox.command(&args).spawn().unwrap();
    let state = sandbox.path("store/domains/default/scrub");
    // Besides what it notes of complete ones.
    let saved = |dir: &Path| {
        let is_of_this = |entry: std::io::Result<fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name() != "complete.json")
        };
        fs::read_dir(dir).is_ok_and(|mut entries| entries.any(is_of_this))
    };
    for _ in 0..300 {
        if saved(&state) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(saved(&state), "it has noted how far it was");

    // Another selection is another scrub.
    sandbox.run(&["verify", "--scrub", "--all", "--json"]).fails_with(4);
    let ran = sandbox.run(&["verify", "--scrub", "box", "--json"]);
    ran.fails_with(4);
    let report = ran.json();
    let (bytes, before) =
        (report["bytes"].as_u64().unwrap(), report["bytes_before"].as_u64().unwrap());
    // How far it came until then is a matter of what else the machine does.
    assert!(before > 0 && before < bytes, "{report}");
    assert_eq!((bytes, report["objects"].as_u64()), (60 * 20_000, Some(60)));
    assert_eq!(kinds(&report["findings"]), ["object-altered"]);
    // It has ended, so the next one begins at the beginning.
    let report = sandbox.run(&["verify", "--scrub", "box", "--json"]).json();
    assert_eq!(report["bytes_before"], 0);

    remove(&objects[1]).unwrap();
    overwrite(&objects[2], b"short").unwrap();
    let report = sandbox.run(&["verify", "--scrub", "--all", "--json"]).json();
    assert_eq!(
        kinds(&report["findings"]),
        ["object-missing", "object-truncated", "object-altered"]
    );
    assert_eq!((&report["sound"], &report["gone"]), (&json!(false), &json!(0)));
    for args in
        [&["verify", "--scrub"][..], &["verify", "--all"], &["verify", "box", "--rate", "1K"]]
    {
        sandbox.run(args).fails_with(2);
    }
}

/// An operator scrubs a busy node: what was in the page cache stays, and nothing comes in.
#[test]
fn a_scrub_leaves_the_page_cache_as_it_was() {
    use rustix::fs::{Advice, fadvise};
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    fs::write(tree.join("hot"), vec![1; 3_000_001]).unwrap();
    fs::write(tree.join("cold"), vec![2; 3_000_001]).unwrap();
    sandbox.run(&["import", tree.to_str().unwrap(), "--name", "box"]).ok();
    let [hot, cold] =
        ["/hot", "/cold"].map(|path| fs::File::open(sandbox.object("box", path)).unwrap());
    let pages = |file: &fs::File| cofolio_sys::cache::cachestat(file, 0, 0).unwrap().cached;
    if cofolio_sys::cache::cachestat(&hot, 0, 0).is_err() {
        return skip("a_scrub_leaves_the_page_cache", "no cachestat(2)");
    }
    fadvise(&hot, 0, None, Advice::DontNeed).unwrap();
    fadvise(&cold, 0, None, Advice::DontNeed).unwrap();
    if pages(&cold) > 0 {
        return skip("a_scrub_leaves_the_page_cache", "this filesystem is memory (tmpfs)");
    }
    std::io::copy(&mut &hot, &mut std::io::sink()).unwrap();
    let before = pages(&hot);
    assert!(before >= 3_000_001 / cofolio_sys::cache::page_size());
    sandbox.run(&["verify", "--scrub", "--all"]).ok();
    // What the kernel takes back of its own accord meanwhile (32 pages, once on a busy machine) it remembers; what is
    // dropped on request, as a scrub might do, it does not.
    let reclaimed = cofolio_sys::cache::cachestat(&hot, 0, 0).unwrap().evicted;
    assert_eq!((pages(&hot) + reclaimed, pages(&cold)), (before, 0));
    // A plain verification, to compare, brings it in.
    sandbox.run(&["verify", "box"]).ok();
    assert!(pages(&cold) > 0);
}

/// Where objects are protected a mount does not look at them, so the first upkeep after the machine has
/// started looks at their sizes, once.
#[test]
fn the_first_gc_of_a_boot_finds_what_was_cut_short() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let objects = |report: &Value| report["sizes"]["objects"].as_u64();
    let first = sandbox.run(&["gc", "--json"]).json();
    assert!(objects(&first) >= Some(1), "{first}");
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["sizes"], Value::Null);
    let note = sandbox.path("store/domains/default/sizes.json");
    let text = fs::read_to_string(&note).unwrap();
    // What stands in the way of the look is told after all else has been done.
    fs::remove_file(&note).unwrap();
    fs::create_dir(&note).unwrap();
    let gc = sandbox.run(&["gc"]);
    assert!(gc.fails_with(1).stdout.contains("objects"), "{}", gc.stdout);
    assert!(gc.stderr.contains("sizes.json"), "{}", gc.stderr);
    fs::remove_dir(&note).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let object = sandbox.object("box:1", "/big");
    let length = fs::metadata(&object).unwrap().len();
    remove(&object).unwrap();
    fs::File::create(&object).unwrap().set_len(length - 1).unwrap();
    fs::write(&note, text.replace(boot.trim(), "00000000-0000-0000-0000-000000000000")).unwrap();
    let found = sandbox.run(&["gc"]);
    found.fails_with(4);
    assert!(found.stderr.contains("`cofolio fsck --repair --from SOURCE`"), "{}", found.stderr);
}

/// No base could be made, and gc did not say what it had removed before that.
#[test]
fn gc_tells_what_it_removed_when_a_base_cannot_be_made() {
    let sandbox = Sandbox::new();
    // Fewer files make no base.
    let mut below = Tar::default();
    for n in 0..1500 {
        below.file(&format!("file-{n}"), 0o644, b"small");
    }
    let below = below.finish();
    for name in ["a", "b", "goes"] {
        let layout = sandbox.dir(name);
        let top = Tar::default().file(name, 0o644, name.as_bytes()).finish();
        write_layout(&layout, name, &[below.clone(), top], json!({}));
        sandbox.run(&["import", "--name", name, layout.to_str().unwrap()]).ok();
    }
    sandbox.run(&["rm", "goes"]).ok();
    let bases = sandbox.path("store/domains/default/bases");
    fs::create_dir(&bases).unwrap();
    let chattr = |flag: &str| Command::new("chattr").arg(flag).arg(&bases).status();
    if !chattr("+i").is_ok_and(|it| it.success()) {
        return skip("gc_tells_what_it_removed_when_a_base_cannot_be_made", "no immutable files");
    }
    let ran = sandbox.run(&["gc", "--json"]);
    chattr("-i").unwrap();
    ran.fails_with(5);
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["images"], 1);
    assert!(report["sizes"]["objects"].is_u64(), "{report}");
    assert!(ran.stderr.contains("base"), "{}", ran.stderr);
}

/// Somebody took the immutable flag off everything to copy the store, and never put it back. A repair does, and needs
/// no source for that. A damaged object stays without, and so does its image: mounts take the image's flag as proof
/// that all its objects have it.
#[test]
fn repair_protects_what_is_not() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let domain = sandbox.path("store/domains/default");
    let cleared = Command::new("chattr").args(["-R", "-i"]).arg(&domain).output();
    let report = sandbox.run(&["fsck", "--json"]).json();
    let count = report["findings"].as_array().unwrap().len();
    if !cleared.is_ok_and(|output| output.status.success()) || count == 0 {
        return skip("repair_protects", "files cannot be immutable here");
    }
    assert_eq!(kinds(&report["findings"]), vec!["unprotected"; count]);
    // A copy of a store has thousands of them: the list was all that one saw.
    let fsck = sandbox.run(&["fsck"]);
    let listed = fsck.ok();
    assert!(listed.contains(&format!("{count} files unprotected")), "{listed}");
    // Both said what the filesystem can do, not what the copy has.
    let (doctor, inspect) = (sandbox.run(&["doctor"]).stdout, sandbox.run(&["inspect", "box:1"]));
    assert!(doctor.contains("1 image without the immutable flag"), "{doctor}");
    assert!(inspect.stdout.contains("none but file modes"), "{}", inspect.stdout);
    overwrite(&sandbox.object("box:1", "/etc/passwd"), b"short").unwrap();
    let ran = sandbox.run(&["fsck", "--repair", "--json"]);
    let report = ran.fails_with(4).json();
    assert_eq!(report["protected"], count - 2, "{report}");
    let left = kinds(&report["findings"]);
    assert!(left.contains(&"object-truncated"), "{left:?}");
    assert_eq!(left.iter().filter(|kind| **kind == "unprotected").count(), 2, "{left:?}");
    let text = sandbox.run(&["fsck", "--repair"]);
    assert!(text.fails_with(4).stderr.contains("--from SOURCE"), "{}", text.stderr);
    let source = sandbox.text("tree");
    sandbox.run(&["fsck", "--repair", "--from", &source]).ok();
    let report = sandbox.run(&["fsck", "--json"]);
    report.ok();
    assert_eq!(kinds(&report.json()["findings"]), [""; 0]);

    // After --repair the hint was to do just that, and what the damage hits was missing.
    let passwd = sandbox.object("box:1", "/etc/passwd");
    let altered = fs::read(&passwd).unwrap().to_ascii_uppercase();
    overwrite(&passwd, &altered).unwrap();
    let finding = |args: &[&str]| {
        let report = sandbox.run(args).fails_with(4).json();
        let findings = report["findings"].as_array().unwrap().clone();
        findings.into_iter().find(|it| it["kind"] == "object-altered").unwrap()
    };
    let found = finding(&["fsck", "--json"]);
    assert!(found["user"].as_str().unwrap().starts_with("image "), "{found}");
    assert_eq!(
        (&found["refs"][0], &found["files"][0]),
        (&json!("box:1"), &json!("box:1 /etc/passwd"))
    );
    assert_eq!(finding(&["fsck", "--repair", "--json"]), found);
    let said = sandbox.run(&["fsck", "--repair"]).fails_with(4).stdout.clone();
    assert!(said.contains("unprotected: damaged files"), "{said}");
    assert!(!said.contains("protects them"), "{said}");
}

/// The record of one name was torn. Whoever lists images, or looks at one, once saw nothing but that. Now all that can
/// be read is shown, the damaged name is named on standard error, and the exit code says that it is not all.
#[test]
fn a_ref_that_cannot_be_read_hides_no_other() {
    let sandbox = Sandbox::new();
    let digest = sandbox.import_tree("good:1");
    sandbox.run(&["tag", "good:1", "torn:1"]).ok();
    let record = sandbox.path("store/domains/default/refs/torn%3A1.json");
    fs::write(&record, "{").unwrap();
    let names = |ran: &Ran| {
        assert!(ran.fails_with(4).stderr.contains("ref torn:1 cannot be read"), "{}", ran.stderr);
        assert!(ran.stderr.contains("torn%3A1.json` is damaged"), "{}", ran.stderr);
    };
    for args in [&["images"][..], &["images", "--sharing"], &["images", "-q"]] {
        let ran = sandbox.run(args);
        names(&ran);
        assert!(
            ran.stdout.contains("good:1") && ran.stdout.contains(&digest[..12]),
            "{}",
            ran.stdout
        );
    }
    let ran = sandbox.run(&["images", "--json"]);
    names(&ran);
    assert_eq!(ran.json()[0]["name"], "good:1");
    let ran = sandbox.run(&["inspect", "--json", "good:1"]);
    names(&ran);
    assert_eq!(ran.json()["refs"], serde_json::json!(["good:1"]));
    let ran = sandbox.run(&["inspect", &digest]);
    names(&ran);
    assert!(ran.stdout.contains(&digest), "{}", ran.stdout);
    sandbox.run(&["du"]).ok();
    let ran = sandbox.run(&["doctor"]);
    let can_mount = ran.stdout.contains("Images can be mounted");
    ran.fails_with(if can_mount { 4 } else { 5 });
    assert!(ran.stdout.contains("1, under 2 names"), "{}", ran.stdout);
    assert!(ran.stdout.contains("torn%3A1.json` is damaged"), "{}", ran.stdout);
    let report = sandbox.run(&["doctor", "--json"]).json();
    assert!(report["store"]["error"].as_str().unwrap().contains("torn%3A1.json"), "{report}");
    sandbox.run(&["rm", "--force", "torn:1"]).ok();
    sandbox.run(&["images"]).ok();
    sandbox.run(&["inspect", "good:1"]).ok();
}

/// The record of one name was torn. Other images come and go as ever; importing the image again under that name
/// writes the record again, as the hint says; and `rm --force` removes it.
#[test]
fn a_ref_that_cannot_be_read_is_in_nobodys_way() {
    let sandbox = Sandbox::new();
    let layout = two_layers(&sandbox);
    let source = format!("oci:{}", layout.display());
    sandbox.import_tree("other:1");
    sandbox.run(&["import", &source, "--name", "torn:1"]).ok();
    let record = sandbox.path("store/domains/default/refs/torn%3A1.json");
    let tear = || fs::write(&record, "{").unwrap();
    tear();
    sandbox.run(&["import", &source, "--name", "new:1"]).ok();
    sandbox.run(&["import", &source, "--name", "again:1"]).ok();
    sandbox.run(&["rm", "other:1", "again:1"]).ok();
    sandbox.run(&["gc"]).fails_with(4);
    let inspected = sandbox.run(&["inspect", "torn:1"]);
    assert!(inspected.fails_with(4).stderr.contains("torn%3A1.json"), "{}", inspected.stderr);
    let ran = sandbox.run(&["rm", "torn:1"]);
    assert!(ran.fails_with(4).stderr.contains("rm --force"), "{}", ran.stderr);
    sandbox.run(&["import", &source, "--name", "torn:1"]).ok();
    sandbox.run(&["fsck"]).ok();
    sandbox.run(&["gc"]).ok();
    tear();
    sandbox.run(&["rm", "--force", "torn:1"]).ok();
    sandbox.run(&["fsck"]).ok();
    sandbox.run(&["gc"]).ok();
    sandbox.run(&["verify", "new:1"]).ok();
}
