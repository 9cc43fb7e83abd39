//! What the commands work on: the store, the domain, the image that the user means.

use std::fmt::Write as _;
use std::path::PathBuf;

use cofolio_image::compose::named_objects::ImageContents;
use cofolio_node::mount::{MountState, Mounter, RunDir};
use cofolio_node::upkeep::Upkeep;
use cofolio_store::{Digest, Domain, InitOptions, Ref, Refs, RootKind, Store, UnreadableRef};

use crate::cli::Global;
use crate::exit::{self, Exit, Fail};
use crate::ui::Ui;
use cofolio_node::config::Loaded;

/// Fewest digits of a digest that name an image.
const PREFIX_DIGITS_MIN: usize = 4;

/// Options of every command, the configuration, and how to talk to the user.
pub(crate) struct Context<'a> {
    pub(crate) global: Global,
    pub(crate) config: Loaded,
    pub(crate) ui: &'a Ui,
}

/// An image of the store, as the user named it.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) digest: Digest,
    /// A ref of it: the one given, or the first in order that leads there.
    pub(crate) ref_name: Option<String>,
    pub(crate) record: Option<Ref>,
}

impl Named {
    /// What to call it in messages.
    pub(crate) fn shown(&self) -> String {
        self.ref_name.clone().unwrap_or_else(|| short(&self.digest))
    }
}

