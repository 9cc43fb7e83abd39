//! The ELF file in a distribution's kernel, for a VMM that does not decompress it.
//!
//! ```text
//! 0x01f1  u8   sectors of the real-mode code, less the first    (Documentation/arch/x86/boot.rst)
//! 0x0202  4    HdrS
//! 0x0206  u16  version, at least 2.08
//! 0x0248  u32  the payload's offset from the end of the real-mode code
//! 0x024c  u32  its length; the last 4 bytes can be the length of what it holds
//! ```

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::error::{Result, VmError};
use super::kernel::Kernel;
use super::shared::{SharedFile, VMLINUX, shared_file};

/// Largest kernel, compressed and not, in bytes.
const PAYLOAD_BYTES_MAX: usize = 128 << 20;
const VMLINUX_BYTES_MAX: u64 = 512 << 20;

/// The ELF file of a kernel in a directory (`<run>/vms`): the one that is there, or a new one. A
/// kernel that is an ELF file already is itself.
///
/// # Errors
/// [`VmError::Kernel`], [`VmError::Mount`].
pub(super) fn vmlinux(dir: &Path, kernel: &Kernel) -> Result<SharedFile> {
    let wrong = |error: io::Error| VmError::Kernel {
        path: kernel.image.clone(),
        why: format!("the ELF file in it: {error}"),
    };
    let file = File::open(&kernel.image).map_err(wrong)?;
    let mut magic = [0; 4];
    if file.read_exact_at(&mut magic, 0).is_ok() && magic == *b"\x7fELF" {
        return Ok(SharedFile { path: kernel.image.clone(), lock: file.into() });
    }
    let found = file.metadata().map_err(wrong)?;
    let mut key = Sha256::new();
    key.update(&kernel.version);
    key.update(found.size().to_le_bytes());
    key.update(found.mtime().to_le_bytes());
    shared_file(dir, key, VMLINUX, || extract(&file).map_err(wrong))
}

fn extract(file: &File) -> io::Result<Vec<u8>> {
    let mut head = [0; 0x250];
    file.read_exact_at(&mut head, 0)?;
    let u32_at = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
    if head[0x202..0x206] != *b"HdrS" || u16::from_le_bytes([head[0x206], head[0x207]]) < 0x208 {
        return Err(io::Error::other("no kernel of x86, or one of before 2008"));
    }
    let sectors = match head[0x1f1] {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let length = u32_at(0x24c) as usize;
    if length > PAYLOAD_BYTES_MAX {
        return Err(io::Error::other(format!("its payload has {length} bytes")));
    }
    let mut payload = vec![0; length];
    file.read_exact_at(&mut payload, (sectors + 1) * 512 + u64::from(u32_at(0x248)))?;
    let payload = &payload[..];
    let mut elf = Vec::new();
    // One stream: the length behind it is no other.
    let mut reader: Box<dyn Read + '_> = match payload {
        [0x1f, 0x8b, ..] => Box::new(flate2::read::GzDecoder::new(payload)),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Box::new(lzma_rust2::XzReader::new(payload, false)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Box::new(zstd::Decoder::with_buffer(payload)?.single_frame())
        }
        _ => return Err(io::Error::other("its compression is none of gzip, xz and zstd")),
    };
    reader.by_ref().take(VMLINUX_BYTES_MAX).read_to_end(&mut elf)?;
    if !elf.starts_with(b"\x7fELF") {
        return Err(io::Error::other("its payload is no ELF file"));
    }
    Ok(elf)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs;
    use std::io::{Seek as _, Write as _};
    use std::process::Command;

    use super::*;

    /// A kernel with this payload, behind two sectors of real-mode code.
    fn image(payload: &[u8]) -> tempfile::NamedTempFile {
        let mut image = vec![0; 2 * 512 + 7];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
        image[0x248..0x24c].copy_from_slice(&7_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[&image, payload, b"what follows"].concat()).unwrap();
        file
    }

    fn xz(content: &[u8]) -> Option<Vec<u8>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        let mut xz = Command::new("xz");
        xz.args(["--check=crc32", "--x86", "--lzma2=dict=32MiB"]).stdin(file);
        Some(xz.output().ok()?.stdout)
    }

    #[test]
    fn the_elf_file_of_a_kernel_is_decompressed() {
        let elf = [b"\x7fELF".to_vec(), vec![7; 100_000]].concat();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&elf).unwrap();
        let zstd = zstd::encode_all(&elf[..], 1).unwrap();
        let size = u32::try_from(elf.len()).unwrap().to_le_bytes();
        let mut payloads = vec![gzip.finish().unwrap(), [zstd, size.to_vec()].concat()];
        // As scripts/xz_wrap.sh of the kernel has it.
        match xz(&elf) {
            Some(xz) => payloads.push([xz, size.to_vec()].concat()),
            None => println!("SKIP a part of the_elf_file_of_a_kernel_is_decompressed: no xz"),
        }
        for payload in payloads {
            assert!(extract(image(&payload).as_file()).unwrap() == elf);
            let error = extract(image(&payload[..payload.len() / 2]).as_file());
            assert!(error.is_err());
        }
        let other = zstd::encode_all(&b"no ELF"[..], 1).unwrap();
        for payload in [&other[..], b"BZh9", b""] {
            assert!(extract(image(payload).as_file()).is_err());
        }
        assert!(extract(tempfile::tempfile().as_ref().unwrap()).is_err());
    }

    #[test]
    fn the_kernel_of_a_distribution_has_one() {
        let kernel = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/vm/cloud-amd64/vmlinuz");
        let Ok(kernel) = Kernel::open(Path::new(kernel)) else {
            println!("SKIP the_kernel_of_a_distribution_has_one: tests/vm/kernel was not run");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let path = vmlinux(dir.path(), &kernel).unwrap().path;
        let elf = fs::read(&path).unwrap();
        // ELF of 64 bits, little endian, for x86-64; it has the kernel's version in plain text.
        assert_eq!((elf[4], elf[5], elf[0x12]), (2, 1, 62));
        let version = kernel.version.as_bytes();
        assert!(elf.windows(version.len()).any(|window| window == version));
        let inode = fs::metadata(&path).unwrap().ino();
        assert_eq!(vmlinux(dir.path(), &kernel).unwrap().path, path);
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode, "it is made once");
    }
}
