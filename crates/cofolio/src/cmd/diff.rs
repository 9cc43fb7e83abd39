use std::io::{self, IsTerminal, Write};
use std::time::Instant;

use cofolio_image::diff::pages::{self, PageReport};
use cofolio_image::diff::{Change, ChangeKind, Diff, PAGE_SIZE, Side, Tally};
use cofolio_store::Domain;
use serde_json::{Value, json};

use crate::cmd::Outcome;
use crate::context::{Context, Named, short};
use crate::exit::Exit;
use crate::image::kind_word;
use crate::ui::{Cell, Table, Tone, human_count, human_size, percent, plural, printable};

/// Compare two images: what they share, what differs, what sharing saves
///
/// Files are compared by content, whatever their names: what is in both is in memory once when both are
/// mounted. Paths are compared one by one. Then the content of both is read, to find equal pages in files
/// that are not equal: what sharing by page would add.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio diff redis:7.0.14 redis:7.0.15\n  \
    cofolio diff redis:7.0.14 redis:7.0.15 --files --no-pages")]
pub(crate) struct Args {
    /// Ref or first digits of a digest
    a: String,
    /// The image to compare it with
    b: String,
    /// List the paths that differ, and how
    #[arg(long)]
    files: bool,
    /// Do not look for equal pages: only metadata is read then
    #[arg(long)]
    no_pages: bool,
}

/// Both images compared, with the page report and its duration in seconds.
struct Compared {
    images: [Named; 2],
    diff: Diff,
    pages: Option<(PageReport, f64)>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let images = [context.image(&domain, &args.a)?, context.image(&domain, &args.b)?];
    let mut listed = Listed { json: context.ui.json, values: Vec::new(), lines: Vec::new() };
    let diff = Diff::of(&domain, [&images[0].digest, &images[1].digest], &mut |change| {
        if args.files {
            listed.add(change);
        }
    })?;
    let pages = if args.no_pages { None } else { Some(pages_of(&diff, &domain, context)?) };
    let compared = Compared { images, diff, pages };
    if context.ui.json {
        let mut value = compared.json();
        if args.files {
            value["changes"] = listed.values.into();
        }
        return context.ui.json(&value);
    }
    compared.print(context)?;
    if !listed.lines.is_empty() {
        context.ui.line("")?;
        let mut out = io::stdout().lock();
        let terminal = io::stdout().is_terminal();
        for (kind, what, path) in &listed.lines {
            write!(out, "{}  {what:LISTED_WIDTH$}  ", word(*kind))?;
            match terminal {
                true => out.write_all(printable(path).as_bytes())?,
                false => out.write_all(path)?,
            }
            out.write_all(b"\n")?;
        }
    }
    Ok(Exit::Ok)
}

fn pages_of(
    diff: &Diff,
    domain: &Domain,
    context: &Context<'_>,
) -> anyhow::Result<(PageReport, f64)> {
    let started = Instant::now();
    let report = context.work("hashing pages", "file", |task| {
        pages::compare(domain, diff, pages::MEMORY_DEFAULT, task)
    })?;
    Ok((report, started.elapsed().as_secs_f64()))
}

/// Room for `content, mode, owner`; longer ones are rare, and only push their path aside.
const LISTED_WIDTH: usize = 20;

/// Paths that differ, in order, as they will be printed.
struct Listed {
    json: bool,
    values: Vec<Value>,
    lines: Vec<(ChangeKind, String, Vec<u8>)>,
}

impl Listed {
    fn add(&mut self, change: &Change<'_>) {
        let aspects: Vec<&str> = change.aspects.iter().map(|aspect| aspect.as_str()).collect();
        if self.json {
            let size = |inode: Option<&cofolio_erofs::read::Inode>| inode.map(|inode| inode.size);
            self.values.push(json!({
                "path": printable(change.path),
                "change": change.kind,
                "differs": aspects,
                "type": change.b.or(change.a).map(|inode| kind_word(inode.mode)),
                "size_a": size(change.a),
                "size_b": size(change.b),
            }));
            return;
        }
        let what = match (change.a, change.b) {
            (Some(inode), None) | (None, Some(inode)) if inode.is_file() => human_size(inode.size),
            (Some(inode), None) | (None, Some(inode)) => kind_word(inode.mode).to_owned(),
            // The first column says `content` already.
            _ => {
                let more = aspects.iter().filter(|aspect| **aspect != "content");
                more.copied().collect::<Vec<_>>().join(", ")
            }
        };
        self.lines.push((change.kind, what, change.path.to_vec()));
    }
}

/// What happened to a path, at one width.
fn word(kind: ChangeKind) -> &'static str {
    match kind {
        ChangeKind::Added => "added   ",
        ChangeKind::Removed => "removed ",
        ChangeKind::Content => "content ",
        ChangeKind::Metadata => "metadata",
    }
}

