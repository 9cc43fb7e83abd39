//! Progress: bars on a terminal, plain lines in a log, nothing with `--quiet` or `--json`.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cofolio_image::export::{How, PushProgress};
use cofolio_image::progress::{LayerStart, Phase, Progress};
use cofolio_image::registry::Remark;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::ui::{Ui, human_size};

/// In a log, one line each that often.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Redraws of a bar per second.
const REDRAWS_PER_SECOND: u8 = 10;

const STYLE: &str = "{spinner} {prefix} {binary_bytes} ({binary_bytes_per_sec}) {wide_msg}";
const STYLE_OF: &str = "{spinner} {prefix} [{bar:30}] {binary_bytes} of {binary_total_bytes} \
                        ({binary_bytes_per_sec}, {eta}) {wide_msg}";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Bar,
    Lines,
    Silent,
}

impl Mode {
    fn of(ui: &Ui) -> Self {
        if ui.quiet || ui.json {
            Self::Silent
        } else if io::stderr().is_terminal() {
            Self::Bar
        } else {
            Self::Lines
        }
    }

    fn bar(self, prefix: &'static str) -> ProgressBar {
        if self != Self::Bar {
            return ProgressBar::hidden();
        }
        let target = ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND);
        let bar = ProgressBar::with_draw_target(None, target).with_prefix(prefix);
        bar.set_style(style(STYLE));
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are ours; a wrong one would only look plain.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

/// A line of progress. Nobody has to be there to read it.
fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Bytes done of something, with a word on what else was done.
pub(crate) struct Counter {
    mode: Mode,
    what: &'static str,
    bar: ProgressBar,
    last_line: Mutex<Instant>,
}

impl Counter {
    pub(crate) fn new(ui: &Ui, what: &'static str) -> Self {
        let mode = Mode::of(ui);
        Self { mode, what, bar: mode.bar(what), last_line: Mutex::new(Instant::now()) }
    }

    /// So many bytes are done.
    pub(crate) fn set(&self, bytes: u64, message: impl FnOnce() -> String) {
        self.tell(bytes, None, message);
    }

    /// So many bytes of so many are done.
    pub(crate) fn set_of(&self, bytes: u64, total: u64, message: impl FnOnce() -> String) {
        self.tell(bytes, Some(total), message);
    }

    fn tell(&self, bytes: u64, total: Option<u64>, message: impl FnOnce() -> String) {
        match self.mode {
            Mode::Silent => {}
            Mode::Bar => {
                if let Some(total) = total.filter(|_| self.bar.length().is_none()) {
                    self.bar.set_length(total);
                    self.bar.set_style(style(STYLE_OF));
                }
                self.bar.set_position(bytes);
                // Called for every file; texts are made only as often as somebody can read them.
                if self.is_due(Duration::from_millis(100)) {
                    self.bar.set_message(message());
                }
            }
            Mode::Lines => {
                if self.is_due(LINE_INTERVAL) {
                    let of = total.map(|total| format!(" of {}", human_size(total)));
                    let of = of.unwrap_or_default();
                    tell(&format!("{}: {}{of}, {}", self.what, human_size(bytes), message()));
                }
            }
        }
    }

    fn is_due(&self, interval: Duration) -> bool {
        // Whoever finds it locked need not tell: somebody else just does.
        let Ok(mut last) = self.last_line.try_lock() else { return false };
        let due = last.elapsed() >= interval;
        if due {
            *last = Instant::now();
        }
        due
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The progress of reading an image or a directory.
pub(crate) struct Bar {
    mode: Mode,
    bar: ProgressBar,
    layers: Mutex<Vec<Layer>>,
}

#[derive(Clone, Copy, Default)]
struct Layer {
    size: u64,
    started: bool,
}

impl Bar {
    pub(crate) fn new(ui: &Ui, what: &'static str) -> Self {
        let mode = Mode::of(ui);
        Self { mode, bar: mode.bar(what), layers: Mutex::new(Vec::new()) }
    }
}

impl Bar {
    /// Where remarks go, so that they do not get in the way of the bar.
    pub(crate) fn remark(&self) -> Remark {
        remark(self.mode, &self.bar)
    }
}

fn remark(mode: Mode, bar: &ProgressBar) -> Remark {
    let bar = bar.clone();
    Remark::to(move |text| match mode {
        Mode::Silent => {}
        Mode::Bar => bar.println(text),
        Mode::Lines => tell(text),
    })
}

impl Progress for Bar {
    fn phase(&self, phase: Phase) {
        let text = match phase {
            Phase::Resolve | Phase::Unpack => return,
            Phase::Image => "writing the metadata image",
            Phase::Commit => "making it durable",
            Phase::Again => {
                "once more: garbage collection took something that this import relied on"
            }
            _ => return,
        };
        match self.mode {
            Mode::Silent => {}
            Mode::Bar => self.bar.set_message(text),
            Mode::Lines => tell(text),
        }
    }

    fn layer(&self, layer: &LayerStart<'_>) {
        if self.mode == Mode::Silent {
            return;
        }
        let digest: String = layer.digest.chars().take(19).collect();
        let known = if layer.known { ", here already" } else { "" };
        let line = format!(
            "layer {}/{} {digest} {}{known}",
            layer.index + 1,
            layer.count,
            human_size(layer.size)
        );
        match self.mode {
            Mode::Bar => self.bar.println(line),
            _ => tell(&line),
        }
        if layer.known {
            return;
        }
        let Ok(mut layers) = self.layers.lock() else { return };
        let count = layers.len().max(layer.index + 1);
        layers.resize(count, Layer::default());
        layers[layer.index] = Layer { size: layer.size, started: true };
        // Layers start one by one, so the end moves away as they do.
        let total = layers.iter().filter(|layer| layer.started).map(|layer| layer.size).sum();
        if self.bar.length().is_none() {
            self.bar.set_style(style(STYLE_OF));
        }
        self.bar.set_length(total);
    }

    fn bytes(&self, _index: usize, bytes: u64) {
        if self.mode == Mode::Bar {
            self.bar.inc(bytes);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The progress of a push: bytes sent of what nobody knows the size of.
pub(crate) struct Pushing {
    counter: Counter,
    /// Bytes of each layer.
    sent: Mutex<BTreeMap<usize, u64>>,
}

impl Pushing {
    pub(crate) fn new(ui: &Ui) -> Self {
        Self { counter: Counter::new(ui, "pushing"), sent: Mutex::default() }
    }

    /// Where remarks go, so that they do not get in the way of the bar.
    pub(crate) fn remark(&self) -> Remark {
        remark(self.counter.mode, &self.counter.bar)
    }
}

impl PushProgress for Pushing {
    fn layer(&self, number: usize, count: usize, how: How, blob: Option<(&str, u64)>) {
        let how = match how {
            How::There => "there already",
            How::Mounted => "mounted from another repository",
            How::Sent => "to be sent",
        };
        let which = blob.map(|(digest, size)| {
            let digest: String = digest.chars().take(19).collect();
            format!(" {digest} {}", human_size(size))
        });
        let which = which.unwrap_or_default();
        let line = format!("layer {}/{count}{which}, {how}", number + 1);
        match self.counter.mode {
            Mode::Silent => {}
            Mode::Bar => self.counter.bar.println(line),
            Mode::Lines => tell(&line),
        }
    }

    fn sent(&self, number: usize, bytes: u64) {
        let Ok(mut sent) = self.sent.lock() else { return };
        sent.insert(number, bytes);
        let all = sent.values().sum();
        self.counter.set(all, || match sent.len() {
            1 => "1 layer".to_owned(),
            count => format!("{count} layers"),
        });
    }
}
