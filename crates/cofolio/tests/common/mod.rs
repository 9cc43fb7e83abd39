//! Drives the binary in a sandbox of its own: store, run directory, mounts.
#![allow(dead_code, clippy::unwrap_used, reason = "every test file uses a part; tests may panic")]

pub(crate) mod daemon;
pub(crate) mod machine;
pub(crate) mod registry;
pub(crate) mod terminal;
#[path = "../../../store/tests/common/volume.rs"]
pub(crate) mod volume;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Write};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use cofolio_node::cgroup::{Cgroup, Hierarchy};
use rustix::fs::IFlags;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Says why a test did not run.
pub(crate) fn skip(test: &str, reason: &str) {
    eprintln!("SKIP {test}: {reason}");
}

/// A process that is killed when it is dropped, also when a test fails: it has the test's standard
/// error, and whoever reads that would wait for it.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Killed {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// Starts a command, and returns when its output has a line with these words.
    pub(crate) fn ready(command: &mut Command, words: &str) -> Self {
        let mut child = Self::start(command.stdout(Stdio::piped()));
        let lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.contains(words)));
        child
    }
}

/// Whether mounts can be made; says why not.
pub(crate) fn can_mount(test: &str) -> bool {
    /// The same for all tests, and emulated it takes its time.
    static DOCTOR: OnceLock<i32> = OnceLock::new();
    if !rustix::process::geteuid().is_root() {
        skip(test, "needs root");
        return false;
    }
    if *DOCTOR.get_or_init(|| Sandbox::new().run(&["doctor"]).code) != 0 {
        skip(test, "this kernel cannot mount images (see `cofolio doctor`)");
        return false;
    }
    true
}

/// Lines of `/proc/self/smaps` of memory that KSM may merge.
pub(crate) const MERGEABLE: &str = "^VmFlags:.* mg";

/// Whether programs can be allowed to KSM; says why not.
pub(crate) fn has_ksm(test: &str) -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap());
    let has = Path::new("/sys/kernel/mm/ksm/run").exists();
    if !has {
        skip(test, "this kernel has no KSM");
    } else if (numbers.next(), numbers.next()) < (Some(6), Some(9)) {
        skip(test, "needs Linux 6.9");
        return false;
    }
    has
}

/// A memory cgroup for a test. `None`, with a word about it, where there are none.
pub(crate) fn cgroup(test: &str) -> Option<Cgroup> {
    let name = format!("cofolio-{test}-{}", std::process::id());
    let made = Hierarchy::find(Path::new("/")).and_then(|hierarchy| hierarchy.create(&name));
    made.inspect_err(|reason| skip(test, &reason.to_string())).ok()
}

/// Whether this kernel has inode_share; says why not.
pub(crate) fn has_inode_share(test: &str) -> bool {
    if !can_mount(test) {
        return false;
    }
    let lacks = lacks_inode_share();
    if let Some(detail) = &lacks {
        skip(test, &format!("this kernel has no inode_share ({detail})"));
    }
    lacks.is_none()
}

/// Why this kernel has no inode_share; `None` if it has.
pub(crate) fn lacks_inode_share() -> Option<String> {
    /// The same for all tests, and emulated it takes its time.
    static DOCTOR: OnceLock<Value> = OnceLock::new();
    let doctor = DOCTOR.get_or_init(|| Sandbox::new().run(&["doctor", "--json"]).json());
    let features = doctor["features"].as_array().unwrap();
    let feature = features.iter().find(|feature| feature["name"] == "inode-share").unwrap();
    (feature["presence"] != "present").then(|| feature["detail"].to_string())
}

/// The layout of a real image, where the corpus has been built (COFOLIO_CORPUS, else corpus/out);
/// says why not.
pub(crate) fn real_redis(test: &str) -> Option<PathBuf> {
    let corpus = match std::env::var_os("COFOLIO_CORPUS") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../corpus/out"),
    };
    let layout = corpus.join("redis/old");
    if !layout.join("index.json").is_file() {
        skip(test, "no redis in the corpus (`corpus/build redis`)");
        return None;
    }
    Some(layout)
}

