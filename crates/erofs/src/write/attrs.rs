//! The extended attributes of an image, and which of them it shares.
//!
//! A metadata image has the tree's attributes, with `trusted.overlay.*` escaped so that overlayfs
//! ignores them, and the attributes by which overlayfs finds file data. An image with file data has
//! fingerprints instead of the latter. An attribute (name and value) of at least two inodes goes
//! into the shared table.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::RandomState;

use hashbrown::HashTable;
use twox_hash::XxHash32;

use super::data::Checked;
use super::plan::{Node, Plan};
use super::small;
use crate::format::{
    ESCAPED_OPAQUE, ESCAPED_WHITEOUT, ESCAPED_WHITEOUTS, FINGERPRINT, FINGERPRINT_SHA256,
    FINGERPRINT_VERITY, METACOPY_HEADER, OVERLAY_ESCAPED_PREFIX, OVERLAY_METACOPY, OVERLAY_OPAQUE,
    OVERLAY_PREFIX, OVERLAY_REDIRECT, USER_OPAQUE, USER_WHITEOUT, USER_WHITEOUTS,
    XATTR_FILTER_SEED, XATTR_LONG_PREFIX, XATTR_SHARED_MAX, split_xattr_name,
};
use crate::tree::{
    Content, DigestId, External, InodeId, Payload, SetId, Tree, hash_pair, object_path,
};

const UNSHARED: u32 = u32::MAX;

/// An inode that stands for a whiteout.
const WHITEOUT: u8 = 1;
/// A directory with whiteouts.
const WHITEOUT_DIR: u8 = 2;
const ROOT: u8 = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Attr {
    /// A pair of the table.
    Pair(u32),
    /// The digest that the kernel is to check, if it is known.
    Metacopy(Option<DigestId>),
    /// The path of an object.
    Redirect(DigestId),
    /// The digest of a content for the kernel's page cache sharing.
    Fingerprint(DigestId),
}

#[derive(Clone, Copy)]
pub(super) struct NodeAttrs {
    group: Option<u32>,
    metacopy: Option<Attr>,
    redirect: Option<Attr>,
}

/// An attribute of the tree, or one that composefs adds, with uses and offset in the shared table.
struct Pair<'t> {
    name: Cow<'t, [u8]>,
    value: Cow<'t, [u8]>,
    uses: u32,
    shared: u32,
    size: u32,
    filter_bit: u8,
}

/// Pairs, sorted by name, that many inodes have in common.
#[derive(Clone, Copy)]
struct Group {
    start: u32,
    len: u32,
    /// How many of the names precede that of the metacopy, and that of the redirect attribute.
    before_metacopy: u32,
    before_redirect: u32,
    uses: u32,
}

pub(super) struct Attrs<'t> {
    tree: &'t Tree,
    data: Option<&'t Checked<'t>>,
    version: u32,
    pairs: Vec<Pair<'t>>,
    pair_index: HashTable<u32>,
    seed: RandomState,
    groups: Vec<Group>,
    items: Vec<u32>,
    /// Groups of the tree's sets with nothing added, by set.
    plain: Vec<Option<u32>>,
    marked: HashMap<(SetId, u8), u32>,
    ghost: Option<u32>,
    no_digest_uses: u32,
    no_digest_shared: u32,
    metacopies: PerDigest,
    redirects: PerDigest,
    fingerprints: PerDigest,
    /// Everything in the shared table, in its order.
    shared: Vec<Attr>,
    shared_size: u64,
    metacopy_bit: u8,
    redirect_bit: u8,
    fingerprint_bit: u8,
    pub(super) has_acl: bool,
}

/// Uses (up to 2) and offsets of attributes that are made from a digest.
struct PerDigest {
    uses: Vec<u8>,
    shared: Vec<u32>,
}

impl PerDigest {
    fn new(len: usize) -> PerDigest {
        PerDigest { uses: vec![0; len], shared: Vec::new() }
    }

    fn count(&mut self, id: DigestId) {
        self.uses[id.index()] = self.uses[id.index()].saturating_add(1);
    }

