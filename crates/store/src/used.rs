//! When an image was last used: `used/<digest>`, the seconds since 1970 as text.
//!
//! It decides which image goes first when a domain is too large. It is a hint: not synced, and a
//! missing or torn record means that nobody knows.

use crate::error::{Result, is_damage};
use crate::store::{mkdir_if_missing, parent};
use crate::{Digest, Domain};

/// Directory of the records.
pub(crate) const DIRECTORY: &str = "used";
/// Seconds in which a record is not rewritten: starting a thousand containers writes one.
const RESOLUTION_SECONDS: i64 = 60;
/// Longest record that is read, in bytes.
const SIZE_MAX: u64 = 32;

impl Domain {
    /// Notes that an image is used now (`now` in seconds since 1970).
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`]: using the image can go on.
    pub fn note_use(&self, image: &Digest, now: i64) -> Result<()> {
        if self
            .noted_use(image)?
            .is_some_and(|then| (then..then + RESOLUTION_SECONDS).contains(&now))
        {
            return Ok(());
        }
        self.store().check_writable()?;
        let _lock = self.lock_names()?;
        let path = self.used_file(image);
        mkdir_if_missing(self.disk(), parent(&path))?;
        self.store().replace_file(&path, now.to_string().as_bytes(), false)
    }

    /// Seconds since 1970 at which an image was last used, if noted.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn noted_use(&self, image: &Digest) -> Result<Option<i64>> {
        let file = match self.open_file(self.used_file(image)) {
            Err(error) if is_damage(&error) => None,
            opened => opened?,
        };
        let Some(file) = file else { return Ok(None) };
        let text = file.read_all(SIZE_MAX).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        Ok(text.and_then(|text| text.parse().ok()))
    }

    fn used_file(&self, image: &Digest) -> String {
        format!("{}/{DIRECTORY}/{image}", self.directory())
    }
}
