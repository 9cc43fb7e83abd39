//! A layer's archive from its unpacked files and its tar-split: lines of JSON with the bytes of the
//! archive (base64), and the places of files' content.
//!
//! The result is checked against the diff-id. The CRC-64 of each file would also name an altered
//! file, but costs another pass over all content.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_store::task::Cancel;
use flate2::bufread::MultiGzDecoder;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use serde::Deserialize;

use crate::digest::BlobDigest;
use crate::error::shown;
use crate::files::open_regular;
use crate::layer::blob::Content;

/// Longest line, in bytes: the padding at the end of an archive is one.
const LINE_MAX: u64 = 64 << 20;

/// A layer that an engine has unpacked.
pub(crate) struct UnpackedLayer {
    /// The compressed tar-split.
    pub(crate) tar_split: PathBuf,
    /// The directory with the files.
    pub(crate) files: PathBuf,
}

impl Content for UnpackedLayer {
    fn open(&self, _: &BlobDigest, _: u64, _: Option<&Cancel>) -> Box<dyn Read + Send> {
        Box::new(Guarded(Archive::open(&self.tar_split, &self.files).map_err(failure)))
    }
}

/// An error that can be repeated.
type Failure = (io::ErrorKind, String);

fn failure(error: io::Error) -> Failure {
    (error.kind(), error.to_string())
}

/// An archive that repeats its error, so that skipping to the end does not look short.
struct Guarded<R>(Result<R, Failure>);

impl<R: Read> Read for Guarded<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let (kind, what) = match &mut self.0 {
            Ok(archive) => match archive.read(buf) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => failure(e),
                done => return done,
            },
            Err(failure) => failure.clone(),
        };
        self.0 = Err((kind, what.clone()));
        Err(io::Error::new(kind, what))
    }
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: u8,
    #[serde(borrow, default)]
    name: Option<Cow<'a, str>>,
    /// A name that is not UTF-8, in base64.
    #[serde(borrow, default)]
    name_raw: Option<Cow<'a, str>>,
    #[serde(default)]
    size: u64,
    /// Bytes of the archive; the CRC-64 of a file.
    #[serde(borrow, default)]
    payload: Option<Cow<'a, str>>,
}

/// A file's content.
const FILE: u8 = 1;
/// Bytes of the archive.
const SEGMENT: u8 = 2;

struct Archive<R> {
    lines: R,
    root: OwnedFd,
    /// Bytes of the archive.
    segment: Cursor<Vec<u8>>,
    file: Option<OpenFile>,
    line: Vec<u8>,
}

/// A file whose content is being given out.
struct OpenFile {
    name: Vec<u8>,
    file: File,
    left: u64,
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Archive<BufReader<MultiGzDecoder<BufReader<File>>>> {
    fn open(tar_split: &Path, files: &Path) -> io::Result<Self> {
        let named = |path: &Path, e: io::Error| {
            io::Error::new(e.kind(), format!("{}: {e}", path.display()))
        };
        let packed = open_regular(tar_split).map_err(|e| named(tar_split, e))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root =
            rustix::fs::open(files, flags, Mode::empty()).map_err(|e| named(files, e.into()))?;
        Ok(Self::new(BufReader::new(MultiGzDecoder::new(BufReader::new(packed))), root))
    }
}

impl<R: BufRead> Archive<R> {
    fn new(lines: R, root: OwnedFd) -> Self {
        Self { lines, root, segment: Cursor::default(), file: None, line: Vec::new() }
    }

    /// Goes on to the next line; false at the end.
    fn next(&mut self) -> io::Result<bool> {
        self.line.clear();
        let read = (&mut self.lines).take(LINE_MAX).read_until(b'\n', &mut self.line);
        let length = read.map_err(|e| io::Error::new(e.kind(), format!("its tar-split: {e}")))?;
        if length == 0 {
            return Ok(false);
        }
        if length as u64 == LINE_MAX {
            return Err(invalid(format!("its tar-split has a line of more than {LINE_MAX} bytes")));
        }
        let line: Line<'_> = serde_json::from_slice(&self.line)
            .map_err(|e| invalid(format!("its tar-split: {e}")))?;
        let decode = |text: &str, into: &mut Vec<u8>| {
            let decoded = BASE64_STANDARD.decode_vec(text, into);
            decoded.map_err(|e| invalid(format!("its tar-split: {e}")))
        };
        match line.kind {
            SEGMENT => {
                self.segment.get_mut().clear();
                self.segment.set_position(0);
                decode(line.payload.as_deref().unwrap_or_default(), self.segment.get_mut())?;
            }
            FILE if line.size > 0 => {
                let mut name = Vec::new();
                match &line.name_raw {
                    Some(raw) => decode(raw, &mut name)?,
                    None => {
                        name.extend_from_slice(line.name.as_deref().unwrap_or_default().as_bytes())
                    }
                }
                let file = self.open_file(&name, line.size)?;
                self.file = Some(OpenFile { name, file, left: line.size });
            }
            // Links, directories and empty files have no content.
            FILE => {}
            other => return Err(invalid(format!("its tar-split has an entry of type {other}"))),
        }
        Ok(true)
    }

