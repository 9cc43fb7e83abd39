//! `cofolio-bench churn IMAGE…`: containers come and go. `turns`: does the daemon's ledger slow mounts
//! down? `short_lived`: do the containers leave cgroups behind?

mod short_lived;
mod turns;

use std::{
    collections::{BTreeSet, VecDeque},
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Result;
use cofolio_cli::interrupt::Cancellable;
use cofolio_image::pack::ImageContents;
use cofolio_node::{
    cgroup::{Cgroup, Hierarchy},
    commons::Commons,
    mount::{Access, MountRequest, Mounter, UmountOptions},
    run_dir::RunDir,
};
use cofolio_store::{
    Digest, Domain,
    task::{Cancel, Task},
};

use crate::Outcome;
use crate::cleanup::{self, for_all};
use crate::density::{
    variants::{self, Images},
    worker::{Log, Workers},
};
use crate::measure::allow_descriptors;
use crate::place::{Place, PlaceArgs};
use crate::share;
use crate::source::Unpacked;

/// Time of mounts and unmounts while containers come and go, with and without the ledger
///
/// Keeps so many containers, each a memory cgroup, a mount and a process that reads some files
/// through it. Again and again the oldest one ends and a new one begins. Every second one is
/// writable, and writes a log of 4 KiB. Measures each mount and unmount, in pairs of turns without
/// and with `cofolio serve`. The other one begins in every second pair. The daemon has a
/// configuration of its own: a period of 3 s, and the processor time that it needs. In a turn with
/// it, all containers are replaced after its first look at everything. Then mounts go on until two
/// more looks at all processes and at all objects have begun and ended. The report that the daemon
/// has then must have all containers that ran when it was made, but for those of the last period,
/// and 90 % of the files that they opened. Else the command fails. Needs root and a memory cgroup.
///
/// With --short-lived, the containers come and go one after the other, from dropped caches: first
/// with their images read ahead after each mount, as `[commons] warm = "all"` has it, and with
/// nothing else mounted. Then with each image read ahead once, before the first container, and kept
/// mounted by an idle mount. Each of these runs once where all containers read, and once where every
/// other one writes 4 KiB. At last the containers come without reading ahead. Each reads
/// --profile-files files, and the next of its image reads the files behind them. The containers
/// without reading ahead are the control, at most 1,000. Counts their memory cgroups that were removed and that the
/// kernel keeps because something is still charged to them. If 1,000 containers of the control
/// leave no more than 100, it writes its figures and fails: they show nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench churn corpus/out/redis/old corpus/out/redis/new
  cofolio-bench churn --short-lived --containers 10000 --profile-files 20 corpus/out/redis/old

Exit codes: 0 the goals are met, or are of more containers or rounds; 1 one is missed or not
proved, or the run shows nothing; others as for every command.")]
pub(crate) struct Args {
    /// OCI layout directories, OCI archives, `docker save` archives, or refs of the store
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// Containers that exist at any time, and that come in each turn; with --short-lived, that come and go in all
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    containers: u32,
    /// Count the cgroups that short-lived containers leave behind, instead
    #[arg(long)]
    short_lived: bool,
    /// Pairs of turns
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Files that each container reads
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    profile_files: usize,
    /// The program to run as the daemon [default: `cofolio` beside this one]
    #[arg(long, value_name = "FILE")]
    cofolio: Option<PathBuf>,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Of the names of the benchmark's cgroups.
const CGROUP_PREFIX: &str = "cofolio-churn-";

/// The cgroup of which those of all containers are children.
const CONTAINERS: &str = "cofolio-churn-containers";

/// Name of the commons, which are the benchmark's own.
const COMMONS: &str = "cofolio-churn-commons";

/// A container that has ended: its number, when it had begun, and when it was about to end.
type Gone = (usize, i64, i64);

/// Removed with its process first, which uses the rest.
struct Container {
    number: usize,
    /// When its process had done all it does, in seconds since 1970.
    began: i64,
    workers: Workers,
    target: PathBuf,
    cgroup: Cgroup,
}

/// What the beginning of a container took.
struct Begun {
    is_writable: bool,
    mount: Duration,
    /// To read its image ahead, of which most is resident.
    warm: Option<Duration>,
}

/// What a run was asked for.
struct Bench<'a> {
    args: &'a Args,
    work: &'a Path,
    cancel: &'a Cancel,
    say: &'a dyn Fn(&str),
}

/// The containers.
struct Churn<'a> {
    dir: PathBuf,
    hierarchy: Hierarchy,
    domain: &'a Domain,
    images: Images,
    /// What the containers of each image read, in turns.
    profiles: Vec<Vec<PathBuf>>,
    /// Objects that a container of each image opens, with the first profile.
    objects: Vec<u64>,
    next: usize,
    containers: VecDeque<Container>,
    gone: Vec<Gone>,
    /// With it, images are read ahead after each mount.
    commons: Option<Commons>,
    /// With `--short-lived`: a mount of each image that no container uses.
    idle: Vec<PathBuf>,
    /// Whether containers with a writable mount write 4 KiB.
    write: bool,
    /// With `--short-lived`: the parent cgroup of each container, kept to the end.
    cgroups_above: Option<Vec<Cgroup>>,
}

