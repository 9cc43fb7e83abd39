//! `mkcomposefs`, argument for argument: so that other projects' scripts and test suites can be pointed
//! at Cofolio. Used as `cofolio mkcomposefs …`, or by calling the binary by that name.
//!
//! Exit code 0 or 1, the digest on standard output, messages on standard error, as mkcomposefs 1.0.8
//! has them. One difference is meant: hard links inside a directory stay hard links, where mkcomposefs
//! makes separate files of them (github.com/composefs/composefs issue 444).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use cofolio_erofs::write::WriteOptions;
use cofolio_image::tree_scan::ScanOptions;
use cofolio_store::task::Task;

use crate::compose;

/// Long options: name, and whether a value follows.
const OPTIONS: [(&str, bool); 11] = [
    ("skip-xattrs", false),
    ("user-xattrs", false),
    ("skip-devices", false),
    ("use-epoch", false),
    ("digest-store", true),
    ("print-digest", false),
    ("print-digest-only", false),
    ("from-file", false),
    ("max-version", true),
    ("min-version", true),
    ("threads", true),
];

#[derive(Debug, Default, PartialEq, Eq)]
struct Arguments {
    skip_xattrs: bool,
    user_xattrs: bool,
    skip_devices: bool,
    use_epoch: bool,
    digest_store: Option<PathBuf>,
    print_digest: bool,
    print_digest_only: bool,
    from_file: bool,
    min_version: i64,
    max_version: i64,
    threads: usize,
    source: OsString,
    /// Absent with `print_digest_only`.
    image: Option<OsString>,
}

/// Why the arguments were refused: a message, the usage, or both.
#[derive(Debug, PartialEq, Eq)]
struct Refused {
    message: String,
    usage: bool,
}

impl Refused {
    fn message(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: false }
    }

    fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: true }
    }
}

