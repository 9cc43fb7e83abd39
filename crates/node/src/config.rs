//! The configuration file: what an operator sets once for a machine.
//!
//! A flag overrides a variable, a variable the file, the file the default. Every setting is a field
//! below [`Config`] with its default, and is in `docs/config.toml`; a test compares the two.
//!
//! To add a section: a struct (`Serialize`, `Deserialize` with [`deny_unknown_fields`][serde],
//! `Default`), a field of [`Config`], and its lines in `docs/config.toml`.
//!
//! [serde]: https://serde.rs/container-attrs.html#deny_unknown_fields

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use cofolio_image::files;
use cofolio_image::reference::Reference;
use cofolio_image::registry::{HostOptions, RegistryOptions};
use cofolio_image::trust::{Require, Rule};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::commons::COMMONS_LIMIT_MIN;
use crate::size::Size;

/// Directory of the store unless a setting says otherwise.
pub const DEFAULT_STORE: &str = "/var/lib/cofolio";
/// Directory of the runtime state unless a setting says otherwise.
pub const DEFAULT_RUN_DIR: &str = "/run/cofolio";
/// Where the file is unless `--config` or `COFOLIO_CONFIG` says otherwise. It need not exist.
pub const DEFAULT_PATH: &str = "/etc/cofolio/config.toml";
/// The file with every default, commented.
pub const DOCUMENTED: &str = include_str!("../../../docs/config.toml");
/// Largest file that is read, in bytes.
const SIZE_MAX: u64 = 1 << 20;

/// All that a configuration file can say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// `[store]`
    pub store: Store,
    /// `[registry."HOST"]`, by host as in names of images.
    pub registry: BTreeMap<String, Registry>,
    /// `[run]`
    pub run: Run,
    /// `[commons]`
    pub commons: Commons,
    /// `[trust]`
    pub trust: Trust,
    /// `[daemon]`
    pub daemon: Daemon,
    /// `[vm]`
    pub vm: Vm,
    /// `[ksm]`
    pub ksm: Ksm,
}

/// `[store]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    /// Directory of the store.
    pub path: PathBuf,
    /// Name of the trust domain.
    pub domain: String,
    /// Directory of the runtime state.
    pub run_dir: PathBuf,
    /// `[store.limit]`
    pub limit: Limit,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            path: DEFAULT_STORE.into(),
            domain: cofolio_store::DEFAULT_DOMAIN.to_owned(),
            run_dir: DEFAULT_RUN_DIR.into(),
            limit: Limit::default(),
        }
    }
}

/// `[store.limit]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limit {
    /// What the domain may take on disk.
    pub size: Option<Size>,
    /// Images used within so many days stay, even over the size.
    pub keep_days: u32,
}

/// `[registry."HOST"]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Registry {
    /// Registries to ask before it: `host[:port][/prefix]`.
    pub mirrors: Vec<String>,
    /// Plain HTTP may be used.
    pub insecure: bool,
}

/// `[run]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Run {
    /// Name or path of the OCI runtime.
    pub runtime: Option<String>,
}

/// `[commons]`: pages that are charged to no container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Commons {
    /// What is read ahead when an image is mounted.
    pub warm: Warm,
    /// What the commons may hold, of all images together.
    #[serde(deserialize_with = "limit")]
    pub limit: Option<Size>,
}

/// A limit of the commons, such as `4 GiB`: at least [`COMMONS_LIMIT_MIN`].
///
/// # Errors
/// What is wrong with it, for a person.
pub fn commons_limit(text: &str) -> Result<Size, String> {
    let limit: Size = text.parse()?;
    match limit >= COMMONS_LIMIT_MIN {
        true => Ok(limit),
        false => Err(format!(
            "{limit} is too small: the process that reads ahead is charged to the commons, too, \
             and takes at least {COMMONS_LIMIT_MIN}"
        )),
    }
}

fn limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Size>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let limit = commons_limit(&text);
    limit.map(Some).map_err(|error| D::Error::custom(format!("commons.limit: {error}")))
}

