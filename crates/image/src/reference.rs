//! Names of images in registries: `host[:port]/name[:tag][@digest]`, and Docker Hub's short forms.
//!
//! The grammar of distribution's `reference` package: the first part is a host if it has a dot or
//! colon or is `localhost`; else the host is Docker Hub, where a single part is in `library/`.

use std::fmt;

use crate::digest::BlobDigest;
use crate::error::RegistryError;

/// What Docker Hub is called in names.
pub(crate) const DOCKER_HUB: &str = "docker.io";
/// Longest repository name, host not counted (distribution's `NameTotalLengthMax`).
const REPOSITORY_MAX: usize = 255;
/// Longest name of an image in the store, in bytes: the store's own limit.
const IMAGE_NAME_MAX: usize = 1024;
const TAG_MAX: usize = 128;
/// Fewest digits of a digest that name an image of the store.
pub const DIGEST_DIGITS_MIN: usize = 4;
/// The tag that is meant if none is given.
const LATEST: &str = "latest";

/// An image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    given: String,
    host: String,
    repository: String,
    tag: Option<String>,
    digest: Option<BlobDigest>,
}

impl Reference {
    /// Parses `[host[:port]/]name[:tag][@digest]`, without `docker://`; errors name the wrong part.
    pub fn parse(text: &str) -> Result<Self, RegistryError> {
        Self::parts(text).map_err(|what| RegistryError::Reference {
            text: text.chars().filter(|c| !c.is_control()).take(300).collect(),
            what,
        })
    }

    fn parts(text: &str) -> Result<Self, String> {
        let (rest, digest) = match text.split_once('@') {
            None => (text, None),
            Some((rest, digest)) => {
                let parsed = BlobDigest::parse(digest)
                    .ok_or("what follows `@` is not sha256:<64 hex digits> or sha512:<128>")?;
                (rest, Some(parsed))
            }
        };
        // A colon after the last slash begins a tag; one before it, a port.
        let name_at = rest.rfind('/').map_or(0, |slash| slash + 1);
        let (name, tag) = match rest[name_at..].find(':') {
            Some(colon) => (&rest[..name_at + colon], Some(&rest[name_at + colon + 1..])),
            None => (rest, None),
        };
        if name == "localhost" || name.parse::<std::net::IpAddr>().is_ok() {
            return Err(format!(
                "{rest} is a registry, and the image is missing: {rest}/NAME[:TAG]"
            ));
        }
        if let Some(tag) = tag {
            check_tag(tag)?;
        }
        let (host, repository) = match name.split_once('/') {
            Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => {
                check_host(first)?;
                (first.to_ascii_lowercase(), rest.to_owned())
            }
            _ => (DOCKER_HUB.to_owned(), name.to_owned()),
        };
        let (host, repository) = match host.as_str() {
            "docker.io" | "index.docker.io" | "registry-1.docker.io" => {
                let official = !repository.contains('/') && !repository.is_empty();
                let prefix = if official { "library/" } else { "" };
                (DOCKER_HUB.to_owned(), format!("{prefix}{repository}"))
            }
            _ => (host, repository),
        };
        check_repository(&repository)?;
        let tag = tag.or(digest.is_none().then_some(LATEST));
        let given = match (rest == name, &digest) {
            (true, None) => format!("{text}:{LATEST}"),
            _ => text.to_owned(),
        };
        Ok(Self { given, host, repository, tag: tag.map(str::to_owned), digest })
    }

    /// The registry's host, with the port if one was given; `docker.io` for Docker Hub.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The repository's name in the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// What it goes by in the store: as it was given, with the tag that was meant.
    pub fn name(&self) -> &str {
        &self.given
    }

    /// The tag, unless a digest says which image is meant.
    pub(crate) fn tag(&self) -> Option<&str> {
        self.tag.as_deref().filter(|_| self.digest.is_none())
    }

    pub(crate) fn digest(&self) -> Option<&BlobDigest> {
        self.digest.as_ref()
    }

    /// What follows `manifests/` in a URL: the digest if there is one, else the tag.
    pub(crate) fn target(&self) -> String {
        let tag = self.tag.as_deref().unwrap_or(LATEST);
        self.digest.as_ref().map_or_else(|| tag.to_owned(), ToString::to_string)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "docker://{}", self.given)
    }
}

/// Checks a name for an image in the store. Names of images in registries are valid, but for one that
/// is like `sha256:abcd`.
pub(crate) fn check_image_name(name: &str) -> Result<(), &'static str> {
    if name.trim().is_empty() {
        return Err("it is blank");
    }
    if name.trim() != name {
        return Err("it begins or ends with a blank");
    }
    if name.len() > IMAGE_NAME_MAX {
        return Err("it is longer than 1024 bytes");
    }
    if name.chars().any(char::is_control) {
        return Err("it has control characters");
    }
    if ["/", "./", "../"].iter().any(|start| name.starts_with(start)) {
        return Err("it is a path, and commands would take it for a file");
    }
    if name.split('/').any(|part| part == "." || part == "..") {
        return Err("it has a part `.` or `..`");
    }
    if name.starts_with('-') {
        return Err("commands would take it for an option");
    }
    let digits = name.strip_prefix("sha256:").unwrap_or(name);
    if digits.len() >= DIGEST_DIGITS_MIN && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(
            "commands would take it for the first digits of a digest; a tag as in NAME:1 helps",
        );
    }
    Ok(())
}

