use super::content::{check_content, check_name, check_type, mode_bits, object_of_path};
use super::{
    BY_DIGEST, BY_PATH, Content, DEAD, EXTERNAL, Entry, EntryId, ID_LIMIT, Inode, InodeId, LINKED,
    Links, Meta, NONE, ODD_SIZE, PATH_MAX, PENDING, PRIMARY_GIVEN, Payload, SetId, Tree, TreeError,
    small_id,
};

impl Tree {
    /// Adds a new inode under a new name.
    ///
    /// # Errors
    /// [`TreeError::Exists`] where the name is taken, [`TreeError::NotDirectory`], a name, path,
    /// target or size out of bounds, a mode whose type contradicts the content, or a full arena.
    pub fn insert(
        &mut self,
        dir: InodeId,
        name: &[u8],
        meta: Meta,
        content: Content<'_>,
    ) -> Result<InodeId, TreeError> {
        check_type(meta.mode, &content)?;
        check_content(&content)?;
        let id = small_id(self.inodes.len())?;
        let entry = self.add_entry(dir, name, id)?;
        let mut inode = Inode {
            mtime: meta.mtime,
            word: 0,
            uid: meta.uid,
            gid: meta.gid,
            mtime_nsec: meta.mtime_nsec,
            a: NONE,
            b: NONE,
            xattrs: SetId::EMPTY,
            entry: entry.0,
            mode: mode_bits(meta.mode, content.type_bits()),
            flags: 0,
        };
        self.store_content(&mut inode, &content);
        if content == Content::Directory {
            // At most `PATH_MAX` and a slash: `add_entry` has checked it.
            inode.b = u32::try_from(self.path_len(dir) + 1 + name.len()).unwrap_or(NONE);
        }
        self.inodes.push(inode);
        self.live_inodes += 1;
        Ok(InodeId(id))
    }

    /// Adds a name to an inode that is in the tree already (a hard link).
    ///
    /// # Errors
    /// As [`Tree::insert`]; [`TreeError::LinkToDirectory`] where `inode` is a directory.
    pub fn link(
        &mut self,
        dir: InodeId,
        name: &[u8],
        inode: InodeId,
    ) -> Result<EntryId, TreeError> {
        if self.is_dir(inode) {
            return Err(TreeError::LinkToDirectory { name: name.into() });
        }
        let entry = self.add_entry(dir, name, inode.0)?;
        self.note_link(inode, entry);
        Ok(entry)
    }

    /// Removes a name, and with it the inode when no other name leads there; a directory goes
    /// with all that is below it. Says whether there was such a name.
    pub fn unlink(&mut self, dir: InodeId, name: &[u8]) -> bool {
        let Some(entry) = self.lookup_entry(dir, name) else { return false };
        self.remove_entry(entry.0);
        true
    }

    /// Replaces owner, mode and time. The file type stays, whatever `meta.mode` says.
    pub fn set_meta(&mut self, inode: InodeId, meta: Meta) {
        let i = &mut self.inodes[inode.index()];
        i.mode = mode_bits(meta.mode, u32::from(i.mode));
        i.uid = meta.uid;
        i.gid = meta.gid;
        i.mtime = meta.mtime;
        i.mtime_nsec = meta.mtime_nsec;
    }

    /// Replaces file type and content. Names, owner, permissions and attributes stay.
    ///
    /// # Errors
    /// [`TreeError::NotDirectory`] or [`TreeError::LinkToDirectory`] when it would turn a
    /// directory into something else or the reverse; content out of bounds.
    pub fn set_content(&mut self, inode: InodeId, content: Content<'_>) -> Result<(), TreeError> {
        let is_dir = matches!(content, Content::Directory);
        match (self.is_dir(inode), is_dir) {
            (true, true) => return Ok(()),
            (true, false) => return Err(TreeError::LinkToDirectory { name: Box::default() }),
            (false, true) => return Err(TreeError::NotDirectory),
            (false, false) => {}
        }
        check_content(&content)?;
        let mut changed = self.inodes[inode.index()];
        changed.flags &= !(EXTERNAL | BY_PATH | BY_DIGEST | ODD_SIZE);
        changed.mode = mode_bits(u32::from(changed.mode), content.type_bits());
        self.store_content(&mut changed, &content);
        self.inodes[inode.index()] = changed;
        Ok(())
    }

