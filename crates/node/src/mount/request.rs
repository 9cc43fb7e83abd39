//! What is asked of a [`Mounter`](super::Mounter), and what it answers.

use std::path::PathBuf;

use cofolio_store::Digest;
use serde::{Deserialize, Serialize};

use super::idmap::IdMap;
use super::records::MountRecord;

/// Whether and where a mount can be written to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Access {
    /// A clone of the image's read-only overlay.
    #[default]
    ReadOnly,
    /// Changes go to a directory of the store's, which goes with the mount.
    Writable,
    /// Changes go to a directory of the store's, which stays.
    WritableKept,
    /// Changes go to this directory (its `upper/` and `work/`), which stays. The caller owns it,
    /// its filesystem supports overlayfs upper layers, and it holds no changes of another image.
    /// With an id map, its owners are the mapped ones.
    WritableAt(PathBuf),
}

/// What is checked before a mount. All but the first measure and mount the metadata image itself,
/// even if it is already mounted, never the image over a base. With `inode-share` a pack is mounted
/// instead: nothing proves that it shows the image's files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Check {
    /// What the first mount of an image checks.
    #[default]
    None,
    /// The metadata image has the digest in its name: by fs-verity, else by hashing it.
    Measure,
    /// All objects, too, by hashing them.
    Verify,
    /// fs-verity protects the image and its objects; else the mount is refused.
    RequireVerity,
}

/// What to mount, where and how.
#[derive(Debug, Clone)]
pub struct MountRequest {
    /// Digest of the metadata image.
    pub image: Digest,
    /// Directory to mount at.
    pub target: PathBuf,
    /// Make the target if it is missing (its parent must exist), and remove it at unmount.
    pub create_target: bool,
    /// Whether it can be written to.
    pub access: Access,
    /// Directories of the image, with absolute paths: only these can be written to, and the rest
    /// says EROFS. Without any, a mount with write access is writable as a whole.
    pub writable_dirs: Vec<PathBuf>,
    /// Bytes that changes may take; only for [`Access::Writable`].
    pub size_bytes: Option<u64>,
    /// Make a directory for the mount's user ([`MountRecord::scratch`]), removed with the mount.
    pub scratch: bool,
    /// What has to hold of the image before it is mounted.
    pub check: Check,
    /// How it appears.
    pub options: MountOptions,
}

/// How a mount appears.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountOptions {
    /// Id map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idmap: Option<IdMap>,
    /// Security label of all files (`context=`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Ignore set-user-id bits.
    pub nosuid: bool,
    /// Do not open device files.
    pub nodev: bool,
    /// Execute nothing.
    pub noexec: bool,
    /// The ref by which it was asked for, if any; for those who look at the list of mounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl MountRequest {
    /// A read-only mount without options.
    pub fn new(image: Digest, target: impl Into<PathBuf>) -> Self {
        Self {
            image,
            target: target.into(),
            create_target: false,
            access: Access::ReadOnly,
            writable_dirs: Vec::new(),
            size_bytes: None,
            scratch: false,
            check: Check::default(),
            options: MountOptions::default(),
        }
    }
}

/// How to unmount.
#[derive(Debug, Clone, Copy, Default)]
pub struct UmountOptions {
    /// Detach the mount even if it is in use; its users see errors if its changes are removed.
    pub force: bool,
    /// Leave the directory with the changes in place, even if the mount did not say so.
    pub keep_upper: bool,
}

/// What an unmount did.
#[derive(Debug, Clone)]
pub struct Unmounted {
    /// The mount, as it was.
    pub record: MountRecord,
    /// It was not mounted any more; only what it had left was cleaned up.
    pub was_gone: bool,
    /// Directory with the changes, if it was left in place.
    pub upper: Option<PathBuf>,
    /// The image is not mounted any more either: this was its last user.
    pub unpinned: bool,
    /// It still has a user: a mount of it elsewhere, another mount namespace, an overlay over it or
    /// an open descriptor. The image and the changes stay until that ends.
    pub in_use: bool,
}

/// Makes [`Step`] and the list of its values.
macro_rules! steps {
    ($($(#[$about:meta])* $step:ident),* $(,)?) => {
        /// A point in the life of a mount at which a process may die, in order. The pin and view
        /// steps occur only if one has to be made.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Step { $($(#[$about])* $step),* }

        impl Step {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$step),*];
        }
    };
}

steps! {
    /// Its record is there.
    Claimed,
    /// The store knows that the image is in use.
    Rooted,
    /// The image knows its user.
    Marked,
    /// The target was made.
    TargetMade,
    /// The EROFS superblock exists, attached nowhere.
    PinMade,
    /// It is attached.
    Pinned,
    /// The read-only overlay exists, attached nowhere.
    ViewMade,
    /// It is attached.
    Viewed,
    /// The directories for changes are there.
    UpperMade,
    /// The mount exists, attached nowhere, and its record has its numbers.
    Prepared,
    /// Its root is at its target, its writable directories are not yet there (before Linux 6.15).
    RootAttached,
    /// It is at its target; the record does not say so yet.
    Attached,
    /// Its record says so.
    Recorded,
    /// It is not at its target any more.
    Detached,
    /// The directories for changes are out of sight.
    UpperGone,
    /// The image forgot its user.
    Unmarked,
    /// The image's own mounts are gone, their directories not yet.
    Unpinned,
    /// The store forgot it.
    Unrooted,
    /// Its record is gone.
    Forgotten,
}
