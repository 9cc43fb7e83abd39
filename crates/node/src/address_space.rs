//! Access to the address space of another process, with a deadline.
//!
//! `/proc/PID/maps`, `map_files`, `pagemap` and process_madvise(2) wait for locks of the process:
//! `exec_update_lock` and, above all, `mmap_lock`. Its own threads hold them during mmap(2) and
//! execve(2), which may wait for a FUSE or NFS server that never answers. Only SIGKILL ends such a
//! wait.
//!
//! So another thread makes each access. One that misses the deadline is left behind, and the caller
//! goes on. The process is not accessed again while that thread waits, so a process costs one
//! thread at most. A thread that is left behind holds nothing but descriptors of that process, and
//! the end of this process ends it.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, BufRead, Read};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How long an access may take. Those of this crate are divided into parts that take milliseconds,
/// so this is time for a machine that is busy.
const DEADLINE: Duration = Duration::from_secs(2);

/// Threads that are left behind at most. With as many, no process is accessed.
const LEFT_MAX: usize = 16;

static THREADS: Threads = Threads::new(DEADLINE, LEFT_MAX);

thread_local! {
    static TIME: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static WAITS: Cell<u32> = const { Cell::new(0) };
}

/// Processor time that accesses for this thread have taken on other threads.
pub(crate) fn access_time() -> Duration {
    TIME.get()
}

/// How often this thread has waited until the deadline.
pub(crate) fn waits() -> u32 {
    WAITS.get()
}

/// Processor time of the thread that calls, without that of accesses on other threads.
pub(crate) fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Makes an access to a process, given by its directory in `/proc`. The access must not call this
/// again. It may be left behind, so it must hold no lock and no file of a mount.
///
/// # Errors
/// Those of `access`; [`is_unanswered`] ones if the process does not answer; those of starting a
/// thread.
pub(crate) fn access<T: Send + 'static>(
    process: &Path,
    access: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    THREADS.access(process, access)
}

/// [`access`] for what must not wait itself. process_madvise(2) ignores even SIGKILL while it waits
/// for `mmap_lock`, and so does a lookup in `map_files` while another lookup of the name waits: a
/// thread would keep this process from ending. So `pagemap` waits before it. The process has only
/// the moment between the two to take the lock.
pub(crate) fn probe_and_access<T: Send + 'static>(
    process: &Path,
    access: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let pagemap = process.join("pagemap");
    THREADS.access(process, move || {
        // Where it cannot be read, the access itself will tell why.
        let _ = File::open(pagemap).and_then(|file| file.read_at(&mut [0; 8], 0));
        access()
    })
}

/// Whether an error says that a process did not answer in time. The kernel has such an error, too,
/// which means something else.
pub(crate) fn is_unanswered(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut && error.raw_os_error().is_none()
}

/// Fails as [`access`] would now because of threads that are left behind.
pub(crate) fn check(process: &Path) -> io::Result<()> {
    THREADS.lock().check(process, THREADS.left_max)
}

/// The text of `/proc/PID/maps`, which is read in parts.
pub(crate) struct Maps {
    process: PathBuf,
    /// Not opened yet, or what is left of it.
    file: Option<Option<File>>,
    part: Vec<u8>,
    at: usize,
}

/// Bytes of a part: most processes have less.
const PART: usize = 128 << 10;

impl Maps {
    pub(crate) fn of(process: &Path) -> Self {
        Self { process: process.to_owned(), file: Some(None), part: Vec::new(), at: 0 }
    }
}

impl Read for Maps {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(buffer)?;
        self.consume(read);
        Ok(read)
    }
}

