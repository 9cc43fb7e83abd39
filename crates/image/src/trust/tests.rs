//! Signatures that are none, keys that cannot be, rules that make no sense, and what is refused for
//! want of a signature. That openssl and cosign agree about the bytes is tested where they are at
//! hand.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_store::{Digest, Domain, ImportOptions, InitOptions, Publish, Ref, Store};
use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use tempfile::TempDir;

use super::*;

const CONFIG: &str = r#"{"os":"linux"}"#;

struct Fixture {
    dir: TempDir,
    domain: Domain,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = InitOptions { immutable: false };
        let store = Store::init(&dir.path().join("store"), &options).unwrap();
        let domain = store.domain("default").unwrap();
        Self { dir, domain }
    }

    /// A ref to something that the store takes for an image.
    fn image(&self, name: &str, content: &[u8]) -> Digest {
        use std::io::Write as _;
        let staging = self.domain.begin_import(ImportOptions::default()).unwrap();
        let mut image = staging.image_writer().unwrap();
        image.write_all(content).unwrap();
        let image = image.finish().unwrap();
        let record = Ref { config: Some(CONFIG.to_owned()), ..Ref::new(image) };
        staging.commit(&Publish::named(name, record), []).unwrap();
        image
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A key pair: the private key, and the file of the public one.
    fn key(&self, name: &str) -> (SigningKey, PathBuf) {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let private = self.file(&format!("{name}.key"), pem("PRIVATE KEY", pkcs8.as_ref()));
        let key = SigningKey::read(&private).unwrap();
        let der = [&hex("302a300506032b6570032100"), raw(key.public()).as_slice()].concat();
        (key, self.file(name, pem("PUBLIC KEY", &der)))
    }

    fn sign(&self, image: &Digest, key: &SigningKey) {
        Record::sign(image, Some(CONFIG), key).keep(&self.domain, image).unwrap();
    }

    fn check(
        &self,
        policy: &Policy,
        name: Option<&str>,
        image: Digest,
    ) -> Result<bool, TrustError> {
        policy.check(&self.domain, &Subject { name, image, need: Need::Run(Some(CONFIG)) })
    }
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
}

fn hex(text: &str) -> Vec<u8> {
    const_hex::decode(text).unwrap()
}

/// The 32 bytes of a public key.
fn raw(key: &PublicKey) -> Vec<u8> {
    key.der()[12..].to_vec()
}

fn signed(keys: &[&PathBuf]) -> Rule {
    let signed_by = keys.iter().map(|&key| key.clone()).collect();
    Rule { require: Require::Signed, signed_by, cosign_keys: Vec::new() }
}

fn only(require: Require) -> Rule {
    Rule { require, ..Rule::default() }
}

fn rules(rules: &[(&str, Rule)]) -> BTreeMap<String, Rule> {
    rules.iter().map(|(pattern, rule)| ((*pattern).to_owned(), rule.clone())).collect()
}

/// Others make and check signatures from these bytes: they never change.
#[test]
fn what_is_signed_is_what_the_documentation_says() {
    let image = Digest([0xab; 32]);
    let expected = format!(
        "cofolio image signature 1\nimage fsverity-sha256-4k:{}\nconfig sha256:{}\n",
        "ab".repeat(32),
        "f23a70654c0f9e2f80a7f0be8c78f6a7b8e9c3f8a3d1c5d8d1a3a2f1e0d9c8b7"
    );
    let config = "sha256:f23a70654c0f9e2f80a7f0be8c78f6a7b8e9c3f8a3d1c5d8d1a3a2f1e0d9c8b7";
    assert_eq!(message(&image, Some(config)), expected.as_bytes());
    assert!(message(&image, None).ends_with(b"\nconfig none\n"));
    // `printf '{"os":"linux"}' | sha256sum`
    assert_eq!(
        config_digest(Some(CONFIG)).unwrap(),
        "sha256:5809269daf2d55e988b09feecc13180c284754e4d2376d0f7297ab7c6a90b358"
    );
}

