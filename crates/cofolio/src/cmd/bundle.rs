use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cofolio_cli::interrupt::Cancellable;
use cofolio_image::trust::Need;
use cofolio_node::container::bundle::{self, Bundle, ImageConfig};
use cofolio_node::links;
use cofolio_node::mount::{Access, MountOptions, MountRequest, UmountOptions};
use cofolio_store::task::Task;
use serde_json::{Value, json};

use crate::cmd::Outcome;
use crate::cmd::warm::WarmArgs;
use crate::context::{Context, Named};
use crate::exit::{Exit, Fail};
use crate::trust::TrustArgs;

/// Make an OCI runtime bundle of an image, for `runc run` and `crun run`
///
/// Mounts the image at DIR/rootfs (writable; umount discards the changes) and writes DIR/config.json from the
/// image's config: command, environment, user and groups by the image's own /etc/passwd and /etc/group, working
/// directory, the capabilities and mounts that containerd gives a container, and Docker's default seccomp profile.
/// Only root may be able to write to DIR. `cofolio umount DIR/rootfs` unmounts it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio bundle redis:7.0.15 /run/redis && \
    runc run --bundle /run/redis redis\n  \
    cofolio bundle --read-only redis:7.0.15 /run/redis -- redis-server --version\n  \
    cofolio umount /run/redis/rootfs")]
pub(crate) struct Args {
    /// Ref or first digits of a digest
    image: String,
    /// Directory of the bundle, created if missing
    dir: PathBuf,
    /// Arguments in place of the image's own; its entry point stays
    #[arg(last = true)]
    args: Vec<String>,
    /// Use this root filesystem instead of mounting the image
    #[arg(long, value_name = "DIR", conflicts_with_all = ["read_only", "verify", "require_verity"])]
    rootfs: Option<PathBuf>,
    /// Mount read-only; /tmp, /var/tmp and /run become tmpfs, volumes directories below DIR/volumes
    #[arg(long)]
    read_only: bool,
    /// Hash the image and all its files before mounting
    #[arg(long, conflicts_with = "require_verity")]
    verify: bool,
    #[command(flatten)]
    process: ProcessArgs,
    /// Host name inside (default: the name of DIR)
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,
    /// Overwrite DIR/config.json
    #[arg(long)]
    replace: bool,
    /// Give the process a terminal
    #[arg(long, short)]
    tty: bool,
    /// Use the host's network instead of none
    #[arg(long)]
    host_network: bool,
    #[command(flatten)]
    warm: WarmArgs,
    #[command(flatten)]
    trust: TrustArgs,
}

/// What a process of an image is started with, for `run` and `bundle`.
#[derive(Debug, clap::Args)]
pub(crate) struct ProcessArgs {
    /// Program in place of the image's entry point; empty for none
    #[arg(long, value_name = "PROGRAM")]
    entrypoint: Option<String>,
    #[command(flatten)]
    setting: SettingArgs,
}

/// Environment, user and working directory of a process, where they differ from the image's.
#[derive(Debug, clap::Args)]
pub(crate) struct SettingArgs {
    /// Set or add to the environment; NAME alone takes the caller's value
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// User to run as, by name or number
    #[arg(long, short, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Working directory
    #[arg(long, short, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
}

impl ProcessArgs {
    /// The options of a bundle of `image` whose arguments are `args`.
    pub(crate) fn options(
        &self,
        args: &[String],
        image: &Named,
    ) -> anyhow::Result<bundle::Options> {
        let mut annotations = BTreeMap::new();
        annotations.insert("io.github.cofolio.image".to_owned(), image.digest.to_string());
        if let Some(name) = &image.ref_name {
            annotations.insert("io.github.cofolio.ref".to_owned(), name.clone());
        }
        Ok(bundle::Options {
            args: args.to_vec(),
            entrypoint: self.entrypoint.as_ref().map(|program| match program.as_str() {
                "" => Vec::new(),
                program => vec![program.to_owned()],
            }),
            env: self.setting.environment()?,
            user: self.setting.user.clone(),
            working_dir: self.setting.workdir.clone(),
            annotations,
            ..bundle::Options::default()
        })
    }
}

