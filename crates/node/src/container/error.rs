//! Why a container was not started, or not cleaned up.

use std::io;
use std::path::PathBuf;

use serde::Deserialize;

use super::bundle::BundleError;
use crate::mount::MountError;
use crate::run_dir::RunDirError;

/// Why a container was not started, or not cleaned up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The machine has no OCI runtime.
    #[error("{0} is not installed")]
    NoRuntime(String),
    /// The runtime could not be started.
    #[error("starting {}", path.display())]
    Runtime {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The runtime started and failed.
    #[error("{runtime}: {said}")]
    Refused {
        /// Its name.
        runtime: String,
        /// Its message.
        said: String,
        /// Whether the program to run is missing or cannot be executed.
        reason: Reason,
    },
    /// A name that no container can have.
    #[error("container name `{0}`: letters, digits, `_`, `.` and `-`, at most 63")]
    Name(String),
    /// Another container has the name.
    #[error("a container `{0}` exists already")]
    Exists(String),
    /// No container has the name.
    #[error("no container `{0}`")]
    NotFound(String),
    /// The container has ended, or is being started.
    #[error("container `{0}` is not running")]
    NotRunning(String),
    /// A record that cannot be read. Its container may run, so its files stay.
    #[error("damaged container record")]
    Record(#[source] MountError),
    /// The run directory was lost under a container that runs.
    #[error(
        "container `{name}` has lost its record and still runs, as process {pid} in cgroup \
         {cgroup}: `kill -KILL {pid}` ends it, and then `cofolio gc` removes what it leaves"
    )]
    Lost {
        /// Its name.
        name: String,
        /// Its first process.
        pid: u32,
        /// Its cgroup.
        cgroup: String,
    },
    /// A user namespace needs a root.
    #[error("id map {0}: user 0 and group 0 are not mapped")]
    NoRoot(String),
    /// Root of a user namespace cannot reach its root filesystem: a directory above the run directory
    /// does not let all users through.
    #[error("root of a user namespace cannot get through {}", .0.display())]
    Unreachable(PathBuf),
    /// The container did not end, not even of SIGKILL.
    #[error("container `{0}` does not end")]
    StillRunning(String),
    /// The image could not be mounted, or unmounted, or a file or directory failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The image cannot be run, or not with these options.
    #[error(transparent)]
    Bundle(#[from] BundleError),
}

impl From<RunDirError> for RunError {
    fn from(error: RunDirError) -> Self {
        Self::Mount(error.into())
    }
}

pub(super) type Result<T, E = RunError> = std::result::Result<T, E>;

/// What was wrong when a runtime refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The image does not have the program to run.
    NoProgram,
    /// The program exists and cannot be executed.
    NotExecutable,
    /// Something else.
    Other,
}

/// The message of a line of a runtime's log, if it is an error.
pub(super) fn complaint(line: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Line {
        msg: String,
        level: String,
    }
    let line: Line = serde_json::from_str(line).ok()?;
    matches!(line.level.as_str(), "error" | "fatal").then_some(line.msg)
}

/// Classifies a runtime's message by its words, as Docker does: runtimes give no code.
pub(super) fn reason(said: &str) -> Reason {
    let about_program = said.contains("exec: \"")
        || said.contains("executable file")
        || said.contains("open executable")
        || said.contains("exec container process");
    let says = |words: &[&str]| words.iter().any(|words| said.contains(words));
    if !about_program {
        Reason::Other
    } else if says(&["not found", "no such file", "No such file"]) {
        Reason::NoProgram
    } else if says(&["ermission denied", "not permitted", "xec format", "s a directory"]) {
        Reason::NotExecutable
    } else {
        Reason::Other
    }
}
