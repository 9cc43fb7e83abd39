//! A store with one image, in a mount namespace of the test's own.

use std::fs;
use std::path::{Path, PathBuf};

use crate::settings::{Backend, DomainSettings as _};
use cofolio_erofs::tree::{Content, Meta, Payload, Tree, delta};
use cofolio_erofs::write::{WriteOptions, write, write_layer};
use cofolio_store::{
    Base, BoxError, Contents, Digest, Domain, FileKind, ImportOptions, InitOptions, Publish, Ref,
    RootKind, Staging, Store, StoredFile,
};
use tempfile::TempDir;

use crate::mount::{Mounter, kernel, mountinfo};
use crate::run_dir::{RunDir, list};
use cofolio_image::pack::ImageContents;
use cofolio_image::pack::{PackOptions, pack};

/// Prints why and returns, where the test cannot run; else moves this thread into a mount namespace
/// of its own, so that no mount of a test that fails stays on the machine.
macro_rules! needs_mounts {
    () => {
        if let Err(reason) = $crate::mount::tests::fixture::enter_namespace() {
            eprintln!("SKIP {}: {reason}", std::thread::current().name().unwrap_or("test"));
            return;
        }
    };
}
pub(crate) use needs_mounts;

/// Prints why and returns, where the kernel has no inode_share.
macro_rules! needs_inode_share {
    () => {
        let report = $crate::probe::probe(&$crate::probe::Options::default());
        let feature = report.get("inode-share").map(|feature| feature.presence);
        if feature != Some($crate::probe::Presence::Present) {
            let test = std::thread::current();
            let test = test.name().unwrap_or("test");
            return eprintln!("SKIP {test}: this kernel has no inode_share");
        }
    };
}
pub(crate) use needs_inode_share;

pub(crate) fn enter_namespace() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("needs root".to_owned());
    }
    let report = crate::probe::probe(&crate::probe::Options::default());
    if let Some(missing) = report.features.iter().find(|feature| {
        feature.need == crate::probe::Need::Required
            && feature.presence != crate::probe::Presence::Present
    }) {
        return Err(format!("needs {}: {}", missing.name, missing.detail));
    }
    cofolio_sys::mount::unshare_mount_namespace().map_err(|error| error.to_string())
}

/// Names the objects of the fixture's image, whichever is asked for.
pub(crate) struct Known(Vec<(Digest, u64)>);

impl Known {
    /// From a file, for processes that a test starts.
    pub(crate) fn load(path: &Path) -> Self {
        let line = |line: &str| {
            let (digest, size) = line.split_once(' ').unwrap();
            (digest.parse().unwrap(), size.parse().unwrap())
        };
        Self(fs::read_to_string(path).unwrap().lines().map(line).collect())
    }
}

impl Contents for Known {
    fn names(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        match kind {
            FileKind::Image => self.0.iter().for_each(|(digest, size)| visit(*digest, *size)),
            FileKind::Pack | FileKind::Segment => return ImageContents.names(kind, file, visit),
            _ => {}
        }
        Ok(())
    }
}

pub(crate) struct Fixture {
    pub(crate) dir: TempDir,
    pub(crate) domain: Domain,
    pub(crate) image: Digest,
    pub(crate) known: Known,
    pub(crate) files: Vec<(String, Vec<u8>)>,
}

/// An image that was brought into a domain: its objects, with their sizes, and its files.
struct Imported {
    image: Digest,
    known: Vec<(Digest, u64)>,
    files: Vec<(String, Vec<u8>)>,
}

fn import(domain: &Domain, name: &str, inline: &[u8], over_base: bool) -> Imported {
    let staging = domain.begin_import(ImportOptions::default()).unwrap();
    let meta = |mode| Meta { mode, uid: 7, gid: 8, mtime: 1_700_000_000, mtime_nsec: 5 };
    let mut tree = Tree::new(meta(0o040_751));
    let (mut known, mut files) = (Vec::new(), Vec::new());
    tree.insert(tree.root(), b"empty", meta(0o040_755), Content::Directory).unwrap();
    let sub = tree.insert(tree.root(), b"sub", meta(0o040_755), Content::Directory).unwrap();
    for number in 0..FILES {
        let content = vec![u8::try_from(number).unwrap() + 1; 1000 + number * 977];
        let object = staging.put_object(&content).unwrap();
        let name = format!("file{number}");
        let data = Content::External {
            size: object.size,
            digest: Some(&object.digest.0),
            payload: Payload::Object(&object.digest.0),
        };
        tree.insert(sub, name.as_bytes(), meta(0o100_644), data).unwrap();
        known.push((object.digest, object.size));
        files.push((format!("sub/{name}"), content));
    }
    tree.insert(tree.root(), b"small", meta(0o100_600), Content::Inline(inline)).unwrap();
    files.push(("small".to_owned(), inline.to_vec()));
    let root = tree.root();
    let attribute: (&[u8], &[u8]) = (b"user.kind", b"image root");
    tree.set_xattrs(root, [attribute]).unwrap();
    let mut image = staging.image_writer().unwrap();
    write(&tree, &WriteOptions::default(), &mut image).unwrap();
    let image = image.finish().unwrap();
    let mut publish = Publish::named(name, Ref::new(image));
    if over_base {
        publish.bases.push((image, put_base(&staging, &tree)));
    }
    staging.commit(&publish, known.iter().copied()).unwrap();
    Imported { image, known, files }
}

