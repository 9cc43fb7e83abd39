//! One HTTP exchange: TLS, timeouts, redirects. Knows nothing of registries.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use cofolio_store::task::Cancel;
use ureq::http::{self, HeaderMap};
use ureq::{Agent, Body, Proxy, SendBody};

use super::RegistryOptions;
use super::certs;
use super::pace::{Failure, Limiter, NAP};
use super::url::{Url, is_loopback};
use crate::error::{RegistryError, quoted};

/// Redirects in a row that are followed.
const REDIRECTS_MAX: usize = 8;
/// Largest header of an answer, in bytes.
const HEADER_MAX: usize = 64 << 10;
/// Stall timeouts that a registry may take to answer an upload.
const TAKEN_STALLS: u32 = 10;
/// Tries where nothing has answered yet, and none will for a mistake in the name or the port.
const REFUSED_TRIES_MAX: u32 = 3;
/// The same where each try takes a stall timeout.
const SILENT_TRIES_MAX: u32 = 2;
/// Stall timeouts without a byte on any connection after which nothing is tried again.
const SILENT_STALLS: u32 = 2;
/// Stall timeouts that a document may take.
const DOCUMENT_STALLS: u32 = 4;

/// All connections of one pull or push, kept open between requests.
pub(crate) struct Http {
    pub(crate) options: RegistryOptions,
    pub(crate) limiter: Limiter,
    pub(super) cancel: Cancel,
    agents: Arc<Agents>,
    /// Some server has answered.
    answered: AtomicBool,
    /// Since when waiting has been in vain on all connections.
    silent_since: Mutex<Option<Instant>>,
    watcher: Option<(SyncSender<()>, JoinHandle<()>)>,
}

/// Its threads end with it: a process with threads cannot fork.
impl Drop for Http {
    fn drop(&mut self) {
        if let Some((alive, thread)) = self.watcher.take() {
            drop(alive);
            let _ = thread.join();
        }
    }
}

/// By host: certificates are the host's.
type Agents = Mutex<HashMap<String, Agent>>;

pub(crate) struct Request<'a> {
    pub(crate) method: http::Method,
    pub(crate) url: &'a Url,
    pub(crate) headers: &'a [(&'a str, &'a str)],
    pub(crate) body: Payload<'a>,
    /// The answer is a document and not a blob: it may take a bounded time.
    pub(crate) document: bool,
}

pub(crate) enum Payload<'a> {
    None,
    /// Bytes, and their media type.
    Bytes(&'a str, &'a [u8]),
    /// A form with a secret in it, for this server and no other.
    Form(&'a str),
    /// What a reader gives, as it comes: it can be sent once.
    Stream {
        reader: RefCell<&'a mut dyn Read>,
        size: Option<u64>,
    },
}

/// Media type of blobs.
pub(crate) const OCTETS: &str = "application/octet-stream";

pub(crate) struct Response {
    /// After redirects.
    pub(crate) url: Url,
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Body,
    /// A redirect led to another server.
    pub(crate) elsewhere: bool,
}

impl Response {
    /// A header, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    pub(crate) fn document(&mut self, max: u64) -> Result<Vec<u8>, Failure> {
        let too_big = |size: &str| {
            RegistryError::answer(&self.url, format!("a document of {size} bytes, more than {max}"))
        };
        if let Some(size) = self.body.content_length().filter(|&size| size > max) {
            return Err(too_big(&size.to_string()).into());
        }
        let mut bytes = Vec::new();
        let read = self.body.as_reader().take(max + 1).read_to_end(&mut bytes);
        read.map_err(|e| broken(&self.url, &e))?;
        if bytes.len() as u64 > max {
            return Err(too_big("or more").into());
        }
        Ok(bytes)
    }
}

impl Http {
    /// A thread closes all connections when `cancel` is cancelled, so nobody waits for a server.
    pub(crate) fn new(options: RegistryOptions, cancel: &Cancel) -> Self {
        let limiter = Limiter::new(options.rate_max);
        let agents = Arc::<Agents>::default();
        let (alive, gone) = sync_channel::<()>(0);
        let (watched, watch) = (agents.clone(), cancel.clone());
        let watcher = std::thread::Builder::new().spawn(move || {
            while gone.recv_timeout(NAP) == Err(RecvTimeoutError::Timeout) {
                if watch.is_cancelled() {
                    let mut agents = watched.lock().unwrap_or_else(PoisonError::into_inner);
                    agents.drain().for_each(|(_, agent)| agent.shutdown());
                }
            }
        });
        // If the machine gives no thread, the time limits end the waiting.
        let watcher = watcher.ok().map(|thread| (alive, thread));
        let (cancel, answered, silent_since) = (cancel.clone(), false.into(), Mutex::default());
        Self { options, limiter, cancel, agents, answered, silent_since, watcher }
    }

