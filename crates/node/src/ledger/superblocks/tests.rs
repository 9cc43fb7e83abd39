//! With a made-up `/proc`: what processes map, and what their mount namespaces show.

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cofolio_image::import::{ImportOptions, import};
use cofolio_image::source::Source;
use cofolio_store::task::Task;
use cofolio_store::verity::digest;
use cofolio_store::{Digest, InitOptions, Store};
use cofolio_sys::{cache, pagemap};
use rustix::fs::{CWD, FileType, Mode};

use super::super::index::Index;
use super::super::reclaim::Scope;
use super::super::usage::{Count, ObjectId, SuperblockId};
use super::super::{Budget, Ledger};
use super::adopted::Sighting;
use super::look::{Look, STEPS_OF_A_LOOK, mapped_frames};
use super::namespaces::Namespaces;
use super::refresh::Changes;
use super::tables::Inodes;
use super::{Place, Superblock, Superblocks};
use crate::address_space;
use crate::cgroup::Hierarchy;
use crate::mount::ShownSuperblock;
use crate::processes::{self, Device, Mapping};
use crate::run_dir::RunDir;
use crate::settings::Backend;

const IMAGE: &str = "2492664271cd9a238b4cf0dfb7eee50a5b508206ffb2f994a5a9f3d588849784";
const DEVICE: Device = (0, 64);
const ONE_PAGE: &[u8] = b"one page";

struct Proc(tempfile::TempDir);

impl Proc {
    fn new() -> Self {
        let made_up = Self(tempfile::tempdir().unwrap());
        let namespaces = made_up.root().join("proc/thread-self/ns");
        fs::create_dir_all(&namespaces).unwrap();
        std::os::unix::fs::symlink("pid:[4026531836]", namespaces.join("pid")).unwrap();
        made_up
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    /// A process in a mount namespace.
    fn process(&self, pid: u32, namespace: &str) {
        let process = self.root().join(format!("proc/{pid}"));
        fs::create_dir_all(process.join("ns")).unwrap();
        let of_all = self.root().join(namespace);
        fs::create_dir_all(&of_all).unwrap();
        std::os::unix::fs::symlink(&of_all, process.join("ns/mnt")).unwrap();
        std::os::unix::fs::symlink(self.root(), process.join("root")).unwrap();
        std::os::unix::fs::symlink(of_all.join("mounts"), process.join("mountinfo")).unwrap();
        self.shows(namespace, "");
    }

    /// A store with an image of one file, which [`adopted`] shows.
    fn store(&self) -> Store {
        let store =
            Store::init(&self.root().join("store"), &InitOptions { immutable: false }).unwrap();
        let directory = self.root().join("image");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), ONE_PAGE).unwrap();
        let source = Source::parse(directory.to_str().unwrap()).unwrap();
        let domain = store.domain("default").unwrap();
        import(&domain, &source, &ImportOptions::default(), &Task::default()).unwrap();
        store
    }

    fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::new(self.store(), RunDir::open(self.root().join("run")).unwrap());
        ledger.refresh(&Budget::UNLIMITED).unwrap();
        ledger.state.root = self.root().to_owned();
        ledger.state.hierarchy = Hierarchy::find(Path::new("/nowhere"));
        ledger.state.superblocks = adopted(&Look::new(self.root(), 1));
        ledger
    }

    fn shows(&self, namespace: &str, mounts: &str) {
        fs::write(self.root().join(namespace).join("mounts"), mounts).unwrap();
    }
}

fn line(id: u64, minor: u32, filesystem: &str, options: &str) -> String {
    format!("{id} 1 0:{minor} / /mnt ro - {filesystem} cofolio:{IMAGE} {options}\n")
}

fn mapping(range: &[u8]) -> Mapping<'_> {
    Mapping { device: DEVICE, inode: 36, range, offset: 0, path: b"/mnt/file" }
}

