//! `cofolio vm run --disk`: changes that outlive the guest.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use super::common::machine::until;
use super::common::{program, skip};
use super::host;

#[test]
fn changes_on_a_disk_are_there_for_the_next_machine() {
    let test = "changes_on_a_disk_are_there_for_the_next_machine";
    let Some(host) = host(test) else { return };
    if program("mkfs.ext4").is_none() {
        return skip(test, "no mkfs.ext4");
    }
    let disk = host.text("disk");
    let sized = format!("{disk}:300M");
    let script = "echo mine >>/etc/group; chown worker /etc/passwd; rm /bin/text
        mkdir /data/d; head -c 9000000 /dev/zero >/big; md5sum /big";
    let written = host.sh(&["--disk", &sized], script);
    written.ok();
    let blocks = fs::metadata(&disk).unwrap().blocks();

    // The size is that of a new one.
    let script =
        "md5sum /big; tail -n 1 /etc/group; stat -c %U /etc/passwd; ls -d /bin/text /data/d
        rm /big; sync; echo ready; read wait";
    host.sh(&["--disk", &sized, "--detach", "--interactive", "--name", "one"], script).ok();
    let guest = &host.guests()[0];
    assert_eq!(guest["disk"], disk.as_str());
    let said = until("it has looked", || {
        let said = fs::read_to_string(guest["output"].as_str().unwrap()).unwrap();
        said.contains("ready").then(|| said.replace('\r', ""))
    });
    let expected = format!("{}mine\nworker\n", written.stdout);
    assert!(said.starts_with(&expected) && said.contains("\n/data/d\n"), "{said}");
    assert!(said.contains("/bin/text: No such file"), "{said} {expected:?}");
    until("what was removed is no longer on the host", || {
        (fs::metadata(&disk).unwrap().blocks() + (8_000_000 >> 9) < blocks).then_some(())
    });
    // A disk is one machine's.
    let other = host.sh(&["--disk", &disk, "--name", "two"], "exit 0");
    other.fails_with(125).refused("belongs to another virtual machine");
    host.run(&["vm", "stop", "--time", "0", "one"]).ok();

    let image = host.run(&["inspect", "--json", "box:1"]).json()["image"].clone();
    let foreign = host.import_tree("other:1");
    let run = ["vm", "run", "--accel", "tcg", "--kernel", &host.kernel, "--disk", &disk];
    let ran = host.run(&[&run[..], &["other:1", "--", "/x"]].concat());
    ran.fails_with(125);
    let digests = format!("image {}, not of {foreign}", image.as_str().unwrap());
    assert!(ran.stderr.contains(&digests), "{}", ran.stderr);
    host.assert_clean();

    // What is no disk is found before anything is started, and left alone.
    let (file, text) = (host.path("text"), host.text("text"));
    fs::write(&file, "precious").unwrap();
    host.sh(&["--disk", &text], "exit 0").fails_with(125).refused("ext4 filesystem");
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    host.sh(&["--disk", &host.text("none")], "exit 0").fails_with(125).refused("FILE:SIZE");
    assert!(!host.path("none").exists());
    host.assert_clean();
}

/// A loop device, detached in the end.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

impl Loop {
    fn new(file: &str) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show", file]).output().ok()?;
        made.status.success().then(|| Self(String::from_utf8(made.stdout).unwrap().trim().into()))
    }
}

#[test]
fn a_disk_can_be_a_block_device() {
    let test = "a_disk_can_be_a_block_device";
    let Some(host) = host(test) else { return };
    let Some(mkfs) = program("mkfs.ext4") else { return skip(test, "no mkfs.ext4") };
    let file = host.text("file");
    File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let Some(device) = Loop::new(&file) else { return skip(test, "no loop device") };
    let disk = ["--disk", &device.0];
    // Nothing is made of a device, whatever it has.
    host.sh(&disk, "exit 0").fails_with(125).refused("`mkfs.ext4` makes one");
    assert!(Command::new(mkfs).args(["-q", &device.0]).status().unwrap().success());
    host.sh(&disk, "echo kept >/file").ok();
    assert_eq!(host.sh(&disk, "cat /file").ok(), "kept\n");
    // Two kernels would write to it.
    let mnt = host.dir("mnt");
    let mount = |args: &[&str]| Command::new("mount").args(args).arg(&mnt).status().unwrap();
    if mount(&[&device.0]).success() {
        let ran = host.sh(&disk, "exit 0");
        assert!(Command::new("umount").arg(&mnt).status().unwrap().success());
        ran.fails_with(125).refused("mounted on this machine");
    }
    host.assert_clean();
}
