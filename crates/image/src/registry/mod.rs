//! Clients of registries (OCI distribution spec 1.1, Docker registry v2), synchronous.
//!
//! ```text
//! Reference ─▶ Repository ─┬─ Endpoint: mirror 1 ─┐
//!                          ├─ Endpoint: mirror 2  ├─ Http: TLS, redirects, timeouts
//!                          └─ Endpoint: upstream ─┘   └ credentials, tokens
//!                 ├ Download: a blob as a reader that goes on where a connection broke off
//!                 └ upload: the other way, to the registry itself only
//! ```
//!
//! What comes back is never believed: documents are bounded and checked against their digests here,
//! blobs while they are unpacked (`layer/blob.rs`). Credentials go to the registry they are for,
//! and to the token server that it names; a redirect to another host goes without. TLS is always
//! verified; plain HTTP is for this machine, or for hosts of which the caller says so.

mod certs;
mod challenge;
mod credentials;
mod download;
mod endpoint;
#[cfg(fuzzing)]
#[path = "../../../../fuzz/inside/registry.rs"]
pub mod fuzz;
mod helper;
mod http;
mod pace;
mod repository;
mod upload;
mod url;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) use pace::Failure;
pub(crate) use repository::Repository;
pub(crate) use upload::{Begun, Body, Session};

/// How to talk to registries.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// Options of single registries, by host as in names of images (`docker.io`).
    pub hosts: BTreeMap<String, HostOptions>,
    /// Bytes per second of all layers together. 0: no limit.
    pub rate_max: u64,
    /// Layers that are under way at a time, up to 16. 0: 4.
    pub jobs: usize,
    /// Tries in a row without getting on, before a download is given up. Default 6.
    pub tries_max: u32,
    /// Pause before the second try, doubled for each later one up to `pause_max`. Default 250 ms.
    pub pause: Duration,
    /// Longest pause, also if a registry asks for a longer one (`Retry-After`). Default 30 s.
    pub pause_max: Duration,
    /// How long connecting may take, names and TLS included. Default 10 s.
    pub connect_timeout: Duration,
    /// How long nothing may arrive before the connection counts as broken. Default 30 s.
    pub stall_timeout: Duration,
    /// Bytes per second that a connection must bring, measured over a `stall_timeout` of waiting;
    /// with fewer it counts as broken. Default 1024.
    pub rate_min: u64,
    /// Files with credentials, in docker's and podman's format; the first that has some is used.
    /// Missing ones are passed over. Default: [`RegistryOptions::auth_files_of_environment`].
    pub auth_files: Vec<PathBuf>,
    /// Directories with a directory for each host: `*.crt` are further authorities, `*.cert` and
    /// `*.key` our own. Default: `/etc/containers/certs.d`, `/etc/docker/certs.d`.
    pub certs_dirs: Vec<PathBuf>,
}

/// Options of one registry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostOptions {
    /// Registries to ask before it, in that order: `host[:port][/prefix]`.
    pub mirrors: Vec<String>,
    /// Plain HTTP may be used if it does not speak TLS. Certificates are verified all the same.
    pub insecure: bool,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self {
            hosts: BTreeMap::new(),
            rate_max: 0,
            jobs: 0,
            tries_max: 6,
            pause: Duration::from_millis(250),
            pause_max: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            rate_min: 1024,
            auth_files: Self::auth_files_of_environment(),
            certs_dirs: vec!["/etc/containers/certs.d".into(), "/etc/docker/certs.d".into()],
        }
    }
}

impl RegistryOptions {
    /// Where podman and docker keep credentials (containers-auth.json(5), `docker login`):
    /// `$REGISTRY_AUTH_FILE` alone if it is set, else `$XDG_RUNTIME_DIR/containers/auth.json`
    /// (default `/run/containers/UID/auth.json`), `$XDG_CONFIG_HOME/containers/auth.json`
    /// (`~/.config`), and `$DOCKER_CONFIG/config.json` (`~/.docker`).
    pub fn auth_files_of_environment() -> Vec<PathBuf> {
        let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        if let Some(file) = path("REGISTRY_AUTH_FILE") {
            return vec![file];
        }
        let uid = rustix::process::getuid();
        let home = path("HOME");
        let below_home = |name: &str| home.as_ref().map(|home| home.join(name));
        let runtime = path("XDG_RUNTIME_DIR").map(|dir| dir.join("containers"));
        let runtime = runtime.unwrap_or_else(|| format!("/run/containers/{}", uid.as_raw()).into());
        let mut files = vec![runtime.join("auth.json")];
        let config = path("XDG_CONFIG_HOME").or_else(|| below_home(".config"));
        files.extend(config.map(|dir| dir.join("containers/auth.json")));
        let docker = path("DOCKER_CONFIG").or_else(|| below_home(".docker"));
        files.extend(docker.map(|dir| dir.join("config.json")));
        files
    }

    fn is_insecure(&self, host: &str) -> bool {
        self.hosts.get(host).is_some_and(|host| host.insecure)
    }
}