    fn often(&self) -> impl Iterator<Item = DigestId> + '_ {
        let often = self.uses.iter().enumerate().filter(|&(_, &uses)| uses > 1);
        often.filter_map(|(i, _)| u32::try_from(i).ok()).map(DigestId)
    }

    fn set_shared(&mut self, id: DigestId, offset: u32) {
        // Most images have none: then there is no table.
        if self.shared.is_empty() {
            self.shared = vec![UNSHARED; self.uses.len()];
        }
        self.shared[id.index()] = offset;
    }

    fn shared(&self, id: DigestId) -> u32 {
        self.shared.get(id.index()).copied().unwrap_or(UNSHARED)
    }
}

impl<'t> Attrs<'t> {
    pub(super) fn new(plan: &Plan<'t>, version: u32) -> Attrs<'t> {
        let tree = plan.tree;
        let digests = tree.digest_count();
        let mut attrs = Attrs {
            tree,
            data: plan.data,
            version,
            pairs: Vec::new(),
            pair_index: HashTable::new(),
            seed: RandomState::new(),
            groups: Vec::new(),
            items: Vec::new(),
            plain: vec![None; tree.xattr_table().set_count()],
            marked: HashMap::new(),
            ghost: None,
            no_digest_uses: 0,
            no_digest_shared: UNSHARED,
            metacopies: PerDigest::new(if plan.data.is_none() { digests } else { 0 }),
            redirects: PerDigest::new(if plan.data.is_none() { digests } else { 0 }),
            fingerprints: PerDigest::new(if plan.data.is_some() { digests } else { 0 }),
            shared: Vec::new(),
            shared_size: 0,
            metacopy_bit: filter_bit(OVERLAY_METACOPY),
            redirect_bit: filter_bit(OVERLAY_REDIRECT),
            fingerprint_bit: filter_bit(FINGERPRINT),
            has_acl: false,
        };
        let label = tree.xattr(tree.root(), b"security.selinux").filter(|_| plan.is_metadata);
        attrs.ghost = label.map(|l| attrs.add_group(vec![(Cow::Borrowed(b"security.selinux"), l)]));
        for at in plan.nodes() {
            attrs.count(plan, at.node);
        }
        attrs.has_acl = attrs
            .pairs
            .iter()
            .any(|p| matches!(&*p.name, b"system.posix_acl_access" | b"system.posix_acl_default"));
        attrs.share();
        attrs
    }

    pub(super) fn of(&self, plan: &Plan<'_>, node: Node) -> NodeAttrs {
        let Node::Inode(inode) = node else {
            return NodeAttrs { group: self.ghost, metacopy: None, redirect: None };
        };
        let set = self.tree.xattr_set(inode);
        let group = match marks(plan, inode) {
            0 => self.plain.get(set.0 as usize).copied().flatten(),
            marks => self.marked.get(&(set, marks)).copied(),
        };
        let Some(external) = self.tree.external(inode) else {
            return NodeAttrs { group, metacopy: None, redirect: None };
        };
        if let Some(data) = self.data {
            // Instead of a metacopy: the kernel looks for a fingerprint in every file.
            let content = external.object.or(external.digest);
            let content = content.filter(|_| data.data.fingerprints);
            return NodeAttrs { group, metacopy: content.map(Attr::Fingerprint), redirect: None };
        }
        let redirect = match external.object {
            Some(id) => Some(Attr::Redirect(id)),
            None => self
                .path_of(inode)
                .and_then(|value| self.find_pair(OVERLAY_REDIRECT, &value).map(Attr::Pair)),
        };
        NodeAttrs { group, metacopy: Some(Attr::Metacopy(external.digest)), redirect }
    }

    /// Calls `f` with the attributes of an inode sorted by name, each with its offset in the
    /// shared table if it is to be taken from there.
    pub(super) fn each(&self, attrs: NodeAttrs, mut f: impl FnMut(Attr, Option<u32>)) {
        let mut shared = 0;
        let mut give = |attr: Attr| {
            let offset = self.shared_offset(attr).filter(|_| shared < XATTR_SHARED_MAX);
            shared += usize::from(offset.is_some());
            f(attr, offset);
        };
        let (items, group) = match attrs.group.map(|b| self.groups[b as usize]) {
            Some(group) => (&self.items[group.start as usize..][..group.len as usize], group),
            None => (&[][..], Group::EMPTY),
        };
        let (first, rest) = items.split_at(group.before_metacopy as usize);
        let (middle, last) =
            rest.split_at((group.before_redirect - group.before_metacopy) as usize);
        first.iter().for_each(|&p| give(Attr::Pair(p)));
        attrs.metacopy.into_iter().for_each(&mut give);
        middle.iter().for_each(|&p| give(Attr::Pair(p)));
        attrs.redirect.into_iter().for_each(&mut give);
        last.iter().for_each(|&p| give(Attr::Pair(p)));
    }

    pub(super) fn shared(&self) -> &[Attr] {
        &self.shared
    }

    pub(super) fn shared_size(&self) -> u64 {
        self.shared_size
    }

    pub(super) fn with<R>(&self, attr: Attr, f: impl FnOnce(&[u8], &[u8]) -> R) -> R {
        match attr {
            Attr::Pair(id) => {
                let pair = &self.pairs[id as usize];
                f(&pair.name, &pair.value)
            }
            Attr::Metacopy(None) => f(OVERLAY_METACOPY, b""),
            Attr::Metacopy(Some(id)) => {
                let mut value = [0; 36];
                value[..4].copy_from_slice(&METACOPY_HEADER);
                value[4..].copy_from_slice(self.tree.digest(id));
                f(OVERLAY_METACOPY, &value)
            }
            Attr::Redirect(id) => {
                let mut value = [b'/'; 66];
                value[1..].copy_from_slice(&object_path(self.tree.digest(id)));
                f(OVERLAY_REDIRECT, &value)
            }
            Attr::Fingerprint(id) => {
                let digest = self.tree.digest(id);
                let found = self.data.and_then(|data| data.data.blobs.get(digest));
                match found.and_then(|found| found.sha256) {
                    Some(sha256) => f(FINGERPRINT, &[&FINGERPRINT_SHA256[..], &sha256].concat()),
                    None => f(FINGERPRINT, &[&FINGERPRINT_VERITY[..], digest].concat()),
                }
            }
        }
    }

    /// What is stored for the name of an attribute: a number, and what follows.
    pub(super) fn split_name<'n>(&self, attr: Attr, name: &'n [u8]) -> (u8, &'n [u8]) {
        match attr {
            // The image's only long prefix, number 0, is the complete name.
            Attr::Fingerprint(_) => (XATTR_LONG_PREFIX, b""),
            _ => split_xattr_name(name),
        }
    }

