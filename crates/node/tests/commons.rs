//! The commons against a live kernel, with cgroups of the version that the machine has: who is
//! charged for what containers share.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test says why it is skipped, or stops"
)]

#[path = "common/cache.rs"]
mod cache;
#[path = "common/live.rs"]
mod live;

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cache::forget;
use cofolio_image::import;
use cofolio_image::pack::segment::Form;
use cofolio_image::pack::{ImageContents, PackOptions, pack};
use cofolio_image::source::Source;
use cofolio_node::cgroup::{Cgroup, CgroupError, Hierarchy, Version};
use cofolio_node::commons::COMMONS_LIMIT_MIN;
use cofolio_node::commons::{Commons, CommonsError, Warmed};
use cofolio_node::ledger::{Ledger, LedgerError, ReclaimRequest, ReclaimTarget, Report};
use cofolio_node::mount::{MountError, MountRequest, Mounter, UmountOptions};
use cofolio_node::probe::{self, Presence};
use cofolio_node::profile::{Missed, Profile, ProfileError, Recorder};
use cofolio_node::run_dir::RunDir;
use cofolio_node::settings::{Backend, DomainSettings as _};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, InitOptions, Store};
use cofolio_sys::cache::page_size;
use live::{Holder, alone, cgroup, next_tick};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::thread::transparent_huge_pages_are_disabled;

const MIB: u64 = 1 << 20;
/// As many programs map one library each, since a worker maps one file.
const LIBRARIES: usize = 5;

/// Directories with an empty file each.
const DIRECTORIES: usize = 40;

/// An image of libraries and directories, mounted.
struct Libraries {
    dir: tempfile::TempDir,
    domain: Domain,
    image: Digest,
    objects: Vec<Digest>,
}

impl Libraries {
    fn new(count: usize, bytes: u64) -> Self {
        Self::with(count, bytes, Backend::Overlay)
    }

    fn with(count: usize, bytes: u64, backend: Backend) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("libraries");
        fs::create_dir(&top).unwrap();
        let bytes = usize::try_from(bytes).unwrap();
        let content = |number: usize| -> Vec<u8> {
            (0..bytes).map(|at| (at / 4096 * 31 + number).to_le_bytes()[0]).collect()
        };
        let objects = (0..count).map(|number| {
            fs::write(top.join(format!("lib{number}.so")), content(number)).unwrap();
            cofolio_store::verity::digest(&content(number))
        });
        let objects = objects.collect();
        for number in 0..DIRECTORIES {
            let directory = top.join(format!("dir{number}"));
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("empty"), b"").unwrap();
        }
        let store = Store::init(&dir.path().join("store"), &InitOptions { immutable: false });
        let domain = store.unwrap().domain("default").unwrap();
        let source = Source::parse(top.to_str().unwrap()).unwrap();
        let options = import::ImportOptions { name: Some("it".into()), ..Default::default() };
        let image = import::import(&domain, &source, &options, &Task::default()).unwrap().image;
        if backend == Backend::InodeShare {
            pack(&domain, &image, &PackOptions::default(), &Task::default()).unwrap();
            domain.set_backend(backend, Form::Plain).unwrap();
        }
        let made = Self { dir, domain, image, objects };
        made.mount();
        made
    }

    fn mount(&self) {
        let request = MountRequest::new(self.image, self.target());
        self.mounter().mount(&MountRequest { create_target: true, ..request }).unwrap();
    }

    fn umount(&self) -> Result<(), MountError> {
        self.mounter().umount(&self.target(), &UmountOptions::default()).map(drop)
    }

    fn warm(&self, commons: &Commons, profile: Option<&Profile>) -> Result<Warmed, CommonsError> {
        commons.warm(&self.domain, &self.run(), &self.image, profile, &Task::default())
    }

    fn run(&self) -> RunDir {
        RunDir::open(self.dir.path().join("run")).unwrap()
    }

    fn target(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn mounter(&self) -> Mounter<'_> {
        Mounter::new(&self.domain, self.run(), &ImageContents)
    }

    fn library(&self, number: usize) -> PathBuf {
        self.target().join(format!("lib{number}.so"))
    }

    /// A container that lists a directory.
    fn list(&self, number: usize, cgroup: Option<&Cgroup>) {
        let directory = self.target().join(format!("dir{number}"));
        let procs = cgroup.map_or_else(|| "/dev/null".into(), Cgroup::procs);
        let run = "echo 0 > \"$0\" && ls \"$1\"";
        let output = Command::new("sh").args(["-c", run]).args([procs, directory]).output();
        assert_eq!(output.unwrap().stdout, b"empty\n");
    }

    fn forget(&self) {
        self.objects.iter().for_each(|it| forget(&self.domain.object_path(it).unwrap()));
    }

    /// Programs that map all libraries.
    fn start(&self, cgroup: Option<&Cgroup>) -> Vec<Holder> {
        let all = 0..self.objects.len();
        all.map(|number| Holder::new(&self.library(number), cgroup)).collect()
    }

    /// What a container that starts is charged for pages of files, and whether its limit held it up.
    fn charged(&self, test: &str, limit_bytes: Option<u64>) -> Option<(u64, bool)> {
        let group = cgroup(test, "small")?;
        limit_bytes.iter().for_each(|bytes| group.limit(*bytes).unwrap());
        let holders = self.start(Some(&group));
        let found = (group.charge().unwrap().cache, group.was_at_its_limit().unwrap());
        drop(holders);
        Some(found)
    }
}

