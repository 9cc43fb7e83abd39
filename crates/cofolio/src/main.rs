//! The `cofolio` command.

fn main() {}
