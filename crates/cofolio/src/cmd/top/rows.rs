//! The ledger's figures as rows and columns: the same for the screen and for `--once`.

use cofolio_node::ledger::{ContainerAccount, ImageAccount, ImageFile, ObjectUser, Report};
use cofolio_store::{DEFAULT_DOMAIN, Digest};

use crate::context::short;
use crate::ui::{human_size, printable};

/// A table, and what it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum View {
    Images,
    Containers,
    /// The images that a container used.
    ImagesOf {
        cgroup: String,
        name: String,
    },
    /// The files of an image.
    Files {
        domain: String,
        image: Digest,
        /// All its names.
        name: String,
    },
    /// The users of an object; `path` is the file that led here.
    Users {
        domain: String,
        object: Digest,
        path: String,
    },
}

/// What a view shows besides the report; asked for when the view is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Detail {
    #[default]
    None,
    Files {
        /// Those with most resident, at most [`FILES_MAX`].
        files: Vec<ImageFile>,
        /// Files of the image.
        total: u64,
    },
    Users(Vec<ObjectUser>),
}

/// Files of one image that are shown at most.
pub(super) const FILES_MAX: usize = 10_000;

/// A column.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Large values first, unless reversed.
    pub(super) descending: bool,
    /// Where there is no room, columns with a high number go first. 0 stays.
    pub(super) rank: u8,
}

const fn text(title: &'static str, rank: u8) -> Column {
    Column { title, descending: false, rank }
}

const fn figure(title: &'static str, rank: u8) -> Column {
    Column { title, descending: true, rank }
}

const IMAGES: &[Column] = &[
    text("IMAGE", 0),
    figure("CONTAINERS", 4),
    figure("RESIDENT", 1),
    figure("USED", 5),
    figure("SHARED", 3),
    figure("PRIVATE", 6),
    figure("SAVED", 2),
];
const CONTAINERS: &[Column] = &[
    text("CONTAINER", 0),
    figure("IMAGES", 4),
    figure("USED", 1),
    figure("SHARED", 3),
    figure("PRIVATE", 5),
    figure("PROPORTIONAL", 6),
    figure("SAVED", 2),
];
const FILES: &[Column] =
    &[text("PATH", 0), figure("SIZE", 3), figure("RESIDENT", 1), figure("USERS", 2)];
const USERS: &[Column] = &[text("CONTAINER", 0), text("IMAGE", 1), text("SEEN", 2)];

impl View {
    pub(super) fn columns(&self) -> &'static [Column] {
        match self {
            Self::Images | Self::ImagesOf { .. } => IMAGES,
            Self::Containers => CONTAINERS,
            Self::Files { .. } => FILES,
            Self::Users { .. } => USERS,
        }
    }

    /// The column that it is sorted by at first: most resident, or seen last.
    pub(super) fn sort(&self) -> usize {
        2
    }

    /// What it is called on the way to it.
    pub(super) fn title(&self) -> &str {
        match self {
            Self::Images => "images",
            Self::Containers => "containers",
            Self::ImagesOf { name, .. } | Self::Files { name, .. } => name,
            Self::Users { path, .. } => path,
        }
    }

    pub(super) fn needs_detail(&self) -> bool {
        matches!(self, Self::Files { .. } | Self::Users { .. })
    }

    /// Its rows, in no order.
    pub(super) fn rows(&self, report: &Report, detail: &Detail) -> Vec<Row> {
        match (self, detail) {
            (Self::Images, _) => report.images.iter().map(image_row).collect(),
            (Self::Containers, _) => report.containers.iter().map(container_row).collect(),
            (Self::ImagesOf { cgroup, .. }, _) => {
                let used = report.containers.iter().filter(|it| it.cgroup == *cgroup);
                let used = used.flat_map(|it| &it.images);
                let images = used.filter_map(|used| find(report, Some(&used.domain), &used.image));
                images.map(image_row).collect()
            }
            (Self::Files { domain, .. }, Detail::Files { files, .. }) => {
                files.iter().map(|file| file_row(domain, file)).collect()
            }
            (Self::Users { .. }, Detail::Users(users)) => {
                users.iter().map(|user| user_row(report, user)).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// One value of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Value {
    /// Printable.
    Text(String),
    Bytes(u64),
    Count(u64),
    SecondsAgo(u32),
}

impl Value {
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Bytes(bytes) => human_size(*bytes),
            Self::Count(count) => count.to_string(),
            Self::SecondsAgo(seconds) => format!("{} ago", duration(u64::from(*seconds))),
        }
    }

    pub(super) fn is_text(&self) -> bool {
        matches!(self, Self::Text(_))
    }
}

