//! The figures of all engines: how many guests fit, the goals, and the tables.

use cofolio_node::vm::Accel;
use serde::Serialize;

use super::super::{executed_by, mark};
use super::beside::Beside;
use super::cycles::{Cpu, Cycles};
use super::watch::{Event, Held, Removal, Watched};
use super::{Args, CYCLE, CYCLES, Engine, HOLD, SCALE};
use crate::goals::Goals;
use crate::median::{highest, median};

/// Memory of the host of 2017.
const HOST_BYTES: f64 = 230e9;
/// Guests are independent, so all together take their mean and this many standard deviations, at
/// most.
const DEVIATIONS: f64 = 3.0;
/// How many virtual machines fitted in 2017: raw, with KSM, with both.
const FITTED_2017: [u32; 3] = [67, 73, 516];
/// Guests of 2017 filled 4 % of their memory on average. Those that fill less would be easier to
/// pack.
const LOAD: [f64; 2] = [0.03, 0.08];

/// What was measured of an engine.
pub(super) struct Measured {
    pub(super) engine: Engine,
    pub(super) watched: Watched,
    /// Processor time of the cycles.
    pub(super) cpu: Cpu,
    /// The same of the idle time, and how many seconds that was.
    pub(super) idle: Cpu,
    pub(super) idle_seconds: f64,
    /// Bytes that pulses returned in the cycles.
    pub(super) pulsed: u64,
}

/// Result of an engine. Figures of a time are of the cycles, but for the first one.
#[derive(Debug, Serialize)]
pub(super) struct Ran {
    pub(super) engine: Engine,
    /// Mean and highest size of a guest's files, as a share of its memory.
    load: f64,
    peak: f64,
    /// Mean and standard deviation of the host memory of one guest; guests share pools equally.
    pub(super) mean: f64,
    deviation: f64,
    lowest: f64,
    highest: f64,
    /// Guests that fit in [`HOST_BYTES`], computed from the mean and the deviation.
    pub(super) fit: f64,
    /// Mean of one guest with everything that it costs beside its memory, and how many of these
    /// fit.
    mean_with_all: f64,
    fit_with_all: f64,
    /// Processor time of all cycles, of so many seconds.
    pub(super) cpu: Cpu,
    seconds: f64,
    /// The same when all guests are idle.
    idle: Cpu,
    idle_seconds: f64,
    /// Bytes that pulses have returned in all cycles.
    pub(super) pulsed: u64,
    /// Of the daemon alone.
    pub(super) cycles: Option<Cycles>,
    removals: Vec<Removal>,
    /// From the beginning to the end, also when all guests are idle.
    held: Vec<Held>,
    beside: Vec<Beside>,
    said: Vec<Event>,
}

#[derive(Debug, Serialize)]
pub(super) struct Figures {
    pub(super) guests: u32,
    pub(super) memory_mib: u64,
    pub(super) cycle: u64,
    /// Who executes the guests' instructions. An emulator distorts times and processor times.
    pub(super) accel: Accel,
    pub(super) cycles_per_second: Option<f64>,
    pub(super) runs: Vec<Ran>,
}

