//! An OCI runtime bundle from an image config: the `config.json` for `runc run` or `crun run`.
//!
//! ```text
//! <bundle>/config.json        written here
//! <bundle>/rootfs             the image, mounted by the caller (or any directory the caller names)
//! <bundle>/volumes/<path>     one directory per `Volumes` entry, if the root is read-only; `/` in
//!                             it is written `%2F`, so that no volume is inside another
//! ```
//!
//! Only root makes and owns a bundle: other users could redirect root's writes and mounts.
//!
//! The conversion follows the image specification's `conversion.md`. Capabilities, mounts, masked
//! and read-only paths are the defaults of `containerd` and `runc spec`, the seccomp profile is
//! Docker's. Users are looked up in the image's own `/etc/passwd` and `/etc/group`, opened so that
//! no symbolic link of the image leads outside it.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::AtFlags;
use rustix::io::Errno;
use serde::Deserialize;
use serde_json::{Value, json};

use cofolio_guest::accounts::AccountError;
use cofolio_store::{Purpose, replace_file};
use cofolio_sys::userns::IdRange;

use crate::links;
use crate::mount::kernel::{open_directory_below, path_of};
use crate::mount::{At as _, IdMap, MountError, MountOptions, open_own};
use accounts::resolve_user;
use rootfs::{ACCOUNT_FILE_BYTES_MAX, Rootfs};

mod accounts;
#[cfg(fuzzing)]
pub mod fuzz;
mod mounts;
mod rootfs;
mod seccomp;

pub(super) use mounts::volumes_with_directory;
pub use mounts::{expected_dirs, is_hidden, is_scratch};

/// Volumes that an image may have.
const VOLUMES_MAX: usize = 1000;

/// Bytes of a host name that is made of a directory's; the kernel takes 64.
const HOST_NAME_MAX: usize = 63;

const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The default capabilities of containerd and Docker.
const CAPABILITIES: &str = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_FSETID CAP_FOWNER CAP_MKNOD CAP_NET_RAW \
    CAP_SETGID CAP_SETUID CAP_SETFCAP CAP_SETPCAP CAP_NET_BIND_SERVICE CAP_SYS_CHROOT CAP_KILL \
    CAP_AUDIT_WRITE";

/// Files of `/proc` and `/sys` that reveal the host (containerd's list).
const MASKED_PATHS: &str = "/proc/acpi /proc/asound /proc/kcore /proc/keys /proc/latency_stats \
    /proc/sched_debug /proc/scsi /proc/timer_list /proc/timer_stats /sys/devices/virtual/powercap \
    /sys/firmware";

/// Files of `/proc` through which a container could change the host (containerd's list).
const READONLY_PATHS: &str = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger";

fn words(list: &str) -> Vec<&str> {
    list.split_whitespace().collect()
}

/// Why no bundle was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The image config is not one of the OCI image specification.
    #[error("image config: {0}")]
    Config(#[source] serde_json::Error),
    /// The image is of another operating system.
    #[error("image config: operating system `{0}`, not linux")]
    OperatingSystem(String),
    /// Neither the image nor the caller gives a command.
    #[error(
        "there is no command: the image has none and none was given (with --entrypoint its Cmd does not count)"
    )]
    NoCommand,
    /// The image has no such user.
    #[error(transparent)]
    Account(#[from] AccountError),
    /// There is nothing to mount on.
    #[error("mount point {0} does not exist, and its parent is read-only")]
    MissingMountPoint(String),
    /// The image has a link in the place of a mount point.
    #[error("the image has a symbolic link at {0}, where the container has a mount of its own")]
    LinkedMountPoint(&'static str),
    /// The time to order them grows with the square of their number.
    #[error("the image has {0} volumes: with a read-only root at most {VOLUMES_MAX} are mounted")]
    TooManyVolumes(usize),
    /// A link leads a volume to a mount of the container's own.
    #[error("volume `{0}`: a link leads it to /, or into /proc, /sys or /dev")]
    LinkedTarget(String),
    /// A volume would lie over what the caller mounts or made writable.
    #[error("volume `{volume}` would hide what lies at {}", hidden.display())]
    Hides {
        /// Of the image or the caller.
        volume: String,
        /// The path that is there already.
        hidden: PathBuf,
    },
    /// A path in the image config is not absolute or steps outside with `..`.
    #[error("image config: {what} `{path}` is not a plain absolute path")]
    BadPath {
        /// Which part of the config.
        what: &'static str,
        /// The offending path.
        path: String,
    },
    /// The bundle has a `config.json`, perhaps an edited one.
    #[error("{} exists", .0.display())]
    Exists(PathBuf),
    /// Another user could change the bundle while it is made.
    #[error("{}: {why}", path.display())]
    Unsafe {
        /// The bundle's directory, or what is in it.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
    /// An account file is larger than any real one.
    #[error("{0} of the image is larger than {ACCOUNT_FILE_BYTES_MAX} bytes")]
    AccountFileTooLarge(&'static str),
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] MountError),
}

type Result<T> = std::result::Result<T, BundleError>;

/// The parts of an OCI (or Docker) image config that running it needs.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ImageConfig {
    /// CPU architecture, as Go names it.
    pub architecture: Option<String>,
    /// Operating system, as Go names it.
    pub os: Option<String>,
    /// Who made it.
    pub author: Option<String>,
    /// When, RFC 3339.
    pub created: Option<String>,
    config: Option<Execution>,
}

