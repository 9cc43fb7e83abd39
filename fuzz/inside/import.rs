//! The module `import::fuzz` of crate image, which only `--cfg fuzzing` builds: it sees what is
//! private there.
//!
//! Each function takes any bytes and panics where an invariant of its target in `fuzz_targets/`
//! does not hold.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cofolio_erofs::read::Image;
use cofolio_erofs::tree::{Content, EXTERNAL_MAX, Tree};
use cofolio_erofs::write::{WriteOptions, write};
use cofolio_store::Digest;
use cofolio_store::task::Cancel;

use crate::compose::merge;
use crate::digest::BlobDigest;
use crate::layer::blob::{self, Blob, Budget, Content as Bytes};
use crate::layer::dumped::{DumpedLayer, LayerDump};
use crate::layer::split::{self, Instruction, Split, SplitError, SplitWriter};
use crate::layer::tar::{MetaLimits, Reader};
use crate::layer::tar_split;
use crate::layer::{IMPLICIT, LOWER_LINK, LayerTree, Made, WHITEOUT};
use crate::source::manifest::{self, Config, Descriptor, DockerImage, Index, Manifest, Platform};

/// Layers of one image; what follows is not looked at.
const LAYERS: usize = 4;

/// Tar archives one after the other, each a layer over those before it.
pub fn layers(mut data: &[u8]) {
    let mut merged: Option<Tree> = None;
    let mut hidden = Vec::new();
    for _ in 0..LAYERS {
        if data.is_empty() {
            break;
        }
        let Some(layer) = unpack(&mut data) else { break };
        let mut dump = Vec::new();
        cofolio_erofs::dump::write(&layer, &mut dump).unwrap();
        let text = zstd::bulk::compress(&dump, 1).unwrap();
        let result = match &mut merged {
            None => merge::lowest(layer).map(|tree| merged = Some(tree)),
            Some(lower) => match DumpedLayer::read(LayerDump::Memory(text)) {
                Ok(layer) => merge::apply(lower, &layer, &mut hidden),
                // An entry can need more text than a line may have.
                Err(error) => {
                    assert!(dump.split(|b| *b == b'\n').any(|l| l.len() > 0xffff), "{error}");
                    return;
                }
            },
        };
        if result.is_err() {
            return;
        }
    }
    let Some(tree) = merged else { return };
    for visit in tree.walk() {
        assert!(!visit.name.starts_with(WHITEOUT));
        assert!(tree.xattrs(visit.inode).all(|(name, _)| name != IMPLICIT && name != LOWER_LINK));
    }
    let image = image_of(&tree);
    let again = Image::open(&image).unwrap().to_tree().unwrap();
    assert!(image_of(&again) == image, "an image read and written again is another one");
}

fn image_of(tree: &Tree) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(tree, &WriteOptions { min_version: 1, max_version: 1 }, &mut bytes).unwrap();
    bytes
}

/// The tree of the archive at the beginning of `data`, which is what follows it then.
fn unpack(data: &mut &[u8]) -> Option<Tree> {
    let limits = MetaLimits { extended_bytes: 1 << 16, sparse_segments: 1 << 10 };
    let mut reader = Reader::new(*data, limits);
    let mut tree = LayerTree::new();
    while let Some(entry) = reader.next_entry().ok()? {
        let size = entry.file_size();
        if let Some(sparse) = &entry.sparse {
            let mut end = 0;
            for &(offset, length) in &sparse.segments {
                assert!(offset >= end, "segments overlap");
                end = offset.checked_add(length).unwrap();
            }
            assert!(end <= sparse.size);
            let sum: u64 = sparse.segments.iter().map(|(_, length)| length).sum();
            assert_eq!(sum, entry.data_size);
        }
        if let Made::File(inode) = tree.add(&entry).ok()?
            && size > 0
        {
            if size > EXTERNAL_MAX {
                return None;
            }
            let digest = [u8::try_from(size % 251).unwrap(); 32];
            tree.tree.set_content(inode, Content::object(size, &digest)).unwrap();
        }
    }
    let used = usize::try_from(reader.offset()).unwrap();
    *data = data.get(used.max(1)..).unwrap_or_default();
    Some(tree.tree)
}

