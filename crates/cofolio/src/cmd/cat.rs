use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};
use crate::image::{self, kind_word};
use crate::ui::printable;

/// Print files of an image, without mounting it
///
/// Symbolic links are followed within the image. Content is compared with its digest: of files up to 16 MiB before
/// anything is printed, of larger ones while they are; exit code 4 if it differs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio cat redis:7.0.15 /etc/os-release\n  \
    cofolio cat ./rootfs.erofs /etc/passwd --objects objects")]
pub(crate) struct Args {
    /// Ref, first digits of a digest, or path of an EROFS image file
    image: String,
    /// Paths inside the image
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Object directory of an image file that is not the store's
    #[arg(long, value_name = "DIR")]
    objects: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.refuse_json("a file's content goes out as it is; `ls --json` describes files")?;
    let opened = image::open(context, &args.image, args.objects.as_deref())?;
    let mut stdout = io::stdout().lock();
    for path in &args.paths {
        let path = path.as_os_str().as_bytes();
        let inode = opened.resolve(path, true)?;
        if !inode.is_file() {
            let what = format!("`{}` is a {}, not a file", printable(path), kind_word(inode.mode));
            return Err(Fail::new(Exit::Failure, what).into());
        }
        opened.copy_to(&inode, &mut stdout)?;
    }
    Ok(Exit::Ok)
}
