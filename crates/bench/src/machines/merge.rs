//! `cofolio-bench vm-merge`: how fast duplicate pages of real guests are merged: the merger against
//! KSM.
//!
//! Guests are those of `cofolio vm run`, but QEMU is started by the script `QEMU`. It leaves out
//! the balloon: what guests report free while pages are merged must not count as merged. For KSM it
//! also turns QEMU's own `mem-merge` on, by which KSM scans the guests' memory and nothing else of
//! the process, and leaves out the merger's library.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cofolio_cli::interrupt::Cancellable;
use cofolio_node::vm::Accel;
use cofolio_node::vm::merger::{MergePolicy, Merger};
use cofolio_node::vm::ram::Ram;
use serde::Serialize;

use super::{Host, HostArgs, Machine, accel, executed_by, mark};
use crate::goals::Goals;
use crate::ksm::{self, Ksm};
use crate::median::{highest, median};
use crate::merge::{CPU_MIN, DONE, SPEED_MIN, defaults, defaults_title};
use crate::place::{Place, PlaceArgs};
use crate::{Outcome, cleanup, report, threads};

/// Time that an engine works on guests.
const ENGINE: Duration = Duration::from_secs(40);
/// Time between two samples of KSM; the merger is sampled after each pass.
const LOOK: Duration = Duration::from_millis(20);
/// Time between two passes of the merger at full speed, after the first ones.
const PERIOD: Duration = Duration::from_secs(1);
/// `qemu-system-x86_64` in the place of QEMU, as the first one in `PATH`.
const QEMU: &str = r#"#!/bin/sh
PATH="${PATH#*:}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin"
left=$#
while [ $left -gt 0 ]; do
    word=$1
    shift
    left=$((left - 1))
    case $word,$1 in
    -device,virtio-balloon*)
        shift
        left=$((left - 1))
        continue
        ;;
    esac
    if [ -n "$COFOLIO_BENCH_KSM" ]; then
        case $word in
        *mem-merge=off) word=${word%off}on ;;
        esac
    fi
    set -- "$@" "$word"
done
[ -z "$COFOLIO_BENCH_KSM" ] || unset LD_PRELOAD
exec qemu-system-x86_64 "$@"
"#;
/// Time between the start of the last guest and the first sample.
const SETTLE: Duration = Duration::from_secs(10);
const PAGE: u64 = 4096;
/// A Redis with 200 MB of data, the same in all guests.
const SCRIPT: &str = "
redis-server --save '' --enable-debug-command yes >/dev/null &
until redis-cli debug populate 150000 key 1024 >/dev/null 2>&1; do sleep 1; done
echo '{\"event\":\"ready\"}'
wait";

/// Merging of duplicate pages of real guests: the merger against KSM
///
/// Starts guests of an image, and lets one engine merge their pages: KSM at full speed
/// (pages_to_scan = 1000000, sleep_millisecs = 0, use_zero_pages = 1) on the guests' memory; the
/// merger at full speed, single pages too; or the merger as it comes, but with a period of 1 s. No
/// guest has a balloon. Pages are saved if they are mapped from pools, from files of the image or
/// are the kernel's page of zeros, less the pages of pools; KSM counts its own the same way. All
/// engines of a round are compared at one number of saved pages: 95 % of the most that one of them
/// saves in the end. KSM must be off, and its settings are restored.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench vm-merge corpus/out/redis/new --kernel vmlinuz --json vm-merge.json

Exit codes: 0 the goals are met, or the run is smaller than they are of; 1 one is missed; others as for every command.")]
pub(crate) struct Args {
    /// OCI layout directory, OCI archive or `docker save` archive
    image: String,
    /// Script of the guests; prints {"event":"ready"} when it is ready [default: Redis with 150000
    /// keys]
    #[arg(long, value_name = "SCRIPT", hide_default_value = true, default_value = SCRIPT)]
    script: String,
    /// Guests
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=1000))]
    guests: u32,
    /// MiB of each
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(128..=1 << 20))]
    memory: u64,
    /// How often each engine works on new guests, in turn
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Engine {
    Ksm,
    MergerDefaults,
    Merger,
}

impl Engine {
    const ALL: [Self; 3] = [Self::Ksm, Self::MergerDefaults, Self::Merger];

