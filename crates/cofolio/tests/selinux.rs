//! SELinux labels of mounts: containers of one image have labels of their own, which the kernel shows and enforces, and
//! share the objects all the same. Loads the policy that `COFOLIO_POLICY` names, so it runs in a guest
//! (`tests/vm/run selinux-labels`).

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Ran, Sandbox, can_mount, skip};

fn label(categories: &str) -> String {
    format!("system_u:object_r:container_file_t:s0:{categories}")
}

/// A command as a process of a container with these categories.
fn as_container(categories: &str, command: &[&str]) -> Ran {
    let context = format!("system_u:system_r:container_t:s0:{categories}");
    let script = "echo -n \"$0\" >/proc/self/attr/current; exec \"$@\"";
    let output = Command::new("bash").args(["-c", script, &context]).args(command).output();
    Ran::of(output.unwrap())
}

/// The label that a file shows.
fn shown(file: &Path) -> String {
    let mut value = [0; 256];
    let length = rustix::fs::getxattr(file, "security.selinux", &mut value[..]).unwrap();
    String::from_utf8_lossy(&value[..length]).trim_end_matches('\0').to_owned()
}

#[test]
fn containers_have_labels_of_their_own() {
    let test = "containers_have_labels_of_their_own";
    if !can_mount(test) {
        return;
    }
    let Some(policy) = std::env::var_os("COFOLIO_POLICY") else {
        return skip(test, "no policy that could be loaded here (COFOLIO_POLICY)");
    };
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.text("target");
    let mount =
        |context: &str| sandbox.run(&["mount", "--create", "--context", context, "box:1", &target]);
    // Before a policy is loaded no label means anything, and the kernel takes none.
    mount(&label("c1,c2")).refused("SELinux does not take");
    // The kernel takes a policy in one write.
    let policy = fs::read(policy).unwrap();
    let mut load = fs::File::options().write(true).open("/sys/fs/selinux/load").unwrap();
    assert_eq!(load.write(&policy).unwrap(), policy.len());
    assert_eq!(fs::read_to_string("/sys/fs/selinux/enforce").unwrap(), "1");
    mount("nonsense").refused("SELinux does not take");

    let mounted = |name: &str, options: &[&str]| -> PathBuf {
        let target = sandbox.text(name);
        let all = [&["mount", "--quiet", "--create"], options, &["box:1", &target]].concat();
        sandbox.run(&all).ok();
        target.into()
    };
    let (first, second) = (label("c1,c2"), label("c3,c4"));
    let one = mounted("one", &["--context", &first]);
    let again = mounted("again", &["--context", &first]);
    let two = mounted("two", &["--context", &second]);
    let written = mounted("rw", &["--rw", "--context", &second]);
    mounted("plain", &[]);
    for (mount, label) in [(&one, &first), (&again, &first), (&two, &second), (&written, &second)] {
        for file in [mount.clone(), mount.join("etc/hostname")] {
            assert_eq!(&shown(&file), label, "{}", file.display());
        }
    }
    let hostname = |mount: &Path| mount.join("etc/hostname");
    fs::write(written.join("new"), "mine\n").unwrap();
    let mut file = fs::File::options().append(true).open(hostname(&written)).unwrap();
    file.write_all(b"more\n").unwrap();
    drop(file);
    for file in [written.join("new"), hostname(&written)] {
        assert_eq!(shown(&file), second, "{}", file.display());
    }

    // Mounts with one label are clones of one overlay; another label has its own.
    let device = |mount: &Path| mount.metadata().unwrap().dev();
    assert_eq!(device(&one), device(&again));
    assert_ne!(device(&one), device(&two));
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(table.matches(" - erofs ").count(), 1, "{table}");

    // The kernel keeps them apart.
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    assert_eq!(as_container("c1,c2", &["cat", &text(hostname(&one))]).ok(), "node\n");
    let first_line = ["head", "-n", "1", &text(hostname(&written))].map(str::to_owned);
    let first_line: Vec<&str> = first_line.iter().map(String::as_str).collect();
    assert_eq!(as_container("c3,c4", &first_line).ok(), "node\n");
    for (what, file) in [("file", hostname(&two)), ("changes", written.join("new"))] {
        let ran = as_container("c1,c2", &["cat", &text(file)]);
        let error = &ran.refused("Permission denied").stderr;
        eprintln!("   the other's {what}: {error}");
    }
    sandbox.run(&["umount", "--quiet", "--all"]).ok();
}