/// A ledger that has adopted an `inode-share` superblock of one file through process 1.
fn adopted(look: &Look) -> Superblocks {
    let mut superblocks = Superblocks::default();
    superblocks.insert(Superblock {
        domain: 0,
        image: IMAGE.parse::<Digest>().unwrap(),
        device: DEVICE,
        place: Place::Adopted(Sighting::new(&mapping(b"1000-2000"), look, 0)),
        backend: Backend::InodeShare,
        is_writable: false,
        upper: None,
        layers: vec![Arc::new(Inodes::of_one(36, &digest(ONE_PAGE)))],
        layer_devices: Vec::new(),
        serial: 0,
        is_sampled: false,
        is_marked: false,
    });
    superblocks
}

/// A process that mapped files of thousands of devices made the ledger read its mountinfo for each
/// of them.
#[test]
fn mountinfo_is_read_once_for_a_namespace() {
    let made_up = Proc::new();
    made_up.process(1, "a");
    made_up.process(2, "a");
    made_up.process(3, "b");
    let mounts = line(20, 64, "erofs", "ro,inode_share")
        + &line(21, 64, "erofs", "ro,inode_share")
        + &line(22, 65, "overlay", "ro")
        + &line(23, 66, "erofs", "ro")
        + &line(24, 67, "fuse.erofs", "ro,inode_share");
    made_up.shows("a", &mounts);
    let mut namespaces = Namespaces::default();
    let image = IMAGE.parse().unwrap();
    let mut shows = |pid: u32, minor: u32, backend: Backend| {
        let shown = namespaces.of(made_up.root(), pid, &mut None).unwrap();
        assert!(shown.is_whole);
        shown.has((0, minor), image, backend)
    };
    assert!(shows(1, 64, Backend::InodeShare) && shows(1, 65, Backend::Overlay));
    assert!(!shows(1, 64, Backend::Overlay) && !shows(3, 64, Backend::InodeShare));
    assert!(![66, 67, 68].iter().any(|minor| shows(1, *minor, Backend::InodeShare)));
    // It is not read again, nor for another process.
    made_up.shows("a", "");
    assert!(shows(1, 64, Backend::InodeShare) && shows(2, 64, Backend::InodeShare));
    let shown = namespaces.of(made_up.root(), 2, &mut None).unwrap();
    assert!(shown.has_mount(DEVICE, 20) && shown.has_mount(DEVICE, 21));
    assert!(!shown.has_mount(DEVICE, 22));
    namespaces.forget();
    assert!(namespaces.of(made_up.root(), 1, &mut None).unwrap().superblock(DEVICE).is_none());
}

/// A mapped file of an unmounted `inode-share` filesystem was known by device and inode number. Any
/// filesystem can get the number of the device, and any user can make a file with that inode.
#[test]
fn another_filesystem_with_the_number_of_an_adopted_one_is_none_of_ours() {
    let made_up = Proc::new();
    made_up.process(1, "a");
    made_up.shows("a", &line(20, 64, "erofs", "ro,inode_share"));
    let mut index = Index::new(made_up.store());
    index.refresh(1, &Budget::UNLIMITED).1.unwrap();
    let mut superblocks = adopted(&Look::new(made_up.root(), 1));
    let seen = |superblocks: &mut Superblocks| {
        superblocks.mapped(made_up.root(), 1, &mapping(b"1000-2000"), &index)
    };
    assert_eq!(seen(&mut superblocks), Some((SuperblockId(0), ObjectId(0))));
    assert_eq!(superblocks.end_look(made_up.root(), 1), None);
    for other in ["tmpfs", "overlay", "fuse.erofs"] {
        made_up.shows("a", &line(20, 64, other, "rw,inode_share"));
        superblocks.drop_adopted(&mut Changes::default());
        assert_eq!(seen(&mut superblocks), None, "{other}");
        assert_eq!(superblocks.end_look(made_up.root(), 1), None);
    }
}

