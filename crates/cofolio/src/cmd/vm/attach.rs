use std::path::PathBuf;

use cofolio_node::vm::{AttachRequest, Vmm};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;

/// Return the free memory of a virtual machine that somebody else started
///
/// The daemon (`cofolio serve`) then returns memory that the guest frees to the host, and `vm top`
/// shows what the host holds for it, until `vm detach` or its end. Its pages are not merged. It
/// needs a balloon.
///
/// The control socket must be one for Cofolio alone: QEMU serves one client at a time at each, and
/// takes several `-qmp`. While it is attached its balloon is the daemon's: between pulses the guest
/// has what it had outside of it before.
///
/// Free memory is taken only where that is safe, and where the VMM says how much there is; `vm top`
/// says why not. The balloon must deflate on OOM: `-device virtio-balloon,deflate-on-oom=on` for
/// QEMU, and `"deflate_on_oom": true, "stats_polling_interval_s": 1` for Firecracker. Of Cloud
/// Hypervisor it is not known how much there is, so it is left with `free_page_reporting=on`.
/// Memory may be private or in a memfd, not in huge pages (hugetlbfs).
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    qemu-system-x86_64 -qmp unix:/run/web.qmp,server,wait=off \\\n    \
    -device virtio-balloon,deflate-on-oom=on,free-page-reporting=on ... &\n  \
    cofolio vm attach --qmp /run/web.qmp --name web\n  cofolio vm top\n  cofolio vm detach web")]
pub(crate) struct Args {
    #[command(flatten)]
    socket: Socket,
    /// Name for it (default: made from its own)
    #[arg(long)]
    name: Option<String>,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Socket {
    /// QMP socket of a QEMU
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// API socket of a Cloud Hypervisor
    #[arg(long, value_name = "SOCKET")]
    cloud_hypervisor: Option<PathBuf>,
    /// API socket of a Firecracker
    #[arg(long, value_name = "SOCKET")]
    firecracker: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("attaching a virtual machine")?;
    let Socket { qmp, cloud_hypervisor, firecracker } = &args.socket;
    let sockets = [
        (Vmm::Qemu, qmp),
        (Vmm::CloudHypervisor, cloud_hypervisor),
        (Vmm::Firecracker, firecracker),
    ];
    let domain = context.domain_or_create()?;
    let machines = super::machines(&domain, context)?;
    // One of them is there.
    for (vmm, socket) in sockets {
        let Some(socket) = socket else { continue };
        let request = AttachRequest { vmm, socket: socket.clone(), name: args.name.clone() };
        let record = machines.attach(&request)?;
        match context.ui.json {
            true => _ = context.ui.json(&json!({"name": record.name}))?,
            false => context.ui.line(&record.name)?,
        }
    }
    Ok(Exit::Ok)
}
