//! The second try of an import that relied on something which went away meanwhile. What goes is
//! taken from inside the import, at a phase that it reports, so that every run takes the same turn.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cofolio_image::error::ImportError;
use cofolio_image::import::{ImportOptions, ImportReport, import};
use cofolio_image::pack::ImageContents;
use cofolio_image::source::Source;
use cofolio_store::task::{Cancel, Event, Phase, Task};
use cofolio_store::{FileKind, FileName, FsckOptions, GcOptions, verity};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use crate::support::*;

const LIBC: &[u8] = b"libc of the base image";
const APP: &[u8] = b"the application";

/// Does something once, when the import has come to a phase, and notes all phases.
struct Meanwhile {
    task: Task,
    phases: Arc<Mutex<Vec<Phase>>>,
}

impl Meanwhile {
    fn new(at: Phase, work: impl FnOnce() + Send + 'static) -> Self {
        let (work, phases) = (Mutex::new(Some(work)), Arc::<Mutex<Vec<Phase>>>::default());
        let seen = phases.clone();
        let task = Task::new(Cancel::default(), move |event| {
            let Event::Phase(phase) = event else { return };
            seen.lock().unwrap().push(phase);
            if phase == at
                && let Some(work) = work.lock().unwrap().take()
            {
                work();
            }
        });
        Self { task, phases }
    }

    fn phases(&self) -> Vec<Phase> {
        self.phases.lock().unwrap().clone()
    }
}

/// The phases of an import that went wrong at its first commit.
fn twice(resolved: bool) -> Vec<Phase> {
    let once = [Phase::Unpack, Phase::Image, Phase::Commit];
    let first = resolved.then_some(Phase::Resolve);
    first.into_iter().chain(once).chain([Phase::Again]).chain(once).collect()
}

fn run(
    bench: &Bench,
    source: &Source,
    name: &str,
    task: &Task,
) -> Result<ImportReport, ImportError> {
    let options = ImportOptions { name: Some(name.to_owned()), ..ImportOptions::default() };
    import(&bench.domain, source, &options, task)
}

/// `rm` and `gc` by somebody else.
fn collect(bench: &Bench, name: &str) {
    bench.domain.remove_ref(name).unwrap();
    bench.domain.gc(&ImageContents, &|| Ok(Vec::new()), &GcOptions::default()).unwrap();
}

fn is_there(bench: &Bench, content: &[u8]) -> bool {
    bench.domain.object_size(&verity::digest(content)).unwrap() == Some(content.len() as u64)
}

/// Everything that is published is complete and of the right content, and nothing is left of the
/// first try.
fn assert_sound(bench: &Bench) {
    let report =
        bench.domain.fsck(&ImageContents, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert_eq!(report.findings, []);
    assert_eq!(fs::read_dir(bench.path("store/staging")).unwrap().count(), 0);
}

/// Takes an object away behind the store's back, or all but its first bytes.
fn damage(bench: &Bench, content: &[u8], keep: Option<usize>) {
    let path = bench.domain.object_path(&verity::digest(content)).unwrap();
    let file = fs::File::open(&path).unwrap();
    if let Ok(flags) = ioctl_getflags(&file) {
        let _ = ioctl_setflags(&file, flags - IFlags::IMMUTABLE);
    }
    // Not written in place: fs-verity, where it is, would not let us.
    fs::remove_file(&path).unwrap();
    if let Some(keep) = keep {
        fs::write(&path, &content[..keep]).unwrap();
        assert!(!is_there(bench, content));
    }
}

/// A base image and another over it. The base's blob stays in both layouts: the second try reads
/// it.
fn base_and_app(bench: &Bench) -> (Source, Source) {
    let base = Blob::gzip(&Tar::new().dir("usr").file("usr/libc", LIBC).end());
    let app = Blob::gzip(&Tar::new().file("app", APP).end());
    let first = Layout::image(bench.path("base"), std::slice::from_ref(&base));
    let second = Layout::image(bench.path("app"), &[base, app]);
    (first.source(), second.source())
}

fn assert_is_app(bench: &Bench, report: &ImportReport) {
    let view = bench.view(report);
    assert_eq!(view.paths(), ["/", "/app", "/usr", "/usr/libc"]);
    assert!(view.is_file("/usr/libc", LIBC) && view.is_file("/app", APP));
    let record = bench.domain.get_ref(&report.name).unwrap().unwrap();
    assert_eq!(record.image, report.image);
    for layer in &record.layers {
        let name = FileName::chain(FileKind::Layer, &layer.chain_id).unwrap();
        assert!(bench.domain.has_named(&name).unwrap(), "{name}");
    }
}

/// The base image is removed and collected after the import found its layer: layer and objects are
/// gone when the import wants to publish an image that names them.
#[test]
fn an_image_is_imported_again_when_gc_took_its_known_layer() {
    let bench = Arc::new(Bench::new());
    let (base, app) = base_and_app(&bench);
    run(&bench, &base, "base", &Task::default()).unwrap();
    let inside = bench.clone();
    let gc = Meanwhile::new(Phase::Image, move || {
        collect(&inside, "base");
        assert!(!is_there(&inside, LIBC));
    });
    let report = run(&bench, &app, "app", &gc.task).unwrap();
    assert_eq!(gc.phases(), twice(true));
    assert!(report.layers.iter().all(|layer| !layer.known), "the second try believes nothing");
    assert_eq!((report.layers.len(), report.objects_new), (2, 2));
    assert_is_app(&bench, &report);
    assert_sound(&bench);
}

/// As above, but another image keeps the object: only the layer's tree is gone, which the ref would
/// name.
#[test]
fn an_image_is_imported_again_when_only_a_layer_went() {
    let bench = Arc::new(Bench::new());
    let (base, app) = base_and_app(&bench);
    run(&bench, &base, "base", &Task::default()).unwrap();
    let tree = bench.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("same"), LIBC).unwrap();
    run(&bench, &Source::Directory { path: tree }, "keeper", &Task::default()).unwrap();
    let inside = bench.clone();
    let gc = Meanwhile::new(Phase::Image, move || {
        collect(&inside, "base");
        assert!(is_there(&inside, LIBC));
    });
    let report = run(&bench, &app, "app", &gc.task).unwrap();
    assert_eq!(gc.phases(), twice(true));
    assert_eq!((report.objects_new, report.objects_known), (1, 1));
    assert_is_app(&bench, &report);
    assert_sound(&bench);
}

