use std::collections::HashSet;
use std::path::{Path, PathBuf};

use cofolio_image::error::EngineError;
use cofolio_image::source::engine::containerd::{self, Containerd};
use cofolio_image::source::engine::containers_storage::{self, Storage};
use cofolio_image::source::engine::{Container, Inventory, LiveMounts, docker};
use cofolio_node::survey::{self, Findings};
use serde::Serialize;
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};
use crate::ui::{Cell, Table, Tone, human_count, human_size, percent, plural};

/// Say what Cofolio would save on this machine
///
/// Reads the images that podman, containerd (Kubernetes) and Docker have unpacked here, in place: every file
/// of every layer is compared with all others, whole and page by page, and so is what the page cache holds of
/// them now. Nothing is changed: no file, no access time, and the page cache holds afterwards what it held
/// before. No store of Cofolio's is needed. Root sees all; another user sees what is theirs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio survey\n  \
    cofolio survey --containerd --json | jq .page_cache.all\n  \
    cofolio survey --podman-root /srv/storage --docker")]
pub(crate) struct Args {
    /// Look at podman's images (default: at those of each engine that is here)
    #[arg(long)]
    podman: bool,
    /// Where podman's images are (default: as its storage.conf says)
    #[arg(long, value_name = "DIR")]
    podman_root: Option<PathBuf>,
    /// Look at containerd's images, of all namespaces
    #[arg(long)]
    containerd: bool,
    /// Where containerd's images are (default: as its config.toml says)
    #[arg(long, value_name = "DIR")]
    containerd_root: Option<PathBuf>,
    /// Look at Docker's images, also those that it keeps with containerd
    #[arg(long)]
    docker: bool,
    /// Where Docker's images are (default: as its daemon.json says)
    #[arg(long, value_name = "DIR")]
    docker_root: Option<PathBuf>,
    /// Threads that read files (default: one per processor, up to 4)
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

/// Kernel memory for one name that was looked at through overlayfs, in bytes: 9.86 MB for 10,700 names in
/// each further container, measured on Linux 6.18 (`ls -lR`).
const NAME_BYTES: u64 = 921;

/// Kernel memory for inodes and directory entries of mounted containers if each looked at every name.
#[derive(Debug, Default, Serialize)]
struct Metadata {
    estimated_bytes: u64,
    /// Once for each image, as with Cofolio's read-only mounts.
    read_only_estimated_bytes: u64,
    containers: Vec<ContainerReport>,
}

#[derive(Debug, Serialize)]
struct ContainerReport {
    engine: &'static str,
    id: String,
    /// Names in its layers.
    names: u64,
    estimated_bytes: u64,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let mut unseen = Vec::new();
    let mounts = survey::live_mounts().unwrap_or_else(|error| {
        unseen.push(format!("which containers run: /proc/thread-self/mountinfo: {error}"));
        LiveMounts::default()
    });
    let stores = stores(args, &mounts)?;
    let dirs: Vec<PathBuf> = stores.iter().flat_map(|store| store.layers.clone()).collect();
    let look = |task: &_| survey::look(&dirs, args.threads, task);
    let found = context.work("surveying", "file", look)?;