fn check_tag(tag: &str) -> Result<(), String> {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let valid = tag.bytes().enumerate().all(|(at, b)| word(b) || (at > 0 && b".-".contains(&b)));
    if tag.is_empty() || tag.len() > TAG_MAX || !valid {
        return Err(format!(
            "{tag:?} is not a tag: up to {TAG_MAX} letters, digits, `_`, and after the first `.` and `-`"
        ));
    }
    Ok(())
}

/// Checks `host[:port]`: a domain name, an IPv4 address, or an IPv6 one in brackets.
pub(crate) fn check_host(text: &str) -> Result<(), String> {
    let bad = || format!("{text:?} is not a host[:port]");
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => {
            address.parse::<std::net::Ipv6Addr>().map_err(|_| bad())?;
            (None, port.strip_prefix(':').map_or((!port.is_empty()).then_some("?"), Some))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (Some(host), Some(port)),
            None => (Some(text), None),
        },
    };
    if let Some(host) = host {
        let label = |label: &str| {
            !label.is_empty()
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if host.len() > 253 || !host.split('.').all(label) {
            return Err(bad());
        }
    }
    match port {
        None => Ok(()),
        Some(port) if port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok() => {
            Ok(())
        }
        Some(_) => Err(bad()),
    }
}

/// Checks a repository's name: lower-case letters and digits, between them `.`, `_`, `__`, `-`….
pub(crate) fn check_repository(name: &str) -> Result<(), String> {
    let part = |part: &str| {
        let mut separator = "";
        let mut rest = part;
        while !rest.is_empty() {
            let word = rest.find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit()));
            if word == Some(0) {
                return false;
            }
            let (_, after) = rest.split_at(word.unwrap_or(rest.len()));
            let end = after.find(|c: char| !"._-".contains(c)).unwrap_or(after.len());
            (separator, rest) = after.split_at(end);
            let valid =
                matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|b| b == b'-');
            if !valid {
                return false;
            }
        }
        !part.is_empty() && separator.is_empty()
    };
    if name.is_empty() {
        return Err("the name of the image is missing".into());
    }
    if name.len() > REPOSITORY_MAX {
        return Err(format!("a name of {} bytes is longer than {REPOSITORY_MAX}", name.len()));
    }
    if let Some(bad) = name.split('/').find(|p| !part(p)) {
        let why = if bad.bytes().any(|b| b.is_ascii_uppercase()) {
            "names are lower-case"
        } else {
            "parts of names are lower-case letters and digits with single `.`, `_` or `-` between them"
        };
        return Err(format!("{bad:?} cannot be in a name: {why}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        match Reference::parse(text) {
            Ok(r) => format!("{} {} {} as {}", r.host, r.repository, r.target(), r.name()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn names_are_what_docker_takes_them_for() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        for (text, expected) in [
            ("redis", "docker.io library/redis latest as redis:latest"),
            ("redis:7.0.15", "docker.io library/redis 7.0.15 as redis:7.0.15"),
            ("team/app", "docker.io team/app latest as team/app:latest"),
            ("docker.io/redis:7", "docker.io library/redis 7 as docker.io/redis:7"),
            ("localhost/app:1", "localhost app 1 as localhost/app:1"),
            ("localhost:5000/app", "localhost:5000 app latest as localhost:5000/app:latest"),
            ("[::1]:5000/a/b:c", "[::1]:5000 a/b c as [::1]:5000/a/b:c"),
            (
                "Registry.Example/team/app:1",
                "registry.example team/app 1 as Registry.Example/team/app:1",
            ),
            ("a--b/c__d.e:_x.Y-z", "docker.io a--b/c__d.e _x.Y-z as a--b/c__d.e:_x.Y-z"),
        ] {
            assert_eq!(shown(text), expected);
        }
        let by_digest = shown(&format!("host.example/app:1@{digest}"));
        assert_eq!(by_digest, format!("host.example app {digest} as host.example/app:1@{digest}"));
    }

    #[test]
    fn what_is_wrong_with_a_name_is_said() {
        for (text, expected) in [
            ("", "missing"),
            ("host.example/", "missing"),
            ("Redis", "lower-case"),
            ("a//b", "cannot be in a name"),
            ("a/../b", "cannot be in a name"),
            ("a___b", "cannot be in a name"),
            ("a.-b", "cannot be in a name"),
            ("-a", "cannot be in a name"),
            ("a-", "cannot be in a name"),
            ("a b", "cannot be in a name"),
            ("redis:", "not a tag"),
            ("redis:.x", "not a tag"),
            ("redis:a/b:c", "not a host"),
            ("host.example:99999/a", "not a host"),
            ("host..example/a", "not a host"),
            ("user@host.example/a", "sha256"),
            ("[::g]:1/a", "not a host"),
            ("redis@sha256:00", "sha256"),
            ("redis@md5:00", "sha256"),
            ("127.0.0.1:5731", "127.0.0.1:5731/NAME"),
            ("127.0.0.1", "the image is missing"),
            ("localhost:5000", "the image is missing"),
        ] {
            let error = shown(text);
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        assert!(shown(&format!("{}:x", "a/".repeat(200) + "b")).contains("longer"));
    }
}