/// An address to listen at, such as `127.0.0.1:9471`. Names of hosts are not looked up.
///
/// # Errors
/// What is wrong with it, for a person.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let needed = |_| format!("`{text}` is not an IP address and a port, such as 127.0.0.1:9471");
    text.parse().map_err(needed)
}

fn listen<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    let address = listen_address(&String::deserialize(deserializer)?);
    address.map(Some).map_err(|error| D::Error::custom(format!("daemon.listen: {error}")))
}

/// What is read ahead when an image is mounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Warm {
    /// Nothing.
    #[default]
    Never,
    /// What the image's profile names.
    Profile,
    /// All files of the image.
    All,
}

/// `[daemon]`: what `cofolio serve` does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Daemon {
    /// Path of the unix socket.
    pub socket: Option<PathBuf>,
    /// Group whose members may connect to it.
    pub group: Option<String>,
    /// A TCP address to listen at.
    #[serde(deserialize_with = "listen")]
    pub listen: Option<SocketAddr>,
    /// PEM file with the certificate for that address.
    pub tls_certificate: Option<PathBuf>,
    /// PEM file with its key.
    pub tls_key: Option<PathBuf>,
    /// PEM file with the authorities of clients' certificates.
    pub tls_client_ca: Option<PathBuf>,
    /// File with the token of clients.
    pub token_file: Option<PathBuf>,
    /// Seconds from one look at objects and processes to the next, 1 to 3600.
    #[serde(deserialize_with = "period")]
    pub period: u32,
    /// Percent of one processor that the ledger may take by itself, 0.01 to 100.
    #[serde(deserialize_with = "cpu_percent")]
    pub cpu_percent: f64,
    /// Hours from one garbage collection to the next; 0 for never.
    pub gc_hours: u32,
    /// Days from the end of a scrub to the next; 0 for never.
    pub scrub_days: u32,
    /// Bytes per second that a scrub reads at most, from 1.
    #[serde(deserialize_with = "scrub_rate")]
    pub scrub_rate: Size,
    /// `[daemon.reclaim]`
    pub reclaim: Reclaim,
}

impl Default for Daemon {
    fn default() -> Self {
        Self {
            socket: None,
            group: None,
            listen: None,
            tls_certificate: None,
            tls_key: None,
            tls_client_ca: None,
            token_file: None,
            period: 10,
            // With the answers to a scraper the daemon then takes less than 1 %.
            cpu_percent: 0.9,
            gc_hours: 24,
            scrub_days: 30,
            scrub_rate: Size(20 << 20),
            reclaim: Reclaim::default(),
        }
    }
}

fn period<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    in_range("daemon.period", 1..=3600, deserializer)
}

fn cpu_percent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    in_range("daemon.cpu_percent", 0.01..=100.0, deserializer)
}

fn scrub_rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
    match Size::deserialize(deserializer)? {
        Size(0) => Err(D::Error::custom(
            "daemon.scrub_rate is at least 1; `scrub_days = 0` turns scrubs off",
        )),
        rate => Ok(rate),
    }
}

fn in_range<'de, T: Deserialize<'de> + PartialOrd + fmt::Display, D: Deserializer<'de>>(
    key: &str,
    range: RangeInclusive<T>,
    deserializer: D,
) -> Result<T, D::Error> {
    let value = T::deserialize(deserializer)?;
    if range.contains(&value) {
        return Ok(value);
    }
    let (min, max) = (range.start(), range.end());
    Err(D::Error::custom(format!("{key} is {min} to {max}, not {value}")))
}

/// `[daemon.reclaim]`: what `cofolio serve` drops from the page cache by itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reclaim {
    /// What goes for each cgroup under memory pressure, and for the machine, in each period; 0 for
    /// nothing.
    pub size: Size,
    /// From how many percent of the time on, spent waiting for memory, there is pressure.
    #[serde(deserialize_with = "pressure")]
    pub pressure_percent: f64,
    /// What removed containers used goes, if no other one uses it.
    pub drop_left_behind: bool,
}

