//! One layer: from its blob to its own tree, its files' content to the store.

use std::io::{self, BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Scope;

use cofolio_erofs::tree::{Content, InodeId, Tree};
use cofolio_store::{Digest, Publish, Staging, StagingStats};

use super::Limits;
use super::blob::{Budget, OnRead, Pool, Stream};
use super::error::{ImportError, shown};
use super::layer::{LayerTree, Made};
use super::objects::{Files, SMALL_MAX, Workers};
use super::overlay::{LayerDump, Overlay};
use super::source::FoundLayer;
use super::tar::{Entry, MetaLimits, Reader, TarError};

/// zstd level of `layers/*.dump.zst`: fast; the text is repetitive enough.
const DUMP_LEVEL: i32 = 1;

/// What all layers of one import share.
pub(crate) struct Shared<'a> {
    pub(crate) budget: &'a Budget,
    pub(crate) limits: &'a Limits,
    pub(crate) pool: Arc<Pool>,
    /// Entries of all layers so far.
    pub(crate) entries: &'a AtomicU64,
}

/// A layer's tree and what there is to say about it.
pub(crate) struct Unpacked {
    pub(crate) tree: Tree,
    pub(crate) counts: Counts,
}

/// What a layer amounted to.
pub(crate) struct Counts {
    pub(crate) entries: u64,
    pub(crate) foreign_xattrs: u64,
    /// Size of the tar archive, in bytes.
    pub(crate) uncompressed: u64,
    /// What publishing it on its own wrote, if it was.
    pub(crate) kept: Option<StagingStats>,
}

/// Unpacks a layer into the staging area: objects, and its tree as a dump.
pub(crate) fn unpack<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    shared: &Shared<'env>,
    staging: &Arc<Staging>,
    workers: Workers,
    layer: &FoundLayer,
    on_read: OnRead<'env>,
) -> Result<Unpacked, ImportError> {
    let stream =
        Stream::start(scope, layer.blob.clone(), shared.pool.clone(), shared.budget, on_read);
    let limits =
        MetaLimits { extended_bytes: shared.limits.extended_header_bytes, ..MetaLimits::default() };
    let mut unpacking = Unpacking {
        shared,
        layer,
        reader: Reader::new(stream, limits),
        files: Files::new(workers, staging.clone()),
        tree: LayerTree::new(),
        entries: 0,
        uncompressed: 0,
    };
    unpacking.run()?;
    let counts = Counts {
        entries: unpacking.entries,
        foreign_xattrs: unpacking.tree.foreign_xattrs,
        uncompressed: unpacking.uncompressed,
        kept: None,
    };
    let Unpacking { tree, .. } = unpacking;
    let tree = tree.into_tree();
    write_dump(staging, layer, &tree)?;
    Ok(Unpacked { tree, counts })
}

struct Unpacking<'scope, 's, 'env> {
    shared: &'s Shared<'env>,
    layer: &'s FoundLayer,
    reader: Reader<Stream<'scope>>,
    files: Files,
    tree: LayerTree,
    entries: u64,
    uncompressed: u64,
}

