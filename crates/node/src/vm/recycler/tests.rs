//! Guests and VMMs of every kind, by a counted clock, and one VMM that says nothing.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::FlockOperation;
use serde_json::{Value, json};

use super::balloon::{Balloon, Description, GuestMemory};
use super::host::{Filled, Host};
use super::*;
use crate::run_dir::running;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 1024 * MIB;
/// How much a balloon moves from one look to the next.
const SPEED: u64 = 64 * MIB;

/// A guest and its VMM, as far as the recycler has to do with them.
#[derive(Debug, Clone)]
struct World {
    now: Duration,
    /// Bytes that the guest uses, that it has free and the host holds, and those in the balloon.
    used: u64,
    held: u64,
    /// Of those that it uses.
    merged: u64,
    balloon: u64,
    /// Outside of the balloon, as it was asked for.
    wanted: u64,
    inflates: bool,
    deflates: bool,
    /// What the guest says of its free memory, if not the truth.
    lie: Option<u64>,
    stalls: u64,
    /// The guest's last figures, which it gives once a second.
    said: (Duration, GuestMemory),
    refusal: Option<&'static str>,
    is_broken: bool,
    /// Questions for the balloon's size, and sizes asked for.
    looks: u32,
    asked: Vec<u64>,
}

#[derive(Debug, Clone)]
struct Fake(Arc<Mutex<World>>);

impl World {
    fn free(&self) -> u64 {
        MEMORY - self.used - self.balloon
    }

    fn advance(&mut self, now: Duration) {
        self.now = now;
        let second = Duration::from_secs(now.as_secs());
        if self.said.0 < second || now.is_zero() {
            let free = self.lie.unwrap_or(self.free());
            let memory = GuestMemory { free, stalls: self.stalls, ..GuestMemory::default() };
            self.said = (second, memory);
        }
        self.held = self.held.min(self.free());
    }
}

impl Balloon for Fake {
    fn describe(&mut self) -> io::Result<Description> {
        Ok(Description { memory_bytes: MEMORY, ..Description::default() })
    }

    fn ask_every(&mut self, _seconds: u64) -> io::Result<()> {
        Ok(())
    }

    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        let world = lock(&self.0);
        let (at, memory) = world.said;
        Ok(Some(GuestMemory { age: world.now - at, ..memory }))
    }

    fn actual(&mut self) -> io::Result<u64> {
        let mut world = lock(&self.0);
        if world.is_broken {
            return Err(io::ErrorKind::TimedOut.into());
        }
        world.looks += 1;
        let target = MEMORY - world.wanted;
        if target > world.balloon && world.inflates {
            let more = (target - world.balloon).min(SPEED).min(world.free());
            world.balloon += more;
            // The balloon gets pages that the host holds first.
            world.held = world.held.saturating_sub(more).min(world.free());
        } else if target < world.balloon && world.deflates {
            world.balloon -= (world.balloon - target).min(4 * SPEED);
        }
        Ok(MEMORY - world.balloon)
    }

    fn set(&mut self, bytes: u64) -> io::Result<()> {
        let mut world = lock(&self.0);
        world.wanted = bytes;
        world.asked.push(bytes);
        Ok(())
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        Ok(lock(&self.0).refusal.map(str::to_owned))
    }
}

impl Host for Fake {
    fn count(&mut self) -> io::Result<Filled> {
        let world = lock(&self.0);
        Ok(Filled { private: world.used - world.merged + world.held, shared: world.merged })
    }

    fn estimate(&mut self) -> io::Result<Filled> {
        self.count()
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        Ok(None)
    }
}

struct Test {
    world: Arc<Mutex<World>>,
    guest: Guest,
    pressure: Pressure,
}

impl Test {
    /// A guest that has freed 400 MiB of 500 a while ago.
    fn new(change: impl FnOnce(&mut World)) -> Self {
        Self::with(Policy::default(), change)
    }

