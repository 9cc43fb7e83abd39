//! Pushing: to a registry, layers in parallel, nothing twice.
//!
//! ```text
//! layer ─┬ a blob of it that is known (as it came, as it was sent before) is there ─▶ named
//!        ├ … or in another repository of that registry ─▶ mounted
//!        └ neither: archive ─▶ compress ─▶ upload, its digest known at the end
//! all blobs those of the manifest that it came with ─▶ that manifest; otherwise a new one
//! ```
//!
//! A layer is never in memory or on disk as a whole. A broken upload goes on, because the same
//! bytes can be made again from any offset.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Cursor, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Instant;

use cofolio_store::task::{Cancelled, Event, LayerState, Task};
use cofolio_store::{Digest, Domain, Layer, PackedLayer, Ref};
use crossbeam_channel as channel;
use serde::Serialize;

use super::compress::{BlobWriter, Compressors};
use super::error::ExportError;
use super::image::{self, Image};
use super::target::Descriptor;
use super::{Compression, Exported, ExportedLayer, manifest, threads};
use crate::digest::{BlobDigest, DiffId};
use crate::error::RegistryError;
use crate::reference::Reference;
use crate::registry::{Begun, Body, Failure, RegistryOptions, Repository, Session};
use crate::source::manifest::{Manifest, OCI_MANIFEST};
use crate::threads::{NoThread, spawn, spawn_up_to};

/// Blobs up to this size are made before they are sent: the registry may have them.
const SMALL: usize = 4 << 20;
/// Compressed chunks of a blob that wait to be sent.
const CHUNKS_AHEAD: usize = 2;
/// This many bytes that arrived are progress.
const PROGRESS_BYTES: u64 = 64 << 10;
/// Blobs of a layer that the registry is asked for.
const KNOWN_MAX: usize = 8;
/// Other repositories that a blob is looked for in.
const PLACES_MAX: usize = 4;

/// How to push.
#[derive(Debug, Clone, Default)]
pub struct PushOptions {
    /// How layers are compressed that the registry has in no form that is known here.
    pub compression: Compression,
    /// Threads that compress. 0: as many as the machine has processors.
    pub threads: usize,
    /// How to talk to the registry. Mirrors are not asked.
    pub registry: RegistryOptions,
}

/// How a registry came to a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// It had it.
    There,
    /// It took it from another repository of its own.
    Mounted,
    /// It was sent.
    Sent,
}

/// What a push did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PushReport {
    /// fs-verity digest of the image.
    pub image: Digest,
    /// What it is called in the registry.
    pub name: String,
    /// Digest of the manifest.
    pub manifest: BlobDigest,
    /// It is the manifest that the image came with, to the byte.
    pub original: bool,
    /// The tag led there before already.
    pub known: bool,
    /// Digest of the config: the image id of other engines.
    pub config: BlobDigest,
    /// The layers, lowest first.
    pub layers: Vec<PushedLayer>,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
}

/// One layer of what was pushed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PushedLayer {
    /// Digest of the blob.
    pub digest: BlobDigest,
    /// Size of the blob in bytes.
    pub size: u64,
    #[serde(skip)]
    media_type: String,
    /// Digest of the archive.
    pub diff_id: DiffId,
    /// How the registry came to it.
    pub how: How,
}

/// Pushes an image to a registry: a manifest, no index, since a store has one platform of an image.
/// gc keeps the image meanwhile. After an error the tag is as before, and the registry keeps
/// complete blobs for a while.
pub fn push(
    domain: &Domain,
    exported: Exported<'_>,
    to: &Reference,
    options: &PushOptions,
    task: &Task,
) -> Result<PushReport, ExportError> {
    let started = Instant::now();
    let Some(tag) = to.tag() else {
        let what = format!("{to}: a push is to a tag; the digest comes of what is pushed");
        return Err(ExportError::Destination { what });
    };
    let image = Image::of(domain, exported);
    let _lease = domain.lease(image.digest, image.chain_ids(), &format!("push to {to}"))?;
    // Other refs only save work.
    let refs = domain.readable_refs().unwrap_or_default();
    let known = Known::of(&image, exported.record, &refs, to);
    let others: Vec<_> = known.places().into_iter().collect();
    // One layer that fails ends the others.
    let own = task.cancelled_by(task.cancel.child());
    let repository = Repository::for_push(to, &options.registry, &others, own);
    let push = Push { image, known, repository, task, sent: Mutex::default() };
    let outcome = push.layers(options).and_then(|layers| {
        let report = push.publish(tag, layers)?;
        if let Some(name) = exported.name {
            // The push is complete even if that fails.
            let _ = domain.try_change_ref(name, |record| remember(record, &report, to));
        }
        Ok(report)
    });
    // What fails after it was cancelled fails because of that.
    let mut report = outcome.map_err(|error| task.reason(error))?;
    report.duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(report)
}

