//! Registries that lie. Whatever they send, the store stays as it was, and the error says who lied.

use std::time::Duration;

use serde_json::json;

use cofolio_image::registry::RegistryOptions;

use crate::common::{app, layer, options, pull, source};
use crate::server::{Answer, Asked, Fake};
use crate::support::{Bench, INDEX, MANIFEST, Random};

/// Pulls from a server that lies, and gives the error. The store must be as before.
fn fails(hook: impl Fn(&Asked, Answer) -> Answer + Send + Sync + 'static) -> String {
    let fake = Fake::new(hook);
    fake.tag("1", &fake.image(&[layer(1, 400_000), layer(2, 20_000)]));
    let bench = Bench::new();
    let before = bench.listing();
    // Without layers that are kept when the rest fails.
    let error = pull(&bench, &app(fake.address), options()).unwrap_err();
    assert_eq!(bench.listing(), before);
    let _ = format!("{error:?}");
    error.to_string()
}

#[test]
fn wrong_bytes_are_found_out() {
    let error = fails(|asked, mut answer| {
        if asked.is_blob() && answer.body.len() > 100_000 {
            let middle = answer.body.len() / 2;
            answer.body[middle] ^= 1;
        }
        answer
    });
    assert!(error.contains("its content has the digest"), "{error}");
    let error = fails(|asked, mut answer| {
        if asked.path.contains("/manifests/sha256:") {
            answer.body.push(b' ');
        }
        answer
    });
    assert!(error.contains("its content has the digest"), "{error}");
}

#[test]
fn wrong_sizes_are_found_out() {
    let error = fails(|asked, mut answer| {
        if asked.is_blob() {
            answer.body.push(0);
        }
        answer
    });
    assert!(error.contains("the descriptor says"), "{error}");
    // More than promised without saying so beforehand: the connection's end is the blob's.
    let error = fails(|asked, answer| match asked.path.contains("/manifests/sha256:") {
        true => Answer { body: vec![b' '; 5 << 20], ..answer },
        false => answer,
    });
    assert!(error.contains("more than 4194304"), "{error}");
    let error = fails(|asked, answer| match asked.is_blob() {
        true => Answer { length: Some(u64::MAX), ..answer },
        false => answer,
    });
    assert!(error.contains("the descriptor says"), "{error}");
}

#[test]
fn wrong_ranges_are_found_out() {
    let error = fails(|asked, mut answer| {
        match (asked.is_blob() && answer.body.len() > 100_000, answer.status) {
            (true, 200) => answer.cut = Some(90_000),
            (true, _) => {
                answer.headers.retain(|(name, _)| name != "Content-Range");
                answer.headers.push(("Content-Range".into(), "bytes 0-5/6".into()));
            }
            _ => {}
        }
        answer
    });
    assert!(error.contains("asked for bytes from") && error.contains("bytes 0-5/6"), "{error}");
}

#[test]
fn connections_that_never_get_on_are_given_up() {
    let error = fails(|asked, mut answer| {
        if asked.is_blob() && answer.body.len() > 10_000 {
            answer.cut = Some(100);
        }
        answer
    });
    assert!(error.contains("tried 6 times"), "{error}");
}

#[test]
fn redirects_end() {
    let error = fails(|asked, answer| match asked.is_blob() {
        true => Answer::new(302, "").with("Location", asked.path.clone()),
        false => answer,
    });
    assert!(error.contains("more than 8 redirects"), "{error}");
    for (location, expected) in [
        ("http://registry.example/x", "plain HTTP"),
        ("ftp://registry.example/x", "neither an https nor an http URL"),
        ("file:///etc/passwd", "neither an https nor an http URL"),
        ("http://user:secret@127.0.0.1/x", "a user in it"),
    ] {
        let error = fails(move |asked, answer| match asked.is_blob() {
            true => Answer::new(307, "").with("Location", location),
            false => answer,
        });
        assert!(error.contains(expected), "{location}: {error}");
    }
    let error = fails(|asked, answer| if asked.is_blob() { Answer::new(301, "") } else { answer });
    assert!(error.contains("a redirect to nowhere"), "{error}");
}

