//! Where an image comes from: forms, autodetection, and finding its manifest, config and layers.

mod docker_save;
pub mod engine;
mod file;
mod forms;
pub(crate) mod manifest;
mod members;
mod opened;
mod remote;

use std::io;
use std::path::{Path, PathBuf};

pub use manifest::Platform;
pub(crate) use opened::{Chosen, FoundImage, Opened};

use crate::error::ImportError;
use crate::reference::Reference;
use crate::source::engine::{containerd, containers_storage};

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A plain directory tree: `dir:PATH`.
    Directory {
        /// Its root.
        path: PathBuf,
    },
    /// An OCI image layout in a directory: `oci:PATH[:TAG]`.
    Layout {
        /// The directory with `oci-layout` and `index.json`.
        path: PathBuf,
        /// Which image, if there are several.
        tag: Option<String>,
    },
    /// An OCI image layout in a tar archive: `oci-archive:PATH[:TAG]`.
    Archive {
        /// The archive.
        path: PathBuf,
        /// Which image, if there are several.
        tag: Option<String>,
    },
    /// An image in a registry: `docker://[HOST[:PORT]/]NAME[:TAG][@DIGEST]`.
    Registry(Reference),
    /// An image in podman's own store: `containers-storage:[[DRIVER@]ROOT]NAME`.
    ContainersStorage(containers_storage::Reference),
    /// An image in containerd's store: `containerd:[[ROOT][+NAMESPACE]]NAME`.
    Containerd(containerd::Reference),
    /// What `docker save` writes: `docker-archive:PATH[:TAG]`.
    DockerSave {
        /// The archive.
        path: PathBuf,
        /// Which image, if there are several: `name:tag`.
        tag: Option<String>,
    },
}

pub(crate) fn io_error(path: &Path, source: io::Error) -> ImportError {
    ImportError::Io { path: path.to_owned(), source }
}
