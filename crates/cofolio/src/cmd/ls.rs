use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use cofolio_erofs::read::Inode;
use serde_json::{Value, json};

use crate::cmd::Outcome;
use crate::context::Context;
use crate::image::{self, Opened, kind_word, mode_text};
use crate::ui::{Cell, Table, Tone, date, printable};

/// List a directory inside an image, without mounting it
///
/// Names go to a terminal with control characters escaped, and to a pipe as they are.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio ls -l redis:7.0.15 /usr/local/bin\n  \
    cofolio ls -R ./rootfs.erofs / | wc -l")]
pub(crate) struct Args {
    /// Ref, first digits of a digest, or path of an EROFS image file
    image: String,
    /// Path inside the image
    #[arg(default_value = "/")]
    path: PathBuf,
    /// Show mode, links, owner, size and time
    #[arg(short, long)]
    long: bool,
    /// List everything below the path, with full paths
    #[arg(short = 'R', long)]
    recursive: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    use std::os::unix::ffi::OsStrExt;
    let opened = image::open(context, &args.image, None)?;
    let path = args.path.as_os_str().as_bytes();
    let start = opened.resolve(path, !args.long || path.ends_with(b"/"))?;

    let mut lister =
        Lister { opened: &opened, args, context, rows: Vec::new(), listed: Vec::new() };
    if !start.is_dir() {
        lister.entry(path, &start)?;
    } else if args.recursive {
        let base = path.strip_suffix(b"/").unwrap_or(path);
        let mut walk = opened.image.walk_from(start);
        while let Some(found) = walk.advance()? {
            lister.entry(&[base, found.path].concat(), &found.inode)?;
        }
    } else {
        for entry in opened.image.readdir(&start)? {
            let entry = entry?;
            lister.entry(&entry.name, &opened.image.inode(entry.nid)?)?;
        }
    }
    lister.finish()
}

struct Lister<'a> {
    opened: &'a Opened,
    args: &'a Args,
    context: &'a Context<'a>,
    rows: Vec<Vec<Cell>>,
    listed: Vec<Value>,
}

impl Lister<'_> {
    fn entry(&mut self, name: &[u8], inode: &Inode) -> anyhow::Result<()> {
        if self.opened.is_added(inode) {
            return Ok(());
        }
        let target = match inode.is_symlink() && (self.args.long || self.context.ui.json) {
            true => Some(self.opened.image.readlink(inode)?),
            false => None,
        };
        if self.context.ui.json {
            let object = self.opened.object(inode)?;
            self.listed.push(json!({
                "name": printable(name),
                "type": kind_word(inode.mode),
                "mode": format!("{:04o}", inode.mode & 0o7777),
                "nlink": inode.nlink,
                "uid": inode.uid,
                "gid": inode.gid,
                "size": inode.size,
                "mtime": inode.mtime,
                "target": target.as_deref().map(printable),
                "object": object.as_deref().map(printable),
            }));
            return Ok(());
        }
        if !self.args.long {
            return self.name(name);
        }
        let tone = match inode.mode & 0o170_111 {
            mode if mode & 0o170_000 == 0o040_000 => Tone::Bold,
            mode if mode & 0o170_000 == 0o100_000 && mode & 0o111 != 0 => Tone::Good,
            _ => Tone::Plain,
        };
        let is_device = matches!(inode.mode & 0o170_000, 0o020_000 | 0o060_000);
        let size = match is_device {
            true => {
                // The kernel's new_encode_dev.
                let minor = (inode.rdev & 0xff) | ((inode.rdev >> 12) & 0xfff00);
                format!("{}, {minor}", (inode.rdev >> 8) & 0xfff)
            }
            false => inode.size.to_string(),
        };
        let mut text = printable(name);
        if let Some(target) = &target {
            text = format!("{text} -> {}", printable(target));
        }
        self.rows.push(vec![
            Cell::left(mode_text(inode.mode)),
            Cell::right(inode.nlink.to_string()),
            Cell::right(inode.uid.to_string()),
            Cell::right(inode.gid.to_string()),
            Cell::right(size),
            Cell::left(date(inode.mtime)).tone(Tone::Dim),
            Cell::left(text).tone(tone),
        ]);
        Ok(())
    }

    fn name(&self, name: &[u8]) -> anyhow::Result<()> {
        let mut stdout = io::stdout().lock();
        if stdout.is_terminal() {
            stdout.write_all(printable(name).as_bytes())?;
        } else {
            stdout.write_all(name)?;
        }
        Ok(stdout.write_all(b"\n")?)
    }

    fn finish(self) -> Outcome {
        if self.context.ui.json {
            return self.context.ui.json(&self.listed);
        }
        let mut table = Table::plain();
        self.rows.into_iter().for_each(|row| table.row(row));
        self.context.ui.table(&table)
    }
}