/// An adopted superblock had ended, and a new mount of the image got its number. It was taken for the old one: with the
/// numbers of the old one's layers, and with a mark that was on the old one.
#[test]
fn a_mount_has_nothing_of_an_adopted_superblock_but_its_users() {
    let made_up = Proc::new();
    let mut superblocks = adopted(&Look::new(made_up.root(), 1));
    superblocks.learn_device(0, (0, 70), 0);
    superblocks.slots[0].as_mut().unwrap().is_marked = true;
    superblocks.to_mark.clear();
    let shown = ShownSuperblock {
        domain: "default".to_owned(),
        image: IMAGE.parse().unwrap(),
        backend: Backend::InodeShare,
        pin: made_up.root().join("pin"),
        path: made_up.root().join("pin/erofs"),
        inside: PathBuf::new(),
        upper: None,
        device: DEVICE,
        mount: 1,
    };
    let layers = superblocks.slots[0].as_ref().unwrap().layers.clone();
    let mut changes = Changes::default();
    assert_eq!(superblocks.promote_adopted(0, &shown, &layers, &mut changes), Some(0));
    assert!(changes.removed.is_empty());
    let promoted = superblocks.slots[0].as_ref().unwrap();
    assert!(promoted.layer_devices.is_empty() && !promoted.is_marked);
    assert_eq!(superblocks.to_mark, [SuperblockId(0)]);
    assert_eq!(superblocks.by_file_device.into_keys().collect::<Vec<_>>(), [DEVICE]);
}

/// To find out whether adopted superblocks were unmounted, each refresh read mountinfo of all
/// processes for each of them.
#[test]
fn adopted_superblocks_go_when_no_namespace_shows_them() {
    let made_up = Proc::new();
    made_up.process(1, "a");
    made_up.process(2, "b");
    made_up.shows("b", &line(20, 64, "erofs", "ro,inode_share"));
    let mut superblocks = adopted(&Look::new(made_up.root(), 1));
    let mut is_there_after_rounds = |count: u32| {
        let mut changes = Changes::default();
        for _ in 0..count {
            superblocks.drop_adopted(&mut changes);
            for pid in [1, 2, 9] {
                assert_eq!(superblocks.end_look(made_up.root(), pid), None);
            }
            superblocks.round_is_complete();
        }
        superblocks.drop_adopted(&mut changes);
        superblocks.get(SuperblockId(0)).is_some()
    };
    assert!(is_there_after_rounds(10), "process 2 shows it");
    made_up.shows("b", "");
    assert!(!is_there_after_rounds(4));
}

/// What a container makes too long to be read says nothing about what is unmounted.
#[test]
fn what_is_left_out_is_not_taken_for_unmounted() {
    let made_up = Proc::new();
    made_up.process(1, "a");
    made_up.shows("a", &line(20, 64, "erofs", &"x".repeat(1 << 17)));
    let mut superblocks = adopted(&Look::new(made_up.root(), 1));
    for round in 0..6 {
        superblocks.drop_adopted(&mut Changes::default());
        superblocks.end_look(made_up.root(), 1);
        superblocks.round_is_complete();
        assert!(superblocks.get(SuperblockId(0)).is_some(), "{round}");
    }
}

/// Only the first 2 MiB of a mapping were looked at: a process that had later pages of a file used
/// nothing. And there was no limit to the mappings that were looked at.
#[test]
fn pages_are_found_wherever_they_are_within_the_limit() {
    const FRAME: u64 = 0x1234;
    let made_up = Proc::new();
    made_up.process(1, "a");
    let page = cache::page_size();
    let start = 16 * page;
    let mut file = File::create(made_up.root().join("proc/1/pagemap")).unwrap();
    file.set_len(8 * (16 + 3 * pagemap::STEP)).unwrap();
    let at = 2 * pagemap::STEP + 5;
    file.seek(SeekFrom::Start(8 * (16 + at))).unwrap();
    file.write_all(&(1 << 63 | 1 << 61 | FRAME).to_ne_bytes()).unwrap();
    // The mapping is longer than the file, and so than what the kernel has entries for here.
    let range = format!("{start:x}-{:x}", start + (1 << 40));
    let mapping = mapping(range.as_bytes());
    let size = 3 * pagemap::STEP * page;
    let mut look = Look::new(made_up.root(), 1);
    assert_eq!(mapped_frames(&mapping, size, &mut look).unwrap(), [(at * page, FRAME)]);
    assert_eq!(look.left_out, None);
    let beyond = Mapping { offset: size, ..mapping };
    assert_eq!(mapped_frames(&beyond, size, &mut look).unwrap(), []);
    look.spend(STEPS_OF_A_LOOK - 3 - 2).unwrap();
    let again = Mapping { offset: 0, ..beyond };
    assert_eq!(mapped_frames(&again, size, &mut look).unwrap(), []);
    assert_eq!(look.left_out, Some("there is too much to look at"));
}

