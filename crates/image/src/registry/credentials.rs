//! Credentials for registries: docker's and podman's files and credential helpers.
//!
//! A file is `{"auths": {KEY: {"auth": base64(user:password)}}, "credHelpers": {KEY: NAME},
//! "credsStore": NAME}`. podman's keys may name a namespace or a repository (`host/ns/name`): the
//! longest that fits is taken. docker's may be URLs (`https://index.docker.io/v1/`): only their
//! host counts (containers-auth.json(5)).

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_store::task::Cancel;
use serde::Deserialize;

use super::helper;
use crate::error::RegistryError;
use crate::files;
use crate::reference::DOCKER_HUB;

/// Largest file with credentials that is read, in bytes.
const FILE_MAX: u64 = 4 << 20;
/// Docker Hub's key, a URL of its first protocol.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// A secret. Debug output shows its kind only.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Secret {
    /// User and password.
    Password(String, String),
    /// A refresh token: good for asking the token server for others.
    Identity(String),
    /// A token for the registry itself.
    Token(String),
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password(..) => "Password(…)",
            Self::Identity(_) => "Identity(…)",
            Self::Token(_) => "Token(…)",
        })
    }
}

impl Secret {
    /// The value of an `Authorization` header for user and password.
    pub(crate) fn basic(user: &str, password: &str) -> String {
        format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}")))
    }
}

