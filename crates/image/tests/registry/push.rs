//! What is sent to a registry, and what is not.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cofolio_image::export::{Compression, ExportError, How, PushOptions, PushReport};
use cofolio_image::registry::RegistryOptions;
use cofolio_image::source::Source;
use cofolio_store::RootKind;
use cofolio_store::task::{Cancel, Event, Task};
use serde_json::Value;

use crate::server::{Answer, Asked, Cutter, Fake};
use crate::support::{Bench, Layout, Random, sha256};
use crate::{app, layer, options, pull, push, push_with};

/// A store with the image `image` of these layers, as from a layout.
fn with_image(layers: &[crate::support::Blob]) -> Bench {
    let bench = Bench::new();
    let layout = Layout::image(bench.path("image"), layers);
    bench.import(&layout.source()).unwrap();
    bench
}

fn how(report: &PushReport) -> Vec<How> {
    report.layers.iter().map(|layer| layer.how).collect()
}

/// What was sent: everything that is neither GET nor HEAD.
fn sent(fake: &Fake) -> Vec<String> {
    let asked = fake.asked().into_iter();
    asked.filter(|asked| !asked.starts_with("GET") && !asked.starts_with("HEAD")).collect()
}

#[test]
fn an_image_goes_back_as_it_came() {
    let fake = Fake::honest();
    let manifest = fake.image(&[layer(1, 100_000), layer(2, 6_000_000)]);
    fake.tag("1", &manifest);
    let bench = Bench::new();
    let name = app(fake.address);
    pull(&bench, &name, options()).unwrap();
    let to = format!("{}/app:2", fake.address);
    let report = push(&bench, &name, &to, options()).unwrap();
    // The registry has the blobs: their name for the manifest is all that it gets.
    assert_eq!(sent(&fake), ["PUT manifests/2"]);
    assert_eq!(report.manifest.to_string(), manifest["digest"].as_str().unwrap());
    assert!(report.original && !report.known);
    assert_eq!(how(&report), [How::There, How::There]);
    let again = push(&bench, &name, &to, options()).unwrap();
    assert!(again.known);
    assert_eq!(sent(&fake).len(), 1);
    assert!(pull(&bench, &to, options()).unwrap().known);
    assert_eq!(bench.domain.roots(RootKind::Lease).unwrap(), []);
}

/// A registry that has none of it gets blobs that are made anew, and the same image from them: the
/// same config, diff-ids and metadata image. The second time it gets nothing.
#[test]
fn what_is_not_there_is_sent_once() {
    // Larger and smaller than what is sent in one piece, and one twice.
    let layers = [layer(1, 100_000), layer(2, 6_000_000), layer(1, 100_000), layer(3, 10)];
    for compression in [Compression::Gzip, Compression::Zstd, Compression::None] {
        let bench = with_image(&layers);
        let fake = Fake::honest();
        let options = PushOptions { compression, registry: options(), ..PushOptions::default() };
        let report =
            push_with(&bench, "image", &app(fake.address), &options, &Task::default()).unwrap();
        assert_eq!(how(&report), [How::Sent; 4]);
        assert!(!report.original);
        for (layer, blob) in report.layers.iter().zip(&layers) {
            assert_eq!(layer.diff_id.to_string(), blob.diff_id);
        }
        // Three layers and the config, of which one layer in parts.
        let sent_first = sent(&fake);
        let count = |what: &str| sent_first.iter().filter(|sent| sent.starts_with(what)).count();
        assert_eq!((count("POST"), count("PATCH"), count("PUT")), (4, 1, 5), "{sent_first:?}");

        let other = Bench::new();
        let pulled = pull(&other, &app(fake.address), crate::options()).unwrap();
        assert_eq!(pulled.image, report.image);
        assert_eq!(pulled.manifest, Some(report.manifest.clone()));
        let config = |bench: &Bench| bench.domain.refs().unwrap().remove(0).1.config;
        assert_eq!(config(&bench), config(&other));

        let again =
            push_with(&bench, "image", &app(fake.address), &options, &Task::default()).unwrap();
        assert_eq!((&again.manifest, again.known), (&report.manifest, true));
        assert_eq!(how(&again), [How::There; 4]);
        assert_eq!(sent(&fake), sent_first);
        // Another compression does not make another blob of what is there.
        let zstd = PushOptions { compression: Compression::Zstd, ..options };
        push_with(&bench, "image", &app(fake.address), &zstd, &Task::default()).unwrap();
        assert_eq!(sent(&fake), sent_first);
    }
}

