//! What can go wrong with a store, told apart by who has to act.

use std::io;

use crate::meta::META_PATH;
use crate::records::{ROOTS, UNNAMED};
use crate::task::Cancelled;
use crate::{Digest, FileKind, FileName};

/// Result of a store operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a caller's own code that is carried through the store.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Whose fault an [`Error`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller asked for something that is not there, or in a form that is not valid.
    Caller,
    /// The store's bytes are not what they must be.
    Corrupt,
    /// The operating system refused.
    Io,
    /// The filesystem is full.
    Space,
    /// Somebody else changed the store meanwhile, or holds it; trying again can succeed.
    Conflict,
    /// The store needs a newer program.
    Unsupported,
    /// The caller cancelled it.
    Cancelled,
}

/// An error of the store, with the object, path (relative to the store) or digest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller cancelled it.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    /// A system call failed.
    #[error("cannot {action} `{path}`")]
    Io {
        /// What was tried: a verb for the message.
        action: &'static str,
        /// Path relative to the store (or the store's own path when opening it).
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The filesystem filled up during an import; the store is as it was before.
    #[error("no space left: {missing} more bytes were needed; the store is unchanged")]
    NoSpace {
        /// Bytes of new content that did not fit.
        missing: u64,
    },
    /// The filesystem has room, but no inodes; the store is as it was before.
    #[error(
        "no inodes left on the store's filesystem: {files} more files were needed; the store is unchanged"
    )]
    NoInodes {
        /// New files that could not be made.
        files: u64,
    },
    /// An earlier operation on this staging failed, so that it cannot be published any more.
    #[error("this import failed earlier and cannot go on: {first}")]
    Poisoned {
        /// Text of the first failure.
        first: String,
    },
    /// There is no store at this path.
    #[error("no store at `{path}`: it has no meta.json")]
    NotAStore {
        /// The path that was opened.
        path: String,
    },
    /// Neither this user's nor root's, so somebody else could change it at any moment.
    #[error("the store `{path}` belongs to user {owner}, and only that user can use it")]
    NotOurs {
        /// The store.
        path: String,
        /// The user who owns it.
        owner: u32,
    },
    /// `init` found something else in the directory.
    #[error("`{path}` is not empty and not a store: `{entry}` is in the way")]
    InTheWay {
        /// The directory.
        path: String,
        /// The first entry that does not belong to a store.
        entry: String,
    },
    /// The store was written by a newer program and says that this one must not touch it.
    #[error("the store needs `{feature}`, which this version does not know")]
    UnknownFeature {
        /// Name of the feature, or the format version.
        feature: String,
    },
    /// The store has a feature that allows this program to read only.
    #[error(
        "the store is read-only for this version: it uses `{feature}`, which this version does not know"
    )]
    ReadOnly {
        /// Name of the feature.
        feature: String,
    },
    /// A record of the store cannot be read.
    #[error("`{path}` is damaged: {reason}")]
    Corrupt {
        /// Path relative to the store.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A name that cannot be used.
    #[error("bad {what} {name:?}: {reason}")]
    BadName {
        /// What kind of name: `ref name`, `domain name`…
        what: &'static str,
        /// The name as given, cut if long.
        name: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// No such trust domain.
    #[error("no trust domain `{0}`")]
    NoSuchDomain(String),
    /// No such ref.
    #[error("no ref `{0}`")]
    NoSuchRef(String),
    /// No such file of the domain.
    #[error("no {0}")]
    NoSuch(FileName),
    /// An image without a pack.
    #[error("image {0} has no pack")]
    NoPack(Digest),
    /// Content that the import relied on was collected before it was published. The import has to
    /// run again, with [`crate::ImportOptions::hold_lock`].
    #[error("garbage collection removed {count} objects that this import needs, first {first}")]
    Vanished {
        /// How many parts are missing.
        count: u64,
        /// The first of them: `object <digest>`, `image <digest>` or `layer <chain-id>`.
        first: String,
    },
    /// An object is there with another size than the image says.
    #[error("object {digest} has {found} bytes, its image says {expected}")]
    SizeMismatch {
        /// The object.
        digest: Digest,
        /// Bytes according to the image.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// An image, a layer or the list of live mounts cannot be read.
    #[error("cannot tell what is used by {what}")]
    Unreadable {
        /// `image <digest>` or `layer <chain-id>`, and what keeps it.
        what: String,
        /// Why it cannot be read.
        source: BoxError,
    },
    /// More than the store keeps.
    #[error("{what}")]
    TooMany {
        /// Of what.
        what: String,
    },
    /// Another process holds the lock, and the caller did not want to wait.
    #[error("domain `{domain}` is in use by another process")]
    Busy {
        /// Name of the domain.
        domain: String,
    },
}

impl Error {
    /// Whether garbage collection took, or somebody replaced, a file meanwhile: a second try with
    /// the lock held ([`crate::ImportOptions::hold_lock`]) can succeed.
    pub fn is_race(&self) -> bool {
        matches!(
            self,
            Self::Vanished { .. } | Self::SizeMismatch { .. } | Self::NoSuch(_) | Self::NoPack(_)
        )
    }

    /// Whose fault it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoSpace { .. } | Self::NoInodes { .. } => ErrorKind::Space,
            Self::Io { source, .. } if is_full(source) => ErrorKind::Space,
            Self::Io { .. } | Self::Poisoned { .. } => ErrorKind::Io,
            Self::NotAStore { .. }
            | Self::InTheWay { .. }
            | Self::BadName { .. }
            | Self::NoSuchDomain(_)
            | Self::NoSuchRef(_)
            | Self::NoSuch(_)
            | Self::NoPack(_)
            | Self::TooMany { .. } => ErrorKind::Caller,
            Self::NotOurs { .. } | Self::UnknownFeature { .. } | Self::ReadOnly { .. } => {
                ErrorKind::Unsupported
            }
            Self::Unreadable { source, .. } if !is_damage(&**source) => ErrorKind::Io,
            Self::Corrupt { .. } | Self::SizeMismatch { .. } | Self::Unreadable { .. } => {
                ErrorKind::Corrupt
            }
            Self::Vanished { .. } | Self::Busy { .. } => ErrorKind::Conflict,
            Self::Cancelled(_) => ErrorKind::Cancelled,
        }
    }

    /// Whether this program cannot write to the store, or nobody to its filesystem.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::Io { source, .. } => source.kind() == io::ErrorKind::ReadOnlyFilesystem,
            other => matches!(other, Self::ReadOnly { .. }),
        }
    }

    /// [`Error::Corrupt`] about a file.
    pub fn corrupt(path: impl Into<String>, reason: impl ToString) -> Self {
        Self::Corrupt { path: path.into(), reason: reason.to_string() }
    }
}