/// The command. In a guest an environment variable says where it is; the tests of `cofolio-bench`
/// find it beside that.
pub(crate) fn cofolio() -> PathBuf {
    match (std::env::var_os("COFOLIO_PROGRAM"), option_env!("CARGO_BIN_EXE_cofolio")) {
        (Some(program), _) => program.into(),
        (None, Some(program)) => program.into(),
        (None, None) => cofolio_bench().with_file_name("cofolio"),
    }
}

/// The benchmarks.
pub(crate) fn cofolio_bench() -> PathBuf {
    match (std::env::var_os("COFOLIO_PROGRAM"), option_env!("CARGO_BIN_EXE_cofolio-bench")) {
        (Some(program), _) => Path::new(&program).with_file_name("cofolio-bench"),
        (None, Some(program)) => program.into(),
        (None, None) => panic!("only tests of cofolio-bench run it"),
    }
}

/// A program on the path, or in the directories for administrators.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    places.map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// What a run of the binary gave.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) bytes: Vec<u8>,
}

impl Ran {
    pub(crate) fn of(output: Output) -> Self {
        use std::os::unix::process::ExitStatusExt;
        let signal = output.status.signal().map(|signal| 128 + signal);
        Self {
            code: output.status.code().or(signal).unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            bytes: output.stdout,
        }
    }

    /// It succeeded; the standard output.
    #[track_caller]
    pub(crate) fn ok(&self) -> &str {
        self.fails_with(0);
        &self.stdout
    }

    #[track_caller]
    pub(crate) fn fails_with(&self, code: i32) -> &Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// It failed, printed nothing but an error, and the error has this part.
    #[track_caller]
    pub(crate) fn refused(&self, part: &str) -> &Self {
        assert!(self.code != 0 && self.stdout.is_empty(), "{}: {}", self.code, self.stdout);
        assert!(self.stderr.contains(part), "no \"{part}\" in: {}", self.stderr);
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", self.stdout, self.stderr))
    }

    /// The words of every line, so that widths do not matter.
    pub(crate) fn words(&self) -> Vec<Vec<&str>> {
        self.stdout.lines().map(|line| line.split_whitespace().collect()).collect()
    }
}

