//! What a container sees, may do and is limited to.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::build_static;
use crate::common::machine::{machine, until};
use crate::common::{MERGEABLE, has_ksm, program, skip};

#[test]
fn what_a_container_sees() {
    let Some((machine, runtimes)) = machine("what_a_container_sees") else { return };
    let shown = machine.dir("shown");
    fs::write(shown.join("file"), "of the host\n").unwrap();
    let (writable, readonly) =
        (format!("{}:/mnt", shown.display()), format!("{}:/mnt:ro", shown.display()));
    for runtime in runtimes {
        let script =
            "touch /new && echo root; touch /tmp/new && echo tmp; touch /data/new && echo data
                      touch /mnt/new && echo mnt; cat /mnt/file; pwd; echo $COLOR; hostname
                      id -u; id -g; grep -c : /proc/net/dev";
        let options = [
            "-e",
            "COLOR=red",
            "-e",
            "HOME",
            "-w",
            "/etc",
            "-u",
            "worker",
            "--name",
            "here",
            "-v",
            &readonly,
        ];
        let ran = machine.sh(runtime, &options, script);
        assert_eq!(
            ran.ok(),
            "tmp\ndata\nof the host\n/etc\nred\nhere\n1001\n1002\n1\n",
            "{runtime}: {}",
            ran.stderr
        );
        let ran = machine.sh(runtime, &["--rw", "-v", &writable], script);
        let seen: Vec<&str> = ran.ok().lines().collect();
        assert_eq!(seen[..5], ["root", "tmp", "data", "mnt", "of the host"], "{runtime}");
        assert!(shown.join("new").exists());
        fs::remove_file(shown.join("new")).unwrap();
        // Neither is there for the next one.
        let ran = machine.sh(runtime, &["--rw"], "ls /data; test -e /new || echo fresh");
        assert_eq!(ran.ok(), "fresh\n");
        // Only a named directory takes changes, also in the place of one in memory.
        let script = "echo x > /etc/new && cat /etc/new; echo x > /tmp/new; \
                      (echo x > /srv/new) 2>&- || echo refused; grep -c ' /tmp tmpfs ' /proc/mounts";
        let ran = machine.sh(runtime, &["--writable", "/etc", "--writable", "/tmp"], script);
        assert_eq!(ran.stdout, "x\nrefused\n0\n", "{runtime}: {}", ran.stderr);
        // It had no effect.
        for own in ["/proc", "/sys/fs", "/dev/", "/tmp/below", "/data/below"] {
            let ran = machine.sh(runtime, &["--writable", own], "true");
            ran.fails_with(2).refused("a mount of its own there");
        }
        for dir in ["/mnt", "/mnt/below"] {
            let ran = machine.sh(runtime, &["--writable", dir, "-v", &writable], "true");
            ran.fails_with(2).refused("a mount of its own there");
        }
        // The runtime makes a mount point there, which was refused.
        let below = format!("{}:/etc/made/here", shown.display());
        let ran =
            machine.sh(runtime, &["--writable", "/etc", "-v", &below], "cat /etc/made/here/file");
        assert_eq!(ran.ok(), "of the host\n", "{runtime}");
        let elsewhere = format!("{}:/bin/made", shown.display());
        let ran = machine.sh(runtime, &["--writable", "/etc", "-v", &elsewhere], "true");
        ran.fails_with(125).refused("mount point /bin/made does not exist");
        // With the host's network come the files that say how to use it, also where the image lacks them.
        for mode in ["--env=MODE=ro", "--rw"] {
            let script = "cat /etc/resolv.conf; tail -n 1 /etc/passwd; head -c 0 /etc/hosts";
            let ran = machine.sh(runtime, &["--network", "host", mode], script);
            let resolver = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
            let account = "worker:x:1001:1002::/srv:\n";
            assert_eq!(ran.stdout, resolver + account, "{runtime} {mode}: {}", ran.stderr);
        }
        let host = machine.sh(runtime, &["--network", "host"], "readlink /proc/self/ns/net");
        let ours = fs::read_link("/proc/self/ns/net").unwrap();
        assert_eq!(host.ok().trim(), ours.to_str().unwrap());
        machine.assert_clean();
    }
}

