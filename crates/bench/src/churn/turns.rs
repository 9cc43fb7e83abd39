//! `cofolio-bench churn` without more: the time of mounts and unmounts, with the ledger and without.

use std::{
    collections::HashMap,
    fs::{self, File},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cofolio_store::task::Cancel;
use serde::Serialize;

use super::{Bench, CONTAINERS, Churn};
use crate::Outcome;
use crate::cleanup;
use crate::daemon::Daemon;
use crate::density::worker;
use crate::goals::Goals;
use crate::median::{self, median};
use crate::namespace::shapes::{Spread, spread};
use crate::report;
use crate::source;

/// Goal: the 99th percentile with the ledger is at most this much of that without, as medians of
/// the rounds, with so many containers.
const P99_MAX: f64 = 1.10;
const P99_CONTAINERS: u32 = 1000;
const P99_ROUNDS: u32 = 9;

/// Of the daemon: only the ledger has a part in this. It looks more often than by default and takes the
/// time that it needs, so mounts have more beside them. With its default share it would lose opened
/// files here, and end no look.
const LEDGER_ALONE: &str =
    "[daemon]\ngc_hours = 0\nscrub_days = 0\nperiod = 3\ncpu_percent = 100\n";
const PERIOD_SECONDS: i64 = 3;

#[derive(Debug, Clone, Serialize)]
struct Turn {
    /// What the ledger did, in a turn with it.
    ledger: Option<Seen>,
    /// Mounts of read-only containers.
    read_only: Spread,
    /// Mounts of writable ones.
    writable: Spread,
    unmount: Spread,
    /// Microseconds to open and close a file of a container, which the daemon has watched with fanotify:
    /// the mean of [`OPENS`].
    open_us: f64,
}

/// Opens in each turn, of the files that a container reads, again and again.
const OPENS: u32 = 40_000;

/// What the ledger saw of a turn, by the report that it published before the turn ended.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Seen {
    /// Looks at all processes and at all objects that began and ended after all containers had been
    /// replaced, while mounts went on.
    looks_at_processes: u32,
    looks_at_objects: u32,
    /// Containers that ran when the report was made, but for those of the last period.
    running: u32,
    /// Those of them that the report has.
    containers: u32,
    /// Objects that these containers opened, once for each container, and those that it knows. It
    /// knows one of each container by its mapping alone.
    opened: u64,
    known: u64,
    /// Times that it had no room or no time for opened files.
    overflows: u64,
}

/// Looks of each kind in a turn, besides the first one, which has no bound.
const FURTHER_LOOKS: u32 = 2;
/// How long they may take.
const LOOKS_MAX: Duration = Duration::from_secs(900);
/// How often the daemon is asked whether a look has ended.
const ASK_INTERVAL: Duration = Duration::from_millis(200);
/// Two looks whose beginnings are so far apart are not the same: it is known to a second either way.
const APART_SECONDS: i64 = 3;

/// What all turns together are.
#[derive(Debug, Serialize)]
struct Turns {
    containers: u32,
    turns: Vec<Turn>,
}

/// Measures mounts and unmounts, in pairs of turns.
pub(super) fn run(bench: &Bench<'_>, churn: &mut Churn<'_>) -> Outcome {
    let measured = measure(bench, churn);
    let ended = churn.end_all();
    let turns = cleanup::result(bench.cancel, measured, ended)?;
    source::remove_tree(&churn.dir)?;
    let turns = Turns { containers: bench.args.containers, turns };
    let json = bench.args.place.json.as_deref();
    let exit =
        report::finish(json, bench.work, &turns, &turns.table(), &turns.goals(bench.args.rounds))?;
    turns.ensure_ledger_saw_them()?;
    Ok(exit)
}

