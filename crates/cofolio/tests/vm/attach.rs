//! `cofolio vm attach`: machines that somebody else has started, with whatever he likes.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cofolio_node::vm::Kernel;
use cofolio_node::vm::qmp::Qmp;
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::{Value, json};

use super::common::{Killed, program};
use super::{Host, host, until};

/// A QEMU of somebody else's.
struct Stranger {
    qmp: PathBuf,
    vmm: Killed,
}

impl Stranger {
    fn start(qmp: PathBuf, options: &[&str]) -> Self {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-display", "none", "-accel", "tcg,tb-size=64"]);
        command.arg("-qmp").arg(format!("unix:{},server,wait=off", qmp.display()));
        let vmm = Killed::start(command.args(options).stdout(Stdio::null()));
        until("QEMU listens", || qmp.exists().then_some(()));
        Self { qmp, vmm }
    }

    fn ask(&self, command: &str, arguments: Value) -> Value {
        let socket = UnixStream::connect(&self.qmp).unwrap();
        Qmp::new(socket).unwrap().call(command, arguments).unwrap()
    }

    fn ask_guest_every(&self, seconds: u64) {
        let property = "guest-stats-polling-interval";
        let set = json!({"path": "/machine/peripheral/b", "property": property, "value": seconds});
        self.ask("qom-set", set);
    }

    fn interval(&self) -> Value {
        let property = "guest-stats-polling-interval";
        self.ask("qom-get", json!({"path": "/machine/peripheral/b", "property": property}))
    }

    fn held(&self, counter: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.vmm.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(counter)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }
}

const BALLOON: &str = "virtio-balloon-pci,id=b,deflate-on-oom=on";

fn shell(dir: &Path, script: &str) {
    let done = Command::new("sh").args(["-c", script]).current_dir(dir).status().unwrap();
    assert!(done.success(), "{script}");
}

