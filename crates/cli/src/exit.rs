//! Exit codes: every error of every library becomes one of them here, and nowhere else.

use std::fmt;
use std::io;
use std::process::ExitCode;

use cofolio_erofs::dump::DumpError;
use cofolio_erofs::read::ReadError;
use cofolio_image::diff::DiffError;
use cofolio_image::error::EngineError;
use cofolio_image::error::ImportError;
use cofolio_image::error::RegistryError;
use cofolio_image::error::TrustError;
use cofolio_image::export::ExportError;
use cofolio_image::pack::PackError;
use cofolio_node::backend::BackendError;
use cofolio_node::config::ConfigError;
use cofolio_node::container::RunError;
use cofolio_node::container::bundle::BundleError;
use cofolio_node::mount::MountError;
use cofolio_node::upkeep::UpkeepError;
use cofolio_store::task::Cancelled;

use crate::ui::Ui;

/// How the command ended. The numbers are a promise (docs/CLI.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// It failed, and no other code says more.
    Failure = 1,
    /// Wrong arguments or configuration.
    Usage = 2,
    /// No such image, ref, mount, file or store.
    NotFound = 3,
    /// Damaged content.
    Corrupt = 4,
    /// A privilege, a login or a kernel feature is missing.
    Missing = 5,
    /// No space left.
    NoSpace = 6,
    /// In use; trying again can succeed.
    Busy = 7,
    /// A registry could not be reached.
    Network = 8,
    /// Not trusted.
    Refused = 9,
    /// Interrupted by a signal.
    Interrupted = 130,
    /// The reader of the output went away.
    BrokenPipe = 141,
}

/// What the process ends with: a code of ours, or that of a container (`run`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// One of our codes.
    Ours(Exit),
    /// The status of the container.
    Container(u8),
}

impl From<Exit> for Ended {
    fn from(exit: Exit) -> Self {
        Self::Ours(exit)
    }
}

impl From<Ended> for ExitCode {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Ours(exit) => exit.into(),
            Ended::Container(status) => status.into(),
        }
    }
}

/// Code, and what it means, for `cofolio help`, the man page and docs/CLI.md.
pub const TABLE: [(Exit, &str); 12] = [
    (Exit::Ok, "done"),
    (Exit::Failure, "it failed, and none of the codes below says it better"),
    (Exit::Usage, "wrong arguments or configuration; nothing was done"),
    (Exit::NotFound, "no such image, ref, mount, file or store"),
    (
        Exit::Corrupt,
        "content is not what its digest says, or an image, archive or store is damaged",
    ),
    (Exit::Missing, "a privilege, a login or a kernel feature is missing"),
    (Exit::NoSpace, "no space left; the store is as it was before"),
    (Exit::Busy, "in use, or changed by somebody else meanwhile; trying again can succeed"),
    (Exit::Network, "a registry could not be reached, or gave up on us, after several tries"),
    (
        Exit::Refused,
        "not trusted: another image than was asked for, or not signed as the policy demands",
    ),
    (Exit::Interrupted, "interrupted (Ctrl-C, SIGTERM); the store is as it was before"),
    (Exit::BrokenPipe, "the reader of the output went away"),
];

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The table of exit codes as text, for `--help`.
pub fn table() -> String {
    let lines = TABLE.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}\n", *exit as u8));
    format!("Exit codes:\n{}", lines.collect::<String>().trim_end())
}

/// An error of the command itself, with its exit code and a hint for whoever reads it at 3 a.m.
#[derive(Debug)]
pub struct Fail {
    exit: Exit,
    what: String,
    hint: Option<String>,
}

