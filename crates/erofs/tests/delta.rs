//! A layer with a delta over the image of its base shows what the whole image shows: by a model of
//! overlayfs, and by the kernel's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use cofolio_erofs::tree::{Content, Delta, InodeId, Meta, Payload, Tree, delta};
use cofolio_erofs::write::{WriteOptions, write_layer};
use common::random::{self, Rng};
use common::{TempDir, can_mount, image, parse, rounds, skip, text};
use rustix::fs::{lgetxattr, llistxattr};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A copy of a tree; without what has no delta, and changed as `rng` says, if there is one.
fn copy(tree: &Tree, mut rng: Option<&mut Rng>) -> Tree {
    let mut copy = Tree::new(tree.meta(tree.root()));
    copy.set_xattrs(copy.root(), tree.xattrs(tree.root())).unwrap();
    let mut known: HashMap<InodeId, InodeId> = HashMap::from([(tree.root(), copy.root())]);
    for visit in tree.walk() {
        let content = tree.content(visit.inode);
        let no_path = matches!(content, Content::External { payload: Payload::None, .. });
        let shard = visit.name.len() == 2 && visit.name.iter().all(u8::is_ascii_hexdigit);
        let dir = known.get(&visit.parent).copied().filter(|&dir| copy.is_dir(dir));
        let Some(dir) = dir else { continue };
        let removed = rng.as_mut().is_some_and(|rng| rng.once_in(30));
        if content.is_whiteout() || no_path || removed || shard && visit.depth == 1 {
            continue;
        }
        if let Some(&inode) = known.get(&visit.inode) {
            // Unless it was made a directory.
            let _ = copy.link(dir, visit.name, inode);
            continue;
        }
        let (mut meta, mut content) = (tree.meta(visit.inode), content);
        let other = [7; 32];
        // No user at all: nobody may look into such a directory, root included.
        (meta.uid, meta.gid) = (meta.uid.min(u32::MAX - 1), meta.gid.min(u32::MAX - 1));
        if let Some(rng) = rng.as_mut()
            && rng.once_in(20)
        {
            match rng.below(6) {
                0 => meta.uid ^= 1,
                1 => meta.mtime = meta.mtime.wrapping_add(1),
                2 => content = Content::Symlink(b"elsewhere"),
                3 => content = Content::Directory,
                4 => content = Content::Inline(b"other"),
                _ => content = Content::object(5, &other),
            }
            meta.mode = meta.mode & 0o7777 | content.type_bits();
        }
        let new = copy.insert(dir, visit.name, meta, content).unwrap();
        copy.set_xattrs(new, tree.xattrs(visit.inode)).unwrap();
        known.insert(visit.inode, new);
        if let Some(rng) = rng.as_mut()
            && rng.once_in(15)
        {
            let name = format!("new-{}", rng.below(1000));
            if copy.is_dir(new) {
                let meta = Meta { mode: 0o644, ..meta };
                copy.insert(new, name.as_bytes(), meta, Content::Fifo).unwrap();
            } else {
                let _ = copy.link(dir, name.as_bytes(), new);
            }
        }
    }
    copy
}

/// Base and image, unlike each other here and there.
fn pair(seed: u64) -> (Tree, Tree) {
    let base = copy(&parse(random::dump(seed).as_bytes()), None);
    let image = copy(&base, Some(&mut Rng::new(seed)));
    (base, image)
}

