//! `cofolio bench`: measurements that other projects publish, on any images.

mod html;
mod measure;
mod namespace;
mod place;
mod read;
mod reader;
mod report;
mod runtime;
mod setup;
mod share;
mod source;

use std::ffi::OsString;

use clap::{CommandFactory as _, Parser};

use crate::{
    cmd::Outcome,
    context::Context,
    exit::{Exit, Fail},
};

/// Measure what sharing saves
///
/// `cofolio bench share OLD NEW`: memory for reading every file of two images, without and with sharing.
/// `cofolio bench runtime OLD NEW`: memory of both while they run under their usual load, likewise.
/// `cofolio bench namespace IMAGE`: time and memory for listing an image, and for one more container of it.
/// `cofolio bench read IMAGE`: how fast files are read, from packs and from a plain filesystem.
/// `cofolio bench page RESULT… --html FILE`: results of several pairs as one page for a browser.
/// `cofolio bench share --help` says more.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio bench share redis-old.tar redis-new.tar --json redis.json",
    disable_help_flag = true
)]
pub(crate) struct Args {
    // `--json` takes a file here and nothing in every other command: a grammar of its own.
    /// The benchmark and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

#[derive(Debug, Parser)]
#[command(
    name = "cofolio bench",
    about = "Measure what sharing saves",
    disable_help_subcommand = true,
    max_term_width = 100
)]
struct Bench {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Share(Box<share::Args>),
    Runtime(Box<runtime::Args>),
    Namespace(namespace::Args),
    Read(read::Args),
    Page(html::Args),
    /// The reading process of `share`
    #[command(hide = true)]
    Reader(reader::Args),
}

/// The grammar of what comes after `bench`, for man pages and completions.
pub(crate) fn grammar() -> clap::Command {
    Bench::command()
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let name = OsString::from("bench");
    let bench = match Bench::try_parse_from([&name].into_iter().chain(&args.arguments)) {
        Ok(bench) => bench,
        Err(error) => {
            let _ = error.print();
            return Ok(if error.exit_code() == 0 { Exit::Ok } else { Exit::Usage });
        }
    };
    match bench.command {
        Command::Share(args) => {
            needs_root("bench share", "it mounts, drops the page cache and counts pages")?;
            share::run(&args, context)
        }
        Command::Runtime(args) => {
            needs_root("bench runtime", "it mounts, starts containers and drops the page cache")?;
            runtime::run(&args, context)
        }
        Command::Namespace(args) => {
            needs_root("bench namespace", "it mounts and drops caches")?;
            namespace::run(&args, context)
        }
        Command::Read(args) => {
            needs_root("bench read", "it mounts and drops the page cache")?;
            read::run(&args, context)
        }
        Command::Page(args) => html::run(&args),
        Command::Reader(args) => reader::run(&args).map(|()| Exit::Ok),
    }
}

fn needs_root(what: &str, why: &str) -> Result<(), Fail> {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(Fail::new(Exit::Missing, format!("{what} needs root: {why}"))),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn definitions_are_consistent() {
        super::grammar().debug_assert();
    }
}
