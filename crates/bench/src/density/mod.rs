//! `cofolio-bench density --containers N IMAGE…`: what does the kernel spend on each of many containers?
//! Each container has a memory cgroup, a mount and a process that touches a few files. The containers of a
//! variant are made from a cold start, and the memory of the machine is read before and after.

mod report;
mod shrinkers;
pub(crate) mod variants;
pub(crate) mod worker;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;
use cofolio_cli::exit::{Exit, Fail};
use cofolio_cli::interrupt::Cancellable;
use cofolio_node::cgroup::{Cgroup, Hierarchy};
use cofolio_store::task::Cancel;
use serde::Serialize;

use crate::Outcome;
use crate::cleanup;
use crate::dying;
use crate::measure::{OwnFiles, SETTLE_MAX, cold_start, delta, read_memory, wait_for_quiet};
use crate::memory::{Memory, slab_caches};
use crate::namespace::shapes::Shape;
use crate::place::{Place, PlaceArgs};
use crate::share;
use report::Report;
use variants::{Images, Variant};
use worker::{Log, Workers};

/// Kernel memory of each of many containers
///
/// Makes many containers, each a memory cgroup, a mount and a process that reads some files through the
/// mount: by Cofolio, by overlayfs over unpacked layers as podman and containerd do it, and with an EROFS
/// superblock per container. Reads the memory of the machine before and after, and takes off what the same
/// processes and cgroups need without mounts. Needs root and a memory cgroup, and drops the caches of the
/// whole machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench density --containers 1000 corpus/out/redis/old corpus/out/redis/new --json density.json

Exit codes: 0 the goals are met, or are of more containers or files; 1 one is missed; others as for every
command.")]
pub(crate) struct Args {
    /// OCI layout directories, OCI archives, `docker save` archives, or refs of the store
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// Containers of each variant
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=30_000))]
    containers: u32,
    /// Use only the first so many images; the containers take turns [default: all of them]
    #[arg(long = "images", value_name = "COUNT")]
    count: Option<usize>,
    /// Variants to measure, separated by commas [default: all of them]
    #[arg(long, value_enum, value_delimiter = ',')]
    variants: Vec<Variant>,
    /// Files that each container stats and reads: the first ones by path
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    profile_files: usize,
    /// Rounds of all variants; the table has medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Bytes by kind.
type Kinds = BTreeMap<&'static str, i64>;

/// One round of a variant.
#[derive(Debug, Serialize)]
struct Round {
    variant: Variant,
    /// Growth of the machine with all containers made.
    growth: Kinds,
    /// Growth with only the first container of each image made.
    first: Kinds,
    /// Part of the growth that stays when caches are dropped while the containers run.
    held: Kinds,
    /// Kernel memory charged to the containers' cgroups and to the one that made the mounts.
    charged: Option<i64>,
    /// The same with only the first container of each image made.
    first_charged: Option<i64>,
    /// Growth of the slab caches that grew or shrank, all containers together.
    slab_caches: BTreeMap<String, i64>,
    create_seconds: f64,
    remove_seconds: f64,
    /// Cgroups that were removed and whose memory stays, more than before.
    dying_cgroups: i64,
}

