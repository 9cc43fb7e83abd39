//! Cloud Hypervisor's command line, by its version 54.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

use super::error::{Result, VmError};
use super::vmm::{Machine, VSOCK};

/// The command. The guest's console is its standard input and output, its sockets are in its
/// working directory.
///
/// # Errors
/// [`VmError::Unsupported`] for a path that its options cannot have.
pub(super) fn command(machine: &Machine<'_>, program: &Path) -> Result<Command> {
    let mut command = Command::new(program);
    command.args(["--api-socket", "path=api"]);
    command.arg("--kernel").arg(&machine.kernel.image).arg("--initramfs").arg(machine.initramfs);
    command.args(["--cmdline", &machine.append]);
    command.args(["--cpus", &format!("boot={}", machine.cpus)]);
    command.args(["--memory", &format!("size={}", machine.memory_bytes)]);
    command.args(["--balloon", "size=0,deflate_on_oom=on,free_page_reporting=on"]);
    command.args(["--vsock", &format!("cid=3,socket={VSOCK}")]);
    command.args(["--console", "tty", "--serial", "off"]);
    command.arg("--pmem");
    for (path, _) in machine.files {
        command.arg(option("file=", path, ",discard_writes=on")?);
    }
    if let Some(disk) = machine.disk {
        command.arg("--disk").arg(option("path=", disk, ",image_type=raw")?);
    }
    Ok(command)
}

fn option(before: &str, path: &Path, after: &str) -> Result<OsString> {
    // They separate and quote in its options.
    if path.as_os_str().as_bytes().iter().any(|byte| b",\"[]".contains(byte)) {
        let what = format!("{}: Cloud Hypervisor takes no path with , \" [ or ]", path.display());
        return Err(VmError::Unsupported(what));
    }
    let mut option = OsString::from(before);
    option.push(path);
    option.push(after);
    Ok(option)
}
