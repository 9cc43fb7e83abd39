//! Downloads a blob: resumes after broken connections, keeps to the rate, tries mirrors.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Instant;

use cofolio_store::task::Cancel;
use ureq::BodyReader;
use ureq::http::Method;

use super::http::{Http, Response};
use super::pace::{Failure, Speed, Tries};
use super::repository::Repository;
use super::url::Url;
use crate::error::RegistryError;

/// A connection that brings this many bytes is progress.
const PROGRESS_BYTES: u64 = 64 << 10;
/// It must also bring one byte for this many that were read again: a server without ranges that
/// cuts early would have a large blob read a thousand times.
const PROGRESS_PART: u64 = 8;
/// Bytes that are read to leave something out, at a time.
const SKIP_BYTES: usize = 64 << 10;

/// Reads a blob to its promised size. Errors hold a [`RegistryError`].
pub(crate) struct Download {
    repository: Arc<Repository>,
    digest: String,
    size: u64,
    stop: Cancel,
    /// How far we are.
    at: u64,
    body: Option<Connection>,
    /// Endpoints that are left to try; the first is the one in use.
    endpoints: Vec<usize>,
    tries: Tries,
    /// The final error, which later reads repeat.
    failed: Option<RegistryError>,
}

/// One answer that is being read.
struct Connection {
    url: Url,
    body: BodyReader<'static>,
    /// Offset of its first new byte.
    from: u64,
    /// Bytes before that, which came again.
    again: u64,
    speed: Speed,
}

impl Connection {
    fn read(&mut self, buffer: &mut [u8], http: &Http) -> io::Result<usize> {
        let asked = Instant::now();
        let count = self.body.read(buffer)?;
        if count > 0 {
            http.heard();
        }
        // What came is dropped with the connection, and asked for again.
        self.speed.add(count, asked.elapsed()).map_err(io::Error::other)?;
        Ok(count)
    }
}

impl Download {
    pub(crate) fn new(repository: Arc<Repository>, digest: &str, size: u64, stop: &Cancel) -> Self {
        let endpoints = repository.order();
        let tries = repository.tries(endpoints[0], stop);
        Self {
            repository,
            digest: digest.to_owned(),
            size,
            stop: stop.clone(),
            at: 0,
            body: None,
            endpoints,
            tries,
            failed: None,
        }
    }

    fn next(&mut self, buf: &mut [u8]) -> Result<usize, RegistryError> {
        loop {
            let result = match &self.body {
                None if self.at == self.size => return Ok(0),
                None => self.connect().map(|connection| {
                    self.body = Some(connection);
                    None
                }),
                Some(_) => self.receive(buf).map(Some),
            };
            match result {
                Ok(Some(count)) => return Ok(count),
                Ok(None) => {}
                Err(failure) => self.failure(failure)?,
            }
        }
    }

    /// Waits for another try, here or elsewhere.
    fn failure(&mut self, failure: Failure) -> Result<(), RegistryError> {
        if let Some(Connection { from, again, .. }) = self.body.take()
            && self.at - from >= PROGRESS_BYTES.max(again / PROGRESS_PART)
        {
            self.tries.got_on();
        }
        self.tries.wait(failure).or_else(|error| {
            if self.endpoints.len() == 1 || matches!(error, RegistryError::GivenUp) {
                return Err(error);
            }
            self.endpoints.remove(0);
            self.tries = self.repository.tries(self.endpoints[0], &self.stop);
            Ok(())
        })
    }

    fn connect(&self) -> Result<Connection, Failure> {
        let endpoint = self.repository.endpoint(self.endpoints[0]);
        let path = format!("blobs/{}", self.digest);
        let range = format!("bytes={}-", self.at);
        let headers = [("range", range.as_str())];
        let headers = if self.at > 0 { &headers[..] } else { &[] };
        let response = endpoint.ask(&Method::GET, &path, headers, false)?;
        let begins = begin(&response, self.at, self.size)?;
        let Response { url, body, .. } = response;
        let (body, again) = (body.into_reader(), self.at - begins);
        let speed = Speed::new(&self.repository.http.options);
        let mut connection = Connection { url, body, from: self.at, again, speed };
        self.skip(&mut connection)?;
        Ok(connection)
    }

    /// Skips known bytes that a server without ranges sends again.
    fn skip(&self, connection: &mut Connection) -> Result<(), Failure> {
        let mut count = connection.again;
        let mut buffer = vec![0; if count > 0 { SKIP_BYTES } else { 0 }];
        while count > 0 {
            let limiter = self.repository.limiter();
            let most = buffer.len().min(limiter.portion());
            let most = most.min(usize::try_from(count).unwrap_or(most));
            match connection.read(&mut buffer[..most], &self.repository.http) {
                Ok(0) => return Err(early(&connection.url)),
                Ok(read) => {
                    count -= read as u64;
                    limiter.take(read, &self.stop)?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.repository.http.broken(&connection.url, &e)),
            }
        }
        Ok(())
    }

    fn receive(&mut self, buf: &mut [u8]) -> Result<usize, Failure> {
        let Some(connection) = &mut self.body else { return Ok(0) };
        let left = usize::try_from(self.size - self.at).unwrap_or(usize::MAX);
        let limiter = self.repository.limiter();
        // One more read finds out whether this is the end, and gives the connection back.
        let mut one = [0u8; 1];
        let target = match left {
            0 => &mut one[..],
            left => {
                let most = buf.len().min(left).min(limiter.portion());
                &mut buf[..most]
            }
        };
        match connection.read(target, &self.repository.http) {
            Ok(0) if left == 0 => {
                self.body = None;
                Ok(0)
            }
            Ok(0) => Err(early(&connection.url)),
            Ok(_) if left == 0 => Err(RegistryError::answer(
                &connection.url,
                format!("more than the {} bytes that were promised", self.size),
            )
            .into()),
            Ok(count) => {
                self.at += count as u64;
                limiter.take(count, &self.stop)?;
                Ok(count)
            }
            // All is there; how the connection ends does not matter.
            Err(e) if left == 0 && e.kind() != io::ErrorKind::Interrupted => {
                self.body = None;
                Ok(0)
            }
            Err(e) => Err(self.repository.http.broken(&connection.url, &e)),
        }
    }
}

/// The offset at which an answer begins: the one asked for, or 0.
fn begin(response: &Response, at: u64, size: u64) -> Result<u64, RegistryError> {
    let bad = |what: String| RegistryError::answer(&response.url, what);
    let length = response.body.content_length();
    if response.status == 206 && at > 0 {
        let range = response.header("content-range").unwrap_or_default();
        let parsed = range.strip_prefix("bytes ").and_then(|r| r.split_once('-'));
        let from = parsed.and_then(|(from, _)| from.trim().parse::<u64>().ok());
        return match from {
            Some(from) if from == at && length.is_none_or(|length| length == size - at) => Ok(at),
            _ => Err(bad(format!("asked for bytes from {at} to {size}, got {range:?}"))),
        };
    }
    if response.status != 200 {
        return Err(bad(format!("status {} for a blob", response.status)));
    }
    match length {
        Some(length) if length != size => {
            Err(bad(format!("{length} bytes, the descriptor says {size}")))
        }
        _ => Ok(0),
    }
}

fn early(url: &Url) -> Failure {
    Failure::again(RegistryError::unreachable(url, "the connection ended early"))
}

impl Read for Download {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        if let Some(error) = &self.failed {
            return Err(io::Error::other(error.clone()));
        }
        self.next(buf).map_err(|error| {
            self.failed = Some(error.clone());
            io::Error::other(error)
        })
    }
}
