//! Certificates: the machine's authorities, and what `certs.d/HOST/` adds (containers-certs.d(5)).

use std::path::{Path, PathBuf};

use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use crate::error::RegistryError;
use crate::files;

/// Largest certificate or key file that is read, in bytes.
const FILE_MAX: u64 = 4 << 20;

/// TLS for one host, verified against the machine's authorities and those of the host.
pub(crate) fn tls_for(host: &str, dirs: &[PathBuf]) -> Result<TlsConfig, RegistryError> {
    // Without an authority that cannot be read the handshake fails and says so.
    let system = rustls_native_certs::load_native_certs().certs;
    let mut roots: Vec<Certificate<'static>> =
        system.iter().map(|der| Certificate::from_der(der).to_owned()).collect();
    let mut client = None;
    for dir in dirs.iter().map(|dir| dir.join(host)) {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        for file in files {
            match file.extension().and_then(|e| e.to_str()) {
                Some("crt") => roots.extend(certificates(&file)?),
                Some("cert") if client.is_none() => {
                    let key = key(&file.with_extension("key"))?;
                    client = Some(ClientCert::new_with_certs(&certificates(&file)?, key));
                }
                _ => {}
            }
        }
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    Ok(TlsConfig::builder()
        .unversioned_rustls_crypto_provider(provider)
        .root_certs(RootCerts::new_with_certs(&roots))
        .client_cert(client)
        .build())
}

fn bad(path: &Path, what: impl Into<String>) -> RegistryError {
    RegistryError::Certificate { path: path.display().to_string(), what: what.into() }
}

fn read(path: &Path) -> Result<Vec<PemItem<'static>>, RegistryError> {
    let bytes = files::read(path, FILE_MAX).map_err(|e| bad(path, e.to_string()))?;
    parse_pem(&bytes).collect::<Result<_, _>>().map_err(|e| bad(path, format!("not PEM: {e}")))
}

fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, RegistryError> {
    let found = read(path)?.into_iter().filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate),
        _ => None,
    });
    let found: Vec<_> = found.collect();
    match found.is_empty() {
        false => Ok(found),
        true => Err(bad(path, "no PEM certificate in it")),
    }
}

fn key(path: &Path) -> Result<PrivateKey<'static>, RegistryError> {
    let key = read(path)?.into_iter().find_map(|item| match item {
        PemItem::PrivateKey(key) => Some(key),
        _ => None,
    });
    key.ok_or_else(|| bad(path, "no PEM private key in it"))
}