impl BufRead for Maps {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.at == self.part.len()
            && let Some(opened) = self.file.take()
        {
            let (path, mut part) = (self.process.join("maps"), std::mem::take(&mut self.part));
            self.at = 0;
            let (file, part) = access(&self.process, move || {
                let file = opened.map_or_else(|| File::open(path), Ok)?;
                part.clear();
                // The kernel gives a page of it at once.
                part.reserve(4096);
                (&file).take(PART as u64).read_to_end(&mut part)?;
                Ok((file, part))
            })?;
            self.file = (part.len() == PART).then_some(Some(file));
            self.part = part;
        }
        Ok(&self.part[self.at..])
    }

    fn consume(&mut self, count: usize) {
        self.at += count;
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// The threads that make accesses.
struct Threads {
    deadline: Duration,
    left_max: usize,
    /// Held during an access: there is one at a time.
    state: Mutex<State>,
}

struct State {
    idle: Option<Worker>,
    left: Vec<Left>,
}

/// A thread that ends when nobody can send it jobs any more.
struct Worker {
    jobs: mpsc::Sender<Job>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn start() -> io::Result<Self> {
        let (jobs, to_do) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new().name("address-space".to_owned());
        let work = move || {
            // Whoever starts it may have a low priority, and others would wait for it. An
            // unprivileged process cannot raise it.
            let _ = rustix::process::setpriority_process(None, 0);
            to_do.into_iter().for_each(|job| job());
        };
        let thread = thread.spawn(work)?;
        Ok(Self { jobs, thread })
    }
}

/// A thread that waits for a process.
struct Left {
    process: PathBuf,
    started: Option<String>,
    thread: JoinHandle<()>,
}

impl State {
    fn check(&mut self, process: &Path, left_max: usize) -> io::Result<()> {
        self.left.retain(|it| !it.thread.is_finished());
        let mut of_process = self.left.iter().filter(|it| it.process == process).peekable();
        if of_process.peek().is_some() {
            let started = started(process);
            if of_process.any(|it| it.started == started) {
                return Err(unanswered("it does not answer in time".to_owned()));
            }
        }
        if self.left.len() >= left_max {
            return Err(unanswered(format!("{left_max} other processes do not answer")));
        }
        Ok(())
    }
}

impl Threads {
    const fn new(deadline: Duration, left_max: usize) -> Self {
        let state = Mutex::new(State { idle: None, left: Vec::new() });
        Self { deadline, left_max, state }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn access<T: Send + 'static>(
        &self,
        process: &Path,
        access: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let mut state = self.lock();
        state.check(process, self.left_max)?;
        let worker = state.idle.take().map_or_else(Worker::start, Ok)?;
        let (answer, answered) = mpsc::sync_channel(1);
        let job = move || {
            let before = own_time();
            let result = access();
            // Nobody may wait for it any more.
            let _ = answer.send((result, own_time().saturating_sub(before)));
        };
        let _ = worker.jobs.send(Box::new(job));
        match answered.recv_timeout(self.deadline) {
            Ok((result, time)) => {
                TIME.set(TIME.get() + time);
                state.idle = Some(worker);
                result
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                WAITS.set(WAITS.get().wrapping_add(1));
                let (process, started) = (process.to_owned(), started(process));
                state.left.push(Left { process, started, thread: worker.thread });
                Err(unanswered("it does not answer in time".to_owned()))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(io::Error::other("the thread that looks at it has ended"))
            }
        }
    }
}

fn unanswered(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, why)
}

