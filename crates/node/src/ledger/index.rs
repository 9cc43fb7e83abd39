//! Objects and the images that name them. Updated by the images that came and went.
//!
//! ```text
//!   domain ──▶ image ──▶ [object]   sorted, each once
//!                        object = {digest, size, resident pages, when it was last absent}
//! ```
//!
//! There is no list of images per object, only their number. An object takes some 90 bytes, and 4
//! bytes for each image that names it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use cofolio_store::{Digest, Domain, Error, Listing, Store};
use cofolio_sys::cache;
use hashbrown::HashTable;

use super::Budget;
use super::usage::ObjectId;
use crate::cache::named_objects;

/// What is known of an object.
#[derive(Debug, Clone)]
pub(super) struct Object {
    pub(super) digest: Digest,
    /// Number of its trust domain in [`Index::domains`].
    pub(super) domain: u16,
    /// How many images name it; 0 for a slot that is free.
    images: u32,
    pub(super) size: u64,
    /// Pages in the page cache when it was last looked at.
    pub(super) resident_pages: u32,
    /// Of these, the pages that are charged to the commons.
    pub(super) commons_pages: u32,
    /// The [epoch](super::charges::Charges::epoch) of that figure; 0 before the first look.
    pub(super) counted: u32,
    /// When it was last seen without a resident page. Whoever used it before that uses none of the
    /// pages that are resident now.
    pub(super) absent: u32,
}

impl Object {
    pub(super) fn resident_bytes(&self) -> u64 {
        u64::from(self.resident_pages) * cache::page_size()
    }

    pub(super) fn commons_bytes(&self) -> u64 {
        u64::from(self.commons_pages.min(self.resident_pages)) * cache::page_size()
    }

    /// Whether a use at this time may be one of the pages that are resident now.
    pub(super) fn counts_use(&self, time: u32) -> bool {
        time > self.absent
    }

    /// Whether several images name it.
    pub(super) fn is_shared(&self) -> bool {
        self.images > 1
    }
}

/// An image in the index.
#[derive(Debug)]
pub(super) struct Image {
    /// Sorted, each once.
    pub(super) objects: Box<[ObjectId]>,
    /// Resident bytes of its metadata image, its delta and its pack.
    pub(super) metadata_bytes: u64,
}

/// A trust domain in the index.
#[derive(Debug)]
pub(super) struct IndexedDomain {
    pub(super) domain: Domain,
    /// A removed one keeps its number, which objects and mounts may have.
    pub(super) is_removed: bool,
    /// Whether the last refresh could not list its images or refs.
    is_unlisted: bool,
    pub(super) images: BTreeMap<Digest, Image>,
    /// Images that are not in `images` yet.
    missing: BTreeSet<Digest>,
    /// Of these, the ones that could not be read, and when it was tried last. Each refresh tries
    /// them again after the new ones, as far as its budget goes.
    pub(super) unreadable: BTreeMap<Digest, u32>,
    /// Its directories when `missing`, `names` and `deltas` were read; `None` if they are to be
    /// read again.
    listing: Option<Listing>,
    /// Names of images, sorted.
    names: HashMap<Digest, Vec<String>>,
    /// Deltas of the images that have a base.
    deltas: HashMap<Digest, Digest>,
    /// Resident bytes of metadata images and packs, also of bases, which are not in `images` unless they
    /// have a name.
    metadata: HashMap<Digest, u64>,
}

/// What of the files that an image is mounted from is resident.
#[derive(Debug, Clone, Copy)]
pub(super) struct MetadataBytes {
    pub(super) bytes: u64,
    /// Whether all of them could be looked at.
    pub(super) is_whole: bool,
}

/// All trust domains of a store.
#[derive(Debug)]
pub(super) struct Index {
    store: Store,
    domains: Vec<IndexedDomain>,
    /// Whether the last refresh could not list the domains, or open a new one.
    is_unlisted: bool,
    /// When the last refresh began that left nothing out: an image that is first seen later was added after it.
    complete: Option<u32>,
    /// When the last refresh began: [`Object::absent`] of objects that are added. All uses that
    /// were noted under their numbers, for objects that are gone, are older.
    refreshed: u32,
    objects: Vec<Object>,
    /// Slots of `objects`, by domain and digest.
    by_digest: HashTable<u32>,
    free: Vec<u32>,
    /// Numbers of objects that went since the last [`Index::take_forgotten`]. New ones may have
    /// them.
    forgotten: HashSet<ObjectId>,
}

impl IndexedDomain {
    fn new(domain: Domain) -> Self {
        Self {
            domain,
            is_removed: false,
            is_unlisted: false,
            images: BTreeMap::new(),
            missing: BTreeSet::new(),
            unreadable: BTreeMap::new(),
            listing: None,
            names: HashMap::new(),
            deltas: HashMap::new(),
            metadata: HashMap::new(),
        }
    }

