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
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use cofolio_image::pack::ImageContents;
use cofolio_store::{
    BoxError, Contents as _, Digest, Domain, Error, FileKind, FileName, Listing, Store, with_causes,
};
use cofolio_sys::cache::{self, FileMap};
use hashbrown::HashTable;
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::Budget;
use super::charges::Charges;
use super::unseen::Unseen;
use super::usage::ObjectId;
use crate::cache::leave_cache;
use crate::mount::open_dir;

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
    /// The [epoch](Charges::epoch) of that figure.
    counted: u32,
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
    is_removed: bool,
    /// Whether the last refresh could not list its images or refs.
    is_unlisted: bool,
    pub(super) images: BTreeMap<Digest, Image>,
    /// Images that are not in `images` yet.
    missing: BTreeSet<Digest>,
    /// Of these, the ones that could not be read, and when it was tried last. Each refresh tries
    /// them again after the new ones, as far as its budget goes.
    pub(super) unreadable: BTreeMap<Digest, u32>,
    /// Its directories when `missing`, `names` and `deltas` were read; `None` if they are to be read
    /// again.
    listing: Option<Listing>,
    /// Names of images, sorted.
    names: HashMap<Digest, Vec<String>>,
    /// Deltas of the images that have a base.
    deltas: HashMap<Digest, Digest>,
    /// Resident bytes of all metadata images and packs, also of bases, which are not in `images`
    /// unless they have a name.
    pub(super) metadata_bytes: u64,
    counting: Option<MetadataCount>,
}

/// All trust domains of a store.
#[derive(Debug)]
pub(super) struct Index {
    store: Store,
    domains: Vec<IndexedDomain>,
    /// Whether the last refresh could not list the domains, or open a new one.
    is_unlisted: bool,
    objects: Vec<Object>,
    /// Slots of `objects`, by domain and digest.
    by_digest: HashTable<u32>,
    free: Vec<u32>,
    /// Numbers of objects that went since the last [`Index::take_forgotten`]. New ones may have them.
    forgotten: HashSet<ObjectId>,
    /// The object and then the domain at which the next [`Index::sample`] goes on.
    next: usize,
    next_domain: usize,
    /// Objects that could not be looked at in the last round, and trust domains whose metadata could
    /// not be. Their figures are those of the last look.
    unseen: Unseen,
    /// The same of this round so far.
    unseen_so_far: Unseen,
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
            metadata_bytes: 0,
            counting: None,
        }
    }

    /// The names of an image, sorted.
    pub(super) fn names(&self, image: &Digest) -> &[String] {
        self.names.get(image).map_or(&[], Vec::as_slice)
    }

    /// The objects that an image names, with their sizes.
    fn named_by(&self, image: &Digest) -> Result<Vec<(Digest, u64)>, BoxError> {
        let file = self.domain.open_image(image)?;
        let mut objects = Vec::new();
        leave_cache(&file, || {
            ImageContents.names(FileKind::Image, &file, &mut |object, size| {
                objects.push((object, size));
            })
        })?;
        Ok(objects)
    }

    /// Counts the resident pages of the files that images are mounted from, beginning where the last
    /// call ended, until all were counted or the budget is spent. Says whether all were. What was
    /// known stays if one of them cannot be looked at.
    fn count_metadata(&mut self, budget: &Budget) -> Result<bool, BoxError> {
        let counting = self.counting.take();
        if self.is_removed {
            self.metadata_bytes = 0;
            return Ok(true);
        }
        let mut counting = match counting {
            Some(counting) => counting,
            None => MetadataCount::begin(&self.domain)?,
        };
        while let Some(name) = counting.left.pop() {
            if let Some(image) = name.image() {
                *counting.bytes.entry(image).or_default() += resident_bytes(&self.domain, &name)?;
            }
            if budget.is_spent() && !counting.left.is_empty() {
                self.counting = Some(counting);
                return Ok(false);
            }
        }
        let bytes = |image: &Digest| counting.bytes.get(image).copied().unwrap_or(0);
        for (digest, image) in &mut self.images {
            let delta = self.deltas.get(digest).map_or(0, bytes);
            image.metadata_bytes = bytes(digest) + delta;
        }
        self.metadata_bytes = counting.bytes.values().sum();
        Ok(true)
    }
}

/// A count of metadata that goes on.
#[derive(Debug)]
struct MetadataCount {
    /// Files that are still to be counted.
    left: Vec<FileName>,
    /// Resident bytes of the others, by image.
    bytes: HashMap<Digest, u64>,
}

