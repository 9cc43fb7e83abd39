//! `cofolio backend inode-share`: what is mounted with it, what it shares, and what becomes of damage. Needs Linux 7.0,
//! so most of it runs in a guest (`tests/vm/run backend-inode-share backend-verity-ext4 backend-verity-btrfs`).

#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "../../node/tests/common/cache.rs"]
mod cache;
mod common;

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cache::{SIZE, all_pages, content, forget, resident};
use common::machine::machine;
use common::{Sandbox, can_mount, has_inode_share, lacks_inode_share, listing, program, skip};

/// Two images with the same file under other names, owners and modes, and each with one of its own.
fn two_images() -> Sandbox {
    let sandbox = Sandbox::new();
    let one = sandbox.tree("one");
    fs::write(one.join("shared"), content(0)).unwrap();
    fs::write(one.join("own"), content(1)).unwrap();
    fs::hard_link(one.join("shared"), one.join("etc/linked")).unwrap();
    Command::new("mkfifo").arg(one.join("pipe")).status().unwrap();
    let two = sandbox.dir("two");
    fs::create_dir(two.join("deep")).unwrap();
    fs::write(two.join("deep/other"), content(0)).unwrap();
    fs::write(two.join("own"), content(2)).unwrap();
    // Most of the second one is in the segment of the first.
    let mut version = [content(3), content(4), content(5)].concat();
    fs::write(one.join("version"), &version).unwrap();
    version[SIZE + SIZE / 2] ^= 1;
    fs::write(two.join("version"), &version).unwrap();
    std::os::unix::fs::chown(two.join("deep/other"), Some(7), Some(8)).unwrap();
    let mode = fs::Permissions::from_mode(0o4755);
    fs::set_permissions(two.join("deep/other"), mode).unwrap();
    for name in ["one", "two"] {
        let tree = sandbox.text(name);
        sandbox.run(&["import", "--quiet", "--name", &format!("{name}:1"), &tree]).ok();
    }
    sandbox
}

/// The same, in a domain that is mounted with inode-share.
fn two_shared() -> Sandbox {
    two_shared_over(&[])
}

/// Over plain packs, or with `--lz4` over compressed ones.
fn two_shared_over(form: &[&str]) -> Sandbox {
    let sandbox = two_images();
    sandbox.run(&[&["backend", "inode-share"], form].concat()).ok();
    sandbox
}

fn mount(sandbox: &Sandbox, image: &str, options: &[&str]) -> PathBuf {
    let name = format!("on-{}", image.replace(':', "-") + &options.join(""));
    let target = sandbox.text(&name);
    sandbox.run(&[&["mount", "--quiet", "--create"], options, &[image, &target]].concat()).ok();
    target.into()
}

