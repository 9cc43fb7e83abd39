use std::collections::BTreeMap;

use anyhow::Context as _;
use cofolio_image::import::{self, ImportOptions, ImportReport, check_name};
use cofolio_image::source::{Platform, Source};
use cofolio_node::backend;
use cofolio_store::TrimPlan;

use crate::cmd::Outcome;
use crate::cmd::pull::RegistryArgs;
use crate::context::Context;
use crate::exit::{self, Exit, Fail};
use crate::trim;
use crate::trust::ArrivalArgs;
use crate::ui::{Table, Tone, human_count, human_size, plural, printable};

/// Bring an image into the store
///
/// From an OCI layout directory, an OCI archive, what `docker save` or `podman save` writes, or a plain
/// directory tree; which of them is found out. From a registry with `docker://`, as `cofolio pull`; out of
/// podman's or containerd's own store, without a pull, with `containers-storage:` or `containerd:`. Every
/// digest on the way is checked. Layers and files that the store has already are not written again, an
/// image that it has already is not even read. What such an image lacks is brought back; `verify` also finds
/// files that were altered and have their size. The store is made if it does not exist.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    docker save redis:7.0.15 -o redis.tar && cofolio import redis.tar --name redis:7.0.15\n  \
    cofolio import oci:layouts/redis:7.0.15\n  \
    cofolio import containers-storage:redis:7.0.15\n  \
    cofolio import dir:/srv/rootfs --name rootfs")]
pub(crate) struct Args {
    #[arg(
        help = "PATH, oci:PATH[:TAG], oci-archive:PATH[:TAG], docker-archive:PATH[:TAG], dir:PATH, \
                docker://[HOST[:PORT]/]NAME[:TAG][@DIGEST], containers-storage:[[DRIVER@]ROOT]NAME or \
                containerd:[[ROOT][+NAMESPACE]]NAME"
    )]
    source: String,
    /// Name to give the image (default: the tag in the source, or its file name)
    #[arg(long, short, value_name = "REF")]
    name: Option<String>,
    #[command(flatten)]
    how: HowArgs,
}

/// How an image is brought in, wherever it comes from.
#[derive(Debug, clap::Args)]
pub(crate) struct HowArgs {
    #[arg(
        help = "Platform to take from an image for several, as OS/ARCH[/VARIANT] [default: this machine's]",
        long,
        value_name = "PLATFORM"
    )]
    platform: Option<String>,
    /// Label for the ref; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    label: Vec<String>,
    /// Threads that hash and write files (default: one per processor, up to 8)
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
    /// Largest uncompressed size of all layers together, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    max_size: u64,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    trust: ArrivalArgs,
}

impl HowArgs {
    /// The options for a source, which becomes `name`.
    pub(crate) fn options(
        &self,
        name: Option<&String>,
        source: &Source,
        context: &Context<'_>,
    ) -> anyhow::Result<ImportOptions> {
        let mut options = ImportOptions {
            name: name.cloned(),
            threads: self.threads,
            labels: labels(&self.label)?,
            registry: self.registry.options(source, &context.config.config)?,
            trust: self.trust.arrival(source, context)?,
            ..ImportOptions::default()
        };
        if let Some(platform) = &self.platform {
            options.platform =
                Platform::parse(platform).map_err(|error| Fail::usage(error.to_string()))?;
        }
        options.limits.uncompressed_bytes = self.max_size << 30;
        Ok(options)
    }
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    args.name.as_deref().map_or(Ok(()), check_name)?;
    let source = Source::parse(&args.source)?;
    let options = args.how.options(args.name.as_ref(), &source, context)?;
    bring_in(&source, &options, "importing", context)
}

/// Imports, shows how it goes on, and does what is due after an import.
pub(crate) fn fetch(
    source: &Source,
    options: &ImportOptions,
    doing: &'static str,
    context: &Context<'_>,
) -> anyhow::Result<(ImportReport, Option<TrimPlan>)> {
    let (domain, report) = context.work(doing, "file", |task| -> anyhow::Result<_> {
        let domain = context.domain_or_create()?;
        let report = import::import(&domain, source, options, task)?;
        Ok((domain, report))
    })?;
    // A source without an index offers no choice of platform.
    let config = domain.get_ref(&report.name)?.and_then(|record| record.config);
    let platform = config.and_then(|text| serde_json::from_str::<Platform>(&text).ok());
    if let Some(is) = platform.filter(|is| !options.platform.matches(is)) {
        let (is, name) = (printable(is.to_string().as_bytes()), &report.name);
        context.ui.note(format!("{name} is for {is}, not for {}", options.platform));
    }
    let image = report.image;
    context
        .work("packing", "file", |task| backend::pack_imported(&domain, &image, task))
        .context("the image is here, but it could not be packed")?;
    if report.known {
        // It has not made the store larger.
        return Ok((report, None));
    }
    // The import is done and stays done: what goes wrong now changes no exit code.
    let announce = |plan: &TrimPlan| trim::announce(context, &domain, plan, false);
    let trim =
        |task: &_| anyhow::Ok(context.upkeep(&domain)?.trim_to_limit(image, &announce, task)?);
    let trimmed = context.work("trimming", "image", trim).unwrap_or_else(|error| {
        let what = "the store may be over its limit and was not trimmed";
        exit::report(&error.context(what), context.ui);
        None
    });
    Ok((report, trimmed))
}

/// Imports, and says what became of it.
pub(crate) fn bring_in(
    source: &Source,
    options: &ImportOptions,
    doing: &'static str,
    context: &Context<'_>,
) -> Outcome {
    let (report, over_limit) = fetch(source, options, doing, context)?;
    if context.ui.json {
        let mut value = serde_json::to_value(&report)?;
        if let Some(plan) = over_limit {
            value["trim"] = serde_json::to_value(plan)?;
        }
        return context.ui.json(&value);
    }
    let name = context.ui.paint(Tone::Bold, &report.name);
    context.ui.line(format!("{name} {}", report.image))?;
    if context.ui.quiet {
        return Ok(Exit::Ok);
    }
    if report.known {
        context.ui.line(format!("here already, nothing was read ({} ms)", report.duration_ms))?;
    }
    let mut table = Table::plain();
    if let Some(config) = &report.config {
        table.detail("image id", config.to_string());
    }
    if report.known {
        return context.ui.table(&table);
    }
    if !report.layers.is_empty() {
        let known = report.layers.iter().filter(|layer| layer.known).count();
        table.detail("layers", format!("{}, {known} of them here already", report.layers.len()));
    }
    table.detail("entries", human_count(report.entries));
    let files = |count, bytes| format!("{}, {}", plural(count, "file"), human_size(bytes));
    table.detail("written", files(report.objects_new, report.bytes_new));
    table.detail("here already", files(report.objects_known, report.bytes_known));
    table.detail("metadata", human_size(report.image_bytes));
    if report.foreign_xattrs > 0 {
        table.detail(
            "left out",
            format!("{} attributes that Linux does not know", report.foreign_xattrs),
        );
    }
    table.detail("took", human_time(report.duration_ms));
    context.ui.table(&table)
}

/// How long something took.
pub(crate) fn human_time(ms: u64) -> String {
    match ms {
        ..1000 => format!("{ms} ms"),
        _ => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
    }
}

fn labels(given: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    let pairs = given.iter().map(|label| match label.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(Fail::usage(format!("--label {label}: not KEY=VALUE")).into()),
    });
    pairs.collect()
}
