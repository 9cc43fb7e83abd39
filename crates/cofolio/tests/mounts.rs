//! Mounts and bundles, through the command line. Needs root and a kernel that mounts images.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Ran, Sandbox, Tar, can_mount, program, real_redis, skip, write_layout};
use serde_json::json;

#[test]
fn an_image_is_mounted_listed_and_unmounted() {
    if !can_mount("an_image_is_mounted_listed_and_unmounted") {
        return;
    }
    let sandbox = Sandbox::new();
    let digest = sandbox.import_tree("box:1");
    let target = sandbox.text("mnt");
    // No such directory: nothing is made unless it is asked for.
    sandbox.run(&["mount", "box:1", &target]).fails_with(3);
    sandbox.run(&["mount", "--create", "box:1", &target]).ok();
    assert_eq!(fs::read(sandbox.path("mnt/etc/hostname")).unwrap(), b"node\n");
    assert!(fs::write(sandbox.path("mnt/new"), "").is_err());
    sandbox.run(&["mount", "box:1", &target]).fails_with(7);

    let mounts = sandbox.run(&["mounts"]);
    mounts.ok();
    let headers = ["TARGET", "IMAGE", "MODE", "BACKEND", "VERIFIED", "SINCE", "STATE"];
    assert_eq!(mounts.words()[0], headers);
    assert_eq!(mounts.words()[1][..4], [target.as_str(), "box:1", "ro", "overlay"]);
    assert_eq!(mounts.words()[1].last(), Some(&"live"));
    let listed = sandbox.run(&["mounts", "--json"]).json();
    assert_eq!(listed["mounts"][0]["record"]["image"], digest.as_str());
    let inspected = sandbox.run(&["inspect", "--json", "box:1"]).json();
    assert_eq!(inspected["mounts"], json!([target]));

    // A mounted image survives its name and gc.
    sandbox.run(&["rm", "box:1"]).ok();
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["images"], 0);
    assert_eq!(fs::read(sandbox.path("mnt/etc/hostname")).unwrap(), b"node\n");

    let open = fs::File::open(sandbox.path("mnt/big")).unwrap();
    let busy = sandbox.run(&["umount", &target]);
    busy.fails_with(7);
    assert!(busy.stderr.contains("hint: `fuser"), "{}", busy.stderr);
    drop(open);
    sandbox.run(&["umount", &target]).ok();
    sandbox.run(&["umount", &target]).fails_with(3);
    assert!(!sandbox.path("mnt").exists(), "the directory was made for the mount");
    assert_eq!(sandbox.run(&["mounts"]).ok(), "");
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["images"], 1);
}

/// The first mount of an image asked for the size of every object: 8,660 system calls for mysql, and
/// as many inodes in memory, although nobody can cut short an immutable file.
#[test]
fn a_first_mount_from_protected_storage_looks_at_no_object() {
    let test = "a_first_mount_from_protected_storage_looks_at_no_object";
    if !can_mount(test) {
        return;
    }
    if Command::new("strace").arg("-V").stdout(Stdio::null()).status().is_err() {
        return skip(test, "strace is not installed");
    }
    let calls = |files: usize| {
        let sandbox = Sandbox::new();
        for number in 0..files {
            let dir = sandbox.path("tree").join(format!("{}", number / 100));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(format!("{number}")), format!("{number:0500}")).unwrap();
        }
        sandbox.run(&["import", "--quiet", "--name", "box:1", &sandbox.text("tree")]).ok();
        let protected = sandbox.run(&["doctor"]).stdout;
        if protected.contains("no immutable files here") {
            return None;
        }
        let (counts, target) = (sandbox.text("counts"), sandbox.text("mnt"));
        let mount = sandbox.command(&["mount", "--create", "box:1", &target]);
        let mut strace = Command::new("strace");
        strace.args(["-f", "-c", "-o", &counts]).arg(mount.get_program()).args(mount.get_args());
        strace.envs(mount.get_envs().filter_map(|(name, value)| Some((name, value?))));
        assert!(strace.stdout(Stdio::null()).status().unwrap().success());
        sandbox.run(&["umount", &target]).ok();
        let counts = fs::read_to_string(counts).unwrap();
        let total = counts.lines().last().unwrap().split_whitespace().nth(3).unwrap();
        Some(total.parse::<u64>().unwrap())
    };
    let (Some(few), Some(many)) = (calls(80), calls(8_000)) else {
        return skip(test, "files cannot be immutable here");
    };
    assert!(many <= few + 30, "80 files: {few} system calls, 8,000 files: {many}");
}

/// A mount inside another one kept `umount --all` from unmounting that.
#[test]
fn all_mounts_are_unmounted_innermost_first() {
    if !can_mount("all_mounts_are_unmounted_innermost_first") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (outer, inner) = (sandbox.text("mnt"), sandbox.text("mnt/etc"));
    sandbox.run(&["mount", "--create", "box:1", &outer]).ok();
    sandbox.run(&["mount", "box:1", &inner]).ok();
    sandbox.run(&["umount", "--all"]).ok();
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
}

