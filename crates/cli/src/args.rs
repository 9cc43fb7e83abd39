//! Arguments that both programs take.

use clap::ValueEnum;
use cofolio_node::settings::Backend;

/// [`Backend`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum BackendArg {
    /// Overlayfs over the files of the store
    Overlay,
    /// Packs, whose files share the kernel's inodes
    InodeShare,
}

impl From<BackendArg> for Backend {
    fn from(how: BackendArg) -> Self {
        match how {
            BackendArg::Overlay => Self::Overlay,
            BackendArg::InodeShare => Self::InodeShare,
        }
    }
}

impl From<Backend> for BackendArg {
    fn from(backend: Backend) -> Self {
        match backend {
            Backend::Overlay => Self::Overlay,
            Backend::InodeShare => Self::InodeShare,
        }
    }
}
