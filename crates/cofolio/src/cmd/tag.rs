use cofolio_image::import::check_name;
use cofolio_store::{Error, KEEP_LABEL, Ref, now};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};

/// Give an image another name
///
/// The new name keeps the image alive by itself. A name that exists is moved to the image; what it
/// named before stays as long as something else keeps it. With --keep the name is pinned: its image stays
/// when the store is trimmed for its size (`gc --to`, `gc --older-than`, `store.limit`). Naming it again
/// without --keep unpins it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio tag redis:7.0.15 redis:latest\n  \
    cofolio tag --keep redis:7.0.15 redis:7.0.15")]
pub(crate) struct Args {
    /// Ref or first digits of a digest
    image: String,
    /// New name
    name: String,
    /// Pin the name: its image is never removed to make room
    #[arg(long)]
    keep: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    check_name(&args.name).map_err(|error| Fail::usage(error.to_string()))?;
    let domain = context.domain()?;
    let image = context.image(&domain, &args.image)?;
    let new = || Ref { created: now(), ..Ref::new(image.digest) };
    let mut record = image.record.clone().unwrap_or_else(new);
    // The pin is the name's and not the image's.
    record.labels.remove(KEEP_LABEL);
    if args.keep {
        record.labels.insert(KEEP_LABEL.to_owned(), "true".to_owned());
    }
    domain.put_ref(&args.name, &record).map_err(|error| match error {
        Error::NoSuch(_) if image.ref_name.is_none() => Fail::not_found(error.to_string())
            .hint("gc removed it after the image's last name; import the image again")
            .into(),
        other => anyhow::Error::from(other),
    })?;
    if context.ui.json {
        let value = json!({"name": args.name, "image": image.digest, "keep": args.keep});
        return context.ui.json(&value);
    }
    let pinned = if args.keep { ", pinned" } else { "" };
    context.ui.note(format!("{} is {}{pinned}", args.name, image.digest));
    Ok(Exit::Ok)
}
