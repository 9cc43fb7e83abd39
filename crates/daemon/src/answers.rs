//! Answers that the daemon and its clients have in common; `docs/API.md` describes them. The others
//! are types of the ledger.

use cofolio_node::ledger::{ImageFile, ObjectUser};
use cofolio_store::Digest;
use serde::{Deserialize, Serialize};

/// The answer to `GET /v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Version of the API, which is in its paths.
    pub api: u32,
    /// Version of the program.
    pub cofolio: String,
    /// Id of the store that it serves.
    pub store: String,
}

/// The answer to `GET /v1/images/DOMAIN/IMAGE/files`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Files {
    /// The trust domain.
    pub domain: String,
    /// The image.
    pub image: Digest,
    /// Files of the image.
    pub total: u64,
    /// The first of them in the order that was asked for.
    pub files: Vec<ImageFile>,
}

/// The answer to `GET /v1/objects/DOMAIN/OBJECT/users`. Sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Users {
    /// The trust domain.
    pub domain: String,
    /// The object.
    pub object: Digest,
    /// Its size.
    pub bytes: u64,
    /// What of it is resident.
    pub resident_bytes: u64,
    /// Who uses it.
    pub users: Vec<ObjectUser>,
}