#[test]
fn only_the_named_directories_are_writable() {
    if !can_mount("only_the_named_directories_are_writable") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "--writable", "/etc", "box:1", &target]).ok();
    fs::write(sandbox.path("mnt/etc/new"), "new").unwrap();
    let error = fs::write(sandbox.path("mnt/new"), "new").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    sandbox.run(&["umount", &target]).ok();
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
    let writable = sandbox.path("store/domains/default/writable");
    assert_eq!(fs::read_dir(writable).unwrap().count(), 0);
    // What takes up kept changes was said to be --rw, with which all of the mount is writable.
    let writable = ["mount", "--create", "--writable", "/etc", "box:1", &target];
    sandbox.run(&[&writable[..], &["--keep"]].concat()).ok();
    fs::write(sandbox.path("mnt/etc/new"), "new").unwrap();
    let unmounted = sandbox.run(&["umount", "--json", &target]).json();
    let kept = unmounted[0]["upper"].as_str().unwrap();
    let listed = sandbox.run(&["mounts"]);
    // The command that it named lacked the directory, the image and the target.
    let named = listed.stderr.split('`').find_map(|it| it.strip_prefix("cofolio mount "));
    let named = named.unwrap_or_else(|| panic!("{}", listed.stderr));
    let named = format!("mount --create {}", named.replace("TARGET", &target));
    sandbox.run(&named.split(' ').collect::<Vec<_>>()).ok();
    assert_eq!(fs::read(sandbox.path("mnt/etc/new")).unwrap(), b"new");
    fs::write(sandbox.path("mnt/new"), "new").unwrap_err();
    sandbox.run(&["umount", &target]).ok();
    sandbox.run(&["umount", "--discard", kept]).ok();
    let missing = ["mount", "--create", "--writable", "/missing", "box:1", &target];
    sandbox.run(&missing).fails_with(2);
    let both = ["mount", "--create", "--rw", "--writable", "/etc", "box:1", &target];
    sandbox.run(&both).fails_with(2);
}

/// `umount` of a writable directory said that it had no record, and to unmount it by umount(8): the
/// changes went with the mount. `mounts` called a mount without that directory live.
#[test]
fn a_part_of_a_mount_leads_to_the_whole() {
    if !can_mount("a_part_of_a_mount_leads_to_the_whole") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (target, part) = (sandbox.text("mnt"), sandbox.text("mnt/etc"));
    sandbox.run(&["mount", "--create", "--writable", "/etc", "box:1", &target]).ok();
    let whole = format!("`cofolio umount {target}`");
    let refused = sandbox.run(&["umount", &part]);
    refused.fails_with(2).refused(&format!("{part} is a part of the mount at {target}"));
    assert!(refused.stderr.contains(&whole), "{}", refused.stderr);
    assert!(sandbox.run(&["mounts"]).words()[1].ends_with(&["live"]));
    rustix::mount::unmount(&part, rustix::mount::UnmountFlags::empty()).unwrap();
    for args in [&["mounts"][..], &["mounts", "--reconcile"]] {
        let listed = sandbox.run(args);
        assert!(listed.words()[1].ends_with(&["in", "part"]), "{}", listed.stdout);
        let says = |part: &str| assert!(listed.stderr.contains(part), "{}", listed.stderr);
        says(&format!("{part} cannot be written to: "));
        says(&whole);
    }
    sandbox.run(&["umount", &target]).ok();
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
}

/// The run directory was lost. `mounts` named the mount before its writable directory, which keeps
/// it busy, and called changes kept that a mount still showed. Their removal was refused with a
/// command that could not help.
#[test]
fn mounts_without_a_record_are_unmounted_as_listed() {
    if !can_mount("mounts_without_a_record_are_unmounted_as_listed") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (part, whole) = (sandbox.text("part"), sandbox.text("whole"));
    sandbox.run(&["mount", "--create", "--writable", "/etc", "box:1", &part]).ok();
    sandbox.run(&["mount", "--create", "--rw", "--keep", "box:1", &whole]).ok();
    let run = fs::read_dir(sandbox.path("run")).unwrap().next().unwrap().unwrap().path();
    let mounts = sandbox.run(&["mounts", "--json"]).json();
    let records = mounts["mounts"].as_array().unwrap().iter().map(|it| &it["record"]);
    let kept = records.filter_map(|it| it["upper"]["keep"].as_bool()?.then_some(&it["upper"]));
    let kept = kept.map(|upper| upper["dir"].as_str().unwrap()).next().unwrap();
    fs::remove_dir_all(run.join("mounts")).unwrap();

    let listed = sandbox.run(&["mounts", "--json"]).json();
    assert!(listed["kept"].as_array().unwrap().is_empty(), "{listed}");
    let used = sandbox.run(&["du", "--json"]).json();
    assert_eq!(used["kept_changes"], 0, "{used}");
    let discard = ["umount", "--discard", kept];
    let refused = sandbox.run(&discard);
    refused.fails_with(7).refused("`cofolio mounts` lists mounts, also those without a record");
    let said = sandbox.run(&["mounts"]).stderr;
    let named = said.split("`umount ").skip(1).filter_map(|rest| rest.split_once('`'));
    let named: Vec<_> = named.map(|(target, _)| target).collect();
    assert_eq!(named.len(), 3, "{said}");
    for target in named {
        rustix::mount::unmount(target, rustix::mount::UnmountFlags::empty()).unwrap();
    }
    sandbox.run(&["mounts", "--reconcile"]).ok();
    let listed = sandbox.run(&["mounts", "--json"]).json();
    assert_eq!(listed["kept"][0]["dir"], kept);
    sandbox.run(&discard).ok();
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
}

