//! The images as their makers shipped them: unpacked layer by layer with GNU tar, whiteouts applied
//! here. On purpose nothing of Cofolio's importer is used: what it made of an image is compared with
//! this.

use std::{
    collections::{BTreeMap, HashSet},
    ffi::{CString, OsStr},
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use cofolio_store::{Digest, verity};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::residency;

/// SHA-256 of a file's content.
pub(super) type ContentHash = [u8; 32];

/// What one path of an image must read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) size: u64,
    pub(super) hash: ContentHash,
}

/// A regular file of the merged tree: its content, the object that must hold it, and which unpacked
/// inode holds it (hard links share one, and share its pages).
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) content: Content,
    pub(super) object: Digest,
    pub(super) inode: (usize, u64),
}

/// Every regular file of an image after its layers have been merged; paths are relative.
pub(super) type Listing = BTreeMap<Vec<u8>, Entry>;

/// An image unpacked on its own.
#[derive(Debug)]
pub(super) struct Unpacked {
    /// Layer directories, the lowest first, in overlayfs form (whiteouts are 0:0 character devices).
    pub(super) layers: Vec<PathBuf>,
    pub(super) listing: Listing,
    pub(super) about: About,
}

/// What identifies the image in a report.
#[derive(Debug, Clone, Serialize)]
pub(super) struct About {
    /// What its maker calls it, else the name of the file or directory.
    pub(super) name: String,
    /// Digest of the manifest.
    pub(super) manifest: String,
    /// Digests of the layers as shipped, the lowest first.
    pub(super) layers: Vec<String>,
}

/// Pages and bytes of content that reading an image, or two of them, must bring into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Expected {
    /// Paths of regular files.
    pub(super) files: u64,
    /// One copy per inode of each image: what images unpacked on their own take.
    pub(super) unshared_pages: u64,
    /// One copy per layer content, for an engine that keeps equal layer stacks once.
    pub(super) layer_shared_pages: u64,
    /// One copy per distinct content: the bound of sharing by file.
    pub(super) unique_pages: u64,
    /// Distinct contents that are not empty.
    pub(super) unique_contents: u64,
}

impl Expected {
    pub(super) fn of(images: [&Unpacked; 2]) -> Expected {
        let common = common_layers(images);
        let mut expected = Expected {
            files: 0,
            unshared_pages: 0,
            layer_shared_pages: 0,
            unique_pages: 0,
            unique_contents: 0,
        };
        let mut contents = HashSet::new();
        let mut inodes = HashSet::new();
        let mut in_common = HashSet::new();
        for (which, image) in images.iter().enumerate() {
            for (path, entry) in &image.listing {
                let pages = residency::pages_of(entry.content.size);
                expected.files += 1;
                if inodes.insert((which, entry.inode)) {
                    expected.unshared_pages += pages;
                    // In a common layer the same path is the same file.
                    let layer = entry.inode.0;
                    if layer >= common || in_common.insert((layer, path)) {
                        expected.layer_shared_pages += pages;
                    }
                }
                if pages > 0 && contents.insert((entry.content.size, entry.content.hash)) {
                    expected.unique_pages += pages;
                    expected.unique_contents += 1;
                }
            }
        }
        expected
    }
}

/// How many layers an engine keeps once for both: those that are equal, with equal layers below them.
pub(super) fn common_layers([old, new]: [&Unpacked; 2]) -> usize {
    old.about.layers.iter().zip(&new.about.layers).take_while(|(a, b)| a == b).count()
}

/// Unpacks the image at `image`, an OCI layout directory, an OCI archive or a `docker save`
/// archive, under `cache`, or takes what an earlier call left there.
pub(super) fn unpack(image: &Path, cache: &Path, say: &dyn Fn(&str)) -> Result<Unpacked> {
    fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let file_name = image.file_name().unwrap_or(image.as_os_str()).to_string_lossy();
    if image.is_dir() {
        return unpack_layout(image, &file_name, cache, say);
    }
    // An archive: its members first, in a directory of their own that goes away again.
    let members = cache.join(format!(".archive-{}", std::process::id()));
    let guard = RemoveOnDrop(members.clone());
    fs::create_dir(&members).with_context(|| format!("cannot make {}", members.display()))?;
    tar(image, &members)?;
    let unpacked = unpack_layout(&members, &file_name, cache, say);
    drop(guard);
    unpacked
}

