//! This machine: mounting, containers, upkeep, the ledger, the commons, surveys, probes, configuration, policy.

pub(crate) mod address_space;
pub mod backend;
pub(crate) mod cache;
pub mod cgroup;
pub mod commons;
pub mod config;
pub mod container;
pub(crate) mod kernel_text;
pub mod ksm;
pub mod ledger;
pub mod links;
pub mod mount;
pub mod names;
pub(crate) mod owner;
pub(crate) mod page_files;
pub mod policy;
pub mod probe;
pub(crate) mod processes;
pub mod profile;
pub(crate) mod programs;
pub mod run_dir;
pub mod settings;
mod signals;
pub mod size;
pub mod survey;
pub mod upkeep;
pub mod vm;

#[cfg(fuzzing)]
pub use processes::fuzz;
