use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use cofolio_cli::interrupt::{self, Cancellable};
use cofolio_guest::Message;
use cofolio_image::trust::Need;
use cofolio_node::container::{Streams, bundle};
use cofolio_node::mount::Check;
use cofolio_node::size::Size;
use cofolio_node::vm::{Accel, DiskRequest, Finished, Kernel, Machines, Request, Running, Vmm};
use cofolio_store::task::Cancel;
use rustix::process::Signal;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::Signals;

use crate::cmd::bundle::{ProcessArgs, image_config};
use crate::cmd::run::{Side, background, terminal_size};
use crate::cmd::vm::terminal::RawTerminal;
use crate::context::{Context, Named};
use crate::exit::{self, Ended, Exit, Fail};
use crate::trust::TrustArgs;

/// Exit status if the virtual machine could not be started, as for containers.
const NOT_STARTED: u8 = 125;
/// So many signals that ask for its end kill a machine.
pub(super) const PATIENCE: u32 = 3;

/// Boot an image in a virtual machine, and run its program there
///
/// Packs the image for virtual machines if it is not (`pack --vm`), starts QEMU, or another --vmm,
/// with the pack and its segments as read-only devices, waits for the end of the image's program
/// and removes the machine; --detach does not wait. Changes are in the guest's memory and go with
/// it. On a --disk they are kept for the next machine of the same image. With --read-only or
/// --writable only some directories can be written to, and the guest has no second inode for each
/// of the other files. It has no network but loopback.
///
/// The kernel is that of a distribution, with its modules beside it or in /lib/modules: tested are
/// Debian's 6.1, 6.12 and 7.2, each made for clouds and for all machines (linux-image-cloud-amd64,
/// linux-image-amd64). The processor executes it with KVM where it can, and is emulated, tens of
/// times slower, elsewhere.
///
/// The exit status is the program's, or 128 and the number of the signal that ended it; 125 if the machine could not be
/// started, or ended without it. Signals are passed on to the program; the third one that asks for the end kills the machine.
///
/// With --detach, a process stays in the background and waits. It keeps the exit status, which `vm ps` shows, and the last 1
/// to 2 MiB of the console in a file that `vm ps --json` names. `vm console NAME` attaches to the
/// console. `vm stop NAME` removes these, and so does a new machine of that name.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio vm run redis:7.0.15 -- redis-server --version\n  \
    cofolio vm run -i debian:13 -- bash\n  \
    cofolio vm run -d --name cache --memory 256M --cpus 2 redis:7.0.15\n  \
    cofolio vm run -d --disk /srv/cache.disk:10G redis:7.0.15\n  \
    cofolio vm run --kernel /srv/kernels/vmlinuz-6.12.0-cloud redis:7.0.15")]
