//! What is on the screen: keys and answers change it, `draw` shows it. No I/O here.

use cofolio_node::ledger::Report;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::rows::{Detail, FILES_MAX, Row, View, sort};
use super::worker::Answer;
use crate::ui::printable;

/// Characters of a filter.
const FILTER_MAX: usize = 100;

/// What a key asks of the program.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    None,
    /// The view needs its detail.
    Load(View),
    Quit,
}

/// A table, how it is sorted and filtered, and where in it the user is.
#[derive(Debug)]
pub(super) struct Screen {
    pub(super) view: View,
    detail: Detail,
    pub(super) sort: usize,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// Those that the filter lets through, sorted.
    pub(super) rows: Vec<Row>,
    /// Rows without the filter, those that were too many to load included.
    pub(super) total: usize,
    pub(super) cursor: usize,
    /// First row on the screen.
    pub(super) offset: usize,
    /// The row that the cursor follows when figures change. Without one, at the top, the cursor
    /// keeps its place.
    held: Option<String>,
}

impl Screen {
    fn of(view: View) -> Self {
        Self {
            sort: view.sort(),
            view,
            detail: Detail::None,
            reversed: false,
            filter: String::new(),
            rows: Vec::new(),
            total: 0,
            cursor: 0,
            offset: 0,
            held: None,
        }
    }

    /// Whether large values come first.
    pub(super) fn is_descending(&self) -> bool {
        self.view.columns()[self.sort].descending != self.reversed
    }

    /// Whether its detail is still to come.
    pub(super) fn is_loading(&self) -> bool {
        self.view.needs_detail() && self.detail == Detail::None
    }

    fn update(&mut self, report: &Report) {
        let mut rows = self.view.rows(report, &self.detail);
        self.total = match &self.detail {
            Detail::Files { total, .. } => usize::try_from(*total).unwrap_or(usize::MAX),
            _ => rows.len(),
        };
        rows.retain(|row| row.has(&self.filter));
        sort(&mut rows, self.sort, self.is_descending());
        let held = self.held.as_ref();
        let place = held.and_then(|key| rows.iter().position(|row| row.key == *key));
        self.rows = rows;
        self.cursor = place.unwrap_or(self.cursor).min(self.rows.len().saturating_sub(1));
    }

    fn go_to(&mut self, row: usize) {
        self.cursor = row.min(self.rows.len().saturating_sub(1));
        let is_top = self.cursor == 0;
        self.held = self.rows.get(self.cursor).filter(|_| !is_top).map(|row| row.key.clone());
    }

    /// Has the cursor be on the screen.
    fn scroll(&mut self, page: usize) {
        let last = self.rows.len().saturating_sub(page);
        let lowest = self.cursor.saturating_sub(page.saturating_sub(1));
        self.offset = self.offset.clamp(lowest, self.cursor.max(lowest)).min(last);
    }
}

/// The state of the program.
#[derive(Debug)]
pub(super) struct App {
    /// Where the figures come from.
    pub(super) source: &'static [&'static str],
    pub(super) report: Report,
    /// Seconds since 1970.
    pub(super) now: i64,
    /// The tables and, over each, what was opened from it.
    tabs: [Vec<Screen>; 2],
    tab: usize,
    /// A filter is being typed.
    pub(super) is_typing: bool,
    pub(super) is_paused: bool,
    pub(super) has_help: bool,
    /// Why the last question has no answer.
    pub(super) error: Option<String>,
    page: usize,
}

