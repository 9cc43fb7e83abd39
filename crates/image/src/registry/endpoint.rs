//! One repository of one registry: authentication, and what HTTP statuses mean.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::Deserialize;
use ureq::http::Method;

use super::challenge::{self, Challenge};
use super::credentials::{self, Credentials, Secret};
use super::http::{Http, Payload, Request, Response, retry_after};
use super::pace::Failure;
use super::url::{Url, escaped, is_loopback};
use crate::error::{RegistryError, quoted};
use crate::reference::{DOCKER_HUB, check_host, check_repository};

/// Where Docker Hub's registry is.
const DOCKER_HUB_HOST: &str = "registry-1.docker.io";
/// Our client id at token servers.
const CLIENT_ID: &str = "cofolio";
/// Largest answer of a token server, in bytes.
const TOKEN_MAX: u64 = 1 << 20;
/// How much of an error's text is read, in bytes.
const REASON_MAX: u64 = 16 << 10;

/// A repository in one registry.
pub(crate) struct Endpoint {
    http: Arc<Http>,
    /// The registry's name: key of credentials.
    host: String,
    authority: String,
    repository: String,
    /// Scopes that a token is asked for.
    scopes: Vec<String>,
    /// Found out once, where it may be either.
    tls: OnceLock<bool>,
    access: Mutex<Access>,
}

/// Credentials, and the token in use.
#[derive(Default)]
struct Access {
    /// Looked up when first needed; helpers may ask their user.
    credentials: Option<Option<Credentials>>,
    /// Value of the `Authorization` header that worked last.
    authorization: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Token {
    token: String,
    access_token: String,
}

#[derive(Deserialize)]
struct Reasons {
    errors: Vec<Reason>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Reason {
    code: String,
    message: String,
}

impl Endpoint {
    pub(crate) fn new(http: Arc<Http>, host: &str, repository: &str) -> Self {
        let authority = if host == DOCKER_HUB { DOCKER_HUB_HOST } else { host };
        Self {
            http,
            host: host.to_owned(),
            authority: authority.to_owned(),
            repository: repository.to_owned(),
            scopes: vec![format!("repository:{repository}:pull")],
            tls: OnceLock::new(),
            access: Mutex::default(),
        }
    }

    /// One to push to; blobs may be mounted from the other repositories.
    pub(crate) fn for_push(mut self, others: &[String]) -> Self {
        let others = others.iter().map(|other| format!("repository:{other}:pull"));
        self.scopes = vec![format!("repository:{}:pull,push", self.repository)];
        self.scopes.extend(others);
        self
    }

    /// A mirror: `host[:port][/prefix]`.
    pub(crate) fn mirror(
        http: Arc<Http>,
        location: &str,
        repository: &str,
    ) -> Result<Self, RegistryError> {
        let bad = |what: String| RegistryError::Options {
            what: format!("{location:?} is not a mirror (host[:port][/prefix]): {what}"),
        };
        if location.contains("://") {
            return Err(bad("without a scheme, please".into()));
        }
        let plain = location.trim_end_matches('/');
        let (host, prefix) = plain.split_once('/').unwrap_or((plain, ""));
        check_host(host).map_err(bad)?;
        let repository = match prefix {
            "" => repository.to_owned(),
            prefix => {
                check_repository(prefix).map_err(bad)?;
                format!("{prefix}/{repository}")
            }
        };
        Ok(Self::new(http, &host.to_ascii_lowercase(), &repository))
    }

    /// Asks once for something of the repository, `path` being what follows its name.
    pub(crate) fn ask(
        &self,
        method: &Method,
        path: &str,
        headers: &[(&str, &str)],
        document: bool,
    ) -> Result<Response, Failure> {
        let (method, url, body) = (method.clone(), &self.url(path)?, Payload::None);
        self.send(&Request { method, url, headers, body, document })
    }

    /// Sends a request once, authenticated if it goes to the registry.
    pub(crate) fn send(&self, request: &Request<'_>) -> Result<Response, Failure> {
        // Only the registry itself may see and demand credentials.
        let home = request.url.same_origin(&self.url("")?);
        let mut used = self.access().authorization.clone().filter(|_| home);
        let mut renewed = false;
        loop {
            let response = self.http.send(request, used.as_deref())?;
            if response.status == 401 && home && !response.elsewhere && !renewed {
                let url = response.url.to_string();
                renewed = true;
                used = Some(self.authorize(response, used.as_deref())?);
                if matches!(request.body, Payload::Stream { .. }) {
                    let what = "the token ran out".to_owned();
                    let error = RegistryError::Status { url, status: 401, what, tries: 0 };
                    return Err(Failure::again(error));
                }
                continue;
            }
            return judge(response, || self.used());
        }
    }

    fn access(&self) -> MutexGuard<'_, Access> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where something of the repository is, `path` being what follows its name.
    pub(crate) fn url(&self, path: &str) -> Result<Url, Failure> {
        Ok(Url::new(self.tls()?, &self.authority, &format!("/v2/{}/{path}", self.repository)))
    }

    /// Whether the registry speaks TLS. It must, unless plain HTTP is allowed.
    fn tls(&self) -> Result<bool, Failure> {
        if let Some(&known) = self.tls.get() {
            return Ok(known);
        }
        let options = &self.http.options;
        let either = is_loopback(&self.authority)
            || options.is_insecure(&self.authority)
            || options.is_insecure(&self.host);
        let tls = !either || self.http.speaks_tls(&Url::new(true, &self.authority, "/v2/"))?;
        Ok(*self.tls.get_or_init(|| tls))
    }

    /// Identity used, for error messages.
    fn used(&self) -> String {
        shown(self.access().credentials.as_ref().and_then(Option::as_ref))
    }

