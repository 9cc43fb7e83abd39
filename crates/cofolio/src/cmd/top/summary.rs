//! The lines over and below the tables: totals, ages, what is unknown.

use cofolio_node::ledger::Report;

use super::rows::duration;
use crate::ui::{human_size, printable};

/// What all trust domains add up to, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) resident: u64,
    pub(super) used: u64,
    pub(super) shared: u64,
    pub(super) saved: u64,
}

impl Totals {
    pub(super) fn of(report: &Report) -> Self {
        report.domains.iter().fold(Self::default(), |sum, domain| Self {
            resident: sum.resident + domain.resident_bytes,
            used: sum.used + domain.used_bytes,
            shared: sum.shared + domain.shared_bytes,
            saved: sum.saved + domain.saved_bytes,
        })
    }

    /// A part of a line for each, the most important first.
    pub(super) fn parts(&self) -> Vec<String> {
        [
            ("resident", self.resident),
            ("saved", self.saved),
            ("shared", self.shared),
            ("used", self.used),
        ]
        .map(|(name, bytes)| format!("{name} {}", human_size(bytes)))
        .into()
    }
}

/// The page cache of the whole machine.
pub(super) fn page_cache(report: &Report) -> String {
    format!("page cache {}", human_size(report.machine.page_cache_bytes))
}

/// Why it is unknown, for a terminal.
pub(super) fn warnings(report: &Report) -> impl Iterator<Item = String> {
    report.warnings.iter().map(|warning| printable(warning.as_bytes()))
}

/// What no account has, and how old the figures are at `now`.
pub(super) fn caveats(report: &Report, now: i64) -> Vec<String> {
    if report.time == 0 {
        return vec!["no figures yet".to_owned()];
    }
    let since = u64::try_from(now.saturating_sub(report.time)).unwrap_or(0);
    let age = |seconds: u32| duration(since.saturating_add(u64::from(seconds)));
    let mut parts = vec![
        format!("residency {} old", age(report.residency_age_seconds)),
        format!("mappings {} old", age(report.processes_age_seconds)),
    ];
    let unknown = [
        ("openers", report.unknown.openers),
        ("overflows", report.unknown.overflows),
        ("processes", report.unknown.processes),
        ("images", report.unknown.images),
        ("objects", report.unknown.objects),
        ("files", report.unknown.files),
        ("mounts", report.unknown.mounts),
    ];
    let unknown = unknown.iter().filter(|(_, count)| *count > 0);
    let unknown: Vec<String> = unknown.map(|(what, count)| format!("{what} {count}")).collect();
    match unknown.is_empty() {
        true => parts.push("unknown: none".to_owned()),
        // What is missing in the figures is more important than their age.
        false => parts.insert(0, format!("unknown: {}", unknown.join(", "))),
    }
    parts
}
