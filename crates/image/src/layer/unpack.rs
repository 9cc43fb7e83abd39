//! One layer: from its blob to its own tree and its split, its files' content to the store.

use std::io::{self, BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Scope;

use cofolio_erofs::tree::{Content, EXTERNAL_MAX, InodeId, Tree};
use cofolio_store::{
    Digest, Domain, FileKind, FileName, Publish, StagedFile, Staging, StagingStats,
};

use crate::error::{ImportError, shown};
use crate::layer::FoundLayer;
use crate::layer::blob::{Budget, OnRead, Pool, Slice, Stream};
use crate::layer::dumped::{DumpedLayer, LayerDump};
use crate::layer::objects::{FileId, Files, SMALL_MAX, Workers};
use crate::layer::split::{self, Recorder};
use crate::layer::tar::{Entry, MetaLimits, Reader, TarError};
use crate::layer::{LayerTree, Made};
use crate::limits::Limits;
use crate::stored::StoredImage;

/// zstd level of `layers/*.dump.zst`: fast; the text is repetitive enough.
const DUMP_LEVEL: i32 = 1;

pub(crate) struct Shared<'a> {
    pub(crate) budget: &'a Budget,
    pub(crate) limits: &'a Limits,
    pub(crate) pool: Arc<Pool>,
    /// Entries of all layers so far.
    pub(crate) entries: &'a AtomicU64,
}

/// An unpacked layer.
pub(crate) struct Unpacked {
    pub(crate) tree: Tree,
    /// Objects of files that the archive replaces later: only the split names them.
    pub(crate) replaced: Vec<([u8; 32], u64)>,
    pub(crate) counts: Counts,
}

pub(crate) struct Counts {
    pub(crate) entries: u64,
    pub(crate) foreign_xattrs: u64,
    /// Size of the tar archive, in bytes.
    pub(crate) uncompressed: u64,
    /// What publishing it on its own wrote, if it was.
    pub(crate) kept: Option<StagingStats>,
}

/// Unpacks a layer into the staging area: objects, its tree as a dump, its split.
pub(crate) fn unpack<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    shared: &Shared<'env>,
    staging: &Arc<Staging>,
    workers: Workers,
    layer: &FoundLayer,
    on_read: OnRead<'env>,
) -> Result<Unpacked, ImportError> {
    let stream =
        Stream::start(scope, layer.blob.clone(), shared.pool.clone(), shared.budget, on_read)?;
    let name = |kind| FileName::chain(kind, &layer.chain_id.to_string());
    // Small writes: blocks have heads.
    let split = BufWriter::with_capacity(256 << 10, staging.file_writer()?);
    let input = Recorder::new(stream, split).map_err(store_error)?;
    let limits =
        MetaLimits { extended_bytes: shared.limits.extended_header_bytes, ..MetaLimits::default() };
    let mut unpacking = Unpacking {
        shared,
        layer,
        reader: Reader::new(input, limits),
        files: Files::new(workers, staging.clone()),
        tree: LayerTree::new(),
        entries: 0,
        uncompressed: 0,
    };
    unpacking.run().map_err(|error| unpacking.reason(error))?;
    let Unpacking { reader, tree, entries, uncompressed, .. } = unpacking;
    let split = reader.into_input().finish(uncompressed).map_err(store_error)?;
    let split = split.into_inner().map_err(|e| store_error(e.into_error()))?;
    split.finish(&name(FileKind::Split)?)?;
    let counts = Counts { entries, foreign_xattrs: tree.foreign_xattrs, uncompressed, kept: None };
    let tree = tree.tree;
    let mut dump = staging.file_writer()?;
    compress_dump(&tree, &mut dump).map_err(store_error)?;
    dump.finish(&name(FileKind::Layer)?)?;
    let replaced = tree.nameless().filter_map(|inode| match tree.content(inode) {
        Content::External { size, digest: Some(digest), .. } => Some((*digest, size)),
        _ => None,
    });
    Ok(Unpacked { replaced: replaced.collect(), tree, counts })
}

struct Unpacking<'s, 'env> {
    shared: &'s Shared<'env>,
    layer: &'s FoundLayer,
    reader: Reader<Recorder<Stream, BufWriter<StagedFile<'s>>>>,
    files: Files,
    tree: LayerTree,
    entries: u64,
    uncompressed: u64,
}

impl Unpacking<'_, '_> {
    fn run(&mut self) -> Result<(), ImportError> {
        loop {
            let entry = match self.reader.next_entry() {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(error) => return Err(self.tar_error(error)),
            };
            self.entries += 1;
            let before = self.shared.entries.fetch_add(1, Ordering::Relaxed);
            if before >= self.shared.limits.entries {
                let what = format!("layer {}: entries of the image", self.layer.blob.digest);
                return Err(ImportError::limit(what, self.shared.limits.entries, "entries"));
            }
            let made = self.tree.add(&entry).map_err(|what| self.entry_error(&entry, what))?;
            if let Made::File(inode) = made {
                self.file(&entry, inode)?;
            }
            self.take_results(false)?;
        }
        // The end of the archive is not the end of the stream: all of it is hashed, and recorded.
        match self.reader.input().drain() {
            Ok(rest) => self.uncompressed = self.reader.offset() + rest,
            Err(error) => return Err(self.tar_error(error.into())),
        }
        let diff_id = self.reader.input().content().diff_id();
        self.take_results(true)?;
        let actual = diff_id.ok_or_else(|| self.corrupt("the hashing thread is gone"))?;
        if actual != *self.layer.diff_id.as_blob() {
            return Err(ImportError::DiffId {
                digest: self.layer.blob.digest.to_string(),
                expected: self.layer.diff_id.to_string(),
                actual: actual.to_string(),
            });
        }
        Ok(())
    }

