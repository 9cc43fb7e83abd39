//! A lease keeps an image during an export, which may take hours. The domain's lock would make
//! garbage collection and imports wait as long.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cofolio_store::{Digest, Domain, DomainLock, Error, ErrorKind, Root, RootKind};

/// How long the lease of a process that was killed outlives it.
const TERM: Duration = Duration::from_secs(60 * 60);
/// How often a living one renews it.
const RENEWAL: Duration = Duration::from_secs(15 * 60);

/// Keeps an image and its layers until dropped.
#[derive(Debug)]
pub(crate) struct Lease<'a> {
    domain: &'a Domain,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Root(Mutex<(Root, Instant)>),
    /// In a store that this process cannot change.
    Lock(#[expect(dead_code, reason = "held, not used")] DomainLock),
}

impl<'a> Lease<'a> {
    /// Takes a lease; `note` tells people what for. Fails if the image or a layer does not exist.
    pub(crate) fn take(
        domain: &'a Domain,
        image: &Digest,
        layers: Vec<String>,
        note: &str,
    ) -> Result<Self, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Two processes of one number may be in two containers, with one store.
        let id = format!("{}-{number}-{:x}", std::process::id(), now.as_nanos());
        let root = Root {
            images: vec![*image],
            layers,
            note: note.to_owned(),
            created: seconds(now),
            expires: Some(seconds(now + TERM)),
            ..Root::new(RootKind::Lease, id)
        };
        let kind = match domain.put_root(&root) {
            Ok(()) => Kind::Root(Mutex::new((root, Instant::now()))),
            Err(error) if error.kind() == ErrorKind::Caller => return Err(error),
            Err(_) => Kind::Lock(domain.lock_shared()?),
        };
        Ok(Self { domain, kind })
    }

    /// Renews the lease if it is time to. Call it often.
    pub(crate) fn renew(&self) {
        let Kind::Root(root) = &self.kind else { return };
        let mut root = root.lock().unwrap_or_else(PoisonError::into_inner);
        if root.1.elapsed() < RENEWAL {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        root.0.expires = Some(seconds(now + TERM));
        root.1 = Instant::now();
        // If this fails, three more tries come before the lease expires.
        let _ = self.domain.put_root(&root.0);
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Kind::Root(root) = &self.kind {
            let root = root.lock().unwrap_or_else(PoisonError::into_inner);
            // A lease that cannot be removed expires.
            let _ = self.domain.remove_root(RootKind::Lease, &root.0.id);
        }
    }
}

fn seconds(since_1970: Duration) -> i64 {
    i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX)
}
