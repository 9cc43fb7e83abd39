//! Starting, reloading and ending the daemon.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use cofolio_node::ledger::{Ledger, LedgerError, ReclaimPolicy};
use cofolio_node::mount::RunDir;
use cofolio_store::task::Cancel;
use cofolio_store::{Store, with_causes};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Resource, getrlimit};
use sd_notify::NotifyState;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use crate::api::{Api, ENCODERS_MAX, Turns};
use crate::auth::{Auth, AuthFiles, ReloadableAuth};
use crate::http::{self, ConnectionLimits, Peer};
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
}

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

/// For the connections of all sockets, and what the ledger and upkeep open.
const DESCRIPTORS_MIN: u64 = 512;

/// Serves until SIGTERM or SIGINT. At SIGHUP takes the settings that `reload` gives and reads the
/// files of [`Options::auth`] again; if one of these fails, all stays as it was. `said` hears
/// what an operator should know: where it listens, and what fails.
///
/// # Errors
/// [`DaemonError`]. A figure that cannot be taken is said and is no error.
pub fn serve(
    options: Options,
    reload: Reload<'_>,
    said: &(dyn Fn(&str) + Sync),
) -> Result<(), DaemonError> {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if descriptors < DESCRIPTORS_MIN {
        return Err(DaemonError::Descriptors(descriptors));
    }
    let runtime = runtime::new(ENCODERS_MAX).map_err(DaemonError::Start)?;
    let auth = Auth::new(&options.auth)?;
    let lock = lock_run_dir(&options.run);
    if let Err(why) = &lock {
        said(why);
    }
    let (listeners, socket) = open_sockets(&options, &auth, said)?;
    let cancel = Cancel::default();
    // Somebody can hold a lock of the store for as long as they like.
    let store = &options.store.clone().waits_until(cancel.clone());
    let run = &options.run;
    let mut ledger = Ledger::new(store.clone(), run.clone())
        .with_cancel(cancel.clone())
        .ignoring_opens_of(Path::new("/proc/self/exe"));
    if let Some(error) = ledger.cgroup_error() {
        said(&format!("cannot distinguish containers or notice their end: {error}"));
    }
    if let Err(error) = ledger.watch_opens() {
        said(&format!("opened files are not seen, only mapped ones: {error}"));
    }
    let published = Arc::new(Published::default());
    let settings = Arc::new(RwLock::new(options.settings.clone()));
    let (worker, questions) = Worker::new(ledger, Arc::clone(&published), Arc::clone(&settings))
        .map_err(DaemonError::Start)?;
    let started = cofolio_store::now();
    let done = Arc::new(Mutex::new(Done { started, gc: started, ..Done::default() }));
    let metrics = Metrics::new(Arc::clone(&done));
    let api = Arc::new(Api {
        published,
        questions: questions.clone(),
        metrics,
        store: store.id().to_owned(),
        lists: Turns::default(),
    });
    let auth = Arc::new(ReloadableAuth::new(auth));
    let broken = Arc::new(Notify::new());
    // If a thread panics, all of it ends: the service's manager starts it again.
    let watched = || OnDrop(|| broken.notify_one());
    let upkeep = |work: Work| {
        let _watched = watched();
        upkeep::run(work, store, run, &settings, &done, &cancel, said);
    };
    std::thread::scope(|scope| {
        let end = || {
            cancel.cancel();
            questions.wake();
        };
        // On every exit, also a panic, stop the threads.
        let _ending = OnDrop(end);
        let ledger = || {
            let _watched = watched();
            worker.run(&cancel, &|error: &LedgerError| said(&format!("the ledger: {error}")));
        };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        thread("ledger")
            .spawn_scoped(scope, ledger)
            .and_then(|_| thread("gc").spawn_scoped(scope, || upkeep(Work::Gc)))
            .and_then(|_| thread("scrub").spawn_scoped(scope, || upkeep(Work::Scrub)))
            .map_err(DaemonError::Start)
            .and_then(|_| {
                let reload = || match read_again(&settings, reload, &auth, &options.auth) {
                    Ok(()) => said("the settings were read again"),
                    Err(why) => said(&format!("the settings stay as they are: {why}")),
                };
                let served = (api, Arc::clone(&auth));
                let told = (&reload as &dyn Fn(), &end as &dyn Fn(), Arc::clone(&broken));
                let again = |file: &SocketFile| listen_again(file, &options, said);
                listen_until_told(runtime, listeners, (socket, &again), served, told)
            })
    })
}