    /// A malformed archive may be an altered blob, which the digest of all of it tells.
    fn reason(&mut self, error: ImportError) -> ImportError {
        if !matches!(error, ImportError::Layer { .. }) {
            return error;
        }
        let stream = self.reader.input().content();
        while let Ok(Some(_)) = stream.take_slice(u64::MAX) {}
        match stream.failure() {
            Some(altered @ ImportError::Digest { .. }) => altered,
            _ => error,
        }
    }

    fn file(&mut self, entry: &Entry, inode: InodeId) -> Result<(), ImportError> {
        let size = entry.file_size();
        if size == 0 {
            return Ok(());
        }
        if size > EXTERNAL_MAX {
            let what = format!("its {size} bytes exceed the limit of {EXTERNAL_MAX}");
            return Err(self.entry_error(entry, what));
        }
        if let Some(sparse) = &entry.sparse {
            // Holes cost nothing in the archive nor in the store, but reading them does, and so
            // does the kernel's tree of digests where the filesystem has fs-verity.
            let holes = size - entry.data_size;
            let digest = &self.layer.blob.digest;
            let what = || format!("layer {digest}: holes of {:?}", shown(&entry.path));
            self.shared.budget.take(holes, what)?;
            // Ranges without bytes are nothing in the archive either.
            let ranges: Vec<_> =
                sparse.segments.iter().copied().filter(|range| range.1 > 0).collect();
            let number = match ranges[..] {
                [] => None,
                _ => Some(self.reader.input().split().object(Some(&ranges)).map_err(store_error)?),
            };
            let file = self.files.stream(FileId { inode, number });
            let mut at = 0;
            let mut wanted = true;
            for &(offset, length) in &sparse.segments {
                wanted = wanted && file.hole(offset - at);
                wanted = self.content(length, |slice| wanted && file.data(slice))?;
                at = offset + length;
            }
            let _ = wanted && file.hole(size - at) && file.end();
            return Ok(());
        }
        let number = self.reader.input().split().object(None).map_err(store_error)?;
        let id = FileId { inode, number: Some(number) };
        if size > SMALL_MAX as u64 {
            let file = self.files.stream(id);
            let wanted = self.content(size, |slice| file.data(slice))?;
            let _ = wanted && file.end();
        } else {
            let mut slices = Vec::with_capacity(1);
            self.content(size, |slice| {
                slices.push(slice);
                true
            })?;
            self.files.small(id, slices, size);
        }
        Ok(())
    }

    /// Takes `size` bytes of the current entry; ends early when `take` wants no more.
    fn content(
        &mut self,
        size: u64,
        mut take: impl FnMut(Slice) -> bool,
    ) -> Result<bool, ImportError> {
        let mut left = size;
        while left > 0 {
            let offset = self.reader.offset();
            match self.reader.input().content().take_slice(left) {
                Ok(Some(slice)) => {
                    let length = slice.bytes().len() as u64;
                    self.reader.taken(length);
                    left -= length;
                    if !take(slice) {
                        return Ok(false);
                    }
                }
                Ok(None) => {
                    let what = "the data of a file";
                    return Err(self.tar_error(TarError::Truncated { offset, what }));
                }
                Err(error) => return Err(self.tar_error(error.into())),
            }
        }
        Ok(true)
    }

    fn take_results(&mut self, all: bool) -> Result<(), ImportError> {
        let tree = &mut self.tree.tree;
        let split = self.reader.input().split();
        self.files.results(all, |file, stored| {
            if let Some(number) = file.number {
                split.stored(number, stored.digest, stored.size).map_err(store_error)?;
            }
            // Harmless if the file was replaced meanwhile.
            tree.set_content(file.inode, Content::object(stored.size, &stored.digest.0))
                .map_err(|e| ImportError::Image { what: e.to_string() })
        })
    }

    /// An error of the archive, or the reason why it cannot be read.
    fn tar_error(&mut self, error: TarError) -> ImportError {
        let digest = self.layer.blob.digest.to_string();
        match error {
            TarError::Io(error) => match self.reader.input().content().failure() {
                Some(reason) => reason,
                // Reading is recording: the store may have failed.
                None => match error.downcast::<cofolio_store::Error>() {
                    Ok(error) => ImportError::Store(error),
                    Err(error) => self.corrupt(&error.to_string()),
                },
            },
            TarError::Bad { offset, what } => {
                ImportError::Layer { digest, offset, entry: None, what }
            }
            TarError::Truncated { offset, what } => {
                let what = format!("the archive ends in the middle of {what}");
                ImportError::Layer { digest, offset, entry: None, what }
            }
        }
    }

