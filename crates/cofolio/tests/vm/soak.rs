//! Guests that check every byte of their memory and files while they allocate and free, while their
//! kernels move pages about, and while the daemon recycles and merges at its most aggressive, is
//! killed and comes back. `COFOLIO_SOAK_SECONDS` says for how long; `tools/soak vm` takes an hour.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use cofolio_guest::Message;
use cofolio_node::vm::account::VmReport;
use cofolio_node::vm::qmp::Qmp;
use cofolio_node::vm::ram::Ram;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::common::{cofolio, program, skip};
use super::{Host, host, until};

const TEST: &str = "no_byte_changes_in_recycled_and_merged_guests";
const MEMORY: u64 = 256 << 20;
/// Of these the last one's VMM is killed.
const GUESTS: [&str; 4] = ["one", "two", "three", "victim"];
/// A guest hangs if it prints nothing for this long. Its processor is emulated, and the host may be
/// busy.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// Random numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound
    }
}

/// A guest whose program is `cofolio-canary churn`.
struct Guest {
    name: &'static str,
    pid: i32,
    dir: PathBuf,
    output: File,
    said: String,
    heard: Instant,
    pages: u64,
    is_done: bool,
    qmp: Qmp,
}

/// Connects to a socket of a machine, however long its path is.
fn connect(dir: &Path, name: &str) -> UnixStream {
    let held = File::open(dir).unwrap();
    UnixStream::connect(format!("/proc/self/fd/{}/{name}", held.as_raw_fd())).unwrap()
}

impl Guest {
    fn start(host: &Host, name: &'static str, seed: u64) -> Self {
        let disk = format!("{}:300M", host.text(&format!("{name}.disk")));
        let (memory, seed) = (format!("{}M", MEMORY >> 20), format!("seed={seed}"));
        let mut args = vec!["vm", "run", "--accel", "tcg", "--kernel", &host.kernel, "--detach"];
        args.extend(["--name", name, "--memory", &memory, "--disk", &disk]);
        args.extend(["--entrypoint", "/cofolio-canary", "canary:1", "--", "churn", &seed]);
        args.extend(["seconds=1000000", "mib=96"]);
        host.run(&args).ok();
        let listed = host.guests().into_iter().find(|it| it["name"] == name).unwrap();
        let output = PathBuf::from(listed["output"].as_str().unwrap());
        let dir = output.parent().unwrap().to_owned();
        Self {
            name,
            pid: i32::try_from(listed["pid"].as_u64().unwrap()).unwrap(),
            output: File::open(output).unwrap(),
            said: String::new(),
            heard: Instant::now(),
            pages: 0,
            is_done: false,
            qmp: Qmp::new(connect(&dir, "qmp")).unwrap(),
            dir,
        }
    }

    /// Reads its output. Fails if a byte was wrong, or if it hangs.
    fn listen(&mut self) {
        let mut bytes = Vec::new();
        self.output.read_to_end(&mut bytes).unwrap();
        self.said += &String::from_utf8_lossy(&bytes);
        while let Some((line, rest)) = self.said.split_once('\n') {
            let name = self.name;
            let event: Value =
                serde_json::from_str(line.trim()).unwrap_or_else(|_| panic!("{name}: {line}"));
            assert_ne!(event["event"], "failed", "{name}: {}", event["why"]);
            self.is_done |= event["event"] == "done";
            self.pages = event["pages"].as_u64().unwrap_or(self.pages);
            self.heard = Instant::now();
            self.said = rest.to_owned();
        }
        assert!(self.is_done || self.heard.elapsed() < SILENCE_MAX, "{} hangs", self.name);
    }

    /// Bytes outside of its balloon.
    fn actual(&mut self) -> u64 {
        self.qmp.call("query-balloon", json!({})).unwrap()["actual"].as_u64().unwrap()
    }

    /// Sends a signal to its program: SIGUSR1 lets it rest, and the daemon pulses it then.
    fn signal(&self, signal: Signal) {
        let mut control = connect(&self.dir, "control");
        Message::Signal(signal.as_raw()).write(&mut control).unwrap();
    }

    fn merged(&self) -> u64 {
        let ram = Ram::find("/proc".as_ref(), self.pid.unsigned_abs(), MEMORY).unwrap();
        ram.content().unwrap().merged_bytes()
    }
}

/// Sums over all daemons.
#[derive(Debug, Default)]
struct Record {
    daemons: u64,
    kills: u64,
    /// Of these, while a balloon was inflated.
    kills_in_pulse: u64,
    pages_checked: u64,
    pool_pages: u64,
    zero_pages: u64,
    changed_pages: u64,
    busy_pages: u64,
    refused_runs: u64,
    pulses: u64,
    bytes_returned: u64,
    pool_bytes_most: u64,
}