    fn title(self) -> String {
        match self {
            Self::Ksm => {
                "KSM, pages_to_scan=1000000, sleep 0, use_zero_pages=1, mem-merge=on".to_owned()
            }
            Self::MergerDefaults => defaults_title(),
            Self::Merger => {
                let threads = MergePolicy::default().threads;
                format!("merger at full speed, run_min 1, {threads} threads")
            }
        }
    }
}

/// Progress of an engine at a moment.
#[derive(Debug, Clone, Copy, Serialize)]
struct Moment {
    seconds: f64,
    /// Saved pages.
    saved: u64,
    /// Processor seconds of the engine.
    cpu: f64,
}

/// Result of an engine in a round.
#[derive(Debug, Serialize)]
struct Ran {
    round: u32,
    engine: Engine,
    /// Private pages of the guests before.
    held: u64,
    moments: Vec<Moment>,
}

impl Ran {
    fn saved(&self) -> u64 {
        self.moments.iter().map(|it| it.saved).max().unwrap_or(0)
    }

    /// The first moment at which it had saved so many pages.
    fn at(&self, pages: f64) -> Option<Moment> {
        self.moments.iter().find(|it| it.saved as f64 >= pages).copied()
    }
}

#[derive(Debug, Serialize)]
struct Figures {
    accel: Accel,
    guests: u32,
    memory_mib: u64,
    script: String,
    runs: Vec<Ran>,
}

/// The time, or processor time, of an engine at a moment.
type Taken = fn(&Moment) -> f64;

impl Figures {
    fn of(&self, engine: Engine) -> impl Iterator<Item = &Ran> {
        self.runs.iter().filter(move |it| it.engine == engine)
    }

    fn in_round(&self, round: u32, engine: Engine) -> Option<&Ran> {
        self.of(engine).find(|it| it.round == round)
    }

    /// 95 % of the most and of the least that an engine at full speed saved in a round, in pages.
    fn levels(&self, round: u32) -> [f64; 2] {
        let saved = |engine| self.in_round(round, engine).map_or(0.0, |it| it.saved() as f64);
        let (ksm, ours) = (saved(Engine::Ksm), saved(Engine::Merger));
        // The merger's defaults are no rival, but they can save more.
        let most = ksm.max(ours).max(saved(Engine::MergerDefaults));
        [most * DONE, ksm.min(ours) * DONE]
    }

    /// Time of the merger in a round until it had saved the same number of pages as KSM, divided by
    /// the time of KSM: this is KSM's rate divided by the merger's. Not a number, and so a goal
    /// missed, if the merger did not get to 95 % of the most that an engine saved. KSM has no
    /// figure there if it did not. So both are also compared at 95 % of the lesser saving, and the
    /// worse ratio counts.
    fn ratio(&self, round: u32, taken: Taken) -> f64 {
        let runs = self.in_round(round, Engine::Ksm).zip(self.in_round(round, Engine::Merger));
        let Some((ksm, ours)) = runs else { return f64::NAN };
        let ratio = |pages: f64| match (ksm.at(pages), ours.at(pages)) {
            (Some(ksm), Some(ours)) => taken(&ours) / taken(&ksm),
            (None, Some(_)) => 0.0,
            (_, None) => f64::NAN,
        };
        highest(self.levels(round).map(ratio))
    }

    fn worst_ratio(&self, taken: Taken) -> f64 {
        highest(self.of(Engine::Merger).map(|it| self.ratio(it.round, taken)))
    }

    /// Medians of an engine's times until a level; none if it did not get there in each round.
    fn taken(&self, engine: Engine, level: usize) -> Option<Row> {
        let reached = self.of(engine).map(|it| {
            let pages = self.levels(it.round)[level];
            Some((pages, it.at(pages)?))
        });
        let reached: Vec<(f64, Moment)> = reached.collect::<Option<_>>()?;
        let median = |figure: fn(&(f64, Moment)) -> f64| median(reached.iter().map(figure));
        Some(Row {
            seconds: median(|(_, at)| at.seconds),
            per_second: median(|(pages, at)| pages / at.seconds),
            cpu: median(|(_, at)| at.cpu),
            per_cpu_second: median(|(pages, at)| pages / at.cpu),
        })
    }
}

