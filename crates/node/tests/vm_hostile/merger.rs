//! The merger among VMMs that lie to it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use cofolio_node::vm::merger::{MergePolicy, MergeReport, Merger, Target};
use cofolio_shim::message::{receive, send};
use cofolio_shim::protocol::{Head, Hello, Outcome, PAGE, Plain, Run, kind};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
    memfd_create,
};

use super::{MEMORY, Vmm, connect, content, drain, listen, say, shim};

/// A merger and its log.
struct Merging {
    merger: Merger,
    targets: Vec<Target>,
    said: Mutex<String>,
}

fn target(name: &str, domain: &str, pid: u32, dir: &Path) -> Target {
    Target {
        name: name.to_owned(),
        domain: domain.to_owned(),
        pid,
        memory_bytes: MEMORY as u64,
        dir: dir.to_owned(),
    }
}

fn target_of(name: &str, domain: &str, vmm: &Vmm) -> Target {
    target(name, domain, vmm.pid(), &vmm.dir)
}

impl Merging {
    fn of(targets: Vec<Target>) -> Self {
        // It rests between no two passes.
        let policy = MergePolicy { threads: 2, share: 1e9, ..MergePolicy::default() };
        Self { merger: Merger::new(policy), targets, said: Mutex::default() }
    }

    /// Runs `count` passes. The first looks, the second finds unchanged pages.
    fn passes(&mut self, count: u32) -> MergeReport {
        let log = |line: &str| {
            let mut said = self.said.lock().unwrap();
            *said += line;
            *said += "\n";
        };
        let mut report = MergeReport::default();
        for _ in 0..count {
            report = self.merger.pass(self.targets.clone(), &log);
        }
        report
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }
}

/// A VMM with the shim alone.
fn honest(dir: &tempfile::TempDir, name: &str, shim: &Path) -> Vmm {
    Vmm::start(&dir.path().join(name), "honest", Some((shim, "")))
}

/// Inodes of pools that a process has mapped or open.
fn pools(pid: u32) -> BTreeSet<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lines = maps.lines().filter(|line| line.contains("/memfd:cofolio-pool"));
    let mapped = lines.map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap());
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().path());
    let is_pool = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("cofolio-pool"))
    };
    let open = fds
        .filter(is_pool)
        .filter_map(|path| Some(std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).ok()?)));
    mapped.chain(open).collect()
}

/// The time that a write takes would tell a guest what another tenant has, and a pool is what it
/// has.
#[test]
fn no_pool_is_in_two_trust_domains() {
    let Some(shim) = shim("no_pool_is_in_two_trust_domains") else { return };
    let dir = tempfile::tempdir().unwrap();
    let domains = ["red", "red", "blue", "blue"];
    let names = ["a", "b", "c", "d"];
    let mut vmms = names.map(|name| honest(&dir, name, &shim));
    let all = names.iter().zip(domains).zip(&vmms);
    let mut merging =
        Merging::of(all.map(|((name, domain), vmm)| target_of(name, domain, vmm)).collect());
    let report = merging.passes(4);
    assert_eq!(merging.said(), "");
    let pages = (MEMORY / PAGE) as u64;
    assert!(report.guests.values().all(|it| it.pool_pages > pages * 9 / 10), "{report:?}");
    let have: Vec<_> = vmms.iter().map(|vmm| pools(vmm.pid())).collect();
    assert!(!have[0].is_empty() && have[0] == have[1] && have[2] == have[3], "{have:?}");
    assert!(have[0].is_disjoint(&have[2]), "{have:?}");
    vmms.iter_mut().for_each(Vmm::check);
}

/// The number of a VMM's process is in a file that the VMM itself has written. If the merger
/// believed it, two of them could name a third, of another domain, and would get a pool with its
/// pages.
#[test]
fn a_vmm_that_names_another_process_gets_none_of_its_pages() {
    let test = "a_vmm_that_names_another_process_gets_none_of_its_pages";
    let Some(shim) = shim(test) else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut victim = honest(&dir, "victim", &shim);
    // This process is the VMM of two guests of another domain, and knows the victim's addresses.
    let hello = ask_hello(&connect(&victim.dir, "merge"));
    let mut targets = vec![target_of("victim", "blue", &victim)];
    let (given, is_given) = std::sync::mpsc::channel();
    for name in ["liar", "thief"] {
        let own = dir.path().join(name);
        fs::create_dir(&own).unwrap();
        let (listener, given) = (listen(&own, "merge"), given.clone());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                answer(&client.unwrap(), hello, &|_, file| _ = given.send(file), &refuse_all);
            }
        });
        targets.push(target(name, "red", victim.pid(), &own));
    }
    let mut merging = Merging::of(targets);
    let report = merging.passes(4);
    for name in ["liar", "thief"] {
        let line = format!("virtual machine {name} is not merged: process {}", std::process::id());
        assert!(merging.said().contains(&line), "{}", merging.said());
    }
    assert!(is_given.try_recv().is_err(), "a pool");
    assert!(report.guests["victim"].pool_pages > 1000, "{report:?}");
    victim.check();
}

