//! What is reclaimed under memory pressure, and of what containers leave behind.

use super::*;

/// Files that are resident, and a ledger that watches who opens them.
struct Opened {
    pair: Pair,
    top: PathBuf,
    ledger: Ledger,
    files: Vec<(&'static str, usize)>,
}

impl Opened {
    fn new(test: &str, files: &[(&'static str, usize)]) -> Option<Self> {
        let pair = Pair::new();
        let image = pair.import("three", files);
        let top = pair.mount_image(image, "m", Access::Writable);
        let mut ledger = pair.ledger();
        ledger.refresh(&Budget::UNLIMITED).unwrap();
        if let Err(reason) = ledger.watch_opens() {
            println!("SKIP {test}: {reason}");
            return None;
        }
        for (_, salt) in files {
            forget(&pair.domain.object_path(&pair.object(*salt)).unwrap());
        }
        ledger.sample_all().unwrap();
        next_tick();
        // Charged to this process: the kernel's own reclaim in a container does not touch them.
        files.iter().for_each(|(file, _)| _ = fs::read(top.join(file)).unwrap());
        Some(Self { pair, top, ledger, files: files.to_vec() })
    }

    /// Which of the files are resident.
    fn resident(&self) -> Vec<bool> {
        self.files.iter().map(|(_, salt)| self.pair.resident(*salt) > 0).collect()
    }

    /// Brings a cgroup to a limit of its own.
    fn press(&self, group: &Cgroup) {
        group.limit(8 << 20).unwrap();
        self.fill(group);
        assert!(group.was_at_its_limit().unwrap());
    }

    /// Has a process of a cgroup write 32 MiB.
    fn fill(&self, group: &Cgroup) {
        let fill = "echo 0 > \"$0\" && head -c 33554432 /dev/zero > \"$1\"";
        let filler = self.pair.dir.path().join("filler");
        let filled = Command::new("sh").args(["-c", fill]).args([&group.procs(), &filler]).status();
        assert!(filled.unwrap().success());
    }

    /// Does what the policy says after a look at what came and went.
    fn apply_policy(&mut self) -> Vec<bool> {
        self.ledger.refresh(&Budget::UNLIMITED).unwrap();
        assert!(self.ledger.apply_policy(&Budget::UNLIMITED));
        self.resident()
    }
}

const UNDER_PRESSURE: ReclaimPolicy =
    ReclaimPolicy { bytes: 1 << 30, percent: 101.0, left_behind: false };

/// A container that comes to its limit loses what it alone has open, but nothing that it maps.
#[test]
fn a_container_under_pressure_loses_what_it_alone_uses() {
    let test = "a_container_under_pressure_loses_what_it_alone_uses";
    let Some(_alone) = alone(test) else { return };
    let (Some(a), Some(b)) = (cgroup(test, "a"), cgroup(test, "b")) else { return };
    let files = [("mapped", 10), ("open", 11), ("both", 12), ("of-b", 13), ("unused", 14)];
    let Some(mut opened) = Opened::new(test, &files) else { return };
    let top = &opened.top;
    let holders = [
        Holder::new(&top.join("mapped"), Some(&a)),
        Holder::opener(&top.join("open"), &a),
        Holder::opener(&top.join("both"), &a),
        Holder::opener(&top.join("both"), &b),
        Holder::opener(&top.join("of-b"), &b),
    ];
    opened.ledger.sample_all().unwrap();
    opened.ledger.set_policy(UNDER_PRESSURE);
    assert_eq!(opened.apply_policy(), [true; 5]);
    opened.press(&a);
    assert_eq!(opened.apply_policy(), [true, false, true, true, true]);
    // The kernel reclaims there, too, and was seen to take three pages first.
    let freed = opened.ledger.policy_freed_bytes();
    assert!((SIZE as u64 / 2..=SIZE as u64).contains(&freed), "{freed}");
    // Of version 2, memory.high is a limit as well.
    if Hierarchy::find(Path::new("/")).unwrap().version() == Version::V2 {
        fs::write(b.procs().with_file_name("memory.high"), "8388608").unwrap();
        opened.fill(&b);
        assert!(!b.was_at_its_limit().unwrap());
        assert_eq!(opened.apply_policy(), [true, false, true, false, true]);
    }
    // Without pressure nothing goes.
    let relieved = opened.resident();
    assert_eq!(opened.apply_policy(), relieved);
    drop(holders);
    opened.pair.umount(&opened.top);
}

/// A pod and one of its containers were both at their limits: the bytes of a round went for each of them.
#[test]
fn what_a_container_loses_counts_for_its_pod() {
    let test = "what_a_container_loses_counts_for_its_pod";
    let Some(_alone) = alone(test) else { return };
    let Some(pod) = cgroup(test, "pod") else { return };
    let hierarchy = Hierarchy::find(Path::new("/")).unwrap();
    if hierarchy.version() == Version::V2 {
        fs::write(pod.procs().with_file_name("cgroup.subtree_control"), "+memory").unwrap();
    }
    let [first, second] = ["first", "second"].map(|name| {
        let path = format!("{}/{name}", path_of(&pod));
        hierarchy.create(path.trim_start_matches('/')).unwrap()
    });
    let files = [("of-first", 10), ("of-second", 11), ("both", 12)];
    let Some(mut opened) = Opened::new(test, &files) else { return };
    let holders =
        [("of-first", &first), ("both", &first), ("of-second", &second), ("both", &second)]
            .map(|(file, group)| Holder::opener(&opened.top.join(file), group));
    opened.ledger.sample_all().unwrap();
    // One object is more.
    opened.ledger.set_policy(ReclaimPolicy { bytes: SIZE as u64 / 2, ..UNDER_PRESSURE });
    assert_eq!(opened.apply_policy(), [true; 3]);
    opened.press(&first);
    pod.limit(8 << 20).unwrap();
    opened.fill(&second);
    assert!(pod.was_at_its_limit().unwrap() && !second.was_at_its_limit().unwrap());
    assert_eq!(opened.apply_policy(), [false, true, true]);
    drop(holders);
    opened.pair.umount(&opened.top);
}

/// On a machine under pressure goes what one container uses at most. What a removed container used
/// as well counted as used by two.
#[test]
fn a_machine_under_pressure_loses_what_one_container_uses() {
    let test = "a_machine_under_pressure_loses_what_one_container_uses";
    let Some(_alone) = alone(test) else { return };
    if fs::metadata("/proc/pressure/memory").is_err() {
        return println!("SKIP {test}: this kernel does not tell of memory pressure");
    }
    let [Some(a), Some(b), Some(gone)] = ["a", "b", "c"].map(|name| cgroup(test, name)) else {
        return;
    };
    let files = [("both", 12), ("of-b", 13), ("unused", 14)];
    let Some(mut opened) = Opened::new(test, &files) else { return };
    let top = &opened.top;
    let ended = Holder::opener(&top.join("of-b"), &gone);
    let holders = [("both", &a), ("both", &b), ("of-b", &b)]
        .map(|(file, group)| Holder::opener(&top.join(file), group));
    opened.ledger.sample_all().unwrap();
    drop((ended, gone));
    opened.ledger.set_policy(ReclaimPolicy { percent: 0.0, ..UNDER_PRESSURE });
    assert_eq!(opened.apply_policy(), [true, false, false]);
    drop(holders);
    opened.pair.umount(&opened.top);
}

/// Tasks of one container wait for memory and those of another one do not. What the machine loses
/// meanwhile, since a task of it waits, is what nobody uses.
#[test]
fn a_container_that_waits_for_memory_loses_what_it_alone_uses() {
    let test = "a_container_that_waits_for_memory_loses_what_it_alone_uses";
    let Some(_alone) = alone(test) else { return };
    let (Some(a), Some(b)) = (cgroup(test, "a"), cgroup(test, "b")) else { return };
    let pressure = a.procs().with_file_name("memory.pressure");
    if !pressure.exists() {
        return println!("SKIP {test}: this hierarchy does not tell of pressure");
    }
    let files = [("unused", 10), ("of-a", 11), ("of-b", 12)];
    let Some(mut opened) = Opened::new(test, &files) else { return };
    let holders = [("of-a", &a), ("of-b", &b)]
        .map(|(file, group)| Holder::opener(&opened.top.join(file), group));
    opened.ledger.sample_all().unwrap();
    fs::write(a.procs().with_file_name("memory.high"), "8388608").unwrap();
    // The kernel computes its averages every two seconds.
    let is_calm = || fs::read_to_string(&pressure).unwrap().starts_with("some avg10=0.00 ");
    for _ in 0..1000 {
        opened.fill(&a);
        if !is_calm() {
            break;
        }
    }
    assert!(!is_calm());
    // Events from before the first look do not count, so nothing but the stall does.
    opened.ledger.set_policy(UNDER_PRESSURE);
    assert_eq!(opened.apply_policy(), [true; 3]);
    opened.ledger.set_policy(ReclaimPolicy { bytes: 1, percent: 0.01, ..UNDER_PRESSURE });
    assert_eq!(opened.apply_policy()[1..], [false, true]);
    drop(holders);
    opened.pair.umount(&opened.top);
}

const THREE: [(&str, usize); 3] = [("x", 11), ("y", 12), ("z", 13)];

/// [`THREE`] files that a container under pressure alone has open.
fn three_opened(test: &str, cgroup: &Cgroup) -> Option<(Opened, [Holder; 3])> {
    let mut opened = Opened::new(test, &THREE)?;
    let holders = THREE.map(|(file, _)| Holder::opener(&opened.top.join(file), cgroup));
    opened.ledger.sample_all().unwrap();
    opened.ledger.set_policy(UNDER_PRESSURE);
    assert_eq!(opened.apply_policy(), [true; 3]);
    opened.press(cgroup);
    Some((opened, holders))
}

/// All that one container might lose was tried in one step, whatever the budget.
#[test]
fn a_step_of_the_policy_ends_with_its_budget() {
    let test = "a_step_of_the_policy_ends_with_its_budget";
    let Some(_alone) = alone(test) else { return };
    let Some(a) = cgroup(test, "a") else { return };
    let Some((mut opened, holders)) = three_opened(test, &a) else { return };
    let mut left = 3;
    loop {
        let is_complete = opened.ledger.apply_policy(&Budget::of(Duration::ZERO));
        let resident = opened.resident().iter().filter(|it| **it).count();
        assert!(left - resident <= 1, "{left} and then {resident}");
        left = resident;
        if is_complete {
            break;
        }
    }
    assert_eq!(left, 0);
    drop(holders);
    opened.pair.umount(&opened.top);
}

/// Another container opened a file between two steps, and lost it in the second.
#[test]
fn what_another_container_opens_between_two_steps_stays() {
    let test = "what_another_container_opens_between_two_steps_stays";
    let Some(_alone) = alone(test) else { return };
    let (Some(a), Some(b)) = (cgroup(test, "a"), cgroup(test, "b")) else { return };
    let Some((mut opened, holders)) = three_opened(test, &a) else { return };
    while opened.resident() == [true; 3] {
        assert!(!opened.ledger.apply_policy(&Budget::of(Duration::ZERO)));
    }
    let number = opened.resident().iter().position(|it| *it).unwrap();
    let other = Holder::opener(&opened.top.join(THREE[number].0), &b);
    opened.ledger.drain_opens(&Budget::UNLIMITED).unwrap();
    assert!(opened.ledger.apply_policy(&Budget::UNLIMITED));
    let mut left = [false; 3];
    left[number] = true;
    assert_eq!(opened.resident(), left);
    drop((holders, other));
    opened.pair.umount(&opened.top);
}

/// A request may take minutes, and looked up once, before it began, which objects a container alone
/// uses. Another container that opened one of them in that time lost its pages.
#[test]
fn what_another_container_opens_during_a_request_stays() {
    let test = "what_another_container_opens_during_a_request_stays";
    let Some(_alone) = alone(test) else { return };
    let (Some(a), Some(b)) = (cgroup(test, "a"), cgroup(test, "b")) else { return };
    let Some(mut opened) = Opened::new(test, &[("own", 10), ("other", 11)]) else { return };
    let of_both = ["own", "other"].map(|it| Holder::opener(&opened.top.join(it), &a));
    opened.ledger.sample_all().unwrap();
    let of_a = all_of(ReclaimTarget::Container(path_of(&a)));
    let asked = |ledger: &mut Ledger, dry_run| {
        let found = ledger.reclaim(&ReclaimRequest { dry_run, ..of_a.clone() }).unwrap();
        (found.objects, found.shared_objects, found.unsure_objects)
    };
    assert_eq!(asked(&mut opened.ledger, true), (2, 0, 0));
    let of_b = Holder::opener(&opened.top.join("other"), &b);
    assert_eq!(asked(&mut opened.ledger, false), (1, 1, 0));
    assert_eq!(opened.resident(), [false, true]);
    drop((of_both, of_b));
    opened.pair.umount(&opened.top);
}

/// What only a container used goes with its cgroup. What two used stayed when both were gone: the
/// cgroup above, which had got the lists of the first, counted as a user.
#[test]
fn what_containers_leave_behind_is_dropped() {
    let test = "what_containers_leave_behind_is_dropped";
    let Some(_alone) = alone(test) else { return };
    let (Some(a), Some(b)) = (cgroup(test, "a"), cgroup(test, "b")) else { return };
    let Some(mut opened) = Opened::new(test, &[("both", 10), ("of-a", 11)]) else { return };
    opened.ledger.set_policy(ReclaimPolicy { left_behind: true, ..ReclaimPolicy::default() });
    let holders = [("of-a", &a), ("both", &a), ("both", &b)]
        .map(|(file, group)| Holder::opener(&opened.top.join(file), group));
    opened.ledger.sample_all().unwrap();
    assert_eq!(opened.apply_policy(), [true, true]);
    drop(holders);
    assert_eq!(opened.apply_policy(), [true, true]);
    drop(a);
    assert_eq!(opened.apply_policy(), [true, false]);
    drop(b);
    assert_eq!(opened.apply_policy(), [false, false]);
    opened.pair.umount(&opened.top);
}

/// A container came and went between two looks at objects. Nothing was known to be resident of what it
/// had opened, so nothing was noted, and all of it stayed.
#[test]
fn what_a_brief_container_leaves_behind_is_dropped() {
    let test = "what_a_brief_container_leaves_behind_is_dropped";
    let Some(_alone) = alone(test) else { return };
    let Some(a) = cgroup(test, "a") else { return };
    let Some(mut opened) = Opened::new(test, &[("used", 10), ("unused", 11)]) else { return };
    opened.ledger.set_policy(ReclaimPolicy { left_behind: true, ..ReclaimPolicy::default() });
    let opener = Holder::opener(&opened.top.join("used"), &a);
    opened.ledger.drain_opens(&Budget::UNLIMITED).unwrap();
    drop((opener, a));
    assert_eq!(opened.apply_policy(), [false, true]);
    opened.pair.umount(&opened.top);
}

/// Two containers opened a file between two looks at objects, and one of them ended. Nothing was
/// known to be resident of the file, so the other one was no user of it, and the file was dropped.
#[test]
fn what_a_brief_container_shared_stays() {
    let test = "what_a_brief_container_shared_stays";
    let Some(_alone) = alone(test) else { return };
    let (Some(a), Some(b)) = (cgroup(test, "a"), cgroup(test, "b")) else { return };
    let Some(mut opened) = Opened::new(test, &[("both", 10), ("of-a", 11)]) else { return };
    opened.ledger.set_policy(ReclaimPolicy { left_behind: true, ..ReclaimPolicy::default() });
    let [of_a, of_both, of_b] = [("of-a", &a), ("both", &a), ("both", &b)]
        .map(|(file, group)| Holder::opener(&opened.top.join(file), group));
    opened.ledger.drain_opens(&Budget::UNLIMITED).unwrap();
    drop((of_a, of_both, a));
    assert_eq!(opened.apply_policy(), [true, false]);
    drop(of_b);
    opened.pair.umount(&opened.top);
}

/// What was used through a mount goes with the mount, unless somebody uses it through another one.
#[test]
fn what_mounts_leave_behind_is_dropped() {
    let test = "what_mounts_leave_behind_is_dropped";
    let Some(_alone) = alone(test) else { return };
    let Some(a) = cgroup(test, "a") else { return };
    let Some(mut opened) = Opened::new(test, &[("both", 10), ("once", 11)]) else { return };
    let image = opened.pair.import("four", &[("both", 10)]);
    let other = opened.pair.mount_image(image, "n", Access::ReadOnly);
    opened.ledger.set_policy(ReclaimPolicy { left_behind: true, ..ReclaimPolicy::default() });
    let opener = Holder::opener(&opened.top.join("once"), &a);
    let mappers = [&opened.top, &other].map(|top| Holder::new(&top.join("both"), Some(&a)));
    opened.ledger.sample_all().unwrap();
    drop((opener, mappers));
    assert_eq!(opened.apply_policy(), [true, true]);
    opened.pair.umount(&opened.top);
    assert_eq!(opened.apply_policy(), [true, false]);
    opened.pair.umount(&other);
    assert_eq!(opened.apply_policy(), [false, false]);
}

/// What a container left behind was noted by number, and collected as garbage. A new object got the
/// number, and its pages were dropped.
#[test]
fn new_objects_are_not_taken_for_what_was_left_behind() {
    let test = "new_objects_are_not_taken_for_what_was_left_behind";
    let Some(_alone) = alone(test) else { return };
    let Some(a) = cgroup(test, "a") else { return };
    let Some(mut opened) = Opened::new(test, &[("used", 10)]) else { return };
    opened.ledger.set_policy(ReclaimPolicy { left_behind: true, ..ReclaimPolicy::default() });
    let opener = Holder::opener(&opened.top.join("used"), &a);
    opened.ledger.drain_opens(&Budget::UNLIMITED).unwrap();
    drop((opener, a));
    opened.ledger.refresh(&Budget::UNLIMITED).unwrap();
    opened.pair.umount(&opened.top);
    opened.pair.domain.remove_ref("three").unwrap();
    let live = || Ok(Vec::new());
    opened.pair.domain.gc(&ImageContents, &live, &Default::default()).unwrap();
    opened.pair.import("four", &[("new", 11)]);
    fs::read(opened.pair.domain.object_path(&opened.pair.object(11)).unwrap()).unwrap();
    opened.files = vec![("new", 11)];
    assert_eq!(opened.apply_policy(), [true]);
}