/// A secret, and where it is from.
#[derive(Debug, Clone)]
pub(crate) struct Credentials {
    pub(crate) secret: Secret,
    /// A file or a helper.
    pub(crate) from: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct AuthFile {
    auths: BTreeMap<String, Auth>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Auth {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

/// The credentials for a registry, from the first file that has some.
pub(crate) fn find(
    files: &[PathBuf],
    host: &str,
    repository: &str,
    cancel: &Cancel,
) -> Result<Option<Credentials>, RegistryError> {
    for path in files {
        let Some(file) = read(path)? else { continue };
        if let Some(found) = in_file(&file, path, host, repository, cancel)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn read(path: &Path) -> Result<Option<AuthFile>, RegistryError> {
    let bad = |what: String| RegistryError::Credentials { place: path.display().to_string(), what };
    let bytes = match files::read(path, FILE_MAX) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        other => other.map_err(|e| bad(e.to_string()))?,
    };
    // Podman leaves an empty file behind when the last credentials are removed.
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    // Only the position is shown: the text around it may be a password.
    serde_json::from_slice(&bytes).map(Some).map_err(|e| {
        bad(format!("not a file with credentials: line {}, column {}", e.line(), e.column()))
    })
}

fn in_file(
    file: &AuthFile,
    path: &Path,
    host: &str,
    repository: &str,
    cancel: &Cancel,
) -> Result<Option<Credentials>, RegistryError> {
    let keys = keys(host, repository);
    let named = keys.iter().find_map(|key| file.cred_helpers.get(key));
    let store = Some(&file.creds_store).filter(|name| !name.is_empty());
    if let Some(name) = named.or(store) {
        let server = if host == DOCKER_HUB { DOCKER_HUB_KEY } else { host };
        if let Some(secret) = helper::get(name, server, cancel)? {
            let from = format!("docker-credential-{name}");
            return Ok(Some(Credentials { secret, from }));
        }
    }
    let auth = keys.iter().find_map(|key| file.auths.get(key)).or_else(|| {
        // docker's older keys are URLs.
        file.auths.iter().find(|(key, _)| host_of(key) == host).map(|(_, auth)| auth)
    });
    let Some(auth) = auth else { return Ok(None) };
    let secret = secret(auth).map_err(|what| RegistryError::Credentials {
        place: path.display().to_string(),
        what: format!("{what} for {host}"),
    })?;
    Ok(secret.map(|secret| Credentials { secret, from: path.display().to_string() }))
}

/// Matching keys, the most specific first.
fn keys(host: &str, repository: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let mut name = format!("{host}/{repository}");
    keys.push(name.clone());
    while let Some(slash) = name.rfind('/') {
        name.truncate(slash);
        keys.push(name.clone());
    }
    if host == DOCKER_HUB {
        keys.push(DOCKER_HUB_KEY.to_owned());
    }
    keys
}

/// The host of a key that is a URL, or has no path.
fn host_of(key: &str) -> &str {
    let stripped = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"));
    let host = match stripped {
        Some(url) => url.split('/').next().unwrap_or_default(),
        // A key with a namespace is valid for that only.
        None => key.strip_suffix('/').unwrap_or(key),
    };
    match host {
        "index.docker.io" | "registry-1.docker.io" => DOCKER_HUB,
        host => host,
    }
}

fn secret(auth: &Auth) -> Result<Option<Secret>, &'static str> {
    if !auth.identitytoken.is_empty() {
        return Ok(Some(Secret::Identity(auth.identitytoken.clone())));
    }
    if !auth.registrytoken.is_empty() {
        return Ok(Some(Secret::Token(auth.registrytoken.clone())));
    }
    if !auth.auth.is_empty() {
        let bytes =
            BASE64_STANDARD.decode(auth.auth.trim()).map_err(|_| "\"auth\" is not base64")?;
        let text = String::from_utf8(bytes).map_err(|_| "\"auth\" is not UTF-8")?;
        let (user, password) = text.split_once(':').ok_or("\"auth\" is not user:password")?;
        // docker pads with NUL.
        let password = password.trim_end_matches('\0');
        return Ok(Some(Secret::Password(user.to_owned(), password.to_owned())));
    }
    if !auth.username.is_empty() {
        return Ok(Some(Secret::Password(auth.username.clone(), auth.password.clone())));
    }
    // docker writes an empty entry where a helper has the credentials.
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(json: &str, host: &str, repository: &str) -> Result<Option<String>, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("auth.json");
        std::fs::write(&path, json).expect("written");
        let missing = dir.path().join("missing/auth.json");
        let found = find(&[missing, path], host, repository, &Cancel::default())
            .map_err(|e| e.to_string())?;
        Ok(found.map(|found| match found.secret {
            Secret::Password(user, password) => format!("{user} {password}"),
            Secret::Identity(token) => format!("identity {token}"),
            Secret::Token(token) => format!("token {token}"),
        }))
    }

    fn auth(user: &str) -> String {
        let both = Secret::basic(user, "p:w");
        format!(r#"{{"auth":"{}"}}"#, both.strip_prefix("Basic ").expect("begins so"))
    }

    #[test]
    fn the_most_particular_credentials_are_taken() {
        let json = format!(
            r#"{{"auths":{{"h.example":{},"h.example/a":{},"h.example/a/b":{},"other.example/a":{},
            "https://old.example/v1/":{},"https://index.docker.io/v1/":{},
            "id.example":{{"auth":"{}","identitytoken":"t"}},"reg.example":{{"registrytoken":"r"}},
            "plain.example":{{"username":"u","password":"p"}},"empty.example":{{}}}}}}"#,
            auth("host"),
            auth("space"),
            auth("name"),
            auth("other"),
            auth("old"),
            auth("hub"),
            "PHRva2VuPjo=",
        );
        for (host, repository, expected) in [
            ("h.example", "x", Some("host p:w")),
            ("h.example", "a/x", Some("space p:w")),
            ("h.example", "a/b", Some("name p:w")),
            ("h.example", "a/b/c", Some("name p:w")),
            ("h.example", "ab", Some("host p:w")),
            ("other.example", "a/b", Some("other p:w")),
            ("other.example", "b", None),
            ("old.example", "x", Some("old p:w")),
            ("docker.io", "library/redis", Some("hub p:w")),
            ("id.example", "x", Some("identity t")),
            ("reg.example", "x", Some("token r")),
            ("plain.example", "x", Some("u p")),
            ("empty.example", "x", None),
            ("h.example:5000", "x", None),
        ] {
            let found = found(&json, host, repository);
            assert_eq!(found, Ok(expected.map(str::to_owned)), "{host}/{repository}");
        }
    }

    #[test]
    fn files_that_make_no_sense_are_named_without_their_content() {
        for (json, expected) in [
            (r#"{"auths":{"h":{"auth":"c2VjcmV0"}}}"#, "not user:password"),
            (r#"{"auths":{"h":{"auth":"secret!"}}}"#, "not base64"),
            (r#"{"auths":{"h":"secret"}}"#, "line 1"),
            ("secret", "line 1"),
        ] {
            let error = found(json, "h", "x").expect_err(json);
            assert!(error.contains(expected) && error.contains("auth.json"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        assert_eq!(found(" \n", "h", "x"), Ok(None));
        assert_eq!(found("{}", "h", "x"), Ok(None));
    }
}
