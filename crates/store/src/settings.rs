//! What the operator has decided for a trust domain: `domain.json`. The store keeps the record and does not
//! know what it means.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Domain;
use crate::disk::LockMode;
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

    /// Replaces the settings by what `change` makes of them; a damaged record counts as none. The file is
    /// readable by the owner of the store alone. Durable on return.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`], and those of `change`.
    pub fn change_settings<T: Serialize + DeserializeOwned>(
        &self,
        change: impl FnOnce(Option<T>) -> Result<T>,
    ) -> Result<()> {
        self.store().check_writable()?;
        // Alone, or two that make the first settings would make different ones.
        let _lock = self.lock(LockMode::Exclusive, true)?;
        let now = match self.settings() {
            Err(error) if error.kind() == ErrorKind::Corrupt => None,
            other => other?,
        };
        let path = self.settings_file();
        let json = to_json(&path, &change(now)?)?;
        self.store().replace_secret(self.base(), &path, &json)
    }

    pub(crate) fn settings_file(&self) -> String {
        format!("{}/domain.json", self.base())
    }
}