/// Records the layers' blobs and their repository for the next push, which can ask for them or
/// mount them.
fn remember(record: &mut Ref, report: &PushReport, to: &Reference) {
    if record.image != report.image {
        return;
    }
    let repository = format!("{}/{}", to.host(), to.repository());
    for layer in &report.layers {
        let digest = layer.digest.to_string();
        let at = record.packed.iter().position(|packed| packed.blob == digest);
        let at = at.unwrap_or_else(|| {
            record.packed.push(PackedLayer {
                diff_id: layer.diff_id.to_string(),
                blob: digest,
                size: layer.size,
                media_type: layer.media_type.clone(),
                repositories: Vec::new(),
            });
            record.packed.len() - 1
        });
        let repositories = &mut record.packed[at].repositories;
        repositories.retain(|other| *other != repository);
        repositories.insert(0, repository.clone());
        repositories.truncate(PLACES_MAX);
    }
}

/// Known blobs of an image's layers, and repositories that have them.
struct Known {
    /// The manifest that it came with.
    manifest: Option<Manifest>,
    /// By layer of the image, best first.
    blobs: Vec<Vec<KnownBlob>>,
}

#[derive(Debug, Clone)]
struct KnownBlob {
    digest: BlobDigest,
    size: u64,
    media_type: String,
    /// Of a whole image only earlier pushes know it.
    diff_id: DiffId,
    /// Repositories of the same registry that have had it.
    places: Vec<String>,
}

impl Known {
    fn of(image: &Image<'_>, record: Option<&Ref>, refs: &[(String, Ref)], to: &Reference) -> Self {
        let document = record.and_then(|record| record.document.as_deref());
        let manifest = document.and_then(|text| serde_json::from_str::<Manifest>(text).ok());
        let manifest = manifest.filter(|manifest| manifest.layers.len() == image.layers.len());
        let mut blobs = Vec::new();
        for (number, layer) in image.layers.iter().enumerate() {
            let mut found = Vec::new();
            let mut add = |digest: &str, size, media_type: &str, diff_id: &str, places| {
                let parsed = digest.parse::<BlobDigest>().ok().zip(diff_id.parse::<DiffId>().ok());
                let Some((digest, diff_id)) = parsed else { return };
                // `docker save` says nothing of compression.
                let plain = media_type.is_empty() && digest == *diff_id.as_blob();
                if (media_type.is_empty() && !plain) || found.len() == KNOWN_MAX {
                    return;
                }
                let places: Vec<String> = places;
                match found.iter_mut().find(|known: &&mut KnownBlob| known.digest == digest) {
                    Some(known) => known.places.extend(places),
                    None => found.push(KnownBlob {
                        digest,
                        size,
                        media_type: oci_layer(media_type).to_owned(),
                        diff_id,
                        places,
                    }),
                }
            };
            let of_layer = layer.map(|layer| layer.diff_id.as_str());
            if let (Some(diff_id), Some(manifest), Some(record)) = (of_layer, &manifest, record) {
                let said = &manifest.layers[number];
                add(&said.digest, said.size, &said.media_type, diff_id, came_from(record, to));
            }
            // Its own record goes first.
            for record in record.into_iter().chain(refs.iter().map(|(_, other)| other)) {
                for Layer { diff_id, blob, size, media_type, .. } in &record.layers {
                    if let Some(blob) = blob.as_ref().filter(|_| of_layer == Some(diff_id)) {
                        add(blob, *size, media_type, diff_id, came_from(record, to));
                    }
                }
                let of_image = record.image == *image.digest && record.config.is_none();
                for packed in &record.packed {
                    let PackedLayer { diff_id, blob, size, media_type, .. } = packed;
                    if of_layer.map_or(of_image, |of_layer| of_layer == diff_id) {
                        add(blob, *size, media_type, diff_id, went_to(packed, to));
                    }
                }
            }
            for known in &mut found {
                known.places.sort();
                known.places.dedup();
                known.places.truncate(PLACES_MAX);
            }
            blobs.push(found);
        }
        Self { manifest, blobs }
    }

