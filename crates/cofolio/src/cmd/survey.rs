use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use cofolio_node::engine::containers_storage::{Place, Storage};
use cofolio_node::survey::{self, Findings, Shared};
use serde::Serialize;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::progress::Counter;
use crate::ui::{Cell, Table, Tone, human_count, human_size, plural};

/// Say what Cofolio would save on this machine
///
/// Reads the images that podman has unpacked here, in place: every file of every layer is compared with all
/// others, whole and page by page, and so is what the page cache holds of them now. Nothing is changed: no
/// file, no access time, and the page cache holds afterwards what it held before. No store of Cofolio's is
/// needed. Root sees all; another user sees what is theirs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio survey\n  \
    cofolio survey --podman-root /srv/storage --json | jq .page_cache.all")]
pub(crate) struct Args {
    /// Look at podman's images only
    #[arg(long)]
    podman: bool,
    #[arg(
        help = "Where podman's images are [default: as its storage.conf says]",
        long,
        value_name = "DIR"
    )]
    podman_root: Option<PathBuf>,
    #[arg(
        help = "Threads that read files [default: one per processor, up to 4]",
        long,
        value_name = "N",
        default_value_t = 0,
        hide_default_value = true
    )]
    threads: usize,
}

/// Kernel memory for one name that was looked at through overlayfs, in bytes: 9.86 MB for 10,700 names in
/// each further container, measured on Linux 6.18 (`ls -lR`).
const NAME_BYTES: u64 = 921;

#[derive(Debug, Serialize)]
struct Report {
    stores: Vec<StoreReport>,
    files: u64,
    contents: u64,
    disk: Disk,
    page_cache: PageCache,
    metadata: Metadata,
    /// What the survey did not see, in words.
    unseen: Vec<String>,
    unseen_files: u64,
}

#[derive(Debug, Serialize)]
struct StoreReport {
    engine: &'static str,
    root: PathBuf,
    driver: String,
    images: u64,
    layers: u64,
    containers: u64,
    containers_mounted: u64,
}

#[derive(Debug, Serialize)]
struct Disk {
    bytes: u64,
    by_file_bytes: u64,
}

#[derive(Debug, Serialize)]
struct PageCache {
    now: Shared,
    all: Shared,
    pages_sampled: u64,
}

/// Kernel memory for inodes and directory entries of mounted containers if each looked at every name.
#[derive(Debug, Serialize)]
struct Metadata {
    estimated_bytes: u64,
    /// Once for each image, as with Cofolio's read-only mounts.
    read_only_estimated_bytes: u64,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let place = Place { driver: None, root: args.podman_root.clone() };
    let storage = Storage::open(&place)?;
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut layers = Vec::new();
    let mut unseen = Vec::new();
    for image in storage.images() {
        match storage.chain(&image.layer) {
            Ok(chain) => {
                for layer in chain {
                    seen.entry(&layer.id).or_insert_with(|| {
                        layers.push(layer);
                        layers.len() - 1
                    });
                }
            }
            Err(error) => unseen.push(format!("image {}: {error}", image.id)),
        }
    }
    let dirs: Vec<PathBuf> = layers.iter().map(|layer| storage.files(layer)).collect();
    let bar = Counter::new(context.ui, "surveying");
    let progress =
        |bytes, files| bar.set(bytes, || format!("{}, nothing is changed", plural(files, "file")));
    let found = survey::look(&dirs, args.threads, &progress);
    drop(bar);

    let containers = storage.containers()?;
    let mounted = mount_points(&mut unseen);
    let mounted: Vec<_> = containers
        .iter()
        .filter(|container| mounted.contains(&storage.mount_point(container)))
        .collect();
    if storage.driver() != "overlay" && !containers.is_empty() {
        unseen
            .push(format!("which containers run: the driver {} mounts nothing", storage.driver()));
    }
    let names = |image: &str| -> u64 {
        let image = storage.images().iter().find(|known| known.id == image);
        let chain = image.and_then(|image| storage.chain(&image.layer).ok()).unwrap_or_default();
        chain.iter().filter_map(|layer| found.names.get(*seen.get(layer.id.as_str())?)).sum()
    };
    let images: HashSet<&str> = mounted.iter().map(|container| container.image.as_str()).collect();
    let metadata = Metadata {
        estimated_bytes: mounted.iter().map(|c| names(&c.image) * NAME_BYTES).sum(),
        read_only_estimated_bytes: images.iter().map(|image| names(image) * NAME_BYTES).sum(),
    };
    if !args.podman && args.podman_root.is_none() {
        others(&mut unseen);
    }
    unseen.extend(found.reasons.iter().cloned());
    let store = StoreReport {
        engine: "podman",
        root: storage.root().to_owned(),
        driver: storage.driver().to_owned(),
        images: storage.images().len() as u64,
        layers: layers.len() as u64,
        containers: containers.len() as u64,
        containers_mounted: mounted.len() as u64,
    };
    let report = Report::new(store, &found, metadata, unseen);
    if context.ui.json {
        context.ui.json(&report)?;
    } else {
        show(&report, context)?;
    }
    Ok(Exit::Ok)
}

