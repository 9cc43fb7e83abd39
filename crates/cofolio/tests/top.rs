//! `cofolio top`: its text and JSON, with a daemon and without, and the program on a terminal.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on stops")]

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::daemon::{Daemon, request};
use common::terminal::Session;
use common::{Killed, Sandbox, can_mount, cofolio, run_with_input};
use rustix::process::{Pid, Signal, kill_process};

/// Against hanging only.
const WATCHDOG: Duration = Duration::from_secs(60);

fn daemon(sandbox: &Sandbox) -> Daemon {
    let daemon = Daemon::start(sandbox, &[]);
    // On a busy machine its first report may lack images.
    daemon.sample();
    daemon
}

/// Mounts an image. Gives the path of a file of 25 pages.
fn mounted_image(sandbox: &Sandbox) -> String {
    sandbox.import_tree("tree:1");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "tree:1", &target]).ok();
    format!("{target}/big")
}

/// A process that reads a file again and again, without mapping it: other tests drop the page
/// cache.
fn reader(file: &str) -> Killed {
    const READ: &str = "while exec 3<\"$0\"; do cat <&3; sleep 0.1; done";
    let mut command = Command::new("sh");
    Killed::start(command.args(["-c", READ, file]).stdout(Stdio::null()))
}

/// In a PID namespace there were no containers, and nothing said why.
#[test]
fn a_pid_namespace_is_a_warning() {
    if !can_mount("a_pid_namespace_is_a_warning") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree:1");
    let cofolio = cofolio();
    let namespace = ["--pid", "--fork", "--mount-proc", cofolio.to_str().unwrap(), "top", "--json"];
    let ran = run_with_input(sandbox.command_of(Path::new("unshare"), &namespace), b"");
    let warnings = ran.json()["warnings"].to_string();
    assert!(warnings.contains("PID namespace"), "{warnings}");
    let warnings = sandbox.run(&["top", "--json"]).json()["warnings"].to_string();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap();
    let is_first = namespace == Path::new("pid:[4026531836]");
    assert_eq!(warnings.contains("PID namespace"), !is_first, "{warnings}");
}

#[test]
fn text_and_json_with_and_without_a_daemon() {
    if !can_mount("text_and_json_with_and_without_a_daemon") {
        return;
    }
    let sandbox = Sandbox::new();
    let file = mounted_image(&sandbox);
    let look = |where_from: &str| {
        // Standard output is no terminal here.
        for args in [&["top", "--once"][..], &["top"], &["top", "--period", "5"]] {
            let ran = sandbox.run(args);
            let text = ran.ok();
            assert!(text.contains(where_from) && text.starts_with("resident "), "{text}");
            let words = ran.words();
            assert!(words.iter().any(|line| line.first() == Some(&"tree:1")), "{text}");
            assert!(!text.contains('\u{1b}'), "{text}");
        }
        let report = sandbox.run(&["top", "--json"]).json();
        assert_eq!(report["images"][0]["names"][0], "tree:1");
        report
    };
    let here = look("no daemon");
    let daemon = daemon(&sandbox);
    let there = look("figures of the daemon");
    let fields = |value: &serde_json::Value| {
        value.as_object().unwrap().keys().cloned().collect::<Vec<String>>()
    };
    assert_eq!(fields(&here), fields(&there));

    // One trust domain, where the others would be shown too.
    let tree = sandbox.text("tree");
    sandbox.run(&["--domain", "zone", "import", "--name", "theirs", &tree]).ok();
    daemon.sample();
    for (args, names) in [(&[][..], 2), (&["--domain", "zone"], 1), (&["--domain", "default"], 1)] {
        let report = sandbox.run(&[&["top", "--json"], args].concat()).json();
        let found = ["domains", "images"].map(|field| report[field].as_array().unwrap().len());
        assert_eq!(found, [names; 2], "{args:?}");
    }
    sandbox.run(&["top", "--once", "--domain", "nothing"]).fails_with(3);

    // Only the daemon has seen who opened a file.
    let began = Instant::now();
    let _reader = reader(&file);
    while sandbox.run(&["top", "--json"]).json()["containers"][0]["used_bytes"] != 102_400 {
        assert!(began.elapsed() < WATCHDOG, "{}", sandbox.run(&["top", "--json"]).stdout);
        std::thread::sleep(Duration::from_millis(100));
    }

    // The daemon serves another store: its figures are not asked for.
    let other = sandbox.text("other");
    sandbox.run(&["--store", &other, "import", "--name", "else", &tree]).ok();
    let ran = sandbox.run(&["--store", &other, "top", "--once"]);
    assert!(ran.ok().contains("no daemon") && ran.stdout.contains("else"), "{}", ran.stdout);
    // It is killed and leaves its socket.
    drop(daemon);
    let here = look("no daemon");
    assert_eq!(here["containers"].as_array().unwrap().len(), 0);
    sandbox.run(&["--store", "/nonexistent", "top", "--once"]).fails_with(3);
    sandbox.run(&["top", "--period", "0"]).fails_with(2);
}

/// Waits for its end, which gives the terminal back as it was; the exit code.
#[track_caller]
fn ends(mut session: Session) -> Option<i32> {
    let code = session.ends();
    // It left the other screen and shows the cursor again.
    session.sees("\u{1b}[?1049l");
    assert!(session.seen.contains("\u{1b}[?25h"), "{:?}", session.seen);
    code
}

