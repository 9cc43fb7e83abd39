//! Starting, reloading and ending the daemon.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use cofolio_node::ksm::KsmPolicy;
use cofolio_node::ledger::{Ledger, ReclaimPolicy};
use cofolio_node::run_dir::RunDir;
use cofolio_node::vm::merger::MergePolicy;
use cofolio_node::vm::recycler::Policy;
use cofolio_store::task::Cancel;
use cofolio_store::{Store, with_causes};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use crate::api::{Api, ENCODERS_MAX, Turns};
use crate::auth::{Auth, AuthFiles, ReloadableAuth};
use crate::guests::Guests;
use crate::http::{self, ConnectionLimits, Peer};
use crate::ksm;
use crate::listen::{self, ListenError, Listener, SocketFile};
use crate::metrics::Metrics;
use crate::published::Published;
use crate::runtime;
use crate::upkeep::{self, Done, Schedule, Work};
use crate::worker::Worker;

/// What to serve, and where.
#[derive(Debug)]
pub struct Options {
    /// The store.
    pub store: Store,
    /// Its run directory.
    pub run: RunDir,
    /// Path of the unix socket. If systemd passed sockets, those are used instead.
    pub socket: PathBuf,
    /// The group whose members may connect to it, besides root. Not for sockets that systemd passed.
    pub group: Option<String>,
    /// A TCP address to listen at as well, for reading.
    pub listen: Option<SocketAddr>,
    /// What clients at TCP addresses must show. A reload reads its files again.
    pub auth: AuthFiles,
    /// What a reload may change.
    pub settings: Settings,
}

/// What can change while the daemon runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// From one look at objects and processes to the next.
    pub period: Duration,
    /// Share of one processor that the ledger may take.
    pub share: f64,
    /// What to reclaim without being asked.
    pub reclaim: ReclaimPolicy,
    /// When to do upkeep.
    pub upkeep: Schedule,
    /// How to return guests' free memory, if at all.
    pub recycle: Option<Policy>,
    /// How to merge guests' pages, if at all.
    pub merge: Option<MergePolicy>,
    /// How to steer KSM, if at all.
    pub ksm: Option<KsmPolicy>,
}

/// Gets a line for the operator.
pub type Log<'l> = &'l (dyn Fn(&str) + Sync);

/// Reads the settings again, or says why they stay as they are.
pub type Reload<'r> = &'r (dyn Fn() -> Result<Settings, String> + Sync);

/// Why the daemon ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// It cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A thread, a descriptor or a signal handler could not be had.
    #[error("starting: {0}")]
    Start(#[source] io::Error),
    /// It could not serve as many clients as it may have.
    #[error(
        "this process may open {0} files, and {DESCRIPTORS_MIN} are needed: `ulimit -n` raises the \
         limit of a shell, and `LimitNOFILE=` that of a service"
    )]
    Descriptors(u64),
}

/// For the connections of a unix socket and a TCP address, the files of one read of fanotify, and
/// what the ledger and upkeep open: some 600, and the usual limit is the next one above.
const DESCRIPTORS_MIN: u64 = 1024;