#[test]
fn a_signature_is_of_one_image_with_one_config_by_one_key() {
    let fixture = Fixture::new();
    let (key, public) = fixture.key("a");
    let (_, other) = fixture.key("b");
    let (one, two) = (fixture.image("one:1", b"one"), fixture.image("two:1", b"two"));
    let (keys, others) = (PublicKey::read(&public).unwrap(), PublicKey::read(&other).unwrap());
    let record = Record::sign(&one, Some(CONFIG), &key);
    let by = |image, need, keys| record.signer(image, need, keys, &[]).is_some();
    assert!(by(&one, Need::Run(Some(CONFIG)), &keys));
    assert!(by(&one, Need::Files, &keys));
    assert!(!by(&one, Need::Run(Some("{}")), &keys) && !by(&one, Need::Run(None), &keys));
    assert!(!by(&two, Need::Files, &keys) && !by(&one, Need::Files, &others));
    // A key for cosign's claims is none for images.
    assert!(record.signer(&one, Need::Files, &[], &keys).is_none());

    // Put beside another image it is still not one of that image.
    record.keep(&fixture.domain, &two).unwrap();
    let policy = Policy::new(&signed(&[&public]), &BTreeMap::new()).unwrap();
    let refused = fixture.check(&policy, Some("two:1"), two).unwrap_err();
    let said = refused.to_string();
    assert!(matches!(refused, TrustError::Unsigned { .. }), "{said}");
    for part in ["two:1", &two.to_string(), public.to_str().unwrap(), "what it has is by key"] {
        assert!(said.contains(part), "{said}");
    }
    record.keep(&fixture.domain, &one).unwrap();
    fixture.check(&policy, Some("one:1"), one).unwrap();
    // The config is somebody's who has not signed: nobody is told to run it, but the files are
    // fine.
    let run = Subject { name: Some("one:1"), image: one, need: Need::Run(Some("{}")) };
    let said = policy.check(&fixture.domain, &run).unwrap_err().to_string();
    assert!(said.contains("another config"), "{said}");
    policy.check(&fixture.domain, &Subject { need: Need::Files, ..run }).unwrap();
}

#[test]
fn signatures_made_elsewhere_are_checked_before_they_are_kept() {
    let fixture = Fixture::new();
    let (key, public) = fixture.key("a");
    let keys = PublicKey::read(&public).unwrap();
    let image = Digest([7; 32]);
    let signature = Record::sign(&image, Some(CONFIG), &key).signature().to_vec();
    Record::of_signature(&image, Some(CONFIG), &signature, &keys).unwrap();
    let mut altered = signature.clone();
    altered[40] ^= 1;
    for (what, image, config, signature) in [
        ("another image", Digest([8; 32]), Some(CONFIG), &signature[..]),
        ("another config", image, None, &signature),
        ("altered", image, Some(CONFIG), &altered),
        ("short", image, Some(CONFIG), &signature[..63]),
        ("empty", image, Some(CONFIG), b""),
    ] {
        let refused = Record::of_signature(&image, config, signature, &keys);
        assert!(matches!(refused, Err(TrustError::Signature { .. })), "{what}: {refused:?}");
    }
}

#[test]
fn key_files_that_hold_no_key_for_this_say_so() {
    let fixture = Fixture::new();
    let (_, public) = fixture.key("a");
    let text = fs::read_to_string(&public).unwrap();
    let p256 = [hex("3059301306072a8648ce3d020106082a8648ce3d030107034200"), vec![2; 65]].concat();
    let private = fs::read(fixture.dir.path().join("a.key")).unwrap();
    for (what, text, expected) in [
        ("empty", Vec::new(), "no `PUBLIC KEY`"),
        ("noise", vec![0xff; 100], "no `PUBLIC KEY`"),
        ("private", private, "a private key"),
        ("cut", text.as_bytes()[..60].to_vec(), "PEM"),
        ("der", pem("PUBLIC KEY", &[1, 2, 3]).into_bytes(), "neither ed25519"),
        ("compressed point", pem("PUBLIC KEY", &p256).into_bytes(), "neither ed25519"),
        ("large", vec![b'x'; 100_000], "more than"),
    ] {
        let file = fixture.file("wrong", text);
        let error = PublicKey::read(&file).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("wrong"), "{what}: {error}");
    }
    let missing = PublicKey::read(Path::new("/does/not/exist")).unwrap_err().to_string();
    assert!(missing.contains("No such file"), "{missing}");
    let both = fixture.file("both", format!("{text}{text}"));
    assert_eq!(PublicKey::read(&both).unwrap().len(), 2, "one file may hold several");
    let wrong =
        |text: &str| SigningKey::read(&fixture.file("wrong", text)).unwrap_err().to_string();
    assert!(wrong(&text).contains("no `PRIVATE KEY`"));
    let encrypted = wrong(&pem("ENCRYPTED PRIVATE KEY", &[0; 40]));
    assert!(encrypted.contains("encrypted"), "{encrypted}");
    assert!(wrong(&pem("PRIVATE KEY", &[0; 40])).contains("not an ed25519 key"));
}

