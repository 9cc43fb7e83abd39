use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap_mangen::Man;

use crate::cli;
use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::plural;

/// Print the manual page, or write those of all commands to a directory
///
/// The pages are made from the definitions that `--help` is made from. `make install` installs them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio man | man -l -\n  cofolio man /usr/local/share/man/man1"
)]
pub(crate) struct Args {
    /// Write `cofolio.1` and a page for every command there; the directory is made if it is missing
    dir: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    // The pages of `help` would say nothing.
    let mut command = <cli::Cli as clap::CommandFactory>::command().disable_help_subcommand(true);
    command.build();
    let Some(dir) = &args.dir else {
        io::stdout().lock().write_all(page(command, "cofolio")?.as_bytes())?;
        return Ok(Exit::Ok);
    };
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    let count = write(command, "cofolio", dir)?;
    context.ui.note(format!("{} in {}", plural(count, "page"), dir.display()));
    Ok(Exit::Ok)
}

/// Writes the page of a command and those of the commands below it; gives their number.
fn write(command: clap::Command, name: &str, dir: &Path) -> anyhow::Result<u64> {
    let mut count = 1;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        count += write(sub.clone(), &format!("{name}-{}", sub.get_name()), dir)?;
    }
    let path = dir.join(format!("{name}.1"));
    fs::write(&path, page(command, name)?)
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(count)
}

/// A page of clap_mangen, but with our title (theirs shows the version in place of a date) and with
/// the text below the options as the usual sections.
fn page(command: clap::Command, name: &str) -> anyhow::Result<String> {
    let below = command.get_after_long_help().or(command.get_after_help());
    let below = sections(&below.map(ToString::to_string).unwrap_or_default());
    let command =
        command.after_help(None::<&str>).after_long_help(None::<&str>).version(None::<&str>);
    let mut made = Vec::new();
    Man::new(command).render(&mut made)?;
    let mut text = String::new();
    let (title, version) = (name.to_uppercase(), env!("CARGO_PKG_VERSION"));
    for line in String::from_utf8(made)?.lines() {
        let _ = match line.starts_with(".TH ") {
            true => writeln!(text, ".TH \"{title}\" \"1\" \"\" \"cofolio {version}\" \"Cofolio\""),
            false => writeln!(text, "{}", line.trim_end()),
        };
    }
    text.push_str(&below);
    Ok(text)
}

/// Formats the text below the options, block by block. Examples and exit codes keep their lines.
fn sections(text: &str) -> String {
    let mut made = String::new();
    for block in text.split("\n\n").filter(|block| !block.trim().is_empty()) {
        let (heading, rest) = match block.split_once('\n') {
            Some(("Example:", rest)) => ("EXAMPLES", rest),
            Some(("Exit codes:", rest)) => ("EXIT STATUS", rest),
            _ => ("NOTES", block),
        };
        let as_it_is = heading != "NOTES";
        let _ = writeln!(made, ".SH \"{heading}\"");
        made.push_str(if as_it_is { ".nf\n" } else { "" });
        for line in rest.lines() {
            // A line that begins with a dot or an apostrophe would be a request.
            let line = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
            let guard = if line.starts_with('.') { "\\&" } else { "" };
            let _ = writeln!(made, "{guard}{}", line.trim_end());
        }
        made.push_str(if as_it_is { ".fi\n" } else { "" });
    }
    made
}
