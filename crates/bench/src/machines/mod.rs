//! Virtual machines of benchmarks, as users start them: with `cofolio vm run`.

pub(crate) mod density;
pub(crate) mod image;
pub(crate) mod merge;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use cofolio_cli::exit::{Exit, Fail};
use cofolio_guest::Message;
use cofolio_node::run_dir::RunDir;
use cofolio_node::vm::Accel;
use cofolio_node::vm::merger::{Target, targets};
use cofolio_store::{Domain, task::Cancel};
use serde_json::Value;

/// Longest wait for an event of a guest; an emulated processor is slow.
const PATIENCE: Duration = Duration::from_secs(600);

/// Options of all benchmarks with virtual machines.
#[derive(Debug, clap::Args)]
pub(crate) struct HostArgs {
    /// Kernel of the guests, a vmlinuz with lib/modules/VERSION beside it
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// The program to run [default: `cofolio` beside this one]
    #[arg(long, value_name = "FILE")]
    cofolio: Option<PathBuf>,
}

/// Where virtual machines run, until it is cancelled. They end with it.
pub(crate) struct Host<'d> {
    pub(crate) program: PathBuf,
    pub(crate) kernel: PathBuf,
    domain: &'d Domain,
    run: RunDir,
    cancel: &'d Cancel,
}

/// A virtual machine.
pub(crate) struct Machine {
    pub(crate) name: String,
    pub(crate) pid: u32,
    dir: PathBuf,
    output: File,
    said: String,
}

impl<'d> Host<'d> {
    pub(crate) fn new(args: &HostArgs, domain: &'d Domain, cancel: &'d Cancel) -> Result<Self> {
        let beside =
            || -> Result<PathBuf> { Ok(std::env::current_exe()?.with_file_name("cofolio")) };
        let program = args.cofolio.clone().map_or_else(beside, Ok)?;
        let run = RunDir::of(domain.store())?;
        let host = Self { program, kernel: args.kernel.clone(), domain, run, cancel };
        // A killed run leaves machines.
        host.stop_all()?;
        Ok(host)
    }

