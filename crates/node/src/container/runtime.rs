//! The OCI runtime of this machine: crun or runc, started as a program.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

use super::RunError;
use crate::programs;

/// Runtimes to look for, best first: crun starts a container in a third of runc's time.
const NAMES: [&str; 2] = ["crun", "runc"];
/// An OCI runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// The program.
    pub path: PathBuf,
    /// A cgroup v2 mount to hide from crun, which refuses a machine with controllers on both
    /// versions ("hybrid mode not supported") though it needs only the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hidden: Option<PathBuf>,
}

impl Runtime {
    /// The runtime with this name or path, else crun, else runc. `/sys` is looked up below `root`.
    ///
    /// # Errors
    /// [`RunError::NoRuntime`].
    pub fn find(wanted: Option<&str>, root: &Path) -> Result<Self, RunError> {
        let found = match wanted {
            // The record keeps it, for other processes with other working directories.
            Some(path) if path.contains('/') => {
                std::path::absolute(path).ok().filter(|path| path.is_file())
            }
            Some(name) => programs::find(name),
            None => NAMES.iter().find_map(|name| programs::find(name)),
        };
        let Some(path) = found else {
            let names = wanted.map_or_else(|| NAMES.join(" nor "), str::to_owned);
            return Err(RunError::NoRuntime(names));
        };
        let hybrid = root.join("sys/fs/cgroup/unified");
        let controllers = fs::read_to_string(hybrid.join("cgroup.controllers")).unwrap_or_default();
        let is_crun = path.file_name().is_some_and(|it| it.to_string_lossy().contains("crun"));
        let hidden = (is_crun && !controllers.trim().is_empty()).then_some(hybrid);
        Ok(Self { path, hidden })
    }

    /// Its name, without the directory.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    #[cfg(test)]
    pub(super) fn hidden(&self) -> Option<&Path> {
        self.hidden.as_deref()
    }

    /// Starts it; fails as [`Command::spawn`] does.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        self.with_filtered_mounts(|| command.spawn())
    }

    /// Runs `start`, `kill` or `delete` and waits; `state` is the runtime's `--root`.
    ///
    /// # Errors
    /// [`RunError::Runtime`] if it cannot be started. The output has its exit status.
    pub fn ask(&self, state: &Path, args: &[&str]) -> Result<Output, RunError> {
        let mut command = Command::new(&self.path);
        command.arg("--root").arg(state).args(args).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = self.with_filtered_mounts(|| command.spawn());
        let started = child.and_then(Child::wait_with_output);
        started.map_err(|source| RunError::Runtime { path: self.path.clone(), source })
    }

    /// Calls `start` on a thread without the hidden mounts; a child inherits its mount namespace.
    fn with_filtered_mounts<T: Send>(
        &self,
        start: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        let Some(hidden) = &self.hidden else { return start() };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, || {
                cofolio_sys::mount::unshare_mount_namespace_as_follower()?;
                rustix::mount::unmount(hidden, UnmountFlags::DETACH)?;
                start()
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}