#[test]
fn a_kernel_without_it_says_so() {
    let test = "a_kernel_without_it_says_so";
    if !can_mount(test) {
        return;
    }
    if lacks_inode_share().is_none() {
        return skip(test, "this kernel has inode_share");
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let refused = sandbox.run(&["backend", "inode-share"]);
    assert!(refused.fails_with(5).stderr.contains("Linux 7.0"), "{}", refused.stderr);
    assert_eq!(sandbox.run(&["backend"]).ok(), "overlay\n");
    assert_eq!(fs::read_dir(sandbox.path("store/domains/default/segments")).unwrap().count(), 0);
}

#[test]
fn mounts_show_the_image_and_share_what_is_the_same() {
    let test = "mounts_show_the_image_and_share_what_is_the_same";
    if !has_inode_share(test) {
        return;
    }
    show_and_share(&["inode-share"], "inode-share\n");
    show_and_share(&["inode-share", "--lz4"], "inode-share, packs compressed with LZ4\n");
}

fn show_and_share(backend: &[&str], said: &str) {
    let backend = [&["backend"], backend].concat();
    let sandbox = two_images();
    let expected = ["one:1", "two:1"].map(|image| {
        let target = mount(&sandbox, image, &[]);
        let listing = listing(&target);
        // Not while something is mounted the other way.
        assert_eq!(sandbox.run(&backend).code, 7);
        sandbox.run(&["umount", target.to_str().unwrap()]).ok();
        listing
    });
    assert_eq!(sandbox.run(&backend).ok(), said);
    let (one, two) = (mount(&sandbox, "one:1", &[]), mount(&sandbox, "two:1", &[]));
    assert_eq!([listing(&one), listing(&two)], expected);
    assert_eq!(sandbox.run(&["backend", "overlay"]).code, 7);
    let other_form = if backend.len() == 2 {
        vec!["backend", "inode-share", "--lz4"]
    } else {
        vec!["backend", "inode-share"]
    };
    assert_eq!(sandbox.run(&other_form).code, 7);
    let (shared, other) = (one.join("shared"), two.join("deep/other"));
    forget(&shared);
    assert_eq!(resident(&other), 0);
    assert!(fs::read(&shared).unwrap() == content(0));
    assert_eq!(resident(&other), all_pages());
    let meta = other.metadata().unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o4755, 7, 8));

    // Writable: the same pages below, until something is changed; and id-mapped.
    let written = mount(&sandbox, "one:1", &["--rw"]);
    assert_eq!(listing(&written), expected[0]);
    forget(&shared);
    assert!(fs::read(written.join("shared")).unwrap() == content(0));
    assert_eq!(resident(&other), all_pages());
    let file = File::options().write(true).open(written.join("shared")).unwrap();
    file.write_all_at(b"changed", 0).unwrap();
    drop(file);
    assert!(fs::read(&other).unwrap() == content(0));
    assert!(fs::read(written.join("shared")).unwrap().starts_with(b"changed"));
    let mapped = mount(&sandbox, "two:1", &["--idmap=0:100000:65536"]);
    assert_eq!(mapped.join("deep/other").metadata().unwrap().uid(), 100_007);
    assert!(fs::read(mapped.join("deep/other")).unwrap() == content(0));
    let mapped = mount(&sandbox, "two:1", &["--rw", "--idmap=0:100000:65536"]);
    assert_eq!(mapped.join("deep/other").metadata().unwrap().uid(), 100_007);
    fs::write(mapped.join("new"), "x").unwrap();

    // One of them goes: the other keeps what is cached.
    let open = File::open(&other).unwrap();
    sandbox.run(&["umount", one.to_str().unwrap()]).ok();
    sandbox.run(&["umount", written.to_str().unwrap()]).ok();
    assert_eq!(resident(&other), all_pages());
    let mut bytes = vec![0; SIZE];
    open.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == content(0));
    drop(open);

    // Packed anew, renamed and collected below a mount: it stays whole.
    sandbox.run(&["pack", "--again", "two:1"]).ok();
    sandbox.run(&["rm", "one:1"]).ok();
    sandbox.run(&["gc"]).ok();
    forget(&other);
    assert_eq!(listing(&two), expected[1]);
    sandbox.run(&["umount", "--all"]).ok();
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
    sandbox.run(&["fsck"]).ok();
    let again = mount(&sandbox, "two:1", &[]);
    assert_eq!(listing(&again), expected[1]);
}