/// The documents of an image: index, manifest, config, and `manifest.json` of `docker save`.
pub fn documents(data: &[u8]) {
    if let Ok(index) = manifest::parse::<Index>("index", "", data) {
        let all: Vec<&Descriptor> = index.manifests.iter().collect();
        if let Ok(chosen) = manifest::for_platform(&all, &Platform::host()) {
            assert!(all.iter().any(|one| std::ptr::eq(*one, chosen)));
        }
        all.into_iter().for_each(descriptor);
    }
    if let Ok(manifest) = manifest::parse::<Manifest>("manifest", "", data) {
        descriptor(&manifest.config);
        manifest.layers.iter().for_each(descriptor);
    }
    if let Ok(config) = manifest::parse::<Config>("config", "", data) {
        config.rootfs.diff_ids.iter().for_each(|digest| blob_digest(digest));
    }
    if let Ok(images) = manifest::parse::<Vec<DockerImage>>("manifest.json", "", data) {
        for tag in images.into_iter().filter_map(|image| image.repo_tags).flatten() {
            manifest::is_whole_name(&tag);
        }
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(platform) = Platform::parse(text)
    {
        let again = Platform::parse(&platform.to_string()).unwrap();
        assert_eq!(platform.to_string(), again.to_string());
    }
}

fn descriptor(one: &Descriptor) {
    let _ = manifest::leads(one);
    let _ = manifest::check_config(one);
    let _ = manifest::check_layer(one);
    let _ = one.name();
    if one.blob_digest().is_ok() {
        blob_digest(&one.digest);
    }
}

fn blob_digest(text: &str) {
    if let Some(digest) = BlobDigest::parse(text) {
        assert_eq!(digest.to_string(), text);
        // It becomes part of paths.
        assert!(!digest.layout_path().contains(".."));
    }
}

/// What a split says: bytes, or an object of that size, all of it or parts with holes before them.
#[derive(PartialEq)]
enum Said {
    Literal(Vec<u8>),
    Object(Digest, u64, Option<Vec<(u64, u64)>>),
}

/// A split, as it lies in a store, or if it does not begin like one: size of the archive, length of
/// the script (two bytes each), script, table.
pub fn split(data: &[u8]) {
    let source = match data {
        [b'c', ..] => data.to_vec(),
        _ => {
            let Some((&[a, b, c, d], rest)) = data.split_first_chunk() else { return };
            let length = usize::from(u16::from_le_bytes([c, d])).min(rest.len());
            let (script, table) = rest.split_at(length);
            split::fuzz(script, table, u64::from(u16::from_le_bytes([a, b]))).unwrap()
        }
    };
    let mut named = Vec::new();
    let listed = split::objects(&source, &mut |digest, size| named.push((digest, size)));
    let Ok(said) = read_split(&source) else { return };
    // Garbage collection reads the table alone: it must know every object of the script.
    listed.unwrap();
    let objects = said.iter().filter_map(|one| match one {
        Said::Object(digest, size, _) => Some((*digest, *size)),
        Said::Literal(_) => None,
    });
    assert!(objects.eq(named.iter().copied()));
    let Some(again) = write_split(&said) else { return };
    assert!(read_split(&again).unwrap() == said, "a split written again says something else");
}

fn read_split(source: &Vec<u8>) -> Result<Vec<Said>, SplitError> {
    let mut split = Split::open(source)?;
    let mut said: Vec<Said> = Vec::new();
    loop {
        match split.instruction()? {
            Instruction::End => return Ok(said),
            Instruction::Literal => {
                let mut buffer = [0; 1000];
                loop {
                    let count = split.read(&mut buffer)?;
                    match said.last_mut() {
                        _ if count == 0 => break,
                        // Two literals in a row are written as one.
                        Some(Said::Literal(all)) => all.extend_from_slice(&buffer[..count]),
                        _ => said.push(Said::Literal(buffer[..count].to_vec())),
                    }
                }
            }
            Instruction::Object { digest, size, ranges } => {
                let mut list = Vec::new();
                while let Some(range) = split.range()? {
                    list.push(range);
                }
                assert!(ranges.is_none_or(|count| count == list.len() as u64));
                said.push(Said::Object(digest, size, ranges.map(|_| list)));
            }
        }
    }
}

/// `None` where the parts of an object would be outside of any file: that is found out when it is
/// read.
fn write_split(said: &[Said]) -> Option<Vec<u8>> {
    let mut writer = SplitWriter::new(Vec::new()).unwrap();
    let mut total = 0u64;
    for one in said {
        match one {
            Said::Literal(bytes) => {
                writer.literal(bytes).unwrap();
                total = total.checked_add(bytes.len() as u64)?;
            }
            Said::Object(digest, size, parts) => {
                let mut at = 0u64;
                let mut absolute = Vec::new();
                for &(hole, length) in parts.iter().flatten() {
                    let offset = at.checked_add(hole)?;
                    absolute.push((offset, length));
                    at = offset.checked_add(length)?;
                    total = total.checked_add(length)?;
                }
                if parts.is_none() {
                    total = total.checked_add(*size)?;
                }
                let number = writer.object(parts.is_some().then_some(&absolute[..])).unwrap();
                writer.stored(number, *digest, *size).unwrap();
            }
        }
    }
    Some(writer.finish(total).unwrap())
}

/// What lies beside a layer's files and is none of them.
const SECRET: &[u8] = b"what lies beside the layer and is none of it";

/// The lines of a tar-split, over the files of a layer.
pub fn tar_split(data: &[u8]) {
    static LAYER: OnceLock<PathBuf> = OnceLock::new();
    let layer = LAYER.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("cofolio-fuzz-{}", std::process::id()));
        let layer = dir.join("layer");
        std::fs::create_dir_all(layer.join("d")).unwrap();
        std::fs::write(dir.join("secret"), SECRET).unwrap();
        std::fs::write(layer.join("a"), b"content").unwrap();
        std::fs::write(layer.join("d/b"), b"abc").unwrap();
        std::os::unix::fs::symlink("../../secret", layer.join("d/out")).unwrap();
        std::os::unix::fs::symlink(&dir, layer.join("dir")).unwrap();
        layer
    });
    let files = std::fs::File::open(layer).unwrap();
    if let Ok(archive) = tar_split::fuzz(data, files.into()) {
        // A line that brings a file is longer than any of these files.
        assert!(archive.len() <= data.len());
        assert!(archive.windows(SECRET.len()).all(|bytes| bytes != SECRET));
    }
}

