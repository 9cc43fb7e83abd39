//! A repository through its mirrors, then the registry itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cofolio_store::task::{Cancel, Event, Task};
use ureq::http::Method;

use super::download::Download;
use super::endpoint::Endpoint;
use super::http::Http;
use super::pace::{Failure, Limiter, Tries};
use super::{HostOptions, RegistryOptions};
use crate::error::RegistryError;
use crate::reference::Reference;

/// Media types of manifests and indexes that we know.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";
/// Layers at a time unless said otherwise.
const JOBS: usize = 4;
/// Most layers at a time: each may need 128 MiB to be unpacked.
const JOBS_MAX: usize = 16;
/// Tries with a mirror: there are others.
const MIRROR_TRIES_MAX: u32 = 2;

/// A repository, ready to be read.
pub(crate) struct Repository {
    pub(crate) reference: Reference,
    pub(super) http: Arc<Http>,
    /// The mirrors, and last the registry itself.
    endpoints: Vec<Endpoint>,
    preferred: AtomicUsize,
    /// What it is opened for.
    task: Task,
}

/// A manifest or index, not checked against anything.
pub(crate) struct Document {
    pub(crate) bytes: Vec<u8>,
    pub(crate) media_type: String,
}

/// What a registry says about a manifest without sending it.
pub(crate) struct Head {
    pub(crate) digest: String,
    pub(crate) media_type: String,
    pub(crate) size: u64,
}

impl Repository {
    /// Gets ready; no connection is made yet. [`RegistryError::Options`] for invalid mirrors.
    pub(crate) fn open(
        reference: &Reference,
        options: &RegistryOptions,
        task: &Task,
    ) -> Result<Arc<Self>, RegistryError> {
        let http = Arc::new(Http::new(options.clone(), &task.cancel));
        let (host, repository) = (reference.host(), reference.repository());
        let none = HostOptions::default();
        let mirrors = &options.hosts.get(host).unwrap_or(&none).mirrors;
        let mirror = |mirror: &String| Endpoint::mirror(http.clone(), mirror, repository);
        let mut endpoints = mirrors.iter().map(mirror).collect::<Result<Vec<_>, _>>()?;
        endpoints.push(Endpoint::new(http.clone(), host, repository));
        let preferred = AtomicUsize::new(0);
        let (reference, task) = (reference.clone(), task.clone());
        Ok(Arc::new(Self { reference, http, endpoints, preferred, task }))
    }

    /// The registry itself, to push to. Blobs may be mounted from its repositories `others`.
    pub(crate) fn for_push(
        reference: &Reference,
        options: &RegistryOptions,
        others: &[String],
        task: Task,
    ) -> Self {
        let http = Arc::new(Http::new(options.clone(), &task.cancel));
        let endpoint = Endpoint::new(http.clone(), reference.host(), reference.repository());
        let (reference, preferred) = (reference.clone(), AtomicUsize::new(0));
        Self { reference, http, endpoints: vec![endpoint.for_push(others)], preferred, task }
    }

    pub(crate) fn jobs(&self) -> usize {
        match self.http.options.jobs {
            0 => JOBS,
            jobs => jobs.min(JOBS_MAX),
        }
    }

    pub(crate) fn limiter(&self) -> &Limiter {
        &self.http.limiter
    }

    /// Cancels all requests.
    pub(crate) fn stop(&self) -> &Cancel {
        &self.task.cancel
    }

    /// The endpoints in the order in which to ask them, with their numbers.
    pub(crate) fn order(&self) -> Vec<usize> {
        let count = self.endpoints.len();
        let first = self.preferred.load(Ordering::Relaxed);
        (0..count).map(|at| (first + at) % count).collect()
    }

    pub(super) fn registry(&self) -> &Endpoint {
        &self.endpoints[self.endpoints.len() - 1]
    }

    pub(crate) fn endpoint(&self, number: usize) -> &Endpoint {
        &self.endpoints[number]
    }

    /// Counts tries with an endpoint.
    pub(crate) fn tries(&self, number: usize, stop: &Cancel) -> Tries {
        let options = &self.http.options;
        let task = self.task.cancelled_by(stop.clone());
        match number + 1 == self.endpoints.len() {
            true => Tries::new(options, task),
            false => {
                let tries_max = options.tries_max.min(MIRROR_TRIES_MAX);
                Tries::new(&RegistryOptions { tries_max, ..options.clone() }, task)
            }
        }
    }

    /// Asks the endpoints in turn. If none has it, the registry's own error counts.
    pub(super) fn each<T>(
        &self,
        ask: impl Fn(&Endpoint) -> Result<T, Failure>,
    ) -> Result<T, RegistryError> {
        let mut failed = None;
        for number in self.order() {
            let mut tries = self.tries(number, self.stop());
            let result = loop {
                match ask(&self.endpoints[number]) {
                    Ok(found) => break Ok(found),
                    Err(failure) => match tries.wait(failure) {
                        Ok(()) => {}
                        Err(error) => break Err(error),
                    },
                }
            };
            match result {
                Ok(found) => {
                    self.preferred.store(number, Ordering::Relaxed);
                    return Ok(found);
                }
                Err(error) if number + 1 == self.endpoints.len() => failed = Some(error),
                Err(error) => {
                    self.task.tell(Event::Remark(&format!("{error}; asking elsewhere")));
                    failed = failed.or(Some(error));
                }
            }
        }
        Err(failed.unwrap_or(RegistryError::GivenUp))
    }

    /// Asks for a manifest's digest, kind and size. `None` if the registry does not say all of it.
    pub(crate) fn head(&self, target: &str) -> Result<Option<Head>, RegistryError> {
        let path = format!("manifests/{target}");
        let found = self.each(|endpoint| {
            // After an error status the manifest itself is requested, with all tries.
            let once = |failure: Failure| match failure.error {
                error @ RegistryError::Status { .. } => error.into(),
                _ => failure,
            };
            let response = endpoint.ask(&Method::HEAD, &path, &[("accept", ACCEPT)], true);
            let response = response.map_err(once)?;
            let digest = response.header("docker-content-digest").map(str::to_owned);
            let media_type = media_type(response.header("content-type"));
            let length = response.header("content-length").and_then(|text| text.parse().ok());
            Ok(digest.zip(length).map(|(digest, size)| Head { digest, media_type, size }))
        });
        match found {
            // Some registries know no HEAD, and it never says why it fails.
            Err(
                RegistryError::Status { .. }
                | RegistryError::Refused { .. }
                | RegistryError::Denied { .. },
            ) => Ok(None),
            other => other,
        }
    }

    pub(crate) fn manifest(&self, target: &str, max: u64) -> Result<Document, RegistryError> {
        let path = format!("manifests/{target}");
        self.each(|endpoint| {
            let mut response = endpoint.ask(&Method::GET, &path, &[("accept", ACCEPT)], true)?;
            let media_type = media_type(response.header("content-type"));
            let bytes = response.document(max)?;
            self.limiter().take(bytes.len(), self.stop())?;
            Ok(Document { bytes, media_type })
        })
    }

    /// A blob as a reader that resumes broken connections. Its errors hold a [`RegistryError`].
    pub(crate) fn blob(self: &Arc<Self>, digest: &str, size: u64, stop: &Cancel) -> Download {
        Download::new(self.clone(), digest, size, stop)
    }
}

/// A media type without its parameters.
fn media_type(header: Option<&str>) -> String {
    let text = header.unwrap_or_default().split(';').next().unwrap_or_default();
    text.trim().to_ascii_lowercase()
}
