//! From a blob to verified chunks of its uncompressed content, on threads of their own.
//!
//! ```text
//! blob ─ read, hash, inflate ─┬─ chunks ─▶ the layer's parser (the caller's thread)
//!        (a thread)           └─ chunks ─▶ diff-id          (a thread)
//! ```
//!
//! An uncompressed blob is hashed once: its digest is the diff-id. SHA-256 cannot be divided, so
//! its thread does nothing else. Chunks are pooled and shared, never copied. The digest is checked
//! before the end is reported; bytes read before the end are provisional and only reach staging.

use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Scope;

use cofolio_store::task::Cancel;

use crate::digest::{BlobDigest, BlobHasher};
use crate::error::{ImportError, RegistryError};
use crate::layer::tar::Input;
use crate::threads::{NoThread, spawn};

/// Size of a chunk of uncompressed content, in bytes.
pub(crate) const CHUNK: usize = 256 * 1024;
/// Chunks that wait between two threads.
const QUEUE: usize = 4;
/// Chunks that are kept for reuse: what the queues of two layers hold. More exist only for moments.
const POOLED_MAX: usize = 4 * QUEUE;
/// Largest zstd window, as `zstd -d` takes it without `--long`: 128 MiB of memory at worst.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// A blob that can be read, from wherever it is.
#[derive(Clone)]
pub(crate) struct Blob {
    pub(crate) digest: BlobDigest,
    pub(crate) size: u64,
    content: Arc<dyn Content>,
}

/// Where blobs are. Errors of a reader may hold a [`RegistryError`].
pub(crate) trait Content: Send + Sync {
    /// Begins to read a blob, until `stop` is cancelled, or else the source's own token.
    fn open(&self, digest: &BlobDigest, size: u64, stop: Option<&Cancel>) -> Box<dyn Read + Send>;
}

impl Blob {
    pub(crate) fn new(digest: BlobDigest, size: u64, content: Arc<dyn Content>) -> Self {
        Self { digest, size, content }
    }

    pub(crate) fn open(&self, stop: Option<&Cancel>) -> Box<dyn Read + Send> {
        self.content.open(&self.digest, self.size, stop)
    }

    /// The whole blob, of at most `max` bytes, its digest checked.
    pub(crate) fn read_all(&self, max: u64) -> Result<Vec<u8>, ImportError> {
        if self.size > max {
            let what = format!("document {} of {} bytes", self.digest, self.size);
            return Err(ImportError::limit(what, max, "document_bytes"));
        }
        let mut content = Vec::new();
        let mut reader = self.open(None);
        reader.read_to_end(&mut content).map_err(|e| self.failed(0, e))?;
        if content.len() as u64 != self.size {
            return Err(self.corrupt(content.len() as u64, "ends early".into()));
        }
        self.check(&self.digest.of(&content))?;
        Ok(content)
    }

    fn check(&self, actual: &BlobDigest) -> Result<(), ImportError> {
        if *actual == self.digest { Ok(()) } else { Err(ImportError::digest(&self.digest, actual)) }
    }

    /// Keeps errors of the registry and corrupt blobs apart.
    fn failed(&self, offset: u64, error: io::Error) -> ImportError {
        match error.downcast::<RegistryError>() {
            Ok(error) => ImportError::Registry(error),
            Err(error) => self.corrupt(offset, error.to_string()),
        }
    }

    fn corrupt(&self, offset: u64, what: String) -> ImportError {
        ImportError::Corrupt { digest: self.digest.to_string(), offset, what }
    }
}

/// What the layers of an import may unpack to.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Uncompressed bytes of all layers together.
    pub(crate) total_max: u64,
    /// `ratio_max` counts for a layer with more uncompressed bytes.
    pub(crate) ratio_from: u64,
    /// Uncompressed bytes for one compressed byte.
    pub(crate) ratio_max: u64,
    used: AtomicU64,
    /// Cancelled with the import, or when one layer failed: the others need not go on.
    stop: Cancel,
    /// Why the first one failed, and the others with it.
    reason: Mutex<Option<ImportError>>,
}

impl Budget {
    pub(crate) fn new(total_max: u64, ratio_from: u64, ratio_max: u64, stop: Cancel) -> Self {
        Self {
            total_max,
            ratio_from,
            ratio_max,
            used: AtomicU64::new(0),
            stop,
            reason: Mutex::new(None),
        }
    }

