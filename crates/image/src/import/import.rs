//! The import itself: from a source to a published ref.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::Scope;
use std::time::Instant;

use cofolio_erofs::tree::Tree;
use cofolio_erofs::write::{self, WriteError, WriteOptions};
use cofolio_store::task::{Event, LayerState, Phase, Task};
use cofolio_store::{
    Damage, Digest, Domain, FileKind, FileName, KEEP_LABEL, Layer, Publish, Ref, Staging,
    StagingStats, now,
};
use serde::Serialize;

use super::{ImportOptions, Limits};
use crate::compose::merge::{self, Hidden, MergeError};
use crate::digest::{BlobDigest, ChainId, DiffId, NoDigest};
use crate::error::{ImportError, TrustError, shown};
use crate::layer::blob::{Budget, OnRead, Pool};
use crate::layer::dumped::DumpedLayer;
use crate::layer::objects::Workers;
use crate::layer::unpack::{
    Counts, Shared, Unpacked, dumped, keep, known_layer, objects, sound, store_error, unpack,
};
use crate::layer::{DEFAULT_DIR, FoundLayer};
use crate::reference::check_image_name;
use crate::source::engine::{containerd, containers_storage};
use crate::source::manifest::is_whole_name;
use crate::source::{Chosen, FoundImage, Opened, Source};
use crate::stored::digest_of;
use crate::threads::spawn;
use crate::tree_scan;
use crate::trust::Record;

/// What an import did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// Name of the ref.
    pub name: String,
    /// fs-verity digest of the metadata image.
    pub image: Digest,
    /// Digest of the image's manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<BlobDigest>,
    /// Digest of the image config: what podman and docker call the image id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<BlobDigest>,
    /// The image was there already, and no blob of it was read.
    pub known: bool,
    /// The layers, lowest first. Empty for a directory.
    pub layers: Vec<LayerReport>,
    /// Names in the image, the root not counted.
    pub entries: u64,
    /// Objects that were written.
    pub objects_new: u64,
    /// Bytes of objects that were written.
    pub bytes_new: u64,
    /// Files whose object was in the store already, or twice in the image.
    pub objects_known: u64,
    /// Bytes of them.
    pub bytes_known: u64,
    /// Size of the metadata image in bytes.
    pub image_bytes: u64,
    /// Extended attributes left out because Linux has no such namespace.
    pub foreign_xattrs: u64,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
}

/// What an import did with one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerReport {
    /// Digest of the blob.
    pub digest: BlobDigest,
    /// Digest of the uncompressed archive.
    pub diff_id: DiffId,
    /// Identity of this layer over those below.
    pub chain_id: ChainId,
    /// Size of the blob in bytes.
    pub size: u64,
    /// Size of the archive in bytes; 0 if it was known.
    pub uncompressed: u64,
    /// The store had its tree: the blob was not read.
    pub known: bool,
    /// Entries of the archive; 0 if it was known.
    pub entries: u64,
}

/// Imports an image into a domain and publishes it as a ref.
///
/// A known manifest only gets a ref; known layers (by chain-id) and objects are not written again.
/// After an error, a full filesystem included, the domain is as before.
pub fn import(
    domain: &Domain,
    source: &Source,
    options: &ImportOptions,
    task: &Task,
) -> Result<ImportReport, ImportError> {
    let started = Instant::now();
    options.name.as_deref().map_or(Ok(()), check_name)?;
    let imported = match source {
        Source::Directory { path } => import_directory(domain, path, source, options, task),
        _ => import_image(domain, source, options, task),
    };
    // What fails after it was cancelled fails because of that.
    let mut report = imported.map_err(|error| task.reason(error))?;
    report.duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(report)
}

/// Retries once under the lock, trusting no cached layer, if garbage collection or damage took
/// something that the import relied on. `attempt` hears whether it is the second try.
fn twice(
    attempt: impl Fn(bool) -> Result<ImportReport, ImportError>,
    task: &Task,
) -> Result<ImportReport, ImportError> {
    attempt(false).or_else(|error| match error {
        ImportError::Store(error) if error.is_race() => {
            task.tell(Event::Phase(Phase::Again));
            attempt(true)
        }
        other => Err(other),
    })
}

