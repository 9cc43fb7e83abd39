//! Images and the store, through the command line: what a user sees and what a script gets.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use common::{Sandbox, Tar, write_layout};
use serde_json::json;

#[test]
fn a_directory_becomes_an_image_that_can_be_looked_into() {
    let sandbox = Sandbox::new();
    let digest = sandbox.import_tree("box:1");

    let images = sandbox.run(&["images"]);
    images.ok();
    assert_eq!(images.words()[0], ["NAME", "IMAGE", "CREATED"]);
    assert_eq!(images.words()[1][..2], ["box:1", &digest[..12]]);
    let images = sandbox.run(&["images", "--json"]).json();
    let fields: Vec<_> = images[0].as_object().unwrap().keys().collect();
    assert_eq!(fields, ["created", "image", "name"]);
    assert_eq!(images[0]["name"], "box:1");
    assert_eq!(images[0]["image"], digest.as_str());

    let ls = sandbox.run(&["ls", "box:1"]);
    assert_eq!(ls.ok(), "big\netc\nlink\n");
    let ls = sandbox.run(&["ls", "-R", "box:1", "/etc"]);
    assert_eq!(ls.ok(), "/etc/conf.d\n/etc/hostname\n/etc/passwd\n/etc/up\n");
    let long = sandbox.run(&["ls", "-l", "box:1"]);
    long.ok();
    let (link, mode) = (&long.words()[2], long.words()[0][0]);
    assert_eq!((link[0], link[link.len() - 1]), ("lrwxrwxrwx", "/etc/hostname"));
    assert_eq!(mode, "-rw-r--r--");
    let listed = sandbox.run(&["ls", "--json", "box:1", "/big"]).json();
    assert_eq!((&listed[0]["type"], &listed[0]["size"]), (&json!("file"), &json!(100_000)));

    // Links are followed inside the image, absolute ones from its root, and never lead out of it.
    assert_eq!(sandbox.run(&["cat", "box:1", "/link"]).ok(), "node\n");
    assert_eq!(sandbox.run(&["cat", "box:1", "etc/up/etc/hostname", "link"]).ok(), "node\nnode\n");
    assert_eq!(sandbox.run(&["cat", "box:1", "/big"]).ok().len(), 100_000);
    sandbox.run(&["cat", "box:1", "/etc"]).fails_with(1);
    sandbox.run(&["cat", "box:1", "/nothing"]).fails_with(3);
    sandbox.run(&["ls", "box:1", "/big/below"]).fails_with(3);

    let inspected = sandbox.run(&["inspect", "--json", "box:1"]).json();
    assert_eq!(inspected["image"], digest.as_str());
    assert_eq!((&inspected["entries"], &inspected["objects"]), (&json!(7), &json!(3)));
    assert_eq!(inspected["refs"], json!(["box:1"]));
    let text = sandbox.run(&["inspect", "box:1"]);
    assert!(text.ok().contains(&digest), "{}", text.stdout);
}

#[test]
fn images_are_named_by_ref_and_by_digest() {
    let sandbox = Sandbox::new();
    let digest = sandbox.import_tree("box:1");
    let same = [&digest[..4], &digest[..20], &digest, &digest.to_uppercase()];
    for name in same.into_iter().chain([format!("sha256:{digest}").as_str()]) {
        assert_eq!(sandbox.run(&["cat", name, "/etc/hostname"]).ok(), "node\n", "{name}");
    }
    sandbox.run(&["ls", &digest[..3]]).fails_with(3);
    let error = sandbox.run(&["ls", "box"]);
    error.fails_with(3);
    assert_eq!(
        error.stderr,
        "cofolio: no image `box` in domain `default`\nhint: did you mean box:1?\n"
    );
    sandbox.run(&["--domain", "other", "ls", "box:1"]).fails_with(3);

    sandbox.run(&["tag", "box:1", "box:latest"]).ok();
    sandbox.run(&["tag", &digest[..8], "again"]).ok();
    sandbox.run(&["tag", "box:1", "bad\nname"]).fails_with(2);
    let names = sandbox.run(&["images", "--json"]).json();
    let names: Vec<_> = names.as_array().unwrap().iter().map(|i| i["name"].clone()).collect();
    assert_eq!(names, ["again", "box:1", "box:latest"]);
}

