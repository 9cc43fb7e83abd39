//! Trimming a domain to a size or an age, and the times of last use that decide what goes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::cell::RefCell;

use cofolio_store::{
    Digest, Domain, GcOptions, ImportOptions, KEEP_LABEL, Root, RootKind, Spared, TrimOptions,
    TrimPlan,
};
use common::{Lines, Scratch, content, import, nothing_live};

/// One block on disk.
const BLOCK: u64 = 4096;

/// An image of one-block objects, last used at `created`. Three more blocks are its metadata, its layer and the split of that.
fn put(domain: &Domain, name: &str, seeds: &[u64], created: i64) -> Digest {
    let pieces: Vec<_> = seeds.iter().map(|seed| content(4000, *seed)).collect();
    let layer = format!("sha256:{name}");
    let image = import(domain, name, &pieces, Some(&layer), ImportOptions::default()).unwrap();
    let mut record = domain.get_ref(name).unwrap().unwrap();
    record.created = created;
    domain.put_ref(name, &record).unwrap();
    image
}

fn names(domain: &Domain) -> Vec<String> {
    domain.refs().unwrap().into_iter().map(|(name, _)| name).collect()
}

fn trim(domain: &Domain, options: &TrimOptions) -> TrimPlan {
    let dry =
        TrimOptions { gc: GcOptions { dry_run: true, ..Default::default() }, ..options.clone() };
    let before = names(domain);
    let (planned, would) = domain.trim(&Lines, &nothing_live, &dry, &|_| ()).unwrap();
    assert_eq!(names(domain), before, "a dry run changes nothing");
    let bytes = domain.bytes().unwrap();
    assert_eq!(planned.bytes_before, bytes);

    let announced = RefCell::new(None);
    let announce = |plan: &TrimPlan| {
        assert_eq!(names(domain), before, "it is announced before it is done");
        *announced.borrow_mut() = Some(plan.clone());
    };
    let (plan, report) = domain.trim(&Lines, &nothing_live, options, &announce).unwrap();
    assert_eq!((Some(&plan), &planned), (announced.borrow().as_ref(), &plan));
    assert_eq!(report.bytes(), would.bytes(), "a dry run says what goes");
    assert_eq!(domain.bytes().unwrap(), plan.bytes_after, "and what is left");
    assert_eq!(bytes - plan.bytes_after, report.bytes());
    plan
}

#[test]
fn the_least_recently_used_go_first_and_no_more_than_needed() {
    let scratch = Scratch::new("trim");
    let domain = scratch.store().domain("default").unwrap();
    put(&domain, "old", &[1, 2], 100);
    put(&domain, "base", &[2, 3, 4], 200);
    put(&domain, "new", &[4, 5], 300);
    let all = 5 * BLOCK + 3 * 3 * BLOCK;
    assert_eq!(domain.bytes().unwrap(), all);
    let to = |size| TrimOptions { size: Some(size), ..TrimOptions::default() };
    assert_eq!(trim(&domain, &to(all)).victims, []);

    // Object 2 is shared with `base`, so only object 1, the image, the layer and the split of `old` go.
    let plan = trim(&domain, &to(all - 1));
    assert_eq!((plan.victims.len(), plan.victims[0].bytes), (1, 4 * BLOCK));
    assert_eq!((plan.victims[0].last_used, &plan.victims[0].refs[..]), (100, &["old".into()][..]));
    assert_eq!(names(&domain), ["base", "new"]);

    // Whoever was mounted lately is not the oldest any more.
    let base = domain.get_ref("base").unwrap().unwrap().image;
    domain.note_use(&base, 400).unwrap();
    let plan = trim(&domain, &TrimOptions { unused_since: Some(400), ..TrimOptions::default() });
    assert_eq!((plan.victims.len(), names(&domain)), (1, vec!["base".to_owned()]));

    // Its record goes with the image, and the name can come again.
    let plan = trim(&domain, &to(0));
    assert_eq!((plan.bytes_after, plan.is_enough()), (0, true));
    assert_eq!(domain.noted_use(&base).unwrap(), None);
    put(&domain, "old", &[1, 2], 100);
}

