//! Archives of `docker save`: a `manifest.json` without digests, and layers by name.

use super::file;
use super::manifest::{self, DockerImage, read_config};
use super::opened::{Blobs, Chosen, FoundImage, Opened, chain};
use crate::digest::BlobDigest;
use crate::error::ImportError;

impl Opened {
    pub(super) fn choose_docker(&self, max: u64) -> Result<Chosen, ImportError> {
        let lacks = || self.lacks("not from `docker save`, no manifest.json");
        let bytes = self.blobs.document("manifest.json", max)?.ok_or_else(lacks)?;
        let images: Vec<DockerImage> = manifest::parse("manifest", "manifest.json", &bytes)?;
        let tags = |image: &DockerImage| image.repo_tags.clone().unwrap_or_default();
        let mut found: Vec<DockerImage> = Vec::new();
        let mut names = Vec::new();
        for image in images {
            names.extend(tags(&image));
            if self.tag.as_ref().is_none_or(|tag| tags(&image).contains(tag)) {
                found.push(image);
            }
        }
        let image = match found.pop() {
            Some(image) if found.is_empty() => image,
            _ => {
                let names: Vec<&str> = names.iter().take(64).map(String::as_str).collect();
                return Err(self.unknown_tag(&names));
            }
        };
        let config = self.blobs.document(&image.config, max)?.ok_or_else(|| {
            ImportError::Missing { digest: image.config.clone(), path: self.path.clone() }
        })?;
        let digest = BlobDigest::sha256(&config);
        // The name is the digest: `<hex>.json`, or `blobs/sha256/<hex>` from Docker 25 on.
        let promised =
            image.config.trim_end_matches(".json").rsplit('/').next().unwrap_or_default();
        match BlobDigest::parse(&format!("sha256:{promised}")) {
            Some(promised) if promised == digest => Ok(Chosen::Docker { image, config, digest }),
            Some(promised) => Err(ImportError::digest(&promised, &digest)),
            None => {
                let what = format!("the config's name {:?} is not its digest", image.config);
                Err(ImportError::document("manifest", "manifest.json", what))
            }
        }
    }

    pub(super) fn resolve_docker(
        &self,
        image: &DockerImage,
        config: Vec<u8>,
        digest: BlobDigest,
    ) -> Result<FoundImage, ImportError> {
        let (config, diff_ids) = read_config(&image.config, config, image.layers.len())?;
        let Blobs::Archive(members) = &self.blobs else {
            return Err(ImportError::Source { what: "`docker save` makes archives".into() });
        };
        let mut blobs = Vec::with_capacity(image.layers.len());
        for (name, diff_id) in image.layers.iter().zip(&diff_ids) {
            let (offset, size) = members.find(name).ok_or_else(|| ImportError::Missing {
                digest: name.clone(),
                path: self.path.clone(),
            })?;
            // There is no digest of the blob but its name in the new form; the diff-id is checked
            // in either, and is the same thing as long as the archive's layers are not compressed.
            let promised = name.strip_prefix("blobs/sha256/").map(|hex| format!("sha256:{hex}"));
            let digest = match promised {
                Some(promised) => BlobDigest::parse(&promised).ok_or_else(|| {
                    let what = format!("the layer's name {name:?} is not its digest");
                    ImportError::document("manifest", "manifest.json", what)
                })?,
                None => members.digest(offset, size, diff_id)?,
            };
            let blob = file::in_file(digest, members.file.clone(), offset, size);
            blobs.push((blob, String::new()));
        }
        let layers = chain(blobs, diff_ids);
        Ok(FoundImage { manifest: digest, document: None, config, layers })
    }
}