/// What overlayfs shows of a layer over a base, but for which names are one inode: those of one
/// layer still are.
fn overlaid(base: &Tree, layer: &Tree) -> Tree {
    let mut shown = Tree::new(layer.meta(layer.root()));
    shown.set_xattrs(shown.root(), layer.xattrs(layer.root())).unwrap();
    let mut known: HashMap<(bool, InodeId), InodeId> = HashMap::new();
    // Directory to fill, that of the layer, that of the base.
    let mut open = vec![(shown.root(), Some(layer.root()), Some(base.root()))];
    while let Some((to, upper, lower)) = open.pop() {
        let own = upper.map(|dir| layer.children(dir)).unwrap_or_default();
        for child in &own {
            let inode = child.inode;
            if layer.content(inode).is_whiteout() {
                continue;
            }
            let below = lower.and_then(|dir| base.lookup(dir, child.name));
            let below = below.filter(|twin| base.is_dir(*twin) && layer.is_dir(inode));
            let new = put(&mut shown, to, child.name, layer, inode, (true, &mut known));
            if layer.is_dir(inode) {
                open.push((new, Some(inode), below));
            }
        }
        for child in lower.map(|dir| base.children(dir)).unwrap_or_default() {
            if own.iter().all(|hides| hides.name != child.name) {
                let new = put(&mut shown, to, child.name, base, child.inode, (false, &mut known));
                if base.is_dir(child.inode) {
                    open.push((new, None, Some(child.inode)));
                }
            }
        }
    }
    shown
}

fn put(
    shown: &mut Tree,
    dir: InodeId,
    name: &[u8],
    from: &Tree,
    inode: InodeId,
    (is_layer, known): (bool, &mut HashMap<(bool, InodeId), InodeId>),
) -> InodeId {
    if let Some(&there) = known.get(&(is_layer, inode)) {
        shown.link(dir, name, there).unwrap();
        return there;
    }
    let new = shown.insert(dir, name, from.meta(inode), from.content(inode)).unwrap();
    shown.set_xattrs(new, from.xattrs(inode)).unwrap();
    known.insert((is_layer, inode), new);
    new
}

#[test]
fn a_layer_over_its_base_is_the_image() {
    let (mut names, mut shared) = (0, 0);
    for seed in 0..rounds("COFOLIO_DELTAS", 400) {
        let (base, image) = pair(seed);
        let Delta { tree: layer, shared: own } = delta(&base, &image).unwrap().unwrap();
        let (found, expected) = (text(&overlaid(&base, &layer)), text(&image));
        let lines = |text: &'_ [u8]| String::from_utf8_lossy(text).into_owned();
        for (one, other) in lines(&found).lines().zip(lines(&expected).lines()) {
            assert_eq!(one, other, "seed {seed}");
        }
        assert!(found == expected, "seed {seed}: not as long");
        names += image.entry_count();
        shared += own;
        let nothing = delta(&image, &image).unwrap().unwrap();
        assert_eq!((nothing.tree.entry_count(), nothing.shared), (0, image.entry_count()));
    }
    assert!(shared * 4 > names, "{shared} of {names} names are shared: too few to say anything");
}

#[test]
fn what_no_layer_can_say_has_no_delta() {
    let meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 0, mtime_nsec: 0 };
    let tree = |name: &[u8], content: Content<'_>| {
        let mut tree = Tree::new(meta);
        tree.insert(tree.root(), name, meta, content).unwrap();
        tree
    };
    let plain = tree(b"file", Content::Inline(b"x"));
    let whiteout = tree(b"gone", Content::CharDevice(0));
    let shard = tree(b"a7", Content::Directory);
    let nowhere =
        tree(b"file", Content::External { size: 1, digest: None, payload: Payload::None });
    for (base, image) in
        [(&plain, &whiteout), (&whiteout, &plain), (&shard, &plain), (&plain, &nowhere)]
    {
        assert!(delta(base, image).unwrap().is_none(), "{:?}", String::from_utf8(text(image)));
    }
    // As a name of the image it is like any other; and what is in the base already is not asked for
    // a path.
    assert!(delta(&plain, &shard).unwrap().is_some());
    assert!(delta(&nowhere, &nowhere).unwrap().is_some());
}

/// Mounts, in their order, until dropped.
#[derive(Default)]
struct Mounts(Vec<PathBuf>);

impl Mounts {
    fn add(&mut self, source: &Path, at: &Path, kind: &str, options: &str) -> Result<(), String> {
        fs::create_dir_all(at).unwrap();
        let flags = if kind == "erofs" { MountFlags::RDONLY } else { MountFlags::empty() };
        let options = std::ffi::CString::new(options).unwrap();
        mount(source, at, kind, flags, &*options).map_err(|e| format!("{kind}: {e}"))?;
        self.0.push(at.to_owned());
        Ok(())
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for at in self.0.drain(..).rev() {
            let _ = unmount(&at, UnmountFlags::DETACH);
        }
    }
}

