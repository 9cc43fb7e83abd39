//! Announces a trim before it removes anything.

use cofolio_node::size::Size;
use cofolio_store::{Domain, Spared, TrimPlan};

use crate::context::{Context, short};
use crate::ui::{ago, human_size, plural};

/// Says which images go, and why others stay.
pub(crate) fn announce(context: &Context<'_>, domain: &Domain, plan: &TrimPlan, dry_run: bool) {
    let ui = context.ui;
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
        "{} stay: {} in use, by this or another store, {} pinned, {} used lately; the rest of the \
         images is not enough",
        human_size(plan.bytes_after),
        plural(spared(Spared::InUse), "image"),
        spared(Spared::Pinned),
        spared(Spared::Recent)
    ));
}
