//! Who may read over TCP: TLS with certificates of clients, a token, or whoever is on this machine.
//!
//! An address that other machines can reach needs TLS, so that nobody reads along or takes a token
//! from the wire, and one of the two ways to know the client. If both are set, both are asked for.

use std::error::Error;
use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use hyper::header::{AUTHORIZATION, HOST};
use hyper::{HeaderMap, StatusCode};
use rustix::fs::OFlags;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use subtle::ConstantTimeEq as _;
use tokio_rustls::TlsAcceptor;

use crate::listen::ListenError;

/// What a client at a TCP address must show. By default nothing, which only loopback addresses
/// allow. These are paths: the files are read when the daemon starts and at each reload.
#[derive(Clone, Debug, Default)]
pub struct AuthFiles {
    /// PEM file with the server's certificate and those that lead to its authority.
    pub certificate: Option<PathBuf>,
    /// PEM file with the key of that certificate. Only its owner and group may have access to it.
    pub key: Option<PathBuf>,
    /// PEM file with the authorities whose certificates clients need.
    pub client_ca: Option<PathBuf>,
    /// File with the token that clients send as `Authorization: Bearer`. Only its owner and group may
    /// have access to it.
    pub token: Option<PathBuf>,
}

/// Characters that a token has at least.
const TOKEN_MIN: usize = 16;

/// Bytes that are read of a file with keys or certificates.
const BYTES_MAX: u64 = 1 << 20;

/// Decides who may read: [`AuthFiles`] with its files read.
pub(crate) struct Auth {
    tls: Option<TlsAcceptor>,
    has_client_ca: bool,
    token: Option<Box<[u8]>>,
}

impl Auth {
    pub(crate) fn new(files: &AuthFiles) -> Result<Self, ListenError> {
        let AuthFiles { certificate, key, client_ca, token } = files;
        let tls = match (certificate, key) {
            (Some(certificate), Some(key)) => Some(tls(certificate, key, client_ca.as_deref())?),
            (None, None) if client_ca.is_none() => None,
            _ => return Err(ListenError::HalfOfTls),
        };
        let token = token.as_deref().map(read_token).transpose()?;
        Ok(Self { tls, has_client_ca: client_ca.is_some(), token })
    }

    /// Other machines may reach an address only if TLS hides what is said, and clients are known.
    pub(crate) fn check_address(&self, address: SocketAddr) -> Result<(), ListenError> {
        let is_enough = self.tls.is_some() && (self.has_client_ca || self.token.is_some());
        match address.ip().is_loopback() || is_enough {
            true => Ok(()),
            false => Err(ListenError::Unguarded(address)),
        }
    }

    /// Does the TLS handshake, if there is TLS.
    pub(crate) fn tls(&self) -> Option<&TlsAcceptor> {
        self.tls.as_ref()
    }

    /// Whether a request with these headers may be answered.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
        match &self.token {
            Some(token) if has_token(headers, token) => Ok(()),
            Some(_) => {
                let why = "the token is missing or wrong (Authorization: Bearer)";
                Err((StatusCode::UNAUTHORIZED, why.to_owned()))
            }
            None if self.has_client_ca => Ok(()),
            None => check_host(headers),
        }
    }
}

/// The [`Auth`] in force. A reload replaces it.
pub(crate) struct ReloadableAuth(RwLock<Arc<Auth>>);

impl ReloadableAuth {
    pub(crate) fn new(auth: Auth) -> Self {
        Self(RwLock::new(Arc::new(auth)))
    }

    pub(crate) fn current(&self) -> Arc<Auth> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn replace(&self, auth: Auth) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(auth);
    }
}

#[cfg(any(test, fuzzing))]
impl Auth {
    /// At a plain loopback address.
    pub(crate) fn for_test(token: Option<&str>) -> Self {
        Self { tls: None, has_client_ca: false, token: token.map(|it| it.as_bytes().into()) }
    }

    /// With a TLS server that has no certificate: its handshakes can begin and not succeed.
    #[cfg(test)]
    #[allow(clippy::unwrap_used, reason = "of tests only")]
    pub(crate) fn with_tls_for_test() -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        let none = Arc::new(rustls::server::ResolvesServerCertUsingSni::new());
        let config = builder.with_no_client_auth().with_cert_resolver(none);
        let tls = Some(TlsAcceptor::from(Arc::new(config)));
        Self { tls, has_client_ca: false, token: None }
    }
}

fn tls(
    certificate: &Path,
    key: &Path,
    client_ca: Option<&Path>,
) -> Result<TlsAcceptor, ListenError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(failed(certificate))?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut authorities = RootCertStore::empty();
            for authority in certificates(path)? {
                authorities.add(authority).map_err(failed(path))?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider)
                    .build()
                    .map_err(failed(path))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let own = certificates(certificate)?;
    let pem = read_secret(key)?;
    let key_of_it = PrivateKeyDer::from_pem_slice(&pem).map_err(failed(key))?;
    // Fails when the key is not that of the certificate.
    let config = builder.with_single_cert(own, key_of_it).map_err(failed(key))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// The certificates of a PEM file, at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ListenError> {
    let pem = read(open(path)?, path)?;
    let certificates = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(failed(path))?;
    match certificates.is_empty() {
        true => Err(failed(path)("it has no certificate")),
        false => Ok(certificates),
    }
}

