//! Which images are let through: by digest, by fs-verity, by signature, by policy.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use common::{Sandbox, can_mount, overwrite};
use serde_json::json;

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

    // Options may stand between the image and the directory: once they took the directory's place.
    let between = ["one:1", "--digest", &one, "--create", &at];
    for args in [&["--digest", &one, &at][..], &["--digest", &one, "one:1", &at], &between] {
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
    assert!(ran.stderr.contains("<TARGET>"), "{}", ran.stderr);
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

/// Two images over one base. Whoever can write to the store gives the one the other's delta, and nothing in the store is
/// damaged by that: `mount --digest` of the one showed the other's files.
#[test]
fn what_is_asked_for_by_digest_is_not_shown_as_another_image() {
    const TEST: &str = "what_is_asked_for_by_digest_is_not_shown_as_another_image";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    let mut below = common::Tar::default();
    below.directory("lib/", 0o755);
    for number in 0..1100 {
        below.file(&format!("lib/{number}"), 0o644, number.to_string().as_bytes());
    }
    let [one, two] = ["one", "two"].map(|name| {
        let mut top = common::Tar::default();
        top.directory("etc/", 0o755).file("etc/name", 0o644, name.as_bytes());
        let layout = sandbox.path(name);
        common::write_layout(&layout, "1", &[below.finish(), top.finish()], json!({}));
        let name = format!("{name}:1");
        let ran =
            sandbox.run(&["import", "--json", "--name", &name, layout.to_str().unwrap()]).json();
        ran["image"].as_str().unwrap().to_owned()
    });
    sandbox.run(&["gc"]).ok();
    let records = sandbox.path("store/domains/default/bases");
    fs::copy(records.join(&two), records.join(&one)).unwrap();
    sandbox.run(&["fsck"]).ok();

    let (at, other) = (sandbox.text("mnt"), sandbox.text("other"));
    let shown = |at: &str| fs::read_to_string(format!("{at}/etc/name")).unwrap();
    for args in [&["--digest", &one][..], &["--verify", "one:1"]] {
        sandbox.run(&[&["mount", "--create"], args, &[&at]].concat()).ok();
        assert_eq!(shown(&at), "one");
        sandbox.run(&["umount", &at]).ok();
    }
    sandbox.run(&["mount", "--create", "one:1", &at]).ok();
    assert_eq!(shown(&at), "two", "nobody asked");
    // A mount that was asked for by digest never uses a base, also where the image is mounted over one.
    sandbox.run(&["mount", "--create", "--digest", &one, &other]).ok();
    assert_eq!((shown(&at), shown(&other)), ("two".to_owned(), "one".to_owned()));
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

/// Runs openssl in the sandbox.
fn openssl(sandbox: &Sandbox, args: &[&str]) {
    let output = Command::new("openssl").args(args).current_dir(sandbox.path("")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// `NAME.pem` and `NAME.pub`, as anybody makes them.
fn key(sandbox: &Sandbox, name: &str) -> (String, String) {
    let (private, public) = (format!("{name}.pem"), format!("{name}.pub"));
    openssl(sandbox, &["genpkey", "-algorithm", "ed25519", "-out", &private]);
    openssl(sandbox, &["pkey", "-in", &private, "-pubout", "-out", &public]);
    (sandbox.text(&private), sandbox.text(&public))
}

fn has_openssl(test: &str) -> bool {
    let found = common::program("openssl").is_some();
    if !found {
        common::skip(test, "no openssl");
    }
    found
}

/// An image with a config of its own, as `name`.
fn import_with_config(sandbox: &Sandbox, name: &str, config: serde_json::Value) -> String {
    let mut tar = common::Tar::default();
    for dir in ["bin/", "proc/", "sys/", "dev/", "tmp/"] {
        tar.directory(dir, 0o755);
    }
    tar.file("bin/app", 0o644, b"#!/bin/sh\n");
    let layout = sandbox.path(&format!("layout-{}", name.replace(':', "-")));
    common::write_layout(&layout, "1", &[tar.finish()], config);
    let ran = sandbox.run(&["import", "--json", "--name", name, layout.to_str().unwrap()]);
    ran.ok();
    ran.json()["image"].as_str().unwrap().to_owned()
}

/// What we sign openssl verifies, what openssl signs we take, and the bytes are those of docs/SIGNATURES.md.
#[test]
fn openssl_and_we_agree_about_signatures() {
    const TEST: &str = "openssl_and_we_agree_about_signatures";
    if !has_openssl(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    let image = import_with_config(&sandbox, "app:1", json!({"Cmd": ["/bin/app"]}));
    let (private, public) = key(&sandbox, "ours");
    let signature = sandbox.text("app.sig");
    sandbox.run(&["sign", "app:1", "--key", &private, "-o", &signature]).ok();
    assert_eq!(fs::metadata(&signature).unwrap().len(), 64);
    // Whatever was there was overwritten: the key itself, too.
    let before = fs::read(&private).unwrap();
    sandbox.run(&["sign", "app:1", "--key", &private, "-o", &private]).fails_with(2);
    assert_eq!(fs::read(&private).unwrap(), before);

    let config = sandbox.run(&["inspect", "--json", "app:1"]).json();
    let config = config["signatures"][0]["config"].as_str().unwrap().to_owned();
    let message =
        format!("cofolio image signature 1\nimage fsverity-sha256-4k:{image}\nconfig {config}\n");
    assert_eq!(sandbox.run(&["sign", "--message", "app:1"]).ok(), message);
    fs::write(sandbox.path("message"), &message).unwrap();
    openssl(
        &sandbox,
        &[
            "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", "ours.pub", "-in", "message",
            "-sigfile", "app.sig",
        ],
    );

    // The other way round, by another key.
    let (_, others) = key(&sandbox, "others");
    openssl(
        &sandbox,
        &[
            "pkeyutl",
            "-sign",
            "-rawin",
            "-inkey",
            "others.pem",
            "-in",
            "message",
            "-out",
            "others.sig",
        ],
    );
    let file = sandbox.text("others.sig");
    let ran = sandbox.run(&["sign", "app:1", "--attach", &file, "--key", &public]);
    ran.fails_with(9);
    assert!(ran.stderr.contains("others.sig") && ran.stderr.contains(&image), "{}", ran.stderr);
    sandbox.run(&["sign", "app:1", "--attach", &file, "--key", &others]).ok();
    // The first of several keys was named, whichever had signed.
    let (several, ours) = (sandbox.text("several.pub"), fs::read_to_string(&public).unwrap());
    fs::write(&several, format!("{ours}{}", fs::read_to_string(&others).unwrap())).unwrap();
    let by = |keys: &str| {
        let ran = sandbox.run(&["sign", "app:1", "--attach", &file, "--key", keys]);
        ran.ok();
        ran.stderr.rsplit_once('(').unwrap().1.to_owned()
    };
    assert_eq!(by(&several), by(&others));
    sandbox.run(&["sign", "app:1", "--attach", &file, "--key", &others]).ok();
    let inspected = sandbox.run(&["inspect", "--json", "app:1"]).json();
    assert_eq!(inspected["signatures"].as_array().unwrap().len(), 2, "{inspected}");
    let shown = sandbox.run(&["inspect", "app:1"]);
    assert_eq!(shown.ok().matches("(not checked)").count(), 2, "{}", shown.stdout);

    // They go with the image.
    let kept = sandbox.path(&format!("store/domains/default/signatures/{image}"));
    assert_eq!(fs::read_dir(&kept).unwrap().count(), 2);
    sandbox.run(&["gc"]).ok();
    assert!(kept.exists());
    sandbox.run(&["rm", "app:1"]).ok();
    sandbox.run(&["gc"]).ok();
    assert!(!kept.exists());
    sandbox.run(&["fsck"]).ok();
}

/// A key that others can read is used with a warning; nothing of it is ever printed; what is no key is named.
#[test]
fn private_keys_stay_private() {
    const TEST: &str = "private_keys_stay_private";
    if !has_openssl(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("one:1");
    let (private, public) = key(&sandbox, "a");
    let text = fs::read_to_string(&private).unwrap();
    let secret = text.lines().nth(1).unwrap();
    let mode = |mode| fs::set_permissions(&private, fs::Permissions::from_mode(mode)).unwrap();
    for (bits, warned) in [(0o600, false), (0o640, true), (0o604, true), (0o400, false)] {
        mode(bits);
        let ran = sandbox.run(&["sign", "--json", "one:1", "--key", &private]);
        assert!(!ran.ok().contains(secret) && !ran.stderr.contains(secret));
        assert_eq!(ran.stderr.contains("can be read by others"), warned, "{}", ran.stderr);
    }
    for (args, expected) in [
        (["sign", "one:1", "--key", &public], "no `PRIVATE KEY`"),
        (["mount", "one:1", "/mnt", "--trust"], "--trust"),
        (["sign", "one:1", "--key", "/does/not/exist"], "/does/not/exist"),
    ] {
        let ran = sandbox.run(&args);
        ran.fails_with(2);
        assert!(ran.stderr.contains(expected) && !ran.stderr.contains(secret), "{}", ran.stderr);
    }
    // Mixed up: the private key where the public one is meant.
    let ran = sandbox.run(&["mount", "one:1", &sandbox.text("m"), "--create", "--trust", &private]);
    ran.fails_with(2);
    assert!(ran.stderr.contains("a private key") && !ran.stderr.contains(secret), "{}", ran.stderr);
    openssl(
        &sandbox,
        &["pkey", "-in", "a.pem", "-aes256", "-passout", "pass:x", "-out", "locked.pem"],
    );
    let ran = sandbox.run(&["sign", "one:1", "--key", &sandbox.text("locked.pem")]);
    ran.fails_with(2);
    assert!(ran.stderr.contains("it is encrypted"), "{}", ran.stderr);
    openssl(&sandbox, &["genpkey", "-algorithm", "X25519", "-out", "x.pem"]);
    sandbox.run(&["sign", "one:1", "--key", &sandbox.text("x.pem")]).fails_with(2);
}

/// mount, run and bundle ask the policy, whatever the image is called; nothing is mounted that it refuses.
#[test]
fn what_the_policy_refuses_nobody_gets() {
    const TEST: &str = "what_the_policy_refuses_nobody_gets";
    if !has_openssl(TEST) || !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    let image = import_with_config(&sandbox, "team/app:1", json!({"Cmd": ["/bin/app"]}));
    let (private, public) = key(&sandbox, "a");
    let file = sandbox.path("c.toml");
    let policy = |text: &str| fs::write(&file, text.replace("KEY", &public)).unwrap();
    let at = sandbox.text("mnt");
    let config = file.to_str().unwrap();
    let has_runtime = ["crun", "runc"].iter().any(|name| common::program(name).is_some());
    let run_ends_with = if has_runtime { 126 } else { 125 };
    let tries = |name: &str, code: i32| {
        let mut said = Vec::new();
        for args in [
            &["mount", "--create", name, &at][..],
            &["mount", "--rw", "--create", name, &at],
            &["bundle", name, &at],
            &["bundle", "--rootfs", "/tmp", name, &at],
            &["run", name],
        ] {
            let ran = sandbox.run(&[args, &["--config", config]].concat());
            if code == 0 {
                // `run` comes to the image's program, which is not executable, where there is a runtime.
                let expected = if args[0] == "run" { run_ends_with } else { 0 };
                assert_eq!(ran.code, expected, "{args:?}: {}", ran.stderr);
            } else {
                ran.fails_with(if args[0] == "run" { 125 } else { code });
                assert!(!sandbox.path("mnt").exists(), "{args:?}");
            }
            sandbox.run(&["umount", "--all"]).ok();
            let _ = fs::remove_dir_all(&at);
            said.push(ran.stderr);
        }
        said
    };
    policy(
        "[trust]\nrequire = 'accept'\n[trust.ref.'team/*']\nrequire = 'signed'\nsigned_by = ['KEY']\n",
    );
    for said in tries("team/app:1", 9) {
        for part in [&image, "team/app:1", public.as_str(), "it has no signature", "team/*"] {
            assert!(said.contains(part), "{said}");
        }
    }
    // By digest it has no other rule.
    tries(&image, 9);
    tries(&image[..12], 9);
    // Under a name of one's own that nothing is asked of it is another matter, and the operator's.
    sandbox.run(&["sign", "team/app:1", "--key", &private]).ok();
    tries("team/app:1", 0);
    tries(&image, 0);

    // The same files with another command: the files are signed, what is run is not.
    let other = import_with_config(&sandbox, "team/evil:1", json!({"Cmd": ["/bin/evil"]}));
    assert_eq!(other, image, "the config is no part of the image");
    for (args, code) in [
        (&["mount", "--create", "team/evil:1", &at][..], 0),
        (&["bundle", "team/evil:1", &sandbox.text("b")], 9),
        (&["run", "team/evil:1"], 125),
    ] {
        let ran = sandbox.run(&[args, &["--config", config]].concat());
        ran.fails_with(code);
        assert!(code == 0 || ran.stderr.contains("another config"), "{}", ran.stderr);
    }
    sandbox.run(&["umount", "--all"]).ok();
    let _ = fs::remove_dir_all(&at);

    // A name that is led elsewhere brings its rule to where it leads: the signature is not its own.
    let unsigned = sandbox.import_tree("free:1");
    sandbox.run(&["tag", "free:1", "team/app:1"]).ok();
    for said in tries("team/app:1", 9) {
        assert!(said.contains(&unsigned), "{said}");
    }
    // As is a signature that lies where one of it would be.
    let store = sandbox.path("store/domains/default/signatures");
    let theirs = fs::read_dir(store.join(&image)).unwrap().next().unwrap().unwrap().path();
    fs::create_dir_all(store.join(&unsigned)).unwrap();
    fs::copy(&theirs, store.join(&unsigned).join(theirs.file_name().unwrap())).unwrap();
    tries("team/app:1", 9);

    policy("[trust]\nrequire = 'reject'\n");
    for said in tries("free:1", 9) {
        assert!(said.contains("rejected by the trust policy"), "{said}");
    }
}

/// A policy that cannot be read is none, and without one nothing is let through.
#[test]
fn a_policy_that_cannot_be_read_refuses_everything() {
    const TEST: &str = "a_policy_that_cannot_be_read_refuses_everything";
    if !can_mount(TEST) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("one:1");
    let file = sandbox.path("c.toml");
    let at = sandbox.text("mnt");
    for (text, expected) in [
        ("[trust]\nrequire = 'signd'\n", ":2:"),
        ("[trust]\nsignedby = []\n", "did you mean `signed_by`"),
        ("[trust]\nrequire = 'signed'\n", "without a key"),
        (
            "[trust.ref.'two']\nrequire = 'signed'\nsigned_by = ['/does/not/exist']\n",
            "/does/not/exist",
        ),
        ("[trust.ref.'a*b']\nrequire = 'reject'\n", "last character"),
        ("[trust.ref.'*']\nrequire = 'reject'\n", "`[trust]` itself"),
        ("[trust.ref.'two']\nsigned_by = ['/dev/null']\n", "would not be asked for"),
        ("[trust\n", ":1:"),
    ] {
        fs::write(&file, text).unwrap();
        for args in [
            &["mount", "--create", "one:1", &at][..],
            &["bundle", "one:1", &at, "--", "/bin/true"],
            &["run", "one:1", "/bin/true"],
        ] {
            let ran = sandbox.run(&[&["--config", file.to_str().unwrap()], args].concat());
            assert!([2, 125].contains(&ran.code), "{text}: {} {}", ran.code, ran.stderr);
            assert!(ran.stderr.contains(expected), "{text}: {}", ran.stderr);
            assert_eq!(sandbox.mounted(), Vec::<std::path::PathBuf>::new());
        }
    }
}

/// `--trust` asks for a signature where no policy does; `import --signature` brings one along.
#[test]
fn keys_on_the_command_line_are_asked_for() {
    const TEST: &str = "keys_on_the_command_line_are_asked_for";
    if !has_openssl(TEST) || !can_mount(TEST) {
        return;
    }
    let maker = Sandbox::new();
    let image = maker.import_tree("one:1");
    let ((private, public), (_, others)) = (key(&maker, "a"), key(&maker, "b"));
    let signature = maker.text("one.sig");
    maker.run(&["sign", "one:1", "--key", &private, "-o", &signature]).ok();
    let (tree, wrong) = (maker.text("tree"), maker.text("wrong.sig"));
    fs::write(&wrong, [7; 64]).unwrap();

    let sandbox = Sandbox::new();
    let import =
        |more: &[&str]| sandbox.run(&[&["import", &tree, "--name", "one:1"], more].concat());
    let nothing = || sandbox.run(&["images", "--json"]).json().as_array().unwrap().is_empty();
    for more in [
        &["--trust", &public][..],
        &["--trust", &others, "--signature", &signature],
        &["--trust", &public, "--signature", &wrong],
    ] {
        let ran = import(more);
        ran.fails_with(9);
        assert!(ran.stderr.contains(&image), "{}", ran.stderr);
        assert!(nothing());
    }
    import(&["--signature", &signature]).fails_with(2);
    import(&["--trust", &others, "--trust", &public, "--signature", &signature]).ok();
    // It is here now, and needs to be brought no more.
    import(&["--trust", &public]).ok();

    let at = sandbox.text("mnt");
    let mount = |key: &str| sandbox.run(&["mount", "--create", "one:1", &at, "--trust", key]);
    let ran = mount(&others);
    ran.fails_with(9);
    assert!(ran.stderr.contains("--trust") && ran.stderr.contains("b.pub"), "{}", ran.stderr);
    mount(&public).ok();
    sandbox.run(&["umount", &at]).ok();
    let bundle = sandbox.text("bundle");
    let args = ["bundle", "one:1", &bundle, "--trust", &others, "--", "/bin/true"];
    sandbox.run(&args).fails_with(9);
    sandbox.run(&["run", "--trust", &others, "one:1", "/bin/true"]).fails_with(125);
}
