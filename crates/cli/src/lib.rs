//! What the programs of Cofolio share towards a person: exit codes, terminals, signals.

pub mod args;
mod classify;
pub mod exit;
pub mod interrupt;
pub mod ui;
