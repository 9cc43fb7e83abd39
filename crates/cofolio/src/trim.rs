//! Trimming a trust domain to a size or an age: for `gc --to`, and after an import that leaves it larger
//! than the configuration allows.

use std::time::{SystemTime, UNIX_EPOCH};

use cofolio_image::compose::contents::ImageContents;
use cofolio_store::{Digest, Domain, GcOptions, GcReport, Spared, TrimOptions, TrimPlan};

use crate::context::{Context, short};
use crate::exit;
use crate::ui::{ago, human_size, plural};
use cofolio_node::config::Size;

const DAY_SECONDS: i64 = 86_400;

/// What is wanted.
#[derive(Debug, Default)]
pub(crate) struct Goal {
    pub(crate) size: Option<Size>,
    pub(crate) older_than_days: Option<u32>,
    /// Images that stay in any case.
    pub(crate) keep: Vec<Digest>,
}

/// How garbage is collected on this machine now.
pub(crate) fn gc_options(dry_run: bool, wait: bool) -> GcOptions {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    GcOptions { dry_run, wait, now: now(), boot_id: boot_id.map(|id| id.trim().to_owned()) }
}

/// Says what goes, and removes it.
pub(crate) fn trim(
    context: &Context<'_>,
    domain: &Domain,
    goal: &Goal,
    gc: GcOptions,
) -> anyhow::Result<(TrimPlan, GcReport)> {
    let mounter = context.mounter(domain);
    let days_ago = |days: u32| now() - i64::from(days) * DAY_SECONDS;
    let keep_days = context.config.config.store.limit.keep_days;
    let options = TrimOptions {
        size: goal.size.map(|size| size.0),
        unused_since: goal.older_than_days.map(days_ago),
        keep_since: (keep_days > 0).then(|| days_ago(keep_days)),
        keep: goal.keep.clone(),
        gc,
    };
    let live = || Ok(mounter.live_images()?);
    let tell = |plan: &TrimPlan| announce(context, domain, plan, options.gc.dry_run);
    Ok(domain.trim(&ImageContents, &live, &options, &tell)?)
}

/// Trims the domain after an import, if the configuration limits it and it is larger. The import is done
/// and stays done: what goes wrong here is told on standard error, whatever the output, and changes no exit code.
pub(crate) fn after_import(
    context: &Context<'_>,
    domain: &Domain,
    imported: &Digest,
) -> Option<TrimPlan> {
    let size = context.config.config.store.limit.size?;
    let trimmed = domain.bytes().map_err(anyhow::Error::new).and_then(|bytes| {
        if bytes <= size.0 {
            return Ok(None);
        }
        let goal = Goal { size: Some(size), keep: vec![*imported], ..Goal::default() };
        trim(context, domain, &goal, gc_options(false, false)).map(Some)
    });
    match trimmed {
        Ok(trimmed) => trimmed.map(|(plan, _)| plan),
        Err(error) => {
            let error = error.context("the store may be over its limit and was not trimmed");
            exit::report(&error, context.ui);
            None
        }
    }
}

fn announce(context: &Context<'_>, domain: &Domain, plan: &TrimPlan, dry_run: bool) {
    let ui = context.ui;
    if ui.json {
        return;
    }
    let of = plan.size.map_or_else(String::new, |size| format!(", to take {}", Size(size)));
    ui.note(format!(
        "domain `{}` takes {}{of}; {} of it nothing keeps",
        domain.name(),
        human_size(plan.bytes_before),
        human_size(plan.garbage_bytes)
    ));
    for victim in &plan.victims {
        let verb = if dry_run { "would remove" } else { "removing" };
        ui.note(format!(
            "{verb} {} ({}), last used {}: {}",
            victim.refs.join(", "),
            short(&victim.image),
            ago(victim.last_used),
            human_size(victim.bytes)
        ));
    }
    if plan.is_enough() {
        return;
    }
    let spared = |why| plan.spared.iter().filter(|(_, spared)| *spared == why).count() as u64;
    ui.note(format!(
        "{} stay: {} in use, {} pinned, {} used lately; the rest of the images is not enough",
        human_size(plan.bytes_after),
        plural(spared(Spared::InUse), "image"),
        spared(Spared::Pinned),
        spared(Spared::Recent)
    ));
}

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    i64::try_from(now).unwrap_or(0)
}
