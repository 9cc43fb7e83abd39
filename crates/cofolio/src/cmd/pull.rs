use cofolio_image::import::check_name;
use cofolio_image::reference::Reference;
use cofolio_image::registry::RegistryOptions;
use cofolio_image::source::Source;

use crate::cmd::{Outcome, import};
use crate::context::Context;
use crate::exit::Fail;
use cofolio_node::config::Config;
use cofolio_node::size::Size;

/// Bring an image from a registry into the store
///
/// Layers go straight from the network into the store, several at a time: nothing is written twice. Of an
/// image that the store has already only the name is asked for, of one that it has in part only the layers
/// that are missing. A connection that breaks off is taken up again where it was. Credentials are those of
/// `podman login` and `docker login`, credential helpers included.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio pull docker://registry.example/team/app:1\n  \
    cofolio pull redis:7 --name redis:7.0.15      (from Docker Hub, as docker would)\n  \
    cofolio pull docker://localhost:5000/app@sha256:… --limit-rate 10MiB")]
pub(crate) struct Args {
    #[arg(help = "[docker://][HOST[:PORT]/]NAME[:TAG][@DIGEST]")]
    image: String,
    /// Name to give the image (default: as it was given, without docker://)
    #[arg(long, short, value_name = "REF")]
    name: Option<String>,
    #[command(flatten)]
    how: import::HowArgs,
}

/// How to talk to registries.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Options for registries")]
pub(crate) struct RegistryArgs {
    /// Layers that are under way at a time, up to 16 (default: 4)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    jobs: Option<u8>,
    /// What all layers together may take per second, as 500K or 10MiB
    #[arg(long, value_name = "SIZE")]
    limit_rate: Option<Size>,
    /// Allow plain HTTP with this registry (with one on this machine it is always allowed)
    #[arg(long)]
    insecure: bool,
}

impl RegistryArgs {
    /// The options for a source; for one that is no registry there must be none.
    pub(crate) fn options(
        &self,
        source: &Source,
        config: &Config,
    ) -> anyhow::Result<RegistryOptions> {
        if let Source::Registry(reference) = source {
            return self.for_registry(reference, config);
        }
        if self.insecure || self.jobs.is_some() || self.limit_rate.is_some() {
            let what = "--jobs, --limit-rate and --insecure are for docker:// sources only";
            return Err(Fail::usage(what).into());
        }
        Ok(RegistryOptions::default())
    }

    /// The options for an image in a registry.
    pub(crate) fn for_registry(
        &self,
        reference: &Reference,
        config: &Config,
    ) -> anyhow::Result<RegistryOptions> {
        let mut options = config.registry_options()?;
        options.jobs = self.jobs.map_or(0, usize::from);
        options.rate_max = self.limit_rate.map_or(0, |rate| rate.0);
        if self.insecure {
            options.hosts.entry(reference.host().to_owned()).or_default().insecure = true;
        }
        Ok(options)
    }
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    args.name.as_deref().map_or(Ok(()), check_name)?;
    let name = args.image.strip_prefix("docker://").unwrap_or(&args.image);
    let source = Source::Registry(Reference::parse(name)?);
    let options = args.how.options(args.name.as_ref(), &source, context)?;
    import::bring_in(&source, &options, "pulling", context)
}
