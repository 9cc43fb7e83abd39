//! The kinds of files that a domain keeps, in one table.
//!
//! Garbage collection, fsck, scrub, repair, disk usage, protection and publishing go over this
//! table instead of knowing each kind by itself. Adding a kind is adding a row.

use std::fmt;

use crate::error::Result;
use crate::{Digest, name};

/// A kind of file that holds content: it never changes, has mode 0444 and gets the immutable flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileKind {
    /// Content of a regular file of an image.
    Object,
    /// Metadata image.
    Image,
    /// A layer's own tree.
    Layer,
    /// What a layer's archive holds beside the content of its files.
    Split,
    /// Contents of objects, one after the other: a device of packs.
    Segment,
    /// An image over segments, for this machine's mounts.
    Pack,
    /// An image over segments, for virtual machines.
    DaxPack,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    /// By the fs-verity digest of its content. Objects have a directory per first byte.
    Content,
    /// By the id of a layer chain, encoded as [`crate::name`] says.
    Chain,
    /// By the digest of the image that it belongs to, `.`, and the fs-verity digest of its content.
    ImageAndContent,
}

struct Row {
    noun: &'static str,
    directory: &'static str,
    suffix: &'static str,
    naming: Naming,
    /// It can be made again from images and objects.
    derived: bool,
    /// What its content names. A file must go before those that it names, and come after them.
    names: Option<FileKind>,
}

impl Row {
    const fn new(
        noun: &'static str,
        directory: &'static str,
        suffix: &'static str,
        naming: Naming,
        derived: bool,
        names: Option<FileKind>,
    ) -> Self {
        Self { noun, directory, suffix, naming, derived, names }
    }
}

/// In the order of [`FileKind`]: noun, directory, suffix, naming, derived, what it names.
const TABLE: [Row; FileKind::ALL.len()] = {
    use FileKind::{Object, Segment};
    use Naming::{Chain, Content, ImageAndContent};
    [
        Row::new("object", "objects", "", Content, false, None),
        Row::new("image", "images", ".erofs", Content, false, Some(Object)),
        Row::new("layer", "layers", ".dump.zst", Chain, false, Some(Object)),
        Row::new("split", "layers", ".split", Chain, false, Some(Object)),
        Row::new("segment", "segments", ".segment", Content, true, None),
        Row::new("pack", "segments", ".pack", ImageAndContent, true, Some(Segment)),
        Row::new("DAX pack", "segments", ".dax", ImageAndContent, true, Some(Segment)),
    ]
};

impl FileKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Object,
        Self::Image,
        Self::Layer,
        Self::Split,
        Self::Segment,
        Self::Pack,
        Self::DaxPack,
    ];
    /// All kinds but objects, of which there are so many that they have directories of their own.
    pub(crate) const NAMED: [Self; 6] =
        [Self::Image, Self::Layer, Self::Split, Self::Segment, Self::Pack, Self::DaxPack];
    /// Images over segments. An image of the store has at most one of each.
    pub const PACKS: [Self; 2] = [Self::Pack, Self::DaxPack];

    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// What one is called in messages.
    pub fn noun(self) -> &'static str {
        self.row().noun
    }

    /// Directory in the domain and in a staging.
    pub fn directory(self) -> &'static str {
        self.row().directory
    }

    /// Suffix of the files.
    pub fn suffix(self) -> &'static str {
        self.row().suffix
    }

    /// Whether files can be made again from images and objects, so that damaged ones just go.
    pub fn is_derived(self) -> bool {
        self.row().derived
    }

    /// Whether the name says the digest of the content, which fs-verity then enforces.
    pub fn is_named_by_content(self) -> bool {
        self.row().naming != Naming::Chain
    }

    /// Whether it is one of [`FileKind::PACKS`].
    pub fn is_pack(self) -> bool {
        Self::PACKS.contains(&self)
    }

    /// The kind of files that its content names, if any.
    pub fn names(self) -> Option<Self> {
        self.row().names
    }
}

/// The name of a file of a domain: its kind, and its file name without the suffix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName {
    kind: FileKind,
    stem: String,
}

impl FileName {
    /// A file that is named by its content.
    pub fn content(kind: FileKind, digest: &Digest) -> Self {
        debug_assert_eq!(kind.row().naming, Naming::Content);
        Self { kind, stem: digest.to_string() }
    }

    /// A file that belongs to an image and is named by its content.
    pub fn of_image(kind: FileKind, image: &Digest, digest: &Digest) -> Self {
        debug_assert_eq!(kind.row().naming, Naming::ImageAndContent);
        Self { kind, stem: format!("{image}.{digest}") }
    }