    fn places(&self) -> BTreeSet<String> {
        self.blobs.iter().flatten().flat_map(|known| known.places.clone()).collect()
    }
}

/// The repository that an image came from, if the registry can mount from there.
fn came_from(record: &Ref, to: &Reference) -> Vec<String> {
    let source = record.source.as_deref().and_then(|source| source.strip_prefix("docker://"));
    source.and_then(|source| other_repository(source, to)).into_iter().collect()
}

/// The repositories that a blob was pushed to and that the registry can mount from.
fn went_to(packed: &PackedLayer, to: &Reference) -> Vec<String> {
    packed.repositories.iter().filter_map(|name| other_repository(name, to)).collect()
}

/// The repository of that name, if it is another one of the same registry.
fn other_repository(name: &str, to: &Reference) -> Option<String> {
    let name = Reference::parse(name).ok()?;
    let other = name.host() == to.host() && name.repository() != to.repository();
    other.then(|| name.repository().to_owned())
}

/// The media type of a layer as an OCI manifest has it.
fn oci_layer(media_type: &str) -> &'static str {
    let compression = match media_type {
        text if text.ends_with("gzip") => Compression::Gzip,
        text if text.ends_with("zstd") => Compression::Zstd,
        _ => Compression::None,
    };
    compression.media_type()
}

struct Push<'a> {
    image: Image<'a>,
    known: Known,
    repository: Repository,
    task: &'a Task,
    /// Bytes that were sent of each layer.
    sent: Mutex<BTreeMap<usize, u64>>,
}

