//! Packs over real segments; everything else is as in the store's tests.

use std::collections::HashSet;

use cofolio_image::pack::PackError;
use cofolio_image::pack::segment::{Form, IndexEntry, Pages, Segment, SegmentWriter};
use cofolio_store::task::Cancel;
use cofolio_store::{
    BoxError, Contents, Digest, Domain, Error, FileKind, ImportOptions, StoredFile,
};

use crate::common::{Lines, put_pack};

/// Reads segments, and the stand-ins for all else.
pub(crate) struct Segments;

impl Contents for Segments {
    fn names(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        match kind {
            FileKind::Segment => Ok(Segment::check(file)?),
            _ => Lines.names(kind, file, visit),
        }
    }

    fn image_paths(
        &self,
        image: &StoredFile,
        wanted: &dyn Fn(&Digest) -> bool,
        found: &mut dyn FnMut(Digest, &[u8]),
    ) -> Result<(), BoxError> {
        Lines.image_paths(image, wanted, found)
    }
}

/// Packs an image: its objects go into plain segments of `count` objects each, unless they are in one
/// already.
pub(crate) fn pack(
    domain: &Domain,
    image: &Digest,
    count: usize,
    options: ImportOptions,
) -> Result<Vec<Digest>, Error> {
    pack_as(Form::Plain, domain, image, count, options)
}

/// The same with segments of another form. The domain has one form only.
pub(crate) fn pack_as(
    form: Form,
    domain: &Domain,
    image: &Digest,
    count: usize,
    options: ImportOptions,
) -> Result<Vec<Digest>, Error> {
    let mut objects = Vec::new();
    Lines
        .names(FileKind::Image, &domain.open_image(image)?, &mut |digest, size| {
            if size > 0 {
                objects.push((digest, size));
            }
        })
        .unwrap();
    objects.sort();
    objects.dedup();
    let mut segments = Vec::new();
    for segment in domain.segments()? {
        let known = Segment::of(domain, &segment)?.entries;
        let before = objects.len();
        objects.retain(|(object, _)| !known.iter().any(|entry| entry.object == *object));
        if objects.len() < before {
            segments.push(segment);
        }
    }
    let staging = domain.begin_import(options)?;
    let mut pages = Pages::default();
    for segment in domain.segments()? {
        pages.add(domain, &segment)?;
    }
    for objects in objects.chunks(count) {
        let cancel = Cancel::default();
        let mut writer = SegmentWriter::new(&staging, form, &pages, &cancel)?;
        for (object, size) in objects {
            match writer.add(object, *size) {
                Err(PackError::Store(error)) => return Err(error),
                other => other.unwrap(),
            }
        }
        let (digest, segment) = pages.add_written(writer.finish()?);
        segments.extend(segment.others);
        segments.push(digest);
    }
    let mut seen = HashSet::new();
    segments.retain(|segment| seen.insert(*segment));
    put_pack(staging, image, &segments)?;
    Ok(segments)
}

/// A content by its runs; what is behind its end in the last block are zeros.
pub(crate) fn content_of(
    domain: &Domain,
    digest: &Digest,
    segment: &Segment,
    entry: &IndexEntry,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for run in entry.runs() {
        let mut blocks = vec![0; run.blocks as usize * 4096];
        if let Some(place) = run.at {
            let file = domain.open_segment(&segment.holder(digest, place)).unwrap();
            file.read_exact_at(&mut blocks, u64::from(place.block) * 4096).unwrap();
        }
        bytes.extend(blocks);
    }
    let padding = bytes.split_off(usize::try_from(entry.size).unwrap());
    assert!(padding.len() < 4096 && padding.iter().all(|&byte| byte == 0));
    bytes
}
