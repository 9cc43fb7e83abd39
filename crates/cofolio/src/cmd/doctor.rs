use cofolio_image::pack::segment::Form;
use cofolio_node::probe::{self, Feature, Need, Presence};
use cofolio_node::settings::{Backend, DomainSettings as _};
use cofolio_store::{Digest, Domain, Refs};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone, plural};

/// Tell what this kernel, filesystem and machine offer, and what is missing
///
/// Everything is found out by trying. What is missing is listed with what it would be used for and what
/// is worse without it. Exit code 5 if something is missing without which nothing can be mounted, 4 if the
/// store, or a record of it, cannot be read.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio doctor\n  \
    cofolio doctor --json | jq -r '.features[] | select(.presence != \"present\") | .name'")]
pub(crate) struct Args {
    /// Also say what each feature is used for
    #[arg(short, long)]
    long: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let ui = context.ui;
    let store_path = &context.global.store;
    // The store's filesystem is tried where the store is, or will be.
    let place = store_path.ancestors().find(|path| path.is_dir()).map(std::path::Path::to_owned);
    let report = probe::probe(&probe::Options { store: place, ..probe::Options::default() });
    let store = Store::look(context);
    let is_root = rustix::process::geteuid().is_root();
    let exit = match (report.can_mount(), &store.errors[..]) {
        (false, _) => Exit::Missing,
        (true, []) => Exit::Ok,
        (true, _) if !is_root => Exit::Missing,
        (true, _) => Exit::Corrupt,
    };

    if ui.json {
        ui.json(&json!({
            "kernel": report.kernel,
            "can_mount": report.can_mount(),
            "features": report.features,
            "store": store.json(),
        }))?;
        return Ok(exit);
    }

    let mut table = Table::plain();
    table.pair("kernel", &report.kernel);
    for (name, value) in &store.lines {
        table.pair(name, value);
    }
    for error in &store.errors {
        let hint = if is_root { "see `cofolio fsck`" } else { "run as root" };
        table.pair("problem", format!("{error} ({hint})"));
    }
    ui.table(&table)?;
    ui.line("")?;

    ui.table(&features(&report.features, args.long))?;

    let is_missing = |f: &&Feature| f.presence == Presence::Absent && f.need != Need::Optional;
    let missing: Vec<_> = report.features.iter().filter(is_missing).collect();
    if !missing.is_empty() {
        ui.line("")?;
        ui.line(ui.paint(Tone::Bold, "Not here, and what that means:"))?;
        for feature in missing {
            let (_, tone) = mark(feature);
            ui.line(format!("  {}: {}", ui.paint(tone, feature.name), feature.without))?;
        }
    }
    ui.line("")?;
    ui.line(match report.can_mount() {
        true => ui.paint(Tone::Good, "Images can be mounted on this machine."),
        false => ui.paint(Tone::Bad, "Images cannot be mounted here: see what is required above."),
    })?;
    Ok(exit)
}

/// `long`: also what each is used for.
fn features(features: &[Feature], long: bool) -> Table {
    let mut table = match long {
        true => Table::new(&["FEATURE", "HERE", "FOUND", "USED FOR"]),
        false => Table::new(&["FEATURE", "HERE", "FOUND"]),
    };
    for feature in features {
        let (mark, tone) = mark(feature);
        let mut row = vec![
            Cell::left(feature.name),
            Cell::left(mark).tone(tone),
            Cell::left(&feature.detail),
        ];
        if long {
            row.push(Cell::left(feature.used_for).tone(Tone::Dim));
        }
        table.row(row);
    }
    table
}

fn mark(feature: &Feature) -> (&'static str, Tone) {
    match (feature.presence, feature.need) {
        (Presence::Present, _) => ("yes", Tone::Good),
        (Presence::Unknown, _) => ("unknown", Tone::Warn),
        (Presence::Absent, Need::Required) => ("MISSING", Tone::Bad),
        (Presence::Absent, Need::Recommended) => ("missing", Tone::Warn),
        (Presence::Absent, Need::Optional) => ("no", Tone::Dim),
    }
}

/// Limits of the backend. A test for each fails when a kernel lifts it.
const INODE_SHARE: &str = "inode-share: what sendfile and splice read is not shared; O_DIRECT is refused; compressed and plain content do not share; images stay mounted below until the \
                           last of the domain is unmounted";