/// Figures of an engine until a level.
struct Row {
    seconds: f64,
    per_second: f64,
    cpu: f64,
    per_cpu_second: f64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let signals = Cancellable::begin()?;
    // Waits for other benchmarks.
    let place = Place::prepare(&args.place, None, &say)?;
    ksm::ensure_unused()?;
    let host = Host::new(&args.host, &place.domain, &signals.cancel)?;
    host.import(&args.image, "merge:1")?;
    let mut runs = Vec::new();
    for round in 1..=args.rounds {
        for engine in Engine::ALL {
            say(&format!("round {round}, {}", engine.title()));
            let ran = run_engine(args, &host, round, engine);
            let stopped = host.stop_all();
            let ran = cleanup::result(&signals.cancel, ran, stopped)?;
            let done = ran.at(ran.saved() as f64 * DONE);
            say(&format!("{} of {} pages, 95 % of them at {done:?}", ran.saved(), ran.held));
            runs.push(ran);
        }
    }
    let (guests, memory_mib, script) = (args.guests, args.memory, args.script.clone());
    let figures = Figures { accel: accel(), guests, memory_mib, script, runs };
    let (root, goals) = (Path::new("/"), goals(args, &figures));
    report::finish(args.place.json.as_deref(), root, &figures, &table(&figures), &goals)
}

fn run_engine(args: &Args, host: &Host<'_>, round: u32, engine: Engine) -> Result<Ran> {
    let dir = tempfile::tempdir()?;
    let qemu = dir.path().join("qemu-system-x86_64");
    fs::write(&qemu, QEMU)?;
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755))?;
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("PATH={}:{path}", dir.path().display());
    let ksm = format!("COFOLIO_BENCH_KSM={}", if engine == Engine::Ksm { "1" } else { "" });
    let by = ["env", &path, &ksm];
    let memory = format!("{}M", args.memory);
    let options = ["--memory", &memory, "--user", "0", "--entrypoint", "sh"];
    let start = |number| -> Result<Machine> {
        let name = format!("merge{number}");
        let machine = host.start(&by, &name, &options, "merge:1", &["-c", &args.script])?;
        ensure_edited(&machine, engine)?;
        Ok(machine)
    };
    let mut machines = (0..args.guests).map(start).collect::<Result<Vec<_>>>()?;
    machines.iter_mut().try_for_each(|machine| machine.wait_for("ready").map(drop))?;
    host.wait(SETTLE)?;
    let rams = machines
        .iter()
        .map(|machine| Ok(Ram::find(Path::new("/proc"), machine.pid, args.memory << 20)?));
    let rams = rams.collect::<Result<Vec<_>>>()?;
    let private = rams.iter().map(|ram| Ok(ram.resident()?.private() / PAGE));
    let held = private.sum::<Result<u64>>()?;
    let moments = match engine {
        Engine::Ksm => with_ksm(host)?,
        Engine::MergerDefaults | Engine::Merger => with_merger(host, engine, &machines, &rams)?,
    };
    Ok(Ran { round, engine, held, moments })
}

/// Fails if a guest was not started as this benchmark needs it.
fn ensure_edited(machine: &Machine, engine: Engine) -> Result<()> {
    let words = fs::read_to_string(format!("/proc/{}/cmdline", machine.pid))?;
    ensure!(!words.contains("virtio-balloon"), "{} has a balloon", machine.name);
    let merge = if engine == Engine::Ksm { "mem-merge=on" } else { "mem-merge=off" };
    ensure!(words.contains(merge), "{} was not started with {merge}", machine.name);
    Ok(())
}

fn with_ksm(host: &Host<'_>) -> Result<Vec<Moment>> {
    let cpu = || threads::of("/proc").seconds("ksmd");
    let (before, began) = (cpu(), Instant::now());
    let _ksm = Ksm::start(true)?;
    let mut moments = Vec::new();
    while began.elapsed() < ENGINE {
        host.wait(LOOK)?;
        let saved = ksm::saved_pages()?;
        moments.push(Moment { seconds: began.elapsed().as_secs_f64(), saved, cpu: cpu() - before });
    }
    Ok(moments)
}

