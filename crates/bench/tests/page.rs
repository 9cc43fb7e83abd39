//! `cofolio-bench page`: what a browser shows is what the results say.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "../../cofolio/tests/common/mod.rs"]
mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Sandbox, program, run_with_input, skip};
use serde_json::{Value, json};

const MIB: i64 = 1 << 20;

/// A result as `bench share --json` writes it, as far as it matters here.
fn result(name: &str, unshared: i64, shared: i64, bound: i64, ok: bool) -> Value {
    let medians =
        |memory: i64| json!({"memory": memory * MIB, "slab": 20 * MIB, "read_seconds": 1.0});
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let percent = |part: i64| part as f64 / unshared as f64 * 100.0;
    json!({
        "format": 1,
        "tool": "cofolio 0.1.0",
        "machine": {
            "kernel": "6.18.0", "architecture": "x86_64", "cpu": "A Processor", "cpus": 2,
            "memory": 24_i64 << 30, "filesystem": "ext4", "memory_cgroup": "v2",
        },
        "old": {"name": format!("{name}:1")},
        "new": {"name": format!("{name}:2")},
        "expected": {"files": 6600, "unique_pages": bound * 256, "unshared_pages": unshared * 256},
        "page_size": 4096,
        "summary": [{
            "mode": "read", "unshared": medians(unshared), "shared": medians(shared),
            "reduction_percent": percent(unshared - shared),
            "bound_percent": percent(unshared - bound), "over_unique_percent": 2.0,
        }],
        "checks": [{"what": "a check that was made", "ok": ok, "detail": "with these figures"}],
        "runs": [{"setup": "unshared", "mode": "read"}, {"setup": "cofolio", "mode": "read"}],
    })
}

/// The page of these results, and where it is.
fn page(sandbox: &Sandbox, results: &[Value]) -> (String, PathBuf) {
    let mut args = vec!["page".to_owned()];
    for (number, result) in results.iter().enumerate() {
        let path = sandbox.path(&format!("{number}.json"));
        fs::write(&path, result.to_string()).unwrap();
        args.push(path.to_str().unwrap().to_owned());
    }
    let html = sandbox.path("page.html");
    args.extend(["--html".to_owned(), html.to_str().unwrap().to_owned()]);
    sandbox.bench(&args).ok();
    (fs::read_to_string(&html).unwrap(), html)
}

