//! How a trust domain is used on this machine: the backend, the form of its packs, and its secret.

use std::fmt;

use cofolio_image::pack::segment::Form;
use cofolio_store::{Domain, Error, Result};
use serde::{Deserialize, Serialize};

/// How images of a trust domain are mounted: one way, as the kernel caches content of each apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// A metadata image, and overlayfs over the objects.
    #[default]
    Overlay,
    /// A pack, whose files share the kernel's inodes with those of other packs.
    InodeShare,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Overlay, Self::InodeShare];
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Overlay => "overlay",
            Self::InodeShare => "inode-share",
        })
    }
}

/// The kernel's name for a trust domain, secret: whoever gives it shares pages with the domain.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The secret itself, for the kernel.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The content of `domain.json`.
#[derive(Serialize, Deserialize)]
struct Settings {
    #[serde(default)]
    backend: Backend,
    packs: Form,
    secret: Secret,
}

/// The settings of a domain.
pub trait DomainSettings {
    /// How images of this domain are mounted.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Io`].
    fn backend(&self) -> Result<Backend>;

    /// How packs keep content. A domain has one form because the kernel shares no page between the
    /// two. Fails as [`DomainSettings::backend`] does.
    fn pack_form(&self) -> Result<Form>;

    /// The kernel's name for this domain; `None` before [`DomainSettings::set_backend`]. Fails like
    /// [`DomainSettings::backend`].
    fn secret(&self) -> Result<Option<Secret>>;

    /// Sets how images are mounted from now on, over packs of this form; existing mounts stay.
    /// Replaces a damaged record, with a new secret. Durable on return.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`].
    fn set_backend(&self, backend: Backend, packs: Form) -> Result<()>;
}

impl DomainSettings for Domain {
    fn backend(&self) -> Result<Backend> {
        Ok(self.settings::<Settings>()?.map_or_else(Backend::default, |it| it.backend))
    }

    fn pack_form(&self) -> Result<Form> {
        Ok(self.settings::<Settings>()?.map_or_else(Form::default, |it| it.packs))
    }

    fn secret(&self) -> Result<Option<Secret>> {
        Ok(self.settings::<Settings>()?.map(|it| it.secret))
    }

    fn set_backend(&self, backend: Backend, packs: Form) -> Result<()> {
        self.change_settings(|now: Option<Settings>| {
            let secret = match now {
                Some(settings) => settings.secret,
                None => Secret::random()?,
            };
            Ok(Settings { backend, packs, secret })
        })
    }
}

impl Secret {
    fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        let flags = rustix::rand::GetRandomFlags::empty();
        // Up to 256 bytes are never cut short (getrandom(2)).
        rustix::rand::getrandom(&mut bytes, flags).map_err(|errno| Error::Io {
            action: "get random bytes for",
            path: "domain.json".to_owned(),
            source: errno.into(),
        })?;
        Ok(Self(const_hex::encode(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use cofolio_store::{InitOptions, Store};

    use super::*;

    /// The domain's secret is made once, kept where nobody else can read it, and not shown.
    #[test]
    fn a_domain_has_one_secret_and_does_not_show_it() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("store");
        let store = Store::init(&root, &InitOptions { immutable: false }).unwrap();
        let domain = store.domain("default").unwrap();
        assert_eq!((domain.backend().unwrap(), domain.secret().unwrap()), (Backend::Overlay, None));
        domain.set_backend(Backend::InodeShare, Form::Plain).unwrap();
        assert_eq!(domain.backend().unwrap(), Backend::InodeShare);
        let secret = domain.secret().unwrap().unwrap();
        assert_eq!(secret.reveal().len(), 64);
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        domain.set_backend(Backend::InodeShare, Form::Lz4).unwrap();
        assert_eq!(domain.pack_form().unwrap(), Form::Lz4);
        domain.set_backend(Backend::Overlay, Form::Plain).unwrap();
        assert_eq!(domain.pack_form().unwrap(), Form::Plain);
        assert_eq!(domain.secret().unwrap().unwrap(), secret);
        let other = store.domain_or_create("other").unwrap();
        other.set_backend(Backend::InodeShare, Form::Plain).unwrap();
        assert_ne!(other.secret().unwrap().unwrap(), secret);

        let path = root.join("domains/default/domain.json");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, "{").unwrap();
        assert!(matches!(domain.backend(), Err(Error::Corrupt { .. })));
        domain.set_backend(Backend::InodeShare, Form::Plain).unwrap();
        assert_eq!(domain.backend().unwrap(), Backend::InodeShare);
    }
}
