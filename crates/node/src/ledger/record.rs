//! What a start reads: files in the order in which they are first opened.

use std::collections::HashSet;

use cofolio_store::Digest;

use super::index::Index;
use super::usage::ObjectId;
use crate::cgroup::is_at_or_below;

/// First opens, while somebody records them.
#[derive(Debug)]
pub(super) struct FirstOpens {
    /// Number of the trust domain whose objects count.
    domain: u16,
    /// Path of the cgroup whose opens count, with those below it.
    cgroup: String,
    seen: HashSet<ObjectId>,
    order: Vec<ObjectId>,
}

impl FirstOpens {
    pub(super) fn new(domain: u16, cgroup: String) -> Self {
        Self { domain, cgroup, seen: HashSet::new(), order: Vec::new() }
    }

    /// Drops objects that do not exist any more.
    pub(super) fn forget(&mut self, objects: &HashSet<ObjectId>) {
        self.seen.retain(|id| !objects.contains(id));
        self.order.retain(|id| !objects.contains(id));
    }

    /// `cgroup` is `None` for a process that had ended if its mount does not tell either where it
    /// was.
    pub(super) fn note(&mut self, object: ObjectId, cgroup: Option<&str>) {
        let is_ours = cgroup.is_none_or(|path| is_at_or_below(path, &self.cgroup));
        if is_ours && self.seen.insert(object) {
            self.order.push(object);
        }
    }

    /// The objects, the first one first.
    pub(super) fn objects(&self, index: &Index) -> Vec<Digest> {
        let objects = self.order.iter().filter_map(|id| index.object(*id));
        objects.filter(|it| it.domain == self.domain).map(|it| it.digest).collect()
    }
}
