//! This machine: mounting, containers, upkeep, the ledger, surveys, probes, configuration, policy.

pub mod backend;
pub mod config;
pub mod container;
pub mod ledger;
pub mod links;
pub mod mount;
pub mod names;
pub mod policy;
pub mod probe;
pub mod settings;
pub mod survey;
pub mod upkeep;