fn unpack_layout(
    layout: &Path,
    file_name: &str,
    cache: &Path,
    say: &dyn Fn(&str),
) -> Result<Unpacked> {
    let (mut about, blobs) = read_layout(layout)?;
    if about.name.is_empty() {
        file_name.clone_into(&mut about.name);
    }
    let name = about.manifest.trim_start_matches("sha256:").to_owned();
    let fills: Vec<_> = blobs
        .iter()
        .map(|blob| {
            move |layer: &Path| {
                tar(blob, layer)?;
                apply_whiteouts(layer)
            }
        })
        .collect();
    let fills: Vec<Fill<'_>> = fills.iter().map(|fill| fill as Fill<'_>).collect();
    if !cache.join(&name).exists() {
        say(&format!("unpacking {} ({} layers)", about.name, fills.len()));
    }
    unpack_once(cache, &name, about, &fills)
}

/// Fills the directory of one layer.
pub(super) type Fill<'a> = &'a dyn Fn(&Path) -> Result<()>;

/// The image that `fills` unpack, one layer each, under `name` in `cache`; filled unless it is there.
pub(super) fn unpack_once(
    cache: &Path,
    name: &str,
    about: About,
    fills: &[Fill<'_>],
) -> Result<Unpacked> {
    let home = cache.join(name);
    let layer_of = |dir: &Path, index: usize| dir.join("layers").join(index.to_string());
    let listing_path = home.join("listing");
    if !listing_path.exists() {
        // Made aside and renamed: an unpacking that was cut short is never mistaken for a whole one.
        let aside = cache.join(format!(".unpacking-{name}"));
        remove_tree(&aside)?;
        let mut layers = Vec::new();
        for (index, fill) in fills.iter().enumerate() {
            let layer = layer_of(&aside, index);
            fs::create_dir_all(&layer)
                .with_context(|| format!("cannot make {}", layer.display()))?;
            fill(&layer)?;
            layers.push(layer);
        }
        let listing = merge(&layers)?;
        let mut out = io::BufWriter::new(File::create(aside.join("listing"))?);
        write_listing(&listing, &mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        remove_tree(&home)?;
        fs::rename(&aside, &home).with_context(|| format!("cannot make {}", home.display()))?;
    }
    let listing = read_listing(&fs::read(&listing_path)?)
        .with_context(|| format!("{} is damaged; remove it", listing_path.display()))?;
    let layers = (0..fills.len()).map(|index| layer_of(&home, index)).collect();
    Ok(Unpacked { layers, listing, about })
}

/// The parts of the OCI image specification's index and manifest that lead to the layers.
#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}
#[derive(Deserialize)]
struct Descriptor {
    digest: String,
    #[serde(rename = "mediaType", default)]
    media_type: String,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}
#[derive(Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}
#[derive(Deserialize)]
struct Manifest {
    layers: Vec<Descriptor>,
}
/// An entry of `docker save`'s manifest.json.
#[derive(Deserialize)]
struct Saved {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "RepoTags")]
    tags: Option<Vec<String>>,
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

fn read_layout(layout: &Path) -> Result<(About, Vec<PathBuf>)> {
    let index_path = layout.join("index.json");
    if !index_path.exists() {
        return read_docker_save(layout);
    }
    let mut index: Index = read_json(&index_path)?;
    for _ in 0..4 {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let fits = |d: &&Descriptor| {
            d.platform.as_ref().is_none_or(|p| p.os == "linux" && p.architecture == architecture)
        };
        let fitting: Vec<_> = index.manifests.iter().filter(fits).collect();
        let [descriptor] = fitting[..] else {
            bail!(
                "{} names {} images for this machine; bench share wants exactly one",
                index_path.display(),
                fitting.len()
            );
        };
        let path = blob(layout, &descriptor.digest)?;
        if descriptor.media_type.ends_with("image.index.v1+json")
            || descriptor.media_type.ends_with("manifest.list.v2+json")
        {
            index = read_json(&path)?;
            continue;
        }
        let manifest: Manifest = read_json(&path)?;
        let blobs: Result<Vec<_>> =
            manifest.layers.iter().map(|layer| blob(layout, &layer.digest)).collect();
        let layers = manifest.layers.into_iter().map(|layer| layer.digest).collect();
        let name = descriptor.annotations.get("org.opencontainers.image.ref.name");
        let name = name.cloned().unwrap_or_default();
        return Ok((About { name, manifest: descriptor.digest.clone(), layers }, blobs?));
    }
    bail!("{}: indexes are nested too deep", index_path.display())
}

fn read_docker_save(layout: &Path) -> Result<(About, Vec<PathBuf>)> {
    let path = layout.join("manifest.json");
    ensure!(
        path.exists(),
        "{} is neither an OCI layout nor a docker save archive (no index.json, no manifest.json)",
        layout.display()
    );
    let saved: Vec<Saved> = read_json(&path)?;
    let [image] = &saved[..] else {
        bail!("{} names {} images; bench share wants exactly one", path.display(), saved.len());
    };
    // It has no manifest digest; the config's name is one (of the config) and identifies the image.
    let id = image.config.trim_end_matches(".json").rsplit('/').next().unwrap_or("image");
    ensure!(id.len() == 64, "{}: the config is not named by its digest", path.display());
    let layers: Vec<_> = image.layers.iter().map(|layer| layout.join(layer)).collect();
    let name = image.tags.iter().flatten().next().cloned().unwrap_or_default();
    let manifest = format!("sha256:{id}");
    Ok((About { name, manifest, layers: image.layers.clone() }, layers))
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let limit = 64 << 20; // far above any real manifest
    serde_json::from_reader(io::BufReader::new(file.take(limit)))
        .with_context(|| format!("{} is not what it should be", path.display()))
}

fn blob(layout: &Path, digest: &str) -> Result<PathBuf> {
    let hex = digest
        .strip_prefix("sha256:")
        .filter(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    let hex = hex.with_context(|| format!("{digest}: only sha256 digests are supported"))?;
    Ok(layout.join("blobs/sha256").join(hex))
}

/// Extracts with GNU tar, which finds the compression out by itself.
fn tar(archive: &Path, dir: &Path) -> Result<()> {
    let output = Command::new("tar")
        .args(["--extract", "--numeric-owner", "--same-owner", "--preserve-permissions"])
        .args(["--xattrs", "--xattrs-include=*", "--acls", "--delay-directory-restore"])
        .arg("--file")
        .arg(archive)
        .arg("--directory")
        .arg(dir)
        .output()
        .context("cannot run tar (GNU tar is needed)")?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "tar cannot unpack {}: {}", archive.display(), message.trim());
    Ok(())
}

const OPAQUE_MARKER: &[u8] = b".wh..wh..opq";
const WHITEOUT_PREFIX: &[u8] = b".wh.";
const OPAQUE_XATTR: &str = "trusted.overlay.opaque";

/// Turns the whiteout markers of the OCI layer format into overlayfs' own, as an engine does.
fn apply_whiteouts(layer: &Path) -> Result<()> {
    let make_opaque = |dir: &Path| {
        rustix::fs::setxattr(dir, OPAQUE_XATTR, b"y", rustix::fs::XattrFlags::empty())
            .with_context(|| format!("cannot mark {} opaque", dir.display()))
    };
    let mut markers = Vec::new();
    walk(layer, &mut |path, _| {
        let name = path.file_name().map_or(&b""[..], OsStr::as_bytes);
        if name.starts_with(WHITEOUT_PREFIX) {
            markers.push(path.to_owned());
        }
        Ok(())
    })?;
    for marker in markers {
        fs::remove_file(&marker).with_context(|| format!("cannot remove {}", marker.display()))?;
        let (Some(dir), Some(name)) = (marker.parent(), marker.file_name()) else { continue };
        if name.as_bytes() == OPAQUE_MARKER {
            make_opaque(dir)?;
            continue;
        }
        let hidden = dir.join(OsStr::from_bytes(&name.as_bytes()[WHITEOUT_PREFIX.len()..]));
        match fs::symlink_metadata(&hidden) {
            // The layer hides the lower one and brings its own: a directory must not merge then.
            Ok(own) if own.is_dir() => make_opaque(&hidden)?,
            Ok(_) => {}
            Err(_) => rustix::fs::mknodat(
                rustix::fs::CWD,
                &hidden,
                rustix::fs::FileType::CharacterDevice,
                rustix::fs::Mode::empty(),
                0,
            )
            .with_context(|| format!("cannot make the whiteout {}", hidden.display()))?,
        }
    }
    Ok(())
}

/// Merges the layers as overlayfs will, and hashes what remains.
fn merge(layers: &[PathBuf]) -> Result<Listing> {
    let mut found: BTreeMap<Vec<u8>, (PathBuf, u64, (usize, u64))> = BTreeMap::new();
    for (index, layer) in layers.iter().enumerate() {
        walk(layer, &mut |path, meta| {
            let relative = path.strip_prefix(layer).unwrap_or(path).as_os_str().as_bytes();
            let below = [relative, b"/"].concat();
            let mut hide_below = || {
                let hidden: Vec<_> = found
                    .range(below.clone()..)
                    .take_while(|(path, _)| path.starts_with(&below))
                    .map(|(path, _)| path.clone())
                    .collect();
                for path in hidden {
                    found.remove(&path);
                }
            };
            let kind = meta.file_type();
            if kind.is_dir() {
                if is_opaque(path) {
                    hide_below();
                }
                found.remove(relative);
                return Ok(());
            }
            hide_below();
            found.remove(relative);
            if kind.is_file() {
                let entry = (path.to_owned(), meta.len(), (index, meta.ino()));
                found.insert(relative.to_owned(), entry);
            }
            Ok(())
        })?;
    }
    let files: Vec<_> = found.into_iter().collect();
    // Hard links are hashed twice: rarely, and it keeps this plain.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = files.len().div_ceil(threads).max(1);
    let parts: Vec<Result<Vec<_>>> = std::thread::scope(|scope| {
        let workers: Vec<_> = files
            .chunks(share)
            .map(|chunk| {
                scope.spawn(move || {
                    let hash = |(path, (real, size, inode)): &(Vec<u8>, (PathBuf, u64, _))| {
                        let (hash, object) = hash_file(real)?;
                        let content = Content { size: *size, hash };
                        Ok((path.clone(), Entry { content, object, inode: *inode }))
                    };
                    chunk.iter().map(hash).collect()
                })
            })
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined.map(|part| part.unwrap_or_else(|_| bail!("a hashing thread died"))).collect()
    });
    let mut listing = Listing::new();
    for part in parts {
        listing.extend(part?);
    }
    Ok(listing)
}

fn is_opaque(dir: &Path) -> bool {
    let mut value = [0; 1];
    rustix::fs::getxattr(dir, OPAQUE_XATTR, &mut value).is_ok_and(|len| value[..len] == *b"y")
}

/// SHA-256 of a file's content, and the digest that its object goes by.
fn hash_file(path: &Path) -> Result<(ContentHash, Digest)> {
    let read = || {
        let mut file = File::open(path)?;
        let (mut plain, mut object) = (Sha256::new(), verity::Hasher::new());
        let mut buf = vec![0; 128 << 10];
        loop {
            let count = file.read(&mut buf)?;
            if count == 0 {
                return io::Result::Ok((plain.finalize().into(), object.finish()));
            }
            plain.update(&buf[..count]);
            object.update(&buf[..count]);
        }
    };
    read().with_context(|| format!("cannot read {}", path.display()))
}

/// Calls `each` for everything below `dir`, directories before what they hold, without following
/// symbolic links. Siblings come in no order.
pub(super) fn walk(
    dir: &Path,
    each: &mut dyn FnMut(&Path, &fs::Metadata) -> Result<()>,
) -> Result<()> {
    // A stack of paths, not recursion: a hostile image may be very deep.
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        let entries =
            fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", dir.display()))?;
            let path = entry.path();
            let meta =
                entry.metadata().with_context(|| format!("cannot stat {}", path.display()))?;
            each(&path, &meta)?;
            if meta.is_dir() {
                dirs.push(path);
            }
        }
    }
    Ok(())
}