    fn entry_error(&self, entry: &Entry, what: String) -> ImportError {
        ImportError::Layer {
            digest: self.layer.blob.digest.to_string(),
            offset: entry.offset,
            entry: Some(shown(&entry.path)),
            what,
        }
    }

    fn corrupt(&self, what: &str) -> ImportError {
        ImportError::Corrupt {
            digest: self.layer.blob.digest.to_string(),
            offset: self.reader.offset(),
            what: what.to_owned(),
        }
    }
}

fn compress_dump(tree: &Tree, sink: impl Write) -> io::Result<()> {
    let buffered = BufWriter::with_capacity(256 << 10, sink);
    let mut encoder = zstd::stream::write::Encoder::new(buffered, DUMP_LEVEL)?;
    encoder.include_checksum(true)?;
    let mut text = BufWriter::with_capacity(64 << 10, encoder);
    cofolio_erofs::dump::write(tree, &mut text)?;
    text.into_inner().map_err(io::IntoInnerError::into_error)?.finish()?.flush()
}

/// The objects of a tree, with their sizes; once for each name.
pub(crate) fn objects(tree: &Tree) -> impl Iterator<Item = (Digest, u64)> {
    tree.walk().filter_map(|visit| match tree.content(visit.inode) {
        Content::External { size, digest: Some(digest), .. } => Some((Digest(*digest), size)),
        _ => None,
    })
}

/// Publishes a layer before its image is complete, so that a failed import leaves it to the next
/// one. It has no root: garbage collection may remove it.
pub(crate) fn keep(
    staging: Arc<Staging>,
    tree: &Tree,
    replaced: &[([u8; 32], u64)],
) -> Result<StagingStats, ImportError> {
    let gone = || ImportError::Image { what: "a layer's staging is still in use".into() };
    let staging = Arc::into_inner(staging).ok_or_else(gone)?;
    let replaced = replaced.iter().map(|&(digest, size)| (Digest(digest), size));
    Ok(staging.commit(&Publish::default(), objects(tree).chain(replaced))?)
}

/// Replaces the tree of an unpacked layer by its dump.
pub(crate) fn dumped(
    staging: &Staging,
    layer: &FoundLayer,
    tree: Tree,
) -> Result<DumpedLayer, ImportError> {
    let name = FileName::chain(FileKind::Layer, &layer.chain_id.to_string())?;
    let dump = match staging.open_named(&name)? {
        Some(file) => LayerDump::File(file),
        None => {
            let mut bytes = Vec::new();
            compress_dump(&tree, &mut bytes).map_err(store_error)?;
            LayerDump::Memory(bytes)
        }
    };
    drop(tree);
    DumpedLayer::read(dump).map_err(store_error)
}

/// The store's error inside an I/O error.
pub(crate) fn store_error(error: io::Error) -> ImportError {
    match error.downcast::<cofolio_store::Error>() {
        Ok(error) => ImportError::Store(error),
        Err(source) => ImportError::Io { path: "the store".into(), source },
    }
}

/// A layer that the store has. `None` if it, or its split, cannot be used: then the layer is
/// unpacked again, which replaces nothing, but gives the same tree. `visit` hears its objects.
pub(crate) fn known_layer(
    domain: &Domain,
    chain_id: &str,
    visit: &mut dyn FnMut(Digest, u64),
) -> Result<Option<DumpedLayer>, ImportError> {
    sound((|| {
        let split = FileName::chain(FileKind::Split, chain_id)?;
        if domain.has_named(&split)? {
            let split = domain.open_named(&split)?;
            let split = StoredImage::new(&split).map_err(store_error)?;
            let checked = split::check(&split, visit);
            checked.map_err(|error| store_error(io::Error::other(error)))?;
        }
        let file = domain.open_named(&FileName::chain(FileKind::Layer, chain_id)?)?;
        DumpedLayer::read(LayerDump::File(file)).map_err(store_error)
    })())
}

/// What could be read; `None` if it is missing or damaged.
pub(crate) fn sound<T>(read: Result<T, ImportError>) -> Result<Option<T>, ImportError> {
    match read {
        Err(ImportError::Store(error)) if error.is_race() => Ok(None),
        Err(error) if cofolio_store::is_damage(&error) => Ok(None),
        read => read.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::split::SplitError;
    use rustix::io::Errno;

    /// Lack of descriptors counted as damage to a known layer, and the layer was downloaded again.
    #[test]
    fn lack_of_descriptors_is_no_damage_to_a_layer() {
        let read = |errno: Errno| {
            let split = SplitError::Io(errno.into());
            sound::<()>(Err(store_error(io::Error::other(split))))
        };
        assert!(matches!(read(Errno::MFILE), Err(ImportError::Io { .. })));
        assert_eq!(read(Errno::IO).unwrap(), None);
    }
}
