//! Credential helpers: `docker-credential-NAME get`, the server on stdin, JSON on stdout.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cofolio_store::task::Cancel;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;

use super::credentials::Secret;
use crate::error::{RegistryError, quoted};

/// A helper may ask its user.
const TIME_MAX: Duration = Duration::from_secs(60);
const ANSWER_MAX: u64 = 1 << 20;
/// The answer of helpers without credentials (docker-credential-helpers).
const NOT_FOUND: &str = "credentials not found in native keychain";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

pub(crate) fn get(
    name: &str,
    server: &str,
    cancel: &Cancel,
) -> Result<Option<Secret>, RegistryError> {
    let program = format!("docker-credential-{name}");
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if !name.bytes().all(plain) {
        let what = "not the name of a credential helper".to_owned();
        return Err(RegistryError::Credentials { place: quoted(&program), what });
    }
    ask(&program, server, TIME_MAX, cancel)
}

fn ask(
    program: &str,
    server: &str,
    time: Duration,
    cancel: &Cancel,
) -> Result<Option<Secret>, RegistryError> {
    let bad = |what: String| RegistryError::Credentials { place: program.to_owned(), what };
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|e| bad(format!("cannot be started: {e}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that does not read says why on its standard output.
        let _ = stdin.write_all(server.as_bytes());
    }
    let (to_us, answer) = channel();
    let stdout = child.stdout.take();
    let reader = std::thread::Builder::new().spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.map_or(Ok(0), |out| out.take(ANSWER_MAX).read_to_end(&mut bytes));
        let _ = to_us.send(read.map(|_| bytes));
    });
    if let Err(error) = reader {
        end(&mut child);
        return Err(bad(format!("no thread to read its answer: {error}")));
    }
    let start = Instant::now();
    let mut bytes = None;
    // A helper may answer and go on: its end is waited for as its answer is.
    let ended = cancel.wait_for(|| {
        bytes = bytes.take().or_else(|| answer.try_recv().ok());
        let status = bytes.as_ref().map_or(Ok(None), |_| child.try_wait());
        match status.map_err(|e| bad(e.to_string()))? {
            None if start.elapsed() >= time => {
                Err(bad(format!("gave no answer within {} s", time.as_secs_f32())))
            }
            status => Ok(status),
        }
    });
    let status = ended.inspect_err(|_| end(&mut child))?;
    let bytes = bytes.unwrap_or(Ok(Vec::new())).map_err(|e| bad(e.to_string()))?;
    if !status.success() {
        let text = String::from_utf8_lossy(&bytes);
        if text.trim() == NOT_FOUND {
            return Ok(None);
        }
        return Err(bad(format!("{status}: {}", quoted(&text))));
    }
    // The parser's error may quote the secret.
    let answer: Answer =
        serde_json::from_slice(&bytes).map_err(|_| bad("its answer is not JSON".into()))?;
    Ok(Some(match answer.username.as_str() {
        "<token>" => Secret::Identity(answer.secret),
        _ => Secret::Password(answer.username, answer.secret),
    }))
}

/// Kills a helper and the processes that it started.
fn end(child: &mut Child) {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let _ = group.map(|group| kill_process_group(group, Signal::KILL));
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What a helper with this script gives for `h.example`.
    fn script(text: &str, time: Duration) -> Result<Option<Secret>, String> {
        script_until(&Cancel::default(), text, time)
    }

    fn script_until(cancel: &Cancel, text: &str, time: Duration) -> Result<Option<Secret>, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("docker-credential-test");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        let program = path.to_str().expect("UTF-8");
        // Another thread may have forked while the script was open for writing (ETXTBSY).
        for _ in 0..50 {
            match ask(program, "h.example", time, cancel) {
                Err(error) if error.to_string().contains("busy") => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => return other.map_err(|error| error.to_string()),
            }
        }
        Err("always busy".into())
    }

    #[test]
    fn helpers_are_asked_as_docker_asks_them() {
        let long = Duration::from_secs(30);
        let both = r#"[ "$1 $(cat)" = "get h.example" ] && echo '{"ServerURL":"h.example","Username":"u","Secret":"p"}'"#;
        assert_eq!(script(both, long), Ok(Some(Secret::Password("u".into(), "p".into()))));
        let token = r#"echo '{"Username":"<token>","Secret":"t"}'"#;
        assert_eq!(script(token, long), Ok(Some(Secret::Identity("t".into()))));
        let none = format!("echo {NOT_FOUND}; exit 1");
        assert_eq!(script(&none, long), Ok(None));
        let failed = script("echo the keyring is locked; exit 3", long).expect_err("failed");
        assert!(
            failed.contains("the keyring is locked") && failed.contains("exit status: 3"),
            "{failed}"
        );
        let garbage = script("echo topsecret", long).expect_err("garbage");
        assert!(garbage.contains("not JSON") && !garbage.contains("topsecret"), "{garbage}");
        // Neither the helper nor its child is waited for: either would have written the file.
        let dir = tempfile::tempdir().expect("a directory");
        let ended = dir.path().join("ended");
        let sleepers =
            format!("(sleep 20; echo >{0}) & sleep 20; echo >{0}", ended.to_str().expect("UTF-8"));
        let hangs = script(&sleepers, Duration::from_millis(300)).expect_err("hangs");
        assert!(hangs.contains("no answer within 0.3 s"), "{hangs}");
        assert!(!ended.exists());
        // One that had answered and went on was waited for without an end, even after a cancel.
        let stays = script("echo x; exec >&-; sleep 20", Duration::from_millis(300));
        assert!(stays.is_err_and(|error| error.contains("no answer within 0.3 s")));
    }

    /// Ctrl-C had no effect while a helper asked its user: for up to a minute.
    #[test]
    fn a_cancel_ends_a_helper() {
        let cancel = Cancel::default();
        cancel.cancel();
        let ended = script_until(&cancel, "sleep 20", Duration::from_secs(30)).expect_err("ended");
        assert_eq!(ended, RegistryError::GivenUp.to_string());
    }

    #[test]
    fn names_are_no_paths() {
        for name in ["../evil", "a b", "/bin/sh", "x;y"] {
            let error = get(name, "h", &Cancel::default()).expect_err(name).to_string();
            assert!(error.contains("not the name"), "{error}");
        }
        let error = get("there-is-none", "h", &Cancel::default()).expect_err("missing").to_string();
        assert!(error.contains("docker-credential-there-is-none"), "{error}");
    }
}
