//! What has to hold of an image before anybody is shown what is in it: that it is the one that was meant,
//! and that what is read is checked.

use cofolio_store::{Digest, Domain};

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

    /// Whether the metadata image is measured before it is mounted, even if it is mounted elsewhere.
    pub(crate) fn measures(&self) -> bool {
        self.digest.is_some()
    }
}