/// What a file of the store is: what mends it depends on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFile {
    /// `meta.json`.
    Meta,
    /// The settings of a domain.
    Settings,
    /// The record of a ref.
    Ref,
    /// The record that the last ref of an image had.
    Unnamed,
    /// The record of a root.
    Root,
    /// A signature of an image.
    Signature,
    /// The profile of an image.
    Profile,
    /// Content of this kind; of several kinds that share a directory, the first.
    Content(FileKind),
}

impl StoreFile {
    /// The file at a path relative to the store, as errors and findings give it.
    pub fn at(path: &str) -> Option<Self> {
        if path == META_PATH {
            return Some(Self::Meta);
        }
        match path.strip_prefix("domains/")?.split('/').nth(1)? {
            "domain.json" => Some(Self::Settings),
            "refs" => Some(Self::Ref),
            UNNAMED => Some(Self::Unnamed),
            ROOTS => Some(Self::Root),
            "signatures" => Some(Self::Signature),
            "profiles" => Some(Self::Profile),
            other => {
                FileKind::ALL.into_iter().find(|kind| kind.directory() == other).map(Self::Content)
            }
        }
    }
}

/// An error and its causes in one line. A cause that its effect already quotes is not said again.
pub fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

/// Whether an error while reading content is a finding about it: a malformed or missing file, or
/// one that the disk cannot read (a bad sector, or with fs-verity an altered byte). Other errors,
/// such as out of memory or too many open files, say nothing about the content and end the run.
pub fn is_damage(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            if let Some(code) = io.raw_os_error() {
                return is_medium_error(code);
            }
            if let Some(inner) = io.get_ref() {
                next = Some(inner);
                continue;
            }
            return !matches!(io.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::Interrupted);
        }
        if error.is::<Cancelled>() || matches!(error.downcast_ref(), Some(Error::Cancelled(_))) {
            return false;
        }
        if let Some(errno) = error.downcast_ref::<rustix::io::Errno>() {
            return is_medium_error(errno.raw_os_error());
        }
        next = error.source();
    }
    true
}