impl Default for Reclaim {
    fn default() -> Self {
        Self { size: Size(0), pressure_percent: 10.0, drop_left_behind: false }
    }
}

/// From 0 percent on there would be pressure at all times.
fn pressure<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    in_range("daemon.reclaim.pressure_percent", 0.01..=100.0, deserializer)
}

/// `[vm]`: virtual machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Vm {
    /// Kernel of guests.
    pub kernel: Option<PathBuf>,
    /// Whether the daemon returns memory that guests have freed.
    pub recycle: bool,
    /// Seconds from one look at a guest's free memory to the next, 1 to 60.
    #[serde(deserialize_with = "recycle_seconds")]
    pub recycle_seconds: u32,
    /// Free memory that it leaves each guest.
    pub reserve: Size,
    /// Percent of one processor that it takes for that, 0.1 to 100.
    #[serde(deserialize_with = "recycle_cpu_percent")]
    pub recycle_cpu_percent: f64,
    /// Whether the daemon merges pages that guests of a trust domain have in common.
    pub merge: bool,
    /// Seconds from one look at guests' pages to the next, 1 to 3600.
    #[serde(deserialize_with = "merge_seconds")]
    pub merge_seconds: u32,
    /// Percent of one processor that it takes for that, shims included, 0.1 to 10000.
    #[serde(deserialize_with = "merge_cpu_percent")]
    pub merge_cpu_percent: f64,
    /// Shortest run of equal pages that it merges, 1 to 512. Each run takes a mapping of the VMM's.
    #[serde(deserialize_with = "merge_min_pages")]
    pub merge_min_pages: u32,
    /// Whether it merges blocks of 2 MiB as a whole, or not at all.
    pub merge_blocks: bool,
}

impl Default for Vm {
    fn default() -> Self {
        Self {
            kernel: None,
            recycle: true,
            recycle_seconds: 1,
            reserve: Size(32 << 20),
            recycle_cpu_percent: 5.0,
            merge: true,
            merge_seconds: 60,
            merge_cpu_percent: 50.0,
            merge_min_pages: 4,
            merge_blocks: false,
        }
    }
}

fn merge_seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    in_range("vm.merge_seconds", 1..=3600, deserializer)
}

fn merge_cpu_percent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    in_range("vm.merge_cpu_percent", 0.1..=10_000.0, deserializer)
}

fn merge_min_pages<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    in_range("vm.merge_min_pages", 1..=512, deserializer)
}

fn recycle_seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    in_range("vm.recycle_seconds", 1..=60, deserializer)
}

fn recycle_cpu_percent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    in_range("vm.recycle_cpu_percent", 0.1..=100.0, deserializer)
}

/// `[ksm]`: merging by the kernel, which knows no trust domains.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ksm {
    /// Whether the daemon turns it on and sets its pace.
    pub steer: bool,
    /// Percent of one processor that it may take, 0.1 to 100.
    #[serde(deserialize_with = "ksm_cpu_percent")]
    pub cpu_percent: f64,
}

impl Default for Ksm {
    fn default() -> Self {
        Self { steer: false, cpu_percent: 10.0 }
    }
}

fn ksm_cpu_percent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    in_range("ksm.cpu_percent", 0.1..=100.0, deserializer)
}

/// `[trust]`: what is asked of images.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Trust {
    /// Of images that no section below is for.
    pub require: Require,
    /// Files with ed25519 keys.
    pub signed_by: Vec<PathBuf>,
    /// Files with keys of cosign.
    pub cosign_keys: Vec<PathBuf>,
    /// `[trust.ref."PATTERN"]`
    #[serde(rename = "ref")]
    pub refs: BTreeMap<String, Rule>,
}

/// Where the value of a setting comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Nothing sets it.
    Default,
    /// The configuration file.
    File,
    /// An environment variable.
    Env,
    /// A flag of the command line.
    Flag,
}

/// The word for it, which is also that of JSON.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// One setting as `config show` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// `section.key`, parts quoted where TOML would.
    pub key: String,
    /// `null` where nothing is set and there is no default.
    pub value: Value,
    /// What set it.
    pub from: Origin,
}