    pub(super) fn entry_size(&self, attr: Attr) -> u32 {
        match attr {
            Attr::Pair(id) => self.pairs[id as usize].size,
            Attr::Metacopy(None) => 20,
            Attr::Metacopy(Some(_)) => 56,
            Attr::Redirect(_) => 88,
            Attr::Fingerprint(_) => 44,
        }
    }

    /// The bit of the name filter that an attribute clears.
    pub(super) fn filter_bit(&self, attr: Attr) -> u8 {
        match attr {
            Attr::Pair(id) => self.pairs[id as usize].filter_bit,
            Attr::Metacopy(_) => self.metacopy_bit,
            Attr::Redirect(_) => self.redirect_bit,
            Attr::Fingerprint(_) => self.fingerprint_bit,
        }
    }

    fn path_of(&self, inode: InodeId) -> Option<Vec<u8>> {
        match self.tree.content(inode) {
            Content::External { payload: Payload::Path(path), .. } => Some([b"/", path].concat()),
            _ => None,
        }
    }

    fn count(&mut self, plan: &Plan<'_>, node: Node) {
        let group = match node {
            Node::Ghost(_) => self.ghost,
            Node::Inode(inode) => {
                let set = self.tree.xattr_set(inode);
                let marks = marks(plan, inode);
                if let Some(external) = self.tree.external(inode) {
                    self.count_external(inode, external);
                }
                self.group(set, marks)
            }
        };
        if let Some(group) = group {
            self.groups[group as usize].uses += 1;
        }
    }

