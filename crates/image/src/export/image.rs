//! An image of the store as layers and a config.

use std::borrow::Cow;

use cofolio_store::task::Cancel;
use cofolio_store::{Digest, Domain, FileKind, FileName, Ref};
use serde_json::json;

use super::compress::BlobWriter;
use super::error::ExportError;
use super::{Exported, ExportedLayer, assemble, tar};
use crate::compose::named_objects::open_image;
use crate::digest::DiffId;
use crate::source::Platform;

pub(crate) struct Image<'a> {
    domain: &'a Domain,
    pub(crate) digest: &'a Digest,
    /// The ref with config and layers, if they are known.
    pub(crate) record: Option<&'a Ref>,
    pub(crate) layers: Vec<Layer>,
}

pub(crate) enum Layer {
    /// An imported layer.
    Split { chain_id: String, diff_id: String },
    /// The whole image as one.
    Whole,
}

impl Layer {
    /// The digest of its archive, if it is known without writing it.
    pub(crate) fn diff_id(&self) -> Option<&str> {
        match self {
            Self::Split { diff_id, .. } => Some(diff_id),
            Self::Whole => None,
        }
    }
}

impl<'a> Image<'a> {
    pub(crate) fn of(domain: &'a Domain, exported: Exported<'a>) -> Self {
        let digest = exported.image;
        let record = exported.record.filter(|record| record.config.is_some());
        let layers = match record {
            None => vec![Layer::Whole],
            Some(record) => {
                let layer = |layer: &cofolio_store::Layer| Layer::Split {
                    chain_id: layer.chain_id.clone(),
                    diff_id: layer.diff_id.clone(),
                };
                record.layers.iter().map(layer).collect()
            }
        };
        Self { domain, digest, record, layers }
    }

    pub(crate) fn chain_ids(&self) -> Vec<String> {
        let chain_id = |layer: &Layer| match layer {
            Layer::Split { chain_id, .. } => Some(chain_id.clone()),
            Layer::Whole => None,
        };
        self.layers.iter().filter_map(chain_id).collect()
    }

    /// Checks that these layers can be written; the error names all that lack a split.
    pub(crate) fn check_splits<'b>(
        &self,
        layers: impl IntoIterator<Item = &'b Layer>,
    ) -> Result<(), ExportError> {
        let mut lacking = Vec::new();
        for layer in layers {
            if let Layer::Split { chain_id, .. } = layer
                && !self.domain.has_named(&FileName::chain(FileKind::Split, chain_id)?)?
            {
                lacking.push(chain_id.clone());
            }
        }
        if lacking.is_empty() { Ok(()) } else { Err(ExportError::NoSplit { layers: lacking }) }
    }

    /// The original config, or a minimal one.
    pub(crate) fn config<'b>(&self, diff_ids: impl Iterator<Item = &'b DiffId>) -> Cow<'a, str> {
        match self.record.and_then(|record| record.config.as_deref()) {
            Some(config) => config.into(),
            None => new_config(&diff_ids.collect::<Vec<_>>()).into(),
        }
    }

    /// Writes a layer's archive as a blob, and checks that it is the right one. `progress`
    /// hears how far the archive has come, in bytes.
    pub(crate) fn write_layer(
        &self,
        layer: &Layer,
        mut writer: BlobWriter<'_>,
        cancel: &Cancel,
        progress: &mut dyn FnMut(u64),
    ) -> Result<ExportedLayer, ExportError> {
        let mut push = |bytes: &[u8]| {
            writer.push(bytes)?;
            progress(writer.uncompressed);
            Ok(())
        };
        match layer {
            Layer::Split { chain_id, diff_id } => {
                assemble::layer(self.domain, chain_id, cancel, &mut push)?;
                writer.finish(|actual| match actual.to_string() {
                    actual if actual == *diff_id => Ok(()),
                    actual => Err(ExportError::DiffId {
                        layer: chain_id.clone(),
                        expected: diff_id.clone(),
                        actual,
                    }),
                })
            }
            Layer::Whole => {
                let bad = |what: String| ExportError::Image { image: *self.digest, what };
                let file = self.domain.open_image(self.digest)?;
                let image = open_image(&file).map_err(|error| bad(error.to_string()))?;
                let tree = image.to_tree().map_err(|error| bad(error.to_string()))?;
                let user = format!("image {}", self.digest);
                tar::write(self.domain, &tree, (&user, cancel), &mut push)?;
                writer.finish(|_| Ok(()))
            }
        }
    }
}

/// No time in it: the same image gives the same bytes tomorrow.
fn new_config(diff_ids: &[&DiffId]) -> String {
    let Platform { os, architecture, variant } = Platform::host();
    let mut config = json!({
        "architecture": architecture,
        "os": os,
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    if let Some(variant) = variant {
        config["variant"] = variant.into();
    }
    config.to_string()
}
