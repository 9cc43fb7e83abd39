//! Reclaim of a container, an image or a trust domain.

use super::*;

/// Two containers of one image: each has a file to itself, one of them two, and one they share.
#[test]
fn reclaim_drops_what_a_container_alone_uses() {
    let test = "reclaim_drops_what_a_container_alone_uses";
    let Some(_alone) = alone(test) else { return };
    undisturbed(|| drops_what_a_container_alone_uses(test));
}

fn drops_what_a_container_alone_uses(test: &str) {
    let (Some(a), Some(b)) = (cgroup(test, "a"), cgroup(test, "b")) else { return };
    let pair = Pair::new();
    let (old, new, both, other) = (10, 11, 12, 13);
    let files = [("old", old), ("new", new), ("both", both), ("other", other)];
    let image = pair.import("three", &files);
    let top = pair.mount_image(image, "m", Access::ReadOnly);
    for (_, salt) in files {
        forget(&pair.domain.object_path(&pair.object(salt)).unwrap());
    }
    let mut ledger = pair.ledger();
    ledger.sample_all().unwrap();
    next_tick();
    let holder = Holder::new(&top.join("old"), Some(&a));
    ledger.sample_all().unwrap();
    drop(holder);
    next_tick();
    let mut of_new = Holder::new(&top.join("new"), Some(&a));
    let mut of_both = Holder::new(&top.join("both"), Some(&a));
    let of_b = ["both", "other"].map(|file| Holder::new(&top.join(file), Some(&b)));
    ledger.sample_all().unwrap();
    let resident = || [old, new, both, other].map(|salt| pair.resident(salt));
    let (size, pages) = (SIZE as u64, cache::all_pages());
    // Some kernels take pages that are not used, and took five of the first file's here. This is no use of the
    // image.
    for (_, salt) in files {
        fs::read(pair.domain.object_path(&pair.object(salt)).unwrap()).unwrap();
    }
    assert_eq!(resident(), [pages; 4]);

    let of_a = all_of(ReclaimTarget::Container(path_of(&a)));
    let left_alone = Reclaimed { shared_objects: 1, shared_bytes: size, ..Default::default() };
    let found = ledger.reclaim(&ReclaimRequest { dry_run: true, ..of_a.clone() }).unwrap();
    let both_private =
        Reclaimed { dry_run: true, objects: 2, resident_bytes: 2 * size, ..left_alone };
    assert_eq!(found, both_private);
    assert_eq!(resident(), [pages; 4]);

    // The same cgroup by another path was one that nobody was in.
    let by_another_path = path_of(&a).replacen('/', "/.//", 1);
    let of_another = all_of(ReclaimTarget::Container(by_another_path));
    let found = ledger.reclaim(&ReclaimRequest { dry_run: true, ..of_another }).unwrap();
    assert_eq!(found, both_private);

    // The least recently used one suffices.
    let found = ledger.reclaim(&ReclaimRequest { bytes: Some(1), ..of_a.clone() }).unwrap();
    let one = Reclaimed { objects: 1, resident_bytes: size, freed_bytes: size, ..left_alone };
    assert_eq!(found, one);
    assert_eq!(resident(), [0, pages, pages, pages]);

    // What a process maps goes too, and comes back as it was.
    assert_eq!(ledger.reclaim(&of_a).unwrap(), one);
    assert_eq!(resident(), [0, 0, pages, pages]);
    of_new.reads_the_same();
    assert_eq!(fs::read(top.join("old")).unwrap(), content(old));
    assert_eq!(resident(), [pages; 4]);

    // The kernel takes no pages that several processes map.
    next_tick();
    ledger.sample_all().unwrap();
    let with_shared = ReclaimRequest { shared: true, ..of_a };
    let found = ledger.reclaim(&with_shared).unwrap();
    assert_eq!((found.objects, found.freed_bytes, found.kept_bytes), (2, size, size));
    drop(of_b);
    ledger.sample_all().unwrap();
    assert_eq!(ledger.reclaim(&with_shared).unwrap().freed_bytes, size);
    assert_eq!((pair.resident(both), pair.resident(other)), (0, pages));
    of_both.reads_the_same();

    let nobody = all_of(ReclaimTarget::Container("nobody".to_owned()));
    let error = ledger.reclaim(&nobody).unwrap_err();
    assert!(matches!(error, LedgerError::NotFound { .. }));
    assert!(error.to_string().starts_with("no container nobody (memory cgroup /"), "{error}");
    // A name led out of the hierarchy. Members of the daemon's group had root open what they had put
    // there: a FIFO hung the daemon for ever.
    let planted = pair.dir.path().join("planted");
    fs::create_dir(&planted).unwrap();
    fs::write(planted.join("cgroup.procs"), "").unwrap();
    let up = "../".repeat(12);
    for name in ["/", "x/"].map(|start| format!("{start}{up}{}", &planted.to_str().unwrap()[1..])) {
        let outside = all_of(ReclaimTarget::Container(name));
        let error = ledger.reclaim(&outside).unwrap_err();
        assert!(matches!(error, LedgerError::NotFound { .. }), "{error}");
    }
    drop((of_new, of_both));
    pair.umount(&top);
}

