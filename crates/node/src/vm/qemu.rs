//! QEMU's command line.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cofolio_guest::CHANNEL_PORT;
use cofolio_sys::process::inherit;
use serde::{Deserialize, Serialize};

use super::error::{Result, VmError};
use super::initramfs::beside;
use super::vmm::{Channel, Launch, Machine};
use super::{merger, socket};
use crate::mount::At as _;
use crate::run_dir::running::random_number;
use crate::{kernel_text, programs};

/// The first PCI slot of the image's devices, eight to a slot; those before are for the others.
const FIRST_SLOT: usize = 8;
/// Most devices of an image.
const DEVICES_MAX: usize = (32 - FIRST_SLOT) * 8;
/// QEMU rounds what devices may take.
const DEVICE_ROOM: u64 = 1 << 30;

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accel {
    /// The processor, by the host's kernel.
    Kvm,
    /// An emulator, tens of times slower.
    Tcg,
}

impl Accel {
    /// KVM where the processor has what it needs. A kernel can offer it without.
    pub fn of_this_machine(root: &Path) -> Self {
        let flags = std::fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
        let has =
            |flag: &str| flags.lines().any(|line| line.split_whitespace().any(|it| it == flag));
        let is_open = File::options().read(true).write(true).open(root.join("dev/kvm")).is_ok();
        if is_open && (has("vmx") || has("svm")) { Self::Kvm } else { Self::Tcg }
    }
}

/// The program of QEMU for this machine's processor.
///
/// # Errors
/// [`VmError::Unsupported`].
pub(super) fn program() -> Result<PathBuf> {
    // virtio-pmem is on x86 machines of QEMU alone.
    if std::env::consts::ARCH != "x86_64" {
        let what = "QEMU has virtio-pmem, which images need, on x86-64 only";
        return Err(VmError::Unsupported(what.to_owned()));
    }
    let name = "qemu-system-x86_64";
    programs::find(name).ok_or_else(|| VmError::Unsupported(format!("{name} is not installed")))
}

/// What starts it. The guest's console is its standard input and output.
///
/// # Errors
/// [`VmError::Unsupported`] for an image with too many devices, [`VmError::Mount`].
pub(super) fn launch(machine: &Machine<'_>, program: &Path) -> Result<Launch> {
    // It serves one client at a time at each.
    let monitors = ["qmp", "recycle", "exec"].map(|name| {
        let listener = socket::listen(machine.dir, name);
        Ok::<_, VmError>(OwnedFd::from(listener.at("listening at", machine.dir.join(name))?))
    });
    let monitors = monitors.into_iter().collect::<Result<Vec<_>>>()?;
    let (channel, guests) = UnixStream::pair().at("making", "a socket")?;
    let guests = OwnedFd::from(guests);
    if machine.files.len() > DEVICES_MAX {
        let what =
            format!("the image has {} devices, QEMU takes {DEVICES_MAX}", machine.files.len());
        return Err(VmError::Unsupported(what));
    }
    let mut command = Command::new(program);
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    let sandbox = "on,obsolete=deny,spawn=deny,resourcecontrol=deny";
    // It has opened all files by then. A guest that breaks out of QEMU finds nothing that is its
    // own.
    match new_user(Path::new("/proc/self")) {
        Some(user) => {
            command.args(["-sandbox", sandbox]);
            command.args(become_user(program, user).at("asking", program)?);
        }
        None => _ = command.args(["-sandbox", &format!("{sandbox},elevateprivileges=deny")]),
    }
    command.args(["-name", &format!("{},debug-threads=on", machine.name)]);
    match machine.accel {
        Accel::Kvm => {
            command.args(["-accel", "kvm", "-machine", "pc,mem-merge=off", "-cpu", "host"])
        }
        // With HPET guests of QEMU 7.2's emulator were seen to hang, and cmpxchg16b to leave
        // garbage in the flags. It would keep up to 1 GiB of translated code.
        Accel::Tcg => command.args([
            "-accel",
            "tcg,tb-size=64",
            "-machine",
            "pc,hpet=off,mem-merge=off",
            "-cpu",
            "max,cx16=off",
        ]),
    };
    let devices: u64 = machine.files.iter().map(|(_, size)| size).sum();
    let most = machine.memory_bytes + devices.next_multiple_of(DEVICE_ROOM) + DEVICE_ROOM;
    command.args(["-m", &format!("size={}k,maxmem={}k", machine.memory_bytes >> 10, most >> 10)]);
    command.args(["-smp", &machine.cpus.to_string()]);
    command.arg("-kernel").arg(&machine.kernel.image).arg("-initrd").arg(machine.initramfs);
    command.args(["-append", &machine.append]);
    for (number, (path, size)) in machine.files.iter().enumerate() {
        let mut backend = OsString::from(format!("memory-backend-file,id=image{number},"));
        backend.push(format!("size={size},share=on,readonly=on,mem-path="));
        backend.push(escaped(path));
        let (slot, function) = (FIRST_SLOT + number / 8, number % 8);
        let multi = if function == 0 { ",multifunction=on" } else { "" };
        let device =
            format!("virtio-pmem-pci,memdev=image{number},addr={slot:x}.{function:x}{multi}");
        command.arg("-object").arg(backend).args(["-device", &device]);
    }
    if let Some(disk) = machine.disk {
        let mut drive = OsString::from("if=none,id=disk,format=raw,discard=unmap,file=");
        drive.push(escaped(disk));
        command.arg("-drive").arg(drive).args(["-device", "virtio-blk-pci,drive=disk"]);
    }
    command.args([
        "-device",
        "virtio-balloon-pci,id=balloon,free-page-reporting=on,deflate-on-oom=on",
    ]);
    command.args(["-device", "virtio-serial-pci"]);
    command.args(["-chardev", "stdio,id=console,signal=off"]);
    command.args(["-device", "virtconsole,chardev=console"]);
    command.args(["-chardev", &format!("socket,id=channel,fd={}", guests.as_raw_fd())]);
    command.args(["-device", &format!("virtserialport,chardev=channel,name={CHANNEL_PORT}")]);
    for (number, monitor) in monitors.iter().enumerate() {
        let fd = monitor.as_raw_fd();
        let socket = format!("socket,id=monitor{number},fd={fd},server=on,wait=off");
        let monitor = format!("chardev=monitor{number},mode=control");
        command.args(["-chardev", &socket, "-mon", &monitor]);
    }
    monitors.into_iter().chain([guests]).for_each(|fd| inherit(&mut command, fd));
    if let Some(library) = beside("libcofolio_shim.so")? {
        let preloaded = merger::preload(&mut command, &library, machine.dir, machine.memory_bytes);
        preloaded.at("listening at", machine.dir.join("merge"))?;
    }
    Ok(Launch { command, channel: Channel::Connected(channel) })
}

