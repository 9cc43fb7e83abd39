//! An OCI runtime bundle from an image config: the `config.json` that `runc run` and `crun run` start.
//!
//! ```text
//! <bundle>/config.json        written here
//! <bundle>/rootfs             the image, mounted by the caller (or any directory the caller names)
//! <bundle>/volumes/<path>     one directory per `Volumes` entry, where the root is read-only; `/` in
//!                             the path is written `%2F`, so that no volume is inside another
//! ```
//!
//! A bundle belongs to the user who makes it, which is root: what other users can change in it could
//! lead root's writes and mounts elsewhere.
//!
//! What becomes what follows the image specification's `conversion.md`; capabilities, mounts, masked
//! and read-only paths are those that `containerd` and `runc spec` start an ordinary container with.
//! The seccomp profile is Docker's default one. Users are looked up in the image's own `/etc/passwd` and
//! `/etc/group`, which are opened so that no symbolic link of the image can lead outside it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use serde::Deserialize;
use serde_json::{Value, json};

use cofolio_sys::userns::IdRange;

use crate::mount::IdMap;
use accounts::{ACCOUNT_FILE_BYTES_MAX, Rootfs, resolve_user};

mod accounts;
#[cfg(fuzzing)]
pub mod fuzz;
mod seccomp;

pub use accounts::{User, resolve_user_in};

/// The search path of a container whose image sets none.
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What containerd and Docker leave an ordinary container.
const CAPABILITIES: [&str; 14] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FSETID",
    "CAP_FOWNER",
    "CAP_MKNOD",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETFCAP",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_KILL",
    "CAP_AUDIT_WRITE",
];

/// Files of `/proc` and `/sys` that tell a container about the host (containerd's list).
const MASKED_PATHS: [&str; 11] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

/// Files of `/proc` through which a container could change the host (containerd's list).
const READONLY_PATHS: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Writable scratch that programs expect even of a read-only root; mounted where the image has them.
const SCRATCH_PATHS: [&str; 3] = ["/tmp", "/var/tmp", "/run"];

/// Why no bundle was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The image config is not what the OCI image specification says.
    #[error("image config: {0}")]
    Config(#[source] serde_json::Error),
    /// The image is of another operating system, so that no process of it could run here.
    #[error("image config: operating system `{0}`, not linux")]
    OperatingSystem(String),
    /// Neither the image nor the caller says what to run.
    #[error("the image has no command (no Entrypoint, no Cmd) and none was given")]
    NoCommand,
    /// A user or group that the image's account files do not have.
    #[error("{kind} `{name}` is not in the image's {file}")]
    UnknownAccount {
        /// `user` or `group`.
        kind: &'static str,
        /// As the image config or the caller gives it.
        name: String,
        /// `/etc/passwd` or `/etc/group`.
        file: &'static str,
    },
    /// A read-only root lacks a directory that something has to be mounted on.
    #[error("read-only root: the image has no {0} to mount on")]
    MissingMountPoint(String),
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
    #[error("{doing} {}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, BundleError>;

/// The parts of an OCI (or Docker) image config that running it needs.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ImageConfig {
    /// CPU architecture, as Go names it.
    #[serde(default)]
    pub architecture: Option<String>,
    /// Operating system, as Go names it.
    #[serde(default)]
    pub os: Option<String>,
    /// Who made it.
    #[serde(default)]
    pub author: Option<String>,
    /// When, RFC 3339.
    #[serde(default)]
    pub created: Option<String>,
    /// How to run it.
    #[serde(default)]
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
    /// Parse an image config document.
    ///
    /// # Errors
    /// [`BundleError::Config`] where it is not JSON of the expected shape.
    pub fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(BundleError::Config)
    }

    /// The command line that the image starts on its own: entry point, then arguments.
    pub fn command(&self) -> Vec<String> {
        let Some(execution) = &self.config else { return Vec::new() };
        let entrypoint = execution.entrypoint.iter().flatten();
        entrypoint.chain(execution.cmd.iter().flatten()).cloned().collect()
    }

    /// The user that the image wants to run as; empty is root.
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

    /// Signal that asks it to end, by name or number.
    pub fn stop_signal(&self) -> &str {
        let signal = self.config.as_ref().and_then(|c| c.stop_signal.as_deref());
        signal.filter(|signal| !signal.is_empty()).unwrap_or("SIGTERM")
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

/// What the caller wants otherwise than the image says.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Arguments in place of the image's `Cmd`; the entry point stays. Empty: the image's.
    pub args: Vec<String>,
    /// In place of the image's `Entrypoint`, whose `Cmd` then no longer applies. `Some(vec![])` removes it.
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
    /// Share the host's network instead of an empty network namespace.
    pub host_network: bool,
    /// The root is not writable: scratch directories and volumes get mounts of their own.
    pub readonly: bool,
    /// Added to the annotations.
    pub annotations: BTreeMap<String, String>,
    /// Directories and files of the host that appear inside.
    pub binds: Vec<Bind>,
    /// Where the directories behind the image's volumes are; below the bundle where absent.
    pub volumes: Option<PathBuf>,
    /// A user namespace with this map. The root filesystem must be mounted with the same.
    pub idmap: Option<IdMap>,
    /// The container's cgroup, absolute; the runtime's choice where absent.
    pub cgroup: Option<String>,
    /// Bytes of memory that it may use, page cache that it fills included.
    pub memory_bytes: Option<u64>,
    /// How much of the machine's CPUs it may use, in thousandths of one CPU.
    pub cpu_millis: Option<u64>,
}