pub(crate) struct Args {
    /// Ref or first digits of a digest
    image: String,
    /// Arguments in place of the image's own; its entry point stays
    #[arg(trailing_var_arg = true)]
    args: Vec<String>,
    /// Give its program this process's standard input; with --detach, that of `vm console`
    #[arg(long, short)]
    interactive: bool,
    /// Return when it runs and print its name
    #[arg(long, short)]
    detach: bool,
    /// With --detach: keep neither exit status nor output
    #[arg(long, requires = "detach")]
    rm: bool,
    /// Name, also the host name inside (default: made from the image's)
    #[arg(long)]
    name: Option<String>,
    /// Memory of the guest
    #[arg(long, short, value_name = "SIZE", default_value = "512M")]
    memory: Size,
    /// Number of processors
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=255))]
    cpus: u32,
    /// Kernel of the guest: a vmlinuz, with lib/modules/VERSION beside it or in / (default: this machine's, else the newest
    /// in /boot)
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Keep its changes on this disk, a file or block device with ext4. With SIZE, a missing or
    /// empty file is made one
    #[arg(long, value_name = "FILE[:SIZE]")]
    disk: Option<DiskRequest>,
    /// Make its root read-only. What programs expect to be writable still is: /tmp, /var/tmp, /run
    /// and the image's volumes. All other files then cost the guest less memory
    #[arg(long)]
    read_only: bool,
    /// The same, but this directory of the image is writable too, by its absolute path; may be
    /// given several times
    #[arg(long, value_name = "DIR", conflicts_with = "read_only")]
    writable: Vec<PathBuf>,
    /// What runs it
    #[arg(long, value_enum, default_value_t = VmmArg::Qemu)]
    vmm: VmmArg,
    /// Let KSM merge its memory with that of all programs that allow it (see `ksm-exec --help`).
    /// Not with QEMU, whose guests' pages the daemon merges within their trust domain
    #[arg(long)]
    ksm: bool,
    /// What executes it (default: KVM if the processor and the kernel have it)
    #[arg(long, value_name = "HOW")]
    accel: Option<AccelArg>,
    #[command(flatten)]
    process: ProcessArgs,
    /// Hash the image, all its files, its pack and segments before it boots
    #[arg(long, conflicts_with = "require_verity")]
    verify: bool,
    #[command(flatten)]
    trust: TrustArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum VmmArg {
    /// QEMU
    Qemu,
    /// Cloud Hypervisor: with KVM only, without `vm exec` and merging; the guest's own reports
    /// alone return its free memory
    CloudHypervisor,
    /// Firecracker, 1.14 or newer: with KVM only, without `vm exec` and merging
    Firecracker,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AccelArg {
    /// The processor
    Kvm,
    /// An emulator
    Tcg,
}

pub(super) fn run(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    context.needs_root("running a virtual machine")?;
    Ok(start(args, context).unwrap_or_else(|error| match exit::report(&error, context.ui) {
        exit @ (Exit::Usage | Exit::Interrupted) => exit.into(),
        _ => Ended::Container(NOT_STARTED),
    }))
}

fn start(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    // While there is one thread.
    let background = if args.detach { Some(background()?) } else { None };
    if let Some(Side::Foreground(ended)) = background {
        return Ok(ended);
    }
    let domain = context.domain()?;
    let name = Some(&*args.image);
    let image = args.trust.image(name, &domain, context)?;
    let config = image.record.as_ref().and_then(|record| record.config.as_deref());
    let need = Need::Run(config);
    let check = args.trust.check(&image, need, name, args.verify, &domain, context)?;
    let request = Request { check, ..request(args, context, &image)? };
    let machines = super::machines(&domain, context)?;
    // Leftovers of killed processes. If one cannot be removed, this one starts nevertheless.
    let mut failed = Vec::new();
    machines.reconcile(&mut failed)?;
    for failed in failed {
        context.ui.note(format!("could not be cleaned up: {failed}"));
    }
    match background {
        Some(Side::Background(ready)) => attend(args, context, &machines, &request, ready),
        _ => attach(args, context, &machines, &request),
    }
}

fn request(args: &Args, context: &Context<'_>, image: &Named) -> anyhow::Result<Request> {
    let root = Path::new("/");
    let kernel = args.kernel.as_ref().or(context.config.config.vm.kernel.as_ref());
    let kernel = match kernel {
        Some(path) => Kernel::open(path)?,
        None => Kernel::of_this_machine(root)?,
    };
    let accel = match args.accel {
        Some(AccelArg::Kvm) => Accel::Kvm,
        Some(AccelArg::Tcg) => Accel::Tcg,
        None => Accel::of_this_machine(root),
    };
    let vmm = match args.vmm {
        VmmArg::Qemu => Vmm::Qemu,
        VmmArg::CloudHypervisor => Vmm::CloudHypervisor,
        VmmArg::Firecracker => Vmm::Firecracker,
    };
    if accel == Accel::Tcg && args.accel.is_none() && vmm == Vmm::Qemu {
        context.ui.note("no hardware virtualisation here: the processor is emulated, and slow");
    }
    const MEMORY_MIN: Size = Size(64 << 20);
    if args.memory < MEMORY_MIN {
        let what = format!("--memory {}: a guest needs at least {MEMORY_MIN}", args.memory);
        return Err(Fail::usage(what).into());
    }
    let (config, options) = (image_config(image)?, args.process.options(&args.args, image)?);
    if args.writable.iter().any(|dir| dir == Path::new("/")) {
        return Err(Fail::usage("--writable /: without it the whole root is writable").into());
    }
    if let Some(dir) = args.writable.iter().find(|dir| bundle::is_hidden(&config, &options, dir)) {
        let what = "the guest has a mount of its own there, or it is writable anyway";
        return Err(Fail::usage(format!("--writable {}: {what}", dir.display())).into());
    }
    Ok(Request {
        image: image.digest,
        image_name: image.shown(),
        config,
        name: args.name.clone(),
        options,
        // QEMU takes whole MiB.
        memory_bytes: args.memory.0.next_multiple_of(1 << 20),
        cpus: args.cpus,
        kernel,
        accel,
        vmm,
        ksm: args.ksm,
        terminal: args.interactive.then(|| terminal_size().unwrap_or((24, 80))),
        disk: args.disk.clone(),
        writable_dirs: (args.read_only || !args.writable.is_empty()).then(|| args.writable.clone()),
        check: Check::None,
    })
}

/// Starts a virtual machine, waits for its end and removes it.
fn attach(
    args: &Args,
    context: &Context<'_>,
    machines: &Machines<'_>,
    request: &Request,
) -> anyhow::Result<Ended> {
    // Signals are for the guest, but until it runs they cancel the start.
    let signals = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH];
    let signals = Signals::new(signals).context("listening for signals")?;
    let starting = Cancellable::begin()?;
    let streams = Streams::Ours { input: args.interactive };
    let start = |task: &_| machines.start(request, Some(&streams), task);
    let mut running = context.work("starting", "file", start)?;
    interrupt::release();
    drop(starting);
    let raw = if args.interactive { RawTerminal::begin() } else { None };
    let given_up = Cancel::default();
    pass_on(signals, &running, given_up.clone())?;
    let finished = running.wait(&given_up);
    drop(raw);
    let left = machines.remove(running);
    let Finished { status, copied, complaint } = finished.context("waiting for the VMM")?;
    if let Err(error) = left {
        context.ui.note(format!("the machine has ended, but is not removed: {error}"));
    }
    let Some(status) = status else {
        let why = if complaint.is_empty() { "it was killed, or crashed" } else { &complaint };
        return Err(
            Fail::new(Exit::Failure, format!("the virtual machine has ended: {why}")).into()
        );
    };
    match copied {
        Err(error) if status != 0 => context.ui.note(cofolio_store::with_causes(&error)),
        copied => copied.context("writing the console's output")?,
    }
    Ok(Ended::Container(status))
}

