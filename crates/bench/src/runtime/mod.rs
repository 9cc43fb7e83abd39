//! `cofolio-bench runtime OLD NEW`: the second experiment of the EROFS page cache sharing series. Both versions of an
//! image run at the same time under their usual load; how much memory does that take? See docs/BENCH-RUNTIME.md.

mod container;
mod content;
mod load;
mod measure;
mod report;

use cofolio_image::pack::segment::Form;
use std::{
    fs,
    io::{self, Write},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use cofolio_node::settings::DomainSettings as _;
use cofolio_node::{
    cgroup::Hierarchy, container::Runtime, container::bundle::ImageConfig, mount::Access,
    upkeep::bases,
};
use cofolio_store::task::Task;

use cofolio_sys::cache::page_size;

use self::{
    container::Host,
    content::Holders,
    load::Load,
    measure::Bench,
    report::{Report, Summary},
};
use super::{
    measure::OwnFiles,
    place::{Place, PlaceArgs, with_backend},
    setup::{Setup, Shared, Unshared},
    share::Pair,
    source::{Expected, remove_tree},
};
use crate::Outcome;
use cofolio_cli::args::BackendArg;
use cofolio_cli::{exit::Exit, interrupt::Cancellable};

/// Memory of two images that run at the same time, with and without sharing
///
/// Starts a container of each, in a memory cgroup of its own and with no network but its own loopback, and puts both
/// under their usual load: redis-benchmark, sysbench, wrk, pages fetched, something computed. After some seconds of it
/// looks at what the two cgroups are charged, and
/// what mounting both images was charged to a third. From a cold start, and in turn: each image unpacked on its own and mounted
/// by overlayfs; the same with their common layers once, as container engines have them; and both mounted by Cofolio. Needs root, a memory cgroup, crun or runc
/// and the program that makes the load, and drops the page cache of the whole machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench runtime corpus/out/redis/old corpus/out/redis/new --json redis.json

Exit codes: 0 measured; 5 a client program is missing; others as for every command.")]
pub(crate) struct Args {
    /// An OCI layout directory, an OCI archive, a `docker save` archive, or a ref of the store
    old: String,
    /// The other one
    new: String,
    /// What the containers do: redis, postgres, mysql, nginx, nginx-no-sendfile, tomcat, tensorflow, http (any server of
    /// pages, `/` of which is fetched) [default: as the old image's name or program tells]
    #[arg(long, value_name = "LOAD")]
    load: Option<String>,
    /// How long the load is on before memory is looked at
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3000))]
    seconds: u64,
    /// Runs of each kind; the table has medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Program that starts the containers, by name or path [default: crun, else runc]
    #[arg(long)]
    runtime: Option<String>,
    /// Trust domain of that store
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// How Cofolio mounts, in a trust domain of its own: `overlay`, `inode-share` [default: as the domain does]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<BackendArg>,
    #[command(flatten)]
    place: PlaceArgs,
}

pub(super) fn run(args: &Args) -> Outcome {
    let started = Instant::now();
    let say = args.place.say();
    // What is missing is said before anything is unpacked.
    let wanted_runtime = args.runtime.as_deref();
    let runtime = Runtime::find(wanted_runtime, Path::new("/"))?;
    let hierarchy = Hierarchy::find(Path::new("/"))?;
    if args.load.is_some() {
        Load::find(args.load.as_deref(), "", &ImageConfig::default())?.check()?;
    }
    let Place { work, domain, _alone } = Place::prepare(&args.place, args.domain.as_deref(), &say)?;
    let domain = with_backend(domain, args.backend, Form::Plain)?;
    let Pair { unpacked: [old, new], images, configs } =
        Pair::prepare([&args.old, &args.new], &work, &domain, &say)?;
    // As the first gc of a host makes them.
    bases::find(&domain, &Task::default())?;
    let [a, b] = configs
        .map(|text| text.map_or(Ok(ImageConfig::default()), |text| ImageConfig::parse(&text)));
    let configs = [a?, b?];
    let load = Load::find(args.load.as_deref(), &old.about.name, &configs[0])?;
    load.check()?;

    let expected = Expected::of([&old, &new]);
    let mut unshared = Unshared::new(&work, [&old, &new], &expected)?;
    let mut shared =
        Shared::new(&work, &domain, images, Access::Writable, [&old, &new], &expected)?;
    let mut layers_once = Unshared::layers_once(&work, [&old, &new], &expected)?;
    let holders = Holders::unpacked([&old, &new]);
    let mut setups: Vec<(&mut dyn Setup, Holders)> = vec![(&mut unshared, holders)];
    if let Some(setup) = &mut layers_once {
        let holders = Holders::one_each(setup.content());
        setups.push((setup, holders));
    }
    let holders = Holders::one_each(shared.content());
    setups.push((&mut shared, holders));
    let runtime_name = runtime.name();
    let signals = Cancellable::begin()?;
    let host = Host::new(runtime, hierarchy, &work, signals.cancel.clone())?;
    let time = Duration::from_secs(args.seconds);
    let bench = Bench { host, load, configs: &configs, own: OwnFiles::find()?, time };
    let runs = measure_all(&bench, &mut setups, args.runs, &say)?;
    remove_tree(&work.join("runtime"))?;

    let report = Report {
        format: 2,
        tool: format!("cofolio {}", env!("CARGO_PKG_VERSION")),
        command_line: super::report::command_line(),
        machine: super::report::machine(&work, super::report::memory_cgroup()),
        runtime: runtime_name,
        backend: domain.backend()?.to_string(),
        old: old.about.clone(),
        new: new.about.clone(),
        load: load.name,
        load_seconds: args.seconds,
        page_size: page_size(),
        summary: Summary::of(&runs),
        seconds: started.elapsed().as_secs_f64(),
        runs,
    };
    if let Some(path) = &args.place.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    io::stdout().write_all(report::table(&report).as_bytes())?;
    Ok(Exit::Ok)
}

/// All setups in turn, as often as asked for.
fn measure_all(
    bench: &Bench<'_>,
    setups: &mut [(&mut dyn Setup, Holders)],
    rounds: u32,
    say: &dyn Fn(&str),
) -> Result<Vec<measure::Run>> {
    let mut runs = Vec::new();
    for round in 1..=rounds {
        for (setup, holders) in setups.iter_mut() {
            let run = bench.measure(&mut **setup, holders)?;
            say(&format!(
                "run {round} of {rounds}, {}: {} MiB, of that {} MiB page cache",
                run.setup,
                run.memory() >> 20,
                run.sum(|charge| charge.cache) >> 20
            ));
            runs.push(run);
        }
    }
    Ok(runs)
}
