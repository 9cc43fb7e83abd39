//! Processes of the image: its program, and those that `vm exec` starts.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use cofolio_guest::accounts::{find_user, home_of};
use cofolio_guest::{Process, Start};
use rustix::fs::{Access, FileType, Gid, Uid, access, fchown, fstat};
use rustix::process::{Pid, ioctl_tiocsctty, setsid};
use rustix::termios::{
    LocalModes, OptionalActions, OutputModes, Winsize, isatty, tcgetattr, tcsetattr, tcsetwinsize,
};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// The name under which the first process starts itself to become the program.
pub(crate) const NAME: &str = "cofolio-workload";
/// Variable with the [`Process`], as JSON.
const PROCESS: &str = "COFOLIO_PROCESS";

/// Bytes of an account file that are read.
const ACCOUNT_FILE_BYTES_MAX: u64 = 16 << 20;

/// A shell's status for a program that cannot be executed, and for a missing one.
const NOT_EXECUTABLE: u8 = 126;
const NO_PROGRAM: u8 = 127;

/// Starts the program; its process.
pub(crate) fn start(start: &Start) -> io::Result<Pid> {
    let console = open_console(&start.console)?;
    set_up_terminal(&console, start.process.terminal)?;
    let mut command = command(&start.process)?;
    command.stdin(match start.process.terminal {
        Some(_) => Stdio::from(console.try_clone()?),
        None => Stdio::null(),
    });
    command.stdout(console.try_clone()?).stderr(console);
    let child = command.spawn()?;
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::Other.into())
}

/// The console by its name.
pub(crate) fn open_console(name: &str) -> io::Result<File> {
    File::options().read(true).write(true).open(Path::new("/dev").join(name))
}

/// Gives a terminal its size, of which the kernel tells its programs.
pub(crate) fn resize(terminal: impl AsFd, ws_row: u16, ws_col: u16) -> rustix::io::Result<()> {
    tcsetwinsize(terminal, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 })
}

/// This program again, which becomes a process of the image.
pub(crate) fn command(process: &Process) -> io::Result<Command> {
    // Its own file is gone from the initramfs.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).env_clear().env(PROCESS, serde_json::to_string(process)?);
    Ok(command)
}

/// Without input the console is a log: nothing is echoed, and lines end as the program ends them.
fn set_up_terminal(console: &File, size: Option<(u16, u16)>) -> io::Result<()> {
    match size {
        Some((rows, columns)) => resize(console, rows, columns)?,
        None => {
            let mut modes = tcgetattr(console)?;
            modes.local_modes.remove(LocalModes::ECHO);
            modes.output_modes.remove(OutputModes::OPOST);
            tcsetattr(console, OptionalActions::Now, &modes)?;
        }
    }
    Ok(())
}

/// Becomes the program of the image. Returns a shell's status if it cannot.
pub(crate) fn become_it() -> ExitCode {
    let process = std::env::var(PROCESS).unwrap_or_default();
    let error = match serde_json::from_str(&process) {
        Ok(process) => become_process(&process),
        Err(error) => error.into(),
    };
    let _ = writeln!(io::stderr(), "cofolio-guest: {error}");
    ExitCode::from(match error.kind() {
        io::ErrorKind::NotFound => NO_PROGRAM,
        _ => NOT_EXECUTABLE,
    })
}

fn become_process(process: &Process) -> io::Error {
    let prepare = || -> io::Result<Command> {
        setsid()?;
        if process.terminal.is_some() {
            ioctl_tiocsctty(io::stdin())?;
        }
        // As Docker does it: a working directory that is missing is made.
        if fs::metadata(&process.cwd).is_err() {
            let _ = fs::create_dir_all(&process.cwd);
        }
        let named = |error| io::Error::other(format!("{}: {error}", process.cwd));
        std::env::set_current_dir(&process.cwd).map_err(named)?;
        let (program, args) = process.command.split_first().ok_or(io::ErrorKind::NotFound)?;
        let (passwd, groups) = (account_file("/etc/passwd"), account_file("/etc/group"));
        let user = find_user(&passwd, &groups, &process.user).map_err(io::Error::other)?;
        let groups: Vec<_> = user.additional_gids.into_iter().map(Gid::from_raw).collect();
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        // As runc does it: programs open `/dev/stdout` and their terminal by name.
        for fd in [io::stdin().as_fd(), io::stdout().as_fd(), io::stderr().as_fd()] {
            let kind = FileType::from_raw_mode(fstat(fd)?.st_mode);
            if kind == FileType::Fifo || isatty(fd) {
                fchown(fd, Some(uid), None)?;
            }
        }
        set_thread_groups(&groups)?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        // What its user may execute.
        let mut command = Command::new(find_program(program, &process.env)?);
        command.arg0(program).args(args).env_clear();
        command.env("HOME", home_of(&passwd, user.uid).unwrap_or("/"));
        command.envs(process.env.iter().filter_map(|entry| entry.split_once('=')));
        Ok(command)
    };
    match prepare() {
        Ok(mut command) => {
            let error = command.exec();
            let name = process.command.first().map(String::as_str).unwrap_or_default();
            io::Error::new(error.kind(), format!("{name}: {error}"))
        }
        Err(error) => error,
    }
}

/// A program by its path, or its name in the `PATH` that it gets: the first that can be executed,
/// as with execvp(3).
fn find_program(program: &str, env: &[String]) -> io::Result<PathBuf> {
    if program.contains('/') {
        return Ok(program.into());
    }
    let path = env.iter().rev().find_map(|entry| entry.strip_prefix("PATH=")).unwrap_or_default();
    let files = path.split(':').map(|dir| Path::new(dir).join(program)).filter(|it| it.is_file());
    let files: Vec<_> = files.collect();
    let executable = files.iter().find(|path| access(*path, Access::EXEC_OK).is_ok());
    let missing = || io::Error::new(io::ErrorKind::NotFound, format!("no `{program}` in {path}"));
    // Executing another one fails, and says why.
    executable.or(files.first()).cloned().ok_or_else(missing)
}

/// An account file of the image; empty if there is none.
fn account_file(path: &str) -> String {
    let mut text = Vec::new();
    let file = File::open(path).map(|file| file.take(ACCOUNT_FILE_BYTES_MAX));
    let _ = file.and_then(|mut file| file.read_to_end(&mut text));
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// The search ended at a file of that name that nobody can execute.
    #[test]
    fn a_file_that_cannot_be_executed_does_not_end_the_search() {
        let top = tempfile::tempdir().unwrap();
        let place = |dir: &str, mode| {
            let path = top.path().join(dir).join("program");
            fs::create_dir(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let (text, program) = (place("a", 0o644), place("b", 0o755));
        place("c", 0o755);
        let path = |dirs: &[&str]| {
            let dirs = dirs.iter().map(|dir| top.path().join(dir).to_str().unwrap().to_owned());
            vec![format!("PATH={}", dirs.collect::<Vec<_>>().join(":"))]
        };
        let find = |dirs: &[&str]| find_program("program", &path(dirs));
        assert_eq!(find(&["none", "a", "b", "c"]).unwrap(), program);
        // A shell's status for it is 126, and not that of a missing one.
        assert_eq!(find(&["a"]).unwrap(), text);
        assert_eq!(find(&["none"]).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
