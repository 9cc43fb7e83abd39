use clap::Subcommand;
use serde_json::{Value, json};

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone};
use cofolio_node::config::{self, Origin};

/// Show the settings in force and where they come from
///
/// An option goes before an environment variable, that before the configuration file
/// (/etc/cofolio/config.toml, --config or COFOLIO_CONFIG), that before the default.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio config show\n  \
    cofolio config default > /etc/cofolio/config.toml")]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print every setting with its value and its origin: default, file, env or flag
    #[command(after_help = "Example:\n  cofolio config show --json | jq '.settings[]'")]
    Show,
    /// Print a configuration file with every default, explained
    #[command(after_help = "Example:\n  cofolio config default > /etc/cofolio/config.toml")]
    Default,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    match args.action {
        Action::Show => show(context),
        Action::Default => {
            context.ui.line(config::DOCUMENTED.trim_end())?;
            Ok(Exit::Ok)
        }
    }
}

fn show(context: &Context<'_>) -> Outcome {
    let loaded = &context.config;
    let settings = loaded.settings();
    if context.ui.json {
        return context.ui.json(&json!({"file": loaded.file, "settings": settings}));
    }
    let mut table = Table::new(&["SETTING", "VALUE", "FROM"]);
    for setting in &settings {
        let value = match &setting.value {
            Value::Null => Cell::left("-").tone(Tone::Dim),
            Value::String(text) => Cell::left(text),
            other => Cell::left(other.to_string()),
        };
        let tone = if setting.from == Origin::Default { Tone::Dim } else { Tone::Bold };
        table.row(vec![
            Cell::left(&setting.key),
            value,
            Cell::left(setting.from.to_string()).tone(tone),
        ]);
    }
    context.ui.table(&table)?;
    context.ui.note(match &loaded.file {
        Some(file) => format!("file: {}", file.display()),
        None => format!("no configuration file ({} is not there)", config::DEFAULT_PATH),
    });
    Ok(Exit::Ok)
}
