//! The forms an image comes in, and choosing one of several.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cofolio_image::error::ImportError;
use cofolio_image::import::{ImportOptions, import};
use cofolio_image::source::{Platform, Source};
use cofolio_store::task::Task;
use serde_json::json;

use crate::support::*;

fn layers() -> Vec<Blob> {
    vec![
        Blob::gzip(&Tar::new().dir("etc").file("etc/a", b"a").end()),
        Blob::gzip(&Tar::new().file("etc/b", b"b").file("etc/.wh.a", b"").end()),
    ]
}

fn check(view: &View) {
    assert_eq!(view.paths(), ["/", "/etc", "/etc/b"]);
}

/// A tar archive of a directory, its files in any order.
fn archive(dir: &Path, to: &Path) {
    fn add(tar: Tar, root: &Path, dir: &Path) -> Tar {
        let mut tar = tar;
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            tar = if path.is_dir() {
                add(tar.dir(&format!("{name}/")), root, &path)
            } else {
                tar.file(&name, &fs::read(&path).unwrap())
            };
        }
        tar
    }
    fs::write(to, add(Tar::new(), dir, dir).end()).unwrap();
}

#[test]
fn forms_and_autodetection() {
    let bench = Bench::new();
    let layout = Layout::image(bench.path("my:layout"), &layers());
    let oci = bench.path("image.tar");
    archive(&layout.0, &oci);
    let text = |p: &PathBuf| p.to_str().unwrap().to_owned();
    let source = |t: String| Source::parse(&t).unwrap();
    let path = layout.0.clone();
    let as_layout = Source::Layout { path: path.clone(), tag: None };
    assert_eq!(source(text(&path)), as_layout);
    assert_eq!(source(format!("oci:{}", text(&path))), as_layout);
    let tagged = Source::Layout { path: path.clone(), tag: Some("docker.io/x:1".into()) };
    assert_eq!(source(format!("{}:docker.io/x:1", text(&path))), tagged);
    assert_eq!(source(format!("oci:{}:docker.io/x:1", text(&path))), tagged);
    assert_eq!(source(format!("dir:{}", text(&path))), Source::Directory { path: path.clone() });
    assert_eq!(source(text(&oci)), Source::Archive { path: oci.clone(), tag: None });
    let error = Source::parse(&text(&bench.path("gone"))).unwrap_err();
    assert!(
        error.to_string().contains("no such file") && error.to_string().contains("oci-archive:")
    );
    fs::write(bench.path("other.tar"), Tar::new().file("a", b"a").end()).unwrap();
    let error = Source::parse(&text(&bench.path("other.tar"))).unwrap_err();
    assert!(error.to_string().contains("manifest.json"), "{error}");
    fs::write(bench.path("packed.tar.gz"), gzip(&fs::read(&oci).unwrap())).unwrap();
    let error = Source::parse(&text(&bench.path("packed.tar.gz"))).unwrap_err();
    assert!(error.to_string().contains("gzip"), "{error}");
    fs::write(bench.path("cut.tar"), &fs::read(&oci).unwrap()[..1600]).unwrap();
    assert!(matches!(
        Source::parse(&text(&bench.path("cut.tar"))),
        Err(ImportError::Archive { .. })
    ));

    let report = bench.import(&source(text(&path))).unwrap();
    check(&bench.view(&report));
    let again = bench.import(&source(text(&oci))).unwrap();
    assert!(again.known && again.image == report.image && again.name == "image");
    let fresh = Bench::new();
    check(&fresh.view(&fresh.import(&source(text(&oci))).unwrap()));
}

/// An image that is there is recognised by its manifest: its blobs may be gone.
#[test]
fn a_known_manifest_is_not_read_again() {
    let bench = Bench::new();
    let layout = Layout::image(bench.path("image"), &layers());
    let first = bench.import(&layout.source()).unwrap();
    assert!(!first.known);
    let record = bench.domain.get_ref(&first.name).unwrap().unwrap();
    for layer in &first.layers {
        fs::remove_file(layout.0.join("blobs/sha256").join(layer.digest.hex())).unwrap();
    }
    let options = ImportOptions { name: Some("other:name".into()), ..ImportOptions::default() };
    let again = import(&bench.domain, &layout.source(), &options, &Task::default()).unwrap();
    assert!(again.known && again.image == first.image && again.layers.len() == 2);
    let copy = bench.domain.get_ref("other:name").unwrap().unwrap();
    assert_eq!(
        (copy.config, copy.layers, copy.manifest),
        (record.config, record.layers, record.manifest)
    );
}

