use std::fs;
use std::io::{IsTerminal as _, PipeWriter, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use cofolio_cli::interrupt::{self, Cancellable};
use cofolio_image::import::ImportOptions;
use cofolio_image::reference::Reference;
use cofolio_image::source::Source;
use cofolio_image::trust::Need;
use cofolio_node::container::bundle::{self, Bind};
use cofolio_node::container::{
    Container, Containers, Finished, Reason, Request, RunError, Runtime, Streams, append,
    exit_status, pidfd, wait_for,
};
use cofolio_node::mount::Check;
use cofolio_node::profile;
use cofolio_store::task::Cancel;
use cofolio_sys::process::Fork;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::json;
use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};

use crate::cmd::bundle::{ProcessArgs, image_config};
use crate::cmd::import;
use crate::cmd::profile::{of_recorded_dirs, recorded_dirs};
use crate::cmd::pull::RegistryArgs;
use crate::cmd::warm::WarmArgs;
use crate::context::{Context, Named};
use crate::exit::{self, Ended, Exit, Fail};
use crate::progress::Work;
use crate::trust::{ArrivalArgs, TrustArgs};
use cofolio_node::size::Size;

/// Docker's exit statuses of containers that could not be started.
const NOT_STARTED: u8 = 125;
pub(super) const NOT_EXECUTABLE: u8 = 126;
pub(super) const NO_PROGRAM: u8 = 127;

/// Start a container of an image, with crun or runc
///
/// Mounts the image, starts the container, waits for its end and removes it; --keep keeps its changes,
/// --detach does not wait. Its root is read-only unless --rw: containers of one image are then clones of one
/// mount. With --writable some directories of the image can be written to, and the rest cannot. /tmp, /var/tmp and
/// /run are in memory, with a copy of what the image has there, and the image's volumes are directories of the store
/// that no --size limits; both are removed with the container. One that is a --writable directory, or lies in
/// one, is part of it.
///
/// The container has no network but its own loopback unless --network host. Its capabilities and mounts are
/// those that containerd gives a container, and Docker's default seccomp profile filters its system calls.
///
/// The exit status is the container's, or 128 and the number of the signal that ended it; 125 if the container
/// could not be started, or ended well and its output could not be written; 126 if its program cannot be executed, 127 if the program does not exist; 2 for wrong
/// options, 5 without root. If the program has a wrong format or lacks its interpreter, the status is 1, and the
/// container's output says why. Signals to `cofolio run` are passed on.
///
/// The container writes into pipes, never into the caller's terminal or file: `cofolio run` copies. If `cofolio
/// run` is killed the container goes on without output: `cofolio ps` shows it, `cofolio stop` ends it, and the
/// next `run` or `gc` removes it once it has ended.
///
/// With --detach, a process stays in the background and waits. Of a container that has ended it keeps the exit
/// status, which `cofolio ps` shows, and the last 1 to 2 MiB of output in a file that `cofolio ps --json` names.
/// `cofolio stop NAME` removes these, and so does a new container of that name.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("changes").args(["rw", "writable", "writable_recorded"]))]
#[command(after_help = "Example:\n  cofolio run redis:7.0.15 -- redis-server --version\n  \
    cofolio run -it --rw debian:13 -- bash\n  \
    cofolio run -d --name cache --network host --memory 256M redis:7.0.15\n  \
    cofolio run docker://registry.example/team/app:1\n  \
    cofolio run --userns 0:100000:65536 --rw --size 1G -v /srv/in:/in:ro builder -- make")]
