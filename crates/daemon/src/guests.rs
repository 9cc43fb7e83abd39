//! The threads that return guests' free memory, merge their pages, and keep account of them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cofolio_node::run_dir::RunDir;
use cofolio_node::vm;
use cofolio_node::vm::account::{Accounts, Reports, VmReport};
use cofolio_node::vm::merger::{MergeReport, Merger, targets};
use cofolio_node::vm::recycler::{Recycler, RecyclerReport};
use cofolio_store::task::Cancel;

use crate::published::Published;
use crate::serve::{Log, Settings};

/// How often a thread looks whether it is to end.
const LOOK: Duration = Duration::from_millis(200);
/// Least time from one account to the next, and the share of it that an account may take.
const ACCOUNT: Duration = Duration::from_secs(5);
const ACCOUNT_SHARE: f64 = 0.01;

/// What the threads tell each other.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    recycler: Mutex<RecyclerReport>,
    merger: Mutex<MergeReport>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits, unless it is cancelled.
pub(crate) fn wait(mut wait: Duration, cancel: &Cancel) {
    while !wait.is_zero() && !cancel.is_cancelled() {
        let step = wait.min(LOOK);
        std::thread::sleep(step);
        wait -= step;
    }
}

impl Guests {
    /// Recycles until it is cancelled, as long as the settings say so.
    pub(crate) fn recycle(
        &self,
        run: &RunDir,
        settings: &RwLock<Settings>,
        cancel: &Cancel,
        log: Log<'_>,
    ) {
        let mut recycler: Option<Recycler> = None;
        let mut ended = RecyclerReport::default();
        while !cancel.is_cancelled() {
            let policy = settings.read().unwrap_or_else(PoisonError::into_inner).recycle;
            if recycler.as_ref().map(Recycler::policy) != policy {
                if let Some(mut recycler) = recycler.take() {
                    recycler.end();
                    ended = RecyclerReport { guests: HashMap::new(), ..recycler.report() };
                }
                recycler = policy.map(|policy| Recycler::new(run.clone(), policy).after(&ended));
            }
            let due = recycler.as_mut().map_or(LOOK, |recycler| recycler.tick(log));
            *lock(&self.recycler) =
                recycler.as_ref().map_or_else(|| ended.clone(), Recycler::report);
            wait(due, cancel);
        }
        recycler.iter_mut().for_each(Recycler::end);
    }

    /// Merges until it is cancelled, as long as the settings say so.
    pub(crate) fn merge(
        &self,
        run: &RunDir,
        settings: &RwLock<Settings>,
        cancel: &Cancel,
        log: Log<'_>,
    ) {
        let mut merger: Option<Merger> = None;
        while !cancel.is_cancelled() {
            let policy = settings.read().unwrap_or_else(PoisonError::into_inner).merge;
            if merger.as_ref().map(Merger::policy) != policy {
                merger = policy.map(Merger::new);
            }
            let Some(merger) = &mut merger else {
                wait(LOOK, cancel);
                continue;
            };
            let report = merger.pass(targets(run), log);
            let due = report.wait;
            *lock(&self.merger) = report;
            wait(due, cancel);
        }
    }

    /// Keeps account until it is cancelled.
    pub(crate) fn account(&self, run: &RunDir, published: &Published, cancel: &Cancel) {
        let mut accounts = Accounts::default();
        while !cancel.is_cancelled() {
            let began = Instant::now();
            let mut unreadable = Vec::new();
            if let Ok(list) = vm::list(run, &mut unreadable) {
                let (recycler, merger) = (lock(&self.recycler).clone(), lock(&self.merger).clone());
                let reports = |name: &str| Reports {
                    recycling: recycler.guests.get(name).cloned(),
                    merging: merger.guests.get(name).cloned().unwrap_or_default(),
                };
                let taken = accounts.take(&list, reports);
                published.set_machines(VmReport {
                    time: cofolio_store::now(),
                    machines: taken.machines,
                    image_bytes: taken.image_bytes,
                    // Those of a merger before this one, and those that nobody has mapped any more.
                    pool_bytes: taken.pool_bytes.max(merger.pool_bytes),
                    returned_bytes: recycler.returned_bytes,
                    latency: (&recycler.latencies).into(),
                });
            }
            wait(ACCOUNT.max(began.elapsed().div_f64(ACCOUNT_SHARE)), cancel);
        }
    }
}
