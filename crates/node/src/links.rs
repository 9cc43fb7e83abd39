//! Symbolic links in paths that the caller names.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::owner::{is_own, may_others_write};

/// Makes a path absolute and free of symbolic links; it need not exist. A link is followed only if no other user
/// can have put it there: it and its directory belong to root or the caller, and others cannot write to the
/// directory, or it is sticky. The kernel's `fs.protected_symlinks` asks as much in sticky directories only.
///
/// # Errors
/// One that names the link; those of `lstat` and `readlink`.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut path: PathBuf = std::path::absolute(path)?.iter().collect();
    // As many links as the kernel follows (path_resolution(7)).
    for _ in 0..=40 {
        let Some(link) = path.ancestors().filter(|path| path.is_symlink()).last() else {
            let mut plain = PathBuf::new();
            for name in &path {
                if name == ".." { _ = plain.pop() } else { plain.push(name) }
            }
            if plain == path {
                return Ok(plain);
            }
            // Behind a missing directory and `..` there may be links.
            path = plain;
            continue;
        };
        let parent = link.parent().unwrap_or(link);
        let (found, dir) = (link.symlink_metadata()?, parent.metadata()?);
        let is_guarded = !may_others_write(dir.mode()) || dir.mode() & 0o1000 != 0;
        if !(is_own(found.uid()) && is_own(dir.uid()) && is_guarded) {
            let what = format!("another user may have put the link {} there", link.display());
            return Err(io::Error::other(what));
        }
        let rest = path.iter().skip(link.iter().count());
        path = parent.iter().chain(link.read_link()?.iter()).chain(rest).collect();
    }
    Err(rustix::io::Errno::LOOP.into())
}
