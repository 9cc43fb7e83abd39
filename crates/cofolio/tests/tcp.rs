//! Who may read at the daemon's TCP address: certificates of clients, a token, or nobody from
//! elsewhere.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::daemon::{Daemon, request};
use common::{Sandbox, can_mount};

const TOKEN: &str = "a-token-of-this-test";

/// Two authorities, each with certificates for a server and a client.
fn make_certificates(sandbox: &Sandbox) -> PathBuf {
    let dir = sandbox.dir("tls");
    let openssl = |args: &[&str]| {
        let ran = Command::new("openssl").args(args).current_dir(&dir).output().unwrap();
        assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    fs::write(dir.join("san"), "subjectAltName = IP:127.0.0.1\n").unwrap();
    fs::write(dir.join("none"), "basicConstraints = CA:FALSE\n").unwrap();
    for (authority, names) in [("ours", ["server", "client"]), ("foreign", ["other", "stranger"])] {
        let files = (format!("{authority}.pem"), format!("{authority}.key"));
        let subject = format!("/CN={authority}");
        let options = ["req", "-x509", "-days", "2", "-subj", &subject];
        openssl(&[&options[..], &key, &["-out", &files.0, "-keyout", &files.1]].concat());
        for name in names {
            let (request, own) = (format!("{name}.csr"), format!("{name}.key"));
            let subject = format!("/CN={name}");
            let options = ["req", "-subj", &subject, "-out", &request, "-keyout", &own];
            openssl(&[&options[..], &key].concat());
            let extensions = if name == names[0] { "san" } else { "none" };
            let out = format!("{name}.pem");
            let signs = ["x509", "-req", "-days", "2", "-in", &request, "-out", &out];
            let by = ["-CA", &files.0, "-CAkey", &files.1, "-CAcreateserial"];
            openssl(&[&signs[..], &by, &["-extfile", extensions]].concat());
        }
    }
    write_secret(&dir.join("token"), TOKEN);
    dir
}

/// A file that only its owner can read.
fn write_secret(path: &Path, text: &str) {
    fs::write(path, format!("{text}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// A configuration file with these settings of `[daemon]`, each a file of the directory.
fn configure(sandbox: &Sandbox, settings: &[(&str, &str)]) -> String {
    let dir = sandbox.path("tls");
    let lines =
        settings.iter().map(|(key, file)| format!("{key} = '{}'\n", dir.join(file).display()));
    let path = sandbox.text("config.toml");
    fs::write(&path, format!("[daemon]\n{}", lines.collect::<String>())).unwrap();
    path
}

/// A sandbox with a store and certificates; says why not.
fn prepared(test: &str) -> Option<Sandbox> {
    if !can_mount(test) {
        return None;
    }
    if common::program("openssl").is_none() {
        common::skip(test, "no openssl");
        return None;
    }
    let sandbox = Sandbox::new();
    sandbox.import_tree("tree");
    make_certificates(&sandbox);
    Some(sandbox)
}

/// The status that curl gets, or `None` where there is no answer.
fn curl(sandbox: &Sandbox, daemon: &Daemon, path: &str, args: &[&str]) -> Option<u16> {
    let port = daemon.tcp.as_ref().unwrap().rsplit_once(':').unwrap().1;
    let mut command = Command::new("curl");
    command.args(["-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", "ours.pem"]);
    let ran = command
        .args(args)
        .arg(format!("https://127.0.0.1:{port}{path}"))
        .current_dir(sandbox.path("tls"))
        .output()
        .unwrap();
    ran.status.success().then(|| String::from_utf8(ran.stdout).unwrap().parse().unwrap())
}

const TLS: [(&str, &str); 2] = [("tls_certificate", "server.pem"), ("tls_key", "server.key")];
const CLIENT: [&str; 4] = ["--cert", "client.pem", "--key", "client.key"];
const STRANGER: [&str; 4] = ["--cert", "stranger.pem", "--key", "stranger.key"];

#[test]
fn a_client_needs_a_certificate_of_the_configured_authority() {
    let Some(sandbox) = prepared("a_client_needs_a_certificate_of_the_configured_authority") else {
        return;
    };
    let config = configure(&sandbox, &[&TLS[..], &[("tls_client_ca", "ours.pem")]].concat());
    let daemon = Daemon::start(&sandbox, &["--config", &config, "--listen", "0.0.0.0:0"]);
    let get = |args: &[&str]| curl(&sandbox, &daemon, "/v1/version", args);
    assert_eq!(get(&CLIENT), Some(200));
    assert_eq!(get(&[]), None);
    assert_eq!(get(&STRANGER), None);
    // It may read, like everybody over TCP, under whatever name it knows the server.
    let sample = |args: &[&str]| curl(&sandbox, &daemon, "/v1/sample", &[&CLIENT, args].concat());
    assert_eq!(sample(&["-X", "POST"]), Some(403));
    assert_eq!(get(&[&CLIENT[..], &["-H", "Host: node.example"]].concat()), Some(200));

    // Plain HTTP gets a TLS alert at most.
    let port = daemon.tcp.as_ref().unwrap().rsplit_once(':').unwrap().1;
    let mut plain = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    plain.write_all(b"GET /v1/version HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(get(&CLIENT), Some(200));
}

#[test]
fn a_client_needs_the_token() {
    let Some(sandbox) = prepared("a_client_needs_the_token") else { return };
    let right = format!("Authorization: Bearer {TOKEN}");
    let wrong = format!("Authorization: Bearer {}", TOKEN.replace('a', "b"));
    let config = configure(&sandbox, &[&TLS[..], &[("token_file", "token")]].concat());
    let daemon = Daemon::start(&sandbox, &["--config", &config, "--listen", "0.0.0.0:0"]);
    for path in ["/v1/version", "/metrics", "/", "/nothing"] {
        let get = |args: &[&str]| curl(&sandbox, &daemon, path, args);
        let status = if path == "/nothing" { 404 } else { 200 };
        assert_eq!(get(&["-H", &right]), Some(status));
        assert_eq!(get(&["-H", &wrong]), Some(401));
        assert_eq!(get(&[]), Some(401));
    }
    // At the unix socket nobody needs it.
    assert_eq!(daemon.json("/v1/version")["api"], 1);
    drop(daemon);

    // A certificate and a token: both are needed.
    let both = [("token_file", "token"), ("tls_client_ca", "ours.pem")];
    let config = configure(&sandbox, &[&TLS[..], &both].concat());
    let daemon = Daemon::start(&sandbox, &["--config", &config, "--listen", "0.0.0.0:0"]);
    let get = |args: &[&str]| curl(&sandbox, &daemon, "/v1/version", args);
    assert_eq!(get(&[&CLIENT[..], &["-H", &right]].concat()), Some(200));
    assert_eq!(get(&CLIENT), Some(401));
    assert_eq!(get(&["-H", &right]), None);
    drop(daemon);

    // Without TLS, at a loopback address.
    let config = configure(&sandbox, &[("token_file", "token")]);
    let daemon = Daemon::start(&sandbox, &["--config", &config, "--listen", "127.0.0.1:0"]);
    let ask = |header: &str| {
        let stream = TcpStream::connect(daemon.tcp.as_ref().unwrap()).unwrap();
        request(stream, &format!("GET /v1/version HTTP/1.0\r\n{header}\r\n\r\n")).0
    };
    assert_eq!(ask(&right), 200);
    assert_eq!(ask(&wrong), 401);
    assert_eq!(ask("Host: localhost"), 401);
}

/// A certificate that was renewed took a restart of the daemon.
#[test]
fn a_reload_reads_certificates_and_token_again() {
    let Some(sandbox) = prepared("a_reload_reads_certificates_and_token_again") else { return };
    let file = |name: &str| sandbox.path("tls").join(name);
    fs::copy(file("ours.pem"), file("ca.pem")).unwrap();
    let guards = [("token_file", "token"), ("tls_client_ca", "ca.pem")];
    let config = configure(&sandbox, &[&TLS[..], &guards].concat());
    let mut daemon = Daemon::start(&sandbox, &["--config", &config, "--listen", "127.0.0.1:0"]);
    let tokens = [TOKEN, "another-token-of-it"];
    let headers = tokens.map(|token| format!("Authorization: Bearer {token}"));
    let get = |daemon: &Daemon, authority: &str, client: &[&str], header: &str| {
        let args = [&["--cacert", authority, "-H", header], client].concat();
        curl(&sandbox, daemon, "/v1/version", &args)
    };
    let [before, after] = &headers;
    assert_eq!(get(&daemon, "ours.pem", &CLIENT, before), Some(200));

    // All is written anew. The daemon has what it read until it is told, and if one file is
    // damaged.
    let key = fs::read(file("server.key")).unwrap();
    for (new, name) in [("other.pem", "server.pem"), ("foreign.pem", "ca.pem")] {
        fs::copy(file(new), file(name)).unwrap();
    }
    fs::write(file("token"), tokens[1]).unwrap();
    assert_eq!(get(&daemon, "ours.pem", &CLIENT, before), Some(200));
    for damaged in [&b"damaged"[..], &key] {
        fs::write(file("server.key"), damaged).unwrap();
        let said = daemon.reload();
        assert!(said.contains("stay as they are") && said.contains("tls/server.key"), "{said}");
        assert_eq!(get(&daemon, "ours.pem", &CLIENT, before), Some(200));
        assert_eq!(get(&daemon, "ours.pem", &CLIENT, after), Some(401));
    }
    fs::copy(file("other.key"), file("server.key")).unwrap();
    let said = daemon.reload();
    assert!(said.contains("read again"), "{said}");
    assert_eq!(get(&daemon, "foreign.pem", &STRANGER, after), Some(200));
    assert_eq!(get(&daemon, "foreign.pem", &STRANGER, before), Some(401));
    assert_eq!(get(&daemon, "foreign.pem", &CLIENT, after), None);
    assert_eq!(get(&daemon, "ours.pem", &STRANGER, after), None);
}

/// An address that other machines can reach is not listened at unless TLS and a certificate or
/// token keep strangers out, and files that cannot be used are named. That was exit code 1, and not that
/// of wrong configuration, and a token that every user could read was taken.
#[test]
fn an_address_without_a_guard_is_refused() {
    let Some(sandbox) = prepared("an_address_without_a_guard_is_refused") else { return };
    write_secret(&sandbox.path("tls/short"), "secret");
    fs::write(sandbox.path("tls/open"), TOKEN).unwrap();
    let refused = |settings: &[(&str, &str)], said: &[&str]| {
        let config = configure(&sandbox, settings);
        let ran = sandbox.run(&["serve", "--config", &config, "--listen", "0.0.0.0:0"]);
        said.iter().for_each(|said| _ = ran.fails_with(2).refused(said));
    };
    let unguarded = "0.0.0.0:0 is not a loopback address";
    refused(&[], &[unguarded]);
    refused(&[("token_file", "token")], &[unguarded]);
    refused(&TLS, &[unguarded]);
    refused(&TLS[..1], &["both a certificate and its key"]);
    refused(&[("tls_client_ca", "ours.pem")], &["a client CA needs TLS"]);
    let with = |more: (&'static str, &'static str)| [&TLS[..], &[more]].concat();
    refused(&with(("token_file", "missing")), &["tls/missing", "No such file"]);
    refused(&with(("token_file", "short")), &["tls/short", "at least 16"]);
    refused(&with(("token_file", "open")), &["tls/open", "mode 644", "chmod 600"]);
    refused(&with(("tls_client_ca", "token")), &["tls/token", "no certificate"]);
    let other = [("tls_certificate", "server.pem"), ("tls_key", "client.key")];
    refused(&[&other[..], &[("token_file", "token")]].concat(), &["tls/client.key"]);
    assert!(!sandbox.path("run/cofolio.sock").exists());
}
