use std::ffi::OsString;

use crate::cmd::Outcome;
use crate::exit::{Exit, Fail};

/// Make a composefs image with mkcomposefs' own arguments
///
/// Byte for byte and argument for argument what mkcomposefs 1.0.8 does, also when this program is called
/// by that name. Hard links inside a directory stay hard links, which mkcomposefs loses.
/// `cofolio build` does the same with arguments like those of the other commands.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio mkcomposefs --digest-store=objects --print-digest rootfs rootfs.cfs",
    disable_help_flag = true
)]
pub(crate) struct Args {
    #[arg(
        help = "Arguments of mkcomposefs: [OPTIONS] SOURCE IMAGE",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    // Usually `main` has taken this way already; here end those who put a global option first, which
    // mkcomposefs does not have.
    match args.args.len() {
        0 => Err(Fail::usage("mkcomposefs: no arguments (see `cofolio help mkcomposefs`)").into()),
        _ => {
            let failed = crate::mkcomposefs::main(&args.args) != std::process::ExitCode::SUCCESS;
            Ok(if failed { Exit::Failure } else { Exit::Ok })
        }
    }
}
