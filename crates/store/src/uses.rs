//! Who uses what: for disk usage and trim, which say what removing an image frees.

use std::collections::{HashMap, HashSet};

use crate::contents::Contents;
use crate::disk::Kind;
use crate::error::{At, Error, Result, is_damage};
use crate::kinds::{FileKind, FileName};
use crate::{Digest, Domain};

/// How an object, a segment or a pack is used.
#[derive(Debug)]
pub(crate) struct Use {
    /// Files that name it, as far as they were counted.
    pub(crate) users: u32,
    /// The one that counted it last: a file that names an object twice uses it once.
    turn: u32,
    pub(crate) allocated: u64,
}

/// All objects of a domain, and what else was added, by digest.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    uses: HashMap<Digest, Use>,
    turn: u32,
    /// Bases and deltas. A damaged one keeps nothing: its image is mounted without.
    derived: HashSet<Digest>,
}

impl Uses {
    /// The objects, used by nothing.
    pub(crate) fn of_objects(domain: &Domain) -> Result<Self> {
        let mut uses = Self { derived: domain.derived_images()?, ..Self::default() };
        domain.each_object(&mut |digest, allocated| uses.add(digest, allocated))?;
        Ok(uses)
    }

    pub(crate) fn add(&mut self, digest: Digest, allocated: u64) {
        self.uses.insert(digest, Use { users: 0, turn: 0, allocated });
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Use> {
        self.uses.values()
    }

    /// Calls `change` once for each object that a file names, and for each of `also`.
    pub(crate) fn visit(
        &mut self,
        domain: &Domain,
        contents: &dyn Contents,
        file: &FileName,
        also: &[Digest],
        mut change: impl FnMut(&mut Use),
    ) -> Result<()> {
        self.turn += 1;
        let (turn, uses) = (self.turn, &mut self.uses);
        let mut visit = |digest, _| {
            if let Some(object) = uses.get_mut(&digest).filter(|object| object.turn != turn) {
                object.turn = turn;
                change(object);
            }
        };
        also.iter().for_each(|digest| visit(*digest, 0));
        let read = file.visit_whole(domain, contents, &mut visit);
        let is_derived = file.image().is_some_and(|image| self.derived.contains(&image));
        if is_derived && read.as_ref().is_err_and(|error| is_damage(error.as_ref())) {
            return Ok(());
        }
        read.map_err(|source| Error::Unreadable { what: file.to_string(), source })
    }
}

impl Domain {
    /// Visits every object that is here with the bytes allocated for it.
    pub(crate) fn each_object(&self, visit: &mut dyn FnMut(Digest, u64)) -> Result<()> {
        let objects = format!("{}/{}", self.directory(), FileKind::Object.directory());
        for (shard, kind) in self.disk().list(&objects).at("list", &objects)? {
            if kind != Kind::Directory {
                continue;
            }
            let directory = format!("{objects}/{shard}");
            for (entry, kind) in self.disk().list(&directory).at("list", &directory)? {
                let digest = Digest::from_object_path(&shard, &entry);
                // What is no file fsck reports.
                let Some(digest) = digest.filter(|_| kind == Kind::File) else { continue };
                visit(digest, self.allocated(&format!("{directory}/{entry}"))?);
            }
        }
        Ok(())
    }

    /// Bytes allocated for a file; 0 for one that was removed since it was listed, and for a damaged
    /// inode, which whoever reads it reports.
    pub(crate) fn allocated(&self, path: &str) -> Result<u64> {
        match self.disk().stat(path).if_there("look at", path) {
            Err(error) if is_damage(&error) => Ok(0),
            stat => Ok(stat?.map_or(0, |stat| stat.allocated)),
        }
    }

    /// How many files of a kind there are, and the bytes allocated for them.
    pub(crate) fn allocated_for(&self, kind: FileKind) -> Result<(u64, u64)> {
        let names = self.named(kind)?;
        let mut bytes = 0;
        for name in &names {
            bytes += self.allocated(&self.named_file(name))?;
        }
        Ok((names.len() as u64, bytes))
    }
}