/// Nothing of a private key is in what is said of it.
#[test]
fn a_private_key_is_never_shown() {
    let fixture = Fixture::new();
    let (key, _) = fixture.key("a");
    let text = fs::read_to_string(fixture.dir.path().join("a.key")).unwrap();
    let secret = text.lines().nth(1).unwrap();
    let shown = format!("{key:?}");
    assert!(shown.contains("a.key") && !shown.contains(&secret[..20]), "{shown}");
    let der = BASE64_STANDARD.decode(secret).unwrap();
    // The 32 bytes of the seed, as a list of numbers.
    assert!(!shown.contains(&format!("{}, {}", der[16], der[17])), "{shown}");
}

#[test]
fn rules_that_make_no_sense_let_nothing_through() {
    let fixture = Fixture::new();
    let (_, public) = fixture.key("a");
    let p256 = [hex("3059301306072a8648ce3d020106082a8648ce3d030107034200"), vec![4; 65]].concat();
    let p256 = fixture.file("p256", pem("PUBLIC KEY", &p256));
    let missing = fixture.dir.path().join("missing");
    let with_keys = |require| Rule { require, ..signed(&[&public]) };
    let wrong = [
        ("x", signed(&[]), "`signed` without a key"),
        ("x", with_keys(Require::Accept), "would not be asked for"),
        ("x", with_keys(Require::Reject), "would not be asked for"),
        ("x", signed(&[&p256]), "not ed25519"),
        ("x", signed(&[&public, &missing]), "missing"),
        ("a*b", only(Require::Reject), "last character"),
        ("*", only(Require::Reject), "`[trust]` itself"),
        ("", only(Require::Reject), "`[trust]` itself"),
    ];
    for (pattern, rule, expected) in wrong {
        // In any place: a rule for other images counts too.
        let error = Policy::new(&Rule::default(), &rules(&[(pattern, rule.clone())])).unwrap_err();
        assert!(error.to_string().contains(expected), "{pattern}: {error}");
        if pattern == "x" {
            assert!(Policy::new(&rule, &BTreeMap::new()).is_err(), "{expected}");
        }
    }
}

#[test]
fn the_longest_pattern_counts_and_a_whole_name_before_it() {
    let fixture = Fixture::new();
    let (key, public) = fixture.key("a");
    let image = fixture.image("host/team/app:1", b"one");
    let policy = Policy::new(
        &only(Require::Reject),
        &rules(&[
            ("host/*", only(Require::Accept)),
            ("host/team/*", signed(&[&public])),
            ("host/team/free:1", only(Require::Accept)),
            ("host/te*", only(Require::Reject)),
        ]),
    );
    let policy = policy.unwrap();
    let said = |name| fixture.check(&policy, Some(name), image).map_err(|e| e.to_string());
    assert_eq!(said("host/x:1"), Ok(false));
    assert_eq!(said("host/team/free:1"), Ok(false));
    assert!(said("host/team/app:1").unwrap_err().contains("not signed"));
    assert!(said("host/team/free:12").unwrap_err().contains("rule for \"host/team/*\""));
    assert!(said("host/tea:1").unwrap_err().contains("rule for \"host/te*\""));
    assert!(said("other:1").unwrap_err().contains("the default rule"));
    fixture.sign(&image, &key);
    assert_eq!(said("host/team/app:1"), Ok(true), "somebody had to vouch for it");
}

