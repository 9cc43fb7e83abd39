//! `cofolio bench share OLD NEW`: the first experiment of the EROFS page cache sharing series on any
//! two images. See docs/BENCH-SHARE.md.

use std::{
    collections::HashMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use cofolio_node::{
    mount::Access,
    oci::{self, ImportOptions},
    pack::{PackOptions, pack},
};
use cofolio_store::{Backend, Digest, Domain, Form, InitOptions, Store};
use cofolio_sys::cache::page_size;
use rustix::fs::FlockOperation;

use crate::{
    cmd::{Outcome, backend::How},
    exit::{Exit, Fail},
};

use super::{
    html,
    measure::{self, OwnFiles, Source},
    reader::Mode,
    report::{self, Report},
    setup::{self, Setup, Shared, Unshared},
    source::{self, Content, Expected, Unpacked},
};

/// Memory for reading every file of two images, with and without sharing
///
/// Measures the page cache from a cold start: each image unpacked on its own and mounted by overlayfs,
/// as a container engine does it, then both mounted by Cofolio. A fresh process in a fresh cgroup reads
/// every file, by read(2) and by mmap(2); what it reads is compared with the source. Needs root, and
/// drops the page cache of the whole machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio bench share corpus/out/redis/old corpus/out/redis/new --json redis.json --html redis.html

Exit codes: 0 measured and the figures agree, 1 they do not agree or something failed; others as for
every command.")]
pub(crate) struct Args {
    /// An OCI layout directory, an OCI archive, a `docker save` archive, or a ref of the store
    old: String,
    /// The other one
    new: String,
    /// Write every figure of every run to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for a browser to this file: one file, with nothing loaded from elsewhere
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Runs of each kind; the table has medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Only read this way
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Seconds to wait, all in all, for moments when nobody else fills memory
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    patience: u64,
    /// Store to import the images into [default: one of its own, in the working directory]
    #[arg(long, value_name = "DIR", env = "COFOLIO_STORE", hide_env_values = true)]
    store: Option<PathBuf>,
    /// Trust domain of that store
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// How Cofolio mounts, in a trust domain of its own: `overlay`, `inode-share` [default: as the domain does]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<How>,
    /// With `--backend inode-share`: over packs that are compressed with LZ4
    #[arg(long, requires = "backend")]
    lz4: bool,
    /// Where to unpack the images; a second run takes from there what it can
    #[arg(long, value_name = "DIR", default_value = "/var/tmp/cofolio-bench")]
    work: PathBuf,
    /// Say nothing but the table
    #[arg(long, short)]
    quiet: bool,
}

pub(super) fn run(args: &Args, context: &crate::context::Context<'_>) -> Outcome {
    let global = &context.global;
    let started = Instant::now();
    let say = |text: &str| {
        if !(args.quiet || global.quiet) {
            let _ = writeln!(io::stderr(), "{text}");
        }
    };
    let wanted =
        Wanted { work: &args.work, store: args.store.as_ref(), domain: args.domain.as_deref() };
    let Place { work, domain, _alone } = Place::prepare(&wanted, context, &say)?;
    let form = if args.lz4 { Form::Lz4 } else { Form::Plain };
    let domain = with_backend(domain, args.backend, form)?;
    let Pair { unpacked: [old, new], images, .. } =
        Pair::prepare([&args.old, &args.new], &work, &domain, &say)?;
    let expected = Expected::of([&old, &new]);
    let contents = [&old, &new].map(|image| -> HashMap<Vec<u8>, Content> {
        image.listing.iter().map(|(path, entry)| (path.clone(), entry.content)).collect()
    });
    let truth = Source { images: [&contents[0], &contents[1]] };

    let mut unshared = Unshared::new(&work, [&old, &new], &expected)?;
    let mut shared =
        Shared::new(&work, &domain, images, Access::ReadOnly, [&old, &new], &expected)?;
    let own = OwnFiles::find()?;
    // The shorter a measurement, the less of others' doings falls into it. Not having the privilege only
    // makes it longer.
    let _ = rustix::process::setpriority_process(None, -20);
    let mut patience = Duration::from_secs(args.patience);
    let mut runs = Vec::new();
    for round in 1..=args.runs {
        for mode in Mode::ALL.into_iter().filter(|mode| args.mode.is_none_or(|m| m == *mode)) {
            let setups: [&mut dyn Setup; 2] = [&mut unshared, &mut shared];
            for setup in setups {
                let run = measure::measure(setup, mode, &truth, &own, &mut patience)?;
                say(&format!(
                    "run {round} of {}, {} by {}: {} files in {:.1} s, page cache grew by {} MiB",
                    args.runs,
                    run.setup,
                    mode.name(),
                    run.files_compared,
                    run.read_seconds,
                    run.growth.page_cache >> 20
                ));
                runs.push(run);
            }
        }
    }

    let checks = report::check(&runs);
    let report = Report {
        format: 1,
        tool: format!("cofolio {}", env!("CARGO_PKG_VERSION")),
        command_line: report::command_line(),
        machine: report::machine(&work, report::memory_cgroup()),
        old: old.about.clone(),
        new: new.about.clone(),
        expected,
        page_size: page_size(),
        summary: report::summarize(&runs, &expected, [Unshared::NAME, Shared::NAME]),
        checks,
        seconds: started.elapsed().as_secs_f64(),
        runs,
    };
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &args.html {
        html::write(path, &[serde_json::to_value(&report)?])?;
    }
    io::stdout().write_all(report::table(&report).as_bytes())?;
    let ok = report.checks.iter().all(|check| check.ok);
    Ok(if ok { Exit::Ok } else { Exit::Failure })
}

/// Where a benchmark is to work, as its options say.
pub(super) struct Wanted<'a> {
    pub(super) work: &'a Path,
    pub(super) store: Option<&'a PathBuf>,
    pub(super) domain: Option<&'a str>,
}