/// A reclaim read the pagemap of a mapping for all of its length, and a process can map one page
/// with a length of 64 TiB. It kept any number of mappings, and never ended its look at a process:
/// what came after the last step went unnoticed, and the next look at the process had no steps
/// left.
#[test]
fn a_reclaim_looks_at_a_bounded_part_of_each_process() {
    let made_up = Proc::new();
    let mut ledger = made_up.ledger();
    for pid in [1, 2] {
        made_up.process(pid, "a");
    }
    made_up.shows("a", &line(20, 64, "erofs", "ro,inode_share"));
    let maps = |pid: u32, count: u32| {
        let mapping = "1000-400000001000 r--p 00000000 00:40 36 /mnt/file\n";
        let maps = mapping.repeat(usize::try_from(count).unwrap());
        fs::write(made_up.root().join(format!("proc/{pid}/maps")), maps).unwrap();
    };
    maps(1, STEPS_OF_A_LOOK + 1);
    maps(2, 1);
    let mappings = |ledger: &mut Ledger| {
        let mut found = ledger.reclaimer().mappings(&Scope::Machine, true, &[ObjectId(0)]);
        let of_object = found.by_object.remove(&ObjectId(0)).unwrap_or_default();
        let of = |pid: u32| of_object.iter().filter(|it| it.0 == pid).count();
        assert!(of_object.iter().all(|(_, addresses)| *addresses == (0x1000..0x1008)));
        (of(1), of(2), found.unread)
    };
    for _ in 0..2 {
        assert_eq!(mappings(&mut ledger), (STEPS_OF_A_LOOK as usize, 1, 1));
    }
    fs::remove_dir_all(made_up.root().join("proc/2")).unwrap();
    maps(1, 1);
    assert_eq!(mappings(&mut ledger), (1, 0, 0));
}

/// A process that maps a file, and can be moved from one cgroup to another.
struct Moved {
    made_up: Proc,
    ledger: Ledger,
}

impl Moved {
    fn new(usage_bytes_max: u64) -> Self {
        let made_up = Proc::new();
        made_up.process(1, "a");
        made_up.shows("a", &line(20, 64, "erofs", "ro,inode_share"));
        let mapping = "1000-2000 r--p 00000000 00:40 36 /mnt/file\n";
        fs::write(made_up.root().join("proc/1/maps"), mapping).unwrap();
        let names = ["MemTotal", "MemAvailable", "Cached", "Shmem"];
        let meminfo = names.map(|name| format!("{name}: 1 kB\n")).concat();
        fs::write(made_up.root().join("proc/meminfo"), meminfo).unwrap();
        let mut ledger = made_up.ledger();
        ledger.state.uses.bytes_max = usage_bytes_max;
        Self { made_up, ledger }
    }

    /// The uses that are noted after a look at the process there, and the processes whose uses
    /// could not be.
    fn to(&mut self, cgroup: &str) -> (usize, u64) {
        let text = format!("0::{cgroup}\n");
        fs::write(self.made_up.root().join("proc/1/cgroup"), text).unwrap();
        let ledger = &mut self.ledger;
        assert!(ledger.sample_processes(&Budget::UNLIMITED).unwrap());
        (ledger.state.uses.count().entries, ledger.report().unwrap().unknown.processes)
    }
}

/// A process that could not be read was counted, and nobody could tell which one it was, and why.
#[test]
fn processes_that_cannot_be_read_are_named() {
    let mut moved = Moved::new(u64::MAX);
    fs::create_dir_all(moved.made_up.root().join("proc/2/maps")).unwrap();
    assert_eq!(moved.to("/a"), (1, 1));
    let warnings = moved.ledger.report().unwrap().warnings;
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.starts_with("process 2: Is a directory"), "{warning}");
}

