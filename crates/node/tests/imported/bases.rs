//! Bases of images with layers in common: where they are, and that an image over its base is the image.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use cofolio_image::compose::base::Based;
use cofolio_image::pack::ImageContents;
use cofolio_node::mount::{MountRequest, Mounter, RunDir, UmountOptions};
use cofolio_node::upkeep::bases::{self, BasesReport};
use cofolio_store::task::Task;
use cofolio_store::{Digest, GcOptions};

use crate::support::*;

/// A layer of more names than a base must have.
fn wide(name: &str) -> Tar {
    let mut tar = Tar::new().dir(name);
    for number in 0..1100 {
        tar = tar.file(&format!("{name}/file{number}"), format!("{name} {number}").as_bytes());
    }
    tar
}

fn upper(name: &str) -> Tar {
    Tar::new()
        .dir("etc")
        .file("etc/name", name.as_bytes())
        .file("one/.wh.file7", b"")
        .file("one/file8", name.as_bytes())
        .link("etc/linked", "one/file9")
}

/// Imports an image of these layers and does the upkeep; gives its digest, and who got a base by that.
fn import(bench: &Bench, name: &str, layers: &[&Blob]) -> (Digest, Vec<Based>) {
    let layers: Vec<Blob> = layers.iter().map(|layer| (*layer).clone()).collect();
    let layout = Layout::image(bench.path(name), &layers);
    let report = bench.import(&layout.source()).unwrap();
    let found = bases::find(&bench.domain, &Task::default()).unwrap();
    assert_eq!(found.failed, [""; 0]);
    (report.image, found.based)
}

fn base_of(bench: &Bench, image: &Digest) -> Option<Digest> {
    bench.domain.base_of(image).unwrap().map(|base| base.base)
}

/// Names with type, owner, size and content of all that is mounted at a path.
fn seen(top: &Path) -> BTreeMap<String, (u32, u32, u64, Vec<u8>)> {
    let mut seen = BTreeMap::new();
    let mut open = vec![top.to_path_buf()];
    while let Some(path) = open.pop() {
        let stat = path.symlink_metadata().unwrap();
        let content = if stat.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
        // Of directories with two layers overlayfs says that they have one link.
        let links = if stat.is_dir() { 0 } else { stat.nlink() };
        let name = path.strip_prefix(top).unwrap().display().to_string();
        seen.insert(name, (stat.mode(), stat.uid(), links, content));
        if stat.is_dir() {
            open.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    seen
}

#[test]
fn bases_are_where_chains_part() {
    let bench = Bench::new();
    let [one, two, three] = ["one", "two", "three"].map(|name| Blob::gzip(&wide(name).end()));
    let [a, b, c] = ["a", "b", "c"].map(|name| Blob::gzip(&upper(name).end()));

    // One alone has none, nor what has nothing in common with it.
    let (first, based) = import(&bench, "first", &[&one, &two, &a]);
    assert_eq!(based, []);
    let (_, based) = import(&bench, "other", &[&three]);
    assert_eq!(based, []);

    // Two layers in common: an image that nobody imported becomes the base of both.
    let (second, based) = import(&bench, "second", &[&one, &two, &b]);
    let mut images: Vec<_> = based.iter().map(|based| based.image).collect();
    images.sort();
    let mut both = [first, second];
    both.sort();
    assert_eq!(images, both);
    let base = base_of(&bench, &first).unwrap();
    assert_eq!(base_of(&bench, &second), Some(base));
    // Directories and their files, but file7, and file8 and file9, which have changed.
    assert!(based.iter().all(|based| based.shared == 2 * 1100 - 3 + 1), "{based:?}");
    assert!(bench.domain.derived_images().unwrap().contains(&base));
    let again = bases::find(&bench.domain, &Task::default()).unwrap();
    assert_eq!(again, BasesReport::default(), "once is enough");

    // The base itself is imported: it is the same image.
    let (named, based) = import(&bench, "named", &[&one, &two]);
    assert_eq!((named, based.len()), (base, 0));
    assert!(!bench.domain.derived_images().unwrap().contains(&base));

    // One that parts earlier: its base is one of the base, too.
    let (third, based) = import(&bench, "third", &[&one, &c]);
    let lowest = base_of(&bench, &third).unwrap();
    assert_eq!(base_of(&bench, &base), Some(lowest));
    assert_eq!(base_of(&bench, &first), Some(base), "nearer is better");
    assert_eq!(based.len(), 2);
    assert_eq!(base_of(&bench, &lowest), None);

    // What is derived stays as long as it is needed.
    let nothing = || Ok(Vec::new());
    let gc = || bench.domain.gc(&ImageContents, &nothing, &GcOptions::default()).unwrap();
    assert_eq!(gc().images, 0);
    for name in ["first", "second", "named", "third"] {
        bench
            .domain
            .remove_ref(&format!("{name}:latest"))
            .or_else(|_| bench.domain.remove_ref(name))
            .unwrap();
    }
    assert_eq!(gc().kept_images, 1);
    assert_eq!(bench.domain.bases().unwrap().len(), 0);
}

#[test]
fn small_bases_are_not_worth_it() {
    let bench = Bench::new();
    let small = Blob::gzip(&Tar::new().dir("etc").file("etc/passwd", b"root").end());
    let [a, b] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    import(&bench, "a", &[&small, &a]);
    assert_eq!(import(&bench, "b", &[&small, &b]).1, []);
    assert_eq!(bench.domain.images().unwrap().len(), 2, "nothing is left of trying");
}

#[test]
fn an_image_over_its_base_shows_what_it_shows_alone() {
    let test = "an_image_over_its_base_shows_what_it_shows_alone";
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIP {test}: needs root");
    }
    let bench = Bench::new();
    let [one, two] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    let [a, b, c] = ["a", "b", "c"].map(|name| Blob::gzip(&upper(name).end()));
    let (first, _) = import(&bench, "first", &[&one, &two, &a]);
    let mounter = || Mounter::new(&bench.domain, RunDir::at(bench.path("run")), &ImageContents);
    let look = |image: Digest| {
        let target = bench.path("mnt");
        let request = MountRequest { create_target: true, ..MountRequest::new(image, &target) };
        if let Err(error) = mounter().mount(&request) {
            eprintln!("SKIP {test}: {error}");
            return None;
        }
        let pins = mounter().pins().unwrap().len();
        let seen = seen(&target);
        mounter().umount(&target, &UmountOptions::default()).unwrap();
        Some((pins, seen))
    };
    let Some((pins, alone)) = look(first) else { return };
    assert_eq!(pins, 1);
    import(&bench, "second", &[&one, &two, &b]);
    let (pins, over) = look(first).unwrap();
    assert_eq!(pins, 2);
    assert!(over == alone, "over a base");
    // And over two of them.
    import(&bench, "third", &[&one, &c]);
    let (pins, over) = look(first).unwrap();
    assert_eq!(pins, 3);
    assert!(over == alone, "over two bases");
    assert_eq!(mounter().pins().unwrap().len(), 0);
}
