//! One HTTP exchange: TLS, timeouts, redirects. Knows nothing of registries.

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ureq::http::{self, HeaderMap};
use ureq::{Agent, Body, Proxy};

use super::RegistryOptions;
use super::certs;
use super::error::{RegistryError, quoted};
use super::pace::{Failure, Limiter};
use super::url::{Url, is_loopback};

/// Redirects in a row that are followed.
const REDIRECTS_MAX: usize = 8;
/// Largest header of an answer, in bytes.
const HEADER_MAX: usize = 64 << 10;
/// A document that takes longer than so many stall timeouts is not worth waiting for.
const DOCUMENT_STALLS: u32 = 4;

/// All connections of one pull, kept open between requests.
#[derive(Debug)]
pub(crate) struct Http {
    pub(crate) options: RegistryOptions,
    pub(crate) limiter: Limiter,
    /// By host: certificates are the host's.
    agents: Mutex<HashMap<String, Agent>>,
}

/// What to ask.
pub(crate) struct Request<'a> {
    pub(crate) method: http::Method,
    pub(crate) url: &'a Url,
    pub(crate) headers: &'a [(&'a str, &'a str)],
    /// Value of the `Authorization` header. Never sent to another server than the URL's.
    pub(crate) authorization: Option<&'a str>,
    /// Body, and its media type.
    pub(crate) body: Option<(&'a str, &'a [u8])>,
    /// The answer is a document and not a blob: it may take a bounded time.
    pub(crate) document: bool,
}

/// What came back.
pub(crate) struct Response {
    /// Where it came from in the end.
    pub(crate) url: Url,
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Body,
    /// Another server than the one that was asked has answered.
    pub(crate) elsewhere: bool,
}

impl Response {
    /// A header, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The body, up to `max` bytes.
    pub(crate) fn document(&mut self, max: u64) -> Result<Vec<u8>, Failure> {
        let too_big = |size: &str| RegistryError::Answer {
            url: self.url.to_string(),
            what: format!("a document of {size} bytes, more than {max}"),
        };
        if let Some(size) = self.body.content_length().filter(|&size| size > max) {
            return Err(too_big(&size.to_string()).into());
        }
        let mut bytes = Vec::new();
        let read = self.body.as_reader().take(max + 1).read_to_end(&mut bytes);
        read.map_err(|e| Failure::again(broken(&self.url, &e)))?;
        if bytes.len() as u64 > max {
            return Err(too_big("or more").into());
        }
        Ok(bytes)
    }
}

impl Http {
    pub(crate) fn new(options: RegistryOptions) -> Self {
        let limiter = Limiter::new(options.rate_max);
        Self { options, limiter, agents: Mutex::default() }
    }

    /// Sends a request, and follows redirects of those that only read.
    pub(crate) fn send(&self, request: &Request<'_>) -> Result<Response, Failure> {
        let mut url = request.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let same = url.same_origin(request.url);
            let authorization = request.authorization.filter(|_| same);
            let answer = self.run(request, &url, authorization)?;
            let (parts, body) = answer.into_parts();
            let status = parts.status.as_u16();
            let elsewhere = !same;
            let response = Response { url, status, headers: parts.headers, body, elsewhere };
            let reads = matches!(request.method, http::Method::GET | http::Method::HEAD);
            if !reads || !matches!(status, 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let location = response.header("location").ok_or_else(|| RegistryError::Answer {
                url: response.url.to_string(),
                what: "a redirect to nowhere".into(),
            })?;
            url = response.url.join(location)?;
        }
        Err(RegistryError::Answer {
            url: request.url.to_string(),
            what: format!("more than {REDIRECTS_MAX} redirects"),
        }
        .into())
    }

    fn run(
        &self,
        request: &Request<'_>,
        url: &Url,
        authorization: Option<&str>,
    ) -> Result<http::Response<Body>, Failure> {
        self.raw(request, url, authorization)?.map_err(|error| failure(url, &error))
    }

    /// Whether a server speaks TLS. One without a valid certificate does: it is told what is wrong with it.
    pub(crate) fn speaks_tls(&self, url: &Url) -> Result<bool, Failure> {
        let request = Request {
            method: http::Method::GET,
            url,
            headers: &[],
            authorization: None,
            body: None,
            document: true,
        };
        match self.raw(&request, url, None)? {
            Ok(_) => Ok(true),
            Err(error) => match tls_error(&error) {
                Some(rustls::Error::InvalidMessage(_)) => Ok(false),
                _ if is_refused(&error) && !has_port(&url.authority) => Ok(false),
                _ => Err(failure(url, &error)),
            },
        }
    }