/// A mismatch of fs-verity gives EIO; EUCLEAN and EBADMSG mean damaged filesystem structures,
/// ENODATA and EREMOTEIO bad sectors; the last five mean that there is no file in its place.
fn is_medium_error(code: i32) -> bool {
    use rustix::io::Errno;
    let medium =
        [Errno::IO, Errno::UCLEAN, Errno::BADMSG, Errno::NODATA, Errno::REMOTEIO, Errno::ILSEQ];
    let no_file = [Errno::ISDIR, Errno::NOTDIR, Errno::LOOP, Errno::NXIO, Errno::SPIPE];
    medium.iter().chain(&no_file).any(|errno| errno.raw_os_error() == code)
}

/// What a person has to do where no file can be had, because its inode is damaged or it is a directory.
pub fn by_hand(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    use rustix::io::Errno;
    match error.downcast_ref().and_then(Errno::from_io_error) {
        Some(Errno::ISDIR) => Some("remove that directory of the store"),
        Some(Errno::UCLEAN | Errno::BADMSG) => {
            Some("unmount that filesystem and run its own check (e2fsck, xfs_repair)")
        }
        _ => by_hand(error.source()?),
    }
}

/// Whether an I/O error means that there is no room: a full filesystem or a quota.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The file is not there, or a directory on the way to it is not.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// Puts action and path to an I/O error.
pub trait At<T> {
    /// The same, as [`Error::Io`] about `path`.
    ///
    /// # Errors
    /// That one.
    fn at(self, action: &'static str, path: &str) -> Result<T>;

    /// The same; `None` if it, or a directory on the way to it, is not there.
    ///
    /// # Errors
    /// [`At::at`]'s.
    fn if_there(self, action: &'static str, path: &str) -> Result<Option<T>>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &str) -> Result<T> {
        self.map_err(|source| Error::Io { action, path: path.to_owned(), source })
    }

    fn if_there(self, action: &'static str, path: &str) -> Result<Option<T>> {
        match self {
            Err(error) if is_absent(&error) => Ok(None),
            other => other.at(action, path).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    /// A busy machine's ENOMEM and EMFILE once counted as damage, and a scrub lost good content.
    #[test]
    fn only_what_the_medium_answers_is_damage() {
        let io =
            |errno: Errno| Error::Io { action: "read", path: "a".into(), source: errno.into() };
        for errno in [Errno::IO, Errno::UCLEAN, Errno::BADMSG] {
            assert!(is_damage(&io(errno)), "{errno}");
        }
        for errno in [
            Errno::NOMEM,
            Errno::MFILE,
            Errno::NFILE,
            Errno::INTR,
            Errno::AGAIN,
            Errno::ACCESS,
            Errno::PERM,
            Errno::NOSPC,
        ] {
            assert!(!is_damage(&io(errno)), "{errno}");
            // As a decoder wraps it, or another crate.
            let wrapped = io::Error::other(io(errno));
            assert!(!is_damage(&wrapped), "{errno}");
            let unreadable = Error::Unreadable { what: "image".into(), source: Box::new(wrapped) };
            assert!(!is_damage(&unreadable), "{errno}");
            // gc ended with the exit code of damage where it had no descriptor left.
            assert_eq!(unreadable.kind(), ErrorKind::Io, "{errno}");
        }
        assert!(is_damage(&Error::corrupt("a", "torn")));
        assert!(is_damage(&io::Error::from(io::ErrorKind::UnexpectedEof)));
    }
}
