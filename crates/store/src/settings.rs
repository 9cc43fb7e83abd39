//! A trust domain's settings, `domain.json`, whose meaning the store does not know.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Domain;
use crate::disk::{LockMode, Purpose};
use crate::error::{ErrorKind, Result};
use crate::records::to_json;

impl Domain {
    /// The settings of the domain; `None` before any were made.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`], [`crate::Error::Io`].
    pub fn settings<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        self.read_record(&self.settings_file())
    }

    /// Replaces the settings by `change` of them; a damaged record counts as none. Only the store's
    /// owner can read the file. Durable on return.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`], and those of `change`.
    pub fn change_settings<T: Serialize + DeserializeOwned>(
        &self,
        change: impl FnOnce(Option<T>) -> Result<T>,
    ) -> Result<()> {
        self.store().check_writable()?;
        // Alone, or two that make the first settings would make different ones.
        let _lock = self.lock(LockMode::Exclusive, self.store().waiting())?;
        let now = match self.settings() {
            Err(error) if error.kind() == ErrorKind::Corrupt => None,
            other => other?,
        };
        let path = self.settings_file();
        let json = to_json(&path, &change(now)?)?;
        self.store().replace(&path, &json, Purpose::Secret, true)
    }

    pub(crate) fn settings_file(&self) -> String {
        format!("{}/domain.json", self.directory())
    }
}
