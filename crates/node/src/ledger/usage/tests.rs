//! Single operations, a comparison with a naive model, and a race of real threads.

use std::{collections::BTreeMap, ops::ControlFlow, thread};

use proptest::prelude::*;

use super::*;

fn touch(lists: &UsageLists, mount: u32, cgroup: u32, object: u32, now: u32) -> Option<u32> {
    lists.touch(SuperblockId(mount), CgroupId(cgroup), ObjectId(object), now)
}

/// The list of a pair as (object, time), the least recent first.
fn list(lists: &UsageLists, mount: u32, cgroup: u32) -> Vec<(u32, u32)> {
    let mut list = Vec::new();
    let _ = lists.for_each_of_cgroup(CgroupId(cgroup), |usage| {
        if usage.mount == SuperblockId(mount) {
            list.push((usage.object.0, usage.time));
        }
        ControlFlow::<()>::Continue(())
    });
    list
}

#[test]
fn a_use_moves_the_object_to_the_recent_end() {
    let lists = UsageLists::new(4);
    for (object, now) in [(7, 10), (8, 11), (9, 12)] {
        assert_eq!(touch(&lists, 1, 1, object, now), None);
    }
    assert_eq!(touch(&lists, 1, 1, 7, 13), Some(10));
    assert_eq!(touch(&lists, 1, 1, 9, 14), Some(12));
    assert_eq!(list(&lists, 1, 1), [(8, 11), (7, 13), (9, 14)]);
    lists.check();
}

#[test]
fn a_full_ledger_touches_what_is_listed() {
    let lists = UsageLists::new(1);
    touch(&lists, 1, 1, 7, 10);
    let listed = |object| lists.touch_listed(SuperblockId(1), CgroupId(1), ObjectId(object), 11);
    assert_eq!((listed(7), listed(8)), (Some(10), None));
    assert_eq!(list(&lists, 1, 1), [(7, 11)]);
}

/// Threads read the clock before they take the lock, so a use can arrive after a later one.
#[test]
fn a_late_use_gets_the_time_of_the_most_recent_one() {
    let lists = UsageLists::new(1);
    touch(&lists, 1, 1, 7, 20);
    touch(&lists, 1, 1, 8, 19);
    touch(&lists, 1, 2, 8, 19);
    assert_eq!(list(&lists, 1, 1), [(7, 20), (8, 20)]);
    assert_eq!(list(&lists, 1, 2), [(8, 19)]);
}

#[test]
fn a_list_lives_from_its_first_entry_to_its_last() {
    let lists = UsageLists::new(4);
    let unused = lists.memory_bytes();
    touch(&lists, 1, 2, 3, 0);
    assert_eq!(lists.count(), Count { lists: 1, entries: 1 });
    assert!(lists.memory_bytes() > unused);
    assert_eq!(lists.retain(|usage| usage.object == ObjectId(3)), 0);
    assert_eq!(lists.retain(|usage| usage.object == ObjectId(4)), 1);
    assert_eq!(lists.count(), Count::default());
    assert_eq!(lists.memory_bytes(), unused);
}

#[test]
fn counts_and_walks_follow_mounts_and_cgroups() {
    let lists = UsageLists::new(4);
    for (mount, cgroup, object) in [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)] {
        touch(&lists, mount, cgroup, object, 0);
    }
    assert_eq!(lists.count(), Count { lists: 3, entries: 4 });
    assert_eq!(lists.count_of_mount(SuperblockId(1)), Count { lists: 2, entries: 3 });
    assert_eq!(lists.count_of_cgroup(CgroupId(1)), Count { lists: 2, entries: 3 });
    assert_eq!(lists.count_of_cgroup(CgroupId(3)), Count::default());
    lists.remove_mount(SuperblockId(1));
    assert_eq!(lists.sorted(), [(2, 1, 1, 0)]);
}

#[test]
fn a_walk_stops_where_its_closure_breaks() {
    let lists = UsageLists::new(2);
    (0..10).for_each(|object| _ = touch(&lists, object % 3, 1, object, object));
    let mut left = 5;
    let stopped = lists.for_each(|usage| {
        left -= 1;
        if left == 0 { ControlFlow::Break(usage) } else { ControlFlow::Continue(()) }
    });
    assert!(stopped.is_break());
    assert_eq!(left, 0);
}

#[test]
fn a_parent_without_a_list_gets_the_whole_list() {
    let lists = UsageLists::new(4);
    touch(&lists, 1, 5, 7, 1);
    touch(&lists, 1, 5, 8, 2);
    touch(&lists, 2, 5, 7, 3);
    assert_eq!(lists.reparent(CgroupId(5), CgroupId(1)), 2);
    assert_eq!(lists.sorted(), [(1, 1, 7, 1), (1, 1, 8, 2), (2, 1, 7, 3)]);
    assert_eq!(lists.reparent(CgroupId(5), CgroupId(1)), 0);
    lists.check();
}

