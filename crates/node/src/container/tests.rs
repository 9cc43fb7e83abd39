use std::fs::File;
use std::io;

use super::error::{complaint, reason};
use super::*;
use crate::run_dir::running::new_name;
use rustix::fs::{CWD, Mode};

#[test]
fn names_are_never_paths() {
    for name in ["redis", "a", "0-_.x", "redis-3f9c21", &"x".repeat(63)] {
        assert!(is_name(name), "{name}");
    }
    for name in ["", ".", "..", "../x", "a/b", "-x", "_x", ".x", "a b", "ä", &"x".repeat(64)] {
        assert!(!is_name(name), "{name}");
    }
    for image in ["redis:7.0.15", "registry:5000/team/app@sha256:ab", "0123456789ab", "/", "ä:1"] {
        let name = new_name(image);
        assert!(is_name(&name), "{image} gives {name}");
    }
    assert!(new_name("registry:5000/team/app:2").starts_with("app-"));
    assert!(new_name(":1").starts_with("box-"));
}

/// The words of crun 1.8 and runc 1.1 for what a user gets wrong.
#[test]
fn what_runtimes_say_is_understood() {
    let line = r#"{"msg":"executable file `nosuch` not found in $PATH: No such file or directory","level":"error","time":"2026-11-21T04:11:09.239436Z"}"#;
    assert_eq!(reason(&complaint(line).unwrap()), Reason::NoProgram);
    for (said, expected) in [
        ("open executable: Operation not permitted", Reason::NotExecutable),
        ("open executable: Permission denied", Reason::NotExecutable),
        (
            "runc run failed: unable to start container process: exec: \"nosuch\": executable file not \
             found in $PATH",
            Reason::NoProgram,
        ),
        (
            "runc run failed: unable to start container process: exec: \"/etc\": stat /etc: no such \
             file or directory",
            Reason::NoProgram,
        ),
        (
            "runc run failed: unable to start container process: exec: \"/bin\": permission denied",
            Reason::NotExecutable,
        ),
        ("runc run failed: mkdir /sys/fs/cgroup/x: permission denied", Reason::Other),
    ] {
        assert_eq!(reason(said), expected, "{said}");
    }
    assert_eq!(complaint(r#"{"msg":"x","level":"warning"}"#), None);
    for line in ["", "{", "[]", r#"{"level":"error"}"#] {
        assert_eq!(complaint(line), None, "{line}");
    }
}

/// crun refuses a machine with controllers on cgroup v1 and on v2; runc does not.
#[test]
fn crun_does_not_see_what_it_would_refuse() {
    let (programs, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let program = |name: &str| {
        let path = programs.path().join(name);
        fs::write(&path, "").unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (crun, runc) = (program("crun"), program("runc"));
    let hidden = |path: &str| Runtime::find(Some(path), host.path()).unwrap().hidden().is_some();
    assert!(!hidden(&crun), "no cgroups at all");
    let unified = host.path().join("sys/fs/cgroup/unified");
    fs::create_dir_all(&unified).unwrap();
    fs::write(unified.join("cgroup.controllers"), "\n").unwrap();
    assert!(!hidden(&crun), "no controllers on v2");
    fs::write(unified.join("cgroup.controllers"), "io hugetlb\n").unwrap();
    assert!(hidden(&crun));
    assert!(!hidden(&runc));
    let missing = Runtime::find(Some("/does/not/exist"), host.path()).unwrap_err().to_string();
    assert_eq!(missing, "/does/not/exist is not installed");
}

/// A path was recorded as it was given, and `stop` and `gc` executed what it named in their own working
/// directories.
#[test]
fn a_runtime_has_an_absolute_path() {
    let found = Runtime::find(Some("./Cargo.toml"), Path::new("/nowhere")).unwrap();
    assert_eq!(found.path, std::env::current_dir().unwrap().join("Cargo.toml"));
}

fn in_store(test: impl FnOnce(&Path, Containers<'_>)) {
    let dir = tempfile::tempdir().unwrap();
    let options = cofolio_store::InitOptions::default();
    let store = cofolio_store::Store::init(&dir.path().join("store"), &options).unwrap();
    let domain = store.domain_or_create("default").unwrap();
    let run = run_dir::RunDir::open(dir.path().join("run")).unwrap();
    let mounter = Mounter::new(&domain, run, &cofolio_image::pack::ImageContents);
    let host = dir.path().join("host");
    test(&host, Containers { root: host.clone(), ..Containers::new(mounter) });
}

/// A process that is killed before it has written `container.json` leaves a directory without. Nothing
/// is mounted in it.
#[test]
fn a_container_without_a_record_is_removed() {
    in_store(|_, containers| {
        let left = containers.dir().join("box");
        fs::create_dir_all(&left).unwrap();
        // The half-written record, and runc's file that becomes the pid file.
        fs::write(left.join("container.new"), "{\"name\": \"box").unwrap();
        fs::write(left.join(".pid"), "").unwrap();
        fs::create_dir(left.join("rootfs")).unwrap();
        let mut failed = Vec::new();
        assert_eq!(containers.reconcile(&mut failed).unwrap(), ["box"]);
        assert_eq!(failed, Vec::<String>::new());
        assert!(!left.exists());
    });
}

/// A record that could not be parsed counted as none, so the next `run` or `gc` removed the files of a
/// container that ran: its config, its lock, its pid.
#[test]
fn a_damaged_record_keeps_its_container() {
    in_store(|_, containers| {
        for text in ["", "{\"name\": \"box", "[]", "\0\0\0\0"] {
            let dir = containers.dir().join("box");
            fs::create_dir_all(&dir).unwrap();
            for (name, text) in [("container.json", text), ("config.json", "{}"), ("pid", "70")] {
                fs::write(dir.join(name), text).unwrap();
            }
            let mut failed = Vec::new();
            assert_eq!(containers.reconcile(&mut failed).unwrap(), Vec::<String>::new(), "{text}");
            assert!(failed[0].contains("box/container.json: "), "{failed:?}");
            let mut damaged = Vec::new();
            assert!(containers.list(&mut damaged).unwrap().is_empty());
            assert!(matches!(damaged[..], [RunError::Record { .. }]), "{damaged:?}");
            let stopped = containers.stop("box", std::time::Duration::ZERO);
            assert!(matches!(stopped, Err(RunError::Record { .. })), "{stopped:?}");
            let living = containers.living_at(&fs::canonicalize(&dir).unwrap().join("rootfs"));
            assert!(matches!(living, Err(RunError::Record { .. })), "{living:?}");
            for name in ["container.json", "config.json", "pid"] {
                assert!(dir.join(name).exists(), "{text}: {name}");
            }
        }
    });
}

/// A FIFO in the place of a container's file, its record for one, held up `ps`, `gc` and `stop` for ever, and a
/// directory ended `ps` before the other containers were listed.
#[test]
fn what_is_no_regular_file_is_not_waited_for() {
    in_store(|_, containers| {
        let dir = containers.dir().join("box");
        fs::create_dir_all(&dir).unwrap();
        let fifo = |name: &str| {
            let mode = Mode::RUSR | Mode::WUSR;
            rustix::fs::mknodat(CWD, dir.join(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        };
        let look = |part: &str| {
            let (mut failed, mut damaged) = (Vec::new(), Vec::new());
            assert_eq!(containers.reconcile(&mut failed).unwrap(), [""; 0]);
            assert!(failed[0].contains(part), "{failed:?}");
            assert!(containers.list(&mut damaged).unwrap().is_empty());
            let said = cofolio_store::with_causes(&damaged[0]);
            assert!(said.contains(part) && damaged.len() == 1, "{said}");
        };
        fifo("lock");
        fifo("log");
        assert!(!is_locked(&dir).unwrap());
        assert!(
            refusal(&dir.join("log"), &Runtime::find(Some("/bin/sh"), &dir).unwrap()).is_none()
        );
        fs::remove_file(dir.join("lock")).unwrap();
        fifo("container.json");
        look("box/container.json: it is not a regular file");
        fs::remove_file(dir.join("container.json")).unwrap();
        fs::create_dir(dir.join("container.json")).unwrap();
        look("box/container.json: it is not a regular file");
        fifo("exit");
        assert_eq!(kept_exit_status(&dir), None);
        fifo("pid");
        assert_eq!(read_text(&dir.join("pid")), None);
    });
}

/// The flag was cleared in this process while it started the runtime: a child that another thread
/// started at that moment inherited the lock, and the container was locked as long as that child lived.
#[test]
fn descriptors_go_to_the_runtime_only() {
    use std::os::fd::AsRawFd as _;
    use std::sync::atomic::{AtomicBool, Ordering};
    let file = tempfile::tempfile().unwrap();
    let done = AtomicBool::new(false);
    let closed = || rustix::io::fcntl_getfd(&file).unwrap().contains(rustix::io::FdFlags::CLOEXEC);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(closed(), "another thread's child would inherit it");
            }
        });
        for _ in 0..50 {
            let mut command = std::process::Command::new("readlink");
            command.arg(format!("/proc/self/fd/{}", file.as_raw_fd()));
            let without = command.output().unwrap();
            assert!(!without.status.success());
            let lock: OwnedFd = file.try_clone().unwrap().into();
            command.args(["--", &format!("/proc/self/fd/{}", lock.as_raw_fd())]);
            cofolio_sys::process::inherit(&mut command, lock);
            assert!(!command.output().unwrap().stdout.is_empty());
        }
        done.store(true, Ordering::Relaxed);
        watch.join().unwrap();
    });
}

/// Found by killing `cofolio run` and crun right after the container had spoken: crun writes the process
/// number later, so that the running container was taken for one that had ended.
#[test]
fn a_container_lives_as_long_as_something_is_in_its_cgroup() {
    in_store(|host, containers| {
        let at = put_record(&containers);
        let state = || containers.status("box").unwrap().map(|status| (status.state, status.pid));
        assert_eq!(state(), Some((State::Ended, None)));
        put(host.join("sys/fs/cgroup/memory/cofolio/box-1/cgroup.procs"), "71\n70\n");
        // Found by running containers where nothing is mounted on `unified`: crun makes its directories
        // there all the same, with files that stay, and each container was said to have lost its record.
        assert_eq!(state(), Some((State::Ended, None)));
        put(host.join("sys/fs/cgroup/memory/cgroup.procs"), "1\n");
        assert_eq!(state(), Some((State::Unattended, Some(70))));
        // Found where the numbers of processes had begun anew: the child had the lowest one, and the
        // operator was told to kill that.
        put(host.join("proc/70/status"), "Name:\tsleep\nNSpid:\t70\t2\n");
        put(host.join("proc/71/status"), "Name:\tsh\nNSpid:\t71\t1\n");
        assert_eq!(state(), Some((State::Unattended, Some(71))));
        // With a number that is written down nothing else counts.
        let processes = host.join("sys/fs/cgroup/memory/cofolio/box-1/cgroup.procs");
        put(processes.clone(), "71\n");
        put(at.join("pid"), "70");
        assert_eq!(state(), Some((State::Ended, None)));
        put(host.join("proc/70/cgroup"), "4:memory:/cofolio/box-10\n");
        assert_eq!(state(), Some((State::Ended, None)));
        put(host.join("proc/70/cgroup"), "4:memory:/cofolio/box-1\n0::/\n");
        assert_eq!(state(), Some((State::Unattended, Some(70))));
        // Its main thread has ended, and others go on.
        put(host.join("proc/70/cgroup"), "4:memory:/\n0::/\n");
        put(processes, "70\n");
        assert_eq!(state(), Some((State::Unattended, Some(70))));
    });
}

/// Systemd in a container whose record was lost moves all processes to cgroups of its own: the container
/// counted as ended, and was unmounted.
#[test]
fn a_lost_container_may_have_cgroups_of_its_own() {
    in_store(|host, containers| {
        fs::create_dir_all(containers.dir().join("box")).unwrap();
        let memory = host.join("sys/fs/cgroup/memory");
        let cgroup = memory.join(&containers.cgroup("box")[1..]);
        put(memory.join("cgroup.procs"), "1\n");
        put(cgroup.join("cgroup.procs"), "");
        assert!(containers.status("box").unwrap().is_none());
        put(cgroup.join("system.slice/init.scope/cgroup.procs"), "70\n");
        assert!(matches!(containers.status("box"), Err(RunError::Lost { pid: 70, .. })));
    });
}

fn put(path: PathBuf, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn put_record(containers: &Containers<'_>) -> PathBuf {
    let record = r#"{"name":"box","image":"DIGEST","image_name":"box:1","domain":"default","command":["x"],
    "runtime":{"path":"/usr/bin/crun"},"stop_signal":"SIGTERM","keep":false,"writable":false,
    "cgroup":"/cofolio/box-1","created":1}"#;
    let at = containers.dir().join("box");
    put(at.join("container.json"), &record.replace("DIGEST", &"ab".repeat(32)));
    at
}

/// `stop` opened a container's process after it had looked whose it was. If the process ended in between, and another
/// one got its number, that one got the signal.
#[test]
fn a_process_that_got_the_number_of_a_container_gets_no_signal() {
    in_store(|host, containers| {
        let at = put_record(&containers);
        let record = at.join("container.json");
        // A runtime that does not know the container.
        let text = fs::read_to_string(&record).unwrap().replace("/usr/bin/crun", "/bin/false");
        fs::write(&record, text).unwrap();
        let mut other = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        put(at.join("pid"), &other.id().to_string());
        let cgroup = host.join(format!("proc/{}/cgroup", other.id()));
        put(cgroup.with_extension("next"), "0::/other\n");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, &cgroup, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The first look waits here for its answer. All later ones find the file.
                let mut first = File::options().write(true).open(&cgroup).unwrap();
                fs::rename(cgroup.with_extension("next"), &cgroup).unwrap();
                io::Write::write_all(&mut first, b"0::/cofolio/box-1\n").unwrap();
            });
            containers.stop("box", std::time::Duration::ZERO).unwrap();
        });
        let ended = other.try_wait().unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(ended, None);
    });
}

