//! A container that is measured: in a memory cgroup of its own, with no network but its own loopback, and somebody who
//! asks it for something.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cofolio_node::{
    cgroup::{Cgroup, Charge, Hierarchy},
    container::Runtime,
    container::bundle::{self, Bind, ImageConfig, Options},
};
use cofolio_store::task::Cancel;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{
    super::setup,
    load::{Drive, Load},
};
use cofolio_cli::exit::{Exit, Fail};

/// How long a server may take until it listens, and its database until it is filled.
const READY_MAX: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(50);
/// Before a server that did not answer is asked again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Between two pages that are fetched.
const FETCH_PAUSE: Duration = Duration::from_millis(20);
/// How long one page may take: servers are slow when they have just started.
const FETCH_MAX: Duration = Duration::from_secs(60);
const SIDES: [&str; 2] = ["old", "new"];

/// The runtime's state. In one place on a machine, like the benchmarks' lock: what a killed run left is found by the next,
/// wherever that works.
const STATE: &str = "/run/cofolio-bench";
/// The cgroup in which images are mounted.
pub(super) const MOUNTING: &str = "cofolio-bench-mount";

/// What all containers of a measurement have in common.
pub(super) struct Host {
    pub(super) runtime: Runtime,
    pub(super) hierarchy: Hierarchy,
    /// Bundles and logs.
    dir: PathBuf,
    /// Cancelled by a signal.
    stop: Cancel,
}

impl Host {
    pub(super) fn new(
        runtime: Runtime,
        hierarchy: Hierarchy,
        work: &Path,
        stop: Cancel,
    ) -> Result<Self> {
        let dir = work.join("runtime");
        let host = Self { runtime, hierarchy, dir, stop };
        for side in 0..SIDES.len() {
            setup::make_dir(&host.bundle(side))?;
        }
        Ok(host)
    }

    fn bundle(&self, side: usize) -> PathBuf {
        self.dir.join(SIDES[side])
    }

    /// The name of the container, and of its cgroup. Only one such benchmark runs on a machine.
    fn name(side: usize) -> String {
        format!("cofolio-bench-{}", SIDES[side])
    }

    /// Takes down what a killed run left, with whatever runs in it.
    pub(super) fn clean(&self) -> Result<()> {
        for side in 0..SIDES.len() {
            let name = Self::name(side);
            if Path::new(STATE).join(&name).exists() {
                self.runtime.ask(Path::new(STATE), &["delete", "--force", &name])?;
            }
            self.hierarchy.remove(&name)?;
        }
        self.hierarchy.remove(MOUNTING)?;
        Ok(())
    }

    /// Fails once somebody wants us to end.
    pub(super) fn go_on(&self) -> Result<()> {
        match self.stop.is_cancelled() {
            true => Err(Fail::new(Exit::Interrupted, "interrupted; containers are gone").into()),
            false => Ok(()),
        }
    }

    /// Waits, unless a signal comes.
    pub(super) fn wait(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.go_on()?;
            thread::sleep(PAUSE.min(end.saturating_duration_since(Instant::now())));
        }
        self.go_on()
    }
}

/// A container that runs; dropped, it is killed and gone.
pub(super) struct Container<'a> {
    host: &'a Host,
    load: &'a Load,
    side: usize,
    port: u16,
    client: Option<Client>,
    cgroup: Cgroup,
}

impl<'a> Container<'a> {
    /// Starts the load's server on an image that is mounted at `rootfs`.
    pub(super) fn start(
        host: &'a Host,
        load: &'a Load,
        config: &ImageConfig,
        rootfs: &Path,
        side: usize,
    ) -> Result<Self> {
        let name = Host::name(side);
        let port = load.port(config)?;
        let cgroup = host.hierarchy.create(&name)?;
        let container = Self { host, load, side, port, client: None, cgroup };
        let dir = host.bundle(side);
        let mut options = Options {
            entrypoint: Some(load.command(config)),
            env: load.env.iter().map(|entry| (*entry).to_owned()).collect(),
            hostname: Some(name.clone()),
            cgroup: Some(format!("/{name}")),
            ..Options::default()
        };
        if let Some(text) = load.file {
            let source = dir.join("file");
            fs::write(&source, text)?;
            options.binds.push(Bind {
                source,
                target: Load::file_target().to_owned(),
                readonly: true,
            });
        }
        {
            // Users are looked up in the image.
            let _inside = container.cgroup.enter()?;
            bundle::Bundle::open(&dir, true)?.write(
                Some(rootfs),
                config,
                &options,
                Path::new("/"),
            )?;
        }
        // Not from within the cgroup: a runtime that fails kills what it finds there. What the server says
        // to everybody, an access log for one, is nobody's page cache here.
        let complaints = File::create(container.log())?;
        let mut command = Command::new(&host.runtime.path);
        command.arg("--root").arg(STATE).args(["run", "--detach", "--bundle"]).arg(&dir);
        command.arg("--pid-file").arg(dir.join("pid")).arg(&name);
        // Pipes: crun changes the owner of what it is given, of the host's /dev/null for one.
        let ((empty, _), (mut said, output)) = (std::io::pipe()?, std::io::pipe()?);
        thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        command.stdin(empty).stdout(output).stderr(complaints);
        let started = host.runtime.spawn(&mut command).and_then(|mut child| child.wait());
        let started = started.with_context(|| format!("cannot start {}", host.runtime.name()))?;
        ensure!(started.success(), "{} does not start: {}", container.what(), container.said());
        Ok(container)
    }

