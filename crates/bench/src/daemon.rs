//! `cofolio serve`, as a benchmark runs it and asks it.

use std::{
    fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cofolio_daemon::Client;
use cofolio_node::{ledger::Report, run_dir::RunDir};
use cofolio_store::Domain;
use rustix::process::{Pid, Signal, kill_process};

use crate::threads::{self, Threads};

/// `cofolio serve`, ended when dropped.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) client: Client,
}

impl Daemon {
    /// Starts it and waits until it answers. The machine's own configuration has no part in it.
    pub(crate) fn start(program: Option<&Path>, domain: &Domain, config: &Path) -> Result<Self> {
        const PATIENCE: Duration = Duration::from_secs(30);
        let beside =
            || -> Result<PathBuf> { Ok(std::env::current_exe()?.with_file_name("cofolio")) };
        let program = program.map_or_else(beside, |it| Ok(it.to_owned()))?;
        let store = domain.store().path().context("the store has no directory")?;
        let run = RunDir::of(domain.store())?;
        let socket = run.path().join("cofolio.sock");
        let mut command = Command::new(&program);
        command.args(["serve", "--socket"]).arg(&socket).arg("--config").arg(config);
        let child = command
            .env("COFOLIO_STORE", store)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut daemon = Self { child, client: Client::at(socket) };
        let started = Instant::now();
        while UnixStream::connect(daemon.client.socket()).is_err() {
            if let Some(status) = daemon.child.try_wait()? {
                bail!("{} serve ended: {status}", program.display());
            }
            ensure!(started.elapsed() < PATIENCE, "the daemon does not answer");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    /// Takes all figures now.
    pub(crate) fn sample(&self) -> Result<Report> {
        Ok(self.client.post("/v1/sample", &())?)
    }

    /// The report that was published last.
    pub(crate) fn report(&self) -> Result<Report> {
        Ok(self.client.get("/v1/report")?)
    }

    pub(crate) fn metrics(&self) -> Result<Metrics> {
        Ok(Metrics(self.client.get_text("/metrics")?))
    }

    /// Makes it read its configuration again.
    pub(crate) fn reload(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), Signal::HUP)?)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Bytes of a line of `/proc/PID/status`.
    pub(crate) fn status(&self, line: &str) -> Result<u64> {
        crate::usage_lists::status_bytes(&self.child.id().to_string(), line)
    }

    /// `utime` and `stime` of `/proc/PID/stat`, which are in hundredths of a second.
    pub(crate) fn cpu_seconds(&self) -> Result<f64> {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let fields = text.rsplit_once(") ").context("no name in /proc/PID/stat")?.1;
        let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<f64>);
        Ok(ticks.sum::<Result<f64, _>>()? / 1e2)
    }
}

impl Daemon {
    /// Processor time of its threads.
    pub(crate) fn threads(&self) -> Threads {
        threads::of(&format!("/proc/{}/task", self.child.id()))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// The text of `/metrics`.
pub(crate) struct Metrics(String);

impl Metrics {
    /// The figure of a metric without labels.
    pub(crate) fn figure<T: FromStr>(&self, name: &str) -> Result<T> {
        let line = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
        self.0.lines().find_map(line).with_context(|| format!("the daemon has no metric {name}"))
    }
}
