//! How images of a trust domain are mounted, and what that requires of packs and kernel.

use crate::settings::{Backend, DomainSettings as _};
use cofolio_image::pack::segment::Form;
use cofolio_image::pack::{PackError, PackOptions, PackReport, pack};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, Error};

use crate::mount::{MountError, MountState, Mounter, Patience};
use crate::probe::{self, Presence};

/// Why a domain's backend was not set, or an image not packed for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// Compressed packs were asked for with a backend that mounts none.
    #[error("`overlay` mounts the files of the store, which are not compressed")]
    NotCompressed,
    /// A compressed pack was asked for in a domain whose packs are plain.
    #[error("the packs of {domain} are plain, and share nothing with others")]
    PlainPacks {
        /// The domain.
        domain: String,
    },
    /// What is mounted was mounted by the backend that is to go.
    #[error("images of {domain} are mounted (mounts: {mounts})")]
    Mounted {
        /// The domain.
        domain: String,
        /// How many mounts.
        mounts: usize,
    },
    /// The kernel cannot do it.
    #[error("this kernel cannot do inode-share: {why}")]
    Kernel {
        /// Why not.
        why: String,
    },
    /// Mounts could not be listed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// An image could not be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] Error),
}

/// The form of the packs that are made in a domain, if compressed ones are asked for or not.
///
/// # Errors
/// [`BackendError::PlainPacks`], [`BackendError::Store`].
pub fn form(domain: &Domain, compressed: bool) -> Result<Form, BackendError> {
    match (domain.backend()?, domain.pack_form()?) {
        (Backend::InodeShare, Form::Plain) if compressed => {
            Err(BackendError::PlainPacks { domain: domain.name().to_owned() })
        }
        (Backend::InodeShare, form) => Ok(form),
        (Backend::Overlay, _) if compressed => Ok(Form::Lz4),
        (Backend::Overlay, _) => Ok(Form::Plain),
    }
}

/// Packs an image that was just imported or was already present, if the domain mounts packs.
pub fn pack_imported(
    domain: &Domain,
    image: &Digest,
    task: &Task,
) -> Result<Option<PackReport>, BackendError> {
    if domain.backend()? != Backend::InodeShare {
        return Ok(None);
    }
    let options = PackOptions { form: domain.pack_form()?, ..PackOptions::default() };
    Ok(Some(pack(domain, image, &options, task)?))
}

/// Sets the backend and pack form of `mounter`'s domain; `inode-share` packs all images.
///
/// # Errors
/// [`BackendError`]; the backend is as before then, but some images may have a pack more.
pub fn set(
    mounter: &Mounter<'_>,
    backend: Backend,
    form: Form,
    task: &Task,
) -> Result<(), BackendError> {
    let domain = mounter.domain();
    if backend == Backend::Overlay && form != Form::Plain {
        return Err(BackendError::NotCompressed);
    }
    // A record that cannot be read is replaced.
    let now = domain.backend().and_then(|now| Ok((now, domain.pack_form()?)));
    if now.is_ok_and(|now| now == (backend, form)) {
        return Ok(());
    }
    // First: nobody is to unmount anything in vain.
    if backend == Backend::InodeShare {
        check_kernel()?;
    }
    let own = |name: &str| name == domain.name();
    let mut mounts = 0;
    let is_idle = Patience::default().wait(|| {
        let list = mounter.list()?;
        let here = list.mounts.iter().filter(|it| own(&it.record.domain));
        mounts = here.filter(|it| it.state != MountState::Gone).count();
        let pinned = list.pins.iter().any(|pin| own(&pin.domain));
        if mounts == 0 && pinned {
            // Left by an unmount that found copies of the mounts in use.
            mounter.reconcile()?;
        }
        // Nobody waits for mounts.
        Ok::<_, MountError>(mounts > 0 || !pinned)
    })?;
    if mounts > 0 || !is_idle {
        return Err(BackendError::Mounted { domain: domain.name().to_owned(), mounts });
    }
    if backend != Backend::InodeShare {
        return Ok(domain.set_backend(backend, form)?);
    }
    let options = PackOptions { form, ..PackOptions::default() };
    let images = domain.images()?;
    for image in &images {
        pack(domain, image, &options, task)?;
    }
    domain.set_backend(backend, form)?;
    // What was imported meanwhile.
    for image in domain.images()?.iter().filter(|image| !images.contains(image)) {
        pack(domain, image, &options, task)?;
    }
    Ok(())
}

fn check_kernel() -> Result<(), BackendError> {
    let report = probe::probe(&probe::Options::default());
    match report.get("inode-share") {
        Some(feature) if feature.presence == Presence::Absent => {
            Err(BackendError::Kernel { why: feature.detail.clone() })
        }
        _ => Ok(()),
    }
}
