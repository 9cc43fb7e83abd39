//! The balloon of a guest: what it says of the guest, and the two sizes of a pulse.
//!
//! | VMM | the guest's statistics | sizes |
//! |---|---|---|
//! | QEMU | every second | bytes |
//! | Firecracker | if it was started with them | MiB |
//! | Cloud Hypervisor | none | bytes |

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use crate::vm::http::Api;
use crate::vm::qmp::Qmp;
use crate::vm::{VmRecord, Vmm, socket};

/// What a guest says of its memory. It may lie: then it harms itself alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::vm) struct GuestMemory {
    /// Free bytes.
    pub(super) free: u64,
    /// Bytes of files in its caches.
    pub(super) caches: u64,
    /// How often it swapped in or read again what it had dropped.
    pub(super) stalls: u64,
}

/// What a VMM says of its machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::vm) struct Description {
    /// Its name, if it has one.
    pub(in crate::vm) name: Option<String>,
    /// Memory in bytes, whatever its balloon has of it.
    pub(in crate::vm) memory_bytes: u64,
    /// Number of processors.
    pub(in crate::vm) cpus: u32,
    /// The process, or one of its threads: by the kernel's word who listens, by its own who it is.
    pub(in crate::vm) tasks: Vec<u32>,
    /// From one question for statistics to the next; 0 if there are none.
    pub(in crate::vm) statistics_seconds: u64,
}

/// The balloon of one guest, whatever its VMM.
pub(in crate::vm) trait Balloon: Send + std::fmt::Debug {
    /// What the VMM says of the machine.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn describe(&mut self) -> io::Result<Description>;

    /// Has the VMM ask the guest for statistics so often.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn ask_every(&mut self, seconds: u64) -> io::Result<()>;

    /// What the guest said last; none if it has said nothing yet.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn guest(&mut self) -> io::Result<Option<GuestMemory>>;

    /// Bytes that the guest has outside of its balloon.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn actual(&mut self) -> io::Result<u64>;

    /// Asks the guest to have so many bytes outside of its balloon.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn set(&mut self, bytes: u64) -> io::Result<()>;

    /// Why it would be unsafe, or of no use, to take memory from the guest.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn refusal(&mut self) -> io::Result<Option<String>>;
}

/// From one question of the VMM's to the guest to the next, in seconds: the least that there is.
pub(in crate::vm) const STATISTICS_SECONDS: u64 = 1;
/// Without it a guest that needs memory during a pulse kills programs.
const NO_DEFLATE: &str = "its balloon does not deflate on OOM (deflate-on-oom), so a guest that \
    needs memory during a pulse could kill programs";

/// The balloon of a machine that has this directory, asked for statistics as often as can be.
///
/// # Errors
/// Those of [`connect`].
pub(super) fn open(record: &VmRecord, dir: &Path) -> io::Result<Box<dyn Balloon>> {
    let mut balloon = match (record.attached(), record.vmm) {
        (Some(attached), vmm) => connect(vmm, &attached.socket)?,
        (None, Vmm::Qemu) => connect(Vmm::Qemu, &dir.join("recycle"))?,
        (None, vmm) => connect(vmm, &dir.join(vmm.socket()))?,
    };
    balloon.ask_every(STATISTICS_SECONDS)?;
    Ok(balloon)
}

/// The balloon behind a control socket.
///
/// # Errors
/// Those of the socket; `Unsupported` if the machine has no balloon.
pub(in crate::vm) fn connect(vmm: Vmm, path: &Path) -> io::Result<Box<dyn Balloon>> {
    Ok(match vmm {
        Vmm::Qemu => Box::new(QemuBalloon::new(socket::connect_path(path)?)?),
        Vmm::CloudHypervisor => Box::new(CloudHypervisorBalloon::new(Api::at(path))?),
        Vmm::Firecracker => Box::new(FirecrackerBalloon::new(Api::at(path))?),
    })
}

fn no_balloon() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "it has no balloon")
}

fn number(answer: &Value, name: &str) -> io::Result<u64> {
    answer[name].as_u64().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("its answer has no {name}"))
    })
}

/// Its balloon is one of several kinds.
const BALLOON_TYPE: &str = "child<virtio-balloon";

/// That of a QEMU.
#[derive(Debug)]
struct QemuBalloon {
    qmp: Qmp,
    /// Where QEMU has the device.
    path: String,
}

