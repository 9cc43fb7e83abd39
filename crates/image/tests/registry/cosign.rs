//! Cosign's signatures at a pull: made here with openssl, byte for byte as cosign's specification
//! has them. (That cosign's own are taken was tried once by hand: docs/SIGNATURES.md.)

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_image::error::ImportError;
use cofolio_image::error::TrustError;
use cofolio_image::import::{ImportOptions, ImportReport, import};
use cofolio_image::trust::{Arrival, Need, Policy, Record, Require, Rule, Subject, signatures};
use cofolio_store::Digest;
use cofolio_store::task::Task;
use serde_json::{Value, json};

use crate::real::Registry;
use crate::server::{Answer, Fake};
use crate::support::{Bench, Blob, CONFIG, INDEX, MANIFEST, have, run, sha256};
use crate::{app, layer, options, source};

const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const ANNOTATION: &str = "dev.cosignproject.cosign/signature";

/// A directory with keys.
struct Keys(tempfile::TempDir);

impl Keys {
    /// `ec` and `other` on P-256, `ed` with ed25519.
    fn new() -> Self {
        let keys = Self(tempfile::tempdir().unwrap());
        let p256 = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
        for (name, kind) in
            [("ec", &p256[..]), ("other", &p256), ("ed", &["-algorithm", "ed25519"])]
        {
            keys.openssl(&[&["genpkey"], kind, &["-out", &format!("{name}.key")]].concat());
            let (key, public) = (format!("{name}.key"), format!("{name}.pub"));
            keys.openssl(&["pkey", "-in", &key, "-pubout", "-out", &public]);
        }
        keys
    }

    fn openssl(&self, args: &[&str]) {
        run(Command::new("openssl").args(args).current_dir(self.0.path()));
    }

    fn public(&self, name: &str) -> PathBuf {
        self.0.path().join(format!("{name}.pub"))
    }

    fn sign(&self, name: &str, payload: &[u8]) -> Vec<u8> {
        let key = format!("{name}.key");
        fs::write(self.0.path().join("payload"), payload).unwrap();
        match name {
            "ed" => self.openssl(&[
                "pkeyutl",
                "-sign",
                "-rawin",
                "-inkey",
                &key,
                "-in",
                "payload",
                "-out",
                "signature",
            ]),
            _ => {
                self.openssl(&["dgst", "-sha256", "-sign", &key, "-out", "signature", "payload"]);
            }
        }
        fs::read(self.0.path().join("signature")).unwrap()
    }
}

/// What cosign signs of a manifest, to the byte (`sigstore/pkg/signature/payload`).
fn payload(digest: &str) -> Vec<u8> {
    format!(
        r#"{{"critical":{{"identity":{{"docker-reference":"registry.example/app"}},"image":{{"docker-manifest-digest":"{digest}"}},"type":"cosign container image signature"}},"optional":null}}"#
    )
    .into_bytes()
}

fn tag(digest: &str) -> String {
    format!("{}.sig", digest.replace(':', "-"))
}

/// Something that blobs and manifests are put into.
trait Put {
    fn blob(&self, media_type: &str, bytes: &[u8]) -> Value;
    fn manifest(&self, tag: &str, media_type: &str, manifest: &Value) -> Value;

    fn put_image(&self, tag: &str, layers: &[Blob]) -> Value {
        let diff_ids: Vec<&str> = layers.iter().map(|layer| layer.diff_id.as_str()).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = self.blob(CONFIG, config.to_string().as_bytes());
        let layers: Vec<Value> =
            layers.iter().map(|layer| self.blob(&layer.media_type, &layer.bytes)).collect();
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        self.manifest(tag, MANIFEST, &manifest)
    }

    /// Puts claims with their signatures where cosign would put those of a digest.
    fn claims(&self, digest: &str, claims: &[(Vec<u8>, String)]) {
        let layers = claims.iter().map(|(payload, signature)| {
            let mut layer = self.blob(SIMPLE_SIGNING, payload);
            layer["annotations"] = json!({ANNOTATION: signature});
            layer
        });
        let layers: Vec<Value> = layers.collect();
        let config = self.blob(
            CONFIG,
            br#"{"architecture":"","os":"","rootfs":{"type":"layers","diff_ids":[]}}"#,
        );
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        self.manifest(&tag(digest), MANIFEST, &manifest);
    }

    fn signed(&self, digest: &str, keys: &Keys, name: &str) {
        let payload = payload(digest);
        let signature = BASE64_STANDARD.encode(keys.sign(name, &payload));
        self.claims(digest, &[(payload, signature)]);
    }
}

impl Put for Registry {
    fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        self.put_blob("app", media_type, bytes)
    }

    fn manifest(&self, tag: &str, media_type: &str, manifest: &Value) -> Value {
        let bytes = manifest.to_string();
        self.call("PUT", &format!("/v2/app/manifests/{tag}"), media_type, bytes.as_bytes());
        json!({"mediaType": media_type, "digest": sha256(bytes.as_bytes()), "size": bytes.len()})
    }
}

