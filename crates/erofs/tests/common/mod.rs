//! What the integration tests share: other programs, oracles, and trees made at random.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

pub mod random;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use cofolio_erofs::dump;
use cofolio_erofs::tree::Tree;
use cofolio_erofs::write::{WriteOptions, write};

/// Says why a test did not run.
pub fn skip(test: &str, reason: &str) {
    eprintln!("SKIP {test}: {reason}");
}

/// Whether EROFS images can be mounted here; says so if not.
pub fn can_mount(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() {
        skip(test, "mounting needs root");
        return false;
    }
    let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let erofs = filesystems.contains("erofs")
        || Command::new("modprobe").arg("erofs").status().is_ok_and(|s| s.success());
    if !erofs {
        skip(test, "this kernel has no erofs");
    }
    erofs
}

/// A number of rounds, which a soak run raises through the environment.
pub fn rounds(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Another program: a command prefix from the environment, or its name where it is on the path.
pub struct Tool(Vec<String>);

impl Tool {
    pub fn find(variable: &str, name: &str) -> Result<Tool, String> {
        if let Ok(command) = std::env::var(variable) {
            return Ok(Tool(command.split_whitespace().map(String::from).collect()));
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&path)
            .chain(["/usr/sbin".into(), "/sbin".into()])
            .map(|dir| dir.join(name))
            .find(|program| program.is_file());
        match found {
            Some(program) => Ok(Tool(vec![program.to_string_lossy().into_owned()])),
            None => Err(format!("no {name}; {variable} may name it")),
        }
    }

    /// Runs it with standard input.
    pub fn run(&self, args: &[&str], input: &[u8]) -> Output {
        let mut child = Command::new(&self.0[0])
            .args(&self.0[1..])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", self.0[0]));
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        let feeder = std::thread::spawn(move || {
            // A program that refuses its input stops reading it.
            let _ = stdin.write_all(&input);
        });
        let output = child.wait_with_output().unwrap();
        feeder.join().unwrap();
        output
    }
}

/// Dumps and checksums that other projects made, if they are on this machine.
pub fn oracles() -> Result<PathBuf, String> {
    let dir = match std::env::var_os("COFOLIO_ORACLES") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/oracles"),
    };
    let dir = dir.join("composefs");
    if dir.is_dir() {
        Ok(dir)
    } else {
        Err(format!("no oracles at {}; COFOLIO_ORACLES may name them", dir.display()))
    }
}

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

pub fn exactly(version: u32) -> WriteOptions {
    WriteOptions { min_version: version, max_version: version }
}

pub fn parse(text: &[u8]) -> Tree {
    dump::parse(text).unwrap_or_else(|e| panic!("{e:?}"))
}

pub fn image(tree: &Tree, options: &WriteOptions) -> Vec<u8> {
    let mut bytes = Vec::new();
    let report = write(tree, options, &mut bytes).unwrap();
    assert_eq!(report.bytes, bytes.len() as u64);
    bytes
}

pub fn text(tree: &Tree) -> Vec<u8> {
    let mut text = Vec::new();
    dump::write(tree, &mut text).unwrap();
    text
}

pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// A directory of its own that goes when it is dropped.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new(name: &str) -> TempDir {
        let dir = std::env::temp_dir().join(format!("cofolio-erofs-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        TempDir(dir)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
