//! `cofolio vm console`: the console of a detached guest.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use rustix::termios::{Winsize, tcsetwinsize};

use super::common::terminal::Session;
use super::common::{Killed, run_with_input};
use super::host;

#[test]
fn a_console_is_attached_and_left() {
    let Some(host) = host("a_console_is_attached_and_left") else { return };
    let script = "trap 'echo now $(stty size)' WINCH; echo ready
        while :; do read line || continue; echo \"got $line\"; [ \"$line\" != end ] || exit 4
        [ \"$line\" != size ] || stty size
        [ \"$line\" != many ] || seq 1 300000; done";
    host.sh(&["--detach", "--interactive", "--name", "one"], script).ok();
    let console = ["vm", "console", "one"];
    let mut session = Session::start(&host, &console);
    session.sees("ready");
    session.press("first\r");
    session.sees("got first");
    // The console has the size of whoever's terminal is attached.
    session.press("size\r");
    session.sees("24 80");
    let size = Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&session.slave, size).unwrap();
    session.sees("now 30 100");
    host.run(&console).fails_with(7).refused("another `cofolio vm console`");
    session.press("\u{10}\u{11}");
    assert_eq!(session.ends(), Some(0));
    assert_eq!(host.guests()[0]["state"], "running");

    // What was said before is there again.
    let mut command = host.command(&console);
    let mut attached = Killed::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut lines = BufReader::new(attached.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("got first")));
    let mut input = attached.0.stdin.take().unwrap();
    input.write_all(b"second\n").unwrap();
    // The end of the input is none of the guest's.
    drop(input);
    assert!(lines.any(|line| line.unwrap().contains("got second")));
    drop(attached);
    let ran = run_with_input(host.command(&console), b"end\n");
    ran.fails_with(4);
    assert!(ran.stdout.ends_with("got end\r\n"), "{:?}", ran.stdout);
    // Of one that has ended all that is kept is shown.
    let kept = host.run(&console);
    kept.fails_with(4);
    assert_eq!(kept.stdout, ran.stdout);
    host.run(&["vm", "stop", "one"]).ok();
    host.run(&console).fails_with(3);
    host.assert_clean();
}
