//! A tar writer that writes what it is told, a layout builder, and a view of what was imported.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use cofolio_erofs::read::Image;
use cofolio_erofs::tree::{Content, Tree};
use cofolio_image::error::ImportError;
use cofolio_image::export::{
    Compression, Destination, ExportError, ExportOptions, ExportReport, Exported, export,
};
use cofolio_image::import::{ImportOptions, ImportReport, import};
use cofolio_image::source::Source;
use cofolio_store::task::Task;
use cofolio_store::{DEFAULT_DOMAIN, Digest, Domain, InitOptions, Store};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

pub const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
pub const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
pub const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// One header, with all fields as plain as they come.
#[derive(Clone)]
pub struct Head<'a> {
    pub path: &'a [u8],
    pub flag: u8,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub mtime: i64,
    pub size: u64,
    pub link: &'a [u8],
    pub device: (u32, u32),
    pub prefix: &'a [u8],
    pub gnu: bool,
}

impl<'a> Head<'a> {
    pub fn new(flag: u8, path: &'a [u8]) -> Self {
        Self {
            path,
            flag,
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: 1_000_000_000,
            size: 0,
            link: b"",
            device: (0, 0),
            prefix: b"",
            gnu: false,
        }
    }

    pub fn block(&self) -> [u8; 512] {
        let mut block = [0u8; 512];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, self.path);
        put(100, format!("{:07o}\0", self.mode).as_bytes());
        put(108, &number(i128::from(self.uid), 8));
        put(116, &number(i128::from(self.gid), 8));
        put(124, &number(i128::from(self.size), 12));
        put(136, &number(i128::from(self.mtime), 12));
        put(156, &[self.flag]);
        put(157, self.link);
        put(257, if self.gnu { b"ustar  \0" } else { b"ustar\x0000" });
        put(329, format!("{:07o}\0", self.device.0).as_bytes());
        put(337, format!("{:07o}\0", self.device.1).as_bytes());
        put(345, self.prefix);
        seal(&mut block);
        block
    }
}

/// Octal if it fits, base 256 otherwise.
fn number(value: i128, width: usize) -> Vec<u8> {
    if value >= 0 && value < 1 << (3 * (width - 1)) {
        return format!("{value:0w$o}\0", w = width - 1).into_bytes();
    }
    let mut bytes = value.to_be_bytes()[16 - width..].to_vec();
    bytes[0] = if value < 0 { 0xff } else { 0x80 | bytes[0] };
    bytes
}

/// Sets the checksum.
pub fn seal(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

#[derive(Default, Clone)]
pub struct Tar(pub Vec<u8>);

impl Tar {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn data(self, data: &[u8]) -> Self {
        let mut next = self.raw(data);
        next.0.resize(next.0.len().next_multiple_of(512), 0);
        next
    }

    pub fn head(self, head: &Head<'_>) -> Self {
        let block = head.block();
        self.raw(&block)
    }

    pub fn file(self, path: &str, content: &[u8]) -> Self {
        let head = Head { size: content.len() as u64, ..Head::new(b'0', path.as_bytes()) };
        self.head(&head).data(content)
    }

    pub fn dir(self, path: &str) -> Self {
        self.head(&Head { mode: 0o755, ..Head::new(b'5', path.as_bytes()) })
    }

    pub fn symlink(self, path: &str, target: &str) -> Self {
        let link = target.as_bytes();
        self.head(&Head { mode: 0o777, link, ..Head::new(b'2', path.as_bytes()) })
    }

    pub fn link(self, path: &str, target: &str) -> Self {
        self.head(&Head { link: target.as_bytes(), ..Head::new(b'1', path.as_bytes()) })
    }

    /// A PAX header for the next entry.
    pub fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut text = Vec::new();
        for (key, value) in records {
            let body = key.len() + value.len() + 3;
            let mut length = body + 1;
            while length != body + length.to_string().len() {
                length = body + length.to_string().len();
            }
            text.extend_from_slice(format!("{length} {key}=").as_bytes());
            text.extend_from_slice(value);
            text.push(b'\n');
        }
        self.extended(b'x', &text)
    }

    pub fn extended(self, flag: u8, content: &[u8]) -> Self {
        let size = content.len() as u64;
        let gnu = flag == b'L' || flag == b'K';
        let path = if gnu { &b"././@LongLink"[..] } else { b"PaxHeaders/x" };
        self.head(&Head { size, gnu, ..Head::new(flag, path) }).data(content)
    }

    pub fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    ::zstd::encode_all(bytes, 1).unwrap()
}

