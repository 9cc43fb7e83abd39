//! Reachability: what refs, roots and live mounts keep. Garbage collection, trim and fsck ask here.

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use serde::Serialize;

use crate::base::with_bases;
use crate::contents::{Contents, DigestSet};
use crate::error::{BoxError, Error, Result, is_damage, with_causes};
use crate::examine::{Quiet, hash_file};
use crate::kinds::{FileKind, FileName};
use crate::record::{Ref, Root, RootKind};
use crate::records::RecordFile;
use crate::task::Cancel;
use crate::{Digest, Domain, GcOptions};

/// An unreadable record, or kept image or layer; everything it might need is kept. Or a file that cannot be
/// removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unreadable {
    /// `image <digest>` or `layer <chain-id>`, with its keeper, or the path of a record.
    pub what: String,
    /// What is wrong with it.
    pub reason: String,
    /// What is kept because of it.
    pub kept: String,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, reason, kept } = self;
        match kept == ITSELF {
            true => write!(f, "{what} cannot be removed: {reason}"),
            false => write!(f, "{what} cannot be read: {reason}; kept: {kept}"),
        }
    }
}

/// What is kept of a file that cannot be removed.
pub const ITSELF: &str = "itself";

/// A root that may keep nothing any more: `<kind>/<id>`, and its file.
#[derive(Debug)]
pub(crate) struct StaleRoot {
    pub(crate) shown: String,
    pub(crate) path: String,
    pub(crate) kind: RootKind,
    /// Its id, unless that is long, which no lease's is.
    id: Option<String>,
}

/// Everything that keeps something.
#[derive(Debug, Default)]
pub(crate) struct Keepers {
    pub(crate) refs: Vec<(String, Ref)>,
    pub(crate) roots: Vec<(String, Root)>,
    pub(crate) live: Vec<Digest>,
    pub(crate) stale: Vec<StaleRoot>,
    /// Records that cannot be read: what they keep, nobody knows.
    pub(crate) unreadable: Vec<Error>,
}

impl Domain {
    /// Reads all records, then asks what is mounted: mounts write their root before they mount and
    /// remove it after they have unmounted, so each is seen once.
    pub(crate) fn keepers(
        &self,
        live: &dyn Fn() -> Result<Vec<Digest>, BoxError>,
        options: &GcOptions,
    ) -> Result<Keepers> {
        let mut keepers = Keepers::default();
        let refs = self.all_refs()?;
        keepers.refs = refs.readable;
        for unreadable in refs.unreadable {
            keepers.add_unreadable(unreadable.error)?;
        }
        for kind in RootKind::ALL {
            for RecordFile { path, name } in self.records(kind.directory())? {
                let shown = name.as_ref().map(|name| format!("{}/{name}", kind.as_str()));
                let shown = shown.unwrap_or_else(|| path.clone());
                let file = StaleRoot { shown, path, kind, id: name };
                match self.read_root(&file.path) {
                    root if self.is_stale(&file, &root, options)? => keepers.stale.push(file),
                    Ok(None) => {}
                    Ok(Some(root)) => keepers.roots.push((file.shown, root)),
                    Err(error) => keepers.add_unreadable(error)?,
                }
            }
        }
        keepers.live = live().map_err(|source| Error::Unreadable {
            what: "this machine's live mounts".to_owned(),
            source,
        })?;
        Ok(keepers)
    }

    /// Whether a root that was stale still is: another may have taken its name.
    pub(crate) fn is_still_stale(&self, root: &StaleRoot, options: &GcOptions) -> Result<bool> {
        self.is_stale(root, &self.read_root(&root.path), options)
    }

    fn is_stale(
        &self,
        file: &StaleRoot,
        root: &Result<Option<Root>>,
        options: &GcOptions,
    ) -> Result<bool> {
        match (file.kind, root) {
            (_, Ok(None)) => Ok(false),
            (RootKind::Lease, _) => {
                file.id.as_ref().map_or(Ok(true), |id| self.is_orphaned_lease(id))
            }
            // These records are not synced. What a torn one was made for went with the crash.
            (RootKind::Mount | RootKind::Vm, Err(error)) => {
                Ok(matches!(error, Error::Corrupt { .. }))
            }
            (RootKind::Mount | RootKind::Vm, Ok(Some(root))) => {
                Ok(match (&root.boot_id, &options.boot_id) {
                    (Some(theirs), Some(ours)) => theirs != ours,
                    _ => false,
                })
            }
        }
    }
}

