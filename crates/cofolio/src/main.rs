//! The `cofolio` command: one copy of every page.
//!
//! A thin face over the libraries: `cli.rs` defines every flag once, `cmd/` has a file per
//! subcommand, and `cofolio_cli` turns errors into exit codes and knows terminals.

mod cli;
mod cmd;
mod context;
mod image;
mod progress;
mod trim;
mod trust;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::builder::Resettable;
use clap::{CommandFactory, FromArgMatches};
use cofolio_cli::{exit, interrupt, ui};

use crate::cli::Cli;
use crate::context::Context;
use crate::exit::Exit;

fn main() -> ExitCode {
    // While there is one thread. The bound on an import's memory depends on it.
    cofolio_sys::memory::return_large_blocks();
    // Without it a write over the limit kills; all else works as well.
    let _ = interrupt::survive_file_size_limit();
    cmd::completions::complete();
    let args: Vec<OsString> = std::env::args_os().collect();
    // mkcomposefs has its own grammar, so it is recognized before our parser sees the arguments.
    let name = Some("mkcomposefs".as_ref());
    if let Some(at) = args.iter().take(2).position(|arg| Path::new(arg).file_name() == name) {
        return cmd::mkcomposefs::main(&args[at..]);
    }

    if args.len() <= 1 {
        // clap would not do it where COFOLIO_STORE or COFOLIO_RUN are set: they count as arguments.
        let _ = Cli::command().color(clap::ColorChoice::Auto).print_help();
        return Exit::Usage.into();
    }
    let matches = Cli::command().try_get_matches_from(&args);
    let parsed = matches.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    let (mut cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            // Options from the environment are not on the command line, and not in its usage.
            let given = || Cli::command().mut_args(|arg| arg.env(Resettable::Reset));
            let error = match error.exit_code() {
                0 => error,
                _ => given().try_get_matches_from(&args).err().unwrap_or(error),
            };
            // A closed pipe is no failure: the reader of the help has seen enough.
            let _ = error.print();
            return match error.exit_code() {
                0 => Exit::Ok.into(),
                _ => Exit::Usage.into(),
            };
        }
    };
    let ui = ui::Ui::new(cli.global.json, cli.global.quiet, cli.global.color);
    // Without a flush, a failure to write the rest of the buffer at exit would go unnoticed.
    let ended = cli.global.load(&matches).and_then(|config| {
        let ended = cli.command.run(&Context { global: cli.global, config, ui: &ui })?;
        std::io::stdout().flush().context("writing the output")?;
        Ok(ended)
    });
    match ended {
        Ok(exit) => exit.into(),
        Err(error) => exit::report(&error, &ui).into(),
    }
}
