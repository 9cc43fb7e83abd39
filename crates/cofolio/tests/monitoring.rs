//! The files for Prometheus, Grafana and systemd in `packaging/`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Alerts and dashboards name metrics that the daemon has (`tests/serve/documented.rs` compares those of
/// `docs/API.md` with a daemon's).
#[test]
fn alerts_and_dashboards_use_documented_metrics() {
    let doc = std::fs::read_to_string(top().join("docs/API.md")).unwrap();
    let (_, metrics) = doc.split_once("## Metrics").unwrap();
    let names = metrics.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let documented: BTreeSet<&str> = names.collect();
    let mut used = 0;
    for directory in ["packaging/prometheus", "packaging/grafana"] {
        for entry in std::fs::read_dir(top().join(directory)).unwrap() {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            for rest in text.split("cofolio_").skip(1) {
                let is_of_name = |c: char| c.is_ascii_lowercase() || c == '_';
                let name = rest.split(|c| !is_of_name(c)).next().unwrap();
                let name = name.strip_suffix("_bucket").unwrap_or(name);
                assert!(documented.contains(name), "{}: {name}", path.display());
                used += 1;
            }
        }
    }
    assert!(used > 0);
}

#[test]
fn the_alert_rules_are_valid() {
    let Some(promtool) = common::program("promtool") else {
        return common::skip("the_alert_rules_are_valid", "promtool is not installed");
    };
    for (what, file) in [("check", "cofolio.rules.yml"), ("test", "cofolio.rules.test.yml")] {
        let file = top().join("packaging/prometheus").join(file);
        let ran = Command::new(&promtool).args([what, "rules"]).arg(file).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{said}");
    }
}

/// An older systemd ignored a service type that only newer ones have: there was no reload.
#[test]
fn the_units_are_valid() {
    let Some(systemd) = common::program("systemd-analyze") else {
        return common::skip("the_units_are_valid", "systemd-analyze is not installed");
    };
    let dir = tempfile::tempdir().unwrap();
    let units = ["cofolio.service", "cofolio.socket"].map(|name| {
        let unit = std::fs::read_to_string(top().join("packaging/systemd").join(name)).unwrap();
        let path = dir.path().join(name);
        std::fs::write(
            &path,
            unit.replace("/usr/bin/cofolio", common::cofolio().to_str().unwrap()),
        )
        .unwrap();
        path
    });
    let mut verify = Command::new(systemd);
    let checked = verify.args(["verify", "--man=no"]).args(units).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && said.is_empty(), "{said}");
}
