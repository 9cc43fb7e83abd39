//! A sealed file against a process that was broken into: it has the file's descriptor, runs as root
//! if the test does, and tries all that the kernel offers to change a page that others have mapped.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, reason = "a test of raw memory")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::ptr::null_mut;

use cofolio_sys::memory::sealed;

const PAGE: usize = 4096;
const LEN: usize = 4 * PAGE;

/// The error of a system call that must fail.
#[track_caller]
fn refused(what: &str, returned: isize) -> i32 {
    let error = io::Error::last_os_error();
    assert_eq!(returned, -1, "{what} succeeded");
    error.raw_os_error().unwrap()
}

fn map(file: &File, access: i32, flags: i32) -> *mut libc::c_void {
    unsafe { libc::mmap(null_mut(), LEN, access, flags, file.as_raw_fd(), 0) }
}

fn assert_whole(file: &File, victim: *mut libc::c_void, after: &str) {
    let mut read = vec![0; LEN];
    file.read_exact_at(&mut read, 0).unwrap();
    let mapped = unsafe { std::slice::from_raw_parts(victim.cast::<u8>(), LEN) };
    assert!(read.iter().all(|byte| *byte == 7) && mapped == read, "{after}");
    assert_eq!(file.metadata().unwrap().len(), LEN as u64, "{after}");
}

/// All attacks with one descriptor.
fn attack(file: &File, victim: *mut libc::c_void) {
    let fd = file.as_raw_fd();
    let whole = |after| assert_whole(file, victim, after);
    let x = b"x".as_ptr().cast();
    unsafe {
        refused("write", libc::write(fd, x, 1));
        refused("pwrite", libc::pwrite(fd, x, 1, 0));
        let vector = libc::iovec { iov_base: x.cast_mut(), iov_len: 1 };
        refused("pwritev2", libc::pwritev2(fd, &raw const vector, 1, 0, 0));
        refused("append", libc::pwrite(fd, x, 1, LEN as i64));
        whole("writes");
        for len in [0, 1, LEN as i64 + 1] {
            refused("ftruncate", libc::ftruncate(fd, len) as isize);
        }
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let modes = [
            0,
            libc::FALLOC_FL_PUNCH_HOLE | keep,
            libc::FALLOC_FL_ZERO_RANGE,
            libc::FALLOC_FL_ZERO_RANGE | keep,
            libc::FALLOC_FL_COLLAPSE_RANGE,
            libc::FALLOC_FL_INSERT_RANGE,
        ];
        for mode in modes {
            // Without a mode it would make the file longer.
            let len = if mode == 0 { 2 * LEN } else { PAGE };
            let done = libc::fallocate(fd, mode, 0, len as i64);
            refused(&format!("fallocate, mode {mode:#x}"), done as isize);
        }
        whole("fallocate");
        let other =
            File::from(rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::empty()).unwrap());
        other.write_all_at(&[9; LEN], 0).unwrap();
        let (from, count) = (other.as_raw_fd(), LEN);
        refused("sendfile", libc::sendfile(fd, from, &mut 0, count));
        refused("copy_file_range", libc::copy_file_range(from, &mut 0, fd, &mut 0, count, 0));
        let mut pipe = [0; 2];
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        assert_eq!(libc::write(pipe[1], x, 1), 1);
        refused("splice", libc::splice(pipe[0], null_mut(), fd, &mut 0, 1, 0));
        // The pipe gets the file's own pages, and must not let others write to these either.
        assert_eq!(libc::splice(fd, &mut 0, pipe[1], null_mut(), PAGE, 0), PAGE as isize);
        assert_eq!(libc::write(pipe[1], x, 1), 1);
        libc::close(pipe[0]);
        libc::close(pipe[1]);
        whole("splice");
        for seal in [0, libc::F_SEAL_FUTURE_WRITE, libc::F_SEAL_EXEC] {
            refused("F_ADD_SEALS", libc::fcntl(fd, libc::F_ADD_SEALS, seal) as isize);
        }
    }
    attack_mappings(file, victim);
}

fn attack_mappings(file: &File, victim: *mut libc::c_void) {
    let whole = |after| assert_whole(file, victim, after);
    let (read, write) = (libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE);
    unsafe {
        assert_eq!(map(file, write, libc::MAP_SHARED), libc::MAP_FAILED);
        assert_eq!(map(file, libc::PROT_WRITE, libc::MAP_SHARED), libc::MAP_FAILED);
        let shared = map(file, read, libc::MAP_SHARED);
        assert_ne!(shared, libc::MAP_FAILED);
        refused("mprotect", libc::mprotect(shared, LEN, write) as isize);
        refused("MADV_REMOVE", libc::madvise(shared, PAGE, libc::MADV_REMOVE) as isize);
        refused("POPULATE_WRITE", libc::madvise(shared, PAGE, libc::MADV_POPULATE_WRITE) as isize);
        // These can succeed: what they drop is the mapping, not the file.
        for advice in [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_PAGEOUT] {
            let _ = libc::madvise(shared, LEN, advice);
        }
        whole("advice");
        let own = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
        own.write_all_at(b"x", shared as u64).unwrap_err();
        let x = libc::iovec { iov_base: c"x".as_ptr().cast_mut().cast(), iov_len: 1 };
        let at = libc::iovec { iov_base: shared, iov_len: 1 };
        let me = libc::getpid();
        let wrote = libc::process_vm_writev(me, &raw const x, 1, &raw const at, 1, 0);
        refused("process_vm_writev", wrote);
        // The kernel as the writer: read(2) into the mapping.
        let zeros = File::open("/dev/zero").unwrap();
        refused("read into it", libc::read(zeros.as_raw_fd(), shared, PAGE));
        whole("writes to a shared mapping");
        libc::munmap(shared, LEN);

        // A private mapping can be written to, and its pages are the process's own then.
        let private = map(file, write, libc::MAP_PRIVATE);
        assert_ne!(private, libc::MAP_FAILED);
        private.cast::<u8>().write_volatile(1);
        own.write_all_at(b"x", private as u64 + 1).unwrap();
        refused("MADV_REMOVE", libc::madvise(private, LEN, libc::MADV_REMOVE) as isize);
        whole("writes to a private mapping");
        // Through /proc/self/mem a private mapping is written to although it is for reading only.
        let private_too = map(file, read, libc::MAP_PRIVATE);
        let _ = own.write_all_at(b"x", private_too as u64);
        whole("writes to a private mapping for reading");
        libc::munmap(private, LEN);
        libc::munmap(private_too, LEN);
    }
}

#[test]
fn nobody_changes_a_sealed_file() {
    let file = sealed("cofolio-sealed", &[7; LEN]).unwrap();
    // What another guest has mapped.
    let victim = map(&file, libc::PROT_READ, libc::MAP_PRIVATE);
    assert_ne!(victim, libc::MAP_FAILED);
    let name = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    assert_eq!(name & libc::O_ACCMODE, libc::O_RDONLY);
    attack(&file, victim);
    // Its owner can open it anew for writing, but write nothing.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let again = File::options().read(true).write(true).open(&path).unwrap();
    attack(&again, victim);
    let append = File::options().read(true).append(true).open(&path).unwrap();
    attack(&append, victim);
    // Opening it with O_TRUNC makes it no shorter, whether it succeeds or not.
    let _ = File::options().write(true).truncate(true).open(&path);
    assert_whole(&file, victim, "O_TRUNC");
}
