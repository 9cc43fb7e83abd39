//! Real images, entry by entry against what GNU tar extracts from the same layers.
//!
//! The images are those that `corpus/build` makes: in `COFOLIO_CORPUS`, or in `corpus/out` below
//! the workspace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cofolio_image::source::Source;

use crate::support::*;

fn corpus() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../corpus/out");
    let path = std::env::var_os("COFOLIO_CORPUS").map_or(root, PathBuf::from);
    path.is_dir().then_some(path)
}

/// Larger images take minutes; they are for `COFOLIO_SOAK=1`. In bytes.
const SIZE_MAX: u64 = 100 << 20;

/// The layouts that are there and small enough.
pub fn layouts() -> Vec<PathBuf> {
    let all = std::env::var_os("COFOLIO_SOAK").is_some();
    let pairs = corpus().map(|corpus| fs::read_dir(corpus).unwrap()).into_iter().flatten();
    let both = pairs.flat_map(|pair| ["old", "new"].map(|v| pair.as_ref().unwrap().path().join(v)));
    both.filter(|l| l.join("index.json").is_file() && (all || size(l) <= SIZE_MAX)).collect()
}

fn size(layout: &Path) -> u64 {
    let blobs = fs::read_dir(layout.join("blobs/sha256")).unwrap();
    blobs.map(|blob| blob.unwrap().metadata().unwrap().len()).sum()
}

/// Unpacks the layers of an image with GNU tar, one over the other, whiteouts by hand.
fn extract(layers: &[PathBuf], to: &Path) {
    fs::create_dir_all(to).unwrap();
    for layer in layers {
        let listing = run(Command::new("tar").args(["--quoting-style=literal", "-tf"]).arg(layer));
        for name in String::from_utf8_lossy(&listing).lines() {
            let path = to.join(name.trim_start_matches("./"));
            let (Some(dir), Some(file)) = (path.parent(), path.file_name()) else { continue };
            let Some(hidden) = file.to_str().and_then(|f| f.strip_prefix(".wh.")) else { continue };
            if hidden == ".wh..opq" {
                for entry in fs::read_dir(dir).into_iter().flatten() {
                    run(Command::new("rm").arg("-rf").arg(entry.unwrap().path()));
                }
            } else {
                run(Command::new("rm").arg("-rf").arg(dir.join(hidden)));
            }
        }
        let mut command = Command::new("tar");
        command.args(["--numeric-owner", "--same-owner", "-p", "--xattrs", "--xattrs-include=*"]);
        command.args(["--acls", "--exclude=.wh.*", "--keep-directory-symlink", "-C"]).arg(to);
        run(command.arg("-xf").arg(layer));
    }
}

#[test]
fn real_images_against_gnu_tar() {
    let test = "real_images_against_gnu_tar";
    if !is_root(test) || !have(test, "tar") {
        return;
    }
    let Some(corpus) = corpus() else {
        println!("SKIP {test}: no images (run corpus/build, or set COFOLIO_CORPUS)");
        return;
    };
    let all = std::env::var_os("COFOLIO_SOAK").is_some();
    let mut compared = 0;
    for pair in fs::read_dir(&corpus).unwrap() {
        for version in ["old", "new"] {
            let layout = pair.as_ref().unwrap().path().join(version);
            if !layout.join("index.json").is_file() || (!all && size(&layout) > SIZE_MAX) {
                continue;
            }
            let bench = Bench::new();
            let source = Source::parse(layout.to_str().unwrap()).unwrap();
            let report = bench.import(&source).unwrap_or_else(|e| panic!("{layout:?}: {e}"));
            let view = bench.view(&report);
            let layers: Vec<PathBuf> = report
                .layers
                .iter()
                .map(|l| layout.join("blobs/sha256").join(l.digest.hex()))
                .collect();
            let extracted = bench.path("extracted");
            extract(&layers, &extracted);
            let mut expected = crate::scan::view_of_directory(&extracted);
            // The root is made by the test if no layer describes it.
            if view.get("/").mtime == (0, 0) {
                expected.0.insert("/".into(), view.get("/").clone());
            }
            crate::scan::compare(&expected, &view, true);
            assert_eq!(report.entries as usize + 1, view.0.len());
            compared += 1;
        }
    }
    if compared == 0 {
        println!("SKIP {test}: {} holds no images", corpus.display());
    }
}