impl Fail {
    /// An error with this exit code.
    pub fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), hint: None }
    }

    /// A mistake in the arguments.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    /// Something that does not exist.
    pub fn not_found(what: impl Into<String>) -> Self {
        Self::new(Exit::NotFound, what)
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Fail {}

/// Print an error as `cofolio: <what>: <why>`, with a hint where there is one.
pub fn report(error: &anyhow::Error, ui: &Ui) -> Exit {
    let (exit, hint) = classify(error);
    // Whoever closed the pipe or pressed Ctrl-C knows.
    if exit == Exit::BrokenPipe {
        return exit;
    }
    ui.error(&chain(error), hint.as_deref());
    exit
}

/// The causes of an error in one line. A cause that its effect already quotes is not said again.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Exit code and hint of an error: the first cause that says something definite decides.
fn classify(error: &anyhow::Error) -> (Exit, Option<String>) {
    let mut exit = None;
    let mut hint = None;
    for cause in error.chain() {
        let (this, this_hint) = classify_one(cause);
        exit = exit.or(this);
        hint = hint.or(this_hint);
    }
    (exit.unwrap_or(Exit::Failure), hint)
}

fn classify_one(cause: &(dyn std::error::Error + 'static)) -> (Option<Exit>, Option<String>) {
    if let Some(fail) = cause.downcast_ref::<Fail>() {
        return (Some(fail.exit), fail.hint.clone());
    }
    if let Some(error) = cause.downcast_ref::<cofolio_store::Error>() {
        return of_store(error);
    }
    if let Some(error) = cause.downcast_ref::<ImportError>() {
        return of_import(error);
    }
    if let Some(error) = cause.downcast_ref::<EngineError>() {
        return of_engine(error);
    }
    if let Some(error) = cause.downcast_ref::<ExportError>() {
        return of_export(error);
    }
    if let Some(error) = cause.downcast_ref::<RegistryError>() {
        return of_registry(error);
    }
    if let Some(error) = cause.downcast_ref::<PackError>() {
        return of_pack(error);
    }
    if let Some(error) = cause.downcast_ref::<MountError>() {
        return of_mount(error);
    }
    if let Some(error) = cause.downcast_ref::<BundleError>() {
        return of_bundle(error);
    }
    if let Some(error) = cause.downcast_ref::<DiffError>() {
        return of_diff(error);
    }
    if let Some(error) = cause.downcast_ref::<TrustError>() {
        return of_trust(error);
    }
    if let Some(error) = cause.downcast_ref::<ConfigError>() {
        return of_config(error);
    }
    if let Some(error) = cause.downcast_ref::<BackendError>() {
        return of_backend(error);
    }
    if let Some(error) = cause.downcast_ref::<UpkeepError>() {
        return of_upkeep(error);
    }
    if cause.is::<Cancelled>() {
        return (Some(Exit::Interrupted), None);
    }
    if let Some(error) = cause.downcast_ref::<RunError>() {
        return of_run(error);
    }
    if let Some(error) = cause.downcast_ref::<ReadError>() {
        let corrupt = matches!(
            error,
            ReadError::NotErofs
                | ReadError::NotComposefs
                | ReadError::Corrupt { .. }
                | ReadError::Tree { .. }
        );
        return (corrupt.then_some(Exit::Corrupt), None);
    }
    if let Some(DumpError::Line { .. } | DumpError::Empty) = cause.downcast_ref::<DumpError>() {
        return (Some(Exit::Corrupt), None);
    }
    if let Some(error) = cause.downcast_ref::<io::Error>() {
        return (io_exit(error), io_hint(error));
    }
    (None, None)
}

/// For damage in the store. Importing an image again mends the image's own files, but no objects.
const DAMAGED: &str =
    "`cofolio fsck` says what else is damaged; `fsck --repair --from SOURCE` restores it";

fn of_store(error: &cofolio_store::Error) -> (Option<Exit>, Option<String>) {
    use cofolio_store::Error;
    use cofolio_store::{ErrorKind, FileKind};
    let hint = match error {
        Error::NotAStore { .. } => Some(
            "`cofolio import SOURCE` makes a store; --store DIR or COFOLIO_STORE says where it is",
        ),
        Error::NoSpace { .. } | Error::NoInodes { .. } => {
            Some("`cofolio gc` frees what nothing uses any more")
        }
        Error::NoSuchRef(_) => Some("`cofolio images` lists what there is"),
        Error::NoPack(_) => Some("`cofolio pack IMAGE` makes one"),
        Error::NoSuch(name) if name.kind() == FileKind::Segment => Some(
            "`cofolio fsck --repair` removes packs that lack one, `cofolio pack` makes them again",
        ),
        Error::NoSuchDomain(_) => Some("`cofolio doctor` lists the trust domains"),
        Error::Corrupt { path, .. } if path == "meta.json" => {
            Some("`cofolio fsck --repair` makes it again")
        }
        Error::Io { .. } if error.is_unreadable() => Some(DAMAGED),
        Error::Corrupt { path, .. } if path.contains("/refs/") => Some(
            "importing the image again under its name writes its record again; `rm --force` removes it",
        ),
        Error::Corrupt { path, .. } if path.contains("/signatures/") => {
            Some("`cofolio sign` writes it again; without the file there is no such signature")
        }
        Error::Corrupt { .. } | Error::Unreadable { .. } => Some(DAMAGED),
        Error::UnknownFeature { .. } | Error::ReadOnly { .. } => {
            Some("a newer version of cofolio wrote this store; use that one")
        }
        Error::Busy { .. } => Some("an import is being published or garbage collected; try again"),
        _ => None,
    };
    let exit = match (error.kind(), error) {
        // The cause, an I/O error, says more.
        (ErrorKind::Io, _) => None,
        (ErrorKind::Cancelled, _) => Some(Exit::Interrupted),
        (ErrorKind::Space, _) => Some(Exit::NoSpace),
        (ErrorKind::Corrupt, _) => Some(Exit::Corrupt),
        (ErrorKind::Conflict, _) => Some(Exit::Busy),
        (ErrorKind::Caller, Error::BadName { .. }) => Some(Exit::Usage),
        (ErrorKind::Caller, Error::InTheWay { .. } | Error::TooMany { .. }) => Some(Exit::Failure),
        (ErrorKind::Caller, _) => Some(Exit::NotFound),
        _ => Some(Exit::Failure),
    };
    (exit, hint.map(str::to_owned))
}

fn of_import(error: &ImportError) -> (Option<Exit>, Option<String>) {
    match error {
        ImportError::NoSpace { .. } => {
            let hint = "nothing was kept; `cofolio gc` frees what nothing uses any more (1 % of the \
                        filesystem, at most 1 GiB, is left free for others)";
            (Some(Exit::NoSpace), Some(hint.to_owned()))
        }
        ImportError::Cancelled(_) => {
            let hint = "no image was published; complete layers of a pull are kept: running it again goes on from there";
            (Some(Exit::Interrupted), Some(hint.to_owned()))
        }
        ImportError::Source { .. } => (Some(Exit::NotFound), None),
        ImportError::Thread(_) => (Some(Exit::Busy), None),
        ImportError::Name { .. } => {
            (Some(Exit::Usage), Some("--name REF gives the image another name".to_owned()))
        }
        ImportError::Registry(error) => of_registry(error),
        ImportError::Engine(error) => of_engine(error),
        ImportError::Trust(error) => of_trust(error),
        ImportError::Changed { .. } => (Some(Exit::Busy), None),
        ImportError::Limit { .. } => (Some(Exit::Failure), None),
        error if error.is_corrupt() => (Some(Exit::Corrupt), None),
        _ => (None, None),
    }
}

fn of_engine(error: &EngineError) -> (Option<Exit>, Option<String>) {
    match error {
        EngineError::NotFound { .. } => (Some(Exit::NotFound), None),
        EngineError::Document { .. } => (Some(Exit::Corrupt), None),
        // The cause, an I/O error, says more.
        EngineError::Io { .. } => (None, None),
        _ => (Some(Exit::Failure), None),
    }
}

fn of_registry(error: &RegistryError) -> (Option<Exit>, Option<String>) {
    let (exit, hint) = match error {
        RegistryError::Reference { .. } | RegistryError::Options { .. } => (Exit::Usage, None),
        RegistryError::NotFound { .. } => (Exit::NotFound, None),
        RegistryError::Denied { .. } => (
            Exit::Missing,
            Some(
                "`podman login HOST` or `docker login HOST`; some registries say this of images that are not there",
            ),
        ),
        RegistryError::PlainHttp { .. } => (
            Exit::Missing,
            Some(
                "--insecure allows it for this registry; what comes is checked against digests, but the digest of a tag is not",
            ),
        ),
        RegistryError::Unreachable { .. } | RegistryError::Status { .. } => {
            (Exit::Network, Some("what was complete is kept: the next try goes on from there"))
        }
        RegistryError::Refused { status: 413, .. } => {
            (Exit::Failure, Some("the registry, or a proxy before it, takes nothing of this size"))
        }
        RegistryError::Answer { .. } => (Exit::Corrupt, None),
        _ => (Exit::Failure, None),
    };
    (Some(exit), hint.map(str::to_owned))
}

fn of_mount(error: &MountError) -> (Option<Exit>, Option<String>) {
    use cofolio_node::mount::Code;
    let hint = match error {
        MountError::Busy { target } => {
            let target = target.display();
            let hint = format!("`fuser -vm {target}` says who; `umount --force` detaches it");
            return (Some(Exit::Busy), Some(hint));
        }
        MountError::TargetMissing { .. } => {
            Some("--create makes the directory (its parent must exist)")
        }
        MountError::NoFilesystem { .. } | MountError::NoFeature { .. } => {
            Some("`cofolio doctor` says what this machine offers")
        }
        MountError::NoVerity { .. } => Some(
            "a store on ext4 made with `-O verity` or on btrfs has it; `cofolio doctor` says what this one has",
        ),
        MountError::PinnedWithoutVerity { .. } => {
            Some("`cofolio mounts` says by whom; unmount the image everywhere first")
        }
        MountError::PackInvalid { .. } => {
            Some("`cofolio fsck --repair` removes it, `cofolio pack` makes it again")
        }
        MountError::NotShared { .. } => Some("`cofolio pack --again IMAGE` makes its pack anew"),
        MountError::NotMounted(_) => Some("`cofolio mounts` lists what is mounted"),
        MountError::IdMap { .. } => Some("INSIDE:OUTSIDE:COUNT, as 0:100000:65536"),
        error if error.code() == Code::Corrupt => Some(DAMAGED),
        _ => None,
    };
    let exit = match (error, error.code()) {
        (MountError::Store(error), _) => return of_store(error),
        (MountError::IdMap { .. }, _) => Some(Exit::Usage),
        (MountError::OtherNamespace { .. }, _) | (_, Code::Unsupported) => Some(Exit::Missing),
        (MountError::Covered { .. } | MountError::PinnedWithoutVerity { .. }, _)
        | (_, Code::AlreadyExists | Code::Busy) => Some(Exit::Busy),
        (_, Code::NotFound) => Some(Exit::NotFound),
        (_, Code::Corrupt) => Some(Exit::Corrupt),
        // The cause decides.
        (_, Code::Io) => None,
        (_, Code::InvalidArgument | Code::FailedPrecondition) => Some(Exit::Failure),
    };
    (exit, hint.map(str::to_owned))
}

fn of_export(error: &ExportError) -> (Option<Exit>, Option<String>) {
    let (exit, hint) = match error {
        ExportError::Destination { .. } => (Exit::Usage, None),
        ExportError::Thread(_) => (Exit::Busy, None),
        ExportError::Exists { .. } => (Exit::Usage, Some("--replace replaces it")),
        ExportError::NoSplit { .. } => (
            Exit::NotFound,
            Some("an earlier version imported it: import the image again from where it came"),
        ),
        ExportError::Cancelled(_) => (Exit::Interrupted, None),
        ExportError::Store(error) => return of_store(error),
        ExportError::Registry(error) => return of_registry(error),
        error if error.is_corrupt() => (Exit::Corrupt, Some(DAMAGED)),
        ExportError::Io { .. } => return (None, None),
        _ => (Exit::Failure, None),
    };
    (Some(exit), hint.map(str::to_owned))
}

fn of_bundle(error: &BundleError) -> (Option<Exit>, Option<String>) {
    let (exit, hint) = match error {
        BundleError::NoCommand => (Exit::Usage, Some("say what to run, after `--`")),
        BundleError::MissingMountPoint(_) => (
            Exit::Failure,
            Some("a writable root gets it: see --help; or add the directory to the image"),
        ),
        BundleError::UnknownAccount { .. } => {
            (Exit::NotFound, Some("--user UID:GID takes numbers, which need no account"))
        }
        BundleError::Exists(_) => (Exit::Usage, Some("--replace overwrites it")),
        BundleError::Unsafe { .. } => {
            (Exit::Failure, Some("use a directory of root's that only root can write to"))
        }
        BundleError::Io { .. } => return (None, None),
        _ => (Exit::Failure, None),
    };
    (Some(exit), hint.map(str::to_owned))
}

fn of_diff(error: &DiffError) -> (Option<Exit>, Option<String>) {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    match error {
        DiffError::Store(error) => of_store(error),
        DiffError::Cancelled(_) => (Some(Exit::Interrupted), None),
        DiffError::Object { source, .. }
            if [InvalidData, UnexpectedEof].contains(&source.kind()) =>
        {
            (Some(Exit::Corrupt), Some(DAMAGED.to_owned()))
        }
        // The cause decides.
        _ => (None, None),
    }
}

fn of_trust(error: &TrustError) -> (Option<Exit>, Option<String>) {
    let (exit, hint) = match error {
        TrustError::Key { .. } => (Exit::Usage, None),
        TrustError::Policy { .. } => {
            (Exit::Usage, Some("as long as the policy makes no sense, no image is let through"))
        }
        TrustError::Unsigned { .. } => (
            Exit::Refused,
            Some(
                "`cofolio sign` signs it, or keeps a signature made elsewhere (--attach); --signature brings one with an import",
            ),
        ),
        TrustError::Store(error) => return of_store(error),
        _ => (Exit::Refused, None),
    };
    (Some(exit), hint.map(str::to_owned))
}

fn of_config(error: &ConfigError) -> (Option<Exit>, Option<String>) {
    let hint = match error {
        // The cause decides.
        ConfigError::Io { .. } => return (None, None),
        ConfigError::Invalid { meant: Some(key), .. } => format!("did you mean `{key}`?"),
        ConfigError::Invalid { meant: None, .. } => {
            "`cofolio config default` prints every key with its default".to_owned()
        }
        _ => {
            "as in names of images, in lower case: `docker.io`, `registry.example:5000`".to_owned()
        }
    };
    (Some(Exit::Usage), Some(hint))
}

fn of_backend(error: &BackendError) -> (Option<Exit>, Option<String>) {
    let (exit, hint) = match error {
        BackendError::NotCompressed => (Exit::Usage, None),
        BackendError::PlainPacks { .. } => {
            (Exit::Usage, Some("`cofolio backend inode-share --lz4` makes all of them anew"))
        }
        BackendError::Mounted { .. } => (Exit::Busy, Some("`cofolio umount --all` unmounts them")),
        BackendError::Kernel { .. } => (
            Exit::Missing,
            Some(
                "it takes Linux 7.0 with CONFIG_EROFS_FS_PAGE_CACHE_SHARE; `overlay` shares as much",
            ),
        ),
        BackendError::Mount(error) => return of_mount(error),
        BackendError::Pack(error) => return of_pack(error),
        BackendError::Store(error) => return of_store(error),
        _ => (Exit::Failure, None),
    };
    (Some(exit), hint.map(str::to_owned))
}

fn of_upkeep(error: &UpkeepError) -> (Option<Exit>, Option<String>) {
    match error {
        UpkeepError::Container(error) => of_run(error),
        UpkeepError::Mount(error) => of_mount(error),
        UpkeepError::Pack(error) => of_pack(error),
        UpkeepError::Store(error) => of_store(error),
        UpkeepError::Cancelled(_) => (Some(Exit::Interrupted), None),
        _ => (Some(Exit::Failure), None),
    }
}

fn of_pack(error: &PackError) -> (Option<Exit>, Option<String>) {
    match error {
        PackError::Image { .. } => (Some(Exit::Corrupt), None),
        PackError::Cancelled(_) => (Some(Exit::Interrupted), None),
        PackError::Store(error) => of_store(error),
        _ => (None, None),
    }
}

fn of_run(error: &RunError) -> (Option<Exit>, Option<String>) {
    let (exit, hint) = match error {
        RunError::Mount(error) => return of_mount(error),
        RunError::Bundle(error) => return of_bundle(error),
        RunError::NoRuntime(_) => (
            Exit::Missing,
            Some("install crun or runc, or name another with --runtime or `[run] runtime`"),
        ),
        RunError::Exists(_) => {
            (Exit::Busy, Some("`cofolio ps` lists containers, `cofolio stop NAME` ends one"))
        }
        RunError::NotFound(_) | RunError::NotRunning(_) => {
            (Exit::NotFound, Some("`cofolio ps` lists containers"))
        }
        RunError::Record { .. } => (
            Exit::Corrupt,
            Some(
                "if no process of the container runs: `cofolio umount` its rootfs and remove its directory",
            ),
        ),
        RunError::StillRunning(_) => (Exit::Busy, None),
        RunError::Name(_) | RunError::NoRoot(_) => (Exit::Usage, None),
        RunError::Io { .. } => return (None, None),
        _ => (Exit::Failure, None),
    };
    (Some(exit), hint.map(str::to_owned))
}

/// EMFILE, the same number on every architecture of Linux.
const TOO_MANY_OPEN_FILES: i32 = 24;

fn io_hint(error: &io::Error) -> Option<String> {
    let hint = match (error.raw_os_error()?, error.kind()) {
        (TOO_MANY_OPEN_FILES, _) => {
            "this process may open no more files: `ulimit -n 1024` raises the limit"
        }
        (_, io::ErrorKind::FileTooLarge) => {
            "a limit of this shell (`ulimit -f`) or service (`LimitFSIZE=`), or of the filesystem"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

fn io_exit(error: &io::Error) -> Option<Exit> {
    Some(match error.kind() {
        io::ErrorKind::BrokenPipe => Exit::BrokenPipe,
        io::ErrorKind::NotFound => Exit::NotFound,
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported => Exit::Missing,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::NoSpace,
        io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock => Exit::Busy,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once_and_decide_the_code() {
        let cause = io::Error::from(io::ErrorKind::StorageFull);
        let error = anyhow::Error::new(cause).context("writing `x`");
        assert_eq!(classify(&error).0, Exit::NoSpace);
        assert!(chain(&error).starts_with("writing `x`: "));

        let error = anyhow::Error::new(Fail::not_found("no image `a`").hint("see images"))
            .context("no image `a`");
        assert_eq!(chain(&error), "no image `a`");
        assert_eq!(classify(&error), (Exit::NotFound, Some("see images".to_owned())));
        assert_eq!(classify(&anyhow::anyhow!("odd")).0, Exit::Failure);
    }
}