fn with_merger(
    host: &Host<'_>,
    engine: Engine,
    machines: &[Machine],
    rams: &[Ram],
) -> Result<Vec<Moment>> {
    let cpu = || {
        let shims = machines.iter().map(|it| threads::of(&it.tasks()).seconds("cofolio-shim"));
        threads::own_seconds() + shims.sum::<f64>()
    };
    // Bytes that were merged, and of the kernel's page of zeros. Pages that guests have written to
    // since do not count.
    let merged = || -> Result<u64> {
        let contents = rams.iter().map(|ram| {
            let content = ram.content()?;
            Ok(content.merged_bytes() + content.resident.zeros)
        });
        contents.sum()
    };
    let full_speed = {
        let default = MergePolicy::default();
        MergePolicy { run_min: 1, share: default.threads as f64, ..default }
    };
    let mut merger = Merger::new(match engine {
        Engine::MergerDefaults => defaults(),
        _ => full_speed,
    });
    let targets = host.targets().len();
    ensure!(targets == machines.len(), "{targets} of {} guests can be merged", machines.len());
    let merged_before = merged()?;
    let (before, began) = (cpu(), Instant::now());
    let mut moments: Vec<Moment> = Vec::new();
    // Processor seconds of counting. That of KSM is free.
    let mut counting = 0.0;
    while began.elapsed() < ENGINE {
        let report = merger.pass(host.targets(), &|line| eprintln!("{line}"));
        let seconds = began.elapsed().as_secs_f64();
        for (name, merging) in &report.guests {
            ensure!(merging.refusal.is_none(), "{name} is not merged: {:?}", merging.refusal);
        }
        let spent = cpu();
        let saved = merged()?.saturating_sub(merged_before + report.pool_bytes) / PAGE;
        moments.push(Moment { seconds, saved, cpu: spent - before - counting });
        counting += cpu() - spent;
        if engine == Engine::MergerDefaults {
            host.wait(report.wait)?;
        } else if moments.len() > 2 {
            // At first two looks are right behind each other: KSM does not wait either.
            host.wait(PERIOD)?;
        }
    }
    Ok(moments)
}

fn goals(args: &Args, figures: &Figures) -> Goals {
    let size = "4 guests or more with 512 MiB or more each, 3 rounds or more";
    let is_of_this_size = args.guests >= 4 && args.memory >= 512 && args.rounds >= 3;
    let mark = mark(figures.accel);
    let saved = |it: &Ran| {
        let ksm = figures.in_round(it.round, Engine::Ksm);
        ksm.map_or(f64::NAN, |ksm| ksm.saved() as f64) / it.saved() as f64
    };
    // The bounds are of "at least": the inverse is at most.
    Goals::new(size, is_of_this_size)
        .at_most(
            format!(
                "KSM's pages per second, of the merger's at full speed, in the worst round{mark}"
            ),
            figures.worst_ratio(|it| it.seconds),
            1.0 / SPEED_MIN,
            "",
        )
        .at_most(
            format!("KSM's pages per processor second, the same{mark}"),
            figures.worst_ratio(|it| it.cpu),
            1.0 / CPU_MIN,
            "",
        )
        .figure(
            "pages that KSM saved, of the merger's at full speed, in the worst round",
            highest(figures.of(Engine::Merger).map(saved)),
            "",
        )
}