/// A directory or file of the host that a container sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// On the host; absolute.
    pub source: PathBuf,
    /// Inside; absolute. A read-only root must have it.
    pub target: String,
    /// Cannot be written to from inside.
    pub readonly: bool,
}

/// Checks that a bundle can be made in a directory: that only its owner, who must be the caller, can
/// change it, that its `rootfs` is a directory or missing, and, unless `replace`, that it has no
/// `config.json`.
///
/// # Errors
/// [`BundleError::Unsafe`], [`BundleError::Exists`], [`BundleError::Io`].
pub fn check(dir: &Path, replace: bool) -> Result<()> {
    let fd = open_own(dir)?;
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat2(&fd, "rootfs", flags, Mode::empty(), beneath) {
        Ok(_) | Err(Errno::NOENT) => {}
        Err(Errno::LOOP | Errno::NOTDIR) => {
            let why = "not a directory; remove it";
            return Err(BundleError::Unsafe { path: dir.join("rootfs"), why });
        }
        Err(errno) => return Err(io_error("opening", &dir.join("rootfs"))(errno.into())),
    }
    match rustix::fs::statat(&fd, "config.json", AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) if !replace => Err(BundleError::Exists(dir.join("config.json"))),
        _ => Ok(()),
    }
}

/// Opens a directory that nobody but the caller can change.
fn open_own(dir: &Path) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(dir, flags, Mode::empty());
    let fd = fd.map_err(|errno| io_error("opening", dir)(errno.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| io_error("reading", dir)(errno.into()))?;
    let why = if stat.st_uid != rustix::process::geteuid().as_raw() {
        "belongs to another user, who could redirect writes and mounts in it"
    } else if stat.st_mode & 0o022 != 0 {
        "other users can write to it, and could redirect writes and mounts in it"
    } else {
        return Ok(fd);
    };
    Err(BundleError::Unsafe { path: dir.to_owned(), why })
}

/// Writes `config.json` (and the volume directories) of a bundle whose root filesystem is at `rootfs`.
/// An existing `config.json` is replaced; [`check`] tells whether there is one.
///
/// `rootfs` must exist, and be mounted if it is an image: users and mount points are looked up in it.
/// `host_root` is where the host's `/sys` is found (`/` outside of tests). Returns what was written.
///
/// # Errors
/// [`BundleError`]; nothing is left behind but empty directories.
pub fn write(
    bundle: &Path,
    rootfs: &Path,
    image: &ImageConfig,
    options: &Options,
    host_root: &Path,
) -> Result<Value> {
    let bundle = absolute(bundle)?;
    let rootfs = absolute(rootfs)?;
    let config = generate(&bundle, &rootfs, image, options, host_root)?;
    let mut text = serde_json::to_vec_pretty(&config).map_err(BundleError::Config)?;
    text.push(b'\n');
    replace_config(&bundle, &text)?;
    Ok(config)
}

