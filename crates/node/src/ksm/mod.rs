//! Steers KSM, the kernel's own merging, by its yield.
//!
//! ```text
//! /sys/kernel/mm/ksm: pages_*, full_scans ─┐                  ┌▶ pages_to_scan, sleep_millisecs
//! /proc/PID/schedstat of ksmd ─────────────┴─▶ controller ────┘
//!
//! <run>/ksm.json    the former settings, and ours (Record)
//! ```
//!
//! KSM knows no trust domains, so Cofolio turns it on only if the operator has asked for that. It takes
//! KSM over only while that is off, and lets go as soon as it finds a setting that it did not write. At
//! the end it restores the former settings; merged pages stay merged. A killed daemon leaves KSM at its
//! last pace, and the next daemon recognises the settings by the record.

mod controller;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use self::controller::KsmPolicy;
use self::controller::{Controller, Pace, Sample, TICK};
use crate::run_dir::running::write_file;
use crate::run_dir::{RunDir, RunDirError, read_json, remove_file, to_json};
use crate::{kernel_text, processes};

/// The process that makes the kernel's threads.
const KTHREADD: &str = "2";

/// Why KSM is left alone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KsmError {
    /// The kernel is built without it.
    #[error("this kernel has no KSM")]
    Missing,
    /// Its thread belongs to another pid namespace.
    #[error("ksmd is not among the processes that are visible here")]
    Invisible,
    /// It runs already (1), or somebody has undone all merging (2).
    #[error("somebody else uses it: `run` is {0}, and not 0")]
    InUse(u64),
    /// The kernel's own advisor sets `pages_to_scan`.
    #[error("the kernel steers it: `advisor_mode` is not none")]
    Advised,
    /// A setting is not what was written.
    #[error("somebody else has changed its settings")]
    Changed,
    /// A file of the kernel.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The record.
    #[error(transparent)]
    Record(#[from] RunDirError),
}

type Result<T> = std::result::Result<T, KsmError>;

/// What KSM has done for all programs of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KsmReport {
    /// Whether it is steered.
    pub steered: bool,
    /// Bytes that merging saves, less what its bookkeeping takes (`general_profit`).
    pub saved_bytes: i64,
    /// Processor time that ksmd has taken since it is steered.
    pub cpu: Duration,
}

/// The settings that are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Settings {
    run: u64,
    pages_to_scan: u64,
    sleep_millisecs: u64,
}

impl Settings {
    fn at(pace: Pace) -> Self {
        let Pace { pages_to_scan, sleep_millisecs } = pace;
        Self { run: 1, pages_to_scan, sleep_millisecs }
    }
}

/// What `ksm.json` holds. It is written before the settings.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Record {
    /// The settings before it was steered.
    former: Settings,
    /// Ours, and those that they replace: if the daemon is killed, either may be in force.
    ours: [Settings; 2],
}

impl Record {
    fn has_pace(&self, found: &Settings) -> bool {
        let is = |value: fn(&Settings) -> u64| self.ours.iter().any(|it| value(it) == value(found));
        is(|it| it.pages_to_scan) && is(|it| it.sleep_millisecs)
    }
}

/// The files of the kernel.
#[derive(Debug)]
struct Files {
    ksm: PathBuf,
    /// Of ksmd.
    schedstat: PathBuf,
}

impl Files {
    fn find(root: &Path) -> Result<Self> {
        let ksm = root.join("sys/kernel/mm/ksm");
        if !ksm.exists() {
            return Err(KsmError::Missing);
        }
        let proc = root.join("proc");
        // Any program can take that name, but only threads of the kernel are children of kthreadd.
        let is_ksmd = |dir: &PathBuf| {
            let stat = kernel_text::read(&dir.join("stat")).unwrap_or_default();
            let split = stat.rsplit_once(") ").filter(|(start, _)| start.ends_with(" (ksmd"));
            split.and_then(|(_, rest)| rest.split(' ').nth(1)) == Some(KTHREADD)
        };
        let all = processes::numbered(&proc);
        let all = all.map_err(|source| KsmError::Io { path: proc, source })?;
        let ksmd = all.into_iter().find(is_ksmd).ok_or(KsmError::Invisible)?;
        Ok(Self { ksm, schedstat: ksmd.join("schedstat") })
    }

    fn number<T: std::str::FromStr>(path: PathBuf) -> Result<T> {
        let parse = |text: String| text.split_whitespace().next()?.parse().ok();
        let read = kernel_text::read(&path);
        let read = read.and_then(|text| parse(text).ok_or(io::ErrorKind::InvalidData.into()));
        read.map_err(|source| KsmError::Io { path, source })
    }

    fn get(&self, name: &str) -> Result<u64> {
        Self::number(self.ksm.join(name))
    }

    fn cpu(&self) -> Result<Duration> {
        Self::number(self.schedstat.clone()).map(Duration::from_nanos)
    }

