use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Subcommand;
use cofolio_node::container::Containers;
use cofolio_node::mount::{MountPhase, Mounter};
use cofolio_node::profile::{Profile, Recorder, written_dirs};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};
use crate::ui::{human_size, printable};

/// Record which parts of an image a start reads, and where it writes
///
/// A profile lists what is read in the order in which the files are first opened. `cofolio warm
/// --profile` reads that ahead. `mount` and `run` with --writable-recorded make the directories
/// writable that a start with --rw wrote to. A profile goes with its image.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio profile record --seconds 10 redis:7.0.15\n  \
    cofolio warm --profile redis:7.0.15")]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start a container and record what it reads until it ends, in place of the profile before
    ///
    /// The image's files are dropped from the page cache first, as far as no process maps them:
    /// other containers read them again. The profile has all pages of the opened files that are
    /// resident at the end: also what the kernel read ahead, and what others mapped. Ctrl-C ends
    /// the container and keeps what it read; if this command is killed the container ends, too. The
    /// container has no network, and is read-only unless --rw, as with `cofolio run`.
    #[command(after_help = "Example:\n  cofolio profile record --seconds 10 redis:7.0.15\n  \
        cofolio profile record --rw --seconds 60 redis:7.0.15\n  \
        cofolio profile record redis:7.0.15 -- redis-server --version")]
    Record(RecordArgs),
    /// Say what the profile of an image has
    #[command(after_help = "Example:\n  cofolio profile show redis:7.0.15")]
    Show {
        /// Ref or first digits of a digest
        image: String,
    },
    /// Remove the profile of an image
    #[command(after_help = "Example:\n  cofolio profile rm redis:7.0.15")]
    Rm {
        /// Ref or first digits of a digest
        image: String,
    },
}

#[derive(Debug, clap::Args)]
struct RecordArgs {
    /// Ref or first digits of a digest
    #[arg(required_unless_present = "container")]
    image: Option<String>,
    /// Record what this container of `cofolio run` reads from now on instead, for so many seconds
    /// or until Ctrl-C. All containers lose the image's pages that no process maps, and read them
    /// again
    #[arg(long, value_name = "NAME", conflicts_with_all = ["image", "args"])]
    container: Option<String>,
    /// Make its root writable and record the directories that it writes to; its changes are removed. Of a --container
    /// these are recorded since its start, if it can write and still runs at the end
    #[arg(long, conflicts_with = "container")]
    rw: bool,
    /// End it after so many seconds
    #[arg(long, short)]
    seconds: Option<u64>,
    /// The container's program and its arguments instead of the image's
    #[arg(last = true)]
    args: Vec<String>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    match &args.action {
        Action::Record(args) => record(args, context),
        Action::Show { image } => {
            let image = context.image(&domain, image)?;
            let profile = Profile::read(&domain, &image.digest)?;
            if context.ui.json {
                return context.ui.json(&profile);
            }
            for file in &profile.files {
                let bytes: u64 = file.ranges.iter().map(|(_, length)| length).sum();
                context.ui.line(format!("{}  {}", file.object, human_size(bytes)))?;
            }
            for dir in profile.written.iter().flatten() {
                context.ui.line(format!("writes to {}", printable(dir.as_os_str().as_bytes())))?;
            }
            context.ui.note(summary(&profile));
            Ok(Exit::Ok)
        }
        Action::Rm { image } => {
            let image = context.image(&domain, image)?;
            match domain.remove_profile(&image.digest)? {
                true => Ok(Exit::Ok),
                false => Err(Fail::not_found(format!("{} has no profile", image.shown())).into()),
            }
        }
    }
}

fn summary(profile: &Profile) -> String {
    let (files, bytes) = (profile.files.len(), human_size(profile.bytes()));
    format!("{files} files, {bytes}, in the order of their first opens")
}

fn record(args: &RecordArgs, context: &Context<'_>) -> Outcome {
    context.needs_root()?;
    let domain = context.domain()?;
    let mounter = context.mounter(&domain);
    let run = context.run_dir_of(domain.store());
    let own_name = format!("profile-{}", std::process::id());
    let (name, image) = match (&args.container, &args.image) {
        (Some(name), _) => {
            let containers = Containers::new(context.mounter(&domain));
            let all = containers.list(&mut Vec::new())?;
            let found = all.into_iter().find(|it| it.record.name == *name && it.pid.is_some());
            let missing = || Fail::not_found(format!("no container {name} is running"));
            (name.clone(), found.ok_or_else(missing)?.record.image)
        }
        (None, Some(image)) => (own_name, context.image(&domain, image)?.digest),
        (None, None) => return Err(Fail::usage("no image and no container").into()),
    };
    let recorded = context.work("recording", "file", |task| -> anyhow::Result<_> {
        let mut child = match args.container {
            None => {
                let mut child = context.cofolio();
                child.args(program(args, &name, &image));
                // What the container says does not mix with JSON.
                Some(child.stdin(Stdio::piped()).stdout(std::io::stderr()).spawn()?)
            }
            Some(_) => None,
        };
        let mut recorder = None;
        let noted = (|| -> anyhow::Result<()> {
            if let Some(child) = &mut child {
                wait_for_mount(child, &mounter, &name, task)?;
            }
            // Its superblock is there, and it has opened no file.
            let recorder = recorder.insert(Recorder::begin(&domain, run, image, &name)?);
            // It stays open: when this process is killed, the container ends with it.
            if let Some(go) = child.as_mut().and_then(|child| child.stdin.as_mut()) {
                // It may have ended: then there is something to say about that.
                let _ = go.write_all(b"\n");
            }
            note(recorder, child.as_mut(), Instant::now(), args.seconds, task)
        })();
        if let Some(mut child) = child {
            end(&mut child, &name, task.check().is_err(), context, recorder.as_mut())?;
        }
        noted?;
        Ok(recorder.context("nothing was recorded")?.end()?)
    });
    // Also after an error: its changes go.
    let written = written(&mounter, &name, args);
    let (mut profile, lost) = recorded?;
    profile.written = written?;
    if profile.files.is_empty() {
        let what = "no file of the image was opened, so there is no profile";
        return Err(Fail::new(Exit::Failure, what).into());
    }
    profile.write(&domain)?;
    if lost > 0 {
        context.ui.note(format!("{lost} times the queue of opens was full: files may be missing"));
    }
    context.ui.note(summary(&profile));
    if context.ui.json {
        context.ui.json(
            &json!({"image": image, "files": profile.files.len(), "bytes": profile.bytes()}),
        )?;
    }
    Ok(Exit::Ok)
}