/// The ref holds what a container needs later, byte for byte.
#[test]
fn the_ref_holds_config_and_layers() {
    let bench = Bench::new();
    let blobs = layers();
    let layout = Layout::image(bench.path("image"), &blobs);
    let labels = [("team".to_owned(), "storage".to_owned())].into();
    let options = ImportOptions { name: Some("app:1".into()), labels, ..ImportOptions::default() };
    let report = import(&bench.domain, &layout.source(), &options, &Task::default()).unwrap();
    let record = bench.domain.get_ref("app:1").unwrap().unwrap();
    assert_eq!(record.image, report.image);
    assert_eq!(record.manifest, report.manifest.map(|digest| digest.to_string()));
    assert_eq!(record.labels["team"], "storage");
    let config = record.config.unwrap();
    // Other engines know the image by this id.
    assert_eq!(report.config.unwrap().to_string(), sha256(config.as_bytes()));
    let path = layout.0.join("blobs/sha256").join(&sha256(config.as_bytes())[7..]);
    assert_eq!(fs::read_to_string(path).unwrap(), config);
    let chain = sha256(format!("{} {}", blobs[0].diff_id, blobs[1].diff_id).as_bytes());
    let found: Vec<_> =
        record.layers.iter().map(|l| (l.chain_id.clone(), l.diff_id.clone())).collect();
    let expected =
        [(blobs[0].diff_id.clone(), blobs[0].diff_id.clone()), (chain, blobs[1].diff_id.clone())];
    assert_eq!(found, expected);
}

#[test]
fn tags_and_platforms() {
    let bench = Bench::new();
    let layout = Layout::new(bench.path("multi"));
    let image = |name: &str| {
        let blob = [Blob::gzip(&Tar::new().file(name, b"").end())];
        layout.manifest(&blob)
    };
    let platform = |mut m: serde_json::Value, os: &str, arch: &str| {
        m["platform"] = json!({"os": os, "architecture": arch});
        m
    };
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [
        platform(image("for-arm64"), "linux", "arm64"),
        platform(image("for-amd64"), "linux", "amd64"),
        platform(image("attestation"), "unknown", "unknown"),
    ]});
    let mut nested = layout.blob(INDEX, index.to_string().as_bytes());
    nested["annotations"] = json!({"org.opencontainers.image.ref.name": "multi"});
    let mut single = image("single");
    single["annotations"] = json!({"io.containerd.image.name": "docker.io/library/single:1"});
    layout.index(&[nested, single]);

    let get = |tag: Option<&str>, platform: &str| {
        let source = Source::Layout { path: layout.0.clone(), tag: tag.map(str::to_owned) };
        let platform = Platform::parse(platform).unwrap();
        let options = ImportOptions { platform, ..ImportOptions::default() };
        import(&bench.domain, &source, &options, &Task::default())
    };
    assert!(bench.view(&get(Some("multi"), "linux/amd64").unwrap()).has("/for-amd64"));
    assert!(bench.view(&get(Some("multi"), "linux/arm64/v8").unwrap()).has("/for-arm64"));
    let single = get(Some("docker.io/library/single:1"), "linux/amd64").unwrap();
    assert!(bench.view(&single).has("/single"));
    assert_eq!(single.name, "docker.io/library/single:1");
    for (tag, platform, words) in [
        (None, "linux/amd64", &["several", "multi", "single:1"][..]),
        (Some("x"), "linux/amd64", &["\"x\"", "multi"]),
        (Some("multi"), "linux/s390x", &["linux/s390x", "linux/arm64"]),
    ] {
        let error = get(tag, platform).unwrap_err();
        assert!(matches!(error, ImportError::Source { .. }), "{error}");
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    }
}