    fn with(policy: Policy, change: impl FnOnce(&mut World)) -> Self {
        let mut world = World {
            now: Duration::ZERO,
            used: 100 * MIB,
            held: 400 * MIB,
            merged: 0,
            balloon: 0,
            wanted: MEMORY,
            inflates: true,
            deflates: true,
            lie: None,
            stalls: 0,
            said: (Duration::ZERO, GuestMemory::default()),
            refusal: None,
            is_broken: false,
            looks: 0,
            asked: Vec::new(),
        };
        change(&mut world);
        world.advance(Duration::ZERO);
        let world = Arc::new(Mutex::new(world));
        let fake = || Box::new(Fake(Arc::clone(&world)));
        let guest = Guest::new(MEMORY, fake(), fake(), policy, Duration::ZERO).unwrap();
        Self { world, guest, pressure: Pressure::default() }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }

    /// Steps until a moment, or until something is so.
    fn until(&mut self, seconds: u64, mut is_so: impl FnMut(&World, &Guest) -> bool) {
        while self.guest.due() <= Duration::from_secs(seconds) {
            let now = self.guest.due();
            self.world().advance(now);
            self.guest.step(now, self.pressure).unwrap();
            assert!(self.guest.due() > now, "it would be busy for ever");
            if is_so(&self.world(), &self.guest) {
                return;
            }
        }
    }

    fn run(&mut self, seconds: u64) {
        self.until(seconds, |_, _| false);
    }

    fn recycling(&self) -> Recycling {
        self.guest.recycling().clone()
    }
}

const RESERVE: u64 = 32 * MIB;

#[test]
fn a_pulse_returns_what_was_freed() {
    let mut it = Test::new(|world| (world.used, world.held) = (500 * MIB, 0));
    it.run(10);
    assert_eq!(it.recycling().pulses, 0);
    {
        let mut world = it.world();
        (world.used, world.held) = (100 * MIB, 400 * MIB);
    }
    it.run(20);
    let recycling = it.recycling();
    assert_eq!((recycling.pulses, recycling.aborted), (1, 0));
    assert!(recycling.returned_bytes >= 400 * MIB - RESERVE, "{recycling:?}");
    let world = it.world();
    assert_eq!((world.balloon, world.wanted), (0, MEMORY));
    let held = (world.used + world.held) as f64;
    assert!(held <= 1.1 * (world.used + RESERVE) as f64, "{held}");
    assert!(it.guest.latencies().quantile_ms(0.99).unwrap() <= 5000);
    let waited: u64 = it.guest.latencies().bytes.iter().sum();
    assert_eq!(waited, 400 * MIB - RESERVE);
}

/// As much freed memory as the guest had merged seemed to be in use.
#[test]
fn merged_pages_hide_no_freed_memory() {
    let mut it = Test::new(|world| (world.used, world.merged) = (500 * MIB, 400 * MIB));
    it.run(20);
    let recycling = it.recycling();
    assert_eq!(recycling.pulses, 1);
    let returned = 400 * MIB - RESERVE..=400 * MIB;
    assert!(returned.contains(&recycling.returned_bytes), "{recycling:?}");
    // The guest frees merged pages, too, and the balloon takes them: the host had no memory in
    // them.
    {
        let mut world = it.world();
        (world.used, world.merged, world.held) = (100 * MIB, 0, 0);
    }
    it.run(60);
    assert_eq!(it.recycling().returned_bytes, recycling.returned_bytes);
}

/// What the guest took back was counted as returned.
#[test]
fn memory_that_is_used_again_was_not_returned() {
    let mut it = Test::new(|world| world.refusal = Some("for now"));
    it.run(5);
    assert_eq!(it.recycling().unreturned_bytes, 400 * MIB);
    {
        let mut world = it.world();
        (world.used, world.held) = (500 * MIB, 0);
    }
    it.run(10);
    assert_eq!(it.recycling().unreturned_bytes, 0);
    assert_eq!(it.guest.latencies().bytes.iter().sum::<u64>(), 0);
}