pub(super) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let hierarchy = Hierarchy::find(Path::new("/"))?;
    let count = args.count.unwrap_or(args.images.len());
    let Some(texts) = args.images.get(..count).filter(|texts| !texts.is_empty()) else {
        let what = format!("--images {count}, but {} images are named", args.images.len());
        return Err(Fail::new(Exit::Usage, what).into());
    };
    let Place { work, domain, _alone } = Place::prepare(&args.place, None, &say)?;
    let dir = work.join("density");
    fs::create_dir_all(&dir)?;
    // In this order: what a process still uses is not unmounted.
    cleanup::remove_cgroups(&hierarchy, CGROUP_PREFIX)?;
    variants::clean(&Variant::ALL.map(|variant| dir.join(variant.name())), &domain)?;
    let prepared = texts.iter().map(|text| share::prepare_one(text, &work, &domain, &say));
    let prepared = prepared.collect::<Result<_>>()?;
    let images = Images::new(&domain, &dir, prepared, args.profile_files)?;

    let signals = Cancellable::begin()?;
    let bench = Bench {
        hierarchy,
        images,
        own: OwnFiles::find()?,
        containers: args.containers,
        stop: signals.cancel.clone(),
    };
    shrinkers::grow(args.containers, &dir)?;
    let wanted = if args.variants.is_empty() { &Variant::ALL[..] } else { &args.variants };
    // Not measured: what the first processes and cgroups of a machine bring in belongs to no variant.
    // After one container only, the first variant of a guest had grown by 40 KiB more than its charge.
    bench.round(Variant::None, &mut *Variant::None.shape(&dir, &bench.images)?, &dir)?;
    let mut rounds = Vec::new();
    for round in 1..=args.rounds {
        for variant in wanted.iter().chain(&[Variant::None]) {
            let mut shape = variant.shape(&dir, &bench.images)?;
            let measured = bench.round(*variant, &mut *shape, &dir)?;
            say(&format!(
                "round {round} of {}, {}: kernel memory {} KiB per container, made in {:.1} s, \
                 removed in {:.1} s",
                args.rounds,
                variant.name(),
                measured.growth["kernel"] / i64::from(args.containers) / 1024,
                measured.create_seconds,
                measured.remove_seconds,
            ));
            rounds.push(measured);
        }
    }
    let report = Report::new(texts, args, rounds);
    let json = args.place.json.as_deref();
    let outcome = crate::report::finish(json, &work, &report, &report.table(), &report.goals());
    // After the figures, which took hours.
    crate::source::remove_tree(&dir)?;
    outcome
}

/// What all rounds have in common.
struct Bench {
    hierarchy: Hierarchy,
    images: Images,
    own: OwnFiles,
    containers: u32,
    stop: Cancel,
}

/// Containers that exist. Dropped in this order: a cgroup can go when its process has gone.
struct Containers {
    workers: Workers,
    cgroups: Vec<Cgroup>,
    /// The cgroup of this program while it makes the mounts.
    maker: Cgroup,
}

impl Bench {
    /// Makes all containers of a variant, measures, and removes them.
    fn round(&self, variant: Variant, shape: &mut dyn Shape, dir: &Path) -> Result<Round> {
        cold_start()?;
        self.own.warm()?;
        wait_for_quiet(SETTLE_MAX);
        let dying = dying::settled_count(&self.hierarchy, DYING_QUIET)?;
        let before = read_memory()?;
        let caches = slab_caches(Path::new("/"))?;
        let started = Instant::now();
        let mut containers = Containers {
            workers: Workers::new()?,
            cgroups: Vec::new(),
            maker: self.cgroup("maker")?,
        };
        let measured = (|| -> Result<_> {
            let (first, first_charged) = self.create(variant, shape, &mut containers, &before)?;
            let create_seconds = started.elapsed().as_secs_f64();
            let all = growth(&before, &read_memory()?);
            let charged = containers.charged()?;
            let mut slab_caches = slab_caches(Path::new("/"))?;
            for (name, bytes) in &caches {
                *slab_caches.entry(name.clone()).or_default() -= bytes;
            }
            slab_caches.retain(|_, bytes| *bytes != 0);
            cold_start()?;
            self.own.warm()?;
            let held = growth(&before, &read_memory()?);
            Ok((create_seconds, all, first, held, (charged, first_charged), slab_caches))
        })();
        let started = Instant::now();
        // Also after an error, and the processes first: they use the mounts.
        let ended = containers.workers.end();
        let unmounted = shape.unmount();
        drop(containers);
        let remove_seconds = started.elapsed().as_secs_f64();
        let left = cleanup::ensure_nothing_is_left(&self.hierarchy, CGROUP_PREFIX, dir);
        let taken_down = ended.map_err(Into::into).and(unmounted).and(left);
        let (create_seconds, growth, first, held, (charged, first_charged), slab_caches) =
            cleanup::result(&self.stop, measured, taken_down)?;
        let dying_cgroups = delta(dying, dying::settled_count(&self.hierarchy, DYING_QUIET)?);
        Ok(Round {
            variant,
            growth,
            first,
            held,
            charged,
            first_charged,
            slab_caches,
            create_seconds,
            remove_seconds,
            dying_cgroups,
        })
    }

