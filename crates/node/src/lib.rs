//! What Cofolio knows of this machine: importing OCI images, mounting, the ledger.

pub mod base;
pub mod bundle;
pub mod contents;
pub mod diff;
pub mod engine;
pub mod export;
pub mod ledger;
pub mod mount;
pub mod oci;
pub mod pack;
pub mod probe;
pub mod registry;
mod resident;
pub mod run;
pub mod sharing;
pub mod survey;
pub mod tree_scan;
pub mod trust;