/// `config` of an image config. Docker writes `null` where OCI leaves a field out.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Execution {
    user: Option<String>,
    exposed_ports: Option<BTreeMap<String, Value>>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    volumes: Option<BTreeMap<String, Value>>,
    working_dir: Option<String>,
    labels: Option<BTreeMap<String, Option<String>>>,
    stop_signal: Option<String>,
}

impl ImageConfig {
    /// Parses an image config document.
    ///
    /// # Errors
    /// [`BundleError::Config`] if it is not JSON of the expected shape.
    pub fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(BundleError::Config)
    }

    /// The command line that the image starts on its own: entry point, then arguments.
    pub fn command(&self) -> Vec<String> {
        let Some(execution) = &self.config else { return Vec::new() };
        let entrypoint = execution.entrypoint.iter().flatten();
        entrypoint.chain(execution.cmd.iter().flatten()).cloned().collect()
    }

    /// The image's user; empty is root.
    pub fn user(&self) -> &str {
        self.config.as_ref().and_then(|c| c.user.as_deref()).unwrap_or_default()
    }

    /// Environment, as `NAME=value`.
    pub fn env(&self) -> &[String] {
        self.config.as_ref().and_then(|c| c.env.as_deref()).unwrap_or_default()
    }

    /// Working directory; empty is `/`.
    pub fn working_dir(&self) -> &str {
        self.config.as_ref().and_then(|c| c.working_dir.as_deref()).unwrap_or_default()
    }

    /// Signal that asks it to end, by name or number; SIGTERM for what can be neither, since it becomes
    /// an argument of the runtime's.
    pub fn stop_signal(&self) -> &str {
        let signal = self.config.as_ref().and_then(|c| c.stop_signal.as_deref());
        let can_be = |signal: &&str| {
            // As `SIGRTMIN+3`.
            let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-');
            signal.starts_with(|c: char| c.is_ascii_alphanumeric()) && signal.bytes().all(plain)
        };
        signal.filter(can_be).unwrap_or("SIGTERM")
    }

    /// Ports that the image says it listens on, as `6379/tcp`.
    pub fn exposed_ports(&self) -> impl Iterator<Item = &str> {
        let ports = self.config.iter().filter_map(|c| c.exposed_ports.as_ref());
        ports.flat_map(|ports| ports.keys().map(String::as_str))
    }

    /// Directories whose content outlives the container.
    pub fn volumes(&self) -> impl Iterator<Item = &str> {
        let volumes = self.config.iter().filter_map(|c| c.volumes.as_ref());
        volumes.flat_map(|volumes| volumes.keys().map(String::as_str))
    }
}

/// What the caller sets besides the image config, or in its place.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Arguments in place of the image's `Cmd`, with its entry point. Empty: the image's.
    pub args: Vec<String>,
    /// Replaces the image's `Entrypoint` and drops its `Cmd`; `Some(vec![])` removes both.
    pub entrypoint: Option<Vec<String>>,
    /// `NAME=value`, replacing or added to the image's environment.
    pub env: Vec<String>,
    /// `user[:group]`, each a name or a number, in place of the image's.
    pub user: Option<String>,
    /// In place of the image's working directory.
    pub working_dir: Option<String>,
    /// Host name inside; the bundle directory's name where absent.
    pub hostname: Option<String>,
    /// Give the process a terminal.
    pub terminal: bool,
    /// Rows and columns of that terminal when the process starts.
    pub terminal_size: Option<(u16, u16)>,
    /// Share the host's network instead of an empty network namespace.
    pub host_network: bool,
    /// The root is read-only: scratch directories and volumes get mounts of their own.
    pub readonly: bool,
    /// Directories of a read-only root that can be written to nevertheless.
    pub writable_dirs: Vec<PathBuf>,
    /// They are those of a recorded profile, and volumes may lie over them.
    pub writable_recorded: bool,
    /// Added to the annotations.
    pub annotations: BTreeMap<String, String>,
    /// Directories and files of the host to show inside.
    pub binds: Vec<Bind>,
    /// Where the directories behind the image's volumes are; below the bundle where absent.
    pub volumes: Option<PathBuf>,
    /// A user namespace with this map. The root filesystem must be mounted with the same.
    pub idmap: Option<IdMap>,
    /// The container's cgroup, absolute; the runtime's choice where absent.
    pub cgroup: Option<String>,
    /// Limit of its memory in bytes, including the page cache that it fills.
    pub memory_bytes: Option<u64>,
    /// Limit of its CPU time, in thousandths of one CPU.
    pub cpu_millis: Option<u64>,
}

