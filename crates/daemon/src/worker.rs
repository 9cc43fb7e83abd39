//! The thread that keeps the ledger up to date and answers questions about it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock, mpsc};
use std::time::{Duration, Instant};

use cofolio_node::ledger::{
    Budget, FileOrder, ImageFiles, Ledger, LedgerError, ReclaimRequest, Reclaimed, ResidentSharing,
    thread_time,
};
use cofolio_store::task::Cancel;
use cofolio_store::{Digest, with_causes};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::sync::oneshot;

use crate::answers::Users;
use crate::pace::Pace;
use crate::published::{Costs, Encoded, Published};
use crate::serve::Settings;

/// The longest sleep. Also the longest that opened files wait in the kernel's queue once their part
/// of the processor time is spent. They keep their mount busy there, and unmounting waits half a
/// second for such passing users.
const TICK: Duration = Duration::from_millis(100);
/// Processor time that a chore takes at once at most, if it can be divided.
const SLICE_MAX: Duration = Duration::from_millis(5);
/// Processor time that there must be for a chore. In slices of 0.15 ms, a look at all processes and
/// objects costs nearly twice as much.
const SLICE_MIN: Duration = Duration::from_millis(1);
/// What the ledger's share of a processor is for: opened files, and the chores that take figures. A
/// container that opens files all the time must not keep the figures of all others from being taken.
/// Figures have the smaller part: without time they get older, while opened files get lost.
const OPENS: usize = 0;
const FIGURES: usize = 1;
const PARTS: [f64; 2] = [2.0 / 3.0, 1.0 / 3.0];
/// Share of a processor for answers to anybody who can connect to a TCP address.
const ANSWERS_SHARE: f64 = 0.05;

/// The answer to a question, or why there is none.
type Answer<T> = oneshot::Sender<Result<T, LedgerError>>;

/// What only the ledger's thread can say.
#[derive(Debug)]
pub(crate) enum Question {
    /// Takes all figures now.
    Sample(Answer<Arc<Encoded>>),
    /// The files of an image, up to a number of them.
    Files(String, Digest, FileOrder, usize, Answer<Option<ImageFiles>>),
    Users(String, Digest, Answer<Option<Users>>),
    Sharing(String, usize, Answer<Option<ResidentSharing>>),
    /// Takes all figures and drops pages. What has begun is sent before the first page goes.
    Reclaim(ReclaimRequest, Answer<BegunReclaim>),
}

/// A reclaim that drops pages. When this is dropped, it ends.
#[derive(Debug)]
pub(crate) struct BegunReclaim {
    pub(crate) answer: oneshot::Receiver<Result<Reclaimed, LedgerError>>,
    cancel: Cancel,
}

impl BegunReclaim {
    /// With where its answer goes.
    pub(crate) fn new(cancel: Cancel) -> (oneshot::Sender<Result<Reclaimed, LedgerError>>, Self) {
        let (sends, answer) = oneshot::channel();
        (sends, Self { answer, cancel })
    }
}

impl Drop for BegunReclaim {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl Question {
    /// Whether nobody waits for the answer any more.
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Sample(answer) => answer.is_closed(),
            Self::Files(.., answer) => answer.is_closed(),
            Self::Users(.., answer) => answer.is_closed(),
            Self::Sharing(.., answer) => answer.is_closed(),
            Self::Reclaim(.., begun) => begun.is_closed(),
        }
    }
}

/// Asks the ledger's thread.
#[derive(Debug, Clone)]
pub(crate) struct Questions {
    trusted: mpsc::SyncSender<Question>,
    others: mpsc::SyncSender<Question>,
    wake: Arc<OwnedFd>,
}

impl Questions {
    /// Questions, and where they come out.
    #[cfg(any(test, fuzzing))]
    #[allow(clippy::unwrap_used, reason = "of tests only")]
    pub(crate) fn for_test() -> (Self, mpsc::Receiver<Question>) {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (asks, asked) = mpsc::sync_channel(1);
        (Self { trusted: asks.clone(), others: asks, wake: Arc::new(wake) }, asked)
    }