/// A process held its own `mmap_lock` for as long as its FUSE server liked. The ledger waited with
/// it, and no figure was taken any more. A FIFO without a writer holds up whoever opens it.
#[test]
fn a_process_that_does_not_answer_is_named_and_keeps_its_uses() {
    let mut moved = Moved::new(u64::MAX);
    assert_eq!(moved.to("/a"), (1, 0));
    let mapping = fs::read(moved.made_up.root().join("proc/1/maps")).unwrap();
    let maps = moved.made_up.root().join("proc/1/maps");
    fs::remove_file(&maps).unwrap();
    rustix::fs::mknodat(CWD, &maps, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    fs::write(moved.made_up.root().join("proc/1/cgroup"), "0::/a\n").unwrap();
    // Nothing else knows the superblock.
    moved.made_up.shows("a", "");
    let ledger = &mut moved.ledger;
    for _ in 0..6 {
        while !ledger.sample_processes(&Budget::UNLIMITED).unwrap() {}
        ledger.state.superblocks.drop_adopted(&mut Changes::default());
        let report = ledger.report().unwrap();
        assert_eq!((ledger.state.uses.count().entries, report.unknown.processes), (1, 1));
        // It may wait for another lock, and the machine may be busy.
        assert_eq!(report.warnings, ["process 1: it does not answer in time"]);
        assert!(ledger.state.superblocks.get(SuperblockId(0)).is_some());
    }
    // It answers again.
    moved.made_up.shows("a", &line(20, 64, "erofs", "ro,inode_share"));
    moved.ledger.state.superblocks.drop_adopted(&mut Changes::default());
    File::options().write(true).open(&maps).unwrap().write_all(&mapping).unwrap();
    fs::remove_file(&maps).unwrap();
    fs::write(&maps, &mapping).unwrap();
    while address_space::check(&processes::directory(moved.made_up.root(), 1)).is_err() {
        std::thread::yield_now();
    }
    assert_eq!(moved.to("/a"), (1, 0));
}

/// A process that was moved through thousands of cgroups of a container's own used its files in
/// each, and the lists grew without a limit.
#[test]
fn uses_are_noted_as_long_as_there_is_room() {
    let mut moved = Moved::new(4000);
    let noted = (0..100).take_while(|it| moved.to(&format!("/{it}")).1 == 0).count();
    // One takes 113 bytes.
    assert_eq!(noted, 36);
    assert_eq!(moved.to("/other"), (noted, 1));
    // The remedy is another one than for a cgroup that cannot be looked at, which was said, too.
    let warning = "process 1: there is no room for all that it uses";
    assert_eq!(moved.ledger.report().unwrap().warnings, [warning]);
    assert_eq!(moved.to("/0"), (noted, 0), "it is listed");
}

/// Such a process filled the lists, and no use by another container was noted any more.
#[test]
fn a_tree_of_cgroups_does_not_blind_the_ledger_for_others() {
    const USES_MAX: usize = 1000;
    let of_one = Count { lists: 1, entries: 1 }.bytes_max();
    let mut moved = Moved::new(USES_MAX as u64 * of_one);
    let hostile = |number| format!("/pods/hostile/{number}");
    let noted = (0..USES_MAX).take_while(|it| moved.to(&hostile(*it)).1 == 0).count();
    // 9 of 16 parts of 1,000.
    assert_eq!(noted, 563);
    for (more, other) in ["/pods/other", "/pods/other/below", "/elsewhere"].iter().enumerate() {
        assert_eq!(moved.to(other), (noted + more + 1, 0), "{other}");
    }
    assert_eq!(moved.to(&hostile(noted)), (noted + 3, 1));
    assert_eq!(moved.to(&hostile(0)), (noted + 3, 0), "it is listed");
    // The same after a new count.
    moved.ledger.refresh(&Budget::UNLIMITED).unwrap();
    assert_eq!(moved.to(&hostile(noted)), (noted + 3, 1));
    assert_eq!(moved.to("/pods/third"), (noted + 4, 0));
}
