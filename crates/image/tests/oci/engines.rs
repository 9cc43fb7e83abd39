//! A real containerd with a root and a socket of its own, which goes away with the test. Also part
//! of `crates/cofolio/tests/survey.rs`.
#![allow(dead_code, reason = "each of the two programs uses a part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a daemon may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something is so.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "{what}: not after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a command that must succeed; what it printed.
#[track_caller]
pub(crate) fn done(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// A running containerd.
pub(crate) struct Containerd {
    dir: PathBuf,
    daemon: Child,
}

impl Containerd {
    /// Starts it with everything it has below `dir`.
    pub(crate) fn start(dir: &Path) -> Self {
        fs::create_dir_all(dir).unwrap();
        let path = |name: &str| dir.join(name);
        // `opt` would make a directory in /opt.
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.internal.v1.opt\"]\n\
             [grpc]\naddress = {:?}\n",
            path("root"),
            path("state"),
            path("sock")
        );
        fs::write(path("config.toml"), config).unwrap();
        let log = fs::File::create(path("log")).unwrap();
        let mut command = Command::new("containerd");
        command.arg("--config").arg(path("config.toml"));
        let daemon = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let started = Self { dir: dir.to_owned(), daemon: daemon.unwrap() };
        wait_for("containerd answers", || {
            started.ctr(&["version"]).output().is_ok_and(|output| output.status.success())
        });
        started
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("sock")
    }

    pub(crate) fn ctr(&self, args: &[&str]) -> Command {
        let mut ctr = Command::new("ctr");
        ctr.arg("--address").arg(self.socket()).args(args).stdin(Stdio::null());
        ctr
    }

    /// Brings a layout's image into a namespace, under the name of an index of it.
    pub(crate) fn import(&self, namespace: &str, layout: &Path, name: &str, unpack: bool) {
        let archive = self.dir.join("import.tar");
        done(Command::new("tar").arg("-C").arg(layout).arg("-cf").arg(&archive).arg("."));
        let import = ["-n", namespace, "images", "import", "--index-name", name];
        let mut import = self.ctr(&import);
        if !unpack {
            import.arg("--no-unpack");
        }
        done(import.arg(&archive));
        fs::remove_file(archive).unwrap();
    }

    /// Starts a container that stays.
    pub(crate) fn run(&self, namespace: &str, image: &str, id: &str, command: &[&str]) {
        let fifos = self.dir.join("fifos");
        let mut run = self.ctr(&["-n", namespace, "run", "--detach", "--null-io", "--fifo-dir"]);
        done(run.arg(fifos).args([image, id]).args(command));
    }

    /// Has it collect garbage now. By itself it does so some time after something was deleted: 49
    /// times what collections take on average, which with a slow disk were more than the two
    /// seconds that a test once waited, and then the times of its database changed in the middle of
    /// a survey.
    pub(crate) fn collect(&self) {
        done(&mut self.ctr(&["leases", "create", "--id", "collect"]));
        done(&mut self.ctr(&["leases", "delete", "--sync", "collect"]));
    }

    /// Ends a container.
    pub(crate) fn kill(&self, namespace: &str, id: &str) {
        let mut kill = self.ctr(&["-n", namespace, "tasks", "kill", "--signal", "SIGKILL", id]);
        let _ = kill.output();
        wait_for("the container has ended", || {
            let remove = self.ctr(&["-n", namespace, "tasks", "rm", id]).output();
            remove.is_ok_and(|out| {
                out.status.success() || String::from_utf8_lossy(&out.stderr).contains("not found")
            })
        });
        let _ = self.ctr(&["-n", namespace, "containers", "rm", id]).output();
    }

    /// Ends the daemon, and leaves what it has on disk.
    pub(crate) fn stop(&mut self) {
        let pid = i32::try_from(self.daemon.id()).ok().and_then(rustix::process::Pid::from_raw);
        let _ = rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::TERM);
        let _ = self.daemon.wait();
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if !self.daemon.try_wait().is_ok_and(|ended| ended.is_none()) {
            return;
        }
        let listed = |args: &[&str]| -> Vec<String> {
            let output = self.ctr(args).output().map(|output| output.stdout).unwrap_or_default();
            String::from_utf8_lossy(&output).lines().map(str::to_owned).collect()
        };
        for namespace in listed(&["namespaces", "ls", "-q"]) {
            for id in listed(&["-n", &namespace, "tasks", "ls", "-q"]) {
                self.kill(&namespace, &id);
            }
        }
        self.stop();
    }
}
