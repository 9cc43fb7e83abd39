//! Notifications of files that are opened on a filesystem (fanotify(7)).
//!
//! Only notifications: a permission event would let this process hold up every open of the machine.

use std::ffi::CString;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::io::Errno;

/// A group of marks, and the queue of their events: 16,384 of them unless
/// `fs.fanotify.max_queued_events` says otherwise.
#[derive(Debug)]
pub struct Opens(OwnedFd);

/// What was read from a queue.
#[derive(Debug)]
pub enum Event {
    /// A file was opened, to be read or to be executed.
    Opened {
        /// The file, opened for this process. It keeps the mount busy until it is closed.
        file: OwnedFd,
        /// The process that opened it, which may have ended.
        pid: u32,
    },
    /// A file was opened that the kernel could not open for this process: `EMFILE`, `ENFILE`,
    /// `EACCES`, `ENXIO`, … Before Linux 6.13 the kernel drops such an event without a word unless
    /// a read begins with it.
    Unreadable(io::Error),
    /// The queue was full, and an unknown number of events is lost.
    Overflow,
}

/// An event whose file cannot be opened has the error's number, negative, instead of a descriptor
/// (`include/uapi/linux/fanotify.h`, Linux 6.13).
const FAN_REPORT_FD_ERROR: libc::c_uint = 0x2000;

/// Bytes that one read takes: some 170 events.
const BUFFER: usize = 4096;

impl Opens {
    /// A group without marks. Reading from it does not wait.
    /// Errors: `EPERM` without `CAP_SYS_ADMIN`, `ENOSYS` where the kernel has no fanotify, `EMFILE`.
    pub fn new() -> io::Result<Self> {
        let flags = libc::FAN_CLASS_NOTIF
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_MARKS;
        match group(flags | FAN_REPORT_FD_ERROR) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => group(flags),
            made => made,
        }
    }

    /// Notes every file that is opened on the filesystem that `file` lies on, whatever mount it is
    /// opened through. An `O_PATH` descriptor will do. The mark ends with the filesystem and does
    /// not keep it mounted. Errors: those of fanotify_mark(2).
    pub fn mark_filesystem(&self, file: impl AsFd) -> io::Result<()> {
        // With a descriptor and no path, the kernel refuses one that was opened with O_PATH.
        let path = CString::new(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))?;
        // SAFETY: `path` is a C string that lives through the call; all else are numbers.
        let ret = unsafe {
            libc::fanotify_mark(
                self.0.as_raw_fd(),
                libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM,
                libc::FAN_OPEN | libc::FAN_OPEN_EXEC,
                libc::AT_FDCWD,
                path.as_ptr(),
            )
        };
        if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Becomes readable when there are events.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reads some events; none if there are none. Errors: `EBADF`, `EINVAL` and `EFAULT` of
    /// read(2), `Unsupported` for events of another version and `InvalidData` for one that is too
    /// short. Any other one stands for an event's file, which the kernel opens as it copies the
    /// event (`fanotify_read`), and is an event here.
    pub fn read(&self) -> io::Result<Vec<Event>> {
        let mut buffer = [0_u8; BUFFER];
        let length = match rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut buffer)) {
            Err(Errno::AGAIN) => return Ok(Vec::new()),
            Err(error @ (Errno::BADF | Errno::INVAL | Errno::FAULT)) => return Err(error.into()),
            // The event is out of the queue.
            Err(error) => return Ok(vec![Event::Unreadable(error.into())]),
            Ok(length) => length,
        };
        let mut rest = &buffer[..length];
        let mut events = Vec::new();
        while let Some((event, length)) = split(rest)? {
            rest = rest.get(length..).unwrap_or_default();
            if event.mask & libc::FAN_Q_OVERFLOW != 0 {
                events.push(Event::Overflow);
            } else if event.fd >= 0 {
                // SAFETY: the kernel has opened it for the reader of this event.
                let file = unsafe { OwnedFd::from_raw_fd(event.fd) };
                events.push(Event::Opened { file, pid: event.pid.cast_unsigned() });
            } else {
                events.push(Event::Unreadable(io::Error::from_raw_os_error(-event.fd)));
            }
        }
        Ok(events)
    }
}

