use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use cofolio_node::container::{Containers, RunError};
use cofolio_node::mount::MountError;
use cofolio_node::profile::{self, Profile, ProfileError, Recorded, Subject};
use cofolio_store::{Digest, Domain};
use rustix::fs::{Access, access};
use rustix::io::Errno;
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::{Context, Named};
use crate::exit::{Exit, Fail};
use crate::ui::{human_size, plural, printable};

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
    ///
    /// Of files with the same content it names one. With --json each has its digest and ranges, too.
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
#[command(override_usage = "cofolio profile record [OPTIONS] <IMAGE> [-- <ARGS>...]\n       \
    cofolio profile record [OPTIONS] --container <NAME>")]
struct RecordArgs {
    /// Ref or first digits of a digest
    #[arg(required_unless_present = "container")]
    image: Option<String>,
    /// Record what this container of `cofolio run` reads from now on instead, for --seconds, until
    /// it ends, or until Ctrl-C. All containers lose the image's pages that no process maps, and read
    /// them again. If it can write and still runs at the end, the directories that it has written to
    /// since its start are recorded, too; --rw is not given then
    #[arg(long, value_name = "NAME", conflicts_with_all = ["image", "args"])]
    container: Option<String>,
    /// Make its root writable and record the directories that it writes to; its changes are removed
    #[arg(long, conflicts_with = "container")]
    rw: bool,
    /// End it after this many seconds, at most a day
    #[arg(long, short, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: Option<u32>,
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
            let paths = profile.paths(&domain)?;
            let paths = profile.files.iter().map(|file| {
                let path = paths.get(&file.object).map(|path| path.as_os_str().as_bytes());
                printable(path.unwrap_or_default())
            });
            if context.ui.json {
                let mut shown = serde_json::to_value(&profile)?;
                let files = shown["files"].as_array_mut().into_iter().flatten();
                files.zip(paths).for_each(|(file, path)| file["path"] = path.into());
                return context.ui.json(&shown);
            }
            for (file, path) in profile.files.iter().zip(paths) {
                let bytes: u64 = file.ranges.iter().map(|(_, length)| length).sum();
                context.ui.line(format!("{path}  {}", human_size(bytes)))?;
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
    let (files, bytes) = (profile.files.len() as u64, human_size(profile.bytes()));
    format!("{}, {bytes}, in the order of their first opens", plural(files, "file"))
}

fn record(args: &RecordArgs, context: &Context<'_>) -> Outcome {
    context.needs_root("recording what a container reads")?;
    let domain = context.domain()?;
    let store = &context.global.store;
    // Before a container is started and refused for its own reasons, or recorded for nothing.
    if access(store, Access::WRITE_OK) == Err(Errno::ROFS) {
        let what = format!("profiles are kept in the store: {} is read-only", store.display());
        return Err(Fail::new(Exit::Failure, what).into());
    }
    let subject = match (&args.container, &args.image) {
        (Some(name), _) => Subject::Running(name.clone()),
        (None, Some(image)) => {
            let image = context.image(&domain, image)?.digest;
            let name = format!("profile-{}", std::process::id());
            let mut start = context.cofolio();
            start.args(program(args, &name, &image));
            // What the container says does not mix with JSON.
            start.stdout(std::io::stderr());
            Subject::New { name, image, start: Box::new(start) }
        }
        (None, None) => return Err(Fail::usage("no image and no container").into()),
    };
    let containers = Containers::new(context.mounter(&domain)?);
    let time = args.seconds.map(|seconds| Duration::from_secs(seconds.into()));
    if time.is_none() {
        context.ui.note("recording until the container ends, or Ctrl-C");
    }
    let Recorded { profile, missed, has_ended } = context
        .work("recording", "file", |task| profile::record(&containers, subject, time, task))?;
    if has_ended {
        context.ui.note("the container has ended");
    }
    if missed.opens > 0 {
        let lost = plural(missed.opens, "event");
        context.ui.note(format!("{lost} of opened files lost: the profile may be incomplete"));
    }
    if missed.files > 0 {
        let files = plural(missed.files, "opened file");
        context.ui.note(format!(
            "{files} not in the profile: nothing of them is in memory, because nobody has read \
             them or their pages were dropped meanwhile"
        ));
    }
    context.ui.note(summary(&profile));
    if let Some(dirs) = &profile.written {
        let dirs = dirs.iter().map(|dir| printable(dir.as_os_str().as_bytes()));
        let dirs = dirs.collect::<Vec<_>>().join(", ");
        let dirs = if dirs.is_empty() { "no directory of the image" } else { &dirs };
        context.ui.note(format!("writes to {dirs}"));
    }
    if context.ui.json {
        let (files, bytes) = (profile.files.len(), profile.bytes());
        let mut said = json!({"image": profile.image, "files": files, "bytes": bytes});
        if let Some(dirs) = profile.written {
            said["written"] = json!(dirs);
        }
        context.ui.json(&said)?;
    }
    Ok(Exit::Ok)
}

/// The directories of the image that its recorded start wrote to.
pub(crate) fn recorded_dirs(domain: &Domain, image: &Named) -> anyhow::Result<Vec<PathBuf>> {
    let profile = Profile::read(domain, &image.digest).map_err(|error| match error {
        ProfileError::Missing(_) => {
            let what = format!("{} has no profile", image.shown());
            let hint = "`cofolio profile record --rw IMAGE` makes one";
            anyhow::Error::from(Fail::not_found(what).hint(hint))
        }
        error => error.into(),
    })?;
    let missing = || {
        let what = "the profile says nothing of writes: the recorded container could not write";
        Fail::not_found(what).hint("`cofolio profile record --rw IMAGE` records one that can")
    };
    Ok(profile.written.ok_or_else(missing)?)
}

/// The error of a mount with [`recorded_dirs`]: where the image has no such directory its profile
/// is damaged. That the root cannot be one of them is the caller's matter: --rw does it.
pub(crate) fn of_recorded_dirs(error: anyhow::Error, image: Digest) -> anyhow::Error {
    let mount = match error.downcast_ref() {
        Some(RunError::Mount(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    match mount {
        Some(MountError::WritableDir { dir, problem }) if dir.parent().is_some() => {
            let problem = format!("{}: {problem}", dir.display());
            ProfileError::Damaged { image, problem }.into()
        }
        _ => error,
    }
}

/// The ref stays, for its config and the trust policy. If it leads to another image by now, the
/// container is refused.
fn program(args: &RecordArgs, name: &str, image: &Digest) -> Vec<String> {
    let mut all = vec!["run"];
    all.extend(args.rw.then_some("--rw"));
    let (text, digest) = (args.image.as_deref().unwrap_or_default(), image.to_string());
    // What is read ahead would look as if the start had read it.
    all.extend(["--hold", "--warm", "never", "--name", name, "--digest", &digest, text, "--"]);
    all.into_iter().chain(args.args.iter().map(String::as_str)).map(str::to_owned).collect()
}
