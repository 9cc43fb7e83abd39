//! Code shared by the lists of containers and of virtual machines, and by the commands that end them.

use cofolio_node::container::State;
use cofolio_store::Digest;

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::exit::Exit;
use crate::ui::{Cell, Tone, printable};

/// Longest command that a list shows, in characters.
const COMMAND_CHARS_MAX: usize = 40;

/// The column STATE.
pub(super) fn state_cell(state: State, exit_status: Option<u8>) -> Cell {
    let (word, tone) = match (state, exit_status) {
        (State::Running, _) => ("running".to_owned(), Tone::Good),
        (State::Unattended, _) => ("unattended".to_owned(), Tone::Good),
        (State::Ended, None) => ("ended".to_owned(), Tone::Dim),
        (State::Ended, Some(status)) => (format!("ended ({status})"), Tone::Dim),
    };
    Cell::left(word).tone(tone)
}

/// The column IMAGE: a ref, or a shortened digest.
pub(super) fn image_cell(name: &str, digest: &Digest) -> Cell {
    Cell::left(if name.is_empty() { short(digest) } else { name.to_owned() })
}

/// The column PID.
pub(super) fn pid_cell(pid: Option<u32>) -> Cell {
    Cell::right(pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()))
}

/// The column COMMAND.
pub(super) fn command_cell(command: &[String]) -> Cell {
    let shown: String = command.join(" ").chars().take(COMMAND_CHARS_MAX).collect();
    Cell::left(printable(shown.as_bytes()))
}

/// Ends all of these. If one cannot be ended, the others are ended nevertheless, and the command fails.
pub(super) fn stop_all<E>(
    names: &[String],
    context: &Context<'_>,
    stop: impl Fn(&str) -> Result<(), E>,
) -> Outcome
where
    E: std::error::Error + Into<anyhow::Error>,
{
    let mut first = None;
    for error in names.iter().filter_map(|name| stop(name).err()) {
        match first {
            None => first = Some(error),
            Some(_) => context.ui.error(&error.to_string(), None),
        }
    }
    first.map_or(Ok(Exit::Ok), |error| Err(error.into()))
}
