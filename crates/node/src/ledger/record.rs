//! What a start reads: files in the order in which they are first opened.

use std::collections::HashSet;

use cofolio_store::Digest;

use super::live::Ledger;
use super::usage::ObjectId;
use super::{LedgerError, Result};
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
}

impl Ledger {
    /// From now on, [`Ledger::take_opens`] keeps the order in which a container of `cofolio run`
    /// opens files of a trust domain. Opens of which nobody knows whose they were count as the
    /// container's.
    ///
    /// # Errors
    /// [`LedgerError::Store`] if the trust domain cannot be listed; [`LedgerError::NotFound`].
    pub fn record_opens(&mut self, domain: &str, container: &str) -> Result<()> {
        let missing = || LedgerError::NotFound { what: format!("trust domain {domain}") };
        let domain = self.index.find_domain(domain)?.ok_or_else(missing)?;
        let cgroup = self.cgroup_of_container(container);
        let (seen, order) = (HashSet::new(), Vec::new());
        self.learn_roots();
        self.first_opens = Some(FirstOpens { domain, cgroup, seen, order });
        Ok(())
    }

    /// The objects that were opened since [`Ledger::record_opens`], the first one first.
    pub fn recorded(&self) -> Vec<Digest> {
        let Some(FirstOpens { domain, order, .. }) = &self.first_opens else { return Vec::new() };
        let objects = order.iter().filter_map(|id| self.index.object(*id));
        objects.filter(|it| it.domain == *domain).map(|it| it.digest).collect()
    }

    /// Events that were lost because there were too many of them.
    pub fn lost_opens(&self) -> u64 {
        self.opened.count.overflows
    }
}