/// Where it works, alone on this machine as long as this lives.
pub(super) struct Place {
    pub(super) work: PathBuf,
    pub(super) domain: Domain,
    pub(super) _alone: fs::File,
}

impl Place {
    pub(super) fn prepare(
        wanted: &Wanted<'_>,
        context: &crate::context::Context<'_>,
        say: &dyn Fn(&str),
    ) -> Result<Self> {
        let global = &context.global;
        fs::create_dir_all(wanted.work)
            .with_context(|| format!("cannot make {}", wanted.work.display()))?;
        let work = fs::canonicalize(wanted.work)?;
        let _alone = lock_machine(say)?;
        // A store that somebody named for this run; never the one where a node keeps its images just because
        // that is the default, or what the configuration says.
        let named = context.config.is_given("store.path").then_some(&global.store);
        let scratch = work.join("store");
        let store = wanted.store.or(named).unwrap_or(&scratch);
        on_disk(store, "--store")?;
        on_disk(&work, "--work")?;
        let domain = wanted.domain.unwrap_or(&global.domain);
        // What is in the working directory can be made again, and is to be removable with rm -r.
        let domain = open_domain(store, domain, &InitOptions { immutable: *store != scratch })?;
        Ok(Self { work, domain, _alone })
    }
}

/// Two measurements at once would measure each other: the second waits. Unlocked when dropped.
fn lock_machine(say: &dyn Fn(&str)) -> Result<fs::File> {
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

/// The domain of the benchmarks that has this backend, over packs of this form; `domain` itself if none is asked for.
pub(super) fn with_backend(domain: Domain, backend: Option<How>, form: Form) -> Result<Domain> {
    let Some(how) = backend else { return Ok(domain) };
    let backend: Backend = how.into();
    let name = match (backend, form) {
        (Backend::InodeShare, Form::Lz4) => format!("bench-{backend}-lz4"),
        (Backend::Overlay, Form::Lz4) => {
            let what = "`overlay` mounts the files of the store, which are not compressed";
            return Err(Fail::new(Exit::Usage, what).into());
        }
        (_, Form::Plain) => format!("bench-{backend}"),
    };
    let own = domain.store().domain_or_create(&name)?;
    if (own.backend()?, own.pack_form()?) != (backend, form) {
        own.set_backend_over(backend, form)?;
    }
    Ok(own)
}

/// Two images, unpacked on their own and in the store, packed where its backend needs it.
pub(super) struct Pair {
    pub(super) unpacked: [Unpacked; 2],
    pub(super) images: [Digest; 2],
    /// Image configs, JSON; a directory that was imported has none.
    pub(super) configs: [Option<String>; 2],
}

impl Pair {
    /// From the two arguments of a command.
    pub(super) fn prepare(
        [old, new]: [&str; 2],
        work: &Path,
        domain: &Domain,
        say: &dyn Fn(&str),
    ) -> Result<Self> {
        let old = Image::prepare(old, work, domain, say)?;
        let new = Image::prepare(new, work, domain, say)?;
        let [(old_digest, old_config), (new_digest, new_config)] =
            import([&old, &new], domain, say)?;
        let images = [old_digest, new_digest];
        if domain.backend()? == Backend::InodeShare {
            let options = PackOptions { form: domain.pack_form()?, ..PackOptions::default() };
            for image in &images {
                let go_on = &mut |_, _| std::ops::ControlFlow::Continue(());
                pack(domain, image, &options, go_on)?;
            }
        }
        let (unpacked, configs) = ([old.unpacked, new.unpacked], [old_config, new_config]);
        Ok(Self { unpacked, images, configs })
    }
}

/// An argument of the command: unpacked, and where Cofolio is to have it from.
struct Image<'a> {
    unpacked: Unpacked,
    origin: Origin<'a>,
}

