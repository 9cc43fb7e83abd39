//! `cofolio pull` from Debian's docker-registry, into which skopeo has pushed, and `cofolio push` to it.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::registry::Registry;
use common::{Ran, Sandbox, Tar, program, skip, write_layout};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

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

#[test]
fn an_image_is_pushed_to_a_registry() {
    const TEST: &str = "an_image_is_pushed_to_a_registry";
    let Some(binary) = program("docker-registry") else {
        return skip(TEST, "docker-registry is not installed");
    };
    let sandbox = Sandbox::new();
    let registry = Registry::start(&binary, &sandbox);
    let host = &registry.host;
    let layer = Tar::default().file("hello", 0o644, b"to a registry\n").finish();
    write_layout(&sandbox.path("layout"), "1", &[layer], json!({}));
    let layout = format!("oci:{}:1", sandbox.text("layout"));
    let image = sandbox.run(&["import", "--json", "--name", "app:1", &layout]).json();
    let to = format!("docker://{host}/team/app:1");
    let first = sandbox.run(&["push", "app:1", &to]);
    assert!(first.ok().starts_with(&format!("{to} sha256:")), "{}", first.stdout);
    assert!(first.stdout.contains("1: 1 sent ("), "{}", first.stdout);
    // The second time nothing is sent.
    let again = sandbox.run(&["push", "app:1", &to, "--json"]).json();
    assert_eq!((&again["known"], &again["layers"][0]["how"]), (&json!(true), &json!("there")));
    let manifest = again["manifest"].as_str().unwrap();
    let quiet = sandbox.run(&["push", "-q", "app:1", &format!("{host}/team/app:1")]);
    assert_eq!((quiet.ok(), quiet.stderr.as_str()), (&*format!("{to} {manifest}\n"), ""));
    // Another store gets the image from there, by the digest that was said, and gives it to another
    // repository as it came.
    let other = Sandbox::new();
    let by_digest = format!("docker://{host}/team/app@{manifest}");
    let pulled = other.run(&["pull", "--json", "--name", "app:1", &by_digest]).json();
    assert_eq!((&pulled["image"], &pulled["manifest"]), (&image["image"], &again["manifest"]));
    let copied = other.run(&["push", "app:1", &format!("{host}/copy"), "--json"]).json();
    assert_eq!(copied["name"], format!("docker://{host}/copy:latest"));
    assert_eq!(copied["layers"][0]["how"], "mounted");
    assert_eq!((&copied["original"], &copied["manifest"]), (&json!(true), &again["manifest"]));

    for (args, code, expected) in [
        (&["push", "none", &to] as &[&str], 3, "none"),
        (&["push", "app:1", &by_digest], 2, "a push is to a tag"),
        (&["push", "app:1", "Upper/Case"], 2, "lower-case"),
        (&["push", "app:1", &to, "--jobs", "17"], 2, "--jobs"),
        (&["push", "app:1", &to, "--compress", "xz"], 2, "--compress"),
        (&["push", "app:1", "registry.invalid/app:1"], 8, "https://registry.invalid/"),
    ] {
        let ran = sandbox.run(args);
        ran.fails_with(code);
        assert!(ran.stderr.contains(expected), "{args:?}: {}", ran.stderr);
    }
}

/// Whoever waits for a registry learns what it waits for: every further try is told, with host and reason.
#[test]
fn further_tries_are_told() {
    const TEST: &str = "further_tries_are_told";
    let Some(binary) = program("docker-registry") else {
        return skip(TEST, "docker-registry is not installed");
    };
    let sandbox = Sandbox::new();
    let registry = Registry::start(&binary, &sandbox);
    let image = sandbox.import_tree("tree");
    let tree = sandbox.run(&["push", &image, &format!("{}/app:1", registry.host)]);
    tree.ok();
    // A network that ends two connections at once: the first, by TLS, and the question by plain HTTP after it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let front = listener.local_addr().unwrap().to_string();
    let behind = registry.host.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten().skip(2) {
            let Ok(server) = TcpStream::connect(&behind) else { return };
            let (up, down) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || io::copy(&mut &up, &mut &down));
            std::thread::spawn(move || io::copy(&mut &server, &mut &client));
        }
    });
    let pulled = Sandbox::new().run(&["pull", &format!("{front}/app:1")]);
    pulled.ok();
    let told = pulled.stderr.lines().find(|line| line.contains("try 2 of 6 in ")).unwrap_or("");
    assert!(told.contains(&front), "{}", pulled.stderr);
}

/// Starts the binary, and interrupts it when it has said something.
fn interrupted(sandbox: &Sandbox, args: &[&str], said: &str) -> Ran {
    let log = sandbox.path("log");
    let mut command = sandbox.command(args);
    command.stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
    let mut child: Child = command.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !fs::read_to_string(&log).unwrap().contains(said) {
        assert!(Instant::now() < until, "{}", fs::read_to_string(&log).unwrap());
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let code = child.wait().unwrap().code().unwrap_or(-1);
    let stderr = fs::read_to_string(&log).unwrap();
    Ran { code, stdout: String::new(), stderr, bytes: Vec::new() }
}

/// Ctrl-C: a pull says that the next one goes on from there, a push leaves the tag as it was; neither leaves
/// anything in the store.
#[test]
fn interrupted_pulls_and_pushes() {
    const TEST: &str = "interrupted_pulls_and_pushes";
    let Some(binary) = program("docker-registry") else {
        return skip(TEST, "docker-registry is not installed");
    };
    let sandbox = Sandbox::new();
    let registry = Registry::start(&binary, &sandbox);
    let mut seed = 1u32;
    let mut noise = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        seed.to_be_bytes()[0]
    };
    let content: Vec<u8> = (0..2_000_000).map(|_| noise()).collect();
    let layer = Tar::default().file("noise", 0o644, &content).finish();
    write_layout(&sandbox.path("layout"), "1", &[layer], json!({}));
    let layout = format!("oci:{}:1", sandbox.text("layout"));
    sandbox.run(&["import", "--name", "app:1", &layout]).ok();
    let to = format!("{}/app:1", registry.host);
    let push = ["push", "app:1", &to, "--limit-rate", "100K"];
    let ran = interrupted(&sandbox, &push, "layer 1/1");
    ran.fails_with(130);
    assert!(ran.stderr.contains("interrupted"), "{}", ran.stderr);
    let leases = fs::read_dir(sandbox.path("store/domains/default/roots/lease")).unwrap();
    assert_eq!(leases.count(), 0);
    let other = Sandbox::new();
    other.run(&["pull", &to]).fails_with(3);

    sandbox.run(&["push", "app:1", &to]).ok();
    let ran = interrupted(&other, &["pull", &to, "--limit-rate", "100K"], "layer 1/1");
    ran.fails_with(130);
    assert!(ran.stderr.contains("running it again goes on from there"), "{}", ran.stderr);
    assert_eq!(fs::read_dir(other.path("store/staging")).unwrap().count(), 0);
    other.run(&["pull", &to]).ok();
}
