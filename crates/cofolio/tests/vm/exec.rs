//! `cofolio vm exec`: processes beside a guest's program.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};

use cofolio_guest::EXEC_PORT;
use cofolio_guest::frame::Frame;
use cofolio_node::vm::qmp::Qmp;
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::json;

use super::common::machine::until;
use super::common::terminal::Session;
use super::common::{Killed, Ran, run_with_input};
use super::{Host, host};

/// `cofolio vm exec [options] one -- busybox sh -c script`
fn args<'a>(options: &[&'a str], script: &'a str) -> Vec<&'a str> {
    [&["vm", "exec"], options, &["one", "--", "busybox", "sh", "-c", script]].concat()
}

fn sh(host: &Host, script: &str) -> Ran {
    host.run(&args(&[], script))
}

/// One that waits for input; its first line was read.
fn begin(host: &Host, script: &str) -> (Killed, String) {
    let mut command = host.command(&args(&["-i"], script));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = Killed::start(&mut command);
    let mut line = String::new();
    BufReader::with_capacity(1, child.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().to_owned())
}

fn rest(child: &mut Child) -> (String, Option<i32>) {
    drop(child.stdin.take());
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    (said, child.wait().unwrap().code())
}

/// Guests are slow to boot, so these share one.
#[test]
fn processes_run_beside_the_program() {
    let Some(host) = host("processes_run_beside_the_program") else { return };
    let options = ["--detach", "--name", "one", "--env", "SHAPE=round"];
    host.sh(&options, "while :; do sleep 1000; done").ok();
    streams_status_and_options(&host);
    data_in_both_directions(&host);
    two_at_once(&host);
    a_client_that_goes(&host);
    signals(&host);
    a_terminal(&host);
    nonsense(&host);
    // No port is left, but the console's and the channel.
    assert_eq!(sh(&host, "ls /sys/class/virtio-ports").ok().lines().count(), 3);
    // No process is left, but the program's own.
    let left = sh(&host, "ps -o args | grep -c '^sleep\\|^yes\\|^cat'");
    assert_eq!(left.ok(), "1\n", "{}", sh(&host, "ps").stdout);
    host.run(&["vm", "stop", "--time", "0", "one"]).ok();
    sh(&host, "").fails_with(3).refused("no virtual machine `one`");
    host.assert_clean();
}

fn streams_status_and_options(host: &Host) {
    let ran = sh(host, "echo out; echo err >&2; id -u; pwd; echo $COLOR $SHAPE; cat; exit 7");
    ran.fails_with(7);
    assert_eq!(ran.stdout, "out\n0\n/\nblue round\n");
    assert_eq!(ran.stderr, "err\n");
    let options = ["-u", "worker", "-w", "/new", "-e", "COLOR=red", "-e", "PATH=/no:/bin"];
    // Its user can open what it has, too.
    let script = "echo to stderr >/dev/stderr; id -u; id -g; pwd; echo $COLOR $SHAPE $HOME";
    let ran = host.run(&args(&options, script));
    assert_eq!(ran.ok(), "1001\n1002\n/new\nred round /srv\n");
    assert_eq!(ran.stderr, "to stderr\n");

    let run = |args: &[&str]| host.run(&[&["vm", "exec"], args].concat());
    run(&["one", "nothing"]).fails_with(127).refused("no `nothing` in /bin");
    run(&["one", "/bin/text"]).fails_with(126);
    run(&["-u", "nobody", "one", "busybox"]).fails_with(126).refused("user `nobody`");
    run(&["-t", "one", "busybox"]).fails_with(2);
    run(&["two", "busybox"]).fails_with(3);
    sh(host, "kill -9 $$").fails_with(137);
    // What it leaves in the background has its output.
    sh(host, "sleep 1000 & echo $! >/background").ok();
    sh(host, "kill $(cat /background)").ok();
}

fn data_in_both_directions(host: &Host) {
    let mut state = 1_u32;
    let data: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_le_bytes()[3]
    })
    .take(5 << 20)
    .collect();
    let ran = run_with_input(host.command(&args(&["-i"], "cat; echo all >&2")), &data);
    ran.ok();
    assert!(ran.bytes == data, "{} bytes came back", ran.bytes.len());
    assert_eq!(ran.stderr, "all\n");
    // It ends without having read.
    run_with_input(host.command(&args(&["-i"], "exit 4")), &data).fails_with(4);
}

fn two_at_once(host: &Host) {
    let (mut first, ready) = begin(host, "echo ready; cat");
    assert_eq!(ready, "ready");
    assert_eq!(sh(host, "echo second").ok(), "second\n");
    first.0.stdin.as_mut().unwrap().write_all(b"first\n").unwrap();
    assert_eq!(rest(&mut first.0), ("first\n".to_owned(), Some(0)));
}