pub(super) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let Place { work, domain, _alone } = Place::prepare(&args.place, None, &say)?;
    let dir = work.join("churn");
    fs::create_dir_all(&dir)?;
    let hierarchy = Hierarchy::find(Path::new("/"))?;
    cleanup::remove_cgroups(&hierarchy, CGROUP_PREFIX)?;
    variants::clean(std::slice::from_ref(&dir), &domain)?;
    let prepared = args.images.iter().map(|text| share::prepare_one(text, &work, &domain, &say));
    let prepared: Vec<(Unpacked, _)> = prepared.collect::<Result<_>>()?;
    let objects_of = |(unpacked, _): &(Unpacked, _)| {
        let files = unpacked.listing.values().take(args.profile_files);
        let objects = files.filter(|it| it.content.size > 0).map(|it| it.object);
        objects.collect::<BTreeSet<_>>().len() as u64
    };
    let objects = prepared.iter().map(objects_of).collect();
    let files = if args.short_lived { usize::MAX } else { args.profile_files };
    let images = Images::new(&domain, &dir, prepared, files)?;
    let profiles = images.profiles.iter().map(|profile| match args.short_lived {
        true => short_lived::cut(profile, args.profile_files),
        false => Ok(vec![profile.clone()]),
    });
    let profiles = profiles.collect::<Result<_>>()?;
    // Each container has two ends of a pipe here.
    let containers = if args.short_lived { 1 } else { args.containers };
    allow_descriptors(u64::from(containers) * 2)?;
    let signals = Cancellable::begin()?;
    let mut churn = Churn {
        dir,
        hierarchy,
        domain: &domain,
        images,
        profiles,
        objects,
        next: 0,
        containers: VecDeque::new(),
        gone: Vec::new(),
        commons: None,
        idle: Vec::new(),
        write: true,
        cgroups_above: args.short_lived.then(Vec::new),
    };
    let bench = Bench { args, work: &work, cancel: &signals.cancel, say: &say };
    match args.short_lived {
        true => short_lived::run(&bench, &mut churn),
        false => turns::run(&bench, &mut churn),
    }
}

