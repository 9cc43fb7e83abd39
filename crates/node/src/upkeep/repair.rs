//! fsck, and bringing back what it finds.

use std::collections::HashMap;
use std::path::PathBuf;

use cofolio_image::import::{self, ImportOptions};
use cofolio_image::pack::ImageContents;
use cofolio_image::registry::RegistryOptions;
use cofolio_image::source::Source;
use cofolio_store::task::Task;
use cofolio_store::{
    Contents, Damage, Digest, FileKind, Finding, FindingKind, FsckOptions, FsckReport, by_hand,
    is_damage, with_causes,
};

use super::{Upkeep, UpkeepError, bases};
use crate::mount::MountState;
use crate::profile::{Profile, ProfileError};

/// What fsck found, and what a repair did about it.
#[derive(Debug, Default)]
pub struct Checked {
    /// What is wrong, after the repair if there was one.
    pub report: FsckReport,
    /// Damage that the repair found and that a source could bring back.
    pub had_damage: bool,
    /// Sources that failed: their numbers, from 0, and why.
    pub failed: Vec<(usize, String)>,
    /// Damage that is gone, and directories that were made again.
    pub repaired: Vec<Finding>,
    /// Mounts that may still show files that were replaced.
    pub mounts: Vec<PathBuf>,
    /// Images that had a pack and have none now.
    pub unpacked: Vec<Digest>,
    /// Files that are protected now and were not.
    pub protected: u64,
}

