//! Directories of things that run, one each: `<run>/containers/<name>`, `<run>/vms/<name>`.
//!
//! The process that waits for one holds the lock of its directory. Its exit status is kept there if
//! somebody is to see it.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cofolio_store::{Purpose, replace_file};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;

use super::error::At as _;
use super::{RunDirError, is_at, list, read_small, try_flock};

/// Largest size of each of the two files that hold the output of what was detached.
pub(crate) const OUTPUT_BYTES_MAX: u64 = 1 << 20;

/// Whether a container or a virtual machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It is being started, runs or is being removed; a process waits for its end.
    Running,
    /// It runs, and no process waits for its end, because that one was killed.
    Unattended,
    /// It has ended and was not removed.
    Ended,
}

/// Whether it can be the name of a directory.
pub(crate) fn is_name(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    first && name.len() <= 63 && name.bytes().all(plain)
}

/// `redis-3f9c21`: the image's name, and a random number.
pub(crate) fn new_name(image: &str) -> String {
    let last = image.rsplit('/').next().unwrap_or_default();
    let last = last.split([':', '@']).next().unwrap_or_default();
    let plain = last.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
    let plain: String = plain.take(40).collect();
    let plain = plain.trim_start_matches(['_', '-']);
    let number = random_number() & 0xFF_FFFF;
    format!("{}-{number:06x}", if plain.is_empty() { "box" } else { plain })
}

/// A random number, or where there is none the number of this process.
pub(crate) fn random_number() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(_) => u64::from_ne_bytes(bytes),
        Err(_) => std::process::id().into(),
    }
}

/// Makes a directory in `all`, with the wanted name or one made of `label`, and locks it: its name,
/// its path, its lock. `None` if something of the name runs; `make_room` removes what has ended.
pub(crate) fn claim<E: From<RunDirError>>(
    all: &Path,
    wanted: Option<&str>,
    label: &str,
    make_room: impl Fn(&str) -> Result<bool, E>,
) -> Result<Option<(String, PathBuf, OwnedFd)>, E> {
    const TRIES_MAX: u32 = 100;
    // A process that only tests the lock holds it for a moment.
    const TESTS_MAX: u32 = 5;
    const TEST: Duration = Duration::from_millis(10);
    let mut refused = 0;
    for _ in 0..TRIES_MAX {
        let name = wanted.map_or_else(|| new_name(label), str::to_owned);
        let dir = all.join(&name);
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if wanted.is_none() || make_room(&name)? {
                    continue;
                }
                refused += 1;
                if refused == TESTS_MAX {
                    return Ok(None);
                }
                std::thread::sleep(TEST);
                continue;
            }
            other => other.at("create", &dir)?,
        }
        // Meanwhile another process may have removed it as a leftover.
        match lock(&dir, FlockOperation::LockExclusive) {
            Ok(Some(lock)) if is_at(&lock, &dir.join("lock")) => {
                return Ok(Some((name, dir, lock)));
            }
            Err(error) if !error.is_missing() => return Err(error.into()),
            _ => {}
        }
    }
    Ok(None)
}