/// Seconds for people: `7 s`, `3 min`, `5 h`, `2 d`, as the dashboard shows them.
pub(super) fn duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// A row. Its values are those of the view's columns.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// What it is about, the same in the next report.
    pub(super) key: String,
    pub(super) values: Vec<Value>,
    /// Names that a filter finds and no column shows.
    more_names: Vec<String>,
    /// What Enter opens.
    pub(super) opens: Option<View>,
}

impl Row {
    /// Whether one of its texts contains this part, ignoring case.
    pub(super) fn has(&self, part: &str) -> bool {
        if part.is_empty() {
            return true;
        }
        let part = part.to_lowercase();
        let shown = self.values.iter().filter_map(|value| match value {
            Value::Text(text) => Some(text),
            _ => None,
        });
        shown.chain(&self.more_names).any(|text| text.to_lowercase().contains(&part))
    }
}

/// Sorts rows by a column; equal ones by their text.
pub(super) fn sort(rows: &mut [Row], column: usize, descending: bool) {
    rows.sort_by(|a, b| {
        let order = a.values.get(column).cmp(&b.values.get(column));
        let order = if descending { order.reverse() } else { order };
        order.then_with(|| a.values.first().cmp(&b.values.first()))
    });
}

fn image_row(image: &ImageAccount) -> Row {
    let names = image_names(image);
    let name = names.join(", ");
    Row {
        key: format!("{} {}", image.domain, image.image),
        values: vec![
            Value::Text(label(&names)),
            Value::Count(image.containers),
            Value::Bytes(image.resident_bytes),
            Value::Bytes(image.used_bytes),
            Value::Bytes(image.shared_bytes),
            Value::Bytes(image.private_bytes),
            Value::Bytes(image.saved_bytes),
        ],
        more_names: names[1..].to_vec(),
        opens: Some(View::Files { domain: image.domain.clone(), image: image.image, name }),
    }
}

fn container_row(container: &ContainerAccount) -> Row {
    let name = container_name(container.name.as_deref(), &container.cgroup);
    Row {
        key: container.cgroup.clone(),
        values: vec![
            Value::Text(name.clone()),
            Value::Count(container.images.len() as u64),
            Value::Bytes(container.used_bytes),
            Value::Bytes(container.shared_bytes),
            Value::Bytes(container.private_bytes),
            Value::Bytes(container.proportional_bytes),
            Value::Bytes(container.saved_bytes),
        ],
        more_names: Vec::new(),
        opens: Some(View::ImagesOf { cgroup: container.cgroup.clone(), name }),
    }
}

fn file_row(domain: &str, file: &ImageFile) -> Row {
    let path = printable(file.path.as_bytes());
    Row {
        key: file.path.clone(),
        values: vec![
            Value::Text(path.clone()),
            Value::Bytes(file.bytes),
            Value::Bytes(file.resident_bytes),
            Value::Count(file.users),
        ],
        more_names: Vec::new(),
        opens: Some(View::Users { domain: domain.to_owned(), object: file.object, path }),
    }
}

fn user_row(report: &Report, user: &ObjectUser) -> Row {
    let image = find(report, None, &user.image);
    let image = image.map_or_else(|| short(&user.image), |image| label(&image_names(image)));
    Row {
        key: format!("{} {}", user.cgroup, user.image),
        values: vec![
            Value::Text(container_name(user.name.as_deref(), &user.cgroup)),
            Value::Text(image),
            Value::SecondsAgo(user.seconds_ago),
        ],
        more_names: Vec::new(),
        opens: None,
    }
}

fn find<'r>(report: &'r Report, domain: Option<&str>, image: &Digest) -> Option<&'r ImageAccount> {
    let in_domain = |it: &&ImageAccount| domain.is_none_or(|domain| it.domain == domain);
    report.images.iter().filter(in_domain).find(|it| it.image == *image)
}

/// Its names, or else its digest. The trust domain too, unless it is the usual one.
fn image_names(image: &ImageAccount) -> Vec<String> {
    let mut names: Vec<_> = image.names.iter().map(|name| printable(name.as_bytes())).collect();
    if names.is_empty() {
        names.push(short(&image.image));
    }
    if image.domain != DEFAULT_DOMAIN {
        let domain = format!(" ({})", printable(image.domain.as_bytes()));
        names.iter_mut().for_each(|name| name.push_str(&domain));
    }
    names
}

/// One name of an image, where there is room for no more, and how many others it has.
fn label(names: &[String]) -> String {
    match names {
        [name] => name.clone(),
        [name, others @ ..] => format!("{name} +{}", others.len()),
        [] => String::new(),
    }
}

fn container_name(name: Option<&str>, cgroup: &str) -> String {
    printable(name.unwrap_or(cgroup).as_bytes())
}