/// A disk that loses files, or somebody with `rm`: before the import or in the middle of it. Either
/// way the known layer names an object that is not what it was; the second try writes it anew, and
/// the image that was damaged is whole again, too.
#[test]
fn an_image_repairs_objects_of_a_known_layer() {
    for keep in [None, Some(0), Some(LIBC.len() - 1)] {
        for at in [Phase::Resolve, Phase::Image, Phase::Commit] {
            let bench = Arc::new(Bench::new());
            let (base, app) = base_and_app(&bench);
            run(&bench, &base, "base", &Task::default()).unwrap();
            let inside = bench.clone();
            let loss = Meanwhile::new(at, move || damage(&inside, LIBC, keep));
            let report = run(&bench, &app, "app", &loss.task).unwrap();
            assert_eq!(loss.phases(), twice(true), "{keep:?} at {at:?}");
            assert!(is_there(&bench, LIBC));
            assert_is_app(&bench, &report);
            assert_sound(&bench);
        }
    }
}

fn directory(bench: &Bench, name: &str, files: &[(&str, &[u8])]) -> Source {
    let path = bench.path(name);
    fs::create_dir(&path).unwrap();
    for (name, content) in files {
        fs::write(path.join(name), content).unwrap();
    }
    Source::Directory { path }
}

fn assert_is_directory(bench: &Bench, report: &ImportReport) {
    let view = bench.view(report);
    assert_eq!(view.paths(), ["/", "/app", "/libc"]);
    assert!(view.is_file("/libc", LIBC) && view.is_file("/app", APP));
    let record = bench.domain.get_ref(&report.name).unwrap().unwrap();
    assert_eq!(record.image, report.image);
}

/// A directory has a file that is in the store, until gc takes it.
#[test]
fn a_directory_is_imported_again_when_gc_took_a_known_object() {
    let bench = Arc::new(Bench::new());
    let first = directory(&bench, "first", &[("libc", LIBC)]);
    let second = directory(&bench, "second", &[("libc", LIBC), ("app", APP)]);
    run(&bench, &first, "first", &Task::default()).unwrap();
    let inside = bench.clone();
    let gc = Meanwhile::new(Phase::Image, move || collect(&inside, "first"));
    let report = run(&bench, &second, "second", &gc.task).unwrap();
    assert_eq!(gc.phases(), twice(false));
    assert_eq!((report.objects_new, report.objects_known), (2, 0));
    assert_is_directory(&bench, &report);
    assert_sound(&bench);
}

