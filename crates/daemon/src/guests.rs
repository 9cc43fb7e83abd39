//! The threads that return guests' free memory, and merge their pages.

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use cofolio_node::run_dir::RunDir;
use cofolio_node::vm::merger::Merger;
use cofolio_node::vm::recycler::Recycler;
use cofolio_store::task::Cancel;

use crate::serve::{Log, Settings};

/// How often a thread looks whether it is to end.
const LOOK: Duration = Duration::from_millis(200);

/// Waits, unless it is cancelled.
fn wait(mut wait: Duration, cancel: &Cancel) {
    while !wait.is_zero() && !cancel.is_cancelled() {
        let step = wait.min(LOOK);
        std::thread::sleep(step);
        wait -= step;
    }
}

/// Recycles until it is cancelled, as long as the settings say so.
pub(crate) fn recycle(run: &RunDir, settings: &RwLock<Settings>, cancel: &Cancel, log: Log<'_>) {
    let mut recycler: Option<Recycler> = None;
    while !cancel.is_cancelled() {
        let policy = settings.read().unwrap_or_else(PoisonError::into_inner).recycle;
        if recycler.as_ref().map(Recycler::policy) != policy {
            recycler.iter_mut().for_each(Recycler::end);
            recycler = policy.map(|policy| Recycler::new(run.clone(), policy));
        }
        wait(recycler.as_mut().map_or(LOOK, |recycler| recycler.tick(log)), cancel);
    }
    recycler.iter_mut().for_each(Recycler::end);
}

/// Merges until it is cancelled, as long as the settings say so.
pub(crate) fn merge(run: &RunDir, settings: &RwLock<Settings>, cancel: &Cancel, log: Log<'_>) {
    let mut merger: Option<Merger> = None;
    while !cancel.is_cancelled() {
        let policy = settings.read().unwrap_or_else(PoisonError::into_inner).merge;
        if merger.as_ref().map(Merger::policy) != policy {
            merger = policy.map(|policy| Merger::new(run.clone(), policy));
        }
        let Some(merger) = &mut merger else {
            wait(LOOK, cancel);
            continue;
        };
        let began = Instant::now();
        merger.pass(log);
        wait(merger.policy().period.saturating_sub(began.elapsed()), cancel);
    }
}
