//! The balloon of a Cloud Hypervisor.

use std::io;

use serde_json::json;

use super::{Balloon, Description, GuestMemory, no_balloon, number};
use crate::vm::http::Api;

/// That of a Cloud Hypervisor (`vmm/src/api/openapi/cloud-hypervisor.yaml` of 54).
#[derive(Debug)]
pub(super) struct CloudHypervisorBalloon {
    api: Api,
    memory_bytes: u64,
}

const INFO: &str = "/api/v1/vm.info";

impl CloudHypervisorBalloon {
    pub(super) fn new(api: Api) -> io::Result<Self> {
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

    use serde_json::Value;

    use super::super::connect;
    use super::*;
    use crate::vm::Vmm;
    use crate::vm::http::tests::replay;

    const MIB: u64 = 1 << 20;

    /// Answers as those of 54 that this was tried with, less what nobody reads.
    #[test]
    fn a_cloud_hypervisor_says_nothing_of_its_guest() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let info = r#"{"config":{"cpus":{"boot_vcpus":2,"max_vcpus":2,"kvm_hyperv":false,"max_phys_bits":46,"features":{"amx":false},"nested":true},"memory":{"size":536870912,"mergeable":false,"hotplug_method":"Acpi","shared":false,"hugepages":false,"prefault":false,"reserve":false,"thp":true},"payload":{"kernel":"vmlinuz","cmdline":"console=hvc0"},"balloon":{"pci_segment":0,"size":0,"deflate_on_oom":true,"free_page_reporting":true}},"state":"Running","memory_actual_size":536870912,"device_tree":{}}"#;
        let bare = r#"{"config":{"memory":{"size":536870912}},"state":"Running","memory_actual_size":536870912}"#;
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
