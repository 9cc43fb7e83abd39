//! The HTTP API, version 1: `docs/API.md` describes it.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use cofolio_node::ledger::{FileOrder, ImageFiles, LedgerError, ReclaimRequest};
use cofolio_store::{Digest, with_causes};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONNECTION, HOST, HeaderValue, WWW_AUTHENTICATE};
use hyper::{Request, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};

use crate::answers::{Files, Version};
use crate::dashboard;
use crate::http::{self, Peer, Reply, reply};
use crate::metrics::Metrics;
use crate::published::{Encoded, Published};
use crate::worker::{Question, Questions};

/// Version of the API, which is in its paths.
pub(crate) const VERSION: u32 = 1;
/// Files that a request gets unless it says how many.
const FILES: usize = 1000;
/// Files that a request gets at most.
const FILES_MAX: usize = 100_000;
/// Large answers that are encoded at one time. The thread that serves everybody does not do it.
pub(crate) const ENCODERS_MAX: usize = 2;
/// Lists of files that are made at one time: they are large.
const LISTS_MAX: usize = 4;
/// Images in a matrix of sharing at most.
const SHARING_MAX: usize = 50;
/// Bytes of the body of a request.
const BODY_MAX: usize = 64 << 10;
/// How long the ledger may take for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a request may wait for one of [`LISTS_MAX`] turns. With [`PATIENCE`] it is less than a
/// client waits.
const TURN: Duration = Duration::from_secs(4);

const JSON: &str = "application/json";

/// What answers requests.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) published: Arc<Published>,
    pub(crate) questions: Questions,
    pub(crate) metrics: Metrics,
    pub(crate) store: String,
    /// Turns to make a list of files.
    pub(crate) lists: Turns,
}

/// Turns to make a list of files: clients at TCP addresses cannot take those of others.
#[derive(Debug)]
pub(crate) struct Turns {
    trusted: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

impl Default for Turns {
    fn default() -> Self {
        let turns = || Arc::new(Semaphore::new(LISTS_MAX));
        Self { trusted: turns(), others: turns() }
    }
}

impl Turns {
    fn of(&self, peer: &Peer) -> Arc<Semaphore> {
        Arc::clone(match peer {
            Peer::Local => &self.trusted,
            Peer::Remote(_) => &self.others,
        })
    }
}

#[cfg(any(test, fuzzing))]
impl Api {
    /// With empty reports, and a ledger that is always busy.
    pub(crate) fn without_ledger() -> Self {
        Self::with_questions().0
    }

