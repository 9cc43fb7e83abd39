//! The balloon of a Firecracker.

use std::io;
use std::time::Duration;

use serde_json::json;

use super::{Balloon, Description, GuestMemory, NO_DEFLATE, number};
use crate::vm::http::Api;

/// That of a Firecracker (`docs/ballooning.md` of 1.14 and newer).
#[derive(Debug)]
pub(super) struct FirecrackerBalloon {
    api: Api,
    memory_bytes: u64,
    cpus: u32,
    /// From one question to the guest for statistics to the next; 0 if there are none.
    statistics_seconds: u64,
}

const STATISTICS: &str = "/balloon/statistics";

impl FirecrackerBalloon {
    pub(super) fn new(api: Api) -> io::Result<Self> {
        let machine = api.get("/machine-config")?;
        let balloon = api.get("/balloon")?;
        Ok(Self {
            memory_bytes: number(&machine, "mem_size_mib")? << 20,
            cpus: u32::try_from(number(&machine, "vcpu_count")?).unwrap_or(u32::MAX),
            statistics_seconds: balloon["stats_polling_interval_s"].as_u64().unwrap_or(0),
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
        if self.statistics_seconds == 0 {
            return Ok(());
        }
        self.api.send("PATCH", STATISTICS, &json!({"stats_polling_interval_s": seconds}))?;
        self.statistics_seconds = seconds;
        Ok(())
    }

    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        if self.statistics_seconds == 0 {
            return Ok(None);
        }
        let said = self.api.get(STATISTICS)?;
        Ok(said["free_memory"].as_u64().map(|free| GuestMemory {
            // It does not say when it has asked.
            age: Duration::from_secs(self.statistics_seconds),
            free,
            caches: said["disk_caches"].as_u64().unwrap_or(0),
            stalls: said["swap_in"].as_u64().unwrap_or(0),
        }))
    }

    fn actual(&mut self) -> io::Result<u64> {
        let held = if self.statistics_seconds > 0 {
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
        if self.statistics_seconds == 0 {
            let why = "its balloon was started without statistics (stats_polling_interval_s), by \
                which free memory is known";
            return Ok(Some(why.to_owned()));
        }
        let deflates = self.api.get("/balloon")?["deflate_on_oom"] == true;
        Ok((!deflates).then(|| NO_DEFLATE.to_owned()))
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

    /// Answers as those of 1.17-dev that this was tried with; the statistics of a guest as in
    /// `docs/ballooning.md`.
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
        let age = Duration::from_secs(1);
        let said = GuestMemory { age, free: 100 * MIB, caches: MIB, stalls: 8192 };
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
        let none = r#"{"fault_message":"Balloon config error: No balloon device found."}"#;
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
}
