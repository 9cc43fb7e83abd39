//! How much processor time a part of the work may take.

use std::time::Duration;

use crate::address_space::{access_time, own_time, waits};

/// Processor time of this thread that work may take. The work looks at it between its steps, ends
/// early and goes on with the next call. It is used up as well when the work has waited in vain for
/// a process: opened files must not wait for the next one.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    until: Option<Duration>,
    /// [`waits`] when it was given.
    waits: u32,
}

impl Budget {
    /// As much as it takes.
    pub const UNLIMITED: Budget = Budget { until: None, waits: 0 };

    /// This much from now on.
    pub fn of(time: Duration) -> Self {
        Self { until: Some(thread_time() + time), waits: waits() }
    }

    /// Whether it is used up.
    pub fn is_spent(&self) -> bool {
        self.until.is_some_and(|until| thread_time() >= until || waits() != self.waits)
    }
}

/// Processor time that this thread has taken so far, with that of the threads that have looked at
/// processes for it.
pub fn thread_time() -> Duration {
    own_time() + access_time()
}