/// Removing a name removes nothing that another name keeps; gc takes the rest.
#[test]
fn names_go_first_and_content_with_gc() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    sandbox.run(&["tag", "box:1", "box:2"]).ok();
    // A typo must not cost the names before it.
    sandbox.run(&["rm", "box:1", "typo"]).fails_with(3);
    sandbox.run(&["rm", "box:1", "typo", "--force"]).ok();
    assert_eq!(sandbox.run(&["gc", "--json"]).json()["objects"], 0);
    assert_eq!(sandbox.run(&["cat", "box:2", "/etc/hostname"]).ok(), "node\n");

    sandbox.run(&["rm", "box:2"]).ok();
    let images = sandbox.run(&["images"]);
    assert_eq!(images.words()[1][0], "<none>");
    let planned = sandbox.run(&["gc", "--dry-run", "--json"]).json();
    assert_eq!((&planned["objects"], &planned["images"]), (&json!(3), &json!(1)));
    let done = sandbox.run(&["gc", "--json"]).json();
    assert_eq!(done["bytes"], planned["bytes"]);
    assert_eq!(sandbox.run(&["du", "--json"]).json()["object_bytes"], 0);
    assert_eq!(sandbox.run(&["images"]).ok(), "");
}

/// The config and the layers of an image were only in its ref. `rm` and then `tag DIGEST` gave a ref
/// without them: `run` ran as root, and `export` wrote another image with a single layer.
#[test]
fn an_image_without_a_name_keeps_its_config_and_layers() {
    let sandbox = Sandbox::new();
    let layer = |name: &str| Tar::default().file(name, 0o644, name.as_bytes()).finish();
    let layout = sandbox.path("layout");
    let config = json!({"User": "redis"});
    write_layout(&layout, "one", &[layer("a"), layer("b")], config);
    let source = format!("oci:{}:one", layout.display());
    let imported = sandbox.run(&["import", &source, "--name", "one:1", "--json"]).json();
    let (digest, id) = (imported["image"].as_str().unwrap(), imported["config"].clone());
    let exported = |name: &str| {
        let to = sandbox.path(&name.replace(':', "-"));
        sandbox.run(&["export", name, &format!("oci:{}:one", to.display())]).ok();
        let again = sandbox.run(&[
            "--store",
            &sandbox.text("other-store"),
            "import",
            &format!("oci:{}:one", to.display()),
            "--name",
            "again:1",
            "--json",
        ]);
        let again = again.json();
        assert_eq!((&again["config"], again["layers"].as_array().unwrap().len()), (&id, 2));
    };
    sandbox.run(&["rm", "one:1"]).ok();
    let inspected = sandbox.run(&["inspect", &digest[..12], "--json"]).json();
    assert_eq!(inspected["config"]["config"]["User"], "redis", "{inspected}");
    exported(&digest[..12]);
    sandbox.run(&["tag", digest, "one:2"]).ok();
    sandbox.run(&["gc"]).ok();
    exported("one:2");

    // The same where the name goes to another image.
    sandbox.tree("tree");
    sandbox.run(&["import", &sandbox.text("tree"), "--name", "one:2"]).ok();
    sandbox.run(&["tag", digest, "one:3"]).ok();
    sandbox.run(&["tag", "one:2", "one:3"]).ok();
    sandbox.run(&["tag", digest, "one:4"]).ok();
    sandbox.run(&["rm", "one:3"]).ok();
    exported("one:4");

    // A record that cannot be read is not taken for an image without a config.
    sandbox.run(&["rm", "one:4"]).ok();
    let record = sandbox.path("store").join("domains/default/unnamed").join(digest);
    fs::write(&record, "{").unwrap();
    let refused = sandbox.run(&["tag", digest, "one:5"]);
    assert!(refused.fails_with(4).stderr.contains("import it again"), "{}", refused.stderr);
    let found = sandbox.run(&["fsck"]);
    assert!(found.fails_with(4).stdout.contains("unnamed"), "{}", found.stdout);
    sandbox.run(&["import", &source, "--name", "one:5"]).ok();
    sandbox.run(&["fsck"]).ok();
    sandbox.run(&["rm", "one:5"]).ok();
    sandbox.run(&["fsck"]).ok();
    // A mount keeps an image without a name, and gc takes its layers.
    for layer in fs::read_dir(sandbox.path("store/domains/default/layers")).unwrap() {
        common::remove(&layer.unwrap().path()).unwrap();
    }
    let refused = sandbox.run(&["tag", digest, "one:6"]);
    assert!(refused.fails_with(3).stderr.contains("import the image again"), "{}", refused.stderr);
    sandbox.run(&["gc"]).ok();
    assert!(!record.exists(), "gc leaves the record of an image that is gone");
}