fn import_directory(
    domain: &Domain,
    path: &Path,
    source: &Source,
    options: &ImportOptions,
    task: &Task,
) -> Result<ImportReport, ImportError> {
    let name = name_for(source, None, options)?;
    let attempt = |hold_lock| {
        let staging = begin(domain, options, hold_lock, task)?;
        task.tell(Event::Phase(Phase::Unpack));
        let scan = tree_scan::ScanOptions { threads: options.threads, ..Default::default() };
        let scanned = tree_scan::scan(path, &scan, &staging, task)?;
        let mut report = empty_report(&name);
        let record = Ref::new(Digest([0; 32]));
        let gate = Gate { options, brought: Vec::new() };
        finish(staging, &scanned.tree, &Hidden::new(), record, &gate, task, &mut report)?;
        Ok(report)
    };
    twice(attempt, task)
}

fn import_image(
    domain: &Domain,
    source: &Source,
    options: &ImportOptions,
    task: &Task,
) -> Result<ImportReport, ImportError> {
    task.tell(Event::Phase(Phase::Resolve));
    let opened = Opened::open(source, &options.registry, task)?;
    let chosen = opened.choose(&options.platform, options.limits.document_bytes)?;
    let called = match &chosen {
        Chosen::Docker { image, .. } => image.repo_tags.as_ref().and_then(|tags| tags.first()),
        Chosen::Manifest { name, .. } => name.as_ref(),
    };
    let called = called.map(String::as_str);
    let name = name_for(source, called, options)?;
    let brought = cosigned(&opened, &chosen, &name, options)?;
    let gate = Gate { options, brought };
    let known = match options.repair {
        None => known_image(domain, &chosen)?,
        Some(_) => None,
    };
    let mut damage = Damage::default();
    if let Some(record) = &known {
        damage = damage_of(domain, record)?;
        if damage.is_empty()
            && let Some(report) = publish_known(domain, source, &name, record, &gate, task)?
        {
            return Ok(report);
        }
    }
    let is_manifest = matches!(chosen, Chosen::Manifest { .. });
    let image = opened.resolve(chosen, options.limits.document_bytes)?;
    let manifest = is_manifest.then(|| image.manifest.clone());
    let attempt = |gate: &Gate<'_>, again: bool| {
        let options = gate.options;
        let mut report = ImportReport {
            manifest: manifest.clone(),
            config: Some(BlobDigest::sha256(image.config.as_bytes())),
            ..empty_report(&name)
        };
        let staging = Arc::new(begin(domain, options, again, task)?);
        let (tree, hidden) =
            build(&staging, &image, options, opened.jobs(), !again, task, &mut report)?;
        let staging = Arc::into_inner(staging)
            .ok_or_else(|| ImportError::Image { what: "the staging is still in use".into() })?;
        let mut record = Ref::new(Digest([0; 32]));
        record.manifest = manifest.as_ref().map(BlobDigest::to_string);
        record.document.clone_from(&image.document);
        record.source = in_registry(source);
        record.config = Some(image.config.clone());
        record.layers = image.layers.iter().map(record_of).collect();
        finish(staging, &tree, &hidden, record, gate, task, &mut report)?;
        Ok(report)
    };
    if let Some(record) = known.filter(|_| !damage.is_empty()) {
        let options = ImportOptions { repair: Some(damage), ..options.clone() };
        let mended = attempt(&Gate { options: &options, brought: Vec::new() }, false)?;
        if damage_of(domain, &record)?.is_empty()
            && publish_known(domain, source, &name, &record, &gate, task)?.is_some()
        {
            return Ok(mended);
        }
    }
    twice(|again| attempt(&gate, again), task)
}

/// The name to pull the image by again.
fn in_registry(source: &Source) -> Option<String> {
    match source {
        Source::Registry(reference) => Some(reference.to_string()),
        _ => None,
    }
}

/// Checks before an image gets its name.
struct Gate<'a> {
    options: &'a ImportOptions,
    /// Signatures by cosign that came with it, verified.
    brought: Vec<Record>,
}

impl Gate<'_> {
    /// The signatures to keep with an image that may come in.
    fn admit(&self, domain: &Domain, name: &str, record: &Ref) -> Result<Vec<Record>, TrustError> {
        let (image, config) = (&record.image, record.config.as_deref());
        self.options.trust.admit(domain, name, image, config, self.brought.clone())
    }
}