/// A torn record made the policy refuse every image that was asked for by digest. It may be a name
/// of the image, so its rule is asked as well; what that rule lets through, and what is asked for
/// by another name, it does not touch.
#[test]
fn a_torn_ref_counts_as_a_name_of_any_image() {
    let fixture = Fixture::new();
    let (key, public) = fixture.key("a");
    let image = fixture.image("good:1", b"one");
    let record = fixture.domain.get_ref("good:1").unwrap().unwrap();
    let tear = |name: &str| {
        let before = refs_of(&fixture);
        fixture.domain.put_ref(name, &record).unwrap();
        let file = refs_of(&fixture).into_iter().find(|file| !before.contains(file)).unwrap();
        fs::write(&file, "{").unwrap();
        file
    };
    let strict = rules(&[("good:1", only(Require::Accept)), ("host/*", signed(&[&public]))]);
    let policy = Policy::new(&only(Require::Reject), &strict).unwrap();
    let open = Policy::new(&Rule::default(), &strict).unwrap();

    // Its rule would refuse: named, with the file that is damaged.
    let torn = tear("host/app:1");
    let error = fixture.check(&policy, None, image).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    let said = error.to_string();
    assert!(said.contains("`host/app:1`") && said.contains("rule for \"host/*\""), "{said}");
    assert!(source.contains("host%2Fapp%3A1.json"), "{source}");
    assert_eq!(fixture.check(&policy, Some("good:1"), image).ok(), Some(false));
    // The same rule, satisfied: somebody had to vouch for it.
    fixture.sign(&image, &key);
    assert_eq!(fixture.check(&policy, None, image).ok(), Some(true));
    fs::remove_file(torn).unwrap();

    // A free name is in nobody's way, but it is no name of an image that has none.
    let torn = tear("free:1");
    assert_eq!(fixture.check(&open, None, image).ok(), Some(false));
    fixture.domain.remove_ref("good:1").unwrap();
    let lenient = rules(&[("free:1", only(Require::Accept))]);
    let lenient = Policy::new(&only(Require::Reject), &lenient).unwrap();
    let refused = fixture.check(&lenient, None, image).unwrap_err();
    assert!(matches!(refused, TrustError::Rejected { .. }), "{refused}");
    fixture.domain.put_ref("good:1", &record).unwrap();
    fs::remove_file(torn).unwrap();

    // Nobody knows the name: it may be one that any rule is for.
    let torn = tear(&format!("host/{}", "long".repeat(80)));
    assert_eq!(fixture.check(&open, None, image).ok(), Some(true), "it is signed");
    let other = fixture.image("good:2", b"two");
    let refused = fixture.check(&open, None, other).unwrap_err();
    assert!(matches!(refused, TrustError::UnknownName { .. }), "{refused}");
    assert!(refused.to_string().contains("a ref with a long name"), "{refused}");
    fs::remove_file(torn).unwrap();
    fixture.check(&open, None, other).unwrap();
}

