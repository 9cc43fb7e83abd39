//! `cofolio diff` and `cofolio images --sharing` on images whose files and pages can be counted by hand.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use common::{Sandbox, skip};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps};
use serde_json::Value;

const PAGE: usize = 4096;

/// A page that no other number gives.
fn page(number: u8) -> Vec<u8> {
    (0..=250_u8).cycle().take(PAGE).map(|i| number.wrapping_mul(31) ^ i).collect()
}

fn pages(numbers: &[u8]) -> Vec<u8> {
    numbers.iter().flat_map(|number| page(*number)).collect()
}

fn put(root: &Path, name: &str, content: &[u8]) -> PathBuf {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    path
}

/// One time for all that is below a directory, and for itself, so that only what a test changes differs.
fn settle(path: &Path) {
    if path.is_dir() && !path.is_symlink() {
        fs::read_dir(path).unwrap().for_each(|entry| settle(&entry.unwrap().path()));
    }
    let time = Timespec { tv_sec: 1_700_000_000, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn import(sandbox: &Sandbox, tree: &Path, name: &str) {
    sandbox.run(&["import", "--quiet", "--name", name, tree.to_str().unwrap()]).ok();
}

/// Two images. Pages of contents, by letter of who has them:
///
/// ```text
/// shared   same 2 (hard link `again` in both), x 2 (moved), empty 0, meta 1
/// only A   changed 3 (pages 1 2 3), tail 1 (100 bytes), thing 1, hole 2048 in 8 MiB
/// only B   changed 3 (pages 1 9 3), tail 1 (those 100 bytes and zeros), fresh 1 (a page of `same`)
/// ```
fn pair(sandbox: &Sandbox) {
    let tail = vec![b't'; 100];
    let [a, b] = ["a", "b"].map(|name| {
        let root = sandbox.dir(name);
        put(&root, "same", &pages(&[20, 21]));
        fs::hard_link(root.join("same"), root.join("again")).unwrap();
        put(&root, "empty", b"");
        put(&root, "meta", b"meta");
        root
    });
    let moved = [page(30), vec![7]].concat();
    put(&a, "old.d/x", &moved);
    put(&b, "old/x", &moved);
    put(&a, "changed", &pages(&[1, 2, 3]));
    put(&b, "changed", &pages(&[1, 9, 3]));
    put(&a, "tail", &tail);
    put(&b, "tail", &[tail, vec![0; PAGE - 100]].concat());
    put(&a, "thing", b"a file here, a directory there");
    put(&b, "thing/fresh", &page(21));
    let hole = fs::File::create(a.join("hole")).unwrap();
    hole.set_len(8 << 20).unwrap();
    symlink("same", a.join("link")).unwrap();
    symlink("meta", b.join("link")).unwrap();
    fs::set_permissions(b.join("meta"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(a.join("meta"), fs::Permissions::from_mode(0o644)).unwrap();
    settle(&a);
    settle(&b);
    let later = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_800_000_000);
    fs::File::open(b.join("empty")).unwrap().set_modified(later).unwrap();
    import(sandbox, &a, "a:1");
    import(sandbox, &b, "b:1");
}

#[test]
fn counts_what_we_count_by_hand() {
    let sandbox = Sandbox::new();
    pair(&sandbox);
    let ran = sandbox.run(&["diff", "a:1", "b:1", "--files", "--json"]);
    ran.ok();
    let diff = ran.json();
    let tally = |name: &str| ["objects", "pages"].map(|key| diff[name][key].as_u64().unwrap());
    assert_eq!(tally("shared"), [3, 2 + 2 + 1], "{diff}");
    assert_eq!(tally("only_a"), [4, 3 + 1 + 1 + 2048], "{diff}");
    assert_eq!(tally("only_b"), [3, 3 + 1 + 1], "{diff}");
    assert_eq!(diff["shared"]["bytes"], 2 * PAGE + PAGE + 1 + 4);
    // A hard link is read once, wherever it is unpacked.
    assert_eq!(diff["unshared_pages"], (5 + 2053) + (5 + 5));
    assert_eq!(diff["equal_files_pages"], 5 + 2053 + 5);
    assert_eq!([&diff["a"]["files"], &diff["a"]["files_shared"]], [9, 4], "{diff}");
    // 20 21 30 (7, 0…) meta, 1 2 3 9, the tail, thing, zeros.
    let found = &diff["pages"];
    assert_eq!(found["distinct_pages"], 5 + 4 + 1 + 1 + 1, "{found}");
    // 1 and 3, and the tail, which the page cache fills up with zeros.
    assert_eq!(found["a_in_b_pages"], 3, "{found}");
    // The same, and page 21 of `same`.
    assert_eq!(found["b_in_a_pages"], 4, "{found}");
    // The hole was not read.
    assert!(found["read_bytes"].as_u64().unwrap() < 1 << 20, "{found}");

    let changes: Vec<_> = diff["changes"].as_array().unwrap().iter().collect();
    let told: Vec<String> = changes
        .iter()
        .map(|change| {
            let differs: Vec<_> = change["differs"].as_array().unwrap().iter().collect();
            let differs: Vec<_> = differs.iter().map(|value| value.as_str().unwrap()).collect();
            let [path, change] = ["path", "change"].map(|key| change[key].as_str().unwrap());
            format!("{change} {path} {}", differs.join(","))
        })
        .collect();
    assert_eq!(
        told,
        [
            "content /changed content",
            "metadata /empty mtime",
            "removed /hole ",
            "content /link content",
            "metadata /meta mode",
            // A walk meets `old` and what is in it before `old.d`, though `.` is before `/`.
            "added /old ",
            "added /old/x ",
            "removed /old.d ",
            "removed /old.d/x ",
            "content /tail content",
            "content /thing type,mode",
            "added /thing/fresh ",
        ]
    );
    let counts = ["same", "added", "removed", "content", "metadata", "only_mtime"];
    // The same: the root, `again`, `same`.
    assert_eq!(counts.map(|key| diff["paths"][key].as_u64().unwrap()), [3, 3, 3, 4, 2, 1]);
}

#[test]
fn says_it_to_people_and_is_the_same_from_the_other_side() {
    let sandbox = Sandbox::new();
    pair(&sandbox);
    let text = sandbox.run(&["diff", "a:1", "b:1", "--files"]);
    let words = text.words();
    assert!(words.contains(&vec!["only", "in", "A", "4", "8.0", "MiB", "99.9", "%"]), "{words:?}");
    assert!(words.contains(&vec!["metadata", "mode", "/meta"]), "{words:?}");
    assert!(words.contains(&vec!["removed", "8.0", "MiB", "/hole"]), "{words:?}");

    let [ab, ba] = [["a:1", "b:1"], ["b:1", "a:1"]]
        .map(|[x, y]| sandbox.run(&["diff", x, y, "--json"]).json());
    for [one, other] in [["a", "b"], ["only_a", "only_b"], ["shared", "shared"]] {
        assert_eq!(ab[one], ba[other]);
    }
    assert_eq!(ab["pages"]["a_in_b_pages"], ba["pages"]["b_in_a_pages"]);

    // An image and itself: nothing differs, and all of it is saved once.
    let digest = ab["a"]["image"].as_str().unwrap();
    let same = sandbox.run(&["diff", "a:1", &digest[..8], "--json", "--files"]).json();
    assert_eq!(same["changes"], Value::Array(Vec::new()));
    assert_eq!(same["only_a"]["objects"], 0);
    assert_eq!(same["equal_files_pages"], same["a"]["pages"]);
}

/// Content that is missing or cut off is no reason to give figures that are not so.
#[test]
fn damaged_and_missing_content_is_named() {
    let sandbox = Sandbox::new();
    pair(&sandbox);
    sandbox.run(&["diff", "a:1", "c:1"]).fails_with(3);
    let listed = sandbox.run(&["ls", "a:1", "/changed", "--json"]).json();
    let object =
        sandbox.path("store/domains/default/objects").join(listed[0]["object"].as_str().unwrap());
    common::release(&sandbox.path("store"));
    let cut = fs::OpenOptions::new().write(true).open(&object);
    let Ok(cut) = cut else {
        return skip("damaged_and_missing_content_is_named", "the filesystem protects the object");
    };
    cut.set_len(PAGE as u64).unwrap();
    let ran = sandbox.run(&["diff", "a:1", "b:1"]);
    ran.fails_with(4);
    let hex: String = listed[0]["object"].as_str().unwrap().replace('/', "");
    assert!(ran.stderr.contains(&hex), "{}", ran.stderr);
    fs::remove_file(&object).unwrap();
    assert!(sandbox.run(&["diff", "a:1", "b:1"]).fails_with(4).stderr.contains(&hex));
    // What needs no content works.
    sandbox.run(&["diff", "a:1", "b:1", "--no-pages"]).ok();
}

#[test]
fn the_matrix_says_who_has_how_much_of_whom() {
    let sandbox = Sandbox::new();
    // a has pages 1 to 4 in a file each, b has 3 to 6, c has 7 twice.
    for (name, numbers) in [("a:1", 1..=4), ("b:1", 3..=6), ("c:1", 7..=7)] {
        let root = sandbox.dir(name);
        for number in numbers {
            put(&root, &format!("{number}"), &page(number));
            put(&root, &format!("twice/{number}"), &page(number));
        }
        import(&sandbox, &root, name);
    }
    sandbox.run(&["tag", "a:1", "another"]).ok();
    let sharing = sandbox.run(&["images", "--sharing", "--json"]).json();
    let in_pages: Vec<Vec<u64>> = sharing["bytes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            row.as_array().unwrap().iter().map(|b| b.as_u64().unwrap() / PAGE as u64).collect()
        })
        .collect();
    assert_eq!(in_pages, [[4, 2, 0], [2, 4, 0], [0, 0, 1]]);
    assert_eq!(sharing["images"][0]["names"], serde_json::json!(["a:1", "another"]));
    assert_eq!(sharing["images"][2]["exclusive_bytes"], PAGE);

    let text = sandbox.run(&["images", "--sharing"]);
    let rows: Vec<String> = text.words().iter().map(|words| words.join(" ")).collect();
    assert!(rows[1].ends_with("4 16.0 KiB 50 % - 50 % 0 %"), "{rows:?}");
    assert!(rows[3].ends_with("1 4.0 KiB 100 % 0 % 0 % -"), "{rows:?}");

    // More images than a screen has columns for.
    for number in 10..30 {
        let root = sandbox.dir(&format!("many{number}"));
        put(&root, "own", &page(number));
        import(&sandbox, &root, &format!("many:{number}"));
    }
    let text = sandbox.run(&["images", "--sharing"]);
    let rows: Vec<String> = text.words().iter().map(|words| words.join(" ")).collect();
    assert!(rows[0].ends_with("SHARES MOST WITH"), "{rows:?}");
    assert!(rows[1].ends_with("50 % 50 % of 2"), "{rows:?}");
}
