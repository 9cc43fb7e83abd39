//! News of mounts: their records come and go in the run directory (inotify(7)).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

use crate::run_dir::{ATTACHED, RunDir};

/// Bytes of events that are read at once: some eighty.
const BUFFER: usize = 4096;

/// A queue of mounts that came, changed or went.
#[derive(Debug)]
pub(in super::super) struct MountEvents(OwnedFd);

/// What was in the queue.
#[derive(Debug, Default)]
pub(in super::super) struct MountNews {
    /// Ids of mounts that came, changed or went.
    pub(in super::super) ids: Vec<String>,
    /// The kernel had no room for more events, and dropped them.
    pub(in super::super) has_overflowed: bool,
}

impl MountEvents {
    pub(in super::super) fn new() -> io::Result<Self> {
        Ok(Self(inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?))
    }

    /// Watches the records in a run directory. To watch the same ones again changes nothing.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] before the first mount.
    pub(in super::super) fn watch(&self, run: &RunDir) -> io::Result<()> {
        // To wake us takes several µs of the mount's time, so once is enough: a record that is
        // written before its mount is in place comes from another directory.
        for (name, events) in [(ATTACHED, WatchFlags::MOVED_FROM), ("mounts", WatchFlags::DELETE)] {
            let events = events | WatchFlags::ONLYDIR;
            inotify::add_watch(&self.0, run.path().join(name), events)?;
        }
        Ok(())
    }

    /// Becomes readable when there are events.
    pub(in super::super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Some of what is in the queue; `None` if it is empty.
    pub(in super::super) fn read(&self) -> Option<MountNews> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(&self.0, &mut buffer);
        let mut news = None;
        while let Ok(event) = reader.next() {
            let MountNews { ids, has_overflowed } = news.get_or_insert_default();
            *has_overflowed |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            let name = event.file_name().and_then(|name| name.to_str().ok());
            // `<id>.json`, or `<id>.<stripe>`.
            ids.extend(name.and_then(|name| name.split('.').next()).map(str::to_owned));
            if reader.is_buffer_empty() {
                break;
            }
        }
        news
    }
}
