//! On which superblocks opened files are noted.

use std::path::Path;

use cofolio_sys::fanotify::Opens;

use super::layers::open_directory;
use super::namespaces::Namespaces;
use super::{Place, Superblock, Superblocks};

impl Superblocks {
    /// Notes the files that are opened on all superblocks; `is_new` for a queue without marks.
    /// Returns how many superblocks it could not mark.
    pub(in super::super) fn mark_all(&mut self, root: &Path, opens: &Opens, is_new: bool) -> usize {
        let mut failed = 0;
        let Self { slots, namespaces, .. } = self;
        for superblock in slots.iter_mut().flatten() {
            superblock.is_marked &= !is_new;
            // A device number may have been reused.
            let is_shared =
                !superblock.is_writable && matches!(superblock.place, Place::Mounted(..));
            if is_shared || !superblock.is_marked {
                superblock.mark(root, opens, namespaces);
                failed += usize::from(!superblock.is_marked);
            }
        }
        self.to_mark.clear();
        failed
    }

    /// Notes the files that are opened on superblocks that are new since the last call.
    pub(in super::super) fn mark_new(&mut self, root: &Path, opens: &Opens) {
        for id in std::mem::take(&mut self.to_mark) {
            let superblock = self.slots.get_mut(id.0 as usize).and_then(Option::as_mut);
            if let Some(superblock) = superblock {
                superblock.mark(root, opens, &mut self.namespaces);
            }
        }
    }
}

impl Superblock {
    fn mark(&mut self, root: &Path, opens: &Opens, namespaces: &mut Namespaces) {
        let marked = match &self.place {
            Place::Mounted(path, _) => open_directory(path, self.device),
            Place::Adopted(sighting) => sighting.open(root, self.device, namespaces),
        };
        self.is_marked = marked.and_then(|file| opens.mark_filesystem(file)).is_ok();
    }
}
