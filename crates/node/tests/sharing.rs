//! What mounts of a trust domain share, for each backend that this kernel has: by every kind of read, under pressure, and
//! while others come and go. In a guest with Linux 7.2 both backends are tried, `inode-share` over plain and over compressed
//! packs (`tests/vm/run sharing sharing-rounds`).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

#[path = "common/cache.rs"]
mod cache;

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use cache::{SIZE, all_pages, content, forget, resident};
use cofolio_image::import;
use cofolio_image::pack::ImageContents;
use cofolio_image::pack::segment::Form;
use cofolio_image::pack::{PackOptions, pack};
use cofolio_image::source::Source;
use cofolio_node::cgroup::{Cgroup, Hierarchy, Version};
use cofolio_node::mount::{Access, MountRequest, Mounter, UmountOptions};
use cofolio_node::probe::{self, Presence};
use cofolio_node::run_dir::RunDir;
use cofolio_node::settings::{Backend, DomainSettings as _};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, InitOptions, Store};
use cofolio_sys::cache::{FileMap, PrivateMap, page_size};
use rustix::fs::Advice;

/// Two images of one domain: `shared` of the first is `deep/other` of the second, with another owner and mode; and both
/// have a program, under two names.
struct Pair {
    dir: tempfile::TempDir,
    domain: Domain,
    images: [Digest; 2],
}

impl Pair {
    fn new(how: How) -> Pair {
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
        let images = import(&domain, dir.path(), how);
        Pair { dir, domain, images }
    }

    fn mounter(&self) -> Mounter<'_> {
        let run = RunDir::open(self.dir.path().join("run")).unwrap();
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
}

impl Drop for Pair {
    fn drop(&mut self) {
        for status in self.mounter().list().into_iter().flat_map(|list| list.mounts) {
            let options = UmountOptions { force: true, ..UmountOptions::default() };
            let _ = self.mounter().umount(&status.record.target, &options);
        }
        // With inode-share, an image that was detached while in use stays pinned until the machine restarts.
        for pin in self.mounter().list().into_iter().flat_map(|list| list.pins) {
            let erofs = format!("run/images/{}/{}/erofs", pin.domain, pin.image);
            let flags = rustix::mount::UnmountFlags::DETACH;
            let _ = rustix::mount::unmount(self.dir.path().join(erofs), flags);
        }
    }
}

/// Brings both trees into a domain that is mounted like this.
fn import(domain: &Domain, dir: &Path, (backend, form): How) -> [Digest; 2] {
    let images = ["one", "two"].map(|name| {
        let source = Source::parse(dir.join(name).to_str().unwrap()).unwrap();
        let options = import::ImportOptions {
            name: Some(name.to_owned()),
            ..import::ImportOptions::default()
        };
        import::import(domain, &source, &options, &Task::default()).unwrap().image
    });
    if backend == Backend::InodeShare {
        for image in &images {
            let task = Task::default();
            let options = PackOptions { form, ..PackOptions::default() };
            pack(domain, image, &options, &task).unwrap();
        }
        domain.set_backend(backend, form).unwrap();
    }
    images
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
            [Form::Plain, Form::Lz4].into_iter().for_each(|form| body((Backend::InodeShare, form)));
        }
        _ => eprintln!("SKIP {test} with inode-share: this kernel has no inode_share"),
    }
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

/// Whether something is so in one of three attempts. A host may reclaim what was read a moment ago though much memory is
/// free (DAMON does, every few seconds), so an attempt that wants pages in the cache begins with reading them.
fn in_an_attempt(attempt: impl FnMut() -> bool) -> bool {
    std::iter::repeat_with(attempt).take(3).any(|so| so)
}

/// The kernel forgets what nobody has mapped of these, and what a private cache of a mount may hold of it.
fn drop_caches(files: &[&Path]) {
    files.iter().for_each(|file| forget(file));
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
}

/// The same, and nobody has mapped any.
fn forget_all(files: &[&Path]) {
    drop_caches(files);
    for file in files {
        assert_eq!(resident(file), 0, "{}", file.display());
    }
}