/// Serves until SIGTERM or SIGINT. At SIGHUP takes the settings that `reload` gives and reads the
/// files of [`Options::auth`] again; if one of these fails, all stays as it was. `log` gets what an
/// operator should know: where the daemon listens, and what fails.
///
/// # Errors
/// [`DaemonError`]. A figure that cannot be taken is logged and is no error.
pub fn serve(options: Options, reload: Reload<'_>, log: Log<'_>) -> Result<(), DaemonError> {
    // A pool of merged pages has a descriptor for each 4 MiB.
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if descriptors < DESCRIPTORS_MIN {
        return Err(DaemonError::Descriptors(descriptors));
    }
    let runtime = runtime::new(ENCODERS_MAX).map_err(DaemonError::Start)?;
    let auth = Auth::new(&options.auth)?;
    let lock = lock_run_dir(&options.run);
    let sockets = Sockets::open(&options, &auth, log);
    if let Err(why) = &lock {
        log(why);
    }
    let sockets = sockets?;
    let cancel = Cancel::default();
    // Somebody can hold a lock of the store for as long as they like.
    let store = options.store.clone().waits_until(cancel.clone());
    let published = Arc::new(Published::default());
    let settings = Arc::new(RwLock::new(options.settings.clone()));
    let ledger = ledger(&store, &options.run, &cancel, log);
    let (worker, questions) = Worker::new(ledger, Arc::clone(&published), Arc::clone(&settings))
        .map_err(DaemonError::Start)?;
    let started = cofolio_store::now();
    let done = Arc::new(Mutex::new(Done { started, gc: started, ..Done::default() }));
    let metrics = Metrics::new(Arc::clone(&done));
    let lists = Turns::default();
    let id = store.id().to_owned();
    let figures = Arc::clone(&published);
    let api = Api { published, questions: questions.clone(), metrics, store: id, lists };
    let auth = ReloadableAuth::new(auth);
    let (api, auth, refused) = (Arc::new(api), Arc::new(auth), Refused::default());
    let server = Server { options: &options, api, auth, refused, log };
    let broken = Arc::new(Notify::new());
    // If a thread panics, all of it ends: the service's manager starts it again.
    let watched = || OnDrop(|| broken.notify_one());
    let upkeep = |work: Work| {
        let _watched = watched();
        upkeep::run(work, &store, &options.run, &settings, &done, &cancel, log);
    };
    let guests = Guests::default();
    let recycle = || {
        let _watched = watched();
        guests.recycle(&options.run, &settings, &cancel, log);
    };
    let merge = || {
        let _watched = watched();
        guests.merge(&options.run, &settings, &cancel, log);
    };
    let account = || {
        let _watched = watched();
        guests.account(&options.run, &figures, &cancel);
    };
    let steer = || {
        let _watched = watched();
        ksm::steer(&options.run, &settings, &figures, &cancel, log);
    };
    std::thread::scope(|scope| {
        let stop_threads = || {
            cancel.cancel();
            questions.wake();
        };
        // On every exit, also a panic.
        let _stopping = OnDrop(stop_threads);
        let ledger = || {
            let _watched = watched();
            // Each opened file wakes it up, and it interrupted those who were mounting.
            let _ = cofolio_sys::priority::set_batch();
            worker.run(&cancel, &|error| log(&format!("the ledger: {error}")));
        };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        thread("ledger")
            .spawn_scoped(scope, ledger)
            .and_then(|_| thread("gc").spawn_scoped(scope, || upkeep(Work::Gc)))
            .and_then(|_| thread("scrub").spawn_scoped(scope, || upkeep(Work::Scrub)))
            .and_then(|_| thread("recycler").spawn_scoped(scope, recycle))
            .and_then(|_| thread("merger").spawn_scoped(scope, merge))
            .and_then(|_| thread("machines").spawn_scoped(scope, account))
            .and_then(|_| thread("ksm").spawn_scoped(scope, steer))
            .map_err(DaemonError::Start)?;
        let reload = || server.reload(&settings, reload);
        let served = server.run(sockets, Arc::clone(&broken), &reload, &stop_threads);
        let ended = runtime.block_on(served);
        // Connections that are still open do not wait for the threads.
        drop(runtime);
        ended
    })
}

/// The ledger, which watches opened files if it can.
fn ledger(store: &Store, run: &RunDir, cancel: &Cancel, log: Log<'_>) -> Ledger {
    let mut ledger = Ledger::new(store.clone(), run.clone())
        .with_cancel(cancel.clone())
        .ignoring_opens_of(Path::new("/proc/self/exe"));
    if let Some(error) = ledger.cgroup_error() {
        log(&format!("cannot distinguish containers or notice their end: {error}"));
    }
    if let Err(error) = ledger.watch_opens() {
        log(&format!("opened files are not seen, only mapped ones: {error}"));
    }
    ledger
}