    /// Replaces all extended attributes of an inode. Of two with one name, the last counts.
    ///
    /// # Errors
    /// [`TreeError::XattrName`] for a name that is empty, longer than 255 bytes or holds a NUL;
    /// [`TreeError::XattrSpace`] for a set larger than [`XATTRS_MAX`](super::XATTRS_MAX).
    pub fn set_xattrs<'x>(
        &mut self,
        inode: InodeId,
        xattrs: impl IntoIterator<Item = (&'x [u8], &'x [u8])>,
    ) -> Result<(), TreeError> {
        let set = self.xattrs.intern_set(xattrs)?;
        self.inodes[inode.index()].xattrs = set;
        Ok(())
    }
}

impl Tree {
    /// Takes a name for a hard link whose target is to be known later ([`Tree::resolve_link`]).
    pub(crate) fn reserve(&mut self, dir: InodeId, name: &[u8]) -> Result<EntryId, TreeError> {
        self.add_entry(dir, name, PENDING)
    }

    /// Gives a reserved name its inode.
    pub(crate) fn resolve_link(&mut self, entry: EntryId, inode: InodeId) -> Result<(), TreeError> {
        if self.is_dir(inode) {
            return Err(TreeError::LinkToDirectory { name: self.entry_name(entry).into() });
        }
        let shown = self.file_nlink(inode);
        self.entries[entry.0 as usize].inode = inode.0;
        self.note_link(inode, entry);
        if self.inodes[inode.index()].flags & PRIMARY_GIVEN != 0 {
            self.links_mut(inode).nlink = Some(shown);
        }
        Ok(())
    }

    /// Stores an inode under its present first name, and sets the link count that is shown.
    pub(crate) fn give_links(&mut self, inode: InodeId, nlink: u32) {
        if self.is_dir(inode) {
            return;
        }
        self.inodes[inode.index()].flags |= PRIMARY_GIVEN;
        if self.file_nlink(inode) != nlink {
            self.links_mut(inode).nlink = Some(nlink);
        }
    }

    /// Makes `entry`, which leads to the inode, the name under which it is stored.
    pub(crate) fn give_primary(&mut self, inode: InodeId, entry: EntryId) {
        if self.entry_inode(entry) == Some(inode) && !self.is_dir(inode) {
            let i = &mut self.inodes[inode.index()];
            i.entry = entry.0;
            i.flags |= PRIMARY_GIVEN;
        }
    }

    pub(crate) fn mark_odd_size(&mut self, inode: InodeId) {
        self.inodes[inode.index()].flags |= ODD_SIZE;
    }
}

impl Tree {
    fn add_text(&mut self, bytes: &[u8]) -> (u64, u32) {
        let start = self.text.len() as u64;
        self.text.extend_from_slice(bytes);
        // `check_content` bounds every text to a few kilobytes.
        (start, u32::try_from(bytes.len()).unwrap_or(u32::MAX))
    }

    /// Fills in the content part of an inode. The content was checked.
    fn store_content(&mut self, inode: &mut Inode, content: &Content<'_>) {
        inode.word = 0;
        inode.a = NONE;
        inode.b = NONE;
        match *content {
            Content::Directory | Content::Fifo | Content::Socket => {}
            Content::External { size: 0, .. } => inode.a = 0,
            Content::Symlink(bytes) | Content::Inline(bytes) => {
                (inode.word, inode.a) = self.add_text(bytes);
            }
            Content::CharDevice(rdev) | Content::BlockDevice(rdev) => inode.a = rdev,
            Content::External { size, digest, payload } => {
                inode.word = size;
                inode.flags |= EXTERNAL;
                if let Some(digest) = digest {
                    inode.a = self.digests.intern(digest);
                }
                // An object path is not kept as text: a million of them would be 65 MB.
                let object = match payload {
                    Payload::Object(digest) => Some(*digest),
                    Payload::Path(path) => object_of_path(path),
                    Payload::None => None,
                };
                if let Some(object) = object {
                    inode.flags |= BY_DIGEST;
                    inode.b = self.digests.intern(&object);
                } else if let Payload::Path(path @ [_, ..]) = payload {
                    inode.flags |= BY_PATH;
                    inode.b = u32::try_from(self.payloads.len()).unwrap_or(NONE);
                    let text = self.add_text(path);
                    self.payloads.push(text);
                }
            }
        }
    }

