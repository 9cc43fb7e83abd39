//! `mkcomposefs`, compared with the real one and with composefs' own test dumps.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Ran, Sandbox, program, skip};
use sha2::{Digest, Sha256};

/// The real one: a command from COFOLIO_MKCOMPOSEFS, or what is on the path.
fn peer() -> Result<Vec<String>, String> {
    if let Ok(command) = std::env::var("COFOLIO_MKCOMPOSEFS") {
        return Ok(command.split_whitespace().map(str::to_owned).collect());
    }
    match program("mkcomposefs") {
        Some(path) => Ok(vec![path.to_string_lossy().into_owned()]),
        None => Err("no mkcomposefs; COFOLIO_MKCOMPOSEFS may name it".to_owned()),
    }
}

/// Ours, called by that name as a packager would install it.
fn ours(sandbox: &Sandbox) -> Command {
    let link = sandbox.path("mkcomposefs");
    if !link.exists() {
        symlink(env!("CARGO_BIN_EXE_cofolio"), &link).unwrap();
    }
    Command::new(link)
}

fn run(mut command: Command, dir: &Path, args: &[&str], input: &[u8]) -> Ran {
    command.current_dir(dir).args(args);
    common::run_with_input(command, input)
}

/// A directory with what directories can have, hard links apart.
fn tree(sandbox: &Sandbox) -> PathBuf {
    let root = sandbox.dir("work/tree");
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    for (size, name) in [(0, "empty"), (1, "one"), (64, "inline"), (65, "object"), (4097, "blocks")]
    {
        fs::write(root.join(name), vec![b'#'; size]).unwrap();
    }
    fs::write(root.join("a/same"), vec![b'#'; 4097]).unwrap();
    fs::write(root.join(OsStr::from_bytes(b"a/\xff\xfe \x01")), vec![b'!'; 200]).unwrap();
    fs::write(root.join("a/".to_owned() + &"n".repeat(255)), "long").unwrap();
    symlink("../..", root.join("a/b/up")).unwrap();
    symlink("x".repeat(4000), root.join("a/b/far")).unwrap();
    for number in 0..300 {
        fs::write(root.join(format!("a/b/c/{number}")), vec![b'f'; number]).unwrap();
    }
    let mode = rustix::fs::Mode::from_raw_mode(0o640);
    let mut special = vec![("fifo", rustix::fs::FileType::Fifo, 0)];
    if rustix::process::geteuid().is_root() {
        special.push(("null", rustix::fs::FileType::CharacterDevice, rustix::fs::makedev(1, 3)));
        special.push(("whiteout", rustix::fs::FileType::CharacterDevice, 0));
        special.push(("disk", rustix::fs::FileType::BlockDevice, rustix::fs::makedev(259, 70_000)));
        for (name, value) in [("security.x", "1"), ("trusted.overlay.opaque", "y")] {
            let flags = rustix::fs::XattrFlags::empty();
            // Where the filesystem has such attributes.
            let _ = rustix::fs::setxattr(root.join("a/b"), name, value.as_bytes(), flags);
        }
        std::os::unix::fs::lchown(root.join("one"), Some(100_000), Some(3_000_000_000)).unwrap();
    }
    for (name, kind, device) in special {
        rustix::fs::mknodat(rustix::fs::CWD, root.join(name), kind, mode, device).unwrap();
    }
    let flags = rustix::fs::XattrFlags::empty();
    let _ = rustix::fs::setxattr(root.join("object"), "user.note", b"value", flags);
    root
}

