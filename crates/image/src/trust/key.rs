//! Keys in PEM, public (SPKI) or private (PKCS#8), as `openssl genpkey` and `pkey` write them.

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey,
};
use rustls::pki_types::pem::{PemObject as _, SectionKind};
use rustls::pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};

use crate::digest::BlobDigest;
use crate::error::TrustError;
use crate::files;

const FILE_MAX: u64 = 64 << 10;
/// Length of an ed25519 signature, in bytes.
pub const SIGNATURE_BYTES: usize = 64;

/// DER of a SubjectPublicKeyInfo up to the key itself: RFC 8410, section 4 (32 bytes follow).
const SPKI_ED25519: [u8; 12] =
    [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0];
/// The same for `id-ecPublicKey` on `prime256v1`: RFC 5480, section 2 (65 bytes follow).
const SPKI_P256: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0,
];

/// What kind of key it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Ed25519 (RFC 8032).
    Ed25519,
    /// ECDSA on P-256 with SHA-256, signatures in ASN.1.
    EcdsaP256,
}

/// A key that signatures are checked with.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey {
    algorithm: Algorithm,
    der: Vec<u8>,
    /// Where it was read.
    place: String,
}

impl PublicKey {
    /// Reads the public keys of a PEM file: at least one.
    pub fn read(path: &Path) -> Result<Vec<Self>, TrustError> {
        Self::parse(&read_file(path)?, path)
    }

    /// Parses the public keys of a PEM text, `path` being what to call it.
    pub fn parse(text: &[u8], path: &Path) -> Result<Vec<Self>, TrustError> {
        let wrong = |what: &str| TrustError::Key { path: path.to_owned(), what: what.to_owned() };
        let mut keys = Vec::new();
        for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(text) {
            let (kind, der) = section.map_err(|_| wrong("not PEM"))?;
            match kind {
                SectionKind::PublicKey => {
                    let der = SubjectPublicKeyInfoDer::from(der).as_ref().to_vec();
                    let algorithm = algorithm_of(&der).ok_or_else(|| {
                        wrong("a public key that is neither ed25519 nor ECDSA on P-256")
                    })?;
                    keys.push(Self { algorithm, der, place: path.display().to_string() });
                }
                SectionKind::PrivateKey
                | SectionKind::RsaPrivateKey
                | SectionKind::EcPrivateKey => {
                    return Err(wrong(
                        "a private key, where a public one is needed (`openssl pkey -pubout` gives it)",
                    ));
                }
                _ => {}
            }
        }
        if keys.is_empty() { Err(wrong("no `PUBLIC KEY` in PEM")) } else { Ok(keys) }
    }

    /// What kind of key it is.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Its name: `sha256:` and the SHA-256 of its SubjectPublicKeyInfo in DER.
    pub fn id(&self) -> String {
        BlobDigest::sha256(&self.der).to_string()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn der(&self) -> &[u8] {
        &self.der
    }

    /// Whether the signature is this key's, of these bytes.
    #[must_use]
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let verified = match self.algorithm {
            Algorithm::Ed25519 => {
                let key = &self.der[SPKI_ED25519.len()..];
                UnparsedPublicKey::new(&ED25519, key).verify(message, signature)
            }
            Algorithm::EcdsaP256 => {
                let key = &self.der[SPKI_P256.len()..];
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key).verify(message, signature)
            }
        };
        verified.is_ok()
    }
}

/// File and the beginning of the name, for people.
impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.place, short(&self.id()))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({:?}, {self})", self.algorithm)
    }
}

/// The beginning of a key's name.
pub(super) fn short(id: &str) -> String {
    id.strip_prefix("sha256:").unwrap_or(id).chars().take(16).collect()
}

fn algorithm_of(der: &[u8]) -> Option<Algorithm> {
    if der.len() == SPKI_ED25519.len() + 32 && der.starts_with(&SPKI_ED25519) {
        return Some(Algorithm::Ed25519);
    }
    // 4: the point is not compressed.
    let p256 = der.len() == SPKI_P256.len() + 65 && der.starts_with(&SPKI_P256);
    (p256 && der[SPKI_P256.len()] == 4).then_some(Algorithm::EcdsaP256)
}

/// An ed25519 key that signs. It is never shown.
pub struct SigningKey {
    pair: Ed25519KeyPair,
    public: PublicKey,
    /// Permission bits of its file, if others can read it.
    pub exposed: Option<u32>,
}

impl SigningKey {
    /// Reads the private key of a PEM file. A [`TrustError::Key`] holds nothing of the key.
    pub fn read(path: &Path) -> Result<Self, TrustError> {
        let wrong = |what: &str| TrustError::Key { path: path.to_owned(), what: what.to_owned() };
        let text = read_file(path)?;
        let mode = path.metadata().map_err(|error| unreadable(path, &error))?.mode();
        let der = match PrivatePkcs8KeyDer::pem_slice_iter(&text).next() {
            Some(der) => der.map_err(|_| wrong("not PEM"))?,
            None if text.windows(9).any(|window| window == b"ENCRYPTED") => {
                return Err(wrong("it is encrypted; `openssl pkey` decrypts it"));
            }
            None => return Err(wrong("no `PRIVATE KEY` (PKCS#8) in PEM")),
        };
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der.secret_pkcs8_der())
            .map_err(|_| wrong("not an ed25519 key (`openssl genpkey -algorithm ed25519`)"))?;
        let der = [&SPKI_ED25519[..], pair.public_key().as_ref()].concat();
        let place = path.display().to_string();
        let public = PublicKey { algorithm: Algorithm::Ed25519, der, place };
        Ok(Self { pair, public, exposed: (mode & 0o077 != 0).then_some(mode & 0o7777) })
    }

    /// The public key that belongs to it.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Signs.
    pub fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(message).as_ref().to_vec()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public)
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, TrustError> {
    files::read(path, FILE_MAX).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &std::io::Error) -> TrustError {
    TrustError::Key { path: path.to_owned(), what: error.to_string() }
}
