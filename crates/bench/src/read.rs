//! `cofolio-bench read IMAGE`: how fast files of an image are read from a cold start, out of a filesystem that has all of
//! it in one file and out of packs over segments. All ways are measured in turn, in the same run.

use std::{
    collections::HashSet,
    ffi::CString,
    fs::{self, File},
    io::{self, Read as _, Write},
    os::unix::{ffi::OsStrExt as _, fs::FileExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use cofolio_erofs::tree::Content;
use cofolio_image::{
    compose::named_objects::open_image,
    export::{FilesystemOptions, export_filesystem},
    pack::{ImageContents, PackOptions, pack, pack_segments, segment::Form},
};
use cofolio_node::settings::Backend;
use cofolio_node::{
    mount::{MountRequest, Mounter, UmountOptions},
    probe::{self, Presence},
    run_dir::RunDir,
};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, FileKind, FileName};
use rustix::mount::{MountFlags, UnmountFlags};
use serde::Serialize;

use super::{
    measure::cold_start,
    namespace::find,
    place::{Place, PlaceArgs, copy_image, with_backend},
    report,
};
use crate::Outcome;
use crate::median::median;
use cofolio_cli::exit::Exit;

/// Files from this size on are large.
const LARGE: u64 = 1 << 20;
const BLOCK: usize = 4096;

/// What the others are compared with, and what is to be compared.
const PLAIN: &str = "EROFS";
const PACK: &str = "pack";
/// What of the difference is the kernel's sharing, and what the pack.
const UNSHARED: &str = "pack, not shared";

/// How fast files of an image are read, from packs and from a plain filesystem
///
/// Reads files from a cold start, one way after the other: out of an EROFS image with everything in it, as `export` makes
/// it and, if there is a mkfs.erofs, as that does; and out of packs over segments, plain and compressed, shared by the
/// kernel where it can (Linux 7.0), and there a plain one without sharing, too. Large files in blocks of 1 MiB, all files,
/// and blocks of 4 KiB at random of the largest file. Needs root, and drops the page cache of the whole machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench read corpus/out/mysql/old --json read.json
  cofolio-bench read corpus/out/mysql/new --after corpus/out/mysql/old

Exit codes: 0 measured; others as for every command.")]
pub(crate) struct Args {
    /// Whatever `import` takes, or a ref of the store
    image: String,
    /// Another image that is packed before, so that what the two have in common is in its segments
    #[arg(long, value_name = "IMAGE")]
    after: Option<String>,
    /// Runs of each kind; the table has medians
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Blocks of 4 KiB to read at random
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    blocks: u32,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Everything that was measured.
#[derive(Serialize)]
struct Report {
    tool: String,
    machine: report::Machine,
    image: Digest,
    /// Files with content, each content once.
    files: usize,
    bytes: u64,
    large_files: usize,
    large_bytes: u64,
    /// Blocks of 4 KiB that are read at random.
    random_blocks: usize,
    rows: Vec<Row>,
    skipped: Vec<String>,
}

/// One way of reading.
#[derive(Default, Serialize)]
struct Row {
    name: &'static str,
    /// Size of its files, in bytes. Those of plain segments may be the objects' own.
    disk_bytes: u64,
    large: Figures,
    all: Figures,
    random: Figures,
}

/// Bytes a second, of each run, and the median.
#[derive(Default, Serialize)]
struct Figures {
    median: f64,
    runs: Vec<f64>,
}

impl Figures {
    fn add(&mut self, bytes: u64, started: Instant) {
        self.runs.push(bytes as f64 / started.elapsed().as_secs_f64());
        self.median = median(self.runs.iter().copied());
    }

    /// The median of what each round gives: a machine is not equally busy in all of them.
    fn share_of(&self, other: &Self) -> f64 {
        median(self.runs.iter().zip(&other.runs).map(|(own, other)| own / other))
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    let say = args.place.say();
    let Place { work, domain, _alone } = Place::prepare(&args.place, None, &say)?;
    let (name, image) = find(&args.image, &domain)?;
    let dir = work.join("read");
    let mut skipped = Vec::new();
    let mut images = vec![(name, image)];
    if let Some(before) = &args.after {
        images.insert(0, find(before, &domain)?);
    }
    let packed = domains(&domain, &images)?;
    let ways = ways(&dir, &domain, &image, &packed, &mut skipped)?;
    skipped.iter().for_each(|reason| say(&format!("SKIP {reason}")));
    let load = Load::new(&domain, &image, args.blocks as usize)?;
    let mut rows: Vec<Row> = ways
        .iter()
        .map(|way| Row { name: way.name, disk_bytes: way.disk_bytes, ..Row::default() })
        .collect();
    for round in 0..args.runs as usize {
        for turn in 0..ways.len() {
            // Nobody is always the first.
            let index = (round + turn) % ways.len();
            load.measure(&ways[index].top, &mut rows[index])?;
            say(&format!(
                "run {} of {}, {}: {}",
                round + 1,
                args.runs,
                rows[index].name,
                rows[index].last().map(shown).join(", ")
            ));
        }
    }
    drop(ways);
    let size = |files: &[(PathBuf, u64)]| files.iter().map(|(_, size)| size).sum();
    let report = Report {
        tool: format!("cofolio {}", env!("CARGO_PKG_VERSION")),
        machine: report::machine(&work, "not used".to_owned()),
        image,
        files: load.all.len(),
        bytes: size(&load.all),
        large_files: load.large.len(),
        large_bytes: size(&load.large),
        random_blocks: load.blocks.len(),
        rows,
        skipped,
    };
    if let Some(path) = &args.place.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    io::stdout().write_all(table(&report).as_bytes())?;
    Ok(Exit::Ok)
}

impl Row {
    fn last(&self) -> [f64; 3] {
        [&self.large, &self.all, &self.random].map(|it| it.runs.last().copied().unwrap_or(0.0))
    }
}

fn shown(rate: f64) -> String {
    format!("{:.1} MB/s", rate / 1e6)
}

/// What is read, by paths below a mount.
struct Load {
    /// Sorted by path.
    all: Vec<(PathBuf, u64)>,
    large: Vec<(PathBuf, u64)>,
    /// Offsets of blocks of the largest file, in the order in which they are read.
    blocks: Vec<u64>,
}

impl Load {
    fn new(domain: &Domain, image: &Digest, blocks: usize) -> Result<Self> {
        let file = domain.open_image(image)?;
        let tree = open_image(&file)?.to_tree()?;
        let (mut all, mut seen) = (Vec::new(), HashSet::new());
        for visit in tree.walk() {
            let content = tree.content(visit.inode);
            let Content::External { size, .. } = content else { continue };
            // A content that was read is warm under its other names, in one way and not in the other.
            if content.digest().is_some_and(|digest| seen.insert(*digest)) {
                let path = tree.path(visit.entry);
                let path = Path::new(std::ffi::OsStr::from_bytes(&path)).strip_prefix("/")?;
                all.push((path.to_owned(), size));
            }
        }
        all.sort();
        let large: Vec<_> = all.iter().filter(|(_, size)| *size >= LARGE).cloned().collect();
        let Some((_, largest)) = all.iter().max_by_key(|(_, size)| *size) else {
            bail!("the image has no files");
        };
        // Each once, in an order that is the same every time.
        let mut offsets: Vec<u64> = (0..largest / BLOCK as u64).map(|i| i * BLOCK as u64).collect();
        offsets
            .sort_by_key(|offset| (offset / BLOCK as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        offsets.truncate(blocks);
        Ok(Self { all, large, blocks: offsets })
    }

    /// Each part from a cold start.
    fn measure(&self, top: &Path, row: &mut Row) -> Result<()> {
        for (files, figures) in [(&self.large, &mut row.large), (&self.all, &mut row.all)] {
            cold_start()?;
            let started = Instant::now();
            let bytes = read_files(top, files)?;
            figures.add(bytes, started);
        }
        cold_start()?;
        let largest = self.all.iter().max_by_key(|(_, size)| *size).map(|(path, _)| top.join(path));
        let largest = largest.context("the image has no files")?;
        let file = File::open(&largest)?;
        let mut block = [0; BLOCK];
        let started = Instant::now();
        for offset in &self.blocks {
            file.read_exact_at(&mut block, *offset)
                .with_context(|| format!("cannot read {} at {offset}", largest.display()))?;
        }
        row.random.add(self.blocks.len() as u64 * BLOCK as u64, started);
        Ok(())
    }
}

/// Reads files to their ends; gives how many bytes that was.
fn read_files(top: &Path, files: &[(PathBuf, u64)]) -> Result<u64> {
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    for (path, size) in files {
        let path = top.join(path);
        let mut file =
            File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut found = 0;
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => found += count as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot read {}", path.display()));
                }
            }
        }
        ensure!(found == *size, "{} has {found} bytes, not {size}", path.display());
        total += found;
    }
    Ok(total)
}

/// A way in which the image is mounted, unmounted when it is dropped.
struct Way<'a> {
    name: &'static str,
    top: PathBuf,
    disk_bytes: u64,
    /// If it is a mount of the backend's.
    mounter: Option<Mounter<'a>>,
}

impl Drop for Way<'_> {
    fn drop(&mut self) {
        let _ = match &self.mounter {
            Some(mounter) => {
                let options = UmountOptions { force: true, ..UmountOptions::default() };
                mounter.umount(&self.top, &options).map(drop).map_err(|error| error.to_string())
            }
            None => rustix::mount::unmount(&self.top, UnmountFlags::DETACH)
                .map_err(|error| error.to_string()),
        };
    }
}

