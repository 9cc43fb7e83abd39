//! The JSON documents of an image: index, manifest, config (OCI image spec 1.1, Docker image
//! manifest v2 schema 2), and what of them is accepted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::{BlobDigest, DiffId};
use crate::error::ImportError;

/// Indexes in indexes that are followed.
pub(crate) const INDEX_DEPTH_MAX: usize = 4;
/// Layers of an image. Engines stop at 127, overlayfs at 500.
const LAYERS_MAX: usize = 1024;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

pub(crate) const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Annotation with the name or tag of an image in a layout.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// containerd's annotation with the full name.
const IMAGE_NAME: &str = "io.containerd.image.name";

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) urls: Vec<String>,
    #[serde(default)]
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) platform: Option<Platform>,
}

impl Descriptor {
    pub(crate) fn new(media_type: String, digest: String, size: u64) -> Self {
        let (urls, annotations, platform) = Default::default();
        Self { media_type, digest, size, urls, annotations, platform }
    }

    /// The digest, checked.
    pub(crate) fn blob_digest(&self) -> Result<BlobDigest, ImportError> {
        let what = "not a sha256 or sha512 digest";
        let digest = BlobDigest::parse(&self.digest);
        digest.ok_or_else(|| ImportError::document("descriptor of", &self.digest, what))
    }

    /// Names under which the image may be asked for.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        [REF_NAME, IMAGE_NAME]
            .iter()
            .filter_map(|key| self.annotations.get(*key))
            .map(String::as_str)
    }

    /// What the image is called. containerd writes both annotations, `1` into the one and
    /// `docker.io/library/name:1` into the other: a whole name goes first.
    pub(crate) fn name(&self) -> Option<&str> {
        let names = || self.names().filter(|name| !name.is_empty());
        names().find(|name| is_whole_name(name)).or_else(|| names().next())
    }
}

/// As much of a manifest or index as tells which of them it is.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Kind {
    schema_version: u32,
    media_type: String,
    manifests: Option<serde::de::IgnoredAny>,
}

/// The media type of a manifest or index, by its own words.
pub(crate) fn media_type(digest: &str, bytes: &[u8]) -> Result<String, ImportError> {
    let kind: Kind = parse("manifest", digest, bytes)?;
    Ok(match (kind.media_type, kind.manifests, kind.schema_version) {
        (said, _, _) if !said.is_empty() => said,
        (_, _, 1) => "application/vnd.docker.distribution.manifest.v1+json".to_owned(),
        (_, Some(_), _) => OCI_INDEX.to_owned(),
        (_, None, _) => OCI_MANIFEST.to_owned(),
    })
}

/// Whether a tag is more than that: `name:tag` or `registry/name`.
pub(crate) fn is_whole_name(tag: &str) -> bool {
    tag.contains([':', '/'])
}

/// An operating system and processor, in Go's words (`linux`, `amd64`, `v8`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// Operating system.
    pub os: String,
    /// Processor architecture.
    pub architecture: String,
    /// Variant of the architecture, such as `v7` of `arm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// The platform of this machine.
    pub fn host() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "x86" => ("386", None),
            "aarch64" => ("arm64", None),
            "arm" => ("arm", Some("v7".to_owned())),
            "powerpc64" => ("ppc64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant }
    }

    /// Parses `os/architecture[/variant]`; anything else is an [`ImportError::Source`].
    pub fn parse(text: &str) -> Result<Self, ImportError> {
        let mut parts = text.split('/').map(str::to_owned);
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(os), Some(architecture), variant, None)
                if !os.is_empty() && !architecture.is_empty() =>
            {
                Ok(Self { os, architecture, variant })
            }
            _ => Err(ImportError::Source {
                what: format!("{text:?} is not a platform: os/architecture[/variant]"),
            }),
        }
    }

    /// Whether an image for `other` is one for this platform.
    pub fn matches(&self, other: &Self) -> bool {
        self.os == other.os
            && self.architecture == other.architecture
            && match (&self.variant, &other.variant) {
                (Some(ours), Some(theirs)) => ours == theirs,
                _ => true,
            }
    }
}

