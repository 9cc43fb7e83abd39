//! What is checked of an image before it is mounted.

use std::io::BufReader;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use cofolio_store::task::Task;
use cofolio_store::{Contents, Digest, Domain, FileKind, StoredFile, verity};
use rustix::fs::{AtFlags, StatxFlags};

use super::error::{At as _, MountError};
use super::kernel::open_dir;
use super::{Check, Mounter};
use crate::cache::leave_cache;

impl Mounter<'_> {
    /// Compares the size of every object with the image; returns their number.
    ///
    /// An unprotected object that was truncated reads short without an error, so this is the last
    /// chance to notice. A stat takes 2 us: 20 ms for ten thousand objects, once per pin.
    pub(super) fn check_sizes(
        &self,
        file: &StoredFile,
        image: &Digest,
        objects: &Path,
    ) -> Result<u64, MountError> {
        let dir = open_dir(objects).at("open", objects)?;
        let (mut count, mut checked) = (0, Ok(()));
        // A content with several names is looked at as often: remembering it would cost more.
        let mut visit = |object: Digest, size: u64| {
            count += 1;
            if checked.is_ok() {
                checked = check_size(dir.as_fd(), objects, image, &object, size);
            }
        };
        let read = self.contents.names(FileKind::Image, file, &mut visit);
        read.map_err(|error| damaged(image, error.to_string()))?;
        checked.map(|()| count)
    }
}

/// Checks an image of the store as far as that is asked for.
///
/// # Errors
/// [`MountError::NoVerity`], [`MountError::Damaged`], [`MountError::Store`].
pub(crate) fn check_image(
    domain: &Domain,
    image: &Digest,
    check: Check,
    contents: &dyn Contents,
    task: &Task,
) -> Result<(), MountError> {
    let verity = domain.has_verity();
    if check == Check::RequireVerity && !verity {
        return Err(MountError::NoVerity(domain.objects_dir()));
    }
    if check != Check::None {
        let file = domain.open_image(image)?;
        check_digest(&file, image, verity)?.map_or(Ok(()), |reason| Err(damaged(image, reason)))?;
    }
    if check == Check::Verify {
        let report = domain.verify_image(image, contents, task)?;
        if let Some(found) = report.findings.first() {
            return Err(damaged(image, format!("{}: {}", found.path, found.detail)));
        }
    }
    Ok(())
}

pub(super) fn damaged(image: &Digest, reason: String) -> MountError {
    MountError::Damaged { image: *image, reason }
}

/// What is wrong with the digest of a file, which should be `expected`. The kernel measures files
/// with fs-verity; a store with fs-verity refuses others, whose later changes would go unnoticed.
pub(crate) fn check_digest(
    file: &StoredFile,
    expected: &Digest,
    verity: bool,
) -> Result<Option<String>, MountError> {
    let found = match measured(file)? {
        Some(digest) => digest,
        None if verity => {
            let reason = "it has no fs-verity, which this store has: it was replaced";
            return Ok(Some(reason.to_owned()));
        }
        None => {
            let mut hasher = verity::Hasher::new();
            let mut reader = BufReader::with_capacity(256 << 10, file.reader());
            // Most of it is not read again, and containers bring in what they need.
            leave_cache(file, || std::io::copy(&mut reader, &mut hasher))
                .at("read", file.path())?;
            hasher.finish()
        }
    };
    Ok((found != *expected).then(|| format!("it has digest {found}: it was altered")))
}

/// The fs-verity digest that the kernel has of a file, if it has one.
pub(crate) fn measured(file: &StoredFile) -> Result<Option<Digest>, MountError> {
    let descriptor = file.descriptor().ok_or(MountError::NoDirectory)?;
    Ok(cofolio_sys::verity::measure(descriptor).ok().flatten().map(Digest))
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
            return Err(damaged(image, format!("object {path} is missing")));
        }
        Err(errno) => return Err(errno).at("look at", objects.join(path)),
    };
    if found == expected {
        return Ok(());
    }
    let reason = format!("object {path} has {found} bytes instead of {expected}");
    Err(damaged(image, reason))
}

#[cfg(test)]
mod tests {
    use cofolio_image::import::{ImportOptions, import};
    use cofolio_image::source::Source;
    use cofolio_store::task::Task;
    use cofolio_store::{InitOptions, Store};
    use cofolio_sys::cache::cachestat;
    use rustix::fs::{Advice, fadvise};

    use super::check_digest;

    /// The first mount of an image dropped its metadata from the cache, although it had been read ahead for
    /// all containers: those that came one at a time paid for it again and again.
    #[test]
    fn a_check_leaves_the_cache_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        std::fs::write(top.join("file"), b"content").unwrap();
        let store = Store::init(&dir.path().join("store"), &InitOptions { immutable: false });
        let domain = store.unwrap().domain("default").unwrap();
        let source = Source::parse(top.to_str().unwrap()).unwrap();
        let image = import(&domain, &source, &ImportOptions::default(), &Task::default());
        let image = image.unwrap().image;
        let file = domain.open_image(&image).unwrap();
        let descriptor = file.descriptor().unwrap();
        let cached = || {
            assert_eq!(check_digest(&file, &image, false).unwrap(), None);
            cachestat(descriptor, 0, 0).unwrap().cached
        };
        fadvise(descriptor, 0, None, Advice::DontNeed).unwrap();
        assert_eq!(cached(), 0);
        std::fs::read(domain.image_path(&image).unwrap()).unwrap();
        assert_eq!(cached(), file.size().unwrap().div_ceil(4096));
    }
}
