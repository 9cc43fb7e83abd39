//! An image of a million entries, and what importing it costs.
//!
//!     cargo run --release -p cofolio-image --example million -- DIR [ENTRIES [LAYERS]]
//!
//! Makes `DIR/image-<entries>-<layers>` (an OCI layout with gzip layers; kept, and used again),
//! imports it into a fresh store `DIR/store`, prints time and peak memory (`VmHWM`). The promise is
//! 200 MB at a million entries; the program fails if it is broken.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use cofolio_image::import::{ImportOptions, import};
use cofolio_image::limits::Limits;
use cofolio_image::source::Source;
use cofolio_store::task::Task;
use cofolio_store::{DEFAULT_DOMAIN, InitOptions, Store};
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

/// Peak memory that is promised, in KiB.
const PEAK_MAX_KIB: u64 = 200_000;
/// Entries of one directory.
const PER_DIR: u64 = 50;

#[allow(clippy::print_stdout, reason = "a program that prints")]
fn main() -> Result<(), Box<dyn Error>> {
    // As `cofolio` does.
    cofolio_sys::memory::return_large_blocks();
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: million DIR [ENTRIES [LAYERS]]")?;
    let entries: u64 = args.next().map_or(Ok(1_000_000), |n| n.parse())?;
    let layers: u64 = args.next().map_or(Ok(1), |n| n.parse())?;
    let dir = Path::new(&dir);
    let image = dir.join(format!("image-{entries}-{layers}"));
    if !image.join("index.json").is_file() {
        make(&image, entries, layers)?;
    }
    let path = dir.join("store");
    let before = peak_kib()?;
    let store = Store::open_or_init(&path, &InitOptions::default())?;
    let domain = store.domain_or_create(DEFAULT_DOMAIN)?;
    let started = Instant::now();
    let limits = Limits::default();
    let options = ImportOptions { limits, ..ImportOptions::default() };
    let source = Source::Layout { path: image, tag: None };
    let report = import(&domain, &source, &options, &Task::default())?;
    let peak = peak_kib()?;
    println!(
        "{} entries in {layers} layers, {} objects, image {} MiB: {:.1} s, VmHWM {peak} kB (before the \
         import {before} kB)",
        report.entries,
        report.objects_new,
        report.image_bytes >> 20,
        started.elapsed().as_secs_f64(),
    );
    let _ = Command::new("chattr").args(["-R", "-f", "-i"]).arg(&path).output();
    fs::remove_dir_all(&path)?;
    if peak > PEAK_MAX_KIB && entries <= 1_000_000 {
        return Err(format!("more than {PEAK_MAX_KIB} kB").into());
    }
    Ok(())
}

fn peak_kib() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// Passes bytes on and hashes them.
struct Tee<W> {
    inner: W,
    hasher: Sha256,
    size: u64,
}

impl<W: Write> Tee<W> {
    fn new(inner: W) -> Self {
        Self { inner, hasher: Sha256::new(), size: 0 }
    }

    fn hex(self) -> String {
        self.hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl<W: Write> Write for Tee<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        self.size += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn make(image: &Path, entries: u64, layers: u64) -> Result<(), Box<dyn Error>> {
    let blobs = image.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let mut descriptors = Vec::new();
    let mut diff_ids = Vec::new();
    for layer in 0..layers {
        let part = blobs.join("part");
        let file = Tee::new(BufWriter::new(File::create(&part)?));
        let mut tar = Tee::new(GzEncoder::new(file, Compression::fast()));
        let first = layer * entries / layers;
        for at in first..(layer + 1) * entries / layers {
            entry(&mut tar, at)?;
        }
        tar.write_all(&[0; 1024])?;
        let Tee { inner, hasher, .. } = tar;
        let diff_id: String = hasher.finalize().iter().map(|b| format!("{b:02x}")).collect();
        diff_ids.push(format!("\"sha256:{diff_id}\""));
        let mut file = inner.finish()?;
        file.flush()?;
        let size = file.size;
        let digest = file.hex();
        fs::rename(&part, blobs.join(&digest))?;
        descriptors.push(format!(
            r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:{digest}","size":{size}}}"#
        ));
    }
    let blob = |text: &str| -> io::Result<String> {
        let digest: String = Sha256::digest(text).iter().map(|b| format!("{b:02x}")).collect();
        fs::write(blobs.join(&digest), text)?;
        Ok(format!(r#""digest":"sha256:{digest}","size":{}"#, text.len()))
    };
    let config = blob(&format!(
        r#"{{"os":"linux","architecture":"amd64","rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        diff_ids.join(",")
    ))?;
    let manifest = blob(&format!(
        r#"{{"schemaVersion":2,"config":{{"mediaType":"application/vnd.oci.image.config.v1+json",{config}}},"layers":[{}]}}"#,
        descriptors.join(",")
    ))?;
    fs::write(image.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    fs::write(
        image.join("index.json"),
        format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"application/vnd.oci.image.manifest.v1+json",{manifest}}}]}}"#
        ),
    )?;
    Ok(())
}

/// Every fiftieth entry is a directory for those after it; the others are files of 70 to 200 bytes,
/// all different, one in ten with a capability.
fn entry(tar: &mut impl Write, at: u64) -> io::Result<()> {
    let dir = format!("usr/share/d{:03}/package-{:06}", at / 50_000, at / PER_DIR);
    let (path, flag, content) = if at.is_multiple_of(PER_DIR) {
        (format!("{dir}/"), b'5', String::new())
    } else {
        let content = format!("{at:070}").repeat(1 + usize::try_from(at % 2).unwrap_or(0));
        (format!("{dir}/some-file-{at}.py"), b'0', content)
    };
    if at % 10 == 3 {
        let record = "41 SCHILY.xattr.user.note=of all of them\n";
        header(tar, "PaxHeaders/x", b'x', record.len(), at)?;
        padded(tar, record.as_bytes())?;
    }
    header(tar, &path, flag, content.len(), at)?;
    padded(tar, content.as_bytes())
}

fn header(tar: &mut impl Write, path: &str, flag: u8, size: usize, at: u64) -> io::Result<()> {
    let mut block = [0u8; 512];
    let mut put = |from: usize, text: &[u8]| block[from..from + text.len()].copy_from_slice(text);
    put(0, path.as_bytes());
    put(100, if flag == b'5' { b"0000755\0" } else { b"0000644\0" });
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, format!("{:011o}\0", 1_600_000_000 + at).as_bytes());
    put(148, b"        ");
    put(156, &[flag]);
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar.write_all(&block)
}

fn padded(tar: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    tar.write_all(bytes)?;
    tar.write_all(&[0; 512][..bytes.len().next_multiple_of(512) - bytes.len()])
}