/// Several steps failed because of one damaged record, and each said so.
#[test]
fn a_damaged_record_is_named_once() {
    if !can_mount("a_damaged_record_is_named_once") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "box:1", &target]).ok();
    let run = fs::read_dir(sandbox.path("run")).unwrap().next().unwrap().unwrap().path();
    let record = fs::read_dir(run.join("mounts")).unwrap().next().unwrap().unwrap().path();
    let good = fs::read(&record).unwrap();
    fs::write(&record, "{").unwrap();
    for (args, line) in [
        (&["mounts", "--reconcile"][..], "could not be cleaned up: "),
        (&["gc"], "left for the next gc: "),
    ] {
        let said = sandbox.run(args).stderr;
        let line = format!("{line}{}", record.display());
        assert_eq!(said.matches(&line).count(), 1, "{said}");
        assert!(!said.contains("damaged record"), "{said}");
    }
    fs::write(&record, good).unwrap();
    sandbox.run(&["umount", &target]).ok();
}

/// A container made directories deeper than a process may open files: what it had written stayed on the disk for
/// ever, and every gc failed.
#[test]
fn what_was_written_goes_however_deep_it_is() {
    if !can_mount("what_was_written_goes_however_deep_it_is") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "--rw", "box:1", &target]).ok();
    let deep =
        "i=0; while [ $i -lt 400 ]; do mkdir d && cd -P d || exit 1; : >file; i=$((i + 1)); done";
    let made = Command::new("sh").args(["-c", deep]).current_dir(&target).status();
    assert!(made.unwrap().success());
    // While another mount namespace has a copy of the mount, the changes are left to gc.
    let script = format!("ulimit -n 128; \"$0\" umount {target} && \"$0\" gc");
    let mut umount = Command::new("sh");
    umount.args(["-c", &script, env!("CARGO_BIN_EXE_cofolio")]);
    umount.env("COFOLIO_STORE", sandbox.path("store")).env("COFOLIO_RUN", sandbox.path("run"));
    common::run_with_input(umount, b"").ok();
    let writable = sandbox.path("store/domains/default/writable");
    assert_eq!(fs::read_dir(writable).unwrap().count(), 0);
}

