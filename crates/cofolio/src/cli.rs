//! Every flag, once: parsing, `--help`, man pages and completions all come from these definitions.

use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Parser, Subcommand};

use cofolio_cli::exit::Fail;
use cofolio_cli::ui::ColorWhen;
use cofolio_node::config::{DEFAULT_PATH, DEFAULT_RUN_DIR, DEFAULT_STORE, Loaded, Origin};

use crate::cmd;
use crate::context::Context;
use crate::exit::{self, Ended};

/// One copy of every page: container images that share their page cache.
///
/// Cofolio keeps images once, content-addressed and verified, in a store; identical files of different
/// images are one file there and so one page-cache copy, for every container that mounts them.
#[derive(Debug, Parser)]
#[command(
    name = "cofolio",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = false,
    max_term_width = 100,
    after_help = "Example:\n  \
        cofolio import redis.tar --name redis:7.0.15\n  \
        cofolio mount redis:7.0.15 /mnt/redis\n  \
        cofolio doctor\n\n\
        `cofolio COMMAND --help` explains a command; `cofolio --help` lists the exit codes.",
    after_long_help = long_help(),
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options that every command takes. What the configuration file says of them is settled before a command
/// sees them.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// Directory of the store
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "COFOLIO_STORE",
        hide_env_values = true,
        default_value = DEFAULT_STORE
    )]
    pub(crate) store: PathBuf,
    /// Trust domain: nothing is shared across domains
    #[arg(long, global = true, value_name = "NAME", default_value = cofolio_store::DEFAULT_DOMAIN)]
    pub(crate) domain: String,
    /// Directory of the runtime state (live mounts)
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "COFOLIO_RUN",
        hide_env_values = true,
        default_value = DEFAULT_RUN_DIR
    )]
    pub(crate) run_dir: PathBuf,
    /// Configuration file (default: /etc/cofolio/config.toml, if it is there)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "COFOLIO_CONFIG",
        hide_env_values = true
    )]
    pub(crate) config: Option<PathBuf>,
    /// Print JSON for scripts instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Print what was asked for and errors: no progress, no remarks, no summary of what was done
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// When to use colours
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub(crate) color: ColorWhen,
}

impl Global {
    /// Reads the configuration file. Afterwards it and these options both have the values in force.
    pub(crate) fn load(&mut self, matches: &ArgMatches) -> anyhow::Result<Loaded> {
        let mut loaded = match &self.config {
            Some(path) => Loaded::read(path)?.ok_or_else(|| {
                let what = format!("no configuration file {}", path.display());
                Fail::not_found(what).hint("--config and COFOLIO_CONFIG name a file that exists")
            })?,
            None => Loaded::read(Path::new(DEFAULT_PATH))?.unwrap_or_default(),
        };
        let store = &mut loaded.config.store;
        let origins = [
            ("store.path", override_setting(matches, "store", &mut self.store, &mut store.path)),
            (
                "store.domain",
                override_setting(matches, "domain", &mut self.domain, &mut store.domain),
            ),
            (
                "store.run_dir",
                override_setting(matches, "run_dir", &mut self.run_dir, &mut store.run_dir),
            ),
        ];
        for (key, origin) in origins {
            if let Some(origin) = origin {
                loaded.set_origin(key, origin);
            }
        }
        Ok(loaded)
    }
}

/// Overrides a setting by its option, if that is given; returns where the option is from. Both have
/// the value in force then.
fn override_setting<T: Clone>(
    matches: &ArgMatches,
    id: &str,
    option: &mut T,
    setting: &mut T,
) -> Option<Origin> {
    let origin = match matches.value_source(id) {
        Some(ValueSource::CommandLine) => Origin::Flag,
        Some(ValueSource::EnvVariable) => Origin::Env,
        _ => {
            option.clone_from(setting);
            return None;
        }
    };
    setting.clone_from(option);
    Some(origin)
}

/// Makes the enum of all commands, each with its arguments.
macro_rules! commands {
    ($($command:ident => $module:ident,)*) => {
        #[derive(Debug, Subcommand)]
        pub(crate) enum Command { $($command(cmd::$module::Args)),* }

        impl Command {
            pub(crate) fn run(&self, context: &Context<'_>) -> anyhow::Result<Ended> {
                match self {
                    $(Self::$command(args) => Ok(cmd::$module::run(args, context)?.into())),*
                }
            }
        }
    };
}

commands! {
    Import => import,
    Pull => pull,
    Export => export,
    Push => push,
    Pack => pack,
    Backend => backend,
    Mount => mount,
    Umount => umount,
    Mounts => mounts,
    Images => images,
    Inspect => inspect,
    Diff => diff,
    Ls => ls,
    Cat => cat,
    Dump => dump,
    Verify => verify,
    Sign => sign,
    Tag => tag,
    Rm => rm,
    Gc => gc,
    Fsck => fsck,
    Du => du,
    Run => run,
    Exec => exec,
    Ps => ps,
    Top => top,
    Serve => serve,
    Warm => warm,
    Profile => profile,
    Reclaim => reclaim,
    Stop => stop,
    Vm => vm,
    KsmExec => ksm_exec,
    Survey => survey,
    Bundle => bundle,
    Doctor => doctor,
    Config => config,
    Completions => completions,
    Man => man,
    Mkcomposefs => mkcomposefs,
}

fn long_help() -> String {
    format!(
        "Images are given as a ref (redis:7.0.15) or as the first digits of a digest (at least 4); `ls`, \
         `cat`, `dump` and `inspect` also take the path of an EROFS image file.\n\n\
         {}\n\n\
         Example:\n  \
         cofolio import redis.tar --name redis:7.0.15\n  \
         cofolio mount redis:7.0.15 /mnt/redis\n  \
         cofolio doctor",
        exit::table()
    )
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
        Cli::command().debug_assert();
    }

    /// Somebody who asks for help gets what the command does first, and an example.
    #[test]
    fn every_help_has_an_example() {
        let mut command = Cli::command();
        command.build();
        let visible = |sub: &&mut clap::Command| sub.get_name() != "help" && !sub.is_hide_set();
        for sub in command.get_subcommands_mut().filter(visible) {
            assert!(sub.get_about().is_some(), "{}", sub.get_name());
            let help = sub.render_long_help().to_string();
            assert!(help.contains("Example"), "{}", sub.get_name());
        }
        assert!(command.render_long_help().to_string().contains("Exit codes:"));
    }
}