/// The store promises mode 0700, and on a mounted volume it had that of the volume: all users could read every object.
#[test]
fn a_store_that_is_open_to_others_is_told_and_closed() {
    use std::os::unix::fs::PermissionsExt as _;
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let told = |what: &str| sandbox.run(&[what]).stdout.contains("permissions");
    assert!(!told("doctor") && !told("fsck"));
    fs::set_permissions(sandbox.path("store"), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(told("doctor") && told("fsck"));
    sandbox.run(&["fsck", "--repair"]).ok();
    assert!(!told("doctor") && !told("fsck"));
}

/// `fsck`, and `top` without a daemon, believed the records in a run directory that others can write
/// to: only commands that asked for the domain in the usual way checked it.
#[test]
fn every_command_refuses_a_run_directory_of_others() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    fs::set_permissions(sandbox.dir("run"), fs::Permissions::from_mode(0o775)).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    let commands = [&["images"][..], &["fsck"], &["top", "--once"], &["reclaim", "--all"]];
    for command in commands.into_iter().take(if is_root { 4 } else { 2 }) {
        let refused = sandbox.run(command);
        let what = "can be written by other users (mode 775)";
        assert!(refused.fails_with(5).stderr.contains(what), "{command:?}: {}", refused.stderr);
    }
}

#[test]
fn damage_is_found_named_and_told_by_the_exit_code() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    assert!(sandbox.run(&["verify", "box:1"]).ok().contains("sound: 3 objects"));
    assert_eq!(sandbox.run(&["fsck", "--json"]).json()["damaged"], false);

    let listed = sandbox.run(&["ls", "--json", "box:1", "/big"]).json();
    let object = listed[0]["object"].as_str().unwrap();
    let path = sandbox.path("store/domains/default/objects").join(object);
    let mut content = fs::read(&path).unwrap();
    content[50_000] ^= 1;
    if let Err(reason) = common::overwrite(&path, &content) {
        return common::skip("damage_is_found", &reason);
    }

    let verified = sandbox.run(&["verify", "--json", "box:1"]);
    verified.fails_with(4);
    assert_eq!(verified.json()["sound"], false);
    assert_eq!(verified.json()["findings"][0]["kind"], "object-altered");
    let text = sandbox.run(&["fsck"]);
    text.fails_with(4);
    assert!(text.stdout.contains("object-altered") && text.stdout.contains("damaged"));
    assert!(text.stdout.contains("; refs: box:1; files: box:1 /big"), "{}", text.stdout);
    // The size is right, so a look at sizes finds nothing.
    sandbox.run(&["fsck", "--quick"]).ok();

    common::overwrite(&path, b"short").unwrap();
    sandbox.run(&["fsck", "--quick"]).fails_with(4);
    sandbox.run(&["cat", "box:1", "/big"]).fails_with(4);
}

