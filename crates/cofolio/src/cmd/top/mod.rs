//! `cofolio top`: who shares what, on a screen or as text.
//!
//! `worker` asks for the figures; `rows` and `summary` turn them into tables and lines; `app` is the
//! state of the screen, which keys and answers change; `draw` shows it.

mod app;
mod draw;
mod rows;
mod summary;
#[cfg(test)]
mod tests;
mod worker;

use std::io::{self, IsTerminal as _};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cofolio_cli::interrupt::Cancellable;
use cofolio_node::config::Origin;
use cofolio_node::ledger::Report;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::style::force_color_output;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use self::app::{App, Effect};
use self::rows::{Detail, View};
use self::summary::{Totals, caveats, page_cache, warnings};
use self::worker::{Ask, Worker};
use crate::cmd::Outcome;
use crate::cmd::source::Source;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone};

/// How long the screen waits for a key before it looks for answers and signals.
const TICK: Duration = Duration::from_millis(100);

/// Show which images and containers share which pages, and what that saves
///
/// On a terminal it is interactive: Enter opens the files of an image and the users of a file, Esc
/// goes back, ? lists all keys, q ends. Elsewhere, and with --once or --json, it prints the figures
/// once.
///
/// The figures are those of a running `cofolio serve`, which has also seen which files were opened.
/// Without one, this command looks for itself: it sees mapped files, and files that are opened
/// while it runs.
///
/// RESIDENT is in the page cache. SHARED is the part of it that other images name, or other
/// containers use, too. SAVED is what the page cache would hold more if each image had its own copy
/// of what its containers use.
///
/// It shows all trust domains. With --domain it shows the images of one, and the containers that
/// use them.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio top\n  cofolio top --once\n  \
    cofolio top --json | jq '.domains[].saved_bytes'")]
pub(crate) struct Args {
    /// Print the figures once and exit
    #[arg(long)]
    once: bool,
    /// Time from one look to the next
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 2,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    period: u64,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let is_once = args.once || context.ui.json || is_dumb || !io::stdout().is_terminal();
    // The configuration's domain is for commands that work on one. Here all are of interest.
    let is_given = context.config.origin("store.domain") == Origin::Flag;
    let domain = is_given.then(|| context.global.domain.clone());
    let mut source = Source::open(context, !is_once)?;
    if context.ui.json {
        return context.ui.json(&source.first_report(domain.as_deref())?);
    }
    if is_once {
        return print(context, source.title(), &source.first_report(domain.as_deref())?);
    }
    match interact(source, domain, Duration::from_secs(args.period), context) {
        // Drawing failed for that reason.
        Err(_) if is_gone(Some(&Timespec::default())) => Ok(Exit::Interrupted),
        ended => ended,
    }
}

fn print(context: &Context<'_>, title: &[&str], report: &Report) -> Outcome {
    let ui = context.ui;
    let mut totals = Totals::of(report).parts();
    totals.push(page_cache(report));
    ui.line(totals.join("  "))?;
    for view in [View::Images, View::Containers] {
        let mut rows = view.rows(report, &Detail::None);
        let columns = view.columns();
        rows::sort(&mut rows, view.sort(), columns[view.sort()].descending);
        let titles: Vec<&str> = columns.iter().map(|column| column.title).collect();
        let mut table = Table::new(&titles);
        for row in rows {
            let cells = row.values.iter().map(|value| match value.is_text() {
                true => Cell::left(value.shown()).tone(Tone::Bold),
                false => Cell::right(value.shown()),
            });
            table.row(cells.collect());
        }
        ui.line("")?;
        ui.table(&table)?;
    }
    ui.line("")?;
    let mut notes = caveats(report, cofolio_store::now());
    notes.extend(title.iter().map(|part| (*part).to_owned()));
    ui.line(ui.paint(Tone::Dim, &notes.join("  ")))?;
    for warning in warnings(report) {
        ui.line(ui.paint(Tone::Dim, &format!("unknown: {warning}")))?;
    }
    Ok(Exit::Ok)
}

/// The terminal in raw mode, on its alternate screen, until it is dropped.
struct Terminal(DefaultTerminal);

impl Terminal {
    fn open() -> anyhow::Result<Self> {
        match ratatui::try_init() {
            Ok(terminal) => Ok(Self(terminal)),
            Err(error) => {
                let _ = ratatui::try_restore();
                Err(error).context("preparing the terminal")
            }
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Both fail if the terminal has gone.
        let _ = self.0.show_cursor();
        // After a panic ratatui's hook has done it. A second time, the cursor would move over the
        // message.
        if !std::thread::panicking() {
            let _ = ratatui::try_restore();
        }
    }
}

/// Whether the terminal that keys come from has gone: its window was closed, or its connection
/// broke. Waits for that until `wait` is over, if it is given.
fn is_gone(wait: Option<&Timespec>) -> bool {
    let (stdin, stdout) = (io::stdin(), io::stdout());
    // As crossterm has it; the other one is the terminal for certain.
    let terminal = if stdin.is_terminal() { stdin.as_fd() } else { stdout.as_fd() };
    // A hangup and an error are reported unasked.
    let mut fds = [PollFd::from_borrowed_fd(terminal, PollFlags::empty())];
    loop {
        match poll(&mut fds, wait) {
            Err(Errno::INTR) => {}
            polled => return polled == Ok(1),
        }
    }
}

/// From now on, a thread ends the process once its terminal has gone. The main thread cannot do that:
/// crossterm reads a terminal that has hung up in an endless loop.
fn end_with_terminal() -> io::Result<()> {
    let watch = || {
        if is_gone(None) {
            std::process::exit(i32::from(Exit::Interrupted as u8));
        }
    };
    std::thread::Builder::new().name("hangup".to_owned()).spawn(watch).map(drop)
}

fn interact(
    source: Source,
    domain: Option<String>,
    period: Duration,
    context: &Context<'_>,
) -> Outcome {
    let signals = Cancellable::begin()?;
    let color = context.ui.has_color();
    force_color_output(color);
    let mut app = App::new(source.title());
    let mut worker = Worker::start(source, domain)?;
    let mut terminal = Terminal::open()?;
    end_with_terminal()?;
    let mut due = Instant::now();
    while !signals.cancel.is_cancelled() {
        while let Some(answer) = worker.answer()? {
            app.take(answer);
        }
        let now = Instant::now();
        if due <= now && !worker.is_busy() && !app.is_paused {
            worker.ask(Ask::Report);
            app.detailed().into_iter().for_each(|view| worker.ask(Ask::Detail(view)));
        }
        if worker.is_busy() {
            // From its end on: a look that takes long must not keep a processor busy all the time.
            due = now + period;
        }
        app.now = cofolio_store::now();
        terminal.0.draw(|frame| {
            app.set_page(draw::page(frame.area()));
            draw::draw(frame, &app, color);
        })?;
        // All keys that wait, before the next drawing.
        let mut wait = TICK;
        while event::poll(wait)? {
            wait = Duration::ZERO;
            let Event::Key(key) = event::read()? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            match app.key(key) {
                Effect::Quit => return Ok(Exit::Ok),
                Effect::Load(view) => worker.ask(Ask::Detail(view)),
                Effect::None => {}
            }
        }
    }
    Ok(Exit::Interrupted)
}
