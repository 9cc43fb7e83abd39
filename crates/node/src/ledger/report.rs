//! Adding up a [`Report`] of what the ledger knows.

use std::collections::HashMap;
use std::path::Path;

use cofolio_store::Digest;

use super::account::{self, Resident, Sums, Use, whole};
use super::charges::CommonsAccount;
use super::events::Events;
use super::process_looks::ProcessLooks;
use super::residency_looks::ResidencyLooks;
use super::state::State;
use super::usage::{CgroupId, ObjectId, SuperblockId};
use super::{
    ContainerAccount, DomainAccount, ImageAccount, LedgerError, Machine, Report, Result, Unknown,
    UsedImage,
};
use crate::kernel_text;

/// The parts that a report is made from.
pub(super) struct Reported<'l> {
    pub(super) state: &'l State,
    pub(super) events: &'l Events,
    pub(super) processes: &'l ProcessLooks,
    pub(super) residency: &'l ResidencyLooks,
}

impl Reported<'_> {
    /// See [`Ledger::report`](super::Ledger::report).
    pub(super) fn report(&self) -> Result<Report> {
        let images = self.numbered_images();
        let numbers: HashMap<(u16, Digest), u32> = images.iter().copied().zip(0..).collect();
        let uses = self.uses(|id| {
            let superblock = self.state.superblocks.get(id)?;
            numbers.get(&(superblock.domain, superblock.image)).copied()
        });
        let totals = account::add_up(uses, |object| {
            let object = self.state.index.object(ObjectId(object));
            object.map_or_else(Resident::default, |object| Resident {
                bytes: object.resident_bytes(),
                commons: object.commons_bytes(),
                domain: object.domain,
            })
        });
        let mut used_images: HashMap<u32, Vec<UsedImage>> = HashMap::new();
        let mut users: HashMap<u32, u64> = HashMap::new();
        for (cgroup, image) in &totals.pairs {
            let (domain, digest) = images[*image as usize];
            let used = UsedImage { domain: self.domain_name(domain), image: digest };
            used_images.entry(*cgroup).or_default().push(used);
            *users.entry(*image).or_default() += 1;
        }
        let now = self.state.now();
        Ok(Report {
            time: cofolio_store::now(),
            residency_age_seconds: self.residency.rounds().age_seconds(now),
            processes_age_seconds: self.processes.rounds().age_seconds(now),
            machine: Machine::read(&self.state.root)?,
            commons: CommonsAccount::read(
                self.state.hierarchy.as_ref().ok(),
                self.residency.commons(),
            ),
            domains: self.domain_accounts(&totals),
            images: self.image_accounts(&images, &totals, &users),
            containers: self.container_accounts(&totals, used_images),
            unknown: Unknown {
                processes: self.processes.rounds().unseen().count,
                images: self.state.index.unreadable_images(),
                objects: self.residency.rounds().unseen().count,
                mounts: (self.state.superblocks.failed() + self.events.unmarked()) as u64,
                ..self.state.unknown.count
            },
            warnings: self.warnings(),
        })
    }

    fn warnings(&self) -> Vec<String> {
        let unseen = [self.residency.rounds().unseen(), self.processes.rounds().unseen()];
        let unseen = unseen.into_iter().flat_map(|unseen| unseen.why.clone());
        unseen.chain(self.events.warnings()).collect()
    }

    /// All images, by trust domain and digest.
    fn numbered_images(&self) -> Vec<(u16, Digest)> {
        let domains = (0..).zip(self.state.index.domains());
        domains
            .flat_map(|(number, it)| it.images.keys().map(move |image| (number, *image)))
            .collect()
    }

    /// Uses as [`State::for_each_use`] has them.
    fn uses(&self, image: impl Fn(SuperblockId) -> Option<u32>) -> Vec<Use> {
        // One that grows would take up to twice as much.
        let mut uses = Vec::with_capacity(self.state.uses.count().entries);
        self.state.for_each_use(|usage| {
            if let Some(image) = image(usage.mount) {
                uses.push(Use { object: usage.object.0, cgroup: usage.cgroup.0, image });
            }
        });
        uses
    }

    /// A figure of the commons, if the kernel says it.
    fn commons_bytes(&self, bytes: u64) -> Option<u64> {
        self.residency.charges().are_known().then_some(bytes)
    }

    fn domain_name(&self, number: u16) -> String {
        let domain = self.state.index.domains().get(number as usize);
        domain.map_or_else(String::new, |it| it.domain.name().to_owned())
    }

    fn domain_accounts(&self, totals: &account::Totals) -> Vec<DomainAccount> {
        let mut accounts: Vec<DomainAccount> = (0..)
            .zip(self.state.index.domains())
            .map(|(number, domain)| {
                let sums = totals.domains.get(&number).copied().unwrap_or_default();
                DomainAccount {
                    domain: domain.domain.name().to_owned(),
                    used_bytes: sums.used,
                    shared_bytes: sums.shared,
                    saved_bytes: whole(sums.saved),
                    metadata_bytes: domain.metadata_bytes(),
                    commons_bytes: self.commons_bytes(0),
                    ..DomainAccount::default()
                }
            })
            .collect();
        for object in self.state.index.objects() {
            let Some(account) = accounts.get_mut(object.domain as usize) else { continue };
            account.objects += 1;
            account.bytes += object.size;
            account.resident_bytes += object.resident_bytes();
            if let Some(bytes) = &mut account.commons_bytes {
                *bytes += object.commons_bytes();
            }
        }
        let domains = accounts.into_iter().zip(self.state.index.domains());
        let present = domains.filter(|(_, domain)| !domain.is_removed);
        let mut accounts: Vec<_> = present.map(|(account, _)| account).collect();
        accounts.sort_by(|a, b| a.domain.cmp(&b.domain));
        accounts
    }

    fn image_accounts(
        &self,
        images: &[(u16, Digest)],
        totals: &account::Totals,
        users: &HashMap<u32, u64>,
    ) -> Vec<ImageAccount> {
        let accounts = (0..).zip(images).filter_map(|(number, (domain_number, digest))| {
            let domain = self.state.index.domains().get(*domain_number as usize)?;
            let image = domain.images.get(digest)?;
            let sums = totals.images.get(&number).copied().unwrap_or_default();
            let mut account = ImageAccount {
                domain: domain.domain.name().to_owned(),
                image: *digest,
                names: domain.names(digest).to_vec(),
                objects: image.objects.len() as u64,
                bytes: 0,
                resident_bytes: 0,
                shared_bytes: 0,
                private_bytes: 0,
                used_bytes: sums.used,
                commons_bytes: self.commons_bytes(0),
                saved_bytes: whole(sums.saved),
                metadata_bytes: image.metadata_bytes,
                containers: users.get(&number).copied().unwrap_or(0),
            };
            for object in image.objects.iter().filter_map(|id| self.state.index.object(*id)) {
                account.bytes += object.size;
                let resident = object.resident_bytes();
                account.resident_bytes += resident;
                if let Some(bytes) = &mut account.commons_bytes {
                    *bytes += object.commons_bytes();
                }
                match object.is_shared() {
                    true => account.shared_bytes += resident,
                    false => account.private_bytes += resident,
                }
            }
            Some(account)
        });
        accounts.collect()
    }

    fn container_accounts(
        &self,
        totals: &account::Totals,
        mut images: HashMap<u32, Vec<UsedImage>>,
    ) -> Vec<ContainerAccount> {
        let account = |(number, sums): (&u32, &Sums)| {
            let cgroup = self.state.cgroups.path(CgroupId(*number))?.to_owned();
            Some(ContainerAccount {
                name: self.state.name_of(&cgroup),
                cgroup,
                images: images.remove(number).unwrap_or_default(),
                objects: sums.objects,
                used_bytes: sums.used,
                shared_bytes: sums.shared,
                private_bytes: sums.private,
                commons_bytes: self.commons_bytes(sums.commons),
                proportional_bytes: whole(sums.proportional),
                saved_bytes: whole(sums.saved),
            })
        };
        let mut accounts: Vec<_> = totals.cgroups.iter().filter_map(account).collect();
        accounts.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
        accounts
    }
}

impl Machine {
    /// Reads `/proc/meminfo` below `root`.
    pub(super) fn read(root: &Path) -> Result<Machine> {
        let path = root.join("proc/meminfo");
        let text = kernel_text::read(&path).map_err(LedgerError::io(&path))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let number = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
            number.map(|kib: u64| kib << 10).ok_or_else(|| LedgerError::Format {
                path: path.clone(),
                what: format!("has no line {name}"),
            })
        };
        Ok(Machine {
            memory_bytes: field("MemTotal")?,
            available_bytes: field("MemAvailable")?,
            page_cache_bytes: field("Cached")?,
            shared_memory_bytes: field("Shmem")?,
        })
    }
}
