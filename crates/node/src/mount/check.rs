//! What is checked of an image before it is mounted.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use cofolio_store::{Digest, Domain, FileKind, StoredFile, verity};
use rustix::fs::{AtFlags, StatxFlags};

use super::Mounter;
use super::error::{At as _, MountError};
use super::kernel::open_dir;

impl Mounter<'_> {
    /// Compares the size of every object with what the image says; returns how many there are.
    ///
    /// An unprotected object that was cut short reads short without an error, so this is the last
    /// moment to notice. A stat takes 2 us of a processor, so that ten thousand objects take it 20 ms,
    /// once per pin. All processors share in it, as far as there are threads to be had.
    pub(super) fn check_sizes(
        &self,
        file: &StoredFile,
        image: &Digest,
        objects: &Path,
    ) -> Result<u64, MountError> {
        /// Below this another thread takes longer to start than it saves.
        const OBJECTS_PER_THREAD_MIN: usize = 500;
        let mut sizes = Vec::new();
        let visit = &mut |object: Digest, size: u64| sizes.push((object, size));
        self.contents.names(FileKind::Image, file, visit).map_err(|error| {
            MountError::ImageInvalid { image: *image, reason: error.to_string() }
        })?;
        let dir = open_dir(objects).at("open", objects)?;
        // A content with several names is looked at as often: remembering it would cost more.
        let check = |part: &[(Digest, u64)]| {
            let mut part = part.iter();
            part.try_for_each(|(object, size)| {
                check_size(dir.as_fd(), objects, image, object, *size)
            })
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = processors.min(sizes.len() / OBJECTS_PER_THREAD_MIN).max(1);
        std::thread::scope(|scope| {
            let mut parts = sizes.chunks(sizes.len().div_ceil(threads).max(1));
            let own = parts.next().unwrap_or_default();
            let spawn = |part| {
                std::thread::Builder::new()
                    .spawn_scoped(scope, move || check(part))
                    .map_err(|_| part)
            };
            let others: Vec<_> = parts.map(spawn).collect();
            others.into_iter().fold(check(own), |checked, other| {
                let other = match other {
                    Ok(thread) => {
                        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                    }
                    // No thread was to be had.
                    Err(part) => check(part),
                };
                checked.and(other)
            })
        })?;
        Ok(sizes.len() as u64)
    }
}

/// The image's bytes give its digest. With fs-verity the kernel has done the work. In a store that has
/// it, an image without it is refused even if its bytes are right today: the mount would be said to
/// be checked by the kernel, which would not notice if they were altered tomorrow.
pub(crate) fn check_digest(
    file: &StoredFile,
    image: &Digest,
    verity: bool,
) -> Result<(), MountError> {
    use std::io::Read as _;
    let found = match measured(file)? {
        Some(digest) => digest,
        None if verity => return Err(MountError::ImageUnprotected { image: *image }),
        _ => {
            let mut hasher = verity::Hasher::new();
            let mut reader = file.reader();
            let mut buffer = vec![0; 256 << 10];
            loop {
                match reader.read(&mut buffer) {
                    Ok(0) => break hasher.finish(),
                    Ok(length) => hasher.update(&buffer[..length]),
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error).at("read", file.path()),
                }
            }
        }
    };
    if found == *image { Ok(()) } else { Err(MountError::ImageAltered { image: *image, found }) }
}

/// The fs-verity digest that the kernel has of a file, if it has one.
pub(crate) fn measured(file: &StoredFile) -> Result<Option<Digest>, MountError> {
    let descriptor = file.descriptor().ok_or(MountError::NoDirectory)?;
    Ok(cofolio_sys::verity::measure(descriptor).ok().flatten().map(Digest))
}

/// Whether the objects of an image are immutable, from one look at its metadata image: an import makes
/// that immutable last. A copy of a store, or an import that was killed, leaves it without the flag
/// until `gc` sets it.
pub(super) fn is_immutable(domain: &Domain, image: &StoredFile) -> Result<bool, MountError> {
    if !domain.protection().immutable {
        return Ok(false);
    }
    let file = image.descriptor().ok_or(MountError::NoDirectory)?;
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::empty());
    let flag = rustix::fs::StatxAttributes::IMMUTABLE;
    Ok(found.at("look at", image.path())?.stx_attributes.contains(flag))
}

/// Compares the size of one object, below the objects directory `dir`, whose path is `objects`.
fn check_size(
    dir: BorrowedFd<'_>,
    objects: &Path,
    image: &Digest,
    object: &Digest,
    expected: u64,
) -> Result<(), MountError> {
    let path = object.object_path();
    let found = match rustix::fs::statx(dir, &path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::SIZE) {
        Ok(stat) => stat.stx_size,
        Err(rustix::io::Errno::NOENT) => {
            return Err(MountError::ObjectMissing { image: *image, object: path });
        }
        Err(errno) => return Err(errno).at("look at", objects.join(path)),
    };
    if found == expected {
        return Ok(());
    }
    Err(MountError::ObjectSize { image: *image, object: path, expected, found })
}
