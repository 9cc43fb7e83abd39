//! `cofolio run` with the runtimes of this machine, and what is done with its containers. Needs root, and crun or runc.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "../../../node/tests/common/cache.rs"]
mod cache;
#[path = "../common/mod.rs"]
mod common;

mod descriptors;
mod inside;
mod lost;
mod profile;
mod running;
mod start;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command};

use common::machine::{Machine, until};
use rustix::process::{Pid, Signal, kill_process};

/// A script in place of the runtime, of the same name: `before` is run, then the runtime with the same arguments, then
/// `after`. In the directory of the machine, with those arguments in `$*`. `wait FILE` waits until a file is there, at most
/// for half a minute.
fn wrapped(machine: &Machine, runtime: &str, before: &str, after: &str) -> String {
    let wrapper = machine.dir(&format!("wrapped-{runtime}")).join(runtime);
    let (dir, runtime) = (machine.path(""), common::program(runtime).unwrap());
    let script = format!(
        r#"#!/bin/sh
wait() {{ n=0; while [ ! -e $1 ] && [ $n -lt 3000 ]; do sleep 0.01; n=$((n + 1)); done; }}
cd {dir}
{before}
{runtime} "$@"
status=$?
{after}
exit $status
"#,
        dir = dir.display(),
        runtime = runtime.display(),
    );
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    wrapper.to_str().unwrap().to_owned()
}

fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Builds a program of C that needs no libraries, if there is a compiler for that.
fn build_static(source: &str, program: &Path) -> bool {
    let file = program.with_extension("c");
    fs::write(&file, source).unwrap();
    let built = Command::new("cc").arg("-static").arg(&file).arg("-o").arg(program).output();
    built.is_ok_and(|built| built.status.success())
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