#[test]
fn a_merge_keeps_order_and_the_later_time() {
    let lists = UsageLists::new(1);
    for (cgroup, object, now) in
        [(1, 1, 1), (1, 2, 4), (1, 3, 6), (1, 4, 9), (5, 2, 3), (5, 9, 5), (5, 3, 7), (5, 1, 8)]
    {
        touch(&lists, 1, cgroup, object, now);
    }
    lists.reparent(CgroupId(5), CgroupId(1));
    assert_eq!(list(&lists, 1, 1), [(2, 4), (9, 5), (3, 7), (1, 8), (4, 9)]);
    lists.check();
}

#[test]
fn a_cgroup_that_is_its_own_parent_keeps_its_lists() {
    let lists = UsageLists::new(1);
    touch(&lists, 1, 1, 1, 1);
    assert_eq!(lists.reparent(CgroupId(1), CgroupId(1)), 0);
    assert_eq!(lists.sorted(), [(1, 1, 1, 1)]);
}

#[test]
fn what_is_not_kept_goes_and_the_rest_keeps_its_order() {
    let lists = UsageLists::new(2);
    for object in 0..12 {
        touch(&lists, object % 2, 1, object, object);
    }
    assert_eq!(lists.retain(|usage| usage.object.0 % 3 != 0), 4);
    assert_eq!(list(&lists, 0, 1), [(2, 2), (4, 4), (8, 8), (10, 10)]);
    assert_eq!(list(&lists, 1, 1), [(1, 1), (5, 5), (7, 7), (11, 11)]);
    assert_eq!(lists.retain(|usage| usage.mount == SuperblockId(1)), 4);
    assert_eq!(lists.count(), Count { lists: 1, entries: 4 });
    lists.check();
}

/// Removals alone do not shrink a slab or a hash table.
#[test]
fn memory_is_given_back_when_most_entries_go() {
    let lists = UsageLists::new(2);
    let unused = lists.memory_bytes();
    for object in 0..20_000 {
        touch(&lists, object % 50, object % 7, object, object);
    }
    let full = lists.memory_bytes() - unused;
    lists.retain(|usage| usage.time >= 19_000);
    assert!(lists.memory_bytes() - unused < full / 4);
    lists.check();
    lists.retain(|_| false);
    assert_eq!(lists.memory_bytes(), unused);
}

/// For each pair the uses as (object, time), the least recent first.
type Model = BTreeMap<(u32, u32), Vec<(u32, u32)>>;

#[derive(Debug, Clone)]
enum Operation {
    Touch { mount: u32, cgroup: u32, object: u32, now: u32 },
    RemoveMount(u32),
    Reparent { cgroup: u32, parent: u32 },
    Forget { object: u32 },
    Expire { before: u32 },
}

const MOUNTS: u32 = 4;
const CGROUPS: u32 = 4;
const OBJECTS: u32 = 8;

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let (mount, cgroup, object, time) = (0..MOUNTS, 0..CGROUPS, 0..OBJECTS, 0..50_u32);
    let pair = (mount.clone(), cgroup.clone(), object.clone());
    prop_oneof![
        30 => (pair, time.clone())
            .prop_map(|((mount, cgroup, object), now)| Touch { mount, cgroup, object, now }),
        1 => mount.prop_map(RemoveMount),
        3 => (cgroup.clone(), cgroup).prop_map(|(cgroup, parent)| Reparent { cgroup, parent }),
        3 => object.prop_map(|object| Forget { object }),
        1 => time.prop_map(|before| Expire { before }),
    ]
}

/// Keeps what `keep` says of an object and its time.
fn retain(lists: &UsageLists, model: &mut Model, keep: impl Fn(u32, u32) -> bool) {
    let entries = |model: &Model| model.values().map(Vec::len).sum::<usize>();
    let before = entries(model);
    model.values_mut().for_each(|list| list.retain(|&(object, time)| keep(object, time)));
    let removed = lists.retain(|usage| keep(usage.object.0, usage.time));
    assert_eq!(removed, before - entries(model));
}

