//! Bases of images with layers in common: where they are, and that an image over its base is the image.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use cofolio_image::compose::base::Based;
use cofolio_image::pack::{ImageContents, PackOptions, pack};
use cofolio_node::ledger::{Budget, FileOrder, ImageFile, Ledger, LedgerError};
use cofolio_node::mount::{Access, Check, MountRequest, Mounter, UmountOptions};
use cofolio_node::run_dir::RunDir;
use cofolio_node::upkeep::bases::{self, BasesReport};
use cofolio_store::task::{Cancel, Task};
use cofolio_store::{Digest, FileKind, FileName, GcOptions};
use cofolio_sys::cache::{FileMap, page_size};
use rustix::fs::{Advice, fadvise};
use rustix::io::pread;
use rustix::mount::{MountFlags, UnmountFlags};

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

/// A store for images that are mounted.
fn bench(test: &str) -> Option<Bench> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {test}: needs root");
        return None;
    }
    Some(Bench::new())
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
    let Some(bench) = bench(test) else { return };
    let [one, two] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    let [a, b, c] = ["a", "b", "c"].map(|name| Blob::gzip(&upper(name).end()));
    let (first, _) = import(&bench, "first", &[&one, &two, &a]);
    let mounter =
        || Mounter::new(&bench.domain, RunDir::open(bench.path("run")).unwrap(), &ImageContents);
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

/// Inode numbers of a base and of what is over it overlap: the ledger has to tell whose a file is.
#[test]
fn the_ledger_tells_a_base_from_what_is_over_it() {
    let test = "the_ledger_tells_a_base_from_what_is_over_it";
    let Some(bench) = bench(test) else { return };
    let [one, two] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    let [a, b] = ["a", "b"].map(|name| Blob::gzip(&upper(name).end()));
    let (first, _) = import(&bench, "first", &[&one, &two, &a]);
    import(&bench, "second", &[&one, &two, &b]);
    let run = || RunDir::open(bench.path("run")).unwrap();
    let mounter = Mounter::new(&bench.domain, run(), &ImageContents);
    for access in [Access::ReadOnly, Access::Writable] {
        let target = bench.path("mnt");
        let request = MountRequest::new(first, target.clone());
        let request = MountRequest { access, create_target: true, ..request };
        if let Err(error) = mounter.mount(&request) {
            return eprintln!("SKIP {test}: {error}");
        }
        assert_eq!(files_in_use(&bench, first, &target), MAPPED);
        mounter.umount(&target, &UmountOptions::default()).unwrap();
    }
}

const MAPPED: [&str; 5] = ["etc/name", "one/file8", "one/file9", "two/file1", "two/file2"];

/// The files of an image that a new ledger sees in use while this process maps [`MAPPED`] at a
/// mount.
fn files_in_use(bench: &Bench, image: Digest, target: &Path) -> Vec<String> {
    let map = |path: &str| {
        let file = std::fs::File::open(target.join(path)).unwrap();
        let size = file.metadata().unwrap().len();
        FileMap::new(&file, size).unwrap().read_at(0, &mut [0]);
        FileMap::new(&file, size).unwrap()
    };
    let _maps = MAPPED.map(map);
    let run = RunDir::open(bench.path("run")).unwrap();
    let mut ledger = Ledger::new(bench.domain.store().clone(), run);
    ledger.sample_all().unwrap();
    let mut files =
        ledger.files("default", &image, FileOrder::Path, usize::MAX).unwrap().unwrap().files;
    files.retain(|file| file.users > 0);
    let paths = files.into_iter().map(|file| file.path[1..].to_owned());
    // The same content.
    paths.filter(|path| *path != "etc/linked").collect()
}

