//! The thread that returns guests' free memory.

use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use cofolio_node::run_dir::RunDir;
use cofolio_node::vm::recycler::Recycler;
use cofolio_store::task::Cancel;

use crate::serve::{Log, Settings};

/// How often it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(200);

/// Recycles until it is cancelled, as long as the settings say so.
pub(crate) fn run(run: &RunDir, settings: &RwLock<Settings>, cancel: &Cancel, log: Log<'_>) {
    let mut recycler: Option<Recycler> = None;
    while !cancel.is_cancelled() {
        let policy = settings.read().unwrap_or_else(PoisonError::into_inner).recycle;
        if recycler.as_ref().map(Recycler::policy) != policy {
            recycler.iter_mut().for_each(Recycler::end);
            recycler = policy.map(|policy| Recycler::new(run.clone(), policy));
        }
        let mut wait = recycler.as_mut().map_or(LOOK, |recycler| recycler.tick(log));
        while !wait.is_zero() && !cancel.is_cancelled() {
            let step = wait.min(LOOK);
            std::thread::sleep(step);
            wait -= step;
        }
    }
    recycler.iter_mut().for_each(Recycler::end);
}