    /// The settings.
    ///
    /// # Errors
    /// [`KsmError::Advised`], [`KsmError::Io`].
    fn settings(&self) -> Result<Settings> {
        // Kernels before 6.8 have no advisor.
        let mode = fs::read_to_string(self.ksm.join("advisor_mode"));
        if mode.is_ok_and(|mode| !mode.contains("[none]")) {
            return Err(KsmError::Advised);
        }
        Ok(Settings {
            run: self.get("run")?,
            pages_to_scan: self.get("pages_to_scan")?,
            sleep_millisecs: self.get("sleep_millisecs")?,
        })
    }

    fn set(&self, new: Settings) -> Result<()> {
        // `run` last: KSM never starts at another pace than that of the record.
        for (name, value) in [
            ("sleep_millisecs", new.sleep_millisecs),
            ("pages_to_scan", new.pages_to_scan),
            ("run", new.run),
        ] {
            let path = self.ksm.join(name);
            // Writing to `run` waits until ksmd sleeps.
            if self.get(name)? != value {
                fs::write(&path, value.to_string())
                    .map_err(|source| KsmError::Io { path, source })?;
            }
        }
        Ok(())
    }

    fn sample(&self, at: Duration) -> Result<Sample> {
        let shared = self.get("pages_shared")?;
        let sharing = self.get("pages_sharing")?;
        Ok(Sample {
            at,
            cpu: self.cpu()?,
            passes: self.get("full_scans")?,
            known: shared + sharing + self.get("pages_unshared")? + self.get("pages_volatile")?,
            // Linux 6.6.
            saved: sharing + self.get("ksm_zero_pages").unwrap_or(0),
        })
    }
}

/// Steers KSM.
#[derive(Debug)]
pub struct Steering {
    files: Files,
    path: PathBuf,
    record: Record,
    controller: Controller,
    began: Instant,
    /// Processor time of ksmd then.
    cpu_before: Duration,
}

impl Steering {
    /// Turns KSM on, within the bounds of a policy. The record is in the run directory.
    ///
    /// # Errors
    /// [`KsmError`]; then nothing was changed.
    pub fn begin(run: &RunDir, policy: KsmPolicy) -> Result<Self> {
        Self::begin_at(Path::new("/"), run.path().join("ksm.json"), policy)
    }

    fn begin_at(root: &Path, path: PathBuf, policy: KsmPolicy) -> Result<Self> {
        let files = Files::find(root)?;
        let found = files.settings()?;
        let former = match (found.run, read_json::<Record>(&path)?) {
            (0 | 1, Some(record)) if record.has_pace(&found) => record.former,
            (0, _) => found,
            (run, _) => return Err(KsmError::InUse(run)),
        };
        let controller = Controller::new(policy);
        let record = Record { former, ours: [found, found] };
        let (began, cpu_before) = (Instant::now(), files.cpu()?);
        let mut it = Self { files, path, record, controller, began, cpu_before };
        it.step().inspect_err(|_| it.end())?;
        Ok(it)
    }

    /// From one tick to the next.
    pub const INTERVAL: Duration = TICK;

    /// Takes a sample, and has KSM go on at the pace that follows. To be called once every
    /// [`INTERVAL`](Self::INTERVAL).
    ///
    /// # Errors
    /// [`KsmError::Changed`] and [`KsmError::Advised`] if somebody else steers KSM now, [`KsmError::Io`],
    /// [`KsmError::Record`]. KSM has its former settings then, or those of whoever changed them, and there
    /// must be no further tick.
    pub fn tick(&mut self) -> Result<KsmReport> {
        let found = self.files.settings();
        let ours = found.and_then(|found| match found == self.record.ours[0] {
            true => self.step(),
            false => Err(KsmError::Changed),
        });
        ours.inspect_err(|_| self.end())
    }

    fn step(&mut self) -> Result<KsmReport> {
        let sample = self.files.sample(self.began.elapsed())?;
        let new = Settings::at(self.controller.sample(sample));
        if new != self.record.ours[0] {
            self.record.ours = [new, self.record.ours[0]];
            write_file(&self.path, &to_json(&self.path, &self.record)?)?;
            self.files.set(new)?;
        }
        // Linux 6.4.
        let saved_bytes = Files::number(self.files.ksm.join("general_profit")).unwrap_or(0);
        let cpu = sample.cpu.saturating_sub(self.cpu_before);
        Ok(KsmReport { steered: true, saved_bytes, cpu })
    }