/// A directory with a store, a run directory and whatever a test puts there; gone at the end,
/// mounts included, however the test ends.
pub(crate) struct Sandbox {
    dir: tempfile::TempDir,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// One on another filesystem than that of temporary files.
    pub(crate) fn below(directory: &Path) -> Self {
        Self { dir: tempfile::tempdir_in(directory).unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A directory below the sandbox.
    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        self.command_of(&cofolio(), args)
    }

    /// A benchmark in the sandbox.
    pub(crate) fn bench<S: AsRef<OsStr>>(&self, args: &[S]) -> Ran {
        Ran::of(self.command_of(&cofolio_bench(), args).output().unwrap())
    }

    /// Another program in the sandbox.
    pub(crate) fn command_of<S: AsRef<OsStr>>(&self, program: &Path, args: &[S]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env("COFOLIO_STORE", self.path("store"))
            .env("COFOLIO_RUN", self.path("run"))
            // This machine's own settings are none of a test's.
            .env("COFOLIO_CONFIG", "/dev/null")
            .env_remove("NO_COLOR")
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Ran {
        Ran::of(self.command(args).output().unwrap())
    }

    pub(crate) fn run_with_input(&self, args: &[&str], input: &[u8]) -> Ran {
        run_with_input(self.command(args), input)
    }

    /// A small tree with one of each: what most tests import.
    pub(crate) fn tree(&self, name: &str) -> PathBuf {
        let root = self.dir(name);
        fs::create_dir_all(root.join("etc/conf.d")).unwrap();
        fs::write(root.join("etc/hostname"), "node\n").unwrap();
        fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\napp:x:7:8::/:\n").unwrap();
        fs::write(root.join("big"), vec![b'x'; 100_000]).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", root.join("link")).unwrap();
        std::os::unix::fs::symlink("../../../..", root.join("etc/up")).unwrap();
        root
    }

    /// That tree as an image of the store.
    pub(crate) fn import_tree(&self, name: &str) -> String {
        let tree = self.tree("tree");
        let report = self.run(&["import", "--json", "--name", name, tree.to_str().unwrap()]);
        report.ok();
        report.json()["image"].as_str().unwrap().to_owned()
    }

    /// The file that holds the content of a file of an image.
    pub(crate) fn object(&self, image: &str, path: &str) -> PathBuf {
        let listed = self.run(&["ls", "--json", image, path]).json();
        self.path("store/domains/default/objects").join(listed[0]["object"].as_str().unwrap())
    }

    /// Puts another file in the place of one of the store's, with fs-verity of its own or without.
    pub(crate) fn replace(&self, path: &Path, bytes: &[u8], verity: bool) -> Replaced {
        let flags = rustix::fs::ioctl_getflags(fs::File::open(path).unwrap()).ok();
        unlock(path).unwrap();
        let aside = self.path("aside");
        fs::rename(path, &aside).unwrap();
        fs::write(path, bytes).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o444)).unwrap();
        if verity {
            volume::run(Command::new("fsverity").arg("enable").arg(path)).unwrap();
        }
        Replaced { path: path.to_owned(), aside, flags }
    }

    /// What the kernel has mounted below the sandbox, outermost first.
    pub(crate) fn mounted(&self) -> Vec<PathBuf> {
        let dir = fs::canonicalize(self.dir.path()).unwrap();
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let targets = table.lines().filter_map(|line| line.split(' ').nth(4));
        targets.map(PathBuf::from).filter(|target| target.starts_with(&dir)).collect()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let flags = rustix::mount::UnmountFlags::DETACH;
        for target in self.mounted().iter().rev() {
            let _ = rustix::mount::unmount(target, flags);
        }
        release(&self.path("store"));
    }
}

/// Clear the immutable flags below a directory, so that it can be removed, whatever a test did to
/// it.
pub(crate) fn release(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            release(&entry.path());
        } else if kind.is_file() {
            let _ = unlock(&entry.path());
        }
    }
}

/// `FS_VERITY_FL` of `linux/fs.h`: btrfs refuses to be told what it has told.
fn told() -> IFlags {
    IFlags::from_bits_retain(0x0010_0000)
}

/// Clear the immutable flag of a file, where there is one.
pub(crate) fn unlock(path: &Path) -> Result<(), String> {
    use rustix::fs::{ioctl_getflags, ioctl_setflags};
    let file = fs::File::open(path).map_err(|error| error.to_string())?;
    match ioctl_getflags(&file) {
        Ok(flags) if flags.contains(IFlags::IMMUTABLE) => {
            ioctl_setflags(&file, flags - IFlags::IMMUTABLE - told())
                .map_err(|error| error.to_string())
        }
        _ => Ok(()),
    }
}