pub(crate) struct Args {
    /// Ref, first digits of a digest, or docker://NAME, which is pulled if the store lacks it; --digest
    /// does not replace it
    image: String,
    /// Arguments in place of the image's own; its entry point stays
    #[arg(trailing_var_arg = true)]
    args: Vec<String>,
    /// Give it this process's standard input
    #[arg(long, short)]
    interactive: bool,
    /// Give it a terminal, which standard input must be
    #[arg(long, short, conflicts_with = "detach")]
    tty: bool,
    /// Return when it runs and print its name
    #[arg(long, short, conflicts_with = "interactive")]
    detach: bool,
    /// With --detach: append its output to this file, whatever size that gets
    #[arg(long, value_name = "FILE", requires = "detach")]
    output: Option<PathBuf>,
    /// With --detach: keep neither exit status nor output
    #[arg(long, requires = "detach")]
    rm: bool,
    /// For `profile record`, with a socket as standard input: with the root mounted, wait for a
    /// byte before the container starts; end the container with the socket; when it has ended,
    /// write there in which directories it has made changes, and wait for another byte before the
    /// root is unmounted
    #[arg(long, hide = true, conflicts_with_all = ["detach", "interactive", "tty"])]
    hold: bool,
    /// With --rw or --writable, not with --detach: keep its changes when it has ended, and print their directory
    #[arg(long, requires = "changes", conflicts_with = "detach")]
    keep: bool,
    /// Name, also the host name inside (default: made from the image's)
    #[arg(long)]
    name: Option<String>,
    /// Make its root writable; changes go with the container
    #[arg(long)]
    rw: bool,
    /// Make only this directory of the image writable, by its absolute path; may be given several times
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// Make only the directories writable that the recorded start wrote to (`cofolio profile record --rw`), less those
    /// in memory, in volumes and of the host
    #[arg(long)]
    writable_recorded: bool,
    /// With --rw or --writable: limit of its changes, as 512M or 2G, by project quota or a filesystem of that size; not
    /// with --keep
    #[arg(long, requires = "changes", conflicts_with = "keep")]
    size: Option<Size>,
    /// Limit of its memory, as 512M or 2G, including the page cache that it is the first to fill. Each directory in
    /// memory holds at most as much, with what the image has there
    #[arg(long, short)]
    memory: Option<Size>,
    /// Limit of its CPU time, as 0.5 or 2 CPUs
    #[arg(long, value_parser = cpu_millis, value_name = "NUMBER")]
    cpus: Option<u64>,
    /// Directory or file of the host to show inside; may be given several times
    #[arg(long, short, value_name = "SOURCE:TARGET[:ro]")]
    volume: Vec<String>,
    #[command(flatten)]
    process: ProcessArgs,
    /// Its network
    #[arg(long, value_name = "NETWORK", default_value = "none")]
    network: Network,
    /// User namespace: an id map as of `mount --idmap`
    #[arg(long, value_name = "MAP")]
    userns: Option<String>,
    /// Program that starts it, by name or path [default: crun, else runc]
    #[arg(long)]
    runtime: Option<String>,
    /// Let KSM merge its memory with that of all other programs that allow it, across trust domains (see
    /// `ksm-exec --help`)
    #[arg(long)]
    ksm: bool,
    /// Hash the image and all its files before mounting
    #[arg(long, conflicts_with = "require_verity")]
    verify: bool,
    #[command(flatten)]
    warm: WarmArgs,
    #[command(flatten)]
    trust: TrustArgs,
}

/// The network of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Network {
    /// Only a loopback device of its own
    None,
    /// The host's, with its /etc/resolv.conf and /etc/hosts where the image has /etc
    Host,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    context.needs_root("running a container")?;
    Ok(start(args, context).unwrap_or_else(|error| {
        let exit = exit::report(&error, context.ui);
        match error.downcast_ref::<RunError>().map_or(NOT_STARTED, status_of) {
            NOT_STARTED if matches!(exit, Exit::Usage | Exit::Interrupted) => exit.into(),
            status => Ended::Container(status),
        }
    }))
}

pub(super) fn ended(status: u8, error: Option<RunError>) -> anyhow::Result<Ended> {
    match error {
        None => Ok(Ended::Container(status)),
        // The runtime has printed its error already.
        Some(error @ RunError::Refused { .. }) => Ok(Ended::Container(status_of(&error))),
        Some(error) => Err(error.into()),
    }
}

pub(super) fn status_of(error: &RunError) -> u8 {
    match error {
        RunError::Refused { reason: Reason::NoProgram, .. } => NO_PROGRAM,
        RunError::Refused { reason: Reason::NotExecutable, .. } => NOT_EXECUTABLE,
        _ => NOT_STARTED,
    }
}

