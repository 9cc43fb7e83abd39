//! The runtime of async code.

use std::io;
use std::os::unix::net::UnixStream;

use tokio::runtime::{Builder, Runtime};

/// Pairs of sockets: more descriptors than a runtime opens.
const PAIRS: usize = 4;

/// A runtime with one thread, and at most so many more for work that blocks.
///
/// # Errors
/// Those of running out of descriptors. tokio panics where it cannot have those for its signals, so
/// this tries first whether there are enough.
pub(crate) fn new(blocking_threads_max: usize) -> io::Result<Runtime> {
    let tried: io::Result<Vec<_>> = (0..PAIRS).map(|_| UnixStream::pair()).collect();
    drop(tried?);
    Builder::new_current_thread().enable_all().max_blocking_threads(blocking_threads_max).build()
}