    /// Opens a file of the layer. Links cannot lead out of it.
    fn open_file(&self, name: &[u8], size: u64) -> io::Result<File> {
        let failed = |e: rustix::io::Errno| {
            let e = io::Error::from(e);
            io::Error::new(e.kind(), format!("its file {:?}: {e}", shown(name)))
        };
        // Opening anything but a regular file must not block.
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let fd =
            rustix::fs::openat2(&self.root, name, flags, Mode::empty(), resolve).map_err(failed)?;
        let stat = rustix::fs::fstat(&fd).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(invalid(format!("its file {:?} is no regular file", shown(name))));
        }
        let have = u64::try_from(stat.st_size).unwrap_or(0);
        if have != size {
            return Err(invalid(format!(
                "its file {:?} has {have} bytes, in the archive it had {size}",
                shown(name)
            )));
        }
        Ok(fd.into())
    }
}

impl<R: BufRead> Read for Archive<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            if let Some(file) = &mut self.file {
                let length = buf.len().min(usize::try_from(file.left).unwrap_or(usize::MAX));
                let count = file.file.read(&mut buf[..length])?;
                if count == 0 {
                    let what = format!("its file {:?} became shorter", shown(&file.name));
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
                }
                file.left -= count as u64;
                if file.left == 0 {
                    self.file = None;
                }
                return Ok(count);
            }
            match self.segment.read(buf)? {
                0 if self.next()? => {}
                count => return Ok(count),
            }
        }
    }
}

/// Reads an archive of these lines and the files below `files`, for the fuzz targets.
#[cfg(fuzzing)]
pub(crate) fn fuzz(lines: &[u8], files: OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    Archive::new(lines, files).read_to_end(&mut bytes).map(|_| bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    fn archive(dir: &Path, lines: &str) -> io::Result<Vec<u8>> {
        let root = File::open(dir)?.into();
        let mut bytes = Vec::new();
        Archive::new(lines.as_bytes(), root).read_to_end(&mut bytes).map(|_| bytes)
    }

    #[test]
    fn segments_and_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), b"content").unwrap();
        std::fs::write(dir.path().join(std::ffi::OsStr::from_bytes(b"\xff")), b"raw").unwrap();
        let lines = "{\"type\":2,\"payload\":\"aGVhZA==\",\"position\":0}\n\
            {\"type\":1,\"name\":\"a\",\"size\":7,\"payload\":\"AAAAAAAAAAA=\",\"position\":1}\n\
            {\"type\":1,\"name\":\"gone\",\"payload\":null,\"position\":2}\n\
            {\"type\":1,\"name_raw\":\"/w==\",\"size\":3,\"payload\":\"\",\"position\":3}\n\
            {\"type\":2,\"payload\":\"\",\"position\":4}\n";
        assert_eq!(archive(dir.path(), lines).unwrap(), b"headcontentraw");
    }

    /// A layer can hold a link to anywhere, and its tar-split can name what it wants.
    #[test]
    fn names_do_not_leave_the_layer() {
        let dir = tempfile::tempdir().unwrap();
        let layer = dir.path().join("layer");
        std::fs::create_dir(&layer).unwrap();
        std::fs::write(dir.path().join("secret"), b"secret").unwrap();
        std::os::unix::fs::symlink(dir.path(), layer.join("out")).unwrap();
        std::os::unix::fs::symlink("../secret", layer.join("link")).unwrap();
        std::fs::write(layer.join("short"), b"sh").unwrap();
        for name in ["../secret", "out/secret", "link", "/secret", "short", "."] {
            let line = format!("{{\"type\":1,\"name\":{name:?},\"size\":6}}\n");
            assert!(archive(&layer, &line).is_err(), "{name}");
        }
        for bad in [
            "{\"type\":3}\n",
            "{\"type\":2,\"payload\":\"?\"}\n",
            "no json\n",
            "{\"type\":1,\"name\":\"a\\u0000b\",\"size\":1}",
        ] {
            assert!(archive(&layer, bad).is_err(), "{bad}");
        }
    }
}