impl Keepers {
    fn add_unreadable(&mut self, error: Error) -> Result<()> {
        if !is_damage(&error) {
            return Err(error);
        }
        self.unreadable.push(error);
        Ok(())
    }

    /// Visits kept images and layers with their keepers: a ref, `<kind>/<id>`, or `a live mount`.
    pub(crate) fn each(&self, mut visit: impl FnMut(FileName, &str)) {
        // Every chain id of a record that was read can be a name.
        let mut keep = |files: Result<Vec<FileName>>, by: &str| {
            files.into_iter().flatten().for_each(|file| visit(file, by));
        };
        for (name, record) in &self.refs {
            keep(record.files(), &format!("ref `{name}`"));
        }
        for (shown, root) in &self.roots {
            keep(root.files(), shown);
        }
        for image in &self.live {
            visit(FileName::content(FileKind::Image, image), "a live mount");
        }
    }
}

/// What is to be kept. Unreadable files keep everything they might need and block nothing else:
///
/// - an unreadable ref or root may keep any image: no content is collected;
/// - an unreadable kept image or layer may need any object: no object is collected, but images,
///   layers, packs and segments are;
/// - an unreadable pack, delta or unnamed base can be made again and keeps nothing.
pub(crate) struct Reachability<'a> {
    domain: &'a Domain,
    contents: &'a dyn Contents,
    cancel: Cancel,
    /// Images, layers and packs. The split of a layer goes with its tree.
    files: BTreeSet<FileName>,
    /// Objects and segments.
    content: DigestSet,
    pub(crate) unreadable: Vec<Unreadable>,
    any_file: bool,
    any_object: bool,
}

impl<'a> Reachability<'a> {
    pub(crate) fn new(domain: &'a Domain, contents: &'a dyn Contents, cancel: Cancel) -> Self {
        Self {
            domain,
            contents,
            cancel,
            files: BTreeSet::new(),
            content: DigestSet::new(),
            unreadable: Vec::new(),
            any_file: false,
            any_object: false,
        }
    }

    /// Keeps what the keepers keep. Fails only for causes like too many open files, not for damage.
    pub(crate) fn mark(&mut self, keepers: &Keepers) -> Result<()> {
        let mut kept = Vec::new();
        keepers.each(|file, by| {
            if self.files.insert(file.clone()) {
                kept.push((file, by.to_owned()));
            }
        });
        for error in &keepers.unreadable {
            self.any_file = true;
            let (what, reason) = match error {
                Error::Corrupt { path, reason } => (format!("`{path}`"), reason.clone()),
                other => ("a record".to_owned(), with_causes(other)),
            };
            let kept = "everything, because it may name any image".to_owned();
            self.unreadable.push(Unreadable { what, reason, kept });
        }
        for (file, by) in &kept {
            self.visit(file, by)?;
        }
        let images = self.files.iter().filter(|file| file.kind() == FileKind::Image);
        let images: Vec<_> = images.filter_map(FileName::image).collect();
        for image in with_bases(images, &self.domain.bases()?) {
            self.visit_derived(&FileName::content(FileKind::Image, &image))?;
        }
        for pack in self.domain.packs()? {
            let image = pack.image().map(|image| FileName::content(FileKind::Image, &image));
            if image.is_some_and(|image| self.files.contains(&image)) {
                self.visit_derived(&pack)?;
            }
        }
        self.content.seal();
        Ok(())
    }

    /// Keeps a file that was named or published since the mark began. `is_new` if it was published
    /// and may name other content than its predecessor.
    pub(crate) fn add(&mut self, file: &FileName, is_new: bool) -> Result<()> {
        match file.kind() {
            FileKind::Object | FileKind::Segment => {
                file.digest().into_iter().for_each(|digest| self.content.insert(digest));
            }
            FileKind::Pack | FileKind::DaxPack => self.visit_derived(file)?,
            FileKind::Image | FileKind::Layer | FileKind::Split => {
                let file = match file.kind() {
                    FileKind::Split => file.with_kind(FileKind::Layer),
                    _ => file.clone(),
                };
                // A commit that was killed may not have got to publishing it.
                if !self.domain.has_named(&file)? {
                    return Ok(());
                }
                if self.files.insert(file.clone()) || is_new {
                    self.visit(&file, "an import or a mount that has just begun")?;
                }
                self.add_below(file.image())?;
            }
        }
        Ok(())
    }