/// The domains whose packs are read, with what they are called.
fn domains(
    domain: &Domain,
    images: &[(String, Digest)],
) -> Result<[(Domain, Form, &'static str); 2]> {
    let own = |form, called| -> Result<_> {
        let own = with_backend(domain.clone(), Some(Backend::InodeShare.into()), form)?;
        for (name, image) in images {
            if !own.has_image(image)? {
                copy_image(domain, &own, name)?;
            }
            let options = PackOptions { form, ..PackOptions::default() };
            pack(&own, image, &options, &Task::default())?;
        }
        Ok((own, form, called))
    };
    Ok([own(Form::Plain, PACK)?, own(Form::Lz4, "pack, LZ4")?])
}

/// All ways that can be had here; why others cannot is added to `skipped`.
fn ways<'a>(
    dir: &Path,
    domain: &Domain,
    image: &Digest,
    packed: &'a [(Domain, Form, &'static str)],
    skipped: &mut Vec<String>,
) -> Result<Vec<Way<'a>>> {
    fs::create_dir_all(dir)?;
    let mut ways = Vec::new();
    for (file, compress, name) in [("plain", false, PLAIN), ("lz4", true, "EROFS, LZ4")] {
        let file = dir.join(file).with_extension("erofs");
        let options = FilesystemOptions { compress, replace: true };
        export_filesystem(domain, image, &file, options, &Task::default())?;
        ways.push(by_hand(dir, name, &file, &[])?);
    }
    match mkfs(dir, &ways[0].top) {
        Ok(file) => ways.push(by_hand(dir, "EROFS, mkfs.erofs", &file, &[])?),
        Err(error) => skipped.push(format!("mkfs.erofs: {error:#}")),
    }
    let report = probe::probe(&probe::Options::default());
    let lacks = report.get("inode-share").filter(|it| it.presence != Presence::Present);
    if let Some(lacks) = lacks {
        skipped.push(format!("inode-share, so packs are mounted without: {}", lacks.detail));
    }
    for (domain, form, name) in packed {
        let no_path = "the store is not on a disk";
        let pack =
            domain.packs_of(FileKind::Pack, image)?.pop().context("the image has no pack")?;
        let segments = pack_segments(&domain.open_named(&pack)?);
        let segments = segments.map_err(anyhow::Error::from_boxed)?;
        let file_of = |segment| FileName::content(FileKind::Segment, segment);
        let segments: Option<Vec<_>> =
            segments.iter().map(|segment| domain.named_path(&file_of(segment))).collect();
        let (file, segments) = domain.named_path(&pack).zip(segments).context(no_path)?;
        if lacks.is_some() {
            ways.push(by_hand(dir, name, &file, &segments)?);
            continue;
        }
        if *form == Form::Plain {
            ways.push(by_hand(dir, UNSHARED, &file, &segments)?);
        }
        let top = dir.join(name);
        let mounter = Mounter::new(domain, RunDir::of(domain.store())?, &ImageContents);
        mounter.mount(&MountRequest { create_target: true, ..MountRequest::new(*image, &top) })?;
        let disk_bytes = disk_bytes(&file, &segments)?;
        ways.push(Way { name, top, disk_bytes, mounter: Some(mounter) });
    }
    Ok(ways)
}

