//! What mounts of a trust domain share, for each backend that this kernel has: by every kind of read, under pressure, and
//! while others come and go. In a guest with Linux 7.2 both backends are tried, `inode-share` over plain and over compressed packs (`tests/vm/run sharing`).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use cofolio_node::contents::ImageContents;
use cofolio_node::ledger::cgroup::{Cgroup, Hierarchy, Version};
use cofolio_node::mount::{Access, MountRequest, Mounter, RunDir, UmountOptions};
use cofolio_node::oci::{self, Silent, Source};
use cofolio_node::pack::{PackOptions, pack};
use cofolio_node::probe::{self, Presence};
use cofolio_store::{Backend, Digest, Domain, Form, InitOptions, Store};
use cofolio_sys::cache::{FileMap, page_size};
use rustix::fs::Advice;

/// Bytes of the content that both images have.
const SIZE: usize = 300 << 12;

fn content(salt: usize) -> Vec<u8> {
    (0..SIZE).map(|i| u8::try_from((i / 4096 * 7 + i + salt) % 251).unwrap()).collect()
}

/// Two images of one domain: `shared` of the first is `deep/other` of the second, with another owner and mode; and both
/// have a program, under two names.
struct Pair {
    dir: tempfile::TempDir,
    domain: Domain,
    images: [Digest; 2],
}

impl Pair {
    fn new((backend, form): How) -> Pair {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("one")).unwrap();
        fs::create_dir_all(at("two/deep")).unwrap();
        let program = program();
        for (name, salt, mode) in
            [("one/shared", 0, 0o600), ("two/deep/other", 0, 0o755), ("one/own", 1, 0o644)]
        {
            fs::write(at(name), content(salt)).unwrap();
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        std::os::unix::fs::chown(at("two/deep/other"), Some(7), Some(8)).unwrap();
        for name in ["one/program", "two/run"] {
            fs::copy(&program, at(name)).unwrap();
            fs::set_permissions(at(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let store = Store::init(&at("store"), &InitOptions { immutable: false }).unwrap();
        let domain = store.domain("default").unwrap();
        let images = ["one", "two"].map(|name| {
            let source = Source::parse(at(name).to_str().unwrap()).unwrap();
            let options =
                oci::ImportOptions { name: Some(name.to_owned()), ..oci::ImportOptions::default() };
            let image = oci::import(&domain, &source, &options, &Silent).unwrap().image;
            image.parse().unwrap()
        });
        if backend == Backend::InodeShare {
            for image in &images {
                let go_on = &mut |_, _| std::ops::ControlFlow::Continue(());
                let options = PackOptions { form, ..PackOptions::default() };
                pack(&domain, image, &options, go_on).unwrap();
            }
            domain.set_backend_over(backend, form).unwrap();
        }
        Pair { dir, domain, images }
    }

    fn mounter(&self) -> Mounter<'_> {
        let run = RunDir::at(self.dir.path().join("run"));
        Mounter::new(&self.domain, run, &ImageContents)
    }

    fn request(&self, image: usize, name: &str) -> MountRequest {
        let target = self.dir.path().join(name);
        MountRequest { create_target: true, ..MountRequest::new(self.images[image], target) }
    }

    /// Mounts one of the two; gives where.
    fn mount(&self, image: usize, name: &str) -> PathBuf {
        self.mounter().mount(&self.request(image, name)).unwrap().target
    }

    fn unmount(&self, target: &Path) {
        let options = UmountOptions { force: true, ..UmountOptions::default() };
        self.mounter().umount(target, &options).unwrap();
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for status in self.mounter().list().into_iter().flat_map(|list| list.mounts) {
            let options = UmountOptions { force: true, ..UmountOptions::default() };
            let _ = self.mounter().umount(&status.record.target, &options);
        }
        let run = self.dir.path().join("run");
        let _ = rustix::mount::unmount(&run, rustix::mount::UnmountFlags::DETACH);
    }
}

/// A program that needs no library.
fn program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("busybox"));
    found.into_iter().find(|file| file.is_file()).unwrap_or_else(|| "/bin/true".into())
}

/// A backend, and how the packs that it mounts are kept.
type How = (Backend, Form);

/// Runs a test with each backend that there is, and alone: it drops what others have in the cache.
fn on_each(test: &str, body: impl Fn(How)) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIP {test}: needs root");
    }
    let report = probe::probe(&probe::Options::default());
    if !report.can_mount() {
        return eprintln!("SKIP {test}: this kernel cannot mount images");
    }
    body((Backend::Overlay, Form::Plain));
    match report.get("inode-share") {
        Some(feature) if feature.presence == Presence::Present => {
            Form::ALL.into_iter().for_each(|form| body((Backend::InodeShare, form)));
        }
        _ => eprintln!("SKIP {test} with inode-share: this kernel has no inode_share"),
    }
}