/// All turns. The containers of the last one stay.
fn measure(bench: &Bench<'_>, churn: &mut Churn<'_>) -> Result<Vec<Turn>> {
    let config = churn.dir.join("config.toml");
    fs::write(&config, LEDGER_ALONE)?;
    churn.hierarchy.standing(CONTAINERS)?;
    for _ in 0..bench.args.containers {
        bench.cancel.check()?;
        churn.begin()?;
    }
    let mut turns = Vec::new();
    for round in 1..=bench.args.rounds {
        // What comes second in a pair may find the machine warmer.
        let first = round % 2 == 0;
        for ledger in [first, !first] {
            let daemon = ledger
                .then(|| Daemon::start(bench.args.cofolio.as_deref(), churn.domain, &config))
                .transpose()?;
            let turn = churn.turn(bench.args.containers, daemon.as_ref(), bench.cancel)?;
            drop(daemon);
            let with = if ledger { "with" } else { "without" };
            let p99 = [turn.read_only, turn.writable].map(|it| it.p99_ms);
            (bench.say)(&format!(
                "round {round}, {with} the ledger: p99 {:.2} ms read-only, {:.2} ms writable",
                p99[0], p99[1]
            ));
            turns.push(turn);
        }
    }
    Ok(turns)
}

impl Turns {
    /// Of each pair of turns, a figure without and with the ledger.
    fn pairs(&self, figure: impl Fn(&Turn) -> f64) -> Vec<[f64; 2]> {
        let of = |pair: &[Turn], ledger: bool| {
            pair.iter().find(|turn| turn.ledger.is_some() == ledger).map_or(f64::NAN, &figure)
        };
        self.turns.chunks_exact(2).map(|pair| [of(pair, false), of(pair, true)]).collect()
    }

    /// Fails unless the ledger had its part in each turn. A container's mapped file is known without
    /// fanotify, but its other files are not.
    fn ensure_ledger_saw_them(&self) -> Result<()> {
        for (number, seen) in (1..).zip(self.turns.iter().filter_map(|turn| turn.ledger)) {
            let Seen { running, containers, opened, known, overflows, .. } = seen;
            let nothing = format!("pair {number} shows nothing");
            ensure!(overflows == 0, "{nothing}: the ledger lost opened files {overflows} times");
            ensure!(
                containers == running,
                "{nothing}: the ledger knows {containers} of {running} containers"
            );
            // Fewer than that are all replaced within the period.
            ensure!(
                self.containers < P99_CONTAINERS || running >= self.containers / 4,
                "{nothing}: only {running} containers were older than the period"
            );
            ensure!(
                known * 10 >= opened * 9,
                "{nothing}: the ledger knows {known} of {opened} opened files"
            );
        }
        Ok(())
    }

    fn table(&self) -> String {
        let of = |spread: fn(&Turn) -> Spread| {
            let pairs = |figure: fn(Spread) -> f64| self.pairs(|turn| figure(spread(turn)));
            times_table(&pairs(|it| it.p50_ms), &pairs(|it| it.p99_ms))
        };
        let mut text = format!(
            "{} containers, all replaced in each turn. Milliseconds of a read-only mount:\n\n{}\n\
             Milliseconds of a writable mount:\n\n{}\n\
             Milliseconds of an unmount:\n\n{}\n",
            self.containers,
            of(|it| it.read_only),
            of(|it| it.writable),
            of(|it| it.unmount),
        );
        let [without, with] = medians(&self.pairs(|turn| turn.open_us));
        text += &format!(
            "To open and close a cached file of a container, the mean of {OPENS} in each turn, the \
             medians of all turns: {without:.2} µs without the ledger, {with:.2} µs with it.\n\n"
        );
        text += "The ledger in the turns with it, by its own report. Looks are those besides the first\n\
                 one. It knows a mapped file of each container without an event. An overflow means\n\
                 that opened files were lost.\n\n\
                 | | looks at all processes | at all objects | containers | known | opened files | \
                 known | overflows |\n\
                 |---|--:|--:|--:|--:|--:|--:|--:|\n";
        for (number, seen) in (1..).zip(self.turns.iter().filter_map(|turn| turn.ledger)) {
            let Seen { looks_at_processes, looks_at_objects, .. } = seen;
            let Seen { running, containers, opened, known, overflows, .. } = seen;
            text += &format!(
                "| pair {number} | {looks_at_processes} | {looks_at_objects} | {running} | \
                 {containers} | {opened} | {known} | {overflows} |\n"
            );
        }
        text
    }

