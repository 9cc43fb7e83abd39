//! Standard input, output and error, terminals and every other descriptor.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::machine::{machine, until};
use crate::common::{Ran, program, run_with_input, skip};

/// `run --detach --output FIFO` waited until somebody read from it.
#[test]
fn a_fifo_for_output_is_not_waited_for() {
    let Some((machine, runtimes)) = machine("a_fifo_for_output_is_not_waited_for") else { return };
    let fifo = machine.text("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let ran = machine.sh(runtimes[0], &["-d", "--output", &fifo], "true");
    assert!(ran.fails_with(125).stderr.contains(&fifo), "{}", ran.stderr);
    machine.assert_clean();
}

#[test]
fn a_terminal_is_one() {
    const TEST: &str = "a_terminal_is_one";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let Some(script) = program("script") else { return skip(TEST, "script(1) is not installed") };
    for runtime in runtimes {
        let inside =
            "test -t 0 && test -t 1 && tty && read word && echo \"<$word>\"; sleep 0.3; exit 3";
        let command = machine.sh_args(runtime, &["-it"], inside);
        let quoted: Vec<String> =
            command.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
        let line = format!("{} {}", env!("CARGO_BIN_EXE_cofolio"), quoted.join(" "));
        let mut outer = Command::new(&script);
        outer.args(["-qec", &line, "/dev/null"]);
        outer.env("COFOLIO_STORE", machine.path("store")).env("COFOLIO_RUN", machine.path("run"));
        let ran = run_with_input(outer, b"typed\n");
        ran.fails_with(3);
        assert!(ran.stdout.contains("/dev/pts/0"), "{runtime}: {}", ran.stdout);
        assert!(ran.stdout.contains("<typed>"), "{runtime}: {}", ran.stdout);
        machine.assert_clean();
    }
}

/// With crun the terminal of `run -it` had no rows and no columns, so editors and pagers drew nothing.
#[test]
fn a_terminal_has_the_size_of_the_callers() {
    const TEST: &str = "a_terminal_has_the_size_of_the_callers";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let Some(script) = program("script") else { return skip(TEST, "script(1) is not installed") };
    let with_terminal = |size: &str, command: &[&str]| {
        let quoted: Vec<String> =
            command.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
        let cofolio = env!("CARGO_BIN_EXE_cofolio");
        let line = format!("stty {size}; {cofolio} {}", quoted.join(" "));
        let mut outer = Command::new(&script);
        outer.args(["-qec", &line, "/dev/null"]);
        outer.env("COFOLIO_STORE", machine.path("store")).env("COFOLIO_RUN", machine.path("run"));
        run_with_input(outer, b"")
    };
    for runtime in runtimes {
        // crun 1.8.1 loses what comes through a terminal right before the container's end.
        let inside = "/bin/busybox stty size; sleep 0.3";
        let ran = with_terminal("rows 30 cols 110", &machine.sh_args(runtime, &["-it"], inside));
        assert!(ran.ok().contains("30 110"), "{runtime}: {}", ran.stdout);
        machine.assert_clean();
    }
}

/// crun changes the owner of its standard input, output and error to the container's user. These were the host's own
/// files: `run --userns 0:100000:65536 IMG` left the host's /dev/null to user 100000, `run -i --user worker IMG
/// </etc/passwd` would have left that to the worker, and inside root could change their modes.
#[test]
fn a_container_gets_no_file_of_the_host() {
    let Some((machine, runtimes)) = machine("a_container_gets_no_file_of_the_host") else { return };
    // Its root has to get through here.
    fs::set_permissions(machine.path("."), fs::Permissions::from_mode(0o711)).unwrap();
    let path = machine.path("file");
    fs::write(&path, "given\n").unwrap();
    // A node as /dev/null, so that the host's stays out of this; where it may be made.
    let node = machine.path("null");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let device = rustix::fs::makedev(1, 3);
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, device).unwrap();
    let open = |path: &Path| fs::File::options().read(true).append(true).open(path);
    let state = |path: &Path| {
        let meta = fs::metadata(path).unwrap();
        (meta.uid(), meta.gid(), meta.mode())
    };
    let before = [state(&path), state(&node), state(Path::new("/dev/null"))];
    let script = "chmod 777 /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2; cat; ls -l /proc/self/fd >&2; :";
    for runtime in runtimes {
        for options in [
            &["--user", "worker"][..],
            &["--userns", "0:100000:65536"],
            &["--userns", "0:100000:65536", "-i"],
            &["--user", "worker", "-i"],
            &["-i"],
        ] {
            for at in [&path, &node] {
                let mut command = machine.command(&machine.sh_args(runtime, options, script));
                let Ok(file) = open(at) else {
                    // Its filesystem has no devices.
                    continue;
                };
                let give = || Stdio::from(file.try_clone().unwrap());
                let status = command.stdin(give()).stdout(give()).stderr(give()).status().unwrap();
                assert!(status.success(), "{runtime} {options:?}");
                let after = [state(&path), state(&node), state(Path::new("/dev/null"))];
                assert_eq!(after, before, "{runtime} {options:?} {}", at.display());
            }
            // What was written has come through, and only pipes were there.
            let written = fs::read_to_string(&path).unwrap();
            let listed: Vec<&str> = written.lines().filter(|line| line.contains(" -> ")).collect();
            assert!(listed.len() >= 3, "{written}");
            assert!(listed[..3].iter().all(|line| line.contains(" -> pipe:[")), "{written}");
            fs::write(&path, "given\n").unwrap();
        }
        machine.assert_clean();
    }
}