/// The settings in force, and where each comes from.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// The settings.
    pub config: Config,
    /// The file that was read.
    pub file: Option<PathBuf>,
    in_file: BTreeMap<String, Value>,
    overridden: BTreeMap<&'static str, Origin>,
}

impl Config {
    /// All paths in it but that of a runtime, which may be a name.
    fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let Self { store, trust, daemon, vm, .. } = self;
        let keys =
            trust.refs.values_mut().flat_map(|rule| [&mut rule.signed_by, &mut rule.cosign_keys]);
        let keys = keys.chain([&mut trust.signed_by, &mut trust.cosign_keys]).flatten();
        let Daemon { socket, tls_certificate, tls_key, tls_client_ca, token_file, .. } = daemon;
        let of_daemon = [socket, tls_certificate, tls_key, tls_client_ca, token_file];
        let others = of_daemon.into_iter().chain([&mut vm.kernel]).filter_map(Option::as_mut);
        [&mut store.path, &mut store.run_dir].into_iter().chain(keys).chain(others)
    }
}

impl Loaded {
    /// Reads a configuration file. `None` if it does not exist. A relative path in it is below the
    /// file's directory, wherever the program was started: keys that are trusted are among them.
    pub fn read(path: &Path) -> Result<Option<Self>, ConfigError> {
        let text = match read_bounded(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(ConfigError::Io { path: path.to_owned(), source }),
        };
        let mut config = parse(&text, path)?;
        let dir = std::path::absolute(path).map(|file| file.parent().map(Path::to_owned));
        if let Ok(Some(dir)) = dir {
            let given = config.paths().filter(|path| !path.as_os_str().is_empty());
            given.for_each(|path| *path = dir.join(&path));
            // Others are looked for in PATH.
            if let Some(program) = config.run.runtime.as_mut().filter(|it| it.contains('/')) {
                *program = dir.join(&program).to_string_lossy().into_owned();
            }
        }
        // It has just been read as a `Config`, so it is a table.
        let in_file = flatten(&toml::from_str(&text).unwrap_or_default());
        Ok(Some(Self { config, file: Some(path.to_owned()), in_file, ..Self::default() }))
    }

    /// Records the origin of a setting that the caller set in [`Loaded::config`].
    pub fn set_origin(&mut self, key: &'static str, origin: Origin) {
        self.overridden.insert(key, origin);
    }

    /// Where the value of a setting is from.
    pub fn origin(&self, key: &str) -> Origin {
        match self.overridden.get(key) {
            Some(origin) => *origin,
            None if self.in_file.contains_key(key) => Origin::File,
            None => Origin::Default,
        }
    }

    /// Every setting, sorted by key.
    pub fn settings(&self) -> Vec<Setting> {
        let config = serde_json::to_value(&self.config).unwrap_or_default();
        let settings = flatten(&config).into_iter().map(|(key, value)| {
            let from = self.origin(&key);
            Setting { key, value, from }
        });
        settings.collect()
    }
}

impl Config {
    /// How to talk to registries.
    ///
    /// # Errors
    /// [`ConfigError::Registry`] for a host to which no image name leads: its section would be
    /// ignored.
    pub fn registry_options(&self) -> Result<RegistryOptions, ConfigError> {
        let mut options = RegistryOptions::default();
        for (host, settings) in &self.registry {
            let as_in_names = Reference::parse(&format!("{host}/x"));
            if as_in_names.map_or(true, |name| name.host() != host) {
                return Err(ConfigError::Registry { host: host.clone() });
            }
            let HostOptions { mirrors, insecure } = options.hosts.entry(host.clone()).or_default();
            mirrors.clone_from(&settings.mirrors);
            *insecure = settings.insecure;
        }
        Ok(options)
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("reading the configuration {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not a valid configuration.
    #[error("{}:{} {message}", path.display(), line.map_or_else(String::new, |line| format!("{line}:")))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line, the first is 1.
        line: Option<usize>,
        /// Why.
        message: String,
        /// The known key that is most like an unknown one.
        meant: Option<String>,
    },
    /// A section is for something that is not a registry's host.
    #[error("the configuration's [registry.{host:?}]: not a registry's host")]
    Registry {
        /// As the file has it.
        host: String,
    },
}

fn read_bounded(path: &Path) -> io::Result<String> {
    use io::Read as _;
    let mut text = String::new();
    files::open(path)?.take(SIZE_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > SIZE_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(text)
}

fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().and_then(|span| text.get(..span.start));
        let line = line.map(|before| before.matches('\n').count() + 1);
        let message = error.message().replace('\n', "; ");
        let meant = meant(&message);
        ConfigError::Invalid { path: path.to_owned(), line, message, meant }
    })
}

