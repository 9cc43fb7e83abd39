//! From the kernel to the program of the image, and to the end of both.

use std::convert::Infallible;
use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use cofolio_guest::kernel::{During, Result, kernel_filesystems, load_modules, say};
use cofolio_guest::{
    CHANNEL_PORT, Message, MessageError, RESTART_WORD, Start, Upper, VSOCK_PORT, VSOCK_WORD,
};
use cofolio_sys::vsock::connect_host;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change, mount_move};
use rustix::process::{Pid, chroot};
use rustix::system::{RebootCommand, reboot, sethostname};

use crate::{children, devices, exec, workload, writable};

/// How long drivers may take to find a device. An emulated processor is slow.
const DEVICE_SECONDS_MAX: u64 = 60;
/// How long the host may take to read the last message.
const LAST_SECONDS_MAX: i64 = 10;
/// How often the first process looks whether the host has gone while it waits to write.
const LOOK: Duration = Duration::from_millis(100);
/// Where the image is mounted, and then its overlay.
const IMAGE: &str = "/image";
const ROOT: &str = "/root";

/// Runs the guest, and switches it off.
pub(crate) fn run() -> ! {
    let mut host = Host::default();
    let last = match start(&mut host) {
        Ok(status) => Message::Ended(status),
        Err(error) => Message::Failed(error),
    };
    let is_told = host.say_last(&last);
    if let (false, Message::Failed(error)) = (is_told, &last) {
        // The console may be all that there is.
        let _ = writeln!(io::stderr(), "cofolio-guest: {error}");
    }
    rustix::fs::sync();
    // Or the kernel says on the console, behind what the program has said, that it ends.
    let _ = fs::write("/proc/sys/kernel/printk", "0");
    let how =
        if host.wants(RESTART_WORD) { RebootCommand::Restart } else { RebootCommand::PowerOff };
    let error = reboot(how);
    // The first process must not end: the kernel would panic.
    loop {
        let _ = writeln!(io::stderr(), "cofolio-guest: cannot switch off: {error:?}");
        thread::sleep(Duration::from_secs(3600));
    }
}

/// The host, as far as it is known.
#[derive(Default)]
struct Host {
    /// Words for the kernel.
    words: String,
    channel: Option<File>,
}

impl Host {
    fn wants(&self, word: &str) -> bool {
        self.words.split_whitespace().any(|it| it == word)
    }

    /// The channel to it.
    fn connect(&self) -> Result<File> {
        if !self.wants(VSOCK_WORD) {
            return open_port();
        }
        let socket = wait_until("the channel to the host", || connect_host(VSOCK_PORT).ok())?;
        Ok(socket.into())
    }

    /// Whether it was told.
    fn say_last(&self, last: &Message) -> bool {
        let Some(channel) = &self.channel else { return false };
        let is_told = write(channel, last).is_ok();
        if !self.wants(VSOCK_WORD) {
            return is_told;
        }
        // It is on its way only. The host closes the channel when it has it.
        let patience = Timespec { tv_sec: LAST_SECONDS_MAX, tv_nsec: 0 };
        let mut closed = [PollFd::new(channel, PollFlags::RDHUP)];
        let _ = poll(&mut closed, Some(&patience));
        is_told
    }
}

/// Writes a message, however slowly the host reads, unless the host has gone.
///
/// A write to a virtio port sleeps until somebody on the host has the other end, so a thread does
/// it. After `vm run` was killed nobody takes that end again, and the thread stays asleep.
fn write(channel: &File, message: &Message) -> Result<()> {
    let (mut port, message) = (channel.try_clone().during("channel")?, message.clone());
    let (sender, written) = mpsc::channel();
    let write = move || _ = sender.send(message.write(&mut port));
    thread::Builder::new().spawn(write).during("channel")?;
    loop {
        if let Ok(written) = written.recv_timeout(LOOK) {
            return written.during("channel");
        }
        if !is_connected(channel) {
            return Err("the host has gone".to_owned());
        }
    }
}