/// The first user id of virtual machines, and how many there are. systemd gives ids below to
/// containers, and gives none of these to anybody (its UIDS-GIDS.md).
const USER_FIRST: u64 = 1_879_048_192;
const USERS: u64 = 1 << 27;

/// A user id for a VMM. Two machines have the same one only by an unlikely chance. None if this
/// process is in a user namespace without these ids, where root is no real root either.
fn new_user(process: &Path) -> Option<u64> {
    let is_mapped = |file: &str| {
        let text = kernel_text::read(&process.join(file)).unwrap_or_default();
        text.lines().any(|line| {
            let mut numbers = line.split_whitespace().map_while(|word| word.parse::<u64>().ok());
            let first = numbers.next();
            // Between them is the id outside.
            let count = numbers.nth(1);
            let ends = |(first, count): (u64, u64)| {
                first <= USER_FIRST && { first + count >= USER_FIRST + USERS }
            };
            first.zip(count).is_some_and(ends)
        })
    };
    (is_mapped("uid_map") && is_mapped("gid_map")).then(|| USER_FIRST + random_number() % USERS)
}

/// Options by which QEMU becomes a user before the guest starts. Those before 9.1 know only the
/// first, which later ones warn of.
fn become_user(program: &Path, user: u64) -> std::io::Result<[String; 2]> {
    let help = Command::new(program).arg("-help").stdin(Stdio::null()).output()?.stdout;
    let help = String::from_utf8_lossy(&help).into_owned();
    let knows = help.lines().any(|line| line.starts_with("-run-with") && line.contains("user="));
    Ok(match knows {
        false => ["-runas".to_owned(), format!("{user}:{user}")],
        true => ["-run-with".to_owned(), format!("user={user}:{user}")],
    })
}

/// A path in an option: QEMU reads a comma as its end, and two as one.
fn escaped(path: &Path) -> OsString {
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    let bytes = path.as_os_str().as_bytes().iter();
    OsString::from_vec(bytes.flat_map(|&b| if b == b',' { vec![b, b] } else { vec![b] }).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    #[test]
    fn a_user_namespace_without_these_users_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let user = |map: &str| {
            std::fs::write(dir.path().join("uid_map"), map).unwrap();
            std::fs::write(dir.path().join("gid_map"), map).unwrap();
            new_user(dir.path())
        };
        let all = "         0          0 4294967295\n";
        assert!((USER_FIRST..USER_FIRST + USERS).contains(&user(all).unwrap()));
        assert_ne!(user(all), user(all));
        for map in ["0 100000 65536\n", "0 0 1879048192\n1879048193 5 4000000000\n", "", "x"] {
            assert_eq!(user(map), None, "{map}");
        }
    }

    #[test]
    fn a_comma_in_a_path_ends_no_option() {
        assert_eq!(escaped(Path::new("/a,b/c")), "/a,,b/c");
    }
}
