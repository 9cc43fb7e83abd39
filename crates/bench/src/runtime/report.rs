//! What `bench runtime` makes of its runs: medians, the reduction and how far it could have gone.

use std::fmt::Write as _;

use cofolio_sys::cache::page_size;
use serde::Serialize;

use super::{
    super::{
        report::{Machine, median, mib, percent, signed},
        setup::{Shared, Unshared},
        source::About,
    },
    measure::{Run, whole},
};

/// The whole result, as `--json` writes it.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Version of this form.
    pub(super) format: u32,
    pub(super) tool: String,
    pub(super) command_line: Vec<String>,
    pub(super) machine: Machine,
    /// What started the containers.
    pub(super) runtime: String,
    pub(super) backend: String,
    pub(super) old: About,
    pub(super) new: About,
    pub(super) load: &'static str,
    /// How long the load was on when memory was looked at.
    pub(super) load_seconds: u64,
    pub(super) page_size: u64,
    pub(super) summary: Summary,
    pub(super) seconds: f64,
    pub(super) runs: Vec<Run>,
}

/// Medians of all setups.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) unshared: Medians,
    /// As `unshared` if the images have no layers in common.
    pub(super) layers_once: Medians,
    pub(super) shared: Medians,
    /// Of all memory.
    pub(super) memory: Reduction,
    /// Of page cache alone.
    pub(super) cache: Reduction,
}

/// In percent of what is used without sharing.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Reduction {
    /// What sharing saves.
    pub(super) reduction_percent: f64,
    /// The same against an engine that keeps common layers once.
    pub(super) over_layers_once_percent: f64,
    /// What the pages are that were in memory more than once: what sharing equal files has to go at. Where it also keeps the
    /// second reader from reading ahead, it saves a little more.
    pub(super) bound_percent: f64,
}

/// Medians of the runs of one setup, each figure for itself, both containers together, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Medians {
    /// Page cache, processes and kernel, with what mounting took, as all figures.
    pub(super) memory: i64,
    pub(super) cache: i64,
    pub(super) anon: i64,
    pub(super) kernel: i64,
    /// What mounting took, in a cgroup of its own.
    pub(super) mounting: i64,
    /// Pages of the images' files.
    pub(super) content: i64,
    /// Of these, the ones that another file with the same content has too.
    pub(super) content_again: i64,
    pub(super) machine_used: i64,
    pub(super) machine_unavailable: i64,
}

impl Summary {
    pub(super) fn of(runs: &[Run]) -> Self {
        let unshared = medians(runs, Unshared::NAME);
        let layers_once = match runs.iter().any(|run| run.setup == Unshared::LAYERS_ONCE) {
            true => medians(runs, Unshared::LAYERS_ONCE),
            false => unshared,
        };
        let shared = medians(runs, Shared::NAME);
        let reduction = |of: fn(&Medians) -> i64| {
            let [before, layers, after] = [&unshared, &layers_once, &shared].map(of);
            Reduction {
                reduction_percent: percent(before - after, before),
                over_layers_once_percent: percent(layers - after, layers),
                bound_percent: percent(unshared.content_again, before),
            }
        };
        let (memory, cache) = (reduction(|of| of.memory), reduction(|of| of.cache));
        Self { unshared, layers_once, shared, memory, cache }
    }
}

fn medians(runs: &[Run], setup: &str) -> Medians {
    let of = |figure: &dyn Fn(&Run) -> i64| {
        median(runs.iter().filter(|run| run.setup == setup).map(figure).collect())
    };
    let pages = |count: u64| signed(count * page_size());
    Medians {
        memory: of(&|run| signed(run.memory())),
        cache: of(&|run| signed(run.sum(|charge| charge.cache))),
        anon: of(&|run| signed(run.sum(|charge| charge.anon))),
        kernel: of(&|run| signed(run.sum(|charge| charge.kernel.unwrap_or(0)))),
        mounting: of(&|run| signed(whole(&run.mounting))),
        content: of(&|run| pages(run.content.resident)),
        content_again: of(&|run| pages(run.content.again)),
        machine_used: of(&|run| run.machine_used),
        machine_unavailable: of(&|run| run.machine_unavailable),
    }
}

/// The table, in the reference's form (image, sharing, memory, reduction), for all memory and for page cache alone.
pub(super) fn table(report: &Report) -> String {
    let Summary { unshared, layers_once, shared, memory, cache } = &report.summary;
    let names = [format!("{} &", report.old.name), report.new.name.clone()];
    let width = names.iter().map(String::len).max().unwrap_or(0).max(5);
    let mut text = format!("load: {}, {} s\n\n", report.load, report.load_seconds);
    let mut row = |cells: [&str; 8]| {
        let [name, sharing, numbers @ ..] = cells;
        let _ = write!(text, "{name:width$}  {sharing:19}");
        for (number, width) in numbers.iter().zip([12, 9, 12, 9, 9, 6]) {
            let _ = write!(text, "  {number:>width$}");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    };
    let less =
        |percent: f64| format!("{:+.1} %", if percent.abs() < 0.05 { 0.0 } else { -percent });
    let figures =
        |medians: &Medians| [medians.memory, medians.cache, medians.anon, medians.kernel].map(mib);
    row([
        "image",
        "page cache shared",
        "memory (MiB)",
        "reduction",
        "page cache",
        "reduction",
        "processes",
        "kernel",
    ]);
    let [all, files, processes, kernel] = figures(unshared);
    row([&names[0], "no", &all, "-", &files, "-", &processes, &kernel]);
    let [all, files, processes, kernel] = figures(layers_once);
    row(["", "(equal layers once)", &all, "", &files, "", &processes, &kernel]);
    let [all, files, processes, kernel] = figures(shared);
    let [of_all, of_files] = [memory, cache].map(|of| less(of.reduction_percent));
    row([&names[1], "yes", &all, &of_all, &files, &of_files, &processes, &kernel]);
    let [all, files] = [memory, cache].map(|of| less(of.over_layers_once_percent));
    row(["", "(over equal layers)", "", &all, "", &files, "", ""]);
    let [all, files] = [unshared.memory, unshared.cache].map(|of| mib(of - unshared.content_again));
    let [of_all, of_files] = [memory, cache].map(|of| less(of.bound_percent));
    row(["", "(equal pages once)", &all, &of_all, &files, &of_files, "", ""]);
    let _ = writeln!(
        text,
        "\nof the images' files {} MiB were in memory, {} MiB of them more than once; shared {} MiB",
        mib(unshared.content),
        mib(unshared.content_again),
        mib(shared.content)
    );
    let _ = writeln!(
        text,
        "mounting took {} MiB of that, and {} MiB where it is shared",
        mib(unshared.mounting),
        mib(shared.mounting)
    );
    let _ = writeln!(
        text,
        "the machine's free memory fell by {} MiB, and by {} MiB where it is shared",
        mib(unshared.machine_used),
        mib(shared.machine_used)
    );
    text
}