/// Where something is mounted.
fn mount_points(unseen: &mut Vec<String>) -> HashSet<PathBuf> {
    match std::fs::read_to_string("/proc/self/mountinfo") {
        // A space in a path would be written as an octal number; podman's root has none as a rule.
        Ok(text) => {
            text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from).collect()
        }
        Err(error) => {
            unseen.push(format!("which containers run: /proc/self/mountinfo: {error}"));
            HashSet::new()
        }
    }
}

/// Stores that are here and are not looked at.
fn others(unseen: &mut Vec<String>) {
    for (engine, path) in [
        ("containerd", "/var/lib/containerd/io.containerd.metadata.v1.bolt/meta.db"),
        ("Docker", "/var/lib/docker/image/overlay2"),
    ] {
        if Path::new(path).exists() {
            unseen.push(format!("{engine}'s images ({path}): podman's only are looked at so far"));
        }
    }
}

impl Report {
    fn new(store: StoreReport, found: &Findings, metadata: Metadata, unseen: Vec<String>) -> Self {
        Self {
            stores: vec![store],
            files: found.files,
            contents: found.contents,
            disk: Disk { bytes: found.disk_bytes, by_file_bytes: found.disk_by_file_bytes },
            page_cache: PageCache {
                now: found.resident,
                all: found.all,
                pages_sampled: found.pages_sampled,
            },
            metadata,
            unseen,
            unseen_files: found.unseen,
        }
    }
}

fn show(report: &Report, context: &Context<'_>) -> anyhow::Result<()> {
    let ui = context.ui;
    for store in &report.stores {
        ui.line(format!(
            "{} {} ({}): {}, {}, {}, {} of them mounted",
            ui.paint(Tone::Bold, store.engine),
            store.root.display(),
            store.driver,
            plural(store.images, "image"),
            plural(store.layers, "layer"),
            plural(store.containers, "container"),
            human_count(store.containers_mounted),
        ))?;
    }
    ui.line(format!(
        "{}, {} different\n",
        plural(report.files, "file"),
        human_count(report.contents)
    ))?;
    let mut table =
        Table::new(&["", "NOW", "EQUAL FILES ONCE", "SAVED", "EQUAL PAGES ONCE", "SAVED"]);
    let saved = |of: u64, left: u64| match of {
        0 => Cell::right("-"),
        #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
        of => {
            let part = of.saturating_sub(left) as f64 / of as f64;
            Cell::right(format!("{:.1} %", 100.0 * part)).tone(Tone::Good)
        }
    };
    let disk = &report.disk;
    table.row(vec![
        Cell::left("disk"),
        Cell::size(disk.bytes),
        Cell::size(disk.by_file_bytes),
        saved(disk.bytes, disk.by_file_bytes),
    ]);
    for (name, row) in [
        ("page cache, now", report.page_cache.now),
        ("page cache, all read", report.page_cache.all),
    ] {
        table.row(vec![
            Cell::left(name),
            Cell::size(row.bytes),
            Cell::size(row.by_file_bytes),
            saved(row.bytes, row.by_file_bytes),
            Cell::size(row.by_page_bytes),
            saved(row.bytes, row.by_page_bytes),
        ]);
    }
    ui.table(&table)?;
    if report.page_cache.pages_sampled > 1 {
        ui.line(format!("pages: estimated from one in {}", report.page_cache.pages_sampled))?;
    }
    ui.line("")?;
    let Metadata { estimated_bytes, read_only_estimated_bytes } = report.metadata;
    if estimated_bytes > 0 {
        ui.line(format!(
            "metadata of mounted containers, an estimate ({NAME_BYTES} bytes for each name looked at): \
             {} now and with writable mounts, {} with Cofolio's read-only mounts",
            human_size(estimated_bytes),
            human_size(read_only_estimated_bytes)
        ))?;
    }
    ui.line("not counted: what containers have changed, and Cofolio's own metadata images")?;
    for line in &report.unseen {
        ui.line(format!("{} {line}", ui.paint(Tone::Warn, "not seen:")))?;
    }
    let further = report.unseen_files.saturating_sub(report.unseen.len() as u64);
    if further > 0 {
        ui.line(format!(
            "{} {}",
            ui.paint(Tone::Warn, "not seen:"),
            plural(further, "further file")
        ))?;
    }
    Ok(())
}
