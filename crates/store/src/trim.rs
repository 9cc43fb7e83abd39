//! Trimming: removes names of images, least recently used first, until the domain is small enough.
//!
//! It counts the keepers of every image and layer, and the images and layers that name every
//! object, to know what removing a name frees. It removes the names durably, and a garbage
//! collection does the rest. Imports and mounts go on: a name that was given to another image
//! meanwhile stays, as does one whose image came into use.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;

use crate::base::with_bases;
use crate::collector::{Collector, Suspect};
use crate::contents::Contents;
use crate::disk::Kind;
use crate::domain::Covered;
use crate::error::{BoxError, Result};
use crate::kinds::{FileKind, FileName};
use crate::reach::Keepers;
use crate::uses::Uses;
use crate::{Digest, Domain, GcOptions, GcReport, Ref};

/// Label of a ref that is never trimmed, whatever its value.
pub const KEEP_LABEL: &str = "cofolio.keep";

/// What is to go.
#[derive(Clone, Debug, Default)]
pub struct TrimOptions {
    /// Remove images until the domain takes at most so many bytes on disk.
    pub size: Option<u64>,
    /// Remove images last used before, in seconds since 1970, whatever the size.
    pub unused_since: Option<i64>,
    /// Images used since then stay, in seconds since 1970.
    pub keep_since: Option<i64>,
    /// Images that stay in any case.
    pub keep: Vec<Digest>,
    /// How the garbage collection is run; `dry_run` removes no name either.
    pub gc: GcOptions,
}

/// An image whose names go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Victim {
    /// The image.
    pub image: Digest,
    /// Its names.
    pub refs: Vec<String>,
    /// When it was last mounted, imported or named, in seconds since 1970.
    pub last_used: i64,
    /// Bytes on disk that nothing else needs, once those before it are gone.
    pub bytes: u64,
}

/// Why an image stays that would otherwise have its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spared {
    /// It is mounted, or a lease, snapshot or virtual machine keeps it.
    InUse,
    /// A name of it has the label [`KEEP_LABEL`].
    Pinned,
    /// It was used lately.
    Recent,
}

/// What a trim does, announced before it does it. Bytes are allocated bytes, of this domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TrimPlan {
    /// What the domain takes.
    pub bytes_before: u64,
    /// What nothing keeps even now.
    pub garbage_bytes: u64,
    /// Images whose names go, in that order.
    pub victims: Vec<Victim>,
    /// Images that stay, and why.
    pub spared: Vec<(Digest, Spared)>,
    /// What the domain takes afterwards.
    pub bytes_after: u64,
    /// The size that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

impl TrimPlan {
    /// Whether the domain is as small afterwards as was asked for.
    pub fn is_enough(&self) -> bool {
        self.size.is_none_or(|size| self.bytes_after <= size)
    }
}

/// An image that has names, and how long it was not used.
struct Candidate<'a> {
    image: Digest,
    last_used: i64,
    names: Vec<&'a (String, Ref)>,
}

/// What is in use, and how often.
struct Usage {
    /// Images and layers by how many keep them.
    files: BTreeMap<FileName, u32>,
    uses: Uses,
    /// Packs and their segments, by image.
    packed: HashMap<Digest, Vec<Digest>>,
}

impl Domain {
    /// Removes names of images as `options` says, then collects garbage. `announce` hears what will
    /// be done before it is. `live` is as for [`Domain::gc`]. Names of an image that a root, a live
    /// mount or another pinned name keeps stay.
    ///
    /// # Errors
    /// Those of [`Domain::gc`], and [`Error::Unreadable`](crate::Error::Unreadable) or
    /// [`Error::Corrupt`](crate::Error::Corrupt) for an unreadable image, layer or record: what
    /// goes with a name is not known then. Only an I/O error can leave some of the names removed.
    pub fn trim(
        &self,
        contents: &dyn Contents,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        options: &TrimOptions,
        announce: &dyn Fn(&TrimPlan),
    ) -> Result<(TrimPlan, GcReport)> {
        let mut collector = Collector::begin(self, contents, &options.gc)?;
        let mut keepers = self.keepers(live, &options.gc)?;
        // What such a record names is not known, so neither is what goes with another name.
        if let Some(error) = keepers.unreadable.pop() {
            return Err(error);
        }
        let mut plan = self.plan_trim(contents, &keepers, options)?;
        announce(&plan);
        if !options.gc.dry_run {
            collector.remove_names(&mut plan)?;
        }
        // Those that went are gone; a dry run looks as if they were.
        let victims = plan.victims.iter().filter(|_| options.gc.dry_run);
        let gone = victims.flat_map(|victim| victim.refs.iter().cloned()).collect();
        let report = collector.collect(live, &gone)?;
        Ok((plan, report))
    }

