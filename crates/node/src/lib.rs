//! This machine: mounting, containers, upkeep, the ledger, surveys, probes, configuration, policy.

pub mod backend;
pub mod config;
pub mod container;
pub mod ledger;
pub mod mount;
pub mod names;
pub mod policy;
pub mod probe;
pub mod settings;
pub mod survey;
pub mod upkeep;

/// Seconds since 1970.
pub fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.ok().and_then(|since| i64::try_from(since.as_secs()).ok()).unwrap_or_default()
}