/// The run directory, locked as long as the daemon runs. A second daemon with this run directory is
/// allowed, at another socket, but rarely intended.
///
/// # Errors
/// The sentence to say then.
fn lock_run_dir(run: &RunDir) -> Result<File, String> {
    let at = run.path().display();
    let made = run.prepare().map_err(|error| with_causes(&error));
    made.map_err(|why| format!("cannot make the run directory {at}: {why}"))?;
    let lock = || {
        let dir = File::open(run.path())?;
        flock(&dir, FlockOperation::NonBlockingLockExclusive)?;
        Ok(dir)
    };
    lock().map_err(|error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => format!(
            "another daemon serves this store with the run directory {at}: each keeps a ledger of its \
             own, and either of them collects garbage"
        ),
        _ => format!("cannot tell whether another daemon serves with {at}: {}", with_causes(&error)),
    })
}

/// Sockets that the daemon listens at.
struct Sockets {
    /// A TCP address, and those that systemd passed, which keeps them.
    others: Vec<Listener>,
    /// The unix socket, and the file that was made for it.
    own: Option<(StdUnixListener, SocketFile)>,
}

impl Sockets {
    fn open(options: &Options, auth: &Auth, log: Log<'_>) -> Result<Self, DaemonError> {
        let passed = cofolio_sys::process::passed_sockets().map_err(DaemonError::Start)?;
        let passed = passed.into_iter().map(|socket| listen::passed(socket, auth));
        let mut others = passed.collect::<Result<Vec<_>, ListenError>>()?;
        let is_activated = !others.is_empty();
        if is_activated {
            log_what_is_ignored(options, &others, log);
        }
        // Before the unix socket: an address that is refused leaves none.
        let tcp = options.listen.map(|address| listen::tcp(address, auth)).transpose()?;
        let own = match is_activated {
            true => None,
            false => Some(listen::unix(&options.socket, options.group.as_deref())?),
        };
        // Nothing can fail any more.
        if let Some((tcp, asked)) = tcp.zip(options.listen) {
            let address = tcp.local_addr().unwrap_or(asked);
            let scheme = if auth.tls().is_some() { "https" } else { "http" };
            log(&format!("listening at {scheme}://{address}/"));
            others.push(Listener::Tcp(tcp));
        }
        if own.is_some() {
            log(&format!("listening at {}", options.socket.display()));
        }
        Ok(Self { others, own })
    }
}

/// Of passed sockets, whoever opened them has said where they are and who may connect.
fn log_what_is_ignored(options: &Options, passed: &[Listener], log: Log<'_>) {
    let asked = options.socket.as_path();
    let is_asked = |it: &Listener| match it {
        Listener::Unix(unix) => unix.local_addr().is_ok_and(|at| at.as_pathname() == Some(asked)),
        Listener::Tcp(_) => false,
    };
    if !passed.iter().any(is_asked) {
        log(&format!("not listening at {}: systemd passed other sockets", asked.display()));
    }
    if let Some(group) = &options.group {
        log(&format!("group {group} is ignored: the socket's owner and mode are systemd's"));
    }
}

/// Does something at the end of a scope, also at a panic.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// How long answers that are on their way may take once the daemon is to end.
const ENDING_TIME: Duration = Duration::from_secs(5);

/// How often the daemon looks whether its socket file is still there, and says that it cannot accept
/// connections.
const SOCKET_INTERVAL: Duration = Duration::from_secs(5);

/// A task that accepts connections, and their limits.
type Accepting = (JoinHandle<()>, Vec<ConnectionLimits>);

/// Answers at the sockets.
struct Server<'s> {
    options: &'s Options,
    api: Arc<Api>,
    auth: Arc<ReloadableAuth>,
    refused: Refused,
    log: Log<'s>,
}

/// Why the kernel last refused a connection that waits: no descriptor is free, for one. Taken when
/// it is said.
type Refused = Arc<Mutex<Option<io::Error>>>;