/// Locks a directory; `None` if another process has the lock.
pub(crate) fn lock(dir: &Path, how: FlockOperation) -> Result<Option<OwnedFd>, RunDirError> {
    let path = dir.join("lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).at("open", &path)?;
    Ok(try_flock(&file, how, &path)?.then_some(file))
}

/// Locks a directory for which no process waits any more; `None` if one does, or if there is none.
pub(crate) fn lock_ended(dir: &Path) -> Result<Option<OwnedFd>, RunDirError> {
    match lock(dir, FlockOperation::NonBlockingLockExclusive) {
        // If another process removed it meanwhile, this is not the lock of its name.
        Ok(lock) => Ok(lock.filter(|lock| is_at(lock, &dir.join("lock")))),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the lock file in a directory is another one than this: the run directory was lost, and
/// another process has taken the name, or it removes what is left.
pub(crate) fn is_replaced(lock: &OwnedFd, dir: &Path) -> bool {
    let path = dir.join("lock");
    path.exists() && !is_at(lock, &path)
}

/// Removes such a directory. Nothing may be mounted in it, and directories in it are only removed
/// if they are empty: they are not ours. The record and the lock go last and keep the name until
/// then.
pub(crate) fn remove_files(dir: &Path, record: &str) -> Result<(), RunDirError> {
    // A process that tests meanwhile whether it has ended may make a new lock.
    const TRIES: u32 = 10;
    for _ in 1..TRIES {
        if remove_files_once(dir, record).is_ok() {
            return Ok(());
        }
    }
    remove_files_once(dir, record)
}

fn remove_files_once(dir: &Path, record: &str) -> Result<(), RunDirError> {
    let last = [record, "lock"];
    // Other programs write files here as well: runc a `.pid` that becomes the pid file.
    let names = list(dir)?;
    let others = names.iter().map(String::as_str).filter(|name| !last.contains(name));
    let gone = |result: io::Result<()>, path: &Path| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.at("remove", path),
    };
    for name in others.chain(last) {
        let path = dir.join(name);
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => fs::remove_dir(&path),
            other => other,
        };
        gone(removed, &path)?;
    }
    gone(fs::remove_dir(dir), dir)
}

/// Tests the lock. A process that claims the directory at this moment finds it locked, and tries
/// again.
pub(crate) fn is_locked(dir: &Path) -> Result<bool, RunDirError> {
    let path = dir.join("lock");
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(&path, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(false),
        other => other.at("open", &path)?,
    };
    Ok(!try_flock(&file, FlockOperation::NonBlockingLockShared, &path)?)
}

/// Reads a file of such a directory, if it is there and one of ours.
pub(crate) fn read_text(path: &Path) -> Option<String> {
    String::from_utf8(read_small(path).ok()?).ok()
}

pub(crate) fn kept_exit_status(dir: &Path) -> Option<u8> {
    read_text(&dir.join("exit"))?.trim().parse().ok()
}

/// Writes a file in one step: no reader, and no crash, leaves half of it.
pub(crate) fn write_file(path: &Path, content: &[u8]) -> Result<(), RunDirError> {
    let aside = path.with_extension("new");
    replace_file(CWD, &aside, path, content, Purpose::Record, false).at("write", path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs::File;

    use super::*;

    const RECORD: &str = "record.json";

    fn remove_if_ended(dir: &Path) -> Result<bool, RunDirError> {
        let Some(_lock) = lock_ended(dir)? else { return Ok(false) };
        remove_files(dir, RECORD).map(|()| true)
    }

    /// `vm ps` tests the lock of a machine that has ended, and holds it for a moment. A start with
    /// its name said meanwhile that the name is taken.
    #[test]
    fn a_name_is_free_while_its_lock_is_tested() {
        let all = tempfile::tempdir().unwrap();
        let make_room = |name: &str| remove_if_ended(&all.path().join(name));
        let claim = || claim(all.path(), Some("one"), "", make_room).unwrap();
        let (_, dir, lock) = claim().unwrap();
        assert!(claim().is_none(), "it runs");
        drop(lock);
        let tested = File::open(dir.join("lock")).unwrap();
        rustix::fs::flock(&tested, FlockOperation::LockShared).unwrap();
        let test = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(1));
            drop(tested);
        });
        assert!(claim().is_some());
        test.join().unwrap();
    }

    /// Between the removal of the lock and that of the directory another process made a new lock.
    /// That was an error, and the directory stayed without a record.
    #[test]
    fn a_directory_goes_although_others_test_its_lock() {
        let all = tempfile::tempdir().unwrap();
        let dir = all.path().join("one");
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = lock_ended(&dir);
                }
            });
            for _ in 0..300 {
                fs::create_dir(&dir).unwrap();
                fs::write(dir.join(RECORD), "{}").unwrap();
                let removed = remove_files(&dir, RECORD);
                assert!(removed.is_ok(), "{removed:?}");
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