/// A directory or file of the host that a container sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// On the host; absolute.
    pub source: PathBuf,
    /// Inside; absolute. A read-only root must have it, unless it is below a writable directory.
    pub target: String,
    /// Cannot be written to from inside, nor can what is mounted below it.
    pub readonly: bool,
}

/// The directory of a bundle, held open, so that renaming it or a parent redirects no write.
#[derive(Debug)]
pub struct Bundle {
    fd: OwnedFd,
    path: PathBuf,
}

impl Bundle {
    /// Opens a directory in which a bundle can be made. The caller owns it and nobody else can
    /// change it; `rootfs` is a directory or missing; without `replace` there is no `config.json`.
    ///
    /// # Errors
    /// [`BundleError::Unsafe`], [`BundleError::Exists`], [`BundleError::Io`].
    pub fn open(dir: &Path, replace: bool) -> Result<Self> {
        let path = links::resolve(dir).at("resolving", dir)?;
        let fd = open_own(&path).at("opening", dir)?;
        let fd = fd.map_err(|why| BundleError::Unsafe { path: dir.to_owned(), why })?;
        let bundle = Self { fd, path };
        match bundle.open_rootfs() {
            Err(BundleError::Io(error)) if error.is_missing() => {}
            other => drop(other?),
        }
        match rustix::fs::statat(&bundle.fd, "config.json", AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) if !replace => Err(BundleError::Exists(dir.join("config.json"))),
            _ => Ok(bundle),
        }
    }

    /// A path of the directory that stays right while this is open.
    pub fn held(&self) -> PathBuf {
        path_of(&self.fd).into()
    }

    fn open_rootfs(&self) -> Result<OwnedFd> {
        let path = self.path.join("rootfs");
        match open_directory_below(&self.fd, "rootfs") {
            Err(Errno::LOOP | Errno::NOTDIR) => {
                Err(BundleError::Unsafe { path, why: "not a directory; remove it" })
            }
            other => Ok(other.at("opening", path)?),
        }
    }

    /// Writes `config.json`, replacing an existing one, and makes the volume directories. Users and
    /// mount points are looked up in `rootfs`, else in the bundle's own mounted one; the host's
    /// `/sys` below `host_root` (`/` outside of tests). Returns the written text.
    ///
    /// # Errors
    /// [`BundleError`]; only empty directories are left behind.
    pub fn write(
        &self,
        rootfs: Option<&Path>,
        image: &ImageConfig,
        options: &Options,
        host_root: &Path,
    ) -> Result<Value> {
        let root = match rootfs {
            Some(it) => Rootfs::open(&fs::canonicalize(it).at("resolving", it)?)?,
            None => {
                let (fd, path) = (self.open_rootfs()?, self.path.join("rootfs"));
                if !cofolio_sys::mount::mount_id(&fd, "").is_ok_and(|id| id.is_root) {
                    let why = "not where the image was mounted: somebody moved the bundle";
                    return Err(BundleError::Unsafe { path, why });
                }
                Rootfs { fd, path }
            }
        };
        let place = Place { held: &self.held(), shown: &self.path };
        let config = make(&place, &root, image, options, host_root)?;
        let mut text = serde_json::to_vec_pretty(&config).map_err(BundleError::Config)?;
        text.push(b'\n');
        let (aside, path) = (Path::new("config.json.new"), Path::new("config.json"));
        let written = replace_file(&self.fd, aside, path, &text, Purpose::Record, true);
        written.at("writing", self.path.join(path))?;
        Ok(config)
    }
}

