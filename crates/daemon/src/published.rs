//! The last figures, which the ledger's thread publishes for any number of readers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use cofolio_node::ksm::KsmReport;
use cofolio_node::ledger::{DomainAccount, Report};
use cofolio_node::vm::account::VmReport;
use hyper::body::Bytes;
use serde::Serialize;

/// Points of the history: one a minute, for a day.
const HISTORY_MAX: usize = 1440;
const HISTORY_INTERVAL: Duration = Duration::from_secs(60);

/// What the machine held at a time of the past. Sizes are bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Point {
    time: i64,
    page_cache_bytes: u64,
    resident_bytes: u64,
    used_bytes: u64,
    saved_bytes: u64,
}

/// A report, with its JSON as soon as somebody asks for that. It can have 20 MB, so it is made once
/// and all readers have the same bytes.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    pub(crate) report: Report,
    json: OnceLock<Bytes>,
}

impl Encoded {
    /// The JSON, if it was made already.
    pub(crate) fn made(&self) -> Option<Bytes> {
        self.json.get().cloned()
    }

    /// Makes the JSON, unless another thread has.
    pub(crate) fn make(&self) -> Bytes {
        // No field of a report can fail to be encoded.
        let encode = || serde_json::to_vec(&self.report).unwrap_or_default().into();
        self.json.get_or_init(encode).clone()
    }
}

/// The last figures, for any number of readers.
#[derive(Debug, Default)]
pub(crate) struct Published {
    report: RwLock<Arc<Encoded>>,
    history: Mutex<VecDeque<Point>>,
    costs: Mutex<Costs>,
    /// Seconds from one report to the next.
    period: AtomicU64,
    /// Processor time of the ledger's thread so far, in nanoseconds.
    ledger_time: AtomicU64,
    machines: RwLock<Arc<VmReport>>,
    ksm: Mutex<KsmReport>,
}

/// What the daemon itself takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Costs {
    /// Bytes of the page cache that the policy has freed so far.
    pub(crate) reclaimed_bytes: u64,
    /// Bytes of the usage lists.
    pub(crate) usage_bytes: u64,
    pub(crate) lists: u64,
    pub(crate) entries: u64,
}

impl Published {
    pub(crate) fn report(&self) -> Arc<Encoded> {
        Arc::clone(&self.report.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The last account of virtual machines.
    pub(crate) fn machines(&self) -> Arc<VmReport> {
        Arc::clone(&self.machines.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set_machines(&self, report: VmReport) {
        *self.machines.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(report);
    }

    pub(crate) fn ksm(&self) -> KsmReport {
        *self.ksm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_ksm(&self, report: KsmReport) {
        *self.ksm.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }

    pub(crate) fn history(&self) -> Vec<Point> {
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.iter().copied().collect()
    }

    pub(crate) fn costs(&self) -> Costs {
        *self.costs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn period_seconds(&self) -> u64 {
        self.period.load(Relaxed)
    }

    pub(crate) fn ledger_time(&self) -> Duration {
        Duration::from_nanos(self.ledger_time.load(Relaxed))
    }

    pub(crate) fn set_ledger_time(&self, time: Duration) {
        self.ledger_time.store(time.as_nanos().try_into().unwrap_or(u64::MAX), Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn of(report: Report) -> Self {
        let published = Self::default();
        published.publish(report, Costs::default());
        published
    }

    pub(crate) fn set_period(&self, period: Duration) {
        self.period.store(period.as_secs(), Relaxed);
    }

    /// Makes these the last figures, and adds a point to the history if it is time for one.
    pub(crate) fn publish(&self, report: Report, costs: Costs) -> Arc<Encoded> {
        let point = Point::of(&report);
        let new = Arc::new(Encoded { report, json: OnceLock::new() });
        let published = Arc::clone(&new);
        *self.report.write().unwrap_or_else(PoisonError::into_inner) = new;
        *self.costs.lock().unwrap_or_else(PoisonError::into_inner) = costs;
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let interval = i64::try_from(HISTORY_INTERVAL.as_secs()).unwrap_or(60);
        let is_next = |last: &Point| {
            // Or the clock was set back.
            last.time + interval <= point.time || point.time < last.time
        };
        if history.back().is_none_or(is_next) {
            if history.len() == HISTORY_MAX {
                history.pop_front();
            }
            history.push_back(point);
        }
        published
    }
}

impl Point {
    fn of(report: &Report) -> Self {
        let sum = |of: fn(&DomainAccount) -> u64| report.domains.iter().map(of).sum();
        Self {
            time: report.time,
            page_cache_bytes: report.machine.page_cache_bytes,
            resident_bytes: sum(|it| it.resident_bytes),
            used_bytes: sum(|it| it.used_bytes),
            saved_bytes: sum(|it| it.saved_bytes),
        }
    }
}