#[test]
fn the_page_is_alone_and_says_what_failed() {
    let sandbox = Sandbox::new();
    let (html, _) = page(&sandbox, &[result("redis", 200, 120, 110, true)]);
    for needle in [
        "redis:1",
        "redis:2",
        "−40.0 %",
        "−45.0 %",
        "200.0",
        "120.0",
        "110.0",
        "6,600",
        "1 of 1 checks held",
    ] {
        assert!(html.contains(needle), "{needle}: {html}");
    }
    // Nothing is loaded, and nothing runs; an image's name is text.
    let (html, _) = page(&sandbox, &[result("<script src=//x>'\"", 200, 220, 110, false)]);
    for needle in ["<script", "http:", "https:", "url(", "@import", "<link", "<img", "javascript"] {
        assert!(!html.contains(needle), "{needle}: {html}");
    }
    assert!(html.contains("&lt;script"), "{html}");
    assert!(html.contains("+10.0 %") && html.contains("a check that was made"), "{html}");

    fs::write(sandbox.path("other.json"), r#"{"format": 1}"#).unwrap();
    let [other, out] = ["other.json", "out.html"].map(|name| sandbox.text(name));
    let ran = sandbox.bench(&["page", &other, "--html", &out]);
    assert!(ran.fails_with(1).stderr.contains("other.json"), "{}", ran.stderr);
    assert!(!Path::new(&out).exists());
}

/// What is archived can still be shown.
#[test]
fn archived_results_make_a_page() {
    let sandbox = Sandbox::new();
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/runs");
    let files =
        fs::read_dir(runs).unwrap().flat_map(|run| fs::read_dir(run.unwrap().path()).unwrap());
    let files = files.map(|file| file.unwrap().path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let results: Vec<Value> = files
        .filter(|path| name(path).starts_with("share-") && name(path).ends_with(".json"))
        .map(|path| serde_json::from_slice(&fs::read(path).unwrap()).unwrap())
        .collect();
    assert!(results.len() >= 6, "{}", results.len());
    let (html, _) = page(&sandbox, &results);
    assert!(html.contains("redis:7.0.15-1-deb12u7") && html.contains("−37.5 %"), "{html}");
}

/// A browser that draws to a file.
fn browser() -> Option<PathBuf> {
    ["chromium-headless-shell", "chromium"].into_iter().find_map(program)
}

fn chromium(sandbox: &Sandbox, args: &[&str], html: &Path) -> common::Ran {
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", "120"])
        .arg(browser().unwrap())
        // Its own sandbox does not let root in.
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", sandbox.text("profile")))
        .args(args)
        .arg(format!("file://{}", html.display()))
        .env("HOME", sandbox.dir("home"));
    run_with_input(command, b"")
}

/// Draws the page; longest horizontal run of pixels of each of these colours.
fn longest_runs(sandbox: &Sandbox, html: &Path, scheme: u8, colours: [[u8; 3]; 4]) -> [u32; 4] {
    let png = sandbox.path("shot.png");
    let shot = format!("--screenshot={}", png.display());
    let scheme = format!("--blink-settings=preferredColorScheme={scheme}");
    chromium(sandbox, &["--window-size=1000,1600", &scheme, &shot], html).ok();
    let file = std::io::BufReader::new(fs::File::open(&png).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    let samples = info.color_type.samples();
    assert_eq!((info.width, info.bit_depth), (1000, png::BitDepth::Eight));
    colours.map(|colour| {
        let rows = pixels[..info.buffer_size()].chunks(info.line_size);
        let longest = rows.map(|row| {
            let (mut run, mut longest) = (0, 0);
            for pixel in row.chunks(samples) {
                run = if pixel[..3] == colour { run + 1 } else { 0 };
                longest = longest.max(run);
            }
            longest
        });
        longest.max().unwrap()
    })
}

/// Bars are as long as their figures, on light and on dark screens, and the text is there: looked at in a
/// browser, as a reader would.
#[test]
fn a_browser_draws_the_bars() {
    const TEST: &str = "a_browser_draws_the_bars";
    if browser().is_none() {
        return skip(TEST, "neither chromium-headless-shell nor chromium is installed");
    }
    let sandbox = Sandbox::new();
    let (_, html) = page(&sandbox, &[result("redis", 200, 120, 50, true)]);
    let light = [[0xb4, 0xba, 0xc3], [0x0b, 0x7a, 0x6f], [0x8f, 0xcf, 0xc6], [0xfa, 0xf9, 0xf6]];
    let dark = [[0x59, 0x61, 0x6c], [0x2c, 0xc5, 0xb2], [0x1d, 0x67, 0x5e], [0x14, 0x17, 0x1b]];
    for (scheme, colours) in [(1, light), (0, dark)] {
        let [unshared, shared, bound, paper] = longest_runs(&sandbox, &html, scheme, colours);
        // The whole width is paper somewhere.
        assert_eq!(paper, 1000, "{scheme}");
        assert!(unshared > 400, "{scheme}: {unshared}");
        let near = |have: u32, of_200: u32| have.abs_diff(unshared * of_200 / 200) <= 2;
        assert!(near(shared, 120) && near(bound, 50), "{scheme}: {unshared} {shared} {bound}");
    }
    let dom = chromium(&sandbox, &["--dump-dom"], &html);
    let dom = dom.ok();
    assert!(dom.contains("redis:2</span>") && dom.contains("120.0 <small>MiB"), "{dom}");
}