/// The run directory, locked as long as the daemon runs. A second daemon with this run directory is
/// allowed, at another socket, but rarely intended.
///
/// # Errors
/// The sentence to say then.
fn lock_run_dir(run: &RunDir) -> Result<File, String> {
    let at = run.path().display();
    let lock = || {
        run.prepare().map_err(io::Error::other)?;
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

/// The sockets to listen at, and the file that was made for one. systemd keeps the sockets that it
/// passed.
fn open_sockets(
    options: &Options,
    auth: &Auth,
    said: &dyn Fn(&str),
) -> Result<(Vec<Listener>, Option<SocketFile>), DaemonError> {
    let passed = cofolio_sys::process::passed_sockets().map_err(DaemonError::Start)?;
    let passed = passed.into_iter().map(|socket| listen::passed(socket, auth));
    let mut listeners = passed.collect::<Result<Vec<_>, ListenError>>()?;
    let is_activated = !listeners.is_empty();
    if is_activated {
        say_what_is_ignored(options, &listeners, said);
    }
    // Before the unix socket: an address that is refused leaves none.
    let tcp = options.listen.map(|address| listen::tcp(address, auth)).transpose()?;
    let unix = match is_activated {
        true => None,
        false => Some(listen::unix(&options.socket, options.group.as_deref())?),
    };
    // Nothing can fail any more.
    if let Some((tcp, asked)) = tcp.zip(options.listen) {
        let address = tcp.local_addr().unwrap_or(asked);
        let scheme = if auth.tls().is_some() { "https" } else { "http" };
        said(&format!("listening at {scheme}://{address}/"));
        listeners.push(Listener::Tcp(tcp));
    }
    let file = unix.map(|(unix, file)| {
        said(&format!("listening at {}", options.socket.display()));
        listeners.push(Listener::Unix(unix));
        file
    });
    Ok((listeners, file))
}

/// Listens where the socket file is gone or another has replaced it: no client reaches the daemon,
/// and another daemon could start beside it.
fn listen_again(
    file: &SocketFile,
    options: &Options,
    said: &dyn Fn(&str),
) -> Result<(Listener, SocketFile), ListenError> {
    let at = options.socket.display();
    // Where it cannot be made, the socket may be elsewhere.
    let _ = options.run.prepare();
    let listening = file.make_again();
    match &listening {
        Ok(_) => said(&format!("listening at {at} again: somebody removed the socket")),
        Err(_) => said(&format!("somebody removed the socket {at}")),
    }
    listening.map(|(unix, file)| (Listener::Unix(unix), file))
}

/// Of passed sockets, whoever opened them has said where they are and who may connect.
fn say_what_is_ignored(options: &Options, passed: &[Listener], said: &dyn Fn(&str)) {
    let asked = options.socket.as_path();
    let is_asked = |it: &Listener| match it {
        Listener::Unix(unix) => unix.local_addr().is_ok_and(|at| at.as_pathname() == Some(asked)),
        Listener::Tcp(_) => false,
    };
    if !passed.iter().any(is_asked) {
        said(&format!("not listening at {}: systemd passed other sockets", asked.display()));
    }
    if let Some(group) = &options.group {
        said(&format!("group {group} is ignored: the socket's owner and mode are systemd's"));
    }
}

/// Does something at the end of a scope, also at a panic.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Takes all that a reload may change, or none of it.
fn read_again(
    settings: &RwLock<Settings>,
    reload: Reload<'_>,
    auth: &ReloadableAuth,
    files: &AuthFiles,
) -> Result<(), String> {
    let new = reload()?;
    let new_auth = Auth::new(files).map_err(|error| with_causes(&error))?;
    *settings.write().unwrap_or_else(PoisonError::into_inner) = new;
    auth.replace(new_auth);
    Ok(())
}

/// How long answers that are on their way may take once the daemon is to end.
const ENDING_TIME: Duration = Duration::from_secs(5);

/// How often the daemon looks whether its socket file is still there.
const SOCKET_INTERVAL: Duration = Duration::from_secs(5);

/// Listens at the path of the socket file once more.
type Again<'a> = &'a dyn Fn(&SocketFile) -> Result<(Listener, SocketFile), ListenError>;

/// Accepts connections until a signal asks to end, something is `broken`, or the socket file is
/// gone and cannot be made again. Then it removes the socket file, has the threads `end`, and lets
/// clients have the answers that are on their way.
fn listen_until_told(
    runtime: Runtime,
    listeners: Vec<Listener>,
    (mut socket, again): (Option<SocketFile>, Again<'_>),
    (api, auth): (Arc<Api>, Arc<ReloadableAuth>),
    (reload, end, broken): (&dyn Fn(), &dyn Fn(), Arc<Notify>),
) -> Result<(), DaemonError> {
    runtime.block_on(async {
        let mut told = signals(broken)?;
        let accepting = listeners.into_iter().map(|listener| accept(listener, &api, &auth));
        let accepting = accepting.collect::<io::Result<Vec<_>>>();
        let mut accepting = accepting.map_err(DaemonError::Start)?;
        notify(&[NotifyState::Ready]);
        let ended = loop {
            match tokio::time::timeout(SOCKET_INTERVAL, told.recv()).await {
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
                    let lost = socket.as_ref().filter(|file| !file.is_in_place());
                    let Some(lost) = lost else { continue };
                    // That of the socket file is always the last one.
                    accepting.last().iter().for_each(|(task, _)| task.abort());
                    let listening = again(lost).map_err(DaemonError::Listen);
                    let accepted = listening.and_then(|(listener, file)| {
                        socket = Some(file);
                        accept(listener, &api, &auth).map_err(DaemonError::Start)
                    });
                    match accepted {
                        Ok(new) => accepting.push(new),
                        Err(error) => break Err(error),
                    }
                }
            }
        };
        notify(&[NotifyState::Stopping]);
        drop(socket);
        end();
        let _ = tokio::time::timeout(ENDING_TIME, http::end(accepting)).await;
        ended
    })
}

/// Signals that reload or end the daemon. What is `broken` ends it as well.
fn signals(broken: Arc<Notify>) -> Result<mpsc::Receiver<SignalKind>, DaemonError> {
    let (sender, told) = mpsc::channel(1);
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
    Ok(told)
}

/// Starts to accept connections. Each socket has limits of its own, and a unix socket has two:
/// root's, and those of all others, who cannot keep root out.
fn accept(
    listener: Listener,
    api: &Arc<Api>,
    auth: &Arc<ReloadableAuth>,
) -> io::Result<(JoinHandle<()>, Vec<ConnectionLimits>)> {
    let (api, limits) = (Arc::clone(api), ConnectionLimits::new());
    match listener {
        Listener::Unix(unix) => {
            unix.set_nonblocking(true)?;
            let (unix, others) = (UnixListener::from_std(unix)?, ConnectionLimits::new());
            let task = tokio::spawn(accept_unix(unix, api, limits.clone(), others.clone()));
            Ok((task, vec![limits, others]))
        }
        Listener::Tcp(tcp) => {
            tcp.set_nonblocking(true)?;
            let (tcp, auth) = (TcpListener::from_std(tcp)?, Arc::clone(auth));
            let task = tokio::spawn(accept_tcp(tcp, api, limits.clone(), auth));
            Ok((task, vec![limits]))
        }
    }
}

async fn accept_unix(
    listener: UnixListener,
    api: Arc<Api>,
    of_root: ConnectionLimits,
    of_others: ConnectionLimits,
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
            Err(_) => pause().await,
        }
    }
}

async fn accept_tcp(
    listener: TcpListener,
    api: Arc<Api>,
    limits: ConnectionLimits,
    auth: Arc<ReloadableAuth>,
) {
    while let Some(handshake) = limits.acquire_handshake().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (api, auth, limits) = (Arc::clone(&api), Arc::clone(&auth), limits.clone());
                tokio::spawn(http::serve_remote(stream, api, auth, limits, handshake));
            }
            Err(_) => pause().await,
        }
    }
}

/// Without a free descriptor every try fails at once.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(100)).await;
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
            let auth = Arc::new(ReloadableAuth::new(Auth::new(&AuthFiles::default()).unwrap()));
            let api = Arc::new(Api::without_ledger());
            let (task, _) = accept(Listener::Unix(listener), &api, &auth).unwrap();
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