#[test]
fn a_pulse_takes_no_more_than_the_cap_and_goes_on_with_the_next() {
    let policy = Policy { pulse_max: 128 * MIB, ..Policy::default() };
    let mut it = Test::with(policy, |_| {});
    it.run(60);
    let world = it.world().clone();
    assert_eq!(world.asked.iter().min(), Some(&(MEMORY - 128 * MIB)));
    assert!(world.held <= 2 * RESERVE, "{}", world.held);
    assert!((3..=6).contains(&it.recycling().pulses), "{:?}", it.recycling());
}

#[test]
fn a_pulse_ends_when_the_guest_needs_memory() {
    let mut it = Test::new(|_| {});
    it.until(60, |world, _| world.balloon > 0);
    // It swaps, and says so with its next figures.
    {
        let mut world = it.world();
        (world.stalls, world.inflates) = (1, true);
        let now = world.now;
        world.said = (now, GuestMemory { free: 300 * MIB, stalls: 1, ..GuestMemory::default() });
    }
    it.until(60, |world, _| world.wanted == MEMORY);
    let world = it.world().clone();
    assert!(world.balloon < 300 * MIB, "{}", world.balloon / MIB);
    it.until(60, |world, _| world.balloon == 0);
    assert_eq!(it.recycling().aborted, 1);
}

#[test]
fn a_pulse_ends_when_the_host_becomes_busy() {
    let mut it = Test::new(|_| {});
    it.until(60, |world, _| world.balloon > 0);
    it.pressure = Pressure { cpu: 90.0, memory: 0.0 };
    it.until(60, |world, _| world.wanted == MEMORY);
    assert_eq!(it.recycling().aborted, 1);
    // One that begins on a busy host, since memory comes first there, goes on.
    it.pressure = Pressure { cpu: 90.0, memory: 20.0 };
    it.until(60, |_, guest| guest.recycling().pulses == 2);
    it.run(70);
    assert_eq!(it.recycling().aborted, 1);
    assert!(it.world().held <= 2 * RESERVE);
}

#[test]
fn a_guest_that_never_inflates_is_asked_less_and_less_often() {
    let mut it = Test::new(|world| world.inflates = false);
    it.run(3600);
    assert!((5..25).contains(&it.recycling().pulses), "{:?}", it.recycling());
    assert_eq!(it.recycling().returned_bytes, 0);
    assert_eq!(it.world().wanted, MEMORY);
}

/// Its balloon was looked at twenty times a second, for ever.
#[test]
fn a_guest_that_does_not_deflate_is_asked_again() {
    let mut it = Test::new(|world| world.deflates = false);
    it.until(60, |world, _| world.balloon > 0 && world.wanted == MEMORY);
    it.run(100);
    let before = it.world().clone();
    it.run(200);
    let after = it.world().clone();
    let (more, again) = (after.looks - before.looks, after.asked.len() - before.asked.len());
    assert!((90..=110).contains(&more), "{more}");
    assert!((9..=11).contains(&again), "{again}");
    assert_eq!(it.recycling().pulses, 1);
    it.world().deflates = true;
    it.run(210);
    assert_eq!(it.world().balloon, 0);
    it.world().held = 400 * MIB;
    it.run(240);
    assert_eq!(it.recycling().pulses, 2);
}

/// A figure near the largest number overflowed, and with the thread the daemon would have ended.
#[test]
fn a_guest_that_lies_harms_itself_only() {
    for lie in [u64::MAX - 1, MEMORY, 0] {
        let mut it = Test::new(|world| (world.held, world.lie) = (0, Some(lie)));
        it.until(300, |world, _| world.stalls > 0);
        let recycling = it.recycling();
        assert!(recycling.free_bytes <= MEMORY && recycling.returned_bytes == 0, "{recycling:?}");
        // It wants for memory that it says it has, and says something else each second.
        for second in 300..600 {
            it.world().stalls = second * u64::from(u32::MAX);
            it.world().lie = Some(lie.wrapping_mul(second));
            it.run(second);
        }
        assert_eq!(it.world().wanted, MEMORY);
    }
}