/// Cosign signatures of an image to be pulled. Fails before anything is fetched if the policy needs
/// one and there is none.
fn cosigned(
    opened: &Opened,
    chosen: &Chosen,
    name: &str,
    options: &ImportOptions,
) -> Result<Vec<Record>, ImportError> {
    let policy = &options.trust.policy;
    let keys = policy.cosign_keys(name);
    if options.repair.is_some() || keys.is_empty() {
        return Ok(Vec::new());
    }
    let found = opened.cosigned(chosen, &keys)?;
    if let Some(keys) = policy.needs_cosign(name).filter(|_| found.is_empty())
        && let (Chosen::Manifest { asked, .. }, Some(_)) = (chosen, opened.jobs())
    {
        let (name, digest) = (name.to_owned(), asked.to_string());
        return Err(TrustError::NoClaim { name, digest, keys }.into());
    }
    Ok(found)
}

fn begin(
    domain: &Domain,
    options: &ImportOptions,
    hold_lock: bool,
    task: &Task,
) -> Result<Staging, ImportError> {
    let staging = match &options.repair {
        Some(damage) => domain.begin_repair(damage)?,
        None => {
            domain.begin_import(cofolio_store::ImportOptions { hold_lock, ..Default::default() })?
        }
    };
    Ok(staging.cancelled_by(&task.cancel))
}

/// A ref with the same manifest or, since `docker save` has none, with the same config.
fn known_image(domain: &Domain, chosen: &Chosen) -> Result<Option<Ref>, ImportError> {
    Ok(match chosen {
        Chosen::Manifest { digest, .. } => {
            domain.find_by_manifest(&digest.to_string())?.map(|(_, record)| record)
        }
        Chosen::Docker { digest, .. } => {
            domain.readable_refs()?.into_iter().map(|(_, record)| record).find(|record| {
                let config = record.config.as_ref();
                config.is_some_and(|c| BlobDigest::sha256(c.as_bytes()) == *digest)
            })
        }
    })
}

/// Files of a known image that are missing or altered: its metadata image, and its layers' trees
/// and splits. Of objects only the size is looked at: `fsck` and `verify` read them.
fn damage_of(domain: &Domain, record: &Ref) -> Result<Damage, ImportError> {
    let mut damage = Damage::default();
    let digest = || digest_of(&domain.open_image(&record.image)?).map_err(store_error);
    if sound(digest())? != Some(record.image) {
        damage.images.insert(record.image);
    }
    for Layer { chain_id, .. } in &record.layers {
        let mut objects = Vec::new();
        let known = known_layer(domain, chain_id, &mut |digest, size| objects.push((digest, size)));
        let split = FileName::chain(FileKind::Split, chain_id)?;
        let mut is_damaged = known?.is_none() || !domain.has_named(&split)?;
        objects.sort_unstable();
        objects.dedup();
        for (digest, size) in objects {
            if sound(domain.object_size(&digest).map_err(Into::into))?.flatten() != Some(size) {
                damage.objects.insert(digest);
                is_damaged = true;
            }
        }
        if is_damaged {
            damage.layers.insert(chain_id.clone());
        }
    }
    Ok(damage)
}

/// Gives a known image the name. `None` if it was removed and collected meanwhile.
fn publish_known(
    domain: &Domain,
    source: &Source,
    name: &str,
    record: &Ref,
    gate: &Gate<'_>,
    task: &Task,
) -> Result<Option<ImportReport>, ImportError> {
    task.tell(Event::Phase(Phase::Commit));
    let mut record =
        Ref { source: in_registry(source).or(record.source.clone()), ..record.clone() };
    let signatures = gate.admit(domain, name, &record)?;
    let mut report = known_report(name, &record)
        .map_err(|error| ImportError::Image { what: format!("the record of {name}: {error}") })?;
    report.known = true;
    record.labels = labels(domain, name, gate.options);
    record.created = now();
    for signature in signatures {
        signature.keep(domain, &record.image)?;
    }
    match domain.put_ref(name, &record) {
        // Garbage collection removed it since we looked.
        Err(error) if error.is_race() => Ok(None),
        done => done.map(|()| Some(report)).map_err(Into::into),
    }
}

/// The report on an image that was not read.
fn known_report(name: &str, record: &Ref) -> Result<ImportReport, NoDigest> {
    let layer = |layer: &Layer| {
        let diff_id: DiffId = layer.diff_id.parse()?;
        let digest = layer.blob.as_deref().map(str::parse).transpose()?;
        Ok(LayerReport {
            digest: digest.unwrap_or_else(|| diff_id.as_blob().clone()),
            diff_id,
            chain_id: layer.chain_id.parse()?,
            size: layer.size,
            uncompressed: 0,
            known: true,
            entries: 0,
        })
    };
    Ok(ImportReport {
        image: record.image,
        manifest: record.manifest.as_deref().map(str::parse).transpose()?,
        config: record.config.as_ref().map(|config| BlobDigest::sha256(config.as_bytes())),
        layers: record.layers.iter().map(layer).collect::<Result<_, _>>()?,
        ..empty_report(name)
    })
}

