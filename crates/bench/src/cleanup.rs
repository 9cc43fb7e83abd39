//! Taking down what a benchmark has set up, also after an error, a signal or a kill.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cofolio_cli::exit::{Exit, Fail};
use cofolio_node::cgroup::Hierarchy;
use cofolio_store::task::Cancel;

/// Runs it for each item, also after an error; the first error counts.
pub(crate) fn for_all<T>(
    items: impl IntoIterator<Item = T>,
    run: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    items.into_iter().map(run).fold(Ok(()), Result::and)
}

/// What a measurement found, once all is taken down. After a signal it says that this is so.
pub(crate) fn result<T>(cancel: &Cancel, measured: Result<T>, taken_down: Result<()>) -> Result<T> {
    if cancel.is_cancelled() {
        taken_down.context("interrupted, but something could not be taken down")?;
        return Err(Fail::new(Exit::Interrupted, "interrupted; all is taken down").into());
    }
    let measured = measured?;
    taken_down?;
    Ok(measured)
}

/// Paths of the cgroups at the top of the hierarchy whose names begin with `prefix`, and of all
/// below them, each behind its children.
fn cgroups(hierarchy: &Hierarchy, prefix: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut open = vec![String::new()];
    while let Some(parent) = open.pop() {
        for entry in fs::read_dir(hierarchy.directory(&parent)?)? {
            let entry = entry?;
            let name = entry.file_name().into_string().unwrap_or_default();
            if entry.file_type()?.is_dir() && (!parent.is_empty() || name.starts_with(prefix)) {
                open.push(if parent.is_empty() { name } else { format!("{parent}/{name}") });
            }
        }
        found.push(parent);
    }
    found.reverse();
    // Not the top.
    found.pop();
    Ok(found)
}

/// Removes the cgroups that a killed run left.
pub(crate) fn remove_cgroups(hierarchy: &Hierarchy, prefix: &str) -> Result<()> {
    const LEAVE_MAX: Duration = Duration::from_secs(10);
    for name in cgroups(hierarchy, prefix)? {
        let started = Instant::now();
        // The processes of a run that was just killed may not have ended yet.
        while let Err(error) = hierarchy.remove(&name) {
            if started.elapsed() > LEAVE_MAX {
                return Err(error.into());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// Fails if a cgroup with this prefix or a mount below this directory exists.
pub(crate) fn ensure_nothing_is_left(
    hierarchy: &Hierarchy,
    prefix: &str,
    dir: &Path,
) -> Result<()> {
    let cgroups = cgroups(hierarchy, prefix)?;
    ensure!(cgroups.is_empty(), "cgroups are left: {}", cgroups.join(", "));
    let mounts = fs::read("/proc/self/mountinfo")?;
    let mounts = String::from_utf8_lossy(&mounts);
    let below = format!(" {}/", dir.display());
    let left: Vec<_> = mounts.lines().filter(|line| line.contains(&below)).collect();
    ensure!(left.is_empty(), "mounts are left:\n{}", left.join("\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `balance` stopped at the first mount that it could not unmount, and left all others.
    #[test]
    fn taking_down_goes_on_after_an_error() {
        let mut tried = Vec::new();
        let ended = for_all(1..=4, |number| {
            tried.push(number);
            ensure!(number % 2 == 1, "{number} is in use");
            Ok(())
        });
        assert_eq!(tried, [1, 2, 3, 4]);
        assert_eq!(ended.map_err(|error| error.to_string()), Err("2 is in use".to_owned()));
    }

    /// After Ctrl-C benchmarks said that the containers were gone, whether or not they were.
    #[test]
    fn an_interrupted_benchmark_says_what_it_could_not_take_down() {
        let cancelled = Cancel::default();
        cancelled.cancel();
        let said = |taken_down| {
            let ended: Result<()> = result(&cancelled, Ok(()), taken_down);
            ended.map_err(|error| format!("{error:#}")).unwrap_err()
        };
        assert_eq!(said(Ok(())), "interrupted; all is taken down");
        let left = said(Err(anyhow::anyhow!("mounts are left")));
        assert!(left.ends_with("could not be taken down: mounts are left"), "{left}");
    }
}
