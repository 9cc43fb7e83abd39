//! An OCI image layout in a directory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, mkdirat, open, openat};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::aside::{self, OutputFile};
use super::error::{ExportError, io_error};
use super::target::{BlobKind, Finished, Target};
use crate::digest::BlobDigest;

pub(crate) const OCI_LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Largest `index.json` that is added to, in bytes.
const INDEX_MAX: u64 = 4 << 20;

/// A layout that is being written. A killed export leaves one without `index.json`; the next export completes it.
///
/// The owner of a directory on the way to it can replace what is below by a link. So its files are opened
/// relative to descriptors.
pub(crate) struct Layout {
    path: PathBuf,
    added: Added,
    /// Its directory, locked.
    root: File,
    /// The directory of its blobs.
    blobs: File,
    blob: Option<(File, PathBuf)>,
}

/// What was not there before, in the order in which it was made; removed when this is dropped.
#[derive(Default)]
struct Added(Vec<Made>);

enum Made {
    File(PathBuf),
    Directory(PathBuf),
}

impl Drop for Added {
    /// `oci-layout` goes after the blobs. If a blob stays, so does the file, and the next export
    /// can complete the layout.
    fn drop(&mut self) {
        let remove = |made: &Made| match made {
            Made::File(path) => fs::remove_file(path),
            Made::Directory(path) => fs::remove_dir(path),
        };
        let is_gone = |made: &Made| match remove(made) {
            Err(error) => error.kind() == io::ErrorKind::NotFound,
            Ok(()) => true,
        };
        let _ = self.0.iter().rev().all(is_gone);
    }
}

impl Layout {
    /// Begins a layout, or goes on with the one at `path`.
    pub(crate) fn create(path: &Path) -> Result<Self, ExportError> {
        let refuse = |what: &str| {
            Err(ExportError::Destination { what: format!("{}: {what}", path.display()) })
        };
        let made = match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            other => other.map(|()| true).map_err(io_error(path))?,
        };
        let root = match open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOTDIR) => return refuse("it is a file, and a layout is a directory"),
            other => File::from(other.map_err(|error| io_error(path)(error.into()))?),
        };
        if flock(&root, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            return refuse("another export writes to it");
        }
        // Its paths go through `root`, so it is declared after it and dropped first.
        let mut added = Added::default();
        added.0.extend(made.then(|| Made::Directory(path.to_owned())));
        let is_file = |name| match below(&root, name).symlink_metadata() {
            Err(_) => None,
            Ok(found) => Some(found.is_file()),
        };
        let entries = fs::read_dir(below(&root, ".")).and_then(Iterator::collect);
        let entries: Vec<fs::DirEntry> = entries.map_err(io_error(path))?;
        if entries.iter().all(|entry| entry.file_name() == "lost+found") {
            let version = below(&root, "oci-layout");
            File::create_new(&version).map_err(io_error(path))?;
            added.0.push(Made::File(version));
            // Before any blob: the next export goes on with what has this file.
            aside::sync(&below(&root, "."))?;
            let directories = ["blobs", "blobs/sha256"].map(|name| below(&root, name));
            added.0.extend(directories.map(Made::Directory));
        } else if is_file("index.json").or(is_file("oci-layout")) != Some(true) {
            return refuse("a directory that is neither empty nor an image layout");
        }
        let blobs = directory_in(&root, "blobs").and_then(|it| directory_in(&it, "sha256"));
        let blobs = match blobs {
            Err(Errno::NOTDIR) => {
                return refuse("blobs/sha256 leads elsewhere: it is no directory");
            }
            other => other.map_err(|error| io_error(path)(error.into()))?,
        };
        Ok(Self { path: path.to_owned(), added, root, blobs, blob: None })
    }

    /// Replaces the descriptor's path by the caller's.
    fn named(&self, error: ExportError) -> ExportError {
        let path = self.path.clone();
        match error {
            ExportError::Io { source, .. } => ExportError::Io { path, source },
            ExportError::NotDurable { source, .. } => ExportError::NotDurable { path, source },
            other => other,
        }
    }

    fn write_index(&self, image: &Finished) -> Result<(), ExportError> {
        aside::sync(&below(&self.blobs, "."))?;
        aside::sync(&below(&self.blobs, ".."))?;
        aside::sync(aside::directory(&self.path))?;
        let before = read_index(&self.root, &self.path)?;
        if before.is_none() {
            let put = self.put_file("oci-layout", OCI_LAYOUT);
            put.map_err(|error| match error {
                ExportError::NotDurable { path, source } => ExportError::Io { path, source },
                other => other,
            })?;
        }
        self.put_file("index.json", &index(before, image))
    }

    /// Writes a file, whole or not at all.
    fn put_file(&self, name: &str, content: &[u8]) -> Result<(), ExportError> {
        let file = OutputFile::create(&below(&self.root, name), true)?;
        file.file().write_all(content).map_err(io_error(&self.path))?;
        file.publish()
    }
}