/// The requested labels, plus the pin of an existing ref: importing a newer image keeps it pinned.
fn labels(domain: &Domain, name: &str, options: &ImportOptions) -> BTreeMap<String, String> {
    let mut labels = options.labels.clone();
    // A record that cannot be read is replaced.
    if let Ok(Some(record)) = domain.get_ref(name)
        && let Some(value) = record.labels.get(KEEP_LABEL)
    {
        labels.entry(KEEP_LABEL.to_owned()).or_insert_with(|| value.clone());
    }
    labels
}

fn empty_report(name: &str) -> ImportReport {
    ImportReport {
        name: name.to_owned(),
        image: Digest([0; 32]),
        manifest: None,
        config: None,
        known: false,
        layers: Vec::new(),
        entries: 0,
        objects_new: 0,
        bytes_new: 0,
        objects_known: 0,
        bytes_known: 0,
        image_bytes: 0,
        foreign_xattrs: 0,
        duration_ms: 0,
    }
}

fn record_of(layer: &FoundLayer) -> Layer {
    Layer {
        chain_id: layer.chain_id.to_string(),
        diff_id: layer.diff_id.to_string(),
        blob: Some(layer.blob.digest.to_string()),
        size: layer.blob.size,
        media_type: layer.media_type.clone(),
    }
}

/// Smaller layers are not published early: fetching them again costs less than a sync.
const KEEP_BYTES_MIN: u64 = 1 << 20;

enum Unmerged {
    /// The first one, just unpacked: its tree becomes the merged one.
    Lowest(Tree),
    /// Any other: it is merged from its dump.
    Over(DumpedLayer),
}

/// What the layers of an import have in common.
struct Layers<'env> {
    shared: Shared<'env>,
    staging: &'env Arc<Staging>,
    options: &'env ImportOptions,
    /// How many are pulled at a time; `None` if they are at hand.
    jobs: Option<usize>,
    trust_known: bool,
    task: &'env Task,
    on_read: OnRead<'env>,
}

/// Of a layer: counts if it was unpacked, objects that only its split names, and its tree.
type Ready = (Option<Counts>, Vec<([u8; 32], u64)>, Unmerged);

impl<'env> Layers<'env> {
    /// Whether the store has a layer. A repair does not read one for a split that never existed.
    fn is_known(&self, chain_id: &str) -> Result<bool, ImportError> {
        let damage = self.options.repair.as_ref();
        let has = |kind| self.staging.domain().has_named(&FileName::chain(kind, chain_id)?);
        Ok(self.trust_known
            && !damage.is_some_and(|damage| damage.layers.contains(chain_id))
            && has(FileKind::Layer)?
            && (damage.is_some() || has(FileKind::Split)?))
    }

    /// Unpacks a layer, unless it is `known` and can be read.
    fn make_ready<'scope>(
        &self,
        scope: &'scope Scope<'scope, 'env>,
        workers: Workers,
        (index, layer): (usize, &FoundLayer),
        known: bool,
    ) -> Result<Ready, ImportError> {
        let domain = self.staging.domain();
        let from_store = || known_layer(domain, &layer.chain_id.to_string(), &mut |_, _| {});
        if known && let Some(layer) = from_store()? {
            return Ok((None, Vec::new(), Unmerged::Over(layer)));
        }
        // A pulled layer is kept even if the pull fails.
        let is_kept = self.jobs.is_some()
            && self.trust_known
            && self.options.repair.is_none()
            && layer.blob.size >= KEEP_BYTES_MIN;
        let own = is_kept.then(|| domain.begin_import(Default::default())).transpose()?;
        let own = own.map(|own| Arc::new(own.cancelled_by(&self.task.cancel)));
        let target = own.as_ref().unwrap_or(self.staging);
        let Unpacked { tree, replaced, mut counts } =
            unpack(scope, &self.shared, target, workers, layer, self.on_read)?;
        counts.kept = own.map(|own| keep(own, &tree, &replaced)).transpose()?;
        let unmerged = match (index, counts.kept) {
            (0, _) => Unmerged::Lowest(tree),
            (_, None) => Unmerged::Over(dumped(self.staging, layer, tree)?),
            (_, Some(_)) => {
                drop(tree);
                Unmerged::Over(from_store()?.ok_or_else(vanished)?)
            }
        };
        Ok((Some(counts), replaced, unmerged))
    }
}