#[test]
fn a_balloon_that_is_found_inflated_is_let_go() {
    let mut it = Test::new(|world| (world.balloon, world.wanted, world.held) = (600 * MIB, 0, 0));
    assert_eq!(it.world().asked, [MEMORY]);
    it.run(5);
    assert_eq!((it.world().balloon, it.recycling().pulses), (0, 0));
}

/// A recycler was killed when it had asked for a pulse, and the guest had not followed yet. The
/// next one found nothing to let go, and the guest lost the memory for good when it followed.
#[test]
fn a_pulse_that_a_guest_has_not_followed_yet_is_taken_back() {
    let it = Test::new(|world| world.wanted = 600 * MIB);
    assert_eq!(it.world().wanted, MEMORY);
}

#[test]
fn the_end_lets_a_balloon_go() {
    let mut it = Test::new(|_| {});
    it.until(60, |world, _| world.balloon > 0);
    assert!(it.world().wanted < MEMORY);
    it.guest.end().unwrap();
    assert_eq!(it.world().wanted, MEMORY);
}

/// Devices come and go, and a guest's driver takes its features when it begins.
#[test]
fn a_refusal_is_asked_for_before_each_pulse() {
    let mut it = Test::new(|world| world.held = 0);
    it.run(5);
    {
        let mut world = it.world();
        (world.held, world.refusal) = (400 * MIB, Some("it has a device of the host"));
    }
    it.run(20);
    let recycling = it.recycling();
    assert_eq!((recycling.pulses, recycling.unreturned_bytes), (0, 400 * MIB));
    assert_eq!(recycling.refusal.as_deref(), Some("it has a device of the host"));
    it.world().refusal = None;
    it.run(30);
    assert_eq!((it.recycling().pulses, it.recycling().refusal), (1, None));
}

/// Within a pulse a guest has little free memory. That was taken for memory that it had used again.
#[test]
fn figures_from_within_a_pulse_are_not_believed() {
    let mut it = Test::new(|_| {});
    it.until(60, |world, _| world.balloon > 0);
    {
        // Its last word before the balloon was let go, and none for a while.
        let mut world = it.world();
        let memory = GuestMemory { free: 40 * MIB, ..GuestMemory::default() };
        world.said = (Duration::from_secs(world.now.as_secs()), memory);
    }
    let free = it.recycling().free_bytes;
    it.until(60, |world, guest| {
        assert!(guest.recycling().free_bytes == free || world.balloon == 0);
        world.balloon == 0 && world.wanted == MEMORY && guest.recycling().returned_bytes > 0
    });
    assert_eq!(it.recycling().free_bytes, free);
}

#[test]
fn a_vmm_that_fails_is_an_error() {
    let mut it = Test::new(|_| {});
    it.until(60, |world, _| world.balloon > 0);
    it.world().is_broken = true;
    let now = it.guest.due();
    assert!(it.guest.step(now, Pressure::default()).is_err());
}

/// A QEMU that answers, whose guest has all of its memory free.
fn answer(stream: UnixStream, memory: u64, pulses: &AtomicU32) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut stream, mut wanted) = (stream, memory);
    writeln!(stream, r#"{{"QMP": {{}}}}"#)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 0 {
        let call: Value = serde_json::from_str(&line)?;
        line.clear();
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let returned = match call["execute"].as_str().unwrap() {
            "qom-list" => json!([{"name": "balloon", "type": "child<virtio-balloon-pci>"}]),
            "qom-get" if call["arguments"]["property"] == "deflate-on-oom" => json!(true),
            "qom-get" => json!({"last-update": now, "stats": {"stat-free-memory": memory}}),
            "query-balloon" => json!({"actual": wanted}),
            "balloon" => {
                wanted = call["arguments"]["value"].as_u64().unwrap();
                pulses.fetch_add(u32::from(wanted < memory), Relaxed);
                json!({})
            }
            _ => json!({}),
        };
        writeln!(stream, "{}", json!({ "return": returned }))?;
    }
    Ok(())
}

