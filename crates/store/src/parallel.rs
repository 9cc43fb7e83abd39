//! A few threads over a list of work.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Calls `work` for every item on up to `threads` threads, each taking the next item when free, in
/// the list's order with one thread. The first error stops them all. Fewer threads suffice.
pub fn for_each<T: Sync, E: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let threads = threads.min(items.len());
    if threads <= 1 {
        return items.iter().try_for_each(work);
    }
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let run = || {
        while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
            if let Err(error) = work(item) {
                next.store(items.len(), Relaxed);
                if let Ok(mut failed) = failed.lock() {
                    failed.get_or_insert(error);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // `Scope::spawn` panics if there is none to be had.
            if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    failed.into_inner().unwrap_or_default().map_or(Ok(()), Err)
}
