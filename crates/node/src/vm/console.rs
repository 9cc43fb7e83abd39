//! The console of a detached virtual machine: what it says is in files, and what it is told comes
//! through a FIFO, so that no process need stand between it and those who attach.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cofolio_guest::Message;
use cofolio_store::task::Cancel;
use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags};

use super::error::{Result, VmError};
use super::{Machines, State, socket};
use crate::mount::At as _;
use crate::run_dir::running::{is_locked, kept_exit_status};
use crate::run_dir::{is_at, try_flock};

/// Bytes of what it said before that are shown.
const BEFORE_BYTES_MAX: u64 = 16 << 10;
/// How often a file is looked at.
const LOOK: Duration = Duration::from_millis(50);
const PIECE_BYTES: usize = 64 << 10;

/// A console that somebody is attached to.
#[derive(Debug)]
pub struct Console {
    dir: PathBuf,
    /// Output from before the present file `output`.
    earlier: Option<File>,
    output: File,
    input: Option<File>,
}

/// Makes the FIFO that is the input of a machine. It has no end as long as the machine runs.
pub(super) fn make_input(dir: &Path) -> Result<OwnedFd> {
    let path = dir.join("input");
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, mode, 0).at("making", &path)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(&path, flags, Mode::empty()).at("opening", &path)?)
}

impl Machines<'_> {
    /// Attaches to the console of a detached virtual machine, which may have ended.
    ///
    /// # Errors
    /// [`VmError::Name`], [`VmError::NotFound`], [`VmError::NotOurs`], [`VmError::Attached`],
    /// [`VmError::RunDir`], [`VmError::Mount`].
    pub fn console(&self, name: &str) -> Result<Console> {
        let status = self.get(name)?;
        status.record.started()?;
        let state = status.state;
        let dir = self.dir().join(name);
        let attached = |to| VmError::Attached { name: name.to_owned(), to };
        let path = dir.join("output");
        let output = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(attached("the `cofolio vm run` that started it"));
            }
            other => other.at("opening", &path)?,
        };
        let mut console = Console::new(dir, output);
        if state == State::Ended {
            return Ok(console);
        }
        console.skip().at("reading", &path)?;
        let path = console.dir.join("input");
        // If the machine has ended meanwhile nobody reads there.
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if let Ok(input) = rustix::fs::open(&path, flags, Mode::empty()) {
            if !try_flock(&input, FlockOperation::NonBlockingLockExclusive, &path)? {
                return Err(attached("another `cofolio vm console`"));
            }
            rustix::io::ioctl_fionbio(&input, false).at("opening", &path)?;
            console.input = Some(input.into());
        }
        Ok(console)
    }
}

impl Console {
    fn new(dir: PathBuf, output: File) -> Self {
        let earlier = dir.join("output.1");
        // It may have been put aside since it was opened.
        let is_it = output.try_clone().is_ok_and(|output| is_at(&output.into(), &earlier));
        let earlier = if is_it { None } else { File::open(&earlier).ok() };
        Self { dir, earlier, output, input: None }
    }

    /// Where its input goes, once; none if the machine was started without.
    pub fn take_input(&mut self) -> Option<File> {
        self.input.take()
    }

    /// Gives it other sizes, in rows and columns; without effect where no process waits for the
    /// machine.
    pub fn resizer(&self) -> impl Fn(u16, u16) + Send + use<> {
        let dir = self.dir.clone();
        move |rows, columns| {
            let control = socket::connect(&dir, "control");
            let _ = control.map(|mut it| Message::Size(rows, columns).write(&mut it));
        }
    }

    /// Leaves out what was said long ago.
    fn skip(&mut self) -> io::Result<()> {
        let mut most = BEFORE_BYTES_MAX;
        for file in [&mut self.output].into_iter().chain(&mut self.earlier) {
            let size = file.metadata()?.len();
            file.seek(SeekFrom::Start(size.saturating_sub(most)))?;
            most = most.saturating_sub(size);
        }
        Ok(())
    }

