//! Dump text made at random: small trees full of edges.

use std::fmt::Write;

/// SplitMix64: one number is all of its state, so that a seed in a failure message is a test case.
#[derive(Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn index(&mut self, n: usize) -> usize {
        usize::try_from(self.below(n as u64)).unwrap()
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let other = self.index(i + 1);
            items.swap(i, other);
        }
    }
}

const SIZES: [u64; 20] = [
    1,
    4095,
    4096,
    4097,
    65_536,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    (1 << 32) + 1,
    1 << 43,
    (1 << 43) + 1,
    3 << 43,
    9 << 43,
    513 << 43,
    1000 << 43,
    1015 << 43,
    1016 << 43,
    1017 << 43,
    1023 << 43,
    1024 << 43,
];
const INLINE: [usize; 14] = [0, 1, 10, 63, 64, 65, 2047, 2048, 2049, 4095, 4096, 4097, 4500, 5000];
const TARGETS: [usize; 12] = [1, 2, 20, 30, 60, 1000, 2048, 3967, 3999, 4031, 4063, 4095];
const IDS: [u32; 7] = [0, 1000, 65_535, 65_536, 1 << 31, (1 << 31) + 7, u32::MAX];
const XATTR_NAMES: [&str; 24] = [
    "user.a",
    "user.b",
    "user.",
    "trusted.foo",
    "security.selinux",
    "security.capability",
    "security.ima",
    "system.posix_acl_access",
    "system.posix_acl_default",
    "system.posix_acl_accessory",
    "system.nfs4_acl",
    "lustre.lov",
    "odd",
    "trusted.overlay.opaque",
    "trusted.overlay.whiteout",
    "trusted.overlay.redirect",
    "trusted.overlay.metacopy",
    "trusted.overlay.overlay.opaque",
    "trusted.overlay.",
    "trusted.overlayx",
    "user.overlay.redirect",
    "user.overlay.x",
    "trusted.overlay.zz",
    "user.with=and\\",
];

/// What makes one tree differ from another, chosen once per tree.
struct Mood {
    entries: u64,
    long_names: bool,
    xattr_rate: u64,
    whiteouts: bool,
    times: u64,
    digest_pool: u64,
    wide_dir: bool,
}

pub struct Generator {
    rng: Rng,
    mood: Mood,
    out: String,
    dirs: Vec<String>,
    files: Vec<String>,
    taken: std::collections::HashSet<String>,
    counter: u64,
}

/// The dump text of the tree of a seed. mkcomposefs takes all of them.
pub fn dump(seed: u64) -> String {
    let mut rng = Rng::new(seed);
    let mood = Mood {
        entries: rng.pick(&[0, 1, 3, 10, 30, 30, 100, 100, 400]),
        long_names: rng.once_in(4),
        xattr_rate: rng.pick(&[1, 2, 4, 50]),
        whiteouts: rng.once_in(2),
        times: rng.pick(&[1, 2, 5]),
        digest_pool: rng.pick(&[1, 3, 1000]),
        wide_dir: rng.once_in(6),
    };
    let mut generator = Generator {
        rng,
        mood,
        out: String::new(),
        dirs: vec![String::new()],
        files: Vec::new(),
        taken: std::collections::HashSet::new(),
        counter: 0,
    };
    generator.line("/", "40755", 0, 0, "-", "-", "-");
    for _ in 0..generator.mood.entries {
        generator.entry();
    }
    if generator.mood.wide_dir {
        for _ in 0..generator.rng.below(600) {
            let (path, _) = generator.fresh_path(1);
            generator.line(&path, "100644", 0, 0, "-", "-", "-");
        }
    }
    if generator.rng.once_in(10) {
        generator.many_xattrs();
    }
    if generator.rng.once_in(10) {
        generator.out.pop();
    }
    generator.out
}