/// A filesystem that is mounted below a read-only volume could be written to, and so could the host's cgroups with
/// `--network host`: `ro` is for the topmost mount alone.
#[test]
fn what_is_read_only_is_so_to_the_bottom() {
    let Some((machine, runtimes)) = machine("what_is_read_only_is_so_to_the_bottom") else {
        return;
    };
    let below = machine.dir("shown/below");
    let none = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &below, "tmpfs", none, None).unwrap();
    let volume = format!("{}:/mnt:ro", machine.path("shown").display());
    // The runtime may put the hierarchies of version 1 into a tmpfs of the container's own.
    let script = "for dir in /mnt /mnt/below /sys /sys/fs/cgroup/*/; do mkdir $dir/new 2>/dev/null && echo $dir; done
                  awk '$5 ~ \"^/sys\" && $6 !~ /^ro/ && !/ - tmpfs /' /proc/self/mountinfo";
    for runtime in runtimes {
        for network in ["none", "host"] {
            for users in
                [&["--network", network][..], &["--network", network, "--userns", "0:100000:65536"]]
            {
                let ran = machine.sh(runtime, &[&["-v", &volume][..], users].concat(), script);
                assert_eq!(
                    (ran.stdout.as_str(), ran.stderr.as_str()),
                    ("", ""),
                    "{runtime} {users:?}"
                );
            }
        }
    }
    rustix::mount::unmount(&below, rustix::mount::UnmountFlags::empty()).unwrap();
    machine.assert_clean();
}

/// The root filesystem of a container lies in a directory of the host too. Users who reached it there could run
/// set-user-ID programs and open device nodes of the image. `nodev` is for roots in which the container can make no
/// device nodes.
#[test]
fn roots_give_users_of_the_host_no_privileges() {
    let Some((machine, runtimes)) = machine("roots_give_users_of_the_host_no_privileges") else {
        return;
    };
    for runtime in runtimes {
        for (options, has_nodev) in [
            (&[][..], true),
            (&["--writable", "/etc"], true),
            (&["--userns", "0:100000:65536"], true),
            (&["--rw", "--userns", "0:100000:65536"], true),
            (&["--rw"], false),
        ] {
            let options = [&["-d", "--name", "it"], options].concat();
            machine.sh(runtime, &options, "sleep 1000").ok();
            let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let run = machine.path("run");
            let is_root = |line: &&str| {
                let at = line.split(' ').nth(4).unwrap_or_default();
                at.starts_with(run.to_str().unwrap()) && at.contains("/containers/it/rootfs")
            };
            let lines: Vec<_> = table.lines().filter(is_root).collect();
            // A root that is writable in part has mounts of its own in it.
            assert_eq!(lines.len() > 1, options.contains(&"--writable"), "{options:?}: {lines:?}");
            assert!(!lines.is_empty());
            for line in lines {
                let flags: Vec<&str> = line.split(' ').nth(5).unwrap().split(',').collect();
                assert!(flags.contains(&"nosuid"), "{runtime} {options:?}: {line}");
                assert_eq!(flags.contains(&"nodev"), has_nodev, "{runtime} {options:?}: {line}");
            }
            machine.run(&["stop", "--time", "0", "it"]).ok();
        }
    }
}