/// Opens a plain file. A reload must not wait for the other end of a FIFO: clients wait meanwhile.
fn open(path: &Path) -> Result<File, ListenError> {
    let nonblock = OFlags::NONBLOCK.bits().cast_signed();
    let opened = File::options().read(true).custom_flags(nonblock).open(path);
    let file = opened.map_err(failed(path))?;
    match file.metadata().map_err(failed(path))?.is_file() {
        true => Ok(file),
        false => Err(failed(path)("it is not a plain file")),
    }
}

/// Reads a file, but no more than keys and certificates have.
fn read(file: File, path: &Path) -> Result<Vec<u8>, ListenError> {
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed(path))?;
    match bytes.len() as u64 > BYTES_MAX {
        true => Err(failed(path)(format!("it has more than {BYTES_MAX} bytes"))),
        false => Ok(bytes),
    }
}

/// Reads a file that not every user may open.
fn read_secret(path: &Path) -> Result<Vec<u8>, ListenError> {
    let file = open(path)?;
    let mode = file.metadata().map_err(failed(path))?.mode() & 0o777;
    if mode & 0o007 != 0 {
        let why = format!("every user may open it (mode {mode:o}): `chmod 600` it");
        return Err(failed(path)(why));
    }
    read(file, path)
}

fn read_token(path: &Path) -> Result<Box<[u8]>, ListenError> {
    let text = read_secret(path)?;
    let token = text.trim_ascii();
    let is_token = token.len() >= TOKEN_MIN && token.iter().all(u8::is_ascii_graphic);
    is_token.then(|| token.into()).ok_or_else(|| {
        failed(path)(format!("a token is at least {TOKEN_MIN} printable characters"))
    })
}

fn failed<E: Into<Box<dyn Error + Send + Sync>>>(path: &Path) -> impl FnOnce(E) -> ListenError {
    let path = path.to_owned();
    move |source| ListenError::File { path, source: source.into() }
}

/// Whether the request has the token. How long the comparison takes says nothing about the token.
fn has_token(headers: &HeaderMap, token: &[u8]) -> bool {
    let Some(value) = headers.get(AUTHORIZATION).map(|value| value.as_bytes()) else {
        return false;
    };
    let (scheme, sent) = value.split_at(value.len().min("bearer ".len()));
    scheme.eq_ignore_ascii_case(b"bearer ") && bool::from(sent.trim_ascii().ct_eq(token))
}

/// A page that a browser has from elsewhere must not read what is here: the name by which it would
/// have to reach it (DNS rebinding) is not one of this machine's.
fn check_host(headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, port)| {
        if port.bytes().all(|byte| byte.is_ascii_digit()) { name } else { host }
    });
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    match name == "localhost" || address.is_ok_and(|address| address.is_loopback()) {
        true => Ok(()),
        false => Err((StatusCode::FORBIDDEN, format!("{name} is not this machine"))),
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;
    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    #[test]
    fn only_the_token_itself_is_accepted() {
        let auth = Auth::for_test(Some("0123456789abcdef"));
        let check = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_static(value));
            auth.check(&headers).is_ok()
        };
        assert!(check("Bearer 0123456789abcdef") && check("bearer 0123456789abcdef "));
        for wrong in ["", "Bearer", "Bearer ", "0123456789abcdef", "Basic 0123456789abcdef"] {
            assert!(!check(wrong), "{wrong}");
        }
        assert!(!check("Bearer 0123456789abcde") && !check("Bearer 0123456789abcdef0"));
        assert!(auth.check(&HeaderMap::new()).is_err());
    }

    /// A reload waited for whoever would open the other end of a FIFO, and so did all clients.
    #[test]
    fn only_plain_files_of_a_sensible_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let why = || {
            let files = AuthFiles { token: Some(path.clone()), ..AuthFiles::default() };
            let error = Auth::new(&files).err().unwrap();
            error.source().unwrap().to_string()
        };
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert_eq!(why(), "it is not a plain file");
        std::fs::remove_file(&path).unwrap();
        let file = File::create(&path).unwrap();
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        file.set_len(BYTES_MAX + 1).unwrap();
        assert!(why().contains("more than"), "{}", why());
    }

    /// A token that every user can open was refused, and a key was not.
    #[test]
    fn a_key_that_every_user_can_open_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let files = ["certificate", "key"].map(|name| dir.path().join(name));
        let pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        files.iter().for_each(|file| std::fs::write(file, pem).unwrap());
        let [certificate, key] = files;
        let files = AuthFiles {
            certificate: Some(certificate),
            key: Some(key.clone()),
            ..AuthFiles::default()
        };
        let why = |mode| {
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = Auth::new(&files).err().unwrap();
            let ListenError::File { path, source } = error else { panic!("{error}") };
            assert_eq!(path, key);
            source.to_string()
        };
        assert!(why(0o644).starts_with("every user may open it (mode 644)"));
        // It is no key.
        assert!(!why(0o640).starts_with("every user"));
    }

    #[test]
    fn every_loopback_address_is_this_machine() {
        let check = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_static(value));
            check_host(&headers).is_ok()
        };
        for host in
            ["localhost", "localhost:80", "127.0.0.1", "127.0.0.2:8080", "[::1]:1", "[::01]"]
        {
            assert!(check(host), "{host}");
        }
        for host in ["", "example.com", "127.0.0.1.example.com", "10.0.0.1", "[fe80::1]:80"] {
            assert!(!check(host), "{host}");
        }
    }
}