impl Generator {
    fn entry(&mut self) {
        let (path, _) = self.fresh_path(3);
        let mode = self.rng.below(0o10000);
        let kind = self.rng.below(22);
        match kind {
            0..=4 => {
                self.line(&path, &format!("4{mode:04o}"), self.counter, 0, "-", "-", "-");
                self.dirs.push(path);
            }
            5..=8 => {
                let len = self.rng.pick(&INLINE);
                let content = self.rng.bytes(len);
                let content = if len == 0 { "-".into() } else { escape(&content) };
                self.line(&path, &format!("10{mode:04o}"), len as u64, 0, "-", &content, "-");
                self.files.push(path);
            }
            9..=14 => self.external(&path, mode),
            15..=16 => {
                let len = match self.rng.below(3) {
                    0 => self.rng.pick(&TARGETS),
                    1 => 3900 + self.rng.index(196),
                    _ => 1 + self.rng.index(80),
                };
                let target: Vec<u8> = (0..len).map(|_| self.rng.byte().max(1)).collect();
                let target = escape(&target);
                let target = if target == "-" { "\\x2d".into() } else { target };
                self.line(&path, "120777", len as u64, 0, &target, "-", "-");
                self.files.push(path);
            }
            17 => {
                let rdev = self.rng.pick(&[1, 259, 0x10_3005, u64::from(u32::MAX)]);
                let kind = self.rng.pick(&["2", "6"]);
                let size = self.rng.pick(&[0, 0, 7, 1 << 33]);
                self.line(&path, &format!("{kind}{mode:04o}"), size, rdev, "-", "-", "-");
                self.files.push(path);
            }
            18 if self.mood.whiteouts => {
                let size = self.rng.pick(&[0, 0, 3]);
                self.line(&path, &format!("2{mode:04o}"), size, 0, "-", "-", "-");
                self.files.push(path);
            }
            19 => {
                let kind = self.rng.pick(&["1", "14"]);
                self.line(&path, &format!("{kind}{mode:04o}"), 0, 0, "-", "-", "-");
                self.files.push(path);
            }
            20.. if !self.files.is_empty() => {
                let target = self.rng.index(self.files.len());
                let target = self.files[target].clone();
                let _ = writeln!(self.out, "{path} 0 @100644 1 0 0 0 0.0 {target} - -");
                self.files.push(path);
            }
            _ => {
                self.line(&path, &format!("10{mode:04o}"), 0, 0, "-", "-", "-");
                self.files.push(path);
            }
        }
    }

    fn external(&mut self, path: &str, mode: u64) {
        let size =
            if self.rng.once_in(3) { self.rng.pick(&SIZES) } else { 1 + self.rng.below(99_999) };
        let which = self.rng.below(self.mood.digest_pool);
        let digest: String = Rng::new(which).bytes(32).iter().map(|b| format!("{b:02x}")).collect();
        let object = format!("{}/{}", &digest[..2], &digest[2..]);
        let payload = match self.rng.below(10) {
            0 => "-".into(),
            1 => "/absolute/path".into(),
            2 => format!("some/path{}", self.rng.below(3)),
            3 => "ab/cdef".into(),
            4 => {
                let other: String =
                    Rng::new(0).bytes(32).iter().map(|b| format!("{b:02x}")).collect();
                format!("{}/{}", &other[..2], &other[2..])
            }
            5 => object.to_uppercase(),
            _ => object,
        };
        let digest = match self.rng.below(6) {
            0 => "-".into(),
            1 => digest.to_uppercase(),
            _ => digest,
        };
        self.line(path, &format!("10{mode:04o}"), size, 0, &payload, "-", &digest);
        self.files.push(path.into());
    }

    /// Some files with more attributes than an inode may share.
    fn many_xattrs(&mut self) {
        let names = 100 + self.rng.index(120);
        for _ in 0..3 {
            let (path, _) = self.fresh_path(3);
            let _ = write!(self.out, "{path} 0 100644 1 0 0 0 0.0 - - -");
            for i in 0..names {
                let _ = write!(self.out, " user.many{i}=v{}", i % 7);
            }
            self.out.push('\n');
        }
    }