/// Lies that are found at once: none costs the others anything.
#[test]
fn shims_that_lie_are_dropped() {
    let Some(shim) = shim("shims_that_lie_are_dropped") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut vmms = ["a", "b"].map(|name| honest(&dir, name, &shim));
    let mut targets = vec![target_of("a", "red", &vmms[0]), target_of("b", "red", &vmms[1])];
    let (start, len) = (1 << 32, MEMORY as u64);
    let hello = |start, len| Hello { start, len, errno: 0, reserved: 0 };
    let bytes = |hello: Hello| Plain::bytes(&[hello]).to_vec();
    let lies = [
        ("endless", bytes(hello(start, 1 << 63))),
        ("longest", bytes(hello(start, u64::MAX))),
        ("negative", bytes(hello(start, len.wrapping_neg()))),
        ("empty", bytes(hello(start, 0))),
        ("longer", bytes(hello(start, len + PAGE as u64))),
        ("last", bytes(hello(u64::MAX - 4095, len))),
        ("askew", bytes(hello(start + 1, len))),
        ("kernel", bytes(hello(0xffff_8000_0000_0000, len))),
        ("failing", bytes(Hello { errno: u32::MAX, ..hello(start, len) })),
        ("garbage", vec![0xa5; 24]),
        ("short", vec![0; 23]),
        ("gone", Vec::new()),
    ];
    for (name, bytes) in &lies {
        let own = dir.path().join(name);
        fs::create_dir(&own).unwrap();
        let (listener, bytes) = (listen(&own, "merge"), bytes.clone());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                let _ = client.read_exact(&mut [0; 16]);
                let _ = client.write_all(&bytes);
            }
        });
        targets.push(target(name, "red", std::process::id(), &own));
    }
    let mut names: Vec<&str> = lies.iter().map(|(name, _)| *name).collect();
    // These lie about their results.
    let later = ["more", "many", "half"];
    let liars = later.map(|it| Vmm::start(&dir.path().join(it), it, Some((&shim, "hidden"))));
    targets.extend(later.iter().zip(&liars).map(|(name, vmm)| target_of(name, "red", vmm)));
    names.extend(later);
    let mut merging = Merging::of(targets);
    let report = merging.passes(4);
    let said = merging.said();
    for name in names {
        let line = format!("virtual machine {name} is not merged: ");
        assert_eq!(said.matches(&line).count(), 1, "{name}: {said}");
        assert!(report.guests[name].refusal.is_some(), "{report:?}");
    }
    assert!(["a", "b"].iter().all(|name| report.guests[*name].pool_pages > 1000), "{report:?}");
    vmms.iter_mut().for_each(Vmm::check);
}

/// A shim that does not answer delays the others once, and then rarely.
#[test]
fn shims_that_do_not_answer_are_dropped() {
    let Some(shim) = shim("shims_that_do_not_answer_are_dropped") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut vmms = ["a", "b"].map(|name| honest(&dir, name, &shim));
    let mut targets = vec![target_of("a", "red", &vmms[0]), target_of("b", "red", &vmms[1])];
    let names = ["silent", "dribbling"];
    let liars = names.map(|it| Vmm::start(&dir.path().join(it), it, Some((&shim, "hidden"))));
    targets.extend(names.iter().zip(&liars).map(|(name, vmm)| target_of(name, "red", vmm)));
    let mut merging = Merging::of(targets);
    // One is silent from the beginning, the other when it is to merge.
    let report = merging.passes(4);
    assert!(["a", "b"].iter().all(|name| report.guests[*name].pool_pages > 1000), "{report:?}");
    for name in names {
        let line = format!("virtual machine {name} is not merged: its shim does not answer\n");
        assert_eq!(merging.said().matches(&line).count(), 1, "{}", merging.said());
        let refusal = report.guests[name].refusal.as_deref();
        assert_eq!(refusal, Some("its shim does not answer"));
    }
    vmms.iter_mut().for_each(Vmm::check);
}