/// Reads a file; says whether the bytes were right.
type Way = fn(&Path) -> bool;

fn reads(path: &Path) -> bool {
    fs::read(path).unwrap() == content(0)
}

fn sends(path: &Path) -> bool {
    let mut sink = tempfile::tempfile().unwrap();
    let file = File::open(path).unwrap();
    let mut left = SIZE;
    while left > 0 {
        left -= rustix::fs::sendfile(&sink, &file, None, left).unwrap();
    }
    let mut bytes = Vec::new();
    std::io::Seek::rewind(&mut sink).unwrap();
    sink.read_to_end(&mut bytes).unwrap();
    bytes == content(0)
}

fn splices(path: &Path) -> bool {
    let (end, start) = rustix::pipe::pipe().unwrap();
    let file = File::open(path).unwrap();
    let (mut bytes, mut piece) = (Vec::new(), vec![0; 16 << 12]);
    while bytes.len() < SIZE {
        let flags = rustix::pipe::SpliceFlags::empty();
        let mut left = rustix::pipe::splice(&file, None, &start, None, piece.len(), flags).unwrap();
        while left > 0 {
            let count = rustix::io::read(&end, &mut piece[..left]).unwrap();
            bytes.extend_from_slice(&piece[..count]);
            left -= count;
        }
    }
    bytes == content(0)
}

fn maps(path: &Path) -> bool {
    let map = FileMap::new(File::open(path).unwrap(), SIZE as u64).unwrap();
    let mut bytes = vec![0; SIZE];
    map.read_at(0, &mut bytes) == SIZE && bytes == content(0)
}

fn maps_privately(path: &Path) -> bool {
    let map = PrivateMap::new(File::open(path).unwrap(), SIZE as u64).unwrap();
    let mut bytes = vec![0; SIZE];
    map.read_at(0, &mut bytes) == SIZE && bytes == content(0)
}

/// readahead(2) is this with another name (`ksys_readahead` of mm/readahead.c). With inode_share a call reads 128 KiB ahead,
/// and no more.
fn asks_for(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    for offset in (0..SIZE as u64).step_by(64 << 10) {
        let length = std::num::NonZeroU64::new(64 << 10);
        rustix::fs::fadvise(&file, offset, length, Advice::WillNeed).unwrap();
    }
    true
}

#[test]
fn what_one_mount_reads_is_there_for_the_others() {
    let test = "what_one_mount_reads_is_there_for_the_others";
    on_each(test, |(backend, form)| {
        let pair = Pair::new((backend, form));
        let (one, two) = (pair.mount(0, "on-one"), pair.mount(1, "on-two"));
        let again = pair.mount(0, "again");
        let (shared, other) = (one.join("shared"), two.join("deep/other"));
        let owner = |path: &Path| {
            let meta = path.metadata().unwrap();
            (meta.mode() & 0o7777, meta.uid(), meta.gid())
        };
        assert_eq!((owner(&shared), owner(&other)), ((0o600, 0, 0), (0o755, 7, 8)));
        // The kernel's limits. Where one has gone, docs and `doctor` are to be changed.
        let pipes_share = backend == Backend::Overlay;
        let ways: [(&str, Way, bool); 6] = [
            ("read", reads, true),
            ("mmap", maps, true),
            ("private mmap", maps_privately, true),
            ("fadvise(WILLNEED)", asks_for, true),
            ("sendfile", sends, pipes_share),
            ("splice", splices, pipes_share),
        ];
        for (way, call, shares) in ways {
            for from in [&shared, &again.join("shared"), &other] {
                let what = format!("{backend}: {way} of {}", from.display());
                let cold = || {
                    // What a private cache holds is not to be taken for what is shared.
                    forget_all(&[&shared, &other]);
                    assert!(call(from), "{what}: wrong bytes");
                };
                if shares {
                    let all =
                        || (resident(&other), resident(&shared)) == (all_pages(), all_pages());
                    let shared = || {
                        cold();
                        until(all)
                    };
                    assert!(in_an_attempt(shared), "{what}: not shared");
                } else {
                    cold();
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    assert_eq!(resident(&other), 0, "{what} shares on this kernel");
                }
            }
        }

        // What the kernel reads ahead of a reader of one is there for that of the other.
        let read_ahead = || {
            forget_all(&[&shared, &other]);
            let mut file = File::open(&shared).unwrap();
            let mut piece = vec![0; 4 * usize::try_from(page_size()).unwrap()];
            file.read_exact(&mut piece).unwrap();
            until(|| resident(&other) > 4)
        };
        assert!(in_an_attempt(read_ahead), "{backend}: nothing was read ahead");
        assert!(until(|| resident(&other) == resident(&shared)), "{backend}: read-ahead");

        // A program that runs in one is there for the other.
        let (here, there) = (one.join("program"), two.join("run"));
        let run = || {
            forget_all(&[&here, &there]);
            // busybox is what it is called.
            assert!(Command::new(&here).arg0("true").status().unwrap().success());
            resident(&there) > 0
        };
        assert!(in_an_attempt(run), "{backend}: exec does not share");
    });
}

