//! Keys, answers and drawing, without a terminal.

use cofolio_node::ledger::{
    ContainerAccount, DomainAccount, ImageAccount, ImageFile, Machine, ObjectUser, Report, Unknown,
    UsedImage,
};
use cofolio_store::{DEFAULT_DOMAIN, Digest};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::app::{App, Effect};
use super::draw;
use super::rows::{Detail, FILES_MAX, View, duration};
use super::worker::Answer;

const MIB: u64 = 1 << 20;

fn digest(number: u8) -> Digest {
    format!("{number:02x}").repeat(32).parse().unwrap()
}

fn image(number: u8, name: &str, resident: u64, saved: u64) -> ImageAccount {
    ImageAccount {
        domain: DEFAULT_DOMAIN.to_owned(),
        image: digest(number),
        names: Some(name).filter(|name| !name.is_empty()).map(str::to_owned).into_iter().collect(),
        objects: 1000,
        bytes: 200 * MIB,
        resident_bytes: resident * MIB,
        shared_bytes: saved * MIB,
        private_bytes: (resident - saved) * MIB,
        used_bytes: resident * MIB / 2,
        saved_bytes: saved * MIB,
        metadata_bytes: MIB,
        commons_bytes: Some(resident * MIB / 4),
        containers: u64::from(number),
    }
}

fn container(number: u8, name: Option<&str>) -> ContainerAccount {
    let used = UsedImage { domain: DEFAULT_DOMAIN.to_owned(), image: digest(number) };
    ContainerAccount {
        cgroup: format!("/cofolio/container-{number}-0123456789"),
        name: name.map(str::to_owned),
        images: vec![used],
        objects: 100,
        used_bytes: u64::from(number) * MIB,
        shared_bytes: MIB / 2,
        private_bytes: MIB / 4,
        commons_bytes: Some(MIB / 2),
        proportional_bytes: MIB / 8,
        saved_bytes: 0,
    }
}

fn report() -> Report {
    Report {
        time: 1_000_000,
        residency_age_seconds: 3,
        processes_age_seconds: 150,
        commons: None,
        machine: Machine { page_cache_bytes: 4096 * MIB, ..Machine::default() },
        domains: vec![DomainAccount {
            resident_bytes: 176 * MIB,
            used_bytes: 88 * MIB,
            shared_bytes: 60 * MIB,
            saved_bytes: 51 * MIB,
            ..DomainAccount::default()
        }],
        images: vec![
            image(1, "nginx:1.27", 60, 11),
            image(2, "docker.io/library/redis:7.0.15-bookworm", 76, 40),
            image(3, "odd\u{1b}[2J\nname", 40, 0),
            image(4, "", 0, 0),
        ],
        containers: vec![
            container(1, Some("web")),
            container(2, Some("cache")),
            container(3, None),
        ],
        unknown: Unknown { openers: 2, images: 1, ..Unknown::default() },
        warnings: Vec::new(),
    }
}

fn app() -> App {
    let mut app = App::new(&["figures of the daemon"]);
    app.now = 1_000_001;
    app.set_page(18);
    app.take(Answer::Report(Box::new(report())));
    app
}

fn press(app: &mut App, code: KeyCode) -> Effect {
    app.key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn type_text(app: &mut App, text: &str) {
    text.chars().for_each(|c| assert_eq!(press(app, KeyCode::Char(c)), Effect::None));
}

/// First values of the rows.
fn names(app: &App) -> Vec<String> {
    app.screen().rows.iter().map(|row| row.values[0].shown()).collect()
}

/// What a terminal of this size shows, without the blanks at the ends of lines.
fn drawn(app: &mut App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let draw = |frame: &mut ratatui::Frame<'_>| {
        app.set_page(draw::page(frame.area()));
        draw::draw(frame, app, true);
    };
    let buffer = terminal.draw(draw).unwrap().buffer.clone();
    let line = |y| -> String { (0..width).map(|x| buffer[(x, y)].symbol()).collect() };
    (0..height).map(|y| format!("{}\n", line(y).trim_end())).collect()
}