pub fn sha256(bytes: &[u8]) -> String {
    let mut text = String::from("sha256:");
    for byte in Sha256::digest(bytes) {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

/// A layer as it goes into a layout.
#[derive(Clone)]
pub struct Blob {
    pub bytes: Vec<u8>,
    pub media_type: String,
    pub diff_id: String,
}

impl Blob {
    pub fn plain(tar: Vec<u8>) -> Self {
        Self { media_type: PLAIN.into(), diff_id: sha256(&tar), bytes: tar }
    }

    pub fn gzip(tar: &[u8]) -> Self {
        Self { media_type: GZIP.into(), diff_id: sha256(tar), bytes: gzip(tar) }
    }
}

/// An OCI layout on disk.
pub struct Layout(pub PathBuf);

impl Layout {
    pub fn new(path: PathBuf) -> Self {
        fs::create_dir_all(path.join("blobs/sha256")).unwrap();
        fs::write(path.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Self(path)
    }

    pub fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = sha256(bytes);
        fs::write(self.0.join("blobs/sha256").join(&digest[7..]), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    pub fn config(&self, layers: &[Blob]) -> Value {
        let diff_ids: Vec<&str> = layers.iter().map(|l| l.diff_id.as_str()).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux", "config": {"Env": ["A=b"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        self.blob(CONFIG, config.to_string().as_bytes())
    }

    pub fn manifest(&self, layers: &[Blob]) -> Value {
        let blobs: Vec<Value> = layers.iter().map(|l| self.blob(&l.media_type, &l.bytes)).collect();
        self.manifest_of(self.config(layers), blobs)
    }

    pub fn manifest_of(&self, config: Value, layers: Vec<Value>) -> Value {
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        self.blob(MANIFEST, manifest.to_string().as_bytes())
    }

    pub fn index(&self, manifests: &[Value]) {
        let index = json!({"schemaVersion": 2, "manifests": manifests});
        fs::write(self.0.join("index.json"), index.to_string()).unwrap();
    }

    pub fn image(path: PathBuf, layers: &[Blob]) -> Self {
        let layout = Self::new(path);
        let manifest = layout.manifest(layers);
        layout.index(&[manifest]);
        layout
    }

    pub fn source(&self) -> Source {
        Source::Layout { path: self.0.clone(), tag: None }
    }
}

/// A store of its own, and room for sources.
pub struct Bench {
    pub dir: tempfile::TempDir,
    pub domain: Domain,
}

impl Bench {
    pub fn new() -> Self {
        Self::at(tempfile::tempdir().unwrap())
    }

    /// In memory where there is such a place: for thousands of imports, each of which syncs.
    pub fn fast() -> Self {
        Self::at(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap())
    }

    fn at(dir: tempfile::TempDir) -> Self {
        let store =
            Store::open_or_init(&dir.path().join("store"), &InitOptions::default()).unwrap();
        let domain = store.domain_or_create(DEFAULT_DOMAIN).unwrap();
        Self { dir, domain }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn import(&self, source: &Source) -> Result<ImportReport, ImportError> {
        import(&self.domain, source, &ImportOptions::default(), &Task::default())
    }

    /// Imports an image of these layers and looks at it. Whatever the layers are: each of them must
    /// come out of the store again byte for byte.
    pub fn layers(&self, name: &str, layers: &[Blob]) -> Result<View, ImportError> {
        let layout = Layout::image(self.path(name), layers);
        let report = self.import(&layout.source())?;
        self.check_export(&report, layers);
        Ok(self.view(&report))
    }

    /// Exports what an import made; the result is a layout at `to`.
    pub fn export(
        &self,
        name: &str,
        to: &Path,
        compression: Compression,
    ) -> Result<ExportReport, ExportError> {
        let record = self.domain.get_ref(name).unwrap().unwrap();
        let exported =
            Exported { image: &record.image, record: Some(&record), name: Some("exported:1") };
        let destination = Destination::Layout { path: to.to_owned(), tag: None };
        let options = ExportOptions { compression, threads: 2, ..Default::default() };
        export(&self.domain, exported, &destination, &options, &Task::default())
    }

    fn check_export(&self, report: &ImportReport, layers: &[Blob]) {
        let to = self.path("exported");
        let exported = self.export(&report.name, &to, Compression::None).unwrap();
        assert_eq!(exported.layers.len(), layers.len());
        for (layer, blob) in exported.layers.iter().zip(layers) {
            let bytes = fs::read(to.join("blobs/sha256").join(layer.digest.hex())).unwrap();
            // The same digest is the same archive.
            assert_eq!(sha256(&bytes), blob.diff_id);
        }
        fs::remove_dir_all(to).unwrap();
    }

    /// One layer.
    pub fn tar(&self, tar: Tar) -> Result<View, ImportError> {
        let name = format!("image-{}", &sha256(&tar.0)[7..20]);
        self.layers(&name, &[Blob::plain(tar.end())])
    }

    pub fn view(&self, report: &ImportReport) -> View {
        let image: Digest = report.image;
        let path = self.domain.image_path(&image).unwrap();
        let tree = Image::open(fs::read(path).unwrap().as_slice()).unwrap().to_tree().unwrap();
        View::of(&tree, &self.domain)
    }

    /// The object with this content takes no more than `bytes` (and what its filesystem adds).
    pub fn is_sparse(&self, content: &[u8], bytes: u64) {
        use std::os::unix::fs::MetadataExt;
        let digest = cofolio_store::verity::digest(content);
        let meta = fs::metadata(self.domain.object_path(&digest).unwrap()).unwrap();
        let allocated = meta.blocks() * 512;
        // xfs allocates ahead of a writer, fs-verity keeps its digests behind the content.
        let xfs = rustix::fs::statfs(self.dir.path()).unwrap().f_type == 0x5846_5342;
        let more = if xfs { 256 << 10 } else { 4096 + meta.len() / 100 };
        assert!(allocated <= bytes + more, "{allocated} bytes of {} on disk", meta.len());
    }

    /// Everything in the store, with sizes.
    pub fn listing(&self) -> Vec<(PathBuf, u64)> {
        let mut found = Vec::new();
        list(&self.path("store"), &mut found);
        found.sort();
        found
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Objects may be immutable: they could not be removed.
        let _ = Command::new("chattr").args(["-R", "-f", "-i"]).arg(self.path("store")).output();
    }
}

fn list(dir: &Path, found: &mut Vec<(PathBuf, u64)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let meta = entry.metadata().unwrap();
        if meta.is_dir() {
            found.push((entry.path(), 0));
            list(&entry.path(), found);
        } else {
            found.push((entry.path(), meta.len()));
        }
    }
}

/// What one name shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: (i64, u32),
    /// `dir`, `file <sha256>`, `symlink <target>`, `char <rdev>`, …
    pub what: String,
    /// Names of the same inode, for files; 0 for directories.
    pub nlink: u32,
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// First path of the inode.
    pub first: String,
}

/// An imported image, by path; `/` is the root. Paths are shown escaped.
#[derive(Debug)]
pub struct View(pub BTreeMap<String, Node>);

impl View {
    pub fn of(tree: &Tree, domain: &Domain) -> Self {
        let mut nodes = BTreeMap::new();
        let mut firsts = BTreeMap::new();
        let mut add = |path: String, inode| {
            let meta = tree.meta(inode);
            let first = firsts.entry(inode).or_insert_with(|| path.clone()).clone();
            let what = match tree.content(inode) {
                Content::Directory => "dir".into(),
                Content::Symlink(target) => format!("symlink {}", target.escape_ascii()),
                Content::Inline(bytes) => {
                    assert!(bytes.is_empty(), "{path}: inlined");
                    format!("file {}", sha256(bytes))
                }
                Content::External { size, digest, .. } => {
                    let object = domain.object_path(&Digest(*digest.unwrap())).unwrap();
                    let content = fs::read(object).unwrap();
                    assert_eq!(content.len() as u64, size, "{path}");
                    format!("file {}", sha256(&content))
                }
                Content::CharDevice(rdev) => format!("char {rdev:#x}"),
                Content::BlockDevice(rdev) => format!("block {rdev:#x}"),
                Content::Fifo => "fifo".into(),
                Content::Socket => "socket".into(),
            };
            let nlink = if tree.is_dir(inode) { 0 } else { tree.nlink(inode) };
            let xattrs = tree
                .xattrs(inode)
                .map(|(name, value)| (name.escape_ascii().to_string(), value.to_vec()))
                .collect();
            let mtime = (meta.mtime, meta.mtime_nsec);
            let (mode, uid, gid) = (meta.mode & 0o7777, meta.uid, meta.gid);
            nodes.insert(path, Node { mode, uid, gid, mtime, what, nlink, xattrs, first });
        };
        add("/".into(), tree.root());
        for visit in tree.walk() {
            add(tree.path(visit.entry).escape_ascii().to_string(), visit.inode);
        }
        Self(nodes)
    }

    pub fn get(&self, path: &str) -> &Node {
        self.0.get(path).unwrap_or_else(|| panic!("no {path} in {:?}", self.paths()))
    }

    pub fn paths(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    pub fn has(&self, path: &str) -> bool {
        self.0.contains_key(path)
    }

    pub fn is_file(&self, path: &str, content: &[u8]) -> bool {
        self.get(path).what == format!("file {}", sha256(content))
    }
}

/// Whether a program is there; says SKIP if not.
pub fn have(test: &str, program: &str) -> bool {
    // mkcomposefs has no --version, but answers.
    let there = Command::new(program).arg("--version").output().is_ok();
    if !there {
        println!("SKIP {test}: no {program}");
    }
    there
}

pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIP {test}: needs root");
    }
    root
}

/// Runs a program and returns its output; panics if it fails.
pub fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// A small generator of numbers: the same seed, the same run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
