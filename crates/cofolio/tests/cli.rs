//! Help, exit codes, output for terminals and scripts, and docs/CLI.md in step with them.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::path::Path;

use common::{Sandbox, program, skip};

fn commands() -> Vec<String> {
    let help = Sandbox::new().run(&["--help"]);
    let (_, rest) = help.ok().split_once("Commands:\n").unwrap();
    let lines = rest.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn without_arguments_there_is_help_and_a_usage_error() {
    let ran = Sandbox::new().run::<&str>(&[]);
    ran.fails_with(2);
    let help = ran.stdout + &ran.stderr;
    assert!(help.contains("Commands:") && help.contains("Example:"), "{help}");
}

#[test]
fn every_command_explains_itself() {
    let commands = commands();
    assert!(commands.len() >= 19, "{commands:?}");
    for command in &commands {
        // It has a grammar of its own below it.
        let help = match command.as_str() {
            "mkcomposefs" => Sandbox::new().run(&["help", command.as_str()]),
            _ => Sandbox::new().run(&[command.as_str(), "--help"]),
        };
        assert!(help.ok().contains("Example"), "{command}");
        // What it does comes first.
        let first = help.stdout.lines().next().unwrap();
        assert!(!first.is_empty() && !first.starts_with("Usage"), "{command}: {first}");
    }
}

#[test]
fn wrong_arguments_are_usage_errors() {
    let sandbox = Sandbox::new();
    for args in [
        &["nonsense"] as &[&str],
        &["images", "--nonsense"],
        &["mount", "x"],
        &["--color", "sometimes", "images"],
        &["umount"],
        &["umount", "--all", "x"],
        &["run", "--cpus", "0", "x"],
        &["run", "--cpus=-1", "x"],
        &["run", "--cpus", "NaN", "x"],
        &["run", "--cpus", "inf", "x"],
    ] {
        sandbox.run(args).fails_with(2);
    }
    assert!(sandbox.run(&["--version"]).ok().starts_with("cofolio "));
}

/// Options that came from the environment were in the usage of every wrong command, as if required.
#[test]
fn usage_shows_no_option_of_the_environment() {
    let sandbox = Sandbox::new();
    for args in [&["images", "--nonsense"] as &[&str], &["mount", "x"]] {
        let ran = sandbox.run(args);
        ran.fails_with(2);
        assert!(ran.stderr.contains("Usage: cofolio"), "{}", ran.stderr);
        assert!(!ran.stderr.contains("--store"), "{}", ran.stderr);
        assert!(!ran.stderr.contains("--run-dir"), "{}", ran.stderr);
    }
}

/// A key, a signature or a configuration that is a FIFO was waited for without end.
#[test]
fn a_fifo_is_not_waited_for() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let (fifo, target) = (sandbox.text("fifo"), sandbox.dir("target").display().to_string());
    let make = |path: &str| {
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, 0o600.into(), 0).unwrap();
    };
    make(&fifo);
    // Another user's store is read as root.
    let storage = sandbox.dir("storage").display().to_string();
    for name in ["layers", "images"] {
        sandbox.dir(&format!("storage/overlay-{name}"));
        make(&format!("{storage}/overlay-{name}/{name}.json"));
    }
    let containerd = sandbox.dir("containerd").display().to_string();
    sandbox.dir("containerd/io.containerd.metadata.v1.bolt");
    make(&format!("{containerd}/io.containerd.metadata.v1.bolt/meta.db"));
    for args in [
        &["mount", "--trust", &fifo, "box:1", &target] as &[&str],
        &["--config", &fifo, "images"],
        &["sign", "box:1", "--key", &fifo],
        &["sign", "box:1", "--key", &fifo, "--attach", &fifo],
        &["ls", &fifo],
        &["import", &format!("containers-storage:[overlay@{storage}]box:2")],
        &["import", &format!("containerd:[{containerd}]box:2")],
    ] {
        let mut command = sandbox.command(args);
        let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        let ended = (0..600).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            child.try_wait().unwrap().is_some()
        });
        child.kill().unwrap();
        let ran = common::Ran::of(child.wait_with_output().unwrap());
        assert!(ended, "{args:?} waits");
        assert!(
            ran.code != 0
                && (ran.stderr.contains("FIFO") || ran.stderr.contains("not a regular file")),
            "{args:?}: {}",
            ran.stderr
        );
    }
}

