//! Trimming: names of images go, least recently used first, until the domain is small enough.
//!
//! All of it happens with the domain's exclusive lock held: what is announced is what is done. First it is
//! worked out who keeps what: every image and layer counts those that keep it, every object the images and
//! layers that name it. Taking a name away then says exactly what that frees. The names that are to go are
//! removed durably, and an ordinary garbage collection does the rest.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;

use crate::base::with_bases;
use crate::contents::{Contents, Part};
use crate::disk::LockMode;
use crate::error::{At, BoxError, Error, Result};
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

/// How an object, a pack or a segment is used.
struct Object {
    /// Images and layers that name it and are kept.
    users: u32,
    /// The one that counted it last: one that names an object twice uses it once.
    last: u32,
    allocated: u64,
}

/// Who keeps what.
struct Uses {
    /// Images and layers by how many keep them.
    parts: BTreeMap<Part, u32>,
    objects: HashMap<Digest, Object>,
    /// Packs and their segments, by image.
    packed: HashMap<Digest, Vec<Digest>>,
    turn: u32,
}

impl Domain {
    /// Removes names of images as `options` says, then collects what nothing keeps any more. `announce` is
    /// told what will be done before it is, with the lock held. `live` is as for [`Domain::gc`].
    ///
    /// Never goes: a name of an image that a root, a live mount or another pinned name keeps.
    ///
    /// # Errors
    /// Those of [`Domain::gc`]; nothing was changed then, except that an I/O error in the middle leaves
    /// some of the names removed.
    pub fn trim(
        &self,
        contents: &dyn Contents,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        options: &TrimOptions,
        announce: &dyn Fn(&TrimPlan),
    ) -> Result<(TrimPlan, GcReport)> {
        if !options.gc.dry_run {
            self.store().check_writable()?;
        }
        let Some(_lock) = self.lock(LockMode::Exclusive, options.gc.wait)? else {
            return Err(Error::Busy { domain: self.name().to_owned() });
        };
        let live = live().map_err(|source| Error::Unreadable {
            what: "this machine's live mounts".to_owned(),
            source,
        })?;
        let plan = self.plan_trim(contents, &live, options)?;
        announce(&plan);
        let gone: BTreeSet<String> =
            plan.victims.iter().flat_map(|victim| victim.refs.iter().cloned()).collect();
        if !options.gc.dry_run {
            for name in &gone {
                self.remove_ref(name)?;
            }
        }
        let report = self.gc_locked(contents, &|| Ok(live.clone()), &options.gc, &gone)?;
        Ok((plan, report))
    }

