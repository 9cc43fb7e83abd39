//! Which images may be used: by name, by key. The one place that says yes or no.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use cofolio_store::{Digest, Domain, UnreadableRef};
use serde::{Deserialize, Serialize};

use super::key::{Algorithm, PublicKey};
use super::record::{Record, signatures};
use crate::error::TrustError;

/// The demand on an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Require {
    /// Nothing.
    #[default]
    Accept,
    /// It may not be used.
    Reject,
    /// It must be signed by one of the keys.
    Signed,
}

/// A demand on images, as in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// The demand.
    pub require: Require,
    /// Files with ed25519 keys: a signature of the image by one of them will do.
    pub signed_by: Vec<PathBuf>,
    /// Files with ECDSA P-256 or ed25519 keys: a cosign signature of what was pulled will do.
    pub cosign_keys: Vec<PathBuf>,
}

/// What an image is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need<'a> {
    /// Its files: its digest is all there is to vouch for.
    Files,
    /// To be run as this OCI config says, which must be signed too. None: it has none.
    Run(Option<&'a str>),
}

/// An image that is about to be used.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The ref by which it was asked for, where it was; no names are looked up then.
    pub name: Option<&'a str>,
    /// The image.
    pub image: Digest,
    /// What for.
    pub need: Need<'a>,
}

/// A rule with its keys, ready to be used.
#[derive(Clone, Debug, Default)]
pub(super) struct Demand {
    require: Require,
    signed_by: Vec<PublicKey>,
    cosign: Vec<PublicKey>,
    /// What demands it, for people.
    pub(super) origin: String,
}

/// All rules. The default lets everything through.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// For names without a pattern.
    default: Demand,
    /// By pattern: a name, or the beginning of one with `*` after it.
    refs: BTreeMap<String, Demand>,
    /// Asked of every image besides its rule.
    beside: Vec<Demand>,
}

impl Demand {
    fn new(rule: &Rule, origin: String) -> Result<Self, TrustError> {
        let Rule { require, signed_by, cosign_keys } = rule;
        let wrong = |what: &str| TrustError::Policy { what: format!("{origin}: {what}") };
        let has_keys = !signed_by.is_empty() || !cosign_keys.is_empty();
        match (require, has_keys) {
            (Require::Signed, false) => return Err(wrong("`signed` without a key")),
            (Require::Accept | Require::Reject, true) => {
                return Err(wrong("keys without `require = \"signed\"` would not be asked for"));
            }
            _ => {}
        }
        let read = |files: &[PathBuf]| -> Result<Vec<PublicKey>, TrustError> {
            let keys: Result<Vec<_>, _> = files.iter().map(|file| PublicKey::read(file)).collect();
            Ok(keys?.concat())
        };
        let (signed_by, cosign) = (read(signed_by)?, read(cosign_keys)?);
        if let Some(key) = signed_by.iter().find(|key| key.algorithm() != Algorithm::Ed25519) {
            return Err(wrong(&format!("{key} is not ed25519, as signatures of images are")));
        }
        Ok(Self { require: *require, signed_by, cosign, origin })
    }

    fn keys(&self) -> String {
        let cosign = self.cosign.iter().map(|key| format!("{key} with cosign"));
        let keys: Vec<_> = self.signed_by.iter().map(ToString::to_string).chain(cosign).collect();
        keys.join(", ")
    }

    pub(super) fn check(
        &self,
        image: &Digest,
        name: &str,
        need: Need<'_>,
        records: &[Record],
    ) -> Result<(), TrustError> {
        let (image, name, rule) = (*image, name.to_owned(), self.origin.clone());
        match self.require {
            Require::Accept => Ok(()),
            Require::Reject => Err(TrustError::Rejected { image, name, rule }),
            Require::Signed => {
                let signer = |need| {
                    let of = |record: &Record| {
                        record.signer(&image, need, &self.signed_by, &self.cosign).is_some()
                    };
                    records.iter().any(of)
                };
                if signer(need) {
                    return Ok(());
                }
                let found = match records {
                    _ if signer(Need::Files) => {
                        "it is, but with another config than the one it would be run with"
                            .to_owned()
                    }
                    [] => "it has no signature".to_owned(),
                    records => {
                        let shown: BTreeSet<_> = records.iter().map(Record::shown).collect();
                        let shown: Vec<_> = shown.into_iter().take(8).collect();
                        format!("what it has is by {}", shown.join(", "))
                    }
                };
                let (name, keys, rule) = (name.into(), self.keys().into(), rule.into());
                Err(TrustError::Unsigned { image, name, keys, rule, found: found.into() })
            }
        }
    }
}

impl Policy {
    /// The policy of a configuration. All keys are read now; if one cannot be, there is no policy,
    /// and nothing is let through.
    pub fn new(default: &Rule, refs: &BTreeMap<String, Rule>) -> Result<Self, TrustError> {
        let demands = refs.iter().map(|(pattern, rule)| {
            let wrong = |what: &str| TrustError::Policy { what: format!("{pattern:?}: {what}") };
            let stem = pattern.strip_suffix('*').unwrap_or(pattern);
            if stem.contains('*') {
                return Err(wrong("`*` can only be the last character"));
            }
            if stem.is_empty() {
                return Err(wrong("what is asked of all images is said in `[trust]` itself"));
            }
            Ok((pattern.clone(), Demand::new(rule, format!("rule for {pattern:?}"))?))
        });
        let refs = demands.collect::<Result<_, _>>()?;
        let default = Demand::new(default, "the default rule".to_owned())?;
        Ok(Self { default, refs, beside: Vec::new() })
    }