    fn fresh_path(&mut self, recent: usize) -> (String, usize) {
        loop {
            let from = self.dirs.len().saturating_sub(recent * 4);
            let dir = if self.rng.once_in(3) { self.rng.index(self.dirs.len()) } else { from };
            let name = self.name();
            let path = format!("{}/{}", self.dirs[dir], escape(&name));
            if self.taken.insert(path.clone()) {
                return (path, dir);
            }
        }
    }

    fn name(&mut self) -> Vec<u8> {
        self.counter += 1;
        match self.rng.below(12) {
            0 => format!("{:02x}", self.rng.below(256)).into_bytes(),
            1 => {
                // Names around `.` and `..` in the order.
                let mut name = self
                    .rng
                    .pick(&["!", "-", ".!", "..!", "...", "./", "0", ".-"])
                    .replace('/', "0");
                let _ = write!(name, "{}", self.counter);
                name.into_bytes()
            }
            2 => {
                let len = 1 + self.rng.index(10);
                let name: Vec<u8> = (0..len)
                    .map(|_| match self.rng.byte() {
                        0 | b'/' => b'_',
                        byte => byte,
                    })
                    .collect();
                if name == b"." || name == b".." { b"dots".to_vec() } else { name }
            }
            3 | 4 if self.mood.long_names => {
                let len = 200 + self.rng.index(56);
                let mut name = vec![b'l'; len];
                let tail = self.counter.to_string();
                name[len - tail.len()..].copy_from_slice(tail.as_bytes());
                name
            }
            _ => {
                let stem = self.rng.pick(&["file", "lib", "x", "a-much-longer-name-of-a-file."]);
                format!("{stem}{}", self.rng.below(10_000)).into_bytes()
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one per field of the line")]
    fn line(
        &mut self,
        path: &str,
        mode: &str,
        size: u64,
        rdev: u64,
        payload: &str,
        content: &str,
        digest: &str,
    ) {
        let rng = &mut self.rng;
        let nlink = if rng.once_in(8) { rng.pick(&[0, 2, 65_535, 65_536]) } else { 1 };
        let (mut uid, mut gid) = (0, 0);
        if rng.once_in(4) {
            (uid, gid) = (rng.pick(&IDS), rng.pick(&IDS));
        }
        let (seconds, nanos) = match rng.below(self.mood.times) {
            0 => (1_700_000_000, 0),
            1 => (1_700_000_000, 1 + rng.below(999_999_999)),
            2 => (-5, rng.below(2)),
            3 => (i64::MAX, 999_999_999),
            _ => (i64::try_from(rng.below(1 << 35)).unwrap(), rng.below(1_000_000_000)),
        };
        let _ = write!(
            self.out,
            "{path} {size} {mode} {nlink} {uid} {gid} {rdev} {seconds}.{nanos} {payload} {content} {digest}"
        );
        if self.rng.once_in(self.mood.xattr_rate) {
            self.xattrs();
        }
        self.out.push('\n');
    }

    fn xattrs(&mut self) {
        for _ in 0..self.rng.below(5) {
            let name = match self.rng.below(20) {
                0 => format!("user.{}", "n".repeat(250)),
                1 => "o".repeat(255),
                2 => format!("trusted.overlay.{}", "p".repeat(239)),
                _ => self.rng.pick(&XATTR_NAMES).into(),
            };
            let value = match self.rng.below(10) {
                0 => Vec::new(),
                1 => self.rng.bytes(3000),
                2 => {
                    let len = self.rng.index(300);
                    self.rng.bytes(len)
                }
                3 => vec![b'x'],
                n => format!("value-{}", n % 3).into_bytes(),
            };
            let _ = write!(
                self.out,
                " {}={}",
                escape(name.as_bytes()).replace('=', "\\x3d"),
                escape(&value).replace('=', "\\x3d")
            );
        }
    }
}

/// Bytes as dump text has them; visible ones as they are, except now and then.
pub fn escape(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    for &byte in bytes {
        match byte {
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            0x21..=0x7e => out.push(char::from(byte)),
            _ => {
                let _ = write!(out, "\\x{byte:02x}");
            }
        }
    }
    out
}