    /// Stops all layers. The first reason is kept.
    pub(crate) fn stop(&self, reason: ImportError) {
        let mut first = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if self.stop.cancel() {
            *first = Some(reason);
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    pub(crate) fn reason(&self) -> Option<ImportError> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Takes `bytes` from the total.
    pub(crate) fn take(
        &self,
        bytes: u64,
        what: impl FnOnce() -> String,
    ) -> Result<(), ImportError> {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > self.total_max {
            return Err(ImportError::limit(what(), self.total_max, "uncompressed_bytes"));
        }
        Ok(())
    }
}

/// Buffers to use again, so that memory does not grow with the number of chunks.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Vec<u8>>>);

impl Pool {
    fn get(&self) -> Vec<u8> {
        let buffer = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        buffer.unwrap_or_else(|| vec![0; CHUNK])
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Uncompressed content, whose buffer goes back to the pool.
#[derive(Debug)]
pub(crate) struct Chunk {
    buffer: Vec<u8>,
    length: usize,
    pool: Arc<Pool>,
}

impl Chunk {
    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        let mut pool = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.len() < POOLED_MAX {
            pool.push(buffer);
        }
    }
}

/// Bytes of a chunk, shared with others.
#[derive(Debug, Clone)]
pub(crate) struct Slice {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

impl Slice {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.chunk.bytes()[self.range.clone()]
    }
}

enum Message {
    /// Never empty.
    Chunk(Arc<Chunk>),
    /// The end, after all checks, with the diff-id.
    End(BlobDigest),
}

/// A layer's uncompressed content, to be read by a tar reader.
pub(crate) struct Stream {
    parts: Receiver<Result<Message, ImportError>>,
    current: Option<Arc<Chunk>>,
    at: usize,
    ended: bool,
    /// The reason why reading failed; the `io::Error` only says that it did.
    failure: Option<ImportError>,
    diff_id: Option<BlobDigest>,
}

/// Called with the number of compressed bytes that were read since the last call.
pub(crate) type OnRead<'a> = &'a (dyn Fn(u64) + Sync);

impl Stream {
    pub(crate) fn start<'scope, 'env>(
        scope: &'scope Scope<'scope, 'env>,
        blob: Blob,
        pool: Arc<Pool>,
        budget: &'env Budget,
        on_read: OnRead<'env>,
    ) -> Result<Self, NoThread> {
        let (to_parser, parts) = sync_channel(QUEUE);
        spawn(scope, move || {
            let result = unpack(&blob, &pool, budget, on_read, &to_parser);
            if let Some(last) = result.map(|diff_id| diff_id.map(Message::End)).transpose() {
                // If nobody listens any more, the other side failed first.
                let _ = to_parser.send(last);
            }
        })?;
        Ok(Self { parts, current: None, at: 0, ended: false, failure: None, diff_id: None })
    }

    /// Takes up to `max` bytes without copying them. Empty at the end of the stream only.
    pub(crate) fn take_slice(&mut self, max: u64) -> io::Result<Option<Slice>> {
        let have = self.fill_buf()?.len();
        let Some(chunk) = self.current.clone().filter(|_| have > 0) else { return Ok(None) };
        let length = have.min(usize::try_from(max).unwrap_or(usize::MAX));
        let range = self.at..self.at + length;
        self.consume(length);
        Ok(Some(Slice { chunk, range }))
    }

    /// The digest of everything, once the end was read.
    pub(crate) fn diff_id(&mut self) -> Option<BlobDigest> {
        self.diff_id.take()
    }

    pub(crate) fn failure(&mut self) -> Option<ImportError> {
        self.failure.take()
    }
}

/// [`Read::read`] of an input that has a buffer.
pub(crate) fn read_buffered(input: &mut impl BufRead, buf: &mut [u8]) -> io::Result<usize> {
    let mut have = input.fill_buf()?;
    let count = have.read(buf)?;
    input.consume(count);
    Ok(count)
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        read_buffered(self, buf)
    }
}

impl BufRead for Stream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.current.is_none() && !self.ended {
            match self.parts.recv() {
                Ok(Ok(Message::Chunk(chunk))) => {
                    self.at = 0;
                    self.current = Some(chunk);
                }
                Ok(Ok(Message::End(diff_id))) => {
                    self.diff_id = Some(diff_id);
                    self.ended = true;
                }
                Ok(Err(error)) => {
                    self.failure = Some(error);
                    self.ended = true;
                    return Err(io::Error::other("the blob could not be unpacked"));
                }
                Err(_) => {
                    self.ended = true;
                    return Err(io::Error::other("the unpacking thread is gone"));
                }
            }
        }
        Ok(self.current.as_deref().map_or(&[], |chunk| &chunk.bytes()[self.at..]))
    }

