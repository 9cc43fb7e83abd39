//! The daemon: who may use it, what it sees, and what happens when it dies.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

#[path = "../../../node/tests/common/cache.rs"]
mod cache;
#[path = "../common/mod.rs"]
mod common;
mod documented;

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::daemon::{Daemon, request};
use common::{Killed, Sandbox, can_mount, cgroup, skip};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Only root connects, and the members of the group; over TCP everybody reads, if the name by which
/// the server is asked for is this machine's.
#[test]
fn who_may_ask() {
    if !can_mount("who_may_ask") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    // The socket's own mode decides.
    std::fs::set_permissions(sandbox.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let connects = |socket: &Path, uid: u32, gid: u32| {
        let mut command = Command::new("curl");
        command.args(["-s", "-o", "/dev/null", "--unix-socket"]).arg(socket);
        command.arg("http://localhost/v1/version").uid(uid).gid(gid);
        command.status().unwrap().success()
    };
    let daemon = Daemon::start(&sandbox, &[]);
    assert!(connects(&daemon.socket, 0, 0));
    assert!(!connects(&daemon.socket, 65534, 65534));
    drop(daemon);

    let daemon = Daemon::start(&sandbox, &["--group", "65533", "--listen", "127.0.0.1:0"]);
    assert!(!connects(&daemon.socket, 65534, 65534));
    assert!(connects(&daemon.socket, 65534, 65533));
    let address = daemon.tcp.clone().unwrap();
    let ask = |text: String| request(TcpStream::connect(&address).unwrap(), &text);
    assert_eq!(
        ask(format!("GET /v1/version HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")).0,
        200
    );
    for host in ["example.com", "example.com:80", "127.0.0.1.example.com", ""] {
        let (status, body) =
            ask(format!("GET /v1/version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"));
        assert_eq!(status, 403, "{host}: {body}");
    }
    for path in ["sample", "reclaim"] {
        let head = format!("POST /v1/{path} HTTP/1.1\r\nHost: {address}\r\n");
        let (status, body) = ask(format!("{head}Connection: close\r\n\r\n"));
        assert!(status == 403 && body.contains("unix socket"), "{body}");
    }

    // Its directory was made, however far up it was missing.
    let ran = sandbox.run(&["serve", "--socket", &sandbox.text("missing/dir/it.sock")]);
    ran.fails_with(3).refused("there is no such directory");
    assert!(!sandbox.path("missing").exists());
    for (args, said) in [
        (["--listen", "0.0.0.0:0"], "not a loopback address"),
        (["--group", "no-such-group"], "no group no-such-group"),
    ] {
        let other = sandbox.text("other.sock");
        let args = ["serve", "--socket", &other, args[0], args[1]];
        let ran = sandbox.run(&args);
        ran.fails_with(2).refused(said);
    }
}

/// A second daemon at the socket of a living one is refused; the socket of a killed one is
/// replaced, and a file that is no socket stays.
#[test]
fn a_killed_daemon_leaves_nothing_in_the_way() {
    if !can_mount("a_killed_daemon_leaves_nothing_in_the_way") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "--rw", "tree", &target]).ok();
    let daemon = Daemon::start(&sandbox, &[]);
    let refused = sandbox.run(&["serve"]);
    refused.fails_with(7).refused("another process listens");
    assert_eq!(daemon.json("/v1/version")["api"], 1);
    let socket = daemon.socket.clone();
    drop(daemon);
    assert!(socket.exists());
    // The mount neither notices nor is held.
    std::fs::write(Path::new(&target).join("etc/new"), "x").unwrap();
    let mut daemon = Daemon::start(&sandbox, &[]);
    assert_eq!(daemon.sample()["images"].as_array().unwrap().len(), 1);
    sandbox.run(&["umount", &target]).ok();

    // Asked to end, it takes its socket along.
    Command::new("kill").arg(daemon.child.0.id().to_string()).status().unwrap();
    assert!(daemon.child.0.wait().unwrap().success());
    assert!(!socket.exists());
    std::fs::write(&socket, "mine").unwrap();
    let refused = sandbox.run(&["serve"]);
    assert!(refused.code != 0 && refused.stderr.contains("is no socket"), "{}", refused.stderr);
    assert_eq!(std::fs::read(&socket).unwrap(), b"mine");
    // The same goes for the name that the socket has at first.
    std::fs::remove_file(&socket).unwrap();
    let aside = socket.with_extension("sock.new");
    std::fs::write(&aside, "mine").unwrap();
    let refused = sandbox.run(&["serve"]);
    assert!(refused.code != 0 && refused.stderr.contains("is no socket"), "{}", refused.stderr);
    assert_eq!(std::fs::read(&aside).unwrap(), b"mine");
    // Beside it there was a lock for good.
    let mine = sandbox.text("mine");
    std::fs::write(&mine, "mine").unwrap();
    sandbox.run(&["serve", "--socket", &mine]).refused("is no socket");
    assert!(!sandbox.path("mine.lock").exists());
}