/// Pages of a file in the cache that a mapping sees.
fn resident(path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    FileMap::new(&file, file.metadata().unwrap().len()).unwrap().resident_pages().unwrap()
}

fn all_pages() -> u64 {
    SIZE as u64 / page_size()
}

fn forget(path: &Path) {
    rustix::fs::fadvise(File::open(path).unwrap(), 0, None, Advice::DontNeed).unwrap();
}

/// Waits until something is so, for two seconds at most.
fn until(mut done: impl FnMut() -> bool) -> bool {
    // Read-ahead goes on when the call that asked for it has returned.
    (0..200).any(|_| {
        let done = done();
        if !done {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        done
    })
}

#[test]
fn what_one_mount_reads_is_there_for_the_others() {
    let test = "what_one_mount_reads_is_there_for_the_others";
    on_each(test, |(backend, form)| {
        let pair = Pair::new((backend, form));
        let (one, two) = (pair.mount(0, "on-one"), pair.mount(1, "on-two"));
        let again = pair.mount(0, "again");
        let (shared, other) = (one.join("shared"), two.join("deep/other"));
        let read_all = |path: &Path| fs::read(path).unwrap() == content(0);
        let sent = |path: &Path| {
            let mut sink = tempfile::tempfile_in(pair.dir.path()).unwrap();
            let file = File::open(path).unwrap();
            let mut left = SIZE;
            while left > 0 {
                left -= rustix::fs::sendfile(&sink, &file, None, left).unwrap();
            }
            let mut bytes = Vec::new();
            std::io::Seek::rewind(&mut sink).unwrap();
            sink.read_to_end(&mut bytes).unwrap();
            bytes == content(0)
        };
        let spliced = |path: &Path| {
            let (end, start) = rustix::pipe::pipe().unwrap();
            let file = File::open(path).unwrap();
            let (mut bytes, mut piece) = (Vec::new(), vec![0; 16 << 12]);
            while bytes.len() < SIZE {
                let flags = rustix::pipe::SpliceFlags::empty();
                let mut left =
                    rustix::pipe::splice(&file, None, &start, None, piece.len(), flags).unwrap();
                while left > 0 {
                    let count = rustix::io::read(&end, &mut piece[..left]).unwrap();
                    bytes.extend_from_slice(&piece[..count]);
                    left -= count;
                }
            }
            bytes == content(0)
        };
        let mapped = |path: &Path| {
            let map = FileMap::new(File::open(path).unwrap(), SIZE as u64).unwrap();
            let mut bytes = vec![0; SIZE];
            map.read_at(0, &mut bytes) == SIZE && bytes == content(0)
        };
        // With inode_share a call reads 128 KiB ahead, and no more.
        let ahead = |path: &Path| {
            let file = File::open(path).unwrap();
            for offset in (0..SIZE as u64).step_by(64 << 10) {
                let length = std::num::NonZeroU64::new(64 << 10);
                rustix::fs::fadvise(&file, offset, length, Advice::WillNeed).unwrap();
            }
            true
        };
        type Way<'a> = (&'a str, &'a dyn Fn(&Path) -> bool, bool);
        // The kernel's limits. Where one has gone, docs and `doctor` are to be changed.
        let pipes_share = backend == Backend::Overlay;
        let ways: [Way<'_>; 5] = [
            ("read", &read_all, true),
            ("mmap", &mapped, true),
            ("fadvise(WILLNEED)", &ahead, true),
            ("sendfile", &sent, pipes_share),
            ("splice", &spliced, pipes_share),
        ];
        for (way, call, shares) in ways {
            for from in [&shared, &again.join("shared"), &other] {
                // What a private cache holds is not to be taken for what is shared.
                [&shared, &other].into_iter().for_each(|path| forget(path));
                fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
                let what = format!("{backend}: {way} of {}", from.display());
                assert_eq!(resident(&other), 0, "before {what}");
                assert!(call(from), "{what}: wrong bytes");
                if shares {
                    assert!(until(|| resident(&other) == all_pages()), "{what}: not shared");
                    assert!(until(|| resident(&shared) == all_pages()), "{what}: not shared");
                } else {
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    assert_eq!(resident(&other), 0, "{what} shares on this kernel");
                }
            }
        }
        // What is mapped stays when it is given back; what is not goes for all.
        assert!(read_all(&shared));
        let file = File::open(&other).unwrap();
        let map = FileMap::new(&file, SIZE as u64).unwrap();
        let mut half = vec![0; SIZE / 2];
        assert_eq!(map.read_at(0, &mut half), half.len());
        forget(&shared);
        // A fault maps some pages around, too.
        let left = map.resident_pages().unwrap();
        assert!(left >= all_pages() / 2 && left < all_pages(), "{backend}: {left} while mapped");
        drop(map);
        forget(&shared);
        assert_eq!(resident(&other), 0, "{backend}: no longer mapped");

        // A program that runs in one is there for the other.
        let (here, there) = (one.join("program"), two.join("run"));
        forget(&here);
        fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        assert_eq!(resident(&there), 0);
        // busybox is what it is called.
        assert!(Command::new(&here).arg0("true").status().unwrap().success());
        assert!(resident(&there) > 0, "{backend}: exec does not share");

        let direct = fs::OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
            .open(&shared);
        let direct = direct.and_then(|file| file.read_at(&mut [0; 1], 0));
        if backend == Backend::InodeShare {
            let invalid = Some(rustix::io::Errno::INVAL.raw_os_error());
            assert_eq!(direct.unwrap_err().raw_os_error(), invalid, "O_DIRECT");
        }
    });
}

/// Rounds of mounting and unmounting (`COFOLIO_ROUNDS`).
fn rounds() -> usize {
    std::env::var("COFOLIO_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}

/// A cgroup in which not even the shared file fits.
fn tight() -> Result<Cgroup, String> {
    let hierarchy = Hierarchy::find(Path::new("/")).map_err(|error| error.to_string())?;
    let name = format!("cofolio-sharing-{}", std::process::id());
    let cgroup = hierarchy.create(&name).map_err(|error| error.to_string())?;
    let file = match hierarchy.version() {
        Version::V1 => "memory.limit_in_bytes",
        Version::V2 => "memory.max",
    };
    fs::write(cgroup.procs().with_file_name(file), "2M").map_err(|error| error.to_string())?;
    Ok(cgroup)
}

/// One mount comes, reads and goes, read-only and writable, while a process with little memory reads the same file through
/// another: it sees the right bytes to the end, whatever is dropped meanwhile.
#[test]
fn a_reader_is_not_disturbed_by_those_that_come_and_go() {
    let test = "a_reader_is_not_disturbed_by_those_that_come_and_go";
    on_each(test, |(backend, form)| {
        let pair = Pair::new((backend, form));
        let two = pair.mount(1, "on-two");
        let expected = pair.dir.path().join("one/shared");
        let cgroup = tight().map_err(|reason| eprintln!("SKIP {test} in a cgroup: {reason}")).ok();
        let stop = pair.dir.path().join("stop");
        let counts = pair.dir.path().join("counts");
        let script = "[ -z \"$4\" ] || echo 0 >\"$4\"; n=0
            while ! [ -e \"$3\" ]; do cmp \"$1\" \"$2\" || exit 9; n=$((n + 1)); done; echo $n >\"$5\"";
        let procs = cgroup.as_ref().map(Cgroup::procs).unwrap_or_default();
        let mut reader = Command::new("sh")
            .args(["-c", script, "sh"])
            .args([&two.join("deep/other"), &expected, &stop, &procs, &counts])
            .spawn()
            .unwrap();
        for round in 0..rounds() {
            let mut request = pair.request(0, "comes");
            if round % 3 == 2 {
                request.access = Access::Writable;
            }
            let target = pair.mounter().mount(&request).unwrap().target;
            let file = File::open(target.join("shared")).unwrap();
            let at = round * 4096 % SIZE;
            let mut piece = vec![0; 4096];
            file.read_exact_at(&mut piece, at as u64).unwrap();
            assert!(piece == content(0)[at..at + 4096], "{backend}: round {round}");
            if round % 5 == 0 {
                forget(&target.join("shared"));
            }
            if round % 16 == 0 {
                let what = ["1", "2", "3"][round / 16 % 3];
                fs::write("/proc/sys/vm/drop_caches", what).unwrap();
            }
            // Some go while they are in use.
            if round % 2 == 0 {
                drop(file);
            }
            pair.unmount(&target);
        }
        fs::write(&stop, "").unwrap();
        let ended = reader.wait().unwrap();
        assert!(ended.success(), "{backend}: the reader ended with {ended}");
        let read = fs::read_to_string(counts).unwrap();
        eprintln!(
            "   {backend}, {}: {} rounds, the other file read {} times",
            form.as_str(),
            rounds(),
            read.trim()
        );
    });
}
