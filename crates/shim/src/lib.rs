//! A library in the process of a VMM (`LD_PRELOAD`). It merges pages of the running guest with
//! equal pages of other guests.
//!
//! ```text
//! merger, outside                       shim, in the VMM
//! finds equal pages
//! puts one copy into a pool ─── fd ──▶  keeps it
//! runs of pages ─────────────────────▶  moves them aside (UFFDIO_MOVE), compares them with the pool,
//! outcome of each run ◀───────────────  maps the pool where they are equal, else moves them back
//! ```
//!
//! The shim does not trust the merger. It gives up a page only after it compared the page with its
//! replacement, at a moment when nobody can write to the page. If two contents have the same hash
//! by chance, or the merger lies, the comparison fails and the page stays.
//!
//! Why nobody can write to a page during its comparison: the page was moved to another address, and
//! neither the guest nor another thread knows this address. The kernel refuses to move a page that
//! a device or the kernel itself may write to (a pinned page). A thread that touches the old
//! address meanwhile waits until a page is there again. Some devices, such as vhost-scsi, refer to
//! pages without pinning them. The kernel would move those pages; the merger refuses VMs with such
//! devices.
//!
//! Why the shim intercepts discards (`MADV_DONTNEED`, by a balloon): after the kernel's own discard
//! the guest would see the pool's page where it expects zeros. The shim maps anonymous memory there
//! instead.

pub mod file;
pub mod message;
pub mod protocol;

#[cfg(feature = "preload")]
mod memory;
#[cfg(feature = "preload")]
mod preload;
#[cfg(feature = "preload")]
mod uffd;
