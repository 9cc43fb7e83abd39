use anyhow::Context as _;
use cofolio_image::compose::named_objects;
use cofolio_image::trust;
use cofolio_node::container::bundle::ImageConfig;
use cofolio_store::Ref;
use serde_json::{Value, json};
use std::collections::BTreeSet;

use crate::cmd::Outcome;
use crate::context::{Context, Named, other_roots};
use crate::image::{self, Opened};
use crate::ui::{Cell, Table, Tone, date, human_count, human_size, plural, printable};

/// Tell all about one image
///
/// Digest, where it came from, how it is run, its layers, what it takes, how it is protected, and what
/// keeps it or has it mounted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio inspect redis:7.0.15\n  \
    cofolio inspect redis:7.0.15 --json | jq -r .config.config.Cmd")]
pub(crate) struct Args {
    /// Ref, first digits of a digest, or path of an EROFS image file
    image: String,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let opened = image::open(context, &args.image, None)?;
    match &opened.named {
        Some(named) => of_store(named, &opened, context),
        None => of_file(&opened, context),
    }
}

/// An image file: only what is in it.
fn of_file(opened: &Opened, context: &Context<'_>) -> Outcome {
    let sb = opened.image.superblock();
    if context.ui.json {
        return context.ui.json(&json!({
            "file": opened.label,
            "composefs_version": sb.composefs_version,
            "inodes": sb.inodes,
            "block_size": sb.block_size,
            "bytes": opened.image.size(),
            "devices": sb.devices.len(),
        }));
    }
    let mut table = Table::plain();
    table.pair("file", &opened.label);
    table.pair(
        "format",
        match sb.composefs_version {
            Some(version) => format!("EROFS in composefs form, version {version}"),
            None => "EROFS".to_owned(),
        },
    );
    table.pair("size", human_size(opened.image.size()));
    table.pair("inodes", human_count(sb.inodes));
    table.pair("block size", human_size(sb.block_size));
    if !sb.devices.is_empty() {
        table.pair("extra devices", sb.devices.len().to_string());
    }
    context.ui.table(&table)
}

fn of_store(named: &Named, opened: &Opened, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let (refs, exit) = context.refs(&domain)?;
    let refs = refs.iter().filter(|(_, record)| record.image == named.digest);
    let refs: Vec<&str> = refs.map(|(name, _)| name.as_str()).collect();
    let Counted { entries, files, objects, content_bytes } =
        count(opened).with_context(|| format!("image {}", named.digest))?;
    let mounts = context.mounts_of(&domain, &named.digest)?;
    let roots = other_roots(&domain, &named.digest)?;
    let protection = domain.protection();
    let immutable = domain.open_image(&named.digest)?.is_immutable()?;
    let config = match named.record.as_ref().and_then(|record| record.config.as_deref()) {
        Some(text) => Some((serde_json::from_str::<Value>(text)?, ImageConfig::parse(text)?)),
        None => None,
    };
    let base = domain.base_of(&named.digest)?;
    let sb = opened.image.superblock();
    let signatures = trust::signatures(&domain, &named.digest)?;

    if context.ui.json {
        let record = named.record.as_ref();
        context.ui.json(&json!({
            "image": named.digest,
            "domain": domain.name(),
            "refs": refs,
            "manifest": record.and_then(|r| r.manifest.as_deref()),
            "created": record.map(|r| r.created),
            "labels": record.map(|r| &r.labels),
            "layers": record.map(|r| &r.layers),
            "config": config.as_ref().map(|(raw, _)| raw),
            "composefs_version": sb.composefs_version,
            "entries": entries,
            "files": files,
            "metadata_bytes": opened.image.size(),
            "base": base,
            "objects": objects,
            "content_bytes": content_bytes,
            "verity": protection.verity,
            "immutable": immutable,
            "mounts": mounts,
            "roots": roots,
            "signatures": signatures,
            "path": domain.image_path(&named.digest),
        }))?;
        return Ok(exit);
    }

    let ui = context.ui;
    let mut table = Table::plain();
    table.pair("image", named.digest.to_string());
    table.pair("names", if refs.is_empty() { "none".to_owned() } else { refs.join(", ") });
    table.pair("trust domain", domain.name());
    if let Some(record) = &named.record {
        came_from(&mut table, record);
    }
    table
        .pair("entries", format!("{}, {} of them files", human_count(entries), human_count(files)));
    table.pair("metadata", human_size(opened.image.size()));
    if let Some(base) = base {
        table.pair("mounted over", base.base.to_string());
    }
    table
        .pair("content", format!("{} in {}", human_size(content_bytes), plural(objects, "object")));
    table.pair(
        "protection",
        match (protection.verity, immutable) {
            (true, _) => "every read is checked by the kernel (fs-verity)",
            (false, true) => {
                "immutable files; what is read is not checked by the kernel (no fs-verity)"
            }
            (false, false) => "none but file modes; `cofolio verify` re-hashes",
        },
    );
    let ours = named.record.as_ref().and_then(|record| record.config.as_deref());
    let ours = trust::config_digest(ours);
    for signature in &signatures {
        let other = signature.config() != ours.as_deref();
        let config = if other { ", with another config" } else { "" };
        table.pair("signature", format!("{}{config} (not checked)", signature.shown()));
    }
    if let Some((_, config)) = &config {
        run_as(&mut table, config);
    }
    ui.table(&table)?;
    if let Some(record) = named.record.as_ref().filter(|record| !record.layers.is_empty()) {
        ui.line("")?;
        ui.table(&layers(record))?;
    }
    if !mounts.is_empty() || !roots.is_empty() {
        ui.line("")?;
        ui.line(ui.paint(Tone::Bold, "In use by"))?;
        for mount in &mounts {
            ui.line(format!("  mount {}", mount.display()))?;
        }
        for root in &roots {
            ui.line(format!("  {root}"))?;
        }
    }
    Ok(exit)
}

