//! The stores of other engines on this machine, read in place and never written.

mod bolt;
pub mod containerd;
pub mod containers_storage;
pub mod docker;
#[cfg(fuzzing)]
#[path = "../../../../../fuzz/inside/engines.rs"]
pub mod fuzz;
mod inventory;
mod names;

use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

pub use inventory::{Container, Inventory, LiveMounts};

pub(crate) use crate::error::EngineError;
use crate::files::open_regular;
use cofolio_sys::resident::read_aside;

/// Largest file of an engine's own records, in bytes. A layer takes some 700 of them.
const RECORDS_MAX: u64 = 256 << 20;

/// Reads a file of records or settings past the page cache; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<Vec<u8>>, EngineError> {
    let failed = |source| EngineError::Io { path: path.to_owned(), source };
    let file = match open_regular(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    read_aside(&file, RECORDS_MAX).map(Some).map_err(failed)
}

/// Reads a JSON file; `None` if it is not there.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, EngineError> {
    let wrong = |what| EngineError::Document { path: path.to_owned(), what };
    let Some(bytes) = read(path)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| wrong(e.to_string()))
}

/// Reads a text; `None` if it is not there.
fn read_text(path: &Path) -> Result<Option<String>, EngineError> {
    let wrong = |_| EngineError::Document { path: path.to_owned(), what: "not UTF-8".into() };
    let Some(bytes) = read(path)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(wrong)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// `$NAME`, or else a directory in the user's home.
fn user_dir(name: &str, in_home: &str) -> PathBuf {
    let home = || std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    std::env::var_os(name).map_or_else(|| home().join(in_home), PathBuf::from)
}

fn user_data() -> PathBuf {
    user_dir("XDG_DATA_HOME", ".local/share")
}

fn user_config() -> PathBuf {
    user_dir("XDG_CONFIG_HOME", ".config")
}

/// Reads settings in TOML; `None` if it is not there.
fn read_toml<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, EngineError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    let wrong = |what: &str| EngineError::Document { path: path.to_owned(), what: what.to_owned() };
    toml::from_str(&text).map(Some).map_err(|e| wrong(e.message()))
}

/// Whether an id can be part of a path.
fn is_id(id: &str) -> bool {
    !id.is_empty() && id.len() <= 128 && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}