fn disk_bytes(file: &Path, devices: &[PathBuf]) -> Result<u64> {
    let mut bytes = file.metadata()?.len();
    for device in devices {
        bytes += device.metadata()?.len();
    }
    Ok(bytes)
}

/// Mounts an image from a file, read past the page cache of that, as backends do it.
fn by_hand<'a>(
    dir: &Path,
    name: &'static str,
    file: &Path,
    devices: &[PathBuf],
) -> Result<Way<'a>> {
    let top = dir.join(name);
    fs::create_dir_all(&top)?;
    let mut options = "directio".to_owned();
    for device in devices {
        options += &format!(",device={}", device.display());
    }
    rustix::mount::mount(file, &top, "erofs", MountFlags::RDONLY, &*CString::new(options)?)
        .with_context(|| format!("cannot mount {} ({name})", file.display()))?;
    let disk_bytes = disk_bytes(file, devices)?;
    Ok(Way { name, top, disk_bytes, mounter: None })
}

/// The image as mkfs.erofs makes it of a mount.
fn mkfs(dir: &Path, top: &Path) -> Result<PathBuf> {
    let file = dir.join("mkfs.erofs");
    match fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let ran = Command::new("mkfs.erofs").arg("--quiet").arg(&file).arg(top).output()?;
    ensure!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr).trim());
    Ok(file)
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "{} files with {:.1} MB, {} of at least 1 MiB with {:.1} MB, {} blocks at random; Linux {}\n\n",
        report.files,
        report.bytes as f64 / 1e6,
        report.large_files,
        report.large_bytes as f64 / 1e6,
        report.random_blocks,
        report.machine.kernel,
    );
    text += "| | on disk | large files | all files | 4 KiB at random |\n|---|--:|--:|--:|--:|\n";
    for row in &report.rows {
        let first = &report.rows[0];
        let rate = |own: &Figures, first: &Figures| {
            format!("{} ({:.2})", shown(own.median), own.share_of(first))
        };
        text += &format!(
            "| {} | {:.1} MB | {} | {} | {} |\n",
            row.name,
            row.disk_bytes as f64 / 1e6,
            rate(&row.large, &first.large),
            rate(&row.all, &first.all),
            rate(&row.random, &first.random),
        );
    }
    for reason in &report.skipped {
        text += &format!("\nnot measured: {reason}\n");
    }
    text
}
