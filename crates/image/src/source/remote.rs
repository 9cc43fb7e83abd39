//! An image in a registry: its manifest by name, and its documents and blobs by digest.

use std::io::Read;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_store::task::Cancel;
use serde::Deserialize;

use crate::digest::BlobDigest;
use crate::error::{ImportError, RegistryError};
use crate::layer::blob::{Blob, Content};
use crate::registry::Repository;
use crate::source::manifest::{self, Descriptor};
use crate::trust::{Claim, SIGNATURE_ANNOTATION, cosign_tag};

/// Largest list of cosign's signatures, in bytes; more than anybody makes.
const CLAIMS_DOCUMENT_MAX: u64 = 1 << 20;
/// Claims that are looked at.
const CLAIMS_MAX: usize = 64;
/// Largest claim, in bytes.
const CLAIM_MAX: u64 = 64 << 10;
/// Largest signature, in base64.
const SIGNATURE_MAX: usize = 1 << 10;

impl Content for Arc<Repository> {
    fn open(&self, digest: &BlobDigest, size: u64, stop: Option<&Cancel>) -> Box<dyn Read + Send> {
        Box::new(self.blob(&digest.to_string(), size, stop.unwrap_or(self.stop())))
    }
}

/// A blob in a registry. Nothing is fetched before it is read.
pub(crate) fn blob(
    repository: &Arc<Repository>,
    descriptor: &Descriptor,
) -> Result<Blob, ImportError> {
    let digest = descriptor.blob_digest()?;
    Ok(Blob::new(digest, descriptor.size, Arc::new(repository.clone())))
}

/// Resolves the image's name, with one HEAD if the registry answers it in full.
pub(crate) fn resolve(repository: &Repository, max: u64) -> Result<Descriptor, ImportError> {
    let reference = &repository.reference;
    let target = reference.target();
    let descriptor = |media_type: String, digest: &BlobDigest, size: u64| {
        Descriptor::new(media_type, digest.to_string(), size)
    };
    if let Some(head) = repository.head(&target)? {
        let said = BlobDigest::parse(&head.digest);
        let digest = reference.digest().cloned().or(said);
        let found = digest.map(|digest| descriptor(head.media_type, &digest, head.size));
        // A document of another type is fetched: its own `mediaType` counts.
        if let Some(found) = found.filter(|found| manifest::leads(found).is_ok()) {
            return Ok(found);
        }
    }
    let document = repository.manifest(&target, max)?;
    let actual = match reference.digest() {
        Some(digest) => digest.of(&document.bytes),
        None => BlobDigest::sha256(&document.bytes),
    };
    if let Some(digest) = reference.digest().filter(|digest| **digest != actual) {
        return Err(ImportError::digest(digest, &actual));
    }
    let size = document.bytes.len() as u64;
    let by_header = descriptor(document.media_type, &actual, size);
    if manifest::leads(&by_header).is_ok() {
        return Ok(by_header);
    }
    let media_type = manifest::media_type(&actual.to_string(), &document.bytes)?;
    Ok(descriptor(media_type, &actual, size))
}

/// Fetches a manifest or an index, and checks that it is the one.
pub(crate) fn document(
    repository: &Repository,
    descriptor: &Descriptor,
    max: u64,
) -> Result<Vec<u8>, ImportError> {
    let digest = descriptor.blob_digest()?;
    if descriptor.size > max {
        let what = format!("document {digest} of {} bytes", descriptor.size);
        return Err(ImportError::limit(what, max, "document_bytes"));
    }
    let bytes = repository.manifest(&digest.to_string(), max)?.bytes;
    let actual = digest.of(&bytes);
    if actual != digest {
        return Err(ImportError::digest(&digest, &actual));
    }
    if bytes.len() as u64 != descriptor.size {
        return Err(ImportError::Size {
            digest: digest.to_string(),
            expected: descriptor.size,
            actual: bytes.len() as u64,
        });
    }
    Ok(bytes)
}

/// As much of the image that holds cosign's signatures as is needed.
#[derive(Deserialize)]
struct Claims {
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// The claims at cosign's tag for a manifest or index, unverified.
pub(crate) fn claims(
    repository: &Arc<Repository>,
    digest: &BlobDigest,
) -> Result<Vec<Claim>, ImportError> {
    let document = match repository.manifest(&cosign_tag(digest), CLAIMS_DOCUMENT_MAX) {
        Err(RegistryError::NotFound { .. }) => return Ok(Vec::new()),
        other => other?,
    };
    let Ok(list) = serde_json::from_slice::<Claims>(&document.bytes) else { return Ok(Vec::new()) };
    let mut claims = Vec::new();
    for layer in list.layers.into_iter().take(CLAIMS_MAX) {
        let signature = layer.annotations.get(SIGNATURE_ANNOTATION);
        let signature = signature.filter(|text| text.len() <= SIGNATURE_MAX);
        let signature = signature.and_then(|text| BASE64_STANDARD.decode(text).ok());
        let (Some(signature), true) = (signature, layer.size <= CLAIM_MAX) else { continue };
        match blob(repository, &layer).and_then(|blob| blob.read_all(CLAIM_MAX)) {
            Ok(payload) => claims.push(Claim { payload, signature }),
            Err(ImportError::Registry(RegistryError::NotFound { .. })) => {}
            // Whether there is a good signature cannot be said without the registry.
            Err(error @ ImportError::Registry(_)) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(claims)
}
