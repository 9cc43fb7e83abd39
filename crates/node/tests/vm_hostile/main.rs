//! Hostile VMMs: they lie to the merger and the recycler, and attack others with the descriptors
//! they get.
//!
//! A VMM is a process of this test with memory as a guest's, [`vmm`], and the shim where it is
//! merged.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests may panic, and say why they skip"
)]

mod merger;
mod recycler;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

use cofolio_node::vm::merger::preload;
use cofolio_shim::protocol::PAGE;
use cofolio_sys::memory::GuestMemory;

const WORDS: usize = PAGE / 8;
/// Contents that are not the same.
const CONTENTS: usize = 1024;

/// Bytes of the memory of each.
const MEMORY: usize = 24 << 20;

/// What is in a word of a guest's memory: the same in all guests, and in each several times.
fn content(word: usize) -> u64 {
    let number = word / WORDS % CONTENTS * WORDS + word % WORDS;
    (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn filled() -> GuestMemory {
    let memory = GuestMemory::new(MEMORY).unwrap();
    let words = memory.words().iter().enumerate();
    words.for_each(|(number, word)| word.store(content(number), Relaxed));
    memory
}

/// A process in place of a VMM; it ends with the test.
struct Vmm {
    child: Child,
    output: BufReader<ChildStdout>,
    dir: PathBuf,
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Vmm {
    /// One that behaves like this, with its sockets in `dir`, which is made; with the shim if there
    /// is a library, which listens at `merge` or, to be used by the VMM itself, at `hidden/merge`.
    fn start(dir: &Path, behaviour: &str, shim: Option<(&Path, &str)>) -> Self {
        fs::create_dir_all(dir.join("hidden")).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--ignored", "--nocapture", "vmm"]);
        command.env("COFOLIO_BEHAVIOUR", behaviour).env("COFOLIO_DIR", dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some((library, below)) = shim {
            preload(&mut command, library, &dir.join(below), MEMORY as u64).unwrap();
        }
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut vmm = Self { child, output, dir: dir.to_owned() };
        vmm.wait_for("ready");
        vmm
    }

    /// Waits for a line that begins like this; the rest of it.
    fn wait_for(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "a VMM has ended");
            // The test harness has begun the line.
            if let Some((_, rest)) = line.split_once(&format!("vmm: {word}")) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Whether every word of its memory is as it was.
    fn check(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"check\n").unwrap();
        assert_eq!(self.wait_for("wrong words: "), "0");
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

fn say(what: &str) {
    // One write: lines of threads do not mix.
    std::io::stdout().write_all(format!("vmm: {what}\n").as_bytes()).unwrap();
}

/// A process in place of a VMM.
#[test]
#[ignore = "worker: started by the other tests"]
fn vmm() {
    let behaviour = std::env::var("COFOLIO_BEHAVIOUR").unwrap();
    let dir = PathBuf::from(std::env::var_os("COFOLIO_DIR").unwrap());
    let memory = Mutex::new(filled());
    std::thread::scope(|scope| {
        let (dir, behaviour, memory) = (&*dir, &*behaviour, &memory);
        // Others say so when they serve.
        match behaviour.strip_prefix("qmp ") {
            Some(behaviour) => _ = scope.spawn(move || recycler::serve(dir, behaviour, memory)),
            None if behaviour == "honest" => say("ready"),
            None => _ = scope.spawn(move || merger::serve(dir, behaviour)),
        }
        for _ in std::io::stdin().lines().map_while(Result::ok) {
            let memory = memory.lock().unwrap();
            let words = memory.words().iter().enumerate();
            let wrong = words.filter(|(number, word)| word.load(Relaxed) != content(*number));
            say(&format!("wrong words: {}", wrong.count()));
        }
        // The test has ended, and nobody waits for the others.
        std::process::exit(0);
    });
}

/// Where the shim is; says why it is nowhere.
fn shim(test: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().unwrap();
    // Tests are in `deps`.
    let directory = program.ancestors().nth(3).unwrap();
    let library = directory.join("lib/cofolio/libcofolio_shim.so");
    if !library.exists() {
        println!("SKIP {test}: tools/guest was not run");
        return None;
    }
    Some(library)
}

fn listen(dir: &Path, name: &str) -> UnixListener {
    let held = File::open(dir).unwrap();
    UnixListener::bind(format!("/proc/self/fd/{}/{name}", held.as_raw_fd())).unwrap()
}

fn connect(dir: &Path, name: &str) -> UnixStream {
    let held = File::open(dir).unwrap();
    UnixStream::connect(format!("/proc/self/fd/{}/{name}", held.as_raw_fd())).unwrap()
}

/// Reads until the other end hangs up.
fn drain(mut client: &UnixStream) {
    let mut bytes = [0; 4096];
    while client.read(&mut bytes).is_ok_and(|count| count > 0) {}
}