    fn raw(
        &self,
        request: &Request<'_>,
        url: &Url,
        authorization: Option<&str>,
    ) -> Result<Result<http::Response<Body>, ureq::Error>, RegistryError> {
        let allowed = || is_loopback(&url.authority) || self.options.is_insecure(&url.authority);
        if !url.tls && !allowed() {
            return Err(RegistryError::PlainHttp { url: url.to_string() });
        }
        let agent = self.agent(&url.authority)?;
        let mut builder = http::Request::builder().method(request.method.clone()).uri(url.whole());
        for (name, value) in request.headers {
            builder = builder.header(*name, *value);
        }
        if let Some(value) = authorization {
            let mut value = http::HeaderValue::from_str(value).map_err(|_| {
                let what = "credentials that cannot be sent: control characters".into();
                RegistryError::Answer { url: url.to_string(), what }
            })?;
            value.set_sensitive(true);
            builder = builder.header("authorization", value);
        }
        if let Some((media_type, _)) = request.body {
            builder = builder.header("content-type", media_type);
        }
        let time = request.document.then(|| self.options.stall_timeout * DOCUMENT_STALLS);
        let bad = |e: http::Error| RegistryError::Answer {
            url: url.to_string(),
            what: format!("cannot be asked for: {e}"),
        };
        Ok(match request.body {
            None => {
                let built = builder.body(()).map_err(bad)?;
                agent.run(agent.configure_request(built).timeout_recv_body(time).build())
            }
            Some((_, body)) => {
                let built = builder.body(body).map_err(bad)?;
                agent.run(agent.configure_request(built).timeout_recv_body(time).build())
            }
        })
    }

    fn agent(&self, authority: &str) -> Result<Agent, RegistryError> {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(agent) = agents.get(authority) {
            return Ok(agent.clone());
        }
        let RegistryOptions { connect_timeout, stall_timeout, ref certs_dirs, .. } = self.options;
        // As all programs: $HTTPS_PROXY, $HTTP_PROXY, $NO_PROXY. Never for this machine.
        let proxy = if is_loopback(authority) { None } else { Proxy::try_from_env() };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("cofolio/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .max_response_header_size(HEADER_MAX)
            .timeout_resolve(Some(connect_timeout))
            .timeout_connect(Some(connect_timeout))
            .timeout_per_read(Some(stall_timeout))
            .timeout_per_write(Some(stall_timeout))
            .timeout_recv_response(Some(stall_timeout))
            .tls_config(certs::tls_for(authority, certs_dirs)?)
            .proxy(proxy)
            .build();
        let agent = Agent::new_with_config(config);
        agents.insert(authority.to_owned(), agent.clone());
        Ok(agent)
    }
}

fn has_port(authority: &str) -> bool {
    authority.rsplit(']').next().is_some_and(|rest| rest.contains(':'))
}

fn is_refused(error: &ureq::Error) -> bool {
    matches!(error, ureq::Error::Io(e) if e.kind() == io::ErrorKind::ConnectionRefused)
}

/// The TLS error that an error is or holds.
fn tls_error(error: &ureq::Error) -> Option<&rustls::Error> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// A connection that broke off.
pub(crate) fn broken(url: &Url, error: &io::Error) -> RegistryError {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>());
    let what = match inner {
        Some(ureq::Error::Timeout(_)) => "nothing more came".to_owned(),
        _ if error.kind() == io::ErrorKind::TimedOut => "nothing more came".to_owned(),
        _ => format!("the connection broke off: {}", quoted(&error.to_string())),
    };
    RegistryError::Unreachable { url: url.to_string(), what, tries: 0 }
}

/// Tells what went wrong without repeating what may be secret: ureq quotes URLs.
fn failure(url: &Url, error: &ureq::Error) -> Failure {
    use ureq::Timeout;
    let unreachable =
        |what: String| RegistryError::Unreachable { url: url.to_string(), what, tries: 0 };
    if let Some(tls) = tls_error(error) {
        let what = match tls {
            rustls::Error::InvalidMessage(_) => "does not speak TLS".to_owned(),
            other => format!("TLS: {other}"),
        };
        return unreachable(what).into();
    }
    match error {
        ureq::Error::HostNotFound => unreachable("no host of that name".into()).into(),
        ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => {
            Failure::again(unreachable("no connection within the time allowed".into()))
        }
        ureq::Error::Timeout(_) => Failure::again(unreachable("no answer came".into())),
        ureq::Error::Io(error) => Failure::again(unreachable(quoted(&error.to_string()))),
        ureq::Error::Protocol(_) | ureq::Error::ConnectionFailed => {
            Failure::again(unreachable(quoted(&error.to_string())))
        }
        ureq::Error::LargeResponseHeader(..) => RegistryError::Answer {
            url: url.to_string(),
            what: format!("a header of more than {HEADER_MAX} bytes"),
        }
        .into(),
        ureq::Error::ConnectProxyFailed(_) => unreachable("the proxy refuses".into()).into(),
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => RegistryError::Answer {
            url: url.to_string(),
            what: "not a URL that can be asked".into(),
        }
        .into(),
        _ => unreachable(quoted(&error.to_string())).into(),
    }
}

/// `Retry-After` in seconds; a date is not understood, our own pause does then.
pub(crate) fn retry_after(response: &Response) -> Option<Duration> {
    response.header("retry-after")?.trim().parse().ok().map(Duration::from_secs)
}