/// Each trust domain has a thread. A VMM that blocks it delays only its own domain.
#[test]
fn a_domain_that_does_not_go_on_holds_up_no_other() {
    let Some(shim) = shim("a_domain_that_does_not_go_on_holds_up_no_other") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut vmms = ["x", "y"].map(|name| honest(&dir, name, &shim));
    let mut targets = vec![target_of("x", "last", &vmms[0]), target_of("y", "last", &vmms[1])];
    let names = ["a", "b", "c", "d"];
    let start = |it: &str| Vmm::start(&dir.path().join(it), "silent", Some((&shim, "hidden")));
    let silent = names.map(start);
    targets.extend(names.iter().zip(&silent).map(|(name, vmm)| target_of(name, "first", vmm)));
    let mut merging = Merging::of(targets);
    let began = std::time::Instant::now();
    let report = merging.passes(4);
    assert!(began.elapsed() < Duration::from_secs(38), "{:?}", began.elapsed());
    assert!(
        merging.said().contains("trust domain first still goes on after 20 s"),
        "{}",
        merging.said()
    );
    assert!(["x", "y"].iter().all(|name| report.guests[*name].pool_pages > 1000), "{report:?}");
    vmms.iter_mut().for_each(Vmm::check);
}

/// A VMM that was broken into has what its shim gets, and runs as root if this test does. What the
/// kernel offers besides is tried in `crates/sys/tests/sealed.rs`.
#[test]
fn a_vmm_cannot_write_to_its_pools() {
    let Some(shim) = shim("a_vmm_cannot_write_to_its_pools") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut honest = honest(&dir, "a", &shim);
    let mut robber = Vmm::start(&dir.path().join("robber"), "robber", Some((&shim, "hidden")));
    let targets = vec![target_of("a", "red", &honest), target_of("robber", "red", &robber)];
    let mut merging = Merging::of(targets);
    let report = merging.passes(4);
    assert_eq!(merging.said(), "");
    assert!(report.guests["a"].pool_pages > 1000, "{report:?}");
    assert_eq!(robber.wait_for("attacked: "), "in vain");
    honest.check();
}

/// A daemon ends, and the next one finds the pools in VMMs. Their numbers there are not this
/// merger's.
#[test]
fn a_new_merger_goes_on_with_the_pools_of_an_earlier_one() {
    let Some(shim) = shim("a_new_merger_goes_on_with_the_pools_of_an_earlier_one") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut vmms = ["a", "b", "c"].map(|name| honest(&dir, name, &shim));
    let mut targets = vec![target_of("a", "red", &vmms[0]), target_of("b", "red", &vmms[1])];
    Merging::of(targets.clone()).passes(4);
    let before = pools(vmms[0].pid());
    targets.push(target_of("c", "red", &vmms[2]));
    let mut merging = Merging::of(targets);
    let report = merging.passes(4);
    assert_eq!(merging.said(), "");
    assert!(report.guests["c"].pool_pages > 1000, "{report:?}");
    assert!(!before.is_empty());
    for vmm in &mut vmms {
        assert_eq!(pools(vmm.pid()), before);
        vmm.check();
    }
}

/// The merger asks a VMM for the pools that it has of an earlier merger. A hostile one named the
/// number 2^31 - 2 for one, which left its trust domain a single number for new pools: no guest
/// that was started later was merged.
#[test]
fn pools_that_no_merger_made_are_not_taken() {
    let Some(shim) = shim("pools_that_no_merger_made_are_not_taken") else { return };
    let dir = tempfile::tempdir().unwrap();
    let names = ["0-bad pools", "0-endless pools", "0-fewer pools"];
    let start = |it: &str| Vmm::start(&dir.path().join(it), it, Some((&shim, "hidden")));
    let liars = names.map(start);
    let of_liars = names.iter().zip(&liars).map(|(name, vmm)| target_of(name, "red", vmm));
    let mut merging = Merging::of(Vec::new());
    for names in [["a", "b"], ["c", "d"], ["e", "f"]] {
        let mut vmms = names.map(|name| honest(&dir, name, &shim));
        let targets = names.iter().zip(&vmms).map(|(name, vmm)| target_of(name, "red", vmm));
        merging.targets = of_liars.clone().chain(targets).collect();
        let report = merging.passes(4);
        assert!(names.iter().all(|name| report.guests[*name].pool_pages > 1000), "{report:?}");
        vmms.iter_mut().for_each(Vmm::check);
        // The next guests need new pools: a survey drops those that nobody maps.
        drop(vmms);
        merging.targets = of_liars.clone().collect();
        merging.passes(6);
    }
    let said = merging.said();
    let endless = "virtual machine 0-endless pools is not merged: it has 4294967295 pools, more";
    assert!(said.contains(endless), "{said}");
    assert!(said.contains("virtual machine 0-fewer pools is not merged: "), "{said}");
    assert!(!said.contains("0-bad pools"), "{said}");
}

