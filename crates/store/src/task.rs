//! Cancellation and events of long work.
//!
//! Whoever starts the work keeps a clone of the [`Cancel`]. The work calls [`Task::check`] in every
//! loop that can take longer than a fraction of a second, and gives up with [`Cancelled`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The work was cancelled. What it had begun is undone or left to garbage collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Cancelled;

/// A token that cancels work. Clones are the same token.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    own: Arc<AtomicBool>,
    parent: Option<Arc<Cancel>>,
    undoing: Arc<AtomicUsize>,
}

/// Work that undoes other work; see [`Cancel::undo`].
#[derive(Debug)]
#[must_use = "the token is cancelled again when this is dropped"]
pub struct Undoing(Arc<AtomicUsize>);

impl Drop for Undoing {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Cancel {
    /// A token that is cancelled as soon as `flag` is set, as a signal handler can do it.
    pub fn by_flag(flag: Arc<AtomicBool>) -> Self {
        Self { own: flag, ..Self::default() }
    }

    /// A token for a part of the work: cancelled with this one, or alone.
    #[must_use]
    pub fn child(&self) -> Self {
        Self { parent: Some(Arc::new(self.clone())), ..Self::default() }
    }

    /// Cancels the work. Returns whether this token was not cancelled before, its parents aside.
    pub fn cancel(&self) -> bool {
        !self.own.swap(true, Relaxed)
    }

    /// Begins to undo what the work has done: while this lives, the token counts as not cancelled.
    /// What waits for a lock would leave half of it otherwise.
    pub fn undo(&self) -> Undoing {
        self.undoing.fetch_add(1, Relaxed);
        Undoing(self.undoing.clone())
    }

    /// Whether the work is cancelled.
    pub fn is_cancelled(&self) -> bool {
        let parent = || self.parent.as_ref().is_some_and(|parent| parent.is_cancelled());
        self.undoing.load(Relaxed) == 0 && (self.own.load(Relaxed) || parent())
    }

    /// [`Cancelled`] if the work is cancelled.
    pub fn check(&self) -> Result<(), Cancelled> {
        if self.is_cancelled() { Err(Cancelled) } else { Ok(()) }
    }

    /// Calls `ask` until it has an answer.
    ///
    /// # Errors
    /// Those of `ask`, and [`Cancelled`].
    pub fn wait_for<T, E: From<Cancelled>>(
        &self,
        mut ask: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<T, E> {
        let (shortest, longest) = (Duration::from_micros(50), Duration::from_millis(10));
        let start = Instant::now();
        loop {
            if let Some(answer) = ask()? {
                return Ok(answer);
            }
            self.check()?;
            // A collection gives way for a millisecond at a time, which must not be missed.
            std::thread::sleep((start.elapsed() / 64).clamp(shortest, longest));
        }
    }
}

/// A phase of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Finding manifest, config and layers.
    Resolve,
    /// Unpacking layers, or reading a directory.
    Unpack,
    /// Writing the metadata image.
    Image,
    /// Making everything durable and publishing it.
    Commit,
    /// The second try, after garbage collection took something that the first relied on.
    Again,
}

/// What happens with a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerState {
    /// The store has its tree: its blob is not read.
    Known,
    /// Its blob is read.
    Read,
    /// The registry has its blob in this repository.
    There,
    /// The registry takes its blob from another repository.
    Mounted,
    /// It is compressed and sent; its digest is not known yet.
    Sent,
}

/// What a task tells while it works. Events come from several threads, often: a sink must be quick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A phase begins.
    Phase(Phase),
    /// A layer begins; several may be under way.
    Layer {
        /// Position in the image, 0 is the lowest.
        index: usize,
        /// Layers of the image.
        count: usize,
        /// What happens with it.
        state: LayerState,
        /// Digest and size in bytes of its blob, where they are known.
        blob: Option<(&'a str, u64)>,
    },
    /// This many bytes more were read.
    Read(u64),
    /// How much is done.
    Done {
        /// Bytes so far.
        bytes: u64,
        /// Bytes in all, where that is known.
        bytes_total: Option<u64>,
        /// Files, objects or layers so far.
        items: u64,
        /// Of them in all, where that is known.
        items_total: Option<u64>,
    },
    /// Something that a person should know now.
    Remark(&'a str),
}

type Sink = dyn Fn(Event<'_>) + Send + Sync;

/// A piece of work, as its caller sees it. The default is never cancelled and tells nobody.
#[derive(Clone, Default)]
pub struct Task {
    /// What cancels it.
    pub cancel: Cancel,
    events: Option<Arc<Sink>>,
}

impl Task {
    /// A task that `cancel` cancels, and whose events go to `events`.
    pub fn new(cancel: Cancel, events: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        Self { cancel, events: Some(Arc::new(events)) }
    }

    /// A part of this task, which `cancel` cancels.
    #[must_use]
    pub fn cancelled_by(&self, cancel: Cancel) -> Self {
        Self { cancel, events: self.events.clone() }
    }

    /// [`Cancelled`] if the task is cancelled.
    pub fn check(&self) -> Result<(), Cancelled> {
        self.cancel.check()
    }

    /// Why the task ends: what fails after it was cancelled fails because of that.
    pub fn reason<E: From<Cancelled>>(&self, error: E) -> E {
        self.check().err().map_or(error, E::from)
    }

    /// Tells an event.
    pub fn tell(&self, event: Event<'_>) {
        if let Some(events) = &self.events {
            events(event);
        }
    }

    /// Tells that so many bytes of so many are done.
    pub fn done(&self, bytes: u64, bytes_total: u64) {
        let bytes_total = Some(bytes_total);
        self.tell(Event::Done { bytes, bytes_total, items: 0, items_total: None });
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("cancel", &self.cancel).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_cancelled_with_the_whole_and_alone() {
        let (whole, other) = (Cancel::default(), Cancel::default());
        let (failed, going_on) = (whole.child(), whole.child().child());
        assert!(failed.cancel() && !failed.cancel(), "only the first time counts");
        assert_eq!(failed.check(), Err(Cancelled));
        assert!(!whole.is_cancelled() && !going_on.is_cancelled(), "the others go on");
        whole.clone().cancel();
        assert!(going_on.is_cancelled() && !other.is_cancelled());
        let undoing = whole.clone().undo();
        drop(whole.undo());
        assert!(!whole.is_cancelled() && !going_on.is_cancelled() && failed.is_cancelled());
        drop(undoing);
        assert!(whole.is_cancelled() && going_on.is_cancelled());
    }
}