/// A FIFO in the place of an object hung the ledger for good: the daemon took no figures and did not end,
/// and `reclaim` and `warm` hung as well.
#[test]
fn a_fifo_is_no_object() {
    let test = "a_fifo_is_no_object";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let top = pair.mount(0, "m", Access::ReadOnly);
    let own = pair.domain.object_path(&pair.object(1)).unwrap();
    forget(&own);
    fs::remove_file(&own).unwrap();
    let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &own, fifo, mode, 0).unwrap();
    let mut ledger = pair.ledger();
    ledger.sample_all().unwrap();
    let found = ledger.reclaim(&all_of(ReclaimTarget::Domain("default".to_owned()))).unwrap();
    assert_eq!(found.resident_bytes, found.freed_bytes);
    pair.umount(&top);
}

/// Pages that a process on another processor had just brought in stayed: the kernel keeps up to 31
/// of them in a batch of that processor, and process_madvise does not find them there. Filesystems
/// that read ahead in large folios have no such batches.
#[test]
fn reclaim_finds_pages_of_another_processor() {
    let test = "reclaim_finds_pages_of_another_processor";
    let Some(_alone) = alone(test) else { return };
    let Some(a) = cgroup(test, "a") else { return };
    let pair = Pair::new();
    let top = pair.mount(0, "m", Access::ReadOnly);
    pair.forget_all();
    let mut ledger = pair.ledger();
    ledger.sample_all().unwrap();
    next_tick();
    let all = sched_getaffinity(None).unwrap();
    let run_on = |number: usize| {
        let mut one = CpuSet::new();
        one.set(number);
        sched_setaffinity(None, &one).unwrap();
    };
    let mut processors = (0..CpuSet::MAX_CPU).filter(|number| all.is_set(*number));
    let (first, last) = (processors.next().unwrap(), processors.next_back());
    // A new process stays where this one is.
    run_on(last.unwrap_or(first));
    let holder = Holder::new(&top.join("deep/own"), Some(&a));
    run_on(first);
    ledger.sample_all().unwrap();
    let found = ledger.reclaim(&all_of(ReclaimTarget::Container(path_of(&a)))).unwrap();
    sched_setaffinity(None, &all).unwrap();
    assert_eq!((found.freed_bytes, found.kept_bytes), (SIZE as u64, 0));
    drop(holder);
    pair.umount(&top);
}