impl QemuBalloon {
    fn new(socket: UnixStream) -> io::Result<Self> {
        let mut qmp = Qmp::new(socket)?;
        let path = find(&mut qmp)?.ok_or_else(no_balloon)?;
        Ok(Self { qmp, path })
    }

    fn property(&mut self, name: &str) -> io::Result<Value> {
        self.qmp.call("qom-get", json!({"path": self.path, "property": name}))
    }
}

/// The path of a balloon among the devices that have a name, and those that have none.
fn find(qmp: &mut Qmp) -> io::Result<Option<String>> {
    for parent in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let devices = qmp.call("qom-list", json!({"path": parent}))?;
        let is_balloon = |device: &&Value| {
            device["type"].as_str().is_some_and(|kind| kind.starts_with(BALLOON_TYPE))
        };
        let found = devices.as_array().into_iter().flatten().find(is_balloon);
        if let Some(name) = found.and_then(|device| device["name"].as_str()) {
            return Ok(Some(format!("{parent}/{name}")));
        }
    }
    Ok(None)
}

impl Balloon for QemuBalloon {
    fn describe(&mut self) -> io::Result<Description> {
        let name = self.qmp.call("query-name", json!({}))?;
        let memory = self.qmp.call("query-memory-size-summary", json!({}))?;
        let plugged = memory["plugged-memory"].as_u64().unwrap_or(0);
        let cpus = self.qmp.call("query-cpus-fast", json!({}))?;
        let cpus = cpus.as_array().cloned().unwrap_or_default();
        let thread = cpus.first().and_then(|cpu| cpu["thread-id"].as_u64());
        let thread = thread.and_then(|thread| u32::try_from(thread).ok());
        let statistics = self.property("guest-stats-polling-interval")?;
        Ok(Description {
            name: name["name"].as_str().map(str::to_owned),
            memory_bytes: number(&memory, "base-memory")? + plugged,
            cpus: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
            // Who starts a QEMU may have made the socket for it.
            tasks: self.qmp.peer().into_iter().chain(thread).collect(),
            statistics_seconds: statistics.as_u64().unwrap_or(0),
        })
    }

    fn ask_every(&mut self, seconds: u64) -> io::Result<()> {
        let property = "guest-stats-polling-interval";
        let set = json!({"path": self.path, "property": property, "value": seconds});
        self.qmp.call("qom-set", set).map(drop)
    }

    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        let said = self.property("guest-stats")?;
        // What a guest does not say is -1, as an unsigned number.
        let figure = |name: &str| said["stats"][name].as_u64().filter(|it| *it < u64::MAX);
        if said["last-update"].as_i64().is_none_or(|at| at == 0) {
            return Ok(None);
        }
        Ok(figure("stat-free-memory").map(|free| GuestMemory {
            free,
            caches: figure("stat-disk-caches").unwrap_or(0),
            stalls: figure("stat-swap-in").unwrap_or(0),
        }))
    }

    fn actual(&mut self) -> io::Result<u64> {
        let said = self.qmp.call("query-balloon", json!({}))?;
        said["actual"].as_u64().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn set(&mut self, bytes: u64) -> io::Result<()> {
        self.qmp.call("balloon", json!({ "value": bytes })).map(drop)
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        if self.property("deflate-on-oom")? != true {
            return Ok(Some(NO_DEFLATE.to_owned()));
        }
        // QEMU from 7.2 on. An older one is asked in vain, and what it would say stays unknown.
        let path = format!("{}/virtio-backend", self.path);
        let status = self.qmp.call("x-query-virtio-status", json!({ "path": path }));
        let features = status.map(|status| status["guest-features"]["dev-features"].to_string());
        let poisons = features.is_ok_and(|features| features.contains("F_PAGE_POISON"));
        Ok(poisons.then(|| "the guest writes a pattern to free pages (page poisoning)".to_owned()))
    }
}

/// That of a Firecracker (`docs/ballooning.md` of 1.14 and newer).
#[derive(Debug)]
struct FirecrackerBalloon {
    api: Api,
    memory_bytes: u64,
    cpus: u32,
    has_statistics: bool,
}

const STATISTICS: &str = "/balloon/statistics";