/// Applies an operation to both, and compares the results.
fn apply(lists: &UsageLists, model: &mut Model, operation: &Operation) {
    match *operation {
        Operation::Touch { mount, cgroup, object, now } => {
            let list = model.entry((mount, cgroup)).or_default();
            let time = list.last().map_or(now, |&(_, latest)| latest.max(now));
            let previous = list.iter().find(|entry| entry.0 == object).map(|entry| entry.1);
            list.retain(|entry| entry.0 != object);
            list.push((object, time));
            assert_eq!(touch(lists, mount, cgroup, object, now), previous);
        }
        Operation::Forget { object } => {
            retain(lists, model, |of, _| of != object);
        }
        Operation::RemoveMount(mount) => {
            model.retain(|pair, _| pair.0 != mount);
            lists.remove_mount(SuperblockId(mount));
        }
        Operation::Reparent { cgroup, parent } => {
            lists.reparent(CgroupId(cgroup), CgroupId(parent));
            for mount in (0..MOUNTS).filter(|_| cgroup != parent) {
                let list = model.remove(&(mount, cgroup)).unwrap_or_default();
                let target = model.entry((mount, parent)).or_default();
                target.extend(list);
                target.sort_by_key(|entry| entry.1);
                let uses = std::mem::take(target);
                for (index, entry) in uses.iter().enumerate() {
                    if !uses[index + 1..].iter().any(|later| later.0 == entry.0) {
                        target.push(*entry);
                    }
                }
            }
        }
        Operation::Expire { before } => {
            retain(lists, model, |_, time| time >= before);
        }
    }
    model.retain(|_, list| !list.is_empty());
}

/// Collects what a walk visits, and checks that it goes through one list after the other.
fn walked(walk: impl FnOnce(&mut dyn FnMut(Usage))) -> Model {
    let mut seen = Model::new();
    let mut last = None;
    walk(&mut |Usage { mount, cgroup, object, time }| {
        let pair = (mount.0, cgroup.0);
        assert!(last == Some(pair) || !seen.contains_key(&pair), "a list in two parts");
        last = Some(pair);
        seen.entry(pair).or_default().push((object.0, time));
    });
    seen
}

fn part(model: &Model, is_in: impl Fn(&(u32, u32)) -> bool) -> (Model, Count) {
    let part: Model = model.clone().into_iter().filter(|(pair, _)| is_in(pair)).collect();
    let count = Count { lists: part.len(), entries: part.values().map(Vec::len).sum() };
    (part, count)
}

fn compare(lists: &UsageLists, model: &Model) {
    fn go_on(visit: &mut dyn FnMut(Usage)) -> impl FnMut(Usage) -> ControlFlow<()> {
        |usage| {
            visit(usage);
            ControlFlow::Continue(())
        }
    }
    let seen = walked(|visit| _ = lists.for_each(go_on(visit)));
    assert_eq!((seen, lists.count()), part(model, |_| true));
    for id in 0..MOUNTS {
        let mount = SuperblockId(id);
        let seen = walked(|visit| _ = lists.for_each_of_mount(mount, go_on(visit)));
        assert_eq!((seen, lists.count_of_mount(mount)), part(model, |pair| pair.0 == id));
    }
    for id in 0..CGROUPS {
        let cgroup = CgroupId(id);
        let seen = walked(|visit| _ = lists.for_each_of_cgroup(cgroup, go_on(visit)));
        assert_eq!((seen, lists.count_of_cgroup(cgroup)), part(model, |pair| pair.1 == id));
    }
}

proptest! {
    #[test]
    fn any_operations_do_what_the_model_does(
        shards in 1..4_usize,
        operations in prop::collection::vec(operation(), 1..150),
    ) {
        let lists = UsageLists::new(shards);
        let mut model = Model::new();
        for operation in &operations {
            apply(&lists, &mut model, operation);
            lists.check();
            compare(&lists, &model);
        }
    }
}

/// Three threads use objects, each as its own cgroup, while a fourth hands their lists to cgroup 0
/// again and again. In the end every object must be there once, with its last time.
#[test]
fn no_use_is_lost_while_other_threads_reparent() {
    const STEPS: u32 = 20_000;
    let lists = UsageLists::new(4);
    let reparent_all = || (1..=3).map(|cgroup| lists.reparent(CgroupId(cgroup), CgroupId(0))).sum();
    thread::scope(|scope| {
        let users: Vec<_> = (1..=3)
            .map(|cgroup| {
                let lists = &lists;
                let uses = move |step| touch(lists, step % 7, cgroup, step % 11, step);
                scope.spawn(move || (0..STEPS).for_each(|step| _ = uses(step)))
            })
            .collect();
        while users.iter().any(|user| !user.is_finished()) {
            let _: usize = reparent_all();
            assert_eq!(lists.retain(|_| true), 0);
        }
    });
    let _: usize = reparent_all();
    lists.check();
    let last = STEPS - 77..STEPS;
    let mut expected: Vec<_> = last.map(|step| (step % 7, 0, step % 11, step)).collect();
    expected.sort_unstable();
    assert_eq!(lists.sorted(), expected);
}