    /// Sets KSM back as it was, unless somebody else has changed it.
    pub fn end(&self) {
        let is_ours = |found: &Settings| found.run == 1 && self.record.has_pace(found);
        // If that fails, the next daemon needs the record.
        if self.files.settings().is_ok_and(|found| is_ours(&found))
            && self.files.set(self.record.former).is_err()
        {
            return;
        }
        let _ = remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    /// A kernel's files, in a temporary directory.
    struct Kernel(tempfile::TempDir);

    impl Kernel {
        fn new() -> Self {
            let it = Self(tempfile::tempdir().unwrap());
            it.write("proc/37/stat", "37 (ksmd) S 2 0 0 0");
            it.write("proc/37/schedstat", "1000 0 1");
            // Programs with its name, as far as they can have it.
            it.write("proc/9/stat", "9 (ksmd) S 1 9 9 0");
            it.write("proc/8/stat", "8 (a (ksmd) S 2 ) S 7 8 8");
            for name in ["shared", "sharing", "unshared", "volatile"] {
                it.write_ksm(&format!("pages_{name}"), "0");
            }
            for (name, value) in [
                ("full_scans", "0"),
                ("advisor_mode", "[none] scan-time"),
                ("run", "0"),
                ("pages_to_scan", "150"),
                ("sleep_millisecs", "40"),
            ] {
                it.write_ksm(name, value);
            }
            it
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn write_ksm(&self, name: &str, text: &str) {
            self.write(&format!("sys/kernel/mm/ksm/{name}"), text);
        }

        fn settings(&self) -> [String; 3] {
            ["run", "pages_to_scan", "sleep_millisecs"].map(|name| {
                let path = self.0.path().join("sys/kernel/mm/ksm").join(name);
                fs::read_to_string(path).unwrap().trim().to_owned()
            })
        }

        fn record(&self) -> PathBuf {
            self.0.path().join("ksm.json")
        }

        fn begin(&self) -> Result<Steering> {
            Steering::begin_at(self.0.path(), self.record(), KsmPolicy { share: 0.1 })
        }
    }

    const FORMER: [&str; 3] = ["0", "150", "40"];
    const FIRST: [&str; 3] = ["1", "100", "20"];

    #[test]
    fn the_settings_of_before_come_back() {
        let kernel = Kernel::new();
        let mut steering = kernel.begin().unwrap();
        assert_eq!(steering.files.schedstat, kernel.0.path().join("proc/37/schedstat"));
        assert_eq!(kernel.settings(), FIRST);
        assert!(steering.tick().unwrap().steered);
        steering.end();
        assert_eq!(kernel.settings(), FORMER);
        assert!(!kernel.record().exists());
    }

    #[test]
    fn a_killed_daemon_is_succeeded() {
        let kernel = Kernel::new();
        drop(kernel.begin().unwrap());
        assert_eq!(kernel.settings(), FIRST);
        // Killed between two settings that belong together.
        kernel.write_ksm("sleep_millisecs", "40");
        let steering = kernel.begin().unwrap();
        assert_eq!(kernel.settings(), FIRST);
        steering.end();
        assert_eq!(kernel.settings(), FORMER);
        // Settings that somebody made meanwhile are the former ones now.
        drop(kernel.begin().unwrap());
        kernel.write_ksm("run", "0");
        kernel.write_ksm("pages_to_scan", "777");
        kernel.begin().unwrap().end();
        assert_eq!(kernel.settings(), ["0", "777", "20"]);
    }

    #[test]
    fn what_somebody_else_runs_is_left_alone() {
        let kernel = Kernel::new();
        for (name, value) in [("run", "1"), ("run", "2"), ("advisor_mode", "none [scan-time]")] {
            let kernel = Kernel::new();
            kernel.write_ksm(name, value);
            let before = kernel.settings();
            let refused = kernel.begin().unwrap_err();
            assert!(matches!(refused, KsmError::InUse(_) | KsmError::Advised), "{refused}");
            assert_eq!(kernel.settings(), before);
        }
        // After a daemon was killed as well.
        drop(kernel.begin().unwrap());
        kernel.write_ksm("pages_to_scan", "5000");
        assert!(matches!(kernel.begin(), Err(KsmError::InUse(1))));
        assert_eq!(kernel.settings(), ["1", "5000", "20"]);
        kernel.write("proc/37/stat", "37 (kswapd0) S 2 0 0 0");
        assert!(matches!(kernel.begin(), Err(KsmError::Invisible)));
    }

    #[test]
    fn it_lets_go_when_somebody_else_changes_a_setting() {
        for (name, value, after) in [
            ("pages_to_scan", "5000", ["1", "5000", "20"]),
            ("run", "0", ["0", "100", "20"]),
            ("advisor_mode", "none [scan-time]", FIRST),
        ] {
            let kernel = Kernel::new();
            let mut steering = kernel.begin().unwrap();
            kernel.write_ksm(name, value);
            let error = steering.tick().unwrap_err();
            assert!(matches!(error, KsmError::Changed | KsmError::Advised), "{error}");
            assert_eq!(kernel.settings(), after);
            assert!(!kernel.record().exists());
        }
    }
}
