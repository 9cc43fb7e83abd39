//! Uploads to a registry (OCI distribution spec 1.1, "Push"), never to a mirror.

use std::cell::RefCell;
use std::io::{self, Read};

use ureq::http::Method;

use super::endpoint::Endpoint;
use super::http::{OCTETS, Payload, Request, Response};
use super::pace::Failure;
use super::repository::{ACCEPT, Repository};
use super::url::Url;
use crate::error::RegistryError;

/// How much of an answer's body is read, in bytes.
const ANSWER_MAX: u64 = 64 << 10;

/// How an upload begins.
pub(crate) enum Begun {
    /// The registry took the blob from another repository of its own.
    Mounted,
    /// It waits for the blob.
    Session(Session),
}

/// Where a blob is to be sent.
#[derive(Debug)]
pub(crate) struct Session {
    location: Url,
    /// Bytes of it that are there.
    pub(crate) at: u64,
}

/// A blob that is being sent: keeps to the rate, can be cancelled, counts.
pub(crate) struct Body<'a> {
    repository: &'a Repository,
    reader: &'a mut dyn Read,
    count: &'a mut dyn FnMut(u64),
    sent: u64,
}

impl<'a> Body<'a> {
    /// `count` hears of every read how many bytes it gave.
    pub(crate) fn new(
        repository: &'a Repository,
        reader: &'a mut dyn Read,
        count: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self { repository, reader, count, sent: 0 }
    }
}

impl Read for Body<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let (limiter, stop) = (self.repository.limiter(), self.repository.stop());
        if stop.is_cancelled() {
            return Err(io::Error::other(RegistryError::GivenUp));
        }
        let most = buf.len().min(limiter.portion());
        let count = self.reader.read(&mut buf[..most])?;
        limiter.take(count, stop).map_err(io::Error::other)?;
        self.sent += count as u64;
        (self.count)(count as u64);
        Ok(count)
    }
}

impl Repository {
    /// Whether the registry has a blob, of that size.
    pub(crate) fn has_blob(&self, digest: &str, size: u64) -> Result<bool, RegistryError> {
        let path = format!("blobs/{digest}");
        self.each(|endpoint| match endpoint.ask(&Method::HEAD, &path, &[], true) {
            Ok(response) => {
                let length = response.header("content-length").and_then(|text| text.parse().ok());
                Ok(length.is_none_or(|length: u64| length == size))
            }
            // Some registries know no HEAD.
            Err(Failure {
                error: RegistryError::NotFound { .. } | RegistryError::Refused { .. },
                ..
            }) => Ok(false),
            Err(failure) => Err(failure),
        })
    }

    /// Begins to upload a blob, or has it mounted: its digest, and the repository that has it.
    pub(crate) fn begin_upload(&self, mount: Option<(&str, &str)>) -> Result<Begun, RegistryError> {
        self.each(|endpoint| {
            let mut url = endpoint.url("blobs/uploads/")?;
            if let Some((digest, from)) = mount {
                url = url.query("mount", digest).query("from", from);
            }
            let response = send(endpoint, Method::POST, &url, Payload::Bytes(OCTETS, b""))?;
            match response.status {
                201 if mount.is_some() => Ok(Begun::Mounted),
                _ => Ok(Begun::Session(Session { location: next(&response)?, at: 0 })),
            }
        })
    }

    /// Sends the rest of a blob, once. After a failure `resume_upload` says how much arrived.
    pub(crate) fn send_rest(
        &self,
        session: &mut Session,
        body: &mut Body<'_>,
    ) -> Result<(), Failure> {
        let before = body.sent;
        let payload = Payload::Stream { reader: RefCell::new(&mut *body), size: None };
        let response = send(self.registry(), Method::PATCH, &session.location, payload)?;
        let location = next(&response)?;
        let there = received(&response);
        session.at += body.sent - before;
        session.location = location;
        match there {
            Some(there) if there != session.at => Err(Failure::again(RegistryError::answer(
                &response.url,
                format!("took {there} bytes of {}", session.at),
            ))),
            _ => Ok(()),
        }
    }