impl Drop for Libraries {
    fn drop(&mut self) {
        self.forget();
        let umounted = self.umount();
        assert!(umounted.is_ok() || std::thread::panicking(), "{umounted:?}");
    }
}

/// A commons cgroup of this test's own. Dropped, it goes; so its pages have to be gone.
struct Own(String);

impl Own {
    fn new() -> Self {
        Self(format!("cofolio-commons-{}", std::process::id()))
    }

    fn open(&self, limit_bytes: Option<u64>) -> Commons {
        Commons::open(&self.0, limit_bytes).unwrap()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = Hierarchy::find(Path::new("/")).unwrap().remove(&self.0);
    }
}

/// Shared libraries of 100 MiB in a container that may have 32 MiB. Charged for them it lives on
/// reclaim; where the commons have them, read as a whole or by a profile, it is charged for hardly
/// anything.
#[test]
fn the_commons_pay_for_what_is_shared() {
    let test = "the_commons_pay_for_what_is_shared";
    let Some(_alone) = alone(test) else { return };
    let all = Libraries::new(LIBRARIES, 20 * MIB);
    let small = Some(32 * MIB);
    all.forget();
    let Some((charge, _)) = all.charged(test, None) else { return };
    assert!(charge >= 100 * MIB, "{charge}");
    all.forget();
    let (charge, pressed) = all.charged(test, small).unwrap();
    assert!(charge > 16 * MIB && pressed, "{charge}");

    all.forget();
    // That took pages of the worker's program away, which are not what is counted here.
    drop(Holder::new(&all.dir.path().join("libraries/lib0.so"), None));
    let own = Own::new();
    let warm = |commons: &Commons, profile: Option<&Profile>| all.warm(commons, profile).unwrap();
    let metadata = format!("store/domains/default/images/{}.erofs", all.image);
    let metadata = all.dir.path().join(metadata);
    forget(&metadata);
    assert_eq!(cache::resident(&metadata), 0);
    let warmed = warm(&own.open(None), None);
    assert_eq!((warmed.objects, warmed.bytes), (5, 100 * MIB));
    // Cgroups of containers that had looked up other names than those before stayed, each for a page
    // of it.
    assert_eq!(cache::resident(&metadata), fs::metadata(&metadata).unwrap().len().div_ceil(4096));
    // A page that was charged to the removed cgroup may go meanwhile: two were seen to.
    assert!(warmed.resident_bytes >= 99 * MIB, "{warmed:?}");
    assert!(warmed.commons_bytes >= 99 * MIB, "{warmed:?}");
    let (charge, pressed) = all.charged(test, small).unwrap();
    assert!(charge < 5 * MIB && !pressed, "{charge}, {pressed}");

    // What a start maps is recorded: here all but the first library.
    let begin = || Recorder::begin(&all.domain, all.run(), all.image, "it");
    let mut recorder = begin().unwrap();
    // Of two at a time each dropped what the other had seen, and a third of the profiles were cut.
    assert!(matches!(begin(), Err(ProfileError::Busy)));
    let holders: Vec<_> =
        (1..LIBRARIES).map(|number| Holder::new(&all.library(number), None)).collect();
    // Opens of processes that have ended count as the container's, and these are in another cgroup.
    drop(holders);
    recorder.take().unwrap();
    let (profile, missed) = recorder.end().unwrap();
    assert_eq!((profile.files.len(), missed), (LIBRARIES - 1, Missed::default()));
    assert!((79 * MIB..=80 * MIB).contains(&profile.bytes()), "{}", profile.bytes());
    profile.write(&all.domain).unwrap();

    // An opened file without pages was left out without a word.
    let mut recorder = begin().unwrap();
    (0..2).for_each(|number| drop(Holder::new(&all.library(number), None)));
    recorder.take().unwrap();
    forget(&all.domain.object_path(&all.objects[0]).unwrap());
    let (cut, missed) = recorder.end().unwrap();
    assert_eq!((cut.files.len(), missed), (1, Missed { opens: 0, files: 1 }));
    all.forget();
    let warmed = warm(&own.open(None), Some(&Profile::read(&all.domain, &all.image).unwrap()));
    assert_eq!((warmed.objects, warmed.bytes), (4, profile.bytes()));
    assert!(warmed.resident_bytes >= 79 * MIB, "{warmed:?}");
    // So the container pays for the first one alone.
    let (charge, pressed) = all.charged(test, small).unwrap();
    assert!((20 * MIB..25 * MIB).contains(&charge) && !pressed, "{charge}, {pressed}");

    // The limit of the commons holds, and what is over it stays readable. To read all of it pushed out
    // what had been read first.
    all.forget();
    let warmed = warm(&own.open(Some(40 * MIB)), None);
    assert!(warmed.commons_bytes <= 40 * MIB, "{warmed:?}");
    assert_eq!((warmed.objects_read, warmed.stopped_at_limit_bytes), (1, Some(40 * MIB)));
    let again = warm(&own.open(None), None);
    // At the limit the kernel dropped pages of the first one, 2 MiB at once, and each mount read them
    // again.
    assert_eq!((again.objects_read, again.stopped_at_limit_bytes), (0, Some(40 * MIB)));
    assert_eq!(again.resident_before_bytes, warmed.resident_bytes);
    assert!(again.resident_bytes >= warmed.resident_bytes, "{warmed:?} {again:?}");
    drop(all.start(None));
    all.forget();
}

