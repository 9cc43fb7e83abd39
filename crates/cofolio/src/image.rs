//! Looking into an image without mounting it: `ls`, `cat`, `dump`, `inspect`.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cofolio_erofs::read::{Image, Inode, ReadAt};
use cofolio_image::compose::named_objects;
use cofolio_image::files;
use cofolio_store::{Digest, Domain, verity};

use crate::context::{Context, Named};
use crate::exit::{Exit, Fail};

/// Symbolic links followed on one path, as the kernel does (`MAXSYMLINKS`).
const LINKS_MAX: u32 = 40;
/// Files up to this size, in bytes, are checked before any of their content is printed.
const SMALL_MAX: u64 = 16 << 20;
/// Where a composefs image says at which path the content of a file lies.
const REDIRECT: &[u8] = b"trusted.overlay.redirect";

/// An image file as bytes.
pub(crate) struct Source {
    file: File,
    size: u64,
}

impl Source {
    fn new(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }
}

impl ReadAt for Source {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn size(&self) -> u64 {
        self.size
    }
}

/// Hashes what is written to a sink.
pub(crate) struct Hashing<W> {
    pub(crate) sink: W,
    pub(crate) hasher: verity::Hasher,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.sink.write(data)?;
        self.hasher.update(&data[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// Where the content of files lies that is not in the image.
enum Objects {
    Store(Domain),
    Directory(PathBuf),
    Unknown,
}

pub(crate) struct Opened {
    pub(crate) image: Image<Source>,
    /// The image of the store that it is; `None` for an image file elsewhere.
    pub(crate) named: Option<Named>,
    /// Its name in messages.
    pub(crate) label: String,
    objects: Objects,
}

/// Opens an image by ref, digest or path; `objects` is the object directory of an image file.
pub(crate) fn open(
    context: &Context<'_>,
    text: &str,
    objects: Option<&Path>,
) -> anyhow::Result<Opened> {
    let is_path = ["/", "./", "../"].iter().any(|start| text.starts_with(start));
    if !is_path && objects.is_none() {
        let domain = context.domain();
        let found = domain.and_then(|domain| Ok((context.image(&domain, text)?, domain)));
        match found {
            Ok((named, domain)) => {
                let file = domain.open_image(&named.digest)?.to_std()?;
                let label = named.shown();
                let image = Image::open(Source::new(file)?)
                    .with_context(|| format!("image {}", named.digest))?;
                return Ok(Opened {
                    image,
                    named: Some(named),
                    label,
                    objects: Objects::Store(domain),
                });
            }
            // Not in the store: a file of that name in this directory may be meant.
            Err(error) if !Path::new(text).is_file() => return Err(error),
            Err(_) => {}
        }
    }
    let file = files::open(Path::new(text)).with_context(|| format!("opening {text}"))?;
    let source = Source::new(file).with_context(|| format!("reading {text}"))?;
    let image = Image::open(source).with_context(|| text.to_owned())?;
    let objects = match objects {
        Some(directory) => Objects::Directory(directory.to_owned()),
        None => Objects::Unknown,
    };
    Ok(Opened { image, named: None, label: text.to_owned(), objects })
}

impl Opened {
    /// The inode at a path. Symbolic links are followed within the image, the last if `follow`.
    pub(crate) fn resolve(&self, path: &[u8], follow: bool) -> anyhow::Result<Inode> {
        let shown = || crate::ui::printable(path);
        let none = || Fail::not_found(format!("no `{}` in {}", shown(), self.label));
        let mut links = 0;
        // Directories walked into, for `..`, and what is still to be walked, last component first.
        let mut trail = vec![self.image.root()?];
        let components = |path: &[u8]| -> Vec<Vec<u8>> {
            path.split(|&b| b == b'/').rev().filter(|c| !c.is_empty()).map(<[u8]>::to_vec).collect()
        };
        let mut todo = components(path);
        let mut current = trail[0];
        while let Some(name) = todo.pop() {
            if !current.is_dir() {
                return Err(none().into());
            }
            match name.as_slice() {
                b"." => continue,
                b".." => {
                    if trail.len() > 1 {
                        trail.pop();
                    }
                    current = trail[trail.len() - 1];
                    continue;
                }
                _ => {}
            }
            let entry = self.image.lookup(&current, &name)?.ok_or_else(none)?;
            let inode = self.image.inode(entry.nid)?;
            if inode.is_symlink() && (follow || !todo.is_empty()) {
                links += 1;
                if links > LINKS_MAX {
                    let what = format!("`{}`: too many levels of symbolic links", shown());
                    return Err(Fail::new(Exit::Failure, what).into());
                }
                let target = self.image.readlink(&inode)?;
                if target.starts_with(b"/") {
                    trail.truncate(1);
                    current = trail[0];
                }
                todo.extend(components(&target));
                continue;
            }
            if inode.is_dir() {
                trail.push(inode);
            }
            current = inode;
        }
        Ok(current)
    }

    /// Whether an inode is no part of what was imported: see [`named_objects::is_added`].
    pub(crate) fn is_added(&self, inode: &Inode) -> bool {
        named_objects::is_added(&self.image, inode)
    }

    /// The path of the object that holds a file's content; `None` if it is in the image.
    pub(crate) fn object(&self, inode: &Inode) -> anyhow::Result<Option<Vec<u8>>> {
        if !inode.is_file()
            || !inode.is_chunk_based()
            || self.image.superblock().composefs_version.is_none()
        {
            return Ok(None);
        }
        let redirect = self.image.xattrs(inode)?.into_iter().find(|xattr| xattr.name == REDIRECT);
        Ok(redirect
            .map(|xattr| xattr.value.strip_prefix(b"/").map(<[u8]>::to_vec).unwrap_or(xattr.value)))
    }

    /// Writes a regular file. The digest is checked before writing a small file, else at the end.
    pub(crate) fn copy_to(&self, inode: &Inode, sink: &mut dyn Write) -> anyhow::Result<()> {
        let Some(object) = self.object(inode)? else { return self.copy_own(inode, sink) };
        let path = String::from_utf8_lossy(&object).into_owned();
        let bad = |what| match self.objects {
            Objects::Store(_) => Fail::damaged(what),
            _ => Fail::new(Exit::Corrupt, what),
        };
        let expected = path.rsplit_once('/').and_then(|(rest, name)| {
            let shard = rest.rsplit_once('/').map_or(rest, |(_, shard)| shard);
            Digest::from_object_path(shard, name)
        });
        let mut file = match &self.objects {
            Objects::Store(domain) => {
                let what = || format!("{}: `{path}` is no path of an object", self.label);
                domain.open_object(&expected.ok_or_else(|| bad(what()))?)?.to_std()?
            }
            Objects::Directory(directory) => {
                // The path is the image's word; it must not lead out of the directory.
                let plain = Path::new(&path)
                    .components()
                    .all(|c| matches!(c, std::path::Component::Normal(_)));
                if !plain {
                    let what =
                        format!("{}: `{path}` leads out of the object directory", self.label);
                    return Err(Fail::new(Exit::Corrupt, what).into());
                }
                let path = directory.join(&path);
                files::open(&path).with_context(|| format!("opening {}", path.display()))?
            }
            Objects::Unknown => {
                let what = format!("{}: the file's content is not in the image", self.label);
                let hint = "--objects DIR says where its objects are";
                return Err(Fail::not_found(what).hint(hint).into());
            }
        };
        let found = file.metadata()?.len();
        if found != inode.size {
            let what =
                format!("object {path} has {found} bytes, {} says {}", self.label, inode.size);
            return Err(bad(what).into());
        }
        let Some(expected) = expected else {
            io::copy(&mut file, sink)?;
            return Ok(());
        };
        let altered = |actual: Digest, printed: &str| {
            let what =
                format!("object {expected} is altered: its content has digest {actual}{printed}");
            anyhow::Error::from(bad(what))
        };
        if found <= SMALL_MAX {
            let mut content = Vec::new();
            file.read_to_end(&mut content)?;
            let actual = verity::digest(&content);
            if actual != expected {
                return Err(altered(actual, ""));
            }
            return Ok(sink.write_all(&content)?);
        }
        let mut hashing = Hashing { sink, hasher: verity::Hasher::new() };
        io::copy(&mut BufReader::with_capacity(1 << 16, file), &mut hashing)?;
        match hashing.hasher.finish() {
            actual if actual == expected => Ok(()),
            actual => Err(altered(actual, "; what was printed is wrong")),
        }
    }

    fn copy_own(&self, inode: &Inode, sink: &mut dyn Write) -> anyhow::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        let mut offset = 0;
        while offset < inode.size {
            let len = self.image.read(inode, offset, &mut buffer)?;
            if len == 0 {
                break;
            }
            sink.write_all(&buffer[..len])?;
            offset += len as u64;
        }
        Ok(())
    }
}

/// Type and permissions as `ls -l` shows them.
pub(crate) fn mode_text(mode: u32) -> String {
    let kind = match mode & 0o170_000 {
        0o040_000 => 'd',
        0o120_000 => 'l',
        0o020_000 => 'c',
        0o060_000 => 'b',
        0o010_000 => 'p',
        0o140_000 => 's',
        _ => '-',
    };
    let mut text = String::from(kind);
    let sets = [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')];
    for (shift, special, letter) in sets {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & special != 0) {
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// The word for a file type, for JSON.
pub(crate) fn kind_word(mode: u32) -> &'static str {
    match mode & 0o170_000 {
        0o040_000 => "directory",
        0o120_000 => "symlink",
        0o020_000 => "char-device",
        0o060_000 => "block-device",
        0o010_000 => "fifo",
        0o140_000 => "socket",
        _ => "file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_as_ls_shows_them() {
        assert_eq!(mode_text(0o100_644), "-rw-r--r--");
        assert_eq!(mode_text(0o041_777), "drwxrwxrwt");
        assert_eq!(mode_text(0o104_755), "-rwsr-xr-x");
        assert_eq!(mode_text(0o102_644), "-rw-r-Sr--");
        assert_eq!(mode_text(0o120_777), "lrwxrwxrwx");
    }
}