/// Of two `umount --all` at once the one that came second to a mount failed: it was not mounted any more.
#[test]
fn two_may_unmount_all_at_once() {
    if !can_mount("two_may_unmount_all_at_once") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    for number in 0..24 {
        sandbox.run(&["mount", "--create", "box:1", &sandbox.text(&format!("mnt{number}"))]).ok();
    }
    let start = || {
        let mut command = sandbox.command(&["umount", "--all"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start()];
    for child in both {
        Ran::of(child.wait_with_output().unwrap()).ok();
    }
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
}

/// A sparse file is as small in a container as it was where the image was made, for `du` and for the disk.
#[test]
fn sparse_files_stay_sparse_through_a_mount() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let test = "sparse_files_stay_sparse_through_a_mount";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    let mut content = vec![0; 40 << 20];
    content[7 << 20..][..6].copy_from_slice(b"island");
    let file = fs::File::create(tree.join("disk.img")).unwrap();
    file.set_len(content.len() as u64).unwrap();
    file.write_all_at(b"island", 7 << 20).unwrap();
    file.sync_all().unwrap();
    let check = |image: &str, target: &str| {
        sandbox.run(&["mount", "--create", image, &sandbox.text(target)]).ok();
        let file = sandbox.path(target).join("disk.img");
        assert!(fs::read(&file).unwrap() == content, "{image}");
        let allocated = fs::metadata(&file).unwrap().blocks() * 512;
        // xfs allocates ahead, fs-verity has its digests there.
        assert!(allocated <= 1 << 20, "{image}: {allocated} bytes");
        let bytes = sandbox.run(&["du", "--json"]).json()["object_bytes"].as_u64().unwrap();
        assert!(bytes <= 1 << 20, "{image}: {bytes} bytes of objects");
        sandbox.run(&["verify", image]).ok();
        sandbox.run(&["umount", &sandbox.text(target)]).ok();
    };
    sandbox.run(&["import", "--name", "dir:1", tree.to_str().unwrap()]).ok();
    check("dir:1", "mnt-dir");
    sandbox.run(&["rm", "dir:1"]).ok();
    sandbox.run(&["gc"]).ok();

    let Some(tar) = program("tar") else { return skip(test, "no tar for the archives") };
    for format in ["gnu", "posix"] {
        let archive = sandbox.path("layer.tar");
        let mut command = Command::new(&tar);
        command.args(["--sparse", "--format", format, "-cf"]).arg(&archive).arg("-C").arg(&tree);
        assert!(command.arg("disk.img").status().unwrap().success());
        let layer = fs::read(&archive).unwrap();
        assert!(layer.len() < 1 << 20, "tar saw the holes");
        let layout = sandbox.dir(&format!("layout-{format}"));
        write_layout(&layout, format, &[layer], json!({}));
        let name = format!("{format}:1");
        sandbox.run(&["import", "--name", &name, layout.to_str().unwrap()]).ok();
        check(&name, &format!("mnt-{format}"));
        sandbox.run(&["rm", &name]).ok();
        sandbox.run(&["gc"]).ok();
    }
}

#[test]
fn writable_mounts_keep_their_changes_when_told_to() {
    if !can_mount("writable_mounts_keep_their_changes_when_told_to") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.dir("mnt");
    let target = target.to_str().unwrap();
    let new = sandbox.path("mnt/new");
    sandbox.run(&["mount", "--keep", "box:1", target]).fails_with(2);
    // Without a word about it, changes go with the mount.
    for _ in 0..2 {
        sandbox.run(&["mount", "--rw", "box:1", target]).ok();
        assert!(!new.exists());
        fs::write(&new, "x").unwrap();
        sandbox.run(&["umount", target]).ok();
    }
    sandbox.run(&["mount", "--rw", "--keep", "box:1", target]).ok();
    fs::write(&new, "x").unwrap();
    let unmounted = sandbox.run(&["umount", "--json", target]).json();
    let kept = unmounted[0]["upper"].as_str().unwrap();
    let usage = sandbox.run(&["du", "--json"]).json();
    assert_eq!(usage["kept_changes"], 1);
    assert!(usage["kept_bytes"].as_u64().unwrap() >= 4096, "{usage}");
    assert!(sandbox.run(&["du"]).ok().contains("kept changes"));
    sandbox.run(&["mount", "--rw", "--upper", kept, "box:1", target]).ok();
    assert_eq!(fs::read(&new).unwrap(), b"x");
    let second = sandbox.text("second");
    let in_use = ["mount", "--create", "--rw", "--upper", kept, "box:1", &second];
    sandbox.run(&in_use).fails_with(7).refused(kept);
    sandbox.run(&["umount", "--discard", kept]).fails_with(7).refused("is in use by");
    assert_eq!(fs::read(&new).unwrap(), b"x");
    sandbox.run(&["umount", "--keep", target]).ok();
    assert!(sandbox.run(&["umount", "--discard", kept]).stderr.contains("are gone"));
    sandbox.run(&["umount", "--discard", kept]).fails_with(3).refused(kept);
    assert_eq!(sandbox.run(&["du", "--json"]).json()["kept_changes"], 0);
    let upper = sandbox.dir("upper");
    sandbox.run(&["mount", "--rw", "--upper", upper.to_str().unwrap(), "box:1", target]).ok();
    fs::write(&new, "y").unwrap();
    sandbox.run(&["umount", "--all"]).ok();
    // A directory that the caller brought is not ours to remove, and the hint says so.
    let discard = ["umount", "--discard", upper.to_str().unwrap()];
    sandbox.run(&discard).fails_with(3).refused("yours to remove");
    assert_eq!(fs::read(upper.join("upper/new")).unwrap(), b"y");

    sandbox.run(&["mount", "--idmap", "nonsense", "box:1", target]).fails_with(2);
    // It failed like something that may succeed another time.
    sandbox.run(&["mount", "box:1", "/dev/null"]).fails_with(2).refused("not a directory");
    let mapped = sandbox.run(&["mount", "--idmap", "0:100000:65536", "box:1", target]);
    if mapped.code == 5 {
        return skip("writable_mounts (id map)", mapped.stderr.trim());
    }
    mapped.ok();
    use std::os::unix::fs::MetadataExt;
    assert_eq!(fs::metadata(sandbox.path("mnt/big")).unwrap().uid(), 100_000);
}

/// Somebody emptied the run directory while the image was mounted. The hint was to remove `pin.json`, which was
/// the missing file, and did not name what to unmount.
#[test]
fn the_hint_for_an_emptied_run_directory_works() {
    if !can_mount("the_hint_for_an_emptied_run_directory_works") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (old, new) = (sandbox.dir("old"), sandbox.dir("new"));
    sandbox.run(&["mount", "box:1", old.to_str().unwrap()]).ok();
    let run = sandbox.path("run");
    let emptied = Command::new("find").arg(&run).args(["-xdev", "-type", "f", "-delete"]).status();
    assert!(emptied.unwrap().success());
    let verified = ["mount", "--verify", "box:1", new.to_str().unwrap()];
    let refused = sandbox.run(&verified);
    let said = &refused.fails_with(4).stderr;
    assert!(said.contains("pin.json: it is missing"), "{said}");
    assert!(said.contains("`cofolio mounts --reconcile`") && !said.contains("rm /"), "{said}");
    sandbox.run(&["mounts", "--reconcile"]);
    sandbox.run(&verified).ok();
    rustix::mount::unmount(&old, rustix::mount::UnmountFlags::DETACH).unwrap();
    sandbox.run(&["umount", new.to_str().unwrap()]).ok();
}

#[test]
fn mount_verify_refuses_what_was_altered() {
    if !can_mount("mount_verify_refuses_what_was_altered") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.dir("mnt");
    let target = target.to_str().unwrap();
    sandbox.run(&["mount", "--verify", "box:1", target]).ok();
    assert_eq!(sandbox.run(&["mounts"]).words()[1][4], "hashed");
    sandbox.run(&["umount", target]).ok();
    let store = cofolio_store::Store::open(&sandbox.path("store")).unwrap();
    if store.protection().verity {
        return skip("mount_verify_refuses_what_was_altered", "the kernel protects objects here");
    }
    let listed = sandbox.run(&["ls", "--json", "box:1", "/big"]).json();
    let object = listed[0]["object"].as_str().unwrap().to_owned();
    let object = sandbox.path("store/domains/default/objects").join(object);
    let file = fs::File::open(&object).unwrap();
    if let Ok(flags) = rustix::fs::ioctl_getflags(&file) {
        let flags = flags - rustix::fs::IFlags::IMMUTABLE;
        rustix::fs::ioctl_setflags(&file, flags).unwrap();
    }
    fs::write(&object, vec![b'y'; 100_000]).unwrap();
    sandbox.run(&["mount", "--verify", "box:1", target]).fails_with(4);
    assert_eq!(sandbox.run(&["mounts"]).ok(), "");
}

/// A static program that says who and where it is.
const WHOAMI: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>
int main(int argc, char **argv) {
    gid_t groups[64];
    char text[4096];
    int n = getgroups(64, groups);
    printf("uid=%d gid=%d groups=", getuid(), getgid());
    for (int i = 0; i < n; i++) printf("%s%d", i ? "," : "", groups[i]);
    printf("\ncwd=%s color=%s\n", getcwd(text, sizeof text), getenv("COLOR"));
    gethostname(text, sizeof text);
    printf("host=%s args=", text);
    for (int i = 1; i < argc; i++) printf("%s%s", i > 1 ? "," : "", argv[i]);
    printf("\nwrite=%s\n", fopen("/srv/new", "w") ? "yes" : "no");
    printf("volume=%s scratch=%s\n", fopen("/data/new", "w") ? "yes" : "no", fopen("/tmp/new", "w") ? "yes" : "no");
    return 7;
}
"#;

/// An image of that program as an OCI layout; `None` where it cannot be compiled.
fn whoami_image(sandbox: &Sandbox) -> Option<String> {
    let source = sandbox.path("whoami.c");
    fs::write(&source, WHOAMI).unwrap();
    let binary = sandbox.path("whoami");
    let built = Command::new(program("cc").or_else(|| program("gcc"))?)
        .args(["-static", "-Os", "-o"])
        .args([&binary, &source])
        .status();
    if !built.is_ok_and(|status| status.success()) {
        return None;
    }
    let mut tar = Tar::default();
    for dir in ["bin/", "etc/", "srv/", "proc/", "sys/", "dev/"] {
        tar.directory(dir, 0o755);
    }
    tar.directory("tmp/", 0o1777);
    tar.entry("data/", b'5', 0o700, 1001, 1002, &[]);
    tar.file("bin/whoami", 0o755, &fs::read(binary).unwrap());
    tar.file("etc/passwd", 0o644, b"root:x:0:0::/:\nworker:x:1001:1002::/srv:\n");
    tar.file("etc/group", 0o644, b"worker:x:1002:\naudio:x:29:worker\nvideo:x:44:x,worker\n");
    let layout = sandbox.dir("layout");
    let config = json!({
        "Entrypoint": ["whoami"], "Cmd": ["from", "image"], "User": "worker", "WorkingDir": "/srv",
        "Env": ["PATH=/bin", "COLOR=blue"], "Volumes": {"/data": {}},
    });
    write_layout(&layout, "whoami:1", &[tar.finish()], config);
    sandbox.run(&["import", "--name", "whoami:1", layout.to_str().unwrap()]).ok();
    Some("whoami:1".to_owned())
}

/// Run a container; its state directory and itself are gone afterwards, however it ends.
fn start(runtime: &Path, sandbox: &Sandbox, bundle: &Path) -> Ran {
    let ran = start_with("", runtime, sandbox, bundle);
    // crun refuses machines that have controllers on cgroup v1 and on v2, whatever the bundle. Where it
    // cannot see v2 it runs.
    if ran.stderr.contains("hybrid mode not supported") {
        let script = "umount /sys/fs/cgroup/unified && ";
        return start_with(script, runtime, sandbox, bundle);
    }
    ran
}

/// In a mount namespace of its own, after `script`.
fn start_with(script: &str, runtime: &Path, sandbox: &Sandbox, bundle: &Path) -> Ran {
    // No other test's: the cgroup is named by it, and the runtime kills what is in that when it ends.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let id =
        format!("cofolio-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let state = sandbox.dir("runtime");
    let script = format!("{script}exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh"]);
    command.arg(runtime).arg("--root").arg(&state);
    command.args(["run", "--bundle"]).arg(bundle).arg(&id);
    let ran = common::run_with_input(command, b"");
    let _ = Command::new(runtime)
        .arg("--root")
        .arg(&state)
        .args(["delete", "--force", &id])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    ran
}

fn runtimes(test: &str) -> Vec<PathBuf> {
    let found = ["runc", "crun"].into_iter().filter_map(|name| {
        let path = program(name);
        if path.is_none() {
            skip(test, &format!("{name} is not installed"));
        }
        path
    });
    found.collect()
}

#[test]
fn runc_and_crun_start_a_bundle() {
    const TEST: &str = "runc_and_crun_start_a_bundle";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    let Some(image) = whoami_image(&sandbox) else {
        return skip(TEST, "no C compiler that links statically");
    };
    for runtime in runtimes(TEST) {
        let bundle = sandbox.path("bundle");
        let dir = bundle.to_str().unwrap();
        sandbox.run(&["bundle", "--hostname", "box", &image, dir]).ok();
        let ran = start(&runtime, &sandbox, &bundle);
        assert_eq!(ran.code, 7, "{}: {}", runtime.display(), ran.stderr);
        let expected = "uid=1001 gid=1002 groups=29,44,1002\ncwd=/srv color=blue\n\
                        host=box args=from,image\nwrite=no\nvolume=yes scratch=yes\n";
        assert_eq!(sorted_groups(&ran.stdout), expected, "{}", runtime.display());
        sandbox.run(&["umount", &format!("{dir}/rootfs")]).ok();

        // Read-only, as root, other arguments: the volume and /tmp can be written to, the rest not.
        let args = [
            "bundle",
            "--replace",
            "--read-only",
            "--user",
            "0",
            "--env",
            "COLOR=red",
            "--hostname",
            "box",
        ];
        let args: Vec<&str> =
            args.into_iter().chain([image.as_str(), dir, "--", "a", "b c"]).collect();
        sandbox.run(&args).ok();
        let ran = start(&runtime, &sandbox, &bundle);
        assert_eq!(ran.code, 7, "{}: {}", runtime.display(), ran.stderr);
        let expected = "uid=0 gid=0 groups=0\ncwd=/srv color=red\n\
                        host=box args=a,b c\nwrite=no\nvolume=yes scratch=yes\n";
        assert_eq!(sorted_groups(&ran.stdout), expected, "{}", runtime.display());
        assert!(bundle.join("volumes/data/new").exists());
        sandbox.run(&["umount", &format!("{dir}/rootfs")]).ok();
        fs::remove_dir_all(&bundle).unwrap();
    }
    assert_eq!(sandbox.run(&["mounts"]).ok(), "");
}

/// The order of supplementary groups says nothing, and runtimes differ in it.
fn sorted_groups(text: &str) -> String {
    let (head, rest) = text.split_once("groups=").unwrap_or((text, ""));
    let (groups, rest) = rest.split_once('\n').unwrap_or((rest, ""));
    let mut groups: Vec<u32> = groups.split(',').filter_map(|group| group.parse().ok()).collect();
    groups.sort_unstable();
    groups.dedup();
    let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
    format!("{head}groups={}\n{rest}", groups.join(","))
}

/// A real image, where the corpus has been built.
#[test]
fn a_real_redis_starts_from_its_bundle() {
    const TEST: &str = "a_real_redis_starts_from_its_bundle";
    if !can_mount(TEST) {
        return;
    }
    let Some(layout) = real_redis(TEST) else { return };
    let sandbox = Sandbox::new();
    sandbox.run(&["import", "--name", "redis", layout.to_str().unwrap()]).ok();
    for runtime in runtimes(TEST) {
        let bundle = sandbox.path("bundle");
        let dir = bundle.to_str().unwrap();
        let command = "redis-server --save '' --daemonize yes >/dev/null; for i in $(seq 100); do \
                      redis-cli ping >/dev/null 2>&1 && break; sleep 0.1; done; \
                       redis-cli set folio one && redis-cli get folio && id -un";
        sandbox.run(&["bundle", "--read-only", "redis", dir, "--", "sh", "-c", command]).ok();
        let ran = start(&runtime, &sandbox, &bundle);
        assert_eq!(ran.stdout, "OK\none\nredis\n", "{}: {}", runtime.display(), ran.stderr);
        sandbox.run(&["umount", &format!("{dir}/rootfs")]).ok();
        fs::remove_dir_all(&bundle).unwrap();
    }
}

/// A full disk: exit code 6, what was missing, and a store as it was.
#[test]
fn a_full_filesystem_is_told_with_what_was_missing() {
    const TEST: &str = "a_full_filesystem_is_told_with_what_was_missing";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    let store = sandbox.dir("store");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "cofolio-test"])
        .arg(&store)
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        return skip(TEST, "tmpfs cannot be mounted");
    }
    let before = sandbox.import_tree("box:1");
    let tree = sandbox.dir("large");
    for number in 0..64_u8 {
        fs::write(tree.join(format!("{number}")), vec![number; 256 << 10]).unwrap();
    }
    let ran = sandbox.run(&["import", "--name", "large", tree.to_str().unwrap()]);
    ran.fails_with(6);
    assert!(ran.stderr.contains("no space left"), "{}", ran.stderr);
    assert!(ran.stderr.contains("bytes"), "{}", ran.stderr);
    sandbox.run(&["ls", "large"]).fails_with(3);
    assert_eq!(fs::read_dir(store.join("staging")).unwrap().count(), 0);
    assert_eq!(sandbox.run(&["inspect", "--json", "box:1"]).json()["image"], before.as_str());
    sandbox.run(&["verify", "box:1"]).ok();
}