/// A second daemon of a store, at another socket, started without a word.
#[test]
fn a_second_daemon_of_a_store_says_so() {
    if !can_mount("a_second_daemon_of_a_store_says_so") {
        return;
    }
    let sandbox = Sandbox::new();
    let first = Daemon::start(&sandbox, &[]);
    first.json("/v1/version");
    let other = sandbox.text("other.sock");
    let mut second = Daemon::start(&sandbox, &["--socket", &other]);
    let said = second.next_line();
    assert!(said.contains("another daemon serves this store"), "{said}");
    UnixStream::connect(&other).unwrap();
}

/// For a file as the store a command was recommended that cannot help, and for the name of a host
/// the error was `invalid socket address syntax`.
#[test]
fn it_says_what_it_takes_instead() {
    if !can_mount("it_says_what_it_takes_instead") {
        return;
    }
    let sandbox = Sandbox::new();
    let file = sandbox.text("file");
    std::fs::write(&file, "mine").unwrap();
    for command in ["serve", "images"] {
        let ran = sandbox.run(&["--store", &file, command]);
        ran.fails_with(1).refused("a store is a directory");
        assert!(!ran.stderr.contains("fsck"), "{}", ran.stderr);
    }
    let needed = "is not an IP address and a port, such as 127.0.0.1:9471";
    sandbox.run(&["serve", "--listen", "localhost:9573"]).fails_with(2).refused(needed);
    let config = sandbox.text("config.toml");
    std::fs::write(&config, "[daemon]\nlisten = 'localhost:9573'\n").unwrap();
    sandbox.run(&["images", "--config", &config]).fails_with(2).refused(needed);
}

/// A daemon whose run directory was wiped could not be reached, said nothing, and let another one
/// start beside it. When it ended, it took the socket of its successor along.
#[test]
fn a_daemon_whose_socket_is_removed_listens_again() {
    if !can_mount("a_daemon_whose_socket_is_removed_listens_again") {
        return;
    }
    let sandbox = Sandbox::new();
    let mut daemon = Daemon::start(&sandbox, &["--group", "65533"]);
    let made = |socket: &Path| {
        let found = socket.metadata().unwrap();
        (found.mode(), found.gid())
    };
    let before = made(&daemon.socket);
    // The daemon, which has just started, may make directories meanwhile.
    let remove = || std::fs::remove_dir_all(sandbox.path("run")).ok();
    common::machine::until("all is removed", remove);
    common::machine::until("it listens again", || UnixStream::connect(&daemon.socket).ok());
    let said = daemon.next_line();
    assert!(said.contains("somebody removed the socket"), "{said}");
    assert!(said.contains("listening at it again"), "{said}");
    assert_eq!(daemon.json("/v1/version")["api"], 1);
    assert_eq!(made(&daemon.socket), before);

    let other = sandbox.path("other");
    let listener = UnixListener::bind(&other).unwrap();
    std::fs::rename(&other, &daemon.socket).unwrap();
    assert_eq!(daemon.child.0.wait().unwrap().code(), Some(7));
    // It said of this one, too, that somebody had removed it.
    assert!(daemon.next_line().contains("somebody replaced the socket"));
    assert!(daemon.next_line().contains("another process listens"));
    UnixStream::connect(&daemon.socket).unwrap();
    drop(listener);
}

