//! One trust domain: its guests, and the pools and images that they have in common.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cofolio_shim::protocol::PAGE;

use super::guest::{Guest, Used};
use super::image::Images;
use super::plan::{Bounds, Input, plan};
use super::pool::{POOL_PAGES, Pools};
use super::scan::hash_of;
use super::{MergePolicy, MergeReport, Merging, Target, lock, next};

/// Pages of one piece of work of a hashing thread.
const PART_PAGES: usize = 4096;
/// Time between an error of a guest and the next try. It doubles with each further error, because a
/// shim that does not answer delays the others.
const RETRY: Duration = Duration::from_secs(30);
const RETRY_MAX: Duration = Duration::from_secs(3600);
/// With more pools than this, the survey combines small ones.
const POOLS_MANY: usize = 128;
/// Passes from one survey to the next.
const SURVEY: u64 = 6;

/// A trust domain.
#[derive(Debug)]
pub(super) struct Domain {
    policy: MergePolicy,
    proc: PathBuf,
    zeros: NonZeroU64,
    pools: Pools,
    images: Images,
    guests: BTreeMap<String, Guest>,
    failed: HashMap<String, Failed>,
    passes: u64,
    /// Failures of this pass.
    said: Vec<String>,
}

/// A guest that has failed.
#[derive(Debug)]
struct Failed {
    /// When it is tried again.
    until: Instant,
    waits: Duration,
    why: String,
}

/// Guests, by name, and why they failed.
type Errors = Vec<(String, io::Error)>;

impl Domain {
    /// With nothing merged yet.
    pub(super) fn new(policy: MergePolicy) -> Self {
        Self {
            policy,
            proc: PathBuf::from("/proc"),
            zeros: hash_of(&[0; PAGE]),
            pools: Pools::default(),
            images: Images::default(),
            guests: BTreeMap::new(),
            failed: HashMap::new(),
            passes: 0,
            said: Vec::new(),
        }
    }

    /// One pass. Returns its report and its failures.
    pub(super) fn pass(&mut self, targets: Vec<Target>) -> (MergeReport, Vec<String>) {
        self.refresh(targets);
        self.passes += 1;
        let (mut hashed, mut new, mut failed) = (0, 0, Vec::new());
        // Operators can add devices to a machine that runs.
        for (name, guest) in &mut self.guests {
            failed.extend(guest.refresh(&self.proc).err().map(|error| (name.clone(), error)));
        }
        self.drop_failed(std::mem::take(&mut failed));
        match self.merge(&mut failed) {
            Ok(done) => (hashed, new) = done,
            Err(error) => self.said.push(format!("no pool could be made: {error}")),
        }
        if self.passes.is_multiple_of(SURVEY) {
            self.survey(&mut failed);
        }
        self.drop_failed(failed);
        let report = MergeReport { hashed_pages: hashed, new_pool_pages: new, ..self.report() };
        (report, std::mem::take(&mut self.said))
    }

    /// Present figures of guests and pools.
    pub(super) fn report(&self) -> MergeReport {
        let guests = self.guests.iter().map(|(name, guest)| (name.clone(), guest.merging.clone()));
        let failed = self.failed.iter().filter(|(name, _)| !self.guests.contains_key(*name));
        let refused = failed.map(|(name, it)| {
            (name.clone(), Merging { refusal: Some(it.why.clone()), ..Merging::default() })
        });
        let guests = guests.chain(refused).collect();
        MergeReport { pool_bytes: self.pools.bytes(), guests, ..MergeReport::default() }
    }

    fn drop_failed(&mut self, failed: Errors) {
        for (name, error) in failed {
            // A guest that has ended has not failed.
            let guest = self.guests.remove(&name);
            if guest.is_some_and(|guest| self.proc.join(guest.pid.to_string()).exists()) {
                self.fail(name, &error);
            }
        }
    }

    fn fail(&mut self, name: String, error: &io::Error) {
        self.said.push(format!("virtual machine {name} is not merged: {error}"));
        let waits = self.failed.get(&name).map_or(RETRY, |it| (it.waits * 2).min(RETRY_MAX));
        let (until, why) = (Instant::now() + waits, error.to_string());
        self.failed.insert(name, Failed { until, waits, why });
    }

    /// Begins with new guests, and forgets those that have ended.
    fn refresh(&mut self, targets: Vec<Target>) {
        let pids: HashMap<&str, u32> = targets.iter().map(|it| (&*it.name, it.pid)).collect();
        let lives = |pid: u32| self.proc.join(pid.to_string()).exists();
        self.guests.retain(|name, guest| pids.get(&**name) == Some(&guest.pid));
        self.pools.retain_living(lives);
        self.images.retain_living(lives);
        let now = Instant::now();
        // A guest without errors for as long as it last waited starts again with `RETRY`.
        self.failed.retain(|name, it| pids.contains_key(&**name) && now < it.until + it.waits);
        for target in targets {
            let waits = self.failed.get(&target.name).is_some_and(|it| now < it.until);
            if waits || self.guests.contains_key(&target.name) {
                continue;
            }
            match Guest::begin(&self.proc, &target, &mut self.pools, &mut self.images) {
                Ok(guest) => _ = self.guests.insert(target.name, guest),
                Err(error) => self.fail(target.name, &error),
            }
        }
    }