impl Ran {
    pub(super) fn new(args: &Args, measured: Measured) -> Self {
        let Measured { engine, watched, cpu, idle, idle_seconds, pulsed } = measured;
        let seconds = (args.cycle * args.cycles) as f64;
        let from = args.cycle as f64;
        let is_counted = |at: f64| at >= from && at <= seconds;
        let counted = || watched.held.iter().filter(|held| is_counted(held.seconds));
        let totals: Vec<f64> = counted().map(Held::bytes).collect();
        let guests = f64::from(args.guests);
        let memory = args.memory << 20;
        let shared = |held: &Held| (held.pools as f64 - held.saved as f64) / guests;
        let of_guests: Vec<f64> = counted()
            .flat_map(|held| held.guests.iter().map(|bytes| *bytes as f64 + shared(held)))
            .collect();
        let (mean, deviation) = mean_and_deviation(&of_guests);
        let beside: Vec<Beside> =
            watched.beside.iter().filter(|it| is_counted(it.seconds)).copied().collect();
        // The sum of all parts, or the fall of the host's free memory: the larger one, so that
        // nothing is left out.
        let [items, of_host] = [Beside::items, Beside::of_host].map(|it| Beside::mean(&beside, it));
        let mean_with_all = items.max(of_host) / guests;
        let (load, most) = watched.load(from, seconds);
        Self {
            engine,
            load: load / guests / memory as f64,
            peak: most / memory as f64,
            mean,
            deviation,
            lowest: totals.iter().copied().fold(f64::INFINITY, f64::min),
            highest: totals.iter().copied().fold(0.0, f64::max),
            fit: fit(mean, deviation),
            mean_with_all,
            fit_with_all: fit(mean_with_all, deviation),
            cpu,
            seconds,
            idle,
            idle_seconds,
            pulsed,
            cycles: None,
            removals: watched.removals(memory),
            held: watched.held,
            beside,
            said: watched.said,
        }
    }

    fn of(&self, what: &str, figure: impl Fn(&Removal) -> f64) -> impl Iterator<Item = f64> {
        self.removals.iter().filter(move |it| it.what == what).map(figure)
    }

    /// The highest figure of its removals of files, or of single pages.
    fn worst(&self, what: &str, figure: fn(&Removal) -> f64) -> f64 {
        highest(self.of(what, figure))
    }

    fn idle_share(&self) -> f64 {
        self.idle.engine / self.idle_seconds
    }
}

impl Figures {
    /// Computes the cycles of a recycled page, less those of free page reporting.
    pub(super) fn set_cycles(&mut self) {
        let reporting = self.runs.iter().find(|it| it.engine == Engine::Reporting);
        let reporting = reporting.map(|it| it.cpu.vmm);
        let per_second = self.cycles_per_second;
        for ran in self.runs.iter_mut().filter(|it| it.engine.is_ours()) {
            ran.cycles = Some(Cycles::per_page(&ran.cpu, reporting, ran.pulsed, per_second));
        }
    }

    fn of(&self, engine: Engine, figure: fn(&Ran) -> f64) -> f64 {
        self.runs.iter().find(|it| it.engine == engine).map_or(f64::NAN, figure)
    }

    fn is_emulated(&self) -> bool {
        self.accel == Accel::Tcg
    }
}

fn mean_and_deviation(figures: &[f64]) -> (f64, f64) {
    let count = figures.len().max(1) as f64;
    let mean = figures.iter().sum::<f64>() / count;
    let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
    (mean, (squares / count).sqrt())
}

/// How many independent guests fit: n means and [`DEVIATIONS`] deviations of their sum, which grows
/// with the root of n, are [`HOST_BYTES`].
fn fit(mean: f64, deviation: f64) -> f64 {
    let spread = DEVIATIONS * deviation;
    let root = ((spread * spread + 4.0 * mean * HOST_BYTES).sqrt() - spread) / (2.0 * mean);
    (root * root).floor()
}

/// Whether the guests of all engines worked as much as those of 2017.
fn is_loaded(loads: impl Iterator<Item = f64>) -> bool {
    let [least, most] = LOAD;
    loads.fold(true, |all, load| all && load >= least && load <= most)
}

