//! What a round could not look at.

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
    pub(super) fn add(&mut self, why: impl FnOnce() -> String) {
        self.count += 1;
        if self.why.len() < WHY_MAX {
            let why = why();
            if !self.why.contains(&why) {
                self.why.push(why);
            }
        }
    }
}
