//! Files whose flags are not the kernel's own.

#![allow(
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    reason = "a test of raw requests"
)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;

use cofolio_shim::file::is_immutable;

/// Inode of the server's only file.
const FILE: u64 = 2;
/// `FS_IMMUTABLE_FL | FS_VERITY_FL` (`linux/fs.h`).
const FLAGS: u32 = 0x0010_0010;

/// A FUSE server with one file, of which it says that it is immutable and has fs-verity. The
/// structs are those of `include/uapi/linux/fuse.h`.
fn serve(mut server: File) {
    let mut request = vec![0; 1 << 20];
    // It ends when nothing is mounted any more.
    while let Ok(1..) = server.read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let node = u64::from(word(16));
        let attributes = |node: u64| {
            let mode = if node == FILE { 0o100_444 } else { 0o040_755_u32 };
            let mut attributes = [0; 88];
            attributes[..8].copy_from_slice(&node.to_ne_bytes());
            attributes[8..16].copy_from_slice(&4096_u64.to_ne_bytes());
            attributes[60..64].copy_from_slice(&mode.to_ne_bytes());
            attributes[64..68].copy_from_slice(&1_u32.to_ne_bytes());
            attributes
        };
        let answer = match word(4) {
            // FORGET and INTERRUPT have no answer.
            2 | 36 => continue,
            // LOOKUP
            1 => [&FILE.to_ne_bytes()[..], &[0; 32], &attributes(FILE)].concat(),
            // GETATTR
            3 => [&[0; 16][..], &attributes(node)].concat(),
            // OPEN, RELEASE, STATFS
            14 => vec![0; 16],
            18 => Vec::new(),
            17 => vec![0; 80],
            // INIT: version 7.31, and 4096 bytes of a write at most.
            26 => {
                let mut answer = vec![0; 64];
                answer[0] = 7;
                answer[4] = 31;
                answer[20..24].copy_from_slice(&4096_u32.to_ne_bytes());
                answer
            }
            // IOCTL
            39 => [&[0; 16][..], &FLAGS.to_ne_bytes()].concat(),
            _ => {
                let answer = [&16_u32.to_ne_bytes()[..], &(-libc::ENOSYS).to_ne_bytes()];
                let answer = [answer.concat(), request[8..16].to_vec()].concat();
                let _ = server.write_all(&answer);
                continue;
            }
        };
        let len = u32::try_from(16 + answer.len()).unwrap().to_ne_bytes();
        let _ = server.write_all(&[&len[..], &[0; 4], &request[8..16], &answer].concat());
    }
}

/// The flags of a file were believed wherever it was. A FUSE server says that its file is
/// immutable, and changes it after the comparison: the guest would read something else than it
/// wrote.
#[test]
fn a_file_of_a_fuse_server_is_not_immutable() {
    let test = "a_file_of_a_fuse_server_is_not_immutable";
    let Ok(server) = File::options().read(true).write(true).open("/dev/fuse") else {
        return println!("SKIP {test}: there is no /dev/fuse");
    };
    let dir = tempfile::tempdir().unwrap();
    let at = std::ffi::CString::new(dir.path().to_str().unwrap()).unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    // In a mount namespace of this thread, which ends with the test.
    let mounted = unsafe {
        let private = libc::MS_REC | libc::MS_PRIVATE;
        let none = std::ptr::null();
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none, c"/".as_ptr(), none, private, none.cast()) == 0
            && libc::mount(
                c"test".as_ptr(),
                at.as_ptr(),
                c"fuse".as_ptr(),
                0,
                options.as_ptr().cast(),
            ) == 0
    };
    if !mounted {
        return println!("SKIP {test}: mounting takes root");
    }
    let thread = std::thread::spawn(move || serve(server));
    let file = File::open(dir.path().join("file")).unwrap();
    let mut flags: libc::c_long = 0;
    let told = unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS as _, &raw mut flags) };
    let taken = is_immutable(&file);
    drop(file);
    assert_eq!(unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) }, 0);
    thread.join().unwrap();
    assert_eq!((told, flags as u32), (0, FLAGS), "the server was asked");
    assert!(!taken);
}