impl std::fmt::Display for Platform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |v| write!(f, "/{v}"))
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Index {
    pub(crate) schema_version: u32,
    #[serde(default)]
    pub(crate) manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) schema_version: u32,
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) config: Descriptor,
    #[serde(default)]
    pub(crate) layers: Vec<Descriptor>,
}

/// The part of an image config that the import itself needs; the rest is kept byte for byte.
#[derive(Debug, Deserialize)]
pub(crate) struct Config {
    #[serde(default)]
    pub(crate) architecture: String,
    #[serde(default)]
    pub(crate) os: String,
    pub(crate) rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RootFs {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) diff_ids: Vec<String>,
}

/// One image of a `docker save` archive's `manifest.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct DockerImage {
    pub(crate) config: String,
    pub(crate) repo_tags: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) layers: Vec<String>,
}

pub(crate) fn parse<'a, T: Deserialize<'a>>(
    what_blob: &'static str,
    digest: &str,
    bytes: &'a [u8],
) -> Result<T, ImportError> {
    let parsed = serde_json::from_slice(bytes);
    parsed.map_err(|e| ImportError::document(what_blob, digest, e.to_string()))
}

/// What a descriptor in an index leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Leads {
    ToIndex,
    ToManifest,
}

/// Judges the media type of an index entry.
pub(crate) fn leads(descriptor: &Descriptor) -> Result<Leads, ImportError> {
    match descriptor.media_type.as_str() {
        OCI_INDEX | "application/vnd.docker.distribution.manifest.list.v2+json" => {
            Ok(Leads::ToIndex)
        }
        OCI_MANIFEST | "application/vnd.docker.distribution.manifest.v2+json" => {
            Ok(Leads::ToManifest)
        }
        "application/vnd.docker.distribution.manifest.v1+json"
        | "application/vnd.docker.distribution.manifest.v1+prettyjws" => Err(refused(
            descriptor,
            "Docker manifest schema 1 has no content digests of its layers",
        )),
        _ => Err(refused(descriptor, "neither an image manifest nor an index")),
    }
}

/// Refuses anything but the config of a container image.
pub(crate) fn check_config(descriptor: &Descriptor) -> Result<(), ImportError> {
    match descriptor.media_type.as_str() {
        OCI_CONFIG | "application/vnd.docker.container.image.v1+json" => Ok(()),
        _ => Err(refused(descriptor, "not the config of a container image")),
    }
}

/// Refuses layers that are not tar archives at hand.
pub(crate) fn check_layer(descriptor: &Descriptor) -> Result<(), ImportError> {
    let media_type = descriptor.media_type.as_str();
    if media_type.ends_with("+encrypted") {
        return Err(refused(descriptor, "the layer is encrypted"));
    }
    if media_type.contains("foreign") || !descriptor.urls.is_empty() {
        return Err(refused(descriptor, "the layer is foreign: its content is kept elsewhere"));
    }
    match media_type {
        "application/vnd.oci.image.layer.v1.tar"
        | "application/vnd.oci.image.layer.v1.tar+gzip"
        | "application/vnd.oci.image.layer.v1.tar+zstd"
        | "application/vnd.oci.image.layer.nondistributable.v1.tar"
        | "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
        | "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
        | "application/vnd.docker.image.rootfs.diff.tar"
        | "application/vnd.docker.image.rootfs.diff.tar.gzip"
        | "application/vnd.docker.image.rootfs.diff.tar.zstd" => Ok(()),
        _ => Err(refused(descriptor, "an unknown kind of layer")),
    }
}

fn refused(descriptor: &Descriptor, what: &'static str) -> ImportError {
    ImportError::MediaType {
        digest: descriptor.digest.clone(),
        media_type: descriptor.media_type.clone(),
        what,
    }
}