    /// False if too many questions wait, or the thread has ended. Who `is_trusted` is answered first.
    pub(crate) fn ask(&self, question: Question, is_trusted: bool) -> bool {
        let queue = if is_trusted { &self.trusted } else { &self.others };
        let sent = queue.try_send(question).is_ok();
        self.wake();
        sent
    }

    /// Has the thread look whether it was cancelled.
    pub(crate) fn wake(&self) {
        // It fails only when it was written 2^64 times without being read.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
    }
}

/// Questions of either kind that may wait for the thread.
const QUESTIONS_MAX: usize = 64;

/// The thread's side.
#[derive(Debug)]
pub(crate) struct Worker {
    ledger: Ledger,
    published: Arc<Published>,
    settings: Arc<RwLock<Settings>>,
    trusted: mpsc::Receiver<Question>,
    others: mpsc::Receiver<Question>,
    wake: Arc<OwnedFd>,
}

/// What the thread does in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Chore {
    Refresh,
    Processes,
    Residency,
    Policy,
    Report,
}

impl Worker {
    /// Fails without a descriptor for waking it.
    pub(crate) fn new(
        ledger: Ledger,
        published: Arc<Published>,
        settings: Arc<RwLock<Settings>>,
    ) -> std::io::Result<(Self, Questions)> {
        let (asks_trusted, trusted) = mpsc::sync_channel(QUESTIONS_MAX);
        let (asks_others, others) = mpsc::sync_channel(QUESTIONS_MAX);
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let questions =
            Questions { trusted: asks_trusted, others: asks_others, wake: Arc::clone(&wake) };
        Ok((Self { ledger, published, settings, trusted, others, wake }, questions))
    }