/// One layer of two is there as it came: it is named, the other one is sent, and the manifest is a
/// new one.
#[test]
fn blobs_that_are_there_stay_what_they_are() {
    let layers = [layer(1, 100_000), layer(2, 50_000)];
    let bench = with_image(&layers);
    let fake = Fake::honest();
    fake.blob("", &layers[0].bytes);
    let report = push(&bench, "image", &app(fake.address), options()).unwrap();
    assert_eq!(how(&report), [How::There, How::Sent]);
    assert_eq!(report.layers[0].digest.to_string(), sha256(&layers[0].bytes));
    assert_ne!(report.layers[1].digest.to_string(), sha256(&layers[1].bytes));
    let image = pull(&Bench::new(), &app(fake.address), options()).unwrap().image;
    assert_eq!(image, report.image);
}

/// A directory has no layers and no config; nobody but a push before knows what its archive is.
#[test]
fn a_directory_is_pushed_as_one_layer() {
    let bench = Bench::new();
    let tree = bench.path("tree");
    std::fs::create_dir(&tree).unwrap();
    std::fs::write(tree.join("noise"), crate::noise(1, 6_000_000)).unwrap();
    bench.import(&Source::Directory { path: tree }).unwrap();
    let fake = Fake::honest();
    let report = push(&bench, "tree", &app(fake.address), options()).unwrap();
    let sent_first = sent(&fake);
    let again = push(&bench, "tree", &app(fake.address), options()).unwrap();
    assert_eq!((sent(&fake), again.manifest), (sent_first, report.manifest));
    let image = pull(&Bench::new(), &app(fake.address), options()).unwrap().image;
    assert_eq!(image, report.image);
}

/// Where a connection was cut, the registry is asked how much it has, and gets the rest. Six
/// megabytes in pieces of one.
#[test]
fn an_upload_goes_on_where_the_connection_was_cut() {
    let bench = with_image(&[layer(1, 6_000_000)]);
    let fake = Fake::honest();
    let cutter = Cutter::of_uploads(fake.address, 1_000_000, 5);
    let remarks = Arc::new(Mutex::new(Vec::new()));
    let heard = remarks.clone();
    let task = Task::new(Cancel::default(), move |event| {
        if let Event::Remark(text) = event {
            heard.lock().unwrap().push(text.to_owned());
        }
    });
    let registry = RegistryOptions { tries_max: 3, ..options() };
    let options = PushOptions { registry, threads: 2, ..PushOptions::default() };
    let to = app(cutter.address);
    let report = push_with(&bench, "image", &to, &options, &task).unwrap();
    let log = fake.log();
    let parts: Vec<&Asked> = log.iter().filter(|asked| asked.method == "PATCH").collect();
    assert!(parts.len() >= 6, "{}", parts.len());
    let together: usize = parts.iter().map(|part| part.body.len()).sum();
    // Nothing was sent twice.
    assert_eq!(together as u64, report.layers[0].size);
    assert_eq!(
        pull(&Bench::new(), &app(fake.address), crate::options()).unwrap().image,
        report.image
    );
    // And it was said.
    let remarks = remarks.lock().unwrap();
    assert!(remarks.len() >= 5, "{remarks:?}");
    let host = cutter.address.to_string();
    assert!(remarks[0].contains(&host) && remarks[0].contains("try 2 of 3 in "), "{remarks:?}");
}

/// A registry that keeps nothing of what broke off gets it from the beginning; one that never gets
/// it all is given up.
#[test]
fn an_upload_begins_again_where_it_must() {
    let bench = with_image(&[layer(1, 6_000_000)]);
    let forgets = || {
        Fake::new(|asked, answer| match asked.method == "GET" && asked.path.contains("/uploads/") {
            true => Answer::error(404, "blob upload invalid"),
            false => answer,
        })
    };
    let fake = forgets();
    let cutter = Cutter::of_uploads(fake.address, 3_000_000, 2);
    push(&bench, "image", &app(cutter.address), options()).unwrap();
    pull(&Bench::new(), &app(fake.address), options()).unwrap();

    let bench = with_image(&[layer(2, 6_000_000)]);
    let fake = forgets();
    let cutter = Cutter::of_uploads(fake.address, 3_000_000, 100);
    let error = push(&bench, "image", &app(cutter.address), options()).unwrap_err().to_string();
    assert!(error.contains("tried 6 times"), "{error}");
    assert!(sent(&fake).iter().all(|sent| !sent.contains("manifests")));
}