    /// `cofolio` with the store and the trust domain, started by other words if there are any.
    fn cofolio(&self, by: &[&str]) -> Result<Command> {
        let mut words = by.iter().map(OsStr::new).chain([self.program.as_os_str()]);
        let mut command = Command::new(words.next().unwrap_or_default());
        let store = self.domain.store().path().context("the store has no directory")?;
        command.args(words).args(["--domain", self.domain.name()]);
        command.env("COFOLIO_STORE", store).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs `cofolio` with these arguments, and returns its output.
    pub(crate) fn run(&self, args: &[&str]) -> Result<String> {
        output(self.cofolio(&[])?.args(args))
    }

    /// Imports an image, whose pack is made as well.
    pub(crate) fn import(&self, image: &str, name: &str) -> Result<()> {
        self.run(&["import", "--name", name, image])?;
        self.run(&["pack", "--vm", name]).map(drop)
    }

    /// `cofolio vm run --detach --name NAME OPTIONS IMAGE -- ARGS`, started by the words `by`.
    pub(crate) fn start(
        &self,
        by: &[&str],
        name: &str,
        options: &[&str],
        image: &str,
        args: &[&str],
    ) -> Result<Machine> {
        self.check()?;
        let mut command = self.cofolio(by)?;
        command.args(["vm", "run", "--detach", "--name", name, "--kernel"]).arg(&self.kernel);
        command.args(options).arg(image).arg("--").args(args);
        output(&mut command)?;
        let listed = self.run(&["vm", "ps", "--json"])?;
        let listed: Vec<Value> = serde_json::from_str(&listed)?;
        let it = listed.iter().find(|it| it["name"] == name).context("a machine has ended")?;
        let pid = it["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        let pid = pid.context("a machine has ended")?;
        let dir = self.run.path().join("vms").join(name);
        let output = File::open(dir.join("output"))?;
        Ok(Machine { name: name.to_owned(), pid, dir, output, said: String::new() })
    }

    /// Those of its machines whose pages can be merged.
    pub(crate) fn targets(&self) -> Vec<Target> {
        targets(&self.run)
    }

    /// Fails if it was cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(!self.cancel.is_cancelled(), "interrupted");
        Ok(())
    }

    /// Waits, unless it is cancelled.
    pub(crate) fn wait(&self, wait: Duration) -> Result<()> {
        let began = Instant::now();
        while began.elapsed() < wait {
            self.check()?;
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Ends all machines.
    pub(crate) fn stop_all(&self) -> Result<()> {
        let listed = self.run(&["vm", "ps", "--json"])?;
        let listed: Vec<Value> = serde_json::from_str(&listed)?;
        for machine in &listed {
            let name = machine["name"].as_str().unwrap_or_default();
            self.run(&["vm", "stop", "--time", "0", name])?;
        }
        Ok(())
    }
}

impl Drop for Host<'_> {
    fn drop(&mut self) {
        let _ = self.stop_all();
    }
}

impl Machine {
    /// Sends a signal to its program.
    pub(crate) fn signal(&self, number: i32) -> Result<()> {
        let mut control = UnixStream::connect(self.dir.join("control"))?;
        Ok(Message::Signal(number).write(&mut control).map_err(io::Error::other)?)
    }

    /// Whole lines that its program has said since the last call.
    pub(crate) fn lines(&mut self) -> Result<Vec<String>> {
        let mut bytes = Vec::new();
        self.output.read_to_end(&mut bytes)?;
        self.said += &String::from_utf8_lossy(&bytes);
        let Some(end) = self.said.rfind('\n') else { return Ok(Vec::new()) };
        let rest = self.said.split_off(end + 1);
        let lines = std::mem::replace(&mut self.said, rest);
        Ok(lines.lines().map(|line| line.trim_end().to_owned()).collect())
    }

    /// Events that its program has said since the last call: lines of JSON. Fails if it has failed.
    pub(crate) fn events(&mut self) -> Result<Vec<Value>> {
        let lines = self.lines()?;
        let parse = |line: String| -> Result<Value> {
            let event: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
            ensure!(event["event"] != "failed", "{}: {}", self.name, event["why"]);
            Ok(event)
        };
        lines.into_iter().map(parse).collect()
    }

    /// Waits for an event of its program.
    pub(crate) fn wait_for(&mut self, event: &str) -> Result<Value> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if let Some(found) = self.events()?.into_iter().find(|it| it["event"] == event) {
                return Ok(found);
            }
            ensure!(Path::new(&format!("/proc/{}", self.pid)).exists(), "{} has ended", self.name);
            thread::sleep(Duration::from_millis(100));
        }
        bail!("{} did not say {event:?}", self.name)
    }

    /// The directory of its threads.
    pub(crate) fn tasks(&self) -> String {
        format!("/proc/{}/task", self.pid)
    }
}

/// Output of a command; an error if it fails.
fn output(command: &mut Command) -> Result<String> {
    let done = command.output().with_context(|| format!("{command:?}"))?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(Fail::new(Exit::Failure, format!("{command:?}: {}", said.trim())).into());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Who executes the guests' instructions, as `cofolio vm run` decides it.
pub(crate) fn accel() -> Accel {
    Accel::of_this_machine(Path::new("/"))
}

/// A number of `/proc/cpuinfo`: how many cycles a processor has in a second now.
pub(crate) fn cycles_per_second() -> Option<f64> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("cpu MHz"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).parse::<f64>().ok()? * 1e6)
}

/// Who executes the guests' instructions, in words for the head of a table.
pub(crate) fn executed_by(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "guests run on the processor (KVM)",
        Accel::Tcg => {
            "guests are emulated (TCG), which distorts figures of time and of processor time"
        }
    }
}

/// What follows the name of a figure that emulation distorts.
pub(crate) fn mark(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "",
        Accel::Tcg => " (emulated)",
    }
}
