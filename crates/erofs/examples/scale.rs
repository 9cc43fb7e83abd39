//! How long and how large: builds a tree of N files in memory, writes its image, and says what it
//! took. `cargo run --release -p cofolio-erofs --example scale -- 100000` (or 1000000).
//!
//! The tree is like an image's: 12 names to a directory on average, every file an object with a
//! digest of its own, a security label on everything. With `text` as the second argument also dump
//! text and back, with `read` also the image and back.

use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::time::{Duration, Instant};

use cofolio_erofs::dump;
use cofolio_erofs::read::Image;
use cofolio_erofs::tree::{Content, Meta, Tree, TreeError};
use cofolio_erofs::write::{WriteOptions, write};

fn main() -> Result<(), Box<dyn Error>> {
    let files: u64 = std::env::args().nth(1).ok_or("how many files?")?.parse()?;
    let also = std::env::args().nth(2).unwrap_or_default();
    let mut out = io::stdout().lock();
    let start = Clock::start();
    let tree = build(files)?;
    let took = start.elapsed();
    writeln!(out, "tree:  {} inodes built in {took}, peak {:.1} MB", tree.inode_count(), peak())?;
    let start = Clock::start();
    let report = write(&tree, &WriteOptions::default(), io::sink())?;
    let took = start.elapsed();
    writeln!(
        out,
        "image: {:.1} MB written in {took}, peak {:.1} MB",
        megabytes(report.bytes),
        peak()
    )?;
    if also == "text" {
        let start = Clock::start();
        let mut text = Vec::new();
        dump::write(&tree, &mut text)?;
        let written = start.elapsed();
        let start = Clock::start();
        dump::parse(&text[..])?;
        let mb = megabytes(text.len() as u64);
        writeln!(out, "text:  {mb:.1} MB written in {written}, read in {}", start.elapsed())?;
    }
    if also == "read" {
        let mut bytes = Vec::new();
        write(&tree, &WriteOptions::default(), &mut bytes)?;
        let start = Clock::start();
        let image = Image::open(&bytes)?;
        let mut walk = image.walk()?;
        let mut names = 0;
        while walk.advance()?.is_some() {
            names += 1;
        }
        let walked = start.elapsed();
        let start = Clock::start();
        image.to_tree()?;
        writeln!(out, "read:  {names} names walked in {walked}, to a tree in {}", start.elapsed())?;
    }
    Ok(())
}

fn build(files: u64) -> Result<Tree, TreeError> {
    let meta = |mode| Meta { mode, uid: 0, gid: 0, mtime: 1_700_000_000, mtime_nsec: 0 };
    let label: [(&[u8], &[u8]); 1] =
        [(b"security.selinux", b"system_u:object_r:container_file_t:s0\0")];
    let mut tree = Tree::new(meta(0o755));
    tree.set_xattrs(tree.root(), label)?;
    let mut dirs = vec![tree.root()];
    for i in 0..files {
        let mut hasher = DefaultHasher::new();
        i.hash(&mut hasher);
        let random = hasher.finish();
        // Below 2^64 modulo the number of directories: an index.
        let dir = dirs[usize::try_from(random % dirs.len() as u64).unwrap_or(0)];
        let name = format!("{}-{i:x}", if i % 3 == 0 { "libsomething.so" } else { "index" });
        let inode = if i % 12 == 0 {
            let sub = tree.insert(dir, name.as_bytes(), meta(0o755), Content::Directory)?;
            dirs.push(sub);
            sub
        } else {
            let mut digest = [0; 32];
            for (k, part) in digest.chunks_exact_mut(8).enumerate() {
                part.copy_from_slice(
                    &random.rotate_left(8 * u32::try_from(k).unwrap_or(0)).to_le_bytes(),
                );
            }
            let mut meta = meta(0o644);
            meta.mtime_nsec = u32::try_from(random % 1_000_000_000).unwrap_or(0);
            tree.insert(dir, name.as_bytes(), meta, Content::object(1 + i, &digest))?
        };
        tree.set_xattrs(inode, label)?;
    }
    Ok(tree)
}

/// Time on the clock and time on a processor: the second is what counts on a busy machine.
struct Clock(Instant, Duration);

impl Clock {
    fn start() -> Clock {
        Clock(Instant::now(), on_processor())
    }

    fn elapsed(&self) -> String {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let used = on_processor().saturating_sub(self.1);
        format!("{:.3} ms ({:.3} ms of CPU)", ms(self.0.elapsed()), ms(used))
    }
}

/// Processor time of this process; 0 where the kernel does not say.
fn on_processor() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanos = stat.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    Duration::from_nanos(nanos)
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// The most memory that the process had, in megabytes; 0 where the kernel does not say.
fn peak() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib: f64 = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0.0);
    kib * 1024.0 / 1e6
}