    /// What the ledger costs: the median of the pairs' ratios.
    fn goals(&self, rounds: u32) -> Goals {
        let size = format!("{P99_CONTAINERS} containers and {P99_ROUNDS} pairs of turns");
        let is_of_this_size = self.containers >= P99_CONTAINERS && rounds >= P99_ROUNDS;
        let judge = |goals: Goals, kind, spread: fn(&Turn) -> Spread| {
            let pairs = self.pairs(|turn| spread(turn).p99_ms);
            let what = format!("p99 of a {kind} mount with the ledger to without");
            let [without, with] = medians(&pairs);
            goals
                .at_most_with_interval(
                    format!("{what}, median of the pairs"),
                    median(ratios(&pairs)),
                    median::interval(ratios(&pairs)),
                    P99_MAX,
                    "",
                )
                .figure(format!("{what}, ratio of the medians"), with / without, "")
        };
        let goals = judge(Goals::new(size, is_of_this_size), "read-only", |it| it.read_only);
        judge(goals, "writable", |it| it.writable).figure(
            "opened files that the ledger does not know",
            self.unknown_percent(),
            " %",
        )
    }

    #[allow(clippy::cast_precision_loss, reason = "a ratio of files")]
    fn unknown_percent(&self) -> f64 {
        let seen = self.turns.iter().filter_map(|turn| turn.ledger);
        let (opened, known) =
            seen.fold((0, 0), |(opened, known), it| (opened + it.opened, known + it.known));
        100.0 * opened.saturating_sub(known) as f64 / opened.max(1) as f64
    }
}

/// Of each pair, with the ledger to without.
fn ratios(pairs: &[[f64; 2]]) -> impl Iterator<Item = f64> {
    pairs.iter().map(|[without, with]| with / without)
}

fn times_table(p50: &[[f64; 2]], p99: &[[f64; 2]]) -> String {
    let mut text = String::from(
        "| | p50 without the ledger | with it | ratio | p99 without the ledger | with it | ratio |\n\
         |---|--:|--:|--:|--:|--:|--:|\n",
    );
    let mut row = |name: &str, times: [([f64; 2], f64); 2]| {
        let [p50, p99] =
            times.map(|([without, with], ratio)| format!("{without:.2} | {with:.2} | {ratio:.3}"));
        text += &format!("| {name} | {p50} | {p99} |\n");
    };
    for (number, (p50, p99)) in (1..).zip(p50.iter().zip(p99)) {
        row(&format!("pair {number}"), [p50, p99].map(|it| (*it, it[1] / it[0])));
    }
    row("median", [p50, p99].map(|it| (medians(it), median(ratios(it)))));
    text
}

/// Of all turns without the ledger, and of all with it.
fn medians(pairs: &[[f64; 2]]) -> [f64; 2] {
    [0, 1].map(|at| median(pairs.iter().map(|it| it[at])))
}

/// Looks of one kind at everything. They are told apart by when they began.
#[derive(Debug, Default)]
struct Rounds {
    /// When the last one of which it is known that it ended began, in seconds since 1970.
    began: Option<i64>,
    /// How many have ended since the first one.
    further: u32,
}

impl Rounds {
    /// `began` is when the last one that ended began, to a second either way.
    fn note(&mut self, began: i64) {
        match self.began {
            Some(last) if began < last + APART_SECONDS => {}
            last => {
                self.further += u32::from(last.is_some());
                self.began = Some(began);
            }
        }
    }
}

/// The looks of a daemon that have ended, by the ages in its metrics.
struct Looks<'a> {
    daemon: &'a Daemon,
    processes: Rounds,
    objects: Rounds,
    asked: Instant,
}

impl<'a> Looks<'a> {
    fn new(daemon: &'a Daemon) -> Self {
        let (processes, objects) = Default::default();
        Self { daemon, processes, objects, asked: Instant::now() }
    }