#[test]
fn a_missing_store_is_not_found_and_the_hint_says_what_to_do() {
    let sandbox = Sandbox::new();
    for command in ["images", "mounts", "gc", "fsck", "du"] {
        let ran = sandbox.run(&[command]);
        ran.fails_with(3);
        assert!(ran.stderr.starts_with("cofolio: no store at"), "{}", ran.stderr);
        assert!(ran.stderr.contains("\nhint: "), "{}", ran.stderr);
    }
    // A directory that is something else is left alone.
    fs::create_dir(sandbox.path("store")).unwrap();
    fs::write(sandbox.path("store/precious"), "x").unwrap();
    let tree = sandbox.tree("tree");
    sandbox.run(&["import", tree.to_str().unwrap()]).fails_with(1);
    assert_eq!(fs::read_dir(sandbox.path("store")).unwrap().count(), 1);
}

#[test]
fn colours_come_only_when_wanted() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    assert!(!sandbox.run(&["images"]).ok().contains('\x1b'));
    assert!(sandbox.run(&["--color", "always", "images"]).ok().contains('\x1b'));
    assert!(sandbox.run(&["images", "--color=never"]).ok().contains("box:1"));
    let Some(script) = program("script") else {
        return skip("colours_come_only_when_wanted (terminal)", "script is not installed");
    };
    let on_terminal = |variable: &str| {
        let command = format!(
            "{variable} COFOLIO_STORE={} {} images",
            sandbox.text("store"),
            env!("CARGO_BIN_EXE_cofolio")
        );
        let mut run = std::process::Command::new(&script);
        run.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm").env_remove("NO_COLOR");
        common::run_with_input(run, b"")
    };
    assert!(on_terminal("").ok().contains("\x1b["));
    assert!(!on_terminal("NO_COLOR=1").ok().contains("\x1b["));
    assert!(!on_terminal("TERM=dumb").ok().contains("\x1b["));
}

#[test]
fn quiet_and_json_leave_standard_error_empty() {
    let sandbox = Sandbox::new();
    let tree = sandbox.tree("tree");
    let tree = tree.to_str().unwrap();
    let quiet = sandbox.run(&["import", "--quiet", "--name", "a", tree]);
    assert_eq!((quiet.code, quiet.stderr.as_str()), (0, ""));
    assert_eq!(quiet.stdout.lines().count(), 1);
    for args in [
        &["import", "--name", "b", tree] as &[&str],
        &["images"],
        &["images", "--sharing"],
        &["diff", "a", "b"],
        &["inspect", "a"],
        &["ls", "a"],
        &["verify", "a"],
        &["tag", "a", "c"],
        &["rm", "c"],
        &["gc"],
        &["fsck"],
        &["du"],
        &["mounts"],
    ] {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        let ran = sandbox.run(&args);
        ran.ok();
        assert_eq!(ran.stderr, "", "{args:?}");
        ran.json();
    }
}

