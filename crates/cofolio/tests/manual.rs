//! Man pages and completions, as man, mandoc and the shells take them.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Sandbox, program, run_with_input, skip};

/// All pages, in a directory of the sandbox.
fn pages(sandbox: &Sandbox) -> Vec<PathBuf> {
    let dir = sandbox.text("new/man1");
    sandbox.run(&["man", &dir]).ok();
    let mut pages: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.sort();
    pages
}

#[test]
fn every_command_has_a_page() {
    let sandbox = Sandbox::new();
    let pages = pages(&sandbox);
    let named = |name: &str| pages.iter().find(|page| page.ends_with(name));
    for name in ["cofolio.1", "cofolio-mount.1", "cofolio-config-show.1"] {
        assert!(named(name).is_some(), "{name}: {pages:?}");
    }
    assert!(named("cofolio-help.1").is_none(), "{pages:?}");
    let main = fs::read_to_string(named("cofolio.1").unwrap()).unwrap();
    assert_eq!(sandbox.run(&["man"]).ok(), main);
    assert!(main.contains(".SH \"EXIT STATUS\"") && main.contains(".SH \"EXAMPLES\""), "{main}");
    assert!(!main.contains(".SH EXTRA"), "{main}");
}

#[test]
fn man_and_mandoc_accept_the_pages() {
    const TEST: &str = "man_and_mandoc_accept_the_pages";
    let sandbox = Sandbox::new();
    let pages = pages(&sandbox);
    match program("mandoc") {
        None => skip(TEST, "mandoc is not installed"),
        Some(mandoc) => {
            let mut command = Command::new(mandoc);
            command.args(["-T", "lint", "-W", "error"]).args(&pages);
            let ran = run_with_input(command, b"");
            assert_eq!((ran.code, ran.stdout.as_str()), (0, ""), "{}", ran.stderr);
        }
    }
    let Some(man) = program("man") else { return skip(TEST, "man is not installed") };
    for page in pages {
        let mut command = Command::new(&man);
        // As lintian looks for what groff complains about.
        command.args(["--warnings", "-E", "UTF-8", "-l", "-Tutf8"]).arg(&page).envs([
            ("LC_ALL", "C.UTF-8"),
            ("MANROFFSEQ", ""),
            ("MANWIDTH", "80"),
        ]);
        let ran = run_with_input(command, b"");
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{}", page.display());
        assert!(ran.stdout.lines().count() > 20, "{}: {}", page.display(), ran.stdout);
    }
}

#[test]
fn bash_completes() {
    let Some(bash) = program("bash") else {
        return skip("bash_completes", "bash is not installed");
    };
    let sandbox = Sandbox::new();
    sandbox.import_tree("box-1");
    sandbox.run(&["tag", "box-1", "other"]).ok();
    let script = sandbox.path("cofolio.bash");
    fs::write(&script, sandbox.run(&["completions", "bash"]).ok()).unwrap();
    // What the shell does when somebody presses Tab behind the last word.
    const TAB: &str = r#"
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9
        _clap_complete_cofolio "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let complete = |words: &[&str]| -> Vec<String> {
        let mut command = Command::new(&bash);
        command.args(["--norc", "-c", TAB, "bash"]).arg(&script).args(words);
        command.env("COFOLIO_STORE", sandbox.path("store")).env("PATH", path());
        let ran = run_with_input(command, b"");
        assert_eq!(ran.stderr, "", "{words:?}");
        let mut words: Vec<String> = ran.ok().lines().map(str::to_owned).collect();
        words.sort();
        words
    };
    assert_eq!(complete(&["cofolio", "im"]), ["images", "import"]);
    assert_eq!(complete(&["cofolio", "completions", "z"]), ["zsh"]);
    assert_eq!(complete(&["cofolio", "diff", "a", "b", "--no"]), ["--no-pages"]);
    assert_eq!(complete(&["cofolio", "nonsense"]), [""]);
    assert_eq!(complete(&["cofolio", "mount", "b"]), ["box-1"]);
    assert_eq!(complete(&["cofolio", "diff", "other", "o"]), ["other"]);
    assert_eq!(complete(&["cofolio", "rm", "box-1", "oth"]), ["other"]);
}

/// The scripts start `cofolio`: here this one.
fn path() -> String {
    let dir = Path::new(env!("CARGO_BIN_EXE_cofolio")).parent().unwrap().display();
    format!("{dir}:{}", std::env::var("PATH").unwrap())
}

#[test]
fn fish_and_zsh_take_their_scripts() {
    const TEST: &str = "fish_and_zsh_take_their_scripts";
    let sandbox = Sandbox::new();
    let script = |shell: &str| {
        let path = sandbox.path(shell);
        fs::write(&path, sandbox.run(&["completions", shell]).ok()).unwrap();
        path
    };
    match program("fish") {
        None => skip(TEST, "fish is not installed"),
        Some(fish) => {
            let mut command = Command::new(fish);
            command
                .args(["--no-config", "-c", "source $argv[1]; complete -C 'cofolio im'"])
                .arg(script("fish"))
                .env("HOME", sandbox.dir("home"))
                .env("PATH", path());
            let ran = run_with_input(command, b"");
            let mut words: Vec<_> =
                ran.ok().lines().filter_map(|line| line.split('\t').next()).collect();
            words.sort_unstable();
            assert_eq!(words, ["images", "import"], "{}", ran.stderr);
        }
    }
    let Some(zsh) = program("zsh") else { return skip(TEST, "zsh is not installed") };
    let mut command = Command::new(zsh);
    command.args(["-f", "-n"]).arg(script("zsh"));
    let ran = run_with_input(command, b"");
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    sandbox.run(&["completions", "tcsh"]).fails_with(2);
}
