//! Layers made one tree, what images name, and images over bases.

pub mod base;
pub mod contents;
pub(crate) mod merge;