fn table(figures: &Figures) -> String {
    let mark = mark(figures.accel);
    let columns =
        format!("{{}} after{mark} | pages/s{mark} | CPU{mark} | pages per CPU second{mark}");
    let columns = |level: &str| columns.replace("{}", level);
    let mut text = format!(
        "{} guests with {} MiB each, without a balloon; {}. Medians of {} rounds. A is 95 % of the \
        most that an engine saved in the round, B 95 % of the least that one at full speed did: \
        that of KSM or of the merger.\n\n\
        | engine | private pages before | saved | {} | {} |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        figures.guests,
        figures.memory_mib,
        executed_by(figures.accel),
        figures.of(Engine::Merger).count(),
        columns("A"),
        columns("B"),
    );
    for engine in Engine::ALL {
        let taken = |level| match figures.taken(engine, level) {
            None => format!("not within {} s | – | – | –", ENGINE.as_secs()),
            Some(Row { seconds, per_second, cpu, per_cpu_second }) => {
                format!("{seconds:.2} s | {per_second:.0} | {cpu:.2} s | {per_cpu_second:.0}")
            }
        };
        text += &format!(
            "| {} | {:.0} | {:.0} | {} | {} |\n",
            engine.title(),
            median(figures.of(engine).map(|it| it.held as f64)),
            median(figures.of(engine).map(|it| it.saved() as f64)),
            taken(0),
            taken(1),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::process::Command;

    use super::*;

    /// Saves so many pages after so many seconds.
    fn ran(round: u32, engine: Engine, moments: &[(f64, u64)]) -> Ran {
        let moment = |&(seconds, saved)| Moment { seconds, saved, cpu: 2.0 * seconds };
        Ran { round, engine, held: 2000, moments: moments.iter().map(moment).collect() }
    }

    fn figures(ksm: &[(f64, u64)], ours: &[(f64, u64)]) -> Figures {
        let runs = vec![
            ran(1, Engine::Ksm, &[(4.0, 950), (8.0, 1000)]),
            ran(1, Engine::Merger, &[(1.0, 950), (3.0, 1000)]),
            ran(2, Engine::Ksm, ksm),
            ran(2, Engine::Merger, ours),
        ];
        let (guests, memory_mib, script) = (4, 512, String::new());
        Figures { accel: Accel::Tcg, guests, memory_mib, script, runs }
    }

    /// Each engine was done at 95 % of its own: one that saved half as much was done sooner.
    #[test]
    fn an_engine_that_saves_less_is_not_done_sooner() {
        let seconds: Taken = |it| it.seconds;
        let equal = figures(&[(4.0, 950), (8.0, 1000)], &[(1.2, 960), (3.0, 1000)]);
        assert_eq!(equal.worst_ratio(seconds), 0.3);
        let less = figures(&[(4.0, 950), (8.0, 1000)], &[(1.0, 500), (40.0, 500)]);
        assert!(less.worst_ratio(seconds).is_nan());
        assert!(less.taken(Engine::Merger, 0).is_none());
        assert_eq!(less.taken(Engine::Ksm, 0).map(|it| it.per_second), Some(237.5));
        let table = goals_of(&less);
        assert!(table.contains("in the worst round (emulated) | NaN | 0.333"), "{table}");
        assert_eq!(table.matches("MISSED").count(), 2, "{table}");
        // KSM has no figure there: where it was done counts.
        let more = figures(&[(0.5, 500), (40.0, 500)], &[(1.0, 490), (3.0, 1000)]);
        assert_eq!(more.worst_ratio(seconds), 2.0);
        assert!(more.taken(Engine::Ksm, 0).is_none());
    }

    fn goals_of(figures: &Figures) -> String {
        let args = ["vm-merge", "image", "--kernel", "vmlinuz"];
        #[derive(clap::Parser)]
        struct Parsed {
            #[command(flatten)]
            args: Args,
        }
        let parsed = <Parsed as clap::Parser>::parse_from(args);
        goals(&parsed.args, figures).table()
    }

    /// The words of [`QEMU`]'s command line, with a program that prints them.
    fn edited(ksm: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        write("first/qemu-system-x86_64", QEMU);
        write("next/qemu-system-x86_64", "#!/bin/sh\nprintf '[%s]' \"$@\" \"$LD_PRELOAD\"\n");
        let path = ["first", "next"].map(|name| dir.path().join(name).display().to_string());
        let mut command = Command::new(dir.path().join("first/qemu-system-x86_64"));
        command.args(["-name", "a b", "-machine", "pc,mem-merge=off"]);
        command.args(["-device", "virtio-balloon-pci,id=balloon", "-device", "virtio-serial-pci"]);
        command.env("PATH", format!("{}:/usr/bin:/bin", path.join(":")));
        command.env("COFOLIO_BENCH_KSM", ksm).env("LD_PRELOAD", "");
        let done = command.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    #[test]
    fn qemu_has_no_balloon_and_lets_ksm_merge() {
        let words = |merge: &str| {
            format!("[-name][a b][-machine][pc,mem-merge={merge}][-device][virtio-serial-pci][]")
        };
        assert_eq!(edited(""), words("off"));
        assert_eq!(edited("1"), words("on"));
    }
}