/// Any user who could open the directory of the socket could lock it, and the daemon waited for that
/// lock without a word.
#[test]
fn no_other_user_can_hold_up_a_daemon() {
    if !can_mount("no_other_user_can_hold_up_a_daemon") {
        return;
    }
    let sandbox = Sandbox::new();
    let directory = std::fs::File::open(sandbox.dir("run")).unwrap();
    directory.lock().unwrap();
    let daemon = Killed::start(sandbox.command(&["serve"]).stderr(Stdio::null()));
    let socket = sandbox.path("run/cofolio.sock");
    common::machine::until("it listens", || UnixStream::connect(&socket).ok());
    drop(daemon);
    let lock = std::fs::File::open(sandbox.path("run/cofolio.sock.lock")).unwrap();
    assert_eq!(lock.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    // Another daemon that is about to listen.
    lock.lock().unwrap();
    sandbox.run(&["serve"]).fails_with(7).refused("cofolio.sock.lock");
}

/// With few descriptors the daemon panicked. With some more it said that it listens, and served
/// nobody.
#[test]
fn without_descriptors_it_does_not_start() {
    if !can_mount("without_descriptors_it_does_not_start") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let (script, program) = ("ulimit -n \"$0\" && exec \"$@\"", common::cofolio());
    let serve = |limit: u32| {
        let args = ["-c", script, &limit.to_string(), program.to_str().unwrap(), "serve"];
        sandbox.command_of(Path::new("sh"), &args)
    };
    for limit in (5..24).chain([1023]) {
        let ended = serve(limit).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && said.contains("ulimit -n"), "{limit}: {said}");
        assert!(!said.contains("panicked") && !said.contains("listening"), "{limit}: {said}");
    }
    let daemon = Killed::start(serve(1024).stderr(Stdio::null()));
    let socket = sandbox.path("run/cofolio.sock");
    let stream = common::machine::until("it listens", || UnixStream::connect(&socket).ok());
    assert_eq!(request(stream, "GET /v1/version HTTP/1.0\r\n\r\n").0, 200);
    drop(daemon);
}

/// The daemon said that it listens at an address, and then could not listen at its socket.
#[test]
fn it_says_that_it_listens_once_it_listens_everywhere() {
    if !can_mount("it_says_that_it_listens_once_it_listens_everywhere") {
        return;
    }
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.dir("run").join("cofolio.sock"), "mine").unwrap();
    let ran = sandbox.run(&["serve", "--listen", "127.0.0.1:0"]);
    ran.refused("is no socket");
    assert!(!ran.stderr.contains("listening at"), "{}", ran.stderr);
}