/// Only a container's objects were seen to go in the order of their last use: those of an image or of a
/// trust domain could go in any.
#[test]
fn what_nobody_used_for_longest_goes_first() {
    let test = "what_nobody_used_for_longest_goes_first";
    let Some(_alone) = alone(test) else { return };
    let Some(user) = cgroup(test, "a") else { return };
    let pair = Pair::new();
    let files = [("e", 10), ("b", 11), ("d", 12), ("a", 13), ("c", 14)];
    let image = pair.import("ordered", &files);
    let top = pair.mount_image(image, "m", Access::ReadOnly);
    let mut ledger = pair.ledger();
    let image = ReclaimTarget::Image(UsedImage { domain: "default".into(), image });
    let mut backwards = files;
    backwards.reverse();
    // An order that comes from elsewhere cannot be both.
    for (target, used) in [(image, files), (ReclaimTarget::Domain("default".to_owned()), backwards)]
    {
        let next = ReclaimRequest { bytes: Some(1), ..all_of(target) };
        // The kernel takes pages that nobody maps, too: DAMON has taken these within seconds. Then this
        // begins anew.
        let mut goes_in_order = || {
            pair.forget_all();
            for (name, _) in used {
                next_tick();
                let holder = Holder::new(&top.join(name), Some(&user));
                ledger.sample_all().unwrap();
                drop(holder);
            }
            next_tick();
            ledger.sample_all().unwrap();
            let from = |first: usize| (0..used.len()).map(|number| number >= first).collect();
            (1..=used.len()).all(|gone| {
                let resident = || used.map(|(_, salt)| pair.resident(salt) > 0).to_vec();
                let (before, after): (Vec<_>, Vec<_>) = (from(gone - 1), from(gone));
                if resident() != before {
                    return false;
                }
                assert_eq!(ledger.reclaim(&next).unwrap().objects, 1);
                assert_eq!(resident(), after, "{used:?}");
                true
            })
        };
        assert!((0..20).any(|_| goes_in_order()), "the kernel takes all pages");
    }
    pair.umount(&top);
}

/// Of an image goes what no other image names, of a trust domain everything.
#[test]
fn reclaim_of_an_image_and_of_a_domain() {
    let test = "reclaim_of_an_image_and_of_a_domain";
    let Some(_alone) = alone(test) else { return };
    let pair = Pair::new();
    let read_all = || {
        for salt in 0..3 {
            fs::read(pair.domain.object_path(&pair.object(salt)).unwrap()).unwrap();
        }
    };
    let resident = || [0, 1, 2].map(|salt| pair.resident(salt));
    let (size, pages) = (SIZE as u64, cache::all_pages());
    let mut ledger = pair.ledger();
    let one = UsedImage { domain: "default".into(), image: pair.images[0] };
    let image = all_of(ReclaimTarget::Image(one.clone()));
    let domain = all_of(ReclaimTarget::Domain("default".to_owned()));
    let cancelled = Cancel::default();
    cancelled.cancel();
    // The kernel takes pages that nobody maps, too: two of 900 were gone when a test looked. Then
    // this begins anew.
    let mut goes_in_order = || {
        read_all();
        ledger.sample_all().unwrap();
        assert_eq!(ledger.reclaim_until(&cancelled, &image).unwrap().objects, 0);
        if resident() != [pages; 3] {
            return false;
        }
        let found = ledger.reclaim(&image).unwrap();
        let left = resident();
        assert_eq!(left[1], 0);
        if left != [pages, 0, pages] {
            return false;
        }
        assert_eq!((found.freed_bytes, found.shared_bytes), (size, size));
        assert_eq!(ledger.reclaim(&domain).unwrap().freed_bytes, 2 * size);
        assert_eq!(resident(), [0, 0, 0]);
        true
    };
    assert!((0..20).any(|_| goes_in_order()), "the kernel takes all pages");
    for (target, said) in [
        (ReclaimTarget::Domain("none".to_owned()), "no trust domain none"),
        (ReclaimTarget::Image(UsedImage { domain: "none".into(), ..one.clone() }), "none"),
        (ReclaimTarget::Image(UsedImage { image: pair.object(0), ..one }), "no image "),
    ] {
        let error = ledger.reclaim(&all_of(target)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}