/// serde says "unknown field `siz`, expected `size` or `keep_days`": which one is closest?
fn meant(message: &str) -> Option<String> {
    let mut quoted = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let given = quoted.next()?;
    let near = quoted.map(|key| (strsim::damerau_levenshtein(given, key), key)).min()?;
    (near.0 <= 2.max(given.len() / 3)).then(|| near.1.to_owned())
}

/// The leaves of a tree of tables by their dotted keys. An empty table has none.
fn flatten(tree: &Value) -> BTreeMap<String, Value> {
    fn walk(prefix: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
        let Value::Object(table) = value else {
            into.insert(prefix.to_owned(), value.clone());
            return;
        };
        for (key, value) in table {
            let bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            let key = match !key.is_empty() && key.chars().all(bare) {
                true => key.clone(),
                false => format!("{key:?}"),
            };
            let dot = if prefix.is_empty() { "" } else { "." };
            walk(&format!("{prefix}{dot}{key}"), value, into);
        }
    }
    let mut leaves = BTreeMap::new();
    walk("", tree, &mut leaves);
    leaves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, ConfigError> {
        parse(text, Path::new("/etc/c.toml"))
    }

    /// The documented file with every `#key = value` and `#[section]` enabled; `# text` is prose.
    fn switched_on() -> String {
        let lines = DOCUMENTED.lines().map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.is_empty() && !setting.starts_with([' ', '#']) => setting,
            _ => line,
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Relative paths were those of the directory that a command was started in: a key that lay there was
    /// trusted.
    #[test]
    fn relative_paths_are_below_the_files_directory() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        let text = "[store]\npath = 'store'\nrun_dir = '/run/other'\n\
            [trust]\nsigned_by = ['a.pem']\ncosign_keys = ['b.pub']\n\
            [trust.ref.'x']\nsigned_by = ['c.pem']\n\
            [daemon]\ntoken_file = 'token'\n\
            [run]\nruntime = 'bin/crun'\n";
        std::fs::write(&file, text).unwrap();
        let config = Loaded::read(&file).unwrap().unwrap().config;
        let at = |name: &str| dir.path().join(name);
        assert_eq!(config.store.path, at("store"));
        assert_eq!(config.store.run_dir, Path::new("/run/other"));
        assert_eq!(config.trust.signed_by, [at("a.pem")]);
        assert_eq!(config.trust.cosign_keys, [at("b.pub")]);
        assert_eq!(config.trust.refs["x"].signed_by, [at("c.pem")]);
        assert_eq!(config.daemon.token_file, Some(at("token")));
        assert_eq!(config.run.runtime.as_deref(), at("bin/crun").to_str());
        // No path of the documented settings is forgotten.
        let documented = DOCUMENTED.lines().filter(|line| line.starts_with('#'));
        let documented = documented.filter(|line| line.contains("= \"/") || line.contains("[\"/"));
        let mut switched_on = read(&switched_on()).unwrap();
        assert_eq!(switched_on.paths().count(), documented.count());
    }

    /// Every setting is documented, with its real default.
    #[test]
    fn every_setting_is_documented_with_its_default() {
        assert_eq!(
            read(DOCUMENTED).unwrap(),
            Config::default(),
            "as it lies there it says nothing"
        );
        let text = switched_on();
        read(&text).unwrap();
        let documented = flatten(&toml::from_str(&text).unwrap());
        for (key, default) in flatten(&serde_json::to_value(Config::default()).unwrap()) {
            let said = documented.get(&key);
            let said = said.unwrap_or_else(|| panic!("docs/config.toml says nothing of {key}"));
            // Without a default there is an example.
            assert!(default.is_null() || *said == default, "{key}: {said}, but it is {default}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_what_was_meant() {
        let wrong = |text: &str| match read(text).unwrap_err() {
            ConfigError::Invalid { line, message, meant, .. } => (line, meant, message),
            other => panic!("{other}"),
        };
        let text = "[store]\npath = '/x'\n[store.limit]\nsise = '1 GiB'\n";
        let (line, meant, _) = wrong(text);
        assert_eq!((line, meant.as_deref()), (Some(4), Some("size")));
        let fail = read(text).unwrap_err().to_string();
        assert!(fail.starts_with("/etc/c.toml:4: unknown field `sise`"), "{fail}");

        let (line, meant, _) = wrong("[stroe]\n");
        assert_eq!((line, meant.as_deref()), (Some(1), Some("store")));
        let (line, meant, _) = wrong("[store]\nentirely-different = 1\n");
        assert_eq!((line, meant), (Some(2), None));
        let (line, _, message) = wrong("\n[store.limit]\nsize = 'big'\n");
        assert!(line == Some(3) && message.contains("`big`"), "{message}");
        assert_eq!(wrong("[store]\ndomain = 7\n").0, Some(2));
        // 0 was pressure at all times.
        for percent in ["0", "-1.0", "100.5", "nan", "inf"] {
            let text = format!("[daemon.reclaim]\npressure_percent = {percent}\n");
            let (line, _, message) = wrong(&text);
            assert!(line == Some(2) && message.contains("0.01 to 100"), "{message}");
        }
        assert!(read("[daemon.reclaim]\npressure_percent = 100\n").is_ok());
        assert_eq!(wrong("[store\n").0, Some(1));
    }

    /// Under a limit of 0 to 512 KiB the kernel killed the process that read ahead.
    #[test]
    fn too_small_a_limit_of_the_commons_is_refused() {
        for value in ["0 B", "64 KiB", "512K", "16777215"] {
            let error = read(&format!("[commons]\nlimit = '{value}'\n")).unwrap_err().to_string();
            assert!(error.starts_with("/etc/c.toml:2: commons.limit: "), "{error}");
            assert!(error.ends_with("takes at least 16 MiB"), "{error}");
        }
        let config = read("[commons]\nlimit = '16 MiB'\n").unwrap();
        assert_eq!(config.commons.limit, Some(COMMONS_LIMIT_MIN));
    }

    /// Numbers out of their range were taken for the nearest in it, and `nan` never granted time.
    #[test]
    fn numbers_out_of_range_are_refused() {
        for value in ["0", "3601", "4294967295"] {
            let error = read(&format!("[daemon]\nperiod = {value}\n")).unwrap_err().to_string();
            assert_eq!(error, format!("/etc/c.toml:2: daemon.period is 1 to 3600, not {value}"));
        }
        for value in ["0", "-1.5", "1000", "inf", "nan"] {
            let error = read(&format!("[daemon]\ncpu_percent = {value}\n")).unwrap_err();
            let expected = format!("daemon.cpu_percent is 0.01 to 100, not {value}");
            assert!(
                error.to_string().eq_ignore_ascii_case(&format!("/etc/c.toml:2: {expected}")),
                "{error}"
            );
        }
        // It was no limit, while `verify --rate 0` was refused.
        let error = read("[daemon]\nscrub_rate = \"0\"\n").unwrap_err().to_string();
        assert!(error.starts_with("/etc/c.toml:2: daemon.scrub_rate is at least 1;"), "{error}");
        for good in ["period = 1", "period = 3600", "cpu_percent = 0.01", "cpu_percent = 100"] {
            read(&format!("[daemon]\n{good}\n")).unwrap();
        }
    }
}