/// Standard error was a full pipe that nobody read. A daemon that was started so listened and never
/// answered, and one that reloaded its settings stopped to answer. SIGTERM did not end it.
#[test]
fn unread_standard_error_stops_nothing() {
    if !can_mount("unread_standard_error_stops_nothing") {
        return;
    }
    let sandbox = Sandbox::new();
    let (_reader, mut full) = std::io::pipe().unwrap();
    let size = rustix::pipe::fcntl_getpipe_size(&full).unwrap();
    full.write_all(&vec![b'\n'; size]).unwrap();
    let mut daemon = Killed::start(sandbox.command(&["serve"]).stderr(full));
    let socket = sandbox.path("run/cofolio.sock");
    let stream = common::machine::until("it listens", || UnixStream::connect(&socket).ok());
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(request(stream, "GET /v1/version HTTP/1.0\r\n\r\n").0, 200);
    let pid = Pid::from_child(&daemon.0);
    kill_process(pid, Signal::HUP).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let status = common::machine::until("it ends", || daemon.0.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

/// A reload ignored a new address without a word.
#[test]
fn a_reload_names_what_takes_a_restart() {
    if !can_mount("a_reload_names_what_takes_a_restart") {
        return;
    }
    let sandbox = Sandbox::new();
    let config = sandbox.path("config.toml");
    std::fs::write(&config, "[daemon]\n").unwrap();
    let mut daemon = Daemon::with(&sandbox, &["--config", config.to_str().unwrap()]);
    daemon.json("/v1/version");
    std::fs::write(&config, "[daemon]\nlisten = '127.0.0.1:0'\ngroup = 'root'\n").unwrap();
    let said = daemon.reload();
    assert!(said.contains("restart the daemon to apply: group, listen"), "{said}");
    assert!(daemon.next_line().contains("read again"));
    // It said where, but not why.
    std::fs::remove_file(&config).unwrap();
    std::fs::create_dir(&config).unwrap();
    let said = daemon.reload();
    assert!(said.contains("Is a directory"), "{said}");
}

/// Clients that say nothing, or half of something, take every connection that there is. Others are
/// refused, until the slow ones are given up after a time.
#[test]
fn slow_clients_are_given_up() {
    if !can_mount("slow_clients_are_given_up") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let daemon = Daemon::start(&sandbox, &[]);
    // A client that is never given up fails the test.
    let connect = || {
        let stream = UnixStream::connect(&daemon.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    };
    // More than 64, the limit of docs/API.md.
    let mut slow: Vec<UnixStream> = (0..100).map(|_| connect()).collect();
    slow.iter_mut().step_by(2).for_each(|it| _ = it.write_all(b"GET /v1/rep"));
    // It looked without the daemon: it sees less then.
    sandbox.run(&["top", "--once"]).refused("too many connections, try again later");
    for it in &mut slow[..2] {
        let ended = it.read_to_end(&mut Vec::new());
        assert!(!ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
    }
    assert_eq!(request(connect(), "GET /v1/version HTTP/1.0\r\n\r\n").0, 200);
    let long = format!("GET /{} HTTP/1.0\r\n\r\n", "x".repeat(100_000));
    let mut stream = connect();
    let _ = stream.write_all(long.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    assert_eq!(daemon.get("/v1/version").0, 200);
}

/// The daemon learned of a mount when it looked at all of them again, every ten seconds by default, and
/// missed what a container had opened until then.
#[test]
fn what_a_container_opens_as_it_starts_is_seen() {
    let test = "what_a_container_opens_as_it_starts_is_seen";
    if !can_mount(test) {
        return;
    }
    let Some(group) = cgroup(test) else { return };
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let target = sandbox.text("mnt");
    let file = format!("{target}/big");
    // A use counts from the next tick after the object was seen without pages, so it has some.
    sandbox.run(&["mount", "--create", "tree", &target]).ok();
    std::fs::read(&file).unwrap();
    sandbox.run(&["umount", &target]).ok();
    let daemon = Daemon::start(&sandbox, &["--period", "3600"]);
    daemon.sample();
    let run = "echo 0 >\"$0\" && exec 3<\"$1\" && cat <&3 >/dev/null && echo opened && read x";
    for access in [&[][..], &["--rw"]] {
        sandbox.run(&[&["mount", "--create", "tree", &target], access].concat()).ok();
        // After each answer the daemon's thread takes up what was mounted before the question: with
        // the second answer it is done.
        for _ in 0..2 {
            daemon.json("/v1/sharing?domain=default");
        }
        let mut opener = Command::new("sh");
        opener.args(["-c", run]).arg(group.procs()).arg(&file);
        let opener = Killed::ready(opener.stdin(Stdio::piped()), "opened");
        let report = daemon.sample();
        assert_eq!(report["containers"].as_array().unwrap().len(), 1, "{access:?}: {report}");
        drop(opener);
        sandbox.run(&["umount", &target]).ok();
    }
}

/// A file that was opened keeps its mount busy for as long as it waits in fanotify's queue. A
/// daemon that had used up its share of a processor left it there, and `cofolio umount` failed.
#[test]
fn a_daemon_without_time_keeps_no_mount_busy() {
    if !can_mount("a_daemon_without_time_keeps_no_mount_busy") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let config = sandbox.path("config.toml");
    std::fs::write(&config, "[daemon]\ncpu_percent = 0.01\n").unwrap();
    let daemon = Daemon::start(&sandbox, &["--config", config.to_str().unwrap()]);
    daemon.sample();
    let target = sandbox.text("mnt");
    for access in ["--ro", "--rw"] {
        let mut args = vec!["mount", "--create", "tree", &target];
        args.extend((access == "--rw").then_some(access));
        sandbox.run(&args).ok();
        daemon.sample();
        for _ in 0..50 {
            std::fs::read(Path::new(&target).join("big")).unwrap();
            Command::new("cat").arg(format!("{target}/etc/hostname")).output().unwrap();
        }
        sandbox.run(&["umount", &target]).ok();
    }
    // It did watch.
    sandbox.run(&["mount", "--create", "tree", &target]).ok();
    daemon.sample();
    std::fs::read(Path::new(&target).join("big")).unwrap();
    let report = daemon.sample();
    assert_ne!(report["images"][0]["used_bytes"], 0, "{report}");
    assert_eq!(report["unknown"]["overflows"], 0);
    sandbox.run(&["umount", &target]).ok();
}

/// A container that opened some thousand files a second took all the time that the ledger had. No look
/// at processes and objects came to its end, and `top` showed the figures of before for all containers.
#[test]
fn figures_are_taken_while_a_container_opens_files_all_the_time() {
    if !can_mount("figures_are_taken_while_a_container_opens_files_all_the_time") {
        return;
    }
    let sandbox = Sandbox::new();
    let tree = sandbox.path("many");
    std::fs::create_dir(&tree).unwrap();
    for number in 0..300 {
        std::fs::write(tree.join(number.to_string()), "x").unwrap();
    }
    sandbox.run(&["import", "--name", "many", tree.to_str().unwrap()]).ok();
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "many", &target]).ok();
    let daemon = Daemon::start(&sandbox, &["--period", "1"]);
    daemon.sample();
    // Opens of one file by one process are one event, as long as it waits in the queue.
    let opens = "while :; do for file in \"$0\"/*; do : <\"$file\"; done; done";
    let opener = || Killed::start(Command::new("sh").args(["-c", opens, &target]));
    let openers = [(); 4].map(|()| opener());
    let overflows = || daemon.json("/v1/report")["unknown"]["overflows"].as_u64();
    common::machine::until("far too many files are opened", || overflows().filter(|it| *it > 0));
    for _ in 0..3 {
        let time = || daemon.json("/v1/report")["time"].clone();
        let before = time();
        common::machine::until("new figures", || (time() != before).then_some(()));
    }
    drop(openers);
    drop(daemon);
    sandbox.run(&["umount", &target]).ok();
}

/// Imports an image. Gives the path of a list of its files, which is 4 MB.
fn large_answer(sandbox: &Sandbox) -> String {
    let tree = sandbox.path("many");
    // Few files with long paths.
    let deep = tree.join(["n".repeat(240).as_str(); 15].join("/"));
    std::fs::create_dir_all(&deep).unwrap();
    for number in 0..1000 {
        std::fs::write(deep.join(number.to_string()), "x").unwrap();
    }
    let ran = sandbox.run(&["import", "--json", "--name", "many", tree.to_str().unwrap()]);
    ran.ok();
    format!("/v1/images/default/{}/files?limit=100000", ran.json()["image"].as_str().unwrap())
}

/// Processor time of the daemon's ledger.
fn ledger_seconds(daemon: &Daemon) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.child.0.id())).unwrap();
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let mut tasks = tasks.map(|task| task.unwrap().path());
    let ledger = tasks.find(|task| read(task.join("comm")) == "ledger\n").unwrap();
    let spent = read(ledger.join("schedstat"));
    spent.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// Clients that asked for lists of files again and again used up the ledger's share of a processor:
/// it stopped to watch opened files, and counted that as an overflow. While several questions
/// waited it took no opened file out of the queue, which kept mounts busy.
#[test]
fn clients_that_ask_all_the_time_keep_the_ledger_from_nothing() {
    if !can_mount("clients_that_ask_all_the_time_keep_the_ledger_from_nothing") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    // To the ledger a short list of the same image is as much work.
    let path = large_answer(&sandbox).replace("100000", "1");
    let daemon = Daemon::start(&sandbox, &[]);
    daemon.sample();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    daemon.get(&path);
                }
            });
        }
        let target = sandbox.text("mnt");
        let mut refused = Vec::new();
        // The ledger may be in debt for one.
        while ledger_seconds(&daemon) < 2.0 && refused.is_empty() {
            sandbox.run(&["mount", "--create", "tree", &target]).ok();
            std::fs::read(Path::new(&target).join("big")).unwrap();
            let ran = sandbox.run(&["umount", &target]);
            refused.extend((ran.code != 0).then_some(ran.stderr));
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(refused, Vec::<String>::new());
    });
    assert_eq!(daemon.sample()["unknown"]["overflows"], 0);
}

