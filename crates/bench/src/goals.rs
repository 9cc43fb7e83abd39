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
    at_most: f64,
    unit: &'static str,
    verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Met,
    Missed,
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
        mut self,
        what: impl Into<String>,
        found: f64,
        at_most: f64,
        unit: &'static str,
    ) -> Self {
        let verdict = match (self.is_of_this_size, found <= at_most) {
            (false, _) => Verdict::OtherSize,
            (true, true) => Verdict::Met,
            (true, false) => Verdict::Missed,
        };
        self.list.push(Goal { what: what.into(), found, at_most, unit, verdict });
        self
    }

    pub(crate) fn table(&self) -> String {
        let mut text = format!("Goals, of {}:\n\n", self.size);
        text += "| goal | found | at most | |\n|---|--:|--:|---|\n";
        for Goal { what, found, at_most, unit, verdict } in &self.list {
            let verdict = match verdict {
                Verdict::Met => "met",
                Verdict::Missed => "MISSED",
                Verdict::OtherSize => "the goal is of another size",
            };
            let found = format!("{found:.3}");
            // No more digits than there are: 1.03, 0.5, 300.
            let found = found.trim_end_matches('0').trim_end_matches('.');
            text += &format!("| {what} | {found}{unit} | {at_most}{unit} | {verdict} |\n");
        }
        text
    }

    /// [`Exit::Failure`] if a goal is missed.
    pub(crate) fn exit(&self) -> Exit {
        match self.list.iter().any(|goal| goal.verdict == Verdict::Missed) {
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