    fn plan_trim(
        &self,
        contents: &dyn Contents,
        live: &[Digest],
        options: &TrimOptions,
    ) -> Result<TrimPlan> {
        let refs = self.refs()?;
        let (roots, _) = self.live_roots(&options.gc)?;
        let mut in_use: BTreeSet<Digest> = live.iter().copied().collect();
        let mut uses = self.uses_of_nothing()?;
        for (pack, segments) in self.packs_with_segments(contents)? {
            // What cannot be used is not kept.
            let Some(segments) = segments else { continue };
            uses.packed
                .entry(pack.image)
                .or_default()
                .extend(segments.into_iter().chain([pack.digest]));
        }
        let bases = self.bases()?;
        let over = |images: &[Digest]| with_bases(images.iter().copied(), &bases);
        for (_, root) in &roots {
            in_use.extend(&root.images);
            uses.keep(over(&root.images), root.layers.iter());
        }
        uses.keep(over(live), [].iter());
        for (_, record) in &refs {
            uses.keep(over(&[record.image]), record.layers.iter().map(|l| &l.chain_id));
        }
        let bytes_before = uses.objects.values().map(|object| object.allocated).sum::<u64>()
            + self.parts_bytes()?;
        let mut bytes = self.count_kept(contents, &mut uses)?;
        let mut plan = TrimPlan {
            bytes_before,
            garbage_bytes: bytes_before.saturating_sub(bytes),
            size: options.size,
            ..TrimPlan::default()
        };
        for Candidate { image, last_used, names } in self.by_last_use(&refs)? {
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
                for image in over(&[image]) {
                    freed += self.release(contents, &mut uses, Part::Image(image))?;
                }
                for layer in &record.layers {
                    let part = Part::Layer(layer.chain_id.clone());
                    freed += self.release(contents, &mut uses, part)?;
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
    /// [`Error::Io`].
    pub fn bytes(&self) -> Result<u64> {
        let objects = self.uses_of_nothing()?.objects;
        let objects: u64 = objects.values().map(|object| object.allocated).sum();
        Ok(objects + self.parts_bytes()?)
    }

    fn uses_of_nothing(&self) -> Result<Uses> {
        let mut objects = HashMap::new();
        let mut add = |digest, allocated| {
            objects.insert(digest, Object { users: 0, last: 0, allocated });
        };
        self.each_object(&mut add)?;
        let segments = self.segments()?;
        let segments = segments.iter().map(|segment| (*segment, self.segment_file(segment)));
        let packs = self.packs()?;
        let packs = packs.iter().map(|pack| (pack.digest, self.pack_file(pack)));
        for (digest, path) in segments.chain(packs) {
            add(digest, self.disk().stat(&path).at("look at", &path)?.allocated);
        }
        Ok(Uses { parts: BTreeMap::new(), objects, packed: HashMap::new(), turn: 0 })
    }

    /// What all images and layers take themselves.
    fn parts_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for directory in ["images", "layers"] {
            let path = format!("{}/{directory}", self.base());
            for (entry, _) in self.disk().list(&path).at("list", &path)? {
                let path = format!("{path}/{entry}");
                bytes += self.disk().stat(&path).at("look at", &path)?.allocated;
            }
        }
        Ok(bytes)
    }

    /// Counts the users of every object; gives the bytes of all that is kept.
    fn count_kept(&self, contents: &dyn Contents, uses: &mut Uses) -> Result<u64> {
        let parts: Vec<Part> = uses.parts.keys().cloned().collect();
        let mut bytes = 0;
        for part in parts {
            bytes += self.part_bytes(&part)?;
            uses.visit(self, contents, &part, |object| {
                object.users += 1;
                bytes += if object.users == 1 { object.allocated } else { 0 };
            })?;
        }
        Ok(bytes)
    }

    /// One that kept a part does so no more; gives the bytes that this frees.
    fn release(&self, contents: &dyn Contents, uses: &mut Uses, part: Part) -> Result<u64> {
        match uses.parts.get_mut(&part) {
            Some(keepers) if *keepers > 1 => {
                *keepers -= 1;
                return Ok(0);
            }
            _ => uses.parts.remove(&part),
        };
        let mut freed = self.part_bytes(&part)?;
        uses.visit(self, contents, &part, |object| {
            object.users -= 1;
            freed += if object.users == 0 { object.allocated } else { 0 };
        })?;
        Ok(freed)
    }

    fn part_bytes(&self, part: &Part) -> Result<u64> {
        // One that is missing is an error of its own, told when it is read.
        let allocated = |path: &str| self.disk().stat(path).map_or(0, |stat| stat.allocated);
        Ok(match part {
            Part::Image(digest) => allocated(&self.image_file(digest)),
            Part::Split(chain_id) => allocated(&self.split_file(chain_id)?),
            Part::Layer(chain_id) => {
                allocated(&self.layer_file(chain_id)?) + allocated(&self.split_file(chain_id)?)
            }
        })
    }
}

impl Uses {
    fn keep<'a>(
        &mut self,
        images: impl IntoIterator<Item = Digest>,
        layers: impl Iterator<Item = &'a String>,
    ) {
        let parts = images.into_iter().map(Part::Image);
        for part in parts.chain(layers.map(|chain_id| Part::Layer(chain_id.clone()))) {
            *self.parts.entry(part).or_insert(0) += 1;
        }
    }

    /// Calls `change` with every object that a part names, once; of an image also with its pack and segments.
    fn visit(
        &mut self,
        domain: &Domain,
        contents: &dyn Contents,
        part: &Part,
        mut change: impl FnMut(&mut Object),
    ) -> Result<()> {
        self.turn += 1;
        let (turn, objects) = (self.turn, &mut self.objects);
        let mut visit = |digest, _| {
            if let Some(object) = objects.get_mut(&digest).filter(|object| object.last != turn) {
                object.last = turn;
                change(object);
            }
        };
        if let Part::Image(image) = part {
            self.packed.get(image).into_iter().flatten().for_each(|digest| visit(*digest, 0));
        }
        part.visit_whole(domain, contents, &mut visit)
            .map_err(|source| part.unreadable("the domain", source))
    }
}
