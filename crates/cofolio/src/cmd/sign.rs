use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cofolio_image::export::{ExportError, OutputFile};
use cofolio_image::files;
use cofolio_image::trust::{self, PublicKey, Record, SigningKey};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};

/// Longest file with a signature that is read, in bytes: enough to say that it is too long.
const SIGNATURE_FILE_MAX: u64 = 4096;

/// Sign an image, or keep a signature that was made elsewhere
///
/// What is signed is the image's digest and that of its config, which says what is run: three lines of text that
/// --message prints (docs/SIGNATURES.md). The signature is ed25519, kept in the store beside the image as long as
/// the image is, and says nothing before somebody asks for it: with --trust or in the configuration's [trust].
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  openssl genpkey -algorithm ed25519 -out key.pem && \
    openssl pkey -in key.pem -pubout -out pub.pem\n  \
    cofolio sign redis:7.0.15 --key key.pem -o redis.sig\n  \
    cofolio sign redis:7.0.15 --attach redis.sig --key pub.pem\n  \
    cofolio mount redis:7.0.15 /mnt --trust pub.pem")]
pub(crate) struct Args {
    /// Ref or first digits of a digest
    image: String,
    /// PEM file with the private key (PKCS#8); with --attach, with public keys, one of which has signed
    #[arg(long, value_name = "FILE", required_unless_present = "message")]
    key: Option<PathBuf>,
    /// Also write the signature (64 bytes) to this file, which must not exist
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Keep this signature, made elsewhere, if it is one of the image by the key
    #[arg(long, value_name = "FILE", conflicts_with = "output")]
    attach: Option<PathBuf>,
    /// Print what is to be signed, to sign it elsewhere
    #[arg(long, conflicts_with_all = ["key", "attach", "output"])]
    message: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let image = context.image(&domain, &args.image)?;
    let config = image.record.as_ref().and_then(|record| record.config.as_deref());
    let Some(key) = &args.key else {
        context.refuse_json("what is signed is what is printed")?;
        let message = trust::message(&image.digest, trust::config_digest(config).as_deref());
        std::io::stdout().lock().write_all(&message)?;
        return Ok(Exit::Ok);
    };
    let (record, by) = match &args.attach {
        Some(file) => {
            let signature = read_signature(file)?;
            let keys = PublicKey::read(key)?;
            let record = Record::of_signature(&image.digest, config, &signature, &keys)
                .with_context(|| file.display().to_string())?;
            let sign = |key: &&PublicKey| {
                Record::of_signature(&image.digest, config, &signature, [*key]).is_ok()
            };
            (record, keys.iter().find(sign).map_or_else(String::new, ToString::to_string))
        }
        None => {
            let key = SigningKey::read(key)?;
            if let Some(mode) = key.exposed {
                let shown = args.key.as_deref().unwrap_or(Path::new("")).display();
                let what = format!("warning: {shown} can be read by others (mode {mode:04o})");
                context.ui.error(&what, Some("`chmod 600` keeps it to its owner"));
            }
            (Record::sign(&image.digest, config, &key), key.public().to_string())
        }
    };
    let signature = record.signature();
    if let Some(file) = &args.output {
        let output = OutputFile::create(file, false).map_err(|error| match error {
            ExportError::Exists { .. } => Fail::usage(error.to_string()).into(),
            other => anyhow::Error::from(other),
        })?;
        output
            .file()
            .write_all(signature)
            .with_context(|| format!("writing {}", file.display()))?;
        output.publish()?;
    }
    record.keep(&domain, &image.digest)?;
    if context.ui.json {
        context.ui.json(&json!({"image": image.digest, "signature": record}))?;
    } else {
        let config = record.config().unwrap_or("none");
        let shown = image.shown();
        context.ui.note(format!("{shown} ({}) with config {config}: signed by {by}", image.digest));
    }
    Ok(Exit::Ok)
}

/// Reads a signature file. The caller checks its length and content.
pub(crate) fn read_signature(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut signature = Vec::new();
    let read = files::open(path)
        .and_then(|file| file.take(SIGNATURE_FILE_MAX).read_to_end(&mut signature));
    match read {
        Ok(_) => Ok(signature),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Fail::not_found(format!("no signature {}", path.display())).into())
        }
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}