/// The registry took it, and the answer got lost.
#[test]
fn answers_that_get_lost_are_not_missed() {
    let bench = with_image(&[layer(1, 6_000_000), layer(2, 1000)]);
    let count = AtomicU64::new(0);
    let fake = Fake::new(move |asked, mut answer| {
        let is_end = asked.method == "PUT" && asked.path.contains("/uploads/");
        if is_end && count.fetch_add(1, Ordering::Relaxed) < 3 {
            (answer.body, answer.cut) = (vec![b' '; 100], Some(10));
            answer.status = 502;
        }
        answer
    });
    let report = push(&bench, "image", &app(fake.address), options()).unwrap();
    let image = pull(&Bench::new(), &app(fake.address), options()).unwrap().image;
    assert_eq!(image, report.image);
    // Nothing was sent again.
    assert_eq!(sent(&fake).iter().filter(|sent| sent.starts_with("PATCH")).count(), 1);
}

fn refused(hook: impl Fn(&Asked, Answer) -> Answer + Send + Sync + 'static) -> (String, Fake) {
    let bench = with_image(&[layer(1, 6_000_000), layer(2, 1000)]);
    let fake = Fake::new(hook);
    let error = push(&bench, "image", &app(fake.address), options()).unwrap_err();
    assert!(
        !sent(&fake).iter().any(|sent| sent == "PUT manifests/1")
            || error.to_string().contains("manifests/1")
    );
    assert_eq!(bench.domain.roots(RootKind::Lease).unwrap(), []);
    (error.to_string(), fake)
}

#[test]
fn a_registry_that_refuses_is_quoted() {
    let sends = |asked: &Asked| !["GET", "HEAD"].contains(&asked.method.as_str());
    let (error, _) = refused(move |asked, answer| match sends(asked) {
        true => Answer::error(403, "no push for you"),
        false => answer,
    });
    assert!(error.contains("denied (anonymous): no push for you"), "{error}");
    let (error, fake) = refused(|asked, answer| match asked.method.as_str() {
        "PATCH" => Answer::new(413, "<html>"),
        _ => answer,
    });
    assert!(error.contains("refused (status 413)"), "{error}");
    // Once, and the registry may forget what it has.
    let asked = sent(&fake);
    let count = |what: &str| asked.iter().filter(|asked| asked.starts_with(what)).count();
    assert_eq!((count("PATCH"), count("DELETE")), (1, 1), "{asked:?}");
    let (error, _) = refused(|asked, answer| match asked.method == "PUT" {
        true => Answer::error(400, "provided digest did not match uploaded content"),
        false => answer,
    });
    assert!(error.contains("refused (status 400): provided digest did not match"), "{error}");
    let (error, _) = refused(|asked, answer| match asked.method == "POST" {
        true => Answer::error(405, "the registry is read-only"),
        false => answer,
    });
    assert!(error.contains("refused (status 405): the registry is read-only"), "{error}");
    let (error, _) = refused(|asked, answer| match asked.method == "POST" {
        true => Answer::error(404, "no such project"),
        false => answer,
    });
    assert!(error.contains("not there: no such project"), "{error}");
    let (error, _) = refused(|asked, answer| match asked.path.contains("manifests/") {
        true if asked.method == "PUT" => Answer::error(400, "manifest invalid"),
        _ => answer,
    });
    assert!(error.contains("manifests/1: refused (status 400): manifest invalid"), "{error}");
    let (error, _) = refused(|asked, answer| match asked.method == "POST" {
        true => Answer::error(503, "later"),
        false => answer,
    });
    assert!(error.contains("status 503: later (tried 6 times)"), "{error}");
}

