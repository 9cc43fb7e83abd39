//! As much of URLs as a registry client needs: absolute http and https ones, and redirects.

use std::fmt;
use std::net::IpAddr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

use crate::error::{RegistryError, quoted};

/// Longest URL that is followed.
const URL_MAX: usize = 16 << 10;

/// An absolute URL without user, password and fragment.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub(crate) tls: bool,
    /// Host and port, lower-case.
    pub(crate) authority: String,
    /// From the `/` on, query included.
    rest: String,
}

impl Url {
    pub(crate) fn new(tls: bool, authority: &str, path: &str) -> Self {
        Self { tls, authority: authority.to_ascii_lowercase(), rest: path.to_owned() }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, RegistryError> {
        let bad = |what: &str| RegistryError::Answer {
            url: quoted(text.split(['?', '#']).next().unwrap_or_default()),
            what: what.to_owned(),
        };
        if text.len() > URL_MAX {
            return Err(bad("a URL that is too long"));
        }
        if text.bytes().any(|b| !(0x21..0x7f).contains(&b)) {
            return Err(bad("not a URL"));
        }
        let scheme = text.split("://").next().unwrap_or_default().to_ascii_lowercase();
        let tls = match scheme.as_str() {
            "https" => true,
            "http" => false,
            _ => return Err(bad("neither an https nor an http URL")),
        };
        let after = text.get(scheme.len() + 3..).unwrap_or_default();
        let after = after.split('#').next().unwrap_or_default();
        let end = after.find(['/', '?']).unwrap_or(after.len());
        let (authority, rest) = after.split_at(end);
        if authority.contains('@') {
            return Err(bad("a URL with a user in it"));
        }
        crate::reference::check_host(authority).map_err(|_| bad("a URL without a host"))?;
        let rest = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
        Ok(Self { tls, authority: authority.to_ascii_lowercase(), rest })
    }

    /// Where a `Location` leads from here.
    pub(crate) fn join(&self, location: &str) -> Result<Self, RegistryError> {
        let scheme = if self.tls { "https" } else { "http" };
        let absolute = if location.split(['/', '?', '#']).next().is_some_and(|s| s.ends_with(':')) {
            location.to_owned()
        } else if location.starts_with("//") {
            format!("{scheme}:{location}")
        } else if location.starts_with('/') {
            format!("{scheme}://{}{location}", self.authority)
        } else {
            let path = self.rest.split('?').next().unwrap_or_default();
            let directory = path.rfind('/').map_or("/", |slash| &path[..=slash]);
            format!("{scheme}://{}{directory}{location}", self.authority)
        };
        Self::parse(&absolute)
    }

    /// With a query parameter added, its value escaped.
    pub(crate) fn query(mut self, key: &str, value: &str) -> Self {
        self.rest.push(if self.rest.contains('?') { '&' } else { '?' });
        self.rest += &format!("{key}={}", escaped(value));
        self
    }

    pub(crate) fn plain(self) -> Self {
        Self { tls: false, ..self }
    }

    /// All of it. Not for messages: the query may be a secret.
    pub(crate) fn whole(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority, self.rest)
    }

    /// Whether it is the same server, so that credentials may go there as well.
    pub(crate) fn same_origin(&self, other: &Self) -> bool {
        let port = |url: &Self| {
            let default = if url.tls { ":443" } else { ":80" };
            url.authority.strip_suffix(default).unwrap_or(&url.authority).to_owned()
        };
        self.tls == other.tls && port(self) == port(other)
    }
}

/// For messages: without the query.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = self.whole();
        f.write_str(whole.split('?').next().unwrap_or_default())
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What is not unreserved (RFC 3986).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Percent-encodes text for queries and forms.
pub(crate) fn escaped(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}

/// Whether `host[:port]` is this machine.
pub(crate) fn is_loopback(authority: &str) -> bool {
    let host = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => authority.split(':').next().unwrap_or_default(),
    };
    match host.parse::<IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_where_they_say() {
        let base = Url::parse("https://Reg.example:5000/v2/a/blobs/x?q=1").expect("valid");
        for (location, expected) in [
            ("https://cdn.example/y?sig=z", "https://cdn.example/y?sig=z"),
            ("HTTP://cdn.example", "http://cdn.example/"),
            ("//cdn.example/y", "https://cdn.example/y"),
            ("/y#f", "https://reg.example:5000/y"),
            ("y:z", "https://reg.example:5000/v2/a/blobs/y:z"),
            ("?u", "https://reg.example:5000/v2/a/blobs/?u"),
        ] {
            assert_eq!(base.join(location).expect(location).whole(), expected);
        }
        for bad in ["ftp://a/b", "https://", "https://u@h/", "https://h h/", "file:///etc/passwd"] {
            assert!(base.join(bad).is_err(), "{bad}");
        }
        let signed = base.join("https://cdn.example/y?sig=z").expect("valid");
        assert_eq!(format!("{signed} {signed:?}"), "https://cdn.example/y https://cdn.example/y");
        assert!(base.same_origin(&base.join("/z").expect("valid")));
        assert!(!base.same_origin(&base.join("https://reg.example/z").expect("valid")));
        assert!(!base.same_origin(&base.join("http://reg.example:5000/z").expect("valid")));
    }

    #[test]
    fn this_machine_is_known() {
        for yes in ["localhost", "localhost:5000", "127.0.0.1:1", "127.9.9.9", "[::1]:5000"] {
            assert!(is_loopback(yes), "{yes}");
        }
        for no in ["localhost.example", "127.0.0.1.example:1", "10.0.0.1", "[::2]:1", "128.0.0.1"] {
            assert!(!is_loopback(no), "{no}");
        }
    }
}
