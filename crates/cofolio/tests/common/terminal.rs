//! The program on a pseudo-terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use super::{Killed, Sandbox, cofolio};

/// Against hanging only.
const WATCHDOG: Duration = Duration::from_secs(60);

/// The program on a pseudo-terminal of its own.
pub(crate) struct Session {
    pub(crate) child: Killed,
    /// Where it reads keys, and where we write them.
    pub(crate) master: File,
    pub(crate) slave: OwnedFd,
    output: Receiver<Vec<u8>>,
    pub(crate) seen: String,
}

impl Session {
    /// The program, and both ends of its terminal.
    pub(crate) fn open(sandbox: &Sandbox, args: &[&str]) -> (Killed, File, OwnedFd) {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = File::options().read(true).write(true).open(name).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&slave, size).unwrap();
        // Its controlling terminal is this one, and not the one that the tests run on.
        let mut command = sandbox.command_of(Path::new("setsid"), &["--ctty"]);
        command.arg(cofolio()).args(args).env("TERM", "xterm");
        command.stdin(slave.try_clone().unwrap());
        command.stdout(slave.try_clone().unwrap()).stderr(slave.try_clone().unwrap());
        (Killed::start(&mut command), master.into(), slave.into())
    }

    pub(crate) fn start(sandbox: &Sandbox, args: &[&str]) -> Self {
        let (child, master, slave) = Self::open(sandbox, args);
        let (sender, output) = mpsc::channel();
        let mut reader = master.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, master, slave, output, seen: String::new() }
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.seen.clear();
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this text has been drawn since the last keys.
    #[track_caller]
    pub(crate) fn sees(&mut self, text: &str) {
        let began = Instant::now();
        while !self.seen.contains(text) {
            assert!(began.elapsed() < WATCHDOG, "no {text:?} in {:?}", self.seen);
            if let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(100)) {
                self.seen.push_str(&String::from_utf8_lossy(&bytes));
            }
        }
    }

    /// Presses the keys again and again until this text has been drawn.
    #[track_caller]
    pub(crate) fn press_until(&mut self, keys: &str, text: &str) {
        let began = Instant::now();
        self.seen.clear();
        while !self.seen.contains(text) {
            assert!(began.elapsed() < WATCHDOG, "no {text:?} in {:?}", self.seen);
            self.master.write_all(keys.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            let drawn = self.output.try_iter().flatten().collect::<Vec<u8>>();
            self.seen.push_str(&String::from_utf8_lossy(&drawn));
        }
    }

    /// Waits for its end, which gives the terminal back as it was; the exit code.
    #[track_caller]
    pub(crate) fn ends(&mut self) -> Option<i32> {
        let began = Instant::now();
        let status = loop {
            match self.child.0.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(began.elapsed() < WATCHDOG, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
        status.code()
    }
}
