//! Layers made one tree, what images name, and images over bases.

pub mod base;
pub(crate) mod merge;
pub mod named_objects;
