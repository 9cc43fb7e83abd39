//! Races of two threads, in every order of their locks. Run them with
//! `RUSTFLAGS="--cfg loom" cargo test --release`.

use loom::{sync::Arc, thread};

use super::*;

const A: CgroupId = CgroupId(1);
const B: CgroupId = CgroupId(2);
const C: CgroupId = CgroupId(3);

/// Two mounts in different shards of two.
const M: SuperblockId = SuperblockId(0);
const N: SuperblockId = SuperblockId(1);

const X: ObjectId = ObjectId(7);
const Y: ObjectId = ObjectId(8);
const Z: ObjectId = ObjectId(9);

/// Runs two operations at once on lists with some uses, and checks the outcome.
fn race(
    uses: &'static [(SuperblockId, CgroupId, ObjectId, u32)],
    one: fn(&UsageLists),
    other: fn(&UsageLists),
    outcome: fn(&UsageLists),
) {
    loom::model(move || {
        let lists = Arc::new(UsageLists::new(2));
        for &(mount, cgroup, object, now) in uses {
            lists.touch(mount, cgroup, object, now);
        }
        let shared = Arc::clone(&lists);
        let thread = thread::spawn(move || one(&shared));
        other(&lists);
        thread.join().expect("the thread does not panic");
        lists.check();
        outcome(&lists);
    });
}

#[test]
fn a_touch_during_reparent_is_neither_lost_nor_duplicated() {
    race(
        &[(M, A, X, 1), (M, B, Y, 2)],
        |lists| {
            lists.touch(M, A, X, 3);
            lists.touch(M, A, Y, 4);
            lists.touch(N, A, X, 5);
        },
        |lists| _ = lists.reparent(A, B),
        |lists| {
            // Late uses made new lists of A.
            lists.reparent(A, B);
            lists.check();
            assert_eq!(lists.sorted(), [(0, 2, 7, 3), (0, 2, 8, 4), (1, 2, 7, 5)]);
        },
    );
}

#[test]
fn remove_mount_keeps_only_later_touches() {
    race(
        &[(M, A, Z, 1), (N, A, Z, 1)],
        |lists| {
            lists.touch(M, A, X, 2);
            lists.touch(M, B, Y, 3);
        },
        |lists| lists.remove_mount(M),
        |lists| {
            let (of_a, of_b, of_n) = ((0, 1, 7, 2), (0, 2, 8, 3), (1, 1, 9, 1));
            let left = lists.sorted();
            let orders = [vec![of_n], vec![of_b, of_n], vec![of_a, of_b, of_n]];
            assert!(orders.contains(&left), "{left:?}");
        },
    );
}

#[test]
fn two_generations_reparent_at_once() {
    race(
        &[(M, A, X, 1), (M, B, X, 2), (N, A, Y, 3), (N, C, Y, 4)],
        |lists| _ = lists.reparent(A, B),
        |lists| _ = lists.reparent(B, C),
        |lists| {
            assert_eq!(lists.count_of_cgroup(A), Count::default());
            // B keeps the lists that it got after its own were handed to C.
            lists.reparent(B, C);
            lists.check();
            assert_eq!(lists.sorted(), [(0, 3, 7, 2), (1, 3, 8, 4)]);
        },
    );
}

#[test]
fn a_walk_during_reparent_visits_every_entry_once() {
    race(
        &[(M, A, X, 1), (N, A, Y, 2), (N, B, Z, 3)],
        |lists| _ = lists.reparent(A, B),
        |lists| {
            let visited = lists.sorted();
            let objects: Vec<_> =
                visited.iter().map(|&(mount, _, object, time)| (mount, object, time)).collect();
            assert_eq!(objects, [(0, 7, 1), (1, 8, 2), (1, 9, 3)]);
        },
        |lists| assert_eq!(lists.count_of_cgroup(B), Count { lists: 2, entries: 3 }),
    );
}

#[test]
fn an_entry_that_is_used_meanwhile_is_kept() {
    race(
        &[(M, A, X, 1), (N, A, Y, 1)],
        |lists| _ = lists.touch(M, A, X, 5),
        |lists| _ = lists.retain(|usage| usage.time >= 5),
        |lists| assert_eq!(lists.sorted(), [(0, 1, 7, 5)]),
    );
}