/// One record per file: `LAYER INODE SIZE SHA256 OBJECT PATH`, ended by a NUL, as names hold any other byte.
fn write_listing(listing: &Listing, out: &mut impl Write) -> io::Result<()> {
    for (path, Entry { content, object, inode: (layer, inode) }) in listing {
        write!(
            out,
            "{layer} {inode} {} {} {object} ",
            content.size,
            const_hex::encode(content.hash)
        )?;
        out.write_all(path)?;
        out.write_all(&[0])?;
    }
    out.write_all(b"end\0")
}

fn read_listing(bytes: &[u8]) -> Result<Listing> {
    let body = bytes.strip_suffix(b"end\0").context("it has no end")?;
    let mut listing = Listing::new();
    for record in body.split_inclusive(|&byte| byte == 0) {
        let mut parts = record.strip_suffix(&[0]).unwrap_or(record).splitn(6, |&b| b == b' ');
        let mut next = || parts.next().context("a record is short");
        let (layer, inode) = (number(next()?)?, number(next()?)?);
        let (size, hash) = (number(next()?)?, parse_hex(next()?)?);
        let object = Digest(parse_hex(next()?)?);
        let inode = (usize::try_from(layer)?, inode);
        let entry = Entry { content: Content { size, hash }, object, inode };
        listing.insert(next()?.to_owned(), entry);
    }
    Ok(listing)
}