    /// Asks the daemon, unless it was asked just now: an answer takes processor time.
    fn count(&mut self) -> Result<()> {
        if self.asked.elapsed() < ASK_INTERVAL {
            return Ok(());
        }
        let (now, metrics) = (cofolio_store::now(), self.daemon.metrics()?);
        // Until the first look has ended there is no report.
        if metrics.figure::<f64>("cofolio_ledger_cpu_seconds_total")? > 0.0 {
            self.processes.note(now - metrics.figure::<i64>("cofolio_processes_age_seconds")?);
            self.objects.note(now - metrics.figure::<i64>("cofolio_residency_age_seconds")?);
        }
        self.asked = Instant::now();
        Ok(())
    }

    /// Whether the first look has ended.
    fn has_begun(&self) -> bool {
        self.processes.began.is_some()
    }

    /// Counts the further ones anew.
    fn count_from_here(&mut self) {
        (self.processes.further, self.objects.further) = (0, 0);
    }

    /// Looks at everything besides the first.
    fn further(&self) -> u32 {
        self.processes.further.min(self.objects.further)
    }
}

impl Churn<'_> {
    /// Replaces all containers. With the daemon it does so from its first look on, and goes on until
    /// further looks have ended.
    fn turn(&mut self, containers: u32, daemon: Option<&Daemon>, cancel: &Cancel) -> Result<Turn> {
        let (mut mounts, mut unmounts) = ([Vec::new(), Vec::new()], Vec::new());
        let mut looks = daemon.map(Looks::new);
        let (mut replaced, started) = (0, Instant::now());
        self.gone.clear();
        while replaced < containers || looks.as_ref().is_some_and(|it| it.further() < FURTHER_LOOKS)
        {
            cancel.check()?;
            unmounts.extend(self.end_oldest()?);
            let begun = self.begin()?;
            mounts[usize::from(begun.is_writable)].push(begun.mount);
            let Some(looks) = &mut looks else {
                replaced += 1;
                continue;
            };
            looks.count()?;
            if replaced < containers && looks.has_begun() {
                replaced += 1;
                // The daemon's report is then of containers that it saw from their beginning.
                looks.count_from_here();
            }
            ensure!(
                started.elapsed() < LOOKS_MAX,
                "the churn shows nothing: {} of {FURTHER_LOOKS} looks at everything ended",
                looks.further()
            );
        }
        let ledger = looks.map(|looks| self.seen(&looks)).transpose()?;
        let [read_only, writable] = mounts.map(spread);
        let open_us = self.open_us()?;
        Ok(Turn { ledger, read_only, writable, unmount: spread(unmounts), open_us })
    }

    /// Opens the files that the newest container has read, from outside of it.
    fn open_us(&self) -> Result<f64> {
        let container = self.containers.back().context("there is no container")?;
        let profile = &self.profiles[self.image_of(container.number)][0];
        let files = worker::files(&container.target, profile)?;
        let started = Instant::now();
        for file in files.iter().cycle().take(OPENS as usize) {
            File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
        }
        Ok(started.elapsed().as_secs_f64() * 1e6 / f64::from(OPENS))
    }

    /// What the daemon's last report has of the containers that ran when it was made. The daemon is not
    /// asked to look.
    fn seen(&self, looks: &Looks<'_>) -> Result<Seen> {
        let report = looks.daemon.report()?;
        let known = report.containers.iter().map(|it| (it.cgroup.as_str(), it.objects));
        let known: HashMap<&str, u64> = known.collect();
        let mut seen = Seen {
            looks_at_processes: looks.processes.further,
            looks_at_objects: looks.objects.further,
            overflows: report.unknown.overflows,
            ..Seen::default()
        };
        let running = self.containers.iter().map(|it| (it.number, it.began, i64::MAX));
        for (number, began, ended) in self.gone.iter().copied().chain(running) {
            if began + PERIOD_SECONDS >= report.time || ended <= report.time {
                continue;
            }
            let opened = self.objects[self.image_of(number)];
            let objects = known.get(format!("/{CONTAINERS}/{number}").as_str());
            seen.running += 1;
            seen.containers += u32::from(objects.is_some());
            seen.opened += opened;
            seen.known += objects.copied().unwrap_or(0).min(opened);
        }
        Ok(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cofolio_cli::exit::Exit;

    fn turns(containers: u32, p99_ms: &[[f64; 2]]) -> Turns {
        let turn = |ledger, p99_ms| {
            let read_only = Spread { p50_ms: 1.0, p99_ms };
            let writable = Spread { p50_ms: 1.0, p99_ms: 1.0 };
            let unmount = Spread { p50_ms: 7.0, p99_ms: 7.0 };
            Turn { ledger, read_only, writable, unmount, open_us: 2.0 }
        };
        let seen = Some(Seen { running: 900, containers: 900, ..Seen::default() });
        let pairs = p99_ms.iter().flat_map(|[without, with]| [(None, *without), (seen, *with)]);
        Turns { containers, turns: pairs.map(|(ledger, p99_ms)| turn(ledger, p99_ms)).collect() }
    }

    /// One opened file in one of nine turns was enough, and lost ones did not matter.
    #[test]
    fn a_ledger_that_misses_files_or_containers_in_one_turn_shows_nothing() {
        let with = |change: fn(&mut Seen)| {
            let mut turns = turns(1000, &[[1.0, 1.0], [1.0, 1.0]]);
            let mut seen = turns.turns.iter_mut().filter_map(|turn| turn.ledger.as_mut());
            let seen = seen.by_ref().last().unwrap();
            (seen.opened, seen.known) = (90_000, 81_000);
            change(seen);
            turns.ensure_ledger_saw_them()
        };
        with(|_| {}).unwrap();
        with(|it| it.known = 80_999).unwrap_err();
        with(|it| it.overflows = 1).unwrap_err();
        with(|it| it.containers = 899).unwrap_err();
        with(|it| (it.running, it.containers) = (249, 249)).unwrap_err();
    }

    /// Each published report counted as a look. The ages say when a look began, but only to a second.
    #[test]
    fn a_look_is_counted_once() {
        let mut rounds = Rounds::default();
        for began in [100, 101, 99, 100, 110, 111, 110, 113] {
            rounds.note(began);
        }
        assert_eq!(rounds.further, 2);
    }

    /// On a busy machine the p99 of one turn was a fifth off. And the medians of all turns without and
    /// of all with the ledger said 1.066 where half of the pairs were above 1.09.
    #[test]
    fn the_median_of_the_pairs_is_judged() {
        let pairs = |ratios: [f64; 9]| ratios.map(|ratio| [1.0, ratio]);
        let noisy = pairs([1.05, 5.0, 1.06, 1.0, 1.0, 1.07, 1.08, 3.0, 1.2]);
        let goals = turns(1000, &noisy).goals(9);
        assert_eq!(goals.exit(), Exit::Failure);
        assert!(goals.table().contains("| 1.07 (95 %: 1.000 to 3.000) | 1.1 | not proved |"));
        assert!(goals.table().contains("| 1 (95 %: 1.000 to 1.000) | 1.1 | met |"));
        let slower = pairs([1.2, 1.0, 1.3, 1.2, 1.0, 1.0, 1.2, 1.2, 0.7]);
        assert_eq!(turns(1000, &slower).goals(9).exit(), Exit::Failure);
        assert_eq!(turns(1000, &slower[..3]).goals(3).exit(), Exit::Ok);
        assert_eq!(turns(999, &slower).goals(9).exit(), Exit::Ok);
        // Of turns as such the medians are 3 and 2.
        let machine = [[1.0, 1.2], [3.0, 2.0], [4.0, 4.8]];
        let text = turns(1000, &machine).table();
        assert!(text.contains("| median | 1.00 | 1.00 | 1.000 | 3.00 | 2.00 | 1.200 |"), "{text}");
    }

    /// Read-only mounts hid that writable ones were slower: all were in one p99.
    #[test]
    fn writable_mounts_are_judged_apart() {
        let mut turns = turns(1000, &[[1.0, 1.0]; 9]);
        for turn in turns.turns.iter_mut().filter(|turn| turn.ledger.is_some()) {
            turn.writable.p99_ms = 1.2;
        }
        assert_eq!(turns.goals(9).exit(), Exit::Failure);
    }
}