impl Push<'_> {
    fn layers(&self, options: &PushOptions) -> Result<Vec<PushedLayer>, ExportError> {
        let layers = &self.image.layers;
        // An image can have a layer twice.
        let mut first_of = BTreeMap::new();
        let same: Vec<usize> = layers
            .iter()
            .enumerate()
            .map(|(number, layer)| {
                layer.map_or(number, |it| *first_of.entry(&it.diff_id).or_insert(number))
            })
            .collect();
        let work: Vec<usize> = (0..layers.len()).filter(|&number| same[number] == number).collect();
        let next = AtomicUsize::new(0);
        let (to_us, results) = channel::unbounded();
        let stop = self.repository.stop();
        let jobs = self.repository.jobs().min(work.len());
        std::thread::scope(|scope| {
            let threads = threads(options.threads);
            let compression = options.compression;
            let compressors =
                Arc::new(Compressors::start(scope, compression, threads, jobs.max(1))?);
            spawn_up_to(scope, jobs, || {
                let (compressors, to_us) = (compressors.clone(), to_us.clone());
                let (work, next) = (&work, &next);
                move || {
                    while let Some(&number) = work.get(next.fetch_add(1, Ordering::Relaxed))
                        && !stop.is_cancelled()
                    {
                        let layer = self.layer(scope, &compressors, compression, number);
                        let has_failed = layer.is_err();
                        let _ = to_us.send(layer.map(|layer| (number, layer)));
                        if has_failed {
                            // What fails afterwards does so because it was given up.
                            stop.cancel();
                        }
                    }
                }
            })
        })?;
        let done = results.try_iter().collect::<Result<BTreeMap<_, _>, ExportError>>()?;
        let all = same.iter().map(|number| done.get(number).cloned());
        all.collect::<Option<_>>().ok_or(ExportError::Cancelled(Cancelled))
    }

    fn layer<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        compressors: &Arc<Compressors>,
        compression: Compression,
        number: usize,
    ) -> Result<PushedLayer, ExportError> {
        let known = |blob: &KnownBlob, how| {
            let digest = blob.digest.to_string();
            self.tell_layer(number, how, Some((&digest, blob.size)));
            PushedLayer {
                digest: blob.digest.clone(),
                size: blob.size,
                media_type: blob.media_type.clone(),
                diff_id: blob.diff_id.clone(),
                how,
            }
        };
        let blobs = &self.known.blobs[number];
        for blob in blobs {
            if self.repository.has_blob(&blob.digest.to_string(), blob.size)? {
                return Ok(known(blob, How::There));
            }
        }
        let mut session = None;
        for (blob, place) in blobs.iter().flat_map(|b| b.places.iter().map(move |p| (b, p))) {
            match self.repository.begin_upload(Some((&blob.digest.to_string(), place))) {
                Ok(Begun::Mounted) => return Ok(known(blob, How::Mounted)),
                // Not mounted: the registry began an upload.
                Ok(Begun::Session(begun)) => session = Some(begun),
                // We may not read there, or it is not there any more.
                Err(
                    RegistryError::Denied { .. }
                    | RegistryError::NotFound { .. }
                    | RegistryError::Refused { .. },
                ) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let layer = &self.image.layers[number];
        self.image.check_splits([layer])?;
        self.tell_layer(number, How::Sent, None);
        let making = Making { push: self, scope, compressors: compressors.clone(), layer: *layer };
        let (packed, how) = self.upload(&making, number, session)?;
        let ExportedLayer { digest, size, diff_id, .. } = packed;
        let media_type = compression.media_type().to_owned();
        Ok(PushedLayer { digest, size, media_type, diff_id, how })
    }

    fn tell_layer(&self, index: usize, how: How, blob: Option<(&str, u64)>) {
        let state = match how {
            How::There => LayerState::There,
            How::Mounted => LayerState::Mounted,
            How::Sent => LayerState::Sent,
        };
        self.task.tell(Event::Layer { index, count: self.image.layers.len(), state, blob });
    }

    /// Tells how much of all layers was sent; `bytes` of this one, fewer after a restart.
    fn tell_sent(&self, number: usize, bytes: u64) {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.insert(number, bytes);
        let (bytes, items) = (sent.values().sum(), sent.len() as u64);
        self.task.tell(Event::Done { bytes, bytes_total: None, items, items_total: None });
    }

    /// Makes a layer's blob and sends it, again and again if need be.
    fn upload(
        &self,
        making: &Making<'_, '_, '_>,
        number: usize,
        session: Option<Session>,
    ) -> Result<(ExportedLayer, How), ExportError> {
        let mut tries = self.repository.tries(0, self.repository.stop());
        let mut upload = Upload { push: self, number, session, packed: None };
        loop {
            let before = upload.session.as_ref().map_or(0, |session| session.at);
            let failure = match upload.attempt(making) {
                Ok(done) => return Ok(done),
                Err(Attempt::Failed(failure)) => failure,
                Err(Attempt::Fatal(error)) => {
                    upload.give_up();
                    return Err(error);
                }
            };
            if !failure.again {
                upload.give_up();
            }
            tries.wait(failure)?;
            if let Some(session) = upload.session.take() {
                // If the registry cannot be asked, the next try says so.
                upload.session = self.repository.resume_upload(&session).unwrap_or(None);
            }
            let now = upload.session.as_ref().map_or(0, |session| session.at);
            if now >= before + PROGRESS_BYTES {
                tries.got_on();
            }
        }
    }

    /// Config and manifest, when all layers are there.
    fn publish(&self, tag: &str, layers: Vec<PushedLayer>) -> Result<PushReport, ExportError> {
        let config = self.image.config(layers.iter().map(|layer| &layer.diff_id));
        let config_digest = BlobDigest::sha256(config.as_bytes());
        self.put(&config_digest, config.as_bytes())?;
        let original = self.known.manifest.as_ref().filter(|manifest| {
            let said = manifest.layers.iter().map(|layer| layer.digest.as_str());
            manifest.config.digest == config_digest.to_string()
                && said.eq(layers.iter().map(|layer| layer.digest.to_string()))
        });
        let document = self.image.record.and_then(|record| record.document.as_deref());
        let (media_type, bytes) = match (original, document) {
            (Some(manifest), Some(document)) => {
                let media_type = Some(manifest.media_type.as_str()).filter(|text| !text.is_empty());
                (media_type.unwrap_or(OCI_MANIFEST), document.as_bytes().to_vec())
            }
            _ => {
                let blobs = layers.iter().map(|layer| Descriptor {
                    media_type: layer.media_type.clone(),
                    digest: layer.digest.clone(),
                    size: layer.size,
                });
                (OCI_MANIFEST, manifest(&config_digest, config.len(), &blobs.collect::<Vec<_>>()))
            }
        };
        let digest = BlobDigest::sha256(&bytes);
        let is_new = self.repository.put_manifest(tag, media_type, &digest.to_string(), &bytes)?;
        Ok(PushReport {
            image: *self.image.digest,
            name: self.repository.reference.to_string(),
            manifest: digest,
            original: original.is_some(),
            known: !is_new,
            config: config_digest,
            layers,
            duration_ms: 0,
        })
    }

    /// Sends a blob that is at hand, unless it is there.
    fn put(&self, digest: &BlobDigest, bytes: &[u8]) -> Result<(), ExportError> {
        let mut tries = self.repository.tries(0, self.repository.stop());
        loop {
            if self.repository.has_blob(&digest.to_string(), bytes.len() as u64)? {
                return Ok(());
            }
            let Begun::Session(session) = self.repository.begin_upload(None)? else { continue };
            match self.put_in(&session, digest, bytes, &mut |_| ()) {
                Ok(()) => return Ok(()),
                Err(failure) => tries.wait(failure)?,
            }
        }
    }

    fn put_in(
        &self,
        session: &Session,
        digest: &BlobDigest,
        mut bytes: &[u8],
        count: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let size = bytes.len() as u64;
        let mut body = Body::new(&self.repository, &mut bytes, count);
        self.repository.end_upload(session, &digest.to_string(), Some((&mut body, size)))
    }
}

/// Why an attempt failed.
enum Attempt {
    Failed(Failure),
    /// Not worth another try.
    Fatal(ExportError),
}

impl From<Failure> for Attempt {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<RegistryError> for Attempt {
    fn from(error: RegistryError) -> Self {
        Self::Fatal(error.into())
    }
}

struct Upload<'a, 'b> {
    push: &'a Push<'b>,
    number: usize,
    session: Option<Session>,
    /// What it is, once it was made to its end.
    packed: Option<ExportedLayer>,
}

impl Upload<'_, '_> {
    fn attempt(&mut self, making: &Making<'_, '_, '_>) -> Result<(ExportedLayer, How), Attempt> {
        let repository = &self.push.repository;
        if let Some(packed) = &self.packed
            && repository.has_blob(&packed.digest.to_string(), packed.size)?
        {
            // Only the answer was lost.
            return Ok((packed.clone(), How::Sent));
        }
        let from = self.session.as_ref().map_or(0, |session| session.at);
        let mut chunks = making.start(from).map_err(|error| Attempt::Fatal(error.into()))?;
        let mut head = Vec::new();
        if from == 0 {
            let read = (&mut chunks).take(SMALL as u64 + 1).read_to_end(&mut head);
            // `end` has the reason if it ended early.
            if read.is_err() || head.len() <= SMALL {
                return self.small(chunks.end().map_err(Attempt::Fatal)?, &head);
            }
        }
        let mut session = self.session()?;
        let mut sent = session.at;
        let (push, number) = (self.push, self.number);
        let mut count = |bytes| {
            sent += bytes;
            push.tell_sent(number, sent);
        };
        let mut reader = head.chain(&mut chunks);
        let mut body = Body::new(repository, &mut reader, &mut count);
        let result = repository.send_rest(&mut session, &mut body);
        let at = session.at;
        self.session = Some(session);
        match (chunks.end(), result) {
            (Err(error), _) if !matches!(error, ExportError::Cancelled(_)) => {
                Err(Attempt::Fatal(error))
            }
            (_, Err(failure)) => Err(failure.into()),
            (Err(error), Ok(())) => Err(Attempt::Fatal(error)),
            (Ok(packed), Ok(())) => {
                let digest = packed.digest.to_string();
                let complete = at == packed.size;
                self.packed = Some(packed.clone());
                let ended = match (&self.session, complete) {
                    (Some(session), true) => repository.end_upload(session, &digest, None),
                    _ => {
                        let url = repository.reference.to_string();
                        let what = format!("it has {at} bytes of a blob of {}", packed.size);
                        self.session = None;
                        Err(Failure::again(RegistryError::Answer { url, what }))
                    }
                };
                ended.map_err(|failure| match failure.error {
                    // It put the parts together wrongly: start again.
                    error @ RegistryError::Refused { .. } if from > 0 => {
                        self.session = None;
                        Attempt::Failed(Failure::again(error))
                    }
                    _ => failure.into(),
                })?;
                Ok((packed, How::Sent))
            }
        }
    }

    /// Sends a blob that is at hand, in one piece.
    fn small(
        &mut self,
        packed: ExportedLayer,
        blob: &[u8],
    ) -> Result<(ExportedLayer, How), Attempt> {
        let repository = &self.push.repository;
        let is_first = self.packed.is_none();
        self.packed = Some(packed.clone());
        if is_first && repository.has_blob(&packed.digest.to_string(), packed.size)? {
            return Ok((packed, How::There));
        }
        let session = self.session()?;
        let mut sent = 0;
        let mut count = |bytes| {
            sent += bytes;
            self.push.tell_sent(self.number, sent);
        };
        self.push.put_in(&session, &packed.digest, blob, &mut count)?;
        Ok((packed, How::Sent))
    }

    /// The session to send it in. It is good for one attempt, unless the registry resumes it.
    fn session(&mut self) -> Result<Session, Attempt> {
        if let Some(session) = self.session.take() {
            return Ok(session);
        }
        match self.push.repository.begin_upload(None)? {
            Begun::Session(session) => Ok(session),
            // It was not asked to mount anything.
            Begun::Mounted => Err(Attempt::Fatal(RegistryError::GivenUp.into())),
        }
    }

    fn give_up(&mut self) {
        if let Some(session) = self.session.take() {
            self.push.repository.cancel_upload(&session);
        }
    }
}

struct Making<'push, 'scope, 'env> {
    push: &'scope Push<'push>,
    scope: &'scope Scope<'scope, 'env>,
    compressors: Arc<Compressors>,
    layer: image::Layer<'scope>,
}

impl<'scope> Making<'_, 'scope, '_> {
    /// Makes the blob from offset `from` on, in a thread of its own.
    fn start(&self, from: u64) -> Result<MadeBlob<'scope>, NoThread> {
        let (to_us, chunks) = channel::bounded::<Vec<u8>>(CHUNKS_AHEAD);
        let (push, layer, compressors) = (self.push, self.layer, self.compressors.clone());
        let maker = spawn(self.scope, move || {
            let mut skip = from;
            let mut sink = |bytes: &[u8]| {
                let left_out = usize::try_from(skip).unwrap_or(usize::MAX).min(bytes.len());
                skip -= left_out as u64;
                match &bytes[left_out..] {
                    [] => Ok(()),
                    // Nobody wants it any more.
                    rest => to_us.send(rest.to_vec()).map_err(|_| Cancelled.into()),
                }
            };
            let writer = BlobWriter::new(&compressors, &mut sink);
            let stop = push.repository.stop();
            push.image.write_layer(layer, writer, stop, &mut |_| ())
        })?;
        Ok(MadeBlob { chunks, current: Cursor::default(), maker })
    }
}

struct MadeBlob<'scope> {
    chunks: channel::Receiver<Vec<u8>>,
    current: Cursor<Vec<u8>>,
    maker: ScopedJoinHandle<'scope, Result<ExportedLayer, ExportError>>,
}

impl MadeBlob<'_> {
    /// The finished blob; [`ExportError::Cancelled`] unless all of it was taken.
    fn end(self) -> Result<ExportedLayer, ExportError> {
        drop(self.chunks);
        self.maker.join().unwrap_or(Err(Cancelled.into()))
    }
}

impl Read for MadeBlob<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.current.read(buf)? {
                0 if !buf.is_empty() => match self.chunks.recv() {
                    Ok(chunk) => self.current = Cursor::new(chunk),
                    Err(_) => return Ok(0),
                },
                count => return Ok(count),
            }
        }
    }
}
