//! The first process of a guest: mounts the image, runs its program, and ends the guest with it.

mod boot;
mod children;
mod devices;
mod exec;
mod workload;
mod writable;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    // Started by the first process, in the image's root.
    if name == workload::NAME {
        return workload::become_it();
    }
    if rustix::process::getpid().is_init() {
        boot::run();
    }
    eprintln!(
        "cofolio-guest is the first process of virtual machines that `cofolio vm run` starts"
    );
    ExitCode::from(2)
}