/// Containers had no seccomp profile: a process could keep keys, make user namespaces and so reach kernel code that
/// engines keep from it.
#[test]
fn system_calls_are_filtered() {
    const TEST: &str = "system_calls_are_filtered";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let dir = machine.dir("shown");
    let source = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
static void say(const char *name, long result) {
    printf("%s %d\n", name, result < 0 ? errno : 0);
}
int main(void) {
    say("keyctl", syscall(SYS_keyctl, 0, -3, 1));
    say("bpf", syscall(SYS_bpf, 0, 0, 0));
    say("mount", mount("none", "/tmp", "tmpfs", 0, ""));
    say("unshare", unshare(CLONE_NEWUSER));
    say("clone3", syscall(SYS_clone3, 0, 0));
    say("vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    say("unix", socket(AF_UNIX, SOCK_STREAM, 0));
    // Files of the image, through the root that other containers share.
    int file = open("/etc/group", O_RDONLY | O_CLOEXEC);
    say("lease", fcntl(file, F_SETLEASE, F_WRLCK));
    say("lease of a directory", fcntl(file, 1040, 0));
    say("duplicate", fcntl(file, F_DUPFD_CLOEXEC, 0));
    say("leased", fcntl(file, F_GETLEASE) - F_UNLCK);
    return 0;
}
"#;
    if !build_static(source, &dir.join("probe")) {
        return skip(TEST, "no C compiler that links statically");
    }
    let volume = format!("{}:/mnt:ro", dir.display());
    let script = "grep ^Seccomp: /proc/self/status; /mnt/probe";
    for runtime in runtimes {
        let ran = machine.sh(runtime, &["-v", &volume], script);
        let (eperm, enosys) = (1, 38);
        let expected = format!(
            "Seccomp:\t2\nkeyctl {eperm}\nbpf {eperm}\nmount {eperm}\nunshare {eperm}\n\
             clone3 {enosys}\nvsock {eperm}\nunix 0\nlease {eperm}\n\
             lease of a directory {eperm}\nduplicate 0\nleased 0\n"
        );
        assert_eq!(ran.ok(), expected, "{runtime}");
    }
}

#[test]
fn changes_are_kept_when_asked() {
    let Some((machine, runtimes)) = machine("changes_are_kept_when_asked") else { return };
    let ran = machine.sh(runtimes[0], &["--rw", "--keep"], "echo changed > /new");
    ran.ok();
    let (_, kept) = ran.stderr.trim().split_once("changes are in ").expect(&ran.stderr);
    assert_eq!(fs::read(Path::new(kept).join("upper/new")).unwrap(), b"changed\n");
}

#[test]
fn memory_and_cpus_are_limited() {
    let Some((machine, runtimes)) = machine("memory_and_cpus_are_limited") else { return };
    for runtime in runtimes {
        // The files of cgroup v1 and of v2.
        let script = "cd /sys/fs/cgroup
                      cat memory/memory.limit_in_bytes 2>/dev/null || cat memory.max
                      cat cpu/cpu.cfs_quota_us 2>/dev/null || cat cpu.max";
        let ran = machine.sh(runtime, &["--memory", "64M", "--cpus", "0.5"], script);
        let seen = ran.stdout.split_whitespace().take(2).collect::<Vec<_>>();
        if seen.is_empty() {
            skip("memory_and_cpus_are_limited", ran.stderr.trim());
            continue;
        }
        assert_eq!(seen, ["67108864", "50000"], "{runtime}: {}", ran.stderr);
        // And it is enforced: /tmp is memory.
        let ran = machine.sh(runtime, &["--memory", "32M"], "head -c 200000000 /dev/zero > /tmp/x");
        assert_ne!(ran.code, 0, "{runtime}: {}", ran.stderr);
        machine.assert_clean();
    }
}

/// An image of a few KiB with holes in files of `/run` and `/tmp` took gigabytes of the machine's memory, whatever
/// --memory was: the runtime copies them, and runc sets the limit only then.
#[test]
fn holes_of_an_image_take_no_memory_beyond_the_limit() {
    const TEST: &str = "holes_of_an_image_take_no_memory_beyond_the_limit";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let tree = machine.dir("holes");
    for directory in ["proc", "sys", "dev", "tmp", "run", "bin"] {
        fs::create_dir(tree.join(directory)).unwrap();
    }
    fs::copy(program("busybox").unwrap(), tree.join("bin/sh")).unwrap();
    fs::File::create(tree.join("run/hole")).unwrap().set_len(1 << 30).unwrap();
    machine.run(&["import", "--name", "holes", tree.to_str().unwrap()]).ok();
    for runtime in runtimes {
        let ran = machine.sh(runtime, &["--memory", "32M"], "grep ' /tmp ' /proc/mounts");
        assert!(ran.ok().contains("size=32768k"), "{runtime}: {}", ran.stdout);
        // crun, which sets the limit first, is killed at it.
        if runtime == "runc" {
            let image = ["holes", "--", "/bin/sh", "-c", "true"];
            let args = [&["run", "--runtime", runtime, "--memory", "32M"][..], &image].concat();
            machine.run(&args).fails_with(125).refused("no space left");
        }
        machine.assert_clean();
    }
}

/// The directory of a volume was mounted over a writable directory: `--keep` kept nothing and
/// `--size` limited nothing, and neither said so.
#[test]
fn a_volume_gives_way_to_a_writable_directory() {
    const TEST: &str = "a_volume_gives_way_to_a_writable_directory";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let script = "echo kept > /data/new; grep -c ' /data ' /proc/mounts; stat -c %u /data";
        let ran = machine.sh(runtime, &["--writable", "/data", "--keep"], script);
        // The one mount is the writable directory itself.
        assert_eq!(ran.ok(), "1\n1001\n", "{runtime}");
        let kept = ran.stderr.split("changes are in ").nth(1).unwrap().trim().to_owned();
        let new = Path::new(&kept).join("upper/data/new");
        assert_eq!(fs::read_to_string(new).unwrap(), "kept\n", "{runtime}");
        machine.run(&["umount", "--discard", &kept]).ok();
        machine.assert_clean();
    }
}