/// As for images. An object that is damaged before the scan is seen to be, and takes no second try.
#[test]
fn a_directory_repairs_known_objects() {
    for keep in [None, Some(0), Some(LIBC.len() - 1)] {
        for at in [Phase::Unpack, Phase::Image, Phase::Commit] {
            let bench = Arc::new(Bench::new());
            let first = directory(&bench, "first", &[("libc", LIBC)]);
            let second = directory(&bench, "second", &[("libc", LIBC), ("app", APP)]);
            run(&bench, &first, "first", &Task::default()).unwrap();
            let inside = bench.clone();
            let loss = Meanwhile::new(at, move || damage(&inside, LIBC, keep));
            let report = run(&bench, &second, "second", &loss.task).unwrap();
            match at {
                Phase::Unpack => assert!(!loss.phases().contains(&Phase::Again)),
                _ => assert_eq!(loss.phases(), twice(false), "{keep:?} at {at:?}"),
            }
            assert_eq!(report.objects_new, 2);
            assert_is_directory(&bench, &report);
            assert_sound(&bench);
        }
    }
}

/// The second try is the last one, its error is told, and nothing was published. Here it cannot
/// read what the first one did not need: the blob of the known layer.
#[test]
fn there_is_no_third_try() {
    let bench = Arc::new(Bench::new());
    let (base, app) = base_and_app(&bench);
    let report = run(&bench, &base, "base", &Task::default()).unwrap();
    let blob = bench.path("app/blobs/sha256").join(report.layers[0].digest.hex());
    let inside = bench.clone();
    let gc = Meanwhile::new(Phase::Image, move || {
        collect(&inside, "base");
        lose(&blob);
    });
    let error = run(&bench, &app, "app", &gc.task).unwrap_err();
    assert!(!matches!(error, ImportError::Store(_)), "{error}");
    assert_eq!(gc.phases().iter().filter(|phase| **phase == Phase::Again).count(), 1);
    assert_eq!(bench.domain.refs().unwrap(), []);
    assert_sound(&bench);
}

fn lose(blob: &Path) {
    let size = fs::metadata(blob).unwrap().len();
    fs::write(blob, vec![0; usize::try_from(size).unwrap()]).unwrap();
}

/// The same image twice: the second import only makes a ref. If the first ref and the image are
/// gone when it does, it is an import like any other and no "no such image".
#[test]
fn a_known_image_that_gc_took_is_imported() {
    let bench = Arc::new(Bench::new());
    let (_, app) = base_and_app(&bench);
    let first = run(&bench, &app, "first", &Task::default()).unwrap();
    let inside = bench.clone();
    let gc = Meanwhile::new(Phase::Commit, move || collect(&inside, "first"));
    let report = run(&bench, &app, "second", &gc.task).unwrap();
    assert!(!report.known);
    assert_eq!(report.image, first.image);
    assert_is_app(&bench, &report);
    assert_sound(&bench);
}

/// Imports of images that share layers and objects, names that go, and gc, all at once: imports
/// failed with "no layer" where gc had taken one between two looks at it.
#[test]
fn imports_survive_gc_in_a_loop() {
    const IMAGES: u32 = 4;
    let bench = Bench::fast();
    let base = Blob::gzip(&Tar::new().dir("usr").file("usr/libc", LIBC).end());
    let sources: Vec<Source> = (0..IMAGES)
        .map(|number| {
            let own = Tar::new().file("app", APP).file("own", &number.to_le_bytes());
            let layers = [base.clone(), Blob::gzip(&own.end())];
            Layout::image(bench.path(&format!("image-{number}")), &layers).source()
        })
        .collect();
    let done = std::sync::atomic::AtomicBool::new(false);
    let (bench, done) = (&bench, &done);
    std::thread::scope(|scope| {
        let imports: Vec<_> = sources
            .iter()
            .enumerate()
            .map(|(number, source)| {
                scope.spawn(move || {
                    let name = format!("name-{number}");
                    for round in 0..15 {
                        let report = run(bench, source, &name, &Task::default());
                        let report = report.unwrap_or_else(|e| panic!("{name}, {round}: {e:?}"));
                        let record = bench.domain.get_ref(&name).unwrap().unwrap();
                        assert_eq!(record.image, report.image);
                        bench.domain.remove_ref(&name).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(move || {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let all = GcOptions::default();
                match bench.domain.gc(&ImageContents, &|| Ok(Vec::new()), &all) {
                    // An import is being published.
                    Ok(_) | Err(cofolio_store::Error::Busy { .. }) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
        });
        let failed = imports.into_iter().filter_map(|import| import.join().err()).count();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(failed, 0);
    });
    assert_sound(bench);
}
