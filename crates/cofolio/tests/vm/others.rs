//! `cofolio vm run --vmm`: what other VMMs than QEMU are told. They need KVM, so a script takes
//! their place, and this test is the guest.

use std::fs;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cofolio_guest::{Message, Start, Upper, VSOCK_PORT};
use serde_json::{Value, json};

use super::common::{has_ksm, program, skip};
use super::{Host, host, until};

impl Host {
    /// A program of this name in a directory of its own.
    fn fake(&self, name: &str, script: &str) -> PathBuf {
        let dir = self.dir(&format!("with-{name}"));
        let path = dir.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        dir
    }

    /// `vm run` on such a machine, with programs in this directory first.
    fn vm_run(&self, programs: &Path, vmm: &str, more: &[&str]) -> Command {
        let args = ["vm", "run", "--vmm", vmm, "--kernel", &self.kernel];
        let args = [&args[..], &["--memory", "192M", "--cpus", "2", "--name", "one"], more];
        let program = ["box:1", "--", "sh", "-c", "true"];
        let mut command = self.command(&[&args.concat()[..], &program].concat());
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", programs.display()));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// What the script complains of, in bytes: more than is kept.
const COMPLAINT_BYTES: u64 = 1 << 20;

/// Runs a machine whose VMM is a script: what the VMM is told, from its directory, and the guest.
fn told(host: &Host, vmm: &str) -> (PathBuf, Vec<String>, Start) {
    let script = format!(
        "printf '%s\\n' \"$PWD\" \"$@\" >{0}.new; cat /proc/self/smaps >{0}.smaps
        head -c {COMPLAINT_BYTES} /dev/zero >&2; mv {0}.new {0}
        echo from the console; read line <{1}; exit 0",
        host.text("told"),
        host.text("end")
    );
    let programs = host.fake(vmm, &script);
    let _ = fs::remove_file(host.path("told"));
    let _ = fs::remove_file(host.path("end"));
    assert!(Command::new("mkfifo").arg(host.path("end")).status().unwrap().success());
    let ksm: &[&str] = if has_ksm("a part of `vm run --vmm`") { &["--ksm"] } else { &[] };
    let disk = format!("{}:64M", host.text("disk"));
    let options = [&["--accel", "kvm", "--disk", &disk], ksm].concat();
    let mut run = host.vm_run(&programs, vmm, &options).spawn().unwrap();
    let said = until("the VMM is started", || {
        if let Some(status) = run.try_wait().unwrap() {
            let mut why = String::new();
            run.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            panic!("{status}: {why}");
        }
        fs::read_to_string(host.path("told")).ok()
    });
    let smaps = fs::read_to_string(host.path("told.smaps")).unwrap();
    let is_mergeable = |line: &str| line.starts_with("VmFlags:") && line.contains(" mg");
    assert_eq!(smaps.lines().any(is_mergeable), !ksm.is_empty());
    let mut lines = said.lines().map(str::to_owned);
    let dir = PathBuf::from(lines.next().unwrap());
    let args: Vec<String> = lines.collect();

    // The guest boots, and connects.
    let held = fs::File::open(&dir).unwrap();
    let socket = format!("/proc/self/fd/{}/vsock_{VSOCK_PORT}", held.as_raw_fd());
    let mut channel = UnixStream::connect(socket).unwrap();
    let Message::Start(start) = Message::read(&mut channel).unwrap() else { panic!("no start") };
    Message::Started.write(&mut channel).unwrap();
    let guest = until("it runs", || {
        let guest = host.guests().into_iter().next()?;
        (guest["state"] == "running").then_some(guest)
    });
    assert_eq!((&guest["vmm"], &guest["qmp"]), (&vmm.into(), &Value::Null));
    assert_eq!(guest["api"], dir.join("api").to_str().unwrap());
    host.run(&["vm", "exec", "one", "true"]).fails_with(5).refused("vm exec");
    // All of it was kept, in memory where `/run` is.
    let log_bytes = |name: &str| fs::metadata(dir.join(name)).map_or(0, |file| file.len());
    let kept = log_bytes("vmm.log") + log_bytes("vmm.log.1");
    assert!(kept > 0 && kept <= 128 << 10, "{kept} bytes of complaints are kept");
    let config = fs::read_to_string(dir.join("firecracker.json"));
    let args = args.into_iter().chain(config).collect();

    let mut stop = host.command(&["vm", "stop", "--time", "100", "one"]);
    let mut stop = stop.spawn().unwrap();
    assert_eq!(Message::read(&mut channel).unwrap(), Message::Signal(15));
    Message::Ended(7).write(&mut channel).unwrap();
    // By this the guest knows that its last word has arrived.
    assert_eq!(channel.read(&mut [0]).unwrap(), 0);
    fs::write(host.path("end"), "now\n").unwrap();
    let done = run.wait_with_output().unwrap();
    let (said, why) = (String::from_utf8(done.stdout).unwrap(), String::from_utf8(done.stderr));
    assert_eq!((done.status.code(), &*said), (Some(7), "from the console\n"), "{why:?}");
    assert!(stop.wait().unwrap().success());
    host.assert_clean();
    (dir, args, *start)
}

/// The host, if it can make disks; says why not.
fn host_with_disks(test: &str) -> Option<Host> {
    if program("mkfs.ext4").is_none() {
        skip(test, "no mkfs.ext4");
        return None;
    }
    host(test)
}

#[test]
fn a_cloud_hypervisor_is_told_by_options() {
    let test = "a_cloud_hypervisor_is_told_by_options";
    let Some(host) = host_with_disks(test) else { return };
    let (dir, args, start) = told(&host, "cloud-hypervisor");
    let value = |option: &str| {
        let at = args.iter().position(|arg| arg == option).unwrap();
        &*args[at + 1]
    };
    assert_eq!(value("--api-socket"), "path=api");
    assert_eq!(value("--kernel"), host.kernel);
    assert!(value("--initramfs").starts_with(dir.parent().unwrap().to_str().unwrap()));
    assert!(value("--cmdline").starts_with("console=hvc0 cofolio.channel=vsock quiet"));
    assert_eq!((value("--cpus"), value("--memory")), ("boot=2", "size=201326592"));
    assert_eq!(value("--balloon"), "size=0,deflate_on_oom=on,free_page_reporting=on");
    assert_eq!(value("--vsock"), "cid=3,socket=vsock");
    assert_eq!((value("--console"), value("--serial")), ("tty", "off"));
    let pmem: Vec<_> = args.iter().filter(|arg| arg.starts_with("file=")).collect();
    assert!(pmem.iter().all(|arg| arg.ends_with(",discard_writes=on")), "{pmem:?}");
    assert_eq!((pmem.len(), &*start.console), (start.devices.len(), "hvc0"));
    // It flushes disks without being asked to.
    assert_eq!(value("--disk"), format!("path={},image_type=raw", host.text("disk")));
    assert!(matches!(start.upper, Upper::Disk { .. }));
}

#[test]
fn a_firecracker_is_told_by_a_file() {
    let Some(host) = host_with_disks("a_firecracker_is_told_by_a_file") else { return };
    let (_, args, start) = told(&host, "firecracker");
    let (config, args) = args.split_last().unwrap();
    let options = ["--api-sock", "api", "--config-file", "firecracker.json", "--enable-pci"];
    assert_eq!(args[..5], options);
    // One log, of limited size: the VMM's standard error.
    assert_eq!(args[5..], ["--log-path", "/proc/self/fd/2", "--level", "Warn"]);
    let config: Value = serde_json::from_str(config).unwrap();
    let machine = json!({"vcpu_count": 2, "mem_size_mib": 192});
    assert_eq!(config["machine-config"], machine);
    let balloon = json!({"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1,
        "free_page_reporting": true});
    assert_eq!(config["balloon"], balloon);
    assert_eq!(config["vsock"], json!({"guest_cid": 3, "uds_path": "vsock"}));
    let boot = &config["boot-source"];
    let words = boot["boot_args"].as_str().unwrap();
    assert!(words.starts_with("console=ttyS0 reboot=k cofolio.channel=vsock cofolio.end=restart "));
    let kernel = fs::read(boot["kernel_image_path"].as_str().unwrap()).unwrap();
    assert!(kernel.starts_with(b"\x7fELF"), "it takes no compressed kernel");
    let pmem = config["pmem"].as_array().unwrap();
    assert!(pmem.iter().all(|it| it["read_only"] == true), "{pmem:?}");
    let sizes: Vec<u64> = pmem
        .iter()
        .map(|it| fs::metadata(it["path_on_host"].as_str().unwrap()).unwrap().len())
        .collect();
    let wanted: Vec<u64> = start.devices.iter().map(|device| device.size).collect();
    assert_eq!((sizes, &*start.console), (wanted, "ttyS0"));
    // Flushes were acknowledged without being performed: a crash of the host could lose data that
    // the guest had synced.
    let disk = json!([{"drive_id": "disk", "path_on_host": host.text("disk"),
        "is_root_device": false, "cache_type": "Writeback"}]);
    assert_eq!(config["drives"], disk);
    assert!(matches!(start.upper, Upper::Disk { .. }));
}

/// Nobody waits for a guest whose VMM has given up.
#[test]
fn a_vmm_that_fails_is_quoted() {
    let Some(host) = host("a_vmm_that_fails_is_quoted") else { return };
    let programs = host.fake("cloud-hypervisor", "echo no hypervisor here >&2; exit 1");
    let failed = |accel: &str| {
        let accel = ["--accel", accel];
        let done = host.vm_run(&programs, "cloud-hypervisor", &accel).output().unwrap();
        assert_eq!(done.status.code(), Some(125));
        host.assert_clean();
        String::from_utf8(done.stderr).unwrap()
    };
    let why = failed("kvm");
    assert!(why.contains("no hypervisor here"), "{why}");
    let why = failed("tcg");
    assert!(why.contains("Cloud Hypervisor needs hardware virtualisation"), "{why}");
    let done =
        host.vm_run(Path::new("/nowhere"), "firecracker", &["--accel", "kvm"]).output().unwrap();
    let why = String::from_utf8(done.stderr).unwrap();
    if program("firecracker").is_none() {
        assert!(why.contains("firecracker is not installed"), "{why}");
    }
    let done = host.vm_run(&programs, "qemu", &["--ksm"]).output().unwrap();
    let why = String::from_utf8(done.stderr).unwrap();
    assert!(why.contains("are merged by the daemon"), "{why}");
}