/// Two minutes after its start the daemon collects garbage, which gave images of running containers
/// a base. Containers that were started later, and that share what was mounted before, were looked
/// up in the tables of base and delta: none of their files was found, and they were in no account.
#[test]
fn the_ledger_knows_what_was_mounted_before_there_was_a_base() {
    let test = "the_ledger_knows_what_was_mounted_before_there_was_a_base";
    let Some(bench) = bench(test) else { return };
    let [one, two] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    let [a, b] = ["a", "b"].map(|name| Blob::gzip(&upper(name).end()));
    let layout = Layout::image(bench.path("first"), &[one.clone(), two.clone(), a]);
    let first = bench.import(&layout.source()).unwrap().image;
    let mounter =
        Mounter::new(&bench.domain, RunDir::open(bench.path("run")).unwrap(), &ImageContents);
    let mount = |name: &str, access: Access, check: Check| {
        let request = MountRequest::new(first, bench.path(name));
        let request = MountRequest { access, check, create_target: true, ..request };
        mounter.mount(&request).map(|record| record.target)
    };
    let before = match mount("before", Access::Writable, Check::None) {
        Ok(target) => target,
        Err(error) => return eprintln!("SKIP {test}: {error}"),
    };
    import(&bench, "second", &[&one, &two, &b]);
    assert!(base_of(&bench, &first).is_some());
    for access in [Access::ReadOnly, Access::Writable] {
        let target = mount("after", access, Check::None).unwrap();
        assert_eq!(files_in_use(&bench, first, &target), MAPPED);
        mounter.umount(&target, &UmountOptions::default()).unwrap();
    }
    mounter.umount(&before, &UmountOptions::default()).unwrap();
    // Likewise one that is measured, beside a mount over the base.
    let over = mount("over", Access::ReadOnly, Check::None).unwrap();
    for access in [Access::ReadOnly, Access::Writable] {
        let target = mount("measured", access, Check::Verify).unwrap();
        assert_eq!(files_in_use(&bench, first, &target), MAPPED);
        mounter.umount(&target, &UmountOptions::default()).unwrap();
    }
    mounter.umount(&over, &UmountOptions::default()).unwrap();
}

/// The table of a base left out the files that no image used so far, and later images over the base
/// shared it: what was used of them was in no account.
#[test]
fn the_ledger_knows_files_of_a_base_that_only_later_images_use() {
    let test = "the_ledger_knows_files_of_a_base_that_only_later_images_use";
    let Some(bench) = bench(test) else { return };
    let [one, two] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    // These remove the base's one/file7.
    let [a, b] = ["a", "b"].map(|name| Blob::gzip(&upper(name).end()));
    let (first, _) = import(&bench, "first", &[&one, &two, &a]);
    import(&bench, "second", &[&one, &two, &b]);
    let run = || RunDir::open(bench.path("run")).unwrap();
    let mounter = Mounter::new(&bench.domain, run(), &ImageContents);
    let mount = |image: Digest, name: &str| {
        let request = MountRequest::new(image, bench.path(name));
        let request = MountRequest { create_target: true, ..request };
        mounter.mount(&request).map(|record| record.target)
    };
    let before = match mount(first, "before") {
        Ok(target) => target,
        Err(error) => return eprintln!("SKIP {test}: {error}"),
    };
    let mut ledger = Ledger::new(bench.domain.store().clone(), run());
    ledger.sample_all().unwrap();
    let nothing = || Ok(vec![first]);
    let gc = || bench.domain.gc(&ImageContents, &nothing, &GcOptions::default()).unwrap();
    // The second time, the file has been forgotten, and another one has its place in the index.
    for name in ["third", "fourth"] {
        let own = Blob::gzip(&Tar::new().dir("etc").file("etc/name", name.as_bytes()).end());
        let (image, _) = import(&bench, name, &[&one, &two, &own]);
        assert_eq!(base_of(&bench, &image), base_of(&bench, &first));
        let target = mount(image, name).unwrap();
        ledger.sample_all().unwrap();
        // Uses count from the next tick after a new object was taken up.
        std::thread::sleep(Duration::from_millis(200));
        let file = std::fs::File::open(target.join("one/file7")).unwrap();
        let size = file.metadata().unwrap().len();
        let map = FileMap::new(&file, size).unwrap();
        map.read_at(0, &mut [0]);
        ledger.sample_all().unwrap();
        let files =
            ledger.files("default", &image, FileOrder::Path, usize::MAX).unwrap().unwrap().files;
        let used = files.iter().filter(|file| file.users > 0).map(|file| file.path.as_str());
        assert_eq!(used.collect::<Vec<_>>(), ["/one/file7"], "{name}");
        drop((map, file));
        mounter.umount(&target, &UmountOptions::default()).unwrap();
        bench.domain.remove_ref(name).unwrap();
        gc();
        ledger.sample_all().unwrap();
    }
    mounter.umount(&before, &UmountOptions::default()).unwrap();
}