impl Server<'_> {
    /// Accepts connections until a signal asks to end, a thread is `broken`, or the socket file is
    /// gone and cannot be made again. Then it removes the socket file, stops the threads, and lets
    /// clients have the answers that are on their way.
    async fn run(
        &self,
        sockets: Sockets,
        broken: Arc<Notify>,
        reload: &dyn Fn(),
        stop_threads: &dyn Fn(),
    ) -> Result<(), DaemonError> {
        let mut signals = signals(broken)?;
        let accept = |listener| self.accept(listener).map_err(DaemonError::Start);
        let others = sockets.others.into_iter().map(accept).collect::<Result<Vec<_>, _>>();
        let mut accepting = others?;
        let mut own = match sockets.own {
            Some((unix, file)) => Some((accept(Listener::Unix(unix))?, file)),
            None => None,
        };
        notify(&[NotifyState::Ready]);
        let ended = loop {
            match tokio::time::timeout(SOCKET_INTERVAL, signals.recv()).await {
                Ok(Some(kind)) if kind == SignalKind::hangup() => {
                    // Without the time, systemd takes it for an earlier reload's (sd_notify(3)).
                    if let Ok(now) = NotifyState::monotonic_usec_now() {
                        notify(&[NotifyState::Reloading, now]);
                    }
                    reload();
                    notify(&[NotifyState::Ready]);
                }
                Ok(_) => break Ok(()),
                Err(_) => {
                    if let Some(error) = lock(&self.refused).take() {
                        (self.log)(&format!("cannot accept connections: {error}"));
                    }
                    let Some((task, file)) = &mut own else { continue };
                    if file.is_in_place() {
                        continue;
                    }
                    match self.listen_again(file) {
                        Ok((new, new_file)) => {
                            *file = new_file;
                            task.0.abort();
                            accepting.push(std::mem::replace(task, new));
                        }
                        Err(error) => break Err(error),
                    }
                }
            }
        };
        notify(&[NotifyState::Stopping]);
        if let Some((task, file)) = own {
            drop(file);
            accepting.push(task);
        }
        stop_threads();
        let _ = tokio::time::timeout(ENDING_TIME, http::end(accepting)).await;
        ended
    }

    /// Takes new settings, and reads the files of [`Options::auth`] again.
    fn reload(&self, settings: &RwLock<Settings>, reload: Reload<'_>) {
        let read = || {
            let new_auth = |error| with_causes(&error);
            Ok::<_, String>((reload()?, Auth::new(&self.options.auth).map_err(new_auth)?))
        };
        match read() {
            Ok((new, new_auth)) => {
                *settings.write().unwrap_or_else(PoisonError::into_inner) = new;
                self.auth.replace(new_auth);
                (self.log)("the settings were read again");
            }
            Err(why) => (self.log)(&format!("the settings stay as they are: {why}")),
        }
    }

    /// Listens once more where the socket file is gone or another has replaced it: no client reaches
    /// the daemon, and another daemon could start beside it.
    fn listen_again(&self, lost: &SocketFile) -> Result<(Accepting, SocketFile), DaemonError> {
        let at = self.options.socket.display();
        // The socket may be elsewhere. If not, listening fails as well, and its error names the path.
        let _ = self.options.run.prepare();
        let done = if lost.is_replaced() { "replaced" } else { "removed" };
        let listening = lost.make_again();
        let again = if listening.is_ok() { "listening at it again" } else { "cannot listen again" };
        (self.log)(&format!("somebody {done} the socket {at}: {again}"));
        let (unix, file) = listening?;
        Ok((self.accept(Listener::Unix(unix)).map_err(DaemonError::Start)?, file))
    }

    /// Starts to accept connections. Each socket has limits of its own, and a unix socket has two:
    /// root's, and those of all others, who cannot keep root out.
    fn accept(&self, listener: Listener) -> io::Result<Accepting> {
        let (api, limits) = (Arc::clone(&self.api), ConnectionLimits::new());
        let refused = Arc::clone(&self.refused);
        match listener {
            Listener::Unix(unix) => {
                unix.set_nonblocking(true)?;
                let (unix, others) = (UnixListener::from_std(unix)?, ConnectionLimits::new());
                let both = [limits, others];
                let task = tokio::spawn(accept_unix(unix, api, both.clone(), refused));
                Ok((task, both.into()))
            }
            Listener::Tcp(tcp) => {
                tcp.set_nonblocking(true)?;
                let (tcp, auth) = (TcpListener::from_std(tcp)?, Arc::clone(&self.auth));
                let task = tokio::spawn(accept_tcp(tcp, api, limits.clone(), auth, refused));
                Ok((task, vec![limits]))
            }
        }
    }
}

