use super::*;

fn plant(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

fn presence(report: &Report, name: &str) -> Presence {
    report.get(name).unwrap_or_else(|| panic!("no feature {name}")).presence
}

/// A machine of which only files are known: what they say is reported, and nothing is tried on the
/// kernel that the test happens to run on.
#[test]
fn reads_a_planted_machine() {
    let machine = plant(&[
        ("proc/sys/kernel/osrelease", "6.12.9\n"),
        ("proc/filesystems", "nodev\toverlay\n\terofs\n"),
        ("proc/thread-self/status", "Name:\tx\nCapEff:\t000001ffffffffff\n"),
        ("sys/fs/selinux/enforce", "1"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu io\n"),
    ]);
    let report = probe(&Options { root: machine.path().into(), store: None });
    assert_eq!(report.kernel, "6.12.9");
    for name in ["privilege", "erofs", "overlay", "selinux", "cgroup"] {
        assert_eq!(presence(&report, name), Presence::Present, "{name}");
    }
    assert_eq!(presence(&report, "memory-controller"), Presence::Absent);
    assert_eq!(presence(&report, "overlay-data-only"), Presence::Unknown);
    assert!(report.can_mount());
}

#[test]
fn an_empty_machine_cannot_mount() {
    let machine = plant(&[
        ("proc/filesystems", "\text4\n"),
        ("proc/thread-self/status", "CapEff:\t0000000000000000\n"),
    ]);
    let report = probe(&Options { root: machine.path().into(), store: None });
    for name in ["privilege", "erofs", "overlay", "cgroup", "selinux"] {
        assert_eq!(presence(&report, name), Presence::Absent, "{name}");
    }
    assert!(!report.can_mount());
}

/// Names are for scripts: no two alike, and every text is there.
#[test]
fn every_feature_is_described() {
    let machine = plant(&[]);
    let report = probe(&Options { root: machine.path().into(), store: None });
    let mut names: Vec<_> = report.features.iter().map(|f| f.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), report.features.len());
    for feature in &report.features {
        assert!(!feature.used_for.is_empty() && !feature.without.is_empty(), "{feature:?}");
        assert!(!feature.detail.is_empty(), "{feature:?}");
    }
}

/// The probe on this machine leaves nothing behind, neither files nor mounts.
#[test]
fn leaves_nothing_behind() {
    let store = tempfile::tempdir().unwrap();
    let mounts = || fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP leaves_nothing_behind: needs root");
        return;
    }
    // Nobody else's mounts in the comparison.
    cofolio_sys::mount::unshare_mount_namespace().unwrap();
    let before = mounts();
    let report = probe(&Options { root: "/".into(), store: Some(store.path().into()) });
    assert_eq!(before, mounts());
    assert_eq!(fs::read_dir(store.path()).unwrap().count(), 0);
    assert!(report.features.iter().all(|f| !f.detail.is_empty()));
    for feature in &report.features {
        eprintln!("{:<30} {:?}: {}", feature.name, feature.presence, feature.detail);
    }
}
