//! Signatures that the store keeps beside an image.
//!
//! A record proves nothing until its signature is checked with a trusted key.

use cofolio_store::{Digest, Domain};
use serde::{Deserialize, Serialize};

use super::cosign::Claim;
use super::key::{Algorithm, PublicKey, SIGNATURE_BYTES, SigningKey};
use super::policy::Need;
use crate::digest::BlobDigest;
use crate::error::TrustError;

/// A signature that is kept beside an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Record {
    /// Ours: of [`message`].
    Cofolio {
        /// Digest of the OCI config that it vouches for; none for an image without one.
        config: Option<String>,
        /// Name of the key, for people: [`PublicKey::id`].
        key: String,
        /// The signature.
        #[serde(with = "as_base64")]
        signature: Vec<u8>,
    },
    /// cosign's, of what a registry had. That it became this image is our import's word, unsigned.
    Cosign {
        /// Digest of the OCI config that belongs to it.
        config: Option<String>,
        /// What was signed: the image's manifest, or an index above it.
        manifest: String,
        /// Cosign's claim.
        #[serde(with = "as_base64")]
        payload: Vec<u8>,
        /// Its signature.
        #[serde(with = "as_base64")]
        signature: Vec<u8>,
    },
}

/// The bytes that are signed for an image: three lines of text.
///
/// The config is included because the image's digest does not cover it, and it says what runs.
pub fn message(image: &Digest, config: Option<&str>) -> Vec<u8> {
    let config = config.unwrap_or("none");
    format!("cofolio image signature 1\nimage fsverity-sha256-4k:{image}\nconfig {config}\n").into()
}

/// The digest (`sha256:…`) of an OCI config, as a signature has it.
pub fn config_digest(config: Option<&str>) -> Option<String> {
    config.map(|text| BlobDigest::sha256(text.as_bytes()).to_string())
}

/// The signatures that are kept of an image. Kinds that this program does not know are left out.
pub fn signatures(domain: &Domain, image: &Digest) -> Result<Vec<Record>, cofolio_store::Error> {
    let kept = domain.signatures(image)?;
    Ok(kept.iter().filter_map(|bytes| serde_json::from_slice(bytes).ok()).collect())
}

impl Record {
    /// Signs an image with its config.
    pub fn sign(image: &Digest, config: Option<&str>, key: &SigningKey) -> Self {
        let config = config_digest(config);
        let signature = key.sign(&message(image, config.as_deref()));
        Self::Cofolio { config, key: key.public().id(), signature }
    }

    /// The record of a signature from elsewhere; [`TrustError::Signature`] if no key here made it.
    pub fn of_signature<'k>(
        image: &Digest,
        config: Option<&str>,
        signature: &[u8],
        keys: impl IntoIterator<Item = &'k PublicKey>,
    ) -> Result<Self, TrustError> {
        let wrong = |what: String| TrustError::Signature { image: *image, what };
        if signature.len() != SIGNATURE_BYTES {
            let length = signature.len();
            return Err(wrong(format!("{length} bytes, ed25519 gives {SIGNATURE_BYTES}")));
        }
        let config = config_digest(config);
        let message = message(image, config.as_deref());
        let keys: Vec<_> = keys.into_iter().collect();
        let ours = |key: &&&PublicKey| {
            key.algorithm() == Algorithm::Ed25519 && key.verifies(&message, signature)
        };
        match keys.iter().find(ours) {
            Some(key) => Ok(Self::Cofolio { config, key: key.id(), signature: signature.to_vec() }),
            None => {
                let keys: Vec<_> = keys.iter().map(ToString::to_string).collect();
                let config = config.as_deref().unwrap_or("none");
                Err(wrong(format!("made by none of {} with config {config}", keys.join(", "))))
            }
        }
    }

    pub(crate) fn of_claim(manifest: String, claim: Claim) -> Self {
        let Claim { payload, signature } = claim;
        Self::Cosign { config: None, manifest, payload, signature }
    }

    /// Sets the config of what cosign signed, which an import found.
    pub(crate) fn set_config(&mut self, found: Option<String>) {
        if let Self::Cosign { config, .. } = self {
            *config = found;
        }
    }

    /// Keeps it beside an image.
    pub fn keep(&self, domain: &Domain, image: &Digest) -> Result<(), cofolio_store::Error> {
        let json = serde_json::to_vec(self).unwrap_or_default();
        domain.add_signature(image, &json)
    }

    /// The key whose signature covers what `need` says. `cosign` are keys for claims.
    pub(crate) fn signer<'k>(
        &self,
        image: &Digest,
        need: Need<'_>,
        signed_by: &'k [PublicKey],
        cosign: &'k [PublicKey],
    ) -> Option<&'k PublicKey> {
        let fits = |config: &Option<String>| match need {
            Need::Files => true,
            Need::Run(needed) => *config == config_digest(needed),
        };
        match self {
            Self::Cofolio { config, signature, .. } if fits(config) => {
                let message = message(image, config.as_deref());
                signed_by.iter().find(|key| key.verifies(&message, signature))
            }
            Self::Cosign { config, manifest, payload, signature } if fits(config) => {
                let (payload, signature) = (payload.clone(), signature.clone());
                Claim { payload, signature }.signer(manifest, cosign)
            }
            Self::Cofolio { .. } | Self::Cosign { .. } => None,
        }
    }

    /// What it claims to be, unverified, for people.
    pub fn shown(&self) -> String {
        match self {
            Self::Cofolio { key, .. } => format!("key {}", super::key::short(key)),
            Self::Cosign { manifest, .. } => format!("cosign, of {manifest}"),
        }
    }

    /// The signature itself.
    pub fn signature(&self) -> &[u8] {
        let (Self::Cofolio { signature, .. } | Self::Cosign { signature, .. }) = self;
        signature
    }

    /// The config that it vouches for.
    pub fn config(&self) -> Option<&str> {
        let (Self::Cofolio { config, .. } | Self::Cosign { config, .. }) = self;
        config.as_deref()
    }
}

mod as_base64 {
    use base64::Engine as _;

    use base64::prelude::BASE64_STANDARD;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&BASE64_STANDARD.encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        BASE64_STANDARD.decode(text).map_err(serde::de::Error::custom)
    }
}