/// A runtime that starts a container has copies of all mounts for a moment. Images that were unmounted at that moment
/// stayed pinned, and `backend` refused with "mounts: 0" until the next upkeep.
#[test]
fn pins_without_users_do_not_keep_the_backend() {
    let test = "pins_without_users_do_not_keep_the_backend";
    if !has_inode_share(test) {
        return;
    }
    let sandbox = two_shared();
    mount(&sandbox, "one:1", &[]);
    let mut copy = Command::new("busybox")
        .args(["unshare", "-m", "sh", "-c", "echo; read end"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    copy.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    sandbox.run(&["umount", "--all"]).ok();
    assert_eq!(sandbox.run(&["backend", "overlay"]).code, 7);
    drop(copy.stdin.take());
    copy.wait().unwrap();
    sandbox.run(&["backend", "overlay"]).ok();
}

/// The kernel shares what is compressed with its like, and nothing with what is plain. Where it comes to, a domain need not
/// have one form of packs any more.
#[test]
fn a_domain_has_one_form_because_the_kernel_shares_none_between_two() {
    let test = "a_domain_has_one_form_because_the_kernel_shares_none_between_two";
    if !has_inode_share(test) {
        return;
    }
    let sandbox = two_shared();
    let domain = sandbox.path("store/domains/default");
    let settings = || -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(domain.join("domain.json")).unwrap()).unwrap()
    };
    // The plain pack of one, for a mount by hand.
    let packed = sandbox.run(&["pack", "--json", "one:1"]).json()[0].take();
    assert_eq!(packed["form"], "plain");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let aside = sandbox.dir("aside");
    let pack = format!("{}.{}.pack", text(&packed["image"]), text(&packed["pack"]));
    fs::copy(domain.join("segments").join(&pack), aside.join("pack")).unwrap();
    let mut devices = String::new();
    for segment in packed["segments"].as_array().unwrap() {
        let file = format!("{}.segment", text(segment));
        fs::copy(domain.join("segments").join(&file), aside.join(&file)).unwrap();
        devices += &format!("device={},", aside.join(&file).display());
    }
    sandbox.run(&["pack", "--lz4", "one:1"]).fails_with(2);
    sandbox.run(&["backend", "overlay", "--lz4"]).fails_with(2);
    sandbox.run(&["backend", "inode-share", "--lz4"]).ok();
    assert_eq!(settings()["packs"], "lz4");
    let packed = sandbox.run(&["pack", "--json", "one:1"]).json()[0].take();
    assert_eq!((&packed["form"], &packed["was_there"]), (&"lz4".into(), &true.into()));
    // What comes later is compressed, too.
    sandbox.import_tree("later:1");
    let later = sandbox.run(&["pack", "--json", "later:1"]).json()[0].take();
    assert_eq!((&later["form"], &later["was_there"]), (&"lz4".into(), &true.into()));
    assert!(sandbox.run(&["doctor"]).ok().contains("compressed with LZ4"));

    let (one, two) = (mount(&sandbox, "one:1", &[]), mount(&sandbox, "two:1", &[]));
    rustix::fs::sync();
    let plain = sandbox.dir("plain");
    let options =
        format!("directio,{devices}inode_share,domain_id={}", text(&settings()["secret"]));
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount(
        aside.join("pack"),
        &plain,
        "erofs",
        rustix::mount::MountFlags::RDONLY,
        &*options,
    )
    .unwrap();
    let compared = std::panic::catch_unwind(|| {
        forget(&one.join("shared"));
        assert!(fs::read(one.join("shared")).unwrap() == content(0));
        assert_eq!(resident(&two.join("deep/other")), all_pages(), "compressed with compressed");
        assert_eq!(
            resident(&plain.join("shared")),
            0,
            "compressed and plain content share on this kernel"
        );
        assert!(fs::read(plain.join("shared")).unwrap() == content(0));
    });
    // Superblocks go together, or this kernel crashes.
    sandbox.run(&["umount", "--all"]).ok();
    rustix::mount::unmount(&plain, rustix::mount::UnmountFlags::empty()).unwrap();
    compared.unwrap();
    sandbox.run(&["backend", "inode-share"]).ok();
    assert_eq!(settings()["packs"], "plain");
    assert!(!sandbox.run(&["fsck"]).ok().contains("FINDING"));
}