    /// Works until it is cancelled. `failed` hears why figures could not be taken.
    ///
    /// Each turn answers one question, takes opened files out of the queue, and does a part of one
    /// chore. Whoever may reclaim (root, or the group) may take the time that an answer needs. Answers
    /// to others have a share of their own, so they can delay nobody but each other.
    pub(crate) fn run(mut self, cancel: &Cancel, failed: &dyn Fn(String)) {
        let mut can_watch = self.ledger.opens().is_some();
        // Once without a bound: whoever asks first wants an answer.
        let first = self.ledger.sample_all().and_then(|()| self.report());
        if let Some(error) = first.err().filter(|_| !cancel.is_cancelled()) {
            failed(with_causes(&error));
        }
        let (mut pace, mut answers) = (Pace::new(0.0, PARTS), Pace::new(ANSWERS_SHARE, [1.0]));
        let (mut due, mut watch_from) = (Due::new(), Instant::now());
        let mut charged = thread_time();
        let mut failures = Failures::default();
        while !cancel.is_cancelled() {
            let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner);
            pace.share = settings.share;
            due.set_period(settings.period);
            self.published.set_period(settings.period);
            self.ledger.set_policy(settings.reclaim);
            drop(settings);
            let before = thread_time();
            let was_asked = self.answer_one(&mut answers, cancel);
            charged += thread_time().saturating_sub(before);
            pace.pass();
            if Instant::now() >= watch_from {
                let taken = self.drain_opens(&pace);
                if taken.is_err() {
                    self.ledger.unwatch_opens();
                    watch_from = Instant::now() + due.period;
                }
                // Said once: where the kernel has no fanotify, each try fails.
                if let Some(error) = taken.as_ref().err().filter(|_| can_watch) {
                    failed(with_causes(error));
                }
                can_watch = self.ledger.opens().is_some() || (can_watch && taken.is_ok());
            }
            // With the wait before it: opened files end many waits.
            let taken = thread_time();
            pace.charge(OPENS, taken.saturating_sub(charged));
            if let Some((chore, allowance)) = due.next().zip(pace.allowance_of(FIGURES, SLICE_MIN))
            {
                let worked = self.work_on(chore, &Budget::of(allowance.min(SLICE_MAX)));
                let error = worked.as_ref().err().map(|error| with_causes(error));
                failures.note(chore, error).into_iter().for_each(failed);
                // One that failed does not hold up the others.
                due.worked(chore, worked.unwrap_or(true));
            }
            charged = thread_time();
            pace.charge(FIGURES, charged.saturating_sub(taken));
            self.published.set_ledger_time(charged);
            let has_chore = pace.allowance_of(FIGURES, SLICE_MIN).is_some() && due.next().is_some();
            self.wait(was_asked || has_chore, pace.allowance(OPENS).is_some());
        }
    }

    /// Answers a question, if there is one that may be answered now. Says whether there was.
    fn answer_one(&mut self, pace: &mut Pace<1>, cancel: &Cancel) -> bool {
        if let Ok(question) = self.trusted.try_recv() {
            self.answer(question, cancel);
            return true;
        }
        pace.pass();
        let Some(question) = pace.allowance(0).and_then(|_| self.others.try_recv().ok()) else {
            return false;
        };
        let start = thread_time();
        self.answer(question, cancel);
        pace.charge(0, thread_time().saturating_sub(start));
        true
    }

    /// Takes opened files out of the kernel's queue, also without an allowance: the longer it is until
    /// there is one again. When there are far too many, none are watched until then.
    fn drain_opens(&mut self, pace: &Pace<2>) -> Result<(), LedgerError> {
        if pace.is_overdrawn(OPENS) {
            self.ledger.unwatch_opens();
        } else if self.ledger.opens().is_none() && pace.allowance(OPENS).is_some() {
            self.ledger.watch_opens()?;
        }
        self.ledger.drain_opens(&Budget::of(SLICE_MAX))
    }

    /// Does a part of a chore. Says whether it is complete.
    fn work_on(&mut self, chore: Chore, budget: &Budget) -> Result<bool, LedgerError> {
        match chore {
            Chore::Refresh => self.ledger.refresh(budget),
            Chore::Processes => self.ledger.sample_processes(budget),
            Chore::Residency => Ok(self.ledger.sample_residency(budget)),
            Chore::Policy => Ok(self.ledger.apply_policy(budget)),
            Chore::Report => self.report().map(|_| true),
        }
    }

    fn report(&mut self) -> Result<Arc<Encoded>, LedgerError> {
        let report = self.ledger.report()?;
        let usage = self.ledger.usage_cost();
        let costs = Costs {
            reclaimed_bytes: self.ledger.policy_freed_bytes(),
            usage_bytes: usage.bytes,
            lists: usage.lists,
            entries: usage.entries,
        };
        Ok(self.published.publish(report, costs))
    }

    /// Skips questions whose client has left or timed out.
    fn answer(&mut self, question: Question, cancel: &Cancel) {
        if question.is_abandoned() {
            return;
        }
        match question {
            Question::Sample(answer) => {
                let sampled = self.ledger.sample_all();
                let _ = answer.send(sampled.and_then(|()| self.report()));
            }
            Question::Files(domain, image, order, max, answer) => {
                let _ = answer.send(self.ledger.files(&domain, &image, order, max));
            }
            Question::Users(domain, object, answer) => {
                let users = self.ledger.users(&domain, &object);
                let found = self.ledger.sizes(&domain, &object).zip(users);
                let _ = answer.send(Ok(found.map(|((bytes, resident_bytes), users)| Users {
                    domain,
                    object,
                    bytes,
                    resident_bytes,
                    users,
                })));
            }
            Question::Sharing(domain, max, answer) => {
                let _ = answer.send(Ok(self.ledger.sharing(&domain, max)));
            }
            Question::Reclaim(request, begun) => {
                let cancel = cancel.child();
                let (answer, reclaim) = BegunReclaim::new(cancel.clone());
                let sampled = self.ledger.sample_all();
                let may_go = sampled.is_ok();
                if begun.send(sampled.map(|()| reclaim)).is_ok() && may_go {
                    let _ = answer.send(self.ledger.reclaim_until(&cancel, &request));
                }
            }
        }
    }

    /// Sleeps until there is a question, until something was mounted, until a file was opened if
    /// there is processor time left for it, or for a tick.
    fn wait(&self, has_more: bool, may_watch: bool) {
        let mut descriptors = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
        // A container opens files at once, so its mount cannot wait for processor time.
        let watched = self.ledger.opens().filter(|_| may_watch).into_iter();
        let watched = watched.chain(self.ledger.mount_events());
        descriptors.extend(watched.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)));
        let tick = if has_more { Duration::ZERO } else { TICK };
        let timeout = Timespec {
            tv_sec: i64::try_from(tick.as_secs()).unwrap_or(1),
            tv_nsec: i64::from(tick.subsec_nanos()),
        };
        let _ = poll(&mut descriptors, Some(&timeout));
        let _ = rustix::io::read(&*self.wake, &mut [0_u8; 8]);
    }
}