    fn plan_trim(
        &self,
        contents: &dyn Contents,
        keepers: &Keepers,
        options: &TrimOptions,
    ) -> Result<TrimPlan> {
        let refs = &keepers.refs;
        let used = keepers.roots.iter().flat_map(|(_, root)| &root.images);
        let in_use: BTreeSet<Digest> = used.chain(&keepers.live).copied().collect();
        let mut usage = self.usage(contents, keepers)?;
        let bases = self.bases()?;
        let bytes_before =
            self.files_bytes(&[FileKind::Image, FileKind::Layer, FileKind::Split])?
                + usage.uses.iter().map(|object| object.allocated).sum::<u64>();
        let mut bytes = usage.count(self, contents)?;
        let mut plan = TrimPlan {
            bytes_before,
            garbage_bytes: bytes_before.saturating_sub(bytes),
            size: options.size,
            ..TrimPlan::default()
        };
        for Candidate { image, last_used, names } in self.by_last_use(refs)? {
            let too_large = options.size.is_some_and(|size| bytes > size);
            let too_old = options.unused_since.is_some_and(|since| last_used < since);
            if !too_large && !too_old {
                continue;
            }
            let pinned = |(_, record): &&(String, Ref)| record.labels.contains_key(KEEP_LABEL);
            let spared = if in_use.contains(&image) {
                Some(Spared::InUse)
            } else if names.iter().any(pinned) {
                Some(Spared::Pinned)
            } else if options.keep.contains(&image)
                || options.keep_since.is_some_and(|since| last_used >= since)
            {
                Some(Spared::Recent)
            } else {
                None
            };
            if let Some(why) = spared {
                plan.spared.push((image, why));
                continue;
            }
            let mut freed = 0;
            for (_, record) in &names {
                for image in with_bases([image], &bases) {
                    let file = FileName::content(FileKind::Image, &image);
                    freed += usage.release(self, contents, file)?;
                }
                for layer in &record.layers {
                    let file = FileName::chain(FileKind::Layer, &layer.chain_id)?;
                    freed += usage.release(self, contents, file)?;
                }
            }
            bytes = bytes.saturating_sub(freed);
            let refs = names.iter().map(|(name, _)| name.clone()).collect();
            plan.victims.push(Victim { image, refs, last_used, bytes: freed });
        }
        plan.bytes_after = bytes;
        Ok(plan)
    }