impl Churn<'_> {
    fn mounter(&self) -> Result<Mounter<'_>> {
        Ok(Mounter::new(self.domain, RunDir::of(self.domain.store())?, &ImageContents))
    }

    /// The images take turns, each with a read-only container and a writable one.
    fn image_of(&self, number: usize) -> usize {
        number / 2 % self.images.digests.len()
    }

    fn begin(&mut self) -> Result<Begun> {
        let number = self.next;
        self.next += 1;
        let image = self.image_of(number);
        let target = self.dir.join(number.to_string());
        fs::create_dir_all(&target)?;
        let is_writable = !number.is_multiple_of(2);
        let access = if is_writable { Access::Writable } else { Access::ReadOnly };
        let digest: Digest = self.images.digests[image];
        let request = MountRequest { access, ..MountRequest::new(digest, target.clone()) };
        let mut cgroup = self.hierarchy.create(&format!("{CONTAINERS}/{number}"))?;
        if let Some(above) = &mut self.cgroups_above {
            above.push(cgroup);
            cgroup = self.hierarchy.create(&format!("{CONTAINERS}/{number}/container"))?;
        }
        let workers = Workers::new()?;
        let started = Instant::now();
        self.mounter()?.mount(&request)?;
        let mount = started.elapsed();
        let warm = self.commons.as_ref().map(|it| self.warm(it, &digest)).transpose()?;
        self.containers.push_back(Container { number, began: i64::MAX, workers, target, cgroup });
        let profiles = &self.profiles[image];
        let of_its_image = number / (2 * self.images.digests.len()) * 2 + number % 2;
        let profile = profiles[of_its_image % profiles.len()].clone();
        // The list is the benchmark's own, and the kernel may have reclaimed it: the container, which
        // reads it, would be charged for it.
        fs::read(&profile)?;
        let write = match is_writable && self.write {
            true => self.images.logs[image].write.clone(),
            false => "/dev/null".into(),
        };
        let log = Log { stat: profile.clone(), write };
        if let Some(Container { workers, target, cgroup, began, .. }) = self.containers.back_mut() {
            workers.start(cgroup, target, &profile, Some(&log))?;
            *began = cofolio_store::now();
        }
        Ok(Begun { is_writable, mount, warm })
    }

    /// Says how long it took.
    fn warm(&self, commons: &Commons, image: &Digest) -> Result<Duration> {
        let (run, started) = (RunDir::of(self.domain.store())?, Instant::now());
        commons.warm(self.domain, &run, image, None, &Task::default())?;
        Ok(started.elapsed())
    }

    /// Mounts each image for as long as the containers come and go.
    fn mount_idle(&mut self) -> Result<()> {
        for (number, digest) in self.images.digests.iter().enumerate() {
            let target = self.dir.join(format!("idle-{number}"));
            fs::create_dir_all(&target)?;
            self.mounter()?.mount(&MountRequest::new(*digest, target.clone()))?;
            self.idle.push(target);
        }
        Ok(())
    }

    /// Says how long the unmount took, if there was a container.
    fn end_oldest(&mut self) -> Result<Option<Duration>> {
        let Some(oldest) = self.containers.pop_front() else { return Ok(None) };
        self.gone.push((oldest.number, oldest.began, cofolio_store::now()));
        self.end(oldest).map(Some)
    }

    fn end(&self, mut container: Container) -> Result<Duration> {
        let ended = container.workers.end();
        let took = self.umount(&container.target)?;
        ended?;
        Ok(took)
    }

    fn umount(&self, target: &Path) -> Result<Duration> {
        let started = Instant::now();
        let umounted = self.mounter()?.umount(target, &UmountOptions::default());
        let took = started.elapsed();
        if umounted.is_err() {
            // It must not stay when the benchmark ends.
            let options = UmountOptions { force: true, ..Default::default() };
            let _ = self.mounter()?.umount(target, &options);
        }
        umounted?;
        fs::remove_dir(target)?;
        Ok(took)
    }

    /// Ends all containers, and removes the standing cgroups: had the commons been removed before
    /// the count of dying cgroups, they would be one. Fails if anything is left.
    fn end_all(&mut self) -> Result<()> {
        let containers = std::mem::take(&mut self.containers);
        let ended = for_all(containers, |container| self.end(container).map(drop));
        let idle = std::mem::take(&mut self.idle);
        let ended = ended.and(for_all(idle, |target| self.umount(&target).map(drop)));
        self.cgroups_above.iter_mut().for_each(Vec::clear);
        let removed = for_all([COMMONS, CONTAINERS], |it| Ok(self.hierarchy.remove(it)?));
        ended.and(removed).and(cleanup::ensure_nothing_is_left(
            &self.hierarchy,
            CGROUP_PREFIX,
            &self.dir,
        ))
    }
}