/// A VMM whose shim is its own: it knows from the real one where its memory is.
pub(crate) fn serve(dir: &Path, behaviour: &str) {
    let listener = listen(dir, "merge");
    let hello = ask_hello(&connect(&dir.join("hidden"), "merge"));
    say("ready");
    for client in listener.incoming() {
        let client = client.unwrap();
        let keep = |_: Head, _: OwnedFd| {};
        match behaviour {
            "silent" => drain(&client),
            "robber" => answer(&client, hello, &attack, &refuse_all),
            "more" => answer(&client, hello, &keep, &|_, mut client| {
                let lie = Outcome { merged: [u64::MAX; 4], changed: 1, ..Outcome::default() };
                client.write_all(Plain::bytes(&[lie; 256]))
            }),
            "many" => answer(&client, hello, &keep, &|_, mut client| {
                let lie = Outcome { changed: u16::MAX, busy: u16::MAX, ..Outcome::default() };
                client.write_all(Plain::bytes(&[lie; 256]))
            }),
            "half" => answer(&client, hello, &keep, &|_, mut client| {
                client.write_all(&[0; 20])?;
                Err(io::ErrorKind::BrokenPipe.into())
            }),
            "dribbling" => answer(&client, hello, &keep, &|_, mut client| {
                loop {
                    client.write_all(&[0])?;
                    std::thread::sleep(Duration::from_millis(500));
                }
            }),
            "0-bad pools" => {
                let pools = bad_pools();
                // If the merger had taken this file for a pool, the others would see it change.
                let change = |runs: &[Run], client: &UnixStream| {
                    pools[0].2.write_all_at(&[0xee; 1 << 20], 0)?;
                    refuse_all(runs, client)
                };
                let count = u32::try_from(pools.len()).unwrap();
                let offer = |client: &UnixStream| offer(client, count, &pools);
                answer_with_pools(&client, hello, &offer, &keep, &change);
            }
            "0-endless pools" => {
                let offer = |client: &UnixStream| offer(client, u32::MAX, &bad_pools());
                answer_with_pools(&client, hello, &offer, &keep, &refuse_all);
            }
            "0-fewer pools" => {
                let offer = |client: &UnixStream| {
                    offer(client, 100, &bad_pools())?;
                    Err(io::ErrorKind::BrokenPipe.into())
                };
                answer_with_pools(&client, hello, &offer, &keep, &refuse_all);
            }
            other => panic!("{other}"),
        }
    }
}

/// Number and pages that are said of a file, and the file.
type Offered = (u32, u32, File);

/// Files that are no pools of an earlier merger, and pools with numbers that are not theirs.
fn bad_pools() -> Vec<Offered> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = |flags: MemfdFlags, bytes: &[u8], seals: SealFlags| {
        let file = File::from(memfd_create("cofolio-pool", flags).unwrap());
        file.write_all_at(bytes, 0).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    let sealed = |bytes: &[u8]| memory(flags, bytes, seals);
    let page = |byte: u8| [byte; PAGE];
    // What the guests have, in files that can be changed later.
    let guests: Vec<u8> = (0..1 << 17).flat_map(|word| content(word).to_ne_bytes()).collect();
    let mut all = vec![
        (1, 256, memory(flags, &guests, SealFlags::empty())),
        (2, 256, memory(flags, &guests, SealFlags::SHRINK | SealFlags::GROW)),
        (3, 1, File::open("/dev/zero").unwrap()),
        (4, 1, File::from(rustix::pipe::pipe().unwrap().0)),
        (5, 1, File::open("/proc/self/exe").unwrap()),
        (6, 1, File::open("/").unwrap()),
        // Not whole pages, nothing, more than a pool has, and a number of pages that is not so.
        (7, 1, sealed(&[7; 100])),
        (8, 0, sealed(&[])),
        (9, 1025, sealed(&vec![9; 1025 * PAGE])),
        (10, u32::MAX, sealed(&page(10))),
        // One number for two pools, and two numbers for one.
        (11, 1, sealed(&page(11))),
        (11, 1, sealed(&page(12))),
    ];
    let twice = all[11].2.try_clone().unwrap();
    all.push((13, 1, twice));
    // The last numbers of pools, those of images, and that of zeros.
    let numbers = [(1 << 31) - 2, (1 << 31) - 1, 1 << 31, u32::MAX - 1, u32::MAX];
    all.extend((0x80..).zip(numbers).map(|(byte, number)| (number, 1, sealed(&page(byte)))));
    // A file of huge pages takes none as long as nothing is written.
    if let Ok(huge) = memfd_create("cofolio-pool", flags | MemfdFlags::HUGETLB) {
        let huge = File::from(huge);
        if huge.set_len(2 << 20).is_ok() && fcntl_add_seals(&huge, seals).is_ok() {
            all.push((14, 512, huge));
        }
    }
    all
}

