//! The configuration file: precedence, what `config show` says of it, and what is wrong with it.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;

use common::{Ran, Sandbox};

/// Value and origin of a setting in `config show --json`.
fn setting(ran: &Ran, key: &str) -> (String, String) {
    ran.ok();
    let report = ran.json();
    let settings = report["settings"].as_array().unwrap();
    let setting = settings.iter().find(|setting| setting["key"] == key);
    let setting = setting.unwrap_or_else(|| panic!("no {key} in {report}"));
    let text = |name: &str| setting[name].as_str().unwrap_or("null").to_owned();
    (text("value"), text("from"))
}

#[test]
fn a_flag_goes_before_a_variable_before_the_file_before_the_default() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("c.toml");
    fs::write(&file, "[store]\npath = '/from/file'\n[store.limit]\nsize = '1.5 GiB'\n").unwrap();
    let show = |variable: bool, args: &[&str]| {
        let args = [&["config", "show", "--json"], args].concat();
        let mut command = sandbox.command(&args);
        if !variable {
            command.env_remove("COFOLIO_STORE");
        }
        common::run_with_input(command, b"")
    };
    let named = ["--config", file.to_str().unwrap()];
    let is = |value: &str, from: &str| (value.to_owned(), from.to_owned());

    let ran = show(false, &[]);
    assert_eq!(setting(&ran, "store.path"), is("/var/lib/cofolio", "default"));
    assert_eq!(setting(&ran, "store.limit.size"), is("null", "default"));
    let ran = show(false, &named);
    assert_eq!(setting(&ran, "store.path"), is("/from/file", "file"));
    assert_eq!(setting(&ran, "store.limit.size"), is("1536 MiB", "file"));
    assert_eq!(setting(&ran, "store.domain"), is("default", "default"));
    assert_eq!(ran.json()["file"], file.to_str().unwrap());
    let ran = show(true, &named);
    assert_eq!(setting(&ran, "store.path"), is(&sandbox.text("store"), "env"));
    let ran = show(true, &[&named[..], &["--store", "/from/flag", "--domain", "d"]].concat());
    assert_eq!(setting(&ran, "store.path"), is("/from/flag", "flag"));
    assert_eq!(setting(&ran, "store.domain"), is("d", "flag"));

    // The options before the command count too, and commands do what the file says.
    let mut command = sandbox.command(&["--config", file.to_str().unwrap(), "images"]);
    command.env_remove("COFOLIO_STORE");
    let ran = common::run_with_input(command, b"");
    ran.fails_with(3);
    assert!(ran.stderr.contains("no store at `/from/file`"), "{}", ran.stderr);
}

#[test]
fn a_wrong_file_is_named_with_line_and_key_and_nothing_is_done() {
    let sandbox = Sandbox::new();
    let tree = sandbox.tree("tree");
    let file = sandbox.path("c.toml");
    fs::write(&file, "[store]\n\n[store.limt]\nsize = '1 GiB'\n").unwrap();
    let ran = sandbox.run(&["import", tree.to_str().unwrap(), "--config", file.to_str().unwrap()]);
    ran.fails_with(2);
    let begins = format!("cofolio: {}:3: unknown field `limt`", file.display());
    assert!(ran.stderr.starts_with(&begins), "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: did you mean `limit`?"), "{}", ran.stderr);
    assert!(!sandbox.path("store").exists());

    // One that was asked for must be there.
    let ran = sandbox.run(&["config", "show", "--config", &sandbox.text("missing.toml")]);
    ran.fails_with(3);
    assert!(ran.stderr.contains("missing.toml"), "{}", ran.stderr);
    fs::write(&file, b"\xff").unwrap();
    sandbox.run(&["config", "show", "--config", file.to_str().unwrap()]).fails_with(1);
}

#[test]
fn what_config_default_prints_is_a_file_that_changes_nothing() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("c.toml");
    fs::write(&file, sandbox.run(&["config", "default"]).ok()).unwrap();
    let args = ["config", "show", "--json"];
    let plain = sandbox.run(&args).json();
    let with = sandbox.run(&[&args[..], &["--config", file.to_str().unwrap()]].concat()).json();
    assert_eq!(plain["settings"], with["settings"]);
}
