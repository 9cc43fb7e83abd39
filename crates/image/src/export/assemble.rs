//! From a layer's split and its objects back to its tar archive, each object checked on the way.

use cofolio_store::task::Cancel;
use cofolio_store::verity::Hasher;
use cofolio_store::{Digest, Domain, FileKind, FileName, Piece, Stretch, stretch_at};

use super::error::ExportError;
use crate::layer::split::{Instruction, Split, SplitError};
use crate::stored::StoredImage;

const READ_SIZE: usize = 256 << 10;
/// An object with at least this many bytes in holes is a sparse file in a new archive.
const HOLES_MIN: u64 = 1 << 20;
/// Most extents of a sparse file; readers, ours among them, bound their number.
const EXTENTS_MAX: usize = 1 << 16;

/// Takes an archive piece by piece.
pub(crate) type Sink<'a> = dyn FnMut(&[u8]) -> Result<(), ExportError> + 'a;

pub(crate) fn layer(
    domain: &Domain,
    chain_id: &str,
    cancel: &Cancel,
    sink: &mut Sink<'_>,
) -> Result<(), ExportError> {
    let bad = |error: SplitError| ExportError::Split {
        layer: chain_id.to_owned(),
        what: error.to_string(),
    };
    let file = domain.open_named(&FileName::chain(FileKind::Split, chain_id)?)?;
    let source = StoredImage::new(&file).map_err(|error| bad(error.into()))?;
    let mut split = Split::open(&source).map_err(bad)?;
    let mut buffer = vec![0; READ_SIZE];
    let user = format!("layer {chain_id}");
    loop {
        match split.instruction().map_err(bad)? {
            Instruction::End => return Ok(()),
            Instruction::Literal => loop {
                let count = split.read(&mut buffer).map_err(bad)?;
                if count == 0 {
                    break;
                }
                sink(&buffer[..count])?;
            },
            Instruction::Object { digest, size, ranges } => {
                let mut object = Object::open(domain, digest, size, (&user, cancel))?;
                match ranges {
                    None => object.take(size, Some(&mut *sink))?,
                    Some(_) => {
                        while let Some((hole, data)) = split.range().map_err(bad)? {
                            object.take(hole, None)?;
                            object.take(data, Some(&mut *sink))?;
                        }
                        object.take(object.left, None)?;
                    }
                }
                object.check()?;
            }
        }
    }
}

/// An object that is being read, and hashed.
pub(crate) struct Object<'a> {
    file: cofolio_store::StoredFile,
    digest: Digest,
    user: &'a str,
    cancel: &'a Cancel,
    hasher: Hasher,
    left: u64,
}

impl<'a> Object<'a> {
    pub(crate) fn open(
        domain: &Domain,
        digest: Digest,
        size: u64,
        (user, cancel): (&'a str, &'a Cancel),
    ) -> Result<Self, ExportError> {
        let file = match domain.open_object(&digest) {
            Ok(file) => file,
            Err(cofolio_store::Error::NoSuch(_)) => {
                let what = "it is not in the store".to_owned();
                return Err(ExportError::Object { digest, user: user.to_owned(), what });
            }
            Err(error) => return Err(error.into()),
        };
        let object = Self { file, digest, user, cancel, hasher: Hasher::new(), left: size };
        match object.file.size() {
            Ok(found) if found == size => Ok(object),
            Ok(found) => Err(object.bad(format!("it has {found} bytes and not {size}"))),
            Err(error) => Err(object.bad(error.to_string())),
        }
    }

    /// Its extents of data (offset, length), if its holes are worth leaving out of an archive.
    pub(crate) fn sparse_extents(&self) -> Result<Option<Vec<(u64, u64)>>, ExportError> {
        if self.left < HOLES_MIN {
            return Ok(None);
        }
        let bad = |error: std::io::Error| self.bad(error.to_string());
        let file = self.file.to_std().map_err(bad)?;
        let (mut extents, mut at, mut data) = (Vec::new(), 0, 0);
        while at < self.left && extents.len() <= EXTENTS_MAX {
            at += match stretch_at(&file, at).map_err(bad)? {
                Stretch::Hole(len) => len,
                Stretch::Data(len) => {
                    let len = len.min(self.left - at);
                    extents.push((at, len));
                    data += len;
                    len
                }
            };
        }
        let is_sparse = self.left - data >= HOLES_MIN && extents.len() <= EXTENTS_MAX;
        Ok(is_sparse.then_some(extents))
    }

    /// Reads the next `count` bytes; without a sink they are only hashed.
    pub(crate) fn take(
        &mut self,
        count: u64,
        mut sink: Option<&mut Sink<'_>>,
    ) -> Result<(), ExportError> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let cancel = self.cancel;
        self.take_pieces(count, |piece| {
            let Some(sink) = &mut sink else { return Ok(()) };
            match piece {
                Piece::Data(bytes) => sink(bytes),
                Piece::Hole(mut len) => {
                    while len > 0 {
                        cancel.check()?;
                        let zeros = usize::try_from(len).unwrap_or(ZEROS.len()).min(ZEROS.len());
                        sink(&ZEROS[..zeros])?;
                        len -= zeros as u64;
                    }
                    Ok(())
                }
            }
        })
    }

    /// Reads on; holes are not read.
    pub(crate) fn take_pieces(
        &mut self,
        count: u64,
        mut each: impl FnMut(Piece<'_>) -> Result<(), ExportError>,
    ) -> Result<(), ExportError> {
        let start = self.hasher.size();
        if count > self.left {
            return Err(self.bad("the split takes more of it than there is".to_owned()));
        }
        let (hasher, cancel) = (&mut self.hasher, self.cancel);
        self.file.for_pieces_in(start..start + count, |piece| {
            cancel.check()?;
            match piece {
                Piece::Data(bytes) => hasher.update(bytes),
                Piece::Hole(len) => hasher.zeros(len),
            }
            each(piece)
        })?;
        self.left -= count;
        match self.hasher.size() == start + count {
            true => Ok(()),
            false => Err(self.bad("it ends too early".to_owned())),
        }
    }

    /// Compares the digest, once all content was taken.
    pub(crate) fn check(self) -> Result<(), ExportError> {
        let actual = self.hasher.clone().finish();
        if actual == self.digest {
            return Ok(());
        }
        Err(self.bad(format!("its content has digest {actual}")))
    }

    fn bad(&self, what: String) -> ExportError {
        ExportError::Object { digest: self.digest, user: self.user.to_owned(), what }
    }
}