/// An initramfs with a shell, whose program fills memory and frees it some seconds later.
fn initramfs(host: &Host) -> String {
    let dir = host.dir("initramfs");
    let script = "#!/busybox sh
        for d in dev proc tmp; do /busybox mkdir /$d; done
        /busybox mount -t devtmpfs dev /dev; /busybox mount -t proc proc /proc
        for m in /modules/*; do /busybox insmod $m || echo no $m; done
        /busybox mount -t tmpfs -o size=190m f /tmp
        /busybox dd if=/dev/zero of=/tmp/x bs=1M count=170 2>/dev/null; echo filled
        /busybox sleep 8; /busybox rm /tmp/x; echo freed
        while :; do /busybox sleep 1000; done\n";
    fs::write(dir.join("init"), script).unwrap();
    fs::copy(program("busybox").unwrap(), dir.join("busybox")).unwrap();
    shell(&dir, "chmod 755 init busybox; mkdir modules");
    let modules = Kernel::open(Path::new(&host.kernel)).unwrap().modules(&[]).unwrap();
    let needed = ["virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev"];
    let needed = [&needed[..], &["virtio_pci", "virtio_balloon"]].concat();
    for (number, (name, content)) in modules.iter().enumerate() {
        if needed.contains(&name.as_str()) {
            fs::write(dir.join(format!("modules/{number:02}")), content).unwrap();
        }
    }
    shell(&dir, "find . | busybox cpio -o -H newc >../initramfs.cpio");
    host.text("initramfs.cpio")
}

/// The guest has a distribution's kernel as it is, and reports no free pages by itself.
#[test]
fn memory_that_a_strangers_guest_frees_is_returned() {
    let Some(host) = host("memory_that_a_strangers_guest_frees_is_returned") else { return };
    let initramfs = initramfs(&host);
    let config = host.path("config.toml");
    let daemon = host.text("daemon.sock");
    fs::write(&config, format!("[daemon]\nsocket = '{daemon}'\n")).unwrap();
    let config = ["--config", config.to_str().unwrap()];
    let serve = || {
        let mut serve = host.command(&[&config[..], &["serve"]].concat());
        Killed::start(serve.stdout(Stdio::null()))
    };
    let run = |args: &[&str]| host.run(&[&config[..], args].concat());

    let shared = ["-object", "memory-backend-memfd,id=m,size=320M,share=on"];
    let shared = [&shared[..], &["-machine", "pc,hpet=off,memory-backend=m"]].concat();
    let private = vec!["-machine", "pc,hpet=off"];
    for (name, memory, counter) in
        [("private", private, "RssAnon:"), ("shared", shared, "RssShmem:")]
    {
        let output = host.path(name);
        let serial = format!("file:{}", output.display());
        let guest = ["-m", "320M", "-name", "web", "-device", BALLOON, "-serial", &serial];
        let boot = ["-kernel", &host.kernel, "-initrd", &initramfs, "-cpu", "max,cx16=off"];
        let append = ["-append", "console=ttyS0 quiet no_timer_check"];
        let options = [&memory[..], &guest, &boot, &append].concat();
        let mut stranger = Stranger::start(host.path(&format!("{name}.qmp")), &options);
        let said = || fs::read_to_string(&output).unwrap_or_default();
        until("the guest has filled its memory", || said().contains("filled").then_some(()));
        let filled = stranger.held(counter);
        let daemon = serve();
        let qmp = stranger.qmp.to_str().unwrap();
        assert_eq!(run(&["vm", "attach", "--qmp", qmp, "--name", name]).ok(), format!("{name}\n"));
        let ps = run(&["vm", "ps", "--json"]).json();
        let pid = u64::from(stranger.vmm.0.id());
        assert_eq!((&ps[0]["pid"], &ps[0]["state"]), (&pid.into(), &"running".into()), "{ps}");
        until("the guest has freed its memory", || said().contains("freed").then_some(()));
        until("it is returned", || (stranger.held(counter) + 90 < filled).then_some(()));
        let account = until("the daemon has taken account of it", || {
            let top = run(&["vm", "top", "--json"]);
            let top: Value = serde_json::from_str(&top.stdout).ok()?;
            let account = top["machines"][0].clone();
            (account["recycling"]["returned_bytes"].as_u64()? >= 90 << 20).then_some(account)
        });
        assert_eq!((&account["name"], &account["attended"]), (&name.into(), &false.into()));
        let bytes = |of: &[&str]| of.iter().map(|it| account[it].as_u64().unwrap()).sum::<u64>();
        let mut known = bytes(&["used_bytes", "cache_bytes", "unreturned_bytes"]);
        if counter == "RssAnon:" {
            known += bytes(&["emulator_bytes"]);
        }
        let held = stranger.held(counter) << 20;
        assert!(held.abs_diff(known) < 24 << 20, "{held} {account}");

        // Nothing else can be done with it.
        run(&["vm", "stop", name]).fails_with(2).refused("vm detach");
        run(&["vm", "exec", name, "true"]).fails_with(2).refused("somebody else");
        run(&["vm", "console", name]).fails_with(2);
        // A daemon that was killed can leave the balloon inflated. It is as it was then, too.
        drop(daemon);
        stranger.ask("balloon", json!({"value": 250 << 20}));
        let actual = || stranger.ask("query-balloon", json!({}))["actual"].as_u64().unwrap();
        until("the balloon is inflated", || (actual() <= 251 << 20).then_some(()));
        run(&["vm", "detach", name]).ok();
        assert_eq!(run(&["vm", "ps", "--json"]).json(), json!([]));
        assert_eq!(actual(), 320 << 20);
        assert_eq!(stranger.interval(), 0);
        run(&["vm", "detach", name]).fails_with(3);

        // Its end is noticed, and its name is free then.
        let _daemon = serve();
        run(&["vm", "attach", "--qmp", qmp, "--name", name]).ok();
        until("the account has it", || {
            let top: Value = serde_json::from_str(&run(&["vm", "top", "--json"]).stdout).ok()?;
            (top["machines"][0]["name"] == name).then_some(())
        });
        stranger.vmm.0.kill().unwrap();
        // Nobody has reaped it yet.
        until("its end is noticed", || {
            let ps = run(&["vm", "ps", "--json"]).json();
            (ps[0]["state"] == "ended" && ps[0]["pid"].is_null()).then_some(())
        });
        until("the account has it no longer", || {
            let top = run(&["vm", "top", "--json"]).json();
            (top["machines"] == json!([])).then_some(())
        });
        run(&["gc"]).ok();
        assert_eq!(run(&["vm", "ps", "--json"]).json(), json!([]));
    }
    host.assert_clean();
}

#[test]
fn a_stranger_is_asked_for_statistics_as_before_after_detach() {
    let test = "a_stranger_is_asked_for_statistics_as_before_after_detach";
    let Some(host) = host(test) else { return };
    let qmp = host.path("qmp");
    let stranger = Stranger::start(qmp.clone(), &["-m", "128M", "-S", "-device", BALLOON]);
    stranger.ask_guest_every(7);
    let qmp = qmp.to_str().unwrap();
    let name = host.run(&["vm", "attach", "--qmp", qmp]).ok().trim().to_owned();
    assert!(name.starts_with("vm-"), "{name}");
    assert_eq!(host.run(&["vm", "ps", "--json"]).json()[0]["statistics_seconds"], 7);
    // It is one machine, whatever its socket is called.
    let again = host.run(&["vm", "attach", "--qmp", qmp]);
    again.fails_with(1).refused(&format!("is virtual machine `{name}` already"));
    host.run(&["vm", "attach", "--qmp", qmp, "--name", &name]).fails_with(1);
    // As the daemon does.
    stranger.ask_guest_every(1);
    host.run(&["vm", "detach", &name]).ok();
    assert_eq!(stranger.interval(), 7);
    host.assert_clean();
}

/// What cannot be recycled is accounted for, and the reason is said.
#[test]
fn a_guest_that_a_pulse_could_harm_is_left_alone() {
    let Some(host) = host("a_guest_that_a_pulse_could_harm_is_left_alone") else { return };
    let balloon = ["-m", "128M", "-S", "-device", "virtio-balloon-pci"];
    let stranger = Stranger::start(host.path("qmp"), &balloon);
    let qmp = stranger.qmp.to_str().unwrap();
    host.run(&["vm", "attach", "--qmp", qmp, "--name", "web"]).ok();
    let socket = host.text("daemon.sock");
    let config = host.path("config.toml");
    fs::write(&config, format!("[daemon]\nsocket = '{socket}'\n")).unwrap();
    let config = ["--config", config.to_str().unwrap()];
    let mut serve = host.command(&[&config[..], &["serve"]].concat());
    let _daemon = Killed::start(serve.stdout(Stdio::null()));
    let why = until("the daemon has taken account of it", || {
        let top = host.run(&[&config[..], &["vm", "top", "--json"]].concat());
        let top: Value = serde_json::from_str(&top.stdout).ok()?;
        top["machines"][0]["recycling"]["refusal"].as_str().map(str::to_owned)
    });
    assert!(why.contains("deflate-on-oom"), "{why}");
    // The daemon has its socket now, and another one would have to wait for ever.
    host.run(&["vm", "attach", "--qmp", qmp, "--name", "again"])
        .fails_with(1)
        .refused("one client at a time");
}

#[test]
fn what_cannot_be_attached_is_named() {
    let Some(host) = host("what_cannot_be_attached_is_named") else { return };
    let attach = |socket: &Path| host.run(&["vm", "attach", "--qmp", socket.to_str().unwrap()]);
    attach(Path::new("/nowhere/qmp")).fails_with(1).refused("/nowhere/qmp");
    let bare = Stranger::start(host.path("bare"), &["-m", "128M", "-S"]);
    attach(&bare.qmp).fails_with(1).refused("no balloon");
    host.run(&["vm", "attach"]).fails_with(2);
    host.run(&["vm", "detach", "none"]).fails_with(3);

    // Who starts a QEMU may have made its socket: libvirt does.
    let path = host.path("passed");
    let listener = UnixListener::bind(&path).unwrap();
    fcntl_setfd(&listener, FdFlags::empty()).unwrap();
    let chardev = format!("socket,id=m,fd={},server=on,wait=off", listener.as_raw_fd());
    let monitor = ["-chardev", &chardev, "-mon", "chardev=m,mode=control"];
    let options = [&["-m", "128M", "-S", "-device", BALLOON][..], &monitor].concat();
    let stranger = Stranger::start(host.path("other"), &options);
    host.run(&["vm", "attach", "--name", "web", "--qmp", path.to_str().unwrap()]).ok();
    let ps = host.run(&["vm", "ps", "--json"]).json();
    assert_eq!(ps[0]["pid"], u64::from(stranger.vmm.0.id()));
    host.run(&["vm", "detach", "web"]).ok();
    host.assert_clean();
}
