//! The answers and metrics of the daemon against `docs/API.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};

use cofolio_node::ledger::{ReclaimRequest, ReclaimTarget, UsedImage};
use cofolio_node::vm::account::{Latency, VmAccount, VmReport};
use cofolio_node::vm::recycler::Recycling;
use serde_json::Value;

use crate::common::daemon::Daemon;
use crate::common::machine::until;
use crate::common::{Killed, Sandbox, can_mount, cgroup, unlock};

/// Types by the path of a field, as `docs/API.md` writes both.
type Schema = BTreeMap<String, BTreeSet<&'static str>>;

/// Adds the fields of a value.
fn add_fields(schema: &mut Schema, path: &str, value: &Value) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    };
    // Elements of lists that are objects have no row of their own.
    if !(path.is_empty() || path.ends_with("[]") && value.is_object()) {
        schema.entry(path.to_owned()).or_default().insert(kind);
    }
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            let dot = if path.is_empty() { "" } else { "." };
            add_fields(schema, &format!("{path}{dot}{name}"), value);
        }),
        Value::Array(values) => {
            values.iter().for_each(|value| add_fields(schema, &format!("{path}[]"), value));
        }
        _ => {}
    }
}

/// The fields of these values together.
fn schema_of<'v>(values: impl IntoIterator<Item = &'v Value>) -> Schema {
    let mut schema = Schema::new();
    values.into_iter().for_each(|value| add_fields(&mut schema, "", value));
    schema
}

/// The rows of the table under a heading of `docs/API.md`, each as its cells.
fn table<'d>(doc: &'d str, heading: &str) -> Vec<Vec<&'d str>> {
    let (_, section) = doc.split_once(&format!("\n{heading}\n")).expect(heading);
    let lines = section.lines().skip_while(|line| !line.starts_with('|'));
    let rows = lines.take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// Every field is in the table under a heading with its type and a meaning, and every row of the
/// table is a field.
fn assert_documented(doc: &str, heading: &str, found: &Schema) {
    let mut documented = BTreeSet::new();
    for row in table(doc, heading) {
        let [path, types, meaning] = row[..] else { panic!("{heading}: {row:?}") };
        let path = path.trim_matches('`');
        let types: BTreeSet<_> = types.split(" or ").collect();
        let seen = found.get(path).unwrap_or_else(|| panic!("{heading}: the API has no {path}"));
        assert!(seen.is_subset(&types), "{heading}: {path} is {seen:?}, and not {types:?}");
        assert!(!meaning.is_empty() && documented.insert(path), "{heading}: {row:?}");
    }
    for path in found.keys() {
        assert!(documented.contains(path.as_str()), "docs/API.md, {heading}: no row for {path}");
    }
}

/// Every metric is in the table with its type and labels, and every row of the table is a metric.
fn assert_metrics_documented(doc: &str, text: &str) {
    let mut found = BTreeMap::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE cofolio_")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let total = if kind == "counter" { "_total" } else { "" };
        found.insert(format!("{name}{total}"), (kind.to_owned(), None));
    }
    for line in text.lines().filter_map(|line| line.strip_prefix("cofolio_")) {
        let labels = line.split_once('{').map_or("", |(_, labels)| labels);
        let labels = labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0));
        let name = line.split(['{', ' ']).next().unwrap();
        // The sum and the number of a histogram have no label, its classes have one.
        if let Some(name) = name.strip_suffix("_sum").or(name.strip_suffix("_count"))
            && found.contains_key(name)
        {
            continue;
        }
        let name = name.strip_suffix("_bucket").unwrap_or(name);
        let (_, seen) = found.get_mut(name).expect(line);
        *seen = Some(labels.map(str::to_owned).collect::<BTreeSet<_>>());
    }
    let mut documented = BTreeSet::new();
    for row in table(doc, "## Metrics") {
        let [name, kind, labels, meaning] = row[..] else { panic!("{row:?}") };
        let name = name.trim_matches('`');
        let (seen_kind, seen) = found.get(name).unwrap_or_else(|| panic!("no metric {name}"));
        assert_eq!(seen_kind, kind, "{name}");
        let labels = labels.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        // One whose figure is not known has no sample.
        assert!(seen.as_ref().is_none_or(|seen| *seen == labels), "{name}: {seen:?} {labels:?}");
        assert!(!meaning.is_empty() && documented.insert(name.to_owned()), "{row:?}");
    }
    assert_eq!(found.into_keys().collect::<BTreeSet<_>>(), documented);
}

