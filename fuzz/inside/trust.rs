//! The module `trust::fuzz` of crate image, which only `--cfg fuzzing` builds: it sees what is
//! private there.
//!
//! Each function takes any bytes and panics where an invariant of its target in `fuzz_targets/`
//! does not hold.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_store::Digest;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde::Deserialize;

use super::cosign::Claim;
use super::key::PublicKey;
use super::policy::{Need, Policy, Require, Rule};
use super::record::{Record, config_digest, message};

const CONFIG: &str = r#"{"os":"linux"}"#;
const MANIFEST: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";
const CLAIM: &str = r#"{"critical":{"identity":{"docker-reference":"registry.example/app"},"image":{"docker-manifest-digest":"sha256:1111111111111111111111111111111111111111111111111111111111111111"},"type":"cosign container image signature"},"optional":null}"#;

/// A key, its file, and the only two things that it has signed: an image with [`CONFIG`], and
/// [`CLAIM`].
struct Signed {
    pair: Ed25519KeyPair,
    keys: Vec<PublicKey>,
    file: PathBuf,
    image: Digest,
    ours: Record,
    cosigns: Record,
}

fn signed() -> &'static Signed {
    static SIGNED: OnceLock<Signed> = OnceLock::new();
    SIGNED.get_or_init(|| {
        let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
        let spki = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0];
        let pem = pem(&[&spki[..], pair.public_key().as_ref()].concat());
        let dir = std::env::temp_dir().join(format!("cofolio-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("key.pub");
        std::fs::write(&file, &pem).unwrap();
        let keys = PublicKey::parse(pem.as_bytes(), &file).unwrap();
        let image = Digest([5; 32]);
        let config = config_digest(Some(CONFIG));
        let signature = pair.sign(&message(&image, config.as_deref())).as_ref().to_vec();
        let key = keys[0].id();
        let ours = Record::Cofolio { config: config.clone(), key, signature };
        let (payload, manifest) = (CLAIM.into(), MANIFEST.into());
        let signature = pair.sign(CLAIM.as_bytes()).as_ref().to_vec();
        let cosigns = Record::Cosign { config, manifest, payload, signature };
        Signed { pair, keys, file, image, ours, cosigns }
    })
}

fn pem(der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    format!("-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n")
}

/// Keys, records of signatures, claims of cosign's, policies. The first byte says which.
pub fn trust(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind {
        0 => keys(rest),
        1 => record(rest),
        2 => record(&changed(&signed().ours, rest)),
        3 => record(&changed(&signed().cosigns, rest)),
        4 => claim(rest),
        _ => policy(rest),
    }
}

/// A record's JSON with some bytes changed: a place and a value each.
fn changed(record: &Record, changes: &[u8]) -> Vec<u8> {
    let mut json = serde_json::to_vec(record).unwrap();
    for change in changes.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % json.len();
        json[at] = change[2];
    }
    json
}

fn keys(text: &[u8]) {
    let Ok(keys) = PublicKey::parse(text, Path::new("keys")) else { return };
    assert!(!keys.is_empty());
    for key in keys {
        let again = PublicKey::parse(pem(key.der()).as_bytes(), Path::new("keys")).unwrap();
        assert!(again == [key.clone()] && again[0].id() == key.id());
        let _ = key.verifies(b"message", &[1; 64]);
    }
}

