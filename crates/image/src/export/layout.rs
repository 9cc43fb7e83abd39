//! An OCI image layout in a directory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
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

/// A layout that is being written: a new one under a temporary name, an existing one in place, with
/// `index.json` last.
pub(crate) struct Layout {
    root: PathBuf,
    /// Where it goes when it is complete, if it is new.
    goes_to: Option<PathBuf>,
    /// That it is being written.
    _lock: Option<File>,
    blob: Option<(File, PathBuf)>,
    /// Blobs that were not there before.
    added: Vec<PathBuf>,
    published: bool,
}

impl Layout {
    /// Begins a layout, or goes on with the one at `path`.
    pub(crate) fn create(path: &Path) -> Result<Self, ExportError> {
        let refuse = |what: &str| {
            Err(ExportError::Destination { what: format!("{}: {what}", path.display()) })
        };
        let entries = match fs::read_dir(path) {
            Ok(entries) => Some(entries.count()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return refuse("it is a file, and a layout is a directory");
            }
            Err(error) => return Err(io_error(path)(error)),
        };
        let (lock, root, goes_to) = match entries {
            None | Some(0) => {
                let (lock, aside) = aside::create_dir(path)?;
                (Some(lock), aside, Some(path.to_owned()))
            }
            Some(_) if is_own(&path.join("index.json"), fs::Metadata::is_file) => {
                let lock = File::open(path).map_err(io_error(path))?;
                let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
                if locked == Err(Errno::WOULDBLOCK) {
                    return refuse("another export writes to it");
                }
                (Some(lock), path.to_owned(), None)
            }
            Some(_) => return refuse("a directory that is neither empty nor an image layout"),
        };
        let (blob, added) = (None, Vec::new());
        let layout = Self { root, goes_to, _lock: lock, blob, added, published: false };
        if layout.goes_to.is_some() {
            let path = layout.root.join("oci-layout");
            let written = File::create_new(&path)
                .and_then(|mut file| file.write_all(OCI_LAYOUT).and_then(|()| file.sync_all()));
            written.map_err(io_error(&path))?;
        }
        for part in ["blobs", "blobs/sha256"] {
            let directory = layout.root.join(part);
            match fs::create_dir(&directory) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(io_error(&directory)(error));
                }
                _ if is_own(&directory, fs::Metadata::is_dir) => {}
                _ => return refuse(&format!("{part} leads elsewhere: it is no directory")),
            }
        }
        Ok(layout)
    }
}

/// Whether something lies there itself. Links in a foreign layout could lead anywhere.
fn is_own(path: &Path, is: impl FnOnce(&fs::Metadata) -> bool) -> bool {
    path.symlink_metadata().is_ok_and(|found| is(&found))
}

impl Target for Layout {
    fn begin(&mut self, _: BlobKind) -> Result<(), ExportError> {
        self.blob = Some(aside::create_file(&self.root.join("blobs/sha256/blob"))?);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError> {
        match &mut self.blob {
            Some((file, path)) => file.write_all(bytes).map_err(io_error(path)),
            None => Ok(()),
        }
    }

    fn end(&mut self, digest: &BlobDigest, _: u64) -> Result<(), ExportError> {
        let Some((file, path)) = &self.blob else { return Ok(()) };
        file.sync_all().map_err(io_error(path))?;
        let to = self.root.join(digest.layout_path());
        let is_new = !to.exists();
        fs::rename(path, &to).map_err(io_error(&to))?;
        self.blob = None;
        if is_new {
            self.added.push(to);
        }
        Ok(())
    }

    fn publish(mut self: Box<Self>, image: &Finished) -> Result<(), ExportError> {
        aside::sync(&self.root.join("blobs/sha256"))?;
        aside::sync(&self.root.join("blobs"))?;
        let path = self.root.join("index.json");
        let before = match self.goes_to {
            Some(_) => None,
            None => Some(read_index(&path)?),
        };
        let file = OutputFile::create(&path, true)?;
        file.file().write_all(&index(before, image)).map_err(io_error(file.aside()))?;
        let published = file.publish();
        if let Ok(()) | Err(ExportError::NotDurable { .. }) = published {
            self.added.clear(); // The index names them.
        }
        published?;
        if let Some(to) = &self.goes_to {
            // Over an empty directory as well.
            aside::rename(&self.root, to, true)?;
        }
        self.published = true;
        Ok(())
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        if self.goes_to.is_some() {
            let _ = fs::remove_dir_all(&self.root);
            return;
        }
        let unfinished = self.blob.take().map(|(_, path)| path);
        for path in self.added.iter().chain(&unfinished) {
            let _ = fs::remove_file(path);
        }
    }
}

fn read_index(path: &Path) -> Result<Value, ExportError> {
    let not_index =
        |what: String| ExportError::Destination { what: format!("{}: {what}", path.display()) };
    let bytes = crate::files::read(path, INDEX_MAX).map_err(io_error(path))?;
    let index: Value = serde_json::from_slice(&bytes).map_err(|e| not_index(e.to_string()))?;
    match index.get("manifests") {
        Some(Value::Array(_)) => Ok(index),
        _ => Err(not_index("it is no image index".into())),
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