pub(super) fn goals(args: &Args, figures: &Figures) -> Goals {
    let size = format!(
        "all engines, 4 guests or more with 1 GiB or more each, {CYCLES} cycles or more of {CYCLE} s or more, files held for \
        {HOLD} s or more, periods divided by {SCALE} at most, {} to {} % of memory filled on average",
        LOAD[0] * 100.0,
        LOAD[1] * 100.0
    );
    let is_of_this_size = args.engine.is_empty()
        && args.guests >= 4
        && args.memory >= 1024
        && args.cycles >= CYCLES
        && args.cycle >= CYCLE
        && args.hold >= HOLD
        && args.scale <= SCALE
        && is_loaded(figures.runs.iter().map(|it| it.load));
    let ours: Vec<&Ran> = figures.runs.iter().filter(|it| it.engine.is_ours()).collect();
    // The worst of the grid.
    let of_ours = |engine, figure: fn(&Ran) -> f64| {
        figures.of(engine, figure) / -highest(ours.iter().map(|it| -figure(it)))
    };
    let fit = |engine| of_ours(engine, |it| it.fit);
    let with_all = |engine| of_ours(engine, |it| it.fit_with_all);
    let most = |figure: &dyn Fn(&Ran) -> f64| highest(ours.iter().map(|it| figure(it)));
    let cycles =
        |figure: fn(&Cycles) -> f64| most(&|it: &Ran| it.cycles.as_ref().map_or(f64::NAN, figure));
    let loads = || figures.runs.iter().map(|it| it.load * 100.0);
    let timed = |what: &str| format!("{what}{}", mark(figures.accel));
    let mut goals = Goals::new(size, is_of_this_size)
        .figure("load: memory filled on average, at least", -highest(loads().map(|it| -it)), " %")
        .figure("at most", highest(loads()), " %")
        .at_most("virtual machines that fit raw, of ours", fit(Engine::Raw), 1.0 / 8.0, "")
        .at_most("with KSM, of ours", fit(Engine::Ksm), 1.0 / 7.0, "")
        .figure("with free page reporting, of ours", fit(Engine::Reporting), "")
        .figure("with KSM and free page reporting, of ours", fit(Engine::KsmReporting), "")
        .figure("raw, of ours, with all that guests cost", with_all(Engine::Raw), "")
        .figure("with KSM, of ours, with all that", with_all(Engine::Ksm), "")
        .figure("with free page reporting, of ours, with all that", with_all(Engine::Reporting), "")
        .figure(
            "with KSM and free page reporting, of ours, with all that",
            with_all(Engine::KsmReporting),
            "",
        )
        .at_most(
            timed("daemon when all guests are idle, of a processor"),
            most(&|it| it.idle_share()),
            0.05,
            "",
        )
        .at_most(timed("cycles per page that pulses returned"), cycles(Cycles::sum), 6500.0, "")
        .figure(timed("of these at most the recycler's"), cycles(|it| it.recycler), "")
        .figure(timed("of accesses to VMMs"), cycles(|it| it.accesses), "")
        .figure(timed("of the VMMs' threads"), cycles(|it| it.vmm), "");
    for (what, name) in [("files", "files"), ("pages", "every second page")] {
        goals = goals
            .at_most(
                timed(&format!("{name} freed: 99 % beyond the reserve were back within, at worst")),
                most(&|it| it.worst(what, |removal| removal.p99)),
                5.0,
                " s",
            )
            .figure(
                timed(&format!(
                    "{name} freed: 99 % of all that came back within a minute, at worst"
                )),
                most(&|it| it.worst(what, |removal| removal.p99_of_all)),
                " s",
            )
            .at_most(
                format!("{name} freed: held of used and reserve, at worst"),
                most(&|it| it.worst(what, |removal| removal.held_of_used)),
                1.1,
                "",
            );
    }
    goals
}

pub(super) fn table(figures: &Figures) -> String {
    let parts = [head(figures), memory(figures), beside(figures), time(figures), freed(figures)];
    parts.join("\n")
}

fn head(figures: &Figures) -> String {
    let star = if figures.is_emulated() { "; figures that this distorts have a star" } else { "" };
    format!(
        "{} guests with {} MiB, {} s from one filling to the next; {}{star}. Of the first cycle no \
        memory is counted.\n",
        figures.guests,
        figures.memory_mib,
        figures.cycle,
        executed_by(figures.accel),
    )
}