/// After an import the smaller files were in the cache, charged to whoever imported. They took room
/// under the commons' limit, which was reached with the commons empty; containers paid for the rest.
#[test]
fn what_others_are_charged_for_takes_no_room() {
    let test = "what_others_are_charged_for_takes_no_room";
    let Some(_alone) = alone(test) else { return };
    let Some(group) = cgroup(test, "importer") else { return };
    let all = Libraries::new(LIBRARIES, 20 * MIB);
    all.forget();
    let own = Own::new();
    let holders = [0, 1].map(|number| Holder::new(&all.library(number), Some(&group)));
    let warmed = all.warm(&own.open(Some(80 * MIB)), None).unwrap();
    assert_eq!((warmed.objects_read, warmed.stopped_at_limit_bytes), (3, None), "{warmed:?}");
    assert_eq!(warmed.resident_bytes, 100 * MIB, "{warmed:?}");
    assert!((59 * MIB..61 * MIB).contains(&warmed.commons_bytes), "{warmed:?}");
    let warmed = all.warm(&own.open(None), None).unwrap();
    assert_eq!((warmed.objects_read, warmed.stopped_at_limit_bytes), (0, None), "{warmed:?}");
    drop(holders);
    all.forget();
}

/// Resident pages of a file took room that its missing ones could have had: under a limit of 16 MiB,
/// nothing was read of a file of 40 MiB whose first 20 MiB others were charged for.
#[test]
fn a_file_that_is_resident_in_part_gets_the_room_there_is() {
    let test = "a_file_that_is_resident_in_part_gets_the_room_there_is";
    let Some(_alone) = alone(test) else { return };
    let Some(group) = cgroup(test, "importer") else { return };
    let all = Libraries::new(1, 40 * MIB);
    all.forget();
    let mut file = fs::File::open(all.library(0)).unwrap();
    // Without it, the kernel reads further than it is asked to.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let inside = group.enter().unwrap();
    std::io::copy(&mut (&mut file).take(20 * MIB), &mut std::io::sink()).unwrap();
    drop(inside);
    let own = Own::new();
    let warmed = all.warm(&own.open(Some(COMMONS_LIMIT_MIN.0)), None).unwrap();
    assert_eq!((warmed.objects_read, warmed.stopped_at_limit_bytes), (0, Some(16 * MIB)));
    assert!(warmed.commons_bytes >= 12 * MIB, "{warmed:?}");
    assert!(warmed.resident_bytes >= 32 * MIB, "{warmed:?}");
    all.forget();
}