    /// Answers a challenge with the value of an `Authorization` header.
    fn authorize(&self, mut response: Response, used: Option<&str>) -> Result<String, Failure> {
        let values = response.headers.get_all("www-authenticate").into_iter();
        let challenge = challenge::best(values.filter_map(|value| value.to_str().ok()));
        // One thread asks for a token; those that wait here reuse it.
        let mut access = self.access();
        if let Some(newer) = access.authorization.as_ref().filter(|new| Some(new.as_str()) != used)
        {
            return Ok(newer.clone());
        }
        if access.credentials.is_none() {
            let (files, cancel) = (&self.http.options.auth_files, &self.http.cancel);
            let found = credentials::find(files, &self.host, &self.repository, cancel)?;
            access.credentials = Some(found);
        }
        let credentials = access.credentials.clone().flatten();
        let authorization = match (challenge, credentials.as_ref().map(|found| &found.secret)) {
            (Some(Challenge::Basic), Some(Secret::Password(user, password))) => {
                Some(Secret::basic(user, password))
            }
            (Some(Challenge::Bearer { .. }), Some(Secret::Token(token))) => {
                Some(format!("Bearer {token}"))
            }
            (Some(Challenge::Bearer { realm, service }), secret) => {
                let realm = response.url.join(&realm)?;
                let used = || shown(credentials.as_ref());
                Some(format!("Bearer {}", self.token(realm, &service, secret, used)?))
            }
            _ => None,
        };
        let Some(authorization) = authorization.filter(|new| Some(new.as_str()) != used) else {
            drop(access);
            let what = reason(&mut response);
            let error =
                RegistryError::Denied { url: response.url.to_string(), used: self.used(), what };
            return Err(error.into());
        };
        access.authorization = Some(authorization.clone());
        Ok(authorization)
    }

    /// Asks a token server (docs "Token Authentication Specification" of the distribution project).
    fn token(
        &self,
        realm: Url,
        service: &str,
        secret: Option<&Secret>,
        used: impl FnOnce() -> String,
    ) -> Result<String, Failure> {
        let mut authorization = None;
        let mut form = None;
        let mut url = realm;
        match secret {
            // The refresh token grant of OAuth 2.
            Some(Secret::Identity(token)) => {
                let scopes = self.scopes.join(" ");
                let (service, scope) = (escaped(service), escaped(&scopes));
                form = Some(format!(
                    "grant_type=refresh_token&service={service}&scope={scope}&client_id={CLIENT_ID}\
                     &refresh_token={}",
                    escaped(token)
                ));
            }
            other => {
                if !service.is_empty() {
                    url = url.query("service", service);
                }
                for scope in &self.scopes {
                    url = url.query("scope", scope);
                }
                if let Some(Secret::Password(user, password)) = other {
                    url = url.query("account", user);
                    authorization = Some(Secret::basic(user, password));
                }
            }
        }
        let body = form.as_deref().map_or(Payload::None, Payload::Form);
        let request = Request {
            method: if form.is_some() { Method::POST } else { Method::GET },
            url: &url,
            headers: &[("accept", "application/json")],
            body,
            document: true,
        };
        let response = self.http.send(&request, authorization.as_deref())?;
        let mut response = judge(response, used)?;
        let bytes = response.document(TOKEN_MAX)?;
        let bad = |what: &str| {
            RegistryError::answer(&response.url, format!("the token server's answer {what}"))
        };
        token_of(&bytes).map_err(|what| bad(what).into())
    }
}

/// The token in a token server's answer. The error quotes nothing of the answer.
pub(super) fn token_of(answer: &[u8]) -> Result<String, &'static str> {
    let answer: Token = serde_json::from_slice(answer).map_err(|_| "is not JSON")?;
    let mut tokens = [answer.token, answer.access_token].into_iter();
    tokens.find(|token| !token.is_empty()).ok_or("holds no token")
}

/// Makes an error of a status; `used` is the identity for its message.
fn judge(mut response: Response, used: impl FnOnce() -> String) -> Result<Response, Failure> {
    let url = response.url.to_string();
    let status = response.status;
    if (200..300).contains(&status) {
        return Ok(response);
    }
    let pause = retry_after(&response);
    let what = reason(&mut response);
    match status {
        // A signed URL that has run out: the registry gives another one.
        401 | 403 if response.elsewhere => {
            Err(Failure::again(RegistryError::Status { url, status, what, tries: 0 }))
        }
        401 | 403 => Err(RegistryError::Denied { url, used: used(), what }.into()),
        404 => Err(RegistryError::NotFound { url, what }.into()),
        408 | 429 | 500 | 502 | 503 | 504 => {
            let error = RegistryError::Status { url, status, what, tries: 0 };
            Err(Failure { pause, ..Failure::again(error) })
        }
        300..400 => {
            let what = "a redirect that cannot be followed".to_owned();
            Err(RegistryError::Refused { url, status, what }.into())
        }
        400..500 => Err(RegistryError::Refused { url, status, what }.into()),
        _ => Err(RegistryError::Status { url, status, what, tries: 0 }.into()),
    }
}

fn shown(credentials: Option<&Credentials>) -> String {
    credentials.map_or("anonymous".to_owned(), |found| format!("credentials of {}", found.from))
}

/// The registry's own message about a failure.
fn reason(response: &mut Response) -> String {
    let Ok(bytes) = response.document(REASON_MAX) else { return String::new() };
    let Ok(reasons) = serde_json::from_slice::<Reasons>(&bytes) else { return String::new() };
    match reasons.errors.into_iter().next() {
        Some(Reason { code, message }) if message.is_empty() => quoted(&code),
        Some(Reason { message, .. }) => quoted(&message),
        None => String::new(),
    }
}
