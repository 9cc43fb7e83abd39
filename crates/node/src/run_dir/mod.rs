//! The run directory: what is mounted, by whom, and locks.
//!
//! ```text
//! <run>/                          /run/cofolio/<store-id>, mode 0711
//!   mounts/<id>.json              one record per mount, written before and after each step
//!   aside/<id>.<stripe>           a record that is being written, and then goes to mounts/
//!   attached/<id>.<stripe>        likewise, and says that its mount is in place: the ledger watches
//!                                 what leaves here, and is woken once for each mount
//!   images/<domain>/<digest>/     one pinned image
//!     pin.json                    how it was mounted, what was checked
//!     erofs/                      its one EROFS superblock is mounted here
//!     views/<key>/                read-only overlays, one per id map and label
//!     own/{pin.json,erofs,views}  the same without its base, for mounts that were measured
//!     users/<id>                  an empty file per record that uses it, and others (see `pin`)
//!   images/<domain>/overlays.json other engines' overlays that may have a layer of ours
//!   containers/<name>/            one container of `run` (see the module of that name)
//!   vms/<name>/                   one virtual machine of `vm run` (see the module `vm`)
//!   ksm.json                      KSM's settings while the daemon steers it (see the module `ksm`)
//!   locks/<xx>                    256 stripes, by the first byte of the image's digest
//!   locks/domain-<domain>         shared to add a user to an image of `inode-share`, exclusive to
//!                                 take such images' superblocks down
//!   locks/recording-<domain>      of whoever records a profile
//! ```
//!
//! *Who may write what.* An image's files, and the records that name it, change only with the
//! stripe of its digest locked: the lock's holder who finds a half-way record knows that its writer
//! is dead. `mounts/<id>.json` is made with `link`, which decides between two mounts at one target.
//!
//! *Order.* A record exists before anything else of its mount and goes last; it has the kernel's
//! number of the mount before that is attached anywhere. So every other trace is found from a
//! record, or has none and can go.

mod error;
mod files;
mod lock;
pub(crate) mod running;

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use cofolio_store::task::Cancel;
use cofolio_store::{Digest, Store};
use rustix::fs::{Mode, OFlags};

use self::error::At as _;
pub use self::error::RunDirError;
pub(crate) use self::files::{find_name, is_at, list, read_json, read_small, remove_file, to_json};
pub(crate) use self::lock::{ImageLock, Lock, try_flock};
use crate::links;
use crate::owner::{is_own, may_others_write};

/// Where a store's runtime state lives.
#[derive(Debug, Clone)]
pub struct RunDir {
    path: PathBuf,
    /// What ends the waiting for locks.
    waiting: Cancel,
}

/// Where records are written that say that their mount is in place, and where all others.
pub(crate) const ATTACHED: &str = "attached";
pub(crate) const ASIDE: &str = "aside";

/// Makes a directory, and those above it that are missing. What it makes has the mode, whatever the
/// umask is.
fn make_directories(path: &Path, mode: u32) -> io::Result<()> {
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.is_dir();
    let missing: Vec<_> = path.ancestors().take_while(is_missing).collect();
    for dir in missing.into_iter().rev() {
        match DirBuilder::new().mode(mode).create(dir) {
            // Another process was first.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {}
            made => {
                made?;
                // Where another user owns what is above it, it may have been replaced since.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let opened = File::from(rustix::fs::open(dir, flags, Mode::empty())?);
                opened.set_permissions(Permissions::from_mode(mode))?;
            }
        }
    }
    Ok(())
}

/// Fails if another user may write to a directory, or if a link is in its place. A missing one is
/// nobody's. One above the run directory may be sticky, since others can replace nothing of ours
/// there. It may also have the owner of `/`, who is not root in a user namespace that has no root.
fn check(path: &Path, is_above: bool) -> Result<(), RunDirError> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.at("look at", path)?,
    };
    let (owner, mode) = (found.uid(), found.mode());
    let of_root = || fs::metadata("/").map(|root| root.uid()).at("look at", "/");
    let is_trusted = is_own(owner) || is_above && owner == of_root()?;
    let problem = if !found.is_dir() {
        "is no directory".to_owned()
    } else if !is_trusted {
        format!("belongs to user {owner}")
    } else if may_others_write(mode) && !(is_above && mode & 0o1000 != 0) {
        format!("can be written by other users (mode {:o})", mode & 0o7777)
    } else {
        return Ok(());
    };
    Err(RunDirError::Untrusted { path: path.to_owned(), problem })
}

