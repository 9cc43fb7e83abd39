//! Blobs and documents that are not what they say.

use std::fs;

use cofolio_image::limits::Limits;
use serde_json::json;

use crate::refused;
use crate::support::*;

#[test]
fn content_that_is_not_what_its_digest_says() {
    let bench = Bench::new();
    let tar = Tar::new().file("a", &[1; 100_000]).end();
    let fresh = |name: &str| Layout::image(bench.path(name), &[Blob::gzip(&tar)]);
    let file = |layout: &Layout, digest: &str| layout.0.join("blobs/sha256").join(&digest[7..]);
    let layer = sha256(&gzip(&tar));

    // Altered, same size: the last byte is in gzip's own trailer.
    let layout = fresh("altered");
    let mut bytes = gzip(&tar);
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file(&layout, &layer), &bytes).unwrap();
    refused(&bench, &layout, Limits::default(), &["has the digest", &layer, &sha256(&bytes)]);

    let layout = fresh("short");
    fs::write(file(&layout, &layer), &bytes[..bytes.len() - 1]).unwrap();
    refused(&bench, &layout, Limits::default(), &[&layer, "descriptor says"]);

    let layout = fresh("gone");
    fs::remove_file(file(&layout, &layer)).unwrap();
    refused(&bench, &layout, Limits::default(), &[&layer, "missing"]);

    let wrong = Blob { diff_id: sha256(b"other"), ..Blob::gzip(&tar) };
    let layout = Layout::image(bench.path("diff-id"), &[wrong]);
    refused(&bench, &layout, Limits::default(), &[&layer, &sha256(&tar), &sha256(b"other")]);

    // Manifest and config, altered in place.
    let layout = fresh("documents");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.0.join("index.json")).unwrap()).unwrap();
    let manifest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    let path = file(&layout, &manifest);
    let good = fs::read(&path).unwrap();
    let document: serde_json::Value = serde_json::from_slice(&good).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() = b' ';
    fs::write(&path, &bad).unwrap();
    refused(&bench, &layout, Limits::default(), &[&manifest, "has the digest"]);
    fs::write(&path, &good).unwrap();
    let config = document["config"]["digest"].as_str().unwrap();
    let path = file(&layout, config);
    let mut bad = fs::read(&path).unwrap();
    *bad.last_mut().unwrap() = b' ';
    fs::write(&path, &bad).unwrap();
    refused(&bench, &layout, Limits::default(), &[config, "has the digest"]);
}

#[test]
fn media_types_are_refused_by_name() {
    let bench = Bench::new();
    let tar = Tar::new().file("a", b"a").end();
    for (at, (media_type, word)) in [
        ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "encrypted"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "foreign"),
        ("application/vnd.oci.image.layer.v1.tar+xz", "unknown kind of layer"),
        ("application/vnd.cncf.helm.chart.content.v1.tar+gzip", "unknown kind of layer"),
        ("", "unknown kind of layer"),
    ]
    .into_iter()
    .enumerate()
    {
        let blob = Blob { media_type: media_type.into(), ..Blob::gzip(&tar) };
        let layout = Layout::image(bench.path(&format!("layer-{at}")), &[blob]);
        refused(&bench, &layout, Limits::default(), &[word, media_type, &sha256(&gzip(&tar))]);
    }
    let blob = [Blob::gzip(&tar)];
    let layout = Layout::new(bench.path("urls"));
    let mut layer = layout.blob(GZIP, &blob[0].bytes);
    layer["urls"] = json!(["https://example.com/layer"]);
    let manifest = layout.manifest_of(layout.config(&blob), vec![layer]);
    layout.index(&[manifest]);
    refused(&bench, &layout, Limits::default(), &["foreign"]);

    let layout = Layout::new(bench.path("artifact"));
    let mut config = layout.config(&blob);
    config["mediaType"] = json!("application/vnd.cncf.helm.config.v1+json");
    let manifest = layout.manifest_of(config, vec![layout.blob(GZIP, &blob[0].bytes)]);
    layout.index(&[manifest]);
    refused(&bench, &layout, Limits::default(), &["not the config of a container image", "helm"]);

    for (media_type, word) in [
        ("application/vnd.docker.distribution.manifest.v1+prettyjws", "schema 1"),
        ("text/plain", "neither an image manifest nor an index"),
    ] {
        let layout = Layout::image(bench.path(word), &blob);
        let mut manifest = layout.manifest(&blob);
        manifest["mediaType"] = json!(media_type);
        layout.index(&[manifest]);
        refused(&bench, &layout, Limits::default(), &[word, media_type]);
    }
}

#[test]
fn documents_that_contradict_themselves() {
    let bench = Bench::new();
    let tar = Tar::new().file("a", b"a").end();
    let blob = Blob::gzip(&tar);
    let with_config = |name: &str, config: serde_json::Value, words: &[&str]| {
        let layout = Layout::new(bench.path(name));
        let config = layout.blob(CONFIG, config.to_string().as_bytes());
        let manifest = layout.manifest_of(config, vec![layout.blob(GZIP, &blob.bytes)]);
        layout.index(&[manifest]);
        refused(&bench, &layout, Limits::default(), words);
    };
    let rootfs = |kind: &str, ids: serde_json::Value| json!({"os": "linux", "rootfs": {"type": kind, "diff_ids": ids}});
    let id = blob.diff_id.as_str();
    with_config("count", rootfs("layers", json!([id, id])), &["2 diff_ids for 1 layers"]);
    with_config("kind", rootfs("blocks", json!([id])), &["rootfs.type"]);
    with_config("id", rootfs("layers", json!(["sha256:x"])), &["diff_id"]);
    with_config("none", json!({"os": "linux"}), &["config", "rootfs"]);
    let mut windows = rootfs("layers", json!([id]));
    windows["os"] = json!("windows");
    with_config("windows", windows, &["windows"]);

    let layout = Layout::new(bench.path("traversal"));
    layout.index(&[
        json!({"mediaType": MANIFEST, "digest": "sha256:../../../../etc/passwd", "size": 3}),
    ]);
    refused(&bench, &layout, Limits::default(), &["../../../../etc/passwd", "digest"]);

    // An index that holds itself cannot be made with digests; a tower of them can.
    let layout = Layout::new(bench.path("tower"));
    let mut top = layout.manifest(std::slice::from_ref(&blob));
    for _ in 0..12 {
        let index = json!({"schemaVersion": 2, "manifests": [top]});
        top = layout.blob(INDEX, index.to_string().as_bytes());
    }
    layout.index(&[top]);
    refused(&bench, &layout, Limits::default(), &["indexes in indexes"]);

    let layout = Layout::new(bench.path("big"));
    let big = layout.blob(MANIFEST, &vec![b' '; (4 << 20) + 1]);
    layout.index(&[big]);
    refused(&bench, &layout, Limits::default(), &["document_bytes"]);
    fs::write(layout.0.join("index.json"), vec![b' '; (4 << 20) + 1]).unwrap();
    refused(&bench, &layout, Limits::default(), &["document_bytes"]);
    fs::write(layout.0.join("index.json"), "[".repeat(100_000)).unwrap();
    refused(&bench, &layout, Limits::default(), &["index.json"]);
}