/// The directory of a virtual machine that runs in this process.
fn plant(run: &RunDir, name: &str, memory: u64) -> (UnixListener, std::os::fd::OwnedFd) {
    let dir = run.path().join("vms").join(name);
    fs::create_dir_all(&dir).unwrap();
    let record = json!({
        "name": name, "domain": "default", "vmm": "qemu", "memory_bytes": memory, "cpus": 1,
        "created": 0, "origin": "started", "image": "00".repeat(32), "image_name": "box:1",
        "pack": "00".repeat(32), "segments": [], "command": [], "stop_signal": "TERM",
        "program": "/bin/true", "accel": "tcg", "kernel": "1",
    });
    fs::write(dir.join("vm.json"), record.to_string()).unwrap();
    fs::write(dir.join("pid"), std::process::id().to_string()).unwrap();
    let lock = running::lock(&dir, FlockOperation::NonBlockingLockExclusive).unwrap().unwrap();
    (UnixListener::bind(dir.join("recycle")).unwrap(), lock)
}

/// One thread served all guests. A VMM that was stopped held up the others for 10 s, again and
/// again.
#[test]
fn a_vmm_that_says_nothing_holds_up_no_other() {
    const RAM: usize = 64 << 20;
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::open(dir.path().join("run")).unwrap();
    run.prepare().unwrap();
    let (silent, _silent) = plant(&run, "silent", RAM as u64);
    let (other, _other) = plant(&run, "other", RAM as u64);
    // The guest's memory is this process's, which the host holds, and the machine has nothing else.
    let ram = vec![1_u8; RAM + (4 << 20)];
    let start = (ram.as_ptr() as u64).next_multiple_of(2 << 20);
    let proc = dir.path().join("proc");
    let process = proc.join(std::process::id().to_string());
    fs::create_dir_all(process.join("fd")).unwrap();
    let maps = format!("{start:x}-{:x} rw-p 00000000 00:00 0\n", start + RAM as u64);
    fs::write(process.join("maps"), maps).unwrap();
    fs::write(process.join("statm"), "999999 99999 0 0 0 0 0\n").unwrap();
    fs::write(process.join("status"), "VmLck:\t 0 kB\n").unwrap();
    std::os::unix::fs::symlink("/proc/self/pagemap", process.join("pagemap")).unwrap();
    let pulses = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&pulses);
    thread::spawn(move || answer(other.accept().unwrap().0, RAM as u64, &counted));

    let mut recycler = Recycler::with_proc(run, Policy::default(), proc);
    let began = Instant::now();
    let logged = Mutex::new(Vec::new());
    let log = |line: &str| lock(&logged).push(line.to_owned());
    while pulses.load(Relaxed) == 0 {
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", lock(&logged));
        recycler.tick(&log);
        thread::sleep(Duration::from_millis(100));
    }
    let report = recycler.report();
    assert!(report.guests["other"].pulses >= 1, "{report:?}");
    assert!(!report.guests.contains_key("silent"));
    let began = Instant::now();
    recycler.end();
    assert!(began.elapsed() < Duration::from_secs(5));
    // What was counted is not lost with another policy.
    let again = Recycler::with_proc(recycler.run.clone(), Policy::default(), PathBuf::new());
    let ended = RecyclerReport { returned_bytes: 7, ..recycler.report() };
    assert_eq!(again.after(&ended).report().returned_bytes, 7);
    drop((silent, ram));
}
