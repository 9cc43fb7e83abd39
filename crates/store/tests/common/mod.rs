//! What the tests of this crate share.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "shared by several test binaries, none of which uses all of it; a failure may panic, a skip is told"
)]

pub mod sim;
pub mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cofolio_store::task::Task;
use cofolio_store::{
    Base, BoxError, Contents, Digest, Domain, Error, FileKind, FileName, FsckOptions,
    ImportOptions, InitOptions, Layer, Publish, Ref, Staging, Store, StoredFile, verity,
};

/// A directory that is removed with everything in it, immutable files included.
pub struct Scratch {
    pub path: PathBuf,
}

impl Scratch {
    pub fn new(name: &str) -> Self {
        Self::below(&std::env::temp_dir(), name)
    }

    pub fn below(parent: &Path, name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("cofolio-store-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self { path }
    }

    pub fn store(&self) -> Store {
        Store::open_or_init(&self.path, &InitOptions::default()).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        make_mutable(&self.path);
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// What is in a store may be immutable: it could not be removed.
pub fn make_mutable(directory: &Path) {
    let _ = std::process::Command::new("chattr").args(["-R", "-f", "-i"]).arg(directory).output();
}

/// Bytes that differ from block to block and from seed to seed.
pub fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A stand-in for a metadata image: lines of digest and size. The store does not look into images.
pub fn image_of(staging: &Staging, objects: &[(Digest, u64)]) -> Digest {
    let mut image = staging.image_writer().unwrap();
    for (digest, size) in objects {
        writeln!(image, "{digest} {size}").unwrap();
    }
    image.write_all(b"end\n").unwrap();
    image.finish().unwrap()
}

/// Reads the stand-ins that [`image_of`] makes; layers have the same form.
pub struct Lines;

impl Lines {
    fn read(file: &StoredFile, visit: &mut dyn FnMut(Digest, u64)) -> Result<(), BoxError> {
        let text = String::from_utf8(file.read_all(1 << 30)?)?;
        // An image that is cut must not pass for one that names less.
        let body = text.strip_suffix("end\n").ok_or("it has no end")?;
        for line in body.lines() {
            let (digest, size) = line.split_once(' ').ok_or("a line without a size")?;
            visit(digest.parse()?, size.parse()?);
        }
        Ok(())
    }
}

impl Contents for Lines {
    fn names(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        match kind {
            // It names nothing that must stay for its sake.
            FileKind::Segment => Self::read(file, &mut |_, _| ()),
            _ => Self::read(file, visit),
        }
    }

    fn image_paths(
        &self,
        image: &StoredFile,
        wanted: &dyn Fn(&Digest) -> bool,
        found: &mut dyn FnMut(Digest, &[u8]),
    ) -> Result<(), BoxError> {
        Self::read(image, &mut |digest, size| {
            if wanted(&digest) {
                found(digest, format!("/a file of {size} bytes").as_bytes());
            }
        })
    }
}

/// An image file with a filesystem in it, mounted; both go when dropped.
pub struct LoopMount {
    volume: volume::Volume,
    _scratch: Scratch,
}

impl LoopMount {
    pub fn new(kind: &str) -> Result<Self, String> {
        let scratch = Scratch::new(kind);
        // 400 MB, sparse: xfs wants 300 at least.
        let make = |options: &[&str]| volume::Volume::new(&scratch.path, kind, 400, options);
        // ext4 has fs-verity only if it was made with it, and a kernel without cannot mount that.
        // Before 6.3 its blocks had to be pages, too.
        let verity = (kind == "ext4").then(|| make(&["-b", "4096", "-O", "verity"]));
        let volume = match verity {
            Some(Ok(volume)) => volume,
            _ => make(&[])?,
        };
        Ok(Self { volume, _scratch: scratch })
    }

    pub fn directory(&self) -> &Path {
        &self.volume.directory
    }
}

/// Runs a test on every filesystem that can be had here.
pub fn on_each(test: &str, body: impl Fn(&str, &Path)) {
    body("temporary directory", &std::env::temp_dir());
    for kind in ["ext4", "xfs", "btrfs"] {
        match LoopMount::new(kind) {
            Ok(mount) => body(kind, mount.directory()),
            Err(reason) => println!("SKIP {test} on {kind}: {reason}"),
        }
    }
}

/// Imports content of these sizes under a name; gives it.
pub fn put(domain: &Domain, name: &str, sizes: &[usize]) -> Vec<Vec<u8>> {
    let seeded = sizes.iter().zip(1..);
    let pieces: Vec<_> = seeded.map(|(size, seed)| content(*size, seed)).collect();
    let options = ImportOptions { buffer_bytes_max: 1 << 16, ..ImportOptions::default() };
    import(domain, name, &pieces, Some("sha256:layer"), options).unwrap();
    pieces
}

/// fsck, which hashes everything, finds nothing.
pub fn is_clean(domain: &Domain, contents: &dyn Contents) {
    let report = domain.fsck(contents, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert_eq!(report.findings, []);
}

/// Packs an image: its objects are named in stand-ins for segments, `count` in each, unless one names them already.
pub fn pack(
    domain: &Domain,
    image: &Digest,
    count: usize,
    options: ImportOptions,
) -> Result<Vec<Digest>, Error> {
    let mut objects = BTreeMap::new();
    let read = |file: &StoredFile, objects: &mut BTreeMap<_, _>| {
        let insert = &mut |digest, size| {
            objects.insert(digest, size);
        };
        Lines::read(file, insert).unwrap();
    };
    read(&domain.open_image(image)?, &mut objects);
    objects.retain(|_, size| *size > 0);
    let mut segments = Vec::new();
    for segment in domain.segments()? {
        let mut known = BTreeMap::new();
        read(&domain.open_segment(&segment)?, &mut known);
        let before = objects.len();
        objects.retain(|object, _| !known.contains_key(object));
        if objects.len() < before {
            segments.push(segment);
        }
    }
    let staging = domain.begin_import(options)?;
    for objects in objects.into_iter().collect::<Vec<_>>().chunks(count) {
        let lines = objects.iter().map(|(object, size)| format!("{object} {size}\n"));
        let text = lines.chain(["end\n".to_owned()]).collect::<String>();
        let digest = verity::digest(text.as_bytes());
        let mut file = staging.file_writer()?;
        file.append(text.as_bytes())?;
        file.finish(&FileName::content(FileKind::Segment, &digest))?;
        segments.push(digest);
    }
    put_pack(staging, image, &segments)?;
    Ok(segments)
}

/// Publishes a stand-in for a pack over these segments.
pub fn put_pack(staging: Staging, image: &Digest, segments: &[Digest]) -> Result<(), Error> {
    let mut writer = staging.pack_writer(FileKind::Pack, image)?;
    let write = |writer: &mut dyn Write, text: String| match writer.write_all(text.as_bytes()) {
        Err(error) => Err(error.downcast::<Error>().unwrap()),
        Ok(()) => Ok(()),
    };
    for segment in segments {
        write(&mut writer, format!("{segment} 0\n"))?;
    }
    write(&mut writer, "end\n".into())?;
    writer.finish()?;
    staging.commit(&Publish { segments: segments.to_vec(), ..Publish::default() }, [])?;
    Ok(())
}

/// Gives an image a base without a name, which has some of its pieces and one more; the delta has all of them.
pub fn put_base(
    domain: &Domain,
    image: &Digest,
    shared: &[Vec<u8>],
    options: ImportOptions,
) -> Result<Base, Error> {
    let staging = domain.begin_import(options)?;
    let (base, objects) = fill(&staging, &[shared, &[content(5000, 999)]].concat(), None, false)?;
    let (delta, _) = fill(&staging, shared, None, false)?;
    let record = Base { base: base.image, delta: delta.image, chain_id: "sha256:base".to_owned() };
    let publish = Publish { bases: vec![(*image, record.clone())], ..Publish::default() };
    staging.commit(&publish, objects)?;
    Ok(record)
}

/// The object that only the split of [`import_split`]'s layers names: of a file that the same archive replaces.
pub fn replaced(layer: &str) -> Vec<u8> {
    format!("replaced in {layer}").into_bytes()
}

/// Imports content under a name: one object per piece, an image and (if given) a layer that name them.
/// Runs of zeros become holes.
pub fn import(
    domain: &Domain,
    name: &str,
    pieces: &[Vec<u8>],
    layer: Option<&str>,
    options: ImportOptions,
) -> Result<Digest, Error> {
    import_as(domain, name, pieces, layer, false, options)
}

/// The same, with a split of the layer that names one object more.
pub fn import_split(
    domain: &Domain,
    name: &str,
    pieces: &[Vec<u8>],
    layer: Option<&str>,
    options: ImportOptions,
) -> Result<Digest, Error> {
    import_as(domain, name, pieces, layer, true, options)
}

fn import_as(
    domain: &Domain,
    name: &str,
    pieces: &[Vec<u8>],
    layer: Option<&str>,
    with_split: bool,
    options: ImportOptions,
) -> Result<Digest, Error> {
    let staging = domain.begin_import(options)?;
    let (record, objects) = fill(&staging, pieces, layer, with_split)?;
    staging.commit(&Publish::named(name, record.clone()), objects)?;
    Ok(record.image)
}

/// Brings back what is damaged, from images as [`import_split`] makes them: of each the pieces and the layer.
pub fn repair(domain: &Domain, sources: &[(Vec<Vec<u8>>, &str)]) -> Result<(), Error> {
    domain.make_directories()?;
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default())?;
    let task = Task::default();
    let mut damage = domain.damage(&report, &Lines, &task)?;
    for (pieces, layer) in sources {
        if damage.is_empty() {
            break;
        }
        let staging = domain.begin_repair(&damage)?;
        fill(&staging, pieces, Some(layer), true)?;
        staging.commit(&Publish::default(), [])?;
        damage = domain.damage(&domain.recheck(&damage, &Lines, &task)?, &Lines, &task)?;
    }
    domain.protect_all(&task).map(drop)
}

/// A record of an image, and the objects that it needs.
type Filled = (Ref, Vec<(Digest, u64)>);

/// Stages content: one object per piece, an image and (if given) a layer that name them.
pub fn fill(
    staging: &Staging,
    pieces: &[Vec<u8>],
    layer: Option<&str>,
    with_split: bool,
) -> Result<Filled, Error> {
    let mut objects = Vec::new();
    for piece in pieces {
        let mut writer = staging.object_writer();
        let mut hole = 0;
        for part in piece.chunks(700) {
            if part.iter().all(|byte| *byte == 0) {
                hole += part.len() as u64;
                continue;
            }
            writer.push_hole(std::mem::take(&mut hole))?;
            writer.push(part)?;
        }
        writer.push_hole(hole)?;
        let stored = writer.finish()?;
        objects.push((stored.digest, stored.size));
    }
    let mut text = String::new();
    for (digest, size) in &objects {
        text.push_str(&format!("{digest} {size}\n"));
    }
    text.push_str("end\n");
    let mut record = Ref::new(Digest([0; 32]));
    if let Some(chain_id) = layer {
        let mut writer = staging.file_writer()?;
        writer.append(text.as_bytes())?;
        writer.finish(&FileName::chain(FileKind::Layer, chain_id)?)?;
        let mut split = text.clone();
        if with_split {
            let stored = staging.put_object(&replaced(chain_id))?;
            objects.push((stored.digest, stored.size));
            split.insert_str(0, &format!("{} {}\n", stored.digest, stored.size));
        }
        let mut writer = staging.file_writer()?;
        writer.append(split.as_bytes())?;
        writer.finish(&FileName::chain(FileKind::Split, chain_id)?)?;
        record.layers.push(Layer { chain_id: chain_id.to_owned(), ..Layer::default() });
    }
    let mut image = staging.image_writer()?;
    // The store's error, not the one that `Write` wraps it in.
    image.write_all(text.as_bytes()).map_err(unwrap_store_error)?;
    record.image = image.finish()?;
    Ok((record, objects))
}

fn unwrap_store_error(error: std::io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => panic!("not an error of the store: {error}"),
    }
}

/// Chain ids of all layers, sorted.
pub fn layers(domain: &Domain) -> Vec<String> {
    let layers = domain.named(FileKind::Layer).unwrap();
    let ids: BTreeSet<_> = layers.iter().filter_map(FileName::chain_id).collect();
    ids.into_iter().collect()
}

/// What the machine has mounted, for tests without mounts.
pub fn nothing_live() -> Result<Vec<Digest>, BoxError> {
    Ok(Vec::new())
}

/// Makes settings of a domain.
pub fn set(domain: &Domain, value: u32) -> Result<(), Error> {
    domain.change_settings(|_| Ok(BTreeMap::from([("value".to_owned(), value)])))
}