/// How the root filesystem of a container is mounted. Its processes gain no privileges by set-user-ID
/// programs (`noNewPrivileges`); users of the host who reach it must not either. `nodev` where the
/// container makes no device nodes: it has those of `/dev`.
pub fn mount_options(nodev: bool) -> MountOptions {
    MountOptions { nosuid: true, nodev, ..MountOptions::default() }
}

/// Makes the `config.json` that [`Bundle::write`] writes, from resolved paths.
pub(crate) fn generate(
    bundle: &Path,
    rootfs: &Path,
    image: &ImageConfig,
    options: &Options,
    host_root: &Path,
) -> Result<Value> {
    let place = Place { held: bundle, shown: bundle };
    make(&place, &Rootfs::open(rootfs)?, image, options, host_root)
}

/// A directory that is open at `held`, wherever it is moved, and named `shown`.
struct Place<'a> {
    held: &'a Path,
    shown: &'a Path,
}

fn make(
    place: &Place<'_>,
    root: &Rootfs,
    image: &ImageConfig,
    options: &Options,
    host_root: &Path,
) -> Result<Value> {
    let program = program(image, options)?;
    let user = resolve_user(root, &program.user)?;
    let unified = host_root.join("sys/fs/cgroup/cgroup.controllers").exists();
    let mounts = mounts::mounts(place, root, image, options, unified)?;
    let hostname = options.hostname.clone().or_else(|| {
        let mut name = place.shown.file_name()?.to_string_lossy().into_owned();
        while name.len() > HOST_NAME_MAX {
            name.pop();
        }
        Some(name)
    });

    let mut namespaces = vec!["pid", "ipc", "uts", "mount"];
    if !options.host_network {
        namespaces.push("network");
    }
    if unified {
        namespaces.push("cgroup");
    }
    if options.idmap.is_some() {
        namespaces.push("user");
    }
    let namespaces: Vec<Value> = namespaces.into_iter().map(|kind| json!({"type": kind})).collect();

    // A relative path to a root filesystem in the bundle, so that the bundle can be moved.
    let root_path = root.path.strip_prefix(place.shown).unwrap_or(&root.path);
    let mut linux = json!({
        "resources": resources(options),
        "namespaces": namespaces,
        "maskedPaths": words(MASKED_PATHS),
        "readonlyPaths": words(READONLY_PATHS),
        "seccomp": seccomp::profile(std::env::consts::ARCH, options.readonly),
    });
    if let Some(cgroup) = &options.cgroup {
        linux["cgroupsPath"] = json!(cgroup);
    }
    if let Some(idmap) = &options.idmap {
        let ranges = |ranges: &[IdRange]| -> Vec<Value> {
            let range = |r: &IdRange| json!({"containerID": r.inside, "hostID": r.outside, "size": r.count});
            ranges.iter().map(range).collect()
        };
        linux["uidMappings"] = json!(ranges(idmap.uids()));
        linux["gidMappings"] = json!(ranges(idmap.gids()));
    }

    let mut config = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": options.terminal,
            "user": {"uid": user.uid, "gid": user.gid, "additionalGids": user.additional_gids},
            "args": program.command,
            "env": program.env,
            "cwd": program.cwd,
            "capabilities": {
                "bounding": words(CAPABILITIES),
                "effective": words(CAPABILITIES),
                "permitted": words(CAPABILITIES),
            },
            "noNewPrivileges": true,
        },
        "root": {"path": root_path.to_string_lossy(), "readonly": options.readonly},
        "hostname": hostname.unwrap_or_else(|| "cofolio".to_owned()),
        "mounts": mounts,
        "annotations": annotations(image, options),
        "linux": linux,
    });
    if let Some((height, width)) = options.terminal_size {
        config["process"]["consoleSize"] = json!({"height": height, "width": width});
    }
    Ok(config)
}

fn resources(options: &Options) -> Value {
    /// In microseconds; every container tool uses this period.
    const CPU_PERIOD_US: u64 = 100_000;
    let mut resources = json!({"devices": [{"allow": false, "access": "rwm"}]});
    if let Some(bytes) = options.memory_bytes {
        resources["memory"] = json!({"limit": bytes});
    }
    if let Some(millis) = options.cpu_millis {
        let quota = millis.saturating_mul(CPU_PERIOD_US / 1000);
        resources["cpu"] = json!({"quota": quota, "period": CPU_PERIOD_US});
    }
    resources
}

/// What the program of an image is started with, wherever it runs.
pub(crate) struct Program {
    pub(crate) command: Vec<String>,
    pub(crate) env: Vec<String>,
    pub(crate) cwd: String,
    /// `user[:group]`.
    pub(crate) user: String,
}

