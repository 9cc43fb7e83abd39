//! Where a benchmark works: its directory and its store, alone on the machine.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use cofolio_image::pack::{ImageContents, segment::Form};
use cofolio_node::settings::{Backend, DomainSettings as _};
use cofolio_store::{
    Contents as _, DEFAULT_DOMAIN, Domain, FileKind, FileName, ImportOptions, InitOptions, Publish,
    Store,
};
use rustix::fs::FlockOperation;

use cofolio_cli::args::BackendArg;
use cofolio_cli::exit::{Exit, Fail};

/// Options that all measurements have.
#[derive(Debug, clap::Args)]
pub(super) struct PlaceArgs {
    /// Write every figure of every run to this file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Store to import into [default: one of its own, in the working directory]
    #[arg(long, value_name = "DIR", env = "COFOLIO_STORE", hide_env_values = true)]
    store: Option<PathBuf>,
    /// Where to mount and unpack, and to keep that store; a second run takes from there what it can
    #[arg(long, value_name = "DIR", default_value = "/var/tmp/cofolio-bench")]
    work: PathBuf,
    /// Say nothing but the table
    #[arg(long, short)]
    quiet: bool,
}

impl PlaceArgs {
    /// Says on standard error how it goes on, unless that is not wanted.
    pub(super) fn say(&self) -> impl Fn(&str) + use<> {
        let quiet = self.quiet;
        move |text| {
            if !quiet {
                let _ = writeln!(io::stderr(), "{text}");
            }
        }
    }
}

/// Where it works, alone on this machine as long as this lives.
pub(super) struct Place {
    pub(super) work: PathBuf,
    pub(super) domain: Domain,
    pub(super) _alone: fs::File,
}

impl Place {
    pub(super) fn prepare(
        options: &PlaceArgs,
        domain: Option<&str>,
        say: &dyn Fn(&str),
    ) -> Result<Self> {
        fs::create_dir_all(&options.work)
            .with_context(|| format!("cannot make {}", options.work.display()))?;
        let work = fs::canonicalize(&options.work)?;
        let _alone = lock_machine(say)?;
        let scratch = work.join("store");
        let store = options.store.as_ref().unwrap_or(&scratch);
        on_disk(store, "--store")?;
        on_disk(&work, "--work")?;
        let domain = domain.unwrap_or(DEFAULT_DOMAIN);
        // What is in the working directory can be made again, and is to be removable with rm -r.
        let domain = open_domain(store, domain, &InitOptions { immutable: *store != scratch })?;
        Ok(Self { work, domain, _alone })
    }
}

/// Two measurements at once would measure each other: the second waits. Unlocked when dropped.
pub(super) fn lock_machine(say: &dyn Fn(&str)) -> Result<fs::File> {
    const PATH: &str = "/run/cofolio-bench.lock";
    let open = || -> io::Result<fs::File> {
        let file = fs::File::create(PATH)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            say("waiting for another benchmark to end");
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        }
        Ok(file)
    };
    open().with_context(|| format!("cannot lock {PATH}"))
}

/// Refuses a directory in memory: its pages cannot be dropped, so nothing would be seen to come in.
fn on_disk(dir: &Path, option: &str) -> Result<()> {
    // `TMPFS_MAGIC` and `RAMFS_MAGIC` of `linux/magic.h`.
    const IN_MEMORY: [rustix::fs::FsWord; 2] = [0x0102_1994, 0x8584_58f6];
    let there = dir.ancestors().find_map(|dir| rustix::fs::statfs(dir).ok());
    if there.is_some_and(|stat| IN_MEMORY.contains(&stat.f_type)) {
        let what =
            format!("{} is in memory: what is read there takes no page cache", dir.display());
        return Err(Fail::new(Exit::Failure, what)
            .hint(format!("name a directory on a disk ({option})"))
            .into());
    }
    Ok(())
}

/// The domain, made with its store if they are missing.
fn open_domain(store: &Path, domain: &str, options: &InitOptions) -> Result<Domain> {
    if let Some(parent) = store.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    let store = Store::open_or_init(store, options)?;
    Ok(store.domain_or_create(domain)?)
}

/// Brings an image with its layers into another domain of the store.
pub(super) fn copy_image(from: &Domain, to: &Domain, name: &str) -> Result<()> {
    // What is copied must not be collected meanwhile.
    let _lock = from.lock_shared()?;
    let record = from.get_ref(name)?.with_context(|| format!("no image {name}"))?;
    let staging = to.begin_import(ImportOptions::default())?;
    let mut files = vec![FileName::content(FileKind::Image, &record.image)];
    for layer in &record.layers {
        files.push(FileName::chain(FileKind::Layer, &layer.chain_id)?);
        let split = FileName::chain(FileKind::Split, &layer.chain_id)?;
        if from.has_named(&split)? {
            files.push(split);
        }
    }
    let mut objects = BTreeMap::new();
    for name in files {
        let file = from.open_named(&name)?;
        let visit = &mut |digest, size| {
            objects.insert(digest, size);
        };
        ImageContents.names(name.kind(), &file, visit).map_err(anyhow::Error::from_boxed)?;
        let mut writer = staging.file_writer()?;
        io::copy(&mut file.reader(), &mut writer)?;
        writer.finish(&name)?;
    }
    for object in objects.keys() {
        let mut writer = staging.object_writer();
        io::copy(&mut from.open_object(object)?.reader(), &mut writer)?;
        writer.finish()?;
    }
    staging.commit(&Publish::named(name, record), objects)?;
    Ok(())
}

/// The domain of the benchmarks that has this backend, over packs of this form; `domain` itself if none is asked for.
pub(super) fn with_backend(
    domain: Domain,
    backend: Option<BackendArg>,
    form: Form,
) -> Result<Domain> {
    let Some(how) = backend else { return Ok(domain) };
    let backend: Backend = how.into();
    let name = match (backend, form) {
        (Backend::InodeShare, Form::Lz4) => format!("bench-{backend}-lz4"),
        (Backend::Overlay, Form::Lz4) => {
            let what = "`overlay` mounts the files of the store, which are not compressed";
            return Err(Fail::new(Exit::Usage, what).into());
        }
        (_, Form::Plain | Form::Dax) => format!("bench-{backend}"),
    };
    let own = domain.store().domain_or_create(&name)?;
    if (own.backend()?, own.pack_form()?) != (backend, form) {
        own.set_backend(backend, form)?;
    }
    Ok(own)
}
