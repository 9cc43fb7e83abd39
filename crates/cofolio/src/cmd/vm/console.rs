use std::fs::File;
use std::io::{IsTerminal as _, Read as _, Write as _};

use anyhow::Context as _;
use cofolio_cli::interrupt::Cancellable;
use cofolio_node::vm::console::DetachKeys;
use cofolio_store::task::Cancel;
use signal_hook::consts::SIGWINCH;
use signal_hook::iterator::Signals;

use crate::cmd::run::terminal_size;
use crate::cmd::vm::terminal::RawTerminal;
use crate::context::Context;
use crate::exit::{Ended, Exit};

/// Attach to the console of a detached virtual machine
///
/// Prints the last 16 KiB that its console has said, and what it says from now on. A machine that
/// was started with --interactive also gets this process's standard input, from one `vm console` at
/// a time, and the size of its terminal. On a terminal Ctrl-P Ctrl-Q detaches, and other keys are
/// the machine's, Ctrl-C too. Without input Ctrl-C detaches.
///
/// Of a machine that has ended it prints all that is kept. The exit status is that of the
/// image's program if it has ended and its status is kept, else 0.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio vm run -d -i --name box debian:13 -- bash\n  \
    cofolio vm console box\n  echo reload | cofolio vm console box")]
pub(crate) struct Args {
    /// Name of the machine, as `vm ps` shows it
    name: String,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    context.needs_root("attaching to a virtual machine")?;
    let domain = context.domain()?;
    let mut console = super::machines(&domain, context)?.console(&args.name)?;
    // Also of a signal, so that the terminal is as it was.
    let detached = Cancellable::begin()?;
    let input = console.take_input();
    let terminal = if input.is_some() { RawTerminal::begin() } else { None };
    if let Some(input) = input {
        if terminal.is_some() {
            context.ui.note(format!("{}: Ctrl-P Ctrl-Q detaches\r", args.name));
            pass_sizes_on(console.resizer())?;
        }
        let detached = detached.cancel.clone();
        // Not joined: it may read from a terminal for ever.
        std::thread::Builder::new()
            .name("input".to_owned())
            .spawn(move || give(input, &detached))?;
    }
    let status = console.follow(&mut std::io::stdout().lock(), &detached.cancel);
    drop(terminal);
    match status.context("following the console")? {
        Some(status) => Ok(Ended::Container(status)),
        None => Ok(Exit::Ok.into()),
    }
}

/// From now on the console has the size of the terminal.
fn pass_sizes_on(resize: impl Fn(u16, u16) + Send + 'static) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGWINCH]).context("listening for signals")?;
    let pass_on = move || {
        for _ in std::iter::once(SIGWINCH).chain(signals.forever()) {
            if let Some((rows, columns)) = terminal_size() {
                resize(rows, columns);
            }
        }
    };
    std::thread::Builder::new().name("size".to_owned()).spawn(pass_on)?;
    Ok(())
}

/// Passes standard input on, keys without those that detach.
fn give(mut input: File, detached: &Cancel) -> std::io::Result<()> {
    let mut stdin = std::io::stdin().lock();
    let is_terminal = stdin.is_terminal();
    let (mut keys, mut piece) = (DetachKeys::default(), vec![0; 4096]);
    loop {
        let length = stdin.read(&mut piece)?;
        if length == 0 {
            return Ok(());
        }
        if !is_terminal {
            input.write_all(&piece[..length])?;
            continue;
        }
        let (passed, detaches) = keys.filter(&piece[..length]);
        input.write_all(&passed)?;
        if detaches {
            detached.cancel();
            return Ok(());
        }
    }
}