/// Opened files of a base were in no account. The number that tells a file of the base was learnt from one file of it:
/// here another layer has removed that. And it was not learnt again for a view that was mounted anew and had
/// the same number as before, but other ones for its layers.
#[test]
fn the_ledger_sees_opened_files_of_a_base() {
    let test = "the_ledger_sees_opened_files_of_a_base";
    let Some(bench) = bench(test) else { return };
    let [one, two] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    let own = |name: &str| Tar::new().dir("etc").file("etc/name", name.as_bytes());
    let removed = (0..1000).map(|number| format!("one/.wh.file{number}"));
    let a = Blob::gzip(&removed.fold(own("a"), |tar, path| tar.file(&path, b"")).end());
    let b = Blob::gzip(&own("b").end());
    let (image, _) = import(&bench, "first", &[&one, &two, &a]);
    import(&bench, "second", &[&one, &two, &b]);
    assert!(base_of(&bench, &image).is_some());
    let run = || RunDir::open(bench.path("run")).unwrap();
    let mounter = Mounter::new(&bench.domain, run(), &ImageContents);
    let request = MountRequest::new(image, bench.path("mnt"));
    let request = MountRequest { create_target: true, ..request };
    let mut ledger = Ledger::new(bench.domain.store().clone(), run());
    ledger.refresh(&Budget::UNLIMITED).unwrap();
    if let Err(error) = ledger.watch_opens() {
        return eprintln!("SKIP {test}: {error}");
    }
    let mut is_again = false;
    // Other tests of this program mount meanwhile.
    for (turn, number) in (0..16).step_by(2).cycle().take(80).enumerate() {
        // Every second one of the lowest numbers is free.
        let others = Others(bench.path("others"));
        (0..16).for_each(|number| others.mount(number));
        (1..16).step_by(2).for_each(|number| others.umount(number));
        let before = match mounter.mount(&request) {
            Ok(record) => record.target,
            Err(error) if turn == 0 => return eprintln!("SKIP {test}: {error}"),
            Err(error) => panic!("{error}"),
        };
        let number_of = |path: &Path| std::fs::metadata(path).unwrap().dev();
        let (view, layer) = (number_of(&before), number_of(&before.join("two/file0")));
        ledger.sample_all().unwrap();
        mounter.umount(&before, &UmountOptions::default()).unwrap();
        // The kernel gives the lowest number that is free. So the numbers from this one on move.
        others.umount(number);
        let target = mounter.mount(&request).unwrap().target;
        ledger.sample_all().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let path = format!("two/file{}", turn + 1);
        // What the ledger's own process opens is nobody's use.
        let mut opener = Command::new("sh");
        opener.args(["-c", "exec 3<\"$0\" && cat <&3 && read x"]).arg(target.join(&path));
        let mut opener = opener.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        opener.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        ledger.drain_opens(&Budget::UNLIMITED).unwrap();
        ledger.sample_all().unwrap();
        let files =
            ledger.files("default", &image, FileOrder::Path, usize::MAX).unwrap().unwrap().files;
        let is_used = files.iter().any(|file| file.path[1..] == path && file.users > 0);
        is_again |= number_of(&target) == view && number_of(&target.join("two/file0")) != layer;
        assert!(is_used, "{path}, a view had its number again, and its layer another: {is_again}");
        opener.kill().unwrap();
        opener.wait().unwrap();
        mounter.umount(&target, &UmountOptions::default()).unwrap();
        ledger.refresh(&Budget::UNLIMITED).unwrap();
        if is_again {
            break;
        }
    }
    assert!(is_again);
}

/// Filesystems that hold device numbers.
struct Others(PathBuf);

impl Others {
    fn at(&self, number: usize) -> PathBuf {
        self.0.join(number.to_string())
    }

    fn mount(&self, number: usize) {
        std::fs::create_dir_all(self.at(number)).unwrap();
        let flags = MountFlags::empty();
        rustix::mount::mount("none", self.at(number), "tmpfs", flags, None).unwrap();
    }

    fn umount(&self, number: usize) {
        rustix::mount::unmount(self.at(number), UnmountFlags::empty()).unwrap();
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for other in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let _ = rustix::mount::unmount(other.path(), UnmountFlags::DETACH);
        }
    }
}