/// It goes in the middle of output that nobody reads, and of input.
fn a_client_that_goes(host: &Host) {
    let scripts = ["echo $$; exec sleep 1000", "echo $$; exec yes", "echo $$; read x; exec cat"];
    for script in scripts {
        let (mut client, process) = begin(host, script);
        let mut stdin = client.0.stdin.take().unwrap();
        let feeder = std::thread::spawn(move || {
            let block = [b'x'; 4096];
            while stdin.write_all(&block).is_ok() {}
        });
        std::thread::sleep(std::time::Duration::from_millis(200));
        drop(client);
        feeder.join().unwrap();
        let look = format!("! kill -0 {process} 2>/dev/null");
        until("its process is killed", || (sh(host, &look).code == 0).then_some(()));
    }
}

fn signals(host: &Host) {
    // Input that is not read does not hold them up.
    let script = "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 1; done";
    let (mut client, _) = begin(host, script);
    let mut stdin = client.0.stdin.take().unwrap();
    let feeder = std::thread::spawn(move || {
        let _ = stdin.write_all(&[b'x'; 1 << 20]);
    });
    std::thread::sleep(std::time::Duration::from_millis(200));
    kill_process(Pid::from_child(&client.0), Signal::TERM).unwrap();
    assert_eq!(rest(&mut client.0), ("bye\n".to_owned(), Some(5)));
    feeder.join().unwrap();
    // One that stays is given up.
    let (mut client, process) = begin(host, "trap '' INT; echo $$; while :; do sleep 1000; done");
    let pid = Pid::from_child(&client.0);
    until("it is given up", || {
        let _ = kill_process(pid, Signal::INT);
        client.0.try_wait().unwrap().map(|status| assert_eq!(status.code(), Some(1)))
    });
    let look = format!("! kill -0 {process} 2>/dev/null");
    until("its process is killed", || (sh(host, &look).code == 0).then_some(()));
}

fn a_terminal(host: &Host) {
    let script = "tty; stty size; trap 'stty size' WINCH; trap 'echo interrupted; exit 6' INT
        echo $TERM ready >&2; until read line; do :; done; echo \"got $line\"
        while :; do sleep 1; done";
    // A shell that is interrupted just before it starts a program waits for its end first.
    let mut session = Session::start(host, &args(&["-t", "-u", "worker"], script));
    session.sees("xterm ready");
    assert!(session.seen.contains("/dev/pts/0\r\n24 80\r\n"), "{:?}", session.seen);
    let size = Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&session.slave, size).unwrap();
    session.sees("30 100");
    session.press("word\r");
    session.sees("got word");
    session.press("\u{3}");
    session.sees("interrupted");
    assert_eq!(session.ends(), Some(6));
}

/// Whoever is root on the host can say anything to a guest. It must go on.
fn nonsense(host: &Host) {
    let guest = &host.guests()[0];
    let dir = Path::new(guest["qmp"].as_str().unwrap()).parent().unwrap().to_owned();
    let input = Frame::Input(vec![0; 60 << 10]).encode().unwrap();
    let start = Frame::Start(cofolio_guest::Exec {
        command: vec!["busybox".to_owned(), "sleep".to_owned(), "1000".to_owned()],
        ..Default::default()
    });
    let start = start.encode().unwrap();
    let talks: [&[&[u8]]; 6] = [
        &[b"GET / HTTP/1.1\r\n\r\n"],
        &[&[0xff; 100_000]],
        &[&input],
        // Half a frame, and a session that is begun twice.
        &[&start[..20]],
        &[&start, &start, &input[..20]],
        // More input than a guest has to keep.
        &[&start, &input, &input],
    ];
    for (number, talk) in talks.iter().enumerate() {
        let held = File::open(&dir).unwrap();
        let socket = format!("/proc/self/fd/{}/exec", held.as_raw_fd());
        let mut qmp = Qmp::new(UnixStream::connect(socket).unwrap()).unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let id = format!("{EXEC_PORT}nonsense{number}");
        qmp.pass(&id, theirs.as_fd()).unwrap();
        let address = json!({"type": "fd", "data": {"str": id}});
        let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
        qmp.call("chardev-add", json!({"id": id, "backend": backend})).unwrap();
        let device = json!({"driver": "virtserialport", "id": id, "chardev": id, "name": id});
        qmp.call("device_add", device).unwrap();
        drop(qmp);
        ours.set_nonblocking(true).unwrap();
        talk.iter().for_each(|part| _ = ours.write(part));
        if number % 2 == 0 {
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        drop(ours);
        assert_eq!(sh(host, "echo well").ok(), "well\n", "after {number}");
    }
}