/// Unpacks the layers that are not known, several at a time, and merges them in order.
fn build(
    staging: &Arc<Staging>,
    image: &FoundImage,
    options: &ImportOptions,
    jobs: Option<usize>,
    trust_known: bool,
    task: &Task,
    report: &mut ImportReport,
) -> Result<(Tree, Hidden), ImportError> {
    task.tell(Event::Phase(Phase::Unpack));
    let Limits { uncompressed_bytes, ratio_from_bytes, ratio, .. } = options.limits;
    let budget =
        Budget::new(uncompressed_bytes, ratio_from_bytes, ratio.max(1), task.cancel.child());
    let (entries, pool) = (AtomicU64::new(0), Arc::new(Pool::default()));
    let shared = Shared { budget: &budget, limits: &options.limits, pool, entries: &entries };
    let on_read = |bytes| task.tell(Event::Read(bytes));
    let layers = Layers { shared, staging, options, jobs, trust_known, task, on_read: &on_read };
    let count = image.layers.len();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if options.threads == 0 { processors } else { options.threads };
    // Some of them wait for the disk.
    let writers = (threads * 2).clamp(1, 8);
    let at_a_time = jobs.unwrap_or(threads.clamp(1, 4));

    std::thread::scope(|scope| {
        let workers = Workers::start(scope, writers)?;
        let mut running = VecDeque::new();
        let mut waiting = image.layers.iter().enumerate();
        let mut merged = Tree::new(DEFAULT_DIR);
        let mut hidden = Hidden::new();
        for layer in &image.layers {
            // Layers begin in order, and few at a time.
            while running.len() < at_a_time {
                let Some((index, layer)) = waiting.next() else { break };
                let known = layers.is_known(&layer.chain_id.to_string());
                let Ok(known) = known.map_err(|error| budget.stop(error)) else { break };
                let state = if known { LayerState::Known } else { LayerState::Read };
                let digest = layer.blob.digest.to_string();
                let blob = Some((digest.as_str(), layer.blob.size));
                task.tell(Event::Layer { index, count, state, blob });
                let (layers, workers) = (&layers, workers.clone());
                let started = spawn(scope, move || {
                    let ready = layers.make_ready(scope, workers, (index, layer), known);
                    ready.map_err(|error| layers.shared.budget.stop(error))
                });
                match started {
                    Ok(layer) => running.push_back(layer),
                    Err(error) => {
                        // The other layers end early.
                        budget.stop(error.into());
                        break;
                    }
                }
            }
            let Some(first) = running.pop_front().filter(|_| !budget.is_stopped()) else {
                return Err(reason(&budget));
            };
            let joined = first.join().unwrap_or_else(|_| {
                budget.stop(ImportError::Image { what: "a thread panicked".into() });
                Err(())
            });
            if running.is_empty() {
                layers.shared.pool.clear();
            }
            let result = joined.and_then(|(unpacked, replaced, unmerged)| {
                hidden.extend(replaced);
                report.layers.push(layer_report(layer, unpacked.as_ref()));
                if let Some(counts) = unpacked {
                    report.foreign_xattrs += counts.foreign_xattrs;
                    counts.kept.iter().for_each(|stats| add_stats(report, stats));
                }
                let result = match unmerged {
                    Unmerged::Lowest(tree) => merge::lowest(tree).map(|tree| merged = tree),
                    Unmerged::Over(layer) => merge::apply(&mut merged, &layer, &mut hidden),
                };
                result.map_err(|error| budget.stop(merge_error(layer, error)))
            });
            result.map_err(|()| reason(&budget))?;
        }
        Ok((merged, hidden))
    })
}

fn reason(budget: &Budget) -> ImportError {
    let what = "a layer failed without a reason".into();
    budget.reason().unwrap_or(ImportError::Image { what })
}

fn layer_report(layer: &FoundLayer, unpacked: Option<&Counts>) -> LayerReport {
    LayerReport {
        digest: layer.blob.digest.clone(),
        diff_id: layer.diff_id.clone(),
        chain_id: layer.chain_id.clone(),
        size: layer.blob.size,
        uncompressed: unpacked.map_or(0, |counts| counts.uncompressed),
        known: unpacked.is_none(),
        entries: unpacked.map_or(0, |counts| counts.entries),
    }
}

