//! Rounds of looks: when they began, and what they could not look at.

use super::state::TICKS_PER_SECOND;

/// When rounds of looks began, and what was unseen in them.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    this: u32,
    /// The last one that is complete. No look that counts is older.
    complete: u32,
    /// Of this round so far, and of the last complete one.
    unseen_so_far: Unseen,
    unseen: Unseen,
}

impl Rounds {
    pub(super) fn begin(&mut self, now: u32) {
        (self.this, self.unseen_so_far) = (now, Unseen::default());
    }

    pub(super) fn complete(&mut self) {
        (self.complete, self.unseen) = (self.this, std::mem::take(&mut self.unseen_so_far));
    }

    pub(super) fn age_seconds(&self, now: u32) -> u32 {
        now.saturating_sub(self.complete) / TICKS_PER_SECOND
    }

    /// Something could not be looked at.
    pub(super) fn add_unseen(&mut self, why: impl FnOnce() -> String) {
        self.unseen_so_far.add(why);
    }

    /// What could not be looked at in the last complete round.
    pub(super) fn unseen(&self) -> &Unseen {
        &self.unseen
    }
}

/// Reasons that are kept.
const WHY_MAX: usize = 16;

/// How much a round could not look at, and why.
#[derive(Debug, Default)]
pub(super) struct Unseen {
    pub(super) count: u64,
    /// The first reasons, each once.
    pub(super) why: Vec<String>,
}

impl Unseen {
    /// Counts one more, and keeps the reason if there is room.
    fn add(&mut self, why: impl FnOnce() -> String) {
        self.count += 1;
        if self.why.len() < WHY_MAX {
            let why = why();
            if !self.why.contains(&why) {
                self.why.push(why);
            }
        }
    }
}