    /// Ends an upload; `rest` is what has not been sent yet, with its size.
    pub(crate) fn end_upload(
        &self,
        session: &Session,
        digest: &str,
        rest: Option<(&mut Body<'_>, u64)>,
    ) -> Result<(), Failure> {
        let url = &session.location.clone().query("digest", digest);
        let body = match rest {
            None => Payload::Bytes(OCTETS, b""),
            Some((body, size)) => Payload::Stream { reader: RefCell::new(body), size: Some(size) },
        };
        let response = send(self.registry(), Method::PUT, url, body)?;
        same_digest(&response, digest)
    }

    /// Finds out how much of an upload is there. `None` if the registry cannot go on with it.
    pub(crate) fn resume_upload(&self, session: &Session) -> Result<Option<Session>, Failure> {
        match send(self.registry(), Method::GET, &session.location, Payload::None) {
            Ok(response) => {
                // One byte and none look the same.
                let Some(at) = received(&response).filter(|&at| at > 1) else { return Ok(None) };
                let location = next(&response).unwrap_or_else(|_| session.location.clone());
                Ok(Some(Session { location, at }))
            }
            Err(failure) if failure.again => Err(failure),
            Err(_) => Ok(None),
        }
    }

    /// Cancels an upload. Registries drop unfinished ones by themselves, too.
    pub(crate) fn cancel_upload(&self, session: &Session) {
        let _ = send(self.registry(), Method::DELETE, &session.location, Payload::None);
    }

    /// Sets a tag. Says whether it changed.
    pub(crate) fn put_manifest(
        &self,
        tag: &str,
        media_type: &str,
        digest: &str,
        bytes: &[u8],
    ) -> Result<bool, RegistryError> {
        let path = format!("manifests/{tag}");
        match self.head(tag) {
            Ok(Some(head)) if head.digest == digest => return Ok(false),
            Ok(_) | Err(RegistryError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
        self.each(|endpoint| {
            let (url, body) = (&endpoint.url(&path)?, Payload::Bytes(media_type, bytes));
            let response = send(endpoint, Method::PUT, url, body)?;
            if response.header("docker-content-digest").is_some() {
                return same_digest(&response, digest);
            }
            // A registry that does not return a digest is asked for it.
            same_digest(&endpoint.ask(&Method::HEAD, &path, &[("accept", ACCEPT)], true)?, digest)
        })?;
        Ok(true)
    }
}

/// Sends a request once. The body of an upload's answer is read, so that its connection can be used
/// again.
fn send<'a>(
    endpoint: &Endpoint,
    method: Method,
    url: &'a Url,
    body: Payload<'a>,
) -> Result<Response, Failure> {
    let uploads = matches!(method, Method::POST | Method::PUT | Method::PATCH);
    let request = Request { method, url, headers: &[], body, document: true };
    let mut response = endpoint.send(&request)?;
    if uploads {
        let _ = response.document(ANSWER_MAX);
    }
    Ok(response)
}

fn next(response: &Response) -> Result<Url, RegistryError> {
    match response.header("location") {
        Some(location) => response.url.join(location),
        None => Err(RegistryError::answer(&response.url, "it does not say where to send the blob")),
    }
}

/// Bytes of an upload that are there: `Range: 0-LAST`.
fn received(response: &Response) -> Option<u64> {
    let range = response.header("range")?;
    let range = range.trim().strip_prefix("bytes=").unwrap_or(range.trim());
    let (first, last) = range.split_once('-')?;
    let last: u64 = last.parse().ok()?;
    if first == "0" { last.checked_add(1) } else { None }
}

/// Compares the digest in the answer, if there is one, with what was sent.
fn same_digest(response: &Response, digest: &str) -> Result<(), Failure> {
    match response.header("docker-content-digest") {
        Some(theirs) if theirs != digest => Err(RegistryError::answer(
            &response.url,
            format!("the registry has {}, sent was {digest}", crate::error::quoted(theirs)),
        )
        .into()),
        _ => Ok(()),
    }
}
