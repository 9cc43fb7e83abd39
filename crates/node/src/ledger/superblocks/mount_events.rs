//! News of mounts: their records come and go in the run directory (inotify(7)).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};

use crate::mount::RunDir;

/// Bytes of events that are read at once: some eighty.
const BUFFER: usize = 4096;

/// A queue of mounts that came, changed or went.
#[derive(Debug)]
pub(in super::super) struct MountEvents(OwnedFd);

impl MountEvents {
    pub(in super::super) fn new() -> io::Result<Self> {
        Ok(Self(inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?))
    }

    /// Watches the records in a run directory. To watch the same ones again changes nothing.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] before the first mount.
    pub(in super::super) fn watch(&self, run: &RunDir) -> io::Result<()> {
        // A record is replaced once its mount is in place.
        let flags = WatchFlags::MOVED_TO | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        inotify::add_watch(&self.0, run.path().join("mounts"), flags)?;
        Ok(())
    }

    /// Becomes readable when there are events.
    pub(in super::super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Ids of some mounts that came, changed or went; none if there are no events. When the kernel
    /// had no room for more, those of the others are missing.
    pub(in super::super) fn read(&self) -> Vec<String> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(&self.0, &mut buffer);
        let mut ids = Vec::new();
        while let Ok(event) = reader.next() {
            let name = event.file_name().and_then(|name| name.to_str().ok());
            ids.extend(name.and_then(|name| name.strip_suffix(".json")).map(str::to_owned));
            if reader.is_buffer_empty() {
                break;
            }
        }
        ids
    }
}
