//! Terminal output: colours, aligned tables, sizes and times for people, JSON for scripts.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use crate::exit::Exit;

/// When to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColorWhen {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// How the user wants to be talked to.
#[derive(Clone, Debug)]
pub struct Ui {
    /// JSON on standard output instead of text.
    pub json: bool,
    /// Requested results only: no progress, no remarks, no summaries.
    pub quiet: bool,
    color_out: bool,
    color_err: bool,
}

/// What a word means; its colour follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// No colour.
    Plain,
    /// A heading.
    Bold,
    /// Less important.
    Dim,
    /// As it should be.
    Good,
    /// Worth a look.
    Warn,
    /// An error.
    Bad,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Good => "32",
            Self::Warn => "33",
            Self::Bad => "31",
        }
    }
}

impl Ui {
    /// `json`: results as JSON; `quiet`: results only; `color`: when to colour.
    pub fn new(json: bool, quiet: bool, color: ColorWhen) -> Self {
        let wanted = |terminal: bool| match color {
            ColorWhen::Always => true,
            ColorWhen::Never => false,
            // no-color.org: present and not empty.
            ColorWhen::Auto => {
                terminal
                    && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
                    && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
            }
        };
        Self {
            json,
            quiet,
            color_out: wanted(io::stdout().is_terminal()),
            color_err: wanted(io::stderr().is_terminal()),
        }
    }

    /// Whether standard output is coloured.
    pub fn has_color(&self) -> bool {
        self.color_out
    }

    /// Colour a word of standard output.
    pub fn paint(&self, tone: Tone, text: &str) -> String {
        paint(self.color_out, tone, text)
    }

    /// Print one line of results.
    pub fn line(&self, text: impl AsRef<str>) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_ref().as_bytes())?;
        out.write_all(b"\n")
    }

    /// Print a value as JSON, indented, with a line end. Returns the code of success.
    pub fn json(&self, value: &impl Serialize) -> anyhow::Result<Exit> {
        let mut text = serde_json::to_vec_pretty(value)?;
        text.push(b'\n');
        let mut out = io::stdout().lock();
        out.write_all(&text)?;
        out.flush()?;
        Ok(Exit::Ok)
    }

    /// A remark on standard error, unless the user wants none, or is a script.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.quiet && !self.json {
            let _ = writeln!(io::stderr(), "{}", harmless(text.as_ref()));
        }
    }

    /// Prints an error on standard error, always. Foreign text that it quotes is escaped.
    pub fn error(&self, text: &str, hint: Option<&str>) {
        let (text, hint) = (harmless(text), hint.map(harmless));
        let mut err = io::stderr().lock();
        let _ = writeln!(err, "{} {text}", paint(self.color_err, Tone::Bad, "cofolio:"));
        if let Some(hint) = hint {
            let _ = writeln!(err, "{} {hint}", paint(self.color_err, Tone::Bold, "hint:"));
        }
    }

    /// Print a table; nothing where it has no rows and no headers. Returns the code of success.
    pub fn table(&self, table: &Table) -> anyhow::Result<Exit> {
        io::stdout().lock().write_all(table.render(self.color_out).as_bytes())?;
        Ok(Exit::Ok)
    }
}

fn paint(on: bool, tone: Tone, text: &str) -> String {
    match tone.code() {
        "" => text.to_owned(),
        _ if !on => text.to_owned(),
        code => format!("\x1b[{code}m{text}\x1b[0m"),
    }
}

/// One cell of a table.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    tone: Tone,
    right: bool,
}

impl Cell {
    /// Flush left.
    pub fn left(text: impl Into<String>) -> Self {
        Self { text: text.into(), tone: Tone::Plain, right: false }
    }

    /// Flush right, for numbers.
    pub fn right(text: impl Into<String>) -> Self {
        Self { text: text.into(), tone: Tone::Plain, right: true }
    }

    /// A size in bytes, flush right.
    pub fn size(bytes: u64) -> Self {
        Self::right(human_size(bytes))
    }

    /// The same cell in another colour.
    #[must_use]
    pub fn tone(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }
}

/// Rows of cells under headers, aligned.
#[derive(Clone, Debug, Default)]
pub struct Table {
    headers: Vec<String>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with headers.
    pub fn new(headers: &[&str]) -> Self {
        Self { headers: headers.iter().map(|&h| h.to_owned()).collect(), rows: Vec::new() }
    }

    /// A table of names and values, without headers.
    pub fn plain() -> Self {
        Self::default()
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// A row of a plain table.
    pub fn pair(&mut self, name: &str, value: impl Into<String>) {
        self.row(vec![Cell::left(name).tone(Tone::Dim), Cell::left(value)]);
    }

    /// The same, indented: below a line that it is about.
    pub fn detail(&mut self, name: &str, value: impl Into<String>) {
        self.pair(&format!("  {name}"), value);
    }

    /// The table as text.
    pub fn render(&self, color: bool) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0).max(self.headers.len());
        let mut widths = vec![0; columns];
        for (width, header) in widths.iter_mut().zip(&self.headers) {
            *width = header.chars().count();
        }
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.text.chars().count());
            }
        }
        let right: Vec<bool> = (0..columns)
            .map(|c| self.rows.iter().any(|row| row.get(c).is_some_and(|x| x.right)))
            .collect();
        let mut text = String::new();
        if !self.headers.is_empty() {
            let cells = self.headers.iter().zip(&right);
            let cells = cells.map(|(h, &right)| Cell { text: h.clone(), tone: Tone::Bold, right });
            render_row(&mut text, &cells.collect::<Vec<_>>(), &widths, color);
        }
        for row in &self.rows {
            render_row(&mut text, row, &widths, color);
        }
        text
    }
}