    /// A file of a layer chain.
    ///
    /// # Errors
    /// [`crate::Error::BadName`].
    pub fn chain(kind: FileKind, chain_id: &str) -> Result<Self> {
        debug_assert_eq!(kind.row().naming, Naming::Chain);
        Ok(Self { kind, stem: name::encode("chain id", chain_id)? })
    }

    /// What a file in a directory of the domain is; `None` if it is foreign.
    pub fn of_file(directory: &str, file: &str) -> Option<Self> {
        FileKind::NAMED
            .into_iter()
            .filter(|kind| kind.directory() == directory)
            .find_map(|kind| Self::of_stem(kind, file.strip_suffix(kind.suffix())?))
    }

    pub(crate) fn of_stem(kind: FileKind, stem: &str) -> Option<Self> {
        let name = Self { kind, stem: stem.to_owned() };
        let is_ours = match kind.row().naming {
            Naming::Content => name.digest().is_some(),
            Naming::ImageAndContent => name.digest().is_some() && name.image().is_some(),
            Naming::Chain => name::is_encoded(stem),
        };
        is_ours.then_some(name)
    }

    /// Its kind.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    pub(crate) fn stem(&self) -> &str {
        &self.stem
    }

    /// The digest that its content must have, if its name says one.
    pub fn digest(&self) -> Option<Digest> {
        match self.kind.row().naming {
            Naming::Content => Digest::from_lower_hex(self.stem.as_bytes()),
            Naming::ImageAndContent => {
                Digest::from_lower_hex(self.stem.split_once('.')?.1.as_bytes())
            }
            Naming::Chain => None,
        }
    }

    /// The image that it is, or belongs to.
    pub fn image(&self) -> Option<Digest> {
        match self.kind {
            FileKind::Image => self.digest(),
            FileKind::Pack | FileKind::DaxPack => {
                Digest::from_lower_hex(self.stem.split_once('.')?.0.as_bytes())
            }
            _ => None,
        }
    }

    /// The layer chain that it belongs to, as far as the name tells: a long one is hashed.
    pub fn chain_id(&self) -> Option<String> {
        match self.kind.row().naming {
            Naming::Chain => name::decode(&self.stem),
            Naming::Content | Naming::ImageAndContent => None,
        }
    }

    /// The same name of another kind: of a layer's tree, that of its split.
    pub(crate) fn with_kind(&self, kind: FileKind) -> Self {
        Self { kind, stem: self.stem.clone() }
    }

    /// Path below the directory of a domain or a staging.
    pub(crate) fn path(&self) -> String {
        let (directory, suffix) = (self.kind.directory(), self.kind.suffix());
        match (self.kind, self.digest()) {
            (FileKind::Object, Some(digest)) => format!("{directory}/{}", digest.object_path()),
            _ => format!("{directory}/{}{suffix}", self.stem),
        }
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stem = name::decode(&self.stem);
        let stem = stem.as_deref().unwrap_or(&self.stem);
        match self.kind {
            FileKind::Split => write!(f, "split of layer {stem}"),
            kind => match self.image().filter(|_| kind.is_pack()) {
                Some(image) => write!(f, "{} of image {image}", kind.noun()),
                None => write!(f, "{} {stem}", kind.noun()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_back_from_its_file() {
        let (a, b) = (Digest([0xaa; 32]), Digest([0xbb; 32]));
        let long = "x".repeat(1000);
        let names = [
            FileName::content(FileKind::Image, &a),
            FileName::chain(FileKind::Layer, "sha256:1").unwrap(),
            FileName::chain(FileKind::Split, &long).unwrap(),
            FileName::content(FileKind::Segment, &a),
            FileName::of_image(FileKind::Pack, &a, &b),
            FileName::of_image(FileKind::DaxPack, &a, &b),
        ];
        for name in names {
            let path = name.path();
            let (directory, file) = path.split_once('/').unwrap();
            assert_eq!(FileName::of_file(directory, file), Some(name.clone()), "{name}");
            assert_eq!(FileName::of_file("refs", file), None);
            assert_eq!(FileName::of_file(directory, &format!("{file}.x")), None);
        }
        assert_eq!(FileName::of_image(FileKind::Pack, &a, &b).image(), Some(a));
        assert_eq!(FileName::of_image(FileKind::Pack, &a, &b).digest(), Some(b));
        assert_eq!(FileName::of_file("images", &format!("{a}.pack")), None);
        assert_eq!(FileName::of_file("segments", &format!("{a}.pack")), None);
        assert_eq!(FileName::of_file("layers", "a:b.split"), None);
    }
}