/// Starts a detached virtual machine, and waits for its end in a session of its own.
fn attend(
    args: &Args,
    context: &Context<'_>,
    machines: &Machines<'_>,
    request: &Request,
    mut ready: std::io::PipeWriter,
) -> anyhow::Result<Ended> {
    let starting = Cancellable::begin()?;
    let start = |task: &_| machines.start(request, None, task);
    let mut running = context.work("starting", "file", start)?;
    let mut tell = || -> anyhow::Result<()> {
        starting.cancel.check()?;
        match context.ui.json {
            true => {
                let value = json!({"name": running.name(), "pid": running.pid()});
                context.ui.json(&value).map(drop)?;
            }
            false => context.ui.line(running.name()).map(drop)?,
        }
        std::io::stdout().flush()?;
        // The process that the user waits for may have been ended.
        Ok(ready.write_all(b".")?)
    };
    if let Err(error) = tell() {
        running.kill();
        machines.remove(running)?;
        return Err(error);
    }
    drop(ready);
    // From here on errors have no reader, and signals of the terminal are for others.
    let _ = rustix::process::setsid();
    let _ = cofolio_sys::process::silence();
    interrupt::release();
    drop(starting);
    let finished = running.wait(&Cancel::default())?;
    match finished.status {
        Some(status) if !args.rm => machines.retire(running, status)?,
        None if !args.rm => machines.retire(running, NOT_STARTED)?,
        _ => machines.remove(running)?,
    }
    Ok(Ended::Container(0))
}

/// From now on signals go to the image's program, and the size of the terminal.
fn pass_on(mut signals: Signals, running: &Running, given_up: Cancel) -> anyhow::Result<()> {
    let (guest, vmm) = (running.guest(), running.handle()?);
    let (messages, queue) = std::sync::mpsc::channel();
    // A guest that reads nothing must not keep the signals from being counted.
    std::thread::Builder::new().name("messages".to_owned()).spawn(move || {
        for message in queue {
            let _ = guest.tell(&message);
        }
    })?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let mut asked = 0;
        for signal in signals.forever() {
            let message = match (signal, terminal_size()) {
                (SIGWINCH, Some((rows, columns))) => Message::Size(rows, columns),
                (SIGWINCH, None) => continue,
                _ => Message::Signal(signal),
            };
            if [SIGHUP, SIGINT, SIGQUIT, SIGTERM].contains(&signal) {
                asked += 1;
            }
            if asked >= PATIENCE {
                given_up.cancel();
                let _ = rustix::process::pidfd_send_signal(&vmm, Signal::KILL);
            }
            let _ = messages.send(message);
        }
    })?;
    Ok(())
}