/// A registry that has moved, or takes uploads elsewhere, says so with 307 or 308, and pushes to it
/// failed. docker and podman follow with what they can send again: requests without a body, and
/// manifests. Not with a blob that is on its way, and nobody else hears who we are.
#[test]
fn redirects_are_followed_with_what_can_be_sent_again() {
    let elsewhere = Fake::honest();
    let there = elsewhere.address;
    let fake = Fake::new(move |asked, answer| {
        let secret = asked.header("authorization") == "Basic dXNlcjpzZWNyZXQ=";
        let to = format!("http://{there}{}", asked.path);
        match asked.method.as_str() {
            _ if asked.path == "/v2/" => answer,
            _ if !secret => {
                Answer::error(401, "log in").with("WWW-Authenticate", "Basic realm=\"r\"")
            }
            "POST" => Answer::new(307, "").with("Location", to),
            "PUT" => Answer::new(308, "").with("Location", to),
            _ => answer,
        }
    });
    let bench = with_image(&[layer(1, 6_000_000), layer(2, 1000)]);
    let file = bench.path("auth.json");
    let auths = serde_json::json!({fake.address.to_string(): {"auth": "dXNlcjpzZWNyZXQ="}});
    std::fs::write(&file, serde_json::json!({"auths": auths}).to_string()).unwrap();
    let with = RegistryOptions { auth_files: vec![file], ..options() };
    let report = push(&bench, "image", &app(fake.address), with).unwrap();
    assert_eq!(how(&report), [How::Sent; 2]);
    assert_eq!(sent(&elsewhere).last().unwrap(), "PUT manifests/1");
    let log = elsewhere.log();
    assert!(log.iter().all(|asked| asked.header("authorization").is_empty()));
    let manifest = log.iter().find(|asked| asked.path.ends_with("manifests/1")).unwrap();
    assert_eq!(sha256(&manifest.body), report.manifest.to_string());
    let image = pull(&Bench::new(), &app(there), options()).unwrap().image;
    assert_eq!(image, report.image);

    // Within one server.
    let moved = AtomicBool::new(false);
    let fake = Fake::new(move |asked, answer| match asked.method == "POST" {
        true if !moved.swap(true, Ordering::Relaxed) => {
            Answer::new(307, "").with("Location", "/v2/app/blobs/uploads/")
        }
        _ => answer,
    });
    push(&with_image(&[layer(1, 10)]), "image", &app(fake.address), options()).unwrap();

    let (error, fake) = refused(|asked, answer| match asked.method.as_str() {
        "PATCH" => Answer::new(307, "").with("Location", "/v2/app/blobs/uploads/0"),
        _ => answer,
    });
    assert!(error.contains("refused (status 307): a redirect that cannot be"), "{error}");
    assert_eq!(sent(&fake).iter().filter(|sent| sent.starts_with("PATCH")).count(), 1);
    // What would turn a request into another one.
    let (error, _) = refused(|asked, answer| match asked.method.as_str() {
        "POST" => Answer::new(302, "").with("Location", "/v2/app/blobs/uploads/"),
        _ => answer,
    });
    assert!(error.contains("refused (status 302)"), "{error}");
    let (error, _) = refused(|asked, answer| match asked.method.as_str() {
        "POST" => Answer::new(308, "").with("Location", asked.path.as_str()),
        _ => answer,
    });
    assert!(error.contains("more than 8 redirects"), "{error}");
}

#[test]
fn a_registry_must_have_got_what_was_sent() {
    let other = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    for what in ["manifests/", "/uploads/"] {
        let (error, _) = refused(move |asked, mut answer| {
            if asked.method == "PUT" && asked.path.contains(what) {
                answer.headers.clear();
                answer = answer.with("Docker-Content-Digest", other);
            }
            answer
        });
        assert!(error.contains(&format!("the registry has {other}")), "{error}");
    }
    // One that does not say when it takes a manifest is asked.
    let (error, _) = refused(move |asked, mut answer| {
        answer.headers.retain(|(name, _)| name != "Docker-Content-Digest");
        match asked.method == "HEAD" && asked.path.contains("manifests/") {
            true => answer.with("Docker-Content-Digest", other),
            false => answer,
        }
    });
    assert!(error.contains(&format!("the registry has {other}")), "{error}");
}

#[test]
fn a_push_is_to_a_tag() {
    let bench = with_image(&[layer(1, 100)]);
    let digest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let to = format!("127.0.0.1:1/app@{digest}");
    let error = push(&bench, "image", &to, options()).unwrap_err();
    assert!(matches!(error, ExportError::Destination { .. }), "{error}");
}