    /// Images that have names, those that were not used for longest first.
    fn by_last_use<'a>(&self, refs: &'a [(String, Ref)]) -> Result<Vec<Candidate<'a>>> {
        let mut images: BTreeMap<Digest, Vec<&(String, Ref)>> = BTreeMap::new();
        for named in refs {
            images.entry(named.1.image).or_default().push(named);
        }
        let mut order = Vec::with_capacity(images.len());
        for (image, names) in images {
            let created = names.iter().map(|(_, record)| record.created).max().unwrap_or(0);
            let last_used = self.noted_use(&image)?.unwrap_or(0).max(created);
            order.push(Candidate { image, last_used, names });
        }
        order.sort_by_key(|candidate| (candidate.last_used, candidate.image));
        Ok(order)
    }

    /// What the domain takes on disk, in bytes.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn bytes(&self) -> Result<u64> {
        let mut bytes = self.files_bytes(&FileKind::NAMED)?;
        self.each_object(&mut |_, allocated| bytes += allocated)?;
        Ok(bytes)
    }

    /// What all files of some kinds take.
    fn files_bytes(&self, kinds: &[FileKind]) -> Result<u64> {
        kinds.iter().try_fold(0, |bytes, kind| Ok(bytes + self.allocated_for(*kind)?.1))
    }

    /// What the keepers keep; no object is counted yet.
    fn usage(&self, contents: &dyn Contents, keepers: &Keepers) -> Result<Usage> {
        let mut uses = Uses::of_objects(self)?;
        let mut packed: HashMap<Digest, Vec<Digest>> = HashMap::new();
        for kind in [FileKind::Segment, FileKind::Pack, FileKind::DaxPack] {
            for name in self.named(kind)? {
                let Some(digest) = name.digest() else { continue };
                uses.add(digest, self.allocated(&self.named_file(&name))?);
                let Some(image) = name.image() else { continue };
                let mut segments = vec![digest];
                // A pack that cannot be used is not kept.
                if name.visit(self, contents, &mut |segment, _| segments.push(segment)).is_ok() {
                    packed.entry(image).or_default().extend(segments);
                }
            }
        }
        let bases = self.bases()?;
        let mut files = BTreeMap::new();
        keepers.each(|file, _| match file.image() {
            None => *files.entry(file).or_insert(0) += 1,
            Some(image) => {
                for image in with_bases([image], &bases) {
                    *files.entry(FileName::content(FileKind::Image, &image)).or_insert(0) += 1;
                }
            }
        });
        Ok(Usage { files, uses, packed })
    }

    /// What an image or a layer takes itself.
    fn own_bytes(&self, file: &FileName) -> Result<u64> {
        let mut bytes = self.allocated(&self.named_file(file))?;
        if file.kind() == FileKind::Layer {
            bytes += self.allocated(&self.named_file(&file.with_kind(FileKind::Split)))?;
        }
        Ok(bytes)
    }
}

impl Usage {
    /// Counts the users of every object; gives the bytes of all that is kept.
    fn count(&mut self, domain: &Domain, contents: &dyn Contents) -> Result<u64> {
        let mut bytes = 0;
        for file in self.files.keys() {
            bytes += domain.own_bytes(file)?;
            self.uses.visit(domain, contents, file, also(&self.packed, file), |object| {
                object.users += 1;
                bytes += if object.users == 1 { object.allocated } else { 0 };
            })?;
        }
        Ok(bytes)
    }

    /// One that kept a file does so no more; gives the bytes that this frees.
    fn release(&mut self, domain: &Domain, contents: &dyn Contents, file: FileName) -> Result<u64> {
        match self.files.get_mut(&file) {
            Some(keepers) if *keepers > 1 => {
                *keepers -= 1;
                return Ok(0);
            }
            _ => self.files.remove(&file),
        };
        let mut freed = domain.own_bytes(&file)?;
        self.uses.visit(domain, contents, &file, also(&self.packed, &file), |object| {
            object.users = object.users.saturating_sub(1);
            freed += if object.users == 0 { object.allocated } else { 0 };
        })?;
        Ok(freed)
    }
}

/// What an image keeps besides what it names: its packs and their segments.
fn also<'a>(packed: &'a HashMap<Digest, Vec<Digest>>, file: &FileName) -> &'a [Digest] {
    file.image().and_then(|image| packed.get(&image)).map_or(&[], Vec::as_slice)
}

impl Collector<'_> {
    /// Removes the chosen names, durably, unless their image changed or came into use since.
    fn remove_names(&mut self, plan: &mut TrimPlan) -> Result<()> {
        let mut names = Vec::new();
        for victim in &plan.victims {
            for name in &victim.refs {
                let path = self.domain.ref_file(name)?;
                names.push(Suspect { what: (victim.image, name), path, kind: Kind::File });
            }
        }
        self.sweep(Covered::Names, &names, |this, (image, name)| {
            let record = this.domain.get_ref(name)?;
            Ok(!this.noted.contains(image) && record.is_some_and(|record| record.image == *image))
        })?;
        self.domain.sync_directory("refs")?;
        for victim in plan.victims.extract_if(.., |victim| self.noted.contains(&victim.image)) {
            plan.spared.push((victim.image, Spared::InUse));
            plan.bytes_after += victim.bytes;
        }
        Ok(())
    }
}