/// One kind of damage at a time: what fsck prints and how it exits, in full and --quick.
#[test]
fn fsck_names_every_kind_of_damage() {
    let layer = Tar::default().file("file", 0o644, b"content of the file").finish();
    let good = Sandbox::new();
    let layout = good.dir("layout");
    write_layout(&layout, "box:1", &[layer], json!({}));
    // (what is done, finding, exit codes of fsck and of fsck --quick)
    type Harm = fn(&Damaged);
    let cases: [(Harm, &str, i32, i32); 24] = [
        (|d| d.remove(&d.object), "object-missing", 4, 4),
        (|d| d.rewrite(&d.object, |bytes| bytes.truncate(3)), "object-truncated", 4, 4),
        (|d| d.rewrite(&d.object, |bytes| bytes[0] ^= 1), "object-altered", 4, 0),
        (|d| d.rewrite(&d.image, |bytes| bytes[1025] ^= 1), "image-altered", 4, 4),
        (|d| d.rewrite(&d.image, |bytes| bytes.truncate(100)), "image-altered", 4, 4),
        (|d| d.fake_image("no image at all"), "image-unreadable", 4, 4),
        (|d| d.rewrite(&d.layer, |bytes| bytes.truncate(20)), "layer-unreadable", 4, 4),
        (|d| fs::write(d.domain.join("refs/box%3A1.json"), "{").unwrap(), "ref-unreadable", 4, 4),
        (|d| d.remove(&d.image), "ref-dangling", 4, 4),
        (|d| d.remove(&d.layer), "ref-dangling", 4, 4),
        (|d| d.remove(&split_of(&d.layer)), "ref-dangling", 4, 4),
        (|d| fs::write(d.store.join("meta.json"), "{").unwrap(), "meta-unreadable", 4, 4),
        (|d| fs::write(d.domain.join("domain.json"), "{").unwrap(), "settings-unreadable", 4, 4),
        (|d| fs::write(d.domain.join("roots/lease/a.json"), "").unwrap(), "root-unreadable", 4, 4),
        (|d| d.fake_root(), "root-dangling", 4, 4),
        (|d| fs::remove_dir(d.domain.join("roots/lease")).unwrap(), "directory-missing", 4, 4),
        (|d| d.signature(d.image_digest(), "x"), "signature-altered", 4, 4),
        (|d| d.signature(&"0".repeat(64), "x"), "signature-orphaned", 0, 0),
        // These were no damage, although `warm` and `profile` refuse them.
        (|d| fs::write(d.profile(), "").unwrap(), "profile-unreadable", 4, 4),
        (|d| fs::create_dir(d.profile()).unwrap(), "profile-unreadable", 4, 4),
        (|d| d.open_up(&d.object), "permissions", 0, 0),
        (|d| fs::write(d.domain.join("objects/notes"), "").unwrap(), "unexpected-entry", 0, 0),
        (|d| fs::create_dir(d.store.join("staging/dead")).unwrap(), "staging-orphaned", 0, 0),
        (|d| fs::remove_dir(d.store.join("staging")).unwrap(), "staging-missing", 0, 0),
    ];
    for (harm, kind, code, quick) in cases {
        let sandbox = Sandbox::new();
        sandbox.run(&["import", "--name", "box:1", layout.to_str().unwrap()]).ok();
        harm(&Damaged::of(&sandbox));

        let text = sandbox.run(&["fsck"]);
        text.fails_with(code);
        assert!(text.stdout.contains(kind), "{kind}: {}", text.stdout);
        let verdict = if code == 0 { "no damage, see above; " } else { "damaged; " };
        assert!(text.stdout.lines().any(|line| line.starts_with(verdict)), "{}", text.stdout);
        let quiet = sandbox.run(&["fsck", "-q"]);
        quiet.fails_with(code);
        assert!(quiet.stdout.contains(kind), "{kind}: {}", quiet.stdout);
        assert!(!quiet.stdout.lines().any(|line| line.starts_with(verdict)), "{}", quiet.stdout);
        let report = sandbox.run(&["fsck", "--json"]);
        report.fails_with(code);
        let report = report.json();
        assert_eq!(report["damaged"], code != 0, "{kind}");
        let kinds: Vec<_> = report["findings"].as_array().unwrap().iter().collect();
        assert!(kinds.iter().any(|finding| finding["kind"] == kind), "{kind}: {kinds:?}");
        let quick_report = sandbox.run(&["fsck", "--quick"]);
        assert_eq!(quick_report.code, quick, "{kind}: {}", quick_report.stdout);
    }
}

fn split_of(layer: &std::path::Path) -> std::path::PathBuf {
    layer.to_string_lossy().replace(".dump.zst", ".split").into()
}

/// An image of one layer, in a store to do harm to.
struct Damaged {
    store: std::path::PathBuf,
    domain: std::path::PathBuf,
    object: std::path::PathBuf,
    image: std::path::PathBuf,
    layer: std::path::PathBuf,
}

impl Damaged {
    fn of(sandbox: &Sandbox) -> Self {
        let store = sandbox.path("store");
        let domain = store.join("domains/default");
        let only = |dir: &std::path::Path| {
            let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
            // How a layer is split has damage of its own.
            let found: Vec<_> =
                paths.filter(|path| !path.to_string_lossy().ends_with(".split")).collect();
            assert_eq!(found.len(), 1, "{}", dir.display());
            found[0].clone()
        };
        let object = only(&only(&domain.join("objects")));
        let (image, layer) = (only(&domain.join("images")), only(&domain.join("layers")));
        Self { object, image, layer, store, domain }
    }

