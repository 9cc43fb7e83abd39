use std::time::{SystemTime, UNIX_EPOCH};

use cofolio_store::Ref;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;

/// Give an image another name
///
/// The new name keeps the image alive by itself. A name that exists is moved to the image; what it
/// named before stays as long as something else keeps it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio tag redis:7.0.15 redis:latest")]
pub(crate) struct Args {
    /// Ref or first digits of a digest
    image: String,
    /// New name
    name: String,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let image = context.image(&domain, &args.image)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let record = image.record.clone().unwrap_or_else(|| Ref {
        created: i64::try_from(now).unwrap_or(0),
        ..Ref::new(image.digest)
    });
    domain.put_ref(&args.name, &record)?;
    if context.ui.json {
        context.ui.json(&serde_json::json!({"name": args.name, "image": image.digest}))?;
    } else {
        context.ui.note(format!("{} is {}", args.name, image.digest));
    }
    Ok(Exit::Ok)
}