impl RunDir {
    /// The run directory of a store: `/run/cofolio/<store-id>`, or below `COFOLIO_RUN`.
    ///
    /// # Errors
    /// Those of [`RunDir::open`].
    pub fn of(store: &Store) -> Result<Self, RunDirError> {
        Self::open(store.run_dir())
    }

    /// A run directory elsewhere. It may be missing: the first mount makes it. It is refused if
    /// another user could have written its records, which say what to unmount. Links on the way to
    /// it are followed now, and not again.
    ///
    /// # Errors
    /// [`RunDirError::Untrusted`], [`RunDirError::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RunDirError> {
        let path = path.as_ref();
        // A link of its name could be anybody's.
        check(path, false)?;
        let path = links::resolve(path).at("resolve", path)?;
        let run = Self { path, waiting: Cancel::default() };
        run.check_around()?;
        Ok(run)
    }

    /// The same directory; `cancel` ends the waiting for its locks.
    pub(crate) fn waits_until(mut self, cancel: &Cancel) -> Self {
        self.waiting = cancel.clone();
        self
    }

    /// Directories in it that are not a runtime's, and their modes. No host user may run a pinned
    /// image's set-user-id programs. Root in a user namespace must reach its container's root
    /// filesystem, by name only.
    pub(crate) const OWN: [(&str, u32); 7] = [
        ("mounts", 0o700),
        (ASIDE, 0o700),
        (ATTACHED, 0o700),
        ("images", 0o700),
        ("locks", 0o700),
        ("containers", 0o711),
        ("vms", 0o700),
    ];

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails if another user may write to one of the directories in it or above it: who can write to
    /// one above can put another directory in the place of this one.
    fn check_around(&self) -> Result<(), RunDirError> {
        let mut inside = Self::OWN.iter().map(|(name, _)| self.path.join(name));
        inside.try_for_each(|path| check(&path, false))?;
        self.path.ancestors().skip(1).try_for_each(|above| check(above, true))
    }

    /// Makes missing directories, with their modes whatever the umask is. If `/` is shared, as with
    /// systemd, services see mounts in here, as they see those of container engines.
    ///
    /// # Errors
    /// Those of [`RunDir::open`], since somebody else may have made the directory meanwhile.
    pub fn prepare(&self) -> Result<(), RunDirError> {
        let was_missing = !self.path.exists();
        check(&self.path, false)?;
        if was_missing {
            self.check_around()?;
        }
        for (name, mode) in [("", 0o711)].into_iter().chain(Self::OWN) {
            let path = self.path.join(name);
            make_directories(&path, mode).at("create", path)?;
        }
        // Somebody else may have made one above it meanwhile.
        if was_missing { self.check_around() } else { Ok(()) }
    }

    /// What tells our ids from those of another run directory on the same store.
    pub(crate) fn tag(&self) -> String {
        cofolio_store::run_tag(&self.path)
    }

    pub(crate) fn image_dir(&self, domain: &str, image: &Digest) -> PathBuf {
        self.path.join("images").join(domain).join(image.to_string())
    }

    /// Overlays that may have a layer of a trust domain's (see `mount/pin.rs`).
    pub(crate) fn overlays_path(&self, domain: &str) -> PathBuf {
        self.path.join("images").join(domain).join("overlays.json")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Under a umask of 077 the group could not reach the daemon's socket, nor root in a user
    /// namespace its container.
    #[test]
    fn directories_have_their_modes_whatever_the_umask_is() {
        let test = "directories_have_their_modes_whatever_the_umask_is";
        // The umask is of the whole process.
        if std::env::var_os("COFOLIO_TEST_ALONE").is_none() {
            let mut alone = std::process::Command::new("sh");
            alone.args(["-c", "umask 077 && exec \"$0\" --exact \"$1\""]);
            alone.arg(std::env::current_exe().unwrap()).arg(format!("run_dir::tests::{test}"));
            let done = alone.env("COFOLIO_TEST_ALONE", "1").output().unwrap();
            let said = String::from_utf8_lossy(&done.stdout);
            assert!(done.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        RunDir::open(dir.path().join("one/run")).unwrap().prepare().unwrap();
        let made = ["one", "one/run", "one/run/mounts", "one/run/containers"];
        for (made, mode) in made.into_iter().zip([0o711, 0o711, 0o700, 0o711]) {
            let found = dir.path().join(made).metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "{made}");
        }
    }

    /// Root's `gc` removed a directory that a record in another user's run directory named.
    #[test]
    fn a_run_directory_of_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let open = || RunDir::open(dir.path().join("base/run"));
        open().unwrap().prepare().unwrap();
        let opened = open().unwrap();
        let mode = |name: &str, mode| {
            fs::set_permissions(dir.path().join(name), Permissions::from_mode(mode)).unwrap();
        };
        let problem = || match open() {
            Err(RunDirError::Untrusted { path, problem }) => {
                (path.strip_prefix(dir.path()).unwrap().to_owned(), problem)
            }
            other => panic!("{other:?}"),
        };
        // One that was missing when the other one was opened: somebody else was first.
        let late = RunDir::open(dir.path().join("late/run")).unwrap();
        fs::create_dir(dir.path().join("late")).unwrap();
        mode("late", 0o777);
        assert!(matches!(late.prepare(), Err(RunDirError::Untrusted { .. })));
        // The group passed, although all of its members can write.
        for bits in [0o777, 0o731] {
            mode("base/run/mounts", bits);
            assert_eq!(problem().0, Path::new("base/run/mounts"));
            mode("base/run/mounts", 0o700);
            let others = format!("can be written by other users (mode {bits:o})");
            mode("base", bits);
            assert_eq!(problem(), ("base".into(), others.clone()));
            mode("base", bits | 0o1000);
            open().unwrap();
            mode("base/run", bits);
            assert_eq!(problem(), ("base/run".into(), others));
            mode("base/run", 0o711);
        }
        if rustix::process::geteuid().is_root() {
            // Of those above only the next one was looked at.
            for name in ["", "base", "base/run", "base/run/locks"] {
                std::os::unix::fs::chown(dir.path().join(name), Some(65534), None).unwrap();
                assert_eq!(problem(), (name.into(), "belongs to user 65534".to_owned()));
                std::os::unix::fs::chown(dir.path().join(name), Some(0), None).unwrap();
            }
        }
        fs::rename(dir.path().join("base/run"), dir.path().join("elsewhere")).unwrap();
        symlink("../elsewhere", dir.path().join("base/run")).unwrap();
        assert_eq!(problem(), ("base/run".into(), "is no directory".to_owned()));
        assert!(matches!(opened.prepare(), Err(RunDirError::Untrusted { .. })));
    }

    /// Only where a link led in the end was looked at, and the path was followed anew each time: whoever
    /// could put another link there chose the run directory.
    #[test]
    fn a_link_of_others_leads_to_no_run_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        ["real", "open"].iter().for_each(|name| fs::create_dir(path(name)).unwrap());
        symlink("real", path("own")).unwrap();
        let run = RunDir::open(path("own/run")).unwrap();
        assert_eq!(run.path(), fs::canonicalize(path("real")).unwrap().join("run"));
        symlink("../real", path("open/second")).unwrap();
        symlink("open/second", path("first")).unwrap();
        let mode = |mode| {
            fs::set_permissions(path("open"), Permissions::from_mode(mode)).unwrap();
        };
        mode(0o777);
        for way in ["open/second/run", "first/run"] {
            assert!(RunDir::open(path(way)).is_err(), "{way}");
        }
        mode(0o1777);
        RunDir::open(path("first/run")).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::lchown(path("open/second"), Some(65534), None).unwrap();
            assert!(RunDir::open(path("first/run")).is_err());
        }
    }
}