/// When a process started, as `/proc/PID/stat` says it: its number may be another one's by now.
fn started(process: &Path) -> Option<String> {
    /// The field's number, counted from the one behind the name, which may contain anything.
    const START_TIME: usize = 22 - 3;
    let stat = fs::read(process.join("stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    Some(stat.rsplit_once(") ")?.1.split(' ').nth(START_TIME)?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc::Sender;

    use super::*;

    /// Accesses that wait until their sender is dropped.
    struct Waiting {
        threads: Threads,
        begun: Arc<AtomicUsize>,
    }

    impl Waiting {
        fn new(left_max: usize) -> Self {
            let threads = Threads::new(Duration::ZERO, left_max);
            Self { threads, begun: Arc::default() }
        }

        fn access(&mut self, process: &Path) -> (Sender<()>, io::Result<()>) {
            self.threads.deadline = Duration::from_millis(10);
            let (end, ended) = mpsc::channel();
            let begun = Arc::clone(&self.begun);
            let accessed = self.threads.access(process, move || {
                begun.fetch_add(1, SeqCst);
                let _ = ended.recv();
                Ok(())
            });
            (end, accessed)
        }

        fn answers(&mut self, process: &Path) -> bool {
            self.threads.deadline = Duration::from_secs(600);
            self.threads.access(process, || Ok(())).is_ok()
        }

        fn is_refused(&self, process: &Path) -> bool {
            let asked = self.threads.lock().check(process, self.threads.left_max);
            asked.is_err_and(|error| is_unanswered(&error))
        }

        fn wait_for_left(&self, count: usize) {
            while self.threads.lock().left.iter().filter(|it| !it.thread.is_finished()).count()
                > count
            {
                std::thread::yield_now();
            }
        }
    }

    /// The daemon's garbage collection, of the lowest priority, started the thread that the ledger used
    /// from then on: on a busy machine processes did not answer in time.
    #[test]
    fn the_thread_has_its_own_priority() {
        use rustix::process::{geteuid, getpriority_process, nice};
        if !geteuid().is_root() {
            return println!("SKIP the_thread_has_its_own_priority: it takes root");
        }
        let threads = Threads::new(Duration::from_secs(600), 1);
        let priority = || {
            nice(19)?;
            threads.access(Path::new("/1"), || Ok(getpriority_process(None)?))
        };
        let priority = std::thread::scope(|scope| scope.spawn(priority).join().unwrap());
        assert_eq!(priority.unwrap(), 0);
    }

    /// The ledger's thread read `/proc/PID/pagemap` of a process whose `mmap_lock` was held for
    /// good, and stood still.
    #[test]
    fn who_does_not_answer_is_left_to_one_thread() {
        let mut waiting = Waiting::new(2);
        let (first, second, third) = (Path::new("/1"), Path::new("/2"), Path::new("/3"));
        let (end_first, accessed) = waiting.access(first);
        assert!(is_unanswered(&accessed.unwrap_err()));
        // No other thread is spent on it, but others are asked.
        assert!(waiting.is_refused(first) && !waiting.is_refused(second));
        assert!(is_unanswered(&waiting.access(first).1.unwrap_err()));
        assert!(waiting.answers(second));
        let (end_second, accessed) = waiting.access(second);
        assert!(is_unanswered(&accessed.unwrap_err()));
        // There are no more threads than that.
        assert!(is_unanswered(&waiting.access(third).1.unwrap_err()));
        drop(end_first);
        waiting.wait_for_left(1);
        assert!(waiting.answers(first));
        assert!(waiting.is_refused(second) && !waiting.is_refused(third));
        drop(end_second);
        waiting.wait_for_left(0);
        assert!(waiting.answers(second));
        assert_eq!(waiting.begun.load(SeqCst), 2);
    }

    /// The number of a process that did not answer and has ended is given to another one.
    #[test]
    fn another_process_with_the_number_is_asked() {
        let root = tempfile::tempdir().unwrap();
        let starts = |time: u32| {
            let fields = [" 0"; 18].concat();
            fs::write(root.path().join("stat"), format!("7 (a) b) S{fields} {time} 0\n")).unwrap();
        };
        starts(5);
        let mut waiting = Waiting::new(2);
        let (_end, accessed) = waiting.access(root.path());
        assert!(is_unanswered(&accessed.unwrap_err()) && waiting.is_refused(root.path()));
        starts(6);
        assert!(!waiting.is_refused(root.path()));
        starts(5);
        assert!(waiting.is_refused(root.path()));
    }

    /// Time of accesses counted as nobody's: the ledger took more of a processor than it may.
    #[test]
    fn an_access_costs_whoever_makes_it() {
        let threads = Threads::new(Duration::from_secs(60), 1);
        let before = access_time();
        let burn = || {
            let start = own_time();
            while own_time() - start < Duration::from_millis(1) {}
            Ok(())
        };
        threads.access(Path::new("/1"), burn).unwrap();
        assert!(access_time() - before >= Duration::from_millis(1));
        assert!(
            threads.access(Path::new("/1"), || -> io::Result<()> { panic!("as asked") }).is_err()
        );
        threads.access(Path::new("/1"), || Ok(())).unwrap();
    }

    #[test]
    fn parts_of_maps_are_put_together() {
        let root = tempfile::tempdir().unwrap();
        for size in [0, 1, PART - 1, PART, PART + 1, 3 * PART] {
            let text: Vec<u8> = (0..=250).cycle().take(size).collect();
            fs::write(root.path().join("maps"), &text).unwrap();
            let mut read = Vec::new();
            Maps::of(root.path()).read_to_end(&mut read).unwrap();
            assert!(read == text, "{size}");
        }
        let missing = Maps::of(&root.path().join("no")).read_to_end(&mut Vec::new());
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