#[test]
fn indexes_in_indexes_end() {
    let fake = Fake::honest();
    let mut inner = fake.image(&[layer(1, 100)]);
    for _ in 0..8 {
        inner["platform"] = json!({"os": "linux", "architecture": "amd64"});
        inner = fake.index(&[inner]);
    }
    fake.tag("1", &inner);
    let bench = Bench::new();
    let options = cofolio_image::import::ImportOptions {
        platform: cofolio_image::source::Platform::parse("linux/amd64").unwrap(),
        registry: options(),
        ..Default::default()
    };
    let source = source(&app(fake.address));
    let progress = cofolio_store::task::Task::default();
    let error =
        cofolio_image::import::import(&bench.domain, &source, &options, &progress).unwrap_err();
    assert!(error.to_string().contains("indexes in indexes"), "{error}");
}

#[test]
fn odd_kinds_of_manifests_are_refused_by_name() {
    for (media_type, body, expected) in [
        (
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
            r#"{"schemaVersion":1}"#,
            "schema 1",
        ),
        ("text/plain", r#"{"schemaVersion":1,"fsLayers":[]}"#, "schema 1"),
        ("text/html", "<html>", "expected value"),
        ("application/json", r#"{"mediaType":"application/x"}"#, "neither an image"),
        (MANIFEST, "{}", "missing field"),
        (INDEX, r#"{"schemaVersion":2,"manifests":[]}"#, "no image"),
        (INDEX, r#"{"schemaVersion":2,"manifests":[{"digest":"x","size":1}]}"#, "neither an image"),
    ] {
        let fake = Fake::honest();
        let document = fake.blob(media_type, body.as_bytes());
        fake.tag("1", &document);
        let error = pull(&Bench::new(), &app(fake.address), options()).unwrap_err().to_string();
        assert!(error.contains(expected), "{media_type}: {error}");
    }
}

/// Plain HTTP to another machine is refused before anything is sent.
#[test]
fn plain_http_is_for_this_machine() {
    let fake = Fake::honest();
    fake.tag("1", &fake.image(&[layer(1, 100)]));
    pull(&Bench::new(), &format!("localhost:{}/app:1", fake.address.port()), options()).unwrap();
    // A registry that promises TLS gets no second chance on a plain connection: 192.0.2.0/24 is
    // nobody's.
    let quick =
        RegistryOptions { connect_timeout: Duration::from_millis(50), tries_max: 1, ..options() };
    let error = pull(&Bench::new(), "192.0.2.1:5000/app:1", quick).unwrap_err().to_string();
    assert!(error.contains("https://192.0.2.1:5000/"), "{error}");
}

/// Seeded nonsense in statuses, headers and bodies: an image or an error, soon, never a panic.
#[test]
fn nonsense_ends_soon() {
    let (mut images, mut errors) = (0, 0);
    for seed in 0..200 {
        let random = std::sync::Mutex::new(Random(seed));
        let fake = Fake::new(move |_, mut answer| {
            let mut random = random.lock().unwrap();
            let mut pick = |of: usize| usize::try_from(random.below(of as u64)).unwrap();
            if pick(6) == 0 {
                answer.status = [204, 206, 301, 401, 404, 416, 429, 500, 599][pick(9)];
            }
            if pick(6) == 0 && !answer.body.is_empty() {
                let at = pick(answer.body.len());
                answer.body[at] ^= 0x41;
            }
            if pick(8) == 0 {
                answer.body.truncate(answer.body.len() / 2);
            }
            if pick(8) == 0 {
                answer.cut = Some(answer.body.len() / 3);
            }
            if pick(8) == 0 {
                let nonsense =
                    ["sha256:zz", "Bearer realm=", "bytes 5-", "\u{e9}", "-1", "http://"];
                let value = nonsense[pick(nonsense.len())];
                for name in
                    ["Docker-Content-Digest", "WWW-Authenticate", "Content-Range", "Location"]
                {
                    answer.headers.push((name.into(), value.into()));
                }
            }
            answer
        });
        fake.tag("1", &fake.image(&[layer(seed, 2000)]));
        let few =
            RegistryOptions { tries_max: 3, pause_max: Duration::from_millis(2), ..options() };
        let bench = Bench::fast();
        match pull(&bench, &app(fake.address), few) {
            Ok(report) => {
                assert!(bench.view(&report).has(&format!("/dir/noise{seed}")));
                images += 1;
            }
            Err(_) => errors += 1,
        }
        // Each of them ends in a time of its own.
        assert!(fake.log().len() < 100, "seed {seed}: {} requests", fake.log().len());
    }
    assert!(images > 0 && errors > 0, "{images} {errors}");
}