    /// The same, with what the ledger would be asked.
    pub(crate) fn with_questions() -> (Self, std::sync::mpsc::Receiver<Question>) {
        let metrics = Metrics::new(Arc::default());
        let (questions, asked) = Questions::for_test();
        let (store, lists) = ("store".to_owned(), Turns::default());
        (Self { published: Arc::default(), questions, metrics, store, lists }, asked)
    }
}

/// A request without its body.
type Head = Request<()>;

/// A refusal: its status, and why.
type Refusal = (StatusCode, String);

impl Api {
    pub(crate) async fn answer(&self, request: Request<Incoming>, peer: &Peer) -> Reply {
        let (head, body) = request.into_parts();
        let mut answered = self
            .route(&Request::from_parts(head, ()), body, peer)
            .await
            .unwrap_or_else(|(status, why)| refusal(status, &why));
        if answered.status() == StatusCode::UNAUTHORIZED {
            let headers = answered.headers_mut();
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            // Its permit is for clients who have the token.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        answered
    }

    async fn route(&self, request: &Head, body: Incoming, peer: &Peer) -> Result<Reply, Refusal> {
        // With several, who checks the name and who uses it may take different ones.
        if request.headers().get_all(HOST).iter().count() > 1 {
            return Err(bad_request("more than one Host header"));
        }
        if let Peer::Remote(auth) = peer {
            auth.current().check(request.headers())?;
        }
        let path = request.uri().path();
        let route = Route::of(path).ok_or_else(|| nothing_at(path))?;
        let methods = route.methods();
        if !methods.split(", ").any(|method| method == request.method().as_str()) {
            return Ok(not_allowed(methods));
        }
        route.check_parameters(request)?;
        match route {
            Route::Sample | Route::Reclaim if !matches!(peer, Peer::Local) => {
                Err((StatusCode::FORBIDDEN, "only through the unix socket".to_owned()))
            }
            Route::Reclaim => {
                let request = reclaim_request(body).await?;
                let is_dry = request.dry_run;
                let mut begun = self.ask(peer, |begun| Question::Reclaim(request, begun)).await?;
                // Now pages go, and the client hears how many, however long it takes. If it leaves,
                // this is dropped.
                let reclaimed = (&mut begun.answer).await.map_err(|_| busy())?;
                let reclaimed = reclaimed.map_err(|it| of_ledger(&it))?;
                if !is_dry {
                    // The last report still has what went. Without a new one it has for a period.
                    let _ = self.ask(peer, Question::Sample).await;
                }
                Ok(json_reply(StatusCode::OK, &reclaimed))
            }
            Route::Sample => encoded(self.ask(peer, Question::Sample).await?).await,
            Route::Version => {
                let version = env!("CARGO_PKG_VERSION").to_owned();
                let answer = Version { api: VERSION, cofolio: version, store: self.store.clone() };
                Ok(json_reply(StatusCode::OK, &answer))
            }
            Route::Report => encoded(self.published.report()).await,
            Route::Machines => Ok(json_reply(StatusCode::OK, &*self.published.machines())),
            Route::History => {
                let value = json!({
                    "interval_seconds": 60,
                    "period_seconds": self.published.period_seconds(),
                    "points": self.published.history(),
                });
                Ok(json_reply(StatusCode::OK, &value))
            }
            Route::Sharing => self.sharing(request, peer).await,
            Route::Files { domain, image } => self.files(request, peer, domain, image).await,
            Route::Users { domain, object } => self.users(peer, domain, object).await,
            Route::Metrics => {
                let text = self.metrics.encode(&self.published);
                let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                Ok(reply(StatusCode::OK, kind, text))
            }
            Route::Page(page) => Ok(page),
        }
    }

    async fn sharing(&self, request: &Head, peer: &Peer) -> Result<Reply, Refusal> {
        let domain = query(request, "domain");
        let domain = domain.unwrap_or(cofolio_store::DEFAULT_DOMAIN.into()).into_owned();
        let name = domain.clone();
        let shared =
            self.ask(peer, |answer| Question::Sharing(domain, SHARING_MAX, answer)).await?;
        let shared = shared.ok_or_else(|| not_found(format!("no trust domain {name}")))?;
        let mut value = serde_json::to_value(shared).map_err(|it| internal(&it))?;
        value["domain"] = name.into();
        Ok(json_reply(StatusCode::OK, &value))
    }

    async fn files(
        &self,
        request: &Head,
        peer: &Peer,
        domain: &str,
        image: &str,
    ) -> Result<Reply, Refusal> {
        let digest = digest(image)?;
        let limit = match query(request, "limit").map(|limit| limit.parse()) {
            None => FILES,
            Some(Ok(limit)) if limit <= FILES_MAX => limit,
            Some(_) => return Err(bad_request(&format!("limit is a number up to {FILES_MAX}"))),
        };
        let order = match query(request, "sort").as_deref() {
            None | Some("path") => FileOrder::Path,
            Some("size") => FileOrder::Size,
            Some("resident") => FileOrder::Resident,
            _ => return Err(bad_request("sort is path, size or resident")),
        };
        let turn = tokio::time::timeout(TURN, self.lists.of(peer).acquire_owned()).await;
        let Ok(Ok(turn)) = turn else { return Err(busy()) };
        let name = domain.to_owned();
        let question = |answer| Question::Files(name, digest, order, limit, answer);
        let Some(ImageFiles { total, files }) = self.ask(peer, question).await? else {
            return Err(not_found(format!("no image {image} in trust domain {domain}")));
        };
        let domain = domain.to_owned();
        off_thread(move || {
            // The client may have gone, but the list has not.
            let _turn = turn;
            json_reply(StatusCode::OK, &Files { domain, image: digest, total, files })
        })
        .await
    }

    async fn users(&self, peer: &Peer, domain: &str, object: &str) -> Result<Reply, Refusal> {
        let digest = digest(object)?;
        let name = domain.to_owned();
        let answer = self.ask(peer, |answer| Question::Users(name, digest, answer)).await?;
        let Some(answer) = answer else {
            return Err(not_found(format!("no object {object} in trust domain {domain}")));
        };
        off_thread(move || json_reply(StatusCode::OK, &answer)).await
    }

    async fn ask<T>(
        &self,
        peer: &Peer,
        question: impl FnOnce(oneshot::Sender<Result<T, LedgerError>>) -> Question,
    ) -> Result<T, Refusal> {
        let (sender, mut receiver) = oneshot::channel();
        if !self.questions.ask(question(sender), matches!(peer, Peer::Local)) {
            return Err(busy());
        }
        let answered = match tokio::time::timeout(PATIENCE, &mut receiver).await {
            Ok(answered) => answered.ok(),
            Err(_) => {
                // It may have come just now. What is sent later fails, so nothing begins later.
                receiver.close();
                receiver.try_recv().ok()
            }
        };
        answered.ok_or_else(busy)?.map_err(|error| of_ledger(&error))
    }
}

/// What a path leads to.
#[derive(Debug)]
enum Route<'p> {
    Version,
    Report,
    Machines,
    Sample,
    Reclaim,
    History,
    Sharing,
    Files {
        domain: &'p str,
        image: &'p str,
    },
    Users {
        domain: &'p str,
        object: &'p str,
    },
    Metrics,
    /// A file of the dashboard.
    Page(Reply),
}

impl<'p> Route<'p> {
    /// `None` if there is nothing at the path.
    fn of(path: &'p str) -> Option<Self> {
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        Some(match parts[..] {
            ["v1", "version"] => Self::Version,
            ["v1", "report"] => Self::Report,
            ["v1", "machines"] => Self::Machines,
            ["v1", "sample"] => Self::Sample,
            ["v1", "reclaim"] => Self::Reclaim,
            ["v1", "history"] => Self::History,
            ["v1", "sharing"] => Self::Sharing,
            ["v1", "images", domain, image, "files"] => Self::Files { domain, image },
            ["v1", "objects", domain, object, "users"] => Self::Users { domain, object },
            ["metrics"] => Self::Metrics,
            [name] => Self::Page(dashboard::file(name)?),
            _ => return None,
        })
    }

