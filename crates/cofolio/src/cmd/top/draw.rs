//! The state on a screen of any size.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use super::app::{App, Screen, count};
use super::rows::{Column, Row};
use super::summary::{Totals, caveats, page_cache, warnings};

/// Lines over the rows: title, totals, where we are, headers. And those below: caveats, keys.
const ABOVE: u16 = 4;
const BELOW: u16 = 2;
/// What the first column keeps at least, and in percent of the width, before another one is
/// dropped. The mark of the cursor is part of it.
const NAME_MIN: usize = 16;
const NAME_PERCENT: usize = 30;
/// Columns of text other than the first get this at most.
const TEXT_MAX: usize = 24;
const GAP: usize = 2;

const HELP: &[&str] = &[
    "Up Down j k PgUp PgDn Home End   move",
    "Enter   open: files, then their users",
    "Esc     back, or clear the filter",
    "Tab     images or containers",
    "s < >   sort by another column",
    "r       reverse the order",
    "/       filter: Enter keeps, Esc clears",
    "p       pause",
    "q       end (so does Ctrl-C)",
    "",
    "RESIDENT      bytes in the page cache, in whole pages",
    "USED          resident bytes that containers mapped or opened",
    "SHARED        of an image: named by another image too;",
    "              of a container: used by another container too",
    "PRIVATE       the rest of RESIDENT, or of USED",
    "PROPORTIONAL  each object divided by the number of its users",
    "SAVED         what the page cache would hold more if each image",
    "              had its own copy of what its containers use",
    "unknown       openers of no known container, overflows: opened files were",
    "              lost, as their queue was full or there was no time for it;",
    "              processes, images and opened files that could not be",
    "              read, mounts that cannot be watched",
];

/// Rows that a screen of this size has room for.
pub(super) fn page(area: Rect) -> usize {
    usize::from(area.height.saturating_sub(ABOVE + BELOW))
}

/// Draws everything. Without colours, bold and reversed text stay.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App, color: bool) {
    let area = frame.area();
    let lines = if app.has_help { help() } else { lines(app, area, color) };
    for (line, y) in lines.into_iter().zip(area.y..area.bottom()) {
        frame.render_widget(line, Rect { y, height: 1, ..area });
    }
}

fn help() -> Vec<Line<'static>> {
    HELP.iter().map(|text| Line::raw(*text)).collect()
}

fn lines<'a>(app: &'a App, area: Rect, color: bool) -> Vec<Line<'a>> {
    let width = usize::from(area.width);
    let warn = if color { Style::new().fg(Color::Yellow) } else { Style::new() };
    let mut title = vec!["cofolio top".to_owned()];
    title.extend(app.is_paused.then(|| "[paused]".to_owned()));
    title.extend(app.source.iter().map(|part| (*part).to_owned()));
    title.push(page_cache(&app.report));
    let totals = Totals::of(&app.report).parts();
    let mut lines = vec![
        Line::styled(fit(&title, width), Style::new().add_modifier(Modifier::BOLD)),
        Line::raw(fit(&totals, width)),
        place(app, width),
    ];
    lines.extend(table(app.screen(), width, page(area)));
    lines.truncate(usize::from(area.height.saturating_sub(BELOW)));
    let mut notes = caveats(&app.report, app.now);
    // Behind what is unknown. There is room for one.
    notes.splice(1..1, warnings(&app.report).take(1));
    lines.push(Line::raw(fit(&notes, width)));
    let screen = app.screen();
    lines.push(match &app.error {
        _ if app.is_typing => Line::raw(cut(&format!("filter: {}_", screen.filter), width)),
        Some(error) => Line::styled(cut_end(&format!("error: {error}"), width), warn),
        None => Line::styled(fit(&keys(app), width), Style::new().add_modifier(Modifier::DIM)),
    });
    lines
}

fn keys(app: &App) -> Vec<String> {
    let mut keys = vec!["q end", "? help"];
    let opens = app.screen().rows.get(app.screen().cursor).and_then(|row| row.opens.as_ref());
    keys.extend(opens.map(|_| "Enter open"));
    keys.extend((app.path().len() > 1).then_some("Esc back"));
    keys.extend(["Tab images/containers", "s sort", "r reverse", "/ filter", "p pause"]);
    keys.into_iter().map(str::to_owned).collect()
}

/// The way to the table, how many rows it has, and its filter.
fn place(app: &App, width: usize) -> Line<'static> {
    let screen = app.screen();
    let titles: Vec<&str> = app.path().iter().map(|it| it.view.title()).collect();
    let mut tail = match screen.is_loading() {
        true => " (loading)".to_owned(),
        false => format!(" ({})", count(screen)),
    };
    if !screen.filter.is_empty() {
        tail.push_str(&format!(" /{}", screen.filter));
    }
    let tail = cut_end(&tail, width / 2);
    let way = cut(&titles.join(" > "), width.saturating_sub(columns_of(&tail)));
    Line::from(vec![Span::styled(way, Style::new().add_modifier(Modifier::BOLD)), Span::raw(tail)])
}