    /// Also where the file may not be written in place.
    fn rewrite(&self, path: &std::path::Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut content = fs::read(path).unwrap();
        change(&mut content);
        self.remove(path);
        fs::write(path, content).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o444)).unwrap();
    }

    fn remove(&self, path: &std::path::Path) {
        common::unlock(path).unwrap();
        fs::remove_file(path).unwrap();
    }

    fn open_up(&self, path: &std::path::Path) {
        common::unlock(path).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
    }

    /// A file with the digest that its name says, and yet no image.
    fn fake_image(&self, content: &str) {
        let digest = cofolio_store::verity::digest(content.as_bytes());
        let path = self.domain.join(format!("images/{digest}.erofs"));
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    }

    fn image_digest(&self) -> &str {
        self.image.file_stem().unwrap().to_str().unwrap()
    }

    /// A file that says of an image what it does not.
    fn signature(&self, image: &str, content: &str) {
        let directory = self.domain.join("signatures").join(image);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("0".repeat(64)), content).unwrap();
    }

    /// Where the profile of the image would be.
    fn profile(&self) -> std::path::PathBuf {
        let directory = self.domain.join("profiles");
        fs::create_dir_all(&directory).unwrap();
        directory.join(self.image_digest())
    }

    fn fake_root(&self) {
        let root = json!({"name": "a", "kind": "lease", "id": "a", "images": ["0".repeat(64)]});
        fs::write(self.domain.join("roots/lease/a.json"), root.to_string()).unwrap();
    }
}

/// From a layout to a layout, an archive and what docker takes, and from there into another store: the same
/// image id, the same image. A directory comes back the same, too.
#[test]
fn what_is_exported_is_the_same_image() {
    let sandbox = Sandbox::new();
    let base = Tar::default().directory("etc/", 0o755).file("etc/base", 0o644, b"base").finish();
    let top = Tar::default().file("etc/top", 0o644, b"top").finish();
    let layout = sandbox.dir("layout");
    write_layout(&layout, "box:1", &[base, top], json!({"Cmd": ["sh"]}));
    let source = format!("oci:{}", layout.display());
    let imported = sandbox.run(&["import", "--json", &source, "--name", "box:1"]).json();
    sandbox.import_tree("tree:1");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let manifest = index["manifests"][0]["digest"].as_str().unwrap();
    let manifest = fs::read(layout.join("blobs/sha256").join(&manifest[7..])).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();

    // What podman and docker call the image id.
    let config = manifest["config"]["digest"].as_str().unwrap();
    let again = sandbox.run(&["import", &source, "--name", "box:1"]);
    assert!(again.words().contains(&vec!["image", "id", config]), "{}", again.stdout);

    let out = |name: &str| sandbox.dir("out").join(name).display().to_string();
    for (how, file) in [("oci", "a"), ("oci-archive", "b.tar"), ("docker-archive", "c.tar")] {
        for compress in ["gzip", "zstd", "none"] {
            let to = format!("{how}:{}", out(&format!("{compress}-{file}")));
            let exported = sandbox.run(&["export", "--json", "box:1", &to, "--compress", compress]);
            let exported = exported.json();
            assert_eq!(exported["name"], "box:1");
            assert_eq!(exported["config"], manifest["config"]["digest"]);
            let other = Sandbox::new();
            let again = other.run(&["import", "--json", &to]).json();
            assert_eq!((&again["image"], &again["name"]), (&imported["image"], &json!("box:1")));
        }
    }
    let to = format!("oci-archive:{}:other/name:2", out("tree.tar"));
    let exported = sandbox.run(&["export", "tree:1", &to]);
    assert!(exported.ok().starts_with("sha256:"), "{}", exported.stdout);
    let again = Sandbox::new().run(&["import", "--json", &to]).json();
    let tree = sandbox.run(&["inspect", "--json", "tree:1"]).json();
    assert_eq!((&again["image"], &again["name"]), (&tree["image"], &json!("other/name:2")));

    sandbox.run(&["export", "none:1", &to]).fails_with(3);
    sandbox.run(&["export", "box:1", "elsewhere:x"]).fails_with(2);
    sandbox.run(&["export", "box:1", &format!("oci:{}", out("tree.tar"))]).fails_with(2);
    // Damage has its own code, names the object, and leaves nothing.
    let object = cofolio_store::verity::digest(b"top").to_string();
    let object = format!("store/domains/default/objects/{}/{}", &object[..2], &object[2..]);
    common::overwrite(&sandbox.path(&object), b"tOp").unwrap();
    let failed = sandbox.run(&["export", "box:1", &format!("oci:{}", out("damaged"))]);
    failed.fails_with(4);
    assert!(failed.stderr.contains("its content has digest"), "{}", failed.stderr);
    assert!(!sandbox.dir("out").join("damaged").exists());
}

