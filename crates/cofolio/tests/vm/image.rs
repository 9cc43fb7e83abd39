//! What a guest has of its image: only what was checked, and only what may be written to.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::common::{overwrite, program, skip};
use super::{Host, host};

impl Host {
    /// The only file of the domain's segments with this suffix.
    fn packed(&self, suffix: &str) -> PathBuf {
        let files = fs::read_dir(self.path("store/domains/default/segments")).unwrap();
        let mut files = files.map(|entry| entry.unwrap().path());
        files.find(|file| file.to_string_lossy().ends_with(suffix)).unwrap()
    }
}

/// A damaged pack was attached, and the guest booted from it.
#[test]
fn a_damaged_image_boots_no_guest() {
    let test = "a_damaged_image_boots_no_guest";
    let Some(host) = host(test) else { return };
    host.run(&["pack", "--vm", "box:1"]).ok();
    let (pack, segment) = (host.packed(".dax"), host.packed(".segment"));
    let refused = |options: &[&str], why: &str| {
        host.sh(options, "echo it boots").fails_with(125).refused(why);
        host.assert_clean();
    };
    let altered = |file: &PathBuf, at: usize| {
        let good = fs::read(file).unwrap();
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        overwrite(file, &bytes).map(|()| good)
    };
    // Anywhere in the pack, past all that is looked at when it is opened.
    let end = fs::metadata(&pack).unwrap().len();
    let good = match altered(&pack, usize::try_from(end).unwrap() - 1) {
        Err(reason) => return skip(test, &reason),
        Ok(good) => good,
    };
    refused(&[], "the pack of image");
    overwrite(&pack, &good).unwrap();
    // What is in segments is hashed where that is asked for, as with mounts.
    let good = altered(&segment, 4096 + 17).unwrap();
    refused(&["--verify"], "segments/");
    overwrite(&segment, &good).unwrap();
    // So is the image.
    let digest = host.run(&["inspect", "--json", "box:1"]).json()["image"].clone();
    let digest = digest.as_str().unwrap().to_owned();
    let image = host.path(&format!("store/domains/default/images/{digest}.erofs"));
    let good = altered(&image, 1200).unwrap();
    refused(&["--digest", &digest], "it was altered");
    overwrite(&image, &good).unwrap();
    assert_eq!(host.sh(&["--digest", &digest, "--verify"], "echo it boots").ok(), "it boots\n");
    host.assert_clean();
}

/// The same options as of mounts and containers.
#[test]
fn only_a_trusted_image_boots() {
    let test = "only_a_trusted_image_boots";
    let Some(host) = host(test) else { return };
    let Some(openssl) = program("openssl") else { return skip(test, "no openssl") };
    let refused = |options: &[&str], why: &str| {
        host.sh(options, "exit 0").fails_with(125).refused(why);
        host.assert_clean();
    };
    let other = host.import_tree("other:1");
    refused(&["--digest", &other], "the name leads to another image");
    let ran = host.sh(&["--require-verity"], "exit 3");
    // Where the filesystem of the tests has it, the guest boots.
    if ran.code != 3 {
        ran.fails_with(125).refused("no fs-verity");
    }
    let (secret, public) = (host.text("key"), host.text("key.pub"));
    for args in [
        &["genpkey", "-algorithm", "ed25519", "-out", &*secret][..],
        &["pkey", "-in", &secret, "-pubout", "-out", &public],
    ] {
        assert!(Command::new(&openssl).args(args).output().unwrap().status.success());
    }
    refused(&["--trust", &public], "signature");
    host.run(&["sign", "--key", &secret, "box:1"]).ok();
    host.sh(&["--trust", &public], "exit 3").fails_with(3);
}

#[test]
fn a_root_is_read_only_but_for_some_directories() {
    let Some(host) = host("a_root_is_read_only_but_for_some_directories") else { return };
    // As with `run`: scratch and volumes are writable, and nothing else is.
    let script = "for dir in / /etc /bin /tmp /data; do
            if echo x 2>/dev/null >$dir/x; then echo $dir; fi
        done
        stat -c %U:%a /data /tmp; cat /etc/passwd | head -n 1; hostname
        grep -c ' / erofs ro.*dax=always' /proc/mounts";
    let common = "worker:700\nroot:1777\nroot:x:0:0::/:\none\n1\n";
    let ran = host.sh(&["--read-only", "--name", "one"], script);
    assert_eq!(ran.ok(), format!("/tmp\n/data\n{common}"));
    let ran = host.sh(&["--writable", "/etc", "--name", "one"], script);
    assert_eq!(ran.ok(), format!("/etc\n/tmp\n/data\n{common}"));
    // A process beside it sees the same.
    let disk = format!("{}:64M", host.text("disk"));
    let script =
        "echo mine >/etc/mine; rm -f /etc/group; ls -d /etc/mine /etc/group 2>/dev/null; true";
    let options = ["--writable", "/etc/", "--disk", &disk];
    for _ in 0..2 {
        assert_eq!(host.sh(&options, script).ok(), "/etc/mine\n");
    }
    host.assert_clean();

    let refused = |dir: &str, why: &str, code: i32| {
        host.sh(&["--writable", dir], "exit 0").fails_with(code).refused(why);
        host.assert_clean();
    };
    refused("/", "the whole root is writable", 2);
    refused("etc", "not absolute", 2);
    refused("/proc/sys", "a mount of its own", 2);
    refused("/data/x", "writable anyway", 2);
    refused("/none", "--writable /none: the image has no such directory", 125);
    host.sh(&["--writable", "/etc", "--read-only"], "exit 0").fails_with(2);
}

/// An empty `/run` was mounted over that of the image: programs that have a directory there for
/// their socket, as mysqld has, did not start. What `--writable /run` wrote to a disk was below it.
/// A `/tmp` that the image lacks was only root's.
#[test]
fn run_and_tmp_are_the_images_own() {
    let test = "run_and_tmp_are_the_images_own";
    let Some(host) = host(test) else { return };
    let script = "stat -c %U:%a /run/box; echo mine >/run/box/socket && echo written";
    for options in [&[][..], &["--read-only"]] {
        let options = [options, &["--user", "worker"]].concat();
        assert_eq!(host.sh(&options, script).ok(), "worker:750\nwritten\n");
    }
    if program("mkfs.ext4").is_none() {
        return skip(test, "no mkfs.ext4");
    }
    let disk = format!("{}:64M", host.text("disk"));
    let script = "cat /run/box/socket 2>/dev/null; echo kept >/run/box/socket";
    let options = ["--writable", "/run", "--disk", &disk];
    assert_eq!(host.sh(&options, script).ok(), "");
    assert_eq!(host.sh(&options, script).ok(), "kept\n");
    // With all of the root writable, the next machine lacks what was removed.
    let script = "stat -c %a /tmp; cat /run/box/socket; rm -r /tmp";
    let options = ["--disk", &disk];
    for _ in 0..2 {
        assert_eq!(host.sh(&options, script).ok(), "1777\nkept\n");
    }
    host.assert_clean();
}
