//! Starting threads where the machine may refuse them and `Scope::spawn` panics.

use std::io;
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// The machine gives no more threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a thread (`ulimit -u` and the cgroup's pids.max limit their number)")]
pub struct NoThread(#[source] io::Error);

/// As [`Scope::spawn`].
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, NoThread> {
    Builder::new().spawn_scoped(scope, work).map_err(NoThread)
}

/// Starts `count` threads that do the same work, or fewer if the machine gives no more.
///
/// # Errors
/// [`NoThread`] if it gives none.
pub fn spawn_up_to<'scope, T: Send + 'scope, W: FnOnce() -> T + Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    count: usize,
    mut work: impl FnMut() -> W,
) -> Result<(), NoThread> {
    for number in 0..count {
        match spawn(scope, work()) {
            Err(error) if number == 0 => return Err(error),
            Err(_) => break,
            Ok(_) => {}
        }
    }
    Ok(())
}