fn merge_error(layer: &FoundLayer, error: MergeError) -> ImportError {
    match error {
        MergeError::Entry { path, what } => {
            ImportError::Merge { digest: layer.blob.digest.to_string(), entry: shown(&path), what }
        }
        MergeError::Dump(error) => store_error(error),
    }
}

/// Writes the metadata image, commits everything and publishes the ref.
fn finish(
    staging: Staging,
    tree: &Tree,
    hidden: &Hidden,
    mut record: Ref,
    gate: &Gate<'_>,
    task: &Task,
    report: &mut ImportReport,
) -> Result<(), ImportError> {
    task.tell(Event::Phase(Phase::Image));
    let mut writer = staging.image_writer()?;
    let written =
        write::write(tree, &WriteOptions::default(), &mut writer).map_err(|e| match e {
            WriteError::Sink(error) => store_error(error),
            other => ImportError::Image { what: other.to_string() },
        })?;
    let image = writer.finish()?;
    record.image = image;
    record.created = now();
    record.labels = labels(staging.domain(), &report.name, gate.options);
    report.image = image;
    report.image_bytes = written.bytes;
    report.entries = tree.entry_count() as u64;
    // A repair restores only what this source has.
    let whole = gate.options.repair.is_none();
    let domain = staging.domain().clone();
    let signatures = if whole { gate.admit(&domain, &report.name, &record)? } else { Vec::new() };
    task.tell(Event::Phase(Phase::Commit));
    let below = hidden.iter().map(|&(digest, size)| (Digest(digest), size));
    let publish =
        if whole { Publish::named(report.name.clone(), record) } else { Publish::default() };
    let objects = objects(tree).chain(below).filter(|_| whole);
    let stats = staging.commit(&publish, objects)?;
    add_stats(report, &stats);
    // A crash before this leaves an image that counts as not signed; the next pull makes up for it.
    for signature in signatures {
        signature.keep(&domain, &image)?;
    }
    Ok(())
}

fn add_stats(report: &mut ImportReport, stats: &StagingStats) {
    report.objects_new += stats.new_objects;
    report.bytes_new += stats.new_bytes;
    report.objects_known += stats.known_objects;
    report.bytes_known += stats.known_bytes;
}

/// Garbage collection removed a layer that was just published.
fn vanished() -> ImportError {
    ImportError::Store(cofolio_store::Error::Vanished { count: 1, first: "a layer".into() })
}

/// The image's name, from the caller or the source. A repair gives no name, so it takes any.
fn name_for(
    source: &Source,
    called: Option<&str>,
    options: &ImportOptions,
) -> Result<String, ImportError> {
    let name = options.name.clone().unwrap_or_else(|| default_name(source, called));
    if options.repair.is_none() {
        check_name(&name)?;
    }
    Ok(name)
}

/// Checks an image's name: [`ImportError::Name`] if it is blank, too long, a path or has control
/// characters.
pub fn check_name(name: &str) -> Result<(), ImportError> {
    let bad = |what| ImportError::Name { name: name.chars().take(80).collect(), what };
    check_image_name(name).map_err(bad)
}

/// A name from the source: the tag that was asked for, or else what the source calls the image, if
/// that is a whole name; else the source's file name, with the tag if there is one.
fn default_name(source: &Source, called: Option<&str>) -> String {
    let stem = |path: &Path| {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let name = name.strip_suffix(".tar").unwrap_or(&name).to_owned();
        if name.is_empty() { "image".to_owned() } else { name }
    };
    let (path, tag) = match source {
        Source::Registry(reference) => return reference.name().to_owned(),
        // An id or a digest is no name: the image has a better one, or must be given one.
        Source::ContainersStorage(containers_storage::Reference { name, .. })
        | Source::Containerd(containerd::Reference { name, .. }) => {
            let whole = is_whole_name(name) && !name.contains('@') && !name.starts_with("sha256:");
            return called.filter(|_| !whole).unwrap_or(name).to_owned();
        }
        Source::Directory { path } => (path, None),
        Source::Layout { path, tag }
        | Source::Archive { path, tag }
        | Source::DockerSave { path, tag } => (path, tag.as_deref().or(called)),
    };
    match tag {
        None => stem(path),
        Some(tag) if is_whole_name(tag) => tag.to_owned(),
        Some(tag) => format!("{}:{tag}", stem(path)),
    }
}