fn group(flags: libc::c_uint) -> io::Result<Opens> {
    let event_flags =
        libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC | libc::O_NOATIME | libc::O_NONBLOCK;
    // SAFETY: two numbers go in, a new descriptor or -1 comes out.
    let group = unsafe { libc::fanotify_init(flags, event_flags.cast_unsigned()) };
    if group < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else has it.
    Ok(Opens(unsafe { OwnedFd::from_raw_fd(group) }))
}

/// The first event in a buffer and its length. Fails where the kernel has another struct for it,
/// whose fields are none of ours (fanotify(7)), and for an event that is shorter than that.
fn split(bytes: &[u8]) -> io::Result<Option<(libc::fanotify_event_metadata, usize)>> {
    const SIZE: usize = size_of::<libc::fanotify_event_metadata>();
    let Some(head) = bytes.get(..SIZE) else { return Ok(None) };
    // SAFETY: there are as many bytes as the struct has, it consists of numbers only, and the read
    // does not need them to be aligned.
    let event: libc::fanotify_event_metadata =
        unsafe { head.as_ptr().cast::<libc::fanotify_event_metadata>().read_unaligned() };
    if event.vers != libc::FANOTIFY_METADATA_VERSION {
        let what = format!("fanotify events of version {}", event.vers);
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    match usize::try_from(event.event_len) {
        Ok(length) if length >= SIZE => Ok(Some((event, length))),
        _ => {
            let what = format!("a fanotify event of {} bytes", event.event_len);
            Err(io::Error::new(io::ErrorKind::InvalidData, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt as _;
    use std::path::Path;
    use std::process::Command;

    use rustix::process::{Resource, Rlimit};

    use super::*;

    fn opens() -> Option<Opens> {
        match Opens::new() {
            Ok(opens) => Some(opens),
            Err(error) => {
                println!("SKIP fanotify: {error}");
                None
            }
        }
    }

    /// A directory on a filesystem where nobody else opens much.
    fn quiet() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
    }

    /// Reads everything. The numbers of inodes and of processes that opened them, and of other
    /// events those that were unreadable and those that were lost.
    fn drain(opens: &Opens) -> (Vec<(u64, u32)>, usize, usize) {
        let (mut opened, mut unreadable, mut overflows) = (Vec::new(), 0, 0);
        loop {
            let events = opens.read().unwrap();
            if events.is_empty() {
                return (opened, unreadable, overflows);
            }
            for event in events {
                match event {
                    Event::Opened { file, pid } => {
                        opened.push((File::from(file).metadata().unwrap().ino(), pid));
                    }
                    Event::Unreadable(_) => unreadable += 1,
                    Event::Overflow => overflows += 1,
                }
            }
        }
    }

    /// A process opens these files, one after the other.
    fn open_all(files: &[&Path]) -> u32 {
        let mut child = Command::new("cat").args(files).spawn().unwrap();
        let pid = child.id();
        assert!(child.wait().unwrap().success());
        pid
    }

    /// Another process opens a file, and the event has its number and the file itself.
    #[test]
    fn opened_files_are_seen_with_their_opener() {
        let Some(opens) = opens() else { return };
        let dir = quiet();
        let path = dir.path().join("a");
        fs::write(&path, "a").unwrap();
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        let at = rustix::fs::open(dir.path(), flags, rustix::fs::Mode::empty()).unwrap();
        opens.mark_filesystem(&at).unwrap();
        let pid = open_all(&[&path]);
        let inode = fs::metadata(&path).unwrap().ino();
        assert!(drain(&opens).0.contains(&(inode, pid)));
    }

    #[test]
    fn an_empty_queue_is_no_error() {
        let Some(opens) = opens() else { return };
        assert!(opens.read().unwrap().is_empty());
    }

    /// For want of descriptors the kernel could not open the files of events. The first such error
    /// ended the reader's step, the others were lost unseen.
    #[test]
    fn events_whose_file_cannot_be_opened_are_counted() {
        if opens().is_none() {
            return;
        }
        // Another process, since all threads of one have the same limit.
        let worker = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "fanotify::tests::without_descriptors"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&worker.stdout);
        // Without a test of that name libtest succeeds, too.
        assert!(worker.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "worker: started by events_whose_file_cannot_be_opened_are_counted"]
    fn without_descriptors() {
        let opens = Opens::new().unwrap();
        let dir = quiet();
        let paths = ["a", "b", "c"].map(|name| dir.path().join(name));
        paths.iter().for_each(|path| fs::write(path, "").unwrap());
        let inodes = paths.each_ref().map(|path| fs::metadata(path).unwrap().ino());
        let paths = paths.each_ref().map(std::path::PathBuf::as_path);
        opens.mark_filesystem(File::open(dir.path()).unwrap()).unwrap();
        open_all(&paths);
        let before = rustix::process::getrlimit(Resource::Nofile);
        // Numbers of descriptors have to be smaller.
        let free = File::open(dir.path()).unwrap().as_raw_fd().cast_unsigned();
        let none_free = Rlimit { current: Some(u64::from(free)), maximum: before.maximum };
        rustix::process::setrlimit(Resource::Nofile, none_free).unwrap();
        let starved = drain(&opens);
        rustix::process::setrlimit(Resource::Nofile, before).unwrap();
        assert!(starved.0.is_empty() && starved.1 >= paths.len(), "{starved:?}");
        // Those that come later are seen.
        let pid = open_all(&paths);
        let seen = drain(&opens);
        assert!(inodes.iter().all(|inode| seen.0.contains(&(*inode, pid))), "{seen:?}");
        assert_eq!(seen.1, 0);
    }

    /// More events than the queue takes: what is lost is known to be lost, and later ones come.
    #[test]
    fn an_overflow_is_an_event() {
        let Some(opens) = opens() else { return };
        let read = |path| fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
        let events_max = read("/proc/sys/fs/fanotify/max_queued_events").unwrap_or(16_384);
        let dir = quiet();
        opens.mark_filesystem(File::open(dir.path()).unwrap()).unwrap();
        // Each is another file: equal events become one.
        let run = "i=0; while [ $i -lt $1 ]; do : >\"$0/$i\"; i=$((i + 1)); done";
        let count = (events_max + 100).to_string();
        let made = Command::new("sh").args(["-c", run]).arg(dir.path()).arg(count).status();
        assert!(made.unwrap().success());
        assert_eq!(drain(&opens).2, 1);
        let path = dir.path().join("0");
        let pid = open_all(&[&path]);
        assert!(drain(&opens).0.contains(&(fs::metadata(&path).unwrap().ino(), pid)));
    }

    /// A queue that is cut anywhere gives the whole events before the cut.
    #[test]
    fn a_cut_queue_ends() {
        const SIZE: usize = size_of::<libc::fanotify_event_metadata>();
        let event = |length: u32, fd: i32| {
            let mut bytes = length.to_ne_bytes().to_vec();
            // Version, a reserved byte, and the length of what is before further records.
            bytes.extend([libc::FANOTIFY_METADATA_VERSION, 0]);
            bytes.extend(u16::try_from(SIZE).unwrap().to_ne_bytes());
            bytes.extend(libc::FAN_OPEN.to_ne_bytes());
            bytes.extend(fd.to_ne_bytes());
            bytes.extend(7_i32.to_ne_bytes());
            bytes.resize(length as usize, 0);
            bytes
        };
        // The second one has a record of eight bytes behind it.
        let lengths = [SIZE, SIZE + 8, SIZE];
        let all: Vec<u8> = (10..)
            .zip(lengths)
            .flat_map(|(fd, it)| event(u32::try_from(it).unwrap(), fd))
            .collect();
        for end in 0..=all.len() {
            let (mut rest, mut found) = (&all[..end], Vec::new());
            while let Some((event, length)) = split(rest).unwrap() {
                assert_eq!((event.mask, event.pid), (libc::FAN_OPEN, 7));
                found.push(event.fd);
                rest = rest.get(length..).unwrap_or_default();
            }
            // The record behind the second event is not needed to read that.
            let whole = [SIZE, 2 * SIZE, 3 * SIZE + 8].iter().filter(|it| **it <= end).count();
            assert_eq!(found, (10..).take(whole).collect::<Vec<_>>(), "{end}");
        }
        // It ended the buffer without a word, and the files of the events behind it stayed open.
        let mut empty = [0; SIZE];
        empty[4] = libc::FANOTIFY_METADATA_VERSION;
        assert_eq!(split(&empty).unwrap_err().to_string(), "a fanotify event of 0 bytes");
        // The fields of another version were taken for those of this one.
        empty[4] += 1;
        assert_eq!(split(&empty).unwrap_err().kind(), io::ErrorKind::Unsupported);
    }
}