#[test]
fn layers_are_known_the_second_time() {
    let sandbox = Sandbox::new();
    let base = Tar::default().directory("etc/", 0o755).file("etc/base", 0o644, b"base").finish();
    let top =
        Tar::default().file("etc/top", 0o644, b"top").file("etc/.wh.base", 0o644, b"").finish();
    let layout = sandbox.dir("layout");
    let config = json!({"Cmd": ["sh", "-c", "true"], "Env": ["A=1"], "User": "app"});
    write_layout(&layout, "box:1", &[base, top], config);
    let source = format!("oci:{}", layout.display());

    let first = sandbox.run(&["import", "--json", &source, "--name", "box:1"]).json();
    assert_eq!((&first["name"], &first["known"]), (&json!("box:1"), &json!(false)));
    assert_eq!(sandbox.run(&["ls", "-R", "box:1"]).ok(), "/etc\n/etc/top\n");
    let second = sandbox.run(&["import", "--json", &source, "--name", "box:2"]).json();
    assert_eq!((&second["image"], &second["known"]), (&first["image"], &json!(true)));

    let text = sandbox.run(&["inspect", "box:1"]);
    assert!(text.ok().contains("sh -c true"), "{}", text.stdout);
    assert!(text.stdout.contains("LAYER"), "{}", text.stdout);
    let inspected = sandbox.run(&["inspect", "--json", "box:1"]).json();
    assert_eq!(inspected["config"]["config"]["User"], "app");
    assert_eq!(inspected["layers"].as_array().unwrap().len(), 2);

    // A blob that is not what its name says: exit code 4, and a store without leftovers.
    let other = sandbox.dir("other");
    write_layout(&other, "x", &[Tar::default().file("a", 0o644, b"a").finish()], json!({}));
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(other.join("index.json")).unwrap()).unwrap();
    let blob = manifest["manifests"][0]["digest"].as_str().unwrap().replace(':', "/");
    let blob = other.join("blobs").join(blob);
    let altered =
        fs::read_to_string(&blob).unwrap().replace("\"schemaVersion\":2", "\"schemaVersion\":3");
    fs::write(&blob, altered).unwrap();
    sandbox.run(&["import", other.to_str().unwrap()]).fails_with(4);
    let staging = fs::read_dir(sandbox.path("store/staging")).unwrap();
    assert_eq!(staging.count(), 0);
    sandbox.run(&["import", sandbox.text("nothing").as_str()]).fails_with(3);
    sandbox.run(&["import", &source, "--label", "x"]).fails_with(2);
}

/// An empty directory was replaced by a new one: its owner and mode were lost, `oci:.` took the caller's own
/// directory away, and a mount point could not be replaced at all.
#[test]
fn an_empty_directory_becomes_the_layout() {
    use std::os::unix::fs::MetadataExt;
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let out = sandbox.dir("out");
    fs::set_permissions(&out, PermissionsExt::from_mode(0o700)).unwrap();
    let inode = || out.metadata().map(|found| (found.ino(), found.mode() & 0o777)).unwrap();
    let before = inode();
    let mut export = sandbox.command(&["export", "box:1", "oci:."]);
    export.current_dir(&out);
    common::run_with_input(export, b"").ok();
    assert_eq!(inode(), before);
    let source = format!("oci:{}", out.display());
    Sandbox::new().run(&["import", &source]).ok();
    // One that fails leaves it empty.
    let empty = sandbox.dir("empty");
    let listed = sandbox.run(&["ls", "--json", "box:1", "/big"]).json();
    let object = listed[0]["object"].as_str().unwrap();
    common::overwrite(&sandbox.path(&format!("store/domains/default/objects/{object}")), b"x")
        .unwrap();
    let to = format!("oci:{}", empty.display());
    sandbox.run(&["export", "box:1", &to]).fails_with(4);
    assert_eq!(fs::read_dir(&empty).unwrap().count(), 0);
    // One that was killed there is gone on with.
    fs::write(empty.join("oci-layout"), "").unwrap();
    sandbox.run(&["fsck", "--repair", "--from", sandbox.path("tree").to_str().unwrap()]).ok();
    sandbox.run(&["export", "box:1", &to]).ok();
}