#[test]
fn keys_on_a_terminal() {
    if !can_mount("keys_on_a_terminal") {
        return;
    }
    let sandbox = Sandbox::new();
    let file = mounted_image(&sandbox);
    let walk = |where_from: &str| {
        let mut session = Session::start(&sandbox, &["top", "--period", "1"]);
        session.sees("tree:1");
        assert!(session.seen.contains("\u{1b}[?1049h") && session.seen.contains(where_from));
        session.press("\r");
        session.sees("passwd");
        session.press("/big");
        session.sees("filter: big_");
        session.press("\r");
        session.sees("q end");
        session.press("\u{1b}");
        session.sees("passwd");
        session.press("\u{1b}");
        session.sees("tree:1");
        session.press("?");
        session.sees("PROPORTIONAL");
        session.press("?\t");
        session.sees("CONTAINER");
        session
    };
    let mut session = walk("no daemon");
    // It has no daemon to ask, but sees who opens a file from now on.
    let _reader = reader(&file);
    session.press_until("\r", "tree:1");
    session.press("q");
    assert_eq!(ends(session), Some(0));

    let daemon = daemon(&sandbox);
    let mut session = walk("figures of the daemon");
    // The daemon goes: that is said, and the program goes on.
    drop(daemon);
    session.sees("error: ");
    session.press("\u{3}");
    assert_eq!(ends(session), Some(0));

    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut session = Session::start(&sandbox, &["top"]);
        session.sees("tree:1");
        session.seen.clear();
        kill_process(Pid::from_child(&session.child.0), signal).unwrap();
        assert_eq!(ends(session), Some(130), "{signal:?}");
    }
}

/// The window was closed: the program stayed and kept a processor busy for ever, reading a terminal
/// that has hung up. It did so as well where the terminal's last bytes were the beginning of a key.
#[test]
fn it_ends_with_its_terminal() {
    if !can_mount("it_ends_with_its_terminal") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree:1");
    for last in ["", "\u{1b}["] {
        let (mut child, mut master, _slave) = Session::open(&sandbox, &["top", "--period", "1"]);
        let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
        while !String::from_utf8_lossy(&seen).contains("tree:1") {
            let count = master.read(&mut buffer).unwrap();
            seen.extend_from_slice(&buffer[..count]);
        }
        master.write_all(last.as_bytes()).unwrap();
        drop(master);
        let status = common::machine::until("it ends", || child.0.try_wait().unwrap());
        assert_eq!(status.code(), Some(130), "{last:?}");
    }
}

/// The screen asked again whenever it was drawn, ten times a second, instead of once in a period.
#[test]
fn one_look_in_a_period() {
    if !can_mount("one_look_in_a_period") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree:1");
    let daemon = daemon(&sandbox);
    let requests = || {
        let (_, metrics) = daemon.get("/metrics");
        let counts = metrics.lines().filter(|it| it.starts_with("cofolio_http_requests_total"));
        counts.map(|it| it.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum::<u64>()
    };
    let before = requests();
    let mut session = Session::start(&sandbox, &["top", "--period", "3600"]);
    session.sees("tree:1");
    for _ in 0..5 {
        session.press("\t");
        session.sees("CONTAINER");
        session.press("\t");
        session.sees("tree:1");
    }
    session.press("q");
    assert_eq!(ends(session), Some(0));
    // Version, report, and the request for the metrics before.
    assert_eq!(requests() - before, 3);
}

/// `--color` and NO_COLOR decide as everywhere; what the colours say is in words too.
#[test]
fn colors_on_a_terminal() {
    if !can_mount("colors_on_a_terminal") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree:1");
    for (when, has_color) in [("always", true), ("never", false)] {
        let daemon = daemon(&sandbox);
        let mut session = Session::start(&sandbox, &["top", "--color", when, "--period", "1"]);
        session.sees("tree:1");
        session.seen.clear();
        drop(daemon);
        session.sees("error: ");
        assert_eq!(
            session.seen.contains("\u{1b}[33m") || session.seen.contains("38;5;3"),
            has_color
        );
        session.press("q");
        assert_eq!(ends(session), Some(0));
    }
}

/// Where there was no memory cgroup, all containers were shown as one, and nobody said why.
#[test]
fn missing_memory_cgroups_are_reported() {
    if !can_mount("missing_memory_cgroups_are_reported") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree:1");
    let without = |args: &[&str]| {
        let script = "umount --lazy --recursive /sys/fs/cgroup; exec \"$@\"";
        let program = cofolio();
        let before = ["--mount", "sh", "-c", script, "sh", program.to_str().unwrap()];
        let args: Vec<&str> = before.iter().chain(args).copied().collect();
        sandbox.command_of(Path::new("unshare"), &args)
    };
    let looked = without(&["top", "--once"]).output().unwrap();
    assert!(looked.status.success());
    let said = String::from_utf8(looked.stderr).unwrap();
    assert!(
        said.contains("cannot distinguish containers") && said.contains("no memory cgroup"),
        "{said}"
    );

    let mut daemon = Killed::start(without(&["serve"]).stderr(Stdio::piped()));
    let mut stderr = BufReader::new(daemon.0.stderr.take().unwrap());
    let mut said = String::new();
    stderr.read_line(&mut said).unwrap();
    assert!(said.contains("listening at"), "{said}");
    // When it answers, it has said all that it says at its start.
    let socket = UnixStream::connect(sandbox.path("run/cofolio.sock")).unwrap();
    assert_eq!(request(socket, "GET /v1/version HTTP/1.0\r\n\r\n").0, 200);
    drop(daemon);
    stderr.read_to_string(&mut said).unwrap();
    assert!(
        said.contains("cannot distinguish containers") && said.contains("no memory cgroup"),
        "{said}"
    );
}