impl App {
    pub(super) fn new(source: &'static [&'static str]) -> Self {
        Self {
            source,
            report: Report::default(),
            now: 0,
            tabs: [View::Images, View::Containers].map(|view| vec![Screen::of(view)]),
            tab: 0,
            is_typing: false,
            is_paused: false,
            has_help: false,
            error: None,
            page: 1,
        }
    }

    /// The tables from the tab to the one that is shown.
    pub(super) fn path(&self) -> &[Screen] {
        &self.tabs[self.tab]
    }

    /// The table that is shown.
    pub(super) fn screen(&self) -> &Screen {
        &self.path()[self.path().len() - 1]
    }

    fn screen_mut(&mut self) -> &mut Screen {
        let path = &mut self.tabs[self.tab];
        let last = path.len() - 1;
        &mut path[last]
    }

    /// The view whose detail is shown.
    pub(super) fn detailed(&self) -> Option<View> {
        Some(&self.screen().view).filter(|view| view.needs_detail()).cloned()
    }

    /// How many rows there is room for.
    pub(super) fn set_page(&mut self, rows: usize) {
        self.page = rows.max(1);
        let page = self.page;
        self.screen_mut().scroll(page);
    }

    pub(super) fn take(&mut self, answer: Answer) {
        match answer {
            Answer::Failed(why) => {
                self.error = Some(printable(why.as_bytes()));
                return;
            }
            // It was requested before the pause.
            Answer::Report(_) if self.is_paused && self.report.time != 0 => return,
            Answer::Report(report) => self.report = *report,
            Answer::Detail(view, detail) => {
                let screens = self.tabs.iter_mut().flatten();
                screens.filter(|it| it.view == view).for_each(|it| it.detail = detail.clone());
            }
        }
        self.error = None;
        self.update();
    }

    fn update(&mut self) {
        let page = self.page;
        for screen in self.tabs.iter_mut().flatten() {
            screen.update(&self.report);
        }
        self.screen_mut().scroll(page);
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Effect {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Effect::Quit } else { Effect::None };
        }
        if self.is_typing {
            self.typed(key.code);
            return Effect::None;
        }
        if self.has_help && key.code != KeyCode::Char('q') {
            self.has_help = false;
            return Effect::None;
        }
        let (page, cursor) = (self.page, self.screen().cursor);
        match key.code {
            KeyCode::Char('q') => return Effect::Quit,
            KeyCode::Char('?') => self.has_help = true,
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('r') => self.sort_by(0, !self.screen().reversed),
            KeyCode::Char('s' | '>') => self.sort_by(1, false),
            KeyCode::Char('<') => self.sort_by(self.screen().view.columns().len() - 1, false),
            KeyCode::Up | KeyCode::Char('k') => self.go_to(cursor.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.go_to(cursor + 1),
            KeyCode::PageUp => self.go_to(cursor.saturating_sub(page)),
            KeyCode::PageDown => self.go_to(cursor + page),
            KeyCode::Home => self.go_to(0),
            KeyCode::End => self.go_to(usize::MAX),
            KeyCode::Tab | KeyCode::BackTab => {
                self.tab = 1 - self.tab;
                self.update();
            }
            KeyCode::Enter => return self.open(),
            KeyCode::Esc => self.back(),
            _ => {}
        }
        Effect::None
    }

    fn go_to(&mut self, row: usize) {
        let page = self.page;
        let screen = self.screen_mut();
        screen.go_to(row);
        screen.scroll(page);
    }

    /// Sorts by another column: `step` further on, with the first after the last.
    fn sort_by(&mut self, step: usize, reversed: bool) {
        let screen = self.screen_mut();
        screen.sort = (screen.sort + step) % screen.view.columns().len();
        screen.reversed = reversed;
        self.update();
    }

    fn typed(&mut self, code: KeyCode) {
        let filter = &mut self.screen_mut().filter;
        match code {
            KeyCode::Char(c) if !c.is_control() && filter.len() < FILTER_MAX => filter.push(c),
            KeyCode::Backspace => _ = filter.pop(),
            KeyCode::Esc => filter.clear(),
            _ => {}
        }
        self.is_typing = !matches!(code, KeyCode::Enter | KeyCode::Esc);
        self.update();
    }

    fn open(&mut self) -> Effect {
        let screen = self.screen_mut();
        let Some(row) = screen.rows.get(screen.cursor) else { return Effect::None };
        let (key, opens) = (row.key.clone(), row.opens.clone());
        let Some(view) = opens else { return Effect::None };
        // The way back leads to the same row.
        screen.held = Some(key);
        self.tabs[self.tab].push(Screen::of(view.clone()));
        self.error = None;
        self.update();
        if view.needs_detail() { Effect::Load(view) } else { Effect::None }
    }

    /// Clears the filter, or goes back.
    fn back(&mut self) {
        if !self.screen().filter.is_empty() {
            self.screen_mut().filter.clear();
        } else if self.path().len() > 1 {
            self.tabs[self.tab].pop();
            self.error = None;
        }
        self.update();
    }
}

/// How many rows there are: `3`, `3 of 12` with a filter or where not all were loaded.
pub(super) fn count(screen: &Screen) -> String {
    match screen.total {
        total if total == screen.rows.len() => total.to_string(),
        total if total > FILES_MAX && screen.filter.is_empty() => {
            format!("{} most resident of {total}", screen.rows.len())
        }
        total => format!("{} of {total}", screen.rows.len()),
    }
}
