use std::os::fd::AsFd as _;

use anyhow::Context as _;
use cofolio_guest::Exec;
use cofolio_guest::frame::Frame;
use cofolio_node::vm::exec::ExecProcess;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::Signals;

use crate::cmd::bundle::SettingArgs;
use crate::cmd::exec::BesideArgs;
use crate::cmd::run::terminal_size;
use crate::cmd::vm::run::PATIENCE;
use crate::cmd::vm::terminal::RawTerminal;
use crate::context::Context;
use crate::exit::{Ended, Exit, Fail};

/// Start a process in a virtual machine that runs
///
/// It has the user, working directory and environment of the image's program, if the options do not
/// say otherwise, and ends with the machine at the latest. Its output and error stay apart unless it
/// has a terminal.
///
/// The exit status is the process's, or 128 and the number of the signal that ended it; 126 if its
/// program cannot be executed, 127 if the program does not exist. Signals are passed on to the
/// process and its group; the third one that asks for the end gives the process up. The process and
/// its group are killed if `vm exec` ends before the process does; what it has put into a session
/// or group of its own goes on, as a daemon does, until the machine ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio vm exec cache -- redis-cli ping\n  \
    cofolio vm exec -it cache -- sh\n  \
    tar -c data | cofolio vm exec -i -w /srv cache -- tar -x")]
pub(crate) struct Args {
    /// Name of the machine, as `vm ps` shows it
    name: String,
    #[command(flatten)]
    process: BesideArgs,
    #[command(flatten)]
    setting: SettingArgs,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    context.needs_root("starting a process in a virtual machine")?;
    let BesideArgs { command, interactive, tty } = &args.process;
    args.process.check()?;
    let mut env = args.setting.environment()?;
    if *tty && !env.iter().any(|entry| entry.starts_with("TERM=")) {
        env.push(format!("TERM={}", std::env::var("TERM").as_deref().unwrap_or("xterm")));
    }
    let exec = Exec {
        command: command.clone(),
        env,
        cwd: args.setting.workdir.clone(),
        user: args.setting.user.clone(),
        terminal: tty.then(|| terminal_size().unwrap_or((24, 80))),
    };
    let domain = context.domain()?;
    let mut session = super::machines(&domain, context)?.exec(&args.name, exec)?;
    pass_on(session.process())?;
    let terminal = if *tty { RawTerminal::begin() } else { None };
    let stdin = std::io::stdin();
    let input = (*interactive || *tty).then(|| stdin.as_fd().try_clone_to_owned());
    let (mut output, mut errors) = (std::io::stdout().lock(), std::io::stderr().lock());
    let status = session.run(input.transpose()?, &mut output, &mut errors);
    drop(terminal);
    match status.context("passing the process's streams on")? {
        Some(status) => Ok(Ended::Container(status)),
        None => {
            let what =
                format!("virtual machine `{}` has ended, or the process was given up", args.name);
            Err(Fail::new(Exit::Failure, what).into())
        }
    }
}

/// From now on signals go to the process, and the size of the terminal.
fn pass_on(process: ExecProcess) -> anyhow::Result<()> {
    let signals = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH];
    let mut signals = Signals::new(signals).context("listening for signals")?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let mut asked = 0;
        for signal in signals.forever() {
            let frame = match (signal, terminal_size()) {
                (SIGWINCH, Some((rows, columns))) => Frame::Size(rows, columns),
                (SIGWINCH, None) => continue,
                _ => Frame::Signal(u8::try_from(signal).unwrap_or_default()),
            };
            let _ = process.tell(&frame);
            if [SIGHUP, SIGINT, SIGQUIT, SIGTERM].contains(&signal) {
                asked += 1;
            }
            if asked >= PATIENCE {
                process.give_up();
            }
        }
    })?;
    Ok(())
}