    /// Copies what it says until the machine has ended, or until `detached`. Returns the kept exit
    /// status of a machine that has ended.
    ///
    /// # Errors
    /// Those of reading and writing.
    pub fn follow(&mut self, to: &mut dyn Write, detached: &Cancel) -> io::Result<Option<u8>> {
        if let Some(mut earlier) = self.earlier.take() {
            copy(&mut earlier, to)?;
        }
        loop {
            // Before what it says: whatever an ended one has said is there.
            let has_ended = !is_locked(&self.dir).map_err(io::Error::other)?;
            copy(&mut self.output, to)?;
            // A full file was put aside, and another one begun.
            let path = self.dir.join("output");
            if !is_at(&self.output.try_clone()?.into(), &path)
                && let Ok(next) = File::open(&path)
            {
                copy(&mut self.output, to)?;
                self.output = next;
                continue;
            }
            if has_ended {
                return Ok(kept_exit_status(&self.dir));
            }
            if detached.is_cancelled() {
                return Ok(None);
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// Copies the rest of a file.
fn copy(file: &mut File, to: &mut dyn Write) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match file.read(&mut piece)? {
            0 => return to.flush(),
            length => to.write_all(&piece[..length])?,
        }
    }
}

/// Leaves a console by Ctrl-P Ctrl-Q, as Docker has it.
#[derive(Debug, Default)]
pub struct DetachKeys {
    is_begun: bool,
}

impl DetachKeys {
    const FIRST: u8 = 0x10;
    const SECOND: u8 = 0x11;

    /// What of these keys is for the machine, and whether the next ones are not.
    pub fn filter(&mut self, keys: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(keys.len() + 1);
        for &key in keys {
            if self.is_begun && key == Self::SECOND {
                return (passed, true);
            }
            if self.is_begun {
                passed.push(Self::FIRST);
            }
            self.is_begun = key == Self::FIRST;
            if !self.is_begun {
                passed.push(key);
            }
        }
        (passed, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_both_keys_detach() {
        let mut keys = DetachKeys::default();
        assert_eq!(keys.filter(b"a\x10"), (b"a".to_vec(), false));
        assert_eq!(keys.filter(b"b\x10\x10"), (b"\x10b\x10".to_vec(), false));
        assert_eq!(keys.filter(b"\x11lost"), (b"".to_vec(), true));
        assert_eq!(DetachKeys::default().filter(b"\x11\x10x"), (b"\x11\x10x".to_vec(), false));
    }

    /// A file that was full was put aside between two looks, with what was written to it last.
    #[test]
    fn nothing_is_lost_where_one_file_ends_and_the_next_begins() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("output"), "one ").expect("written");
        let output = File::open(path("output")).expect("opened");
        let mut console = Console::new(dir.path().to_owned(), output);
        let mut said = Vec::new();
        copy(&mut console.output, &mut said).expect("copied");
        std::fs::write(path("output"), "one two ").expect("written");
        std::fs::rename(path("output"), path("output.1")).expect("renamed");
        std::fs::write(path("output"), "three").expect("written");
        std::fs::write(path("exit"), "3").expect("written");
        assert_eq!(console.follow(&mut said, &Cancel::default()).expect("followed"), Some(3));
        assert_eq!(said, b"one two three");
    }

    /// Right after a file was put aside, nothing was shown that was said before.
    #[test]
    fn what_was_put_aside_is_shown_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        let earlier = "e".repeat(20 << 10);
        std::fs::write(path("output.1"), &earlier).expect("written");
        std::fs::write(path("output"), "now").expect("written");
        let attach = || {
            let output = File::open(path("output")).expect("opened");
            Console::new(dir.path().to_owned(), output)
        };
        let followed = |mut console: Console| {
            let mut said = Vec::new();
            console.follow(&mut said, &Cancel::default()).expect("followed");
            String::from_utf8(said).expect("text")
        };
        // All that is kept, or the end of it.
        assert_eq!(followed(attach()), format!("{earlier}now"));
        let mut console = attach();
        console.skip().expect("skipped");
        assert_eq!(followed(console), format!("{}now", &earlier[..(16 << 10) - 3]));
        // It is put aside while somebody attaches.
        let output = File::open(path("output")).expect("opened");
        std::fs::rename(path("output"), path("output.1")).expect("renamed");
        std::fs::write(path("output"), " and then").expect("written");
        let console = Console::new(dir.path().to_owned(), output);
        assert_eq!(followed(console), "now and then");
    }
}
