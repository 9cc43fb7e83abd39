//! What the operator has decided for a trust domain: `domain.json`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Domain;
use crate::disk::LockMode;
use crate::error::{At, ErrorKind, Result};
use crate::records::to_json;
use crate::segment::Form;

/// How images of a trust domain are mounted. What is read through one is cached apart from what is read through another,
/// so a domain has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Overlay => "overlay",
            Self::InodeShare => "inode-share",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What the kernel knows a trust domain by: whoever says it shares pages with the domain. It is shown nowhere.
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

/// The content of `domain.json`. Readable by the owner of the store alone.
#[derive(Serialize, Deserialize)]
pub(crate) struct Settings {
    #[serde(default)]
    backend: Backend,
    packs: Form,
    secret: Secret,
}

impl Domain {
    /// How images of this domain are mounted.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`], [`crate::Error::Io`].
    pub fn backend(&self) -> Result<Backend> {
        Ok(self.settings()?.map_or_else(Backend::default, |settings| settings.backend))
    }

    /// How the contents of packs are kept. The kernel shares no page between the two, so a domain has one.
    ///
    /// # Errors
    /// As [`Domain::backend`].
    pub fn pack_form(&self) -> Result<Form> {
        Ok(self.settings()?.map_or_else(Form::default, |settings| settings.packs))
    }

    /// What the kernel is to know this domain by; `None` before [`Domain::set_backend`] has been called.
    ///
    /// # Errors
    /// As [`Domain::backend`].
    pub fn secret(&self) -> Result<Option<Secret>> {
        Ok(self.settings()?.map(|settings| settings.secret))
    }

    /// Sets how images are mounted from now on, over plain packs; what is mounted stays as it is. A record that is damaged
    /// is replaced, with another secret. Durable on return.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`].
    pub fn set_backend(&self, backend: Backend) -> Result<()> {
        self.set_backend_over(backend, Form::default())
    }

    /// As [`Domain::set_backend`], over packs of this form.
    ///
    /// # Errors
    /// As [`Domain::set_backend`].
    pub fn set_backend_over(&self, backend: Backend, packs: Form) -> Result<()> {
        self.store().check_writable()?;
        let path = self.settings_file();
        // Alone, or two would give it two secrets.
        let _lock = self.lock(LockMode::Exclusive, true)?;
        let secret = match self.settings() {
            Ok(Some(settings)) => settings.secret,
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
            Ok(None) | Err(_) => {
                let random = || self.disk().random().at("get random bytes for", &path);
                Secret(const_hex::encode(random()?) + &const_hex::encode(random()?))
            }
        };
        let json = to_json(&path, &Settings { backend, packs, secret })?;
        self.store().replace_secret(self.base(), &path, &json)
    }

    pub(crate) fn settings(&self) -> Result<Option<Settings>> {
        self.read_record(&self.settings_file())
    }

    pub(crate) fn settings_file(&self) -> String {
        format!("{}/domain.json", self.base())
    }
}