/// Content that was altered behind our back does not get out, and the tag stays as it was.
#[test]
fn altered_content_is_not_pushed() {
    use std::os::unix::fs::PermissionsExt as _;
    let bench = with_image(&[layer(1, 6_000_000)]);
    let digest = cofolio_store::verity::digest(b"small");
    let path = bench.domain.object_path(&digest).unwrap();
    let _ = std::process::Command::new("chattr").arg("-i").arg(&path).output();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    std::fs::write(&path, b"smAll").unwrap();
    let fake = Fake::honest();
    let error = push(&bench, "image", &app(fake.address), options()).unwrap_err();
    assert!(matches!(error, ExportError::Object { .. }), "{error}");
    assert!(!sent(&fake).iter().any(|sent| sent.starts_with("PUT")), "{:?}", sent(&fake));
}

#[test]
fn a_push_ends_when_it_is_told_to() {
    let bench = with_image(&[layer(1, 6_000_000)]);
    let task = Task::default();
    let cancel = task.cancel.clone();
    let fake = Fake::new(move |asked, answer| match asked.method == "PATCH" {
        true => {
            cancel.cancel();
            Answer::error(503, "later")
        }
        false => answer,
    });
    let options = PushOptions { registry: options(), ..PushOptions::default() };
    let error = push_with(&bench, "image", &app(fake.address), &options, &task).unwrap_err();
    assert!(matches!(error, ExportError::Cancelled(_)), "{error}");
}

/// A limited push, which would take hours, is not done after three unlimited ones of the same
/// image.
#[test]
fn the_rate_is_limited() {
    let bench = with_image(&[layer(1, 1_000_000)]);
    let (send, begun) = std::sync::mpsc::channel();
    let slow = Fake::new(move |asked, answer| {
        if asked.method == "POST" {
            send.send(()).unwrap();
        }
        answer
    });
    let task = Task::default();
    let registry = RegistryOptions { rate_max: 100, ..options() };
    let limited = PushOptions { registry, ..PushOptions::default() };
    let to = app(slow.address);
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| push_with(&bench, "image", &to, &limited, &task));
        begun.recv().unwrap();
        for _ in 0..3 {
            let fast = Fake::honest();
            push(&bench, "image", &app(fast.address), options()).unwrap();
        }
        task.cancel.cancel();
        let error = pushed.join().unwrap().unwrap_err();
        assert!(matches!(error, ExportError::Cancelled(_)), "{error}");
    });
}

#[test]
fn overload_is_waited_for() {
    let bench = with_image(&[layer(1, 500_000), layer(2, 500_000)]);
    // Each request twice: were it two of any three, one that others overtake could be refused for
    // ever.
    let counts = Mutex::new(HashMap::new());
    let fake = Fake::new(move |asked, answer| {
        let mut counts = counts.lock().unwrap();
        let count = counts.entry((asked.method.clone(), asked.path.clone())).or_insert(0);
        *count += 1;
        match asked.path != "/v2/" && *count % 3 != 0 {
            true => {
                Answer::error(429, "later").with("Retry-After", "Fri, 31 Dec 1999 23:59:59 GMT")
            }
            false => answer,
        }
    });
    push(&bench, "image", &app(fake.address), options()).unwrap();
}

/// Seeded nonsense in answers: it ends soon, never in a panic; and if it is said to be done, the
/// image can be pulled from a registry that comes to its senses.
#[test]
fn nonsense_ends_soon() {
    let (mut pushed, mut errors) = (0, 0);
    let bench = with_image(&[layer(1, 2000), layer(2, 5_000_000)]);
    for seed in 0..40 {
        let random = Mutex::new(Random(seed));
        let mad = Arc::new(AtomicBool::new(true));
        let is_mad = mad.clone();
        let fake = Fake::new(move |_, mut answer| {
            let mut random = random.lock().unwrap();
            let mut pick = |of: usize| usize::try_from(random.below(of as u64)).unwrap();
            if !is_mad.load(Ordering::Relaxed) {
                return answer;
            }
            if pick(12) == 0 {
                answer.status = [200, 201, 202, 204, 206, 301, 401, 404, 416, 429, 500][pick(11)];
            }
            if pick(12) == 0 {
                answer.headers.clear();
            }
            if pick(16) == 0 {
                answer.cut = Some(answer.body.len() / 3);
            }
            if pick(16) == 0 {
                let nonsense =
                    ["sha256:zz", "Bearer realm=", "0-5", "0-99999999999", "-1", "http://"];
                let value = nonsense[pick(nonsense.len())];
                for name in ["Docker-Content-Digest", "WWW-Authenticate", "Range", "Location"] {
                    answer.headers.push((name.into(), value.into()));
                }
            }
            answer
        });
        let few = RegistryOptions {
            tries_max: 3,
            pause_max: Duration::from_millis(2),
            // Ten times that, for a registry that was sent something.
            stall_timeout: Duration::from_millis(100),
            ..options()
        };
        match push(&bench, "image", &app(fake.address), few) {
            Ok(report) => {
                mad.store(false, Ordering::Relaxed);
                // HEADs lie too: "it is there already" may be all that it ever said.
                if how(&report) == [How::Sent, How::Sent]
                    && let Ok(pulled) = pull(&Bench::fast(), &app(fake.address), options())
                {
                    assert_eq!(pulled.image, report.image);
                    pushed += 1;
                }
            }
            Err(_) => errors += 1,
        }
        // Each of them ends in a time of its own.
        assert!(fake.log().len() < 100, "seed {seed}: {} requests", fake.log().len());
    }
    assert!(pushed > 0 && errors > 0, "{pushed} {errors}");
}

