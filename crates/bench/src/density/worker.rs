//! The process of a container: it enters the container's cgroup, touches a profile, and stays.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, PipeReader, PipeWriter, Read as _, Write as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cofolio_node::cgroup::Cgroup;
use cofolio_sys::cache::FileMap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What a worker says when it has touched its profile.
const READY: &[u8] = b"ready\n";

/// `cofolio-bench density-worker`: not for people, so `--help` does not show it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// File to write 0 to, to enter the cgroup
    procs: PathBuf,
    /// Root of the container
    root: PathBuf,
    /// List of paths below the root, each ended by a NUL
    profile: PathBuf,
    /// Another such list, of files to stat
    #[arg(long)]
    stat: Option<PathBuf>,
    /// A file below the root to write
    #[arg(long)]
    write: Option<PathBuf>,
    /// Read nothing, but open the next file of the profile every so many milliseconds
    #[arg(long)]
    open_every: Option<u64>,
}

/// What a container does besides reading its profile, as one that has a log does it.
#[derive(Debug, Clone)]
pub(crate) struct Log {
    /// List of the files that it stats.
    pub(crate) stat: PathBuf,
    /// The file that it writes, below its root. Where it cannot write, `/dev/null`: each process is to
    /// have the same pages, because one page table more is more than a read-only container may take.
    pub(crate) write: PathBuf,
}

/// Bytes that it writes.
const LOG_BYTES: usize = 4096;

/// Touches the profile and waits until standard input ends.
pub(crate) fn run(args: &Args) -> Result<()> {
    let enter = || format!("cannot enter the cgroup by {}", args.procs.display());
    fs::write(&args.procs, "0").with_context(enter)?;
    if let Some(interval_ms) = args.open_every {
        return open_in_turn(args, interval_ms);
    }
    let mut buf = vec![0; 64 << 10];
    let mut mapped = None;
    each(&args.root, &args.profile, &mut |file| touch(file, &mut buf, &mut mapped))?;
    drop(buf);
    if let Some(list) = &args.stat {
        each(&args.root, list, &mut |file| fs::symlink_metadata(file).map(drop))?;
    }
    if let Some(path) = &args.write {
        let log = args.root.join(path);
        fs::write(&log, [b'x'; LOG_BYTES])
            .with_context(|| format!("cannot write {}", log.display()))?;
    }
    say_ready()?;
    // It ends when the parent closes the pipe or dies.
    io::stdin().read_to_end(&mut Vec::new())?;
    drop(mapped);
    Ok(())
}

fn say_ready() -> io::Result<()> {
    io::stdout().write_all(READY)?;
    io::stdout().flush()
}

/// Opens the files of the profile one after the other, again and again, until standard input ends.
fn open_in_turn(args: &Args, interval_ms: u64) -> Result<()> {
    let files = files(&args.root, &args.profile)?;
    say_ready()?;
    let interval = Timespec::try_from(Duration::from_millis(interval_ms))?;
    let stdin = io::stdin();
    for file in files.iter().cycle() {
        let mut ends = [PollFd::new(&stdin, PollFlags::IN)];
        if poll(&mut ends, Some(&interval))? > 0 {
            break;
        }
        File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    }
    Ok(())
}

/// The files of a list.
pub(crate) fn files(root: &Path, list: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    each(root, list, &mut |file| {
        files.push(file.to_owned());
        Ok(())
    })?;
    Ok(files)
}

/// Visits the files of a list.
fn each(root: &Path, list: &Path, visit: &mut dyn FnMut(&Path) -> io::Result<()>) -> Result<()> {
    let mut list = BufReader::new(File::open(list)?);
    let mut path = Vec::new();
    while list.read_until(0, &mut path)? > 0 {
        path.pop();
        let file = root.join(OsStr::from_bytes(&path));
        visit(&file).with_context(|| format!("cannot read {}", file.display()))?;
        path.clear();
    }
    Ok(())
}

/// Stats a file, reads it, and maps the first one that is not empty.
fn touch(path: &Path, buf: &mut [u8], mapped: &mut Option<FileMap>) -> io::Result<()> {
    let size = fs::symlink_metadata(path)?.len();
    let mut file = File::open(path)?;
    while file.read(buf)? > 0 {}
    if mapped.is_none() && size > 0 {
        let map = FileMap::new(&file, size)?;
        let mut at = 0;
        while at < size {
            at += map.read_at(at, buf).max(1) as u64;
        }
        *mapped = Some(map);
    }
    Ok(())
}

/// Workers that stay until this value is dropped.
pub(crate) struct Workers {
    /// All of them have the same pipe as standard input: a pipe each would need a descriptor each here.
    wait: PipeReader,
    hold: Option<PipeWriter>,
    children: Vec<Child>,
    /// Instead of touching its profile a worker opens a file of it at this interval.
    open_interval: Option<Duration>,
}

impl Workers {
    pub(crate) fn new() -> io::Result<Self> {
        let (wait, hold) = io::pipe()?;
        Ok(Self { wait, hold: Some(hold), children: Vec::new(), open_interval: None })
    }

    /// Workers that only open the files of their profile, one each at this interval.
    pub(crate) fn opening(interval: Duration) -> io::Result<Self> {
        let mut workers = Self::new()?;
        workers.open_interval = Some(interval);
        Ok(workers)
    }

    /// Starts a worker, and returns when it has touched its profile, and stat and written what the log
    /// says; without one it does neither.
    pub(crate) fn start(
        &mut self,
        cgroup: &Cgroup,
        root: &Path,
        profile: &Path,
        log: Option<&Log>,
    ) -> Result<()> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("density-worker").args([&cgroup.procs(), root, profile]);
        if let Some(log) = log {
            command.arg("--stat").arg(&log.stat).arg("--write").arg(&log.write);
        }
        if let Some(interval) = self.open_interval {
            command.arg("--open-every").arg(interval.as_millis().to_string());
        }
        let mut child = command
            .stdin(self.wait.try_clone()?)
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a worker")?;
        let stdout = child.stdout.take();
        self.children.push(child);
        let mut said = [0; READY.len()];
        let heard = stdout.context("a worker has no standard output")?.read_exact(&mut said);
        ensure!(heard.is_ok() && said == READY, "the worker in {} failed", root.display());
        Ok(())
    }

    /// How many of them still run.
    pub(crate) fn alive(&mut self) -> io::Result<usize> {
        let mut children = self.children.iter_mut();
        children.try_fold(0, |count, it| Ok(count + usize::from(it.try_wait()?.is_none())))
    }

    /// Ends all workers.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        self.hold = None;
        self.children.drain(..).try_for_each(|mut child| child.wait().map(drop))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