/// Figures were asked for in the middle of a round over all objects, and those that it had looked
/// at already were not looked at again.
#[test]
fn all_figures_now_are_of_all_objects() {
    let bench = Bench::new();
    let layer = Blob::gzip(&wide("one").end());
    let layout = Layout::image(bench.path("image"), &[layer]);
    let image = bench.import(&layout.source()).unwrap().image;
    let mut ledger =
        Ledger::new(bench.domain.store().clone(), RunDir::open(bench.path("run")).unwrap());
    ledger.refresh(&Budget::UNLIMITED).unwrap();
    let files =
        ledger.files("default", &image, FileOrder::Path, usize::MAX).unwrap().unwrap().files;
    let open = |file: &ImageFile| {
        std::fs::File::open(bench.domain.object_path(&file.object).unwrap()).unwrap()
    };
    files.iter().for_each(|file| _ = std::io::copy(&mut open(file), &mut std::io::sink()).unwrap());
    let resident = |ledger: &Ledger| ledger.report().unwrap().domains[0].resident_bytes;
    while resident(&ledger) == 0 {
        assert!(!ledger.sample_residency(&Budget::of(Duration::from_micros(300))));
    }
    for file in files.iter().map(open) {
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
    ledger.sample_all().unwrap();
    assert_eq!(resident(&ledger), 0);
}

/// At SIGTERM the daemon went on with its first look at everything.
#[test]
fn a_look_at_everything_is_cancelled() {
    let bench = Bench::new();
    let cancel = Cancel::default();
    let run = RunDir::open(bench.path("run")).unwrap();
    let mut ledger = Ledger::new(bench.domain.store().clone(), run).with_cancel(cancel.clone());
    ledger.sample_all().unwrap();
    cancel.cancel();
    assert!(matches!(ledger.sample_all(), Err(LedgerError::Cancelled)));
}

/// The delta and the base that an image is mounted from, and packs, were in no figure: only the image's own file was.
///
/// The kernel took pages of files that had just been read, once in some hundred runs. So the report is compared with
/// what mincore(2) says before and after it.
#[test]
fn all_metadata_is_counted_once() {
    let bench = Bench::new();
    let [one, two] = ["one", "two"].map(|name| Blob::gzip(&wide(name).end()));
    let [a, b] = ["a", "b"].map(|name| Blob::gzip(&upper(name).end()));
    let images = [("first", &a), ("second", &b)]
        .map(|(name, top)| import(&bench, name, &[&one, &two, top]).0);
    pack(&bench.domain, &images[0], &PackOptions::default(), &Task::default()).unwrap();
    let files = |kind| bench.domain.named(kind).unwrap();
    let files = [files(FileKind::Image), files(FileKind::Pack)].concat();
    assert_eq!(files.len(), 6, "two images, their deltas, a base, and a pack: {files:?}");
    let forget = |name: &FileName| {
        let file = bench.domain.open_named(name).unwrap();
        fadvise(file.descriptor().unwrap(), 0, None, Advice::DontNeed).unwrap();
    };
    let read = |name: &FileName| {
        let file = bench.domain.open_named(name).unwrap();
        let mut bytes = vec![0; usize::try_from(file.size().unwrap()).unwrap()];
        assert_eq!(pread(file.descriptor().unwrap(), &mut bytes, 0).unwrap(), bytes.len());
    };
    let resident = |name: &FileName| {
        let file = bench.domain.open_named(name).unwrap();
        let map = FileMap::new(file.descriptor().unwrap(), file.size().unwrap()).unwrap();
        map.resident_pages().unwrap() * page_size()
    };
    let report = || {
        let mut ledger =
            Ledger::new(bench.domain.store().clone(), RunDir::open(bench.path("run")).unwrap());
        ledger.sample_all().unwrap();
        let report = ledger.report().unwrap();
        let of_image = |image| report.images.iter().find(|it| it.image == image).unwrap();
        (report.domains[0].metadata_bytes, images.map(|image| of_image(image).metadata_bytes))
    };
    let count = || {
        let mut counted = (0, [0, 0]);
        for name in &files {
            let bytes = resident(name);
            counted.0 += bytes;
            for (image, counted) in images.iter().zip(&mut counted.1) {
                let delta = bench.domain.base_of(image).unwrap().unwrap().delta;
                if [*image, delta].contains(&name.image().unwrap()) {
                    *counted += bytes;
                }
            }
        }
        counted
    };
    files.iter().for_each(forget);
    assert_eq!(report(), (0, [0, 0]), "to count reads nothing");
    let mut expected = count();
    for name in &files {
        read(name);
        assert_ne!(resident(name), 0, "{name}");
        let reported = (0..10).find_map(|_| {
            expected = count();
            let reported = report();
            (count() == expected).then_some(reported)
        });
        assert_eq!(reported.expect("some look without a change"), expected, "{name}");
    }
    assert!(expected.1.iter().sum::<u64>() < expected.0, "the base is no image of its own");
}