impl SettingArgs {
    /// The environment.
    pub(crate) fn environment(&self) -> anyhow::Result<Vec<String>> {
        let mut env = Vec::with_capacity(self.env.len());
        for entry in &self.env {
            match entry.split_once('=') {
                Some(("", _)) => return Err(Fail::usage(format!("--env {entry}: no name")).into()),
                Some(_) => env.push(entry.clone()),
                // As Docker does it: a name without a value here is not set there.
                None => {
                    env.extend(std::env::var(entry).ok().map(|value| format!("{entry}={value}")));
                }
            }
        }
        Ok(env)
    }
}

/// The config of an image. An imported directory has none: the caller says what to run.
pub(crate) fn image_config(image: &Named) -> anyhow::Result<ImageConfig> {
    let config = image.record.as_ref().and_then(|record| record.config.as_deref());
    Ok(config.map(ImageConfig::parse).transpose()?.unwrap_or_default())
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    if args.rootfs.is_none() {
        context.needs_root("mounting")?;
    }
    let domain = context.domain()?;
    let image = args.trust.image(Some(&args.image), &domain, context)?;
    let config = image.record.as_ref().and_then(|record| record.config.as_deref());
    let need = Need::Run(config);
    let check = args.trust.check(&image, need, Some(&args.image), args.verify, &domain, context)?;
    let config = image_config(&image)?;
    let options = bundle::Options {
        hostname: args.hostname.clone(),
        terminal: args.tty,
        host_network: args.host_network,
        readonly: args.read_only,
        ..args.process.options(&args.args, &image)?
    };
    // The usual mistake, before anything is made or mounted.
    bundle::command(&config, &options)?;

    let dir = links::resolve(&args.dir)?;
    let made = !dir.exists();
    // Nobody else reaches the image's device nodes and the container's environment.
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    created.with_context(|| format!("creating {}", args.dir.display()))?;
    let is_open = dir.metadata().is_ok_and(|found| found.mode() & 0o011 != 0);
    let bundle = Bundle::open(&dir, args.replace)?;
    let write = || bundle.write(args.rootfs.as_deref(), &config, &options, Path::new("/"));
    let mount_and_write = || -> anyhow::Result<Value> {
        let _signals = Cancellable::begin()?;
        let request = MountRequest {
            create_target: true,
            access: if args.read_only { Access::ReadOnly } else { Access::Writable },
            check,
            options: MountOptions {
                name: image.ref_name.clone(),
                // Others could open the device nodes that the container makes.
                ..bundle::mount_options(args.read_only || is_open)
            },
            ..MountRequest::new(image.digest, bundle.held().join("rootfs"))
        };
        let mounter = context.mounter(&domain)?;
        let mount = |task: &Task| mounter.with_task(task).mount(&request);
        let mounted = context.work("verifying", "file", mount)?;
        let warmed = args.warm.warm(&domain, &image.digest, context).map_err(Into::into);
        warmed.and_then(|()| Ok(write()?)).or_else(|error: anyhow::Error| {
            let options = UmountOptions::default();
            let _undoing = domain.store().waiting().undo();
            let left = context.mounter(&domain)?.umount(Path::new(&mounted.id), &options);
            left.with_context(|| format!("unmounting {}", mounted.target.display()))?;
            Err(error)
        })
    };
    let config = match &args.rootfs {
        Some(_) => write()?,
        None => mount_and_write().inspect_err(|_| {
            if made {
                // If it is empty.
                let _ = fs::remove_dir(&dir);
            }
        })?,
    };
    if context.ui.json {
        context.ui.json(&json!({
            "bundle": dir,
            "image": image.digest,
            "mounted": args.rootfs.is_none(),
            "config": config,
        }))?;
    } else {
        let dir = args.dir.display();
        let default = config["hostname"].as_str().unwrap_or("box");
        let id = options.hostname.as_deref().unwrap_or(default);
        context.ui.note(format!("{dir}: ready, `runc run --bundle {dir} {id}` starts it"));
        if is_open {
            context.ui.note(format!(
                "other users of this machine can reach the container's files, and its environment in \
                 config.json: `chmod 700 {dir}` keeps them out"
            ));
        }
        if args.rootfs.is_none() {
            context.ui.note(format!("`cofolio umount {dir}/rootfs` when it has ended"));
        }
    }
    Ok(Exit::Ok)
}
