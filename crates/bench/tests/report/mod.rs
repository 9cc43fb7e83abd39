//! What `cofolio-bench share` reported.

use std::{fs, path::Path};

use serde_json::Value;

/// The report, if every byte was right and every page was counted. The checks that compare memory of the whole machine
/// are not asked: they also fail where somebody else drops what is cached meanwhile.
pub(crate) fn counted(json: &Path) -> Value {
    let report: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    for what in ["every byte read", "resident pages of content"] {
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["what"].as_str().unwrap().starts_with(what));
        assert_eq!(check.unwrap()["ok"], true, "{report:#}");
    }
    report
}
