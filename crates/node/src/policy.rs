//! Which images this machine hands out: the configuration's policy and a request's demands.

use std::path::PathBuf;

use cofolio_image::error::TrustError;
use cofolio_image::trust::{Policy, Rule};

use crate::config::Trust;

/// The configured policy and a request's keys: ed25519 (`--trust`) and cosign (`--cosign-key`)
/// files.
///
/// # Errors
/// [`TrustError`]: a key cannot be read, or a rule contradicts itself.
pub fn policy(
    trust: &Trust,
    keys: &[PathBuf],
    cosign_keys: &[PathBuf],
) -> Result<Policy, TrustError> {
    let default = Rule {
        require: trust.require,
        signed_by: trust.signed_by.clone(),
        cosign_keys: trust.cosign_keys.clone(),
    };
    let mut policy = Policy::new(&default, &trust.refs)?;
    if !keys.is_empty() {
        policy.demand(keys, &[], "--trust")?;
    }
    if !cosign_keys.is_empty() {
        policy.demand(&[], cosign_keys, "--cosign-key")?;
    }
    Ok(policy)
}
