//! What an exported image is written to.

use serde::Serialize;

use super::error::ExportError;
use crate::digest::BlobDigest;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlobKind {
    Layer,
    Config,
    Manifest,
}

/// An image that is complete but for its name.
pub(crate) struct Finished {
    pub(crate) manifest: Descriptor,
    pub(crate) config: BlobDigest,
    /// Blobs of the layers, lowest first.
    pub(crate) layers: Vec<BlobDigest>,
    /// What the image is called at the destination.
    pub(crate) name: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: BlobDigest,
    pub(crate) size: u64,
}

/// Takes the blobs of an image one after the other. The image appears when it is complete.
///
/// Dropped without [`Target::publish`] it removes its files.
pub(crate) trait Target {
    fn begin(&mut self, kind: BlobKind) -> Result<(), ExportError>;
    fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError>;
    /// The blob is complete. If it exists already, one of the two copies goes.
    fn end(&mut self, digest: &BlobDigest, size: u64) -> Result<(), ExportError>;
    /// Makes the image visible.
    fn publish(self: Box<Self>, image: &Finished) -> Result<(), ExportError>;

    fn put(&mut self, kind: BlobKind, bytes: &[u8]) -> Result<BlobDigest, ExportError> {
        let digest = BlobDigest::sha256(bytes);
        self.begin(kind)?;
        self.write(bytes)?;
        self.end(&digest, bytes.len() as u64)?;
        Ok(digest)
    }
}