    /// Resident bytes of what its images are mounted from.
    pub(super) fn metadata_bytes(&self) -> u64 {
        self.metadata.values().sum()
    }

    /// The names of an image, sorted.
    pub(super) fn names(&self, image: &Digest) -> &[String] {
        self.names.get(image).map_or(&[], Vec::as_slice)
    }
}

/// The first bytes of an object's digest. They tell the objects of an index apart: to find another
/// content with those of a given object takes 2^64 attempts. Who makes two contents finds two with
/// the same ones in 2^32, and then the accounts of these two are wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ShortDigest([u8; 8]);

impl ShortDigest {
    pub(super) fn of(digest: &Digest) -> Self {
        Self(digest.0.first_chunk().copied().unwrap_or_default())
    }
}

fn hash(domain: u16, ShortDigest(bytes): ShortDigest) -> u64 {
    // A digest is as good as random.
    u64::from_le_bytes(bytes) ^ u64::from(domain).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Index {
    pub(super) fn new(store: Store) -> Self {
        Self {
            store,
            domains: Vec::new(),
            is_unlisted: false,
            complete: None,
            refreshed: 0,
            objects: Vec::new(),
            by_digest: HashTable::new(),
            free: Vec::new(),
            forgotten: HashSet::new(),
        }
    }

    pub(super) fn domains(&self) -> &[IndexedDomain] {
        &self.domains
    }

    /// Images that were added, or that cannot be read.
    pub(super) fn known_images(&self) -> usize {
        self.domains.iter().map(|it| it.images.len() + it.unreadable.len()).sum()
    }

    /// The number of a trust domain, unless it was removed.
    pub(super) fn domain_number(&self, name: &str) -> Option<u16> {
        let is_it = |it: &IndexedDomain| it.domain.name() == name && !it.is_removed;
        u16::try_from(self.domains.iter().position(is_it)?).ok()
    }

    /// The number of a trust domain that somebody asks for.
    ///
    /// # Errors
    /// [`Error::Io`] where it can still not be listed.
    pub(super) fn find_domain(&self, name: &str) -> Result<Option<u16>, Error> {
        let number = self.domain_number(name);
        match number.map(|it| &self.domains[usize::from(it)]) {
            Some(known) if known.is_unlisted => drop(known.domain.images()?),
            None if self.is_unlisted => drop(self.store.domains()?),
            _ => {}
        }
        Ok(number)
    }

    /// Whether an image that somebody asks for was added.
    ///
    /// # Errors
    /// [`Error::Unreadable`] where it can still not be read.
    pub(super) fn has_image(&self, number: u16, image: &Digest) -> Result<bool, Error> {
        let known = &self.domains[usize::from(number)];
        if known.unreadable.contains_key(image) {
            named_objects(&known.domain, image)?;
        }
        Ok(known.images.contains_key(image))
    }

    /// Images that cannot be read, and directories of them that cannot be listed.
    pub(super) fn unreadable_images(&self) -> u64 {
        let of = |it: &IndexedDomain| it.unreadable.len() + usize::from(it.is_unlisted);
        let all = self.domains.iter().map(of).sum::<usize>() + usize::from(self.is_unlisted);
        all as u64
    }

    /// An object that is in use by an image.
    pub(super) fn object(&self, id: ObjectId) -> Option<&Object> {
        self.objects.get(id.0 as usize).filter(|object| object.images > 0)
    }

    /// Notes how many pages of an object are charged to the commons, as counted in an epoch.
    pub(super) fn set_commons(&mut self, id: ObjectId, pages: u64, epoch: u32) {
        if let Some(object) = self.objects.get_mut(id.0 as usize) {
            object.commons_pages = u32::try_from(pages).unwrap_or(u32::MAX);
            object.counted = epoch;
        }
    }

    /// Notes how much of the metadata images and packs of a trust domain is resident, by image. One
    /// with a file that could not be looked at keeps its last figure if that was larger.
    pub(super) fn set_metadata_bytes(
        &mut self,
        number: usize,
        of_images: &HashMap<Digest, MetadataBytes>,
    ) {
        let IndexedDomain { images, deltas, metadata, .. } = &mut self.domains[number];
        let known = std::mem::take(metadata);
        metadata.extend(of_images.iter().map(|(digest, counted)| {
            let before = known.get(digest).filter(|_| !counted.is_whole);
            (*digest, counted.bytes.max(before.copied().unwrap_or(0)))
        }));
        let bytes = |image: &Digest| metadata.get(image).copied().unwrap_or(0);
        for (digest, image) in images {
            image.metadata_bytes = bytes(digest) + deltas.get(digest).map_or(0, bytes);
        }
    }

    /// Objects have numbers below this one.
    pub(super) fn numbers_end(&self) -> usize {
        self.objects.len()
    }

    pub(super) fn resident_bytes(&self, id: ObjectId) -> u64 {
        self.object(id).map_or(0, Object::resident_bytes)
    }

    /// Whether a use of an object may be one of the pages that are resident now.
    pub(super) fn counts_use(&self, id: ObjectId, time: u32) -> bool {
        self.object(id).is_some_and(|it| it.counts_use(time))
    }

    /// All objects that are in use by an image.
    pub(super) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.iter().filter(|object| object.images > 0)
    }

    /// All objects that are in use by an image, with their numbers.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (ObjectId, &Object)> {
        let all = (0..).map(ObjectId).zip(&self.objects);
        all.filter(|(_, object)| object.images > 0)
    }

    /// Notes how many pages of an object are resident.
    pub(super) fn set_resident(&mut self, id: ObjectId, pages: u64, now: u32) {
        if let Some(object) = self.objects.get_mut(id.0 as usize) {
            object.resident_pages = u32::try_from(pages).unwrap_or(u32::MAX);
            if pages == 0 {
                object.absent = object.absent.max(now);
            }
        }
    }

    pub(super) fn find(&self, domain: u16, digest: &Digest) -> Option<ObjectId> {
        self.find_where(domain, ShortDigest::of(digest), |object| object.digest == *digest)
    }

    pub(super) fn find_short(&self, domain: u16, short: ShortDigest) -> Option<ObjectId> {
        self.find_where(domain, short, |object| ShortDigest::of(&object.digest) == short)
    }

    fn find_where(
        &self,
        domain: u16,
        short: ShortDigest,
        is_it: impl Fn(&Object) -> bool,
    ) -> Option<ObjectId> {
        let is = |slot: &u32| {
            let object = &self.objects[*slot as usize];
            object.domain == domain && is_it(object)
        };
        self.by_digest.find(hash(domain, short), is).copied().map(ObjectId)
    }

    /// Adds domains and images that came, and drops those that went. What does not fit into the
    /// budget is left to the next call: all new images but one. Says whether no new one is left,
    /// and gives the first [`Error::Io`] of a directory that cannot be listed: of what is in there,
    /// what was known stays. An image that cannot be read is no error.
    pub(super) fn refresh(&mut self, now: u32, budget: &Budget) -> (bool, Result<(), Error>) {
        self.refreshed = now;
        let (present, mut result) = match self.store.domains() {
            Ok(present) => (Some(present), Ok(())),
            Err(error) => (None, Err(error)),
        };
        for name in present.iter().flatten() {
            let is_known = self.domains.iter().any(|it| it.domain.name() == name);
            if !is_known && self.domains.len() < usize::from(u16::MAX) {
                match self.store.domain(name) {
                    Ok(domain) => self.domains.push(IndexedDomain::new(domain)),
                    Err(error) => result = result.and(Err(error)),
                }
            }
        }
        self.is_unlisted = result.is_err();
        let (mut added, mut left) = (0, 0);
        for number in 0..self.domains.len() {
            let known = &mut self.domains[number];
            if let Some(present) = &present {
                known.is_removed = !present.iter().any(|it| it == known.domain.name());
            }
            let listed = if known.is_removed {
                (known.listing, known.missing) = (None, BTreeSet::new());
                self.keep_images(number, &[]);
                Ok(())
            } else {
                self.list(number)
            };
            let known = &mut self.domains[number];
            known.is_unlisted = listed.is_err();
            result = result.and(listed);
            let mut missing: Vec<_> = known.missing.iter().copied().collect();
            missing.sort_by_key(|image| known.unreadable.get(image).copied());
            for image in missing {
                // Listing may have taken all of the budget.
                if added > 0 && budget.is_spent() {
                    // One that cannot be read would be left over again and again.
                    left += usize::from(!self.domains[number].unreadable.contains_key(&image));
                } else {
                    added += 1;
                    self.add(number, image);
                }
            }
        }
        if left == 0 && result.is_ok() && self.unreadable_images() == 0 {
            self.complete = Some(now);
        }
        (left == 0, result)
    }

    /// Adds an image that is mounted, if it is new, and its domain. Gives the number of that. `None`
    /// for an image that cannot be read; a refresh tries it again.
    pub(super) fn add_mounted(&mut self, domain: &str, image: &Digest) -> Option<u16> {
        let known = self.domains.iter().position(|it| it.domain.name() == domain);
        let number = u16::try_from(known.unwrap_or(self.domains.len())).ok()?;
        if known.is_none() && number < u16::MAX {
            self.domains.push(IndexedDomain::new(self.store.domain(domain).ok()?));
        }
        let known = self.domains.get_mut(usize::from(number))?;
        if known.is_removed {
            // It may have come again; a mount alone does not bring it back.
            self.store.domain(domain).ok()?;
            known.is_removed = false;
        }
        if !known.images.contains_key(image) && !known.unreadable.contains_key(image) {
            self.add(usize::from(number), *image);
        }
        self.domains[usize::from(number)].images.contains_key(image).then_some(number)
    }

    /// Lists images, refs and bases of a domain, unless they are as they were. Drops images that
    /// went.
    fn list(&mut self, number: usize) -> Result<(), Error> {
        let domain = self.domains[number].domain.clone();
        let listing = domain.listing()?;
        if listing.is_some() && listing == self.domains[number].listing {
            return Ok(());
        }
        let present = domain.images()?;
        self.keep_images(number, &present);
        let known = &mut self.domains[number];
        known.listing = None;
        known.missing = present.into_iter().filter(|it| !known.images.contains_key(it)).collect();
        let refs = domain.readable_refs()?;
        known.names.clear();
        for (name, record) in refs {
            known.names.entry(record.image).or_default().push(name);
        }
        let bases = domain.bases()?;
        known.deltas = bases.into_iter().map(|(image, base)| (image, base.delta)).collect();
        known.listing = listing;
        Ok(())
    }

    /// Drops the images that are not among these, which are sorted.
    fn keep_images(&mut self, number: usize, present: &[Digest]) {
        let is_present = |image: &Digest| present.binary_search(image).is_ok();
        let images = self.domains[number].images.keys();
        let gone: Vec<_> = images.filter(|image| !is_present(image)).copied().collect();
        for image in gone {
            self.remove(number, &image);
        }
        self.domains[number].unreadable.retain(|image, _| is_present(image));
    }

    fn add(&mut self, number: usize, digest: Digest) {
        let domain = u16::try_from(number).unwrap_or(u16::MAX);
        let Ok(objects) = named_objects(&self.domains[number].domain, &digest) else {
            self.domains[number].unreadable.insert(digest, self.refreshed);
            return;
        };
        self.domains[number].unreadable.remove(&digest);
        self.domains[number].missing.remove(&digest);
        let ids = objects.into_iter().map(|(object, size)| self.intern(domain, object, size));
        let mut objects: Box<[ObjectId]> = ids.collect();
        objects.sort_unstable();
        let image = Image { objects, metadata_bytes: 0 };
        self.domains[number].images.insert(digest, image);
    }

    fn intern(&mut self, domain: u16, digest: Digest, size: u64) -> ObjectId {
        if let Some(known) = self.find(domain, &digest) {
            self.objects[known.0 as usize].images += 1;
            return known;
        }
        // What is in the lists of a slot's earlier object is not newer than this.
        let object = Object {
            digest,
            domain,
            images: 1,
            size,
            resident_pages: 0,
            commons_pages: 0,
            counted: 0,
            absent: self.refreshed,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.objects[slot as usize] = object;
                slot
            }
            None => {
                // Uses since the last complete refresh count, those in its tick as well. Until the
                // first one, an object may have users that were missed.
                let absent = self.complete.unwrap_or_default().saturating_sub(1);
                self.objects.push(Object { absent, ..object });
                // 2^32 objects would take 200 GB here.
                u32::try_from(self.objects.len() - 1).unwrap_or(u32::MAX)
            }
        };
        let objects = &self.objects;
        self.by_digest.insert_unique(hash(domain, ShortDigest::of(&digest)), slot, |slot| {
            let object = &objects[*slot as usize];
            hash(object.domain, ShortDigest::of(&object.digest))
        });
        ObjectId(slot)
    }

    fn remove(&mut self, number: usize, image: &Digest) {
        let Some(image) = self.domains[number].images.remove(image) else { return };
        for id in image.objects {
            let object = &mut self.objects[id.0 as usize];
            object.images -= 1;
            if object.images == 0 {
                let hash = hash(object.domain, ShortDigest::of(&object.digest));
                if let Ok(entry) = self.by_digest.find_entry(hash, |slot| *slot == id.0) {
                    entry.remove();
                }
                self.free.push(id.0);
                self.forgotten.insert(id);
            }
        }
    }

    /// Numbers of objects that went in refreshes since the last call. Whoever keeps numbers has to
    /// drop these without looking them up: other objects may have them by now.
    pub(super) fn take_forgotten(&mut self) -> HashSet<ObjectId> {
        std::mem::take(&mut self.forgotten)
    }
}