#[test]
fn directories_give_the_same_bytes_digests_and_exit_codes() {
    const TEST: &str = "directories_give_the_same_bytes_digests_and_exit_codes";
    let peer = match peer() {
        Ok(peer) => peer,
        Err(reason) => return skip(TEST, &reason),
    };
    let sandbox = Sandbox::new();
    tree(&sandbox);
    let work = sandbox.path("work");
    fs::write(work.join("bad.dump"), "nonsense\n").unwrap();
    symlink("tree", work.join("link")).unwrap();
    let cases: &[&[&str]] = &[
        &["tree", "image"],
        &["--print-digest", "tree", "image"],
        &["tree", "image", "--print-digest"],
        &["--print-digest-only", "tree"],
        &["--use-epoch", "--print-digest", "tree", "image"],
        &["--skip-devices", "tree", "image"],
        &["--skip-xattrs", "tree", "image"],
        &["--user-xattrs", "tree", "image"],
        &["--min-version=1", "tree", "image"],
        &["--max-version=0", "tree", "image"],
        &["--thr", "3", "tree", "image"],
        &["--digest-store=objects", "--print-digest", "tree", "image"],
        &["--print-digest", "tree", "-"],
        &["--", "tree", "image"],
        &["link/", "image"],
        // What is refused.
        &["link", "image"],
        &["tree/one", "image"],
        &["nothing", "image"],
        &["tree", "nothing/image"],
        &["--skip-xattrs", "--user-xattrs", "tree", "image"],
        &["--max-version=2", "tree", "image"],
        &["--min-version=-1", "tree", "image"],
        &["--from-file", "bad.dump", "image"],
        &["--from-file", "nothing", "image"],
        &["--from-file", "-", "image"],
        &["tree"],
        &["--print", "tree", "image"],
        &["--threads=0", "tree", "image"],
        &["--threads"],
        &["--help"],
        &["-x", "tree", "image"],
        &[],
    ];
    let image = work.join("image");
    let objects = work.join("objects");
    for args in cases {
        let take = || {
            let bytes = fs::read(&image).ok();
            let _ = fs::remove_file(&image);
            let listed = listing(&objects);
            let _ = fs::remove_dir_all(&objects);
            (bytes, listed)
        };
        let mut command = Command::new(&peer[0]);
        command.args(&peer[1..]);
        let theirs = run(command, &work, args, b"");
        let (their_image, their_objects) = take();
        let mine = run(ours(&sandbox), &work, args, b"");
        let (my_image, my_objects) = take();
        assert_eq!(mine.code, theirs.code, "{args:?}: {} / {}", mine.stderr, theirs.stderr);
        assert!(mine.bytes == theirs.bytes, "{args:?}: standard output differs");
        assert!(my_image == their_image, "{args:?}: the image differs");
        assert_eq!(my_objects, their_objects, "{args:?}");
    }
}

/// Names and sizes of the files of an object directory.
fn listing(objects: &Path) -> Vec<(PathBuf, u64)> {
    let mut list = Vec::new();
    let Ok(shards) = fs::read_dir(objects) else { return list };
    for shard in shards {
        let shard = shard.unwrap().path();
        for object in fs::read_dir(&shard).into_iter().flatten() {
            let object = object.unwrap();
            list.push((object.path(), object.metadata().unwrap().len()));
        }
    }
    list.sort();
    list
}

/// The one difference that is meant: mkcomposefs makes two files of a file with two names.
#[test]
fn hard_links_stay_hard_links() {
    let sandbox = Sandbox::new();
    let work = sandbox.dir("work");
    fs::create_dir(work.join("tree")).unwrap();
    fs::write(work.join("tree/one"), vec![b'x'; 100]).unwrap();
    fs::hard_link(work.join("tree/one"), work.join("tree/two")).unwrap();
    run(ours(&sandbox), &work, &["tree", "image"], b"").ok();
    let dump = sandbox.run(&["dump", work.join("image").to_str().unwrap()]);
    let links: Vec<_> = dump.ok().lines().filter(|line| line.contains(" @")).collect();
    assert_eq!(links.len(), 1, "{}", dump.stdout);
    assert!(links[0].starts_with("/two ") && links[0].contains(" /one "), "{}", links[0]);
}

#[test]
fn composefs_own_dumps_give_their_checksums() {
    const TEST: &str = "composefs_own_dumps_give_their_checksums";
    let dir = match std::env::var_os("COFOLIO_ORACLES") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/oracles"),
    };
    let Ok(entries) = fs::read_dir(dir.join("composefs")) else {
        return skip(TEST, "no oracles; COFOLIO_ORACLES may name their directory");
    };
    let sandbox = Sandbox::new();
    let work = sandbox.dir("work");
    let (mut same, mut refused) = (0, 0);
    for entry in entries {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !name.ends_with(".dump") {
            continue;
        }
        let image = work.join("image");
        let args = ["--from-file", path.to_str().unwrap(), image.to_str().unwrap()];
        if name.starts_with("should-fail") {
            assert_eq!(run(ours(&sandbox), &work, &args, b"").code, 1, "{name}");
            refused += 1;
            continue;
        }
        // As composefs' own test-checksums.sh does.
        let version = fs::read_to_string(path.with_extension("dump.version")).ok();
        let bounds: Vec<String> = ["min", "max"]
            .iter()
            .filter_map(|end| Some(format!("--{end}-version={}", version.as_ref()?.trim())))
            .collect();
        let args: Vec<&str> = bounds.iter().map(String::as_str).chain(args).collect();
        run(ours(&sandbox), &work, &args, b"").ok();
        let sum = Sha256::digest(fs::read(&image).unwrap());
        let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = fs::read_to_string(path.with_extension("dump.sha256")).unwrap();
        assert!(expected.starts_with(&sum), "{name}");
        same += 1;
    }
    assert!(same >= 8 && refused >= 10, "{same} {refused}");
}
