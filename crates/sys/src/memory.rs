//! How the C library's allocator gives memory back.

/// From how many bytes on a block is a mapping of its own.
#[cfg(target_env = "gnu")]
const OWN_MAPPING_BYTES: libc::c_int = 1 << 20;

/// Has every block of 1 MiB or more be a mapping of its own, so that it goes back to the kernel when it is
/// freed, and grows by mremap(2) instead of being copied.
///
/// By default glibc raises that bound up to 32 MiB, to the largest block that was freed so far
/// (mallopt(3), `M_MMAP_THRESHOLD`); blocks below it stay with the thread's heap. An import of a million
/// entries in three layers had 202 MB at its peak so, and has 153 to 157 MB with the bound fixed.
///
/// Of the whole process, and to be called at its start: mallopt(3) does not go along with other threads.
/// Other C libraries (musl) do so anyway; nothing happens there.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes two integers and changes a setting of the allocator; it fails only for values out of
    // range (the bound is below HEAP_MAX_SIZE/2, 32 MiB), and then nothing is changed.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES);
    }
}