/// Headers and the rows that are on the screen.
fn table(screen: &Screen, width: usize, page: usize) -> Vec<Line<'static>> {
    let visible: Vec<&Row> = screen.rows.iter().skip(screen.offset).take(page).collect();
    let shown = Shown::of(screen, &visible, width);
    let header = shown.line("  ", |at| {
        let title = screen.view.columns()[at].title;
        match (at == screen.sort, screen.is_descending()) {
            (false, _) => title.to_owned(),
            (true, true) => format!("{title}▼"),
            (true, false) => format!("{title}▲"),
        }
    });
    let mut lines = vec![Line::styled(header, Style::new().add_modifier(Modifier::UNDERLINED))];
    for (at, row) in visible.iter().enumerate() {
        let is_here = screen.offset + at == screen.cursor;
        let mark = if is_here { "> " } else { "  " };
        let modifier = if is_here { Modifier::REVERSED } else { Modifier::empty() };
        let text = shown.line(mark, |column| row.values[column].shown());
        lines.push(Line::styled(text, Style::new().add_modifier(modifier)));
    }
    lines.resize(page + 1, Line::default());
    lines
}

/// The columns there is room for.
struct Shown {
    /// Number, width, and whether it is flush right.
    columns: Vec<(usize, usize, bool)>,
}

impl Shown {
    fn of(screen: &Screen, rows: &[&Row], width: usize) -> Self {
        let all = screen.view.columns();
        let widths = |at: usize, column: &Column| {
            let is_text = rows.iter().any(|row| row.values[at].is_text());
            // The header has room for the mark of the sorted column.
            let cells = rows.iter().map(|row| columns_of(&row.values[at].shown()));
            let wide = cells.chain([column.title.len() + 1]).max().unwrap_or(0);
            (at, if is_text { wide.min(TEXT_MAX) } else { wide }, !is_text)
        };
        let mut columns: Vec<_> =
            all.iter().enumerate().skip(1).map(|(at, column)| widths(at, column)).collect();
        let taken = |columns: &[(usize, usize, bool)]| {
            columns.iter().map(|(_, width, _)| GAP + width).sum::<usize>()
        };
        let name_min = NAME_MIN.max(width * NAME_PERCENT / 100);
        while taken(&columns) + name_min > width {
            // The sorted column goes last: it explains the order.
            let rank = |at: usize| if at == screen.sort { 0 } else { all[at].rank };
            let Some(worst) = (0..columns.len()).max_by_key(|it| rank(columns[*it].0)) else {
                break;
            };
            columns.remove(worst);
        }
        let name = width.saturating_sub(taken(&columns));
        columns.insert(0, (0, name.saturating_sub(2), false));
        Self { columns }
    }

    fn line(&self, mark: &str, cell: impl Fn(usize) -> String) -> String {
        let mut line = mark.to_owned();
        for (number, (at, width, is_right)) in self.columns.iter().enumerate() {
            let text = cut(&cell(*at), *width);
            let padding = " ".repeat(width.saturating_sub(columns_of(&text)));
            let gap = if number == 0 { "" } else { "  " };
            line.push_str(gap);
            match is_right {
                true => line.extend([padding, text]),
                false => line.extend([text, padding]),
            }
        }
        line
    }
}

/// The parts for which there is room, in one line.
fn fit(parts: &[String], width: usize) -> String {
    let mut line = String::new();
    for part in parts {
        let gap = if line.is_empty() { "" } else { "  " };
        if columns_of(&line) + gap.len() + columns_of(part) <= width {
            line.push_str(gap);
            line.push_str(part);
        }
    }
    line
}

/// Columns of the terminal that a text takes.
fn columns_of(text: &str) -> usize {
    Span::raw(text).width()
}

/// The end of a text, since names and paths differ there.
fn cut(text: &str, width: usize) -> String {
    if columns_of(text) <= width {
        return text.to_owned();
    }
    let chars = text.char_indices().rev();
    let sizes = chars.map(|(at, c)| (at, columns_of(&text[at..at + c.len_utf8()])));
    let start = within(sizes, width).unwrap_or(text.len());
    if width == 0 { String::new() } else { format!("…{}", &text[start..]) }
}

/// The begin of a text.
fn cut_end(text: &str, width: usize) -> String {
    if columns_of(text) <= width {
        return text.to_owned();
    }
    let chars = text.char_indices().map(|(at, c)| (at, at + c.len_utf8()));
    let sizes = chars.map(|(at, end)| (end, columns_of(&text[at..end])));
    let end = within(sizes, width).unwrap_or(0);
    if width == 0 { String::new() } else { format!("{}…", &text[..end]) }
}

/// The place of the last character that fits, with one column left for the ellipsis.
fn within(sizes: impl Iterator<Item = (usize, usize)>, width: usize) -> Option<usize> {
    let mut used = 1;
    let fitting = sizes.take_while(|(_, columns)| {
        used += columns;
        used <= width
    });
    fitting.last().map(|(at, _)| at)
}
