//! What is asked of a registry, and in which order.

use cofolio_image::digest::BlobDigest;
use serde_json::json;

use crate::server::{Answer, Fake};
use crate::support::{Bench, Tar, sha256, zstd};
use crate::{app, layer, options, pull};

#[test]
fn an_image_arrives_as_it_would_from_a_layout() {
    let fake = Fake::honest();
    let tar = Tar::new().file("top", b"top").end();
    let top = crate::support::Blob {
        media_type: crate::support::ZSTD.into(),
        diff_id: sha256(&tar),
        bytes: zstd(&tar),
    };
    let layers = [layer(1, 200_000), layer(2, 3_000_000), top];
    fake.tag("1", &fake.image(&layers));
    let bench = Bench::new();
    let report = pull(&bench, &app(fake.address), options()).unwrap();
    assert_eq!(report.name, app(fake.address));
    let other = Bench::new();
    let layout = crate::support::Layout::image(other.path("layout"), &layers);
    assert_eq!(other.import(&layout.source()).unwrap().image, report.image);
    assert!(bench.view(&report).is_file("/top", b"top"));
    // One HEAD, one GET of each thing.
    let mut asked = fake.asked();
    assert_eq!(asked.remove(0), "HEAD manifests/1");
    assert_eq!(asked.len(), 5, "{asked:?}");
    asked.sort();
    asked.dedup();
    assert_eq!(asked.len(), 5, "{asked:?}");
}

#[test]
fn what_is_known_is_not_fetched() {
    let fake = Fake::honest();
    let (base, top, other) = (layer(1, 100_000), layer(2, 100_000), layer(3, 100_000));
    fake.tag("1", &fake.image(&[base.clone(), top]));
    fake.tag("2", &fake.image(&[base.clone(), other]));
    let bench = Bench::new();
    pull(&bench, &app(fake.address), options()).unwrap();
    let before = fake.asked().len();
    // The image itself.
    let again = pull(&bench, &app(fake.address), options()).unwrap();
    assert!(again.known);
    assert_eq!(fake.asked()[before..], ["HEAD manifests/1"]);
    // Its lower layer.
    let report = pull(&bench, &format!("{}/app:2", fake.address), options()).unwrap();
    let known: Vec<bool> = report.layers.iter().map(|layer| layer.known).collect();
    assert_eq!(known, [true, false]);
    let base = format!("GET blobs/{}", sha256(&base.bytes));
    assert_eq!(fake.asked().iter().filter(|asked| **asked == base).count(), 1);
}

#[test]
fn platforms_tags_and_digests_lead_to_the_image() {
    let fake = Fake::honest();
    let mut ours = fake.image(&[layer(1, 1000)]);
    let digest = ours["digest"].as_str().unwrap().to_owned();
    let mut theirs = fake.image(&[layer(2, 1000)]);
    ours["platform"] = json!({"os": "linux", "architecture": "amd64"});
    theirs["platform"] = json!({"os": "linux", "architecture": "s390x"});
    let mut nested = fake.index(&[theirs, ours]);
    nested["platform"] = json!({"os": "linux", "architecture": "amd64"});
    let index = fake.index(&[nested]);
    fake.tag("1", &index);
    let platform = cofolio_image::source::Platform::parse("linux/amd64").unwrap();
    let get = |name: &str| {
        let bench = Bench::new();
        let options = cofolio_image::import::ImportOptions {
            platform: platform.clone(),
            registry: options(),
            ..Default::default()
        };
        let source = crate::source(name);
        cofolio_image::import::import(
            &bench.domain,
            &source,
            &options,
            &cofolio_store::task::Task::default(),
        )
    };
    let by_tag = get(&app(fake.address)).unwrap();
    let digest: BlobDigest = digest.parse().unwrap();
    assert_eq!(by_tag.manifest.as_ref(), Some(&digest));
    let name = format!("{}/app@{digest}", fake.address);
    let by_digest = get(&name).unwrap();
    assert_eq!((by_digest.manifest, by_digest.name), (Some(digest), name));
    let by_index = get(&format!("{}/app@{}", fake.address, index["digest"].as_str().unwrap()));
    assert_eq!(by_index.unwrap().image, by_tag.image);
    let error = get(&format!("{}/app:2", fake.address)).unwrap_err().to_string();
    assert!(error.contains("not there") && error.contains("/v2/app/manifests/2"), "{error}");
}

/// Registries that know no HEAD, and such that say nothing about what they send.
#[test]
fn laconic_registries_are_understood() {
    let silent = Fake::new(|asked, mut answer| {
        answer.headers.retain(|(name, _)| name == "Content-Range");
        if asked.method == "HEAD" { Answer::new(405, "") } else { answer }
    });
    let image = silent.image(&[layer(1, 1000)]);
    silent.tag("1", &image);
    silent.tag("2", &silent.index(std::slice::from_ref(&image)));
    for tag in ["1", "2"] {
        let report = pull(&Bench::new(), &format!("{}/app:{tag}", silent.address), options());
        let manifest = report.unwrap().manifest.unwrap().to_string();
        assert_eq!(manifest, image["digest"].as_str().unwrap(), "{tag}");
    }
}

#[test]
fn mirrors_are_asked_first_and_the_registry_has_the_last_word() {
    let layers = [layer(1, 100_000), layer(2, 100_000)];
    let upstream = Fake::honest();
    upstream.tag("1", &upstream.image(&layers));
    // It has the manifest, but not the second layer.
    let lost = sha256(&layers[1].bytes);
    let mirror = Fake::new(move |asked, answer| match asked.path.ends_with(&lost) {
        true => Answer::error(404, "blob unknown"),
        false => answer,
    });
    mirror.tag("1", &mirror.image(&layers));
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut options = options();
    let host = options.hosts.entry(upstream.address.to_string()).or_default();
    host.mirrors = vec![dead.to_string(), mirror.address.to_string()];
    let report = pull(&Bench::new(), &app(upstream.address), options.clone()).unwrap();
    assert_eq!(report.name, app(upstream.address));
    assert_eq!(upstream.asked(), [format!("GET blobs/{}", sha256(&layers[1].bytes))]);
    let error = pull(&Bench::new(), &format!("{}/app:2", upstream.address), options.clone());
    let error = error.unwrap_err().to_string();
    assert!(error.contains(&upstream.address.to_string()), "{error}");
    options.hosts.values_mut().for_each(|host| host.mirrors = vec!["http://x/".into()]);
    let error = pull(&Bench::new(), &app(upstream.address), options).unwrap_err().to_string();
    assert!(error.contains("is not a mirror"), "{error}");
}