/// `export IMG erofs:/dev/null` turned the device into a regular file, `oci-archive:/dev/stdout` replaced
/// the symbolic link, and a file that was there was gone without a word.
#[test]
fn only_regular_files_are_replaced_and_only_when_asked() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let out = sandbox.dir("out");
    let path = |name: &str| out.join(name).display().to_string();
    fs::write(out.join("file"), "before").unwrap();
    std::os::unix::fs::symlink("file", out.join("link")).unwrap();
    assert!(Command::new("mkfifo").arg(out.join("pipe")).status().unwrap().success());
    fs::create_dir(out.join("directory")).unwrap();
    let kinds = || {
        let mut kinds: Vec<_> = fs::read_dir(&out)
            .unwrap()
            .map(|entry| entry.map(|e| (e.file_name(), e.file_type().unwrap())).unwrap())
            .collect();
        kinds.sort_by(|a, b| a.0.cmp(&b.0));
        kinds
    };
    let before = kinds();
    let write = |form: &str, name: &str, more: &[&str]| {
        let to = format!("{form}:{}", path(name));
        sandbox.run(&[&["export", "box:1", &to], more].concat())
    };
    for form in ["oci-archive", "docker-archive", "erofs"] {
        for name in ["link", "pipe", "directory"] {
            for more in [&[] as &[&str], &["--replace"]] {
                let refused = write(form, name, more);
                refused.fails_with(2);
                assert!(refused.stderr.contains("not a regular file"), "{}", refused.stderr);
            }
        }
        let refused = write(form, "file", &[]);
        refused.fails_with(2);
        assert!(refused.stderr.contains("--replace"), "{}", refused.stderr);
        assert_eq!(fs::read(out.join("file")).unwrap(), b"before", "{form}");
        assert_eq!(kinds(), before, "{form}");

        write(form, "file", &["--replace"]).ok();
        let replaced = fs::read(out.join("file")).unwrap();
        // Standard output takes the same bytes, and nothing else.
        let piped = sandbox.run(&["export", "box:1", &format!("{form}:-")]);
        piped.ok();
        assert!(piped.bytes == replaced, "{form}: {} bytes", piped.bytes.len());
        fs::write(out.join("file"), "before").unwrap();
    }
    sandbox.run(&["export", "box:1", "erofs:-", "--json"]).fails_with(2);
}

#[test]
fn an_image_file_can_be_looked_into_where_it_is() {
    let sandbox = Sandbox::new();
    let tree = sandbox.tree("tree");
    let tree = tree.to_str().unwrap();
    let (ours, objects) = (sandbox.text("ours"), sandbox.text("objects"));
    let make = ["mkcomposefs", "--print-digest", "--digest-store", &objects, tree, &ours];
    let built = sandbox.run(&make);
    built.ok();
    assert_eq!(sandbox.run(&["mkcomposefs", "--print-digest-only", tree]).ok(), built.stdout);

    // The file can be looked into where it is, its content where its objects are.
    let listed = sandbox.run(&["ls", &ours]);
    assert_eq!(listed.ok(), "big\netc\nlink\n");
    assert_eq!(sandbox.run(&["cat", &ours, "/etc/hostname"]).ok(), "node\n");
    sandbox.run(&["cat", &ours, "/big"]).fails_with(3);
    assert_eq!(sandbox.run(&["cat", "--objects", &objects, &ours, "/big"]).ok().len(), 100_000);
    assert!(sandbox.run(&["inspect", &ours]).ok().contains("composefs form, version 0"));

    // Through dump text and back it is the same image.
    let dump = sandbox.run(&["dump", &ours]);
    dump.ok();
    let from_dump = ["mkcomposefs", "--from-file", "--print-digest-only", "-"];
    let again = sandbox.run_with_input(&from_dump, &dump.bytes);
    assert_eq!(again.ok(), built.stdout);

    sandbox.run(&["mkcomposefs", &sandbox.text("nothing"), &ours]).fails_with(1);
    sandbox.run_with_input(&from_dump, b"/ nonsense\n").fails_with(1);
    sandbox.run(&["ls", tree]).fails_with(1);
    fs::write(sandbox.path("text"), "no image").unwrap();
    sandbox.run(&["ls", sandbox.text("text").as_str()]).fails_with(4);
}