#[test]
fn what_is_given_back_goes_for_all_unless_it_is_mapped() {
    let test = "what_is_given_back_goes_for_all_unless_it_is_mapped";
    on_each(test, |(backend, form)| {
        let pair = Pair::new((backend, form));
        let (one, two) = (pair.mount(0, "on-one"), pair.mount(1, "on-two"));
        let (shared, other) = (one.join("shared"), two.join("deep/other"));
        let half_mapped = || {
            assert!(reads(&shared));
            let file = File::open(&other).unwrap();
            let map = FileMap::new(&file, SIZE as u64).unwrap();
            let mut half = vec![0; SIZE / 2];
            assert_eq!(map.read_at(0, &mut half), half.len());
            forget(&shared);
            // A fault maps some pages around, too.
            let left = map.resident_pages().unwrap();
            assert!(left < all_pages(), "{backend}: all are left");
            left >= all_pages() / 2
        };
        assert!(in_an_attempt(half_mapped), "{backend}: what is mapped has gone");
        forget(&shared);
        assert_eq!(resident(&other), 0, "{backend}: no longer mapped");
    });
}

/// The clean pages of a private mapping are everybody's, a page that it has written is its own.
#[test]
fn what_is_written_to_a_private_mapping_is_its_own() {
    let test = "what_is_written_to_a_private_mapping_is_its_own";
    on_each(test, |(backend, form)| {
        let pair = Pair::new((backend, form));
        let (one, two) = (pair.mount(0, "on-one"), pair.mount(1, "on-two"));
        let (shared, other) = (one.join("shared"), two.join("deep/other"));
        let page = usize::try_from(page_size()).unwrap();
        let written = [0, 7, SIZE / page - 1];
        // Written before anybody has read the page, and after that.
        for warm in [false, true] {
            forget_all(&[&shared, &other]);
            assert!(!warm || reads(&other));
            let of_other = FileMap::new(File::open(&other).unwrap(), SIZE as u64).unwrap();
            let file = File::open(&shared).unwrap();
            let mut map = PrivateMap::new(&file, SIZE as u64).unwrap();
            let mut expected = content(0);
            for page_number in written {
                let at = page_number * page + 10;
                assert_eq!(map.write_at(at as u64, b"mine"), 4);
                expected[at..at + 4].copy_from_slice(b"mine");
            }
            let mut bytes = vec![0; SIZE];
            assert_eq!(map.read_at(0, &mut bytes), SIZE);
            assert!(bytes == expected, "{backend}: the mapping itself");
            let others = || {
                assert!(reads(&shared) && reads(&other), "{backend}: others see what was written");
                assert_eq!(of_other.read_at(0, &mut bytes), SIZE);
                assert!(bytes == content(0), "{backend}: a mapping sees what was written");
                (resident(&shared), resident(&other)) == (all_pages(), all_pages())
            };
            assert!(in_an_attempt(others), "{backend}: what others have is not in the cache");
            // What goes from the cache does not take along what was written.
            drop_caches(&[&shared, &other]);
            assert_eq!(map.read_at(0, &mut bytes), SIZE);
            assert!(bytes == expected, "{backend}: the mapping, after the cache was dropped");
            drop((map, of_other));
            assert!(reads(&shared) && reads(&other), "{backend}: after the mapping has gone");
        }
    });
}