/// Bytes that this process has had read from disks.
fn read_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("read_bytes: ")).unwrap().parse().unwrap()
}

/// Two images of 48 MiB in commons of 64 MiB, the first of them warmed.
struct Two {
    own: Own,
    first: Libraries,
    second: Libraries,
}

impl Two {
    const LIMIT_BYTES: u64 = 64 * MIB;

    fn new() -> Self {
        let [first, second] = [(); 2].map(|()| Libraries::new(12, 4 * MIB));
        let two = Self { own: Own::new(), first, second };
        two.forget();
        let warmed = two.first.warm(&two.commons(), None).unwrap();
        assert_eq!((warmed.objects_read, warmed.stopped_at_limit_bytes), (12, None), "{warmed:?}");
        two
    }

    fn commons(&self) -> Commons {
        self.own.open(Some(Self::LIMIT_BYTES))
    }

    fn warm_second(&self) -> Warmed {
        self.second.warm(&self.commons(), None).unwrap()
    }

    fn read_first(&self) {
        (0..12).for_each(|number| drop(fs::read(self.first.library(number)).unwrap()));
    }

    fn resident_of_first(&self) -> u64 {
        (0..12).map(|number| cache::resident(&self.first.library(number)) * page_size()).sum()
    }

    fn forget(&self) {
        self.first.forget();
        self.second.forget();
    }
}

/// An image of 48 MiB was warmed under a limit of 64 MiB and read four times, then another one of
/// 48 MiB was warmed. The kernel keeps what was used twice, so the second image lost its first
/// files to its last ones: each `warm` read nearly all of it again, took more of the first image
/// away, and did not say that there was no room.
#[test]
fn an_image_that_is_read_keeps_its_room() {
    let test = "an_image_that_is_read_keeps_its_room";
    let Some(_alone) = alone(test) else { return };
    // Hexadecimal: the lowest bit is the main switch. No such file where it is not built in.
    let bits = fs::read_to_string("/sys/kernel/mm/lru_gen/enabled").unwrap_or_default();
    let bits = u32::from_str_radix(bits.trim().trim_start_matches("0x"), 16).unwrap_or(0);
    if bits & 1 == 1 {
        return println!("SKIP {test}: the multi-generation LRU does not count reads as use");
    }
    let Some(_) = cgroup(test, "c") else { return };
    let two = Two::new();
    (0..4).for_each(|_| two.read_first());
    let warmed = two.warm_second();
    assert_eq!(warmed.stopped_at_limit_bytes, Some(Two::LIMIT_BYTES), "{warmed:?}");
    assert!(warmed.resident_bytes >= 14 * MIB, "{warmed:?}");
    for _ in 0..10 {
        assert!(two.resident_of_first() >= 46 * MIB, "{}", two.resident_of_first());
        two.read_first();
        let before = read_bytes();
        let again = two.warm_second();
        assert_eq!(again.stopped_at_limit_bytes, Some(Two::LIMIT_BYTES), "{again:?}");
        assert!(again.resident_before_bytes >= 12 * MIB, "{again:?}");
        assert!(read_bytes() - before <= 4 * MIB, "{}", read_bytes() - before);
    }
    // Now nobody reads it any more. The second image had all its room after 17 times; the manual
    // says a few dozen.
    let times = (1..=48).find(|_| two.warm_second().resident_bytes >= 47 * MIB);
    println!("an image that is not used any more gave way when another was warmed {times:?} times");
    assert!(times.is_some());
    two.forget();
}

/// At the limit of a cgroup the kernel does not look at whether processes of other cgroups use a page
/// that they map: to warm another image took 33 of the 48 MiB away that containers mapped.
#[test]
fn an_image_that_is_mapped_keeps_its_room() {
    let test = "an_image_that_is_mapped_keeps_its_room";
    let Some(_alone) = alone(test) else { return };
    let Some(_) = cgroup(test, "c") else { return };
    let two = Two::new();
    let holders = two.first.start(None);
    let warmed = two.warm_second();
    assert_eq!(warmed.stopped_at_limit_bytes, Some(Two::LIMIT_BYTES), "{warmed:?}");
    assert!(warmed.resident_bytes >= 14 * MIB, "{warmed:?}");
    assert!(two.resident_of_first() >= 44 * MIB, "{}", two.resident_of_first());
    drop(holders);
    two.forget();
}

