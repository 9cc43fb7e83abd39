//! The files of an import while they are written: [`StagedFile`], and the writers over it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use crate::Digest;
use crate::buffer::Buffer;
use crate::disk::{DiskFile, Purpose, StoredFile};
use crate::error::Result;
use crate::kinds::{FileKind, FileName};
use crate::staging::{Staging, Stored};
use crate::verity::Hasher;

/// Shorter runs of zeros are written: they hold no whole block to leave out.
const HOLE_MIN: usize = 4096;

/// A file under `tmp/` that gets its name when it is complete. Dropped before that, it is removed.
pub struct StagedFile<'a> {
    staging: &'a Staging,
    path: String,
    /// None once the disk is full.
    file: Option<Box<dyn DiskFile>>,
    /// Bytes, holes not counted.
    written: u64,
}

/// What became of a file that was to get its name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placed {
    New,
    /// Another thread has just staged the same content.
    Known,
    /// The disk is full: there is no file.
    Full,
}

impl fmt::Debug for StagedFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl<'a> StagedFile<'a> {
    pub(crate) fn new(staging: &'a Staging) -> Result<Self> {
        let number = staging.next_temporary.fetch_add(1, Relaxed);
        let path = format!("{}/tmp/{number}", staging.directory);
        let mut staged = Self { staging, path, file: None, written: 0 };
        if staging.check()? {
            match staging.disk().create(&staged.path, Purpose::Content) {
                Ok(file) => staged.file = Some(file),
                Err(error) => staging.fail(error, "create", &staged.path)?,
            }
        }
        Ok(staged)
    }

    /// The import that it belongs to.
    pub fn staging(&self) -> &'a Staging {
        self.staging
    }

    /// Appends bytes, best in pieces of at least some KiB. Fails as [`Staging::put_object`] does.
    pub fn append(&mut self, data: &[u8]) -> Result<()> {
        self.written += data.len() as u64;
        self.call(|file| file.write_all(data))
    }

    /// Appends zeros, as a hole where the filesystem can. Fails as [`Staging::put_object`] does.
    pub fn append_hole(&mut self, len: u64) -> Result<()> {
        self.call(|file| file.append_hole(len))
    }

    /// Appends a shared part of a file; false if it cannot. Fails like [`Staging::put_object`].
    pub fn append_shared(&mut self, from: &StoredFile, part: Range<u64>) -> Result<bool> {
        let mut shared = false;
        self.call(|file| {
            shared = file.append_shared(from, part)?;
            Ok(())
        })?;
        Ok(shared)
    }

    /// Opens for reading what is written so far; fails if a full disk left no file.
    pub fn open(&self) -> io::Result<StoredFile> {
        Ok(StoredFile::new(self.staging.disk().open(&self.path)?, self.path.clone()))
    }

    fn call(&mut self, call: impl FnOnce(&mut dyn DiskFile) -> io::Result<()>) -> Result<()> {
        // Another thread's failure ends this file too: nothing of it can be published.
        if !self.staging.check()? {
            self.file = None;
        }
        if let Some(file) = &mut self.file
            && let Err(error) = call(&mut **file)
        {
            self.file = None;
            self.staging.fail(error, "write", &self.path)?;
        }
        Ok(())
    }

    /// Gives the file its name in the staging directory, and fs-verity if the name has a digest,
    /// which must be the content's. An existing file stays. Fails like [`Staging::put_object`].
    pub fn finish(self, name: &FileName) -> Result<()> {
        let (staging, written) = (self.staging, self.written);
        let target = staging.named_file(name);
        let placed = self.place(|staging, path| staging.disk().rename(path, &target, true))?;
        let is_there = placed != Placed::Full
            && match name.digest() {
                Some(digest) => staging.enable_verity(&target, &digest)?,
                None => true,
            };
        if !is_there {
            staging.count_missing_bytes(written);
        }
        Ok(())
    }

    fn place(mut self, call: impl FnOnce(&Staging, &str) -> io::Result<()>) -> Result<Placed> {
        let Some(file) = self.file.take() else { return Ok(Placed::Full) };
        drop(file);
        match call(self.staging, &self.path) {
            // `drop` removes ours.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Placed::Known),
            Err(error) => self.staging.fail(error, "rename", &self.path).map(|()| Placed::Full),
            Ok(()) => {
                self.path.clear();
                Ok(Placed::New)
            }
        }
    }
}

impl Drop for StagedFile<'_> {
    fn drop(&mut self) {
        self.file = None;
        if !self.path.is_empty() {
            let _ = self.staging.disk().unlink(&self.path);
        }
    }
}

impl io::Write for StagedFile<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.append(data).map(|()| data.len()).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes one object, kept in memory up to [`crate::ImportOptions::buffer_bytes_max`].
pub struct ObjectWriter<'a> {
    staging: &'a Staging,
    hasher: Hasher,
    buffer: Buffer,
    spilled: Option<StagedFile<'a>>,
}

impl fmt::Debug for ObjectWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectWriter").field("size", &self.hasher.size()).finish_non_exhaustive()
    }
}

impl<'a> ObjectWriter<'a> {
    pub(crate) fn new(staging: &'a Staging, buffer: Buffer) -> Self {
        Self { staging, hasher: Hasher::new(), buffer, spilled: None }
    }