enum Origin<'a> {
    /// To be imported.
    Path(&'a str),
    /// In the store already.
    Store(Digest, Option<String>),
}

impl<'a> Image<'a> {
    fn prepare(
        text: &'a str,
        work: &Path,
        domain: &Domain,
        say: &dyn Fn(&str),
    ) -> Result<Image<'a>> {
        let cache = work.join("unpacked");
        if !Path::new(text).exists()
            && let Ok(Some(record)) = domain.get_ref(text)
        {
            let unpacked = setup::copy_out(text, record.image, domain, work, &cache, say)?;
            return Ok(Image { unpacked, origin: Origin::Store(record.image, record.config) });
        }
        if !Path::new(text).exists() {
            let what = format!("{text:?} is neither a file or directory nor a ref of the store");
            return Err(Fail::not_found(what).into());
        }
        let unpacked = source::unpack(Path::new(text), &cache, say)?;
        Ok(Image { unpacked, origin: Origin::Path(text) })
    }
}

/// Imports both images, where they are not yet; gives the digests of their metadata images, and their configs.
fn import(
    images: [&Image<'_>; 2],
    domain: &Domain,
    say: &dyn Fn(&str),
) -> Result<[(Digest, Option<String>); 2]> {
    let same_name = images[0].unpacked.about.name == images[1].unpacked.about.name;
    let one = |image: &Image<'_>| -> Result<(Digest, Option<String>)> {
        let about = &image.unpacked.about;
        let path = match &image.origin {
            Origin::Store(digest, config) => return Ok((*digest, config.clone())),
            Origin::Path(path) => path,
        };
        let options = ImportOptions {
            // The second would take the name from the first, and garbage collection then the image.
            name: same_name.then(|| {
                let hex = about.manifest.trim_start_matches("sha256:");
                format!("bench-{}", hex.get(..12).unwrap_or(hex))
            }),
            ..ImportOptions::default()
        };
        let report = oci::import(domain, &oci::Source::parse(path)?, &options, &oci::Silent)?;
        say(&format!(
            "imported {}: {} objects written, {} there already, {} ms",
            about.name, report.objects_new, report.objects_known, report.duration_ms
        ));
        let digest = report.image.parse();
        let digest = digest.with_context(|| format!("{} is no digest", report.image))?;
        Ok((digest, domain.get_ref(&report.name)?.and_then(|record| record.config)))
    };
    Ok([one(images[0])?, one(images[1])?])
}