impl FirecrackerBalloon {
    fn new(api: Api) -> io::Result<Self> {
        let machine = api.get("/machine-config")?;
        let balloon = api.get("/balloon")?;
        Ok(Self {
            memory_bytes: number(&machine, "mem_size_mib")? << 20,
            cpus: u32::try_from(number(&machine, "vcpu_count")?).unwrap_or(u32::MAX),
            has_statistics: balloon["stats_polling_interval_s"].as_u64().is_some_and(|it| it > 0),
            api,
        })
    }
}

impl Balloon for FirecrackerBalloon {
    fn describe(&mut self) -> io::Result<Description> {
        let instance = self.api.get("/")?;
        let balloon = self.api.get("/balloon")?;
        Ok(Description {
            name: instance["id"].as_str().map(str::to_owned),
            memory_bytes: self.memory_bytes,
            cpus: self.cpus,
            tasks: self.api.peer().into_iter().collect(),
            statistics_seconds: balloon["stats_polling_interval_s"].as_u64().unwrap_or(0),
        })
    }

    fn ask_every(&mut self, seconds: u64) -> io::Result<()> {
        // They can be had only from the start.
        if !self.has_statistics {
            return Ok(());
        }
        self.api.send("PATCH", STATISTICS, &json!({"stats_polling_interval_s": seconds}))
    }

    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        if !self.has_statistics {
            return Ok(None);
        }
        let said = self.api.get(STATISTICS)?;
        Ok(said["free_memory"].as_u64().map(|free| GuestMemory {
            free,
            caches: said["disk_caches"].as_u64().unwrap_or(0),
            stalls: said["swap_in"].as_u64().unwrap_or(0),
        }))
    }

    fn actual(&mut self) -> io::Result<u64> {
        let held = if self.has_statistics {
            number(&self.api.get(STATISTICS)?, "actual_pages")? << 12
        } else {
            number(&self.api.get("/balloon")?, "amount_mib")? << 20
        };
        Ok(self.memory_bytes.saturating_sub(held))
    }

    fn set(&mut self, bytes: u64) -> io::Result<()> {
        let held = self.memory_bytes.saturating_sub(bytes);
        self.api.send("PATCH", "/balloon", &json!({"amount_mib": held >> 20}))
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        if !self.has_statistics {
            let why = "its balloon was started without statistics (stats_polling_interval_s), by \
                which free memory is known";
            return Ok(Some(why.to_owned()));
        }
        let deflates = self.api.get("/balloon")?["deflate_on_oom"] == true;
        Ok((!deflates).then(|| NO_DEFLATE.to_owned()))
    }
}

/// That of a Cloud Hypervisor (`vmm/src/api/openapi/cloud-hypervisor.yaml` of 54).
#[derive(Debug)]
struct CloudHypervisorBalloon {
    api: Api,
    memory_bytes: u64,
}

const INFO: &str = "/api/v1/vm.info";

impl CloudHypervisorBalloon {
    fn new(api: Api) -> io::Result<Self> {
        let info = api.get(INFO)?;
        if info["config"]["balloon"].is_null() {
            return Err(no_balloon());
        }
        let memory_bytes = number(&info["config"]["memory"], "size")?;
        Ok(Self { api, memory_bytes })
    }
}

