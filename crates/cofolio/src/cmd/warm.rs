use std::io::{self, PipeWriter, Read as _, Write as _};
use std::process::{Command, Output, Stdio};

use anyhow::Context as _;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use cofolio_cli::interrupt;
use cofolio_node::cgroup::COMMONS;
use cofolio_node::commons::Commons;
use cofolio_node::config::{Warm, commons_limit};
use cofolio_node::profile::Profile;
use cofolio_node::size::Size;
use cofolio_store::task::{Cancel, Cancelled};
use cofolio_store::{Digest, Domain};
use cofolio_sys::process::{Fork, fork};

use crate::cmd::Outcome;
use crate::context::{Context, Named};
use crate::exit::Exit;
use crate::ui::human_size;

/// Read an image ahead, charged to no container
///
/// The kernel charges a page of a file to the cgroup that brings it in, and to no other while it stays. So the first
/// container of an image pays for what all of them read. This command reads the image's metadata and files into the
/// page cache from inside a cgroup of its own, `cofolio-commons`: containers that read them then are charged for none
/// of it. Each mount caches directories for itself, so those of an image that is not mounted are not read ahead. What
/// was resident before stays charged as it was. Under memory pressure the kernel drops these pages like any others. With
/// `[commons] warm` in the configuration `mount`, `bundle` and `run` do this for their image. It looks at each file
/// also when all are resident: some tens of milliseconds for an image of 3,200 files.
///
/// Once the commons reach their limit, images that are not used give way. Where other images are in
/// use, this command stops, leaves the rest to containers and says that there was no room. Each
/// call then still tries a 64th of the limit, so an image that was in use gives way after a few
/// dozen further calls.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio warm redis:7.0.15\n  \
    cofolio warm --profile redis:7.0.15\n  \
    cofolio warm --limit \"2 GiB\" redis:7.0.15")]
pub(crate) struct Args {
    /// Refs or first digits of digests
    #[arg(required = true)]
    images: Vec<String>,
    /// Read only what the image's profile names, in its order (`cofolio profile record` makes one)
    #[arg(long)]
    profile: bool,
    /// Limit of the commons, at least 16 MiB: they are one cgroup of the machine, for all images of
    /// all stores. It stays until another is given, or `none` [default: that of `[commons] limit`]
    #[arg(long, value_name = "SIZE", value_parser = limit)]
    limit: Option<Size>,
}

fn limit(text: &str) -> Result<Size, String> {
    match text {
        // The kernel takes more than it has for no limit.
        "none" => Ok(Size(u64::MAX)),
        _ => commons_limit(text),
    }
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("reading ahead")?;
    let domain = context.domain()?;
    let images = args.images.iter().map(|image| context.image(&domain, image));
    let images = images.collect::<anyhow::Result<Vec<_>>>()?;
    let limit = args.limit.or(context.config.config.commons.limit);
    let commons = Commons::open(COMMONS, limit.map(|limit| limit.0))?;
    let watcher = watch(&commons, context)?;
    let done = warm(args, &domain, &commons, images, context);
    if let Some(mut watcher) = watcher {
        let _ = watcher.write_all(b".");
    }
    done
}

/// The kernel kills a process under too small a limit without a word. A process outside of the
/// commons waits for this one's end and says so; a byte tells it that this one was not killed.
fn watch(commons: &Commons, context: &Context<'_>) -> anyhow::Result<Option<PipeWriter>> {
    let Some(limit) = commons.limit_bytes()? else { return Ok(None) };
    let before = commons.oom_kills()?;
    let (mut ended, writer) = io::pipe()?;
    if let Fork::Parent(_) = fork().context("starting a process that watches this one")? {
        return Ok(Some(writer));
    }
    drop(writer);
    let is_killed = ended.read(&mut [0]).is_ok_and(|bytes| bytes == 0);
    if is_killed && commons.oom_kills().is_ok_and(|kills| kills > before) {
        let limit = human_size(limit);
        context.ui.error(
            &format!("the commons' limit of {limit} is too small for the process that reads ahead"),
            Some("the kernel has killed it; `cofolio warm --limit SIZE` sets another limit"),
        );
    }
    std::process::exit(0)
}

