//! `cofolio survey` on stores that the real podman, containerd and Docker have filled, with containers that run.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;
#[path = "../../image/tests/oci/engines.rs"]
mod engines;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Sandbox, program, skip};
use engines::{Containerd, done, wait_for};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// podman mounts its root on itself, and what it could not remove stays mounted: all of it goes with the directory.
struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        for target in mounted_below(&self.0).iter().rev() {
            let _ = Command::new("umount").args(["--lazy", "--quiet"]).arg(target).status();
        }
    }
}

/// Whether a process has a path in its command line.
fn is_named_by_a_process(path: &Path) -> bool {
    let path = path.as_os_str().as_encoded_bytes();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok())
        .any(|line| line.windows(path.len()).any(|part| part == path))
}

/// Mount points in a directory, in the order in which they were mounted.
fn mounted_below(dir: &Path) -> Vec<PathBuf> {
    let all = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let targets = all.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    targets.filter(|target| target.starts_with(dir)).collect()
}

fn regular(dir: &Path, each: &mut dyn FnMut(&Path, &fs::Metadata)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = path.symlink_metadata().unwrap();
        if meta.is_dir() {
            regular(&path, each);
        } else if meta.is_file() {
            each(&path, &meta);
        }
    }
}

type Times = BTreeMap<PathBuf, [i64; 6]>;

fn times(dir: &Path, into: &mut Times) {
    let meta = dir.symlink_metadata().unwrap();
    let (atime, mtime) = ((meta.atime(), meta.atime_nsec()), (meta.mtime(), meta.mtime_nsec()));
    let ctime = (meta.ctime(), meta.ctime_nsec());
    into.insert(dir.to_owned(), [atime.0, atime.1, mtime.0, mtime.1, ctime.0, ctime.1]);
    if meta.is_dir() {
        let paths: BTreeSet<PathBuf> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        paths.iter().for_each(|path| times(path, into));
    }
}

fn times_of(dir: &Path) -> Times {
    let mut all = Times::new();
    times(dir, &mut all);
    all
}

/// The images that the stores are filled with: two versions of one.
fn corpus(test: &str, programs: &[&str]) -> Option<PathBuf> {
    if !rustix::process::geteuid().is_root() {
        skip(test, "needs root");
        return None;
    }
    if let Some(missing) = programs.iter().find(|name| program(name).is_none()) {
        skip(test, &format!("no {missing} (tools/setup test)"));
        return None;
    }
    if rustix::param::page_size() != PAGE {
        skip(test, "pages of another size than 4 KiB");
        return None;
    }
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../corpus/out");
    let corpus = std::env::var_os("COFOLIO_CORPUS").map_or(corpus, PathBuf::from).join("redis");
    if !corpus.is_dir() {
        skip(test, "no real images (run corpus/build)");
        return None;
    }
    Some(corpus)
}

const PAGE: usize = 4096;

/// What is in the directories of some layers, counted in the plainest way.
#[derive(Default)]
struct Counted {
    files: Vec<PathBuf>,
    disk: u64,
    all: u64,
    by_file: u64,
    /// The fewest blocks that each content takes on disk, in bytes.
    contents: HashMap<Vec<u8>, u64>,
    pages: HashSet<Vec<u8>>,
}

impl Counted {
    /// Reads everything, and drops it from the page cache.
    fn of(layers: &[PathBuf]) -> Self {
        rustix::fs::sync();
        let (mut counted, mut links) = (Self::default(), HashSet::new());
        for layer in layers {
            regular(layer, &mut |path, meta| {
                if meta.len() > 0 && links.insert(meta.ino()) {
                    counted.add(path, meta);
                }
            });
        }
        counted
    }

    fn add(&mut self, path: &Path, meta: &fs::Metadata) {
        let content = fs::read(path).unwrap();
        let size = (content.len().div_ceil(PAGE) * PAGE) as u64;
        self.disk += meta.blocks() * 512;
        self.all += size;
        for chunk in content.chunks(PAGE) {
            let mut whole = chunk.to_vec();
            whole.resize(PAGE, 0);
            self.pages.insert(Sha256::digest(&whole).to_vec());
        }
        let least = self.contents.entry(Sha256::digest(&content).to_vec()).or_insert_with(|| {
            self.by_file += size;
            u64::MAX
        });
        *least = (*least).min(meta.blocks() * 512);
        let file = fs::File::open(path).unwrap();
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        self.files.push(path.to_owned());
    }