/// Segments are read past the page cache, but for those with fs-verity, which nobody may read so: their pages are
/// cached twice. The second copy can be given back at any time, and the one that containers use stays.
#[test]
fn what_the_kernel_checks_is_cached_twice() {
    let test = "what_the_kernel_checks_is_cached_twice";
    if !has_inode_share(test) {
        return;
    }
    let sandbox = two_shared();
    let packed = sandbox.run(&["pack", "--json", "one:1"]).json()[0].take();
    let segment = format!("{}.segment", packed["segments"][0].as_str().unwrap());
    let segment = sandbox.path("store/domains/default/segments").join(segment);
    let shared = mount(&sandbox, "one:1", &[]).join("shared");
    forget(&segment);
    forget(&shared);
    // What the kernel did not give back is there already when the file is read.
    let before = resident(&segment);
    assert!(fs::read(&shared).unwrap() == content(0));
    let (above, below) = (resident(&shared), resident(&segment));
    eprintln!("   {above} pages for containers, {below} below them in the segment");
    assert_eq!(above, all_pages());
    let verity = sandbox.run(&["doctor"]).ok().contains("by the kernel, every read");
    assert_eq!(below >= all_pages(), verity);
    assert!(verity || below <= before, "{below} pages, {before} before");
    forget(&segment);
    assert!(resident(&segment) <= before);
    assert_eq!(resident(&shared), all_pages());
}

/// The kernel's name of a domain is like a password: no message, listing or table of the kernel's shows it.
#[test]
fn the_secret_is_shown_nowhere() {
    let test = "the_secret_is_shown_nowhere";
    if !has_inode_share(test) {
        return;
    }
    let sandbox = two_shared();
    let settings = fs::read_to_string(sandbox.path("store/domains/default/domain.json")).unwrap();
    let settings: serde_json::Value = serde_json::from_str(&settings).unwrap();
    let secret = settings["secret"].as_str().unwrap();
    assert_eq!(secret.len(), 64);
    mount(&sandbox, "one:1", &[]);
    mount(&sandbox, "two:1", &["--rw"]);
    let mut said = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(said.contains("inode_share"));
    said += &fs::read_to_string("/proc/mounts").unwrap();
    for args in [&["mounts"] as &[&str], &["backend"], &["doctor", "--long"], &["du"]] {
        said += sandbox.run(args).ok();
        said += sandbox.run(&[args, &["--json"]].concat()).ok();
    }
    assert!(!said.contains(secret), "{}", said.replace(secret, "<the secret>"));
    let mut open = vec![sandbox.path("run")];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true if !sandbox.mounted().contains(&path) => open.push(path),
                true => {}
                false => assert!(!fs::read_to_string(path).unwrap().contains(secret)),
            }
        }
    }
}

#[test]
fn containers_run() {
    let test = "containers_run";
    if !has_inode_share(test) {
        return;
    }
    let (Some(busybox), Some(_)) = (program("busybox"), program("crun").or(program("runc"))) else {
        return skip(test, "needs busybox, and crun or runc");
    };
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("box");
    for dir in ["bin", "proc", "sys", "dev", "tmp", "etc"] {
        fs::create_dir(tree.join(dir)).unwrap();
    }
    fs::copy(busybox, tree.join("bin/busybox")).unwrap();
    fs::write(tree.join("etc/motd"), "from the image\n").unwrap();
    sandbox.run(&["import", "--quiet", "--name", "box:1", tree.to_str().unwrap()]).ok();
    sandbox.run(&["backend", "inode-share"]).ok();
    let script = "cat /etc/motd && ! touch /etc/new 2>/dev/null";
    let sh = ["--entrypoint", "", "box:1", "--", "/bin/busybox", "sh", "-c"];
    let ran = sandbox.run(&[&["run", "--quiet"], &sh[..], &[script]].concat());
    assert_eq!(ran.ok(), "from the image\n");
    let script = "echo more >>/etc/motd && cat /etc/motd";
    let ran = sandbox.run(&[&["run", "--quiet", "--rw"], &sh[..], &[script]].concat());
    assert_eq!(ran.ok(), "from the image\nmore\n");
    sandbox.run(&["mounts", "--reconcile"]).ok();
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
}

