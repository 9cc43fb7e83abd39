//! The module `registry::fuzz` of crate image, which only `--cfg fuzzing` builds: it sees what is
//! private there.
//!
//! Each function takes any bytes and panics where an invariant of its target in `fuzz_targets/`
//! does not hold.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use super::challenge::{self, Challenge};
use super::endpoint;
use super::url::Url;
use crate::reference::Reference;

/// What a registry or a user says: a name, a `WWW-Authenticate`, a `Location`, a token.
pub fn answers(data: &[u8]) {
    if let Ok(token) = endpoint::token_of(data) {
        assert!(!token.is_empty());
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(name) = Reference::parse(text) {
        let again = Reference::parse(name.name()).unwrap();
        assert_eq!(again.name(), name.name());
        assert_eq!((again.host(), again.repository()), (name.host(), name.repository()));
        assert_eq!(again.target(), name.target());
        assert!(Url::parse(&format!("https://{}/v2/{}/", name.host(), name.repository())).is_ok());
    }
    let lines: Vec<&str> = text.lines().collect();
    if let Some(Challenge::Bearer { realm, service }) = challenge::best(lines.iter().copied())
        && let Ok(url) = Url::parse(&realm)
    {
        same_url(&url);
        same_url(&url.query("service", &service));
    }
    let base = Url::parse("https://registry.example:5000/v2/a/blobs/x?y").unwrap();
    for line in lines {
        if let Ok(url) = Url::parse(line) {
            same_url(&url);
        }
        if let Ok(url) = base.join(line) {
            same_url(&url);
            // What does not name a server stays where it is.
            let first = line.split(['/', '?', '#']).next().unwrap();
            if !line.starts_with("//") && !first.ends_with(':') {
                assert!(url.same_origin(&base), "{line:?} leads elsewhere");
            }
        }
    }
}

fn same_url(url: &Url) {
    let again = Url::parse(&url.whole()).unwrap();
    assert!(again == *url && again.same_origin(url));
}