/// skopeo and containerd write what an image is called into the index: so it is called here, unless
/// a tag was asked for. A name that is a tag only goes behind the layout's own name.
#[test]
fn the_index_names_the_image() {
    let bench = Bench::new();
    let layout = Layout::new(bench.path("there"));
    let name_of = |annotations: serde_json::Value, nested: bool, tag: Option<&str>| {
        let blob = [Blob::gzip(&Tar::new().file("f", annotations.to_string().as_bytes()).end())];
        let mut image = layout.manifest(&blob);
        if nested {
            let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [image]});
            image = layout.blob(INDEX, index.to_string().as_bytes());
        }
        image["annotations"] = annotations;
        layout.index(&[image]);
        let source = Source::Layout { path: layout.0.clone(), tag: tag.map(str::to_owned) };
        import(&bench.domain, &source, &ImportOptions::default(), &Task::default()).unwrap().name
    };
    const REF: &str = "org.opencontainers.image.ref.name";
    const FULL: &str = "io.containerd.image.name";
    for nested in [false, true] {
        let name = |annotations| name_of(annotations, nested, None);
        assert_eq!(name(json!({})), "there");
        assert_eq!(name(json!({REF: ""})), "there");
        assert_eq!(name(json!({REF: "redis:7.0.15-1-deb12u7"})), "redis:7.0.15-1-deb12u7");
        assert_eq!(name(json!({REF: "7"})), "there:7");
        assert_eq!(name(json!({FULL: "docker.io/library/redis:7"})), "docker.io/library/redis:7");
        let both = json!({REF: "7", FULL: "docker.io/library/redis:7"});
        assert_eq!(name(both.clone()), "docker.io/library/redis:7");
        assert_eq!(name_of(both, nested, Some("7")), "there:7");
    }
}

/// `docker save` before version 25: uncompressed layers named by ids, one shared by a symbolic
/// link.
#[test]
fn docker_save_of_old() {
    let bench = Bench::new();
    let tars =
        [Tar::new().dir("etc").file("etc/a", b"a").end(), Tar::new().file("etc/b", b"b").end()];
    let config = json!({
        "os": "linux", "architecture": "amd64",
        "rootfs": {"type": "layers", "diff_ids": [sha256(&tars[0]), sha256(&tars[1]), sha256(&tars[0])]},
    })
    .to_string();
    let name = format!("{}.json", &sha256(config.as_bytes())[7..]);
    let manifest = json!([{
        "Config": name, "RepoTags": ["app:1", "app:latest"],
        "Layers": ["1111/layer.tar", "2222/layer.tar", "3333/layer.tar"],
    }]);
    let save = |config: &[u8], layer: &[u8]| {
        Tar::new()
            .dir("1111")
            .file("1111/VERSION", b"1.0")
            .file("1111/layer.tar", &tars[0])
            .file("2222/layer.tar", layer)
            .symlink("3333/layer.tar", "../1111/layer.tar")
            .file(&name, config)
            .file("manifest.json", manifest.to_string().as_bytes())
            .file("repositories", b"{}")
            .end()
    };
    let path = bench.path("save.tar");
    fs::write(&path, save(config.as_bytes(), &tars[1])).unwrap();
    let source = Source::parse(path.to_str().unwrap()).unwrap();
    assert_eq!(source, Source::DockerSave { path: path.clone(), tag: None });
    let report = bench.import(&source).unwrap();
    assert_eq!(report.name, "app:1");
    let view = bench.view(&report);
    assert!(view.is_file("/etc/a", b"a") && view.is_file("/etc/b", b"b"));
    // The second time by its config, without reading layers.
    let tagged = Source::parse(&format!("docker-archive:{}:app:latest", path.display())).unwrap();
    let again = bench.import(&tagged).unwrap();
    assert!(again.known && again.name == "app:latest" && again.image == report.image);

    let fresh = Bench::new();
    let before = fresh.listing();
    fs::write(&path, save(config.as_bytes(), &Tar::new().file("etc/b", b"B").end())).unwrap();
    let error = fresh.import(&source).unwrap_err();
    assert!(matches!(error, ImportError::Digest { .. } | ImportError::DiffId { .. }), "{error}");
    fs::write(&path, save(b"{}", &tars[1])).unwrap();
    assert!(matches!(fresh.import(&source), Err(ImportError::Digest { .. })));
    let missing = Source::DockerSave { path: path.clone(), tag: Some("other".into()) };
    assert!(fresh.import(&missing).unwrap_err().to_string().contains("app:latest"));
    assert_eq!(fresh.listing(), before);
}