/// Run with the arguments after the program's name.
pub(crate) fn main(args: &[OsString]) -> ExitCode {
    let arguments = match parse(args) {
        Ok(arguments) => arguments,
        Err(refused) => {
            let mut text = refused.message;
            if !text.is_empty() {
                text.push('\n');
            }
            if refused.usage {
                text.push_str(&usage());
            }
            let _ = io::stderr().write_all(text.as_bytes());
            return ExitCode::FAILURE;
        }
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "mkcomposefs: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> String {
    format!(
        "Usage: mkcomposefs [OPTIONS] SOURCE IMAGE\n\
         Options:\n\
         \x20 --digest-store=PATH   Store content files in this directory\n\
         \x20 --use-epoch           Make all mtimes zero\n\
         \x20 --skip-devices        Don't store device nodes\n\
         \x20 --skip-xattrs         Don't store file xattrs\n\
         \x20 --user-xattrs         Only store user.* xattrs\n\
         \x20 --print-digest        Print the digest of the image\n\
         \x20 --print-digest-only   Print the digest of the image, don't write image\n\
         \x20 --from-file           The source is a dump file, not a directory\n\
         \x20 --min-version=N       Use this minimal format version (default=0)\n\
         \x20 --max-version=N       Use this maximum format version (default=1)\n\
         \x20 --threads=N           Use this to override the default number of threads used to \
         calculate digest and copy files (default={})\n",
        compose::default_threads()
    )
}

/// Read arguments as `getopt_long` does: options may follow operands, long options may be cut short
/// where that is unambiguous, `--` ends them.
fn parse(args: &[OsString]) -> Result<Arguments, Refused> {
    let mut arguments =
        Arguments { threads: compose::default_threads() as usize, ..Arguments::default() };
    let mut versions = None;
    let mut operands: Vec<&OsStr> = Vec::new();
    let mut args = args.iter().map(OsString::as_os_str);
    while let Some(arg) = args.next() {
        let bytes = arg.as_bytes();
        if bytes == b"--" {
            operands.extend(args);
            break;
        }
        if bytes == b"-" || !bytes.starts_with(b"-") {
            operands.push(arg);
            // POSIX says that options end at the first operand; GNU does so only when asked.
            if std::env::var_os("POSIXLY_CORRECT").is_some() {
                operands.extend(args);
                break;
            }
            continue;
        }
        let Some(long) = bytes.strip_prefix(b"--") else { return Err(Refused::usage("")) };
        let (name, value) = match long.iter().position(|&b| b == b'=') {
            Some(at) => (&long[..at], Some(OsStr::from_bytes(&long[at + 1..]))),
            None => (long, None),
        };
        let Some((name, takes_value)) = find_option(name) else { return Err(Refused::usage("")) };
        let value = match (takes_value, value) {
            (false, Some(_)) => return Err(Refused::usage("")),
            (false, None) => OsStr::new(""),
            (true, Some(value)) => value,
            (true, None) => args.next().ok_or_else(|| Refused::message("option needs a value"))?,
        };
        let number = |what: &str| {
            strtol(value.as_bytes()).ok_or_else(|| {
                Refused::message(format!("Invalid {what} {}", value.to_string_lossy()))
            })
        };
        match name {
            "skip-xattrs" => arguments.skip_xattrs = true,
            "user-xattrs" => arguments.user_xattrs = true,
            "skip-devices" => arguments.skip_devices = true,
            "use-epoch" => arguments.use_epoch = true,
            "digest-store" => arguments.digest_store = Some(value.into()),
            "print-digest" => arguments.print_digest = true,
            "print-digest-only" => {
                arguments.print_digest = true;
                arguments.print_digest_only = true;
            }
            "from-file" => arguments.from_file = true,
            "min-version" => versions.get_or_insert((0, 0)).0 = number("min version")?,
            "max-version" => versions.get_or_insert((0, 0)).1 = number("max version")?,
            _ => {
                let threads = number("threads count")?;
                arguments.threads = usize::try_from(threads)
                    .ok()
                    .filter(|&threads| threads > 0)
                    .ok_or_else(|| Refused::message(format!("Invalid threads count {threads}")))?;
            }
        }
    }
    (arguments.min_version, arguments.max_version) = versions.unwrap_or((0, 1));

    let mut operands = operands.into_iter();
    let source = operands.next().ok_or_else(|| Refused::usage("No source path specified"))?;
    if source.is_empty() {
        return Err(Refused::message("mkcomposefs: Empty source path specified"));
    }
    arguments.source = source.to_owned();
    arguments.image = operands.next().map(OsStr::to_owned);
    if operands.next().is_some() {
        return Err(Refused::usage("Too many arguments"));
    }
    match (&arguments.image, arguments.print_digest_only) {
        (None, false) => Err(Refused::usage("No destination path specified")),
        (Some(_), true) => {
            Err(Refused::usage("Cannot specify destination path with --print-digest-only"))
        }
        _ => Ok(arguments),
    }
}

/// The option of that name, or the only one that begins with it.
fn find_option(name: &[u8]) -> Option<(&'static str, bool)> {
    if let Some(exact) = OPTIONS.iter().find(|(option, _)| option.as_bytes() == name) {
        return Some(*exact);
    }
    let mut matching = OPTIONS.iter().filter(|(option, _)| option.as_bytes().starts_with(name));
    let first = matching.next()?;
    matching.next().is_none().then_some(*first)
}

/// `strtol` with nothing behind the number: leading blanks and a sign are fine, too large is cut.
fn strtol(text: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?;
    let text = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let limit = if text.starts_with('-') { i64::MIN } else { i64::MAX };
    Some(text.parse().unwrap_or(limit))
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    // Opened before the source is looked at, as mkcomposefs does.
    let mut sink: Box<dyn Write> = match arguments.image.as_deref() {
        None => Box::new(io::sink()),
        Some(image) if image == "-" => {
            let stdout = io::stdout();
            anyhow::ensure!(!stdout.is_terminal(), "stdout is a tty.  Refusing to use it");
            Box::new(stdout.lock())
        }
        Some(image) => Box::new(File::create(image).context("failed to open output file")?),
    };

    let tree = if arguments.from_file {
        compose::tree_from_dump(arguments.source.as_ref())?
    } else {
        anyhow::ensure!(
            !(arguments.skip_xattrs && arguments.user_xattrs),
            "error accessing {}: Invalid argument (--skip-xattrs contradicts --user-xattrs)",
            arguments.source.display()
        );
        let options = ScanOptions {
            skip_xattrs: arguments.skip_xattrs,
            user_xattrs: arguments.user_xattrs,
            skip_devices: arguments.skip_devices,
            use_epoch: arguments.use_epoch,
            threads: arguments.threads,
            ..ScanOptions::like_mkcomposefs()
        };
        let source: &Path = arguments.source.as_ref();
        // mkcomposefs does not follow the source itself.
        if source.symlink_metadata().is_ok_and(|meta| meta.is_symlink()) {
            anyhow::bail!("cannot write file: {} is a symbolic link", source.display());
        }
        let store = arguments.digest_store.as_deref();
        compose::tree_from_directory(source, &options, store, &Task::default())?
    };

    // mkcomposefs keeps versions in 32 bits without a sign, so a negative one is simply too large.
    let version = |number: i64| u32::try_from(number).unwrap_or(u32::MAX);
    let options = WriteOptions {
        min_version: version(arguments.min_version),
        max_version: version(arguments.max_version),
    };
    let (_, digest) =
        compose::write_image(&tree, &options, &mut sink).context("cannot write file")?;
    if arguments.print_digest {
        drop(sink);
        writeln!(io::stdout(), "{digest}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Arguments, Refused> {
        parse(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn options_as_getopt_long_reads_them() {
        let a = parsed(&["--from-file", "a", "--print-digest", "b", "--threads", "3"]).unwrap();
        assert!(a.from_file && a.print_digest && !a.print_digest_only);
        assert_eq!(
            (a.threads, a.source.to_str(), a.image.as_deref()),
            (3, Some("a"), Some("b".as_ref()))
        );
        // Cut short, value behind an equals sign, operand that looks like an option.
        let a = parsed(&["--digest=x", "--min=1", "--", "-a", "b"]).unwrap();
        assert_eq!(a.digest_store, Some("x".into()));
        assert_eq!((a.min_version, a.max_version, a.source.to_str()), (1, 0, Some("-a")));
        let a = parsed(&["--print-digest-only", "-"]).unwrap();
        assert!(a.print_digest_only && a.image.is_none());
        assert_eq!((a.min_version, a.max_version), (0, 1));
    }

    #[test]
    fn refusals_say_what_mkcomposefs_says() {
        let usage = |args: &[&str], message: &str| {
            assert_eq!(parsed(args), Err(Refused::usage(message)), "{args:?}");
        };
        let message = |args: &[&str], message: &str| {
            assert_eq!(parsed(args), Err(Refused::message(message)), "{args:?}");
        };
        usage(&[], "No source path specified");
        usage(&["a"], "No destination path specified");
        usage(&["a", "b", "c"], "Too many arguments");
        usage(
            &["a", "b", "--print-digest-only"],
            "Cannot specify destination path with --print-digest-only",
        );
        usage(&["--print", "a", "b"], "");
        usage(&["--skip", "a", "b"], "");
        usage(&["--from-file=x", "a", "b"], "");
        usage(&["--unknown", "a", "b"], "");
        usage(&["-C", "a", "b"], "");
        message(&["a", "b", "--threads"], "option needs a value");
        message(&["a", "b", "--threads=0"], "Invalid threads count 0");
        message(&["a", "b", "--threads=x"], "Invalid threads count x");
        message(&["a", "b", "--min-version="], "Invalid min version ");
        message(&["a", "b", "--max-version=1x"], "Invalid max version 1x");
        message(&["", "b"], "mkcomposefs: Empty source path specified");
    }

    #[test]
    fn numbers_as_strtol_reads_them() {
        assert_eq!(strtol(b" +5"), Some(5));
        assert_eq!(strtol(b"-3"), Some(-3));
        assert_eq!(strtol(b"99999999999999999999"), Some(i64::MAX));
        for bad in [&b""[..], b" ", b"+", b"1 ", b"0x1", b"\xff"] {
            assert_eq!(strtol(bad), None);
        }
    }
}
