//! Ctrl-C and SIGTERM during an import: end at once, say what is left, exit with 130.
//!
//! An import publishes nothing before its last step, so ending the process is safe at any moment. What lies
//! in the store's staging is locked by the living process only; the next import's or gc's collection removes
//! it. (Removing gigabytes first would keep whoever pressed Ctrl-C waiting.)

use std::io::Write;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::exit::Exit;
use crate::ui::Ui;

/// From now on a signal to end does so with exit code 130 and a word about it.
pub(crate) fn end_on_signal(ui: &Ui) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let ui = ui.clone();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            // The bar may have left the cursor hidden and in the middle of a line.
            if let Some(restore) = ui.restore_terminal() {
                let _ = write!(std::io::stderr(), "{restore}");
            }
            ui.error("interrupted; nothing was published, the store is as it was before", None);
            std::process::exit(i32::from(Exit::Interrupted as u8));
        }
    })?;
    Ok(())
}
