//! Bounds for what an image may demand.

/// Largest index, manifest or config by default, in bytes (containerd has 8 MiB, registries 4 MiB).
pub(crate) const DOCUMENT_MAX: u64 = 4 << 20;

/// Bounds for what an image may demand. Reaching one is
/// [`ImportError::Limit`](crate::error::ImportError::Limit).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Uncompressed bytes of all layers together, holes of sparse files included. Default 1 TiB.
    pub uncompressed_bytes: u64,
    /// Uncompressed bytes per compressed one, in a layer above `ratio_from_bytes`. Default 200.
    pub ratio: u64,
    /// From how many uncompressed bytes on `ratio` counts. Default 8 GiB.
    pub ratio_from_bytes: u64,
    /// Entries of all layers together. Default 16 Mi.
    pub entries: u64,
    /// Extended headers (PAX, long names) of one entry, in bytes. Default 1 MiB.
    pub extended_header_bytes: u64,
    /// Size of one index, manifest or config, in bytes. Default 4 MiB.
    pub document_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            uncompressed_bytes: 1 << 40,
            ratio: 200,
            ratio_from_bytes: 8 << 30,
            entries: 16 << 20,
            extended_header_bytes: 1 << 20,
            document_bytes: DOCUMENT_MAX,
        }
    }
}