/// An image that nobody has used since it was warmed gives way to the next one at once.
#[test]
fn an_image_that_is_not_used_gives_way() {
    let test = "an_image_that_is_not_used_gives_way";
    let Some(_alone) = alone(test) else { return };
    let Some(_) = cgroup(test, "c") else { return };
    let two = Two::new();
    let warmed = two.warm_second();
    assert_eq!((warmed.objects_read, warmed.stopped_at_limit_bytes), (12, None), "{warmed:?}");
    assert!(warmed.resident_bytes >= 47 * MIB, "{warmed:?}");
    two.forget();
}

/// The commons kept a limit of 64 KiB, and the kernel killed each process that read ahead.
#[test]
fn nothing_is_read_ahead_under_too_small_a_limit() {
    let test = "nothing_is_read_ahead_under_too_small_a_limit";
    let Some(_alone) = alone(test) else { return };
    let Some(_) = cgroup(test, "c") else { return };
    let all = Libraries::new(LIBRARIES, MIB / 4 + 1);
    all.forget();
    let own = Own::new();
    let commons = own.open(None);
    let cgroup = Hierarchy::find(Path::new("/")).unwrap().standing(&own.0).unwrap();
    cgroup.limit(64 << 10).unwrap();
    let error = all.warm(&commons, None).unwrap_err();
    assert!(matches!(error, CommonsError::Limit { limit_bytes: 65536 }), "{error}");
    let warmed = all.warm(&own.open(Some(COMMONS_LIMIT_MIN.0)), None).unwrap();
    // Pages were compared with bytes: more was resident than there was.
    assert_eq!(warmed.resident_bytes, warmed.bytes, "{warmed:?}");
    assert_eq!((warmed.objects_read, warmed.stopped_at_limit_bytes), (5, None));
    all.forget();
}

/// A kernel that gives huge pages to all gave them to the process that read ahead: 8 MiB of the
/// commons' limit for some pages. Each new one pushed out 2 MiB of what had been read.
#[test]
fn inside_a_cgroup_there_are_no_huge_pages() {
    let test = "inside_a_cgroup_there_are_no_huge_pages";
    let Some(_alone) = alone(test) else { return };
    let Some(group) = cgroup(test, "c") else { return };
    let inside = group.enter().unwrap();
    let mut memory = std::hint::black_box(vec![0; 8 << 20]);
    memory[4 << 20] = 1;
    // For machines whose kernel gives none anyway.
    assert!(transparent_huge_pages_are_disabled().unwrap());
    drop(inside);
    let charge = group.charge().unwrap();
    assert!((4096..MIB).contains(&charge.total), "{charge:?}");
    drop(memory);
    assert!(!transparent_huge_pages_are_disabled().unwrap());
}