    /// What the page cache has of the files, by util-linux.
    fn resident(&self) -> u64 {
        let mut sum = 0;
        for files in self.files.chunks(500) {
            let mut fincore = Command::new("fincore");
            fincore.args(["--bytes", "--noheadings", "--output", "RES"]).args(files);
            let said = done(&mut fincore);
            sum += said.split_whitespace().map(|bytes| bytes.parse::<u64>().unwrap()).sum::<u64>();
        }
        sum
    }

    /// Surveys, and checks that it says what was counted and has changed nothing below `root`.
    #[track_caller]
    fn check(&self, sandbox: &Sandbox, options: &[&str], root: &Path) -> Value {
        // The first look itself changes when directories were last read; the second finds it done (relatime).
        times_of(root);
        let before = times_of(root);
        let resident = self.resident();
        let ran = sandbox.run(&[&["survey", "--json"], options].concat());
        let resident_after = self.resident();
        let after = times_of(root);
        let report: Value = serde_json::from_str(ran.ok()).unwrap();
        assert_eq!(before.len(), after.len());
        for (path, times) in &before {
            assert_eq!(times, &after[path], "{}", path.display());
        }
        assert_eq!(report["unseen_files"], 0, "{report:#}");
        assert_eq!(report["files"], self.files.len());
        assert_eq!(report["contents"], self.contents.len());
        assert_eq!(report["disk"]["bytes"], self.disk);
        assert_eq!(report["disk"]["by_file_bytes"], self.contents.values().sum::<u64>());
        let cache = &report["page_cache"];
        assert_eq!(cache["pages_sampled"], 1);
        assert_eq!(cache["all"]["bytes"], self.all);
        assert_eq!(cache["all"]["by_file_bytes"], self.by_file);
        assert_eq!(cache["all"]["by_page_bytes"], (self.pages.len() * PAGE) as u64);
        let of = |kind: &str| cache["now"][kind].as_u64().unwrap();
        // A machine that is short of memory takes some away meanwhile; nothing may have come.
        assert!(resident_after <= resident, "{resident_after} > {resident}");
        assert!(
            (resident_after..=resident).contains(&of("bytes")),
            "{} of {resident}",
            of("bytes")
        );
        assert!(of("bytes") >= of("by_file_bytes") && of("by_file_bytes") >= of("by_page_bytes"));
        report
    }
}

/// What containers do: read a file that both versions have in a version of its own, and wait.
const READ: [&str; 3] =
    ["sh", "-c", "cat /usr/bin/redis-server /usr/bin/perl >/dev/null; exec sleep 1000"];

/// What the report says of containers that run: so many of each of two images, lowest layer first.
#[track_caller]
fn check_containers(report: &Value, running: &[(u64, u64)]) {
    let containers = report["metadata"]["containers"].as_array().unwrap();
    let mut names: Vec<u64> = containers.iter().map(|c| c["names"].as_u64().unwrap()).collect();
    let mut expected: Vec<u64> = Vec::new();
    for &(names, count) in running {
        (0..count).for_each(|_| expected.push(names));
    }
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    let bytes = |names: u64| names * 921;
    let sum: u64 = expected.iter().sum();
    assert_eq!(report["metadata"]["estimated_bytes"], bytes(sum));
    let once: u64 = running.iter().map(|(names, _)| names).sum();
    assert_eq!(report["metadata"]["read_only_estimated_bytes"], bytes(once));
    for container in containers {
        assert_eq!(container["estimated_bytes"], bytes(container["names"].as_u64().unwrap()));
    }
}

/// Names in the first layers, and in those that were added to them.
fn names_of(first: &[PathBuf], all: &[PathBuf]) -> (u64, u64) {
    let names = |old: bool| {
        let some = all.iter().filter(|dir| first.contains(dir) == old);
        some.map(|dir| times_of(dir).len() as u64 - 1).sum()
    };
    (names(true), names(false))
}

fn dirs(pattern: &Path, name: &str) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> =
        fs::read_dir(pattern).unwrap().map(|entry| entry.unwrap().path().join(name)).collect();
    dirs.retain(|dir| dir.is_dir());
    dirs.sort();
    dirs
}