/// A cron job wants mail when something is wrong, and none otherwise: `gc -q` printed its table.
#[test]
fn quiet_commands_print_only_what_was_asked_for() {
    let sandbox = Sandbox::new();
    let digest = sandbox.import_tree("box:1");
    let silent = |args: &[&str]| {
        let ran = sandbox.run(&[args, &["-q"]].concat());
        assert_eq!((ran.ok(), ran.stderr.as_str()), ("", ""), "{args:?}");
    };
    silent(&["tag", "box:1", "box:2"]);
    silent(&["rm", "box:2"]);
    silent(&["gc", "--dry-run"]);
    silent(&["gc"]);
    silent(&["fsck"]);
    silent(&["verify", "box:1"]);
    silent(&["mounts"]);
    silent(&["mounts", "--reconcile"]);
    for args in [
        // Without "2 seconds ago".
        &["images", "--json"] as &[&str],
        &["inspect", "box:1"],
        &["ls", "box:1"],
        &["cat", "box:1", "/etc/hostname"],
        &["dump", "box:1"],
        &["du"],
    ] {
        let (loud, quiet) = (sandbox.run(args), sandbox.run(&[args, &["-q"]].concat()));
        assert_eq!((quiet.ok(), quiet.stderr.as_str()), (loud.ok(), ""), "{args:?}");
        assert_ne!(quiet.stdout, "");
    }
    // Errors are always told, in plain words on standard error, with --json too.
    for flag in ["-q", "--json"] {
        for (args, code) in [
            (&["inspect", "nothing"] as &[&str], 3),
            (&["rm", "nothing"], 3),
            (&["umount", "nothing"], 3),
            (&["import", "nothing"], 3),
            (&["mount", "nothing", "/mnt"], 3),
        ] {
            let ran = sandbox.run(&[args, &[flag]].concat());
            ran.fails_with(code);
            assert!(ran.stderr.starts_with("cofolio: "), "{args:?} {flag}: {}", ran.stderr);
            match (flag, args[0]) {
                // What did go: nothing.
                ("--json", "umount") => assert_eq!(ran.json(), serde_json::json!([])),
                _ => assert_eq!(ran.stdout, "", "{args:?} {flag}"),
            }
        }
    }
    // What cannot be JSON is refused, not given in another form.
    for args in [&["cat", "box:1", "/etc/hostname"] as &[&str], &["dump", &digest]] {
        let ran = sandbox.run(&[args, &["--json"]].concat());
        ran.fails_with(2);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn doctor_names_every_feature_with_its_presence() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&["doctor", "--json"]);
    let report = ran.json();
    let can_mount = report["can_mount"].as_bool().unwrap();
    assert_eq!(ran.code, if can_mount { 0 } else { 5 });
    let features = report["features"].as_array().unwrap();
    let names: Vec<_> = features.iter().filter_map(|feature| feature["name"].as_str()).collect();
    for name in ["privilege", "erofs", "overlay", "fs-verity", "memory-controller"] {
        assert!(names.contains(&name), "{name}");
    }
    let text = sandbox.run(&["doctor"]);
    for name in names {
        assert!(text.stdout.contains(name), "{name}");
    }
    // It must help where the store is broken, too.
    sandbox.import_tree("box:1");
    fs::write(sandbox.path("store/meta.json"), "{").unwrap();
    let text = sandbox.run(&["doctor"]);
    assert!(text.stdout.contains("meta.json"), "{}", text.stdout);
    assert_eq!(text.code, if can_mount { 4 } else { 5 });
}

#[test]
fn doctor_says_what_a_store_without_protection_costs() {
    const TEST: &str = "doctor_says_what_a_store_without_protection_costs";
    let Some(setpriv) = program("setpriv").filter(|_| rustix::process::geteuid().is_root()) else {
        return skip(TEST, "needs root and setpriv to give it up");
    };
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    if sandbox.run(&["doctor"]).stdout.contains("by the kernel, every read") {
        return skip(TEST, "the kernel protects objects here");
    }
    let mut doctor = std::process::Command::new(setpriv);
    doctor.args(["--bounding-set=-linux_immutable", "--inh-caps=-linux_immutable"]);
    doctor.arg(env!("CARGO_BIN_EXE_cofolio")).arg("doctor");
    doctor.env("COFOLIO_STORE", sandbox.path("store"));
    let doctor = common::run_with_input(doctor, b"");
    assert!(doctor.stdout.contains("size of every object: 2 us each"), "{}", doctor.stdout);
}