    /// As the header `Allow` lists them.
    fn methods(&self) -> &'static str {
        match self {
            Self::Sample | Self::Reclaim => "POST",
            _ => "GET, HEAD",
        }
    }

    /// Refuses a query with a parameter that the API does not have here.
    fn check_parameters(&self, request: &Head) -> Result<(), Refusal> {
        let known: &[&str] = match self {
            Self::Sharing => &["domain"],
            Self::Files { .. } => &["sort", "limit"],
            // Scrapers and browsers may add parameters of their own.
            Self::Metrics | Self::Page(_) => return Ok(()),
            _ => &[],
        };
        let query = request.uri().query().unwrap_or_default();
        let mut names = form_urlencoded::parse(query.as_bytes()).map(|(name, _)| name);
        match names.find(|name| !known.contains(&&**name)) {
            Some(name) => Err(bad_request(&format!("there is no parameter {name} here"))),
            None => Ok(()),
        }
    }
}

async fn encoded(report: Arc<Encoded>) -> Result<Reply, Refusal> {
    match report.made() {
        Some(json) => Ok(reply(StatusCode::OK, JSON, json)),
        None => off_thread(move || reply(StatusCode::OK, JSON, report.make())).await,
    }
}

/// Makes a large answer while the daemon goes on answering others.
async fn off_thread(make: impl FnOnce() -> Reply + Send + 'static) -> Result<Reply, Refusal> {
    tokio::task::spawn_blocking(make).await.map_err(|error| internal(&error))
}