    fn consume(&mut self, count: usize) {
        self.at += count;
        if self.current.as_deref().is_some_and(|chunk| self.at >= chunk.length) {
            self.current = None;
        }
    }
}

impl Input for Stream {}

/// Counts what passes through, and hashes it if nobody else does.
struct Tap<'a> {
    inner: Box<dyn Read + Send>,
    hasher: Option<BlobHasher>,
    count: u64,
    on_read: OnRead<'a>,
}

impl Read for Tap<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buf)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&buf[..count]);
        }
        self.count += count as u64;
        (self.on_read)(count as u64);
        Ok(count)
    }
}

/// The compression, detected by the first bytes as all runtimes do: media types are often wrong.
enum Unpacker<'a> {
    Plain(Box<BufReader<Tap<'a>>>),
    Gzip(Box<flate2::bufread::MultiGzDecoder<BufReader<Tap<'a>>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, BufReader<Tap<'a>>>>),
}

impl<'a> Unpacker<'a> {
    fn new(mut tap: Tap<'a>) -> io::Result<Self> {
        // One read may give less than is to be looked at.
        let mut head = Vec::new();
        (&mut tap.inner).take(4).read_to_end(&mut head)?;
        tap.inner = Box::new(io::Cursor::new(head.clone()).chain(tap.inner));
        let input = BufReader::with_capacity(128 * 1024, tap);
        if head.starts_with(&[0x1f, 0x8b, 0x08]) {
            return Ok(Self::Gzip(Box::new(flate2::bufread::MultiGzDecoder::new(input))));
        }
        // A frame, or a skippable one (`.*M.18`), with which zstd streams may begin as well.
        let skippable = matches!(*head, [0x50..=0x5f, 0x2a, 0x4d, 0x18]);
        if skippable || head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            return Ok(Self::Zstd(Box::new(decoder)));
        }
        Ok(Self::Plain(Box::new(input)))
    }

    fn tap(&mut self) -> &mut BufReader<Tap<'a>> {
        match self {
            Self::Plain(input) => input,
            Self::Gzip(decoder) => decoder.get_mut(),
            Self::Zstd(decoder) => decoder.get_mut(),
        }
    }

    fn compressed(&self) -> bool {
        !matches!(self, Self::Plain(_))
    }
}

impl Read for Unpacker<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(input) => input.read(buf),
            Self::Gzip(decoder) => decoder.read(buf),
            Self::Zstd(decoder) => decoder.read(buf),
        }
    }
}

/// The unpacking thread. Gives the checked diff-id; `None` if the receiver went away early.
fn unpack(
    blob: &Blob,
    pool: &Arc<Pool>,
    budget: &Budget,
    on_read: OnRead<'_>,
    to_parser: &SyncSender<Result<Message, ImportError>>,
) -> Result<Option<BlobDigest>, ImportError> {
    let inner = blob.open(Some(&budget.stop));
    let tap = Tap { inner, hasher: Some(blob.digest.hasher()), count: 0, on_read };
    let mut unpacker = Unpacker::new(tap).map_err(|e| blob.failed(0, e))?;
    // The digest of a blob that is not compressed is its diff-id (which is SHA-256).
    let hash_once = !unpacker.compressed() && blob.digest.is_sha256();
    if hash_once {
        unpacker.tap().get_mut().hasher = None;
    }
    std::thread::scope(|scope| {
        // Hashing ends when the sender is dropped, on every way out of here.
        let (to_hasher, to_hash) = sync_channel::<Arc<Chunk>>(QUEUE);
        let hashing = spawn(scope, move || {
            let mut hasher = BlobHasher::new();
            to_hash.iter().for_each(|chunk| hasher.update(chunk.bytes()));
            hasher.finish()
        })?;
        let send = |chunk: Arc<Chunk>| {
            to_hasher.send(chunk.clone()).is_ok()
                && to_parser.send(Ok(Message::Chunk(chunk))).is_ok()
        };
        let Some(broken) = chunks(blob, &mut unpacker, pool, budget, send)? else {
            return Ok(None);
        };
        drop(to_hasher);
        let diff_id = hashing.join().map_err(|_| blob.corrupt(0, "a thread panicked".into()))?;
        check(blob, &mut unpacker, broken, &diff_id)?;
        Ok(Some(diff_id))
    })
}