/// Why chores fail.
#[derive(Debug, Default)]
struct Failures(HashMap<Chore, String>);

impl Failures {
    /// The error of a chore that did not fail in the same way when it was worked on last: it may do so
    /// in every period.
    fn note(&mut self, chore: Chore, error: Option<String>) -> Option<String> {
        let last = self.0.remove(&chore);
        let is_known = error == last;
        self.0.extend(error.clone().map(|it| (chore, it)));
        error.filter(|_| !is_known)
    }
}

/// When which chore is due: one after the other, each until it is complete. A round of
/// [`Chore::Policy`] may take hours, so it takes turns with the others.
#[derive(Debug)]
struct Due {
    period: Duration,
    chores: VecDeque<(Chore, Instant)>,
    /// Whether a round of [`Chore::Policy`] has begun and is not complete.
    is_in_policy: bool,
    /// Whether another chore was taken since its last part.
    is_its_turn: bool,
}

impl Due {
    fn new() -> Self {
        let chores =
            [Chore::Refresh, Chore::Processes, Chore::Residency, Chore::Policy, Chore::Report];
        let now = Instant::now();
        Self {
            period: Duration::ZERO,
            chores: chores.map(|chore| (chore, now)).into(),
            is_in_policy: false,
            is_its_turn: false,
        }
    }

    /// A shorter period holds from now on, not from the end of the one that has begun.
    fn set_period(&mut self, period: Duration) {
        if period < self.period {
            let latest = Instant::now() + period;
            self.chores.iter_mut().for_each(|(_, at)| *at = latest.min(*at));
        }
        self.period = period;
    }

    /// The chore that is due, if one is.
    fn next(&self) -> Option<Chore> {
        let due =
            self.chores.front().filter(|(_, at)| *at <= Instant::now()).map(|(chore, _)| *chore);
        let policy = Some(Chore::Policy).filter(|_| self.is_in_policy);
        if self.is_its_turn { policy.or(due) } else { due.or(policy) }
    }

    /// A part of a chore was taken. If the chore is complete, or goes on in turn with the others, it
    /// is due again after a period, behind the others.
    fn worked(&mut self, chore: Chore, is_complete: bool) {
        let is_policy = chore == Chore::Policy;
        if is_policy {
            self.is_in_policy = !is_complete;
        }
        self.is_its_turn = !is_policy;
        let is_first = self.chores.front().is_some_and(|(first, _)| *first == chore);
        if is_first
            && (is_complete || is_policy)
            && let Some((_, at)) = self.chores.pop_front()
        {
            let next = (at + self.period).max(Instant::now());
            self.chores.push_back((chore, next));
        }
    }
}

#[cfg(test)]
mod tests {
    use cofolio_node::config::Limit;
    use cofolio_node::ledger::ReclaimPolicy;
    use cofolio_node::run_dir::RunDir;
    use cofolio_store::{InitOptions, Store};

    use super::*;
    use crate::upkeep::Schedule;

