//! Which images are let through: by digest, by fs-verity, by signature, by policy.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;

use common::{Sandbox, can_mount, overwrite};

/// `mount --digest` mounts the image with that digest, and only if the name that was given too leads there.
#[test]
fn a_digest_says_which_image_and_none_other_is_mounted() {
    const TEST: &str = "a_digest_says_which_image_and_none_other_is_mounted";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    let one = sandbox.import_tree("one:1");
    fs::write(sandbox.path("tree/etc/hostname"), "other\n").unwrap();
    let tree = sandbox.text("tree");
    let two = sandbox.run(&["import", "--json", "--name", "two:1", &tree]).json();
    let two = two["image"].as_str().unwrap();
    let at = sandbox.dir("mnt").to_str().unwrap().to_owned();

    for args in [&["--digest", &one, &at][..], &["--digest", &one, "one:1", &at]] {
        sandbox.run(&[&["mount"], args].concat()).ok();
        assert_eq!(fs::read_to_string(sandbox.path("mnt/etc/hostname")).unwrap(), "node\n");
        sandbox.run(&["umount", &at]).ok();
    }
    for command in ["mount", "bundle", "run"] {
        let args: &[&str] = match command {
            "run" => &["run", "--digest", &one, "two:1", "/bin/true"],
            _ => &[command, "--digest", &one, "two:1", &at],
        };
        let ran = sandbox.run(args);
        ran.fails_with(if command == "run" { 125 } else { 9 });
        assert!(ran.stderr.contains(&format!("two:1 is image {two}, not {one}")), "{}", ran.stderr);
    }
    // The beginning of a digest would be another promise.
    sandbox.run(&["mount", "--digest", &one[..12], &at]).fails_with(2);
    sandbox.run(&["mount", "--digest", &"0".repeat(64), &at]).fails_with(3);
    let ran = sandbox.run(&["mount", &at]);
    ran.fails_with(2);
    assert!(ran.stderr.contains("<IMAGE>"), "{}", ran.stderr);
    assert_eq!(sandbox.mounted(), Vec::<std::path::PathBuf>::new());

    // What lies under the name is measured, also while the image is mounted.
    sandbox.run(&["mount", "one:1", &at]).ok();
    let other = sandbox.dir("other").to_str().unwrap().to_owned();
    let file = sandbox.path(&format!("store/domains/default/images/{one}.erofs"));
    let mut bytes = fs::read(&file).unwrap();
    bytes[1200] ^= 1;
    if let Err(reason) = overwrite(&file, &bytes) {
        common::skip(TEST, &reason);
        return;
    }
    let ran = sandbox.run(&["mount", "--digest", &one, &other]);
    ran.fails_with(4);
    assert!(ran.stderr.contains("it was altered"), "{}", ran.stderr);
}

/// Where the kernel cannot check what is read, `--require-verity` refuses by name, and mounts nothing.
#[test]
fn required_fs_verity_is_there_or_the_mount_is_refused() {
    const TEST: &str = "required_fs_verity_is_there_or_the_mount_is_refused";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("one:1");
    let at = sandbox.text("mnt");
    let ran = sandbox.run(&["mount", "--create", "--require-verity", "one:1", &at]);
    let inspected = sandbox.run(&["inspect", "--json", "one:1"]).json();
    if inspected["verity"] == true {
        ran.ok();
        return;
    }
    ran.fails_with(5);
    assert!(ran.stderr.contains("no fs-verity") && ran.stderr.contains("doctor"), "{}", ran.stderr);
    for args in [
        &["bundle", "--require-verity", "one:1", &at, "--", "/bin/true"][..],
        &["run", "--require-verity", "one:1", "/bin/true"],
    ] {
        let ran = sandbox.run(args);
        assert!([5, 125].contains(&ran.code), "{}", ran.stderr);
        assert!(ran.stderr.contains("no fs-verity"), "{}", ran.stderr);
    }
    assert_eq!(sandbox.mounted(), Vec::<std::path::PathBuf>::new());
}