/// A daemon and its last report.
struct Daemon<'h> {
    host: &'h Host,
    config: String,
    child: Child,
    asked: Instant,
    last: VmReport,
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<'h> Daemon<'h> {
    fn new(host: &'h Host) -> Self {
        let (config, socket) = (host.text("config.toml"), host.text("daemon.sock"));
        let text = format!(
            "[daemon]\nsocket = '{socket}'\n[vm]\nrecycle_seconds = 1\nreserve = '0 B'\n\
             recycle_cpu_percent = 100.0\nmerge_seconds = 1\nmerge_cpu_percent = 1000.0\n\
             merge_min_pages = 1\n"
        );
        fs::write(&config, text).unwrap();
        let child = Self::spawn(host, &config);
        Self { host, config, child, asked: Instant::now(), last: VmReport::default() }
    }

    /// In a mount namespace where the kernel says nothing of pressure: on a busy host, and these
    /// guests make it busy, pulses would wait until the guests have reported their free pages.
    fn spawn(host: &Host, config: &str) -> Child {
        let log = File::options().create(true).append(true).open(host.path("daemon.log")).unwrap();
        let script =
            "f=/proc/pressure/cpu; [ ! -e $f ] || mount --bind /dev/null $f && exec \"$@\"";
        let cofolio = cofolio();
        let mut args = vec!["--mount", "sh", "-c", script, "sh", cofolio.to_str().unwrap()];
        args.extend(["--config", config, "serve"]);
        let mut command = host.command_of("unshare".as_ref(), &args);
        command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }

    fn assert_lives(&mut self) {
        let said = fs::read_to_string(self.host.path("daemon.log")).unwrap_or_default();
        assert!(self.child.try_wait().unwrap().is_none(), "the daemon has ended: {said}");
    }

    /// Requests its report. It does not answer while it starts.
    fn report(&mut self) -> &VmReport {
        let ran = self.host.run(&["--config", &self.config, "vm", "top", "--json"]);
        if let Ok(report) = serde_json::from_str(&ran.stdout) {
            self.last = report;
        }
        self.asked = Instant::now();
        &self.last
    }

    /// Pages of these guests that it has merged.
    fn merged(&mut self, of: impl Fn(&str) -> bool) -> u64 {
        let machines = self.report().machines.iter().filter(|it| of(&it.name));
        machines.map(|it| it.merging.pool_pages + it.merging.zero_pages).sum()
    }

    /// Adds what it has done to the record, before it is killed.
    fn enter(&mut self, record: &mut Record) {
        record.daemons += 1;
        let last = std::mem::take(&mut self.last);
        for machine in &last.machines {
            record.pool_pages += machine.merging.pool_pages;
            record.zero_pages += machine.merging.zero_pages;
            record.changed_pages += machine.merging.changed_pages;
            record.busy_pages += machine.merging.busy_pages;
            record.refused_runs += machine.merging.refused_runs;
            record.pulses += machine.recycling.pulses;
        }
        record.bytes_returned += last.returned_bytes;
        record.pool_bytes_most = record.pool_bytes_most.max(last.pool_bytes);
    }

    fn kill(&mut self) {
        self.assert_lives();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn prepared() -> Option<Host> {
    let host = host(TEST)?;
    let beside = |name: &str| cofolio().parent().unwrap().join("..").join(name);
    let canary = beside("canary/cofolio-canary");
    if !canary.exists() || !beside("lib/cofolio/libcofolio_shim.so").exists() {
        skip(TEST, "tools/guest was not run, with --canary and without");
        return None;
    }
    if program("mkfs.ext4").is_none() {
        skip(TEST, "no mkfs.ext4");
        return None;
    }
    let image = host.dir("image");
    fs::copy(canary, image.join("cofolio-canary")).unwrap();
    host.run(&["import", "--name", "canary:1", &format!("dir:{}", image.display())]).ok();
    Some(host)
}

/// Watches guests and the daemon for a while.
fn watch(guests: &mut [Guest], daemon: &mut Daemon<'_>, wait: Duration) {
    let until = Instant::now() + wait;
    loop {
        guests.iter_mut().for_each(Guest::listen);
        daemon.assert_lives();
        if daemon.asked.elapsed() >= Duration::from_secs(2) {
            daemon.report();
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(100)));
    }
}

#[test]
fn no_byte_changes_in_recycled_and_merged_guests() {
    let Some(host) = prepared() else { return };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seconds: u64 = number("COFOLIO_SOAK_SECONDS").unwrap_or(60);
    let seed: u64 = number("COFOLIO_SEED").unwrap_or(1);
    println!("{seconds} s, COFOLIO_SEED={seed}");
    let mut random = Random(seed);
    let mut guests: Vec<Guest> = std::thread::scope(|scope| {
        let start = |(number, name)| {
            let (host, seed) = (&host, seed + number);
            scope.spawn(move || Guest::start(host, name, seed))
        };
        let threads: Vec<_> = (0..).zip(GUESTS).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // The shim is in their VMMs, and no daemon is there.
    until("all guests check pages without a daemon", || {
        guests.iter_mut().for_each(Guest::listen);
        guests.iter().all(|guest| guest.pages > 0).then_some(())
    });
    assert_eq!(guests.iter().map(Guest::merged).sum::<u64>(), 0);

    let began = Instant::now();
    let (end, mut record) = (Duration::from_secs(seconds), Record::default());
    let mut daemon = Daemon::new(&host);
    watch(&mut guests, &mut daemon, end / 4);
    guests.iter().for_each(|guest| guest.signal(Signal::USR1));
    until("memory of resting guests is returned", || {
        watch(&mut guests, &mut daemon, Duration::from_secs(1));
        (daemon.report().returned_bytes > 16 << 20).then_some(())
    });
    guests.iter().for_each(|guest| guest.signal(Signal::USR2));
    // A VMM is killed while its pages are merged: once a second they are.
    let wait = end / 8 + Duration::from_millis(random.below(3000));
    watch(&mut guests, &mut daemon, wait);
    let mut victim = guests.pop().unwrap();
    victim.listen();
    record.pages_checked += victim.pages;
    kill_process(Pid::from_raw(victim.pid).unwrap(), Signal::KILL).unwrap();
    let before = daemon.merged(|name| name != victim.name);
    until("the others are still merged", || {
        watch(&mut guests, &mut daemon, Duration::from_secs(1));
        (daemon.merged(|name| name != victim.name) > before).then_some(())
    });

    let mut said = began.elapsed();
    while began.elapsed() < end || record.kills < 4 {
        let in_pulse = record.kills % 2 == 0;
        if in_pulse {
            // Guests work and rest in turn: a pulse lasts less than a second, and comes after work.
            let (mut rests, mut since) = (false, Instant::now());
            until("a balloon is inflated", || {
                watch(&mut guests, &mut daemon, Duration::from_millis(10));
                if since.elapsed() > Duration::from_secs(5) {
                    (rests, since) = (!rests, Instant::now());
                    let signal = if rests { Signal::USR1 } else { Signal::USR2 };
                    guests.iter().for_each(|guest| guest.signal(signal));
                }
                guests.iter_mut().any(|it| it.actual() < MEMORY).then_some(())
            });
            std::thread::sleep(Duration::from_millis(random.below(50)));
        } else {
            let wait = Duration::from_millis(random.below(8000));
            watch(&mut guests, &mut daemon, wait);
        }
        daemon.kill();
        record.kills += 1;
        record.kills_in_pulse += u64::from(guests.iter_mut().any(|it| it.actual() < MEMORY));
        daemon.enter(&mut record);
        if random.below(3) == 0 {
            // Nobody is there for a while.
            std::thread::sleep(Duration::from_millis(random.below(2000)));
        }
        daemon.child = Daemon::spawn(&host, &daemon.config);
        if in_pulse {
            guests.iter().for_each(|guest| guest.signal(Signal::USR2));
        }
        if began.elapsed() > said + Duration::from_secs(300) {
            said = began.elapsed();
            println!("{} s: {record:?}", said.as_secs());
        }
    }
    // The last merger continues with pools of mergers that were killed.
    until("the last daemon has merged pages", || {
        watch(&mut guests, &mut daemon, Duration::from_secs(1));
        (daemon.merged(|_| true) > 0).then_some(())
    });
    until("all balloons are let go", || {
        watch(&mut guests, &mut daemon, Duration::from_millis(100));
        guests.iter_mut().all(|guest| guest.actual() == MEMORY).then_some(())
    });
    guests.iter().for_each(|guest| guest.signal(Signal::TERM));
    until("all guests have checked everything once more", || {
        guests.iter_mut().for_each(Guest::listen);
        guests.iter().all(|guest| guest.is_done).then_some(())
    });
    daemon.report();
    daemon.enter(&mut record);
    record.pages_checked += guests.iter().map(|guest| guest.pages).sum::<u64>();
    println!("{} s: {record:#?}", began.elapsed().as_secs());
    let said = fs::read_to_string(host.path("daemon.log")).unwrap();
    let mut lines = BTreeMap::<&str, u64>::new();
    said.lines().for_each(|line| *lines.entry(line).or_default() += 1);
    println!("the daemons said: {lines:#?}");
    assert!(!said.contains("panicked"), "{said}");
    // Otherwise nothing was shown. More is asked of a longer run.
    let many = |each_minute: u64| each_minute * seconds.max(60) / 60;
    assert!(record.pool_pages > many(10_000) && record.zero_pages > many(1000), "{record:?}");
    assert!(record.changed_pages > many(10) && record.busy_pages > 0, "{record:?}");
    assert!(record.pulses >= many(2) && record.bytes_returned > many(8 << 20), "{record:?}");
    assert!(record.kills >= many(4) && record.kills_in_pulse > 0, "{record:?}");
}