fn refs_of(fixture: &Fixture) -> Vec<PathBuf> {
    let directory = fixture.dir.path().join("store/domains/default/refs");
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// An image is asked for by digest, so that the rule for its name would not be asked: it is.
#[test]
fn leaving_the_name_out_opens_nothing() {
    let fixture = Fixture::new();
    let (key, public) = fixture.key("a");
    let image = fixture.image("host/app:1", b"one");
    let strict = rules(&[("host/*", signed(&[&public]))]);
    let policy = Policy::new(&Rule::default(), &strict).unwrap();
    assert!(matches!(fixture.check(&policy, None, image), Err(TrustError::Unsigned { .. })));
    // Another name that is free does not help, nor does a rule for another one.
    let record = fixture.domain.get_ref("host/app:1").unwrap().unwrap();
    fixture.domain.put_ref("free:1", &record).unwrap();
    assert!(matches!(fixture.check(&policy, None, image), Err(TrustError::Unsigned { .. })));
    fixture.sign(&image, &key);
    fixture.check(&policy, None, image).unwrap();
    // Without any name it is the default that counts.
    let nameless = fixture.image("gone:1", b"two");
    fixture.domain.remove_ref("gone:1").unwrap();
    fixture.check(&policy, None, nameless).unwrap();
    let policy = Policy::new(&only(Require::Reject), &strict).unwrap();
    let said = fixture.check(&policy, None, nameless).unwrap_err().to_string();
    assert!(said.contains("rejected") && said.contains(&nameless.to_string()), "{said}");
}

/// What is asked on the command line is asked as well, never instead.
#[test]
fn a_demand_beside_the_rules_never_replaces_one() {
    let fixture = Fixture::new();
    let ((key, public), (other, others)) = (fixture.key("a"), fixture.key("b"));
    let image = fixture.image("one:1", b"one");
    let demanded = |rule: &Rule| {
        let mut policy = Policy::new(rule, &BTreeMap::new()).unwrap();
        policy.demand(std::slice::from_ref(&public), &[], "--trust").unwrap();
        fixture.check(&policy, Some("one:1"), image)
    };
    assert!(demanded(&Rule::default()).unwrap_err().to_string().contains("--trust"));
    fixture.sign(&image, &key);
    demanded(&Rule::default()).unwrap();
    assert!(matches!(demanded(&only(Require::Reject)), Err(TrustError::Rejected { .. })));
    assert!(matches!(demanded(&signed(&[&others])), Err(TrustError::Unsigned { .. })));
    fixture.sign(&image, &other);
    demanded(&signed(&[&others])).unwrap();
}

#[test]
fn claims_of_cosign_are_of_one_digest_and_of_the_right_kind() {
    let fixture = Fixture::new();
    let ((key, public), (_, others)) = (fixture.key("a"), fixture.key("b"));
    let (keys, others) = (PublicKey::read(&public).unwrap(), PublicKey::read(&others).unwrap());
    let digest = format!("sha256:{}", "ab".repeat(32));
    let payload = |digest: &str, kind: &str| {
        format!(
            r#"{{"critical":{{"identity":{{"docker-reference":"host/app"}},"image":{{"docker-manifest-digest":"{digest}"}},"type":"{kind}"}},"optional":null}}"#
        )
    };
    const KIND: &str = "cosign container image signature";
    let claim = |payload: String| {
        let signature = key.sign(payload.as_bytes());
        Claim { payload: payload.into_bytes(), signature }
    };
    let good = claim(payload(&digest, KIND));
    assert!(good.signer(&digest, &keys).is_some());
    assert!(good.signer(&digest, &others).is_none());
    assert!(good.signer(&format!("sha256:{}", "cd".repeat(32)), &keys).is_none());
    assert!(claim(payload(&digest, "atomic container signature")).signer(&digest, &keys).is_none());
    for text in ["", "{}", "null", r#"{"critical":{}}"#, "[1"] {
        assert!(claim(text.to_owned()).signer(&digest, &keys).is_none(), "{text}");
    }
    // Two digests in one claim: whichever a reader takes, this is none.
    let twice = payload(&digest, KIND).replacen(
        r#""image":{"#,
        r#""image":{"docker-manifest-digest":"sha256:00","#,
        1,
    );
    assert!(claim(twice).signer(&digest, &keys).is_none());
    let mut altered = good.clone();
    altered.payload.push(b' ');
    assert!(altered.signer(&digest, &keys).is_none());
    // What nobody asks for was passed over without a look whether it is text: a claim with a byte
    // in it that is no UTF-8, and so no JSON, counted. Found by the fuzz target `trust`.
    let mut payload = payload(&digest, KIND).into_bytes();
    let at = payload.windows(4).position(|part| part == b"host").unwrap();
    payload[at] = 0x9d;
    let signature = key.sign(&payload);
    assert!(Claim { payload, signature }.signer(&digest, &keys).is_none());
    let parsed = crate::digest::BlobDigest::parse(&digest).unwrap();
    assert_eq!(cosign_tag(&parsed), format!("sha256-{}.sig", "ab".repeat(32)));
}