/// Signals that reload or end the daemon. What is `broken` ends it as well.
fn signals(broken: Arc<Notify>) -> Result<mpsc::Receiver<SignalKind>, DaemonError> {
    let (sender, received) = mpsc::channel(1);
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        let mut signals = signal(kind).map_err(DaemonError::Start)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() && sender.send(kind).await.is_ok() {}
        });
    }
    tokio::spawn(async move {
        broken.notified().await;
        let _ = sender.send(SignalKind::terminate()).await;
    });
    Ok(received)
}

async fn accept_unix(
    listener: UnixListener,
    api: Arc<Api>,
    [of_root, of_others]: [ConnectionLimits; 2],
    refused: Refused,
) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let is_root = stream.peer_cred().is_ok_and(|peer| peer.uid() == 0);
                let limits = if is_root { &of_root } else { &of_others };
                let api = Arc::clone(&api);
                // Not waited for: the next client may be one of the others.
                if let Some(permit) = limits.try_acquire() {
                    tokio::spawn(async move {
                        http::serve(stream, api, &Peer::Local, &permit).await;
                    });
                } else if let Some(permit) = limits.try_acquire_refusal() {
                    tokio::spawn(async move {
                        http::refuse(stream, api).await;
                        drop(permit);
                    });
                }
            }
            Err(error) => pause(&refused, error).await,
        }
    }
}

async fn accept_tcp(
    listener: TcpListener,
    api: Arc<Api>,
    limits: ConnectionLimits,
    auth: Arc<ReloadableAuth>,
    refused: Refused,
) {
    while let Some(handshake) = limits.acquire_handshake().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (api, auth, limits) = (Arc::clone(&api), Arc::clone(&auth), limits.clone());
                tokio::spawn(http::serve_remote(stream, api, auth, limits, handshake));
            }
            Err(error) => pause(&refused, error).await,
        }
    }
}

/// Without a free descriptor every try fails at once.
async fn pause(refused: &Refused, error: io::Error) {
    *lock(refused) = Some(error);
    tokio::time::sleep(Duration::from_millis(100)).await;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells systemd, if it has started us, how far we are. It waits for a while and says so if it hears
/// nothing.
fn notify(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(states);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr as UnixAddress, UnixStream};

    use super::*;

    /// A member of the socket's group with 64 silent connections kept root from being served until
    /// they ended. Later whoever found no room was answered before asking, which clients took for
    /// an error of the protocol.
    #[test]
    fn connections_of_others_leave_room_for_root() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIP connections_of_others_leave_room_for_root: needs root");
        }
        let name = format!("cofolio-test-{}-root", std::process::id());
        let address = UnixAddress::from_abstract_name(name).unwrap();
        let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
        let clients = std::thread::spawn(move || {
            let connect = || UnixStream::connect_addr(&address).unwrap();
            let of_others = std::thread::scope(|scope| {
                let connect_all = || {
                    // Of this thread alone.
                    rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534)).unwrap();
                    (0..100).map(|_| connect()).collect::<Vec<_>>()
                };
                scope.spawn(connect_all).join().unwrap()
            });
            let status = |mut client: UnixStream| {
                client.write_all(b"GET /v1/version HTTP/1.1\r\nConnection: close\r\n\r\n").unwrap();
                let mut answer = String::new();
                client.read_to_string(&mut answer).unwrap();
                answer[9..12].to_owned()
            };
            assert_eq!(status(connect()), "200");
            of_others.into_iter().map(status).collect::<Vec<_>>()
        });
        runtime::new(1).unwrap().block_on(async {
            listener.set_nonblocking(true).unwrap();
            let listener = UnixListener::from_std(listener).unwrap();
            let (of_root, of_others) = (ConnectionLimits::new(), ConnectionLimits::new());
            let api = Arc::new(Api::without_ledger());
            let task =
                tokio::spawn(accept_unix(listener, api, [of_root, of_others], Refused::default()));
            while !clients.is_finished() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            task.abort();
        });
        // None had to end for root.
        let of_others = clients.join().unwrap();
        assert_eq!(of_others, [vec!["200"; 64], vec!["503"; 36]].concat());
    }
}
