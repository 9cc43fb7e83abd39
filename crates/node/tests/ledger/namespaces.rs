//! Mounts that only processes in other mount namespaces show.

use super::*;

/// A container engine may mount in a namespace of its own, which no record of ours shows.
#[test]
fn mounts_of_other_namespaces_are_found_through_their_processes() {
    let test = "mounts_of_other_namespaces_are_found_through_their_processes";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let one = pair.mount(0, "m1", Access::Writable);
    // In the other namespace it is at another place, and here it is gone.
    let script = "mkdir \"$1/elsewhere\" && mount --bind \"$1/m1\" \"$1/elsewhere\" && echo bound && read x; \
                  LEDGER_MAPS=\"$1/elsewhere/shared\" exec \"$2\" --exact --ignored --nocapture live::worker";
    let mut child = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(pair.dir.path())
        .arg(std::env::current_exe().unwrap())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "bound");
    pair.umount(&one);
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"\n").unwrap();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("mapped")));
    let mut holder = Holder(child);
    let mut ledger = pair.ledger();
    ledger.sample_all().unwrap();
    let users = ledger.users("default", &pair.object(0)).unwrap();
    assert_eq!(users.len(), 1, "{users:?}");
    assert_eq!(users[0].image, pair.images[0]);
    let _ = holder.0.kill();
    let _ = holder.0.wait();
    drop(holder);
    let reconciled = pair.mounter().reconcile().unwrap();
    assert_eq!(reconciled.failed, [""; 0]);
}