impl Upkeep<'_> {
    /// Checks the domain; `rehash` reads all content. With `repair`, removes or remakes damaged
    /// derived files, restores what these sources have, and adds missing protection.
    pub fn fsck(
        &self,
        rehash: bool,
        repair: Option<&[(Source, RegistryOptions)]>,
        task: &Task,
    ) -> Result<Checked, UpkeepError> {
        let mut checked = self.fsck_store(rehash, repair, task)?;
        let findings = &mut checked.report.findings;
        findings.extend(self.damaged_profiles()?);
        findings.sort_by(|a, b| (a.kind, &a.path).cmp(&(b.kind, &b.path)));
        Ok(checked)
    }

    /// Profiles that cannot be used. The store does not know what they mean.
    fn damaged_profiles(&self) -> Result<Vec<Finding>, UpkeepError> {
        let mut findings = Vec::new();
        for (image, path) in self.domain.profiles()? {
            let detail = match self.domain.profile(&image) {
                Err(error) if is_damage(&error) => {
                    let advice = by_hand(&error).map(|advice| format!("; {advice} first"));
                    with_causes(&error) + &advice.unwrap_or_default()
                }
                Err(error) => return Err(error.into()),
                Ok(_) => match Profile::read(self.domain, &image) {
                    Err(ProfileError::Damaged { problem, .. }) => problem,
                    // It was removed meanwhile, or the image is missing or damaged.
                    _ => continue,
                },
            };
            findings.push(Finding {
                kind: FindingKind::ProfileUnreadable,
                path,
                digest: Some(image),
                user: None,
                refs: Vec::new(),
                files: Vec::new(),
                detail,
            });
        }
        Ok(findings)
    }

    fn fsck_store(
        &self,
        rehash: bool,
        repair: Option<&[(Source, RegistryOptions)]>,
        task: &Task,
    ) -> Result<Checked, UpkeepError> {
        let domain = self.domain;
        let options = FsckOptions { rehash };
        let mut before = domain.fsck(&ImageContents, options, task)?;
        let is_directory = |it: &Finding| {
            matches!(it.kind, FindingKind::DirectoryMissing | FindingKind::StagingMissing)
        };
        if repair.is_some() && before.findings.iter().any(is_directory) {
            domain.make_directories()?;
            // Without a directory of the domain nothing else was looked at.
            if before.findings.iter().any(|it| it.kind == FindingKind::DirectoryMissing) {
                let mut missing = before.findings;
                missing.retain(is_directory);
                before = domain.fsck(&ImageContents, options, task)?;
                before.findings.append(&mut missing);
            }
        }
        let is_sound = before.findings.is_empty() && before.more == 0;
        let Some(sources) = repair.filter(|_| !is_sound) else {
            return Ok(Checked { report: before, ..Checked::default() });
        };
        let mut checked = Checked::default();
        if before.findings.iter().any(|it| it.kind.is_derived()) {
            checked.unpacked =
                domain.remove_derived(&before, &ImageContents, task)?.into_iter().collect();
            let is_base =
                |kind| matches!(kind, FindingKind::BaseAltered | FindingKind::BaseIncomplete);
            if before.findings.iter().any(|it| is_base(it.kind)) {
                // Where bases cannot be made again images are mounted without.
                let _ = bases::find(domain, task);
                task.check()?;
            }
        }
        let is_lost = |it: &&Finding| it.kind.is_damage() && !it.kind.is_derived();
        checked.had_damage = before.more_damage || before.findings.iter().any(|it| is_lost(&it));
        let first = domain.damage(&before, &ImageContents, task)?;
        let mut damage = first.clone();
        for (number, (source, registry)) in sources.iter().enumerate() {
            if damage.is_empty() {
                break;
            }
            let (repair, registry) = (Some(damage), registry.clone());
            let options = ImportOptions { repair, registry, ..ImportOptions::default() };
            if let Err(error) = import::import(domain, source, &options, task) {
                task.check()?;
                checked.failed.push((number, with_causes(&error)));
            }
            let left = domain.recheck(&first, &ImageContents, task)?;
            damage = domain.damage(&left, &ImageContents, task)?;
        }
        let is_unprotected = |it: &Finding| {
            it.kind == FindingKind::Unprotected
                || (it.kind == FindingKind::Permissions && it.path == ".")
        };
        if before.more > 0 || before.findings.iter().any(is_unprotected) {
            checked.protected = domain.protect_all(task)?;
        }
        // The whole store was read before; now only what had been wrong.
        let left = domain.recheck(&first, &ImageContents, task)?;
        // Maybe in another way: a second look goes by what the record says.
        let is_left = |it: &Finding| {
            left.findings.iter().any(|other| other.kind.is_damage() && other.path == it.path)
        };
        let mended = before.findings.iter().filter(|it| is_lost(it) || is_directory(it));
        checked.repaired = mended.filter(|it| !is_left(it)).cloned().collect();
        if checked.had_damage {
            checked.mounts = self.mounts_with(&first)?;
        }
        // What was not even listed can only be mended by doing it again.
        let more = if before.more_damage { before.more.max(left.more) } else { left.more };
        let more_damage = before.more_damage || left.more_damage;
        let hashed_bytes = before.hashed_bytes;
        checked.report = FsckReport { hashed_bytes, more, more_damage, ..left };
        Ok(checked)
    }

    /// Mounts of images that name something of this.
    fn mounts_with(&self, damage: &Damage) -> Result<Vec<PathBuf>, UpkeepError> {
        let mut images: HashMap<Digest, bool> = HashMap::new();
        let mut targets = Vec::new();
        for status in self.mounter().list()?.mounts {
            let record = status.record;
            if status.state == MountState::Gone || record.domain != self.domain.name() {
                continue;
            }
            let hit =
                images.entry(record.image).or_insert_with(|| self.names(&record.image, damage));
            if *hit {
                targets.push(record.target);
            }
        }
        Ok(targets)
    }

    /// Whether an image is, or names, something of this. One that cannot be read might.
    fn names(&self, image: &Digest, damage: &Damage) -> bool {
        let mut hit = damage.images.contains(image);
        let mut visit = |digest: Digest, _| hit |= damage.objects.contains(&digest);
        let file = self.domain.open_image(image).map_err(Into::into);
        let read = file.and_then(|file| ImageContents.names(FileKind::Image, &file, &mut visit));
        hit || read.is_err()
    }
}