impl Compared {
    fn json(&self) -> Value {
        let diff = &self.diff;
        let side = |named: &Named, side: &Side| {
            let mut value = json!(side);
            value["image"] = json!(named.digest);
            value["name"] = json!(named.ref_name);
            value
        };
        json!({
            "a": side(&self.images[0], &diff.a),
            "b": side(&self.images[1], &diff.b),
            "shared": diff.shared,
            "only_a": diff.only_a,
            "only_b": diff.only_b,
            "paths": diff.paths,
            "page_size": PAGE_SIZE,
            "unshared_pages": diff.pages_unshared(),
            "equal_files_pages": diff.pages_by_file(),
            "pages": self.pages.map(|(report, seconds)| {
                let mut value = json!(report);
                value["seconds"] = json!((seconds * 1000.0).round() / 1000.0);
                value
            }),
        })
    }

    fn print(&self, context: &Context<'_>) -> anyhow::Result<()> {
        let ui = context.ui;
        for (number, table) in
            [self.sides(), self.contents(), self.paths(), self.memory()].iter().enumerate()
        {
            if number > 0 {
                ui.line("")?;
            }
            ui.table(table)?;
        }
        if let Some((report, seconds)) = &self.pages {
            let memory = |pages| human_size(pages * PAGE_SIZE);
            ui.line("")?;
            ui.line(format!(
                "Equal pages in files that differ: {} ({}) of what only A has are in B too, {} ({}) \
                 of what only B has are in A.",
                plural(report.a_in_b_pages, "page"),
                memory(report.a_in_b_pages),
                plural(report.b_in_a_pages, "page"),
                memory(report.b_in_a_pages),
            ))?;
            let again = match report.passes {
                1 => String::new(),
                passes => format!(", in {passes} passes"),
            };
            ui.note(format!(
                "to know this: {} read and hashed in {seconds:.1} s, {} of memory{again}",
                human_size(report.read_bytes),
                human_size(report.memory_bytes)
            ));
        }
        Ok(())
    }

    fn sides(&self) -> Table {
        let mut table = Table::new(&["", "NAME", "IMAGE", "FILES", "OBJECTS", "CONTENT"]);
        let sides = [("A", &self.diff.a), ("B", &self.diff.b)];
        for ((letter, side), named) in sides.into_iter().zip(&self.images) {
            table.row(vec![
                Cell::left(letter),
                Cell::left(named.ref_name.as_deref().unwrap_or("<none>")).tone(Tone::Bold),
                Cell::left(short(&named.digest)),
                Cell::right(human_count(side.files)),
                Cell::right(human_count(side.content.objects)),
                Cell::size(side.content.bytes),
            ]);
        }
        table
    }

    fn contents(&self) -> Table {
        let diff = &self.diff;
        let mut table = Table::new(&["CONTENT", "OBJECTS", "SIZE", "OF A", "OF B"]);
        let mut row = |what: &str, tally: &Tally, of: &[Option<&Side>]| {
            let mut cells = vec![
                Cell::left(what),
                Cell::right(human_count(tally.objects)),
                Cell::size(tally.bytes),
            ];
            cells.extend(of.iter().map(|side| {
                Cell::right(side.map_or_else(String::new, |side| {
                    format!("{:.1} %", percent(tally.bytes, side.content.bytes))
                }))
            }));
            table.row(cells);
        };
        row("in both", &diff.shared, &[Some(&diff.a), Some(&diff.b)]);
        row("only in A", &diff.only_a, &[Some(&diff.a)]);
        row("only in B", &diff.only_b, &[None, Some(&diff.b)]);
        table
    }

    fn paths(&self) -> Table {
        let paths = &self.diff.paths;
        let mut table = Table::new(&["PATHS", ""]);
        let metadata = match paths.only_mtime {
            0 => String::new(),
            only => format!("{} of them in nothing but time", human_count(only)),
        };
        for (what, count, remark) in [
            ("the same", paths.same, ""),
            ("other content", paths.content, ""),
            ("other metadata", paths.metadata, metadata.as_str()),
            ("removed (only in A)", paths.removed, ""),
            ("added (only in B)", paths.added, ""),
        ] {
            let mut row = vec![Cell::left(what), Cell::right(human_count(count))];
            if !remark.is_empty() {
                row.push(Cell::left(remark).tone(Tone::Dim));
            }
            table.row(row);
        }
        table
    }

    fn memory(&self) -> Table {
        let diff = &self.diff;
        let unshared = diff.pages_unshared();
        let mut table = Table::new(&["TO READ ALL OF BOTH", "MEMORY", "SAVED"]);
        let mut row = |what: &str, pages: u64| {
            let saved = percent(unshared.saturating_sub(pages), unshared);
            table.row(vec![
                Cell::left(what),
                Cell::size(pages.saturating_mul(PAGE_SIZE)),
                Cell::right(format!("{saved:.1} %")),
            ]);
        };
        row("each unpacked", unshared);
        row("equal files shared", diff.pages_by_file());
        if let Some((report, _)) = &self.pages {
            row("equal pages shared", report.distinct_pages);
        }
        table
    }
}
