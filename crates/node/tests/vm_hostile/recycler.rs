//! The recycler among guests, and VMMs, that lie about their balloons.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cofolio_node::run_dir::RunDir;
use cofolio_node::vm::recycler::{Policy, Recycler};
use cofolio_node::vm::{Accel, Origin, Started, VmRecord};
use cofolio_store::Digest;
use cofolio_sys::memory::GuestMemory;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use super::{MEMORY, Vmm, drain, listen, say};

/// How long the recycler runs at least.
const WATCHED: Duration = Duration::from_secs(25);

/// A machine in a run directory, as `vm run` would have made it: the VMM, and the lock that it
/// holds.
fn machine(run: &Path, name: &str) -> (Vmm, File) {
    let dir = run.join("vms").join(name);
    let vmm = Vmm::start(&dir, &format!("qmp {name}"), None);
    let digest = Digest::from_lower_hex(&[b'0'; 64]).unwrap();
    let started = Started {
        image: digest,
        image_name: "image:1".to_owned(),
        pack: digest,
        segments: Vec::new(),
        command: vec!["program".to_owned()],
        stop_signal: "TERM".to_owned(),
        program: "vmm".into(),
        accel: Accel::Tcg,
        kernel: "6.12".to_owned(),
        disk: None,
    };
    let record = VmRecord {
        name: name.to_owned(),
        domain: "default".to_owned(),
        vmm: cofolio_node::vm::Vmm::Qemu,
        memory_bytes: MEMORY as u64,
        cpus: 1,
        created: 0,
        origin: Origin::Started(Box::new(started)),
    };
    fs::write(dir.join("vm.json"), serde_json::to_vec(&record).unwrap()).unwrap();
    fs::write(dir.join("pid"), vmm.pid().to_string()).unwrap();
    let lock = File::create(dir.join("lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    (vmm, lock)
}

/// How often the recycler has asked a VMM something.
fn asked(vmm: &Vmm) -> u64 {
    fs::metadata(vmm.dir.join("asked")).map_or(0, |it| it.len())
}

/// A liar harms itself: the memory of other guests is returned, and the recycler uses little time
/// for it.
#[test]
fn who_lies_about_its_balloon_harms_itself_alone() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["honest", "boasts", "keeps", "nonsense", "silent"];
    let machines = names.map(|name| machine(dir.path(), name));
    let policy = Policy { reserve: 0, share: 1.0, ..Policy::default() };
    let mut recycler = Recycler::new(RunDir::open(dir.path()).unwrap(), policy);
    let said = Mutex::new(String::new());
    let log = |line: &str| *said.lock().unwrap() += &format!("{line}\n");
    let (began, mut returned) = (Instant::now(), 0);
    // On a busy host a pulse waits.
    while began.elapsed() < WATCHED
        || (returned < MEMORY as u64 * 9 / 10 && began.elapsed() < 4 * WATCHED)
    {
        std::thread::sleep(recycler.tick(&log));
        let report = recycler.report();
        returned = report.guests.get("honest").map_or(0, |it| it.returned_bytes);
    }
    let report = recycler.report();
    let said = said.lock().unwrap();
    assert!(returned >= MEMORY as u64 * 9 / 10, "{report:?}\n{said}");
    assert!(said.contains("virtual machine nonsense is not recycled: "), "{said}");
    // They were pulsed, in vain, and less and less often.
    for name in ["boasts", "keeps"] {
        assert_eq!(report.guests[name].returned_bytes, 0, "{report:?}");
        assert!(report.guests[name].pulses > 0, "{report:?}");
        assert!(report.guests[name].free_bytes <= MEMORY as u64, "{report:?}");
    }
    let seconds = began.elapsed().as_secs();
    let counts = machines.each_ref().map(|(vmm, _)| asked(vmm));
    println!("{seconds} s, asked {:?}", names.iter().zip(counts).collect::<Vec<_>>());
    // Two questions a step for the half second of a pulse in vain, and a sample a second.
    assert!(counts[1] < 200 + 2 * seconds, "{counts:?}");
    // A step each twentieth of a second for ten seconds, and then each ten seconds.
    assert!(counts[2] < 250 + 2 * seconds, "{counts:?}");
    assert!(counts[3] < 20 + 2 * seconds, "{counts:?}");
}

/// A VMM's control socket.
pub(crate) fn serve(dir: &Path, behaviour: &str, memory: &Mutex<GuestMemory>) {
    let listener = listen(dir, "recycle");
    say("ready");
    let mut actual = MEMORY as u64;
    for client in listener.incoming() {
        let client = client.unwrap();
        if behaviour == "silent" {
            drain(&client);
            continue;
        }
        // The recycler may hang up at any moment.
        let _ = answer(dir, behaviour, memory, &mut actual, &client);
    }
}

fn answer(
    dir: &Path,
    behaviour: &str,
    memory: &Mutex<GuestMemory>,
    actual: &mut u64,
    mut client: &UnixStream,
) -> std::io::Result<()> {
    client.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n")?;
    let mut asked = File::options().create(true).append(true).open(dir.join("asked"))?;
    for line in BufReader::new(client).lines() {
        asked.write_all(b".")?;
        let call: Value = serde_json::from_str(&line?)?;
        let returned = match call["execute"].as_str().unwrap() {
            "qom-list" => json!([{"name": "balloon", "type": "child<virtio-balloon-pci>"}]),
            "qom-get" if call["arguments"]["property"] == "deflate-on-oom" => json!(true),
            "qom-get" => statistics(behaviour),
            "query-balloon" if behaviour == "nonsense" => json!({"actual": -1}),
            "query-balloon" => json!({ "actual": *actual }),
            "balloon" => {
                let wanted = call["arguments"]["value"].as_u64().unwrap();
                match behaviour {
                    "honest" if wanted < MEMORY as u64 => {
                        // What the balloon takes the host has no more.
                        *memory.lock().unwrap() = GuestMemory::new(MEMORY)?;
                        *actual = wanted;
                    }
                    "honest" => *actual = wanted,
                    // It never lets go.
                    "keeps" => *actual = wanted.min(*actual),
                    _ => {}
                }
                json!({})
            }
            _ => json!({}),
        };
        client.write_all(format!("{}\n", json!({ "return": returned })).as_bytes())?;
    }
    Ok(())
}

fn statistics(behaviour: &str) -> Value {
    let stats = match behaviour {
        "boasts" => json!({"stat-free-memory": u64::MAX - 1, "stat-disk-caches": u64::MAX - 1}),
        "nonsense" => json!({"stat-free-memory": "much", "stat-disk-caches": {}}),
        _ => json!({"stat-free-memory": MEMORY, "stat-disk-caches": 0, "stat-swap-in": 0}),
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    json!({"stats": stats, "last-update": now.unwrap().as_secs()})
}