/// A table: its columns, where those with a star are marked if guests are emulated, and its rows.
fn columns(figures: &Figures, names: &[&str], rows: impl Iterator<Item = String>) -> String {
    let star = if figures.is_emulated() { "\\*" } else { "" };
    let names: Vec<String> = names.iter().map(|name| name.replace('*', star)).collect();
    let mut text = format!("| {} |\n|---|{}\n", names.join(" | "), "--:|".repeat(names.len() - 1));
    rows.for_each(|row| text += &format!("| {row} |\n"));
    text
}

/// `figure` of bytes in MB.
fn mb(bytes: f64) -> String {
    format!("{:.1} MB", bytes / 1e6)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn seconds(figure: f64) -> String {
    if figure.is_nan() { "later".to_owned() } else { format!("{figure:.1} s") }
}

fn memory(figures: &Figures) -> String {
    let raw = figures.of(Engine::Raw, |it| it.fit);
    let guests = f64::from(figures.guests);
    let rows = figures.runs.iter().map(|ran| {
        format!(
            "{} | {}, {} | {:.2} GB | {:.2} GB | {:.2} GB | {} | {} | {:.0} | {:.2}",
            ran.engine.title(),
            percent(ran.load),
            percent(ran.peak),
            ran.lowest / 1e9,
            ran.mean * guests / 1e9,
            ran.highest / 1e9,
            mb(ran.mean),
            mb(ran.deviation),
            ran.fit,
            ran.fit / raw,
        )
    });
    let [raw, ksm, both] = FITTED_2017;
    let of_2017 = format!(
        "2017 | 4 %, 75 % |  | 164–182 GB |  |  |  | raw {raw}, KSM {ksm}, both {both} (measured) | 1, {:.2}, {:.2}",
        f64::from(ksm) / f64::from(raw),
        f64::from(both) / f64::from(raw),
    );
    let names = [
        "memory of the guests alone",
        "filled, mean and peak",
        "host: min",
        "mean",
        "max",
        "per guest",
        "deviation",
        "fit in 230 GB, computed",
        "of raw",
    ];
    columns(figures, &names, rows.chain([of_2017]))
        + &format!(
            "\nHow many fit is computed from the mean and the deviation of {} guests: as many as have a mean of their sum and \
            {DEVIATIONS} deviations of it within 230 GB.\n",
            figures.guests
        )
}

fn beside(figures: &Figures) -> String {
    let raw = figures.of(Engine::Raw, |it| it.fit_with_all);
    let guests = f64::from(figures.guests);
    let rows = figures.runs.iter().map(|ran| {
        let per_guest =
            |figure: &dyn Fn(&Beside) -> f64| mb(Beside::mean(&ran.beside, figure) / guests);
        let parts: [fn(&Beside) -> u64; 6] = [
            |it| it.emulators,
            |it| it.page_tables,
            |it| it.attendants,
            |it| it.daemon,
            |it| it.image,
            |it| it.rmap,
        ];
        let parts = parts.map(|part| per_guest(&|it| part(it) as f64)).join(" | ");
        format!(
            "{} | {} | {parts} | {} | {} | {:.0} | {:.2}",
            ran.engine.title(),
            per_guest(&|it| it.guests),
            per_guest(&Beside::items),
            per_guest(&Beside::of_host),
            ran.fit_with_all,
            ran.fit_with_all / raw,
        )
    });
    let names = [
        "with all, per guest",
        "guest memory",
        "emulator*",
        "page tables",
        "`vm run`",
        "daemon",
        "image in page cache",
        "KSM's own",
        "sum",
        "host's free memory has fallen by, and image",
        "fit in 230 GB, computed from the larger one*",
        "of raw",
    ];
    columns(figures, &names, rows)
}

fn time(figures: &Figures) -> String {
    let rows = figures.runs.iter().map(|ran| {
        let share = |seconds: f64| percent(seconds / ran.seconds);
        let cycles = ran.cycles.map_or_else(
            || "– | – | – | –".to_owned(),
            |it| {
                let Cycles { recycler, accesses, vmm, .. } = it;
                format!("{recycler:.0} | {accesses:.0} | {vmm:.0} | {:.0}", it.sum())
            },
        );
        format!(
            "{} | {} | {} | {} | {} | {} | {} | {:.1} | {cycles}",
            ran.engine.title(),
            share(ran.cpu.engine),
            percent(ran.idle_share()),
            share(ran.cpu.recycler),
            share(ran.cpu.accesses),
            share(ran.cpu.vmm),
            share(ran.cpu.shim),
            ran.pulsed as f64 / 1e9 / ran.seconds * 3600.0,
        )
    });
    let of_2017 =
        "2017 | daemon 22–35 % |  | worker 6.1–6.8 % |  |  |  |  |  |  |  | 6500".to_owned();
    let names = [
        "of a processor",
        "daemon or ksmd*",
        "all guests idle*",
        "recycler*",
        "accesses to VMMs*",
        "VMMs' other threads*",
        "of these the shim*",
        "pulses: GB/h",
        "cycles per page: recycler*",
        "accesses*",
        "VMMs*",
        "sum*",
    ];
    columns(figures, &names, rows.chain([of_2017]))
        + "\nCycles are those of the daemon's threads `recycler` and `address-space`, and of the VMMs' \
        threads that are no virtual processors, less what the latter took in the run with free page \
        reporting alone; divided by the pages that pulses returned. What `address-space` and the \
        shim do for the merger is in them.\n"
}

fn freed(figures: &Figures) -> String {
    let is_reporting = |it: &&Ran| it.engine.has_reporting();
    let rows = figures.runs.iter().filter(is_reporting).flat_map(|ran| {
        ["files", "pages"].map(|what| {
            let sum =
                |figure: fn(&Removal) -> u64| ran.of(what, |it| figure(it) as f64).sum::<f64>();
            let bytes = sum(|it| it.bytes);
            format!(
                "{}, {} | {} | {} | {} | {} | {} | {}, {} | {} | {:.2}",
                ran.engine.title(),
                if what == "files" { "files" } else { "every second page" },
                ran.of(what, |it| it.p99).count(),
                mb(bytes),
                percent(sum(|it| it.single) / bytes),
                percent(sum(|it| it.returned) / bytes),
                seconds(median(ran.of(what, |it| it.p50))),
                seconds(median(ran.of(what, |it| it.p99))),
                seconds(ran.worst(what, |it| it.p99)),
                seconds(ran.worst(what, |it| it.p99_of_all)),
                ran.worst(what, |it| it.held_of_used),
            )
        })
    });
    let names = [
        "freed",
        "times",
        "bytes",
        "without a free neighbour",
        "came back",
        "p50*",
        "p99, median and worst*",
        "p99 of all that came back, worst*",
        "held of used and reserve, worst",
    ];
    columns(figures, &names, rows)
        + "\nFrom before the guest freed the first page to when the host had back half and 99 % of what \
        is more than the reserve, which may stay with the guest; and 99 % of all that came back within \
        a minute.\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_fit_as_their_sum_allows() {
        assert_eq!(fit(1e9, 0.0), 230.0);
        let many = fit(1e8, 1e8);
        let sum = |count: f64| count * 1e8 + DEVIATIONS * 1e8 * count.sqrt();
        assert!(sum(many) <= HOST_BYTES && sum(many + 1.0) > HOST_BYTES, "{many}");
    }

    #[test]
    fn guests_that_do_too_little_or_too_much_prove_nothing() {
        let of = |loads: &[f64]| is_loaded(loads.iter().copied());
        assert!(of(&[0.03, 0.05, 0.08]));
        assert!(!of(&[0.05, 0.02]) && !of(&[0.09]) && !of(&[f64::NAN]));
    }
}
