use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cofolio_daemon::{AuthFiles, Options, Schedule, Settings};
use cofolio_node::config::{Config, DEFAULT_PATH, Loaded, Origin, listen_address};
use cofolio_node::ksm::KsmPolicy;
use cofolio_node::ledger::ReclaimPolicy;
use cofolio_node::vm::merger::MergePolicy;
use cofolio_node::vm::recycler::Policy;
use cofolio_store::{Error, Store};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::PIPE_BUF;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;

/// Run the daemon: the ledger over HTTP, the dashboard, and upkeep on a schedule
///
/// Keeps the ledger (who uses which object, what is resident, what sharing saves) and answers over
/// HTTP, as JSON, as metrics and as a page, until SIGTERM or Ctrl-C. Collects garbage once a day
/// and reads all content once a month, at low priority; `[daemon]` of the configuration says
/// otherwise. No other command needs it: containers and mounts go on when it stops, and the next
/// one finds what it needs in the run directory and the kernel. At SIGHUP it reads the
/// configuration again, all but where it listens, and the files of certificates, keys and the
/// token. Where there is no store it makes an empty one.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio serve\n  \
    curl --unix-socket /run/cofolio/cofolio.sock http://localhost/v1/report")]
pub(crate) struct Args {
    /// Path of the unix socket, in a directory that exists (default: cofolio.sock in the run
    /// directory, which is made). Commands look for the daemon where `[daemon] socket` of the
    /// configuration says, so say another path there
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Group whose members may connect to it, besides root
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// A TCP address to listen at as well, for reading: at a loopback address anybody can read, at
    /// others clients with a token or certificate (`[daemon]` of the configuration)
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = listen_address)]
    listen: Option<SocketAddr>,
    /// From one look at objects and processes to the next, in seconds (default: 10)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    period: Option<u32>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("serving")?;
    context.refuse_json("the API has it")?;
    // Nothing need be imported when systemd starts it for the first time. If the filesystem of the
    // store is not mounted, the operator has to see it.
    let is_new = matches!(Store::open(&context.global.store), Err(Error::NotAStore { .. }));
    let store = context.store_or_create()?;
    if is_new {
        say(&format!("made an empty store at {}", context.global.store.display()));
    }
    let config = &context.config.config.daemon;
    let options = Options {
        run: context.run_dir_of(&store)?,
        store,
        socket: args.socket.clone().unwrap_or_else(|| context.socket()),
        group: args.group.clone().or_else(|| config.group.clone()),
        listen: args.listen.or(config.listen),
        auth: AuthFiles {
            certificate: config.tls_certificate.clone(),
            key: config.tls_key.clone(),
            client_ca: config.tls_client_ca.clone(),
            token: config.token_file.clone(),
        },
        settings: settings(args, &context.config.config),
    };
    let reload = || {
        let path = context.global.config.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
        let read = Loaded::read(path).map_err(|error| format!("{:#}", anyhow::Error::from(error)));
        let new = match read? {
            Some(loaded) => loaded.config,
            None if context.global.config.is_some() => {
                return Err(format!("there is no file {}", path.display()));
            }
            None => Config::default(),
        };
        let changed = needs_restart(args, context, &new);
        if !changed.is_empty() {
            say(&format!("restart the daemon to apply: {}", changed.join(", ")));
        }
        Ok(settings(args, &new))
    };
    cofolio_daemon::serve(options, &reload, &say)?;
    Ok(Exit::Ok)
}

/// Writes a line to standard error, unless that would wait or fail: whoever reads it may have
/// stopped or gone, and the daemon stays.
fn say(said: &str) {
    let mut line = format!("cofolio: {said}").into_bytes();
    // A pipe that takes anything at all takes this much at once.
    line.truncate(PIPE_BUF - 1);
    line.push(b'\n');
    let mut stderr = std::io::stderr().lock();
    let mut writable = [PollFd::new(&stderr, PollFlags::OUT)];
    if poll(&mut writable, Some(&Timespec::default())) == Ok(1) {
        let _ = stderr.write(&line);
    }
}

/// Keys with a new value that a reload does not apply. Options come before the file.
fn needs_restart(args: &Args, context: &Context<'_>, new: &Config) -> Vec<&'static str> {
    let Config { store: old_store, daemon: old, .. } = &context.config.config;
    let Config { store: new_store, daemon: new, .. } = new;
    let is_of_file = |key| matches!(context.config.origin(key), Origin::File | Origin::Default);
    let keys = [
        ("store.path", is_of_file("store.path") && old_store.path != new_store.path),
        ("store.run_dir", is_of_file("store.run_dir") && old_store.run_dir != new_store.run_dir),
        ("socket", args.socket.is_none() && old.socket != new.socket),
        ("group", args.group.is_none() && old.group != new.group),
        ("listen", args.listen.is_none() && old.listen != new.listen),
        ("tls_certificate", old.tls_certificate != new.tls_certificate),
        ("tls_key", old.tls_key != new.tls_key),
        ("tls_client_ca", old.tls_client_ca != new.tls_client_ca),
        ("token_file", old.token_file != new.token_file),
    ];
    keys.into_iter().filter(|(_, is_changed)| *is_changed).map(|(key, _)| key).collect()
}

fn settings(args: &Args, config: &Config) -> Settings {
    let Config { daemon, store, vm, ksm, .. } = config;
    let every = |number: u32, seconds: u64| {
        (number > 0).then(|| Duration::from_secs(u64::from(number) * seconds))
    };
    Settings {
        period: Duration::from_secs(args.period.unwrap_or(daemon.period).into()),
        share: daemon.cpu_percent / 100.0,
        reclaim: ReclaimPolicy {
            bytes: daemon.reclaim.size.0,
            percent: daemon.reclaim.pressure_percent,
            left_behind: daemon.reclaim.drop_left_behind,
        },
        upkeep: Schedule {
            delay: Duration::from_secs(120),
            gc: every(daemon.gc_hours, 3600),
            scrub: every(daemon.scrub_days, 86_400),
            scrub_rate: Some(daemon.scrub_rate.0),
            limit: store.limit.clone(),
        },
        recycle: vm.recycle.then(|| Policy {
            period: Duration::from_secs(vm.recycle_seconds.into()),
            reserve: vm.reserve.0,
            share: vm.recycle_cpu_percent / 100.0,
            ..Policy::default()
        }),
        merge: vm.merge.then(|| MergePolicy {
            period: Duration::from_secs(vm.merge_seconds.into()),
            run_min: vm.merge_min_pages as usize,
            share: vm.merge_cpu_percent / 100.0,
            blocks: vm.merge_blocks,
            ..MergePolicy::default()
        }),
        ksm: ksm.steer.then(|| KsmPolicy { share: ksm.cpu_percent / 100.0 }),
    }
}
