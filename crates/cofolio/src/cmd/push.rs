use cofolio_image::export::{self, How, PushOptions};
use cofolio_image::reference::Reference;

use crate::cmd::export::CompressArgs;
use crate::cmd::pull::RegistryArgs;
use crate::cmd::{Outcome, import};
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Table, Tone, human_size};

/// Give an image to a registry
///
/// What the registry has is not sent: a layer that it has as it was pulled, or as it was pushed before, is
/// named in the manifest, and one that another of its repositories has is mounted from there. If these are
/// all the layers that the image came with, the manifest is the one that it came with, to the byte.
/// Otherwise it is a new one; config and diff-ids, and so the image's id, stay the same in any case. Layers
/// that are sent are compressed anew, in the same way every time. The tag is set at the end, when all is there.
///
/// A store has one platform of an image: what is pushed is a manifest, no index. Credentials are those of
/// `podman login` and `docker login`. Mirrors are not asked.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio push redis:7.0.15 docker://registry.example/team/redis:7\n  \
    cofolio push app docker://localhost:5000/app --compress zstd --limit-rate 10MiB")]
pub(crate) struct Args {
    /// Ref, or first digits of a digest
    image: String,
    #[arg(help = "[docker://][HOST[:PORT]/]NAME[:TAG]")]
    destination: String,
    #[command(flatten)]
    compress: CompressArgs,
    #[command(flatten)]
    registry: RegistryArgs,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let to = args.destination.strip_prefix("docker://").unwrap_or(&args.destination);
    let to = Reference::parse(to)?;
    let domain = context.domain()?;
    let named = context.image(&domain, &args.image)?;
    let registry = args.registry.for_registry(&to, &context.config.config)?;
    let options = PushOptions {
        compression: args.compress.compression(),
        threads: args.compress.threads,
        registry,
    };
    let push = |task: &_| export::push(&domain, named.exported(), &to, &options, task);
    let report = context.work("pushing", "layer", push)?;
    if context.ui.json {
        return context.ui.json(&report);
    }
    let name = context.ui.paint(Tone::Bold, &report.name);
    context.ui.line(format!("{name} {}", report.manifest))?;
    if context.ui.quiet {
        return Ok(Exit::Ok);
    }
    let mut table = Table::plain();
    table.detail("image id", report.config.to_string());
    table.detail("manifest", if report.original { "as it came" } else { "new" }.to_owned());
    let of = |how: How| report.layers.iter().filter(move |layer| layer.how == how);
    let sent = of(How::Sent).map(|layer| layer.size).sum();
    table.detail(
        "layers",
        format!(
            "{}: {} sent ({}), {} mounted, {} there already",
            report.layers.len(),
            of(How::Sent).count(),
            human_size(sent),
            of(How::Mounted).count(),
            of(How::There).count()
        ),
    );
    if report.known {
        table.detail("tag", "led there already".to_owned());
    }
    table.detail("took", import::human_time(report.duration_ms));
    context.ui.table(&table)
}
