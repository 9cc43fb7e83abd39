//! Reading a file without a change to the page cache.

use cofolio_store::StoredFile;
use cofolio_sys::cache;
use rustix::fs::{Advice, fadvise};

/// Reads a file of which nothing is resident and leaves it so.
pub(crate) fn leave_cache<T>(file: &StoredFile, read: impl FnOnce() -> T) -> T {
    let descriptor = file.descriptor();
    let cached = descriptor.and_then(|file| cache::cachestat(file, 0, 0).ok());
    let done = read();
    if let (Some(file), Some(cached)) = (descriptor, cached)
        && cached.cached == 0
    {
        // Whoever reads it meanwhile reads it again.
        let _ = fadvise(file, 0, None, Advice::DontNeed);
    }
    done
}