/// Waits until the root filesystem of a container of our own is mounted.
fn wait_for_mount(
    child: &mut Child,
    mounter: &Mounter<'_>,
    name: &str,
    task: &Task,
) -> anyhow::Result<()> {
    let rootfs = mounter.run_dir().path().join("containers").join(name).join("rootfs");
    // Its end is told by `end`.
    while child.try_wait()?.is_none() && task.check().is_ok() {
        if let Ok(found) = mounter.run_dir().find(&rootfs)
            && found.phase == MountPhase::Mounted
        {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// The directories that a container has written to, if it could write. The kept changes of our own are removed.
fn written(
    mounter: &Mounter<'_>,
    name: &str,
    args: &RecordArgs,
) -> anyhow::Result<Option<Vec<PathBuf>>> {
    let rootfs = Path::new("containers").join(name).join("rootfs");
    if args.container.is_some() {
        // It may have ended meanwhile, and its changes with it. Those on a loop device are out of reach.
        let found = mounter.run_dir().find(&mounter.run_dir().path().join(rootfs)).ok();
        let upper = found.and_then(|found| Some(found.upper?.dir.join("upper")));
        let upper = upper.filter(|upper| upper.exists());
        return Ok(upper.map(|upper| written_dirs(&upper)).transpose()?);
    }
    if !args.rw {
        return Ok(None);
    }
    let mut dirs = None;
    for (_, kept) in mounter.kept()?.into_iter().filter(|(_, kept)| kept.target.ends_with(&rootfs))
    {
        dirs = Some(written_dirs(&kept.dir.join("upper"))?);
        mounter.discard_kept(&kept.dir)?;
    }
    Ok(dirs)
}

/// The directories of the image that its recorded start wrote to.
pub(crate) fn recorded_dirs(domain: &Domain, image: &Digest) -> anyhow::Result<Vec<PathBuf>> {
    let written = Profile::read(domain, image)?.written;
    let missing = || {
        let what = "the profile says nothing of writes: the recorded container could not write";
        Fail::not_found(what).hint("`cofolio profile record --rw IMAGE` records one that can")
    };
    Ok(written.ok_or_else(missing)?)
}

/// The ref stays, for its config and the trust policy. If it leads to another image by now, the
/// container is refused.
fn program(args: &RecordArgs, name: &str, image: &Digest) -> Vec<String> {
    let mut all = match args.rw {
        // Where the changes are is of no interest: they are removed.
        true => vec!["--quiet", "run", "--rw", "--keep"],
        false => vec!["run"],
    };
    let (text, digest) = (args.image.as_deref().unwrap_or_default(), image.to_string());
    // What is read ahead would look as if the start had read it.
    all.extend(["--hold", "--warm", "never", "--name", name, "--digest", &digest, text, "--"]);
    all.into_iter().chain(args.args.iter().map(String::as_str)).map(str::to_owned).collect()
}

/// Takes note of opens until the container has ended, the time is up, or Ctrl-C.
fn note(
    recorder: &mut Recorder<'_>,
    mut child: Option<&mut Child>,
    started: Instant,
    seconds: Option<u64>,
    task: &Task,
) -> anyhow::Result<()> {
    let patience = Timespec::try_from(Duration::from_millis(50))?;
    loop {
        if let Some(opens) = recorder.opens() {
            let _ = poll(&mut [PollFd::from_borrowed_fd(opens, PollFlags::IN)], Some(&patience));
        }
        recorder.take()?;
        let has_ended = match &mut child {
            Some(child) => child.try_wait()?.is_some(),
            None => false,
        };
        let is_late = seconds.is_some_and(|seconds| started.elapsed().as_secs() >= seconds);
        if has_ended || is_late || task.check().is_err() {
            return Ok(());
        }
    }
}

/// Ends the container if it has not ended by itself. One that failed leaves the profile before in
/// place. Ctrl-C at a terminal ends the container, too: then it has not failed.
fn end(
    child: &mut Child,
    name: &str,
    is_interrupted: bool,
    context: &Context<'_>,
    mut recorder: Option<&mut Recorder<'_>>,
) -> anyhow::Result<()> {
    if let Some(status) = child.try_wait()? {
        return match status.success() || is_interrupted {
            true => Ok(()),
            false => bail!("the container failed ({status}), so there is no new profile"),
        };
    }
    // It may be too early to be stopped.
    while child.try_wait().context("waiting for the container")?.is_none() {
        let mut stop = context.cofolio();
        stop.args(["--quiet", "stop", name])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        // An open that nobody takes note of keeps the mount busy.
        if let Some(recorder) = &mut recorder {
            recorder.take()?;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