/// A full pipe or a closed one is no error to shout about: `cofolio ls -R image | head` is everyday use.
#[test]
fn a_reader_that_goes_away_ends_the_command_quietly() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    let mut child = sandbox
        .command(&["cat", "box:1", "/big", "/big", "/big"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// Output that cannot be written is a failure, also the last few bytes of it.
#[test]
fn a_full_disk_behind_the_output_is_noticed() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    for args in [&["images"] as &[&str], &["cat", "box:1", "/etc/hostname"], &["images", "--json"]]
    {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = sandbox.command(args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

/// Ctrl-C during an import: exit code 130, nothing published, nothing left.
#[test]
fn an_interrupted_import_leaves_the_store_as_it_was() {
    let sandbox = Sandbox::new();
    sandbox.import_tree("box:1");
    // It gets as far as it can before anything is published: gc, which this test plays, is at work.
    let slow = sandbox.dir("slow");
    fs::write(slow.join("file"), vec![b'y'; 3 << 20]).unwrap();
    let domain = fs::File::open(sandbox.path("store/domains/default")).unwrap();
    rustix::fs::flock(&domain, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut child = sandbox
        .command(&["import", "--name", "slow", slow.to_str().unwrap()])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let staging = sandbox.path("store/staging");
    let started = std::time::Instant::now();
    // Its metadata image is the last that it stages.
    let is_staged = || {
        let import = fs::read_dir(&staging).unwrap().next()?.ok()?.path();
        fs::read_dir(import.join("images")).ok()?.next()
    };
    while is_staged().is_none() {
        assert!(started.elapsed().as_secs() < 60, "the import does not get on");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(domain);

    sandbox.run(&["ls", "slow"]).fails_with(3);
    assert_eq!(fs::read_dir(&staging).unwrap().count(), 0);
    assert_eq!(sandbox.run(&["fsck", "--json"]).json()["damaged"], false);
    assert_eq!(sandbox.run(&["cat", "box:1", "/etc/hostname"]).ok(), "node\n");
}

/// `cat` of an altered object printed the wrong bytes and exited with 0. A small file is checked before it is
/// printed, a large one while it is; the command that the error names restores it.
#[test]
fn cat_of_an_altered_object_fails() {
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    let large = vec![b'l'; (16 << 20) + 5];
    fs::write(tree.join("small"), b"small content").unwrap();
    fs::write(tree.join("large"), &large).unwrap();
    let layout = tree.to_str().unwrap();
    sandbox.run(&["import", "--name", "box:1", layout]).ok();
    for (path, size) in [("/small", 13), ("/large", large.len())] {
        let object = sandbox.object("box:1", path);
        let _ = Command::new("chattr").arg("-i").arg(&object).output();
        fs::remove_file(&object).unwrap();
        fs::write(&object, vec![b'X'; size]).unwrap();
        let ran = sandbox.run(&["cat", "box:1", path]);
        ran.fails_with(4);
        assert_eq!(ran.bytes.is_empty(), path == "/small");
        assert!(ran.stderr.contains("is altered"), "{}", ran.stderr);
        assert!(ran.stderr.contains("`cofolio fsck --repair --from SOURCE`"), "{}", ran.stderr);
    }
}

/// A write over `ulimit -f` killed the process by SIGXFSZ, without a word.
#[test]
fn a_limit_on_file_sizes_is_an_error() {
    let sandbox = Sandbox::new();
    let tree = sandbox.dir("tree");
    fs::write(tree.join("large"), vec![7; 3 << 20]).unwrap();
    let import = sandbox.command(&["import", "--name", "box:1", tree.to_str().unwrap()]);
    let mut limited = Command::new("sh");
    // In blocks of 512 bytes, or of 1024 where sh is bash.
    limited.args(["-c", "ulimit -f 1024; exec \"$@\"", "sh"]).arg(import.get_program());
    limited.args(import.get_args());
    limited.envs(import.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = limited.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("File too large") && said.contains("ulimit -f"), "{said}");
    assert_eq!(fs::read_dir(sandbox.path("store/staging")).unwrap().count(), 0);
}
