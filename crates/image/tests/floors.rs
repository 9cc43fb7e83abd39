//! The rooms of this crate form floors, drawn in `src/lib.rs`: a room uses only rooms below its
//! own.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The floor of each room, the lowest is 0, as the drawing has it.
fn floors(lib: &str) -> BTreeMap<String, usize> {
    let drawn = lib.lines().skip_while(|line| *line != "//! ```text").skip(1);
    let drawn: Vec<_> = drawn.take_while(|line| *line != "//! ```").collect();
    let mut floors = BTreeMap::new();
    let mut floor = 0;
    for line in drawn.into_iter().rev() {
        let rooms = line.trim_start_matches("//! ").split("  ").next().unwrap().trim();
        // A line that ends in a comma goes on below: both are one floor.
        if !floors.is_empty() && !rooms.ends_with(',') {
            floor += 1;
        }
        floors.extend(rooms.split(',').map(|room| (room.trim().to_owned(), floor)));
    }
    floors.remove("");
    floors
}

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files(&path, found),
            false => found.push(path),
        }
    }
}

#[test]
fn no_room_uses_one_above_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let lib = fs::read_to_string(src.join("lib.rs")).unwrap();
    let floors = floors(&lib);
    for module in lib.lines().filter_map(|line| line.split("mod ").nth(1)) {
        let room = module.trim_end_matches(';');
        assert!(floors.contains_key(room), "{room} is on no floor: {floors:?}");
    }
    let mut sources = Vec::new();
    files(&src, &mut sources);
    let mut arrows = 0;
    for path in sources {
        let first = path.strip_prefix(&src).unwrap().iter().next().unwrap();
        let room = first.to_str().unwrap().trim_end_matches(".rs");
        let Some(own) = floors.get(room) else { continue };
        for used in fs::read_to_string(&path).unwrap().split("crate::").skip(1) {
            let used = used.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
            if let Some(floor) = floors.get(used) {
                arrows += 1;
                assert!(floor <= own, "{}: {room} uses {used}, which is above it", path.display());
            }
        }
    }
    assert!(arrows > 100, "{arrows}");
}
