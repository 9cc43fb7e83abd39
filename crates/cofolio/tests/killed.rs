//! Three workers import, tag, mount, unmount, remove and collect in one store with the real binary, and
//! every round ends with their processes killed at random moments. Then whatever was reported done must be
//! there, whatever was under way either there or not, the store without damage, and after the mounts are
//! taken away and the garbage is collected, nothing left over: no mount, no staging, no directory of changes.
//!
//! `COFOLIO_ROUNDS` says how many rounds, `COFOLIO_SEED` which ones; `make soak` runs a thousand.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::{Ran, Sandbox, Tar, can_mount, write_layout};
use serde_json::{Value, json};

const WORKERS: u64 = 3;
/// Names and places of each worker; nobody else touches them, so the worker knows what must be there.
const NAMES: u64 = 3;
const PLACES: u64 = 2;

/// Files of an image: path and content.
type Files = BTreeMap<String, Vec<u8>>;

/// Splitmix64: the same rounds for the same seed, as far as the scheduler lets them be the same.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Something that can be imported, and what comes out.
struct Source {
    argument: String,
    digest: String,
    files: Files,
}

/// What a worker may find: the one that was reported, or, after a kill, one of two.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known<T>(Vec<T>);

impl<T: Clone + PartialEq> Known<T> {
    fn is(value: T) -> Self {
        Self(vec![value])
    }

    /// What it is, if that is certain.
    fn certain(&self) -> Option<&T> {
        match &self.0[..] {
            [one] => Some(one),
            _ => None,
        }
    }

    /// A change to this was under way when its process was killed.
    fn perhaps(&mut self, value: T) {
        if !self.0.contains(&value) {
            self.0.push(value);
        }
    }
}

/// What one worker knows: an index of a source where there is something.
struct Worker {
    id: u64,
    rng: Rng,
    names: BTreeMap<String, Known<Option<usize>>>,
    places: BTreeMap<String, Known<Option<usize>>>,
}