    /// Keeps what an image is mounted over.
    fn add_below(&mut self, image: Option<Digest>) -> Result<()> {
        let (mut open, mut seen): (Vec<_>, HashSet<_>) =
            (image.into_iter().collect(), HashSet::new());
        while let Some(image) = open.pop() {
            if let Some(base) = self.domain.base_of(&image)?.filter(|_| seen.insert(image)) {
                for below in [base.base, base.delta] {
                    self.visit_derived(&FileName::content(FileKind::Image, &below))?;
                    open.push(below);
                }
            }
        }
        Ok(())
    }

    /// To be called after the last [`Reachability::add`] and before the next question.
    pub(crate) fn seal(&mut self) {
        self.content.seal();
    }

    pub(crate) fn keeps(&self, file: &FileName) -> bool {
        self.any_file
            || match file.kind() {
                FileKind::Object | FileKind::Segment => {
                    file.digest().is_none_or(|digest| self.keeps_content(file.kind(), &digest))
                }
                FileKind::Split => self.files.contains(&file.with_kind(FileKind::Layer)),
                _ => self.files.contains(file),
            }
    }

    pub(crate) fn keeps_content(&self, kind: FileKind, digest: &Digest) -> bool {
        self.any_file
            || (self.any_object && kind == FileKind::Object)
            || self.content.contains(digest)
    }

    /// Why a file is not what its name says, if its name tells the digest: what it names means nothing
    /// then.
    fn altered(&self, file: &FileName) -> Result<Option<Error>> {
        self.cancel.check()?;
        let Some(digest) = file.digest() else { return Ok(None) };
        let found = self.domain.open_named(file).and_then(|opened| {
            let _quiet = Quiet::begin(&opened, 0, 0);
            hash_file(&opened, &self.cancel)
        });
        match found {
            Ok(found) if found == digest => Ok(None),
            Ok(found) => {
                let reason = format!("its content has digest {found}: it was altered");
                Ok(Some(Error::corrupt(self.domain.named_file(file), reason)))
            }
            Err(error) if is_damage(&error) => Ok(Some(error)),
            Err(error) => Err(error),
        }
    }

    /// Keeps what a file names.
    fn visit(&mut self, file: &FileName, kept_by: &str) -> Result<()> {
        let altered = self.altered(file)?;
        let content = &mut self.content;
        let read = altered.map_or_else(
            || {
                file.visit_whole(self.domain, self.contents, &mut |digest, _| {
                    content.insert(digest);
                })
            },
            |error| Err(error.into()),
        );
        let Err(error) = read else { return Ok(()) };
        let what = format!("{file} (kept by {kept_by})");
        if !is_damage(&*error) {
            return Err(Error::Unreadable { what, source: error });
        }
        self.any_object = true;
        let kept = "all objects, because it may need any of them".to_owned();
        self.unreadable.push(Unreadable { what, reason: with_causes(&*error), kept });
        Ok(())
    }

    /// Keeps what can be made again, and what it names, if it can be read and all of that is there.
    fn visit_derived(&mut self, file: &FileName) -> Result<()> {
        if self.files.contains(file) || self.altered(file)?.is_some() {
            return Ok(());
        }
        let mut named = HashSet::new();
        let read = file.visit(self.domain, self.contents, &mut |digest, _| {
            named.insert(digest);
        });
        if let Err(error) = read {
            let what = file.to_string();
            return match is_damage(&*error) {
                true => Ok(()),
                false => Err(Error::Unreadable { what, source: error }),
            };
        }
        if file.kind().is_pack() {
            for segment in &named {
                let segment = FileName::content(FileKind::Segment, segment);
                if !self.domain.has_named(&segment)? {
                    return Ok(());
                }
            }
        }
        named.into_iter().for_each(|digest| self.content.insert(digest));
        self.files.insert(file.clone());
        Ok(())
    }
}
