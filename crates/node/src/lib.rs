//! What Cofolio knows of this machine: mounting, containers, the ledger, surveys, probes.

pub mod container;
pub mod ledger;
pub mod mount;
pub mod probe;
pub mod survey;
