//! Why a virtual machine was not started, or not ended.

use std::io;
use std::path::PathBuf;

use cofolio_image::pack::PackError;
use cofolio_store::Error;
use cofolio_store::task::Cancelled;

use crate::container::bundle::BundleError;
use crate::mount::MountError;
use crate::run_dir::RunDirError;

/// Why a virtual machine was not started, or not ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// This machine cannot run one of the kind.
    #[error("{0}")]
    Unsupported(String),
    /// The machine has no kernel for guests.
    #[error("there is no kernel for guests: no vmlinuz in /boot whose modules are in /lib/modules")]
    NoKernel,
    /// A kernel that cannot be used.
    #[error("kernel {}: {why}", path.display())]
    Kernel {
        /// Its file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The program that is the first process of guests.
    #[error("guest program {}: {why}", path.display())]
    Guest {
        /// Where it was looked for.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A program could not be started, or is missing.
    #[error("starting {}", path.display())]
    Vmm {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The VMM or its guest ended before the image's program ran.
    #[error("{0}")]
    Failed(String),
    /// A name that no virtual machine can have.
    #[error("name `{0}` of a virtual machine: letters, digits, `_`, `.` and `-`, at most 63")]
    Name(String),
    /// Another virtual machine has the name.
    #[error("a virtual machine `{0}` exists already")]
    Exists(String),
    /// None has the name.
    #[error("no virtual machine `{0}`")]
    NotFound(String),
    /// It has ended.
    #[error("virtual machine `{0}` has ended")]
    NotRunning(String),
    /// Somebody else started it.
    #[error(
        "virtual machine `{0}` was started by somebody else; Cofolio returns its free memory and \
         keeps account of it, until `cofolio vm detach`"
    )]
    NotOurs(String),
    /// It was started by Cofolio.
    #[error("virtual machine `{0}` was not attached; `cofolio vm stop` ends it")]
    NotAttached(String),
    /// The control socket of somebody else's VMM.
    #[error("control socket {}", path.display())]
    Control {
        /// Its path.
        path: PathBuf,
        /// What failed there.
        source: io::Error,
    },
    /// A process could not be started in it.
    #[error("virtual machine `{name}`: starting a process")]
    Exec {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Nobody else can have its console now.
    #[error("the console of virtual machine `{name}` is attached to {to}")]
    Attached {
        /// Its name.
        name: String,
        /// What has it.
        to: &'static str,
    },
    /// A disk that cannot be used.
    #[error("disk {}: {why}", path.display())]
    Disk {
        /// Its file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Another virtual machine has the disk.
    #[error("disk {} belongs to another virtual machine that runs", .0.display())]
    DiskInUse(PathBuf),
    /// It did not end, not even of SIGKILL.
    #[error("virtual machine `{0}` does not end")]
    StillRunning(String),
    /// The caller cancelled it.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    /// The image cannot be run, or not with these options.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The image could not be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The run directory.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A file or directory failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] Error),
}

pub(super) type Result<T, E = VmError> = std::result::Result<T, E>;