/// How many files the image has.
pub(crate) const FILES: usize = 12;

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::make(false)
    }

    /// The image has a base, of which it has half of its files.
    pub(crate) fn over_base() -> Self {
        Self::make(true)
    }

    /// The base of the image.
    pub(crate) fn base(&self) -> Digest {
        self.domain.base_of(&self.image).unwrap().unwrap().base
    }

    fn make(over_base: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = InitOptions { immutable: false };
        let store = Store::init(&dir.path().join("store"), &options).unwrap();
        let domain = store.domain("default").unwrap();
        let Imported { image, known, files } = import(&domain, "test:1", b"inline", over_base);
        let text: Vec<String> =
            known.iter().map(|(digest, size)| format!("{digest} {size}\n")).collect();
        fs::write(dir.path().join("objects.txt"), text.concat()).unwrap();
        Self { dir, domain, image, known: Known(known), files }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    /// The same, packed, in a domain that is mounted with `inode-share`.
    pub(crate) fn shared() -> Self {
        let fixture = Self::new();
        fixture.pack(&fixture.image);
        fixture
            .domain
            .set_backend(Backend::InodeShare, cofolio_image::pack::segment::Form::Plain)
            .unwrap();
        fixture
    }

    fn pack(&self, image: &Digest) {
        let task = cofolio_store::task::Task::default();
        pack(&self.domain, image, &PackOptions::default(), &task).unwrap();
    }

    /// Another image with the same objects, packed.
    pub(crate) fn another(&self) -> Digest {
        let image = import(&self.domain, "other:1", b"another", false).image;
        self.pack(&image);
        image
    }

    /// A directory to mount at.
    pub(crate) fn target(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn run_dir(&self) -> RunDir {
        RunDir::open(self.path("run")).unwrap()
    }

    pub(crate) fn mounter(&self) -> Mounter<'_> {
        Mounter::new(&self.domain, self.run_dir(), &self.known)
    }

    /// Collects what no root and no mount uses.
    pub(crate) fn gc(&self) -> cofolio_store::GcReport {
        let mounter = self.mounter();
        let live = || mounter.live_images().map_err(Into::into);
        let options = cofolio_store::GcOptions { wait: true, ..Default::default() };
        self.domain.gc(&self.known, &live, &options).unwrap()
    }

    pub(crate) fn object_path(&self, number: usize) -> PathBuf {
        self.domain.object_path(&self.known.0[number].0).unwrap()
    }

    /// Everything in the image reads as it was put in.
    pub(crate) fn check_content(&self, target: &Path) {
        assert_eq!(fs::read(target.join("small")).unwrap(), b"inline");
        self.check_files(target);
    }

    /// So does what both images have.
    pub(crate) fn check_files(&self, target: &Path) {
        for (name, content) in self.files.iter().filter(|(name, _)| name != "small") {
            assert_eq!(&fs::read(target.join(name)).unwrap(), content, "{name}");
        }
        assert_eq!(fs::read_dir(target.join("sub")).unwrap().count(), FILES);
    }

    /// What is mounted below the fixture's directory.
    pub(crate) fn mounts(&self) -> Vec<mountinfo::KernelMount> {
        let base = self.path("");
        let mut mounts = mountinfo::read(Path::new("/")).unwrap();
        mounts.retain(|mount| mount.target.starts_with(&base));
        mounts
    }

    /// No trace of any mount is left, in the kernel, the run directory or the store.
    pub(crate) fn assert_clean(&self, story: &str) {
        let left = self.mounts();
        assert!(left.is_empty(), "{story}: mounts left: {left:?}");
        for dir in ["run/mounts", "run/images/default", "store/domains/default/writable"] {
            let names = list(&self.path(dir)).unwrap();
            assert!(names.is_empty(), "{story}: {dir} holds {names:?}");
        }
        let roots = self.domain.roots(RootKind::Mount).unwrap();
        assert!(roots.is_empty(), "{story}: roots left: {roots:?}");
    }
}

/// Writes an image that has half of the files of this one, and others besides; and the delta from there.
fn put_base(staging: &Staging, tree: &Tree) -> Base {
    let mut base = Tree::new(tree.meta(tree.root()));
    let mut sub = base.root();
    for visit in tree.walk() {
        if visit.parent == tree.root() {
            let meta = tree.meta(visit.inode);
            let content = tree.content(visit.inode);
            let inode = base.insert(base.root(), visit.name, meta, content).unwrap();
            if base.is_dir(inode) {
                sub = inode;
            }
        } else if visit.name.len() % 2 == 1 {
            let meta = tree.meta(visit.inode);
            base.insert(sub, visit.name, meta, tree.content(visit.inode)).unwrap();
        }
    }
    let meta = tree.meta(tree.resolve(b"small").unwrap());
    base.insert(sub, b"gone", meta, Content::Inline(b"not in the image")).unwrap();
    let found = delta(&base, tree).unwrap().unwrap();
    assert!(found.shared > 0);
    let mut writer = staging.image_writer().unwrap();
    write(&base, &WriteOptions::default(), &mut writer).unwrap();
    let base = writer.finish().unwrap();
    let mut writer = staging.image_writer().unwrap();
    write_layer(&found.tree, &mut writer).unwrap();
    Base { base, delta: writer.finish().unwrap(), chain_id: "sha256:base".to_owned() }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // The namespace goes with the thread, but the directory is removed before that.
        for mount in self.mounts().iter().rev() {
            let _ = kernel::unmount(&mount.target, true);
        }
    }
}