/// Somebody empties the run directory while images are mounted. `mounts`, `umount` and `doctor` say how to
/// go on, and what they say works.
#[test]
fn a_wiped_run_directory_is_no_dead_end() {
    const TEST: &str = "a_wiped_run_directory_is_no_dead_end";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = fs::canonicalize(sandbox.dir("mnt")).unwrap();
    let target = target.to_str().unwrap();
    for wiped in ["mounts", "*"] {
        sandbox.run(&["mount", "box:1", target]).ok();
        // What is mounted stays, and with it its directory.
        let wipe = format!("rm -rf {}/*/{wiped} 2>/dev/null", sandbox.text("run"));
        let _ = Command::new("sh").args(["-c", &wipe]).status().unwrap();
        // Its other parts, if it has any, go first: the list has them in that order.
        let [hint, listed_hint] = ["-R ", ""].map(|all| format!("`umount {all}{target}`"));
        let failed = sandbox.run(&["umount", target]);
        assert!(failed.fails_with(1).stderr.contains(&hint), "{}", failed.stderr);
        // It mounted on top, and `umount --all` said nothing of what it left. Later that named it, and ended with 0.
        let stacked = sandbox.run(&["mount", "box:1", target]);
        assert!(stacked.fails_with(1).stderr.contains(&hint), "{}", stacked.stderr);
        let all = sandbox.run(&["umount", "--quiet", "--all"]);
        assert!(all.fails_with(1).stderr.contains(&listed_hint), "{}", all.stderr);
        let listed = sandbox.run(&["mounts"]);
        assert!(listed.stderr.contains(&listed_hint), "{}", listed.stderr);
        assert!(sandbox.run(&["doctor"]).stdout.contains("`cofolio mounts` says how to go on"));
        sandbox.run(&["mounts", "--reconcile"]).ok();
        assert_eq!(fs::read(sandbox.path("mnt/etc/hostname")).unwrap(), b"node\n");
        assert!(Command::new("umount").args(["-R", target]).status().unwrap().success());
        sandbox.run(&["mounts", "--reconcile"]).ok();
        assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new(), "{wiped}");
    }
    sandbox.run(&["mount", "box:1", target]).ok();
    sandbox.run(&["umount", target]).ok();
    sandbox.run(&["rm", "box:1"]).ok();
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["images"], 1);
}