    /// Merges unchanged pages. Returns the numbers of hashed pages and of pages in new pools.
    fn merge(&mut self, failed: &mut Errors) -> io::Result<(u64, u64)> {
        let (policy, zeros) = (self.policy, self.zeros);
        let hashed = self.look_and_hash(failed);
        // The plan would be that of the last pass.
        if hashed == 0 {
            return Ok((0, 0));
        }
        self.said.extend(self.images.look(zeros));
        let guests = self.guests.values();
        let inputs =
            guests.map(|guest| Input { hashes: guest.pages.hashes(), runs_max: guest.runs_left() });
        let inputs: Vec<_> = inputs.collect();
        let bounds = Bounds {
            run_min: policy.run_min,
            blocks: policy.blocks,
            zeros,
            pool_pages: POOL_PAGES,
        };
        let (pools, images) = (&self.pools.slots, &self.images.slots);
        let plan = plan(&inputs, pools, images, self.pools.next(), &bounds);
        self.fill_pools(&plan.new)?;
        let mut work = Vec::new();
        for ((name, guest), runs) in self.guests.iter_mut().zip(plan.runs) {
            match guest.give(&runs, &mut self.pools, &self.images) {
                Ok(()) => work.push((name, guest, runs)),
                Err(error) => failed.push((name.clone(), error)),
            }
        }
        on_threads(policy.threads, work, failed, |(name, guest, runs)| {
            guest.merge(&runs).map_err(|error| (name.clone(), error))
        });
        Ok((hashed, plan.new.len() as u64))
    }

    /// Copies new contents of pools from the guests that have them.
    fn fill_pools(&mut self, new: &[(usize, usize)]) -> io::Result<()> {
        let guests: Vec<&Guest> = self.guests.values().collect();
        let read = |first: usize, content: &mut [u8]| {
            let mut number = 0;
            let new = &new[first..first + content.len() / PAGE];
            // Pages one behind the other are read at once.
            let is_next =
                |(guest, page): &_, (other, next): &_| guest == other && page + 1 == *next;
            for run in new.chunk_by(is_next) {
                let content = &mut content[number * PAGE..(number + run.len()) * PAGE];
                let (guest, page) = run[0];
                // The guest has ended or discarded the page. The shims compare, so any content is
                // safe.
                if guests[guest].pages.read(page, content).is_err() {
                    content.fill(0);
                }
                number += run.len();
            }
        };
        self.pools.add(new.len(), self.policy.threads, read)
    }

    fn look_and_hash(&mut self, failed: &mut Errors) -> u64 {
        let mut parts = Vec::new();
        let mut hashed = 0;
        for (name, guest) in &mut self.guests {
            match guest.pages.look() {
                Ok(()) => {
                    hashed += guest.pages.due() as u64;
                    parts.extend(guest.pages.parts(PART_PAGES).into_iter().map(|it| (name, it)));
                }
                Err(error) => failed.push((name.clone(), error)),
            }
        }
        on_threads(self.policy.threads, parts, failed, |(name, part)| {
            part.hash().map_err(|error| (name.clone(), error))
        });
        hashed
    }

    /// Gives up unused pools, and converts pages of wasted pools and pages that guests have written
    /// to.
    fn survey(&mut self, failed: &mut Errors) {
        let mut used = Used::new();
        let mut surveys = Vec::new();
        for (name, guest) in &mut self.guests {
            match guest.survey(&self.pools, &mut used) {
                Ok(survey) => surveys.push((name, guest, survey)),
                // It may use any pool.
                Err(error) => return failed.push((name.clone(), error)),
            }
        }
        let many = self.pools.pools.len() > POOLS_MANY;
        let can_all = surveys.iter().all(|(_, guest, _)| guest.can_convert());
        let is_wasted =
            |inode: u64| can_all && used.get(&inode).is_some_and(|it| it.is_wasted(many));
        // Otherwise the converted pages would be merged with the same pool again.
        self.pools.retire(is_wasted);
        for (name, guest, survey) in &mut surveys {
            if let Err(error) = guest.convert(&self.proc, survey, &is_wasted, self.policy.run_min) {
                failed.push(((*name).clone(), error));
            }
        }
        let is_used = |inode: u64| used.get(&inode).is_some_and(|it| it.count() > 0);
        let unused = self.pools.take(|pool| !is_used(pool.inode));
        for (name, guest) in &mut self.guests {
            if let Err(error) = guest.forget(&unused) {
                failed.push((name.clone(), error));
            }
        }
    }
}

/// Does all work on several threads.
fn on_threads<T: Send>(
    threads: usize,
    work: Vec<T>,
    failed: &mut Errors,
    each: impl Fn(T) -> Result<(), (String, io::Error)> + Sync,
) {
    let threads = threads.min(work.len());
    let (work, failed) = (Mutex::new(work), Mutex::new(failed));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(one) = next(&work) {
                    if let Err(error) = each(one) {
                        lock(&failed).push(error);
                    }
                }
            });
        }
    });
}
