//! Who we are: Basic, tokens, helpers, and where credentials must not go.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cofolio_image::registry::RegistryOptions;
use serde_json::json;

use crate::server::{Answer, Asked, Fake};
use crate::support::Bench;
use crate::{app, layer, options, pull};

fn basic() -> String {
    format!("Basic {}", BASE64_STANDARD.encode("user:secret"))
}

/// A file with user and password for a host.
fn auth_file(bench: &Bench, key: &str) -> PathBuf {
    let path = bench.path("auth.json");
    let auths = json!({"auths": {key: {"auth": BASE64_STANDARD.encode("user:secret")}}});
    std::fs::write(&path, auths.to_string()).unwrap();
    path
}

#[test]
fn basic_credentials_are_shown_when_asked_for() {
    let fake = Fake::new(|asked, answer| match asked.header("authorization") == basic() {
        _ if asked.path == "/v2/" => answer,
        true => answer,
        false => Answer::error(401, "log in").with("WWW-Authenticate", "Basic realm=\"r\""),
    });
    fake.tag("1", &fake.image(&[layer(1, 1000)]));
    let bench = Bench::new();
    let error = pull(&bench, &app(fake.address), options()).unwrap_err().to_string();
    assert!(error.contains("denied (anonymous): log in"), "{error}");
    // For this repository only: the longest key that fits.
    let file = auth_file(&bench, &format!("{}/app", fake.address));
    let with = RegistryOptions { auth_files: vec![file], ..options() };
    pull(&bench, &app(fake.address), with).unwrap();
    // Credentials for somebody else are not shown.
    let file = auth_file(&bench, "other.example");
    let with = RegistryOptions { auth_files: vec![file], ..options() };
    let before = fake.log().len();
    pull(&Bench::new(), &app(fake.address), with).unwrap_err();
    assert!(fake.log()[before..].iter().all(|asked| asked.header("authorization").is_empty()));
}

/// A registry with a token server of its own, whose tokens are good for `uses` requests.
fn with_tokens(uses: u64, grant: impl Fn(&Asked) -> bool + Send + Sync + 'static) -> (Fake, Fake) {
    let issued = Arc::new(AtomicU64::new(0));
    let number = issued.clone();
    let tokens = Fake::new(move |asked, _| match grant(asked) {
        false => Answer::error(401, "who are you?"),
        true => {
            let token = format!("token-{}", number.fetch_add(1, Ordering::Relaxed));
            Answer::new(200, json!({"token": token, "expires_in": 60}).to_string())
        }
    });
    let realm = format!("http://{}/token", tokens.address);
    let used = AtomicU64::new(0);
    let registry = Fake::new(move |asked, answer| {
        if asked.path == "/v2/" {
            return answer;
        }
        let last = issued.load(Ordering::Relaxed).wrapping_sub(1);
        let fresh = asked.header("authorization") == format!("Bearer token-{last}");
        if fresh && used.fetch_add(1, Ordering::Relaxed) % (uses + 1) != uses {
            return answer;
        }
        let challenge = format!("Bearer realm=\"{realm}\",service=\"reg\",scope=\"x\"");
        Answer::error(401, "no token").with("WWW-Authenticate", challenge)
    });
    registry.tag("1", &registry.image(&[layer(1, 100_000), layer(2, 100_000)]));
    (registry, tokens)
}

#[test]
fn anonymous_tokens_are_fetched_and_renewed() {
    // Each token opens two doors, so it runs out in the middle; which is no reason to fail.
    let (registry, tokens) = with_tokens(2, |asked| asked.header("authorization").is_empty());
    let one_by_one = RegistryOptions { jobs: 1, ..options() };
    pull(&Bench::new(), &app(registry.address), one_by_one).unwrap();
    let log = tokens.log();
    assert!(log.len() >= 2, "{}", log.len());
    for asked in log.iter().filter(|asked| asked.path != "/v2/") {
        assert_eq!(asked.path, "/token?service=reg&scope=repository%3Aapp%3Apull");
    }
}