/// The kernel said "Device or resource busy", and nobody what was busy.
#[test]
fn a_limit_makes_room_where_it_can() {
    let test = "a_limit_makes_room_where_it_can";
    let Some(_alone) = alone(test) else { return };
    let Some(group) = cgroup(test, "c") else { return };
    // Pages that can be dropped make room.
    let dropped = tempfile::NamedTempFile::new().unwrap();
    dropped.as_file().set_len(8 * MIB).unwrap();
    forget(dropped.path());
    let inside = group.enter().unwrap();
    std::io::copy(&mut fs::File::open(dropped.path()).unwrap(), &mut std::io::sink()).unwrap();
    drop(inside);
    assert!(group.charge().unwrap().cache >= 8 * MIB);
    group.limit(4 * MIB).unwrap();
    assert!(group.charge().unwrap().total <= 4 * MIB);
    // Version 2 takes any limit, and kills processes that do not fit. In swap there would be room.
    let has_swap = fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1);
    if Hierarchy::find(Path::new("/")).unwrap().version() == Version::V2 || has_swap {
        return;
    }
    group.limit(16 * MIB).unwrap();
    let inside = group.enter().unwrap();
    let mut file = fs::File::from(memfd_create("pages", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(&[1; 8 << 20]).unwrap();
    drop(inside);
    let limited = group.limit(4 * MIB);
    let is_expected =
        matches!(limited, Err(CgroupError::InUse { limit_bytes, .. }) if limit_bytes == 4 * MIB);
    assert!(is_expected, "{limited:?}");
}

/// Under memory pressure the kernel takes the pages of the commons, and containers get what they ask
/// for. A cgroup with a limit stands for the machine here: it holds the commons and a container.
#[test]
fn the_commons_give_way_to_containers() {
    let test = "the_commons_give_way_to_containers";
    let Some(_alone) = alone(test) else { return };
    let Some(machine) = cgroup(test, "machine") else { return };
    machine.limit(128 * MIB).unwrap();
    let hierarchy = Hierarchy::find(Path::new("/")).unwrap();
    if hierarchy.version() == Version::V2 {
        let control = machine.procs().with_file_name("cgroup.subtree_control");
        fs::write(control, "+memory").unwrap();
    }
    let procs = machine.procs();
    let name = procs.parent().unwrap().file_name().unwrap().to_str().unwrap();
    let container = hierarchy.create(&format!("{name}/container")).unwrap();
    let own = Own(format!("{name}/commons"));
    let commons = own.open(None);
    let all = Libraries::new(LIBRARIES, 20 * MIB);
    all.forget();
    let home = || fs::read_to_string("/proc/self/cgroup").unwrap();
    let before = home();
    let warmed = all.warm(&commons, None).unwrap();
    // From a cgroup in another one the process did not find its way back, and stayed there.
    assert_eq!(home(), before);
    assert!(warmed.commons_bytes >= 99 * MIB, "{warmed:?}");
    // Its buffer is memory of its own, all of which is written to.
    let run = "echo 0 > \"$0\" && exec dd if=/dev/zero of=/dev/null bs=104857600 count=1";
    let output = Command::new("sh").args(["-c", run]).arg(container.procs()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let left = hierarchy.standing(&own.0).unwrap().charge().unwrap().cache;
    assert!(left <= 28 * MIB, "{left}");
    // They come back from the disk as they were.
    for (number, object) in all.objects.iter().enumerate() {
        let content = fs::read(all.library(number)).unwrap();
        assert_eq!(cofolio_store::verity::digest(&content), *object);
    }
    all.forget();
}

/// Cgroups that were removed and that something still holds, of the whole machine.
fn dying() -> i64 {
    let hierarchy = Hierarchy::find(Path::new("/")).unwrap();
    let top = hierarchy.directory("/").unwrap();
    if hierarchy.version() == Version::V2 {
        let text = fs::read_to_string(top.join("cgroup.stat")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("nr_dying_descendants "));
        return line.unwrap().parse().unwrap();
    }
    fn directories(top: &Path) -> i64 {
        let entries = fs::read_dir(top).into_iter().flatten().flatten();
        let below = entries.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
        1 + below.map(|it| directories(&it.path())).sum::<i64>()
    }
    let text = fs::read_to_string("/proc/cgroups").unwrap();
    let line = text.lines().find(|line| line.starts_with("memory\t")).unwrap();
    line.split('\t').nth(2).unwrap().parse::<i64>().unwrap() - directories(&top)
}

/// Others on this machine make and remove cgroups, too.
const OTHERS: i64 = 3;

/// How many more than `before` there are once there are as many as should be, or will not be: the kernel
/// frees them some time after they are removed.
fn dying_once(before: i64, is_it: &dyn Fn(i64) -> bool) -> i64 {
    let patience = Instant::now() + Duration::from_secs(20);
    while !is_it(dying() - before) && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(50));
    }
    dying() - before
}

/// Whether page cache keeps a removed cgroup here. From Linux 7.0 on (7.2 was measured) the kernel
/// hands such pages to the parent, and no cgroup stays, with commons or without.
fn is_pinned_by_pages(test: &str) -> bool {
    let release = rustix::system::uname();
    let major = release.release().to_str().unwrap().split('.').next().unwrap();
    let is_pinned = major.parse::<u32>().unwrap() < 7;
    if !is_pinned {
        println!("SKIP {test}: page cache keeps no removed cgroups here");
    }
    is_pinned
}