/// What [`write()`] writes; both paths are resolved already.
pub(crate) fn generate(
    bundle: &Path,
    rootfs: &Path,
    image: &ImageConfig,
    options: &Options,
    host_root: &Path,
) -> Result<Value> {
    let root = &Rootfs::open(rootfs)?;
    if let Some(os) = image.os.as_deref().filter(|os| !os.is_empty() && *os != "linux") {
        return Err(BundleError::OperatingSystem(os.to_owned()));
    }
    let args = command(image, options)?;
    let user = resolve_user(root, options.user.as_deref().unwrap_or_else(|| image.user()))?;
    let cwd = working_dir(options.working_dir.as_deref().unwrap_or_else(|| image.working_dir()))?;
    let unified = host_root.join("sys/fs/cgroup/cgroup.controllers").exists();
    let mounts = mounts(bundle, root, image, options, unified)?;
    let hostname = options.hostname.clone().or_else(|| {
        bundle.file_name().map(|name| name.to_string_lossy().chars().take(63).collect())
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

    // A root filesystem beside the config is named relative to it, so that the bundle can be moved.
    let root_path = match rootfs.strip_prefix(bundle) {
        Ok(inside) => inside.to_path_buf(),
        Err(_) => rootfs.to_path_buf(),
    };

    let mut linux = json!({
        "resources": resources(options),
        "namespaces": namespaces,
        "maskedPaths": MASKED_PATHS,
        "readonlyPaths": READONLY_PATHS,
        "seccomp": seccomp::profile(std::env::consts::ARCH),
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

    Ok(json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": options.terminal,
            "user": {"uid": user.uid, "gid": user.gid, "additionalGids": user.additional_gids},
            "args": args,
            "env": environment(image, options),
            "cwd": cwd,
            "capabilities": {
                "bounding": CAPABILITIES,
                "effective": CAPABILITIES,
                "permitted": CAPABILITIES,
            },
            "noNewPrivileges": true,
        },
        "root": {"path": root_path.to_string_lossy(), "readonly": options.readonly},
        "hostname": hostname.unwrap_or_else(|| "cofolio".to_owned()),
        "mounts": mounts,
        "annotations": annotations(image, options),
        "linux": linux,
    }))
}

fn resources(options: &Options) -> Value {
    /// In microseconds; what every container tool uses.
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

/// The command line of a bundle: the image's entry point and arguments, overridden the way `docker run`
/// does it.
///
/// # Errors
/// [`BundleError::NoCommand`] where nothing is left to run.
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
    // An empty first word is what `exec` would fail on, with a message that names nothing.
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

fn annotations(image: &ImageConfig, options: &Options) -> BTreeMap<String, String> {
    let mut annotations = BTreeMap::new();
    let mut put = |name: &str, value: Option<String>| {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            annotations.insert(format!("org.opencontainers.image.{name}"), value);
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
        for (name, value) in labels.iter().filter(|(name, _)| !name.is_empty()) {
            annotations.insert(name.clone(), value.clone().unwrap_or_default());
        }
    }
    annotations.extend(options.annotations.clone());
    annotations
}

fn mounts(
    bundle: &Path,
    root: &Rootfs,
    image: &ImageConfig,
    options: &Options,
    unified: bool,
) -> Result<Vec<Value>> {
    let mount = |destination: &str, kind: &str, source: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": source, "options": options});
    let mut mounts = vec![
        mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount(
            "/dev/shm",
            "tmpfs",
            "shm",
            &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
        ),
        mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
    ];
    // A process in the host's network namespace must not get a sysfs of its own: its owner would be
    // the initial user namespace and the mount is refused; the host's, read-only, shows the same.
    mounts.push(if options.host_network {
        mount("/sys", "bind", "/sys", &["rbind", "nosuid", "noexec", "nodev", "ro"])
    } else {
        mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"])
    });
    if !options.host_network || !unified {
        mounts.push(mount(
            "/sys/fs/cgroup",
            "cgroup",
            "cgroup",
            &["nosuid", "noexec", "nodev", "relatime", "ro"],
        ));
    }
    if options.host_network {
        let files = ["/etc/resolv.conf", "/etc/hosts"];
        let files = files.map(|file| (file, root.exists(file)));
        // A writable root gets a missing file to mount on from the runtime. A read-only one gets its
        // `/etc` in memory, with what the image has there.
        if options.readonly && files.iter().any(|(_, exists)| !exists) && root.exists("/etc") {
            mounts.push(mount(
                "/etc",
                "tmpfs",
                "tmpfs",
                &["nosuid", "nodev", "tmpcopyup", "mode=755"],
            ));
        }
        for (file, exists) in files {
            if Path::new(file).exists() && (exists || !options.readonly || root.exists("/etc")) {
                mounts.push(mount(file, "bind", file, &["bind", "ro"]));
            }
        }
    }
    if options.readonly {
        for path in ["/proc", "/dev", "/sys"] {
            if !root.exists(path) {
                return Err(BundleError::MissingMountPoint(path.to_owned()));
            }
        }
        let volumes: Vec<&str> = image.volumes().collect();
        for path in SCRATCH_PATHS {
            if root.exists(path) && !volumes.contains(&path) {
                let mode = if path == "/run" { "mode=755" } else { "mode=1777" };
                mounts.push(mount(path, "tmpfs", "tmpfs", &["nosuid", "nodev", "tmpcopyup", mode]));
            }
        }
        for path in volumes {
            plain_path("volume", path)?;
            // A directory of the host's in its place.
            if options.binds.iter().any(|bind| bind.target == path) {
                continue;
            }
            let below = options.volumes.clone().unwrap_or_else(|| bundle.join("volumes"));
            let source = volume(&below, root, path)?;
            mounts.push(mount(path, "bind", &source.to_string_lossy(), &["rbind", "rw"]));
        }
    }
    for bind in &options.binds {
        plain_path("volume", &bind.target)?;
        if options.readonly && !root.exists(&bind.target) && !below_a_mount(&mounts, &bind.target) {
            return Err(BundleError::MissingMountPoint(bind.target.clone()));
        }
        let mode = if bind.readonly { "ro" } else { "rw" };
        let source = bind.source.to_string_lossy();
        mounts.push(mount(&bind.target, "bind", &source, &["rbind", "rprivate", mode]));
    }
    Ok(mounts)
}

/// Whether a path lies in something that is mounted over the image and can be written to.
fn below_a_mount(mounts: &[Value], path: &str) -> bool {
    mounts.iter().filter_map(|mount| mount["destination"].as_str()).any(|above| {
        SCRATCH_PATHS.contains(&above)
            && path.strip_prefix(above).is_some_and(|rest| rest.starts_with('/'))
    })
}

/// The directory on the host behind a volume: empty at first, owned as the image's directory is.
///
/// A volume inside another one would be a path through a directory that containers write to, who could
/// put a symbolic link to the host there. So all are beside each other.
fn volume(below: &Path, root: &Rootfs, path: &str) -> Result<PathBuf> {
    let inside = root
        .open_beneath(path, OFlags::PATH | OFlags::DIRECTORY)
        .map_err(|_| BundleError::MissingMountPoint(path.to_owned()))?;
    let stat = rustix::fs::statat(&inside, "", AtFlags::EMPTY_PATH)
        .map_err(|errno| io_error("reading", Path::new(path))(errno.into()))?;
    let components = path.split('/').filter(|component| !component.is_empty());
    let directory = below
        .join(components.collect::<Vec<_>>().join("/").replace('%', "%25").replace('/', "%2F"));
    if !directory.exists() {
        fs::create_dir_all(&directory).map_err(io_error("creating", &directory))?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(stat.st_mode & 0o7777))
            .map_err(io_error("setting the mode of", &directory))?;
        let have = fs::metadata(&directory).map_err(io_error("reading", &directory))?;
        if (have.uid(), have.gid()) != (stat.st_uid, stat.st_gid) {
            std::os::unix::fs::chown(&directory, Some(stat.st_uid), Some(stat.st_gid))
                .map_err(io_error("setting the owner of", &directory))?;
        }
    }
    Ok(directory)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    fs::canonicalize(path).map_err(io_error("resolving", path))
}

/// Replaces `config.json` in one step: a runtime that starts meanwhile sees the old one or the new one.
fn replace_config(bundle: &Path, content: &[u8]) -> Result<()> {
    const NEW: &str = "config.json.new";
    let dir = open_own(bundle)?;
    let write = || -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let _ = rustix::fs::unlinkat(&dir, NEW, AtFlags::empty());
        let mode = Mode::from_raw_mode(0o644);
        let mut file = File::from(rustix::fs::openat(&dir, NEW, flags, mode)?);
        file.write_all(content)?;
        file.sync_all()?;
        Ok(rustix::fs::renameat(&dir, NEW, &dir, "config.json")?)
    };
    write().map_err(io_error("writing", &bundle.join("config.json")))
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BundleError {
    let path = path.to_path_buf();
    move |source| BundleError::Io { doing, path, source }
}

#[cfg(test)]
mod tests;