/// The container got the caller's own pipes and sockets: through /proc/self/fd it read what other programs had
/// written to them, and crun gave them to its user.
#[test]
fn a_container_gets_no_pipe_or_socket_of_the_host() {
    const TEST: &str = "a_container_gets_no_pipe_or_socket_of_the_host";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    let inode = |fd: &std::os::fd::OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    for runtime in runtimes {
        let (stdin, mut given) = std::io::pipe().unwrap();
        let (mut said, stdout) = std::io::pipe().unwrap();
        let (_others, stderr) = std::os::unix::net::UnixStream::pair().unwrap();
        given.write_all(b"given\n").unwrap();
        drop(given);
        let own: [std::os::fd::OwnedFd; 3] = [stdin.into(), stdout.into(), stderr.into()];
        let give = |fd: &std::os::fd::OwnedFd| Stdio::from(fd.try_clone().unwrap());
        let args =
            machine.sh_args(runtime, &["-i", "--user", "worker"], "cat; ls -l /proc/self/fd");
        let mut command = machine.command(&args);
        command.stdin(give(&own[0])).stdout(give(&own[1])).stderr(give(&own[2]));
        assert!(command.status().unwrap().success(), "{runtime}");
        assert!(own.iter().all(|fd| rustix::fs::fstat(fd).unwrap().st_uid == 0), "{runtime}");
        let inodes = own.each_ref().map(|fd| format!("[{}]", inode(fd)));
        drop((command, own));
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("given\n") && text.matches(" -> pipe:[").count() >= 3, "{text}");
        assert!(inodes.iter().all(|inode| !text.contains(inode)), "{inodes:?} {text}");
        machine.assert_clean();
    }
}

/// `cofolio run … | head -1`: when nobody reads any more, the container's next write fails, which is no
/// error of `cofolio run`.
#[test]
fn output_that_nobody_reads_ends_a_container() {
    const TEST: &str = "output_that_nobody_reads_ends_a_container";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        let script = "while echo line 2>/dev/null; do :; done; exit 0";
        let mut command = machine.command(&machine.sh_args(runtime, &[], script));
        let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        run.stdout.take().unwrap().read_exact(&mut [0; 5]).unwrap();
        let ran = Ran::of(run.wait_with_output().unwrap());
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{runtime}");
        machine.assert_clean();
    }
}

/// What a container said was lost where the disk was full, and the exit code was 0. Of one that failed
/// nothing was said of it.
#[test]
fn output_that_cannot_be_written_is_an_error() {
    const TEST: &str = "output_that_cannot_be_written_is_an_error";
    let Some((machine, runtimes)) = machine(TEST) else { return };
    for runtime in runtimes {
        for (script, code) in [("echo said", 125), ("echo said; exit 3", 3)] {
            let mut command = machine.command(&machine.sh_args(runtime, &[], script));
            let full = fs::File::options().write(true).open("/dev/full").unwrap();
            let ran = command.stdout(full).output().unwrap();
            assert_eq!(ran.status.code(), Some(code));
            let said = String::from_utf8(ran.stderr).unwrap();
            assert!(said.contains("output") && said.contains("No space left"), "{said}");
        }
        machine.assert_clean();
    }
}

/// A descriptor that this process has inherited is not the container's.
#[test]
fn inherited_descriptors_end_here() {
    let Some((machine, runtimes)) = machine("inherited_descriptors_end_here") else { return };
    let secret = machine.path("secret");
    fs::write(&secret, "of the host\n").unwrap();
    for runtime in runtimes {
        for options in [&[][..], &["--detach", "--output", "OUT"]] {
            let output = machine.text("output");
            let options: Vec<&str> =
                options.iter().map(|word| if *word == "OUT" { &output } else { *word }).collect();
            let args = machine.sh_args(runtime, &options, "ls /proc/self/fd; echo end");
            let mut shell = Command::new("sh");
            shell.args(["-c", "exec 7<\"$0\"; exec \"$@\""]).arg(&secret);
            let inner = machine.command(&args);
            shell.arg(inner.get_program()).args(inner.get_args());
            for (name, value) in inner.get_envs() {
                value.map(|value| shell.env(name, value));
            }
            let ran = run_with_input(shell, b"");
            let said = match options.is_empty() {
                true => ran.ok().to_owned(),
                false => until("its output", || {
                    fs::read_to_string(&output).ok().filter(|said| said.contains("end"))
                }),
            };
            assert_eq!(said, "0\n1\n2\n3\nend\n", "{runtime}");
            let _ = fs::remove_file(&output);
            for container in machine.containers() {
                machine.run(&["stop", container["name"].as_str().unwrap()]).ok();
            }
        }
        machine.assert_clean();
    }
}

/// Once a container has ended, signals went to nobody: `cofolio run` waited for a reader that had stopped, and
/// only SIGKILL, after which nothing is cleaned up, ended it.
#[test]
fn a_reader_that_stops_reading_does_not_hold_run_for_ever() {
    let Some((machine, runtimes)) = machine("a_reader_that_stops_reading_does_not_hold") else {
        return;
    };
    for runtime in runtimes {
        // More than the pipe to the reader holds; the rest is in our own.
        let args = machine.sh_args(runtime, &[], "head -c 100000 /dev/zero; echo end >&2");
        let mut command = machine.command(&args);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut run = command.spawn().unwrap();
        let id = Pid::from_child(&run);
        // It runs: from now on signals are its own. `sh` takes none.
        run.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        until("its end", || {
            kill_process(id, Signal::TERM).unwrap();
            run.try_wait().unwrap()
        });
        assert!(machine.containers().is_empty(), "{runtime}");
    }
}
