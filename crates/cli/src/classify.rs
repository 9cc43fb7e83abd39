//! Every error of every library becomes an exit code and a hint here, and nowhere else.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::io;

use cofolio_daemon::{ClientError, DaemonError, ListenError};
use cofolio_erofs::dump::DumpError;
use cofolio_erofs::read::ReadError;
use cofolio_image::diff::DiffError;
use cofolio_image::error::{EngineError, ImportError, RegistryError, TrustError};
use cofolio_image::export::ExportError;
use cofolio_image::pack::PackError;
use cofolio_node::backend::BackendError;
use cofolio_node::cgroup::CgroupError;
use cofolio_node::commons::CommonsError;
use cofolio_node::config::ConfigError;
use cofolio_node::container::RunError;
use cofolio_node::container::bundle::BundleError;
use cofolio_node::ledger::LedgerError;
use cofolio_node::mount::MountError;
use cofolio_node::names::NameError;
use cofolio_node::profile::ProfileError;
use cofolio_node::run_dir::RunDirError;
use cofolio_node::upkeep::UpkeepError;
use cofolio_node::vm::VmError;
use cofolio_store::task::Cancelled;
use cofolio_store::{ErrorKind, StoreFile};
use rustix::io::Errno;

use crate::exit::{Exit, Fail};