fn record(json: &[u8]) {
    let Ok(record) = serde_json::from_slice::<Record>(json) else { return };
    let again = serde_json::from_slice::<Record>(&serde_json::to_vec(&record).unwrap()).unwrap();
    assert!(again == record && again.shown() == record.shown());
    let Signed { keys, image, .. } = signed();
    let ours = matches!(record, Record::Cofolio { .. });
    let right = record.config() == config_digest(Some(CONFIG)).as_deref();
    for (image, is_signed) in [(image, true), (&Digest([6; 32]), false)] {
        for need in [Need::Files, Need::Run(Some(CONFIG)), Need::Run(None)] {
            let Some(_) = record.signer(image, need, keys, keys) else { continue };
            // The key has signed one message only, and one claim only.
            match &record {
                Record::Cofolio { .. } => assert!(is_signed && right, "{record:?} for {image}"),
                Record::Cosign { manifest, payload, .. } => {
                    assert!(payload == CLAIM.as_bytes() && manifest == MANIFEST, "{record:?}");
                }
            }
            match need {
                Need::Files => {}
                Need::Run(Some(_)) => assert!(right),
                Need::Run(None) => assert!(record.config().is_none()),
            }
        }
    }
    // A key for one kind of signature is none for the other.
    let (signed_by, cosign): (&[_], &[_]) = if ours { (&[], keys) } else { (keys, &[]) };
    assert!(record.signer(image, Need::Files, signed_by, cosign).is_none());
}

/// What the key has signed can still claim anything.
fn claim(payload: &[u8]) {
    let signature = signed().pair.sign(payload).as_ref().to_vec();
    let claim = Claim { payload: payload.to_vec(), signature };
    if claim.signer(MANIFEST, &signed().keys).is_some() {
        let said: serde_json::Value = serde_json::from_slice(payload).unwrap();
        let critical = &said["critical"];
        assert_eq!(critical["image"]["docker-manifest-digest"], MANIFEST);
        assert_eq!(critical["type"], "cosign container image signature");
        assert!(claim.signer("sha256:other", &signed().keys).is_none());
    }
    let other = Claim { payload: [payload, b" "].concat(), signature: claim.signature };
    assert!(other.signer(MANIFEST, &signed().keys).is_none());
}

/// `[trust]` of a configuration.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Section {
    require: Require,
    signed_by: Vec<PathBuf>,
    cosign_keys: Vec<PathBuf>,
    #[serde(rename = "ref")]
    refs: BTreeMap<String, Rule>,
}

fn policy(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let Ok(Section { require, signed_by, cosign_keys, mut refs }) = toml::from_str(text) else {
        return;
    };
    let Signed { keys, file, image, ours, cosigns, .. } = signed();
    let mut default = Rule { require, signed_by, cosign_keys };
    // Whatever file is named, it is the key's: no other file of this machine is opened.
    for rule in refs.values_mut().chain([&mut default]) {
        rule.signed_by.iter_mut().chain(&mut rule.cosign_keys).for_each(|at| at.clone_from(file));
    }
    let Ok(policy) = Policy::new(&default, &refs) else { return };
    let names = refs.keys().flat_map(|pattern| {
        let stem = pattern.strip_suffix('*').unwrap_or(pattern);
        [pattern.clone(), stem.to_owned(), format!("{stem}x")]
    });
    for name in names.chain(["other".to_owned()]) {
        let fits = |pattern: &&String| {
            **pattern == name || pattern.strip_suffix('*').is_some_and(|p| name.starts_with(p))
        };
        let longest = refs.keys().filter(fits).max_by_key(|p| (**p == name, p.len()));
        let (rule, origin) = match longest {
            Some(pattern) => (&refs[pattern], format!("rule for {pattern:?}")),
            None => (&default, "the default rule".to_owned()),
        };
        let demand = policy.rule_for(&name);
        assert_eq!(demand.origin, origin, "{name:?}");
        let passes = |records: &[Record]| {
            demand.check(image, &name, Need::Run(Some(CONFIG)), records).is_ok()
        };
        let by = |keys: &[PathBuf]| match rule.require {
            Require::Accept => true,
            Require::Reject => false,
            Require::Signed => !keys.is_empty(),
        };
        assert_eq!(passes(&[]), rule.require == Require::Accept);
        assert_eq!(passes(std::slice::from_ref(ours)), by(&rule.signed_by));
        assert_eq!(passes(std::slice::from_ref(cosigns)), by(&rule.cosign_keys));
    }
    assert!(policy.cosign_keys("other").iter().all(|key| keys.contains(key)));
}