    unseen.extend(stores.iter().flat_map(|store| store.unseen.clone()));
    unseen.extend(found.reasons.iter().cloned());
    let metadata = Metadata::new(&stores, &found.names);
    if context.ui.json {
        let stores = stores.iter().map(|store| {
            json!({
                "engine": store.engine,
                "root": store.root,
                "driver": store.driver,
                "images": store.images,
                "layers": store.layers.len(),
                "containers": store.containers.len(),
                "containers_mounted": mounted(store),
            })
        });
        context.ui.json(&json!({
            "stores": stores.collect::<Vec<_>>(),
            "files": found.files,
            "contents": found.contents,
            "disk": {"bytes": found.disk_bytes, "by_file_bytes": found.disk_by_file_bytes},
            "page_cache": {
                "now": found.resident,
                "all": found.all,
                "pages_sampled": found.pages_sampled,
            },
            "metadata": metadata,
            "unseen": unseen,
            "unseen_files": found.unseen,
        }))?;
    } else {
        show(context, &stores, &found, &metadata, &unseen)?;
    }
    Ok(Exit::Ok)
}

/// Containers that are mounted now.
fn mounted(store: &Inventory) -> u64 {
    store.containers.iter().filter(|container| container.mounted).count() as u64
}

/// Inventories of the requested engines, or of all engines that are here.
fn stores(args: &Args, mounts: &LiveMounts) -> anyhow::Result<Vec<Inventory>> {
    let podman = args.podman || args.podman_root.is_some();
    let containerd = args.containerd || args.containerd_root.is_some();
    let docker = args.docker || args.docker_root.is_some();
    let all = !(podman || containerd || docker);

    let mut stores = Vec::new();
    let place = containers_storage::Location { driver: None, root: args.podman_root.clone() };
    if podman || all && Storage::is_at(&place) {
        stores.push(Storage::open(&place)?.inventory(mounts)?);
    }
    let place = containerd::Location { root: args.containerd_root.clone(), namespace: None };
    let containerd = containerd || all && Containerd::is_at(&place);
    if containerd {
        stores.push(Containerd::open(&place)?.inventory(mounts)?);
    }
    if docker || all {
        let root = docker::root(args.docker_root.as_deref())?;
        // A Docker with another root does not use the machine's containerd.
        let machines = !containerd && args.docker_root.is_none();
        let found = of_docker(&root, machines, mounts)?;
        if found.is_empty() && docker {
            let what = format!("{}: no images of Docker's here", root.display());
            return Err(Fail::not_found(what).into());
        }
        stores.extend(found);
    }
    if stores.is_empty() {
        let what = "no images of podman, containerd or Docker are here, or none of this user";
        return Err(Fail::not_found(what).into());
    }
    Ok(stores)
}

/// What Docker has in its own store, with a containerd of its own, and with the machine's.
fn of_docker(root: &Path, machines: bool, mounts: &LiveMounts) -> anyhow::Result<Vec<Inventory>> {
    let mut stores: Vec<_> = docker::inventory(root, mounts)?.into_iter().collect();
    let mut roots = vec![Some(docker::own_containerd(root))];
    if machines {
        roots.push(None);
    }
    for root in roots {
        let place = containerd::Location { root, namespace: Some("moby".into()) };
        if !Containerd::is_at(&place) {
            continue;
        }
        let store = match Containerd::open(&place) {
            // It lacks this namespace.
            Err(EngineError::NotFound { .. }) => continue,
            other => other?,
        };
        let found = store.inventory(mounts)?;
        // Docker uses containerd's namespace for running containers, wherever its images are.
        if found.images > 0 || !found.layers.is_empty() {
            stores.push(found);
        }
    }
    Ok(stores)
}

impl Metadata {
    fn new(stores: &[Inventory], names: &[u64]) -> Self {
        let mut metadata = Self::default();
        let mut names = names;
        for store in stores {
            let (own, rest) = names.split_at(store.layers.len().min(names.len()));
            names = rest;
            let mut images = HashSet::new();
            for Container { id, layers, mounted } in &store.containers {
                if !mounted {
                    continue;
                }
                let names = layers.iter().filter_map(|&layer| own.get(layer)).sum();
                let estimated_bytes = names * NAME_BYTES;
                metadata.estimated_bytes += estimated_bytes;
                if images.insert(layers) {
                    metadata.read_only_estimated_bytes += estimated_bytes;
                }
                let (engine, id) = (store.engine, id.clone());
                metadata.containers.push(ContainerReport { engine, id, names, estimated_bytes });
            }
        }
        metadata
    }
}

fn show(
    context: &Context<'_>,
    stores: &[Inventory],
    found: &Findings,
    metadata: &Metadata,
    unseen: &[String],
) -> anyhow::Result<()> {
    let ui = context.ui;
    for store in stores {
        ui.line(format!(
            "{} {} ({}): {}, {}, {}, {} of them mounted",
            ui.paint(Tone::Bold, store.engine),
            store.root.display(),
            store.driver,
            plural(store.images, "image"),
            plural(store.layers.len() as u64, "layer"),
            plural(store.containers.len() as u64, "container"),
            human_count(mounted(store)),
        ))?;
    }
    ui.line(format!(
        "{}, {} different\n",
        plural(found.files, "file"),
        human_count(found.contents)
    ))?;
    ui.table(&savings(found))?;
    if found.pages_sampled > 1 {
        ui.line(format!("pages: estimated from one in {}", found.pages_sampled))?;
    }
    ui.line("")?;
    if !metadata.containers.is_empty() {
        ui.line(format!(
            "metadata of {}, an estimate ({NAME_BYTES} bytes for each name looked at): \
             {} now and with writable mounts, {} with Cofolio's read-only mounts",
            plural(metadata.containers.len() as u64, "mounted container"),
            human_size(metadata.estimated_bytes),
            human_size(metadata.read_only_estimated_bytes)
        ))?;
    }
    ui.line("not counted: what containers have changed, and Cofolio's own metadata images")?;
    for line in unseen {
        ui.line(format!("{} {line}", ui.paint(Tone::Warn, "not seen:")))?;
    }
    let further = found.unseen.saturating_sub(unseen.len() as u64);
    if further > 0 {
        let further = plural(further, "further file");
        ui.line(format!("{} {further}", ui.paint(Tone::Warn, "not seen:")))?;
    }
    Ok(())
}

/// What is held now, and what it would be with equal content held once.
fn savings(found: &Findings) -> Table {
    let mut table =
        Table::new(&["", "NOW", "EQUAL FILES ONCE", "SAVED", "EQUAL PAGES ONCE", "SAVED"]);
    let saved = |of: u64, left: u64| match of {
        0 => Cell::right("-"),
        of => {
            let part = percent(of.saturating_sub(left), of);
            Cell::right(format!("{part:.1} %")).tone(Tone::Good)
        }
    };
    table.row(vec![
        Cell::left("disk"),
        Cell::size(found.disk_bytes),
        Cell::size(found.disk_by_file_bytes),
        saved(found.disk_bytes, found.disk_by_file_bytes),
    ]);
    for (name, row) in [("page cache, now", found.resident), ("page cache, all read", found.all)] {
        table.row(vec![
            Cell::left(name),
            Cell::size(row.bytes),
            Cell::size(row.by_file_bytes),
            saved(row.bytes, row.by_file_bytes),
            Cell::size(row.by_page_bytes),
            saved(row.bytes, row.by_page_bytes),
        ]);
    }
    table
}
