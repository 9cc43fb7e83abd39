//! What Cofolio knows of this machine: mounting, containers, the ledger, surveys, probes,
//! configuration and policy.

pub mod config;
pub mod container;
pub mod ledger;
pub mod mount;
pub mod policy;
pub mod probe;
pub mod survey;
