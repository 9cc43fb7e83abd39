//! What is preloaded: finds the guest's memory, takes discards over, and serves the merger.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::memory::{Memory, advise, complain};
use crate::message::{receive, send};
use crate::protocol::{self, Head, Hello, Outcome, Plain, RUNS_MAX, Run, kind};

static STATE: Mutex<State> = Mutex::new(State::Unknown);

/// What is known of the guest's memory.
enum State {
    /// The VMM has not given advice about it yet.
    Unknown,
    /// At this address, of this length. No merger has connected yet.
    Found { start: usize, len: usize, advice: Vec<i32> },
    /// Its pages can be merged.
    Ready(Memory),
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// madvise(2) of the VMM. The guest's memory is the first private anonymous range with the guest's
/// number of bytes that the VMM gives advice about.
///
/// # Safety
/// As madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(
    address: *mut libc::c_void,
    len: libc::size_t,
    advice: i32,
) -> i32 {
    let start = address as usize;
    let mut state = state();
    match &mut *state {
        State::Unknown => {
            if memory_len() == Some(len) && is_private_anonymous(start, len) {
                *state = State::Found { start, len, advice: Vec::new() };
                if let Err(error) = serve() {
                    complain(&format!("pages are not merged: {error}"));
                }
                note(&mut state, start, len, advice);
            }
        }
        State::Found { .. } => note(&mut state, start, len, advice),
        State::Ready(memory) => {
            if advice == libc::MADV_DONTNEED {
                // SAFETY: the caller's promise.
                return unsafe { memory.discard(start, len) };
            }
        }
    }
    // The lock is held: no page may be merged between the look and the advice.
    // SAFETY: the caller's promise.
    unsafe { advise(start, len, advice) }
}

/// Remembers advice about all of the memory, but for what changes its content.
fn note(state: &mut State, at: usize, length: usize, advice: i32) {
    if let State::Found { start, len, advice: all } = state
        && (at, length) == (*start, *len)
        && [libc::MADV_HUGEPAGE, libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP].contains(&advice)
    {
        all.push(advice);
    }
}

fn memory_len() -> Option<usize> {
    std::env::var(protocol::MEMORY).ok()?.parse().ok()
}

/// Whether all of a range is private anonymous memory. QEMU gives advice about files of devices
/// first, and an image may be as large as the guest's memory.
fn is_private_anonymous(start: usize, len: usize) -> bool {
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let (mut at, last) = (start, start.saturating_add(len));
    for line in String::from_utf8_lossy(&maps).lines() {
        let mut words = line.split_whitespace();
        let (Some(addresses), Some(access)) = (words.next(), words.next()) else { return false };
        let Some((first, end)) = addresses.split_once('-') else { return false };
        let address = |text| usize::from_str_radix(text, 16).unwrap_or(0);
        if at < last && (address(first)..address(end)).contains(&at) {
            // Offset, device, inode: proc_pid_maps(5).
            if !access.ends_with('p') || words.nth(2) != Some("0") {
                return false;
            }
            at = address(end);
        }
    }
    at >= last
}

/// Begins to serve, on a thread that blocks all signals: they are for the VMM.
fn serve() -> io::Result<()> {
    let fd = std::env::var(protocol::SOCKET).ok().and_then(|fd| fd.parse::<i32>().ok());
    let fd = fd.ok_or(io::ErrorKind::NotFound)?;
    // SAFETY: whoever started the VMM opened it for us.
    let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(fd) });
    // The merger asks the kernel for the process that listens (SO_PEERCRED). From here on it is
    // this process, not the one that made the socket.
    rustix::net::listen(&listener, 16)?;
    // A pool has a descriptor, and there may be a thousand.
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    // SAFETY: zeros are a signal set, which the calls fill; the mask is this thread's.
    let before = unsafe {
        let (mut all, mut before) = std::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let thread = std::thread::Builder::new().name("cofolio-shim".to_owned());
    let spawned = thread.spawn(move || {
        for mut client in listener.incoming().flatten() {
            // A merger may be killed at any time; the next one begins anew.
            let _ = answer_all(&mut client);
        }
    });
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    spawned.map(drop)
}

fn answer_all(client: &mut UnixStream) -> io::Result<()> {
    loop {
        let (head, file) = receive(client)?;
        match head.kind {
            kind::HELLO => {
                let hello = hello();
                client.write_all(Plain::bytes(&[hello]))?;
            }
            kind::POOL => {
                let kept = match (&mut *state(), file) {
                    (State::Ready(memory), Some(file)) => {
                        memory.keep_pool(head.argument, head.count as usize, file)
                    }
                    _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
                };
                client.write_all(Plain::bytes(&[errno(kept)]))?;
            }
            kind::POOLS => {
                if let State::Ready(memory) = &*state() {
                    tell_pools(client, memory)?;
                } else {
                    client.write_all(Plain::bytes(&[0_u32]))?;
                }
            }
            kind::FORGET => {
                if let State::Ready(memory) = &mut *state() {
                    memory.forget_pool(head.argument);
                }
                client.write_all(Plain::bytes(&[0_u32]))?;
            }
            kind::MERGE | kind::CONVERT => {
                let count = head.count as usize;
                if count > RUNS_MAX {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let mut runs = vec![Run::default(); count];
                client.read_exact(Plain::bytes_mut(&mut runs))?;
                let outcomes: Vec<Outcome> = runs.iter().map(|run| one(head.kind, run)).collect();
                client.write_all(Plain::bytes(&outcomes))?;
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn tell_pools(client: &mut UnixStream, memory: &Memory) -> io::Result<()> {
    let pools = memory.pools();
    client.write_all(Plain::bytes(&[pools.len() as u32]))?;
    for (number, pages, file) in pools {
        let count = pages as u32;
        let head = Head { kind: kind::POOLS, count, argument: number, reserved: 0 };
        send(client, head, Some(file.as_fd()))?;
    }
    Ok(())
}

/// Merges or converts a run. The lock is free between two: a balloon waits for one run at most.
fn one(kind: u32, run: &Run) -> Outcome {
    match &mut *state() {
        State::Ready(memory) if kind == kind::MERGE => memory.merge(run),
        State::Ready(memory) => memory.convert(run),
        _ => Outcome { errno: libc::EINVAL.unsigned_abs(), ..Outcome::default() },
    }
}

/// Where the memory is; prepares it for the first merger.
fn hello() -> Hello {
    let mut state = state();
    if let State::Found { start, len, advice } = &mut *state {
        let (start, len) = (*start, *len);
        match Memory::new(start, len, advice.clone()) {
            Ok(memory) => *state = State::Ready(memory),
            Err(error) => {
                let errno = errno(Err(error));
                return Hello { start: start as u64, len: len as u64, errno, reserved: 0 };
            }
        }
    }
    match &*state {
        State::Ready(memory) => {
            let (start, len) = memory.place();
            Hello { start: start as u64, len: len as u64, errno: 0, reserved: 0 }
        }
        _ => Hello { errno: libc::ENOENT.unsigned_abs(), ..Hello::default() },
    }
}

fn errno(result: io::Result<()>) -> u32 {
    match result {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs(),
    }
}
