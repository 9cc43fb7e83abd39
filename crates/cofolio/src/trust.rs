//! Checks before an image is used: that it is the one that was meant, and that reads are verified.

use std::path::PathBuf;

use cofolio_image::source::Source;
use cofolio_image::trust::{Arrival, Need, Subject};
use cofolio_node::mount::Check;
use cofolio_node::policy;
use cofolio_store::{Digest, Domain};

use crate::cmd::sign::read_signature;
use crate::context::{Context, Named};
use crate::exit::{Exit, Fail};

/// What is asked of an image before it is mounted.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Options for trust")]
pub(crate) struct TrustArgs {
    /// Only the image with this digest, all of its digits: a ref must lead to it, and its metadata is measured now
    #[arg(long, value_name = "DIGEST")]
    pub(crate) digest: Option<Digest>,
    /// Only if the kernel checks every read from the image (fs-verity); what the mount itself changes is not meant
    #[arg(long)]
    pub(crate) require_verity: bool,
    /// Only if one of the (ed25519) keys in this PEM file has signed the image; the configuration's `[trust]` is asked as
    /// well. May be given several times: one of all keys
    #[arg(long, value_name = "KEY")]
    pub(crate) trust: Vec<PathBuf>,
}

impl TrustArgs {
    /// The image that the options and a name mean together. At least one of them must be there.
    pub(crate) fn image(
        &self,
        name: Option<&str>,
        domain: &Domain,
        context: &Context<'_>,
    ) -> anyhow::Result<Named> {
        let image = match (name, &self.digest) {
            (Some(name), _) => context.image(domain, name)?,
            (None, Some(digest)) => context.image(domain, &digest.to_string())?,
            (None, None) => {
                let fail = Fail::usage("no image: give a ref or --digest");
                return Err(fail.hint("`cofolio images` lists what there is").into());
            }
        };
        match self.digest {
            Some(digest) if digest != image.digest => {
                let what = format!("{} is image {}, not {digest}", image.shown(), image.digest);
                let hint = "the name leads to another image than the one that was asked for";
                Err(Fail::new(Exit::Refused, what).hint(hint).into())
            }
            _ => Ok(image),
        }
    }

    /// Checks that the policy admits the image; returns what to verify before mounting it: all with
    /// `verify`, at least the metadata if its digest was given or signed.
    pub(crate) fn check(
        &self,
        image: &Named,
        need: Need<'_>,
        name: Option<&str>,
        verify: bool,
        domain: &Domain,
        context: &Context<'_>,
    ) -> anyhow::Result<Check> {
        let policy = policy::policy(&context.config.config.trust, &self.trust, &[])?;
        // An image given by digest is not judged by a name that it happens to have.
        let name = name.filter(|name| image.ref_name.as_deref() == Some(*name));
        let subject = Subject { name, image: image.digest, need };
        // A signature vouches for the digest of the metadata, or the caller named it.
        let measure = policy.check(domain, &subject)? || self.digest.is_some();
        Ok(match (self.require_verity, verify) {
            (true, _) => Check::RequireVerity,
            (false, true) => Check::Verify,
            _ if measure => Check::Measure,
            _ => Check::None,
        })
    }
}

/// What is asked of an image that is brought in.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Options for trust")]
pub(crate) struct ArrivalArgs {
    /// Only if one of the (ed25519) keys in this PEM file has signed the image; may be given several times
    #[arg(long, value_name = "KEY")]
    trust: Vec<PathBuf>,
    /// The signature that was made of the image elsewhere, by one of the --trust keys; it is kept with it
    #[arg(long, value_name = "FILE", requires = "trust")]
    signature: Option<PathBuf>,
    /// From registries: only if one of the keys in this PEM file has signed it with cosign; may be given several times
    #[arg(long, value_name = "KEY")]
    cosign_key: Vec<PathBuf>,
}

impl ArrivalArgs {
    pub(crate) fn arrival(
        &self,
        source: &Source,
        context: &Context<'_>,
    ) -> anyhow::Result<Arrival> {
        if !self.cosign_key.is_empty() && !matches!(source, Source::Registry(_)) {
            let fail = Fail::usage("--cosign-key is for docker:// sources only");
            return Err(fail.hint("--trust with --signature is for all sources").into());
        }
        let trust = &context.config.config.trust;
        let policy = policy::policy(trust, &self.trust, &self.cosign_key)?;
        let signature = self.signature.as_deref().map(read_signature).transpose()?;
        Ok(Arrival { policy: policy.into(), signature })
    }
}