/// Each of many containers is the first to read some file, which stays in use by others. Its cgroup
/// cannot be freed then: page cache refers to it. What the commons have read does not.
#[test]
fn warmed_images_pin_no_removed_cgroups() {
    const CONTAINERS: usize = 40;
    let test = "warmed_images_pin_no_removed_cgroups";
    let Some(_alone) = alone(test) else { return };
    if !is_pinned_by_pages(test) {
        return;
    }
    let all = Libraries::new(CONTAINERS, 64 << 10);
    let half = i64::try_from(CONTAINERS / 2).unwrap();
    // The first process reads its program, and whatever else every process needs.
    drop(Holder::new(&all.library(0), None));
    all.forget();
    let before = dying();
    let once = |is_it: &dyn Fn(i64) -> bool| dying_once(before, is_it);
    let run_and_remove = || {
        for number in 0..CONTAINERS {
            let group = cgroup(test, "short")?;
            drop(Holder::new(&all.library(number), Some(&group)));
        }
        Some(())
    };
    let Some(()) = run_and_remove() else { return };
    let cold = once(&|dying| dying > half);
    all.forget();
    let forgotten = once(&|dying| dying <= 0);
    let own = Own::new();
    let warmed = all.warm(&own.open(None), None);
    assert_eq!(warmed.unwrap().resident_bytes, CONTAINERS as u64 * (64 << 10));
    run_and_remove().unwrap();
    let warm = once(&|dying| dying <= 0);
    println!("of {CONTAINERS} removed cgroups stay: {cold} without the commons, {warm} with them");
    assert!(cold > half, "{cold}");
    assert!(forgotten <= OTHERS && warm <= OTHERS, "{cold} {forgotten} {warm}");
}

/// Directories have pages of their own in each mounted image, which warming did not read. A container that
/// looked into one first left a dying cgroup, for as long as the image was mounted.
#[test]
fn warmed_directories_pin_no_removed_cgroups() {
    let test = "warmed_directories_pin_no_removed_cgroups";
    let Some(_alone) = alone(test) else { return };
    if !is_pinned_by_pages(test) {
        return;
    }
    let all = Libraries::new(1, MIB);
    let half = i64::try_from(DIRECTORIES / 2).unwrap();
    // The first process reads its program, and whatever else every process needs.
    all.list(0, None);
    let remount = || {
        all.umount().unwrap();
        all.mount();
    };
    remount();
    let before = dying();
    let run_and_remove = || {
        for number in 0..DIRECTORIES {
            let group = cgroup(test, "short")?;
            all.list(number, Some(&group));
        }
        Some(())
    };
    let Some(()) = run_and_remove() else { return };
    let cold = dying_once(before, &|dying| dying > half);
    remount();
    let forgotten = dying_once(before, &|dying| dying <= 0);
    let own = Own::new();
    all.warm(&own.open(None), None).unwrap();
    run_and_remove().unwrap();
    let warm = dying_once(before, &|dying| dying <= 0);
    println!("of {DIRECTORIES} removed cgroups stay: {cold} without the commons, {warm} with them");
    assert!(cold > half, "{cold}");
    assert!(forgotten <= OTHERS && warm <= OTHERS, "{cold} {forgotten} {warm}");
    // Before the commons' cgroup goes.
    remount();
}

/// What a report says of the one container that is charged here: bytes used, and of these charged to the
/// commons.
fn of_container(report: &Report) -> (u64, Option<u64>) {
    let is_it = |path: &str| path.starts_with("/cofolio-test-");
    let found = report.containers.iter().find(|it| is_it(&it.cgroup)).unwrap();
    (found.used_bytes, found.commons_bytes)
}