fn below(directory: &File, name: &str) -> PathBuf {
    format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()).into()
}

/// A directory, made if it is missing, and no link to one.
fn directory_in(parent: &File, name: &str) -> rustix::io::Result<File> {
    match mkdirat(parent, name, Mode::from_raw_mode(0o777)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty()).map(File::from)
}

impl Target for Layout {
    fn begin(&mut self, _: BlobKind) -> Result<(), ExportError> {
        let blob = aside::create_file(&below(&self.blobs, "blob"));
        let (file, path) = blob.map_err(|error| self.named(error))?;
        self.added.0.push(Made::File(path.clone()));
        self.blob = Some((file, path));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError> {
        match &mut self.blob {
            Some((file, _)) => file.write_all(bytes).map_err(io_error(&self.path)),
            None => Ok(()),
        }
    }

    fn end(&mut self, digest: &BlobDigest, _: u64) -> Result<(), ExportError> {
        let Some((file, path)) = self.blob.take() else { return Ok(()) };
        file.sync_all().map_err(io_error(&self.path))?;
        let to = below(&self.blobs, digest.hex());
        let is_new = !to.exists();
        fs::rename(path, &to).map_err(io_error(&self.path))?;
        self.added.0.pop();
        self.added.0.extend(is_new.then_some(Made::File(to)));
        Ok(())
    }

    fn publish(mut self: Box<Self>, image: &Finished) -> Result<(), ExportError> {
        let published = self.write_index(image);
        if let Ok(()) | Err(ExportError::NotDurable { .. }) = published {
            // The index names them.
            self.added.0.clear();
        }
        published.map_err(|error| self.named(error))
    }
}

/// Reads the index of a layout, whose directory is open and has this path. A link is refused.
fn read_index(root: &File, path: &Path) -> Result<Option<Value>, ExportError> {
    let not_index =
        |what: String| ExportError::Destination { what: format!("{}: {what}", path.display()) };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(root, "index.json", flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Err(not_index("index.json is a link".into())),
        other => File::from(other.map_err(|error| io_error(path)(error.into()))?),
    };
    let bytes = crate::files::read_at_most(file, INDEX_MAX).map_err(io_error(path))?;
    let index: Value =
        serde_json::from_slice(&bytes).map_err(|e| not_index(format!("index.json: {e}")))?;
    match index.get("manifests") {
        Some(Value::Array(_)) => Ok(Some(index)),
        _ => Err(not_index("index.json is no image index".into())),
    }
}

/// `index.json` with the image in it, instead of the one that had its name.
pub(crate) fn index(before: Option<Value>, image: &Finished) -> Vec<u8> {
    let mut entry = json!(image.manifest);
    if let Some(name) = &image.name {
        entry["annotations"] = json!({REF_NAME: name});
    }
    let mut index = before.unwrap_or_else(|| {
        json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [],
        })
    });
    if let Some(Value::Array(entries)) = index.get_mut("manifests") {
        let named = |entry: &Value| entry["annotations"][REF_NAME].as_str().map(str::to_owned);
        entries.retain(|other| match named(other) {
            None => other["digest"] != entry["digest"],
            other => other != image.name,
        });
        entries.push(entry);
    }
    index.to_string().into_bytes()
}
