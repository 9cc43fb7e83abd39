//! `cofolio pull` from Debian's docker-registry, into which skopeo has pushed.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Sandbox, Tar, program, skip, write_layout};
use serde_json::json;

/// A registry on loopback that runs until it is dropped.
struct Registry {
    child: Child,
    host: String,
}

impl Registry {
    fn start(binary: &Path, sandbox: &Sandbox) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let host = format!("127.0.0.1:{port}");
        let config = sandbox.path("registry.yml");
        let data = sandbox.text("registry");
        let text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {data}\nhttp:\n  addr: {host}\n"
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new(binary);
        command.arg("serve").arg(&config).stdout(Stdio::null()).stderr(Stdio::null());
        let registry = Self { child: command.spawn().unwrap(), host };
        let until = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(&registry.host).is_err() {
            assert!(Instant::now() < until, "docker-registry does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_image_is_pulled_from_a_registry() {
    const TEST: &str = "an_image_is_pulled_from_a_registry";
    let (Some(binary), Some(skopeo)) = (program("docker-registry"), program("skopeo")) else {
        return skip(TEST, "docker-registry or skopeo is not installed");
    };
    let sandbox = Sandbox::new();
    let registry = Registry::start(&binary, &sandbox);
    let layer = Tar::default().file("hello", 0o644, b"from a registry\n").finish();
    write_layout(&sandbox.path("layout"), "1", &[layer], json!({}));
    let image = format!("{}/team/app:1", registry.host);
    let pushed = Command::new(skopeo)
        .args(["--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"])
        .arg(format!("oci:{}:1", sandbox.text("layout")))
        .arg(format!("docker://{image}"))
        .output()
        .unwrap();
    assert!(pushed.status.success(), "{}", String::from_utf8_lossy(&pushed.stderr));

    let by_layout =
        sandbox.run(&["import", "--json", &format!("oci:{}:1", sandbox.text("layout"))]);
    let name = format!("docker://{image}");
    let pulled = sandbox.run(&["pull", "--limit-rate", "100MiB", "--jobs", "2", &name]);
    pulled.ok();
    assert!(pulled.stdout.starts_with(&image), "{}", pulled.stdout);
    assert_eq!(sandbox.run(&["cat", &image, "/hello"]).ok(), "from a registry\n");
    // The same blobs, so the same manifest: known, whichever way it came.
    let report = sandbox.run(&["import", "--json", "--name", "other:1", &name]).json();
    assert_eq!((&report["known"], &report["name"]), (&json!(true), &json!("other:1")));
    assert_eq!(report["image"], by_layout.json()["image"]);
    let quiet = sandbox.run(&["pull", "--quiet", &image]);
    assert_eq!((quiet.ok().lines().count(), quiet.stderr.as_str()), (1, ""));

    // A mirror from the configuration file is asked instead of a registry that is not there.
    let config = sandbox.text("config.toml");
    let text = format!("[registry.\"registry.invalid\"]\nmirrors = [\"{}/team\"]\n", registry.host);
    fs::write(&config, text).unwrap();
    let mirrored = ["pull", "--config", &config, "registry.invalid/app:1"];
    assert!(sandbox.run(&mirrored).ok().starts_with("registry.invalid/app:1 "));

    fs::write(&config, "[registry.\"Registry.invalid\"]\n").unwrap();
    for (args, code, expected) in [
        (&["pull", "--config", &config, "a"] as &[&str], 2, "not a registry's host"),
        (&["pull", "Upper/Case"], 2, "lower-case"),
        (&["pull", "--jobs", "17", "a"], 2, "--jobs"),
        (&["pull", "--limit-rate", "fast", "a"], 2, "--limit-rate"),
        (&["import", "--insecure", "."], 2, "docker://"),
        (&["pull", &format!("{}/team/none:1", registry.host)], 3, "not there"),
        (&["pull", "registry.invalid/app:1"], 8, "https://registry.invalid/"),
    ] {
        let ran = sandbox.run(args);
        ran.fails_with(code);
        assert!(ran.stderr.contains(expected), "{args:?}: {}", ran.stderr);
    }
}