/// Any error at reading `/proc` or the cgroup, as EMFILE, counted as "has ended", and gc deleted a container
/// that ran.
#[test]
fn a_container_whose_processes_cannot_be_read_is_kept() {
    in_store(|host, containers| {
        let at = put_record(&containers);
        for (unreadable, pid) in
            [("sys/fs/cgroup/cofolio/box-1/cgroup.procs", ""), ("proc/70/cgroup", "70")]
        {
            put(host.join("sys/fs/cgroup/cgroup.procs"), "1\n");
            fs::create_dir_all(host.join(unreadable)).unwrap();
            put(at.join("pid"), pid);
            let mut failed = Vec::new();
            assert_eq!(containers.reconcile(&mut failed).unwrap(), Vec::<String>::new());
            assert!(failed[0].contains(unreadable), "{failed:?}");
            assert!(at.join("container.json").exists());
        }
    });
}

/// A gc in another container, with the same run directory and a `/proc` of its own, saw none of the
/// processes and removed a container that ran.
#[test]
fn a_container_in_another_mount_namespace_is_kept() {
    use crate::mount::MountRequest;
    use crate::mount::tests::fixture::{Fixture, needs_mounts};
    needs_mounts!();
    let fixture = Fixture::new();
    let containers =
        || Containers { root: fixture.path("host"), ..Containers::new(fixture.mounter()) };
    let at = put_record(&containers());
    // Its runtime cannot be started, so that asking it to delete the container would be another error.
    let (record, state) = (at.join("container.json"), fixture.path("run/crun/box"));
    let text = fs::read_to_string(&record).unwrap();
    fs::write(&record, text.replace("/usr/bin/crun", "/nowhere/crun")).unwrap();
    fs::create_dir_all(&state).unwrap();
    let request = MountRequest::new(fixture.image, at.join("rootfs"));
    fs::create_dir(&request.target).unwrap();
    fixture.mounter().mount(&request).unwrap();
    let mut failed = Vec::new();
    std::thread::scope(|scope| {
        let gc = || {
            cofolio_sys::mount::unshare_mount_namespace().unwrap();
            assert_eq!(containers().reconcile(&mut failed).unwrap(), Vec::<String>::new());
        };
        scope.spawn(gc).join().unwrap();
    });
    assert!(failed[0].contains("namespace"), "{failed:?}");
    assert!(record.exists());
    fs::remove_dir(state).unwrap();
    assert_eq!(containers().reconcile(&mut failed).unwrap(), ["box"]);
    fixture.assert_clean("at the end");
}

/// `cofolio run … | head -1`: the container learns with its next write that nobody reads any more, and not only
/// when that has been copied.
#[test]
fn copying_ends_with_its_reader() {
    let (from, mut pipe) = io::pipe().unwrap();
    let (reader, to) = io::pipe().unwrap();
    let copied = streams::copy(from, to).unwrap();
    drop(reader);
    copied.join().unwrap().unwrap();
    // A process that another test has just forked has the other end, too, until exec.
    for _ in 0..1000 {
        match io::Write::write_all(&mut pipe, b"x") {
            Ok(()) => std::thread::sleep(std::time::Duration::from_millis(10)),
            Err(error) => return assert_eq!(error.kind(), io::ErrorKind::BrokenPipe),
        }
    }
    panic!("somebody still reads");
}