/// Sends all chunks. Gives the error that ended unpacking; `None` if nobody wants the rest.
fn chunks(
    blob: &Blob,
    unpacker: &mut Unpacker<'_>,
    pool: &Arc<Pool>,
    budget: &Budget,
    send: impl Fn(Arc<Chunk>) -> bool,
) -> Result<Option<Option<io::Error>>, ImportError> {
    let mut total: u64 = 0;
    loop {
        let mut buffer = pool.get();
        let mut length = 0;
        while length < buffer.len() {
            match unpacker.read(&mut buffer[length..]) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Ok(Some(Some(e))),
            }
        }
        let chunk = Arc::new(Chunk { buffer, length, pool: pool.clone() });
        if length == 0 {
            return Ok(Some(None));
        }
        total += length as u64;
        budget.take(length as u64, || format!("layer {}: unpacked content", blob.digest))?;
        let read = unpacker.tap().get_ref().count;
        if unpacker.compressed() && total > budget.ratio_from && total / budget.ratio_max > read {
            let digest = &blob.digest;
            let what =
                format!("layer {digest}: {total} bytes unpacked from the first {read}, each to");
            return Err(ImportError::limit(what, budget.ratio_max, "ratio"));
        }
        if budget.stop.is_cancelled() || !send(chunk) {
            return Ok(None);
        }
    }
}

/// Checks a blob of which all was unpacked, or all up to where it is `broken`.
fn check(
    blob: &Blob,
    unpacker: &mut Unpacker<'_>,
    mut broken: Option<io::Error>,
    diff_id: &BlobDigest,
) -> Result<(), ImportError> {
    let tap = unpacker.tap();
    let offset = tap.get_ref().count - tap.buffer().len() as u64;
    if let Some(error) = broken.take_if(|e| e.get_ref().is_some_and(|e| e.is::<RegistryError>())) {
        return Err(blob.failed(offset, error));
    }
    // Whatever unpacking says: if the blob is not the right one, that is the reason.
    let mut rest = tap.get_mut();
    io::copy(&mut rest, &mut io::sink()).map_err(|e| blob.failed(offset, e))?;
    if rest.count != blob.size {
        return Err(
            blob.corrupt(rest.count, format!("ends early, {} bytes were promised", blob.size))
        );
    }
    match rest.hasher.take() {
        Some(hasher) => blob.check(&hasher.finish())?,
        None => blob.check(diff_id)?,
    }
    match broken {
        None => Ok(()),
        Some(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(blob.corrupt(offset, "the compressed stream is cut off".into()))
        }
        Some(error) => Err(blob.corrupt(offset, format!("cannot be unpacked: {error}"))),
    }
}

/// What the unpacking thread makes of a blob, for the fuzz targets: the chunks that reached the
/// parser, and whether an end came after them. `Err` is the reason why not.
#[cfg(fuzzing)]
pub(crate) fn fuzz(blob: &Blob, budget: &Budget) -> (Vec<u8>, Result<bool, ImportError>) {
    // Room for all that the budget allows, since nobody takes anything out meanwhile.
    let room = usize::try_from(budget.total_max).map_or(0, |max| max / CHUNK) + 4;
    let (to_parser, parts) = sync_channel(room);
    static POOL: std::sync::OnceLock<Arc<Pool>> = std::sync::OnceLock::new();
    let pool = POOL.get_or_init(Arc::default);
    let result = unpack(blob, pool, budget, &|_| {}, &to_parser);
    drop(to_parser);
    let mut bytes = Vec::new();
    for part in parts {
        match part {
            Ok(Message::Chunk(chunk)) => bytes.extend_from_slice(chunk.bytes()),
            Ok(Message::End(_)) => panic!("an end before all checks"),
            Err(error) => panic!("an error in the queue: {error}"),
        }
    }
    (bytes, result.map(|diff_id| diff_id.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct OneByte<R>(R);

    impl<R: Read> Read for OneByte<R> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            let end = buf.len().min(1);
            self.0.read(&mut buf[..end])
        }
    }

    /// Compression was detected by what the first read gave: a registry whose first packet had
    /// fewer than four bytes of the blob made a good layer a damaged one.
    #[test]
    fn compression_is_detected_whatever_the_first_read_gives() {
        let zstd = zstd::encode_all(&b"text"[..], 1).unwrap();
        let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 9], &zstd[..]].concat();
        for (blob, expected) in
            [(zstd, "text"), (skippable, "text"), (b"abc".to_vec(), "abc"), (vec![], "")]
        {
            let inner = Box::new(OneByte(io::Cursor::new(blob)));
            let tap = Tap { inner, hasher: None, count: 0, on_read: &|_| {} };
            let mut text = String::new();
            Unpacker::new(tap).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, expected);
        }
    }
}