/// Whether somebody on the host has the other end of a channel.
fn is_connected(channel: &File) -> bool {
    let mut ends = [PollFd::new(channel, PollFlags::empty())];
    let polled = poll(&mut ends, Some(&Timespec::default()));
    polled.is_ok() && !ends[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Until the program of the image has ended; its status.
fn start(host: &mut Host) -> Result<u8> {
    kernel_filesystems(Path::new("/"))?;
    host.words = fs::read_to_string("/proc/cmdline").during("the kernel's words")?;
    say_free_memory();
    if let Err(error) = load_modules() {
        // The console may be a module as well: the host hears of it if the channel is there.
        host.channel = host.connect().ok();
        return Err(error);
    }
    let channel = host.connect()?;
    let channel = host.channel.insert(channel);
    let start = receive(channel)?;
    sethostname(start.hostname.as_bytes()).during("host name")?;
    // Programs use the loopback device. A kernel without network has none.
    let _ = cofolio_sys::loopback::switch_on();
    enter_root(mount_image(&start)?)?;
    // Before a program can mount something over `/dev`.
    exec::begin(start.process.clone()).during("listening for `vm exec`")?;
    let first = workload::start(&start).during(start.process.command.join(" "))?;
    let commands = channel.try_clone().during("channel")?;
    let console = workload::open_console(&start.console).during("console")?;
    // A machine whose `vm run` was killed goes on.
    let _ = write(channel, &Message::Started);
    thread::spawn(move || obey(commands, first, &console));
    Ok(children::reap_until(first))
}

/// Logs the free memory before the image's devices appear.
fn say_free_memory() {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    if let Some(free) = text.lines().find_map(|line| line.strip_prefix("MemFree:")) {
        say(&format!("{} free before the image comes", free.trim()));
    }
}

/// What the host wants to be started. It may not be connected yet.
fn receive(channel: &mut File) -> Result<Start> {
    wait_until("what to start", || match Message::read(channel) {
        Ok(Message::Start(start)) => Some(Ok(*start)),
        Ok(other) => Some(Err(format!("the host's first message is `{}`", other.kind()))),
        Err(MessageError::Closed) => None,
        Err(error) => Some(Err(error.to_string())),
    })?
}

/// Waits until something is there.
fn wait_until<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = find() {
            return Ok(found);
        }
        if began.elapsed() > Duration::from_secs(DEVICE_SECONDS_MAX) {
            return Err(format!("{what} did not appear in {DEVICE_SECONDS_MAX} s"));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// The channel to the host where it is a virtio port with its name.
fn open_port() -> Result<File> {
    let is_it = |port: &Path| {
        fs::read_to_string(port.join("name")).is_ok_and(|name| name.trim() == CHANNEL_PORT)
    };
    let device = wait_until("the channel to the host", || {
        let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
        let port = ports.filter_map(|port| Some(port.ok()?.path())).find(|port| is_it(port))?;
        Some(Path::new("/dev").join(port.file_name()?)).filter(|device| device.exists())
    })?;
    let port = File::options().read(true).write(true).open(&device).during(device.display())?;
    // The kernel hears of the host's end a moment after the port was opened.
    wait_until("the host's end of the channel", || is_connected(&port).then_some(()))?;
    Ok(port)
}

/// Mounts the pack with its segments, and an overlay for changes; returns where the root is.
fn mount_image(start: &Start) -> Result<&'static Path> {
    let paths = wait_until("a device of the image", || devices::find(&start.devices))?;
    let (pack, segments) = paths.split_first().ok_or("the image has no devices")?;
    let devices = segments.iter().map(|path| format!(",device={}", path.display()));
    let options = format!("dax=always{}", devices.collect::<String>());
    let options = std::ffi::CString::new(options).during("options")?;
    for dir in [IMAGE, ROOT] {
        fs::create_dir_all(dir).during(dir)?;
    }
    let read_only = MountFlags::RDONLY;
    mount(pack, IMAGE, "erofs", read_only, &*options).during("the image")?;
    // Of one device without DAX the kernel turns it off for all, and says so in its log alone.
    let mounts = fs::read_to_string("/proc/mounts").during("/proc/mounts")?;
    let of_image = |line: &&str| line.split(' ').nth(1) == Some(IMAGE);
    if !mounts.lines().find(of_image).is_some_and(|line| line.contains("dax=always")) {
        return Err("the kernel has mounted the image without DAX".to_owned());
    }
    mount_overlay(&start.upper)?;
    let Some(dirs) = &start.dirs else { return Ok(Path::new(ROOT)) };
    writable::lay_over(Path::new(IMAGE), Path::new(ROOT), dirs)?;
    Ok(Path::new(IMAGE))
}

/// Mounts the filesystem for changes, and the image below it at [`ROOT`].
fn mount_overlay(upper: &Upper) -> Result<()> {
    let changes = Path::new("/changes");
    fs::create_dir_all(changes).during(changes.display())?;
    // In memory, changes of owners and modes leave the content where it is. On a disk, nothing may
    // refer to inodes of the image: the next machine can have another pack of it.
    let options = match upper {
        Upper::Memory => {
            mount("changes", changes, "tmpfs", MountFlags::empty(), c"mode=0755")
                .during("the filesystem for changes")?;
            c"lowerdir=/image,upperdir=/changes/upper,workdir=/changes/work,metacopy=on,xino=off"
        }
        Upper::Disk { filesystem, image } => {
            let disk = wait_until("the disk", || {
                Some(Path::new("/dev/vda")).filter(|disk| disk.exists())
            })?;
            mount(disk, changes, &**filesystem, MountFlags::empty(), c"discard")
                .during("the filesystem of the disk")?;
            claim(changes, image)?;
            c"lowerdir=/image,upperdir=/changes/upper,workdir=/changes/work,metacopy=off,xino=off,\
                index=off,redirect_dir=nofollow"
        }
    };
    for dir in ["upper", "work"] {
        let dir = changes.join(dir);
        fs::create_dir_all(&dir).during(dir.display())?;
    }
    mount("cofolio", ROOT, "overlay", MountFlags::empty(), options).during("the overlay")
}

/// Writes on a disk to which image its changes belong. Fails if they belong to another one.
fn claim(changes: &Path, image: &str) -> Result<()> {
    let record = changes.join("image");
    match fs::read_to_string(&record) {
        Ok(found) if found.trim() == image => return Ok(()),
        Ok(found) => {
            let found = found.trim();
            return Err(format!("the disk has changes of image {found}, not of {image}"));
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).during(record.display());
        }
        Err(_) if changes.join("upper").exists() => {
            return Err("the disk has a directory `upper` of somebody else's".to_owned());
        }
        Err(_) => {}
    }
    // Complete before there is anything that it is about.
    let aside = changes.join("image.new");
    let write = || {
        let mut file = File::create(&aside)?;
        writeln!(file, "{image}")?;
        file.sync_all()?;
        fs::rename(&aside, &record)?;
        File::open(changes)?.sync_all()
    };
    write().during(record.display())
}

/// Makes the image the root, with the kernel's filesystems and those that programs expect.
fn enter_root(root: &Path) -> Result<()> {
    for dir in ["dev", "proc", "sys", "run", "tmp"] {
        let path = root.join(dir);
        // A read-only root stays without.
        if fs::create_dir(&path).is_ok() && dir == "tmp" {
            fs::set_permissions(&path, Permissions::from_mode(0o1777)).during("mode of /tmp")?;
        }
    }
    let dirs = [("/dev", "dev"), ("/proc", "proc"), ("/sys", "sys")];
    for (from, to) in dirs {
        mount_move(from, root.join(to)).during(format_args!("/{to} of the image"))?;
    }
    let in_memory = MountFlags::NOSUID | MountFlags::NODEV;
    for (kind, dir, options) in [
        ("devpts", "pts", c"newinstance,ptmxmode=0666,mode=0620,gid=5"),
        ("tmpfs", "shm", c"mode=1777"),
        ("mqueue", "mqueue", c""),
    ] {
        let dir = root.join("dev").join(dir);
        let _ = fs::create_dir(&dir);
        // Kernels can be without them.
        let _ = mount(kind, &dir, kind, in_memory | MountFlags::NOEXEC, options);
    }
    for (to, link) in
        [("/proc/self/fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr")]
    {
        let _ = std::os::unix::fs::symlink(to, root.join("dev").join(link));
    }
    // The initramfs is below the new root then, out of sight. Its files are in memory.
    let _ = fs::remove_file("/init");
    std::env::set_current_dir(root).during(root.display())?;
    mount_move(".", "/").during("the new root")?;
    chroot(".").during("the new root")?;
    std::env::set_current_dir("/").during("/")?;
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC).during("/")
}

/// Does what the host asks for.
fn obey(mut channel: File, first: Pid, console: &File) -> Option<Infallible> {
    loop {
        match Message::read(&mut channel) {
            Ok(Message::Signal(number)) => {
                let _ = cofolio_sys::process::kill(first, number);
            }
            Ok(Message::Size(rows, columns)) => _ = workload::resize(console, rows, columns),
            Ok(_) => {}
            // Nobody is connected; reading would not wait.
            Err(_) => thread::sleep(Duration::from_millis(500)),
        }
    }
}