/// Only words were compared. So a field could be missing from the table of its answer if another
/// answer has a field of that name, and its type could be wrong.
#[test]
fn the_api_is_as_documented() {
    let test = "the_api_is_as_documented";
    if !can_mount(test) {
        return;
    }
    let Some(group) = cgroup(test) else { return };
    let sandbox = Sandbox::new();
    let image = sandbox.import_tree("tree");
    let target = sandbox.text("mnt");
    sandbox.run(&["mount", "--create", "tree", &target]).ok();
    // Makes the commons.
    sandbox.run(&["warm", "tree"]).ok();
    let daemon = Daemon::start(&sandbox, &[]);
    // From now on it sees opened files of the mount.
    daemon.sample();
    // A missing object, so that the report has a warning.
    let missing = sandbox.object(&image, "/etc/passwd");
    unlock(&missing).unwrap();
    std::fs::rename(missing, sandbox.path("missing")).unwrap();
    // A container whose process has opened a file.
    let run = "echo 0 >\"$0\" && exec tail -f \"$1\"";
    let mut tail = Command::new("sh");
    tail.args(["-c", run]).arg(group.procs()).arg(format!("{target}/big")).stdout(Stdio::null());
    let holder = Killed::start(&mut tail);
    let report = until("the container uses an object", || {
        let report = daemon.sample();
        (!report["containers"].as_array().unwrap().is_empty()).then_some(report)
    });
    assert_eq!(report["images"][0]["image"], image.as_str());
    let doc =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/API.md"))
            .unwrap();
    let files = format!("/v1/images/default/{image}/files?sort=%73ize&limit=1");
    let object = daemon.json(&files)["files"][0]["object"].as_str().unwrap().to_owned();
    for (heading, path) in [
        ("version", "/v1/version"),
        ("report", "/v1/report"),
        ("history", "/v1/history"),
        ("sharing", "/v1/sharing?domain=default"),
        ("images/DOMAIN/IMAGE/files", &files),
        ("objects/DOMAIN/OBJECT/users", &format!("/v1/objects/default/{object}/users")),
    ] {
        let found = schema_of([&daemon.json(path)]);
        assert_documented(&doc, &format!("### `GET /v1/{heading}`"), &found);
    }
    assert_documented(&doc, "### `GET /v1/report`", &schema_of([&report]));
    // There is no virtual machine: with one the answer has these fields.
    let refused = Recycling { refusal: Some("locked".to_owned()), ..Recycling::default() };
    let machine = |recycling| VmAccount { recycling, ..VmAccount::default() };
    let machines = serde_json::to_value(VmReport {
        machines: vec![machine(refused), machine(Recycling::default())],
        latency: Latency { bytes: vec![0; 13], p99_ms: Some(1), ..Latency::default() },
        ..VmReport::default()
    });
    let found = schema_of([&machines.unwrap(), &daemon.json("/v1/machines")]);
    assert_documented(&doc, "### `GET /v1/machines`", &found);
    let mut asked = Vec::new();
    let mut answers = Vec::new();
    for target in [
        ReclaimTarget::Container("/".to_owned()),
        ReclaimTarget::Image(UsedImage {
            domain: "default".to_owned(),
            image: image.parse().unwrap(),
        }),
        ReclaimTarget::Domain("default".to_owned()),
    ] {
        let request = ReclaimRequest { target, bytes: Some(1), shared: false, dry_run: true };
        let request = serde_json::to_value(request).unwrap();
        let (status, body) = daemon.post("/v1/reclaim", &request.to_string());
        assert_eq!(status, 200, "{body}");
        asked.push(request);
        answers.push(serde_json::from_str(&body).unwrap());
    }
    assert_documented(&doc, "### Request of `POST /v1/reclaim`", &schema_of(&asked));
    assert_documented(&doc, "### `POST /v1/reclaim`", &schema_of(&answers));
    for (body, status) in [
        ("", 400),
        ("{\"target\": {\"container\": \"/\"}, \"dryrun\": true}", 400),
        ("{\"target\": {\"container\": \"none\"}}", 404),
    ] {
        let (found, said) = daemon.post("/v1/reclaim", body);
        assert!(found == status && said.contains("\"error\""), "{found} {said}");
    }
    // It said "expected value at line 1 column 12".
    for target in ["{}", "{\"container\": \"/\", \"domain\": \"default\"}"] {
        let (found, said) = daemon.post("/v1/reclaim", &format!("{{\"target\": {target}}}"));
        let why = "target needs exactly one of container, image, domain";
        assert!(found == 400 && said.contains(why), "{found} {said}");
    }
    // It did not say of what.
    let (found, said) = daemon.post("/v1/reclaim", "{}");
    assert!(found == 400 && said.contains("the body: missing field"), "{found} {said}");
    assert_metrics_documented(&doc, &daemon.get("/metrics").1);

    for (path, status) in [
        ("/v1/nothing", 404),
        ("/v1/images/default/00/files", 400),
        (&format!("/v1/images/none/{image}/files"), 404),
        (&format!("/v1/images/default/{image}/files?sort=x"), 400),
        (&format!("/v1/images/default/{image}/files?limit=-1"), 400),
        // Without a word it was taken for the most that is possible, and a wrong name for none.
        (&format!("/v1/images/default/{image}/files?limit=100001"), 400),
        (&format!("/v1/images/default/{image}/files?limt=1"), 400),
        ("/v1/sharing?domian=default", 400),
        ("/v1/report?domain=default", 400),
        (&format!("/v1/objects/default/{image}/users"), 404),
        ("/v1/sharing?domain=none", 404),
        ("/v1/sample", 405),
        ("/v1/reclaim", 405),
        ("/..//v1/report", 404),
    ] {
        let (found, body) = daemon.get(path);
        assert_eq!(found, status, "{path}: {body}");
        assert!(body.contains("\"error\""), "{path}: {body}");
    }
    drop(daemon);
    drop(holder);
    drop(group);
    sandbox.run(&["umount", &target]).ok();
}
