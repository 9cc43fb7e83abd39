//! Keeping a store small and sound: trimming, repair, scrubbing.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;

use common::{Ran, Sandbox, can_mount};

/// A tree whose one large file is its own, as an image.
fn import(sandbox: &Sandbox, name: &str, args: &[&str]) -> Ran {
    let tree = sandbox.path(&format!("tree-{name}"));
    if !tree.exists() {
        sandbox.tree(&format!("tree-{name}"));
    }
    fs::write(tree.join("own"), name.repeat(100_000)).unwrap();
    let tree = tree.to_str().unwrap();
    let ran = sandbox.run(&[&["import", "--name", name, tree], args].concat());
    ran.ok();
    ran
}

fn names(sandbox: &Sandbox) -> Vec<String> {
    let list = sandbox.run(&["images", "--json"]).json();
    let names = list.as_array().unwrap().iter().map(|image| image["name"].as_str().unwrap());
    names.map(str::to_owned).collect()
}

/// Pretends that an image was imported long ago.
fn age(sandbox: &Sandbox, name: &str, created: u64) {
    let path = sandbox.path(&format!("store/domains/default/refs/{name}.json"));
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record["created"] = created.into();
    fs::write(path, record.to_string()).unwrap();
}

#[test]
fn gc_to_a_size_says_what_goes_and_removes_the_oldest() {
    let sandbox = Sandbox::new();
    for (n, name) in ["one", "two", "three", "four"].into_iter().enumerate() {
        import(&sandbox, name, &[]);
        age(&sandbox, name, 1000 + n as u64);
    }
    sandbox.run(&["tag", "--keep", "one", "one"]).ok();
    age(&sandbox, "one", 1);
    let bytes =
        sandbox.run(&["gc", "--json", "-n", "--to", "1T"]).json()["trim"]["bytes_before"].clone();
    let to = (bytes.as_u64().unwrap() - 1).to_string();

    let dry = sandbox.run(&["gc", "--dry-run", "--to", &to]);
    assert!(dry.ok().contains("would be freed"));
    assert!(dry.stderr.contains("would remove two ("), "{}", dry.stderr);
    assert!(!dry.stderr.contains("three") && !dry.stderr.contains("one ("), "{}", dry.stderr);
    assert_eq!(names(&sandbox).len(), 4);

    let report = sandbox.run(&["gc", "--to", &to, "--json"]).json();
    assert_eq!(report["trim"]["victims"][0]["refs"], serde_json::json!(["two"]));
    assert_eq!(report["trim"]["spared"][0][1], "pinned");
    assert_eq!(
        (&report["bytes"], report["images"].as_u64()),
        (&report["trim"]["victims"][0]["bytes"], Some(1))
    );
    assert_eq!(names(&sandbox), ["four", "one", "three"]);

    // By age; unpinned, the oldest goes too.
    sandbox.run(&["tag", "one", "one"]).ok();
    age(&sandbox, "one", 1);
    import(&sandbox, "five", &[]);
    let ran = sandbox.run(&["gc", "--older-than", "30"]);
    ran.ok();
    assert!(ran.stderr.contains("removing one ("), "{}", ran.stderr);
    assert_eq!(names(&sandbox), ["five"]);
    sandbox.run(&["gc", "--to", "big"]).fails_with(2);
    sandbox.run(&["fsck"]).ok();
}

#[test]
fn an_import_over_the_configured_limit_makes_room_and_says_so() {
    let sandbox = Sandbox::new();
    import(&sandbox, "old", &[]);
    age(&sandbox, "old", 1000);
    let config = sandbox.path("c.toml");
    fs::write(&config, "[store.limit]\nsize = '1 MiB'\n").unwrap();
    let config = ["--config", config.to_str().unwrap()];
    // 100,000 bytes that both share, and 300,000 and 700,000 of their own.
    let ran = import(&sandbox, "younger", &config);
    assert!(ran.stderr.contains("removing old ("), "{}", ran.stderr);
    assert_eq!(names(&sandbox), ["younger"]);
    let ran = import(&sandbox, "youngest", &[&config[..], &["--json"]].concat());
    assert_eq!(ran.json()["trim"]["victims"][0]["refs"][0], "younger");

    // What was just imported stays even if it alone is too large, and the import has not failed.
    let tiny = sandbox.path("tiny.toml");
    fs::write(&tiny, "[store.limit]\nsize = '1 KiB'\n").unwrap();
    let ran = import(&sandbox, "last", &["--config", tiny.to_str().unwrap()]);
    assert!(ran.stderr.contains("1 used lately"), "{}", ran.stderr);
    assert_eq!(names(&sandbox), ["last"]);
    // Without a limit nothing is looked at.
    let ran = import(&sandbox, "last", &["--json"]);
    assert!(ran.json().get("trim").is_none());
    fs::write(sandbox.path("days.toml"), "[store.limit]\nsize = '1 KiB'\nkeep_days = 1\n").unwrap();
    import(&sandbox, "next", &["--config", &sandbox.text("days.toml")]);
    assert_eq!(names(&sandbox), ["last", "next"]);
    // A pin stays when the name gets another image.
    sandbox.run(&["tag", "--keep", "last", "last"]).ok();
    import(&sandbox, "last", &[]);
    let plan = sandbox.run(&["gc", "-n", "--json", "--to", "0"]).json()["trim"].clone();
    assert_eq!(
        (plan["victims"].as_array().unwrap().len(), &plan["spared"][0][1]),
        (1, &"pinned".into())
    );
}

/// An image that was in use a moment ago is no stranger, however long ago it was imported; one that is
/// mounted does not go at all.
#[test]
fn mounts_count_as_use() {
    if !can_mount("mounts_count_as_use") {
        return;
    }
    let sandbox = Sandbox::new();
    for name in ["mounted", "was-mounted", "never"] {
        import(&sandbox, name, &[]);
        age(&sandbox, name, 1000);
    }
    let (mnt, was) = (sandbox.dir("mnt"), sandbox.dir("was"));
    sandbox.run(&["mount", "mounted", mnt.to_str().unwrap()]).ok();
    sandbox.run(&["mount", "was-mounted", was.to_str().unwrap()]).ok();
    sandbox.run(&["umount", was.to_str().unwrap()]).ok();
    sandbox.run(&["gc", "--older-than", "1"]).ok();
    assert_eq!(names(&sandbox), ["mounted", "was-mounted"]);
    sandbox.run(&["gc", "--to", "0"]).ok();
    assert_eq!(names(&sandbox), ["mounted"]);
    sandbox.run(&["umount", mnt.to_str().unwrap()]).ok();
}
