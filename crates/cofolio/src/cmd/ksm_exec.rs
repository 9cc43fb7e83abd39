use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::cmd::run::{NO_PROGRAM, NOT_EXECUTABLE};
use crate::context::Context;
use crate::exit::Ended;

/// Start a program whose memory KSM may merge, such as a VMM
///
/// KSM, the kernel's merging, keeps one copy of equal pages of all programs that allow it. This command
/// allows it for PROGRAM and for all that PROGRAM starts (PR_SET_MEMORY_MERGE, Linux 6.9), and needs
/// neither root nor a store. KSM merges private memory only: a VMM must not map its guest's memory shared.
///
/// KSM knows no trust domains: it merges pages of any two programs that allow it, and the time that
/// a write takes tells a program whether another one has the same page. So Cofolio allows it for no
/// program unless asked. Virtual machines of `vm run` with QEMU do not need it: the daemon merges
/// their pages, within their domain. With another VMM `vm run --ksm` does the same as this command.
///
/// KSM has to run, too: `[ksm]` of the configuration has the daemon turn it on.
///
/// The exit status is the program's; 126 if it cannot be executed, 127 if it does not exist.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio ksm-exec -- qemu-system-x86_64 -m 4G disk.qcow2\n  \
    cofolio ksm-exec -- firecracker --config-file vm.json")]
pub(crate) struct Args {
    /// Program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]);
    cofolio_sys::process::allow_ksm(&mut command)?;
    // Returns only if it fails.
    let error = command.exec();
    context.ui.error(&format!("{}: {error}", args.command[0].display()), None);
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    Ok(Ended::Container(if is_missing { NO_PROGRAM } else { NOT_EXECUTABLE }))
}