/// Clients that ask for large answers and do not read them: the daemon keeps 64 MiB of these at
/// most.
#[test]
fn clients_that_do_not_read_cost_bounded_memory() {
    if !can_mount("clients_that_do_not_read_cost_bounded_memory") {
        return;
    }
    let sandbox = Sandbox::new();
    let path = large_answer(&sandbox);
    let daemon = Daemon::start(&sandbox, &[]);
    let (status, body) = daemon.get(&path);
    assert_eq!(status, 200, "{body}");
    let peak_bytes = || {
        let path = format!("/proc/{}/status", daemon.child.0.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        1024 * line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
    };
    let before = peak_bytes();
    let clients = 32;
    assert!(clients * body.len() > 110 << 20, "{} bytes are not large", body.len());
    let unread: Vec<UnixStream> = (0..clients)
        .map(|_| {
            let mut stream = UnixStream::connect(&daemon.socket).unwrap();
            stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
            stream
        })
        .collect();
    // Answered in some way, all of them.
    let is_answered = |stream: &UnixStream| {
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        rustix::net::recv(stream, &mut [0], flags).is_ok()
    };
    while !unread.iter().all(is_answered) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let grown = peak_bytes() - before;
    assert!(grown < 96 << 20, "{grown} bytes");
    assert_eq!(daemon.get("/v1/version").0, 200);
    assert_eq!(daemon.get(&path).0, 503);
    drop(unread);
    common::machine::until("there is room again", || (daemon.get(&path).0 == 200).then_some(()));
}

/// Every number of the dashboard is the API's, in a real browser. `make test` also shows it made-up
/// figures, many and hostile ones (`crates/daemon/dashboard/test/check.py`).
#[test]
fn the_dashboard_shows_what_the_api_says() {
    let test = "the_dashboard_shows_what_the_api_says";
    if !can_mount(test) {
        return;
    }
    if common::program("chromium").is_none() {
        return skip(test, "chromium is not installed");
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let two = sandbox.tree("other");
    std::fs::write(two.join("more"), vec![7; 50_000]).unwrap();
    sandbox.run(&["import", "--name", "other", two.to_str().unwrap()]).ok();
    let targets = ["one", "two"].map(|name| sandbox.text(name));
    let mut holders = Vec::new();
    for (image, target) in ["tree", "other"].iter().zip(&targets) {
        sandbox.run(&["mount", "--create", "--rw", image, target]).ok();
    }
    // The figures stay as they are while they are compared.
    let daemon = Daemon::start(&sandbox, &["--listen", "127.0.0.1:0", "--period", "3600"]);
    for target in &targets {
        let mut child = Command::new("tail");
        child.args(["-f", &format!("{target}/big")]).stdout(Stdio::null());
        holders.push(Killed::start(&mut child));
    }
    let report = daemon.sample();
    assert_eq!(report["images"].as_array().unwrap().len(), 2);
    let check = Path::new(env!("CARGO_MANIFEST_DIR")).join("../daemon/dashboard/test/live.py");
    let url = format!("http://{}", daemon.tcp.as_ref().unwrap());
    let checked = Command::new(check).arg(url).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success(), "{said}{}", String::from_utf8_lossy(&checked.stderr));
    drop(holders);
    drop(daemon);
    for target in &targets {
        sandbox.run(&["umount", target]).ok();
    }
}

/// systemd opens the socket and starts the daemon with it, so that no request is lost while the
/// daemon is started anew.
#[test]
fn a_socket_that_is_passed_is_used_and_outlives_the_daemon() {
    let test = "a_socket_that_is_passed_is_used_and_outlives_the_daemon";
    if !can_mount(test) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let socket = sandbox.path("passed.sock");
    // As systemd does it: the socket is descriptor 3 of the process that LISTEN_PID names.
    let program = "import os, socket, sys\n\
                   listener = socket.socket(socket.AF_UNIX)\n\
                   listener.bind(sys.argv[1]); listener.listen()\n\
                   for restart in range(2):\n\
                   \x20   pid = os.fork()\n\
                   \x20   if pid == 0:\n\
                   \x20       os.dup2(listener.fileno(), 3); os.set_inheritable(3, True)\n\
                   \x20       os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n\
                   \x20       os.execv(sys.argv[2], sys.argv[2:])\n\
                   \x20   print(pid, flush=True)\n\
                   \x20   assert os.waitpid(pid, 0)[1] == 0\n\
                   listener.close(); os.unlink(sys.argv[1])\n";
    let command = sandbox.command(&["serve"]);
    let serve = command.get_program().to_owned();
    let mut starter = Command::new("python3");
    starter.args(["-c", program]).arg(&socket).arg(serve).args(["serve", "--group", "65533"]);
    let said = sandbox.path("said");
    let log = std::fs::File::create(&said).unwrap();
    command.get_envs().for_each(|(name, value)| {
        value.map(|value| starter.env(name, value));
    });
    let mut starter = starter.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
    let mut pids = BufReader::new(starter.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let pid = pids.next().unwrap().unwrap();
        // Whoever connects before the daemon is ready waits in the socket's queue.
        let stream = UnixStream::connect(&socket).unwrap();
        let (status, body) = request(stream, "GET /v1/version HTTP/1.0\r\n\r\n");
        assert_eq!(status, 200, "{body}");
        assert!(socket.exists());
        Command::new("kill").arg(pid).status().unwrap();
    }
    assert!(starter.wait().unwrap().success());
    // It says which of its options have no effect on passed sockets.
    let said = std::fs::read_to_string(said).unwrap();
    for ignored in ["not listening at", "run/cofolio.sock", "group 65533 is ignored"] {
        assert!(said.contains(ignored), "{ignored}: {said}");
    }
}

/// The configuration is read again at SIGHUP; one that is wrong changes nothing.
#[test]
fn a_reload_takes_settings_and_keeps_them_when_they_are_wrong() {
    if !can_mount("a_reload_takes_settings_and_keeps_them_when_they_are_wrong") {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    let config = sandbox.path("config.toml");
    std::fs::write(&config, "[daemon]\nperiod = 3600\n").unwrap();
    let mut daemon = Daemon::with(&sandbox, &["--config", config.to_str().unwrap()]);
    daemon.json("/v1/version");
    std::fs::write(&config, "[daemon]\nperiod = 'x'\n").unwrap();
    let why = daemon.reload();
    assert!(why.contains("stay as they are") && why.contains("config.toml:2"), "{why}");
    // A file that is missing is no reason to forget what it said.
    std::fs::remove_file(&config).unwrap();
    let why = daemon.reload();
    assert!(why.contains("stay as they are") && why.contains("no file"), "{why}");
    std::fs::write(&config, "[daemon]\nperiod = 1\n").unwrap();
    assert!(daemon.reload().contains("read again"));
    // A report a second from now on, and no longer one an hour. Nobody asks for a sample, which
    // would begin a new period.
    let time = |value: Value| value["time"].as_i64().unwrap();
    let first = time(daemon.json("/v1/report"));
    while time(daemon.json("/v1/report")) <= first {
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The filesystem of a store was not mounted, and the daemon made an empty one in the directory below it
/// without a word.
#[test]
fn a_new_store_is_announced() {
    if !can_mount("a_new_store_is_announced") {
        return;
    }
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("store")).unwrap();
    let first_line = || {
        let mut daemon = Killed::start(sandbox.command(&["serve"]).stderr(Stdio::piped()));
        BufReader::new(daemon.0.stderr.take().unwrap()).lines().next().unwrap().unwrap()
    };
    let said = first_line();
    assert!(said.contains("made an empty store at") && said.contains("/store"), "{said}");
    assert!(first_line().contains("listening at"));
}

/// Directives that give a service its own mount namespace would hide its mounts from the machine.
#[test]
fn the_service_shares_the_mounts_of_the_machine() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd/cofolio.service");
    let unit = std::fs::read_to_string(path).unwrap();
    let directives = unit.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<_> = directives.filter_map(|line| Some(line.split_once('=')?.0)).collect();
    // systemd.exec(5), "Sandboxing" and "Paths": those that imply a mount namespace.
    for prefix in [
        "Protect",
        "Private",
        "ReadOnly",
        "ReadWrite",
        "Inaccessible",
        "ExecPaths",
        "NoExec",
        "Root",
        "Mount",
        "Bind",
        "Temporary",
        "Dynamic",
        "RestrictNamespaces",
        "ProcSubset",
        "RuntimeDirectory",
        "StateDirectory",
        "ExtensionImages",
        "ExtensionDirectories",
    ] {
        assert!(names.iter().all(|name| !name.starts_with(prefix)), "{prefix}: {names:?}");
    }
}

/// An image is read ahead, charged to a cgroup of its own.
#[test]
fn warm_reads_an_image_ahead() {
    let test = "warm_reads_an_image_ahead";
    if !can_mount(test) {
        return;
    }
    let hierarchies = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(PathBuf::from);
    let commons = hierarchies.map(|top| top.join("cofolio-commons"));
    let was_there = commons.iter().any(|commons| commons.exists());
    let sandbox = Sandbox::new();
    let image = sandbox.import_tree("tree");
    sandbox.run(&["warm", "nothing"]).fails_with(3);
    // The import has left the files in the cache.
    let objects = ["/etc/hostname", "/etc/passwd", "/big"].map(|it| sandbox.object(&image, it));
    rustix::fs::sync();
    objects.iter().for_each(|it| cache::forget(it));
    let resident = || objects.iter().map(|it| cache::resident(it)).sum::<u64>();
    assert_eq!(resident(), 0);
    let ran = sandbox.run(&["warm", "--json", "tree"]);
    if ran.stderr.contains("no memory cgroup") {
        return skip(test, ran.stderr.trim());
    }
    ran.ok();
    let warmed = &ran.json()[0];
    assert_eq!((&warmed["objects"], &warmed["objects_read"]), (&3.into(), &3.into()), "{warmed}");
    assert_eq!(warmed["resident_before_bytes"], 0, "{warmed}");
    let bytes = warmed["bytes"].as_u64().unwrap();
    assert!(bytes > 100_045 && bytes.is_multiple_of(4096), "{warmed}");
    assert_eq!(warmed["resident_bytes"], warmed["bytes"]);
    common::machine::until("all pages are read", || {
        (resident() * cofolio_sys::cache::page_size() == bytes).then_some(())
    });
    // Unless this machine has commons of its own.
    if !was_there {
        commons.iter().for_each(|commons| _ = std::fs::remove_dir(commons));
    }
}

/// A daemon with so many connections that it could not even refuse one more closed it. The client
/// looked without the daemon, and saw less.
#[test]
fn a_daemon_that_closes_the_connection_is_not_passed_over() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    std::fs::create_dir_all(sandbox.path("run")).unwrap();
    let listener = UnixListener::bind(sandbox.path("run/cofolio.sock")).unwrap();
    let server = std::thread::spawn(move || drop(listener.accept().unwrap()));
    sandbox.run(&["top", "--once"]).refused("closed the connection without an answer");
    server.join().unwrap();
}

/// A FUSE server above a mount did not answer, and a daemon that was started then waited for it in
/// the kernel: it served figures of the time 0, and SIGTERM did not end it.
#[test]
fn a_silent_server_above_a_mount_does_not_hold_up_the_daemon() {
    let test = "a_silent_server_above_a_mount_does_not_hold_up_the_daemon";
    if !can_mount(test) {
        return;
    }
    if !Path::new("/dev/fuse").exists() {
        return skip(test, "there is no /dev/fuse");
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let target = sandbox.dir("above/mnt");
    sandbox.run(&["mount", "--rw", "box:1", target.to_str().unwrap()]).ok();
    // It ends after a minute, so that a daemon that waits for it goes on.
    let script = "exec 7<>/dev/fuse
        mount -i -t fuse -o fd=7,rootmode=40000,user_id=0,group_id=0 silent \"$1\" && echo mounted
        exec sleep 60";
    let mut server = Command::new("sh");
    server.args(["-c", script, "sh", &sandbox.text("above")]);
    let mut server = Killed::ready(&mut server, "mounted");
    let mut daemon = Daemon::start(&sandbox, &[]);
    let sample = daemon.sample();
    assert!(sample["time"].as_i64() > Some(0), "{sample}");
    assert_eq!(sample["unknown"]["mounts"], 1, "{sample}");
    let daemon_id = Pid::from_child(&daemon.child.0);
    kill_process(daemon_id, Signal::TERM).unwrap();
    assert!(daemon.child.0.wait().unwrap().success());
    assert!(server.0.try_wait().unwrap().is_none(), "the daemon waited for the server");
}