    fn count_external(&mut self, inode: InodeId, external: External) {
        if let Some(data) = self.data {
            if let Some(id) = external.object.or(external.digest).filter(|_| data.data.fingerprints)
            {
                self.fingerprints.count(id);
            }
            return;
        }
        match external.digest {
            Some(id) => self.metacopies.count(id),
            None => self.no_digest_uses = self.no_digest_uses.saturating_add(1),
        }
        if let Some(id) = external.object {
            self.redirects.count(id);
        } else if let Some(value) = self.path_of(inode) {
            let pair = self.pair(Cow::Borrowed(OVERLAY_REDIRECT), Cow::Owned(value));
            self.pairs[pair as usize].uses += 1;
        }
    }

    /// The group of a set of attributes with marks; makes a new one if there is none.
    fn group(&mut self, set: SetId, marks: u8) -> Option<u32> {
        if set == SetId::EMPTY && marks == 0 {
            return None;
        }
        let known = match marks {
            0 => self.plain[set.0 as usize],
            _ => self.marked.get(&(set, marks)).copied(),
        };
        if known.is_some() {
            return known;
        }
        let mut list: Vec<(Cow<'t, [u8]>, &'t [u8])> = Vec::new();
        for (name, value) in self.tree.xattr_table().set(set) {
            // The kernel would trust a fingerprint that the tree brings.
            if self.data.is_none() || name != FINGERPRINT {
                list.push((escape(name), value));
            }
        }
        let mut mark = |name: &'static [u8], value: &'static [u8]| {
            list.retain(|(n, _)| **n != *name);
            list.push((Cow::Borrowed(name), value));
        };
        if marks & WHITEOUT != 0 {
            mark(ESCAPED_WHITEOUT, b"");
            mark(USER_WHITEOUT, b"");
        }
        if marks & WHITEOUT_DIR != 0 {
            mark(ESCAPED_WHITEOUTS, b"");
            mark(USER_WHITEOUTS, b"");
            if self.version >= 1 {
                mark(ESCAPED_OPAQUE, b"x");
                mark(USER_OPAQUE, b"x");
            }
        }
        if marks & ROOT != 0 {
            mark(OVERLAY_OPAQUE, b"y");
        }
        list.sort_by(|a, b| a.0.cmp(&b.0));
        let group = self.add_group(list);
        if marks == 0 {
            self.plain[set.0 as usize] = Some(group);
        } else {
            self.marked.insert((set, marks), group);
        }
        Some(group)
    }

    /// Adds a sorted list as a group.
    fn add_group(&mut self, list: Vec<(Cow<'t, [u8]>, &'t [u8])>) -> u32 {
        let before = |limit: &[u8]| small(list.partition_point(|(name, _)| **name < *limit));
        let (before_metacopy, before_redirect) =
            (before(OVERLAY_METACOPY), before(OVERLAY_REDIRECT));
        let start = small(self.items.len());
        let len = small(list.len());
        for (name, value) in list {
            let pair = self.pair(name, Cow::Borrowed(value));
            self.items.push(pair);
        }
        self.groups.push(Group { start, len, before_metacopy, before_redirect, uses: 0 });
        small(self.groups.len() - 1)
    }

    fn find_pair(&self, name: &[u8], value: &[u8]) -> Option<u32> {
        let hash = hash_pair(&self.seed, name, value);
        let same = |&p: &u32| {
            let pair = &self.pairs[p as usize];
            *pair.name == *name && *pair.value == *value
        };
        self.pair_index.find(hash, same).copied()
    }

    fn pair(&mut self, name: Cow<'t, [u8]>, value: Cow<'t, [u8]>) -> u32 {
        if let Some(known) = self.find_pair(&name, &value) {
            return known;
        }
        let hash = hash_pair(&self.seed, &name, &value);
        let new = small(self.pairs.len());
        let (size, filter_bit) = (entry_size(&name, &value), filter_bit(&name));
        self.pairs.push(Pair { name, value, uses: 0, shared: UNSHARED, size, filter_bit });
        let (pairs, seed) = (&self.pairs, &self.seed);
        self.pair_index.insert_unique(hash, new, |&p| {
            let pair = &pairs[p as usize];
            hash_pair(seed, &pair.name, &pair.value)
        });
        new
    }

