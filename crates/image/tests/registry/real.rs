//! Debian's docker-registry on loopback: plain, with TLS by a certificate authority of our own,
//! with passwords, and behind a network that cuts.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_image::export::{Compression, How, PushOptions, PushReport};
use cofolio_image::registry::RegistryOptions;
use cofolio_store::task::Task;
use serde_json::{Value, json};

use crate::server::Cutter;
use crate::support::{Bench, Blob, CONFIG, Layout, MANIFEST, have, is_root, run, sha256};
use crate::{layer, options, pull, push, push_with};

/// A registry that runs until it is dropped.
pub(crate) struct Registry {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    /// Starts one on a free port; `more` is added to its configuration.
    pub(crate) fn start(data: &Path, more: &str, http: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = data.join(format!("config-{port}.yml"));
        let text = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             {more}http:\n  addr: 127.0.0.1:{port}\n{http}",
            data.join("data").display()
        );
        fs::write(&config, text).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let registry = Self { child, address: SocketAddr::from(([127, 0, 0, 1], port)) };
        let until = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(registry.address).is_err() {
            assert!(Instant::now() < until, "docker-registry does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    /// Pushes an image as the distribution spec says, in one piece each.
    fn push(&self, repository: &str, tag: &str, layers: &[Blob]) {
        let diff_ids: Vec<&str> = layers.iter().map(|layer| layer.diff_id.as_str()).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = self.put_blob(repository, CONFIG, config.to_string().as_bytes());
        let layers: Vec<Value> = layers
            .iter()
            .map(|layer| self.put_blob(repository, &layer.media_type, &layer.bytes))
            .collect();
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        let path = format!("/v2/{repository}/manifests/{tag}");
        self.call("PUT", &path, MANIFEST, manifest.to_string().as_bytes());
    }

    pub(crate) fn put_blob(&self, repository: &str, media_type: &str, bytes: &[u8]) -> Value {
        let place = self.call("POST", &format!("/v2/{repository}/blobs/uploads/"), media_type, b"");
        let place = place.split_once(&self.address.to_string()).unwrap().1.to_owned();
        let digest = sha256(bytes);
        self.call("PUT", &format!("{place}&digest={digest}"), "application/octet-stream", bytes);
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    /// One request; gives the `Location` of the answer.
    pub(crate) fn call(&self, method: &str, path: &str, media_type: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: {media_type}\r\n\
             Content-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = BufReader::new(stream);
        let (mut line, mut location) = (String::new(), String::new());
        answer.read_line(&mut line).unwrap();
        assert!(line.contains(" 20"), "{method} {path}: {line}");
        loop {
            line.clear();
            answer.read_line(&mut line).unwrap();
            match line.trim_end().split_once(": ") {
                Some((name, value)) if name.eq_ignore_ascii_case("location") => {
                    location = value.to_owned();
                }
                Some(_) => {}
                None => break,
            }
        }
        answer.read_to_end(&mut Vec::new()).unwrap();
        location
    }
}

/// Runs openssl in a directory.
fn openssl(dir: &Path, args: &[&str]) {
    run(Command::new("openssl").args(args).current_dir(dir));
}

/// An authority, and a certificate of it for this machine: `ca.crt`, `NAME.crt`, `NAME.key`.
fn certificates(dir: &Path, name: &str, usage: &str) {
    if !dir.join("ca.crt").exists() {
        openssl(
            dir,
            &[
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-subj",
                "/CN=test authority",
                "-days",
                "2",
                "-keyout",
                "ca.key",
                "-out",
                "ca.crt",
                "-addext",
                "basicConstraints=critical,CA:TRUE",
            ],
        );
    }
    let (key, csr, crt) = (format!("{name}.key"), format!("{name}.csr"), format!("{name}.crt"));
    let extensions = dir.join("extensions");
    let text = format!("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={usage}\n");
    fs::write(&extensions, text).unwrap();
    openssl(
        dir,
        &[
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            "/CN=localhost",
            "-keyout",
            &key,
            "-out",
            &csr,
        ],
    );
    openssl(
        dir,
        &[
            "x509",
            "-req",
            "-in",
            &csr,
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            "extensions",
            "-out",
            &crt,
        ],
    );
}

fn ready(test: &str, programs: &[&str]) -> bool {
    programs.iter().all(|program| have(test, program))
}

#[test]
fn a_real_registry_gives_the_image_over_a_network_that_cuts() {
    const TEST: &str = "a_real_registry_gives_the_image_over_a_network_that_cuts";
    if !ready(TEST, &["docker-registry"]) {
        return;
    }
    let bench = Bench::new();
    let registry = Registry::start(bench.dir.path(), "", "");
    let layers = [layer(1, 3_000_000), layer(2, 100), layer(3, 1_000_000)];
    registry.push("team/app", "1", &layers);
    let report = pull(&bench, &format!("{}/team/app:1", registry.address), options()).unwrap();
    assert!(bench.view(&report).has("/dir/noise3"));
    let cutter = Cutter::new(registry.address, 256 << 10);
    let cut = pull(&Bench::new(), &format!("{}/team/app:1", cutter.address), options()).unwrap();
    assert_eq!(cut.image, report.image);
    let error = pull(&bench, &format!("{}/team/none:1", registry.address), options()).unwrap_err();
    assert!(error.to_string().contains("not there"), "{error}");
}

#[test]
fn a_real_registry_with_tls_and_passwords() {
    const TEST: &str = "a_real_registry_with_tls_and_passwords";
    if !ready(TEST, &["docker-registry", "openssl", "htpasswd"]) {
        return;
    }
    let bench = Bench::new();
    let dir = bench.dir.path();
    let layers = [layer(1, 2_000_000), layer(2, 100)];
    Registry::start(dir, "", "").push("team/app", "1", &layers);
    certificates(dir, "server", "serverAuth");
    certificates(dir, "client", "clientAuth");
    let passwords = run(Command::new("htpasswd").args(["-nbB", "user", "secret"]));
    fs::write(dir.join("htpasswd"), passwords).unwrap();
    let auth = format!(
        "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
        dir.join("htpasswd").display()
    );
    let at = |name: &str| dir.join(name).display().to_string();
    let tls =
        format!("  tls:\n    certificate: {}\n    key: {}\n", at("server.crt"), at("server.key"));
    let registry = Registry::start(dir, &auth, &tls);
    let name = format!("localhost:{}/team/app:1", registry.address.port());
    let host = format!("localhost:{}", registry.address.port());
    let once = RegistryOptions { tries_max: 2, ..options() };

    // Not our authority, so no credentials and no second try without TLS.
    let error = pull(&bench, &name, once.clone()).unwrap_err().to_string();
    assert!(error.contains("TLS") && error.contains("ertificate"), "{error}");

    let certs = dir.join("certs.d");
    let ours = certs.join(&host);
    fs::create_dir_all(&ours).unwrap();
    fs::copy(dir.join("ca.crt"), ours.join("ca.crt")).unwrap();
    let with_tls = RegistryOptions { certs_dirs: vec![certs.clone()], ..once };
    let error = pull(&bench, &name, with_tls.clone()).unwrap_err().to_string();
    assert!(error.contains("denied (anonymous)"), "{error}");

    let auth_file = |user: &str, password: &str| -> PathBuf {
        let path = dir.join("auth.json");
        let auth = BASE64_STANDARD.encode(format!("{user}:{password}"));
        let json = json!({"auths": {format!("{host}/team"): {"auth": auth}}});
        fs::write(&path, json.to_string()).unwrap();
        path
    };
    let wrong = auth_file("user", "wrong-secret");
    let with_wrong = RegistryOptions { auth_files: vec![wrong], ..with_tls.clone() };
    let error = pull(&bench, &name, with_wrong).unwrap_err().to_string();
    assert!(
        error.contains("denied (credentials of ") && !error.contains("wrong-secret"),
        "{error}"
    );

    let right = auth_file("user", "secret");
    let with_both = RegistryOptions { auth_files: vec![right], ..with_tls.clone() };
    let report = pull(&bench, &name, with_both.clone()).unwrap();
    assert!(bench.view(&report).has("/dir/noise1"));
    let error = push(&bench, &name, &format!("{host}/team/app:2"), with_tls).unwrap_err();
    assert!(error.to_string().contains("denied (anonymous)"), "{error}");
    let pushed = push(&bench, &name, &format!("{host}/team/app:2"), with_both.clone()).unwrap();
    assert_eq!((Some(pushed.manifest), pushed.original), (report.manifest.clone(), true));
    let elsewhere = push(&bench, &name, &format!("{host}/team/other:1"), with_both.clone());
    assert_eq!(how(&elsewhere.unwrap()), [How::Mounted; 2]);
    drop(registry);

    // A registry that wants to see a certificate of ours as well.
    let clients = format!("{tls}    clientcas:\n      - {}\n", at("ca.crt"));
    let registry = Registry::start(dir, "", &clients);
    let name = format!("localhost:{}/team/app:1", registry.address.port());
    let ours = certs.join(format!("localhost:{}", registry.address.port()));
    fs::create_dir_all(&ours).unwrap();
    fs::copy(dir.join("ca.crt"), ours.join("ca.crt")).unwrap();
    let other = Bench::new();
    let error = pull(&other, &name, with_both.clone()).unwrap_err().to_string();
    assert!(error.contains("TLS: received fatal alert"), "{error}");
    fs::copy(dir.join("client.crt"), ours.join("client.cert")).unwrap();
    let error = pull(&other, &name, with_both.clone()).unwrap_err().to_string();
    assert!(error.contains("client.key"), "{error}");
    fs::copy(dir.join("client.key"), ours.join("client.key")).unwrap();
    assert_eq!(pull(&other, &name, with_both).unwrap().image, report.image);
}

/// A store with the image `image` of these layers, as from a layout.
fn with_image(layers: &[Blob]) -> Bench {
    let bench = Bench::new();
    let layout = Layout::image(bench.path("image"), layers);
    bench.import(&layout.source()).unwrap();
    bench
}

fn how(report: &PushReport) -> Vec<How> {
    report.layers.iter().map(|layer| layer.how).collect()
}

/// What was pushed comes back as the same image; what is there is not sent; what another repository
/// has is mounted; and a manifest whose blobs are all there is the one that came, to the byte.
#[test]
fn a_real_registry_takes_what_is_pushed() {
    const TEST: &str = "a_real_registry_takes_what_is_pushed";
    if !ready(TEST, &["docker-registry"]) {
        return;
    }
    let layers = [layer(1, 6_000_000), layer(2, 100), layer(3, 1_000_000)];
    let bench = with_image(&layers);
    let image = bench.domain.get_ref("image").unwrap().unwrap().image;
    let registry = Registry::start(bench.dir.path(), "", "");
    let at = |name: &str| format!("{}/{name}", registry.address);
    let report = push(&bench, "image", &at("team/app:1"), options()).unwrap();
    assert_eq!((how(&report), report.original), (vec![How::Sent; 3], false));
    let again = push(&bench, "image", &at("team/app:1"), options()).unwrap();
    assert_eq!((how(&again), again.known), (vec![How::There; 3], true));
    assert_eq!(again.manifest, report.manifest);

    // It came from a file, and went to another repository of this registry.
    let mounted = push(&bench, "image", &at("second/app:1"), options()).unwrap();
    assert_eq!((how(&mounted), &mounted.manifest), (vec![How::Mounted; 3], &report.manifest));
    assert_eq!(pull(&Bench::new(), &at("second/app:1"), options()).unwrap().image, image);

    let other = Bench::new();
    let pulled = pull(&other, &at("team/app:1"), options()).unwrap();
    assert_eq!((&pulled.image, pulled.manifest.as_ref()), (&image, Some(&report.manifest)));
    let came: Vec<_> = pulled.layers.iter().map(|layer| layer.diff_id.to_string()).collect();
    assert_eq!(came, layers.iter().map(|layer| layer.diff_id.clone()).collect::<Vec<_>>());
    let mounted = push(&other, &pulled.name, &at("other/copy:2"), options()).unwrap();
    assert_eq!((how(&mounted), mounted.original), (vec![How::Mounted; 3], true));
    assert_eq!(mounted.manifest, report.manifest);
    let copy = pull(&Bench::new(), &at("other/copy:2"), options()).unwrap();
    assert_eq!(copy.image, image);
    drop(registry);

    let read_only = "  maintenance:\n    readonly:\n      enabled: true\n";
    let registry = Registry::start(bench.dir.path(), read_only, "");
    let to = format!("{}/third/copy:1", registry.address);
    let error = push(&bench, "image", &to, options()).unwrap_err().to_string();
    assert!(error.contains("refused (status 405)"), "{error}");
}

/// docker-registry 2.8 cannot go on in the middle of what was cut: the layer begins again.
#[test]
fn a_real_registry_takes_the_image_over_a_network_that_cuts() {
    const TEST: &str = "a_real_registry_takes_the_image_over_a_network_that_cuts";
    if !ready(TEST, &["docker-registry"]) {
        return;
    }
    let bench = with_image(&[layer(1, 6_000_000), layer(2, 2_000_000)]);
    let registry = Registry::start(bench.dir.path(), "", "");
    let cutter = Cutter::of_uploads(registry.address, 1 << 20, 4);
    let report = push(&bench, "image", &format!("{}/app:1", cutter.address), options()).unwrap();
    assert_eq!(how(&report), [How::Sent; 2]);
    let image = pull(&Bench::new(), &format!("{}/app:1", registry.address), options()).unwrap();
    assert_eq!(image.image, report.image);
}

/// Outside judges: skopeo checks every digest on the way and unpacks the layers to what their
/// diff-ids say, and podman, if it may run here, pulls the image.
#[test]
fn others_understand_what_was_pushed() {
    const TEST: &str = "others_understand_what_was_pushed";
    if !ready(TEST, &["docker-registry", "skopeo"]) {
        return;
    }
    let bench = with_image(&[layer(1, 6_000_000), layer(2, 100)]);
    let registry = Registry::start(bench.dir.path(), "", "");
    let policy = bench.path("policy.json");
    fs::write(&policy, r#"{"default":[{"type":"insecureAcceptAnything"}]}"#).unwrap();
    for (compression, tag) in
        [(Compression::Gzip, "gzip"), (Compression::Zstd, "zstd"), (Compression::None, "none")]
    {
        let to = format!("{}/{tag}/app:1", registry.address);
        // Each with blobs of its own.
        let mut record = bench.domain.get_ref("image").unwrap().unwrap();
        record.packed.clear();
        bench.domain.put_ref("image", &record).unwrap();
        let options = PushOptions { compression, registry: options(), ..PushOptions::default() };
        let report = push_with(&bench, "image", &to, &options, &Task::default()).unwrap();
        let from = format!("docker://{to}");
        let mut command = Command::new("skopeo");
        let inspected = run(command.args(["inspect", "--tls-verify=false", &from]));
        let inspected: Value = serde_json::from_slice(&inspected).unwrap();
        assert_eq!(inspected["Digest"], report.manifest.to_string());
        let copy = bench.path(tag);
        let mut command = Command::new("skopeo");
        command.arg("--policy").arg(&policy);
        command.args(["copy", "-q", "--src-tls-verify=false", "--dest-decompress", &from]);
        run(command.arg(format!("dir:{}", copy.display())));
        for layer in &report.layers {
            let archive = fs::read(copy.join(layer.diff_id.as_blob().hex())).unwrap();
            assert_eq!(sha256(&archive), layer.diff_id.to_string());
        }
        if !is_root(TEST) || !ready(TEST, &["podman"]) {
            continue;
        }
        let mut command = Command::new("podman");
        command.arg("--root").arg(bench.path("podman")).arg("--runroot").arg(bench.path("run"));
        command.args(["--storage-driver", "vfs", "pull", "-q", "--tls-verify=false"]);
        let id = run(command.arg("--signature-policy").arg(&policy).arg(&from));
        assert_eq!(
            format!("sha256:{}", String::from_utf8(id).unwrap().trim()),
            report.config.to_string()
        );
    }
}
