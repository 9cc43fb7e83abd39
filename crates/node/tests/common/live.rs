//! What tests of a live kernel need: cgroups, and processes that map files until they are dropped.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "every test file uses a part")]

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cofolio_node::cgroup::{Cgroup, Hierarchy};
use cofolio_node::probe;
use cofolio_sys::cache::FileMap;

/// Alone, since other tests' processes would be seen, and only where mounts are possible.
pub fn alone(test: &str) -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    if !rustix::process::geteuid().is_root() {
        println!("SKIP {test}: needs root");
        return None;
    }
    if !probe::probe(&probe::Options::default()).can_mount() {
        println!("SKIP {test}: this kernel cannot mount images");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

pub fn cgroup(test: &str, name: &str) -> Option<Cgroup> {
    let name = format!("cofolio-test-{}-{test}-{name}", std::process::id());
    let made = Hierarchy::find(Path::new("/")).and_then(|hierarchy| hierarchy.create(&name));
    made.inspect_err(|reason| println!("SKIP {test}: {reason}")).ok()
}

/// Uses count only from the tick after a look at an object that was not resident.
pub fn next_tick() {
    std::thread::sleep(std::time::Duration::from_millis(200));
}

/// A process that maps a file and reads it, until it is dropped.
pub struct Holder(pub Child);

impl Holder {
    pub fn new(file: &Path, cgroup: Option<&Cgroup>) -> Self {
        let enter = cgroup
            .map_or_else(String::new, |it| format!("echo 0 > '{}' && ", it.procs().display()));
        let run = format!("{enter}exec \"$0\" --exact --ignored --nocapture live::worker");
        let mut child = Command::new("sh")
            .args(["-c", &run])
            .arg(std::env::current_exe().unwrap())
            .env("LEDGER_MAPS", file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let ready = lines.map_while(Result::ok).any(|line| line.contains("mapped"));
        assert!(ready);
        Self(child)
    }

    /// A shell that has a file open which it does not map.
    pub fn opener(file: &Path, cgroup: &Cgroup) -> Self {
        let run = "echo 0 > \"$0\" && exec 3<\"$1\" && echo opened && read x";
        let mut child = Command::new("sh")
            .args(["-c", run])
            .args([&cgroup.procs(), file])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "opened");
        Self(child)
    }

    /// It reads the file through its mapping again, and finds what it found first.
    pub fn reads_the_same(&mut self) {
        std::io::Write::write_all(self.0.stdin.as_mut().unwrap(), b"\n").unwrap();
        let lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.contains("the same")));
    }

    pub fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.end();
    }
}

#[test]
#[ignore = "worker: started by Holder"]
fn worker() {
    let Some(path) = std::env::var_os("LEDGER_MAPS") else { return };
    let file = File::open(path).unwrap();
    let size = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let map = FileMap::new(&file, size as u64).unwrap();
    drop(file);
    // A byte of each page, so that the process's own memory stays small.
    let page = 4096;
    let bytes = || {
        let byte = |at: usize| {
            let mut byte = [0];
            assert_eq!(map.read_at(at as u64, &mut byte), 1);
            byte[0]
        };
        (0..size).step_by(page).map(byte).collect::<Vec<u8>>()
    };
    let first = bytes();
    println!("mapped");
    let _ = std::io::stdin().read_line(&mut String::new());
    assert_eq!(bytes(), first);
    println!("the same");
    let _ = std::io::stdin().read_line(&mut String::new());
}
