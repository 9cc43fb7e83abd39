//! What an import tells about itself while it runs. No user interface in here.

/// What an import is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Finding manifest, config and layers.
    Resolve,
    /// Unpacking layers, or reading a directory.
    Unpack,
    /// Writing the metadata image.
    Image,
    /// Making everything durable and publishing it.
    Commit,
    /// The second try, after garbage collection took something that the first relied on.
    Again,
}

/// One layer, as an import sees it before it begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerStart<'a> {
    /// Position in the image, 0 is the lowest.
    pub index: usize,
    /// Layers of the image.
    pub count: usize,
    /// Digest of the blob.
    pub digest: &'a str,
    /// Size of the blob in bytes.
    pub size: u64,
    /// The store has its tree already: nothing will be read.
    pub known: bool,
}

/// Hears how an import goes on. Called from several threads, often: be quick.
pub trait Progress: Sync {
    /// A new phase begins.
    fn phase(&self, _phase: Phase) {}
    /// A layer begins; several may be under way.
    fn layer(&self, _layer: &LayerStart<'_>) {}
    /// `bytes` more of the layer's blob were read (of a directory: of its files; `index` is 0).
    fn bytes(&self, _index: usize, _bytes: u64) {}
    /// A layer is complete, in the store's staging area.
    fn layer_done(&self, _index: usize) {}
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
