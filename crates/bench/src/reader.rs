//! The reading process: a fresh one per measurement. It reads every regular
//! file below some directories and tells its parent, through a pipe, what it read.

use std::{
    fs::File,
    io::{self, BufWriter, Read, Write},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use cofolio_sys::cache::FileMap;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::source::{Content, number, parse_hex, walk};

/// How the files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// read(2), 128 KiB at a time, as cat(1) does.
    Read,
    /// mmap(2), touching every page.
    Mmap,
}

impl Mode {
    pub(super) const ALL: [Mode; 2] = [Mode::Read, Mode::Mmap];

    pub(super) fn name(self) -> &'static str {
        match self {
            Mode::Read => "read",
            Mode::Mmap => "mmap",
        }
    }
}

/// `cofolio-bench read`: not for people, so `--help` does not show it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How to read.
    #[arg(long, value_enum)]
    mode: Mode,
    /// Directories to read.
    dirs: Vec<PathBuf>,
}

/// The child's side. Each file gives a record `DIR SIZE SHA256 PATH`, ended by a NUL.
pub(super) fn run(args: &Args) -> Result<()> {
    let mut out = BufWriter::with_capacity(256 << 10, io::stdout().lock());
    let mut buf = vec![0; 128 << 10];
    for (index, dir) in args.dirs.iter().enumerate() {
        walk(dir, &mut |path, meta| {
            if !meta.is_file() {
                return Ok(());
            }
            let Content { size, hash } = read_file(path, args.mode, &mut buf)
                .with_context(|| format!("cannot read {}", path.display()))?;
            write!(out, "{index} {size} {} ", const_hex::encode(hash))?;
            out.write_all(path.strip_prefix(dir).unwrap_or(path).as_os_str().as_bytes())?;
            out.write_all(&[0])?;
            Ok(())
        })?;
    }
    out.write_all(b"end\0")?;
    out.flush().context("cannot tell the parent")
}

fn read_file(path: &Path, mode: Mode, buf: &mut [u8]) -> io::Result<Content> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut size = 0;
    match mode {
        Mode::Read => loop {
            let count = file.read(buf)?;
            if count == 0 {
                break;
            }
            hasher.update(&buf[..count]);
            size += count as u64;
        },
        Mode::Mmap => {
            let map = FileMap::new(&file, file.metadata()?.len())?;
            loop {
                let count = map.read_at(size, buf);
                if count == 0 {
                    break;
                }
                hasher.update(&buf[..count]);
                size += count as u64;
            }
        }
    }
    Ok(Content { size, hash: hasher.finalize().into() })
}

/// What the child read, by directory and relative path.
pub(super) type Seen = Vec<(usize, Vec<u8>, Content)>;

/// The parent's side: starts a fresh process of this very binary, in the cgroup that the parent is in,
/// and takes its report.
pub(super) fn spawn(mode: Mode, dirs: &[PathBuf]) -> Result<Seen> {
    let output = Command::new("/proc/self/exe")
        .args(["reader", "--mode", mode.name(), "--"])
        .args(dirs)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .context("cannot start the reading process")?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the reading process failed: {}", message.trim());
    parse(&output.stdout).context("the reading process talks nonsense")
}

fn parse(bytes: &[u8]) -> Result<Seen> {
    let body = bytes.strip_suffix(b"end\0").context("no end")?;
    let mut seen = Seen::new();
    for record in body.split_inclusive(|&byte| byte == 0) {
        let mut parts = record.strip_suffix(&[0]).unwrap_or(record).splitn(4, |&b| b == b' ');
        let mut next = || parts.next().context("a record is short");
        let (index, size, hash) = (number(next()?)?, number(next()?)?, parse_hex(next()?)?);
        seen.push((usize::try_from(index)?, next()?.to_owned(), Content { size, hash }));
    }
    Ok(seen)
}

/// A path for people, from bytes.
pub(super) fn show(path: &[u8]) -> String {
    std::ffi::OsString::from_vec(path.to_owned()).to_string_lossy().into_owned()
}