fn busy() -> Refusal {
    (StatusCode::SERVICE_UNAVAILABLE, "the ledger is busy".to_owned())
}

fn of_ledger(error: &LedgerError) -> Refusal {
    match error {
        LedgerError::NotFound { .. } => not_found(error.to_string()),
        LedgerError::Store(damage) if cofolio_store::is_damage(damage) => {
            (StatusCode::CONFLICT, with_causes(error))
        }
        LedgerError::Cancelled => {
            (StatusCode::SERVICE_UNAVAILABLE, "the daemon is ending".to_owned())
        }
        error => (StatusCode::INTERNAL_SERVER_ERROR, with_causes(error)),
    }
}

async fn reclaim_request(body: Incoming) -> Result<ReclaimRequest, Refusal> {
    let body = Limited::new(body, BODY_MAX).collect();
    let body = tokio::time::timeout(http::HEAD_TIME, body).await;
    let late = || (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time".to_owned());
    let body = body.map_err(|_| late())?;
    let body = body.map_err(|error| match error.is::<LengthLimitError>() {
        true => (StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {BODY_MAX} bytes")),
        false => bad_request(&error.to_string()),
    })?;
    parse_reclaim(&body.to_bytes()).map_err(|why| bad_request(&why))
}

fn parse_reclaim(body: &[u8]) -> Result<ReclaimRequest, String> {
    serde_json::from_slice(body).map_err(|error| {
        // serde_json names what it wants to read, and not what is missing or too much.
        let value: Value = serde_json::from_slice(body).unwrap_or_default();
        match value["target"].as_object().is_some_and(|target| target.len() != 1) {
            true => "target needs exactly one of container, image, domain".to_owned(),
            false => format!("the body: {error}"),
        }
    })
}

/// The first value of a parameter of the query string.
fn query<'r>(request: &'r Head, name: &str) -> Option<Cow<'r, str>> {
    let mut pairs = form_urlencoded::parse(request.uri().query()?.as_bytes());
    pairs.find(|(key, _)| key == name).map(|(_, value)| value)
}

fn digest(text: &str) -> Result<Digest, Refusal> {
    text.parse().map_err(|_| bad_request(&format!("{text} is not a digest")))
}

fn nothing_at(path: &str) -> Refusal {
    not_found(format!("there is nothing at {path}"))
}

fn bad_request(why: &str) -> Refusal {
    (StatusCode::BAD_REQUEST, why.to_owned())
}

fn not_found(why: String) -> Refusal {
    (StatusCode::NOT_FOUND, why)
}

fn internal(error: &dyn std::error::Error) -> Refusal {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

pub(crate) fn refusal(status: StatusCode, why: &str) -> Reply {
    json_reply(status, &json!({ "error": why }))
}

fn not_allowed(methods: &'static str) -> Reply {
    let value = json!({ "error": format!("the methods here are {methods}") });
    let mut reply = json_reply(StatusCode::METHOD_NOT_ALLOWED, &value);
    reply.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    reply
}

fn json_reply(status: StatusCode, value: &impl Serialize) -> Reply {
    match serde_json::to_vec(value) {
        Ok(bytes) => reply(status, JSON, bytes),
        Err(error) => {
            let body = json!({ "error": error.to_string() }).to_string();
            reply(StatusCode::INTERNAL_SERVER_ERROR, JSON, body)
        }
    }
}
