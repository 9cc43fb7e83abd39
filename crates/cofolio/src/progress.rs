//! Progress: bars on a terminal, plain lines in a log, nothing with `--quiet` or `--json`.

use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cofolio_cli::interrupt::Cancellable;
use cofolio_store::task::{Event, LayerState, Phase, Task};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::ui::{Ui, human_count, human_size, plural};

/// Time between two lines in a log.
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

/// Prints a line of progress; a closed standard error is no failure.
fn print(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Work that takes long: shows how it goes on, and Ctrl-C cancels it, until this is dropped.
pub(crate) struct Work {
    pub(crate) task: Task,
    shown: Arc<Shown>,
    _signals: Cancellable,
}

impl Work {
    /// `doing` names the work (`packing`), `item` what is counted beside bytes (`file`).
    pub(crate) fn begin(ui: &Ui, doing: &'static str, item: &'static str) -> io::Result<Self> {
        let signals = Cancellable::begin()?;
        let shown = Arc::new(Shown::new(ui, doing, item));
        let shows = shown.clone();
        let task = Task::new(signals.cancel.clone(), move |event| shows.show(event));
        Ok(Self { task, shown, _signals: signals })
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.shown.bar.finish_and_clear();
    }
}

/// How a task goes on, on a terminal or in a log.
struct Shown {
    mode: Mode,
    doing: &'static str,
    item: &'static str,
    bar: ProgressBar,
    last: Mutex<Instant>,
}

impl Shown {
    fn new(ui: &Ui, doing: &'static str, item: &'static str) -> Self {
        let mode = Mode::of(ui);
        Self { mode, doing, item, bar: mode.bar(doing), last: Mutex::new(Instant::now()) }
    }

    /// Shows an event. Called from several threads, for every file.
    fn show(&self, event: Event<'_>) {
        if self.mode == Mode::Silent {
            return;
        }
        match event {
            Event::Phase(phase) => self.phase(phase),
            Event::Layer { index, count, state, blob } => self.layer(index, count, state, blob),
            Event::Read(bytes) => self.bar.inc(bytes),
            Event::Done { bytes, bytes_total, items, items_total } => {
                self.done(bytes, bytes_total, || self.counted(items, items_total));
            }
            Event::Remark(text) => self.say(text),
            _ => {}
        }
    }

    /// A line beside the bar.
    fn say(&self, text: &str) {
        match self.mode {
            Mode::Bar => self.bar.println(text),
            _ => print(text),
        }
    }

    fn phase(&self, phase: Phase) {
        let text = match phase {
            Phase::Image => "writing the metadata image",
            Phase::Commit => "making it durable",
            Phase::Again => {
                "once more: garbage collection took something that this import relied on"
            }
            _ => return,
        };
        match self.mode {
            Mode::Bar => self.bar.set_message(text),
            _ => print(text),
        }
    }

    fn layer(&self, index: usize, count: usize, state: LayerState, blob: Option<(&str, u64)>) {
        let which = blob.map(|(digest, size)| {
            let digest: String = digest.chars().take(19).collect();
            format!(" {digest} {}", human_size(size))
        });
        let state_words = match state {
            LayerState::Known => ", here already",
            LayerState::There => ", there already",
            LayerState::Mounted => ", mounted from another repository",
            LayerState::Sent => ", to be sent",
            _ => "",
        };
        self.say(&format!("layer {}/{count}{}{state_words}", index + 1, which.unwrap_or_default()));
        if state == LayerState::Read {
            // Layers start one by one, so the end moves away as they do.
            let size = blob.map_or(0, |(_, size)| size);
            self.set_total(self.bar.length().unwrap_or(0) + size);
        }
    }

    fn set_total(&self, total: u64) {
        if self.bar.length().is_none() {
            self.bar.set_style(style(STYLE_OF));
        }
        self.bar.set_length(total);
    }

    fn counted(&self, items: u64, total: Option<u64>) -> String {
        match (items, total) {
            (0, _) => format!("{}s", self.item),
            (items, None) => plural(items, self.item),
            (items, Some(total)) => {
                format!("{} of {}", human_count(items), plural(total, self.item))
            }
        }
    }

    fn done(&self, bytes: u64, total: Option<u64>, message: impl FnOnce() -> String) {
        if self.mode == Mode::Bar {
            if let Some(total) = total.filter(|total| self.bar.length() != Some(*total)) {
                self.set_total(total);
            }
            self.bar.set_position(bytes);
            // Texts are made only as often as a person can read them.
            if self.is_due(Duration::from_millis(100)) {
                self.bar.set_message(message());
            }
        } else if self.is_due(LINE_INTERVAL) {
            let of = total.map_or_else(String::new, |total| format!(" of {}", human_size(total)));
            print(&format!("{}: {}{of}, {}", self.doing, human_size(bytes), message()));
        }
    }

    fn is_due(&self, interval: Duration) -> bool {
        // Another thread that holds the lock is about to show something newer.
        let Ok(mut last) = self.last.try_lock() else { return false };
        let due = last.elapsed() >= interval;
        if due {
            *last = Instant::now();
        }
        due
    }
}