/// The pages of a container are in a superblock that goes with the last mount of its domain. The
/// recording looked at them when the container had been unmounted: it failed unless something else
/// of the domain was mounted.
#[test]
fn a_recording_looks_at_pages_before_they_go() {
    let test = "a_recording_looks_at_pages_before_they_go";
    if !has_inode_share(test) {
        return;
    }
    let Some((machine, _)) = machine(test) else { return };
    machine.run(&["backend", "inode-share"]).ok();
    let record = ["profile", "record", "--rw"];
    // `cat` would splice, which reads no shared page.
    machine.run(&[&record[..], &["box:1", "--", "head", "/bin/text"]].concat()).ok();
    let shown = || machine.run(&["profile", "show", "box:1"]).ok().to_owned();
    assert!(shown().contains("/bin/text  11 B\n"), "{}", shown());
    // One that does not end is ended.
    let script = "trap exit TERM; head /etc/group; echo >/etc/x; sleep 1000 & wait";
    let record = [&record[..], &["--seconds", "8", "box:1", "--", "sh", "-c", script]];
    machine.run(&record.concat()).ok();
    let shown = shown();
    assert!(shown.contains("/etc/group  15 B\n") && shown.contains("writes to /etc\n"), "{shown}");
    machine.assert_clean();
}

/// Linux 7.2 crashes if a superblock goes while a file that it shares is read through another. So all stay until the last
/// goes, and for good if somebody may still be reading what was detached.
#[test]
fn superblocks_go_together() {
    let test = "superblocks_go_together";
    if !has_inode_share(test) {
        return;
    }
    let sandbox = two_shared();
    let pins = || sandbox.run(&["mounts", "--json"]).json()["pins"].as_array().unwrap().len();
    let unmount = |target: &Path, options: &[&str]| {
        sandbox.run(&[&["umount", target.to_str().unwrap()], options].concat()).ok();
    };
    let (one, two) = (mount(&sandbox, "one:1", &[]), mount(&sandbox, "two:1", &["--rw"]));
    unmount(&one, &["--force"]);
    assert_eq!(pins(), 2, "one is used by nobody, and stays");
    // It counts as mounted.
    sandbox.run(&["rm", "one:1"]).ok();
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["images"], 0);
    unmount(&two, &[]);
    assert_eq!(pins(), 0);
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["images"], 1);

    // Another image has got a user, and is about to be mounted: its record of being pinned comes later. What nobody is
    // behind is put right.
    let two = mount(&sandbox, "two:1", &[]);
    let run = fs::read_dir(sandbox.path("run")).unwrap().next().unwrap().unwrap().path();
    let users = run.join("images/default").join("00".repeat(32)).join("users");
    fs::create_dir_all(&users).unwrap();
    fs::write(users.join("coming"), "").unwrap();
    unmount(&two, &[]);
    assert_eq!(pins(), 1, "somebody comes");
    sandbox.run(&["mounts", "--reconcile"]).ok();
    assert_eq!(pins(), 0);

    let two = mount(&sandbox, "two:1", &[]);
    let file = File::open(two.join("deep/other")).unwrap();
    unmount(&two, &["--force"]);
    sandbox.run(&["mounts", "--reconcile"]).ok();
    assert_eq!(pins(), 1, "somebody reads it");
    let mut bytes = vec![0; SIZE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == content(0));
}

#[test]
fn domains_share_nothing() {
    let test = "domains_share_nothing";
    if !has_inode_share(test) {
        return;
    }
    let sandbox = two_shared();
    let tree = sandbox.text("two");
    sandbox.run(&["--domain", "tenant", "import", "--quiet", "--name", "two:1", &tree]).ok();
    sandbox.run(&["--domain", "tenant", "backend", "inode-share"]).ok();
    let one = mount(&sandbox, "one:1", &[]);
    let two = sandbox.text("theirs");
    sandbox.run(&["--domain", "tenant", "mount", "--quiet", "--create", "two:1", &two]).ok();
    let other = Path::new(&two).join("deep/other");
    forget(&one.join("shared"));
    forget(&other);
    assert!(fs::read(one.join("shared")).unwrap() == content(0));
    assert_eq!(resident(&other), 0);
    assert!(fs::read(&other).unwrap() == content(0));
    forget(&one.join("shared"));
    assert_eq!(resident(&other), all_pages());
}