/// How often each command ended by itself and was killed, and how long it takes.
#[derive(Default)]
struct Counts(Mutex<BTreeMap<&'static str, Count>>);

#[derive(Default)]
struct Count {
    done: u64,
    killed: u64,
    typical: Duration,
}

impl Counts {
    fn show(&self) -> String {
        let counts = self.0.lock().unwrap();
        let one = |(name, c): (&&str, &Count)| format!("{name} {}/{}", c.killed, c.done + c.killed);
        counts.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

/// A command that ends by itself, or (`None`) was killed.
fn run(
    sandbox: &Sandbox,
    counts: &Counts,
    args: &[&str],
    name: &'static str,
    kill: Option<&mut Rng>,
) -> Option<Ran> {
    let typical = {
        let mut counts = counts.0.lock().unwrap();
        let typical = counts.entry(name).or_default().typical;
        if typical.is_zero() { Duration::from_millis(30) } else { typical }
    };
    let began = Instant::now();
    let mut child =
        sandbox.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let to_be_killed = kill.is_some();
    if let Some(rng) = kill {
        // Anywhere in its life; one that is faster than usual is over by then.
        let part = u32::try_from(rng.below(1000)).unwrap();
        std::thread::sleep(typical * part / 1000);
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let took = began.elapsed();
    let ran = Ran::of(output);
    let mut counts = counts.0.lock().unwrap();
    let count = counts.get_mut(name).unwrap();
    if ran.code == 128 + 9 && to_be_killed {
        count.killed += 1;
        return None;
    }
    count.done += 1;
    if !to_be_killed {
        count.typical = (typical * 3 + took) / 4;
    }
    Some(ran)
}

impl Worker {
    fn new(id: u64, seed: u64) -> Self {
        let known = |kind: &str, count: u64| {
            (0..count).map(|n| (format!("{kind}-{id}-{n}"), Known::is(None))).collect()
        };
        Self {
            id,
            rng: Rng(seed ^ (id + 1) << 40),
            names: known("name", NAMES),
            places: known("place", PLACES),
        }
    }

    fn pick(rng: &mut Rng, map: &BTreeMap<String, Known<Option<usize>>>) -> String {
        let index = usize::try_from(rng.below(map.len() as u64)).unwrap();
        map.keys().nth(index).unwrap().clone()
    }

    /// One of its names that certainly is an image.
    fn image(&mut self) -> Option<(String, usize)> {
        let certain = |(name, known): (&String, &Known<Option<usize>>)| {
            Some((name.clone(), (*known.certain()?)?))
        };
        let all: Vec<_> = self.names.iter().filter_map(certain).collect();
        let index = self.rng.below(all.len().max(1) as u64);
        all.get(usize::try_from(index).unwrap()).cloned()
    }

    /// A few commands; the last of them is killed.
    fn work(&mut self, sandbox: &Sandbox, sources: &[Source], counts: &Counts) {
        let left = self.rng.below(3);
        for _ in 0..left {
            self.step(sandbox, sources, counts, false);
        }
        self.step(sandbox, sources, counts, true);
    }

    fn step(&mut self, sandbox: &Sandbox, sources: &[Source], counts: &Counts, kill: bool) {
        match self.rng.below(12) {
            0..4 => self.import(sandbox, sources, counts, kill),
            4 => self.tag(sandbox, counts, kill),
            5 => self.remove(sandbox, counts, kill),
            6 | 7 => self.collect(sandbox, counts, kill),
            8..11 => self.mount(sandbox, sources, counts, kill),
            _ => self.unmount(sandbox, counts, kill),
        }
    }

    fn import(&mut self, sandbox: &Sandbox, sources: &[Source], counts: &Counts, kill: bool) {
        let source = usize::try_from(self.rng.below(sources.len() as u64)).unwrap();
        let name = Self::pick(&mut self.rng, &self.names);
        let args = ["import", "--json", "--name", &name, &sources[source].argument];
        let known = self.names.get_mut(&name).unwrap();
        match run(sandbox, counts, &args, "import", kill.then_some(&mut self.rng)) {
            Some(ran) => {
                ran.ok();
                assert_eq!(ran.json()["image"], sources[source].digest, "{}", ran.stdout);
                *known = Known::is(Some(source));
            }
            None => known.perhaps(Some(source)),
        }
    }

    fn tag(&mut self, sandbox: &Sandbox, counts: &Counts, kill: bool) {
        let Some((from, source)) = self.image() else { return self.collect(sandbox, counts, kill) };
        let name = Self::pick(&mut self.rng, &self.names);
        let known = self.names.get_mut(&name).unwrap();
        match run(sandbox, counts, &["tag", &from, &name], "tag", kill.then_some(&mut self.rng)) {
            Some(ran) => {
                ran.ok();
                *known = Known::is(Some(source));
            }
            None => known.perhaps(Some(source)),
        }
    }

    fn remove(&mut self, sandbox: &Sandbox, counts: &Counts, kill: bool) {
        let name = Self::pick(&mut self.rng, &self.names);
        let known = self.names.get_mut(&name).unwrap();
        match run(sandbox, counts, &["rm", "--force", &name], "rm", kill.then_some(&mut self.rng)) {
            Some(ran) => {
                ran.ok();
                *known = Known::is(None);
            }
            None => known.perhaps(None),
        }
    }

    fn collect(&mut self, sandbox: &Sandbox, counts: &Counts, kill: bool) {
        if let Some(ran) = run(sandbox, counts, &["gc"], "gc", kill.then_some(&mut self.rng)) {
            ran.ok();
            assert_eq!(ran.stderr, "", "gc could not clean something up");
        }
    }

    fn mount(&mut self, sandbox: &Sandbox, sources: &[Source], counts: &Counts, kill: bool) {
        let Some((name, source)) = self.image() else {
            return self.import(sandbox, sources, counts, kill);
        };
        let place = Self::pick(&mut self.rng, &self.places);
        let target = sandbox.text(&format!("mnt/{place}"));
        let writable = self.rng.below(3) == 0;
        let mut args = vec!["mount", "--create", &name, &target];
        if writable {
            args.push("--rw");
        }
        let known = self.places.get_mut(&place).unwrap();
        let Some(ran) = run(sandbox, counts, &args, "mount", kill.then_some(&mut self.rng)) else {
            // What was there stays there: nothing is mounted over it.
            if known.0.contains(&None) {
                known.perhaps(Some(source));
            }
            return;
        };
        if known.0.iter().any(Option::is_some) && ran.code == 7 {
            known.0.retain(Option::is_some);
            return;
        }
        ran.ok();
        assert!(known.0.contains(&None), "{place} was mounted twice");
        *known = Known::is(Some(source));
        check_files(Path::new(&target), &sources[source].files);
        if writable {
            fs::write(Path::new(&target).join("changed"), vec![b'c'; 5000]).unwrap();
        }
    }

    fn unmount(&mut self, sandbox: &Sandbox, counts: &Counts, kill: bool) {
        let place = Self::pick(&mut self.rng, &self.places);
        let target = sandbox.text(&format!("mnt/{place}"));
        let known = self.places.get_mut(&place).unwrap();
        match run(sandbox, counts, &["umount", &target], "umount", kill.then_some(&mut self.rng)) {
            Some(ran) => {
                let allowed = if known.0.contains(&None) { &[0, 3][..] } else { &[0] };
                assert!(allowed.contains(&ran.code), "worker {}: {}", self.id, ran.stderr);
                *known = Known::is(None);
            }
            None => known.perhaps(None),
        }
    }

    /// What is there now is one of what may be, and from here on it is certain.
    fn settle(
        known: &mut BTreeMap<String, Known<Option<usize>>>,
        found: &BTreeMap<String, usize>,
        lines: &str,
    ) {
        for (name, known) in known {
            let value = found.get(name).copied();
            assert!(known.0.contains(&value), "{name}: {value:?} and not {known:?}\n{lines}");
            *known = Known::is(value);
        }
    }
}

/// A mounted image has every file with its content.
#[track_caller]
fn check_files(root: &Path, files: &Files) {
    for (path, content) in files {
        let found = fs::read(root.join(path));
        let found = found.unwrap_or_else(|error| panic!("{}/{path}: {error}", root.display()));
        assert!(found == *content, "{}/{path} has other content", root.display());
    }
}

/// Entries below a directory, or nothing if it is missing.
fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

/// Files of image number `n`: two thirds are the same in all of them.
fn files_of(n: u64) -> Files {
    let files = (0..30).map(|file| {
        let seed = if file % 3 == 0 { n * 1000 + file } else { file };
        let mut rng = Rng(seed);
        let length = rng.below(20_000);
        let content = (0..length).map(|_| u8::try_from(rng.below(256)).unwrap()).collect();
        (format!("d{}/f{file}", file % 4), content)
    });
    files.collect()
}

/// Three directories, and three OCI layouts whose lower layer is the same.
fn make_sources(sandbox: &Sandbox) -> Vec<Source> {
    let mut sources = Vec::new();
    for n in 0..6 {
        let files = files_of(n);
        let dir = sandbox.dir(&format!("source-{n}"));
        let mut argument = dir.to_str().unwrap().to_owned();
        if n < 3 {
            for (path, content) in &files {
                fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
                fs::write(dir.join(path), content).unwrap();
            }
        } else {
            let (mut lower, mut upper) = (Tar::default(), Tar::default());
            for (path, content) in &files {
                let own = *content != files_of(0)[path];
                if own { &mut upper } else { &mut lower }.file(path, 0o644, content);
            }
            write_layout(&dir, "image:1", &[lower.finish(), upper.finish()], json!({}));
            argument = format!("oci:{argument}:image:1");
        }
        sources.push(Source { argument, digest: String::new(), files });
    }
    // What each should become, from a store in which nothing is ever killed.
    let reference = Sandbox::new();
    for source in &mut sources {
        let ran = reference.run(&["import", "--json", "--name", "x", &source.argument]);
        ran.ok();
        source.digest = ran.json()["image"].as_str().unwrap().to_owned();
    }
    sources
}

/// Everything that must hold when nobody is at work.
struct Checker<'a> {
    sandbox: &'a Sandbox,
    sources: &'a [Source],
}

impl Checker<'_> {
    fn source_of(&self, digest: &Value) -> usize {
        let found = self.sources.iter().position(|source| digest == source.digest.as_str());
        found.unwrap_or_else(|| panic!("no source has the image {digest}"))
    }

    fn fsck(&self) -> Value {
        let ran = self.sandbox.run(&["fsck", "--json"]);
        assert_eq!(ran.code, 0, "{}\n{}", ran.stdout, ran.stderr);
        ran.json()
    }

    /// Refs: those that were reported are there, with the image that was reported, and no others.
    fn refs(&self, workers: &mut [Worker]) {
        let ran = self.sandbox.run(&["images", "--json"]);
        ran.ok();
        let list = ran.json();
        let named = |row: &Value| {
            let name = row["name"].as_str()?.to_owned();
            Some((name, self.source_of(&row["image"])))
        };
        let found: BTreeMap<_, _> = list.as_array().unwrap().iter().filter_map(named).collect();
        for worker in workers {
            Worker::settle(&mut worker.names, &found, &ran.stdout);
        }
    }

    /// Mounts: ours, the kernel's and the workers' are the same, and they can be read.
    fn mounts(&self, workers: &mut [Worker]) {
        let ran = self.sandbox.run(&["mounts", "--reconcile", "--json"]);
        ran.ok();
        assert_eq!(ran.stderr, "");
        let list = ran.json();
        // Others may be at work on this machine, with mounts of their own.
        let dir = fs::canonicalize(self.sandbox.path("mnt")).unwrap();
        let ours =
            |orphan: &&Value| Path::new(orphan["target"].as_str().unwrap()).starts_with(&dir);
        let orphan = list["orphans"].as_array().unwrap().iter().find(ours);
        assert_eq!(orphan, None, "{}", ran.stdout);
        assert_eq!(list["damaged"], json!([]), "{}", ran.stdout);
        let mut found = BTreeMap::new();
        for mount in list["mounts"].as_array().unwrap() {
            assert_eq!(mount["state"], "live", "{}", ran.stdout);
            let target = PathBuf::from(mount["record"]["target"].as_str().unwrap());
            let source = self.source_of(&mount["record"]["image"]);
            check_files(&target, &self.sources[source].files);
            found.insert(target.file_name().unwrap().to_str().unwrap().to_owned(), source);
        }
        for worker in workers {
            Worker::settle(&mut worker.places, &found, &ran.stdout);
        }
        let kernel = self.sandbox.mounted();
        let mut kernel: Vec<_> = kernel.iter().filter_map(|p| p.strip_prefix(&dir).ok()).collect();
        kernel.sort();
        assert!(kernel.iter().map(|path| path.to_str().unwrap()).eq(found.keys()), "{kernel:?}");
        let mut directories = names_in(&dir);
        directories.sort();
        assert!(directories.iter().eq(found.keys()), "{directories:?} in mnt");
    }

    /// Without mounts and garbage, nothing is left that nobody needs.
    fn nothing_left(&self, workers: &mut [Worker]) {
        self.sandbox.run(&["umount", "--all"]).ok();
        workers.iter_mut().for_each(|worker| {
            worker.places.values_mut().for_each(|known| *known = Known::is(None));
        });
        self.mounts(workers);
        assert_eq!(self.sandbox.mounted(), Vec::<PathBuf>::new());
        self.sandbox.run(&["gc"]).ok();
        for dir in ["staging", "domains/default/writable", "domains/default/roots/mount"] {
            assert_eq!(names_in(&self.sandbox.path("store").join(dir)), [""; 0], "{dir}");
        }
        let runs = self.sandbox.path("run");
        for run in names_in(&runs) {
            assert_eq!(names_in(&runs.join(&run).join("mounts")), [""; 0]);
            for domain in names_in(&runs.join(&run).join("images")) {
                let dir = runs.join(&run).join("images").join(domain);
                assert_eq!(names_in(&dir), [""; 0], "{}", dir.display());
            }
        }
        let again = self.sandbox.run(&["gc", "--dry-run", "--json"]);
        again.ok();
        for what in ["images", "layers", "objects", "leftovers"] {
            assert_eq!(again.json()[what], 0, "{}", again.stdout);
        }
        let fsck = self.fsck();
        assert_eq!(fsck["findings"], json!([]));
    }
}

#[test]
fn processes_killed_at_random_moments_lose_and_leave_nothing() {
    if !can_mount("processes_killed_at_random_moments_lose_and_leave_nothing") {
        return;
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let rounds: u64 = number("COFOLIO_ROUNDS").unwrap_or(6);
    let seed: u64 = number("COFOLIO_SEED").unwrap_or(1);
    println!("{rounds} rounds, COFOLIO_SEED={seed}");
    let sandbox = Sandbox::new();
    sandbox.dir("mnt");
    let sources = make_sources(&sandbox);
    // A store to begin with, so that `gc` and `rm` find one.
    sandbox.run(&["import", "--name", "first", &sources[0].argument]).ok();
    let counts = Counts::default();
    let checker = Checker { sandbox: &sandbox, sources: &sources };
    let mut workers: Vec<_> = (0..WORKERS).map(|id| Worker::new(id, seed)).collect();
    let mut rng = Rng(seed);
    let began = Instant::now();
    for round in 1..=rounds {
        std::thread::scope(|scope| {
            for worker in &mut workers {
                scope.spawn(|| worker.work(&sandbox, &sources, &counts));
            }
        });
        checker.fsck();
        checker.refs(&mut workers);
        // Not always, so that workers meet what was left, and mounts live through several rounds.
        match rng.below(4) {
            0 => checker.nothing_left(&mut workers),
            1 | 2 => checker.mounts(&mut workers),
            _ => {}
        }
        if round % 50 == 0 || round == rounds {
            let took = began.elapsed().as_secs();
            println!("round {round}, {took} s; killed of started: {}", counts.show());
        }
    }
    checker.mounts(&mut workers);
    checker.nothing_left(&mut workers);
}
