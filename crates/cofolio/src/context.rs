//! What the commands work on: the store, the domain, the image that the user means.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use cofolio_cli::interrupt;
use cofolio_image::pack::ImageContents;
use cofolio_node::mount::{MountState, Mounter};
use cofolio_node::names;
use cofolio_node::run_dir::RunDir;
use cofolio_node::upkeep::Upkeep;
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, InitOptions, Ref, Refs, RootKind, Store, UnreadableRef};

use crate::cli::Global;
use crate::exit::{self, Exit, Fail};
use crate::progress::Work;
use crate::ui::Ui;
use cofolio_node::config::Loaded;
pub(crate) use cofolio_node::names::{Named, short};

/// Options of every command, the configuration, and how to talk to the user.
pub(crate) struct Context<'a> {
    pub(crate) global: Global,
    pub(crate) config: Loaded,
    pub(crate) ui: &'a Ui,
}

impl Context<'_> {
    /// For commands without JSON output: a script that asked for JSON must not get other text.
    pub(crate) fn refuse_json(&self, why: &str) -> anyhow::Result<()> {
        match self.ui.json {
            true => Err(Fail::usage(format!("no --json here: {why}")).into()),
            false => Ok(()),
        }
    }

    /// For commands that need root: the error of their first system call would not say what to do.
    /// `what` is what needs it, as in `mounting`.
    pub(crate) fn needs_root(&self, what: &str) -> anyhow::Result<()> {
        let fail = || Fail::new(Exit::Missing, format!("{what} needs root")).hint("run as root");
        match rustix::process::geteuid().is_root() {
            true => Ok(()),
            false => Err(fail().into()),
        }
    }

    /// The domain, which must exist.
    pub(crate) fn domain(&self) -> anyhow::Result<Domain> {
        let store = Store::open(&self.global.store)?.waits_until(interrupt::cancel());
        self.run_dir_of(&store)?;
        Ok(store.domain(&self.global.domain)?)
    }

    /// The store, made if it is missing.
    pub(crate) fn store_or_create(&self) -> anyhow::Result<Store> {
        if let Some(parent) = self.global.store.parent() {
            std::fs::create_dir_all(parent).map_err(|error| {
                anyhow::Error::new(error).context(format!("creating {}", parent.display()))
            })?;
        }
        let store = Store::open_or_init(&self.global.store, &InitOptions::default())?;
        self.run_dir_of(&store)?;
        Ok(store)
    }

    /// The domain, made with its store if they are missing.
    pub(crate) fn domain_or_create(&self) -> anyhow::Result<Domain> {
        let store = self.store_or_create()?;
        Ok(store.waits_until(interrupt::cancel()).domain_or_create(&self.global.domain)?)
    }

    /// The image that a ref or the first digits of a digest name.
    pub(crate) fn image(&self, domain: &Domain, text: &str) -> anyhow::Result<Named> {
        Ok(names::resolve(domain, text)?)
    }

    /// The readable refs. The others are reported on standard error and by the exit code.
    pub(crate) fn refs(&self, domain: &Domain) -> anyhow::Result<(Vec<(String, Ref)>, Exit)> {
        let Refs { readable, unreadable } = domain.all_refs()?;
        let mut exit = Exit::Ok;
        for UnreadableRef { name, error } in unreadable {
            let name = name.unwrap_or("with a long name".to_owned());
            let error = anyhow::Error::new(error).context(format!("ref {name} cannot be read"));
            exit = exit::report(&error, self.ui);
        }
        Ok((readable, exit))
    }

    /// Does work that takes long. Until it is done, shows how it goes on, and Ctrl-C cancels it;
    /// `doing` and `item` are those of [`Work::begin`].
    pub(crate) fn work<T, E: Into<anyhow::Error>>(
        &self,
        doing: &'static str,
        item: &'static str,
        work: impl FnOnce(&Task) -> Result<T, E>,
    ) -> anyhow::Result<T> {
        let shown = Work::begin(self.ui, doing, item)?;
        work(&shown.task).map_err(Into::into)
    }

    /// This program with the same options, without input.
    pub(crate) fn cofolio(&self) -> Command {
        let global = &self.global;
        let mut command = Command::new("/proc/self/exe");
        command.arg("--store").arg(&global.store).arg("--run-dir").arg(&global.run_dir);
        command.args(["--domain", &global.domain]).stdin(Stdio::null());
        if let Some(config) = &global.config {
            command.arg("--config").arg(config);
        }
        command
    }

    /// Mounts images of a domain; its state is below the run directory.
    pub(crate) fn mounter<'d>(&self, domain: &'d Domain) -> anyhow::Result<Mounter<'d>> {
        Ok(Mounter::new(domain, self.run_dir_of(domain.store())?, &ImageContents))
    }

    /// Keeps a domain in order.
    pub(crate) fn upkeep<'d>(&self, domain: &'d Domain) -> anyhow::Result<Upkeep<'d>> {
        let (run, limit) = (self.run_dir_of(domain.store())?, &self.config.config.store.limit);
        Ok(Upkeep::new(domain, run, limit.clone()))
    }

    /// The run directory of a store.
    pub(crate) fn run_dir_of(&self, store: &Store) -> anyhow::Result<RunDir> {
        let path = self.global.run_dir.join(store.id());
        // A runtime that is started from it has another working directory.
        Ok(RunDir::open(std::path::absolute(&path).unwrap_or(path))?)
    }

    /// Where the daemon listens.
    pub(crate) fn socket(&self) -> PathBuf {
        let configured = self.config.config.daemon.socket.clone();
        configured.unwrap_or_else(|| self.global.run_dir.join("cofolio.sock"))
    }

    /// Where an image of this domain is mounted.
    pub(crate) fn mounts_of(
        &self,
        domain: &Domain,
        image: &Digest,
    ) -> anyhow::Result<Vec<PathBuf>> {
        let mounts = self.mounter(domain)?.list()?.mounts.into_iter();
        let mounts = mounts.filter(|status| status.state != MountState::Gone);
        let records = mounts.map(|status| status.record);
        let ours =
            records.filter(|record| record.image == *image && record.domain == domain.name());
        Ok(ours.map(|record| record.target).collect())
    }
}

/// What keeps an image alive besides refs and mounts, for messages: `lease/build-7`.
pub(crate) fn other_roots(domain: &Domain, image: &Digest) -> anyhow::Result<Vec<String>> {
    let roots = domain.roots(RootKind::Lease)?.into_iter();
    let ours = roots.filter(|root| root.images.contains(image));
    Ok(ours.map(|root| format!("{}/{}", RootKind::Lease.as_str(), root.id)).collect())
}
