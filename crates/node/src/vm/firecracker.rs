//! What Firecracker is started with, by its version 1.14 and newer, which have virtio-pmem.

use std::path::Path;
use std::process::Command;

use cofolio_sys::process::inherit;
use serde_json::{Value, json};

use super::error::{Result, VmError};
use super::vmlinux::vmlinux;
use super::vmm::{Machine, VSOCK};
use crate::mount::At as _;
use crate::run_dir::running::write_file;

/// Name of the file that describes the machine, in its directory.
const CONFIG: &str = "firecracker.json";

/// The command. The guest's console is its standard input and output, its sockets are in its
/// working directory.
///
/// # Errors
/// [`VmError::Kernel`], [`VmError::Unsupported`] for a path that JSON cannot have,
/// [`VmError::RunDir`].
pub(super) fn command(machine: &Machine<'_>, program: &Path) -> Result<Command> {
    let all = machine.dir.parent().unwrap_or(machine.dir);
    let kernel = vmlinux(all, machine.kernel)?;
    let config = config(machine, &kernel.path)?;
    let path = machine.dir.join(CONFIG);
    let text = serde_json::to_vec(&config).map_err(std::io::Error::other).at("writing", &path)?;
    write_file(&path, &text)?;
    let mut command = Command::new(program);
    inherit(&mut command, kernel.lock);
    // With PCI its guests need no other drivers than those of other VMMs.
    command.args(["--api-sock", "api", "--config-file", CONFIG, "--enable-pci"]);
    // It logs to its standard error, a pipe. By default it would log to the guest's console.
    command.args(["--log-path", "/proc/self/fd/2", "--level", "Warn"]);
    Ok(command)
}

fn config(machine: &Machine<'_>, kernel: &Path) -> Result<Value> {
    let text = |path: &Path| {
        let what = || VmError::Unsupported(format!("{}: it is no UTF-8", path.display()));
        path.to_str().map(str::to_owned).ok_or_else(what)
    };
    let pmem = machine.files.iter().enumerate().map(|(number, (path, _))| {
        let path = text(path)?;
        Ok(json!({"id": format!("image{number}"), "path_on_host": path, "read_only": true}))
    });
    let pmem = pmem.collect::<Result<Vec<Value>>>()?;
    let drives = machine.disk.map(|disk| {
        let path = text(disk)?;
        // By default Firecracker acknowledges a flush without performing it.
        Ok(json!({"drive_id": "disk", "path_on_host": path, "is_root_device": false,
            "cache_type": "Writeback"}))
    });
    let drives = drives.into_iter().collect::<Result<Vec<Value>>>()?;
    Ok(json!({
        "boot-source": {
            "kernel_image_path": text(kernel)?,
            "initrd_path": text(machine.initramfs)?,
            "boot_args": machine.append,
        },
        "machine-config": {
            "vcpu_count": machine.cpus,
            "mem_size_mib": machine.memory_bytes >> 20,
        },
        "balloon": {
            "amount_mib": 0,
            "deflate_on_oom": true,
            "stats_polling_interval_s": 1,
            "free_page_reporting": true,
        },
        "vsock": {"guest_cid": 3, "uds_path": VSOCK},
        "pmem": pmem,
        "drives": drives,
    }))
}
