//! `cofolio-bench share OLD NEW`: the first experiment of the EROFS page cache sharing series on any
//! two images. See docs/BENCH-SHARE.md.

use std::{
    collections::HashMap,
    fs,
    io::{self, Write},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use cofolio_image::pack::segment::Form;
use cofolio_image::source::Source as ImageSource;
use cofolio_image::{
    import,
    import::ImportOptions,
    pack::{PackOptions, pack},
};
use cofolio_node::mount::Access;
use cofolio_node::settings::{Backend, DomainSettings as _};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain};
use cofolio_sys::cache::page_size;

use crate::Outcome;
use cofolio_cli::args::BackendArg;
use cofolio_cli::exit::{Exit, Fail};

use super::{
    measure::{self, OwnFiles, Source},
    place::{Place, PlaceArgs, with_backend},
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
  cofolio-bench share corpus/out/redis/old corpus/out/redis/new --json redis.json

Exit codes: 0 measured and the figures agree, 1 they do not agree or something failed; others as for
every command.")]
pub(crate) struct Args {
    /// An OCI layout directory, an OCI archive, a `docker save` archive, or a ref of the store
    old: String,
    /// The other one
    new: String,
    /// Runs of each kind; the table has medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Only read this way
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Seconds to wait, all in all, for moments when nobody else fills memory
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    patience: u64,
    /// Trust domain of that store
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// How Cofolio mounts, in a trust domain of its own: `overlay`, `inode-share` [default: as the domain does]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<BackendArg>,
    /// With `--backend inode-share`: over packs that are compressed with LZ4
    #[arg(long, requires = "backend")]
    lz4: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

pub(super) fn run(args: &Args) -> Outcome {
    let started = Instant::now();
    let say = args.place.say();
    let Place { work, domain, _alone } = Place::prepare(&args.place, args.domain.as_deref(), &say)?;
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
    if let Some(path) = &args.place.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    io::stdout().write_all(report::table(&report).as_bytes())?;
    let ok = report.checks.iter().all(|check| check.ok);
    Ok(if ok { Exit::Ok } else { Exit::Failure })
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
        let same_name = old.unpacked.about.name == new.unpacked.about.name;
        let (old_digest, old_config) = import(&old, same_name, domain, say)?;
        let (new_digest, new_config) = import(&new, same_name, domain, say)?;
        let images = [old_digest, new_digest];
        if domain.backend()? == Backend::InodeShare {
            let options = PackOptions { form: domain.pack_form()?, ..PackOptions::default() };
            for image in &images {
                let task = Task::default();
                pack(domain, image, &options, &task)?;
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

/// Unpacks an image and imports it under a name that no other image has.
pub(super) fn prepare_one(
    text: &str,
    work: &Path,
    domain: &Domain,
    say: &dyn Fn(&str),
) -> Result<(Unpacked, Digest)> {
    let image = Image::prepare(text, work, domain, say)?;
    let (digest, _) = import(&image, true, domain, say)?;
    Ok((image.unpacked, digest))
}

/// Imports an image unless it is from the store; gives the digest of its metadata image, and its config.
/// With `by_digest` under a name of its own: of two with one name the second would take it from the
/// first, and garbage collection then the image.
fn import(
    image: &Image<'_>,
    by_digest: bool,
    domain: &Domain,
    say: &dyn Fn(&str),
) -> Result<(Digest, Option<String>)> {
    let about = &image.unpacked.about;
    let path = match &image.origin {
        Origin::Store(digest, config) => return Ok((*digest, config.clone())),
        Origin::Path(path) => path,
    };
    let options = ImportOptions {
        name: by_digest.then(|| {
            let hex = about.manifest.trim_start_matches("sha256:");
            format!("bench-{}", hex.get(..12).unwrap_or(hex))
        }),
        ..ImportOptions::default()
    };
    let report = import::import(domain, &ImageSource::parse(path)?, &options, &Task::default())?;
    say(&format!(
        "imported {}: {} objects written, {} there already, {} ms",
        about.name, report.objects_new, report.objects_known, report.duration_ms
    ));
    let digest = report.image;
    Ok((digest, domain.get_ref(&report.name)?.and_then(|record| record.config)))
}