impl Balloon for CloudHypervisorBalloon {
    fn describe(&mut self) -> io::Result<Description> {
        let ping = self.api.get("/api/v1/vmm.ping")?;
        let info = self.api.get(INFO)?;
        let pid = ping["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        Ok(Description {
            name: None,
            memory_bytes: self.memory_bytes,
            cpus: u32::try_from(number(&info["config"]["cpus"], "boot_vcpus")?).unwrap_or(u32::MAX),
            tasks: self.api.peer().into_iter().chain(pid).collect(),
            statistics_seconds: 0,
        })
    }

    fn ask_every(&mut self, _seconds: u64) -> io::Result<()> {
        Ok(())
    }

    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        Ok(None)
    }

    fn actual(&mut self) -> io::Result<u64> {
        number(&self.api.get(INFO)?, "memory_actual_size")
    }

    fn set(&mut self, bytes: u64) -> io::Result<()> {
        let held = self.memory_bytes.saturating_sub(bytes);
        self.api.send("PUT", "/api/v1/vm.resize", &json!({"desired_balloon": held}))
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        let reports = self.api.get(INFO)?["config"]["balloon"]["free_page_reporting"] == true;
        let less = "Cloud Hypervisor says nothing of its guest's free memory";
        Ok(Some(match reports {
            true => format!("{less}; what the guest reports by itself is returned"),
            false => format!("{less}, and its balloon has no free_page_reporting"),
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;
    use crate::vm::http::tests::replay;

    const MIB: u64 = 1 << 20;

    /// Answers as in `docs/ballooning.md` and the API's description.
    #[test]
    fn a_firecracker_takes_mebibytes() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let machine = r#"{"vcpu_count":2,"mem_size_mib":512,"smt":false,"track_dirty_pages":false,"huge_pages":"None"}"#;
        let balloon = r#"{"amount_mib":0,"deflate_on_oom":true,"stats_polling_interval_s":5,"free_page_hinting":false,"free_page_reporting":true}"#;
        let silent = r#"{"target_pages":0,"actual_pages":0,"target_mib":0,"actual_mib":0}"#;
        let statistics = r#"{"target_pages":25600,"actual_pages":25599,"target_mib":100,"actual_mib":99,"swap_in":8192,"swap_out":0,"major_faults":13,"minor_faults":9,"free_memory":104857600,"total_memory":520000000,"available_memory":300000000,"disk_caches":1048576,"hugetlb_allocations":0,"hugetlb_failures":0}"#;
        let info =
            r#"{"id":"web","state":"Running","vmm_version":"1.17.0","app_name":"Firecracker"}"#;
        let every = |seconds: u64| json!({"stats_polling_interval_s": seconds});
        let server = replay(
            &socket,
            vec![
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /", Value::Null, "200", info),
                ("GET /balloon", Value::Null, "200", balloon),
                ("PATCH /balloon/statistics", every(1), "204", ""),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /balloon/statistics", Value::Null, "200", silent),
                ("PATCH /balloon", json!({"amount_mib": 100}), "204", ""),
                ("GET /balloon/statistics", Value::Null, "200", statistics),
                ("GET /balloon/statistics", Value::Null, "200", statistics),
                ("PATCH /balloon", json!({"amount_mib": 0}), "204", ""),
            ],
        );
        let mut it = connect(Vmm::Firecracker, &socket).unwrap();
        let described = it.describe().unwrap();
        // Who serves the socket here is this process; that took a connection without a request.
        let expected = Description {
            name: Some("web".to_owned()),
            memory_bytes: 512 * MIB,
            cpus: 2,
            tasks: vec![std::process::id()],
            statistics_seconds: 5,
        };
        assert_eq!(described, expected);
        it.ask_every(1).unwrap();
        assert_eq!(it.refusal().unwrap(), None);
        assert_eq!(it.guest().unwrap(), None);
        it.set(412 * MIB).unwrap();
        let said = GuestMemory { free: 100 * MIB, caches: MIB, stalls: 8192 };
        assert_eq!(it.guest().unwrap(), Some(said));
        assert_eq!(it.actual().unwrap(), 412 * MIB + 4096);
        it.set(512 * MIB).unwrap();
        server.join().unwrap();
    }

    #[test]
    fn a_firecracker_without_statistics_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let machine = r#"{"vcpu_count":1,"mem_size_mib":128}"#;
        let balloon = r#"{"amount_mib":16,"deflate_on_oom":true,"stats_polling_interval_s":0}"#;
        let hard = r#"{"amount_mib":0,"deflate_on_oom":false,"stats_polling_interval_s":1}"#;
        let none = r#"{"fault_message":"No balloon device found."}"#;
        let server = replay(
            &socket,
            vec![
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "200", hard),
                ("GET /balloon", Value::Null, "200", hard),
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "400", none),
            ],
        );
        let mut it = connect(Vmm::Firecracker, &socket).unwrap();
        // Nothing of this is asked: it would be refused.
        it.ask_every(1).unwrap();
        assert_eq!(it.guest().unwrap(), None);
        assert!(it.refusal().unwrap().unwrap().contains("stats_polling_interval_s"));
        assert_eq!(it.actual().unwrap(), 112 * MIB);
        let mut it = connect(Vmm::Firecracker, &socket).unwrap();
        assert_eq!(it.refusal().unwrap().as_deref(), Some(NO_DEFLATE));
        let error = connect(Vmm::Firecracker, &socket).unwrap_err().to_string();
        assert!(error.contains("No balloon device found"), "{error}");
        server.join().unwrap();
    }

    /// Answers as those of 54 that this was tried with, less what nobody reads.
    #[test]
    fn a_cloud_hypervisor_says_nothing_of_its_guest() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let info = r#"{"config":{"cpus":{"boot_vcpus":2,"max_vcpus":2,"kvm_hyperv":false,"max_phys_bits":46,"features":{"amx":false},"nested":true},"memory":{"size":536870912,"mergeable":false,"hotplug_method":"Acpi","shared":false,"hugepages":false,"prefault":false,"reserve":false,"thp":true},"payload":{"kernel":"vmlinuz","cmdline":"console=hvc0"},"balloon":{"pci_segment":0,"size":0,"deflate_on_oom":true,"free_page_reporting":true}},"state":"Running","memory_actual_size":536870912,"device_tree":{}}"#;
        let bare = r#"{"config":{"memory":{"size":536870912}},"state":"Running","memory_actual_size":536870912}"#;
        let ping = self.api.get("/api/v1/vmm.ping")?;
        let info = self.api.get(INFO)?;
        let pid = ping["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        Ok(Description {
            name: None,
            memory_bytes: self.memory_bytes,
            cpus: u32::try_from(number(&info["config"]["cpus"], "boot_vcpus")?).unwrap_or(u32::MAX),
            tasks: self.api.peer().into_iter().chain(pid).collect(),
            statistics_seconds: 0,
        })
    }

    fn ask_every(&mut self, _seconds: u64) -> io::Result<()> {
        Ok(())
    }

    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        Ok(None)
    }

    fn actual(&mut self) -> io::Result<u64> {
        number(&self.api.get(INFO)?, "memory_actual_size")
    }

    fn set(&mut self, bytes: u64) -> io::Result<()> {
        let held = self.memory_bytes.saturating_sub(bytes);
        self.api.send("PUT", "/api/v1/vm.resize", &json!({"desired_balloon": held}))
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        let reports = self.api.get(INFO)?["config"]["balloon"]["free_page_reporting"] == true;
        let less = "Cloud Hypervisor says nothing of its guest's free memory";
        Ok(Some(match reports {
            true => format!("{less}; what the guest reports by itself is returned"),
            false => format!("{less}, and its balloon has no free_page_reporting"),
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;
    use crate::vm::http::tests::replay;

    const MIB: u64 = 1 << 20;

    /// Answers as in `docs/ballooning.md` and the API's description.
    #[test]
    fn a_firecracker_takes_mebibytes() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let machine = r#"{"vcpu_count":2,"mem_size_mib":512,"smt":false,"track_dirty_pages":false,"huge_pages":"None"}"#;
        let balloon = r#"{"amount_mib":0,"deflate_on_oom":true,"stats_polling_interval_s":5,"free_page_hinting":false,"free_page_reporting":true}"#;
        let silent = r#"{"target_pages":0,"actual_pages":0,"target_mib":0,"actual_mib":0}"#;
        let statistics = r#"{"target_pages":25600,"actual_pages":25599,"target_mib":100,"actual_mib":99,"swap_in":8192,"swap_out":0,"major_faults":13,"minor_faults":9,"free_memory":104857600,"total_memory":520000000,"available_memory":300000000,"disk_caches":1048576,"hugetlb_allocations":0,"hugetlb_failures":0}"#;
        let info =
            r#"{"id":"web","state":"Running","vmm_version":"1.17.0","app_name":"Firecracker"}"#;
        let every = |seconds: u64| json!({"stats_polling_interval_s": seconds});
        let server = replay(
            &socket,
            vec![
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /", Value::Null, "200", info),
                ("GET /balloon", Value::Null, "200", balloon),
                ("PATCH /balloon/statistics", every(1), "204", ""),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /balloon/statistics", Value::Null, "200", silent),
                ("PATCH /balloon", json!({"amount_mib": 100}), "204", ""),
                ("GET /balloon/statistics", Value::Null, "200", statistics),
                ("GET /balloon/statistics", Value::Null, "200", statistics),
                ("PATCH /balloon", json!({"amount_mib": 0}), "204", ""),
            ],
        );
        let mut it = connect(Vmm::Firecracker, &socket).unwrap();
        let described = it.describe().unwrap();
        // Who serves the socket here is this process; that took a connection without a request.
        let expected = Description {
            name: Some("web".to_owned()),
            memory_bytes: 512 * MIB,
            cpus: 2,
            tasks: vec![std::process::id()],
            statistics_seconds: 5,
        };
        assert_eq!(described, expected);
        it.ask_every(1).unwrap();
        assert_eq!(it.refusal().unwrap(), None);
        assert_eq!(it.guest().unwrap(), None);
        it.set(412 * MIB).unwrap();
        let said = GuestMemory { free: 100 * MIB, caches: MIB, stalls: 8192 };
        assert_eq!(it.guest().unwrap(), Some(said));
        assert_eq!(it.actual().unwrap(), 412 * MIB + 4096);
        it.set(512 * MIB).unwrap();
        server.join().unwrap();
    }

    #[test]
    fn a_firecracker_without_statistics_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let machine = r#"{"vcpu_count":1,"mem_size_mib":128}"#;
        let balloon = r#"{"amount_mib":16,"deflate_on_oom":true,"stats_polling_interval_s":0}"#;
        let hard = r#"{"amount_mib":0,"deflate_on_oom":false,"stats_polling_interval_s":1}"#;
        let none = r#"{"fault_message":"No balloon device found."}"#;
        let server = replay(
            &socket,
            vec![
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /balloon", Value::Null, "200", balloon),
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "200", hard),
                ("GET /balloon", Value::Null, "200", hard),
                ("GET /machine-config", Value::Null, "200", machine),
                ("GET /balloon", Value::Null, "400", none),
            ],
        );
        let mut it = connect(Vmm::Firecracker, &socket).unwrap();
        // Nothing of this is asked: it would be refused.
        it.ask_every(1).unwrap();
        assert_eq!(it.guest().unwrap(), None);
        assert!(it.refusal().unwrap().unwrap().contains("stats_polling_interval_s"));
        assert_eq!(it.actual().unwrap(), 112 * MIB);
        let mut it = connect(Vmm::Firecracker, &socket).unwrap();
        assert_eq!(it.refusal().unwrap().as_deref(), Some(NO_DEFLATE));
        let error = connect(Vmm::Firecracker, &socket).unwrap_err().to_string();
        assert!(error.contains("No balloon device found"), "{error}");
        server.join().unwrap();
    }

    /// Answers as those of 54 that this was tried with, less what nobody reads.
    #[test]
    fn a_cloud_hypervisor_says_nothing_of_its_guest() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let info = r#"{"config":{"cpus":{"boot_vcpus":2,"max_vcpus":2,"kvm_hyperv":false,"max_phys_bits":46,"features":{"amx":false},"nested":true},"memory":{"size":536870912,"mergeable":false,"hotplug_method":"Acpi","shared":false,"hugepages":false,"prefault":false,"reserve":false,"thp":true},"payload":{"kernel":"vmlinuz","cmdline":"console=hvc0"},"balloon":{"pci_segment":0,"size":0,"deflate_on_oom":true,"free_page_reporting":true}},"state":"Running","memory_actual_size":536870912,"device_tree":{}}"#;
        let bare = r#"{"config":{"cpus":{"boot_vcpus":1,"max_vcpus":1},"memory":{"size":536870912},"balloon":null},"state":"Running","memory_actual_size":536870912}"#;
        let ping = r#"{"build_version":"v53.0-246-gae44c2971","version":"54.0.0","pid":4711,"features":["io_uring","kvm"]}"#;
        let server = replay(
            &socket,
            vec![
                ("GET /api/v1/vm.info", Value::Null, "200", info),
                ("GET /api/v1/vmm.ping", Value::Null, "200", ping),
                ("GET /api/v1/vm.info", Value::Null, "200", info),
                ("GET /api/v1/vm.info", Value::Null, "200", info),
                ("GET /api/v1/vm.info", Value::Null, "200", info),
                ("PUT /api/v1/vm.resize", json!({"desired_balloon": 8 * MIB}), "204", ""),
                ("GET /api/v1/vm.info", Value::Null, "200", bare),
            ],
        );
        let mut it = connect(Vmm::CloudHypervisor, &socket).unwrap();
        let described = it.describe().unwrap();
        assert_eq!((described.memory_bytes, described.cpus), (512 * MIB, 2));
        assert_eq!(described.tasks, [std::process::id(), 4711]);
        assert_eq!(it.guest().unwrap(), None);
        assert!(it.refusal().unwrap().unwrap().contains("by itself"));
        assert_eq!(it.actual().unwrap(), 512 * MIB);
        it.set(504 * MIB).unwrap();
        let error = connect(Vmm::CloudHypervisor, &socket).unwrap_err().to_string();
        assert!(error.contains("no balloon"), "{error}");
        server.join().unwrap();
    }
}