fn render_row(text: &mut String, cells: &[Cell], widths: &[usize], color: bool) {
    for (i, (cell, &width)) in cells.iter().zip(widths).enumerate() {
        if i > 0 {
            text.push_str("  ");
        }
        let pad = width.saturating_sub(cell.text.chars().count());
        if cell.right {
            text.extend(std::iter::repeat_n(' ', pad));
        }
        text.push_str(&paint(color, cell.tone, &cell.text));
        // The last column needs no padding: trailing blanks get in the way of copying.
        if !cell.right && i + 1 < cells.len() {
            text.extend(std::iter::repeat_n(' ', pad));
        }
    }
    text.push('\n');
}

/// A size for people: three significant digits, binary units.
pub fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mut value = bytes as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        // 1023.95 would be printed as 1024.0.
        if value < 1023.95 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

/// A part of a whole in percent; 0 of nothing.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

/// A count for people: thousands set apart.
pub fn human_count(count: u64) -> String {
    indicatif::HumanCount(count).to_string()
}

/// A count with its noun: `1 object`, `2,000 objects`.
pub fn plural(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", human_count(count), if count == 1 { "" } else { "s" })
}

/// Seconds since 1970 as `2026-11-21 01:23:45` in UTC; `-` for 0, which records use for unknown.
pub fn date(seconds: i64) -> String {
    let time = jiff::Timestamp::from_second(seconds).ok().filter(|_| seconds != 0);
    time.map_or_else(|| "-".to_owned(), |time| time.strftime("%F %T").to_string())
}

/// How long ago, in words.
pub fn ago(seconds: i64) -> String {
    match u64::try_from(cofolio_store::now().saturating_sub(seconds)) {
        Ok(age) if seconds != 0 => {
            format!("{} ago", indicatif::HumanDuration(Duration::from_secs(age)))
        }
        _ => date(seconds),
    }
}

/// Text for a terminal: keeps line ends, escapes all other control characters.
fn harmless(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if drives_terminals(c) && c != '\n' {
            escape(c, &mut clean);
        } else {
            clean.push(c);
        }
    }
    clean
}

/// Control characters, and those that reverse the direction and make `txt.exe` look like `exe.txt`.
fn drives_terminals(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escape(c: char, text: &mut String) {
    let mut bytes = [0; 4];
    for byte in c.encode_utf8(&mut bytes).bytes() {
        let _ = write!(text, "\\x{byte:02x}");
    }
}

/// A file name for a terminal: control characters and what is not UTF-8 as `\xNN`, so that no image
/// can write escape sequences to the operator's terminal.
pub fn printable(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if drives_terminals(c) || c == '\\' {
                escape(c, &mut text);
            } else {
                text.push(c);
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_counts_dates() {
        assert_eq!(human_size(0), "0 B");
        assert_eq!(human_size(1023), "1023 B");
        assert_eq!(human_size(1024), "1.0 KiB");
        assert_eq!(human_size(1024 * 1024 - 1), "1.0 MiB");
        assert_eq!(human_size(496 << 20), "496.0 MiB");
        assert_eq!(human_size(u64::MAX), "16.0 EiB");
        assert_eq!(human_count(0), "0");
        assert_eq!(human_count(999), "999");
        assert_eq!(human_count(1_234_567), "1,234,567");
        assert_eq!(date(0), "-");
        assert_eq!(date(1_000_000_000), "2001-09-09 01:46:40");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(date(-1), "1969-12-31 23:59:59");
        assert!(!date(i64::MAX).is_empty() && !date(i64::MIN).is_empty());
        assert!(!ago(i64::MIN).is_empty() && !ago(i64::MAX).is_empty());
    }

    #[test]
    fn names_cannot_drive_the_terminal() {
        assert_eq!(printable(b"plain.txt"), "plain.txt");
        assert_eq!(printable("é\u{1b}[2J\n".as_bytes()), "é\\x1b[2J\\x0a");
        assert_eq!(printable(b"\xff\\"), "\\xff\\x5c");
        assert_eq!(printable("\u{9b}".as_bytes()), "\\xc2\\x9b");
        assert_eq!(printable("\u{202e}txt".as_bytes()), "\\xe2\\x80\\xaetxt");
        assert_eq!(harmless("a\\b\nc\u{1b}[2J\r"), "a\\b\nc\\x1b[2J\\x0d");
    }

    #[test]
    fn tables_align() {
        let mut table = Table::new(&["NAME", "SIZE"]);
        table.row(vec![Cell::left("a"), Cell::size(5)]);
        table.row(vec![Cell::left("long-name"), Cell::size(2048).tone(Tone::Good)]);
        assert_eq!(
            table.render(false),
            "NAME          SIZE\na              5 B\nlong-name  2.0 KiB\n"
        );
        assert!(table.render(true).contains("\x1b[32m2.0 KiB\x1b[0m"));
    }
}