/// The entry of an index for `wanted`; the error names the platforms that exist.
pub(crate) fn for_platform<'a>(
    entries: &[&'a Descriptor],
    wanted: &Platform,
) -> Result<&'a Descriptor, ImportError> {
    let fits = |d: &&&Descriptor| d.platform.as_ref().is_some_and(|p| wanted.matches(p));
    let mut fitting: Vec<&'a Descriptor> = entries.iter().filter(fits).copied().collect();
    // Among several variants the plain one, if we did not ask for one.
    fitting.sort_by_key(|d| d.platform.as_ref().is_some_and(|p| p.variant != wanted.variant));
    if let Some(&first) = fitting.first() {
        return Ok(first);
    }
    match entries {
        // One image without a platform: its config says it.
        [one] if one.platform.is_none() => Ok(one),
        [] => Err(ImportError::Source { what: "the index holds no image".into() }),
        _ => {
            let mut there: Vec<String> = entries
                .iter()
                .take(64)
                .map(|d| d.platform.as_ref().map_or("unknown".into(), ToString::to_string))
                .collect();
            there.sort();
            there.dedup();
            Err(ImportError::Source {
                what: format!("no image for {wanted}; there is: {}", there.join(", ")),
            })
        }
    }
}

pub(super) fn read_config(
    digest: &str,
    bytes: Vec<u8>,
    layers: usize,
) -> Result<(String, Vec<DiffId>), ImportError> {
    let fail = |what: String| ImportError::document("config", digest, what);
    let config: Config = parse("config", digest, &bytes)?;
    if config.rootfs.kind != "layers" {
        return Err(fail(format!("rootfs.type is {:?}, not \"layers\"", config.rootfs.kind)));
    }
    if !(config.os.is_empty() || config.os == "linux") {
        return Err(fail(format!(
            "an image for {:?} ({}), not linux",
            config.os, config.architecture
        )));
    }
    if layers > LAYERS_MAX {
        return Err(fail(format!("{layers} layers, more than {LAYERS_MAX}")));
    }
    let count = config.rootfs.diff_ids.len();
    if count != layers {
        return Err(fail(format!("{count} diff_ids for {layers} layers")));
    }
    let diff_ids = config.rootfs.diff_ids.iter().map(|id| {
        let diff_id = id.parse::<DiffId>();
        diff_id.map_err(|_| fail(format!("diff_id {id:?} is not a sha256 digest")))
    });
    let diff_ids = diff_ids.collect::<Result<_, _>>()?;
    let text = String::from_utf8(bytes).map_err(|_| fail("not UTF-8".into()))?;
    Ok((text, diff_ids))
}

pub(super) fn check_schema(
    what_blob: &'static str,
    digest: &str,
    version: u32,
) -> Result<(), ImportError> {
    if version == 2 {
        return Ok(());
    }
    Err(ImportError::document(what_blob, digest, format!("schemaVersion is {version}, not 2")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(platform: Option<&str>) -> Descriptor {
        Descriptor {
            media_type: "application/vnd.oci.image.manifest.v1+json".into(),
            digest: format!("for {platform:?}"),
            size: 0,
            urls: Vec::new(),
            annotations: BTreeMap::new(),
            platform: platform.map(|p| Platform::parse(p).expect("valid")),
        }
    }

    #[test]
    fn platforms_are_chosen_as_asked() {
        let list = [
            entry(Some("linux/arm/v6")),
            entry(Some("linux/arm64/v8")),
            entry(Some("linux/amd64/v3")),
            entry(Some("linux/amd64")),
            entry(Some("unknown/unknown")),
        ];
        let entries: Vec<&Descriptor> = list.iter().collect();
        let choose = |p: &str| {
            for_platform(&entries, &Platform::parse(p).expect("valid"))
                .map(|d| d.platform.as_ref().expect("has one").to_string())
                .map_err(|e| e.to_string())
        };
        assert_eq!(choose("linux/amd64").as_deref(), Ok("linux/amd64"));
        assert_eq!(choose("linux/amd64/v3").as_deref(), Ok("linux/amd64/v3"));
        assert_eq!(choose("linux/arm64").as_deref(), Ok("linux/arm64/v8"));
        let error = choose("linux/s390x").expect_err("is not there");
        assert!(error.contains("linux/s390x") && error.contains("linux/arm/v6"), "{error}");
        let alone = entry(None);
        assert!(for_platform(&[&alone], &Platform::host()).is_ok());
    }
}