/// Tokens must allow to push, and to read where blobs are to be mounted from; one that runs out in
/// the middle is renewed.
#[test]
fn tokens_for_pushing_are_asked_for() {
    let tokens = Fake::new(|_, _| {
        Answer::new(200, serde_json::json!({"token": "t", "expires_in": 60}).to_string())
    });
    let realm = format!("http://{}/token", tokens.address);
    let registry = Fake::new(move |asked, answer| match asked.path.as_str() {
        "/v2/" => answer,
        _ if asked.header("authorization") == "Bearer t" => answer,
        _ => {
            let challenge = format!("Bearer realm=\"{realm}\",service=\"reg\"");
            Answer::error(401, "no token").with("WWW-Authenticate", challenge)
        }
    });
    let bench = with_image(&[layer(1, 6_000_000)]);
    let mut record = bench.domain.get_ref("image").unwrap().unwrap();
    record.source = Some(format!("docker://{}/base/image:1", registry.address));
    bench.domain.put_ref("image", &record).unwrap();
    push(&bench, "image", &app(registry.address), options()).unwrap();
    let log = tokens.log();
    let asked = log.iter().find(|asked| asked.path != "/v2/").unwrap();
    let expected = "/token?service=reg&scope=repository%3Aapp%3Apull%2Cpush\
                    &scope=repository%3Abase%2Fimage%3Apull";
    assert_eq!(asked.path, expected);
    let mounts: Vec<String> =
        sent(&registry).into_iter().filter(|sent| sent.contains("mount=")).collect();
    let blob = record.layers[0].blob.clone().unwrap().replace(':', "%3A");
    assert_eq!(mounts, [format!("POST blobs/uploads/?mount={blob}&from=base%2Fimage")]);
    let manifest = registry
        .log()
        .iter()
        .find(|a| a.path.ends_with("manifests/1") && a.method == "PUT")
        .unwrap()
        .body
        .clone();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["schemaVersion"], 2);
}

/// Only the repository that an image was pulled from was remembered, not those that it was pushed
/// to. So what one repository had been sent was sent to the next one again.
#[test]
fn what_was_pushed_is_mounted_in_the_next_repository() {
    // The repository `other` takes everything, and mounts what it is asked to.
    let fake = Fake::new(|asked, answer| match asked.path.strip_prefix("/v2/other/") {
        None => answer,
        Some(_) if asked.method == "HEAD" => Answer::new(404, ""),
        Some(path) if asked.method == "POST" && !path.contains("mount=") => {
            Answer::new(202, "").with("Location", "/v2/other/blobs/uploads/0")
        }
        Some(_) => Answer::new(201, "").with("Docker-Content-Digest", sha256(&asked.body)),
    });
    let bench = with_image(&[layer(1, 100_000), layer(2, 6_000_000)]);
    let first = push(&bench, "image", &app(fake.address), options()).unwrap();
    assert_eq!(how(&first), [How::Sent; 2]);
    let to = format!("{}/other:1", fake.address);
    let second = push(&bench, "image", &to, options()).unwrap();
    assert_eq!(how(&second), [How::Mounted; 2]);
    let log = fake.log().into_iter();
    let mounts: Vec<_> = log.map(|asked| asked.path).filter(|p| p.contains("mount=")).collect();
    assert!(mounts.len() == 2 && mounts.iter().all(|m| m.ends_with("&from=app")), "{mounts:?}");
}