/// A shell in a mount namespace of its own, where `dir/m` is at `dir/elsewhere` as well.
struct Namespace {
    shell: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Namespace {
    /// `unshare` says of which kinds namespaces are made.
    fn new(pair: &Pair, unshare: &[&str]) -> Self {
        // It runs each line that it reads. Processes that map files end with it.
        let script = "mkdir -p \"$1/elsewhere\"; cd \"$1\"; pids=; \
                      while read -r line; do eval \"$line\"; done; \
                      for pid in $pids; do kill $pid; done 2>/dev/null; wait";
        let mut shell = Command::new("unshare")
            .args(unshare)
            .args(["--mount", "sh", "-c", script, "sh"])
            .arg(pair.dir.path())
            .env("WORKER", std::env::current_exe().unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        Self { shell, lines }
    }

    /// Runs a line of shell. Returns what its last line of output says.
    fn run(&mut self, line: &str) -> String {
        let line = format!("{line}\necho ready=$?\n");
        std::io::Write::write_all(self.shell.stdin.as_mut().unwrap(), line.as_bytes()).unwrap();
        let mut last = String::new();
        loop {
            let line = self.lines.next().unwrap().unwrap();
            if let Some(status) = line.strip_prefix("ready=") {
                assert_eq!(status, "0", "{last}");
                return last;
            }
            last = line;
        }
    }

    /// A process that maps a file until it is killed. Returns its number. With one thread for tests, the
    /// test's name stands before what the process says.
    fn map(&mut self, file: &str) -> String {
        let worker = "\"$WORKER\" --exact --ignored --nocapture live::worker";
        self.run(&format!(
            "mkfifo in out; {{ LEDGER_MAPS={file} exec {worker} 0<>in >out & }}; \
             pids=\"$pids $!\"; exec 9<out; \
             while read -r said <&9 && [ \"$said\" = \"${{said%mapped}}\" ]; do :; done; \
             rm in out; echo $!"
        ))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// A container that started between two refreshes was found through its processes, and files that
/// it opened were never seen; with its first process, all that was known of its users went.
#[test]
fn opens_are_seen_on_mounts_that_are_found_through_processes() {
    let test = "opens_are_seen_on_mounts_that_are_found_through_processes";
    let Some(_alone) = alone(test) else { return };
    let Some(group) = cgroup(test, "a") else { return };
    let pair = Pair::new();
    let Some(mut ledger) = watched(test, &pair) else { return };
    // The ledger may know that the device number of the new mount was somebody else's.
    ledger.refresh(&Budget::UNLIMITED).unwrap();
    let two = pair.mount(1, "m2", Access::Writable);
    let holder = Holder::new(&two.join("shared"), None);
    while !ledger.sample_processes(&Budget::UNLIMITED).unwrap() {}
    let opener = Holder::opener(&two.join("deep/own"), &group);
    fs::read(two.join("deep/own")).unwrap();
    ledger.drain_opens(&Budget::UNLIMITED).unwrap();
    ledger.sample_residency(&Budget::UNLIMITED);
    let of = |ledger: &Ledger, salt| ledger.users("default", &pair.object(salt)).unwrap().len();
    assert_eq!([of(&ledger, 0), of(&ledger, 2)], [1, 1]);
    drop((holder, opener));
    // By now the run directory shows it: it is the same one.
    assert_eq!(users(&mut ledger, &pair), [1, 0, 1]);
    assert_eq!(ledger.report().unwrap().unknown.mounts, 0);
    pair.umount(&two);
    assert_eq!(users(&mut ledger, &pair), [0, 0, 0]);
}

/// A container engine has its mount in a namespace of its own; the container ends and starts again.
#[test]
fn a_container_is_restarted_in_another_mount_namespace() {
    let test = "a_container_is_restarted_in_another_mount_namespace";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let Some(mut ledger) = watched(test, &pair) else { return };
    let m = pair.mount(0, "m", Access::Writable);
    let mut engine = Namespace::new(&pair, &[]);
    engine.run("mount --move m elsewhere");
    pair.umount(&m);
    assert_eq!(users(&mut ledger, &pair), [0, 0, 0]);
    let pid = engine.map("elsewhere/shared");
    // The ledger may know its device as somebody else's until the next refresh.
    let adopted = (0..3).any(|_| users(&mut ledger, &pair) == [1, 0, 0]);
    assert!(adopted);
    engine.run(&format!("kill {pid}; wait; true"));
    for _ in 0..3 {
        assert_eq!(users(&mut ledger, &pair), [1, 0, 0], "its namespace still shows the mount");
    }
    // Seen because it is opened.
    engine.run("exec 3<elsewhere/deep/own; cat <&3 >/dev/null");
    assert_eq!(users(&mut ledger, &pair), [1, 1, 0]);
    // A changed file is none of ours, wherever the mount is.
    pair.forget_all();
    assert_eq!(users(&mut ledger, &pair), [0, 0, 0]);
    next_tick();
    engine.run("exec 3<&-; echo >>elsewhere/shared; exec 3<elsewhere/shared");
    fs::read(pair.domain.object_path(&pair.object(0)).unwrap()).unwrap();
    engine.map("elsewhere/shared");
    assert_eq!(users(&mut ledger, &pair), [0, 0, 0]);
    engine.map("elsewhere/deep/own");
    assert_eq!(users(&mut ledger, &pair), [0, 1, 0]);
    drop(engine);
    // Gone once no process has shown it for a round.
    users(&mut ledger, &pair);
    users(&mut ledger, &pair);
    assert_eq!(users(&mut ledger, &pair), [0, 0, 0]);
    assert_eq!(pair.mounter().reconcile().unwrap().failed, [""; 0]);
}

/// What mountinfo of a container says was believed: an overlay of its own files under our name
/// counted as ours.
#[test]
fn a_container_cannot_pretend_to_have_a_mount_of_ours() {
    let test = "a_container_cannot_pretend_to_have_a_mount_of_ours";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let Some(mut ledger) = watched(test, &pair) else { return };
    let m = pair.mount(0, "m", Access::ReadOnly);
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(m.join("shared")).unwrap());
    fs::write(pair.dir.path().join("content"), content(0)).unwrap();
    fs::read(pair.domain.object_path(&pair.object(0)).unwrap()).unwrap();
    // Ours is in its mount namespace, too. Nobody watches what it opens there: see `adopted`.
    let mut hostile = Namespace::new(&pair, &["--user", "--map-root-user"]);
    hostile.run("true");
    pair.umount(&m);
    hostile.map("m/deep/own");
    assert_eq!(users(&mut ledger, &pair), [0, 1, 0]);
    hostile.run("exec 3<m/shared");
    assert_eq!(users(&mut ledger, &pair), [0, 1, 0]);
    assert_eq!(ledger.report().unwrap().unknown.mounts, 1);
    let source = format!("cofolio:{}", pair.images[0]);
    // With the inode number of an object's file, its size and even its content.
    let same = format!(
        "mkdir t && mount -t tmpfs {source} t && mkdir t/l && while :; do : >t/l/f; \
         [ $(stat -c %i t/l/f) -ge {inode} ] && break; mv t/l/f t/l/$(stat -c %i t/l/f); done; \
         [ $(stat -c %i t/l/f) = {inode} ] && cp content t/l/f"
    );
    hostile.run(&same);
    hostile.map("t/l/f");
    hostile.run(&format!(
        "mkdir t/o && mount -t overlay -o lowerdir=t/l:t/o {source} elsewhere && stat -c %i elsewhere/f"
    ));
    hostile.map("elsewhere/f");
    for _ in 0..2 {
        assert_eq!(users(&mut ledger, &pair), [0, 1, 0]);
    }
    drop(hostile);
    assert_eq!(pair.mounter().reconcile().unwrap().failed, [""; 0]);
}

/// The ledger went to the path at which a container's mountinfo shows a mount of ours. A FUSE
/// server over it that does not answer let it wait for ever.
#[test]
fn a_filesystem_that_does_not_answer_is_not_asked() {
    let test = "a_filesystem_that_does_not_answer_is_not_asked";
    let Some(_alone) = alone(test) else { return };
    if fs::metadata("/dev/fuse").is_err() {
        return println!("SKIP {test}: there is no /dev/fuse");
    }
    let pair = Pair::new();
    let Some(mut ledger) = watched(test, &pair) else { return };
    let m = pair.mount(0, "m", Access::Writable);
    let mut engine = Namespace::new(&pair, &[]);
    engine.run("mount --move m elsewhere");
    pair.umount(&m);
    engine.map("elsewhere/shared");
    let options = "fd=7,rootmode=40000,user_id=0,group_id=0";
    let source = format!("cofolio:{}", pair.images[0]);
    engine.run(&format!("exec 7<>/dev/fuse; mount -i -t fuse -o {options} {source} elsewhere"));
    for _ in 0..3 {
        assert_eq!(users(&mut ledger, &pair), [1, 0, 0]);
    }
    assert_eq!(ledger.report().unwrap().unknown.mounts, 0);
    drop(engine);
    assert_eq!(pair.mounter().reconcile().unwrap().failed, [""; 0]);
}