    /// One whose client has gone is not worked on: a reclaim that was refused must not happen later.
    #[test]
    fn abandoned_questions_are_not_answered() {
        let request = serde_json::from_str(r#"{"target": {"container": "it"}}"#).unwrap();
        let (sender, receiver) = oneshot::channel();
        let question = Question::Reclaim(request, sender);
        assert!(!question.is_abandoned());
        drop(receiver);
        assert!(question.is_abandoned());
    }

    /// Clients at a TCP address wait once answers to them have taken their share, and nobody waits for
    /// them. With a share of a whole processor no test failed.
    #[test]
    fn answers_to_anybody_have_a_share_of_their_own() {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::init(&scratch.path().join("store"), &InitOptions::default()).unwrap();
        let ledger = Ledger::new(store, RunDir::open(scratch.path().join("run")).unwrap());
        let upkeep = Schedule {
            delay: Duration::ZERO,
            gc: None,
            scrub: None,
            scrub_rate: None,
            limit: Limit::default(),
        };
        let (period, reclaim) = (Duration::from_secs(1), ReclaimPolicy::default());
        let settings =
            Settings { period, share: 0.0, reclaim, upkeep, recycle: None, merge: None, ksm: None };
        let published = Arc::new(Published::default());
        let (mut worker, questions) =
            Worker::new(ledger, published, Arc::new(RwLock::new(settings))).unwrap();
        let ask = |is_trusted| {
            let (sender, receiver) = oneshot::channel();
            assert!(questions.ask(Question::Sharing(String::new(), 1, sender), is_trusted));
            receiver
        };
        let (mut answers, cancel) = (Pace::new(ANSWERS_SHARE, [1.0]), Cancel::default());
        answers.charge(0, Duration::from_secs(10));
        let (mut of_anybody, mut of_root) = (ask(false), ask(true));
        assert!(worker.answer_one(&mut answers, &cancel));
        assert!(of_root.try_recv().is_ok());
        answers.earn(Duration::from_secs(190));
        assert!(!worker.answer_one(&mut answers, &cancel));
        assert!(of_anybody.try_recv().is_err());
        answers.earn(Duration::from_secs(20));
        assert!(worker.answer_one(&mut answers, &cancel));
        assert!(of_anybody.try_recv().is_ok());
    }

    /// A chore that has had its turn comes again after the others, also if it failed.
    #[test]
    fn each_chore_has_its_turn() {
        let mut due = Due::new();
        let mut turn = || {
            let chore = due.next().unwrap();
            due.worked(chore, true);
            chore
        };
        let round = [turn(), turn(), turn(), turn(), turn()];
        let all =
            [Chore::Refresh, Chore::Processes, Chore::Residency, Chore::Policy, Chore::Report];
        assert_eq!(round, all);
        assert_eq!([turn(), turn(), turn(), turn(), turn()], round);
    }

    /// One trust domain that could not be listed was a line of the log in every period.
    #[test]
    fn a_failure_is_said_once() {
        let mut failures = Failures::default();
        let mut is_said = |chore, error: Option<&str>| {
            let said = failures.note(chore, error.map(str::to_owned));
            said.is_some_and(|said| Some(&*said) == error)
        };
        assert!(is_said(Chore::Refresh, Some("a")));
        assert!(!is_said(Chore::Refresh, Some("a")));
        assert!(is_said(Chore::Processes, Some("a")));
        assert!(is_said(Chore::Refresh, Some("b")));
        assert!(!is_said(Chore::Refresh, Some("b")));
        assert!(!is_said(Chore::Refresh, None));
        assert!(is_said(Chore::Refresh, Some("b")));
    }

    /// No figure was taken, and no report made, until all was dropped that a round of the policy
    /// had found: hours, with many cgroups under pressure.
    #[test]
    fn figures_are_taken_while_the_policy_drops() {
        let mut due = Due::new();
        let mut turns = |count, parts_of_a_look| {
            let mut parts = 0;
            let turn = |_| {
                let chore = due.next().unwrap();
                parts += usize::from(chore == Chore::Processes);
                let is_part = chore == Chore::Processes && parts % parts_of_a_look > 0;
                due.worked(chore, chore != Chore::Policy && !is_part);
                chore
            };
            (0..count).map(turn).collect::<Vec<_>>()
        };
        let (refresh, processes, residency, policy, report) =
            (Chore::Refresh, Chore::Processes, Chore::Residency, Chore::Policy, Chore::Report);
        // It begins after a look at everything.
        assert_eq!(turns(5, 1), [refresh, processes, residency, policy, report]);
        // From then on every other turn is its, also in a look that takes many.
        let others: Vec<_> = turns(24, 5).into_iter().filter(|chore| *chore != policy).collect();
        let long_look = [processes; 5];
        let expected =
            [&[refresh][..], &long_look, &[residency, report, refresh], &long_look[..3]].concat();
        assert_eq!(others, expected);
        // Once it is complete, it comes again after the next look.
        let mut due = Due::new();
        due.worked(Chore::Policy, true);
        assert_eq!(due.next(), Some(refresh));
        assert!(!due.is_in_policy);
    }
}
