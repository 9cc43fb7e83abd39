//! A library in the process of a VMM (`LD_PRELOAD`) that puts pages of its guest's memory in common
//! with those of other guests, while the guest runs.
//!
//! ```text
//! merger, outside                       shim, in the VMM
//! finds pages that are the same
//! puts one copy into a pool ─── fd ──▶  keeps it
//! runs of pages ─────────────────────▶  moves them aside (UFFDIO_MOVE), compares them with the pool,
//! what came of each ◀─────────────────  maps the pool where they are equal, else moves them back
//! ```
//!
//! The shim believes nothing that the merger says: a page is given up only after it was compared with
//! what takes its place, at a moment when nobody can write to it. A hash that is the same by chance, or
//! a merger that lies, ends in a comparison that fails.
//!
//! Why nobody can write to a page that is compared: it was moved to another address, which no guest
//! and no other thread knows. The kernel moves a page only if nothing else refers to it: one that a
//! device or the kernel is about to write to (pinned) is refused. Whoever touches the old address
//! meanwhile waits until it has a page again. (Pages that are referred to without being pinned, with
//! vhost-scsi for one, would be moved; the merger refuses VMs that have such devices.)
//!
//! Why a discard (`MADV_DONTNEED`, by a balloon) is taken over: the kernel would bring back the pool's
//! page where the guest expects zeros. The shim maps anonymous memory there instead.

pub mod message;
pub mod protocol;

#[cfg(feature = "preload")]
mod memory;
#[cfg(feature = "preload")]
mod preload;
#[cfg(feature = "preload")]
mod uffd;