fn files(count: u8) -> Detail {
    let file = |number: u8| ImageFile {
        path: format!("/usr/lib/x86_64-linux-gnu/library-number-{number}.so"),
        object: digest(number),
        bytes: u64::from(number) * MIB,
        resident_bytes: u64::from(number) * MIB / 2,
        users: 1,
    };
    Detail::Files { files: (0..count).map(file).collect(), total: u64::from(count) }
}

/// Ages of days were hours here, and days on the dashboard.
#[test]
fn durations_are_those_of_the_dashboard() {
    let shown = [119, 120, 7199, 7200, 172_799, 172_800, 90_000_000].map(duration);
    assert_eq!(shown, ["119 s", "2 min", "119 min", "2 h", "47 h", "2 d", "1041 d"]);
}

#[test]
fn images_at_80x24() {
    let expected = "\
cofolio top  figures of the daemon  page cache 4.0 GiB
resident 176.0 MiB  saved 51.0 MiB  shared 60.0 MiB  used 88.0 MiB
images (4)
  IMAGE                      CONTAINERS  RESIDENT▼      USED    SHARED     SAVED
> …y/redis:7.0.15-bookworm            2   76.0 MiB  38.0 MiB  40.0 MiB  40.0 MiB
  nginx:1.27                          1   60.0 MiB  30.0 MiB  11.0 MiB  11.0 MiB
  odd\\x1b[2J\\x0aname                  3   40.0 MiB  20.0 MiB       0 B       0 B
  040404040404                        4        0 B       0 B       0 B       0 B














unknown: openers 2, images 1  residency 4 s old  mappings 2 min old
q end  ? help  Enter open  Tab images/containers  s sort  r reverse  / filter
";
    assert_eq!(drawn(&mut app(), 80, 24), expected);
}

#[test]
fn images_at_40x10() {
    let expected = "\
cofolio top  figures of the daemon
resident 176.0 MiB  saved 51.0 MiB
images (4)
  IMAGE              RESIDENT▼     SAVED
> …:7.0.15-bookworm   76.0 MiB  40.0 MiB
  nginx:1.27          60.0 MiB  11.0 MiB
  …d\\x1b[2J\\x0aname   40.0 MiB       0 B
  040404040404             0 B       0 B
unknown: openers 2, images 1
q end  ? help  Enter open  s sort
";
    assert_eq!(drawn(&mut app(), 40, 10), expected);
}

/// The path and the columns of files, on a small screen.
#[test]
fn files_at_40x10() {
    let mut app = app();
    let Effect::Load(view) = press(&mut app, KeyCode::Enter) else { panic!() };
    app.take(Answer::Detail(view, files(9)));
    type_text(&mut app, "jjjjj/NUMBER-7");
    press(&mut app, KeyCode::Enter);
    let expected = "\
cofolio top  figures of the daemon
resident 176.0 MiB  saved 51.0 MiB
…edis:7.0.15-bookworm (1 of 9) /NUMBER-7
  PATH                 RESIDENT▼   USERS
> …ibrary-number-7.so    3.5 MiB       1



unknown: openers 2, images 1
q end  ? help  Enter open  Esc back
";
    assert_eq!(drawn(&mut app, 40, 10), expected);
}

/// Of an image with several names only the first was known here: a filter did not find the others.
/// Later the first was shown as if it were the only one.
#[test]
fn all_names_of_an_image() {
    let mut app = app();
    let mut named = report();
    named.images[0].names.push("web:latest".to_owned());
    app.take(Answer::Report(Box::new(named)));
    type_text(&mut app, "/LATEST");
    press(&mut app, KeyCode::Enter);
    assert_eq!(names(&app), ["nginx:1.27 +1"]);
    let Effect::Load(view) = press(&mut app, KeyCode::Enter) else { panic!() };
    assert_eq!(view.title(), "nginx:1.27, web:latest");
}

/// What is unknown was a number without a reason.
#[test]
fn the_first_warning_is_shown() {
    let mut app = app();
    let warnings = vec!["process 7: \u{1b}no".to_owned(), "process 8: no".to_owned()];
    app.take(Answer::Report(Box::new(Report { warnings, ..report() })));
    let screen = drawn(&mut app, 80, 24);
    assert!(screen.contains("unknown: openers 2, images 1  process 7: \\x1bno"), "{screen}");
}

/// Nothing is drawn outside, and nothing panics, however small the terminal is.
#[test]
fn any_size() {
    for (width, height) in (0..50).flat_map(|width| (0..12).map(move |height| (width, height))) {
        for keys in ["", "?", "/x"] {
            let mut app = app();
            type_text(&mut app, keys);
            drawn(&mut app, width, height);
        }
    }
}

#[test]
fn sort_reverse_filter() {
    let mut app = app();
    let sizes = ["docker.io/library/redis:7.0.15-bookworm", "nginx:1.27", "odd\\x1b[2J\\x0aname"];
    assert_eq!(names(&app)[..3], sizes);
    assert_eq!(names(&app)[3], digest(4).to_string()[..12]);
    type_text(&mut app, "r");
    assert_eq!(names(&app)[1..], [sizes[2], sizes[1], sizes[0]]);
    // Back over the first column to the last one: SAVED.
    type_text(&mut app, "<<<");
    assert_eq!(app.screen().view.columns()[app.screen().sort].title, "SAVED");
    assert_eq!(names(&app)[..2], [sizes[0], sizes[1]]);
    type_text(&mut app, "s");
    assert_eq!((app.screen().sort, app.screen().is_descending()), (0, false));

    type_text(&mut app, "/NGinq");
    assert!(names(&app).is_empty());
    press(&mut app, KeyCode::Backspace);
    assert_eq!(names(&app), ["nginx:1.27"]);
    press(&mut app, KeyCode::Enter);
    assert!(!app.is_typing);
    // Escape clears the filter first, then goes back.
    press(&mut app, KeyCode::Esc);
    assert_eq!(names(&app).len(), 4);
    type_text(&mut app, "/x");
    press(&mut app, KeyCode::Esc);
    assert!(!app.is_typing && app.screen().filter.is_empty());
    assert_eq!(press(&mut app, KeyCode::Char('q')), Effect::Quit);
}

/// Ctrl-C ends the program while a filter is typed too; q is text there.
#[test]
fn control_c_always_ends() {
    let mut app = app();
    type_text(&mut app, "/q");
    assert_eq!(app.screen().filter, "q");
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(app.key(control_c), Effect::Quit);
}

#[test]
fn drill_down_and_back() {
    let mut app = app();
    press(&mut app, KeyCode::Down);
    let Effect::Load(view) = press(&mut app, KeyCode::Enter) else { panic!() };
    assert_eq!(view.title(), "nginx:1.27");
    assert!(app.screen().is_loading() && app.detailed() == Some(view.clone()));
    app.take(Answer::Detail(view, files(3)));
    let Effect::Load(users) = press(&mut app, KeyCode::Enter) else { panic!() };
    assert!(matches!(&users, View::Users { object, .. } if *object == digest(2)));
    let user = ObjectUser {
        cgroup: "/other/engine".to_owned(),
        name: None,
        image: digest(1),
        seconds_ago: 7,
    };
    app.take(Answer::Detail(users, Detail::Users(vec![user])));
    let values: Vec<String> = app.screen().rows[0].values.iter().map(|it| it.shown()).collect();
    assert_eq!(values, ["/other/engine", "nginx:1.27", "7 s ago"]);
    assert_eq!(press(&mut app, KeyCode::Enter), Effect::None);

    // The other tab keeps its own way.
    press(&mut app, KeyCode::Tab);
    assert_eq!(names(&app), ["/cofolio/container-3-0123456789", "cache", "web"]);
    press(&mut app, KeyCode::End);
    assert_eq!(press(&mut app, KeyCode::Enter), Effect::None);
    assert_eq!(names(&app), ["nginx:1.27"]);
    press(&mut app, KeyCode::Tab);
    assert_eq!(app.path().len(), 3);
    (0..5).for_each(|_| assert_eq!(press(&mut app, KeyCode::Esc), Effect::None));
    assert_eq!((app.path().len(), app.screen().cursor), (1, 1));
}

/// While an image was open, another one overtook it. The cursor was on that one afterwards.
#[test]
fn back_on_the_same_row() {
    let mut app = app();
    let opened = names(&app)[0].clone();
    press(&mut app, KeyCode::Enter);
    let mut changed = report();
    changed.images[0].resident_bytes = 500 * MIB;
    app.take(Answer::Report(Box::new(changed)));
    press(&mut app, KeyCode::Esc);
    assert_eq!((app.screen().cursor, &names(&app)[1]), (1, &opened));
}

/// The cursor stays on its row when that moves, and at the top when it was there.
#[test]
fn the_cursor_follows_its_row() {
    let mut app = app();
    press(&mut app, KeyCode::Down);
    let mut changed = report();
    changed.images[0].resident_bytes = 500 * MIB;
    app.take(Answer::Report(Box::new(changed.clone())));
    assert_eq!((app.screen().cursor, names(&app)[0].as_str()), (0, "nginx:1.27"));
    press(&mut app, KeyCode::Home);
    app.take(Answer::Report(Box::new(report())));
    assert_eq!(app.screen().cursor, 0);
    press(&mut app, KeyCode::End);
    changed.images.truncate(1);
    app.take(Answer::Report(Box::new(changed)));
    assert_eq!((app.screen().cursor, app.screen().rows.len()), (0, 1));
    app.take(Answer::Report(Box::default()));
    ["j", "k", "s", "r", "p"].iter().for_each(|keys| type_text(&mut app, keys));
    press(&mut app, KeyCode::Enter);
    assert!(app.screen().rows.is_empty());
}

#[test]
fn the_page_has_the_cursor() {
    let mut app = app();
    let Effect::Load(view) = press(&mut app, KeyCode::Enter) else { panic!() };
    app.take(Answer::Detail(view, files(100)));
    app.set_page(10);
    let place = |app: &App| (app.screen().cursor, app.screen().offset);
    for (key, expected) in [
        (KeyCode::PageDown, (10, 1)),
        (KeyCode::PageDown, (20, 11)),
        (KeyCode::Up, (19, 11)),
        (KeyCode::PageUp, (9, 9)),
        (KeyCode::End, (99, 90)),
        (KeyCode::Down, (99, 90)),
        (KeyCode::Home, (0, 0)),
        (KeyCode::Up, (0, 0)),
    ] {
        press(&mut app, key);
        assert_eq!(place(&app), expected, "{key:?}");
    }
}

/// A pause keeps the figures, and a failure keeps them and says why.
#[test]
fn pause_and_failure() {
    let mut app = app();
    type_text(&mut app, "p");
    app.take(Answer::Report(Box::default()));
    assert_eq!(names(&app).len(), 4);
    type_text(&mut app, "p");
    app.take(Answer::Failed("cofolio.sock: \u{1b}refused".to_owned()));
    let screen = drawn(&mut app, 80, 24);
    assert!(screen.contains("error: cofolio.sock: \\x1brefused") && screen.contains("nginx"));
    app.take(Answer::Report(Box::new(report())));
    assert!(app.error.is_none());
}

/// An image with more files than are loaded says so.
#[test]
fn not_all_files() {
    let mut app = app();
    let Effect::Load(view) = press(&mut app, KeyCode::Enter) else { panic!() };
    let Detail::Files { files, .. } = files(2) else { panic!() };
    let total = FILES_MAX as u64 + 5;
    app.take(Answer::Detail(view, Detail::Files { files, total }));
    assert!(drawn(&mut app, 80, 24).contains("(2 most resident of 10005)"));
}