impl Put for Fake {
    fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        Fake::blob(self, media_type, bytes)
    }

    fn manifest(&self, tag: &str, media_type: &str, manifest: &Value) -> Value {
        let descriptor = Fake::blob(self, media_type, manifest.to_string().as_bytes());
        self.tag(tag, &descriptor);
        descriptor
    }
}

fn digest(descriptor: &Value) -> &str {
    descriptor["digest"].as_str().unwrap()
}

fn rule(keys: &[PathBuf]) -> Rule {
    Rule { require: Require::Signed, signed_by: Vec::new(), cosign_keys: keys.to_vec() }
}

/// Pulls `app:1`, which one of these keys must have signed.
fn pull_signed(
    bench: &Bench,
    address: std::net::SocketAddr,
    key: &Path,
) -> Result<ImportReport, ImportError> {
    let policy = Policy::new(&rule(&[key.to_owned()]), &Default::default()).unwrap();
    let trust = Arrival { policy: policy.into(), signature: None };
    let options = ImportOptions { registry: options(), trust, ..ImportOptions::default() };
    import(&bench.domain, &source(&app(address)), &options, &Task::default())
}

fn image(report: &ImportReport) -> Digest {
    report.image
}

/// Whether the image can be used where this key is asked for.
fn usable(bench: &Bench, report: &ImportReport, key: &Path) -> Result<bool, TrustError> {
    let policy = Policy::new(&rule(&[key.to_owned()]), &Default::default()).unwrap();
    let record = bench.domain.get_ref(&report.name).unwrap().unwrap();
    let need = Need::Run(record.config.as_deref());
    policy.check(&bench.domain, &Subject { name: Some(&report.name), image: record.image, need })
}

#[track_caller]
fn refused(bench: &Bench, result: Result<ImportReport, ImportError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, ImportError::Trust(TrustError::NoClaim { .. })), "{error:?}");
    assert!(bench.domain.refs().unwrap().is_empty() && bench.domain.images().unwrap().is_empty());
    error.to_string()
}

#[test]
fn a_real_registry_with_signatures_as_cosign_makes_them() {
    const TEST: &str = "a_real_registry_with_signatures_as_cosign_makes_them";
    if !["docker-registry", "openssl"].iter().all(|program| have(TEST, program)) {
        return;
    }
    let (bench, keys) = (Bench::new(), Keys::new());
    let registry = Registry::start(bench.dir.path(), "", "");
    let at = registry.address;
    let manifest = registry.put_image("1", &[layer(1, 2_000_000), layer(2, 100)]);

    let said = refused(&bench, pull_signed(&bench, at, &keys.public("ec")));
    let named = [&app(at), digest(&manifest), "ec.pub"].map(str::to_owned);
    assert!(named.iter().all(|part| said.contains(part)), "{said}");

    registry.signed(digest(&manifest), &keys, "other");
    refused(&bench, pull_signed(&bench, at, &keys.public("ec")));

    registry.signed(digest(&manifest), &keys, "ec");
    let report = pull_signed(&bench, at, &keys.public("ec")).unwrap();
    assert!(bench.view(&report).has("/dir/noise1"));
    let kept = signatures(&bench.domain, &image(&report)).unwrap();
    match &kept[..] {
        [Record::Cosign { manifest: signed, .. }] => assert_eq!(signed, digest(&manifest)),
        other => panic!("{other:?}"),
    }
    usable(&bench, &report, &keys.public("ec")).unwrap();
    assert!(matches!(
        usable(&bench, &report, &keys.public("other")),
        Err(TrustError::Unsigned { .. })
    ));

    // It is here already: a signature that comes later is found all the same.
    registry.signed(digest(&manifest), &keys, "ed");
    let again = pull_signed(&bench, at, &keys.public("ed")).unwrap();
    assert!(again.known);
    usable(&bench, &report, &keys.public("ed")).unwrap();
}