/// Change a file of the store behind its back, protected or not.
pub(crate) fn overwrite(path: &Path, content: &[u8]) -> Result<(), String> {
    unlock(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(path, content).map_err(|error| format!("the kernel protects objects here: {error}"))
}

/// A file of the store's that has another in its place.
pub(crate) struct Replaced {
    path: PathBuf,
    aside: PathBuf,
    flags: Option<IFlags>,
}

impl Replaced {
    /// Puts back what was there, as it was.
    pub(crate) fn restore(self) {
        fs::rename(self.aside, &self.path).unwrap();
        if let Some(flags) = self.flags.filter(|flags| flags.contains(IFlags::IMMUTABLE)) {
            rustix::fs::ioctl_setflags(fs::File::open(&self.path).unwrap(), flags - told())
                .unwrap();
        }
    }
}

/// Remove a file of the store behind its back.
pub(crate) fn remove(path: &Path) -> Result<(), String> {
    unlock(path)?;
    fs::remove_file(path).map_err(|error| error.to_string())
}

pub(crate) fn run_with_input(mut command: Command, input: &[u8]) -> Ran {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || {
        // A program that refuses its input stops reading it.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    Ran::of(output)
}

/// A tar archive in memory, one entry after the other.
#[derive(Default)]
pub(crate) struct Tar(Vec<u8>);

impl Tar {
    pub(crate) fn directory(&mut self, path: &str, mode: u32) -> &mut Self {
        self.entry(path, b'5', mode, 0, 0, &[])
    }

    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> &mut Self {
        self.entry(path, b'0', mode, 0, 0, content)
    }

    pub(crate) fn entry(
        &mut self,
        path: &str,
        kind: u8,
        mode: u32,
        uid: u32,
        gid: u32,
        content: &[u8],
    ) -> &mut Self {
        let mut header = [0_u8; 512];
        let mut put = |at: usize, text: &str| {
            header[at..at + text.len()].copy_from_slice(text.as_bytes());
        };
        put(0, path);
        put(100, &format!("{mode:07o}"));
        put(108, &format!("{uid:07o}"));
        put(116, &format!("{gid:07o}"));
        put(124, &format!("{:011o}", content.len()));
        put(136, "00000000000");
        put(148, "        ");
        put(257, "ustar\0");
        put(263, "00");
        header[156] = kind;
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn finish(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }
}

/// Write an OCI layout with one image of uncompressed layers and this `config` section.
pub(crate) fn write_layout(dir: &Path, tag: &str, layers: &[Vec<u8>], config: Value) {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8], media_type: &str| {
        let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        fs::write(blobs.join(&hex), bytes).unwrap();
        json!({"mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len()})
    };
    let layers: Vec<Value> =
        layers.iter().map(|layer| put(layer, "application/vnd.oci.image.layer.v1.tar")).collect();
    let diff_ids: Vec<&Value> = layers.iter().map(|layer| &layer["digest"]).collect();
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let config = put(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": layers,
    });
    let mut manifest =
        put(manifest.to_string().as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    manifest["annotations"] =
        serde_json::to_value(BTreeMap::from([("org.opencontainers.image.ref.name", tag)])).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(dir.join("index.json"), index.to_string()).unwrap();
}

/// Types, modes, owners, times, links and contents of a tree, a line each.
pub(crate) fn listing(top: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(top.join(&dir)).unwrap() {
            let name = dir.join(entry.unwrap().file_name());
            let path = top.join(&name);
            let meta = path.symlink_metadata().unwrap();
            let what = if meta.is_dir() {
                open.push(name.clone());
                String::new()
            } else if meta.is_symlink() {
                fs::read_link(&path).unwrap().display().to_string()
            } else if meta.is_file() {
                cofolio_store::verity::digest(&fs::read(&path).unwrap()).to_string()
            } else {
                meta.rdev().to_string()
            };
            let (mode, links) = (meta.mode(), meta.nlink());
            let owner =
                format!("{}:{} {}.{:09}", meta.uid(), meta.gid(), meta.mtime(), meta.mtime_nsec());
            lines.push(format!("{} {mode:o} {links} {owner} {what}", name.display()));
        }
    }
    lines.sort_unstable();
    lines
}

/// fsck.erofs, if it is one that compares the fingerprints of files with their content.
pub(crate) fn fsck_erofs() -> Option<PathBuf> {
    program("fsck.erofs").filter(|fsck| {
        let help = Command::new(fsck).arg("--help").output().unwrap();
        String::from_utf8_lossy(&help.stdout).contains("--xattr-inode-digest")
    })
}
