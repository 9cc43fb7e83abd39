//! Being a good neighbour: I/O priority and scheduling policy.

use std::io;

/// From `include/uapi/linux/ioprio.h`: the class is above bit 13.
const CLASS_SHIFT: u32 = 13;
/// Served only when nobody else wants the disk.
const CLASS_IDLE: u32 = 3;
/// A thread, and not a group of processes or a user.
const WHO_PROCESS: u32 = 1;

/// Gives the calling thread the idle I/O priority (ioprio_set(2)): it is served when nobody else wants the
/// disk. Schedulers that know no priorities (`none`, as usual on NVMe) ignore it.
/// Errors: those of ioprio_set(2); `EPERM` on kernels that reserved the class for root.
pub fn set_idle_io() -> io::Result<()> {
    let priority = CLASS_IDLE << CLASS_SHIFT;
    // SAFETY: three integers, no memory; 0 means the calling thread.
    let ret = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0u32, priority) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives the calling thread, and those that it starts, the policy `SCHED_BATCH` (sched(7)): it has the same
/// share of a processor as others, but when it wakes up it interrupts nobody.
/// Errors: those of sched_setscheduler(2).
pub fn set_batch() -> io::Result<()> {
    // The system call's `sched_param`. musl has a function of this name that always fails.
    let priority: libc::c_int = 0;
    // SAFETY: it reads `priority`; 0 means the calling thread.
    let ret = unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_BATCH, &raw const priority)
    };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_is_a_batch_and_only_it() {
        // SAFETY: an integer, no memory.
        let get = || unsafe { libc::syscall(libc::SYS_sched_getscheduler, 0) };
        let before = get();
        std::thread::spawn(move || {
            set_batch().unwrap();
            assert_eq!(get(), i64::from(libc::SCHED_BATCH));
        })
        .join()
        .unwrap();
        assert_eq!(get(), before);
    }

    #[test]
    fn the_thread_is_idle_afterwards_and_only_it() {
        // SAFETY: two integers, no memory.
        let get = || unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, 0u32) };
        let before = get();
        std::thread::spawn(move || {
            set_idle_io().unwrap();
            assert_eq!(get() >> CLASS_SHIFT, i64::from(CLASS_IDLE));
        })
        .join()
        .unwrap();
        assert_eq!(get(), before);
    }
}
