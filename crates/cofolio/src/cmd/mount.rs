use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cofolio_cli::interrupt::Cancellable;
use cofolio_image::trust::Need;
use cofolio_node::mount::{Access, MountOptions, MountRequest, UmountOptions};

use crate::cmd::Outcome;
use crate::cmd::profile::{of_recorded_dirs, recorded_dirs};
use crate::cmd::warm::WarmArgs;
use crate::context::{Context, short};
use crate::exit::{Exit, Fail};
use crate::trust::TrustArgs;

/// Mount an image at a directory
///
/// Read-only unless --rw: read-only mounts of one image are clones of one mount and cost next to nothing.
/// With --writable only some directories can be written to, which costs the kernel an overlay's inodes for these alone.
/// All mounts of the domain share the page cache of files with the same content.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("changes").args(["rw", "writable", "writable_recorded"]))]
#[command(after_help = "Example:\n  cofolio mount redis:7.0.15 /mnt/redis\n  \
    cofolio mount --rw --create redis:7.0.15 /run/box/rootfs\n  \
    cofolio mount --writable /data redis:7.0.15 /mnt/redis\n  \
    cofolio mount --writable-recorded redis:7.0.15 /mnt/redis\n  \
    cofolio mount --idmap 0:100000:65536 redis:7.0.15 /mnt/redis\n  \
    cofolio mount --require-verity --digest 5f70bf18… /mnt/redis")]
pub(crate) struct Args {
    /// Ref or first digits of a digest; may be left out with --digest
    #[arg(value_name = "IMAGE")]
    first: OsString,
    /// Directory to mount at
    #[arg(value_name = "TARGET", required_unless_present = "digest")]
    second: Option<OsString>,
    /// Make it writable; changes go to a directory of the store's and are gone after umount
    #[arg(long)]
    rw: bool,
    /// Make only this directory of the image writable, by its absolute path; may be given several times. Writes
    /// elsewhere fail: read-only file system (EROFS). All mounts of the image share the rest, and locks and watches
    /// of its files
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// Make only the directories writable that the recorded start wrote to (`cofolio profile record --rw`); read-only if
    /// it wrote to none
    #[arg(long)]
    writable_recorded: bool,
    /// With --rw or --writable: leave the changes in place after umount, which says where; --upper takes them up again
    #[arg(long, requires = "changes")]
    keep: bool,
    /// With --rw or --writable: keep changes in this directory (its `upper` and `work`), which stays after
    /// umount. It is of no use without the image, which `cofolio gc` keeps only while something else needs it
    #[arg(long, value_name = "DIR", requires = "changes", conflicts_with = "keep")]
    upper: Option<PathBuf>,
    /// Hash the image and all its files before mounting
    #[arg(long, conflicts_with = "require_verity")]
    verify: bool,
    /// Id map: INSIDE:OUTSIDE:COUNT, several with commas; u: or g: before one for users or groups only
    #[arg(long, value_name = "MAP")]
    idmap: Option<String>,
    /// Security label of all files, for SELinux
    #[arg(long, value_name = "LABEL")]
    context: Option<String>,
    /// Make the target directory if it is missing; it goes with the mount
    #[arg(long)]
    create: bool,
    /// Ignore set-user-id and set-group-id bits
    #[arg(long)]
    nosuid: bool,
    /// Do not open device files
    #[arg(long)]
    nodev: bool,
    /// Execute nothing
    #[arg(long)]
    noexec: bool,
    #[command(flatten)]
    warm: WarmArgs,
    #[command(flatten)]
    trust: TrustArgs,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("mounting")?;
    let domain = context.domain()?;
    // Options may stand between the two, so the parser cannot tell which one is missing.
    let (name, target) = match &args.second {
        Some(target) => (Some(args.first.to_str().context("IMAGE is not UTF-8")?), target),
        None => (None, &args.first),
    };
    let image = args.trust.image(name, &domain, context)?;
    let check = args.trust.check(&image, Need::Files, name, args.verify, &domain, context)?;
    let writable_dirs = match args.writable_recorded {
        true => recorded_dirs(&domain, &image)?,
        false => args.writable.clone(),
    };
    let keeps = args.keep || args.upper.is_some();
    if args.writable_recorded && writable_dirs.is_empty() && keeps {
        let option = if args.keep { "--keep" } else { "--upper" };
        let what = format!("{option} needs a writable directory: the recorded start wrote to none");
        return Err(Fail::new(Exit::Failure, what).into());
    }
    let access = match (&args.upper, args.rw || !writable_dirs.is_empty(), args.keep) {
        (_, false, _) => Access::ReadOnly,
        (Some(dir), true, _) => Access::WritableAt(dir.clone()),
        (None, true, true) => Access::WritableKept,
        (None, true, false) => Access::Writable,
    };
    let request = MountRequest {
        create_target: args.create,
        access,
        writable_dirs,
        check,
        options: MountOptions {
            idmap: args.idmap.as_deref().map(str::parse).transpose()?,
            label: args.context.clone(),
            nosuid: args.nosuid,
            nodev: args.nodev,
            noexec: args.noexec,
            name: image.ref_name.clone(),
        },
        ..MountRequest::new(image.digest, Path::new(target))
    };
    let signals = Cancellable::begin()?;
    let mounter = context.mounter(&domain)?;
    let mounted = context.work("verifying", "file", |task| mounter.with_task(task).mount(&request));
    let record = mounted.map_err(|error| match args.writable_recorded {
        true => of_recorded_dirs(error, image.digest),
        false => error,
    })?;
    if let Err(cancelled) = args.warm.warm(&domain, &image.digest, context) {
        let _undoing = domain.store().waiting().undo();
        context.mounter(&domain)?.umount(Path::new(&record.id), &UmountOptions::default())?;
        return Err(cancelled.into());
    }
    drop(signals);
    if context.ui.json {
        return context.ui.json(&record);
    }
    let mode = match &record.upper {
        None => "read-only",
        Some(upper) if upper.dirs.is_empty() => "writable",
        Some(_) => "writable in part",
    };
    let target = record.target.display();
    let (name, digest) = (image.shown(), short(&image.digest));
    context.ui.note(format!("{name} ({digest}) at {target}, {mode}"));
    Ok(Exit::Ok)
}