fn warm(
    args: &Args,
    domain: &Domain,
    commons: &Commons,
    images: Vec<Named>,
    context: &Context<'_>,
) -> Outcome {
    let run = context.run_dir_of(domain.store())?;
    let mut all = Vec::new();
    for image in images {
        let profile = args.profile.then(|| Profile::read(domain, &image.digest)).transpose()?;
        let warmed = context.work("reading ahead", "file", |task| {
            commons.warm(domain, &run, &image.digest, profile.as_ref(), task)
        })?;
        if !context.ui.json {
            let stopped = warmed.stopped_at_limit_bytes.map_or_else(String::new, |limit| {
                format!(
                    "; there was no room for more under the commons' limit of {}",
                    human_size(limit)
                )
            });
            context.ui.note(format!(
                "{}: {} of {} resident, {} of it before; the commons are charged for {}{stopped}",
                image.shown(),
                human_size(warmed.resident_bytes),
                human_size(warmed.bytes),
                human_size(warmed.resident_before_bytes),
                human_size(warmed.commons_bytes),
            ));
        }
        all.push(warmed);
    }
    if context.ui.json {
        context.ui.json(&all)?;
    }
    Ok(Exit::Ok)
}

/// What a command that mounts an image reads ahead.
#[derive(Debug, clap::Args)]
pub(crate) struct WarmArgs {
    /// Read ahead, charged to no container: all files of the image, or what its profile names, if it has one [default:
    /// what `[commons] warm` says]
    #[arg(long, value_name = "WHAT", value_parser = what())]
    warm: Option<Warm>,
}

fn what() -> impl clap::builder::TypedValueParser<Value = Warm> {
    PossibleValuesParser::new(["never", "profile", "all"]).map(|word| match word.as_str() {
        "profile" => Warm::Profile,
        "all" => Warm::All,
        _ => Warm::Never,
    })
}

impl WarmArgs {
    /// Reads a mounted image ahead in a process of its own, because a whole process is in the commons
    /// meanwhile. The image can be used without, so a failure is a note. Fails only if a signal has
    /// cancelled the caller's work, which the caller then undoes.
    pub(crate) fn warm(
        &self,
        domain: &Domain,
        image: &Digest,
        context: &Context<'_>,
    ) -> Result<(), Cancelled> {
        let cancel = interrupt::cancel();
        let mut helper = context.cofolio();
        helper.args(["--quiet", "warm", &image.to_string()]);
        match self.warm.unwrap_or(context.config.config.commons.warm) {
            Warm::Never => return cancel.check(),
            Warm::All => {}
            Warm::Profile if matches!(domain.profile(image), Ok(None)) => return cancel.check(),
            Warm::Profile => _ = helper.arg("--profile"),
        }
        let why = match output(&mut helper, &cancel) {
            Ok(done) if done.status.success() => None,
            Ok(done) => Some(reason(&done)),
            Err(error) => Some(error.to_string()),
        };
        // A signal of a terminal has ended the helper as well.
        cancel.check()?;
        if let Some(why) = why {
            context.ui.note(format!("the image is not read ahead: {why}"));
        }
        Ok(())
    }
}

/// How a process ended, and the little that it said. It is killed when the work is cancelled.
fn output(command: &mut Command, cancel: &Cancel) -> io::Result<Output> {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    if cancel.wait_for(|| anyhow::Ok(child.try_wait()?)).is_err() {
        let _ = child.kill();
    }
    child.wait_with_output()
}

/// Why the process that reads ahead has failed. One that was killed says nothing.
fn reason(done: &Output) -> String {
    match String::from_utf8_lossy(&done.stderr).trim() {
        "" => format!("its process ended with {}", done.status),
        said => said.strip_prefix("cofolio: ").unwrap_or(said).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The kernel killed the process that read ahead, and the note ended with a colon.
    #[test]
    fn a_process_that_says_nothing_has_a_reason() {
        let of = |script| reason(&Command::new("sh").args(["-c", script]).output().unwrap());
        assert!(of("kill -9 $$").contains("signal: 9"));
        assert!(of("exit 3").contains("exit status: 3"));
        assert_eq!(of("echo cofolio: why >&2; exit 3"), "why");
    }
}