/// A link `probe` in the directory for changes: after the unmount nobody could tell whether they were in use, so they
/// counted as in use for ever. The mount is refused.
#[test]
fn a_planted_probe_is_refused() {
    if !can_mount("a_planted_probe_is_refused") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (target, upper) = (sandbox.text("mnt"), sandbox.dir("upper"));
    let probe = upper.join("probe");
    std::os::unix::fs::symlink("/etc", &probe).unwrap();
    let mount = ["mount", "--rw", "--create", "--upper", upper.to_str().unwrap(), "box:1", &target];
    sandbox.run(&mount).fails_with(1).refused("`probe` in it is no directory");
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
    fs::remove_file(probe).unwrap();
    sandbox.run(&mount).ok();
    let unmounted = sandbox.run(&["umount", &target]);
    unmounted.ok();
    assert!(!unmounted.stderr.contains("in use"), "{}", unmounted.stderr);
}

/// An image that was removed between looking up its name and mounting it was called damaged, with exit code 4.
#[test]
fn an_image_that_goes_before_it_is_mounted_is_not_found() {
    if !can_mount("an_image_that_goes_before_it_is_mounted_is_not_found") {
        return;
    }
    let sandbox = Sandbox::new();
    let image = sandbox.import_tree("box:1");
    let target = sandbox.dir("mnt");
    let mount = ["mount", "box:1", target.to_str().unwrap()];
    sandbox.run(&mount).ok();
    sandbox.run(&["umount", "--all"]).ok();
    // The image's lock holds it up in between.
    let run = fs::read_dir(sandbox.path("run")).unwrap().next().unwrap().unwrap().path();
    let lock = fs::File::open(run.join("locks").join(&image[..2])).unwrap();
    lock.lock().unwrap();
    let mounting = sandbox.command(&mount).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_secs(1));
    sandbox.run(&["rm", "box:1"]).ok();
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["images"], 1);
    drop(lock);
    let ran = Ran::of(mounting.wait_with_output().unwrap());
    assert!(ran.fails_with(3).stderr.contains("`box:1`"), "{}", ran.stderr);
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
}