/// The store in a few lines. Errors are listed, not returned: doctor must work when things fail.
struct Store {
    lines: Vec<(&'static str, String)>,
    errors: Vec<String>,
}

impl Store {
    fn look(context: &Context<'_>) -> Self {
        let path = context.global.store.display().to_string();
        let store = match cofolio_store::Store::open(&context.global.store) {
            Ok(store) => store,
            Err(cofolio_store::Error::NotAStore { .. }) => {
                let lines =
                    vec![("store", format!("{path}: none yet (the first import makes it)"))];
                return Self { lines, errors: Vec::new() };
            }
            Err(error) => {
                let error = format!("{:#}", anyhow::Error::new(error));
                let lines = vec![("store", format!("{path}: {error}"))];
                return Self { lines, errors: vec![error] };
            }
        };
        let protection = store.protection();
        let lines = vec![("store", format!("{path} (id {})", store.id()))];
        let mut found = Self { lines, errors: Vec::new() };
        found.line(
            "verified",
            match (protection.verity, protection.immutable) {
                (true, _) => "by the kernel, every read (fs-verity)",
                (false, true) => {
                    "at import, by `verify` and `mount --verify`; objects are immutable, \
                     but the kernel does not check what is read (no fs-verity here)"
                }
                (false, false) => {
                    "at import, by `verify` and `mount --verify` only (no fs-verity, no \
                     immutable files here), so the first mount of an image asks for the size of \
                     every object: 2 us each, and their inodes take kernel memory"
                }
            },
        );
        if let Some(feature) = store.read_only_because() {
            let text = format!("it uses `{feature}`, which this version does not know");
            found.line("read-only", text);
        }
        if let Some(domains) = found.get(store.domains()) {
            found.line("trust domains", domains.join(", "));
        }
        if let Some(domain) = found.get(store.domain(&context.global.domain)) {
            found.look_into(&domain, context);
        }
        if let Some(Some(problem)) = found.get(store.open_to_others()) {
            found.line("permissions", format!("{problem} (`cofolio fsck --repair` mends it)"));
        }
        if let Some(orphans @ 1..) = found.get(store.orphaned_staging().map(|found| found.len())) {
            let text = format!("{orphans} interrupted imports (`cofolio gc` removes them)");
            found.line("leftovers", text);
        }
        found
    }

    /// What the trust domain in use has.
    fn look_into(&mut self, domain: &Domain, context: &Context<'_>) {
        let backend = domain.backend().and_then(|backend| Ok((backend, domain.pack_form()?)));
        if let Some((Backend::InodeShare, form)) = self.get(backend) {
            self.line("backend", INODE_SHARE);
            if form == Form::Lz4 {
                self.line("packs", "compressed with LZ4");
            }
        }
        if let Some(images) = self.get(domain.images()) {
            self.count(domain, &images);
        }
        let list = || anyhow::Ok(context.mounter(domain)?.list()?.orphans.len());
        let mounts = list();
        if let Some(orphans @ 1..) = self.get(mounts) {
            let orphans = plural(orphans as u64, "mount");
            let go_on = "`cofolio mounts` says how to go on";
            self.line("mounts", format!("{orphans} without a record: {go_on}"));
        }
    }

    /// Counts images and their names, and images that were left unprotected.
    fn count(&mut self, domain: &Domain, images: &[Digest]) {
        let protection = domain.protection();
        let open = images.iter().filter(|image| {
            let file = domain.open_image(image);
            file.is_ok_and(|file| file.is_immutable().is_ok_and(|immutable| !immutable))
        });
        let open = if protection.verity || !protection.immutable { 0 } else { open.count() };
        let Some(Refs { readable, unreadable }) = self.get(domain.all_refs()) else { return };
        let names = plural((readable.len() + unreadable.len()) as u64, "name");
        self.line("images", format!("{}, under {names}", images.len()));
        if open > 0 {
            let text = "without the immutable flag, as in a copied store: their first mount \
                        asks for the size of every object; `cofolio gc` sets the flags";
            self.line("unprotected", format!("{} {text}", plural(open as u64, "image")));
        }
        for it in unreadable {
            self.get::<(), _>(Err(it.error));
        }
    }

    fn line(&mut self, name: &'static str, text: impl Into<String>) {
        self.lines.push((name, text.into()));
    }

    /// What is there; an error is listed.
    fn get<T, E: Into<anyhow::Error>>(&mut self, found: Result<T, E>) -> Option<T> {
        found.map_err(|error| self.errors.push(format!("{:#}", error.into()))).ok()
    }

    fn json(&self) -> serde_json::Value {
        let lines =
            self.lines.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into()));
        let mut object: serde_json::Map<_, _> = lines.collect();
        let error = (!self.errors.is_empty()).then(|| self.errors.join("; "));
        object.insert("error".to_owned(), error.into());
        object.into()
    }
}
