//! What a start reads: files in the order in which they are first opened.

use std::collections::HashSet;

use cofolio_store::Digest;

use super::live::Ledger;
use super::usage::ObjectId;
use crate::cgroup::is_at_or_below;

/// First opens, while somebody records them.
#[derive(Debug)]
pub(super) struct FirstOpens {
    /// Path of the cgroup whose opens count, with those below it.
    cgroup: String,
    seen: HashSet<ObjectId>,
    order: Vec<ObjectId>,
}

impl FirstOpens {
    /// `cgroup` is `None` for a process that had ended: nobody knows any more where it was.
    pub(super) fn note(&mut self, object: ObjectId, cgroup: Option<&str>) {
        let is_ours = cgroup.is_none_or(|path| is_at_or_below(path, &self.cgroup));
        if is_ours && self.seen.insert(object) {
            self.order.push(object);
        }
    }
}

impl Ledger {
    /// From now on, [`Ledger::take_opens`] keeps the order in which a container of `cofolio run`
    /// opens files. Opens of processes that have ended count as the container's.
    pub fn record_opens(&mut self, container: &str) {
        let cgroup = self.cgroup_of_container(container);
        self.first_opens = Some(FirstOpens { cgroup, seen: HashSet::new(), order: Vec::new() });
    }

    /// The objects that were opened since [`Ledger::record_opens`], the first one first, with the
    /// names of their trust domains.
    pub fn recorded(&self) -> Vec<(&str, Digest)> {
        let order = self.first_opens.iter().flat_map(|opens| &opens.order);
        let objects = order.filter_map(|id| self.index.object(*id));
        let named = |object: &super::index::Object| {
            Some((self.index.domains().get(object.domain as usize)?.domain.name(), object.digest))
        };
        objects.filter_map(named).collect()
    }

    /// Events that were lost because there were too many of them.
    pub fn lost_opens(&self) -> u64 {
        self.unknown.overflows
    }
}
