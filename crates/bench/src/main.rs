//! `cofolio-bench`: measurements that other projects publish, on any images.

mod balance;
mod churn;
mod cleanup;
mod daemon;
mod daemon_memory;
mod density;
mod dying;
mod goals;
mod ksm;
mod machines;
mod measure;
mod median;
mod memory;
mod merge;
mod namespace;
mod place;
mod read;
mod reader;
mod report;
mod residency;
mod runtime;
mod setup;
mod share;
mod source;
mod threads;
mod usage_lists;

use std::process::ExitCode;

use clap::Parser;
use cofolio_cli::exit::{self, Exit, Fail};
use cofolio_cli::ui::{ColorWhen, Ui};

/// What a benchmark returns: its exit code, or an error that has one.
type Outcome = anyhow::Result<Exit>;

/// Measure what sharing saves
#[derive(Debug, Parser)]
#[command(
    name = "cofolio-bench",
    version,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_help = "Example:\n  cofolio-bench share redis-old.tar redis-new.tar --json redis.json"
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
    Density(density::Args),
    Balance(balance::Args),
    Churn(churn::Args),
    UsageLists(usage_lists::Args),
    DaemonMemory(daemon_memory::Args),
    Merge(merge::Args),
    VmDensity(machines::density::Args),
    VmImage(machines::image::Args),
    VmMerge(machines::merge::Args),
    /// The reading process of `share`
    #[command(hide = true)]
    Reader(reader::Args),
    /// The process of a container of `density`
    #[command(hide = true)]
    DensityWorker(density::worker::Args),
    #[command(hide = true)]
    MergeWorker(merge::worker::Args),
}

fn main() -> ExitCode {
    // Before any thread starts: the bound on an import's memory depends on it.
    cofolio_sys::memory::return_large_blocks();
    let bench = match Bench::try_parse() {
        Ok(bench) => bench,
        Err(error) => {
            let _ = error.print();
            return if error.exit_code() == 0 { Exit::Ok } else { Exit::Usage }.into();
        }
    };
    match run(bench.command) {
        Ok(exit) => exit.into(),
        Err(error) => exit::report(&error, &Ui::new(false, false, ColorWhen::Auto)).into(),
    }
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Share(args) => {
            needs_root("share", "it mounts, drops the page cache and counts pages")?;
            share::run(&args)
        }
        Command::Runtime(args) => {
            needs_root("runtime", "it mounts, starts containers and drops the page cache")?;
            runtime::run(&args)
        }
        Command::Namespace(args) => {
            needs_root("namespace", "it mounts and drops caches")?;
            namespace::run(&args)
        }
        Command::Read(args) => {
            needs_root("read", "it mounts and drops the page cache")?;
            read::run(&args)
        }
        Command::Density(args) => {
            needs_root("density", "it mounts, makes memory cgroups and drops caches")?;
            density::run(&args)
        }
        Command::Balance(args) => {
            needs_root("balance", "it mounts and drops the page cache")?;
            balance::run(&args)
        }
        Command::Churn(args) => {
            needs_root("churn", "it mounts and makes memory cgroups")?;
            churn::run(&args)
        }
        Command::UsageLists(args) => usage_lists::run(&args),
        Command::DaemonMemory(args) => {
            needs_root("daemon-memory", "it mounts and makes memory cgroups")?;
            daemon_memory::run(&args)
        }
        Command::Merge(args) => {
            needs_root("merge", "it sets KSM and reads the memory of processes")?;
            merge::run(&args)
        }
        Command::VmDensity(args) => {
            needs_root("vm-density", "it starts virtual machines and sets KSM")?;
            machines::density::run(&args)
        }
        Command::VmImage(args) => {
            needs_root("vm-image", "it starts virtual machines and drops caches")?;
            machines::image::run(&args)
        }
        Command::VmMerge(args) => {
            needs_root("vm-merge", "it starts virtual machines and sets KSM")?;
            machines::merge::run(&args)
        }
        Command::MergeWorker(args) => merge::worker::run(&args).map(|()| Exit::Ok),
        Command::DensityWorker(args) => density::worker::run(&args).map(|()| Exit::Ok),
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
    use clap::CommandFactory as _;

    #[test]
    fn definitions_are_consistent() {
        super::Bench::command().debug_assert();
    }
}