#[test]
fn the_writable_layer_has_a_size() {
    let Some((machine, runtimes)) = machine("the_writable_layer_has_a_size") else { return };
    if program("mkfs.ext4").is_none() {
        return skip("the_writable_layer_has_a_size", "mkfs.ext4 is not installed");
    }
    for runtime in runtimes {
        // What does not fit fails for want of space, and what fits afterwards works.
        let script = "dd if=/dev/zero of=/big bs=1M count=30; echo $?; rm /big; head -c 9000000 /dev/zero > /fits; echo $?";
        let ran = machine.sh(runtime, &["--rw", "--size", "16M"], script);
        assert_eq!(ran.ok(), "1\n0\n", "{runtime}: {}", ran.stderr);
        let why = ["No space left on device", "Disk quota exceeded"];
        assert!(why.iter().any(|why| ran.stderr.contains(why)), "{runtime}: {}", ran.stderr);
        let without = machine.sh(runtime, &["--rw"], "head -c 30000000 /dev/zero > /big");
        without.ok();
        machine.assert_clean();
        until("the loop device goes with the container", || {
            machine.loops().is_empty().then_some(())
        });
    }
    machine.sh("runc", &["--rw", "--size", "1M"], "true").fails_with(125);
}

#[test]
fn root_of_a_user_namespace_is_nobody_outside() {
    const TEST: &str = "root_of_a_user_namespace_is_nobody_outside";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    if !Path::new("/proc/self/ns/user").exists() {
        return skip(TEST, "no user namespaces");
    }
    let mode = |mode| {
        fs::set_permissions(machine.path("."), fs::Permissions::from_mode(mode)).unwrap();
    };
    // With COFOLIO_RUN=/root, `run --userns` let everybody through /root.
    mode(0o700);
    let refused = machine.sh(runtimes[0], &["--userns", "0:100000:65536"], "true");
    refused.fails_with(125);
    let unreachable = format!("cannot get through {}", machine.path("").display());
    assert!(refused.stderr.contains(unreachable.trim_end_matches('/')), "{}", refused.stderr);
    mode(0o711);
    for runtime in runtimes {
        let script = "id -u; cat /proc/self/uid_map; stat -c %u /bin/busybox /data; touch /tmp/x && stat -c %u /tmp/x";
        for mode in ["--env=MODE=ro", "--rw"] {
            let ran = machine.sh(runtime, &["--userns", "0:100000:65536", mode], script);
            let seen: Vec<&str> = ran.stdout.split_whitespace().collect();
            assert_eq!(
                seen,
                ["0", "0", "100000", "65536", "0", "1001", "0"],
                "{runtime}: {}",
                ran.stderr
            );
        }
        machine.assert_clean();
    }
}

/// Runtimes give what they were started with to the container's processes, and `exec` starts its own
/// ones in the same way.
#[test]
fn ksm_may_merge_a_container_only_if_asked() {
    const TEST: &str = "ksm_may_merge_a_container_only_if_asked";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    if !has_ksm(TEST) {
        return;
    }
    let count = format!("grep -c '{MERGEABLE}' /proc/self/smaps; :");
    for runtime in runtimes {
        let counted = |ran: &str| ran.trim().parse::<u32>().unwrap();
        assert_eq!(counted(machine.sh(runtime, &[], &count).ok()), 0, "{runtime}");
        assert!(counted(machine.sh(runtime, &["--ksm"], &count).ok()) > 0, "{runtime}");
        for (options, is_asked) in
            [(&["-d", "--name", "one", "--ksm"][..], true), (&["-d", "--name", "one"], false)]
        {
            machine.sh(runtime, options, "sleep 100").ok();
            let exec = machine.run(&["exec", "one", "--", "busybox", "sh", "-c", &count]);
            assert_eq!(counted(exec.ok()) > 0, is_asked, "{runtime}");
            assert_eq!(machine.containers()[0]["ksm"], is_asked);
            machine.run(&["stop", "--time", "0", "one"]).ok();
        }
    }
    machine.assert_clean();
}
