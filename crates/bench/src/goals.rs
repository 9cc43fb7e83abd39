//! The goals of a benchmark: the figure, the bound, and whether it is met.

use cofolio_cli::exit::Exit;
use serde::Serialize;

/// The goals of one kind of benchmark. They hold for a run of a certain size.
#[derive(Debug, Serialize)]
pub(crate) struct Goals {
    /// The size that the goals are of, in words.
    size: String,
    is_of_this_size: bool,
    list: Vec<Goal>,
}

#[derive(Debug, Serialize)]
struct Goal {
    what: String,
    found: f64,
    /// Where the figure is a median of several: its 95 % interval.
    interval: Option<[f64; 2]>,
    /// None for a figure that has no goal.
    at_most: Option<f64>,
    unit: &'static str,
    verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Met,
    /// The figure is within the bound, but its interval reaches beyond: other rounds might miss it.
    NotProved,
    Missed,
    NoGoal,
    /// The run was smaller than the goal: its figure proves nothing.
    OtherSize,
}

impl Goals {
    /// `size` says in words how large a run the goals are for, and `is_of_this_size` whether this
    /// run was so large.
    pub(crate) fn new(size: impl Into<String>, is_of_this_size: bool) -> Self {
        Self { size: size.into(), is_of_this_size, list: Vec::new() }
    }

    /// Judges a figure. One that is not a number misses its goal.
    #[must_use]
    pub(crate) fn at_most(
        self,
        what: impl Into<String>,
        found: f64,
        at_most: f64,
        unit: &'static str,
    ) -> Self {
        self.at_most_with_interval(what, found, None, at_most, unit)
    }

    /// The same for a median, whose 95 % interval is known if there are rounds enough.
    #[must_use]
    pub(crate) fn at_most_with_interval(
        self,
        what: impl Into<String>,
        found: f64,
        interval: Option<[f64; 2]>,
        at_most: f64,
        unit: &'static str,
    ) -> Self {
        let is_certain = interval.is_none_or(|[_, highest]| highest <= at_most);
        let verdict = match (self.is_of_this_size, found <= at_most) {
            (false, _) => Verdict::OtherSize,
            (true, true) if is_certain => Verdict::Met,
            (true, true) => Verdict::NotProved,
            (true, false) => Verdict::Missed,
        };
        self.with(Goal {
            what: what.into(),
            found,
            interval,
            at_most: Some(at_most),
            unit,
            verdict,
        })
    }

    /// Prints a figure that has no goal among those that have one.
    #[must_use]
    pub(crate) fn figure(self, what: impl Into<String>, found: f64, unit: &'static str) -> Self {
        let (interval, at_most, verdict) = (None, None, Verdict::NoGoal);
        self.with(Goal { what: what.into(), found, interval, at_most, unit, verdict })
    }

    fn with(mut self, goal: Goal) -> Self {
        self.list.push(goal);
        self
    }

    pub(crate) fn table(&self) -> String {
        let mut text = format!("Goals, of {}:\n\n", self.size);
        text += "| goal | found | at most | |\n|---|--:|--:|---|\n";
        for Goal { what, found, interval, at_most, unit, verdict } in &self.list {
            let verdict = match verdict {
                Verdict::Met => "met",
                Verdict::NotProved => "not proved",
                Verdict::NoGoal => "",
                Verdict::Missed => "MISSED",
                Verdict::OtherSize => "the goal is of another size",
            };
            let found = format!("{found:.3}");
            // No more digits than there are: 1.03, 0.5, 300.
            let found = found.trim_end_matches('0').trim_end_matches('.');
            let interval = interval.map(|[low, high]| format!(" (95 %: {low:.3} to {high:.3})"));
            let interval = interval.unwrap_or_default();
            let at_most = at_most.map_or_else(|| "none".to_owned(), |it| format!("{it}{unit}"));
            text += &format!("| {what} | {found}{unit}{interval} | {at_most} | {verdict} |\n");
        }
        text
    }

    /// [`Exit::Failure`] if a goal is missed or not proved.
    pub(crate) fn exit(&self) -> Exit {
        let is_open = |goal: &Goal| matches!(goal.verdict, Verdict::Missed | Verdict::NotProved);
        match self.list.iter().any(is_open) {
            true => Exit::Failure,
            false => Exit::Ok,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn goals(is_of_this_size: bool, found: f64) -> Goals {
        Goals::new("10 mounts", is_of_this_size)
            .at_most("one", 0.5, 1.03, "")
            .at_most("other", found, 300.0, " MB")
    }

    /// Benchmarks printed MISSED and ended with 0, so no script noticed.
    #[test]
    fn a_missed_goal_ends_with_failure() {
        let missed = goals(true, 300.25);
        assert_eq!(missed.exit(), Exit::Failure);
        assert!(missed.table().contains("| one | 0.5 | 1.03 | met |\n"), "{}", missed.table());
        assert!(missed.table().contains("| other | 300.25 MB | 300 MB | MISSED |\n"));
        assert_eq!(goals(true, 300.0).exit(), Exit::Ok);
        assert_eq!(goals(true, f64::NAN).exit(), Exit::Failure);
    }

    /// A p99 with a median of 1.044 was "met", although its interval reached from 0.752 to 1.131.
    #[test]
    fn a_median_whose_interval_reaches_beyond_the_bound_is_not_proved() {
        let of = |found, interval| {
            Goals::new("9 pairs", true).at_most_with_interval("p99", found, interval, 1.1, "")
        };
        let unsure = of(1.044, Some([0.752, 1.131]));
        let line = "| p99 | 1.044 (95 %: 0.752 to 1.131) | 1.1 | not proved |\n";
        assert!(unsure.table().contains(line), "{}", unsure.table());
        assert_eq!(unsure.exit(), Exit::Failure);
        assert!(of(1.044, Some([0.9, 1.1])).table().contains("| met |"));
        assert_eq!(of(1.2, Some([0.9, 1.3])).exit(), Exit::Failure);
    }

    #[test]
    fn a_figure_without_a_goal_is_neither_met_nor_missed() {
        let goals = Goals::new("10 mounts", true).figure("age", 412.0, " s");
        assert!(goals.table().contains("| age | 412 s | none |  |\n"), "{}", goals.table());
        assert_eq!(goals.exit(), Exit::Ok);
    }

    /// `daemon-memory` said of any number of mounts that it met a goal of 10,000.
    #[test]
    fn a_smaller_run_meets_and_misses_nothing() {
        for found in [1.0, 1000.0] {
            let smaller = goals(false, found);
            assert_eq!(smaller.exit(), Exit::Ok);
            let text = smaller.table();
            assert!(text.starts_with("Goals, of 10 mounts:\n"), "{text}");
            assert_eq!(text.matches("the goal is of another size").count(), 2, "{text}");
        }
    }
}
