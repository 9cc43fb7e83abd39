use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Context as _;
use cofolio_image::compose::named_objects;
use cofolio_image::trust;
use cofolio_node::container::bundle::ImageConfig;
use cofolio_store::{Base, Domain, Ref};
use serde_json::{Value, json};

use crate::cmd::Outcome;
use crate::context::{Context, Named, other_roots};
use crate::image::{self, Opened};
use crate::ui::{Cell, Table, Tone, Ui, date, human_count, human_size, plural, printable};

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

/// What is known of an image of the store.
struct Known<'a> {
    named: &'a Named,
    opened: &'a Opened,
    domain: &'a Domain,
    refs: Vec<&'a str>,
    counted: Counted,
    mounts: Vec<PathBuf>,
    /// What keeps it besides refs and mounts.
    roots: Vec<String>,
    immutable: bool,
    config: Option<(Value, ImageConfig)>,
    base: Option<Base>,
    signatures: Vec<trust::Record>,
}

fn of_store(named: &Named, opened: &Opened, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let (refs, exit) = context.refs(&domain)?;
    let refs = refs.iter().filter(|(_, record)| record.image == named.digest);
    let config = match named.record.as_ref().and_then(|record| record.config.as_deref()) {
        Some(text) => Some((serde_json::from_str::<Value>(text)?, ImageConfig::parse(text)?)),
        None => None,
    };
    let known = Known {
        named,
        opened,
        domain: &domain,
        refs: refs.map(|(name, _)| name.as_str()).collect(),
        counted: count(opened).with_context(|| format!("image {}", named.digest))?,
        mounts: context.mounts_of(&domain, &named.digest)?,
        roots: other_roots(&domain, &named.digest)?,
        immutable: domain.open_image(&named.digest)?.is_immutable()?,
        config,
        base: domain.base_of(&named.digest)?,
        signatures: trust::signatures(&domain, &named.digest)?,
    };
    match context.ui.json {
        true => {
            context.ui.json(&known.json())?;
        }
        false => known.show(context.ui)?,
    }
    Ok(exit)
}

impl Known<'_> {
    fn json(&self) -> Value {
        let record = self.named.record.as_ref();
        json!({
            "image": self.named.digest,
            "domain": self.domain.name(),
            "refs": self.refs,
            "manifest": record.and_then(|r| r.manifest.as_deref()),
            "created": record.map(|r| r.created),
            "labels": record.map(|r| &r.labels),
            "layers": record.map(|r| &r.layers),
            "config": self.config.as_ref().map(|(raw, _)| raw),
            "composefs_version": self.opened.image.superblock().composefs_version,
            "entries": self.counted.entries,
            "files": self.counted.files,
            "metadata_bytes": self.opened.image.size(),
            "base": self.base,
            "objects": self.counted.objects,
            "content_bytes": self.counted.content_bytes,
            "verity": self.domain.protection().verity,
            "immutable": self.immutable,
            "mounts": self.mounts,
            "roots": self.roots,
            "signatures": self.signatures,
            "path": self.domain.image_path(&self.named.digest),
        })
    }

    fn show(&self, ui: &Ui) -> anyhow::Result<()> {
        let record = self.named.record.as_ref();
        ui.table(&self.table())?;
        if let Some(record) = record.filter(|record| !record.layers.is_empty()) {
            ui.line("")?;
            ui.table(&layers(record))?;
        }
        if !self.mounts.is_empty() || !self.roots.is_empty() {
            ui.line("")?;
            ui.line(ui.paint(Tone::Bold, "In use by"))?;
            for mount in &self.mounts {
                ui.line(format!("  mount {}", mount.display()))?;
            }
            for root in &self.roots {
                ui.line(format!("  {root}"))?;
            }
        }
        Ok(())
    }

    fn table(&self) -> Table {
        let Counted { entries, files, objects, content_bytes } = self.counted;
        let mut table = Table::plain();
        table.pair("image", self.named.digest.to_string());
        let names = if self.refs.is_empty() { "none".to_owned() } else { self.refs.join(", ") };
        table.pair("names", names);
        table.pair("trust domain", self.domain.name());
        if let Some(record) = &self.named.record {
            came_from(&mut table, record);
        }
        let (entries, files) = (human_count(entries), human_count(files));
        table.pair("entries", format!("{entries}, {files} of them files"));
        table.pair("metadata", human_size(self.opened.image.size()));
        if let Some(base) = &self.base {
            table.pair("mounted over", base.base.to_string());
        }
        let (content, objects) = (human_size(content_bytes), plural(objects, "object"));
        table.pair("content", format!("{content} in {objects}"));
        table.pair(
            "protection",
            match (self.domain.protection().verity, self.immutable) {
                (true, _) => "every read is checked by the kernel (fs-verity)",
                (false, true) => {
                    "immutable files; what is read is not checked by the kernel (no fs-verity)"
                }
                (false, false) => "none but file modes; `cofolio verify` re-hashes",
            },
        );
        let ours = self.named.record.as_ref().and_then(|record| record.config.as_deref());
        let ours = trust::config_digest(ours);
        for signature in &self.signatures {
            let other = signature.config() != ours.as_deref();
            let config = if other { ", with another config" } else { "" };
            table.pair("signature", format!("{}{config} (not checked)", signature.shown()));
        }
        if let Some((_, config)) = &self.config {
            run_as(&mut table, config);
        }
        table
    }
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
#[derive(Clone, Copy, Default)]
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
