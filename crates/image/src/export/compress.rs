//! Compressing a layer on all processors in bounded memory, always to the same bytes.
//!
//! The archive is cut into chunks of fixed size, and each becomes a gzip member or a zstd frame of
//! its own. Members and frames that follow one another are one stream to every reader of layers:
//! estargz and zstd:chunked are made so.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::thread::Scope;

use crossbeam_channel as channel;
use sha2::{Digest as _, Sha256};

use super::ExportedLayer;
use super::assemble::Sink;
use super::error::ExportError;
use crate::digest::{BlobHasher, DiffId};
use crate::threads::{NoThread, spawn_up_to};

/// What a member or frame holds, in bytes.
const CHUNK: usize = 2 << 20;
/// As `gzip` does it.
const GZIP_LEVEL: u32 = 6;
/// As `zstd` does it.
const ZSTD_LEVEL: i32 = 3;

/// How layers are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// gzip: what everybody reads.
    #[default]
    Gzip,
    /// zstd: smaller and faster; Docker 23, containerd 1.5 and podman read it.
    Zstd,
    /// Not at all: the blob is the archive itself.
    None,
}

impl Compression {
    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
            Self::None => "application/vnd.oci.image.layer.v1.tar",
        }
    }

    fn compress(self, chunk: Vec<u8>) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip => {
                let room = Vec::with_capacity(chunk.len() / 2);
                let level = flate2::Compression::new(GZIP_LEVEL);
                let mut encoder = flate2::write::GzEncoder::new(room, level);
                encoder.write_all(&chunk)?;
                encoder.finish()
            }
            Self::Zstd => zstd::bulk::compress(&chunk, ZSTD_LEVEL),
            Self::None => Ok(chunk),
        }
    }
}

struct Job {
    chunk: Vec<u8>,
    reply: channel::Sender<io::Result<Vec<u8>>>,
}

pub(crate) struct Compressors {
    compression: Compression,
    jobs: channel::Sender<Job>,
    /// Chunks of a layer that may be under way.
    ahead: usize,
}

impl Compressors {
    /// Starts `count` threads, for `layers` layers at a time; they end when this is dropped.
    pub(crate) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        compression: Compression,
        count: usize,
        layers: usize,
    ) -> Result<Self, NoThread> {
        let (jobs, queue) = channel::unbounded::<Job>();
        let threads = if compression == Compression::None { 0 } else { count };
        spawn_up_to(scope, threads, || {
            let queue = queue.clone();
            move || {
                for job in queue {
                    // Nobody listens any more if the export failed.
                    let _ = job.reply.send(compression.compress(job.chunk));
                }
            }
        })?;
        Ok(Self { compression, jobs, ahead: count.div_ceil(layers.max(1)) + 2 })
    }
}

/// Takes a layer's archive and gives its blob to a sink.
pub(crate) struct BlobWriter<'a> {
    compressors: &'a Compressors,
    sink: &'a mut Sink<'a>,
    chunk: Vec<u8>,
    under_way: VecDeque<channel::Receiver<io::Result<Vec<u8>>>>,
    diff_id: Sha256,
    pub(crate) uncompressed: u64,
    digest: BlobHasher,
    size: u64,
}

impl<'a> BlobWriter<'a> {
    pub(crate) fn new(compressors: &'a Compressors, sink: &'a mut Sink<'a>) -> Self {
        Self {
            compressors,
            sink,
            chunk: Vec::with_capacity(CHUNK),
            under_way: VecDeque::new(),
            diff_id: Sha256::new(),
            uncompressed: 0,
            digest: BlobHasher::new(),
            size: 0,
        }
    }

    /// Takes the next bytes of the archive.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<(), ExportError> {
        self.diff_id.update(bytes);
        self.uncompressed += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(CHUNK - self.chunk.len()));
            self.chunk.extend_from_slice(now);
            bytes = rest;
            if self.chunk.len() == CHUNK {
                let chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK));
                self.send(chunk)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, chunk: Vec<u8>) -> Result<(), ExportError> {
        if self.compressors.compression == Compression::None {
            self.size += chunk.len() as u64;
            return (self.sink)(&chunk);
        }
        while self.under_way.len() >= self.compressors.ahead {
            self.receive()?;
        }
        let (reply, result) = channel::bounded(1);
        self.under_way.push_back(result);
        // A thread that is gone shows when its reply is waited for.
        let _ = self.compressors.jobs.send(Job { chunk, reply });
        Ok(())
    }

    fn receive(&mut self) -> Result<(), ExportError> {
        let Some(next) = self.under_way.pop_front() else { return Ok(()) };
        let compressed = next.recv().unwrap_or_else(|e| Err(io::Error::other(e)));
        let compressed = compressed
            .map_err(|source| ExportError::Io { path: "a compressed layer".into(), source })?;
        self.digest.update(&compressed);
        self.size += compressed.len() as u64;
        (self.sink)(&compressed)
    }

    /// The archive is complete; `check` says whether it is the right one.
    pub(crate) fn finish(
        mut self,
        check: impl FnOnce(&DiffId) -> Result<(), ExportError>,
    ) -> Result<ExportedLayer, ExportError> {
        let plain = self.compressors.compression == Compression::None;
        // No archive at all is one member as well, not an empty file.
        if !self.chunk.is_empty() || (!plain && self.uncompressed == 0) {
            let chunk = std::mem::take(&mut self.chunk);
            self.send(chunk)?;
        }
        while !self.under_way.is_empty() {
            self.receive()?;
        }
        let diff_id = DiffId::of(self.diff_id);
        check(&diff_id)?;
        let digest = if plain { diff_id.as_blob().clone() } else { self.digest.finish() };
        Ok(ExportedLayer { diff_id, uncompressed: self.uncompressed, digest, size: self.size })
    }
}