impl Unpacking<'_, '_, '_> {
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
                return Err(ImportError::Limit {
                    what: format!("layer {}: entries of the image", self.layer.blob.digest),
                    limit: self.shared.limits.entries,
                    option: "entries",
                });
            }
            let made = self.tree.add(&entry).map_err(|what| self.entry_error(&entry, what))?;
            if let Made::File(inode) = made {
                self.file(&entry, inode)?;
            }
            self.take_results(false)?;
        }
        // Before the end of the archive is not the end of the stream: all of it is hashed.
        let archive = self.reader.offset();
        let diff_id = match self.reader.input().finish() {
            Ok((rest, diff_id)) => {
                self.uncompressed = archive + rest;
                diff_id
            }
            Err(error) => return Err(self.tar_error(error.into())),
        };
        self.take_results(true)?;
        let actual = diff_id.ok_or_else(|| self.corrupt("the hashing thread is gone"))?;
        if actual != self.layer.diff_id {
            return Err(ImportError::DiffId {
                digest: self.layer.blob.digest.to_string(),
                expected: self.layer.diff_id.to_string(),
                actual: actual.to_string(),
            });
        }
        Ok(())
    }

    /// Sends a file's content on its way to the store.
    fn file(&mut self, entry: &Entry, inode: InodeId) -> Result<(), ImportError> {
        let size = entry.file_size();
        if size == 0 {
            return Ok(());
        }
        if size > cofolio_erofs::tree::EXTERNAL_MAX {
            return Err(self.entry_error(entry, format!("a file of {size} bytes is absurd")));
        }
        if let Some(sparse) = &entry.sparse {
            // Holes cost nothing in the archive nor in the store, but reading them does, and so does the
            // kernel's tree of digests where the filesystem has fs-verity.
            let holes = size - entry.data_size;
            let digest = &self.layer.blob.digest;
            self.shared
                .budget
                .take(holes, || format!("layer {digest}: holes of {:?}", shown(&entry.path)))?;
            let file = self.files.stream(inode);
            let mut at = 0;
            let mut wanted = true;
            for &(offset, length) in &sparse.segments {
                wanted = wanted && file.hole(offset - at);
                wanted = self.pieces(length, |piece| wanted && file.data(piece))?;
                at = offset + length;
            }
            let _ = wanted && file.hole(size - at) && file.end();
        } else if size > SMALL_MAX {
            let file = self.files.stream(inode);
            let wanted = self.pieces(size, |piece| file.data(piece))?;
            let _ = wanted && file.end();
        } else {
            let mut pieces = Vec::with_capacity(1);
            self.pieces(size, |piece| {
                pieces.push(piece);
                true
            })?;
            self.files.small(inode, pieces, size);
        }
        Ok(())
    }

    /// Takes `size` bytes of the current entry; ends early when `take` wants no more.
    fn pieces(
        &mut self,
        size: u64,
        mut take: impl FnMut(super::blob::Piece) -> bool,
    ) -> Result<bool, ImportError> {
        let mut left = size;
        while left > 0 {
            let offset = self.reader.offset();
            match self.reader.input().take_piece(left) {
                Ok(Some(piece)) => {
                    let length = piece.bytes().len() as u64;
                    self.reader.taken(length);
                    left -= length;
                    if !take(piece) {
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
        let tree = &mut self.tree;
        self.files.results(all, |inode, stored| {
            tree.set_content(inode, Content::object(stored.size, &stored.digest.0))
                .map_err(|e| ImportError::Image { what: e.to_string() })
        })
    }

    /// An error of the archive, or the reason why it cannot be read.
    fn tar_error(&mut self, error: TarError) -> ImportError {
        let digest = self.layer.blob.digest.to_string();
        match error {
            TarError::Io(error) => match self.reader.input().failure() {
                Some(reason) => reason,
                None => self.corrupt(&error.to_string()),
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

/// Writes the layer's tree to the staging area.
fn write_dump(staging: &Staging, layer: &FoundLayer, tree: &Tree) -> Result<(), ImportError> {
    let mut file = staging.layer_writer(&layer.chain_id.to_string())?;
    compress_dump(tree, &mut file).map_err(store_error)?;
    file.finish()?;
    Ok(())
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

/// Publishes a layer on its own, before its image is complete: should the import not come to its end, the
/// next one knows the layer. Nothing keeps it until then but the rarity of garbage collections.
pub(crate) fn keep(staging: Arc<Staging>, tree: &Tree) -> Result<StagingStats, ImportError> {
    let gone = || ImportError::Image { what: "a layer's staging is still in use".into() };
    let staging = Arc::into_inner(staging).ok_or_else(gone)?;
    staging.commit(&Publish::default(), objects(tree)).map_err(commit_error)
}

/// Says what a failed commit means.
pub(crate) fn commit_error(error: cofolio_store::Error) -> ImportError {
    match error {
        cofolio_store::Error::NoSpace { missing } => {
            ImportError::NoSpace { missing_bytes: missing }
        }
        other => ImportError::Store(other),
    }
}

/// Gives up the tree of an unpacked layer for its dump, which was written.
pub(crate) fn overlay(
    staging: &Staging,
    layer: &FoundLayer,
    tree: Tree,
) -> Result<Overlay, ImportError> {
    let dump = match staging.open_layer(&layer.chain_id.to_string())? {
        Some(file) => LayerDump::File(file),
        None => {
            let mut bytes = Vec::new();
            compress_dump(&tree, &mut bytes).map_err(store_error)?;
            LayerDump::Memory(bytes)
        }
    };
    drop(tree);
    Overlay::read(dump).map_err(store_error)
}

/// Takes the store's own error back out of the I/O error that it travelled in.
pub(crate) fn store_error(error: io::Error) -> ImportError {
    match error.downcast::<cofolio_store::Error>() {
        Ok(error) => ImportError::Store(error),
        Err(source) => ImportError::Io { path: "the store".into(), source },
    }
}

/// A layer that the store has. `None` if it cannot be used: then the layer is unpacked again, which
/// replaces nothing, but gives the same tree.
pub(crate) fn known_layer(staging: &Staging, layer: &FoundLayer) -> Option<Overlay> {
    let file = staging.domain().open_layer(&layer.chain_id.to_string()).ok()?;
    Overlay::read(LayerDump::File(file)).ok()
}