    /// Returns how the machine grew by the first container of each image, and what these are charged.
    fn create(
        &self,
        variant: Variant,
        shape: &mut dyn Shape,
        containers: &mut Containers,
        before: &Memory,
    ) -> Result<(Kinds, Option<i64>)> {
        let images = self.images.profiles.len();
        let mut first = (Kinds::new(), None);
        let inside = containers.maker.enter()?;
        for number in 0..self.containers {
            self.stop.check()?;
            let image = number as usize % images;
            let cgroup = self.cgroup(&number.to_string())?;
            let root = shape.mount(image, number, variant.is_writable())?;
            let profile = match variant {
                Variant::None => &self.images.copied,
                _ => &self.images.profiles[image],
            };
            let log = Log {
                stat: match variant.looks() {
                    true => self.images.logs[image].stat.clone(),
                    // Each process does the same; here it knows these files.
                    false => profile.clone(),
                },
                write: match variant.is_writable() {
                    true => self.images.logs[image].write.clone(),
                    false => "/dev/null".into(),
                },
            };
            let started = containers.workers.start(&cgroup, &root, profile, Some(&log));
            containers.cgroups.push(cgroup);
            started?;
            if containers.cgroups.len() <= images {
                first = (growth(before, &read_memory()?), containers.charged()?);
            }
        }
        drop(inside);
        Ok(first)
    }

    fn cgroup(&self, name: &str) -> Result<Cgroup> {
        Ok(self.hierarchy.create(&format!("{CGROUP_PREFIX}{name}"))?)
    }
}

impl Containers {
    fn charged(&self) -> Result<Option<i64>> {
        let mut sum = Some(0);
        for cgroup in self.cgroups.iter().chain([&self.maker]) {
            let kernel = cgroup.charge()?.kernel;
            sum = sum.zip(kernel).map(|(sum, bytes)| sum + delta(0, bytes));
        }
        Ok(sum)
    }
}

/// Of the cgroups' names.
const CGROUP_PREFIX: &str = "cofolio-density-";

/// How long none of the dying cgroups has to go before they count.
const DYING_QUIET: Duration = Duration::from_millis(500);

/// One kind of the machine's memory, in bytes.
type Kind = fn(&Memory) -> u64;

fn growth(before: &Memory, after: &Memory) -> Kinds {
    let kernel =
        |memory: &Memory| memory.slab() + memory.percpu + memory.page_tables + memory.kernel_stack;
    let kinds: [(&str, Kind); 8] = [
        ("slab_reclaimable", |memory| memory.slab_reclaimable),
        ("slab_unreclaimable", |memory| memory.slab_unreclaimable),
        ("percpu", |memory| memory.percpu),
        ("page_tables", |memory| memory.page_tables),
        ("kernel_stack", |memory| memory.kernel_stack),
        ("page_cache", |memory| memory.cached.saturating_sub(memory.shmem)),
        ("buffers", |memory| memory.buffers),
        ("shmem", |memory| memory.shmem),
    ];
    let mut growth: Kinds =
        kinds.iter().map(|(name, kind)| (*name, delta(kind(before), kind(after)))).collect();
    growth.insert("kernel", delta(kernel(before), kernel(after)));
    // All kinds that the kernel shows or does not show, less the memory of processes.
    let used = delta(after.free, before.free) - delta(before.anon, after.anon);
    growth.insert("all_but_anon", used);
    growth
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Percpu memory and kernel stacks were left out of the kernel's memory, which is judged, and all
    /// tests passed.
    #[test]
    fn kernel_memory_is_of_all_kinds() {
        let before = Memory::default();
        let after = Memory {
            slab_reclaimable: 1,
            slab_unreclaimable: 20,
            percpu: 300,
            page_tables: 4000,
            kernel_stack: 50_000,
            cached: 800_000,
            shmem: 200_000,
            buffers: 7_000_000,
            ..before
        };
        let expected = [
            ("slab_reclaimable", 1),
            ("slab_unreclaimable", 20),
            ("percpu", 300),
            ("page_tables", 4000),
            ("kernel_stack", 50_000),
            ("kernel", 54_321),
            ("page_cache", 600_000),
            ("shmem", 200_000),
            ("buffers", 7_000_000),
            ("all_but_anon", 0),
        ];
        assert_eq!(growth(&before, &after), Kinds::from(expected));
    }
}
