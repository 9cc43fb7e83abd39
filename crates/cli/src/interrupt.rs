//! Ctrl-C and SIGTERM during an import: end at once, leave nothing, exit with 130.
//!
//! An import publishes nothing before its last step, so ending the process is safe at any moment. What it
//! has put into the store's staging is locked by open descriptors. So the process becomes another one
//! (`exec`), which ends all threads and closes all descriptors, and removes what nobody holds any more.
//! Should that one be killed too, the next gc does it.

use std::io::Write;
use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::exit::Exit;
use crate::ui::Ui;

static PUBLISHED: AtomicBool = AtomicBool::new(false);

/// The import is done: what a signal interrupts now is something else.
pub fn published() {
    PUBLISHED.store(true, Relaxed);
}

/// Until it is dropped, a signal to end does so with exit code 130, a word about it and an empty staging.
#[must_use = "signals are for it only while it lives"]
pub struct EndsOnSignal(Handle);

impl Drop for EndsOnSignal {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Ends on a signal. `resumes` says that the next try finds what was complete of this one.
pub fn end_on_signal(ui: &Ui, store: &Path, resumes: bool) -> std::io::Result<EndsOnSignal> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let handle = signals.handle();
    let (ui, store) = (ui.clone(), store.to_owned());
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            // The bar may have left the cursor hidden and in the middle of a line.
            if let Some(restore) = ui.restore_terminal() {
                let _ = write!(std::io::stderr(), "{restore}");
            }
            let (what, hint) = match (PUBLISHED.load(Relaxed), resumes) {
                (true, _) => ("interrupted after the image was published; it is there", None),
                (false, false) => {
                    ("interrupted; nothing was published, the store is as it was before", None)
                }
                (false, true) => (
                    "interrupted; no image was published",
                    Some("layers that were complete are kept: running it again goes on from there"),
                ),
            };
            ui.error(what, hint);
            let mut next = Command::new("/proc/self/exe");
            // It needs no settings, and a file that was named by a flag may be all that is in order.
            next.arg("--store").arg(store).arg("--config=/dev/null").arg("collect-staging");
            // Comes back only if it failed.
            let _ = next.exec();
            std::process::exit(i32::from(Exit::Interrupted as u8));
        }
    })?;
    Ok(EndsOnSignal(handle))
}

/// What such work is to do, as long as the flag of [`flag`] is not set.
pub fn go_on(stop: &AtomicBool) -> ControlFlow<()> {
    match stop.load(Relaxed) {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    }
}

/// A flag that a signal to end sets, for work that looks at it often and cleans up after itself. The second
/// signal ends the process, should the work be stuck.
pub fn flag() -> std::io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let code = i32::from(Exit::Interrupted as u8);
        signal_hook::flag::register_conditional_shutdown(signal, code, flag.clone())?;
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(flag)
}
