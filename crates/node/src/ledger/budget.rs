//! How much processor time a part of the work may take.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Processor time of this thread that work may take. The work looks at it between its steps, ends
/// early and goes on with the next call.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    until: Option<Duration>,
}

impl Budget {
    /// As much as it takes.
    pub const UNLIMITED: Budget = Budget { until: None };

    /// This much from now on.
    pub fn of(time: Duration) -> Self {
        Self { until: Some(thread_time() + time) }
    }

    /// Whether it is used up.
    pub fn is_spent(&self) -> bool {
        self.until.is_some_and(|until| thread_time() >= until)
    }
}

/// Processor time that this thread has taken so far.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