/// The name leads to an index: cosign signs that, and with `--recursive` the manifests too. Either
/// will do, since the index names the manifest by its digest.
#[test]
fn an_index_may_be_signed_or_the_manifest_that_it_leads_to() {
    const TEST: &str = "an_index_may_be_signed_or_the_manifest_that_it_leads_to";
    if !have(TEST, "openssl") {
        return;
    }
    let keys = Keys::new();
    for which in ["index", "manifest", "another manifest", "another index"] {
        let (fake, bench) = (Fake::honest(), Bench::new());
        let mut manifest = fake.put_image("own", &[layer(1, 1000)]);
        manifest["platform"] = json!({"os": "linux", "architecture": "amd64"});
        let mut arm = fake.put_image("arm", &[layer(2, 1000)]);
        arm["platform"] = json!({"os": "linux", "architecture": "arm64"});
        if std::env::consts::ARCH == "aarch64" {
            std::mem::swap(&mut manifest, &mut arm);
        }
        let index = |manifests: &[&Value]| json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
        let one = fake.manifest("1", INDEX, &index(&[&arm, &manifest]));
        let two = fake.manifest("2", INDEX, &index(&[&manifest]));
        let signed = match which {
            "index" => &one,
            "manifest" => &manifest,
            "another manifest" => &arm,
            _ => &two,
        };
        Put::signed(&fake, digest(signed), &keys, "ec");
        // A signature of something else does not become one of this by lying at its tag.
        let payload = payload(digest(signed));
        let signature = BASE64_STANDARD.encode(keys.sign("ec", &payload));
        if which.starts_with("another") {
            fake.claims(digest(&one), &[(payload, signature)]);
        }
        let result = pull_signed(&bench, fake.address, &keys.public("ec"));
        match which.starts_with("another") {
            false => assert!(usable(&bench, &result.unwrap(), &keys.public("ec")).unwrap()),
            true => drop(refused(&bench, result)),
        }
        if which == "another index" {
            assert!(
                !fake
                    .log()
                    .iter()
                    .any(|asked| asked.path.ends_with(digest(&manifest)) && asked.is_blob()),
                "nothing of the image is fetched"
            );
        }
    }
}

/// Whatever lies at the tag, it is a signature or it is none, and a good one among bad ones counts.
#[test]
fn what_is_no_signature_is_passed_over() {
    const TEST: &str = "what_is_no_signature_is_passed_over";
    if !have(TEST, "openssl") {
        return;
    }
    let keys = Keys::new();
    let fake = Fake::honest();
    let manifest = fake.put_image("1", &[layer(1, 1000)]);
    let name = digest(&manifest).to_owned();
    let good = || {
        let payload = payload(&name);
        let signature = BASE64_STANDARD.encode(keys.sign("ec", &payload));
        (payload, signature)
    };
    let bad = vec![
        (payload(&name), "not base64!".to_owned()),
        (payload(&name), String::new()),
        (payload(&name), BASE64_STANDARD.encode([0; 70])),
        (payload(&name), "A".repeat(5000)),
        (vec![b' '; 100_000], good().1),
        (b"{}".to_vec(), BASE64_STANDARD.encode(keys.sign("ec", b"{}"))),
    ];
    let bench = Bench::new();
    let pull = || pull_signed(&bench, fake.address, &keys.public("ec"));
    fake.claims(&name, &bad);
    refused(&bench, pull());
    for document in ["", "[]", "{\"layers\":7}", "{\"layers\":[{}]}"] {
        let descriptor = Fake::blob(&fake, MANIFEST, document.as_bytes());
        fake.tag(&tag(&name), &descriptor);
        refused(&bench, pull());
    }
    fake.claims(&name, &[&bad[..], &[good()]].concat());
    pull().unwrap();
}

/// A registry that does not say whether there is a signature has not said that there is none: the
/// error is the registry's, and what is here stays as it was.
#[test]
fn a_registry_that_fails_is_no_answer() {
    const TEST: &str = "a_registry_that_fails_is_no_answer";
    if !have(TEST, "openssl") {
        return;
    }
    let keys = Keys::new();
    let fake = Fake::new(|asked, answer| match asked.path.ends_with(".sig") {
        true => Answer::error(500, "later"),
        false => answer,
    });
    fake.put_image("1", &[layer(1, 1000)]);
    let bench = Bench::new();
    let error = pull_signed(&bench, fake.address, &keys.public("ec")).unwrap_err();
    assert!(matches!(error, ImportError::Registry(_)), "{error:?}");
    assert!(bench.domain.refs().unwrap().is_empty());
}

/// A policy that a signature of ours would satisfy as well does not stop the pull; the mount is
/// stopped.
#[test]
fn where_another_signature_would_do_the_pull_goes_on() {
    const TEST: &str = "where_another_signature_would_do_the_pull_goes_on";
    if !have(TEST, "openssl") {
        return;
    }
    let (keys, fake, bench) = (Keys::new(), Fake::honest(), Bench::new());
    fake.put_image("1", &[layer(1, 1000)]);
    let both = Rule { signed_by: vec![keys.public("ed")], ..rule(&[keys.public("ec")]) };
    let policy = Policy::new(&both, &Default::default()).unwrap();
    let trust = Arrival { policy: policy.clone().into(), signature: None };
    let options = ImportOptions { registry: options(), trust, ..ImportOptions::default() };
    let report =
        import(&bench.domain, &source(&app(fake.address)), &options, &Task::default()).unwrap();
    let subject = Subject { name: None, image: image(&report), need: Need::Files };
    assert!(matches!(policy.check(&bench.domain, &subject), Err(TrustError::Unsigned { .. })));
}