    fn shared_offset(&self, attr: Attr) -> Option<u32> {
        let offset = match attr {
            Attr::Pair(id) => self.pairs[id as usize].shared,
            Attr::Metacopy(None) => self.no_digest_shared,
            Attr::Metacopy(Some(id)) => self.metacopies.shared(id),
            Attr::Redirect(id) => self.redirects.shared(id),
            Attr::Fingerprint(id) => self.fingerprints.shared(id),
        };
        (offset != UNSHARED).then_some(offset)
    }

    /// Chooses the shared attributes and their offsets: names last to first, of one name the longest
    /// value first, of one length the last value first.
    fn share(&mut self) {
        for group in &self.groups {
            for &pair in &self.items[group.start as usize..][..group.len as usize] {
                let uses = &mut self.pairs[pair as usize].uses;
                *uses = uses.saturating_add(group.uses);
            }
        }
        let often = |(i, pair): (usize, &Pair<'_>)| (pair.uses > 1).then(|| Attr::Pair(small(i)));
        let mut shared: Vec<Attr> = self.pairs.iter().enumerate().filter_map(often).collect();
        shared.extend((self.no_digest_uses > 1).then_some(Attr::Metacopy(None)));
        shared.extend(self.metacopies.often().map(|id| Attr::Metacopy(Some(id))));
        shared.extend(self.redirects.often().map(Attr::Redirect));
        shared.extend(self.fingerprints.often().map(Attr::Fingerprint));
        shared.sort_by(|&a, &b| {
            self.with(a, |name_a, value_a| {
                self.with(b, |name_b, value_b| {
                    (name_b, value_b.len(), value_b).cmp(&(name_a, value_a.len(), value_a))
                })
            })
        });
        let mut end = 0;
        for &attr in &shared {
            // Offsets count words of four bytes on disk: up to 16 GiB; the writer refuses more.
            let offset = u32::try_from(end / 4).unwrap_or(UNSHARED - 1);
            match attr {
                Attr::Pair(id) => self.pairs[id as usize].shared = offset,
                Attr::Metacopy(None) => self.no_digest_shared = offset,
                Attr::Metacopy(Some(id)) => self.metacopies.set_shared(id, offset),
                Attr::Redirect(id) => self.redirects.set_shared(id, offset),
                Attr::Fingerprint(id) => self.fingerprints.set_shared(id, offset),
            }
            end += u64::from(self.entry_size(attr));
        }
        self.shared = shared;
        self.shared_size = end;
    }
}

impl Group {
    const EMPTY: Group =
        Group { start: 0, len: 0, before_metacopy: 0, before_redirect: 0, uses: 0 };
}

fn marks(plan: &Plan<'_>, inode: InodeId) -> u8 {
    let tree = plan.tree;
    let mut marks = 0;
    if tree.is_dir(inode) {
        if plan.holds_whiteouts(inode) {
            marks |= WHITEOUT_DIR;
        }
        if inode == tree.root() && plan.is_metadata {
            marks |= ROOT;
        }
    } else if plan.has_whiteouts && tree.content(inode).is_whiteout() {
        marks |= WHITEOUT;
    }
    marks
}

/// Hides an attribute of overlayfs from the overlayfs that mounts the image.
fn escape(name: &[u8]) -> Cow<'_, [u8]> {
    match name.strip_prefix(OVERLAY_PREFIX) {
        Some(rest) => Cow::Owned([OVERLAY_ESCAPED_PREFIX, rest].concat()),
        None => Cow::Borrowed(name),
    }
}

fn entry_size(name: &[u8], value: &[u8]) -> u32 {
    let size = 4 + split_xattr_name(name).1.len() + value.len();
    // A name has up to 263 bytes, a value up to 65,535.
    u32::try_from(size.next_multiple_of(4)).unwrap_or(u32::MAX)
}

fn filter_bit(name: &[u8]) -> u8 {
    let (index, rest) = split_xattr_name(name);
    let hash = XxHash32::oneshot(XATTR_FILTER_SEED.wrapping_add(u32::from(index)), rest);
    u8::try_from(hash % 32).unwrap_or(0)
}