/// `mounts --reconcile` and `gc` named what they could not clean up, and exited with 0.
#[test]
fn what_cannot_be_cleaned_up_is_a_failure() {
    const TEST: &str = "what_cannot_be_cleaned_up_is_a_failure";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--rw", "--create", "box:1", &target]).ok();
    fs::write(Path::new(&target).join("stays"), "").unwrap();
    assert!(Command::new("umount").arg(&target).status().unwrap().success());
    let writable = sandbox.path("store/domains/default/writable");
    let chattr = |flag: &str| {
        let command = format!("chattr {flag} {}/*/upper", writable.display());
        Command::new("sh").args(["-c", &command]).output().unwrap().status.success()
    };
    if !chattr("+i") {
        return skip(TEST, "no immutable files here");
    }
    let ran = [["mounts", "--reconcile", "--json"].as_slice(), &["gc", "--json"]];
    let ran = ran.map(|arguments| sandbox.run(arguments));
    assert!(chattr("-i"));
    for ran in ran {
        assert!(ran.fails_with(1).stderr.contains("Operation not permitted"), "{}", ran.stderr);
        assert_eq!(ran.json()["failed"].as_array().map(Vec::len), Some(1), "{}", ran.stdout);
    }
    let ran = sandbox.run(&["gc", "--json"]);
    assert_eq!(ran.json()["failed"].as_array().map(Vec::len), Some(0));
    assert_eq!(fs::read_dir(&writable).unwrap().count(), 0);
}

/// A record in the run directory that cannot be read. The error names the file, and what to do.
#[test]
fn a_damaged_record_of_a_mount_is_no_dead_end() {
    const TEST: &str = "a_damaged_record_of_a_mount_is_no_dead_end";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "box:1", &target]).ok();
    let run = fs::read_dir(sandbox.path("run")).unwrap().next().unwrap().unwrap().path();
    let record = fs::read_dir(run.join("mounts")).unwrap().next().unwrap().unwrap().path();
    fs::write(&record, "{").unwrap();
    // It advised `fsck --repair`, which knows nothing of the run directory.
    let hint = format!("`rm {}`", record.display());
    let gc = sandbox.run(&["gc"]);
    assert!(gc.fails_with(4).stderr.contains(&hint), "{}", gc.stderr);
    let failed = sandbox.run(&["umount", &target]);
    failed.fails_with(4);
    let command = failed.stderr.split('`').find(|part| part.starts_with("rm ")).unwrap();
    assert!(Command::new("umount").arg(&target).status().unwrap().success());
    assert!(Command::new("sh").arg("-c").arg(command).status().unwrap().success());
    sandbox.run(&["mounts", "--reconcile"]).ok();
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
    sandbox.run(&["mount", "--create", "box:1", &target]).ok();
    sandbox.run(&["umount", &target]).ok();
}