pub(super) fn number(text: &[u8]) -> Result<u64> {
    let text = std::str::from_utf8(text)?;
    text.parse().with_context(|| format!("{text:?} is not a number"))
}

pub(super) fn parse_hex(text: &[u8]) -> Result<ContentHash> {
    let mut hash = [0; 32];
    const_hex::decode_to_slice(text, &mut hash)?;
    Ok(hash)
}

/// Mounts the layers as a container engine does: one overlay with an upper directory of its own.
pub(super) fn mount_overlay(layers: &[PathBuf], upper: &Path, target: &Path) -> Result<()> {
    let (changes, work) = (upper.join("upper"), upper.join("work"));
    for dir in [&changes, &work] {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let mut options = b"lowerdir=".to_vec();
    for (index, layer) in layers.iter().rev().enumerate() {
        if index > 0 {
            options.push(b':');
        }
        for &byte in layer.as_os_str().as_bytes() {
            if matches!(byte, b':' | b',' | b'\\') {
                options.push(b'\\');
            }
            options.push(byte);
        }
    }
    ensure!(
        ![&changes, &work].iter().any(|dir| dir.as_os_str().as_bytes().contains(&b',')),
        "{}: overlayfs takes no upper directory with a comma in its path",
        upper.display()
    );
    options.extend_from_slice(b",upperdir=");
    options.extend_from_slice(changes.as_os_str().as_bytes());
    options.extend_from_slice(b",workdir=");
    options.extend_from_slice(work.as_os_str().as_bytes());
    // mount(2) takes one page of options.
    ensure!(options.len() < 4096, "{} layers are too many for one mount(2)", layers.len());
    let options = CString::new(options).context("a layer's path holds a NUL")?;
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("bench-overlay", target, "overlay", flags, options.as_c_str())
        .with_context(|| format!("cannot mount an overlay at {}", target.display()))
}

/// Removes a directory tree, if there.
pub(super) fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = remove_tree(&self.0);
    }
}
