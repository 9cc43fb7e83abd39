//! Cosign's signatures as registries keep them (sigstore/cosign, `specs/SIGNATURE_SPEC.md`): at the
//! tag `sha256-<hex>.sig` beside what is signed is an image whose layers are claims ("simple
//! signing", JSON), each with its signature in an annotation of the layer.

use serde::Deserialize;

use super::key::PublicKey;
use crate::digest::BlobDigest;

/// Annotation of a layer that holds the signature of the layer, in base64.
pub(crate) const SIGNATURE_ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// What a claim says that it is.
const KIND: &str = "cosign container image signature";

/// A claim with its signature. Neither has been looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) payload: Vec<u8>,
    /// Of the payload: ASN.1 for ECDSA, 64 bytes for ed25519.
    pub(crate) signature: Vec<u8>,
}

#[derive(Deserialize)]
struct Payload {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    image: Image,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct Image {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

/// The tag at which the signatures of a manifest or index are.
pub(crate) fn tag(digest: &BlobDigest) -> String {
    format!("{}.sig", digest.to_string().replacen(':', "-", 1))
}

impl Claim {
    /// The key that signed the claim, if it claims this digest. As in cosign, the claim's name
    /// (`docker-reference`) does not count: an image comes from mirrors and under other names.
    pub(crate) fn signer<'k>(
        &self,
        digest: &str,
        keys: impl IntoIterator<Item = &'k PublicKey>,
    ) -> Option<&'k PublicKey> {
        let key = keys.into_iter().find(|key| key.verifies(&self.payload, &self.signature))?;
        // Unsigned bytes are never parsed.
        let text = std::str::from_utf8(&self.payload).ok()?;
        let payload: Payload = serde_json::from_str(text).ok()?;
        let Critical { image, kind } = payload.critical;
        (kind == KIND && image.digest == digest).then_some(key)
    }
}