/// A blob's bytes.
struct InMemory(Arc<[u8]>);

impl Bytes for InMemory {
    fn open(&self, _: &BlobDigest, _: u64, _: Option<&Cancel>) -> Box<dyn Read + Send> {
        Box::new(std::io::Cursor::new(self.0.clone()))
    }
}

/// Uncompressed bytes that a blob may have here.
const UNPACKED_MAX: u64 = 4 << 20;

/// A layer's blob, compressed or not.
pub fn blob(data: &[u8]) {
    let size = data.len() as u64;
    let content = Arc::new(InMemory(data.into()));
    let right = BlobDigest::sha256(data);
    // From one MiB on, a thousand bytes of one.
    let budget = || Budget::new(UNPACKED_MAX, 1 << 20, 1000, Cancel::default());
    let (bytes, result) = blob::fuzz(&Blob::new(right.clone(), size, content.clone()), &budget());
    assert!(bytes.len() as u64 <= UNPACKED_MAX);
    let plain = !data.starts_with(&[0x1f, 0x8b, 8])
        && data.get(1..4) != Some(&[0x2a, 0x4d, 0x18])
        && !data.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
    match result {
        Ok(ended) => assert!(ended && (!plain || bytes == data)),
        Err(_) => assert!(!plain || size > UNPACKED_MAX),
    }
    // With another digest or another size there is no end, whatever it holds.
    for (digest, size) in [(BlobDigest::sha256(b"other"), size), (right, size + 1)] {
        let (_, result) = blob::fuzz(&Blob::new(digest, size, content.clone()), &budget());
        assert!(result.is_err());
    }
}
