use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::exit::{Exit, Fail};

/// Remove names of images
///
/// Only the name goes, at once. What nothing else keeps (other names, mounts, leases) goes with the next
/// `cofolio gc`; a mounted image stays until it is unmounted. Before that
/// gc, `cofolio tag DIGEST NAME` gives the image a name again, with its config and layers.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio rm redis:7.0.14 && cofolio gc")]
pub(crate) struct Args {
    /// Refs to remove
    #[arg(required = true)]
    names: Vec<String>,
    /// Do not complain about names that do not exist, and remove those whose record cannot be read
    #[arg(long, short)]
    force: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    // All or nothing as far as names go: a typo in the third should not remove the first two.
    let mut found = Vec::new();
    for name in &args.names {
        match domain.get_ref(name) {
            Ok(Some(record)) => found.push((name, short(&record.image))),
            Ok(None) if args.force => {}
            Ok(None) => {
                let others = if args.names.len() > 1 { "; no name was removed" } else { "" };
                let fail = Fail::not_found(format!("no ref `{name}`{others}"));
                let digest = context.image(&domain, name);
                return Err(match digest {
                    Ok(image) => fail.hint(match image.ref_name {
                        Some(name) => format!("that image is called {name}: remove it by name"),
                        None => {
                            "that image has no name any more: `cofolio gc` removes it".to_owned()
                        }
                    }),
                    Err(_) => fail.hint("`cofolio images` lists what there is"),
                }
                .into());
            }
            Err(cofolio_store::Error::Corrupt { .. }) if args.force => {
                found.push((name, "its record cannot be read".to_owned()));
            }
            Err(error) => return Err(error.into()),
        }
    }
    for (name, image) in &found {
        match domain.remove_ref(name) {
            Err(cofolio_store::Error::NoSuchRef(_)) if args.force => {}
            other => other?,
        }
        context.ui.note(format!("removed {name} ({})", image));
    }
    if context.ui.json {
        let names: Vec<_> = found.iter().map(|(name, _)| name).collect();
        context.ui.json(&serde_json::json!({"removed": names}))?;
    }
    Ok(Exit::Ok)
}