fn start(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    if args.tty && !std::io::stdin().is_terminal() {
        let fail = Fail::usage("--tty: standard input is not a terminal");
        return Err(fail.hint("--interactive alone passes a pipe or a file on").into());
    }
    // While there is one thread.
    let background = if args.detach { Some(background()?) } else { None };
    if let Some(Side::Foreground(ended)) = background {
        return Ok(ended);
    }
    let name = match args.image.strip_prefix("docker://") {
        Some(name) => here_or_pulled(&Reference::parse(name)?, args, context)?,
        None => args.image.clone(),
    };
    let domain = context.domain()?;
    let image = args.trust.image(Some(&name), &domain, context)?;
    let config = image.record.as_ref().and_then(|record| record.config.as_deref());
    let need = Need::Run(config);
    let check = args.trust.check(&image, need, Some(&name), args.verify, &domain, context)?;
    let mut request = Request { check, ..request(args, context, &image)? };
    if args.writable_recorded {
        let mut dirs = recorded_dirs(&domain, &image)?;
        dirs.retain(|dir| {
            !bundle::is_scratch(dir) && !bundle::is_hidden(&request.config, &request.options, dir)
        });
        if dirs.is_empty() && args.size.is_some() {
            let what = "--size needs a writable directory: the recorded start wrote to none but \
                        those in memory or of the host";
            return Err(Fail::new(Exit::Failure, what).into());
        }
        request.options.writable_dirs = dirs;
        request.options.writable_recorded = true;
    }
    let work = if args.verify { Some(Work::begin(context.ui, "verifying", "file")?) } else { None };
    let mut mounter = context.mounter(&domain)?;
    if let Some(work) = &work {
        mounter = mounter.with_task(&work.task);
    }
    let unrecorded = Cancel::default();
    let before_start = || {
        if args.hold && std::io::stdin().read_exact(&mut [0]).is_err() {
            unrecorded.cancel();
        }
        unrecorded.check()?;
        args.warm.warm(&domain, &image.digest, context)
    };
    let containers = Containers::new(mounter).before_start(&before_start);
    // Leftovers of killed processes. If one cannot be removed, this container starts nevertheless.
    let mut failed = Vec::new();
    containers.reconcile(&mut failed)?;
    for failed in failed {
        context.ui.note(format!("could not be cleaned up: {failed}"));
    }
    let ended = match background {
        Some(Side::Background(ready)) => attend(args, context, &containers, &request, ready),
        _ => attach(args, context, &containers, &request, work),
    };
    match ended {
        // The recorder says why it has given up, unless it was killed.
        Err(_) if unrecorded.is_cancelled() => Ok(Ended::Container(NOT_STARTED)),
        Err(error) if args.writable_recorded => Err(of_recorded_dirs(error, image.digest)),
        ended => ended,
    }
}