/// podman with a root of its own, and its containers.
struct Podman {
    root: PathBuf,
    run: PathBuf,
}

impl Podman {
    fn command(&self) -> Command {
        self.with("crun")
    }

    fn with(&self, runtime: &str) -> Command {
        let mut podman = Command::new("podman");
        podman.arg("--root").arg(&self.root).arg("--runroot").arg(&self.run);
        podman.args(["--storage-driver", "overlay", "--cgroup-manager", "cgroupfs"]);
        podman.args(["--events-backend", "file", "--runtime", runtime]);
        podman.arg("--tmpdir").arg(self.run.join("tmp"));
        podman
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let remove = || self.command().args(["rm", "--all", "--force", "--time", "0"]).output();
        // On a busy machine podman may not get its lock, or an answer, in time.
        if !(0..3).any(|_| remove().is_ok_and(|output| output.status.success())) {
            eprintln!("podman does not remove its containers below {}", self.root.display());
        }
        // When a container has ended, its monitor starts a podman of its own, which mounts the root again.
        for _ in 0..300 {
            if !is_named_by_a_process(&self.root) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
}

/// The figures are those that somebody else would count, and nothing in the store is different afterwards.
#[test]
fn two_versions_in_podmans_store() {
    let test = "two_versions_in_podmans_store";
    let Some(corpus) = corpus(test, &["skopeo", "podman", "crun", "fincore"]) else { return };
    let sandbox = Sandbox::new();
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path().join("storage");
    let _unmounted = Unmounted(temporary.path().to_owned());
    let podman = Podman { root: root.clone(), run: temporary.path().join("run") };
    let mut layers = Vec::new();
    for version in ["old", "new"] {
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["--insecure-policy", "copy", "--quiet"]);
        skopeo.arg(format!("oci:{}", corpus.join(version).display()));
        let (graph, run) = (podman.root.display(), podman.run.display());
        let to = format!("containers-storage:[overlay@{graph}+{run}]localhost/redis:{version}");
        let output = skopeo.arg(to).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() && said.contains("supported") {
            return skip(test, &format!("podman's overlay driver: {said}"));
        }
        assert!(output.status.success(), "{said}");
        layers.push(dirs(&root.join("overlay"), "diff"));
    }
    let (names_old, names_new) = names_of(&layers[0], &layers[1]);
    let counted = Counted::of(&layers[1]);
    let options = ["--podman-root", root.to_str().unwrap()];
    let report = counted.check(&sandbox, &options, &root);
    // Two versions of one image: most of it is there twice.
    assert!(counted.disk > counted.contents.values().sum::<u64>() * 5 / 4);
    let store = |report: &Value, what: &str| report["stores"][0][what].as_u64().unwrap();
    assert_eq!((store(&report, "images"), store(&report, "containers")), (2, 0));
    assert_eq!(report["metadata"]["containers"], Value::Array(Vec::new()));

    // Containers: what they read is resident, in the layers.
    let cold = counted.resident();
    // Names that cannot be the beginning of an id: `--replace --name c` removed the container b when b's id
    // began with c, and the survey had one less than was expected.
    for (id, version) in [("one", "old"), ("two", "old"), ("three", "new")] {
        let start = |runtime: &str| {
            let mut run = podman.with(runtime);
            run.args(["run", "--detach", "--replace", "--network", "none", "--name", id]);
            // podman would raise limits above what they may be here.
            run.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
            let output = run.arg(format!("localhost/redis:{version}")).args(READ).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() { Ok(()) } else { Err(said) }
        };
        // Where both versions of cgroups are mounted, crun starts nothing.
        if let Err(said) = start("crun").or_else(|_| start("runc")) {
            return skip(test, &format!("containers: {said}"));
        }
    }
    let mut create = podman.command();
    done(create.args(["create", "--network", "none", "localhost/redis:new"]));
    wait_for("the containers have read", || counted.resident() > cold + (4 << 20));
    std::thread::sleep(std::time::Duration::from_secs(1));
    let report = counted.check(&sandbox, &options, &root);
    assert_eq!((store(&report, "containers"), store(&report, "containers_mounted")), (4, 3));
    let now = &report["page_cache"]["now"];
    assert!(now["bytes"].as_u64() > now["by_file_bytes"].as_u64(), "{now}");
    check_containers(&report, &[(names_old, 2), (names_new, 1)]);

    let text = sandbox.run(&["survey", "--podman-root", root.to_str().unwrap()]);
    assert!(text.stdout.contains("page cache, all read"), "{}", text.stdout);
    assert!(text.stdout.contains("metadata of 3 mounted containers"), "{}", text.stdout);
    let gone = sandbox.run(&["survey", "--podman-root", "/nonexistent"]);
    assert_eq!(gone.code, 3, "{}", gone.stderr);
}

#[test]
fn containerd_with_containers_that_run() {
    let test = "containerd_with_containers_that_run";
    let needed = ["containerd", "ctr", "runc", "tar", "fincore"];
    let Some(corpus) = corpus(test, &needed) else { return };
    let sandbox = Sandbox::new();
    let temporary = tempfile::tempdir().unwrap();
    let containerd = Containerd::start(&temporary.path().join("c"));
    let root = containerd.root();
    let snapshots = root.join("io.containerd.snapshotter.v1.overlayfs/snapshots");
    containerd.import("default", &corpus.join("old"), "localhost/redis:old", true);
    let old = dirs(&snapshots, "fs");
    // The same layers once more, as Docker would have them.
    containerd.import("moby", &corpus.join("new"), "localhost/redis:new", true);
    let layers = dirs(&snapshots, "fs");
    let new: Vec<PathBuf> = layers.iter().filter(|dir| !old.contains(dir)).cloned().collect();
    let counted = Counted::of(&layers);
    let (names_old, names_new) = names_of(&old, &layers);

    let cold = counted.resident();
    containerd.run("default", "localhost/redis:old", "a", &READ);
    containerd.run("default", "localhost/redis:old", "b", &READ);
    containerd.run("moby", "localhost/redis:new", "c", &READ);
    done(&mut containerd.ctr(&["containers", "create", "localhost/redis:old", "d"]));
    wait_for("the containers have read", || counted.resident() > cold + (4 << 20));
    containerd.collect();

    let options = ["--containerd-root", root.to_str().unwrap()];
    let report = counted.check(&sandbox, &options, &root);
    let store = |what: &str| report["stores"][0][what].as_u64().unwrap();
    assert_eq!(report["stores"][0]["engine"], "containerd");
    assert_eq!(store("layers"), layers.len() as u64);
    assert_eq!((store("containers"), store("containers_mounted")), (4, 3));
    check_containers(&report, &[(names_old, 2), (names_new, 1)]);
    let ids = report["metadata"]["containers"].as_array().unwrap().iter();
    assert_eq!(ids.map(|c| c["id"].as_str().unwrap()).collect::<Vec<_>>(), ["a", "b", "c"]);
    let now = &report["page_cache"]["now"];
    assert!(now["bytes"].as_u64() > now["by_file_bytes"].as_u64(), "{now}");

    // Docker with a containerd of its own: its namespace only.
    let docker = temporary.path().join("docker");
    fs::create_dir_all(docker.join("containerd")).unwrap();
    std::os::unix::fs::symlink(&root, docker.join("containerd/daemon")).unwrap();
    let dockers = Counted::of(&new);
    let options = ["--docker-root", docker.to_str().unwrap()];
    let report = dockers.check(&sandbox, &options, &root);
    assert_eq!(report["stores"][0]["containers_mounted"], 1);
    check_containers(&report, &[(names_new, 1)]);
    let gone = sandbox.run(&["survey", "--containerd-root", "/nonexistent"]);
    assert_eq!(gone.code, 3, "{}", gone.stderr);
}

/// dockerd with a root of its own, over a containerd of its own.
struct Docker {
    dir: PathBuf,
    daemon: std::process::Child,
    _containerd: Containerd,
    /// What it makes outside of its own directories, and was not there before.
    strays: Vec<&'static str>,
}

impl Docker {
    fn start(dir: &Path) -> Self {
        let strays = ["/etc/docker/key.json", "/run/docker"];
        let strays = strays.into_iter().filter(|path| !Path::new(path).exists()).collect();
        let containerd = Containerd::start(&dir.join("c"));
        fs::write(dir.join("daemon.json"), "{}").unwrap();
        let mut dockerd = Command::new("dockerd");
        for (option, name) in [
            ("--config-file", "daemon.json"),
            ("--data-root", "root"),
            ("--exec-root", "exec"),
            ("--pidfile", "pid"),
        ] {
            dockerd.arg(option).arg(dir.join(name));
        }
        dockerd.arg("--containerd").arg(containerd.socket());
        dockerd.arg("--host").arg(format!("unix://{}", dir.join("sock").display()));
        dockerd.args(["--storage-driver=overlay2", "--bridge=none", "--iptables=false"]);
        dockerd.args(["--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]);
        dockerd.stdout(std::process::Stdio::null()).stdin(std::process::Stdio::null());
        let log = fs::File::create(dir.join("log")).unwrap();
        let daemon = dockerd.stderr(log).spawn().unwrap();
        let started = Self { dir: dir.to_owned(), daemon, _containerd: containerd, strays };
        wait_for("Docker answers", || {
            started.command().arg("version").output().is_ok_and(|output| output.status.success())
        });
        started
    }

    fn command(&self) -> Command {
        let mut docker = Command::new("docker");
        docker.arg("--host").arg(format!("unix://{}", self.dir.join("sock").display()));
        docker
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        for id in ["c1", "c2", "c3", "c4"] {
            let _ = self.command().args(["rm", "--force", id]).output();
        }
        let pid = i32::try_from(self.daemon.id()).ok().and_then(rustix::process::Pid::from_raw);
        let _ = rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::TERM);
        let _ = self.daemon.wait();
        for stray in &self.strays {
            let _ = fs::remove_file(stray).or_else(|_| fs::remove_dir_all(stray));
        }
    }
}

#[test]
fn docker_with_containers_that_run() {
    let test = "docker_with_containers_that_run";
    let needed = ["dockerd", "docker", "containerd", "ctr", "runc", "skopeo", "fincore"];
    let Some(corpus) = corpus(test, &needed) else { return };
    let sandbox = Sandbox::new();
    let temporary = tempfile::tempdir().unwrap();
    let docker = Docker::start(temporary.path());
    let root = temporary.path().join("root");
    let mut layers = Vec::new();
    for version in ["old", "new"] {
        let archive = temporary.path().join("saved.tar");
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["--insecure-policy", "copy", "--quiet"]);
        skopeo.arg(format!("oci:{}", corpus.join(version).display()));
        let to = format!("docker-archive:{}:localhost/redis:{version}", archive.display());
        done(skopeo.arg(to));
        done(docker.command().args(["load", "--quiet", "--input"]).arg(&archive));
        fs::remove_file(archive).unwrap();
        layers.push(dirs(&root.join("overlay2"), "diff"));
    }
    let (names_old, names_new) = names_of(&layers[0], &layers[1]);
    let counted = Counted::of(&layers[1]);
    let cold = counted.resident();
    for (id, version) in [("c1", "old"), ("c2", "old"), ("c3", "new")] {
        let mut run = docker.command();
        run.args(["run", "--detach", "--network", "none", "--name", id]);
        done(run.arg(format!("localhost/redis:{version}")).args(READ));
    }
    let mut create = docker.command();
    done(create.args(["create", "--network", "none", "--name", "c4", "localhost/redis:new"]));
    wait_for("the containers have read", || counted.resident() > cold + (4 << 20));
    std::thread::sleep(std::time::Duration::from_secs(1));

    let options = ["--docker-root", root.to_str().unwrap()];
    let report = counted.check(&sandbox, &options, &root.join("overlay2"));
    let store = |what: &str| report["stores"][0][what].as_u64().unwrap();
    assert_eq!(report["stores"].as_array().unwrap().len(), 1);
    assert_eq!(report["stores"][0]["engine"], "Docker");
    assert_eq!((store("images"), store("layers")), (2, layers[1].len() as u64));
    assert_eq!((store("containers"), store("containers_mounted")), (4, 3));
    check_containers(&report, &[(names_old, 2), (names_new, 1)]);
    let gone = sandbox.run(&["survey", "--docker-root", "/nonexistent"]);
    assert_eq!(gone.code, 3, "{}", gone.stderr);
}
