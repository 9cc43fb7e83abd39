//! What the command line says of images that want to talk to the operator's terminal. The images themselves are
//! tested in `crates/node/tests/hostile`; `docs/HOSTILE.md` lists all of it.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use common::{Sandbox, can_mount, program, skip};
use serde_json::{Value, json};

const EVIL: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J";

/// What an attacker makes of an index.
type Change = Box<dyn Fn(&mut Value)>;

/// No byte that a terminal obeys, but line ends.
#[track_caller]
fn is_harmless(text: &str) {
    let obeyed = |c: &char| c.is_control() && *c != '\n' && *c != '\t' || *c == '\u{202e}';
    assert!(!text.chars().any(|c| obeyed(&c)), "{text:?}");
}

/// A layout of one image whose index says what `change` makes of it.
fn layout(sandbox: &Sandbox, change: impl Fn(&mut Value)) -> String {
    let path = sandbox.path("layout");
    let _ = fs::remove_dir_all(&path);
    sandbox.run(&["export", "box:1", &format!("oci:{}", path.display())]).ok();
    let index = path.join("index.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    change(&mut value);
    fs::write(&index, value.to_string()).unwrap();
    format!("oci:{}", path.display())
}

/// Names of images, platforms, media types and digests in an index end up in errors: "it has: …". They must not clear
/// the screen or write into the window's title, and none of it may be taken for a name.
#[test]
fn errors_do_not_drive_the_terminal() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let name = "org.opencontainers.image.ref.name";
    let cases: Vec<(&str, Change)> = vec![
        (":other", Box::new(|index| index["manifests"][0]["annotations"] = json!({name: EVIL}))),
        (
            "",
            Box::new(|index| {
                index["manifests"][0]["annotations"] =
                    json!({name: format!("a:{EVIL}\u{202e}\nline")});
            }),
        ),
        ("", Box::new(|index| index["manifests"][0]["digest"] = json!(EVIL))),
        ("", Box::new(|index| index["manifests"][0]["mediaType"] = json!(EVIL))),
        (
            "",
            Box::new(|index| {
                let platform = json!({"os": EVIL, "architecture": EVIL, "variant": EVIL});
                let mut one = index["manifests"][0].clone();
                one["platform"] = platform;
                index["manifests"] = json!([one.clone(), one]);
            }),
        ),
        ("", Box::new(|index| index["schemaVersion"] = json!(EVIL))),
    ];
    for (tag, change) in cases {
        let source = format!("{}{tag}", layout(&sandbox, change));
        let ran = sandbox.run(&["import", &source, "--store", &sandbox.text("other")]);
        assert_ne!(ran.code, 0, "{}", ran.stdout);
        is_harmless(&ran.stderr);
        assert!(!ran.stderr.contains("\nline"), "{}", ran.stderr);
        assert!(ran.stderr.contains("x1b") || ran.stderr.contains("u{1b}"), "{}", ran.stderr);
    }
}

/// Files of an image with names that are commands to a terminal: `ls` shows them escaped on a terminal, in tables and
/// in JSON, and gives the bytes themselves to a pipe, as `ls` does.
#[test]
fn names_are_shown_escaped() {
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("evil");
    let names: [&[u8]; 4] =
        [b"\x1b[2Jname", b"new\nline", b"\xff\xfe", "\u{202e}txt.exe".as_bytes()];
    for name in names {
        fs::write(tree.join(std::ffi::OsStr::from_bytes(name)), "x").unwrap();
        let link = [b"link-", name].concat();
        let link = tree.join(std::ffi::OsStr::from_bytes(&link));
        std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(name), link).unwrap();
    }
    sandbox.run(&["import", "--name", "evil:1", tree.to_str().unwrap()]).ok();
    for args in [&["ls", "-l", "evil:1"][..], &["ls", "-lR", "evil:1"], &["ls", "--json", "evil:1"]]
    {
        let ran = sandbox.run(args);
        is_harmless(ran.ok());
        assert!(ran.stdout.contains("x1b[2Jname"), "{}", ran.stdout);
    }
    assert_eq!(sandbox.run(&["ls", "-l", "evil:1"]).ok().lines().count(), 8);
    let raw = sandbox.run(&["ls", "evil:1"]);
    assert!(names.iter().all(|name| raw.bytes.windows(name.len()).any(|bytes| bytes == *name)));
    for path in names {
        let path = [b"/missing-", path].concat();
        let args = ["cat".as_ref(), "evil:1".as_ref(), std::ffi::OsStr::from_bytes(&path)];
        is_harmless(&sandbox.run(&args).fails_with(3).stderr);
    }
    // A terminal of its own, from util-linux.
    let Some(script) = program("script") else {
        return skip("names_are_shown_escaped", "no script(1) for a terminal");
    };
    let mut command = Command::new(script);
    let ls = format!("{} ls evil:1", env!("CARGO_BIN_EXE_cofolio"));
    command.args(["-qec", &ls, "/dev/null"]).env("COFOLIO_STORE", sandbox.path("store"));
    command.env("COFOLIO_CONFIG", "/dev/null").stdin(std::process::Stdio::null());
    let shown = String::from_utf8(command.output().unwrap().stdout).unwrap().replace("\r\n", "\n");
    is_harmless(&shown);
    assert!(shown.contains("\\x1b[2Jname"), "{shown}");
    assert!(!Path::new("typescript").exists());
}

/// Targets of mounts may have any name, and so may directories with changes.
#[test]
fn mounts_do_not_drive_the_terminal() {
    if !can_mount("mounts_do_not_drive_the_terminal") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.dir(&format!("at{EVIL}"));
    let target = target.to_str().unwrap();
    sandbox.run(&["mount", "--rw", "box:1", target]).ok();
    let mounts = sandbox.run(&["mounts"]);
    assert!(mounts.ok().contains("\\x1b"), "{}", mounts.stdout);
    is_harmless(&mounts.stdout);
    is_harmless(&sandbox.run(&["umount", "--keep", target]).stderr);
    let kept = sandbox.run(&["mounts"]);
    assert!(kept.stderr.contains("\\x1b"), "{}", kept.stderr);
    is_harmless(&kept.stderr);
    for dir in sandbox.run(&["mounts", "--json"]).json()["kept"].as_array().unwrap() {
        sandbox.run(&["umount", "--discard", dir["dir"].as_str().unwrap()]).ok();
    }
    assert_eq!(sandbox.run(&["mounts", "--json"]).json()["kept"], json!([]));
}
