//! fs-verity: enabling it on a file and asking the kernel for the digest it enforces.
//!
//! Source: `include/uapi/linux/fsverity.h` and `Documentation/filesystems/fsverity.rst`.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Setter, Updater, opcode};

/// `FS_VERITY_HASH_ALG_SHA256`.
const HASH_ALGORITHM_SHA256: u32 = 1;
/// Block size of the Merkle tree, in bytes. Other sizes give other digests; composefs uses this one.
const BLOCK_SIZE: u32 = 4096;

/// `struct fsverity_enable_arg`.
#[repr(C)]
struct EnableArg {
    version: u32,
    hash_algorithm: u32,
    block_size: u32,
    salt_size: u32,
    salt_ptr: u64,
    sig_size: u32,
    reserved1: u32,
    sig_ptr: u64,
    reserved2: [u64; 11],
}

const _: () = assert!(size_of::<EnableArg>() == 128);

/// `struct fsverity_digest` with room for a SHA-256 digest.
#[repr(C)]
struct DigestArg {
    digest_algorithm: u16,
    digest_size: u16,
    digest: [u8; 32],
}

const _: () = assert!(size_of::<DigestArg>() == 36);
/// The request number encodes only the flexible header, 4 bytes.
const DIGEST_HEADER_SIZE: usize = 4;

/// `_IOW('f', 133, struct fsverity_enable_arg)`.
const FS_IOC_ENABLE_VERITY: Opcode = opcode::write::<EnableArg>(b'f', 133);
/// `_IOWR('f', 134, struct fsverity_digest)`.
const FS_IOC_MEASURE_VERITY: Opcode = opcode::read_write::<[u8; DIGEST_HEADER_SIZE]>(b'f', 134);

/// Makes the file read-only for good and lets the kernel check every later read of it
/// (SHA-256, 4 KiB blocks, no salt, no signature).
///
/// `file` must be open for reading only, and nobody may hold it open for writing.
/// Errors: `EOPNOTSUPP` or `ENOTTY` where the kernel or the filesystem has no fs-verity, `ETXTBSY` while a
/// writer holds the file, `EEXIST` when it is enabled already, and what I/O may give.
pub fn enable(file: impl AsFd) -> Result<(), Errno> {
    let argument = EnableArg {
        version: 1,
        hash_algorithm: HASH_ALGORITHM_SHA256,
        block_size: BLOCK_SIZE,
        salt_size: 0,
        salt_ptr: 0,
        sig_size: 0,
        reserved1: 0,
        sig_ptr: 0,
        reserved2: [0; 11],
    };
    // SAFETY: the request number belongs to `struct fsverity_enable_arg`, which `EnableArg` mirrors
    // field for field (its size is asserted above); the kernel only reads it, and the two pointers in
    // it are null with size 0, so that it follows neither.
    unsafe { ioctl::ioctl(file, Setter::<FS_IOC_ENABLE_VERITY, _>::new(argument)) }
}

/// The SHA-256 fs-verity digest that the kernel enforces for this file; `None` when fs-verity is
/// available here but not enabled on the file, or enabled with another algorithm.
/// Errors: `EOPNOTSUPP` or `ENOTTY` where the kernel or the filesystem has no fs-verity.
pub fn measure(file: impl AsFd) -> Result<Option<[u8; 32]>, Errno> {
    let mut argument = DigestArg { digest_algorithm: 0, digest_size: 32, digest: [0; 32] };
    // SAFETY: the kernel writes the header and at most `digest_size` (32) bytes after it, which is
    // exactly the room that `DigestArg` has; `argument` outlives the call.
    let result =
        unsafe { ioctl::ioctl(file, Updater::<FS_IOC_MEASURE_VERITY, _>::new(&mut argument)) };
    match result {
        Ok(()) if u32::from(argument.digest_algorithm) == HASH_ALGORITHM_SHA256 => {
            Ok(Some(argument.digest))
        }
        // A longer digest is another algorithm (SHA-512): enabled, but not by us.
        Ok(()) | Err(Errno::NODATA | Errno::OVERFLOW) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Whether an error of [`enable`] or [`measure`] means "there is no fs-verity here".
pub fn is_unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_verity_is_told_apart_from_a_broken_call() {
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        match measure(&file) {
            Ok(None) => {}
            Err(errno) => assert!(is_unsupported(errno), "unexpected {errno}"),
            Ok(Some(_)) => panic!("a test binary has no fs-verity digest"),
        }
    }

    #[test]
    fn request_numbers_are_those_of_the_header() {
        assert_eq!(FS_IOC_ENABLE_VERITY, 0x4080_6685);
        assert_eq!(FS_IOC_MEASURE_VERITY, 0xc004_6686);
    }
}