fn offer(mut client: &UnixStream, count: u32, pools: &[Offered]) -> io::Result<()> {
    client.write_all(&count.to_ne_bytes())?;
    for (number, count, file) in pools {
        let head = Head { kind: kind::POOLS, count: *count, argument: *number, reserved: 0 };
        send(client, head, Some(file.as_fd()))?;
    }
    Ok(())
}

fn ask_hello(mut shim: &UnixStream) -> Hello {
    shim.write_all(Plain::bytes(&[Head { kind: kind::HELLO, ..Head::default() }])).unwrap();
    let mut hello = [Hello::default()];
    shim.read_exact(Plain::bytes_mut(&mut hello)).unwrap();
    assert_eq!(hello[0].errno, 0);
    hello[0]
}

type OnMerge<'f> = &'f dyn Fn(&[Run], &UnixStream) -> io::Result<()>;

/// Every page has changed.
fn refuse_all(runs: &[Run], mut client: &UnixStream) -> io::Result<()> {
    let changed =
        |run: &Run| Outcome { changed: u16::try_from(run.pages).unwrap(), ..Outcome::default() };
    client.write_all(Plain::bytes(&runs.iter().map(changed).collect::<Vec<_>>()))
}

/// Answers as a shim does that has no pools of an earlier merger, but merges nothing itself.
fn answer(
    client: &UnixStream,
    hello: Hello,
    on_pool: &dyn Fn(Head, OwnedFd),
    on_merge: OnMerge<'_>,
) {
    let no_pools = |mut client: &UnixStream| client.write_all(&[0; 4]);
    answer_with_pools(client, hello, &no_pools, on_pool, on_merge);
}

fn answer_with_pools(
    mut client: &UnixStream,
    hello: Hello,
    on_pools: &dyn Fn(&UnixStream) -> io::Result<()>,
    on_pool: &dyn Fn(Head, OwnedFd),
    on_merge: OnMerge<'_>,
) {
    while let Ok((head, file)) = receive(client) {
        let done = match head.kind {
            kind::HELLO => client.write_all(Plain::bytes(&[hello])),
            kind::POOLS => on_pools(client),
            kind::FORGET => client.write_all(&[0; 4]),
            kind::POOL => {
                on_pool(head, file.unwrap());
                client.write_all(&[0; 4])
            }
            _ => {
                let mut runs = vec![Run::default(); head.count as usize];
                let read = client.read_exact(Plain::bytes_mut(&mut runs));
                read.and_then(|()| on_merge(&runs, client))
            }
        };
        if done.is_err() {
            return;
        }
    }
}

/// Tries to change a pool, or to have it change later.
fn attack(head: Head, fd: OwnedFd) {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let given = File::from(fd);
    let len = u64::from(head.count) * PAGE as u64;
    let mut before = vec![0; usize::try_from(len).unwrap()];
    given.read_exact_at(&mut before, 0).unwrap();
    let again = File::options().read(true).write(true).open(&path);
    for file in [Some(&given), again.as_ref().ok()].into_iter().flatten() {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let succeeded = [
            file.write_all_at(b"x", 0).is_ok(),
            (&mut &*file).write_all(b"x").is_ok(),
            file.set_len(0).is_ok(),
            file.set_len(len + 1).is_ok(),
            fallocate(file, punch, 0, len).is_ok(),
            fcntl_add_seals(file, SealFlags::FUTURE_WRITE).is_ok(),
        ];
        assert_eq!(succeeded, [false; 6]);
    }
    let seals = fcntl_get_seals(&given).unwrap();
    let needed = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    assert!(seals.contains(needed), "{seals:?}");
    let mut after = vec![0; before.len()];
    given.read_exact_at(&mut after, 0).unwrap();
    assert!(before == after && given.metadata().unwrap().len() == len);
    say("attacked: in vain");
}
