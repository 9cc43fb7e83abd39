//! Processor time of threads, by their names.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// Seconds of processor time, user and system, by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Threads(BTreeMap<String, f64>);

/// Those of a directory: `/proc` has processes, `/proc/PID/task` threads. Threads that end meanwhile are missed.
pub(crate) fn of(dir: &str) -> Threads {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((name, seconds)) = parse(&stat, ticks) else { continue };
        *all.entry(name.to_owned()).or_default() += seconds;
    }
    Threads(all)
}

/// Seconds of processor time of this process, with those of threads that have ended.
pub(crate) fn own_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default().as_secs_f64()
}

fn parse(stat: &str, ticks: f64) -> Option<(&str, f64)> {
    let (before, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((before.split_once('(')?.1, (user + system) / ticks))
}

impl Threads {
    /// Of those with this name.
    pub(crate) fn seconds(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0)
    }

    /// Of those whose names the closure takes.
    pub(crate) fn seconds_of(&self, is_one: impl Fn(&str) -> bool) -> f64 {
        self.0.iter().filter(|(name, _)| is_one(name)).map(|(_, seconds)| seconds).sum()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    #[test]
    fn a_name_may_have_brackets() {
        let stat = "7 (a) (b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0";
        assert_eq!(super::parse(stat, 100.0).unwrap(), ("a) (b", 2.0));
    }
}
