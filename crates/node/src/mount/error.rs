//! What can go wrong with a mount.

use std::io;
use std::path::{Path, PathBuf};

use cofolio_store::Digest;
use cofolio_store::task::Cancelled;

use super::kernel::KernelError;
use crate::run_dir::RunDirError;

/// What kind of error it is, for services that answer with codes of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// What was asked for is wrong in itself.
    InvalidArgument,
    /// An image, a mount or a directory does not exist.
    NotFound,
    /// Something of ours is mounted there already.
    AlreadyExists,
    /// Somebody uses it; trying again later can succeed.
    Busy,
    /// Something else has to be done first.
    FailedPrecondition,
    /// The machine lacks a privilege or a feature.
    Unsupported,
    /// Content is not what its digest says, or a record is damaged.
    Corrupt,
    /// A file or the kernel failed.
    Io,
}

/// Why a mount, unmount or clean-up failed. Nothing half-done is left unless the error says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// Not root.
    #[error("mounting needs root (CAP_SYS_ADMIN in the first user namespace)")]
    NoPrivilege(#[source] KernelError),
    /// The kernel cannot do this.
    #[error("this kernel cannot do {feature} ({needs})")]
    NoFeature {
        /// What was asked for.
        feature: &'static str,
        /// What has it.
        needs: &'static str,
        /// What the kernel said.
        source: KernelError,
    },
    /// The store is not a directory of this machine.
    #[error("the store is not a directory of this machine")]
    NoDirectory,
    /// The kernel was to check every read, which it cannot here.
    #[error(
        "the kernel cannot check what is read from {}: its filesystem has no fs-verity",
        shown(.0)
    )]
    NoVerity(Option<PathBuf>),
    /// The image is mounted already, from a time when the store had no fs-verity.
    #[error("image {0} was mounted without fs-verity, and that mount is still in use")]
    PinnedWithoutVerity(Digest),
    /// A file of the image that is mounted was replaced since.
    #[error(
        "image {image} cannot be checked: its metadata image or its pack was replaced while \
         mounted; unmount first what still serves the old one (mounts, and images over it: {users})"
    )]
    Replaced {
        /// The image.
        image: Digest,
        /// How many mounts, and images over it, use the old file.
        users: usize,
    },
    /// The image or an object of it is not what it should be.
    #[error("image {image} is damaged: {reason}")]
    Damaged {
        /// The image.
        image: Digest,
        /// What is wrong, and where.
        reason: String,
    },
    /// The pack of an image, or a segment that it needs, is not what it should be.
    #[error("the pack of image {image} is damaged: {reason}")]
    PackInvalid {
        /// The image.
        image: Digest,
        /// What is wrong, and where.
        reason: String,
    },
    /// The kernel has mounted a pack so that its files share nothing.
    #[error("{}: the kernel has mounted it without sharing inodes", .0.display())]
    NotShared(PathBuf),
    /// The directory to mount at cannot be used.
    #[error("cannot mount at {}: {problem}", target.display())]
    Target {
        /// The directory.
        target: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The directory to mount at does not exist.
    #[error("cannot mount at {}: there is no such directory", .0.display())]
    TargetMissing(PathBuf),
    /// Something of ours is mounted there already.
    #[error("{} is already a mount of image {image}", target.display())]
    AlreadyMounted {
        /// The directory.
        target: PathBuf,
        /// What is mounted there.
        image: Digest,
    },
    /// A file or directory of the mount is in use.
    #[error("{} is in use: {reason}", path.display())]
    Busy {
        /// Where it is mounted.
        path: PathBuf,
        /// Who uses it.
        reason: String,
    },
    /// Another mount lies on top.
    #[error("{} is covered by another mount: unmount that first", .0.display())]
    Covered(PathBuf),
    /// No record of ours has this target or id.
    #[error("{0} is not a mount that Cofolio made")]
    NotMounted(String),
    /// A mount of ours, or a bind of one, without a record: the run directory may have been lost.
    #[error("{} is a mount of Cofolio's that has no record", .0.display())]
    NoRecord(PathBuf),
    /// The mount is in another mount namespace, where this process cannot reach it.
    #[error("mount {id} at {} was made in another mount namespace", target.display())]
    OtherNamespace {
        /// Id of the mount.
        id: String,
        /// Where it is, over there.
        target: PathBuf,
    },
    /// The store's filesystem is read-only.
    #[error("changes and volumes need a store that can be written to: {} is read-only", .0.display())]
    ReadOnlyStore(PathBuf),
    /// A directory of the image cannot be made writable by itself.
    #[error("cannot make {} of the image writable: {problem}", dir.display())]
    WritableDir {
        /// The directory, as it was given.
        dir: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Somebody else could put anything into the run directory, whose records say what to remove.
    #[error("cannot trust the run directory: {} {problem}", path.display())]
    RunDirectory {
        /// It, or the directory that it is in.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The directory for changes cannot be used.
    #[error("cannot keep changes in {}: {problem}", dir.display())]
    Upper {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The directory for changes is that of another mount, or another process is at it.
    #[error("{} is in use by {by}", dir.display())]
    UpperInUse {
        /// The directory.
        dir: PathBuf,
        /// Which mount or process, in words.
        by: String,
    },
    /// The changes cannot be kept.
    #[error(
        "changes of {} are in a filesystem of limited size, which ends with the mount: they can only \
         be copied while it is mounted",
        .0.display()
    )]
    CannotKeep(PathBuf),
    /// A directory that holds no changes that were kept.
    #[error("{} holds no changes that were kept", .0.display())]
    NotKept(PathBuf),
    /// A security label that cannot be.
    #[error("SELinux does not take {label:?}: its policy has no such label, or none is loaded")]
    Label {
        /// As given.
        label: String,
        /// What the kernel refused.
        source: KernelError,
    },
    /// A limit on changes that cannot be.
    #[error("size limit of the writable layer: {0}")]
    SizeLimit(&'static str),
    /// Neither project quotas nor a filesystem of its own could limit changes.
    #[error("cannot limit the size of {}: {problem}", dir.display())]
    NoSizeLimit {
        /// The directory for changes.
        dir: PathBuf,
        /// Why not.
        problem: String,
    },
    /// An id map that cannot be.
    #[error("bad id map {text:?}: {problem}")]
    IdMap {
        /// As given.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A record in the run directory is not one of ours, or is damaged.
    #[error("{}: {reason}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A step that the kernel refused.
    #[error("the kernel refused to mount")]
    Kernel(#[from] KernelError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
    /// A file or directory failed.
    #[error("{action} {}", path.display())]
    Io {
        /// What was done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// How it failed.
        source: io::Error,
    },
}

impl From<RunDirError> for MountError {
    fn from(error: RunDirError) -> Self {
        match error {
            RunDirError::Untrusted { path, problem } => Self::RunDirectory { path, problem },
            RunDirError::State { path, reason } => Self::State { path, reason },
            RunDirError::Io { action, path, source } => Self::Io { action, path, source },
            RunDirError::Cancelled(cancelled) => cancelled.into(),
        }
    }
}

impl From<Cancelled> for MountError {
    fn from(cancelled: Cancelled) -> Self {
        Self::Store(cancelled.into())
    }
}

impl MountError {
    /// What kind of error it is.
    pub fn code(&self) -> Code {
        match self {
            Self::NoPrivilege { .. }
            | Self::NoFeature { .. }
            | Self::NoVerity { .. }
            | Self::NotShared { .. }
            | Self::NoSizeLimit { .. } => Code::Unsupported,
            Self::Damaged { .. } | Self::PackInvalid { .. } | Self::State { .. } => Code::Corrupt,
            Self::NotMounted(_) | Self::NotKept { .. } | Self::TargetMissing { .. } => {
                Code::NotFound
            }
            Self::AlreadyMounted { .. } => Code::AlreadyExists,
            Self::Busy { .. } | Self::UpperInUse { .. } => Code::Busy,
            Self::NoDirectory
            | Self::PinnedWithoutVerity { .. }
            | Self::Replaced { .. }
            | Self::Covered { .. }
            | Self::CannotKeep { .. }
            | Self::ReadOnlyStore(_)
            | Self::NoRecord { .. }
            | Self::RunDirectory { .. }
            | Self::OtherNamespace { .. } => Code::FailedPrecondition,
            Self::Target { .. }
            | Self::Upper { .. }
            | Self::WritableDir { .. }
            | Self::Label { .. }
            | Self::SizeLimit(_)
            | Self::IdMap { .. } => Code::InvalidArgument,
            Self::Store(error) => match (error.kind(), error) {
                (cofolio_store::ErrorKind::Corrupt, _) => Code::Corrupt,
                (cofolio_store::ErrorKind::Conflict, _) => Code::Busy,
                (cofolio_store::ErrorKind::Unsupported, _) => Code::Unsupported,
                (cofolio_store::ErrorKind::Caller, cofolio_store::Error::BadName { .. }) => {
                    Code::InvalidArgument
                }
                (cofolio_store::ErrorKind::Caller, _) => Code::NotFound,
                _ => Code::Io,
            },
            Self::Kernel(_) | Self::Io { .. } => Code::Io,
        }
    }

    /// Whether a file or directory was not there.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Explains a refusal of the kernel; `idmapped` says whether an id map was requested.
    pub(crate) fn from_kernel(error: KernelError, idmapped: bool) -> Self {
        use rustix::io::Errno;
        const LABEL: &str = "overlay: context=";
        let feature = |feature, needs, source| Self::NoFeature { feature, needs, source };
        match error.errno {
            Errno::PERM | Errno::ACCESS => Self::NoPrivilege(error),
            Errno::NOSYS => feature("the new mount API", "Linux 5.12", error),
            Errno::NODEV if error.what.starts_with("erofs: fsopen") => {
                feature("erofs", "its module, or CONFIG_EROFS_FS", error)
            }
            Errno::NODEV if error.what.starts_with("overlay: fsopen") => {
                feature("overlay", "its module, or CONFIG_OVERLAY_FS", error)
            }
            Errno::INVAL if error.what.starts_with("erofs: inode_share") => {
                let needs = "Linux 7.0 with CONFIG_EROFS_FS_PAGE_CACHE_SHARE";
                feature("inode_share", needs, error)
            }
            Errno::NOTBLK => feature(
                "EROFS mounts from files of the store's filesystem",
                "CONFIG_EROFS_FS_BACKED_BY_FILE, and a store that is not on an overlay",
                error,
            ),
            Errno::INVAL if error.says("Unknown parameter 'context'") => {
                feature("security labels", "a kernel with SELinux on", error)
            }
            Errno::INVAL if error.what.starts_with(LABEL) => {
                Self::Label { label: error.what[LABEL.len()..].to_owned(), source: error }
            }
            Errno::INVAL if error.says("Unknown parameter 'verity'") => {
                feature("overlayfs over fs-verity", "Linux 6.6", error)
            }
            Errno::INVAL if error.what.starts_with("overlay: lowerdir") => {
                feature("data-only layers of overlayfs", "Linux 6.5", error)
            }
            Errno::INVAL if idmapped && error.what == "overlay: create" => {
                feature("overlays over id-mapped mounts", "Linux 6.15", error)
            }
            Errno::INVAL if idmapped && error.what.contains("id map") => feature(
                "id maps on erofs",
                "Linux 5.19; ids must lie in this process's own user namespace",
                error,
            ),
            _ => Self::Kernel(error),
        }
    }
}

fn shown(store: &Option<PathBuf>) -> std::path::Display<'_> {
    store.as_deref().unwrap_or(Path::new("the store")).display()
}

/// A refusal of the kernel where no id map was asked for.
pub(crate) fn refused(error: KernelError) -> MountError {
    MountError::from_kernel(error, false)
}

/// Names the path of an I/O error.
pub(crate) trait At<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, MountError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, MountError> {
        self.map_err(|error| MountError::Io { action, path: path.into(), source: error.into() })
    }
}
