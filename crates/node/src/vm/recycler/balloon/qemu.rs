//! The balloon of a QEMU.

use std::io;
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use super::{Balloon, Description, GuestMemory, NO_DEFLATE, no_balloon, number};
use crate::vm::qmp::Qmp;

/// Its balloon is one of several kinds.
const BALLOON_TYPE: &str = "child<virtio-balloon";

/// That of a QEMU.
#[derive(Debug)]
pub(super) struct QemuBalloon {
    qmp: Qmp,
    /// Where QEMU has the device.
    path: String,
}

impl QemuBalloon {
    pub(super) fn new(socket: UnixStream) -> io::Result<Self> {
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
