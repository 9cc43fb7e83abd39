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

pub(crate) use forms::{split_at, split_tag};
pub use manifest::Platform;
pub(crate) use opened::{Chosen, FoundImage, Opened};

use crate::error::ImportError;
use crate::reference::Reference;
use crate::source::engine::{containerd, containers_storage};

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the form of a variant says what its fields are")]
pub enum Source {
    /// A plain directory tree: `dir:PATH`.
    Directory { path: PathBuf },
    /// An OCI image layout in a directory: `oci:PATH[:TAG]`.
    Layout { path: PathBuf, tag: Option<String> },
    /// An OCI image layout in a tar archive: `oci-archive:PATH[:TAG]`.
    Archive { path: PathBuf, tag: Option<String> },
    /// An image in a registry: `docker://[HOST[:PORT]/]NAME[:TAG][@DIGEST]`.
    Registry(Reference),
    /// An image in podman's own store: `containers-storage:[[DRIVER@]ROOT]NAME`.
    ContainersStorage(containers_storage::Reference),
    /// An image in containerd's store: `containerd:[[ROOT][+NAMESPACE]]NAME`.
    Containerd(containerd::Reference),
    /// What `docker save` writes: `docker-archive:PATH[:TAG]`.
    DockerSave { path: PathBuf, tag: Option<String> },
}

pub(crate) fn io_error(path: &Path, source: io::Error) -> ImportError {
    ImportError::Io { path: path.to_owned(), source }
}

/// Names that a source has, for an error: they are foreign text.
fn listed(names: &[impl AsRef<str>]) -> String {
    let escaped: Vec<_> = names.iter().map(|it| it.as_ref().escape_debug().to_string()).collect();
    escaped.join(", ")
}
