use super::*;

#[test]
fn names_are_never_paths() {
    for name in ["redis", "a", "0-_.x", "redis-3f9c21", &"x".repeat(63)] {
        assert!(is_name(name), "{name}");
    }
    for name in ["", ".", "..", "../x", "a/b", "-x", "_x", ".x", "a b", "ä", &"x".repeat(64)] {
        assert!(!is_name(name), "{name}");
    }
    for image in ["redis:7.0.15", "registry:5000/team/app@sha256:ab", "0123456789ab", "/", "ä:1"] {
        let name = made_up_name(image);
        assert!(is_name(&name), "{image} gives {name}");
    }
    assert!(made_up_name("registry:5000/team/app:2").starts_with("app-"));
    assert!(made_up_name(":1").starts_with("box-"));
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

/// Found by killing `cofolio run` at random moments: a process that is killed while it writes `container.json`
/// leaves an empty one. Its directory was then neither listed nor removed.
#[test]
fn a_record_that_was_cut_short_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let options = cofolio_store::InitOptions::default();
    let store = cofolio_store::Store::init(&dir.path().join("store"), &options).unwrap();
    let domain = store.domain_or_create("default").unwrap();
    let run = crate::mount::RunDir::at(dir.path().join("run"));
    let containers = Containers::new(Mounter::new(
        &domain,
        run,
        &cofolio_image::compose::contents::ImageContents,
    ));
    for text in [None, Some(""), Some("{\"name\": \"box")] {
        let left = containers.dir().join("box");
        fs::create_dir_all(&left).unwrap();
        if let Some(text) = text {
            fs::write(left.join("container.json"), text).unwrap();
        }
        // runc's, of which it makes the pid file.
        fs::write(left.join(".pid"), "").unwrap();
        fs::create_dir(left.join("rootfs")).unwrap();
        let mut failed = Vec::new();
        assert_eq!(containers.reconcile(&mut failed).unwrap(), ["box"], "{text:?}");
        assert_eq!(failed, Vec::<String>::new());
        assert!(!left.exists(), "{text:?}");
    }
}

/// Found by killing `cofolio run` and crun right after the container had spoken: crun writes the process
/// number later, so that the running container was taken for one that had ended.
#[test]
fn a_container_lives_as_long_as_something_is_in_its_cgroup() {
    let dir = tempfile::tempdir().unwrap();
    let options = cofolio_store::InitOptions::default();
    let store = cofolio_store::Store::init(&dir.path().join("store"), &options).unwrap();
    let domain = store.domain_or_create("default").unwrap();
    let run = crate::mount::RunDir::at(dir.path().join("run"));
    let mounter = Mounter::new(&domain, run, &cofolio_image::compose::contents::ImageContents);
    let containers = Containers { mounter, root: dir.path().join("host") };
    let put = |path: PathBuf, text: &str| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let record = r#"{"name":"box","image":"DIGEST","image_name":"box:1","domain":"default","command":["x"],
        "runtime":{"path":"/usr/bin/crun"},"stop_signal":"SIGTERM","keep":false,"writable":false,
        "cgroup":"/cofolio/box-1","created":1}"#;
    let at = containers.dir().join("box");
    put(at.join("container.json"), &record.replace("DIGEST", &"ab".repeat(32)));
    let state = || containers.status("box").unwrap().map(|status| (status.state, status.pid));
    assert_eq!(state(), Some((State::Ended, None)));
    let host = dir.path().join("host");
    put(host.join("sys/fs/cgroup/memory/cofolio/box-1/cgroup.procs"), "71\n70\n");
    assert_eq!(state(), Some((State::Unattended, Some(70))));
    // With a number that is written down nothing else counts.
    put(at.join("pid"), "70");
    assert_eq!(state(), Some((State::Ended, None)));
    put(host.join("proc/70/cgroup"), "4:memory:/cofolio/box-10\n");
    assert_eq!(state(), Some((State::Ended, None)));
    put(host.join("proc/70/cgroup"), "4:memory:/cofolio/box-1\n0::/\n");
    assert_eq!(state(), Some((State::Unattended, Some(70))));
}