/// The program of an image, with these options.
///
/// # Errors
/// [`BundleError::OperatingSystem`], [`BundleError::NoCommand`], [`BundleError::BadPath`].
pub(crate) fn program(image: &ImageConfig, options: &Options) -> Result<Program> {
    if let Some(os) = image.os.as_deref().filter(|os| !os.is_empty() && *os != "linux") {
        return Err(BundleError::OperatingSystem(os.to_owned()));
    }
    let cwd = options.working_dir.as_deref().unwrap_or_else(|| image.working_dir());
    Ok(Program {
        command: command(image, options)?,
        env: environment(image, options),
        cwd: working_dir(cwd)?,
        user: options.user.as_deref().unwrap_or_else(|| image.user()).to_owned(),
    })
}

/// The command line: the image's entry point and arguments, overridden as by `docker run`.
///
/// # Errors
/// [`BundleError::NoCommand`] if it is empty.
pub fn command(image: &ImageConfig, options: &Options) -> Result<Vec<String>> {
    let execution = image.config.as_ref();
    let (entrypoint, cmd) = match &options.entrypoint {
        // The image's Cmd was written for the image's entry point.
        Some(entrypoint) => (entrypoint.clone(), Vec::new()),
        None => (
            execution.and_then(|c| c.entrypoint.clone()).unwrap_or_default(),
            execution.and_then(|c| c.cmd.clone()).unwrap_or_default(),
        ),
    };
    let mut command = entrypoint;
    command.extend(if options.args.is_empty() { cmd } else { options.args.clone() });
    // `exec` would refuse an empty first word without naming anything.
    if command.first().is_none_or(String::is_empty) {
        return Err(BundleError::NoCommand);
    }
    Ok(command)
}

fn environment(image: &ImageConfig, options: &Options) -> Vec<String> {
    let name = |entry: &str| entry.split('=').next().unwrap_or_default().to_owned();
    let mut env: Vec<String> = image.env().to_vec();
    for entry in &options.env {
        match env.iter_mut().find(|have| name(have) == name(entry)) {
            Some(have) => have.clone_from(entry),
            None => env.push(entry.clone()),
        }
    }
    if !env.iter().any(|entry| entry.starts_with("PATH=")) {
        env.insert(0, DEFAULT_PATH.to_owned());
    }
    if options.terminal && !env.iter().any(|entry| entry.starts_with("TERM=")) {
        env.push("TERM=xterm".to_owned());
    }
    env
}

fn working_dir(path: &str) -> Result<String> {
    // Docker accepts `WORKDIR srv` at the start of a build and means `/srv`.
    let path = format!("/{}", path.trim_start_matches('/'));
    plain_path("WorkingDir", &path)?;
    Ok(path)
}

fn plain_path(what: &'static str, path: &str) -> Result<()> {
    let plain = path.starts_with('/')
        && !path.contains('\0')
        && !path.split('/').any(|component| component == "..");
    plain.then_some(()).ok_or_else(|| BundleError::BadPath { what, path: path.to_owned() })
}

/// What the image says of itself, for whoever reads the bundle. Runtimes take orders from other
/// annotations: crun (`run.oci.*`), runc (`org.systemd.property.*`) and others, as root. So of the
/// labels, which conversion.md makes annotations, only descriptions are.
fn annotations(image: &ImageConfig, options: &Options) -> BTreeMap<String, String> {
    const OF_IMAGE: &str = "org.opencontainers.image.";
    let mut annotations = BTreeMap::new();
    let mut put = |name: &str, value: Option<String>| {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            annotations.insert(format!("{OF_IMAGE}{name}"), value);
        }
    };
    put("os", image.os.clone());
    put("architecture", image.architecture.clone());
    put("author", image.author.clone());
    put("created", image.created.clone());
    put("stopSignal", image.config.as_ref().and_then(|c| c.stop_signal.clone()));
    put("exposedPorts", Some(image.exposed_ports().collect::<Vec<_>>().join(",")));
    // conversion.md: an explicit label takes precedence over what is derived.
    if let Some(labels) = image.config.as_ref().and_then(|c| c.labels.as_ref()) {
        for (name, value) in labels.iter().filter(|(name, _)| name.starts_with(OF_IMAGE)) {
            annotations.insert(name.clone(), value.clone().unwrap_or_default());
        }
    }
    annotations.extend(options.annotations.clone());
    annotations
}

#[cfg(test)]
mod tests;