/// An operator trims a busy node: nothing that somebody relies on may go, however large it is.
#[test]
fn what_is_used_pinned_or_recent_stays() {
    let scratch = Scratch::new("trim-stays");
    let domain = scratch.store().domain("default").unwrap();
    let roots = [put(&domain, "lease", &[10], 1), put(&domain, "mount", &[11], 1)];
    let lease = domain.lease(&roots[0], Vec::new(), "").unwrap();
    let mut root = Root::new(RootKind::Mount, "r");
    root.images.push(roots[1]);
    domain.put_root(&root).unwrap();
    let mounted = put(&domain, "mounted", &[1], 1);
    put(&domain, "pinned", &[2], 1);
    let mut record = domain.get_ref("pinned").unwrap().unwrap();
    record.labels.insert(KEEP_LABEL.into(), "true".into());
    domain.put_ref("pinned", &record).unwrap();
    // Another name of a pinned image would free nothing.
    record.labels.clear();
    domain.put_ref("pinned-too", &record).unwrap();
    put(&domain, "recent", &[3], 900);
    let imported = put(&domain, "imported", &[4], 1);
    put(&domain, "victim", &[5], 1);
    let options = TrimOptions {
        size: Some(0),
        keep_since: Some(900),
        keep: vec![imported],
        ..TrimOptions::default()
    };
    let live = || Ok(vec![mounted]);
    let (plan, _) = domain.trim(&Lines, &live, &options, &|_| ()).unwrap();
    assert_eq!(plan.victims.len(), 1);
    assert!(!plan.is_enough() && plan.bytes_after == domain.bytes().unwrap());
    let of = |why| plan.spared.iter().filter(|(_, spared)| *spared == why).count();
    assert_eq!((of(Spared::InUse), of(Spared::Pinned), of(Spared::Recent)), (3, 1, 2));
    assert_eq!(names(&domain).len(), 2 + 5);
    assert!(!names(&domain).contains(&"victim".to_owned()));

    // A lease without its process and a mount of an earlier boot keep nothing.
    drop(lease);
    domain.remove_root(RootKind::Mount, "r").unwrap();
    for (kind, image) in RootKind::ALL.into_iter().zip(roots) {
        let mut root = Root::new(kind, "d".repeat(32));
        root.images.push(image);
        root.boot_id = (kind == RootKind::Mount).then(|| "earlier".into());
        domain.put_root(&root).unwrap();
    }
    let gc = GcOptions { boot_id: Some("this".into()), ..GcOptions::default() };
    let options = TrimOptions { gc, ..options };
    let (plan, _) = domain.trim(&Lines, &live, &options, &|_| ()).unwrap();
    let gone: Vec<_> = plan.victims.iter().flat_map(|victim| victim.refs.clone()).collect();
    assert!(gone.len() == 2 && gone.contains(&"lease".into()) && gone.contains(&"mount".into()));
}

#[test]
fn times_of_last_use_are_exact_to_a_minute() {
    let scratch = Scratch::new("times");
    let domain = scratch.store().domain("default").unwrap();
    let image = put(&domain, "a", &[1], 1);
    for now in [100, 120, 1000] {
        domain.note_use(&image, now).unwrap();
        let noted = if now == 120 { 100 } else { now };
        assert_eq!(domain.noted_use(&image).unwrap(), Some(noted));
    }
    // A torn record means that nobody knows, and the next one repairs it.
    let file = scratch.path.join(format!("domains/default/used/{image}"));
    std::fs::write(&file, "").unwrap();
    assert_eq!(domain.noted_use(&image).unwrap(), None);
    domain.note_use(&image, 2000).unwrap();
    assert_eq!(domain.noted_use(&image).unwrap(), Some(2000));
}