#[test]
fn an_image_is_packed_when_it_comes_and_refused_without_a_pack() {
    let test = "an_image_is_packed_when_it_comes_and_refused_without_a_pack";
    if !has_inode_share(test) {
        return;
    }
    let sandbox = two_shared();
    sandbox.import_tree("later:1");
    mount(&sandbox, "later:1", &[]);
    sandbox.run(&["umount", "--all"]).ok();
    sandbox.run(&["pack", "--remove", "later:1"]).ok();
    let target = sandbox.text("target");
    let refused = sandbox.run(&["mount", "--create", "later:1", &target]);
    assert!(refused.fails_with(3).stderr.contains("cofolio pack"), "{}", refused.stderr);
    assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new());
    assert!(!Path::new(&target).exists());
    // It comes again, though it is known.
    sandbox.run(&["import", "--quiet", "--name", "later:1", &sandbox.text("tree")]).ok();
    mount(&sandbox, "later:1", &[]);
}

/// A segment that is cut, altered or replaced: with fs-verity the kernel gives an error and no wrong byte, without it
/// the mount sees what is cut, and `verify` and `fsck` what is altered.
#[test]
fn damaged_segments_and_packs_are_noticed() {
    let test = "damaged_segments_and_packs_are_noticed";
    if !has_inode_share(test) {
        return;
    }
    damage_is_noticed(&[]);
    damage_is_noticed(&["--lz4"]);
}

fn damage_is_noticed(form: &[&str]) {
    let sandbox = two_shared_over(form);
    let domain = sandbox.path("store/domains/default/segments");
    let packed = sandbox.run(&["pack", "--json", "one:1"]).json()[0].take();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let pack = format!("{}.{}.pack", text(&packed["image"]), text(&packed["pack"]));
    let segment = format!("{}.segment", text(&packed["segments"][0]));
    let doctor = sandbox.run(&["doctor"]);
    let verity = doctor.ok().contains("by the kernel, every read");
    assert_eq!(doctor.stdout.contains("(no fs-verity"), !verity, "{}", doctor.stdout);
    for limit in ["sendfile and splice", "O_DIRECT", "compressed and plain content"] {
        assert!(doctor.stdout.contains(limit), "{}", doctor.stdout);
    }
    let target = sandbox.text("target");
    let refused = |why: &str| {
        let ran = sandbox.run(&["mount", "--create", "one:1", &target]);
        assert_ne!(ran.code, 0, "{why}");
        assert_eq!(sandbox.mounted(), Vec::<PathBuf>::new(), "{why}");
        eprintln!("   {why}: {}", ran.stderr.lines().next().unwrap_or_default());
    };
    for (what, file) in [("segment", segment), ("pack", pack)] {
        let file = domain.join(file);
        let bytes = fs::read(&file).unwrap();
        let mut altered = bytes.clone();
        altered[bytes.len() / 2] ^= 1;
        let replaced = sandbox.replace(&file, &bytes[..bytes.len() / 2], false);
        refused(&format!("{what} cut"));
        replaced.restore();
        let replaced = sandbox.replace(&file, &altered, false);
        sandbox.run(&["verify", "one:1"]).fails_with(4);
        sandbox.run(&["fsck"]).fails_with(4);
        if verity || what == "pack" {
            refused(&format!("{what} altered"));
        }
        replaced.restore();
        if verity {
            let replaced = sandbox.replace(&file, &altered, true);
            refused(&format!("{what} altered, with fs-verity"));
            replaced.restore();
            let replaced = sandbox.replace(&file, &bytes, false);
            refused(&format!("{what} without fs-verity"));
            replaced.restore();
            // What is read while it is there is what was put in.
            let required = ["mount", "--create", "--require-verity", "one:1", &target];
            sandbox.run(&required).ok();
            assert!(fs::read(Path::new(&target).join("shared")).unwrap() == content(0));
            sandbox.run(&["umount", &target]).ok();
        }
    }
    sandbox.run(&["fsck"]).ok();
    sandbox.run(&["mount", "--create", "one:1", &target]).ok();
    assert!(fs::read(Path::new(&target).join("shared")).unwrap() == content(0));
}
