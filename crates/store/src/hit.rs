//! What damage hits: which refs, and which files of their images.

use std::collections::{BTreeMap, HashMap};

use crate::contents::Contents;
use crate::error::Result;
use crate::fsck::{Finding, FsckReport};
use crate::kinds::{FileKind, FileName};
use crate::{Digest, Domain};

/// Most refs, and most files, that are named with one finding.
const NAMED_MAX: usize = 8;

impl Domain {
    /// Adds refs and files to the findings about content. An image that cannot be read adds none.
    pub(crate) fn add_hit(&self, contents: &dyn Contents, report: &mut FsckReport) -> Result<()> {
        if !report.findings.iter().any(|finding| finding.kind.is_damage()) {
            return Ok(());
        }
        let mut by_image: BTreeMap<Digest, Vec<String>> = BTreeMap::new();
        let mut by_layer: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, record) in self.readable_refs()? {
            for layer in record.layers {
                by_layer.entry(layer.chain_id).or_default().push(name.clone());
            }
            by_image.entry(record.image).or_default().push(name);
        }
        let mut objects: HashMap<Digest, usize> = HashMap::new();
        for (number, finding) in report.findings.iter_mut().enumerate() {
            match self.name_of(&finding.path).map(|name| (name.kind(), name)) {
                Some((FileKind::Layer | FileKind::Split, name)) => {
                    let refs = name.chain_id().and_then(|chain_id| by_layer.get(&chain_id));
                    add(&mut finding.refs, refs.into_iter().flatten());
                }
                Some((FileKind::Image | FileKind::Pack | FileKind::DaxPack, name)) => {
                    let refs = name.image().and_then(|image| by_image.get(&image));
                    add(&mut finding.refs, refs.into_iter().flatten());
                }
                _ if is_about_object(finding) => {
                    objects.extend(finding.digest.map(|digest| (digest, number)));
                }
                _ => {}
            }
        }
        if objects.is_empty() {
            return Ok(());
        }
        for image in self.images()? {
            let Ok(file) = self.open_named(&FileName::content(FileKind::Image, &image)) else {
                continue;
            };
            let refs = by_image.get(&image).map_or(&[][..], Vec::as_slice);
            let shown = refs.first().cloned().unwrap_or_else(|| image.to_string());
            let wanted = |digest: &Digest| objects.contains_key(digest);
            let _ = contents.image_paths(&file, &wanted, &mut |digest, path| {
                if let Some(finding) =
                    objects.get(&digest).and_then(|number| report.findings.get_mut(*number))
                {
                    add(&mut finding.refs, refs);
                    add(&mut finding.files, [&format!("{shown} {}", path.escape_ascii())]);
                }
            });
        }
        Ok(())
    }
}

fn is_about_object(finding: &Finding) -> bool {
    use crate::FindingKind as Kind;
    let kinds =
        [Kind::ObjectMissing, Kind::ObjectTruncated, Kind::ObjectAltered, Kind::ObjectUnreadable];
    kinds.contains(&finding.kind)
}

fn add<'a>(names: &mut Vec<String>, more: impl IntoIterator<Item = &'a String>) {
    for name in more {
        if names.len() < NAMED_MAX && !names.contains(name) {
            names.push(name.clone());
        }
    }
}
