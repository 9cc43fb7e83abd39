//! `cofolio run` with the runtimes of this machine, and what is done with its containers. Needs root, and crun or runc.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "../common/mod.rs"]
mod common;

mod descriptors;
mod inside;
mod lost;
mod running;
mod start;

use std::fs;
use std::process::Child;

use common::machine::{Machine, until};
use rustix::process::{Pid, Signal, kill_process};

fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Starts `cofolio run` in the background and waits until the container has said that it is up.
fn started(machine: &Machine, args: &[&str]) -> Child {
    let log = machine.path("said");
    let mut command = machine.command(args);
    let out = fs::File::create(&log).unwrap();
    let child = command.stdout(out.try_clone().unwrap()).stderr(out).spawn().unwrap();
    until("the container starts", || {
        fs::read_to_string(&log).unwrap().contains("up").then_some(())
    });
    child
}