/// Past the cache: with `overlay` it is as the filesystem of the objects has it, right bytes or a refusal. The kernel's limit
/// with `inode-share`; where it has gone, docs and `doctor` are to be changed.
#[test]
fn direct_reads_are_right_or_refused() {
    let test = "direct_reads_are_right_or_refused";
    on_each(test, |(backend, form)| {
        let pair = Pair::new((backend, form));
        let (one, two) = (pair.mount(0, "on-one"), pair.mount(1, "on-two"));
        let (shared, other) = (one.join("shared"), two.join("deep/other"));
        // Nobody is disturbed by it.
        let open = File::open(&other).unwrap();
        let mut buffer = vec![0; SIZE + 4096];
        let start = buffer.as_ptr().align_offset(4096);
        let aligned = &mut buffer[start..start + SIZE];
        let direct = |path: &Path| {
            fs::OpenOptions::new()
                .read(true)
                .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
                .open(path)
        };
        let invalid = Some(rustix::io::Errno::INVAL.raw_os_error());
        let of_object = direct(&pair.dir.path().join("one/shared")).is_ok();
        match direct(&shared).and_then(|file| file.read_at(aligned, 0)) {
            Ok(count) => {
                assert_eq!(backend, Backend::Overlay, "O_DIRECT works on this kernel");
                assert!(aligned[..count] == content(0)[..count], "{backend}: O_DIRECT");
                assert!(count > 0);
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), invalid, "{backend}: O_DIRECT");
                assert!(backend == Backend::InodeShare || !of_object, "{backend}: O_DIRECT");
            }
        }
        let mut bytes = vec![0; SIZE];
        open.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(0) && reads(&shared));
    });
}

#[test]
fn domains_share_nothing() {
    let test = "domains_share_nothing";
    on_each(test, |(backend, form)| {
        let pair = Pair::new((backend, form));
        let theirs = pair.domain.store().domain_or_create("tenant").unwrap();
        let images = import(&theirs, pair.dir.path(), (backend, form));
        assert_eq!(images, pair.images, "the same content");
        let run = RunDir::open(pair.dir.path().join("run")).unwrap();
        let mounter = Mounter::new(&theirs, run, &ImageContents);
        let ours = pair.mount(0, "on-one").join("shared");
        for (image, name, file) in [(0, "same", "shared"), (1, "theirs", "deep/other")] {
            let their = mounter.mount(&pair.request(image, name)).unwrap().target.join(file);
            let ways: [Way; 4] = [reads, maps, maps_privately, asks_for];
            for call in ways {
                for (here, there) in [(&ours, &their), (&their, &ours)] {
                    let apart = || {
                        forget_all(&[here, there]);
                        assert!(call(here));
                        let all = until(|| resident(here) == all_pages());
                        assert_eq!(resident(there), 0, "{backend}: {}", there.display());
                        // And what one gives back the other keeps.
                        assert!(call(there));
                        let all = all && until(|| resident(there) == all_pages());
                        forget(here);
                        assert_eq!(resident(here), 0, "{backend}: {}", here.display());
                        all && resident(there) == all_pages()
                    };
                    assert!(in_an_attempt(apart), "{backend}: {}", here.display());
                }
            }
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
        // A mounter waits for users of mounts only once.
        let mounter = pair.mounter();
        for round in 0..rounds() {
            let mut request = pair.request(0, "comes");
            if round % 3 == 2 {
                request.access = Access::Writable;
            }
            let target = mounter.mount(&request).unwrap().target;
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
            let options = UmountOptions { force: true, ..UmountOptions::default() };
            mounter.umount(&target, &options).unwrap();
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