    fn what(&self) -> String {
        format!("the {} image's container", SIDES[self.side])
    }

    fn log(&self) -> PathBuf {
        self.host.bundle(self.side).join("stderr")
    }

    fn client_log(&self) -> PathBuf {
        self.host.bundle(self.side).join("client")
    }

    /// Its last words.
    fn said(&self) -> String {
        last_lines(&self.log())
    }

    /// Runs something on a thread that is in the container's network, as is every program that it starts.
    fn in_its_network<T: Send>(&self, does: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let pid = fs::read_to_string(self.host.bundle(self.side).join("pid"))?;
        let path = format!("/proc/{}/ns/net", pid.trim());
        let network = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        thread::scope(|scope| {
            let thread = thread::Builder::new().spawn_scoped(scope, || {
                move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
                    .context("cannot enter the container's network")?;
                does()
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Waits until it listens.
    pub(super) fn wait_until_ready(&self) -> Result<()> {
        let end = Instant::now() + READY_MAX;
        let connect = || Ok(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok());
        loop {
            self.host.go_on()?;
            ensure!(self.is_alive()?, "{} has ended: {}", self.what(), self.said());
            // An error is no answer yet: a process that ends loses its namespaces before its cgroup.
            let answer = self.in_its_network(connect);
            if matches!(answer, Ok(true)) {
                return Ok(());
            }
            if Instant::now() >= end {
                answer?;
                bail!(
                    "{} does not listen on port {} after {} s: {}",
                    self.what(),
                    self.port,
                    READY_MAX.as_secs(),
                    self.said()
                );
            }
            thread::sleep(PAUSE);
        }
    }

    /// Fills its database.
    pub(super) fn prepare(&self) -> Result<()> {
        self.run_until_success(self.load.prepare)
    }

    /// Servers that read what they have left listen before they can answer.
    fn run_until_success(&self, command: &[&str]) -> Result<()> {
        let end = Instant::now() + READY_MAX;
        let Some((program, args)) = command.split_first() else { return Ok(()) };
        while !self.run(program, args)?.wait()?.success() {
            self.host.go_on()?;
            let said = last_lines(&self.client_log());
            ensure!(Instant::now() < end, "{program} gets no answer from {}: {said}", self.what());
            thread::sleep(RETRY_PAUSE);
        }
        Ok(())
    }

    /// Ends it as its image wants it to be ended, so that it has written everything.
    pub(super) fn end(self, config: &ImageConfig) -> Result<()> {
        let name = Host::name(self.side);
        self.host.runtime.ask(Path::new(STATE), &["kill", &name, config.stop_signal()])?;
        let end = Instant::now() + READY_MAX;
        while self.is_alive()? {
            self.host.go_on()?;
            ensure!(
                Instant::now() < end,
                "{} does not end on {}",
                self.what(),
                config.stop_signal()
            );
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn is_alive(&self) -> Result<bool> {
        Ok(!fs::read_to_string(self.cgroup.procs())?.trim().is_empty())
    }

    /// Starts a program in its network, outside of its cgroup.
    fn run(&self, program: &str, args: &[&str]) -> Result<Child> {
        let log = File::create(self.client_log())?;
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.in_its_network(|| command.spawn().with_context(|| format!("cannot start {program}")))
    }

    /// Starts the load as soon as it can answer; it goes on until the container is dropped.
    pub(super) fn drive(&mut self) -> Result<()> {
        self.run_until_success(self.load.ready)?;
        self.client = match self.load.drive {
            Drive::Itself => None,
            Drive::Program([program, args @ ..]) => {
                Some(Client::Program(self.run(program, args)?, program))
            }
            Drive::Program([]) => None,
            Drive::Fetch(pages) => {
                let port = self.port;
                Some(Client::Fetch(self.in_its_network(|| Ok(Fetcher::start(port, pages)?))?))
            }
        };
        Ok(())
    }

    /// The load is still on.
    pub(super) fn check(&mut self) -> Result<()> {
        let (what, log) = (self.what(), self.client_log());
        match &mut self.client {
            Some(Client::Program(child, program)) => {
                if let Some(status) = child.try_wait()? {
                    bail!(
                        "{program} ended ({status}) while it was to ask {what}: {}",
                        last_lines(&log)
                    );
                }
            }
            Some(Client::Fetch(fetcher)) => fetcher.check().context(what)?,
            None => {}
        }
        ensure!(self.is_alive()?, "{} has ended: {}", self.what(), self.said());
        Ok(())
    }

    pub(super) fn charge(&self) -> Result<Charge> {
        Ok(self.cgroup.charge()?)
    }

    pub(super) fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        drop(self.client.take());
        let name = Host::name(self.side);
        // What is left then, the next run takes down; and who mounted says that it cannot be unmounted.
        let _ = self.host.runtime.ask(Path::new(STATE), &["delete", "--force", &name]);
    }
}

fn last_lines(path: &Path) -> String {
    let text = fs::read(path).map(|text| String::from_utf8_lossy(&text).into_owned());
    let text = text.unwrap_or_default();
    let lines: Vec<_> = text.split(['\n', '\r']).filter(|line| !line.trim().is_empty()).collect();
    match lines.len() {
        0 => "it said nothing".to_owned(),
        count => lines[count.saturating_sub(5)..].join("\n"),
    }
}

enum Client {
    Program(Child, &'static str),
    Fetch(Fetcher),
}

impl Drop for Client {
    fn drop(&mut self) {
        match self {
            Client::Program(child, _) => {
                // Fails if it has ended.
                let _ = child.kill();
                let _ = child.wait();
            }
            Client::Fetch(fetcher) => fetcher.stop(),
        }
    }
}

/// A thread that fetches pages.
struct Fetcher {
    stop: Arc<AtomicBool>,
    /// Rounds through all pages.
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Fetcher {
    /// Its network is that of the thread that calls this.
    fn start(port: u16, pages: &'static [&'static str]) -> std::io::Result<Self> {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, done) = (stop.clone(), rounds.clone());
        let thread = thread::Builder::new().spawn(move || {
            while !stopped.load(Relaxed) {
                for page in pages {
                    fetch(port, page).with_context(|| format!("cannot fetch {page}"))?;
                }
                done.fetch_add(1, Relaxed);
                thread::sleep(FETCH_PAUSE);
            }
            Ok(())
        })?;
        Ok(Self { stop, rounds, thread: Some(thread) })
    }

    fn check(&mut self) -> Result<()> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished)
            && let Some(thread) = self.thread.take()
        {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        ensure!(self.rounds.load(Relaxed) > 0, "not all of its pages came in time");
        Ok(())
    }

    fn stop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Fetches a page of the server on loopback, and throws it away.
fn fetch(port: u16, page: &str) -> Result<()> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(FETCH_MAX))?;
    let request = format!("GET {page} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    // In one piece: some servers take what they find.
    stream.write_all(request.as_bytes())?;
    let mut buf = vec![0; 64 << 10];
    let mut head = Vec::new();
    loop {
        let count = stream.read(&mut buf)?;
        if count == 0 {
            break;
        }
        let room = 64_usize.saturating_sub(head.len()).min(count);
        head.extend_from_slice(&buf[..room]);
    }
    let head = String::from_utf8_lossy(&head);
    let status = head.split_whitespace().nth(1).unwrap_or_default();
    // That there is no such page is an answer, too: Tomcat's image comes without an application.
    let answers = head.starts_with("HTTP/") && matches!(status, "200" | "404");
    ensure!(answers, "{}", head.lines().next().unwrap_or("no answer"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that gives one answer.
    fn answer(text: &'static str) -> u16 {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(text.as_bytes());
        });
        port
    }

    #[test]
    fn only_an_answer_counts() {
        fetch(answer("HTTP/1.1 200 OK\r\n\r\nhello"), "/").unwrap();
        fetch(answer("HTTP/1.1 404 Not Found\r\n\r\n"), "/").unwrap();
        for (text, said) in
            [("HTTP/1.1 500 Oh\r\n\r\n", "500 Oh"), ("", "no answer"), ("nonsense", "nonsense")]
        {
            let error = fetch(answer(text), "/").unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