    /// Notes that bytes arrived.
    pub(crate) fn heard(&self) {
        *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Notes a stall timeout; says whether the server has been silent for too long altogether.
    fn is_silent(&self) -> bool {
        let stall = self.options.stall_timeout;
        let mut since = self.silent_since.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let since = *since.get_or_insert_with(|| now.checked_sub(stall).unwrap_or(now));
        now.duration_since(since) >= stall * SILENT_STALLS
    }

    /// The failure of reading an answer. A server that hangs must not be waited for once for each
    /// try of each blob.
    pub(crate) fn broken(&self, url: &Url, error: &io::Error) -> Failure {
        let failure = broken(url, error);
        match is_timeout(error) && self.is_silent() {
            true => Failure { tries_max: 1, ..failure },
            false => failure,
        }
    }

    /// Sends a request and follows redirects as docker and podman do: of reads and of requests that
    /// can be sent again. Only the URL's own server gets `authorization`, the header's value.
    pub(crate) fn send(
        &self,
        request: &Request<'_>,
        authorization: Option<&str>,
    ) -> Result<Response, Failure> {
        let mut url = request.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let same = url.same_origin(request.url);
            let authorization = authorization.filter(|_| same);
            let answer = self.raw(request, &url, authorization)?;
            let (parts, body) = answer.map_err(|error| self.failure(&url, &error))?.into_parts();
            let status = parts.status.as_u16();
            let elsewhere = !same;
            let response = Response { url, status, headers: parts.headers, body, elsewhere };
            let reads = matches!(request.method, http::Method::GET | http::Method::HEAD);
            let again = matches!(request.body, Payload::None | Payload::Bytes(..));
            if !(reads && matches!(status, 301..=303) || again && matches!(status, 307 | 308)) {
                return Ok(response);
            }
            let location = response
                .header("location")
                .ok_or_else(|| RegistryError::answer(&response.url, "a redirect to nowhere"))?;
            url = response.url.join(location)?;
        }
        Err(RegistryError::answer(&request.url, format!("more than {REDIRECTS_MAX} redirects"))
            .into())
    }

    /// Whether a server speaks TLS, where plain HTTP would be allowed. An invalid certificate is an
    /// error. A server that gives no TLS answer at all is asked once more by plain HTTP.
    pub(crate) fn speaks_tls(&self, url: &Url) -> Result<bool, Failure> {
        let request = Request {
            method: http::Method::GET,
            url,
            headers: &[],
            body: Payload::None,
            document: true,
        };
        match self.raw(&request, url, None)? {
            Ok(_) => Ok(true),
            Err(error) => match tls_error(&error) {
                Some(rustls::Error::InvalidMessage(_)) => Ok(false),
                None if is_refused(&error) && !has_port(&url.authority) => Ok(false),
                None if !is_refused(&error) && self.speaks_http(&request, url) => Ok(false),
                _ => Err(self.failure(url, &error)),
            },
        }
    }

    /// Servers of Go answer plain HTTP on a TLS port as well, with status 400.
    fn speaks_http(&self, request: &Request<'_>, url: &Url) -> bool {
        let url = url.clone().plain();
        let answer = self.raw(request, &url, None);
        answer.is_ok_and(|answer| answer.is_ok_and(|answer| answer.status().as_u16() != 400))
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
        self.cancel.check()?;
        let agent = self.agent(&url.authority)?;
        let mut builder = http::Request::builder().method(request.method.clone()).uri(url.whole());
        for (name, value) in request.headers {
            builder = builder.header(*name, *value);
        }
        if let Some(value) = authorization {
            let mut value = http::HeaderValue::from_str(value).map_err(|_| {
                RegistryError::answer(url, "credentials that cannot be sent: control characters")
            })?;
            value.set_sensitive(true);
            builder = builder.header("authorization", value);
        }
        builder = match &request.body {
            Payload::None => builder,
            Payload::Bytes(media_type, _) => builder.header("content-type", *media_type),
            Payload::Form(_) => builder.header("content-type", "application/x-www-form-urlencoded"),
            // The registry can refuse before the body is sent.
            Payload::Stream { size: None, .. } => {
                builder.header("content-type", OCTETS).header("expect", "100-continue")
            }
            Payload::Stream { size: Some(size), .. } => {
                builder.header("content-type", OCTETS).header("content-length", *size)
            }
        };
        let stall = self.options.stall_timeout;
        let time = request.document.then(|| stall * DOCUMENT_STALLS);
        // A registry may read a large blob once more before it answers.
        let takes = matches!(request.method, http::Method::PUT | http::Method::PATCH);
        let answer = Some(if takes { stall * TAKEN_STALLS } else { stall });
        let bad = |e: http::Error| RegistryError::answer(url, format!("cannot be asked for: {e}"));
        let bytes = match &request.body {
            Payload::Form(text) => text.as_bytes(),
            Payload::Bytes(_, bytes) => bytes,
            Payload::None | Payload::Stream { .. } => &[],
        };
        let answer = match &request.body {
            Payload::None => {
                let built = agent.configure_request(builder.body(()).map_err(bad)?);
                let built = built.timeout_recv_body(time).build();
                self.unless_cancelled(url, move || agent.run(built))?
            }
            Payload::Bytes(..) | Payload::Form(_) => {
                let built = agent.configure_request(builder.body(bytes.to_vec()).map_err(bad)?);
                let built = built.timeout_recv_response(answer).timeout_recv_body(time).build();
                self.unless_cancelled(url, move || agent.run(built))?
            }
            Payload::Stream { reader, .. } => {
                let mut reader = reader.borrow_mut();
                let body = SendBody::from_reader(&mut **reader);
                let built = agent.configure_request(builder.body(body).map_err(bad)?);
                agent.run(built.timeout_recv_response(answer).timeout_recv_body(time).build())
            }
        };
        self.answered.fetch_or(answer.is_ok(), Relaxed);
        // Of a blob the content counts: some servers send its header and then nothing.
        if answer.is_ok() && request.document {
            self.heard();
        }
        Ok(answer)
    }

