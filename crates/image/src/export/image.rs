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
    pub(crate) layers: Vec<Layer<'a>>,
}

/// An imported layer; `None` is the whole image as one.
pub(crate) type Layer<'a> = Option<&'a cofolio_store::Layer>;

impl<'a> Image<'a> {
    pub(crate) fn of(domain: &'a Domain, exported: Exported<'a>) -> Self {
        let digest = exported.image;
        let record = exported.record.filter(|record| record.config.is_some());
        let layers = match record {
            None => vec![None],
            Some(record) => record.layers.iter().map(Some).collect(),
        };
        Self { domain, digest, record, layers }
    }

    pub(crate) fn chain_ids(&self) -> Vec<String> {
        self.layers.iter().flatten().map(|layer| layer.chain_id.clone()).collect()
    }

    /// Checks that these layers can be written; the error names all that lack a split.
    pub(crate) fn check_splits<'b>(
        &self,
        layers: impl IntoIterator<Item = &'b Layer<'b>>,
    ) -> Result<(), ExportError> {
        let mut lacking = Vec::new();
        for layer in layers.into_iter().flatten() {
            if !self.domain.has_named(&FileName::chain(FileKind::Split, &layer.chain_id)?)? {
                lacking.push(layer.chain_id.clone());
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
        layer: Layer<'_>,
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
            Some(cofolio_store::Layer { chain_id, diff_id, .. }) => {
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
            None => {
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