#[test]
fn tokens_are_asked_for_with_password_or_identity() {
    let (registry, tokens) = with_tokens(100, |asked| asked.header("authorization") == basic());
    let bench = Bench::new();
    let file = auth_file(&bench, &registry.address.to_string());
    let with = RegistryOptions { auth_files: vec![file], ..options() };
    pull(&bench, &app(registry.address), with).unwrap();
    // The password goes to the token server and nowhere else.
    assert!(registry.log().iter().all(|asked| asked.header("authorization") != basic()));
    assert!(tokens.log().iter().any(|asked| asked.path.contains("account=user")));
    let error = pull(&Bench::new(), &app(registry.address), options()).unwrap_err().to_string();
    assert!(error.contains("denied (anonymous): who are you?"), "{error}");

    let (registry, tokens) = with_tokens(100, |asked| {
        asked.method == "POST" && asked.body.ends_with(b"&refresh_token=re%2Ffresh")
    });
    let path = bench.path("identity.json");
    let auths = json!({"auths": {registry.address.to_string(): {"identitytoken": "re/fresh"}}});
    std::fs::write(&path, auths.to_string()).unwrap();
    let with = RegistryOptions { auth_files: vec![path], ..options() };
    pull(&Bench::new(), &app(registry.address), with).unwrap();
    let body = String::from_utf8(tokens.log().last().unwrap().body.clone()).unwrap();
    let expected =
        "grant_type=refresh_token&service=reg&scope=repository%3Aapp%3Apull&client_id=cofolio";
    assert!(body.starts_with(expected), "{body}");

    // A token server that sends the form elsewhere: the secret in it stays here.
    let other = Fake::honest();
    let there = format!("http://{}/token", other.address);
    let tokens = Fake::new(move |_, _| Answer::new(307, "").with("Location", there.as_str()));
    let realm = format!("http://{}/token", tokens.address);
    let registry = Fake::new(move |asked, answer| match asked.path == "/v2/" {
        true => answer,
        false => Answer::error(401, "no token")
            .with("WWW-Authenticate", format!("Bearer realm=\"{realm}\",service=\"reg\"")),
    });
    let path = bench.path("other.json");
    let auths = json!({"auths": {registry.address.to_string(): {"identitytoken": "re/fresh"}}});
    std::fs::write(&path, auths.to_string()).unwrap();
    let with = RegistryOptions { auth_files: vec![path], ..options() };
    let error = pull(&Bench::new(), &app(registry.address), with).unwrap_err().to_string();
    assert!(error.contains("refused (status 307)"), "{error}");
    assert!(tokens.log().iter().any(|asked| asked.body.ends_with(b"re%2Ffresh")));
    assert_eq!(other.log().len(), 0);
}

/// A registry's blobs often lie elsewhere, behind a signed URL: nothing of ours goes there, and
/// when the signature runs out the registry is asked again.
#[test]
fn credentials_do_not_follow_redirects() {
    let bench = Bench::new();
    let late = AtomicU64::new(0);
    let elsewhere = Arc::new(Fake::new(move |asked, answer| {
        match late.fetch_add(1, Ordering::Relaxed) == 0 && asked.path != "/v2/" {
            true => Answer::new(403, "<Error>expired</Error>"),
            false => answer,
        }
    }));
    let there = elsewhere.address;
    let fake = Fake::new(move |asked, answer| match asked.header("authorization") == basic() {
        _ if asked.path == "/v2/" => answer,
        true if asked.is_blob() => {
            let to = format!("http://{there}{}?signature=topsecret", asked.path);
            Answer::new(307, "").with("Location", to)
        }
        true => answer,
        false => Answer::error(401, "log in").with("WWW-Authenticate", "Basic realm=\"r\""),
    });
    let layers = [layer(1, 1000)];
    fake.tag("1", &fake.image(&layers));
    elsewhere.image(&layers);
    let file = auth_file(&bench, &fake.address.to_string());
    let with = RegistryOptions { auth_files: vec![file], ..options() };
    pull(&bench, &app(fake.address), with).unwrap();
    assert!(elsewhere.log().len() >= 3);
    assert!(elsewhere.log().iter().all(|asked| asked.header("authorization").is_empty()));
}

#[test]
fn errors_never_show_what_is_secret() {
    let bench = Bench::new();
    let fake = Fake::new(|asked, answer| match asked.path.as_str() {
        "/v2/" => answer,
        path if path.starts_with("/token") => Answer::new(200, r#"{"token": "sec"#),
        _ => Answer::error(401, "no").with("WWW-Authenticate", "Bearer realm=\"/token?x=secret\""),
    });
    let file = auth_file(&bench, &fake.address.to_string());
    let with = RegistryOptions { auth_files: vec![file], ..options() };
    let error = pull(&bench, &app(fake.address), with).unwrap_err();
    let shown = format!("{error} {error:?}");
    assert!(shown.contains("not JSON"), "{shown}");
    for secret in ["secret", &basic()[6..], "sec\""] {
        assert!(!shown.contains(secret), "{shown}");
    }
}