/// Two libraries are in the commons and one is charged to a container that has read it first. Then
/// the two go, one after the other, and the container pays for them, too.
#[test]
fn the_ledger_says_what_the_commons_pay() {
    let test = "the_ledger_says_what_the_commons_pay";
    let Some(_alone) = alone(test) else { return };
    let Some(group) = cgroup(test, "c") else { return };
    let all = Libraries::new(3, MIB);
    let own = Own::new();
    let mut ledger = Ledger::new(all.domain.store().clone(), all.run()).with_commons(&own.0);
    all.forget();
    let first = Holder::new(&all.library(0), Some(&group));
    ledger.sample_all().unwrap();
    let report = ledger.report().unwrap();
    assert_eq!((report.commons, of_container(&report)), (None, (MIB, Some(0))));

    next_tick();
    all.warm(&own.open(Some(64 * MIB)), None).unwrap();
    let others = [1, 2].map(|number| Holder::new(&all.library(number), Some(&group)));
    ledger.sample_all().unwrap();
    let report = ledger.report().unwrap();
    let commons = report.commons.unwrap();
    assert_eq!(commons.limit_bytes, Some(64 * MIB));
    assert!((2 * MIB..3 * MIB).contains(&commons.charged_bytes), "{commons:?}");
    assert_eq!(of_container(&report), (3 * MIB, Some(2 * MIB)));
    let (image, domain) = (&report.images[0], &report.domains[0]);
    assert_eq!((image.resident_bytes, image.commons_bytes), (3 * MIB, Some(2 * MIB)));
    assert_eq!((domain.resident_bytes, domain.commons_bytes), (3 * MIB, Some(2 * MIB)));

    // As many pages are resident as before, and not the same ones.
    drop((first, others));
    forget(&all.domain.object_path(&all.objects[1]).unwrap());
    ledger.sample_all().unwrap();
    next_tick();
    let _again = [0, 1].map(|number| Holder::new(&all.library(number), Some(&group)));
    ledger.sample_all().unwrap();
    let report = ledger.report().unwrap();
    assert_eq!(report.images[0].commons_bytes, Some(MIB), "{report:#?}");
    // As many pages of one file. Its pages counted as the commons' until these grew.
    forget(&all.domain.object_path(&all.objects[2]).unwrap());
    let _again = Holder::new(&all.library(2), Some(&group));
    ledger.sample_all().unwrap();
    let report = ledger.report().unwrap();
    let image = &report.images[0];
    assert_eq!((image.resident_bytes, image.commons_bytes), (3 * MIB, Some(0)), "{report:#?}");
    // To look at the pages was no use of them.
    all.forget();
}

/// With `inode-share` the pages are in inodes that only a mounted pack shows.
#[test]
fn with_inode_share_the_mounted_pack_is_looked_at() {
    let test = "with_inode_share_the_mounted_pack_is_looked_at";
    let Some(_alone) = alone(test) else { return };
    let found = probe::probe(&probe::Options::default());
    if !found.get("inode-share").is_some_and(|it| it.presence == Presence::Present) {
        return println!("SKIP {test} with inode-share: this kernel has no inode_share");
    }
    let Some(group) = cgroup(test, "c") else { return };
    let all = Libraries::with(3, MIB, Backend::InodeShare);
    // Whoever packed them has read the objects.
    all.forget();
    let own = Own::new();
    let commons = own.open(None);
    all.umount().unwrap();
    let error = all.warm(&commons, None).unwrap_err();
    assert!(matches!(error, CommonsError::Ledger(LedgerError::NotMounted { .. })), "{error}");
    all.mount();
    let resident = |number: usize| cache::resident(&all.library(number)) * 4096;

    let warmed = all.warm(&commons, None).unwrap();
    assert_eq!((warmed.objects, warmed.bytes), (3, 3 * MIB));
    assert!(warmed.commons_bytes >= 3 * MIB, "{warmed:?}");
    let mut ledger = Ledger::new(all.domain.store().clone(), all.run()).with_commons(&own.0);
    let holders = [0, 1].map(|number| Holder::new(&all.library(number), Some(&group)));
    assert!(group.charge().unwrap().cache < MIB / 2, "{:?}", group.charge());
    ledger.sample_all().unwrap();
    let report = ledger.report().unwrap();
    assert_eq!(of_container(&report), (2 * MIB, Some(2 * MIB)));
    assert_eq!(report.images[0].resident_bytes, 2 * MIB);

    // What nobody maps any more is dropped on request.
    drop(holders);
    ledger.sample_all().unwrap();
    let target = ReclaimTarget::Domain("default".to_owned());
    let request = ReclaimRequest { target, bytes: None, shared: false, dry_run: false };
    assert_eq!(ledger.reclaim(&request).unwrap().freed_bytes, 2 * MIB);
    assert_eq!([0, 1, 2].map(resident), [0, 0, MIB]);

    // A recorder drops all of it, and sees what is opened.
    let mut recorder = Recorder::begin(&all.domain, all.run(), all.image, "it").unwrap();
    assert_eq!([0, 1, 2].map(resident), [0, 0, 0]);
    drop(Holder::new(&all.library(1), None));
    recorder.take().unwrap();
    let (profile, _) = recorder.end().unwrap();
    assert_eq!((profile.files.len(), profile.bytes()), (1, MIB));
    assert_eq!(profile.files[0].object, all.objects[1]);
}