    /// Asks of every image that one of these keys has signed it, whatever the rules say and what
    /// was asked before; all of that is asked as well.
    pub fn demand(
        &mut self,
        signed_by: &[PathBuf],
        cosign_keys: &[PathBuf],
        origin: &str,
    ) -> Result<(), TrustError> {
        let (signed_by, cosign_keys) = (signed_by.to_vec(), cosign_keys.to_vec());
        let rule = Rule { require: Require::Signed, signed_by, cosign_keys };
        self.beside.push(Demand::new(&rule, origin.to_owned())?);
        Ok(())
    }

    /// Keys that [`Policy::demand`] was given for signatures of ours.
    pub(crate) fn demanded_keys(&self) -> impl Iterator<Item = &PublicKey> {
        self.beside.iter().flat_map(|demand| &demand.signed_by)
    }

    /// The rule for a name: the longest pattern that fits, a whole name before all others.
    pub(super) fn rule_for(&self, name: &str) -> &Demand {
        if let Some(demand) = self.refs.get(name) {
            return demand;
        }
        let fits = |pattern: &str| pattern.strip_suffix('*').is_some_and(|p| name.starts_with(p));
        // All that fit are beginnings of one name: no two are of one length.
        let longest = self.refs.iter().filter(|(p, _)| fits(p)).max_by_key(|(p, _)| p.len());
        longest.map_or(&self.default, |(_, demand)| demand)
    }

    /// Checks that an image may be used now; returns whether a signature was required.
    ///
    /// With a name, its rule counts. With a digest alone, the rules of all the image's names count,
    /// or the default without any: leaving the name out opens nothing. A damaged ref may be one.
    pub fn check(&self, domain: &Domain, subject: &Subject<'_>) -> Result<bool, TrustError> {
        let Subject { name, image, need } = subject;
        let mut demands = Vec::new();
        let mut unreadable = Vec::new();
        match name {
            Some(name) => demands.push(((*name).to_owned(), self.rule_for(name))),
            // Without patterns all names have one rule.
            None if self.refs.is_empty() => demands.push(("no name".to_owned(), &self.default)),
            None => {
                let refs = domain.all_refs()?;
                let names = refs.readable.into_iter().filter(|(_, record)| record.image == *image);
                demands.extend(names.map(|(name, _)| {
                    let demand = self.rule_for(&name);
                    (name, demand)
                }));
                unreadable = refs.unreadable;
                if demands.is_empty() {
                    demands.push(("no name".to_owned(), &self.default));
                }
            }
        }
        let shown = name.unwrap_or("no name");
        demands.extend(self.beside.iter().map(|beside| (shown.to_owned(), beside)));
        let maybe = unreadable.iter().flat_map(|UnreadableRef { name, .. }| self.rules_of(name));
        let mut all = demands.iter().map(|(_, demand)| *demand).chain(maybe);
        let signed = all.any(|demand| demand.require == Require::Signed);
        let records = if signed { signatures(domain, image)? } else { Vec::new() };
        for (name, demand) in demands {
            demand.check(image, &name, *need, &records)?;
        }
        for UnreadableRef { name, error } in unreadable {
            let rules = self.rules_of(&name);
            let refuses = |demand: &&Demand| demand.check(image, "", *need, &records).is_err();
            if let Some(demand) = rules.into_iter().find(refuses) {
                let name = name.map_or("a ref with a long name".to_owned(), |n| format!("`{n}`"));
                let (name, rule) = (name.into(), demand.origin.clone().into());
                let source = Box::new(error);
                return Err(TrustError::UnknownName { image: *image, name, rule, source });
            }
        }
        Ok(signed)
    }

    /// The rules that may apply: one, or all if the name is unknown.
    fn rules_of(&self, name: &Option<String>) -> Vec<&Demand> {
        match name {
            Some(name) => vec![self.rule_for(name)],
            None => self.refs.values().chain([&self.default]).collect(),
        }
    }

    /// Demands on an arriving image: those of [`Policy::demand`], and of the name's rule what
    /// cannot be had later. A signature of ours can be added later.
    fn on_arrival(&self, name: &str) -> impl Iterator<Item = &Demand> {
        let rule = self.rule_for(name);
        let later = rule.require == Require::Signed && !rule.signed_by.is_empty();
        self.beside.iter().chain((!later).then_some(rule))
    }

    /// Checks that an image may be imported under a name, with the signatures that it brings.
    pub(crate) fn admits(
        &self,
        domain: &Domain,
        name: &str,
        image: &Digest,
        config: Option<&str>,
        brought: &[Record],
    ) -> Result<(), TrustError> {
        let asked = self.on_arrival(name).any(|demand| demand.require == Require::Signed);
        let mut records = if asked { signatures(domain, image)? } else { Vec::new() };
        records.extend_from_slice(brought);
        let need = Need::Run(config);
        self.on_arrival(name).try_for_each(|demand| demand.check(image, name, need, &records))
    }

    /// Keys for cosign's signatures of an image that is pulled under a name.
    pub(crate) fn cosign_keys(&self, name: &str) -> Vec<PublicKey> {
        let demands = self.beside.iter().chain([self.rule_for(name)]);
        demands.flat_map(|demand| &demand.cosign).cloned().collect()
    }

    /// The keys of which only a signature by cosign will do, for an image that is pulled under a
    /// name: if there is none, nothing needs to be fetched.
    pub(crate) fn needs_cosign(&self, name: &str) -> Option<String> {
        let only =
            |demand: &&Demand| demand.require == Require::Signed && demand.signed_by.is_empty();
        self.on_arrival(name).find(only).map(Demand::keys)
    }
}