impl Context<'_> {
    /// For commands whose output is not theirs to put into another form: a script that asked for JSON
    /// should not get something else.
    pub(crate) fn refuse_json(&self, why: &str) -> anyhow::Result<()> {
        match self.ui.json {
            true => Err(Fail::usage(format!("no --json here: {why}")).into()),
            false => Ok(()),
        }
    }

    /// For commands that mount and start containers: an error of their first system call would not say
    /// what to do.
    pub(crate) fn needs_root(&self) -> anyhow::Result<()> {
        match rustix::process::geteuid().is_root() {
            true => Ok(()),
            false => Err(Fail::new(Exit::Missing, "not permitted").hint("run as root").into()),
        }
    }

    /// The store, which must exist.
    pub(crate) fn store(&self) -> anyhow::Result<Store> {
        Ok(Store::open(&self.global.store)?)
    }

    /// The domain, which must exist.
    pub(crate) fn domain(&self) -> anyhow::Result<Domain> {
        Ok(self.store()?.domain(&self.global.domain)?)
    }

    /// The domain, made with its store if they are missing.
    pub(crate) fn domain_or_create(&self) -> anyhow::Result<Domain> {
        if let Some(parent) = self.global.store.parent() {
            std::fs::create_dir_all(parent).map_err(|error| {
                anyhow::Error::new(error).context(format!("creating {}", parent.display()))
            })?;
        }
        let store = Store::open_or_init(&self.global.store, &InitOptions::default())?;
        Ok(store.domain_or_create(&self.global.domain)?)
    }

    /// The image that a ref or the first digits of a digest name.
    pub(crate) fn image(&self, domain: &Domain, text: &str) -> anyhow::Result<Named> {
        // A name that cannot be a ref may still be a digest; a ref goes first.
        match domain.get_ref(text) {
            Ok(Some(record)) => {
                let (digest, ref_name) = (record.image, Some(text.to_owned()));
                return Ok(Named { digest, ref_name, record: Some(record) });
            }
            Ok(None) | Err(cofolio_store::Error::BadName { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let digest = self.digest(domain, text)?;
        let found = domain.readable_refs()?.into_iter().find(|(_, record)| record.image == digest);
        let (ref_name, record) = found.unzip();
        Ok(Named { digest, ref_name, record })
    }

    fn digest(&self, domain: &Domain, text: &str) -> anyhow::Result<Digest> {
        let prefix = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
        let hex = prefix.len() <= 64 && prefix.bytes().all(|b| b.is_ascii_hexdigit());
        let none = || self.no_image(domain, text);
        if !hex || prefix.is_empty() {
            return Err(none().into());
        }
        if prefix.len() < PREFIX_DIGITS_MIN {
            let what =
                format!("no ref `{text}`, and a digest needs at least {PREFIX_DIGITS_MIN} digits");
            return Err(Fail::not_found(what).into());
        }
        let images = domain.images()?;
        let matching: Vec<_> =
            images.into_iter().filter(|image| image.to_string().starts_with(&prefix)).collect();
        match matching[..] {
            [] => Err(none().into()),
            [one] => Ok(one),
            [first, second, ..] => {
                let count = matching.len();
                let what = format!("`{text}` is the beginning of {count} digests");
                let hint = format!("among them {first} and {second}: give more digits");
                Err(Fail::usage(what).hint(hint).into())
            }
        }
    }

    /// The refs that can be read. The others are named on standard error, whatever the output; the exit code says
    /// that what is shown may not be all.
    pub(crate) fn refs(&self, domain: &Domain) -> anyhow::Result<(Vec<(String, Ref)>, Exit)> {
        let Refs { readable, unreadable } = domain.all_refs()?;
        let mut exit = Exit::Ok;
        for UnreadableRef { name, error } in unreadable {
            let name = name.unwrap_or("with a long name".to_owned());
            let error = anyhow::Error::new(error).context(format!("ref {name} cannot be read"));
            exit = exit::report(&error, self.ui);
        }
        Ok((readable, exit))
    }

    /// Mounts images of a domain; its state is below the run directory.
    pub(crate) fn mounter<'d>(&self, domain: &'d Domain) -> Mounter<'d> {
        Mounter::new(domain, self.run_dir(domain), &ImageContents)
    }

    /// Keeps a domain in order.
    pub(crate) fn upkeep<'d>(&self, domain: &'d Domain) -> Upkeep<'d> {
        Upkeep::new(domain, self.run_dir(domain), self.config.config.store.limit.clone())
    }

    fn run_dir(&self, domain: &Domain) -> RunDir {
        RunDir::at(self.global.run_dir.join(domain.store().id()))
    }

    /// Where an image of this domain is mounted.
    pub(crate) fn mounts_of(
        &self,
        domain: &Domain,
        image: &Digest,
    ) -> anyhow::Result<Vec<PathBuf>> {
        let mounts = self.mounter(domain).list()?.mounts.into_iter();
        let mounts = mounts.filter(|status| status.state != MountState::Gone);
        let records = mounts.map(|status| status.record);
        let ours =
            records.filter(|record| record.image == *image && record.domain == domain.name());
        Ok(ours.map(|record| record.target).collect())
    }

    fn no_image(&self, domain: &Domain, text: &str) -> Fail {
        let fail = Fail::not_found(format!("no image `{text}` in domain `{}`", domain.name()));
        let Ok(refs) = domain.readable_refs() else { return fail };
        // Somebody who forgot the tag, or half of it, sees what there is.
        let close: Vec<_> =
            refs.iter().map(|(name, _)| name.as_str()).filter(|name| name.contains(text)).collect();
        match (&close[..], refs.is_empty()) {
            (_, true) => {
                fail.hint("the domain has no images: `cofolio import SOURCE` brings one in")
            }
            ([], _) => fail.hint("`cofolio images` lists what there is"),
            (names, _) => {
                let mut hint = "did you mean ".to_owned();
                for (i, name) in names.iter().take(5).enumerate() {
                    let _ = write!(hint, "{}{name}", if i == 0 { "" } else { ", " });
                }
                fail.hint(hint + "?")
            }
        }
    }
}

/// The beginning of a digest that tells images apart for people; enough to be given back as an argument.
pub(crate) fn short(digest: &Digest) -> String {
    digest.to_string().chars().take(12).collect()
}

/// What keeps an image alive besides refs and mounts, for messages: `lease/build-7`.
pub(crate) fn other_roots(domain: &Domain, image: &Digest) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    let roots = domain.roots(RootKind::Lease)?.into_iter();
    let roots = roots.filter(|root| root.images.contains(image));
    names.extend(roots.map(|root| format!("{}/{}", RootKind::Lease.as_str(), root.id)));
    Ok(names)
}