/// Everything that can be seen of a tree without reading files: links of directories and numbers of
/// inodes are overlayfs'.
fn seen(top: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open = vec![top.to_path_buf()];
    let mut inodes: HashMap<(u64, u64), usize> = HashMap::new();
    while let Some(path) = open.pop() {
        let stat = match path.symlink_metadata() {
            Ok(stat) => stat,
            Err(error) => {
                lines.push(format!("{:?} {error}", path.strip_prefix(top).unwrap()));
                continue;
            }
        };
        let links = if stat.is_dir() { 0 } else { stat.nlink() };
        // Of names that are one inode, which.
        let count = inodes.len();
        let first = *inodes.entry((stat.dev(), stat.ino())).or_insert(count);
        let target = fs::read_link(&path).unwrap_or_default();
        let mut xattrs = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        if let Ok(len) = llistxattr(&path, &mut buffer) {
            for name in buffer[..len].split(|&b| b == 0).filter(|name| !name.is_empty()) {
                let mut value = vec![0; 1 << 16];
                let len = lgetxattr(&path, name, &mut value).map_err(|e| e.to_string());
                xattrs.push(format!(
                    "{:?}={:?}",
                    name.escape_ascii().to_string(),
                    len.map(|len| value[..len].to_vec())
                ));
            }
        }
        xattrs.sort();
        lines.push(format!(
            "{:?} {:o} {} {} {} {}.{} {} {links} {first} {target:?} {xattrs:?}",
            path.strip_prefix(top).unwrap(),
            stat.mode(),
            stat.uid(),
            stat.gid(),
            if stat.is_dir() { 0 } else { stat.size() },
            stat.mtime(),
            stat.mtime_nsec(),
            stat.rdev(),
        ));
        if stat.is_dir() {
            match fs::read_dir(&path) {
                Ok(below) => {
                    let mut below: Vec<_> = below.map(|entry| entry.unwrap().path()).collect();
                    below.sort();
                    open.extend(below);
                }
                Err(error) => lines.push(error.to_string()),
            }
        }
    }
    lines
}

#[test]
fn the_kernel_shows_the_same() {
    let test = "the_kernel_shows_the_same";
    if !can_mount(test) {
        return;
    }
    let dir = TempDir::new("delta");
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("objects")).unwrap();
    for seed in 0..rounds("COFOLIO_KERNEL_DELTAS", 40) {
        let (base, tree) = pair(seed);
        let layer = delta(&base, &tree).unwrap().unwrap().tree;
        let mut bytes = Vec::new();
        write_layer(&layer, &mut bytes).unwrap();
        let options = WriteOptions::default();
        for (name, bytes) in
            [("base", image(&base, &options)), ("image", image(&tree, &options)), ("layer", bytes)]
        {
            fs::write(path(&format!("{name}.erofs")), bytes).unwrap();
        }
        let mut mounts = Mounts::default();
        for name in ["base", "image", "layer"] {
            let file = path(&format!("{name}.erofs"));
            if let Err(error) = mounts.add(&file, &path(name), "erofs", "") {
                return skip(test, &error);
            }
        }
        let objects = path("objects").display().to_string();
        for (name, layers) in [("whole", vec!["image"]), ("layered", vec!["layer", "base"])] {
            let layers: Vec<_> = layers.iter().map(|l| path(l).display().to_string()).collect();
            let options =
                format!("metacopy=on,redirect_dir=on,lowerdir={}::{objects}", layers.join(":"));
            if let Err(error) = mounts.add(Path::new("overlay"), &path(name), "overlay", &options) {
                return skip(test, &error);
            }
        }
        let (whole, layered) = (seen(&path("whole")), seen(&path("layered")));
        for (one, other) in whole.iter().zip(&layered) {
            assert_eq!(other, one, "seed {seed}");
        }
        assert_eq!(layered.len(), whole.len(), "seed {seed}");
    }
}