/// What one error says: its exit code, and what to do about it. Without a code its cause decides.
pub(crate) type Classified = (Option<Exit>, Option<Cow<'static, str>>);

/// The cause decides.
const CAUSE: Classified = (None, None);

fn code(exit: Exit) -> Classified {
    (Some(exit), None)
}

fn hint(exit: Exit, hint: impl Into<Cow<'static, str>>) -> Classified {
    (Some(exit), Some(hint.into()))
}

/// Exit code and hint of an error: the first cause that says something definite decides.
pub(crate) fn classify(error: &anyhow::Error) -> (Exit, Option<Cow<'static, str>>) {
    let (mut exit, mut hint) = CAUSE;
    for cause in error.chain() {
        let (this, this_hint) = classify_one(cause);
        exit = exit.or(this);
        hint = hint.or(this_hint);
    }
    (exit.unwrap_or(Exit::Failure), hint)
}

fn classify_one(cause: &(dyn StdError + 'static)) -> Classified {
    /// Calls the function that takes an error of this type.
    macro_rules! call_one_of {
        ($($of:expr),*) => { $(if let Some(error) = cause.downcast_ref() { return $of(error); })* };
    }
    call_one_of!(Fail::classified, of_store, of_import, of_engine, of_export, of_registry, of_pack);
    call_one_of!(
        of_name, of_run_dir, of_mount, of_bundle, of_diff, of_trust, of_config, of_backend,
        of_upkeep, of_commons, of_cgroup, of_profile, of_run, of_vm, of_ledger, of_daemon,
        of_client
    );
    call_one_of!(|_: &Cancelled| code(Exit::Interrupted), of_read, of_dump, of_io);
    CAUSE
}

/// For damage to the store's content.
pub const DAMAGED: &str =
    "`cofolio fsck --repair --from SOURCE` restores it from where the image came";
/// For a directory that every domain has.
pub const MISSING_DIRECTORY: &str = "`cofolio fsck --repair` makes the directory again, and with \
     --from SOURCE what was in it; lost names are not restored";
/// For an image file, which may not be the store's.
const DAMAGED_IMAGE: &str =
    "`cofolio fsck --repair --from SOURCE` restores it, if it is an image of the store";
const DAMAGED_PROFILE: &str = "`cofolio profile record IMAGE` makes another one (with --rw also of \
     where it writes); `cofolio profile rm IMAGE` removes it";

const UNTRUSTED_RUN_DIR: &str = "--run-dir DIR or COFOLIO_RUN says where it is: below directories that only \
     this user or root can write to";

/// What mends a damaged file of the store, by its path relative to the store.
pub fn mending(path: &str) -> &'static str {
    match StoreFile::at(path) {
        Some(StoreFile::Meta) => "`cofolio fsck --repair` makes it again",
        Some(StoreFile::Settings) => "`cofolio backend overlay` or `inode-share` sets it again",
        Some(StoreFile::Ref) => {
            "importing the image again under its name writes its record again; `cofolio rm --force` removes it"
        }
        Some(StoreFile::Unnamed) => {
            "the image has no name, and what its last name said of it is lost: import it again"
        }
        Some(StoreFile::Profile) => DAMAGED_PROFILE,
        Some(StoreFile::Root) => "`cofolio gc` removes it, once what it was made for has ended",
        Some(StoreFile::Signature) => {
            "`cofolio sign` writes it again; without the file there is no such signature"
        }
        Some(StoreFile::Content(kind)) if kind.is_derived() => {
            "`cofolio fsck --repair` removes it, `cofolio pack` makes the image's pack again"
        }
        Some(StoreFile::Content(_)) | None => DAMAGED,
    }
}

fn of_store(error: &cofolio_store::Error) -> Classified {
    use cofolio_store::{Error, FileKind};
    if let Error::Unreadable { source, .. } = error
        && let Some(error) = source.downcast_ref()
    {
        return of_mount(error);
    }
    let is_missing = |source: &io::Error| source.kind() == io::ErrorKind::NotFound;
    // A directory that every store has.
    let lacks_directory =
        matches!(error, Error::Io { action: "list", source, .. } if is_missing(source));
    let by_hand = cofolio_store::by_hand(error);
    let hint = match error {
        Error::NotAStore { .. } => {
            "`cofolio import SOURCE` makes a store; --store DIR or COFOLIO_STORE says where it is"
        }
        Error::NotOurs { .. } => "run it as that user, or make a store of your own: --store DIR",
        Error::NoSpace { .. } => {
            "`cofolio gc` frees what nothing uses any more (1 % of the filesystem, at most 1 GiB, is left free for others)"
        }
        Error::NoInodes { .. } => "`cofolio gc` frees what nothing uses any more",
        Error::NoSuchRef(_) => "`cofolio images` lists what there is",
        Error::NoPack(_) => "`cofolio pack IMAGE` makes one",
        Error::NoSuch(name) if name.kind() == FileKind::Segment => {
            "`cofolio fsck --repair` removes packs that lack one, `cofolio pack` makes them again"
        }
        Error::NoSuchDomain(_) => "`cofolio doctor` lists the trust domains",
        Error::Corrupt { path, .. } => mending(path),
        // A bad sector of a file fails when it is read.
        Error::Io { action: "open", path, source }
            if path == "meta.json" && Errno::from_io_error(source) == Some(Errno::IO) =>
        {
            "the filesystem under the store fails: `umount --lazy` takes down what was mounted from the store, \
             and `crun --root /run/cofolio/STORE-ID/crun delete --force NAME` a container"
        }
        Error::Io { action: "open the store", source, .. }
            if source.kind() == io::ErrorKind::NotADirectory =>
        {
            "a store is a directory: --store DIR or COFOLIO_STORE says which one"
        }
        _ if by_hand.is_some() => by_hand.unwrap_or_default(),
        Error::Io { path, .. } if cofolio_store::is_damage(error) => mending(path),
        _ if lacks_directory => MISSING_DIRECTORY,
        Error::NoSuch(_) | Error::SizeMismatch { .. } => DAMAGED,
        Error::Unreadable { .. } if cofolio_store::is_damage(error) => DAMAGED,
        Error::UnknownFeature { .. } | Error::ReadOnly { .. } => {
            "a newer version of cofolio wrote this store; use that one"
        }
        Error::Busy { .. } => "an import is being published or garbage collected; try again",
        _ => "",
    };
    let exit = match (error.kind(), error) {
        (ErrorKind::Io, _) if lacks_directory => Some(Exit::Corrupt),
        // The cause, an I/O error, says more.
        (ErrorKind::Io, _) => None,
        (ErrorKind::Cancelled, _) => Some(Exit::Interrupted),
        (ErrorKind::Space, _) => Some(Exit::NoSpace),
        (ErrorKind::Corrupt, _) => Some(Exit::Corrupt),
        (ErrorKind::Conflict, _) => Some(Exit::Busy),
        (_, Error::NotOurs { .. }) => Some(Exit::Missing),
        (ErrorKind::Caller, Error::BadName { .. }) => Some(Exit::Usage),
        (ErrorKind::Caller, Error::InTheWay { .. } | Error::TooMany { .. }) => Some(Exit::Failure),
        // A record or an image names it; names that people give are looked up first.
        (ErrorKind::Caller, Error::NoSuch(_)) => Some(Exit::Corrupt),
        (ErrorKind::Caller, _) => Some(Exit::NotFound),
        _ => Some(Exit::Failure),
    };
    (exit, (!hint.is_empty()).then_some(hint.into()))
}

fn of_name(error: &NameError) -> Classified {
    match error {
        NameError::NoImage { refs: None, .. } | NameError::Short(_) => code(Exit::NotFound),
        NameError::NoImage { text, refs: Some(refs), .. } => {
            // Somebody who forgot the tag, or half of it, sees what there is.
            let close = refs.iter().map(String::as_str).filter(|name| name.contains(text));
            let close: Vec<_> = close.take(5).collect();
            hint(
                Exit::NotFound,
                match close[..] {
                    _ if refs.is_empty() => {
                        "no image has a name: `cofolio import SOURCE` brings one in; `cofolio tag` names one \
                         that `cofolio images` lists"
                            .into()
                    }
                    [] => Cow::from("`cofolio images` lists what there is"),
                    _ => format!("did you mean {}?", close.join(", ")).into(),
                },
            )
        }
        NameError::Ambiguous { two: [first, second], .. } => {
            hint(Exit::Usage, format!("among them {first} and {second}: give more digits"))
        }
        NameError::Store(error) => of_store(error),
        _ => code(Exit::Failure),
    }
}

fn of_import(error: &ImportError) -> Classified {
    match error {
        ImportError::Cancelled(_) => hint(
            Exit::Interrupted,
            "no image was published; complete layers of a pull are kept: running it again goes on from there",
        ),
        ImportError::Source { .. } => code(Exit::NotFound),
        ImportError::Thread(_) | ImportError::Changed { .. } => code(Exit::Busy),
        ImportError::Name { .. } => hint(Exit::Usage, "--name REF gives the image another name"),
        ImportError::Digest { .. } => hint(
            Exit::Corrupt,
            "the registry, the network or the source altered it, not the store; nothing of it was kept",
        ),
        ImportError::Registry(error) => of_registry(error),
        ImportError::Engine(error) => of_engine(error),
        ImportError::Trust(error) => of_trust(error),
        ImportError::Store(error) => of_store(error),
        error if error.is_corrupt() => code(Exit::Corrupt),
        _ => CAUSE,
    }
}

fn of_engine(error: &EngineError) -> Classified {
    match error {
        EngineError::NotFound { .. } => code(Exit::NotFound),
        EngineError::Document { .. } => code(Exit::Corrupt),
        EngineError::Io { .. } => CAUSE,
        _ => code(Exit::Failure),
    }
}

fn of_registry(error: &RegistryError) -> Classified {
    match error {
        RegistryError::Reference { .. } | RegistryError::Options { .. } => code(Exit::Usage),
        RegistryError::NotFound { .. } => code(Exit::NotFound),
        RegistryError::Denied { .. } => hint(
            Exit::Missing,
            "`podman login HOST` or `docker login HOST`; some registries say this of images that are not there",
        ),
        RegistryError::PlainHttp { .. } => hint(
            Exit::Missing,
            "--insecure allows it for this registry; what comes is checked against digests, but the digest of a tag is not",
        ),
        RegistryError::Unreachable { url, .. } | RegistryError::Status { url, .. } => {
            // The questions that come first.
            let first = url.ends_with("/v2/") || url.contains("/manifests/");
            let hint = match error {
                RegistryError::Unreachable { .. } if first => {
                    "nothing was transferred: is this the registry's address, and is it reachable?"
                }
                _ if first => "nothing was transferred: the registry itself has failed; try later",
                _ => "complete layers are kept: the next try goes on from there",
            };
            (Some(Exit::Network), Some(hint.into()))
        }
        RegistryError::Refused { status: 413, .. } => {
            hint(Exit::Failure, "the registry, or a proxy before it, takes nothing of this size")
        }
        RegistryError::Answer { .. } => code(Exit::Corrupt),
        _ => code(Exit::Failure),
    }
}

fn of_run_dir(error: &RunDirError) -> Classified {
    match error {
        RunDirError::Untrusted { .. } => hint(Exit::Missing, UNTRUSTED_RUN_DIR),
        _ => CAUSE,
    }
}

fn of_mount(error: &MountError) -> Classified {
    const RECONCILE: &str = "`cofolio mounts --reconcile` cleans up";
    match error {
        MountError::Store(error) => of_store(error),
        MountError::IdMap { .. } => hint(Exit::Usage, "INSIDE:OUTSIDE:COUNT, as 0:100000:65536"),
        MountError::Target { .. } | MountError::WritableDir { .. } => code(Exit::Usage),
        MountError::TargetMissing { .. } => {
            hint(Exit::NotFound, "--create makes the directory (its parent must exist)")
        }
        MountError::NotMounted(_) => hint(Exit::NotFound, "`cofolio mounts` lists what is mounted"),
        MountError::NotKept(_) => hint(
            Exit::NotFound,
            "`cofolio mounts` lists kept changes; a directory of your own (--upper) is yours to \
             remove",
        ),
        MountError::Busy { path, .. } => {
            let target = path.display();
            let detach = format!("`cofolio umount --force {target}` detaches it");
            hint(Exit::Busy, format!("`fuser -vm {target}` says who; {detach}"))
        }
        MountError::UpperInUse { .. } => hint(
            Exit::Busy,
            "`cofolio mounts` lists mounts, also those without a record; a detached one goes with \
             its last user",
        ),
        MountError::PinnedWithoutVerity { .. } | MountError::Replaced { .. } => {
            hint(Exit::Busy, "`cofolio mounts` says by whom; unmount the image everywhere first")
        }
        MountError::Covered(_) | MountError::AlreadyMounted { .. } => code(Exit::Busy),
        MountError::NoPrivilege(_) => hint(Exit::Missing, "run as root"),
        MountError::NoFeature { .. } => {
            hint(Exit::Missing, "`cofolio doctor` says what this machine offers")
        }
        MountError::NoVerity(_) => hint(
            Exit::Missing,
            "a store on ext4 made with `-O verity` or on btrfs has it, if the kernel has \
             CONFIG_FS_VERITY; `cofolio doctor` says what this one has",
        ),
        MountError::NotShared(_) => {
            hint(Exit::Missing, "`cofolio pack --again IMAGE` makes its pack anew")
        }
        MountError::RunDirectory { .. } => hint(Exit::Missing, UNTRUSTED_RUN_DIR),
        MountError::OtherNamespace { .. } => hint(
            Exit::Missing,
            "`nsenter --mount --target PID` before the command takes it to a mount namespace: PID is \
             a process in it, such as the `cofolio run` of a container",
        ),
        MountError::NoSizeLimit { .. } => code(Exit::Missing),
        MountError::Damaged { .. } => hint(Exit::Corrupt, DAMAGED),
        MountError::PackInvalid { .. } => {
            hint(Exit::Corrupt, "`cofolio fsck --repair` removes it, `cofolio pack` makes it again")
        }
        // As in a run directory that somebody emptied: there is nothing to remove.
        MountError::State { path, .. } if !path.exists() => hint(
            Exit::Corrupt,
            "`cofolio mounts --reconcile` unmounts the image, once no mount that `cofolio mounts` \
             lists with a record uses it: `cofolio umount` these first",
        ),
        MountError::State { path, .. } => {
            let after = format!("after `rm {}`, {RECONCILE}", path.display());
            hint(Exit::Corrupt, format!("unmount what it is about with umount(8); {after}"))
        }
        MountError::NoRecord(target) => {
            let unmounts = format!("`umount -R {}` unmounts it", target.display());
            hint(Exit::Failure, format!("{unmounts}; {RECONCILE} after it"))
        }
        MountError::ReadOnlyStore(_) => hint(
            Exit::Failure,
            "`mount --upper DIR`, with --rw or --writable, keeps changes elsewhere; `run --volume \
             DIR:PATH` gives a volume a directory of the host",
        ),
        MountError::Kernel(error) if error.errno == Errno::NOSPC => hint(
            Exit::NoSpace,
            "a mount namespace has at most `sysctl fs.mount-max` mounts; a writable mount needs \
             free space and inodes where its changes are",
        ),
        MountError::Kernel(_) | MountError::Io { .. } => CAUSE,
        _ => code(Exit::Failure),
    }
}

fn of_export(error: &ExportError) -> Classified {
    match error {
        ExportError::Destination { .. } => code(Exit::Usage),
        ExportError::Thread(_) => code(Exit::Busy),
        ExportError::Exists { .. } => hint(Exit::Usage, "--replace replaces it"),
        ExportError::Cancelled(_) => code(Exit::Interrupted),
        ExportError::Store(error) => of_store(error),
        ExportError::Registry(error) => of_registry(error),
        error if error.is_corrupt() => hint(Exit::Corrupt, DAMAGED),
        ExportError::Io { .. } | ExportError::NotDurable { .. } => CAUSE,
        _ => code(Exit::Failure),
    }
}

fn of_bundle(error: &BundleError) -> Classified {
    match error {
        BundleError::NoCommand => hint(Exit::Usage, "say what to run, after `--`"),
        BundleError::MissingMountPoint(_) => hint(
            Exit::Failure,
            "use --rw, or --writable with a directory above it (see --help), or add it to the image, or to the host's directory behind a read-only volume",
        ),
        BundleError::Account(_) => {
            hint(Exit::NotFound, "--user UID:GID takes numbers, which need no account")
        }
        BundleError::Exists(_) => hint(Exit::Usage, "--replace overwrites it"),
        BundleError::Unsafe { .. } => {
            hint(Exit::Failure, "use a directory of root's that only root can write to")
        }
        BundleError::Io { .. } => CAUSE,
        _ => code(Exit::Failure),
    }
}

fn of_diff(error: &DiffError) -> Classified {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    match error {
        DiffError::Store(error) => of_store(error),
        DiffError::Cancelled(_) => code(Exit::Interrupted),
        DiffError::Object { source, .. }
            if [InvalidData, UnexpectedEof].contains(&source.kind()) =>
        {
            hint(Exit::Corrupt, DAMAGED)
        }
        _ => CAUSE,
    }
}

fn of_trust(error: &TrustError) -> Classified {
    match error {
        TrustError::Key { .. } => code(Exit::Usage),
        TrustError::Policy { .. } => {
            hint(Exit::Usage, "as long as the policy makes no sense, no image is let through")
        }
        TrustError::Unsigned { .. } => hint(
            Exit::Refused,
            "`cofolio sign` signs it, or keeps a signature made elsewhere (--attach); --signature brings one with an import",
        ),
        TrustError::Store(error) => of_store(error),
        _ => code(Exit::Refused),
    }
}

fn of_config(error: &ConfigError) -> Classified {
    match error {
        ConfigError::Io { .. } => CAUSE,
        ConfigError::Invalid { meant: Some(key), .. } => {
            hint(Exit::Usage, format!("did you mean `{key}`?"))
        }
        ConfigError::Invalid { meant: None, .. } => {
            hint(Exit::Usage, "`cofolio config default` prints every key with its default")
        }
        _ => hint(
            Exit::Usage,
            "as in names of images, in lower case: `docker.io`, `registry.example:5000`",
        ),
    }
}

fn of_backend(error: &BackendError) -> Classified {
    match error {
        BackendError::NotCompressed => code(Exit::Usage),
        BackendError::PlainPacks { .. } => {
            hint(Exit::Usage, "`cofolio backend inode-share --lz4` makes all of them anew")
        }
        BackendError::Mounted { .. } => hint(
            Exit::Busy,
            "`cofolio stop` ends a container, and `cofolio umount --all` unmounts the rest",
        ),
        BackendError::Kernel { .. } => hint(
            Exit::Missing,
            "it takes Linux 7.0 with CONFIG_EROFS_FS_PAGE_CACHE_SHARE; `overlay` shares as much",
        ),
        BackendError::Mount(error) => of_mount(error),
        BackendError::Pack(error) => of_pack(error),
        BackendError::Store(error) => of_store(error),
        _ => code(Exit::Failure),
    }
}

fn of_upkeep(error: &UpkeepError) -> Classified {
    match error {
        UpkeepError::Container(error) => of_run(error),
        UpkeepError::Mount(error) => of_mount(error),
        UpkeepError::Pack(error) => of_pack(error),
        UpkeepError::Import(error) => of_import(error),
        UpkeepError::Store(error) => of_store(error),
        UpkeepError::Cancelled(_) => code(Exit::Interrupted),
        _ => code(Exit::Failure),
    }
}

fn of_commons(error: &CommonsError) -> Classified {
    match error {
        CommonsError::Store(error) => of_store(error),
        CommonsError::Cancelled(_) => code(Exit::Interrupted),
        CommonsError::Cgroup(error) => of_cgroup(error),
        CommonsError::Limit { .. } => hint(
            Exit::Failure,
            "`cofolio warm --limit SIZE` or `[commons] limit` in the configuration sets another",
        ),
        CommonsError::Ledger(LedgerError::NotMounted { .. }) => {
            hint(Exit::NotFound, "`cofolio mount` mounts it")
        }
        CommonsError::Ledger(LedgerError::Store(error)) => of_store(error),
        _ => code(Exit::Failure),
    }
}

fn of_cgroup(error: &CgroupError) -> Classified {
    match error {
        CgroupError::NoMemoryController { .. } | CgroupError::OtherRoot { .. } => {
            code(Exit::Missing)
        }
        CgroupError::InUse { .. } => hint(
            Exit::Busy,
            "`cofolio reclaim --all --shared` drops pages that processes map; or set a larger limit",
        ),
        _ => CAUSE,
    }
}

fn of_profile(error: &ProfileError) -> Classified {
    match error {
        ProfileError::Store(error) | ProfileError::Ledger(LedgerError::Store(error)) => {
            of_store(error)
        }
        ProfileError::Container(error) => of_run(error),
        ProfileError::Cancelled(_) => code(Exit::Interrupted),
        ProfileError::Busy => code(Exit::Busy),
        ProfileError::Missing(_) => {
            hint(Exit::NotFound, "`cofolio profile record IMAGE` makes one")
        }
        ProfileError::Damaged { .. } => hint(Exit::Corrupt, DAMAGED_PROFILE),
        _ => code(Exit::Failure),
    }
}

fn of_pack(error: &PackError) -> Classified {
    match error {
        PackError::Image { .. } => hint(Exit::Corrupt, DAMAGED),
        PackError::Cancelled(_) => code(Exit::Interrupted),
        PackError::Store(error) => of_store(error),
        _ => CAUSE,
    }
}

fn of_vm(error: &VmError) -> Classified {
    match error {
        VmError::Unsupported(_) => code(Exit::Missing),
        VmError::NoKernel => hint(
            Exit::Missing,
            "install a kernel of the distribution (linux-image-cloud-amd64 in Debian), or name \
             another with --kernel",
        ),
        VmError::Kernel { .. } | VmError::Guest { .. } => code(Exit::Missing),
        VmError::Exists(_) => hint(
            Exit::Busy,
            "`cofolio vm ps` lists virtual machines, `cofolio vm stop NAME` ends one",
        ),
        VmError::NotFound(_) => hint(Exit::NotFound, "`cofolio vm ps` lists virtual machines"),
        VmError::Name(_) | VmError::NotOurs(_) | VmError::NotAttached(_) => code(Exit::Usage),
        VmError::StillRunning(_) | VmError::Attached { .. } | VmError::DiskInUse(_) => {
            code(Exit::Busy)
        }
        VmError::NotRunning(_) => code(Exit::NotFound),
        VmError::Cancelled(_) => code(Exit::Interrupted),
        VmError::Bundle(error) => of_bundle(error),
        VmError::Pack(error) => of_pack(error),
        VmError::RunDir(error) => of_run_dir(error),
        VmError::Mount(error) => of_mount(error),
        VmError::Store(error) => of_store(error),
        _ => code(Exit::Failure),
    }
}

fn of_run(error: &RunError) -> Classified {
    match error {
        RunError::Mount(error) => of_mount(error),
        RunError::Bundle(error) => of_bundle(error),
        RunError::NoRuntime(_) => hint(
            Exit::Missing,
            "install crun or runc, or name another with --runtime or `[run] runtime`",
        ),
        RunError::Exists(_) => {
            hint(Exit::Busy, "`cofolio ps` lists containers, `cofolio stop NAME` ends one")
        }
        RunError::NotFound(_) | RunError::NotRunning(_) => {
            hint(Exit::NotFound, "`cofolio ps` lists containers")
        }
        RunError::Record(_) => hint(
            Exit::Corrupt,
            "if no process of the container runs: remove its `container.json`, then \
             `cofolio umount` its rootfs",
        ),
        RunError::Unreachable(_) => hint(
            Exit::Missing,
            "`chmod go+x` lets all users through it; --run-dir DIR or COFOLIO_RUN takes another \
             run directory",
        ),
        RunError::StillRunning(_) | RunError::Lost { .. } => code(Exit::Busy),
        RunError::Name(_) | RunError::NoRoot(_) => code(Exit::Usage),
        _ => code(Exit::Failure),
    }
}

fn of_ledger(error: &LedgerError) -> Classified {
    match error {
        LedgerError::Store(error) => of_store(error),
        LedgerError::NotFound { .. } => code(Exit::NotFound),
        _ => CAUSE,
    }
}

fn of_daemon(error: &DaemonError) -> Classified {
    match error {
        DaemonError::Listen(error) => of_listen(error),
        _ => CAUSE,
    }
}

fn of_listen(error: &ListenError) -> Classified {
    match error {
        ListenError::TooLong(_) => hint(Exit::Usage, "--socket PATH takes another path"),
        ListenError::NoDirectory(_) => code(Exit::NotFound),
        ListenError::Taken(_) | ListenError::Locked(_) => code(Exit::Busy),
        ListenError::Io { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
            code(Exit::Busy)
        }
        ListenError::NoGroup(_)
        | ListenError::Unguarded(_)
        | ListenError::HalfOfTls
        | ListenError::File { .. } => code(Exit::Usage),
        _ => CAUSE,
    }
}

fn of_client(error: &ClientError) -> Classified {
    match error {
        ClientError::Denied { group: Some(group), .. } => hint(
            Exit::Missing,
            format!(
                "run as root, or join the group: `usermod -aG {group} USER`, then log in again"
            ),
        ),
        ClientError::Denied { group: None, .. } => {
            hint(Exit::Missing, "run as root; `cofolio serve --group GROUP` admits a group")
        }
        _ => CAUSE,
    }
}

fn of_read(error: &ReadError) -> Classified {
    match error {
        ReadError::NotErofs
        | ReadError::NotComposefs
        | ReadError::Corrupt { .. }
        | ReadError::Tree { .. } => hint(Exit::Corrupt, DAMAGED_IMAGE),
        // A directory is a mistake of the caller's.
        ReadError::Source { source, .. }
            if cofolio_store::is_damage(source) && source.kind() != io::ErrorKind::IsADirectory =>
        {
            hint(Exit::Corrupt, DAMAGED_IMAGE)
        }
        _ => CAUSE,
    }
}

fn of_dump(error: &DumpError) -> Classified {
    match error {
        DumpError::Line { .. } | DumpError::Empty => code(Exit::Corrupt),
        _ => CAUSE,
    }
}

fn of_io(error: &io::Error) -> Classified {
    /// The same number on every architecture of Linux.
    const EMFILE: i32 = 24;
    let exit = match error.kind() {
        io::ErrorKind::BrokenPipe => Some(Exit::BrokenPipe),
        io::ErrorKind::NotFound => Some(Exit::NotFound),
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported => Some(Exit::Missing),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Some(Exit::NoSpace),
        io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock => Some(Exit::Busy),
        _ => None,
    };
    let hint = match (error.raw_os_error(), error.kind()) {
        (Some(EMFILE), _) => {
            "this process may open no more files: `ulimit -n 1024` raises the limit"
        }
        (Some(_), io::ErrorKind::FileTooLarge) => {
            "a limit of this shell (`ulimit -f`) or service (`LimitFSIZE=`), or of the filesystem"
        }
        (_, io::ErrorKind::PermissionDenied) if !rustix::process::geteuid().is_root() => {
            "run as root"
        }
        _ => return (exit, None),
    };
    (exit, Some(hint.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mending command was chosen by a part of the path: a damaged object of a domain that is
    /// called `refs` was taken for the record of a ref.
    #[test]
    fn the_kind_of_a_damaged_file_says_what_mends_it() {
        let hint = |path: &str| {
            let error = cofolio_store::Error::corrupt(path, "torn");
            classify(&error.into()).1.unwrap()
        };
        for domain in ["default", "refs", "roots", "segments", "meta.json"] {
            let hint = |file: &str| hint(&format!("domains/{domain}/{file}"));
            assert_eq!(hint("objects/aa/bb"), DAMAGED, "{domain}");
            assert_eq!(hint("layers/refs.dump.zst"), DAMAGED, "{domain}");
            assert!(hint("refs/a.json").contains("cofolio rm --force"), "{domain}");
            assert!(hint("roots/mount/a.json").contains("cofolio gc"), "{domain}");
            assert!(hint("profiles/a").contains("cofolio profile record"), "{domain}");
            assert!(hint("segments/a.pack").contains("cofolio pack"), "{domain}");
            assert!(hint("domain.json").contains("cofolio backend"), "{domain}");
        }
        assert!(hint("meta.json").contains("fsck --repair` makes it again"));
        // They recommended a repair, which cannot be made, and failed with the same hint.
        for (number, expected) in [(117, "own check"), (21, "remove that directory of the store")] {
            let source = io::Error::from_raw_os_error(number);
            let path = "domains/default/objects/aa/bb".to_owned();
            let error = cofolio_store::Error::Io { action: "open", path, source };
            assert!(classify(&error.into()).1.unwrap().contains(expected));
        }
    }
}
