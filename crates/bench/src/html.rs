//! Results of `bench share` as a page for a browser: one file that loads nothing and runs nothing.
//!
//! Made from the JSON that `--json` writes, so that archived results can be shown, too.

use std::{fmt::Write as _, fs, path::Path, path::PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::Outcome;
use cofolio_cli::{exit::Exit, exit::Fail, ui::human_count};

/// Make a page for a browser of results that `share --json` wrote
///
/// One file with bars and a table for all of them, which loads nothing from elsewhere.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  cofolio-bench page bench/runs/*/share-*.json --html share.html")]
pub(crate) struct Args {
    /// Files that `bench share --json` wrote
    #[arg(required = true, value_name = "RESULT")]
    results: Vec<PathBuf>,
    /// The page
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
}

pub(super) fn run(args: &Args) -> Outcome {
    let mut results = Vec::new();
    for path in &args.results {
        let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let value: Value =
            serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        Pair::of(&value)
            .with_context(|| format!("{} is no result of `bench share`", path.display()))?;
        results.push(value);
    }
    write(&args.html, &results)?;
    Ok(Exit::Ok)
}

/// Writes the page of these results, which are in the form of `--json`.
pub(super) fn write(path: &Path, results: &[Value]) -> Result<()> {
    let pairs = results.iter().map(Pair::of).collect::<Result<Vec<_>>>()?;
    fs::write(path, page(&pairs)).with_context(|| format!("cannot write {}", path.display()))
}

/// The part of a result that the page shows.
#[derive(Debug, Deserialize)]
struct Pair {
    format: u32,
    tool: String,
    machine: Machine,
    old: Image,
    new: Image,
    expected: Expected,
    page_size: u64,
    summary: Vec<Summary>,
    checks: Vec<Check>,
    runs: Vec<Run>,
}

#[derive(Debug, Deserialize, PartialEq)]
struct Machine {
    kernel: String,
    architecture: String,
    cpu: String,
    cpus: u64,
    memory: u64,
    filesystem: String,
}

#[derive(Debug, Deserialize)]
struct Image {
    name: String,
}

#[derive(Debug, Deserialize)]
struct Expected {
    files: u64,
    unique_pages: u64,
}

#[derive(Debug, Deserialize)]
struct Summary {
    mode: String,
    unshared: Medians,
    shared: Medians,
    reduction_percent: f64,
    bound_percent: f64,
    over_unique_percent: f64,
}

#[derive(Debug, Deserialize)]
struct Medians {
    memory: i64,
    slab: i64,
}

#[derive(Debug, Deserialize)]
struct Check {
    what: String,
    ok: bool,
    detail: String,
}

#[derive(Debug, Deserialize)]
struct Run {
    setup: String,
    mode: String,
}

impl Pair {
    fn of(value: &Value) -> Result<Self> {
        let pair = Self::deserialize(value)?;
        if pair.format != 1 {
            return Err(Fail::usage(format!("its format is {}, not 1", pair.format)).into());
        }
        Ok(pair)
    }

    /// Bytes of the distinct contents of both: the least that sharing of equal files can reach.
    fn bound(&self) -> i64 {
        i64::try_from(self.expected.unique_pages.saturating_mul(self.page_size)).unwrap_or(i64::MAX)
    }
}

/// Text as it may stand in the page: names come from images.
fn text(raw: &str) -> String {
    let mut safe = String::with_capacity(raw.len());
    for c in raw.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

#[allow(clippy::cast_precision_loss, reason = "a size for people")]
fn mib(bytes: i64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// A change in percent, with a real minus sign.
fn less(percent: f64) -> String {
    let percent = if percent.abs() < 0.05 { 0.0 } else { percent };
    let sign = if percent > 0.0 {
        "−"
    } else if percent < 0.0 {
        "+"
    } else {
        ""
    };
    format!("{sign}{:.1} %", percent.abs())
}

const STYLE: &str = include_str!("page.css");

fn page(pairs: &[Pair]) -> String {
    let mut html = String::new();
    let _ = write!(
        html,
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Cofolio: memory that sharing saves</title>
<style>
{STYLE}</style>
</head>
<body>
<main>
<header>
<p class="brand">Cofolio <span>one copy of every page</span></p>
<h1>Reading every file of two versions of an image</h1>
<p class="lead">Page cache that it takes, from a cold start: each version unpacked on its own, as container engines
do it, and both mounted by Cofolio, where equal files are in memory once.</p>
<ul class="legend">
<li><i class="unshared"></i>not shared</li>
<li><i class="shared"></i>Cofolio, its metadata included</li>
<li><i class="bound"></i>the least that sharing equal files can reach</li>
</ul>
</header>
<section class="pairs">
"#
    );
    for pair in pairs {
        card(&mut html, pair);
    }
    html.push_str("</section>\n");
    table(&mut html, pairs);
    checks(&mut html, pairs);
    machines(&mut html, pairs);
    html.push_str(METHOD);
    html.push_str("</main>\n</body>\n</html>\n");
    html
}

const METHOD: &str = r#"<section class="method">
<h2>Method</h2>
<p>The page cache of the whole machine is dropped. A fresh process in a fresh memory cgroup then reads every regular
file of both mounts, by read(2) or by mmap(2), and every byte is compared with the source. Memory is the growth of the
machine's page cache; it has to agree with mincore(2) of every file that can hold the content, and with what the
cgroup was charged. Figures are medians. Bars are drawn for the first way of reading; the table has all.</p>
<p>The least that sharing equal files can reach is the distinct contents of both images, in whole pages, without a
byte of metadata. <code>cofolio-bench share --help</code> repeats the measurement on any two images.</p>
</section>
"#;

/// Bars of one pair. Their lengths are in proportion within a pair; pairs of any size can stand side by side.
fn card(html: &mut String, pair: &Pair) {
    let Some(summary) = pair.summary.first() else { return };
    let bars = [
        ("unshared", "not shared", summary.unshared.memory),
        ("shared", "Cofolio", summary.shared.memory),
        ("bound", "at least", pair.bound()),
    ];
    let longest = bars.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0).max(1);
    let _ = write!(
        html,
        "<article>\n<h2><span>{}</span> <span>{}</span></h2>\n<p class=\"saved\">{} <span>at most {}</span></p>\n<dl>\n",
        text(&pair.old.name),
        text(&pair.new.name),
        less(summary.reduction_percent),
        less(summary.bound_percent),
    );
    for (class, name, bytes) in bars {
        #[allow(clippy::cast_precision_loss, reason = "a length on a screen")]
        let width = bytes.max(0) as f64 / longest as f64 * 100.0;
        let _ = writeln!(
            html,
            "<dt>{name}</dt><dd class=\"bar\"><i class=\"{class}\" style=\"width:{width:.2}%\"></i></dd><dd class=\"size\">{} <small>MiB</small></dd>",
            mib(bytes),
        );
    }
    html.push_str("</dl>\n</article>\n");
}

fn table(html: &mut String, pairs: &[Pair]) {
    html.push_str(
        "<section>\n<h2>Figures</h2>\n<div class=\"wide\">\n<table>\n<thead><tr><th>images</th><th class=\"mode\">by</th>\
         <th>not shared<small>MiB</small></th><th>Cofolio<small>MiB</small></th><th>reduction</th>\
         <th>at most</th><th>over unique<small>contents</small></th>\
         <th>kernel objects<small>not shared → Cofolio, MiB</small></th>\
         <th>files</th><th>runs</th></tr></thead>\n<tbody>\n",
    );
    for pair in pairs {
        for (number, summary) in pair.summary.iter().enumerate() {
            let name = match number {
                0 => format!(
                    "<th rowspan=\"{}\">{}<br>{}</th>",
                    pair.summary.len(),
                    text(&pair.old.name),
                    text(&pair.new.name)
                ),
                _ => String::new(),
            };
            let runs = pair.runs.iter().filter(|run| run.mode == summary.mode);
            let setups = runs.clone().map(|run| run.setup.as_str());
            let setups = setups.collect::<std::collections::BTreeSet<_>>().len().max(1);
            let _ = writeln!(
                html,
                "<tr>{name}<td class=\"mode\">{}</td><td>{}</td><td>{}</td><td class=\"strong\">{}</td><td>{}</td>\
                 <td>{:+.1} %</td><td>{} → {}</td><td>{}</td><td>{}</td></tr>",
                text(&summary.mode),
                mib(summary.unshared.memory),
                mib(summary.shared.memory),
                less(summary.reduction_percent),
                less(summary.bound_percent),
                summary.over_unique_percent,
                mib(summary.unshared.slab),
                mib(summary.shared.slab),
                human_count(pair.expected.files),
                runs.count() / setups,
            );
        }
    }
    html.push_str("</tbody>\n</table>\n</div>\n</section>\n");
}

fn checks(html: &mut String, pairs: &[Pair]) {
    let made: usize = pairs.iter().map(|pair| pair.checks.len()).sum();
    let failed: Vec<_> = pairs
        .iter()
        .flat_map(|pair| pair.checks.iter().map(move |check| (pair, check)))
        .filter(|(_, check)| !check.ok)
        .collect();
    html.push_str("<section>\n<h2>Do the figures agree?</h2>\n");
    if failed.is_empty() {
        let _ = writeln!(
            html,
            "<p><b class=\"good\">Yes.</b> {made} of {made} checks held: every byte read is the source’s, \
             resident pages are exactly the expected ones, and the ways of measuring agree.</p>"
        );
    } else {
        let _ = writeln!(
            html,
            "<p><b class=\"bad\">No.</b> {} of {made} checks failed:</p>\n<ul>",
            failed.len()
        );
        for (pair, check) in failed {
            let _ = writeln!(
                html,
                "<li>{}: {} <small>{}</small></li>",
                text(&pair.new.name),
                text(&check.what),
                text(&check.detail)
            );
        }
        html.push_str("</ul>\n");
    }
    html.push_str("</section>\n");
}

fn machines(html: &mut String, pairs: &[Pair]) {
    html.push_str("<section>\n<h2>Machine</h2>\n");
    let mut shown: Vec<(&Machine, &str)> = Vec::new();
    for pair in pairs {
        let this = (&pair.machine, pair.tool.as_str());
        if shown.contains(&this) {
            continue;
        }
        shown.push(this);
        let machine = &pair.machine;
        let _ = writeln!(
            html,
            "<p>{} ({}), {} CPUs, {} GiB of memory, Linux {}, {}. Measured by {}.</p>",
            text(&machine.cpu),
            text(&machine.architecture),
            machine.cpus,
            // To the nearest: what the kernel keeps for itself is not in it.
            (machine.memory + (1 << 29)) >> 30,
            text(&machine.kernel),
            text(&machine.filesystem),
            text(&pair.tool),
        );
    }
    html.push_str("</section>\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_text() {
        assert_eq!(text("<b a=\"'&\u{1b}"), "&lt;b a=&quot;&#39;&amp;\u{fffd}");
        assert_eq!([less(37.52), less(-2.0), less(-0.01)], ["−37.5 %", "+2.0 %", "0.0 %"]);
    }
}
