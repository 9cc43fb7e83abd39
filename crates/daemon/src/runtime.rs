//! The runtime of async code.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// Pairs of sockets: more descriptors than a runtime opens.
const PAIRS: usize = 4;

/// A runtime with one thread, and up to `blocking_threads_max` more for work that blocks.
///
/// # Errors
/// Those of running out of descriptors or threads. tokio panics where it cannot have descriptors
/// for its signals, or a first thread for work that blocks: so this tries first whether there are
/// enough, and keeps that thread.
pub(crate) fn new(blocking_threads_max: usize) -> io::Result<Runtime> {
    let tried: io::Result<Vec<_>> = (0..PAIRS).map(|_| UnixStream::pair()).collect();
    drop(tried?);
    std::thread::Builder::new().spawn(|| {})?.join().map_err(|_| io::ErrorKind::Other)?;
    let runtime = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(blocking_threads_max)
        .thread_keep_alive(Duration::from_secs(u64::from(u32::MAX)))
        .build()?;
    runtime.block_on(runtime.spawn_blocking(|| {})).map_err(io::Error::other)?;
    Ok(runtime)
}