/// `bundle` overwrote an edited `config.json`, and mounted where a planted link `DIR/rootfs` led.
#[test]
fn a_bundle_keeps_what_is_in_its_directory() {
    const TEST: &str = "a_bundle_keeps_what_is_in_its_directory";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (dir, elsewhere) = (sandbox.dir("bundle"), sandbox.dir("elsewhere"));
    let bundle = |options: &[&str]| {
        let mut args = vec!["bundle"];
        args.extend(options);
        args.extend(["box:1", dir.to_str().unwrap(), "--", "sh"]);
        sandbox.run(&args)
    };
    let config = dir.join("config.json");
    fs::write(&config, "edited").unwrap();
    let refused = bundle(&[]);
    refused.fails_with(2);
    assert!(refused.stderr.contains("--replace"), "{}", refused.stderr);
    assert_eq!(fs::read(&config).unwrap(), b"edited");

    std::os::unix::fs::symlink(&elsewhere, dir.join("rootfs")).unwrap();
    bundle(&["--replace"]).fails_with(1);
    fs::remove_file(dir.join("rootfs")).unwrap();
    std::os::unix::fs::chown(&dir, Some(1000), None).unwrap();
    bundle(&["--replace"]).fails_with(1);
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
    assert_eq!(fs::read(&config).unwrap(), b"edited");

    std::os::unix::fs::chown(&dir, Some(0), None).unwrap();
    bundle(&["--replace"]).ok();
    assert_ne!(fs::read(&config).unwrap(), b"edited");
    sandbox.run(&["umount", dir.join("rootfs").to_str().unwrap()]).ok();
}

/// What fails leaves neither a mount nor a directory.
#[test]
fn a_bundle_that_cannot_be_leaves_nothing() {
    const TEST: &str = "a_bundle_that_cannot_be_leaves_nothing";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let bundle = sandbox.text("bundle");
    let error = sandbox.run(&["bundle", "box:1", &bundle]);
    error.fails_with(2);
    assert!(error.stderr.contains("there is no command"), "{}", error.stderr);
    sandbox.run(&["bundle", "--user", "nobody", "box:1", &bundle, "--", "sh"]).fails_with(3);
    let error = sandbox.run(&["bundle", "--read-only", "box:1", &bundle, "--", "sh"]);
    error.fails_with(1);
    assert!(error.stderr.contains("mount point /proc does not exist"), "{}", error.stderr);
    assert_eq!(sandbox.run(&["mounts"]).ok(), "");
    assert!(!Path::new(&bundle).exists());

    // With a root filesystem of the caller's nothing is mounted.
    let tree = sandbox.text("tree");
    let made = sandbox
        .run(&["bundle", "--json", "--rootfs", &tree, "-u", "app", "box:1", &bundle, "--", "sh"]);
    made.ok();
    assert_eq!(made.json()["config"]["process"]["user"]["uid"], 7);
    assert_eq!(sandbox.run(&["mounts"]).ok(), "");
}

/// Root wrote to whatever a link led to that a user had put where root had named a new directory.
#[test]
fn links_of_other_users_are_not_followed() {
    use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};
    const TEST: &str = "links_of_other_users_are_not_followed";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("one:1");
    let secret = sandbox.dir("secret");
    let (theirs, sticky) = (sandbox.dir("theirs"), sandbox.dir("sticky"));
    lchown(&theirs, Some(65534), None).unwrap();
    fs::set_permissions(&sticky, fs::Permissions::from_mode(0o1777)).unwrap();
    let link = |dir: &Path, owner| {
        let path = dir.join(format!("link-{owner}"));
        symlink(&secret, &path).unwrap();
        lchown(&path, Some(owner), None).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let planted = [link(&theirs, 65534), link(&theirs, 0), link(&sticky, 65534)];
    let mnt = sandbox.text("mnt");
    let tries = |link: &str| {
        let runs = [
            sandbox.run(&["mount", "--rw", "--upper", link, "--create", "one:1", &mnt]),
            sandbox.run(&[
                "mount",
                "--rw",
                "--upper",
                &format!("{link}/new"),
                "--create",
                "one:1",
                &mnt,
            ]),
            sandbox.run(&["bundle", "one:1", link, "--", "/bin/true"]),
            sandbox.run(&["export", "one:1", &format!("oci:{link}")]),
            sandbox.run(&["export", "one:1", &format!("oci:{link}/new")]),
        ];
        sandbox.run(&["umount", "--all"]).ok();
        runs
    };
    for link in &planted {
        for ran in tries(link) {
            assert!(ran.fails_with(1).stderr.contains(link.as_str()), "{}", ran.stderr);
        }
        assert_eq!(fs::read_dir(&secret).unwrap().count(), 0, "{link}");
    }
    let own = [link(&sandbox.dir("own"), 0), link(&sticky, 0)];
    for link in &own {
        sandbox.run(&["export", "one:1", &format!("oci:{link}/new")]).ok();
        fs::remove_dir_all(secret.join("new")).unwrap();
    }
}
