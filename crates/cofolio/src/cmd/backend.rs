use cofolio_cli::args::BackendArg;
use cofolio_image::pack::segment::Form;
use cofolio_node::backend;
use cofolio_node::settings::{Backend, DomainSettings as _};

use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;

/// Show or set how images of this trust domain are mounted
///
/// `overlay`: overlayfs over the files of the store. Every kind of read of the same content shares one copy in memory.
///
/// `inode-share` (Linux 7.0): a pack of each image, mounted without overlayfs unless it is writable; the kernel shares the
/// page cache of files with the same content. Directories and files take less memory than with `overlay`. What is read with
/// sendfile or splice is not shared, and O_DIRECT is refused. An image stays
/// mounted in the background, and is not collected, until the last one of the domain is unmounted: to take it down while
/// others are read makes Linux 7.2 crash. For the same reason nothing of it should be unmounted but by `umount`. Segments take room beside the objects where the filesystem
/// has no reflinks; where it has fs-verity the kernel checks what it reads, and caches it twice. All images of the domain
/// are packed now, and later ones when they are imported. With --lz4 the packs are compressed: they take less room on the
/// disk, and reading them takes processor time; in memory content is as large as ever.
///
/// What is read through one is cached apart from what is read through the other, and what is compressed apart from what
/// is not, so nothing of the domain may be mounted while it changes.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio backend\n  cofolio backend inode-share\n  cofolio backend inode-share --lz4\n  \
    cofolio --domain tenant backend overlay"
)]
pub(crate) struct Args {
    /// How from now on
    backend: Option<BackendArg>,
    /// With `inode-share`: over packs that are compressed with LZ4
    #[arg(long, requires = "backend")]
    lz4: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    if let Some(how) = args.backend {
        context.needs_root("changing the backend")?;
        let form = if args.lz4 { Form::Lz4 } else { Form::Plain };
        let mounter = context.mounter(&domain)?;
        context.work("packing", "file", |task| backend::set(&mounter, how.into(), form, task))?;
    }
    let (backend, form) = (domain.backend()?, domain.pack_form()?);
    if context.ui.json {
        let value = json!({ "domain": domain.name(), "backend": backend, "packs": form });
        return context.ui.json(&value);
    }
    context.ui.line(shown(backend, form))?;
    Ok(Exit::Ok)
}

/// A backend, with what it mounts if that is not plain.
pub(crate) fn shown(backend: Backend, form: Form) -> String {
    match (backend, form) {
        (Backend::InodeShare, Form::Lz4) => format!("{backend}, packs compressed with LZ4"),
        _ => backend.to_string(),
    }
}