fn came_from(table: &mut Table, record: &Ref) {
    if let Some(manifest) = &record.manifest {
        table.pair("manifest", manifest);
    }
    table.pair("imported", format!("{} UTC", date(record.created)));
    for (key, value) in &record.labels {
        table.pair("label", printable(format!("{key}={value}").as_bytes()));
    }
}

fn layers(record: &Ref) -> Table {
    let mut table = Table::new(&["LAYER", "DIFF ID", "BLOB", "SIZE"]);
    for (number, layer) in record.layers.iter().enumerate() {
        let blob = layer.blob.as_deref().unwrap_or("-");
        table.row(vec![
            Cell::right((number + 1).to_string()),
            Cell::left(short_id(&layer.diff_id)),
            Cell::left(short_id(blob)),
            Cell::size(layer.size),
        ]);
    }
    table
}

/// What an image holds.
#[derive(Default)]
struct Counted {
    /// Names, the root not counted.
    entries: u64,
    /// Names of regular files.
    files: u64,
    /// Objects, each counted once.
    objects: u64,
    content_bytes: u64,
}

fn count(opened: &Opened) -> anyhow::Result<Counted> {
    let mut counted = Counted::default();
    let mut seen = BTreeSet::new();
    let mut walk = opened.image.walk()?;
    while let Some(found) = walk.advance()? {
        if opened.is_added(&found.inode) {
            continue;
        }
        counted.entries += 1;
        counted.files += u64::from(found.inode.is_file());
        let object = named_objects::object_of(&opened.image, &found.inode);
        if let Some(object) = object.map_err(|error| anyhow::anyhow!(error))?
            && seen.insert(object)
        {
            counted.objects += 1;
            counted.content_bytes += found.inode.size;
        }
    }
    Ok(counted)
}

/// The image config, as far as it says how the image is run. Its texts come from outside.
fn run_as(table: &mut Table, config: &ImageConfig) {
    let quoted = |words: &[String]| {
        let words = words.iter().map(|word| {
            let shown = printable(word.as_bytes());
            if shown.is_empty() || shown.contains(' ') { format!("{shown:?}") } else { shown }
        });
        words.collect::<Vec<_>>().join(" ")
    };
    let mut pair = |name, value: String| {
        if !value.is_empty() {
            table.pair(name, value);
        }
    };
    let platform = [&config.os, &config.architecture].map(|part| part.clone().unwrap_or_default());
    pair("platform", printable(platform.join("/").as_bytes()));
    pair("command", quoted(&config.command()));
    pair("user", printable(config.user().as_bytes()));
    pair("working directory", printable(config.working_dir().as_bytes()));
    for entry in config.env() {
        pair("environment", printable(entry.as_bytes()));
    }
    pair("ports", printable(config.exposed_ports().collect::<Vec<_>>().join(", ").as_bytes()));
    pair("volumes", printable(config.volumes().collect::<Vec<_>>().join(", ").as_bytes()));
}

fn short_id(id: &str) -> String {
    id.strip_prefix("sha256:").unwrap_or(id).chars().take(12).collect()
}
