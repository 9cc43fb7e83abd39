//! Signatures of images, and the policy that requires them. `docs/SIGNATURES.md` has the bytes.
//!
//! ```text
//! key.rs      keys in PEM files: ed25519 and ECDSA P-256
//! record.rs   what the store keeps beside an image: a signature of ours, or a claim of cosign's
//! cosign.rs   cosign's claims ("simple signing") as registries keep them
//! policy.rs   which names need which keys; the one place that says yes or no
//! ```
//!
//! A decision is about a digest: the caller resolves a name once, asks about that digest and mounts
//! it. Moving the name afterwards makes no difference.

mod cosign;
#[cfg(fuzzing)]
#[path = "../../../../fuzz/inside/trust.rs"]
pub mod fuzz;
mod key;
mod policy;
mod record;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use cofolio_store::{Digest, Domain};

use crate::error::TrustError;
pub(crate) use cosign::{Claim, SIGNATURE_ANNOTATION, tag as cosign_tag};
pub use key::{Algorithm, PublicKey, SIGNATURE_BYTES, SigningKey};
pub use policy::{Need, Policy, Require, Rule, Subject};
pub use record::{Record, config_digest, message, signatures};

/// Demands on an image before an import gives it a name, and the signature that comes with it.
#[derive(Clone, Debug, Default)]
pub struct Arrival {
    /// The demands. See `Policy::admits`.
    pub policy: Arc<Policy>,
    /// A signature made elsewhere, by one of the keys that the policy demands beside its rules.
    pub signature: Option<Vec<u8>>,
}

impl Arrival {
    /// Checks that the image may come in; gives signatures to keep. `claims` are verified.
    pub(crate) fn admit(
        &self,
        domain: &Domain,
        name: &str,
        image: &Digest,
        config: Option<&str>,
        mut brought: Vec<Record>,
    ) -> Result<Vec<Record>, TrustError> {
        for record in &mut brought {
            record.set_config(config_digest(config));
        }
        if let Some(signature) = &self.signature {
            let keys = self.policy.demanded_keys();
            brought.push(Record::of_signature(image, config, signature, keys)?);
        }
        self.policy.admits(domain, name, image, config, &brought)?;
        Ok(brought)
    }
}