    fn failure(&self, url: &Url, error: &ureq::Error) -> Failure {
        let failure = failure(url, error);
        let most = match error {
            ureq::Error::Timeout(_) if self.is_silent() && self.answered.load(Relaxed) => 1,
            _ if self.answered.load(Relaxed) => u32::MAX,
            ureq::Error::Timeout(_) => SILENT_TRIES_MAX,
            ureq::Error::Io(e) if is_refused(error) || is_lookup(e) => REFUSED_TRIES_MAX,
            _ => u32::MAX,
        };
        Failure { tries_max: failure.tries_max.min(most), ..failure }
    }

    /// Runs a request in a thread that is left behind when the task is cancelled: looking up names
    /// and connecting cannot be interrupted.
    fn unless_cancelled<T: Send + 'static>(
        &self,
        url: &Url,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, RegistryError> {
        let (done, result) = sync_channel(1);
        let thread = std::thread::Builder::new().spawn(move || done.send(run()));
        let thread = thread.map_err(|error| {
            RegistryError::unreachable(url, format!("no thread for the request: {error}"))
        })?;
        loop {
            match result.recv_timeout(NAP) {
                Ok(result) => {
                    let _ = thread.join();
                    return Ok(result);
                }
                Err(RecvTimeoutError::Timeout) if !self.cancel.is_cancelled() => {}
                Err(_) => return Err(RegistryError::GivenUp),
            }
        }
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

fn is_lookup(error: &io::Error) -> bool {
    error.to_string().starts_with("failed to lookup address")
}

/// The text is all that std keeps of `EAI_NONAME`; that of `EAI_AGAIN` says that it may pass.
fn is_unknown_host(error: &io::Error) -> bool {
    let text = error.to_string();
    is_lookup(error) && !["Temporary", "again"].iter().any(|part| text.contains(part))
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

/// The timeout of ureq's that an error of reading is.
fn timeout(error: &io::Error) -> Option<ureq::Timeout> {
    match error.get_ref()?.downcast_ref()? {
        ureq::Error::Timeout(timeout) => Some(*timeout),
        _ => None,
    }
}

fn is_timeout(error: &io::Error) -> bool {
    timeout(error).is_some() || error.kind() == io::ErrorKind::TimedOut
}

fn broken(url: &Url, error: &io::Error) -> Failure {
    let what = match is_timeout(error) {
        // A document has a time for all of it, and will not come faster.
        true if timeout(error) == Some(ureq::Timeout::RecvBody) => {
            return RegistryError::unreachable(url, "it comes too slowly").into();
        }
        true => "nothing more came".to_owned(),
        false => format!("the connection broke off: {}", quoted(&error.to_string())),
    };
    Failure::again(RegistryError::unreachable(url, what))
}

/// Describes an error of ureq without its URL, which may be secret.
fn failure(url: &Url, error: &ureq::Error) -> Failure {
    use ureq::Timeout;
    let unreachable = |what: &str| RegistryError::unreachable(url, what);
    if let Some(tls) = tls_error(error) {
        let what = match tls {
            rustls::Error::InvalidMessage(_) => "does not speak TLS".to_owned(),
            other => format!("TLS: {other}"),
        };
        return unreachable(&what).into();
    }
    match error {
        ureq::Error::HostNotFound => unreachable("no host of that name").into(),
        ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => {
            Failure::again(unreachable("no connection within the time allowed"))
        }
        ureq::Error::Timeout(_) => Failure::again(unreachable("no answer came")),
        ureq::Error::Io(error) if is_unknown_host(error) => {
            unreachable("no host of that name").into()
        }
        ureq::Error::Io(_) | ureq::Error::Protocol(_) | ureq::Error::ConnectionFailed => {
            Failure::again(unreachable(&quoted(&error.to_string())))
        }
        ureq::Error::LargeResponseHeader(..) => {
            RegistryError::answer(url, format!("a header of more than {HEADER_MAX} bytes")).into()
        }
        ureq::Error::ConnectProxyFailed(_) => unreachable("the proxy refuses").into(),
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
            RegistryError::answer(url, "not a URL that can be asked").into()
        }
        _ => unreachable(&quoted(&error.to_string())).into(),
    }
}

/// `Retry-After`: seconds, or the date when (RFC 9110, section 10.2.3).
pub(crate) fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.header("retry-after")?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}
