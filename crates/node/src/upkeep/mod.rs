//! Upkeep of a trust domain: cleans up after killed processes, collects garbage, rewrites segments
//! that are hardly used, and finds bases for images that share layers.

pub mod bases;
pub mod repair;

use crate::settings::{Backend, DomainSettings as _};
use cofolio_image::error::ImportError;
use cofolio_image::pack::ImageContents;
use cofolio_image::pack::{self, PackError, RewriteReport};
use cofolio_store::task::{Cancelled, Task};
use cofolio_store::{
    Digest, Domain, Error, GcOptions, GcReport, SizesReport, TrimOptions, TrimPlan, now,
};

use crate::config::Limit;
use crate::container::{Containers, RunError};
use crate::mount::{MountError, Mounter};
use crate::run_dir::RunDir;
use crate::vm::{Machines, VmError};
use bases::BasesReport;

const DAY_SECONDS: i64 = 86_400;

/// What upkeep is to do.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Only say what would be done.
    pub dry_run: bool,
    /// Wait for imports that are being published; else [`Error::Busy`].
    pub wait: bool,
    /// Remove images, least recently used first, until the domain takes at most this many bytes.
    pub size: Option<u64>,
    /// Remove images that were not used for so many days.
    pub older_than_days: Option<u32>,
}

/// What upkeep did, or would do.
#[derive(Debug, Default)]
pub struct Report {
    /// What is left for the next upkeep, in words.
    pub failed: Vec<String>,
    /// The images that went for a size or an age, if one was asked for.
    pub trim: Option<TrimPlan>,
    /// What was removed.
    pub gc: GcReport,
    /// Segments that were written anew.
    pub rewritten: RewriteReport,
    /// Images that got a base.
    pub bases: BasesReport,
    /// What the look at the sizes of all objects found, if this was the first upkeep of this boot.
    pub sizes: Option<SizesReport>,
}

/// Why upkeep ended early. What was done until then stays done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpkeepError {
    /// Containers could not be looked at.
    #[error(transparent)]
    Container(#[from] RunError),
    /// Virtual machines could not be looked at.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// Mounts could not be looked at.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// Segments could not be listed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// A source could not be read.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] Error),
    /// The caller cancelled it.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
}

/// Upkeep of one trust domain.
#[derive(Debug)]
pub struct Upkeep<'a> {
    domain: &'a Domain,
    run: RunDir,
    limit: Limit,
}

impl<'a> Upkeep<'a> {
    /// `run` is the run directory of the domain's store.
    pub fn new(domain: &'a Domain, run: RunDir, limit: Limit) -> Self {
        Self { domain, run, limit }
    }

    fn mounter(&self) -> Mounter<'a> {
        Mounter::new(self.domain, self.run.clone(), &ImageContents)
    }

    fn machines(&self) -> Machines<'a> {
        Machines::new(self.domain, self.run.clone())
    }

    /// Does all of it; `announce` hears which images go before they do. After an error, `report` has
    /// the steps that were complete.
    pub fn run(
        &self,
        options: &Options,
        announce: &dyn Fn(&TrimPlan),
        report: &mut Report,
        task: &Task,
    ) -> Result<(), UpkeepError> {
        let mounter = self.mounter();
        // What killed processes left would count as in use.
        if !options.dry_run {
            Containers::new(self.mounter()).reconcile(&mut report.failed)?;
            self.machines().reconcile(&mut report.failed)?;
            report.failed.extend(mounter.reconcile()?.failed);
        }
        task.check()?;
        let gc = gc_options(options.dry_run, options.wait, task);
        let live = || Ok(mounter.live_images()?);
        if options.size.is_some() || options.older_than_days.is_some() {
            let (plan, removed) = self.trim(options, Vec::new(), &gc, announce)?;
            (report.trim, report.gc) = (Some(plan), removed);
        } else {
            report.gc = self.domain.gc(&ImageContents, &live, &gc)?;
        }
        let in_use = [mounter.live_images()?, self.machines().live_images()?].concat();
        report.rewritten = pack::rewrite(self.domain, &in_use, options.dry_run, task)?;
        if options.dry_run {
            return Ok(());
        }
        if !report.rewritten.images.is_empty() {
            match self.domain.gc(&ImageContents, &live, &gc) {
                Ok(after) => {
                    report.gc.segments += after.segments;
                    report.gc.segment_bytes += after.segment_bytes;
                    report.gc.kept_segments = after.kept_segments;
                }
                // The next one finds that nothing needs them.
                Err(Error::Busy { .. }) if !options.wait => {}
                Err(error) => return Err(error.into()),
            }
        }
        report.sizes = self.examine_sizes(gc.boot_id.as_deref(), task)?;
        if self.domain.backend()? == Backend::Overlay {
            report.bases = bases::find(self.domain, task)?;
        }
        Ok(())
    }

    /// Checks the size of every object once per boot, since mounts skip protected ones. On a thread
    /// of low priority; if none can be had, the next upkeep does it.
    fn examine_sizes(
        &self,
        boot_id: Option<&str>,
        task: &Task,
    ) -> Result<Option<SizesReport>, UpkeepError> {
        let Some(boot_id) = boot_id else { return Ok(None) };
        if self.domain.sizes()?.is_some_and(|sizes| sizes.boot_id == boot_id) {
            return Ok(None);
        }
        let look = || {
            // Both are requests to the kernel's schedulers, for this thread.
            let _ = cofolio_sys::priority::set_idle_io();
            let _ = rustix::process::nice(19);
            self.domain.examine_sizes(&ImageContents, boot_id, &task.cancel)
        };
        let looked = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, look).ok()?;
            Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        Ok(looked.transpose()?)
    }

    /// Trims the domain if it is over the configured limit, but never `imported`. `None` if there
    /// was nothing to do. Does not wait for imports that are being published.
    pub fn trim_to_limit(
        &self,
        imported: Digest,
        announce: &dyn Fn(&TrimPlan),
        task: &Task,
    ) -> Result<Option<TrimPlan>, UpkeepError> {
        let Some(size) = self.limit.size.map(|size| size.0) else { return Ok(None) };
        if self.domain.bytes()? <= size {
            return Ok(None);
        }
        let options = Options { size: Some(size), ..Options::default() };
        let gc = gc_options(false, false, task);
        Ok(Some(self.trim(&options, vec![imported], &gc, announce)?.0))
    }

    fn trim(
        &self,
        options: &Options,
        keep: Vec<Digest>,
        gc: &GcOptions,
        announce: &dyn Fn(&TrimPlan),
    ) -> Result<(TrimPlan, GcReport), UpkeepError> {
        let mounter = self.mounter();
        let days_ago = |days: u32| now() - i64::from(days) * DAY_SECONDS;
        let keep_days = self.limit.keep_days;
        let options = TrimOptions {
            size: options.size,
            unused_since: options.older_than_days.map(days_ago),
            keep_since: (keep_days > 0).then(|| days_ago(keep_days)),
            keep,
            gc: gc.clone(),
        };
        let live = || Ok(mounter.live_images()?);
        Ok(self.domain.trim(&ImageContents, &live, &options, announce)?)
    }
}

fn gc_options(dry_run: bool, wait: bool, task: &Task) -> GcOptions {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let boot_id = boot_id.map(|id| id.trim().to_owned());
    GcOptions { dry_run, wait, boot_id, cancel: task.cancel.clone() }
}