    /// Takes the next bytes of the content; fails as [`Staging::put_object`] does.
    pub fn push(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let spare = self.spare()?;
            let count = spare.len().min(data.len());
            spare[..count].copy_from_slice(&data[..count]);
            self.advance(count);
            data = &data[count..];
        }
        Ok(())
    }

    /// At least one byte of the writer's own memory for the next bytes of the content, which
    /// [`ObjectWriter::advance`] takes: saves a copy. Fails as [`Staging::put_object`] does.
    pub fn spare(&mut self) -> Result<&mut [u8]> {
        if self.buffer.spare().is_empty() {
            self.spill()?;
        }
        Ok(self.buffer.spare())
    }

    /// Takes the first `count` bytes of [`ObjectWriter::spare`] as the next of the content.
    pub fn advance(&mut self, count: usize) {
        let before = self.buffer.filled().len();
        self.buffer.advance(count);
        self.hasher.update(&self.buffer.filled()[before..]);
    }

    /// Takes zeros as the next `len` bytes and leaves a hole for them, so that an object is no
    /// larger on disk than its source. Time and memory do not depend on `len`.
    ///
    /// Only for holes of the source. Written zeros stay: whoever preallocated a file wants its
    /// blocks, a hole takes page cache like data once read, and there is little to gain (of the
    /// images of `corpus/`, runs of 64 KiB and more are 2 % in mysql, 0.3 % in postgres, none in
    /// the others). Fails as [`Staging::put_object`] does.
    pub fn push_hole(&mut self, len: u64) -> Result<()> {
        if let Some(zeros) = usize::try_from(len).ok().and_then(|len| [0; HOLE_MIN - 1].get(..len))
        {
            return self.push(zeros);
        }
        self.hasher.zeros(len);
        self.spill()?;
        self.spilled.as_mut().map_or(Ok(()), |spilled| spilled.append_hole(len))
    }

    /// From memory to a file of its own.
    fn spill(&mut self) -> Result<()> {
        if self.spilled.is_none() {
            self.spilled = Some(StagedFile::new(self.staging)?);
        }
        self.flush_buffer()
    }

    fn flush_buffer(&mut self) -> Result<()> {
        if let Some(spilled) = &mut self.spilled {
            spilled.append(self.buffer.filled())?;
            self.buffer.clear();
        }
        Ok(())
    }

    /// Ends the object and gives its name; fails as [`Staging::put_object`] does.
    pub fn finish(mut self) -> Result<Stored> {
        self.flush_buffer()?;
        let staging = self.staging;
        let hasher = std::mem::take(&mut self.hasher);
        let size = hasher.size();
        let digest = hasher.finish();
        let Some(spilled) = self.spilled.take() else {
            return staging.put_hashed(digest, self.buffer.filled());
        };
        if staging.is_known(&digest, size)? {
            return Ok(staging.count(digest, size, false));
        }
        let target = staging.object_file(&digest);
        let written = spilled.written;
        let placed = spilled.place(|staging, path| {
            staging.in_shard(&digest, || staging.disk().rename(path, &target, true))
        })?;
        match placed {
            Placed::Known => Ok(staging.count(digest, size, false)),
            Placed::New if staging.enable_verity(&target, &digest)? => {
                Ok(staging.count(digest, size, true))
            }
            Placed::New | Placed::Full => Ok(staging.count_missing(digest, size, written)),
        }
    }
}

impl Drop for ObjectWriter<'_> {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        self.staging.lock_buffers().push(buffer);
    }
}

impl io::Write for ObjectWriter<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.push(data).map(|()| data.len()).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a metadata image or a pack; give it pieces of at least some KiB.
#[derive(Debug)]
pub struct ImageWriter<'a> {
    file: StagedFile<'a>,
    hasher: Hasher,
    /// Which kind of pack of which image it is, if it is one.
    packed: Option<(FileKind, Digest)>,
}

impl<'a> ImageWriter<'a> {
    pub(crate) fn new(staging: &'a Staging, packed: Option<(FileKind, Digest)>) -> Result<Self> {
        Ok(Self { file: StagedFile::new(staging)?, hasher: Hasher::new(), packed })
    }

    /// Appends zeros, as a hole, up to a multiple of so many bytes. Fails as
    /// [`Staging::put_object`] does.
    pub fn pad(&mut self, multiple: u64) -> Result<()> {
        let size = self.hasher.size();
        let zeros = size.next_multiple_of(multiple) - size;
        self.hasher.zeros(zeros);
        self.file.append_hole(zeros)
    }

    /// Ends the image and gives its name; fails as [`Staging::put_object`] does.
    pub fn finish(self) -> Result<Digest> {
        let digest = self.hasher.finish();
        let wanted = self.file.staging.wanted.as_ref();
        if wanted.is_none_or(|wanted| wanted.images.contains(&digest)) {
            self.file.finish(&match self.packed {
                None => FileName::content(FileKind::Image, &digest),
                Some((kind, image)) => FileName::of_image(kind, &image, &digest),
            })?;
        }
        Ok(digest)
    }
}

impl io::Write for ImageWriter<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.hasher.update(data);
        self.file.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