/// Starts a container, waits for its end and removes it.
fn attach(
    args: &Args,
    context: &Context<'_>,
    containers: &Containers<'_>,
    request: &Request,
    work: Option<Work>,
) -> anyhow::Result<Ended> {
    // Signals are for the container, but until it starts they cancel that.
    let signals = [SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
    let signals = SignalsInfo::<WithOrigin>::new(signals).context("listening for signals")?;
    let starting = Cancellable::begin()?;
    let streams =
        if args.tty { Streams::Terminal } else { Streams::Ours { input: args.interactive } };
    let running = containers.start(request, &streams)?;
    interrupt::release();
    drop((work, starting));
    let held = args.hold.then(|| end_with_input(context, running.container.name())).transpose()?;
    let given_up = Cancel::default();
    let passed_on = pass_on(signals, running.runtime_id(), given_up.clone());
    let Finished { container, status, refusal, copied } = running.wait(&given_up);
    let written = match held {
        // The recorder looks at the pages of the root.
        Some(held) => tell_what_is_written(containers, &container).map(|()| _ = held.recv()),
        None => Ok(()),
    };
    let left = containers.remove(container);
    passed_on?;
    let status = status.context("waiting for the runtime")?;
    // The container's end counts. The next command removes what is left.
    match left {
        Ok(None) => {}
        Ok(Some(changes)) => context.ui.note(format!("changes are in {}", changes.display())),
        Err(error) => {
            context.ui.note(format!("the container has ended, but is not removed: {error}"))
        }
    }
    written?;
    match copied {
        Err(error) if status != 0 => context.ui.note(cofolio_store::with_causes(&error)),
        copied => copied?,
    }
    ended(status, refusal)
}

/// Tells whoever records this container where it has written, before its changes go.
fn tell_what_is_written(containers: &Containers<'_>, container: &Container) -> anyhow::Result<()> {
    let written = profile::written_by(containers, container.name())?;
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    // The recorder may have gone.
    let _ = (&socket).write_all(&serde_json::to_vec(&written)?);
    let _ = socket.shutdown(Shutdown::Write);
    Ok(())
}

/// The process that the user waits for, or the one that waits for a detached container.
pub(super) enum Side {
    /// The container runs, or could not be started.
    Foreground(Ended),
    /// A byte into the pipe says that the container runs.
    Background(PipeWriter),
}

pub(super) fn background() -> anyhow::Result<Side> {
    let (mut running, ready) = std::io::pipe()?;
    let child = match cofolio_sys::process::fork().context("going into the background")? {
        Fork::Child => return Ok(Side::Background(ready)),
        Fork::Parent(child) => child,
    };
    drop(ready);
    if running.read(&mut [0])? == 1 {
        return Ok(Side::Foreground(Ended::Container(0)));
    }
    Ok(Side::Foreground(Ended::Container(exit_status(wait_for(child)?))))
}

/// Starts a detached container, and waits for its end in a session of its own.
fn attend(
    args: &Args,
    context: &Context<'_>,
    containers: &Containers<'_>,
    request: &Request,
    mut ready: PipeWriter,
) -> anyhow::Result<Ended> {
    let output = args.output.as_ref().map(std::path::absolute).transpose()?;
    if let Some(path) = &output {
        append(path).with_context(|| format!("opening {}", path.display()))?;
    }
    // Until it runs, signals cancel the start.
    let starting = Cancellable::begin()?;
    let running = containers.start_detached(request, output)?;
    let container = &running.container;
    let mut tell = || -> anyhow::Result<()> {
        starting.cancel.check()?;
        if context.ui.json {
            context.ui.json(&json!({"name": container.name(), "rootfs": container.rootfs()}))?;
        } else {
            context.ui.line(container.name())?;
        }
        std::io::stdout().flush()?;
        // The process that the user waits for may have been ended.
        Ok(ready.write_all(b".")?)
    };
    if let Err(error) = tell() {
        containers.remove(running.container)?;
        return Err(error);
    }
    drop(ready);
    // From here on errors have no reader, and signals of the terminal are for others.
    let _ = rustix::process::setsid();
    let _ = cofolio_sys::process::silence();
    interrupt::release();
    drop(starting);
    let Finished { container, status, .. } = running.wait(&Cancel::default());
    match status {
        Ok(status) if !args.rm => containers.retire(container, status)?,
        _ => drop(containers.remove(container)?),
    }
    Ok(Ended::Container(0))
}

/// The ref of an image of a registry, which is pulled if the store does not have it.
fn here_or_pulled(
    reference: &Reference,
    args: &Args,
    context: &Context<'_>,
) -> anyhow::Result<String> {
    let name = reference.name();
    if context.domain_or_create()?.get_ref(name)?.is_none() {
        // Before anything is fetched for nothing.
        runtime(args, context)?;
        let source = Source::Registry(reference.clone());
        let options = ImportOptions {
            registry: RegistryArgs::default().options(&source, &context.config.config)?,
            trust: ArrivalArgs::default().arrival(&source, context)?,
            ..ImportOptions::default()
        };
        import::fetch(&source, &options, "pulling", context)?;
    }
    Ok(name.to_owned())
}

fn runtime(args: &Args, context: &Context<'_>) -> anyhow::Result<Runtime> {
    let wanted = args.runtime.as_deref().or(context.config.config.run.runtime.as_deref());
    Ok(Runtime::find(wanted, Path::new("/"))?)
}

fn request(args: &Args, context: &Context<'_>, image: &Named) -> anyhow::Result<Request> {
    let options = bundle::Options {
        terminal: args.tty,
        terminal_size: args.tty.then(terminal_size).flatten(),
        host_network: args.network == Network::Host,
        binds: args.volume.iter().map(|text| bind(text)).collect::<anyhow::Result<_>>()?,
        idmap: args.userns.as_deref().map(str::parse).transpose()?,
        memory_bytes: args.memory.map(|size| size.0),
        cpu_millis: args.cpus,
        writable_dirs: args.writable.clone(),
        ..args.process.options(&args.args, image)?
    };
    let has_config = image.record.as_ref().is_some_and(|record| record.config.is_some());
    if !has_config && image.shown().starts_with("recovered-") {
        context.ui.note(
            "the image has lost its configuration (command, user, environment), so it runs as root: \
             import or pull it again",
        );
    }
    let config = image_config(image)?;
    if let Some(dir) =
        options.writable_dirs.iter().find(|dir| bundle::is_hidden(&config, &options, dir))
    {
        let what = "the container has a mount of its own there";
        return Err(Fail::usage(format!("--writable {}: {what}", dir.display())).into());
    }
    Ok(Request {
        image: image.digest,
        image_name: image.shown(),
        config,
        name: args.name.clone(),
        options,
        writable: args.rw,
        keep: args.keep,
        size_bytes: args.size.map(|size| size.0),
        check: Check::None,
        runtime: runtime(args, context)?,
        ksm: args.ksm,
    })
}

fn bind(text: &str) -> anyhow::Result<Bind> {
    let wrong = |why: &str| Fail::usage(format!("--volume {text}: {why}"));
    let (source, target, readonly) = match text.split(':').collect::<Vec<_>>()[..] {
        [source, target] | [source, target, "rw"] => (source, target, false),
        [source, target, "ro"] => (source, target, true),
        [_, _, _] => return Err(wrong("the options are `ro` and `rw`").into()),
        _ => return Err(wrong("expected SOURCE:TARGET or SOURCE:TARGET:ro").into()),
    };
    if !target.starts_with('/') {
        return Err(wrong("the target is not an absolute path").into());
    }
    let plain: PathBuf = Path::new(target).components().collect();
    if plain.components().any(|component| component == Component::ParentDir) {
        return Err(wrong("the target has `..` in it").into());
    }
    if ["/", "/proc", "/sys", "/dev"].iter().any(|own| plain == Path::new(own)) {
        return Err(wrong("the container has a mount of its own there").into());
    }
    let source = fs::canonicalize(source).with_context(|| format!("--volume {source}"))?;
    if source.to_str().is_none() {
        return Err(wrong("the source's path is not UTF-8").into());
    }
    Ok(Bind { source, target: target.trim_end_matches('/').to_owned(), readonly })
}

fn cpu_millis(text: &str) -> Result<u64, String> {
    let number: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if !(0.01..=100_000.0).contains(&number) {
        return Err("not between 0.01 and 100000".to_owned());
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok((number * 1000.0).round() as u64)
}

/// Whoever records holds standard input until the end. Once they have gone, killed perhaps, the
/// container is ended: no other program knows of it. The channel is closed with the first byte, or
/// with the input.
fn end_with_input(context: &Context<'_>, name: &str) -> anyhow::Result<Receiver<()>> {
    let (recording, held) = mpsc::channel();
    let mut stop = context.cofolio();
    stop.args(["--quiet", "stop", name]).stdout(Stdio::null()).stderr(Stdio::null());
    std::thread::Builder::new().name("input".to_owned()).spawn(move || {
        let _ = std::io::stdin().read_exact(&mut [0]);
        drop(recording);
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        // It may be too early to be stopped. This thread ends with the process.
        while stop.status().is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    })?;
    Ok(held)
}

/// Rows and columns of the terminal that standard input is. crun takes them from the configuration
/// only.
pub(super) fn terminal_size() -> Option<(u16, u16)> {
    let size = rustix::termios::tcgetwinsize(std::io::stdin()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// From now on signals go to the runtime, which passes them on to the container, and so do those
/// that came while it was started. Once it has ended, they end the copying of its output, which
/// somebody may not read.
fn pass_on(
    mut signals: SignalsInfo<WithOrigin>,
    runtime: u32,
    given_up: Cancel,
) -> anyhow::Result<()> {
    let runtime = pidfd(runtime).context("holding on to the runtime")?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for Origin { signal, cause, .. } in signals.forever() {
            let mut ended = [PollFd::new(&runtime, PollFlags::IN)];
            if poll(&mut ended, Some(&Timespec::default())).is_ok_and(|ended| ended > 0) {
                given_up.cancel();
            }
            // The terminal sends its signals, Ctrl-C for one, to the runtime as well.
            if cause == Cause::Kernel {
                continue;
            }
            if let Some(signal) = Signal::from_named_raw(signal) {
                let _ = pidfd_send_signal(&runtime, signal);
            }
        }
    })?;
    Ok(())
}