/// Without privileges everything works that needs none, and the rest says so with exit code 5.
#[test]
fn without_privileges_mounting_says_what_is_missing() {
    const TEST: &str = "without_privileges_mounting_says_what_is_missing";
    let Some(setpriv) = program("setpriv").filter(|_| rustix::process::geteuid().is_root()) else {
        return skip(TEST, "needs root and setpriv to give it up");
    };
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.dir("mnt");
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(&setpriv);
        command
            .args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"])
            .arg(env!("CARGO_BIN_EXE_cofolio"))
            .args(args)
            .env("COFOLIO_STORE", sandbox.path("store"))
            .env("COFOLIO_RUN", sandbox.path("run"));
        common::run_with_input(command, b"")
    };
    assert_eq!(run(&["cat", "box:1", "/etc/hostname"]).ok(), "node\n");
    let mount = run(&["mount", "box:1", target.to_str().unwrap()]);
    mount.fails_with(5);
    assert!(mount.stderr.contains("CAP_SYS_ADMIN"), "{}", mount.stderr);
    run(&["doctor"]).fails_with(5);
}

/// The first refused system call was reported, with its path, and not what to do. Later only "not
/// permitted" was said, and not of what.
#[test]
fn without_root_the_hint_is_to_be_root() {
    const TEST: &str = "without_root_the_hint_is_to_be_root";
    let Some(setpriv) = program("setpriv").filter(|_| rustix::process::geteuid().is_root()) else {
        return skip(TEST, "needs root and setpriv to give it up");
    };
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let commands: &[&[&str]] = &[
        &["mount", "box:1", "/mnt"],
        &["umount", "--all"],
        &["mounts", "--reconcile"],
        &["bundle", "box:1", "/mnt"],
        &["backend", "inode-share"],
        &["run", "box:1"],
        &["exec", "box", "--", "sh"],
        &["stop", "box"],
        &["warm", "box:1"],
        &["serve"],
        &["profile", "record", "box:1"],
        &["top", "--once"],
        &["images"],
        &["doctor"],
    ];
    for args in commands {
        let mut command = std::process::Command::new(&setpriv);
        command.args(["--reuid=65534", "--clear-groups"]).arg(env!("CARGO_BIN_EXE_cofolio"));
        command.args(*args).env("COFOLIO_STORE", sandbox.path("store"));
        let ran = common::run_with_input(command, b"");
        ran.fails_with(5);
        let said = ran.stdout + &ran.stderr;
        let is_about_root = said.contains("run as root") && !said.contains("see `cofolio fsck`");
        assert!(is_about_root && !said.contains("cofolio: not permitted"), "{args:?}: {said}");
    }
}

/// docs/CLI.md has the same commands, options and exit codes as the program. `COFOLIO_BLESS=1` writes the
/// part of it that is the program's own text.
#[test]
fn the_manual_is_in_step() {
    const BEGIN: &str = "<!-- from `cofolio --help`: written by tests/cli.rs -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/CLI.md");
    let manual = fs::read_to_string(&path).unwrap();
    let (head, written) = manual.split_once(BEGIN).expect("the marker is there");
    let mut text = String::from("\n");
    let sandbox = Sandbox::new();
    let mut add = |title: &str, args: &[&str]| {
        let mut command = sandbox.command(args);
        // Widths follow the terminal, where there is one.
        let output = command.env("COLUMNS", "100").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        // What every command takes is explained once.
        let help = match (help.split_once("\nOptions of every command:"), title) {
            (Some((own, common)), title) if title != "cofolio" => {
                own.to_owned() + common.find("\nExample").map_or("", |at| &common[at..])
            }
            _ => help,
        };
        text.push_str(&format!("\n### {title}\n\n```text\n{}\n```\n", help.trim_end()));
    };
    add("cofolio", &["--help"]);
    for command in commands() {
        add(&format!("cofolio {command}"), &["help", &command]);
    }
    if std::env::var_os("COFOLIO_BLESS").is_some() {
        fs::write(&path, format!("{head}{BEGIN}{text}")).unwrap();
        return;
    }
    assert!(
        written == text,
        "docs/CLI.md is behind `cofolio --help`: run this test with COFOLIO_BLESS=1 and commit it"
    );
    let help = sandbox.run(&["--help"]);
    let (_, codes) = help.ok().split_once("Exit codes:\n").unwrap();
    for line in codes.lines().take_while(|line| !line.is_empty()) {
        let (code, meaning) = line.trim().split_once("  ").unwrap();
        assert!(head.contains(&format!("| {code} | {meaning} |")), "exit code {code}: {meaning}");
    }
}