/// `docker save` from 25 on is an OCI layout with a manifest.json beside it.
#[test]
fn docker_save_of_today() {
    let bench = Bench::new();
    let blobs = layers();
    let layout = Layout::image(bench.path("layout"), &blobs);
    let config = layout.config(&blobs);
    let blob_path = |digest: &str| format!("blobs/sha256/{}", &digest[7..]);
    let names: Vec<String> = blobs.iter().map(|b| blob_path(&sha256(&b.bytes))).collect();
    let manifest = json!([{
        "Config": blob_path(config["digest"].as_str().unwrap()),
        "RepoTags": ["app:1"], "Layers": names,
    }]);
    fs::write(layout.0.join("manifest.json"), manifest.to_string()).unwrap();
    let path = bench.path("save.tar");
    archive(&layout.0, &path);
    let mut images = Vec::new();
    for text in [path.display().to_string(), format!("docker-archive:{}", path.display())] {
        let fresh = Bench::new();
        let report = fresh.import(&Source::parse(&text).unwrap()).unwrap();
        check(&fresh.view(&report));
        images.push(report.image);
    }
    assert_eq!(images[0], images[1]);
}

/// What skopeo makes of our layout in its own forms, compressions and all.
#[test]
fn skopeo_copies() {
    let test = "skopeo_copies";
    if !have(test, "skopeo") {
        return;
    }
    let bench = Bench::new();
    let layout = Layout::image(bench.path("layout"), &layers());
    let skopeo = |args: &[&str], to: String| {
        let mut command = Command::new("skopeo");
        command.args(["--insecure-policy", "copy", "-q"]).args(args);
        run(command.arg(format!("oci:{}", layout.0.display())).arg(to));
    };
    let dir = |name: &str| bench.path(name).display().to_string();
    skopeo(
        &["--dest-compress-format", "zstd", "--dest-compress"],
        format!("oci:{}:t", dir("zstd")),
    );
    skopeo(&["--dest-decompress"], format!("oci:{}:t", dir("plain")));
    skopeo(&[], format!("oci-archive:{}:t", dir("oci.tar")));
    skopeo(&[], format!("docker-archive:{}:app:1", dir("docker.tar")));
    let mut images = Vec::new();
    for name in ["zstd", "plain", "oci.tar", "docker.tar"] {
        let fresh = Bench::new();
        let source = Source::parse(&dir(name)).unwrap();
        let report = fresh.import(&source).unwrap_or_else(|e| panic!("{name}: {e}"));
        check(&fresh.view(&report));
        images.push(report.image);
    }
    assert!(images.iter().all(|image| *image == images[0]), "{images:?}");
}

/// A full filesystem: the error says how much was missing, and nothing is left behind.
#[test]
fn a_full_store_is_left_as_it_was() {
    let test = "a_full_store_is_left_as_it_was";
    if !is_root(test) {
        return;
    }
    let bench = Bench::new();
    let small = bench.path("small");
    fs::create_dir(&small).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"])
        .arg(&small)
        .output()
        .is_ok_and(|o| o.status.success());
    if !mounted {
        println!("SKIP {test}: cannot mount a tmpfs");
        return;
    }
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(&self.0).status();
        }
    }
    let _unmount = Unmount(small.clone());
    let store = cofolio_store::Store::open_or_init(
        &small.join("s"),
        &cofolio_store::InitOptions::default(),
    )
    .unwrap();
    let domain = store.domain_or_create("default").unwrap();
    let mut random = Random(5);
    let mut tar = Tar::new();
    for at in 0..200 {
        let content: Vec<u8> = (0..50_000).map(|_| random.next() as u8).collect();
        tar = tar.file(&format!("f{at}"), &content);
    }
    let big: Vec<u8> = (0..2_000_000).map(|_| random.next() as u8).collect();
    let one = [Blob::plain(tar.clone().file("big", &big).end())];
    // Upper layers are merged from what was staged, which here is nothing.
    let two = [Blob::plain(tar.end()), Blob::plain(Tar::new().file("big", &big).end())];
    let images = [
        Layout::image(bench.path("one"), &one),
        Layout::image(bench.path("two"), &two),
        Layout::image(bench.path("three"), &[two[0].clone(), two[1].clone(), two[1].clone()]),
    ];
    let list = || {
        let out = run(Command::new("find").arg(&small).args(["-printf", "%p %s\n"]));
        let mut lines: Vec<String> =
            String::from_utf8(out).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let before = list();
    for image in images {
        let result = import(&domain, &image.source(), &ImportOptions::default(), &Task::default());
        // 12 MB do not fit in 4: what is missing is the rest, give or take what the store itself
        // takes.
        match result {
            Err(ImportError::Store(cofolio_store::Error::NoSpace { missing })) => {
                assert!((7_500_000..12_500_000).contains(&missing), "{missing}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(list(), before);
    }
}