    fn path_len(&self, dir: InodeId) -> usize {
        self.inodes[dir.index()].b as usize
    }

    fn add_entry(&mut self, dir: InodeId, name: &[u8], inode: u32) -> Result<EntryId, TreeError> {
        check_name(name)?;
        if !self.is_dir(dir) || self.inodes[dir.index()].flags & DEAD != 0 {
            return Err(TreeError::NotDirectory);
        }
        if self.path_len(dir) + name.len() > PATH_MAX {
            let first = self.inodes[dir.index()].entry;
            let path = [&self.path(EntryId(first))[..], b"/", name].concat();
            return Err(TreeError::path_too_long(&path));
        }
        let id = small_id(self.entries.len())?;
        let start = u32::try_from(self.names.len()).map_err(|_| TreeError::Full)?;
        if self.lookup_entry(dir, name).is_some() {
            return Err(TreeError::Exists { name: name.into() });
        }
        // `check_name` bounds the length to 255.
        self.names.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        self.names.extend_from_slice(name);
        let first = self.inodes[dir.index()].a;
        self.entries.push(Entry { name: start, parent: dir.0, inode, next_sibling: first });
        let (entries, names) = (&self.entries, &self.names);
        self.index.insert(id, dir.0, name, |id| {
            let e = &entries[id as usize];
            let start = e.name as usize;
            (e.parent, &names[start + 1..start + 1 + usize::from(names[start])])
        });
        let d = &mut self.inodes[dir.index()];
        d.a = id;
        d.word += 1;
        self.live_entries += 1;
        Ok(EntryId(id))
    }

    fn links_mut(&mut self, inode: InodeId) -> &mut Links {
        let i = &mut self.inodes[inode.index()];
        i.flags |= LINKED;
        let first = i.entry;
        self.links.entry(inode.0).or_insert_with(|| Links {
            names: vec![first],
            live: 1,
            nlink: None,
        })
    }

    fn note_link(&mut self, inode: InodeId, entry: EntryId) {
        let links = self.links_mut(inode);
        links.names.push(entry.0);
        links.live += 1;
        links.nlink = None;
    }

    /// Removes an entry, and whatever no name leads to any more, without recursion.
    fn remove_entry(&mut self, entry: u32) {
        let mut doomed = vec![entry];
        while let Some(id) = doomed.pop() {
            let (parent, name) = {
                let e = &self.entries[id as usize];
                let start = e.name as usize;
                (e.parent, start + 1..start + 1 + usize::from(self.names[start]))
            };
            self.index.remove(id, parent, &self.names[name]);
            let entry = &mut self.entries[id as usize];
            let inode = std::mem::replace(&mut entry.inode, NONE);
            self.inodes[parent as usize].word -= 1;
            self.live_entries -= 1;
            if inode >= ID_LIMIT || self.still_named(InodeId(inode), id) {
                continue;
            }
            doomed.extend(self.child_ids(InodeId(inode)));
            let i = &mut self.inodes[inode as usize];
            i.flags |= DEAD;
            self.live_inodes -= 1;
        }
    }

    /// Takes the removed entry `gone` off an inode's names and says whether others are left.
    fn still_named(&mut self, inode: InodeId, gone: u32) -> bool {
        let i = &mut self.inodes[inode.index()];
        if i.flags & LINKED == 0 {
            return false;
        }
        let Some(links) = self.links.get_mut(&inode.0) else { return false };
        links.live = links.live.saturating_sub(1);
        links.nlink = None;
        if links.live == 0 {
            self.links.remove(&inode.0);
            i.flags &= !LINKED;
            return false;
        }
        // Removed names stay in the list until they outnumber the others, so that removing all
        // names of an inode one by one is linear.
        let entries = &self.entries;
        if links.names.len() as u64 > 2 * u64::from(links.live) + 8 || i.entry == gone {
            links.names.retain(|&e| entries[e as usize].inode == inode.0);
        }
        if i.entry == gone {
            i.entry = links.names.first().copied().unwrap_or(NONE);
            i.flags &= !PRIMARY_GIVEN;
        }
        true
    }
}
