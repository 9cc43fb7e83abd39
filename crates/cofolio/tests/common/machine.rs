//! Containers with the runtimes of this machine.

use std::fs;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Ran, Sandbox, Tar, can_mount, program, skip, write_layout};

/// A sandbox whose containers end with it, however the test ends.
pub(crate) struct Machine(pub(crate) Sandbox);

impl Deref for Machine {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.0
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for container in self.containers() {
            let _ = self.run(&["stop", "--time", "0", container["name"].as_str().unwrap_or("")]);
        }
    }
}

impl Machine {
    pub(crate) fn containers(&self) -> Vec<Value> {
        let listed = self.run(&["ps", "--json"]);
        let listed: Value = serde_json::from_str(&listed.stdout).unwrap_or_default();
        listed.as_array().cloned().unwrap_or_default()
    }

    /// A program of this name, which takes the place of a runtime.
    pub(crate) fn script(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{text}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// `cofolio run [options] box:1 -- sh -c script`
    pub(crate) fn sh(&self, runtime: &str, options: &[&str], script: &str) -> Ran {
        self.run(&self.sh_args(runtime, options, script))
    }

    pub(crate) fn sh_args<'a>(
        &self,
        runtime: &'a str,
        options: &[&'a str],
        script: &'a str,
    ) -> Vec<&'a str> {
        let mut args = vec!["run", "--runtime", runtime];
        args.extend(options);
        args.extend(["box:1", "--", "sh", "-c", script]);
        args
    }

    /// Files of its store that are behind loop devices.
    pub(crate) fn loops(&self) -> Vec<String> {
        let devices = fs::read_dir("/sys/block").unwrap().flatten();
        let files = devices
            .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok());
        files.filter(|file| file.contains(self.path("store").to_str().unwrap())).collect()
    }

    /// Nothing of a container is left: no mount, no record, no directory for changes.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.containers(), Vec::<Value>::new());
        let mounted: Vec<PathBuf> =
            self.mounted().into_iter().filter(|at| !at.ends_with("store")).collect();
        assert_eq!(mounted, Vec::<PathBuf>::new());
        let left = |dir: PathBuf| -> Vec<PathBuf> {
            fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        };
        for run in left(self.path("run")) {
            for dir in ["containers", "mounts", "crun", "runc"] {
                assert_eq!(left(run.join(dir)), Vec::<PathBuf>::new());
            }
            // Meanwhile the runtime of another test's container can hold a copy of its mount.
            let held = [run.join("images/default"), self.path("store/domains/default/writable")];
            let is_left = || held.iter().any(|dir| !left(dir.clone()).is_empty());
            until("no image and no directory for changes is kept", || {
                (!is_left()).then_some(()).or_else(|| {
                    self.run(&["mounts", "--reconcile"]);
                    None
                })
            });
        }
    }
}

/// An image with a shell, and the runtimes to start it with; says why not.
pub(crate) fn machine(test: &str) -> Option<(Machine, Vec<&'static str>)> {
    machine_in(Sandbox::new(), test)
}

/// The same, in this sandbox.
pub(crate) fn machine_in(sandbox: Sandbox, test: &str) -> Option<(Machine, Vec<&'static str>)> {
    if !can_mount(test) {
        return None;
    }
    let runtimes: Vec<_> =
        ["crun", "runc"].into_iter().filter(|name| program(name).is_some()).collect();
    if runtimes.is_empty() {
        skip(test, "neither crun nor runc is installed");
        return None;
    }
    import_box(&sandbox, test).then(|| (Machine(sandbox), runtimes))
}

/// Imports an image with a shell, `box:1`; says why not.
pub(crate) fn import_box(sandbox: &Sandbox, test: &str) -> bool {
    import_box_as(sandbox, test, "box:1", json!({}))
}

/// The same under another name, with more in its config.
pub(crate) fn import_box_as(sandbox: &Sandbox, test: &str, name: &str, more: Value) -> bool {
    let is_static =
        |path: &PathBuf| fs::read(path).is_ok_and(|text| !contains(&text, b"/ld-linux"));
    let Some(busybox) = program("busybox").filter(is_static) else {
        skip(test, "no static busybox (package busybox-static)");
        return false;
    };
    let mut tar = Tar::default();
    for dir in ["bin/", "etc/", "proc/", "sys/", "dev/", "mnt/"] {
        tar.directory(dir, 0o755);
    }
    tar.directory("tmp/", 0o1777);
    tar.entry("data/", b'5', 0o700, 1001, 1002, &[]);
    tar.directory("run/", 0o755);
    tar.entry("run/box/", b'5', 0o750, 1001, 1002, &[]);
    tar.file("bin/busybox", 0o755, &fs::read(busybox).unwrap());
    tar.file("bin/text", 0o644, b"no program\n");
    tar.file("etc/passwd", 0o644, b"root:x:0:0::/:\nworker:x:1001:1002::/srv:\n");
    tar.file("etc/group", 0o644, b"worker:x:1002:\n");
    let mut config = json!({
        "Entrypoint": ["/bin/busybox"], "Cmd": ["echo", "from", "image"],
        "Env": ["PATH=/bin", "COLOR=blue"], "Volumes": {"/data": {}},
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    let layout = sandbox.dir("layout");
    write_layout(&layout, name, &[tar.finish()], config);
    sandbox.run(&["import", "--name", name, layout.to_str().unwrap()]).ok();
    true
}

pub(crate) fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Waits for something that another process does.
#[track_caller]
pub(crate) fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    until_within(Duration::from_secs(30), what, look)
}

#[track_caller]
pub(crate) fn until_within<T>(
    most: Duration,
    what: &str,
    mut look: impl FnMut() -> Option<T>,
) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < most, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