impl MetadataCount {
    fn begin(domain: &Domain) -> Result<Self, Error> {
        let mut left = domain.named(FileKind::Image)?;
        left.extend(domain.named(FileKind::Pack)?);
        Ok(Self { left, bytes: HashMap::new() })
    }
}

/// Resident bytes of a file of a domain; 0 if it does not exist any more.
fn resident_bytes(domain: &Domain, name: &FileName) -> Result<u64, BoxError> {
    let file = match domain.open_named(name) {
        Err(Error::NoSuch(_)) => return Ok(0),
        opened => opened?,
    };
    let Some(descriptor) = file.descriptor() else { return Ok(0) };
    Ok(cache::resident_pages(descriptor, file.size()?)? * cache::page_size())
}

/// The first bytes of an object's digest. They tell the objects of an index apart: to find another
/// content with those of a given object takes 2^64 attempts.
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
            objects: Vec::new(),
            by_digest: HashTable::new(),
            free: Vec::new(),
            forgotten: HashSet::new(),
            next: 0,
            next_domain: 0,
            unseen: Unseen::default(),
            unseen_so_far: Unseen::default(),
        }
    }

    pub(super) fn domains(&self) -> &[IndexedDomain] {
        &self.domains
    }

    /// Images that were taken up, or that cannot be read.
    pub(super) fn known_images(&self) -> usize {
        self.domains.iter().map(|it| it.images.len() + it.unreadable.len()).sum()
    }

    pub(super) fn domain_number(&self, name: &str) -> Option<u16> {
        let found = self.domains.iter().position(|it| it.domain.name() == name)?;
        u16::try_from(found).ok()
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

    /// Whether an image that somebody asks for was taken up.
    ///
    /// # Errors
    /// [`Error::Unreadable`] where it can still not be read.
    pub(super) fn has_image(&self, number: u16, image: &Digest) -> Result<bool, Error> {
        let known = &self.domains[usize::from(number)];
        if known.unreadable.contains_key(image) {
            known.named_by(image).map_err(|source| {
                let what = format!("image {image} of trust domain {}", known.domain.name());
                Error::Unreadable { what, source }
            })?;
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

    /// Takes up domains and images that came, and drops those that went. What does not fit into the
    /// budget is left to the next call: all new images but one. Says whether no new one is left,
    /// and gives the first [`Error::Io`] of a directory that cannot be listed: of what is in there,
    /// what was known stays. An image that cannot be read is no error. `now` is the time of
    /// [`Object::absent`].
    pub(super) fn refresh(&mut self, now: u32, budget: &Budget) -> (bool, Result<(), Error>) {
        let (present, mut result) = match self.store.domains() {
            Ok(present) => (Some(present), Ok(())),
            Err(error) => (None, Err(error)),
        };
        for name in present.iter().flatten() {
            if self.domain_number(name).is_none() && self.domains.len() < usize::from(u16::MAX) {
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
                    self.add(number, image, now);
                }
            }
        }
        (left == 0, result)
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

    fn add(&mut self, number: usize, digest: Digest, now: u32) {
        let domain = u16::try_from(number).unwrap_or(u16::MAX);
        let Ok(mut objects) = self.domains[number].named_by(&digest) else {
            self.domains[number].unreadable.insert(digest, now);
            return;
        };
        self.domains[number].unreadable.remove(&digest);
        self.domains[number].missing.remove(&digest);
        objects.sort_unstable();
        objects.dedup_by_key(|(object, _)| *object);
        let ids = objects.into_iter().map(|(object, size)| self.intern(domain, object, size, now));
        let mut objects: Box<[ObjectId]> = ids.collect();
        objects.sort_unstable();
        let image = Image { objects, metadata_bytes: 0 };
        self.domains[number].images.insert(digest, image);
    }

    fn intern(&mut self, domain: u16, digest: Digest, size: u64, now: u32) -> ObjectId {
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
            absent: now,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.objects[slot as usize] = object;
                slot
            }
            None => {
                self.objects.push(Object { absent: 0, ..object });
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

    /// Numbers of objects that went in refreshes since the last call. Whoever keeps numbers has to drop
    /// these without looking them up: other objects may have them by now.
    pub(super) fn take_forgotten(&mut self) -> HashSet<ObjectId> {
        std::mem::take(&mut self.forgotten)
    }

    /// Objects that could not be looked at in the last round, and trust domains whose metadata
    /// could not be.
    pub(super) fn unseen(&self) -> &Unseen {
        &self.unseen
    }

    /// The next [`Index::sample`] begins a round, whatever is left of this one.
    pub(super) fn start_over(&mut self) {
        (self.next, self.next_domain, self.unseen_so_far) = (0, 0, Unseen::default());
        self.domains.iter_mut().for_each(|it| it.counting = None);
    }

    /// Whether the next [`Index::sample`] begins a round.
    pub(super) fn is_at_start(&self) -> bool {
        (self.next, self.next_domain) == (0, 0)
    }

    /// Looks how much of each object and of metadata is resident, beginning where the last call
    /// ended, until all was looked at once or the budget is spent: at one file at least. Says
    /// whether it came to the end of a round. `page_files` are the files that hold the pages of
    /// objects in place of the store's.
    pub(super) fn sample(
        &mut self,
        now: u32,
        charges: &Charges,
        page_files: &HashMap<ObjectId, PathBuf>,
        budget: &Budget,
    ) -> bool {
        // One at a time: there can be more trust domains than descriptors.
        let mut directory = None;
        let first = self.next;
        while self.next < self.objects.len() {
            if self.next > first && budget.is_spent() {
                return false;
            }
            let id = ObjectId(u32::try_from(self.next).unwrap_or(u32::MAX));
            self.next += 1;
            let Some(number) = self.object(id).map(|it| it.domain) else { continue };
            if directory.as_ref().is_none_or(|(of, _)| *of != number) {
                directory = Some((number, self.open_objects(number)));
            }
            if let Some((_, directory)) = &directory {
                self.look_at(id, directory, page_files.get(&id), charges, now);
            }
        }
        if !self.count_metadata(budget) {
            return false;
        }
        (self.next, self.next_domain) = (0, 0);
        self.unseen = std::mem::take(&mut self.unseen_so_far);
        true
    }

    /// The directory of a trust domain's objects.
    fn open_objects(&self, domain: u16) -> rustix::io::Result<OwnedFd> {
        let path = self.domains.get(domain as usize).and_then(|it| it.domain.objects_dir());
        // A simulated disk has none.
        path.map_or(Err(Errno::NOTSUP), |path| open_dir(&path))
    }

    /// Looks how much of an object is resident. `directory` is that of its domain's objects,
    /// `page_file` the file that holds its pages in place of the store's.
    fn look_at(
        &mut self,
        id: ObjectId,
        directory: &rustix::io::Result<OwnedFd>,
        page_file: Option<&PathBuf>,
        charges: &Charges,
        now: u32,
    ) {
        let object = &self.objects[id.0 as usize];
        let file = match (page_file, directory) {
            (Some(path), _) => File::open(path),
            (None, Err(error)) => Err((*error).into()),
            (None, Ok(directory)) => {
                // Relative to the directory: that takes half the time.
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let opened = openat(directory, object.digest.object_path(), flags, Mode::empty());
                opened.map(File::from).map_err(Into::into)
            }
        };
        let size = object.size;
        let looked = file.and_then(|file| {
            let pages = match page_file {
                Some(_) => FileMap::new(&file, size)?.resident_pages()?,
                None => cache::resident_pages(&file, size)?,
            };
            Ok((Some(file), pages))
        });
        let (file, pages) = match looked {
            Ok(found) => found,
            Err(error) => {
                let domain = &self.domains[object.domain as usize].domain;
                self.unseen_so_far.add(|| match (directory, domain.objects_dir()) {
                    (Err(_), Some(path)) => format!("{}: {error}", path.display()),
                    _ => format!("object {}: {error}", object.digest),
                });
                // A missing object has no pages. A missing directory says nothing of what was in
                // it, and of a mount that went another one may show the same pages.
                let is_missing = error.kind() == io::ErrorKind::NotFound;
                if !is_missing || directory.is_err() || page_file.is_some() {
                    return;
                }
                (None, 0)
            }
        };
        let is_counted = pages == u64::from(object.resident_pages)
            && charges.still_hold(object.commons_pages, object.counted);
        self.set_resident(id, pages, now);
        if let (false, Some(file)) = (is_counted, file)
            && let Ok(pages) = charges.commons_pages(file, size)
        {
            let object = &mut self.objects[id.0 as usize];
            object.commons_pages = u32::try_from(pages).unwrap_or(u32::MAX);
            object.counted = charges.epoch;
        }
    }

    /// Counts metadata from where the last call ended. Says whether that is complete.
    fn count_metadata(&mut self, budget: &Budget) -> bool {
        while let Some(known) = self.domains.get_mut(self.next_domain) {
            match known.count_metadata(budget) {
                Ok(false) => return false,
                Ok(true) => {}
                Err(error) => {
                    let name = known.domain.name();
                    let why = || format!("images of trust domain {name}: {}", with_causes(&*error));
                    self.unseen_so_far.add(why);
                }
            }
            self.next_domain += 1;
        }
        true
    }
}
